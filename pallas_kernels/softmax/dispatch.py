"""Decides which kernel runs a problem, with which config, from its sizes alone, and says why.

`Thresholds` holds the tuned figures. `docs/tuning/softmax.md` has the measurements behind them, under their names.
"""

import dataclasses
import functools

from pallas_kernels.decision import Decision, Kernel, decision, refusals
from pallas_kernels.hardware import Device
from pallas_kernels.softmax import grid, naive, online, reference, staged, warp
from pallas_kernels.softmax.grid import GridConfig
from pallas_kernels.softmax.kernel import Config
from pallas_kernels.softmax.naive import NaiveConfig
from pallas_kernels.softmax.online import OnlineConfig
from pallas_kernels.softmax.problem import Op, Problem
from pallas_kernels.softmax.staged import StagedConfig
from pallas_kernels.softmax.warp import WarpConfig

KIB, MIB = 1024, 1024**2

# Rows of (bytes, dtype) for which another config than that of `cluster`'s fit is faster.
_POWERS_OF_TWO = (
    (MIB, "float32", StagedConfig(16, 2, 2, stages=1, rows=1, register_chunks=1, interleaved=True)),
    (MIB, "float16", StagedConfig(16, 2, 1, stages=1, rows=1, register_chunks=3, interleaved=True)),
    (256 * KIB, "float32", StagedConfig(8, 2, 1, stages=1, rows=1, register_chunks=2)),
    (256 * KIB, "float16", StagedConfig(8, 2, 1, stages=1, rows=1, register_chunks=2)),
)


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The tuned figures. A row's bytes are those of all its operands."""

    # Which kernel.
    block_bytes: int = 108 * KIB  # longer rows leave a single CTA
    block_bytes_of_many: int = 60 * KIB  # the same where plain rows are many
    many_rows_per_sm: int = 8
    online_rows_per_sm: int = 4  # with so many rows, results without rows are computed online
    cluster_bytes: int = MIB  # longer rows go over the grid
    cluster_bytes_in_waves: int = 2 * MIB  # the same where the operands have more bytes than `wave_bytes`
    wave_bytes: int = 256 * MIB
    online_bytes: int = 256 * MIB  # longer rows go over the grid or, where they are fewer than SMs, to XLA
    fused_cols: int = 16384  # of longer rows log_softmax has the statistics from a kernel

    # Where XLA is faster, see `_left_to_xla`.
    stats_cols: int = 12
    loss_cols: int = 16
    gradient_cols: int = 12
    gradient_rows: int = 40
    gradient_rows_cols: int = 256
    nearly_narrow_cols: int = 14
    narrow_cols: int = 32
    small_elements: int = 2**19
    small_cols: int = 8192
    few_rows_cols: tuple[int, int] = (1536, 5120)

    # warp: how many vectors a thread has at least.
    warp_vectors: int = 2
    warp_vectors_ragged: int = 4  # of rows that are not whole vectors and longer than `warp_ragged_vectors`
    warp_ragged_vectors: int = 16
    warp_paired_cols: int = 256  # such 16-bit rows are loaded two at a time

    # block.
    block_rows_per_sm: int = 16  # with so many rows, short rows get fewer warpgroups
    block_paired_bytes: int = 19 * KIB  # up to this, a CTA handles two rows
    block_one_warpgroup_bytes: int = 28 * KIB
    block_two_warpgroups_bytes: int = 48 * KIB
    block_even_bytes: int = 64 * KIB  # up to this, rows of whole steps get four warpgroups first

    # cluster.
    cluster_few_rows: int = 16  # so few rows get the largest cluster
    cluster_sizes: tuple[int, ...] = (16, 8, 6, 4, 2)
    resident_bytes: int = 197 * KIB  # more bytes of rows on an SM gain nothing
    register_chunks: int = 6
    register_chunks_16bit: int = 7  # of 16-bit softmax in clusters of sixteen
    register_chunks_linear: int = 4
    ctas_by_chunks_32bit: tuple[int, ...] = (5, 4, 4, 4, 2, 2, 2, 2, 2)  # CTAs an SM, by the chunks in registers
    ctas_by_chunks_16bit: tuple[int, ...] = (5, 4, 4, 3, 2, 2, 2, 2, 2)
    powers_of_two: tuple[tuple[int, str, StagedConfig], ...] = _POWERS_OF_TWO

    # grid.
    grid_cta_bytes: int = 32 * KIB
    grid_ctas: int = 2048  # at most: more statistics than this spill the registers of a CTA that reads them
    lookahead_bytes: int = 12 * MIB
    lookahead_bytes_in_l2: int = 16 * MIB  # the same where the operands have at most `in_l2_bytes`
    in_l2_bytes: int = 40 * MIB

    # online.
    online_warpgroups: int = 4
    online_warpgroups_of_stats: int = 2
    online_registers: int = 4

    batch_invariant_bytes: int = 64 * MIB


THRESHOLDS = Thresholds()


def priority(problem: Problem, device: Device) -> tuple[str, ...]:
    """Orders kernels, the fastest first: the first that accepts the problem runs it, unless XLA is faster than all."""
    t, rows, row_bytes = THRESHOLDS, _rows(problem), _row_bytes(problem)
    if row_bytes > t.online_bytes and rows < device.sm_count:
        return ("grid",)
    if problem.op.takes_stats:
        return ("online",)
    many = _is_plain(problem) and rows >= t.many_rows_per_sm * device.sm_count
    if row_bytes <= (t.block_bytes_of_many if many else t.block_bytes):
        return ("warp", "block", "cluster", "grid", "online")
    if not problem.op.gives_rows and rows >= t.online_rows_per_sm * device.sm_count:
        return ("online",)
    if row_bytes > (t.cluster_bytes_in_waves if rows * row_bytes > t.wave_bytes else t.cluster_bytes):
        return ("grid", "cluster", "online")
    return ("cluster", "grid", "online")


def naive_configs(problem: Problem, device: Device) -> tuple[NaiveConfig, ...]:
    """Returns the one config: there is nothing to choose."""
    return (NaiveConfig(),)


def warp_configs(problem: Problem, device: Device) -> tuple[WarpConfig, ...]:
    """Shares a row among as many threads as have two vectors each, or four of a ragged row, up to a warp."""
    t, vectors = THRESHOLDS, problem.max_vectors
    if _is_plain(problem) and problem.cols == t.warp_paired_cols and problem.dtype.itemsize == 2:
        return (WarpConfig(lanes=32, registers=1, tiles=2),)
    # The sum of a ragged row costs each thread two instructions for each element of one vector.
    ragged = vectors > t.warp_ragged_vectors and not _whole_vectors(problem)
    least = t.warp_vectors_ragged if ragged else t.warp_vectors
    lanes = min(32, max(1, (1 << (vectors - 1).bit_length()) // least))
    return (WarpConfig(lanes, -(-vectors // lanes)),)


def block_configs(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    """Gives a CTA one row, so that the next CTA's copy is the prefetch, or two of many short rows."""
    t, row_bytes = THRESHOLDS, _row_bytes(problem)
    staged = functools.partial(StagedConfig, ctas=1, stages=1, rows=1)
    one, two, four = (staged(warpgroups=n, registers=2) for n in (1, 2, 4))
    many = _rows(problem) >= t.block_rows_per_sm * device.sm_count
    if row_bytes <= t.block_paired_bytes and many and (problem.op.gives_rows or _whole_vectors(problem)):
        pair = [dataclasses.replace(config, stages=2, rows=2) for config in (one, two)]
        pair.insert(1, dataclasses.replace(pair[0], registers=3))
        return (min(pair[::-1] if _whole_vectors(problem) else pair, key=lambda config: _padded(problem, config)),)
    if row_bytes <= t.block_one_warpgroup_bytes and many:
        return (one,)
    if row_bytes <= t.block_two_warpgroups_bytes:
        wide = staged(warpgroups=2, registers=4)
        return (wide, two) if _is_even(problem, wide) else (two,)
    # With four warpgroups, the registers of ragged rows leave room for one CTA on an SM.
    return (four, two) if _is_even(problem, four) and row_bytes <= t.block_even_bytes else (two, four)


def cluster_configs(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    """Chooses the config that keeps most bytes of rows on an SM, in several CTAs; of equal ones, the most CTAs."""
    t = THRESHOLDS
    if _rows(problem) <= t.cluster_few_rows:
        # So few rows leave SMs idle.
        return (StagedConfig(ctas=16, warpgroups=2, registers=2, stages=1, rows=1),)
    if (better := _at_powers_of_two(problem)) is not None:
        return (better,)
    configs = [
        StagedConfig(n, 2, registers, stages=1, rows=1, register_chunks=register_chunks)
        for n in t.cluster_sizes
        for register_chunks in range(_max_register_chunks(problem, n), -1, -1)
        for registers in ((2, 1) if problem.op.has_labels or not _whole_vectors(problem) else (1,))
    ]
    configs = [config for config in configs if config.staged(problem.max_vectors) > 0]
    return (max(configs, key=lambda config: min(_resident_bytes(problem, config, device), t.resident_bytes)),)


def _at_powers_of_two(problem: Problem) -> StagedConfig | None:
    """Looks up the config of rows whose length the fit misses."""
    if not _is_plain(problem) or not _whole_vectors(problem):
        return None
    size = _row_bytes(problem), problem.dtype.name
    return next((config for *at, config in THRESHOLDS.powers_of_two if tuple(at) == size), None)


def grid_configs(problem: Problem, device: Device) -> tuple[GridConfig, ...]:
    """Gives a CTA 32 KiB of operands, or more of very long rows; L2 holds the lookahead beside what is written."""
    t, row_bytes = THRESHOLDS, _row_bytes(problem)
    lookahead = t.lookahead_bytes_in_l2 if _fits_l2(problem) else t.lookahead_bytes
    ctas = min(max(-(-row_bytes // t.grid_cta_bytes), 2), t.grid_ctas)
    return (GridConfig(ctas=ctas, warpgroups=2, registers=2, lookahead=-(-lookahead // row_bytes)),)


def online_configs(problem: Problem, device: Device) -> tuple[OnlineConfig, ...]:
    """Chooses enough loads in flight."""
    t = THRESHOLDS
    warpgroups = t.online_warpgroups if problem.op.gives_rows else t.online_warpgroups_of_stats
    return (OnlineConfig(warpgroups=warpgroups, registers=t.online_registers),)


def _is_plain(problem: Problem) -> bool:
    """Says whether the operation is a forward pass without a mask."""
    return problem.op in (Op.SOFTMAX, Op.LOG_SOFTMAX) and problem.where == "none"


def _is_even(problem: Problem, config: StagedConfig) -> bool:
    """Says whether rows are a whole number of steps, so that no step needs checks."""
    return _whole_vectors(problem) and problem.max_vectors == config.ctas * _padded(problem, config)


def _whole_vectors(problem: Problem) -> bool:
    """Says whether rows begin and end with a vector."""
    return problem.cols * problem.dtype.itemsize % 16 == 0


def _fits_l2(problem: Problem) -> bool:
    return _rows(problem) * _row_bytes(problem) <= THRESHOLDS.in_l2_bytes


def _padded(problem: Problem, config: StagedConfig) -> int:
    """Counts the vectors of a row, or of a CTA's slice of it, in whole steps."""
    return config.steps(problem.max_vectors) * config.chunk


def _max_register_chunks(problem: Problem, ctas: int) -> int:
    """Says how many chunks of a slice in registers leave room for two CTAs on an SM, as compiled."""
    t = THRESHOLDS
    if problem.where != "none" or problem.op.has_labels or not _whole_vectors(problem):
        return 0
    if problem.op.is_linear:
        return t.register_chunks_linear
    narrow = problem.dtype.itemsize == 2 and problem.op is Op.SOFTMAX and ctas == 16
    return t.register_chunks_16bit if narrow else t.register_chunks


def _resident_bytes(problem: Problem, config: StagedConfig, device: Device) -> float:
    """Counts bytes of rows on an SM, of up to five CTAs; one or two count less, as few work while the others wait."""
    t = THRESHOLDS
    by_chunks = t.ctas_by_chunks_32bit if problem.dtype.itemsize == 4 else t.ctas_by_chunks_16bit
    staged = problem.operands * config.staged(problem.max_vectors) * config.chunk * 16
    resident = min((device.smem_per_cta + KIB) // (staged + 4 * KIB), by_chunks[config.register_chunks])
    return {1: 0.5, 2: 1.5}.get(resident, resident) * _row_bytes(problem) / config.ctas


def _rows(problem: Problem) -> int:
    """Counts the rows to choose for: all there are or, where the choice may not depend on them, as many as 64 MiB hold.

    So many rows of up to 60 KiB get the configs of many, which lose few rows little. Longer ones, of which there are
    seldom thousands, never get what leaves most of the device idle where there are few: a CTA to each row.
    """
    if not problem.batch_invariant:
        return problem.rows
    return max(THRESHOLDS.batch_invariant_bytes // _row_bytes(problem), 1)


def _row_bytes(problem: Problem) -> int:
    return problem.operands * problem.max_vectors * 16


def _staged(name: str, choose: staged.Choose) -> Kernel:
    unsupported, configs = functools.partial(staged.unsupported, choose), functools.partial(staged.configs, choose)
    return Kernel(name, unsupported, configs, functools.partial(staged.run, name=name))


# In the order in which each improves on the one before.
_ALL = (
    Kernel("naive", naive.unsupported, naive_configs, naive.run, reads=3),
    Kernel("warp", warp.unsupported, warp_configs, warp.run),
    _staged("block", block_configs),
    Kernel("online", online.unsupported, online_configs, online.run, reads=2),
    _staged("cluster", cluster_configs),
    Kernel("grid", functools.partial(grid.unsupported, grid_configs), grid_configs, grid.run),
)
KERNELS = {each.name: each for each in _ALL}


def _left_to_xla(problem: Problem, device: Device) -> str | None:
    """Says why XLA computes such rows faster than any kernel; None where a kernel is faster."""
    t, op, cols, narrow = THRESHOLDS, problem.op, problem.cols, problem.dtype.itemsize == 2
    if problem.where == "full":
        if op is Op.SOFTMAX and cols <= t.fused_cols:
            return "XLA reads such rows and their mask once, in vectors; a kernel reads masks byte by byte"
        return None
    short = {Op.STATS: t.stats_cols, Op.CROSS_ENTROPY: t.loss_cols, Op.CROSS_ENTROPY_GRADIENT: t.gradient_cols}
    by_threads = reference.by_state((problem.rows, cols), (1,), problem.dtype.itemsize)
    if cols <= short.get(op, 0) or (op not in short and by_threads):
        return "one thread of XLA's reads so short a row"
    if op is Op.CROSS_ENTROPY_GRADIENT and problem.rows <= t.gradient_rows and cols >= t.gradient_rows_cols:
        return "XLA shares so few rows among more SMs"
    rows_alone = op in (Op.SOFTMAX, Op.LOG_SOFTMAX) and t.nearly_narrow_cols <= cols <= t.narrow_cols
    if narrow and (rows_alone or (op.gives_rows and t.nearly_narrow_cols <= cols < 16)):
        return "XLA has fewer instructions for such rows"
    is_small = problem.elements <= t.small_elements and cols <= t.small_cols
    few = problem.rows <= 2 * device.sm_count
    if op is Op.SOFTMAX and is_small and (not narrow or (few and not _whole_vectors(problem))):
        return "XLA starts sooner on so few elements"
    least, most = t.few_rows_cols
    forward = op is Op.CROSS_ENTROPY or (narrow and op in (Op.SOFTMAX, Op.LOG_SOFTMAX))
    if few and forward and least <= cols <= most:
        return "XLA's blocks read so few rows sooner than a CTA that waits for all of its row"
    return None


_READS_ONCE = "XLA reads such rows once, and fuses them with what consumes the result"
_STATISTICS = "it finds the rows' statistics, and XLA computes the rest, which it fuses with what consumes the result"


def decide(
    problem: Problem, device: Device, *, kernel: str | None = None, config: Config | None = None, alone: bool = False
) -> Decision:
    """Picks what runs `problem` on `device` fastest; `kernel` and `config` override the choice of a kernel.

    Programs nearly always compute from log_softmax, and from its derivatives, what XLA would fuse with them. Unless a
    kernel is asked for, or is to run `alone`, or bits may not depend on the batch, XLA computes these: all of float32
    rows that it reads once, and of long rows what follows from the statistics, for whose problem the decision is.
    """
    decided = _kernel_for(problem, device, kernel, config)
    if decided.chosen is None or kernel or alone or problem.batch_invariant:
        return decided
    if (why := _left_to_xla(problem, device)) is not None:
        return _by_xla(problem, device, why)
    if not problem.op.is_log_softmax:
        return decided
    if problem.cols > THRESHOLDS.fused_cols:
        stats = _kernel_for(dataclasses.replace(problem, op=Op.STATS), device)
        return decided if stats.chosen is None else dataclasses.replace(stats, reason=f"{_STATISTICS}; {stats.reason}")
    if problem.dtype.itemsize == 4:
        return _by_xla(problem, device, _READS_ONCE)
    return decided


def _by_xla(problem: Problem, device: Device, why: str) -> Decision:
    declined = {name: reason or why for name, reason in refusals(KERNELS, problem, device).items()}
    return Decision(problem, device, None, None, why, tuple(declined.items()))


def _kernel_for(problem: Problem, device: Device, kernel: str | None = None, config: Config | None = None) -> Decision:
    """Picks the fastest kernel that accepts `problem`."""
    refused = refusals(KERNELS, problem, device)
    names = (kernel,) if kernel else priority(problem, device)
    chosen = next((KERNELS[name] for name in names if refused[name] is None), None)
    if chosen is not None:
        instead = f"{chosen.name} is faster for such rows"
    else:
        instead = "not asked for" if kernel else "slower than XLA for so few, so long rows"
    return decision(
        problem,
        device,
        chosen,
        tuple((name, why or instead) for name, why in refused.items() if chosen is None or name != chosen.name),
        config,
        reason="asked for" if kernel else "the fastest kernel that takes such rows",
        invariant="chosen by the row's length alone" if problem.batch_invariant else None,
        bytes_moved=chosen and _bytes_moved(problem, chosen),
    )


def _bytes_moved(problem: Problem, kernel: Kernel) -> int:
    """Counts the bytes that a kernel reads and writes. Where nothing is written there is no pass that reads for it."""
    passes = max(kernel.reads - (not problem.op.gives_rows), 1)
    return problem.least_bytes + (passes - 1) * problem.operands * problem.elements * problem.dtype.itemsize
