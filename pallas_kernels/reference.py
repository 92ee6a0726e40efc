"""The operations in plain `jax.numpy`: what platforms without kernels run, and the semantics the kernels keep.

16-bit and 8-bit floats are accumulated in float32, float32 in float32, float64 in float64; results come back in the
input's dtype. `axes` are the non-negative axes of a row (reduced together); `where` broadcasts against `x`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.monoid import Stats, decay, log_normalizer
from pallas_kernels.problem import IGNORED

Axes = tuple[int, ...]


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype rows are accumulated in."""
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize == 8 else jnp.float32)


def logits(x: jax.Array, scale: float, soft_cap: float | None = None) -> jax.Array:
    """`z = scale * x`, or `soft_cap * tanh(scale * x / soft_cap)`, in the dtype of accumulation."""
    z = x.astype(accumulator_dtype(x.dtype))
    z = z if scale == 1.0 else z * jnp.asarray(scale, z.dtype)
    return z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)


def _logits(x: jax.Array, where: jax.Array | None, scale: float, soft_cap: float | None = None) -> jax.Array:
    z = logits(x, scale, soft_cap)
    return z if where is None else jnp.where(where, z, -jnp.inf)


def _lift(z: jax.Array, axes: Axes, known: Stats | None = None) -> tuple[jax.Array, Stats]:
    """Weights relative to the row's maximum, and the row's state, with the reduced axes kept."""
    if known is not None:
        known = Stats(*(jnp.expand_dims(part, axes) for part in known))
        return decay(z, known.max), known
    m = jax.lax.stop_gradient(z.max(axes, keepdims=True, initial=-jnp.inf))
    weights = decay(z, m)
    return weights, Stats(m, weights.sum(axes, keepdims=True))


def softmax(
    x: jax.Array, where: jax.Array | None = None, *, axes: Axes, scale: float = 1.0, known: Stats | None = None
) -> jax.Array:
    """`exp(scale * x) / sum(exp(scale * x))` along `axes`; 0 where `where` is False; NaN for a row of only -inf.

    `known` is the rows' state where it came from elsewhere, as when `x` is one device's part of the columns.
    """
    weights, stats = _lift(_logits(x, where, scale), axes, known)
    y = (weights / stats.sum).astype(x.dtype)
    return y if where is None else jnp.where(where, y, jnp.zeros((), y.dtype))


def log_softmax(
    x: jax.Array, where: jax.Array | None = None, *, axes: Axes, scale: float = 1.0, known: Stats | None = None
) -> jax.Array:
    """`scale * x - logsumexp(scale * x)` along `axes`; -inf where `where` is False. `known` as in `softmax`."""
    z = _logits(x, where, scale)
    _, stats = _lift(z, axes, known)
    y = ((z - stats.max) - jnp.log(stats.sum)).astype(x.dtype)
    return y if where is None else jnp.where(where, y, jnp.full((), -jnp.inf, y.dtype))


def stats(x: jax.Array, where: jax.Array | None = None, *, axes: Axes, scale: float = 1.0) -> Stats:
    """The rows' states, `axes` removed."""
    _, kept = _lift(_logits(x, where, scale), axes)
    return Stats(kept.max.squeeze(axes), kept.sum.squeeze(axes))


def stats_tangent(
    x: jax.Array, where: jax.Array | None, t: jax.Array, maximum: jax.Array, *, axes: Axes, scale: float = 1.0
) -> jax.Array:
    """The tangent of `stats(x).sum` for a tangent `t` of `x`, the maximum held constant (its choice has no effect)."""
    z = _logits(x, where, scale)
    t = _logits(t, None, scale)
    keep = lambda x: x if where is None else jnp.where(where, x, jnp.zeros((), x.dtype))
    # Both selections: a tangent may be anything where x is masked out, and the cotangent of a row of none is infinite.
    out = decay(z, jnp.expand_dims(maximum, axes)) * keep(t)
    return keep(out).sum(axes)


def row_dot(y: jax.Array, t: jax.Array, *, axes: Axes) -> jax.Array:
    """`sum(y * t)` along `axes`, which are removed."""
    dtype = accumulator_dtype(y.dtype)
    return (y.astype(dtype) * t.astype(dtype)).sum(axes)


def softmax_tangent(
    y: jax.Array, t: jax.Array, *, axes: Axes, scale: float = 1.0, slope: jax.Array | None = None
) -> jax.Array:
    """`J t` for softmax at output `y`: `scale * y * (t - sum(y * t))`. `J` is symmetric, so this is `J^T t` too.

    `slope` is the sum, without `axes`, where it is known.
    """
    dtype = accumulator_dtype(y.dtype)
    slope = row_dot(y, t, axes=axes) if slope is None else slope
    out = y.astype(dtype) * (t.astype(dtype) - jnp.expand_dims(slope, axes))
    return (out if scale == 1.0 else out * jnp.asarray(scale, dtype)).astype(t.dtype)


def log_softmax_tangent(
    x: jax.Array, t: jax.Array, *, axes: Axes, scale: float = 1.0, slope: jax.Array | None = None
) -> jax.Array:
    """`J t` for log_softmax at input `x`: `scale * (t - sum(p * t))` with `p = softmax(scale * x)`.

    `slope` is the sum, without `axes`, where it is known.
    """
    dtype = accumulator_dtype(t.dtype)
    slope = row_dot(_probabilities(x, axes, scale), t, axes=axes) if slope is None else slope
    return (jnp.asarray(scale, dtype) * (t.astype(dtype) - jnp.expand_dims(slope, axes))).astype(t.dtype)


def log_softmax_cotangent(
    x: jax.Array,
    t: jax.Array,
    *,
    axes: Axes,
    scale: float = 1.0,
    known: Stats | None = None,
    total: jax.Array | None = None,
) -> jax.Array:
    """`J^T t` for log_softmax at input `x`: `scale * (t - p * sum(t))` with `p = softmax(scale * x)`.

    `known` is the rows' state and `total` their sum of `t`, without `axes`, where they are known.
    """
    dtype = accumulator_dtype(t.dtype)
    p, t32 = _probabilities(x, axes, scale, known), t.astype(dtype)
    total = t32.sum(axes) if total is None else total
    return (jnp.asarray(scale, dtype) * (t32 - p * jnp.expand_dims(total, axes))).astype(t.dtype)


def _probabilities(x: jax.Array, axes: Axes, scale: float, known: Stats | None = None) -> jax.Array:
    weights, kept = _lift(_logits(x, None, scale), axes, known)
    return weights / kept.sum


def cross_entropy(
    x: jax.Array,
    labels: jax.Array,
    where: jax.Array | None = None,
    *,
    axes: Axes,
    scale: float = 1.0,
    soft_cap: float | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, ...]:
    """What the loss needs of each row, `axes` removed: the state, and with smoothing the sum of the logits.

    `labels` has an extent of 1 on `axes`; a row whose label is `IGNORED` is not read and gives 0, 1 and 0.
    """
    read, z = labels != IGNORED, logits(x, scale, soft_cap)
    _, kept = _lift(z if where is None else jnp.where(where, z, -jnp.inf), axes)
    numbers = [jnp.where(read, kept.max, 0.0), jnp.where(read, kept.sum, 1.0)]
    if smoothing:
        total = (z if where is None else jnp.where(where, z, 0.0)).sum(axes, keepdims=True)
        numbers.append(jnp.where(read, total, 0.0))
    numbers = [number.squeeze(axes) for number in numbers]
    return tuple(numbers) if smoothing else Stats(*numbers)


def cross_entropy_gradient(
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    where: jax.Array | None = None,
    *,
    axes: Axes,
    scale: float = 1.0,
    soft_cap: float | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, ...]:
    """`weights` times the gradient of each row's loss, in `x`'s dtype, and what `cross_entropy` gives."""
    numbers = cross_entropy(x, labels, where, axes=axes, scale=scale, soft_cap=soft_cap, smoothing=smoothing)
    known = Stats(*(jnp.expand_dims(number, axes) for number in numbers[:2]))
    out = cross_entropy_slope(
        x,
        labels,
        where,
        weight_of_p(weights, log_normalizer(known), z_loss),
        weights,
        known,
        axes=axes,
        scale=scale,
        soft_cap=soft_cap,
        smoothing=smoothing,
    )
    return (out.astype(x.dtype), *numbers)


def cross_entropy_slope(
    x: jax.Array,
    labels: jax.Array,
    where: jax.Array | None,
    of_p: jax.Array,
    of_q: jax.Array,
    known: Stats,
    *,
    axes: Axes,
    scale: float = 1.0,
    soft_cap: float | None = None,
    smoothing: float = 0.0,
    count: Any = None,
    **_: Any,
) -> jax.Array:
    """`(of_p * p - of_q * q) * dz/dx` in the dtype of accumulation, 0 in rows that are ignored.

    `p = exp(z) / sum` of the rows' `known` states and `q = (1 - smoothing) * [j == label] + smoothing / count`. All but
    `x` and `where` have an extent of 1 on `axes`. `count` is the number of columns, where `x` is a part of them.
    """
    z, at_label = logits(x, scale, soft_cap), columns(x, axes) == labels
    weights = decay(z if where is None else jnp.where(where, z, -jnp.inf), known.max)
    if where is not None:
        # Where nothing is held the logsumexp in `of_p` is -inf; 0 for `p` alone would leave 0 * inf of infinite rows.
        of_p = jnp.where(known.max == -jnp.inf, 0.0, of_p)
    # One division a row: XLA would do one for each element.
    by_p = weights * (of_p / known.sum)
    by_p = by_p if where is None else jnp.where(where, by_p, 0.0)
    q = jnp.where(at_label, 1.0 - smoothing, 0.0)
    if smoothing:
        share = smoothing / jnp.maximum(column_count(x, where, axes) if count is None else count, 1)
        q = q + (share if where is None else jnp.where(where, share, 0.0))
    slope = scale if soft_cap is None else scale * (1.0 - jnp.square(z / soft_cap))
    out = (by_p - of_q * q) * slope
    # What is absent may be anything.
    return jnp.where((labels != IGNORED) & (True if where is None else where | at_label), out, 0.0)


def weight_of_p(weights: jax.Array, lse: jax.Array, z_loss: float) -> jax.Array:
    """What the gradient has of a row's probabilities: the loss rises with the logsumexp, and so does its square."""
    return weights * (1.0 + 2.0 * z_loss * lse) if z_loss else weights


def columns(x: jax.Array, axes: Axes) -> jax.Array:
    """Each element's column: its place in its row, `axes` flattened; cut as `x` is, if its type says how."""
    sharding = jax.typeof(x).sharding
    cut = sharding if any(entry is not None for entry in sharding.spec) else None
    number = jnp.zeros((), jnp.int32)
    for axis in axes:
        number = number * x.shape[axis] + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis, out_sharding=cut)
    return number


def column_count(x: jax.Array, where: jax.Array | None, axes: Axes) -> Any:
    """How many columns of each row take part, with the reduced axes kept."""
    if where is None:
        return math.prod(x.shape[d] for d in axes)
    whole_rows = [n if d in axes else 1 for d, n in enumerate(x.shape)]
    full = jnp.broadcast_to(where, jnp.broadcast_shapes(where.shape, tuple(whole_rows)))
    return full.sum(axes, keepdims=True, dtype=accumulator_dtype(x.dtype))
