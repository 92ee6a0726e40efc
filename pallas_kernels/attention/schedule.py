"""Which keys a block of query rows can see, and which block of threads works on which queries, in which order."""

import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.configs import ForwardConfig
from pallas_kernels.attention.problem import Attention

Int = jax.Array | int


def bounds(problem: Attention, queries: Int | None = None, keys: Int | None = None) -> tuple[Any, Any]:
    """`(left, right)`: query i sees keys `i + left <= j <= i + right` at most; None: no such bound.

    They are those of a sequence of `queries` and `keys`, by default as many as the arrays hold, which matters only if
    sequences are aligned at their ends. Which of the two bounds there are is the same for all sequences.
    """
    apart: Int = 0
    if problem.align_ends:
        apart = (problem.key_length if keys is None else keys) - (problem.query_length if queries is None else queries)
    before, after = problem.window
    rights = [] if after is None else [problem.window_offset + after]
    rights += [] if problem.causal_offset is None else [problem.causal_offset]
    left = None if before is None else problem.window_offset - before + apart
    return left, min(rights) + apart if rights else None


def may_see_nothing(problem: Attention) -> bool:
    """Whether there may be a query without a key, by its place or by what is known on the device alone."""
    left, right = bounds(problem)
    by_place = right is not None and right < 0
    if left is not None:
        by_place |= problem.query_length + left > problem.key_length or (right is not None and left > right)
    optional = problem.bias, problem.mask, problem.segments, problem.query_lengths, problem.key_lengths
    return by_place or any(optional)


class Span(NamedTuple):
    """Tiles of keys `first <= tile < end`; of them `inner_first <= tile < inner_end` need no comparison.

    Of indices, that is, of segment ids and with the mask.
    """

    first: Any
    inner_first: Any
    inner_end: Any
    end: Any


def span(problem: Attention, block_kv: int, row: Int, rows: int, queries: Int, keys: Int) -> Span:
    """What queries `row ... row + rows` of `queries` see of `keys` keys: one tile at least, past the last query one."""
    left, right = bounds(problem, queries, keys)
    first, inner_first = 0, 0
    inner_end, end = _div(keys, block_kv), _div(keys + block_kv - 1, block_kv)
    if right is not None:
        end = _min(end, _div(_max(row + rows + right, 0) + block_kv - 1, block_kv))
        inner_end = _min(inner_end, _div(_max(row + right + 1, 0), block_kv))
    if left is not None:
        first = _min(_div(_max(row + left, 0), block_kv), _div(problem.key_length - 1, block_kv))
        inner_first = _div(_max(row + rows - 1 + left, 0) + block_kv - 1, block_kv)
    alive = _min(_max(queries - row, 0), 1) * -(-problem.key_length // block_kv)
    return Span(first, inner_first, inner_end, _min(_max(end, first + 1), first + 1 + alive))


def tile_span(problem: Attention, config: ForwardConfig, tile: Int, queries: Int, keys: Int) -> tuple[Span, Int]:
    """What a head's tile sees, and whether that is any of its split; if none, the span is of one tile nonetheless."""
    row = _div(tile, config.splits) * config.queries
    whole = span(problem, config.block_kv, row, config.queries, queries, keys)
    if config.splits == 1:
        return whole, True
    tiles = -(-problem.key_length // config.block_kv)
    split = tile - _div(tile, config.splits) * config.splits
    start, stop = _div(split * tiles, config.splits), _div((split + 1) * tiles, config.splits)
    first, end = _max(whole.first, start), _min(whole.end, stop)
    return Span(first, _max(whole.inner_first, first), _min(whole.inner_end, end), _max(end, first + 1)), end > first


def within(span: Span, own: Span) -> Span:
    """`own`, of some of the rows of `span`, if it has a tile in there, and else one of `span`."""
    first = jnp.minimum(own.first, span.end - 1)
    return own._replace(first=first, end=jnp.clip(own.end, first + 1, span.end))


def narrowed(span: Span, by: Span) -> Span:
    """The tiles of both, which need no comparison if neither does; if there are none, one of `span`."""
    first = jnp.clip(by.first, span.first, span.end - 1)
    end = jnp.clip(by.end, first + 1, span.end)
    return Span(first, jnp.maximum(span.inner_first, by.inner_first), jnp.minimum(span.inner_end, by.inner_end), end)


def at_edge(problem: Attention, span: Span, tile: jax.Array) -> jax.Array | None:
    """Whether some of the span's queries do not see all keys of the tile; None: that cannot be."""
    left, right = bounds(problem)
    after = None if right is None and not problem.hidden_by_data else tile >= span.inner_end
    before = None if left is None and not problem.hidden_by_data else tile < span.inner_first
    return before if after is None else after if before is None else before | after


def _div(x: Int, y: int) -> Int:
    return x // y if isinstance(x, int) else lax.div(x, jnp.int32(y))


def _min(x: Int, y: Int) -> Int:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def _max(x: Int, y: Int) -> Int:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


@functools.lru_cache(maxsize=64)
def order(problem: Attention, config: ForwardConfig) -> tuple[np.ndarray, np.ndarray]:
    """The tiles of queries in the order in which to start them, and how many tiles of keys each sees.

    A tile is `(batch * query_heads + head) * tiles of a head + tile of the head`, with packs of heads for heads, and a
    tile of the head `tile of queries * splits + split`. The longest of a section of heads come first; a section are the
    heads whose keys and values fit in the cache together.
    """
    per_head = -(-problem.query_length // config.queries) * config.splits
    group = problem.query_heads // problem.key_heads // config.packed_heads
    head_bytes = problem.key_length * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    heads = problem.batch * problem.query_heads // config.packed_heads
    section = min(heads, group * max(config.section_mib * 2**20 // head_bytes, 1))
    spans = [tile_span(problem, config, i, problem.query_length, problem.key_length)[0] for i in range(per_head)]
    length = np.array([s.end - s.first for s in spans])
    # Of equal ones the last first where there is a mask: most leave more keys to later queries.
    backwards = slice(None, None, -1 if problem.mask else 1)
    longest_first = np.arange(per_head)[backwards][np.argsort(-length[backwards], kind="stable")]
    in_turn = np.arange(heads)
    if problem.bias is not None and problem.bias[0] == 1:
        # Sequence after sequence of a head, whose bias they share in the cache.
        in_turn = in_turn.reshape(problem.batch, -1).T.ravel()
    sections = [
        np.add.outer(longest_first, in_turn[start : start + section] * per_head).ravel()
        for start in range(0, heads, section)
    ]
    tiles = np.concatenate(sections).astype(np.int32)
    return tiles, length[tiles % per_head]


@functools.lru_cache(maxsize=64)
def deal(problem: Attention, config: ForwardConfig, blocks: int) -> np.ndarray:
    """`[blocks, 1 + n]`: for each block of threads how many tiles of queries it takes, and which.

    Each tile is dealt to the block that would be free first.
    """
    dealt: list[list[int]] = [[] for _ in range(blocks)]
    free = [(0.0, i) for i in range(blocks)]
    for tile, length in zip(*(x.tolist() for x in order(problem, config)), strict=True):
        time, i = free[0]
        dealt[i].append(tile)
        heapq.heapreplace(free, (time + length + 0.7, i))
    table = np.zeros((blocks, 1 + max(map(len, dealt))), np.int32)
    for row, mine in zip(table, dealt, strict=True):
        row[: 1 + len(mine)] = [len(mine), *mine]
    return table
