"""What a kernel is asked to do: static facts only, so that deciding needs no array and no device."""

import dataclasses
import enum

import jax.numpy as jnp


class Op(enum.StrEnum):
    """The operations that have kernels; each has the function of the same name in `reference`."""

    SOFTMAX = "softmax"
    LOG_SOFTMAX = "log_softmax"
    STATS = "stats"
    SOFTMAX_TANGENT = "softmax_tangent"
    LOG_SOFTMAX_TANGENT = "log_softmax_tangent"
    LOG_SOFTMAX_COTANGENT = "log_softmax_cotangent"

    @property
    def streams(self) -> int:
        """Arrays of the rows' size that the operation must read or write at least once."""
        return {"softmax": 2, "log_softmax": 2, "stats": 1}.get(self.value, 3)

    @property
    def is_linear(self) -> bool:
        """Whether the operands are a residual and a (co)tangent."""
        return self.streams == 3


@dataclasses.dataclass(frozen=True)
class Problem:
    """Rows of `cols` elements, `inner` elements apart: the operand seen as `[rows, cols, inner]`, row-major.

    `where` says how a mask comes: "none", "full" (of the operand's shape) or "shared" (`[cols]`, for all rows).
    """

    op: Op
    rows: int
    cols: int
    dtype: jnp.dtype
    inner: int = 1
    where: str = "none"
    scale: float = 1.0

    @property
    def elements(self) -> int:
        return self.rows * self.cols * self.inner

    @property
    def operands(self) -> int:
        """Arrays of the rows' size that are read."""
        return 2 if self.op.is_linear else 1

    @property
    def max_vectors(self) -> int:
        """The most 16-byte vectors that a row can touch, whatever its alignment."""
        v = 16 // self.dtype.itemsize
        return self.cols // v if self.cols % v == 0 else (self.cols + 2 * v - 2) // v

    @property
    def least_bytes(self) -> int:
        """The traffic no kernel can go below: each stream once, and the mask's bytes."""
        mask = {"none": 0, "full": self.elements, "shared": self.cols}[self.where]
        return self.op.streams * self.elements * self.dtype.itemsize + mask
