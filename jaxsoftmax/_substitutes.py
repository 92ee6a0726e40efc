"""What stands in for which function of JAX, optax and Flax under a patch, called as these are."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._attention import api as attention_api
from jaxsoftmax._cross_entropy import api as cross_entropy_api
from jaxsoftmax._softmax import api as row_api

ArrayLike = jax.typing.ArrayLike
Function = Callable[..., Any]

# The parameters of `flax.linen.dot_product_attention`, which may be passed by position.
_LINEN = (
    *("query", "key", "value", "bias", "mask", "broadcast_dropout", "dropout_rng", "dropout_rate", "deterministic"),
    *("dtype", "precision", "module", "force_fp32_for_softmax", "einsum_dot_general"),
    *("qk_attn_weights_einsum", "attn_weights_value_einsum"),
)


def _dot_product_attention(
    *args: Any, implementation: str | None = None, return_residual: bool = False, **kwargs: Any
) -> Any:
    """`jax.nn.dot_product_attention`, whose residual has the output's dtype and no derivative."""
    implementation = None if implementation == "cudnn" else implementation
    kwargs |= {"implementation": implementation, "return_residual": return_residual}
    found = attention_api.flash_attention(*args, **kwargs)
    if not return_residual:
        return found
    out, lse = found
    return out, jax.lax.stop_gradient(lse.astype(out.dtype))


def _linen_attention(*args: Any, **kwargs: Any) -> jax.Array:
    """`flax.linen.dot_product_attention`, whose output is as wide as its softmax is forced to be."""
    given = dict(zip(_LINEN[: len(args)], args, strict=True)) | kwargs
    out = attention_api.flash_attention(**{name: x for name, x in given.items() if x is not None})
    return out.astype(jnp.promote_types(out.dtype, jnp.float32)) if given.get("force_fp32_for_softmax") else out


def _softmax_cross_entropy(
    logits: ArrayLike, labels: ArrayLike, axis: int | Sequence[int] | None = -1, where: ArrayLike | None = None
) -> jax.Array:
    """`optax.softmax_cross_entropy`, in the dtype of logits and labels."""
    loss = cross_entropy_api.softmax_cross_entropy(logits, labels, axis, where)
    return loss.astype(jnp.result_type(logits, labels))


def _integer_labels(
    logits: ArrayLike, labels: ArrayLike, axis: int | Sequence[int] = -1, where: ArrayLike | None = None
) -> jax.Array:
    """`optax.softmax_cross_entropy_with_integer_labels`, in the logits' dtype; negative labels count from the end."""
    x, y = jnp.asarray(logits), jnp.asarray(labels)
    if jnp.issubdtype(y.dtype, jnp.signedinteger):
        y = y.astype(jnp.promote_types(y.dtype, jnp.int32))
        y = jnp.where(y < 0, y + math.prod(x.shape[a] for a in ([axis] if isinstance(axis, int) else axis)), y)
    return cross_entropy_api.softmax_cross_entropy_with_integer_labels(x, y, axis, where).astype(x.dtype)


OF_JAX: dict[str, Function] = {
    "jax.nn.softmax": row_api.softmax,
    "jax.nn.log_softmax": row_api.log_softmax,
    "jax.nn.logsumexp": row_api.logsumexp,
    "jax.nn.dot_product_attention": _dot_product_attention,
    "jax.scipy.special.logsumexp": row_api.logsumexp,
}
# By the module that has them first.
OF_LIBRARIES: dict[str, dict[str, Function]] = {
    "optax.losses": {
        "optax.softmax_cross_entropy": _softmax_cross_entropy,
        "optax.softmax_cross_entropy_with_integer_labels": _integer_labels,
    },
    "flax.linen.attention": {"flax.linen.dot_product_attention": _linen_attention},
}
NAMES = (*OF_JAX, *(name for functions in OF_LIBRARIES.values() for name in functions))

# Modules that hold functions of JAX as attributes, and where these come from.
HOLDERS = {"jax.nn": "jax.nn", "jax.scipy.special": "jax.scipy.special"} | dict.fromkeys(
    ("flax.core.nn", "flax.linen", "flax.linen.activation", "flax.nnx", "flax.nnx.nn.activations"), "jax.nn"
)
