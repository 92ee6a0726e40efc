"""The primitives of attention, and their rules for JAX's transformations.

`flash_attention` gives output and logsumexp, and `flash_attention_residuals`, the identity on them, carries the
derivative: its JVP rule binds the linear `flash_attention_tangent`, whose transposition binds
`flash_attention_gradients`. Reverse mode is thus one forward and one backward primitive, and as both linear ones have
JVP rules in turn (the chunked reference's), every mode and order exists.

The operands have any number of leading dimensions, the same for all, that broadcast against each other: vmap adds one,
of extent 1 where an operand is not mapped, so that keys and values shared by a batch are never copied.

A `Call` is lowered to the reference on every platform, and on CUDA to a kernel, or to cuDNN, between two reshapes.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxsoftmax._attention.checks import NAME
from jaxsoftmax._attention.layout import kernel_gradients, plan
from jaxsoftmax._attention.sharding import ShardedAttention, signature, unify_shardings
from jaxsoftmax._core.lowering import Plan, is_local, launch_kernel, lower, lower_plain, register
from jaxsoftmax._core.primitives import checked, define, higher_jvp, map_leading, saved
from jaxsoftmax._core.sharding import Shape, is_explicit, unify_varying
from pallas_kernels import hardware
from pallas_kernels.attention import reference
from pallas_kernels.attention.problem import DIFFERENTIABLE, RANK, Op, Operands, Rules, leading, sum_to
from pallas_kernels.hardware import Device
from pallas_kernels.types import accumulator_dtype

SAVED_NAMES = {"out": "flash_attention_out", "lse": "flash_attention_lse"}


class Pass(enum.StrEnum):
    """The passes of an attention call, and the primitives that stand for them."""

    FORWARD = "flash_attention"
    TANGENT = "flash_attention_tangent"
    GRADIENTS = "flash_attention_gradients"


FORWARD, TANGENT, GRADIENTS = (Primitive(part.value) for part in Pass)
RESIDUALS = Primitive("flash_attention_residuals")

BY_PART = {Pass.FORWARD: FORWARD, Pass.TANGENT: TANGENT, Pass.GRADIENTS: GRADIENTS}


def attend(operands: Operands, rules: Rules, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    """Returns output `[*batch, T, N, D]` and logsumexp `[*batch, N, T]`."""
    names = operands.present
    # Reshard by an operation that has a transpose before binding, so that gradients get the operands' shardings.
    arrays = unify_varying(*unify_shardings(names, [getattr(operands, name) for name in names]))
    params: dict[str, Any] = {"names": names, "rules": rules, "implementation": implementation}
    # Checkpoint policies look for names in the primal computation.
    found = FORWARD.bind(*(jax.lax.stop_gradient(x) for x in arrays), **params)
    named = [checkpoint_name(x, name) for x, name in zip(found, SAVED_NAMES.values(), strict=True)]
    out, lse = RESIDUALS.bind(*arrays, *named, **params)
    return checked(out), lse


OPS = {Pass.FORWARD: Op.FORWARD, Pass.GRADIENTS: Op.BACKWARD}


def kinds(part: Pass, names: Sequence[str], moving: Sequence[str] = (), **_: Any) -> tuple[str, ...]:
    """Names the kind of each operand of a primitive, as in `RANK`."""
    extra = {Pass.FORWARD: (), Pass.TANGENT: ("out", "lse", *moving), Pass.GRADIENTS: ("out", "lse", "out", "lse")}
    return (*names, *extra[part])


def leading_extents(names: Sequence[str], avals: Sequence[Any]) -> Shape:
    """Returns the common leading axes of all that gradients depend on; a cotangent may lack a mapped axis."""
    return tuple(jnp.broadcast_shapes(*map(leading, avals, kinds(Pass.GRADIENTS, names))))


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


def _gradients(*arrays: jax.Array, names: tuple[str, ...], rules: Rules, lse_cotangent: bool, **wanted: Any) -> Any:
    operands = Operands(**dict(zip(names, arrays, strict=False)))
    shapes = gradient_shapes(names, arrays, **wanted)
    return reference.backward(operands, rules, *arrays[len(names) :], shapes=shapes)


REFERENCE: dict[Pass, Callable[..., Any]] = {
    Pass.FORWARD: _forward,
    Pass.TANGENT: _tangent,
    Pass.GRADIENTS: _gradients,
}


# Arrays of the size of the logits that a part has in memory at a time, if one tile is everything.
_LOGITS_ARRAYS = {Pass.FORWARD: 2, Pass.TANGENT: 3, Pass.GRADIENTS: 3}


def tile_by_xla(
    part: Pass, names: Sequence[str], rules: Rules, avals: Sequence[Any], device: Device
) -> tuple[int, int] | None:
    """Says how many queries and keys XLA multiplies at a time on a GPU; None where a length is symbolic."""
    from pallas_kernels.attention import dispatch

    shapes = dict(zip(names, (x.shape for x in avals), strict=False))
    heads = *leading_extents(names, avals[: len(names)]), shapes["query"][-2]
    lengths = shapes["query"][-3], shapes["key"][-3]
    if not all(isinstance(n, int) for n in (*heads, *lengths)):
        return None
    return dispatch.xla_tile(math.prod(heads) * _LOGITS_ARRAYS[part], *lengths, device, rules.logits_memory)


def _on_gpu(part: Pass, names: Sequence[str], rules: Rules, avals: Sequence[Any]) -> Rules:
    """The rules, with the tile by which XLA computes a call on a GPU."""
    return dataclasses.replace(rules, tile=tile_by_xla(part, names, rules, avals, hardware.current()))


@dataclasses.dataclass(frozen=True)
class Call:
    """A part of an attention call, as `lowering` needs it."""

    part: Pass

    @property
    def has_kernel(self) -> bool:
        return self.part in OPS

    def name(self, **_: Any) -> str:
        return NAME

    def plan(self, avals: Sequence[Any], device: Device, named: str | None, **params: Any) -> Plan:
        """The plan of a call on operands of these types on a device."""
        names = params["names"]
        dtypes = {name: x.dtype for name, x in zip(names, avals, strict=False)}
        shapes = {name: tuple(x.shape) for name, x in zip(names, avals, strict=False)}
        if self.part is Pass.GRADIENTS:
            out = (*leading_extents(names, avals), *avals[-2].shape[-3:])
            shapes |= gradient_shapes(avals=avals, **params) | {"out": out}
        facts = {"bias_gradient": "bias" in params.get("wrt", ()), "lse_gradient": params.get("lse_cotangent", False)}
        return plan(OPS[self.part], shapes, dtypes, params["rules"], device, named is not None, **facts)

    def reference(self, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        """Lowers to plain XLA operations."""
        rules = dataclasses.replace(params["rules"], is_local=is_local(ctx))
        if tuple(ctx.platforms or ctx.module_context.platforms) == ("cuda",):
            rules = _on_gpu(self.part, params["names"], rules, ctx.avals_in)
        params["rules"] = rules
        run = functools.partial(REFERENCE[self.part], **params)
        if is_explicit(ctx.avals_in):
            return lower(ctx, self._sharded(ctx, run, **params), *operands)
        return lower_plain(run, ctx, *operands)

    def on_one_device(self, named: str | None, plan: Plan | None, **params: Any) -> Callable[..., Any]:
        return functools.partial(self._run, named, plan, **params)

    def _run(self, named: str | None, plan: Plan | None, *operands: jax.Array, **params: Any) -> Any:
        """Runs a kernel on one device's operands, or the reference where no kernel takes this shard."""
        part, names = self.part, params["names"]
        plan = plan or self.plan(operands, hardware.current(), named, **params).required_by(named)
        fold = plan.layout
        if fold is None:
            return REFERENCE[part](*operands, **params | {"rules": _on_gpu(part, names, params["rules"], operands)})
        wanted = gradient_shapes(avals=operands, **params) if part is Pass.GRADIENTS else {}
        # Operands that broadcast along a batch axis which their gradient keeps are broadcast before the kernel.
        arrays = [
            jnp.broadcast_to(x, wanted[name]) if name in wanted else x for name, x in zip(names, operands, strict=False)
        ]
        arrays += operands[len(names) :]
        out = launch_kernel(*map(fold.to_kernel, kinds(part, **params), arrays), decision=plan.decision)
        if part is Pass.FORWARD:
            return tuple(map(fold.from_kernel, ("out", "lse"), out))
        gradients = dict(zip(kernel_gradients(names, wanted), out, strict=True))
        return tuple(sum_to(fold.from_kernel(name, gradients[name]), shape) for name, shape in wanted.items())

    def sharded(self, ctx: mlir.LoweringRuleContext, named: str | None, **params: Any) -> ShardedAttention:
        """The call by a kernel, sharded by batch, heads and queries."""
        return self._sharded(ctx, self.on_one_device(named, None, **params), **params)

    def _sharded(self, ctx: mlir.LoweringRuleContext, run: Callable[..., Any], **params: Any) -> ShardedAttention:
        avals: Sequence[Any] = ctx.avals_in
        outputs: Sequence[Any] = ctx.avals_out
        results = params.get("wrt", ("out", "lse"))
        return ShardedAttention(
            signature=signature(kinds(self.part, **params), len(avals[0].shape) - RANK["query"], results),
            compute=run,
            result_shapes=tuple(tuple(aval.shape) for aval in outputs),
            names=params["names"],
            rules=params["rules"],
            results=results,
            by_blocks=self.has_kernel,
        )


def _kinds(primitive: Primitive, names: Sequence[str], **params: Any) -> tuple[str, ...]:
    """Names the kind of each operand of a primitive, as in `RANK`."""
    return (*names, "out", "lse") if primitive is RESIDUALS else kinds(Pass(primitive.name), names, **params)


def _forward_avals(primitive: Primitive, *avals: Any, **params: Any) -> list[Any]:
    """Returns the types of output and logsumexp, or of their tangents."""
    query = avals[0]
    call = signature(_kinds(primitive, **params), len(query.shape) - RANK["query"], ("out", "lse"))
    return call.types(avals, (query.dtype, accumulator_dtype(query.dtype)))


def _residual_avals(*avals: Any, **_: Any) -> list[Any]:
    return list(avals[-2:])


def _gradient_avals(
    *avals: Any, names: tuple[str, ...], wrt: tuple[str, ...], kept: tuple[tuple[int, ...], ...], **_: Any
) -> list[Any]:
    """Returns the types of the gradients: an operand's own, but for the leading axes that are kept."""
    shapes = gradient_shapes(names, avals, wrt, kept)
    call = signature(_kinds(GRADIENTS, names), len(avals[0].shape) - RANK["query"], wrt)
    return call.types(avals, [avals[names.index(name)].dtype for name in wrt], list(shapes.values()))


def _ranks(primitive: Primitive, **params: Any) -> list[int]:
    return [RANK[kind] for kind in _kinds(primitive, **params)]


def _residuals_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, names: tuple[str, ...], **params: Any
) -> tuple[Any, Any]:
    """Returns the forward half of the derivative: output and logsumexp, and the linear primitive."""
    out, lse = RESIDUALS.bind(*primals, names=names, **params)
    by_name = dict(zip(names, tangents[: len(names)], strict=True))
    moving = tuple(name for name in DIFFERENTIABLE if name in by_name and type(by_name[name]) is not ad.Zero)
    # Beside a large logsumexp the weights of a query are 0.
    finite = saved(lse, lse == -jnp.inf, float(jnp.finfo(lse.dtype).max) / 2)
    operands = unify_varying(*primals[: len(names)], out, finite, *(by_name[name] for name in moving))
    return [out, lse], TANGENT.bind(*operands, names=names, moving=moving, **params)


def _tangent_transpose(
    cts: Sequence[Any], *operands: Any, names: tuple[str, ...], moving: tuple[str, ...], **params: Any
) -> Any:
    """Returns the backward half of the derivative."""
    known, linear = operands[: len(names) + 2], operands[len(names) + 2 :]
    likes = zip(known[-2:], cts, strict=True)
    known_and_cts = unify_varying(*known, *(jnp.zeros_like(x) if type(ct) is ad.Zero else ct for x, ct in likes))
    full = jax.typeof(known_and_cts[-2]).shape[:-3]
    kept = tuple(tuple(d for d, n in enumerate(full) if t.aval.shape[d] == n) for t in linear)
    params["lse_cotangent"] = type(cts[1]) is not ad.Zero
    found = GRADIENTS.bind(*known_and_cts, names=names, wrt=moving, kept=kept, **params)
    return [None] * len(known) + [checked(x) for x in found]


def _by_reference(primitive: Primitive, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Computes a primitive's results by the reference."""
    whole = unify_shardings(_kinds(primitive, **params), operands, in_parts=False)
    return list(REFERENCE[Pass(primitive.name)](*whole, **params))


def _linear_jvp(
    primitive: Primitive, plain: Any, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """The JVP of a primitive that is linear in the operands after output and logsumexp."""
    linear = len(primals) - len(params["names"]) - 2
    return higher_jvp(primitive, plain, linear, primals, tangents, **params)


_AVALS = {
    FORWARD: functools.partial(_forward_avals, FORWARD),
    RESIDUALS: _residual_avals,
    TANGENT: functools.partial(_forward_avals, TANGENT),
    GRADIENTS: _gradient_avals,
}

for _primitive, _avals in _AVALS.items():
    _place = functools.partial(map_leading, functools.partial(_ranks, _primitive))
    define(_primitive, _avals, _place, states=(1,) if _primitive in (FORWARD, RESIDUALS) else ())
for _part, _primitive in BY_PART.items():
    register(_primitive, Call(_part))
mlir.register_lowering(RESIDUALS, lambda ctx, *operands, **_: operands[-2:])

ad.primitive_jvps[RESIDUALS] = _residuals_jvp
ad.primitive_transposes[TANGENT] = _tangent_transpose
for _primitive in (TANGENT, GRADIENTS):
    ad.primitive_jvps[_primitive] = functools.partial(
        _linear_jvp, _primitive, functools.partial(_by_reference, _primitive)
    )
