"""Rung 0, naive softmax: a thread to a row, three reads and one write.

What the seeds start from. Each thread walks its own row for the maximum, again for the sum, and again to write, 16
bytes at a time; neighbouring threads read far apart, so that the memory fetches more than is used.
Traffic: 3 reads, 1 write. Kept to be measured against; nothing chooses it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import vectors
from pallas_kernels.softmax import heuristics, row_ops
from pallas_kernels.softmax.config import NaiveConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.row_ops import RowStats
from pallas_kernels.softmax.rung import Operands, Results, Rung, declines_any, launch

MAX_COLS = 4096


def unsupported(problem: Problem, device: Device) -> str | None:
    """Rows whose sum, element after element in float32, would lose what the tests demand."""
    if problem.cols > MAX_COLS:
        return f"one thread sums at most {MAX_COLS} columns accurately; there are {problem.cols}"
    if reason := declines_any(problem):
        return reason
    if problem.soft_cap is not None:
        return "one thread's sum loses what a soft cap makes equal: what -inf became adds up, element after element"
    return None


def _tile(problem: Problem) -> vectors.Tile:
    return vectors.Tile(problem.dtype, registers=1, lanes=1)


def _body(operands: Operands) -> None:
    problem = operands.problem
    op, exp = problem.op, row_ops.exp_for(problem)
    tile = _tile(problem)
    row, steps = lax.axis_index("rows") * tile.rows, problem.max_vectors
    labelled = operands.labelled(row, tile)
    load = lambda k: operands.load(row, k, tile, labelled)
    maximum, spread = None, None
    if row_ops.has_max(op):
        lowest = tile.full(-jnp.inf)
        highest = lax.fori_loop(0, steps, lambda k, high: jnp.maximum(high, load(k)[0]), lowest)
        maximum = highest.max(axis=1)
        spread = tile.broadcast(maximum)

    def add(k: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        terms = row_ops.terms(op, load(k), spread, exp)
        return tuple(total + term for total, term in zip(sums, terms, strict=True))

    zeros = tuple(tile.full(0.0) for _ in row_ops.decaying(problem))
    sums = lax.fori_loop(0, steps, add, zeros)
    stats = row_ops.with_factors(problem, RowStats(maximum, tuple(total.sum(axis=1) for total in sums)), labelled)
    if op.gives_stats:
        operands.store_stats(stats, labelled, row, tile)
    if not op.gives_rows:
        return

    def write(k: jax.Array, _: None) -> None:
        operands.store(load(k), stats, row, k, tile)

    lax.fori_loop(0, steps, write, None)
    operands.store_at_labels(labelled, stats, row, tile)


def run(problem: Problem, config: NaiveConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    return launch(problem, _body, operands, name="naive", grid=-(-problem.rows // _tile(problem).rows))


RUNG = Rung("naive", unsupported, heuristics.naive, run, reads=3)
