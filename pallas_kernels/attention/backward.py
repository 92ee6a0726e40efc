"""Flash attention, backward, in one pass: keys stay, queries stream past them, five matrix products to a tile.

Each warpgroup holds the gradients of 64 keys and values in registers. The scores are computed transposed, so that
probabilities and score gradients leave the accumulators as left operands in registers. Only the score gradients go
through shared memory, where the block's warpgroups share out the product that gives dQ; dQ is summed in float32 in
device memory, by the copy engine. With `deterministic`, the blocks of keys take turns at each tile of dQ.
Traffic: K, V, dK, dV once; for each block of keys Q and dO are read and dQ is added to, mostly in the L2 cache.
Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import elementary, hardware, mosaic, scopes
from pallas_kernels.attention import gather, schedule
from pallas_kernels.attention.backward_configs import BackwardConfig
from pallas_kernels.attention.configs import WARPGROUP_ROWS
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import Index

CHUNK = WARPGROUP_ROWS  # keys of a warpgroup, and columns of a swizzled 16-bit tile
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
COLUMN = WGMMA.reduce(0)
Accumulator = Any  # a reference to one in registers


def unsupported(problem: Attention, device: Device) -> str | None:
    """Why the kernel does not take the problem."""
    if problem.dtype.name not in ("float16", "bfloat16"):
        return f"the kernel takes bfloat16 and float16; the operands are {problem.dtype.name}"
    for name in ("head_dim", "value_dim"):
        size = getattr(problem, name)
        if size > 128 or size % 8:
            return f"the kernel takes {name} up to 128 in multiples of 8; it is {size}"
    if problem.bias is not None and problem.soft_cap is not None:
        return "the kernel has no gradient of a bias beside a soft cap"
    return None


def _padded(problem: Attention) -> Attention:
    """The problem with sizes as the copy engine and the matrix products want them."""
    value_dim = _up(problem.value_dim, CHUNK)
    return dataclasses.replace(
        problem,
        query_length=_up(problem.query_length, 8),
        key_length=_up(problem.key_length, 8),
        head_dim=max(_up(problem.head_dim, CHUNK), value_dim),  # the config is for the larger one
        value_dim=value_dim,
    )


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Scratch as wgmma and the copy engine want it."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def _scratch(padded: Attention, config: BackwardConfig) -> dict[str, Any]:
    """What a block has in shared memory, by name."""
    d, value_dim, dtype = padded.head_dim, padded.value_dim, padded.dtype
    w, block_q, stages = config.warpgroups, config.block_q, config.stages
    return dict(
        k_s=_tiled((w, d // CHUNK, CHUNK, CHUNK), dtype),
        v_s=_tiled((w, CHUNK, value_dim), dtype),
        q_s=_tiled((stages, block_q, d), dtype),
        do_s=_tiled((stages, block_q, value_dim), dtype),
        lse_s=plgpu.SMEM((stages, block_q), jnp.float32),
        delta_s=plgpu.SMEM((stages, block_q), jnp.float32),
        ds_s=_tiled((2, w, block_q // CHUNK, CHUNK, CHUNK), dtype),
        dq_s=_tiled((w, CHUNK, CHUNK), jnp.float32),
        kv_free=plgpu.Barrier(num_arrivals=w),
        kv_full=plgpu.Barrier(num_arrivals=w * (d // CHUNK + 1)),
        q_full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        do_full=plgpu.Barrier(num_barriers=stages),
        q_free=plgpu.Barrier(num_arrivals=w, num_barriers=stages),
        do_free=plgpu.Barrier(num_arrivals=w, num_barriers=stages),
    )


def _recomputed(x: jax.Array) -> jax.Array:
    """`x`, whose history the compiler does not see: what is derived from it inside a loop stays inside.

    Otherwise 24 matrix descriptors are kept in registers all along the loop, which spills: D = 128, S = 2048, bf16,
    449 TFLOP/s, and 598 like this, H200.
    """

    def copy_scalar(ctx, x):
        word = ir.IntegerType.get_signless(32)
        y = llvm.inline_asm(word, [mosaic.scalar(x)], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(y, (), is_signed=True)

    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=mosaic.SPLAT)
    return plgpu.inline_mgpu(arg_types=(mosaic.SPLAT,), return_type=result)(copy_scalar)(x)


def _ended_turns(turns: jax.Ref) -> jax.Array:
    """How many have ended their turns; asked for long before it is needed, as the answer takes a third of a step."""

    def load_turns(ctx, turns):
        word, text = ir.IntegerType.get_signless(32), "ld.relaxed.gpu.global.s32 $0, [$1];"
        ended = llvm.inline_asm(word, [mosaic.global_address(turns)], text, "=r,l", has_side_effects=True)
        return mgpu.FragmentedArray.splat(ended, (), is_signed=True)

    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=mosaic.SPLAT)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(load_turns)(turns)


def _await_turn(turns: jax.Ref, value: Index, ended: jax.Array) -> None:
    """Waits until `value` others have ended their turns; `ended` had when last asked."""

    def await_turns(ctx, turns, value, ended):
        text = (
            "{ .reg .pred early; .reg .s32 now; mov.s32 now, $2; "
            "AGAIN: setp.lt.s32 early, now, $1; @!early bra MINE; "
            "ld.relaxed.gpu.global.s32 now, [$0]; bra AGAIN; MINE: }"
        )
        operands = [mosaic.global_address(turns), mosaic.scalar(value), mosaic.scalar(ended)]
        mosaic.ptx(text, "l,r,r,~{memory}", operands)

    arguments = (plgpu.RefType(), mosaic.SPLAT, mosaic.SPLAT)
    plgpu.inline_mgpu(arg_types=arguments)(await_turns)(turns, jnp.int32(value), ended)


def _end_turn(turns: jax.Ref) -> None:
    """Lets the next one have its turn.

    The tile has arrived, in the place where the next one's will be added to it: no fence, which would cost more than
    all else of the turns. D = 128, S = 2048, bf16: 458 TFLOP/s with `red.release`, 557 like this, H200.
    """

    def count_turn(ctx, turns):
        thread = arith.remui(utils.thread_idx(), mosaic.c32(mosaic.WARPGROUP))
        leader = arith.cmpi(arith.CmpIPredicate.eq, thread, mosaic.c32(0))
        text = "@$1 red.relaxed.gpu.global.add.s32 [$0], 1;"
        mosaic.ptx(text, "l,b,~{memory}", [mosaic.global_address(turns), leader])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(count_turn)(turns)


def _div(x: Index, y: int) -> Any:
    """`max(x, 0) // y`."""
    return max(x, 0) // y if isinstance(x, int) else lax.div(jnp.maximum(x, 0), jnp.int32(y))


def _clip(x: Index, low: Index, high: Index) -> Any:
    if all(isinstance(v, int) for v in (x, low, high)):
        return min(max(x, low), high)
    return jnp.minimum(jnp.maximum(x, low), high)


class Span(NamedTuple):
    """Blocks of queries `first <= i < end`; of them `inner_first <= i < inner_end` need no comparison of indices."""

    first: Any
    inner_first: Any
    inner_end: Any
    end: Any


class Step(NamedTuple):
    """One block of queries against the block of keys; `n` counts the steps of all blocks of keys before, too."""

    head: Any
    i: Any
    n: Any
    starts: Any  # whether it is the first one for these keys


def _latest_first(problem: Attention) -> bool:
    """Whether the last block of keys has the first turn.

    Under a bound on the right it begins at the last queries, so that nobody waits for blocks that come before.
    """
    return problem.deterministic and schedule.bounds(problem)[1] is not None


def _span(problem: Attention, config: BackwardConfig, key: Index, keys: Index, queries: Index) -> Span:
    """The blocks of queries that see some of the keys from `key` on; all there are: `keys`, and `queries` blocks."""
    left, right = schedule.bounds(problem)
    block_q, last = config.block_q, key + (config.block_kv - 1)
    first, inner_first, inner_end, end = 0, 0, queries, queries
    if right is not None:
        first = _div(key - right, block_q)
        inner_first = _div(last - right + (block_q - 1), block_q)
    if left is not None:
        end = _clip(_div(last - left + block_q, block_q), 0, queries)
        inner_end = _div(key - left + 1, block_q)
    first = _clip(first, 0, end)
    if problem.key_lengths or problem.key_length % config.block_kv:
        end = first + (end - first) * jnp.int32(key < keys)
        inner_first = jnp.maximum(inner_first, end * jnp.int32(last >= keys))
    inner_first = _clip(inner_first, first, end)
    return Span(first, inner_first, _clip(inner_end, inner_first, end), end)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of keys: the problem, its references, and which keys they are."""

    problem: Attention
    config: BackwardConfig
    refs: SimpleNamespace  # operands, results and scratch
    batch: jax.Array
    key_head: jax.Array
    index: jax.Array
    keys: Any  # how many there are in all
    span: Span
    steps_before: jax.Array

    @classmethod
    def of(
        cls, problem: Attention, config: BackwardConfig, refs: SimpleNamespace, tile: jax.Array, steps_before: jax.Array
    ) -> "Block":
        per_head, together = -(-problem.key_length // config.block_kv), _together(problem, config)
        section, tile = lax.div(tile, per_head * together), lax.rem(tile, per_head * together)
        index, head = lax.div(tile, together), section * together + lax.rem(tile, together)
        batch, key_head = lax.div(head, problem.key_heads), lax.rem(head, problem.key_heads)
        if _latest_first(problem):
            index = (per_head - 1) - index
        keys, queries = problem.key_length, -(-problem.query_length // config.block_q)
        if problem.key_lengths:
            keys = jnp.minimum(refs.key_lengths[batch], keys)
        if problem.query_lengths:
            queries = jnp.minimum(_div(refs.query_lengths[batch] + (config.block_q - 1), config.block_q), queries)
        span = _span(problem, config, index * config.block_kv, keys, queries)
        return cls(problem, config, refs, batch, key_head, index, keys, span, steps_before)

    @property
    def first_key(self) -> jax.Array:
        return self.index * self.config.block_kv

    @property
    def group(self) -> int:
        return self.problem.query_heads // self.problem.key_heads

    @property
    def chunks(self) -> int:
        return self.refs.k_s.shape[1]

    @property
    def steps(self) -> Any:
        return self.group * (self.span.end - self.span.first)

    def step(self, h: Any, i: jax.Array) -> Step:
        n = h * (self.span.end - self.span.first) + (i - self.span.first)
        return Step(self.key_head * self.group + h, i, self.steps_before + n, n == 0)

    def each_step(self, visit: Callable[[Step, bool], None]) -> None:
        """`visit(step, compare)` for each head of the group and block of queries that sees the keys."""
        first, inner_first, inner_end, end = self.span
        left, right = schedule.bounds(self.problem)
        ragged = self.problem.key_lengths or self.problem.key_length % self.config.block_kv != 0

        def of_head(h: Any) -> None:
            def piece(start: Any, stop: Any, compare: bool) -> None:
                pl.loop(start, stop)(lambda i: visit(self.step(h, i), compare))

            if right is not None or ragged:
                piece(first, inner_first, True)
            piece(inner_first, inner_end, False)
            if left is not None:
                piece(inner_end, end, True)

        if self.group == 1:
            of_head(0)
        else:
            pl.loop(0, self.group)(of_head)


def _copy_operands(block: Block, first_tile: jax.Array) -> None:
    """The copying warpgroup: keys and values once, then the queries' side, slot after slot."""
    config, refs, batch = block.config, block.refs, block.batch
    stages, block_q = config.stages, config.block_q
    pl.when(jnp.logical_not(first_tile))(lambda: plgpu.barrier_wait(refs.kv_free))
    for i in range(config.warpgroups):
        rows = pl.ds(block.first_key + i * CHUNK, CHUNK)
        for c in range(block.chunks):
            columns = pl.ds(c * CHUNK, CHUNK)
            plgpu.copy_gmem_to_smem(refs.key.at[batch, rows, block.key_head, columns], refs.k_s.at[i, c], refs.kv_full)
        plgpu.copy_gmem_to_smem(refs.value.at[batch, rows, block.key_head], refs.v_s.at[i], refs.kv_full)

    def copy(step: Step) -> None:
        slot, rows = lax.rem(step.n, stages), pl.ds(step.i * block_q, block_q)

        def await_free(barrier: jax.Ref) -> None:
            pl.when(step.n >= stages)(lambda: plgpu.barrier_wait(barrier.at[slot]))

        await_free(refs.q_free)
        full = refs.q_full.at[slot]
        plgpu.copy_gmem_to_smem(refs.query.at[batch, rows, step.head], refs.q_s.at[slot], full)
        plgpu.copy_gmem_to_smem(refs.delta.at[batch, step.head, rows], refs.delta_s.at[slot], full)
        plgpu.copy_gmem_to_smem(refs.lse.at[batch, step.head, rows], refs.lse_s.at[slot], full)
        await_free(refs.do_free)
        plgpu.copy_gmem_to_smem(refs.d_out.at[batch, rows, step.head], refs.do_s.at[slot], refs.do_full.at[slot])

    def of_head(h: Any) -> None:
        pl.loop(block.span.first, block.span.end)(lambda i: copy(block.step(h, i)))

    of_head(0) if block.group == 1 else pl.loop(0, block.group)(of_head)


def _probabilities(
    block: Block, step: Step, warpgroup: Any, x: jax.Array, compare: bool
) -> tuple[jax.Array, jax.Array | None]:
    """From products K Q^T to the transposed probabilities, and the soft cap's derivative."""
    problem, refs = block.problem, block.refs
    key, row = block.first_key + warpgroup * CHUNK, step.i * block.config.block_q
    extras = {}
    for name in ("bias", "mask", "query_segments", "key_segments"):
        if hasattr(refs, name):
            extras[name] = gather.load_tile(getattr(refs, name), (block.batch, step.head, key, row), x.shape[1])
    slope = None
    if problem.soft_cap is None:
        x = x * (problem.scale * LOG2E)
    else:
        # tanh(y) = 1 - 2 / (1 + exp(2 y)): the hardware's tanh errs by 2^-11.
        bent = 1.0 - 2.0 / (1.0 + elementary.exp_16bit(x * (2 * problem.scale / problem.soft_cap)))
        x, slope = bent * (problem.soft_cap * LOG2E), 1.0 - bent * bent
    if problem.bias:
        x = x + extras["bias"].astype(jnp.float32) * LOG2E
    if compare:
        x = _in_bounds(block, x, key, row)
    seen = []
    if problem.mask:
        seen.append(extras["mask"].astype(jnp.int32) != 0)
    if problem.segments:
        seen.append(extras["query_segments"] == extras["key_segments"])
    for condition in seen:
        x = jnp.where(condition, x, -jnp.inf)
    lse = plgpu.load(refs.lse_s.at[lax.rem(step.n, block.config.stages)], layout=COLUMN, optimized=False)
    return jnp.exp2(x - lax.broadcast_in_dim(lse, x.shape, [1])), slope


def _in_bounds(block: Block, x: jax.Array, key: jax.Array, row: jax.Array) -> jax.Array:
    """`x` with -inf where a query of `row` ... does not see a key of `key` ... by its place, or there is none."""
    left, right = schedule.bounds(block.problem)
    ragged = block.problem.key_lengths or block.problem.key_length % block.config.block_kv
    limits = [block.keys - key if ragged else CHUNK]
    limits += [row - key + right if right is not None else 0, row - key + left if left is not None else 0]

    def mask_tile(ctx, x, keys, most, least):
        registers = x.registers.copy()
        lane = arith.remui(utils.thread_idx(), mosaic.c32(32))
        warp = arith.divui(arith.remui(utils.thread_idx(), mosaic.c32(mosaic.WARPGROUP)), mosaic.c32(32))
        first = arith.addi(arith.muli(warp, mosaic.c32(16)), arith.divui(lane, mosaic.c32(4)))
        column = arith.muli(arith.remui(lane, mosaic.c32(4)), mosaic.c32(2))
        outside = utils.c(-math.inf, ir.F32Type.get())
        keys, most, least = (mosaic.scalar(v) for v in (keys, most, least))
        for r in range(2):
            at = arith.addi(first, mosaic.c32(8 * r))
            # The register's column is a constant, so that each comparison is one instruction.
            lowest = arith.subi(arith.subi(at, most), column)
            highest = arith.subi(arith.subi(at, least), column)
            exists = arith.cmpi(arith.CmpIPredicate.slt, at, keys)
            for j in range(shape[1] // 8):
                values = []
                for e, value in enumerate(mosaic.elements(registers.flat[2 * j + r])):
                    tests = [exists] if ragged else []
                    constant = mosaic.c32(8 * j + e)
                    if right is not None:
                        tests.append(arith.cmpi(arith.CmpIPredicate.sge, constant, lowest))
                    if left is not None:
                        tests.append(arith.cmpi(arith.CmpIPredicate.sle, constant, highest))
                    for test in tests:
                        value = arith.select(test, value, outside)
                    values.append(value)
                registers.flat[2 * j + r] = vector.from_elements(registers.flat[2 * j + r].type, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    shape = x.shape
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=WGMMA)
    operation = plgpu.inline_mgpu(arg_types=(WGMMA, *[mosaic.SPLAT] * 3), return_type=result)
    return operation(mask_tile)(x, *(jnp.int32(limit) for limit in limits))


def _gradients(block: Block, step: Step, sums: tuple[Accumulator, Accumulator], compare: bool) -> None:
    """One tile: adds to dK and dV in registers and to dQ in device memory."""
    problem, config, refs = block.problem, block.config, block.refs
    dk_sum, dv_sum = sums
    warpgroup = _recomputed(lax.axis_index("warpgroup"))
    slot, turn = lax.rem(step.n, config.stages), lax.rem(step.n, 2)
    q_s, do_s, ds_s = refs.q_s.at[slot], refs.do_s.at[slot], refs.ds_s.at[turn]
    shape, dtype = (CHUNK, config.block_q), problem.dtype
    turns = refs.turns.at[warpgroup, block.batch, step.head, step.i] if problem.deterministic else None

    def products(logits: Accumulator, dp_sum: Accumulator) -> None:
        plgpu.barrier_wait(refs.q_full.at[slot])
        # Where the sum starts, delta costs neither a subtraction nor registers while the exponentials need them.
        delta = plgpu.load(refs.delta_s.at[slot], layout=COLUMN, optimized=False)
        dp_sum[...] = lax.broadcast_in_dim(delta, shape, [1])
        for c in range(block.chunks):
            plgpu.wgmma(logits, refs.k_s.at[warpgroup, c], q_s.at[:, pl.ds(c * CHUNK, CHUNK)].T)
        plgpu.barrier_wait(refs.do_full.at[slot])
        plgpu.wgmma(dp_sum, refs.v_s.at[warpgroup], do_s.T)
        x = plgpu.wgmma_accumulator_load(logits, wait_n=1)
        p, slope = _probabilities(block, step, warpgroup, x, compare)
        plgpu.wgmma(dv_sum, p.astype(dtype), do_s)
        ended = None
        if problem.deterministic:
            _end_last_turn(block, step, warpgroup)
            ended = _ended_turns(turns)
        if slope is not None:
            p = p * slope
        ds = (p * plgpu.wgmma_accumulator_load(dp_sum, wait_n=1)).astype(dtype)
        for c in range(config.block_q // CHUNK):
            ds_s[warpgroup, c] = ds[:, c * CHUNK : (c + 1) * CHUNK]
        plgpu.commit_smem()
        scopes.sync_block(config.warpgroups)
        pl.run_scoped(lambda dq_sum: share_of_dq(ds, ended, dq_sum), plgpu.ACC((CHUNK, CHUNK), jnp.float32))

    def share_of_dq(ds: jax.Array, ended: jax.Array | None, dq_sum: Accumulator) -> None:
        rows, columns = lax.div(warpgroup, block.chunks), lax.rem(warpgroup, block.chunks)
        for other in range(config.warpgroups):
            plgpu.wgmma(dq_sum, ds_s.at[other, rows].T, refs.k_s.at[other, columns])
        plgpu.wgmma(dk_sum, ds, q_s)
        part = plgpu.wgmma_accumulator_load(dq_sum, wait_n=1)
        plgpu.barrier_arrive(refs.do_free.at[slot])
        if not problem.deterministic:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.dq_s[warpgroup] = part
        plgpu.commit_smem()
        if problem.bias:
            _store_scores(block, step, warpgroup, ds_s)
        at = pl.ds(step.i * config.block_q + rows * CHUNK, CHUNK), pl.ds(columns * CHUNK, CHUNK)
        source, target = refs.dq_s.at[warpgroup], refs.d_query.at[block.batch, step.head, *at]

        def add() -> None:
            plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

        if ended is None:
            return add()
        before = _turn(block, step.i)
        _await_turn(turns, before, ended)
        if not _first_stores(problem, config):
            return add()
        pl.when(before == 0)(lambda: plgpu.copy_smem_to_gmem(source, target))
        pl.when(before > 0)(add)

    pl.run_scoped(products, *[plgpu.ACC(shape, jnp.float32)] * 2)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(refs.q_free.at[slot])


def _store_scores(block: Block, step: Step, warpgroup: jax.Array, ds_s: jax.Ref) -> None:
    """Writes the gradient of a tile's logits, which is the bias' before its reduction."""
    keys = pl.ds(block.first_key + warpgroup * CHUNK, CHUNK)
    for c in range(block.config.block_q // CHUNK):
        rows = pl.ds(step.i * block.config.block_q + c * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(ds_s.at[warpgroup, c], block.refs.d_logits.at[block.batch, step.head, keys, rows])


def _turn(block: Block, i: jax.Array) -> Any:
    """How many blocks of keys add to a block of queries before this one."""
    left, right = schedule.bounds(block.problem)
    block_q, block_kv = block.config.block_q, block.config.block_kv
    if right is None:
        return block.index - (0 if left is None else _div(i * block_q + left, block_kv))
    last = jnp.minimum(_div(i * block_q + (block_q - 1 + right), block_kv), _div(block.keys - 1, block_kv))
    return last - block.index


@functools.lru_cache(maxsize=64)
def _first_stores(problem: Attention, config: BackwardConfig) -> bool:
    """Whether each block of queries has a first one that adds to its dQ, and is known to: it need not be zero before.

    D = 128, S = 2048, bf16: zeros take 40 us, 3 % of all, H200.
    """
    if not problem.deterministic or problem.key_lengths or problem.query_lengths:
        return False
    left, right = schedule.bounds(problem)
    block_q, block_kv = config.block_q, config.block_kv
    for row in range(0, problem.query_length, block_q):
        first = 0 if left is None else _div(row + left, block_kv)
        last = -(-problem.key_length // block_kv) - 1
        if right is not None:
            last = min(last, (row + block_q - 1 + right) // block_kv)
        if first > last:
            return False
    return True


def _end_last_turn(block: Block, step: Step, warpgroup: jax.Array) -> None:
    """Ends the turn of the step before, once its tile has arrived."""
    plgpu.wait_smem_to_gmem(0)

    @pl.when(jnp.logical_not(step.starts))
    def _():
        new_head = (step.i == block.span.first).astype(jnp.int32)
        before = step.i - 1 + new_head * (block.span.end - block.span.first)
        _end_turn(block.refs.turns.at[warpgroup, block.batch, step.head - new_head, before])


def _compute(block: Block) -> None:
    """A computing warpgroup: the gradients of its 64 keys and values."""
    problem, refs = block.problem, block.refs
    warpgroup = lax.axis_index("warpgroup")
    widths = refs.q_s.shape[2], refs.do_s.shape[2]
    zeros = [plgpu.layout_cast(jnp.zeros((CHUNK, columns), jnp.float32), WGMMA) for columns in widths]
    plgpu.barrier_wait(refs.kv_full)

    def walk(sums: Any) -> None:
        block.each_step(lambda step, compare: _gradients(block, step, sums, compare))

    dk, dv = pl.run_state(walk)(tuple(plgpu.ACC.init(x) for x in zeros))
    if problem.deterministic:
        plgpu.wait_smem_to_gmem(0)

        @pl.when(block.steps > 0)
        def _():
            last = block.key_head * block.group + (block.group - 1)
            _end_turn(refs.turns.at[warpgroup, block.batch, last, block.span.end - 1])

    plgpu.barrier_arrive(refs.kv_free)
    scopes.sync_block(block.config.warpgroups)
    rows = pl.ds(block.first_key + warpgroup * CHUNK, CHUNK)
    slots = [refs.ds_s.at[turn, warpgroup, c] for turn in range(2) for c in range(refs.ds_s.shape[2])]
    pieces = [(dk * problem.scale, refs.d_key, c) for c in range(widths[0] // CHUNK)]
    pieces += [(dv, refs.d_value, c) for c in range(widths[1] // CHUNK)]
    while pieces:
        here, pieces = pieces[: len(slots)], pieces[len(slots) :]
        for slot, (gradient, _, c) in zip(slots, here, strict=False):
            slot[...] = gradient[:, c * CHUNK : (c + 1) * CHUNK].astype(problem.dtype)
        plgpu.commit_smem()
        for slot, (_, ref, c) in zip(slots, here, strict=False):
            plgpu.copy_smem_to_gmem(slot, ref.at[block.batch, rows, block.key_head, pl.ds(c * CHUNK, CHUNK)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _together(problem: Attention, config: BackwardConfig) -> int:
    """Of how many heads the blocks of keys are started in turn."""
    heads = problem.batch * problem.key_heads
    return max(g for g in range(1, config.together + 1) if heads % g == 0)


def _body(problem: Attention, config: BackwardConfig, refs: SimpleNamespace, tiles: int, grid: int) -> None:
    me, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    computing, copying = config.registers

    def each_tile(visit: Callable[[Block, jax.Array], None]) -> None:
        def one(turn: jax.Array, steps_before: jax.Array) -> jax.Array:
            block = Block.of(problem, config, refs, me + turn * grid, steps_before)
            visit(block, turn == 0)
            return steps_before + block.steps

        lax.fori_loop(0, lax.div(tiles - 1 - me, grid) + 1, one, jnp.int32(0))

    @pl.when(warpgroup == config.warpgroups)
    def _():
        plgpu.set_max_registers(copying, action="decrease")
        each_tile(_copy_operands)

    @pl.when(warpgroup < config.warpgroups)
    def _():
        plgpu.set_max_registers(computing, action="increase")
        each_tile(lambda block, _: _compute(block))


def _operands(problem: Attention, operands: tuple[jax.Array, ...]) -> SimpleNamespace:
    """The operands by name."""
    present = dict(
        query=True, key=True, value=True, bias=problem.bias, mask=problem.mask, query_lengths=problem.query_lengths,
        key_lengths=problem.key_lengths, query_segments=problem.segments, key_segments=problem.segments,
        sinks=problem.sinks, out=True, lse=True, d_out=True, d_lse=True,
    )  # fmt: skip
    return SimpleNamespace(**dict(zip([name for name, here in present.items() if here], operands, strict=True)))


def _pad(x: jax.Array, shape: tuple[int, ...], fill: float = 0) -> jax.Array:
    widths = [(0, to - at) for at, to in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, widths, constant_values=fill) if any(w for _, w in widths) else x


def _without_padding(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """`[B, T, N, H]` with zeros beyond the lengths, where there may be NaN."""
    if lengths is None:
        return x
    inside = jnp.arange(x.shape[1])[None, :] < lengths[:, None]
    return jnp.where(inside[:, :, None, None], x, jnp.zeros((), x.dtype))


def run(problem: Attention, config: BackwardConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the kernel."""
    ops, padded = _operands(problem, operands), _padded(problem)
    b, n, t, s = problem.batch, problem.query_heads, padded.query_length, padded.key_length
    rows = _up(problem.query_length, config.block_q)
    lse = ops.lse
    # Written as a product and a sum, not as a dot: XLA may give those to cuBLAS, and round.
    pull = (ops.d_out.astype(jnp.float32) * ops.out.astype(jnp.float32)).sum(-1)
    delta = ops.d_lse - jnp.swapaxes(pull, 1, 2)
    nothing = lse == -jnp.inf
    if problem.query_lengths:
        nothing |= (jnp.arange(problem.query_length) >= ops.query_lengths[:, None])[:, None, :]
    delta = jnp.where(nothing, 0.0, delta)
    query, d_out = (_without_padding(x, getattr(ops, "query_lengths", None)) for x in (ops.query, ops.d_out))
    key, value = (_without_padding(x, getattr(ops, "key_lengths", None)) for x in (ops.key, ops.value))
    inputs: dict[str, Any] = dict(
        query=_pad(query, (b, t, n, padded.head_dim)),
        key=_pad(key, (b, s, problem.key_heads, padded.head_dim)),
        value=_pad(value, (b, s, problem.key_heads, padded.value_dim)),
        d_out=_pad(d_out, (b, t, n, padded.value_dim)),
        lse=_pad(jnp.where(nothing, jnp.inf, lse * LOG2E), (b, n, rows), jnp.inf),
        delta=_pad(delta, (b, n, rows)),
    )
    for name in ("bias", "mask"):
        if hasattr(ops, name):
            inputs[name] = jnp.swapaxes(getattr(ops, name), 2, 3)
    for name in ("query_lengths", "key_lengths"):
        if hasattr(ops, name):
            inputs[name] = getattr(ops, name)
    if problem.segments:
        inputs["query_segments"] = ops.query_segments[:, None, None, :]
        inputs["key_segments"] = ops.key_segments[:, None, :, None]
    outputs = {f"d_{name}": jax.ShapeDtypeStruct(inputs[name].shape, problem.dtype) for name in ("key", "value")}
    dq_sum = jax.ShapeDtypeStruct((b, n, rows, padded.head_dim), jnp.float32)
    if _first_stores(problem, config):
        outputs["d_query"] = dq_sum
    else:
        inputs["d_query"] = jax.new_ref(jnp.zeros(dq_sum.shape, dq_sum.dtype))
    if problem.deterministic:
        inputs["turns"] = jax.new_ref(jnp.zeros((config.warpgroups, b, n, rows // config.block_q), jnp.int32))
    if problem.bias:
        inputs["d_logits"] = jax.new_ref(jnp.zeros((b, n, s, _up(t, CHUNK)), problem.dtype))
    scratch = _scratch(padded, config)
    tiles = b * problem.key_heads * -(-problem.key_length // config.block_kv)
    grid = min(tiles, hardware.current().sm_count) if config.persistent else tiles
    names = [*inputs, *outputs, *scratch]
    d_key, d_value, *d_query = plgpu.kernel(
        lambda *refs: _body(problem, config, SimpleNamespace(**dict(zip(names, refs, strict=True))), tiles, grid),
        out_type=list(outputs.values()),
        grid=(grid,),
        grid_names=("block",),
        scratch_types=list(scratch.values()),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="attention_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(*inputs.values())
    sums = d_query[0] if d_query else inputs["d_query"][...]
    d_query = sums[:, :, : problem.query_length, : problem.head_dim] * problem.scale
    results = [
        jnp.swapaxes(d_query.astype(problem.dtype), 1, 2),
        d_key[:, : problem.key_length, :, : problem.head_dim],
        d_value[:, : problem.key_length, :, : problem.value_dim],
    ]
    if problem.bias:
        d_logits = jnp.swapaxes(inputs["d_logits"][...][:, :, : problem.key_length, : problem.query_length], 2, 3)
        axes = tuple(d for d in range(4) if problem.bias[d] == 1)
        results.append(d_logits.astype(jnp.float32).sum(axes, keepdims=True).astype(ops.bias.dtype))
    if problem.sinks:
        weight = jnp.where(nothing, 0.0, jnp.exp(ops.sinks[:, None] - jnp.where(nothing, 0.0, lse)))
        results.append((weight * delta).sum((0, 2)).astype(ops.sinks.dtype))
    return tuple(results)
