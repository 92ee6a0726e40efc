"""Which blocks of queries and of keys may have a segment in common, so that the kernels pass over the others.

They do not if the intervals from their least to their greatest id do not meet, or if the remainders of their ids modulo
32 do not: sound for any ids in any order. Packed documents, whose ids increase, are told apart by the intervals; the
remainders are for what follows them, often padding with the id 0.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.pairs import Pairs

REMAINDERS = 32


def pairs(rows: jax.Array, columns: jax.Array, block_rows: int, block_columns: int) -> Pairs:
    """The blocks of `rows [B, T]` against those of `columns [B, S]`, both ids."""
    low, high, present = (x[:, None, :, None] for x in _blocks(rows, block_rows))
    other_low, other_high, other_present = (x[:, None, None, :] for x in _blocks(columns, block_columns))
    meet = (low <= other_high) & (other_low <= high) & (present & other_present != 0)
    return Pairs(meet, (low == other_high) & (high == other_low))


def _blocks(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each block of `size` ids the least, the greatest, and a bit for each remainder, `[B, blocks]`."""
    missing = -ids.shape[1] % size
    ids = jnp.pad(ids, ((0, 0), (0, missing)), mode="edge").reshape(ids.shape[0], -1, size)
    bits = jnp.uint32(1) << (ids & (REMAINDERS - 1)).astype(jnp.uint32)
    return ids.min(2), ids.max(2), lax.reduce_or(bits, (2,))
