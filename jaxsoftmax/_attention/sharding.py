"""Attention sharded over batch and heads: each device's part, and the gradients that devices add up.

The forward pass communicates nothing. The backward pass sums gradients of operands that devices share: of keys and
values that heads on several devices read, of a bias that is broadcast along a sharded axis, and of sinks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.sharding import PartitionSpec as P

from jaxsoftmax._attention.layout import KEY_HEADS, OPERANDS, QUERY_HEADS
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
from pallas_kernels.attention.operands import RANK


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a call is sharded: leading axes, the query's heads and the key's, and whether devices share a key head."""

    full: Shape
    lead: Spec
    heads: Entry
    key_heads: Entry
    shares: bool

    def spec(self, kind: str, shape: Shape, kept: Sequence[int] | None = None) -> P:
        """The sharding of an operand, or of a result that keeps only some of the leading axes."""
        rank = len(shape) - RANK[kind]
        lead = tuple(
            entry if shape[d] != 1 and (kept is None or d in kept) else None for d, entry in enumerate(self.lead)
        )
        core: list[Entry] = [None] * RANK[kind]
        if kind in QUERY_HEADS and shape[rank + QUERY_HEADS[kind]] != 1:
            core[QUERY_HEADS[kind]] = self.heads
        if kind in KEY_HEADS:
            core[KEY_HEADS[kind]] = self.key_heads
        return P(*lead, *core)


def layout(kinds: Sequence[str], shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Layout:
    """The sharding of a call from its operands': leading axes and heads stay sharded, other axes do not."""
    ranks = [len(shape) - RANK[kind] for kind, shape in zip(kinds, shapes, strict=True)]
    full = tuple(jnp.broadcast_shapes(*(shape[:rank] for shape, rank in zip(shapes, ranks, strict=True))))
    lead = common_spec([spec[:rank] for spec, rank in zip(specs, ranks, strict=True)])
    heads = specs[kinds.index("query")][-2]
    queries, keys = (shapes[kinds.index(name)][-2] for name in ("query", "key"))
    taken = {name for entry in lead for name in mesh_axes(entry)}
    if heads is None or not taken.isdisjoint(mesh_axes(heads)):
        return Layout(full, lead, None, None, False)
    parts = math.prod(sizes[name] for name in mesh_axes(heads))
    if keys % parts == 0:
        return Layout(full, lead, heads, heads, False)
    if queries % parts == 0 and (queries // keys) % (queries // parts) == 0:
        return Layout(full, lead, heads, None, True)
    return Layout(full, lead, None, None, False)


def layout_of(kinds: Sequence[str], avals: Sequence[Any]) -> Layout:
    """The sharding of a call on operands of these types."""
    return layout(kinds, [a.shape for a in avals], [spec_of(a) for a in avals], mesh_of(avals).shape)


def unify_shardings(kinds: Sequence[str], arrays: Sequence[jax.Array], *, in_parts: bool = True) -> list[jax.Array]:
    """Reshards arrays whose types have shardings to their `layout`, so that a gradient has its operand's type.

    Without `in_parts`, arrays whose types name no mesh are resharded too. Devices cannot share a key head then: heads
    that are sharded more finely than the key's are gathered.
    """
    avals = [jax.typeof(x) for x in arrays]
    if not is_explicit(avals):
        return list(arrays)
    sharded = layout_of(kinds, avals)
    if sharded.shares and not in_parts:
        sharded = dataclasses.replace(sharded, heads=None, shares=False)
    mesh = None if in_parts else mesh_of(avals)
    return [reshard(x, sharded.spec(kind, x.shape), mesh) for kind, x in zip(kinds, arrays, strict=True)]


@dataclasses.dataclass(frozen=True)
class Heads:
    """A part of an attention call to be sharded. `kept[i]`: the leading axes of result i, None for all of them."""

    kinds: tuple[str, ...]
    results: tuple[str, ...]
    kept: tuple[tuple[int, ...] | None, ...]
    result_shapes: tuple[Shape, ...]
    run: Callable[..., Any]

    def whole(self, *operands: jax.Array) -> list[jax.Array]:
        """Everything on one device."""
        return list(self.run(*operands))

    def shard_problem(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Shard:
        """One device's part."""
        sharded = layout(self.kinds, shapes, specs, sizes)
        ins = [sharded.spec(kind, shape) for kind, shape in zip(self.kinds, shapes, strict=True)]
        results = list(zip(self.results, self.result_shapes, self.kept, strict=True))
        outs = [sharded.spec(kind, shape, kept) for kind, shape, kept in results]
        heads = shapes[self.kinds.index("query")][-2], shapes[self.kinds.index("key")][-2]
        sums = [self._sums(sharded, *result) for result in results]
        return Shard(ins, outs, functools.partial(self._part, sharded, heads, sums))

    def _sums(self, sharded: Layout, kind: str, shape: Shape, kept: tuple[int, ...] | None) -> Names:
        """The mesh axes over which a result is to be added up."""
        if kept is None:
            return ()
        names = [name for d, entry in enumerate(sharded.lead) if d not in kept for name in mesh_axes(entry)]
        at = len(shape) - RANK[kind] + OPERANDS[kind].head_axis
        is_shared = sharded.shares if kind in KEY_HEADS else OPERANDS[kind].broadcasts and shape[at] == 1
        return (*names, *(mesh_axes(sharded.heads) if is_shared else ()))

    def _part(
        self, sharded: Layout, heads: tuple[int, int], sums: Sequence[Names], *operands: jax.Array
    ) -> list[jax.Array]:
        if sharded.shares:
            local = operands[self.kinds.index("query")].shape[-2]
            mine = jax.lax.axis_index(mesh_axes(sharded.heads)) * local // (heads[0] // heads[1])
            found = self.whole(*map(functools.partial(_own_head, mine), self.kinds, operands))
            found = list(map(functools.partial(_among_heads, mine, heads[1]), self.results, found))
        else:
            found = self.whole(*operands)
        return [jax.lax.psum(x, names) if names else x for x, names in zip(found, sums, strict=True)]

    def shardy_rule(self, shapes: Sequence[Shape]) -> SdyShardingRule:
        """A factor for each leading axis and one for the heads; other axes are not sharded."""
        lead = tuple(f"lead{d}" for d in range(len(shapes[0]) - RANK[self.kinds[0]]))
        same = shapes[self.kinds.index("query")][-2] == shapes[self.kinds.index("key")][-2]
        factors = Layout((), lead, "heads", "heads" if same else "key_heads", False).spec
        operands = map(factors, self.kinds, shapes)
        return sharding_rule(list(operands), list(map(factors, self.results, self.result_shapes, self.kept)))

    def is_whole_in(self, pieces: Sequence[Shape]) -> bool:
        """Whether only the leading axes are sharded, equally for all operands."""
        leads = {piece[: len(piece) - RANK[kind]] for kind, piece in zip(self.kinds, pieces, strict=True)}
        uncut = all(
            n == 1 for kind, piece in zip(self.kinds, pieces, strict=True) for n in piece[len(piece) - RANK[kind] :]
        )
        return len(leads) == 1 and uncut


def _own_head(head: jax.Array, kind: str, x: jax.Array) -> jax.Array:
    """The one key head of an operand that this device reads."""
    return jax.lax.dynamic_slice_in_dim(x, head, 1, x.ndim - 2) if kind in KEY_HEADS else x


def _among_heads(head: jax.Array, heads: int, kind: str, x: jax.Array) -> jax.Array:
    """Puts a result of one key head among all key heads; the others are 0."""
    if kind not in KEY_HEADS:
        return x
    whole = jnp.zeros((*x.shape[:-2], heads, x.shape[-1]), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(whole, x, head, x.ndim - 2)
