"""Attention over devices: which axes of the operands stay sharded, and how one device computes its part.

Devices share batch and heads, for which the forward pass communicates nothing. They share queries, and gather keys and
values for that, or pass them round a ring. The backward pass sums gradients of operands that devices share: of keys and
values that heads or queries on several devices read, of a bias that is broadcast along a sharded axis, and of sinks.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxsoftmax._attention import sequence
from jaxsoftmax._core.axes import Axes, Entries, Shard, Sharded, Signature, parse
from jaxsoftmax._core.sharding import Entry, Names, Shape, Spec, common_spec, is_explicit, mesh_axes, mesh_of, reshard
from pallas_kernels.attention.problem import OPERANDS, PAIRS, Rules
from pallas_kernels.types import accumulator_dtype


def axes_of(kind: str, lead: int) -> Axes:
    """Returns the axes of an operand with so many leading ones. Each device has all keys of a bias or a mask."""
    axes = OPERANDS[kind].axes
    return parse("*b" + (axes.replace("s", "S") if kind in PAIRS else axes), lead)


@dataclasses.dataclass(frozen=True)
class CallSignature(Signature):
    """The axes of a part of an attention call: leading ones, then queries `t`, keys `s`, their heads `n` and `k`."""

    kinds: tuple[str, ...] = ()

    def entries(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Entries:
        """Returns the mesh axes of each axis: leading axes first, then those of the query's heads and of queries.

        Heads stay sharded where each device has whole groups, or, with `None` for the key's, a part of one group. Keys
        are sharded as queries are, between calls: a device that computes has all of them, or passes them round a ring.
        """
        lead, extents = len(self.independent), self.extents(shapes)
        entries = dict(zip(self.independent, common_spec([spec[:lead] for spec in specs]), strict=True))
        of_query, of_key = (dict(zip(self.operands[i], specs[i], strict=True)) for i in range(2))
        taken = {name for entry in entries.values() for name in mesh_axes(entry)}

        def parts(entry: Entry) -> int:
            return math.prod(sizes[name] for name in mesh_axes(entry))

        def is_free(entry: Entry) -> bool:
            return entry is not None and taken.isdisjoint(mesh_axes(entry))

        heads, key_heads = of_query["n"], None
        count, key_count = extents["n"], extents["k"]
        if is_free(heads) and key_count % parts(heads) == 0:
            key_heads = heads
        elif not (is_free(heads) and count % parts(heads) == 0 and count // key_count % (count // parts(heads)) == 0):
            heads = None
        taken |= set(mesh_axes(heads))
        queries, keys = of_query["t"], of_key["s"]
        if not is_free(queries) or extents["t"] % parts(queries):
            queries = None
        if mesh_axes(keys) != mesh_axes(queries) or extents["s"] % parts(keys):
            keys = None
        return entries | {"n": heads, "k": key_heads, "t": queries, "s": keys}

    def ring_reason(self, shapes: Sequence[Shape], entries: Entries, sizes: Mapping[str, int]) -> str | None:
        """Why a device passes its keys on and does not gather those of all, in words, or None."""
        of_pairs = [shape for kind, shape in zip(self.kinds, shapes, strict=True) if kind in PAIRS and shape[-1] != 1]
        if entries["s"] is None or of_pairs:
            return None
        specs, elements = self.specs_of(shapes, entries | {"s": None}), 0
        for shape, spec in zip(shapes[1:3], specs[1:3], strict=True):
            names = [name for entry in spec for name in mesh_axes(entry)]
            elements += math.prod(shape) // math.prod(sizes[name] for name in names)
        return sequence.ring_reason(math.prod(sizes[name] for name in mesh_axes(entries["s"])), elements)


def signature(kinds: Sequence[str], lead: int, results: Sequence[str] = ()) -> CallSignature:
    """Returns the signature of a call on operands of these kinds, query, key and value first."""
    operands, of_results = (tuple(axes_of(kind, lead) for kind in of) for of in (kinds, results))
    leading = parse("*b", lead)
    return CallSignature(operands, of_results, (*leading, *"nkts"), leading, (("n", "k"),), tuple(kinds))


def shares_key_heads(entries: Entries) -> bool:
    """Whether devices have queries of the same key head."""
    return entries["n"] is not None and entries["k"] is None


def sequence_notes(
    kinds: Sequence[str],
    shapes: Sequence[Shape],
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
    results: Sequence[str] | None,
) -> tuple[str, ...]:
    """Makes notes for `explain`: gather or ring, and why. With `results=None` a ring cannot compute the results."""
    call = signature(kinds, len(shapes[0]) - len(OPERANDS["query"].axes))
    entries = call.entries(shapes, specs, sizes)
    devices = lambda entry: math.prod(sizes[name] for name in mesh_axes(entry))
    if entries["t"] is None:
        return ()
    keys, why = "gathers all keys and values", call.ring_reason(shapes, entries, sizes)
    if why is not None and results is not None:
        local = [
            tuple(n // devices(entry) for n, entry in zip(shape, spec, strict=True))
            for shape, spec in zip(shapes, call.specs_of(shapes, entries), strict=True)
        ]
        groups = sequence.head_groups(kinds, local, results)
        rounds = "" if groups == 1 else f", {groups} groups of heads one after another"
        keys = f"passes its keys and values round a ring{rounds}: {why}"
    parts = devices(entries["t"])
    queries = shapes[0][-3] // parts
    return (f"the sequence is shared: each of {parts} devices computes for its {queries} queries, and {keys}",)


def unify_shardings(kinds: Sequence[str], arrays: Sequence[jax.Array], *, in_parts: bool = True) -> list[jax.Array]:
    """Reshards arrays whose types have shardings to those of the call, so that a gradient has its operand's type.

    Without `in_parts`, arrays whose types name no mesh are resharded too. Devices cannot share a key head then, nor a
    sequence: heads that are sharded more finely than the key's are gathered, and so are queries and keys.
    """
    avals = [jax.typeof(x) for x in arrays]
    if not is_explicit(avals):
        return list(arrays)
    call = signature(kinds, arrays[0].ndim - len(OPERANDS["query"].axes))
    entries, mesh = call.entries_of(avals), None
    if not in_parts:
        entries |= {"n": entries["k"], "t": None, "s": None}
        mesh = mesh_of(avals)
    specs = call.specs_of([a.shape for a in avals], entries)
    return [reshard(x, spec, mesh) for x, spec in zip(arrays, specs, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedAttention(Sharded):
    """A part of an attention call to be sharded.

    `compute` takes operands, and other `names` and `rules` than the call's by these keywords. `by_blocks`: whether
    results over blocks of keys can be merged.
    """

    signature: CallSignature
    names: tuple[str, ...]
    rules: Rules
    results: tuple[str, ...]
    by_blocks: bool

    def whole(self, *operands: jax.Array) -> list[jax.Array]:
        """Runs everything on one device."""
        return list(self.compute(*operands))

    def shard_problem(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Shard:
        """Returns one device's part."""
        call, result_shapes = self.signature, self.result_shapes
        entries, extents = call.entries(shapes, specs, sizes), call.extents(shapes)
        in_ring = self.by_blocks and call.ring_reason(shapes, entries, sizes) is not None
        gathered = entries | {"s": None}
        ins = call.specs_of(shapes, entries if in_ring else gathered)
        outs = call.results_of(shapes, entries, result_shapes)
        every = tuple(dict.fromkeys(name for entry in gathered.values() for name in mesh_axes(entry)))
        sums: list[Names] = []
        for kind, spec in zip(self.results, call.results_of(shapes, gathered, result_shapes), strict=True):
            own = {name for entry in spec for name in mesh_axes(entry)}
            own |= set(mesh_axes(entries["t"])) if in_ring and kind in sequence.ORDERED else set()
            sums.append(tuple(name for name in every if name not in own))
        part = functools.partial(self._part, entries, (extents["n"], extents["k"]), sums, in_ring)
        return Shard(ins, outs, part)

    def _part(
        self, entries: Entries, heads: tuple[int, int], sums: Sequence[Names], in_ring: bool, *operands: jax.Array
    ) -> list[jax.Array]:
        kinds, of_queries = self.signature.kinds, mesh_axes(entries["t"])
        part = sequence.LocalCall(kinds, list(operands), self.names, self.rules, None)
        if of_queries:
            part = sequence.part_of(kinds, operands, self.names, self.rules, of_queries, in_blocks=in_ring)
        shares, head = shares_key_heads(entries), jnp.int32(0)
        if shares:
            local = operands[0].shape[-2]
            head = jax.lax.axis_index(mesh_axes(entries["n"])) * local // (heads[0] // heads[1])
            part = part._replace(operands=list(map(functools.partial(_own_head, head), part.kinds, part.operands)))
        if in_ring:
            outputs = sequence.ring(self.compute, part, self.results, of_queries)
        else:
            outputs = self.compute(*part.operands, names=part.names, rules=part.rules)
        if shares:
            outputs = map(functools.partial(_among_heads, head, heads[1]), self.results, outputs)
        outputs = map(part.in_order, self.results, outputs)
        return [_added(entries, kind, x, names) for kind, x, names in zip(self.results, outputs, sums, strict=True)]


def _added(entries: Entries, kind: str, x: jax.Array, names: Names) -> jax.Array:
    """Adds up a result over devices. Each device gets its own part of the gradients of sharded keys.

    Parts in 16 bits are added in float32.
    """
    if not names:
        return x
    dtype, of_queries = x.dtype, mesh_axes(entries["t"])
    x = x.astype(accumulator_dtype(dtype))
    if entries["s"] is not None and kind in sequence.ORDERED and of_queries and set(of_queries) <= set(names):
        axis = x.ndim - len(OPERANDS[kind].axes) + OPERANDS[kind].axes.index("s")
        x = jax.lax.psum_scatter(x, of_queries, scatter_dimension=axis, tiled=True)
        names = tuple(name for name in names if name not in of_queries)
    return (jax.lax.psum(x, names) if names else x).astype(dtype)


def _own_head(head: jax.Array, kind: str, x: jax.Array) -> jax.Array:
    """Returns the one key head of an operand that this device reads."""
    return jax.lax.dynamic_slice_in_dim(x, head, 1, x.ndim - 2) if "k" in OPERANDS[kind].axes else x


def _among_heads(head: jax.Array, heads: int, kind: str, x: jax.Array) -> jax.Array:
    """Puts a result of one key head among all key heads; the others are 0."""
    if "k" not in OPERANDS[kind].axes:
        return x
    whole = jnp.zeros((*x.shape[:-2], heads, x.shape[-1]), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, x, head, x.ndim - 2)
