"""The kernels share this: a config, operands, results, the launch, and the reasons to decline a problem."""

import dataclasses
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.monoid import Stats
from pallas_kernels.mosaic import fast_math, ptx, reduce, row_scalars, vectors
from pallas_kernels.mosaic.ptx import Index
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.problem import IGNORED, Problem
from pallas_kernels.softmax.row_ops import LabelOperands, RowStats, Tiles

DTYPES = ("float16", "bfloat16", "float32")
# Scalars of replicated vectors ask for 16 bytes of scratch that nothing uses: no reduction crosses warps.
REDUCTION_SCRATCH = 16
_LEAST = 2.0**-100  # of a unit: what its exponential needs stays in float32's range
Scratch = Mapping[str, pl.MemoryRef | list[pl.MemoryRef]]  # shared memory by name
Results = jax.Array | Stats | tuple[jax.Array, ...]


class Config:
    """Checks its fields: some have the values that are `allowed`, the others are positive."""

    allowed: ClassVar[Mapping[str, Container[int]]] = {}

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value in self.allowed[name] if name in self.allowed else value > 0):
                raise ValueError(f"{name} cannot be {value!r} in {self}")


def unsupported_reason(problem: Problem, *, takes_stats: bool = False) -> str | None:
    """Says why no kernel takes the problem, unless one does that `takes_stats` of the rows as operands."""
    if problem.op not in row_ops.OPERATIONS:
        return f"the kernels have no {problem.op}"
    if problem.dtype.name not in DTYPES:
        return f"kernels take {', '.join(DTYPES)}; the input is {problem.dtype.name}"
    if problem.inner > 1:
        return f"rows must be contiguous; the reduced elements lie {problem.inner} apart"
    if not _LEAST <= abs(problem.scale) <= 1 / _LEAST:
        return f"kernels take a scale of 2^-100 to 2^100 in size; it is {problem.scale}"
    if problem.elements == 0:
        return "there is nothing to do"
    if problem.rows >= 2**31 - 1024:
        return f"{problem.rows} rows do not fit a grid of 2^31 blocks"
    if problem.cols >= 2**31 - 1024:
        return f"columns are counted in 32 bits; there are {problem.cols}"
    if problem.op.takes_stats and not takes_stats:
        return "it computes the rows' statistics, and here they are given"
    return _unsupported_loss(problem)


def _unsupported_loss(problem: Problem) -> str | None:
    """Says why no kernel takes what only the cross entropy has."""
    if not problem.op.has_labels:
        extras = {"a soft cap": problem.soft_cap, "label smoothing": problem.smoothing, "a z loss": problem.z_loss}
        asked = [name for name, value in extras.items() if value]
        return f"only the cross entropy has {' and '.join(asked)}" if asked else None
    if problem.soft_cap is not None and not _LEAST <= problem.soft_cap <= 1 / _LEAST:
        return f"kernels take a soft cap of 2^-100 to 2^100; it is {problem.soft_cap}"
    if problem.smoothing and problem.where != "none":
        return "kernels smooth labels over all columns, not over those that a mask holds"
    if problem.op.takes_stats and problem.soft_cap is None and math.frexp(problem.scale)[0] not in (0.5, -0.5):
        return f"a given maximum is exact for a scale that is a power of two; it is {problem.scale}"
    return None


@dataclasses.dataclass(frozen=True)
class Operands:
    """The references that one call has inside a kernel."""

    problem: Problem
    inputs: tuple[jax.Ref, ...]
    of_rows: tuple[jax.Ref, ...]  # as the operation's `row_operands` names them
    mask: jax.Ref | None
    outputs: tuple[jax.Ref, ...]

    @classmethod
    def of(cls, problem: Problem, refs: Sequence[jax.Ref]) -> "Operands":
        rest, parts = iter(refs), (problem.operands, len(problem.op.row_operands), problem.where != "none")
        inputs, of_rows, mask = (tuple(itertools.islice(rest, count)) for count in parts)
        return cls(problem, inputs, of_rows, mask[0] if mask else None, tuple(rest))

    def label(self, row: Index) -> Index:
        """Returns the row's label; operations without labels have 0, which is not ignored."""
        return self.of_rows[0][row] if self.of_rows else 0

    def label_operands(self, row: Index, tile: vectors.RegisterTile) -> LabelOperands | None:
        """Loads the per-row operands of the tile's rows; None for operations without labels."""
        if not self.of_rows:
            return None
        labels = row_scalars.load(self.of_rows[0], row, tile, fill=IGNORED)
        if not self.problem.op.gives_rows:
            return LabelOperands(labels)
        weights = row_scalars.load(self.of_rows[1], row, tile, fill=0)
        columns = labels
        if self.problem.op.takes_stats:
            columns = ptx.where(labels < self.problem.cols, labels, jnp.full_like(labels, IGNORED))
        logits = self.soft_capped(self._scaled(row_scalars.load_element(self.inputs[0], row, columns, tile)))
        held = None if self.mask is None else row_scalars.load_element(self.mask, row, columns, tile)
        return LabelOperands(labels, weights, logits, held, columns)

    def given_stats(self, label_operands: LabelOperands | None, row: Index, tile: vectors.RegisterTile) -> RowStats:
        """Loads the statistics of the tile's rows, where they are operands."""
        assert label_operands is not None
        rest = [row_scalars.load(ref, row, tile, fill=0) for ref in self.of_rows[2:]]
        return row_ops.given(self.problem, label_operands, rest)

    def _scaled(self, x: jax.Array) -> jax.Array:
        """Scales float32 values to logits in their unit, or to the argument of `soft_capped`."""
        scale, cap = self.problem.scale, self.problem.soft_cap
        factor = math.copysign(1.0, scale) if cap is None else scale / cap
        return x if factor == 1.0 else x * factor

    def soft_capped(self, x: jax.Array) -> jax.Array:
        """Applies the soft cap, if there is one; the result is in the logits' unit."""
        return x if self.problem.soft_cap is None else fast_math.tanh_for(self.problem.dtype)(x)

    def in_float32(
        self,
        raw: Tiles,
        row: Index,
        first: Index,
        tile: vectors.RegisterTile,
        *,
        interior: bool = False,
        soft_capped: bool = True,
    ) -> Tiles:
        """Converts tiles to float32, logits to their unit, and masked logits to -inf.

        With smoothed labels, the unmasked logits follow, because their plain sum is needed too. `interior` says that
        the tile lies inside the row. Without `soft_capped` the logits keep their order, so that capping the greatest
        of them gives the maximum.
        """
        first_operand, *others = (x.astype(jnp.float32) for x in raw)
        if row_ops.has_max(self.problem.op):
            first_operand = self._scaled(first_operand)
            within = lambda z, other: vectors.select_inside(self.inputs[0].shape, row, first, tile, z, other)
            if self.problem.soft_cap is not None and soft_capped:
                first_operand = self.soft_capped(first_operand)
                first_operand = first_operand if interior else within(first_operand, -jnp.inf)
            if row_ops.has_total(self.problem):
                others.append(first_operand if interior else within(first_operand, 0.0))
            if self.mask is not None:
                first_operand = vectors.select_by_mask(
                    self.mask, self.problem.rows, row, first, tile, first_operand, -jnp.inf
                )
        return (first_operand, *others)

    def load_raw(
        self, row: Index, first: Index, tile: vectors.RegisterTile, label_operands: LabelOperands | None
    ) -> Tiles:
        """Loads the operands' tiles from global memory, unconverted."""
        oob_fill, labels = row_ops.oob_fill(self.problem), label_operands and label_operands.labels
        pairs = zip(self.inputs, oob_fill, strict=True)
        return tuple(vectors.load(ref, row, first, tile, fill=fill, labels=labels) for ref, fill in pairs)

    def load(self, row: Index, first: Index, tile: vectors.RegisterTile, label_operands: LabelOperands | None) -> Tiles:
        """Loads the operands' tiles from global memory and converts them with `in_float32`."""
        return self.in_float32(self.load_raw(row, first, tile, label_operands), row, first, tile)

    def store(
        self,
        tiles: Tiles,
        stats: RowStats,
        row: jax.Array,
        first: Index,
        tile: vectors.RegisterTile,
        *,
        interior: bool = False,
        evict_first: bool = False,
    ) -> None:
        """Writes the result of a tile."""
        problem = self.problem
        out = row_ops.result(row_ops.RowTile(problem, tiles, stats, tile.broadcast))
        if self.mask is not None:
            out = vectors.select_by_mask(
                self.mask, self.problem.rows, row, first, tile, out, row_ops.masked_output(problem.op)
            )
        vectors.store(
            self.outputs[0], row, first, out.astype(problem.dtype), tile, interior=interior, evict_first=evict_first
        )

    def store_at_labels(
        self,
        label_operands: LabelOperands | None,
        stats: RowStats,
        row: jax.Array,
        tile: vectors.RegisterTile,
        **slice_args: Any,
    ) -> None:
        """Overwrites the result at the labels, once it is written; `row_scalars.store_element` takes `slice_args`."""
        if label_operands is None:
            return
        value = row_ops.at_labels(self.problem, stats, label_operands, row_ops.exp_for(self.problem))
        value = value.astype(self.problem.dtype)
        assert label_operands.columns is not None
        row_scalars.store_element(self.outputs[0], row, label_operands.columns, value, tile, **slice_args)

    def store_stats(
        self, stats: RowStats, label_operands: LabelOperands | None, row: jax.Array, tile: vectors.RegisterTile
    ) -> None:
        """Writes the maximum and the sums of the rows that begin at `row`."""
        values = row_ops.unscale(self.problem, row_ops.neutral_if_ignored(stats, label_operands))
        for ref, value in zip(self.outputs[self.problem.op.gives_rows :], values, strict=True):
            row_scalars.store(ref, row, value, tile)


def allocated(scratch: Scratch) -> int:
    """Returns the bytes of shared memory that Mosaic allocates for a CTA: it rounds each array up to a KiB."""
    sizes = [math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in jax.tree.leaves(scratch)]
    return sum(-(-size // 1024) * 1024 for size in (*sizes, REDUCTION_SCRATCH))


def launch(
    problem: Problem,
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    grid: int,
    ctas: int = 1,
    warpgroups: int = 1,
    scratch: Scratch | None = None,
    workspaces: Sequence[jax.Array] = (),
) -> Results:
    """Runs `body(operands, *workspaces, **scratch)` over a grid of CTAs, or of clusters of `ctas` CTAs."""
    x = operands[0]
    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * problem.op.gives_rows
    if problem.op.gives_stats:
        out_type += [jax.ShapeDtypeStruct((problem.rows,), jnp.float32)] * row_ops.num_values(problem)
    if problem.where == "shared":
        operands = [*operands[:-1], operands[-1][None]]
    # Shared memory is laid out in the order of the names, which the pytree of a plain dictionary would sort.
    scratch_types, structure = jax.tree.flatten(OrderedDict(scratch or {}))
    counts = (len(operands), len(workspaces), len(out_type), len(scratch_types))
    axes: dict[str, Any] = {}
    if ctas > 1:
        axes |= {"cluster": (ctas,), "cluster_names": ("cta",)}
    if warpgroups > 1:
        axes |= {"num_threads": warpgroups, "thread_name": "warpgroup"}

    def kernel_body(*refs: jax.Ref) -> None:
        rest = iter(refs)
        inputs, shared, outputs, smem = (tuple(itertools.islice(rest, count)) for count in counts)
        body(Operands.of(problem, (*inputs, *outputs)), *shared, **jax.tree.unflatten(structure, smem))

    kernel = plgpu.kernel(
        kernel_body,
        out_type=out_type,
        grid=(grid,),
        grid_names=("rows",),
        scratch_types=scratch_types,
        kernel_name=f"{problem.op.value}_{name}",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=REDUCTION_SCRATCH,
            unsafe_no_auto_barriers=True,
        ),
        **axes,
    )
    if workspaces:
        out, _ = reduce.with_workspace(kernel, operands, workspaces, out_type)
    else:
        out = kernel(*operands)
    if problem.op.gives_rows:
        return tuple(out) if problem.op.gives_stats else out[0]
    return Stats(*out) if len(out) == 2 else tuple(out)
