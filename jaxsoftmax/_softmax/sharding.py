"""Rows sharded over devices: the monoid merges their shards' states by one all-reduce.

Each function computes one device's part of an operation whose reduced axes are split over the mesh axes `names`.
All that crosses the wire is a few numbers per row and device, in one exchange.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.sharding import AxisShardings, Names, names_of
from pallas_kernels.monoid import Stats, merge_over
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import Op

LocalStats = Callable[..., Stats]


def _by_stats(
    whole: Callable[..., jax.Array], names: Names, local_stats: LocalStats, *operands: jax.Array, **row: Any
) -> jax.Array:
    """This device's columns of a function of an element and its row's state."""
    return whole(*operands, **row, known=stats(names, local_stats, *operands, **row))


def stats(names: Names, local_stats: LocalStats, *operands: jax.Array, **row: Any) -> Stats:
    """The states of the whole rows."""
    return merge_over(Stats(*all_gather(names, *local_stats(*operands, **row))), 0)


def softmax_tangent(names: Names, local_stats: LocalStats, y: jax.Array, t: jax.Array, **row: Any) -> jax.Array:
    """This device's columns of softmax's (co)tangent."""
    slope = jax.lax.psum(reference.row_dot(y, t, axes=row["axes"]), names)
    return reference.softmax_tangent(y, t, **row, slope=slope)


def log_softmax_tangent(
    names: Names, local_stats: LocalStats, x: jax.Array, t: jax.Array, *, axes: tuple[int, ...], scale: float
) -> jax.Array:
    """This device's columns of log_softmax's tangent."""
    local = local_stats(x, axes=axes, scale=scale)
    slope = reference.stats_tangent(x, None, t, local.max, axes=axes, scale=scale)
    maximum, total, slope = all_gather(names, *local, slope)
    merged = merge_over(Stats(maximum[..., None], jnp.stack([total, slope], -1)), 0)
    slope = merged.sum[..., 1] / merged.sum[..., 0]
    # The scale is in the slope already.
    return reference.log_softmax_tangent(x, reference.logits(t, scale), axes=axes, slope=slope).astype(t.dtype)


def log_softmax_cotangent(names: Names, local_stats: LocalStats, x: jax.Array, t: jax.Array, **row: Any) -> jax.Array:
    """This device's columns of log_softmax's cotangent."""
    local = local_stats(x, **row)
    maximum, total, incoming = all_gather(names, *local, t.astype(local.sum.dtype).sum(row["axes"]))
    known = merge_over(Stats(maximum, total), 0)
    return reference.log_softmax_cotangent(x, t, **row, known=known, total=incoming.sum(0))


def all_gather(names: Names, *parts: jax.Array) -> list[jax.Array]:
    """The parts of all devices, stacked in front, by one all-reduce of their bits, each device's in its own slot."""
    words = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in parts]
    mine = jnp.concatenate([word.ravel() for word in words])
    slots = jnp.zeros((jax.lax.axis_size(names), mine.size), mine.dtype).at[jax.lax.axis_index(names)].set(mine)
    ends = list(itertools.accumulate(word.size for word in words))
    everyone = jnp.split(jax.lax.psum(slots, names), ends[:-1], -1)
    return [
        jax.lax.bitcast_convert_type(all_words.reshape(-1, *word.shape), part.dtype)
        for all_words, word, part in zip(everyone, words, parts, strict=True)
    ]


def across(
    op: Op, shardings: AxisShardings, inside: jax.Array | None, rows: Callable[..., Any], *shards: jax.Array, **row: Any
) -> jax.Array | Stats:
    """This device's part of an operation; columns that are not `inside` are padding."""
    return BY_OP[op](names_of(shardings), functools.partial(rows, Op.STATS), *_neutral(op, inside, shards), **row)


def _neutral(op: Op, inside: jax.Array | None, shards: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The operands with neutral elements in place of padding."""
    if inside is None:
        return shards
    first, *others = shards
    fill = 0.0 if op is Op.SOFTMAX_TANGENT else -jnp.inf
    first = jnp.where(inside, first, jnp.asarray(fill, first.dtype))
    return [first, *(x if x.dtype == bool else jnp.where(inside, x, jnp.zeros_like(x)) for x in others)]


BY_OP: dict[Op, Callable[..., jax.Array | Stats]] = {
    Op.SOFTMAX: functools.partial(_by_stats, reference.softmax),
    Op.LOG_SOFTMAX: functools.partial(_by_stats, reference.log_softmax),
    Op.STATS: stats,
    Op.SOFTMAX_TANGENT: softmax_tangent,
    Op.LOG_SOFTMAX_TANGENT: log_softmax_tangent,
    Op.LOG_SOFTMAX_COTANGENT: log_softmax_cotangent,
}
