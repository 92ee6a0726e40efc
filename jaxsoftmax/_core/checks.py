"""Checks of arguments, and the context `batch_invariant`.

Each error says which argument, what was got, what was expected, and what to do.
"""

import contextlib
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np

type ArrayLike = jax.typing.ArrayLike  # an alias with a name of its own, which is what help() prints
Axis = int | Iterable[int] | None
Implementation = Literal["xla", "mosaic_gpu"]

IMPLEMENTATIONS = (None, *get_args(Implementation))


_NO_ARRAY = (
    " and makes no array of numbers, expected an array, a number that fits one, or nested lists of equal lengths of "
    "them."
)
_RANDOM_KEY = " A random key draws numbers: jax.random.normal(key, shape) gives an array."


def as_array(
    function: str, name: str, x: Any, *, no_array: str = _NO_ARRAY, wanted: str = "numbers", on_key: str = _RANDOM_KEY
) -> jax.Array:
    """Converts `x` to an array of numbers or booleans; the words are for the error."""
    try:
        # Some strings JAX takes for dtypes.
        array = jnp.asarray(np.asarray(x) if isinstance(x, str) else x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{function}: {name} is of type {type(x).__name__}{no_array}") from error
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_):
        hint = on_key if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else ""
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, expected {wanted}.{hint}")
    return array


def inexact(function: str, name: str, x: ArrayLike) -> jax.Array:
    """`x` as a real or complex array, integers and booleans promoted as in `jax.nn`; weak types stay weak."""
    if type(x) is int:
        with contextlib.suppress(OverflowError):
            x = np.int64(x)
    if isinstance(x, (np.ndarray, np.integer)) and x.dtype.kind in "iu":
        # As an array of JAX it would first lose the upper half of its 64 bits.
        x = x.astype(jax.eval_shape(jnp.exp, x).dtype)
    array = as_array(function, name, x)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return array.astype(jax.eval_shape(jnp.exp, array).dtype)


def floating(function: str, name: str, x: ArrayLike) -> jax.Array:
    """`x` as a real array, as by `inexact`."""
    array = inexact(function, name, x)
    if jnp.iscomplexobj(array):
        raise TypeError(
            f"{function}: {name} has dtype {array.dtype}, expected a real dtype. Pass {name}.real, or abs({name})."
        )
    return array


def axes(function: str, axis: Axis, rank: int, operand: str = "x") -> tuple[int, ...]:
    """Converts `axis` to sorted, non-negative, distinct axes."""
    return tuple(sorted(listed_axes(function, axis, rank, operand)))


def listed_axes(function: str, axis: Axis, rank: int, operand: str = "x") -> tuple[int, ...]:
    """Converts `axis` to non-negative, distinct axes, in the given order."""
    if axis is None:
        return tuple(range(rank))
    listed = _integers(function, axis)
    for a in listed:
        if not -rank <= a < rank:
            raise ValueError(
                f"{function}: axis {a} is out of bounds for {operand} of rank {rank}, "
                f"expected {-rank} <= axis < {rank}." + (" Pass axis=None for a scalar." if rank == 0 else "")
            )
    result = tuple(a % rank for a in listed)
    if len(set(result)) != len(result):
        raise ValueError(f"{function}: duplicate value in axis={listed}, expected each axis once.")
    return result


def _integers(function: str, axis: Any) -> tuple[int, ...]:
    """One integer, or those of any iterable."""
    with contextlib.suppress(TypeError):
        return (operator.index(axis),)
    try:
        return tuple(map(operator.index, axis))
    except TypeError:
        raise TypeError(
            f"{function}: axis is {axis!r}, expected an integer, several, or None. If it is traced, make it a static "
            "argument of jax.jit."
        ) from None


def together(function: str, operand: str, x: jax.Array, **others: jax.Array) -> list[jax.Array]:
    """Brings `x` and the others, which broadcast against each other, to one rank, with axes of extent 1 in front."""
    shape = x.shape
    for name, other in others.items():
        try:
            shape = jnp.broadcast_shapes(shape, other.shape)
        except ValueError:
            raise ValueError(
                f"{function}: {name} has shape {other.shape}, expected a shape that broadcasts with {operand}'s, "
                f"{x.shape}."
            ) from None
    return [
        a if a.ndim == len(shape) else jnp.expand_dims(a, range(len(shape) - a.ndim)) for a in (x, *others.values())
    ]


def boolean(function: str, where: ArrayLike) -> jax.Array:
    """`where` as a boolean array."""
    array = as_array(function, "where", where)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{function}: where has dtype {array.dtype}, expected bool. Pass where.astype(bool).")
    return array


def is_number(scale: Any) -> TypeGuard[int | float | np.integer | np.floating]:
    """Whether a scale is a real number that is known at tracing time."""
    return isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool)


_BEYOND_FLOAT = f"beyond {sys.float_info.max:.1g}, expected a number that a float holds."


def as_float(
    function: str, name: str, number: int | float | np.integer | np.floating, beyond: str = _BEYOND_FLOAT
) -> float:
    """Converts a Python or NumPy number to a float; raises for an integer that no float holds, with words `beyond`."""
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{function}: {name} is an integer {beyond}") from None


def scale_factor(function: str, scale: ArrayLike, shape: Sequence[int], of: str = "x's") -> float | jax.Array:
    """A Python or NumPy number as a float, anything else as an array that broadcasts against the operand."""
    if is_number(scale):
        factor = as_float(function, "scale", scale)
        if math.isnan(factor):
            raise ValueError(f"{function}: scale is nan, expected a number.")
        return factor
    return broadcasting(function, "scale", floating(function, "scale", scale), shape, of)


def implementation(function: str, name: Any) -> Implementation | None:
    """Returns `name` if it names an implementation."""
    for known in IMPLEMENTATIONS:
        if isinstance(name, type(known)) and name == known:
            return known
    raise ValueError(
        f"{function}: implementation={name!r}, expected one of None (the fastest there is), 'xla', 'mosaic_gpu'. Pass "
        "None: it takes a Mosaic GPU kernel where there is one for the call, and XLA elsewhere, where 'mosaic_gpu' is "
        "an error."
    )


def no_kernel(function: str, why: str) -> NotImplementedError:
    """The error for a call that asks for a kernel where none takes it."""
    return NotImplementedError(f"{function}: implementation='mosaic_gpu' was asked for, but {why}")


def no_kernel_for_complex(function: str, name: str) -> NotImplementedError:
    """The error for a call that asks for a kernel with complex numbers."""
    why = f"the kernels take real numbers and {name} is complex; pass implementation=None to hand it to jax."
    return no_kernel(function, why)


def broadcasting(function: str, name: str, array: jax.Array, want: Sequence[int], of: str = "x's") -> jax.Array:
    """`array` at the rank of `want`, to which it broadcasts; an error if it does not, or would enlarge it."""
    got = array.shape
    tail = want[len(want) - len(got) :]
    if len(got) > len(want) or any(g != 1 and g != w for g, w in zip(got, tail, strict=True)):
        raise ValueError(
            f"{function}: {name} has shape {got}, expected a shape that broadcasts to {of}, {tuple(want)}."
        )
    return array.reshape((1,) * (len(want) - len(got)) + got)


VARIABLE = "JAXSOFTMAX_BATCH_INVARIANT"
_SETTINGS = {"": False, "0": False, "false": False, "1": True, "true": True}


def _default() -> bool:
    """The default, from the environment."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() not in _SETTINGS:
        raise ValueError(f"jaxsoftmax: the environment variable {VARIABLE} is {given!r}, expected 0 or 1.")
    return _SETTINGS[given.lower()]


class _Context(contextlib.AbstractContextManager[None, bool | None], Protocol):
    """A context manager that is a decorator too."""

    def __call__[F: Callable[..., Any]](self, func: F, /) -> F:
        """`func`, within the context."""
        ...


_BATCH_INVARIANT = jax.make_user_context(_default())


def batch_invariant(enabled: bool = True) -> _Context:
    """Within this context a row's result on a Hopper GPU is the same, bit for bit, whatever else is in the batch.

    It depends on the row alone: not on how many rows there are, on where the row is among them, on the other axes, nor,
    in attention, on how many queries there are beside it or keys beyond those that it sees. Kernels and their configs
    are then chosen by the length and dtype of a row, the operation and the kind of mask, not by what is fastest for so
    many rows. Two calls agree if they run on the same model of GPU, by the same version of this library and of JAX.

    Covered, where a kernel runs (`explain` and `explain_attention` say whether one does): `softmax`, `log_softmax`,
    `logsumexp` without `b`, their gradients, `softmax_cross_entropy_with_integer_labels` with its gradient,
    `top_k_softmax`, and the output and logsumexp of `flash_attention`. Not covered: what XLA computes (as float64,
    attention of float32, or `implementation="xla"`), `softmax_cross_entropy`, forward mode and higher orders, rows that
    are themselves sharded, and gradients of attention, which `deterministic_gradients=True` makes repeat.

    The context is part of the key of `jax.jit`'s caches, and may be entered outside or inside of jitted functions. A
    call reads it when it is traced; what is derived from the call later, such as its gradient, keeps it. It belongs to
    the thread that entered it. As a decorator, `@batch_invariant()` covers all calls of a function. For programs that
    one cannot edit, the environment variable `JAXSOFTMAX_BATCH_INVARIANT=1`, read when jaxsoftmax is imported, makes it
    the default of all threads; `batch_invariant(False)` then takes it back for a while.

    Args:
        enabled: Whether calls are to be batch invariant.

    Returns:
        A context manager, which is a decorator too.

    Raises:
        TypeError: `enabled` is not a bool.

    >>> import jax
    >>> from jaxsoftmax import batch_invariant, explain
    >>> with batch_invariant():
    ...     one, many = (explain(jax.ShapeDtypeStruct((rows, 128256), "bfloat16")) for rows in (1, 4096))
    >>> (one.kernel, one.config) == (many.kernel, many.config)
    True
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"batch_invariant: enabled is {enabled!r}, expected a bool.")
    return _within(enabled)


@contextlib.contextmanager
def _within(enabled: bool) -> Iterator[None]:
    with _BATCH_INVARIANT(enabled):
        yield


def is_batch_invariant() -> bool:
    """Whether calls that are traced now are to be batch invariant."""
    return _BATCH_INVARIANT.value


def batch_invariance() -> dict[str, bool]:
    """The primitive's parameter, which exists only under the context."""
    return {"batch_invariant": True} if is_batch_invariant() else {}
