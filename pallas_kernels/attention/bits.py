"""A mask as words of bits, in the order in which WGMMA leaves a tile's scores in a thread's registers.

Of each of its rows a thread has columns `8 j + 2 q + e`, for its place `q` among four threads, all `j`, and `e` of 0
and 1. Bit `2 j + e` of the row's word `q` is for that column: four words hold 128 columns, and a tile of 64 has the
lower or the upper half of them. So which bit is a score's is a constant of the kernel.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.pairs import Pairs

COLUMNS = 128  # whose bits are in four words
AXES = {3: (3, 4), 2: (4, 3)}  # of rows and places in the words, by the columns' axis in the mask
ALL = 2**32 - 1


def pack(mask: jax.Array, axis: int) -> jax.Array:
    """Words of a mask `[B|1, N|1, T|1, S|1]` whose `axis`, 2 or 3, has the columns.

    `[B|1, N|1, blocks of 128 keys|1, T|1, 4]` for 3, `[B|1, N|1, blocks of 128 queries|1, 4, S|1]` for 2: to have both
    alike XLA would transpose the mask. Bits past the last column are 0; of a single column, which may stand for many,
    all bits are alike.
    """
    rows, places = AXES[axis]
    held = mask != 0
    if held.shape[axis] == 1:
        words = jnp.where(jnp.moveaxis(held, axis, 2), jnp.uint32(ALL), jnp.uint32(0))
        return jnp.repeat(jnp.expand_dims(words, places), 4, places)
    held = jnp.pad(held, [(0, -size % COLUMNS if i == axis else 0) for i, size in enumerate(held.shape)])
    held = held.reshape(*held.shape[:axis], -1, 4, 4, 4, 2, *held.shape[axis + 1 :])

    # Of 32 at once XLA would write each to memory by itself.
    def of_four(j: int, e: int) -> jax.Array:
        return lax.index_in_dim(lax.index_in_dim(held, j, axis + 2, False), e, axis + 3, False).astype(jnp.uint8)

    octets = functools.reduce(jnp.bitwise_or, (of_four(j, e) << (2 * j + e) for j, e in np.ndindex(4, 2)))
    of_word = (lax.index_in_dim(octets, j, axis + 1, False).astype(jnp.uint32) << 8 * j for j in range(4))
    words = functools.reduce(jnp.bitwise_or, of_word)
    return jnp.moveaxis(words, {3: 2, 2: 4}[axis], rows)


def pairs(words: jax.Array, axis: int, columns: int, block_rows: int, block_columns: int) -> Pairs:
    """The blocks of rows of `words`, packed from `columns` columns, against those of 64 or 128 columns."""
    beyond = ~pack(jnp.ones([columns if i == axis else 1 for i in range(4)], bool), axis)
    some = _over_rows(lax.reduce_or, words, 0, axis, block_rows)
    every = _over_rows(lax.reduce_and, words | beyond, ALL, axis, block_rows)
    size = block_columns // 4  # bits that a block has in a word
    full = jnp.uint32(ALL >> 32 - size)
    some, every = (
        jnp.stack([x >> shift & full for shift in range(0, 32, size)], 3).reshape(*x.shape[:2], -1, x.shape[3])
        for x in (some, every)
    )
    count = -(-columns // block_columns)
    meet, alike = (jnp.swapaxes(x[:, :, :count], 2, 3) for x in (some != 0, every == full))
    return Pairs(meet, alike)


def _over_rows(reduce: Callable[..., jax.Array], words: jax.Array, fill: int, axis: int, block_rows: int) -> jax.Array:
    """The words of each block of rows in one, `[B|1, N|1, blocks of columns, blocks of rows]`; `fill` for no row."""
    rows, places = AXES[axis]
    size = min(words.shape[rows], block_rows)
    widths = [(0, -extent % size if i == rows else 0) for i, extent in enumerate(words.shape)]
    words = jnp.pad(words, widths, constant_values=jnp.uint32(fill))
    words = words.reshape(*words.shape[:rows], -1, size, *words.shape[rows + 1 :])
    return reduce(words, (rows + 1, places + (places > rows)))
