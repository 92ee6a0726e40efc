"""The gate before every time of attention: every head of every sequence, on the device, against float32.

The rule is FlashAttention's, for each head: the error is at most twice that of XLA in 16 bits, plus half a unit of
the dtype. Errors are root mean squares, relative to the truth's; the worst row counts by a sixteenth, lest it be lost
in the mean of thousands.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention_cases import Shape
from benchmarks.attention_rules import NAMES, ROW_WEIGHT, Verdict, worst_head

_SCORES = 2**28  # at once, in float32: a head of 16384 tokens


def truth(
    shape: Shape, operands: Mapping[str, jax.Array], *, gradients: bool
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """For each output, `[batch, key_heads, group, length, dim]` in float32 and by XLA in the operands' dtype."""
    group = shape.heads // shape.key_heads
    arrays = [_by_head(shape, operands[name]) for name in ("query", "key", "value", "d_out")]

    def of_pair(pair: jax.Array) -> Any:
        sequence, head = pair // shape.key_heads, pair % shape.key_heads
        mine = [x[sequence, head] for x in arrays]
        bias = (
            operands["bias"][0].reshape(shape.key_heads, group, shape.query_length, shape.length)[head]
            if "bias" in operands
            else None
        )
        seen = _seen(shape, operands, sequence)
        return [_computed(shape, mine, bias, seen, x, gradients) for x in (jnp.float32, operands["query"].dtype)]

    at_once = max(_SCORES // (group * shape.query_length * shape.length), 1)
    found = jax.lax.map(of_pair, jnp.arange(shape.batch * shape.key_heads), batch_size=at_once)
    exact, plain = jax.tree.map(lambda x: x.reshape(shape.batch, shape.key_heads, *x.shape[1:]), found)
    return {name: (exact[name], plain[name]) for name in exact}


@jax.jit(static_argnames="shape")
def _errors(shape: Shape, got: Mapping[str, jax.Array], truths: Mapping[str, tuple[jax.Array, jax.Array]]) -> Any:
    """Of each output, the errors of what is judged and of XLA's in 16 bits, `[2, batch, heads]`."""

    def pair(name: str) -> jax.Array:
        want, xla = truths[name]
        found = jnp.stack([_error(x.astype(jnp.float32), want) for x in (_by_head(shape, got[name]), xla)])
        return found.reshape(2, shape.batch, -1)

    return {name: pair(name) for name in got}


def _error(got: jax.Array, want: jax.Array) -> jax.Array:
    """The relative error of each head."""
    rows, sizes = ((x**2).mean(-1) for x in (got - want, want))
    size = sizes.mean(-1)
    # A row may be nearly zero, as the first queries' gradients are under a causal mask.
    worst_row = (rows / jnp.maximum(sizes, size[..., None])).max(-1)
    return jnp.sqrt(jnp.maximum(rows.mean(-1) / size, worst_row * ROW_WEIGHT**2))


def judge(shape: Shape, got: Sequence[jax.Array], truths: Mapping[str, tuple[jax.Array, jax.Array]]) -> Verdict:
    """Compares a program's outputs with the truth."""
    names = NAMES[len(got)]
    errors = jax.device_get(_errors(shape, dict(zip(names, got, strict=True)), {name: truths[name] for name in names}))
    return worst_head({name: found.tolist() for name, found in errors.items()}, shape.dtype)


def _by_head(shape: Shape, x: jax.Array) -> jax.Array:
    """`[batch, length, heads, dim]` as `[batch, key_heads, group, length, dim]`, the group of one for keys."""
    batch, length, heads, dim = x.shape
    return jnp.moveaxis(x, 1, 2).reshape(batch, shape.key_heads, heads // shape.key_heads, length, dim)


def _computed(
    shape: Shape, arrays: Sequence[jax.Array], bias: jax.Array | None, seen: jax.Array, dtype: Any, gradients: bool
) -> dict[str, jax.Array]:
    """One key head of a sequence with the query heads that share it."""
    *inputs, d_out = (x.astype(dtype) for x in arrays)

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        logits = jnp.einsum("gth,sh->gts", query, key[0], preferred_element_type=jnp.float32, precision="highest")
        logits = logits / math.sqrt(shape.head_dim)
        logits = logits if bias is None else logits + bias.astype(jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1).astype(dtype)
        return jnp.einsum("gts,sd->gtd", weights, value[0], precision="highest")

    if not gradients:
        return {"out": attention(*inputs)}
    out, pull = jax.vjp(attention, *inputs)
    return dict(zip(NAMES[4], (out, *pull(d_out)), strict=True))


def _seen(shape: Shape, operands: Mapping[str, jax.Array], sequence: jax.Array) -> jax.Array:
    """Which keys each query of a sequence sees, `[queries, keys]`, written independently of what is measured."""
    query, key = jnp.arange(shape.query_length)[:, None], jnp.arange(shape.length)[None, :]
    is_causal = shape.is_causal or shape.kind == "causal_mask"
    seen = key <= query if is_causal else jnp.ones((shape.query_length, shape.length), bool)
    if shape.kind == "window":
        seen &= query - key < shape.span
    if shape.kind == "documents":
        ids = operands["segments"][sequence]
        seen &= ids[:, None] == ids[None, :]
    return seen & operands["mask"][sequence, 0] if shape.kind == "mask" else seen
