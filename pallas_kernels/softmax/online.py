"""Kernel 3, online softmax: any row length, two reads and one write.

Previous kernel: block, in staged.py (the row is resident on chip). Changes: the row streams through registers, piece
after piece, and a running (max, sum) is folded over the pieces. A second pass writes; it runs backwards, so that it
finds in L2 what the first pass read last. Where the statistics are operands, the second pass is the only one.
Traffic: 2 reads, 1 write, less what L2 still holds. Source: Milakov & Gimelshein 2018, arXiv:1805.02867.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import monoid
from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import reduce, row_scalars, vectors
from pallas_kernels.mosaic.ptx import WARPGROUP, Index
from pallas_kernels.mosaic.reduce import ReductionBuffer
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.kernel import Config, Operands, Results, launch, unsupported_reason
from pallas_kernels.softmax.problem import Problem

# How many pieces are added up before their sum joins the others: rounding grows with the length of a chain of sums.
# float32, 262144 columns in 512 pieces, H200: 3.9 ulp, where XLA's reduction is 0.7 off.
_ADDED = 32


@dataclasses.dataclass(frozen=True)
class OnlineConfig(Config):
    """A CTA of `warpgroups` warpgroups handles a row, `registers` vectors in each thread at a time."""

    warpgroups: int
    registers: int


def unsupported(problem: Problem, device: Device) -> str | None:
    """Declines only what no kernel takes."""
    return unsupported_reason(problem, takes_stats=True)


def _fold(
    operands: Operands,
    row: jax.Array,
    stats: tuple[jax.Array, ...],
    tiles: row_ops.Tiles,
    tile: vectors.RegisterTile,
    exp: monoid.Exp,
) -> tuple[jax.Array, ...]:
    """Folds one more piece of the row into the running statistics."""
    problem, op = operands.problem, operands.problem.op
    maximum = [tiles[0].max(axis=1)] if row_ops.has_max(op) else []
    max_tile = tile.broadcast(maximum[0]) if maximum else None
    summands = row_ops.summands(op, tiles, max_tile, exp)
    sums = [row_scalars.sums_of_rows(operands.inputs[0], row, summand, tile) for summand in summands]
    return row_ops.combine(problem, stats, [*maximum, *sums], exp)


def _partial_stats(
    operands: Operands,
    row: jax.Array,
    label_operands: row_ops.LabelOperands | None,
    tile: vectors.RegisterTile,
    warpgroups: int,
    warpgroup: Index,
) -> tuple[jax.Array, ...]:
    """Returns each warp's statistics of its part of the row, one `[4]` array per value."""
    problem, chunk, tile = operands.problem, WARPGROUP * tile.registers, dataclasses.replace(tile, wraps=True)
    exp, steps = row_ops.exp_for(problem), _steps(problem, tile, warpgroups)
    empty = [jnp.full((4,), -jnp.inf, jnp.float32)] * row_ops.has_max(problem.op)
    identity = (*empty, *(jnp.zeros((4,), jnp.float32) for _ in row_ops.rescaled(problem)))

    def add(i: jax.Array, stats: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tiles = operands.load(row, i * (warpgroups * chunk) + warpgroup * chunk, tile, label_operands)
        return _fold(operands, row, stats, tiles, tile, exp)

    if steps <= _ADDED:
        return lax.fori_loop(0, steps, add, identity)

    def add_group(i: jax.Array, stats: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        group = lax.fori_loop(i * _ADDED, jnp.minimum((i + 1) * _ADDED, steps), add, identity)
        return row_ops.combine(problem, stats, group, exp)

    return lax.fori_loop(0, -(-steps // _ADDED), add_group, identity)


def _steps(problem: Problem, tile: vectors.RegisterTile, warpgroups: int) -> int:
    return -(-problem.max_vectors // (WARPGROUP * tile.registers * warpgroups))


def _body(operands: Operands, *, slots: jax.Ref | None = None, config: OnlineConfig, buffer: ReductionBuffer) -> None:
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    row = lax.axis_index("rows")
    warpgroup = lax.axis_index("warpgroup")
    tile = vectors.RegisterTile(problem.dtype, config.registers)
    chunk = WARPGROUP * config.registers
    steps = _steps(problem, tile, config.warpgroups)
    label_operands = operands.label_operands(row, tile)
    if slots is None:
        stats = operands.given_stats(label_operands, row, tile)
    else:
        partial = _partial_stats(operands, row, label_operands, tile, config.warpgroups, warpgroup)
        partials = reduce.block_gather(
            buffer, partial, tile.layout.reduce(1), warpgroup, slots.at[0], config.warpgroups
        )
        merged = row_ops.merge(problem, partials, buffer.layout, exp, tile)
        stats = row_ops.with_factors(problem, merged, label_operands)
    if op.gives_stats:
        pl.when(warpgroup == 0)(lambda: operands.store_stats(stats, label_operands, row, tile))
    if not op.gives_rows:
        return

    def write(i: jax.Array, _: None) -> None:
        first = (steps - 1 - i) * (config.warpgroups * chunk) + warpgroup * chunk
        operands.store(operands.load(row, first, tile, label_operands), stats, row, first, tile)

    lax.fori_loop(0, steps, write, None)
    operands.store_at_labels(label_operands, stats, row, tile, warpgroups=config.warpgroups)


def run(problem: Problem, config: OnlineConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    buffer = ReductionBuffer(4 * config.warpgroups, row_ops.num_values(problem))
    return launch(
        problem,
        functools.partial(_body, config=config, buffer=buffer),
        operands,
        name="online",
        grid=problem.rows,
        warpgroups=config.warpgroups,
        scratch={} if problem.op.takes_stats else {"slots": buffer.scratch},
    )
