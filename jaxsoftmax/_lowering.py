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
from jaxsoftmax import _cross_entropy_rows as losses
from jaxsoftmax._rows import Plan, plan
from pallas_kernels import hardware, reference
from pallas_kernels.hardware import Device
from pallas_kernels.problem import Op

REFERENCE: dict[Op, Callable[..., Any]] = {op: getattr(reference, op.value) for op in Op}

_LOSSES = {
    Op.CROSS_ENTROPY: (losses.cross_entropy, losses.cross_entropy_across),
    Op.CROSS_ENTROPY_GRADIENT: (losses.cross_entropy_gradient, losses.cross_entropy_gradient_across),
}


def keeps(op: Op, *, stats: bool = False, **_: Any) -> tuple[bool, ...]:
    """Whether each result of an operation's primitive has the operands' axes, or is a number of each row."""
    if op is Op.CROSS_ENTROPY:
        return (False, False, False) if stats else (False,)
    return {Op.STATS: (False, False), Op.CROSS_ENTROPY_GRADIENT: (False, True)}.get(op, (True,))


def register(primitive: Primitive, op: Op) -> None:
    """Registers both lowerings of a primitive. "cuda", for the kernels are not for every "gpu"."""
    mlir.register_lowering(primitive, functools.partial(reference_rule, op))
    mlir.register_lowering(primitive, functools.partial(kernel_rule, op), platform="cuda")


def kernel_call(
    operands: Sequence[Any], *, weighted: bool = False, stats: bool = False, all_rows: bool = False, **row: Any
) -> tuple[list[Any], dict[str, Any]]:
    """What a row operation gets of its primitive's operands and parameters: no weights of a loss, which come third."""
    return [x for i, x in enumerate(operands) if not (weighted and i == 2)], row


def compute_reference(op: Op, *operands: jax.Array, **params: Any) -> Any:
    """What the primitive of an operation computes, in plain `jax.numpy`."""
    rows = lambda op, *operands, **row: REFERENCE[op](*operands, **row)
    return _LOSSES[op][0](rows, losses.picked, *operands, **params) if op in _LOSSES else rows(op, *operands, **params)


def reference_rule(
    op: Op, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
) -> Any:
    """Lowers to plain XLA operations."""
    if implementation == "mosaic_gpu":
        raise _checks.no_kernel_on_platform(op)
    return plain_rule(functools.partial(compute_reference, op), ctx, *operands, many=op.gives_stats, **params)


def plain_rule(
    compute: Callable[..., Any], ctx: mlir.LoweringRuleContext, *operands: Any, many: bool = True, **params: Any
) -> Any:
    """Lowers to what a function of arrays does."""
    avals: Sequence[Any] = ctx.avals_in
    with x64_for(*avals):
        return mlir.lower_fun(functools.partial(compute, **params), many)(ctx, *operands)


def x64_for(*avals: Any) -> Any:
    """The `enable_x64` context that float64 operands need: lowering and transposing may run outside the caller's."""
    return jax.enable_x64(jax.config.jax_enable_x64 or any(aval.dtype.itemsize == 8 for aval in avals))


def kernel_rule(
    op: Op, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
) -> Any:
    """Lowers to a kernel where one accepts the call, and otherwise to XLA, or raises if the kernel was named."""
    if implementation == "xla":
        return reference_rule(op, ctx, *operands, implementation=implementation, **params)
    avals, row = kernel_call(ctx.avals_in, **params)
    chosen = choose(op, [aval.shape for aval in avals], avals[0].dtype, implementation, hardware.current(), **row)
    if chosen.decision is None:
        return reference_rule(op, ctx, *operands, implementation=implementation, **params)
    whole, across = functools.partial(run, implementation), functools.partial(run, None)

    def local(*shards: jax.Array) -> list[jax.Array]:
        if op in _LOSSES:
            return _LOSSES[op][0](whole, losses.gathered, *shards, **params)
        return jax.tree.leaves(whole(op, *shards, **params))

    def exchange(cuts: _sharding.Cuts, *shards: jax.Array) -> list[jax.Array]:
        inside = _sharding.inside(cuts, row["axes"], jnp.broadcast_shapes(*(shard.shape for shard in shards)))
        if op in _LOSSES:
            return _LOSSES[op][1](cuts, inside, across, *shards, **params)
        names, stats = _sharding.names_of(cuts), functools.partial(across, Op.STATS)
        return jax.tree.leaves(_collective.BY_OP[op](names, stats, *_neutral(op, inside, shards), **params))

    return _sharding.lower(ctx, _sharding.RowOp(row["axes"], keeps(op, **params), local, exchange), *operands)


def _neutral(op: Op, inside: jax.Array | None, shards: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """A row operation's operands with what adds nothing where they are not `inside`."""
    if inside is None:
        return shards
    first, *others = shards
    fill = 0.0 if op is Op.SOFTMAX_TANGENT else -jnp.inf
    first = jnp.where(inside, first, jnp.asarray(fill, first.dtype))
    return [first, *(x if x.dtype == bool else jnp.where(inside, x, jnp.zeros_like(x)) for x in others)]


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


def run(implementation: str | None, op: Op, *operands: jax.Array, **row: Any) -> Any:
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
