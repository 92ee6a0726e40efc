"""Every error the user can meet: which argument, what was got, what was wanted, what to do."""

import contextlib
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.monoid import Stats
from pallas_kernels.softmax.reference import accumulator_dtype

type ArrayLike = jax.typing.ArrayLike  # an alias with a name of its own, which is what help() prints
Axis = int | Iterable[int] | None
Implementation = Literal["xla", "mosaic_gpu"]

IMPLEMENTATIONS = (None, *get_args(Implementation))


def as_array(function: str, name: str, x: ArrayLike) -> jax.Array:
    """`x` as an array of numbers or booleans."""
    try:
        # Some strings JAX takes for dtypes.
        array = jnp.asarray(np.asarray(x) if isinstance(x, str) else x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{function}: {name} is of type {type(x).__name__} and makes no array of numbers, expected an array, a "
            "number that fits one, or nested lists of equal lengths of them."
        ) from error
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_):
        hint = " A random key draws numbers: jax.random.normal(key, shape) gives an array."
        raise TypeError(
            f"{function}: {name} has dtype {array.dtype}, expected numbers."
            + (hint if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else "")
        )
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
    """`axis` as sorted, non-negative, distinct axes."""
    return tuple(sorted(listed_axes(function, axis, rank, operand)))


def listed_axes(function: str, axis: Axis, rank: int, operand: str = "x") -> tuple[int, ...]:
    """`axis` as non-negative, distinct axes, in the order in which they are given."""
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
    """`x` and the others, which broadcast against each other, at one rank: with axes of extent 1 in front."""
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


def mask(function: str, where: ArrayLike, shape: Sequence[int], of: str = "x's") -> jax.Array:
    """`where` as a boolean array of the operand's rank, each of whose extents is 1 or the operand's."""
    array = boolean(function, where)
    broadcastable(function, "where", array.shape, shape, of)
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)


def is_number(scale: Any) -> TypeGuard[int | float | np.integer | np.floating]:
    """Whether a scale is a real number that is known while the call is traced."""
    return isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool)


def as_float(function: str, name: str, number: int | float | np.integer | np.floating) -> float:
    """A Python or NumPy number as a float."""
    try:
        return float(number)
    except OverflowError:
        raise ValueError(
            f"{function}: {name} is an integer beyond {sys.float_info.max:.1g}, expected a number that a float holds."
        ) from None


def scale_factor(function: str, scale: ArrayLike, shape: Sequence[int], of: str = "x's") -> float | jax.Array:
    """A Python or NumPy number as a float, anything else as an array that broadcasts against the operand."""
    if is_number(scale):
        factor = as_float(function, "scale", scale)
        if math.isnan(factor):
            raise ValueError(f"{function}: scale is nan, expected a number.")
        return factor
    array = floating(function, "scale", scale)
    broadcastable(function, "scale", array.shape, shape, of)
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)


def implementation(function: str, name: Any) -> Implementation | None:
    """`name` if it is one we have."""
    for known in IMPLEMENTATIONS:
        if isinstance(name, type(known)) and name == known:
            return known
    raise ValueError(
        f"{function}: implementation={name!r}, expected one of None (the fastest there is), 'xla', 'mosaic_gpu'. Pass "
        "None: it takes a Mosaic GPU kernel where there is one for the call, and XLA elsewhere, where 'mosaic_gpu' is "
        "an error."
    )


def states(given: Sequence[Any]) -> list[Stats]:
    """States to merge, as arrays of one shape, in the dtype of accumulation."""
    if not given:
        raise ValueError("merge: got no states, expected at least one Stats(max, sum).")
    for state in given:
        if not isinstance(state, tuple) or len(state) != 2 or any(isinstance(part, (tuple, list)) for part in state):
            raise TypeError(
                f"merge: got a {type(state).__name__}, expected each argument to be a Stats(max, sum) of two arrays. "
                "Pass a sequence of states as merge(*states)."
            )
    pairs = [[floating("merge", name, part) for name, part in zip(Stats._fields, s, strict=True)] for s in given]
    parts = [part for pair in pairs for part in pair]
    try:
        shape = jnp.broadcast_shapes(*(part.shape for part in parts))
    except ValueError:
        raise ValueError(
            f"merge: the states' arrays have the shapes {', '.join(str(part.shape) for part in parts)}, expected "
            "shapes that broadcast against each other."
        ) from None
    wide = max((accumulator_dtype(part.dtype) for part in parts), key=lambda dtype: dtype.itemsize)
    return [Stats(*(jnp.broadcast_to(part.astype(wide), shape) for part in pair)) for pair in pairs]


def no_kernel_on_platform(op: str) -> NotImplementedError:
    """A named kernel, lowered for something that is not CUDA."""
    return NotImplementedError(
        f"{op}: implementation='mosaic_gpu' was asked for, but this computation is lowered for a platform other than "
        "cuda, where Mosaic GPU kernels do not exist. Pass implementation=None to use XLA there."
    )


def no_kernel_for_problem(op: str, reasons: Sequence[tuple[str, str]]) -> NotImplementedError:
    """A named kernel that declined, with each rung's reason."""
    listed = "".join(f"\n  {rung}: {why}" for rung, why in reasons) or "\n  there is no kernel for this operation"
    return NotImplementedError(
        f"{op}: implementation='mosaic_gpu' was asked for, but no kernel takes this call:{listed}\n"
        "Pass implementation=None to use XLA where no kernel does."
    )


def no_kernel_for_sharded_rows(op: str) -> NotImplementedError:
    """A named kernel, of rows of which each device has some columns."""
    return NotImplementedError(
        f"{op}: implementation='mosaic_gpu' was asked for, but the rows are sharded along the axis that is reduced, "
        "where a kernel finds their statistics and XLA computes the result from these. Pass implementation=None, or "
        "shard another axis."
    )


def no_kernel_of_lse() -> NotImplementedError:
    """The gradient of cross entropy, by a named kernel, where the logsumexp is used."""
    return NotImplementedError(
        "softmax_cross_entropy_with_integer_labels: implementation='mosaic_gpu' was asked for, but no kernel takes a "
        "cotangent of the logsumexp that return_lse gives. Pass implementation=None to use XLA for this gradient, "
        "z_loss for a penalty on the logsumexp, or jax.lax.stop_gradient(lse)."
    )


def no_kernel_of_sum() -> NotImplementedError:
    """The gradient of cross entropy, by a named kernel, of logits that broadcast."""
    return NotImplementedError(
        "softmax_cross_entropy_with_integer_labels: implementation='mosaic_gpu' was asked for, but the logits are "
        "broadcast over rows, and no kernel sums their gradients. Pass implementation=None to use XLA for these."
    )


def no_kernel_for_complex(function: str, name: str) -> NotImplementedError:
    """Complex numbers, and a kernel named."""
    return NotImplementedError(
        f"{function}: implementation='mosaic_gpu' was asked for, but the kernels take real numbers and {name} is "
        "complex; pass implementation=None to hand it to jax."
    )


def no_kernel_with_weights() -> NotImplementedError:
    """`logsumexp` with `b`, and a kernel named."""
    return NotImplementedError(
        "logsumexp: implementation='mosaic_gpu' was asked for, but the kernels take no weights b; "
        "pass implementation=None, or use logsumexp(a + log(b)) where b > 0."
    )


def broadcastable(function: str, name: str, got: Sequence[int], want: Sequence[int], of: str = "x's") -> None:
    """Raises unless `got` broadcasts to `want` without enlarging it."""
    tail = want[len(want) - len(got) :]
    if len(got) > len(want) or any(g != 1 and g != w for g, w in zip(got, tail, strict=True)):
        raise ValueError(
            f"{function}: {name} has shape {tuple(got)}, expected a shape that broadcasts to {of}, {tuple(want)}."
        )
