"""Which tiles of queries a block works on: one of its own, those dealt to it, or those it draws whenever it is free.

Where data decide how long a tile takes, nobody can deal them. They are drawn: the copying warpgroup, which is ahead of
the others, takes the next number of a counter in device memory, looks up its tile and the keys that data leave it, and
tells the others, so that nothing of this is waited for.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxlib.mlir.dialects import arith

from pallas_kernels import emit, hardware, places, scopes
from pallas_kernels.attention import gather, schedule
from pallas_kernels.attention.configs import ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.attention.schedule import Span
from pallas_kernels.attention.scores import Place

Visit = Callable[[jax.Array, Place, Span, jax.Array], None]

_SLOTS = 2  # a tile is told while the one before it is worked on
_TOLD = range(1, 6)  # behind the ticket: the tile, and the four numbers of what data leave it
_NO_TILE, _NO_SPAN = -1, Span(0, 0, 0, 0)


def launched(problem: Attention, config: ForwardConfig) -> tuple[int, np.ndarray]:
    """How many blocks there are, and the table of their tiles.

    Of tiles that are drawn, those of the first tickets are the blocks' own; a block stops at its first without a tile.
    """
    if config.tiles == "dealt":
        blocks = hardware.current().sm_count
        return blocks, schedule.deal(problem, config, blocks)
    order, _ = schedule.order(problem, config)
    if config.tiles == "own":
        return len(order), order
    blocks = min(len(order), hardware.current().sm_count)
    return blocks, np.pad(order, (0, blocks), constant_values=_NO_TILE)


def names(config: ForwardConfig) -> tuple[str, ...]:
    """What the kernel gets beside the operands."""
    return ("deal", "tickets") if config.tiles == "drawn" else ("deal",)


def call(kernel: Callable[..., Any], config: ForwardConfig, blocks: int, out_type: Any, *operands: Any) -> Any:
    """Calls the kernel; each call has tickets of its own, which `vmap` would share."""
    if config.tiles != "drawn":
        return kernel(*operands)
    draw = lambda *arrays: places.call(kernel, arrays, [scopes.tickets(blocks)], out_type)[0]
    return sequential_vmap(draw)(*operands)


def scratch(config: ForwardConfig) -> dict[str, Any]:
    """Shared memory in which a block's warpgroups meet, and their barriers."""
    if config.tiles != "drawn":
        return {}
    return {
        "tile_smem": plgpu.SMEM((_SLOTS, _TOLD.stop), jnp.int32),
        "tile_full": plgpu.Barrier(num_barriers=_SLOTS),
        "tile_empty": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=_SLOTS),
        "ticket_full": plgpu.Barrier(),
    }


def each(block: Any, visit: Visit, *, draws: bool) -> None:
    """`visit(slot, place, span, steps)` for each tile of queries of this block, after `steps` tiles of keys.

    Of tiles that are drawn, one warpgroup draws them, and the others are told.
    """
    config, me = block.config, lax.axis_index("block")
    if config.tiles == "drawn":
        return _each_drawn(block, visit) if draws else _each_told(block, visit)

    def take(i: jax.Array, steps: jax.Array) -> jax.Array:
        tile = gather.uniform(block.deal[me, i + 1] if config.tiles == "dealt" else block.deal[me])
        place = _place(block, tile)
        span = _span(block, place, lambda: _left_by_data(block, tile, place))
        visit(lax.rem(i, jnp.int32(config.query_slots)), place, span, steps)
        return steps + (span.end - span.first)

    if config.tiles == "dealt":
        lax.fori_loop(0, block.deal[me, 0], take, jnp.int32(0))
    else:
        take(jnp.int32(0), jnp.int32(0))


def _place(block: Any, tile: jax.Array) -> Place:
    """Where a tile's queries are."""
    problem, config = block.problem, block.config
    per_head = -(-problem.query_length // config.block_q)
    head = lax.div(tile, jnp.int32(per_head))
    row = lax.rem(tile, jnp.int32(per_head)) * config.block_q
    batch = lax.div(head, jnp.int32(problem.query_heads))
    queries, keys = problem.query_length, problem.key_length
    if problem.query_lengths:
        queries = jnp.clip(gather.uniform(block.query_lengths[batch]), 0, queries)
    if problem.key_lengths:
        keys = jnp.clip(gather.uniform(block.key_lengths[batch]), 0, keys)
    return Place(batch, lax.rem(head, jnp.int32(problem.query_heads)), row, queries, keys)


def _span(block: Any, place: Place, left_by_data: Callable[[], Span]) -> Span:
    """Which tiles of keys the queries at a place see."""
    problem, config = block.problem, block.config
    span = schedule.span(problem, config.block_kv, place.row, config.block_q, place.queries, place.keys)
    return schedule.narrowed(span, left_by_data()) if problem.hidden_by_data else span


def _left_by_data(block: Any, tile: jax.Array, place: Place) -> Span:
    """Which ones segments and mask leave them."""
    index = lax.rem(tile, jnp.int32(-(-block.problem.query_length // block.config.block_q)))
    at = gather.broadcast_index((place.batch, place.head, index), block.spans.shape)
    return Span(*(gather.uniform(block.spans[*at, i]) for i in range(4)))


def _each_drawn(block: Any, visit: Visit) -> None:
    """Draws each next tile when the copies of one are under way, and tells it."""

    def take(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, steps, tile = state
        place = _place(block, tile)
        left = _left_by_data(block, tile, place) if block.problem.hidden_by_data else _NO_SPAN
        _tell(block, i, tile, left)
        span = _span(block, place, lambda: left)
        visit(lax.rem(i, jnp.int32(block.config.query_slots)), place, span, steps)
        return i + 1, steps + (span.end - span.first), _draw(block, i + 1)

    own = gather.uniform(block.deal[lax.axis_index("block")])
    i, _, none = lax.while_loop(_is_tile, take, (jnp.int32(0), jnp.int32(0), own))
    _tell(block, i, none, _NO_SPAN)


def _each_told(block: Any, visit: Visit) -> None:
    """The same for a warpgroup that is told; what it makes of the numbers itself need not stay in registers.

    Told spans, D = 64, documents: 132 bytes a thread would spill.
    """
    for slot in range(1, _SLOTS):  # the first is taken unasked
        plgpu.barrier_arrive(block.tile_empty.at[slot])

    def take(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, steps, tile, *left = state
        place = _place(block, tile)
        span = _span(block, place, lambda: Span(*left))
        visit(lax.rem(i, jnp.int32(block.config.query_slots)), place, span, steps)
        return i + 1, steps + (span.end - span.first), *_told(block, i + 1)

    lax.while_loop(_is_tile, take, (jnp.int32(0), jnp.int32(0), *_told(block, jnp.int32(0))))


def _is_tile(state: tuple[jax.Array, ...]) -> jax.Array:
    return state[2] != _NO_TILE


def _slot(i: jax.Array) -> jax.Array:
    return lax.rem(i, jnp.int32(_SLOTS))


def _draw(block: Any, i: jax.Array) -> jax.Array:
    """The block's tile `i`."""
    words = block.tile_smem.at[_slot(i)]
    plgpu.barrier_wait(block.tile_empty.at[_slot(i)])
    scopes.take_ticket(block.tickets, words, block.config.warpgroups)
    plgpu.barrier_arrive(block.ticket_full)
    plgpu.barrier_wait(block.ticket_full)
    return gather.uniform(block.deal[gather.uniform(words[0])])


def _tell(block: Any, i: jax.Array, tile: jax.Array, left: Span) -> None:
    """Hands the block's tile `i`, and what data leave it, to the other warpgroups."""
    places = _TOLD

    def store_told(ctx, words, *numbers):
        first = emit.equals(emit.thread_in_warpgroup(), 0)
        for at, number in zip(places, numbers, strict=True):
            address = arith.addi(emit.shared_address(words), emit.c32(4 * at))
            emit.ptx("@$2 st.shared.s32 [$0], $1;", "r,r,b", [address, emit.scalar(number), first])

    numbers = [jnp.int32(x) for x in (tile, *left)]
    arguments = (plgpu.RefType(), *[emit.SPLAT] * len(numbers))
    plgpu.inline_mgpu(arg_types=arguments)(store_told)(block.tile_smem.at[_slot(i)], *numbers)
    plgpu.barrier_arrive(block.tile_full.at[_slot(i)])


def _told(block: Any, i: jax.Array) -> tuple[jax.Array, ...]:
    """What `_tell` has handed over."""
    plgpu.barrier_wait(block.tile_full.at[_slot(i)])
    told = tuple(gather.uniform(block.tile_smem[_slot(i), at]) for at in _TOLD)
    plgpu.barrier_arrive(block.tile_empty.at[_slot(i)])
    return told
