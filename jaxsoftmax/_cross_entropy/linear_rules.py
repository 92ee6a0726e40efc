"""A call of `linear_cross_entropy` as it is traced: names and axes of the operands, options, and shardings."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jaxsoftmax._core.sharding import AxisSharding

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
