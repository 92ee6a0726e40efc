"""The primitives of cross entropy. Differentiation and weights decide which of them run.

`cross_entropy` reads the logits and gives the loss. Without weights its derivative is a linear primitive of the logits
and the rows' states, so that its transposition writes the gradient times any cotangent: two reads and one write of the
logits in all. Weights are a cotangent that is known beforehand. With them the JVP rule binds `cross_entropy_gradient`
instead, which writes the weighted gradient in the same pass. The derivative is then a product with that gradient, and
its transposition is the gradient itself where the cotangent is 1.

The linear primitives map a tangent of the logits to one number a row. Each has residuals and a function of them,
`pull`, which is the transposed map. XLA computes it in one loop over the rows' elements; for the loss alone on CUDA a
kernel is faster. A primitive saves the 16-bit logits for the backward pass; a plain product would save a factor in
float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import partial_eval as pe

from jaxsoftmax._core import checks
from jaxsoftmax._core.lowering import lower_plain
from jaxsoftmax._core.primitives import checked, higher_jvp, zeros
from jaxsoftmax._core.sharding import Columns, on_mesh_of, settings_for, unify_shardings, unify_varying
from jaxsoftmax._cross_entropy import loss as row_losses
from jaxsoftmax._softmax.primitives import BY_OP, Computation, bind, by_reference, define_over_rows, implement
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED, Op
from pallas_kernels.types import accumulator_dtype

NAME = "softmax_cross_entropy_with_integer_labels"

_OF_LSE = (
    "no kernel takes a cotangent of the logsumexp that return_lse gives. Pass implementation=None to use XLA for this "
    "gradient, z_loss for a penalty on the logsumexp, or jax.lax.stop_gradient(lse)."
)
_OF_SUM = (
    "the logits are broadcast over rows, and no kernel sums their gradients. Pass implementation=None to use XLA for "
    "these."
)

Axes = tuple[int, ...]
Tangent = jax.Array | ad.Zero
Numbers = Sequence[jax.Array | None]
Pull = Callable[..., jax.Array]

_OF_LOGITS = Primitive("cross_entropy_tangent")
_OF_GRADIENT = Primitive("row_dot")
_WEIGH = Primitive("weigh")


def of_logits(*operands: jax.Array, **row: Any) -> list[jax.Array]:
    """Returns the tangents of the loss and, with `stats`, of the logsumexp.

    The operands are logits, labels, the rows' states, a mask if there is one, and the logits' tangent.
    """
    return _OF_LOGITS.bind(*unify_varying(*operands), **row)


def of_gradient(gradient: jax.Array, t: jax.Array, axes: Axes) -> jax.Array:
    """Returns the tangent of a loss from its gradient: `sum(gradient * t)`, in which 0 times NaN is 0.

    A row whose label is no column has a gradient of NaN. With a cotangent of 0 the result is 0; JAX's own product would
    give NaN.
    """
    (out,) = _OF_GRADIENT.bind(*unify_varying(gradient, t), axes=axes)
    return out


def weigh(weights: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns the loss times its weight; the weight is NaN where the label is no column."""
    (out,) = _WEIGH.bind(*unify_varying(weights, loss), axes=())
    return checked(out)


def _weigh_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, axes: Axes
) -> tuple[Sequence[jax.Array], Sequence[Tangent]]:
    """Returns `w * L` and `w * dL + L * dw`."""
    weights, loss = primals
    of_weights, of_loss = tangents
    out = _WEIGH.bind(weights, loss, axes=axes)
    slopes = [] if isinstance(of_loss, ad.Zero) else [of_gradient(weights, of_loss, axes)]
    if not isinstance(of_weights, ad.Zero):
        slopes.append(of_weight(weights, loss, of_weights))
    return out, [_added(slopes, out[0])]


def _added(slopes: Sequence[jax.Array], out: jax.Array) -> Tangent:
    """Adds up tangents of `out`, of which there may be none."""
    return sum(slopes[1:], slopes[0]) if slopes else zeros(out)


def of_weight(weights: jax.Array, loss: jax.Array, t: jax.Array) -> jax.Array:
    """Returns the tangent of the weighted loss for one of the weights."""
    return of_gradient(jnp.where(jnp.isnan(weights), weights, loss), t, ())


def zero_ignored(x: jax.Array, labels: jax.Array, where: Sequence[jax.Array], axes: Axes) -> jax.Array:
    """Returns `x`, and 0 where it does not count, so that no infinity times 0 enters a derivative."""
    counts = labels != IGNORED
    for mask in where:
        counts = counts & (mask | (reference.columns(x, axes) == labels))
    return jnp.where(counts, x, jnp.zeros_like(x))


def factors(
    state: Stats, labels: jax.Array, of_loss: jax.Array | None, of_lse: jax.Array | None, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """Returns a and b of the rows' gradients `a * softmax - b * onehot(label)`."""
    read = labels != IGNORED
    label_factor = jnp.zeros_like(state.sum) if of_loss is None else jnp.where(read, of_loss, 0.0)
    prob_factor = jnp.where(read, reference.prob_factor_of(label_factor, log_normalizer(state), z_loss), 0.0)
    return prob_factor if of_lse is None else prob_factor + of_lse, label_factor


def _vjp_logits(
    cts: Numbers,
    x: jax.Array,
    labels: jax.Array,
    maximum: jax.Array,
    total: jax.Array,
    *where: jax.Array,
    axes: Axes,
    all_rows: bool,
    z_loss: float,
    **row: Any,
) -> jax.Array:
    """Returns `dx = (a * softmax(z) - b * onehot(label)) * dz/dx`, with a and b of `factors`."""
    of_loss, of_lse = (*cts, None)[:2]
    state = Stats(maximum, total)
    prob_factor, label_factor = factors(state, labels, of_loss, of_lse, z_loss)
    if of_lse is not None and all_rows:
        # Such a row is read if its logsumexp is used, but no column is its label.
        labels = jnp.where((labels != IGNORED) | (of_lse == 0), labels, IGNORED - 1)
    mask = where[0] if where else None
    return reference.cross_entropy_slope(
        zero_ignored(x, labels, where, axes), labels, mask, prob_factor, label_factor, state, axes=axes, **row
    )


def _pull_loss(
    cts: Numbers,
    x: jax.Array,
    labels: jax.Array,
    *rest: jax.Array,
    all_rows: bool,
    implementation: str | None,
    summed: bool,
    **row: Any,
) -> jax.Array:
    """Computes the logits' gradient by a kernel if one can: none takes an lse's cotangent or sums rows."""
    of_loss, *of_lse = cts
    with_lse = any(ct is not None for ct in of_lse)
    if of_loss is not None and not summed and not with_lse:
        return _TO_LOGITS.bind(*unify_varying(x, labels, of_loss, *rest), implementation=implementation, **row)
    if implementation == "mosaic_gpu":
        raise checks.no_kernel(NAME, _OF_LSE if with_lse else _OF_SUM)
    return _vjp_logits(cts, x, labels, *rest, all_rows=all_rows, **row)


def _losses_jvp(
    *operands: jax.Array, axes: Axes, stats: bool, implementation: str | None = None, **row: Any
) -> list[jax.Array]:
    """Each result is the product of the tangent with the pullback of 1."""
    *residuals, t = operands
    one = jnp.ones((), accumulator_dtype(t.dtype))
    units = [[one, None], [None, one]] if stats else [[one]]
    return [(_vjp_logits(unit, *residuals, axes=axes, **row) * t.astype(one.dtype)).sum(axes) for unit in units]


def _pull_to_gradient(cts: Sequence[jax.Array], gradient: jax.Array, **_: object) -> jax.Array:
    (ct,) = cts
    return of_gradient(gradient, ct, ())


def _products(gradient: jax.Array, t: jax.Array, *, axes: Axes) -> list[jax.Array]:
    dtype = accumulator_dtype(gradient.dtype)
    gradient, t = gradient.astype(dtype), t.astype(dtype)
    # In this form XLA drops all of it for a cotangent of 1.
    nothing = (t == 0) | ((gradient == 0) & ~jnp.isfinite(t))
    return [jnp.where(nothing, 0.0, gradient * t).sum(axes)]


def _products_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, axes: Axes
) -> tuple[Sequence[jax.Array], Sequence[Tangent]]:
    """Returns `sum(g * t)` and `sum(t * dg) + sum(g * dt)`."""
    gradient, t = primals
    out = of_gradient(gradient, t, axes)
    pairs = zip((t, gradient), tangents, strict=True)
    slopes = [of_gradient(other, moved, axes) for other, moved in pairs if not isinstance(moved, ad.Zero)]
    return [out], [_added(slopes, out)]


@functools.partial(jax.jit, static_argnames=("primitive", "broadcast", "dtype", "params"))
def _chunk_gradients(
    cts: Numbers, residuals: Sequence[jax.Array], *, primitive: Primitive, broadcast: Axes, dtype: np.dtype, params: Any
) -> jax.Array:
    """Returns the pullback of cotangents, rounded once; it is one program even if the backward pass is not compiled."""
    with on_mesh_of([jax.typeof(x) for x in residuals]):
        residuals = unify_shardings(*residuals, everywhere=True)
        out = _PULLS[primitive](cts, *residuals, summed=bool(broadcast), **dict(params))
    return (out.sum(broadcast, keepdims=True) if broadcast else out).astype(dtype)


def _transpose(
    primitive: Primitive, cts: Sequence[Any], *operands: Any, axes: Axes, stats: bool = False, **row: Any
) -> list[Any]:
    """Returns the transposition: the pullback, summed over the axes along which the tangent was broadcast."""
    *residuals, t = operands
    still = [None] * len(residuals)
    if all(type(ct) is ad.Zero for ct in cts):
        return [*still, ad.Zero(t.aval)]
    params = (("axes", axes), *row.items())
    with settings_for(t.aval):
        numbers = [None if type(ct) is ad.Zero else jnp.expand_dims(ct, axes) for ct in cts]
        shape = jnp.broadcast_shapes(*(x.shape for x in [*residuals, *numbers] if x is not None))
        broadcast = tuple(d for d, n in enumerate(t.aval.shape) if n != shape[d])
        out = _chunk_gradients(
            numbers, residuals, primitive=primitive, broadcast=broadcast, dtype=t.aval.dtype, params=params
        )
    return [*still, checked(out)]


def _to_logits(x: jax.Array, labels: jax.Array, weights: jax.Array, *rest: jax.Array, **row: Any) -> jax.Array:
    """Returns the gradient times the weights, from the rows' known states."""
    return _vjp_logits([weights], x, labels, *rest, all_rows=False, **row).astype(x.dtype)


def _to_logits_across(columns: Columns, run_row_op: row_losses.RunRowOp, *operands: jax.Array, **row: Any) -> jax.Array:
    x, labels, weights, maximum, total, *where = operands
    labels, mask, count = row_losses.of_this_device(columns, x, labels, where, **row)
    return row_losses.gradient_of_part(run_row_op, x, labels, weights, Stats(maximum, total), count, mask, **row)


def _without_states[X](operands: Sequence[X]) -> list[X]:
    return [*operands[:3], *operands[5:]]


def losses(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Returns each row's loss and, with `stats`, its state; operands may have weights (`weighted`) and a mask."""
    loss, *states = bind(Op.CROSS_ENTROPY, *operands, **params)
    return [checked(loss), *states]


def _loss_jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Tangent],
    *,
    weighted: bool,
    stats: bool,
    all_rows: bool,
    **params: Any,
) -> tuple[Sequence[jax.Array], Sequence[Tangent]]:
    """Returns losses, and states if `stats`, with their tangents.

    With `z` the logits, `p = softmax(z)`, `lse = logsumexp(z)` and `q` the labels' distribution:

        L  = lse - sum(q * z) + z_loss * lse^2
        dL = sum(((1 + 2 * z_loss * lse) * p - q) * dz)
        dlse = sum(p * dz)
    """
    if weighted:
        return _weighted_jvp(primals, tangents, **params)
    out = losses(*primals, weighted=False, stats=True, all_rows=all_rows, **params)
    results = out if stats else out[:1]
    if isinstance(tangents[0], ad.Zero):
        return results, zeros(results)
    x, labels, *where = primals
    states = [jnp.expand_dims(number, params["axes"]) for number in out[1:]]
    slopes = of_logits(x, labels, *states, *where, tangents[0], stats=stats, all_rows=all_rows, **params)
    # The state is the number exp(max) * sum. Its logarithm is the logsumexp, with whose tangent the maximum stands for
    # it: the sum then counts as a constant.
    return results, [*slopes, zeros(out[2])] if stats else slopes


def _weighted_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], **params: Any
) -> tuple[Sequence[jax.Array], Sequence[Tangent]]:
    """Returns `w * L` and `sum(g * dx) + L * dw`, where `g = w * dL/dx` is written with the loss."""
    x, labels, weights, *where = primals
    t, _, of_weights, *_ = tangents
    axes, slopes = params["axes"], []
    weight = weights.squeeze(axes)
    if isinstance(t, ad.Zero):
        (loss,) = losses(x, labels, *where, **_LOSS_ONLY, **params)
    else:
        loss, gradient = bind(Op.CROSS_ENTROPY_GRADIENT, *primals, **params)
        slopes.append(of_gradient(gradient, t, axes))
    if not isinstance(of_weights, ad.Zero):
        slopes.append(of_weight(weight, loss, of_weights.squeeze(axes)))
    value = weigh(weight, loss)
    return [value], [_added(slopes, value)]


_gradient_plain = functools.partial(row_losses.cross_entropy_gradient, row_losses.label_logit, by_reference)


def _gradient(x: jax.Array, labels: jax.Array, weights: jax.Array, *where: jax.Array, **row: Any) -> list[jax.Array]:
    """Returns loss and gradient, for higher derivatives; a weight of NaN gives a NaN gradient for any cotangent."""
    x, wrong = zero_ignored(x, labels, where, row["axes"]), jnp.isnan(weights)
    finite = jnp.where(wrong, 1.0, weights)
    loss, gradient = _gradient_plain(x, labels, finite, *where, **row)
    return [loss, of_gradient(jnp.where(wrong, weights, 1.0), gradient, ()).astype(gradient.dtype)]


def _without_gradient(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Computes only the loss where only that is used, as in the forward pass of `jax.checkpoint`."""
    eqn = rest[-1]  # JAX 0.12 passes a list of live operands first
    uses_loss, uses_gradient = used
    needed, primitive = [any(used)] * len(eqn.invars), BY_OP[Op.CROSS_ENTROPY]
    if uses_loss and not uses_gradient:
        x, labels, _, *where = eqn.invars
        params = {**eqn.params, **_LOSS_ONLY}
        (loss,) = primitive.abstract_eval(*(v.aval for v in (x, labels, *where)), **params)[0]
        # Where only weights are mapped, several weights share a row's loss.
        if loss == eqn.outvars[0].aval:
            needed[2] = False
            eqn = eqn.replace(primitive=primitive, params=params, invars=[x, labels, *where], outvars=eqn.outvars[:1])
    return needed, eqn if any(used) else None


# The loss by itself, without its weight.
_LOSS_ONLY = {"weighted": False, "stats": False, "all_rows": False}

BY_OP[Op.CROSS_ENTROPY] = implement(
    Op.CROSS_ENTROPY.value,
    Computation(
        op=Op.CROSS_ENTROPY,
        called=NAME,
        results=lambda stats, **_: ("reduced",) * (3 if stats else 1),
        plain=functools.partial(row_losses.cross_entropy, row_losses.label_logit, by_reference),
        whole=functools.partial(row_losses.cross_entropy, row_losses.label_logit_gathered),
        across=row_losses.cross_entropy_across,
        kernel_args=row_losses.kernel_args,
    ),
    states=(1, 2),
)
ad.primitive_jvps[BY_OP[Op.CROSS_ENTROPY]] = _loss_jvp

BY_OP[Op.CROSS_ENTROPY_GRADIENT] = _GRADIENT = implement(
    Op.CROSS_ENTROPY_GRADIENT.value,
    Computation(
        op=Op.CROSS_ENTROPY_GRADIENT,
        called=f"the derivative of {NAME}",
        results=lambda **_: ("reduced", "full"),
        plain=_gradient_plain,
        whole=functools.partial(row_losses.cross_entropy_gradient, row_losses.label_logit_gathered),
        across=row_losses.cross_entropy_gradient_across,
    ),
)
ad.primitive_jvps[_GRADIENT] = functools.partial(higher_jvp, _GRADIENT, _gradient, 0)
pe.dce_rules[_GRADIENT] = _without_gradient

# The gradient's kernel computes the states again, but reads and writes as fast as a copy does. Another
# kernel uses the known states of a sharded row, as XLA does where no kernel takes it.
_TO_LOGITS = implement(
    "cross_entropy_cotangent",
    Computation(
        op=Op.CROSS_ENTROPY_GRADIENT,
        called=f"the derivative of {NAME}",
        results=lambda **_: ("full",),
        plain=_to_logits,
        whole=lambda run_row_op, *operands, **row: run_row_op(
            Op.CROSS_ENTROPY_GRADIENT, *_without_states(operands), **row
        )[0],
        across=_to_logits_across,
        kernel_args=lambda operands, **row: (_without_states(operands), row),
    ),
    many=False,
)
ad.primitive_jvps[_TO_LOGITS] = functools.partial(higher_jvp, _TO_LOGITS, _to_logits, 0)

_PULLS: dict[Primitive, Pull] = {_OF_LOGITS: _pull_loss, _OF_GRADIENT: _pull_to_gradient}

for _primitive, _jvp_of in ((_OF_LOGITS, _losses_jvp), (_OF_GRADIENT, _products)):
    define_over_rows(_primitive, lambda stats=False, **_: ("reduced",) * (1 + stats))
    mlir.register_lowering(_primitive, functools.partial(lower_plain, _jvp_of))
    ad.primitive_transposes[_primitive] = functools.partial(_transpose, _primitive)
ad.primitive_jvps[_OF_LOGITS] = functools.partial(higher_jvp, _OF_LOGITS, _losses_jvp, 1)
ad.primitive_jvps[_OF_GRADIENT] = _products_jvp

define_over_rows(_WEIGH, lambda **_: ("reduced",))
mlir.register_lowering(_WEIGH, functools.partial(lower_plain, lambda weights, loss, axes: [weights * loss]))
ad.primitive_jvps[_WEIGH] = _weigh_jvp
