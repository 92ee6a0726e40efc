"""The merge of softmax statistics, which are the elements of a commutative monoid.

`Stats(max, sum)` stands for the number `exp(max) * sum`, kept apart so that it never overflows. Two partial rows
merge by rescaling both sums to the common maximum; the empty row `(-inf, 0)` is the identity. The library merges so at
every scope: over the lanes of a warp, the warps of a CTA, the CTAs of a cluster or of the grid, the tiles of a row, and
the devices of a mesh.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Exp = Callable[[jax.Array], jax.Array]
Less = Callable[[jax.Array, jax.Array], jax.Array]


class Stats(NamedTuple):
    """The online-softmax state: `max` of the logits seen, and `sum` of `exp(logit - max)`, both float32 or float64.

    Only `max + log(sum)` has meaning: `Stats(logsumexp(x), 1.0)` is the same element as `Stats(x.max(), ...)`.
    """

    max: jax.Array
    sum: jax.Array


def empty_like(x: jax.Array) -> Stats:
    """Returns the identity of the merge: no logits seen."""
    return Stats(jnp.full_like(x, -jnp.inf), jnp.zeros_like(x))


def decay(frm: jax.Array, to: jax.Array, *, exp: Exp = jnp.exp, less: Less = operator.sub) -> jax.Array:
    """Returns `exp(frm - to)`, which rescales a sum relative to `frm` to one relative to `to`. `less` subtracts.

    Zero, not NaN, where `to` is -inf, so that the identity merges with itself. +inf and NaN give NaN.
    """
    return exp(less(frm, jax.lax.select(to == -jnp.inf, jnp.zeros_like(to), to)))


def decay_to_finite(frm: jax.Array, to: jax.Array) -> jax.Array:
    """Computes `decay` to a maximum that is never -inf; without a guard, XLA's CPU compiler fuses it with the sum."""
    return jnp.exp(frm - to)


def finite(maximum: jax.Array) -> jax.Array:
    """Returns `maximum`, or 0 where it is infinite: relative to 0, +inf adds +inf to a sum, and NaN adds NaN."""
    return jnp.where(jnp.isinf(maximum), jnp.zeros_like(maximum), maximum)


def nan_or_infinite(maximum: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Turns a sum relative to `finite(maximum)` into that of a state, which is NaN where the maximum is +inf.

    Devices' maximum of NaN and +inf may be +inf, as collectives compare. The sum then says that it is NaN.
    """
    infinite = maximum == jnp.inf
    return jnp.where(infinite & jnp.isnan(total), total, maximum), jnp.where(infinite, total - total, total)


def exp_in(unit: float) -> Exp:
    """Returns `exp` of numbers in multiples of `unit`."""
    return jnp.exp if unit == 1.0 else lambda d: jnp.exp(d * unit)


def scaled(state: Stats, unit: float, *, exp: Exp = jnp.exp) -> Stats:
    """Converts a state whose maximum is in multiples of `unit` to one whose maximum is not.

    The new maximum is rounded; the sum is corrected for that error if it is below 1.
    """
    if unit == 1.0:
        return state
    maximum = state.max * unit
    taken = _rest_of_product(state.max, unit, maximum)
    return Stats(maximum, state.sum * exp(jnp.where(jnp.abs(taken) < 1, taken, jnp.zeros_like(taken))))


def _rest_of_product(x: jax.Array, factor: float, product: jax.Array) -> jax.Array:
    """Returns `factor * x - product` of a rounded product, by halves whose products are exact, contracted or not."""
    dtype = np.dtype(x.dtype)
    words, low_bits = (np.int32, 12) if dtype.itemsize == 4 else (np.int64, 27)
    high = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, words) & words(-(1 << low_bits)), dtype)
    low = x - high
    whole = np.asarray(factor, dtype)
    f_high = (whole.view(words) & words(-(1 << low_bits))).view(dtype)
    f_high, f_low = float(f_high), float(whole - f_high)
    return ((high * f_high - product) + high * f_low) + low * f_high + low * f_low


def combine[S: tuple[jax.Array, ...]](a: S, b: S, *, exp: Exp = jnp.exp) -> S:
    """Merges two states: `Stats`, or any tuple of a maximum and sums of weighted values relative to it."""
    m = jnp.maximum(a[0], b[0])
    of_a, of_b = decay(a[0], m, exp=exp), decay(b[0], m, exp=exp)
    return _like(a, m, [x * of_a + y * of_b for x, y in zip(a[1:], b[1:], strict=True)])


def combine_once(a: Stats, b: Stats, *, exp: Exp = jnp.exp) -> Stats:
    """Merges two states as `combine` does, with one exponential: the sum at the larger maximum stays as it is."""
    m, less = jnp.maximum(a.max, b.max), jnp.minimum(a.max, b.max)
    a_is_larger = a.max >= b.max
    kept, rescaled = jnp.where(a_is_larger, a.sum, b.sum), jnp.where(a_is_larger, b.sum, a.sum)
    return Stats(m, kept + rescaled * decay(less, m, exp=exp))


def merge_over[S: tuple[jax.Array, ...]](
    state: S,
    axis: int,
    *,
    exp: Exp = jnp.exp,
    like: Callable[[jax.Array], jax.Array] | None = None,
    maximum: jax.Array | None = None,
) -> S:
    """Merges the states that lie along `axis`; `like` gives a maximum the shape it was reduced from.

    `maximum` is their largest one, where it is known.
    """
    m = state[0].max(axis) if maximum is None else maximum
    weights = decay(state[0], like(m) if like else jnp.expand_dims(m, axis), exp=exp)
    return _like(state, m, [(part * weights).sum(axis) for part in state[1:]])


def _like(state: tuple[jax.Array, ...], maximum: jax.Array, sums: list[jax.Array]) -> Any:
    return getattr(type(state), "_make", tuple)([maximum, *sums])


def log_normalizer(stats: Stats) -> jax.Array:
    """Returns `log(sum(exp(logits)))`: -inf for the empty row, +inf where a logit is +inf, whose sum is NaN."""
    return stats.max + jnp.log(jnp.where(stats.max == jnp.inf, stats.max, stats.sum))
