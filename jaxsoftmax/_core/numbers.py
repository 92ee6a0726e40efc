"""Numbers that say what a call computes, as a scale: constants of a program, or data.

Within `jax.jit` a Python number is a constant of the caller's program, and a kernel fuses it. A function that is called
outside compiles a program for each constant, which a schedule of temperatures never ends. So each argument has a few
numbers that are constants; any further one is data, which one program takes whatever it is.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxsoftmax._core import checks
from jaxsoftmax._core.checks import ArrayLike, DTypeLike
from jaxsoftmax._core.lowering import lower_plain
from jaxsoftmax._core.primitives import checked, define_over_rows
from jaxsoftmax._core.sharding import settings_for, unify_shardings, unify_varying

MOST_CONSTANTS = 4  # of an argument of a function, for calls outside of `jit`

_CONSTANTS: dict[tuple[str, str], set[Hashable]] = {}


class _IsTraced(Exception):
    """Says that operations are traced where `_IS_EVALUATED` is bound."""


def _raise_traced() -> NoReturn:
    raise _IsTraced


# It has no operands, so that whatever differentiates or maps a call that is evaluated evaluates it too. Where programs
# are traced its type is asked for before it would become a part of the program.
_IS_EVALUATED = Primitive("is_evaluated")
_IS_EVALUATED.multiple_results = True
_IS_EVALUATED.def_impl(lambda: [])
_IS_EVALUATED.def_abstract_eval(_raise_traced)


def is_evaluated() -> bool:
    """Whether operations are evaluated at once, also those of their derivatives, and not traced for a program."""
    try:
        _IS_EVALUATED.bind()
    except _IsTraced:
        return False
    return True


def is_constant(function: str, argument: str, value: Hashable) -> bool:
    """Whether a number is to be a constant of the program, not data.

    It is in a program that is traced, and if it is one of the argument's few. Under `batch_invariant()` each is, so
    that a row's bits do not depend on which numbers came before.
    """
    if checks.is_batch_invariant() or not is_evaluated():
        return True
    few = _CONSTANTS.setdefault((function, argument), set())
    if len(few) < MOST_CONSTANTS:
        few.add(value)
    return value in few


def as_data(value: float, dtype: DTypeLike) -> jax.Array:
    """Returns a number as an array."""
    with jax.enable_x64(jnp.dtype(dtype).itemsize == 8), np.errstate(over="ignore"):  # beyond the dtype it is infinite
        return jnp.asarray(value, dtype)


def constant_or_data(function: str, argument: str, value: float, dtype: DTypeLike) -> float | jax.Array:
    """Returns a number as it is if it is to be a constant, and as an array if it is to be data."""
    return value if is_constant(function, argument, value) else as_data(value, dtype)


def scale_factor(
    function: str, scale: ArrayLike, shape: Sequence[int], dtype: DTypeLike, of: str = "x's"
) -> float | jax.Array:
    """Gives a constant as a float, anything else as an array that broadcasts to the operand, in `dtype` if a number."""
    if checks.is_number(scale):
        factor = checks.as_float(function, "scale", scale)
        if math.isnan(factor):
            raise ValueError(f"{function}: scale is nan, expected a number.")
        if abs(factor) == 1 or factor == 0 or math.isinf(factor):
            return factor
        scale = constant_or_data(function, "scale", factor, dtype)
        if isinstance(scale, float):
            return scale
    return checks.broadcasting(function, "scale", checks.floating(function, "scale", scale), shape, of)


def number(function: str, name: str, value: object, low: float, high: float, dtype: DTypeLike) -> float | jax.Array:
    """Returns a finite number between two bounds, or one number as an array of `dtype`, which may be traced."""
    value = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if not checks.is_number(value):
        return _scalar(function, name, value, dtype)
    result = checks.as_float(function, name, value)
    if not (low <= result <= high and math.isfinite(result)):
        raise ValueError(f"{function}: {name} is {value}, expected a finite number from {low} to {high}.")
    return constant_or_data(function, name, result, dtype) if result else result


def _scalar(function: str, name: str, value: object, dtype: DTypeLike) -> jax.Array:
    """Returns an array of one real number, in `dtype`."""
    is_array = isinstance(value, jax.Array)
    if not is_array or not checks.is_real(value.dtype) or value.ndim:
        got = f"is an array, {jax.typeof(value)}" if is_array else f"is {value!r}"
        raise TypeError(f"{function}: {name} {got}, expected a real number, or an array of one, which may be traced.")
    with settings_for(value, jnp.zeros((), dtype)):
        return value.astype(dtype)


def soft_cap(function: str, value: object, dtype: DTypeLike) -> float | jax.Array | None:
    """Returns a positive number, or None."""
    if value is None:
        return None
    cap = number(function, "logits_soft_cap", value, 0.0, math.inf, dtype)
    if isinstance(cap, float) and cap == 0.0:
        raise ValueError(f"{function}: logits_soft_cap is 0, expected a positive number. Pass None for no cap.")
    return cap


def capped(x: jax.Array, cap: jax.Array) -> jax.Array:
    """`cap * tanh(x / cap)`, whose derivatives have nothing of elements that are NaN, as in `times`."""
    return _bind(_CAPPED, x, cap)


def times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x * factor`, whose derivative in the factor has nothing of elements that are infinite or NaN.

    Such an element has no part in its row's result, or makes all of it NaN, as do its cotangents.
    """
    return _bind(_TIMES, x, factor)


# JAX's tools that walk programs know these as they know the other primitives; not all take a custom derivative.
_CAPPED, _TIMES = Primitive("capped"), Primitive("times")


def _bind(primitive: Primitive, x: jax.Array, number: jax.Array) -> jax.Array:
    number = number.reshape((1,) * (x.ndim - number.ndim) + number.shape)
    return checked(primitive.bind(*unify_varying(*unify_shardings(x, number)), axes=()))


def _bent(x: jax.Array, cap: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `x / cap` and its `tanh`."""
    # XLA divides by a scalar on the way; the reciprocal of a number with axes would be a program of its own on a GPU.
    part = x / (cap.squeeze() if all(n == 1 for n in cap.shape) else cap)
    return part, jnp.tanh(part)


def _capped_slopes(x: jax.Array, cap: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `1 - tanh(x / c)^2`, by `x`, and `tanh(x / c) - x / c * (1 - tanh(x / c)^2)`, by `c`."""
    nothing, (part, bent) = jnp.zeros_like(x), _bent(x, cap)
    slope = jnp.where(jnp.isnan(x), nothing, 1 - bent * bent)
    rest = bent - jnp.where(slope == 0, nothing, part * slope)
    return slope, jnp.where(jnp.isnan(x), nothing, rest)


def _times_slopes(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    return factor, jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def _jvp(
    primitive: Primitive,
    slopes_of: Callable[..., Sequence[jax.Array]],
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array | ad.Zero],
    *,
    axes: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Returns `f(x, c)` and `df = df/dx * dx + df/dc * dc`."""
    out = primitive.bind(*primals, axes=axes)
    slopes = zip(slopes_of(*primals), tangents, strict=True)
    terms = [slope * t for slope, t in slopes if not isinstance(t, ad.Zero)]
    return out, sum(terms[1:], terms[0])


for _primitive, _compute, _slopes in (
    (_CAPPED, lambda x, cap, axes: cap * _bent(x, cap)[1], _capped_slopes),
    (_TIMES, lambda x, factor, axes: x * factor, _times_slopes),
):
    define_over_rows(_primitive, lambda **_: ("full",), many=False)
    mlir.register_lowering(_primitive, functools.partial(lower_plain, _compute))
    ad.primitive_jvps[_primitive] = functools.partial(_jvp, _primitive, _slopes)
