"""What the inline-assembly operations of `pallas_kernels.mosaic` mean, for those that do not say so themselves.

A model is found by the operation's name; what is static in it comes from the variables that the operation closes over.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def of(operation: Callable[..., Any]) -> Callable[..., Any] | None:
    """The model of an operation: its own `interpret`, or the one below that has its name."""
    own = getattr(operation, "interpret", None)
    model = _MODELS.get(operation.__name__)
    if own is not None or model is None:
        return own
    static = inspect.getclosurevars(operation).nonlocals
    return lambda machine, *arguments: model(machine, static, *arguments)


def elements(tile: Any, cols: int, row: Any, first: Any) -> tuple[tuple[Any, Any], Any]:
    """Row and column of each element of a warpgroup's tile, and whether it lies in the row.

    Vectors are aligned in memory: the row's first begins `head` elements before the row does.
    """
    r, c = np.arange(tile.shape[0])[:, None], np.arange(tile.shape[1])[None, :]
    if tile.lanes <= 32:
        rows, vectors = row + r, first + c // tile.vector
    else:
        rows, vectors = row + 0 * r, first + r * (tile.registers * 32) + c // tile.vector
    head = rows * cols % tile.vector
    column = vectors * tile.vector + c % tile.vector - head
    return (rows, column), (column >= 0) & (column < cols)


def _load_vectors(machine: Any, static: Any, ref: Any, row: jax.Array, first: jax.Array) -> list[jax.Array]:
    return [machine.gather(ref, *elements(static["tile"], ref.shape[1], row, first), static["fill"])]


def _store_vectors(machine: Any, static: Any, ref: Any, value: Any, row: jax.Array, first: jax.Array) -> None:
    machine.scatter(ref, *elements(static["span"].tile, ref.shape[1], row, first), value)


_MODELS = {"load_vectors": _load_vectors, "store_vectors": _store_vectors}
