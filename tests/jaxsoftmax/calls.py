"""Every public function with its options and operands, for tests that all functions take part in."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax

RNG = np.random.default_rng(0)
Operands = dict[str, jax.Array]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, ROW, MASK, CT = normal(8, 4, 16), normal(8, 4), normal(8, 1, 16) > -1, normal(8, 4, 16)
LABELS = jnp.asarray(RNG.integers(0, 16, (8, 4)), jnp.int32)
QKV = {"query": normal(8, 6, 4, 8), "key": normal(8, 6, 2, 8), "value": normal(8, 6, 2, 8)}
LENGTHS = jnp.arange(8, dtype=jnp.int32) % 6
SEGMENTS = jnp.asarray(np.sort(RNG.integers(0, 2, (8, 6))), jnp.int32)
MORE = {"bias": normal(8, 4, 6, 6), "sinks": normal(4), "key_value_seq_lengths": LENGTHS}
WEIGHT = normal(16, 16)
LINEAR = {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 5.0, "chunk_size": 12}

cross_entropy = jaxsoftmax.softmax_cross_entropy_with_integer_labels
attention = functools.partial(jaxsoftmax.flash_attention, is_causal=True)
dropout = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}

CALLS: dict[str, tuple[Callable[..., Any], Operands]] = {
    "softmax": (jaxsoftmax.softmax, {"x": X, "where": MASK}),
    "log_softmax": (functools.partial(jaxsoftmax.log_softmax, scale=0.5), {"x": X}),
    "logsumexp": (functools.partial(jaxsoftmax.logsumexp, axis=-1), {"a": X, "where": MASK}),
    "cross_entropy": (
        functools.partial(cross_entropy, return_lse=True, ignore_index=3, label_smoothing=0.1),
        {"logits": X, "labels": LABELS, "where": MASK},
    ),
    "loss": (functools.partial(cross_entropy, label_smoothing=0.3, z_loss=0.1), {"logits": X, "labels": LABELS}),
    "masked loss": (
        functools.partial(cross_entropy, label_smoothing=0.3),
        {"logits": X, "labels": LABELS, "where": MASK},
    ),
    "weighted": (
        functools.partial(cross_entropy, z_loss=0.1, logits_soft_cap=5.0, scale=0.5),
        {"logits": X, "labels": LABELS, "weights": ROW},
    ),
    "probabilities": (jaxsoftmax.softmax_cross_entropy, {"logits": X, "labels": normal(8, 4, 16)}),
    "linear": (
        functools.partial(jaxsoftmax.linear_cross_entropy, return_lse=True, return_entropy=True, **LINEAR),
        {"hidden": X, "weight": WEIGHT, "labels": LABELS, "bias": WEIGHT[0], "where": MASK},
    ),
    "weighted linear": (
        functools.partial(jaxsoftmax.linear_cross_entropy, ignore_index=3, weight_layout="VE", chunk_size=8),
        {"hidden": X, "weight": WEIGHT.T, "labels": LABELS, "weights": ROW, "scale": ROW[..., None]},
    ),
    "top_k": (lambda logits: jaxsoftmax.top_k_softmax(logits, 3)[0], {"logits": X}),
    "attention": (attention, QKV),
    "more attention": (functools.partial(attention, return_residual=True), QKV | MORE),
    "dropout": (functools.partial(jaxsoftmax.flash_attention, **dropout), QKV),
}
# Operands of other shapes, and options that the others leave out.
MORE_CALLS: dict[str, tuple[Callable[..., Any], Operands]] = {
    "softmax of rows scaled": (functools.partial(jaxsoftmax.softmax, axis=(0, 2)), {"x": X, "scale": X[0, 0]}),
    "capped by an array": (cross_entropy, {"logits": X, "labels": LABELS, "logits_soft_cap": jnp.float32(5)}),
    "logsumexp with weights": (lambda a, b: jaxsoftmax.logsumexp(a, -1, jnp.exp(b)), {"a": X, "b": X[0, 0]}),
    "router": (
        lambda logits: jaxsoftmax.top_k_softmax(logits, 3, axis=1, normalize="top_k", scale=2.0)[0],
        {"logits": X},
    ),
    "window": (functools.partial(attention, local_window_size=2, logits_soft_cap=5.0), QKV),
    "from the end": (
        functools.partial(attention, causal_alignment="bottom_right"),
        QKV | {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": LENGTHS},
    ),
    "pages": (
        jaxsoftmax.paged_attention,
        {"query": QKV["query"], "key_pages": normal(2, 9, 8, 8), "value_pages": normal(2, 9, 8, 8)}
        | {"block_tables": jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 9, "lengths": 2 * LENGTHS},
    ),
    "merged": (
        lambda out, other, lse, part: jaxsoftmax.merge_attention([out, other], [lse, part])[0],
        {"out": QKV["query"], "other": normal(8, 6, 4, 8), "lse": normal(8, 6, 4), "part": normal(8, 6, 4)},
    ),
    "scaled heads": (jaxsoftmax.flash_attention, QKV | {"scale": X[0, 0, :8]}),
    "positions": (
        functools.partial(attention, local_window_size=(3, 1)),
        QKV
        | {
            "query_positions": LENGTHS[:6] + 1,
            "key_value_positions": jnp.arange(48, dtype=jnp.int32).reshape(8, 6) % 7,
        },
    ),
    "segments": (jaxsoftmax.flash_attention, QKV | {"mask": MASK[:, :, None, :6], "query_segment_ids": SEGMENTS}),
}
# Operands that broadcast, and numbers that are data: for tests of shardings.
COLUMN, LINE = ROW[:, :1], ROW[:1]
NUMBERS = {"label_smoothing": jnp.float32(0.2), "z_loss": jnp.float32(0.1), "logits_soft_cap": jnp.float32(1.5)}
SHARED_CALLS: dict[str, tuple[Callable[..., Any], Operands]] = {
    "states": (
        lambda a, b, c, d: jaxsoftmax.merge(*(jaxsoftmax.Stats(x, jnp.exp(y)) for x, y in ((a, b), (c, d)))),
        {"a": ROW, "b": ROW + 1, "c": COLUMN, "d": LINE},
    ),
    "few labels": (
        functools.partial(cross_entropy, ignore_index=3),
        {"logits": X, "labels": LABELS[:, :1], "weights": LINE, "where": MASK, "scale": X[:, :, :1]},
    ),
    "mean": (
        functools.partial(cross_entropy, reduction="mean"),
        {"logits": X, "labels": LABELS, "weights": LINE, "where": MASK},
    ),
    "few tokens": (
        functools.partial(jaxsoftmax.linear_cross_entropy, logits_soft_cap=4.0, chunk_size=16),
        {"hidden": X, "weight": WEIGHT, "labels": LABELS, "weights": COLUMN, "where": MASK[:, :, :1]},
    ),
    "numbers": (cross_entropy, {"logits": X, "labels": LABELS} | NUMBERS),
    "numbers of tokens": (jaxsoftmax.linear_cross_entropy, {"hidden": X, "weight": WEIGHT, "labels": LABELS} | NUMBERS),
    "capped attention": (attention, QKV | {"logits_soft_cap": jnp.float32(1.3)}),
    "shared bias": (attention, QKV | {"bias": normal(1, 1, 6, 6), "sinks": normal(4)}),
    "zigzag": (lambda x: jaxsoftmax.unzigzag(jaxsoftmax.zigzag(x, 4), 4), {"x": X}),
}


def of_floats(name: str) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """A call as a function of those operands that may be differentiated, and these."""
    call, operands = (CALLS | MORE_CALLS)[name]
    moving = {n: x for n, x in operands.items() if x.dtype == jnp.float32}
    return lambda *xs: call(**operands | dict(zip(moving, xs, strict=True))), tuple(moving.values())
