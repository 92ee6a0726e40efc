"""The arguments of the cross entropies, checked and brought to the primitives' form; every error says what to do."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxsoftmax import _checks

Shape = Sequence[int]


def number(function: str, name: str, value: Any, low: float, high: float) -> float:
    """A finite Python or NumPy number between two bounds."""
    if not _checks.is_number(value):
        got = f"is {value!r}" if not isinstance(value, jax.Array) else f"is an array, {jax.typeof(value)}"
        raise TypeError(f"{function}: {name} {got}, expected a Python number, and a real one; it is compiled in.")
    result = _checks.as_float(function, name, value)
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
    """`where` of the logits' rank; one of the rows' rank holds for rows."""
    array = jnp.asarray(where)
    rows = [n for d, n in enumerate(shape) if d not in axes]
    if array.ndim == len(rows) != len(shape):
        _checks.broadcastable(function, "where", array.shape, rows, "the rows'")
        array = jnp.expand_dims(array, tuple(axes))
    if array.ndim != len(shape):
        raise ValueError(
            f"{function}: where has shape {array.shape}, expected the rank of the logits, {len(shape)}, or of the "
            f"rows, {len(rows)}."
        )
    return _checks.mask(function, array, shape, "the logits'")


def labels(function: str, given: Any, rows: Shape, cols: Any) -> jax.Array:
    """Labels as an array of integers, one for each row."""
    array = jnp.asarray(given)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{function}: labels has dtype {array.dtype}, expected integers. Pass labels.astype(int), or use "
            "softmax_cross_entropy for probabilities."
        )
    if array.shape != tuple(rows):
        raise ValueError(
            f"{function}: labels has shape {array.shape}, expected that of the logits without axis, {tuple(rows)}."
        )
    if isinstance(cols, int) and cols >= 2**31:
        raise ValueError(f"{function}: logits has {cols} columns along axis, expected fewer than 2^31.")
    return array


def labels_in_range(function: str, given: Any, cols: Any, ignored: int | None, counts: jax.Array | None) -> None:
    """Raises if labels whose values are known are no columns; `counts` says which rows are looked at (None: all)."""
    arrays = [x for x in (given, counts) if isinstance(x, jax.Array)]
    if not isinstance(cols, int) or any(isinstance(x, Tracer) or not x.is_fully_addressable for x in arrays):
        return
    values = np.asarray(given)
    bad = (values < 0) | (values >= cols)
    if ignored is not None:
        bad &= values != ignored
    if bad.any() and counts is not None:
        bad &= np.asarray(counts)
    if not bad.any():
        return
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"{function}: labels has {values[at]} at {at}, expected 0 <= label < {cols}, the number of logits in a row. "
        f"Pass ignore_index={values[at]} to leave such rows out."
    )


def weights(function: str, given: Any, rows: Shape, dtype: Any) -> jax.Array:
    """Weights of the rows' rank, in the dtype of the loss."""
    array = _checks.floating(function, "weights", given)
    _checks.broadcastable(function, "weights", array.shape, rows, "the rows'")
    return array.reshape((1,) * (len(rows) - array.ndim) + array.shape).astype(dtype)
