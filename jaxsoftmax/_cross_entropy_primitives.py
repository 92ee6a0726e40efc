"""The derivatives of cross entropy: which of two primitives runs is decided by whether one is asked for.

`cross_entropy` reads the logits and gives the loss. Its JVP rule binds `cross_entropy_gradient` in its place, which
writes the weighted gradient in the same pass; the derivative is a product with it, of which the transposition leaves
the gradient itself where the cotangent is 1. With the logsumexp as a result too, whose cotangent is not known then,
the derivative is XLA's, from the logits and the logsumexp.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from jaxsoftmax import _lowering
from jaxsoftmax._primitives import BY_OP, bind
from pallas_kernels import reference
from pallas_kernels.monoid import Stats
from pallas_kernels.problem import IGNORED, Op


def losses(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Each row's loss of logits, labels, weights and perhaps a mask; and its logsumexp if `return_lse`."""
    return bind(Op.CROSS_ENTROPY, *operands, weighted=True, **params)


def _zero(x: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _loss_jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    *,
    return_lse: bool,
    weighted: bool,
    axes: tuple[int, ...],
    implementation: str | None,
    **row: Any,
) -> tuple[Any, Any]:
    """The loss, its logsumexp if that is a result, and their tangents."""
    x, labels, weights, *where = primals
    t, _, of_weights = tangents[:3]
    if not weighted:
        weights, of_weights = jnp.ones_like(weights), _zero(weights)
    still = type(t) is ad.Zero
    params = {"axes": axes, "implementation": implementation, **row}
    lse: list[jax.Array] = []
    if still or return_lse:
        loss, *lse = bind(Op.CROSS_ENTROPY, *primals, return_lse=return_lse, weighted=False, **params)
        slopes = [] if isinstance(t, ad.Zero) else _pushed(x, labels, weights, where, lse[0], t, axes=axes, **row)
    else:
        loss, gradient = bind(Op.CROSS_ENTROPY_GRADIENT, x, labels, weights, *where, **params)
        slopes = [(gradient.astype(loss.dtype) * t.astype(loss.dtype)).sum(axes)]
    slopes = slopes or [_zero(y) for y in (loss, *lse)]
    if not isinstance(of_weights, ad.Zero):
        by_weight = of_weights.squeeze(axes) * loss
        slopes[0] = by_weight if still else slopes[0] + by_weight
    return [weights.squeeze(axes) * loss, *lse], slopes


def _pushed(
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    where: Sequence[jax.Array],
    lse: jax.Array,
    t: jax.Array,
    *,
    axes: tuple[int, ...],
    **row: Any,
) -> list[jax.Array]:
    """The tangents of loss and logsumexp."""
    lse, t = jnp.expand_dims(lse, axes), t.astype(lse.dtype)
    # A row whose logsumexp is not finite has no probabilities.
    known = Stats(lse, jnp.where(jnp.isfinite(lse), 1.0, jnp.nan))
    mask, of_p = where[0] if where else None, reference.weight_of_p(weights, lse, row["z_loss"])

    def along(labels: jax.Array, of_p: jax.Array, of_q: jax.Array) -> jax.Array:
        seen = _seen(x, labels, where, axes)
        slope = reference.cross_entropy_slope(seen, labels, mask, of_p, of_q, known, axes=axes, **row)
        return (slope * t).sum(axes)

    of_lse = along(jnp.maximum(labels, 0), jnp.ones_like(weights), jnp.zeros_like(weights))
    return [along(labels, of_p, weights), of_lse]


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


def _without_gradient(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Where only the loss is used, as in what `jax.checkpoint` runs first, nothing else is computed."""
    eqn = rest[-1]  # JAX 0.12 says before it which operands are alive
    of_loss, of_gradient = used
    if of_loss and not of_gradient:
        params = {**eqn.params, "return_lse": False, "weighted": False}
        eqn = eqn.replace(primitive=BY_OP[Op.CROSS_ENTROPY], params=params, outvars=eqn.outvars[:1])
    return [any(used)] * len(eqn.invars), eqn if any(used) else None


ad.primitive_jvps[BY_OP[Op.CROSS_ENTROPY]] = _loss_jvp
ad.primitive_jvps[BY_OP[Op.CROSS_ENTROPY_GRADIENT]] = _gradient_jvp
pe.dce_rules[BY_OP[Op.CROSS_ENTROPY_GRADIENT]] = _without_gradient
