"""Flash attention, forward: softmax(Q K^T) V in one pass over the keys; the scores never leave the registers.

A CTA of `warpgroups` warpgroups works on tiles of query rows, 64 rows a warpgroup. Each warpgroup folds tiles of keys
and values into the (maximum, sum, output) of its rows' online softmax. It multiplies a tile's scores while the tensor
cores still work on the output of the tile before. There is no producer warpgroup: `pipeline` says how stages are
refilled. A stage holds the keys of a step and the values of the step before, which are read in the same step. The
pipeline runs on from one tile of queries to the next, so that a tile begins with its first keys in shared memory.
Traffic: Q read once, K and V once per tile of queries (mostly from L2), out and lse written once.
Sources: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import hardware
from pallas_kernels.attention import combine, epilogue, gather, mask, online_softmax, tile_scheduler
from pallas_kernels.attention.mask import TileRange
from pallas_kernels.attention.online_softmax import State, TileCoord, by_row, finalize, initial, update
from pallas_kernels.attention.problem import Attention, ForwardConfig, operand_names, unsupported_reason
from pallas_kernels.hardware import WARPGROUP_ROWS, Device
from pallas_kernels.mosaic import pipeline, ptx, reduce, votes, wgmma
from pallas_kernels.mosaic.pipeline import Scratch, Stages
from pallas_kernels.mosaic.ptx import WGMMA, Index, Place, Ref
from pallas_kernels.mosaic.wgmma import PANEL, panels, tiled

Cta = SimpleNamespace  # `problem`, `config`, and the references of operands, results and scratch by their names

_PAGED_QUERIES = 1024  # of more, gathering the pages first costs little beside the products


def unsupported(problem: Attention, device: Device) -> str | None:
    """Says why the kernel does not take the problem."""
    size = problem.page_size
    if size % 8 or size & (size - 1):
        return f"the kernel takes pages of 8, 16, 32 ... positions; they have {size}"
    if size and (problem.batch_invariant or problem.query_length > _PAGED_QUERIES):
        return f"the kernel takes pages for up to {_PAGED_QUERIES} queries, and not under batch_invariant()"
    return unsupported_reason(problem, widest=256)


def scratch(problem: Attention, config: ForwardConfig) -> Scratch:
    """Lays out a CTA's shared memory by name; the output leaves through as many columns as there is room for."""
    w, stages, dtype = config.warpgroups, config.stages, problem.dtype
    memory: Scratch = {
        "query_smem": panels((w, WARPGROUP_ROWS, problem.head_dim), dtype),
        "key_smem": panels((stages, config.block_kv, problem.head_dim), dtype),
        "value_smem": panels((stages, config.block_kv, problem.value_dim), dtype),
        "barrier_smem": pipeline.barriers(
            _ring_rows(problem, config) + len(pipeline.arrivals(_stages(problem, config)))
        ),
    }
    if config.bias_stages:
        assert problem.bias_dtype is not None
        memory["bias_smem"] = tiled((config.bias_stages, config.block_q, config.block_kv), problem.bias_dtype)
    # Mosaic's kernels declare one byte more than their scratch.
    room = hardware.H200.smem_per_cta - 1 - pipeline.scratch_bytes(memory)
    columns = min(problem.value_dim, room // (w * WARPGROUP_ROWS * dtype.itemsize) // PANEL * PANEL)
    return memory | {"out_smem": panels((w, WARPGROUP_ROWS, max(columns, 1)), dtype)}


def shared_bytes(problem: Attention, config: ForwardConfig) -> int:
    """Counts the bytes of shared memory."""
    return pipeline.scratch_bytes(scratch(problem, config))


def _stages(problem: Attention, config: ForwardConfig) -> dict[str, Stages]:
    """Returns the table of stages: of each warpgroup's queries, of keys and values, and of the bias.

    Values of which only the first exist are copied to a `partial` stage first.
    """
    w = config.warpgroups
    return {
        "query_stages": Stages(w, readers=ptx.WARPS),
        "kv_stages": Stages(config.stages, readers=ptx.WARPS * w),
        "bias_stages": Stages(config.bias_stages, readers=ptx.WARPS * w),
        "partial_values": Stages(config.stages * problem.key_lengths),
    }


def _ring_rows(problem: Attention, config: ForwardConfig) -> int:
    """Counts the rows that the ring of tile records takes."""
    return tile_scheduler.rows(10 if _records_lengths(problem, config) else 8)


def _records_lengths(problem: Attention, config: ForwardConfig) -> bool:
    """Says whether tiles' records say how many queries and keys there are."""
    return problem.query_lengths or problem.key_lengths or config.splits > 1


class _Tile(NamedTuple):
    """A tile of queries: the CTA's tile number `t`, its first step `n`, what it is, and which tiles of keys it sees."""

    t: Index
    n: Index
    batch: Index
    head: Index
    key_head: Index
    index: Index  # of the head's tiles and their splits
    span: TileRange
    queries: Index  # of the sequence
    keys: Index

    @property
    def steps(self) -> Index:
        return lax.sub(self.span.end, self.span.first)


class _Step(NamedTuple):
    """A tile of keys."""

    batch: Index
    key_head: Index
    key: Index  # its first
    keys: Index  # of the sequence
    exists: Index  # 1 or 0


def _start(cta: Cta) -> None:
    """Runs the prologue: barriers, the first tiles' records, and the copies of the first stages."""
    problem, config, me = cta.problem, cta.config, lax.axis_index("cta")

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _():
        pipeline.start(cta.barriers, pipeline.arrivals(_stages(problem, config)))
        # The first copies start before the other tiles' records are published.
        _publish(cta, 0, _index(cta, 0, me))

        @pl.when(pipeline.is_first_warp() != 0)
        def _():
            for w in range(config.warpgroups):
                _fill_query(cta, _read(cta, 0), w)
            _fill_first(cta, _read(cta, 0))

        for t in range(1, tile_scheduler.LOOKAHEAD):
            _publish(cta, t, _index(cta, t, me + t * cta.ctas))

        @pl.when(pipeline.is_first_warp() != 0)
        def _():
            for i in range(1, config.stages):
                cta.fill(_read(cta, 0), np.int32(i))
            for i in range(config.bias_stages):
                _fill_bias(cta, _read(cta, 0), i)

    reduce.sync_block(config.warpgroups)


def _index(cta: Cta, t: Index, tile_number: Index) -> jax.Array:
    """Finds the index of the CTA's tile `t` in its row of the table, or, with a dynamic scheduler, by `tile_number`."""
    if cta.config.scheduler == "static":
        me, last = lax.axis_index("cta"), cta.tiles.shape[1] - 2
        return ptx.where(t < cta.tiles[me, 0], cta.tiles[me, 1 + lax.min(t, last)], tile_scheduler.NO_TILE)
    return cta.tiles[lax.min(tile_number, cta.tiles.shape[0] - 1)]


def _fetch_tile_number(cta: Cta) -> jax.Array:
    """Fetches the number of one more tile from the counter, in warpgroup 0; nothing waits for it yet."""
    if cta.config.scheduler == "static":
        return jnp.int32(0)
    return lax.cond(
        lax.axis_index("warpgroup") == 0, lambda: tile_scheduler.fetch_tile(cta.tile_counter), lambda: jnp.int32(0)
    )


def _publish(cta: Cta, t: Index, tile: jax.Array) -> None:
    """Publishes the record of the CTA's tile `t` to its warpgroups: where its queries are, and what they see."""
    problem, config = cta.problem, cta.config
    exists, tile = (tile != tile_scheduler.NO_TILE).astype(jnp.int32), lax.max(tile, 0)
    per_head = -(-problem.query_length // config.queries) * config.splits
    packs = problem.query_heads // config.packed_heads
    head, index = lax.div(tile, per_head), lax.rem(tile, per_head)
    batch, head = lax.div(head, packs), lax.rem(head, packs)
    queries, keys = jnp.int32(problem.query_length), jnp.int32(problem.key_length)
    if problem.query_lengths:
        queries = mask.clip(cta.query_lengths[batch], 0, queries)
    if problem.key_lengths:
        keys = mask.clip(cta.key_lengths[batch], 0, keys)

    def load_span() -> TileRange:
        of_head = index if config.splits == 1 else lax.div(index, config.splits)
        at = gather.broadcast_index((batch, head, of_head), cta.spans.shape)
        return TileRange(*(cta.spans[*at, i] for i in range(4)))

    load = load_span if problem.has_data_mask else None
    span, sees_any = mask.tile_kv_range(problem, config, index, queries, keys, load)
    if config.splits > 1:
        keys = ptx.where(sees_any, keys, 0)
    key_head = lax.div(head, packs // problem.key_heads)
    first, inner_first, inner_end, end = (jnp.int32(x) * exists for x in span)
    record = batch, key_head, first, end, head, index, inner_first, inner_end
    if _records_lengths(problem, config):
        record += queries, keys
    tile_scheduler.publish(cta.tile_smem, t, record)


def _read(cta: Cta, t: Index) -> _Tile:
    """Returns the record of the CTA's tile `t`, as if it began at step 0; a tile that does not exist has no steps."""
    return _tile(cta, tile_scheduler.read(cta.tile_smem, t, uniform=False), t, 0)


def _read_steps(cta: Cta, t: Index) -> jax.Array:
    """Says how many steps the CTA's tile `t` has."""
    _, _, first, end = tile_scheduler.read(cta.tile_smem, t, uniform=False, fields=4)
    return lax.sub(end, first)


def _tile(cta: Cta, record: tuple[jax.Array, ...], t: Index, n: Index) -> _Tile:
    """Returns the tile that a record describes."""
    batch, key_head, first, end, head, index, inner_first, inner_end, *lengths = record
    queries, keys = cta.problem.query_length, cta.problem.key_length
    if cta.problem.query_lengths:
        queries = lengths[0]
    if cta.problem.key_lengths or cta.config.splits > 1:
        keys = lengths[1]
    span = TileRange(first, inner_first, inner_end, end)
    return _Tile(ptx.int32(t), ptx.int32(n), batch, head, key_head, index, span, queries, keys)


def _tile_coord(cta: Cta, tile: _Tile) -> TileCoord:
    """Returns the coordinates of the tile's rows."""
    index = tile.index if cta.config.splits == 1 else lax.div(tile.index, cta.config.splits)
    row = lax.mul(index, cta.config.queries)
    return TileCoord(tile.batch, tile.head, row, tile.queries, tile.keys, cta.config.packed_heads)


def _step_of(cta: Cta, tile: _Tile, i: Index) -> _Step:
    """Returns the tile's step `i`."""
    return _Step(tile.batch, tile.key_head, _key_of(cta, tile, i), tile.keys, 1)


def _key_of(cta: Cta, tile: _Tile, i: Index) -> jax.Array:
    """Returns the first key of the tile's step `i`."""
    return lax.mul(lax.sub(lax.sub(tile.span.end, 1), i), cta.config.block_kv)


def _step_before(cta: Cta, tile: _Tile, i: Index, before: _Tile) -> _Step:
    """Returns the step before the tile's step `i`; before its first step, the last one of the tile `before`."""
    last_key = lax.mul(before.span.first, cta.config.block_kv)
    last = _Step(before.batch, before.key_head, last_key, before.keys, 1)
    steps, is_within = (_step_of(cta, tile, lax.sub(i, 1)), last), lax.gt(i, 0)
    return _Step(*(x if x is y else lax.select(is_within, x, y) for x, y in zip(*steps, strict=True)))


def _fill_query(cta: Cta, tile: _Tile, warpgroup: Index) -> None:
    """The calling warp issues the copy of a warpgroup's rows of the tile of queries, if there is one."""

    @pipeline.when(tile.steps > 0)
    def _():
        copy = cta.query, _rows_of(_own(_tile_coord(cta, tile), warpgroup)), cta.query_smem.at[warpgroup]
        cta.query_stages.issue(warpgroup, copy)


def _own(coord: TileCoord, warpgroup: Index) -> TileCoord:
    """Returns the place of a warpgroup's rows of a tile."""
    return coord._replace(row=coord.row + warpgroup * (WARPGROUP_ROWS // coord.heads))


def _rows_of(coord: TileCoord) -> tuple[Place, ...]:
    """Returns the index of a warpgroup's rows in the queries and in the output."""
    heads = coord.head if coord.heads == 1 else pl.ds(coord.head * coord.heads, coord.heads)
    return coord.batch, pl.ds(coord.row, WARPGROUP_ROWS // coord.heads), heads


def _fill_first(cta: Cta, tile: _Tile) -> None:
    """The calling warp issues the copy of the CTA's first keys, if it has a tile of queries."""
    step, to = _step_of(cta, tile, 0), cta.key_smem.at[0]

    @pipeline.when(tile.steps > 0)
    def _():
        if cta.problem.key_lengths:
            cta.partial_values.expect(0, 0)
        _issue(cta, cta.kv_stages, 0, (cta.key, step, to))


def _fill(cta: Cta, tile: _Tile, i: Index) -> None:
    """The calling warp issues the copies of the keys of the tile's step `i` and the values of the step before."""
    stage = cta.kv_stages.stage(tile.n + i)
    to = cta.key_smem.at[stage], cta.value_smem.at[stage]
    key_bytes, value_bytes = (pipeline.size(ref) for ref in to)

    def copy(key: _Step, value: _Step) -> None:
        keys, values = (cta.key, key, to[0]), (cta.value, value, to[1])
        count, whole = key_bytes * key.exists + value_bytes * value.exists, value.exists
        if isinstance(count, int) and not cta.problem.key_lengths:
            return _issue(cta, cta.kv_stages, stage, keys, values)
        if cta.problem.key_lengths:
            whole = value.exists * (value.keys - value.key >= cta.config.block_kv).astype(jnp.int32)
            pipeline.when(whole < value.exists)(lambda: _fill_partial_values(cta, value, tile.n + i))
            pipeline.when(whole == value.exists)(lambda: cta.partial_values.expect(stage, 0))
            count -= value_bytes * (value.exists - whole)
        cta.kv_stages.expect(stage, count)
        _when(key.exists, lambda: _issue(cta, cta.kv_stages, stage, keys, announced=True))
        _when(whole, lambda: _issue(cta, cta.kv_stages, stage, values, announced=True))

    def copy_later() -> None:
        following, j = _read(cta, tile.t + 1), i - tile.steps
        is_next = j < following.steps

        def copy_next() -> None:
            key, value = _step_of(cta, following, j), _step_before(cta, following, j, tile)
            copy(key, value._replace(exists=1))

        def copy_any() -> None:
            later, j = _tile_with_step(cta, tile, i)
            exists = j < later.steps
            key = _step_of(cta, later, j)._replace(exists=exists.astype(jnp.int32))
            # After the CTA's last tile, a stage has the last values and no keys.
            value = _step_before(cta, later, j, _read(cta, later.t - 1))
            value = value._replace(exists=(exists | (j == 0)).astype(jnp.int32))
            pipeline.when(value.exists)(lambda: copy(key, value))

        pipeline.when(is_next)(copy_next)
        pipeline.when(~is_next)(copy_any)

    # Most steps are within the tile: their copies do not wait for the records of others.
    within = i < tile.steps
    pipeline.when(within)(lambda: copy(_step_of(cta, tile, i), _step_of(cta, tile, i - 1)))
    pipeline.when(~within)(copy_later)


def _tile_with_step(cta: Cta, tile: _Tile, i: Index) -> tuple[_Tile, Any]:
    """Finds the later tile that has step `i`, counted from the first step of `tile`, and the step's number there."""

    def is_behind(state: tuple[Index, Index]) -> jax.Array:
        steps = _read_steps(cta, state[0])
        return (steps > 0) & (state[1] >= steps)

    def to_next(state: tuple[Index, Index]) -> tuple[Index, Index]:
        return state[0] + 1, state[1] - _read_steps(cta, state[0])

    t, j = lax.while_loop(is_behind, to_next, (tile.t + 1, i - tile.steps))
    return _read(cta, t), j


def _when(exists: Index, copy: Callable[[], None]) -> None:
    copy() if isinstance(exists, int) else pipeline.when(exists)(copy)


def _fill_partial_values(cta: Cta, step: _Step, n: Index) -> None:
    """The calling warp copies values of which only the first exist, and zeroes the others, which may be NaN."""
    stage = cta.partial_values.stage(n)
    to = cta.value_smem.at[stage]
    _issue(cta, cta.partial_values, stage, (cta.value, step, to))
    cta.partial_values.wait(n)
    pipeline.zero_rows(to, step.keys - step.key)


def _issue(
    cta: Cta, stages: Stages, stage: Index, *copies: tuple[jax.Ref, _Step, Ref], announced: bool = False
) -> None:
    """The calling warp announces the bytes of steps' keys or values, unless it has done so, and issues their copies."""
    problem = cta.problem
    if not problem.page_size or problem.page_size >= cta.config.block_kv:
        parts = ((source, _key_place(cta, step), to) for source, step, to in copies)
        return stages.issue(stage, *parts, announced=announced)
    if not announced:
        stages.expect(stage, sum(pipeline.size(to) for *_, to in copies))
    for source, step, to in copies:
        at = step.batch, step.key, step.key_head
        pipeline.copy_pages(source, cta.block_tables, at, to, stages.full.at[stage], pages_first=problem.pages_first)


def _key_place(cta: Cta, step: _Step) -> tuple[Place, ...]:
    """Returns the index of a step's keys: in their sequence, or in a page."""
    problem, rows = cta.problem, cta.config.block_kv
    if not problem.page_size:
        return step.batch, pl.ds(step.key, rows), step.key_head
    # The last tile may go on behind the table.
    entry = lax.min(lax.div(step.key, problem.page_size), cta.block_tables.shape[1] - 1)
    page, at = cta.block_tables[step.batch, entry], pl.ds(lax.rem(step.key, problem.page_size), rows)
    return (page, at, step.key_head) if problem.pages_first else (step.key_head, page, at)


def _fill_bias(cta: Cta, tile: _Tile, i: Index) -> None:
    """The calling warp issues the copy of the bias of the tile's step `i`."""
    problem, config, i = cta.problem, cta.config, jnp.int32(i)
    stage = cta.bias_stages.stage(tile.n + i)
    to = cta.bias_smem.at[stage]

    def copy(tile: _Tile, i: Index) -> None:
        batch, head = gather.broadcast_index((tile.batch, tile.head), problem.bias)
        rows, keys = pl.ds(_tile_coord(cta, tile).row, config.block_q), pl.ds(_key_of(cta, tile, i), config.block_kv)
        cta.bias_stages.issue(stage, (cta.bias, (batch, head, rows, keys), to))

    def copy_later() -> None:
        later, j = _tile_with_step(cta, tile, i)
        pipeline.when(j < later.steps)(lambda: copy(later, j))

    within = i < tile.steps
    pipeline.when(within)(lambda: copy(tile, i))
    pipeline.when(~within)(copy_later)


def _release_stage(cta: Cta, tile: _Tile, i: Index) -> None:
    """Releases the stage of the tile's step `i`: its keys, and the values of the step before."""
    stages = cta.kv_stages
    stages.release(stages.stage(tile.n + i), lambda: cta.fill(tile, i + stages.count))


def _read_bias(cta: Cta, tile: _Tile, i: jax.Array) -> jax.Array:
    """Loads the bias of a warpgroup's scores, and releases its stage."""
    stage = cta.bias_stages.stage(tile.n + i)
    rows = pl.ds(lax.axis_index("warpgroup") * WARPGROUP_ROWS, WARPGROUP_ROWS)
    cta.bias_stages.wait(tile.n + i)
    bias = plgpu.load(cta.bias_smem.at[stage, rows], layout=WGMMA, optimized=False)
    plgpu.commit_smem()  # TMA writes where threads have read
    cta.bias_stages.release(stage, lambda: _fill_bias(cta, tile, i + cta.bias_stages.count))
    return bias


def _tiles(cta: Cta) -> None:
    """Computes all tiles of queries of this CTA."""
    warpgroup = lax.axis_index("warpgroup")

    def visit(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        t, n, index, *record = state
        tile = _tile(cta, tuple(record), t, n)
        split = lax.rem(tile.index, cta.config.splits)
        coord, queries = _own(_tile_coord(cta, tile), warpgroup), WARPGROUP_ROWS // cta.config.packed_heads
        own = mask.kv_range(cta.problem, cta.config.block_kv, coord.row, queries, coord.queries, coord.keys)
        narrows = cta.problem.has_data_mask or cta.config.splits > 1
        own = (mask.intersect if narrows else mask.clamp)(tile.span, own)
        start, stop = tile.span.end - own.end, tile.span.end - own.first
        _skip(cta, tile, 0, start)
        tile_number = _fetch_tile_number(cta)
        lacks_page = _lacks_page(cta, tile) if cta.problem.page_size else None
        state, following = _mainloop(cta, tile, coord, own, index)
        _skip(cta, tile, stop, tile.steps)
        if lacks_page is not None:
            lost = lax.select(lacks_page, np.float32(np.nan), np.float32(0))
            state = state._replace(max=state.max + lost, sum=state.sum + lost)
        _epilogue(cta, coord, split, state)
        # The next tile publishes this index in its first step; the load overlaps with that tile's start.
        index = _index(cta, t + 1 + tile_scheduler.LOOKAHEAD, tile_number)
        return t + 1, n + tile.steps, index, *following

    index = _index(cta, tile_scheduler.LOOKAHEAD, _fetch_tile_number(cta))
    first = jnp.int32(0), jnp.int32(0), index, *tile_scheduler.read(cta.tile_smem, 0)
    lax.while_loop(lambda state: _tile(cta, state[3:], 0, 0).steps > 0, visit, first)


def _lacks_page(cta: Cta, tile: _Tile) -> jax.Array:
    """Says whether a page of the tile's keys does not exist; the copies of the first keys run meanwhile."""
    size, (first, end) = cta.problem.page_size, (i * cta.config.block_kv for i in (tile.span.first, tile.span.end))
    first = lax.div(first, size)
    # `pl.cdiv` would divide by a number of 64 bits under jax_enable_x64.
    end = lax.div(lax.min(end, tile.keys) + (size - 1), size)
    pages = cta.key.shape[0 if cta.problem.pages_first else 1]
    return gather.lacks_page(cta.block_tables, tile.batch, first, end, pages)


def _skip(cta: Cta, tile: _Tile, start: Index, stop: Index) -> None:
    """Passes steps whose keys the CTA's other warpgroups see, but not this one."""
    refill_kv = lambda i: cta.fill(tile, i + cta.kv_stages.count)
    refill_bias = lambda i: _fill_bias(cta, tile, i + cta.bias_stages.count)
    pipeline.drain(tile.n, start, stop, (cta.kv_stages, refill_kv), (cta.bias_stages, refill_bias))


def _mainloop(
    cta: Cta, tile: _Tile, coord: TileCoord, span: TileRange, index: jax.Array
) -> tuple[State, tuple[jax.Array, ...]]:
    """Folds all tiles of keys that the warpgroup's queries see, from the last to the first, into the queries' state.

    `index`: the tile of queries whose record is to be published meanwhile.
    """
    config, problem, warpgroup = cta.config, cta.problem, lax.axis_index("warpgroup")
    skipped, count = tile.span.end - span.end, span.end - span.first

    def stage(i: Index) -> Index:
        return cta.kv_stages.stage(tile.n + skipped + i)

    def wait(i: Index) -> None:
        cta.kv_stages.wait(tile.n + skipped + i)

    def logits(i: jax.Array, edge: bool | jax.Array | None, finished: Callable[[], jax.Array]) -> jax.Array:
        key = (span.end - 1 - i) * config.block_kv
        extras = online_softmax.load_extras(problem, cta, coord, key, config.block_kv, copied=config.bias_stages > 0)
        x = finished()
        if config.bias_stages:
            extras = extras._replace(bias=_read_bias(cta, tile, skipped + i))
        return online_softmax.logits(problem, cta, coord, extras, x, key, edge)

    def multiply_keys(i: jax.Array) -> jax.Array:
        shape = WARPGROUP_ROWS, config.block_kv
        cleared = None if config.zero_init_free else plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)
        # The queries' descriptors, kept all along the loop, would leave the warp no registers for the stages'.
        query = cta.query_smem.at[ptx.opaque(warpgroup)]
        return wgmma.multiply(query, cta.key_smem.at[stage(i)], depth=problem.head_dim, sums=cleared)

    def first() -> jax.Array:
        i = jnp.int32(0)
        wait(i)
        issued = multiply_keys(i)
        pl.when(warpgroup == 0)(lambda: _publish(cta, tile.t + tile_scheduler.LOOKAHEAD, index))
        return logits(i, True, lambda: wgmma.wait(issued, pending=0))

    def release_query() -> None:
        """Releases the queries; the next tile's record is published, as the tile's second step has begun."""
        cta.query_stages.release(warpgroup, lambda: _fill_query(cta, _read(cta, tile.t + 1), warpgroup))

    def finish_scores(issued: jax.Array, i: jax.Array) -> jax.Array:
        x = wgmma.wait(issued, pending=1)
        if config.prefetch_query:
            pipeline.when(i == count - 1)(release_query)
        return x

    def step(i: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state = carry[0]
        # ptxas serialises all products if the left operand changes registers while they are under way.
        out, weights = lax.optimization_barrier((state.out, carry[1]))
        wait(i)
        issued = multiply_keys(i)
        summing = wgmma.multiply_rows(out, weights, cta.value_smem.at[stage(i)])
        edge = mask.needs_mask(problem, span, span.end - 1 - i)
        x = logits(i, edge, lambda: finish_scores(issued, i))
        released: list[jax.Array] = []

        def release() -> None:
            plgpu.wgmma_wait(0)
            released.append(cta.kv_stages.arrive(stage(i)))

        halfway = (lambda: None) if config.overlap_pv else release
        new, new_weights, rescale = update(problem, config, state, x, halfway=halfway)
        if config.overlap_pv:
            wgmma.pin_wait_after(new.sum)
            release()
        summed = wgmma.wait(summing, pending=0)
        pipeline.when(released[0])(lambda: cta.fill(tile, skipped + i + config.stages))
        return new._replace(out=rescale(summed)), new_weights

    def last(out: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        wait(count)
        summing = wgmma.multiply_rows(out, weights, cta.value_smem.at[stage(count)])
        # From here on, the next tile's record is published.
        following = tile_scheduler.read(cta.tile_smem, tile.t + 1)
        release_query() if not config.prefetch_query else pipeline.when(count == 1)(release_query)
        return wgmma.wait(summing, pending=0), following

    cta.query_stages.alone(warpgroup).wait(tile.t)
    x = first()
    _release_stage(cta, tile, skipped)
    state, weights, _ = update(problem, config, initial(problem.value_dim), x, first=True)
    # All tiles share one loop: with another loop for tiles that need a mask, ptxas serialises the products.
    state, weights = lax.fori_loop(1, count, step, (state, weights))
    out, following = last(state.out, weights)
    return state._replace(out=out), following


def _epilogue(cta: Cta, coord: TileCoord, split: Index, state: State) -> None:
    """Divides by the sums, and writes a warpgroup's rows, as many columns at a time as there is shared memory for."""
    problem, warpgroup = cta.problem, lax.axis_index("warpgroup")
    hidden = None
    if problem.query_lengths:
        hidden = coord.queries_of_rows() >= coord.queries - coord.row
    sink = None
    if problem.sinks and cta.config.splits == 1:
        sink = cta.sinks[coord.head] if coord.heads == 1 else gather.load_of_heads(cta.sinks, coord.head, coord.heads)
    unseen, factor, lse = finalize(state, sink, hidden)
    # The outputs of a split follow those of the splits before, along the batch.
    coord = coord._replace(batch=split * problem.batch + coord.batch)
    epilogue.store_rows(cta.lse, lse, coord, queries_first=cta.config.splits > 1)

    def hide(out: jax.Array) -> jax.Array:
        return ptx.where(by_row(unseen, out), jnp.zeros_like(out), out)

    columns = cta.out_smem.shape[1] * PANEL
    for start in range(0, problem.value_dim, columns):
        out = state.out[:, start : min(start + columns, problem.value_dim)]
        out = lax.cond(votes.warp_any(unseen), hide, lambda out: out, out * by_row(factor, out))
        if cta.config.splits > 1:
            epilogue.store_sums(cta.out, out, coord, start)
            continue
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        wgmma.stmatrix(cta.out_smem.at[warpgroup], out.astype(problem.dtype), once=True)
        plgpu.commit_smem()
        pipeline.store_rows(cta.out_smem.at[warpgroup], cta.out, _rows_of(coord), start)


def _body(*refs: jax.Ref, names: tuple[str, ...], problem: Attention, config: ForwardConfig, ctas: int) -> None:
    cta = Cta(problem=problem, config=config, ctas=ctas, **dict(zip(names, refs, strict=True)))
    ptx.cut_by_operations(cta, "barrier_smem", "query_smem", "key_smem", "value_smem", "out_smem")
    first = _ring_rows(cta.problem, cta.config)
    cta.tile_smem = cta.barrier_smem.at[pl.ds(0, first)]
    cta.barriers = cta.barrier_smem.at[pl.ds(first, cta.barrier_smem.shape[0] - first)]
    pipeline.bind(cta, _stages(cta.problem, cta.config), cta.barriers)
    cta.fill = jax.jit(functools.partial(_fill, cta))  # which traces it once
    _start(cta)
    _tiles(cta)
    plgpu.wait_smem_to_gmem(0)


def addressable(problem: Attention, config: ForwardConfig, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Makes the operands as the kernel reads them, and each tile's span of keys where data masks say what is seen."""
    arrays = dict(arrays)
    masks, keys, blocks = [], arrays["key"].shape[1], (config.queries, config.block_kv)
    if "mask" in arrays:
        columns = arrays["mask"].shape[3]
        arrays["mask"] = mask.pack_bits(arrays["mask"], 3)
        blocks_of = mask.every_block if config.visits_hidden else mask.bitmask_blocks
        masks.append(blocks_of(arrays["mask"], 3, columns, *blocks))
    if "query_segments" in arrays:
        masks.append(mask.segment_blocks(arrays["query_segments"], arrays["key_segments"], *blocks))
    if "query_positions" in arrays:
        positions, bounds = (arrays["query_positions"], arrays["key_positions"]), mask.position_bounds(problem)
        masks.append(mask.position_blocks(*positions, *blocks, bounds))
        tiles = -(-problem.query_length // config.queries) * config.warpgroups
        arrays["query_bases"] = mask.block_bases(positions[0], WARPGROUP_ROWS, tiles)
        arrays["key_bases"] = mask.block_bases(positions[1], config.block_kv, -(-keys // config.block_kv))
    for name in ("segments", "positions"):
        if f"query_{name}" in arrays:
            arrays[f"query_{name}"] = arrays[f"query_{name}"][:, None, :, None]
            arrays[f"key_{name}"] = arrays[f"key_{name}"][:, None, None, :]
    if masks:
        arrays["spans"] = mask.tile_ranges(functools.reduce(mask.both, masks), -(-keys // config.block_kv))
    return arrays


def tile_table(problem: Attention, config: ForwardConfig) -> tuple[int, np.ndarray | jax.Array]:
    """Returns the number of CTAs, and the table of their tiles of queries."""
    ctas = hardware.current().sm_count * config.ctas_per_sm
    return ctas, tile_scheduler.table(problem, config, ctas)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def run(problem: Attention, config: ForwardConfig, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel."""
    arrays = addressable(problem, config, dict(zip(operand_names(problem), operands, strict=True)))
    ctas, tiles = tile_table(problem, config)
    batch, out_dtype = config.splits * problem.batch, problem.dtype if config.splits == 1 else jnp.float32
    rows = problem.query_length, problem.query_heads
    of_lse = rows if config.splits > 1 else rows[::-1]
    out_type = (
        jax.ShapeDtypeStruct((batch, *rows, problem.value_dim), out_dtype),
        jax.ShapeDtypeStruct((batch, *of_lse), jnp.float32),
    )
    dynamic, memory = config.scheduler == "dynamic", scratch(problem, config)
    order = (*arrays, "tiles", *["tile_counter"] * dynamic, "out", "lse", *memory)
    kernel = plgpu.kernel(
        functools.partial(_body, names=order, problem=problem, config=config, ctas=ctas),
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=list(memory.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        kernel_name="attention",
    )
    call = functools.partial(tile_scheduler.call, kernel, ctas, out_type) if dynamic else kernel
    out, lse = call(*arrays.values(), jnp.asarray(tiles))
    if config.splits == 1:
        return out, lse
    parts, lses = (x.reshape(config.splits, problem.batch, *x.shape[1:]) for x in (out, lse))
    out, lse = combine.run(parts, lses, arrays.get("sinks"), problem.dtype)
    return out, jnp.swapaxes(lse, 1, 2)
