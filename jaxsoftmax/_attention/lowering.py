"""The lowering of attention: the chunked reference on every platform, and on CUDA a kernel between two reshapes."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxsoftmax._attention.checks import NAME
from jaxsoftmax._attention.layout import Shape, plan
from jaxsoftmax._attention.operands import kernel_gradients
from jaxsoftmax._attention.sharding import Heads
from jaxsoftmax._core.lowering import Plan, is_local, lower, lower_plain
from jaxsoftmax._core.sharding import is_explicit
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


@dataclasses.dataclass(frozen=True)
class Call:
    """A part of an attention call, to be lowered."""

    part: Part

    @property
    def has_kernel(self) -> bool:
        return self.part in OPS

    def name(self, **_: Any) -> str:
        return NAME

    def plan(self, avals: Sequence[Any], device: Device, named: str | None, **params: Any) -> Plan:
        """What a call on operands of these types will do on a device."""
        names = params["names"]
        dtypes = {name: x.dtype for name, x in zip(names, avals, strict=False)}
        shapes = {name: tuple(x.shape) for name, x in zip(names, avals, strict=False)}
        if self.part is Part.GRADIENTS:
            out = (*leading_extents(names, avals), *avals[-2].shape[-3:])
            shapes |= gradient_shapes(avals=avals, **params) | {"out": out}
        return plan(OPS[self.part], shapes, dtypes, params["rules"], device, "bias" in params.get("wrt", ()))

    def reference(self, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        """Lowers to plain XLA operations."""
        params["rules"] = dataclasses.replace(params["rules"], is_local=is_local(ctx))
        run = functools.partial(REFERENCE[self.part], **params)
        if is_explicit(ctx.avals_in):
            return lower(ctx, self._sharded(ctx, run, **params), *operands)
        return lower_plain(run, ctx, *operands)

    def by_kernel(self, ctx: mlir.LoweringRuleContext, named: str | None, **params: Any) -> Heads:
        """The call by a kernel, sharded by batch and heads."""
        return self._sharded(ctx, functools.partial(_run, self, named, **params), **params)

    def _sharded(self, ctx: mlir.LoweringRuleContext, run: Callable[..., Any], **params: Any) -> Heads:
        avals: Sequence[Any] = ctx.avals_out
        results, kept = params.get("wrt", ("out", "lse")), params.get("kept", (None, None))
        return Heads(kinds(self.part, **params), results, kept, tuple(tuple(aval.shape) for aval in avals), run)


def _run(call: "Call", named: str | None, *operands: jax.Array, **params: Any) -> Any:
    """Runs a kernel on whole operands of one device; the reference, where none takes this shard of the call."""
    part, chosen = call.part, call.plan(operands, hardware.current(), named, **params).required_by(named)
    fold = chosen.layout
    if fold is None:
        return REFERENCE[part](*operands, **params)
    names = params["names"]
    wanted = gradient_shapes(avals=operands, **params) if part is Part.GRADIENTS else {}
    # Operands that broadcast along a batch axis which their gradient keeps are broadcast before the kernel.
    arrays = [
        jnp.broadcast_to(x, wanted[name]) if name in wanted else x for name, x in zip(names, operands, strict=False)
    ]
    arrays += operands[len(names) :]
    found = chosen.launch(*map(fold.to_kernel, kinds(part, **params), arrays))
    if part is Part.FORWARD:
        return tuple(map(fold.from_kernel, ("out", "lse"), found))
    gradients = dict(zip(kernel_gradients(names, wanted), found, strict=True))
    return tuple(sum_to(fold.from_kernel(name, gradients[name]), shape) for name, shape in wanted.items())
