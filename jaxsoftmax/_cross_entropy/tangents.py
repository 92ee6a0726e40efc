"""Linear maps from a tangent of the logits to numbers of the rows, as primitives: the derivatives of cross entropy.

Each has residuals and a function of them, `pull`, which is the transposed map. It is plain XLA, one loop over the rows'
elements, but for the loss alone on CUDA, where a kernel does it faster. A primitive saves the 16-bit logits for
the backward pass, where a plain product would save a factor in float32.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxsoftmax._core import checks
from jaxsoftmax._core.lowering import lower_plain, register
from jaxsoftmax._core.sharding import AxisShardings, on_mesh_of, settings_for, unify_varying
from jaxsoftmax._cross_entropy.loss import of_this_device
from jaxsoftmax._softmax import lowering
from jaxsoftmax._softmax.primitives import define, higher_jvp, zeros
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED, Op

Axes = tuple[int, ...]
Numbers = Sequence[jax.Array | None]
Pull = Callable[..., jax.Array]

_OF_LOGITS = Primitive("cross_entropy_tangent")
_OF_GRADIENT = Primitive("row_dot")
TO_LOGITS = Primitive("cross_entropy_cotangent")


def of_logits(*operands: jax.Array, **row: Any) -> list[jax.Array]:
    """The tangents of the loss and, with `stats`, of the logsumexp.

    The operands are logits, labels, the rows' states, a mask if there is one, and the logits' tangent.
    """
    return _OF_LOGITS.bind(*unify_varying(*operands), **row)


def of_gradient(gradient: jax.Array, t: jax.Array, axes: Axes) -> jax.Array:
    """The tangent of what has that gradient: `sum(gradient * t)`, in which 0 times anything is 0.

    A row whose label is no column has a gradient of NaN, of which a cotangent of 0 leaves 0. JAX's own product would
    leave NaN.
    """
    (out,) = _OF_GRADIENT.bind(*unify_varying(gradient, t), axes=axes)
    return out


@jax.custom_jvp
def weigh(weights: jax.Array, loss: jax.Array) -> jax.Array:
    """The loss times its weight, which is NaN where the label is no column."""
    return weights * loss


def _weigh_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    weights, loss = primals
    of_weights, of_loss = tangents
    slopes = [] if type(of_loss) is SymbolicZero else [of_gradient(weights, of_loss, ())]
    if type(of_weights) is not SymbolicZero:
        slopes.append(of_weight(weights, loss, of_weights))
    return weigh(weights, loss), sum(slopes[1:], slopes[0])


weigh.defjvp(_weigh_jvp, symbolic_zeros=True)


def of_weight(weights: jax.Array, loss: jax.Array, t: jax.Array) -> jax.Array:
    """The tangent of the weighted loss for one of the weights."""
    return of_gradient(jnp.where(jnp.isnan(weights), weights, loss), t, ())


def zero_ignored(x: jax.Array, labels: jax.Array, where: Sequence[jax.Array], axes: Axes) -> jax.Array:
    """`x` where it counts, lest what it is elsewhere should come into a derivative, as infinity times 0."""
    counts = labels != IGNORED
    for mask in where:
        counts = counts & (mask | (reference.columns(x, axes) == labels))
    return jnp.where(counts, x, jnp.zeros_like(x))


def _pull_to_logits(
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
    of_loss, of_lse = (*cts, None)[:2]
    known, read = Stats(maximum, total), labels != IGNORED
    of_q = jnp.zeros_like(maximum) if of_loss is None else jnp.where(read, of_loss, 0.0)
    of_p = jnp.where(read, reference.weight_of_p(of_q, log_normalizer(known), z_loss), 0.0)
    if of_lse is not None:
        of_p = of_p + of_lse
        # Such a row is looked at, but no column is its label's.
        labels = jnp.where(read, labels, IGNORED - 1) if all_rows else labels
    mask = where[0] if where else None
    return reference.cross_entropy_slope(
        zero_ignored(x, labels, where, axes), labels, mask, of_p, of_q, known, axes=axes, **row
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
    """The same by a kernel if there is one; it knows no cotangent of the logsumexp, and rounds before a sum."""
    of_loss, *of_lse = cts
    with_lse = any(ct is not None for ct in of_lse)
    if of_loss is not None and not summed and not with_lse:
        return TO_LOGITS.bind(*unify_varying(x, labels, of_loss, *rest), implementation=implementation, **row)
    if implementation == "mosaic_gpu":
        raise checks.no_kernel_of_lse() if with_lse else checks.no_kernel_of_sum()
    return _pull_to_logits(cts, x, labels, *rest, all_rows=all_rows, **row)


def _push(
    *operands: jax.Array, axes: Axes, stats: bool, implementation: str | None = None, **row: Any
) -> list[jax.Array]:
    """Each result is the product of the tangent with what a 1 for that result is pulled back to."""
    *residuals, t = operands
    one = jnp.ones((), reference.accumulator_dtype(t.dtype))
    units = [[one, None], [None, one]] if stats else [[one]]
    return [(_pull_to_logits(unit, *residuals, axes=axes, **row) * t.astype(one.dtype)).sum(axes) for unit in units]


def _pull_to_gradient(cts: Sequence[jax.Array], gradient: jax.Array, **_: Any) -> jax.Array:
    (ct,) = cts
    return of_gradient(gradient, ct, ())


def _products(gradient: jax.Array, t: jax.Array, *, axes: Axes) -> list[jax.Array]:
    dtype = reference.accumulator_dtype(gradient.dtype)
    gradient, t = gradient.astype(dtype), t.astype(dtype)
    # Said so that XLA drops all of it for a cotangent of 1.
    nothing = (t == 0) | ((gradient == 0) & ~jnp.isfinite(t))
    return [jnp.where(nothing, 0.0, gradient * t).sum(axes)]


def _products_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, axes: Axes) -> tuple[Any, Any]:
    """It is linear in either."""
    gradient, t = primals
    out = of_gradient(gradient, t, axes)
    pairs = zip((t, gradient), tangents, strict=True)
    slopes = [of_gradient(other, moved, axes) for other, moved in pairs if type(moved) is not ad.Zero]
    return [out], [sum(slopes[1:], slopes[0]) if slopes else zeros(out)]


@functools.partial(jax.jit, static_argnames=("primitive", "broadcast", "dtype", "params"))
def _pulled(
    cts: Numbers, residuals: Sequence[jax.Array], *, primitive: Primitive, broadcast: Axes, dtype: Any, params: Any
) -> jax.Array:
    """What cotangents are pulled back to, rounded once: one program, also where the backward pass is not compiled."""
    with on_mesh_of([jax.typeof(x) for x in residuals]):
        out = _PULLS[primitive](cts, *residuals, summed=bool(broadcast), **dict(params))
    return (out.sum(broadcast, keepdims=True) if broadcast else out).astype(dtype)


def _transpose(
    primitive: Primitive, cts: Sequence[Any], *operands: Any, axes: Axes, stats: bool = False, **row: Any
) -> list[Any]:
    """What pulls back, summed over where the tangent was broadcast."""
    *residuals, t = operands
    still = [None] * len(residuals)
    if all(type(ct) is ad.Zero for ct in cts):
        return [*still, ad.Zero(t.aval)]
    params = (("axes", axes), *row.items())
    with settings_for(t.aval):
        numbers = [None if type(ct) is ad.Zero else jnp.expand_dims(ct, axes) for ct in cts]
        shape = jnp.broadcast_shapes(*(x.shape for x in [*residuals, *numbers] if x is not None))
        broadcast = tuple(d for d, n in enumerate(t.aval.shape) if n != shape[d])
        out = _pulled(numbers, residuals, primitive=primitive, broadcast=broadcast, dtype=t.aval.dtype, params=params)
    return [*still, out]


def _to_logits(x: jax.Array, labels: jax.Array, weights: jax.Array, *rest: jax.Array, **row: Any) -> jax.Array:
    """The gradient times the weights, from the rows' known states."""
    return _pull_to_logits([weights], x, labels, *rest, all_rows=False, **row).astype(x.dtype)


def _to_logits_across(
    cuts: AxisShardings, inside: jax.Array | None, _: Any, *operands: jax.Array, **row: Any
) -> jax.Array:
    x, labels, weights, maximum, total, *where = operands
    labels, mask, count = of_this_device(cuts, inside, x, labels, where, **row)
    return _to_logits(x, labels, weights, maximum, total, *mask, count=count, **row)


def _without_states(operands: Sequence[Any]) -> list[Any]:
    return [*operands[:3], *operands[5:]]


_PULLS: dict[Primitive, Pull] = {_OF_LOGITS: _pull_loss, _OF_GRADIENT: _pull_to_gradient}

for _primitive, _pushes in ((_OF_LOGITS, _push), (_OF_GRADIENT, _products)):
    define(_primitive, lambda stats=False, **_: ("number",) * (1 + stats), many=True)
    mlir.register_lowering(_primitive, functools.partial(lower_plain, _pushes))
    ad.primitive_transposes[_primitive] = functools.partial(_transpose, _primitive)
ad.primitive_jvps[_OF_LOGITS] = functools.partial(higher_jvp, _OF_LOGITS, _push, True)
ad.primitive_jvps[_OF_GRADIENT] = _products_jvp

# The gradient's kernel finds the states once more, but reads and writes as fast as a copy does. Of a row that is cut,
# as where no kernel takes it, XLA uses those that are known.
COTANGENT = lowering.Computation(
    op=Op.CROSS_ENTROPY_GRADIENT,
    results=lambda **_: ("row",),
    plain=_to_logits,
    whole=lambda rows, *operands, **row: rows(Op.CROSS_ENTROPY_GRADIENT, *_without_states(operands), **row)[0],
    across=_to_logits_across,
    asked=lambda operands, **row: (_without_states(operands), row),
)
define(TO_LOGITS, COTANGENT.results, many=False)
register(TO_LOGITS, COTANGENT)
ad.primitive_jvps[TO_LOGITS] = functools.partial(higher_jvp, TO_LOGITS, _to_logits, False)
