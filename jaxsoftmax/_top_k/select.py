"""The k largest of a row, chunk by chunk, together with the row's softmax statistics.

The k largest elements lie in the k chunks with the largest maxima, of equal ones the first: an element outside of
those has k chunks before it, each with an element that is larger, or equal and of lower index. A chunk's maximum is
part of its softmax state, so one read of the row gives what selects the chunks and, merged, the row's state. What is
left to order is a maximum per chunk and k chunks, which is least where a chunk has about sqrt(n / k) elements. They are
sorted, but few rows are counted on a GPU: see `_counting`.

Source of the fusion: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.sharding import AxisShardings, names_of
from jaxsoftmax._softmax.primitives import bind
from jaxsoftmax._softmax.sharding import all_gather
from jaxsoftmax._top_k import rank_select
from pallas_kernels.monoid import Stats, merge_over
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import Op
from pallas_kernels.softmax.reference import accumulator_dtype

# Rows that XLA orders in one kernel; and the cost of ordering an element, of a chunk's state, of a chunk that begins
# anywhere and of a padded copy, in reads of an element.
_AT_ONCE = 1024
_ORDER, _STATE, _UNALIGNED, _COPY = 8.0, 4.0, 0.5, 2.0
_VECTOR = 8

_lax_top_k = jax.lax.top_k  # bound once, as a program may put another function in its place


@functools.cache
def chunk_size(n: Any, k: int) -> Any:
    """Into chunks of how many elements to cut a row of `n` to find the `k` largest; `n` itself for not at all."""
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
    """`[..., n]` as `[..., chunks, c]`, the last chunk filled up with -inf."""
    *lead, n = x.shape
    chunks = -(-n // c)
    if n < chunks * c:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, chunks * c - n)], constant_values=-jnp.inf)
    return x.reshape(*lead, chunks, c)


def largest(keys: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` of what is comparable, for long rows chunk by chunk."""
    c = chunk_size(keys.shape[-1], k)
    if c == keys.shape[-1]:
        return _lax_top_k(keys, k)
    chunks = chunked(keys, c)
    return largest_in(chunks, chunks.max(-1), k)


def largest_in(chunks: jax.Array, maxima: jax.Array, k: int, scale: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """The `k` largest of `scale * chunks`, `[..., chunks, c]`, whose maxima are known, and their places in the row."""
    c = chunks.shape[-1]
    # In the row's order again, so that of equal candidates the first comes first.
    chosen = jnp.sort(largest(maxima, k)[1], -1)
    candidates = jnp.take_along_axis(chunks, chosen[..., None], -2)
    values, at = largest(comparable(candidates.reshape(*candidates.shape[:-2], k * c), scale), k)
    return values, jnp.take_along_axis(chosen, at // c, -1) * c + at % c


def comparable(x: jax.Array, scale: float = 1.0) -> jax.Array:
    """Logits as they are compared: `scale * x` as a row's statistics have it, and 0 for -0, which XLA may order."""
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

    If it `normalizes`, their probabilities too, which may then take a kernel less. `may_count`: see `_counting`. If
    `batch_invariant`, one kernel finds the rows' state, in another read: XLA would add up that of chunks as suits it.
    """
    state = functools.partial(bind, Op.STATS, scale=scale, implementation=implementation, function="top_k_softmax")
    n, wide = x.shape[-1], accumulator_dtype(x.dtype)
    if batch_invariant:
        values, indices = largest(comparable(x, scale), k)
        row = state(x, axes=(x.ndim - 1,), batch_invariant=True)
        return _completed([values.astype(wide), indices.astype(jnp.int32), *row], normalizes, x.dtype)
    c, counts = chunk_size(n, k), may_count and k == 1
    if may_count and k > 1 and c < n and (few := rank_select.chunk_size(n, k, math.prod(x.shape[:-1]))):
        c, counts = few, True
    if c == n:
        values, indices = _lax_top_k(comparable(x, scale), k)
        row = Stats(*state(x, axes=(x.ndim - 1,)))
    else:
        chunks = chunked(x, c)
        stats = Stats(*state(chunks, axes=(x.ndim,)))
        if counts:
            return rank_select.select(chunks, stats, n, k=k, scale=scale)[: 4 + normalizes]
        maxima = comparable(stats.max.astype(x.dtype) if scale == 1.0 else stats.max)
        values, indices = largest_in(chunks, maxima, k, scale)
        row = merge_over(stats, -1)
    return _completed([values.astype(wide), indices.astype(jnp.int32), *row], normalizes, x.dtype)


def probabilities(values: jax.Array, maximum: jax.Array, total: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Of selected `values` among all of a row, rounded."""
    values = reference.below(values, maximum[..., None])
    return reference.softmax(values, axes=(values.ndim - 1,), known=Stats(maximum, total)).astype(dtype)


def _completed(selected: list[jax.Array], normalizes: bool, dtype: jnp.dtype) -> list[jax.Array]:
    """With the probabilities, if they are wanted."""
    values, _, maximum, total = selected
    return [*selected, probabilities(values, maximum, total, dtype)] if normalizes else selected


def select_across(
    cuts: AxisShardings, inside: jax.Array | None, x: jax.Array, *, k: int, normalizes: bool, **params: Any
) -> list[jax.Array]:
    """The same for rows of which this device has some columns, those `inside`: one exchange of k numbers for each."""
    local, names = x.shape[-1], names_of(cuts)
    first = jax.lax.axis_index(names) * local
    x = x if inside is None else jnp.where(inside, x, -jnp.inf)
    mine = select(x, k=min(k, local), normalizes=False, **params)
    mine[1] += first
    values, indices, *stats = all_gather(names, *mine)
    values, indices = (jnp.moveaxis(part, 0, -2).reshape(*x.shape[:-1], -1) for part in (values, indices))
    values, at = _lax_top_k(values, k)
    found = [values, jnp.take_along_axis(indices, at, -1), *merge_over(Stats(*stats), 0)]
    return _completed(found, normalizes, x.dtype)
