"""A step's K Q^T, transposed: begun in its own step, or a step ahead, beside the products that give dQ and dK."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import loops
from pallas_kernels.attention import pipeline, products
from pallas_kernels.attention.backward_blocks import Block, Step
from pallas_kernels.attention.backward_operands import CHUNK
from pallas_kernels.attention.scores import WGMMA


def begin(block: Block, slot: jax.Array) -> jax.Array:
    """Begins the product of the warpgroup's keys with the queries in that slot."""
    refs, warpgroup = block.refs, loops.recomputed(lax.axis_index("warpgroup"))
    keys = [refs.key_smem.at[warpgroup, c] for c in range(refs.key_smem.shape[1])]
    return products.begin_pieces(keys, refs.query_smem.at[slot])


def first(block: Block) -> jax.Array:
    """The first step's, once it is there. Without a step nothing is read: the next block's queries may be arriving."""
    slot = lax.rem(block.steps_before, block.config.stages)

    def found() -> jax.Array:
        pipeline.wait(block.refs.full, block.steps_before, block.config.stages)
        return products.finish(begin(block, slot), later=0)

    def nothing() -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((CHUNK, block.config.block_q), jnp.float32), WGMMA)

    return lax.cond(block.steps > 0, found, nothing)


def begin_following(block: Block, step: Step) -> jax.Array:
    """Begins the next step's; after the last one, that of the same queries once more, for nobody."""
    follows = step.n + 1 < block.steps_before + block.steps
    slot = lax.rem(step.n + follows.astype(jnp.int32), block.config.stages)
    pl.when(follows)(lambda: pipeline.wait(block.refs.full, step.n + 1, block.config.stages))
    return begin(block, slot)
