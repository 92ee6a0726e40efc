"""Tiles of a bias that pass through shared memory on their way to the transposed scores, as in `forward_bias`.

They arrive as they are in memory, queries by keys, and are transposed as they are read: no copy of the bias is made.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import gather, pipeline
from pallas_kernels.attention.backward_blocks import Block, Step
from pallas_kernels.attention.configs import WARPGROUP_ROWS, AnyBackwardConfig
from pallas_kernels.attention.memory import tiled
from pallas_kernels.attention.problem import Attention


def scratch(problem: Attention, config: AnyBackwardConfig) -> dict[str, Any]:
    """The slots, and their barriers, by name."""
    slots, readers = config.bias_slots, config.block_kv // WARPGROUP_ROWS
    if not slots:
        return {}
    return dict(
        bias_smem=tiled((slots, config.block_q, config.block_kv), problem.bias_dtype),
        bias_full=plgpu.Barrier(num_barriers=slots),
        bias_empty=plgpu.Barrier(num_arrivals=readers, num_barriers=slots),
    )


def copy(block: Block, step: Step) -> None:
    """The copying warpgroup's part of a step."""
    config, refs = block.config, block.refs
    if not config.bias_slots:
        return
    slot, rows = _slot(block, step), pl.ds(step.i * config.block_q, config.block_q)
    batch, head = gather.broadcast_index((block.batch, step.head), refs.bias.shape)
    at = refs.bias.at[batch, head, rows, pl.ds(block.first_key, config.block_kv)]
    pl.when(step.n >= config.bias_slots)(lambda: plgpu.barrier_wait(refs.bias_empty.at[slot]))
    plgpu.copy_gmem_to_smem(at, refs.bias_smem.at[slot], refs.bias_full.at[slot])


def read(block: Block, step: Step, warpgroup: Any, release: Any = None) -> jax.Array:
    """The bias of the scores of a warpgroup's 64 keys, `[keys, queries]`."""
    refs, slot, keys = block.refs, _slot(block, step), pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
    if release is not None:
        pipeline.wait(refs.bias_full, step.n, block.config.bias_slots)
    else:
        plgpu.barrier_wait(refs.bias_full.at[slot])
    bias = plgpu.load(refs.bias_smem.at[slot, :, keys].T, layout=plgpu.Layout.WGMMA)
    plgpu.commit_smem()  # the copy engine writes where threads have read
    if release is not None:
        release()
    else:
        plgpu.barrier_arrive(refs.bias_empty.at[slot])
    return bias


def _slot(block: Block, step: Step) -> Any:
    slots = block.config.bias_slots
    return lax.rem(step.n, jnp.int32(slots)) if slots > 1 else 0
