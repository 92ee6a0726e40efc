"""All primitives share this: rules for types and vmap, derivatives of higher order, and lowering.

A primitive is lowered to XLA on every platform, and on CUDA to a kernel where one takes the call. The platform is known
only there, so one traced function runs, exports and differentiates the same everywhere. XLA cannot partition an opaque
call, so the rule does: Auto mesh axes go through `custom_partitioning` with a Shardy rule, Explicit ones through
`shard_map`; one device, or a region that is manual already, calls the kernel directly.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import jet
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.extend.core.primitives import cond_p, name_p, scan_p
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core import checks, recorder
from jaxsoftmax._core.sharding import (
    Partitionable,
    Result,
    common_spec,
    is_explicit,
    mesh_of,
    on_mesh_of,
    reshard,
    settings_for,
    spec_of,
    unify_varying,
)
from pallas_kernels import hardware
from pallas_kernels.hardware import Device
from pallas_kernels.softmax import reference
from pallas_kernels.types import accumulator_dtype

Results = Callable[..., Sequence[Result]]

PRIMITIVES: list[Primitive] = [reference.BELOW]  # all of them

# Parameters that say how a primitive is lowered; references do not take them.
_LOWERING = ("implementation", "batch_invariant")


def define(
    primitive: Primitive,
    avals: Callable[..., Any],
    batch: Callable[..., Any],
    *,
    many: bool = True,
    states: Collection[int] = (),
) -> None:
    """Registers a primitive's rules for types, vmap, Taylor series and eager evaluation, which compiles it.

    `states` are the numbers of results, if it gives them, that are states of rows, which no caller sees as they are.
    """
    primitive.multiple_results = many
    primitive.def_abstract_eval(avals)
    primitive.def_impl(functools.partial(_evaluate, primitive, states))
    batching.fancy_primitive_batchers[primitive] = batch
    jet.jet_rules[primitive] = functools.partial(_taylor, primitive)
    PRIMITIVES.append(primitive)


def _evaluate(primitive: Primitive, states: Collection[int], *operands: jax.Array, **params: Any) -> Any:
    """Compiles and runs a primitive; `jax_debug_infs` does not see the states of rows: -inf in an empty one."""
    if not jax.config.jax_debug_infs:
        return xla.apply_primitive(primitive, *operands, **params)
    with jax.debug_infs(False):
        out = xla.apply_primitive(primitive, *operands, **params)
        results = [x for i, x in enumerate(out if primitive.multiple_results else [out]) if i not in states]
        if any(jnp.isinf(x).any() for x in results):
            raise FloatingPointError(f"invalid value (inf) encountered in {primitive.name}")
    return out


def _taylor(
    primitive: Primitive, primals: Sequence[jax.Array], series: Sequence[Sequence[jax.Array]], **params: Any
) -> tuple[Any, Any]:
    """Returns the rule for `jax.experimental.jet`: the derivatives along a curve, by JVPs of JVPs, over factorials."""
    moving = [jnp.issubdtype(x.dtype, jnp.floating) for x in primals]
    order = max(map(len, series))

    def on_curve(t: jax.Array) -> list[Any]:
        def at(x: jax.Array, terms: Sequence[jax.Array]) -> jax.Array:
            return x + functools.reduce(lambda after, term: (term + after) * t.astype(x.dtype), terms[::-1], 0)

        out = primitive.bind(
            *(at(x, s) if moves else x for x, s, moves in zip(primals, series, moving, strict=True)), **params
        )
        return [out if primitive.multiple_results else [out]]

    def one_more(derivatives: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def with_next(t: jax.Array) -> list[Any]:
            known, slopes = jax.jvp(derivatives, (t,), (jnp.ones_like(t),))
            return [known[0], *slopes]

        return with_next

    start = jnp.zeros((), jnp.result_type(jnp.float32, *itertools.compress([x.dtype for x in primals], moving)))
    derivatives = functools.reduce(lambda f, _: one_more(f), range(order), on_curve)
    with settings_for(*primals):
        out, *slopes = derivatives(start)
    terms = [
        [jnp.zeros_like(y) if s.dtype == jax.dtypes.float0 else s / math.factorial(k) for k, s in enumerate(of, 1)]
        for y, *of in zip(out, *slopes, strict=True)
    ]
    return (out, terms) if primitive.multiple_results else (out[0], terms[0])


# JAX has none for `lax.cond`, `lax.scan` and the names that `jax.checkpoint` saves by, all of which derivatives have.
for _missing in (reference.BELOW, cond_p, scan_p):
    jet.jet_rules.setdefault(_missing, functools.partial(_taylor, _missing))
jet.jet_rules.setdefault(name_p, lambda primals, series, **params: (name_p.bind(*primals, **params), *series))


def checked(x: jax.Array) -> jax.Array:
    """Returns a result in whose place `jax.experimental.checkify` finds a NaN.

    It looks at results of JAX's own operations alone, and has no table in which others could be entered. While a
    function is traced, 0 is subtracted from the result: XLA removes that, it keeps -0, and its derivative has no
    residual.
    """
    return x - 0 if isinstance(x, Tracer) else x


def saved(x: jax.Array, is_empty: jax.Array, number: float) -> jax.Array:
    """Gives empty rows a finite number, among the numbers that a derivative saves, under `jax_debug_infs`.

    The results of a program that is differentiated include all that it saves, and JAX looks for an infinity in them.
    """
    return jnp.where(is_empty, jnp.asarray(number, x.dtype), x) if jax.config.jax_debug_infs else x


def typed(like: Any, mesh: Any, shape: Sequence[Any], spec: Iterable[Any], dtype: Any) -> Any:
    """Returns the type of a result, which varies over the same mesh axes as the operand `like`."""
    sharding = NamedSharding(mesh, P(*spec))
    return like.update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def aligned(operands: Sequence[jax.Array], dims: Sequence[int | None], at: int) -> list[jax.Array]:
    """Moves the mapped axis of all operands to `at`; operands that are not mapped get an extent of 1 there."""
    return unify_varying(
        *(jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at) for x, d in zip(operands, dims, strict=True))
    )


def batch_leading(
    primitive: Primitive,
    ranks: Callable[..., Sequence[int]],
    _: Any,
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Any, Any]:
    """The rule for vmap of a primitive whose operands have any number of axes before those that `ranks` counts.

    It adds a leading axis, in place for the first operand if that is mapped, and of extent 1 for what is not mapped.
    """
    if all(d is None for d in dims):
        out = primitive.bind(*unify_varying(*operands), **params)
        return out, [None] * len(out)
    mapped = zip(operands, dims, ranks(**params), strict=True)
    at = next((d for x, d, rank in mapped if d is not None and d < x.ndim - rank), 0)
    if "kept" in params:
        params["kept"] = tuple((*(d + (d >= at) for d in axes), at) for axes in params["kept"])
    out = primitive.bind(*aligned(operands, dims, at), **params)
    return out, [at] * len(out)


def zeros(out: Any) -> Any:
    """Makes zero tangents for outputs."""
    return jax.tree.map(lambda y: ad.Zero(jax.typeof(y).to_tangent_aval()), out)


def higher_jvp(
    primitive: Primitive,
    plain: Callable[..., Any],
    linear: int,
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    """Returns the JVP of a primitive, as that of its plain function.

    It is linear in the last `linear` operands: if only those have tangents, the primitive is its own derivative.
    """
    out = primitive.bind(*primals, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not moving:
        return out, zeros(out)
    first = len(primals) - linear
    if moving[0] >= first:
        moved = map(ad.instantiate_zeros, tangents[first:])
        return out, primitive.bind(*unify_varying(*primals[:first], *moved), **params)
    static = tuple((name, value) for name, value in params.items() if name not in _LOWERING)
    specs = tuple(P(*spec_of(jax.typeof(x))) for x in jax.tree.leaves(out))

    def compute(*moved: jax.Array) -> Any:
        operands = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return _by_plain(*operands.values(), plain=plain, params=static, specs=specs)

    return out, jax.jvp(compute, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


@functools.partial(jax.jit, static_argnames=("plain", "params", "specs"))
def _by_plain(*operands: jax.Array, plain: Callable[..., Any], params: Any, specs: Sequence[P]) -> Any:
    """Runs a plain function as one program, whose results are sharded by `specs`.

    Eagerly, only operations on an array's own mesh know its devices.
    """
    with settings_for(*operands), on_mesh_of([jax.typeof(x) for x in operands]):
        results, form = jax.tree.flatten(plain(*operands, **dict(params)))
        return form.unflatten(reshard(x, spec) for x, spec in zip(results, specs, strict=True))


def define_over_rows(primitive: Primitive, results: Results, **how: Any) -> None:
    """Registers the rules of a primitive over rows; `results` says which of the operands' axes each result has."""
    avals, batch = (functools.partial(rule, primitive, results) for rule in (_row_avals, _batch_rows))
    define(primitive, avals, batch, **how)


def _row_avals(primitive: Primitive, results: Results, *operands: Any, axes: tuple[int, ...], **params: Any) -> Any:
    """Returns the types of the outputs: the operands' common shape, or one number a row in the dtype of accumulation.

    Weak types, and the mesh axes over which a result varies, are those of the first operand.
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    spec, mesh = common_spec([spec_of(x) for x in operands]), mesh_of(operands)
    row = operands[0].update(shape=shape, sharding=NamedSharding(mesh, P(*spec)))
    kept = [d for d in range(len(shape)) if d not in axes]
    kept_shape, kept_spec = (tuple(full[d] for d in kept) for full in (shape, spec))
    number = typed(row, mesh, kept_shape, kept_spec, accumulator_dtype(row.dtype))
    avals = [row if result == "full" else number for result in results(**params)]
    return avals if primitive.multiple_results else avals[0]


def _batch_rows(
    primitive: Primitive,
    results: Results,
    _: Any,
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    axes: tuple[int, ...],
    **params: Any,
) -> tuple[Any, Any]:
    """Maps the axis of the first mapped operand; data moves only if another operand is mapped along another axis."""
    at = next((d for d in dims if d is not None), None)
    if at is None:
        out = primitive.bind(*operands, axes=axes, **params)
        return out, [None] * len(out) if primitive.multiple_results else None
    axes = tuple(a + (a >= at) for a in axes)
    out = primitive.bind(*aligned(operands, dims, at), axes=axes, **params)
    below = at - sum(a < at for a in axes)
    ats = [at if result == "full" else below for result in results(**params)]
    return out, ats if primitive.multiple_results else at


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
        """The name that errors give it."""
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
    if plan is not None and plan.required_by(named).decision is not None:
        return lower(ctx, call.by_kernel(ctx, named, **params), *operands)
    return by_xla()


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
def _launch(*operands: jax.Array, decision: Any) -> Any:
    """One jitted function for all calls, so that equal kernels within a program are compiled once."""
    with jax.named_scope(f"{decision.problem.op}.{decision.kernel}"):
        return decision.run(*operands)


def lower(ctx: mlir.LoweringRuleContext, op: Partitionable, *operands: Any) -> Any:
    """Lowers `op` shard by shard, by the operands' shardings."""

    def pieces(*xs: jax.Array) -> list[jax.Array]:
        # On a mesh of one device too: what computes a whole problem may mix axes whose types are sharded.
        if is_explicit([jax.typeof(x) for x in xs]):
            return run_shards(op, *xs)
        return op.whole(*xs) if is_local(ctx) else _partitioned(op)(*xs)

    return lower_plain(pieces, _with_mesh(ctx), *operands)


def run_shards(op: Partitionable, *operands: jax.Array) -> list[jax.Array]:
    """Runs `op` shard by shard on operands that have explicit shardings."""
    avals = [jax.typeof(x) for x in operands]
    mesh = mesh_of(avals)
    ins, outs, run = op.shard_problem([a.shape for a in avals], [spec_of(a) for a in avals], mesh.shape)
    sharded = [reshard(x, spec, mesh) for x, spec in zip(operands, ins, strict=True)]
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(ins), out_specs=list(outs), check_vma=False)(*sharded)


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
