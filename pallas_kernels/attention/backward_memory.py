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
from pallas_kernels.attention.backward_operands import CHUNK, capped_bias, padded_dims
from pallas_kernels.attention.configs import BackwardConfig
from pallas_kernels.attention.memory import tiled
from pallas_kernels.attention.problem import Attention

ALIGNMENT = 1024  # of arrays
RECORD = 8  # integers of a tile's record
RING_ROWS = tile_scheduler.RECORDS * RECORD // 2  # of two integers, as a barrier is
WORD = 8  # bytes of a barrier


def scratch(problem: Attention, config: BackwardConfig) -> dict[str, Any]:
    """Arrays and barriers, by name."""
    return _by_keys(problem, config)


def shared_bytes(problem: Attention, config: BackwardConfig) -> int:
    """What the scratch takes."""
    return size(scratch(problem, config))


def size(scratch: dict[str, Any]) -> int:
    """Bytes of shared memory."""
    found = scratch.values()
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
