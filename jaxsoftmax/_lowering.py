"""From primitive to program: the reference on every platform, and on CUDA the kernel that `dispatch` decides for.

The platform is known only here, so one traced function runs, exports and differentiates the same everywhere.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoftmax import _checks, _collective, _sharding
from jaxsoftmax._rows import Plan, plan
from pallas_kernels import hardware, reference
from pallas_kernels.hardware import Device
from pallas_kernels.monoid import Stats
from pallas_kernels.problem import Op

REFERENCE: dict[Op, Callable[..., Any]] = {op: getattr(reference, op.value) for op in Op}


def register(primitive: Primitive, op: Op) -> None:
    """Registers both lowerings of a primitive. "cuda", for the kernels are not for every "gpu"."""
    mlir.register_lowering(primitive, functools.partial(reference_rule, op))
    mlir.register_lowering(primitive, functools.partial(kernel_rule, op), platform="cuda")


def reference_rule(
    op: Op, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **row: Any
) -> Any:
    """Lowers to plain XLA operations."""
    if implementation == "mosaic_gpu":
        raise _checks.no_kernel_on_platform(op)
    avals: Sequence[Any] = ctx.avals_in
    # Lowering runs outside the caller's enable_x64 context, which float64 operands need.
    with jax.enable_x64(jax.config.jax_enable_x64 or any(aval.dtype.itemsize == 8 for aval in avals)):
        return mlir.lower_fun(functools.partial(REFERENCE[op], **row), op is Op.STATS)(ctx, *operands)


def kernel_rule(op: Op, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **row: Any) -> Any:
    """Lowers to a kernel where one accepts the call, and otherwise to XLA, or raises if the kernel was named."""
    if implementation == "xla":
        return reference_rule(op, ctx, *operands, implementation=implementation, **row)
    avals: Sequence[Any] = ctx.avals_in
    chosen = choose(op, [aval.shape for aval in avals], avals[0].dtype, implementation, hardware.current(), **row)
    if chosen.decision is None:
        return reference_rule(op, ctx, *operands, implementation=implementation, **row)

    def local_stats(*shards: jax.Array, **row: Any) -> Stats:
        return run(Op.STATS, None, *shards, **row)

    cut = _sharding.RowOp(
        axes=row["axes"],
        keeps_axes=op is not Op.STATS,
        local=functools.partial(run, op, implementation, **row),
        across=lambda names, *shards: _collective.BY_OP[op](names, local_stats, *shards, **row),
    )
    return _sharding.lower(ctx, cut, *operands)


def choose(
    op: Op,
    shapes: Sequence[tuple[int, ...]],
    dtype: jnp.dtype,
    implementation: str | None,
    device: Device,
    **row: Any,
) -> Plan:
    """The plan for a call; one without a kernel is an error if a kernel was named."""
    named = implementation == "mosaic_gpu"
    chosen = plan(op, shapes, dtype, device, may_transpose=named, **row)
    if named and chosen.decision is None:
        raise _checks.no_kernel_for_problem(op, chosen.declined)
    return chosen


def run(op: Op, implementation: str | None, *operands: jax.Array, **row: Any) -> Any:
    """Runs a kernel on whole operands of one device; the reference, where none takes this piece of the call."""
    shapes = [x.shape for x in operands]
    chosen = choose(op, shapes, operands[0].dtype, implementation, hardware.current(), **row)
    if chosen.decision is None:
        return REFERENCE[op](*operands, **row)
    return chosen.launch(_launch, *operands)


@functools.partial(jax.jit, static_argnames="decision")
def _launch(*operands: jax.Array, decision: Any) -> Any:
    """One jitted function for all calls, so that equal kernels within a program are compiled once."""
    with jax.named_scope(f"{decision.problem.op}.{decision.kernel}"):
        return decision.run(*operands)
