"""How primitives are lowered: to XLA on every platform, and on CUDA to a kernel where one takes the call.

The platform is known only there, so one traced function runs, exports and differentiates the same everywhere. XLA
cannot partition an opaque call, so the rule does: Auto mesh axes go through `custom_partitioning` with a Shardy rule,
Explicit ones through `shard_map`; one device, or a region that is manual already, calls the kernel directly.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core import checks, recorder
from jaxsoftmax._core.axes import Sharded
from jaxsoftmax._core.sharding import is_explicit, mesh_of, on_mesh_of, reshard, settings_for, spec_of
from pallas_kernels import hardware
from pallas_kernels.hardware import Device

_OTHER_PLATFORM = (
    "this computation is lowered for a platform other than cuda, where Mosaic GPU kernels do not exist. Pass "
    "implementation=None to use XLA there."
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Says what a call does on a device: the kernel's decision, the operands' layout, and extra work.

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


class Lowerable(Protocol):
    """A primitive's computation, by XLA or by kernels; `params` are the primitive's, without the implementation."""

    @property
    def has_kernel(self) -> bool:
        """Whether any kernel could take the call."""
        ...

    def name(self, **params: Any) -> str:
        """The name that errors give it."""
        ...

    def plan(self, avals: Sequence[Any], device: Device, named: str | None, **params: Any) -> Plan:
        """The plan of a call on operands of these types on a device."""
        ...

    def reference(self, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        """Lowers to plain XLA operations."""
        ...

    def on_one_device(self, named: str | None, plan: Plan | None, **params: Any) -> Callable[..., Any]:
        """A function of one device's operands that runs the plan; without one the function makes its own."""
        ...

    def sharded(self, ctx: mlir.LoweringRuleContext, named: str | None, **params: Any) -> Sharded:
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
    by_xla = functools.partial(call.reference, ctx, *operands, **params)
    return recorded(ctx, None, None, by_xla, *operands, **params) if recorder.is_open() else by_xla()


def kernel_rule(
    call: Lowerable, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
) -> Any:
    """Lowers to a kernel if one takes the call. Otherwise lowers to XLA, or raises if the user asked for a kernel."""
    named = call.name(**params) if implementation == "mosaic_gpu" else None
    plan = None if implementation == "xla" else call.plan(ctx.avals_in, hardware.current(), named, **params)
    by_xla = functools.partial(call.reference, ctx, *operands, **params)
    if recorder.is_open():
        return recorded(ctx, plan, named, by_xla, *operands, **params)
    if plan is None or plan.required_by(named).decision is None:
        return by_xla()
    if is_local(ctx) and not is_explicit(ctx.avals_in):
        return lower_plain(call.on_one_device(named, plan, **params), ctx, *operands)
    return lower(ctx, call.sharded(ctx, named, **params), *operands)


def recorded(
    ctx: mlir.LoweringRuleContext,
    plan: "Plan | None",
    named: str | None,
    by_xla: Callable[[], Any],
    *operands: Any,
    **params: Any,
) -> Any:
    """Records the plan of a call. Lowers to XLA where that is what runs, and to zeros in the place of a kernel."""
    with recorder.entered(plan, named, ctx.avals_in, params):
        if plan is None or (plan.decision is None and named is None):
            return by_xla()
        avals: Sequence[Any] = ctx.avals_out
        return mlir.lower_fun(lambda *_: [jnp.zeros(a.shape, a.dtype) for a in avals])(ctx, *operands)


@functools.partial(jax.jit, static_argnames="decision")
def launch_kernel(*operands: jax.Array, decision: Any) -> Any:
    """Runs a kernel on operands that are laid out for it; equal kernels within a program are compiled once."""
    with jax.named_scope(f"{decision.problem.op}.{decision.kernel}"):
        return decision.run(*operands)


def lower(ctx: mlir.LoweringRuleContext, op: Sharded, *operands: Any) -> Any:
    """Lowers `op` shard by shard, by the operands' shardings."""

    def pieces(*xs: jax.Array) -> Any:
        # On a mesh of one device too: what computes a whole problem may mix axes whose types are sharded.
        if is_explicit([jax.typeof(x) for x in xs]):
            out = run_shards(op, *xs)
        else:
            out = op.whole(*xs) if is_local(ctx) else _partitioned(op)(*xs)
        return out if _has_many(ctx) else out[0]

    return lower_plain(pieces, _with_mesh(ctx), *operands)


def _has_many(ctx: mlir.LoweringRuleContext) -> bool:
    return ctx.primitive is None or ctx.primitive.multiple_results


def run_shards(op: Sharded, *operands: jax.Array) -> list[jax.Array]:
    """Runs `op` shard by shard on operands that have explicit shardings."""
    avals = [jax.typeof(x) for x in operands]
    mesh = mesh_of(avals)
    ins, outs, run = op.shard_problem([a.shape for a in avals], [spec_of(a) for a in avals], mesh.shape)
    sharded = [reshard(x, spec, mesh) for x, spec in zip(operands, ins, strict=True)]
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(ins), out_specs=list(outs), check_vma=False)(*sharded)


def lower_plain(compute: Callable[..., Any], ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    """Lowers to a plain function of arrays, whose result is one array or a sequence as the primitive's is."""
    avals: Sequence[Any] = ctx.avals_in
    with settings_for(*avals), on_mesh_of(avals):
        return mlir.lower_fun(compute, _has_many(ctx))(ctx, *operands, **params)


def is_local(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether one device holds all operands, so that XLA partitions nothing afterwards."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        return context.manual_axes == frozenset(context.mesh.axis_names)
    return getattr(context, "num_devices", None) == 1


def _partitioned(op: Sharded) -> Any:
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


def _partition_unnamed(op: Sharded, mesh: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    """Partitions where a partly manual region has Auto axes without names: only shards that are whole problems stay."""
    pieces = [tuple(n // m for n, m in zip(a.shape, a.sharding.shard_shape(a.shape), strict=True)) for a in args]
    stays = op.signature.is_whole_in(pieces)
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
