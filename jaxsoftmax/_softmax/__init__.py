"""softmax, log_softmax and logsumexp, which canonicalise, validate and bind `primitives`."""

import functools
import math
from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from jaxsoftmax._core import checks, numbers
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike, Axis, Implementation
from jaxsoftmax._core.memory import in_device_memory
from jaxsoftmax._core.primitives import checked
from jaxsoftmax._core.sharding import broadcast_to, unify_shardings
from jaxsoftmax._softmax.primitives import bind
from pallas_kernels import monoid
from pallas_kernels.monoid import Stats, combine
from pallas_kernels.softmax.problem import Op
from pallas_kernels.types import accumulator_dtype

# Bound once: a program may put this library's functions in their place.
_JAX_NN = {Op.SOFTMAX: jax.nn.softmax, Op.LOG_SOFTMAX: jax.nn.log_softmax}
_JAX_LOGSUMEXP = jax.scipy.special.logsumexp


class _How(TypedDict):
    axis: tuple[int, ...]
    keepdims: bool
    return_sign: bool


_WITH_WEIGHTS = "the kernels take no weights b; pass implementation=None, or use logsumexp(a + log(b)) where b > 0."


@public
@in_device_memory
def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes softmax, `exp(scale * x) / sum(exp(scale * x))` along `axis`, as `jax.nn.softmax` does.

    16-bit and 8-bit floats are accumulated in float32 and rounded once; float32 and float64 in themselves. By a kernel,
    identical rows of a call give identical bits, and under `batch_invariant()` a row's bits are the same in any batch.

    An entry of -inf gives 0. A row of only -inf gives NaN, as does a row with +inf or NaN. A row that `where` excludes
    entirely gives zeros. Empty arrays and rows of one element are fine. Complex arrays are handed to
    `jax.nn.softmax`, which has no derivative of them.

    Derivatives of every order exist, in forward and reverse mode; the first costs one fused pass over `y` and the
    (co)tangent. Under `jax.checkpoint` the output has the name `"softmax_out"` for policies that save by name.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867.

    Args:
        x: Logits of any dtype and any shape; integers and booleans are promoted as by `jnp.exp`.
        axis: The axis or axes that sum to one; None for all.
        where: A boolean mask that broadcasts with `x`; entries where it is False count as absent.
        scale: The logits' factor, an inverse temperature. A positive number is fused into the kernel. Any other
            number, and an array that broadcasts to `x` (traced, or one factor per row), is multiplied in before it, in
            the dtype of accumulation, and is differentiable. So is, outside `jit`, a number after the first four, which
            would compile a program each (docs/numbers.md). It is real, also where `x` is complex.
        implementation: None for the fastest there is, "xla", or "mosaic_gpu", which raises rather than falls back.

    Returns:
        An array of `x`'s shape and (floating) dtype. Its type is not weak, even if that of `x` is.

    Raises:
        TypeError: `x` is no array of numbers, `scale` is complex, `where` is not boolean, or `axis` is not an integer
            or several.
        ValueError: `axis`, `where`, `scale` or `implementation` does not fit.
        NotImplementedError: `implementation="mosaic_gpu"` and no kernel takes the call; raised when it is compiled.

    >>> import jax.numpy as jnp
    >>> softmax(jnp.array([0.0, 0.0, -jnp.inf, 0.0]), where=jnp.array([True, True, True, False]))
    Array([0.5, 0.5, 0. , 0. ], dtype=float32)
    """
    return _row_op(Op.SOFTMAX, x, axis, where, scale, implementation)


@public
@in_device_memory
def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns the logarithm of softmax, `scale * x - logsumexp(scale * x)` along `axis`: `jax.nn.log_softmax`.

    Accumulates as `softmax` does. An entry of -inf, or one that `where` excludes, gives -inf; rows of only -inf, and
    rows with +inf or NaN, give NaN. Empty arrays are fine. Complex arrays are handed to `jax.nn.log_softmax`,
    which has no derivative of them.

    Derivatives of every order exist, in forward and reverse mode. The only residual of the first is `x` itself: the
    row's statistics are taken again, or within one program once for both.

    XLA computes float32 results on Hopper too, and of more than 16384 columns those of 16 bits, from statistics that a
    kernel finds: it fuses them with what consumes them. A kernel that is named, or that `batch_invariant` asks for,
    computes all.

    Source: as `softmax`.

    Args:
        x: Logits, as for `softmax`.
        axis: The axis or axes to normalise over; None for all.
        where: A boolean mask that broadcasts with `x`.
        scale: The logits' factor, as for `softmax`.
        implementation: None, "xla" or "mosaic_gpu", as for `softmax`.

    Returns:
        An array of `x`'s shape and (floating) dtype. Its type is not weak, even if that of `x` is.

    Raises:
        TypeError: `x` is no array of numbers, `scale` is complex, `where` is not boolean, or `axis` is not an integer
            or several.
        ValueError: `axis`, `where`, `scale` or `implementation` does not fit.
        NotImplementedError: `implementation="mosaic_gpu"` and no kernel takes the call; raised when it is compiled.

    >>> import jax.numpy as jnp
    >>> log_softmax(jnp.zeros(65536, jnp.float16))[0] == -jnp.log(65536.0).astype(jnp.float16)
    Array(True, dtype=bool)
    """
    return _row_op(Op.LOG_SOFTMAX, x, axis, where, scale, implementation)


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array: ...
@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis,
    b: ArrayLike | None,
    keepdims: bool,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@public
@in_device_memory
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns `log(sum(exp(a)))` along `axis`: `jax.scipy.special.logsumexp`.

    Accumulates as `softmax` does. No entries (an empty axis, or all excluded) give -inf, as do only entries of -inf;
    +inf gives +inf; NaN gives NaN. A dtype that has no infinity, as float8_e4m3fn, gives NaN for one, as in
    `jax.scipy`. Derivatives of every order exist, in forward and reverse mode.

    Source: as `softmax`.

    Args:
        a: Exponents of any dtype and any shape.
        axis: The axis or axes to sum over; None for all.
        b: Weights of the exponentials, which may be negative; they broadcast with `a`. A sum with weights, and one of
            complex numbers, is computed by `jax.scipy.special.logsumexp` in the dtype of accumulation, not by a kernel.
        keepdims: Keeps the reduced axes, with extent 1.
        return_sign: Returns `(log|sum|, sign of the sum)`; the sign of a complex sum is `sum / |sum|`.
        where: A boolean mask that broadcasts with `a`.
        implementation: None, "xla" or "mosaic_gpu", as for `softmax`.

    Returns:
        An array of `a`'s floating dtype, or a pair of them.

    Raises:
        TypeError: `a` or `b` is no array of numbers, `where` is not boolean, or `axis` is not an integer or several.
        ValueError: `axis`, `b`, `where` or `implementation` does not fit.
        NotImplementedError: `implementation="mosaic_gpu"` with `b`, complex numbers, or where no kernel fits.

    >>> import jax.numpy as jnp
    >>> logsumexp(jnp.array([[0.0, 0.0], [1000.0, -1000.0]]), axis=1)
    Array([6.931472e-01, 1.000000e+03], dtype=float32)
    """
    name = "logsumexp"
    x = checks.inexact(name, "a", a)
    implementation = checks.implementation(name, implementation)
    mask = {} if where is None else {"where": checks.boolean(name, where)}
    weights = {} if b is None else {"b": checks.inexact(name, "b", b)}
    operands = unify_shardings(*checks.same_rank(name, "a", x, **mask, **weights))
    axes = checks.axes(name, axis, operands[0].ndim, "a")
    if weights or jnp.iscomplexobj(x):
        if implementation == "mosaic_gpu":
            raise checks.no_kernel(name, _WITH_WEIGHTS) if weights else checks.no_kernel_for_complex(name, "a")
        dtype = x.dtype if b is None else _promoted(a, b, x.dtype)
        others = dict(zip([*mask, *weights], operands[1:], strict=True))
        return _by_jax(operands[0], dtype, **others, axis=axes, keepdims=keepdims, return_sign=return_sign)
    how = {"implementation": implementation, "function": name, **checks.batch_invariance()}
    stats = Stats(*bind(Op.STATS, *operands, axes=axes, scale=1.0, **how))
    if mask:
        # A row without an entry is a constant: the derivative of its sum's logarithm would be infinite, or 0 / 0.
        stats = Stats(stats.max, jnp.where(stats.sum == 0, jnp.ones_like(stats.sum), stats.sum))
    out = monoid.log_normalizer(stats).astype(x.dtype)
    out = jnp.expand_dims(out, axes) if keepdims else out
    if not return_sign:
        return out
    return out, jnp.where(jnp.isnan(out), out, (out > -jnp.inf).astype(out.dtype))


@public
@in_device_memory
def merge(*states: Stats) -> Stats:
    """Merges the states of parts of a row into the state of the row, in any order and grouping.

    The state `Stats(max, sum)` stands for `exp(max) * sum`, the sum of the exponentials seen, in a form that cannot
    overflow; `log_normalizer` gives their logsumexp. `Stats(-inf, 0)` has seen nothing, and merging it changes nothing.
    A state of +inf makes +inf of the whole, with a sum that is NaN, and one of NaN makes NaN.

    For those who split rows themselves: over a stream, over devices, over a cache of keys.

    Source: as `softmax`.

    Args:
        *states: At least one state, of real arrays that broadcast against each other.

    Returns:
        The merged state, float64 if any part of a state is and float32 otherwise; differentiable.

    Raises:
        TypeError: a state is not a pair of real arrays.
        ValueError: no state was given, or their shapes do not broadcast.

    >>> import jax.numpy as jnp
    >>> row = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> left, right = (Stats(part.max(), jnp.exp(part - part.max()).sum()) for part in jnp.split(row, 2))
    >>> whole = merge(left, right)
    >>> jnp.allclose(log_normalizer(whole), logsumexp(row))
    Array(True, dtype=bool)
    """
    if not states:
        raise ValueError("merge: got no states, expected at least one Stats(max, sum).")
    # Beside +inf, whose sum is NaN too, the maximum says which it is.
    return functools.reduce(
        combine, [Stats(jnp.where(jnp.isnan(s) & (m < jnp.inf), s, m), s) for m, s in _states("merge", states)]
    )


@public
@in_device_memory
def log_normalizer(state: Stats) -> jax.Array:
    """Returns the logarithm of the sum of exponentials that a state stands for: the logsumexp of its logits.

    It is `max + log(sum)`, and right where that is not: the state of a row with +inf has a sum that is NaN, and +inf
    is its logarithm. `Stats(-inf, 0)` gives -inf, and NaN gives NaN. Derivatives of every order exist, in forward and
    reverse mode; where the sum is 0 they are infinite or NaN.

    Source: as `softmax`.

    Args:
        state: A state, of real arrays that broadcast against each other, as `merge` returns it.

    Returns:
        The logarithm, float64 if any part of the state is and float32 otherwise.

    Raises:
        TypeError: the state is not a pair of real arrays.
        ValueError: their shapes do not broadcast.

    >>> import jax.numpy as jnp
    >>> log_normalizer(Stats(jnp.array([1000.0, jnp.inf, -jnp.inf]), jnp.array([1.0, jnp.nan, 0.0])))
    Array([1000.,   inf,  -inf], dtype=float32)
    """
    return monoid.log_normalizer(*_states("log_normalizer", [state]))


def _states(function: str, given: Sequence[Stats]) -> list[Stats]:
    """Returns states as arrays of one shape, in the dtype of accumulation."""
    for state in given:
        if not isinstance(state, tuple) or len(state) != 2 or any(isinstance(part, (tuple, list)) for part in state):
            raise TypeError(
                f"{function}: got a {type(state).__name__}, expected a Stats(max, sum) of two arrays. Pass a sequence "
                "of states as merge(*states)."
            )
    pairs = [
        [checks.floating(function, name, part) for name, part in zip(Stats._fields, s, strict=True)] for s in given
    ]
    parts = [part for pair in pairs for part in pair]
    try:
        shape = jnp.broadcast_shapes(*(part.shape for part in parts))
    except ValueError:
        raise ValueError(
            f"{function}: the states' arrays have the shapes {', '.join(str(part.shape) for part in parts)}, expected "
            "shapes that broadcast against each other."
        ) from None
    wide = max((accumulator_dtype(part.dtype) for part in parts), key=lambda dtype: dtype.itemsize)
    parts = unify_shardings(*(broadcast_to(part.astype(wide), shape) for part in parts))
    return [Stats(*parts[i : i + 2]) for i in range(0, len(parts), 2)]


def _row_op(
    op: Op, x: ArrayLike, axis: Axis, where: ArrayLike | None, scale: ArrayLike, implementation: str | None
) -> jax.Array:
    """Calls softmax or log_softmax, which differ only in the operation."""
    operand = checks.inexact(op, "x", x)
    dtype = operand.dtype
    given = {} if where is None else {"where": checks.boolean(op, where)}
    operand, *mask = checks.same_rank(op, "x", operand.astype(dtype), **given)  # drops a weak type
    axes = checks.axes(op, axis, operand.ndim)
    shape = jnp.broadcast_shapes(operand.shape, *(m.shape for m in mask))
    factor = numbers.scale_factor(op, scale, shape, accumulator_dtype(jnp.finfo(dtype).dtype))
    implementation = checks.implementation(op, implementation)
    if jnp.iscomplexobj(operand):
        if implementation == "mosaic_gpu":
            raise checks.no_kernel_for_complex(op, "x")
        operand, factor, *mask = unify_shardings(operand, jnp.asarray(factor, dtype), *mask)
        return _JAX_NN[op](jnp.broadcast_to(operand, shape) * factor, axes, *mask)
    if mask and not _has_infinity(dtype):
        operand = operand.astype(accumulator_dtype(dtype))  # the derivatives take -inf for an excluded element
    operand, factor = scaled(operand, factor)
    y = bind(op, operand, *mask, axes=axes, scale=factor, implementation=implementation, **checks.batch_invariance())
    return checked(y if operand.dtype == dtype else y.astype(dtype))


def scaled(x: jax.Array, factor: float | jax.Array) -> tuple[jax.Array, float]:
    """Returns the operand, and the factor that its primitive fuses: 1 if the operand is multiplied beforehand."""
    wide = accumulator_dtype(x.dtype)
    if isinstance(factor, float):
        if 0 < abs(factor) <= float(jnp.finfo(wide).max):
            # Some 8-bit floats have no sign.
            return (x if factor > 0 else -(x.astype(wide) if x.dtype.itemsize == 1 else x)), abs(factor)
        factor = math.copysign(math.inf, factor) if factor else 0.0
    return numbers.times(x.astype(wide), jnp.asarray(factor, wide)), 1.0


def _has_infinity(dtype: jnp.dtype) -> bool:
    """Whether a floating dtype has -inf; some of 8 bits do not."""
    return dtype.itemsize > 1 or dtype.name in ("float8_e3m4", "float8_e4m3", "float8_e5m2")


def _promoted(a: ArrayLike, b: ArrayLike, otherwise: jnp.dtype) -> jnp.dtype:
    """Returns the common inexact dtype of exponents and weights; `otherwise` if both are integers."""
    given = [x if hasattr(x, "dtype") or isinstance(x, int | float) else jnp.asarray(x) for x in (a, b)]
    dtype = checks.common_dtype("logsumexp", **dict(zip("ab", given, strict=True)))
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else otherwise


def _by_jax(
    x: jax.Array, dtype: jnp.dtype, b: jax.Array | None = None, where: jax.Array | None = None, **how: Unpack[_How]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes a logsumexp by `jax.scipy`, in the dtype of accumulation."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    wide = dtype if is_complex else accumulator_dtype(dtype)
    out = _JAX_LOGSUMEXP(x.astype(wide), b=None if b is None else b.astype(wide), where=where, **how)
    return out if is_complex else jax.tree.map(lambda part: part.astype(dtype), out)
