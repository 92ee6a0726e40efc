"""A call of `linear_cross_entropy` as it is traced, and the kernel's part in it.

First the names and axes of the operands, the options and the shardings; then which calls the kernel takes, and what it
gives for chunks of tokens.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsoftmax._core.sharding import AxisSharding
from pallas_kernels import hardware
from pallas_kernels.hardware import Device
from pallas_kernels.monoid import Stats, decay
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED

# Tokens (any number of axes), embedding and vocabulary.
AXES = {
    "hidden": "te",
    "weight": "ev",
    "bias": "v",
    "scale": "t",
    "labels": "t",
    "weights": "t",
    "where": "tv",
    "max": "t",
    "sum": "t",
    "entropy": "t",
    "loss": "t",
    "lse": "t",
}
MOVING = ("hidden", "weight", "bias", "scale")  # the operands that have gradients, beside the weights of rows
TANGENT, COTANGENT, SAVED = "tangent_", "cotangent_", "saved_"  # prefixes of what has another operand's axes

COLUMNS = (1,)  # the axes of a chunk's rows

Operands = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is known of a call when it is traced."""

    transposed: bool = False  # the weight is [vocabulary, embedding]
    precision: Any = None
    scale: float = 1.0
    soft_cap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    results: tuple[str, ...] = ("loss",)
    all_rows: bool = False  # ignored tokens have an lse and an entropy too
    chunk_size: int | None = None
    implementation: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The parameters of a row operation on a chunk's logits."""
        return {"axes": COLUMNS, "scale": self.scale, "soft_cap": self.soft_cap, "smoothing": self.smoothing}

    @property
    def states(self) -> tuple[str, ...]:
        """The states of rows that derivatives need."""
        return ("max", "sum", *(["entropy"] if "entropy" in self.results else []))

    def axes(self, name: str) -> str:
        """The axes of an operand, or of what has the axes of one."""
        axes = AXES[name.rpartition("_")[2]]
        return axes[::-1] if self.transposed and axes == "ev" else axes


class Parts(NamedTuple):
    """How the operands are sharded: the token axes, and the vocabulary."""

    tokens: tuple[AxisSharding, ...]
    vocabulary: AxisSharding

    @property
    def token_names(self) -> tuple[str, ...]:
        """The mesh axes of the tokens."""
        return tuple(name for sharding in self.tokens for name in sharding.names)


def kernel_reason(
    rules: Rules, operands: Mapping[str, Any], device: Device, *, for_gradient: bool = False
) -> str | None:
    """Why no kernel multiplies hidden states and weight; only shapes and dtypes of the operands are read.

    Without the kernel losses are computed in chunks of tokens. Gradients are in either case.
    """
    # Pallas takes longer to import than JAX itself, and only a lowering for CUDA needs it.
    from pallas_kernels.linear_cross_entropy import forward as kernel

    problem = _problem(rules, operands)
    why_not = {
        "implementation='xla'": rules.implementation == "xla",
        "chunk_size is given": rules.chunk_size is not None and not for_gradient,
        "the kernel takes no bias": "bias" in operands,
        "the kernel takes no mask": "where" in operands,
        "the kernel takes a scale that is a positive number": "scale" in operands,
        "the kernel does not smooth labels": rules.smoothing != 0,
        "the kernel has no precision to choose": rules.precision is not None,
        "the gradient of entropies needs logits": COTANGENT + "entropy" in operands,
        "the kernel is compiled for fixed shapes": not all(
            isinstance(n, int) for n in (problem.tokens, problem.embedding, problem.vocabulary)
        ),
    }
    reason = next((reason for reason, holds in why_not.items() if holds), None)
    return reason or hardware.supports_kernels(device) or kernel.unsupported(problem, device)


def _problem(rules: Rules, operands: Mapping[str, Any], *, weights: bool = False) -> Any:
    """What the kernel computes, of operands with any number of token axes."""
    from pallas_kernels.linear_cross_entropy.forward import Problem

    *tokens, embedding = operands["hidden"].shape
    return Problem(
        tokens=math.prod(tokens),
        embedding=embedding,
        vocabulary=operands["weight"].shape[rules.axes("weight").index("v")],
        dtype=jnp.dtype(operands["hidden"].dtype),
        transposed=rules.transposed,
        scale=rules.scale,
        soft_cap=rules.soft_cap,
        entropy="entropy" in rules.results and not weights,
        weights=weights,
    )


def numbers(rules: Rules, operands: Operands, local: jax.Array) -> Operands:
    """The terms of the losses; `local` are the labels among this device's columns."""
    return _run(rules, operands, local, weights=False)[0]


class Weights(NamedTuple):
    """The weights of a chunk's logits, each relative to the maximum of its row in its tile of columns.

    They are multiplied by the slope of the soft cap.
    """

    of_columns: jax.Array
    maxima: jax.Array  # [tokens, tiles]
    label: jax.Array  # the logit of the label


def numbers_and_weights(rules: Rules, operands: Operands, local: jax.Array) -> tuple[Operands, Weights]:
    """The terms of the losses, and what the gradient needs of the logits, in 16 bits."""
    found, (of_columns, maxima) = _run(rules, operands, local, weights=True)
    return found, Weights(of_columns, maxima, found["label"])


def _run(rules: Rules, operands: Operands, local: jax.Array, *, weights: bool) -> tuple[Operands, tuple[Any, ...]]:
    from pallas_kernels.linear_cross_entropy import forward as kernel

    problem = _problem(rules, operands, weights=weights)
    maximum, total, label, *rest = kernel.run(problem, kernel.Config(), operands["hidden"], operands["weight"], local)
    found = {"max": maximum, "sum": total, "label": label}
    if problem.entropy:
        found["spread"] = jnp.where(total == 0, 0.0, rest.pop(0) - maximum * total)
    if not rules.all_rows:
        for name, neutral in zip(found, (0.0, 1.0, 0.0), strict=False):
            found[name] = jnp.where(operands["labels"] == IGNORED, neutral, found[name])
    return found, tuple(rest)


def slopes(
    rules: Rules, weights: Weights, known: Stats, of_p: jax.Array, of_q: jax.Array, local: jax.Array, exists: jax.Array
) -> jax.Array:
    """`(of_p * p - of_q * [column == label]) * dz/dx` of each logit, and 0 in rows that do not exist.

    All but `weights` have the shape `[tokens, 1]`.
    """
    from pallas_kernels.linear_cross_entropy.forward import Config

    of_tiles = rules.scale * of_p * decay(weights.maxima, known.max) / known.sum
    by_column = jnp.broadcast_to(of_tiles[:, :, None], (*of_tiles.shape, Config().columns)).reshape(len(of_p), -1)
    x = weights.of_columns
    of_label = rules.scale * of_q
    if rules.soft_cap is not None:
        of_label = of_label * (1.0 - jnp.square(weights.label[:, None] / rules.soft_cap))
    at_label = reference.columns(x, COLUMNS) == local
    slope = x.astype(of_p.dtype) * by_column[:, : x.shape[1]] - jnp.where(at_label, of_label, 0.0)
    return jnp.where(exists, slope, 0.0)
