"""The operations in plain `jax.numpy`, which platforms without kernels run and which define the kernels' semantics.

16-bit and 8-bit floats are accumulated in float32, float32 in float32, float64 in float64; results come back in the
input's dtype. `axes` are the non-negative axes of a row (reduced together); `where` broadcasts against `x`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from pallas_kernels.monoid import (
    Stats,
    combine_once,
    decay,
    exp_in,
    finite,
    log_normalizer,
    nan_or_infinite,
    scaled,
)
from pallas_kernels.softmax.problem import IGNORED
from pallas_kernels.types import Index, accumulator_dtype, varying_like

Axes = tuple[int, ...]

# On a GPU XLA reads rows as follows. With `gpu`, one device has all of the operands, whose sizes are known.
SHORT_COLS = 15  # one thread reads a row that is so short
_MANY_ELEMENTS = 2**23  # in 16 bits, with so many elements it is faster to find the states of such rows first
_WIDENED_COLS = 512
_STRIDE = 32  # of longer rows with at least so many elements between neighbours, the state is found in one reduction
_BEYOND_CACHE = 2**22  # elements up to which L2 holds the operand, and reading it again costs little


def logits(x: jax.Array, scale: float, soft_cap: float | None = None) -> jax.Array:
    """Computes `z = scale * x`, or `soft_cap * tanh(scale * x / soft_cap)`, in the dtype of accumulation."""
    z = x.astype(accumulator_dtype(x.dtype))
    z = z if scale == 1.0 else z * jnp.asarray(scale, z.dtype)
    return z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)


def below(z: jax.Array, maximum: jax.Array) -> jax.Array:
    """Clamps `z` to its row's `maximum`, which changes no value.

    It keeps XLA from fusing `scale * x - maximum` into an FMA, whose unrounded product can exceed the rounded maximum;
    beyond 1e9 the exponential of the difference then overflows. The derivative is that of `z`.
    """
    pair = jnp.broadcast_arrays(z, maximum)
    return BELOW.bind(*varying_like(pair, pair))


def _clamp(z: jax.Array, maximum: jax.Array) -> jax.Array:
    return jax.lax.select(jax.lax.gt(z, maximum), maximum, z)


def _batched(pair: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[jax.Array, int]:
    at = next(d for d in dims if d is not None)
    moved = (jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at) for x, d in zip(pair, dims, strict=True))
    return below(*moved), at


# A primitive, because not all of JAX's tools that walk programs take a custom derivative.
BELOW = Primitive("below")
BELOW.def_impl(functools.partial(xla.apply_primitive, BELOW))
BELOW.def_abstract_eval(lambda z, maximum: z)
mlir.register_lowering(BELOW, mlir.lower_fun(_clamp, multiple_results=False))
ad.defjvp(BELOW, lambda t, z, maximum: t, None)
batching.primitive_batchers[BELOW] = _batched


def _held(z: jax.Array, where: jax.Array | None) -> jax.Array:
    return z if where is None else jnp.where(where, z, -jnp.inf)


def _logits_below(
    x: jax.Array, where: jax.Array | None, maximum: jax.Array, scale: float, soft_cap: float | None = None
) -> jax.Array:
    z = _held(logits(x, scale, soft_cap), where)
    return z if scale == 1.0 and soft_cap is None else below(z, maximum)


def _in_units(x: jax.Array, scale: float, soft_cap: float | None = None) -> tuple[jax.Array, float]:
    """Gives the logits as multiples of a positive unit, and the unit: differences are exact before they are scaled."""
    unit = abs(scale) if soft_cap is None else soft_cap
    info = jnp.finfo(accumulator_dtype(x.dtype))
    if not float(info.tiny) <= unit <= float(info.max):
        return logits(x, scale, soft_cap), 1.0
    return (logits(x, math.copysign(1.0, scale)) if soft_cap is None else jnp.tanh(logits(x, scale) / soft_cap)), unit


def _times(x: jax.Array, unit: float) -> jax.Array:
    return x if unit == 1.0 else x * unit


def _maximum(z: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.stop_gradient(z.max(axes, keepdims=True, initial=-jnp.inf))


def _maximum_again(z: jax.Array, axes: Axes) -> jax.Array:
    """Finds the maximum by another expression, which has no derivative."""
    least = varying_like(jnp.full((), jnp.finfo(z.dtype).min, z.dtype), z)
    return jnp.expand_dims(jax.lax.reduce(z, least, jax.lax.max, axes), axes)


def _state(z: jax.Array, axes: Axes, unit: float, gpu: bool = False, maximum: jax.Array | None = None) -> Stats:
    """Finds the row's state, in the logits' unit; right also where XLA takes the maximum over devices. Keeps axes.

    `maximum` is the row's, if it was found in another dtype.
    """
    if gpu and _in_one_pass(z.shape, axes):
        return _state_in_one_pass(z, axes, unit)
    m = _maximum(z, axes) if maximum is None else maximum
    return Stats(*nan_or_infinite(m, decay(z, finite(m), exp=exp_in(unit)).sum(axes, keepdims=True)))


def _narrow_maximum(x: jax.Array, where: jax.Array | None, axes: Axes, scale: float) -> jax.Array | None:
    """Finds the maximum of numbers of 16 bits in their dtype, in half the bytes, which count where rows are strided."""
    if x.dtype.itemsize != 2 or scale <= 0:
        return None
    return _in_units(_maximum(_held(x, where), axes), scale)[0]


def _state_in_one_pass(z: jax.Array, axes: Axes, unit: float) -> Stats:
    """Merges the states of the elements in one reduction, which XLA does not partition over devices."""
    number = functools.partial(jnp.asarray, dtype=z.dtype)
    ones, *start = varying_like((jnp.ones_like(z), number(-jnp.inf), number(0.0)), z)
    merge = lambda a, b: tuple(combine_once(Stats(*a), Stats(*b), exp=exp_in(unit)))
    maximum, total = jax.lax.reduce((z, ones), tuple(start), merge, axes)
    # An element of -inf counts as 1 where all are such, and one of +inf hides what NaN there is.
    total = jnp.where(jnp.isinf(maximum), jnp.where(maximum > 0, number(jnp.nan), number(0.0)), total)
    return Stats(jnp.expand_dims(jax.lax.stop_gradient(maximum), axes), jnp.expand_dims(total, axes))


def _stride(shape: Sequence[int], axes: Axes) -> int:
    """Says how many elements lie between neighbours of a row; 1 where a row's elements are in several places."""
    first, last = (min(axes), max(axes)) if axes else (0, -1)
    return math.prod(shape[last + 1 :]) if last - first + 1 == len(axes) else 1


def _in_one_pass(shape: Sequence[int], axes: Axes) -> bool:
    is_long = _stride(shape, axes) >= _STRIDE and math.prod(shape[d] for d in axes) > SHORT_COLS
    return is_long and math.prod(shape) > _BEYOND_CACHE


def by_state(shape: Sequence[int], axes: Axes, itemsize: int) -> bool:
    """Says whether XLA for a GPU is faster if it finds the rows' states first, and then reads the rows once more.

    Numbers of 16 bits it would widen in a pass of their own, before it merges states.
    """
    if itemsize > 2:
        return _in_one_pass(shape, axes)
    short = 4 < math.prod(shape[d] for d in axes) <= SHORT_COLS and _stride(shape, axes) == 1
    return short and math.prod(shape) >= _MANY_ELEMENTS


def _rows(
    x: jax.Array, where: jax.Array | None, axes: Axes, scale: float, known: Stats | None, gpu: bool, again: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the logits' distances from the row's maximum, their weights, and the sum of the weights.

    Rows without a finite maximum give NaN: XLA reads a row once only where nothing guards against that. With `again`
    the maximum is another expression, so that XLA for a GPU shares nothing with a forward pass, which it would write.
    """
    if known is not None:
        maximum, total = (jnp.expand_dims(part, axes) for part in known)
        distance = _logits_below(x, where, maximum, scale) - maximum
        return distance, exp_in(1.0)(distance), total
    z, unit = _in_units(x, scale)
    z = _held(z, where)
    if gpu and by_state(z.shape, axes, x.dtype.itemsize):
        maximum, total = _state(z, axes, unit, gpu)
        return _times(z - maximum, unit), exp_in(unit)(z - maximum), total
    if gpu and again and _stride(z.shape, axes) == 1 and math.prod(z.shape) > _BEYOND_CACHE:
        maximum = _maximum_again(z, axes)
    else:
        maximum = _narrow_maximum(x, where, axes, scale)
        maximum = _maximum(z, axes) if maximum is None else maximum
    distance = z - maximum
    weights = exp_in(unit)(distance)
    return _times(distance, unit), weights, weights.sum(axes, keepdims=True)


def softmax(
    x: jax.Array,
    where: jax.Array | None = None,
    *,
    axes: Axes,
    scale: float = 1.0,
    known: Stats | None = None,
    gpu: bool = False,
) -> jax.Array:
    """Computes `exp(scale * x) / sum(exp(scale * x))` along rows; 0 where `where` is False; NaN for a row of only -inf.

    `known` is the rows' state where it came from elsewhere, as when `x` is one device's part of the columns.
    """
    _, weights, total = _rows(x, where, axes, scale, known, gpu)
    # Rounded to 16 bits both are right. A product costs so little that XLA computes it again beside the derivative; a
    # quotient it would write in float32, where rows are strided.
    y = (weights * (1 / total) if x.dtype.itemsize == 2 else weights / total).astype(x.dtype)
    return y if where is None else jnp.where(where, y, jnp.zeros((), y.dtype))


def log_softmax(
    x: jax.Array,
    where: jax.Array | None = None,
    *,
    axes: Axes,
    scale: float = 1.0,
    known: Stats | None = None,
    gpu: bool = False,
) -> jax.Array:
    """Computes `scale * x - logsumexp(scale * x)` along rows; -inf where `where` is False. `known` as in `softmax`."""
    distance, _, total = _rows(x, where, axes, scale, known, gpu)
    y = (distance - jnp.log(total)).astype(x.dtype)
    return y if where is None else jnp.where(where, y, jnp.full((), -jnp.inf, y.dtype))


def stats(x: jax.Array, where: jax.Array | None = None, *, axes: Axes, scale: float = 1.0, gpu: bool = False) -> Stats:
    """Finds the rows' states, `axes` removed."""
    z, unit = _in_units(x, scale)
    # XLA would widen short rows' numbers of 16 bits in a pass of their own.
    one_pass = gpu and (x.dtype.itemsize > 2 or math.prod(x.shape[d] for d in axes) >= _WIDENED_COLS)
    maximum = _narrow_maximum(x, where, axes, scale) if gpu else None
    kept = scaled(_state(_held(z, where), axes, unit, one_pass, maximum), unit)
    return Stats(kept.max.squeeze(axes), kept.sum.squeeze(axes))


def stats_tangent(
    x: jax.Array, where: jax.Array | None, t: jax.Array, maximum: jax.Array, *, axes: Axes, scale: float = 1.0
) -> jax.Array:
    """Returns `sum(exp(z - max) * dz)`, the tangent of `stats(x).sum` for `dx = t`, with `max` held constant."""
    maximum = jnp.expand_dims(maximum, axes)
    z, t = _logits_below(x, where, maximum, scale), logits(t, scale)
    weights = decay(z, maximum)
    if where is not None:
        # Where x is masked out, its tangent may have any value. Entries that are all -inf have no derivative.
        t = jnp.where(where, t, jnp.zeros((), t.dtype))
        weights = jnp.where(where & (maximum == -jnp.inf), jnp.full((), jnp.nan, z.dtype), weights)
    return (weights * t).sum(axes)


def row_dot(y: jax.Array, t: jax.Array, *, axes: Axes) -> jax.Array:
    """Returns `sum(y * t)` along `axes`, which are removed."""
    dtype = accumulator_dtype(y.dtype)
    return (y.astype(dtype) * t.astype(dtype)).sum(axes)


def softmax_tangent(
    y: jax.Array,
    t: jax.Array,
    *,
    axes: Axes,
    scale: float = 1.0,
    slope: jax.Array | None = None,
    gpu: bool = False,
) -> jax.Array:
    """Computes `J t`, which is `J^T t` too, for softmax at output `y`: `scale * y * (t - sum(y * t))`.

    `slope` is the sum, without `axes`, where it is known.
    """
    dtype = accumulator_dtype(y.dtype)
    slope = row_dot(y, t, axes=axes) if slope is None else slope
    out = y.astype(dtype) * (t.astype(dtype) - jnp.expand_dims(slope, axes))
    return (out if scale == 1.0 else out * jnp.asarray(scale, dtype)).astype(t.dtype)


def log_softmax_tangent(
    x: jax.Array,
    t: jax.Array,
    *,
    axes: Axes,
    scale: float = 1.0,
    slope: jax.Array | None = None,
    gpu: bool = False,
) -> jax.Array:
    """Computes `J t` for log_softmax at input `x`: `scale * (t - sum(p * t))` with `p = softmax(scale * x)`.

    `slope` is the sum, without `axes`, where it is known.
    """
    dtype = accumulator_dtype(t.dtype)
    slope = row_dot(_probabilities(x, axes, scale, None, gpu), t, axes=axes) if slope is None else slope
    return (jnp.asarray(scale, dtype) * (t.astype(dtype) - jnp.expand_dims(slope, axes))).astype(t.dtype)


def log_softmax_cotangent(
    x: jax.Array,
    t: jax.Array,
    *,
    axes: Axes,
    scale: float = 1.0,
    known: Stats | None = None,
    total: jax.Array | None = None,
    gpu: bool = False,
) -> jax.Array:
    """Computes `J^T t` for log_softmax at input `x`: `scale * (t - p * sum(t))` with `p = softmax(scale * x)`.

    `known` is the rows' state and `total` their sum of `t`, without `axes`, where they are known.
    """
    dtype = accumulator_dtype(t.dtype)
    p, t32 = _probabilities(x, axes, scale, known, gpu), t.astype(dtype)
    total = t32.sum(axes) if total is None else total
    return (jnp.asarray(scale, dtype) * (t32 - p * jnp.expand_dims(total, axes))).astype(t.dtype)


def _probabilities(x: jax.Array, axes: Axes, scale: float, known: Stats | None, gpu: bool) -> jax.Array:
    distance, weights, total = _rows(x, None, axes, scale, known, gpu, again=True)
    # Rounded to 16 bits, both forms are right. log_softmax has the logarithm too, so that no sum need be kept beside.
    return exp_in(1.0)(distance - jnp.log(total)) if x.dtype.itemsize == 2 else weights / total


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
    gpu: bool = False,
) -> tuple[jax.Array, ...]:
    """Finds each row's values for the loss, `axes` removed: the state and, with smoothing, the sum of the logits.

    `labels` has an extent of 1 on `axes`; a row whose label is `IGNORED` is not read and gives 0, 1 and 0.
    """
    read, (z, unit) = labels != IGNORED, _in_units(x, scale, soft_cap)
    maximum = _narrow_maximum(x, where, axes, scale) if gpu and soft_cap is None else None
    kept = scaled(_state(_held(z, where), axes, unit, gpu, maximum), unit)
    values = [jnp.where(read, kept.max, 0.0), jnp.where(read, kept.sum, 1.0)]
    if smoothing:
        total = _times((z if where is None else jnp.where(where, z, 0.0)).sum(axes, keepdims=True), unit)
        values.append(jnp.where(read, total, 0.0))
    values = [value.squeeze(axes) for value in values]
    return tuple(values) if smoothing else Stats(*values)


def cross_entropy_gradient(
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    where: jax.Array | None = None,
    *,
    axes: Axes,
    z_loss: float = 0.0,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Computes `weights` times the gradient of each row's loss, in `x`'s dtype, and the values of `cross_entropy`."""
    values = cross_entropy(x, labels, where, axes=axes, **options)
    known = Stats(*(jnp.expand_dims(value, axes) for value in values[:2]))
    prob_factor = prob_factor_of(weights, log_normalizer(known), z_loss)
    out = cross_entropy_slope(x, labels, where, prob_factor, weights, known, axes=axes, **options)
    return (out.astype(x.dtype), *values)


def cross_entropy_cotangent(
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    prob_factor: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    count: jax.Array,
    where: jax.Array | None = None,
    *,
    axes: Axes,
    **options: Any,
) -> jax.Array:
    """Computes `cross_entropy_slope` in `x`'s dtype for a part of the columns; states and `count` are of all columns.

    The label of a row that has it elsewhere is past the last column.
    """
    known = Stats(maximum, total)
    return cross_entropy_slope(x, labels, where, prob_factor, weights, known, axes=axes, count=count, **options).astype(
        x.dtype
    )


def cross_entropy_slope(
    x: jax.Array,
    labels: jax.Array,
    where: jax.Array | None,
    prob_factor: jax.Array,
    label_factor: jax.Array,
    known: Stats,
    *,
    axes: Axes,
    scale: float = 1.0,
    soft_cap: float | None = None,
    smoothing: float = 0.0,
    count: Index | None = None,
    **_: object,
) -> jax.Array:
    """Computes `dx = (prob_factor * p - label_factor * q) * dz/dx` in the dtype of accumulation; 0 in ignored rows.

    `p = exp(z) / sum` of the rows' `known` states and `q = (1 - smoothing) * [j == label] + smoothing / count`. All but
    `x` and `where` have an extent of 1 on `axes`. `count` is the number of columns, where `x` is a part of them.
    """
    z, at_label = logits(x, scale, soft_cap), columns(x, axes) == labels
    weights = decay(_logits_below(x, where, known.max, scale, soft_cap), known.max)
    # XLA would divide each element; this divides once a row.
    by_p = weights * (prob_factor / known.sum)
    by_p = by_p if where is None else jnp.where(where, by_p, 0.0)
    q = jnp.where(at_label, 1.0 - smoothing, 0.0)
    if smoothing:
        share = smoothing / jnp.maximum(column_count(x, where, axes) if count is None else count, 1)
        q = q + (share if where is None else jnp.where(where, share, 0.0))
    slope = scale if soft_cap is None else scale * (1.0 - jnp.square(z / soft_cap))
    out = (by_p - label_factor * q) * slope
    # Masked elements may have any value.
    return jnp.where((labels != IGNORED) & (True if where is None else where | at_label), out, 0.0)


def prob_factor_of(weights: jax.Array, lse: jax.Array, z_loss: float) -> jax.Array:
    """Weighs a row's probabilities in the gradient: the loss rises with the logsumexp, and so does its square."""
    return weights * (1.0 + 2.0 * z_loss * lse) if z_loss else weights


def columns(x: jax.Array, axes: Axes) -> jax.Array:
    """Numbers each element's column: its place in its row, `axes` flattened; cut as `x` is, if its type says how."""
    sharding = jax.typeof(x).sharding
    cut = sharding if any(entry is not None for entry in sharding.spec) else None
    index = jnp.zeros((), jnp.int32)
    for axis in axes:
        index = index * x.shape[axis] + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis, out_sharding=cut)
    return index


def column_count(x: jax.Array, where: jax.Array | None, axes: Axes) -> Index:
    """Says how many columns of each row take part, with the reduced axes kept."""
    if where is None:
        return math.prod(x.shape[d] for d in axes)
    whole_rows = [n if d in axes else 1 for d, n in enumerate(x.shape)]
    full = jnp.broadcast_to(where, jnp.broadcast_shapes(where.shape, tuple(whole_rows)))
    return full.sum(axes, keepdims=True, dtype=accumulator_dtype(x.dtype))
