"""What a block of a backward kernel has in shared memory, and how many bytes that takes."""

import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import (
    backward_bias,
    backward_d_out,
    backward_dq,
    backward_tiles,
    pipeline,
    schedule,
    tile_scheduler,
)
from pallas_kernels.attention.backward_operands import CHUNK, TILE, capped_bias, padded_dims
from pallas_kernels.attention.configs import AnyBackwardConfig, BackwardConfig, ByGradientConfig
from pallas_kernels.attention.memory import tiled
from pallas_kernels.attention.problem import Attention

ALIGNMENT = 1024  # of arrays
RECORD = 8  # integers of a tile's record
RING_ROWS = tile_scheduler.RECORDS * RECORD // 2  # of two integers, as a barrier is
WORD = 8  # bytes of a barrier


def scratch(problem: Attention, config: AnyBackwardConfig) -> dict[str, Any]:
    """Arrays and barriers, by name."""
    if isinstance(config, BackwardConfig):
        return _by_keys(problem, config)
    found = _by_gradient(problem, config)
    return (
        found
        | backward_bias.scratch(problem, config)
        | backward_d_out.scratch(problem)
        | backward_tiles.scratch(config)
    )


def shared_bytes(problem: Attention, config: AnyBackwardConfig) -> int:
    """What the scratch takes."""
    found = scratch(problem, config).values()
    barriers = sum(int(np.prod(x.num_barriers)) for x in found if isinstance(x, plgpu.Barrier))
    arrays = [math.prod(x.shape) * x.dtype.itemsize for x in found if not isinstance(x, plgpu.Barrier)]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in arrays) + barriers * WORD


def _by_keys(problem: Attention, config: BackwardConfig) -> dict[str, Any]:
    """Of a kernel with 64 keys to a warpgroup."""
    (head_dim, value_dim), dtype = padded_dims(problem), problem.dtype
    w, block_q, stages = config.warpgroups, config.block_q, config.stages
    slope = dict(slope_smem=tiled((w, CHUNK, block_q), jnp.float32)) if capped_bias(problem) else {}
    if config.bias_slots:
        slope |= dict(bias_smem=tiled((config.bias_slots, block_q, config.block_kv), problem.bias_dtype))
    return slope | dict(
        key_smem=tiled((w, head_dim // CHUNK, CHUNK, CHUNK), dtype),
        value_smem=tiled((w, CHUNK, value_dim), dtype),
        query_smem=tiled((stages, block_q, head_dim), dtype),
        d_out_smem=tiled((stages, block_q, value_dim), dtype),
        statistics_smem=plgpu.SMEM((2 * stages, block_q), jnp.float32),
        ds_smem=tiled((2, w, block_q // CHUNK, CHUNK, CHUNK), dtype),
        **backward_dq.scratch(problem, config),
        words=pipeline.barriers(RING_ROWS + len(barrier_arrivals(problem, config))),
    )


def barrier_arrivals(problem: Attention, config: BackwardConfig) -> tuple[int, ...]:
    """The arrivals of each mbarrier."""
    return tuple(n for arrivals in _barriers(problem, config).values() for n in arrivals)


def barrier_slices(problem: Attention, config: BackwardConfig) -> dict[str, slice]:
    """Which mbarriers are which."""
    found, at = {}, 0
    for name, arrivals in _barriers(problem, config).items():
        found[name] = slice(at, at + len(arrivals))
        at += len(arrivals)
    return found


def _barriers(problem: Attention, config: BackwardConfig) -> dict[str, tuple[int, ...]]:
    warps, stages, slots = pipeline.WARPS * config.warpgroups, config.stages, config.bias_slots
    biases = {"bias_full": (1,) * slots, "bias_empty": (warps,) * slots} if slots else {}
    landed = {"landed": (1,) * stages} if schedule.may_see_nothing(problem) else {}
    return landed | biases | {
        "kv_full": (1,),
        "kv_empty": (warps,),
        "full": (1,) * stages,
        "empty": (warps,) * stages,
    }


def _by_gradient(problem: Attention, config: ByGradientConfig) -> dict[str, Any]:
    """Of a kernel with a warpgroup to each gradient."""
    (head_dim, value_dim), dtype = padded_dims(problem), problem.dtype
    stages, d_out_stages = config.stages, config.d_out_stages
    slope = dict(slope_smem=tiled((1, *TILE), jnp.float32)) if capped_bias(problem) else {}
    return slope | dict(
        key_smem=tiled((1, CHUNK, head_dim), dtype),
        value_smem=tiled((1, CHUNK, value_dim), dtype),
        query_smem=tiled((stages, CHUNK, head_dim), dtype),
        d_out_smem=tiled((d_out_stages, CHUNK, value_dim), dtype),
        p_smem=tiled((1, *TILE), jnp.float32),
        ds_smem=tiled((2, *TILE), dtype),
        dq_smem=tiled((config.dq_slots, *TILE), jnp.float32),
        lse_smem=plgpu.SMEM((stages, CHUNK), jnp.float32),
        delta_smem=plgpu.SMEM((d_out_stages, CHUNK), jnp.float32),
        key_full=plgpu.Barrier(),
        value_full=plgpu.Barrier(),
        kv_empty=plgpu.Barrier(num_arrivals=2),
        query_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        query_empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        d_out_full=plgpu.Barrier(num_arrivals=2, num_barriers=d_out_stages),
        d_out_empty=plgpu.Barrier(num_arrivals=2, num_barriers=d_out_stages),
        p_full=plgpu.Barrier(),
        p_empty=plgpu.Barrier(),
        ds_full=plgpu.Barrier(num_barriers=2),
        ds_empty=plgpu.Barrier(num_barriers=2),
    )
