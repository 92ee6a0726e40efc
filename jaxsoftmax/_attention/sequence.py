"""Positions of queries and keys, and the parts of a sequence that is sharded over devices.

A device keeps its queries, and gathers all keys or gets them block by block, in a ring of devices. The causal rule,
windows and lengths count in the whole sequence: a part's first query is not query 0. Where positions are given, keys
that are gathered lie in the order of the devices, and are sorted so that a tile of queries sees one range of them.

In a ring each device passes its block of keys on while it computes, so that no device ever has more than two. The
states of its queries over the blocks merge as those of an online softmax. Gradients of a block's keys travel with it.
Where the states of all heads would take much memory, the blocks of one group of heads go round after those of another.
Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core import checks
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike
from jaxsoftmax._core.memory import in_device_memory
from jaxsoftmax._core.sharding import Names, Shape
from pallas_kernels.attention.problem import OPERANDS, PAIRS, RANK, Operands, Rules
from pallas_kernels.monoid import Stats, combine, log_normalizer
from pallas_kernels.types import accumulator_dtype

MAX_GATHERED_ELEMENTS = 2**26  # of keys and values; their gradients need five times the bytes of 16 bits
SORT_BLOCK = 128  # keys that are sorted as one, which are a tile of the kernels
MAX_OUTPUTS = 2**25  # numbers of a device's output, above which a ring computes with one group of heads after another
MIN_GROUP_QUERIES = 2**16  # queries of all heads of such a group, which are enough tiles for every SM
MAX_GATHER_DEVICES = 8  # devices whose links are so fast that gathering takes little beside computing

HEADS = {name: x.head_axis for name, x in OPERANDS.items() if x.head_axis is not None}
ORDERED = tuple(name for name, x in OPERANDS.items() if x.key_axis is not None and x.query_axis is None)
Arrays = Mapping[str, jax.Array]
Sums = tuple[jax.Array, ...]
Carry = tuple[dict[str, jax.Array], Sums]  # the block that is here, and the sums over the blocks before it
Attend = Callable[..., Sequence[jax.Array]]
Index = int | jax.Array  # known, or one of a device or of a loop's step


@public
@in_device_memory
def zigzag(x: ArrayLike, axis: int, devices: int, rounds: int = 1) -> jax.Array:
    """Reorders a sequence so that devices which share it have equal work under a causal rule.

    The sequence is `2 * devices` pieces. Device i gets piece i and piece `2 * devices - 1 - i`: queries of the first
    see few keys, queries of the second many. Apply it to whatever has the axis (tokens, labels, segment ids), and pass
    `zigzag(jnp.arange(length), 0, devices)` as `query_positions` and `key_value_positions` of `flash_attention`.

    With more `rounds` each of so many parts of the sequence is dealt like that. Use them for packed documents: how many
    keys a query sees follows from its document, and only small pieces spread long documents over all devices. Best are
    pieces of 128 tokens, `max(length // (256 * devices), 1)` rounds; smaller ones would split tiles of the kernels.

    Args:
        x: An array.
        axis: Its axis of the sequence, whose extent is a multiple of `2 * devices * rounds`.
        devices: Over how many devices the axis is sharded.
        rounds: How many times each device gets two pieces.

    Returns:
        An array of the same shape.

    Raises:
        ValueError: the axis does not exist or is not a multiple of `2 * devices * rounds`, or `devices` or `rounds` is
            less than 1.

    >>> import jax.numpy as jnp
    >>> zigzag(jnp.arange(8), 0, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    >>> zigzag(jnp.arange(8), 0, 2, rounds=2).tolist()
    [0, 3, 4, 7, 1, 2, 5, 6]
    """
    array, axis, piece = _pieces("zigzag", x, axis, devices, rounds)
    lead, tail = array.shape[:axis], array.shape[axis + 1 :]
    there, back = jnp.split(array.reshape(*lead, rounds, 2, devices, piece, *tail), 2, axis + 1)
    both = jnp.concatenate([there, jnp.flip(back, axis + 2)], axis + 1)
    return jnp.moveaxis(both, axis + 2, axis).reshape(array.shape)


@public
@in_device_memory
def unzigzag(x: ArrayLike, axis: int, devices: int, rounds: int = 1) -> jax.Array:
    """Inverts `zigzag`.

    Args:
        x: An array.
        axis: Its axis of the sequence.
        devices: As it was given to `zigzag`.
        rounds: As it was given to `zigzag`.

    Returns:
        An array of the same shape, in the sequence's own order.

    Raises:
        ValueError: as `zigzag`.

    >>> import jax.numpy as jnp
    >>> unzigzag(zigzag(jnp.arange(8), 0, 2), 0, 2).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    array, axis, piece = _pieces("unzigzag", x, axis, devices, rounds)
    lead, tail = array.shape[:axis], array.shape[axis + 1 :]
    both = jnp.moveaxis(array.reshape(*lead, devices, rounds, 2, piece, *tail), axis, axis + 2)
    there, back = jnp.split(both, 2, axis + 1)
    return jnp.concatenate([there, jnp.flip(back, axis + 2)], axis + 1).reshape(array.shape)


def _pieces(function: str, x: ArrayLike, axis: int, devices: int, rounds: int) -> tuple[jax.Array, int, int]:
    """Returns `x` as an array, its axis, and how many tokens a piece has."""
    array = x if isinstance(x, jax.Array) else checks.as_array(function, "x", x)
    at = checks.integer(function, "axis", axis)
    (at,) = checks.axes(function, at, array.ndim)
    devices, rounds = (checks.integer(function, *each) for each in (("devices", devices), ("rounds", rounds)))
    count = 2 * devices * rounds
    if min(devices, rounds) < 1 or array.shape[at] % count:
        raise ValueError(
            f"{function}: axis {axis} of x has extent {array.shape[at]}, devices={devices} and rounds={rounds}; "
            "expected at least one device and round, and a multiple of twice their product as elements. Pad the "
            "sequence."
        )
    return array, at, array.shape[at] // count


def ring_reason(devices: int, numbers: int) -> str | None:
    """Says why keys and values, of so many numbers, are passed round and not gathered; None if they are gathered."""
    if numbers > MAX_GATHERED_ELEMENTS:
        return f"keys and values of {numbers} numbers would take much memory on each device"
    if devices > MAX_GATHER_DEVICES:
        return f"{devices} devices are more than fast links join, and the computation hides what slow ones take"
    return None


def of_indices(
    arrays: Arrays, rules: Rules, firsts: tuple[Index, Index], counts: tuple[int, int]
) -> dict[str, jax.Array]:
    """Returns the positions that indices are, where the first query and key of the arrays have the indices `firsts`.

    With `rules.align_ends` those of queries are moved so that the last of them is at the last key; `counts` says how
    many queries and keys the sequences have.
    """
    (*lead, local, _, _), keys = arrays["query"].shape, arrays["key"].shape[-3]
    at, key_at = (
        jnp.arange(n, dtype=jnp.int32).reshape(*(1,) * len(lead), n) + first
        for n, first in zip((local, keys), firsts, strict=True)
    )
    if rules.align_ends:
        ends = zip(("query_lengths", "key_lengths"), counts, strict=True)
        last = [jnp.minimum(arrays[name], n)[..., None] if name in arrays else n for name, n in ends]
        at = at + (last[1] - last[0])
    return {"query_positions": at, "key_positions": key_at}


class LocalCall(NamedTuple):
    """One device's part of a call: its operands, what they are, and in which order the keys were before."""

    kinds: tuple[str, ...]
    operands: list[jax.Array]
    names: tuple[str, ...]
    rules: Rules
    places: jax.Array | None  # where each run of keys went; None: nowhere

    def in_order(self, kind: str, x: jax.Array) -> jax.Array:
        """Puts a result's keys back as they were before they were sorted."""
        return x if self.places is None or kind not in ORDERED else _taken(kind, x, self.places)


def part_of(
    kinds: Sequence[str],
    operands: Sequence[jax.Array],
    names: Sequence[str],
    rules: Rules,
    axes: Names,
    *,
    in_blocks: bool,
) -> LocalCall:
    """Returns this device's part, of queries that are sharded over `axes`, and all keys, or its block of them."""
    arrays, rest = dict(zip(names, operands, strict=False)), list(operands[len(names) :])
    of_rest = tuple(kinds[len(names) :])
    devices, me = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    local, keys = (arrays[name].shape[-3] for name in ("query", "key"))
    first = me * local
    by_place = rules.causal_offset is not None or rules.window != (None, None)
    places = None
    if "query_positions" in arrays:
        places = None if in_blocks else _places(arrays)
        if places is not None:
            order = _inverse(places)
            arrays |= {kind: _taken(kind, x, order) for kind, x in arrays.items() if kind in ORDERED}
            rest = [_taken(kind, x, order) if kind in ORDERED else x for kind, x in zip(of_rest, rest, strict=True)]
    elif by_place:
        firsts, counts = (first, 0), (local * devices, keys)
        if in_blocks:
            firsts, counts = (first, me * keys), (local * devices, keys * devices)
        arrays |= of_indices(arrays, rules, firsts, counts)
        rules = dataclasses.replace(rules, align_ends=False)
    if "query_lengths" in arrays:
        arrays["query_lengths"] = _counted(arrays["query_lengths"], first, local)
    present = tuple(name for name in Operands._fields if name in arrays)
    return LocalCall((*present, *of_rest), [*(arrays[name] for name in present), *rest], present, rules, places)


def _counted(lengths: jax.Array, first: Index, size: int) -> jax.Array:
    """Counts how many of `size` positions from `first` on are within lengths, of which a negative one counts as 0."""
    return jnp.clip(jnp.maximum(lengths, 0) - first, 0, size)


def _places(arrays: Arrays) -> jax.Array | None:
    """Returns where each run of keys goes, in the order of positions, by segments; None where keys stay.

    Each run is compared with each. XLA does that in one kernel, and a sort of so few in many.
    """
    keys = arrays["key"].shape
    if any(name in arrays and arrays[name].shape[-1] > 1 for name in PAIRS):
        return None  # which would have to be copied
    size = math.gcd(keys[-3], SORT_BLOCK)
    by = [arrays[name][..., ::size] for name in ("key_segments", "key_positions") if name in arrays]
    if "key_lengths" in arrays:
        # Keys past the length have to be the last.
        by.insert(0, -_counted(arrays["key_lengths"][..., None], jnp.arange(0, keys[-3], size), size))
    *lead, runs = jnp.broadcast_shapes(*(x.shape for x in by))
    if any(n not in (1, own) for n, own in zip(lead, keys[:-3], strict=True)):
        return None
    index = jnp.arange(runs)
    before = index < index[:, None]
    for x in reversed(by):
        mine, other = x[..., :, None], x[..., None, :]
        before = (other < mine) | ((other == mine) & before)
    return before.sum(-1, dtype=jnp.int32)


def _inverse(places: jax.Array) -> jax.Array:
    """Returns which run comes to each place."""
    index = jnp.arange(places.shape[-1], dtype=jnp.int32)
    return jnp.where(places[..., None, :] == index[:, None], index, 0).sum(-1, dtype=jnp.int32)


def _taken(kind: str, x: jax.Array, order: jax.Array) -> jax.Array:
    """Puts the runs of keys of an operand in another order."""
    axis = x.ndim + (OPERANDS[kind].key_axis or 0)
    runs = x.reshape(*x.shape[:axis], order.shape[-1], -1, *x.shape[axis + 1 :])
    index = order.reshape(*order.shape, *(1,) * RANK[kind])
    taken = jnp.take_along_axis(runs, index, axis, mode="promise_in_bounds")
    return taken.reshape(*taken.shape[:axis], *x.shape[axis:])


def ring(attend: Attend, part: LocalCall, results: Sequence[str], axes: Names) -> list[jax.Array]:
    """Computes the results of a part that has a block of the keys, as every block comes past in turn.

    `attend(*operands, names=..., rules=...)` computes with one block.
    """
    groups = head_groups(part.kinds, [x.shape for x in part.operands], results)
    if groups == 1:
        return _once_round(attend, part, results, axes)

    def of_group(i: Index) -> list[jax.Array]:
        operands = [_heads_of(groups, i, kind, x) for kind, x in zip(part.kinds, part.operands, strict=True)]
        return _once_round(attend, part._replace(operands=operands), results, axes)

    def put(i: jax.Array, kind: str, x: jax.Array, heads: jax.Array) -> jax.Array:
        axis = HEADS[kind]
        return jax.lax.dynamic_update_slice_in_dim(x, heads, i * heads.shape[axis], axis)

    def compute(arrays: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], None]:
        return list(map(functools.partial(put, i), results, arrays, of_group(i))), None

    # Each group's results are written where they stay.
    empty: list[jax.Array] = []
    for kind, x in zip(results, jax.eval_shape(of_group, 0), strict=True):
        shape = list(x.shape)
        shape[HEADS[kind]] *= groups
        empty.append(jnp.zeros(shape, x.dtype))
    return jax.lax.scan(compute, empty, jnp.arange(groups))[0]


def head_groups(kinds: Sequence[str], shapes: Sequence[Shape], results: Sequence[str]) -> int:
    """Counts the groups of heads that a ring computes with, one after another, for one device's operands.

    Each group has a key head or more. It is one group where a result is a sum over heads.
    """
    of = dict(zip(kinds, shapes, strict=False))
    queries, key_heads = math.prod(of["query"][:-1]), of["key"][-2]
    is_sum = any(kind in of and not has_heads(kind, of[kind]) for kind in results)
    if is_sum or queries * of["value"][-1] <= MAX_OUTPUTS:
        return 1
    most = max(1, queries // MIN_GROUP_QUERIES)
    return max(n for n in range(1, key_heads + 1) if key_heads % n == 0 and n <= most)


def has_heads(kind: str, shape: Shape) -> bool:
    """Whether an operand has an axis of heads that is not broadcast."""
    return kind in HEADS and not (OPERANDS[kind].broadcasts and shape[HEADS[kind]] == 1)


def has_queries(kind: str, shape: Shape) -> bool:
    """Whether an operand has an axis of queries that is not broadcast."""
    axis, broadcasts = OPERANDS[kind].query_axis, OPERANDS[kind].broadcasts
    return axis is not None and not (broadcasts and shape[axis] == 1)


def _heads_of(groups: int, i: Index, kind: str, x: jax.Array) -> jax.Array:
    """Returns an operand's heads of one group."""
    if not has_heads(kind, x.shape):
        return x
    count = x.shape[HEADS[kind]] // groups
    return jax.lax.dynamic_slice_in_dim(x, i * count, count, HEADS[kind])


def _once_round(attend: Attend, part: LocalCall, results: Sequence[str], axes: Names) -> list[jax.Array]:
    """Computes the results of a part, as every block of its keys' heads comes past."""
    devices, me = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    to_previous = [(i, (i - 1) % devices) for i in range(devices)]
    pass_on = lambda x: jax.lax.ppermute(x, axes, to_previous)
    names, rest = part.names, part.operands[len(part.names) :]
    arrays = dict(zip(names, part.operands, strict=False))
    over = _Outputs(arrays.pop("sinks", None)) if results == ("out", "lse") else _Gradients(tuple(results), pass_on)
    keys, rules = arrays["key"].shape[-3], dataclasses.replace(part.rules, is_block=True)

    def compute(step: Index, block: dict[str, jax.Array], sums: Sums) -> Sums:
        here = arrays | block
        if "key_lengths" in here:
            first = (me + step) % devices * keys
            here["key_lengths"] = _counted(here["key_lengths"], first, keys)
        sums = over.travelled(sums)
        return over.added(sums, attend(*here.values(), *rest, names=tuple(here), rules=rules))

    def advance(carry: Carry, step: Index) -> tuple[Carry, None]:
        block, sums = carry
        # The next block comes while this one is computed with.
        return (jax.tree.map(pass_on, block), compute(step, block, sums)), None

    first = {name: arrays[name] for name in names if name in ORDERED}
    if devices == 1:
        return over.finished(compute(0, first, ()))
    carry, _ = advance((first, ()), 0)
    if devices > 2:
        # In a loop XLA holds no more than two blocks, and no results but the sums.
        carry, _ = jax.lax.scan(advance, carry, jnp.arange(1, devices - 1))
    return over.finished(compute(devices - 1, *carry))


@dataclasses.dataclass
class _Outputs:
    """States of queries over blocks of keys, which merge, and sinks, which count once."""

    sinks: jax.Array | None
    dtypes: tuple[np.dtype, ...] = ()

    def travelled(self, sums: Sums) -> Sums:
        """Returns nothing, as nothing travels with a block."""
        return sums

    def added(self, sums: Sums, results: Sequence[jax.Array]) -> Sums:
        out, lse = results
        self.dtypes = out.dtype, lse.dtype
        maximum = jnp.swapaxes(lse, -1, -2)[..., None]
        state = maximum, jnp.ones_like(maximum), out.astype(maximum.dtype)
        return combine(sums, state) if sums else state

    def finished(self, state: Sums) -> list[jax.Array]:
        maximum = state[0]
        if self.sinks is not None:
            sink = jnp.broadcast_to(self.sinks.astype(maximum.dtype)[..., None, :, None], maximum.shape)
            state = combine(state, (sink, jnp.ones_like(sink), jnp.zeros_like(sink)))
        is_empty = maximum == -jnp.inf
        lse = jnp.where(is_empty, -jnp.inf, log_normalizer(Stats(*state[:2])))
        out = jnp.where(is_empty, 0.0, state[2] / jnp.where(is_empty, 1.0, state[1]))
        return [out.astype(self.dtypes[0]), jnp.swapaxes(lse[..., 0], -1, -2).astype(self.dtypes[1])]


@dataclasses.dataclass
class _Gradients:
    """Adds up gradients over blocks of keys. The gradients of the keys follow their block."""

    results: tuple[str, ...]
    pass_on: Callable[[jax.Array], jax.Array]
    dtypes: tuple[np.dtype, ...] = ()

    def travelled(self, sums: Sums) -> Sums:
        """Passes gradients of keys one device on: they travel with their block."""
        pairs = zip(self.results, sums, strict=False)
        return tuple(self.pass_on(x) if kind in ORDERED else x for kind, x in pairs)

    def added(self, sums: Sums, gradients: Sequence[jax.Array]) -> Sums:
        self.dtypes = tuple(x.dtype for x in gradients)
        wide = tuple(x.astype(accumulator_dtype(x.dtype)) for x in gradients)
        if not sums:
            return wide
        # The sinks' gradient follows from the logsumexp over all blocks, and comes again with each.
        return tuple(x if kind == "sinks" else x + y for kind, x, y in zip(self.results, sums, wide, strict=True))

    def finished(self, sums: Sums) -> list[jax.Array]:
        return [x.astype(dtype) for x, dtype in zip(self.travelled(sums), self.dtypes, strict=True)]
