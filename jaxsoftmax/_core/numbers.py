"""Numbers that say what a call computes, as a scale: constants of a program, or data.

Within `jax.jit` a Python number is a constant of the caller's program, and a kernel fuses it. A function that is called
outside compiles a program for each constant, which a schedule of temperatures never ends. So each argument has a few
numbers that are constants; any further one is data, which one program takes whatever it is.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive

from jaxsoftmax._core import checks
from jaxsoftmax._core.checks import ArrayLike
from jaxsoftmax._core.sharding import settings_for

MOST_CONSTANTS = 4  # of an argument of a function, for calls outside of `jit`

_CONSTANTS: dict[tuple[str, str], set[Any]] = {}


class _IsTraced(Exception):
    """Says that operations are traced where `_IS_EVALUATED` is bound."""


def _raise_traced() -> Any:
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


def is_constant(function: str, argument: str, value: Any) -> bool:
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


def as_data(value: float, dtype: Any) -> jax.Array:
    """A number as an array."""
    with jax.enable_x64(jnp.dtype(dtype).itemsize == 8), np.errstate(over="ignore"):  # beyond the dtype it is infinite
        return jnp.asarray(value, dtype)


def constant_or_data(function: str, argument: str, value: float, dtype: Any) -> float | jax.Array:
    """A number as it is if it is to be a constant, and as an array if it is to be data."""
    return value if is_constant(function, argument, value) else as_data(value, dtype)


def scale_factor(
    function: str, scale: ArrayLike, shape: Sequence[int], dtype: Any, of: str = "x's"
) -> float | jax.Array:
    """A constant as a float, anything else as an array that broadcasts against the operand, in `dtype` if a number."""
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


def number(function: str, name: str, value: Any, low: float, high: float, dtype: Any) -> float | jax.Array:
    """A finite Python or NumPy number between two bounds, or one number as an array of `dtype`, which may be traced."""
    value = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if not checks.is_number(value):
        return _scalar(function, name, value, dtype)
    result = checks.as_float(function, name, value)
    if not (low <= result <= high and math.isfinite(result)):
        raise ValueError(f"{function}: {name} is {value}, expected a finite number from {low} to {high}.")
    return constant_or_data(function, name, result, dtype) if result else result


def _scalar(function: str, name: str, value: Any, dtype: Any) -> jax.Array:
    """An array of one real number, in `dtype`."""
    is_array = isinstance(value, jax.Array)
    is_real = is_array and any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if not is_array or not is_real or value.ndim:
        got = f"is an array, {jax.typeof(value)}" if is_array else f"is {value!r}"
        raise TypeError(f"{function}: {name} {got}, expected a real number, or an array of one, which may be traced.")
    with settings_for(value, jnp.zeros((), dtype)):
        return value.astype(dtype)


def soft_cap(function: str, value: Any, dtype: Any) -> float | jax.Array | None:
    """A positive number, or None."""
    if value is None:
        return None
    cap = number(function, "logits_soft_cap", value, 0.0, math.inf, dtype)
    if isinstance(cap, float) and cap == 0.0:
        raise ValueError(f"{function}: logits_soft_cap is 0, expected a positive number. Pass None for no cap.")
    return cap


@jax.custom_jvp
def capped(x: jax.Array, cap: jax.Array) -> jax.Array:
    """`cap * tanh(x / cap)`, whose derivatives have nothing of elements that are NaN, as in `times`."""
    return cap * jnp.tanh(x / cap)


def _capped_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    (x, cap), (of_x, of_cap) = primals, tangents
    nothing, bent = jnp.zeros_like(x), jnp.tanh(x / cap)
    slope = jnp.where(jnp.isnan(x), nothing, 1 - bent * bent)
    slopes: list[jax.Array] = [] if type(of_x) is SymbolicZero else [slope * of_x]
    if type(of_cap) is not SymbolicZero:
        rest = bent - jnp.where(slope == 0, nothing, x / cap * slope)
        slopes.append(jnp.where(jnp.isnan(x), nothing, rest) * of_cap)
    return capped(x, cap), sum(slopes[1:], slopes[0])


capped.defjvp(_capped_jvp, symbolic_zeros=True)


@jax.custom_jvp
def times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x * factor`, whose derivative in the factor has nothing of elements that are infinite or NaN.

    Such an element has no part in its row's result, or makes all of it NaN, as do its cotangents.
    """
    return x * factor


def _times_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    (x, factor), (of_x, of_factor) = primals, tangents
    out = times(x, factor)
    slopes: list[jax.Array] = [] if type(of_x) is SymbolicZero else [of_x * factor]
    if type(of_factor) is not SymbolicZero:
        slopes.append(jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) * of_factor)
    return out, sum(slopes[1:], slopes[0])


times.defjvp(_times_jvp, symbolic_zeros=True)
