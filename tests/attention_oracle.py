"""The truth about attention: NumPy in float64, the whole matrix of weights at once, no JAX and no cleverness.

`query [B, T, N, H]`, `key [B, S, K, H]`, `value [B, S, K, D]`; the other arguments as `jaxsoftmax.flash_attention`
describes them. Keys are repeated for the query heads that share them, and everything is broadcast.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
product = functools.partial(np.einsum, optimize=True)  # by BLAS: at 1500 tokens a fifth of the time


class Forward(NamedTuple):
    """Output `[B, T, N, D]`, logsumexp `[B, N, T]`, weights `[B, N, T, S]`."""

    out: Array
    lse: Array
    weights: Array


def visible(
    shape: tuple[int, int, int, int],
    *,
    mask: Any = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    local_window_size: tuple[int | None, int | None] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
) -> NDArray[np.bool_]:
    """Which query sees which key, `[B, N, T, S]`."""
    seen = np.ones(shape, bool)
    _, _, length, keys = shape
    i, j = np.arange(length)[:, None], np.arange(keys)[None, :]
    diagonal = i
    if causal_alignment == "bottom_right":
        ends = keys if key_value_seq_lengths is None else np.asarray(key_value_seq_lengths)[:, None, None, None]
        starts = length if query_seq_lengths is None else np.asarray(query_seq_lengths)[:, None, None, None]
        diagonal = i + np.minimum(ends, keys) - np.minimum(starts, length)
    if mask is not None:
        seen &= np.asarray(mask) != 0
    if is_causal:
        seen &= j <= diagonal
    if local_window_size is not None:
        left, right = local_window_size
        seen &= (left is None) | (j >= diagonal - (left or 0))
        seen &= (right is None) | (j <= diagonal + (right or 0))
    if query_seq_lengths is not None:
        seen &= i < np.asarray(query_seq_lengths)[:, None, None, None]
    if key_value_seq_lengths is not None:
        seen &= j < np.asarray(key_value_seq_lengths)[:, None, None, None]
    if query_segment_ids is not None:
        seen &= (np.asarray(query_segment_ids)[:, :, None] == np.asarray(key_value_segment_ids)[:, None, :])[:, None]
    return seen


def forward(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    **rules: Any,
) -> Forward:
    """Softmax of the visible logits, times the values; a row that sees nothing gives 0 and -inf."""
    return _forward(*_inputs(query, key, value, bias, sinks, rules), scale, logits_soft_cap, rules)[0]


def gradients(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    *,
    d_out: Any,
    d_lse: Any = 0.0,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    **rules: Any,
) -> dict[str, Array]:
    """The gradients of `sum(out * d_out) + sum(lse * d_lse)`, over the rows that see something."""
    q, k, v, b, sink = _inputs(query, key, value, bias, sinks, rules)
    found, bent = _forward(q, k, v, b, sink, scale, logits_soft_cap, rules)
    group = q.shape[2] // k.shape[2]
    alive = found.lse > -np.inf
    d_out = np.where(np.swapaxes(alive, 1, 2)[..., None], np.asarray(d_out, np.float64), 0.0)
    d_lse = np.where(alive, np.asarray(d_lse, np.float64), 0.0)
    pull = np.einsum("btnd,btnd->bnt", d_out, found.out) - d_lse
    d_z = found.weights * (product("btnd,bsnd->bnts", d_out, _repeat(v, group)) - pull[..., None])
    slope = 1.0 if logits_soft_cap is None else 1 - (bent / logits_soft_cap) ** 2
    d_scores = d_z * slope * (q.shape[-1] ** -0.5 if scale is None else scale)
    result = {
        "query": product("bnts,bsnh->btnh", d_scores, _repeat(k, group)),
        "key": _unrepeat(product("bnts,btnh->bsnh", d_scores, q), group),
        "value": _unrepeat(product("bnts,btnd->bsnd", found.weights, d_out), group),
    }
    if b is not None:
        axes = tuple(d for d in range(4) if b.shape[d] == 1 and d_z.shape[d] != 1)
        result["bias"] = d_z.sum(axes, keepdims=True)
    if sink is not None:
        weight = np.where(alive, np.exp(sink[None, :, None] - np.where(alive, found.lse, 0.0)), 0.0)
        result["sinks"] = -(weight * pull).sum((0, 2))
    return result


def gradient_terms(query: Any, key: Any, value: Any, *, d_out: Any, **rules: Any) -> dict[str, Array]:
    """The size of what the gradients of `gradients` are sums and differences of."""
    q, k, v, _, _ = _inputs(query, key, value, None, None, rules)
    found, _ = _forward(q, k, v, None, None, None, None, rules)
    group, d_out = q.shape[2] // k.shape[2], np.abs(np.asarray(d_out, np.float64))
    pull = np.einsum("btnd,btnd->bnt", d_out, np.abs(found.out))
    d_z = found.weights * (product("btnd,bsnd->bnts", d_out, np.abs(_repeat(v, group))) + pull[..., None])
    d_scores = d_z * q.shape[-1] ** -0.5
    return {
        "query": product("bnts,bsnh->btnh", d_scores, np.abs(_repeat(k, group))),
        "key": _unrepeat(product("bnts,btnh->bsnh", d_scores, np.abs(q)), group),
        "value": _unrepeat(product("bnts,btnd->bsnd", found.weights, d_out), group),
    }


def _inputs(query: Any, key: Any, value: Any, bias: Any, sinks: Any, rules: dict[str, Any]) -> list[Any]:
    """Everything widened, and zeros for what lies beyond the lengths."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    for lengths, arrays in (("query_seq_lengths", (q,)), ("key_value_seq_lengths", (k, v))):
        if rules.get(lengths) is not None:
            for x in arrays:
                x[np.arange(x.shape[1])[None, :] >= np.asarray(rules[lengths])[:, None]] = 0.0
    return [q, k, v, *(None if x is None else np.asarray(x).astype(np.float64) for x in (bias, sinks))]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sinks: Array | None,
    scale: float | None,
    cap: float | None,
    rules: dict[str, Any],
) -> tuple[Forward, Array]:
    group = q.shape[2] // k.shape[2]
    scores = product("btnh,bsnh->bnts", q, _repeat(k, group)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    bent = scores if cap is None else cap * np.tanh(scores / cap)
    seen = visible(bent.shape, **rules)
    z = np.where(seen, bent if bias is None else bent + bias, -np.inf)
    top = z.max(-1, keepdims=True, initial=-np.inf)
    alive = top > -np.inf
    if sinks is not None:
        top = np.maximum(top, sinks[None, :, None, None])
    with np.errstate(under="ignore"):
        weights = np.exp(z - np.where(alive, top, 0.0))
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[None, :, None, None] - top)
    weights = np.where(alive, weights, 0.0) / np.where(alive, total, 1.0)
    lse = np.where(alive, np.where(alive, top, 0.0) + np.log(np.where(alive, total, 1.0)), -np.inf)[..., 0]
    return Forward(product("bnts,bsnd->btnd", weights, _repeat(v, group)), lse, weights), bent


def _repeat(x: Array, group: int) -> Array:
    return np.repeat(x, group, axis=2)


def _unrepeat(x: Array, group: int) -> Array:
    batch, keys, heads, dim = x.shape
    return x.reshape(batch, keys, heads // group, group, dim).sum(3)
