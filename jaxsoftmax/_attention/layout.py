"""The layout of attention's operands for kernels: it follows from the table `OPERANDS`.

Kernels have one batch axis and one axis of heads. Leading axes become the batch. Axes along which keys and values are
shared (as when only the query is mapped) become more query heads to each key head instead, so that keys and values are
not copied. Head dimensions that are no multiple of 8 are padded with zeros.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.lowering import Plan
from jaxsoftmax._core.sharding import Shape
from pallas_kernels.attention.problem import DIFFERENTIABLE, OPERANDS, RANK, Op, Rules, problem_of
from pallas_kernels.hardware import Device

_DIM_MULTIPLE = 8  # a TMA copy needs rows of whole 16 bytes: 8 elements of 16 bits


QUERY_HEADS = {name: operand.axes.index("n") for name, operand in OPERANDS.items() if "n" in operand.axes}


def kernel_gradients(names: Collection[str], wanted: Collection[str]) -> list[str]:
    """Names the operands whose gradients the backward kernel returns, in its order."""
    return [n for n in DIFFERENTIABLE if n in wanted or (n in names and not OPERANDS[n].gradient_on_request)]


@dataclasses.dataclass(frozen=True)
class KernelLayout:
    """Leading extents, which of their axes are folded into the heads, and the heads before that."""

    full: Shape
    grouped: Shape
    heads: int
    key_heads: int
    widths: tuple[int, int]  # of a head of query and key, and of value and output

    @property
    def batch_axes(self) -> Shape:
        return tuple(d for d in range(len(self.full)) if d not in self.grouped)

    @property
    def batch(self) -> int:
        return math.prod(self.full[d] for d in self.batch_axes)

    @property
    def all_heads(self) -> int:
        return self.heads * math.prod(self.full[d] for d in self.grouped)

    def kernel_shape(self, kind: str, shape: Shape) -> Any:
        """The shape in which the kernel takes an operand."""
        lead, core = self._broadcast(kind, shape)
        batch = math.prod(lead[d] for d in self.batch_axes)
        if kind in QUERY_HEADS:
            copies = math.prod(lead[d] for d in self.grouped)
            core = (*core[: QUERY_HEADS[kind]], core[QUERY_HEADS[kind]] * copies, *core[QUERY_HEADS[kind] + 1 :])
        return (batch, *core)

    def to_kernel(self, kind: str, x: jax.Array) -> jax.Array:
        """Lays out an operand for the kernel."""
        lead, core = self._broadcast(kind, x.shape)
        x = jnp.broadcast_to(x, (*lead, *core))
        if kind in QUERY_HEADS:
            x = self._split(kind, x).transpose(self._order(kind))
        x = x.reshape(self.kernel_shape(kind, (*lead, *core)))
        operand = OPERANDS[kind]
        x = x if operand.dtype is None else x.astype(operand.dtype)
        x = x if operand.has_batch else x.reshape(x.shape[1:])
        short = -x.shape[-1] % _DIM_MULTIPLE if operand.is_padded else 0
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x

    def from_kernel(self, kind: str, x: jax.Array) -> jax.Array:
        """Unfolds a result of the kernel; the leading axes that the kernel has summed have extent 1."""
        operand = OPERANDS[kind]
        x = x if operand.has_batch else x[None]
        x = x[..., : self.widths[operand.axes[-1] == "d"]] if operand.is_padded else x
        batch = [self.full[d] if x.shape[0] == self.batch else 1 for d in self.batch_axes]
        if kind not in QUERY_HEADS:
            return jnp.expand_dims(x.reshape(*batch, *x.shape[1:]), self.grouped)
        at = 1 + QUERY_HEADS[kind]
        one = x.shape[at] != self.all_heads
        copies = [1 if one else self.full[d] for d in self.grouped]
        parts = (1, *copies, 1) if one else (self.key_heads, *copies, self.heads // self.key_heads)
        x = x.reshape(*batch, *x.shape[1:at], *parts, *x.shape[at + 1 :])
        order = self._order(kind)
        x = x.transpose(sorted(range(len(order)), key=order.__getitem__))
        heads = len(self.full) + QUERY_HEADS[kind]
        return x.reshape(*x.shape[:heads], x.shape[heads] * x.shape[heads + 1], *x.shape[heads + 2 :])

    def _broadcast(self, kind: str, shape: Shape) -> tuple[Shape, Shape]:
        """Gives the leading and the last extents of an operand in the kernel; a mask keeps extents of 1 if it can."""
        rank = len(self.full)
        lead, core = list(shape[:rank]), list(shape[rank:])
        may_stay = OPERANDS[kind].broadcasts
        if not may_stay or any(lead[d] != 1 for d in self.batch_axes):
            for d in self.batch_axes:
                lead[d] = self.full[d]
        if kind in QUERY_HEADS and (
            not may_stay or core[QUERY_HEADS[kind]] != 1 or any(lead[d] != 1 for d in self.grouped)
        ):
            core[QUERY_HEADS[kind]] = self.heads
            for d in self.grouped:
                lead[d] = self.full[d]
        return tuple(lead), tuple(core)

    def _split(self, kind: str, x: jax.Array) -> jax.Array:
        at = len(self.full) + QUERY_HEADS[kind]
        parts = (1, 1) if x.shape[at] != self.heads else (self.key_heads, self.heads // self.key_heads)
        return x.reshape(*x.shape[:at], *parts, *x.shape[at + 1 :])

    def _order(self, kind: str) -> Shape:
        """Transposes `[*leading, ..., K, G, ...]` to `[*batch, ..., K, *grouped, G, ...]`."""
        rank, last = len(self.full), RANK[kind] + 1
        heads = rank + QUERY_HEADS[kind]
        before, after = range(rank, heads + 1), range(heads + 1, rank + last)
        return (*self.batch_axes, *before, *self.grouped, *after)


def fold(shapes: Mapping[str, Shape]) -> KernelLayout:
    """Returns the fold of operands of these shapes."""
    leads = {name: shape[: len(shape) - RANK[name]] for name, shape in shapes.items()}
    full = tuple(jnp.broadcast_shapes(*leads.values()))
    shared = [lead for name, lead in leads.items() if name not in QUERY_HEADS]
    grouped = tuple(d for d, n in enumerate(full) if n != 1 and all(lead[d] == 1 for lead in shared))
    widths = shapes["query"][-1], shapes["value"][-1]
    return KernelLayout(full, grouped, shapes["query"][-2], shapes["key"][-2], widths)


def plan(
    op: Op,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
    rules: Rules,
    device: Device,
    named: bool = False,
    **gradients: bool,
) -> Plan:
    """Asks `dispatch.decide` about the folded call."""
    # Pallas takes longer to import than JAX itself, and only a lowering for CUDA needs it.
    from pallas_kernels.attention import dispatch

    if not all(isinstance(n, int) and n > 0 for shape in shapes.values() for n in shape):
        return Plan(((str(op), "is compiled for fixed, non-empty shapes, and a dimension is symbolic or zero"),))
    folded = fold(shapes)
    for name, shape in shapes.items():
        if not OPERANDS[name].has_batch and any(shape[d] != 1 for d in folded.batch_axes):
            return Plan(((str(op), f"takes one set of {name}, and here they differ within the batch"),))
    found: dict[str, Any] = {name: folded.kernel_shape(name, shape) for name, shape in shapes.items()}
    in_kernel = {
        name: (*shape[:-1], shape[-1] + -shape[-1] % _DIM_MULTIPLE) if OPERANDS[name].is_padded else shape
        for name, shape in found.items()
    }
    problem = problem_of(op, in_kernel, dtypes, rules, **gradients)
    decision = dispatch.decide(problem, device, named=named)
    if decision.kernel is None:
        return Plan(decision.declined)
    return Plan(decision.declined, decision, folded, _notes(shapes, found))


def _notes(shapes: Mapping[str, Shape], found: Mapping[str, Shape]) -> tuple[str, ...]:
    """Describes the work on the operands before the kernel, beyond a reshape."""
    notes = [
        f"{name}, of shape {shape}, is copied to {found[name]}"
        for name, shape in shapes.items()
        if math.prod(found[name]) != math.prod(shape)
    ]
    padded = [n for n, shape in shapes.items() if n != "out" and OPERANDS[n].is_padded and shape[-1] % _DIM_MULTIPLE]
    if padded:
        notes.append(f"the heads of {', '.join(padded)} are padded to a multiple of {_DIM_MULTIPLE}")
    if "mask" in shapes:
        notes.append("the mask is packed in bits first, and the kernel skips tiles outside of those that it leaves")
    if "query_segments" in shapes:
        notes.append("which tiles have segments in common is found first, and the kernel skips the others")
    return tuple(notes)
