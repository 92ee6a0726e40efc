"""What one small call costs: wall time of a blocked call, and of an iteration inside `fori_loop`."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import truth, variants
from benchmarks.cases import Case

_CALLS = 200
_ITERATIONS = 1000


def run(case: Case, options: Any) -> dict[str, Any]:
    """Measures the case's implementations, interleaved by round."""
    (operands,) = variants.make_operands(case, 1, options.seed)
    impls: dict[str, dict[str, Any]] = {}
    calls, loops = {}, {}
    check = truth.every_row(case)
    xla = variants.build(case, "xla").function(*operands)
    for name in options.impls:
        try:
            program = variants.build(case, name, kernel=options.kernel, config=options.config)
        except variants.Declined as reason:
            impls[name] = {"status": "declined", "reason": str(reason)}
            continue
        verdict = truth.judge(case, operands, program.function(*operands), xla, check)
        right = verdict.right or name == "xla"
        impls[name] = {"status": "ok" if right else "WRONG", "max_error_ulp": round(verdict.error, 4), "process": "jax"}
        if right:
            calls[name], loops[name] = program.function, _loop(program.function)
        else:
            impls[name]["reason"] = verdict.describe()
    per_call = _interleaved(calls, operands, options.rounds, _CALLS)
    per_iteration = _interleaved(loops, operands, options.rounds, 1)
    for name in calls:
        impls[name]["us"] = round(statistics.median(per_call[name]), 3)
        impls[name]["p20_us"], impls[name]["p80_us"] = np.percentile(per_call[name], (20, 80)).round(3).tolist()
        impls[name]["us_per_iteration"] = round(statistics.median(per_iteration[name]) / _ITERATIONS, 4)
    return {"clock": "wall", "copy": None, "impls": impls}


def _loop(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: jax.lax.fori_loop(0, _ITERATIONS, lambda _, y: function(y), x))


def _interleaved(
    functions: dict[str, Callable[..., Any]], operands: tuple[Any, ...], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Microseconds of each blocked call."""
    for function in functions.values():
        jax.block_until_ready(function(*operands))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            for _ in range(calls):
                start = time.perf_counter()
                jax.block_until_ready(function(*operands))
                times[name].append(1e6 * (time.perf_counter() - start))
    return times
