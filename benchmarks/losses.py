"""Cross entropy and top-k softmax as `variants` have them: operands, ours, one rung, and XLA's way."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxsoftmax
from benchmarks.cases import Case
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax import dispatch

OPS = ("cross_entropy", "top_k")
Function = Callable[..., Any]


def labels(case: Case, key: jax.Array) -> jax.Array:
    """Random labels, the first and the last column among them; with an `ignore_index`, half of the rows have that."""
    y = jax.random.randint(key, (case.rows,), 0, case.cols, jnp.int32).at[0].set(0).at[-1].set(case.cols - 1)
    if "ignore_index" not in case.options:
        return y
    return jnp.where(jax.random.permutation(key, case.rows) < case.rows // 2, case.options["ignore_index"], y)


def ours(case: Case) -> Function:
    """The public functions."""
    if case.op == "top_k":
        return lambda x: jaxsoftmax.top_k_softmax(x, **case.options)
    loss = functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, **case.options)
    if case.pass_ == "fwd":
        return lambda x, y: loss(x, y)
    if case.pass_ == "value_and_grad":
        return jax.value_and_grad(lambda x, y: loss(x, y, weights=1 / case.rows).sum())
    return jax.value_and_grad(lambda x, y: loss(x, y).mean())


def xla(case: Case, *, wide: bool = False) -> Function:
    """`optax`'s formula and `.mean()`, or `lax.top_k` of `jax.nn.softmax`; `wide`: of logits cast to float32 first.

    The cast is what is written where a 16-bit loss will not do: the loss is then as accurate as ours.
    """
    if case.op == "top_k":
        return lambda x: tuple(jax.lax.top_k(jax.nn.softmax(x, -1), **case.options))
    formula = functools.partial(_optax, **case.options)
    loss = (lambda x, y: formula(x.astype(jnp.float32), y)) if wide else formula
    return loss if case.pass_ == "fwd" else jax.value_and_grad(lambda x, y: loss(x, y).mean())


def _optax(
    x: jax.Array,
    y: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
) -> jax.Array:
    """In the logits' dtype, as `optax` has it; with what it has no option for written around it, in float32."""
    if logits_soft_cap is not None:
        x = logits_soft_cap * jnp.tanh(x.astype(jnp.float32) / logits_soft_cap)
    ignored = None if ignore_index is None else y == ignore_index
    column = y if ignored is None else jnp.where(ignored, 0, y)
    lse = jax.nn.logsumexp(x, axis=-1)
    loss = lse - jnp.take_along_axis(x, column[:, None], -1)[:, 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - x.mean(-1))
    if z_loss:
        loss += z_loss * lse**2
    return loss if ignored is None else jnp.where(ignored, 0, loss)


def rung(case: Case, decision: dispatch.Decision) -> tuple[Function, Function]:
    """One rung's program and its operands, with XLA's small part of the loss after it."""
    weights = () if case.pass_ == "fwd" else (jnp.full(case.rows, 1 / case.rows),)

    def run(x: jax.Array, y: jax.Array, *weights: jax.Array) -> Any:
        *gradient, maximum, total = decision.run(x, y, *weights)
        loss = log_normalizer(Stats(maximum, total)) - jnp.take_along_axis(x, y[:, None], -1)[:, 0]
        return (loss.mean(), *gradient) if gradient else loss

    return run, lambda x, y: (x, y, *weights)
