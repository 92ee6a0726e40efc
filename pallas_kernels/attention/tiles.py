"""Attention in tiles, in plain `jax.numpy`: who sees whom, a tile's logits, and the loops over chunks of a length.

A tile is a chunk of queries against a chunk of keys. The rows that read a key head are those of its G query heads,
R = t * G of them, a query's heads side by side, so that keys and values are never repeated: logits are
`[*batch, K, R, s]`, and a row's other numbers `[*batch, K, R, 1]`. In this order XLA for a GPU reads the queries within
the product; it would copy heads before positions first.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from pallas_kernels.attention.problem import DIFFERENTIABLE, OPERANDS, UNBOUNDED, Operands, Rules
from pallas_kernels.monoid import combine
from pallas_kernels.types import Dim, Index, accumulator_dtype, varying_like

CHUNK = 512  # a tile's logits are at most a quarter of a million numbers for each head, whatever the lengths
FEW_ROWS = 32  # so many rows of all heads together are multiplied with every head's keys, see `_is_few`

QUERY_AXIS = {name: x.query_axis for name, x in OPERANDS.items() if x.query_axis is not None} | {"delta": -1}
KEY_AXIS = {name: x.key_axis for name, x in OPERANDS.items() if x.key_axis is not None}
# The operands beside queries and keys by which logits have derivatives; sinks are logits of their own.
IN_LOGITS = tuple(name for name in DIFFERENTIABLE if name not in ("query", "key", "value", "sinks"))


class Chunk(NamedTuple):
    """A chunk of a length: its first index, and the length."""

    first: Index
    size: int
    length: int

    def along(self, axis: int, rank: int) -> jax.Array:
        """Returns the indices, along one axis of an array of this rank."""
        shape = [1] * rank
        shape[axis] = self.size
        return (self.first + jnp.arange(self.size, dtype=jnp.int32)).reshape(shape)


def einsum(formula: str, a: jax.Array, b: jax.Array, rules: Rules) -> jax.Array:
    """Returns a product accumulated, and returned, in the dtype of accumulation."""
    return jnp.einsum(formula, a, b, precision=rules.precision, preferred_element_type=accumulator_dtype(a.dtype))


def scores(rows: jax.Array, keys: jax.Array, rules: Rules) -> jax.Array:
    """Multiplies rows `[*batch, K, R, H]` with keys `[*batch, s, K, H]`: `[*batch, K, R, s]`."""
    if _is_few(rows, rules):
        pairs = einsum("...sjh,...krh->...sjkr", keys, rows, rules)
        return jnp.swapaxes(jnp.diagonal(pairs, axis1=-3, axis2=-2), -1, -3)
    return einsum("...krh,...skh->...krs", rows, keys, rules)


def weighted(weights: jax.Array, values: jax.Array, rules: Rules) -> jax.Array:
    """Returns the sums over keys of values `[*batch, s, K, D]` by weights `[*batch, K, R, s]`: `[*batch, K, R, D]`."""
    if _is_few(weights, rules):
        pairs = einsum("...krs,...sjd->...krjd", weights, values, rules)
        return jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
    return einsum("...krs,...skd->...krd", weights, values, rules)


def by_key(weights: jax.Array, queries: jax.Array, rules: Rules) -> jax.Array:
    """Returns the sums over rows of `[*batch, t, N, H]` by weights `[*batch, K, R, s]`: `[*batch, s, K, H]`."""
    heads = weights.shape[-3]
    x = jnp.swapaxes(grouped(queries, queries.shape[-2] // heads, -2), -2, -3)
    x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    if _is_few(weights, rules):
        wide = accumulator_dtype(x.dtype)
        factors = jnp.moveaxis(weights, -1, -3)[..., None].astype(wide)
        return (factors * jnp.moveaxis(x, -3, -2)[..., None, :, :, :].astype(wide)).sum(-2)
    if rules.tile is None:
        # With keys last the product is a quarter faster on a CPU.
        return jnp.moveaxis(einsum("...rkh,...krs->...khs", x, weights, rules), -1, -3)
    # XLA for a GPU then reads the rows as another product does, and does not copy them again.
    return jnp.swapaxes(einsum("...krs,...rkh->...ksh", weights, x, rules), -3, -2)


def _is_few(rows: jax.Array, rules: Rules) -> bool:
    """Says whether rows, or weights, are so few that copying keys head by head would take longer than products.

    Then every row meets the keys of every head, which lie in memory as they come, and its own head's are kept. A GPU's
    products read the keys of a head where they lie.
    """
    heads, count = rows.shape[-3:-1]
    return rules.tile is None and rules.is_local and isinstance(count, int) and 1 < heads <= heads * count <= FEW_ROWS


def grouped(x: jax.Array, groups: int, axis: int) -> jax.Array:
    """Splits the axis of query heads, counted from the end, in key heads and the query heads that read each."""
    axis += x.ndim
    heads = x.shape[axis]
    split = (1, 1) if heads == 1 else (heads // groups, groups)
    return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])


def ungrouped(x: jax.Array, axis: int) -> jax.Array:
    """Joins the axis and the one after it."""
    axis += x.ndim
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def by_rows(x: jax.Array, groups: int) -> jax.Array:
    """Returns `[*batch, t, N, H]` as `[*batch, K, R, H]`."""
    return _merged(jnp.swapaxes(grouped(x, groups, -2), -4, -3))


def of_rows(x: jax.Array, groups: int) -> jax.Array:
    """Inverts `by_rows`."""
    return ungrouped(jnp.swapaxes(_split(x, groups), -4, -3), -3)


def by_head(x: jax.Array, groups: int) -> jax.Array:
    """Returns `[*batch, K, R, n]` as `[*batch, N, t, n]`."""
    return ungrouped(jnp.swapaxes(_split(x, groups), -3, -2), -4)


def _split(x: jax.Array, groups: int) -> jax.Array:
    """Returns `[*batch, K, R, n]` as `[*batch, K, t, G, n]`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // groups, groups, x.shape[-1])


def broadcast_rows(x: jax.Array, groups: int, length: int) -> jax.Array:
    """Works as `by_rows` on `[*batch, N, t, n]`, whose N and t may be 1; R is 1 if both are."""
    x = jnp.swapaxes(grouped(x, groups, -3), -3, -2)
    if x.shape[-3:-1] != (1, 1):
        x = jnp.broadcast_to(x, (*x.shape[:-3], length, groups, x.shape[-1]))
    return _merged(x)


def _merged(x: jax.Array) -> jax.Array:
    """Returns `[*batch, K, t, G, n]` as `[*batch, K, R, n]`."""
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def without_padding(x: jax.Array, lengths: jax.Array | None, chunk: Chunk) -> jax.Array:
    """Puts zeros into `[*batch, t, heads, H]` beyond the lengths, where there may be anything, NaN too."""
    if lengths is None:
        return x
    inside = chunk.along(-1, lengths.ndim + 1) < lengths[..., None]
    return jnp.where(inside[..., None, None], x, jnp.zeros((), x.dtype))


def logits(ops: Operands, rules: Rules, rows: Chunk, cols: Chunk) -> jax.Array:
    """Computes the logits of a tile whose operands are `ops`; -inf where a query does not see a key."""
    groups = ops.query.shape[-2] // ops.key.shape[-2]
    return modified(scores(by_rows(ops.query, groups), ops.key, rules), {}, ops, rules, rows, cols)


def modified(
    products: jax.Array, others: Mapping[str, jax.Array], ops: Operands, rules: Rules, rows: Chunk, cols: Chunk
) -> jax.Array:
    """Computes a tile's logits from the products of queries and keys; `others` take the place of those in `ops`.

    Derivatives are JAX's own of this function, so an operand that enters here has them.
    """
    ops = ops._replace(**others)
    wide, groups = products.dtype, ops.query.shape[-2] // ops.key.shape[-2]
    z, seen = products * jnp.asarray(rules.scale, wide), visible(ops, rules, rows, cols)
    seen = None if seen is None else broadcast_rows(seen, groups, rows.size)
    if ops.cap is not None:
        # The cap's gradient is a sum over all logits, of which one that is not seen may be NaN.
        z = z if seen is None else jnp.where(seen, z, jnp.zeros_like(z))
        z = capped(z, ops.cap[..., None, None, None].astype(wide))
    elif rules.soft_cap is not None:
        z = capped(z, jnp.asarray(rules.soft_cap, wide))
    if ops.bias is not None:
        z = z + broadcast_rows(ops.bias, groups, rows.size).astype(wide)
    return z if seen is None else jnp.where(seen, z, jnp.asarray(-jnp.inf, wide))


@jax.custom_jvp
def capped(z: jax.Array, cap: jax.Array) -> jax.Array:
    """Computes `cap * tanh(z / cap)`."""
    return cap * jnp.tanh(z / cap)


def _capped_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns `dz * (1 - t^2) + dcap * (t - z / cap * (1 - t^2))`, with `t = tanh(z / cap)`; 0 times inf is 0."""
    (z, cap), (d_z, d_cap) = primals, tangents
    bent = jnp.tanh(z / cap)
    slope = 1 - bent * bent
    tangent = d_z if type(d_z) is SymbolicZero else d_z * slope
    if type(d_cap) is not SymbolicZero:
        of_cap = bent - jnp.where(slope == 0, jnp.zeros_like(z), z / cap * slope)
        tangent = d_cap * of_cap if type(d_z) is SymbolicZero else tangent + d_cap * of_cap
    return cap * bent, tangent


capped.defjvp(_capped_jvp, symbolic_zeros=True)


def visible(ops: Operands, rules: Rules, rows: Chunk, cols: Chunk) -> jax.Array | None:
    """Says which queries of a tile see which keys, `[*batch, N|1, t|1, s|1]`; None: all see all."""
    rank = ops.query.ndim
    i, j = rows.along(-2, rank), cols.along(-1, rank)
    left, right = rules.window
    conditions: list[jax.Array] = []
    at, key_at = i + _ends_apart(ops, rows, cols) if rules.align_ends else i, j
    if ops.query_positions is not None:
        at, key_at = ops.query_positions[..., None, :, None], ops.key_positions[..., None, None, :]
    if rules.causal_offset is not None:
        conditions.append(key_at <= at + rules.causal_offset)
    if left is not None:
        conditions.append(key_at >= at + (rules.window_offset - left))
    if right is not None:
        conditions.append(key_at <= at + (rules.window_offset + right))
    if ops.window_sizes is not None:
        before, after = (ops.window_sizes[..., side][..., None, None, None] for side in (0, 1))
        conditions += [(before >= UNBOUNDED) | (key_at >= at - before), (after >= UNBOUNDED) | (key_at <= at + after)]
    for chunk, index in ((rows, i), (cols, j)):
        if chunk.size != chunk.length:
            conditions.append(index < chunk.length)
    for lengths, index in ((ops.query_lengths, i), (ops.key_lengths, j)):
        if lengths is not None:
            conditions.append(index < lengths[..., None, None, None])
    if ops.query_segments is not None:
        same = ops.query_segments[..., :, None] == ops.key_segments[..., None, :]
        conditions.append(same[..., None, :, :])
    if ops.mask is not None:
        conditions.append(ops.mask.astype(bool))
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def _ends_apart(ops: Operands, rows: Chunk, cols: Chunk) -> Index:
    """Returns each sequence's count of keys less its count of queries, `[*batch, 1, 1, 1]`."""
    counts = [
        chunk.length if lengths is None else jnp.minimum(lengths, chunk.length)[..., None, None, None]
        for lengths, chunk in ((ops.key_lengths, cols), (ops.query_lengths, rows))
    ]
    return counts[0] - counts[1]


class Monoid(NamedTuple):
    """How the states of chunks become one: a state that has seen nothing (of given shapes), and the merge of two."""

    identity: Callable[[Any], Any]
    merge: Callable[[Any, Any], Any]


def _empty(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
    maximum, *sums = shapes
    return (jnp.full(maximum.shape, -jnp.inf, maximum.dtype), *(jnp.zeros(x.shape, x.dtype) for x in sums))


SOFTMAX = Monoid(_empty, combine)
SUM = Monoid(
    lambda shapes: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
    lambda a, b: jax.tree.map(jnp.add, a, b),
)

Arrays = dict[str, jax.Array]
Tile = Callable[[Arrays, Chunk], tuple[Any, Any]]


def over_queries(tile: Tile, arrays: Arrays, rules: Rules, monoid: Monoid) -> tuple[Any, Any]:
    """Runs `tile(arrays, chunk)` for each chunk of queries: merges its states, stacks its other results in front."""
    most = CHUNK if rules.tile is None else rules.tile[0]
    return _over(tile, arrays, monoid, QUERY_AXIS, arrays["query"].shape[-3], most)


def over_keys(tile: Tile, arrays: Arrays, rules: Rules, monoid: Monoid) -> tuple[Any, Any]:
    """Returns `tile(arrays, chunk)` for each chunk of keys: its states merged, and its other results stacked in front.

    Without a `tile` in the rules, fewer queries meet more keys: one query of `CHUNK` squared keys is a single tile.
    """
    queries = arrays["query"].shape[-3]
    if rules.tile is not None:
        most = rules.tile[1]
    else:
        most = CHUNK * CHUNK // max(queries, 1) if isinstance(queries, int) else CHUNK
    return _over(tile, arrays, monoid, KEY_AXIS, arrays["key"].shape[-3], most)


def _over(tile: Tile, arrays: Arrays, monoid: Monoid, axes: dict[str, int], length: Dim, most: int) -> tuple[Any, Any]:
    """Makes chunks of equal size, `most` at most: 513 are two of 257 and not two of 512."""
    if not isinstance(length, int) or length <= most:
        state, out = tile(arrays, Chunk(0, length, length))
        return state, jax.tree.map(lambda x: x[None], out)
    count = -(-length // most)
    size = -(-length // count)
    cut = {name: axes[_kind(name)] for name, x in arrays.items() if is_cut(name, x, axes)}
    pieces = {name: _pieces(arrays[name], axis, count, size) for name, axis in cut.items()}
    whole = {name: x for name, x in arrays.items() if name not in cut}

    # The derivative recomputes a tile from its operands, and states enter only the merge: of sums, nothing is kept.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(first: jax.Array, piece: Arrays) -> tuple[Any, Any]:
        return tile(whole | piece, Chunk(first, size, length))

    def step(state: Any, at: tuple[jax.Array, Arrays]) -> tuple[Any, Any]:
        new, out = one(*at)
        return monoid.merge(state, new), out

    firsts = jnp.arange(count, dtype=jnp.int32) * size
    state, _ = jax.eval_shape(one, firsts[0], {name: x[0] for name, x in pieces.items()})
    return jax.lax.scan(step, varying_like(monoid.identity(state), arrays), (firsts, pieces))


def joined(stacked: jax.Array, axis: int, length: Dim) -> jax.Array:
    """Chunks stacked in front by a loop, as one array along `axis` (of a chunk, counted from the end)."""
    if stacked.shape[0] == 1:
        return stacked[0]
    at = stacked.ndim - 1 + axis
    x = jnp.moveaxis(stacked, 0, at)
    x = x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=at)


def is_cut(name: str, x: jax.Array, axes: dict[str, int]) -> bool:
    """Says whether an operand, or its gradient, comes in pieces along a length; else it belongs to every chunk."""
    return _kind(name) in axes and x.shape[axes[_kind(name)]] != 1


def _kind(name: str) -> str:
    """Returns the operand whose axes a tangent or cotangent shares."""
    return name.removeprefix("d_")


def _pieces(x: jax.Array, axis: int, count: int, size: int) -> jax.Array:
    """Cuts `[..., length, ...]` into `[count, ..., size, ...]`, with zeros at the end."""
    at = axis + x.ndim
    short = count * size - x.shape[at]
    if short:
        x = jnp.pad(x, [(0, short if d == at else 0) for d in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:at], count, size, *x.shape[at + 1 :]), at, 0)
