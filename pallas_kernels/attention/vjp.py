"""Attention as a plain `jax.custom_vjp` function over the kernels: reverse-only, for those who want no primitive.

The pair (forward, backward) is the one that `jaxsoftmax` registers as its primitives' rules. Operands, problem and
results are as `pallas_kernels.attention.problem` describes them; a part that no kernel takes is the reference's.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hardware
from pallas_kernels.attention import reference
from pallas_kernels.attention.operands import Operands, Rules
from pallas_kernels.attention.problem import Attention, Op


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def attention(operands: Operands, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Output `[B, T, N, D]` and logsumexp `[B, N, T]` of operands with one batch axis, `sinks` as `[N]`."""
    return _forward(operands, rules)[0]


def _forward(operands: Operands, rules: Rules) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    found = _run(Op.FORWARD, rules, operands)
    out, lse = reference.forward(_with_batch(operands), rules) if found is None else found
    return (out, lse), (operands, out, lse)


def _backward(
    rules: Rules, residuals: tuple[Operands, jax.Array, jax.Array], cts: tuple[jax.Array, jax.Array]
) -> tuple[Operands]:
    operands, out, lse = residuals
    names = [name for name in ("query", "key", "value", "bias", "sinks") if name in operands.present]
    found = _run(Op.BACKWARD, rules, operands, out, lse, *cts)
    if found is None:
        batched = _with_batch(operands)
        shapes = {name: getattr(batched, name).shape for name in names}
        found = reference.backward(batched, rules, out, lse, *cts, shapes=shapes)
    gradients = {name: x.reshape(getattr(operands, name).shape) for name, x in zip(names, found, strict=True)}
    return (Operands(*(gradients.get(name) for name in Operands._fields)),)


attention.defvjp(_forward, _backward)


def _with_batch(operands: Operands) -> Operands:
    return operands if operands.sinks is None else operands._replace(sinks=operands.sinks[None])


def _run(op: Op, rules: Rules, operands: Operands, *rest: jax.Array) -> Any:
    """The kernel's results, or None where no kernel takes the problem."""
    # Importing the kernels imports Pallas, which takes longer than importing JAX.
    from pallas_kernels.attention import dispatch

    decision = dispatch.decide(problem_of(op, rules, operands), hardware.current())
    if decision.kernel is None:
        return None
    mask = operands.mask if operands.mask is None else operands.mask.astype(jnp.int8)
    return decision.run(*(x for x in operands._replace(mask=mask) if x is not None), *rest)


def problem_of(op: Op, rules: Rules, operands: Operands) -> Attention:
    """The static facts of a call."""
    batch, length, heads, dim = operands.query.shape
    _, keys, key_heads, value_dim = operands.value.shape
    of_references = ("precision", "is_local")
    static = {name: x for name, x in dataclasses.asdict(rules).items() if name not in of_references}
    has = {name: getattr(operands, name) is not None for name in ("query_lengths", "key_lengths", "sinks")}
    return Attention(
        op,
        batch,
        heads,
        key_heads,
        length,
        keys,
        dim,
        value_dim,
        operands.query.dtype,
        bias=None if operands.bias is None else operands.bias.shape,
        bias_dtype=None if operands.bias is None else operands.bias.dtype,
        bias_gradient=op is Op.BACKWARD and operands.bias is not None,
        mask=None if operands.mask is None else operands.mask.shape,
        segments=operands.query_segments is not None,
        **has,
        **static,
    )
