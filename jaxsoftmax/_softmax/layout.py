"""The layout of operands for row kernels: `[rows, cols]`, or `[rows, cols, inner]`, and the form of the mask.

A row's numbers are `[rows]`, or `[rows, inner]`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.lowering import Plan
from pallas_kernels.hardware import Device
from pallas_kernels.softmax.problem import Op, Problem

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class View:
    """How operands of the broadcast shape `shape` become rows; `order` is None if a reshape suffices."""

    shape: Shape
    axes: Shape
    order: Shape | None
    rows: int
    cols: int
    inner: int

    def to_rows(self, x: jax.Array) -> jax.Array:
        """Lays out an operand for the kernel."""
        x = jnp.broadcast_to(x, self.shape)
        x = x if self.order is None else x.transpose(self.order)
        return x.reshape((self.rows, self.cols) if self.inner == 1 else (self.rows, self.cols, self.inner))

    def to_numbers(self, x: jax.Array) -> jax.Array:
        """Lays out an operand of one number a row, with extent 1 along the axes."""
        x = jnp.broadcast_to(x, [1 if d in self.axes else n for d, n in enumerate(self.shape)])
        x = x if self.order is None else x.transpose(self.order)
        return x.reshape((self.rows,) if self.inner == 1 else (self.rows, self.inner))

    def shared_mask(self, where: jax.Array) -> jax.Array:
        """Lays out a mask that is the same for all rows as `[cols]`."""
        reduced = tuple(n if d in self.axes else 1 for d, n in enumerate(self.shape))
        return jnp.broadcast_to(where, reduced).reshape(self.cols)

    def from_rows(self, y: jax.Array) -> jax.Array:
        """Gives a kernel's output of the operands' size their shape."""
        if self.order is None:
            return y.reshape(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return y.reshape([self.shape[d] for d in self.order]).transpose(inverse)

    def from_numbers(self, y: jax.Array) -> jax.Array:
        """Gives a kernel's output of one number a row the operands' shape without the axes."""
        return y.reshape([n for d, n in enumerate(self.shape) if d not in self.axes])

    def from_kernel(self, y: jax.Array) -> jax.Array:
        """Gives any output of a kernel its shape."""
        return self.from_rows(y) if y.ndim == (2 if self.inner == 1 else 3) else self.from_numbers(y)


def launch(plan: Plan, *operands: jax.Array) -> Any:
    """Runs a plan's kernel on a call's operands."""
    problem, view = plan.decision.problem, plan.layout
    first, last = problem.operands, problem.operands + len(problem.op.row_operands)
    mask = view.shared_mask if problem.where == "shared" else view.to_rows
    rows, numbers = map(view.to_rows, operands[:first]), map(view.to_numbers, operands[first:last])
    return jax.tree.map(view.from_kernel, plan.launch(*rows, *numbers, *map(mask, operands[last:])))


def view(shape: Shape, axes: Shape, *, transpose: bool = False) -> View:
    """The view of rows along `axes`. It transposes if other axes lie between them, or if asked to."""
    significant = [d for d, n in enumerate(shape) if n != 1]
    reduced = [d for d in significant if d in axes]
    kept = [d for d in significant if d not in axes]
    cols = math.prod(shape[d] for d in reduced)
    outer = [d for d in kept if not reduced or d < reduced[0]]
    inner = [d for d in kept if reduced and d > reduced[-1]]
    if len(outer) + len(inner) < len(kept) or (transpose and inner):
        order = tuple(d for d in range(len(shape)) if d not in axes) + axes
        return View(shape, axes, order, math.prod(shape[d] for d in kept), cols, 1)
    return View(shape, axes, None, math.prod(shape[d] for d in outer), cols, math.prod(shape[d] for d in inner))


def mask_forms(where: Shape | None, seen: View) -> list[str]:
    """The forms in which a kernel can take a mask, cheapest first."""
    if where is None:
        return ["none"]
    one_for_all = all(n == 1 for d, n in enumerate(where) if d not in seen.axes)
    return ["shared", "full"] if one_for_all and seen.inner == 1 and seen.rows > 1 else ["full"]


def plan(
    op: Op,
    shapes: Sequence[Shape],
    dtype: jnp.dtype,
    device: Device,
    *,
    axes: Shape,
    may_transpose: bool = False,
    batch_invariant: bool = False,
    **facts: Any,
) -> Plan:
    """Asks `dispatch.decide` about each layout of the call, cheapest first, and takes the first that has a kernel.

    `facts` are fields of a `Problem`.

    Rows along inner axes are transposed only if `may_transpose`, because two copies cost more than XLA's strided reads,
    or if `batch_invariant`, because XLA's sums depend on the number of rows.
    """
    # Pallas takes longer to import than JAX itself, and only a lowering for CUDA needs it.
    from pallas_kernels.softmax import dispatch

    if not all(isinstance(n, int) and n > 0 for shape in shapes for n in shape):
        return Plan((("every kernel", "is compiled for fixed, non-empty shapes, and a dimension is symbolic or zero"),))
    shape = tuple(jnp.broadcast_shapes(*shapes))
    full = 2 if op.is_linear else 1
    unmasked = full + len(op.row_operands)
    where = shapes[unmasked] if len(shapes) > unmasked else None
    declined: tuple[tuple[str, str], ...] = ()
    for transpose in (False, True) if may_transpose or batch_invariant else (False,):
        seen = view(shape, axes, transpose=transpose)
        for form in mask_forms(where, seen):
            problem = Problem(
                op, seen.rows, seen.cols, jnp.dtype(dtype), seen.inner, form, batch_invariant=batch_invariant, **facts
            )
            decision = dispatch.decide(problem, device)
            if decision.kernel is not None:
                return Plan(decision.declined, decision, seen, _notes(shapes[:full], where, seen, form))
            declined = declined or decision.declined
    return Plan(declined)


def _notes(full: Sequence[Shape], where: Shape | None, seen: View, form: str) -> tuple[str, ...]:
    """Describes the work before and after the kernel, beyond a reshape, on large operands and on a mask."""
    notes: list[str] = []
    if seen.order is not None:
        notes.append(f"operands are transposed by {seen.order} into rows, and the result back: two extra copies")
    if where is not None and form == "full" and where != seen.shape:
        notes.append(f"where, of shape {where}, is broadcast to {seen.shape}")
    notes += [f"an operand of shape {s} is broadcast to {seen.shape}" for s in full if s != seen.shape]
    return tuple(notes)
