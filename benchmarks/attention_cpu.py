r"""`python -m benchmarks.attention_cpu`: attention's XLA program beside `jax.nn`'s, on a CPU.

The two are called in turn. Beside the minimum of wall clock stands that of the process' own time, on all cores, which
other processes disturb less. Both programs' results are compared first.

Example:
  JAX_PLATFORMS=cpu python -m benchmarks.attention_cpu --seconds=4 --json=benchmarks/results/cpu/attention.json
"""

import dataclasses
import itertools
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

import jaxsoftmax
from benchmarks import results as measured

FLAGS = flags.FLAGS
_LEAST_CALLS = 10
_TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}  # of the largest number of a result


@dataclasses.dataclass(frozen=True)
class Case:
    """T queries and S keys of N and K heads of `dim`; "fwd", or "value_and_vjp"."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    dim: int
    dtype: str
    is_causal: bool
    pass_: str

    @property
    def name(self) -> str:
        kind = "causal" if self.is_causal else "full"
        heads = f"{self.heads}g{self.key_heads}"
        return f"{self.pass_}_{self.dtype}_{kind}_b{self.batch}_t{self.queries}_s{self.keys}_h{heads}_d{self.dim}"

    def operands(self) -> tuple[jax.Array, ...]:
        """Query, key, value and the output's cotangent."""
        shapes = [(self.queries, self.heads), *[(self.keys, self.key_heads)] * 2, (self.queries, self.heads)]
        keys = jax.random.split(jax.random.key(0), len(shapes))
        shapes = [(self.batch, *shape, self.dim) for shape in shapes]
        return tuple(jax.random.normal(k, shape, self.dtype) for k, shape in zip(keys, shapes, strict=True))

    def program(self, attention: Callable[..., jax.Array]) -> Callable[..., Any]:
        """What is timed."""

        def forward(*operands: jax.Array) -> jax.Array:
            return attention(*operands, is_causal=self.is_causal)

        def value_and_vjp(*operands: jax.Array) -> Any:
            out, pull = jax.vjp(forward, *operands[:3])
            return out, pull(operands[3])

        return jax.jit(value_and_vjp if self.pass_ == "value_and_vjp" else lambda *operands: forward(*operands[:3]))


SHAPES = (
    (8, 256, 256, 4, 4, 32),
    (2, 512, 512, 8, 8, 64),
    (2, 512, 512, 8, 2, 64),
    (8, 1, 4096, 8, 8, 64),
    (8, 1, 4096, 8, 2, 64),
    (1, 2048, 2048, 4, 4, 64),
)
PROGRAMS = {"ours": jaxsoftmax.flash_attention, "jax.nn": jax.nn.dot_product_attention}


def all_cases() -> Iterator[Case]:
    """Every shape in both dtypes, full and causal (one query: full), forward and with the gradient."""
    for shape, dtype, is_causal, pass_ in itertools.product(
        SHAPES, ("float32", "bfloat16"), (False, True), ("fwd", "value_and_vjp")
    ):
        if not (is_causal and shape[1] == 1):
            yield Case(*shape, dtype, is_causal, pass_)


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Checks that both agree, then times them in turn for so many seconds."""
    operands = case.operands()
    programs = {name: case.program(attention) for name, attention in PROGRAMS.items()}
    results = {name: jax.block_until_ready(program(*operands)) for name, program in programs.items()}
    compare(results, _TOLERANCE[case.dtype])
    least = {name: (np.inf, np.inf) for name in programs}
    calls, end = 0, time.perf_counter() + seconds
    while calls < _LEAST_CALLS or time.perf_counter() < end:
        calls += 1
        for name, program in programs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(*operands))
            took = time.perf_counter() - wall, time.process_time() - cpu
            least[name] = (min(least[name][0], took[0]), min(least[name][1], took[1]))
    impls = {name: {"min_ms": round(1e3 * w, 3), "min_cpu_ms": round(1e3 * c, 3)} for name, (w, c) in least.items()}
    ratios = [theirs / ours for ours, theirs in zip(least["ours"], least["jax.nn"], strict=True)]
    record = {"case": case.name, "calls": calls, "impls": impls}
    return record | {"ratio": round(ratios[0], 3), "cpu_ratio": round(ratios[1], 3)}


def compare(results: Mapping[str, Any], tolerance: float) -> None:
    """Raises if two programs' results differ by more than `tolerance` of the largest number."""
    for got, want in zip(*map(jax.tree.leaves, results.values()), strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


def line(record: Mapping[str, Any]) -> str:
    """A case in one line."""
    times = ", ".join(f"{name} {x['min_ms']:.2f} ms ({x['min_cpu_ms']:.2f})" for name, x in record["impls"].items())
    return f"{record['case']:<60} {times}, ratio {record['ratio']:.2f} ({record['cpu_ratio']:.2f})"


def main(_: Sequence[str]) -> None:
    cases = [c for c in all_cases() if all(re.search(p, c.name) for p in FLAGS.case)]
    header = measured.header(commit=FLAGS.commit, seed=0, rounds=1) | {"topic": "attention on a CPU"}
    records = []
    for case in cases:
        records.append(measure(case, FLAGS.seconds))
        print(line(records[-1]), flush=True)
        if FLAGS.json:
            measured.write(pathlib.Path(FLAGS.json), header, records)


if __name__ == "__main__":
    flags.DEFINE_list("case", [], "Regular expressions, all of which are searched in case names.")
    flags.DEFINE_float("seconds", 4.0, "How long each case is timed.")
    flags.DEFINE_string("json", None, "Where to write results, after each case.")
    flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")
    app.run(main)
