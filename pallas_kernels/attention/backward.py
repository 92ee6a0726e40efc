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
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import loops, scopes
from pallas_kernels.attention import (
    backward_ahead,
    backward_bias,
    backward_d_out,
    backward_dq,
    backward_launch,
    backward_memory,
    backward_turns,
    fragments,
    limits,
    products,
)
from pallas_kernels.attention.backward_blocks import Block, Compare, Step
from pallas_kernels.attention.backward_operands import CHUNK, capped_bias
from pallas_kernels.attention.backward_tiles import EachBlock
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


def _copy(block: Block, first_tile: jax.Array) -> None:
    """The copying warpgroup: keys and values once, and the queries' side, slot after slot."""
    config, refs, batch = block.config, block.refs, block.batch
    stages, block_q = config.stages, config.block_q
    if not config.queries_first:
        _copy_keys(block, first_tile)

    def copy(step: Step) -> None:
        slot, rows = lax.rem(step.n, stages), pl.ds(step.i * block_q, block_q)
        nothing = backward_d_out.has_nothing(block, step)

        def await_empty(barrier: jax.Ref) -> None:
            pl.when(step.n >= stages)(lambda: plgpu.barrier_wait(barrier.at[slot]))

        await_empty(refs.query_empty)
        full = refs.query_full.at[slot]
        plgpu.copy_gmem_to_smem(refs.query.at[batch, rows, step.head], refs.query_smem.at[slot], full)
        plgpu.copy_gmem_to_smem(refs.delta.at[batch, step.head, rows], refs.delta_smem.at[slot], full)
        plgpu.copy_gmem_to_smem(refs.lse.at[batch, step.head, rows], refs.lse_smem.at[slot], full)
        await_empty(refs.d_out_empty)
        backward_d_out.copy(block, step, slot, nothing)
        backward_bias.copy(block, step)
        if config.queries_first:
            pl.when(step.starts)(lambda: _copy_keys(block, first_tile))

    block.each_step_alike(copy)
    if config.queries_first:
        pl.when(block.steps == 0)(lambda: _copy_keys(block, first_tile))


def _copy_keys(block: Block, first_tile: jax.Array) -> None:
    """Keys and values, as soon as nobody reads those of the tile before."""
    config, refs = block.config, block.refs
    pl.when(jnp.logical_not(first_tile))(lambda: plgpu.barrier_wait(refs.kv_empty))
    for i in range(config.warpgroups):
        rows = pl.ds(block.first_key + i * CHUNK, CHUNK)
        for c in range(refs.key_smem.shape[1]):
            at = block.batch, rows, block.key_head, pl.ds(c * CHUNK, CHUNK)
            plgpu.copy_gmem_to_smem(refs.key.at[at], refs.key_smem.at[i, c], refs.kv_full)
        plgpu.copy_gmem_to_smem(refs.value.at[block.batch, rows, block.key_head], refs.value_smem.at[i], refs.kv_full)


def _compute(block: Block) -> None:
    """A computing warpgroup: the gradients of its 64 keys and values."""
    widths = block.refs.query_smem.shape[2], block.refs.d_out_smem.shape[2]
    warpgroup = lax.axis_index("warpgroup")
    zeros = [plgpu.layout_cast(jnp.zeros((CHUNK, columns), jnp.float32), WGMMA) for columns in widths]
    plgpu.barrier_wait(block.refs.kv_full)

    def walk(sums: Any) -> None:
        first = backward_ahead.first(block) if block.config.ahead else None
        block.each_step(functools.partial(_gradients, block, sums), first)

    dk, dv = pl.run_state(walk)(tuple(ACC.init(x) for x in zeros))
    if block.config.turns:
        backward_turns.end_last(block, warpgroup)
    plgpu.barrier_arrive(block.refs.kv_empty)
    scopes.sync_block(block.config.warpgroups)
    _write(block, warpgroup, dk, dv)


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
    block: Block, sums: tuple[Accumulator, Accumulator], step: Step, compare: Compare, found: jax.Array | None
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
            plgpu.barrier_wait(refs.query_full.at[slot])
        # Where the sum starts, delta costs neither a subtraction nor registers while the exponentials need them.
        dp_sum[...] = by_column(refs.delta_smem.at[slot], shape)
        begun = backward_ahead.begin(block, slot) if found is None else None
        plgpu.barrier_wait(refs.d_out_full.at[slot])
        plgpu.wgmma(dp_sum, refs.value_smem.at[warpgroup], d_out_smem.T)
        extras = load_early(block, step, warpgroup)
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
    plgpu.barrier_arrive(refs.query_empty.at[slot])
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
    plgpu.barrier_arrive(refs.d_out_empty.at[tile.slot])
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
    slots = [refs.ds_smem.at[turn, warpgroup, c] for turn in range(2) for c in range(refs.ds_smem.shape[2])]
    pieces = [(dk * block.problem.scale, refs.d_key, c) for c in range(dk.shape[1] // CHUNK)]
    pieces += [(dv, refs.d_value, c) for c in range(dv.shape[1] // CHUNK)]
    if block.problem.bias_gradient:
        # The last steps' score gradients may still be on their way out.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    while pieces:
        here, pieces = pieces[: len(slots)], pieces[len(slots) :]
        for slot, (gradient, _, c) in zip(slots, here, strict=False):
            slot[...] = gradient[:, c * CHUNK : (c + 1) * CHUNK].astype(dtype)
        plgpu.commit_smem()
        for slot, (_, ref, c) in zip(slots, here, strict=False):
            plgpu.copy_smem_to_gmem(slot, ref.at[block.batch, rows, block.key_head, pl.ds(c * CHUNK, CHUNK)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _body(problem: Attention, config: BackwardConfig, each_block: EachBlock) -> None:
    warpgroup = lax.axis_index("warpgroup")
    computing, copying = config.registers

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(copying, action="decrease")
        each_block(_copy, draws=True)

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(computing, action="increase")
        each_block(lambda block, _: _compute(block))


def run(problem: Attention, config: BackwardConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the kernel."""
    scratch = backward_memory.scratch(problem, config)
    return backward_launch.launch("attention_backward", problem, config, scratch, _body, operands)
