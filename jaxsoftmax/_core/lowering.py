"""Lowering: to XLA on every platform, and on CUDA to a kernel where one takes the call.

The platform is known only here, so one traced function runs, exports and differentiates the same everywhere. XLA cannot
partition an opaque call, so the rule does: Auto mesh axes go through `custom_partitioning` with a Shardy rule, Explicit
ones through `shard_map`; one device, or a region that is manual already, calls the kernel directly.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core import checks
from jaxsoftmax._core.sharding import Partitionable, is_explicit, mesh_of, on_mesh_of, reshard, settings_for, spec_of
from pallas_kernels import hardware
from pallas_kernels.hardware import Device

_OTHER_PLATFORM = (
    "this computation is lowered for a platform other than cuda, where Mosaic GPU kernels do not exist. Pass "
    "implementation=None to use XLA there."
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call does on a device: the kernel's decision, the operands' layout, and extra work.

    Without a kernel it has only the reasons, `declined`.
    """

    declined: tuple[tuple[str, str], ...]
    decision: Any = None
    layout: Any = None
    notes: tuple[str, ...] = ()

    def required_by(self, named: str | None) -> "Plan":
        """Returns this plan, or raises for the function `named` if it asked for a kernel and there is none."""
        if named is not None and self.decision is None:
            reasons = "".join(f"\n  {kernel}: {why}" for kernel, why in self.declined)
            reasons = reasons or "\n  there is no kernel for this operation"
            raise checks.no_kernel(
                named,
                f"no kernel takes this call:{reasons}\nPass implementation=None to use XLA where no kernel does.",
            )
        return self

    def launch(self, *operands: jax.Array) -> Any:
        """Runs the kernel on operands that are laid out for it."""
        return _launch(*operands, decision=self.decision)


class Lowerable(Protocol):
    """A primitive's computation, by XLA or by kernels; `params` are the primitive's, without the implementation."""

    @property
    def has_kernel(self) -> bool:
        """Whether any kernel could take the call."""
        ...

    def name(self, **params: Any) -> str:
        """What errors call it."""
        ...

    def plan(self, avals: Sequence[Any], device: Device, named: str | None, **params: Any) -> Plan:
        """The plan of a call on operands of these types on a device."""
        ...

    def reference(self, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        """Lowers to plain XLA operations."""
        ...

    def by_kernel(self, ctx: mlir.LoweringRuleContext, named: str | None, **params: Any) -> Partitionable:
        """The call by a kernel, as an operation that can be partitioned."""
        ...


def register(primitive: Primitive, call: Lowerable) -> None:
    """Registers the lowerings of a primitive, for "cuda" because other platforms named "gpu" have no kernels."""
    mlir.register_lowering(primitive, functools.partial(reference_rule, call))
    if call.has_kernel:
        mlir.register_lowering(primitive, functools.partial(kernel_rule, call), platform="cuda")


def reference_rule(
    call: Lowerable, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
) -> Any:
    """Lowers to plain XLA operations."""
    if implementation == "mosaic_gpu" and call.has_kernel:
        raise checks.no_kernel(call.name(**params), _OTHER_PLATFORM)
    return call.reference(ctx, *operands, **params)


def kernel_rule(
    call: Lowerable, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
) -> Any:
    """Lowers to a kernel if one takes the call. Otherwise lowers to XLA, or raises if the user asked for a kernel."""
    named = call.name(**params) if implementation == "mosaic_gpu" else None
    if implementation != "xla":
        plan = call.plan(ctx.avals_in, hardware.current(), named, **params).required_by(named)
        if plan.decision is not None:
            return lower(ctx, call.by_kernel(ctx, named, **params), *operands)
    return call.reference(ctx, *operands, **params)


@functools.partial(jax.jit, static_argnames="decision")
def _launch(*operands: jax.Array, decision: Any) -> Any:
    """One jitted function for all calls, so that equal kernels within a program are compiled once."""
    with jax.named_scope(f"{decision.problem.op}.{decision.kernel}"):
        return decision.run(*operands)


def lower(ctx: mlir.LoweringRuleContext, op: Partitionable, *operands: Any) -> Any:
    """Lowers `op` shard by shard, by the operands' shardings."""

    def pieces(*xs: jax.Array) -> list[jax.Array]:
        avals = [jax.typeof(x) for x in xs]
        if is_local(ctx):
            return op.whole(*xs)
        if is_explicit(avals):
            mesh = mesh_of(avals)
            ins, outs, run = op.shard_problem([a.shape for a in avals], [spec_of(a) for a in avals], mesh.shape)
            sharded = [reshard(x, spec, mesh) for x, spec in zip(xs, ins, strict=True)]
            return jax.shard_map(run, mesh=mesh, in_specs=tuple(ins), out_specs=list(outs), check_vma=False)(*sharded)
        return _partitioned(op)(*xs)

    return lower_plain(pieces, _with_mesh(ctx), *operands)


def lower_plain(compute: Callable[..., Any], ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    """Lowers to a plain function of arrays."""
    avals: Sequence[Any] = ctx.avals_in
    with settings_for(*avals), on_mesh_of(avals):
        return mlir.lower_fun(lambda *xs: jax.tree.leaves(compute(*xs, **params)))(ctx, *operands)


def is_local(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether one device holds all operands, so that XLA partitions nothing afterwards."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        return context.manual_axes == frozenset(context.mesh.axis_names)
    return getattr(context, "num_devices", None) == 1


def _partitioned(op: Partitionable) -> Any:
    @custom_partitioning
    def call(*operands: jax.Array) -> list[jax.Array]:
        return op.whole(*operands)

    def partition(mesh: Mesh | AbstractMesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
        if mesh.empty:
            return _partition_unnamed(op, mesh, args, results)
        ins, outs, run = op.shard_problem([a.shape for a in args], [spec_of(a) for a in args], mesh.shape)

        def shard(*operands: jax.Array) -> list[jax.Array]:
            # Traced while compiling, in whatever mesh is ambient then; it must not see an Explicit one.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), settings_for(*operands):
                return run(*operands)

        named = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
        return mesh, shard, list(named(outs)), named(ins)

    call.def_partition(partition, sharding_rule=lambda mesh, args, _: op.shardy_rule([tuple(a.shape) for a in args]))
    return call


def _partition_unnamed(op: Partitionable, mesh: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    """Partitions where a partly manual region has Auto axes without names: only shards that are whole problems stay."""
    pieces = [tuple(n // m for n, m in zip(a.shape, a.sharding.shard_shape(a.shape), strict=True)) for a in args]
    stays = op.is_whole_in(pieces)
    whole = NamedSharding(Mesh(jax.devices()[:1], ("all",)), P())
    ins = tuple(a.sharding if stays else whole for a in args)
    outs = [r.sharding if stays else whole for r in results]
    return mesh, op.whole, outs, ins


def _with_mesh(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """Gives `custom_partitioning` the mesh that it looks for at lowering; only shape and names matter.

    Without one it knows only shardings without names. Any mesh of the right size serves: the operands' own, the
    ambient one, or, for 2^n devices, one of n axes of 2, which can express every sharding.
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
