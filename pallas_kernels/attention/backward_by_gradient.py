"""Flash attention, backward, for wide heads: as `backward`, but a warpgroup to each gradient instead of to 64 keys.

The gradients of 64 keys and values of 256 numbers would take all registers of a warpgroup. Here one warpgroup has dV in
its registers and finds the probabilities for it, one has dK and finds the score gradients, from the probabilities that
the first one leaves in shared memory; so both are left operands in registers, and no product is computed twice. A third
one multiplies the score gradients by the keys, piece by piece, and sends the pieces to dQ. They are steps apart.
Traffic: as `backward`, with blocks of 64 keys: Q and dO are read and dQ is added to twice as often.
Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, for the roles of warpgroups.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import loops, scopes
from pallas_kernels.attention import (
    backward_bias,
    backward_d_out,
    backward_launch,
    backward_memory,
    backward_turns,
    limits,
)
from pallas_kernels.attention.backward_blocks import Block, Compare, Step
from pallas_kernels.attention.backward_operands import CHUNK, TILE, capped_bias
from pallas_kernels.attention.backward_tiles import EachBlock
from pallas_kernels.attention.backward_weights import WGMMA, bent, by_column, load_early, load_late, probabilities
from pallas_kernels.attention.configs import ByGradientConfig
from pallas_kernels.attention.memory import ACC, store
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device

Accumulator = Any  # a reference to one in registers
Sums = tuple[Accumulator, ...]  # the pieces of a gradient

PIECE = 2 * CHUNK  # columns of a gradient at a time: with more, ptxas wants more registers than a thread has at first
DQ_PIECE = CHUNK  # columns of dQ: with more, registers spill
ADDER: Any = np.int32(0)  # of those who add to a tile of dQ: the only one
LAUNCHED = 128  # registers of a thread at first, 65536 among four warpgroups


def unsupported(problem: Attention, device: Device) -> str | None:
    """Only what no kernel takes."""
    return limits.declines_any(problem, widest=256)


def _copy(block: Block, first_tile: jax.Array) -> None:
    """The copying warpgroup: keys and values once, then the queries' side, slot after slot."""
    config, refs, batch = block.config, block.refs, block.batch
    keys = batch, pl.ds(block.first_key, CHUNK), block.key_head
    pl.when(jnp.logical_not(first_tile))(lambda: plgpu.barrier_wait(refs.kv_empty))
    plgpu.copy_gmem_to_smem(refs.key.at[keys], refs.key_smem.at[0], refs.key_full)
    plgpu.copy_gmem_to_smem(refs.value.at[keys], refs.value_smem.at[0], refs.value_full)

    def copy(step: Step) -> None:
        rows, nothing = pl.ds(step.i * CHUNK, CHUNK), backward_d_out.has_nothing(block, step)
        slot, d_out_slot = lax.rem(step.n, config.stages), lax.rem(step.n, config.d_out_stages)
        pl.when(step.n >= config.stages)(lambda: plgpu.barrier_wait(refs.query_empty.at[slot]))
        full = refs.query_full.at[slot]
        plgpu.copy_gmem_to_smem(refs.query.at[batch, rows, step.head], refs.query_smem.at[slot], full)
        plgpu.copy_gmem_to_smem(refs.lse.at[batch, step.head, rows], refs.lse_smem.at[slot], full)
        pl.when(step.n >= config.d_out_stages)(lambda: plgpu.barrier_wait(refs.d_out_empty.at[d_out_slot]))
        backward_d_out.copy(block, step, d_out_slot, nothing)
        full = refs.d_out_full.at[d_out_slot]
        plgpu.copy_gmem_to_smem(refs.delta.at[batch, step.head, rows], refs.delta_smem.at[d_out_slot], full)
        backward_bias.copy(block, step)

    block.each_step_alike(copy)


def _values(block: Block) -> None:
    """The warpgroup of dV, and of the probabilities."""
    refs = block.refs
    plgpu.barrier_wait(refs.key_full)

    def walk(sums: Sums) -> None:
        block.each_step(lambda block, step, compare, _: _add_to_dv(block, step, sums, compare), None)

    sums = pl.run_state(walk)(_zeros(refs.value_smem.shape[2]))
    _write(block, sums, refs.value_smem.at[0], refs.d_value)


def _add_to_dv(block: Block, step: Step, sums: Sums, compare: Compare) -> None:
    problem, config, refs = block.problem, block.config, block.refs
    here = loops.recomputed(jnp.int32(0))
    slot, d_out_slot = lax.rem(step.n, config.stages), lax.rem(step.n, config.d_out_stages)

    def products(logits: Accumulator) -> None:
        plgpu.barrier_wait(refs.query_full.at[slot])
        plgpu.wgmma(logits, refs.key_smem.at[here], refs.query_smem.at[slot].T)
        extras = load_early(block, step, here)
        x = plgpu.wgmma_accumulator_load(logits, wait_n=0)
        x, slope = bent(problem, x)
        if capped_bias(problem):
            _await_read(block, step)
            refs.slope_smem[here], slope = slope, None
        extras |= load_late(block, step, here)
        p = probabilities(block, step, 0, x, extras, compare)
        if not capped_bias(problem):
            _await_read(block, step)
        refs.p_smem[here] = p if slope is None else p * slope
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.p_full)
        plgpu.barrier_arrive(refs.query_empty.at[slot])
        plgpu.barrier_wait(refs.d_out_full.at[d_out_slot])
        _multiply(sums, p.astype(problem.dtype), refs.d_out_smem.at[d_out_slot])

    pl.run_scoped(products, ACC(TILE, jnp.float32))
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(refs.d_out_empty.at[d_out_slot])


def _await_read(block: Block, step: Step) -> None:
    """Waits until the probabilities of the step before have been read."""
    pl.when(step.n > 0)(lambda: plgpu.barrier_wait(block.refs.p_empty))


def _keys(block: Block) -> None:
    """The warpgroup of dK, and of the score gradients."""
    refs = block.refs
    plgpu.barrier_wait(refs.value_full)

    def walk(sums: Sums) -> None:
        block.each_step_alike(lambda step: _add_to_dk(block, step, sums))

    sums = pl.run_state(walk)(_zeros(refs.key_smem.shape[2]))
    _write(block, [x * block.problem.scale for x in sums], refs.key_smem.at[0], refs.d_key)


def _add_to_dk(block: Block, step: Step, sums: Sums) -> None:
    problem, config, refs = block.problem, block.config, block.refs
    here = loops.recomputed(jnp.int32(0))
    slot, d_out_slot, turn = (lax.rem(step.n, n) for n in (config.stages, config.d_out_stages, 2))
    bias_of_scores = problem.bias_gradient and not capped_bias(problem)

    def products(dp: Accumulator) -> None:
        plgpu.barrier_wait(refs.d_out_full.at[d_out_slot])
        dp[...] = by_column(refs.delta_smem.at[d_out_slot], TILE)
        plgpu.wgmma(dp, refs.value_smem.at[here], refs.d_out_smem.at[d_out_slot].T)
        pull = plgpu.wgmma_accumulator_load(dp, wait_n=0)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.d_out_empty.at[d_out_slot])
        plgpu.barrier_wait(refs.p_full)
        d_scores = plgpu.load(refs.p_smem.at[here], layout=WGMMA) * pull
        if capped_bias(problem):
            if problem.bias_gradient:
                store(_d_logits(block, step), d_scores.astype(problem.dtype))
            d_scores = d_scores * plgpu.load(refs.slope_smem.at[here], layout=WGMMA)
        ds = d_scores.astype(problem.dtype)
        plgpu.barrier_arrive(refs.p_empty)
        pl.when(step.n >= 2)(lambda: plgpu.barrier_wait(refs.ds_empty.at[turn]))
        if bias_of_scores:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        refs.ds_smem[turn] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.ds_full.at[turn])
        if bias_of_scores:
            plgpu.copy_smem_to_gmem(refs.ds_smem.at[turn], _d_logits(block, step))
        plgpu.barrier_wait(refs.query_full.at[slot])
        _multiply(sums, ds, refs.query_smem.at[slot])

    pl.run_scoped(products, ACC(TILE, jnp.float32))
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(refs.query_empty.at[slot])


def _d_logits(block: Block, step: Step) -> Any:
    """Where the gradient of the tile's logits goes, which is the bias' before its reduction."""
    keys, rows = pl.ds(block.first_key, CHUNK), pl.ds(step.i * CHUNK, CHUNK)
    return block.refs.d_logits.at[block.batch, step.head, keys, rows]


def _queries(block: Block) -> None:
    """The warpgroup of dQ, of which it keeps nothing."""
    plgpu.barrier_wait(block.refs.key_full)
    block.each_step_alike(lambda step: _add_to_dq(block, step))
    if block.config.turns:
        backward_turns.end_last(block, ADDER)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    scopes.sync_block(block.config.warpgroups)


def _add_to_dq(block: Block, step: Step) -> None:
    config, refs = block.config, block.refs
    here = loops.recomputed(jnp.int32(0))
    turn, columns = lax.rem(step.n, 2), refs.key_smem.shape[2]
    before, ended = None, None
    if block.config.turns:
        backward_turns.end_before(block, step, ADDER)
        before, ended = backward_turns.before(block, step.i), backward_turns.ended(block, step, ADDER)
    plgpu.barrier_wait(refs.ds_full.at[turn])
    for start, width in _pieces(columns, DQ_PIECE):

        def product(dq: Accumulator, start: int = start, width: int = width) -> jax.Array:
            plgpu.wgmma(dq, refs.ds_smem.at[turn].T, refs.key_smem.at[here, :, pl.ds(start, width)])
            return plgpu.wgmma_accumulator_load(dq, wait_n=0)

        piece = pl.run_scoped(product, ACC((CHUNK, width), jnp.float32))
        if start + width == columns:
            plgpu.barrier_arrive(refs.ds_empty.at[turn])
        if before is not None and ended is not None and start == 0:
            backward_turns.wait(block, step, ADDER, before, ended)
        for c in range(width // CHUNK):
            at = start // CHUNK + c
            slot = refs.dq_smem.at[lax.rem(step.n * (columns // CHUNK) + at, config.dq_slots)]
            plgpu.wait_smem_to_gmem(config.dq_slots - 1, wait_read_only=True)
            slot[...] = piece[:, c * CHUNK : (c + 1) * CHUNK]
            plgpu.commit_smem()
            target = refs.dq_sum.at[block.batch, step.head, pl.ds(step.i * CHUNK, CHUNK), pl.ds(at * CHUNK, CHUNK)]
            backward_turns.add(block, slot, target, before)


def _pieces(columns: int, most: int = PIECE) -> list[tuple[int, int]]:
    """The first column of each piece, and how many it has."""
    return [(start, min(most, columns - start)) for start in range(0, columns, most)]


def _zeros(columns: int) -> Sums:
    zeros = (jnp.zeros((CHUNK, width), jnp.float32) for _, width in _pieces(columns))
    return tuple(ACC.init(plgpu.layout_cast(x, WGMMA)) for x in zeros)


def _multiply(sums: Sums, weights: jax.Array, rows: jax.Ref) -> None:
    """Adds `weights @ rows` to a gradient."""
    for x, (start, width) in zip(sums, _pieces(rows.shape[1]), strict=True):
        plgpu.wgmma(x, weights, rows.at[:, pl.ds(start, width)])


def _write(block: Block, gradient: Sequence[jax.Array], place: Any, target: jax.Ref) -> None:
    """Writes dK or dV by way of the keys' or the values' place in shared memory, when nobody reads those any more."""
    scopes.sync_block(block.config.warpgroups)
    for x, (start, width) in zip(gradient, _pieces(place.shape[1]), strict=True):
        place[:, start : start + width] = x.astype(block.problem.dtype)
    plgpu.commit_smem()
    rows = pl.ds(block.first_key, CHUNK)
    plgpu.copy_smem_to_gmem(place, target.at[block.batch, rows, block.key_head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(block.refs.kv_empty)


def _body(problem: Attention, config: ByGradientConfig, each_block: EachBlock) -> None:
    warpgroup = lax.axis_index("warpgroup")
    *computing, copying = config.registers
    for i, (role, registers) in enumerate(zip((_values, _keys, _queries), computing, strict=True)):

        @pl.when(warpgroup == i)
        def _(role=role, registers=registers):
            plgpu.set_max_registers(registers, action="increase" if registers > LAUNCHED else "decrease")
            each_block(lambda block, _: role(block))

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(copying, action="decrease")
        each_block(_copy, draws=True)


def run(problem: Attention, config: ByGradientConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the kernel."""
    scratch = backward_memory.scratch(problem, config)
    return backward_launch.launch("attention_backward", problem, config, scratch, _body, operands)
