"""How far a result is from the truth, and how far it may be.

Errors are counted in units of `eps * max(|y|, tiny)`: relative to the true value `y`, with a floor at the dtype's
smallest normal number, below which the spacing of numbers no longer shrinks. Never absolute: a softmax is about 1/N,
so an absolute bound accepts a constant.
"""

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


def max_error(got: ArrayLike, truth: ArrayLike, *, magnitude: ArrayLike | None = None) -> float:
    """The largest error of `got`, in units of its dtype's last place; inf if NaNs or infinities differ.

    `magnitude` replaces `|truth|` where the true value is a difference of larger terms. Zero is accepted for a value
    below float32's normal range: the hardware's exponential flushes there.
    """
    errors = _errors(got, truth, magnitude)
    return float(errors.max(initial=0.0))


def assert_accurate(
    got: ArrayLike,
    reference: ArrayLike,
    truth: ArrayLike,
    *,
    magnitude: ArrayLike | None = None,
    slack: float = 1.0,
) -> None:
    """The one rule: `error(got) <= 2 * error(reference) + 1`, where `reference` is XLA's result in the same dtype."""
    assert np.asarray(got).dtype == np.asarray(reference).dtype, (np.asarray(got).dtype, np.asarray(reference).dtype)
    allowed = max_error(reference, truth, magnitude=magnitude)
    assert np.isfinite(allowed), f"the reference itself is wrong: {_worst(reference, truth, magnitude)}"
    bound = 2 * allowed + slack
    assert max_error(got, truth, magnitude=magnitude) <= bound, (
        f"{_worst(got, truth, magnitude)}; allowed {bound:.3g} ulp (reference: {allowed:.3g})"
    )


def assert_rows_accurate(got: ArrayLike, rounded: ArrayLike, truth: ArrayLike) -> None:
    """Attention's rule, for each row, `[..., dim]`: `error(got) <= 2 * error(rounded) + a unit of the row's largest`.

    `rounded` has its weights and itself rounded to the dtype of `got`, as XLA's attention rounds them. Of a long row
    the output is small: the bound is relative to it, and to no other row's.
    """
    got, rounded, truth = np.asarray(got), np.asarray(rounded), np.asarray(truth, np.float64)
    assert got.shape == truth.shape, f"shape {got.shape}, expected {truth.shape}"
    error, allowed = (np.abs(x.astype(np.float64) - truth).max(-1, initial=0.0) for x in (got, rounded))
    unit = float(ml_dtypes.finfo(got.dtype).eps)
    bound = 2 * allowed + unit * np.maximum(np.abs(truth).max(-1, initial=0.0), _FLOAT32_TINY)
    wrong = ~(error <= bound)  # NaN too
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(f"{wrong.sum()} rows are off, the first at {at}: {error[at]:.3g}, allowed {bound[at]:.3g}")


def _errors(got: ArrayLike, truth: ArrayLike, magnitude: ArrayLike | None) -> np.ndarray:
    got, truth = np.asarray(got), np.asarray(truth, np.float64)
    assert got.shape == truth.shape, f"shape {got.shape}, expected {truth.shape}"
    info = ml_dtypes.finfo(got.dtype)
    value = got.astype(np.float64)
    size = np.abs(truth if magnitude is None else np.broadcast_to(np.asarray(magnitude, np.float64), truth.shape))
    with np.errstate(invalid="ignore"):
        errors = np.abs(value - truth) / (float(info.eps) * np.maximum(size, float(info.tiny)))
        exact = (
            (value == truth) | (np.isnan(value) & np.isnan(truth)) | ((value == 0) & (np.abs(truth) < _FLOAT32_TINY))
        )
        overflows = np.isinf(value) & (np.abs(truth) > float(info.max)) & (np.sign(value) == np.sign(truth))
    errors = np.where(np.isnan(errors) | ~np.isfinite(value) | ~np.isfinite(truth), np.inf, errors)
    return np.where(exact | overflows, 0.0, errors)


def _worst(got: ArrayLike, truth: ArrayLike, magnitude: ArrayLike | None) -> str:
    errors = _errors(got, truth, magnitude)
    at = np.unravel_index(np.argmax(errors), errors.shape)
    where = tuple(int(i) for i in at)
    return f"{errors[at]:.3g} ulp at {where}: got {np.asarray(got)[at]}, truth {np.asarray(truth)[at]:.9g}"
