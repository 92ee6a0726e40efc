"""How a block of threads draws tiles, one after another, where data decide how long each takes: nobody can deal them.

One warpgroup, which is ahead of the others, takes the next number of a counter in device memory, looks up its tile and
what data leave of it, and tells the others, so that nothing of this is waited for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxlib.mlir.dialects import arith

from pallas_kernels import emit, scopes
from pallas_kernels.attention import gather

_SLOTS = 2  # a tile is told while the one before it is worked on


def call[Results](run: Callable[..., Results], *arrays: Any) -> Results:
    """`run(*arrays)`, of which each call has tickets of its own, which `vmap` would share."""
    return sequential_vmap(run)(*arrays)


def scratch(numbers: int, warpgroups: int) -> dict[str, Any]:
    """Shared memory in which a block's warpgroups meet, one that draws and others that are told, and their barriers."""
    return {
        "tile_smem": plgpu.SMEM((_SLOTS, 1 + numbers), jnp.int32),
        "tile_full": plgpu.Barrier(num_barriers=_SLOTS),
        "tile_empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_SLOTS),
        "ticket_full": plgpu.Barrier(),
    }


def begin(block: Any, *, unasked: int = 1) -> None:
    """What a warpgroup that is told does first; `unasked`: how many tiles its block takes without a ticket."""
    for slot in range(unasked, _SLOTS):
        plgpu.barrier_arrive(block.tile_empty.at[slot])


def draw(block: Any, i: jax.Array, warpgroup: int) -> jax.Array:
    """The ticket for the block's tile `i`, drawn by `warpgroup`."""
    words = block.tile_smem.at[_slot(i)]
    plgpu.barrier_wait(block.tile_empty.at[_slot(i)])
    scopes.take_ticket(block.tickets, words, warpgroup)
    plgpu.barrier_arrive(block.ticket_full)
    plgpu.barrier_wait(block.ticket_full)
    return gather.uniform(words[0])


def tell(block: Any, i: jax.Array, numbers: Sequence[Any]) -> None:
    """Hands numbers about the block's tile `i` to the other warpgroups, behind its ticket."""
    places = range(1, 1 + len(numbers))

    def store_told(ctx, words, *numbers):
        first = emit.equals(emit.thread_in_warpgroup(), 0)
        for at, number in zip(places, numbers, strict=True):
            address = arith.addi(emit.shared_address(words), emit.c32(4 * at))
            emit.ptx("@$2 st.shared.s32 [$0], $1;", "r,r,b", [address, emit.scalar(number), first])

    arguments = (plgpu.RefType(), *[emit.SPLAT] * len(numbers))
    plgpu.inline_mgpu(arg_types=arguments)(store_told)(block.tile_smem.at[_slot(i)], *(jnp.int32(x) for x in numbers))
    plgpu.barrier_arrive(block.tile_full.at[_slot(i)])


def told(block: Any, i: jax.Array) -> tuple[jax.Array, ...]:
    """What `tell` has handed over."""
    plgpu.barrier_wait(block.tile_full.at[_slot(i)])
    numbers = tuple(gather.uniform(block.tile_smem[_slot(i), at]) for at in range(1, block.tile_smem.shape[1]))
    plgpu.barrier_arrive(block.tile_empty.at[_slot(i)])
    return numbers


def _slot(i: jax.Array) -> jax.Array:
    return lax.rem(i, jnp.int32(_SLOTS))
