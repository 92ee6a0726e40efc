"""Who merges with whom: each warp's partial results, brought to every warp of a block or of a cluster.

Transport only. What comes back is one array per quantity with an element for each warp, in the registers of every
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
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import asynchronous
from pallas_kernels.asynchronous import shared_address
from pallas_kernels.mosaic import SPLAT, WARPGROUP, Index, c32, ptx, scalar


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Slots in shared memory for `quantities` numbers of each warp of `blocks` blocks of `warpgroups` warpgroups.

    Two sets of slots take turns, so that a warp may be one exchange ahead of another.
    """

    blocks: int
    warpgroups: int
    quantities: int

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups * self.blocks

    @property
    def bytes_expected(self) -> int:
        return 4 * self.quantities * self.warps

    @property
    def slots(self) -> int:
        """Slots for each quantity: what a warp's lanes hold evenly. Those without a warp hold the merge's identity."""
        return 1 << (self.warps - 1).bit_length()

    @property
    def scratch(self) -> Any:
        return plgpu.SMEM((2, self.quantities, self.slots), jnp.float32)

    def clear(self, slots: jax.Ref) -> None:
        """Makes the slots without a warp neutral; the block must `sync` before it reads them."""

        def clear_slots(ctx, slots):
            thread = utils.thread_idx()
            for turn in range(2):
                for q in range(self.quantities):
                    fill = -math.inf if q == 0 and self.quantities > 1 else 0.0
                    at = (turn * self.quantities + q) * self.slots
                    spare = arith.cmpi(arith.CmpIPredicate.ult, thread, c32(self.slots - self.warps))
                    address = arith.addi(shared_address(slots), arith.muli(thread, c32(4)))
                    address = arith.addi(address, c32(4 * (at + self.warps)))
                    ptx("@$2 st.shared.f32 [$0], $1;", "r,f,b", [address, utils.c(fill, ir.F32Type.get()), spare])

        if self.slots > self.warps:
            plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(clear_slots)(slots)

    @property
    def layout(self) -> Any:
        """The warps' numbers spread over the lanes of each warp, as evenly as they go."""
        lanes, per_lane = min(self.slots, 32), max(self.slots // 32, 1)
        spare = (plgpu.Replicated(32 // lanes),) if lanes < 32 else ()
        tiling = plgpu.Tiling(((self.slots,), (per_lane,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(*spare, -2), vector_dim=-1)

    def read(self, slots: jax.Ref) -> list[jax.Array]:
        """All warps' numbers, quantity by quantity."""
        return [plgpu.load(slots.at[q], layout=self.layout, optimized=False) for q in range(self.quantities)]


def across_block(
    exchange: Exchange, values: Sequence[jax.Array], layout: Any, warpgroup: Index, slots: jax.Ref
) -> list[jax.Array]:
    """`values`, one number of each warp (`[4]` in `layout`), from all warps of the block."""

    def publish(ctx, slots, index, *values):
        lane, slot = _lane_and_slot(index)
        first_lane = arith.cmpi(arith.CmpIPredicate.eq, lane, c32(0))
        for q, value in enumerate(values):
            at = arith.addi(shared_address(slots), arith.addi(slot, c32(4 * q * exchange.slots)))
            ptx("@$2 st.shared.b32 [$0], $1;", "r,r,b", [at, _bits(value), first_lane])

    arguments = (plgpu.RefType(), SPLAT, *[layout] * len(values))
    plgpu.inline_mgpu(arg_types=arguments)(publish)(slots, jnp.int32(warpgroup), *values)
    sync_block(exchange.warpgroups)
    return exchange.read(slots)


def across_cluster(
    exchange: Exchange,
    values: Sequence[jax.Array],
    layout: Any,
    warpgroup: Index,
    slots: jax.Ref,
    barrier: jax.Ref,
    parity: jax.Array,
) -> list[jax.Array]:
    """`values` from all warps of the cluster: each warp writes its numbers into every block's shared memory.

    `warpgroup` counts through the cluster. One way and without a reply, so nobody has to stay for others to read:
    a block that has got everybody's numbers is done with its peers.
    """

    def send(ctx, slots, barrier, index, *values):
        lane, slot = _lane_and_slot(index)
        to_peer = arith.cmpi(arith.CmpIPredicate.ult, lane, c32(exchange.blocks))
        for q, value in enumerate(values):
            at = arith.addi(shared_address(slots), arith.addi(slot, c32(4 * q * exchange.slots)))
            text = (
                "{ .reg .b32 slot, barrier; "
                "@$4 mapa.shared::cluster.u32 slot, $0, $2; @$4 mapa.shared::cluster.u32 barrier, $1, $2; "
                "@$4 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [slot], $3, [barrier]; }"
            )
            ptx(text, "r,r,r,r,b", [at, shared_address(barrier), lane, _bits(value), to_peer])

    arguments = (plgpu.RefType(), plgpu.RefType(), SPLAT, *[layout] * len(values))
    plgpu.inline_mgpu(arg_types=arguments)(send)(slots, barrier, jnp.int32(warpgroup), *values)
    asynchronous.wait(barrier, parity)
    return exchange.read(slots)


def sync_block(warpgroups: int) -> None:
    """Waits for all threads of the block."""

    def block_sync(ctx):
        ptx(f"barrier.sync.aligned 15, {WARPGROUP * warpgroups};", "~{memory}", [])

    plgpu.inline_mgpu()(block_sync)()


def cluster_sync() -> None:
    """Waits for all threads of the cluster's blocks."""

    def sync_cluster(ctx):
        ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "~{memory}", [])

    plgpu.inline_mgpu()(sync_cluster)()


def _lane_and_slot(index) -> tuple[ir.Value, ir.Value]:
    """The thread's lane, and its warp's place in the slots, in bytes."""
    thread = arith.remui(utils.thread_idx(), c32(WARPGROUP))
    warp = arith.addi(arith.muli(scalar(index), c32(4)), arith.divui(thread, c32(32)))
    return arith.remui(thread, c32(32)), arith.muli(warp, c32(4))


def _bits(value) -> ir.Value:
    """The thread's one number of an array, as a word."""
    number = value.registers.flat[0]
    if isinstance(number.type, ir.VectorType):
        number = vector.extract(number, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
    return arith.bitcast(ir.IntegerType.get_signless(32), number)
