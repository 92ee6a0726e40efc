"""What each operation computes of a row, told once for every rung: sums over the row, and the result from them.

A rung moves data and calls these: the row's maximum where the operation has one, then `terms`, whose sums over the
row are its statistics, then `result`. A sum that is a weight times something shrinks when the maximum rises (it is the
output component of the online-softmax state); `decaying` says which do.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import elementary, monoid, mosaic
from pallas_kernels.monoid import Exp, decay
from pallas_kernels.problem import Op, Problem

Tiles = tuple[jax.Array, ...]  # the operands' tiles, in float32


class RowStats(NamedTuple):
    """A row's maximum (None for operations without one) and its sums."""

    max: jax.Array | None
    sums: tuple[jax.Array, ...]


def fills(problem: Problem) -> tuple[float, ...]:
    """What each operand reads as outside the row: what adds nothing, before it is scaled."""
    if not has_max(problem.op):
        return (0.0, 0.0)
    return (-math.copysign(math.inf, problem.scale), 0.0)[: problem.operands]


def has_max(op: Op) -> bool:
    """Whether the operation exponentiates its first operand."""
    return op is not Op.SOFTMAX_TANGENT


def decaying(op: Op) -> tuple[bool, ...]:
    """For each sum, whether it is relative to the maximum."""
    return {
        Op.SOFTMAX_TANGENT: (False,),
        Op.LOG_SOFTMAX_TANGENT: (True, True),
        Op.LOG_SOFTMAX_COTANGENT: (True, False),
    }.get(op, (True,))


def quantities(op: Op) -> int:
    """Numbers in a row's statistics."""
    return has_max(op) + len(decaying(op))


def terms(op: Op, tiles: Tiles, maximum: jax.Array | None, exp: Exp) -> Tiles:
    """What is summed over the row; `maximum` has the tiles' shape."""
    first, *others = tiles
    if maximum is None:
        return (first * others[0],)
    weights = decay(first, maximum, exp=exp)
    if op is Op.LOG_SOFTMAX_TANGENT:
        return weights, weights * others[0]
    return (weights, *others)


def combine(op: Op, a: Sequence[jax.Array], b: Sequence[jax.Array], exp: Exp) -> tuple[jax.Array, ...]:
    """The statistics of two pieces of a row together, one array per quantity."""
    if not has_max(op):
        return tuple(x + y for x, y in zip(a, b, strict=True))
    relative = lambda stats: (stats[0], *(s for s, d in zip(stats[1:], decaying(op), strict=True) if d))
    maximum, *merged = monoid.combine(relative(a), relative(b), exp=exp)
    rest = iter(merged)
    return maximum, *(next(rest) if d else x + y for x, y, d in zip(a[1:], b[1:], decaying(op), strict=True))


def merge(op: Op, partial: Sequence[jax.Array], layout: Any, exp: Exp, tile: mosaic.Tile) -> RowStats:
    """The row's statistics, once for each row of `tile`, from partial ones along axis 0, one array per quantity.

    `layout` is that of `partial`.
    """
    if not has_max(op):
        return RowStats(None, tuple(_repeat(part.sum(0), tile) for part in partial))
    maximum, *sums = partial
    relative = [part for part, decays in zip(sums, decaying(op), strict=True) if decays]
    members = maximum.shape
    spread = lambda number: plgpu.layout_cast(jnp.broadcast_to(number, members), layout)
    total, *merged = monoid.merge_over((maximum, *relative), 0, exp=exp, spread=spread)
    rest = iter(merged)
    both = (next(rest) if decays else part.sum(0) for part, decays in zip(sums, decaying(op), strict=True))
    return RowStats(_repeat(total, tile), tuple(_repeat(each, tile) for each in both))


def _repeat(number: jax.Array, tile: mosaic.Tile) -> jax.Array:
    return plgpu.layout_cast(jnp.broadcast_to(number, (tile.rows,)), tile.layout.reduce(1))


def result(
    problem: Problem, tiles: Tiles, stats: RowStats, exp: Exp, each: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The operation's output for a tile; `each` spreads a row's number over the tile."""
    op, (first, *others) = problem.op, tiles
    if stats.max is None:
        out = first * (others[0] - each(stats.sums[0]))
        return out if problem.scale == 1.0 else out * problem.scale
    if op is Op.SOFTMAX:
        return decay(first, each(stats.max), exp=exp) * each(1.0 / stats.sums[0])
    if op is Op.LOG_SOFTMAX:
        return (first - each(stats.max)) - each(elementary.log(stats.sums[0]))
    (t,) = others
    if op is Op.LOG_SOFTMAX_TANGENT:
        out = t - each(stats.sums[1] * (1.0 / stats.sums[0]))
    else:
        weights = decay(first, each(stats.max), exp=exp)
        out = t - weights * each(stats.sums[1] * (1.0 / stats.sums[0]))
    return out if problem.scale == 1.0 else out * problem.scale


def outside(op: Op) -> float:
    """The output where a mask does not hold."""
    return -jnp.inf if op is Op.LOG_SOFTMAX else 0.0
