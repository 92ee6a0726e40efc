"""Faults planted in the attention kernels: a function that runs in another's place, or a piece of a function's text.

A fault of text finds its function by that piece alone, whichever module of `pallas_kernels.attention` it is in. It is
for what happens in the middle of a function; a fault that can be said as a function is one.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import attention, monoid
from pallas_kernels.attention import (
    backward,
    backward_common,
    backward_xla,
    forward,
    gather,
    mask,
    online_softmax,
    pipeline,
    tile_scheduler,
    wgmma,
)
from pallas_kernels.attention.problem import Op

NUMBERS, RACE, DEADLOCK = "wrong numbers", "a race detected", "a deadlock reported"
NOT_WAITED_FOR = "a race detected, or a phase of a barrier that nobody waited for"
UNORDERED = "wrong numbers, a race or a deadlock"
OUT_OF_STEP = "a race detected, or a deadlock reported"
UNDER_WAY = "a product under way, whose numbers or operands are touched"
NOT_FINITE = "infinities in a product"
NOT_ONCE, TOO_LARGE = "a tile that is not taken once", "a config that is too large for shared memory"
NOT_VISITED = "a tile that is skipped or not compared, or an order of dQ that does not fit"
BY_TABLES = (NOT_ONCE, TOO_LARGE, NOT_VISITED)  # no kernel runs
NO_KERNELS = ("reference", "tiles")
FUNCTIONS = types.FunctionType, functools._lru_cache_wrapper


class Case(NamedTuple):
    """A problem of the kernel of `op`, of one of the kinds of that kernel's tests, and what its config is to have.

    `scheduler`, `early_exp_columns` and `bias_stages` are the forward config's, `head_splits` the backward's.
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


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault, and the case that shows it.

    `code` is a function and `becomes(code, *arguments)` what runs in its place, or both are text.
    """

    words: str
    code: str | property | Callable[..., Any]
    becomes: str | Callable[..., Any]
    rejected_by: str
    case: Case

    @functools.cached_property
    def original(self) -> property | Callable[..., Any]:
        """The function that another replaces, or that has the fault's piece of text."""
        if not isinstance(self.code, str):
            return self.code
        found = [f for f in _functions(self.case.op) if self.code in inspect.getsource(f)]
        assert len(found) == 1, f"{len(found)} functions with `{self.code}`: plant `{self.words}` anew"
        return found[0]

    @functools.cached_property
    def fault(self) -> Callable[..., Any]:
        """What runs in the function's place; its first argument is the function."""
        if callable(self.becomes):
            return self.becomes
        text = textwrap.dedent(inspect.getsource(self.original)).replace(self.code, self.becomes)
        names: dict[str, Any] = {}
        exec(compile(text, f"<{self.words}>", "exec"), inspect.unwrap(self.original).__globals__, names)
        return lambda original, *arguments, **keywords: names[self.original.__name__](*arguments, **keywords)


def _mutant(op: Op, words: str, code: Any, becomes: Any, kind: str = "full", rejected_by: str = NUMBERS, **facts: Any):
    """The fault in a problem of one sequence and head, or two of each if blocks or threads have to meet to show it."""
    meet = rejected_by != NUMBERS
    facts = {"batch": 1 + meet, "heads": (1 + meet, 1)} | facts
    return Mutant(words, code, becomes, rejected_by, Case(op, kind, **facts))


def _functions(op: Op) -> Iterator[Callable[..., Any]]:
    """The functions and methods that only this operation's kernel, or both, are made of."""
    other = "backward" if op is Op.FORWARD else "forward"
    for info in pkgutil.iter_modules(attention.__path__):
        if info.name in NO_KERNELS or info.name.startswith(other):
            continue
        module = importlib.import_module(f"{attention.__name__}.{info.name}")
        own = [x for x in vars(module).values() if getattr(x, "__module__", None) == module.__name__]
        for holder in [module, *(x for x in own if isinstance(x, type))]:
            for x in vars(holder).values():
                if isinstance(x, FUNCTIONS) and x.__module__ == module.__name__ and _has_source(x):
                    yield x


def _has_source(function: Callable[..., Any]) -> bool:
    code = inspect.unwrap(function).__code__
    return code.co_filename == inspect.getfile(importlib.import_module(function.__module__))


def _left_out(*arguments, **keywords):
    return None


def _with_scaled_bias(logits, problem, refs, place, extras, *arguments):
    extras = extras._replace(bias=extras.bias * problem.scale)
    return logits(problem, refs, place, extras, *arguments)


def _of_other_sign(folds_scale, problem):
    return folds_scale(dataclasses.replace(problem, scale=abs(problem.scale)))


def _of_base_2(finish, *arguments):
    unseen, factor, lse = finish(*arguments)
    return unseen, factor, lse * online_softmax.LOG2E


def _of_first_head(load, ref, axis, corner, columns):
    return load(ref, axis, (corner[0], jnp.int32(0), *corner[2:]), columns)


def _alike_if_they_meet(blocks, *arguments):
    meet, _ = blocks(*arguments)
    return mask.BlockMask(meet, meet)


def _one_not_counted(assign, *arguments):
    table = assign(*arguments).copy()
    table[:, 0] = np.maximum(table[:, 0] - 1, 1)
    return table


def _by_half(barrier):
    """A barrier's phase is over when half of the warps have arrived."""

    def arrivals_of(arrivals, *arguments):
        counts = arrivals(*arguments)
        return counts | {barrier: tuple(n // 2 for n in counts[barrier])}

    return arrivals_of


def _one_row_on(at):
    return tuple(pl.ds(i.start + 1, i.size) if isinstance(i, pl.Slice) else i for i in at)


def _without_d_lse(row_delta, operands, nothing):
    return row_delta(types.SimpleNamespace(**vars(operands) | {"d_lse": 0.0}), nothing)


def _of_first_row(tiles_without_keys, nothing, config):
    return nothing[:, :, :: config.block_q].astype(jnp.int32)


def _bounds_of_arrays(sequence_at, problem, *arguments):
    left, right = mask.window_bounds(problem)
    return sequence_at(problem, *arguments)._replace(left=left, right=right)


_forward = functools.partial(_mutant, Op.FORWARD)
_dynamic = functools.partial(_mutant, Op.FORWARD, scheduler="dynamic", batch=2, heads=(3, 1))
_biased = functools.partial(_mutant, Op.FORWARD, kind="bias", bias_stages=1)
_backward = functools.partial(_mutant, Op.BACKWARD)
_dynamic_backward = functools.partial(_mutant, Op.BACKWARD, kind="mask", batch=2, heads=(2, 1))
_wide_backward = functools.partial(_mutant, Op.BACKWARD, dims=(136, 64))
_capped_backward = functools.partial(_mutant, Op.BACKWARD, kind="capped-bias", dims=(128, 64))
_copied_bias = functools.partial(_mutant, Op.BACKWARD, kind="shared-bias", keys=192)

MUTANTS = (
    _forward("a query sees one key too many", gather.apply_bounds, lambda keep, x, low, high: keep(x, low, high + 1),
             "causal"),
    _forward("the window's left end is one too far right", gather.apply_bounds,
             lambda keep, x, low, high: keep(x, low + 1, high), "window"),
    _forward("a tile on the diagonal is not compared", mask.needs_mask,
             lambda needs_mask, problem, span, tile: needs_mask(problem, span._replace(inner_end=span.inner_end + 1),
             tile),
             "causal-later"),
    _forward("the output is kept when the maximum grows", "out * by_row(decay, out)", "out", "large",
             early_exp_columns=24),
    _forward("weights that began early are kept when the maximum has grown", "lambda: full_update(early), lambda: same",
             "lambda: (*full_update(early)[:2], *same[2:]), lambda: same", "large", early_exp_columns=24),
    _forward("no warp looks for a maximum that grows", gather.warp_any_above,
             lambda warp_any_above, x, factor, limits: warp_any_above(x, factor, limits + 2.0**20), "huge",
             early_exp_columns=24,
             rejected_by=NOT_FINITE),
    _forward("a negative scale is taken for a positive one", online_softmax.folds_scale, _of_other_sign, "negative",
             rejected_by=NOT_FINITE),
    _forward("the sum is kept when the maximum grows", "state.sum * by_row(decay, state.sum)", "state.sum", "large",
             early_exp_columns=24),
    _forward("the logsumexp is of base 2", online_softmax.finalize, _of_base_2),
    _forward("the last tile of keys is left out", mask.kv_range,
             lambda kv_range, problem, block_kv, *rows: kv_range(problem, block_kv, *rows[:-1],
             rows[-1] - block_kv + 1), "mask", rejected_by=NOT_VISITED),
    _forward("head n reads key head n % K", "lax.div(head, jnp.int32(packs // problem.key_heads))",
             "lax.rem(head, jnp.int32(problem.key_heads))", heads=(4, 2)),
    _forward("the bits of even and of odd columns are apart", "of_four(j, e) << (2 * j + e)",
             "of_four(j, e) << (j + 4 * e)", "mask"),
    _forward("all heads have the first one's mask", gather.load_bits, _of_first_head, "mask-of-heads", heads=(2, 1)),
    _forward("all heads have the first one's spans", gather.broadcast_index,
             lambda index, at, shape: index((at[0], jnp.int32(0), *at[2:]), shape), "mask-of-heads", mask="causal",
             heads=(2, 1)),
    _forward("a tile that holds something is taken for one that holds everything", mask.bitmask_blocks,
             _alike_if_they_meet,
             "mask", rejected_by=NOT_VISITED),
    _forward("what a tile of 64 keys holds decides for the next one too", "x >> shift & full", "x & full", "mask",
             mask="causal", batch=2, rejected_by=NOT_VISITED),
    _forward("the bias is scaled", online_softmax.logits, _with_scaled_bias, "bias"),
    _forward("the sink joins the numerator", monoid.combine,
             lambda combine, a, b, **exp: combine(a, (*b[:2], *map(jnp.ones_like, b[2:])), **exp), "sinks"),
    _forward("the soft cap has no effect", online_softmax.logits,
             lambda logits, problem, *a: logits(dataclasses.replace(problem, soft_cap=None), *a), "soft-cap"),
    _forward("one key too many is there", online_softmax._in_bounds,
             lambda in_bounds, problem, place, *a: in_bounds(problem, place._replace(keys=place.keys + 1), *a),
             "key-lengths"),
    _forward("the window's left end stays where the diagonal is moved", mask.window_bounds,
             lambda window_bounds, problem, *lengths: (window_bounds(problem)[0], window_bounds(problem, *lengths)[1]),
             "ends-window"),
    _forward("scores are compared as if the arrays' ends were the sequences'",
             "mask.window_bounds(problem, place.queries, place.keys)", "mask.window_bounds(problem)", "ends"),
    _forward("tiles are passed over as if the arrays' ends were the sequences'",
             "= window_bounds(problem, queries, keys)", "= window_bounds(problem)", "ends-segments",
             rejected_by=NOT_VISITED),
    _forward("queries past their length see keys", online_softmax.finalize,
             lambda finish, state, sink, hidden: finish(state, sink, None), "lengths", batch=2),
    _forward("the first tile of keys that a segment is in is skipped", mask.tile_ranges,
             lambda spans, *a: spans(*a) + jnp.array([1, 0, 0, 0]), "segments", rejected_by=NOT_VISITED),
    _forward("tiles of two segments are taken for tiles of one", mask.tile_ranges,
             lambda spans, pairs, columns: spans(pairs, columns).at[..., 2].set(columns), "segments",
             rejected_by=NOT_VISITED),
    _forward("a warpgroup takes steps that its CTA skips",
             "own = (mask.intersect if narrows else mask.clamp)(tile.span, own)", "pass",
             "segments", rejected_by=OUT_OF_STEP),
    _forward("a tile's rows are stored one row on, the last of them over the next sequence's", pipeline.store_rows,
             lambda store, source, target, at, *column: store(source, target, _one_row_on(at), *column), batch=2),
    _forward("values past the length, NaN, are multiplied by 0", pipeline.zero_rows, _left_out, "key-lengths"),
    _forward("the last section of heads is left out", tile_scheduler.order,
             lambda order, *a: tuple(part[:-1] for part in order(*a)), rejected_by=NOT_ONCE),
    _forward("the last tile that is assigned to a CTA is not counted", tile_scheduler.assign, _one_not_counted,
             rejected_by=NOT_ONCE),
    _forward("tiles of 128 keys are taken for heads of any size",
             "if problem.head_dim <= 192 and problem.value_dim <= 128 and widest + narrowest <= 320:",
             "if True:", rejected_by=TOO_LARGE),
    _forward("the bias is not counted in shared memory",
             "(c for c in copied if forward.shared_bytes(problem, c) < device.smem_per_cta)",
             "(c for c in copied)", "bias", rejected_by=TOO_LARGE),
    _dynamic("no CTA takes the counter's first tile", "LOOKAHEAD * ctas, jnp.int32", "LOOKAHEAD * ctas + 1, jnp.int32"),
    _dynamic("the counter's last number names no tile", "np.pad(order, (0,", "np.pad(order[:-1], (0, 1 +"),
    _forward("a tile's record is written one tile before it, where its keys are asked for two tiles before",
             "tile.t + tile_scheduler.LOOKAHEAD, index", "tile.t + 1, _index(cta, tile.t + 1, 0)", "window-nothing",
             rejected_by=UNORDERED, heads=(3, 1)),
    _forward("a tile's record is overwritten while it is read", tile_scheduler._slot,
             lambda slot, t: lax.rem(jnp.int32(t), jnp.int32(2)), rejected_by=OUT_OF_STEP, heads=(3, 1)),
    _forward("keys are read before they are there", "wait(i)\n        issued = multiply_keys(i)\n        summing",
             "issued = multiply_keys(i)\n        summing",
             rejected_by=OUT_OF_STEP),
    _forward("the last values are read before they are there", "        wait(count)\n", "", rejected_by=RACE),
    _forward("queries are read before they are there",
             "pipeline.wait(cta.query_full.at[pl.ds(warpgroup, 1)], tile.t, 1)", "pass", rejected_by=RACE),
    _forward("the next tile's queries are asked for before the last scores are there",
             "pipeline.when(i == count - 1)(release_query)",
             "pipeline.when(i == jnp.maximum(count - 2, 1))(release_query)", rejected_by=RACE, heads=(3, 1)),
    _forward("rows that see nothing are not zeroed", gather.warp_any, lambda warp_any, x: warp_any(x) & False,
             "window-nothing"),
    _forward("a stage is refilled when one warpgroup has released it", forward._arrivals, _by_half("stage_empty"),
             rejected_by=OUT_OF_STEP),
    _forward("a stage is not released", "released.append(pipeline.arrive(cta.stage_empty.at[stage(i)]))",
             "released.append(jnp.int32(0))", rejected_by=DEADLOCK),
    _forward("a warpgroup does not release the stages of last keys that it does not see", forward._skip, _left_out,
             "causal", rejected_by=DEADLOCK),
    _forward("at a tile's end a stage is not refilled", "pipeline.when(is_next)(copy_next)", "pass",
             rejected_by=DEADLOCK),
    _forward("at a tile's end a stage is refilled for the step after the one that is next",
             "_read(cta, tile.t + 1), i - tile.steps\n", "_read(cta, tile.t + 1), i - tile.steps + 1\n", batch=2,
             heads=(2, 1)),
    _forward("behind a tile of one step a stage is not refilled for the tile after the next",
             "return (steps > 0) & (state[1] >= steps)", "return steps < 0", "causal-earlier", rejected_by=DEADLOCK,
             batch=2, heads=(3, 1)),
    _forward("the barrier of values that are zeroed keeps its phase where all of them exist",
             "pipeline.expect(cta.partial_full.at[stage], 0)", "None", "lengths", rejected_by=DEADLOCK),
    _biased("a copied bias is read before it is there",
            "pipeline.wait(cta.bias_full, tile.n + i, cta.config.bias_stages)\n    bias", "bias", rejected_by=RACE),
    _biased("the stage of a copied bias is released before it is read", "    bias = plgpu.load(",
            "    _release_bias(cta, tile, i)\n    return plgpu.load(", rejected_by=RACE),
    _biased("nothing orders the reads of a copied bias before TMA's next write",
            "plgpu.commit_smem()  # TMA writes where threads have read", "pass", rejected_by=RACE),
    _forward("the stage of a copied bias is not released by a warpgroup that does not see its keys",
             forward._release_bias, _left_out, "everything", rejected_by=DEADLOCK, bias_stages=1),
    _forward("scores are read while they may be under way", wgmma.wait,
             lambda wait, issued, pending: wait(issued, pending=pending + 1), rejected_by=UNDER_WAY, batch=1, heads=(1,
             1)),
    _forward("a stage is released while a product reads its values", "plgpu.wgmma_wait(0)\n            released",
             "plgpu.wgmma_wait(1)\n            released", rejected_by=UNDER_WAY, batch=1, heads=(1, 1)),
    _backward("dP is read while its product may be under way", "wgmma.wait(dp, pending=1)",
              "wgmma.wait(dp, pending=2)", rejected_by=UNDER_WAY, batch=1, heads=(1, 1)),
    _backward("dQ is read while its last product may be under way", "pending=2 if config.prefetch_scores else 1",
              "pending=3 if config.prefetch_scores else 2", rejected_by=UNDER_WAY, batch=1, heads=(1, 1)),
    _backward("the queries' stage is released while the product for dK reads it",
              "plgpu.wgmma_wait(0)\n    issued, *sums",
              "plgpu.wgmma_wait(1)\n    issued, *sums", "lengths", rejected_by=UNDER_WAY),
    _wide_backward("the cotangents' stage is released while the product for dV reads it",
                   "issued = _add_to_dq(tile, step, VALUES, at_first=release, meanwhile=meanwhile)",
                   "issued = release(), _add_to_dq(tile, step, VALUES, meanwhile=meanwhile)", rejected_by=UNDER_WAY),
    _backward("heads are started together that are no multiple of those that there are",
              backward_common._heads_per_group,
              lambda together, problem, config: config.heads_per_l2_group, "causal", rejected_by=NOT_ONCE),
    _backward("the bias is not counted in shared memory", "if shared_bytes(problem, c) < device.smem_per_cta",
              "if c.bias_stages or not problem.bias_is_tiled", "bias", rejected_by=TOO_LARGE),
    _backward("a query sees one key too many", "row - key + right if", "row - key + right + 1 if", "causal"),
    _backward("the window's left end is one too far right", "row - key + left if", "row - key + left + 1 if", "window"),
    _backward("the arrays' ends are taken for the sequences'", backward_common.sequence_at, _bounds_of_arrays, "ends"),
    _wide_backward("positions in dQ's order are counted as if the arrays' ends were the sequences'",
                   "keys, _, left, right = tile.sequence\n    block_q, block_kv",
                   "keys, _, left, right = tile.sequence[:2] + mask.window_bounds(tile.problem)\n    block_q, block_kv",
                   "ends", rejected_by=DEADLOCK, deterministic=True),
    _backward("the logsumexp's cotangent has no effect", backward_xla.row_delta, _without_d_lse),
    _backward("the gradient goes past the soft cap", "p = p * slope", "pass", "soft-cap"),
    _capped_backward("beside a bias, the gradient goes past the soft cap",
                     "d_scores = d_scores * plgpu.load(refs.slope_smem.at[warpgroup], layout=WGMMA)", "pass"),
    _capped_backward("the bias' gradient has the soft cap's slope", "_write_logits(part, d_scores)",
                     "_write_logits(part, d_scores * plgpu.load(refs.slope_smem.at[warpgroup], layout=WGMMA))"),
    _capped_backward("the soft cap's slope is taken where the bias has been added",
                     "refs.slope_smem[warpgroup] = slope",
                     'biased = x / 1.442695 + extras["bias"].astype(jnp.float32); '
                     "refs.slope_smem[warpgroup] = 1 - (biased / problem.soft_cap) ** 2"),
    _backward("dK is of the group's first head", "multiply_rows(dk, ds, ",
              "multiply_rows(dk, jnp.where(part.step.head == tile.key_head * tile.group, ds, jnp.zeros_like(ds)), ",
              heads=(2, 1)),
    _backward("a part of a group's heads reads the keys of the head of its number", backward_common.Tile.source_head,
              lambda source_head, tile: lax.rem(tile.key_head, jnp.int32(2)), heads=(4, 2), head_splits=2),
    _backward("head n belongs to key head n % K", "return Step(self.key_head * self.group + h,",
              "return Step(self.key_head + h * self.problem.key_heads,", heads=(4, 2)),
    _backward("dQ lacks the scale", "(dq_sum * problem.scale)", "dq_sum", "lengths"),
    _backward("the last writes dQ without the scale", "total * tile.problem.scale", "total", deterministic=True),
    _backward("dK lacks the scale", "dk * tile.problem.scale", "dk"),
    _backward("what the first head of a group may pass over, all do", "visible.any(2)", "visible[:, :, 0]",
              "mask-of-heads", mask="causal", heads=(2, 1), rejected_by=NOT_VISITED),
    _wide_backward("a block that one head of a group sees whole is not compared for any", "full.all(2)",
                   "full.any(2)", "mask-of-heads", heads=(3, 1), mask="causal", rejected_by=NOT_VISITED),
    _wide_backward("what one group of heads sees decides for another", "(x.shape[0], -1, group, *x.shape[2:])",
                   "(x.shape[0], -1, group, *x.shape[2:])[:, ::-1]", "mask-of-heads", heads=(4, 2), mask="causal",
                   rejected_by=NOT_VISITED),
    _backward("segment ids have no effect", gather.apply_segments, lambda keep, x, *a: x, "segments"),
    _backward("a block of keys counts itself among those before", backward_common.dq_positions,
              lambda dq_positions, *a: dq_positions(*a) + 1, "segments", rejected_by=NOT_VISITED, deterministic=True),
    _backward("under a window positions in dQ's order are counted from the first keys of all",
              "0 if left is None else _div(i * block_q + left, block_kv)", "0", "window-left", batch=1, heads=(1, 1),
              deterministic=True, dims=(128, 64), keys=300, rejected_by=DEADLOCK),
    _backward("of as many queries as keys the bias' gradient is keys by queries", "problem.query_length], 2, 3)",
              "problem.query_length], 2, 3 if problem.query_length != problem.key_length else 2)", "bias", keys=200),
    _backward("the bias' gradient is scaled", backward_xla.bias_gradient,
              lambda f, problem, ops, d_logits: f(problem, ops, problem.scale * d_logits), "bias-of-heads"),
    _backward("the sinks' gradient lacks delta", "(weight * delta).sum", "weight.sum", "sinks"),
    _backward("the first row past the length, NaN, counts", pipeline.zero_rows,
              lambda zero, ref, first: zero(ref, first + 1), "lengths"),
    _wide_backward("keys past the length are zeroed before they have come", "pipeline.wait(partial_full, 0, 1)", "pass",
                   "lengths", rejected_by=NOT_WAITED_FOR),
    _backward("the barrier of keys that are zeroed keeps its phase where all of them exist",
              "pipeline.expect(partial_full, 0)  # a phase to each tile", "pass", "lengths",
              rejected_by=UNORDERED, batch=2,
              heads=(4, 4), keys=400),
    _backward("cotangents of rows without a key, NaN, are multiplied by 0", backward_common.zero_rows, _left_out,
              "mask", mask="documents"),
    _backward("of a block of queries, the first tells whether some have no key", backward_xla.tiles_without_keys,
              _of_first_row, "mask", mask="documents"),
    _backward("cotangents are zeroed before they have come",
              "pipeline.wait(refs.partial_full, n, config.stages)", "pass",
              "mask", mask="documents", rejected_by=NOT_WAITED_FOR),
    _backward("a CTA takes its first tile without the counter though dQ is ordered",
              backward._fetches_first_tile, lambda fetches, config: False, rejected_by=DEADLOCK, deterministic=True),
    _dynamic_backward("the last tile of keys is worked on once more", "jnp.where(number < tiles, batch, -1)",
                    "jnp.where(number <= tiles, batch, -1)"),
    _dynamic_backward("a tile's record does not say which queries come past its keys",
                    "(jnp.where(number < tiles, batch, -1), *rest)",
                    "(jnp.where(number < tiles, batch, -1), *rest[:3], 0, 0, 0, 0)"),
    _dynamic_backward("keys are overwritten when one warpgroup has read those of the tile before", backward._arrivals,
                    _by_half("kv_empty"), rejected_by=OUT_OF_STEP),
    _dynamic_backward("keys are read before they are there", "pipeline.wait(tile.refs.kv_full, tile.t, 1)", "pass",
                    rejected_by=NOT_WAITED_FOR),
    _dynamic_backward("the stages of a tile that no queries come past are filled and never passed",
                    backward._pass_spare_stages, _left_out, mask="causal", keys=400, rejected_by=DEADLOCK),
    _backward("the last block of keys is left out", "problem.key_heads * -(-problem.key_length // config.block_kv)",
              "problem.key_heads * (problem.key_length // config.block_kv)"),
    _backward("dQ is multiplied from scores that are not all there", "reduce.sync_block(part.tile.config.warpgroups)",
              "pass", rejected_by=UNORDERED),
    _backward("scores leave to the bias before copies may see them", wgmma.commit_square, _left_out, "bias",
              rejected_by=RACE),
    _backward("the next step gets this step's K Q^T", "step.n + follows.astype(jnp.int32)", "step.n", "lengths"),
    _backward("the next step's queries are multiplied before they are there",
              "pl.when(follows)(lambda: pipeline.wait(tile.refs.full, step.n + 1, stages))", "pass", "lengths",
              rejected_by=NOT_WAITED_FOR),
    _backward("after the last step the next block's queries are taken", "step.n + 1 < tile.first_stage + tile.steps",
              "step.n >= 0", "lengths", rejected_by=DEADLOCK),
    _backward("the sums' squares are read as if the registers had rows",
              "parts.transpose(0, 1, 3, 4, 6, 2, 5, 8, 7, 9)", "parts", "lengths"),
    _backward("queries and cotangents are read before they are there",
              "        pipeline.wait(refs.full, step.n, config.stages)\n    # Where",
              "        pass\n    # Where", rejected_by=NOT_WAITED_FOR, heads=(2, 1), deterministic=True),
    _backward("a stage is refilled for the step before its own", "_place_after(tile, step, stages), step.n + stages",
              "_place_after(tile, step, stages - 1), step.n + stages", heads=(2, 1)),
    _backward("a stage is released and not refilled for a later step of the tile", backward._refill, _left_out,
              heads=(4, 1), rejected_by=DEADLOCK),
    _backward("of a tile's last stages none is refilled for the next tile",
              "pipeline.when(released)(lambda: _copy_stage(tile, _place_behind(tile, n), n))", "pass", "lengths",
              rejected_by=DEADLOCK),
    _backward("the semaphore is released before the tile of dQ has arrived",
              "    plgpu.wait_smem_to_gmem(0)\n\n    @pl.when(jnp.logical_not", "    @pl.when(jnp.logical_not",
              rejected_by=RACE, deterministic=True),
    _backward("the semaphore of dQ is never released", backward_common._release_semaphore, _left_out,
              rejected_by=DEADLOCK,
              deterministic=True),
    _backward("the last tile of keys to add writes the others' sum", "square + wgmma.load_square(part.sum_smem)",
              "wgmma.load_square(part.sum_smem)", deterministic=True),
    _backward("a block of keys takes itself for the last with one to come",
              "last if mask.window_bounds(tile.problem)[1] is None else first",
              "last - 1 if mask.window_bounds(tile.problem)[1] is None else first", deterministic=True),
    _backward("a block of keys that is alone waits for the others' sum",
              "backward_common.dq_position(part.tile, part.step.i) > 0",
              "backward_common.dq_position(part.tile, part.step.i) >= 0", "causal", rejected_by=DEADLOCK,
              deterministic=True),
    _backward("the others' sum is read before it is there",
              "plgpu.barrier_wait(part.tile.refs.dq_full.at[part.warpgroup])", "pass", rejected_by=NOT_WAITED_FOR,
              deterministic=True),
    _backward("the last tile of keys reads the sum before the semaphore says that it is complete",
              "        backward_common.acquire_dq(tile, step, warpgroup, earlier, ended)\n        plgpu.copy_gmem",
              "        plgpu.copy_gmem", "bias", rejected_by=RACE, dims=(128, 128), deterministic=True),
    _wide_backward("score gradients are made of probabilities that are not there",
                   "pipeline.wait(refs.p_full, step.n, 1)", "pass", rejected_by=NOT_WAITED_FOR),
    _wide_backward("dQ is multiplied from score gradients that are not there, and probabilities are overwritten",
                   "    pipeline.wait(refs.ds_full, step.n, 1)\n\n    def release", "\n    def release",
                   rejected_by=NOT_WAITED_FOR),
    _wide_backward("a stage gets the copies of a step too early", "step.n - tile.first_stage + stages",
                   "step.n - tile.first_stage + stages - 1", rejected_by=DEADLOCK),
    _wide_backward("nothing orders the reads of lse and delta before the copies that write over them",
                   "wgmma.commit_square()  # orders", "pass  # orders", rejected_by=RACE),
    _wide_backward("score gradients are overwritten on their way to the bias",
                   "elif tile.problem.bias_gradient:\n        plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
                   "elif tile.problem.bias_gradient:\n        pass", "bias-of-heads", rejected_by=RACE),
    _copied_bias("a copied bias is read queries by keys", "plgpu.load(tile.refs.bias_smem.at[slot, :, keys].T",
                 "plgpu.load(tile.refs.bias_smem.at[slot, :, keys]", dims=(128, 64)),
    _copied_bias("all warpgroups have the first one's copied bias", "keys, slot = pl.ds(part.warpgroup * CHUNK, CHUNK)",
                 "keys, slot = pl.ds(0, CHUNK)"),
    _copied_bias("all heads of a group have the first one's copied bias",
                 "gather.broadcast_index((batch, head), refs.bias.shape)",
                 "gather.broadcast_index((batch, lax.div(head, 2) * 2), refs.bias.shape)", heads=(2, 1)),
    _copied_bias("where they share a bias, sequences are counted as heads",
                 "return lax.rem(head, problem.batch), lax.div", "return lax.rem(head, problem.key_heads), lax.div",
                 rejected_by=UNORDERED),
    _copied_bias("every tile of a copied bias takes the first stage, and the barriers say that it has two",
                 "pipeline.stage(step.n, slots) if slots > 1 else 0", "0", rejected_by=NOT_WAITED_FOR, dims=(128, 64)),
    _copied_bias("the stage of a copied bias is never released", backward._release_bias, _left_out,
                 rejected_by=DEADLOCK),
)  # fmt: skip
