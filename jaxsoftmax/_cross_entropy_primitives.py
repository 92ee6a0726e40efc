"""The derivatives of cross entropy: which of two primitives runs is decided by whether one is asked for.

`cross_entropy` reads the logits and gives the loss. Its JVP rule binds `cross_entropy_gradient` in its place, which
writes the weighted gradient in the same pass; the derivative is a product with it, of which the transposition leaves
the gradient itself where the cotangent is 1. With the logsumexp as a result too, whose cotangent is not known then,
the derivative is XLA's, from the logits and the logsumexp.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxsoftmax import _lowering
from jaxsoftmax._primitives import BY_OP, bind
from pallas_kernels import reference
from pallas_kernels.monoid import Stats
from pallas_kernels.problem import IGNORED, Op


def losses(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Each row's loss of logits, labels, weights and perhaps a mask; and its logsumexp if `return_lse`."""
    return bind(Op.CROSS_ENTROPY, *operands, **params)


def _zero(x: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _loss_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, return_lse: bool, axes: tuple[int, ...], **params: Any
) -> tuple[Any, Any]:
    """The loss, its logsumexp if that is a result, and their tangents."""
    x, labels, weights, *where = primals
    t, _, of_weights = tangents[:3]
    still, unweighted = type(t) is ad.Zero, type(of_weights) is ad.Zero
    found = functools.partial(bind, Op.CROSS_ENTROPY, axes=axes, return_lse=return_lse, **params)
    if still and unweighted:
        out = found(*primals)
        return out, [_zero(y) for y in out]
    gradient, lse = None, []
    if still or return_lse:
        loss, *lse = found(x, labels, jnp.ones_like(weights), *where)
    else:
        loss, gradient = bind(Op.CROSS_ENTROPY_GRADIENT, *primals, axes=axes, **params)
    factor = weights.squeeze(axes)
    slopes = [_zero(loss), *(_zero(y) for y in lse)]
    if gradient is not None:
        slopes = [(gradient.astype(loss.dtype) * t.astype(loss.dtype)).sum(axes)]
    elif not still:
        params.pop("implementation")
        slopes = _pushed(x, labels, weights, *where, *lse, t, axes=axes, **params)
    if not unweighted:
        by_weight = of_weights.squeeze(axes) * loss
        slopes[0] = by_weight if type(slopes[0]) is ad.Zero else slopes[0] + by_weight
    return [factor * loss, *lse], slopes


def _pushed(*operands: jax.Array, axes: tuple[int, ...], z_loss: float, **row: Any) -> list[jax.Array]:
    """The tangents of loss and logsumexp, which keep no more than the operands for their transposition."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tangents(x: jax.Array, labels: jax.Array, weights: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        *where, lse, t = rest
        lse, t = jnp.expand_dims(lse, axes), t.astype(lse.dtype)
        # A row whose logsumexp is not finite has no probabilities.
        known = Stats(lse, jnp.where(jnp.isfinite(lse), 1.0, jnp.nan))
        mask, of_p = where[0] if where else None, weights * (1.0 + 2.0 * z_loss * lse)

        def slope(labels: jax.Array, of_p: jax.Array, of_q: jax.Array) -> jax.Array:
            seen = _seen(x, labels, where, axes)
            return reference.cross_entropy_slope(seen, labels, mask, of_p, of_q, known, axes=axes, **row)

        of_loss = slope(labels, of_p, weights)
        of_lse = slope(jnp.maximum(labels, 0), jnp.ones_like(weights), jnp.zeros_like(weights))
        return [(of_loss * t).sum(axes), (of_lse * t).sum(axes)]

    return tangents(*operands)


def _seen(x: jax.Array, labels: jax.Array, where: Sequence[jax.Array], axes: tuple[int, ...]) -> jax.Array:
    """`x` where it counts, lest what it is elsewhere should come into a derivative, as infinity times 0."""
    seen = labels != IGNORED
    for mask in where:
        seen = seen & (mask | (reference.columns(x, axes) == labels))
    return jnp.where(seen, x, jnp.zeros_like(x))


def _gradient_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, implementation: str | None, **row: Any
) -> tuple[Any, Any]:
    """Higher orders: whatever the reference's derivative is."""
    out = bind(Op.CROSS_ENTROPY_GRADIENT, *primals, implementation=implementation, **row)
    moving = [i for i in (0, 2) if type(tangents[i]) is not ad.Zero]
    if not moving:
        return out, [_zero(y) for y in out]

    def compute(*moved: jax.Array) -> list[jax.Array]:
        operands = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        x, labels, weights, *where = operands.values()
        x = _seen(x, labels, where, row["axes"])
        return _lowering.compute_reference(Op.CROSS_ENTROPY_GRADIENT, x, labels, weights, *where, **row)

    return out, jax.jvp(compute, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


ad.primitive_jvps[BY_OP[Op.CROSS_ENTROPY]] = _loss_jvp
ad.primitive_jvps[BY_OP[Op.CROSS_ENTROPY_GRADIENT]] = _gradient_jvp
