"""Gathers partial results in every warp of a CTA or of a cluster, or of the CTAs of a grid that share a workspace.

These functions only move values. They return one array per value, with an element for each rank, in the registers of
every warp; the caller merges it with `monoid.merge_over`. A workspace is initialised global memory that all CTAs of a
launch share.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from pallas_kernels.mosaic import mbarrier, ptx
from pallas_kernels.mosaic.ptx import WARPGROUP, Index

BLOCK = 15  # the named barrier that the whole CTA uses


@dataclasses.dataclass(frozen=True)
class ReductionBuffer:
    """Slots in shared memory for `num_values` values of each of `num_ranks` warps or CTAs.

    It is double-buffered, so that a rank may be one exchange ahead of another.
    """

    num_ranks: int
    num_values: int

    @property
    def bytes_expected(self) -> int:
        return 4 * self.num_values * self.num_ranks

    @property
    def slots(self) -> int:
        """Slots of each value, a number that a warp's lanes hold evenly. The spare ones hold the merge's identity."""
        # Mosaic has no layout of one element.
        return max(1 << (self.num_ranks - 1).bit_length(), 2)

    @property
    def spare(self) -> int:
        """Slots of each value without a rank."""
        return self.slots - self.num_ranks

    @property
    def scratch(self) -> pl.MemoryRef:
        return plgpu.SMEM((2, self.num_values, self.slots), jnp.float32)

    def clear(self, slots: jax.Ref, warpgroups: int) -> None:
        """Fills the spare slots with the identity. The CTA must `sync` before it reads them."""
        threads = WARPGROUP * warpgroups

        def clear_slots(ctx, slots):
            thread = utils.thread_idx()
            for half in range(2):
                for q in range(self.num_values):
                    fill = -math.inf if q == 0 and self.num_values > 1 else 0.0
                    at = (half * self.num_values + q) * self.slots + self.num_ranks
                    for first in range(0, self.spare, threads):
                        spare = ptx.compare("ult", thread, self.spare - first)
                        address = ptx.add(ptx.shared_address(slots), ptx.mul(thread, 4))
                        address = ptx.add(address, 4 * (at + first))
                        ptx.asm(
                            "@$2 st.shared.f32 [$0], $1;", "r,f,b", [address, utils.c(fill, ir.F32Type.get()), spare]
                        )

        if self.spare:
            ptx.inline(clear_slots, slots, static={"buffer": self, "threads": threads})

    @property
    def layout(self) -> ptx.Layout:
        """The values of all ranks, distributed evenly over the lanes of each warp."""
        lanes, per_lane = min(self.slots, 32), max(self.slots // 32, 1)
        spare = (plgpu.Replicated(32 // lanes),) if lanes < 32 else ()
        tiling = plgpu.Tiling(((self.slots,), (per_lane,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(*spare, -2), vector_dim=-1)

    def read(self, slots: jax.Ref) -> list[jax.Array]:
        """Returns the values of all ranks, one array per value."""
        return [plgpu.load(slots.at[q], layout=self.layout, optimized=False) for q in range(self.num_values)]


def block_gather(
    buffer: ReductionBuffer,
    values: Sequence[jax.Array],
    layout: ptx.Layout,
    warpgroup: Index,
    slots: jax.Ref,
    warpgroups: int,
) -> list[jax.Array]:
    """Gathers `values`, of which each warp has one (`[4]` in `layout`), from all warps of the CTA."""

    def publish(ctx, slots, index, *values):
        lane, slot = _lane_and_slot(index)
        first_lane = ptx.compare("eq", lane, 0)
        for q, value in enumerate(values):
            at = ptx.add(ptx.shared_address(slots), ptx.add(slot, 4 * q * buffer.slots))
            ptx.asm("@$2 st.shared.b32 [$0], $1;", "r,r,b", [at, ptx.word(value), first_lane])

    ptx.inline(publish, slots, warpgroup, *((value, layout) for value in values), static={"buffer": buffer})
    sync_block(warpgroups)
    return buffer.read(slots)


def cluster_gather(
    buffer: ReductionBuffer,
    values: Sequence[jax.Array],
    layout: ptx.Layout,
    warpgroup: Index,
    slots: jax.Ref,
    barrier: jax.Ref,
    parity: jax.Array,
    ctas: int,
) -> list[jax.Array]:
    """Gathers `values` from all warps of the cluster: each warp stores its own in the shared memory of all `ctas`.

    `warpgroup` counts through the cluster. No CTA reads from another, so that a CTA may exit as soon as it has received
    all values.
    """

    def send(ctx, slots, barrier, index, *values):
        lane, slot = _lane_and_slot(index)
        to_peer = ptx.compare("ult", lane, ctas)
        for q, value in enumerate(values):
            at = ptx.add(ptx.shared_address(slots), ptx.add(slot, 4 * q * buffer.slots))
            text = (
                "{ .reg .b32 slot, barrier; "
                "@$4 mapa.shared::cluster.u32 slot, $0, $2; @$4 mapa.shared::cluster.u32 barrier, $1, $2; "
                "@$4 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [slot], $3, [barrier]; }"
            )
            ptx.asm(text, "r,r,r,r,b", [at, ptx.shared_address(barrier), lane, ptx.word(value), to_peer])

    ptx.inline(
        send, slots, barrier, warpgroup, *((value, layout) for value in values), static={"buffer": buffer, "ctas": ctas}
    )
    mbarrier.wait(barrier, parity)
    return buffer.read(slots)


def sync_block(warpgroups: int) -> None:
    """Waits for all threads of the CTA."""

    def block_sync(ctx):
        ptx.asm(f"barrier.sync.aligned {BLOCK}, {WARPGROUP * warpgroups};", "~{memory}", [])

    ptx.inline(block_sync, static={"warpgroups": warpgroups})


def arrive_in_cluster() -> None:
    """Tells the cluster's other CTAs that this one's barriers are initialised, without waiting for them.

    The arrival is relaxed: one with release semantics orders all earlier writes and takes longer (docs/tuning).
    """

    def arrive_cluster(ctx):
        ptx.asm("barrier.cluster.arrive.relaxed.aligned;", "~{memory}", [])

    ptx.inline(arrive_cluster)


def await_cluster() -> None:
    """Waits until all threads of the cluster's CTAs have arrived."""

    def await_arrivals(ctx):
        ptx.asm("barrier.cluster.wait.acquire.aligned;", "~{memory}", [])

    ptx.inline(await_arrivals)


def _lane_and_slot(index) -> tuple[ir.Value, ir.Value]:
    """Returns the thread's lane, and the offset of its warp's slot in bytes."""
    thread = ptx.thread_in_warpgroup()
    warp = ptx.add(ptx.mul(ptx.scalar(index), 4), ptx.div(thread, 32))
    return ptx.rem(thread, 32), ptx.mul(warp, 4)


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
    """Returns a tile counter, then for each row a word for each value of each rank.

    All words are -1, which no value is: arithmetic makes only one NaN, 0x7fffffff.
    """
    return jnp.full(1 + rows * buffer.num_values * buffer.num_ranks, -1, jnp.int32)


def next_tile(words: jax.Ref, to: jax.Ref) -> None:
    """Increments the tile counter by the CTA's first thread; after a `sync`, `to` has the CTA's tile.

    If each CTA takes its tile as it starts, it may wait for CTAs with earlier tiles that do not wait themselves: those
    run, or have run.
    """

    def count_tile(ctx, words, to):
        first = ptx.compare("eq", utils.thread_idx(), 0)
        text = (
            "{ .reg .b32 ticket; @$2 atom.relaxed.gpu.global.add.u32 ticket, [$0], 1; "
            "@$2 add.u32 ticket, ticket, 1; @$2 st.shared.u32 [$1], ticket; }"
        )
        ptx.asm(text, "l,r,b", [ptx.global_address(words), ptx.shared_address(to), first])

    ptx.inline(count_tile, words, to)


def grid_store(
    buffer: ReductionBuffer, values: Sequence[jax.Array], layout: ptx.Layout, words: jax.Ref, row: Index, rank: Index
) -> None:
    """Stores `values`, of which all threads of the CTA have the same, for the row's other CTAs.

    A word that is not -1 is the value itself, so that no order among stores is needed.
    """

    def publish_words(ctx, words, row, rank, *values):
        first = ptx.compare("eq", utils.thread_idx(), 0)
        for q, value in enumerate(values):
            at = _word(buffer, words, ptx.scalar(row), q, ptx.scalar(rank))
            ptx.asm("@$2 st.relaxed.gpu.global.b32 [$0], $1;", "l,r,b", [at, ptx.word(value), first])

    ptx.inline(publish_words, words, row, rank, *((value, layout) for value in values), static={"buffer": buffer})


def grid_load(buffer: ReductionBuffer, words: jax.Ref, row: Index, slots: jax.Ref, warpgroups: int) -> list[jax.Array]:
    """Waits for the values of all CTAs of the row and loads them."""
    threads = WARPGROUP * warpgroups

    def await_words(ctx, words, slots, row):
        for at in range(0, buffer.num_ranks, threads):
            of = ptx.add(utils.thread_idx(), at)
            waits = ptx.compare("ult", of, buffer.num_ranks)
            for q in range(buffer.num_values):
                slot = ptx.add(ptx.shared_address(slots), ptx.mul(ptx.add(of, q * buffer.slots), 4))
                text = (
                    "{ .reg .b32 word; .reg .pred missing; AGAIN: @$2 ld.relaxed.gpu.global.b32 word, [$0]; "
                    "setp.eq.and.s32 missing, word, -1, $2; @missing bra AGAIN; @$2 st.shared.b32 [$1], word; }"
                )
                ptx.asm(text, "l,r,b,~{memory}", [_word(buffer, words, ptx.scalar(row), q, of), slot, waits])

    ptx.inline(await_words, words, slots, row, static={"buffer": buffer, "threads": threads})
    sync_block(warpgroups)
    return buffer.read(slots)


def _word(buffer: ReductionBuffer, words: ir.Value, row: ir.Value, value_index: int, rank: ir.Value) -> ir.Value:
    """Returns the address of a rank's value of a row."""
    of_row = ptx.add(ptx.mul(row, buffer.num_values * buffer.num_ranks), 1)
    return ptx.word_address(words, ptx.add(ptx.add(of_row, value_index * buffer.num_ranks), rank))
