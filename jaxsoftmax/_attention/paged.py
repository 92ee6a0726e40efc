"""Attention of few queries to keys and values in pages."""

from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxsoftmax._attention.api import flash_attention
from jaxsoftmax._core import checks
from jaxsoftmax._core.checks import ArrayLike, Implementation
from jaxsoftmax._core.sharding import is_explicit, on_mesh_of, settings_for, spec_of

PageLayout = Literal["heads_first", "pages_first"]

_NAME = "paged_attention"
_AXES = {
    "heads_first": "(key heads, pages, page size, head_dim)",
    "pages_first": "(pages, page size, key heads, head_dim)",
}


class _Keywords(TypedDict, total=False):
    """The keywords that every overload has."""

    scale: ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    local_window_size: int | None
    layout: PageLayout
    implementation: Implementation | None


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[False] = False,
    **rest: Unpack[_Keywords],
) -> jax.Array: ...
@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[True],
    **rest: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    local_window_size: int | None = None,
    return_residual: bool = False,
    layout: PageLayout = "heads_first",
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of each sequence's last queries to its keys and values, which lie in pages of a common pool.

    Below, B is the number of sequences, T that of queries of each, N and K the heads of query and key, H and D the head
    dimensions of query and value. Page `block_tables[b, i]` holds the positions `i * page_size` and up of sequence b.

    The queries are the last T positions of a sequence, and each sees the keys up to its own position. A query that sees
    no key, as all do of a sequence of length 0, has output 0 and logsumexp -inf. dtypes, accumulation, NaN and heads
    that share keys are as in `flash_attention`, which computes the result after the pages that the tables name were
    gathered: that takes memory for B times as many positions as a table has, and is differentiable.

    Entries of a table beyond its sequence's length may have any value. Before it, one that names no page makes the
    output NaN.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    https://arxiv.org/abs/2309.06180.

    Args:
        query: `[B, N, H]`, or `[B, T, N, H]`; bfloat16, float16, float32 or float64.
        key_pages: `[K, pages, page_size, H]`, or as `layout` says, of the same dtype; N is a multiple of K.
        value_pages: `[K, pages, page_size, D]`, or as `layout` says, of the same dtype.
        block_tables: Integers `[B, entries]`: the pages of each sequence, in order.
        lengths: Integers `[B]`: how many positions each sequence has, with its queries. More than its table has
            room for count as many as that.
        scale: As in `flash_attention`.
        logits_soft_cap: As in `flash_attention`.
        sinks: As in `flash_attention`.
        local_window_size: How many keys before its own position a query sees.
        return_residual: Whether to return the logsumexp too.
        layout: "heads_first", as in JAX's own `paged_attention`, or "pages_first" for pages `[pages, page_size, K, H]`
            and `[pages, page_size, K, D]`, as in vLLM and FlashInfer.
        implementation: As in `flash_attention`, of what follows the gathering.

    Returns:
        `[B, N, D]`, or `[B, T, N, D]`, of the inputs' dtype; with `return_residual` a pair of it and the logsumexp of
        each row's logits (natural logarithm, sinks included), `[B, N]` or `[B, T, N]`, float32, or float64 for float64.

    Raises:
        TypeError: a dtype is not one of the above, or the arrays differ in theirs.
        ValueError: an argument's shape or value does not fit.
        NotImplementedError: as in `flash_attention`.

    >>> import jax.numpy as jnp
    >>> pages = jnp.ones((2, 10, 8, 16))
    >>> tables = jnp.array([[3, 9, 4], [7, 0, 0]])
    >>> paged_attention(jnp.ones((2, 4, 16)), pages, pages, tables, jnp.array([20, 5])).shape
    (2, 4, 16)
    """
    q, k, v, tables, lengths = _checked(query, key_pages, value_pages, block_tables, lengths, layout)
    if local_window_size is not None and (type(local_window_size) is not int or local_window_size < 0):
        raise ValueError(
            f"{_NAME}: local_window_size={local_window_size!r}, expected a number of positions (0 or more), or None."
        )
    is_one = q.ndim == 3
    keys, values = (_gathered(pages, tables, lengths, layout) for pages in (k, v))
    results = flash_attention(
        q[:, None] if is_one else q,
        keys,
        values,
        scale=scale,
        is_causal=not is_one,
        key_value_seq_lengths=lengths,
        local_window_size=None if local_window_size is None else (local_window_size, None),
        causal_alignment="bottom_right",
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_residual=True,
        implementation=implementation,
    )
    out, lse = (x[:, 0] for x in results) if is_one else results
    return (out, lse) if return_residual else out


def _checked(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    layout: PageLayout,
) -> tuple[jax.Array, ...]:
    """The arrays, of shapes that fit; what `flash_attention` checks of them is left to it."""
    given = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    q, k, v = (checks.as_array(_NAME, name, x) for name, x in given.items())
    if layout not in _AXES:
        raise ValueError(f"{_NAME}: layout={layout!r}, expected one of {', '.join(map(repr, _AXES))}.")
    if q.ndim not in (3, 4):
        raise ValueError(
            f"{_NAME}: query has shape {q.shape}, expected (batch, heads, head_dim), or (batch, length, heads, "
            "head_dim)."
        )
    if k.ndim != 4 or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{_NAME}: key_pages has shape {k.shape}, expected {_AXES[layout]}, with the query's head_dim of "
            f"{q.shape[-1]}. Pass layout= for pages in another order."
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{_NAME}: value_pages has shape {v.shape}, expected key_pages', {k.shape}, but for the last axis."
        )
    tables, counts = _integers("block_tables", block_tables), _integers("lengths", lengths)
    if tables.ndim != 2 or tables.shape[0] != q.shape[0]:
        raise ValueError(
            f"{_NAME}: block_tables has shape {tables.shape}, expected ({q.shape[0]}, entries), the pages of each of "
            "the query's sequences."
        )
    if counts.shape != q.shape[:1]:
        raise ValueError(
            f"{_NAME}: lengths has shape {counts.shape}, expected {q.shape[:1]}, a number for each of the query's "
            "sequences."
        )
    return q, k, v, tables, counts


def _integers(name: str, x: ArrayLike) -> jax.Array:
    """Integers of at least 32 bits; of NumPy's none loses its upper half where JAX has no 64 bits."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        x = np.clip(x, max(-1, np.iinfo(x.dtype).min), 2**31 - 1).astype(np.int32)
    array = checks.as_array(_NAME, name, x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{_NAME}: {name} has dtype {array.dtype}, expected integers.")
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def _gathered(pages: jax.Array, tables: jax.Array, lengths: jax.Array, layout: PageLayout) -> jax.Array:
    """The pages that the tables name, `[B, positions, K, H]`; NaN in the place of those that do not exist.

    What lies beyond the lengths is page 0, which stays in the cache.
    """
    avals = jax.typeof(pages), jax.typeof(tables)
    of_pages, (of_batch, _) = map(spec_of, avals)
    axis = 1 if layout == "heads_first" else 0
    count, size = pages.shape[axis : axis + 2]
    spec = P(*of_pages[:axis], of_batch, None, *of_pages[axis + 1 :])
    with on_mesh_of(avals), settings_for(*avals):
        exists = (tables >= 0) & (tables < count)
        counts = size * np.arange(tables.shape[1], dtype=np.int32) < lengths[:, None]
        tables = jnp.where(counts, jnp.where(exists, tables, count), 0).astype(jnp.int32)
        at = pages.at[(slice(None),) * axis + (tables,)]
        found = at.get(mode="fill", fill_value=jnp.nan, out_sharding=spec if is_explicit(avals) else None)
        found = jnp.moveaxis(found, 0, 3) if layout == "heads_first" else found
        return jax.lax.collapse(found, 1, 3)
