"""Kernel 1, rows in registers: one read and one write, for rows that fit the registers of a warp or of a part of it.

Previous kernel: naive.py (a thread to a row, three passes). Changes: a warp reads a row once, 16 bytes to a thread and
neighbours to neighbours, and keeps it; the row's maximum and sum take shuffles only. Short rows share a warp.
Traffic: 1 read, 1 write.
"""

import dataclasses
from typing import ClassVar

import jax
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import row_scalars, vectors
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.kernel import Config, Operands, Results, launch, unsupported_reason
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.row_ops import LabelOperands, RowStats, Tiles

# The float32 words of a thread's operands. The computation needs as many again, and a mask's bytes need more.
MAX_REGISTERS = {"none": 128, "full": 64, "shared": 64}


@dataclasses.dataclass(frozen=True)
class WarpConfig(Config):
    """Rows are held in registers: `lanes` threads of a warp share a row, `registers` vectors in each.

    A thread loads `tiles` of its rows before it reduces the first.
    """

    lanes: int
    registers: int
    tiles: int = 1

    allowed: ClassVar = {"lanes": (1, 2, 4, 8, 16, 32)}


def unsupported(problem: Problem, device: Device) -> str | None:
    """Declines rows longer than a warp can hold."""
    streams = problem.operands
    words = -(-problem.max_vectors // 32) * (vectors.VECTOR_BYTES // problem.dtype.itemsize) * streams
    if words > (most := MAX_REGISTERS[problem.where]):
        return f"a row of {problem.cols} takes {words} float32 registers a thread, more than {most}"
    return unsupported_reason(problem)


def _tile(problem: Problem, config: WarpConfig) -> vectors.RegisterTile:
    return vectors.RegisterTile(problem.dtype, config.registers, config.lanes, config.tiles)


def _finish(
    operands: Operands, tiles: Tiles, label_operands: LabelOperands | None, row: jax.Array, tile: vectors.RegisterTile
) -> None:
    """Reduces a tile's rows and writes their results."""
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    maximum = tiles[0].max(axis=1) if row_ops.has_max(op) else None
    max_tile = None if maximum is None else tile.broadcast(maximum)
    add = lambda summand: row_scalars.sums_of_rows(operands.inputs[0], row, summand, tile)
    sums = tuple(map(add, row_ops.summands(op, tiles, max_tile, exp)))
    stats = row_ops.with_factors(problem, RowStats(maximum, sums), label_operands)
    if op.gives_stats:
        operands.store_stats(stats, label_operands, row, tile)
    if op.gives_rows:
        operands.store(tiles, stats, row, 0, tile)
        operands.store_at_labels(label_operands, stats, row, tile)


def _body(operands: Operands, *, config: WarpConfig) -> None:
    tile = _tile(operands.problem, config)
    first = lax.axis_index("rows") * (tile.rows * config.tiles)
    rows = [first + i * tile.rows for i in range(config.tiles)]
    label_operands = [operands.label_operands(row, tile) for row in rows]
    tiles = [operands.load(row, 0, tile, of_rows) for row, of_rows in zip(rows, label_operands, strict=True)]
    for loaded, of_rows, row in zip(tiles, label_operands, rows, strict=True):
        _finish(operands, loaded, of_rows, row, tile)


def run(problem: Problem, config: WarpConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    rows = _tile(problem, config).rows * config.tiles
    return launch(
        problem, lambda refs: _body(refs, config=config), operands, name="warp", grid=-(-problem.rows // rows)
    )
