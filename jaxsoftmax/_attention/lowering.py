"""From primitive to program: the chunked reference on every platform, and on CUDA the kernel that `dispatch` picks."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoftmax._attention.checks import NAME
from jaxsoftmax._attention.layout import Plan, Shape, plan
from jaxsoftmax._attention.sharding import Heads
from jaxsoftmax._core import checks, sharding
from pallas_kernels import hardware
from pallas_kernels.attention import reference
from pallas_kernels.attention.operands import Operands, Rules, leading, sum_to
from pallas_kernels.attention.problem import Op
from pallas_kernels.hardware import Device


class Part(enum.StrEnum):
    """The parts of an attention call, and the primitives that stand for them."""

    FORWARD = "flash_attention"
    TANGENT = "flash_attention_tangent"
    GRADIENTS = "flash_attention_gradients"


OPS = {Part.FORWARD: Op.FORWARD, Part.GRADIENTS: Op.BACKWARD}


def kinds(part: Part, names: Sequence[str], moving: Sequence[str] = (), **_: Any) -> tuple[str, ...]:
    """What each operand of a primitive is, as in `RANK`."""
    extra = {Part.FORWARD: (), Part.TANGENT: ("out", "lse", *moving), Part.GRADIENTS: ("out", "lse", "out", "lse")}
    return (*names, *extra[part])


def leading_extents(names: Sequence[str], avals: Sequence[Any]) -> Shape:
    """What the leading axes of everything that gradients depend on broadcast to; a cotangent may lack a mapped axis."""
    return tuple(jnp.broadcast_shapes(*map(leading, avals, kinds(Part.GRADIENTS, names))))


def gradient_shapes(
    names: Sequence[str], avals: Sequence[Any], wrt: Sequence[str], kept: Sequence[tuple[int, ...]], **_: Any
) -> dict[str, Shape]:
    """The shapes of gradients, which are summed along the leading axes that are not kept."""
    full = leading_extents(names, avals)
    found: dict[str, Shape] = {}
    for name, axes in zip(wrt, kept, strict=True):
        lead = tuple(n if d in axes else 1 for d, n in enumerate(full))
        found[name] = (*lead, *avals[names.index(name)].shape[len(full) :])
    return found


def _forward(*arrays: jax.Array, names: tuple[str, ...], rules: Rules) -> Any:
    return reference.forward(Operands(**dict(zip(names, arrays, strict=True))), rules)


def _tangent(*arrays: jax.Array, names: tuple[str, ...], rules: Rules, moving: tuple[str, ...]) -> Any:
    operands = Operands(**dict(zip(names, arrays, strict=False)))
    out, lse, *tangents = arrays[len(names) :]
    return reference.tangent(operands, rules, out, lse, dict(zip(moving, tangents, strict=True)))


def _gradients(*arrays: jax.Array, names: tuple[str, ...], rules: Rules, **wanted: Any) -> Any:
    operands = Operands(**dict(zip(names, arrays, strict=False)))
    shapes = gradient_shapes(names, arrays, **wanted)
    return reference.backward(operands, rules, *arrays[len(names) :], shapes=shapes)


REFERENCE: dict[Part, Callable[..., Any]] = {
    Part.FORWARD: _forward,
    Part.TANGENT: _tangent,
    Part.GRADIENTS: _gradients,
}


def register(primitive: Primitive, part: Part) -> None:
    """Registers the lowerings of a primitive. "cuda", for the kernels are not for every "gpu"."""
    mlir.register_lowering(primitive, functools.partial(reference_rule, part))
    if part in OPS:
        mlir.register_lowering(primitive, functools.partial(kernel_rule, part), platform="cuda")


def reference_rule(
    part: Part, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
) -> Any:
    """Lowers to plain XLA operations."""
    if implementation == "mosaic_gpu" and part in OPS:
        raise checks.no_kernel_on_platform(NAME)
    avals: Sequence[Any] = ctx.avals_in
    params["rules"] = dataclasses.replace(params["rules"], is_local=sharding.is_local(ctx))
    run = functools.partial(REFERENCE[part], **params)
    if sharding.is_explicit(avals):
        return sharding.lower(ctx, _cut(part, ctx, run, **params), *operands)
    return sharding.lower_plain(run, ctx, *operands)


def kernel_rule(
    part: Part, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
) -> Any:
    """Lowers to a kernel where one accepts the call, and otherwise to XLA, or raises if the kernel was named."""
    avals: Sequence[Any] = ctx.avals_in
    if implementation == "xla" or choose(part, implementation, avals, hardware.current(), **params).decision is None:
        return reference_rule(part, ctx, *operands, implementation="xla", **params)
    run = functools.partial(_run, part, implementation, **params)
    return sharding.lower(ctx, _cut(part, ctx, run, **params), *operands)


def choose(part: Part, implementation: str | None, avals: Sequence[Any], device: Device, **params: Any) -> Plan:
    """The plan for a call; one without a kernel is an error if a kernel was named."""
    names = params["names"]
    dtypes = {name: x.dtype for name, x in zip(names, avals, strict=False)}
    shapes = {name: tuple(x.shape) for name, x in zip(names, avals, strict=False)}
    if part is Part.GRADIENTS:
        out = (*leading_extents(names, avals), *avals[-2].shape[-3:])
        shapes |= gradient_shapes(avals=avals, **params) | {"out": out}
    found = plan(OPS[part], shapes, dtypes, params["rules"], device, "bias" in params.get("wrt", ()))
    if implementation == "mosaic_gpu" and found.decision is None:
        raise checks.no_kernel_for_problem(NAME, found.declined)
    return found


def _cut(part: Part, ctx: mlir.LoweringRuleContext, run: Callable[..., Any], **params: Any) -> Heads:
    """The call, to be computed in pieces by `run`."""
    shapes = tuple(tuple(aval.shape) for aval in ctx.avals_out)
    results = params.get("wrt", ("out", "lse"))
    return Heads(kinds(part, **params), results, params.get("kept", (None, None)), shapes, run)


def _run(part: Part, implementation: str | None, *operands: jax.Array, **params: Any) -> Any:
    """Runs a kernel on whole operands of one device; the reference, where none takes this piece of the call."""
    chosen = choose(part, implementation, operands, hardware.current(), **params)
    decision, fold = chosen.decision, chosen.fold
    if decision is None or fold is None:
        return REFERENCE[part](*operands, **params)
    names = params["names"]
    wanted = gradient_shapes(avals=operands, **params) if part is Part.GRADIENTS else {}
    # What has a gradient of its own for each element of a leading axis enters as an array of its own for each.
    arrays = [
        jnp.broadcast_to(x, wanted[name]) if name in wanted else x for name, x in zip(names, operands, strict=False)
    ]
    arrays += operands[len(names) :]
    found = _launch(*map(fold.to_kernel, kinds(part, **params), arrays), decision=decision)
    if part is Part.FORWARD:
        return tuple(map(fold.from_kernel, ("out", "lse"), found))
    given = ("query", "key", "value", *(n for n in ("bias", "sinks") if n in (wanted if n == "bias" else names)))
    gradients = dict(zip(given, found, strict=True))
    return tuple(sum_to(fold.from_kernel(name, gradients[name]), shape) for name, shape in wanted.items())


@functools.partial(jax.jit, static_argnames="decision")
def _launch(*operands: jax.Array, decision: Any) -> Any:
    """One jitted function for all calls, so that equal kernels within a program are compiled once."""
    with jax.named_scope(f"{decision.problem.op}.{decision.kernel}"):
        return decision.run(*operands)
