"""The functions of `jaxsoftmax` as `jax.nn` has them, or as programs write them around it.

Options that `jax.nn` lacks are written in the way that XLA fuses best. Losses are in the logits' dtype.
"""

import functools
import importlib
import types
from typing import Any

import jax
import jax.numpy as jnp

import jaxsoftmax


class Declined(Exception):
    """An implementation that does not take a case; the message is the reason."""


class NotInstalled(Exception):
    """An implementation is missing on this machine."""


def load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalled(str(error)) from error


class Some(types.SimpleNamespace):
    """A library that has some of the functions, and declines the others."""

    def __getattr__(self, name: str) -> Any:
        raise Declined(f"it has no {name}")


def xla_loss(
    x: jax.Array,
    y: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
    reduction: str = "none",
) -> jax.Array:
    """In the logits' dtype, as `optax` has it; with what it has no option for written around it, in float32."""
    if logits_soft_cap is not None:
        x = logits_soft_cap * jnp.tanh(x.astype(jnp.float32) / logits_soft_cap)
    ignored = None if ignore_index is None else y == ignore_index
    column = y if ignored is None else jnp.where(ignored, 0, y)
    lse = jax.nn.logsumexp(x, axis=-1)
    loss = lse - jnp.take_along_axis(x, column[..., None], -1)[..., 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - x.mean(-1))
    if z_loss:
        loss += z_loss * lse**2
    loss = loss if ignored is None else jnp.where(ignored, 0, loss)
    if reduction == "none":
        return loss
    return loss.astype(jnp.float32).sum() / (loss.size if ignored is None else (~ignored).sum())


def _scaled(function: Any) -> Any:
    def call(x: jax.Array, axis: int = -1, where: jax.Array | None = None, scale: float = 1.0) -> jax.Array:
        return function(x if scale == 1 else x * scale, axis, where=where)

    return call


def _top_k(x: jax.Array, k: int, normalize: str = "all") -> tuple[jax.Array, jax.Array]:
    largest, indices = jax.lax.top_k(jax.nn.softmax(x) if normalize == "all" else x, k)
    return (largest if normalize == "all" else jax.nn.softmax(largest)), indices


def _top_k_by_logits(x: jax.Array, k: int, normalize: str = "all") -> tuple[jax.Array, jax.Array]:
    """In the order of the logits, where two of one probability are unlike."""
    largest, indices = jax.lax.top_k(x, k)
    lse = jax.nn.logsumexp(x if normalize == "all" else largest, -1, keepdims=True)
    return jnp.exp(largest - lse), indices


def _soft_loss(x: jax.Array, labels: jax.Array) -> jax.Array:
    return -(labels * jax.nn.log_softmax(x)).sum(-1)


def _linear_loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
    return xla_loss(jnp.dot(hidden, weight, preferred_element_type=jnp.float32), labels, **options)


def _attention(
    implementation: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    key_value_seq_lengths: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    if query_segment_ids is not None:
        options["mask"] = query_segment_ids[:, None, :, None] == query_segment_ids[:, None, None, :]
    if dropout_rng is not None:
        if implementation == "cudnn":
            raise NotImplementedError("jax.nn has no dropout")
        return _dropping(query, key, value, dropout_rate, dropout_rng, **options)
    if key_value_seq_lengths is not None:
        whole = jnp.full(query.shape[0], query.shape[1], jnp.int32)
        options |= {"query_seq_lengths": whole, "key_value_seq_lengths": key_value_seq_lengths}
    return jax.nn.dot_product_attention(query, key, value, implementation=implementation, **options)


def _dropping(
    query: jax.Array, key: jax.Array, value: jax.Array, rate: float, rng: jax.Array, is_causal: bool = False
) -> jax.Array:
    """As Flax's attention has it: all heads of all sequences drop the same pairs."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query / jnp.sqrt(query.shape[-1]).astype(query.dtype), key)
    if is_causal:
        logits = jnp.where(jnp.tri(*logits.shape[-2:], dtype=bool), logits, jnp.finfo(logits.dtype).min)
    weights = jax.nn.softmax(logits)
    kept = jax.random.bernoulli(rng, 1 - rate, (1, 1, *weights.shape[-2:]))
    return jnp.einsum("bnts,bsnd->btnd", weights * (kept.astype(weights.dtype) / (1 - rate)), value)


def _paged(
    implementation: Any, query: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, lengths: jax.Array
) -> jax.Array:
    """The pages of each sequence in order, and then attention to them."""
    gathered = (jnp.moveaxis(x[:, tables], 0, 3).reshape(len(tables), -1, len(x), x.shape[-1]) for x in (keys, values))
    return _attention(implementation, query[:, None], *gathered, key_value_seq_lengths=lengths)[:, 0]


def _of_attention(implementation: str) -> dict[str, Any]:
    return {
        "flash_attention": functools.partial(_attention, implementation),
        "paged_attention": functools.partial(_paged, implementation),
    }


STOCK = types.SimpleNamespace(
    softmax=_scaled(jax.nn.softmax),
    log_softmax=_scaled(jax.nn.log_softmax),
    logsumexp=jax.nn.logsumexp,
    top_k_softmax=_top_k,
    softmax_cross_entropy=_soft_loss,
    softmax_cross_entropy_with_integer_labels=xla_loss,
    linear_cross_entropy=_linear_loss,
    **_of_attention("xla"),
)
TRUTH = types.SimpleNamespace(**{**vars(STOCK), "top_k_softmax": _top_k_by_logits})  # of float32


def _by(implementation: str) -> types.SimpleNamespace:
    """The functions of `jaxsoftmax`, by XLA or by a kernel."""
    named = {name: functools.partial(getattr(jaxsoftmax, name), implementation=implementation) for name in vars(STOCK)}
    return types.SimpleNamespace(**named)


LIBRARIES = {
    "ours": jaxsoftmax,
    "ours_xla": _by("xla"),
    "ours_kernel": _by("mosaic_gpu"),
    "xla": STOCK,
    # Logits are cast to float32 where a loss in 16 bits will not do; the loss is then as accurate as ours.
    "xla_f32": Some(
        softmax_cross_entropy_with_integer_labels=lambda x, y, **options: xla_loss(x.astype(jnp.float32), y, **options)
    ),
    "cudnn": Some(**_of_attention("cudnn")),
    "truth": TRUTH,
}
