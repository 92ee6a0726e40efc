"""The k largest of rows cut into chunks, where there are few rows: not sorted, but counted.

On a GPU a kernel that orders a thousand elements of one row by sorting takes 6 to 12 us, and one that does next to
nothing 1 to 2. An element's rank is the number of those before it: all compared with all, one reduction. That is n
comparisons for each of n elements, which one row leaves a GPU idle enough for. Each step is one fused reduction:

    ranks of the chunks -> the k chunks, and the row's merged state -> ranks of their elements -> the k elements

For k = 1 the ranks are not needed. Chunks need not come in the row's order: places decide between equal elements.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.monoid import Stats, combine
from pallas_kernels.softmax import reference

# Comparisons of both rankings up to which counting is faster than sorting, for one row; XLA takes longer over each of
# them for several rows. In comparisons: one among the candidates, which are gathered for it, a padded copy, and chunks
# that begin anywhere.
_MOST, _SLOWER = 2**25, 2
_CANDIDATE, _COPY, _UNALIGNED = 3, 2**23, 2**18
_VECTOR = 8


@functools.cache
def chunk_size(n: int, k: int, rows: Any) -> int | None:
    """Into chunks of how many elements to cut `rows` rows of `n` to count their `k` > 1 largest; None: do not count."""

    def comparisons(c: int, weight: int = 1) -> int:
        return (-(-n // c)) ** 2 + weight * (k * c) ** 2

    def cost(c: int) -> int:
        return comparisons(c, _CANDIDATE) + _COPY * (n % c > 0) + _UNALIGNED * (c % _VECTOR > 0)

    if not isinstance(rows, int):
        return None
    most = _MOST if rows <= 1 else _MOST // (_SLOWER * rows)
    few = (c for c in range(2, min(n // k, 8 * math.isqrt(n // k)) + 1) if comparisons(c) <= most)
    return min(few, key=cost, default=None)


def select(chunks: jax.Array, stats: Stats, n: int, *, k: int, scale: float) -> list[jax.Array]:
    """The `k` largest of `scale * chunks`, `[..., chunks, c]`, whose `stats` are known; and the row's merged state.

    Values, places in the row of `n`, maximum, sum, and the values' probabilities, rounded: those of all candidates, for
    what comes after a reduction is one more kernel. Of rows with NaN, places are of any elements.
    """
    chosen, *row = _first_chunk(stats) if k == 1 else _first_chunks(stats, k)
    c = chunks.shape[-1]
    flat = (*chosen.shape[:-1], k * c)
    candidates = jnp.take_along_axis(chunks, chosen[..., None], -2, mode="promise_in_bounds")
    values = reference.logits(candidates, scale).reshape(flat)
    places = (chosen[..., None] * c + jnp.arange(c, dtype=jnp.int32)).reshape(flat)
    if n < chunks.shape[-2] * c:
        # What fills the last chunk up comes after the row's last element, and is not told from it.
        places = jnp.minimum(places, n - 1)
    y = reference.softmax(reference.below(values, row[0][..., None]), axes=(len(flat) - 1,), known=Stats(*row)).astype(
        chunks.dtype
    )
    among, nan = (values, places, _bits(y)), _bits(jnp.asarray(jnp.nan, y.dtype))
    if k == 1:
        found = [part[..., None] for part in _reduce(_earlier, (-jnp.inf, n - 1, nan), among)]
    else:
        # Or each of the next two kernels would gather them, the first of them as often as it compares them.
        values, places, y = jax.lax.optimization_barrier(among)
        is_of, others = _is_of_rank(values, places, k), (jnp.inf, n - 1, nan)
        parts = [
            jnp.where(is_of, part[..., None, :], other) for part, other in zip((values, places, y), others, strict=True)
        ]
        found = _reduce(_smaller, others, parts)
    values, places, y = found
    return [values, places, *row, jax.lax.bitcast_convert_type(y, chunks.dtype)]


def _first_chunk(stats: Stats) -> list[jax.Array]:
    """The first chunk with the row's maximum, `[..., 1]`, and the row's state."""

    def merged(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [_earlier((a[1], a[0]), (b[1], b[0]))[1], *combine(Stats(*a[1:]), Stats(*b[1:]))]

    start = (stats.max.shape[-1] - 1, -jnp.inf, 0)
    chosen, *row = _reduce(merged, start, (_places(stats.max), *stats))
    return [chosen[..., None], *row]


def _first_chunks(stats: Stats, k: int) -> list[jax.Array]:
    """The chunks with the k largest maxima, in their order, and the row's state.

    The state is merged once for each of the k: as part of the same reduction, which is what costs.
    """

    def merged(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [*_smaller(a[:1], b[:1]), *combine(Stats(*a[1:]), Stats(*b[1:]))]

    last, places = stats.max.shape[-1] - 1, _places(stats.max)
    at = jnp.where(_is_of_rank(stats.max, places, k), places[..., None, :], last)
    parts = (jnp.broadcast_to(part[..., None, :], at.shape) for part in stats)
    chosen, *row = _reduce(merged, (last, -jnp.inf, 0), (at, *parts))
    return [chosen, *(part[..., 0] for part in row)]


def _bits(y: jax.Array) -> jax.Array:
    """As an integer: XLA reduces several arrays together, but not floats of several dtypes."""
    return jax.lax.bitcast_convert_type(y, f"uint{8 * y.dtype.itemsize}")


def _is_of_rank(keys: jax.Array, places: jax.Array, k: int) -> jax.Array:
    """Whether of `keys`, `[..., n]`, each is the r-th largest: `[..., k, n]`; of equal ones the lower place is first.

    Comparisons with NaN are false: each has rank 0, and the last ranks have no element.
    """
    a, b = ((part[..., :, None], part[..., None, :]) for part in (keys, places))
    (mine, other), (here, there) = a, b
    ranks = ((other > mine) | ((other == mine) & (there < here))).sum(-1, dtype=jnp.int32)
    return ranks[..., None, :] == jnp.arange(k, dtype=jnp.int32).reshape((1,) * (ranks.ndim - 1) + (k, 1))


def _places(keys: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(keys.shape[-1], dtype=jnp.int32), keys.shape)


def _earlier(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    """Of two (value, place, ...) that with the larger value, of equal ones that of the lower place."""
    is_a = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return [jnp.where(is_a, x, y) for x, y in zip(a, b, strict=True)]


def _smaller(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.minimum(x, y) for x, y in zip(a, b, strict=True)]


def _reduce(
    step: Callable[..., Sequence[jax.Array]], start: Sequence[Any], operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Several arrays reduced together over their last axis."""
    neutral = [jnp.asarray(value, x.dtype) for value, x in zip(start, operands, strict=True)]
    return jax.lax.reduce(tuple(operands), tuple(neutral), step, (operands[0].ndim - 1,))
