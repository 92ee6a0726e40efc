"""The primitives of the row operations, and their rules for JAX's transformations.

A primitive reduces `axes` of operands that broadcast against each other, so that vmap at any position only renumbers
axes, and leaves an operand that is not mapped with an extent of 1. The derivative of softmax and of log_softmax is a
linear primitive: its JVP rule is the forward half of a custom_vjp and its transposition the backward half, and with
both there is forward mode and every higher order too.

A `Computation` says how a primitive is lowered: its reference, its kernel, and its form for sharded rows. Other topics
implement their own primitives by the same row operations.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core import checks
from jaxsoftmax._core.lowering import Plan, lower_plain, register
from jaxsoftmax._core.primitives import aligned, define, higher_jvp, typed, zeros
from jaxsoftmax._core.sharding import (
    AxisShardings,
    Result,
    RowOp,
    common_spec,
    mesh_of,
    spec_of,
    unify_shardings,
    unify_varying,
)
from jaxsoftmax._softmax import layout
from jaxsoftmax._softmax import sharding as row_sharding
from pallas_kernels import hardware
from pallas_kernels.hardware import Device
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import RULES, TRANSPOSE, Op

SAVED_NAME = "softmax_out"

Results = Callable[..., Sequence[Result]]
KernelArgs = tuple[Sequence[Any], dict[str, Any]]

BY_OP: dict[Op, Primitive] = {}  # the primitives that are a row operation, or a loss computed from one
COMPUTATIONS: dict[Primitive, "Computation"] = {}

REFERENCE: dict[Op, Callable[..., Any]] = {op: getattr(reference, op.value) for op in Op}


_SHARDED_ROWS = (
    "the rows are sharded along the axis that is reduced, where a kernel finds their statistics and XLA computes the "
    "result from these. Pass implementation=None, or shard another axis."
)


def bind(op: Op, *operands: jax.Array, **params: Any) -> Any:
    """Applies an operation's primitive to `axes`, by an `implementation`, with the operation's own parameters."""
    return BY_OP[op].bind(*unify_varying(*unify_shardings(*operands)), **params)


def _as_given(operands: Sequence[Any], **row: Any) -> KernelArgs:
    return operands, row


@dataclasses.dataclass(frozen=True)
class Computation:
    """How a primitive is computed by row operations; `rows(op, *operands, **row)` runs one.

    `plain(...)` does it in `jax.numpy`, `whole(rows, ...)` for whole rows, and `across(shardings, inside, rows, ...)`
    for this device's part of sharded ones. A kernel takes the call if it takes `op` with the `kernel_args`; `results`
    says what the primitive's results have of the operands' axes. Errors name the public function that is `called`, or
    the `function` among a primitive's parameters.
    """

    op: Op
    called: str
    results: Callable[..., Sequence[Result]]
    plain: Callable[..., Any]
    whole: Callable[..., Any]
    across: Callable[..., Any]
    kernel_args: Callable[..., KernelArgs] = _as_given
    has_kernel: bool = True

    def name(self, function: str | None = None, **_: Any) -> str:
        return function or self.called

    def plan(self, avals: Sequence[Any], device: Device, named: str | None, **params: Any) -> Plan:
        """What a call on operands of these types will do on a device."""
        operands, row = self.kernel_args(avals, **_of_row(params))
        return _plan(self.op, operands, device, named, batch_invariant=params.get("batch_invariant", False), **row)

    def reference(self, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        """Lowers to plain XLA operations."""
        return lower_plain(self.plain, ctx, *operands, **_of_row(params))

    def by_kernel(self, ctx: mlir.LoweringRuleContext, named: str | None, **params: Any) -> RowOp:
        """The call by kernels, on whole rows or on the parts of sharded rows."""
        rows = functools.partial(run, named, params.get("batch_invariant", False))
        params = _of_row(params)
        results = self.results(**params)

        def whole(*xs: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(self.whole(rows, *xs, **params))

        def across(shardings: AxisShardings, inside: jax.Array | None, *shards: jax.Array) -> list[jax.Array]:
            if named and "full" in results:
                raise checks.no_kernel(named, _SHARDED_ROWS)
            return jax.tree.leaves(self.across(shardings, inside, rows, *shards, **params))

        return RowOp(params["axes"], results, whole, across)


def _of_row(params: dict[str, Any]) -> dict[str, Any]:
    """A primitive's parameters without those that say how it is lowered."""
    return {name: value for name, value in params.items() if name not in ("batch_invariant", "function")}


def by_reference(op: Op, *operands: jax.Array, **row: Any) -> Any:
    """A row operation in `jax.numpy`."""
    return REFERENCE[op](*operands, **row)


def run(named: str | None, batch_invariant: bool, op: Op, *operands: jax.Array, **row: Any) -> Any:
    """Runs a kernel on whole operands of one device; the reference, where none takes this shard of the call."""
    chosen = _plan(op, operands, hardware.current(), named, batch_invariant=batch_invariant, **row).required_by(named)
    return by_reference(op, *operands, **row) if chosen.decision is None else layout.launch(chosen, *operands)


def _plan(op: Op, operands: Sequence[Any], device: Device, named: str | None, **row: Any) -> Plan:
    shapes, dtype = [x.shape for x in operands], operands[0].dtype
    return layout.plan(op, shapes, dtype, device, may_transpose=named is not None, **row)


def implement(name: str, computation: Computation, *, many: bool) -> Primitive:
    """Makes a primitive over rows, with all rules but derivatives."""
    primitive = Primitive(name)
    COMPUTATIONS[primitive] = computation
    define_over_rows(primitive, computation.results, many=many)
    register(primitive, computation)
    return primitive


def define_over_rows(primitive: Primitive, results: Results, *, many: bool) -> None:
    """Registers the rules of a primitive over rows; `results` says which of the operands' axes each result has."""
    avals, batch = (functools.partial(rule, primitive, results) for rule in (_avals, _batch))
    define(primitive, avals, batch, many=many)


def _avals(primitive: Primitive, results: Results, *operands: Any, axes: tuple[int, ...], **params: Any) -> Any:
    """The types of the outputs: the operands' common shape, or one number a row in the dtype of accumulation.

    Weak types, and the mesh axes over which a result varies, are those of the first operand.
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    spec, mesh = common_spec([spec_of(x) for x in operands]), mesh_of(operands)
    row = operands[0].update(shape=shape, sharding=NamedSharding(mesh, P(*spec)))
    kept = [d for d in range(len(shape)) if d not in axes]
    kept_shape, kept_spec = (tuple(full[d] for d in kept) for full in (shape, spec))
    number = typed(row, mesh, kept_shape, kept_spec, reference.accumulator_dtype(row.dtype))
    avals = [row if result == "full" else number for result in results(**params)]
    return avals if primitive.multiple_results else avals[0]


def _batch(
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


def _keep(where: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """`x` where the mask, if there is one, is True."""
    return jnp.where(where[0], x, jnp.zeros((), x.dtype)) if where else x


def _without_excluded(where: Sequence[jax.Array], x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """`x` with -inf where the mask excludes; 0 in rows that it excludes entirely, whose probabilities would be NaN."""
    if not where:
        return x
    absent = jnp.where(where[0].any(axes, keepdims=True), jnp.asarray(-jnp.inf, x.dtype), jnp.zeros((), x.dtype))
    return jnp.where(where[0], x, absent)


def _row_jvp(op: Op, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """The forward half of the derivative: the output, and the linear primitive at the residual."""
    x, *where = primals
    rule = RULES[op]
    y = bind(op, *primals, **params)
    if rule.residual == "output":
        y = checkpoint_name(y, SAVED_NAME)
    if type(tangents[0]) is ad.Zero:
        return y, zeros(y)
    residual = y if rule.residual == "output" else _without_excluded(where, x, params["axes"])
    # Select before and after: where x is masked out, tangents and cotangents may have any value.
    return y, _keep(where, bind(rule.tangent, residual, _keep(where, tangents[0]), **params))


def _stats_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, axes: tuple[int, ...], scale: float, **params: Any
) -> tuple[Any, Any]:
    """The JVP of the statistics; the maximum is held constant, because only `exp(max) * sum` has meaning."""
    out = bind(Op.STATS, *primals, axes=axes, scale=scale, **params)
    if type(tangents[0]) is ad.Zero:
        return out, zeros(out)
    x, where = primals if len(primals) == 2 else (primals[0], None)
    return out, [zeros(out[0]), reference.stats_tangent(x, where, tangents[0], out[0], axes=axes, scale=scale)]


def _linear_transpose(op: Op, ct: Any, residual: jax.Array, t: Any, **params: Any) -> tuple[None, Any]:
    """The backward half of the derivative."""
    if type(ct) is ad.Zero:
        return None, ad.Zero(t.aval)
    out = bind(TRANSPOSE[op], residual, ct, **params)
    broadcast = tuple(d for d, n in enumerate(t.aval.shape) if n != out.shape[d])
    return None, out.sum(broadcast, keepdims=True) if broadcast else out


def _computation(op: Op, called: str) -> Computation:
    """The computation of a primitive that is a row operation."""
    results = ("reduced", "reduced") if op is Op.STATS else ("full",)
    whole = lambda rows, *operands, **row: rows(op, *operands, **row)
    return Computation(
        op, called, lambda **_: results, REFERENCE[op], whole, functools.partial(row_sharding.across, op)
    )


# Callers of the statistics name the public function.
_NAMES = {
    Op.SOFTMAX: "softmax",
    Op.SOFTMAX_TANGENT: "the derivative of softmax",
    Op.LOG_SOFTMAX: "log_softmax",
    Op.LOG_SOFTMAX_TANGENT: "the derivative of log_softmax",
    Op.LOG_SOFTMAX_COTANGENT: "the derivative of log_softmax",
    Op.STATS: "softmax_stats",
}

for _op, _called in _NAMES.items():
    _name = "softmax_stats" if _op is Op.STATS else _op.value
    BY_OP[_op] = _primitive = implement(_name, _computation(_op, _called), many=_op is Op.STATS)
    if _op in RULES:
        ad.primitive_jvps[_primitive] = functools.partial(_row_jvp, _op)
    elif _op in TRANSPOSE:
        ad.primitive_jvps[_primitive] = functools.partial(higher_jvp, _primitive, REFERENCE[_op], 1)
        ad.primitive_transposes[_primitive] = functools.partial(_linear_transpose, _op)
ad.primitive_jvps[BY_OP[Op.STATS]] = _stats_jvp
