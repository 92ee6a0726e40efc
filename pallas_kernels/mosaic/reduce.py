"""Who merges with whom: partial results, brought to every warp of a block, of a cluster, or of the grid.

Transport only. What comes back is one array per quantity with an element for each member, in the registers of every
warp; the caller merges it with `monoid.merge_over`, as it would merge anything else.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic import mbarrier
from pallas_kernels.mosaic.ptx import (
    SPLAT,
    WARPGROUP,
    Index,
    asm,
    c32,
    equals,
    global_address,
    scalar,
    shared_address,
    thread_in_warpgroup,
    word,
    word_address,
)

BLOCK = 15  # the hardware's barrier of a block


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Slots in shared memory for `quantities` numbers of each of `members`, which are warps or blocks.

    Two sets of slots take turns, so that a member may be one exchange ahead of another.
    """

    members: int
    quantities: int

    @property
    def bytes_expected(self) -> int:
        return 4 * self.quantities * self.members

    @property
    def slots(self) -> int:
        """Slots of each quantity: what a warp's lanes hold evenly. Those without a member hold the merge's identity."""
        # Mosaic has no layout of one element.
        return max(1 << (self.members - 1).bit_length(), 2)

    @property
    def spare(self) -> int:
        """Slots of each quantity without a member."""
        return self.slots - self.members

    @property
    def bytes_in_shared(self) -> int:
        return 2 * 4 * self.quantities * self.slots

    @property
    def scratch(self) -> Any:
        return plgpu.SMEM((2, self.quantities, self.slots), jnp.float32)

    def clear(self, slots: jax.Ref, warpgroups: int) -> None:
        """Makes the slots without a member neutral, in turns of the block, which must `sync` before it reads them."""
        threads = WARPGROUP * warpgroups

        def clear_slots(ctx, slots):
            thread = utils.thread_idx()
            for turn in range(2):
                for q in range(self.quantities):
                    fill = -math.inf if q == 0 and self.quantities > 1 else 0.0
                    at = (turn * self.quantities + q) * self.slots + self.members
                    for first in range(0, self.spare, threads):
                        spare = arith.cmpi(arith.CmpIPredicate.ult, thread, c32(self.spare - first))
                        address = arith.addi(shared_address(slots), arith.muli(thread, c32(4)))
                        address = arith.addi(address, c32(4 * (at + first)))
                        asm("@$2 st.shared.f32 [$0], $1;", "r,f,b", [address, utils.c(fill, ir.F32Type.get()), spare])

        if self.spare:
            plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(clear_slots)(slots)

    @property
    def layout(self) -> Any:
        """The members' numbers spread over the lanes of each warp, as evenly as they go."""
        lanes, per_lane = min(self.slots, 32), max(self.slots // 32, 1)
        spare = (plgpu.Replicated(32 // lanes),) if lanes < 32 else ()
        tiling = plgpu.Tiling(((self.slots,), (per_lane,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(*spare, -2), vector_dim=-1)

    def read(self, slots: jax.Ref) -> list[jax.Array]:
        """All members' numbers, quantity by quantity."""
        return [plgpu.load(slots.at[q], layout=self.layout, optimized=False) for q in range(self.quantities)]


def across_block(
    exchange: Exchange,
    values: Sequence[jax.Array],
    layout: Any,
    warpgroup: Index,
    slots: jax.Ref,
    warpgroups: int,
) -> list[jax.Array]:
    """`values`, one number of each warp (`[4]` in `layout`), from all warps of the block."""

    def publish(ctx, slots, index, *values):
        lane, slot = _lane_and_slot(index)
        first_lane = equals(lane, 0)
        for q, value in enumerate(values):
            at = arith.addi(shared_address(slots), arith.addi(slot, c32(4 * q * exchange.slots)))
            asm("@$2 st.shared.b32 [$0], $1;", "r,r,b", [at, word(value), first_lane])

    arguments = (plgpu.RefType(), SPLAT, *[layout] * len(values))
    plgpu.inline_mgpu(arg_types=arguments)(publish)(slots, jnp.int32(warpgroup), *values)
    sync_block(warpgroups)
    return exchange.read(slots)


def across_cluster(
    exchange: Exchange,
    values: Sequence[jax.Array],
    layout: Any,
    warpgroup: Index,
    slots: jax.Ref,
    barrier: jax.Ref,
    parity: jax.Array,
    blocks: int,
) -> list[jax.Array]:
    """`values` from all warps of the cluster: each warp writes its numbers into the shared memory of all `blocks`.

    `warpgroup` counts through the cluster. One way and without a reply, so nobody has to stay for others to read:
    a block that has got everybody's numbers is done with its peers.
    """

    def send(ctx, slots, barrier, index, *values):
        lane, slot = _lane_and_slot(index)
        to_peer = arith.cmpi(arith.CmpIPredicate.ult, lane, c32(blocks))
        for q, value in enumerate(values):
            at = arith.addi(shared_address(slots), arith.addi(slot, c32(4 * q * exchange.slots)))
            text = (
                "{ .reg .b32 slot, barrier; "
                "@$4 mapa.shared::cluster.u32 slot, $0, $2; @$4 mapa.shared::cluster.u32 barrier, $1, $2; "
                "@$4 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [slot], $3, [barrier]; }"
            )
            asm(text, "r,r,r,r,b", [at, shared_address(barrier), lane, word(value), to_peer])

    arguments = (plgpu.RefType(), plgpu.RefType(), SPLAT, *[layout] * len(values))
    plgpu.inline_mgpu(arg_types=arguments)(send)(slots, barrier, jnp.int32(warpgroup), *values)
    mbarrier.wait(barrier, parity)
    return exchange.read(slots)


def grid_words(rows: int, exchange: Exchange) -> jax.Array:
    """Device memory in which blocks of a grid meet: a counter of tickets, then for each row a word for each number.

    All are -1, which is no number's word: arithmetic makes only one NaN, and that is 0x7fffffff.
    """
    return jnp.full(1 + rows * exchange.quantities * exchange.members, -1, jnp.int32)


def take_ticket(words: jax.Ref, to: jax.Ref) -> None:
    """Takes the next number of the grid's counter, in `to` after a `sync`; by the block's first thread.

    Where each block takes one as it starts, it may wait for what blocks with smaller tickets do without waiting: those
    run, or have run.
    """

    def draw_ticket(ctx, words, to):
        first = equals(utils.thread_idx(), 0)
        text = (
            "{ .reg .b32 ticket; @$2 atom.relaxed.gpu.global.add.u32 ticket, [$0], 1; "
            "@$2 add.u32 ticket, ticket, 1; @$2 st.shared.u32 [$1], ticket; }"
        )
        asm(text, "l,r,b", [global_address(words), shared_address(to), first])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(draw_ticket)(words, to)


def to_grid(
    exchange: Exchange, values: Sequence[jax.Array], layout: Any, words: jax.Ref, row: Index, member: Index
) -> None:
    """Publishes `values`, one number each of a block (in all its threads), for the row's other blocks.

    A word that has changed is the number itself, so that nothing has to be ordered.
    """

    def publish_words(ctx, words, row, member, *values):
        first = equals(utils.thread_idx(), 0)
        for q, value in enumerate(values):
            at = _word(exchange, words, scalar(row), q, scalar(member))
            asm("@$2 st.relaxed.gpu.global.b32 [$0], $1;", "l,r,b", [at, word(value), first])

    arguments = (plgpu.RefType(), SPLAT, SPLAT, *[layout] * len(values))
    plgpu.inline_mgpu(arg_types=arguments)(publish_words)(words, jnp.int32(row), jnp.int32(member), *values)


def from_grid(exchange: Exchange, words: jax.Ref, row: Index, slots: jax.Ref, warpgroups: int) -> list[jax.Array]:
    """What all blocks of the row have published, or will."""
    threads = WARPGROUP * warpgroups

    def await_words(ctx, words, slots, row):
        for at in range(0, exchange.members, threads):
            of = arith.addi(utils.thread_idx(), c32(at))
            waits = arith.cmpi(arith.CmpIPredicate.ult, of, c32(exchange.members))
            for q in range(exchange.quantities):
                slot = arith.addi(shared_address(slots), arith.muli(arith.addi(of, c32(q * exchange.slots)), c32(4)))
                text = (
                    "{ .reg .b32 word; .reg .pred missing; AGAIN: @$2 ld.relaxed.gpu.global.b32 word, [$0]; "
                    "setp.eq.and.s32 missing, word, -1, $2; @missing bra AGAIN; @$2 st.shared.b32 [$1], word; }"
                )
                asm(text, "l,r,b,~{memory}", [_word(exchange, words, scalar(row), q, of), slot, waits])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SPLAT))(await_words)(words, slots, jnp.int32(row))
    sync_block(warpgroups)
    return exchange.read(slots)


def _word(exchange: Exchange, words: ir.Value, row: ir.Value, quantity: int, member: ir.Value) -> ir.Value:
    """The address of a row's number of a member."""
    of_row = arith.addi(arith.muli(row, c32(exchange.quantities * exchange.members)), c32(1))
    return word_address(words, arith.addi(arith.addi(of_row, c32(quantity * exchange.members)), member))


def sync_block(warpgroups: int) -> None:
    """Waits for all threads of the block."""

    def block_sync(ctx):
        asm(f"barrier.sync.aligned {BLOCK}, {WARPGROUP * warpgroups};", "~{memory}", [])

    plgpu.inline_mgpu()(block_sync)()


def arrive_in_cluster() -> None:
    """Tells the cluster's other blocks that this one's barriers are made, and nothing more; does not wait.

    An arrival that releases what else was written costs 1124 us instead of 1063: f32, 2048 x 262144, H200.
    """

    def arrive_cluster(ctx):
        asm("barrier.cluster.arrive.relaxed.aligned;", "~{memory}", [])

    plgpu.inline_mgpu()(arrive_cluster)()


def await_cluster() -> None:
    """Waits until all threads of the cluster's blocks have arrived."""

    def await_arrivals(ctx):
        asm("barrier.cluster.wait.acquire.aligned;", "~{memory}", [])

    plgpu.inline_mgpu()(await_arrivals)()


def _lane_and_slot(index) -> tuple[ir.Value, ir.Value]:
    """The thread's lane, and its warp's place in the slots, in bytes."""
    thread = thread_in_warpgroup()
    warp = arith.addi(arith.muli(scalar(index), c32(4)), arith.divui(thread, c32(32)))
    return arith.remui(thread, c32(32)), arith.muli(warp, c32(4))
