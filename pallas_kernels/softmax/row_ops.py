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

from pallas_kernels import monoid
from pallas_kernels.monoid import Exp, decay
from pallas_kernels.mosaic import fast_math, vectors
from pallas_kernels.mosaic.row_scalars import of_first_lane
from pallas_kernels.softmax.problem import Op, Problem

Tiles = tuple[jax.Array, ...]  # the operands' tiles, in float32


class RowStats(NamedTuple):
    """A row's maximum (None for operations without one) and its sums; of the gradient, its `factors` too."""

    max: jax.Array | None
    sums: tuple[jax.Array, ...]
    factors: tuple[jax.Array, ...] = ()


class Labelled(NamedTuple):
    """What else is known of a tile's rows: labels and, for the gradient, weights and the labels' logits.

    `held` is 0 where a mask excludes the label, None without a mask.
    """

    labels: jax.Array
    weights: jax.Array | None = None
    logits: jax.Array | None = None
    held: jax.Array | None = None


def fills(problem: Problem) -> tuple[float, ...]:
    """What each operand reads as outside the row: what adds nothing, before it is scaled."""
    if not has_max(problem.op):
        return (0.0, 0.0)
    return (-math.copysign(math.inf, problem.scale), 0.0)[: problem.operands]


def exp_for(problem: Problem) -> Exp:
    """The `exp` of differences of the problem's logits, which are in its unit."""
    return fast_math.exp_for(problem.dtype, problem.unit)


def has_max(op: Op) -> bool:
    """Whether the operation exponentiates its first operand."""
    return op is not Op.SOFTMAX_TANGENT


def decaying(problem: Problem) -> tuple[bool, ...]:
    """For each sum, whether it is relative to the maximum."""
    if has_total(problem):
        return (True, False)
    return {
        Op.SOFTMAX_TANGENT: (False,),
        Op.LOG_SOFTMAX_TANGENT: (True, True),
        Op.LOG_SOFTMAX_COTANGENT: (True, False),
    }.get(problem.op, (True,))


def has_total(problem: Problem) -> bool:
    """Whether the cross entropy's logits themselves are summed too."""
    return problem.op.has_labels and problem.smoothing != 0


def quantities(problem: Problem) -> int:
    """Numbers in a row's statistics."""
    return has_max(problem.op) + len(decaying(problem))


def terms(op: Op, tiles: Tiles, maximum: jax.Array | None, exp: Exp) -> Tiles:
    """What is summed over the row; `maximum` has the tiles' shape."""
    first, *others = tiles
    if maximum is None:
        return (first * others[0],)
    weights = decay(first, maximum, exp=exp)
    if op is Op.LOG_SOFTMAX_TANGENT:
        return weights, weights * others[0]
    return (weights, *others)


def combine(problem: Problem, a: Sequence[jax.Array], b: Sequence[jax.Array], exp: Exp) -> tuple[jax.Array, ...]:
    """The statistics of two pieces of a row together, one array per quantity."""
    if not has_max(problem.op):
        return tuple(x + y for x, y in zip(a, b, strict=True))
    decays = decaying(problem)
    relative = lambda stats: (stats[0], *(s for s, d in zip(stats[1:], decays, strict=True) if d))
    maximum, *merged = monoid.combine(relative(a), relative(b), exp=exp)
    rest = iter(merged)
    return maximum, *(next(rest) if d else x + y for x, y, d in zip(a[1:], b[1:], decays, strict=True))


def merge(problem: Problem, partial: Sequence[jax.Array], layout: Any, exp: Exp, tile: vectors.Tile) -> RowStats:
    """The row's statistics, once for each row of `tile`, from partial ones along axis 0, one array per quantity.

    `layout` is that of `partial`. All threads have the same: of sums of weighted parts, one lane's.
    """
    if not has_max(problem.op):
        return RowStats(None, tuple(_repeat(part.sum(0), tile) for part in partial))
    maximum, *sums = partial
    relative = [part for part, decays in zip(sums, decaying(problem), strict=True) if decays]
    members = maximum.shape
    spread = lambda number: plgpu.layout_cast(jnp.broadcast_to(number, members), layout)
    total, *merged = monoid.merge_over((maximum, *relative), 0, exp=exp, spread=spread)
    rest = (of_first_lane(_repeat(each, tile), tile) for each in merged)
    plain = lambda part: _repeat(part.sum(0), tile)
    both = (next(rest) if decays else plain(part) for part, decays in zip(sums, decaying(problem), strict=True))
    return RowStats(_repeat(total, tile), tuple(both))


def _repeat(number: jax.Array, tile: vectors.Tile) -> jax.Array:
    return plgpu.layout_cast(jnp.broadcast_to(number, (tile.rows,)), tile.layout.reduce(1))


def as_numbers(stats: RowStats) -> list[jax.Array]:
    """The maximum, if there is one, and the sums."""
    return [number for number in (stats.max, *stats.sums) if number is not None]


def in_one(problem: Problem, numbers: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """A row's numbers as results, which are not counted in the problem's unit."""
    state = monoid.scaled(monoid.Stats(*numbers[:2]), problem.unit, exp=fast_math.exp_32bit)
    return *state, *(_times_unit(problem, total) for total in numbers[2:])


def _times_unit(problem: Problem, x: jax.Array) -> jax.Array:
    return x if problem.unit == 1.0 else x * problem.unit


def numbers(stats: RowStats, labelled: Labelled | None) -> tuple[jax.Array, ...]:
    """The whole row's statistics: neutral for rows that are not read."""
    assert stats.max is not None
    own = (stats.max, *stats.sums)
    if labelled is None:
        return own
    neutral = zip(own, (0.0, 1.0, 0.0)[: len(own)], strict=True)
    return tuple(jnp.where(labelled.labels >= 0, x, jnp.full_like(x, other)) for x, other in neutral)


def with_factors(problem: Problem, stats: RowStats, labelled: Labelled | None) -> RowStats:
    """The whole row's statistics, with what the gradient multiplies the probabilities by and takes off them.

    The maximum stays as it is: weights that the sum had and the result has are then computed once.
    """
    if labelled is None or labelled.weights is None:
        return stats
    maximum, total, *_ = numbers(stats, labelled)
    weights = labelled.weights * problem.scale
    weights = jnp.where(labelled.labels >= 0, weights, jnp.zeros_like(weights))
    slope = weights
    if problem.z_loss:
        lse = _times_unit(problem, maximum) + fast_math.log(total)
        slope = weights * (1.0 + (2.0 * problem.z_loss) * lse)
    smooth = (weights * (problem.smoothing / problem.cols),) if has_total(problem) else ()
    return RowStats(stats.max, stats.sums, (slope * (1.0 / total), *smooth))


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
    if op is Op.CROSS_ENTROPY_GRADIENT:
        out = decay(first, each(stats.max), exp=exp) * each(stats.factors[0])
        for factor in stats.factors[1:]:
            out = out - each(factor)
        return _bent(problem, out, first)
    if op is Op.LOG_SOFTMAX:
        return _times_unit(problem, first - each(stats.max)) - each(fast_math.log(stats.sums[0]))
    (t,) = others
    if op is Op.LOG_SOFTMAX_TANGENT:
        out = t - each(stats.sums[1] * (1.0 / stats.sums[0]))
    else:
        weights = decay(first, each(stats.max), exp=exp)
        out = t - weights * each(stats.sums[1] * (1.0 / stats.sums[0]))
    return out if problem.scale == 1.0 else out * problem.scale


def at_labels(problem: Problem, stats: RowStats, labelled: Labelled, exp: Exp) -> jax.Array:
    """The gradient at the rows' labels."""
    assert stats.max is not None
    assert labelled.weights is not None
    assert labelled.logits is not None
    out = decay(labelled.logits, stats.max, exp=exp) * stats.factors[0]
    if labelled.held is not None:
        out = jnp.where(labelled.held != 0.0, out, jnp.zeros_like(out))
    for factor in stats.factors[1:]:
        out = out - factor
    out = out - labelled.weights * (problem.scale * (1.0 - problem.smoothing))
    return _bent(problem, out, labelled.logits)


def _bent(problem: Problem, out: jax.Array, z: jax.Array) -> jax.Array:
    """`out` times the derivative of the soft cap, whose result is `z`, in its unit the `tanh`."""
    return out if problem.soft_cap is None else out * (1.0 - z * z)


def outside(op: Op) -> float:
    """The output where a mask does not hold."""
    return -jnp.inf if op is Op.LOG_SOFTMAX else 0.0
