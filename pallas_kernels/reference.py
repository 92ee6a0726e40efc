"""The operations in plain `jax.numpy`: what every platform without our kernels runs, and the semantics the kernels keep.

16-bit and 8-bit floats are accumulated in float32, float32 in float32, float64 in float64; results come back in the
input's dtype. `axes` are the non-negative axes of a row (reduced together); `where` broadcasts against `x`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.monoid import Stats, decay

Axes = tuple[int, ...]


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype rows are accumulated in."""
    return jnp.promote_types(dtype, jnp.float32)


def _logits(x: jax.Array, where: jax.Array | None, scale: float) -> jax.Array:
    z = x.astype(accumulator_dtype(x.dtype))
    z = z if scale == 1.0 else z * jnp.asarray(scale, z.dtype)
    return z if where is None else jnp.where(where, z, -jnp.inf)


def _lift(z: jax.Array, axes: Axes) -> tuple[jax.Array, Stats]:
    """Weights relative to the row's maximum, and the row's state, with the reduced axes kept."""
    m = jax.lax.stop_gradient(z.max(axes, keepdims=True, initial=-jnp.inf))
    weights = decay(z, m)
    return weights, Stats(m, weights.sum(axes, keepdims=True))


def softmax(x: jax.Array, where: jax.Array | None = None, *, axes: Axes, scale: float = 1.0) -> jax.Array:
    """`exp(scale * x) / sum(exp(scale * x))` along `axes`; 0 where `where` is False; NaN for a row of only -inf."""
    weights, stats = _lift(_logits(x, where, scale), axes)
    y = (weights / stats.sum).astype(x.dtype)
    return y if where is None else jnp.where(where, y, jnp.zeros_like(y))


def log_softmax(x: jax.Array, where: jax.Array | None = None, *, axes: Axes, scale: float = 1.0) -> jax.Array:
    """`scale * x - logsumexp(scale * x)` along `axes`; -inf where `where` is False."""
    z = _logits(x, where, scale)
    _, stats = _lift(z, axes)
    y = ((z - stats.max) - jnp.log(stats.sum)).astype(x.dtype)
    return y if where is None else jnp.where(where, y, jnp.full_like(y, -jnp.inf))


def stats(x: jax.Array, where: jax.Array | None = None, *, axes: Axes, scale: float = 1.0) -> Stats:
    """The rows' states, `axes` removed."""
    _, kept = _lift(_logits(x, where, scale), axes)
    return Stats(kept.max.squeeze(axes), kept.sum.squeeze(axes))


def softmax_tangent(y: jax.Array, t: jax.Array, *, axes: Axes, scale: float = 1.0) -> jax.Array:
    """`J t` for softmax at output `y`: `scale * y * (t - sum(y * t))`. `J` is symmetric, so this is `J^T t` too."""
    dtype = accumulator_dtype(y.dtype)
    y32, t32 = y.astype(dtype), t.astype(dtype)
    out = y32 * (t32 - (y32 * t32).sum(axes, keepdims=True))
    return (out if scale == 1.0 else out * jnp.asarray(scale, dtype)).astype(t.dtype)


def log_softmax_tangent(x: jax.Array, t: jax.Array, *, axes: Axes, scale: float = 1.0) -> jax.Array:
    """`J t` for log_softmax at input `x`: `scale * (t - sum(p * t))` with `p = softmax(scale * x)`."""
    p, t32 = _probabilities(x, t, axes, scale)
    return (jnp.asarray(scale, t32.dtype) * (t32 - (p * t32).sum(axes, keepdims=True))).astype(t.dtype)


def log_softmax_cotangent(x: jax.Array, t: jax.Array, *, axes: Axes, scale: float = 1.0) -> jax.Array:
    """`J^T t` for log_softmax at input `x`: `scale * (t - p * sum(t))` with `p = softmax(scale * x)`."""
    p, t32 = _probabilities(x, t, axes, scale)
    return (jnp.asarray(scale, t32.dtype) * (t32 - p * t32.sum(axes, keepdims=True))).astype(t.dtype)


def _probabilities(x: jax.Array, t: jax.Array, axes: Axes, scale: float) -> tuple[jax.Array, jax.Array]:
    weights, kept = _lift(_logits(x, None, scale), axes)
    return weights / kept.sum, t.astype(weights.dtype)
