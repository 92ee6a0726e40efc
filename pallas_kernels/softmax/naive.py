"""Kernel 0, naive softmax: a thread to a row, three reads and one write.

Each thread passes over its own row for the maximum, again for the sum, and again to write, 16 bytes at a time.
Neighbouring threads read far apart, so that the memory fetches more than is used.
Traffic: 3 reads, 1 write. It is the baseline of the ladder; `dispatch` never chooses it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import vectors
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.kernel import Config, Operands, Results, launch, unsupported_reason
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.row_ops import RowStats

MAX_COLS = 4096


@dataclasses.dataclass(frozen=True)
class NaiveConfig(Config):
    """A thread handles a row: there is nothing to choose."""


def unsupported(problem: Problem, device: Device) -> str | None:
    """Declines rows so long that one float32 sum, added up element after element, is inaccurate."""
    if problem.cols > MAX_COLS:
        return f"one thread sums at most {MAX_COLS} columns accurately; there are {problem.cols}"
    if reason := unsupported_reason(problem):
        return reason
    if problem.soft_cap is not None:
        return "one thread's sum loses what a soft cap makes equal: what -inf became adds up, element after element"
    return None


def _tile(problem: Problem) -> vectors.RegisterTile:
    return vectors.RegisterTile(problem.dtype, registers=1, lanes=1)


def _body(operands: Operands) -> None:
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    tile = _tile(problem)
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


def run(problem: Problem, config: NaiveConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    return launch(problem, _body, operands, name="naive", grid=-(-problem.rows // _tile(problem).rows))
