"""Kernels under sharded operands: XLA cannot cut an opaque call, so its lowering rule cuts it.

Auto mesh axes go through `custom_partitioning` with a Shardy rule, Explicit ones through `shard_map`; one device, or a
region that is manual already, calls the kernel directly. Rows are cut without communication. Rows that are themselves
cut exchange a few numbers each (`_collective`).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Entry = str | tuple[str, ...] | None
Spec = tuple[Entry, ...]
Shape = tuple[int, ...]
Names = tuple[str, ...]
# A result with the operands' axes; with some entries of each row; or with a number in place of it.
Result = Literal["row", "selected", "number"]


class Cut(NamedTuple):
    """How an axis is cut: over which axes of the mesh, and its extent before."""

    names: Names
    extent: int


Cuts = tuple[Cut, ...]


class Piece(NamedTuple):
    """One device's part: the operands' and outputs' cuts, and what computes it."""

    ins: Sequence[P]
    outs: Sequence[P]
    run: Callable[..., list[jax.Array]]


class Cuttable(Protocol):
    """An operation that can be computed in pieces."""

    def whole(self, *operands: jax.Array) -> list[jax.Array]:
        """All of it."""
        ...

    def piece(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Piece:
        """A part of it, for operands cut so on a mesh with axes of these sizes."""
        ...

    def shardy_rule(self, shapes: Sequence[Shape]) -> SdyShardingRule:
        """How cuts of one operand go with those of others."""
        ...

    def is_whole_in(self, pieces: Sequence[Shape]) -> bool:
        """Whether parts of operands, each cut in so many pieces along its axes, are a whole problem by themselves."""
        ...


@dataclasses.dataclass(frozen=True)
class RowOp:
    """A row operation to be cut: `whole` computes whole rows, `across` this device's part of cut ones.

    `across(cuts, inside, ...)` is told the cuts of each of `axes`, and where its part holds what the whole has.
    """

    axes: Shape
    results: Sequence[Result]
    whole: Callable[..., list[jax.Array]]
    across: Callable[..., list[jax.Array]]

    def piece(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Piece:
        """One device's part."""
        full, extents = common_spec(specs), jnp.broadcast_shapes(*shapes)
        ins = [broadcast_spec(full, shape) for shape in shapes]
        outs = [P(*self._of(result, full, None)) for result in self.results]
        cuts = tuple(Cut(mesh_axes(full[d]), extents[d]) for d in self.axes)
        return Piece(ins, outs, functools.partial(self._across, cuts) if names_of(cuts) else self.whole)

    def _of(self, result: Result, axes: Sequence[Any], selected: Any) -> list[Any]:
        """What a result has of what the operands' axes have, with `selected` for the axis that is selected from."""
        if result == "row":
            return list(axes)
        return [
            selected if d in self.axes else x for d, x in enumerate(axes) if result == "selected" or d not in self.axes
        ]

    def _across(self, cuts: Cuts, *shards: jax.Array) -> list[jax.Array]:
        shape = jnp.broadcast_shapes(*(shard.shape for shard in shards))
        return self.across(cuts, inside(cuts, self.axes, shape), *shards)

    def is_whole_in(self, pieces: Sequence[Shape]) -> bool:
        """Equal cuts between rows."""
        return len(set(pieces)) == 1 and all(pieces[0][d] == 1 for d in self.axes)

    def shardy_rule(self, shapes: Sequence[Shape]) -> SdyShardingRule:
        """One factor per axis, shared by all; an extent of 1 that broadcasts has its own, as has a selection."""
        full = jnp.broadcast_shapes(*shapes)
        operands = tuple(
            ArrayMapping(*(f"d{d}" if n == full[d] else f"one{i}_{d}" for d, n in enumerate(s)))
            for i, s in enumerate(shapes)
        )
        factors = [f"d{d}" for d in range(len(full))]
        results = tuple(ArrayMapping(*self._of(result, factors, "selected")) for result in self.results)
        return SdyShardingRule(operands, results)


def names_of(cuts: Cuts) -> Names:
    """The mesh axes of all cuts."""
    return tuple(name for cut in cuts for name in cut.names)


def inside(cuts: Cuts, axes: Shape, shape: Shape) -> jax.Array | None:
    """Where this device's part, of `shape`, holds what the whole has; None if everywhere.

    XLA cuts an axis that does not divide into equal parts, and what it fills the last ones up with is not said.
    """
    mask = None
    for axis, cut in zip(axes, cuts, strict=True):
        n = shape[axis]
        if cut.names and n * jax.lax.axis_size(cut.names) > cut.extent:
            at = jax.lax.axis_index(cut.names) * n + jnp.arange(n)
            exists = jnp.expand_dims(at < cut.extent, [d for d in range(len(shape)) if d != axis])
            mask = exists if mask is None else mask & exists
    return mask


def spec_of(aval: Any) -> Spec:
    """An abstract value's (or a shard description's) partition, one entry per axis."""
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (len(aval.shape) - len(spec))


def mesh_axes(entry: Entry) -> Names:
    """The mesh axes of one entry of a partition."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def common_spec(specs: Sequence[Spec]) -> Spec:
    """The partition that operands which broadcast against each other share: the first cut of each axis wins."""
    chosen: list[Entry] = []
    used: set[str] = set()
    for entries in zip(*specs, strict=True):
        entry = next((e for e in entries if mesh_axes(e) and used.isdisjoint(mesh_axes(e))), None)
        used.update(mesh_axes(entry))
        chosen.append(entry)
    return tuple(chosen)


def broadcast_spec(full: Sequence[Entry], shape: Shape) -> P:
    """The partition of an operand that broadcasts to what is cut so."""
    return P(*(None if n == 1 else entry for n, entry in zip(shape, full, strict=True)))


def mesh_of(avals: Sequence[Any]) -> AbstractMesh:
    """The mesh that types name; one without axes if none does, as of arrays on one device."""
    meshes = [aval.sharding.mesh for aval in avals]
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def cut_alike(*operands: jax.Array) -> Sequence[jax.Array]:
    """Operands that broadcast against each other, cut alike where their types say how."""
    avals = [jax.typeof(x) for x in operands]
    if not is_explicit(avals):
        return operands
    full = common_spec([spec_of(a) for a in avals])
    return [place(x, broadcast_spec(full, a.shape)) for x, a in zip(operands, avals, strict=True)]


def place(x: jax.Array, spec: P, mesh: AbstractMesh | None = None) -> jax.Array:
    """An array whose type names a mesh, cut so on it; another only if it is told by what `mesh`.

    Outside `jit` nothing but a context could say what devices that has. Lowering knows, and cuts the others too.
    """
    aval = jax.typeof(x)
    has_mesh = not aval.sharding.mesh.empty
    target = aval.sharding.mesh if has_mesh else mesh
    if target is None or (has_mesh and spec_of(aval) == tuple(spec)):
        return x
    return jax.reshard(x, NamedSharding(target, spec))


def unify_varying(*operands: jax.Array) -> list[jax.Array]:
    """Under `shard_map`'s checks the operands of a primitive must vary over the same mesh axes."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - v)), to="varying") if union - v else x
        for x, v in zip(operands, varying, strict=True)
    ]


def lower(ctx: mlir.LoweringRuleContext, op: Cuttable, *operands: Any) -> Any:
    """Lowers `op` in pieces, as the operands' shardings ask."""

    def pieces(*xs: jax.Array) -> list[jax.Array]:
        avals = [jax.typeof(x) for x in xs]
        if is_local(ctx):
            return op.whole(*xs)
        if is_explicit(avals):
            mesh = mesh_of(avals)
            ins, outs, run = op.piece([a.shape for a in avals], [spec_of(a) for a in avals], mesh.shape)
            cut = [place(x, spec, mesh) for x, spec in zip(xs, ins, strict=True)]
            return jax.shard_map(run, mesh=mesh, in_specs=tuple(ins), out_specs=list(outs), check_vma=False)(*cut)
        return _partitioned(op)(*xs)

    return lower_plain(pieces, _with_mesh(ctx), *operands)


def lower_plain(compute: Callable[..., Any], ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    """Lowers to what a function of arrays does."""
    avals: Sequence[Any] = ctx.avals_in
    with settings_for(*avals), on_mesh_of(avals):
        return mlir.lower_fun(lambda *xs: jax.tree.leaves(compute(*xs, **params)))(ctx, *operands)


@contextlib.contextmanager
def settings_for(*avals: Any) -> Iterator[None]:
    """JAX's settings for what we trace ourselves, which may be outside the caller's context: the operands decide.

    A caller's strictness is about the caller's own code, and kernels count in 32 bits.
    """
    with (
        jax.enable_x64(any(aval.dtype.itemsize == 8 for aval in avals)),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.check_tracer_leaks(False),
    ):
        yield


def on_mesh_of(avals: Sequence[Any]) -> Any:
    """A context for tracing that names the mesh of explicit axes that operands' types name, where the user's does not.

    Types alone would leave what is not computed of an operand, such as indices, to be cut by the compiler, in any way.
    """
    mesh = mesh_of(avals)
    if not is_explicit(avals) or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def is_explicit(avals: Sequence[Any]) -> bool:
    """Whether the operands' types say how they are cut."""
    return any(mesh_axes(entry) for aval in avals for entry in spec_of(aval))


def is_local(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether one device holds all of the operands, so that nothing is partitioned afterwards."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        return context.manual_axes == frozenset(context.mesh.axis_names)
    return getattr(context, "num_devices", None) == 1


def _partitioned(op: Cuttable) -> Any:
    @custom_partitioning
    def call(*operands: jax.Array) -> list[jax.Array]:
        return op.whole(*operands)

    def partition(mesh: Mesh | AbstractMesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
        if mesh.empty:
            return _partition_unnamed(op, mesh, args, results)
        ins, outs, run = op.piece([a.shape for a in args], [spec_of(a) for a in args], mesh.shape)

        def shard(*operands: jax.Array) -> list[jax.Array]:
            # Traced while compiling, in whatever mesh is ambient then; it must not see an Explicit one.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), settings_for(*operands):
                return run(*operands)

        named = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, shard, list(named(outs)), named(ins)

    call.def_partition(partition, sharding_rule=lambda mesh, args, _: op.shardy_rule([tuple(a.shape) for a in args]))
    return call


def _partition_unnamed(op: Cuttable, mesh: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    """Inside a partly manual region the Auto axes have no names: cuts into whole problems stay, others do not."""
    pieces = [tuple(n // m for n, m in zip(a.shape, a.sharding.shard_shape(a.shape), strict=True)) for a in args]
    stays = op.is_whole_in(pieces)
    whole = NamedSharding(Mesh(jax.devices()[:1], ("all",)), P())
    ins = tuple(a.sharding if stays else whole for a in args)
    outs = [r.sharding if stays else whole for r in results]
    return mesh, op.whole, outs, ins


def _with_mesh(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """Gives `custom_partitioning` the mesh it looks for at lowering, of which only shape and names matter.

    Without one it knows only shardings without names. Any mesh of the right size serves: the operands' own, the
    ambient one, or, for 2^n devices, one of n axes of 2, which can express every way to cut them.
    """
    module = ctx.module_context
    context = module.axis_context
    if not isinstance(context, mlir.ShardingContext) or context.num_devices == 1 or context.abstract_mesh is not None:
        return ctx
    count = context.num_devices
    avals: Sequence[Any] = ctx.avals_in
    known = [aval.sharding.mesh for aval in avals] + [jax.sharding.get_abstract_mesh()]
    mesh = next((m for m in known if not m.empty and m.size == count), None)
    if mesh is None and count & (count - 1) == 0:
        bits = count.bit_length() - 1
        mesh = AbstractMesh((2,) * bits, tuple(f"bit{i}" for i in range(bits)))
    devices = context.device_assignment or tuple((jax.devices() * count)[:count])
    context = dataclasses.replace(context, device_assignment=devices, abstract_mesh=mesh)
    return ctx.replace(module_context=module.replace(axis_context=context))
