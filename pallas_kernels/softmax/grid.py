"""Rung 5, a row over the grid: one read and one write of device memory for longer rows, and a read of the cache.

Previous rung: cluster.py (a row has to fit the shared memory of a cluster). Changes: the second-level cache keeps the
row. Blocks read shares of rows and publish their (max, sum) in device memory; some rows later, other blocks read the
same shares again, from the cache, and write. By then the statistics are there, so that nobody waits for long, and
whoever waits, waits for a block that runs.
Traffic: 1 read, 1 write, and 1 read that the cache serves.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import mbarrier, reduce, vectors
from pallas_kernels.mosaic.ptx import Index
from pallas_kernels.mosaic.reduce import Exchange
from pallas_kernels.softmax import heuristics, row_ops
from pallas_kernels.softmax.config import GridConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.rung import REDUCTION_SCRATCH, Operands, Results, Rung, declines_any, launch
from pallas_kernels.softmax.share import Share, copies, has_tails, tails
from pallas_kernels.softmax.staged import allocated, share_bytes, tail_bytes


def unsupported(problem: Problem, device: Device) -> str | None:
    """What no kernel takes, what is too much for a grid, and rows whose statistics are too much for a block."""
    if reason := declines_any(problem):
        return reason
    config = heuristics.grid(problem, device)[0]
    if 2 * problem.rows * config.blocks >= 2**31:
        return f"{problem.rows} rows over {config.blocks} blocks each do not fit a grid of 2^31 blocks"
    if (needed := shared_bytes(problem, config)) >= device.smem_per_cta:
        return f"a row over {config.blocks} blocks needs {needed} bytes of shared memory in each"
    return None


def shared_bytes(problem: Problem, config: GridConfig) -> int:
    """What Mosaic allocates for a block: operands, slots of both exchanges, a barrier, a ticket, its own scratch."""
    slots = [exchange.bytes_in_shared for exchange in _exchanges(problem, config)]
    shares = [share_bytes(problem, config)] * problem.operands + [tail_bytes(problem, config)]
    return allocated(*shares, *slots, 8, 8, REDUCTION_SCRATCH)


def _exchanges(problem: Problem, config: GridConfig) -> tuple[Exchange, Exchange]:
    """Among the warps of a block, then among the blocks of a row."""
    quantities = row_ops.quantities(problem)
    return Exchange(4 * config.warpgroups, quantities), Exchange(config.blocks, quantities)


def _writers(problem: Problem, config: GridConfig) -> int:
    """Blocks that finish a row."""
    return config.blocks if problem.op.gives_rows else 1


def _task(problem: Problem, config: GridConfig, ticket: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a ticket stands for: whether to write, the row, and which of its blocks.

    The readers of `lag` rows, then in turn those of a row and the writers of the row `lag` before, at last the writers.
    """
    readers, writers = config.blocks, _writers(problem, config)
    lag = min(config.lag, problem.rows)
    ahead, pairs = lag * readers, problem.rows - lag
    late, after = ticket - ahead, ticket - ahead - pairs * (readers + writers)
    of_pair = lax.rem(late, readers + writers)
    is_ahead, is_after = late < 0, after >= 0
    writes = jnp.logical_or(is_after, jnp.logical_and(jnp.logical_not(is_ahead), of_pair >= readers))
    pair = lax.div(late, readers + writers)
    row = jnp.where(is_ahead, lax.div(ticket, readers), pair + jnp.where(of_pair >= readers, 0, lag))
    row = jnp.where(is_after, pairs + lax.div(after, writers), row)
    member = jnp.where(is_ahead, lax.rem(ticket, readers), of_pair - jnp.where(of_pair >= readers, readers, 0))
    return writes, row, jnp.where(is_after, lax.rem(after, writers), member)


def _body(operands: Operands, words: jax.Ref, *scratch: jax.Ref, config: GridConfig) -> None:
    problem = operands.problem
    near, far = _exchanges(problem, config)
    *slot, barrier, ticket, near_slots, far_slots = scratch
    if has_tails(problem, config):
        slot = [*slot[:-1], *(slot[-1].at[0, o] for o in range(problem.operands))]
    mbarrier.start_barriers(barrier, (copies(problem, config),))
    near.clear(near_slots, config.warpgroups)
    far.clear(far_slots, config.warpgroups)
    reduce.take_ticket(words, ticket)
    reduce.sync_block(config.warpgroups)
    writes, row, member = _task(problem, config, ticket[0])
    warpgroup: Index = lax.axis_index("warpgroup") if config.warpgroups > 1 else 0
    share = Share(operands, config, member, warpgroup)

    def begin(cache: mbarrier.Cache) -> None:
        pl.when(warpgroup == 0)(lambda: share.copy(row, slot, barrier.at[0], cache))

    def arrive() -> None:
        mbarrier.wait(barrier.at[0], jnp.int32(0))
        share.fill_outside(row, slot)

    def read() -> None:
        begin("evict_last")
        arrive()
        stats = share.in_block(near, share.partial_stats(slot, row), near_slots.at[0])
        reduce.to_grid(far, row_ops.as_numbers(stats), share.layout, words, row, member)

    def write() -> None:
        labelled = operands.labelled(row, share.tile)
        if problem.op.gives_rows:
            begin("evict_first")
        stats = share.merged(far, reduce.from_grid(far, words, row, far_slots.at[0], config.warpgroups))
        if problem.op.gives_rows:
            arrive()
        share.write(slot, row, row_ops.with_factors(problem, stats, labelled), labelled, streams=True)

    pl.when(writes)(write)
    pl.when(jnp.logical_not(writes))(read)


def run(problem: Problem, config: GridConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    near, far = _exchanges(problem, config)
    tile = vectors.Tile(problem.dtype, config.registers)
    share = (config.steps(problem.max_vectors), config.warpgroups, *tile.shape)
    return launch(
        problem,
        functools.partial(_body, config=config),
        operands,
        name="grid",
        grid=problem.rows * (config.blocks + _writers(problem, config)),
        warpgroups=config.warpgroups,
        shared=[reduce.grid_words(problem.rows, far)],
        scratch=[
            *[plgpu.SMEM(share, problem.dtype)] * problem.operands,
            *[tails(problem, 1)] * has_tails(problem, config),
            mbarrier.barriers(1),
            plgpu.SMEM((2,), jnp.int32),
            near.scratch,
            far.scratch,
        ],
    )


RUNG = Rung("grid", unsupported, heuristics.grid, run, reads=1)
