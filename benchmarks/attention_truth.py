"""The gate before every time of attention: one key head of the last sequence, with its query heads, against float32.

The rule is FlashAttention's: the error is at most twice that of XLA in 16 bits, plus half a unit of bfloat16. Errors
are root mean squares over the slice, relative to the truth's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention_cases import Shape
from benchmarks.attention_rules import NAMES, Verdict, worst


def truth(
    shape: Shape, operands: Mapping[str, jax.Array], *, gradients: bool
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """For each output, the slice of it in float32 and by XLA in the operands' dtype."""
    d_out = _slice("out", shape, operands["d_out"])
    found = [_computed(shape, operands, d_out, dtype, gradients) for dtype in (jnp.float32, operands["query"].dtype)]
    return {name: (found[0][name], found[1][name]) for name in found[0]}


@jax.jit(static_argnames="shape")
def _errors(shape: Shape, got: Mapping[str, jax.Array], truths: Mapping[str, tuple[jax.Array, jax.Array]]) -> Any:
    size = lambda x: jnp.sqrt((x.astype(jnp.float32) ** 2).mean())

    def pair(name: str) -> jax.Array:
        want, xla = truths[name]
        mine = _slice(name, shape, got[name]).astype(jnp.float32)
        return jnp.stack([size(mine - want), size(xla.astype(jnp.float32) - want)]) / size(want)

    return {name: pair(name) for name in got}


def judge(shape: Shape, got: Sequence[jax.Array], truths: Mapping[str, tuple[jax.Array, jax.Array]]) -> Verdict:
    """Compares a program's outputs with the truth."""
    names = NAMES[len(got)]
    errors = jax.device_get(_errors(shape, dict(zip(names, got, strict=True)), {name: truths[name] for name in names}))
    return worst(Verdict(name, float(error), float(xla)) for name, (error, xla) in errors.items())


def _slice(name: str, shape: Shape, x: jax.Array) -> jax.Array:
    """The last sequence, its last key head or the query heads that share it; `[length, heads, dim]`."""
    heads = 1 if name in ("key", "value", "d_key", "d_value") else shape.heads // shape.key_heads
    return x[-1, :, -heads:]


def _computed(shape: Shape, operands: Mapping[str, jax.Array], d_out: jax.Array, dtype: Any, gradients: bool) -> Any:
    inputs = [_slice(name, shape, operands[name]).astype(dtype) for name in ("query", "key", "value")]
    group = shape.heads // shape.key_heads
    bias = operands["bias"][-1, -group:] if "bias" in operands else None

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        logits = jnp.einsum("tgh,sh->gts", query, key[:, 0], preferred_element_type=jnp.float32, precision="highest")
        logits = logits / math.sqrt(shape.head_dim)
        logits = logits if bias is None else logits + bias.astype(jnp.float32)
        weights = jax.nn.softmax(jnp.where(_seen(shape, operands), logits, -jnp.inf), axis=-1).astype(dtype)
        return jnp.einsum("gts,sd->tgd", weights, value[:, 0], precision="highest")

    if not gradients:
        return {"out": attention(*inputs)}
    out, pull = jax.vjp(attention, *inputs)
    return dict(zip(NAMES[4], (out, *pull(d_out.astype(out.dtype))), strict=True))


def _seen(shape: Shape, operands: Mapping[str, jax.Array]) -> jax.Array:
    """Which keys each query sees, `[length, length]`, written independently of what is measured."""
    query, key = jnp.arange(shape.length)[:, None], jnp.arange(shape.length)[None, :]
    is_causal = shape.is_causal or shape.kind == "causal_mask"
    seen = key <= query if is_causal else jnp.ones((shape.length, shape.length), bool)
    if shape.kind == "window":
        seen &= query - key < shape.span
    if shape.kind == "documents":
        ids = operands["segments"][-1]
        seen &= ids[:, None] == ids[None, :]
    return seen & operands["mask"][-1, 0] if shape.kind == "mask" else seen
