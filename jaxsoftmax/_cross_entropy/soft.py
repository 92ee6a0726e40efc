"""Cross entropy with probabilities: `loss = sum(t * (max + log(sum) - x))` from the state that a kernel finds.

A loss that XLA computes alone is a primitive of its own, `loss = -sum(t * log_softmax(x))`, which XLA reads once. The
primitive's derivative is that of the same formula where all of the operands stay in a GPU's cache, and otherwise that
of the loss from the states.
"""

import functools
import math
from collections.abc import Sequence
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxsoftmax._core.lowering import lower_plain
from jaxsoftmax._core.primitives import zeros
from jaxsoftmax._core.sharding import unify_varying
from jaxsoftmax._cross_entropy.primitives import Tangent
from jaxsoftmax._softmax.primitives import bind, define_over_rows
from pallas_kernels.monoid import Stats
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import Op
from pallas_kernels.types import accumulator_dtype

Axes = tuple[int, ...]


class _Params(TypedDict):
    axes: Axes
    implementation: str | None
    function: str


# XLA reads rows of so many columns once; from more elements on, if rows are longer than that, a kernel is faster.
_FUSED_COLS, _FUSED_ELEMENTS, _SHORT_COLS = 16384, 2**22, 32

_IN_ONE_PASS = Primitive("softmax_cross_entropy")


def losses(
    function: str, implementation: str | None, axes: Axes, x: jax.Array, target: jax.Array, *mask: jax.Array
) -> jax.Array:
    """Gives each row's loss, from operands of one rank."""
    params: _Params = {"axes": axes, "implementation": implementation, "function": function}
    shape = jnp.broadcast_shapes(x.shape, target.shape)
    cols = math.prod(shape[d] for d in axes)
    small = cols <= _SHORT_COLS or _is_small(x, target)
    if not mask and implementation != "mosaic_gpu" and cols <= _FUSED_COLS and small:
        (loss,) = _IN_ONE_PASS.bind(*unify_varying(x, target), **params)
        return loss
    return _by_states(x, target, *mask, **params)


def _is_small(x: jax.Array, target: jax.Array) -> bool:
    elements = math.prod(jnp.broadcast_shapes(x.shape, target.shape))
    return isinstance(elements, int) and elements <= _FUSED_ELEMENTS


def _by_states(x: jax.Array, target: jax.Array, *mask: jax.Array, **params: Unpack[_Params]) -> jax.Array:
    return _from_states(x, target, Stats(*bind(Op.STATS, x, *mask, scale=1.0, **params)), mask, params["axes"])


@functools.partial(jax.jit, static_argnames="axes", inline=True)
def _from_states(x: jax.Array, target: jax.Array, stats: Stats, mask: Sequence[jax.Array], axes: Axes) -> jax.Array:
    """Computes losses from the rows' states, in one program, of which debug_infs does not see empty rows' states."""
    wide = accumulator_dtype(x.dtype)
    target = target.astype(wide)
    absent = _absent(x, target) | ~mask[0] if mask else _absent(x, target)
    # An excluded element and its derivative may have any value; the logarithm of an empty row is undefined.
    total = jnp.log(jnp.where(stats.sum == 0, 1.0, stats.sum))
    maximum = jnp.expand_dims(stats.max, axes)
    # A loss of NaN needs a gradient of NaN: where all logits are -inf, the distance would give -1.
    factor = jnp.where(absent | (maximum != -jnp.inf), 1.0, jnp.nan).astype(wide)
    distance = jnp.where(absent, 0.0, maximum - factor * x.astype(wide))
    return jnp.where(absent, 0.0, target * (distance + jnp.expand_dims(total, axes))).sum(axes)


def _in_one_pass(x: jax.Array, target: jax.Array, *, axes: Axes, **_: object) -> list[jax.Array]:
    return [_alone(_formula(x, target, axes))]


def _formula(x: jax.Array, target: jax.Array, axes: Axes) -> jax.Array:
    y = reference.log_softmax(x.astype(accumulator_dtype(x.dtype)), axes=axes)
    # An element without a share has a derivative of 0 by its target too.
    return (-target.astype(y.dtype) * jnp.where(_absent(x, target), 0.0, y)).sum(axes)


def _alone(loss: jax.Array) -> jax.Array:
    """Keeps XLA from making one sum of the sum over a row and the mean over rows, for which it would write all `y`."""
    return jax.lax.optimization_barrier(loss)


def _absent(x: jax.Array, target: jax.Array) -> jax.Array:
    """Whether an element has no share in the loss."""
    return (target == 0) & (x == -jnp.inf)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], **params: Unpack[_Params]
) -> tuple[list[jax.Array], list[Tangent]]:
    """Computes long rows' losses from the states, of which their derivative is made."""
    wrt = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    is_small = _is_small(*primals)

    def loss(*moved: jax.Array) -> jax.Array:
        operands = (dict(enumerate(primals)) | dict(zip(wrt, moved, strict=True))).values()
        return _formula(*operands, axes=params["axes"]) if is_small else _by_states(*operands, **params)

    if not wrt:
        out = _IN_ONE_PASS.bind(*primals, **params)
        return out, zeros(out)
    value, slope = jax.jvp(loss, [primals[i] for i in wrt], [tangents[i] for i in wrt])
    return _IN_ONE_PASS.bind(*primals, **params) if is_small else [value], [slope]


define_over_rows(_IN_ONE_PASS, lambda **_: ("reduced",))
mlir.register_lowering(_IN_ONE_PASS, functools.partial(lower_plain, _in_one_pass))
ad.primitive_jvps[_IN_ONE_PASS] = _jvp
