"""Flash attention, backward, in one pass: keys stay, queries stream past them, five matrix products to a tile.

Each warpgroup holds the gradients of 64 keys and values in registers. The scores are computed transposed, so that
probabilities and score gradients leave the accumulators as left operands in registers. Only the score gradients go
through shared memory, where the block's warpgroups share out the product that gives dQ; dQ is summed in float32 in
device memory, by the copy engine. With turns, the last block of keys to add to a tile of dQ writes it. The next step's
scores are multiplied beside this step's dQ and dK, so that exponentials find theirs there.
Traffic: K, V, dK, dV once; for each block of keys Q and dO are read and dQ is added to, mostly in the L2 cache.
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

from pallas_kernels import loops, scopes
from pallas_kernels.attention import (
    backward_ahead,
    backward_d_out,
    backward_dq,
    backward_launch,
    backward_memory,
    backward_turns,
    fragments,
    gather,
    limits,
    pipeline,
    products,
    schedule,
    tile_scheduler,
)
from pallas_kernels.attention.backward_blocks import Block, Compare, Step
from pallas_kernels.attention.backward_operands import CHUNK, capped_bias
from pallas_kernels.attention.backward_weights import WGMMA, bent, by_column, load_early, load_late, probabilities
from pallas_kernels.attention.configs import BackwardConfig
from pallas_kernels.attention.memory import ACC, store
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device

Accumulator = Any  # a reference to one in registers


def unsupported(problem: Attention, device: Device) -> str | None:
    """Why the kernel does not take the problem."""
    if capped_bias(problem) and max(problem.head_dim, problem.value_dim) <= 64:
        # 624 bytes a thread would spill, and the slope does not fit in shared memory.
        return "the kernel has no room for a bias beside a soft cap with heads up to 64"
    return limits.declines_any(problem, widest=128)


def _issue_keys(block: Block) -> None:
    """The calling warp asks for a tile's keys and values."""
    config, refs = block.config, block.refs
    full = refs.kv_full.at[0]
    pipeline.expect(full, pipeline.size(refs.key_smem) + pipeline.size(refs.value_smem))
    for i in range(config.warpgroups):
        rows = pl.ds(block.first_key + i * CHUNK, CHUNK)
        for c in range(refs.key_smem.shape[1]):
            at = block.batch, rows, block.key_head, pl.ds(c * CHUNK, CHUNK)
            pipeline.copy(refs.key, at, refs.key_smem.at[i, c], full)
        at = block.batch, rows, block.key_head, slice(None)
        pipeline.copy(refs.value, at, refs.value_smem.at[i], full)


def _of_ring(problem: Attention, config: BackwardConfig, refs: SimpleNamespace, t: Any) -> Block:
    """The CTA's tile `t`, of which the ring tells; its batch is negative if there is none."""
    return Block.of_record(problem, config, refs, tile_scheduler.read(refs.tile_smem, t), t)


class _Place(NamedTuple):
    """Where a stage's copies come from; there is no such stage if the batch is negative, and no step if `i` is."""

    batch: Any
    head: Any
    i: Any  # block of queries
    first_key: Any

    @classmethod
    def of(cls, block: Block, local: Any) -> "_Place":
        """The place of the tile's step `local`."""
        return cls(block.batch, *block.place_of(local), block.first_key)


def _place_after(block: Block, step: Step, steps: int) -> _Place:
    """The place of the stage that is filled `steps` after a step's; most are of the same tile, and read no record."""

    def here() -> _Place:
        return _Place(block.batch, *block.place_after(step, steps), block.first_key)

    n = step.n + steps
    return _Place(*lax.cond(n < block.steps_before + block.steps, here, lambda: _place_behind(block, n)))


def _place_behind(block: Block, n: Any) -> _Place:
    """The place of stage `n`, which is behind the tile's last step."""
    following = block.again(1, uniform=False)
    place = _Place.of(following, n - following.steps_before)
    spare = n < following.steps_before
    return place._replace(batch=jnp.where(spare, 0, place.batch), i=jnp.where(spare, -1, place.i))


def _issue(block: Block, place: _Place, n: Any) -> None:
    """The calling warp issues the copies of stage `n`."""
    config, refs, (batch, head, i, _) = block.config, block.refs, place
    stage = pipeline.stage(n, config.stages)
    full = refs.full.at[stage]
    rows = pl.ds(i * config.block_q, config.block_q)
    parts = [
        (refs.query, (batch, rows, head, slice(None)), refs.query_smem.at[stage]),
        (refs.lse, (batch, head, rows), refs.lse_smem.at[stage]),
        (refs.delta, (batch, head, rows), refs.delta_smem.at[stage]),
        (refs.d_out, (batch, rows, head, slice(None)), refs.d_out_smem.at[stage]),
    ]

    @pl.when((batch >= 0) & (i >= 0))
    def _():
        if not schedule.may_see_nothing(block.problem):
            _expect(full, parts)
            _copy(full, parts)
            return
        *alike, d_out = parts
        _copy(full, alike)
        nothing = refs.without_keys[batch, head, i] != 0
        pipeline.expect(refs.landed.at[stage], jnp.where(nothing, pipeline.size(d_out[2]), 0))

        @pl.when(nothing)
        def _():
            _copy(refs.landed.at[stage], [d_out])
            pipeline.wait(refs.landed, n, config.stages)
            backward_d_out.zero_rows(d_out[2], refs.lse.at[batch, head, rows])
            _expect(full, alike)

        @pl.when(jnp.logical_not(nothing))
        def _():
            _copy(full, [d_out])
            _expect(full, parts)

    @pl.when((batch >= 0) & (i < 0))
    def _():
        pipeline.expect(full, 0)
        if schedule.may_see_nothing(block.problem):
            pipeline.expect(refs.landed.at[stage], 0)


def _copy(full: jax.Ref, parts: Any) -> None:
    """The calling warp issues the copies of a stage's parts."""
    for source, at, to in parts:
        pipeline.copy(source, at, to, full)


def _expect(full: jax.Ref, parts: Any) -> None:
    """Announces their bytes."""
    pipeline.expect(full, sum(pipeline.size(to) for *_, to in parts))


def _issue_bias(block: Block, place: _Place, n: Any) -> None:
    """The calling warp issues the copy of the bias of stage `n`."""
    config, refs, (batch, head, i, first_key) = block.config, block.refs, place
    slot = pipeline.stage(n, config.bias_slots)
    full, to = refs.bias_full.at[slot], refs.bias_smem.at[slot]
    at_batch, at_head = gather.broadcast_index((batch, head), refs.bias.shape)

    @pl.when((batch >= 0) & (i >= 0))
    def _():
        pipeline.expect(full, pipeline.size(to))
        rows, keys = pl.ds(i * config.block_q, config.block_q), pl.ds(first_key, config.block_kv)
        pipeline.copy(refs.bias, (at_batch, at_head, rows, keys), to, full)

    pl.when((batch >= 0) & (i < 0))(lambda: pipeline.expect(full, 0))


def _release(empty: jax.Ref, n: Any, stages: int, issue: Callable[[], None]) -> None:
    """Releases the stage of step `n`; the last warp to do so issues the stage's next copies."""
    last = pipeline.release(empty.at[pipeline.stage(n, stages)])
    pl.when(last != 0)(issue)


def _end_step(block: Block, step: Step) -> None:
    """The warps have read the step's stage."""
    stages = block.config.stages
    issue = lambda: _issue(block, _place_after(block, step, stages), step.n + stages)
    _release(block.refs.empty, step.n, stages, issue)


def _end_bias(block: Block, step: Step) -> None:
    """The warps have read the step's bias."""
    slots = block.config.bias_slots
    issue = lambda: _issue_bias(block, _place_after(block, step, slots), step.n + slots)
    _release(block.refs.bias_empty, step.n, slots, issue)


def _pass_spare_stages(block: Block) -> None:
    """Passes the tile's stages in which there is no step."""
    config, refs = block.config, block.refs

    def pass_stage(local: Any, _: None) -> None:
        n, stages, slots = block.steps_before + local, config.stages, config.bias_slots
        pipeline.wait(refs.full, n, stages)
        _release(refs.empty, n, stages, lambda: _issue(block, _place_behind(block, n + stages), n + stages))
        if slots:
            pipeline.wait(refs.bias_full, n, slots)
            issue = lambda: _issue_bias(block, _place_behind(block, n + slots), n + slots)
            _release(refs.bias_empty, n, slots, issue)

    lax.fori_loop(block.steps, block.stages_filled, pass_stage, None)


def _compute(block: Block, draw: Callable[[], Any] = lambda: None) -> Any:
    """The gradients of a warpgroup's 64 keys and values; what `draw` returns before they are written."""
    widths = block.refs.query_smem.shape[2], block.refs.d_out_smem.shape[2]
    warpgroup = lax.axis_index("warpgroup")
    zeros = [plgpu.layout_cast(jnp.zeros((CHUNK, columns), jnp.float32), WGMMA) for columns in widths]
    pipeline.wait(block.refs.kv_full, block.t, 1)

    def walk(sums: Any) -> None:
        first = backward_ahead.first(block) if block.config.ahead else None
        block.each_step(functools.partial(_gradients, sums), first)

    dk, dv = pl.run_state(walk)(tuple(ACC.init(x) for x in zeros))
    block = block.again()
    _pass_spare_stages(block)
    if block.config.turns:
        backward_turns.end_last(block, warpgroup)

    def issue_next() -> None:
        following = block.again(1)
        pl.when(following.batch >= 0)(lambda: _issue_keys(following))

    last = pipeline.release(block.refs.kv_empty.at[0])
    pl.when(last != 0)(issue_next)
    scopes.sync_block(block.config.warpgroups)
    drawn = draw()
    block = block.again()
    _write(block, warpgroup, dk, dv)
    return drawn


class _Tile(NamedTuple):
    """A warpgroup's keys against a step's queries."""

    block: Block
    step: Step
    warpgroup: jax.Array
    slot: jax.Array  # of the queries
    ds_smem: jax.Ref  # the score gradients, of all warpgroups

    @property
    def piece(self) -> backward_dq.Piece:
        """The warpgroup's share of the tile's dQ."""
        chunks = self.block.refs.key_smem.shape[1]
        place = lax.div(self.warpgroup, chunks), lax.rem(self.warpgroup, chunks)
        return backward_dq.Piece(self.block, self.step, self.warpgroup, *place)


def _gradients(
    sums: tuple[Accumulator, Accumulator], block: Block, step: Step, compare: Compare, found: jax.Array | None
) -> jax.Array | None:
    """One tile: adds to dK and dV in registers and to dQ in device memory.

    `found` is its K Q^T, if that is found ahead, and then the next step's comes back.
    """
    problem, config, refs = block.problem, block.config, block.refs
    dk_sum, dv_sum = sums
    warpgroup = loops.recomputed(lax.axis_index("warpgroup"))
    slot, turn = lax.rem(step.n, config.stages), lax.rem(step.n, 2)
    d_out_smem, ds_smem = refs.d_out_smem.at[slot], refs.ds_smem.at[turn]
    tile = _Tile(block, step, warpgroup, slot, ds_smem)
    shape, dtype, capped = (CHUNK, config.block_q), problem.dtype, capped_bias(problem)

    def multiply(dp_sum: Accumulator) -> jax.Array | None:
        early = backward_turns.ended(block, step, warpgroup) if _fetches_early(config) else None
        if found is None:
            pipeline.wait(refs.full, step.n, config.stages)
        # Where the sum starts, delta costs neither a subtraction nor registers while the exponentials need them.
        dp_sum[...] = by_column(refs.delta_smem.at[slot], shape)
        begun = backward_ahead.begin(block, slot) if found is None else None
        plgpu.wgmma(dp_sum, refs.value_smem.at[warpgroup], d_out_smem.T)
        extras = load_early(block, step, warpgroup, lambda: _end_bias(block, step))
        x = products.finish(begun, later=1) if found is None else found
        extras |= load_late(block, step, warpgroup)
        x, slope = bent(problem, x)
        if capped:
            refs.slope_smem[warpgroup] = slope
        p = probabilities(block, step, warpgroup, x, extras, compare)
        plgpu.wgmma(dv_sum, p.astype(dtype), d_out_smem)
        before, ended = None, None
        if config.turns:
            backward_turns.end_before(block, step, warpgroup)
            if early is not None:
                backward_dq.fetch(tile.piece, early)
            ended = backward_turns.ended(block, step, warpgroup)
            # What comes from memory is asked for early; what is computed, and would take registers, later.
            before = backward_turns.before(block, step.i) if problem.hidden_by_data else None
        if slope is not None and not capped:
            p = p * slope
        d_scores = p * plgpu.wgmma_accumulator_load(dp_sum, wait_n=1)
        if capped:
            if problem.bias_gradient:
                _write_logits(tile, d_scores)
            d_scores = d_scores * plgpu.load(refs.slope_smem.at[warpgroup], layout=WGMMA)
        ds = d_scores.astype(dtype)
        _share(tile, ds)
        add = functools.partial(_add_to_dq, tile, ds, dk_sum, (before, ended))
        return pl.run_scoped(add, ACC((CHUNK, CHUNK), jnp.float32))

    begun = pl.run_scoped(multiply, ACC(shape, jnp.float32))
    if begun is None:
        plgpu.wgmma_wait(0)
    else:
        begun = products.finish(begun, later=0)
    _end_step(block, step)
    return begun


def _share(tile: _Tile, ds: jax.Array) -> None:
    """Puts score gradients where all warpgroups find them, and waits for theirs."""
    fragments.store_factor(tile.ds_smem.at[tile.warpgroup], ds)
    fragments.commit()
    scopes.sync_block(tile.block.config.warpgroups)


def _fetches_early(config: BackwardConfig) -> bool:
    """Whether the last turn asks for the others' sum half a step ahead: with more queries there are no registers."""
    return config.turns and config.last_writes and config.block_q == CHUNK


def _add_to_dq(
    tile: _Tile, ds: jax.Array, dk_sum: Accumulator, turn: tuple[Any, Any], dq_sum: Accumulator
) -> jax.Array | None:
    """A warpgroup's share of the tile's product for dQ, over the keys of all warpgroups; and dK meanwhile.

    `turn`: how many add to the tile before, where that is known already, and have, where there are turns.
    What comes back is the next step's K Q^T, begun, if that is found ahead.
    """
    before, ended = turn
    block, piece = tile.block, tile.piece
    problem, config, refs = block.problem, block.config, block.refs
    if config.last_writes and config.turns and not _fetches_early(config):
        backward_dq.fetch(piece, ended)
    for other in range(config.warpgroups):
        plgpu.wgmma(dq_sum, tile.ds_smem.at[other, piece.row_i].T, refs.key_smem.at[other, piece.column_i])
    begun = None
    if config.ahead:
        # dV is there, and its factors' registers are free: with all products under way ptxas serialises them.
        plgpu.wgmma_wait(1)
        begun = backward_ahead.begin_following(block, tile.step)
    plgpu.wgmma(dk_sum, ds, refs.query_smem.at[tile.slot])
    part = plgpu.wgmma_accumulator_load(dq_sum, wait_n=2 if config.ahead else 1)
    backward_dq.await_place(problem, config)
    if problem.bias_gradient and not capped_bias(problem):
        _write_scores(tile)
    backward_dq.leave(piece, part, before, ended)
    return begun


def _write_logits(tile: _Tile, gradient: jax.Array) -> None:
    """Writes the gradient of the tile's logits, which is the bias' before its reduction."""
    block, step, block_q = tile.block, tile.step, tile.block.config.block_q
    keys, rows = pl.ds(block.first_key + tile.warpgroup * CHUNK, CHUNK), pl.ds(step.i * block_q, block_q)
    store(block.refs.d_logits.at[block.batch, step.head, keys, rows], gradient.astype(block.problem.dtype))


def _write_scores(tile: _Tile) -> None:
    """The same where it is the scores' too, which are in shared memory."""
    block, step, warpgroup, _, ds_smem = tile
    keys = pl.ds(block.first_key + warpgroup * CHUNK, CHUNK)
    for c in range(block.config.block_q // CHUNK):
        rows = pl.ds(step.i * block.config.block_q + c * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(ds_smem.at[warpgroup, c], block.refs.d_logits.at[block.batch, step.head, keys, rows])


def _write(block: Block, warpgroup: jax.Array, dk: Any, dv: Any) -> None:
    """Writes the gradients of keys and values, through the slots of the score gradients."""
    refs, dtype = block.refs, block.problem.dtype
    rows = pl.ds(block.first_key + warpgroup * CHUNK, CHUNK)
    slots = [refs.ds_smem.at[turn, warpgroup, pl.ds(c, 1)] for turn in range(2) for c in range(refs.ds_smem.shape[2])]
    pieces = [(dk * block.problem.scale, refs.d_key, c) for c in range(dk.shape[1] // CHUNK)]
    pieces += [(dv, refs.d_value, c) for c in range(dv.shape[1] // CHUNK)]
    if block.problem.bias_gradient:
        # The last steps' score gradients may still be on their way out.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    while pieces:
        here, pieces = pieces[: len(slots)], pieces[len(slots) :]
        for slot, (gradient, _, c) in zip(slots, here, strict=False):
            fragments.store_factor(slot, gradient[:, c * CHUNK : (c + 1) * CHUNK].astype(dtype))
        plgpu.commit_smem()
        for slot, (_, ref, c) in zip(slots, here, strict=False):
            plgpu.copy_smem_to_gmem(slot.at[0], ref.at[block.batch, rows, block.key_head, pl.ds(c * CHUNK, CHUNK)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _body(problem: Attention, config: BackwardConfig, refs: SimpleNamespace, tiles: int, ctas: int) -> None:
    lse, delta = (pl.ds(i * config.stages, config.stages) for i in range(2))
    refs.lse_smem, refs.delta_smem = refs.statistics_smem.at[lse], refs.statistics_smem.at[delta]
    ring = backward_memory.RING_ROWS
    refs.tile_smem = refs.words.at[pl.ds(0, ring)]
    for name, at in backward_memory.barrier_slices(problem, config).items():
        setattr(refs, name, refs.words.at[pl.ds(ring + at.start, at.stop - at.start)])
    cta, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    arrivals = backward_memory.barrier_arrivals(problem, config)
    pipeline.start(refs.words.at[pl.ds(ring, len(arrivals))], arrivals)
    zero = 0 * cta  # no literal: Mosaic takes none where it expects a value

    def begin(block: Block) -> None:
        @pl.when((pipeline.is_first_warp() != 0) & (block.batch >= 0))
        def _():
            _issue_keys(block)
            for n in range(config.stages):
                _issue(block, _Place.of(block, jnp.int32(n)), n)
            for n in range(config.bias_slots):
                _issue_bias(block, _Place.of(block, jnp.int32(n)), n)

    def draw(t: Any) -> jax.Array:
        if config.tiles != "drawn":
            return cta + t * ctas
        return lax.cond(warpgroup == 0, lambda: tile_scheduler.draw(refs.tickets), lambda: jnp.int32(0))

    def publish(t: Any, tile: jax.Array, steps_before: Any) -> None:
        @pl.when(warpgroup == 0)
        def _():
            batch, *rest = Block.of(problem, config, refs, jnp.minimum(tile, tiles - 1), steps_before).record
            tile_scheduler.publish(refs.tile_smem, t, (jnp.where(tile < tiles, batch, -1), *rest))

    asks = config.tiles == "drawn" and config.turns
    publish(zero, draw(zero) if asks else cta, zero)
    drawn = draw(1)
    scopes.sync_block(config.warpgroups)

    begin(_of_ring(problem, config, refs, zero))

    def work(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        t, tile = state
        block = _of_ring(problem, config, refs, t)
        publish(t + 1, tile, block.steps_before + block.stages_filled)
        return t + 1, _compute(block, lambda: draw(t + 2))

    def more(state: tuple[jax.Array, ...]) -> jax.Array:
        return tile_scheduler.read(refs.tile_smem, state[0])[0] >= 0

    lax.while_loop(more, work, (zero, drawn))


def run(problem: Attention, config: BackwardConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the kernel."""
    scratch = backward_memory.scratch(problem, config)
    return backward_launch.launch("attention_backward", problem, config, scratch, _body, operands)
