"""The backward kernels share this: tiles of keys and their steps, the order of dQ, and a step's probabilities.

A tile of keys is multiplied with tile after tile of queries, a step each, of all query heads that read the keys. An
ordered dQ is deterministic: tiles of keys add to a tile of dQ one after another. The first one stores, so that nothing
is cleared before, and the last one can write the gradient itself. A semaphore in global memory, one for each warpgroup
and tile of queries, counts the tiles that have added.
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
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.attention import gather, mask, tile_scheduler
from pallas_kernels.attention.mask import TileRange
from pallas_kernels.attention.online_softmax import TileCoord
from pallas_kernels.attention.problem import AnyBackwardConfig, Attention
from pallas_kernels.hardware import WARPGROUP_ROWS
from pallas_kernels.mosaic import fast_math, pipeline, ptx, wgmma
from pallas_kernels.mosaic.fast_math import LOG2E
from pallas_kernels.mosaic.pipeline import Stages
from pallas_kernels.mosaic.ptx import WGMMA, Index, Ref

Compare = bool | jax.Array  # whether a step compares indices and segment ids, and applies the mask
COLUMN = WGMMA.reduce(0)
INFINITY = 0x7F800000  # as a word


# Tiles and steps.


class Sequence(NamedTuple):
    """The lengths of an element of the batch, and its `mask.window_bounds`."""

    keys: Index
    queries: Index  # tiles of them
    left: Index
    right: Index


class Step(NamedTuple):
    """One tile of queries against the tile of keys; `n` counts the stages of all the CTA's tiles before, too."""

    head: Index
    i: Index
    n: jax.Array
    starts: Index  # whether it is the tile's first
    visit: jax.Array  # `first <= visit < end` of the range: `i`, unless tiles are staggered


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of keys: the problem, its references, and which keys they are."""

    problem: Attention
    config: Any  # an `AnyBackwardConfig`: which one, its kernel knows
    refs: SimpleNamespace  # operands, results and scratch
    batch: Index
    key_head: Index
    index: Index
    sequence: Sequence
    span: TileRange  # the tiles of queries that see some of the keys
    first_stage: Index
    t: Any = None  # which of the CTA's tiles it is, where a ring of records tells

    @classmethod
    def of(
        cls,
        problem: Attention,
        config: AnyBackwardConfig,
        refs: SimpleNamespace,
        tile: jax.Array,
        first_stage: Index = 0,
    ) -> "Tile":
        """Returns the `tile`th of all tiles of keys."""
        per_head, together = -(-problem.key_length // config.block_kv), _heads_per_group(problem, config)
        section, tile = lax.div(tile, per_head * together), lax.rem(tile, per_head * together)
        index, head = lax.div(tile, together), section * together + lax.rem(tile, together)
        batch, key_head = _batch_and_head(problem, head)
        if last_tile_first(problem, config):
            index = (per_head - 1) - index
        sequence = sequence_at(problem, config, refs, batch)
        if problem.has_data_mask:
            at = gather.broadcast_index((batch, key_head, index), refs.spans.shape)
            span = TileRange(*(refs.spans[*at, i] for i in range(4)))
        else:
            span = _span(problem, config, index * config.block_kv, sequence)
        return cls(problem, config, refs, batch, key_head, index, sequence, span, first_stage)

    @classmethod
    def of_record(
        cls, problem: Attention, config: AnyBackwardConfig, refs: SimpleNamespace, t: Index, *, uniform: bool = True
    ) -> "Tile":
        """Returns the CTA's tile `t`, from its record; the batch is negative if there is no such tile."""
        batch, key_head, index, first_stage, *span = tile_scheduler.read(refs.tile_smem, t, uniform=uniform)
        sequence = sequence_at(problem, config, refs, batch)
        return cls(problem, config, refs, batch, key_head, index, sequence, TileRange(*span), first_stage, t)

    @property
    def record(self) -> tuple[Index, ...]:
        """The numbers that `of_record` reads."""
        return self.batch, self.key_head, self.index, self.first_stage, *self.span

    def reload(self) -> "Tile":
        """Returns the tile from its record again, which frees registers meanwhile."""
        return self if self.t is None else self.of_record(self.problem, self.config, self.refs, self.t)

    def next_tile(self) -> "Tile":
        """Returns the CTA's next tile, for one warp's copies."""
        return self.of_record(self.problem, self.config, self.refs, self.t + 1, uniform=False)

    @property
    def first_key(self) -> Index:
        return self.index * self.config.block_kv

    @property
    def source_head(self) -> Index:
        """The head of the keys in memory, which the splits of a group share."""
        splits = self.config.head_splits
        return self.key_head if splits == 1 else lax.div(self.key_head, splits)

    @property
    def group(self) -> int:
        """Query heads that read these keys."""
        return self.problem.group

    def coord(self, row: Index) -> TileCoord:
        """Says where gradients of keys from `row` on are written."""
        return TileCoord(self.batch, self.key_head, row, self.problem.key_length, self.problem.query_length)

    @property
    def ragged(self) -> bool:
        """Says whether a tile of keys may hold some that do not exist."""
        return _ragged(self.problem, self.config)

    @property
    def steps(self) -> Index:
        queries = lax.sub(self.span.end, self.span.first)
        return queries if self.group == 1 else lax.mul(queries, self.group)

    @property
    def stages(self) -> Index:
        """Steps, and as many stages without one as make a pipeline's depth, so that refills look one tile ahead."""
        return lax.max(self.steps, self.config.stages)

    def step(self, h: Index, i: Any) -> Step:
        """Returns the step of head `h` of the group and the `i`th tile of queries."""
        n = h * (self.span.end - self.span.first) + (i - self.span.first)
        return Step(self.key_head * self.group + h, self.visited(i), self.first_stage + n, n == 0, i)

    def visited(self, i: Index) -> Index:
        """Returns the `i`th tile of queries; staggered tiles of keys start at different ones that need no mask."""
        if not self.config.staggered:
            return i
        _, first, end, _ = self.span
        later = i + lax.rem(self.index, lax.max(end - first, 1))
        later = ptx.where(later >= end, later - (end - first), later)
        return ptx.where((first <= i) & (i < end), later, i)

    def each_head[Carry](self, visit: Callable[[Index, Carry], Carry], carry: Carry) -> Carry:
        """Runs `carry = visit(h, carry)` for each head of the group."""
        return visit(0, carry) if self.group == 1 else lax.fori_loop(0, self.group, visit, carry)

    def each_unmasked_step[Carry](self, visit: Callable[[Step, Carry], Carry], carry: Carry) -> Carry:
        """Runs `carry = visit(step, carry)` for the steps of `each_step`, in their order, without a mask."""

        def of_head(h: Index, carry: Carry) -> Carry:
            step = lambda i, carry: visit(self.step(h, i), carry)
            return lax.fori_loop(self.span.first, self.span.end, step, carry)

        return self.each_head(of_head, carry)

    def each_step[Carry](self, visit: Callable[["Tile", Step, Compare, Carry], Carry], carry: Carry) -> Carry:
        """Runs `carry = visit(tile, step, compare, carry)` for each head and tile of queries that sees keys.

        Steps before, within and after those that need no mask have a loop each. Where the mask is data there is one
        loop, and `compare` is a value of the kernel: with three loops, heads of 64 spill 60 bytes, not 12 (segments).
        """
        _, _, left, right = self.sequence

        def of_head(h: Index, carry: Carry) -> Carry:
            def piece(start: str, stop: str, compare: Callable[[TileRange, jax.Array], Compare], carry: Carry) -> Carry:
                tile = self.reload()

                def step(i: jax.Array, carry: Carry) -> Carry:
                    return visit(tile, tile.step(h, i), compare(tile.span, i), carry)

                return lax.fori_loop(getattr(tile.span, start), getattr(tile.span, stop), step, carry)

            if self.problem.has_data_mask:
                return piece("first", "end", lambda span, i: (i < span.inner_first) | (i >= span.inner_end), carry)
            if right is not None or self.ragged:
                carry = piece("first", "inner_first", lambda span, i: True, carry)
            carry = piece("inner_first", "inner_end", lambda span, i: False, carry)
            if left is not None:
                carry = piece("inner_end", "end", lambda span, i: True, carry)
            return carry

        return self.each_head(of_head, carry)


def tile_count(problem: Attention, config: AnyBackwardConfig) -> int:
    """Says how many tiles of keys there are."""
    return problem.batch * problem.key_heads * -(-problem.key_length // config.block_kv)


def spans(problem: Attention, config: AnyBackwardConfig, ops: SimpleNamespace, blocks: mask.BlockMask) -> jax.Array:
    """Returns the spans of all tiles of keys, `[B|1, K|1, tiles, 4]`, of pairs of tiles of keys and of queries."""
    blocks = mask.of_group(blocks, problem.group)
    met = mask.tile_ranges(blocks, -(-problem.query_length // config.block_q))
    first_keys = jnp.arange(0, problem.key_length, config.block_kv)[None, None, :]
    span = _span(problem, config, first_keys, sequence_at(problem, config, ops, (slice(None), None, None)))
    by = TileRange(*(met[..., i] for i in range(4)))
    first = _clip(by.first, span.first, span.end)
    end = _clip(by.end, first, span.end)
    inner_first = _clip(jnp.maximum(span.inner_first, by.inner_first), first, end)
    inner_end = _clip(jnp.minimum(span.inner_end, by.inner_end), inner_first, end)
    return jnp.stack([first, inner_first, inner_end, end], axis=3)


def sequence_at(
    problem: Attention, config: AnyBackwardConfig, operands: SimpleNamespace, batch: Index | tuple[slice | None, ...]
) -> Sequence:
    """Returns the sequence at `batch`, or the sequences."""
    keys, queries = problem.key_length, problem.query_length
    if problem.key_lengths:
        keys = jnp.minimum(operands.key_lengths[batch], keys)
    if problem.query_lengths:
        queries = jnp.minimum(operands.query_lengths[batch], queries)
    tiles = _div(queries + (config.block_q - 1), config.block_q)
    return Sequence(keys, tiles, *mask.window_bounds(problem, queries, keys))


def last_tile_first(problem: Attention, config: AnyBackwardConfig) -> bool:
    """Says whether the last tile of keys adds first.

    Under a bound on the right it starts at the last queries, and waits for no tile that starts before them.
    """
    return config.ordered_dq and mask.window_bounds(problem)[1] is not None


def _ragged(problem: Attention, config: AnyBackwardConfig) -> bool:
    return problem.key_lengths or problem.key_length % config.block_kv != 0


def _span(problem: Attention, config: AnyBackwardConfig, key: Index, sequence: Sequence) -> TileRange:
    """Returns the tiles of queries that see some key of the tile that begins at `key`."""
    keys, queries, left, right = sequence
    block_q, last = config.block_q, key + (config.block_kv - 1)
    first, inner_first, inner_end, end = 0, 0, queries, queries
    if right is not None:
        first = _div(key - right, block_q)
        inner_first = _div(last - right + (block_q - 1), block_q)
    if left is not None:
        end = _clip(_div(last - left + block_q, block_q), 0, queries)
        inner_end = _div(key - left + 1, block_q)
    first = _clip(first, 0, end)
    if _ragged(problem, config):
        end = first + (end - first) * jnp.int32(key < keys)
        inner_first = jnp.maximum(inner_first, end * jnp.int32(last >= keys))
    inner_first = _clip(inner_first, first, end)
    return TileRange(first, inner_first, _clip(inner_end, inner_first, end), end)


def _heads_per_group(problem: Attention, config: AnyBackwardConfig) -> int:
    """Says of how many heads the tiles of keys are interleaved."""
    heads = problem.batch * problem.key_heads
    return max(g for g in range(1, config.heads_per_l2_group + 1) if heads % g == 0)


def _batch_and_head(problem: Attention, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the batch element and the key head at place `head` of the order in which tiles start."""
    if problem.bias is not None and problem.bias[0] == 1 and 1 not in problem.bias[1:]:
        # The sequences of a head share its bias in L2.
        return lax.rem(head, problem.batch), lax.div(head, problem.batch)
    return lax.div(head, problem.key_heads), lax.rem(head, problem.key_heads)


def _div(x: Index, y: int) -> Index:
    """Returns `max(x, 0) // y`."""
    return max(x, 0) // y if isinstance(x, int) else lax.div(jnp.maximum(x, 0), y)


def _clip(x: Index, low: Index, high: Index) -> Index:
    if all(isinstance(v, int) for v in (x, low, high)):
        return min(max(x, low), high)
    return jnp.minimum(jnp.maximum(x, low), high)


# The order of dQ.


def dq_position(tile: Tile, i: Index) -> Index:
    """Says how many tiles of keys add to tile `i` of queries before this one."""
    if tile.problem.has_data_mask:
        position = tile.refs.dq_position
        return position[*gather.broadcast_index((tile.batch, tile.key_head, tile.index, i), position.shape)]
    first, last = _adders(tile, i)
    return tile.index - first if mask.window_bounds(tile.problem)[1] is None else last - tile.index


def is_last(tile: Tile, i: Index) -> Index:
    """Says whether no tile of keys adds to tile `i` of queries after this one."""
    first, last = _adders(tile, i)
    return tile.index == (last if mask.window_bounds(tile.problem)[1] is None else first)


def _adders(tile: Tile, i: Index) -> tuple[Index, Index]:
    """Returns the first and the last tile of keys that add to tile `i` of queries, where shapes and lengths tell."""
    keys, _, left, right = tile.sequence
    block_q, block_kv = tile.config.block_q, tile.config.block_kv
    first, last = 0 if left is None else _div(i * block_q + left, block_kv), _div(keys - 1, block_kv)
    if right is None:
        return first, last
    return first, jnp.minimum(_div(i * block_q + (block_q - 1 + right), block_kv), last)


def dq_positions(problem: Attention, config: AnyBackwardConfig, spans: jax.Array) -> jax.Array:
    """Returns `dq_position` of each tile of keys and each of queries, from the spans `[B|1, K|1, tiles of keys, 4]`."""
    i = jnp.arange(-(-problem.query_length // config.block_q))[None, None, None, :]
    adds = ((spans[..., :1] <= i) & (i < spans[..., 3:])).astype(jnp.int32)
    return lax.cumsum(adds, axis=2, reverse=last_tile_first(problem, config)) - adds


@functools.lru_cache(maxsize=64)
def dq_writer_counts(problem: Attention, config: AnyBackwardConfig) -> tuple[int, int] | None:
    """Says how many tiles of keys, at least and at most, add to a tile of queries; None: only the device knows."""
    if problem.key_lengths or problem.query_lengths or problem.has_data_mask:
        return None
    left, right = mask.window_bounds(problem)
    block_q, block_kv = config.block_q, config.block_kv
    counts = {0} if problem.query_length == 0 else set()
    for row in range(0, problem.query_length, block_q):
        first = 0 if left is None else max(row + left, 0) // block_kv
        last = -(-problem.key_length // block_kv) - 1
        if right is not None:
            last = min(last, (row + block_q - 1 + right) // block_kv)
        counts.add(max(last - first + 1, 0))
    return min(counts), max(counts)


def first_stores(problem: Attention, config: AnyBackwardConfig) -> bool:
    """Says whether some tile of keys is known to add first to each tile of dQ, which then need not be zero before.

    D = 128, S = 2048, bf16: zeros take 40 us, 3 % of all, H200.
    """
    known = dq_writer_counts(problem, config)
    return config.ordered_dq and known is not None and known[0] > 0


def add_ordered(tile: Tile, source: Any, target: Any, earlier: Index | None) -> None:
    """Adds a square to dQ in global memory; `earlier`: how many tiles add before, None where dQ is not ordered."""

    def reduce() -> None:
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

    if earlier is None or not first_stores(tile.problem, tile.config):
        return reduce()
    pl.when(earlier == 0)(lambda: plgpu.copy_smem_to_gmem(source, target))
    pl.when(earlier > 0)(reduce)


def semaphore_value(tile: Tile, step: Step, warpgroup: Index) -> jax.Array:
    """Loads how many tiles have added, long before it is needed: the load takes a third of a step."""

    def load_semaphore(ctx, semaphore):
        text = "ld.relaxed.gpu.global.s32 $0, [$1];"
        ended = ptx.asm_value(text, "=r,l", [ptx.global_address(semaphore)])
        return ptx.integer(ended)

    return ptx.inline(load_semaphore, _counter(tile, warpgroup, step.head, step.i), result=ptx.INTEGER)


def acquire_dq(tile: Tile, step: Step, warpgroup: Index, value: Index, ended: jax.Array) -> None:
    """Waits until `value` tiles have added; `ended`: the semaphore's last known value."""

    def acquire_semaphore(ctx, semaphore, value, ended):
        text = (
            "{ .reg .pred early; .reg .s32 now; mov.s32 now, $2; "
            "AGAIN: setp.lt.s32 early, now, $1; @!early bra MINE; "
            "ld.relaxed.gpu.global.s32 now, [$0]; bra AGAIN; "
            "MINE: fence.acq_rel.gpu; fence.proxy.async.global; }"
        )
        operands = [ptx.global_address(semaphore), ptx.scalar(value), ptx.scalar(ended)]
        ptx.asm(text, "l,r,r,~{memory}", operands)

    ptx.inline(acquire_semaphore, _counter(tile, warpgroup, step.head, step.i), value, ended)


def release_previous_dq(tile: Tile, step: Step, warpgroup: Index) -> None:
    """Releases the semaphore of the step before, once its square has arrived."""
    plgpu.wait_smem_to_gmem(0)

    @pl.when(~step.starts)
    def _():
        new_head = jnp.int32(step.i == tile.span.first)
        i = step.i - 1 + new_head * (tile.span.end - tile.span.first)
        _release_semaphore(_counter(tile, warpgroup, step.head - new_head, i))


def release_last_dq(tile: Tile, warpgroup: Index) -> None:
    """Releases the semaphore of the last step, once its square has arrived."""
    plgpu.wait_smem_to_gmem(0)

    @pl.when(tile.steps > 0)
    def _():
        last = tile.key_head * tile.group + (tile.group - 1)
        _release_semaphore(_counter(tile, warpgroup, last, tile.span.end - 1))


def _counter(tile: Tile, warpgroup: Index, head: Index, i: Index) -> jax.Ref:
    return tile.refs.dq_semaphore.at[warpgroup, tile.batch, head, i]


def _release_semaphore(semaphore: jax.Ref) -> None:
    """Lets the next tile add, after the square is visible to it.

    The release takes longer than the rest of the ordering. Without the release and the acquire of `acquire_dq`, some
    rows were wrong in 2 % of calls: 512 tokens, 32 heads of 64, causal, H100.
    """

    def release_semaphore(ctx, semaphore):
        leader = ptx.compare("eq", ptx.thread_in_warpgroup(), 0)
        text = "@$1 red.release.gpu.global.add.s32 [$0], 1;"
        ptx.asm(text, "l,b,~{memory}", [ptx.global_address(semaphore), leader])

    ptx.inline(release_semaphore, semaphore)


# Probabilities.


def by_column(ref: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns one number a column, of float32 in shared memory, for all rows of `shape`."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=COLUMN, optimized=False), shape, [1])


def capped_bias(problem: Attention) -> bool:
    """Says whether a soft cap is between a bias and the scores, so that their gradients differ by its slope.

    The slope waits in shared memory until then: beside a bias there are no registers for it.
    """
    return problem.bias is not None and problem.soft_cap is not None


def load_early(tile: Tile, step: Step, warpgroup: Index) -> dict[str, jax.Array]:
    """Loads the mask's bits, two registers, while the products run."""
    if not tile.problem.mask:
        return {}
    corner = tile.batch, step.head, *_corner(tile, step, warpgroup)
    return {"mask_bits": gather.load_bits(tile.refs.mask, 2, corner, tile.config.block_q)}


def load_late(tile: Tile, step: Step, warpgroup: Index) -> dict[str, jax.Array]:
    """Loads the bias, each thread for itself: there are no registers for it before."""
    if not tile.problem.bias or tile.config.bias_stages:
        return {}
    corner = tile.batch, step.head, *_corner(tile, step, warpgroup)
    return {"bias": gather.load_tile(tile.refs.bias, corner, tile.config.block_q)}


def first_scores(tile: Tile, stages: Stages, issue: Callable[[Index], jax.Array]) -> jax.Array:
    """Returns the product of keys and queries of the tile's first step, which `issue` begins, if there is a step."""

    def multiply() -> jax.Array:
        stages.wait(tile.first_stage)
        return wgmma.wait(issue(tile.first_stage), pending=0)

    zeros = lambda: plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, tile.config.block_q), jnp.float32), WGMMA)
    return lax.cond(jnp.int32(tile.steps) > 0, multiply, zeros)


def soft_capped(problem: Attention, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns the products scaled and capped, times log2(e), and the cap's derivative."""
    if problem.soft_cap is None:
        return x * (problem.scale * LOG2E), None
    # tanh(y) = 1 - 2 / (1 + exp(2 y)), and tanh' = 1 - tanh^2; the hardware's tanh errs by 2^-11.
    tanh = 1.0 - 2.0 / (1.0 + fast_math.exp_16bit(x * (2 * problem.scale / problem.soft_cap)))
    return tanh * (problem.soft_cap * LOG2E), 1.0 - tanh * tanh


def probabilities(
    tile: Tile, step: Step, warpgroup: Index, x: jax.Array, extras: dict[str, jax.Array], compare: Compare
) -> jax.Array:
    """Returns the probabilities of `soft_capped` products `x [64 keys, queries]`; `compare`: indices, ids and mask."""
    problem, refs = tile.problem, tile.refs
    corner = tile.batch, step.head, *_corner(tile, step, warpgroup)
    if problem.bias:
        x = x + extras["bias"].astype(jnp.float32) * LOG2E
    compared = functools.partial(_apply_mask, tile, extras, corner)
    if problem.has_data_mask:
        x = lax.cond(compare, compared, lambda x: x, x)
    elif compare:
        x = compared(x)
    lse = by_column(refs.lse_smem.at[lax.rem(step.n, tile.config.stages)], x.shape)
    return fast_math.weight_in_sum(x, lse)


def _corner(tile: Tile, step: Step, warpgroup: Index) -> tuple[Index, Index]:
    """Returns a tile's first key and query."""
    return tile.first_key + warpgroup * WARPGROUP_ROWS, step.i * tile.config.block_q


def _apply_mask(tile: Tile, extras: dict[str, jax.Array], corner: gather.Corner, x: jax.Array) -> jax.Array:
    """Returns `x` with -inf where indices, mask, segments or positions forbid it."""
    x = _in_bounds(tile, x, *corner[2:])
    if tile.problem.mask:
        x = gather.apply_bitmask(x, extras["mask_bits"])
    if tile.problem.segments:
        x = gather.apply_segments(x, tile.refs.key_segments, tile.refs.query_segments, corner)
    if tile.problem.positions:
        bounds = query_bounds(tile.problem)
        x = gather.apply_positions(x, tile.refs.key_positions, tile.refs.query_positions, corner, bounds)
    return x


def query_bounds(problem: Attention) -> tuple[int | None, int | None]:
    """Returns the bounds of a query's position less the key's: `mask.position_bounds` seen from the key."""
    left, right = mask.position_bounds(problem)
    return None if right is None else -right, None if left is None else -left


def _in_bounds(tile: Tile, x: jax.Array, key: Index, row: Index) -> jax.Array:
    """Puts -inf where a query of `row` ... does not see a key of `key` ... by its place, or there is none."""
    keys, _, left, right = tile.sequence
    shape, ragged = x.shape, tile.ragged
    limits = [keys - key if ragged else WARPGROUP_ROWS]
    limits += [row - key + right if right is not None else 0, row - key + left if left is not None else 0]

    def mask_tile(ctx, x, keys, most, least):
        registers = x.registers.copy()
        thread = ptx.reread_thread_index()
        lane, warp = ptx.rem(thread, 32), ptx.div(thread, 32)
        first = ptx.add(ptx.mul(warp, 16), ptx.div(lane, 4))
        column = ptx.mul(ptx.rem(lane, 4), 2)
        outside = utils.c(-math.inf, ir.F32Type.get())
        keys, most, least = (ptx.scalar(v) for v in (keys, most, least))
        for r in range(2):
            at = ptx.add(first, 8 * r)
            # The register's column is a constant, so that each comparison is one instruction.
            lowest = ptx.sub(ptx.sub(at, most), column)
            highest = ptx.sub(ptx.sub(at, least), column)
            exists = ptx.compare("slt", at, keys)
            for j in range(shape[1] // 8):
                values = []
                for e, value in enumerate(ptx.elements(registers.flat[2 * j + r])):
                    tests = [exists] if ragged else []
                    constant = ptx.c32(8 * j + e)
                    if right is not None:
                        tests.append(ptx.compare("sge", constant, lowest))
                    if left is not None:
                        tests.append(ptx.compare("sle", constant, highest))
                    for test in tests:
                        value = arith.select(test, value, outside)
                    values.append(value)
                registers.flat[2 * j + r] = vector.from_elements(registers.flat[2 * j + r].type, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return ptx.inline(
        mask_tile,
        (x, WGMMA),
        *limits,
        result=(shape, jnp.float32, WGMMA),
        static={"left": left, "ragged": ragged, "right": right, "shape": shape},
    )


def zero_rows(target: Ref, lse: Ref) -> None:
    """The calling warp zeroes the rows of a stage's panels whose lse is inf, before products read them.

    Cotangents of rows without a key may be NaN. XLA would have to copy all cotangents to zero them.
    """
    panels, rows, _ = target.shape
    panel_bytes = rows * pipeline.SWIZZLE_BYTES

    def zero_rows_of_warp(ctx, target, lse):
        line = range(0, pipeline.SWIZZLE_BYTES, pipeline.VECTOR_BYTES)
        offsets = [panel * panel_bytes + b for panel in range(panels) for b in line]
        text = (
            "{ .reg .b32 lane, row, word, place; .reg .b64 at; .reg .pred empty, more; "
            "mov.u32 lane, %laneid; mov.b32 row, lane; AGAIN: "
            "mad.wide.u32 at, row, 4, $0; ld.global.b32 word, [at]; "
            f"setp.eq.b32 empty, word, {INFINITY}; mad.lo.u32 place, row, {pipeline.SWIZZLE_BYTES}, $1; "
            + " ".join(f"@empty st.shared.v4.b32 [place+{offset}], {{0, 0, 0, 0}};" for offset in offsets)
            + f" add.u32 row, row, 32; setp.lt.u32 more, row, {rows}; @more bra AGAIN; "
            "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; }"
        )
        ptx.asm(text, "l,r,~{memory}", [ptx.global_address(lse), ptx.shared_address(target)])

    ptx.inline(zero_rows_of_warp, target, lse)
