"""Rung 3, online softmax: any row length, two reads and one write.

Previous rung: block.py (the row resident on chip). Changes: the row streams through registers, piece after piece, and
a running (max, sum) is folded over the pieces; a second walk, backwards so that it finds in the cache what the first
one read last, writes.
Traffic: 2 reads, 1 write, less what the cache still holds. Source: Milakov & Gimelshein 2018, arXiv:1805.02867.
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
from pallas_kernels.mosaic.reduce import Exchange
from pallas_kernels.softmax import heuristics, row_ops
from pallas_kernels.softmax.config import OnlineConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.rung import Operands, Results, Rung, declines_any, launch

# Pieces added one after the other before their sum is added to the others': rounding grows with the number of sums.
# float32, 262144 columns in 512 pieces, H200: 3.9 ulp, where XLA's reduction is 0.7 off.
_ADDED = 32


def unsupported(problem: Problem, device: Device) -> str | None:
    """Only what no kernel takes."""
    return declines_any(problem)


def _fold(
    operands: Operands,
    row: jax.Array,
    stats: tuple[jax.Array, ...],
    tiles: row_ops.Tiles,
    tile: vectors.Tile,
    exp: monoid.Exp,
) -> tuple[jax.Array, ...]:
    """The running statistics, with one more piece of the row."""
    problem, op = operands.problem, operands.problem.op
    maximum = [tiles[0].max(axis=1)] if row_ops.has_max(op) else []
    spread = tile.broadcast(maximum[0]) if maximum else None
    terms = row_ops.terms(op, tiles, spread, exp)
    sums = [row_scalars.sums_of_rows(operands.inputs[0], row, term, tile) for term in terms]
    return row_ops.combine(problem, stats, [*maximum, *sums], exp)


def partial_stats(
    operands: Operands,
    row: jax.Array,
    labelled: row_ops.Labelled | None,
    tile: vectors.Tile,
    warpgroups: int = 1,
    warpgroup: Index = 0,
) -> tuple[jax.Array, ...]:
    """Each warp's statistics of what it walks of the row, one `[4]` array per quantity."""
    problem, share, tile = operands.problem, WARPGROUP * tile.registers, dataclasses.replace(tile, wraps=True)
    exp, steps = row_ops.exp_for(problem), _steps(problem, tile, warpgroups)
    empty = [jnp.full((4,), -jnp.inf, jnp.float32)] * row_ops.has_max(problem.op)
    nothing = (*empty, *(jnp.zeros((4,), jnp.float32) for _ in row_ops.decaying(problem)))

    def add(i: jax.Array, stats: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tiles = operands.load(row, i * (warpgroups * share) + warpgroup * share, tile, labelled)
        return _fold(operands, row, stats, tiles, tile, exp)

    if steps <= _ADDED:
        return lax.fori_loop(0, steps, add, nothing)

    def add_group(i: jax.Array, stats: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        group = lax.fori_loop(i * _ADDED, jnp.minimum((i + 1) * _ADDED, steps), add, nothing)
        return row_ops.combine(problem, stats, group, exp)

    return lax.fori_loop(0, -(-steps // _ADDED), add_group, nothing)


def _steps(problem: Problem, tile: vectors.Tile, warpgroups: int) -> int:
    return -(-problem.max_vectors // (WARPGROUP * tile.registers * warpgroups))


def _body(operands: Operands, slots: jax.Ref, *, config: OnlineConfig, exchange: Exchange) -> None:
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    row = lax.axis_index("rows")
    warpgroup = lax.axis_index("warpgroup")
    tile = vectors.Tile(problem.dtype, config.registers)
    share = WARPGROUP * config.registers
    steps = _steps(problem, tile, config.warpgroups)
    labelled = operands.labelled(row, tile)
    partial = partial_stats(operands, row, labelled, tile, config.warpgroups, warpgroup)
    everybody = reduce.across_block(exchange, partial, tile.layout.reduce(1), warpgroup, slots.at[0], config.warpgroups)
    stats = row_ops.with_factors(problem, row_ops.merge(problem, everybody, exchange.layout, exp, tile), labelled)
    if op.gives_stats:
        pl.when(warpgroup == 0)(lambda: operands.store_stats(stats, labelled, row, tile))
    if not op.gives_rows:
        return

    def write(i: jax.Array, _: None) -> None:
        first = (steps - 1 - i) * (config.warpgroups * share) + warpgroup * share
        operands.store(operands.load(row, first, tile, labelled), stats, row, first, tile)

    lax.fori_loop(0, steps, write, None)
    operands.store_at_labels(labelled, stats, row, tile, warpgroups=config.warpgroups)


def run(problem: Problem, config: OnlineConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    exchange = Exchange(4 * config.warpgroups, row_ops.quantities(problem))
    return launch(
        problem,
        functools.partial(_body, config=config, exchange=exchange),
        operands,
        name="online",
        grid=problem.rows,
        warpgroups=config.warpgroups,
        scratch=[exchange.scratch],
    )


RUNG = Rung("online", unsupported, heuristics.online, run, reads=2)
