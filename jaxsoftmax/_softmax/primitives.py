"""The primitives of the row operations, and their rules for JAX's transformations.

A primitive reduces `axes` of operands that broadcast against each other, so that vmap at any position only renumbers
axes, and leaves an operand that is not mapped with an extent of 1. The derivative of softmax and of log_softmax is a
linear primitive: its JVP rule is the forward half of a custom_vjp and its transposition the backward half, and with
both there is forward mode and every higher order too.

A `Computation` says how a primitive is lowered: its reference, its kernel, and its form for sharded rows. Other topics
implement their own primitives by the same row operations. A kernel takes operands as `[rows, cols]`, or as
`[rows, cols, inner]`: a `RowLayout` lays them out. The devices of sharded rows merge their states, which are elements
of the monoid, by one all-gather.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxsoftmax._core import checks
from jaxsoftmax._core.axes import Result, Sharded, over_rows, sharded_rows
from jaxsoftmax._core.lowering import Plan, is_local, launch_kernel, lower_plain, register
from jaxsoftmax._core.primitives import checked, define_over_rows, higher_jvp, zeros
from jaxsoftmax._core.sharding import (
    Columns,
    Names,
    Shape,
    all_gather,
    is_explicit,
    unify_shardings,
    unify_varying,
)
from pallas_kernels import hardware
from pallas_kernels.hardware import Device
from pallas_kernels.monoid import Stats, merge_over
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import RULES, TRANSPOSE, Op, Problem

SAVED_NAME = "softmax_out"

LocalStats = Callable[..., Stats]
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
    """How a primitive is computed by row operations; a `RowOpRunner` runs one.

    `plain(...)` does it in `jax.numpy`, `whole(run_row_op, ...)` for whole rows, and `across(columns, run_row_op, ...)`
    for this device's part of sharded ones. A primitive without `whole` is the row operation `op`. A kernel takes the
    call if it takes `op` with the `kernel_args`, by which `whole` runs it. `results` says which of the operands' axes
    each result has. Errors name the public function that is `called`, or the `function` among a primitive's parameters.
    """

    op: Op
    called: str
    results: Callable[..., Sequence[Result]]
    plain: Callable[..., Any]
    whole: Callable[..., Any] | None
    across: Callable[..., Any]
    kernel_args: Callable[..., KernelArgs] = _as_given
    has_kernel: bool = True

    def name(self, function: str | None = None, **_: Any) -> str:
        return function or self.called

    def plan(self, avals: Sequence[Any], device: Device, named: str | None, **params: Any) -> Plan:
        """Plans a call on operands of these types on a device."""
        operands, row = self.kernel_args(avals, **_of_row(params))
        return _plan(self.op, operands, device, named, batch_invariant=params.get("batch_invariant", False), **row)

    def reference(self, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        """Lowers to plain XLA operations, on a GPU in the form that XLA reads fastest there."""
        on_cuda = tuple(ctx.platforms or ctx.module_context.platforms) == ("cuda",)
        avals: Sequence[Any] = ctx.avals_in
        known = all(isinstance(n, int) for aval in avals for n in aval.shape)
        gpu = {"gpu": True} if on_cuda and known and is_local(ctx) and not is_explicit(avals) else {}
        return lower_plain(self.plain, ctx, *operands, **_of_row(params), **gpu)

    def on_one_device(self, named: str | None, plan: Plan | None, **params: Any) -> Callable[..., Any]:
        """Returns a function of whole rows, which runs the plan if there is one."""
        run_row_op = RowOpRunner(named, params.get("batch_invariant", False), {} if plan is None else {self.op: plan})
        whole, first = (run_row_op, self.op) if self.whole is None else (self.whole, run_row_op)
        return functools.partial(whole, first, **_of_row(params))

    def sharded(self, ctx: mlir.LoweringRuleContext, named: str | None, **params: Any) -> Sharded:
        """The call by kernels, on whole rows or on the parts of sharded rows."""
        row, on_one_device = _of_row(params), self.on_one_device(named, None, **params)
        results = self.results(**row)

        def whole(*xs: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(on_one_device(*xs))

        def across(columns: Columns, *shards: jax.Array) -> list[jax.Array]:
            if named and "full" in results and not self.op.has_labels:
                raise checks.no_kernel(named, _SHARDED_ROWS)
            run_row_op = RowOpRunner(named, params.get("batch_invariant", False))
            return jax.tree.leaves(self.across(columns, run_row_op, *shards, **row))

        avals: Sequence[Any] = ctx.avals_in
        signature = over_rows(len(avals), len(avals[0].shape), row["axes"], results)
        return sharded_rows(signature, row["axes"], whole, across)


def _of_row(params: dict[str, Any]) -> dict[str, Any]:
    """A primitive's parameters without those that say how it is lowered."""
    return {name: value for name, value in params.items() if name not in ("batch_invariant", "function")}


def implement(name: str, computation: Computation, **how: Any) -> Primitive:
    """Makes a primitive over rows, with all rules but derivatives; `how` is that of `define`."""
    primitive = Primitive(name)
    COMPUTATIONS[primitive] = computation
    define_over_rows(primitive, computation.results, **how)
    register(primitive, computation)
    return primitive


def by_reference(op: Op, *operands: jax.Array, **row: Any) -> Any:
    """Returns a row operation in `jax.numpy`."""
    return REFERENCE[op](*operands, **row)


@dataclasses.dataclass(frozen=True)
class RowOpRunner:
    """Runs row operations on whole operands of one device.

    A kernel runs one, or finds the statistics, from which XLA computes the rest; or no kernel takes it, and the
    reference runs. `plans` are those that are made already. Errors are about the function `named`, if it asked for a
    kernel.
    """

    named: str | None
    batch_invariant: bool
    plans: Mapping[Op, Plan] = MappingProxyType({})

    def __call__(self, op: Op, *operands: jax.Array, **row: Any) -> Any:
        plan = self.plans.get(op) or _plan(
            op, operands, hardware.current(), self.named, batch_invariant=self.batch_invariant, **row
        ).required_by(self.named)
        if plan.decision is None:
            return by_reference(op, *operands, **row, gpu=True)
        problem, layout = plan.decision.problem, plan.layout
        if problem.op is not op:
            return _across(op, Columns((), None), dataclasses.replace(self, plans={}), *operands, **row)
        first, last = problem.operands, problem.operands + len(op.row_operands)
        mask = layout.shared_mask if problem.where == "shared" else layout.to_rows
        rows, numbers = map(layout.to_rows, operands[:first]), map(layout.to_numbers, operands[first:last])
        out = launch_kernel(*rows, *numbers, *map(mask, operands[last:]), decision=plan.decision)
        return jax.tree.map(layout.from_kernel, out)


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How operands of the broadcast shape `shape` become rows; `order` is None if a reshape suffices."""

    shape: Shape
    axes: Shape
    order: Shape | None
    rows: int
    cols: int
    inner: int

    def to_rows(self, x: jax.Array) -> jax.Array:
        """Lays out an operand for the kernel."""
        x = jnp.broadcast_to(x, self.shape)
        x = x if self.order is None else x.transpose(self.order)
        return x.reshape((self.rows, self.cols) if self.inner == 1 else (self.rows, self.cols, self.inner))

    def to_numbers(self, x: jax.Array) -> jax.Array:
        """Lays out an operand of one number a row, with extent 1 along the axes."""
        x = jnp.broadcast_to(x, [1 if d in self.axes else n for d, n in enumerate(self.shape)])
        x = x if self.order is None else x.transpose(self.order)
        return x.reshape((self.rows,) if self.inner == 1 else (self.rows, self.inner))

    def shared_mask(self, where: jax.Array) -> jax.Array:
        """Lays out a mask that is the same for all rows as `[cols]`."""
        reduced = tuple(n if d in self.axes else 1 for d, n in enumerate(self.shape))
        return jnp.broadcast_to(where, reduced).reshape(self.cols)

    def from_rows(self, y: jax.Array) -> jax.Array:
        """Gives a kernel's output of the operands' size their shape."""
        if self.order is None:
            return y.reshape(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return y.reshape([self.shape[d] for d in self.order]).transpose(inverse)

    def from_numbers(self, y: jax.Array) -> jax.Array:
        """Gives a kernel's output of one number a row the operands' shape without the axes."""
        return y.reshape([n for d, n in enumerate(self.shape) if d not in self.axes])

    def from_kernel(self, y: jax.Array) -> jax.Array:
        """Gives any output of a kernel its shape."""
        return self.from_rows(y) if y.ndim == (2 if self.inner == 1 else 3) else self.from_numbers(y)


def view(shape: Shape, axes: Shape, *, transpose: bool = False) -> RowLayout:
    """Returns the view of rows along `axes`. It transposes if other axes lie between them, or if asked to."""
    significant = [d for d, n in enumerate(shape) if n != 1]
    reduced = [d for d in significant if d in axes]
    kept = [d for d in significant if d not in axes]
    cols = math.prod(shape[d] for d in reduced)
    outer = [d for d in kept if not reduced or d < reduced[0]]
    inner = [d for d in kept if reduced and d > reduced[-1]]
    if len(outer) + len(inner) < len(kept) or (transpose and inner):
        order = tuple(d for d in range(len(shape)) if d not in axes) + axes
        return RowLayout(shape, axes, order, math.prod(shape[d] for d in kept), cols, 1)
    return RowLayout(shape, axes, None, math.prod(shape[d] for d in outer), cols, math.prod(shape[d] for d in inner))


def _mask_forms(where: Shape | None, seen: RowLayout) -> list[str]:
    """The forms in which a kernel can take a mask, cheapest first."""
    if where is None:
        return ["none"]
    one_for_all = all(n == 1 for d, n in enumerate(where) if d not in seen.axes)
    return ["shared", "full"] if one_for_all and seen.inner == 1 and seen.rows > 1 else ["full"]


def _plan(
    op: Op,
    operands: Sequence[Any],
    device: Device,
    named: str | None,
    *,
    axes: Shape,
    batch_invariant: bool = False,
    **facts: Any,
) -> Plan:
    """Asks `dispatch.decide` about each layout of the call, cheapest first, and takes the first for which it chooses.

    `facts` are fields of a `Problem`.

    Rows along inner axes are transposed only for a call that is `named`, because two copies cost more than XLA's
    strided reads, or if `batch_invariant`, because XLA's sums depend on the number of rows.
    """
    # Pallas takes longer to import than JAX itself, and only a lowering for CUDA needs it.
    from pallas_kernels.softmax import dispatch

    shapes: list[Shape] = [x.shape for x in operands]
    dtype = jnp.dtype(operands[0].dtype)
    if not all(isinstance(n, int) and n > 0 for shape in shapes for n in shape):
        return Plan((("every kernel", "is compiled for fixed, non-empty shapes, and a dimension is symbolic or zero"),))
    shape: Shape = tuple(jnp.broadcast_shapes(*shapes))
    unmasked = (2 if op.is_linear else 1) + len(op.row_operands)
    where = shapes[unmasked] if len(shapes) > unmasked else None
    declined: tuple[tuple[str, str], ...] = ()
    for transpose in (False, True) if named or batch_invariant else (False,):
        seen = view(shape, axes, transpose=transpose)
        for form in _mask_forms(where, seen):
            problem = Problem(
                op, seen.rows, seen.cols, dtype, seen.inner, form, batch_invariant=batch_invariant, **facts
            )
            decision = dispatch.decide(problem, device, alone=named is not None)
            if decision.kernel is not None:
                notes = _notes(shapes[: decision.problem.operands], where, seen, form)
                return Plan(decision.declined, decision, seen, notes)
            declined = declined or decision.declined
    return Plan(declined)


def _notes(full: Sequence[Shape], where: Shape | None, seen: RowLayout, form: str) -> tuple[str, ...]:
    """Describes the work before and after the kernel, beyond a reshape, on large operands and on a mask."""
    notes: list[str] = []
    if seen.order is not None:
        notes.append(f"operands are transposed by {seen.order} into rows, and the result back: two extra copies")
    if where is not None and form == "full" and where != seen.shape:
        notes.append(f"where, of shape {where}, is broadcast to {seen.shape}")
    notes += [f"an operand of shape {s} is broadcast to {seen.shape}" for s in full if s != seen.shape]
    return tuple(notes)


# From the rows' statistics. Devices that share rows exchange a few numbers per row, at once; without `names` the rows
# are whole, and a kernel has the statistics alone.


def _by_stats(
    whole: Callable[..., jax.Array], names: Names, local_stats: LocalStats, *operands: jax.Array, **row: Any
) -> jax.Array:
    """Computes this device's columns of a function of an element and its row's state."""
    return whole(*operands, **row, known=_stats_across(names, local_stats, *operands, **row))


def _stats_across(names: Names, local_stats: LocalStats, *operands: jax.Array, **row: Any) -> Stats:
    return Stats(*_merged(names, *local_stats(*operands, **row)))


def _merged(names: Names, *parts: jax.Array) -> Sequence[jax.Array]:
    """Returns the state of whole rows: a maximum, and sums relative to it."""
    return merge_over(tuple(all_gather(names, *parts)), 0) if names else parts


def _softmax_tangent_across(names: Names, local_stats: LocalStats, y: jax.Array, t: jax.Array, **row: Any) -> jax.Array:
    (slopes,) = all_gather(names, reference.row_dot(y, t, axes=row["axes"]))
    return reference.softmax_tangent(y, t, **row, slope=slopes.sum(0))


def _log_softmax_tangent_across(
    names: Names, local_stats: LocalStats, x: jax.Array, t: jax.Array, *, axes: tuple[int, ...], scale: float
) -> jax.Array:
    local = local_stats(x, axes=axes, scale=scale)
    slope = reference.stats_tangent(x, None, t, local.max, axes=axes, scale=scale)
    _, total, slope = _merged(names, *local, slope)
    slope = slope / total
    # The scale is in the slope already.
    return reference.log_softmax_tangent(x, reference.logits(t, scale), axes=axes, slope=slope).astype(t.dtype)


def _log_softmax_cotangent_across(
    names: Names, local_stats: LocalStats, x: jax.Array, t: jax.Array, **row: Any
) -> jax.Array:
    known = local_stats(x, **row)
    incoming = t.astype(known.sum.dtype).sum(row["axes"])
    if names:
        *state, incoming = all_gather(names, *known, incoming)
        known, incoming = merge_over(Stats(*state), 0), incoming.sum(0)
    return reference.log_softmax_cotangent(x, t, **row, known=known, total=incoming)


def _across(op: Op, columns: Columns, rows: Callable[..., Any], *shards: jax.Array, **row: Any) -> jax.Array | Stats:
    return _ACROSS[op](columns.names, functools.partial(rows, Op.STATS), *_neutral(op, columns, shards), **row)


def _neutral(op: Op, columns: Columns, shards: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Masks padding columns; an operation without a mask gets its neutral element there."""
    first, *others = shards
    if not op.is_linear:
        return [first, *columns.within(others)]
    if (inside := columns.inside) is None:
        return shards
    fill = 0.0 if op is Op.SOFTMAX_TANGENT else -jnp.inf
    return [jnp.where(inside, x, jnp.asarray(fill if x is first else 0.0, x.dtype)) for x in shards]


_ACROSS: dict[Op, Callable[..., jax.Array | Stats]] = {
    Op.SOFTMAX: functools.partial(_by_stats, reference.softmax),
    Op.LOG_SOFTMAX: functools.partial(_by_stats, reference.log_softmax),
    Op.STATS: _stats_across,
    Op.SOFTMAX_TANGENT: _softmax_tangent_across,
    Op.LOG_SOFTMAX_TANGENT: _log_softmax_tangent_across,
    Op.LOG_SOFTMAX_COTANGENT: _log_softmax_cotangent_across,
}


def _keep(where: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """`x` where the mask, if there is one, is True."""
    return jnp.where(where[0], x, jnp.zeros((), x.dtype)) if where else x


def _without_excluded(where: Sequence[jax.Array], x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Puts -inf where the mask excludes, and 0 in rows that it excludes entirely, which would give NaN."""
    if not where:
        return x
    absent = jnp.where(where[0].any(axes, keepdims=True), jnp.asarray(-jnp.inf, x.dtype), jnp.zeros((), x.dtype))
    return jnp.where(where[0], x, absent)


def _row_jvp(op: Op, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Returns the forward half of the derivative: the output, and the linear primitive at the residual."""
    x, *where = primals
    rule = RULES[op]
    y = bind(op, *primals, **params)
    if rule.residual == "output":
        y = checkpoint_name(y, SAVED_NAME)
    if type(tangents[0]) is ad.Zero:
        return y, zeros(y)
    residual = y if rule.residual == "output" else _without_excluded(where, x, params["axes"])
    if where and rule.residual == "output":
        # XLA fuses the selects around the derivative with it; around a kernel each is a pass.
        params["implementation"] = params["implementation"] or "xla"
    # Select before and after: where x is masked out, tangents and cotangents may have any value.
    return y, _keep(where, bind(rule.tangent, residual, _keep(where, tangents[0]), **params))


def _stats_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, axes: tuple[int, ...], scale: float, **params: Any
) -> tuple[Any, Any]:
    """Returns the JVP of the statistics; the maximum is held constant, because only `exp(max) * sum` has meaning."""
    out = bind(Op.STATS, *primals, axes=axes, scale=scale, **params)
    if type(tangents[0]) is ad.Zero:
        return out, zeros(out)
    x, where = primals if len(primals) == 2 else (primals[0], None)
    return out, [zeros(out[0]), _stats_tangent(x, where, tangents[0], out[0], axes=axes, scale=scale)]


# As one program, of which debug_infs sees no -inf for an element that does not count.
_stats_tangent = jax.jit(reference.stats_tangent, static_argnames=("axes", "scale"), inline=True)


def _linear_transpose(op: Op, ct: Any, residual: jax.Array, t: Any, **params: Any) -> tuple[None, Any]:
    """Returns the backward half of the derivative."""
    if type(ct) is ad.Zero:
        return None, ad.Zero(t.aval)
    out = bind(TRANSPOSE[op], residual, ct, **params)
    broadcast = tuple(d for d, n in enumerate(t.aval.shape) if n != out.shape[d])
    return None, out.sum(broadcast, keepdims=True) if broadcast else checked(out)


def _computation(op: Op, name: str) -> Computation:
    """The computation of a primitive that is a row operation."""
    results = ("reduced", "reduced") if op is Op.STATS else ("full",)
    # Callers of the statistics name the public function.
    called = next((f"the derivative of {of}" for of, rule in RULES.items() if op in rule), name)
    return Computation(op, called, lambda **_: results, REFERENCE[op], None, functools.partial(_across, op))


for _op in _ACROSS:
    _name, _how = (_op.value, {"many": False}) if _op is not Op.STATS else ("softmax_stats", {"states": (0, 1)})
    BY_OP[_op] = _primitive = implement(_name, _computation(_op, _name), **_how)
    if _op in RULES:
        ad.primitive_jvps[_primitive] = functools.partial(_row_jvp, _op)
    elif _op in TRANSPOSE:
        ad.primitive_jvps[_primitive] = functools.partial(higher_jvp, _primitive, REFERENCE[_op], 1)
        ad.primitive_transposes[_primitive] = functools.partial(_linear_transpose, _op)
ad.primitive_jvps[BY_OP[Op.STATS]] = _stats_jvp
