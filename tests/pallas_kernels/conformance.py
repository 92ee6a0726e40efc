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

from pallas_kernels import monoid
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import Op, Problem

Run = Callable[..., Any]
_FLOAT32 = np.finfo(np.float32)


def check(run: Run, problem: Problem, *, execute: Callable[..., Any] = jax.jit, slack: float = 1.0) -> None:
    """Asserts that `execute(run)` solves `problem` as accurately as XLA does, in rows of every kind.

    For each kind by itself: a bad row must not widen the bound of a good one.
    """
    operands, expected, truths = known(problem)
    got = _meaning(problem, execute(run)(*operands))
    kinds = cases.row_kinds(problem)
    for mine, xla, (truth, magnitude) in zip(got, expected, truths, strict=True):
        arrays = [_rows(problem, a) for a in (mine, xla, truth, magnitude)]
        for i, kind in enumerate(kinds[: len(arrays[0])]):
            mine, xla, true, size = (a[i :: len(kinds)] for a in arrays)
            try:
                errors.assert_accurate(mine, xla, true, magnitude=size, slack=slack)
            except AssertionError as error:
                raise AssertionError(f"{problem}, row kind {kind!r}: {error}") from None


@functools.lru_cache(maxsize=1)
def known(problem: Problem) -> tuple[tuple[jax.Array, ...], list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
    """Operands, XLA's results and the truth: kept, as several kernels and configs solve one problem after another."""
    operands = cases.operands(problem)
    return operands, list(map(np.asarray, _by_xla(problem, operands))), _truths(problem, operands)


def _rows(problem: Problem, array: np.ndarray) -> np.ndarray:
    return np.asarray(array) if np.ndim(array) == 1 else cases.rows_of(array, problem)


def _meaning(problem: Problem, result: Any) -> list[Any]:
    """The results to be compared: states have many representations and one meaning, their logarithm."""
    if not problem.op.gives_stats:
        return [result]
    *rows, maximum, total = result[: problem.op.gives_rows + 2]
    logarithm = monoid.log_normalizer(monoid.Stats(maximum, total))
    return [*rows, logarithm.reshape(-1), *result[problem.op.gives_rows + 2 :]]


@functools.cache
def _xla(problem: Problem) -> Run:
    options: dict[str, Any] = {"axes": (1,), "scale": problem.scale}
    if problem.op.has_labels:
        options |= {name: getattr(problem, name) for name in ("soft_cap", "smoothing", "z_loss")}
    return jax.jit(functools.partial(getattr(reference, problem.op.value), **options))


def _by_xla(problem: Problem, operands: tuple[jax.Array, ...]) -> list[Any]:
    if problem.op.has_labels:
        end = 1 + len(problem.op.row_operands)
        operands = (operands[0], *(x[:, None] for x in operands[1:end]), *operands[end:])
        return _meaning(problem, _xla(problem)(*operands))
    return _meaning(problem, _xla(problem)(*_with_broadcastable_mask(problem, operands)))


def _truths(problem: Problem, operands: tuple[jax.Array, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The true results, and the size each one's error is measured against."""
    arrays = [np.asarray(x) for x in operands]
    if not problem.op.has_labels:
        truth, size = _truth(problem, arrays)
        return [(truth.reshape(-1), size.reshape(-1))] if problem.op is Op.STATS else [(truth, size)]
    where = arrays.pop() if problem.where != "none" else None
    if problem.op.takes_stats:
        options = {name: getattr(problem, name) for name in ("scale", "soft_cap", "smoothing")}
        truth, terms = oracle.cross_entropy_cotangent(*arrays, where, **options)
        return [(truth, np.abs(truth) + np.fmax(terms, _flushed(arrays[3] * problem.scale)) * _rounding(problem))]
    return _loss_truths(problem, where, *arrays)


def _loss_truths(
    problem: Problem, where: np.ndarray | None, x: np.ndarray, labels: np.ndarray, weights: np.ndarray | float = 1.0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The gradient, if that is asked for, and what a row's loss is made of: of ignored rows 0, 1 and 0."""
    read = labels >= 0
    options = {name: getattr(problem, name) for name in ("scale", "soft_cap", "smoothing", "z_loss")}
    want = oracle.cross_entropy(
        np.where(read[:, None], x, 0), labels, 1, where, weights=weights, ignored=-1, skips_empty=False, **options
    )
    # In 16 bits a capped logit is the cap less something.
    cap = (problem.soft_cap or 0.0) * (problem.dtype.itemsize == 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.abs(want.stats.max) + np.abs(np.log(want.stats.sum)) + 1 + cap
        tilted = weights * problem.scale * (1 + np.abs(2 * problem.z_loss * want.lse))
    truths = [(np.where(read, want.lse, 0.0), np.where(read, size, 1.0))]
    if problem.smoothing:
        # A capped logit errs by three ulp.
        ulps = 1 if problem.soft_cap is None else 3
        truths.append((want.total, ulps * want.total_terms + problem.cols * cap))
    if problem.op is Op.CROSS_ENTROPY:
        return truths
    terms = np.fmax(want.gradient_terms, _flushed(np.where(read, tilted, 0.0)))
    return [(want.gradient, np.abs(want.gradient) + terms * _rounding(problem)), *truths]


def _flushed(factors: np.ndarray) -> np.ndarray:
    """What rows' results err by because the hardware's exponential flushes to zero before it is multiplied."""
    return np.abs(factors)[:, None] * (_FLOAT32.tiny / _FLOAT32.eps)


def _rounding(problem: Problem) -> float:
    """An ulp of float32 in ulps of the problem's dtype."""
    return float(np.finfo(np.float32).eps / float(ml_dtypes.finfo(problem.dtype).eps))


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
    return truth, np.abs(truth) + terms * _rounding(problem)
