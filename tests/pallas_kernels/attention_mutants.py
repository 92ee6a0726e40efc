"""Faults planted in the attention kernels, which the kernels' own checks reject in the interpreter or before it."""

import dataclasses
import functools
import types
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention_backward
import test_attention_forward
import test_attention_schedule
from interpreter import Deadlock, RaceDetected, interpret
from jax import lax
from test_attention_segments import check_backward_visits, check_forward_visits

from pallas_kernels import hardware, monoid
from pallas_kernels.attention import (
    backward,
    backward_common,
    backward_wide,
    backward_xla,
    combine,
    dispatch,
    epilogue,
    forward,
    gather,
    mask,
    online_softmax,
    tile_scheduler,
)
from pallas_kernels.attention.online_softmax import TileCoord
from pallas_kernels.attention.problem import ForwardConfig, Op
from pallas_kernels.mosaic import fast_math, pipeline, reduce, votes, wgmma
from pallas_kernels.mosaic.fast_math import LOG2E
from pallas_kernels.mosaic.pipeline import Stages
from pallas_kernels.mosaic.ptx import WGMMA
from tests.faults import NUMBERS, Fault, Table

RACE, DEADLOCK = "a race detected", "a deadlock reported"
NOT_WAITED_FOR = "a race detected, or a phase of a barrier that nobody waited for"
UNORDERED = "wrong numbers, a race or a deadlock"
OUT_OF_STEP = "a race detected, or a deadlock reported"
UNDER_WAY = "a product under way, whose numbers or operands are touched"
NOT_FINITE = "infinities in a product"
NOT_ONCE, TOO_LARGE = "a tile that is not taken once", "a config that is too large for shared memory"
NOT_VISITED = "a tile that is skipped or not compared, or an order of dQ that does not fit"
BY_TABLES = (NOT_ONCE, TOO_LARGE, NOT_VISITED)  # no kernel runs


class Case(NamedTuple):
    """A problem of the kernel of `op`, of one of the kinds of that kernel's tests, and what its config is to have.

    `scheduler`, `early_exp_columns`, `bias_stages`, `splits` and `packed_heads` are the forward config's, `head_splits`
    the backward's. Keys and values are in pages where there is a `page_size`.
    `keys` is how many the backward's problem has, and `mask` is the pattern of the problem's mask.
    """

    op: Op
    kind: str = "full"
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    scheduler: str = "static"
    early_exp_columns: int = 0
    bias_stages: int = 0
    deterministic: bool = False
    dims: tuple[int, int] = (64, 64)
    mask: str = "scattered"
    keys: int = 150
    head_splits: int = 1
    splits: int = 1
    packed_heads: int = 1
    page_size: int = 0


def _fault(op, words, original, fault, kind="full", rejected_by=NUMBERS, inside=None, barrier="", nth=None, **facts):
    """The fault in a problem of one sequence and head, or two of each if blocks or threads have to meet to show it."""
    meet = rejected_by not in (NUMBERS, UNDER_WAY)
    facts = {"batch": 1 + meet, "heads": (1 + meet, 1)} | facts
    return Fault(words, original, fault, Case(op, kind, **facts), rejected_by, inside, barrier, nth)


def _one_tile_less(span, *arguments):
    found, sees_any = span(*arguments)
    last = jnp.maximum(found.end - 1, found.first + 1)
    return found._replace(end=jnp.where(found.end == 200 // 64 + 1, last, found.end)), sees_any


def _left_out(*arguments, **keywords):
    return None


def _with_scaled_bias(logits, problem, refs, place, extras, *arguments):
    extras = extras._replace(bias=extras.bias * problem.scale)
    return logits(problem, refs, place, extras, *arguments)


def _of_base_2(finish, *arguments):
    unseen, factor, lse = finish(*arguments)
    return unseen, factor, lse * online_softmax.LOG2E


def _alike_if_they_meet(blocks, *arguments):
    meet, _ = blocks(*arguments)
    return mask.BlockMask(meet, meet)


def _one_not_counted(assign, *arguments):
    table = assign(*arguments).copy()
    table[:, 0] = np.maximum(table[:, 0] - 1, 1)
    return table


def _by_half(name):
    """A phase of the stages' `empty` is over when half of the warps have arrived."""

    def stages_of(table, *arguments):
        stages = table(*arguments)
        return stages | {name: dataclasses.replace(stages[name], readers=stages[name].readers // 2)}

    return stages_of


def _one_row_on(at):
    return tuple(pl.ds(i.start + 1, i.size) if isinstance(i, pl.Slice) else i for i in at)


def _of_arrays(window_bounds, problem, *lengths):
    return window_bounds(problem)


def _with(**facts):
    """Calls the function with these facts of the problem replaced."""
    return lambda function, problem, *arguments: function(dataclasses.replace(problem, **facts), *arguments)


def _one_more_pending(wait, issued, *, pending):
    return wait(issued, pending=pending + 1)


def _sum_kept(update, problem, config, state, x, **keywords):
    new, *rest = update(problem, config, state._replace(sum=jnp.zeros_like(state.sum)), x, **keywords)
    return new._replace(sum=state.sum + new.sum), *rest


def _apart(pack_bits, *arguments):
    """Of each eight bits, the four of even columns come first."""
    words = pack_bits(*arguments)
    bits = ((words >> i & 1) << (i // 8 * 8 + i % 2 * 4 + i % 8 // 2) for i in range(32))
    return functools.reduce(jnp.bitwise_or, bits)


def _one_step_later(read, *arguments):
    tile = read(*arguments)
    return tile._replace(span=tile.span._replace(end=tile.span.end - 1))


def _read_when_released(read_bias, cta, tile, i):
    read_bias(cta, tile, i)
    rows = pl.ds(lax.axis_index("warpgroup") * forward.WARPGROUP_ROWS, forward.WARPGROUP_ROWS)
    return plgpu.load(cta.bias_smem.at[0, rows], layout=WGMMA, optimized=False)


def _with_bounds(of):
    """Calls the function with other bounds of the tile's sequence."""

    def of_tile(function, tile, *arguments):
        left, right = of(tile.problem, *tile.sequence[2:])
        sequence = tile.sequence._replace(left=left, right=right)
        return function(dataclasses.replace(tile, sequence=sequence), *arguments)

    return of_tile


def _without_slope(soft_capped, *arguments):
    x, slope = soft_capped(*arguments)
    return x, jnp.ones_like(slope)


def _with_slope(write_logits, part, gradient):
    slope = plgpu.load(part.tile.refs.slope_smem.at[part.warpgroup], layout=WGMMA)
    return write_logits(part, gradient * slope)


def _slope_with_bias(probabilities, tile, step, warpgroup, x, extras, compare):
    biased = x / LOG2E + extras["bias"].astype(jnp.float32)
    tile.refs.slope_smem[warpgroup] = 1 - (biased / tile.problem.soft_cap) ** 2
    return probabilities(tile, step, warpgroup, x, extras, compare)


def _dk_of_first_head(add_to_dq, part, ds, *arguments):
    is_first = part.step.head == part.tile.key_head * part.tile.group
    return add_to_dq(part, jnp.where(is_first, ds, jnp.zeros_like(ds)), *arguments)


def _full_for_any(of_group, pairs, group):
    return of_group(pairs, group)._replace(full=of_group(pairs._replace(visible=pairs.full), group).visible)


def _stale_pages(copy_pages, source, tables, at, to, *arguments, **keywords):
    """The second half of a tile is the first once more."""
    panels, rows, _ = to.shape
    for first in (0, rows // 2):
        copy_pages(source, tables, at, to.at[pl.ds(0, panels), pl.ds(first, rows // 2)], *arguments, **keywords)


def _last_once_more(fetch_tile, tile_counter):
    number, tiles = fetch_tile(tile_counter), 2 * 2  # two in each of the case's two sequences
    return number - (number == tiles)


def _released_first(add_to_dq, *arguments, at_first, **keywords):
    at_first()
    return add_to_dq(*arguments, **keywords)


_forward = functools.partial(_fault, Op.FORWARD)
_dynamic = functools.partial(_fault, Op.FORWARD, scheduler="dynamic", batch=2, heads=(3, 1))
_split = functools.partial(_fault, Op.FORWARD, splits=3)
_paged = functools.partial(_fault, Op.FORWARD, kind="key-lengths", batch=2, heads=(2, 1), splits=2, page_size=16)
_biased = functools.partial(_fault, Op.FORWARD, kind="bias", bias_stages=1)
_backward = functools.partial(_fault, Op.BACKWARD)
_dynamic_backward = functools.partial(_fault, Op.BACKWARD, kind="mask", batch=2, heads=(2, 1))
_wide_backward = functools.partial(_fault, Op.BACKWARD, dims=(136, 64))
_capped_backward = functools.partial(_fault, Op.BACKWARD, kind="capped-bias", dims=(128, 64))
_copied_bias = functools.partial(_fault, Op.BACKWARD, kind="shared-bias", keys=192)

FAULTS = (
    _forward("a query sees one key too many", gather.apply_bounds, lambda keep, x, low, high: keep(x, low, high + 1),
             "causal"),
    _forward("the window's left end is one too far right", gather.apply_bounds,
             lambda keep, x, low, high: keep(x, low + 1, high), "window"),
    _forward("a tile on the diagonal is not compared", mask.needs_mask,
             lambda needs, problem, span, tile: needs(problem, span._replace(inner_end=span.inner_end + 1), tile),
             "causal-later"),
    _forward("the output is kept when the maximum grows", online_softmax.update,
             lambda update, *a, **k: (*update(*a, **k)[:2], lambda out: out), "large", early_exp_columns=24),
    _forward("weights that began early are kept when the maximum has grown", lax.cond,
             lambda cond, grows, new, old: cond(grows, lambda: (*new()[:2], *old()[2:]), old), "large",
             inside=online_softmax.update, early_exp_columns=24),
    _forward("no warp looks for a maximum that grows", votes.warp_any_above,
             lambda warp_any_above, x, factor, limits: warp_any_above(x, factor, limits + 2.0**20), "huge",
             rejected_by=NOT_FINITE, early_exp_columns=24),
    _forward("a negative scale is taken for a positive one", online_softmax.folds_scale,
             lambda folds_scale, problem: folds_scale(dataclasses.replace(problem, scale=abs(problem.scale))),
             "negative", rejected_by=NOT_FINITE),
    _forward("the sum is kept when the maximum grows", online_softmax.update, _sum_kept, "large", early_exp_columns=24),
    _forward("the logsumexp is of base 2", online_softmax.finalize, _of_base_2),
    _forward("the last tile of keys is left out", mask.kv_range,
             lambda of, problem, block_kv, *rows: of(problem, block_kv, *rows[:-1], rows[-1] - block_kv + 1), "mask",
             rejected_by=NOT_VISITED),
    _forward("head n reads key head n % K", tile_scheduler.publish,
             lambda publish, ring, t, record: publish(ring, t, (record[0], lax.rem(record[4], 2), *record[2:])),
             inside=forward._publish, heads=(4, 2)),
    _forward("the bits of even and of odd columns are apart", mask.pack_bits, _apart, "mask"),
    _forward("all heads have the first one's mask", gather.load_bits,
             lambda load, ref, axis, corner, *a: load(ref, axis, (corner[0], jnp.int32(0), *corner[2:]), *a),
             "mask-of-heads", heads=(2, 1)),
    _forward("all heads have the first one's spans", gather.broadcast_index,
             lambda index, at, shape: index((at[0], jnp.int32(0), *at[2:]), shape), "mask-of-heads", mask="causal",
             heads=(2, 1)),
    _forward("a tile that holds something is taken for one that holds everything", mask.bitmask_blocks,
             _alike_if_they_meet, "mask", rejected_by=NOT_VISITED),
    _forward("what a tile of 64 keys holds decides for the next one too", mask.bitmask_blocks,
             lambda blocks, *a: mask.BlockMask(*(jnp.repeat(x[..., ::2], 2, 3)[..., : x.shape[3]] for x in blocks(*a))),
             "mask", mask="causal", rejected_by=NOT_VISITED, batch=2),
    _forward("the bias is scaled", online_softmax.logits, _with_scaled_bias, "bias"),
    _forward("the sink joins the numerator", monoid.combine,
             lambda combine, a, b, **exp: combine(a, (*b[:2], *map(jnp.ones_like, b[2:])), **exp), "sinks"),
    _forward("the soft cap has no effect", online_softmax.logits, _with(soft_cap=None), "soft-cap"),
    _forward("one key too many is there", online_softmax._in_bounds,
             lambda in_bounds, problem, place, *a: in_bounds(problem, place._replace(keys=place.keys + 1), *a),
             "key-lengths"),
    _forward("the window's left end stays where the diagonal is moved", mask.window_bounds,
             lambda window_bounds, problem, *lengths: (window_bounds(problem)[0], window_bounds(problem, *lengths)[1]),
             "ends-window"),
    _forward("scores are compared as if the arrays' ends were the sequences'", mask.window_bounds, _of_arrays, "ends",
             inside=online_softmax._in_bounds),
    _forward("tiles are passed over as if the arrays' ends were the sequences'", mask.window_bounds, _of_arrays,
             "ends-segments", inside=mask.kv_range, rejected_by=NOT_VISITED),
    _forward("queries past their length see keys", online_softmax.finalize,
             lambda finish, state, sink, hidden: finish(state, sink, None), "lengths", batch=2),
    _forward("the first tile of keys that a segment is in is skipped", mask.tile_ranges,
             lambda spans, *a: spans(*a) + jnp.array([1, 0, 0, 0]), "segments", rejected_by=NOT_VISITED),
    _forward("tiles of two segments are taken for tiles of one", mask.tile_ranges,
             lambda spans, pairs, columns: spans(pairs, columns).at[..., 2].set(columns), "segments",
             rejected_by=NOT_VISITED),
    _forward("a warpgroup takes steps that its CTA skips", mask.intersect, lambda intersect, span, own: own, "segments",
             inside=forward._tiles, rejected_by=OUT_OF_STEP),
    _forward("a tile's rows are stored one row on, the last of them over the next sequence's", pipeline.store_rows,
             lambda store, source, target, at, *column: store(source, target, _one_row_on(at), *column), batch=2),
    _forward("values past the length, NaN, are multiplied by 0", pipeline.zero_rows, _left_out, "key-lengths"),
    _forward("the last section of heads is left out", tile_scheduler.order,
             lambda order, *a: tuple(part[:-1] for part in order(*a)), rejected_by=NOT_ONCE),
    _forward("the last tile that is assigned to a CTA is not counted", tile_scheduler.assign, _one_not_counted,
             rejected_by=NOT_ONCE),
    _forward("tiles of 128 keys are taken for heads of any size", dispatch._widest,
             lambda widest, problem: dataclasses.replace(widest(problem), block_kv=128), rejected_by=TOO_LARGE),
    _forward("the bias is not counted in shared memory", forward.shared_bytes, lambda *_: 0, "bias",
             inside=dispatch._with_bias_copied, rejected_by=TOO_LARGE),
    _split("a split is not merged", combine._merge,
           lambda merge, parts, lses, *a, **facts: merge(parts, lses.at[-1].set(-jnp.inf), *a, **facts)),
    _split("a split is merged twice, and another not at all", gather.load_tile,
           lambda load, ref, at, *a: load(ref, (jnp.maximum(at[0], 1), *at[1:]), *a), inside=combine._body),
    _split("splits are merged as if all weighed the same", monoid.decay, lambda decay, x, to: jnp.ones_like(x),
           inside=combine._body),
    _split("the logsumexp of a merge lacks its sum", fast_math.log, lambda log, x: jnp.zeros_like(x),
           inside=combine._body),
    _split("sinks are left out of the merge", combine.run,
           lambda run, parts, lses, sinks, dtype: run(parts, lses, None, dtype), "sinks"),
    _split("the last tile of keys is in no split", mask.tile_kv_range, _one_tile_less, inside=forward._publish),
    _split("a split without keys takes part", mask.tile_kv_range,
           lambda span, *a: (span(*a)[0], np.bool_(True)), "causal-earlier", inside=forward._publish),
    _split("splits of a mask's keys are those of all keys", mask.tile_kv_range,
           lambda span, *a: span(*a[:-1], None), "segments", inside=forward._publish, rejected_by=UNORDERED),
    _split("all rows of a tile are queries of one head", TileCoord.queries_of_rows,
           lambda queries, place: queries(place._replace(heads=1)), "causal", heads=(4, 2), packed_heads=2),
    _split("a packed tile's rows have the mask's rows one by one", gather.load_bits,
           lambda load, *a: load(*a[:-1], 1), "mask", heads=(4, 2), packed_heads=2),
    _split("a packed tile's rows have the first head's sink", gather.load_of_heads,
           lambda load, ref, pack, heads: load(ref, pack, 1), "sinks", heads=(4, 2), packed_heads=2, splits=1),
    _split("the logsumexps of splits are stored heads first", epilogue.store_rows,
           lambda store, *a, **_: store(*a), heads=(4, 2), rejected_by=UNORDERED),
    _paged("pages are read twice, and the next ones not at all", pipeline.copy_pages, _stale_pages),
    _paged("pages are those of the table's next entries", pipeline.copy_pages,
           lambda copy, source, tables, at, *a, **k: copy(source, tables, (at[0], at[1] + 16, at[2]), *a, **k)),
    _paged("pages are those of the first sequence", pipeline.copy_pages,
           lambda copy, source, tables, at, *a, **k: copy(source, tables, (0, *at[1:]), *a, **k)),
    _paged("nobody looks for pages that do not exist", gather.lacks_page, lambda lacks_page, *a: jnp.bool_(False)),
    _dynamic("no CTA takes the counter's first tile", reduce.with_workspace,
             lambda run, kernel, arrays, counter, *a: run(kernel, arrays, [counter[0] + 1], *a),
             inside=tile_scheduler.call),
    _dynamic("the counter's last number names no tile", tile_scheduler.order,
             lambda order, *a: tuple(part[:-1] for part in order(*a)), inside=tile_scheduler.table),
    _forward("a tile's record is written one tile before it, where its keys are asked for two tiles before",
             forward._publish, lambda publish, cta, t, index: publish(cta, t - 1, forward._index(cta, t - 1, 0)),
             "window-nothing", inside=forward._mainloop, rejected_by=UNORDERED, heads=(3, 1)),
    _forward("a tile's record is overwritten while it is read", tile_scheduler._slot,
             lambda slot, t: lax.rem(jnp.int32(t), jnp.int32(2)), rejected_by=OUT_OF_STEP, heads=(3, 1)),
    _forward("keys are read before they are there", Stages.wait, _left_out, inside=forward._mainloop,
             barrier="kv_stages", nth=1, rejected_by=OUT_OF_STEP),
    _forward("the last values are read before they are there", Stages.wait, _left_out, inside=forward._mainloop,
             barrier="kv_stages", nth=2, rejected_by=RACE),
    _forward("queries are read before they are there", Stages.wait, _left_out, inside=forward._mainloop,
             barrier="query_stages", rejected_by=RACE),
    _forward("the next tile's queries are asked for before the last scores are there", forward._fill_query,
             lambda copy, cta, tile, warpgroup: copy(cta, tile, 1 - warpgroup), inside=forward._mainloop,
             rejected_by=RACE, heads=(3, 1)),
    _forward("rows that see nothing are not zeroed", votes.warp_any, lambda warp_any, x: warp_any(x) & False,
             "window-nothing"),
    _forward("a stage is refilled when one warpgroup has released it", forward._stages, _by_half("kv_stages"),
             rejected_by=OUT_OF_STEP),
    _forward("a stage is not released", Stages.arrive, lambda *_: jnp.int32(0), inside=forward._mainloop,
             rejected_by=DEADLOCK),
    _forward("a warpgroup does not release the stages of last keys that it does not see", forward._skip, _left_out,
             "causal", rejected_by=DEADLOCK),
    _forward("at a tile's end a stage is not refilled", forward._fill,
             lambda copy, cta, tile, i: pl.when(i < tile.steps)(lambda: copy(cta, tile, i)), rejected_by=DEADLOCK),
    _forward("at a tile's end a stage is refilled for the step after the one that is next", forward._read,
             _one_step_later, inside=forward._fill, batch=2, heads=(2, 1)),
    _forward("behind a tile of one step a stage is not refilled for the tile after the next", forward._tile_with_step,
             lambda _, cta, tile, i: (forward._read(cta, tile.t + 1), i - tile.steps), "causal-earlier",
             rejected_by=DEADLOCK, batch=2, heads=(3, 1)),
    _forward("the barrier of values that are zeroed keeps its phase where all of them exist", Stages.expect,
             _left_out, "lengths", inside=forward._fill, barrier="partial_values", rejected_by=DEADLOCK),
    _biased("a copied bias is read before it is there", Stages.wait, _left_out, inside=forward._read_bias,
            rejected_by=RACE),
    _biased("the stage of a copied bias is released before it is read", forward._read_bias, _read_when_released,
            rejected_by=RACE),
    _biased("nothing orders the reads of a copied bias before TMA's next write", plgpu.commit_smem, _left_out,
            inside=forward._read_bias, rejected_by=RACE),
    _forward("the stage of a copied bias is not released by a warpgroup that does not see its keys",
             Stages.release, _left_out, "everything", inside=pipeline.drain, nth=1, rejected_by=DEADLOCK,
             bias_stages=1),
    _forward("scores are read while they may be under way", wgmma.wait, _one_more_pending, rejected_by=UNDER_WAY),
    _forward("a stage is released while a product reads its values", plgpu.wgmma_wait, lambda wait, n: wait(n + 1),
             inside=forward._mainloop, rejected_by=UNDER_WAY),
    _backward("dP is read while its product may be under way", wgmma.wait, _one_more_pending, inside=backward._step,
              rejected_by=UNDER_WAY),
    _backward("dQ is read while its last product may be under way", wgmma.wait, _one_more_pending,
              inside=backward._add_to_dq, rejected_by=UNDER_WAY),
    _backward("the queries' stage is released while the product for dK reads it", plgpu.wgmma_wait,
              lambda wait, n: wait(n + 1), "lengths", inside=backward._step, rejected_by=UNDER_WAY, batch=2,
              heads=(2, 1)),
    _wide_backward("the cotangents' stage is released while the product for dV reads it", backward_wide._add_to_dq,
                   _released_first, inside=backward_wide._add_to_dv, rejected_by=UNDER_WAY, batch=2, heads=(2, 1)),
    _backward("heads are started together that are no multiple of those that there are",
              backward_common._heads_per_group, lambda together, problem, config: config.heads_per_l2_group, "causal",
              rejected_by=NOT_ONCE),
    _backward("the bias is not counted in shared memory", dispatch._with_bias_stages,
              lambda choose, *a: choose(*a[:-1], lambda *_: 0), "bias", rejected_by=TOO_LARGE),
    _backward("a query sees one key too many", backward_common._in_bounds,
              _with_bounds(lambda problem, left, right: (left, right + 1)), "causal"),
    _backward("the window's left end is one too far right", backward_common._in_bounds,
              _with_bounds(lambda problem, left, right: (left + 1, right)), "window"),
    _backward("the arrays' ends are taken for the sequences'", mask.window_bounds, _of_arrays, "ends",
              inside=backward_common.sequence_at),
    _wide_backward("positions in dQ's order are counted as if the arrays' ends were the sequences'",
                   backward_common._adders, _with_bounds(lambda problem, *_: mask.window_bounds(problem)), "ends",
                   rejected_by=DEADLOCK, deterministic=True),
    _backward("the logsumexp's cotangent has no effect", backward_xla.row_delta,
              lambda delta, ops, nothing: delta(types.SimpleNamespace(**vars(ops) | {"d_lse": 0.0}), nothing)),
    _backward("the gradient goes past the soft cap", backward_common.soft_capped, _without_slope, "soft-cap"),
    _capped_backward("beside a bias, the gradient goes past the soft cap", backward_common.soft_capped, _without_slope),
    _capped_backward("the bias' gradient has the soft cap's slope", backward._write_logits, _with_slope),
    _capped_backward("the soft cap's slope is taken where the bias has been added", backward_common.probabilities,
                     _slope_with_bias),
    _backward("dK is of the group's first head", backward._add_to_dq, _dk_of_first_head, heads=(2, 1)),
    _backward("a part of a group's heads reads the keys of the head of its number", backward_common.Tile.source_head,
              lambda source_head, tile: lax.rem(tile.key_head, jnp.int32(2)), heads=(4, 2), head_splits=2),
    _backward("head n belongs to key head n % K", backward_common.Tile.step,
              lambda step, tile, h, i: step(tile, h, i)._replace(head=tile.key_head + h * tile.problem.key_heads),
              heads=(4, 2)),
    _backward("dQ lacks the scale", backward_xla.gradients, _with(scale=1.0), "lengths"),
    _backward("the last writes dQ without the scale", backward._write_square,
              lambda write, part, total: write(part, total / part.tile.problem.scale), deterministic=True),
    _backward("dK lacks the scale", backward._epilogue,
              lambda write, tile, warpgroup, dk, dv: write(tile, warpgroup, dk / tile.problem.scale, dv)),
    _backward("what the first head of a group may pass over, all do", mask.of_group,
              lambda union, pairs, group: union(pairs, group)._replace(visible=pairs.visible[:, ::group]),
              "mask-of-heads", mask="causal", rejected_by=NOT_VISITED, heads=(2, 1)),
    _wide_backward("a block that one head of a group sees whole is not compared for any", mask.of_group, _full_for_any,
                   "mask-of-heads", mask="causal", rejected_by=NOT_VISITED, heads=(3, 1)),
    _wide_backward("what one group of heads sees decides for another", mask.of_group,
                   lambda union, *a: mask.BlockMask(*(x[:, ::-1] for x in union(*a))), "mask-of-heads", mask="causal",
                   rejected_by=NOT_VISITED, heads=(4, 2)),
    _forward("positions have no effect", gather.apply_positions, lambda keep, x, *a: x, "positions"),
    _forward("a block's first position tells where they do not count up", mask.block_bases,
             lambda _, positions, size, blocks: jnp.pad(positions, ((0, 0), (0, size)))[:, : blocks * size : size],
             "positions"),
    _forward("a block's first position is that of the block before", mask.block_bases,
             lambda bases, *a: jnp.roll(bases(*a), 1, 1), "positions"),
    _backward("queries see keys by the bounds by which keys see queries", backward_common.query_bounds,
              lambda turned, problem: mask.position_bounds(problem), "positions-window"),
    _forward("a block of which some positions are seen is taken for one of which all are", mask.position_blocks,
             lambda blocks, *a: mask.BlockMask(blocks(*a).visible, blocks(*a).visible), "positions",
             rejected_by=NOT_VISITED),
    _backward("a block of which not all positions are seen is skipped", mask.position_blocks,
              lambda blocks, *a: mask.BlockMask(blocks(*a).full, blocks(*a).full), "positions",
              rejected_by=NOT_VISITED),
    _backward("segment ids have no effect", gather.apply_segments, lambda keep, x, *a: x, "segments"),
    _backward("a block of keys counts itself among those before", backward_common.dq_positions,
              lambda dq_positions, *a: dq_positions(*a) + 1, "segments", rejected_by=NOT_VISITED, deterministic=True),
    _backward("under a window positions in dQ's order are counted from the first keys of all", backward_common._adders,
              lambda adders, *a: (0, adders(*a)[1]), "window-left", rejected_by=DEADLOCK, batch=1, heads=(1, 1),
              deterministic=True, dims=(128, 64), keys=300),
    _backward("of as many queries as keys the bias' gradient is keys by queries", backward_xla.bias_gradient,
              lambda f, problem, ops, d_logits: f(problem, ops, jnp.swapaxes(d_logits, 2, 3)), "bias", keys=200),
    _backward("the bias' gradient is scaled", backward_xla.bias_gradient,
              lambda f, problem, ops, d_logits: f(problem, ops, problem.scale * d_logits), "bias-of-heads"),
    _backward("the sinks' gradient lacks delta", backward_xla.sinks_gradient,
              lambda f, ops, nothing, delta: f(ops, nothing, jnp.ones_like(delta)), "sinks"),
    _backward("the first row past the length, NaN, counts", pipeline.zero_rows,
              lambda zero, ref, first: zero(ref, first + 1), "lengths"),
    _wide_backward("keys past the length are zeroed before they have come", Stages.wait, _left_out, "lengths",
                   inside=backward_wide._fill_keys, rejected_by=NOT_WAITED_FOR),
    _backward("the barrier of keys that are zeroed keeps its phase where all of them exist", Stages.expect, _left_out,
              "lengths", inside=backward._fill_keys, barrier="partial_kv", rejected_by=UNORDERED, batch=2,
              heads=(4, 4), keys=400),
    _backward("cotangents of rows without a key, NaN, are multiplied by 0", backward_common.zero_rows, _left_out,
              "mask", mask="documents"),
    _backward("of a block of queries, the first tells whether some have no key", backward_xla.tiles_without_keys,
              lambda _, nothing, config: nothing[:, :, :: config.block_q].astype(jnp.int32), "mask", mask="documents"),
    _backward("cotangents are zeroed before they have come", Stages.wait, _left_out, "mask", mask="documents",
              inside=backward._fill_step, rejected_by=NOT_WAITED_FOR),
    _backward("a CTA takes its first tile without the counter though dQ is ordered", backward._fetches_first_tile,
              lambda fetches, config: False, rejected_by=DEADLOCK, deterministic=True),
    _dynamic_backward("the last tile of keys is worked on once more", tile_scheduler.fetch_tile, _last_once_more),
    _dynamic_backward("a tile's record does not say which queries come past its keys", tile_scheduler.publish,
                      lambda publish, ring, t, record: publish(ring, t, (*record[:4], 0, 0, 0, 0))),
    _dynamic_backward("keys are overwritten when one warpgroup has read those of the tile before", backward._stages,
                      _by_half("kv_stages"), rejected_by=OUT_OF_STEP),
    _dynamic_backward("keys are read before they are there", Stages.wait, _left_out, inside=backward._visit,
                      rejected_by=NOT_WAITED_FOR),
    _dynamic_backward("the stages of a tile that no queries come past are filled and never passed",
                      backward._drain_empty_stages, _left_out, mask="causal", rejected_by=DEADLOCK, keys=400),
    _backward("the last block of keys is left out", backward_common.tile_count,
              lambda count, problem, config: count(problem, config) - problem.batch * problem.key_heads),
    _backward("dQ is multiplied from scores that are not all there", reduce.sync_block, _left_out,
              inside=backward._share, rejected_by=UNORDERED),
    _backward("scores leave to the bias before copies may see them", wgmma.commit_square, _left_out, "bias",
              rejected_by=RACE),
    _backward("the next step gets this step's K Q^T", backward._issue_scores,
              lambda issue, tile, stage: issue(tile, lax.rem(stage + tile.config.stages - 1, tile.config.stages)),
              "lengths", inside=backward._issue_next_scores),
    _backward("the next step's queries are multiplied before they are there", Stages.wait, _left_out, "lengths",
              inside=backward._issue_next_scores, rejected_by=NOT_WAITED_FOR),
    _backward("after the last step the next block's queries are taken", backward._issue_next_scores,
              lambda issue, tile, step: issue(dataclasses.replace(tile, first_stage=tile.first_stage + 1), step),
              "lengths", rejected_by=DEADLOCK),
    _backward("the sums' squares are read as if the registers had rows", wgmma.rows_of_squares,
              lambda rows, sums: sums.reshape(rows(sums).shape), "lengths"),
    _backward("queries and cotangents are read before they are there", Stages.wait, _left_out, inside=backward._step,
              rejected_by=NOT_WAITED_FOR, heads=(2, 1), deterministic=True),
    _backward("a stage is refilled for the step before its own", backward._coord_after,
              lambda place, tile, step, stages: place(tile, step, stages - 1), inside=backward._refill, heads=(2, 1)),
    _backward("a stage is released and not refilled for a later step of the tile", backward._refill, _left_out,
              rejected_by=DEADLOCK, heads=(4, 1)),
    _backward("of a tile's last stages none is refilled for the next tile", backward._fill, _left_out, "lengths",
              inside=backward._release_stage, rejected_by=DEADLOCK),
    _backward("the semaphore is released before the tile of dQ has arrived", plgpu.wait_smem_to_gmem, _left_out,
              inside=backward_common.release_previous_dq, rejected_by=RACE, deterministic=True),
    _backward("the semaphore of dQ is never released", backward_common._release_semaphore, _left_out,
              rejected_by=DEADLOCK, deterministic=True),
    _backward("the last tile of keys to add writes the others' sum", backward._write_last,
              lambda write, part, square: write(part, jnp.zeros_like(square)), deterministic=True),
    _backward("a block of keys takes itself for the last with one to come", backward_common.is_last,
              lambda is_last, tile, i: is_last(dataclasses.replace(tile, index=tile.index + 1), i), deterministic=True),
    _backward("a block of keys that is alone waits for the others' sum", backward_common.dq_position,
              lambda position, *a: position(*a) + 1, "causal", inside=backward._write_last, rejected_by=DEADLOCK,
              deterministic=True),
    _backward("the others' sum is read before it is there", plgpu.barrier_wait, _left_out, inside=backward._write_last,
              rejected_by=NOT_WAITED_FOR, deterministic=True),
    _backward("the last tile of keys reads the sum before the semaphore says that it is complete",
              backward_common.acquire_dq, _left_out, "bias", inside=backward._fetch_sum, rejected_by=RACE,
              dims=(128, 128), deterministic=True),
    _wide_backward("score gradients are made of probabilities that are not there", Stages.wait, _left_out,
                   inside=backward_wide._add_to_dk, barrier="p_stages", rejected_by=NOT_WAITED_FOR),
    _wide_backward("dQ is multiplied from score gradients that are not there, and probabilities are overwritten",
                   Stages.wait, _left_out, inside=backward_wide._add_to_dv, barrier="ds_stages",
                   rejected_by=NOT_WAITED_FOR),
    _wide_backward("a stage gets the copies of a step too early", backward_wide._release,
                   lambda release, *a: release(*a[:-1], lambda tile, before: a[-1](tile, before - 1)),
                   rejected_by=DEADLOCK),
    _wide_backward("nothing orders the reads of lse and delta before the copies that write over them",
                   wgmma.commit_square, _left_out, inside=backward_wide._add_to_dk, rejected_by=RACE),
    _wide_backward("score gradients are overwritten on their way to the bias", plgpu.wait_smem_to_gmem, _left_out,
                   "bias-of-heads", inside=backward_wide._release_previous, rejected_by=RACE),
    _copied_bias("a copied bias is read queries by keys", plgpu.load, lambda load, bias, **k: load(bias.T, **k),
                 inside=backward._read_bias, dims=(128, 64)),
    _copied_bias("all warpgroups have the first one's copied bias", backward._read_bias,
                 lambda read, part: read(part._replace(warpgroup=0))),
    _copied_bias("all heads of a group have the first one's copied bias", gather.broadcast_index,
                 lambda index, at, shape: index((at[0], lax.div(at[1], 2) * 2), shape), inside=backward._fill_bias,
                 heads=(2, 1)),
    _copied_bias("where they share a bias, sequences are counted as heads", backward_common._batch_and_head,
                 lambda place, problem, head: (lax.rem(head, problem.key_heads), place(problem, head)[1]),
                 rejected_by=UNORDERED),
    _copied_bias("every tile of a copied bias takes the first stage, and the barriers say that it has two",
                 Stages.stage, lambda *_: 0, inside=backward._read_bias, rejected_by=NOT_WAITED_FOR, dims=(128, 64)),
    _copied_bias("the stage of a copied bias is never released", backward._release_bias, _left_out,
                 rejected_by=DEADLOCK),
)  # fmt: skip

# A deadlocked simulation notices it after this long, or in the model of what it waits for.
DEADLOCK_S = 2.0
FEW = dataclasses.replace(hardware.H200, sm_count=2)
# A warpgroup that does not wait may get two phases ahead: the other one's barrier then shows the phase before for ever.
ERRORS = {
    NUMBERS: (AssertionError,),
    RACE: (RaceDetected,),
    UNORDERED: (AssertionError, RaceDetected, Deadlock),
    NOT_FINITE: (jax.errors.JaxRuntimeError, AssertionError),
    NOT_WAITED_FOR: (RaceDetected, Deadlock, jax.errors.JaxRuntimeError),
    OUT_OF_STEP: (RaceDetected, Deadlock, jax.errors.JaxRuntimeError),
    DEADLOCK: (Deadlock, jax.errors.JaxRuntimeError),
    UNDER_WAY: (RaceDetected, jax.errors.JaxRuntimeError),
    NOT_ONCE: (AssertionError,),
    TOO_LARGE: (AssertionError,),
    NOT_VISITED: (AssertionError,),
}


def check(fault):
    """Runs the check of the kernel's tests, or of what is decided before a kernel runs."""
    if fault.rejected_by in BY_TABLES:
        check_tables(fault.case, fault.rejected_by)
    else:
        check_kernel(fault.case, limit_s=DEADLOCK_S if Deadlock in ERRORS[fault.rejected_by] else 20.0)


def check_kernel(case, *, limit_s=20.0):
    """The check of the kernel's tests, of a problem that is as small as the fault allows."""
    run = functools.partial(interpret, limit_s=limit_s)
    facts = {"heads": case.heads, "batch": case.batch}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "current", lambda: FEW)
        if case.op is Op.BACKWARD:
            facts |= {"deterministic": case.deterministic}
            problem = test_attention_backward.problem_of(case.kind, (200, case.keys), case.dims, "bfloat16", **facts)
            kernel = test_attention_backward.decided(problem, case.head_splits).run
            return test_attention_backward.check(problem, kernel, run, mask=case.mask)
        problem = test_attention_forward.problem_of(case.kind, (100, 200), (32, 16), "bfloat16", **facts)
        knobs = {name: getattr(case, name) for name in ("bias_stages", "splits", "packed_heads", "scheduler")}
        knobs |= {
            "early_exp_columns": case.early_exp_columns,
            "rescale_threshold_log2": 8 * bool(case.early_exp_columns),
        }
        config = ForwardConfig(64, 2, zero_init_free=True, overlap_pv=True, prefetch_query=True, **knobs)
        if case.page_size:
            paged = dataclasses.replace(problem, key_length=192, page_size=case.page_size)
            return test_attention_forward.check_pages(paged, config, run)
        return test_attention_forward.check(problem, config, run, mask=case.mask)


def check_tables(case, rejected_by):
    """Of the problem's kind, what is decided before a kernel runs."""
    op, kind = case[:2]
    if rejected_by == TOO_LARGE:
        return test_attention_schedule.check_memory(op, test_attention_schedule.MEMORY_KINDS[kind])
    if rejected_by == NOT_VISITED and op is Op.FORWARD:
        problem = test_attention_forward.problem_of(kind, (513, 700), (8, 8), "bfloat16", case.heads)
        return check_forward_visits(problem, ForwardConfig(64, warpgroups=2), mask=case.mask)
    if rejected_by == NOT_VISITED:
        facts = {"heads": case.heads, "deterministic": True}
        problem = test_attention_backward.problem_of(kind, (513, 700), (8, 8), "bfloat16", **facts)
        return check_backward_visits(problem, mask=case.mask)
    for shape in test_attention_schedule.SHAPES:
        problem = test_attention_schedule.problem_of(op, test_attention_schedule.KINDS[kind], shape)
        test_attention_schedule.check_tiles(problem)


def cases():
    """Some of the mutants' cases: every fact is in one, and every kind that the kernels' own tests do not interpret.

    Some kinds are those of no mutant, here with early weights.
    """
    kinds = "bias", "bias-of-heads", "bias-of-rows", "everything", "window-left", "window-nothing"
    found = [Case(Op.FORWARD, kind, 2, (2, 1), early_exp_columns=24) for kind in kinds]
    features = lambda case: {(case.op, *fact) for fact in case._asdict().items() if fact[0] not in ("batch", "heads")}
    elsewhere = {(Op.FORWARD, "kind", kind) for kind, *_ in test_attention_forward.INTERPRETED}
    elsewhere |= {(Op.BACKWARD, "kind", kind) for kind, *_ in test_attention_backward.INTERPRETED.values()}
    seen = elsewhere.union(*map(features, found))
    planted = {m.case for m in FAULTS if m.rejected_by not in BY_TABLES}
    new = lambda case: len(features(case) - seen)
    while new(case := max(planted, key=lambda c: (new(c), c.batch * c.heads[0], str(c)))):
        found.append(case)
        seen |= features(case)
    return found


def fresh():
    """Keeps nothing that is traced or scheduled from before or for later."""
    jax.clear_caches()
    tile_scheduler.order.cache_clear()
    tile_scheduler.assign.cache_clear()


TABLES = tuple(
    Table(
        f"Attention {op.name.lower()}, by the checks of the kernels' tests",
        tuple(fault for fault in FAULTS if fault.case.op is op),
        check,
        ERRORS,
        fresh=fresh,
        hidden=("op",),
    )
    for op in (Op.FORWARD, Op.BACKWARD)
)
