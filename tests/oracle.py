"""The truth: every operation in NumPy float64, with no JAX and no cleverness.

Inputs of any real dtype are widened exactly. `axis` is an int, a tuple or None (all axes); `where` broadcasts.
Semantics are those of `jax.nn` and `jax.scipy.special`: a row of only -inf gives NaN (logsumexp: -inf), a row with
+inf gives NaN (logsumexp: +inf), entries that `where` excludes give 0 (softmax) or -inf (log_softmax).

The `*_terms` functions give the size of the terms an output is the difference of: the scale that rounding errors have
where the terms cancel, for the `magnitude` argument of `tests.errors`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Axis = int | tuple[int, ...] | None


class Stats(NamedTuple):
    """A row's maximum and its sum of `exp(logit - maximum)`; (-inf, 0) for a row without finite logits."""

    max: Array
    sum: Array


class CrossEntropy(NamedTuple):
    """Rows' losses, their logsumexp, and the gradient of the losses' sum; and the sizes of what these are sums of.

    What the losses are made of, besides: the rows' states, and the sums of their logits.
    """

    loss: Array
    lse: Array
    gradient: Array
    loss_terms: Array
    gradient_terms: Array
    stats: Stats
    total: Array
    total_terms: Array


def softmax(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, scale: float = 1.0) -> Array:
    """`exp(scale * x) / sum(exp(scale * x))`."""
    weights, _ = _lift(_logits(x, where, scale), axis)
    with np.errstate(invalid="ignore"):
        y = weights / weights.sum(axis, keepdims=True)
    return y if where is None else np.where(where, y, 0.0)


def log_softmax(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, scale: float = 1.0) -> Array:
    """`scale * x - logsumexp(scale * x)`."""
    z = _logits(x, where, scale)
    weights, m = _lift(z, axis)
    with np.errstate(invalid="ignore", divide="ignore"):
        y = (z - m) - np.log(weights.sum(axis, keepdims=True))
    return y if where is None else np.where(where, y, -np.inf)


def log_softmax_terms(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, scale: float = 1.0) -> Array:
    """`|z - max| + log(sum)`: what `log_softmax` subtracts."""
    z = _logits(x, where, scale)
    weights, m = _lift(z, axis)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.abs(z - m) + np.log(weights.sum(axis, keepdims=True))


def logsumexp(x: ArrayLike, axis: Axis = None, where: ArrayLike | None = None, scale: float = 1.0) -> Array:
    """`log(sum(exp(scale * x)))`."""
    weights, m = _lift(_logits(x, where, scale), axis)
    with np.errstate(divide="ignore"):
        value = np.where(np.isposinf(m), m, m + np.log(weights.sum(axis, keepdims=True)))
    return np.squeeze(value, axis)


def stats(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, scale: float = 1.0) -> Stats:
    """The rows' (max, sum)."""
    weights, m = _lift(_logits(x, where, scale), axis)
    return Stats(np.squeeze(m, axis), weights.sum(axis))


def softmax_tangent(y: ArrayLike, t: ArrayLike, axis: Axis = -1, scale: float = 1.0) -> Array:
    """`J t` and `J^T t` of softmax at its output `y`."""
    y, t = _widen(y), _widen(t)
    return scale * y * (t - (y * t).sum(axis, keepdims=True))


def softmax_tangent_terms(y: ArrayLike, t: ArrayLike, axis: Axis = -1, scale: float = 1.0) -> Array:
    """`|scale| * y * (|t| + sum(y * |t|))`."""
    y, t = _widen(y), np.abs(_widen(t))
    return abs(scale) * y * (t + (y * t).sum(axis, keepdims=True))


def log_softmax_tangent(
    x: ArrayLike, t: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, scale: float = 1.0
) -> Array:
    """`J t` of log_softmax at its input `x`; 0 where `where` is False."""
    p, t = softmax(x, axis, where, scale), _kept(t, where)
    return _kept(scale * (t - (p * t).sum(axis, keepdims=True)), where)


def log_softmax_tangent_terms(
    x: ArrayLike, t: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, scale: float = 1.0
) -> Array:
    """`|scale| * (|t| + sum(p * |t|))`."""
    p, t = softmax(x, axis, where, scale), np.abs(_kept(t, where))
    return abs(scale) * (t + (p * t).sum(axis, keepdims=True))


def log_softmax_cotangent(
    x: ArrayLike, t: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, scale: float = 1.0
) -> Array:
    """`J^T t` of log_softmax at its input `x`; 0 where `where` is False."""
    p, t = softmax(x, axis, where, scale), _kept(t, where)
    return scale * (t - p * t.sum(axis, keepdims=True))


def log_softmax_cotangent_terms(
    x: ArrayLike, t: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, scale: float = 1.0
) -> Array:
    """`|scale| * (|t| + p * sum(|t|))`."""
    p, t = softmax(x, axis, where, scale), np.abs(_kept(t, where))
    return abs(scale) * (t + p * t.sum(axis, keepdims=True))


def cross_entropy(
    x: ArrayLike,
    labels: ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: ArrayLike | None = None,
    scale: float = 1.0,
    *,
    soft_cap: float | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: ArrayLike = 1.0,
    ignored: int | None = None,
    of_lse: ArrayLike = 0.0,
    skips_empty: bool = True,
) -> CrossEntropy:
    """Cross entropy with integer labels; the gradient is that of `sum(loss) + sum(of_lse * lse)`.

    A label is an index into the axes flattened as they are listed. Rows that are ignored, and with `skips_empty`
    those that are excluded entirely, have a loss of 0; rows whose label is no column have NaN.
    """
    given = _widen(x)
    axes = tuple(a % given.ndim for a in ((axis,) if isinstance(axis, int) else axis))
    order = [d for d in range(given.ndim) if d not in axes] + list(axes)
    moved = given.transpose(order)
    rows = moved.shape[: given.ndim - len(axes)]
    mask = np.broadcast_to(True if where is None else where, given.shape).transpose(order).reshape(*rows, -1)
    z = scale * moved.reshape(*rows, -1)
    with np.errstate(all="ignore"):
        slope = slope_terms = np.full(z.shape, scale)
        if soft_cap is not None:
            z = soft_cap * np.tanh(z / soft_cap)
            slope, slope_terms = (scale * (1 + sign * (z / soft_cap) ** 2) for sign in (-1, 1))
        label = np.asarray(labels).astype(np.int64)
        skip, exists = (label == ignored) | (skips_empty & ~mask.any(-1)), (label >= 0) & (label < z.shape[-1])
        onehot = np.arange(z.shape[-1]) == label[..., None]
        lse = logsumexp(z, -1, where=mask)
        p = softmax(z, -1, mask)
        share = mask * smoothing / np.maximum(mask.sum(-1, keepdims=True), 1)
        far = [np.where(onehot, (lse[..., None] - z), 0).sum(-1), np.where(share > 0, share * (lse[..., None] - z), 0)]
        loss = (1 - smoothing) * far[0] + far[1].sum(-1) + z_loss * lse**2
        terms = (1 - smoothing) * np.abs(far[0]) + np.abs(far[1]).sum(-1) + np.abs(z_loss) * lse**2
        w = np.where(skip, 0.0, np.where(exists, _widen(weights), np.nan))
        tilt, q = 2 * z_loss * lse[..., None] if z_loss else 0.0, (1 - smoothing) * onehot + share
        tilted_p, p_terms = (np.where(mask, factor * p, 0.0) for factor in (1 + tilt, 1 + np.abs(tilt)))
        by_loss = w[..., None] * (tilted_p - q) * slope
        by_lse = _widen(of_lse)[..., None] * p * slope
        sizes = (np.abs(w)[..., None] * (p_terms + q) + np.abs(_widen(of_lse)[..., None] * p)) * slope_terms
        live = mask | onehot
        by_loss = np.where(~skip[..., None] & live, by_loss, 0.0)
        gradient = by_loss + np.where(mask & (_widen(of_lse)[..., None] != 0), by_lse, 0.0)
        loss, terms = (np.where(skip, 0.0, np.where(exists, w * a, np.nan)) for a in (loss, terms))
    back = np.argsort(order)
    whole = lambda a: a.reshape(moved.shape).transpose(back)
    held = np.where(mask, z, 0.0)
    totals = held.sum(-1), np.abs(held).sum(-1)
    return CrossEntropy(loss, lse, whole(gradient), np.abs(terms), np.abs(whole(sizes)), stats(z, -1, mask), *totals)


def cross_entropy_cotangent(
    x: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike,
    prob_factor: ArrayLike,
    maximum: ArrayLike,
    total: ArrayLike,
    count: ArrayLike,
    where: ArrayLike | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    smoothing: float = 0.0,
) -> tuple[Array, Array]:
    """`prob_factor * p - weights * q` times the slope of `z`, and its terms, for some columns of known rows."""
    labels = np.asarray(labels)[:, None]
    weights, prob_factor, maximum, total, count = (
        _widen(n)[:, None] for n in (weights, prob_factor, maximum, total, count)
    )
    z, mask = _widen(x) * scale, np.broadcast_to(True if where is None else where, np.shape(x))
    with np.errstate(all="ignore"):
        slope = slope_terms = np.full(z.shape, scale)
        if soft_cap is not None:
            z = soft_cap * np.tanh(z / soft_cap)
            slope, slope_terms = (scale * (1 + sign * (z / soft_cap) ** 2) for sign in (-1, 1))
        p = np.where(mask, np.exp(z - maximum) / total, 0.0)
        onehot = np.arange(z.shape[-1]) == labels
        q = (1 - smoothing) * onehot + np.where(mask, smoothing / count, 0.0)
        live = (labels >= 0) & (mask | onehot)
        parts = (
            (prob_factor * p - weights * q) * slope,
            (np.abs(prob_factor) * p + np.abs(weights) * q) * np.abs(slope_terms),
        )
    return np.where(live, parts[0], 0.0), np.where(live, parts[1], 0.0)


def _widen(x: ArrayLike) -> Array:
    return np.asarray(x).astype(np.float64)


def _kept(t: ArrayLike, where: ArrayLike | None) -> Array:
    return _widen(t) if where is None else np.where(where, _widen(t), 0.0)


def _logits(x: ArrayLike, where: ArrayLike | None, scale: float) -> Array:
    z = _widen(x) * scale
    return z if where is None else np.where(where, z, -np.inf)


def _lift(z: Array, axis: Axis) -> tuple[Array, Array]:
    """`exp(z - max)` and the maximum, axes kept; weights are 0 where the maximum is -inf."""
    m = z.max(axis, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore", under="ignore"):
        return np.exp(z - np.where(m == -np.inf, 0.0, m)), m
