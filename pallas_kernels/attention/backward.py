"""Flash attention, backward, in one pass: keys stay, queries stream past them, five matrix products to a tile.

Two warpgroups hold the gradients of 64 keys and values each in registers. The scores are computed transposed, so that
probabilities and score gradients leave the accumulators as left operands in registers. Only the score gradients go
through shared memory, where each warpgroup multiplies a part of dQ; TMA adds dQ to a float32 sum in global memory. If
dQ is ordered, the last tile of keys to add to a tile of dQ writes it. The next step's scores are issued beside this
step's dQ and dK, so that they are ready when its exponentials start.

There is no producer warpgroup: `pipeline` says how stages are refilled. A stage holds a step's queries, cotangents and
their statistics, and is released at the step's end. The pipeline runs on from one tile of keys to the next, whose
record the tile scheduler has published: a tile's last steps refill stages for the next tile, and its last product
releases its keys and values for those of the next one, which arrive during the epilogue.
Traffic: K, V, dK, dV once; for each tile of keys Q and dO are read and dQ is added to, mostly in L2.
Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hardware
from pallas_kernels.attention import backward_common, backward_xla, epilogue, gather, mask, tile_scheduler
from pallas_kernels.attention.backward_common import (
    Compare,
    Step,
    Tile,
    by_column,
    capped_bias,
    first_scores,
    probabilities,
    soft_capped,
)
from pallas_kernels.attention.backward_xla import CHUNK, padded_dims
from pallas_kernels.attention.problem import Attention, BackwardConfig, unsupported_reason
from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import pipeline, ptx, reduce, wgmma
from pallas_kernels.mosaic.pipeline import Scratch, Stages
from pallas_kernels.mosaic.ptx import WGMMA, Index
from pallas_kernels.mosaic.wgmma import panels, store, tiled

RECORD = 8  # integers of a tile's record
RING_ROWS = tile_scheduler.RECORDS * RECORD // 2  # of two integers, as a barrier has


def unsupported(problem: Attention, device: Device) -> str | None:
    """Says why the kernel does not take the problem."""
    if capped_bias(problem) and problem.widest <= 64:
        # 624 bytes a thread would spill, and the slope does not fit in shared memory.
        return "the kernel has no room for a bias beside a soft cap with heads up to 64"
    return unsupported_reason(problem, widest=128)


def scratch(problem: Attention, config: BackwardConfig) -> Scratch:
    """Lays out the shared memory of a CTA, by name."""
    (head_dim, value_dim), dtype = padded_dims(problem), problem.dtype
    w, block_q, stages = config.warpgroups, config.block_q, config.stages
    memory: Scratch = dict(
        key_smem=panels((w, CHUNK, head_dim), dtype),
        value_smem=panels((w, CHUNK, value_dim), dtype),
        query_smem=panels((stages, block_q, head_dim), dtype),
        d_out_smem=panels((stages, block_q, value_dim), dtype),
        statistics_smem=plgpu.SMEM((2 * stages, block_q), jnp.float32),
        ds_smem=panels((2, w, CHUNK, block_q), dtype),
        barrier_smem=pipeline.barriers(RING_ROWS + len(pipeline.arrivals(_stages(problem, config)))),
    )
    if config.ordered_dq or not (config.fused_dq_cast or config.dq_from_registers):
        memory["dq_smem"] = plgpu.SMEM((w, *wgmma.SQUARE), jnp.float32)
    if config.fused_dq_cast:
        memory["d_query_smem"] = panels((w, CHUNK, CHUNK), dtype)
        if config.ordered_dq:
            memory["dq_full"] = plgpu.Barrier(num_barriers=w)
    if config.bias_stages:
        memory["bias_smem"] = tiled((config.bias_stages, block_q, config.block_kv), problem.bias_dtype)
    if capped_bias(problem):
        memory["slope_smem"] = tiled((w, CHUNK, block_q), jnp.float32)
    return memory


def shared_bytes(problem: Attention, config: BackwardConfig) -> int:
    """Counts the bytes of the scratch."""
    return pipeline.scratch_bytes(scratch(problem, config))


def _stages(problem: Attention, config: BackwardConfig) -> dict[str, Stages]:
    """Returns the table of stages; where rows may have to be zeroed, they are copied to a `partial` stage first."""
    readers = ptx.WARPS * config.warpgroups
    return {
        "kv_stages": Stages(1, readers),
        "step_stages": Stages(config.stages, readers),
        "bias_stages": Stages(config.bias_stages, readers),
        "partial_step": Stages(config.stages * mask.may_see_nothing(problem)),
        "partial_kv": Stages(int(problem.key_lengths)),
    }


# Copies, each issued by one warp.


def _fill_keys(tile: Tile) -> None:
    """Copies a tile's keys and values; zeroes those past a sequence's end, which may be NaN."""
    config, refs = tile.config, tile.refs
    parts = []
    for i in range(config.warpgroups):
        at = tile.batch, pl.ds(tile.first_key + i * CHUNK, CHUNK), tile.source_head
        parts += [(refs.key, at, refs.key_smem.at[i]), (refs.value, at, refs.value_smem.at[i])]
    if not tile.problem.key_lengths:
        return refs.kv_stages.issue(0, *parts)
    left = tile.sequence.keys - tile.first_key

    @pipeline.when(left >= config.block_kv)
    def _():
        refs.kv_stages.issue(0, *parts)
        refs.partial_kv.expect(0, 0)  # a phase to each tile

    @pipeline.when(left < config.block_kv)
    def _():
        refs.partial_kv.issue(0, *parts)
        refs.partial_kv.wait(tile.t)
        for i in range(config.warpgroups):
            for to in (refs.key_smem.at[i], refs.value_smem.at[i]):
                pipeline.zero_rows(to, left - i * CHUNK)
        refs.kv_stages.expect(0, 0)


class _StageCoord(NamedTuple):
    """Says where a stage's copies come from. A negative batch means no stage, a negative `i` a stage without a step."""

    batch: Index
    head: Index
    i: Index  # tile of queries
    first_key: Index


def _stage_coord(tile: Tile, j: Index) -> _StageCoord:
    """Returns the coordinates of the tile's stage `j`."""
    h, i = 0, jnp.int32(j)
    if tile.group > 1:
        queries = lax.max(tile.span.end - tile.span.first, 1)
        h, i = lax.div(i, queries), lax.rem(i, queries)
    i = ptx.where(j < tile.steps, tile.visited(tile.span.first + i), -1)
    return _StageCoord(tile.batch, tile.key_head * tile.group + h, i, tile.first_key)


def _coord_after(tile: Tile, step: Step, stages: int) -> _StageCoord:
    """Returns the coordinates of the stage that is `stages` behind a step's, in the same tile."""
    head, i = step.head, step.visit + stages
    for _ in range(stages * (tile.group > 1)):
        wraps = (i >= tile.span.end).astype(jnp.int32)
        head, i = head + wraps, i - wraps * (tile.span.end - tile.span.first)
    return _StageCoord(tile.batch, head, tile.visited(i), tile.first_key)


def _coord_behind(tile: Tile, n: Index) -> _StageCoord:
    """Returns the coordinates of stage `n`, which is behind the tile's last step."""
    next_tile = tile.next_tile()
    coord, spare = _stage_coord(next_tile, n - next_tile.first_stage), n < next_tile.first_stage
    return coord._replace(batch=ptx.where(spare, 0, coord.batch), i=ptx.where(spare, -1, coord.i))


def _fill(tile: Tile, coord: _StageCoord, n: Index) -> None:
    """Fills stage `n`, in which there may be no step."""
    stage = tile.refs.step_stages.stage(n)
    pipeline.when((coord.batch >= 0) & (coord.i >= 0))(lambda: _fill_step(tile, coord, n))

    @pipeline.when((coord.batch >= 0) & (coord.i < 0))
    def _():
        tile.refs.step_stages.expect(stage, 0)
        if mask.may_see_nothing(tile.problem):
            tile.refs.partial_step.expect(stage, 0)


def _fill_step(tile: Tile, coord: _StageCoord, n: Index) -> None:
    """Copies a step's queries and cotangents, and their statistics; zeroes rows without a key, which may be NaN."""
    config, refs, (batch, head, i) = tile.config, tile.refs, coord[:3]
    stage, rows = refs.step_stages.stage(n), pl.ds(i * config.block_q, config.block_q)
    statistics = [
        (refs.lse, (batch, head, rows), refs.lse_smem.at[stage]),
        (refs.delta, (batch, head, rows), refs.delta_smem.at[stage]),
    ]
    factors = [(refs.query, refs.query_smem), (refs.d_out, refs.d_out_smem)]
    parts = [(source, (batch, rows, head), to.at[stage]) for source, to in factors]

    if not mask.may_see_nothing(tile.problem):
        return refs.step_stages.issue(stage, *parts, *statistics)
    nothing = refs.without_keys[batch, head, i] != 0

    @pipeline.when(nothing)
    def _():
        refs.partial_step.issue(stage, *parts)
        refs.partial_step.wait(n)
        for _, _, to in parts:
            backward_common.zero_rows(to, refs.lse.at[batch, head, rows])
        refs.step_stages.issue(stage, *statistics)

    @pipeline.when(~nothing)
    def _():
        refs.step_stages.issue(stage, *parts, *statistics)
        refs.partial_step.expect(stage, 0)  # a phase to each of the stage's


def _fill_bias(tile: Tile, coord: _StageCoord, n: Index) -> None:
    """Copies the bias of stage `n`: queries by keys, as it is in memory."""
    config, refs, (batch, head, i, first_key) = tile.config, tile.refs, coord
    stage = refs.bias_stages.stage(n)
    at = *gather.broadcast_index((batch, head), refs.bias.shape), pl.ds(i * config.block_q, config.block_q)
    part = refs.bias, (*at, pl.ds(first_key, config.block_kv)), refs.bias_smem.at[stage]
    pl.when((batch >= 0) & (i >= 0))(lambda: refs.bias_stages.issue(stage, part))
    pl.when((batch >= 0) & (i < 0))(lambda: refs.bias_stages.expect(stage, 0))


def _release_stage(tile: Tile, step: Step) -> jax.Array:
    """Releases a step's stage, and returns whether this warp refills it in a moment.

    A refill right after the release would let products wait for this warp, so that it comes in the next step. A tile's
    last stages get the next tile's copies at once: later no registers are left for another tile's coordinates.
    """
    stages = tile.refs.step_stages
    n, released = step.n + stages.count, stages.arrive(stages.stage(step.n))
    within = n < tile.first_stage + tile.steps

    @pl.when(~within)
    def _():
        pipeline.when(released)(lambda: _fill(tile, _coord_behind(tile, n), n))

    return released * within.astype(jnp.int32)


def _refill(tile: Tile, step: Step, released: jax.Array) -> None:
    """Refills the stage of the step before, if this warp was the last to release it."""
    stages = tile.config.stages - 1
    pipeline.when(released)(lambda: _fill_step(tile, _coord_after(tile, step, stages), step.n + stages))


def _release_bias(tile: Tile, step: Step) -> None:
    stages = tile.refs.bias_stages
    n = step.n + stages.count

    def refill() -> None:
        within = n < tile.first_stage + tile.steps
        here, behind = lambda: _coord_after(tile, step, stages.count), lambda: _coord_behind(tile, n)
        _fill_bias(tile, _StageCoord(*lax.cond(within, here, behind)), n)

    stages.release(stages.stage(step.n), refill)


def _drain_empty_stages(tile: Tile) -> None:
    """Passes the tile's stages in which there is no step."""
    refs = tile.refs

    def refill(stages: Stages, fill: Callable[[Tile, _StageCoord, Index], None], j: jax.Array) -> None:
        n = tile.first_stage + j + stages.count
        fill(tile, _coord_behind(tile, n), n)

    fills = (refs.step_stages, _fill), (refs.bias_stages, _fill_bias)
    passed = ((stages, functools.partial(refill, stages, fill)) for stages, fill in fills)
    pipeline.drain(tile.first_stage, tile.steps, tile.stages, *passed)


def _release_keys(tile: Tile) -> None:
    """Releases the tile's keys and values, for those of the next tile."""

    def refill() -> None:
        next_tile = tile.next_tile()
        pl.when(next_tile.batch >= 0)(lambda: _fill_keys(next_tile))

    tile.refs.kv_stages.release(0, refill)


# A tile of keys.


def _visit(tile: Tile, fetch: Callable[[], jax.Array]) -> jax.Array:
    """Computes a warpgroup's part of a tile: gradients of 64 keys and values; calls `fetch` before it writes them."""
    warpgroup, widths = lax.axis_index("warpgroup"), (tile.problem.head_dim, tile.problem.value_dim)
    zeros = (plgpu.layout_cast(jnp.zeros((CHUNK, columns), jnp.float32), WGMMA) for columns in widths)
    tile.refs.kv_stages.wait(tile.t)
    issue = lambda n: _issue_scores(tile, lax.rem(n, tile.config.stages))
    first = first_scores(tile, tile.refs.step_stages, issue) if tile.config.prefetch_scores else None
    _, _, (dk, dv) = tile.each_step(_step, (first, jnp.int32(0), tuple(zeros)))
    tile = tile.reload()
    _drain_empty_stages(tile)
    if tile.config.ordered_dq:
        backward_common.release_last_dq(tile, warpgroup)
    _release_keys(tile)
    reduce.sync_block(tile.config.warpgroups)
    fetched = fetch()
    _epilogue(tile.reload(), warpgroup, dk, dv)
    return fetched


# The step's K Q^T, if that is multiplied ahead, whether the warp is to refill the stage of the step before, dK and dV.
_Carry = tuple[jax.Array | None, jax.Array, tuple[jax.Array, ...]]


class _WarpgroupStep(NamedTuple):
    """A warpgroup's part of a step: 64 keys against the step's queries, and a square of the step's dQ."""

    tile: Tile
    step: Step
    warpgroup: jax.Array
    stage: jax.Array
    ds_smem: jax.Ref  # the score gradients, of all warpgroups

    @property
    def square(self) -> tuple[jax.Array, jax.Array]:
        """Says which square of dQ, down and across, the warpgroup multiplies."""
        across = self.tile.refs.key_smem.shape[1]
        return lax.div(self.warpgroup, across), lax.rem(self.warpgroup, across)

    @property
    def sum_gmem(self) -> Any:
        """Says where the tiles of keys add their squares."""
        tile, step, (row, column) = self.tile, self.step, self.square
        row += step.i * (tile.config.block_q // CHUNK)
        return tile.refs.dq_sum.at[tile.batch, step.head, row, column]

    @property
    def sum_smem(self) -> Any:
        """The square in shared memory on its way there, or from there."""
        return self.tile.refs.dq_smem.at[self.warpgroup]


def _step(tile: Tile, step: Step, compare: Compare, carry: _Carry) -> _Carry:
    """Adds a step to dK and dV in registers and to dQ in global memory, and returns the next step's `carry`.

    With S the scaled, capped and masked K Q^T, and `delta = d_lse - rowsum(dO * O)`, transposed as here:

        P = exp(S - lse)    dS = P * (V dO^T + delta) * slope    dV += P dO    dK += dS Q    dQ += dS^T K
    """
    scores, released, (dk, dv) = carry
    problem, config, refs = tile.problem, tile.config, tile.refs
    warpgroup, stage = ptx.opaque(lax.axis_index("warpgroup")), lax.rem(step.n, config.stages)
    d_out_smem, ds_smem = refs.d_out_smem.at[stage], refs.ds_smem.at[lax.rem(step.n, 2)]
    part = _WarpgroupStep(tile, step, warpgroup, stage, ds_smem)
    shape, dtype, capped = (CHUNK, config.block_q), problem.dtype, capped_bias(problem)

    early = backward_common.semaphore_value(tile, step, warpgroup) if _fetches_early(config) else None
    if scores is None:
        refs.step_stages.wait(step.n)
    # Where the sum starts, delta costs neither a subtraction nor registers while the exponentials need them.
    delta = lax.optimization_barrier(by_column(refs.delta_smem.at[stage], shape))
    x = _issue_scores(tile, stage) if scores is None else scores
    dp = wgmma.multiply(refs.value_smem.at[warpgroup], d_out_smem, depth=problem.value_dim, sums=delta)
    _refill(tile, step, released)
    extras = backward_common.load_early(tile, step, warpgroup)
    if config.bias_stages:
        extras["bias"] = _read_bias(part)
    if scores is None:
        x = wgmma.wait(x, pending=1)
    extras |= backward_common.load_late(tile, step, warpgroup)
    x, slope = soft_capped(problem, x)
    if capped:
        refs.slope_smem[warpgroup] = slope
    p = probabilities(tile, step, warpgroup, x, extras, compare)
    dv = wgmma.multiply_rows(dv, p.astype(dtype), d_out_smem)
    earlier, ended = None, None
    if config.ordered_dq:
        backward_common.release_previous_dq(tile, step, warpgroup)
        if early is not None:
            _fetch_sum(part, early)
        ended = backward_common.semaphore_value(tile, step, warpgroup)
        # The position is loaded early where it is data; its computation takes registers, and comes later.
        earlier = backward_common.dq_position(tile, step.i) if problem.has_data_mask else None
    if slope is not None and not capped:
        p = p * slope
    d_scores = p * wgmma.wait(dp, pending=1)
    if capped:
        if problem.bias_gradient:
            _write_logits(part, d_scores)
        d_scores = d_scores * plgpu.load(refs.slope_smem.at[warpgroup], layout=WGMMA)
    ds = d_scores.astype(dtype)
    _share(part, ds)
    issued, dk = _add_to_dq(part, ds, dk, (earlier, ended))
    plgpu.wgmma_wait(0)
    issued = None if issued is None else wgmma.completed(issued)
    sums = wgmma.completed(dk), wgmma.completed(dv)
    return issued, _release_stage(tile, step), sums


def _issue_scores(tile: Tile, stage: jax.Array) -> jax.Array:
    """Issues K Q^T, of the warpgroup's keys and the stage's queries."""
    refs, warpgroup = tile.refs, ptx.opaque(lax.axis_index("warpgroup"))
    depth = tile.problem.head_dim
    return wgmma.multiply(refs.key_smem.at[warpgroup], refs.query_smem.at[stage], depth=depth)


def _issue_next_scores(tile: Tile, step: Step) -> jax.Array:
    """Issues the next step's K Q^T; after a tile's last step, a product that nothing reads."""
    follows, stages = step.n + 1 < tile.first_stage + tile.steps, tile.config.stages
    pl.when(follows)(lambda: tile.refs.step_stages.wait(step.n + 1))
    return _issue_scores(tile, lax.rem(step.n + follows.astype(jnp.int32), stages))


def _read_bias(part: _WarpgroupStep) -> jax.Array:
    """Loads the copied bias of the warpgroup's scores, transposed: the whole bias is never transposed in memory."""
    tile, step = part.tile, part.step
    tile.refs.bias_stages.wait(step.n)
    keys, stage = pl.ds(part.warpgroup * CHUNK, CHUNK), tile.refs.bias_stages.stage(step.n)
    bias = plgpu.load(tile.refs.bias_smem.at[stage, :, keys].T, layout=WGMMA)
    plgpu.commit_smem()  # TMA writes where threads have read
    _release_bias(tile, step)
    return bias


def _share(part: _WarpgroupStep, ds: jax.Array) -> None:
    """Stores score gradients in shared memory, and waits for those of the other warpgroups."""
    wgmma.stmatrix(part.ds_smem.at[part.warpgroup], ds)
    wgmma.commit_square()
    reduce.sync_block(part.tile.config.warpgroups)


def _add_to_dq(
    part: _WarpgroupStep, ds: jax.Array, dk: jax.Array, order: tuple[Any, Any]
) -> tuple[jax.Array | None, jax.Array]:
    """Multiplies and adds a warpgroup's square of dQ, over the keys of all warpgroups, beside dK.

    `order`: where dQ is ordered, how many tiles add to the square before, if that is known already, and how many have.
    Returns the next step's K Q^T, issued, if that is multiplied ahead, and dK, under way.
    """
    tile, (row, column), (earlier, ended) = part.tile, part.square, order
    problem, config, refs = tile.problem, tile.config, tile.refs
    if config.fused_dq_cast and config.ordered_dq and not _fetches_early(config):
        _fetch_sum(part, ended)
    others = [ptx.opaque(jnp.int32(other)) for other in range(config.warpgroups)]
    keys = [refs.key_smem.at[other, pl.ds(column, 1)] for other in others]
    dq = wgmma.multiply_columns([part.ds_smem.at[other, row] for other in others], keys)
    issued = None
    if config.prefetch_scores:
        # The wait completes dV and frees its factors' registers: ptxas serialises products if all are in flight.
        plgpu.wgmma_wait(1)
        issued = _issue_next_scores(tile, part.step)
    dk = wgmma.multiply_rows(dk, ds, refs.query_smem.at[part.stage])
    square = wgmma.wait(dq, pending=2 if config.prefetch_scores else 1)
    if _warps_add(problem, config):
        wgmma.await_square_read()
    elif not config.ordered_dq:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if problem.bias_gradient and not capped_bias(problem):
        _write_scores(part)
    if not config.fused_dq_cast:
        _add_square(part, square, earlier, ended)
    elif ended is None:
        _write_square(part, square)
    else:
        last = backward_common.is_last(tile, part.step.i)
        pl.when(last)(lambda: _write_last(part, square))
        pl.when(~last)(lambda: _add_square(part, square, earlier, ended))
    return issued, dk


def _warps_add(problem: Attention, config: BackwardConfig) -> bool:
    """Says whether each warp adds its own part of a square, without waiting for the other warps.

    Where the warpgroup also stores a bias' gradient, its warps wait for each other anyway.
    """
    return not config.ordered_dq and not problem.bias_gradient and not config.dq_from_registers


def _add_square(part: _WarpgroupStep, square: jax.Array, earlier: Index | None, ended: jax.Array | None) -> None:
    """Adds a square to the sum in global memory, in order if dQ is ordered."""
    tile = part.tile
    if tile.config.dq_from_registers:
        return wgmma.add_sums(part.sum_gmem, square)
    wgmma.store_square(part.sum_smem, square)
    if _warps_add(tile.problem, tile.config):
        return wgmma.add_square(part.sum_smem, part.sum_gmem)
    plgpu.commit_smem()
    if ended is not None:
        earlier = backward_common.dq_position(tile, part.step.i) if earlier is None else earlier
        backward_common.acquire_dq(tile, part.step, part.warpgroup, earlier, ended)
    backward_common.add_ordered(tile, part.sum_smem, part.sum_gmem, earlier)


def _fetches_early(config: BackwardConfig) -> bool:
    """Says whether the last tile to add loads the sum half a step ahead: with more queries there are no registers."""
    return config.ordered_dq and config.fused_dq_cast and config.block_q == CHUNK


def _fetch_sum(part: _WarpgroupStep, ended: jax.Array) -> None:
    """Issues the load of the sum if this tile adds last, and not alone; `ended`: the semaphore's last known value."""
    tile, step, warpgroup = part.tile, part.step, part.warpgroup
    earlier = backward_common.dq_position(tile, step.i)

    @pl.when(backward_common.is_last(tile, step.i) & (earlier > 0))
    def _():
        backward_common.acquire_dq(tile, step, warpgroup, earlier, ended)
        plgpu.copy_gmem_to_smem(part.sum_gmem, part.sum_smem, tile.refs.dq_full.at[warpgroup])


def _write_last(part: _WarpgroupStep, square: jax.Array) -> None:
    """Writes the sum of the other tiles' squares and this one."""

    def with_others(square: jax.Array) -> jax.Array:
        plgpu.barrier_wait(part.tile.refs.dq_full.at[part.warpgroup])
        return square + wgmma.load_square(part.sum_smem)

    others = backward_common.dq_position(part.tile, part.step.i) > 0
    _write_square(part, lax.cond(others, with_others, lambda square: square, square))


def _write_square(part: _WarpgroupStep, total: jax.Array) -> None:
    """Writes a square of dQ in 16 bits, so that XLA need not clear a sum before or convert it after."""
    tile, step, (row, column) = part.tile, part.step, part.square
    d_query_smem = tile.refs.d_query_smem.at[part.warpgroup]
    wgmma.stmatrix(d_query_smem, (total * tile.problem.scale).astype(tile.problem.dtype))
    plgpu.commit_smem()
    rows = pl.ds(step.i * tile.config.block_q + row * CHUNK, CHUNK)
    pipeline.store_rows(d_query_smem, tile.refs.d_query, (tile.batch, rows, step.head), column * CHUNK)


def _write_logits(part: _WarpgroupStep, gradient: jax.Array) -> None:
    """Writes the gradient of the tile's logits, which is the bias' before its reduction."""
    tile, step, block_q = part.tile, part.step, part.tile.config.block_q
    keys, rows = pl.ds(tile.first_key + part.warpgroup * CHUNK, CHUNK), pl.ds(step.i * block_q, block_q)
    store(tile.refs.d_logits.at[tile.batch, step.head, keys, rows], gradient.astype(tile.problem.dtype))


def _write_scores(part: _WarpgroupStep) -> None:
    """Stores dLogits from shared memory: without a soft cap they equal dS."""
    tile, step, block_q = part.tile, part.step, part.tile.config.block_q
    keys = pl.ds(tile.first_key + part.warpgroup * CHUNK, CHUNK)
    at = tile.batch, step.head, keys
    pipeline.store_rows(part.ds_smem.at[part.warpgroup], tile.refs.d_logits, at, step.i * block_q)


def _epilogue(tile: Tile, warpgroup: jax.Array, dk: jax.Array, dv: jax.Array) -> None:
    """Writes dK and dV, through the shared memory of the score gradients."""
    refs, dtype = tile.refs, tile.problem.dtype
    first_row = tile.first_key + warpgroup * CHUNK
    rows = pl.ds(first_row, CHUNK)
    if tile.config.head_splits > 1:
        for sums, ref in ((dk * tile.problem.scale, refs.d_key), (dv, refs.d_value)):
            epilogue.store_sums(ref, sums, tile.coord(first_row), 0)
        return plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    gradients = (dk * tile.problem.scale, refs.d_key), (dv, refs.d_value)
    slots = [refs.ds_smem.at[stage, warpgroup, pl.ds(c, 1)] for stage in range(2) for c in range(refs.ds_smem.shape[2])]
    pieces = [(x[:, at : at + CHUNK], ref, at) for x, ref in gradients for at in range(0, x.shape[1], CHUNK)]
    if tile.problem.bias_gradient:
        # The last steps' score gradients may still be on their way out.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    while pieces:
        here, pieces = pieces[: len(slots)], pieces[len(slots) :]
        for slot, (gradient, _, _) in zip(slots, here, strict=False):
            wgmma.stmatrix(slot, gradient.astype(dtype), once=True)
        plgpu.commit_smem()
        for slot, (_, ref, column) in zip(slots, here, strict=False):
            pipeline.store_rows(slot, ref, (tile.batch, rows, tile.key_head), column)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# All tiles of a CTA.


def _body(problem: Attention, config: BackwardConfig, refs: SimpleNamespace, ctas: int) -> None:
    cta, tiles, stages = lax.axis_index("cta"), backward_common.tile_count(problem, config), config.stages
    factors = "key_smem", "value_smem", "query_smem", "d_out_smem", "ds_smem", "d_query_smem"
    ptx.cut_by_operations(refs, "barrier_smem", *factors)
    refs.tile_smem = refs.barrier_smem.at[pl.ds(0, RING_ROWS)]
    refs.lse_smem, refs.delta_smem = (refs.statistics_smem.at[pl.ds(i * stages, stages)] for i in range(2))
    barriers, table = pl.ds(RING_ROWS, refs.barrier_smem.shape[0] - RING_ROWS), _stages(problem, config)
    pipeline.bind(refs, table, refs.barrier_smem.at[barriers])
    pipeline.start(refs.barrier_smem.at[barriers], pipeline.arrivals(table))
    zero = 0 * cta  # not a literal, which Mosaic does not take where it expects a value

    def fetch(t: Index) -> jax.Array:
        """Returns the number of the CTA's tile `t`; a dynamic scheduler fetches it in warpgroup 0, without waiting."""
        if config.scheduler != "dynamic":
            return cta + t * ctas
        is_first = lax.axis_index("warpgroup") == 0
        return lax.cond(is_first, lambda: tile_scheduler.fetch_tile(refs.tile_counter), lambda: jnp.int32(0))

    def publish(t: Index, number: jax.Array, first_stage: Index) -> None:
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            batch, *rest = Tile.of(problem, config, refs, lax.min(number, tiles - 1), first_stage).record
            tile_scheduler.publish(refs.tile_smem, t, (ptx.where(number < tiles, batch, -1), *rest))

    def prologue(tile: Tile) -> None:
        """Issues the first copies of the CTA."""
        _fill_keys(tile)
        for n in range(config.stages):
            _fill(tile, _stage_coord(tile, n), n)
        for n in range(config.bias_stages):
            _fill_bias(tile, _stage_coord(tile, n), n)

    def visit(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        t, number = state
        tile = Tile.of_record(problem, config, refs, t)
        # The next record is written before this tile's first step, whose barrier orders it before its readers.
        publish(t + 1, number, tile.first_stage + tile.stages)
        return t + 1, _visit(tile, lambda: fetch(t + 2))

    publish(zero, fetch(zero) if _fetches_first_tile(config) else cta, zero)
    second = fetch(1)
    reduce.sync_block(config.warpgroups)
    first = Tile.of_record(problem, config, refs, zero)
    pl.when((pipeline.is_first_warp() != 0) & (first.batch >= 0))(lambda: prologue(first))
    lax.while_loop(lambda state: Tile.of_record(problem, config, refs, state[0]).batch >= 0, visit, (zero, second))


def _fetches_first_tile(config: BackwardConfig) -> bool:
    """Says whether a CTA fetches its first tile from the counter, too.

    It must if dQ is ordered: then every tile before a fetched one is done, or belongs to a CTA that runs.
    """
    return config.scheduler == "dynamic" and config.ordered_dq


def launched(problem: Attention, config: BackwardConfig) -> int:
    """Says how many CTAs there are."""
    tiles = backward_common.tile_count(problem, config)
    return tiles if config.scheduler == "single" else min(tiles, hardware.current().sm_count)


def run(problem: Attention, config: BackwardConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the kernel."""
    columns = padded_dims(problem)[0]
    if config.block_q * columns != config.warpgroups * CHUNK * CHUNK:
        expected = config.warpgroups * CHUNK * CHUNK // columns
        raise ValueError(f"block_q is {config.block_q}, expected {expected}: each warpgroup adds a square of dQ.")
    problem = backward_xla.with_split_heads(problem, config)
    ctas, tile_counter = launched(problem, config), None
    if config.scheduler == "dynamic":
        tile_counter = jnp.full(1, 0 if _fetches_first_tile(config) else ctas, jnp.int32)
    memory = scratch(problem, config)
    return backward_xla.launch(problem, config, memory, _body, operands, ctas=ctas, tile_counter=tile_counter)
