"""The arrays of a call and the static rules that it follows, named once for the references and the primitives."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Operands(NamedTuple):
    """The operands in the kernels' order, those that a call lacks None; `problem` gives their shapes.

    Here every operand may have any number of leading dimensions in place of the batch, the same number for all. They
    broadcast against each other: an extent of 1 is read again and again, never copied.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    query_segments: Any = None
    key_segments: Any = None
    sinks: Any = None

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name, x in zip(self._fields, self, strict=True) if x is not None)


# The dimensions that follow the leading ones.
RANK = dict(
    query=3, key=3, value=3, bias=3, mask=3, query_lengths=0, key_lengths=0, query_segments=1, key_segments=1, sinks=1
) | dict(out=3, lse=2)

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is static of a call; `problem.Attention` says what the fields mean.

    `precision` is of the matrix products in the references, in JAX's terms; None: as exact as the dtype. `is_local`
    says that one device holds the operands, so that the references may mix heads that a partitioner keeps apart.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    causal_offset: int | None = None
    window: tuple[int | None, int | None] = (None, None)
    window_offset: int = 0
    align_ends: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    precision: Any = None
    is_local: bool = False


def leading(x: Any, name: str) -> tuple[int, ...]:
    """The leading extents of an operand."""
    return tuple(x.shape[: len(x.shape) - RANK[name]])


def all_leading(operands: Operands) -> tuple[int, ...]:
    """The leading extents that the operands broadcast to."""
    return jnp.broadcast_shapes(*(leading(getattr(operands, name), name) for name in operands.present))


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` summed along the axes in which `shape` has an extent of 1."""
    axes = tuple(d for d, (got, want) in enumerate(zip(x.shape, shape, strict=True)) if got != want)
    return x.sum(axes, keepdims=True) if axes else x
