"""Steps that a sanitizer watches, at sizes that it gets through: each kernel runs once, and its numbers are checked.

    python3 tests/gpu/steps.py every_kernel|every_attention [--part=I/N] [--only=NAME] [--after=N]

`every_kernel` has each kernel and config of rows, `every_attention` attention's kernels in every form. The output is
`steps N`, then each one's name and `done`, which is what sanitize.sh counts.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(p) for p in (HERE.parents[1], HERE.parent, HERE.parent / "pallas_kernels")]

import cases  # noqa: E402
import conformance  # noqa: E402
import test_attention_backward  # noqa: E402
import test_attention_forward  # noqa: E402
import test_linear_cross_entropy as linear  # noqa: E402
from cases import DTYPES, Op, Problem  # noqa: E402

from pallas_kernels import hardware  # noqa: E402
from pallas_kernels.attention import dispatch  # noqa: E402
from pallas_kernels.linear_cross_entropy import forward as linear_forward  # noqa: E402
from pallas_kernels.softmax.dispatch import KERNELS  # noqa: E402
from pallas_kernels.softmax.staged import StagedConfig  # noqa: E402

Steps = list[tuple[str, Callable[[], object]]]
ROWS = len(cases.ROW_KINDS) + 1
COLS = (125, 1000, 1001, 5000, 20001, 70001, 140000)
# Slices that are held in registers in part and, of one operand, interleaved as well.
REGISTER_CHUNKS = StagedConfig(ctas=2, warpgroups=2, registers=1, stages=1, rows=1, register_chunks=2)
LENGTHS = (264, 320)  # several tiles of both, the last ones not full; a bias of them can be copied
OFTEN = ("full", "causal", "window", "lengths", "ends", "bias", "mask", "segments-causal", "everything")
RARELY = ("sinks", "bias-of-heads", "mask-of-heads", "mask-of-rows", "segments", "ends-window")


def every_kernel() -> Steps:
    """Each kernel at the two smallest sizes it takes, with every config, and the variations of the smallest."""
    chosen = []
    for kernel in KERNELS.values():
        for i, op in enumerate(Op):
            dtype = DTYPES[i % len(DTYPES)]
            cols = [n for n in COLS if cases.takes(kernel, Problem(op, ROWS, n, dtype))][:2]
            chosen += [case for n in cols for case in cases.every_config(kernel, Problem(op, ROWS, n, dtype))]
            chosen += [cases.default(kernel, p) for n in cols[:1] for p in cases.variations(kernel, op, dtype, ROWS, n)]
            if kernel.name == "cluster" and op.gives_rows and not op.has_labels:
                register_chunks = dataclasses.replace(REGISTER_CHUNKS, interleaved=not op.is_linear)
                chosen.append(cases.Case(kernel, Problem(op, ROWS, 20001, dtype), register_chunks))
    found: Steps = [(str(case), functools.partial(conformance.check, case.run, case.problem)) for case in chosen]
    for name, problem in linear.CASES.items():
        run = functools.partial(linear_forward.launch, problem, linear_forward.Config())
        found.append((f"linear: {name}", functools.partial(linear.compare, problem, run)))
    return [*found, ("linear: gradient in place", functools.partial(linear.compare_gradient, True, linear.in_place))]


def forward(kind: str, head_dim: int) -> None:
    """The kernel that is chosen for a problem."""
    p = test_attention_forward.problem_of(kind, LENGTHS, (head_dim, head_dim), "bfloat16", (2, 1))
    test_attention_forward.check(p, dispatch.forward_configs(p, hardware.H200)[0])


def backward(kind: str, head_dim: int, deterministic: bool) -> None:
    """The kernel of the gradients that is chosen for a problem."""
    facts = {"heads": (2, 1), "deterministic": deterministic}
    p = test_attention_backward.problem_of(kind, LENGTHS, (head_dim, head_dim), "bfloat16", **facts)
    test_attention_backward.check(p, test_attention_backward.compiled(p))


def few(kind: str, page_size: int) -> None:
    """The kernels of few queries, in as many splits as there may be, of keys in pages or not."""
    p = test_attention_forward.problem_of(kind, (5, 512), (128, 128), "bfloat16", (4, 1))
    p = dataclasses.replace(p, page_size=page_size)
    config = max(dispatch.forward_configs(p, hardware.H200), key=lambda config: config.splits)
    (test_attention_forward.check_pages if page_size else test_attention_forward.check)(p, config)


def every_attention() -> Steps:
    """Every kind of problem at every size of heads, forward and backward, in turns and in any order."""
    chosen: Steps = []
    for head_dim in (64, 128, 256):
        for i, kind in enumerate(OFTEN + RARELY if head_dim == 128 else OFTEN):
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


def part_of[Step](chosen: Sequence[Step], part: str) -> Sequence[Step]:
    """Every N-th step from the I-th on, I from 1 (`part` is I/N), so that the parts take about as long."""
    i, n = map(int, part.split("/"))
    if not 1 <= i <= n:
        raise ValueError(f"no part {part}")
    return chosen[i - 1 :: n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", choices=["every_kernel", "every_attention"])
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--only", default="", help="steps whose name has this")
    parser.add_argument("--after", type=int, default=0, help="goes on after so many, in the output of another process")
    arguments = parser.parse_args()
    every = every_kernel() if arguments.steps == "every_kernel" else every_attention()
    chosen = part_of([step for step in every if arguments.only in step[0]], arguments.part)
    if not arguments.after:
        print(f"steps {len(chosen)}", flush=True)
    for i, (name, step) in list(enumerate(chosen))[arguments.after :]:
        print(f"{i + 1}/{len(chosen)} {name}", flush=True)
        step()
        print("done", flush=True)


if __name__ == "__main__":
    main()
