"""What a block of a backward kernel has in shared memory, and how many bytes that takes."""

import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import backward_bias, backward_d_out, backward_dq, backward_tiles
from pallas_kernels.attention.backward_operands import CHUNK, capped_bias, padded_dims
from pallas_kernels.attention.configs import BackwardConfig
from pallas_kernels.attention.memory import tiled
from pallas_kernels.attention.problem import Attention

ALIGNMENT = 1024  # of arrays
WORD = 8  # bytes of a barrier


def scratch(problem: Attention, config: BackwardConfig) -> dict[str, Any]:
    """Arrays and barriers, by name."""
    return (
        _by_keys(problem, config)
        | backward_bias.scratch(problem, config)
        | backward_d_out.scratch(problem)
        | backward_tiles.scratch(config)
    )


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
    return slope | dict(
        key_smem=tiled((w, head_dim // CHUNK, CHUNK, CHUNK), dtype),
        value_smem=tiled((w, CHUNK, value_dim), dtype),
        query_smem=tiled((stages, block_q, head_dim), dtype),
        d_out_smem=tiled((stages, block_q, value_dim), dtype),
        lse_smem=plgpu.SMEM((stages, block_q), jnp.float32),
        delta_smem=plgpu.SMEM((stages, block_q), jnp.float32),
        ds_smem=tiled((2, w, block_q // CHUNK, CHUNK, CHUNK), dtype),
        **backward_dq.scratch(problem, config),
        kv_empty=plgpu.Barrier(num_arrivals=w),
        kv_full=plgpu.Barrier(num_arrivals=w * (head_dim // CHUNK + 1)),
        query_full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        d_out_full=plgpu.Barrier(num_barriers=stages),
        query_empty=plgpu.Barrier(num_arrivals=w, num_barriers=stages),
        d_out_empty=plgpu.Barrier(num_arrivals=w, num_barriers=stages),
    )
