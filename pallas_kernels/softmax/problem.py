"""Describes a kernel's task by static facts alone, and says which operations are the derivatives of which.

`decide` needs no array and no device for it.
"""

import dataclasses
import enum
from typing import Literal, NamedTuple

import jax.numpy as jnp

IGNORED = -1  # the label of a row that is ignored, and not read


class Op(enum.StrEnum):
    """The operations that have kernels; each has the function of the same name in `reference`."""

    SOFTMAX = "softmax"
    LOG_SOFTMAX = "log_softmax"
    STATS = "stats"
    SOFTMAX_TANGENT = "softmax_tangent"
    LOG_SOFTMAX_TANGENT = "log_softmax_tangent"
    LOG_SOFTMAX_COTANGENT = "log_softmax_cotangent"
    CROSS_ENTROPY = "cross_entropy"
    CROSS_ENTROPY_GRADIENT = "cross_entropy_gradient"
    CROSS_ENTROPY_COTANGENT = "cross_entropy_cotangent"

    @property
    def streams(self) -> int:
        """Arrays of the rows' size that the operation must read or write at least once."""
        one, three = ("stats", "cross_entropy"), ("softmax_tangent", "log_softmax_tangent", "log_softmax_cotangent")
        return 1 if self.value in one else 3 if self.value in three else 2

    @property
    def is_linear(self) -> bool:
        """Says whether the operands are a residual and a (co)tangent."""
        return self.streams == 3

    @property
    def is_log_softmax(self) -> bool:
        """Says whether it is log_softmax or one of its derivatives."""
        return self.value.startswith("log_softmax")

    @property
    def row_operands(self) -> tuple[str, ...]:
        """The operands with one value for each row, which follow the others: int32 labels, and float32."""
        return {
            "cross_entropy": ("labels",),
            "cross_entropy_gradient": ("labels", "weights"),
            "cross_entropy_cotangent": ("labels", "weights", "prob_factor", "max", "sum", "count"),
        }.get(self.value, ())

    @property
    def has_labels(self) -> bool:
        return bool(self.row_operands)

    @property
    def gives_rows(self) -> bool:
        """Says whether a result has the rows' size."""
        return self.streams > 1

    @property
    def gives_stats(self) -> bool:
        """Says whether the rows' statistics are results: they are the last ones, each with one value for each row."""
        return self.value == "stats" or (self.has_labels and not self.takes_stats)

    @property
    def takes_stats(self) -> bool:
        """Says whether the rows' statistics are operands, so that a kernel reduces nothing."""
        return "max" in self.row_operands


class Rule(NamedTuple):
    """`tangent(residual, t)` is `J t` and `cotangent(residual, t)` is `J^T t`; the residual is the row op's x or y."""

    residual: Literal["input", "output"]
    tangent: Op
    cotangent: Op


RULES = {
    Op.SOFTMAX: Rule("output", Op.SOFTMAX_TANGENT, Op.SOFTMAX_TANGENT),
    Op.LOG_SOFTMAX: Rule("input", Op.LOG_SOFTMAX_TANGENT, Op.LOG_SOFTMAX_COTANGENT),
}

TRANSPOSE = {rule.tangent: rule.cotangent for rule in RULES.values()} | {
    rule.cotangent: rule.tangent for rule in RULES.values()
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Rows of `cols` elements, `inner` elements apart: the operand seen as `[rows, cols, inner]`, row-major.

    `where` says how a mask comes: "none", "full" (of the operand's shape) or "shared" (`[cols]`, for all rows).
    Three that follow `scale` are the cross entropy's: its logits are `soft_cap * tanh(scale * x / soft_cap)`.
    `batch_invariant`: what is chosen for a row, and so its result, may not depend on `rows`.
    """

    op: Op
    rows: int
    cols: int
    dtype: jnp.dtype
    inner: int = 1
    where: str = "none"
    scale: float = 1.0
    soft_cap: float | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    batch_invariant: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.cols * self.inner

    @property
    def operands(self) -> int:
        """Arrays of the rows' size that are read."""
        return 2 if self.op.is_linear else 1

    @property
    def unit(self) -> float:
        """The positive unit in which kernels express logits: they multiply differences and results by it.

        Scaled first, a logit could fail to cancel with the maximum: the product is rounded in the maximum, but the
        compiler may contract it with the subtraction elsewhere.
        """
        return abs(self.scale) if self.soft_cap is None else self.soft_cap

    @property
    def max_vectors(self) -> int:
        """The most 16-byte vectors that a row can touch, whatever its alignment."""
        v = 16 // self.dtype.itemsize
        return self.cols // v if self.cols % v == 0 else (self.cols + 2 * v - 2) // v

    @property
    def least_bytes(self) -> int:
        """The least traffic that any kernel has: each stream once, and the mask's bytes."""
        mask = {"none": 0, "full": self.elements, "shared": self.cols}[self.where]
        return self.op.streams * self.elements * self.dtype.itemsize + mask
