"""The k largest of a row, chunk by chunk, together with the row's softmax statistics.

The k largest elements lie in the k chunks with the largest maxima, of equal ones the first: an element outside of
those has k chunks before it, each with an element that is larger, or equal and of lower index. A chunk's maximum is
part of its softmax state, so one read of the row gives what selects the chunks and, merged, the row's state. What is
left to order is a maximum per chunk and k chunks, which is least where a chunk has about sqrt(n / k) elements. They are
sorted, or, on a GPU where there are few rows, ranked by counting.

On a GPU a kernel that orders a thousand elements of one row by sorting takes 6 to 12 us, and one that does next to
nothing 1 to 2. An element's rank is the number of those before it: all compared with all, one reduction. That is n
comparisons for each of n elements, which one row leaves a GPU idle enough for. Each step is one fused reduction:

    ranks of the chunks -> the k chunks, and the row's merged state -> ranks of their elements -> the k elements

For k = 1 the ranks are not needed. Chunks need not come in the row's order: places decide between equal elements.

Source of the fusion: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.sharding import Columns, all_gather
from jaxsoftmax._softmax.primitives import bind
from pallas_kernels.monoid import Stats, combine, merge_over
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import Op
from pallas_kernels.softmax.reference import accumulator_dtype

# Rows that XLA orders in one kernel; and the cost of ordering an element, of a chunk's state, of a chunk that begins
# anywhere and of a padded copy, in reads of an element.
_AT_ONCE = 1024
_ORDER, _STATE, _UNALIGNED, _COPY = 8.0, 4.0, 0.5, 2.0
_VECTOR = 8

# Comparisons of both rankings up to which counting is faster than sorting, for one row; XLA takes longer over each of
# them for several rows. In comparisons: one among the candidates, which are gathered for it, a padded copy, and chunks
# that begin anywhere.
_MOST_COMPARISONS, _SLOWER = 2**25, 2
_RANK_CANDIDATE, _RANK_COPY, _RANK_UNALIGNED = 3, 2**23, 2**18

_lax_top_k = jax.lax.top_k  # bound once, as a program may put another function in its place


@functools.cache
def chunk_size(n: Any, k: int) -> Any:
    """The chunk size with which to find the `k` largest of a row of `n`; `n` itself means no chunks."""
    if not isinstance(n, int) or n <= _AT_ONCE or k == 0:
        return n

    def cost(c: int) -> float:
        chunks = -(-n // c)
        copy = _COPY * n if n % c else _UNALIGNED * n if c % _VECTOR else 0.0
        return (_ORDER + _STATE) * chunks + _ORDER * k * c + copy

    most = max(2, min(n // k, 8 * math.isqrt(n // k)))
    best = min(range(2, most + 1), key=cost)
    return best if cost(best) < _ORDER * n else n


def chunked(x: jax.Array, c: int) -> jax.Array:
    """Reshapes `[..., n]` to `[..., chunks, c]`; the last chunk is padded with -inf."""
    *lead, n = x.shape
    chunks = -(-n // c)
    if n < chunks * c:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, chunks * c - n)], constant_values=-jnp.inf)
    return x.reshape(*lead, chunks, c)


def largest(keys: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` of comparable keys, for long rows chunk by chunk."""
    c = chunk_size(keys.shape[-1], k)
    if c == keys.shape[-1]:
        return _lax_top_k(keys, k)
    chunks = chunked(keys, c)
    return largest_in(chunks, chunks.max(-1), k)


def largest_in(chunks: jax.Array, maxima: jax.Array, k: int, scale: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """The `k` largest of `scale * chunks`, `[..., chunks, c]`, from the chunks' maxima, and indices in the row."""
    c = chunks.shape[-1]
    # Back to the row's order, so that equal candidates keep their order.
    chosen = jnp.sort(largest(maxima, k)[1], -1)
    candidates = jnp.take_along_axis(chunks, chosen[..., None], -2)
    values, at = largest(comparable(candidates.reshape(*candidates.shape[:-2], k * c), scale), k)
    return values, jnp.take_along_axis(chosen, at // c, -1) * c + at % c


def comparable(x: jax.Array, scale: float = 1.0) -> jax.Array:
    """The keys to compare: `scale * x`, rounded as in the row's statistics, and 0 for -0, which XLA may order."""
    x = x if scale == 1.0 else x.astype(accumulator_dtype(x.dtype)) * scale
    return jnp.where(x == 0, jnp.zeros_like(x), x)


def select(
    x: jax.Array,
    *,
    k: int,
    normalizes: bool,
    scale: float,
    implementation: str | None,
    may_count: bool = False,
    batch_invariant: bool = False,
) -> list[jax.Array]:
    """The `k` largest of `scale * x` along the last axis, their indices, and the rows' maximum and sum.

    With `normalizes` it also returns their probabilities, which may save a kernel. With `may_count`, it ranks few rows
    by counting. With `batch_invariant`, one kernel finds the rows' state in another read, because the order in which
    XLA adds up the chunks' sums depends on the batch.
    """
    state = functools.partial(bind, Op.STATS, scale=scale, implementation=implementation, function="top_k_softmax")
    n, wide = x.shape[-1], accumulator_dtype(x.dtype)
    if batch_invariant:
        values, indices = largest(comparable(x, scale), k)
        row = state(x, axes=(x.ndim - 1,), batch_invariant=True)
        return _completed([values.astype(wide), indices.astype(jnp.int32), *row], normalizes, x.dtype)
    c, counts = chunk_size(n, k), may_count and k == 1
    if may_count and k > 1 and c < n and (few := rank_chunk_size(n, k, math.prod(x.shape[:-1]))):
        c, counts = few, True
    if c == n:
        values, indices = _lax_top_k(comparable(x, scale), k)
        row = Stats(*state(x, axes=(x.ndim - 1,)))
    else:
        chunks = chunked(x, c)
        stats = Stats(*state(chunks, axes=(x.ndim,)))
        if counts:
            return select_by_rank(chunks, stats, n, k=k, scale=scale)[: 4 + normalizes]
        maxima = comparable(stats.max.astype(x.dtype) if scale == 1.0 else stats.max)
        values, indices = largest_in(chunks, maxima, k, scale)
        row = merge_over(stats, -1)
    return _completed([values.astype(wide), indices.astype(jnp.int32), *row], normalizes, x.dtype)


def probabilities(values: jax.Array, maximum: jax.Array, total: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The probabilities of selected `values` among all of a row, rounded."""
    values = reference.below(values, maximum[..., None])
    return reference.softmax(values, axes=(values.ndim - 1,), known=Stats(maximum, total)).astype(dtype)


def _completed(selected: list[jax.Array], normalizes: bool, dtype: jnp.dtype) -> list[jax.Array]:
    """Adds the probabilities, if they are wanted."""
    values, _, maximum, total = selected
    return [*selected, probabilities(values, maximum, total, dtype)] if normalizes else selected


def select_across(columns: Columns, x: jax.Array, *, k: int, normalizes: bool, **params: Any) -> list[jax.Array]:
    """As `select`, for sharded rows: each device selects among its columns, then they exchange k numbers each."""
    local, names = x.shape[-1], columns.names
    first = jax.lax.axis_index(names) * local
    x = x if columns.inside is None else jnp.where(columns.inside, x, -jnp.inf)
    mine = select(x, k=min(k, local), normalizes=False, **params)
    mine[1] += first
    values, indices, *stats = all_gather(names, *mine)
    values, indices = (jnp.moveaxis(part, 0, -2).reshape(*x.shape[:-1], -1) for part in (values, indices))
    values, at = _lax_top_k(values, k)
    found = [values, jnp.take_along_axis(indices, at, -1), *merge_over(Stats(*stats), 0)]
    return _completed(found, normalizes, x.dtype)


@functools.cache
def rank_chunk_size(n: int, k: int, rows: Any) -> int | None:
    """The chunk size with which to rank the `k` > 1 largest of `rows` rows of `n` by counting; None means to sort."""

    def comparisons(c: int, weight: int = 1) -> int:
        return (-(-n // c)) ** 2 + weight * (k * c) ** 2

    def cost(c: int) -> int:
        return comparisons(c, _RANK_CANDIDATE) + _RANK_COPY * (n % c > 0) + _RANK_UNALIGNED * (c % _VECTOR > 0)

    if not isinstance(rows, int):
        return None
    most = _MOST_COMPARISONS if rows <= 1 else _MOST_COMPARISONS // (_SLOWER * rows)
    few = (c for c in range(2, min(n // k, 8 * math.isqrt(n // k)) + 1) if comparisons(c) <= most)
    return min(few, key=cost, default=None)


def select_by_rank(chunks: jax.Array, stats: Stats, n: int, *, k: int, scale: float) -> list[jax.Array]:
    """The `k` largest of `scale * chunks`, `[..., chunks, c]`, from the chunks' `stats`, and the row's merged state.

    Returns values, indices in the row of `n`, maximum, sum, and the rounded probabilities. The probabilities of all
    candidates are computed, because an operation after a reduction is one more kernel. In rows with NaN the indices may
    be those of any elements.
    """
    chosen, *row = _first_chunk(stats) if k == 1 else _first_chunks(stats, k)
    c = chunks.shape[-1]
    flat = (*chosen.shape[:-1], k * c)
    candidates = jnp.take_along_axis(chunks, chosen[..., None], -2, mode="promise_in_bounds")
    values = reference.logits(candidates, scale).reshape(flat)
    places = (chosen[..., None] * c + jnp.arange(c, dtype=jnp.int32)).reshape(flat)
    if n < chunks.shape[-2] * c:
        # Padding of the last chunk gets the index of the row's last element.
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

    The state is merged once for each of the k, as part of the same reduction, because a second one costs more.
    """

    def merged(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [*_smaller(a[:1], b[:1]), *combine(Stats(*a[1:]), Stats(*b[1:]))]

    last, places = stats.max.shape[-1] - 1, _places(stats.max)
    at = jnp.where(_is_of_rank(stats.max, places, k), places[..., None, :], last)
    parts = (jnp.broadcast_to(part[..., None, :], at.shape) for part in stats)
    chosen, *row = _reduce(merged, (last, -jnp.inf, 0), (at, *parts))
    return [chosen, *(part[..., 0] for part in row)]


def _bits(y: jax.Array) -> jax.Array:
    """Bitcasts to an integer: XLA reduces several arrays together, but not floats of several dtypes."""
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
    """The one of two (value, index, ...) with the larger value, or of equal values the lower index."""
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
