"""The one check of a kernel's result against float64, whatever ran it: the interpreter, a GPU, or a planted fault."""

import functools
from collections.abc import Callable
from typing import Any

import cases
import errors
import jax
import ml_dtypes
import numpy as np
import oracle

from pallas_kernels import monoid, reference
from pallas_kernels.problem import Op, Problem

Run = Callable[..., Any]


def check(run: Run, problem: Problem, *, execute: Callable[..., Any] = jax.jit, slack: float = 1.0) -> None:
    """Asserts that `execute(run)` solves `problem` as accurately as XLA does, in rows of every kind.

    For each kind by itself: a bad row must not widen the bound of a good one.
    """
    operands = cases.operands(problem)
    got = execute(run)(*operands)
    expected = _by_xla(problem, operands)
    truth, magnitude = _truth(problem, [np.asarray(x) for x in operands])
    kinds = cases.row_kinds(problem)
    arrays = [_rows(problem, a) for a in (_meaning(problem, got), expected, truth, magnitude)]
    for i, kind in enumerate(kinds[: len(arrays[0])]):
        mine, xla, true, size = (a[i :: len(kinds)] for a in arrays)
        try:
            errors.assert_accurate(mine, xla, true, magnitude=size, slack=slack)
        except AssertionError as error:
            raise AssertionError(f"{problem}, row kind {kind!r}: {error}") from None


def _rows(problem: Problem, array: np.ndarray) -> np.ndarray:
    return np.asarray(array).reshape(-1) if problem.op is Op.STATS else cases.rows_of(array, problem)


def _meaning(problem: Problem, result: Any) -> Any:
    """States have many representations and one meaning, their logarithm."""
    return monoid.log_normalizer(monoid.Stats(*result)) if problem.op is Op.STATS else result


@functools.cache
def _xla(problem: Problem) -> Run:
    operation = getattr(reference, problem.op.value)
    return jax.jit(functools.partial(operation, axes=(1,), scale=problem.scale))


def _by_xla(problem: Problem, operands: tuple[jax.Array, ...]) -> Any:
    return _meaning(problem, _xla(problem)(*_with_broadcastable_mask(problem, operands)))


def _with_broadcastable_mask(problem: Problem, operands: Any) -> list[Any]:
    arrays, masks = operands[: 1 + problem.op.is_linear], operands[1 + problem.op.is_linear :]
    return [*arrays, *(m[:, None] if problem.where == "shared" and problem.inner > 1 else m for m in masks)]


def _truth(problem: Problem, operands: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The true result, and the size its error is measured against.

    The float32 computation errs by ulps of the terms it subtracts; the result is then rounded to its own dtype. The
    logarithm of a sum has the sum's relative error as an absolute one, hence the 1.
    """
    arguments: dict[str, Any] = {"axis": 1, "scale": problem.scale}
    arrays = _with_broadcastable_mask(problem, operands)
    if problem.where != "none":
        arguments["where"] = arrays.pop()
    if problem.op is Op.STATS:
        m, s = oracle.stats(*arrays, **arguments)
        with np.errstate(divide="ignore"):
            return oracle.logsumexp(*arrays, **arguments), np.abs(m) + np.abs(np.log(s)) + 1
    truth = getattr(oracle, problem.op.value)(*arrays, **arguments)
    if problem.op is Op.SOFTMAX:
        return truth, np.abs(truth)
    terms = getattr(oracle, f"{problem.op.value}_terms")(*arrays, **arguments) + (problem.op is Op.LOG_SOFTMAX)
    rounding = np.finfo(np.float32).eps / float(ml_dtypes.finfo(problem.dtype).eps)
    return truth, np.abs(truth) + terms * float(rounding)
