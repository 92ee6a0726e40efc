"""Which config suits a problem, from its sizes alone; each threshold with the measurement behind it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_kernels.attention import backward as backward_kernel
from pallas_kernels.attention import backward_common, memory, schedule
from pallas_kernels.attention import backward_wide as backward_wide_kernel
from pallas_kernels.attention import forward as forward_kernel
from pallas_kernels.attention.configs import (
    WARPGROUP_ROWS,
    AnyBackwardConfig,
    BackwardConfig,
    BackwardWideConfig,
    ForwardConfig,
)
from pallas_kernels.attention.problem import Attention, Op
from pallas_kernels.hardware import Device

KIB, MIB = 2**10, 2**20
LONG = 1024  # queries, for which the model has no measurement: one head of 88, 15924 tokens, 460 us, of `_whole` 240
MOST_TURNS = 8  # tiles of keys, with turns, that are drawn


class _Rates(NamedTuple):
    """What a tile of queries costs in a forward config, in us, measured on an H100 at 512 and 2048 tokens, bf16."""

    step: float  # an SM's time for a tile of keys, while all its CTAs are at work
    tile: float  # an SM's time for what a tile of queries takes besides
    alone: float  # the time of a step of a CTA that has the SM to itself; the first tile's prologue takes three


def xla_is_faster(problem: Attention, device: Device) -> str | None:
    """Why no kernel should take a problem that one could take, or None."""
    if problem.bias is not None or problem.hidden_by_data or problem.query_lengths or problem.key_lengths:
        return None
    if problem.op is Op.FORWARD and problem.key_length == 1 and not problem.sinks:
        return "the output is the value of the only key, which XLA copies faster"
    # H200, 12 tokens, 26 x 44 heads on 26 x 11, of 160: the gradient takes 65 us in the kernel, and 30 us in XLA. Few
    # heads, or narrow ones, are as fast in the kernel from 9 tokens on.
    few = max(problem.query_length, problem.key_length) <= 12 and problem.head_dim > 128
    if problem.op is Op.BACKWARD and few and problem.batch * problem.key_heads > device.sm_count:
        return "a tile of 64 keys and 64 queries is mostly padding, and XLA computes such short gradients faster"
    return None


def forward(problem: Attention, device: Device) -> tuple[ForwardConfig, ...]:
    """Configs in the order of the time that they would take, by a model of waves of tiles: the best first.

    If `batch_invariant`, the one for whole sequences, by the heads' sizes and the kind of call alone.
    """
    if problem.bias is not None:
        return (_with_bias(problem, device),)
    whole = _whole(problem)
    if problem.batch_invariant or problem.query_length > LONG:
        return (whole,)
    rates = {whole: _WHOLE[_class(problem)]} | {c: r for c, r in _short(problem).items() if _fits(problem, c, device)}
    narrow = {c: r for c, r in rates.items() if c.warpgroups == 1}
    narrow |= {c: r for config, r in narrow.items() for c in _packed(problem, config)}
    rates |= narrow | {c: r for config, r in narrow.items() for c in _split(problem, config, device)}
    durations = {config: _duration(problem, config, r, device) for config, r in rates.items()}
    # A model is no measurement: what is measured stays where others would gain little.
    durations[whole] *= 0.97
    return tuple(sorted(durations, key=durations.__getitem__))


def _whole(problem: Attention) -> ForwardConfig:
    """The config for sequences of many tiles: the widest tiles of keys of which two stages fit in shared memory."""
    config = _widest(problem)
    if config.early and not problem.hidden_by_data:
        # bf16, H100, us, without and with it: heads of 128, 512 tokens, 138 and 136, causal 107 and 104; 2048 tokens,
        # 409 and 409, causal 231 and 229; causal masks 288 and 293. Heads of 256, causal, would spill 20 bytes.
        config = dataclasses.replace(config, query_ahead=True)
    if problem.hidden_by_data:
        # How many tiles of keys are skipped is known on the device alone. bf16, H200, us, of the kernel with a producer
        # warpgroup, scheduled dynamically, and with a CTA to each tile: masks, 2048 tokens, heads of 64, random 669 and
        # 677, causal 368 and 398; of 128, 487 and 513, 273 and 306; of 256, causal 253 and 270. Documents, 16384
        # tokens: 359 and 462, 236 and 283; of 192 and 128, 268 and 308; of 256, 235 and 212.
        config = dataclasses.replace(config, scheduler="dynamic")
    return config


def _class(problem: Attention) -> int:
    """The widest heads that have the same configs."""
    widest = max(problem.head_dim, problem.value_dim)
    return next(size for size in (64, 128, 256) if widest <= size)


_WHOLE = {64: _Rates(1.49, 1.46, 1.3), 128: _Rates(1.4, 3.0, 1.12), 256: _Rates(1.33, 3.0, 1.5)}


def _short(problem: Attention) -> dict[ForwardConfig, _Rates]:
    """Configs with tiles of fewer queries, in several CTAs to an SM, whose ends overlap."""
    narrow = ForwardConfig(block_kv=64, warpgroups=1, slack=8, overwrites=True)
    uneven = problem.hidden_by_data or schedule.bounds(problem) != (None, None)
    size = _class(problem)
    if size == 64:
        plain = not problem.hidden_by_data and problem.soft_cap is None
        two = dataclasses.replace(narrow, warpgroups=2, ctas_per_sm=2, scheduler="dynamic" if uneven else "static")
        return {
            two: _Rates(0.57, 1.05, 0.84),
            dataclasses.replace(narrow, ctas_per_sm=4 if plain else 2): _Rates(0.27, 0.81, 0.78),
        }
    if size == 128:
        return {dataclasses.replace(narrow, ctas_per_sm=2): _Rates(0.4, 1.86, 0.75)}
    return {narrow: _Rates(0.95, 2.2, 1.0)}


def _fits(problem: Attention, config: ForwardConfig, device: Device) -> bool:
    """Whether an SM has shared memory for its CTAs: what one may claim, and a KiB of the system's own for each."""
    each = forward_kernel.shared_bytes(problem, config) + KIB
    return config.ctas_per_sm * each <= device.smem_per_cta + KIB


def _packed(problem: Attention, config: ForwardConfig) -> list[ForwardConfig]:
    """`config` with the heads of a group in a tile, as many as have room there for all queries."""
    if problem.segments or problem.mask is not None or problem.sinks:
        return []
    group = problem.query_heads // problem.key_heads
    most = min(group & -group, WARPGROUP_ROWS)
    return [dataclasses.replace(config, packed_heads=most)] if most > 1 else []


def _split(problem: Attention, config: ForwardConfig, device: Device) -> list[ForwardConfig]:
    """`config` with the keys split, where there are fewer tiles of queries than CTAs."""
    tiles, steps = _tiles(problem, config), -(-problem.key_length // config.block_kv)
    most = min(device.sm_count * config.ctas_per_sm // tiles, steps)
    return [dataclasses.replace(config, splits=n) for n in (2, 4, 8, 16, 32, 64) if n <= most]


def _tiles(problem: Attention, config: ForwardConfig) -> int:
    """How many tiles of queries there are."""
    packs = problem.batch * problem.query_heads // config.packed_heads
    return packs * -(-problem.query_length // config.queries) * config.splits


def _duration(problem: Attention, config: ForwardConfig, rates: _Rates, device: Device) -> float:
    """How long the problem would take, in us, beyond a launch."""
    per_head = -(-problem.query_length // config.queries) * config.splits
    spans = [
        schedule.tile_span(problem, config, i, problem.query_length, problem.key_length)[0] for i in range(per_head)
    ]
    steps = [span.end - span.first for span in spans]
    mean, most, tiles = sum(steps) / per_head, max(steps), _tiles(problem, config)
    per_sm = tiles / device.sm_count if most > mean else -(-tiles // device.sm_count)
    rounds = -(-tiles // (device.sm_count * config.ctas_per_sm))
    busy = per_sm * (mean * rates.step + rates.tile)
    waiting = (max(rounds * mean, most) + 3) * rates.alone
    rows = problem.key_length * problem.key_heads + problem.query_length * problem.query_heads
    copying = problem.batch * rows * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize / 2.9e6
    merging = 0.0
    if config.splits > 1:
        # A kernel of its own writes and reads the outputs of all splits, in float32.
        outputs = problem.batch * problem.query_heads * problem.query_length * problem.value_dim
        merging = 6 + config.splits * outputs * 8 / 2.5e6
    # What is not the longest is hidden behind that for the most part only.
    return max(busy, waiting, copying) + (busy + waiting + copying) / 10 + merging


def _with_bias(problem: Attention, device: Device) -> ForwardConfig:
    """The widest tiles that fit in shared memory together with the bias' own, if that can be copied."""
    narrow = ForwardConfig(block_kv=64, warpgroups=2, slack=8)
    if problem.batch_invariant or not memory.bias_is_tiled(problem):
        return narrow
    copied = []
    if problem.mask is None and not problem.segments:
        # 2048 tokens, us: heads of 64, 722; three warpgroups and 64 keys 882, no copies 1341. Of 128, 525 (slack 0:
        # 539); 64 keys 608, no copies 800. Of 256, 439 with 64 keys, no copies 536. A float32 bias: heads of 64, 909,
        # of 128, 667 with 64 keys; no copies 1509 and 851. Scores over what their registers hold: heads of 64, 745 and
        # 731; of 128, beside the product before, 586 and 555, 32 columns begun early 549, 48 538.
        # Three warpgroups, of 168 registers, would spill 88 bytes with heads of 64.
        wide = dataclasses.replace(narrow, block_kv=128, bias_stages=1, overwrites=True)
        copied = [dataclasses.replace(wide, overlaps=True, early=48)]
    copied += [dataclasses.replace(narrow, bias_stages=2), dataclasses.replace(narrow, bias_stages=1)]
    return next((c for c in copied if forward_kernel.shared_bytes(problem, c) < device.smem_per_cta), narrow)


def _widest(problem: Attention) -> ForwardConfig:
    # bf16, 16384 keys, H200, us, full and causal. Scores over cleared registers, and over what those hold: heads of 64,
    # 4202 and 3943, 2441 and 2302; of 256, full, 2946 and 3176. Weights behind the product before, and beside it: where
    # tiles are compared at an edge, of 64, 2302 and 2290, of 256, 1668 and 1469; full, of 256, 2947 and 3022. Neither
    # and no slack, both and slack 8: of 128, 3638 and 3525, 1924 and 1754; of 192 and 128, 4096 keys, 1116 and 1105,
    # 626 and 588. Slack 8 against 0 without them: of 64, 532 and 514 TFLOP/s; of 256, causal, 763 and 723. No weights
    # begun early, and as many as fit in registers: of 64, 4290 and 4159, causal 2273 and 2119, not beside the product
    # then; of 128, full, 3470 and 3281; of 192 and 128, 4096 keys, 1099 and 1064, 571 and 561.
    edge = schedule.bounds(problem) != (None, None) or problem.hidden_by_data
    if max(problem.head_dim, problem.value_dim) <= 64:
        # Two warpgroups: 414.
        return ForwardConfig(block_kv=128, warpgroups=3, slack=8, early=8, overwrites=True)
    if max(problem.head_dim, problem.value_dim) <= 96 and not problem.hidden_by_data and problem.soft_cap is None:
        # bf16, 2048 tokens, H100, us, two warpgroups and 128 keys, and three and 96: heads of 72, 440 and 355, causal
        # 241 and 206; of 96, 376 and 362, causal 216 and 218.
        return ForwardConfig(block_kv=96, warpgroups=3, slack=8, overwrites=True)
    if max(problem.head_dim, problem.value_dim) <= 128:
        # Tiles of 64 keys: 572.
        config = ForwardConfig(block_kv=128, warpgroups=2, slack=8, early=48)
        return dataclasses.replace(config, overwrites=True, overlaps=True)
    if problem.head_dim + problem.value_dim <= 320 and problem.head_dim <= 192 and problem.value_dim <= 128:
        # Tiles of 64 keys: 652 against 713 for heads of 192 and 128.
        config = ForwardConfig(block_kv=128, warpgroups=2, slack=8, early=32)
        return dataclasses.replace(config, overwrites=True, overlaps=True)
    if max(problem.head_dim, problem.value_dim) <= 192 and not problem.hidden_by_data:
        # bf16, 2048 tokens, H100, us, tiles of 64 and of 96 keys: heads of 144, 274 and 265, causal 160 and 158; of
        # 192, 302 and 294, causal 183 and 185.
        return ForwardConfig(block_kv=96, warpgroups=2, slack=8, overwrites=True, overlaps=True)
    return ForwardConfig(block_kv=64, warpgroups=2, slack=8, overlaps=edge and not problem.hidden_by_data)


def backward(problem: Attention, device: Device) -> tuple[BackwardConfig, ...]:
    """As many queries at a time as the registers hold."""
    splits = _head_splits(problem, device, BackwardConfig(block_q=64, warpgroups=2, stages=2))
    problem = dataclasses.replace(problem, key_heads=problem.key_heads * splits)
    narrow = max(problem.head_dim, problem.value_dim) <= 64
    config = _in_turns(problem, BackwardConfig(block_q=128 if narrow else 64, warpgroups=2, stages=2))
    config = _ahead(problem, _in_order(problem, device, config))
    config = _filling(problem, device, _dynamic(problem, _static(problem, config)))
    found = _with_bias_stages(problem, device, [config], backward_kernel.shared_bytes)
    if found.bias_stages == 0 and not (config.turns or config.last_writes):
        # Shared memory for dQ is better spent on a tile of the bias.
        config = dataclasses.replace(config, adds_registers=True)
        registers = _with_bias_stages(problem, device, [config], backward_kernel.shared_bytes)
        found = registers if registers.bias_stages else found
    return (dataclasses.replace(found, head_splits=splits),)


def _head_splits(problem: Attention, device: Device, config: AnyBackwardConfig) -> int:
    """Among how many CTAs a group's query heads are shared out, by a model: 3 us to a step, and 5 to a tile besides.

    bf16, H100: heads of 128, 2048 tokens, 2.6 us to a step; of 256, 3.6.
    """
    group, tiles = problem.query_heads // problem.key_heads, -(-problem.key_length // config.block_kv)
    queries = -(-problem.query_length // config.block_q)
    uneven = _uneven(problem)
    heads, steps = problem.batch * problem.key_heads, _rows(problem) // group / config.block_q
    mean = max(steps / 2 if uneven else steps, 1)

    def duration(splits: int) -> float:
        each, longest = (3 * x * group / splits + 5 for x in (mean, min(queries, max(steps, 1))))
        per_sm = heads * tiles * splits / device.sm_count
        busy = max((per_sm if uneven else -(-per_sm // 1)) * each, longest)
        numbers = heads * splits * problem.key_length * (problem.head_dim + problem.value_dim)
        # A kernel of its own writes and reads the gradients of all splits, in float32.
        return busy if splits == 1 else 1.05 * busy + 5 + numbers * 8 / 2.5e6

    return min((n for n in range(1, group + 1) if group % n == 0), key=duration)


def _ahead(problem: Attention, config: BackwardConfig) -> BackwardConfig:
    """`config` with the next step's scores found beside this step's dQ, where there are registers for them.

    H200, us, without and with it: 4096 tokens, heads of 64, 3004 and 2794, causal 1614 and 1514; of 128, 2585 and 2428,
    causal 1327 and 1242; documents of 1024 tokens and heads of 64, 903 and 880, of 128, 706 and 682; masks, heads of
    128, causal 811 and 787, random 1410 and 1384; with a bias and heads of 128, 2345 and 2451, and with one and heads
    up to 64 up to 52 bytes would spill. Beside a last turn's branches heads of 128, causal, would spill 640 bytes.
    """
    return dataclasses.replace(config, ahead=not config.last_writes and problem.bias is None)


def _static(problem: Attention, config: BackwardConfig) -> BackwardConfig:
    """`config` with persistent CTAs where tiles take equally long, but for turns.

    D = 128, S = 2048, bf16, 601 TFLOP/s, and 591 with a CTA to each, H200. Where tiles wait for turns, CTAs would need
    the whole device to themselves, lest a tile wait for one whose CTA cannot start, and are slower: D = 128, S = 2048,
    bf16, 558 TFLOP/s with a CTA to each, 542 persistent, H200.
    """
    return config if config.turns or _uneven(problem) else dataclasses.replace(config, scheduler="static")


def _uneven(problem: Attention) -> bool:
    """Whether some tiles take longer than others."""
    data = problem.key_lengths or problem.query_lengths or problem.hidden_by_data
    return data or schedule.bounds(problem) != (None, None)


def _dynamic(problem: Attention, config: BackwardConfig) -> BackwardConfig:
    """`config` with tiles that are drawn where some take longer than others, or are so short that their ends matter.

    bf16, H200, us in all, a CTA to each and drawn. Where data decide, 2048 tokens: causal masks, heads of 64, 1025
    and 998, of 128, 854 and 812; random ones, 1771 and 1770, 1491 and 1460. Documents, 16384 tokens: 851 and 840, 671
    and 637. Where shapes decide, causal: heads of 64, 2048 tokens, 862 and 832; 4096, 1420 and 1398; 8192, 2558 and
    2552; 16384, 4775 and 4830; of 128, 2048, 737 and 716; 8192, 2212 and 2187; 16384, 4196 and 4208; eight query heads
    to a key head, 4096, 5108 and 5161. A window of 1024: 892 and 857, 761 and 743. A few turns: heads of 64, 512
    tokens, 522 and 477, causal 394 and 367; of 128, 422 and 406, 322 and 299; 1024, 717 and 707, 472 and 447.
    """
    if problem.bias is not None:
        return config
    if not problem.hidden_by_data:
        bounded = schedule.bounds(problem) != (None, None)
        short = bounded and not config.last_writes and _rows(problem) <= 8192
        few = -(-problem.key_length // config.block_kv) <= MOST_TURNS
        return dataclasses.replace(config, scheduler="dynamic") if (few if config.turns else short) else config
    if config.turns:
        return config
    if problem.mask is None:
        # Of documents the cache holds more heads than of whole sequences. As many heads of 128 as it holds of those, 2,
        # and 16: documents of 1024 tokens 637 and 608, one of 16384 4508 and 4537.
        return dataclasses.replace(config, scheduler="dynamic", together=16)
    return dataclasses.replace(config, scheduler="dynamic")


def _filling(problem: Attention, device: Device, config: BackwardConfig) -> BackwardConfig:
    """`config` for whole attention, without bias and soft cap, with as many keys to a head as fill the device.

    bf16, 16384 tokens, H200, us, two runs: heads of 128, one and two heads together 9356 and 9023, 8514 and 8340, four
    9124; a step apart 9446. Of 64, side by side and a step apart 10860 and 10484, 9836 and 9648; two heads together
    10896. With 8192 tokens, heads of 128, two together 4802 and 4864; with 4096, of 64, a step apart 2785 and 2807.
    """
    plain = config.scheduler == "static" and problem.bias is None and problem.soft_cap is None
    if not plain or 2 * -(-problem.key_length // config.block_kv) <= device.sm_count:
        return config
    if max(problem.head_dim, problem.value_dim) <= 64:
        return dataclasses.replace(config, apart=True)
    return dataclasses.replace(config, together=min(2, max(_in_cache(problem), 1)))


def _in_cache(problem: Attention) -> int:
    """Of how many heads the cache holds queries, cotangents and sums of dQ, all of a group's."""
    row_bytes = (problem.head_dim + problem.value_dim) * problem.dtype.itemsize + problem.head_dim * 4
    return 32 * MIB // max(_rows(problem) * row_bytes, 1)


def _rows(problem: Attention) -> int:
    """How many queries a block of keys sees at most, those of all the heads that read it."""
    left, right = schedule.bounds(problem)
    seen = problem.query_length
    if left is not None and right is not None:
        seen = min(max(right - left + 1, 0), seen)
    return seen * (problem.query_heads // problem.key_heads)


def _in_turns(problem: Attention, config: BackwardConfig) -> BackwardConfig:
    """`config` with turns where they are asked for, and no sum of dQ where a tile of keys is alone.

    Unasked, turns are no faster than the passes over dQ before and after the kernel. 512 tokens, bf16, H100, us, with a
    fence to each turn and without one, with which 2 % of calls returned some rows wrong: heads of 64, causal, 592 and
    542; of 128, 707 and 616, causal 628 and 548.
    """
    counts = backward_common.turn_counts(problem, config)
    alone = counts == (1, 1)
    known = counts is not None and counts[0] > 0 and _can_write_last(problem)
    turns = problem.deterministic and not alone
    return dataclasses.replace(config, turns=turns, last_writes=known and (alone or turns))


def _can_write_last(problem: Attention) -> bool:
    """Whether there are registers for it, and shared memory, which the slope of a soft cap takes beside a bias.

    Compiled without a device, D = 64 and 128, a soft cap would spill 656 and 164 bytes a thread, a window 140 and 208,
    a bias 108 and 0; in any order they spill 20, 36 and 36, and 0.
    """
    if problem.soft_cap is not None or schedule.bounds(problem)[0] is not None:
        return False
    return max(problem.head_dim, problem.value_dim) > 64 or problem.bias is None


def backward_wide(problem: Attention, device: Device) -> tuple[BackwardWideConfig, ...]:
    """As many stages as fit in shared memory, and slots for the bias."""
    splits = _head_splits(problem, device, BackwardWideConfig())
    problem = dataclasses.replace(problem, key_heads=problem.key_heads * splits)
    config = BackwardWideConfig(turns=problem.deterministic, head_splits=splits)
    config = _in_order(problem, device, config)
    squares = (3, 2) if config.turns else (1,)
    configs = [dataclasses.replace(config, d_out_stages=d, squares=n) for d in (2, 1) for n in squares]
    return (_with_bias_stages(problem, device, configs, backward_wide_kernel.shared_bytes),)


def _with_bias_stages[Config: (BackwardConfig, BackwardWideConfig)](
    problem: Attention, device: Device, configs: list[Config], shared_bytes: Callable[[Attention, Any], int]
) -> Config:
    """The first config that fits in shared memory, with as many slots for the bias as do, if that can be copied."""
    slots = (2, 1, 0) if memory.bias_is_tiled(problem) else (0,)
    found = (dataclasses.replace(c, bias_stages=n) for n in slots for c in configs)
    # Mosaic's kernels declare a byte beside what they are given at the launch.
    return next(c for c in found if shared_bytes(problem, c) < device.smem_per_cta)


def _in_order[Config: (BackwardConfig, BackwardWideConfig)](
    problem: Attention, device: Device, config: Config
) -> Config:
    """`config` with the order of the tiles, by what makes them wait."""
    if _uneven(problem):
        # The longest tiles of as many heads as the cache holds come first: causal, D = 128, S = 2048, bf16,
        # 532 TFLOP/s, and 512 head by head, H200. Two tiles to each multiprocessor at least, lest the last be long:
        # 64 heads on 8, D = 128, 4096 tokens, us, of 1, 4, 8 and 16 heads 5362, 5142, 5059, 5123; 2048, of 2, 4, 8 and
        # 16, 3303, 3167, 3241, 3258; 16384, of 1, 2 and 4, 19862, 19483, 19747.
        tiles = max(-(-problem.key_length // config.block_kv), 1)
        together = max(_in_cache(problem), min(-(-2 * device.sm_count // tiles), 8))
        return dataclasses.replace(config, together=min(together, 16))
    if not config.turns:
        return config
    # A head's tiles wait for each other, a step each, unless they start a step apart.
    steps = -(-problem.query_length // config.block_q)
    return dataclasses.replace(config, together=-(-5 * device.sm_count // (4 * steps)))
