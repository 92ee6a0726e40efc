"""The layout of attention's operands, for kernels and over devices: it follows from the table `OPERANDS`.

Kernels have one batch axis and one axis of heads. Leading axes become the batch. Axes along which keys and values are
shared (as when only the query is mapped) become more query heads to each key head instead, so that keys and values are
not copied. Head dimensions that are no multiple of 8 are padded with zeros.

Devices share batch and heads, for which the forward pass communicates nothing. They share queries, and gather keys and
values for that. The backward pass sums gradients of operands that devices share: of keys and values that heads or
queries on several devices read, of a bias that is broadcast along a sharded axis, and of sinks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.sharding import PartitionSpec as P

from jaxsoftmax._attention import sequence
from jaxsoftmax._core.primitives import Plan
from jaxsoftmax._core.sharding import (
    Entry,
    Names,
    Shape,
    Shard,
    Spec,
    common_spec,
    is_explicit,
    mesh_axes,
    mesh_of,
    reshard,
    sharding_rule,
    spec_of,
)
from pallas_kernels.attention.problem import DIFFERENTIABLE, OPERANDS, PAIRS, RANK, Op, Rules, problem_of
from pallas_kernels.hardware import Device
from pallas_kernels.types import accumulator_dtype

_DIM_MULTIPLE = 8  # a TMA copy needs rows of whole 16 bytes: 8 elements of 16 bits


QUERY_HEADS = {name: operand.head_axis for name, operand in OPERANDS.items() if operand.heads == "query"}
KEY_HEADS = {name: operand.head_axis for name, operand in OPERANDS.items() if operand.heads == "key"}


def kernel_gradients(names: Collection[str], wanted: Collection[str]) -> list[str]:
    """Names the operands whose gradients the backward kernel returns, in its order."""
    return [n for n in DIFFERENTIABLE if n in wanted or (n in names and not OPERANDS[n].gradient_on_request)]


@dataclasses.dataclass(frozen=True)
class Fold:
    """Leading extents, which of their axes are folded into the heads, and the heads before that."""

    full: Shape
    grouped: Shape
    heads: int
    key_heads: int
    widths: tuple[int, int]  # of a head of query and key, and of value and output

    @property
    def batch_axes(self) -> Shape:
        return tuple(d for d in range(len(self.full)) if d not in self.grouped)

    @property
    def batch(self) -> int:
        return math.prod(self.full[d] for d in self.batch_axes)

    @property
    def all_heads(self) -> int:
        return self.heads * math.prod(self.full[d] for d in self.grouped)

    def kernel_shape(self, kind: str, shape: Shape) -> Any:
        """The shape in which the kernel takes an operand."""
        lead, core = self._broadcast(kind, shape)
        batch = math.prod(lead[d] for d in self.batch_axes)
        if kind in QUERY_HEADS:
            copies = math.prod(lead[d] for d in self.grouped)
            core = (*core[: QUERY_HEADS[kind]], core[QUERY_HEADS[kind]] * copies, *core[QUERY_HEADS[kind] + 1 :])
        return (batch, *core)

    def to_kernel(self, kind: str, x: jax.Array) -> jax.Array:
        """Lays out an operand for the kernel."""
        lead, core = self._broadcast(kind, x.shape)
        x = jnp.broadcast_to(x, (*lead, *core))
        if kind in QUERY_HEADS:
            x = self._split(kind, x).transpose(self._order(kind))
        x = x.reshape(self.kernel_shape(kind, (*lead, *core)))
        operand = OPERANDS[kind]
        x = x if operand.dtype is None else x.astype(operand.dtype)
        x = x if operand.has_batch else x.reshape(x.shape[1:])
        short = -x.shape[-1] % _DIM_MULTIPLE if operand.padded else 0
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x

    def from_kernel(self, kind: str, x: jax.Array) -> jax.Array:
        """Unfolds a result of the kernel; the leading axes that the kernel has summed have extent 1."""
        operand = OPERANDS[kind]
        x = x if operand.has_batch else x[None]
        x = x[..., : self.widths[operand.padded == "value_dim"]] if operand.padded else x
        batch = [self.full[d] if x.shape[0] == self.batch else 1 for d in self.batch_axes]
        if kind not in QUERY_HEADS:
            return jnp.expand_dims(x.reshape(*batch, *x.shape[1:]), self.grouped)
        at = 1 + QUERY_HEADS[kind]
        one = x.shape[at] != self.all_heads
        copies = [1 if one else self.full[d] for d in self.grouped]
        parts = (1, *copies, 1) if one else (self.key_heads, *copies, self.heads // self.key_heads)
        x = x.reshape(*batch, *x.shape[1:at], *parts, *x.shape[at + 1 :])
        order = self._order(kind)
        x = x.transpose(sorted(range(len(order)), key=order.__getitem__))
        heads = len(self.full) + QUERY_HEADS[kind]
        return x.reshape(*x.shape[:heads], x.shape[heads] * x.shape[heads + 1], *x.shape[heads + 2 :])

    def _broadcast(self, kind: str, shape: Shape) -> tuple[Shape, Shape]:
        """Gives the leading and the last extents of an operand in the kernel; a mask keeps extents of 1 if it can."""
        rank = len(self.full)
        lead, core = list(shape[:rank]), list(shape[rank:])
        may_stay = OPERANDS[kind].broadcasts
        if not may_stay or any(lead[d] != 1 for d in self.batch_axes):
            for d in self.batch_axes:
                lead[d] = self.full[d]
        if kind in QUERY_HEADS and (
            not may_stay or core[QUERY_HEADS[kind]] != 1 or any(lead[d] != 1 for d in self.grouped)
        ):
            core[QUERY_HEADS[kind]] = self.heads
            for d in self.grouped:
                lead[d] = self.full[d]
        return tuple(lead), tuple(core)

    def _split(self, kind: str, x: jax.Array) -> jax.Array:
        at = len(self.full) + QUERY_HEADS[kind]
        parts = (1, 1) if x.shape[at] != self.heads else (self.key_heads, self.heads // self.key_heads)
        return x.reshape(*x.shape[:at], *parts, *x.shape[at + 1 :])

    def _order(self, kind: str) -> Shape:
        """Transposes `[*leading, ..., K, G, ...]` to `[*batch, ..., K, *grouped, G, ...]`."""
        rank, last = len(self.full), RANK[kind] + 1
        heads = rank + QUERY_HEADS[kind]
        before, after = range(rank, heads + 1), range(heads + 1, rank + last)
        return (*self.batch_axes, *before, *self.grouped, *after)


def fold(shapes: Mapping[str, Shape]) -> Fold:
    """Returns the fold of operands of these shapes."""
    leads = {name: shape[: len(shape) - RANK[name]] for name, shape in shapes.items()}
    full = tuple(jnp.broadcast_shapes(*leads.values()))
    shared = [lead for name, lead in leads.items() if name not in QUERY_HEADS]
    grouped = tuple(d for d, n in enumerate(full) if n != 1 and all(lead[d] == 1 for lead in shared))
    widths = shapes["query"][-1], shapes["value"][-1]
    return Fold(full, grouped, shapes["query"][-2], shapes["key"][-2], widths)


def plan(
    op: Op,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
    rules: Rules,
    device: Device,
    named: bool = False,
    **gradients: bool,
) -> Plan:
    """Asks `dispatch.decide` about the folded call."""
    # Pallas takes longer to import than JAX itself, and only a lowering for CUDA needs it.
    from pallas_kernels.attention import dispatch

    if not all(isinstance(n, int) and n > 0 for shape in shapes.values() for n in shape):
        return Plan(((str(op), "is compiled for fixed, non-empty shapes, and a dimension is symbolic or zero"),))
    folded = fold(shapes)
    for name, shape in shapes.items():
        if not OPERANDS[name].has_batch and any(shape[d] != 1 for d in folded.batch_axes):
            return Plan(((str(op), f"takes one set of {name}, and here they differ within the batch"),))
    found: dict[str, Any] = {name: folded.kernel_shape(name, shape) for name, shape in shapes.items()}
    in_kernel = {
        name: (*shape[:-1], shape[-1] + -shape[-1] % _DIM_MULTIPLE) if OPERANDS[name].padded else shape
        for name, shape in found.items()
    }
    problem = problem_of(op, in_kernel, dtypes, rules, **gradients)
    decision = dispatch.decide(problem, device, named=named)
    if decision.kernel is None:
        return Plan(decision.declined)
    return Plan(decision.declined, decision, folded, _notes(shapes, found))


def _notes(shapes: Mapping[str, Shape], found: Mapping[str, Shape]) -> tuple[str, ...]:
    """Describes the work on the operands before the kernel, beyond a reshape."""
    notes = [
        f"{name}, of shape {shape}, is copied to {found[name]}"
        for name, shape in shapes.items()
        if math.prod(found[name]) != math.prod(shape)
    ]
    padded = [n for n, shape in shapes.items() if n != "out" and OPERANDS[n].padded and shape[-1] % _DIM_MULTIPLE]
    if padded:
        notes.append(f"the heads of {', '.join(padded)} are padded to a multiple of {_DIM_MULTIPLE}")
    if "mask" in shapes:
        notes.append("the mask is packed in bits first, and the kernel skips tiles outside of those that it leaves")
    if "query_segments" in shapes:
        notes.append("which tiles have segments in common is found first, and the kernel skips the others")
    return tuple(notes)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a call is sharded: leading axes, the query's heads and the key's, and whether devices share a key head.

    Then the queries, and the keys between calls: a device that computes has all of them.
    """

    full: Shape
    lead: Spec
    heads: Entry
    key_heads: Entry
    shares: bool
    queries: Entry = None
    keys: Entry = None

    def spec(self, kind: str, shape: Shape, kept: Sequence[int] | None = None) -> P:
        """The sharding of an operand, or of a result that keeps only some of the leading axes.

        An extent of 1 that is not broadcast has its axis' sharding too, over a mesh axis of extent 1.
        """
        lead = tuple(
            entry if shape[d] == self.full[d] and (kept is None or d in kept) else None
            for d, entry in enumerate(self.lead)
        )
        core: list[Entry] = [None] * RANK[kind]
        if kind in QUERY_HEADS and sequence.has_heads(kind, shape):
            core[QUERY_HEADS[kind]] = self.heads
        if kind in KEY_HEADS:
            core[KEY_HEADS[kind]] = self.key_heads
        operand = OPERANDS[kind]
        if operand.query_axis is not None:
            core[operand.query_axis] = self.queries if sequence.has_queries(kind, shape) else None
        elif operand.key_axis is not None:
            core[operand.key_axis] = self.keys
        return P(*lead, *core)

    @property
    def gathered(self) -> "Sharding":
        """Puts all keys on each device."""
        return dataclasses.replace(self, keys=None)

    def ring_reason(self, kinds: Sequence[str], shapes: Sequence[Shape], sizes: Mapping[str, int]) -> str | None:
        """Why a device passes its keys on and does not gather those of all, in words, or None."""
        of_pairs = [s for kind, s in zip(kinds, shapes, strict=True) if kind in PAIRS and s[-1] != 1]
        if self.keys is None or of_pairs:
            return None
        numbers = 0
        for kind in ("key", "value"):
            shape = shapes[kinds.index(kind)]
            names = [name for entry in self.gathered.spec(kind, shape) for name in mesh_axes(entry)]
            numbers += math.prod(shape) // math.prod(sizes[name] for name in names)
        return sequence.ring_reason(math.prod(sizes[name] for name in mesh_axes(self.keys)), numbers)


def sharding(
    kinds: Sequence[str], shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]
) -> Sharding:
    """The sharding of a call from its operands': leading axes, heads and queries stay sharded, other axes do not."""
    ranks = [len(shape) - RANK[kind] for kind, shape in zip(kinds, shapes, strict=True)]
    full = tuple(jnp.broadcast_shapes(*(shape[:rank] for shape, rank in zip(shapes, ranks, strict=True))))
    lead = common_spec([spec[:rank] for spec, rank in zip(specs, ranks, strict=True)])
    at, key_at = (kinds.index(name) for name in ("query", "key"))
    taken = {name for entry in lead for name in mesh_axes(entry)}

    def parts(entry: Entry) -> int:
        return math.prod(sizes[name] for name in mesh_axes(entry))

    def is_free(entry: Entry) -> bool:
        return entry is not None and taken.isdisjoint(mesh_axes(entry))

    heads, key_heads, shares = specs[at][-2], None, False
    queries, keys = shapes[at][-2], shapes[key_at][-2]
    if is_free(heads) and keys % parts(heads) == 0:
        key_heads = heads
    elif is_free(heads) and queries % parts(heads) == 0 and (queries // keys) % (queries // parts(heads)) == 0:
        shares = True
    else:
        heads = None
    taken |= set(mesh_axes(heads))
    of_queries, of_keys = specs[at][-3], specs[key_at][-3]
    if not is_free(of_queries) or shapes[at][-3] % parts(of_queries):
        of_queries = None
    if mesh_axes(of_keys) != mesh_axes(of_queries) or shapes[key_at][-3] % parts(of_keys):
        of_keys = None
    return Sharding(full, lead, heads, key_heads, shares, of_queries, of_keys)


def sequence_notes(
    kinds: Sequence[str],
    shapes: Sequence[Shape],
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
    results: Sequence[str] | None,
) -> tuple[str, ...]:
    """Makes notes for `explain`: gather or ring, and why. With `results=None` a ring cannot compute the results."""
    sharded = sharding(kinds, shapes, specs, sizes)
    parts = math.prod(sizes[name] for name in mesh_axes(sharded.queries))
    if sharded.queries is None:
        return ()
    keys, why = "gathers all keys and values", sharded.ring_reason(kinds, shapes, sizes)
    if why is not None and results is not None:
        devices = lambda entry: math.prod(sizes[name] for name in mesh_axes(entry))
        local = [
            tuple(n // devices(entry) for n, entry in zip(shape, sharded.spec(kind, shape), strict=True))
            for kind, shape in zip(kinds, shapes, strict=True)
        ]
        groups = sequence.head_groups(kinds, local, results)
        rounds = "" if groups == 1 else f", {groups} groups of heads one after another"
        keys = f"passes its keys and values round a ring{rounds}: {why}"
    queries = shapes[kinds.index("query")][-3] // parts
    return (f"the sequence is shared: each of {parts} devices computes for its {queries} queries, and {keys}",)


def sharding_of(kinds: Sequence[str], avals: Sequence[Any]) -> Sharding:
    """The sharding of a call on operands of these types."""
    return sharding(kinds, [a.shape for a in avals], [spec_of(a) for a in avals], mesh_of(avals).shape)


def unify_shardings(kinds: Sequence[str], arrays: Sequence[jax.Array], *, in_parts: bool = True) -> list[jax.Array]:
    """Reshards arrays whose types have shardings to their `sharding`, so that a gradient has its operand's type.

    Without `in_parts`, arrays whose types name no mesh are resharded too. Devices cannot share a key head then, nor a
    sequence: heads that are sharded more finely than the key's are gathered, and so are queries and keys.
    """
    avals = [jax.typeof(x) for x in arrays]
    if not is_explicit(avals):
        return list(arrays)
    sharded = sharding_of(kinds, avals)
    if not in_parts:
        heads = None if sharded.shares else sharded.heads
        sharded = dataclasses.replace(sharded, heads=heads, shares=False, queries=None, keys=None)
    mesh = None if in_parts else mesh_of(avals)
    return [reshard(x, sharded.spec(kind, x.shape), mesh) for kind, x in zip(kinds, arrays, strict=True)]


@dataclasses.dataclass(frozen=True)
class Heads:
    """A part of an attention call to be sharded. `kept[i]`: the leading axes of result i, None for all of them.

    `names` and `rules` are those of `run`, which takes others by these keywords. `by_blocks`: whether results over
    blocks of keys can be merged.
    """

    names: tuple[str, ...]
    rules: Rules
    kinds: tuple[str, ...]
    results: tuple[str, ...]
    kept: tuple[tuple[int, ...] | None, ...]
    result_shapes: tuple[Shape, ...]
    run: Callable[..., Any]
    by_blocks: bool

    def whole(self, *operands: jax.Array) -> list[jax.Array]:
        """Runs everything on one device."""
        return list(self.run(*operands))

    def shard_problem(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Shard:
        """Returns one device's part."""
        sharded = sharding(self.kinds, shapes, specs, sizes)
        in_ring = self.by_blocks and sharded.ring_reason(self.kinds, shapes, sizes) is not None
        operands = sharded if in_ring else sharded.gathered
        ins = [operands.spec(kind, shape) for kind, shape in zip(self.kinds, shapes, strict=True)]
        results = list(zip(self.results, self.result_shapes, self.kept, strict=True))
        outs = [sharded.spec(kind, shape, kept) for kind, shape, kept in results]
        heads = shapes[self.kinds.index("query")][-2], shapes[self.kinds.index("key")][-2]
        sums = [self._sums(sharded, *result, in_ring) for result in results]
        return Shard(ins, outs, functools.partial(self._part, sharded, heads, sums, in_ring))

    def _sums(self, sharded: Sharding, kind: str, shape: Shape, kept: tuple[int, ...] | None, in_ring: bool) -> Names:
        """The mesh axes over which a result is to be added up."""
        if kept is None:
            return ()
        names = [name for d, entry in enumerate(sharded.lead) if d not in kept for name in mesh_axes(entry)]
        is_shared = sharded.shares if kind in KEY_HEADS else not sequence.has_heads(kind, shape)
        has_all = in_ring and kind in sequence.ORDERED
        if not has_all and not sequence.has_queries(kind, shape):
            names += mesh_axes(sharded.queries)
        return (*names, *(mesh_axes(sharded.heads) if is_shared else ()))

    def _part(
        self, sharded: Sharding, heads: tuple[int, int], sums: Sequence[Names], in_ring: bool, *operands: jax.Array
    ) -> list[jax.Array]:
        part, of_queries = sequence.Part(self.kinds, list(operands), self.names, self.rules, None), sharded.queries
        if of_queries is not None:
            given = self.kinds, operands, self.names, self.rules
            part = sequence.part_of(*given, mesh_axes(of_queries), in_blocks=in_ring)
        mine: Any = 0
        if sharded.shares:
            local = operands[self.kinds.index("query")].shape[-2]
            mine = jax.lax.axis_index(mesh_axes(sharded.heads)) * local // (heads[0] // heads[1])
            part = part._replace(operands=list(map(functools.partial(_own_head, mine), part.kinds, part.operands)))
        if in_ring:
            found = sequence.ring(self.run, part, self.results, mesh_axes(of_queries))
        else:
            found = self.run(*part.operands, names=part.names, rules=part.rules)
        if sharded.shares:
            found = map(functools.partial(_among_heads, mine, heads[1]), self.results, found)
        found = map(part.in_order, self.results, found)
        return [_added(sharded, kind, x, names) for kind, x, names in zip(self.results, found, sums, strict=True)]

    def shardy_rule(self, shapes: Sequence[Shape]) -> SdyShardingRule:
        """Returns a factor for each leading axis, and one for heads, queries and keys; other axes are not sharded."""
        leads = [shape[: len(shape) - RANK[kind]] for kind, shape in zip(self.kinds, shapes, strict=True)]
        lead = tuple(f"lead{d}" for d in range(len(leads[0])))
        same = shapes[self.kinds.index("query")][-2] == shapes[self.kinds.index("key")][-2]
        factors = Sharding(
            jnp.broadcast_shapes(*leads), lead, "heads", "heads" if same else "key_heads", False, "queries", "keys"
        ).spec
        operands = map(factors, self.kinds, shapes)
        return sharding_rule(list(operands), list(map(factors, self.results, self.result_shapes, self.kept)))

    def is_whole_in(self, pieces: Sequence[Shape]) -> bool:
        """Whether only the leading axes are sharded, equally for all operands."""
        leads = {piece[: len(piece) - RANK[kind]] for kind, piece in zip(self.kinds, pieces, strict=True)}
        uncut = all(
            n == 1 for kind, piece in zip(self.kinds, pieces, strict=True) for n in piece[len(piece) - RANK[kind] :]
        )
        return len(leads) == 1 and uncut


def _added(sharded: Sharding, kind: str, x: jax.Array, names: Names) -> jax.Array:
    """Adds up a result over devices. Each device gets its own part of the gradients of sharded keys.

    Parts in 16 bits are added in float32.
    """
    operand, of_queries = OPERANDS[kind], mesh_axes(sharded.queries)
    if not names:
        return x
    dtype = x.dtype
    x = x.astype(accumulator_dtype(dtype))
    key_axis = operand.key_axis if sharded.keys is not None and operand.query_axis is None else None
    if key_axis is not None and of_queries and set(of_queries) <= set(names):
        axis = x.ndim + key_axis
        x = jax.lax.psum_scatter(x, of_queries, scatter_dimension=axis, tiled=True)
        names = tuple(name for name in names if name not in of_queries)
    return (jax.lax.psum(x, names) if names else x).astype(dtype)


def _own_head(head: jax.Array, kind: str, x: jax.Array) -> jax.Array:
    """The one key head of an operand that this device reads."""
    return jax.lax.dynamic_slice_in_dim(x, head, 1, x.ndim - 2) if kind in KEY_HEADS else x


def _among_heads(head: jax.Array, heads: int, kind: str, x: jax.Array) -> jax.Array:
    """Puts a result of one key head among all key heads; the others are 0."""
    if kind not in KEY_HEADS:
        return x
    whole = jnp.zeros((*x.shape[:-2], heads, x.shape[-1]), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, x, head, x.ndim - 2)
