"""Which tiles a CTA works on: a ring of tile records in shared memory, which one warpgroup fills ahead of the others.

A record says what the warpgroups need to know of a tile. Warpgroup 0 publishes record `t + LOOKAHEAD` when it starts
tile `t`. The pipeline orders the record before its first reader: a warpgroup is at most two stages behind another one,
each tile has one stage at least, and the stage that a reader has waited for was released after the record was written.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import emit
from pallas_kernels.attention import gather

LOOKAHEAD = 3  # tiles
RECORDS = 8  # a power of two; a warpgroup may still read the record of two tiles before


def scratch(fields: int) -> dict[str, Any]:
    """The ring, of records of `fields` integers."""
    return {"tile_smem": plgpu.SMEM((RECORDS, fields), jnp.int32)}


def publish(tile_smem: jax.Ref, t: Any, record: Sequence[Any]) -> None:
    """The calling warpgroup writes the record of the CTA's tile `t`."""
    places = range(len(record))

    def store_told(ctx, words, *numbers):
        first = emit.equals(emit.thread_in_warpgroup(), 0)
        for at, number in zip(places, numbers, strict=True):
            address = arith.addi(emit.shared_address(words), emit.c32(4 * at))
            emit.ptx("@$2 st.shared.s32 [$0], $1;", "r,r,b,~{memory}", [address, emit.scalar(number), first])

    arguments = (plgpu.RefType(), *[emit.SPLAT] * len(record))
    record = [jnp.int32(x) for x in record]
    rows = tile_smem.shape[0] // RECORDS
    plgpu.inline_mgpu(arg_types=arguments)(store_told)(tile_smem.at[pl.ds(_slot(t) * rows, rows)], *record)


def read(tile_smem: jax.Ref, t: Any) -> tuple[jax.Array, ...]:
    """The record of the CTA's tile `t`."""
    rows, columns = tile_smem.shape[0] // RECORDS, tile_smem.shape[1]
    places = [(_slot(t) * rows + row, column) for row in range(rows) for column in range(columns)]
    return tuple(gather.uniform(tile_smem[place]) for place in places)


def draw(tickets: jax.Ref) -> jax.Array:
    """The next number of the grid's counter, in the CTA's first thread alone; others get 0. It is not waited for yet."""

    def draw_number(ctx, tickets):
        text = (
            "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
            "mov.b32 $0, 0; @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1; @first add.u32 $0, $0, 1; }"
        )
        ticket = llvm.inline_asm(emit.i32(), [emit.global_address(tickets)], text, "=&r,l", has_side_effects=True)
        return emit.integer(ticket)

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=emit.INTEGER)(draw_number)(tickets)


def _slot(t: Any) -> jax.Array:
    return lax.rem(jnp.int32(t), jnp.int32(RECORDS))
