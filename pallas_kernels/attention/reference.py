"""Attention in plain `jax.numpy`: what platforms without kernels run, and the semantics that the kernels keep.

The online softmax over chunks of keys, for each chunk of queries: memory grows with the lengths, not with their
product. 16-bit floats are accumulated in float32, float32 in float32, float64 in float64. `backward` and `tangent`
start from the row's logsumexp, so that what they add up are plain sums: their own derivatives need no more memory.

A row without a key to see has output 0, logsumexp -inf, and no gradient.

Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691; the merge is Milakov & Gimelshein's, arXiv:1805.02867.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import tiles
from pallas_kernels.attention.problem import RANK, Operands, Rules, leading, sum_to
from pallas_kernels.attention.tiles import (
    Arrays,
    Chunk,
    broadcast_rows,
    by_head,
    by_key,
    by_rows,
    of_rows,
    scores,
    weighted,
)
from pallas_kernels.monoid import Stats, combine, decay, decay_to_finite, finite, log_normalizer, nan_or_infinite
from pallas_kernels.types import Dim, accumulator_dtype


def forward(operands: Operands, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Computes the output `[*batch, T, N, D]`, and the logsumexp of each row's logits, `[*batch, N, T]`."""
    length = operands.query.shape[-3]

    def rows_of(arrays: Arrays, rows: Chunk) -> tuple[None, Any]:
        def tile(arrays: Arrays, cols: Chunk) -> tuple[Any, None]:
            ops = _tile_operands(arrays, rows, cols)
            z = tiles.logits(ops, rules, rows, cols)
            whole = _is_whole_row(rules, cols)
            m, total, weights = _softmax_state(z) if whole else _state(z)
            if whole:
                # XLA computes a softmax in one pass over the logits, if nothing else reads its sums.
                p = _kept(ops, weights / _at_least_tiny(total)).astype(ops.value.dtype)
                alive = jnp.ones_like(total) if operands.sinks is None else (total != 0).astype(total.dtype)
                return (log_normalizer(Stats(m, total)), alive, weighted(p, ops.value, rules)), None
            o = weighted(_kept(ops, weights).astype(ops.value.dtype), ops.value, rules)
            return (m, total, o), None

        state, _ = tiles.over_keys(tile, arrays, rules, tiles.SOFTMAX)
        return None, _finish(state, operands, rows.size)

    _, (out, lse) = tiles.over_queries(rows_of, _arrays(operands), rules, tiles.SUM)
    return tiles.joined(out, -3, length), tiles.joined(lse, -1, length)


def _softmax_state(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the maximum of each row of a tile, the sum of its weights `exp(z - maximum)`, and the weights."""
    m = jax.lax.stop_gradient(z.max(-1, keepdims=True, initial=_lowest(z)))
    weights = decay_to_finite(z, m)
    return m, weights.sum(-1, keepdims=True), weights


def _state(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the state as `_softmax_state`; the maximum is NaN if any logit is, also where XLA takes it over devices."""
    m = jax.lax.stop_gradient(z.max(-1, keepdims=True, initial=_lowest(z)))
    weights = decay_to_finite(z, finite(m))
    return *nan_or_infinite(m, weights.sum(-1, keepdims=True)), weights


def _is_whole_row(rules: Rules, cols: Chunk) -> bool:
    """Says whether a tile on a GPU has all keys."""
    return rules.tile is not None and cols.size == cols.length


def _see_a_key(operands: Operands, rules: Rules, shape: tuple[int, ...]) -> jax.Array:
    """Says which queries see a key, of a shape like `[*batch, N, T]`."""
    unmasked = operands.present == ("query", "key", "value") and rules.window == (None, None) and not rules.align_ends
    if unmasked and (rules.causal_offset is None or rules.causal_offset >= 0):
        return jnp.ones(shape, bool)
    rows, cols = (Chunk(0, n, n) for n in (operands.query.shape[-3], operands.key.shape[-3]))
    seen = tiles.visible(operands, rules, rows, cols)
    return jnp.broadcast_to(True if seen is None else seen.any(-1), shape)


def _kept(ops: Operands, weights: jax.Array) -> jax.Array:
    """Clears a tile's weights, `[*batch, K, R, s]`, or their cotangents, where dropout drops them."""
    if ops.keep is None:
        return weights
    keep = broadcast_rows(ops.keep.astype(bool), _groups(ops), weights.shape[-2] // _groups(ops))
    return jnp.where(keep, weights, jnp.zeros((), weights.dtype))


def _at_least_tiny(total: jax.Array) -> jax.Array:
    """Returns the sum of a row's weights, or a tiny number where the sum is 0, as a divisor."""
    return jnp.maximum(total, jnp.finfo(total.dtype).tiny)


def _finish(state: tuple[jax.Array, ...], operands: Operands, length: Dim) -> tuple[jax.Array, jax.Array]:
    """Computes output and logsumexp from what the keys left; a sink is one more key, whose value is 0."""
    sees_none = state[1] == 0
    if operands.sinks is not None:
        sink = _sink_rows(operands, length)
        state = combine(state, (sink, jnp.ones_like(sink), jnp.zeros_like(sink)))
    m, total, o = state
    total = jnp.where(sees_none, jnp.ones_like(total), total)
    out = jnp.where(sees_none, jnp.zeros_like(o), o / total)
    lse = jnp.where(sees_none, jnp.full_like(total, -jnp.inf), log_normalizer(Stats(m, total)))
    lse = jnp.broadcast_to(lse, (*out.shape[:-1], 1))
    groups = _groups(operands)
    return of_rows(out, groups).astype(operands.query.dtype), by_head(lse, groups)[..., 0]


def backward(
    operands: Operands,
    rules: Rules,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    *,
    shapes: dict[str, tuple[int, ...]],
) -> tuple[jax.Array, ...]:
    """Computes the gradients of the operands that `shapes` names, each summed to the shape given there."""
    wide = accumulator_dtype(operands.query.dtype)
    # A cotangent may lack a mapped axis, along which operands that have it need a gradient for each index.
    leads = [leading(getattr(operands, name), name) for name in operands.present]
    full = jnp.broadcast_shapes(*leads, leading(d_out, "out"), leading(d_lse, "lse"))
    d_out, d_lse = (jnp.broadcast_to(x, (*full, *x.shape[-RANK[of] :])) for x, of in ((d_out, "out"), (d_lse, "lse")))
    whole_rows = rules.tile is not None and rules.tile[1] >= operands.key.shape[-3]
    by_row = whole_rows and operands.sinks is None and not rules.is_block
    alive = _see_a_key(operands, rules, lse.shape) if by_row and operands.bias is None else lse != -jnp.inf
    d_out = jnp.where(jnp.swapaxes(alive, -1, -2)[..., None], d_out, jnp.zeros((), d_out.dtype))
    # Delta is `rowsum(P * dP) - d_lse`. A tile that has all keys adds the sum itself, as XLA then fuses it.
    inner = 0.0 if by_row else jnp.swapaxes((out.astype(wide) * d_out.astype(wide)).sum(-1), -1, -2)
    delta = jnp.where(alive, inner - d_lse.astype(wide), 0)
    looped = tuple(name for name in shapes if name != "sinks")

    def rows_of(arrays: Arrays, rows: Chunk) -> tuple[Any, Any]:
        def tile(arrays: Arrays, cols: Chunk) -> tuple[Any, Any]:
            wanted = {name: shapes[name] for name in looped}
            gradients = _tile_gradients(arrays, rules, rows, cols, wanted, by_row=by_row)
            return _parted(gradients, operands, tiles.KEY_AXIS)

        added, stacked = tiles.over_keys(tile, arrays, rules, tiles.SUM)
        return _parted(added | stacked, operands, tiles.QUERY_AXIS)

    sums: Arrays = {}
    if looped:
        arrays = _arrays(operands) | dict(lse=lse, d_out=d_out, delta=delta)
        added, stacked = tiles.over_queries(rows_of, arrays, rules, tiles.SUM)
        sums = {name: _joined(name, x, operands) for name, x in (added | stacked).items()}
    if "sinks" in shapes:
        of_each = _sink_weights(operands, _by_row(lse, operands), lse.shape[-1]) * -_by_row(delta, operands)
        sums["sinks"] = sum_to(by_head(of_each, _groups(operands)).sum((-1, -2)), shapes["sinks"])
    return tuple(sums[name].astype(getattr(operands, name).dtype) for name in shapes)


def _tile_gradients(
    arrays: Arrays, rules: Rules, rows: Chunk, cols: Chunk, shapes: dict[str, tuple[int, ...]], *, by_row: bool
) -> Arrays:
    """Computes what a tile adds to the gradients, each with the leading extents and heads of its shape in `shapes`.

    `by_row`: the tile has all keys of its rows, so that their weights follow from the tile alone.

        dZ = P * (dP - delta)    with dP = dO V^T and delta = rowsum(P * dP) - d_lse
        dS = scale * slope * dZ, dQ = dS K, dK = dS^T Q, dV = P^T dO, dBias = dZ
    """
    ops = _tile_operands(arrays, rows, cols)
    groups, narrow = _groups(ops), ops.query.dtype
    products = scores(by_rows(ops.query, groups), ops.key, rules)
    # Each index of a leading axis along which only the cotangent differs has its own gradient.
    products = jnp.broadcast_to(products, (*arrays["d_out"].shape[:-3], *products.shape[-3:]))
    wanted = {name: getattr(ops, name) for name in tiles.IN_LOGITS if name in shapes}
    others = {name: jnp.broadcast_to(x, _led(x, name, shapes)).astype(products.dtype) for name, x in wanted.items()}
    logits = functools.partial(tiles.modified, ops=ops, rules=rules, rows=rows, cols=cols)
    z, pull = jax.vjp(logits, products, others)
    if by_row:
        # The logsumexp is not read: XLA then computes the forward pass' softmax in one pass over the logits.
        _, total, p = _softmax_state(z)
        p = p / _at_least_tiny(total)
    else:
        p = _weights(z, _by_row(arrays["lse"], ops))
    d_p = _kept(ops, scores(by_rows(arrays["d_out"], groups), ops.value, rules))
    delta = _by_row(arrays["delta"], ops)
    d_scores, gradients = pull(p * (d_p - ((p * d_p).sum(-1, keepdims=True) + delta if by_row else delta)))
    d_scores = d_scores.astype(narrow)
    if "query" in shapes:
        gradients["query"] = of_rows(weighted(d_scores, ops.key, rules), groups)
    if "key" in shapes:
        gradients["key"] = by_key(d_scores, ops.query, rules)
    if "value" in shapes:
        gradients["value"] = by_key(_kept(ops, p).astype(narrow), arrays["d_out"], rules)
    return {name: sum_to(x, _led(x, name, shapes)) for name, x in gradients.items()}


def _led(x: jax.Array, name: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns a tile's shape of an operand or gradient, with the leading extents of its shape in `shapes`."""
    lead = x.ndim - RANK[name]
    return (*shapes[name][:lead], *x.shape[lead:])


def tangent(
    operands: Operands, rules: Rules, out: jax.Array, lse: jax.Array, tangents: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Computes the tangents of output and logsumexp for tangents of some operands, by their names.

    They are `d_lse = rowsum(P * dZ)` and `dO = (P * dZ) V + P dV - O * d_lse`.
    """
    length = operands.query.shape[-3]
    groups = _groups(operands)
    d_operands = {f"d_{name}": t for name, t in tangents.items()}

    def rows_of(arrays: Arrays, rows: Chunk) -> tuple[None, Any]:
        def tile(arrays: Arrays, cols: Chunk) -> tuple[Any, None]:
            return _tile_tangents(arrays, rules, rows, cols), None

        (d_lse, d_sum), _ = tiles.over_keys(tile, arrays, rules, tiles.SUM)
        lse, out = _by_row(arrays["lse"], operands), by_rows(arrays["out"].astype(d_sum.dtype), groups)
        if "sinks" in tangents:
            d_sinks = _sink_rows(operands._replace(sinks=tangents["sinks"]), rows.size)
            d_lse = d_lse + _sink_weights(operands, lse, rows.size) * d_sinks
        d_out = d_sum - out * d_lse
        shape = jnp.broadcast_shapes(d_lse.shape, (*d_sum.shape[:-1], 1))
        return None, (of_rows(d_out, groups), by_head(jnp.broadcast_to(d_lse, shape), groups)[..., 0])

    arrays = _arrays(operands) | dict(out=out, lse=lse) | d_operands
    _, (d_out, d_lse) = tiles.over_queries(rows_of, arrays, rules, tiles.SUM)
    return tiles.joined(d_out, -3, length).astype(out.dtype), tiles.joined(d_lse, -1, length).astype(lse.dtype)


def _tile_tangents(arrays: Arrays, rules: Rules, rows: Chunk, cols: Chunk) -> tuple[jax.Array, jax.Array]:
    """Computes `sum(P dZ)` and `sum(P dZ V + P dV)` over a tile's keys, `dZ = scale * slope * (dQ K + Q dK) + dB`."""
    ops = _tile_operands(arrays, rows, cols)
    groups, narrow = _groups(ops), ops.value.dtype
    products, moved = scores(by_rows(ops.query, groups), ops.key, rules), _moved(arrays, ops, rows, cols)
    d_products = jnp.zeros_like(products)
    if "query" in moved:
        d_products = d_products + scores(by_rows(moved["query"], groups), ops.key, rules)
    if "key" in moved:
        d_products = d_products + scores(by_rows(ops.query, groups), moved["key"], rules)
    products = jnp.broadcast_to(products, d_products.shape)
    others, of_others = {}, {}
    for name in filter(moved.__contains__, tiles.IN_LOGITS):
        # Either of an operand and its tangent may lack a mapped axis.
        pair = (x.astype(products.dtype) for x in (getattr(ops, name), moved[name]))
        others[name], of_others[name] = jnp.broadcast_arrays(*pair)
    logits = functools.partial(tiles.modified, ops=ops, rules=rules, rows=rows, cols=cols)
    z, d_z = jax.jvp(logits, (products, others), (d_products, of_others))
    p = _weights(z, _by_row(arrays["lse"], ops))
    of_each = p * d_z
    d_sum = weighted(_kept(ops, of_each).astype(narrow), ops.value, rules)
    if "value" in moved:
        d_sum = d_sum + weighted(_kept(ops, p).astype(narrow), moved["value"], rules)
    return of_each.sum(-1, keepdims=True), d_sum


def weights(operands: Operands, rules: Rules, lse: jax.Array) -> jax.Array:
    """Computes the attention weights themselves, `[*batch, N, T, S]` in the dtype of accumulation."""
    ops, rows, cols = _whole(operands)
    z = tiles.logits(ops, rules, rows, cols)
    return by_head(_weights(z, _by_row(lse, ops)), _groups(ops))


def _whole(operands: Operands) -> tuple[Operands, Chunk, Chunk]:
    """Returns the operands of the one tile that has all queries and keys."""
    rows, cols = (Chunk(0, n, n) for n in (operands.query.shape[-3], operands.key.shape[-3]))
    return _tile_operands(_arrays(operands), rows, cols), rows, cols


def _arrays(operands: Operands) -> Arrays:
    return {name: getattr(operands, name) for name in operands.present if name != "sinks"}


def _tile_operands(arrays: Arrays, rows: Chunk, cols: Chunk) -> Operands:
    ops = Operands(**{name: x for name, x in arrays.items() if name in Operands._fields})
    return ops._replace(
        query=tiles.without_padding(ops.query, ops.query_lengths, rows),
        key=tiles.without_padding(ops.key, ops.key_lengths, cols),
        value=tiles.without_padding(ops.value, ops.key_lengths, cols),
    )


def _moved(arrays: Arrays, ops: Operands, rows: Chunk, cols: Chunk) -> Arrays:
    """Names a tile's tangents by operand; padding has tangents of 0, as whatever is there does not count."""
    moved = {name.removeprefix("d_"): x for name, x in arrays.items() if name.startswith("d_")}
    if "query" in moved:
        moved["query"] = tiles.without_padding(moved["query"], ops.query_lengths, rows)
    for name in {"key", "value"} & set(moved):
        moved[name] = tiles.without_padding(moved[name], ops.key_lengths, cols)
    return moved


def _parted(gradients: Arrays, operands: Operands, axes: dict[str, int]) -> tuple[Arrays, Arrays]:
    """Parts the gradients that every chunk adds to from those of which each chunk has a piece."""
    pieces = {name: x for name, x in gradients.items() if tiles.is_cut(name, getattr(operands, name), axes)}
    return {name: x for name, x in gradients.items() if name not in pieces}, pieces


def _joined(name: str, gradient: jax.Array, operands: Operands) -> jax.Array:
    """Joins the pieces of a gradient that the loops left, in which the queries' axis is in front of the keys'."""
    x = getattr(operands, name)
    by_queries, by_keys = (tiles.is_cut(name, x, axes) for axes in (tiles.QUERY_AXIS, tiles.KEY_AXIS))
    if by_keys:
        axis = tiles.KEY_AXIS[name]
        gradient = tiles.joined(jnp.moveaxis(gradient, int(by_queries), 0), axis, x.shape[axis])
    if by_queries:
        axis = tiles.QUERY_AXIS[name]
        gradient = tiles.joined(gradient, axis, x.shape[axis])
    return gradient


def _groups(operands: Operands) -> int:
    """Says how many query heads read a key head."""
    return operands.query.shape[-2] // operands.key.shape[-2]


def _by_row(x: jax.Array, operands: Operands) -> jax.Array:
    """Brings `[*batch, N, t]` into the form `[*batch, K, R, 1]`."""
    return broadcast_rows(x[..., None], _groups(operands), x.shape[-1])


def _lowest(z: jax.Array) -> np.floating:
    """Gives the least finite number: the maximum of a row that sees no key, against which its weights are 0."""
    return jnp.finfo(z.dtype).min


def _weights(z: jax.Array, lse: jax.Array) -> jax.Array:
    """Computes a tile's probabilities; 0 in a row that sees no key."""
    return decay_to_finite(z, jnp.maximum(lse, _lowest(z)))


def _sink_rows(operands: Operands, length: Dim) -> jax.Array:
    """Spreads the sinks as logits of a chunk's rows, `[*batch, K, R, 1]`."""
    wide = accumulator_dtype(operands.query.dtype)
    return broadcast_rows(operands.sinks.astype(wide)[..., None, None], _groups(operands), length)


def _sink_weights(operands: Operands, lse: jax.Array, length: Dim) -> jax.Array:
    """Computes the sinks' probabilities, `[*batch, K, R, 1]`; 0 in a row that sees no key."""
    return jnp.where(lse == -jnp.inf, jnp.zeros((), lse.dtype), decay(_sink_rows(operands, length), lse))
