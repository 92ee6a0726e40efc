"""`python -m benchmarks.invariance`: what `jaxsoftmax.batch_invariant()` costs, each call beside itself without it.

Few rows and many of the same length, where the choice without it differs, rows along the first axis, the largest of a
row, and attention; both on the same operands, interleaved. A case whose results differ by more than roundings is not
timed.

    python -m benchmarks.invariance --json=benchmarks/results/h100/invariance.json --commit=SHA
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxsoftmax
from benchmarks import results as measured
from benchmarks import timing

FLAGS = flags.FLAGS
NAMES = ("ours", "ours, batch invariant")
_WIDTH = 128256


def define_flags() -> None:
    flags.DEFINE_string("only", "", "Cases with this in their names.")
    flags.DEFINE_integer("shrink", 1, "Divides lengths, for a try on a CPU.", lower_bound=1)
    flags.DEFINE_integer("rounds", 3, "Interleaved rounds.", lower_bound=1)
    flags.DEFINE_string("json", None, "Where to write results.")
    flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the shapes of its operands, which are bfloat16."""

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def operand_bytes(self) -> int:
        return sum(2 * int(np.prod(shape)) for shape in self.shapes)


def _loss(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    labels = jnp.zeros(x.shape[0], jnp.int32)
    loss = jaxsoftmax.softmax_cross_entropy_with_integer_labels
    return jax.value_and_grad(lambda x: loss(x, labels, weights=1 / x.shape[0]).sum())(x)


ROWS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, int], ...]]] = {
    "softmax": (jaxsoftmax.softmax, (*((rows, _WIDTH) for rows in (1, 16, 256, 4096)), (64, 4096), (65536, 4096))),
    "logsumexp": (functools.partial(jaxsoftmax.logsumexp, axis=-1), ((16, _WIDTH), (4096, _WIDTH))),
    "loss and gradient": (_loss, ((16, _WIDTH), (4096, _WIDTH))),
    "top 8": (functools.partial(jaxsoftmax.top_k_softmax, k=8), ((1, _WIDTH), (256, _WIDTH))),
    "softmax along axis 0": (functools.partial(jaxsoftmax.softmax, axis=0), ((4096, 4096),)),
}
ATTENTION: dict[str, tuple[dict[str, Any], tuple[tuple[int, int, int], ...]]] = {
    "attention": ({"is_causal": True}, ((4096, 4096, 64), (4096, 4096, 128), (4096, 4096, 256))),
    "attention, all keys": ({}, ((4096, 4096, 64), (1, 4096, 128))),
    "attention with a bias": ({}, ((2048, 2048, 128),)),
}


def cases(shrink: int = 1) -> list[Case]:
    """All of them, of lengths that are divided."""
    small = lambda n: max(n // shrink, 16) if n > 16 else n
    found = [
        Case(f"{name} {rows} x {cols}", call, ((small(rows), small(cols)),))
        for name, (call, shapes) in ROWS.items()
        for rows, cols in shapes
    ]
    for name, (options, shapes) in ATTENTION.items():
        for t, s, dim in shapes:
            qkv = [(2, small(length), 16, dim) for length in (t, s, s)]
            bias = [(1, 16, small(t), small(s))] if "bias" in name else []
            call = functools.partial(jaxsoftmax.flash_attention, **options)
            found.append(Case(f"{name} {t} x {s}, heads of {dim}", call, (*qkv, *bias)))
    return found


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Compiles both programs of a case, compares what they give, and times them."""
    on_gpu = jax.default_backend() == "gpu"
    buffers = timing.buffers_needed(case.operand_bytes, hot=not on_gpu)
    keys = jax.random.split(jax.random.key(0), buffers)
    make = jax.jit(lambda key: [jax.random.normal(key, shape, jnp.bfloat16) for shape in case.shapes])
    operands = [make(key) for key in keys]
    programs = []
    for enabled in (False, True):
        with jaxsoftmax.batch_invariant(enabled):
            programs.append(jax.jit(lambda *xs: case.call(*xs)).lower(*operands[0]).compile())
    apart = _apart(*(program(*operands[0]) for program in programs))
    if not apart < 0.05:
        return {"status": "WRONG", "apart": apart}
    variants = [
        timing.Variant(name, lambda k, program=program: program(*operands[k]))
        for name, program in zip(NAMES, programs, strict=True)
    ]
    launches = timing.launches_per_round(case.operand_bytes) if on_gpu else 1
    clock, times = timing.measure(variants, buffers=buffers, rounds=rounds, launches=launches, device_clock=on_gpu)
    return {"status": "ok", "apart": apart, "clock": clock, "times": times}


def _apart(a: Any, b: Any) -> float:
    """The largest difference of two results, in parts of the largest number of each."""
    numbers = lambda x: jnp.asarray(x).astype(jnp.float32)
    of = lambda x, y: float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(x).max(), 1e-30))
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(of(numbers(x), numbers(y)) for x, y in pairs)


def record(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """A case as result files have it."""
    impls = {name: {"status": found["status"]} | time.as_json() for name, time in found.get("times", {}).items()}
    shapes = [list(shape) for shape in case.shapes]
    rest = {key: value for key, value in found.items() if key != "times"}
    return {"case": {"name": case.name, "shapes": shapes, "dtype": "bfloat16"}, "impls": impls, **rest}


def main(_: list[str]) -> None:
    header = measured.header(commit=FLAGS.commit, seed=0, rounds=FLAGS.rounds) | {"topic": "invariance"}
    records: list[dict[str, Any]] = []
    for case in cases(FLAGS.shrink):
        if FLAGS.only not in case.name:
            continue
        records.append(record(case, measure(case, FLAGS.rounds)))
        times = [records[-1]["impls"].get(name, {}).get("us") for name in NAMES]
        cost = "{:9.1f} us, {:9.1f} batch invariant".format(*times) if all(times) else ""
        print(f"{case.name:40} {records[-1]['status']} {cost}", flush=True)
        if FLAGS.json:
            measured.write(pathlib.Path(FLAGS.json), header | {"clocks_after": measured.clocks()}, records)
    sys.exit(0 if records and all(r["status"] == "ok" for r in records) else 1)


if __name__ == "__main__":
    define_flags()
    app.run(main)
