"""Attention with its weights in memory, for what needs them: dropout, and showing them to a Flax module."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._attention.checks import Dropout
from jaxsoftmax._attention.primitives import attend as flash
from jaxsoftmax._attention.sharding import agreed
from pallas_kernels.attention import reference
from pallas_kernels.attention.operands import Operands, Rules


def attend(
    operands: Operands, rules: Rules, dropout: Dropout | None, module: Any, sown_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp as the primitive gives them, but for dropout; the same random numbers as Flax's.

    Weights are sown in the dtype `sown_dtype`.
    """
    names = operands.present
    whole = agreed(names, [getattr(operands, name) for name in names], in_parts=False)
    operands = operands._replace(**dict(zip(names, whole, strict=True)))
    _, lse = flash(operands, rules, "xla")
    weights = reference.weights(operands, rules, lse)
    if module is not None:
        # Both of Flax's module systems know this collection; nnx's type for it has the same name.
        module.sow("intermediates", "attention_weights", weights.astype(sown_dtype))
    if dropout is not None:
        keep = 1.0 - dropout.rate
        shape = (1,) * (weights.ndim - 2) + weights.shape[-2:] if dropout.broadcast else weights.shape
        weights = jnp.where(jax.random.bernoulli(dropout.rng, keep, shape), weights / keep, 0.0)
    return reference.weigh(weights, operands, rules), lse
