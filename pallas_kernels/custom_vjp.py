"""Row operations and attention as plain `jax.custom_vjp` functions over the kernels: reverse-only, no primitives.

They bind the pairs (forward, backward) that `jaxsoftmax` registers as the rules of its primitives; these have forward
mode and every higher order too. Row operations take `[rows, cols]`. Attention's operands and results are as
`pallas_kernels.attention.problem` describes them, and a part that no kernel takes is the reference's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import hardware
from pallas_kernels.attention import problem as attention_problem
from pallas_kernels.attention import reference
from pallas_kernels.attention.problem import DIFFERENTIABLE, OPERANDS, Operands, Rules, problem_of
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax.problem import RULES, Op, Problem


def softmax(x: jax.Array, scale: float = 1.0, kernel: str | None = None) -> jax.Array:
    """Computes softmax of each row of `x`, `[rows, cols]`, by the named kernel, or the best that accepts it.

    Raises:
        NotImplementedError: no kernel takes the problem; the message lists each one's reason.
    """
    return _apply(Op.SOFTMAX, scale, kernel, x)


def log_softmax(x: jax.Array, scale: float = 1.0, kernel: str | None = None) -> jax.Array:
    """Computes log_softmax of each row of `x`, as `softmax` does."""
    return _apply(Op.LOG_SOFTMAX, scale, kernel, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(x: jax.Array, labels: jax.Array, scale: float = 1.0, kernel: str | None = None) -> jax.Array:
    """Returns `-log_softmax(x)[label]` of each row in float32, and 0 for the label -1; as `softmax` otherwise.

    Differentiated, the forward pass writes the gradient while it has the row, and the backward pass multiplies it.
    """
    return _loss(x, labels, scale, _run_rows(Op.CROSS_ENTROPY, scale, kernel, x, labels))


def _loss_forward(
    x: jax.Array, labels: jax.Array, scale: float, kernel: str | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weights = jnp.ones(labels.shape, jnp.float32)
    gradient, *stats = _run_rows(Op.CROSS_ENTROPY_GRADIENT, scale, kernel, x, labels, weights)
    return _loss(x, labels, scale, Stats(*stats)), (gradient, labels)


def _loss_backward(
    scale: float, kernel: str | None, residuals: tuple[jax.Array, jax.Array], ct: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    gradient, labels = residuals
    return (gradient * ct[:, None]).astype(gradient.dtype), np.zeros(labels.shape, jax.dtypes.float0)


def _loss(x: jax.Array, labels: jax.Array, scale: float, stats: Stats) -> jax.Array:
    label = jnp.take_along_axis(x, jnp.maximum(labels, 0)[:, None], 1)[:, 0].astype(jnp.float32)
    return jnp.where(labels >= 0, log_normalizer(stats) - scale * label, 0.0)


cross_entropy.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _apply(op: Op, scale: float, kernel: str | None, x: jax.Array) -> jax.Array:
    return _run_rows(op, scale, kernel, x)


def _rows_forward(op: Op, scale: float, kernel: str | None, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _run_rows(op, scale, kernel, x)
    return y, y if RULES[op].residual == "output" else x


def _rows_backward(op: Op, scale: float, kernel: str | None, residual: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    return (_run_rows(RULES[op].cotangent, scale, None, residual, ct),)


_apply.defvjp(_rows_forward, _rows_backward)


def _run_rows(op: Op, scale: float, kernel: str | None, *operands: jax.Array) -> Any:
    # Importing the kernels imports Pallas, which takes longer than importing JAX.
    from pallas_kernels.softmax import dispatch

    rows, cols = operands[0].shape
    problem = Problem(op, rows, cols, operands[0].dtype, scale=scale)
    decision = dispatch.decide(problem, hardware.current(), kernel=kernel, alone=True)
    if decision.kernel is None:
        reasons = "; ".join(f"{name}: {why}" for name, why in decision.declined) or decision.reason
        raise NotImplementedError(f"{op}: no kernel takes {rows} rows of {cols} {operands[0].dtype}: {reasons}")
    return decision.run(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def attention(operands: Operands, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Returns output `[B, T, N, D]` and logsumexp `[B, N, T]` of operands with one batch axis, `sinks` as `[N]`."""
    return _attention_forward(operands, rules)[0]


def _attention_forward(operands: Operands, rules: Rules) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    results = _run_attention(attention_problem.Op.FORWARD, rules, operands)
    out, lse = reference.forward(_with_batch(operands), rules) if results is None else results
    return (out, lse), (operands, out, lse)


def _attention_backward(
    rules: Rules, residuals: tuple[Operands, jax.Array, jax.Array], cts: tuple[jax.Array, jax.Array]
) -> tuple[Operands]:
    operands, out, lse = residuals
    names = [name for name in DIFFERENTIABLE if name in operands.present]
    arrays = _run_attention(attention_problem.Op.BACKWARD, rules, operands, out, lse, *cts)
    if arrays is None:
        batched = _with_batch(operands)
        shapes = {name: getattr(batched, name).shape for name in names}
        arrays = reference.backward(batched, rules, out, lse, *cts, shapes=shapes)
    gradients = {name: x.reshape(getattr(operands, name).shape) for name, x in zip(names, arrays, strict=True)}
    return (Operands(*(gradients.get(name) for name in Operands._fields)),)


attention.defvjp(_attention_forward, _attention_backward)


def _with_batch(operands: Operands) -> Operands:
    """Gives each operand a batch axis, as the references take them."""
    shared = [name for name in operands.present if not OPERANDS[name].has_batch]
    return operands._replace(**{name: getattr(operands, name)[None] for name in shared})


def _run_attention(
    op: attention_problem.Op, rules: Rules, operands: Operands, *rest: jax.Array
) -> tuple[jax.Array, ...] | None:
    """Runs the kernel; None where no kernel takes the problem."""
    from pallas_kernels.attention import dispatch

    arrays = {name: getattr(operands, name) for name in operands.present}
    shapes, dtypes = ({name: getattr(x, fact) for name, x in arrays.items()} for fact in ("shape", "dtype"))
    bias_gradient = op is attention_problem.Op.BACKWARD and "bias" in arrays
    problem = problem_of(op, shapes, dtypes, rules, bias_gradient=bias_gradient)
    decision = dispatch.decide(problem, hardware.current())
    if decision.kernel is None:
        return None
    return decision.run(*(x.astype(OPERANDS[name].dtype or x.dtype) for name, x in arrays.items()), *rest)
