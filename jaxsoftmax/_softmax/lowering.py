"""How each row operation is lowered: its reference, its kernel, and its form for rows that are themselves sharded."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jaxsoftmax._core import checks
from jaxsoftmax._core.lowering import Plan, lower_plain
from jaxsoftmax._core.sharding import AxisShardings, Result, RowOp
from jaxsoftmax._cross_entropy import loss as losses
from jaxsoftmax._softmax import layout
from jaxsoftmax._softmax import sharding as row_sharding
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
    results: Callable[..., Sequence[Result]]
    plain: Callable[..., Any]
    whole: Callable[..., Any]
    across: Callable[..., Any]
    asked: Callable[..., Asked] = _as_given
    has_kernel: bool = True

    def name(self, function: str | None = None, **_: Any) -> str:
        return function or NAMES[self.op]

    def plan(
        self,
        avals: Sequence[Any],
        device: Device,
        named: str | None,
        batch_invariant: bool = False,
        function: str | None = None,
        **params: Any,
    ) -> Plan:
        """What a call on operands of these types will do on a device."""
        operands, row = self.asked(avals, **params)
        return _plan(self.op, operands, device, named, batch_invariant=batch_invariant, **row)

    def reference(
        self,
        ctx: mlir.LoweringRuleContext,
        *operands: Any,
        batch_invariant: bool = False,
        function: str | None = None,
        **params: Any,
    ) -> Any:
        """Lowers to plain XLA operations."""
        return lower_plain(self.plain, ctx, *operands, **params)

    def by_kernel(
        self,
        ctx: mlir.LoweringRuleContext,
        named: str | None,
        batch_invariant: bool = False,
        function: str | None = None,
        **params: Any,
    ) -> RowOp:
        """The call by kernels: of whole rows, or of the parts of rows that are themselves sharded."""
        results, rows = self.results(**params), functools.partial(run, named, batch_invariant)

        def whole(*xs: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(self.whole(rows, *xs, **params))

        def across(cuts: AxisShardings, inside: jax.Array | None, *shards: jax.Array) -> list[jax.Array]:
            if named and "row" in results:
                raise checks.no_kernel_for_sharded_rows(named)
            return jax.tree.leaves(self.across(cuts, inside, rows, *shards, **params))

        return RowOp(params["axes"], results, whole, across)


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
    plain = functools.partial(whole, losses.label_logit, by_reference)
    return Computation(op, results, plain, functools.partial(whole, losses.label_logit_gathered), across, **rest)


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


def run(named: str | None, batch_invariant: bool, op: Op, *operands: jax.Array, **row: Any) -> Any:
    """Runs a kernel on whole operands of one device; the reference, where none takes this shard of the call."""
    chosen = _plan(op, operands, hardware.current(), named, batch_invariant=batch_invariant, **row).required_by(named)
    return by_reference(op, *operands, **row) if chosen.decision is None else layout.launch(chosen, *operands)


def _plan(op: Op, operands: Sequence[Any], device: Device, named: str | None, **row: Any) -> Plan:
    shapes, dtype = [x.shape for x in operands], operands[0].dtype
    return layout.plan(op, shapes, dtype, device, may_transpose=named is not None, **row)
