"""Which blocks of queries and of keys may have a segment in common, so that the kernels pass over the others.

They do not if the intervals from their least to their greatest id do not meet, or if the remainders of their ids modulo
32 do not: sound for any ids in any order. Packed documents, whose ids increase, are told apart by the intervals; the
remainders are for what follows them, often padding with the id 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

REMAINDERS = 32


class Pairs(NamedTuple):
    """Of each block of rows and each of columns, `[B, blocks of rows, blocks of columns]`."""

    meet: jax.Array  # whether some of their ids may be equal
    alike: jax.Array  # whether all of them are


def pairs(rows: jax.Array, columns: jax.Array, block_rows: int, block_columns: int) -> Pairs:
    """The blocks of `rows [B, T]` against those of `columns [B, S]`, both ids."""
    low, high, present = (x[:, :, None] for x in _blocks(rows, block_rows))
    other_low, other_high, other_present = (x[:, None, :] for x in _blocks(columns, block_columns))
    meet = (low <= other_high) & (other_low <= high) & (present & other_present != 0)
    return Pairs(meet, (low == other_high) & (high == other_low))


def spans(pairs: Pairs) -> jax.Array:
    """`[B, blocks of rows, 4]`: `first <= column < end` holds all that a row meets, `0, 0, 0, 0` if that is nothing.

    In between, as in a `Span`, are the ends of a part in which all columns are like the row, which may be empty.
    """
    count = pairs.meet.shape[2]
    column = jnp.arange(count)
    first, inner_first = (jnp.argmax(x, axis=2) for x in pairs)
    end = jnp.where(pairs.meet, column + 1, 0).max(2)
    inner_end = jnp.where((column >= inner_first[:, :, None]) & ~pairs.alike, column, count).min(2)
    return jnp.stack([first, inner_first, inner_end, end], axis=2).astype(jnp.int32)


def _blocks(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each block of `size` ids the least, the greatest, and a bit for each remainder, `[B, blocks]`."""
    missing = -ids.shape[1] % size
    ids = jnp.pad(ids, ((0, 0), (0, missing)), mode="edge").reshape(ids.shape[0], -1, size)
    bits = jnp.uint32(1) << (ids & (REMAINDERS - 1)).astype(jnp.uint32)
    return ids.min(2), ids.max(2), lax.reduce_or(bits, (2,))
