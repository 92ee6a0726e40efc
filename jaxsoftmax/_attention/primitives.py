"""The primitives of attention: what JAX's transformations know of `flash_attention`.

`flash_attention` gives output and logsumexp, and `flash_attention_residuals`, the identity on them, carries the
derivative: its JVP rule binds the linear `flash_attention_tangent`, whose transposition binds
`flash_attention_gradients`. Reverse mode is thus one forward and one backward primitive, and as both linear ones have
JVP rules in turn (the chunked reference's), every mode and order exists.

The operands have any number of leading dimensions, the same for all, that broadcast against each other: vmap adds one,
of extent 1 where an operand is not mapped, so that keys and values shared by a batch are never copied.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxsoftmax._attention import lowering
from jaxsoftmax._attention.lowering import Part
from jaxsoftmax._attention.sharding import layout_of, unify_shardings
from jaxsoftmax._core.lowering import register
from jaxsoftmax._core.primitives import aligned, define, higher_jvp, typed
from jaxsoftmax._core.sharding import mesh_of, unify_varying
from pallas_kernels.attention.operands import DIFFERENTIABLE, RANK, Operands, Rules
from pallas_kernels.softmax.reference import accumulator_dtype

SAVED_NAMES = {"out": "flash_attention_out", "lse": "flash_attention_lse"}

FORWARD = Primitive("flash_attention")
RESIDUALS = Primitive("flash_attention_residuals")
TANGENT = Primitive("flash_attention_tangent")
GRADIENTS = Primitive("flash_attention_gradients")

BY_PART = {Part.FORWARD: FORWARD, Part.TANGENT: TANGENT, Part.GRADIENTS: GRADIENTS}


def attend(operands: Operands, rules: Rules, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    """Output `[*batch, T, N, D]` and logsumexp `[*batch, N, T]`."""
    names = operands.present
    # What is bound is cut alike, as the gradients will be, and comes to that by an operation that has a transpose.
    arrays = unify_varying(*unify_shardings(names, [getattr(operands, name) for name in names]))
    params: dict[str, Any] = {"names": names, "rules": rules, "implementation": implementation}
    # A policy that saves by name must find the names in the primal computation, which has no derivative of its own.
    found = FORWARD.bind(*(jax.lax.stop_gradient(x) for x in arrays), **params)
    named = [checkpoint_name(x, name) for x, name in zip(found, SAVED_NAMES.values(), strict=True)]
    out, lse = RESIDUALS.bind(*arrays, *named, **params)
    return out, lse


def _kinds(primitive: Primitive, names: Sequence[str], **params: Any) -> tuple[str, ...]:
    """What each operand of a primitive is, as in `RANK`."""
    if primitive is RESIDUALS:
        return (*names, "out", "lse")
    return lowering.kinds(Part(primitive.name), names, **params)


def _forward_avals(primitive: Primitive, *avals: Any, **params: Any) -> list[Any]:
    """The types of output and logsumexp, or of their tangents."""
    query, _, value = avals[:3]
    cut, mesh = layout_of(_kinds(primitive, **params), avals), mesh_of(avals)
    length, heads, _ = query.shape[-3:]
    out, lse = (*cut.full, length, heads, value.shape[-1]), (*cut.full, heads, length)
    return [
        typed(query, mesh, out, cut.spec("out", out), query.dtype),
        typed(query, mesh, lse, cut.spec("lse", lse), accumulator_dtype(query.dtype)),
    ]


def _residual_avals(*avals: Any, **_: Any) -> list[Any]:
    return list(avals[-2:])


def _gradient_avals(
    *avals: Any, names: tuple[str, ...], wrt: tuple[str, ...], kept: tuple[tuple[int, ...], ...], **_: Any
) -> list[Any]:
    """The types of the gradients: an operand's own, but for the leading axes that are kept."""
    cut, mesh = layout_of(_kinds(GRADIENTS, names), avals), mesh_of(avals)
    shapes = lowering.gradient_shapes(names, avals, wrt, kept)
    return [
        typed(avals[names.index(name)], mesh, shape, cut.spec(name, shape, axes), avals[names.index(name)].dtype)
        for (name, shape), axes in zip(shapes.items(), kept, strict=True)
    ]


def _batch(
    primitive: Primitive, _: Any, operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[Any, Any]:
    """Adds a leading dimension, where the first operand is mapped if it is among those; extent 1 if not mapped."""
    if all(d is None for d in dims):
        out = primitive.bind(*unify_varying(*operands), **params)
        return out, [None] * len(out)
    ranks = [RANK[kind] for kind in _kinds(primitive, **params)]
    mapped = list(zip(operands, dims, strict=True))
    at = next((d for (x, d), rank in zip(mapped, ranks, strict=True) if d is not None and d < x.ndim - rank), 0)
    if primitive is GRADIENTS:
        params["kept"] = tuple((*(d + (d >= at) for d in axes), at) for axes in params["kept"])
    out = primitive.bind(*aligned(operands, dims, at), **params)
    return out, [at] * len(out)


def _residuals_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, names: tuple[str, ...], **params: Any
) -> tuple[Any, Any]:
    """The forward half of the derivative: output and logsumexp as they are, and the linear primitive at them."""
    out, lse = RESIDUALS.bind(*primals, names=names, **params)
    by_name = dict(zip(names, tangents[: len(names)], strict=True))
    moving = tuple(name for name in DIFFERENTIABLE if name in by_name and type(by_name[name]) is not ad.Zero)
    operands = unify_varying(*primals[: len(names)], out, lse, *(by_name[name] for name in moving))
    return [out, lse], TANGENT.bind(*operands, names=names, moving=moving, **params)


def _tangent_transpose(
    cts: Sequence[Any], *operands: Any, names: tuple[str, ...], moving: tuple[str, ...], **params: Any
) -> Any:
    """The backward half of the derivative."""
    known, linear = operands[: len(names) + 2], operands[len(names) + 2 :]
    likes = zip(known[-2:], cts, strict=True)
    known_and_cts = unify_varying(*known, *(jnp.zeros_like(x) if type(ct) is ad.Zero else ct for x, ct in likes))
    full = jax.typeof(known_and_cts[-2]).shape[:-3]
    kept = tuple(tuple(d for d, n in enumerate(full) if t.aval.shape[d] == n) for t in linear)
    found = GRADIENTS.bind(*known_and_cts, names=names, wrt=moving, kept=kept, **params)
    return [None] * len(known) + list(found)


def _by_reference(primitive: Primitive, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """A primitive's results by the reference."""
    whole = unify_shardings(_kinds(primitive, **params), operands, in_parts=False)
    return list(lowering.REFERENCE[Part(primitive.name)](*whole, **params))


def _linear_jvp(
    primitive: Primitive, plain: Any, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """The derivative of what is linear in the operands that follow output and logsumexp."""
    linear = len(primals) - len(params["names"]) - 2
    return higher_jvp(primitive, plain, linear, primals, tangents, **params)


_AVALS = {
    FORWARD: functools.partial(_forward_avals, FORWARD),
    RESIDUALS: _residual_avals,
    TANGENT: functools.partial(_forward_avals, TANGENT),
    GRADIENTS: _gradient_avals,
}

for _primitive, _avals in _AVALS.items():
    define(_primitive, _avals, functools.partial(_batch, _primitive))
for _part, _primitive in BY_PART.items():
    register(_primitive, lowering.Call(_part))
mlir.register_lowering(RESIDUALS, lambda ctx, *operands, **_: operands[-2:])

ad.primitive_jvps[RESIDUALS] = _residuals_jvp
ad.primitive_transposes[TANGENT] = _tangent_transpose
for _primitive in (TANGENT, GRADIENTS):
    ad.primitive_jvps[_primitive] = functools.partial(
        _linear_jvp, _primitive, functools.partial(_by_reference, _primitive)
    )
