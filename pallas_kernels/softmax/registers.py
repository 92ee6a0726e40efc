"""Kernels 0, 1 and 3, naive, warp and online: rows go through registers, and shared memory holds no part of them.

Naive: a thread to a row, which it passes over for the maximum, again for the sum, and again to write, 16 bytes at a
time. Neighbouring threads read far apart, so that the memory fetches more than is used. Traffic: 3 reads, 1 write. It
is the baseline of the ladder; `heuristics` never chooses it.

Warp, after naive: a warp reads a row once, 16 bytes to a thread and neighbours to neighbours, and keeps it; the row's
maximum and sum take shuffles only. Short rows share a warp. Traffic: 1 read, 1 write.

Online, after block in staged.py, where the row is resident on chip: the row, of any length, streams through registers,
piece after piece, and a running (max, sum) is folded over the pieces. A second pass writes; it runs backwards, so that
it finds in L2 what the first pass read last. Traffic: 2 reads, 1 write, less what L2 still holds.
Source: Milakov & Gimelshein 2018, arXiv:1805.02867.
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
from pallas_kernels.softmax.heuristics import NaiveConfig, OnlineConfig, WarpConfig
from pallas_kernels.softmax.kernel import Operands, Results, launch, unsupported_reason
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.row_ops import LabelOperands, RowStats, Tiles

MAX_COLS = 4096


def naive_unsupported(problem: Problem, device: Device) -> str | None:
    """Declines rows so long that one float32 sum, added up element after element, is inaccurate."""
    if problem.cols > MAX_COLS:
        return f"one thread sums at most {MAX_COLS} columns accurately; there are {problem.cols}"
    if reason := unsupported_reason(problem):
        return reason
    if problem.soft_cap is not None:
        return "one thread's sum loses what a soft cap makes equal: what -inf became adds up, element after element"
    return None


def _naive_tile(problem: Problem) -> vectors.RegisterTile:
    return vectors.RegisterTile(problem.dtype, registers=1, lanes=1)


def _naive_body(operands: Operands) -> None:
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    tile = _naive_tile(problem)
    row, steps = lax.axis_index("rows") * tile.rows, problem.max_vectors
    label_operands = operands.label_operands(row, tile)
    load = lambda k: operands.load(row, k, tile, label_operands)
    maximum, max_tile = None, None
    if row_ops.has_max(op):
        lowest = tile.full(-jnp.inf)
        highest = lax.fori_loop(0, steps, lambda k, high: jnp.maximum(high, load(k)[0]), lowest)
        maximum = highest.max(axis=1)
        max_tile = tile.broadcast(maximum)

    def add(k: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        summands = row_ops.summands(op, load(k), max_tile, exp)
        return tuple(total + summand for total, summand in zip(sums, summands, strict=True))

    zeros = tuple(tile.full(0.0) for _ in row_ops.rescaled(problem))
    sums = lax.fori_loop(0, steps, add, zeros)
    stats = row_ops.with_factors(problem, RowStats(maximum, tuple(total.sum(axis=1) for total in sums)), label_operands)
    if op.gives_stats:
        operands.store_stats(stats, label_operands, row, tile)
    if not op.gives_rows:
        return

    def write(k: jax.Array, _: None) -> None:
        operands.store(load(k), stats, row, k, tile)

    lax.fori_loop(0, steps, write, None)
    operands.store_at_labels(label_operands, stats, row, tile)


def run_naive(problem: Problem, config: NaiveConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    return launch(problem, _naive_body, operands, name="naive", grid=-(-problem.rows // _naive_tile(problem).rows))


# The float32 words of a thread's operands. The computation needs as many again, and a mask's bytes need more.
MAX_REGISTERS = {"none": 128, "full": 64, "shared": 64}


def warp_unsupported(problem: Problem, device: Device) -> str | None:
    """Declines rows longer than a warp can hold."""
    streams = problem.operands
    words = -(-problem.max_vectors // 32) * (vectors.VECTOR_BYTES // problem.dtype.itemsize) * streams
    if words > (most := MAX_REGISTERS[problem.where]):
        return f"a row of {problem.cols} takes {words} float32 registers a thread, more than {most}"
    return unsupported_reason(problem)


def _warp_tile(problem: Problem, config: WarpConfig) -> vectors.RegisterTile:
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


def _warp_body(operands: Operands, *, config: WarpConfig) -> None:
    tile = _warp_tile(operands.problem, config)
    first = lax.axis_index("rows") * (tile.rows * config.tiles)
    rows = [first + i * tile.rows for i in range(config.tiles)]
    label_operands = [operands.label_operands(row, tile) for row in rows]
    tiles = [operands.load(row, 0, tile, of_rows) for row, of_rows in zip(rows, label_operands, strict=True)]
    for loaded, of_rows, row in zip(tiles, label_operands, rows, strict=True):
        _finish(operands, loaded, of_rows, row, tile)


def run_warp(problem: Problem, config: WarpConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    rows = _warp_tile(problem, config).rows * config.tiles
    return launch(
        problem, lambda refs: _warp_body(refs, config=config), operands, name="warp", grid=-(-problem.rows // rows)
    )


# How many pieces are added up before their sum joins the others: rounding grows with the length of a chain of sums.
# float32, 262144 columns in 512 pieces, H200: 3.9 ulp, where XLA's reduction is 0.7 off.
_ADDED = 32


def online_unsupported(problem: Problem, device: Device) -> str | None:
    """Declines only what no kernel takes."""
    return unsupported_reason(problem)


def _fold(
    operands: Operands,
    row: jax.Array,
    stats: tuple[jax.Array, ...],
    tiles: Tiles,
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
    label_operands: LabelOperands | None,
    tile: vectors.RegisterTile,
    warpgroups: int,
    warpgroup: Index,
) -> tuple[jax.Array, ...]:
    """Each warp's statistics of its part of the row, one `[4]` array per value."""
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


def _online_body(operands: Operands, *, slots: jax.Ref, config: OnlineConfig, buffer: ReductionBuffer) -> None:
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    row = lax.axis_index("rows")
    warpgroup = lax.axis_index("warpgroup")
    tile = vectors.RegisterTile(problem.dtype, config.registers)
    chunk = WARPGROUP * config.registers
    steps = _steps(problem, tile, config.warpgroups)
    label_operands = operands.label_operands(row, tile)
    partial = _partial_stats(operands, row, label_operands, tile, config.warpgroups, warpgroup)
    partials = reduce.block_gather(buffer, partial, tile.layout.reduce(1), warpgroup, slots.at[0], config.warpgroups)
    stats = row_ops.with_factors(problem, row_ops.merge(problem, partials, buffer.layout, exp, tile), label_operands)
    if op.gives_stats:
        pl.when(warpgroup == 0)(lambda: operands.store_stats(stats, label_operands, row, tile))
    if not op.gives_rows:
        return

    def write(i: jax.Array, _: None) -> None:
        first = (steps - 1 - i) * (config.warpgroups * chunk) + warpgroup * chunk
        operands.store(operands.load(row, first, tile, label_operands), stats, row, first, tile)

    lax.fori_loop(0, steps, write, None)
    operands.store_at_labels(label_operands, stats, row, tile, warpgroups=config.warpgroups)


def run_online(problem: Problem, config: OnlineConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    buffer = ReductionBuffer(4 * config.warpgroups, row_ops.num_values(problem))
    return launch(
        problem,
        functools.partial(_online_body, config=config, buffer=buffer),
        operands,
        name="online",
        grid=problem.rows,
        warpgroups=config.warpgroups,
        scratch={"slots": buffer.scratch},
    )
