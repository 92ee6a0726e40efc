"""The online softmax of a warpgroup's rows: how a tile of logits joins it, and what it comes to in the end."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import monoid
from pallas_kernels.attention import gather, scores
from pallas_kernels.attention.configs import WARPGROUP_ROWS, ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.attention.scores import ROW, WGMMA
from pallas_kernels.mosaic import fast_math
from pallas_kernels.mosaic.fast_math import LOG2E

# What others add to logits to hide keys is larger. The weights are `exp2(x * log2(e) - m)` in one fused operation, with
# `m` rounded: in a row that has nothing else the difference is no more near 0 from here on, and the power overflows.
_HIDDEN = -(2.0**27)
PARTIAL_COLUMNS = 8  # over which a row's sum stays spread until its end: no shuffles on the way
Rescale = Callable[[jax.Array], jax.Array]


class State(NamedTuple):
    """`sum` and `out` are relative to `max`, in powers of two. `max` may lie below the largest logit by some slack."""

    max: jax.Array
    sum: jax.Array
    out: jax.Array


def empty(value_dim: int) -> State:
    """No keys seen."""
    rows = WARPGROUP_ROWS
    m = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), ROW)
    zeros = (plgpu.layout_cast(jnp.zeros((rows, n), jnp.float32), WGMMA) for n in (PARTIAL_COLUMNS, value_dim))
    return State(m, *zeros)


def fold(
    problem: Attention,
    config: ForwardConfig,
    state: State,
    x: jax.Array,
    *,
    first: bool = False,
    halfway: Callable[[], None] = lambda: None,
) -> tuple[State, jax.Array, Rescale]:
    """The state with the maximum and sum of a tile's logits, their weights, and what `out` still needs.

    `first`: no keys were seen before. `halfway` is called where half of the weights are still to be computed.

    This is `monoid.combine`, but the weights are taken against the common maximum at once: no second factor.
    """
    factor = LOG2E * (problem.scale if scores.folds_scale(problem) else 1.0)
    # Fewer columns where that is all that needs them, and heads of 256 spill 8 bytes.
    highest = _fold_columns(jnp.maximum, x, PARTIAL_COLUMNS if config.early else 32)

    def weighed(x: jax.Array, maximum: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        if problem.batch_invariant:
            # The same bits in a walk's first tile, in a later one, and where a neighbour's maximum has grown: ptxas
            # contracts the product in some of these places only.
            less = functools.partial(gather.scaled_less, factor)
            weights = monoid.decay(x, by_row(maximum, x), exp=jnp.exp2, less=less)
        else:
            weights = monoid.decay(x * factor, by_row(maximum, x), exp=jnp.exp2)
        return total + _fold_columns(jnp.add, weights, PARTIAL_COLUMNS), weights

    def joined(x: jax.Array) -> tuple[jax.Array, ...]:
        maximum = highest.max(axis=1) * factor
        if problem.bias is not None:
            maximum = jnp.where(maximum < _HIDDEN, -jnp.inf, maximum)
        if config.slack:
            # NaN is not below anything, and stays.
            maximum = jnp.where(maximum <= state.max + float(config.slack), state.max, maximum)
        else:
            maximum = jnp.maximum(state.max, maximum)
        decay = monoid.decay(state.max, maximum, exp=jnp.exp2)
        return maximum, decay, *weighed(x, maximum, state.sum * by_row(decay, state.sum))

    if config.early:
        early, rest = x[:, : config.early], x[:, config.early :]
        if first:
            grows, (maximum, decay, total, weights) = None, joined(early)
        else:
            grows = gather.any_above(highest, factor, state.max + float(config.slack))
            # Its exponentials begin while it is not yet known, and are computed again where a maximum has grown.
            same = state.max, jnp.ones_like(state.max), *lax.optimization_barrier(weighed(early, state.max, state.sum))
            maximum, decay, total, weights = lax.cond(grows, lambda: joined(early), lambda: same)
        half = rest.shape[1] // 2 // PARTIAL_COLUMNS * PARTIAL_COLUMNS
        total, more = weighed(rest[:, :half], maximum, total)
        halfway()
        total, others = weighed(rest[:, half:], maximum, total)
        weights = jnp.concatenate([weights, more, others], axis=1)
    else:
        maximum, decay, total, weights = joined(x)
        halfway()
        grows = gather.any_row(decay != 1.0) if config.slack else None

    def rescale(out: jax.Array) -> jax.Array:
        decayed = lambda out: out * by_row(decay, out)
        return decayed(out) if grows is None else lax.cond(grows, decayed, lambda out: out, out)

    return State(maximum, total, state.out), weights.astype(problem.dtype), rescale


def finish(state: State, sink: jax.Array | None, hidden: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row: whether it saw nothing (or is `hidden`), what `out` is to be multiplied by, and the logsumexp."""
    m, total = state.max, state.sum.sum(axis=1)
    unseen = m == -jnp.inf
    factor = jnp.ones_like(m)
    if sink is not None:
        of_sink: Any = (jnp.full_like(m, sink * LOG2E), jnp.ones_like(m), jnp.zeros_like(m))
        m, total, factor = monoid.combine((m, total, factor), of_sink, exp=jnp.exp2)
    if hidden is not None:
        unseen |= hidden
    lse = jnp.where(unseen, jnp.full_like(m, -jnp.inf), m / LOG2E + fast_math.log(total))
    return unseen, factor / total, lse


def by_row(x: jax.Array, like: jax.Array) -> jax.Array:
    """One number a row, for all columns of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def _fold_columns(operation: Callable[..., jax.Array], x: jax.Array, columns: int) -> jax.Array:
    """A tree over groups of `columns` columns, where a reduction of Mosaic's is one long chain."""
    parts = [x[:, start : start + columns] for start in range(0, x.shape[1], columns)]
    while len(parts) > 1:
        parts = [operation(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]
