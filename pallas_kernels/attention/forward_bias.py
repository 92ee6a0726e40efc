"""Tiles of a bias that pass through shared memory on their way to the scores, in slots of their own.

A thread that loads its scores' bias from global memory takes 16 bytes of a row at a time, of sectors of 32: the loads
take longer than the products. The copy engine takes whole tiles.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.configs import WARPGROUP_ROWS, ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.attention.scores import WGMMA, Place


def can_be_copied(problem: Attention) -> bool:
    """Whether the bias consists of whole pieces of 8 rows and 128 bytes, none of them repeated."""
    if problem.bias is None or problem.bias_dtype is None:
        return False
    return problem.bias[2] % 8 == 0 and problem.bias[3] * problem.bias_dtype.itemsize % 128 == 0


def copy(block: Any, place: Place, key: jax.Array, step: jax.Array) -> None:
    """The copying warpgroup's part of a step."""
    problem, config = block.problem, block.config
    if not config.bias_slots:
        return
    slot = _slot(config, step)
    batch, head = (x if n > 1 else 0 for x, n in zip((place.batch, place.head), problem.bias[:2], strict=True))
    at = block.bias.at[batch, head, pl.ds(place.row, config.block_q), pl.ds(key, config.block_kv)]
    plgpu.barrier_wait(block.bias_empty.at[slot])
    plgpu.copy_gmem_to_smem(at, block.bias_smem.at[slot], block.bias_full.at[slot])


def begin(block: Any) -> None:
    """A computing warpgroup's part before all steps."""
    for slot in range(block.config.bias_slots):
        plgpu.barrier_arrive(block.bias_empty.at[slot])


def read(block: Any, step: jax.Array) -> jax.Array:
    """The bias of a computing warpgroup's scores."""
    slot, rows = _slot(block.config, step), pl.ds(lax.axis_index("warpgroup") * WARPGROUP_ROWS, WARPGROUP_ROWS)
    plgpu.barrier_wait(block.bias_full.at[slot])
    bias = plgpu.load(block.bias_smem.at[slot, rows], layout=WGMMA, optimized=False)
    plgpu.commit_smem()  # the copy engine writes where threads have read
    plgpu.barrier_arrive(block.bias_empty.at[slot])
    return bias


def pass_over(block: Any, step: jax.Array) -> None:
    """A computing warpgroup's part of a step of which it needs nothing."""
    if block.config.bias_slots:
        slot = _slot(block.config, step)
        plgpu.barrier_wait(block.bias_full.at[slot])
        plgpu.barrier_arrive(block.bias_empty.at[slot])


def _slot(config: ForwardConfig, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(config.bias_slots))
