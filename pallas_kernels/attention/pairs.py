"""Which blocks of queries and of keys have anything to do with each other, so that the kernels pass over the others.

`segments` tells from the ids, `bits` from a mask; what both allow is visited. Rows are the blocks that stay, columns
those that come past them: queries and keys in the forward, the reverse in the backward.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pairs(NamedTuple):
    """Of each block of rows and each of columns, `[B|1, heads|1, blocks of rows|1, blocks of columns|1]`."""

    meet: jax.Array  # whether some of their rows may see some of their columns
    alike: jax.Array  # whether all rows see all columns


def both(a: Pairs, b: Pairs) -> Pairs:
    """Of blocks that see each other if both allow it."""
    return Pairs(a.meet & b.meet, a.alike & b.alike)


def of_group(pairs: Pairs, group: int) -> Pairs:
    """Those of `group` heads together, which come past the same rows."""
    if pairs.meet.shape[1] == 1:
        return pairs
    meet, alike = (x.reshape(x.shape[0], -1, group, *x.shape[2:]) for x in pairs)
    return Pairs(meet.any(2), alike.all(2))


def spans(pairs: Pairs, columns: int) -> jax.Array:
    """`[B|1, heads|1, blocks of rows|1, 4]`: `first <= column < end` holds all that a row meets of `columns` blocks.

    That is `0, 0, 0, 0` if it meets none. In between, as in a `Span`, are the ends of a part in which all columns are
    like the row, which may be empty.
    """
    meet, alike = (jnp.broadcast_to(x, (*x.shape[:3], columns)) for x in pairs)
    column = jnp.arange(columns)[None, None, None, :]
    # Minima and maxima, which XLA finds in one pass, and not `argmax`.
    first, inner_first = (jnp.where(x, column, columns).min(3) for x in (meet, alike))
    first, inner_first = (jnp.where(x == columns, 0, x) for x in (first, inner_first))
    end = jnp.where(meet, column + 1, 0).max(3)
    inner_end = jnp.where((column >= inner_first[..., None]) & ~alike, column, columns).min(3)
    return jnp.stack([first, inner_first, inner_end, end], axis=3).astype(jnp.int32)
