"""Rung 1, rows in registers: one read and one write, for rows that fit the registers of a warp or of a part of it.

Previous rung: naive.py (a thread to a row, three passes). Changes: a warp reads a row once, 16 bytes to a thread and
neighbours to neighbours, and keeps it; the row's maximum and sum take shuffles only. Short rows share a warp.
Traffic: 1 read, 1 write.
"""

import jax
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import row_scalars, vectors
from pallas_kernels.softmax import heuristics, row_ops
from pallas_kernels.softmax.config import WarpConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.row_ops import Labelled, RowStats, Tiles
from pallas_kernels.softmax.rung import Operands, Results, Rung, declines_any, launch

# A thread's operands in float32 words: as much again is needed to work on them, and more with a mask's bytes.
MAX_REGISTERS = {"none": 128, "full": 64, "shared": 64}


def unsupported(problem: Problem, device: Device) -> str | None:
    """Rows longer than a warp can hold."""
    streams = problem.operands
    words = -(-problem.max_vectors // 32) * (vectors.VECTOR_BYTES // problem.dtype.itemsize) * streams
    if words > (most := MAX_REGISTERS[problem.where]):
        return f"a row of {problem.cols} takes {words} float32 registers a thread, more than {most}"
    return declines_any(problem)


def _tile(problem: Problem, config: WarpConfig) -> vectors.Tile:
    return vectors.Tile(problem.dtype, config.registers, config.lanes, config.tiles)


def _finish(operands: Operands, tiles: Tiles, labelled: Labelled | None, row: jax.Array, tile: vectors.Tile) -> None:
    """Reduces a tile's rows and writes their results."""
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    maximum = tiles[0].max(axis=1) if row_ops.has_max(op) else None
    spread = None if maximum is None else tile.broadcast(maximum)
    add = lambda term: row_scalars.sums_of_rows(operands.inputs[0], row, term, tile)
    sums = tuple(map(add, row_ops.terms(op, tiles, spread, exp)))
    stats = row_ops.with_factors(problem, RowStats(maximum, sums), labelled)
    if op.gives_stats:
        operands.store_stats(stats, labelled, row, tile)
    if op.gives_rows:
        operands.store(tiles, stats, row, 0, tile)
        operands.store_at_labels(labelled, stats, row, tile)


def _body(operands: Operands, *, config: WarpConfig) -> None:
    tile = _tile(operands.problem, config)
    first = lax.axis_index("rows") * (tile.rows * config.tiles)
    rows = [first + i * tile.rows for i in range(config.tiles)]
    labelled = [operands.labelled(row, tile) for row in rows]
    tiles = [operands.load(row, 0, tile, of_rows) for row, of_rows in zip(rows, labelled, strict=True)]
    for loaded, of_rows, row in zip(tiles, labelled, rows, strict=True):
        _finish(operands, loaded, of_rows, row, tile)


def run(problem: Problem, config: WarpConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    rows = _tile(problem, config).rows * config.tiles
    return launch(
        problem, lambda refs: _body(refs, config=config), operands, name="warp", grid=-(-problem.rows // rows)
    )


RUNG = Rung("warp", unsupported, heuristics.warp, run, reads=1)
