"""The one place that chooses: whether a kernel runs an attention call, with which config, and why.

The sizes and the card decide, by a model of waves of tiles and by figures that `docs/tuning/attention.md` explains.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from pallas_kernels.attention import backward, backward_common, backward_wide, combine, cudnn, dropout, forward, mask
from pallas_kernels.attention.problem import (
    AnyBackwardConfig,
    Attention,
    BackwardConfig,
    BackwardWideConfig,
    ForwardConfig,
    Op,
)
from pallas_kernels.decision import Decision, Kernel, decision, refusals
from pallas_kernels.hardware import WARPGROUP_ROWS, Device

KIB, MIB = 2**10, 2**20
_FEW_QUERIES, _MANY_KEYS = 16, 2048  # of cuDNN: 4 queries of 4096 keys and 8 heads took 38 us, XLA 13 (H100)
_MOST_SPLITS = 256


class Rates(NamedTuple):
    """The costs of a tile of queries in a forward config, in us."""

    step: float  # an SM's time for a tile of keys, with all its CTAs at work
    tile: float  # an SM's time for the rest of a tile of queries
    alone: float  # a step's time in a CTA that has the SM to itself; a prologue takes three


_PAIRED = Rates(0.57, 1.05, 0.84)
_STREAMING = Rates(0.75, 1.9, 0.75)


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The tuned figures. Widths of heads are classes: up to 64, 128 and 256."""

    modelled_queries: int = 1024  # with more, the config for long sequences is taken without asking the model
    rates: Mapping[int, Rates] = MappingProxyType({
        64: Rates(1.49, 1.46, 1.3), 128: Rates(1.4, 3.0, 1.12), 256: Rates(1.33, 3.0, 1.5),
    })  # fmt: skip
    narrow_rates: Mapping[int, Rates] = MappingProxyType({
        64: Rates(0.27, 0.81, 0.78), 128: Rates(0.4, 1.86, 0.75), 256: Rates(0.95, 2.2, 1.0),
    })  # fmt: skip
    paired_rates: Rates = _PAIRED  # of two CTAs of two warpgroups an SM, for heads up to 64
    streaming_rates: Rates = _STREAMING  # of one CTA of one warpgroup an SM, and 128 keys, for heads up to 128
    two_warpgroups: float = 0.78  # of a tile's time with three warpgroups
    favoured: float = 0.97  # of the modelled time, for the config for long sequences
    ragged_tiles: int = 8  # for each CTA, of few queries, where sequences have their own numbers of keys
    ragged_steps: int = 8  # of the longest of those tiles, at least
    merge_us: float = 2.5  # of a launch that merges splits, besides its bytes
    bytes_per_us: float = 2.5e6  # that kernels behind a first one read and write
    copied_bytes_per_us: float = 2.9e6  # operands and results of a short problem
    backward_step_us: float = 3.0
    backward_tile_us: float = 5.0
    head_split_factor: float = 1.05  # of the time of a backward pass with split heads
    short_gradient: int = 12  # tokens up to which XLA computes gradients of wide heads faster
    short_gradient_of_many: int = 20  # the same where something is masked, or heads are many
    short_bias: int = 16  # queries and keys up to which XLA adds a bias to many heads faster
    masked_logits: int = 2**13  # of all heads, up to which XLA is faster where there is a mask
    padded_logits: int = 2**9  # the same where there are lengths
    small_gradient: int = 2**15  # the same of gradients with a mask, a bias or lengths
    dropped_logits: int = 3 * 2**20  # the same where there is dropout
    hidden_blocks: int = 8  # of 64 queries and keys, of all heads, for each SM, up to which hidden tiles are visited
    dynamic_rows: int = 8192  # queries of a tile of keys up to which bounded ones are scheduled dynamically
    dynamic_ordered_tiles: int = 8  # tiles of keys up to which ordered ones are scheduled dynamically
    cached_mib: int = 32  # of L2, for what the heads that run at one time read and add to
    document_heads: int = 16  # per group, where documents leave each head little to read


THRESHOLDS = Thresholds()


def _xla_is_faster(problem: Attention, device: Device) -> str | None:
    """Says why no kernel should take a problem that one could take, or None."""
    figures, heads = THRESHOLDS, problem.batch * problem.query_heads
    if problem.batch_invariant or problem.page_size:
        return None
    logits, longest = heads * problem.query_length * problem.key_length, max(problem.query_length, problem.key_length)
    if problem.keep is not None and logits <= figures.dropped_logits:
        return "dropout takes two passes of a kernel, and XLA computes so few logits in less time"
    some_seen = problem.mask is not None or problem.query_lengths or problem.key_lengths
    if problem.op is Op.FORWARD:
        if problem.key_length == 1 and not problem.sinks:
            return "the output is the value of the only key, which XLA copies faster"
        few = figures.masked_logits if problem.mask is not None else figures.padded_logits
        if some_seen and problem.group == 1 and logits <= few:
            return "XLA computes so few logits in less time than a kernel's mask, or lengths, take to prepare"
        if problem.bias is not None and longest <= figures.short_bias and heads > 4 * device.sm_count:
            return f"each of {heads} heads reads its own bias, a tile of which is mostly padding"
        return None
    is_given = some_seen or problem.bias is not None
    if is_given and problem.group == 1 and logits <= figures.small_gradient:
        return "XLA computes so few logits in less time than a kernel's mask, bias or lengths take to prepare"
    wide_and_many = problem.head_dim > 128 and problem.batch * problem.key_heads > device.sm_count
    many = some_seen or heads > 4 * device.sm_count
    if longest <= max(figures.short_gradient * wide_and_many, figures.short_gradient_of_many * many):
        return "a tile of 64 keys and 64 queries is mostly padding, and XLA computes such short gradients faster"
    return None


def _xla_beats_cudnn(problem: Attention, device: Device) -> str | None:
    """Says why cuDNN should not take a problem that it could take, or None."""
    heads = problem.batch * problem.query_heads
    if problem.query_length <= _FEW_QUERIES and problem.key_length >= _MANY_KEYS and 4 * heads <= device.sm_count:
        return "few CTAs would read many keys one after another, which XLA's products share among SMs"
    return None


def forward_configs(problem: Attention, device: Device) -> tuple[ForwardConfig, ...]:
    """Configs by the time that a model of waves of tiles expects of them, the best first.

    Long sequences and batch-invariant calls have one config, by the heads' sizes and the kind of call alone, and those
    with a bias at most two.
    """
    figures = THRESHOLDS
    if problem.bias is not None:
        return _with_bias(problem, device)
    whole = _whole(problem)
    if problem.batch_invariant or problem.query_length > figures.modelled_queries:
        return (_filling(problem, whole, device),)
    # The system takes a KiB for each CTA.
    fits = lambda c: c.ctas_per_sm * (forward.shared_bytes(problem, c) + KIB) <= device.smem_per_cta + KIB
    rates = {c: r for c, r in _short(problem).items() if fits(c)}
    narrow = {c: r for c, r in rates.items() if c.warpgroups == 1}
    narrow |= {c: r for config, r in narrow.items() for c in _packed(problem, config)}
    wide = {whole: figures.rates[_class(problem)]}
    if problem.query_length * problem.group <= 2 * whole.block_q:
        wide |= dict.fromkeys(_packed(problem, whole), wide[whole])
    for config, r in (narrow | wide).items():
        rates |= dict.fromkeys([config, *_split(problem, config, device)], r)
    durations = {config: _duration(problem, config, r, device) for config, r in rates.items()}
    durations[whole] *= figures.favoured
    ranked = sorted(durations, key=durations.__getitem__)
    if problem.page_size:  # a tile of keys is whole pages, or a page whole tiles
        ranked = [config for config in ranked if config.block_kv != 96]
    return tuple(dict.fromkeys(_balanced(problem, config, device) for config in ranked))


def _is_ragged(problem: Attention) -> bool:
    """Says whether there are several sequences, each with its own number of keys."""
    return problem.key_lengths and problem.batch > 1


def _class(problem: Attention) -> int:
    """Returns the class of the heads' width: 64, 128 or 256."""
    return next(size for size in (64, 128, 256) if problem.widest <= size)


def _whole(problem: Attention) -> ForwardConfig:
    """Gives long sequences the widest tiles of keys of which two stages fit in shared memory."""
    config = _widest(problem)
    if problem.has_data_mask:
        # Only the device knows how many tiles of keys are skipped. Documents need less of L2 than all keys.
        budget = 64 if problem.segments or problem.positions else config.l2_budget_mib
        return dataclasses.replace(config, scheduler="dynamic", l2_budget_mib=budget)
    return dataclasses.replace(config, prefetch_query=config.early_exp_columns > 0)


def _filling(problem: Attention, config: ForwardConfig, device: Device) -> ForwardConfig:
    """Returns `config`, or tiles of two warpgroups where those of three leave SMs idle."""
    if config.warpgroups < 3 or problem.has_data_mask or problem.batch_invariant:
        return config
    two = dataclasses.replace(config, block_kv=128, warpgroups=2, early_exp_columns=48, overlap_pv=True)

    def rounds(config: ForwardConfig) -> float:
        each = _tiles(problem, config) / device.sm_count
        # Tiles of which some skip keys are half as long as the longest on average, and fill gaps.
        return max(each / 2, 1) if mask.skips_tiles(problem) else -(-each // 1)

    if rounds(two) * THRESHOLDS.two_warpgroups < rounds(config):
        return dataclasses.replace(two, prefetch_query=True)
    return config


def _widest(problem: Attention) -> ForwardConfig:
    """Chooses the tiles, and how exponentials overlap with products."""
    widest, narrowest = problem.widest, min(problem.head_dim, problem.value_dim)
    edges = mask.window_bounds(problem) != (None, None)
    config = ForwardConfig(block_kv=128, warpgroups=2, rescale_threshold_log2=8, zero_init_free=True)
    # With a mask, three warpgroups would spill 184 bytes beside a soft cap, 60 beside segments, and 40 in a
    # batch-invariant call; with segments 36 beside a soft cap and a window, and 8 beside positions.
    beside = problem.soft_cap is not None or problem.batch_invariant or problem.data_masks > 1
    spills = problem.has_data_mask and beside
    if widest <= 64 and not spills:
        return dataclasses.replace(config, warpgroups=3, early_exp_columns=8)
    if widest <= 96 and not problem.has_data_mask and problem.soft_cap is None:
        return dataclasses.replace(config, warpgroups=3, block_kv=96)
    config = dataclasses.replace(config, overlap_pv=True)
    if widest <= 128:
        return dataclasses.replace(config, early_exp_columns=48)
    if problem.head_dim <= 192 and problem.value_dim <= 128 and widest + narrowest <= 320:
        return dataclasses.replace(config, early_exp_columns=32)
    if widest <= 192 and not problem.has_data_mask:
        return dataclasses.replace(config, block_kv=96)
    overlap = edges and not problem.has_data_mask
    return dataclasses.replace(config, block_kv=64, zero_init_free=False, overlap_pv=overlap)


def _short(problem: Attention) -> dict[ForwardConfig, Rates]:
    """Configs with tiles of fewer queries, most in several CTAs an SM, whose prologues and epilogues overlap."""
    size = _class(problem)
    narrow = ForwardConfig(block_kv=64, warpgroups=1, rescale_threshold_log2=8, zero_init_free=True)
    plain = not problem.has_data_mask and problem.soft_cap is None
    ctas = {64: 4 if plain else 2, 128: 2, 256: 1}[size]
    rates = {dataclasses.replace(narrow, ctas_per_sm=ctas): THRESHOLDS.narrow_rates[size]}
    rows = problem.query_length * problem.group
    # Copies of small pages take a warp so long that two CTAs an SM do better.
    long_copies = not 0 < problem.page_size < narrow.block_kv
    if size == 128 and plain and long_copies and not _is_ragged(problem) and rows <= WARPGROUP_ROWS:
        rates[dataclasses.replace(narrow, block_kv=128)] = THRESHOLDS.streaming_rates
    if size == 64:
        scheduler = "dynamic" if mask.skips_tiles(problem) else "static"
        rates[dataclasses.replace(narrow, warpgroups=2, ctas_per_sm=2, scheduler=scheduler)] = THRESHOLDS.paired_rates
    return rates


def _packed(problem: Attention, config: ForwardConfig) -> list[ForwardConfig]:
    """Packs as many heads of a group into a tile as have room there for all queries."""
    if problem.segments or problem.positions or (problem.mask is not None and problem.mask[1] > 1):
        return []
    most = min(problem.group & -problem.group, WARPGROUP_ROWS)
    return [dataclasses.replace(config, packed_heads=most)] if most > 1 else []


def _split(problem: Attention, config: ForwardConfig, device: Device) -> list[ForwardConfig]:
    """Splits the keys, where there are fewer tiles of queries than CTAs."""
    tiles, steps = _tiles(problem, config), -(-problem.key_length // config.block_kv)
    most = min(device.sm_count * config.ctas_per_sm // tiles, steps, _MOST_SPLITS)
    if config.scheduler == "dynamic":
        return []
    # Above MOST_AT_ONCE the first launch merges groups of 16.
    counts = {2, 4, 8, 16, 32, most if most <= combine.MOST_AT_ONCE else most // 16 * 16}
    return [dataclasses.replace(config, splits=n) for n in sorted(counts) if 1 < n <= most]


def _balanced(problem: Attention, config: ForwardConfig, device: Device) -> ForwardConfig:
    """Gives each CTA several short tiles to take, where sequences have their own numbers of keys."""
    if not _is_ragged(problem) or config.warpgroups > 1 or problem.query_length > config.queries:
        return config
    tiles, ctas = _tiles(problem, dataclasses.replace(config, splits=1)), device.sm_count * config.ctas_per_sm
    steps = problem.key_length // config.block_kv // THRESHOLDS.ragged_steps
    most = min(THRESHOLDS.ragged_tiles * ctas // tiles, steps, combine.MOST_AT_ONCE)
    if most <= 1 and tiles <= ctas:
        return config
    return dataclasses.replace(config, splits=1 << max(most, 1).bit_length() - 1, scheduler="dynamic")


def _tiles(problem: Attention, config: ForwardConfig) -> int:
    """Says how many tiles of queries there are."""
    packs = problem.batch * problem.query_heads // config.packed_heads
    return packs * -(-problem.query_length // config.queries) * config.splits


def _duration(problem: Attention, config: ForwardConfig, rates: Rates, device: Device) -> float:
    """Models the time of the problem in us, beyond a launch."""
    figures = THRESHOLDS
    per_head = -(-problem.query_length // config.queries) * config.splits
    lengths = problem.query_length, problem.key_length
    ranges = [mask.tile_kv_range(problem, config, i, *lengths)[0] for i in range(per_head)]
    steps = [int(tiles.end - tiles.first) for tiles in ranges]
    mean, most, tiles = sum(steps) / per_head, max(steps), _tiles(problem, config)
    per_sm = tiles / device.sm_count if most > mean else -(-tiles // device.sm_count)
    rounds = -(-tiles // (device.sm_count * config.ctas_per_sm))
    busy = per_sm * (mean * rates.step + rates.tile)
    waiting = (max(rounds * mean, most) + 3) * rates.alone
    rows = problem.key_length * problem.key_heads + problem.query_length * problem.query_heads
    moved = problem.batch * rows * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    copying = moved / figures.copied_bytes_per_us
    merging = 0.0
    if config.splits > 1:
        # The float32 outputs of all splits are written and read.
        outputs = problem.batch * problem.query_heads * problem.query_length * problem.value_dim
        launches = 1 + (config.splits > combine.MOST_AT_ONCE)
        merging = launches * figures.merge_us + config.splits * outputs * 8 / figures.bytes_per_us
    # The longest of the three hides most of the others, not all.
    return max(busy, waiting, copying) + (busy + waiting + copying) / 10 + merging


def _with_bias(problem: Attention, device: Device) -> tuple[ForwardConfig, ...]:
    """Returns the best config, after one with splits of the keys where that is faster."""
    whole = _with_bias_copied(problem, device)
    if problem.batch_invariant or problem.query_length > WARPGROUP_ROWS:
        return (whole,)
    narrow, rates = ForwardConfig(64, warpgroups=1, rescale_threshold_log2=8), THRESHOLDS.narrow_rates[_class(problem)]
    configs = [narrow, *_split(problem, narrow, device)]
    best = min(configs, key=lambda config: _duration(problem, config, rates, device))
    return (best, whole) if best.splits > 1 else (whole,)


def _with_bias_copied(problem: Attention, device: Device) -> ForwardConfig:
    """Chooses the widest tiles that fit in shared memory beside tiles of the bias, if TMA can copy the bias."""
    narrow = ForwardConfig(block_kv=64, warpgroups=2, rescale_threshold_log2=8)
    if problem.batch_invariant or not problem.bias_is_tiled:
        return narrow
    copied = [dataclasses.replace(narrow, bias_stages=stages) for stages in (2, 1)]
    if not problem.has_data_mask:
        wide = dataclasses.replace(narrow, block_kv=128, bias_stages=1, zero_init_free=True)
        copied = [dataclasses.replace(wide, overlap_pv=True, early_exp_columns=48), *copied]
    return next((c for c in copied if forward.shared_bytes(problem, c) < device.smem_per_cta), narrow)


def backward_configs(problem: Attention, device: Device) -> tuple[BackwardConfig, ...]:
    """Chooses as many queries at a time as the registers hold."""
    splits = _head_splits(problem, device, BackwardConfig(block_q=64, warpgroups=2, stages=2))
    problem = dataclasses.replace(problem, key_heads=problem.key_heads * splits)
    block_q = 128 if problem.widest <= 64 else 64
    config = _ordered(problem, BackwardConfig(block_q, warpgroups=2, stages=2))
    # With a bias, and where a tile of keys may be the last to add, the next step's scores find no registers.
    config = dataclasses.replace(config, prefetch_scores=not config.fused_dq_cast and problem.bias is None)
    config = _scheduled(problem, device, _grouped(problem, device, config))
    best = _with_bias_stages(problem, device, [config], backward.shared_bytes)
    if best.bias_stages == 0 and not (config.ordered_dq or config.fused_dq_cast):
        # A tile of the bias is the better use of dQ's shared memory.
        config = dataclasses.replace(config, dq_from_registers=True)
        registers = _with_bias_stages(problem, device, [config], backward.shared_bytes)
        best = registers if registers.bias_stages else best
    return (dataclasses.replace(best, head_splits=splits),)


def backward_wide_configs(problem: Attention, device: Device) -> tuple[BackwardWideConfig, ...]:
    """Takes as many stages as fit in shared memory, and stages for the bias."""
    splits = _head_splits(problem, device, BackwardWideConfig())
    problem = dataclasses.replace(problem, key_heads=problem.key_heads * splits)
    ordered = problem.deterministic
    config = BackwardWideConfig(ordered_dq=ordered, squares=3 if ordered else 1, head_splits=splits)
    config = _grouped(problem, device, config)
    squares = (3, 2) if ordered else (1,)
    configs = [dataclasses.replace(config, d_out_stages=d, squares=n) for d in (2, 1) for n in squares]
    return (_with_bias_stages(problem, device, configs, backward_wide.shared_bytes),)


def _head_splits(problem: Attention, device: Device, config: AnyBackwardConfig) -> int:
    """Chooses among how many CTAs a group's query heads are divided, by a model of steps and tiles."""
    figures, group = THRESHOLDS, problem.group
    tiles, queries = -(-problem.key_length // config.block_kv), -(-problem.query_length // config.block_q)
    heads, steps = problem.batch * problem.key_heads, mask.queries_of_tile(problem) // group / config.block_q
    uneven = mask.is_uneven(problem)
    mean = max(steps / 2 if uneven else steps, 1)

    def duration(splits: int) -> float:
        lengths = mean, min(queries, max(steps, 1))
        each, longest = (figures.backward_step_us * x * group / splits + figures.backward_tile_us for x in lengths)
        per_sm = heads * tiles * splits / device.sm_count
        busy = max((per_sm if uneven else -(-per_sm // 1)) * each, longest)
        if splits == 1:
            return busy
        # A kernel of XLA's reads the float32 gradients of all splits.
        numbers = heads * splits * problem.key_length * (problem.head_dim + problem.value_dim)
        return figures.head_split_factor * busy + 5 + numbers * 8 / figures.bytes_per_us

    return min((n for n in range(1, group + 1) if group % n == 0), key=duration)


def _ordered(problem: Attention, config: BackwardConfig) -> BackwardConfig:
    """Orders the sums of dQ where that is asked for, unless a single tile of keys adds to each tile of dQ."""
    counts = backward_common.dq_writer_counts(problem, config)
    alone = counts == (1, 1)
    # The cast takes registers, and shared memory, which a soft cap's slope takes beside a bias.
    has_room = problem.soft_cap is None and mask.window_bounds(problem)[0] is None
    has_room = has_room and (problem.widest > 64 or problem.bias is None)
    known = counts is not None and counts[0] > 0 and has_room
    ordered = problem.deterministic and not alone
    return dataclasses.replace(config, ordered_dq=ordered, fused_dq_cast=known and (alone or ordered))


def _grouped[C: (BackwardConfig, BackwardWideConfig)](problem: Attention, device: Device, config: C) -> C:
    """Sets `heads_per_l2_group`, so that tiles that are ordered or uneven wait less."""
    if mask.is_uneven(problem):
        # The longest tiles of as many heads as L2 holds come first; two tiles to each SM at least, lest the last be
        # long.
        tiles = max(-(-problem.key_length // config.block_kv), 1)
        heads = max(_heads_in_l2(problem), min(-(-2 * device.sm_count // tiles), 8))
        return dataclasses.replace(config, heads_per_l2_group=min(heads, 16))
    if not config.ordered_dq:
        return config
    # A head's ordered tiles wait for each other, a step each, unless they start a step apart.
    steps = -(-problem.query_length // config.block_q)
    return dataclasses.replace(config, heads_per_l2_group=-(-5 * device.sm_count // (4 * steps)))


def _scheduled(problem: Attention, device: Device, config: BackwardConfig) -> BackwardConfig:
    """Gives `config` its tile scheduler.

    Ordered tiles are not given to persistent CTAs, which would need the whole device to themselves: a tile could wait
    for one whose CTA cannot start.
    """
    figures, tiles = THRESHOLDS, -(-problem.key_length // config.block_kv)
    if not config.ordered_dq and not mask.is_uneven(problem):
        config = dataclasses.replace(config, scheduler="static")
    if problem.bias is not None:
        return config
    if problem.has_data_mask:
        if config.ordered_dq:
            return config
        group = figures.document_heads if problem.segments and problem.mask is None else config.heads_per_l2_group
        return dataclasses.replace(config, scheduler="dynamic", heads_per_l2_group=group)
    bounded = mask.window_bounds(problem) != (None, None)
    short = bounded and not config.fused_dq_cast and mask.queries_of_tile(problem) <= figures.dynamic_rows
    if tiles <= figures.dynamic_ordered_tiles if config.ordered_dq else short:
        return dataclasses.replace(config, scheduler="dynamic")
    fills_device = 2 * tiles > device.sm_count
    if config.scheduler != "static" or problem.soft_cap is not None or not fills_device:
        return config
    # All CTAs of one head read the same tiles at once.
    if problem.widest <= 64:
        return dataclasses.replace(config, staggered=True)
    return dataclasses.replace(config, heads_per_l2_group=min(2, max(_heads_in_l2(problem), 1)))


def _heads_in_l2(problem: Attention) -> int:
    """Counts the heads of which L2 holds queries, cotangents and sums of dQ, all of a group's."""
    row_bytes = (problem.head_dim + problem.value_dim) * problem.dtype.itemsize + problem.head_dim * 4
    return THRESHOLDS.cached_mib * MIB // max(mask.queries_of_tile(problem) * row_bytes, 1)


def _with_bias_stages[Config: (BackwardConfig, BackwardWideConfig)](
    problem: Attention, device: Device, configs: list[Config], shared_bytes: Callable[[Attention, Any], int]
) -> Config:
    """Returns the first config that fits in shared memory, with as many bias stages as fit if TMA can copy the bias."""
    stages = (2, 1, 0) if problem.bias_is_tiled else (0,)
    candidates = (dataclasses.replace(c, bias_stages=n) for n in stages for c in configs)
    # Mosaic's kernels declare a byte beside what they are given at the launch.
    return next(c for c in candidates if shared_bytes(problem, c) < device.smem_per_cta)


def _visits_hidden(problem: Attention, device: Device) -> bool:
    """Says whether a mask has so few blocks that to find those that it hides takes longer than to visit them."""
    if problem.mask is None or problem.batch_invariant:
        return False
    blocks = -(-problem.query_length // 64) * -(-problem.key_length // 64)
    few = THRESHOLDS.hidden_blocks * device.sm_count
    return problem.batch * problem.query_heads * blocks <= few


def _kernel(name: str, module: ModuleType, configs: Callable[[Attention, Device], tuple[Any, ...]]) -> Kernel:
    def choose(problem: Attention, device: Device) -> tuple[Any, ...]:
        visits_hidden = _visits_hidden(problem, device)
        return tuple(dataclasses.replace(c, visits_hidden=visits_hidden) for c in configs(problem, device))

    # `run` is looked up when it is called, for tests that put faulty code in a module.
    return Kernel(name, module.unsupported, choose, lambda *arguments: module.run(*arguments))


def _cudnn(name: str, run: Callable[..., Any]) -> Kernel:
    unsupported = lambda problem, device: cudnn.unsupported(problem, device) or _xla_beats_cudnn(problem, device)
    configs = lambda problem, device: (None,)
    return Kernel(name, unsupported, configs, run, implementation="cudnn", needs=cudnn.unsupported_device)


def _dropout(name: str, run: Callable[..., Any]) -> Kernel:
    choose = lambda problem, device: decide(problem, device, named=True)
    return Kernel(
        name,
        functools.partial(dropout.unsupported, choose),
        lambda problem, device: (dropout.passes(choose, problem, device),),
        run,
    )


# The first that accepts a problem runs it.
_ALL = {
    Op.FORWARD: [_kernel("attention", forward, forward_configs), _cudnn("cudnn", cudnn.forward)],
    Op.BACKWARD: [
        _kernel("attention_gradients", backward, backward_configs),
        _kernel("attention_gradients_wide", backward_wide, backward_wide_configs),
        _cudnn("cudnn_gradients", cudnn.backward),
    ],
}
_ALL_WITH_DROPOUT = {
    Op.FORWARD: [_dropout("attention_twice", dropout.forward)],
    Op.BACKWARD: [_dropout("attention_gradients_twice", dropout.backward)],
}
KERNELS, WITH_DROPOUT = (
    {op: {kernel.name: kernel for kernel in kernels} for op, kernels in known.items()}
    for known in (_ALL, _ALL_WITH_DROPOUT)
)


LOGITS_SHARE = 6  # XLA's logits take at most one part in so many of the device's memory
LEAST_TILE = 512  # queries, or keys, of XLA's tiles


def xla_tile(heads: int, queries: int, keys: int, device: Device, memory: int | None = None) -> tuple[int, int]:
    """Chooses the queries and keys of a tile by XLA: all, while float32 logits of so many heads fit in so many bytes.

    The bytes are a share of the device's by default. A tile has at least `LEAST_TILE` of each.
    """
    pairs = (device.memory // LOGITS_SHARE if memory is None else memory) // (4 * max(heads, 1))
    if queries * keys <= pairs:
        return queries, keys
    rows = min(queries, max(pairs // keys, LEAST_TILE))
    return rows, min(keys, max(pairs // rows, LEAST_TILE))


def decide(
    problem: Attention, device: Device, *, config: ForwardConfig | AnyBackwardConfig | None = None, named: bool = False
) -> Decision:
    """Picks the first kernel for `problem` on `device` that accepts; `config` overrides the choice of the heuristic.

    If kernels are `named`, the user asked for one, even where XLA is faster.
    """
    known = KERNELS if problem.keep is None else WITH_DROPOUT
    insists = named or config is not None
    kernels = {
        name: kernel
        for name, kernel in known[problem.op].items()
        if kernel.implementation == "mosaic_gpu" or not insists
    }
    xla = None if insists else _xla_is_faster(problem, device)
    refused: list[tuple[str, Any]] = [(name, why or xla) for name, why in refusals(kernels, problem, device).items()]
    invariant = problem.batch_invariant and problem.op is Op.FORWARD
    decided = decision(
        problem,
        device,
        next((kernels[name] for name, why in refused if why is None), None),
        tuple(itertools.takewhile(lambda pair: pair[1], refused)),
        config,
        reason="it takes the problem",
        invariant="chosen by the heads' sizes and the kind of call alone" if invariant else None,
    )
    if not isinstance(decided.config, ForwardConfig) or decided.config.splits == 1:
        return decided
    splits, ctas = decided.config.splits, device.sm_count * decided.config.ctas_per_sm
    tiles = _tiles(problem, dataclasses.replace(decided.config, splits=1))
    why = f"the keys go in {splits} splits, because the queries are {tiles} tiles and {ctas} CTAs run"
    return dataclasses.replace(decided, reason=f"{decided.reason}; {why}")
