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
import math
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
from pallas_kernels.mosaic.ptx import WGMMA
from pallas_kernels.mosaic.wgmma import PANEL, panels, tiled

Cta = SimpleNamespace  # `problem`, `config`, and the references of operands, results and scratch by their names

ALIGNMENT = 1024  # of arrays in tiles; others need less
_PAGED_QUERIES = 1024  # of more, gathering the pages first costs little beside the products


def unsupported(problem: Attention, device: Device) -> str | None:
    """Why the kernel does not take the problem."""
    size = problem.page_size
    if size % 8 or size & (size - 1):
        return f"the kernel takes pages of 8, 16, 32 ... positions; they have {size}"
    if size and (problem.batch_invariant or problem.query_length > _PAGED_QUERIES):
        return f"the kernel takes pages for up to {_PAGED_QUERIES} queries, and not under batch_invariant()"
    return unsupported_reason(problem, widest=256)


def scratch(problem: Attention, config: ForwardConfig) -> dict[str, Any]:
    """Lays out a CTA's shared memory by name; the output leaves through as many columns as there is room for."""
    w, stages, dtype = config.warpgroups, config.stages, problem.dtype
    found: dict[str, Any] = {
        "query_smem": panels((w, WARPGROUP_ROWS, problem.head_dim), dtype),
        "key_smem": panels((stages, config.block_kv, problem.head_dim), dtype),
        "value_smem": panels((stages, config.block_kv, problem.value_dim), dtype),
        "words": pipeline.barriers(_ring_rows(problem, config) + len(sum(_arrivals(problem, config).values(), ()))),
    }
    if config.bias_stages:
        assert problem.bias_dtype is not None
        found["bias_smem"] = tiled((config.bias_stages, config.block_q, config.block_kv), problem.bias_dtype)
    # Mosaic's kernels declare one byte more than their scratch.
    room = hardware.H200.smem_per_cta - 1 - _bytes(found)
    columns = min(problem.value_dim, room // (w * WARPGROUP_ROWS * dtype.itemsize) // PANEL * PANEL)
    return found | {"out_smem": panels((w, WARPGROUP_ROWS, max(columns, 1)), dtype)}


def shared_bytes(problem: Attention, config: ForwardConfig) -> int:
    """Counts the bytes of shared memory."""
    return _bytes(scratch(problem, config))


def _bytes(arrays: dict[str, Any]) -> int:
    return sum(-(-math.prod(x.shape) * x.dtype.itemsize // ALIGNMENT) * ALIGNMENT for x in arrays.values())


def _arrivals(problem: Attention, config: ForwardConfig) -> dict[str, tuple[int, ...]]:
    """Returns the CTA's barriers by name, with the number of arrivals that completes a phase."""
    w, stages, bias = config.warpgroups, config.stages, config.bias_stages
    return {
        "query_full": (1,) * w,
        "query_empty": (ptx.WARPS,) * w,
        "stage_full": (1,) * stages,
        "stage_empty": (ptx.WARPS * w,) * stages,
        "bias_full": (1,) * bias,
        "bias_empty": (ptx.WARPS * w,) * bias,
        "partial_full": (1,) * stages * problem.key_lengths,
    }


def _ring_rows(problem: Attention, config: ForwardConfig) -> int:
    """Rows that the ring of tile records takes."""
    return tile_scheduler.rows(10 if _records_lengths(problem, config) else 8)


def _records_lengths(problem: Attention, config: ForwardConfig) -> bool:
    """Whether tiles' records say how many queries and keys there are."""
    return problem.query_lengths or problem.key_lengths or config.splits > 1


class _Tile(NamedTuple):
    """A tile of queries: the CTA's tile number `t`, its first step `n`, what it is, and which tiles of keys it sees."""

    t: Any
    n: Any
    batch: Any
    head: Any
    key_head: Any
    index: Any  # of the head's tiles and their splits
    span: TileRange
    queries: Any  # of the sequence
    keys: Any

    @property
    def steps(self) -> Any:
        return lax.sub(self.span.end, self.span.first)


class _Step(NamedTuple):
    """A tile of keys."""

    batch: Any
    key_head: Any
    key: Any  # its first
    keys: Any  # of the sequence
    exists: Any  # 1 or 0


def _start(cta: Cta) -> None:
    """Runs the prologue: barriers, the first tiles' records, and the copies of the first stages."""
    problem, config, me = cta.problem, cta.config, lax.axis_index("cta")

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _():
        pipeline.start(cta.barriers, sum(_arrivals(problem, config).values(), ()))
        # The first copies start before the other tiles' records are published.
        _publish(cta, 0, _index(cta, 0, me))

        @pl.when(pipeline.is_first_warp() != 0)
        def _():
            for w in range(config.warpgroups):
                _copy_query(cta, _read(cta, 0), w)
            _copy_first_stage(cta, _read(cta, 0))

        for t in range(1, tile_scheduler.LOOKAHEAD):
            _publish(cta, t, _index(cta, t, me + t * cta.ctas))

        @pl.when(pipeline.is_first_warp() != 0)
        def _():
            for i in range(1, config.stages):
                cta.copy_stage(_read(cta, 0), np.int32(i))
            for i in range(config.bias_stages):
                _copy_bias(cta, _read(cta, 0), i)

    reduce.sync_block(config.warpgroups)


def _index(cta: Cta, t: Any, tile_number: Any) -> jax.Array:
    """Finds the index of the CTA's tile `t` in its row of the table, or, with a dynamic scheduler, by `tile_number`."""
    if cta.config.scheduler == "static":
        me, last = lax.axis_index("cta"), cta.tiles.shape[1] - 2
        return ptx.where(t < cta.tiles[me, 0], cta.tiles[me, 1 + lax.min(t, last)], tile_scheduler.NO_TILE)
    return cta.tiles[lax.min(tile_number, cta.tiles.shape[0] - 1)]


def _draw(cta: Cta) -> jax.Array:
    """Warpgroup 0 fetches the number of one more tile from the counter; nothing waits for it yet."""
    if cta.config.scheduler == "static":
        return jnp.int32(0)
    return lax.cond(
        lax.axis_index("warpgroup") == 0, lambda: tile_scheduler.fetch_tile(cta.tile_counter), lambda: jnp.int32(0)
    )


def _publish(cta: Cta, t: Any, tile: jax.Array) -> None:
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


def _read(cta: Cta, t: Any) -> _Tile:
    """Returns the record of the CTA's tile `t`, as if it began at step 0; a tile that does not exist has no steps."""
    return _tile(cta, tile_scheduler.read(cta.tile_smem, t, uniform=False), t, 0)


def _read_steps(cta: Cta, t: Any) -> jax.Array:
    """How many steps the CTA's tile `t` has."""
    _, _, first, end = tile_scheduler.read(cta.tile_smem, t, uniform=False, fields=4)
    return lax.sub(end, first)


def _tile(cta: Cta, record: tuple[Any, ...], t: Any, n: Any) -> _Tile:
    """Returns the tile that a record describes."""
    batch, key_head, first, end, head, index, inner_first, inner_end, *lengths = record
    queries, keys = cta.problem.query_length, cta.problem.key_length
    if cta.problem.query_lengths:
        queries = lengths[0]
    if cta.problem.key_lengths or cta.config.splits > 1:
        keys = lengths[1]
    span = TileRange(first, inner_first, inner_end, end)
    return _Tile(ptx.int32(t), ptx.int32(n), batch, head, key_head, index, span, queries, keys)


def _place(cta: Cta, tile: _Tile) -> TileCoord:
    """Where the tile's rows are."""
    index = tile.index if cta.config.splits == 1 else lax.div(tile.index, cta.config.splits)
    row = lax.mul(index, cta.config.queries)
    return TileCoord(tile.batch, tile.head, row, tile.queries, tile.keys, cta.config.packed_heads)


def _step_of(cta: Cta, tile: _Tile, i: Any) -> _Step:
    """Returns the tile's step `i`."""
    return _Step(tile.batch, tile.key_head, _key_of(cta, tile, i), tile.keys, 1)


def _key_of(cta: Cta, tile: _Tile, i: Any) -> jax.Array:
    """Returns the first key of the tile's step `i`."""
    return lax.mul(lax.sub(lax.sub(tile.span.end, 1), i), cta.config.block_kv)


def _step_before(cta: Cta, tile: _Tile, i: Any, before: _Tile) -> _Step:
    """Returns the step before the tile's step `i`; before its first step, the last one of the tile `before`."""
    last_key = lax.mul(before.span.first, cta.config.block_kv)
    last = _Step(before.batch, before.key_head, last_key, before.keys, 1)
    steps, is_within = (_step_of(cta, tile, lax.sub(i, 1)), last), lax.gt(i, 0)
    return _Step(*(x if x is y else lax.select(is_within, x, y) for x, y in zip(*steps, strict=True)))


def _copy_query(cta: Cta, tile: _Tile, warpgroup: Any) -> None:
    """The calling warp issues the copy of a warpgroup's rows of the tile of queries, if there is one."""

    @pipeline.when(tile.steps > 0)
    def _():
        copy = cta.query, _rows_of(_own(_place(cta, tile), warpgroup)), cta.query_smem.at[warpgroup]
        pipeline.issue(cta.query_full.at[warpgroup], copy)


def _own(place: TileCoord, warpgroup: Any) -> TileCoord:
    """Returns the place of a warpgroup's rows of a tile."""
    return place._replace(row=place.row + warpgroup * (WARPGROUP_ROWS // place.heads))


def _rows_of(place: TileCoord) -> tuple[Any, ...]:
    """Where a warpgroup's rows are in the queries and in the output."""
    heads = place.head if place.heads == 1 else pl.ds(place.head * place.heads, place.heads)
    return place.batch, pl.ds(place.row, WARPGROUP_ROWS // place.heads), heads


def _copy_first_stage(cta: Cta, tile: _Tile) -> None:
    """The calling warp issues the copy of the CTA's first keys, if it has a tile of queries."""
    step, to = _step_of(cta, tile, 0), cta.key_smem.at[0]

    @pipeline.when(tile.steps > 0)
    def _():
        if cta.problem.key_lengths:
            pipeline.expect(cta.partial_full.at[0], 0)
        _issue(cta, cta.stage_full.at[0], (cta.key, step, to))


def _copy_stage(cta: Cta, tile: _Tile, i: Any) -> None:
    """The calling warp issues the copies of the keys of the tile's step `i` and the values of the step before."""
    stage = pipeline.stage(tile.n + i, cta.config.stages)
    full, to = cta.stage_full.at[stage], (cta.key_smem.at[stage], cta.value_smem.at[stage])
    key_bytes, value_bytes = (pipeline.size(ref) for ref in to)

    def copy(key: _Step, value: _Step) -> None:
        keys, values = (cta.key, key, to[0]), (cta.value, value, to[1])
        count, whole = key_bytes * key.exists + value_bytes * value.exists, value.exists
        if isinstance(count, int) and not cta.problem.key_lengths:
            return _issue(cta, full, keys, values)
        if cta.problem.key_lengths:
            whole = value.exists * (value.keys - value.key >= cta.config.block_kv).astype(jnp.int32)
            pipeline.when(whole < value.exists)(lambda: _copy_some_values(cta, value, tile.n + i))
            pipeline.when(whole == value.exists)(lambda: pipeline.expect(cta.partial_full.at[stage], 0))
            count -= value_bytes * (value.exists - whole)
        pipeline.expect(full, count)
        _when(key.exists, lambda: _issue(cta, full, keys, announced=True))
        _when(whole, lambda: _issue(cta, full, values, announced=True))

    def copy_later() -> None:
        following, j = _read(cta, tile.t + 1), i - tile.steps
        is_next = j < following.steps

        def copy_next() -> None:
            key, value = _step_of(cta, following, j), _step_before(cta, following, j, tile)
            copy(key, value._replace(exists=1))

        def copy_any() -> None:
            found, j = _tile_with_step(cta, tile, i)
            exists = j < found.steps
            key = _step_of(cta, found, j)._replace(exists=exists.astype(jnp.int32))
            # The values of a CTA's last step come without keys.
            value = _step_before(cta, found, j, _read(cta, found.t - 1))
            value = value._replace(exists=(exists | (j == 0)).astype(jnp.int32))
            pipeline.when(value.exists)(lambda: copy(key, value))

        pipeline.when(is_next)(copy_next)
        pipeline.when(~is_next)(copy_any)

    # Most steps are within the tile: their copies do not wait for the records of others.
    within = i < tile.steps
    pipeline.when(within)(lambda: copy(_step_of(cta, tile, i), _step_of(cta, tile, i - 1)))
    pipeline.when(~within)(copy_later)


def _tile_with_step(cta: Cta, tile: _Tile, i: Any) -> tuple[_Tile, Any]:
    """The later tile that has the step `i` after the first one of `tile`, and the step's number there."""

    def is_behind(state: tuple[Any, Any]) -> jax.Array:
        steps = _read_steps(cta, state[0])
        return (steps > 0) & (state[1] >= steps)

    def to_next(state: tuple[Any, Any]) -> tuple[Any, Any]:
        return state[0] + 1, state[1] - _read_steps(cta, state[0])

    t, j = lax.while_loop(is_behind, to_next, (tile.t + 1, i - tile.steps))
    return _read(cta, t), j


def _when(exists: Any, copy: Callable[[], None]) -> None:
    copy() if isinstance(exists, int) else pipeline.when(exists)(copy)


def _copy_some_values(cta: Cta, step: _Step, n: Any) -> None:
    """The calling warp copies values of which only the first exist, and zeroes the others, which may be NaN."""
    stage = pipeline.stage(n, cta.config.stages)
    to, partial_full = cta.value_smem.at[stage], cta.partial_full.at[stage]
    _issue(cta, partial_full, (cta.value, step, to))
    pipeline.wait(cta.partial_full, n, cta.config.stages)
    pipeline.zero_rows(to, step.keys - step.key)


def _issue(cta: Cta, full: jax.Ref, *copies: tuple[jax.Ref, _Step, Any], announced: bool = False) -> None:
    """The calling warp announces the bytes of steps' keys or values, unless it has done so, and issues their copies."""
    problem = cta.problem
    if not problem.page_size or problem.page_size >= cta.config.block_kv:
        parts = ((source, _key_place(cta, step), to) for source, step, to in copies)
        return pipeline.issue(full, *parts, announced=announced)
    if not announced:
        pipeline.expect(full, sum(pipeline.size(to) for *_, to in copies))
    for source, step, to in copies:
        at = step.batch, step.key, step.key_head
        pipeline.copy_pages(source, cta.block_tables, at, to, full, pages_first=problem.pages_first)


def _key_place(cta: Cta, step: _Step) -> tuple[Any, ...]:
    """Where a step's keys are: in their sequence, or in a page."""
    problem, rows = cta.problem, cta.config.block_kv
    if not problem.page_size:
        return step.batch, pl.ds(step.key, rows), step.key_head
    # The last tile may go on behind the table.
    entry = lax.min(lax.div(step.key, problem.page_size), cta.block_tables.shape[1] - 1)
    page, at = cta.block_tables[step.batch, entry], pl.ds(lax.rem(step.key, problem.page_size), rows)
    return (page, at, step.key_head) if problem.pages_first else (step.key_head, page, at)


def _copy_bias(cta: Cta, tile: _Tile, i: Any) -> None:
    """The calling warp issues the copy of the bias of the tile's step `i`."""
    problem, config, i = cta.problem, cta.config, jnp.int32(i)
    slot = pipeline.stage(tile.n + i, config.bias_stages)
    to, full = cta.bias_smem.at[slot], cta.bias_full.at[slot]

    def copy(tile: _Tile, i: Any) -> None:
        batch, head = gather.broadcast_index((tile.batch, tile.head), problem.bias)
        rows, keys = pl.ds(_place(cta, tile).row, config.block_q), pl.ds(_key_of(cta, tile, i), config.block_kv)
        pipeline.issue(full, (cta.bias, (batch, head, rows, keys), to))

    def copy_later() -> None:
        found, j = _tile_with_step(cta, tile, i)
        pipeline.when(j < found.steps)(lambda: copy(found, j))

    within = i < tile.steps
    pipeline.when(within)(lambda: copy(tile, i))
    pipeline.when(~within)(copy_later)


def _release_stage(cta: Cta, tile: _Tile, i: jax.Array) -> None:
    """Releases the stage of the tile's step `i`: its keys, and the values of the step before."""
    stages = cta.config.stages
    last = pipeline.release(cta.stage_empty.at[pipeline.stage(tile.n + i, stages)])
    pl.when(last != 0)(lambda: cta.copy_stage(tile, i + stages))


def _read_bias(cta: Cta, tile: _Tile, i: jax.Array) -> jax.Array:
    """Loads the bias of a warpgroup's scores, and releases its stage."""
    slot = pipeline.stage(tile.n + i, cta.config.bias_stages)
    rows = pl.ds(lax.axis_index("warpgroup") * WARPGROUP_ROWS, WARPGROUP_ROWS)
    pipeline.wait(cta.bias_full, tile.n + i, cta.config.bias_stages)
    bias = plgpu.load(cta.bias_smem.at[slot, rows], layout=WGMMA, optimized=False)
    plgpu.commit_smem()  # TMA writes where threads have read
    _release_bias(cta, tile, i)
    return bias


def _release_bias(cta: Cta, tile: _Tile, i: jax.Array) -> None:
    stages = cta.config.bias_stages
    last = pipeline.release(cta.bias_empty.at[pipeline.stage(tile.n + i, stages)])
    pl.when(last != 0)(lambda: _copy_bias(cta, tile, i + stages))


def _tiles(cta: Cta) -> None:
    """Computes all tiles of queries of this CTA."""
    warpgroup = lax.axis_index("warpgroup")

    def visit(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        t, n, index, *record = state
        tile = _tile(cta, tuple(record), t, n)
        split = lax.rem(tile.index, cta.config.splits)
        place, queries = _own(_place(cta, tile), warpgroup), WARPGROUP_ROWS // cta.config.packed_heads
        own = mask.kv_range(cta.problem, cta.config.block_kv, place.row, queries, place.queries, place.keys)
        narrows = cta.problem.has_data_mask or cta.config.splits > 1
        own = (mask.intersect if narrows else mask.clamp)(tile.span, own)
        start, stop = tile.span.end - own.end, tile.span.end - own.first
        _skip(cta, tile, 0, start)
        tile_number = _draw(cta)
        lacks_page = _lacks_page(cta, tile) if cta.problem.page_size else None
        state, following = _mainloop(cta, tile, place, own, index)
        _skip(cta, tile, stop, tile.steps)
        if lacks_page is not None:
            lost = lax.select(lacks_page, np.float32(np.nan), np.float32(0))
            state = state._replace(max=state.max + lost, sum=state.sum + lost)
        _epilogue(cta, place, split, state)
        # The load overlaps with the next tile's start, which needs it in its first step.
        index = _index(cta, t + 1 + tile_scheduler.LOOKAHEAD, tile_number)
        return t + 1, n + tile.steps, index, *following

    index = _index(cta, tile_scheduler.LOOKAHEAD, _draw(cta))
    first = jnp.int32(0), jnp.int32(0), index, *tile_scheduler.read(cta.tile_smem, 0)
    lax.while_loop(lambda state: _tile(cta, state[3:], 0, 0).steps > 0, visit, first)


def _lacks_page(cta: Cta, tile: _Tile) -> jax.Array:
    """Whether a page of the tile's keys does not exist. The first keys are on their way meanwhile."""
    size, (first, end) = cta.problem.page_size, (i * cta.config.block_kv for i in (tile.span.first, tile.span.end))
    first = lax.div(first, size)
    # `pl.cdiv` would divide by a number of 64 bits under jax_enable_x64.
    end = lax.div(lax.min(end, tile.keys) + (size - 1), size)
    pages = cta.key.shape[0 if cta.problem.pages_first else 1]
    return gather.lacks_page(cta.block_tables, tile.batch, first, end, pages)


def _skip(cta: Cta, tile: _Tile, start: Any, stop: Any) -> None:
    """Steps whose keys the CTA's other warpgroups see, but not this one."""

    def step(i: jax.Array, _: None) -> None:
        pipeline.wait(cta.stage_full, tile.n + i, cta.config.stages)
        _release_stage(cta, tile, i)
        if cta.config.bias_stages:
            pipeline.wait(cta.bias_full, tile.n + i, cta.config.bias_stages)
            _release_bias(cta, tile, i)

    lax.fori_loop(start, stop, step, None)


def _mainloop(
    cta: Cta, tile: _Tile, place: TileCoord, span: TileRange, index: jax.Array
) -> tuple[State, tuple[jax.Array, ...]]:
    """All tiles of keys that the warpgroup's queries see, from the last to the first, folded into their state.

    `index`: the tile of queries whose record is to be published meanwhile.
    """
    config, problem, warpgroup = cta.config, cta.problem, lax.axis_index("warpgroup")
    skipped, count = tile.span.end - span.end, span.end - span.first

    def stage(i: jax.Array) -> ptx.Index:
        return pipeline.stage(tile.n + skipped + i, config.stages)

    def wait(i: jax.Array) -> None:
        pipeline.wait(cta.stage_full, tile.n + skipped + i, config.stages)

    def logits(i: jax.Array, edge: Any, finished: Callable[[], jax.Array]) -> jax.Array:
        key = (span.end - 1 - i) * config.block_kv
        extras = online_softmax.load_extras(problem, cta, place, key, config.block_kv, copied=config.bias_stages > 0)
        x = finished()
        if config.bias_stages:
            extras = extras._replace(bias=_read_bias(cta, tile, skipped + i))
        return online_softmax.logits(problem, cta, place, extras, x, key, edge)

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
        """Releases the queries. From the tile's second step on, the next tile's record is published."""
        last = pipeline.release(cta.query_empty.at[warpgroup])
        pl.when(last != 0)(lambda: _copy_query(cta, _read(cta, tile.t + 1), warpgroup))

    def finish_scores(issued: Any, i: jax.Array) -> jax.Array:
        x = wgmma.wait(issued, pending=1)
        if config.prefetch_query:
            pipeline.when(i == count - 1)(release_query)
        return x

    def step(i: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state = carry[0]
        # The left operand must not change registers once products are under way: ptxas would serialise them all.
        out, weights = lax.optimization_barrier((state.out, carry[1]))
        wait(i)
        issued = multiply_keys(i)
        summing = wgmma.multiply_rows(out, weights, cta.value_smem.at[stage(i)])
        edge = mask.needs_mask(problem, span, span.end - 1 - i)
        x = logits(i, edge, lambda: finish_scores(issued, i))
        released: list[jax.Array] = []

        def release() -> None:
            plgpu.wgmma_wait(0)
            released.append(pipeline.arrive(cta.stage_empty.at[stage(i)]))

        halfway = (lambda: None) if config.overlap_pv else release
        new, new_weights, rescale = update(problem, config, state, x, halfway=halfway)
        if config.overlap_pv:
            wgmma.pin_wait_after(new.sum)
            release()
        summed = wgmma.wait(summing, pending=0)
        pipeline.when(released[0])(lambda: cta.copy_stage(tile, skipped + i + config.stages))
        return new._replace(out=rescale(summed)), new_weights

    def last(out: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        wait(count)
        summing = wgmma.multiply_rows(out, weights, cta.value_smem.at[stage(count)])
        # From here on, the next tile's record is published.
        following = tile_scheduler.read(cta.tile_smem, tile.t + 1)
        release_query() if not config.prefetch_query else pipeline.when(count == 1)(release_query)
        return wgmma.wait(summing, pending=0), following

    pipeline.wait(cta.query_full.at[pl.ds(warpgroup, 1)], tile.t, 1)
    x = first()
    _release_stage(cta, tile, skipped)
    state, weights, _ = update(problem, config, initial(problem.value_dim), x, first=True)
    # One loop for tiles at the edge and others: of two loops, ptxas serialises the products.
    state, weights = lax.fori_loop(1, count, step, (state, weights))
    out, following = last(state.out, weights)
    return state._replace(out=out), following


def _epilogue(cta: Cta, place: TileCoord, split: Any, state: State) -> None:
    """Divides by the sums, and writes a warpgroup's rows, as many columns at a time as there is shared memory for."""
    problem, warpgroup = cta.problem, lax.axis_index("warpgroup")
    hidden = None
    if problem.query_lengths:
        hidden = place.queries_of_rows() >= place.queries - place.row
    sink = None
    if problem.sinks and cta.config.splits == 1:
        sink = cta.sinks[place.head] if place.heads == 1 else gather.load_of_heads(cta.sinks, place.head, place.heads)
    unseen, factor, lse = finalize(state, sink, hidden)
    # The outputs of a split follow those of the splits before, along the batch.
    place = place._replace(batch=split * problem.batch + place.batch)
    epilogue.store_rows(cta.lse, lse, place, queries_first=cta.config.splits > 1)

    def hide(out: jax.Array) -> jax.Array:
        return ptx.where(by_row(unseen, out), jnp.zeros_like(out), out)

    columns = cta.out_smem.shape[1] * PANEL
    for start in range(0, problem.value_dim, columns):
        out = state.out[:, start : min(start + columns, problem.value_dim)]
        out = lax.cond(votes.warp_any(unseen), hide, lambda out: out, out * by_row(factor, out))
        if cta.config.splits > 1:
            epilogue.store_sums(cta.out, out, place, start)
            continue
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        wgmma.stmatrix(cta.out_smem.at[warpgroup], out.astype(problem.dtype), once=True)
        plgpu.commit_smem()
        pipeline.store_rows(cta.out_smem.at[warpgroup], cta.out, _rows_of(place), start)


def _body(*refs: jax.Ref, names: tuple[str, ...], **static: Any) -> None:
    cta = Cta(**static, **dict(zip(names, refs, strict=True)))
    ptx.cut_by_operations(cta, "words", "query_smem", "key_smem", "value_smem", "out_smem")
    first = _ring_rows(cta.problem, cta.config)
    cta.tile_smem = cta.words.at[pl.ds(0, first)]
    cta.barriers = cta.words.at[pl.ds(first, cta.words.shape[0] - first)]
    for name, arrivals in _arrivals(cta.problem, cta.config).items():
        if arrivals:
            setattr(cta, name, cta.words.at[pl.ds(first, len(arrivals))])
        first += len(arrivals)
    cta.copy_stage = jax.jit(functools.partial(_copy_stage, cta))  # which traces it once
    _start(cta)
    _tiles(cta)
    plgpu.wait_smem_to_gmem(0)


def addressable(problem: Attention, config: ForwardConfig, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The operands as the kernel reads them, and what mask, segments and positions let each tile of queries see."""
    arrays = dict(arrays)
    found, keys, blocks = [], arrays["key"].shape[1], (config.queries, config.block_kv)
    if "mask" in arrays:
        columns = arrays["mask"].shape[3]
        arrays["mask"] = mask.pack_bits(arrays["mask"], 3)
        found.append(mask.blocks_of_mask(problem, arrays["mask"], 3, columns, *blocks))
    if "query_segments" in arrays:
        found.append(mask.segment_blocks(arrays["query_segments"], arrays["key_segments"], *blocks))
    if "query_positions" in arrays:
        places, bounds = (arrays["query_positions"], arrays["key_positions"]), mask.position_bounds(problem)
        found.append(mask.position_blocks(*places, *blocks, bounds))
        tiles = -(-problem.query_length // config.queries) * config.warpgroups
        arrays["query_bases"] = mask.block_bases(places[0], WARPGROUP_ROWS, tiles)
        arrays["key_bases"] = mask.block_bases(places[1], config.block_kv, -(-keys // config.block_kv))
    for name in ("segments", "positions"):
        if f"query_{name}" in arrays:
            arrays[f"query_{name}"] = arrays[f"query_{name}"][:, None, :, None]
            arrays[f"key_{name}"] = arrays[f"key_{name}"][:, None, None, :]
    if found:
        arrays["spans"] = mask.tile_ranges(functools.reduce(mask.both, found), -(-keys // config.block_kv))
    return arrays


def tile_table(problem: Attention, config: ForwardConfig) -> tuple[int, np.ndarray | jax.Array]:
    """How many CTAs there are, and the table of their tiles of queries."""
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
