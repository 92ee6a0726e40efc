"""States once for every kernel how each operation computes a row: sums over the row, then the result.

A kernel moves data and calls these: the row's maximum where the operation has one, then `summands`, whose sums over
the row are its statistics, then `result`. A sum of exponentials is relative to the maximum and is rescaled when that
rises, as in online softmax; `rescaled` says which sums are. The table `OPERATIONS`, at the end, has a row for each.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import monoid
from pallas_kernels.monoid import Exp, decay
from pallas_kernels.mosaic import fast_math, ptx, vectors
from pallas_kernels.mosaic.row_scalars import of_first_lane
from pallas_kernels.softmax.problem import Op, Problem

Tiles = tuple[jax.Array, ...]  # the operands' tiles, in float32


class RowStats(NamedTuple):
    """A row's maximum (None for operations without one) and its sums; of the gradient, its `factors` too."""

    max: jax.Array | None
    sums: tuple[jax.Array, ...]
    factors: tuple[jax.Array, ...] = ()


class LabelOperands(NamedTuple):
    """The per-row operands of a tile: labels and, for the gradient, weights and the labels' logits.

    `held` is 0 where a mask excludes the label, None without a mask. `columns` are the labels, and negative where a row
    is ignored or its label is in another part of the row.
    """

    labels: jax.Array
    weights: jax.Array | None = None
    logits: jax.Array | None = None
    held: jax.Array | None = None
    columns: jax.Array | None = None


def oob_fill(problem: Problem) -> tuple[float, ...]:
    """Returns the value of each operand outside the row, which adds nothing to any sum; it is not scaled yet."""
    if not has_max(problem.op):
        return (0.0, 0.0)
    return (-math.copysign(math.inf, problem.scale), 0.0)[: problem.operands]


def exp_for(problem: Problem) -> Exp:
    """Returns the `exp` of differences of the problem's logits, which are in its unit."""
    return fast_math.exp_for(problem.dtype, problem.unit)


def has_max(op: Op) -> bool:
    """Says whether the operation exponentiates its first operand."""
    return OPERATIONS[op].has_max


def rescaled(problem: Problem) -> tuple[bool, ...]:
    """Says for each sum whether it is relative to the maximum."""
    return (True, False) if has_total(problem) else OPERATIONS[problem.op].rescaled


def has_total(problem: Problem) -> bool:
    """Says whether the cross entropy's logits themselves are summed too."""
    return problem.op.has_labels and not problem.op.takes_stats and problem.smoothing != 0


def num_values(problem: Problem) -> int:
    """Says how many values a row's statistics have."""
    return has_max(problem.op) + len(rescaled(problem))


def summands(op: Op, tiles: Tiles, maximum: jax.Array | None, exp: Exp) -> Tiles:
    """Returns the terms that are summed over the row; `maximum` has the tiles' shape."""
    first, *others = tiles
    return OPERATIONS[op].summands(first if maximum is None else decay(first, maximum, exp=exp), *others)


def combine(problem: Problem, a: Sequence[jax.Array], b: Sequence[jax.Array], exp: Exp) -> tuple[jax.Array, ...]:
    """Returns the statistics of two pieces of a row together, one array per value."""
    if not has_max(problem.op):
        return tuple(x + y for x, y in zip(a, b, strict=True))
    decays = rescaled(problem)
    relative = lambda stats: (stats[0], *(s for s, d in zip(stats[1:], decays, strict=True) if d))
    maximum, *merged = monoid.combine(relative(a), relative(b), exp=exp)
    rest = iter(merged)
    return maximum, *(next(rest) if d else x + y for x, y, d in zip(a[1:], b[1:], decays, strict=True))


def merge(
    problem: Problem, partial: Sequence[jax.Array], layout: ptx.Layout, exp: Exp, tile: vectors.RegisterTile
) -> RowStats:
    """Returns the row's statistics, once for each row of `tile`, from partial ones along axis 0, one array per value.

    `layout` is that of `partial`. All threads get the same values: rescaled sums, which lanes may round unlike, are
    those of one lane.
    """
    if not has_max(problem.op):
        return RowStats(None, tuple(_repeat(part.sum(0), tile) for part in partial))
    maximum, *sums = partial
    relative = [part for part, decays in zip(sums, rescaled(problem), strict=True) if decays]
    like = lambda value: plgpu.layout_cast(jnp.broadcast_to(value, maximum.shape), layout)
    total, *merged = monoid.merge_over((maximum, *relative), 0, exp=exp, like=like)
    rest = (of_first_lane(_repeat(each, tile), tile) for each in merged)
    plain = lambda part: _repeat(part.sum(0), tile)
    both = (next(rest) if decays else plain(part) for part, decays in zip(sums, rescaled(problem), strict=True))
    return RowStats(_repeat(total, tile), tuple(both))


def _repeat(value: jax.Array, tile: vectors.RegisterTile) -> jax.Array:
    return plgpu.layout_cast(jnp.broadcast_to(value, (tile.rows,)), tile.layout.reduce(1))


def values(stats: RowStats) -> list[jax.Array]:
    """Lists the maximum, if there is one, and the sums."""
    return [value for value in (stats.max, *stats.sums) if value is not None]


def unscale(problem: Problem, values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Converts a row's statistics from the problem's unit to that of the results."""
    state = monoid.scaled(monoid.Stats(*values[:2]), problem.unit, exp=fast_math.exp_32bit)
    return *state, *(_times_unit(problem, total) for total in values[2:])


def _times_unit(problem: Problem, x: jax.Array) -> jax.Array:
    return x if problem.unit == 1.0 else x * problem.unit


def neutral_if_ignored(stats: RowStats, label_operands: LabelOperands | None) -> tuple[jax.Array, ...]:
    """Returns the whole row's maximum and sums; ignored rows, which are not read, get 0, 1 and 0."""
    assert stats.max is not None
    own = (stats.max, *stats.sums)
    if label_operands is None:
        return own
    neutral = zip(own, (0.0, 1.0, 0.0)[: len(own)], strict=True)
    return tuple(ptx.where(label_operands.labels >= 0, x, jnp.full_like(x, other)) for x, other in neutral)


def with_factors(problem: Problem, stats: RowStats, label_operands: LabelOperands | None) -> RowStats:
    """Adds the gradient's factors to a row's statistics: those of the probabilities, and the smoothed label's share.

    The maximum stays as it is, so that the compiler computes weights once that both the sum and the result have.
    """
    if label_operands is None or label_operands.weights is None:
        return stats
    maximum, total, *_ = neutral_if_ignored(stats, label_operands)
    weights = label_operands.weights * problem.scale
    weights = ptx.where(label_operands.labels >= 0, weights, jnp.zeros_like(weights))
    slope = weights
    if problem.z_loss:
        lse = _times_unit(problem, maximum) + fast_math.log(total)
        slope = weights * (1.0 + (2.0 * problem.z_loss) * lse)
    smooth = (weights * (problem.smoothing / problem.cols),) if has_total(problem) else ()
    return RowStats(stats.max, stats.sums, (slope * (1.0 / total), *smooth))


def given(problem: Problem, label_operands: LabelOperands, rest: Sequence[jax.Array]) -> RowStats:
    """Returns the statistics and factors that come as operands: `rest` follows the weights."""
    prob_factor, maximum, total, count = rest
    weights = label_operands.weights
    assert weights is not None
    read = label_operands.labels >= 0
    factors = [prob_factor * problem.scale * (1.0 / total)]
    if problem.smoothing:
        factors.append(weights * (problem.scale * problem.smoothing) * (1.0 / count))
    maximum = maximum if problem.unit == 1.0 else maximum * (1.0 / problem.unit)
    maximum, *factors = (ptx.where(read, x, jnp.zeros_like(x)) for x in (maximum, *factors))
    return RowStats(maximum, (), tuple(factors))


class RowTile(NamedTuple):
    """A tile whose result is computed: its operands, its rows' statistics, and how a row's value is repeated in it."""

    problem: Problem
    operands: Tiles
    stats: RowStats
    broadcast: Callable[[jax.Array], jax.Array]

    @property
    def maximum(self) -> jax.Array:
        assert self.stats.max is not None
        return self.broadcast(self.stats.max)

    @property
    def weights(self) -> jax.Array:
        """`exp(x - max)`."""
        return decay(self.operands[0], self.maximum, exp=exp_for(self.problem))


def result(tile: RowTile) -> jax.Array:
    """Returns the operation's output for a tile."""
    of_tile = OPERATIONS[tile.problem.op].result
    assert of_tile is not None, f"{tile.problem.op} gives numbers of rows alone"
    return of_tile(tile)


def at_labels(problem: Problem, stats: RowStats, label_operands: LabelOperands, exp: Exp) -> jax.Array:
    """Returns the gradient at the rows' labels."""
    assert stats.max is not None
    assert label_operands.weights is not None
    assert label_operands.logits is not None
    out = decay(label_operands.logits, stats.max, exp=exp) * stats.factors[0]
    if label_operands.held is not None:
        out = ptx.where(label_operands.held != 0.0, out, jnp.zeros_like(out))
    for factor in stats.factors[1:]:
        out = out - factor
    out = out - label_operands.weights * (problem.scale * (1.0 - problem.smoothing))
    return _soft_cap_grad(problem, out, label_operands.logits)


def _soft_cap_grad(problem: Problem, out: jax.Array, z: jax.Array) -> jax.Array:
    """Multiplies `out` by the derivative of the soft cap; `z`, the capped logit in its unit, is the `tanh`."""
    return out if problem.soft_cap is None else out * (1.0 - z * z)


def masked_output(op: Op) -> float:
    """Returns the output where the mask excludes an element."""
    return OPERATIONS[op].masked_output


def _softmax(tile: RowTile) -> jax.Array:
    return tile.weights * tile.broadcast(1.0 / tile.stats.sums[0])


def _log_softmax(tile: RowTile) -> jax.Array:
    distance = _times_unit(tile.problem, tile.operands[0] - tile.maximum)
    return distance - tile.broadcast(fast_math.log(tile.stats.sums[0]))


def _softmax_tangent(tile: RowTile) -> jax.Array:
    """Computes `J t = scale * y * (t - sum(y * t))`."""
    y, t = tile.operands
    return _times_scale(tile.problem, y * (t - tile.broadcast(tile.stats.sums[0])))


def _log_softmax_tangent(tile: RowTile) -> jax.Array:
    """Computes `J t = scale * (t - sum(p * t))`."""
    total, of_t = tile.stats.sums
    return _times_scale(tile.problem, tile.operands[1] - tile.broadcast(of_t * (1.0 / total)))


def _log_softmax_cotangent(tile: RowTile) -> jax.Array:
    """Computes `J^T t = scale * (t - p * sum(t))`."""
    p, (total, of_t) = tile.weights, tile.stats.sums
    return _times_scale(tile.problem, tile.operands[1] - p * tile.broadcast(of_t * (1.0 / total)))


def _cross_entropy_gradient(tile: RowTile) -> jax.Array:
    """Computes `dx = a * p - b * smoothing / cols`; `at_labels` overwrites the label's column."""
    out = tile.weights * tile.broadcast(tile.stats.factors[0])
    for factor in tile.stats.factors[1:]:
        out = out - tile.broadcast(factor)
    return _soft_cap_grad(tile.problem, out, tile.operands[0])


def _times_scale(problem: Problem, x: jax.Array) -> jax.Array:
    return x if problem.scale == 1.0 else x * problem.scale


class RowOp(NamedTuple):
    """Says how an operation computes a row."""

    result: Callable[[RowTile], jax.Array] | None  # a tile's output; None if only numbers of rows are results
    summands: Callable[..., Tiles] = lambda weights, *others: (weights, *others)  # `weights`: exp(x - max)
    rescaled: tuple[bool, ...] = (True,)  # for each sum, whether it is relative to the maximum
    has_max: bool = True  # whether the first operand is exponentiated; otherwise it is the first of `summands`
    masked_output: float = 0.0  # where the mask excludes an element


# Kernels refuse an operation that is not here.
OPERATIONS = {
    Op.SOFTMAX: RowOp(_softmax),
    Op.LOG_SOFTMAX: RowOp(_log_softmax, masked_output=-math.inf),
    Op.STATS: RowOp(None),
    Op.SOFTMAX_TANGENT: RowOp(_softmax_tangent, lambda y, t: (y * t,), (False,), has_max=False),
    Op.LOG_SOFTMAX_TANGENT: RowOp(_log_softmax_tangent, lambda weights, t: (weights, weights * t), (True, True)),
    Op.LOG_SOFTMAX_COTANGENT: RowOp(_log_softmax_cotangent, rescaled=(True, False)),
    Op.CROSS_ENTROPY: RowOp(None),
    Op.CROSS_ENTROPY_GRADIENT: RowOp(_cross_entropy_gradient),
    Op.CROSS_ENTROPY_COTANGENT: RowOp(_cross_entropy_gradient),
}
