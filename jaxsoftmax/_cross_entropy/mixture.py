"""Losses whose label smoothing or z-loss is data: of the losses for constants, in both of which they are linear.

A loss with smoothed labels is a mean of the label's loss and of that of an even distribution. The z-loss is added to
it, from the rows' logsumexps.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxsoftmax._cross_entropy.primitives import of_gradient

# Returns the loss, the logsumexp if asked for, and other results, for constants `(smoothing, z_loss, with_lse)`.
Compute = Callable[[float, float, bool], Sequence[jax.Array]]
Number = float | jax.Array  # a constant, or data


def is_mixture(smoothing: Number, z_loss: Number) -> bool:
    """Whether any of the two is data."""
    return isinstance(smoothing, jax.Array) or isinstance(z_loss, jax.Array)


def mixed(
    compute: Compute, ignored: jax.Array, smoothing: Number, z_loss: Number, with_lse: bool
) -> Sequence[jax.Array]:
    """Calls `compute` with numbers that may be data; `ignored` rows have no loss."""
    z_is_data = isinstance(z_loss, jax.Array)
    constant = 0.0 if z_is_data else z_loss
    if isinstance(smoothing, jax.Array):
        loss, *rest = compute(0.0, constant, with_lse or z_is_data)
        even = compute(1.0, constant, False)[0]
        loss = _times(1 - smoothing, loss) + _times(smoothing, even)
    else:
        loss, *rest = compute(smoothing, constant, with_lse or z_is_data)
    if z_is_data:
        lse = rest[0] if with_lse else rest.pop(0)
        lse = jnp.where(ignored, jnp.zeros_like(lse), lse)
        loss = loss + _times(z_loss, of_gradient(lse, lse, ()))
    return [loss, *rest]


def _times(number: jax.Array, term: jax.Array) -> jax.Array:
    """Multiplies a number by one of each row, in which 0 times NaN or infinity is 0, in derivatives too."""
    return of_gradient(number.reshape((1,) * term.ndim), term, ())
