"""Positions of queries and keys, and the parts of a sequence that is sharded over devices.

A device keeps its queries and gets all keys. The causal rule, windows and lengths count in the whole sequence: a part's
first query is not query 0. Where positions are given, gathered keys lie in the order of the devices, and are sorted so
that a tile of queries sees one range of them.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsoftmax._core.sharding import Names
from pallas_kernels.attention.problem import OPERANDS, RANK, Operands, Rules

ORDERED = tuple(name for name, x in OPERANDS.items() if x.key_axis is not None and x.query_axis is None)
Arrays = Mapping[str, Any]


def zigzag(x: Any, axis: int, devices: int) -> jax.Array:
    """Reorders a sequence so that devices which share it have equal work under a causal rule.

    The sequence is `2 * devices` pieces. Device i gets piece i and piece `2 * devices - 1 - i`: queries of the first
    see few keys, queries of the second many. Apply it to whatever has the axis (tokens, labels, segment ids), and pass
    `zigzag(jnp.arange(length), 0, devices)` as `query_positions` and `key_value_positions` of `flash_attention`.

    Args:
        x: An array.
        axis: Its axis of the sequence, whose extent is a multiple of `2 * devices`.
        devices: Over how many devices the axis is sharded.

    Returns:
        An array of the same shape.

    Raises:
        ValueError: the axis does not exist or is not a multiple of `2 * devices`, or `devices` is less than 1.

    >>> import jax.numpy as jnp
    >>> zigzag(jnp.arange(8), 0, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    pieces, axis = _pieces("zigzag", x, axis, devices)
    first, last = jnp.split(pieces, 2, axis)
    return jnp.stack([first, jnp.flip(last, axis)], axis + 1).reshape(jnp.shape(x))


def unzigzag(x: Any, axis: int, devices: int) -> jax.Array:
    """The inverse of `zigzag`.

    Args:
        x: An array.
        axis: Its axis of the sequence.
        devices: As it was given to `zigzag`.

    Returns:
        An array of the same shape, in the sequence's own order.

    Raises:
        ValueError: as `zigzag`.

    >>> import jax.numpy as jnp
    >>> unzigzag(zigzag(jnp.arange(8), 0, 2), 0, 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    pieces, axis = _pieces("unzigzag", x, axis, devices)
    pairs = pieces.reshape(*pieces.shape[:axis], -1, 2, *pieces.shape[axis + 1 :])
    first, last = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in range(2))
    return jnp.concatenate([first, jnp.flip(last, axis)], axis).reshape(jnp.shape(x))


def _pieces(function: str, x: Any, axis: int, devices: int) -> tuple[jax.Array, int]:
    """`x` with its axis split in pieces, and which axis counts these."""
    array, count = jnp.asarray(x), 2 * operator.index(devices)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"{function}: axis={axis}, expected one of the axes of x, which has shape {array.shape}.")
    at = operator.index(axis) % array.ndim
    if count < 2 or array.shape[at] % count:
        raise ValueError(
            f"{function}: axis {axis} of x has extent {array.shape[at]}, and devices={devices}; expected at least one "
            "device, and a multiple of twice as many elements. Pad the sequence."
        )
    return array.reshape(*array.shape[:at], count, -1, *array.shape[at + 1 :]), at


def of_indices(arrays: Arrays, rules: Rules, first: Any, queries: Any) -> dict[str, jax.Array]:
    """The positions that indices are, where `first` is the index of the first query of `queries`.

    With `rules.align_ends` those of queries are moved so that the last of them is at the last key.
    """
    (*lead, local, _, _), keys = arrays["query"].shape, arrays["key"].shape[-3]
    at, key_at = (jnp.arange(n, dtype=jnp.int32).reshape(*(1,) * len(lead), n) for n in (local, keys))
    at = at + first
    if rules.align_ends:
        ends = (("key_lengths", keys), ("query_lengths", queries))
        last = [jnp.minimum(arrays[name], n)[..., None] if name in arrays else n for name, n in ends]
        at = at + (last[0] - last[1])
    return {"query_positions": at, "key_positions": key_at}


class Part(NamedTuple):
    """One device's part of a call: its operands, what they are, and in which order the keys were before."""

    kinds: tuple[str, ...]
    operands: list[jax.Array]
    names: tuple[str, ...]
    rules: Rules
    places: jax.Array | None  # where each key went; None: nowhere

    def in_order(self, kind: str, x: jax.Array) -> jax.Array:
        """A result, its keys as they were before they were sorted."""
        return x if self.places is None or kind not in ORDERED else _taken(kind, x, self.places)


def part_of(
    kinds: Sequence[str], operands: Sequence[jax.Array], names: Sequence[str], rules: Rules, axes: Names
) -> Part:
    """This device's part, of queries that are sharded over `axes`, and all keys."""
    arrays, rest = dict(zip(names, operands, strict=False)), list(operands[len(names) :])
    of_rest = tuple(kinds[len(names) :])
    local = arrays["query"].shape[-3]
    first = jax.lax.axis_index(axes) * local
    by_place = rules.causal_offset is not None or rules.window != (None, None)
    places = None
    if "query_positions" in arrays:
        order = _order(arrays)
        if order is not None:
            arrays |= {kind: _taken(kind, x, order) for kind, x in arrays.items() if kind in ORDERED}
            rest = [_taken(kind, x, order) if kind in ORDERED else x for kind, x in zip(of_rest, rest, strict=True)]
            places = jnp.argsort(order, -1)
    elif by_place:
        arrays |= of_indices(arrays, rules, first, local * jax.lax.axis_size(axes))
        rules = dataclasses.replace(rules, align_ends=False)
    if "query_lengths" in arrays:
        arrays["query_lengths"] = jnp.clip(arrays["query_lengths"] - first, 0, local)
    present = tuple(name for name in Operands._fields if name in arrays)
    return Part((*present, *of_rest), [*(arrays[name] for name in present), *rest], present, rules, places)


def _order(arrays: Arrays) -> jax.Array | None:
    """The keys in the order of their positions, each segment's together; None where they have to stay as they are."""
    keys = arrays["key"].shape
    if any(name in arrays and arrays[name].shape[-1] > 1 for name in ("bias", "mask")):
        return None  # which would have to be copied
    by = [arrays["key_positions"]]
    if "key_segments" in arrays:
        by.insert(0, arrays["key_segments"])
    if "key_lengths" in arrays:
        by.insert(0, jnp.arange(keys[-3]) >= arrays["key_lengths"][..., None])
    shape = jnp.broadcast_shapes(*(x.shape for x in by))
    if any(n not in (1, own) for n, own in zip(shape[:-1], keys[:-3], strict=True)):
        return None
    index = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return jax.lax.sort((*(jnp.broadcast_to(x, shape) for x in by), index), num_keys=len(by))[-1]


def _taken(kind: str, x: jax.Array, order: jax.Array) -> jax.Array:
    """An operand that has an axis of keys, with its keys in another order."""
    axis = x.ndim + (OPERANDS[kind].key_axis or 0)
    index = order.reshape(*order.shape, *(1,) * (RANK[kind] - 1))
    return jnp.take_along_axis(x, index, axis, mode="promise_in_bounds")
