"""Checks of arguments, then those of losses alone, then the context `batch_invariant`.

Each error says which argument, what was got, what was expected, and what to do.
"""

import contextlib
import math
import operator
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxsoftmax._core.calls import public
from jaxsoftmax._core.sharding import settings_for, unify_shardings
from pallas_kernels.softmax.problem import IGNORED

# Aliases with names of their own, which are what help() prints.
type ArrayLike = jax.typing.ArrayLike
type DTypeLike = jax.typing.DTypeLike
type PrecisionLike = jax.lax.PrecisionLike
Axis = int | Iterable[int] | None
Shape = Sequence[int]
Implementation = Literal["xla", "mosaic_gpu"]

IMPLEMENTATIONS = (None, *get_args(Implementation))


_NO_ARRAY = (
    " and makes no array of numbers, expected an array, a number that fits one, or nested lists of equal lengths of "
    "them."
)
_RANDOM_KEY = " A random key draws numbers: jax.random.normal(key, shape) gives an array."


def as_array(
    function: str,
    name: str,
    x: object,
    *,
    no_array: str = _NO_ARRAY,
    wanted: str = "numbers",
    on_key: str = _RANDOM_KEY,
) -> jax.Array:
    """Converts `x` to an array of numbers or booleans; the words are for the error."""
    try:
        # Some strings JAX takes for dtypes.
        array = jnp.asarray(np.asarray(x) if isinstance(x, str) else x)
    except OverflowError as error:
        raise TypeError(
            f"{function}: {name} is or has an integer that JAX's integers cannot hold, expected smaller ones. Pass "
            "floats, or enable jax_enable_x64."
        ) from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function}: {name} is of type {type(x).__name__}{no_array}") from error
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_):
        hint = on_key if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else ""
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, expected {wanted}.{hint}")
    return array


def inexact(function: str, name: str, x: ArrayLike) -> jax.Array:
    """Returns `x` as a real or complex array, integers and booleans promoted as in `jax.nn`; weak types stay weak."""
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
    """Returns `x` as a real array, as by `inexact`."""
    array = inexact(function, name, x)
    if jnp.iscomplexobj(array):
        raise TypeError(
            f"{function}: {name} has dtype {array.dtype}, expected a real dtype. Pass {name}.real, or abs({name})."
        )
    return array


def integer(function: str, name: str, value: Any) -> int:
    """Returns one integer, which must be known when the call is traced."""
    try:
        return operator.index(value)
    except TypeError:  # of which JAX's for a traced integer is one
        advice = "If it is traced, make it a static argument of jax.jit."
        raise TypeError(f"{function}: {name} is {value!r}, expected one integer. {advice}") from None


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
    """Returns one integer, or those of any iterable."""
    with contextlib.suppress(TypeError):
        return (operator.index(axis),)
    try:
        return tuple(map(operator.index, axis))
    except TypeError:
        raise TypeError(
            f"{function}: axis is {axis!r}, expected an integer, several, or None. If it is traced, make it a static "
            "argument of jax.jit."
        ) from None


def same_rank(function: str, operand: str, x: jax.Array, **others: jax.Array) -> list[jax.Array]:
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
    """Returns `where` as a boolean array."""
    array = as_array(function, "where", where)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{function}: where has dtype {array.dtype}, expected bool. Pass where.astype(bool).")
    return array


def is_number(scale: object) -> TypeGuard[int | float | np.integer | np.floating]:
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


def choice[Name: str](function: str, name: str, x: Name, among: Iterable[Name]) -> Name:
    """Returns one of a few names."""
    if not isinstance(x, str) or x not in among:
        raise ValueError(f"{function}: {name}={x!r}, expected one of {', '.join(map(repr, among))}.")
    return x


def is_real(dtype: DTypeLike) -> bool:
    """Whether a dtype is of integers or of floats."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def precision(function: str, x: PrecisionLike) -> PrecisionLike:
    """Returns the precision of a matrix product, which JAX takes."""
    if x is not None:
        matrix = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        try:
            hash(x)
            jax.eval_shape(lambda a: jax.lax.dot(a, a, precision=x), matrix)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{function}: precision is {x!r}, expected None, 'default', 'high', 'highest', or another that "
                "jax.lax.dot takes."
            ) from error
    return x


def common_dtype(function: str, **given: ArrayLike) -> np.dtype:
    """Returns the dtype that the arrays are promoted to."""
    try:
        return jnp.result_type(*given.values())
    except ValueError as error:
        dtypes = " and ".join(f"{name} {jnp.asarray(x).dtype}" for name, x in given.items())
        raise TypeError(f"{function}: got {dtypes}, which JAX promotes to no common dtype. Convert one.") from error


def dtype_name(dtype: Any) -> str:
    """Returns the name of `dtype`, or how it prints where it is no dtype, such as an array."""
    try:
        return repr(dtype) if isinstance(dtype, (jax.Array, np.ndarray)) else np.dtype(dtype).name
    except (TypeError, ValueError):
        return repr(dtype)


def implementation(function: str, name: object) -> Implementation | None:
    """Returns `name` if it names an implementation."""
    for implemented in IMPLEMENTATIONS:
        if isinstance(name, type(implemented)) and name == implemented:
            return implemented
    raise ValueError(
        f"{function}: implementation={name!r}, expected one of None (the fastest there is), 'xla', 'mosaic_gpu'. Pass "
        "None: it takes a Mosaic GPU kernel where there is one for the call, and XLA elsewhere, where 'mosaic_gpu' is "
        "an error."
    )


def no_kernel(function: str, why: str) -> NotImplementedError:
    """Makes the error for a call that asks for a kernel where none takes it."""
    return NotImplementedError(f"{function}: implementation='mosaic_gpu' was asked for, but {why}")


def no_kernel_for_complex(function: str, name: str) -> NotImplementedError:
    """Makes the error for a call that asks for a kernel with complex numbers."""
    why = f"the kernels take real numbers and {name} is complex; pass implementation=None to hand it to jax."
    return no_kernel(function, why)


def broadcasting(function: str, name: str, array: jax.Array, want: Sequence[int], of: str = "x's") -> jax.Array:
    """Adds leading 1s up to the rank of `want`; raises unless `array` broadcasts to `want`."""
    got = array.shape
    tail = want[len(want) - len(got) :]
    if len(got) > len(want) or any(g != 1 and g != w for g, w in zip(got, tail, strict=True)):
        raise ValueError(
            f"{function}: {name} has shape {got}, expected a shape that broadcasts to {of}, {tuple(want)}."
        )
    return array.reshape((1,) * (len(want) - len(got)) + got)


def rows_to_read(
    given: jax.Array | np.ndarray, weights: jax.Array, cols: int, ignored: int | None, counts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns labels that are columns or `IGNORED`, and weights that are NaN where a label is neither."""
    own = jnp.iinfo(given.dtype)
    fits = max(own.min, -(2**31)), min(own.max, 2**31 - 1)
    with settings_for(given):
        labels = jnp.broadcast_to(given, weights.shape)
        labels, weights, *skipped = unify_shardings(labels, weights, *([] if counts is None else [~counts]))
        near = (labels if fits == (own.min, own.max) else labels.clip(*fits)).astype(jnp.int32)
        if ignored is not None and own.min <= ignored <= own.max:
            skipped.append(labels == jnp.asarray(ignored, labels.dtype))
    exists = (near >= 0) & (near < cols)
    target, wrong = jnp.where(exists, near, 0), ~exists
    for skip in skipped:
        target, weights, wrong = jnp.where(skip, IGNORED, target), jnp.where(skip, 0.0, weights), wrong & ~skip
    # Added, not selected: the weights of such rows keep their derivative, which is the loss.
    return target, weights + jnp.where(wrong, jnp.nan, 0.0).astype(weights.dtype)


def ignore_index(function: str, value: object) -> int | None:
    """Returns an integer, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{function}: ignore_index is {value!r}, expected a Python integer or None.")
    return int(value)


def mask(function: str, where: ArrayLike, shape: Shape, axes: Sequence[int]) -> jax.Array:
    """Returns `where` at the logits' rank; one of the rows' rank masks rows. Either may broadcast the rows to more."""
    array = boolean(function, where)
    rows = [n for d, n in enumerate(shape) if d not in axes]
    if array.ndim not in (len(rows), len(shape)):
        raise ValueError(
            f"{function}: where has shape {array.shape}, expected the rank of the logits, {len(shape)}, or of the "
            f"rows, {len(rows)}."
        )
    full = jnp.expand_dims(array, tuple(axes)) if array.ndim < len(shape) else array
    if _with_rows(full.shape, shape, axes) is None:
        of, want = ("logits", tuple(shape)) if full is array else ("rows", tuple(rows))
        raise ValueError(
            f"{function}: where has shape {array.shape}, expected a shape that broadcasts with the {of}', {want}."
        )
    return full


def labels_of(
    function: str, given: ArrayLike, shape: Shape, axes: Sequence[int]
) -> tuple[jax.Array | np.ndarray, Shape]:
    """Returns labels as integers, one for each row, and the logits' shape, broadcast to the labels' rows.

    Values that are known stay in NumPy, because an array of JAX may have fewer than their 64 bits.
    """
    array = on_host(function, "labels", given)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{function}: labels has dtype {array.dtype}, expected integers. Pass labels.astype(int), or use "
            "softmax_cross_entropy for probabilities."
        )
    rows = tuple(n for d, n in enumerate(shape) if d not in axes)
    extents = iter(array.shape)
    expanded = [1 if d in axes else next(extents) for d in range(len(shape))] if array.ndim == len(rows) else None
    full = None if expanded is None else _with_rows(expanded, shape, axes)
    if full is None:
        raise ValueError(
            f"{function}: labels has shape {array.shape}, expected that of the logits without axis, {rows}, or one of "
            "that rank that broadcasts with it."
        )
    cols = math.prod(shape[d] for d in axes)
    if isinstance(cols, int) and cols >= 2**31:
        raise ValueError(f"{function}: logits has {cols} columns along axis, expected fewer than 2^31.")
    return array, full


def on_host(function: str, name: str, x: object, **words: str) -> jax.Array | np.ndarray:
    """Keeps all bits of numbers: values that are known stay in NumPy, because an array of JAX may have fewer bits."""
    leaves = jax.tree.leaves(x)
    if leaves and all(isinstance(leaf, (int, np.ndarray, np.generic)) for leaf in leaves):
        with contextlib.suppress(ValueError):
            return np.asarray(x)
    return as_array(function, name, x, **words)


def probabilities(function: str, given: ArrayLike, shape: Shape, axes: Sequence[int]) -> tuple[jax.Array, Shape]:
    """Returns probabilities, of at most the logits' rank, and the logits' shape, broadcast to their rows."""
    array = floating(function, "labels", given)
    full = _with_rows((1,) * (len(shape) - array.ndim) + array.shape, shape, axes)
    if full is None:
        raise ValueError(
            f"{function}: labels has shape {array.shape}, expected a shape that broadcasts with the logits', "
            f"{tuple(shape)}."
        )
    return array, full


def _with_rows(extents: Shape, shape: Shape, axes: Sequence[int]) -> Shape | None:
    """Returns the logits' shape, broadcast to the rows of an argument; None if it does not fit."""
    try:
        full = jnp.broadcast_shapes(tuple(extents), tuple(shape))
    except ValueError:
        return None
    return full if len(full) == len(shape) and all(full[d] == shape[d] for d in axes) else None


def check_range(
    function: str, given: jax.Array | np.ndarray, cols: int, ignored: int | None, counts: jax.Array | None
) -> None:
    """Raises if labels whose values are known are no columns; `counts` says which rows to check (None: all)."""
    arrays = [x for x in (given, counts) if isinstance(x, jax.Array)]
    if not isinstance(cols, int) or any(isinstance(x, Tracer) or not x.is_fully_addressable for x in arrays):
        return
    values = np.asarray(given)
    bad = (values < 0) | (values >= cols)
    if ignored is not None:
        bad &= values != ignored
    if bad.any() and counts is not None:
        bad = bad & np.asarray(counts)
        values = np.broadcast_to(values, bad.shape)
    if not bad.any():
        return
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"{function}: labels has {values[at]} at {at}, expected 0 <= label < {cols}, the number of logits in a row. "
        f"Pass ignore_index={values[at]} to leave such rows out."
    )


def weights_of(function: str, given: ArrayLike, rows: Shape, dtype: DTypeLike) -> jax.Array:
    """Returns weights of the rows' rank, in the dtype of the loss."""
    array = floating(function, "weights", given)
    return broadcasting(function, "weights", array, rows, "the rows'").astype(dtype)


VARIABLE = "JAXSOFTMAX_BATCH_INVARIANT"
_SETTINGS = {"": False, "0": False, "false": False, "1": True, "true": True}


def _default() -> bool:
    """Returns the default, from the environment."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() not in _SETTINGS:
        raise ValueError(f"jaxsoftmax: the environment variable {VARIABLE} is {given!r}, expected 0 or 1.")
    return _SETTINGS[given.lower()]


class _Context(contextlib.ContextDecorator):
    """Enters the setting, as a context manager or a decorator, again and inside of itself too."""

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._here = enabled, threading.local()

    def __enter__(self) -> None:
        context = _BATCH_INVARIANT(self._enabled)
        context.__enter__()
        vars(self._here).setdefault("entered", []).append(context)

    def __exit__(self, *error: object) -> None:
        self._here.entered.pop().__exit__(*error)


_BATCH_INVARIANT = jax.make_user_context(_default())


@public
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
        TypeError: `enabled` is neither True nor False.

    >>> import jax
    >>> from jaxsoftmax import batch_invariant, explain
    >>> with batch_invariant():
    ...     one, many = (explain(jax.ShapeDtypeStruct((rows, 128256), "bfloat16")) for rows in (1, 4096))
    >>> (one.kernel, one.config) == (many.kernel, many.config)
    True
    """
    return _Context(bool(enabled))


def is_batch_invariant() -> bool:
    """Whether calls that are traced now are to be batch invariant."""
    return _BATCH_INVARIANT.value


def batch_invariance() -> dict[str, bool]:
    """Returns the primitive's parameter, which exists only under the context."""
    return {"batch_invariant": True} if is_batch_invariant() else {}
