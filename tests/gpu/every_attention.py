"""Runs attention's kernels once in every form, at sizes that a sanitizer gets through, and checks the numbers."""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(p) for p in (HERE.parents[1], HERE.parent, HERE.parent / "pallas_kernels", HERE)]

import steps  # noqa: E402
import test_attention_backward  # noqa: E402
import test_attention_forward  # noqa: E402

from pallas_kernels import hardware  # noqa: E402
from pallas_kernels.attention import dispatch  # noqa: E402

LENGTHS = (264, 320)  # several tiles of both, the last ones not full; a bias of them can be copied
OFTEN = ("full", "causal", "window", "lengths", "ends", "bias", "mask", "segments-causal", "everything")
RARELY = ("sinks", "bias-of-heads", "mask-of-heads", "mask-of-rows", "segments", "ends-window")


def _kinds(head_dim: int) -> tuple[str, ...]:
    return OFTEN + RARELY if head_dim == 128 else OFTEN


def forward(kind: str, head_dim: int) -> None:
    """The kernel that is chosen for a problem."""
    p = test_attention_forward.problem_of(kind, LENGTHS, (head_dim, head_dim), "bfloat16", (2, 1))
    test_attention_forward.check(p, dispatch.forward_configs(p, hardware.H200)[0])


def backward(kind: str, head_dim: int, deterministic: bool) -> None:
    """The same, of the gradients."""
    facts = {"heads": (2, 1), "deterministic": deterministic}
    p = test_attention_backward.problem_of(kind, LENGTHS, (head_dim, head_dim), "bfloat16", **facts)
    test_attention_backward.check(p, test_attention_backward.compiled(p))


def few(kind: str, page_size: int) -> None:
    """The kernels of few queries, in as many splits as there may be, of keys in pages or not."""
    p = test_attention_forward.problem_of(kind, (5, 512), (128, 128), "bfloat16", (4, 1))
    p = dataclasses.replace(p, page_size=page_size)
    config = max(dispatch.forward_configs(p, hardware.H200), key=lambda config: config.splits)
    (test_attention_forward.check_pages if page_size else test_attention_forward.check)(p, config)


def selected() -> list[tuple[str, Callable[[], None]]]:
    """Every kind of problem at every size of heads, forward and backward, in turns and in any order."""
    chosen = []
    for head_dim in (64, 128, 256):
        for i, kind in enumerate(_kinds(head_dim)):
            chosen.append((f"forward {kind} {head_dim}", functools.partial(forward, kind, head_dim)))
            orders = (False, True) if kind in ("full", "causal") else (i % 2 == 0,)
            for turns in orders:
                name = f"backward {kind} {head_dim}{' in turns' * turns}"
                chosen.append((name, functools.partial(backward, kind, head_dim, turns)))
    for kind in ("full", "key-lengths", "ends", "mask", "sinks", "bias"):
        chosen.append((f"few {kind}", functools.partial(few, kind, 0)))
    for kind, size in (("key-lengths", 16), ("ends", 128), ("ends-window", 8)):
        chosen.append((f"few {kind}, pages of {size}", functools.partial(few, kind, size)))
    return chosen


if __name__ == "__main__":
    steps.main(selected(), __doc__)
