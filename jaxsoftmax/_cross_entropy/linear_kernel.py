"""A call of `linear_cross_entropy` as it is traced, and the kernel's part in it.

First the names and axes of the operands, the options and the shardings; then which calls the kernel takes, and what it
gives for chunks of tokens.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core.checks import PrecisionLike
from jaxsoftmax._core.recorder import Aval
from jaxsoftmax._core.sharding import AxisSharding
from pallas_kernels import hardware
from pallas_kernels.decision import Decision
from pallas_kernels.hardware import Device
from pallas_kernels.monoid import Stats, decay, log_normalizer
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED

_ESTIMATED_FROM = 256  # columns at least
_REACH = 60.0  # of an estimated logsumexp, in nats: float32 and bfloat16 hold exp(88)
_MOST = 2.0**20  # of a label's factor, as a multiple of its row's

# Tokens (any number of axes), embedding and vocabulary, as `axes.parse` reads them.
AXES = {
    "hidden": "*te",
    "weight": "ev",
    "bias": "v",
    "scale": "*t",
    "cap": "*t",
    "labels": "*t",
    "weights": "*t",
    "where": "*tv",
    "max": "*t",
    "sum": "*t",
    "entropy": "*t",
    "loss": "*t",
    "lse": "*t",
}
MOVING = ("hidden", "weight", "bias", "scale", "cap")  # the operands that have gradients, beside the weights of rows
TANGENT, COTANGENT, SAVED = "tangent_", "cotangent_", "saved_"  # prefixes of what has another operand's axes

# Operands that the kernel and the gradients from its results read; it refuses others.
_READ = {"hidden", "weight", "labels", "weights", "max", "sum", "entropy", COTANGENT + "loss", COTANGENT + "lse"}
COLUMNS = (1,)  # the axes of a chunk's rows

Operands = dict[str, jax.Array]
Stored = Literal["rows", "tiles"] | None  # weights of logits, relative to a number of the row or of the tile


@dataclasses.dataclass(frozen=True)
class Rules:
    """Facts of a call that are known when it is traced."""

    transposed: bool = False  # the weight is [vocabulary, embedding]
    precision: PrecisionLike = None
    scale: float = 1.0
    soft_cap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    results: tuple[str, ...] = ("loss",)
    all_rows: bool = False  # ignored tokens have an lse and an entropy too
    chunk_size: int | None = None
    reduce_dtype: np.dtype | None = None  # of the weight's gradient, where devices sum it
    implementation: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        """Returns the parameters of a row operation on a chunk's logits."""
        return {"axes": COLUMNS, "scale": self.scale, "soft_cap": self.soft_cap, "smoothing": self.smoothing}

    @property
    def states(self) -> tuple[str, ...]:
        """Names the states of rows that derivatives need."""
        return ("max", "sum", *(["entropy"] if "entropy" in self.results else []))

    def axes(self, name: str) -> str:
        """Returns the axes of an operand, or of an array that has the axes of one."""
        axes = AXES[name.rpartition("_")[2]]
        return axes[::-1] if self.transposed and axes == "ev" else axes

    def has_tokens(self, name: str) -> bool:
        """Whether an operand or a result has the axes of tokens."""
        return self.axes(name).startswith("*t")

    def vocabulary(self, shape: Sequence[int]) -> int:
        """Returns the number of columns of a weight of this shape."""
        return shape[self.axes("weight").index("v")]


class Parts(NamedTuple):
    """Says how the operands are sharded: the token axes, and the vocabulary."""

    tokens: tuple[AxisSharding, ...]
    vocabulary: AxisSharding

    @property
    def token_names(self) -> tuple[str, ...]:
        """Names the mesh axes of the tokens."""
        return tuple(name for sharding in self.tokens for name in sharding.names)


def decide(
    rules: Rules, operands: Mapping[str, Aval | jax.Array], device: Device, *, for_gradient: bool = False
) -> Decision:
    """Decides whether a kernel multiplies hidden states and weight; only shapes and dtypes of the operands are read.

    Without the kernel losses are computed in chunks of tokens. Gradients are in either case.
    """
    # Pallas takes longer to import than JAX itself, and only a lowering for CUDA needs it.
    from pallas_kernels.linear_cross_entropy import dispatch

    problem, unread = _problem(rules, operands), [name for name in operands if name not in _READ]
    why_not = {
        "implementation='xla'": rules.implementation == "xla",
        "chunk_size is given": rules.chunk_size is not None and not for_gradient,
        "the kernel takes no bias": "bias" in operands,
        "the kernel takes no mask": "where" in operands,
        "the kernel takes a scale that is a positive number": "scale" in operands,
        "the kernel takes a soft cap that is a constant": "cap" in operands,
        "the kernel does not smooth labels": rules.smoothing != 0,
        "the kernel has no precision to choose": rules.precision is not None,
        "the gradient of entropies needs logits": COTANGENT + "entropy" in operands,
        f"the kernel does not read {', '.join(unread)}": bool(unread),
        "the kernel is compiled for fixed shapes": not all(
            isinstance(n, int) for n in (problem.tokens, problem.embedding, problem.vocabulary)
        ),
    }
    refused = next((reason for reason, holds in why_not.items() if holds), None)
    return dispatch.decide(problem, device, refused=refused, named=rules.implementation == "mosaic_gpu")


def _problem(rules: Rules, operands: Mapping[str, Aval | jax.Array], weights: Stored = None) -> Any:
    """Describes to the kernel a call on operands with any number of token axes."""
    from pallas_kernels.linear_cross_entropy.forward import Problem

    *tokens, embedding = operands["hidden"].shape
    return Problem(
        tokens=math.prod(tokens),
        embedding=embedding,
        vocabulary=rules.vocabulary(operands["weight"].shape),
        dtype=jnp.dtype(operands["hidden"].dtype),
        transposed=rules.transposed,
        scale=rules.scale,
        soft_cap=rules.soft_cap,
        entropy="entropy" in rules.results and weights is None,
        weights=weights,
    )


def _launch(rules: Rules, operands: Operands, local: jax.Array, weights: Stored = None, **given: jax.Array) -> Any:
    from pallas_kernels.linear_cross_entropy import dispatch, forward

    problem = _problem(rules, operands, weights)
    config = dispatch.config(problem, hardware.current())
    return forward.launch(problem, config, operands["hidden"], operands["weight"], local, **given)


def row_terms(rules: Rules, operands: Operands, local: jax.Array) -> Operands:
    """Returns the terms of the losses; `local` are the labels among this device's columns."""
    out = _launch(rules, operands, local)
    terms = {"max": out.max, "sum": out.sum, "label": out.label}
    if out.entropy_sum is not None:
        terms["entropy_sum"] = jnp.where(out.sum == 0, 0.0, out.entropy_sum - out.max * out.sum)
    return _neutral(rules, operands, terms)


def _neutral(rules: Rules, operands: Operands, terms: Operands) -> Operands:
    """Gives tokens that are ignored the terms of an empty row."""
    if rules.all_rows:
        return terms
    ignored = operands["labels"] == IGNORED
    of_none = {"max": 0.0, "sum": 1.0, "label": 0.0}
    return {name: jnp.where(ignored, of_none[name], x) if name in of_none else x for name, x in terms.items()}


class Weights(NamedTuple):
    """Holds the weights of a chunk's logits, times the slope of the soft cap, as the kernel stores the weights.

    Each is relative to `exp` of its row's number in its tile of columns; those of a row are one number if `are_rows`.
    """

    of_columns: jax.Array  # padded
    relative_to: jax.Array  # [tiles, tokens], with the tokens padded
    are_rows: jax.Array  # a truth value
    label: jax.Array  # the logit of the label


def terms_and_weights(rules: Rules, operands: Operands, local: jax.Array) -> tuple[Operands, Weights]:
    """Returns the terms of the losses, and the weights of the logits in 16 bits, of which the gradient is made.

    Rows whose sum is within reach of an estimate need no maximum: bfloat16 has the exponents of float32. If the
    estimate of any row is too far off, the kernel runs again, and computes the maxima of tiles.
    """
    if operands["hidden"].dtype != jnp.bfloat16:
        out = _launch(rules, operands, local, "tiles")
        terms, relative_to, are_rows = (out.max, out.sum, out.label), out.maxima, jnp.bool_(False)
    else:
        estimate = _estimate(rules, operands)
        first = _launch(rules, operands, local, "rows", references=estimate)
        distance = jnp.log(first.sum)
        are_rows = (jnp.abs(distance) <= _REACH).all()
        out = _launch(rules, operands, local, "tiles", needed=~are_rows, place=first.weights)
        # The sum is relative to an estimate, so report (logsumexp, 1).
        of_rows = estimate + distance, jnp.ones_like(first.sum), first.label
        of_tiles = out.max, out.sum, out.label
        terms = tuple(jnp.where(are_rows, x, y) for x, y in zip(of_rows, of_tiles, strict=True))
        padded = jnp.pad(estimate, (0, out.maxima.shape[1] - len(estimate)))
        relative_to = jnp.where(are_rows, padded[None], out.maxima)
    weights = Weights(out.weights, relative_to, are_rows, terms[2])
    return _neutral(rules, operands, dict(zip(("max", "sum", "label"), terms, strict=True))), weights


def _estimate(rules: Rules, operands: Operands) -> jax.Array:
    """Estimates each row's logsumexp from 256 or more evenly spaced columns."""
    axis = rules.axes("weight").index("v")
    vocabulary = operands["weight"].shape[axis]
    few = jax.lax.slice_in_dim(operands["weight"], 0, vocabulary, max(vocabulary // _ESTIMATED_FROM, 1), axis)
    dims = ((1,), (1 - axis,)), ((), ())
    x = jax.lax.dot_general(operands["hidden"], few, dims, preferred_element_type=jnp.float32)
    z = reference.logits(x, rules.scale, rules.soft_cap)
    return jax.nn.logsumexp(z, axis=1) + math.log(vocabulary / z.shape[1])


def slopes(
    rules: Rules,
    weights: Weights,
    state: Stats,
    prob_factor: jax.Array,
    label_factor: jax.Array,
    local: jax.Array,
    exists: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns `(prob_factor * p - label_factor * [column == label]) * dz/dx` as an array and its rows' factors.

    The array takes the place of the weights, and is padded like them. A row that does not exist has a factor of 0, or
    zeros. All but `weights` have the shape `[tokens]`; a label in none of the columns is negative.
    """
    from pallas_kernels.linear_cross_entropy import forward, gradient

    missing = len(weights.of_columns) - len(prob_factor)
    padded = lambda x: jnp.pad(x, (0, missing))
    lse = log_normalizer(state)
    slope_of_cap = 1.0 if rules.soft_cap is None else 1.0 - jnp.square(weights.label / rules.soft_cap)
    of_label = jnp.where(exists, rules.scale * label_factor * slope_of_cap, 0.0)

    estimate = weights.relative_to[0, : len(prob_factor)]
    is_multiple = (jnp.abs(estimate - lse) <= _REACH) & (jnp.abs(label_factor) <= _MOST * jnp.abs(prob_factor))
    as_it_is = weights.are_rows & (is_multiple | ~exists).all()
    factor = jnp.where(exists & (prob_factor != 0), rules.scale * prob_factor * decay(estimate, lse), 0.0)
    has_label = as_it_is & (factor != 0) & (local >= 0)
    at = jnp.arange(len(local)), jnp.where(has_label, local, weights.of_columns.shape[1])
    of_p_label = decay(weights.label, estimate) * slope_of_cap
    exact = of_p_label - of_label / jnp.where(factor == 0, 1.0, factor)
    # The label's entry dominates; its rounding error is moved into the row's factor. XLA would drop a conversion to 16
    # bits and back.
    rounded = jax.lax.reduce_precision(exact, exponent_bits=8, mantissa_bits=7)
    x = weights.of_columns.at[at].set(rounded.astype(weights.of_columns.dtype), mode="drop", unique_indices=True)
    factor = jnp.where(has_label & (rounded != 0), factor * (exact / rounded), factor)

    of_tiles = padded(rules.scale * prob_factor / state.sum)[None] * decay(weights.relative_to, padded(state.max)[None])
    of_tiles = jnp.where(padded(exists)[None], of_tiles, 0.0)
    columns = forward.Config().columns
    g = gradient.run(~as_it_is, x, of_tiles, padded(of_label), padded(local), columns=columns)
    return g, jnp.where(as_it_is, factor, 1.0)
