"""The one idea: a row's softmax statistics are an element of a commutative monoid.

`Stats(max, sum)` stands for the number `exp(max) * sum`, kept apart so that it never overflows. Two partial rows
merge by rescaling both sums to the common maximum; the empty row `(-inf, 0)` is the identity. Every scope of this
library is this one merge with another carrier for "max" and "sum": registers of a warp, warps of a block, blocks of
a cluster or of the grid, tile after tile of a stream, devices of a mesh.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Exp = Callable[[jax.Array], jax.Array]


class Stats(NamedTuple):
    """The online-softmax state: `max` of the logits seen, and `sum` of `exp(logit - max)`, both float32 or float64.

    Only `max + log(sum)` has meaning: `Stats(logsumexp(x), 1.0)` is the same element as `Stats(x.max(), ...)`.
    """

    max: jax.Array
    sum: jax.Array


def empty_like(x: jax.Array) -> Stats:
    """The identity of the merge: no logits seen."""
    return Stats(jnp.full_like(x, -jnp.inf), jnp.zeros_like(x))


def decay(frm: jax.Array, to: jax.Array, *, exp: Exp = jnp.exp) -> jax.Array:
    """`exp(frm - to)`: the weight of what was measured against `frm`, measured against `to`.

    Zero, not NaN, where `to` is -inf, so that the identity merges with itself. +inf and NaN give NaN.
    """
    return exp(frm - jnp.where(to == -jnp.inf, jnp.zeros_like(to), to))


def combine[S: tuple[jax.Array, ...]](a: S, b: S, *, exp: Exp = jnp.exp) -> S:
    """Merges two states: `Stats`, or any tuple of a maximum and sums of weighted values relative to it."""
    m = jnp.maximum(a[0], b[0])
    of_a, of_b = decay(a[0], m, exp=exp), decay(b[0], m, exp=exp)
    return _like(a, m, [x * of_a + y * of_b for x, y in zip(a[1:], b[1:], strict=True)])


def merge_over[S: tuple[jax.Array, ...]](
    state: S, axis: int, *, exp: Exp = jnp.exp, spread: Callable[[jax.Array], jax.Array] | None = None
) -> S:
    """Merges the states that lie along `axis`; `spread` gives a maximum the shape it was reduced from."""
    m = state[0].max(axis)
    weights = decay(state[0], spread(m) if spread else jnp.expand_dims(m, axis), exp=exp)
    return _like(state, m, [(part * weights).sum(axis) for part in state[1:]])


def _like(state: Any, maximum: jax.Array, sums: list[jax.Array]) -> Any:
    return getattr(type(state), "_make", tuple)([maximum, *sums])


def log_normalizer(stats: Stats) -> jax.Array:
    """`log(sum(exp(logits)))`: -inf for the empty row, +inf where a logit is +inf, whose sum is NaN."""
    return stats.max + jnp.log(jnp.where(stats.max == jnp.inf, stats.max, stats.sum))
