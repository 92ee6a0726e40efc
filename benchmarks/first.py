"""Measures a call before its first result: seconds to trace, lower and compile it.

A call of another shape is traced and lowered first, so that modules are imported and MLIR's dialects loaded, and then
JAX's caches are cleared: what is left is what each new shape costs that a program meets. Nothing runs.
"""

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import impls
from benchmarks.calls import CallCase
from benchmarks.impls import Options
from benchmarks.runner import caught

PARTS = ("trace_s", "lower_s", "compile_s")


def records(chosen: Sequence[CallCase], options: Options, processes: int, deadline: float) -> Iterator[dict[str, Any]]:
    """The record of each case, in this process or in several; `deadline` is when no case starts any more."""
    if processes == 1:
        for case in chosen:
            yield from _in_time(case, options, deadline)
        return
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=spawning) as pool:
        waiting = [pool.submit(_in_time, case, options, deadline) for case in chosen]
        for done in concurrent.futures.as_completed(waiting):
            yield from done.result()


def _in_time(case: CallCase, options: Options, deadline: float) -> list[dict[str, Any]]:
    return [] if time.monotonic() >= deadline else [record(case, options)]


def record(case: CallCase, options: Options) -> dict[str, Any]:
    """The seconds of each implementation."""
    here, small = (case, {}) if jax.default_backend() == "gpu" else case.shrunk()
    found = {name: _seconds(here, name, options) for name in options.impls}
    return {"case": case.describe(), **small, "clock": "wall", "impls": found}


def _seconds(case: CallCase, name: str, options: Options) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    with caught(entry):
        rounds = [_parts(case, name, options) for _ in range(options.rounds)]
        medians = (round(statistics.median(times), 4) for times in zip(*rounds, strict=True))
        return {"status": "ok", **dict(zip(PARTS, medians, strict=True))}
    return entry


def _parts(case: CallCase, name: str, options: Options) -> tuple[float, ...]:
    program, specs = _program(case, name, options)
    larger = dataclasses.replace(case, shape=(2 * case.shape[0], *case.shape[1:]))
    before, before_specs = _program(larger, name, options)
    before.trace(*before_specs).lower()
    jax.clear_caches()
    moments = [time.perf_counter()]
    traced = program.trace(*specs)
    moments.append(time.perf_counter())
    lowered = traced.lower()
    moments.append(time.perf_counter())
    lowered.compile()
    moments.append(time.perf_counter())
    return tuple(end - start for start, end in itertools.pairwise(moments))


def _program(case: CallCase, name: str, options: Options) -> tuple[Any, Any]:
    """A jitted function, and the shapes of its operands."""
    specs = jax.eval_shape(lambda: case.operands(1, 0))[0]
    return jax.jit(impls.programs(case, name, options)[case.pass_].function), specs
