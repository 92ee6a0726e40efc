"""The operations in plain `jax.numpy`: what platforms without kernels run, and the semantics the kernels keep.

16-bit and 8-bit floats are accumulated in float32, float32 in float32, float64 in float64; results come back in the
input's dtype. `axes` are the non-negative axes of a row (reduced together); `where` broadcasts against `x`.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.monoid import Stats, decay

Axes = tuple[int, ...]


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype rows are accumulated in."""
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize == 8 else jnp.float32)


def _logits(x: jax.Array, where: jax.Array | None, scale: float) -> jax.Array:
    z = x.astype(accumulator_dtype(x.dtype))
    z = z if scale == 1.0 else z * jnp.asarray(scale, z.dtype)
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
    return y if where is None else jnp.where(where, y, jnp.zeros_like(y))


def log_softmax(
    x: jax.Array, where: jax.Array | None = None, *, axes: Axes, scale: float = 1.0, known: Stats | None = None
) -> jax.Array:
    """`scale * x - logsumexp(scale * x)` along `axes`; -inf where `where` is False. `known` as in `softmax`."""
    z = _logits(x, where, scale)
    _, stats = _lift(z, axes, known)
    y = ((z - stats.max) - jnp.log(stats.sum)).astype(x.dtype)
    return y if where is None else jnp.where(where, y, jnp.full_like(y, -jnp.inf))


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
    t = t if where is None else jnp.where(where, t, jnp.zeros_like(t))
    return (decay(z, jnp.expand_dims(maximum, axes)) * t).sum(axes)


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
    """The rows' states, `axes` removed, and with `smoothing` the sum of their logits: what a loss is made of.

    The logits are `scale * x`, or `soft_cap * tanh(scale * x / soft_cap)`. `labels` have the extent 1 along `axes`; of
    rows with the label -1 nothing is read, and their numbers are 0, 1 and 0. `z_loss` has no effect.
    """
    del z_loss
    kept = _labelled(x, labels, where, axes, scale, soft_cap)[1]
    numbers = [part.squeeze(axes) for part in kept[: 3 if smoothing else 2]]
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
    """The gradient of `weights` times the loss, and then what `cross_entropy` gives.

    The loss is `lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse**2` for logits `z`, the mean
    taken over the columns that `where` includes. Rows with the label -1 have zeros, whatever they hold.
    """
    z, (maximum, total, sum_z) = _labelled(x, labels, where, axes, scale, soft_cap)
    counts, dtype = labels >= 0, z.dtype
    weights = jnp.where(counts, weights.astype(dtype), 0)
    slope = weights * (1 + 2 * z_loss * (maximum + jnp.log(total)))
    out = decay(z, maximum) * (slope / total)
    if smoothing:
        columns = math.prod(x.shape[axis] for axis in axes) if where is None else _included(x, where, axes)
        out = out - weights * (smoothing / columns)
    out = out if where is None else jnp.where(where, out, 0)
    out = out - jnp.where(_column(x, axes) == labels, weights * (1 - smoothing), 0)
    out = out * scale
    if soft_cap is not None:
        out = out * (1 - jnp.square(jnp.tanh(_logits(x, None, scale) / soft_cap)))
    gradient = jnp.where(counts, out, 0).astype(x.dtype)
    return gradient, *(part.squeeze(axes) for part in (maximum, total, sum_z)[: 3 if smoothing else 2])


def _labelled(
    x: jax.Array, labels: jax.Array, where: jax.Array | None, axes: Axes, scale: float, soft_cap: float | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """The logits, and the rows' maximum, sum of weights and sum of logits; neutral for rows with the label -1."""
    counts = labels >= 0
    z = _logits(x, None, scale)
    z = z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)
    total = (z if where is None else jnp.where(where, z, 0)).sum(axes, keepdims=True)
    z = z if where is None else jnp.where(where, z, -jnp.inf)
    _, kept = _lift(z, axes)
    numbers = zip((*kept, total), (0, 1, 0), strict=True)
    maximum, sums, total = (jnp.where(counts, part, neutral) for part, neutral in numbers)
    return z, (maximum, sums, total)


def _included(x: jax.Array, where: jax.Array, axes: Axes) -> jax.Array:
    """How many columns of each row `where` includes."""
    return jnp.broadcast_to(where, x.shape).sum(axes, keepdims=True)


def _column(x: jax.Array, axes: Axes) -> jax.Array:
    """Each element's place in its row."""
    column = jnp.zeros((), jnp.int32)
    for axis in axes:
        column = column * x.shape[axis] + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return column
