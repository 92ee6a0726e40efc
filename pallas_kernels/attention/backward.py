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
    probabilities,
    soft_capped,
)
from pallas_kernels.attention.backward_xla import CHUNK, padded_dims
from pallas_kernels.attention.problem import Attention, BackwardConfig, unsupported_reason
from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import pipeline, ptx, reduce, wgmma
from pallas_kernels.mosaic.ptx import WGMMA
from pallas_kernels.mosaic.wgmma import panels, store, tiled

RECORD = 8  # integers of a tile's record
RING_ROWS = tile_scheduler.RECORDS * RECORD // 2  # of two integers, as a barrier has


def unsupported(problem: Attention, device: Device) -> str | None:
    """Why the kernel does not take the problem."""
    if capped_bias(problem) and problem.widest <= 64:
        # 624 bytes a thread would spill, and the slope does not fit in shared memory.
        return "the kernel has no room for a bias beside a soft cap with heads up to 64"
    return unsupported_reason(problem, widest=128)


def scratch(problem: Attention, config: BackwardConfig) -> dict[str, Any]:
    """Lays out the shared memory of a CTA, by name."""
    (head_dim, value_dim), dtype = padded_dims(problem), problem.dtype
    w, block_q, stages = config.warpgroups, config.block_q, config.stages
    found = dict(
        key_smem=panels((w, CHUNK, head_dim), dtype),
        value_smem=panels((w, CHUNK, value_dim), dtype),
        query_smem=panels((stages, block_q, head_dim), dtype),
        d_out_smem=panels((stages, block_q, value_dim), dtype),
        statistics_smem=plgpu.SMEM((2 * stages, block_q), jnp.float32),
        ds_smem=panels((2, w, CHUNK, block_q), dtype),
        words_smem=pipeline.barriers(RING_ROWS + sum(map(len, _arrivals(problem, config).values()))),
    )
    if config.ordered_dq or not (config.fused_dq_cast or config.dq_from_registers):
        found["dq_smem"] = plgpu.SMEM((w, *wgmma.SQUARE), jnp.float32)
    if config.fused_dq_cast:
        found["d_query_smem"] = panels((w, CHUNK, CHUNK), dtype)
        if config.ordered_dq:
            found["dq_full"] = plgpu.Barrier(num_barriers=w)
    if config.bias_stages:
        found["bias_smem"] = tiled((config.bias_stages, block_q, config.block_kv), problem.bias_dtype)
    if capped_bias(problem):
        found["slope_smem"] = tiled((w, CHUNK, block_q), jnp.float32)
    return found


def shared_bytes(problem: Attention, config: BackwardConfig) -> int:
    """Counts the bytes of the scratch."""
    return backward_common.scratch_bytes(scratch(problem, config))


def _arrivals(problem: Attention, config: BackwardConfig) -> dict[str, tuple[int, ...]]:
    """Returns the CTA's barriers by name, with the number of arrivals that completes a phase."""
    warps, stages, slots = ptx.WARPS * config.warpgroups, config.stages, config.bias_stages
    found = {"kv_full": (1,), "kv_empty": (warps,), "full": (1,) * stages, "empty": (warps,) * stages}
    if slots:
        found |= {"bias_full": (1,) * slots, "bias_empty": (warps,) * slots}
    if mask.may_see_nothing(problem):
        found["partial_full"] = (1,) * stages
    if problem.key_lengths:
        found["kv_partial_full"] = (1,)
    return found


# Copies, each issued by one warp.


def _copy_keys(tile: Tile) -> None:
    """Issues the copies of a tile's keys and values; zeroes those past a sequence's end, which may be NaN."""
    config, refs = tile.config, tile.refs
    parts = []
    for i in range(config.warpgroups):
        at = tile.batch, pl.ds(tile.first_key + i * CHUNK, CHUNK), tile.source_head
        parts += [(refs.key, at, refs.key_smem.at[i]), (refs.value, at, refs.value_smem.at[i])]
    if not tile.problem.key_lengths:
        return pipeline.issue(refs.kv_full.at[0], *parts)
    left, partial_full = tile.sequence.keys - tile.first_key, refs.kv_partial_full.at[0]

    @pipeline.when(left >= config.block_kv)
    def _():
        pipeline.issue(refs.kv_full.at[0], *parts)
        pipeline.expect(partial_full, 0)  # a phase to each tile

    @pipeline.when(left < config.block_kv)
    def _():
        pipeline.issue(partial_full, *parts)
        pipeline.wait(refs.kv_partial_full, tile.t, 1)
        for i in range(config.warpgroups):
            for to in (refs.key_smem.at[i], refs.value_smem.at[i]):
                pipeline.zero_rows(to, left - i * CHUNK)
        pipeline.expect(refs.kv_full.at[0], 0)


class _StageCoord(NamedTuple):
    """Where a stage's copies come from. A negative batch means no stage, a negative `i` a stage without a step."""

    batch: Any
    head: Any
    i: Any  # tile of queries
    first_key: Any


def _place(tile: Tile, j: Any) -> _StageCoord:
    """Returns the coordinates of the tile's stage `j`."""
    h, i = 0, jnp.int32(j)
    if tile.group > 1:
        queries = lax.max(tile.span.end - tile.span.first, 1)
        h, i = lax.div(i, queries), lax.rem(i, queries)
    i = ptx.where(j < tile.steps, tile.visited(tile.span.first + i), -1)
    return _StageCoord(tile.batch, tile.key_head * tile.group + h, i, tile.first_key)


def _place_after(tile: Tile, step: Step, stages: int) -> _StageCoord:
    """The coordinates of the stage that is `stages` behind a step's, in the same tile."""
    head, i = step.head, step.visit + stages
    for _ in range(stages * (tile.group > 1)):
        wraps = (i >= tile.span.end).astype(jnp.int32)
        head, i = head + wraps, i - wraps * (tile.span.end - tile.span.first)
    return _StageCoord(tile.batch, head, tile.visited(i), tile.first_key)


def _place_behind(tile: Tile, n: Any) -> _StageCoord:
    """The coordinates of stage `n`, which is behind the tile's last step."""
    following = tile.following()
    place, spare = _place(following, n - following.first_stage), n < following.first_stage
    return place._replace(batch=ptx.where(spare, 0, place.batch), i=ptx.where(spare, -1, place.i))


def _copy_stage(tile: Tile, place: _StageCoord, n: Any) -> None:
    """Issues the copies of stage `n`, in which there may be no step."""
    full = tile.refs.full.at[pipeline.stage(n, tile.config.stages)]
    pipeline.when((place.batch >= 0) & (place.i >= 0))(lambda: _copy_step(tile, place, n))

    @pipeline.when((place.batch >= 0) & (place.i < 0))
    def _():
        pipeline.expect(full, 0)
        if mask.may_see_nothing(tile.problem):
            pipeline.expect(tile.refs.partial_full.at[pipeline.stage(n, tile.config.stages)], 0)


def _copy_step(tile: Tile, place: _StageCoord, n: Any) -> None:
    """Issues the copies of stage `n`: a step's queries and cotangents, and their statistics."""
    config, refs, (batch, head, i, _) = tile.config, tile.refs, place
    stage, rows = pipeline.stage(n, config.stages), pl.ds(i * config.block_q, config.block_q)
    full, may_see_nothing = refs.full.at[stage], mask.may_see_nothing(tile.problem)
    statistics = [
        (refs.lse, (batch, head, rows), refs.lse_smem.at[stage]),
        (refs.delta, (batch, head, rows), refs.delta_smem.at[stage]),
    ]
    places = [(refs.query, refs.query_smem), (refs.d_out, refs.d_out_smem)]
    parts = [(source, (batch, rows, head), to.at[stage]) for source, to in places]

    if not may_see_nothing:
        return pipeline.issue(full, *parts, *statistics)
    nothing, partial_full = refs.without_keys[batch, head, i] != 0, refs.partial_full.at[stage]

    @pipeline.when(nothing)
    def _():
        pipeline.issue(partial_full, *parts)
        pipeline.wait(refs.partial_full, n, config.stages)
        for _, _, to in parts:
            backward_common.zero_rows(to, refs.lse.at[batch, head, rows])
        pipeline.issue(full, *statistics)

    @pipeline.when(~nothing)
    def _():
        pipeline.issue(full, *parts, *statistics)
        pipeline.expect(partial_full, 0)  # a phase to each of the stage's


def _copy_bias(tile: Tile, place: _StageCoord, n: Any) -> None:
    """Issues the copy of the bias of stage `n`: queries by keys, as it is in memory."""
    config, refs, (batch, head, i, first_key) = tile.config, tile.refs, place
    slot = pipeline.stage(n, config.bias_stages)
    at = *gather.broadcast_index((batch, head), refs.bias.shape), pl.ds(i * config.block_q, config.block_q)
    part = refs.bias, (*at, pl.ds(first_key, config.block_kv)), refs.bias_smem.at[slot]
    pl.when((batch >= 0) & (i >= 0))(lambda: pipeline.issue(refs.bias_full.at[slot], part))
    pl.when((batch >= 0) & (i < 0))(lambda: pipeline.expect(refs.bias_full.at[slot], 0))


def _release(empty: jax.Ref, n: Any, stages: int, copy: Callable[[], None]) -> None:
    """Each warp releases stage `n`; the last one issues the copies that refill it."""
    last = pipeline.release(empty.at[pipeline.stage(n, stages)])
    pl.when(last != 0)(copy)


def _release_stage(tile: Tile, step: Step) -> jax.Array:
    """Releases a step's stage, and returns whether this warp refills it in a moment.

    Right after the release, products would wait for the warp. A tile's last stages, which get the next tile's
    copies, are refilled at once: no registers are left for another tile's coordinates while products are in flight.
    """
    stages = tile.config.stages
    n, released = step.n + stages, pipeline.arrive(tile.refs.empty.at[pipeline.stage(step.n, stages)])
    within = n < tile.first_stage + tile.steps

    @pl.when(~within)
    def _():
        pipeline.when(released)(lambda: _copy_stage(tile, _place_behind(tile, n), n))

    return released * within.astype(jnp.int32)


def _refill(tile: Tile, step: Step, released: jax.Array) -> None:
    """Refills the stage of the step before, if this warp was the last to release it."""
    stages = tile.config.stages - 1
    pipeline.when(released)(lambda: _copy_step(tile, _place_after(tile, step, stages), step.n + stages))


def _release_bias(tile: Tile, step: Step) -> None:
    slots = tile.config.bias_stages
    n = step.n + slots

    def copy() -> None:
        within = n < tile.first_stage + tile.steps
        here, behind = lambda: _place_after(tile, step, slots), lambda: _place_behind(tile, n)
        _copy_bias(tile, _StageCoord(*lax.cond(within, here, behind)), n)

    _release(tile.refs.bias_empty, step.n, slots, copy)


def _pass_spare_stages(tile: Tile) -> None:
    """Passes the tile's stages in which there is no step."""
    refs, stages, slots = tile.refs, tile.config.stages, tile.config.bias_stages

    def pass_stage(j: Any, _: None) -> None:
        n = tile.first_stage + j
        pipeline.wait(refs.full, n, stages)
        _release(refs.empty, n, stages, lambda: _copy_stage(tile, _place_behind(tile, n + stages), n + stages))
        if slots:
            pipeline.wait(refs.bias_full, n, slots)
            copy = lambda: _copy_bias(tile, _place_behind(tile, n + slots), n + slots)
            _release(refs.bias_empty, n, slots, copy)

    lax.fori_loop(tile.steps, tile.stages, pass_stage, None)


def _release_keys(tile: Tile) -> None:
    """Releases the tile's keys and values, for those of the next tile."""

    def copy() -> None:
        following = tile.following()
        pl.when(following.batch >= 0)(lambda: _copy_keys(following))

    _release(tile.refs.kv_empty, 0, 1, copy)


# A tile of keys.


def _visit(tile: Tile, fetch: Callable[[], Any]) -> Any:
    """Computes a warpgroup's part of a tile: gradients of 64 keys and values; calls `fetch` before it writes them."""
    warpgroup, widths = lax.axis_index("warpgroup"), (tile.problem.head_dim, tile.problem.value_dim)
    zeros = (plgpu.layout_cast(jnp.zeros((CHUNK, columns), jnp.float32), WGMMA) for columns in widths)
    pipeline.wait(tile.refs.kv_full, tile.t, 1)
    first = _first_scores(tile) if tile.config.prefetch_scores else None
    _, _, (dk, dv) = tile.each_step(_step, (first, jnp.int32(0), tuple(zeros)))
    tile = tile.again()
    _pass_spare_stages(tile)
    if tile.config.ordered_dq:
        backward_common.release_last_dq(tile, warpgroup)
    _release_keys(tile)
    reduce.sync_block(tile.config.warpgroups)
    fetched = fetch()
    _epilogue(tile.again(), warpgroup, dk, dv)
    return fetched


class _Part(NamedTuple):
    """A warpgroup's part of a step: 64 keys against the step's queries, and a square of the step's dQ."""

    tile: Tile
    step: Step
    warpgroup: jax.Array
    stage: jax.Array
    ds_smem: jax.Ref  # the score gradients, of all warpgroups

    @property
    def square(self) -> tuple[jax.Array, jax.Array]:
        """Which square of dQ, down and across, the warpgroup multiplies."""
        across = self.tile.refs.key_smem.shape[1]
        return lax.div(self.warpgroup, across), lax.rem(self.warpgroup, across)

    @property
    def sum_gmem(self) -> Any:
        """Where the tiles of keys add their squares."""
        tile, step, (row, column) = self.tile, self.step, self.square
        row += step.i * (tile.config.block_q // CHUNK)
        return tile.refs.dq_sum.at[tile.batch, step.head, row, column]

    @property
    def sum_smem(self) -> Any:
        """The square in shared memory on its way there, or from there."""
        return self.tile.refs.dq_smem.at[self.warpgroup]


def _step(tile: Tile, step: Step, compare: Compare, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds to dK and dV in registers and to dQ in global memory.

    `carry`: the step's K Q^T, if that is multiplied ahead, whether the warp is to refill the stage of the step before,
    and dK and dV; what comes back is the same for the next step.
    """
    scores, released, (dk, dv) = carry
    problem, config, refs = tile.problem, tile.config, tile.refs
    warpgroup, stage = ptx.opaque(lax.axis_index("warpgroup")), lax.rem(step.n, config.stages)
    d_out_smem, ds_smem = refs.d_out_smem.at[stage], refs.ds_smem.at[lax.rem(step.n, 2)]
    part = _Part(tile, step, warpgroup, stage, ds_smem)
    shape, dtype, capped = (CHUNK, config.block_q), problem.dtype, capped_bias(problem)

    early = backward_common.semaphore_value(tile, step, warpgroup) if _fetches_early(config) else None
    if scores is None:
        pipeline.wait(refs.full, step.n, config.stages)
    # Where the sum starts, delta costs neither a subtraction nor registers while the exponentials need them.
    delta = lax.optimization_barrier(by_column(refs.delta_smem.at[stage], shape))
    issued = _issue_scores(tile, stage) if scores is None else None
    dp = wgmma.multiply(refs.value_smem.at[warpgroup], d_out_smem, depth=problem.value_dim, sums=delta)
    _refill(tile, step, released)
    extras = backward_common.load_early(tile, step, warpgroup)
    if config.bias_stages:
        extras["bias"] = _read_bias(part)
    x = wgmma.wait(issued, pending=1) if scores is None else scores
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
        # A load is issued early; a computation, which would take registers, comes later.
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
    issued, *sums = (None if x is None else wgmma.completed(x) for x in (issued, dk, dv))
    return issued, _release_stage(tile, step), tuple(sums)


def _issue_scores(tile: Tile, stage: jax.Array) -> jax.Array:
    """Issues K Q^T, of the warpgroup's keys and the stage's queries."""
    refs, warpgroup = tile.refs, ptx.opaque(lax.axis_index("warpgroup"))
    depth = tile.problem.head_dim
    return wgmma.multiply(refs.key_smem.at[warpgroup], refs.query_smem.at[stage], depth=depth)


def _first_scores(tile: Tile) -> jax.Array:
    """The first step's K Q^T, if there is a step."""
    stages = tile.config.stages

    def multiply() -> jax.Array:
        pipeline.wait(tile.refs.full, tile.first_stage, stages)
        return wgmma.wait(_issue_scores(tile, lax.rem(tile.first_stage, stages)), pending=0)

    def nothing() -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((CHUNK, tile.config.block_q), jnp.float32), WGMMA)

    return lax.cond(tile.steps > 0, multiply, nothing)


def _issue_next_scores(tile: Tile, step: Step) -> jax.Array:
    """Issues the next step's K Q^T; after a tile's last step, a product that nothing reads."""
    follows, stages = step.n + 1 < tile.first_stage + tile.steps, tile.config.stages
    pl.when(follows)(lambda: pipeline.wait(tile.refs.full, step.n + 1, stages))
    return _issue_scores(tile, lax.rem(step.n + follows.astype(jnp.int32), stages))


def _read_bias(part: _Part) -> jax.Array:
    """The copied bias of the warpgroup's scores, transposed as it is read: no copy of the whole bias is made."""
    tile, step, slots = part.tile, part.step, part.tile.config.bias_stages
    pipeline.wait(tile.refs.bias_full, step.n, slots)
    keys, slot = pl.ds(part.warpgroup * CHUNK, CHUNK), pipeline.stage(step.n, slots) if slots > 1 else 0
    bias = plgpu.load(tile.refs.bias_smem.at[slot, :, keys].T, layout=WGMMA)
    plgpu.commit_smem()  # TMA writes where threads have read
    _release_bias(tile, step)
    return bias


def _share(part: _Part, ds: jax.Array) -> None:
    """Stores score gradients in shared memory, and waits for those of the other warpgroups."""
    wgmma.stmatrix(part.ds_smem.at[part.warpgroup], ds)
    wgmma.commit_square()
    reduce.sync_block(part.tile.config.warpgroups)


def _add_to_dq(part: _Part, ds: jax.Array, dk: jax.Array, order: tuple[Any, Any]) -> tuple[jax.Array | None, jax.Array]:
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
        # dV is complete, and its factors' registers are free: with all products in flight ptxas serialises them.
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
    """Whether each warp adds its own part of a square, without waiting for the other warps.

    Where the warpgroup also stores a bias' gradient, its warps wait for each other anyway.
    """
    return not config.ordered_dq and not problem.bias_gradient and not config.dq_from_registers


def _add_square(part: _Part, square: jax.Array, earlier: Any, ended: jax.Array | None) -> None:
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
    """Whether the last tile to add loads the sum half a step ahead: with more queries there are no registers."""
    return config.ordered_dq and config.fused_dq_cast and config.block_q == CHUNK


def _fetch_sum(part: _Part, ended: jax.Array) -> None:
    """Issues the load of the sum if this tile adds last, and not alone; `ended`: the semaphore's last known value."""
    tile, step, warpgroup = part.tile, part.step, part.warpgroup
    earlier = backward_common.dq_position(tile, step.i)

    @pl.when(backward_common.is_last(tile, step.i) & (earlier > 0))
    def _():
        backward_common.acquire_dq(tile, step, warpgroup, earlier, ended)
        plgpu.copy_gmem_to_smem(part.sum_gmem, part.sum_smem, tile.refs.dq_full.at[warpgroup])


def _write_last(part: _Part, square: jax.Array) -> None:
    """Writes the sum of the other tiles' squares and this one."""

    def with_others(square: jax.Array) -> jax.Array:
        plgpu.barrier_wait(part.tile.refs.dq_full.at[part.warpgroup])
        return square + wgmma.load_square(part.sum_smem)

    others = backward_common.dq_position(part.tile, part.step.i) > 0
    _write_square(part, lax.cond(others, with_others, lambda square: square, square))


def _write_square(part: _Part, total: jax.Array) -> None:
    """Writes a square of dQ in 16 bits, so that XLA need not clear a sum before or convert it after."""
    tile, step, (row, column) = part.tile, part.step, part.square
    d_query_smem = tile.refs.d_query_smem.at[part.warpgroup]
    wgmma.stmatrix(d_query_smem, (total * tile.problem.scale).astype(tile.problem.dtype))
    plgpu.commit_smem()
    rows = pl.ds(step.i * tile.config.block_q + row * CHUNK, CHUNK)
    pipeline.store_rows(d_query_smem, tile.refs.d_query, (tile.batch, rows, step.head), column * CHUNK)


def _write_logits(part: _Part, gradient: jax.Array) -> None:
    """Writes the gradient of the tile's logits, which is the bias' before its reduction."""
    tile, step, block_q = part.tile, part.step, part.tile.config.block_q
    keys, rows = pl.ds(tile.first_key + part.warpgroup * CHUNK, CHUNK), pl.ds(step.i * block_q, block_q)
    store(tile.refs.d_logits.at[tile.batch, step.head, keys, rows], gradient.astype(tile.problem.dtype))


def _write_scores(part: _Part) -> None:
    """Stores dLogits from shared memory: without a soft cap they equal dS."""
    tile, step, block_q = part.tile, part.step, part.tile.config.block_q
    keys = pl.ds(tile.first_key + part.warpgroup * CHUNK, CHUNK)
    at = tile.batch, step.head, keys
    pipeline.store_rows(part.ds_smem.at[part.warpgroup], tile.refs.d_logits, at, step.i * block_q)


def _epilogue(tile: Tile, warpgroup: jax.Array, dk: Any, dv: Any) -> None:
    """Writes dK and dV, through the shared memory of the score gradients."""
    refs, dtype = tile.refs, tile.problem.dtype
    first_row = tile.first_key + warpgroup * CHUNK
    rows = pl.ds(first_row, CHUNK)
    if tile.config.head_splits > 1:
        for sums, ref in ((dk * tile.problem.scale, refs.d_key), (dv, refs.d_value)):
            epilogue.store_sums(ref, sums, tile.place(first_row), 0)
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
    ptx.cut_by_operations(refs, "words_smem", *factors)
    refs.tile_smem = refs.words_smem.at[pl.ds(0, RING_ROWS)]
    refs.lse_smem, refs.delta_smem = (refs.statistics_smem.at[pl.ds(i * stages, stages)] for i in range(2))
    barriers = pl.ds(RING_ROWS, refs.words_smem.shape[0] - RING_ROWS)
    backward_common.name_barriers(refs, refs.words_smem.at[barriers], _arrivals(problem, config))
    zero = 0 * cta  # no literal: Mosaic takes none where it expects a value

    def fetch(t: Any) -> jax.Array:
        """Returns the number of the CTA's tile `t`; a dynamic scheduler fetches it in warpgroup 0, without waiting."""
        if config.scheduler != "dynamic":
            return cta + t * ctas
        is_first = lax.axis_index("warpgroup") == 0
        return lax.cond(is_first, lambda: tile_scheduler.fetch_tile(refs.tile_counter), lambda: jnp.int32(0))

    def publish(t: Any, number: jax.Array, first_stage: Any) -> None:
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            batch, *rest = Tile.of(problem, config, refs, lax.min(number, tiles - 1), first_stage).record
            tile_scheduler.publish(refs.tile_smem, t, (ptx.where(number < tiles, batch, -1), *rest))

    def prologue(tile: Tile) -> None:
        """Issues the first copies of the CTA."""
        _copy_keys(tile)
        for n in range(stages):
            _copy_stage(tile, _place(tile, n), n)
        for n in range(config.bias_stages):
            _copy_bias(tile, _place(tile, n), n)

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
    """Whether a CTA fetches its first tile from the counter, too.

    It must if dQ is ordered: then every tile before a fetched one is done, or belongs to a CTA that runs.
    """
    return config.scheduler == "dynamic" and config.ordered_dq


def launched(problem: Attention, config: BackwardConfig) -> int:
    """How many CTAs there are."""
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
