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
from pallas_kernels.mosaic.reduce import ReductionBuffer
from pallas_kernels.softmax import heuristics, row_ops
from pallas_kernels.softmax.config import SharedConfig, StagedConfig
from pallas_kernels.softmax.cta_slice import CtaSlice, copies, has_tails, is_ragged, tails
from pallas_kernels.softmax.kernel import REDUCTION_SCRATCH, Kernel, Operands, Results, launch, unsupported_reason
from pallas_kernels.softmax.problem import Problem


def warps_buffer(problem: Problem, config: SharedConfig) -> ReductionBuffer:
    """The buffer in which all warps of a cluster exchange their statistics."""
    return ReductionBuffer(4 * config.warpgroups * config.ctas, row_ops.num_values(problem))


def shared_bytes(problem: Problem, config: StagedConfig) -> int:
    """The shared memory that Mosaic allocates for a CTA."""
    operand = slice_bytes(problem, config) * config.stages
    buffer = warps_buffer(problem, config)
    sizes = [operand] * problem.operands + [tail_bytes(problem, config) * config.stages]
    return allocated(*sizes, buffer.bytes_in_shared, 8 * (config.stages + 2), REDUCTION_SCRATCH)


def slice_bytes(problem: Problem, config: SharedConfig) -> int:
    """The bytes of shared memory that a CTA's slice of a row takes, for one operand."""
    return config.staged(problem.max_vectors) * config.chunk * vectors.VECTOR_BYTES


def tail_bytes(problem: Problem, config: SharedConfig) -> int:
    """The bytes that a slice's tails take, for all operands."""
    return problem.operands * vectors.VECTOR_BYTES * has_tails(problem, config)


def allocated(*sizes: int) -> int:
    """The bytes that Mosaic allocates for arrays of these sizes: each is rounded up to a KiB."""
    return sum(-(-size // 1024) * 1024 for size in sizes)


def fitting(problem: Problem, configs: tuple[StagedConfig, ...], device: Device) -> tuple[StagedConfig, ...]:
    """The configs with which the rows can be staged."""
    # Mosaic's kernels declare one byte of shared memory beside what the launch gives them.
    return tuple(config for config in configs if shared_bytes(problem, config) < device.smem_per_cta)


def does_not_fit(problem: Problem, configs: tuple[StagedConfig, ...], device: Device) -> str | None:
    """Why the rows cannot be staged with any of these configs."""
    if fitting(problem, configs, device):
        return None
    needed, ctas = shared_bytes(problem, configs[0]), configs[0].ctas
    over = f"{ctas} blocks" if ctas > 1 else "a block"
    return f"a row over {over} needs {needed} bytes of shared memory in each, and {device.smem_per_cta - 1} are there"


def _body(operands: Operands, *scratch: jax.Ref, config: StagedConfig, buffer: ReductionBuffer) -> None:
    *staged, slots, barriers = scratch
    staged, tails_smem = staged[: operands.problem.operands], staged[operands.problem.operands :]
    problem, clustered = operands.problem, config.ctas > 1
    group = lax.axis_index("rows")
    cta_slice = CtaSlice(
        operands,
        config,
        lax.axis_index("cta") if clustered else 0,
        lax.axis_index("warpgroup") if config.warpgroups > 1 else 0,
    )
    stage_of = lambda i: [s.at[i] for s in staged] + [t.at[i, o] for t in tails_smem for o in range(problem.operands)]
    full, cluster_mbar = barriers.at[pl.ds(0, config.stages)], barriers.at[pl.ds(config.stages, 2)]
    first_row = group * config.rows
    rows = jnp.minimum(config.rows, problem.rows - first_row)
    mbarrier.start_barriers(barriers, (copies(problem, config),) * config.stages + (1, 1))
    buffer.clear(slots, config.warpgroups)
    if clustered:
        reduce.arrive_in_cluster()

    @pl.when(cta_slice.warpgroup == 0)
    def _():
        for half in range(2 if clustered else 0):
            mbarrier.expect_bytes(cluster_mbar.at[half], buffer.bytes_expected)
        for i in range(config.stages):
            pl.when(i < rows)(lambda i=i: cta_slice.copy(first_row + i, stage_of(i), full.at[i]))

    cta_slice.sync()

    def row_step(i: jax.Array, _: None) -> None:
        row, stage_i, half = first_row + i, lax.rem(i, config.stages), lax.rem(i, 2)
        stage = stage_of(stage_i)
        label_operands = operands.label_operands(row, cta_slice.tile)
        register_chunks = cta_slice.load(row, label_operands)
        mbarrier.wait(full.at[stage_i], lax.rem(lax.div(i, config.stages), 2))
        cta_slice.fill_outside(row, stage)
        partial = cta_slice.partial_stats(stage, row, register_chunks)
        if clustered:
            pl.when(i == 0)(reduce.await_cluster)
            stats = cta_slice.reduce_cluster(
                buffer, partial, slots.at[half], cluster_mbar.at[half], lax.rem(lax.div(i, 2), 2)
            )
        else:
            stats = cta_slice.reduce_block(buffer, partial, slots.at[half])
        cta_slice.write(
            stage, row, row_ops.with_factors(problem, stats, label_operands), label_operands, register_chunks
        )
        if config.rows > 1:
            plgpu.commit_smem()
            cta_slice.sync()
            refill = jnp.logical_and(cta_slice.warpgroup == 0, i + config.stages < rows)
            pl.when(refill)(lambda: cta_slice.copy(row + config.stages, stage, full.at[stage_i]))

    if config.rows == 1:
        row_step(jnp.int32(0), None)
    else:
        lax.fori_loop(0, rows, row_step, None)


def run(problem: Problem, config: StagedConfig, *operands: jax.Array, name: str) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    if config.interleaved and problem.op.has_labels:
        raise ValueError(f"{config}: elements at labels are written over where a CTA's chunks are side by side")
    if is_ragged(problem) and (config.register_chunks or config.interleaved):
        raise ValueError(f"{config}: statistics of rows that begin anywhere are taken of slices in shared memory")
    buffer = warps_buffer(problem, config)
    tile = vectors.RegisterTile(problem.dtype, config.registers)
    staged = (config.stages, config.staged(problem.max_vectors), config.warpgroups, *tile.shape)
    return launch(
        problem,
        lambda refs, *scratch: _body(refs, *scratch, config=config, buffer=buffer),
        operands,
        name=name,
        grid=-(-problem.rows // config.rows),
        ctas=config.ctas,
        warpgroups=config.warpgroups,
        scratch=[
            *[plgpu.SMEM(staged, problem.dtype)] * problem.operands,
            *[tails(problem, config.stages)] * has_tails(problem, config),
            buffer.scratch,
            mbarrier.barriers(config.stages + 2),
        ],
    )


def _kernel(name: str, choose: Callable[[Problem, Device], tuple[StagedConfig, ...]]) -> Kernel:
    """The kernel with those configs of `choose` with which the rows fit shared memory."""

    def unsupported(problem: Problem, device: Device) -> str | None:
        return unsupported_reason(problem) or does_not_fit(problem, choose(problem, device), device)

    def configs(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
        return fitting(problem, choose(problem, device), device)

    return Kernel(name, unsupported, configs, functools.partial(run, name=name), reads=1)


BLOCK = _kernel("block", heuristics.block)
CLUSTER = _kernel("cluster", heuristics.cluster)
