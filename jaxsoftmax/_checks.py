"""Every error the user can meet: which argument, what was got, what was wanted, what to do."""

import contextlib
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.monoid import Stats

type ArrayLike = jax.typing.ArrayLike  # an alias with a name of its own, which is what help() prints
Axis = int | Iterable[int] | None
Implementation = Literal["xla", "mosaic_gpu"]

IMPLEMENTATIONS = (None, *get_args(Implementation))


def floating(function: str, name: str, x: jax.typing.ArrayLike) -> jax.Array:
    """`x` as a floating-point array, integers and booleans promoted as in `jax.nn`; weak types stay weak."""
    if isinstance(x, (np.ndarray, np.integer)) and x.dtype.kind in "iu":
        # As an array of JAX it would first lose the upper half of its 64 bits.
        x = x.astype(jax.eval_shape(jnp.exp, x).dtype)
    array = jnp.asarray(x)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(
            f"{function}: {name} has dtype {array.dtype}, expected a real dtype; a softmax of complex numbers has no "
            f"order to take a maximum in. Pass {name}.real, or abs({name})."
        )
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jax.eval_shape(jnp.exp, array).dtype)


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


def boolean(function: str, where: jax.typing.ArrayLike) -> jax.Array:
    """`where` as a boolean array."""
    array = jnp.asarray(where)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{function}: where has dtype {array.dtype}, expected bool. Pass where.astype(bool).")
    return array


def mask(function: str, where: jax.typing.ArrayLike, shape: Sequence[int], of: str = "x's") -> jax.Array:
    """`where` as a boolean array of the operand's rank, each of whose extents is 1 or the operand's."""
    array = boolean(function, where)
    broadcastable(function, "where", array.shape, shape, of)
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)


def is_number(scale: Any) -> TypeGuard[int | float | np.number]:
    """Whether a scale is known while the call is traced."""
    return isinstance(scale, (int, float, np.number)) and not isinstance(scale, bool)


def scale_factor(
    function: str, scale: jax.typing.ArrayLike, shape: Sequence[int], of: str = "x's"
) -> float | jax.Array:
    """A Python or NumPy number as a float, anything else as an array that broadcasts against the operand."""
    if is_number(scale):
        factor = float(scale)
        if math.isnan(factor):
            raise ValueError(f"{function}: scale is nan, expected a number.")
        return factor
    array = floating(function, "scale", scale)
    broadcastable(function, "scale", array.shape, shape, of)
    return array


def implementation(function: str, name: str | None) -> str | None:
    """`name` if it is one we have."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"{function}: implementation={name!r}, expected one of None (the fastest there is), 'xla', 'mosaic_gpu'."
        )
    return name


def state(given: Any) -> Stats:
    """A state to merge: a pair of numbers or arrays."""
    if not isinstance(given, tuple) or len(given) != 2 or any(isinstance(part, (tuple, list)) for part in given):
        raise TypeError(
            f"merge: got a {type(given).__name__}, expected each argument to be a Stats(max, sum) of two arrays. "
            "Pass a sequence of states as merge(*states)."
        )
    return Stats(*map(jnp.asarray, given))


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
