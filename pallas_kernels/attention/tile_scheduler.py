"""Which tiles a CTA works on: a ring of tile records in shared memory, which one warpgroup fills ahead of the others.

A record says what the warpgroups need to know of a tile. Warpgroup 0 publishes record `t + LOOKAHEAD` in its first step
of tile `t`. The pipeline, of two stages, orders a record before its readers: a warpgroup that has waited for the stage
behind tile `t`, or for any of its steps but the first, knows that all warps have released the last step before tile
`t`, or a later one, and so that record `t + 1` is written; the warp that refills a stage after the last step of tile
`t` knows that `t + 2` is, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.attention import gather
from pallas_kernels.mosaic import ptx, workspace

LOOKAHEAD = 2  # tiles
RECORDS = 8  # a power of two; a warpgroup may still read the record of two tiles before


def rows(fields: int) -> int:
    """Rows of two integers, each as large as a barrier, that the ring of records of `fields` integers takes."""
    return RECORDS * 2 * -(-fields // 4)


def publish(tile_smem: jax.Ref, t: Any, record: Sequence[Any]) -> None:
    """The calling warpgroup writes the record of the CTA's tile `t`."""
    record = [jnp.int32(x) for x in record]
    record += [record[0]] * (-len(record) % 4)

    def store_told(ctx, words, *numbers):
        first = ptx.equals(ptx.thread_in_warpgroup(), 0)
        for i in range(0, len(numbers), 4):
            address = arith.addi(ptx.shared_address(words), ptx.c32(4 * i))
            operands = [address, *map(ptx.scalar, numbers[i : i + 4]), first]
            ptx.asm("@$5 st.shared.v4.s32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,b,~{memory}", operands)
        ptx.asm("bar.warp.sync 0xffffffff;", "~{memory}", [])  # the other lanes of the warp may read it at once

    arguments = (plgpu.RefType(), *[ptx.SPLAT] * len(record))
    rows = tile_smem.shape[0] // RECORDS
    plgpu.inline_mgpu(arg_types=arguments)(store_told)(tile_smem.at[pl.ds(_slot(t) * rows, rows)], *record)


def read(tile_smem: jax.Ref, t: Any, *, uniform: bool = True) -> tuple[jax.Array, ...]:
    """The record of the CTA's tile `t`; `uniform`: in registers of the warp, which one warp's copies do not need."""
    rows, columns = tile_smem.shape[0] // RECORDS, tile_smem.shape[1]
    numbers = (tile_smem[_slot(t) * rows + row, column] for row in range(rows) for column in range(columns))
    return tuple(gather.uniform(x) if uniform else x for x in numbers)


def draw(tickets: jax.Ref) -> jax.Array:
    """The next ticket of the launch's counter, in the first thread of the calling warpgroup; 0 in the others."""

    def draw_tile(ctx, words):
        first = ptx.equals(ptx.thread_in_warpgroup(), 0)
        text = "mov.b32 $0, 0; @$2 atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"
        operands = [ptx.global_address(words), first]
        return ptx.integer(llvm.inline_asm(ptx.i32(), operands, text, "=&r,l,b", has_side_effects=True))

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=ptx.INTEGER)(draw_tile)(tickets)


def call(kernel: Callable[..., Any], ctas: int, out_type: Any, *operands: Any) -> Any:
    """Calls a kernel with a counter of tickets, which `vmap` does not share between the calls that it makes of one."""

    def draw(*arrays: jax.Array) -> list[jax.Array]:
        return workspace.with_workspace(kernel, arrays, [jnp.full(1, LOOKAHEAD * ctas, jnp.int32)], out_type)[0]

    return sequential_vmap(draw)(*operands)


def _slot(t: Any) -> jax.Array:
    return lax.rem(jnp.int32(t), jnp.int32(RECORDS))
