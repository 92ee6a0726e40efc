"""Flash attention, backward, for heads of 129 to 256: two warpgroups, each with one gradient of 64 keys in registers.

Warpgroup 0 has dV: it multiplies the scores, finds the probabilities and adds to dV. Warpgroup 1 has dK: it multiplies
the gradient of the probabilities, finds the scores' gradient and adds to dK. Each also multiplies half of the columns
of dQ. Probabilities go from 0 to 1 and score gradients from 1 to 0 through shared memory, once a step. These two
barriers order all else that the warpgroups share: a step's score gradients say that warpgroup 1 has read the
probabilities, and the cotangents; the next step's probabilities say that warpgroup 0 has read the score gradients.
So warpgroup 0 alone releases cotangents, and warpgroup 1 queries; the last warp to do so issues the next copies.

A step of 64 queries and heads of 256: 10.5 MFLOP in five products, 2560 cycles of the tensor cores. Through shared
memory: copies 64 KiB, factors of products 240 KiB, P and dS 40 KiB, 2750 cycles. dQ is added to global memory in
float32, 64 KiB, from registers; if ordered, by copies from shared memory, 128 KiB more.
Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, for the overlap of products and exponentials.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import backward_common, backward_xla, epilogue, gather, mask
from pallas_kernels.attention.backward_common import (
    Compare,
    Step,
    Tile,
    by_column,
    capped_bias,
    first_scores,
    load_late,
    probabilities,
    soft_capped,
)
from pallas_kernels.attention.backward_xla import CHUNK, TILE, padded_dims
from pallas_kernels.attention.mask import TileRange
from pallas_kernels.attention.problem import Attention, BackwardWideConfig, unsupported_reason
from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import mbarrier, pipeline, ptx, reduce, votes, wgmma
from pallas_kernels.mosaic.pipeline import Copy, Scratch, Stages
from pallas_kernels.mosaic.ptx import WGMMA, Index, Ref
from pallas_kernels.mosaic.wgmma import panels, store, tiled

Sums = tuple[jax.Array, ...]  # the pieces of a gradient

VALUES, KEYS = 0, 1  # the warpgroups
PIECE = 2 * CHUNK  # columns of a gradient that one product adds to


def unsupported(problem: Attention, device: Device) -> str | None:
    """Says why the kernel does not take the problem."""
    return unsupported_reason(problem, widest=256)


def _stages(problem: Attention, config: BackwardWideConfig) -> dict[str, Stages]:
    """Returns the table of stages: what is copied, and what the warpgroups give each other."""
    ends, holes = int(problem.key_lengths), int(mask.may_see_nothing(problem))
    return {
        "key_stages": Stages(1),
        "value_stages": Stages(1),
        "p_stages": Stages(1, writers=ptx.WARPGROUP),
        "ds_stages": Stages(1, writers=ptx.WARPGROUP),
        "query_stages": Stages(config.stages, readers=ptx.WARPS),
        "d_out_stages": Stages(config.d_out_stages, readers=ptx.WARPS),
        "bias_stages": Stages(config.bias_stages, readers=ptx.WARPS),
        "partial_query": Stages(holes),
        "partial_d_out": Stages(holes),
        "partial_key": Stages(ends),
        "partial_value": Stages(ends),
    }


def scratch(problem: Attention, config: BackwardWideConfig) -> Scratch:
    """Lays out shared memory, by name."""
    (head_dim, value_dim), dtype, optional = padded_dims(problem), problem.dtype, {}
    if config.bias_stages:
        optional["bias_smem"] = tiled((config.bias_stages, *TILE), problem.bias_dtype)
    if capped_bias(problem):
        optional["slope_smem"] = plgpu.SMEM(wgmma.SQUARE, jnp.float32)
    return optional | dict(
        key_smem=panels((1, CHUNK, head_dim), dtype),
        value_smem=panels((1, CHUNK, value_dim), dtype),
        query_smem=panels((config.stages, CHUNK, head_dim), dtype),
        d_out_smem=panels((config.d_out_stages, CHUNK, value_dim), dtype),
        squares_smem=plgpu.SMEM((config.squares, *wgmma.SQUARE), jnp.float32),
        ds_smem=panels((1, *TILE), dtype),
        statistics_smem=plgpu.SMEM((config.stages + config.d_out_stages, CHUNK), jnp.float32),
        barriers=pipeline.barriers(len(pipeline.arrivals(_stages(problem, config)))),
    )


def shared_bytes(problem: Attention, config: BackwardWideConfig) -> int:
    """Counts the bytes of shared memory."""
    return pipeline.scratch_bytes(scratch(problem, config))


def _slot(n: Index, stages: int) -> jax.Array:
    """Returns the stage of step `n`, computed where it is used: see `ptx.opaque`."""
    return ptx.opaque(lax.rem(n, stages))


# The copies, each issued by one warp.


def _prologue(tile: Tile) -> None:
    """Fills the keys' and the values' stage, and those of queries, cotangents and bias."""
    refs, config = tile.refs, tile.config

    @pl.when(pipeline.is_first_warp() != 0)
    def _():
        for i in range(max(config.stages, config.d_out_stages, config.bias_stages)):
            if i == 0:
                _fill_keys(tile, refs.key, refs.key_smem.at[0], refs.key_stages, refs.partial_key)
            if i < config.stages:
                _fill_query(tile, i)
            if i == 0:
                _fill_keys(tile, refs.value, refs.value_smem.at[0], refs.value_stages, refs.partial_value)
            if i < config.d_out_stages:
                _fill_d_out(tile, i)
            if i < config.bias_stages:
                _fill_bias(tile, i)


def _fill_keys(tile: Tile, source: jax.Ref, to: Ref, stages: Stages, partial: Stages) -> None:
    """Copies the keys or the values; zeroes those past the sequence's end, which may be NaN."""
    at = tile.batch, pl.ds(tile.first_key, CHUNK), tile.source_head
    if not tile.problem.key_lengths:
        return stages.issue(0, (source, at, to))
    left = tile.sequence.keys - tile.first_key
    pl.when(left >= CHUNK)(lambda: stages.issue(0, (source, at, to)))

    @pl.when(left < CHUNK)
    def _():
        partial.issue(0, (source, at, to))
        partial.wait(0)
        pipeline.zero_rows(to, left)
        stages.expect(0, 0)


def _with_step(fill: Callable[[Tile, Step], None]) -> Callable[[Tile, Index], None]:
    """Makes `fill(tile, step)` a function of the step's number in the tile that does nothing past the last step."""

    @functools.wraps(fill)
    def fill_if_any(tile: Tile, before: Index) -> None:
        @pl.when(before < tile.steps)
        def _():
            queries = tile.span.end - tile.span.first
            h = lax.div(jnp.int32(before), queries) if tile.group > 1 else 0
            i: Index = tile.span.first + (before - h * queries)
            # A known step past the only tile of queries is not taken, but its slice is checked.
            i = min(i, max(tile.problem.query_length - 1, 0) // CHUNK) if isinstance(i, int) else i
            fill(tile, tile.step(h, i))

    return fill_if_any


@_with_step
def _fill_query(tile: Tile, step: Step) -> None:
    """Copies a step's queries and their lse."""
    refs, stage, rows = tile.refs, lax.rem(step.n, tile.config.stages), pl.ds(step.i * CHUNK, CHUNK)
    query = refs.query, (tile.batch, rows, step.head), refs.query_smem.at[stage]
    lse = refs.lse, (tile.batch, step.head, rows), refs.lse_smem.at[stage]
    _fill_rows(tile, step, refs.query_stages, refs.partial_query, query, lse)


@_with_step
def _fill_d_out(tile: Tile, step: Step) -> None:
    """Copies a step's cotangents and their delta."""
    refs, stage, rows = tile.refs, lax.rem(step.n, tile.config.d_out_stages), pl.ds(step.i * CHUNK, CHUNK)
    d_out = refs.d_out, (tile.batch, rows, step.head), refs.d_out_smem.at[stage]
    delta = refs.delta, (tile.batch, step.head, rows), refs.delta_smem.at[stage]
    _fill_rows(tile, step, refs.d_out_stages, refs.partial_d_out, d_out, delta)


def _fill_rows(tile: Tile, step: Step, stages: Stages, partial: Stages, rows: Copy, statistic: Copy) -> None:
    """Copies rows and their statistic; zeroes rows without a key, which may be NaN."""
    refs, stage = tile.refs, lax.rem(step.n, stages.count)
    if not mask.may_see_nothing(tile.problem):
        return stages.issue(stage, rows, statistic)
    nothing = refs.without_keys[tile.batch, step.head, step.i] != 0
    # A phase of `partial` ends at each step, so that the step's number is the phase's.
    pl.when(~nothing)(lambda: partial.expect(0, 0))
    pl.when(~nothing)(lambda: stages.issue(stage, rows, statistic))

    @pl.when(nothing)
    def _():
        partial.issue(0, rows)
        partial.wait(step.n)
        backward_common.zero_rows(rows[2], refs.lse.at[tile.batch, step.head, pl.ds(step.i * CHUNK, CHUNK)])
        stages.issue(stage, statistic)


@_with_step
def _fill_bias(tile: Tile, step: Step) -> None:
    """Copies a step's tile of the bias."""
    refs, stage = tile.refs, lax.rem(step.n, tile.config.bias_stages)
    batch, head = gather.broadcast_index((tile.batch, step.head), refs.bias.shape)
    at = batch, head, pl.ds(step.i * CHUNK, CHUNK), pl.ds(tile.first_key, CHUNK)
    refs.bias_stages.issue(stage, (refs.bias, at, refs.bias_smem.at[stage]))


def _release(tile: Tile, step: Step, stages: Stages, fill: Callable[[Tile, Index], None]) -> None:
    """Releases the step's stage, which the step gets that is `stages.count` later."""
    stages.release(lax.rem(step.n, stages.count), lambda: fill(tile, step.n - tile.first_stage + stages.count))


# Warpgroup 0.


def _values(tile: Tile) -> None:
    """Runs the warpgroup of dV, and of the probabilities."""
    mbarrier.wait(tile.refs.key_stages.full.at[0], jnp.int32(0))

    issue = functools.partial(_issue_scores, tile)
    first = first_scores(tile, tile.refs.query_stages, issue) if tile.config.prefetch_scores else None
    _, sums = tile.each_step(_add_to_dv, (first, _zeros(tile.problem.value_dim)))
    _epilogue(tile, VALUES, sums, tile.refs.value_smem.at[0], tile.refs.d_value)


def _issue_scores(tile: Tile, n: Index) -> jax.Array:
    """Begins the product of keys and queries of step `n`."""
    here, slot = ptx.opaque(jnp.int32(0)), _slot(n, tile.config.stages)
    depth = tile.problem.head_dim
    return wgmma.multiply(tile.refs.key_smem.at[here], tile.refs.query_smem.at[slot], depth=depth)


def _issue_next_scores(tile: Tile, step: Step) -> jax.Array:
    """Begins the next step's product; after the last step it repeats this one, which is cheaper than a branch."""
    follows = step.n - tile.first_stage + 1 < tile.steps
    pl.when(follows)(lambda: tile.refs.query_stages.wait(step.n + 1))
    return _issue_scores(tile, step.n + jnp.int32(follows))


def _add_to_dv(
    tile: Tile, step: Step, compare: Compare, carry: tuple[jax.Array | None, Sums]
) -> tuple[jax.Array | None, Sums]:
    """Takes a step of warpgroup 0, `P = exp(S - lse)` and `dV += P dO`, with P transposed.

    `carry` is the product of keys and queries, if that is multiplied ahead, and dV.
    """
    x, sums = carry
    problem, config, refs = tile.problem, tile.config, tile.refs
    d_out_slot = _slot(step.n, config.d_out_stages)
    if x is None:
        refs.query_stages.wait(step.n)
        issued = _issue_scores(tile, step.n)
        extras = _load_early(tile, step)
        x = wgmma.wait(issued, pending=0)
    else:
        extras = _load_early(tile, step)
    if config.bias_stages:
        wgmma.commit_square()
        _release(tile, step, refs.bias_stages, _fill_bias)
    extras |= load_late(tile, step, 0)
    x, slope = soft_capped(problem, x)
    if slope is not None and capped_bias(problem):
        wgmma.store_square(refs.slope_smem, slope)
        slope = None
    p = probabilities(tile, step, 0, x, extras, compare)
    _release_previous(tile, step, VALUES)
    wgmma.store_square(tile.refs.squares_smem.at[0], p if slope is None else p * slope)
    mbarrier.arrive_each(refs.p_stages.full.at[0])
    refs.d_out_stages.wait(step.n)
    sums = _multiply(sums, p.astype(problem.dtype), refs.d_out_smem.at[d_out_slot])
    refs.ds_stages.wait(step.n)

    def release() -> None:
        _release(tile, step, refs.d_out_stages, _fill_d_out)

    def issue_next() -> tuple[int, jax.Array | None]:
        return (1, _issue_next_scores(tile, step)) if config.prefetch_scores else (0, None)

    issued = _add_to_dq(tile, step, VALUES, issue_next, at_first=release)
    issued = None if issued is None else wgmma.wait(issued, pending=0)
    return issued, tuple(map(wgmma.completed, sums))


def _load_early(tile: Tile, step: Step) -> dict[str, jax.Array]:
    """Asks for the mask and bias of the scores before the product is there."""
    refs, slots, extras = tile.refs, tile.config.bias_stages, {}
    if tile.problem.mask:
        corner = tile.batch, step.head, tile.first_key, step.i * CHUNK
        extras["mask_bits"] = gather.load_bits(refs.mask, 2, corner, CHUNK)
    if slots:
        refs.bias_stages.wait(step.n)
        extras["bias"] = plgpu.load(refs.bias_smem.at[lax.rem(step.n, slots)].T, layout=WGMMA)
    return extras


# Warpgroup 1.


def _keys(tile: Tile) -> None:
    """Runs the warpgroup of dK, and of the score gradients."""
    mbarrier.wait(tile.refs.value_stages.full.at[0], jnp.int32(0))
    mbarrier.wait(tile.refs.key_stages.full.at[0], jnp.int32(0))

    sums = tile.each_unmasked_step(functools.partial(_add_to_dk, tile), _zeros(tile.problem.head_dim))
    _epilogue(tile, KEYS, [x * tile.problem.scale for x in sums], tile.refs.key_smem.at[0], tile.refs.d_key)


def _add_to_dk(tile: Tile, step: Step, sums: Sums) -> Sums:
    """Takes a step of warpgroup 1, `dS = P * (V dO^T + delta) * slope` and `dK += dS Q`; `sums`: dK."""
    problem, config, refs = tile.problem, tile.config, tile.refs
    here = ptx.opaque(jnp.int32(0))
    slot, d_out_slot = _slot(step.n, config.stages), _slot(step.n, config.d_out_stages)
    bias_of_scores = problem.bias_gradient and not capped_bias(problem)

    refs.d_out_stages.wait(step.n)
    delta, d_out = by_column(refs.delta_smem.at[d_out_slot], TILE), refs.d_out_smem.at[d_out_slot]
    dp = wgmma.multiply(refs.value_smem.at[here], d_out, depth=problem.value_dim, sums=delta)
    d_p = wgmma.wait(dp, pending=0)
    refs.p_stages.wait(step.n)
    d_scores = wgmma.load_square(tile.refs.squares_smem.at[0]) * d_p
    if capped_bias(problem):
        if problem.bias_gradient:
            store(_d_logits(tile, step), d_scores.astype(problem.dtype))
        d_scores = d_scores * wgmma.load_square(refs.slope_smem)
    ds = d_scores.astype(problem.dtype)
    _release_previous(tile, step, KEYS)
    wgmma.stmatrix(refs.ds_smem.at[0], ds)
    wgmma.commit_square()  # orders the reads of lse and delta, too, before the copies that write over them
    mbarrier.arrive_each(refs.ds_stages.full.at[0])
    refs.ds_stages.wait(step.n)
    if bias_of_scores:
        at = tile.batch, step.head, pl.ds(tile.first_key, CHUNK)
        pipeline.store_rows(refs.ds_smem.at[0], refs.d_logits, at, step.i * CHUNK)
    meanwhile = lambda: (len(sums), _multiply(sums, ds, refs.query_smem.at[slot]))
    sums = _add_to_dq(tile, step, KEYS, meanwhile)
    plgpu.wgmma_wait(0)
    _release(tile, step, refs.query_stages, _fill_query)
    return tuple(map(wgmma.completed, sums))


def _d_logits(tile: Tile, step: Step) -> jax.Ref:
    """Says where the gradient of the tile's logits goes, which is the bias' before its reduction."""
    keys, rows = pl.ds(tile.first_key, CHUNK), pl.ds(step.i * CHUNK, CHUNK)
    return tile.refs.d_logits.at[tile.batch, step.head, keys, rows]


# Both.


def _release_previous(tile: Tile, step: Step, warpgroup: int) -> None:
    """Waits until copies to global memory have left shared memory, and releases the semaphore of the step before."""
    if tile.config.ordered_dq:
        backward_common.release_previous_dq(tile, step, jnp.int32(warpgroup))
    elif tile.problem.bias_gradient:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    elif tile.config.squares > 1:
        wgmma.await_square_read()


def _add_to_dq[T](
    tile: Tile,
    step: Step,
    warpgroup: int,
    meanwhile: Callable[[], tuple[int, T]],
    at_first: Callable[[], None] | None = None,
) -> T:
    """Adds a warpgroup's columns of dQ; `at_first` runs when earlier products are done.

    `meanwhile` begins products, and returns how many, and their results.
    """
    refs, here, ordered = tile.refs, ptx.opaque(jnp.int32(0)), tile.config.ordered_dq
    panels, size = refs.key_smem.shape[1], tile.config.dq_columns // CHUNK
    own = range(panels // 2) if warpgroup == VALUES else range(panels // 2, panels)
    mine = [own[at : at + size] for at in range(0, len(own), size)]
    before = backward_common.dq_position(tile, step.i) if ordered else None
    ended = backward_common.semaphore_value(tile, step, jnp.int32(warpgroup)) if ordered else None
    ds = refs.ds_smem.at[here, 0]
    parts = [wgmma.multiply_columns([ds], [refs.key_smem.at[here, pl.ds(at.start, len(at))]]) for at in mine]
    if at_first is not None:
        # The wait frees the factors' registers: ptxas serialises products if all are under way.
        plgpu.wgmma_wait(len(mine))
        at_first()
    later, issued = meanwhile()
    if before is not None and ended is not None:
        backward_common.acquire_dq(tile, step, jnp.int32(warpgroup), before, ended)
    for i, (part, at) in enumerate(zip(parts, mine, strict=True)):
        numbers = wgmma.wait(part, pending=len(mine) - 1 - i + later)
        for c in range(len(at)):
            square = numbers[:, c * CHUNK : (c + 1) * CHUNK]
            _add_square(tile, step, warpgroup, square, at.start + c, before, i == c == 0)
    return issued


def _add_square(
    tile: Tile, step: Step, warpgroup: int, square: jax.Array, column: int, before: Index | None, is_first: bool
) -> None:
    """Adds 64 columns of dQ to the sum in global memory."""
    target = tile.refs.dq_sum.at[tile.batch, step.head, step.i, column]
    if tile.config.squares == 1:
        return wgmma.add_sums(target, square)
    # Buffer 0 may have the probabilities too: until the score gradients come, warpgroup 0 copies no part of dQ.
    dq_smem = tile.refs.squares_smem.at[tile.config.squares - 2 + warpgroup]
    if tile.config.ordered_dq:
        if not is_first:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        wgmma.store_square(dq_smem, square)
        plgpu.commit_smem()
        backward_common.add_ordered(tile, dq_smem, target, before)
    else:
        if not is_first:
            wgmma.await_square_read()
        wgmma.store_square(dq_smem, square)
        wgmma.add_square(dq_smem, target)


def _pieces(columns: int) -> list[tuple[int, int]]:
    """Lists the first column of each piece of a gradient, and its number of columns."""
    return [(start, min(PIECE, columns - start)) for start in range(0, columns, PIECE)]


def _zeros(columns: int) -> Sums:
    zeros = (jnp.zeros((CHUNK, width), jnp.float32) for _, width in _pieces(columns))
    return tuple(plgpu.layout_cast(x, WGMMA) for x in zeros)


def _multiply(sums: Sums, weights: jax.Array, rows: jax.Ref) -> Sums:
    """Issues the products that add `weights @ rows` to a gradient."""
    panels = rows.shape[0]
    slices = (pl.ds(at, min(PIECE // CHUNK, panels - at)) for at in range(0, panels, PIECE // CHUNK))
    return tuple(wgmma.multiply_rows(x, weights, rows.at[at]) for x, at in zip(sums, slices, strict=False))


def _epilogue(tile: Tile, warpgroup: int, gradient: Sequence[jax.Array], smem: Ref, target: jax.Ref) -> None:
    """Writes dK or dV by way of the keys' or the values' place in shared memory, when no product reads those."""
    if tile.config.ordered_dq:
        backward_common.release_last_dq(tile, jnp.int32(warpgroup))
    reduce.sync_block(tile.config.warpgroups)
    if tile.config.head_splits > 1:
        for i, x in enumerate(gradient):
            epilogue.store_sums(target, x, tile.coord(tile.first_key), i * PIECE)
        return plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, x in enumerate(gradient):
        panels = pl.ds(i * PIECE // CHUNK, -(-x.shape[1] // CHUNK))
        wgmma.stmatrix(smem.at[panels], x.astype(tile.problem.dtype), once=True)
    plgpu.commit_smem()
    pipeline.store_rows(smem, target, (tile.batch, pl.ds(tile.first_key, CHUNK), tile.key_head))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _warp_uniform(tile: Tile) -> Tile:
    """Returns `tile` with numbers that the compiler knows to be the same in all threads.

    The compiler then keeps them, and the products' descriptors, in uniform registers. Without this, a window
    spills 112 bytes a thread, as ptxas -c has it.
    """
    span = TileRange(*(votes.warp_uniform(x) if isinstance(x, jax.Array) else x for x in tile.span))
    facts = {name: votes.warp_uniform(getattr(tile, name)) for name in ("batch", "key_head", "index")}
    return dataclasses.replace(tile, span=span, **facts)


def _body(problem: Attention, config: BackwardWideConfig, refs: SimpleNamespace, ctas: int) -> None:
    table = _stages(problem, config)
    refs.lse_smem = refs.statistics_smem.at[pl.ds(0, config.stages)]
    refs.delta_smem = refs.statistics_smem.at[pl.ds(config.stages, config.d_out_stages)]
    ptx.cut_by_operations(refs, "barriers", "key_smem", "value_smem", "query_smem", "d_out_smem", "ds_smem")
    pipeline.bind(refs, table, refs.barriers)
    pipeline.start(refs.barriers, pipeline.arrivals(table))
    # Mosaic takes no literal where it expects a number of the kernel.
    tile = _warp_uniform(Tile.of(problem, config, refs, lax.axis_index("cta"), 0 * lax.axis_index("cta")))
    reduce.sync_block(config.warpgroups)
    _prologue(tile)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == VALUES)(lambda: _values(tile))
    pl.when(warpgroup == KEYS)(lambda: _keys(tile))


def run(problem: Attention, config: BackwardWideConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the kernel."""
    problem = backward_xla.with_split_heads(problem, config)
    memory, ctas = scratch(problem, config), backward_common.tile_count(problem, config)
    return backward_xla.launch(problem, config, memory, _body, operands, ctas=ctas)
