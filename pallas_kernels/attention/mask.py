"""Which keys a query sees, and which tiles of queries and keys a kernel may skip.

There are five sources: bounds of indices (causal and window), a boolean mask, packed in bits, segment ids, positions,
and lengths. Bounds of indices give each tile a range of the other side's tiles. Masks, segments and positions give a
`BlockMask` of blocks, from which XLA finds such ranges before the kernel starts.

A mask is packed in words of bits, in the order in which WGMMA leaves a tile's scores in a thread's registers. A
thread has of each row columns `8 j + 2 q + e`, for its place `q` among four threads, all `j`, and `e` of 0 and 1. Bit
`2 j + e` of the row's word `q` is for that column: four words hold 128 columns, and a tile of 64 has their lower or
upper halves. So which bit is a score's is a constant of the kernel.

Two blocks have no segment in common if the intervals from their least to their greatest id do not overlap, or if the
remainders of their ids modulo 32 do not. Both are sound for any ids in any order. Packed documents, whose ids increase,
are told apart by the intervals; the remainders are for padding, whose id is often 0.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.problem import Attention, ForwardConfig
from pallas_kernels.types import Index


def window_bounds(problem: Attention, queries: Index | None = None, keys: Index | None = None) -> tuple[Any, Any]:
    """Returns `(left, right)`: query i sees keys `i + left <= j <= i + right` at most; None: no such bound.

    A sequence has `queries` and `keys`, by default as many as the arrays hold; their numbers matter only if sequences
    are aligned at their ends. All sequences have the same of the two bounds. Where there are positions, indices have
    no bounds.
    """
    if problem.positions:
        return None, None
    apart: Index = 0
    if problem.align_ends:
        apart = (problem.key_length if keys is None else keys) - (problem.query_length if queries is None else queries)
    left, right = position_bounds(problem)
    return None if left is None else left + apart, None if right is None else right + apart


def position_bounds(problem: Attention) -> tuple[int | None, int | None]:
    """Returns `(left, right)`: a query at `i` sees keys at `i + left` to `i + right` at most; None: no such bound."""
    before, after = problem.window
    rights = [] if after is None else [problem.window_offset + after]
    rights += [] if problem.causal_offset is None else [problem.causal_offset]
    return None if before is None else problem.window_offset - before, min(rights) if rights else None


def may_see_nothing(problem: Attention) -> bool:
    """Says whether there may be a query without a key, by its index or by data."""
    left, right = window_bounds(problem)
    by_place = right is not None and right < 0
    if left is not None:
        by_place |= problem.query_length + left > problem.key_length or (right is not None and left > right)
    optional = problem.bias, problem.has_data_mask, problem.query_lengths, problem.key_lengths
    return by_place or any(optional)


class TileRange(NamedTuple):
    """Tiles `first <= tile < end` of keys, of which `inner_first <= tile < inner_end` need no mask."""

    first: Index
    inner_first: Index
    inner_end: Index
    end: Index


def kv_range(problem: Attention, block_kv: int, row: Index, rows: int, queries: Index, keys: Index) -> TileRange:
    """Returns the tiles of keys that queries `row ... row + rows` see: at least one, even past the last query."""
    left, right = window_bounds(problem, queries, keys)
    first, inner_first = 0, 0
    inner_end, end = _div(keys, block_kv), _div(keys + block_kv - 1, block_kv)
    if right is not None:
        end = _min(end, _div(_max(row + rows + right, 0) + block_kv - 1, block_kv))
        inner_end = _min(inner_end, _div(_max(row + right + 1, 0), block_kv))
    if left is not None:
        first = _min(_div(_max(row + left, 0), block_kv), _div(problem.key_length - 1, block_kv))
        inner_first = _div(_max(row + rows - 1 + left, 0) + block_kv - 1, block_kv)
    alive = _min(_max(queries - row, 0), 1) * -(-problem.key_length // block_kv)
    return TileRange(first, inner_first, inner_end, _min(_max(end, first + 1), first + 1 + alive))


def tile_kv_range(
    problem: Attention,
    config: ForwardConfig,
    tile: Index,
    queries: Index,
    keys: Index,
    load: Callable[[], TileRange] | None = None,
) -> tuple[TileRange, Index]:
    """Returns the tiles of keys that a head's tile of queries sees in its split, at least one, and whether it sees any.

    The splits divide evenly what the tile's queries see by their places, and by what `load` returns.
    """
    row = _div(tile, config.splits) * config.queries
    whole = kv_range(problem, config.block_kv, row, config.queries, queries, keys)
    whole = whole if load is None else intersect(whole, load())
    if config.splits == 1:
        return whole, True
    count, split = whole.end - whole.first, tile - _div(tile, config.splits) * config.splits
    first, end = (whole.first + _div(i * count, config.splits) for i in (split, split + 1))
    inner = _max(whole.inner_first, first), _min(whole.inner_end, end)
    return TileRange(first, *inner, _max(end, first + 1)), end > first


def clamp(span: TileRange, own: TileRange) -> TileRange:
    """Returns `own` within `span`: at least one tile."""
    first = _min(own.first, span.end - 1)
    return own._replace(first=first, end=clip(own.end, first + 1, span.end))


def intersect(span: TileRange, by: TileRange) -> TileRange:
    """Returns the intersection, never empty; a tile is unmasked only if both ranges leave it unmasked."""
    first = clip(by.first, span.first, span.end - 1)
    end = clip(by.end, first + 1, span.end)
    return TileRange(first, _max(span.inner_first, by.inner_first), _min(span.inner_end, by.inner_end), end)


def needs_mask(problem: Attention, span: TileRange, tile: jax.Array) -> jax.Array | None:
    """Says whether some queries do not see all keys of the tile; None if that cannot be."""
    left, right = window_bounds(problem)
    after = None if right is None and not problem.has_data_mask else tile >= span.inner_end
    before = None if left is None and not problem.has_data_mask else tile < span.inner_first
    return before if after is None else after if before is None else before | after


def _div(x: Index, y: int) -> Index:
    return x // y if isinstance(x, int) else lax.div(x, y)


def _min(x: Index, y: Index) -> Index:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else lax.min(x, y)


def _max(x: Index, y: Index) -> Index:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else lax.max(x, y)


def clip(x: Index, low: Index, high: Index) -> Index:
    """Returns `x`, but `low` at least, and `high` at most."""
    return _min(high, _max(low, x))


class BlockMask(NamedTuple):
    """For blocks of rows and columns, `[B|1, heads|1, blocks of rows|1, blocks of columns|1]`.

    Rows are the blocks that a CTA keeps, columns those that it loops over: queries and keys in the forward pass, keys
    and queries in the backward pass.
    """

    visible: jax.Array  # whether some row may see some column
    full: jax.Array  # whether every row sees every column


def both(a: BlockMask, b: BlockMask) -> BlockMask:
    """Returns the intersection of two masks."""
    return BlockMask(a.visible & b.visible, a.full & b.full)


def of_group(pairs: BlockMask, group: int) -> BlockMask:
    """Returns the union over each `group` of query heads, which a CTA loops over for the same keys."""
    if pairs.visible.shape[1] == 1:
        return pairs
    visible, full = (x.reshape(x.shape[0], -1, group, *x.shape[2:]) for x in pairs)
    return BlockMask(visible.any(2), full.all(2))


def tile_ranges(pairs: BlockMask, columns: int) -> jax.Array:
    """Finds each row's `TileRange` of `columns` blocks, `[B|1, heads|1, blocks of rows|1, 4]`; zeros for no block."""
    visible, full = (jnp.broadcast_to(x, (*x.shape[:3], columns)) for x in pairs)
    column = jnp.arange(columns)[None, None, None, :]
    # Minima and maxima, which XLA finds in one pass, and not `argmax`.
    first, inner_first = (jnp.where(x, column, columns).min(3) for x in (visible, full))
    first, inner_first = (jnp.where(x == columns, 0, x) for x in (first, inner_first))
    end = jnp.where(visible, column + 1, 0).max(3)
    inner_end = jnp.where((column >= inner_first[..., None]) & ~full, column, columns).min(3)
    return jnp.stack([first, inner_first, inner_end, end], axis=3).astype(jnp.int32)


BIT_COLUMNS = 128  # whose bits are in four words
AXES = {3: (3, 4), 2: (4, 3)}  # of rows and places in the words, by the columns' axis in the mask
ALL_BITS = 2**32 - 1


def pack_bits(mask: jax.Array, axis: int) -> jax.Array:
    """Words of a mask `[B|1, N|1, T|1, S|1]` whose `axis`, 2 or 3, has the columns.

    `[B|1, N|1, blocks of 128 keys|1, T|1, 4]` for 3, `[B|1, N|1, blocks of 128 queries|1, 4, S|1]` for 2: to have both
    full XLA would transpose the mask. Bits past the last column are 0; of a single column, which may stand for many,
    all bits are full.
    """
    rows, places = AXES[axis]
    mask_bits = mask != 0
    if mask_bits.shape[axis] == 1:
        words = jnp.where(jnp.moveaxis(mask_bits, axis, 2), jnp.uint32(ALL_BITS), jnp.uint32(0))
        return jnp.repeat(jnp.expand_dims(words, places), 4, places)
    mask_bits = jnp.pad(
        mask_bits, [(0, -size % BIT_COLUMNS if i == axis else 0) for i, size in enumerate(mask_bits.shape)]
    )
    mask_bits = mask_bits.reshape(*mask_bits.shape[:axis], -1, 4, 4, 4, 2, *mask_bits.shape[axis + 1 :])

    # XLA would write 32 separate arrays to memory if all were combined at once.
    def of_four(j: int, e: int) -> jax.Array:
        return lax.index_in_dim(lax.index_in_dim(mask_bits, j, axis + 2, False), e, axis + 3, False).astype(jnp.uint8)

    octets = functools.reduce(jnp.bitwise_or, (of_four(j, e) << (2 * j + e) for j, e in np.ndindex(4, 2)))
    of_word = (lax.index_in_dim(octets, j, axis + 1, False).astype(jnp.uint32) << 8 * j for j in range(4))
    words = functools.reduce(jnp.bitwise_or, of_word)
    return jnp.moveaxis(words, {3: 2, 2: 4}[axis], rows)


def every_block(words: jax.Array, axis: int, columns: int, block_rows: int, block_columns: int) -> BlockMask:
    """Returns as many blocks as `bitmask_blocks` does, all of them visible and none full."""
    shape = 1, 1, -(-words.shape[AXES[axis][0]] // block_rows), -(-columns // block_columns)
    return BlockMask(jnp.ones(shape, bool), jnp.zeros(shape, bool))


def bitmask_blocks(words: jax.Array, axis: int, columns: int, block_rows: int, block_columns: int) -> BlockMask:
    """Returns the blocks of rows of `words`, packed from `columns` columns, against those of 64 or 128 columns."""
    beyond = ~pack_bits(jnp.ones([columns if i == axis else 1 for i in range(4)], bool), axis)
    some = _over_rows(lax.reduce_or, words, 0, axis, block_rows)
    every = _over_rows(lax.reduce_and, words | beyond, ALL_BITS, axis, block_rows)
    size = block_columns // 4  # bits that a block has in a word
    full = jnp.uint32(ALL_BITS >> 32 - size)
    # Before a shift by an array, XLA reduces in one kernel; within a stack of shifts it would reduce for each.
    shifts = jnp.arange(0, 32, size, dtype=jnp.uint32).reshape(1, 1, 1, -1, 1)
    some, every = ((x[..., None, :] >> shifts & full).reshape(*x.shape[:2], -1, x.shape[3]) for x in (some, every))
    count = -(-columns // block_columns)
    visible, full = (jnp.swapaxes(x[:, :, :count], 2, 3) for x in (some != 0, every == full))
    return BlockMask(visible, full)


def _over_rows(reduce: Callable[..., jax.Array], words: jax.Array, fill: int, axis: int, block_rows: int) -> jax.Array:
    """Joins the words of each block of rows, `[B|1, N|1, blocks of columns, blocks of rows]`; `fill` for no row."""
    rows, places = AXES[axis]
    size = min(words.shape[rows], block_rows)
    widths = [(0, -extent % size if i == rows else 0) for i, extent in enumerate(words.shape)]
    words = jnp.pad(words, widths, constant_values=jnp.uint32(fill))
    words = words.reshape(*words.shape[:rows], -1, size, *words.shape[rows + 1 :])
    return reduce(words, (rows + 1, places + (places > rows)))


REMAINDERS = 32


def segment_blocks(rows: jax.Array, columns: jax.Array, block_rows: int, block_columns: int) -> BlockMask:
    """Returns the blocks of `rows [B, T]` against those of `columns [B, S]`, both ids."""
    low, high, present = (x[:, None, :, None] for x in _blocks(rows, block_rows))
    other_low, other_high, other_present = (x[:, None, None, :] for x in _blocks(columns, block_columns))
    visible = (low <= other_high) & (other_low <= high) & (present & other_present != 0)
    return BlockMask(visible, (low == other_high) & (high == other_low))


def position_blocks(
    rows: jax.Array,
    columns: jax.Array,
    block_rows: int,
    block_columns: int,
    bounds: tuple[int | None, int | None],
) -> BlockMask:
    """Returns the blocks of `rows [B, T]` against those of `columns [B, S]`, both positions.

    A row sees columns from its own position plus the first of the bounds on, up to that plus the second.
    """
    low, high, _ = (x[:, None, :, None] for x in _blocks(rows, block_rows))
    other_low, other_high, _ = (x[:, None, None, :] for x in _blocks(columns, block_columns))
    left, right = bounds
    visible = full = jnp.ones((1, 1, 1, 1), bool)
    if left is not None:
        visible, full = visible & (other_high >= low + left), full & (other_low >= high + left)
    if right is not None:
        visible, full = visible & (other_low <= high + right), full & (other_high <= low + right)
    return BlockMask(visible, full)


NO_BASE = np.iinfo(np.int32).min
_LARGEST_BASE = 2**29 - 64  # the difference of two bases, a row of 128 and a window fit in an int32


def block_bases(positions: jax.Array, size: int, blocks: int) -> jax.Array:
    """Finds each block's first position, `[B, blocks]`; `NO_BASE` where its positions do not count up by one.

    A kernel then loads no positions. Indices past the last position count on from there.
    """
    count = positions.shape[1]
    bases = positions - (jnp.arange(count, dtype=jnp.int32) % size)[None]
    bases = jnp.pad(bases, ((0, 0), (0, blocks * size - count)), mode="edge").reshape(-1, blocks, size)
    low, high = bases.min(2), bases.max(2)
    return jnp.where((low == high) & (jnp.abs(low) < _LARGEST_BASE), low, NO_BASE)


def _blocks(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gives each block of `size` ids its least, its greatest, and a bit for each remainder, `[B, blocks]`."""
    missing = -ids.shape[1] % size
    ids = jnp.pad(ids, ((0, 0), (0, missing)), mode="edge").reshape(ids.shape[0], -1, size)
    bits = jnp.uint32(1) << (ids & (REMAINDERS - 1)).astype(jnp.uint32)
    return ids.min(2), ids.max(2), lax.reduce_or(bits, (2,))


def skips_tiles(problem: Attention) -> bool:
    """Says whether some tiles of queries skip tiles of keys."""
    return problem.has_data_mask or window_bounds(problem) != (None, None)


def is_uneven(problem: Attention) -> bool:
    """Says whether some tiles take longer than others."""
    return problem.key_lengths or problem.query_lengths or skips_tiles(problem)


def queries_of_tile(problem: Attention) -> int:
    """Says how many queries a tile of keys sees at most, those of all the heads that read it."""
    left, right = window_bounds(problem)
    seen = problem.query_length if left is None or right is None else max(right - left + 1, 0)
    return min(seen, problem.query_length) * problem.group
