"""Losses whose label smoothing or z-loss is data: of the losses for constants, in both of which they are linear.

A loss with smoothed labels is a mean of the label's loss and of that of an even distribution. The z-loss is added to
it, from the rows' logsumexps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._cross_entropy.primitives import of_gradient

# The loss, the logsumexp if it is asked for, and other results, for `(smoothing, z_loss, with_lse)` that are constants.
Compute = Callable[[float, float, bool], Sequence[Any]]


def is_mixture(smoothing: Any, z_loss: Any) -> bool:
    """Whether any of the two is data."""
    return isinstance(smoothing, jax.Array) or isinstance(z_loss, jax.Array)


def mixed(compute: Compute, ignored: jax.Array, smoothing: Any, z_loss: Any, with_lse: bool) -> Sequence[Any]:
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
    """A number times one of each row, in which 0 times NaN or infinity is 0, in derivatives too."""
    return of_gradient(number.reshape((1,) * term.ndim), term, ())
