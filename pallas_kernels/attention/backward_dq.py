"""How a warpgroup's piece of dQ leaves: added in device memory, in float32, or written in 16 bits by the last to come.

The last one fetches the sum of the others from the cache, adds its own part in registers and writes the gradient where
the caller wants it: nothing is zero before, nothing is converted after, and nobody sums where nobody else adds.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import emit
from pallas_kernels.attention import backward_turns, fragments
from pallas_kernels.attention.backward_blocks import Block, Step
from pallas_kernels.attention.configs import WARPGROUP_ROWS, AnyBackwardConfig, BackwardConfig
from pallas_kernels.attention.memory import tiled
from pallas_kernels.attention.problem import Attention


class Piece(NamedTuple):
    """A square of dQ that a warpgroup multiplies: of the step's queries and of the columns, which ones."""

    block: Block
    step: Step
    warpgroup: jax.Array
    row_i: jax.Array
    column_i: jax.Array

    @property
    def rows(self) -> Any:
        return pl.ds(self.step.i * self.block.config.block_q + self.row_i * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @property
    def columns(self) -> Any:
        return pl.ds(self.column_i * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @property
    def sum_gmem(self) -> Any:
        """Where the blocks of keys add their parts."""
        down = self.step.i * (self.block.config.block_q // WARPGROUP_ROWS) + self.row_i
        return self.block.refs.dq_sum.at[self.block.batch, self.step.head, down, self.column_i]

    @property
    def sum_smem(self) -> Any:
        """What is on its way there, or from there."""
        return self.block.refs.dq_smem.at[self.warpgroup]


def scratch(problem: Attention, config: BackwardConfig) -> dict[str, Any]:
    """What the pieces have in shared memory, by name."""
    shape = config.warpgroups, WARPGROUP_ROWS, WARPGROUP_ROWS
    found: dict[str, Any] = {}
    if config.turns or not config.last_writes:
        found |= dict(dq_smem=plgpu.SMEM((config.warpgroups, *fragments.SHAPE), jnp.float32))
    if config.last_writes:
        found |= dict(d_query_smem=tiled(shape, problem.dtype))
        if config.turns:
            found |= dict(dq_full=plgpu.Barrier(num_barriers=config.warpgroups))
    return found


def sums_shape(config: AnyBackwardConfig, rows: int, columns: int) -> tuple[int, ...]:
    """Of a head's sums in device memory."""
    if not config.by_registers:
        return rows, columns
    return rows // WARPGROUP_ROWS, columns // WARPGROUP_ROWS, *fragments.SHAPE


def fetch(piece: Piece, ended: jax.Array) -> None:
    """Asks for the others' sum if this is the last turn and not the only one; `ended`: how many had when last asked."""
    block, step, warpgroup = piece.block, piece.step, piece.warpgroup
    before = backward_turns.before(block, step.i)

    @pl.when(backward_turns.is_last(block, step.i) & (before > 0))
    def _():
        backward_turns.wait(block, step, warpgroup, before, ended)
        # Their parts are where copies read: only the counter, which is no copy, needs a fence.
        _fence_copies()
        plgpu.copy_gmem_to_smem(piece.sum_gmem, piece.sum_smem, block.refs.dq_full.at[warpgroup])


def by_warps(problem: Attention, config: BackwardConfig) -> bool:
    """Whether each warp sends its own part, and waits for nobody.

    Where the warpgroup sends something else as well, a bias' gradient, its warps wait for each other anyway.
    """
    return not config.turns and not problem.bias_gradient


def await_place(problem: Attention, config: BackwardConfig) -> None:
    """Waits until the last part that was sent may be stored over."""
    if by_warps(problem, config):
        fragments.await_read()
    elif not config.turns:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def leave(piece: Piece, part: jax.Array, before: Any, ended: jax.Array | None) -> None:
    """Sends `part` on its way; `before`: how many add before, where it is known already, if there are turns."""
    block, step = piece.block, piece.step
    if not block.config.last_writes:
        return _add(piece, part, before, ended)
    if ended is None:
        return _write(piece, part)
    last = backward_turns.is_last(block, step.i)

    @pl.when(last)
    def _():
        def with_others(part: jax.Array) -> jax.Array:
            plgpu.barrier_wait(block.refs.dq_full.at[piece.warpgroup])
            return part + fragments.load(piece.sum_smem)

        _write(piece, lax.cond(backward_turns.before(block, step.i) > 0, with_others, lambda part: part, part))

    pl.when(jnp.logical_not(last))(lambda: _add(piece, part, before, ended))


def _add(piece: Piece, part: jax.Array, before: Any, ended: jax.Array | None) -> None:
    """Adds `part` to the others', in its turn if there are turns."""
    block, step = piece.block, piece.step
    fragments.store(piece.sum_smem, part)
    if by_warps(block.problem, block.config):
        return fragments.add(piece.sum_smem, piece.sum_gmem)
    plgpu.commit_smem()
    if ended is not None:
        before = backward_turns.before(block, step.i) if before is None else before
        backward_turns.wait(block, step, piece.warpgroup, before, ended)
    backward_turns.add(block, piece.sum_smem, piece.sum_gmem, before)


def _write(piece: Piece, total: jax.Array) -> None:
    """Writes the gradient."""
    block, d_query_smem = piece.block, piece.block.refs.d_query_smem.at[piece.warpgroup]
    d_query_smem[...] = (total * block.problem.scale).astype(block.problem.dtype)
    plgpu.commit_smem()
    target = block.refs.d_query.at[block.batch, piece.rows, piece.step.head, piece.columns]
    plgpu.copy_smem_to_gmem(d_query_smem, target)


def _fence_copies() -> None:
    """Orders what this thread has read before what it tells the copy engine to read."""

    def fence_copies(ctx):
        emit.ptx("fence.proxy.async.global;", "~{memory}", [])

    plgpu.inline_mgpu()(fence_copies)()
