"""Checks of the arguments that the functions of cross entropy share, whose errors name the `function`."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxsoftmax._core import checks
from jaxsoftmax._core.sharding import settings_for
from pallas_kernels.softmax.problem import IGNORED

Shape = Sequence[int]


def rows_to_read(
    given: jax.Array | np.ndarray, weights: jax.Array, cols: Any, ignored: int | None, counts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Labels that are columns or `IGNORED`, and weights that are NaN where a label is neither."""
    known = jnp.iinfo(given.dtype)
    fits = max(known.min, -(2**31)), min(known.max, 2**31 - 1)
    skipped = [] if counts is None else [~counts]
    with settings_for(given):
        labels = jnp.broadcast_to(given, weights.shape)
        near = (labels if fits == (known.min, known.max) else labels.clip(*fits)).astype(jnp.int32)
        if ignored is not None and known.min <= ignored <= known.max:
            skipped.append(labels == jnp.asarray(ignored, labels.dtype))
    exists = (near >= 0) & (near < cols)
    target, wrong = jnp.where(exists, near, 0), ~exists
    for skip in skipped:
        target, weights, wrong = jnp.where(skip, IGNORED, target), jnp.where(skip, 0.0, weights), wrong & ~skip
    # Added, not selected: the weights of such rows keep their derivative, which is the loss.
    return target, weights + jnp.where(wrong, jnp.nan, 0.0).astype(weights.dtype)


def number(function: str, name: str, value: Any, low: float, high: float) -> float:
    """A finite Python or NumPy number between two bounds."""
    if not checks.is_number(value):
        got = f"is {value!r}" if not isinstance(value, jax.Array) else f"is an array, {jax.typeof(value)}"
        raise TypeError(f"{function}: {name} {got}, expected a Python number, and a real one; it is compiled in.")
    result = checks.as_float(function, name, value)
    if not (low <= result <= high and math.isfinite(result)):
        raise ValueError(f"{function}: {name} is {value}, expected a finite number from {low} to {high}.")
    return result


def soft_cap(function: str, value: Any) -> float | None:
    """A positive number, or None."""
    if value is None:
        return None
    cap = number(function, "logits_soft_cap", value, 0.0, math.inf)
    if cap == 0:
        raise ValueError(f"{function}: logits_soft_cap is 0, expected a positive number. Pass None for no cap.")
    return cap


def ignore_index(function: str, value: Any) -> int | None:
    """An integer, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{function}: ignore_index is {value!r}, expected a Python integer or None.")
    return int(value)


def mask(function: str, where: Any, shape: Shape, axes: Sequence[int]) -> jax.Array:
    """`where` at the logits' rank; one of the rows' rank masks rows. Either may broadcast the rows to more."""
    array = checks.boolean(function, where)
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


def labels_of(function: str, given: Any, shape: Shape, axes: Sequence[int]) -> tuple[jax.Array | np.ndarray, Shape]:
    """Labels as an array of integers, one for each row, and the logits' shape, broadcast to the labels' rows.

    Values that are known stay in NumPy, because an array of JAX may have fewer than their 64 bits.
    """
    traced = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given))
    array = jnp.asarray(given) if traced else np.asarray(given)
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


def probabilities(function: str, given: Any, shape: Shape, axes: Sequence[int]) -> tuple[jax.Array, Shape]:
    """Probabilities, of at most the logits' rank, and the logits' shape, broadcast to their rows."""
    array = checks.floating(function, "labels", given)
    full = _with_rows((1,) * (len(shape) - array.ndim) + array.shape, shape, axes)
    if full is None:
        raise ValueError(
            f"{function}: labels has shape {array.shape}, expected a shape that broadcasts with the logits', "
            f"{tuple(shape)}."
        )
    return array, full


def _with_rows(extents: Shape, shape: Shape, axes: Sequence[int]) -> Shape | None:
    """The logits' shape, broadcast to the rows of an argument; None if it does not fit."""
    try:
        full = jnp.broadcast_shapes(tuple(extents), tuple(shape))
    except ValueError:
        return None
    return full if len(full) == len(shape) and all(full[d] == shape[d] for d in axes) else None


def check_range(function: str, given: Any, cols: Any, ignored: int | None, counts: jax.Array | None) -> None:
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


def weights_of(function: str, given: Any, rows: Shape, dtype: Any) -> jax.Array:
    """Weights of the rows' rank, in the dtype of the loss."""
    array = checks.floating(function, "weights", given)
    return checks.broadcasting(function, "weights", array, rows, "the rows'").astype(dtype)
