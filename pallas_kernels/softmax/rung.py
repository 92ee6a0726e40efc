"""What every rung is made of, and what every rung does alike: operands, outputs, launch, and the reasons to decline."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import elementary, masks, mosaic, numbers
from pallas_kernels.hardware import Device
from pallas_kernels.monoid import Stats
from pallas_kernels.mosaic import Index
from pallas_kernels.problem import Op, Problem
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.row_ops import RowStats, Tiles

DTYPES = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Rung:
    """One algorithm of the ladder."""

    name: str
    unsupported: Callable[[Problem, Device], str | None]
    configs: Callable[[Problem, Device], tuple[Any, ...]]  # the heuristic's choice first
    run: Callable[..., jax.Array | Stats]  # run(problem, config, *operands)
    reads: int  # passes over each operand in device memory


def declines_any(problem: Problem) -> str | None:
    """Why no rung takes the problem."""
    if problem.dtype.name not in DTYPES:
        return f"kernels take {', '.join(DTYPES)}; the input is {problem.dtype.name}"
    if problem.inner > 1:
        return f"rows must be contiguous; the reduced elements lie {problem.inner} apart"
    if not math.isfinite(problem.scale) or problem.scale == 0:
        return f"kernels take a finite scale other than 0; it is {problem.scale}"
    if problem.rows >= 2**31 - 1024:
        return f"{problem.rows} rows do not fit a grid of 2^31 blocks"
    return None


@dataclasses.dataclass(frozen=True)
class Operands:
    """The references of one call inside a kernel."""

    problem: Problem
    inputs: tuple[jax.Ref, ...]
    mask: jax.Ref | None
    outputs: tuple[jax.Ref, ...]

    @classmethod
    def of(cls, problem: Problem, refs: Sequence[jax.Ref]) -> "Operands":
        count = problem.operands
        masked = problem.where != "none"
        return cls(problem, tuple(refs[:count]), refs[count] if masked else None, tuple(refs[count + masked :]))

    def in_float32(self, raw: Tiles, row: Index, first: Index, tile: mosaic.Tile) -> Tiles:
        """Tiles as the operation wants them: float32, the logits scaled, and -inf where the mask does not hold."""
        first_operand, *others = (x.astype(jnp.float32) for x in raw)
        if row_ops.has_max(self.problem.op):
            if self.problem.scale != 1.0:
                first_operand = first_operand * self.problem.scale
            if self.mask is not None:
                first_operand = masks.select(self.mask, self.problem.rows, row, first, tile, first_operand, -jnp.inf)
        return (first_operand, *others)

    def load(self, row: Index, first: Index, tile: mosaic.Tile) -> Tiles:
        """The operands' tiles from device memory."""
        fills = row_ops.fills(self.problem)
        raw = [mosaic.load(ref, row, first, tile, fill=fill) for ref, fill in zip(self.inputs, fills, strict=True)]
        return self.in_float32(tuple(raw), row, first, tile)

    def store(
        self,
        tiles: Tiles,
        stats: RowStats,
        row: jax.Array,
        first: Index,
        tile: mosaic.Tile,
        *,
        interior: bool = False,
        streams: bool = False,
    ) -> None:
        """Writes the result of a tile."""
        problem = self.problem
        out = row_ops.result(problem, tiles, stats, elementary.exp_for(problem.dtype), tile.broadcast)
        if self.mask is not None:
            out = masks.select(self.mask, self.problem.rows, row, first, tile, out, row_ops.outside(problem.op))
        mosaic.store(self.outputs[0], row, first, out.astype(problem.dtype), tile, interior=interior, streams=streams)

    def store_stats(self, stats: RowStats, row: jax.Array, tile: mosaic.Tile) -> None:
        """Writes the maximum and the sum of the rows that begin at `row`."""
        assert stats.max is not None
        for ref, value in zip(self.outputs, (stats.max, *stats.sums), strict=True):
            numbers.store(ref, row, value, tile)


def launch(
    problem: Problem,
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    grid: int,
    blocks: int = 1,
    warpgroups: int = 1,
    scratch: Sequence[Any] = (),
    shared: Sequence[jax.Ref] = (),
) -> jax.Array | Stats:
    """Runs `body(operands, *shared, *scratch)` over a grid of blocks, or of clusters of `blocks` blocks.

    `shared`: device memory through which blocks meet.
    """
    x = operands[0]
    stats = jax.ShapeDtypeStruct((problem.rows,), jnp.float32)
    out_type = (stats, stats) if problem.op is Op.STATS else (jax.ShapeDtypeStruct(x.shape, x.dtype),)
    if problem.where == "shared":
        operands = [*operands[:-1], operands[-1][None]]
    begin, end = len(operands), len(operands) + len(shared)
    scratch_begin = end + len(out_type)
    axes: dict[str, Any] = {}
    if blocks > 1:
        axes |= {"cluster": (blocks,), "cluster_names": ("block",)}
    if warpgroups > 1:
        axes |= {"num_threads": warpgroups, "thread_name": "warpgroup"}
    kernel = plgpu.kernel(
        lambda *refs: body(
            Operands.of(problem, (*refs[:begin], *refs[end:scratch_begin])), *refs[begin:end], *refs[scratch_begin:]
        ),
        out_type=out_type,
        grid=(grid,),
        grid_names=("rows",),
        scratch_types=list(scratch),
        kernel_name=f"{problem.op.value}_{name}",
        compiler_params=plgpu.CompilerParams(
            # Scalars of replicated vectors ask for 16 bytes of scratch that nothing uses: no reduction crosses warps.
            approx_math=True,
            reduction_scratch_bytes=16,
            unsafe_no_auto_barriers=True,
        ),
        **axes,
    )
    out = kernel(*operands, *shared)
    return Stats(*out) if problem.op is Op.STATS else out[0]
