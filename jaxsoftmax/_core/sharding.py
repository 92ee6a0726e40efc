"""Shardings: reads them from types, reshards operands, and defines what `lowering` asks of a sharded operation.

Rows are sharded without communication. Rows that are themselves sharded exchange a few numbers each (`all_gather`).
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Entry = str | tuple[str, ...] | None
Spec = tuple[Entry, ...]
Shape = tuple[int, ...]
Names = tuple[str, ...]


class AxisSharding(NamedTuple):
    """The mesh axes over which an axis is sharded, and its extent before it was."""

    names: Names
    extent: int


class Columns(NamedTuple):
    """One device's columns of sharded rows: how each of the rows' axes is sharded, and what is not padding."""

    shardings: tuple[AxisSharding, ...]
    inside: jax.Array | None  # None: all of them

    @property
    def names(self) -> Names:
        """The mesh axes of all shardings."""
        return tuple(name for sharding in self.shardings for name in sharding.names)

    def within(self, where: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The mask of the columns that count, if there is one, for columns under a mask if there is one."""
        if self.inside is None:
            return where
        return (where[0] & self.inside,) if where else (self.inside,)


def inside_of(shardings: Sequence[AxisSharding], axes: Sequence[int], shape: Shape) -> jax.Array | None:
    """Which elements of this device's part, of `shape`, are not padding; None for all of them.

    XLA pads an axis that does not divide into equal parts, with undefined values.
    """
    mask = None
    for axis, sharding in zip(axes, shardings, strict=True):
        n = shape[axis]
        if sharding.names and n * jax.lax.axis_size(sharding.names) > sharding.extent:
            at = jax.lax.axis_index(sharding.names) * n + jnp.arange(n)
            exists = jnp.expand_dims(at < sharding.extent, [d for d in range(len(shape)) if d != axis])
            mask = exists if mask is None else mask & exists
    return mask


def all_gather(names: Names, *parts: jax.Array) -> list[jax.Array]:
    """Returns the parts of all devices, stacked in front, by one collective of their bits."""
    words = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in parts]
    ends = list(itertools.accumulate(word.size for word in words))
    mine = jnp.concatenate([word.ravel() for word in words])
    everyone = jnp.split(jax.lax.all_gather(mine, names), ends[:-1], -1)
    return [
        jax.lax.bitcast_convert_type(all_words.reshape(-1, *word.shape), part.dtype)
        for all_words, word, part in zip(everyone, words, parts, strict=True)
    ]


def spec_of(aval: Any) -> Spec:
    """Returns an abstract value's (or a shard description's) partition, one entry per axis."""
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (len(aval.shape) - len(spec))


def mesh_axes(entry: Entry) -> Names:
    """Returns the mesh axes of one entry of a partition."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def common_spec(specs: Sequence[Spec]) -> Spec:
    """Finds the partition of operands that broadcast to each other: the first sharding of each axis wins."""
    chosen: list[Entry] = []
    used: set[str] = set()
    for entries in zip(*specs, strict=True):
        entry = next((e for e in entries if mesh_axes(e) and used.isdisjoint(mesh_axes(e))), None)
        used.update(mesh_axes(entry))
        chosen.append(entry)
    return tuple(chosen)


def broadcast_spec(full: Sequence[Entry], shape: Shape) -> P:
    """Returns the partition of an operand that broadcasts to an array with the partition `full`."""
    return P(*(None if n == 1 else entry for n, entry in zip(shape, full, strict=True)))


def mesh_of(avals: Sequence[Any]) -> AbstractMesh:
    """The mesh that the types name, or a mesh without axes if none does, as for arrays on one device."""
    meshes = [aval.sharding.mesh for aval in avals]
    if len({tuple(mesh.shape.items()) for mesh in meshes if AxisType.Explicit in mesh.axis_types}) > 1:
        raise ValueError(f"operands are on different meshes of explicit axes: {meshes}")
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def unify_shardings(
    *operands: jax.Array, axes: Sequence[Sequence[int]] | None = None, everywhere: bool = False
) -> Sequence[jax.Array]:
    """Reshards operands that broadcast against each other to one sharding, where their types have shardings.

    `axes` says which axes of the whole each has, if some lack some. Operands whose types name no mesh are resharded too
    where the devices are known: in a program, `everywhere`, and where a context sets a mesh.
    """
    avals = [jax.typeof(x) for x in operands]
    mesh = mesh_of(avals)
    if not is_explicit(avals):
        return operands
    axes = axes or [range(len(a.shape)) for a in avals]
    entries = [dict(zip(has, spec_of(a), strict=True)) for has, a in zip(axes, avals, strict=True)]
    rank = 1 + max((d for has in axes for d in has), default=-1)
    full = common_spec([tuple(of.get(d) for d in range(rank)) for of in entries])
    specs = [broadcast_spec([full[d] for d in has], a.shape) for has, a in zip(axes, avals, strict=True)]
    known = everywhere or not jax.sharding.get_abstract_mesh().empty
    return [reshard(x, spec, mesh if known else None) for x, spec in zip(operands, specs, strict=True)]


def broadcast_to(x: jax.Array, shape: Shape) -> jax.Array:
    """`jnp.broadcast_to`, which has no derivative where an extent of 1 is sharded, over a mesh axis of extent 1."""
    return jnp.broadcast_to(unify_shardings(x)[0], shape)


def reshard(x: jax.Array, spec: P, mesh: AbstractMesh | None = None) -> jax.Array:
    """Reshards an array on the mesh that its type names; an array without one only if `mesh` is given.

    Outside `jit` only a context could say which devices that mesh has. Lowering knows them, and reshards the others.
    """
    aval = jax.typeof(x)
    has_mesh = not aval.sharding.mesh.empty
    target = aval.sharding.mesh if has_mesh else mesh
    if target is None or (has_mesh and spec_of(aval) == tuple(spec)):
        return x
    return jax.reshard(x, NamedSharding(target, spec))


def unify_varying(*operands: jax.Array) -> list[jax.Array]:
    """Makes operands vary over the same mesh axes, which `shard_map` checks of a primitive's operands."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - v)), to="varying") if union - v else x
        for x, v in zip(operands, varying, strict=True)
    ]


@contextlib.contextmanager
def settings_for(*avals: Any) -> Iterator[None]:
    """JAX's settings for our own tracing, which may happen outside the caller's context: x64 follows from the operands.

    The caller's strict checks are off, because they are meant for the caller's own code, and kernels count in 32 bits.
    """
    with (
        jax.enable_x64(any(aval.dtype.itemsize == 8 for aval in avals)),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.check_tracer_leaks(False),
    ):
        yield


def on_mesh_of(avals: Sequence[Any]) -> Any:
    """A context for tracing that sets the mesh of explicit axes from the operands' types, if the user has set none.

    Without it the compiler would choose the sharding of arrays that do not depend on an operand, such as indices.
    """
    mesh = mesh_of(avals)
    if not is_explicit(avals) or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def is_explicit(avals: Sequence[Any]) -> bool:
    """Whether the operands' types have explicit shardings."""
    return any(mesh_axes(entry) for aval in avals for entry in spec_of(aval))
