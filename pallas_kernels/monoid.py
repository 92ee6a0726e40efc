"""The one idea: a row's softmax statistics are an element of a commutative monoid.

`Stats(max, sum)` stands for the number `exp(max) * sum`, kept apart so that it never overflows. Two partial rows
merge by rescaling both sums to the common maximum; the empty row `(-inf, 0)` is the identity. Every scope of this
library is this one merge with another carrier for "max" and "sum": registers of a warp, warps of a block, blocks of
a cluster or of the grid, tile after tile of a stream, devices of a mesh.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

from collections.abc import Callable
from typing import NamedTuple

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


def combine(a: Stats, b: Stats, *, exp: Exp = jnp.exp) -> Stats:
    """Merges two states."""
    m = jnp.maximum(a.max, b.max)
    return Stats(m, a.sum * decay(a.max, m, exp=exp) + b.sum * decay(b.max, m, exp=exp))


def merge_over(stats: Stats, axis: int, *, exp: Exp = jnp.exp) -> Stats:
    """Merges the states that lie along `axis`."""
    m = stats.max.max(axis)
    return Stats(m, (stats.sum * decay(stats.max, jnp.expand_dims(m, axis), exp=exp)).sum(axis))


def log_normalizer(stats: Stats) -> jax.Array:
    """`log(sum(exp(logits)))`: -inf for the empty row, +inf where a logit is +inf."""
    return jnp.where(stats.max == jnp.inf, stats.max, stats.max + jnp.log(stats.sum))
