"""Kernels 2 and 4, block and cluster: a row is staged in shared memory, by one CTA or by a cluster of up to sixteen.

Block, after warp.py: a CTA of several warpgroups stages a row in its shared memory, and its warps merge their
(max, sum) through it. Cluster, after online.py: the CTAs of a cluster stage a part of the row each, and every warp
stores its (max, sum) into the shared memory of all of them (distributed shared memory).

Each CTA copies its part of the row asynchronously, reads it twice for the statistics (the maximum, then the sums; no
shuffle until the end), merges them with those of the row's other warps, and reads it once more to write the result.
Data are kept in registers only where that lets one more CTA fit on an SM: many CTAs keep the memory busy.
Traffic: 1 read, 1 write; in a cluster 8 bytes from each warp to each CTA too.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import mbarrier, reduce, vectors
from pallas_kernels.mosaic.reduce import Exchange
from pallas_kernels.softmax import heuristics, row_ops
from pallas_kernels.softmax.config import SharedConfig, StagedConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.rung import REDUCTION_SCRATCH, Operands, Results, Rung, declines_any, launch
from pallas_kernels.softmax.share import Share, copies, has_tails, is_ragged, tails


def warps_exchange(problem: Problem, config: SharedConfig) -> Exchange:
    """Between all warps of the blocks of a cluster."""
    return Exchange(4 * config.warpgroups * config.blocks, row_ops.quantities(problem))


def shared_bytes(problem: Problem, config: StagedConfig) -> int:
    """What Mosaic allocates for a block: operands, the exchange's slots, barriers, its own scratch."""
    share = share_bytes(problem, config) * config.slots
    exchange = warps_exchange(problem, config)
    sizes = [share] * problem.operands + [tail_bytes(problem, config) * config.slots]
    return allocated(*sizes, exchange.bytes_in_shared, 8 * (config.slots + 2), REDUCTION_SCRATCH)


def share_bytes(problem: Problem, config: SharedConfig) -> int:
    """What of a block's share of a row stands in shared memory, of one operand."""
    return config.staged(problem.max_vectors) * config.granule * vectors.VECTOR_BYTES


def tail_bytes(problem: Problem, config: SharedConfig) -> int:
    """What a share's tails take, of all operands."""
    return problem.operands * vectors.VECTOR_BYTES * has_tails(problem, config)


def allocated(*sizes: int) -> int:
    """What Mosaic allocates for arrays of these sizes, each by whole KiB."""
    return sum(-(-size // 1024) * 1024 for size in sizes)


def fitting(problem: Problem, configs: tuple[StagedConfig, ...], device: Device) -> tuple[StagedConfig, ...]:
    """The configs with which the rows can be staged."""
    # A byte is taken: Mosaic's kernels declare one beside what they are given at the launch.
    return tuple(config for config in configs if shared_bytes(problem, config) < device.smem_per_cta)


def does_not_fit(problem: Problem, configs: tuple[StagedConfig, ...], device: Device) -> str | None:
    """Why the rows cannot be staged with any of these configs."""
    if fitting(problem, configs, device):
        return None
    needed, blocks = shared_bytes(problem, configs[0]), configs[0].blocks
    over = f"{blocks} blocks" if blocks > 1 else "a block"
    return f"a row over {over} needs {needed} bytes of shared memory in each, and {device.smem_per_cta - 1} are there"


def _body(operands: Operands, *scratch: jax.Ref, config: StagedConfig, exchange: Exchange) -> None:
    *staged, slots, barriers = scratch
    staged, tails_smem = staged[: operands.problem.operands], staged[operands.problem.operands :]
    problem, clustered = operands.problem, config.blocks > 1
    group = lax.axis_index("rows")
    share = Share(
        operands,
        config,
        lax.axis_index("block") if clustered else 0,
        lax.axis_index("warpgroup") if config.warpgroups > 1 else 0,
    )
    slot_of = lambda i: [s.at[i] for s in staged] + [t.at[i, o] for t in tails_smem for o in range(problem.operands)]
    full, met = barriers.at[pl.ds(0, config.slots)], barriers.at[pl.ds(config.slots, 2)]
    first_row = group * config.rows
    rows = jnp.minimum(config.rows, problem.rows - first_row)
    mbarrier.start_barriers(barriers, (copies(problem, config),) * config.slots + (1, 1))
    exchange.clear(slots, config.warpgroups)
    if clustered:
        reduce.arrive_in_cluster()

    @pl.when(share.warpgroup == 0)
    def _():
        for turn in range(2 if clustered else 0):
            mbarrier.expect_bytes(met.at[turn], exchange.bytes_expected)
        for i in range(config.slots):
            pl.when(i < rows)(lambda i=i: share.copy(first_row + i, slot_of(i), full.at[i]))

    share.sync()

    def row_step(i: jax.Array, _: None) -> None:
        row, in_slot, turn = first_row + i, lax.rem(i, config.slots), lax.rem(i, 2)
        slot = slot_of(in_slot)
        labelled = operands.labelled(row, share.tile)
        kept = share.load(row, labelled)
        mbarrier.wait(full.at[in_slot], lax.rem(lax.div(i, config.slots), 2))
        share.fill_outside(row, slot)
        partial = share.partial_stats(slot, row, kept)
        if clustered:
            pl.when(i == 0)(reduce.await_cluster)
            stats = share.in_cluster(exchange, partial, slots.at[turn], met.at[turn], lax.rem(lax.div(i, 2), 2))
        else:
            stats = share.in_block(exchange, partial, slots.at[turn])
        share.write(slot, row, row_ops.with_factors(problem, stats, labelled), labelled, kept)
        if config.rows > 1:
            plgpu.commit_smem()
            share.sync()
            refill = jnp.logical_and(share.warpgroup == 0, i + config.slots < rows)
            pl.when(refill)(lambda: share.copy(row + config.slots, slot, full.at[in_slot]))

    if config.rows == 1:
        row_step(jnp.int32(0), None)
    else:
        lax.fori_loop(0, rows, row_step, None)


def run(problem: Problem, config: StagedConfig, *operands: jax.Array, name: str) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    if config.spread and problem.op.has_labels:
        raise ValueError(f"{config}: elements at labels are written over where a block's granules are side by side")
    if is_ragged(problem) and (config.in_registers or config.spread):
        raise ValueError(f"{config}: statistics of rows that begin anywhere are taken of shares in shared memory")
    exchange = warps_exchange(problem, config)
    tile = vectors.Tile(problem.dtype, config.registers)
    staged = (config.slots, config.staged(problem.max_vectors), config.warpgroups, *tile.shape)
    return launch(
        problem,
        lambda refs, *scratch: _body(refs, *scratch, config=config, exchange=exchange),
        operands,
        name=name,
        grid=-(-problem.rows // config.rows),
        blocks=config.blocks,
        warpgroups=config.warpgroups,
        scratch=[
            *[plgpu.SMEM(staged, problem.dtype)] * problem.operands,
            *[tails(problem, config.slots)] * has_tails(problem, config),
            exchange.scratch,
            mbarrier.barriers(config.slots + 2),
        ],
    )


def _rung(name: str, choose: Callable[[Problem, Device], tuple[StagedConfig, ...]]) -> Rung:
    """The kernel with the configs that `choose` offers, as far as the rows fit shared memory with them."""

    def unsupported(problem: Problem, device: Device) -> str | None:
        return declines_any(problem) or does_not_fit(problem, choose(problem, device), device)

    def configs(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
        return fitting(problem, choose(problem, device), device)

    return Rung(name, unsupported, configs, functools.partial(run, name=name), reads=1)


BLOCK = _rung("block", heuristics.block)
CLUSTER = _rung("cluster", heuristics.cluster)
