"""Attention with dropout by two passes of the kernels without it, where Z says which weights stay.

With P = exp(logits - lse) over all keys, O = (P ∘ Z) V is attention to the keys that stay, but for its sum:

    O = exp(lse_Z - lse) * O_Z        of `O_Z, lse_Z` with Z as a mask, and `lse` without it

and the gradient of the logits, dS = P ∘ (Z ∘ dP - delta + d_lse) for dP = dO V^T and delta = rowsum(dO ∘ O), has a part
for each pass, both at `lse`:

    P ∘ Z ∘ dP                        with Z as a mask, O = 0 and d_lse = 0, which gives dV = (P ∘ Z)^T dO as well
    P ∘ (d_lse - delta)               without it, dO = 0, and d_lse - delta for d_lse
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Attention, operand_names
from pallas_kernels.decision import Decision
from pallas_kernels.hardware import Device
from pallas_kernels.monoid import decay_to_finite

Decide = Callable[[Attention, Device], Decision]


class Passes(NamedTuple):
    """The kernels of the pass with the kept weights as a mask, and of the pass without."""

    kept: Decision
    whole: Decision

    def __repr__(self) -> str:
        return f"Passes(kept={self.kept.config}, whole={self.whole.config})"


def passes(decide: Decide, problem: Attention, device: Device) -> Passes:
    """Returns the kernels of both passes."""
    assert problem.keep is not None
    mask = jnp.broadcast_shapes(problem.keep, problem.mask or (1, 1, 1, 1))
    whole = dataclasses.replace(problem, keep=None, lse_gradient=True)
    kept = dataclasses.replace(whole, mask=mask, sinks=False)
    return Passes(decide(kept, device), decide(whole, device))


def unsupported(decide: Decide, problem: Attention, device: Device) -> str | None:
    """Says why the kernels do not take the problem."""
    declined = (decision.declined for decision in passes(decide, problem, device) if decision.chosen is None)
    return next(("; ".join(f"{name}: {why}" for name, why in reasons) for reasons in declined), None)


def forward(problem: Attention, config: Passes, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the output, not divided by the share of weights that stay, and the logsumexp of all logits."""
    arrays = dict(zip(operand_names(problem), operands, strict=True))
    _, lse = config.whole.run(*_operands(config.whole.problem, arrays))
    out, kept = config.kept.run(*_operands(config.kept.problem, _with_mask(arrays)))
    share = decay_to_finite(kept, jnp.maximum(lse, jnp.finfo(lse.dtype).min))
    return (out * jnp.swapaxes(share, 1, 2)[..., None]).astype(out.dtype), lse


def backward(problem: Attention, config: Passes, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradients, as the backward kernels return them."""
    names = operand_names(problem)
    arrays, (out, lse, d_out, d_lse) = dict(zip(names, operands, strict=False)), operands[len(names) :]
    delta = jnp.swapaxes((out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1), 1, 2)
    delta = jnp.where(lse == -jnp.inf, 0.0, delta)
    nothing, none = jnp.zeros_like(out), jnp.zeros_like(d_lse)
    kept = config.kept.run(*_operands(config.kept.problem, _with_mask(arrays)), nothing, lse, d_out, none)
    whole = config.whole.run(*_operands(config.whole.problem, arrays), nothing, lse, nothing, d_lse - delta)
    # The second pass gives no gradient of the values, and alone that of the sinks.
    sums = [a if i == 2 else a + b for i, (a, b) in enumerate(zip(kept, whole, strict=False))]
    return (*sums, *whole[len(kept) :])


def _operands(problem: Attention, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Returns the operands of a pass, in its order."""
    return [arrays[name] for name in operand_names(problem)]


def _with_mask(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the operands, with the weights that stay among what the mask hides."""
    keep = arrays["keep"]
    return arrays | {"mask": keep * arrays["mask"] if "mask" in arrays else keep}
