"""From primitive to program: the reference on every platform, and on CUDA the kernel that `dispatch` decides for.

The platform is known only here, so one traced function runs, exports and differentiates the same everywhere.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoftmax._core import checks
from jaxsoftmax._core import sharding as core_sharding
from jaxsoftmax._cross_entropy import loss as losses
from jaxsoftmax._softmax import sharding as row_sharding
from jaxsoftmax._softmax.layout import Plan, plan
from pallas_kernels import hardware
from pallas_kernels.hardware import Device
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import Op

Asked = tuple[Sequence[Any], dict[str, Any]]

# What errors call the operations: the public functions. Those that take a row's statistics say which they are.
NAMES = {
    Op.SOFTMAX: "softmax",
    Op.SOFTMAX_TANGENT: "the derivative of softmax",
    Op.LOG_SOFTMAX: "log_softmax",
    Op.LOG_SOFTMAX_TANGENT: "the derivative of log_softmax",
    Op.LOG_SOFTMAX_COTANGENT: "the derivative of log_softmax",
    Op.CROSS_ENTROPY: "softmax_cross_entropy_with_integer_labels",
    Op.CROSS_ENTROPY_GRADIENT: "the derivative of softmax_cross_entropy_with_integer_labels",
}

REFERENCE: dict[Op, Callable[..., Any]] = {op: getattr(reference, op.value) for op in Op}


def _as_given(operands: Sequence[Any], **row: Any) -> Asked:
    return operands, row


@dataclasses.dataclass(frozen=True)
class Computation:
    """How a primitive is computed by row operations: `rows(op, *operands, **row)`, by whatever means.

    `plain(...)` does it in `jax.numpy`, `whole(rows, ...)` for whole rows, and `across(cuts, inside, rows, ...)` for
    this device's part of cut ones. A kernel takes the call if it takes `op` with what is `asked` of it; `results` says
    what the primitive's results have of the operands' axes.
    """

    op: Op
    results: Callable[..., Sequence[core_sharding.Result]]
    plain: Callable[..., Any]
    whole: Callable[..., Any]
    across: Callable[..., Any]
    asked: Callable[..., Asked] = _as_given


def by_reference(op: Op, *operands: jax.Array, **row: Any) -> Any:
    """A row operation in `jax.numpy`."""
    return REFERENCE[op](*operands, **row)


def _operation(op: Op) -> Computation:
    """That of a primitive that is a row operation."""
    results = ("number", "number") if op is Op.STATS else ("row",)
    whole = lambda rows, *operands, **row: rows(op, *operands, **row)
    return Computation(op, lambda **_: results, REFERENCE[op], whole, functools.partial(row_sharding.across, op))


def _loss(
    op: Op, results: Callable[..., Any], whole: Callable[..., Any], across: Callable[..., Any], **rest: Any
) -> Computation:
    """That of a loss, which is made of what a row operation says, and of its label's logit."""
    plain = functools.partial(whole, losses.picked, by_reference)
    return Computation(op, results, plain, functools.partial(whole, losses.gathered), across, **rest)


BY_OP = {op: _operation(op) for op in Op} | {
    Op.CROSS_ENTROPY: _loss(
        Op.CROSS_ENTROPY,
        lambda stats, **_: ("number",) * (3 if stats else 1),
        losses.cross_entropy,
        losses.cross_entropy_across,
        asked=losses.asked,
    ),
    Op.CROSS_ENTROPY_GRADIENT: _loss(
        Op.CROSS_ENTROPY_GRADIENT,
        lambda **_: ("number", "row"),
        losses.cross_entropy_gradient,
        losses.cross_entropy_gradient_across,
    ),
}


def register(primitive: Primitive, computation: Computation) -> None:
    """Registers both lowerings of a primitive. "cuda", for the kernels are not for every "gpu"."""
    mlir.register_lowering(primitive, functools.partial(reference_rule, computation))
    mlir.register_lowering(primitive, functools.partial(kernel_rule, computation), platform="cuda")


def reference_rule(
    computation: Computation,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    implementation: str | None,
    batch_invariant: bool = False,
    function: str | None = None,
    **params: Any,
) -> Any:
    """Lowers to plain XLA operations."""
    if implementation == "mosaic_gpu":
        raise checks.no_kernel_on_platform(function or NAMES[computation.op])
    return core_sharding.lower_plain(computation.plain, ctx, *operands, **params)


def kernel_rule(
    computation: Computation,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    implementation: str | None,
    batch_invariant: bool = False,
    function: str | None = None,
    **params: Any,
) -> Any:
    """Lowers to a kernel where one accepts the call, and otherwise to XLA, or raises if the kernel was named."""
    avals, row = computation.asked(ctx.avals_in, **params)
    op, device = computation.op, hardware.current()
    named = (function or NAMES[op]) if implementation == "mosaic_gpu" else None
    chosen = functools.partial(choose, op, named, avals, device, batch_invariant=batch_invariant)
    if implementation == "xla" or chosen(**row).decision is None:
        return reference_rule(computation, ctx, *operands, implementation=implementation, **params)
    rows = functools.partial(run, named, batch_invariant)

    def whole(*xs: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(computation.whole(rows, *xs, **params))

    def across(cuts: core_sharding.Cuts, inside: jax.Array | None, *shards: jax.Array) -> list[jax.Array]:
        if named and "row" in computation.results(**params):
            raise checks.no_kernel_for_sharded_rows(named)
        return jax.tree.leaves(computation.across(cuts, inside, rows, *shards, **params))

    return core_sharding.lower(
        ctx, core_sharding.RowOp(row["axes"], computation.results(**params), whole, across), *operands
    )


def choose(op: Op, named: str | None, operands: Sequence[Any], device: Device, **row: Any) -> Plan:
    """The plan for a call; one without a kernel is an error of the function that is `named`, if it asked for one."""
    chosen = plan(op, [x.shape for x in operands], operands[0].dtype, device, may_transpose=named is not None, **row)
    if named is not None and chosen.decision is None:
        raise checks.no_kernel_for_problem(named, chosen.declined)
    return chosen


def run(named: str | None, batch_invariant: bool, op: Op, *operands: jax.Array, **row: Any) -> Any:
    """Runs a kernel on whole operands of one device; the reference, where none takes this piece of the call."""
    chosen = choose(op, named, operands, hardware.current(), batch_invariant=batch_invariant, **row)
    if chosen.decision is None:
        return by_reference(op, *operands, **row)
    return chosen.launch(_launch, *operands)


@functools.partial(jax.jit, static_argnames="decision")
def _launch(*operands: jax.Array, decision: Any) -> Any:
    """One jitted function for all calls, so that equal kernels within a program are compiled once."""
    with jax.named_scope(f"{decision.problem.op}.{decision.kernel}"):
        return decision.run(*operands)
