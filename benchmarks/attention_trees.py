"""Times attention's kernels as several source trees have them, and with other configs: what a change gains, in seconds.

    python -m benchmarks.attention_trees --tree before=../before CASE=VARIANT+VARIANT... ...

A case is one of `python -m benchmarks --op=attention`, forward or backward, or one of the same form:
`bwd_causal_d64_s8192_b2_h32`. A variant is a tree, `now` or one that `--tree` names, as it is or with other knobs:
`now:together=8,tiles=drawn`. Each case has a process of its own. They compile beside each other and are timed one
after another, the variants of a case interleaved; the kernel and XLA's share before and after it count. What comes out
is compared with the first variant's. The exit status is 0 if all variants have a time.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention_cases, timing
from benchmarks.attention_cases import Shape

_LAUNCHES = 2  # in a round
_COMPARED = 10**5  # numbers of each result

Trees = dict[str, str]
Load = Callable[[str], Any]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A case and its variants: of each, the tree and the knobs that differ."""

    name: str
    backward: bool
    shape: Shape
    variants: dict[str, tuple[str, dict[str, Any]]]

    @classmethod
    def parse(cls, text: str) -> "Comparison":
        """What an argument says."""
        name, _, variants = text.partition("=")
        case = attention_cases.parse(name)
        if case is None or case.pass_ == "value_and_vjp" or not variants:
            wanted = "wanted CASE=VARIANT+VARIANT, as bwd_causal_d128_s4096_b4_h16=before+now"
            raise argparse.ArgumentTypeError(f"got {text!r}; {wanted}")
        return cls(name, case.pass_ == "bwd", case.shape, {text: _variant(text) for text in variants.split("+")})


def _variant(text: str) -> tuple[str, dict[str, Any]]:
    tree, _, knobs = text.partition(":")
    pairs = (pair.split("=") for pair in knobs.split(",") if pair)
    return tree, {name: _value(value) for name, value in pairs}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


@contextlib.contextmanager
def imported(tree: str) -> Iterator[Load]:
    """A function that imports modules of the tree's `pallas_kernels`, and of no other tree's."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "pallas_kernels"}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(pathlib.Path(tree).resolve()))
    try:
        yield lambda name: importlib.import_module(f"pallas_kernels.{name}")
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.split(".")[0] == "pallas_kernels"]:
            del sys.modules[name]
        sys.modules.update(before)


def _decided(load: Load, shape: Shape, backward: bool, knobs: dict[str, Any]) -> Callable[..., Any]:
    """The kernel that a tree decides for, with other knobs."""
    problems, dispatch, hardware = map(load, ("attention.problem", "attention.dispatch", "hardware"))
    facts: dict[str, Any] = {"causal_offset": 0} if shape.is_causal else {}
    if shape.kind == "window":
        facts["window"] = (shape.span - 1, None)
    if shape.kind == "documents":
        facts["segments"] = True
    if "mask" in shape.kind:
        facts["mask"] = (shape.batch, 1, shape.query_length, shape.length)
    if shape.kind == "bias":
        bias = {"bias": (1, shape.heads, shape.query_length, shape.length), "bias_dtype": jnp.dtype(shape.dtype)}
        facts |= bias | {"bias_gradient": backward}
    sizes = shape.batch, shape.heads, shape.key_heads, shape.query_length, shape.length, shape.head_dim, shape.value_dim
    op = problems.Op.BACKWARD if backward else problems.Op.FORWARD
    problem = problems.Attention(op, *sizes, jnp.dtype(shape.dtype), shape.head_dim**-0.5, **facts)
    decision = dispatch.decide(problem, hardware.current())
    if decision.kernel is None:
        raise NotImplementedError(f"no kernel takes it: {dict(decision.declined)}")
    return dataclasses.replace(decision, config=dataclasses.replace(decision.config, **knobs)).run


def _operands(shape: Shape) -> list[jax.Array]:
    made = shape.operands(0)
    segments = [made["segments"]] * 2 if "segments" in made else []
    extras = [
        made[name].astype(jnp.int8) if name == "mask" else made[name] for name in ("bias", "mask") if name in made
    ]
    return [made["query"], made["key"], made["value"], *extras, *segments]


def _programs(comparison: Comparison, trees: Trees) -> tuple[dict[str, Any], list[Row]]:
    """The variants' programs, from operands to residuals and to results, and rows of those that have none."""
    shape, programs, rows = comparison.shape, {}, []
    specs = jax.eval_shape(lambda: _operands(shape))
    for name, (tree, knobs) in comparison.variants.items():
        try:
            with imported(trees[tree]) as load:
                kernel, residuals, inputs = _decided(load, shape, comparison.backward, knobs), None, specs
                if comparison.backward:
                    residuals = jax.jit(_decided(load, shape, False, {})).lower(*specs).compile()
                    out, lse = residuals.out_info
                    inputs = [*specs, out, lse, out, lse]
                programs[name] = residuals, jax.jit(kernel).lower(*inputs).compile()
        except Exception as error:  # of a compiler, of whatever type: the other variants go on
            rows.append({"variant": name, "failed": f"{type(error).__name__}: {error}"[:300]})
    return programs, rows


def compare(comparison: Comparison, trees: Trees, rounds: int, lock: str) -> list[Row]:
    """A row for each variant: its microseconds, or why it has none, and how far its results are from the first's.

    `lock`: a file that a process holds while it has the device.
    """
    programs, rows = _programs(comparison, trees)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        operands, arguments, first = _operands(comparison.shape), {}, None
        for name, (residuals, program) in programs.items():
            arguments[name] = operands
            if residuals is not None:
                out, lse = residuals(*operands)
                d_out = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
                arguments[name] = [*operands, out, lse, d_out, jnp.zeros_like(lse)]
            got = [_sample(x) for x in program(*arguments[name])]
            first = first or got
            apart = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, first, strict=True))
            rows.append({"variant": name, "apart": apart})
        launch = lambda name: lambda _: programs[name][1](*arguments[name])
        variants = [timing.Variant(name, launch(name)) for name in programs]
        device_clock = jax.default_backend() == "gpu"
        clock, timings = timing.measure(
            variants, buffers=1, rounds=rounds, launches=_LAUNCHES, device_clock=device_clock
        )
    for row in rows:
        if row["variant"] in timings:
            row |= {"us": round(timings[row["variant"]].median, 2), "clock": clock}
    return rows


def _sample(x: jax.Array) -> np.ndarray:
    flat = x.reshape(-1)
    return np.asarray(flat[:: max(flat.size // _COMPARED, 1)], np.float32)


def table(name: str, rows: Sequence[Row]) -> str:
    """The rows as text: times, and their ratios to the first one's."""
    base, lines = next((row["us"] for row in rows if "us" in row), None), []
    for row in rows:
        found = row.get("failed")
        if found is None:
            found = f"{row['us']:10.1f} us  {row['us'] / base:.3f}  apart {row['apart']:.1e}  {row['clock']}"
        lines.append(f"{name:36s} {row['variant']:44s} {found}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go as well")
    parser.add_argument("comparisons", nargs="+", type=Comparison.parse, metavar="CASE=VARIANT+VARIANT")
    options = parser.parse_args(arguments)
    trees = {"now": "."} | dict(tree.split("=") for tree in options.tree)
    if unknown := {tree for each in options.comparisons for tree, _ in each.variants.values()} - set(trees):
        parser.error(f"got the trees {sorted(unknown)}, and know {sorted(trees)}; name others by --tree NAME=FOLDER")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    spawning, found = multiprocessing.get_context("spawn"), {}
    with (
        tempfile.NamedTemporaryFile() as lock,
        concurrent.futures.ProcessPoolExecutor(options.processes, spawning, max_tasks_per_child=1) as pool,
    ):
        tasks = {
            pool.submit(compare, each, trees, options.rounds, lock.name): each.name for each in options.comparisons
        }
        for task in concurrent.futures.as_completed(tasks):
            found[tasks[task]] = task.result()
            print(table(tasks[task], task.result()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("failed" in row for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
