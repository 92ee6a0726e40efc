"""How the cotangents come into shared memory: as they are, but for those of rows without a key, which may be NaN.

Such rows are zeroed there, in the blocks of queries that have some, so that XLA need not make a copy of all cotangents.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import emit, loops
from pallas_kernels.attention import schedule
from pallas_kernels.attention.backward_blocks import Block, Step
from pallas_kernels.attention.configs import AnyBackwardConfig
from pallas_kernels.attention.memory import columns_of_tile
from pallas_kernels.attention.problem import Attention

INFINITY = 0x7F800000  # as a word
VECTOR = 16  # bytes that a thread stores at once
TILE_ROWS = 8  # of shared memory as the tensor cores read it


def blocks_with(nothing: jax.Array, config: AnyBackwardConfig) -> jax.Array:
    """Which blocks of queries have rows without a key, `[B, N, blocks]`, of the rows that have none, `[B, N, T]`."""
    missing = -nothing.shape[2] % config.block_q
    nothing = jnp.pad(nothing, ((0, 0), (0, 0), (0, missing)))
    return nothing.reshape(*nothing.shape[:2], -1, config.block_q).any(3).astype(jnp.int32)


def scratch(problem: Attention) -> dict[str, Any]:
    """The barrier at which a block arrives that is not yet fit to be read, by name."""
    return dict(d_out_landed=plgpu.Barrier()) if schedule.may_see_nothing(problem) else {}


def has_nothing(block: Block, step: Step) -> Any:
    """Whether the step's queries have rows without a key; asked for before the answer is needed."""
    if not schedule.may_see_nothing(block.problem):
        return False
    return block.refs.without_keys[loops.recomputed(block.batch), step.head, step.i] != 0


def copy(block: Block, step: Step, slot: Any, nothing: Any) -> None:
    """The copying warpgroup's part of a step; `nothing` is `has_nothing`'s answer."""
    refs, rows = block.refs, pl.ds(step.i * block.config.block_q, block.config.block_q)
    source, target, full = (
        refs.d_out.at[block.batch, rows, step.head],
        refs.d_out_smem.at[slot],
        refs.d_out_full.at[slot],
    )

    def whole() -> None:
        plgpu.copy_gmem_to_smem(source, target, full)

    if nothing is False:
        return whole()
    pl.when(jnp.logical_not(nothing))(whole)

    @pl.when(nothing)
    def part() -> None:
        plgpu.copy_gmem_to_smem(source, target, refs.d_out_landed)
        plgpu.barrier_wait(refs.d_out_landed)
        _zero_rows(target, refs.lse.at[loops.recomputed(block.batch), step.head, rows])
        plgpu.commit_smem()
        plgpu.barrier_arrive(full)


def _zero_rows(target: Any, lse: Any) -> None:
    """Zeroes the rows of a slot `[rows, columns]` whose lse is inf; each is one thread's."""
    rows, columns = target.shape
    tile = columns_of_tile(columns, jnp.dtype(target.dtype))
    row_bytes = tile * jnp.dtype(target.dtype).itemsize
    tile_bytes = TILE_ROWS * row_bytes

    def zero_rows(ctx, target, lse):
        # Threads and rows are found in here: what the compiler knew it would keep in registers all along the loop.
        places = [c * tile_bytes + b for c in range(columns // tile) for b in range(0, row_bytes, VECTOR)]
        text = (
            "{ .reg .b32 row, group, word; .reg .b64 at; .reg .pred empty; "
            f"mov.u32 row, %tid.x; and.b32 row, row, {emit.WARPGROUP - 1}; setp.lt.u32 empty, row, {rows}; "
            "mad.wide.u32 at, row, 4, $0; mov.b32 word, 0; @empty ld.global.b32 word, [at]; "
            f"setp.eq.b32 empty, word, {INFINITY}; div.u32 group, row, {TILE_ROWS}; rem.u32 row, row, {TILE_ROWS}; "
            f"mad.lo.u32 row, row, {row_bytes}, $1; mad.lo.u32 row, group, {columns // tile * tile_bytes}, row; "
            + " ".join(f"@empty st.shared.v4.b32 [row+{place}], {{0, 0, 0, 0}};" for place in places)
            + " }"
        )
        emit.ptx(text, "l,r,~{memory}", [emit.global_address(lse), emit.shared_address(target)])

    swizzle = plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
    transforms = plgpu.TilingTransform((TILE_ROWS, tile)), swizzle  # pyright: ignore[reportAbstractUsage]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType()))(zero_rows)(target, lse)


def zero_rows(target: Any, lse: Any) -> None:
    """Zeroes the rows of a stage `[rows, columns]` whose lse is inf; the calling warp's lanes take rows in turn."""
    rows, columns = target.shape
    tile = columns_of_tile(columns, jnp.dtype(target.dtype))
    row_bytes = tile * jnp.dtype(target.dtype).itemsize
    tile_bytes = TILE_ROWS * row_bytes

    def zero_rows_of_warp(ctx, target, lse):
        places = [c * tile_bytes + b for c in range(columns // tile) for b in range(0, row_bytes, VECTOR)]
        text = (
            "{ .reg .b32 lane, row, group, word, place; .reg .b64 at; .reg .pred empty, more; "
            "mov.u32 lane, %laneid; mov.b32 row, lane; AGAIN: "
            "mad.wide.u32 at, row, 4, $0; ld.global.b32 word, [at]; "
            f"setp.eq.b32 empty, word, {INFINITY}; div.u32 group, row, {TILE_ROWS}; rem.u32 word, row, {TILE_ROWS}; "
            f"mad.lo.u32 place, word, {row_bytes}, $1; mad.lo.u32 place, group, {columns // tile * tile_bytes}, place; "
            + " ".join(f"@empty st.shared.v4.b32 [place+{place}], {{0, 0, 0, 0}};" for place in places)
            + f" add.u32 row, row, 32; setp.lt.u32 more, row, {rows}; @more bra AGAIN; "
            "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; }"
        )
        emit.ptx(text, "l,r,~{memory}", [emit.global_address(lse), emit.shared_address(target)])

    swizzle = plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
    transforms = plgpu.TilingTransform((TILE_ROWS, tile)), swizzle  # pyright: ignore[reportAbstractUsage]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType()))(zero_rows_of_warp)(target, lse)
