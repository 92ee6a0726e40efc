"""Rung 3, online softmax: any row length, two reads and one write.

Previous rung: block.py (the row resident on chip). Changes: the row streams through registers, piece after piece, and
a running (max, sum) is folded over the pieces; a second walk, backwards so that it finds in the cache what the first
one read last, writes.
Traffic: 2 reads, 1 write, less what the cache still holds. Source: Milakov & Gimelshein 2018, arXiv:1805.02867.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import heuristics, monoid, mosaic, scopes
from pallas_kernels.configs import OnlineConfig
from pallas_kernels.emit import WARPGROUP
from pallas_kernels.hardware import Device
from pallas_kernels.problem import Problem
from pallas_kernels.scopes import Exchange
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.rung import Operands, Results, Rung, declines_any, launch


def unsupported(problem: Problem, device: Device) -> str | None:
    """Only what no kernel takes."""
    return declines_any(problem)


def _fold(problem: Problem, stats: tuple[jax.Array, ...], tiles: row_ops.Tiles, tile: mosaic.Tile, exp: monoid.Exp):
    """The running statistics, with one more piece of the row."""
    op = problem.op
    maximum = [tiles[0].max(axis=1)] if row_ops.has_max(op) else []
    spread = tile.broadcast(maximum[0]) if maximum else None
    sums = [term.sum(axis=1) for term in row_ops.terms(op, tiles, spread, exp)]
    return row_ops.combine(problem, stats, [*maximum, *sums], exp)


def _body(operands: Operands, slots: jax.Ref, *, config: OnlineConfig, exchange: Exchange) -> None:
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    row = lax.axis_index("rows")
    warpgroup = lax.axis_index("warpgroup")
    tile = mosaic.Tile(problem.dtype, config.registers)
    share = WARPGROUP * config.registers
    stride = config.warpgroups * share
    steps = -(-problem.max_vectors // stride)

    labelled = operands.labelled(row, tile)

    def at(step: jax.Array) -> jax.Array:
        return step * stride + warpgroup * share

    empty = [jnp.full((4,), -jnp.inf, jnp.float32)] * row_ops.has_max(op)
    nothing = (*empty, *(jnp.zeros((4,), jnp.float32) for _ in row_ops.decaying(problem)))
    load = lambda first: operands.load(row, first, tile, labelled)
    partial = lax.fori_loop(0, steps, lambda i, stats: _fold(problem, stats, load(at(i)), tile, exp), nothing)
    everybody = scopes.across_block(exchange, partial, tile.layout.reduce(1), warpgroup, slots.at[0], config.warpgroups)
    stats = row_ops.with_factors(problem, row_ops.merge(problem, everybody, exchange.layout, exp, tile), labelled)
    if op.gives_stats:
        pl.when(warpgroup == 0)(lambda: operands.store_stats(stats, labelled, row, tile))
    if not op.gives_rows:
        return

    def write(i: jax.Array, _: None) -> None:
        first = at(steps - 1 - i)
        operands.store(load(first), stats, row, first, tile)

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
