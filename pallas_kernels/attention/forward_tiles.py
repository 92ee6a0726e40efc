"""Which tiles of queries a block works on: one of its own, those dealt to it, or those it draws whenever it is free.

Where data decide how long a tile takes, nobody can deal them. They are drawn, by the copying warpgroup.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import hardware, places, scopes
from pallas_kernels.attention import drawn, gather, schedule
from pallas_kernels.attention.configs import ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.attention.schedule import Span
from pallas_kernels.attention.scores import Place

Visit = Callable[[jax.Array, Place, Span, jax.Array], None]

_TOLD = 5  # the tile, and the four numbers of what data leave it
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
    """Calls the kernel."""
    if config.tiles != "drawn":
        return kernel(*operands)
    draw = lambda *arrays: places.call(kernel, arrays, [scopes.tickets(blocks)], out_type)[0]
    return drawn.call(draw, *operands)


def scratch(config: ForwardConfig) -> dict[str, Any]:
    """What drawing takes of shared memory."""
    return drawn.scratch(_TOLD, config.warpgroups) if config.tiles == "drawn" else {}


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
        drawn.tell(block, i, (tile, *left))
        span = _span(block, place, lambda: left)
        visit(lax.rem(i, jnp.int32(block.config.query_slots)), place, span, steps)
        draw = lambda: drawn.draw(block, i + 1, block.config.warpgroups)
        return i + 1, steps + (span.end - span.first), gather.uniform(block.deal[draw()])

    own = gather.uniform(block.deal[lax.axis_index("block")])
    i, _, none = lax.while_loop(_is_tile, take, (jnp.int32(0), jnp.int32(0), own))
    drawn.tell(block, i, (none, *_NO_SPAN))


def _each_told(block: Any, visit: Visit) -> None:
    """The same for a warpgroup that is told; what it makes of the numbers itself need not stay in registers.

    Told spans, D = 64, documents: 132 bytes a thread would spill.
    """
    drawn.begin(block)

    def take(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, steps, tile, *left = state
        place = _place(block, tile)
        span = _span(block, place, lambda: Span(*left))
        visit(lax.rem(i, jnp.int32(block.config.query_slots)), place, span, steps)
        return i + 1, steps + (span.end - span.first), *drawn.told(block, i + 1)

    lax.while_loop(_is_tile, take, (jnp.int32(0), jnp.int32(0), *drawn.told(block, jnp.int32(0))))


def _is_tile(state: tuple[jax.Array, ...]) -> jax.Array:
    return state[2] != _NO_TILE
