"""Workspace: initialised global memory that all CTAs of a launch share.

The CTAs of a row exchange their statistics through it: see `grid_workspace`, `grid_store` and `grid_load`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic.ptx import (
    WARPGROUP,
    Index,
    asm,
    c32,
    equals,
    global_address,
    inline,
    scalar,
    shared_address,
    word,
    word_address,
)
from pallas_kernels.mosaic.reduce import ReductionBuffer, sync_block


def with_workspace(
    kernel: Callable[..., Any],
    operands: Sequence[jax.Array],
    workspace: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the results of `kernel(*operands, *workspace)`, and the workspace's contents after it.

    The kernel gets the workspace as references. They exist only here: `jax.new_ref` would give the caller an effect,
    and XLA's partitioner lowers nothing that has one.
    """

    def run(state: tuple[list[jax.Ref], list[jax.Ref]]) -> None:
        refs, outs = state
        for out, value in zip(outs, kernel(*operands, *refs), strict=True):
            out[...] = value

    empty = [lax.empty(x.shape, x.dtype) for x in out_type]
    written, results = pl.run_state(run)((list(workspace), empty))
    return results, written


def grid_workspace(rows: int, buffer: ReductionBuffer) -> jax.Array:
    """A tile counter, then for each row a word for each value of each rank.

    All words are -1, which no value is: arithmetic makes only one NaN, 0x7fffffff.
    """
    return jnp.full(1 + rows * buffer.num_values * buffer.num_ranks, -1, jnp.int32)


def next_tile(words: jax.Ref, to: jax.Ref) -> None:
    """Increments the tile counter by the CTA's first thread; after a `sync`, `to` has the CTA's tile.

    If each CTA takes its tile as it starts, it may wait for CTAs with earlier tiles that do not wait themselves: those
    run, or have run.
    """

    def count_tile(ctx, words, to):
        first = equals(utils.thread_idx(), 0)
        text = (
            "{ .reg .b32 ticket; @$2 atom.relaxed.gpu.global.add.u32 ticket, [$0], 1; "
            "@$2 add.u32 ticket, ticket, 1; @$2 st.shared.u32 [$1], ticket; }"
        )
        asm(text, "l,r,b", [global_address(words), shared_address(to), first])

    inline(count_tile, words, to)


def grid_store(
    buffer: ReductionBuffer, values: Sequence[jax.Array], layout: Any, words: jax.Ref, row: Index, rank: Index
) -> None:
    """Stores `values`, of which all threads of the CTA have the same, for the row's other CTAs.

    A word that is not -1 is the value itself, so that no order among stores is needed.
    """

    def publish_words(ctx, words, row, rank, *values):
        first = equals(utils.thread_idx(), 0)
        for q, value in enumerate(values):
            at = _word(buffer, words, scalar(row), q, scalar(rank))
            asm("@$2 st.relaxed.gpu.global.b32 [$0], $1;", "l,r,b", [at, word(value), first])

    inline(publish_words, words, row, rank, *((value, layout) for value in values))


def grid_load(buffer: ReductionBuffer, words: jax.Ref, row: Index, slots: jax.Ref, warpgroups: int) -> list[jax.Array]:
    """Waits for the values of all CTAs of the row and loads them."""
    threads = WARPGROUP * warpgroups

    def await_words(ctx, words, slots, row):
        for at in range(0, buffer.num_ranks, threads):
            of = arith.addi(utils.thread_idx(), c32(at))
            waits = arith.cmpi(arith.CmpIPredicate.ult, of, c32(buffer.num_ranks))
            for q in range(buffer.num_values):
                slot = arith.addi(shared_address(slots), arith.muli(arith.addi(of, c32(q * buffer.slots)), c32(4)))
                text = (
                    "{ .reg .b32 word; .reg .pred missing; AGAIN: @$2 ld.relaxed.gpu.global.b32 word, [$0]; "
                    "setp.eq.and.s32 missing, word, -1, $2; @missing bra AGAIN; @$2 st.shared.b32 [$1], word; }"
                )
                asm(text, "l,r,b,~{memory}", [_word(buffer, words, scalar(row), q, of), slot, waits])

    inline(await_words, words, slots, row)
    sync_block(warpgroups)
    return buffer.read(slots)


def _word(buffer: ReductionBuffer, words: ir.Value, row: ir.Value, value_index: int, rank: ir.Value) -> ir.Value:
    """The address of a rank's value of a row."""
    of_row = arith.addi(arith.muli(row, c32(buffer.num_values * buffer.num_ranks)), c32(1))
    return word_address(words, arith.addi(arith.addi(of_row, c32(value_index * buffer.num_ranks)), rank))
