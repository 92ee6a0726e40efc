"""Which blocks of keys a block of threads works on: one of its own, those dealt to it, or those it draws when free."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hardware, scopes
from pallas_kernels.attention import drawn
from pallas_kernels.attention.backward_blocks import Block, Span
from pallas_kernels.attention.configs import AnyBackwardConfig, BackwardConfig
from pallas_kernels.attention.problem import Attention

Visit = Callable[[Block, jax.Array], None]  # of a block of keys, and whether it is the first
EachBlock = Callable[..., None]  # `f(visit, draws)`, for the one warpgroup that `draws` and for others

_TOLD = 5  # the tile, and its span


def launched(problem: Attention, config: AnyBackwardConfig) -> tuple[int, int]:
    """How many blocks of keys there are, and how many blocks of threads for them."""
    tiles = problem.batch * problem.key_heads * -(-problem.key_length // config.block_kv)
    return tiles, tiles if config.tiles == "own" else min(tiles, hardware.current().sm_count)


def begun(config: AnyBackwardConfig, blocks: int) -> dict[str, jax.Array]:
    """What is in device memory before, by name."""
    unasked = blocks * _unasked(config)
    if isinstance(config, BackwardConfig):
        unasked += 1  # its tickets count from what is there
    return dict(tickets=scopes.tickets(unasked)) if config.tiles == "drawn" else {}


def _unasked(config: AnyBackwardConfig) -> int:
    """How many tiles a block takes without a ticket.

    None if tiles wait for their turns: those before a drawn one are done, or are worked on by a block that runs.
    """
    return 0 if config.turns else 1


def scratch(config: AnyBackwardConfig) -> dict[str, Any]:
    """What drawing takes of shared memory."""
    return drawn.scratch(_TOLD, config.warpgroups) if config.tiles == "drawn" else {}


def each_block(
    problem: Attention, config: AnyBackwardConfig, refs: SimpleNamespace, tiles: int, blocks: int
) -> EachBlock:
    """`f(visit, draws)` calls `visit` for the blocks of keys that a block of threads takes."""
    me = lax.axis_index("block")

    def each(visit: Visit, *, draws: bool = False) -> None:
        def one(turn: jax.Array, steps_before: jax.Array) -> jax.Array:
            block = Block.of(problem, config, refs, me + turn * blocks, steps_before)
            visit(block, turn == 0)
            return steps_before + block.steps

        def draw(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            turn, steps_before, tile = state
            block = Block.of(problem, config, refs, tile, steps_before)
            drawn.tell(refs, turn, (tile, *block.span))
            visit(block, turn == 0)
            return turn + 1, steps_before + block.steps, drawn.draw(refs, turn + 1, config.warpgroups)

        def be_told(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            turn, steps_before, tile, *span = state
            block = Block.of(problem, config, refs, tile, steps_before, Span(*span))
            visit(block, turn == 0)
            return turn + 1, steps_before + block.steps, *drawn.told(refs, turn + 1)

        start = jnp.int32(0)
        if config.tiles != "drawn":
            lax.fori_loop(0, lax.div(tiles - 1 - me, blocks) + 1, one, start)
        elif draws:
            first = me if _unasked(config) else drawn.draw(refs, start, config.warpgroups)
            turn, _, none = lax.while_loop(lambda state: state[2] < tiles, draw, (start, start, first))
            drawn.tell(refs, turn, (none, *Span(0, 0, 0, 0)))
        else:
            drawn.begin(refs, unasked=_unasked(config))
            lax.while_loop(lambda state: state[2] < tiles, be_told, (start, start, *drawn.told(refs, start)))

    return each
