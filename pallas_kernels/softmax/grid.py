"""Kernel 5, a row over the grid: one read and one write of global memory for longer rows, and a read of L2.

Previous kernel: cluster, in staged.py (a row has to fit the shared memory of a cluster). Changes: L2 holds the row.
Producer CTAs read slices of rows and store their (max, sum) in a workspace; `lookahead` rows later, consumer CTAs read
the same slices again, from L2, and write the result. By then the statistics are there, so that no CTA waits for long,
and a CTA only ever waits for CTAs that already run.
Traffic: 1 read, 1 write, and 1 read that L2 serves.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import mbarrier, ptx, reduce
from pallas_kernels.mosaic.ptx import Index
from pallas_kernels.mosaic.reduce import ReductionBuffer
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.kernel import Operands, Results, Scratch, allocated, launch, unsupported_reason
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.staged import CtaSlice, SharedConfig, copies, slice_scratch


@dataclasses.dataclass(frozen=True)
class GridConfig(SharedConfig):
    """A CTA reads a slice of a row for its statistics or, `lookahead` rows later, writes it."""

    lookahead: int


def unsupported(
    choose: Callable[[Problem, Device], tuple[GridConfig, ...]], problem: Problem, device: Device
) -> str | None:
    """Declines too many CTAs for a grid, and rows whose statistics do not fit a CTA's shared memory."""
    if reason := unsupported_reason(problem):
        return reason
    config = choose(problem, device)[0]
    if 2 * problem.rows * config.ctas >= 2**31:
        return f"{problem.rows} rows over {config.ctas} blocks each do not fit a grid of 2^31 blocks"
    if (needed := shared_bytes(problem, config)) >= device.smem_per_cta:
        return f"a row over {config.ctas} blocks needs {needed} bytes of shared memory in each"
    return None


def scratch(problem: Problem, config: GridConfig) -> Scratch:
    """Returns the shared memory of a CTA."""
    cta_buffer, grid_buffer = _buffers(problem, config)
    return {
        **slice_scratch(problem, config),
        "barrier": mbarrier.barriers(1),
        "counter": plgpu.SMEM((2,), jnp.int32),
        "cta_slots": cta_buffer.scratch,
        "grid_slots": grid_buffer.scratch,
    }


def shared_bytes(problem: Problem, config: GridConfig) -> int:
    """Returns the bytes of shared memory that Mosaic allocates for a CTA."""
    return allocated(scratch(problem, config))


def _buffers(problem: Problem, config: GridConfig) -> tuple[ReductionBuffer, ReductionBuffer]:
    """Returns the buffers in which the warps of a CTA, and then the CTAs of a row, exchange their statistics."""
    num_values = row_ops.num_values(problem)
    return ReductionBuffer(4 * config.warpgroups, num_values), ReductionBuffer(config.ctas, num_values)


def _consumers(problem: Problem, config: GridConfig) -> int:
    """Says how many CTAs write a row's results."""
    return config.ctas if problem.op.gives_rows else 1


def _assign(problem: Problem, config: GridConfig, counter: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maps the tile counter to a CTA's work: whether it consumes, its row, and its rank among the row's CTAs.

    The producers of the first `lookahead` rows come first. Then the producers of a row and the consumers of the row
    `lookahead` before it alternate, and the consumers of the last rows end.
    """
    producers, consumers = config.ctas, _consumers(problem, config)
    lookahead = min(config.lookahead, problem.rows)
    ahead, pairs = lookahead * producers, problem.rows - lookahead
    late, after = counter - ahead, counter - ahead - pairs * (producers + consumers)
    of_pair = lax.rem(late, producers + consumers)
    is_ahead, is_after = late < 0, after >= 0
    consumes = jnp.logical_or(is_after, jnp.logical_and(jnp.logical_not(is_ahead), of_pair >= producers))
    pair = lax.div(late, producers + consumers)
    row = ptx.where(is_ahead, lax.div(counter, producers), pair + ptx.where(of_pair >= producers, 0, lookahead))
    row = ptx.where(is_after, pairs + lax.div(after, consumers), row)
    rank = ptx.where(is_ahead, lax.rem(counter, producers), of_pair - ptx.where(of_pair >= producers, producers, 0))
    return consumes, row, ptx.where(is_after, lax.rem(after, consumers), rank)


def _body(
    operands: Operands,
    words: jax.Ref,
    *,
    slices: list[jax.Ref],
    tails: list[jax.Ref],
    barrier: jax.Ref,
    counter: jax.Ref,
    cta_slots: jax.Ref,
    grid_slots: jax.Ref,
    config: GridConfig,
) -> None:
    problem = operands.problem
    cta_buffer, grid_buffer = _buffers(problem, config)
    stage = [*slices, *(t.at[0, o] for t in tails for o in range(problem.operands))]
    mbarrier.start_barriers(barrier, (copies(problem, config),))
    cta_buffer.clear(cta_slots, config.warpgroups)
    grid_buffer.clear(grid_slots, config.warpgroups)
    reduce.next_tile(words, counter)
    reduce.sync_block(config.warpgroups)
    consumes, row, rank = _assign(problem, config, counter[0])
    warpgroup: Index = lax.axis_index("warpgroup") if config.warpgroups > 1 else 0
    cta_slice = CtaSlice(operands, config, rank, warpgroup)

    def prefetch(cache: mbarrier.Cache) -> None:
        pl.when(warpgroup == 0)(lambda: cta_slice.copy(row, stage, barrier.at[0], cache))

    def await_slice() -> None:
        mbarrier.wait(barrier.at[0], jnp.int32(0))
        cta_slice.fill_outside(row, stage)

    def produce() -> None:
        prefetch("evict_last")
        await_slice()
        stats = cta_slice.reduce_block(cta_buffer, cta_slice.partial_stats(stage, row), cta_slots.at[0])
        reduce.grid_store(grid_buffer, row_ops.values(stats), cta_slice.layout, words, row, rank)

    def consume() -> None:
        label_operands = operands.label_operands(row, cta_slice.tile)
        if problem.op.gives_rows:
            prefetch("evict_first")
        stats = cta_slice.merged(
            grid_buffer, reduce.grid_load(grid_buffer, words, row, grid_slots.at[0], config.warpgroups)
        )
        if problem.op.gives_rows:
            await_slice()
        cta_slice.write(
            stage, row, row_ops.with_factors(problem, stats, label_operands), label_operands, evict_first=True
        )

    pl.when(consumes)(consume)
    pl.when(jnp.logical_not(consumes))(produce)


def run(problem: Problem, config: GridConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    return launch(
        problem,
        functools.partial(_body, config=config),
        operands,
        name="grid",
        grid=problem.rows * (config.ctas + _consumers(problem, config)),
        warpgroups=config.warpgroups,
        workspaces=[reduce.grid_workspace(problem.rows, _buffers(problem, config)[1])],
        scratch=scratch(problem, config),
    )
