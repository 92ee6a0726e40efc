"""Faults planted in the text of the attention kernels: a piece of it, and what it becomes.

A fault finds its function by that piece alone, whichever module of `pallas_kernels.attention` it is in.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels import attention
from pallas_kernels.attention.problem import Op

NUMBERS, RACE, DEADLOCK = "wrong numbers", "a race detected", "a deadlock reported"
NOT_WAITED_FOR = "a race detected, or a phase of a barrier that nobody waited for"
UNORDERED = "wrong numbers, a race or a deadlock"
OUT_OF_STEP = "a race detected, or a deadlock reported"
UNDER_WAY = "a product under way, whose numbers or operands are touched"
NOT_FINITE = "infinities in a product"
NOT_ONCE, TOO_LARGE = "a tile that is not taken once", "a config that is too large for shared memory"
BY_SIZES = (NOT_ONCE, TOO_LARGE)  # of models: no kernel runs
NO_KERNELS = ("reference", "tiles")
FUNCTIONS = types.FunctionType, functools._lru_cache_wrapper


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault in the kernel of `op`, the problem that shows it, and how: `kind` is one of those of the kernel's tests.

    `batch` and `heads` are None where one shows it, or two, if blocks or threads have to meet for that. `slack`,
    `early`, `scheduler` and `bias_stages` are the forward config's, `deterministic`, `dims`, of heads, and `keys` the
    backward problem's, `mask` the pattern of the problem's mask.
    """

    op: Op
    name: str
    words: str
    code: str
    becomes: str
    kind: str = "full"
    rejected_by: str = NUMBERS
    batch: int | None = None
    heads: tuple[int, int] | None = None
    slack: int = 0
    early: int = 0
    scheduler: str = "static"
    bias_stages: int = 0
    deterministic: bool = False
    dims: tuple[int, int] = (64, 64)
    mask: str = "scattered"
    keys: int = 150

    @property
    def case(self) -> tuple[Any, ...]:
        """What the check is of."""
        meet = self.rejected_by != NUMBERS
        batch, heads = self.batch or 1 + meet, self.heads or (1 + meet, 1)
        config = self.slack, self.early, self.scheduler, self.bias_stages
        return self.op, self.kind, batch, heads, *config, self.deterministic, self.dims, self.mask, self.keys

    @functools.cached_property
    def original(self) -> Callable[..., Any]:
        """The function with the fault's piece of text."""
        found = [f for f in _functions(self.op) if self.code in inspect.getsource(f)]
        assert len(found) == 1, f"{len(found)} functions with `{self.code}`: plant {self.name} anew"
        return found[0]

    @functools.cached_property
    def faulty(self) -> Callable[..., Any]:
        """That function with the fault."""
        text = textwrap.dedent(inspect.getsource(self.original)).replace(self.code, self.becomes)
        names: dict[str, Any] = {}
        exec(compile(text, f"<{self.name}>", "exec"), inspect.unwrap(self.original).__globals__, names)
        return names[self.original.__name__]

    def fault(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """What runs in the function's place."""
        return self.faulty(*arguments, **keywords)


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


_forward = functools.partial(Mutant, Op.FORWARD)
_dynamic = functools.partial(Mutant, Op.FORWARD, scheduler="dynamic", batch=2, heads=(3, 1))
_biased = functools.partial(Mutant, Op.FORWARD, kind="bias", bias_stages=1)
_backward = functools.partial(Mutant, Op.BACKWARD)
_drawn_backward = functools.partial(Mutant, Op.BACKWARD, kind="mask", batch=2, heads=(2, 1))
_wide_backward = functools.partial(Mutant, Op.BACKWARD, dims=(136, 64))
_capped_backward = functools.partial(Mutant, Op.BACKWARD, kind="capped-bias", dims=(128, 64))
_wide_capped_backward = functools.partial(Mutant, Op.BACKWARD, kind="capped-bias", dims=(136, 64))
_copied_bias = functools.partial(Mutant, Op.BACKWARD, kind="shared-bias", keys=192)

MUTANTS = (
    _forward(
        "causal_by_one",
        "a query sees one key too many",
        "place.row - key + right)",
        "place.row - key + right + 1)",
        "causal",
    ),
    _forward(
        "window_left_by_one",
        "the window's left end is one too far right",
        "place.row - key + left)",
        "place.row - key + left + 1)",
        "window",
    ),
    _forward(
        "window_right_by_one",
        "the window's right end is one too far left",
        "place.row - key + right)",
        "place.row - key + right - 1)",
        "window",
    ),
    _forward(
        "edge_taken_for_inner",
        "a tile on the diagonal is not compared",
        "tile >= span.inner_end",
        "tile > span.inner_end",
        "causal-later",
    ),
    _forward(
        "output_not_rescaled",
        "the output is kept when the maximum grows",
        "out * by_row(decay, out)",
        "out",
    ),
    _forward(
        "output_not_rescaled_lazily",
        "the same with slack",
        "out * by_row(decay, out)",
        "out",
        slack=2,
    ),
    _forward(
        "output_not_rescaled_with_slack",
        "the output is not rescaled when the maximum outgrows the kernel's own slack",
        "out * by_row(decay, out)",
        "out",
        "large",
        slack=8,
    ),
    _forward(
        "early_weights_kept",
        "weights that began early are kept when the maximum has grown",
        "lambda: joined(early), lambda: same",
        "lambda: (*joined(early)[:2], *same[2:]), lambda: same",
        "large",
        slack=8,
        early=24,
    ),
    _forward(
        "growth_not_looked_for",
        "nobody looks for a maximum that grows",
        "gather.any_above(highest, factor, state.max + float(config.slack))",
        "gather.any_above(highest, factor, state.max + 2.0**20)",
        "huge",
        slack=8,
        early=24,
        rejected_by=NOT_FINITE,
    ),
    _forward(
        "sign_of_scale",
        "a negative scale is taken for a positive one",
        "problem.scale > 0 and ",
        "",
        "negative",
        rejected_by=NOT_FINITE,
    ),
    _forward(
        "sum_not_rescaled",
        "the sum is kept when the maximum grows",
        "state.sum * by_row(decay, state.sum)",
        "state.sum",
    ),
    _forward(
        "lse_of_base_2",
        "the logsumexp is of base 2",
        "m / LOG2E + fast_math.log(total)",
        "m + fast_math.log(total) * LOG2E",
    ),
    _forward(
        "tail_dropped",
        "the last tile of keys is left out",
        "_div(keys + block_kv - 1, block_kv)",
        "_div(keys, block_kv)",
    ),
    _forward(
        "heads_mixed",
        "head n reads key head n % K",
        "lax.div(head, jnp.int32(problem.query_heads // problem.key_heads))",
        "lax.rem(head, jnp.int32(problem.key_heads))",
        heads=(4, 2),
    ),
    _forward("mask_ignored", "the mask has no effect", "if extras.held is not None:", "if False:", "mask"),
    _forward(
        "mask_bits_swapped",
        "the bits of even and of odd columns are apart",
        "of_four(j, e) << (2 * j + e)",
        "of_four(j, e) << (j + 4 * e)",
        "mask",
    ),
    _forward(
        "mask_octets_backwards",
        "the bits of the last columns of a word are its lowest",
        ".astype(jnp.uint32) << 8 * j for",
        ".astype(jnp.uint32) << 24 - 8 * j for",
        "mask",
    ),
    _forward(
        "mask_of_first_head",
        "all heads have the first one's mask",
        "place.batch, place.head, place.row, key",
        "place.batch, jnp.int32(0), place.row, key",
        "mask-of-heads",
        heads=(2, 1),
    ),
    _forward(
        "mask_spans_of_first_head",
        "all heads have the first one's spans",
        "(batch, head, index), cta.spans.shape",
        "(batch, jnp.int32(0), index), cta.spans.shape",
        "mask-of-heads",
        mask="causal",
        heads=(2, 1),
    ),
    _forward(
        "mask_some_for_all",
        "a tile that holds something is taken for one that holds everything",
        "every == full",
        "some != 0",
        "mask",
    ),
    _forward(
        "mask_of_lower_half",
        "what a tile of 64 keys holds decides for the next one too",
        "x >> shift & full",
        "x & full",
        "mask",
        mask="causal",
        batch=2,
    ),
    _forward(
        "mask_last_skipped",
        "the last tile of keys that a mask leaves is skipped",
        "meet, column + 1, 0",
        "meet, column, 0",
        "mask",
        mask="causal",
    ),
    _forward(
        "bias_scaled",
        "the bias is scaled",
        "extras.bias.astype(jnp.float32)",
        "extras.bias.astype(jnp.float32) * problem.scale",
        "bias",
    ),
    _forward(
        "bias_of_first_head",
        "all heads have the first one's bias",
        "place.batch, place.head, place.row, key",
        "place.batch, jnp.int32(0), place.row, key",
        "bias-of-heads",
        heads=(2, 1),
    ),
    _forward(
        "sink_in_numerator",
        "the sink joins the numerator",
        "jnp.ones_like(m), jnp.zeros_like(m)",
        "jnp.ones_like(m), jnp.ones_like(m)",
        "sinks",
    ),
    _forward("cap_ignored", "the soft cap has no effect", "if problem.soft_cap is not None:", "if False:", "soft-cap"),
    _forward("keys_by_one", "one key too many is there", "place.keys - 1 - key", "place.keys - key", "key-lengths"),
    _forward(
        "ends_swapped",
        "the diagonal is moved the other way",
        "min(rights) + apart",
        "min(rights) - apart",
        "ends",
    ),
    _forward(
        "ends_by_one",
        "the diagonal is moved one key too far",
        "min(rights) + apart",
        "min(rights) + apart + 1",
        "ends",
    ),
    _forward(
        "window_not_moved",
        "the window's left end stays where the diagonal is moved",
        "problem.window_offset - before + apart",
        "problem.window_offset - before",
        "ends-window",
    ),
    _forward(
        "ends_of_arrays",
        "scores are compared as if the arrays' ends were the sequences'",
        "schedule.bounds(problem, place.queries, place.keys)",
        "schedule.bounds(problem)",
        "ends",
    ),
    _forward(
        "ends_of_arrays_in_spans",
        "tiles are passed over as if the arrays' ends were the sequences'",
        "= bounds(problem, queries, keys)",
        "= bounds(problem)",
        "ends",
    ),
    _forward(
        "queries_unlimited",
        "queries past their length see keys",
        "unseen |= hidden",
        "pass",
        "lengths",
        batch=2,
    ),
    _forward(
        "segments_ignored",
        "segment ids have no effect",
        "if problem.segments:\n        # Not",
        "if False:\n        # Not",
        "segments",
    ),
    _forward(
        "segments_first_skipped",
        "the first tile of keys that a segment is in is skipped",
        "stack([first,",
        "stack([first + 1,",
        "segments",
    ),
    _forward(
        "segments_last_skipped",
        "the last tile of keys that a segment is in is skipped",
        "meet, column + 1, 0",
        "meet, column, 0",
        "segments",
    ),
    _forward(
        "segments_swapped",
        "a block's least segment is taken for its greatest",
        "ids.min(2), ids.max(2)",
        "ids.max(2), ids.min(2)",
        "segments",
    ),
    _forward(
        "segments_of_keys",
        "the keys' segments decide what queries skip",
        "pairs(*ids, config.block_q",
        "pairs(ids[1], ids[1], config.block_q",
        "segments",
    ),
    _forward(
        "segments_not_compared",
        "tiles of two segments are taken for tiles of one",
        " & ~alike, column",
        " & False, column",
        "segments",
    ),
    _forward(
        "span_of_another_tile",
        "a warpgroup takes steps that its CTA skips",
        "own = (schedule.narrowed if cta.problem.hidden_by_data else schedule.within)(tile.span, own)",
        "pass",
        "segments",
        rejected_by=DEADLOCK,
    ),
    _forward(
        "padding_leaks",
        "values past the length, NaN, are multiplied by 0",
        "pipeline.zero_rows(to, step.keys - step.key)",
        "pass",
        "key-lengths",
    ),
    _forward(
        "section_dropped",
        "the last section of heads is left out",
        "range(0, heads, section)",
        "range(0, max(heads - section, 1), section)",
        rejected_by=NOT_ONCE,
    ),
    _forward(
        "section_too_far",
        "a section of heads begins where the one before it ends, and one later",
        "in_turn[start : start + section]",
        "in_turn[start : start + section - (start > 0)]",
        rejected_by=NOT_ONCE,
    ),
    _forward(
        "tile_dealt_to_nobody",
        "the last tile that is dealt to a block is not counted",
        "[len(mine), *mine]",
        "[max(len(mine) - 1, 1), *mine]",
        rejected_by=NOT_ONCE,
    ),
    _forward(
        "wide_tiles_of_wide_heads",
        "tiles of 128 keys are taken for heads of any size",
        "if problem.head_dim + problem.value_dim <= 320 and problem.head_dim <= 192 and problem.value_dim <= 128:",
        "if True:",
        rejected_by=TOO_LARGE,
    ),
    _forward(
        "bias_not_counted",
        "the bias is not counted in shared memory",
        "(c for c in copied if forward_kernel.shared_bytes(problem, c) < device.smem_per_cta)",
        "(c for c in copied)",
        "bias",
        rejected_by=TOO_LARGE,
    ),
    _dynamic(
        "ticket_skipped",
        "no CTA draws the first ticket",
        "LOOKAHEAD * ctas, jnp.int32",
        "LOOKAHEAD * ctas + 1, jnp.int32",
    ),
    _dynamic("last_ticket_dropped", "the last ticket names no tile", "np.pad(order, (0,", "np.pad(order[:-1], (0, 1 +"),
    _forward(
        "record_too_late",
        "a tile's record is written one tile before it, where its keys are asked for two tiles before",
        "tile.t + tile_scheduler.LOOKAHEAD, index",
        "tile.t + 1, _index(cta, tile.t + 1, 0)",
        "window-nothing",
        rejected_by=UNORDERED,
        heads=(3, 1),
    ),
    _forward(
        "record_overwritten",
        "a tile's record is overwritten while it is read",
        "jnp.int32(RECORDS)",
        "jnp.int32(2)",
        rejected_by=OUT_OF_STEP,
        heads=(3, 1),
    ),
    _forward(
        "keys_not_awaited",
        "keys are read before they are there",
        "            wait(i)\n            begun",
        "            begun",
        rejected_by=OUT_OF_STEP,
    ),
    _forward(
        "values_not_awaited",
        "the last values are read before they are there",
        "        wait(count)\n",
        "",
        rejected_by=RACE,
    ),
    _forward(
        "query_not_awaited",
        "queries are read before they are there",
        "pipeline.wait(cta.query_full.at[pl.ds(warpgroup, 1)], tile.t, 1)",
        "pass",
        rejected_by=RACE,
    ),
    _forward(
        "query_refilled_early",
        "the next tile's queries are asked for before the last scores are there",
        "pipeline.when(i == count - 1)(release_query)",
        "pipeline.when(i == jnp.maximum(count - 2, 1))(release_query)",
        rejected_by=RACE,
        heads=(3, 1),
    ),
    _forward(
        "unseen_not_hidden",
        "rows that see nothing are not zeroed",
        "lax.cond(gather.any_row(unseen), hide,",
        "lax.cond(gather.any_row(unseen), lambda out: out,",
        "window-nothing",
    ),
    _forward(
        "wrong_phase",
        "a wait is for the phase before",
        "jnp.uint32(stages)), 2)",
        "jnp.uint32(stages)) + 1, 2)",
        rejected_by=OUT_OF_STEP,
    ),
    _forward(
        "stage_refilled_early",
        "a stage is refilled when one warpgroup has released it",
        '"stage_empty": (pipeline.WARPS * w,)',
        '"stage_empty": (pipeline.WARPS,)',
        rejected_by=OUT_OF_STEP,
    ),
    _forward(
        "stage_not_released",
        "a stage is not released",
        "released.append(pipeline.arrive(cta.stage_empty.at[stage(i)]))",
        "released.append(jnp.int32(0))",
        rejected_by=DEADLOCK,
    ),
    _forward(
        "skipped_stage_not_released",
        "a warpgroup does not release the stages of last keys that it does not see",
        "_skip(cta, tile, 0, start)",
        "pass",
        "causal",
        rejected_by=DEADLOCK,
    ),
    _forward(
        "last_stage_not_released",
        "a warpgroup does not release the stages of first keys that it does not see",
        "_skip(cta, tile, stop, tile.steps)",
        "pass",
        "window-left",
        rejected_by=DEADLOCK,
    ),
    _forward(
        "next_tile_not_asked_for",
        "at a tile's end a stage is not refilled",
        "pipeline.when(is_next)(copy_next)",
        "pass",
        rejected_by=DEADLOCK,
    ),
    _forward(
        "next_tile_from_its_second_step",
        "at a tile's end a stage is refilled for the step after the one that is next",
        "_read(cta, tile.t + 1), i - tile.steps\n",
        "_read(cta, tile.t + 1), i - tile.steps + 1\n",
        batch=2,
        heads=(2, 1),
    ),
    _forward(
        "tile_after_next_not_asked_for",
        "behind a tile of one step a stage is not refilled for the tile after the next",
        "return (steps > 0) & (state[1] >= steps)",
        "return steps < 0",
        "causal-earlier",
        rejected_by=DEADLOCK,
        batch=2,
        heads=(3, 1),
    ),
    _forward(
        "landed_of_every_copy",
        "the barrier of values that are zeroed keeps its phase where all of them exist",
        "pipeline.expect(cta.landed.at[stage], 0)",
        "None",
        "lengths",
        rejected_by=DEADLOCK,
    ),
    _biased(
        "bias_not_awaited",
        "a copied bias is read before it is there",
        "pipeline.wait(cta.bias_full, tile.n + i, cta.config.bias_stages)\n    bias",
        "bias",
        rejected_by=RACE,
    ),
    _biased(
        "bias_released_early",
        "the stage of a copied bias is released before it is read",
        "    bias = plgpu.load(",
        "    _release_bias(cta, tile, i)\n    return plgpu.load(",
        rejected_by=RACE,
    ),
    _biased(
        "bias_unfenced",
        "nothing orders the reads of a copied bias before TMA's next write",
        "plgpu.commit_smem()  # TMA writes where threads have read",
        "pass",
        rejected_by=RACE,
    ),
    _forward(
        "bias_not_released",
        "the stage of a copied bias is not released by a warpgroup that does not see its keys",
        "            _release_bias(cta, tile, i)\n\n    lax.fori_loop",
        "            pass\n\n    lax.fori_loop",
        "everything",
        rejected_by=DEADLOCK,
        bias_stages=1,
    ),
    _forward(
        "scores_not_awaited",
        "scores are read while they may be under way",
        "plgpu.wgmma_wait(later)",
        "plgpu.wgmma_wait(later + 1)",
        rejected_by=UNDER_WAY,
        batch=1,
        heads=(1, 1),
    ),
    _forward(
        "values_released_early",
        "a stage is released while a product reads its values",
        "plgpu.wgmma_wait(0)\n                released",
        "plgpu.wgmma_wait(1)\n                released",
        rejected_by=UNDER_WAY,
        batch=1,
        heads=(1, 1),
    ),
    _backward(
        "gradients_of_weights_not_awaited",
        "dP is read while its product may be under way",
        "plgpu.wgmma_accumulator_load(dp_sum, wait_n=1)",
        "plgpu.wgmma_accumulator_load(dp_sum, wait_n=2)",
        rejected_by=UNDER_WAY,
        batch=1,
        heads=(1, 1),
    ),
    _backward(
        "dq_not_awaited",
        "dQ is read while its last product may be under way",
        "wait_n=2 if config.ahead else 1",
        "wait_n=3 if config.ahead else 2",
        rejected_by=UNDER_WAY,
        batch=1,
        heads=(1, 1),
    ),
    _backward(
        "dk_not_awaited",
        "the queries' slot is freed while the product for dK reads it",
        "begun = products.finish(begun, later=0)",
        "begun = products.finish(begun, later=1)",
        "lengths",
        rejected_by=UNDER_WAY,
    ),
    _backward(
        "dk_not_awaited_alone",
        "the same where no scores are found ahead",
        "        plgpu.wgmma_wait(0)\n",
        "        plgpu.wgmma_wait(1)\n",
        "bias",
        rejected_by=UNDER_WAY,
        dims=(128, 128),
    ),
    _wide_backward(
        "wide_scores_not_awaited",
        "scores are read while they may be under way",
        "x = products.finish(begun, later=0)",
        "x = products.finish(begun, later=1)",
        rejected_by=UNDER_WAY,
        batch=1,
        heads=(1, 1),
    ),
    _wide_backward(
        "wide_dv_not_awaited",
        "the cotangents' stage is released while the product for dV reads it",
        "begun = _add_to_dq(tile, step, VALUES, at_first=release, meanwhile=meanwhile)",
        "begun = release(), _add_to_dq(tile, step, VALUES, meanwhile=meanwhile)",
        rejected_by=UNDER_WAY,
    ),
    _wide_backward(
        "wide_gradients_of_weights_not_awaited",
        "dP is read while its product may be under way",
        "plgpu.wgmma_accumulator_load(dp, wait_n=0)",
        "plgpu.wgmma_accumulator_load(dp, wait_n=1)",
        rejected_by=UNDER_WAY,
        batch=1,
        heads=(1, 1),
    ),
    _wide_backward(
        "wide_dk_not_awaited",
        "the queries' stage is released while the product for dK reads it",
        "    plgpu.wgmma_wait(0)\n    _release(tile, step, refs.query_empty",
        "    plgpu.wgmma_wait(1)\n    _release(tile, step, refs.query_empty",
        rejected_by=UNDER_WAY,
    ),
    _wide_backward(
        "wide_dq_not_awaited",
        "dQ is read while its product may be under way",
        "wait_n=len(mine) - 1 - i + later",
        "wait_n=len(mine) - i + later",
        rejected_by=UNDER_WAY,
        batch=1,
        heads=(1, 1),
    ),
    _backward(
        "together_left_over",
        "heads are started together that are no multiple of those that there are",
        "if heads % g == 0",
        "if heads >= g",
        "causal",
        rejected_by=NOT_ONCE,
    ),
    _backward(
        "bias_not_counted",
        "the bias is not counted in shared memory",
        "if shared_bytes(problem, c) < device.smem_per_cta",
        "if c.bias_stages or not memory.bias_is_tiled(problem)",
        "bias",
        rejected_by=TOO_LARGE,
    ),
    _backward(
        "causal_by_one", "a query sees one key too many", "row - key + right if", "row - key + right + 1 if", "causal"
    ),
    _backward(
        "window_left_by_one",
        "the window's left end is one too far right",
        "row - key + left if",
        "row - key + left + 1 if",
        "window",
    ),
    _backward(
        "ends_swapped",
        "the diagonal is moved the other way",
        "min(rights) + apart",
        "min(rights) - apart",
        "ends",
    ),
    _backward(
        "ends_of_arrays",
        "the arrays' ends are taken for the sequences'",
        "schedule.bounds(problem, queries, keys)",
        "schedule.bounds(problem)",
        "ends",
    ),
    _backward(
        "window_not_moved",
        "the window's left end stays where the diagonal is moved",
        "problem.window_offset - before + apart",
        "problem.window_offset - before",
        "ends-window",
    ),
    _wide_backward(
        "wide_turns_of_arrays",
        "turns are counted as if the arrays' ends were the sequences'",
        "    keys, _, left, right = tile.sequence\n    block_q, block_kv",
        "    keys, _, left, right = tile.sequence[:2] + schedule.bounds(tile.problem)\n    block_q, block_kv",
        "ends",
        rejected_by=DEADLOCK,
        deterministic=True,
    ),
    _backward(
        "d_lse_ignored",
        "the logsumexp's cotangent has no effect",
        "ops.d_lse - jnp",
        "-jnp",
    ),
    _backward(
        "delta_left_out",
        "delta lacks the sum of out * d_out",
        "ops.d_lse - jnp.swapaxes(pull, 1, 2)",
        "ops.d_lse",
    ),
    _backward("cap_ignored", "the gradient goes past the soft cap", "p = p * slope", "pass", "soft-cap"),
    _capped_backward(
        "capped_scores_unbent",
        "beside a bias, the gradient goes past the soft cap",
        "d_scores = d_scores * plgpu.load(refs.slope_smem.at[warpgroup], layout=WGMMA)",
        "pass",
    ),
    _capped_backward(
        "d_bias_bent",
        "the bias' gradient has the soft cap's slope",
        "_write_logits(part, d_scores)",
        "_write_logits(part, d_scores * plgpu.load(refs.slope_smem.at[warpgroup], layout=WGMMA))",
    ),
    _capped_backward(
        "slope_of_biased_logit",
        "the soft cap's slope is taken where the bias has been added",
        "refs.slope_smem[warpgroup] = slope",
        "refs.slope_smem[warpgroup] = 1 - "
        '((x / 1.442695 + extras["bias"].astype(jnp.float32)) / problem.soft_cap) ** 2',
    ),
    _backward(
        "group_not_summed",
        "dK is of the group's first head",
        "plgpu.wgmma(dk_sum, ds, ",
        "plgpu.wgmma(dk_sum, jnp.where(part.step.head == tile.key_head * tile.group, ds, jnp.zeros_like(ds)), ",
        heads=(2, 1),
    ),
    _backward(
        "heads_mixed",
        "head n belongs to key head n % K",
        "return Step(self.key_head * self.group + h,",
        "return Step(self.key_head + h * self.problem.key_heads,",
        heads=(4, 2),
        rejected_by=DEADLOCK,
    ),
    _backward("dq_unscaled", "dQ lacks the scale", "(dq_sum * problem.scale)", "dq_sum", "lengths"),
    _backward("written_dq_unscaled", "the last writes dQ without the scale", "total * tile.problem.scale", "total"),
    _backward("dk_unscaled", "dK lacks the scale", "dk * tile.problem.scale", "dk"),
    _backward("mask_ignored", "the mask has no effect", 'gather.keep_held(x, extras["held"])', "x", "mask"),
    _backward(
        "mask_of_first_head",
        "what the first head of a group may pass over, all do",
        "meet.any(2)",
        "meet[:, :, 0]",
        "mask-of-heads",
        mask="causal",
        heads=(2, 1),
    ),
    _wide_backward(
        "wide_mask_taken_for_whole",
        "a block that one head of a group sees whole is not compared for any",
        "alike.all(2)",
        "alike.any(2)",
        "mask-of-heads",
        heads=(3, 1),
        mask="causal",
    ),
    _wide_backward(
        "wide_mask_of_other_group",
        "what one group of heads sees decides for another",
        "(x.shape[0], -1, group, *x.shape[2:])",
        "(x.shape[0], -1, group, *x.shape[2:])[:, ::-1]",
        "mask-of-heads",
        heads=(4, 2),
        mask="causal",
    ),
    _backward(
        "mask_last_skipped",
        "the last block of queries that a mask leaves is skipped",
        "meet, column + 1, 0",
        "meet, column, 0",
        "mask",
        mask="causal",
    ),
    _wide_backward(
        "wide_mask_bits_swapped",
        "the bits of even and of odd columns are apart",
        "of_four(j, e) << (2 * j + e)",
        "of_four(j, e) << (j + 4 * e)",
        "mask",
    ),
    _backward(
        "segments_ignored",
        "segment ids have no effect",
        "gather.keep_equal(x, tile.refs.key_segments, tile.refs.query_segments, corner)",
        "x",
        "segments",
    ),
    _backward(
        "segments_first_skipped",
        "the first block of queries that a segment is in is skipped",
        "stack([first, inner_first, inner_end, end], axis=3).astype",
        "stack([first + 1, inner_first, inner_end, end], axis=3).astype",
        "segments",
    ),
    _backward(
        "segments_last_skipped",
        "the last block of queries that a segment is in is skipped",
        "meet, column + 1, 0",
        "meet, column, 0",
        "segments",
    ),
    _backward(
        "segments_not_compared",
        "blocks of two segments are taken for blocks of one",
        " & ~alike, column",
        " & False, column",
        "segments",
    ),
    _backward(
        "turns_include_own",
        "a block of keys counts itself among those before",
        "reverse=latest_first(problem, config)) - adds",
        "reverse=latest_first(problem, config))",
        "segments",
        rejected_by=DEADLOCK,
        deterministic=True,
    ),
    _backward(
        "turns_backwards",
        "the first block of keys waits for the last",
        "reverse=latest_first(problem, config))",
        "reverse=True)",
        "segments",
        rejected_by=DEADLOCK,
        deterministic=True,
    ),
    _backward(
        "turns_from_first_keys",
        "under a window turns are counted from the first keys of all",
        "0 if left is None else _div(i * block_q + left, block_kv)",
        "0",
        "window-left",
        batch=1,
        heads=(1, 1),
        deterministic=True,
        dims=(128, 64),
        keys=300,
        rejected_by=DEADLOCK,
    ),
    _backward(
        "square_bias_untransposed",
        "of as many queries as keys the bias' gradient is keys by queries",
        "problem.query_length], 2, 3)",
        "problem.query_length], 2, 3 if problem.query_length != problem.key_length else 2)",
        "bias",
        keys=200,
    ),
    _backward(
        "d_bias_scaled",
        "the bias' gradient is scaled",
        "d_logits.astype(jnp.float32)",
        "(problem.scale * d_logits.astype(jnp.float32))",
        "bias-of-heads",
    ),
    _backward(
        "d_sinks_without_delta", "the sinks' gradient lacks delta", "(weight * delta).sum", "weight.sum", "sinks"
    ),
    _backward(
        "padding_leaks",
        "the first row past the length, NaN, counts",
        "jnp.arange(x.shape[1])[None, :] < lengths",
        "jnp.arange(x.shape[1])[None, :] <= lengths",
        "lengths",
    ),
    _backward(
        "rows_without_keys_kept",
        "cotangents of rows without a key, NaN, are multiplied by 0",
        "backward_common.zero_rows(d_out[2], refs.lse.at[batch, head, rows])",
        "pass",
        "mask",
        mask="documents",
    ),
    _backward(
        "few_rows_without_keys",
        "of a block of queries, the first tells whether some have no key",
        "config.block_q).any(3)",
        "config.block_q)[..., 0]",
        "mask",
        mask="documents",
    ),
    _backward(
        "cotangents_zeroed_early",
        "cotangents are zeroed before they have come",
        "pipeline.wait(refs.landed, n, config.stages)",
        "pass",
        "mask",
        mask="documents",
        rejected_by=NOT_WAITED_FOR,
    ),
    _wide_backward(
        "wide_rows_without_keys_kept",
        "cotangents of rows without a key, NaN, are multiplied by 0",
        "refs.without_keys[tile.batch, step.head, step.i] != 0",
        "refs.without_keys[tile.batch, step.head, step.i] < 0",
        "mask",
        mask="documents",
    ),
    _wide_backward(
        "wide_cotangents_zeroed_early",
        "cotangents are zeroed before they have come",
        "pipeline.wait(refs.landed, step.n, 1)",
        "pass",
        "mask",
        mask="documents",
        rejected_by=NOT_WAITED_FOR,
    ),
    _drawn_backward(
        "tile_of_keys_skipped",
        "no CTA draws the first ticket",
        "if _all_drawn(config) else ctas,",
        "if _all_drawn(config) else ctas + 1,",
    ),
    _backward(
        "turn_before_its_ticket",
        "a CTA takes keys undrawn though others' turns come before, of a CTA that may not run",
        'config.scheduler == "dynamic" and config.turns',
        "False",
        rejected_by=DEADLOCK,
        deterministic=True,
    ),
    _drawn_backward(
        "last_keys_twice",
        "the last tile of keys is worked on once more",
        "jnp.where(number < tiles, batch, -1)",
        "jnp.where(number <= tiles, batch, -1)",
    ),
    _drawn_backward(
        "span_not_told",
        "a tile's record does not say which queries come past its keys",
        "(jnp.where(number < tiles, batch, -1), *rest)",
        "(jnp.where(number < tiles, batch, -1), *rest[:3], 0, 0, 0, 0)",
    ),
    _drawn_backward(
        "keys_too_early",
        "keys are overwritten when one warpgroup has read those of the tile before",
        '"kv_empty": (warps,)',
        '"kv_empty": (warps // 2,)',
        rejected_by=OUT_OF_STEP,
    ),
    _drawn_backward(
        "keys_not_awaited",
        "keys are read before they are there",
        "pipeline.wait(tile.refs.kv_full, tile.t, 1)",
        "pass",
        rejected_by=NOT_WAITED_FOR,
    ),
    _drawn_backward(
        "keys_of_wrong_phase",
        "from the second tile on, keys are taken for those of the tile before",
        "pipeline.wait(tile.refs.kv_full, tile.t, 1)",
        "pipeline.wait(tile.refs.kv_full, jnp.maximum(tile.t - 1, 0), 1)",
        rejected_by=OUT_OF_STEP,
    ),
    _drawn_backward(
        "spare_stages_not_passed",
        "the stages of a tile that no queries come past are filled and never passed",
        "    _pass_spare_stages(tile)\n",
        "",
        mask="causal",
        keys=400,
        rejected_by=DEADLOCK,
    ),
    _drawn_backward(
        "spare_stages_not_counted",
        "the next tile counts its stages as if there were no spare ones",
        "tile.first_stage + tile.stages",
        "tile.first_stage + tile.steps",
        mask="causal",
        keys=400,
        rejected_by=DEADLOCK,
    ),
    _backward(
        "tail_dropped",
        "the last block of keys is left out",
        "problem.key_heads * -(-problem.key_length // config.block_kv)",
        "problem.key_heads * (problem.key_length // config.block_kv)",
    ),
    _backward(
        "no_block_barrier",
        "dQ is multiplied from scores that are not all there",
        "reduce.sync_block(part.tile.config.warpgroups)",
        "pass",
        rejected_by=UNORDERED,
    ),
    _backward(
        "scores_not_committed",
        "scores leave to the bias before copies may see them",
        "fragments.commit()\n    reduce",
        "reduce",
        "bias",
        rejected_by=RACE,
    ),
    _backward(
        "following_of_this_step",
        "the next step gets this step's K Q^T",
        "step.n + follows.astype(jnp.int32)",
        "step.n",
        "lengths",
    ),
    _backward(
        "following_not_awaited",
        "the next step's queries are multiplied before they are there",
        "pl.when(follows)(lambda: pipeline.wait(tile.refs.full, step.n + 1, stages))",
        "pass",
        "lengths",
        rejected_by=NOT_WAITED_FOR,
    ),
    _backward(
        "following_past_the_end",
        "after the last step the next block's queries are taken",
        "step.n + 1 < tile.first_stage + tile.steps",
        "step.n >= 0",
        "lengths",
        rejected_by=DEADLOCK,
    ),
    _backward(
        "squares_by_rows",
        "the sums' squares are read as if the registers had rows",
        "parts.transpose(0, 1, 3, 4, 6, 2, 5, 8, 7, 9)",
        "parts",
        "lengths",
    ),
    _backward(
        "following_of_wrong_phase",
        "the next step's queries are taken for those that were there before",
        "pipeline.wait(tile.refs.full, step.n + 1, stages)",
        "pipeline.wait(tile.refs.full, step.n - 1, stages)",
        "lengths",
        rejected_by=OUT_OF_STEP,
    ),
    _backward(
        "stage_not_awaited",
        "queries and cotangents are read before they are there",
        "            pipeline.wait(refs.full, step.n, config.stages)\n        # Where",
        "            pass\n        # Where",
        rejected_by=NOT_WAITED_FOR,
        heads=(2, 1),
    ),
    _backward(
        "stage_of_another_step",
        "a stage is refilled for the step before its own",
        "_place_after(tile, step, stages), step.n + stages",
        "_place_after(tile, step, stages - 1), step.n + stages",
        heads=(2, 1),
    ),
    _backward(
        "stage_not_refilled",
        "a stage is released and not refilled for a later step of the tile",
        "        _refill(tile, step, released)\n",
        "",
        heads=(4, 1),
        rejected_by=DEADLOCK,
    ),
    _backward(
        "stage_not_refilled_behind",
        "of a tile's last stages none is refilled for the next tile",
        "pipeline.when(released)(lambda: _copy_stage(tile, _place_behind(tile, n), n))",
        "pass",
        "lengths",
        rejected_by=DEADLOCK,
    ),
    _backward(
        "step_refilled_early",
        "a stage is refilled when one warpgroup has read it",
        '"empty": (warps,) * stages',
        '"empty": (pipeline.WARPS,) * stages',
        rejected_by=OUT_OF_STEP,
        heads=(2, 1),
    ),
    _backward(
        "turn_ended_early",
        "a turn ends before its tile has arrived",
        "    plgpu.wait_smem_to_gmem(0)\n\n    @pl.when(jnp.logical_not",
        "    @pl.when(jnp.logical_not",
        rejected_by=RACE,
        deterministic=True,
    ),
    _backward(
        "turn_not_ended",
        "the next block's turn never comes",
        "_end(_counter(tile, warpgroup, step.head - new_head, i))",
        "pass",
        rejected_by=DEADLOCK,
        deterministic=True,
    ),
    _backward(
        "last_forgets_itself",
        "who adds last writes the others' sum",
        "square + fragments.load(part.sum_smem)",
        "fragments.load(part.sum_smem)",
    ),
    _backward(
        "last_forgets_the_others",
        "who adds last writes its own part",
        "square + fragments.load(part.sum_smem)",
        "square",
        "causal",
        deterministic=True,
    ),
    _backward(
        "last_too_early",
        "a block of keys takes itself for the last with one to come",
        "last if schedule.bounds(tile.problem)[1] is None else first",
        "last - 1 if schedule.bounds(tile.problem)[1] is None else first",
    ),
    _backward(
        "nobody_to_wait_for",
        "a block of keys that is alone waits for the others' sum",
        "backward_common.turns_before(part.tile, part.step.i) > 0",
        "backward_common.turns_before(part.tile, part.step.i) >= 0",
        "causal",
        rejected_by=DEADLOCK,
    ),
    _backward(
        "sum_not_awaited",
        "the others' sum is read before it is there",
        "plgpu.barrier_wait(part.tile.refs.dq_full.at[part.warpgroup])",
        "pass",
        rejected_by=NOT_WAITED_FOR,
    ),
    _backward(
        "last_does_not_wait",
        "the last does not wait for the others' turns to end",
        "        backward_common.await_turn(tile, step, warpgroup, earlier, ended)\n        # Their",
        "        # Their",
        "bias",
        rejected_by=RACE,
        dims=(128, 128),
    ),
    _wide_backward(
        "probabilities_not_awaited",
        "score gradients are made of probabilities that are not there",
        "pipeline.wait(refs.p_full, step.n, 1)",
        "pass",
        rejected_by=NOT_WAITED_FOR,
    ),
    _wide_backward(
        "score_gradients_not_awaited",
        "dQ is multiplied from score gradients that are not there, and probabilities are overwritten",
        "    pipeline.wait(refs.ds_full, step.n, 1)\n\n    def release",
        "\n    def release",
        rejected_by=NOT_WAITED_FOR,
    ),
    _wide_backward(
        "wide_refilled_early",
        "a stage gets the copies of a step too early",
        "step.n - tile.first_stage + stages",
        "step.n - tile.first_stage + stages - 1",
        rejected_by=DEADLOCK,
    ),
    _wide_backward(
        "wide_refilled_once",
        "a stage is refilled once only",
        "pl.when(last != 0)(lambda: fetch",
        "pl.when((last != 0) & (step.n == 0))(lambda: fetch",
        rejected_by=DEADLOCK,
    ),
    _wide_backward(
        "wide_phase_of_one_stage",
        "queries are waited for as if they had one stage",
        "        pipeline.wait(refs.query_full, step.n, config.stages)\n        begun",
        "        pipeline.wait(refs.query_full, step.n, 1)\n        begun",
        rejected_by=DEADLOCK,
    ),
    _wide_backward(
        "wide_queries_not_awaited",
        "scores are multiplied from queries that have not come",
        "        pipeline.wait(refs.query_full, step.n, config.stages)\n        begun",
        "        begun",
        rejected_by=NOT_WAITED_FOR,
    ),
    _wide_backward(
        "wide_lse_unfenced",
        "nothing orders the reads of lse and delta before the copies that write over them",
        "fragments.commit()  # orders",
        "pass  # orders",
        rejected_by=RACE,
    ),
    _wide_backward(
        "wide_bias_overwritten",
        "score gradients are overwritten on their way to the bias",
        "elif tile.problem.bias_gradient:\n        plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
        "elif tile.problem.bias_gradient:\n        pass",
        "bias-of-heads",
        rejected_by=RACE,
    ),
    _wide_backward(
        "wide_cap_ignored", "the gradient goes past the soft cap", "p if slope is None else p * slope", "p", "soft-cap"
    ),
    _wide_capped_backward(
        "wide_capped_scores_unbent",
        "beside a bias, the gradient goes past the soft cap",
        "d_scores = d_scores * fragments.load(refs.slope_smem)",
        "pass",
    ),
    _wide_capped_backward(
        "wide_d_bias_bent",
        "the bias' gradient has the soft cap's slope",
        "store(_d_logits(tile, step), d_scores.astype(problem.dtype))",
        "store(_d_logits(tile, step), (d_scores * fragments.load(refs.slope_smem)).astype(problem.dtype))",
    ),
    _wide_capped_backward(
        "wide_slope_of_biased_logit",
        "the soft cap's slope is taken where the bias has been added",
        "fragments.store(refs.slope_smem, slope)",
        'bias = load_late(tile, step, 0)["bias"].astype(jnp.float32)\n        '
        "fragments.store(refs.slope_smem, 1 - ((x / 1.442695 + bias) / problem.soft_cap) ** 2)",
    ),
    _wide_backward("wide_dk_unscaled", "dK lacks the scale", "[x * tile.problem.scale for x in sums]", "sums"),
    _copied_bias(
        "copied_bias_untransposed",
        "a copied bias is read queries by keys",
        "plgpu.load(tile.refs.bias_smem.at[slot, :, keys].T",
        "plgpu.load(tile.refs.bias_smem.at[slot, :, keys]",
        dims=(128, 64),
    ),
    _copied_bias(
        "copied_bias_of_first_keys",
        "all warpgroups have the first one's copied bias",
        "keys, slot = pl.ds(part.warpgroup * CHUNK, CHUNK)",
        "keys, slot = pl.ds(0, CHUNK)",
    ),
    _copied_bias(
        "copied_bias_of_a_group",
        "all heads of a group have the first one's copied bias",
        "gather.broadcast_index((batch, head), refs.bias.shape)",
        "gather.broadcast_index((batch, lax.div(head, 2) * 2), refs.bias.shape)",
        heads=(2, 1),
    ),
    _copied_bias(
        "shared_bias_of_one_sequence",
        "where they share a bias, sequences are counted as heads",
        "return lax.rem(head, problem.batch), lax.div",
        "return lax.rem(head, problem.key_heads), lax.div",
        rejected_by=UNORDERED,
    ),
    _copied_bias(
        "copied_bias_early",
        "a copied bias is read before it is there",
        "pipeline.wait(tile.refs.bias_full, step.n, slots)",
        "pass",
        rejected_by=NOT_WAITED_FOR,
    ),
    _copied_bias(
        "copied_bias_overwritten",
        "a copied bias is overwritten when one warpgroup has read it",
        '"bias_empty": (warps,) * slots',
        '"bias_empty": (warps // 2,) * slots',
        rejected_by=OUT_OF_STEP,
    ),
    _copied_bias(
        "copied_bias_unfenced",
        "nothing orders the reads of a copied bias before the next copy that writes there",
        "plgpu.commit_smem()  # TMA writes where threads have read",
        "pass",
        rejected_by=RACE,
    ),
    _copied_bias(
        "copied_bias_in_one_slot",
        "every tile of a copied bias takes the first slot, and the barriers say that it has two",
        "pipeline.stage(step.n, slots) if slots > 1 else 0",
        "0",
        rejected_by=NOT_WAITED_FOR,
        dims=(128, 64),
    ),
    _copied_bias(
        "copied_bias_not_freed",
        "a copied bias' slot is never free again",
        "    _release_bias(tile, step)\n    return bias",
        "    return bias",
        rejected_by=DEADLOCK,
    ),
    _copied_bias(
        "wide_copied_bias_early",
        "a copied bias is read before it is there",
        "pipeline.wait(refs.bias_full, step.n, slots)",
        "pass",
        rejected_by=NOT_WAITED_FOR,
        dims=(136, 64),
    ),
    _copied_bias(
        "wide_copied_bias_unfenced",
        "nothing orders the reads of a copied bias before the next copy that writes there",
        "fragments.commit()\n        _release",
        "_release",
        rejected_by=RACE,
        dims=(136, 64),
    ),
)
