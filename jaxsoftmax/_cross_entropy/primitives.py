"""The derivatives of cross entropy: which primitives run is decided by whether one is asked for, and by the weights.

`cross_entropy` reads the logits and gives the loss. Without weights its derivative is a linear primitive of the logits
and the rows' states, so that its transposition writes the gradient times any cotangent: two reads and one write of the
logits in all. With weights, which are the cotangent that is known beforehand, the JVP rule binds
`cross_entropy_gradient` in its place, which writes the weighted gradient in the same pass; the derivative is a product
with it, of which the transposition leaves the gradient itself where the cotangent is 1.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from jaxsoftmax._cross_entropy.tangents import of_gradient, of_logits, of_weight, weigh, zero_ignored
from jaxsoftmax._softmax import lowering
from jaxsoftmax._softmax.primitives import BY_OP, bind, higher_jvp, zeros
from pallas_kernels.softmax.problem import Op


def losses(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Each row's loss and, with `stats`, its state; of logits, labels, weights if it is `weighted`, perhaps a mask."""
    return bind(Op.CROSS_ENTROPY, *operands, **params)


def _loss_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, weighted: bool, stats: bool, all_rows: bool, **params: Any
) -> tuple[Any, Any]:
    """What the primitive gives, and its tangents."""
    if weighted:
        return _weighted_jvp(primals, tangents, **params)
    out = losses(*primals, weighted=False, stats=True, all_rows=all_rows, **params)
    results = out if stats else out[:1]
    if type(tangents[0]) is ad.Zero:
        return results, zeros(results)
    x, labels, *where = primals
    known = [jnp.expand_dims(number, params["axes"]) for number in out[1:]]
    slopes = of_logits(x, labels, *known, *where, tangents[0], stats=stats, all_rows=all_rows, **params)
    # The state is the number exp(max) * sum. Its logarithm is the logsumexp, with whose tangent the maximum stands for
    # it: the sum then counts as a constant.
    return results, [*slopes, zeros(out[2])] if stats else slopes


def _weighted_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """The loss times its weight, and what either's tangent gives."""
    x, labels, weights, *where = primals
    t, _, of_weights, *_ = tangents
    axes, slopes = params["axes"], []
    weight = weights.squeeze(axes)
    if type(t) is ad.Zero:
        (loss,) = losses(x, labels, *where, **_LOSS_ONLY, **params)
    else:
        loss, gradient = bind(Op.CROSS_ENTROPY_GRADIENT, *primals, **params)
        slopes.append(of_gradient(gradient, t, axes))
    if type(of_weights) is not ad.Zero:
        slopes.append(of_weight(weight, loss, of_weights.squeeze(axes)))
    value = weigh(weight, loss)
    return [value], [sum(slopes[1:], slopes[0]) if slopes else zeros(value)]


def _gradient(x: jax.Array, labels: jax.Array, weights: jax.Array, *where: jax.Array, **row: Any) -> list[jax.Array]:
    x, wrong = zero_ignored(x, labels, where, row["axes"]), jnp.isnan(weights)
    plain, finite = lowering.BY_OP[Op.CROSS_ENTROPY_GRADIENT].plain, jnp.where(wrong, 1.0, weights)
    loss, gradient = plain(x, labels, finite, *where, **row)
    return [loss, of_gradient(jnp.where(wrong, weights, 1.0), gradient, ()).astype(gradient.dtype)]


def _without_gradient(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Where only the loss is used, as in what `jax.checkpoint` runs first, nothing else is computed."""
    eqn = rest[-1]  # JAX 0.12 says before it which operands are alive
    of_loss, of_gradient = used
    needed, primitive = [any(used)] * len(eqn.invars), BY_OP[Op.CROSS_ENTROPY]
    if of_loss and not of_gradient:
        x, labels, _, *where = eqn.invars
        params = {**eqn.params, **_LOSS_ONLY}
        (loss,) = primitive.abstract_eval(*(v.aval for v in (x, labels, *where)), **params)[0]
        # Weights may tell apart rows of which there is one loss, where nothing else is mapped.
        if loss == eqn.outvars[0].aval:
            needed[2] = False
            eqn = eqn.replace(primitive=primitive, params=params, invars=[x, labels, *where], outvars=eqn.outvars[:1])
    return needed, eqn if any(used) else None


# The loss by itself, without its weight.
_LOSS_ONLY = {"weighted": False, "stats": False, "all_rows": False}

ad.primitive_jvps[BY_OP[Op.CROSS_ENTROPY]] = _loss_jvp
_GRADIENT = BY_OP[Op.CROSS_ENTROPY_GRADIENT]
ad.primitive_jvps[_GRADIENT] = functools.partial(higher_jvp, _GRADIENT, _gradient, False)
pe.dce_rules[_GRADIENT] = _without_gradient
