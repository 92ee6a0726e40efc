"""Linear maps from a tangent of the logits to numbers of the rows, as primitives: the derivatives of cross entropy.

Each has residuals and a function of them, `pull`, which is the transposed map. It is plain XLA, one loop over the rows'
elements, but for the loss alone on CUDA, where a kernel does it faster. As primitives the maps keep their residuals
until they are transposed, which the product that they compute would not: that keeps its factor, in the dtype of
accumulation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxsoftmax import _lowering, _sharding
from jaxsoftmax._cross_entropy_rows import of_this_device
from jaxsoftmax._primitives import define
from jaxsoftmax._sharding import unify_varying
from pallas_kernels import hardware, reference
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.problem import IGNORED, Op

Axes = tuple[int, ...]
Numbers = Sequence[jax.Array | None]
Pull = Callable[..., jax.Array]

_OF_LOGITS = Primitive("cross_entropy_tangent")
_OF_GRADIENT = Primitive("row_dot")
TO_LOGITS = Primitive("cross_entropy_cotangent")
_STATES = (3, 4)  # where the rows' states stand among its operands


def of_logits(*operands: jax.Array, **row: Any) -> list[jax.Array]:
    """The tangents of the loss and, with `stats`, of the logsumexp.

    The operands are logits, labels, the rows' states, a mask if there is one, and the logits' tangent.
    """
    return _OF_LOGITS.bind(*unify_varying(*operands), **row)


def of_gradient(gradient: jax.Array, t: jax.Array, axes: Axes) -> jax.Array:
    """The tangent of what has that gradient."""
    (out,) = _OF_GRADIENT.bind(*unify_varying(gradient, t), axes=axes)
    return out


def seen(x: jax.Array, labels: jax.Array, where: Sequence[jax.Array], axes: Axes) -> jax.Array:
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
        seen(x, labels, where, axes), labels, mask, of_p, of_q, known, axes=axes, **row
    )


def _pull_loss(
    cts: Numbers,
    x: jax.Array,
    labels: jax.Array,
    *rest: jax.Array,
    all_rows: bool,
    implementation: str | None,
    **row: Any,
) -> jax.Array:
    """The same by a kernel if there is one; it knows no cotangent of the logsumexp."""
    of_loss, *of_lse = cts
    if of_loss is None or any(ct is not None for ct in of_lse):
        return _pull_to_logits(cts, x, labels, *rest, all_rows=all_rows, **row)
    return TO_LOGITS.bind(*unify_varying(x, labels, of_loss, *rest), implementation=implementation, **row)


def _pull_to_gradient(cts: Sequence[jax.Array], gradient: jax.Array, *, axes: Axes) -> jax.Array:
    (ct,) = cts
    return gradient.astype(reference.accumulator_dtype(gradient.dtype)) * ct


def _push(
    pull: Pull, *operands: jax.Array, axes: Axes, stats: bool = False, implementation: str | None = None, **row: Any
) -> list[jax.Array]:
    """Each result is the product of the tangent with what a 1 for that result is pulled back to."""
    *residuals, t = operands
    one = jnp.ones((), reference.accumulator_dtype(t.dtype))
    units = [[one, None], [None, one]] if stats else [[one]]
    return [(pull(unit, *residuals, axes=axes, **row) * t.astype(one.dtype)).sum(axes) for unit in units]


@functools.partial(jax.jit, static_argnames=("primitive", "broadcast", "dtype", "params"))
def _pulled(
    cts: Numbers, residuals: Sequence[jax.Array], *, primitive: Primitive, broadcast: Axes, dtype: Any, params: Any
) -> jax.Array:
    """What cotangents are pulled back to, rounded once: one program, also where the backward pass is not compiled."""
    # Of a sum, nothing is rounded before it.
    pull = _pull_loss if primitive is _OF_LOGITS and not broadcast else _PULLS[primitive]
    out = pull(cts, *residuals, **dict(params))
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
    with _lowering.x64_for(t.aval):
        numbers = [None if type(ct) is ad.Zero else jnp.expand_dims(ct, axes) for ct in cts]
        shape = jnp.broadcast_shapes(*(x.shape for x in [*residuals, *numbers] if x is not None))
        broadcast = tuple(d for d, n in enumerate(t.aval.shape) if n != shape[d])
        out = _pulled(numbers, residuals, primitive=primitive, broadcast=broadcast, dtype=t.aval.dtype, params=params)
    return [*still, out]


def _jvp(primitive: Primitive, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Linear in the last operand, and in the others whatever the plain function's derivative is."""
    out = primitive.bind(*primals, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if moving == [len(primals) - 1]:
        return out, primitive.bind(*unify_varying(*primals[:-1], tangents[-1]), **params)

    def compute(*moved: jax.Array) -> list[jax.Array]:
        operands = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return _push(_PULLS[primitive], *operands.values(), **params)

    return out, jax.jvp(compute, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def _to_logits(
    x: jax.Array, labels: jax.Array, weights: jax.Array, *rest: jax.Array, implementation: str | None = None, **row: Any
) -> jax.Array:
    """The gradient times the weights, from the rows' known states."""
    return _pull_to_logits([weights], x, labels, *rest, all_rows=False, **row).astype(x.dtype)


def kernel_rule(ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **row: Any) -> Any:
    """Lowers to the gradient's kernel, which finds the states once more but reads and writes as fast as a copy does.

    Of a row that is cut, as where no kernel takes it, XLA uses those that are known.
    """
    avals: Sequence[Any] = ctx.avals_in
    op = Op.CROSS_ENTROPY_GRADIENT
    shapes, device = [aval.shape for aval in _without_states(avals)], hardware.current()
    if (
        implementation == "xla"
        or not _lowering.choose(op, shapes, avals[0].dtype, implementation, device, **row).decision
    ):
        return reference_rule(ctx, *operands, **row)

    def local(*shards: jax.Array) -> list[jax.Array]:
        return [_lowering.run(implementation, op, *_without_states(shards), **row)[0]]

    def exchange(cuts: _sharding.Cuts, *shards: jax.Array) -> list[jax.Array]:
        x, labels, weights, maximum, total, *where = shards
        inside = _sharding.inside(cuts, row["axes"], jnp.broadcast_shapes(*(shard.shape for shard in shards)))
        labels, mask, count = of_this_device(cuts, inside, x, labels, tuple(where), **row)
        return [_to_logits(x, labels, weights, maximum, total, *mask, count=count, **row)]

    return _sharding.lower(ctx, _sharding.RowOp(row["axes"], (True,), local, exchange), *operands)


def _without_states(operands: Sequence[Any]) -> list[Any]:
    return [x for i, x in enumerate(operands) if i not in _STATES]


def _to_logits_jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Higher orders: whatever the plain function's derivative is."""
    out = TO_LOGITS.bind(*primals, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not moving:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())

    def compute(*moved: jax.Array) -> jax.Array:
        return _to_logits(*(dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))).values(), **params)

    return out, jax.jvp(compute, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


_PULLS: dict[Primitive, Pull] = {_OF_LOGITS: _pull_to_logits, _OF_GRADIENT: _pull_to_gradient}

for _primitive, _pull in _PULLS.items():
    define(_primitive, lambda stats=False, **_: (False,) * (1 + stats), many=True)
    mlir.register_lowering(_primitive, functools.partial(_lowering.plain_rule, functools.partial(_push, _pull)))
    ad.primitive_jvps[_primitive] = functools.partial(_jvp, _primitive)
    ad.primitive_transposes[_primitive] = functools.partial(_transpose, _primitive)

define(TO_LOGITS, lambda **_: (True,), many=False)
reference_rule = functools.partial(_lowering.plain_rule, _to_logits, many=False)
mlir.register_lowering(TO_LOGITS, reference_rule)
mlir.register_lowering(TO_LOGITS, kernel_rule, platform="cuda")
ad.primitive_jvps[TO_LOGITS] = _to_logits_jvp
