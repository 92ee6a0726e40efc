"""Named axes: an operation declares the axes of its operands and results, and its types and shardings follow.

A letter names an axis, so `"te"` are two. An axis has one extent and one sharding in all arrays that have it; an
operand that broadcasts along an axis has an extent of 1 there. A star stands before an axis that may be several:
`"*te"` of rank 4 is `t0, t1, t2, e`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core.sharding import (
    AxisSharding,
    Columns,
    Entry,
    Shape,
    Spec,
    common_spec,
    inside_of,
    is_explicit,
    mesh_axes,
    mesh_of,
    reshard,
    spec_of,
)

Axes = tuple[str, ...]
Entries = dict[str, Entry]  # the mesh axes of each named axis
# A result with the operands' axes, with k entries of each row, or with one number of each row.
Result = Literal["full", "top_k", "reduced"]


@functools.cache
def parse(text: str, several: int) -> Axes:
    """Returns the axes that `text` names; an axis after a star is `several`."""
    star, rest = (text[1], text[2:]) if text.startswith("*") else ("", text)
    return (*(f"{star}{i}" for i in range(several if star else 0)), *rest)


class Shard(NamedTuple):
    """One device's part of a problem: the operands' and results' shardings, and a function that computes it."""

    ins: Sequence[P]
    outs: Sequence[P]
    run: Callable[..., list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The axes of an operation's operands and results.

    Devices share the axes `sharded`: where two want one mesh axis, the first of them gets it. Shards along
    `independent` axes are problems of their own. A `groups` pair has one sharding where both have one extent.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    sharded: Axes
    independent: Axes = ()
    groups: tuple[tuple[str, str], ...] = ()

    def extents(self, shapes: Sequence[Shape]) -> dict[str, int]:
        """Returns the extent of each axis that operands have."""
        extents: dict[str, int] = {}
        for axes, shape in zip(self.operands, shapes, strict=True):
            extents |= {axis: n for axis, n in zip(axes, shape, strict=True) if extents.get(axis, 1) == 1}
        return extents

    def entries(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Entries:
        """Returns the mesh axes of each axis: those of the first operand that is sharded along it.

        The axes of a group stay sharded where each device has whole groups. `sizes` are those of the mesh axes.
        """
        of: list[Entries] = [dict(zip(*array, strict=True)) for array in zip(self.operands, specs, strict=True)]
        for first, second in self.groups:
            of = [x | {first: x.get(first) or x.get(second)} for x in of]
        chosen = common_spec([tuple(x.get(axis) for axis in self.sharded) for x in of])
        entries = dict(zip(self.sharded, chosen, strict=True))
        for first, second in self.groups:
            if self.extents(shapes)[second] % math.prod(sizes[name] for name in mesh_axes(entries[first])):
                entries[first] = None
            entries[second] = entries[first]
        return entries

    def specs_of(self, shapes: Sequence[Shape], entries: Mapping[str, Any]) -> list[P]:
        """Returns the operands' partitions; an extent of 1 that broadcasts is not sharded."""
        extents = self.extents(shapes)
        return [partition(*array, entries, extents) for array in zip(self.operands, shapes, strict=True)]

    def results_of(
        self, shapes: Sequence[Shape], entries: Mapping[str, Any], result_shapes: Sequence[Shape] | None = None
    ) -> list[P]:
        """Returns the results' partitions; a result whose shape is not given has the axes' whole extents."""
        if result_shapes is None:
            return [P(*(entries.get(axis) for axis in axes)) for axes in self.results]
        extents = self.extents(shapes)
        return [partition(*array, entries, extents) for array in zip(self.results, result_shapes, strict=True)]

    def rule(self, shapes: Sequence[Shape], result_shapes: Sequence[Shape] | None = None) -> SdyShardingRule:
        """Returns the Shardy rule: axes with the same factor are sharded together, other axes have their own."""
        extents = self.extents(shapes)
        factors = {axis: axis for axis in self.sharded}
        factors |= {second: first for first, second in self.groups if extents[first] == extents[second]}
        arrays = [*self.specs_of(shapes, factors), *self.results_of(shapes, factors, result_shapes)]
        mappings = [
            ArrayMapping(*(factor or f"own{i}_{d}" for d, factor in enumerate(array)))
            for i, array in enumerate(map(tuple, arrays))
        ]
        return SdyShardingRule(tuple(mappings[: len(shapes)]), tuple(mappings[len(shapes) :]))

    def is_whole_in(self, pieces: Sequence[Shape]) -> bool:
        """Whether each shard is a complete problem, if operands are split into so many pieces along their axes."""
        cuts: dict[str, int] = {}
        return all(
            cuts.setdefault(axis, n) == n and (n == 1 or axis in self.independent)
            for axes, piece in zip(self.operands, pieces, strict=True)
            for axis, n in zip(axes, piece, strict=True)
        )

    def entries_of(self, avals: Sequence[Any]) -> Entries:
        """Returns the mesh axes of each axis of operands of these types."""
        return self.entries([a.shape for a in avals], [spec_of(a) for a in avals], mesh_of(avals).shape)

    def types(self, avals: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Shape] | None = None) -> list[Any]:
        """Returns the types of results of these dtypes; without shapes they have the axes' whole extents.

        A result varies over the same mesh axes as the first operand.
        """
        of_operands = [a.shape for a in avals]
        extents, mesh = self.extents(of_operands), mesh_of(avals)
        shapes = shapes or [tuple(extents[axis] for axis in axes) for axes in self.results]
        specs = self.results_of(of_operands, self.entries_of(avals), shapes)
        return [
            avals[0].update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=NamedSharding(mesh, spec))
            for shape, spec, dtype in zip(shapes, specs, dtypes, strict=True)
        ]

    def unify(self, arrays: Sequence[jax.Array], *, everywhere: bool = False) -> list[jax.Array]:
        """Reshards arrays whose types have shardings, so that each axis has one sharding.

        An array whose type names no mesh is resharded too where its devices are known: in a program, `everywhere`.
        """
        avals = [jax.typeof(x) for x in arrays]
        if not is_explicit(avals):
            return list(arrays)
        specs = self.specs_of([a.shape for a in avals], self.entries_of(avals))
        mesh = mesh_of(avals) if everywhere else None
        return [reshard(x, spec, mesh) for x, spec in zip(arrays, specs, strict=True)]


def partition(axes: Axes, shape: Shape, entries: Mapping[str, Any], extents: Mapping[str, int]) -> P:
    """Returns an array's partition out of those of its axes; an extent of 1 that broadcasts is not sharded."""
    return P(*(entries.get(axis) if n == extents.get(axis, n) else None for axis, n in zip(axes, shape, strict=True)))


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A call that is computed shard by shard.

    `compute(shardings, *operands)` gets the sharding of each axis and one device's operands.
    """

    signature: Signature
    compute: Callable[..., Sequence[jax.Array]]
    result_shapes: tuple[Shape, ...] | None = None  # None: the axes' whole extents

    def whole(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes the whole problem on one device."""
        extents = self.signature.extents([x.shape for x in operands])
        return list(self.compute({axis: AxisSharding((), n) for axis, n in extents.items()}, *operands))

    def shard_problem(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Shard:
        """Returns one device's part, for operands with these partitions on a mesh with axes of these sizes."""
        entries, extents = self.signature.entries(shapes, specs, sizes), self.signature.extents(shapes)
        shardings = {axis: AxisSharding(mesh_axes(entries.get(axis)), n) for axis, n in extents.items()}
        run = lambda *operands: list(self.compute(shardings, *operands))
        outs = self.signature.results_of(shapes, entries, self.result_shapes)
        return Shard(self.signature.specs_of(shapes, entries), outs, run)

    def shardy_rule(self, shapes: Sequence[Shape]) -> SdyShardingRule:
        """Says which axes of operands and results are sharded together."""
        return self.signature.rule(shapes, self.result_shapes)


def over_rows(operands: int, rank: int, axes: Shape, results: Sequence[Result]) -> Signature:
    """Returns the signature of operands that broadcast to each other, whose `axes` are reduced or are those of rows."""
    every = tuple(f"axis{d}" for d in range(rank))
    kept = tuple(axis for d, axis in enumerate(every) if d not in axes)
    of: dict[Result, Axes] = {
        "full": every,
        "reduced": kept,
        "top_k": tuple("k" if d in axes else axis for d, axis in enumerate(every)),
    }
    return Signature((every,) * operands, tuple(of[result] for result in results), every, kept)


def sharded_rows(
    signature: Signature,
    axes: Shape,
    whole: Callable[..., Sequence[jax.Array]],
    across: Callable[..., Sequence[jax.Array]],
) -> Sharded:
    """Returns a call over rows: `whole` computes whole rows, `across(columns, ...)` a device's part of sharded ones."""

    def compute(shardings: Mapping[str, AxisSharding], *shards: jax.Array) -> Sequence[jax.Array]:
        of_rows = tuple(shardings[f"axis{d}"] for d in axes)
        columns = Columns(of_rows, None)
        if not columns.names:
            return whole(*shards)
        shape = jnp.broadcast_shapes(*(shard.shape for shard in shards))
        return across(columns._replace(inside=inside_of(of_rows, axes, shape)), *shards)

    return Sharded(signature, compute)
