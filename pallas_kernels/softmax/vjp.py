"""The row operations as plain `jax.custom_vjp` functions over the kernels: reverse-only, without the primitives.

They take `[rows, cols]` and bind the `RULES` of `problem`, which `jaxsoftmax` registers as the rules of its primitives:
these have forward mode and every higher order too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax.problem import RULES, Op, Problem


def softmax(x: jax.Array, scale: float = 1.0, kernel: str | None = None) -> jax.Array:
    """Softmax of each row of `x`, `[rows, cols]`, by the named kernel of the ladder, or the best that accepts it.

    Raises:
        NotImplementedError: no kernel takes the problem; the message lists each one's reason.
    """
    return _apply(Op.SOFTMAX, scale, kernel, x)


def log_softmax(x: jax.Array, scale: float = 1.0, kernel: str | None = None) -> jax.Array:
    """log_softmax of each row of `x`, as `softmax`."""
    return _apply(Op.LOG_SOFTMAX, scale, kernel, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(x: jax.Array, labels: jax.Array, scale: float = 1.0, kernel: str | None = None) -> jax.Array:
    """`-log_softmax(x)[label]` of each row in float32, and 0 for the label -1; as `softmax` otherwise.

    Differentiated, the forward pass writes the gradient while it has the row, and the backward pass multiplies it.
    """
    return _loss(x, labels, scale, _run(Op.CROSS_ENTROPY, scale, kernel, x, labels))


def _forward_loss(
    x: jax.Array, labels: jax.Array, scale: float, kernel: str | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weights = jnp.ones(labels.shape, jnp.float32)
    gradient, *stats = _run(Op.CROSS_ENTROPY_GRADIENT, scale, kernel, x, labels, weights)
    return _loss(x, labels, scale, Stats(*stats)), (gradient, labels)


def _backward_loss(
    scale: float, kernel: str | None, residuals: tuple[jax.Array, jax.Array], ct: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    gradient, labels = residuals
    return (gradient * ct[:, None]).astype(gradient.dtype), np.zeros(labels.shape, jax.dtypes.float0)


def _loss(x: jax.Array, labels: jax.Array, scale: float, stats: Stats) -> jax.Array:
    label = jnp.take_along_axis(x, jnp.maximum(labels, 0)[:, None], 1)[:, 0].astype(jnp.float32)
    return jnp.where(labels >= 0, log_normalizer(stats) - scale * label, 0.0)


cross_entropy.defvjp(_forward_loss, _backward_loss)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _apply(op: Op, scale: float, kernel: str | None, x: jax.Array) -> jax.Array:
    return _run(op, scale, kernel, x)


def _forward(op: Op, scale: float, kernel: str | None, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _run(op, scale, kernel, x)
    return y, y if RULES[op].residual == "output" else x


def _backward(op: Op, scale: float, kernel: str | None, residual: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    return (_run(RULES[op].cotangent, scale, None, residual, ct),)


_apply.defvjp(_forward, _backward)


def _run(op: Op, scale: float, kernel: str | None, *operands: jax.Array) -> Any:
    # Importing the kernels imports Pallas, which takes longer than importing JAX.
    from pallas_kernels.softmax import dispatch

    rows, cols = operands[0].shape
    problem = Problem(op, rows, cols, operands[0].dtype, scale=scale)
    decision = dispatch.decide(problem, hardware.current(), kernel=kernel)
    if decision.kernel is None:
        reasons = "; ".join(f"{name}: {why}" for name, why in decision.declined) or decision.reason
        raise NotImplementedError(f"{op}: no kernel takes {rows} rows of {cols} {operands[0].dtype}: {reasons}")
    return decision.run(*operands)
