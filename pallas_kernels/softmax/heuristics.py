"""Which kernel and which config suit a problem, from its sizes alone; each threshold with the measurement behind it."""

import dataclasses
import functools

from pallas_kernels.hardware import Device
from pallas_kernels.softmax.config import GridConfig, NaiveConfig, OnlineConfig, StagedConfig, WarpConfig
from pallas_kernels.softmax.problem import Op, Problem

KIB, MIB = 1024, 1024**2


def priority(problem: Problem, device: Device) -> tuple[str, ...]:
    """The kernels, fastest first; the first one that accepts the problem runs it. Without those slower than XLA."""
    if _row_bytes(problem) > 256 * MIB and _rows(problem) < device.sm_count:
        # Online, a row to a CTA would leave SMs idle (not measured).
        return ("grid",)
    # H200, bf16: N = 50257, 4.02 TB/s in clusters of two and 3.93 in a CTA; 32000, 4.16 and 4.11; 32768, both 4.15.
    plain = problem.op in (Op.SOFTMAX, Op.LOG_SOFTMAX) and problem.where == "none"
    two = plain and _rows(problem) >= 8 * device.sm_count
    if _row_bytes(problem) <= (60 if two else 108) * KIB:
        return ("warp", "block", "cluster", "grid", "online")
    # What is only read need not stay: statistics of bf16, N = 128256, 4.42 TB/s, and 3.62 in a cluster; the copy 4.14.
    if not problem.op.gives_rows and _rows(problem) >= 4 * device.sm_count:
        return ("online",)
    # H200, in clusters and over the grid: f16, N = 1048576, 512 rows 556 and 593 us, 64 rows 84 and 80.
    waves = _rows(problem) * _row_bytes(problem) > 256 * MIB
    if _row_bytes(problem) > (2 * MIB if waves else MIB):
        return ("grid", "cluster", "online")
    return ("cluster", "grid", "online")


def naive(problem: Problem, device: Device) -> tuple[NaiveConfig, ...]:
    """Nothing to choose."""
    return (NaiveConfig(),)


def warp(problem: Problem, device: Device) -> tuple[WarpConfig, ...]:
    """As many threads to a row as give each two vectors or more, up to a warp."""
    # Two loads in flight: bf16, N = 256, 4.25 TB/s with 16 threads to a row and 4.12 with 32, H200. With 32 threads and
    # two rows, bf16 takes 65.31 us, XLA 65.30; with 16, 65.47.
    plain = problem.op in (Op.SOFTMAX, Op.LOG_SOFTMAX) and problem.where == "none"
    if plain and problem.cols == 256 and problem.dtype.itemsize == 2:
        return (WarpConfig(lanes=32, registers=1, tiles=2),)
    vectors = problem.max_vectors
    # Sums of ragged rows cost a thread two instructions for each element of one vector: H100, bf16, us, two vectors and
    # four, N = 81, 226 and 311, 150, 198 and 183, 250, 200 and 182.
    least = 4 if vectors > 16 and not _whole_vectors(problem) else 2
    lanes = min(32, max(1, (1 << (vectors - 1).bit_length()) // least))
    return (WarpConfig(lanes, -(-vectors // lanes)),)


def block(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    """Whole rows, one to a CTA, whose next CTA's copy is the prefetch; of many short ones, two."""
    staged = functools.partial(StagedConfig, ctas=1, stages=1, rows=1)
    two, four = staged(warpgroups=2, registers=2), staged(warpgroups=4, registers=2)
    kib = _row_bytes(problem) / KIB
    many = _rows(problem) >= 16 * device.sm_count
    if kib <= 19 and many and (problem.op.gives_rows or _whole_vectors(problem)):
        # H200, bf16, 4.17 TB/s at N = 6144 where a row to a CTA takes 3.68, 3.51 (2.37) at 5001, 4.00 (2.80) at 8191.
        pair = [dataclasses.replace(config, stages=2, rows=2) for config in (staged(warpgroups=1, registers=2), two)]
        pair.insert(1, dataclasses.replace(pair[0], registers=3))
        return (min(pair[::-1] if _whole_vectors(problem) else pair, key=lambda config: _padded(problem, config)),)
    if kib <= 28 and many:
        # H200: f32, N = 5120, 4.21 TB/s with 1 warpgroup and 3.69 with 2; bf16, 12001, 4.07 and 3.91.
        return (staged(warpgroups=1, registers=2),)
    if kib <= 48:
        # H200: bf16, N = 16384, 4.17 TB/s with 4 vectors at a time and 4.13 with 2, where no step needs checks.
        wide = staged(warpgroups=2, registers=4)
        return (wide, two) if _is_even(problem, wide) else (two,)
    # H200: bf16, N = 32768, 4.12 TB/s with 4 warpgroups and 4.06 with 2. Of four, ragged rows leave room for one CTA
    # a SM, by their registers: N = 32000, 4.08 with 2 and 2.66 with 4.
    return (four, two) if _is_even(problem, four) and kib <= 64 else (two, four)


def cluster(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    """What keeps most of the rows on a SM, several CTAs to each; if that is equal, the most CTAs."""
    if _rows(problem) <= 16:
        # So few rows leave SMs idle. f32, N = 131072, H200: 1 row takes 4.4 us over 16 CTAs, 5.3 over 8;
        # 8 rows 7.2 us with 2 warpgroups, 8.4 with 4.
        return (StagedConfig(ctas=16, warpgroups=2, registers=2, stages=1, rows=1),)
    if (better := _at_powers_of_two(problem)) is not None:
        return (better,)
    # Fitted to 559 times of 50 shapes on an H200: at worst 1.7 % slower than the best that was measured.
    configs = [
        StagedConfig(n, 2, registers, stages=1, rows=1, register_chunks=register_chunks)
        for n in (16, 8, 6, 4, 2)
        for register_chunks in range(_max_register_chunks(problem, n), -1, -1)
        # H200: the cross entropy's gradient, bf16, N = 128256, 4.08 TB/s with 2 vectors at a time and 4.02 with 1.
        # H100: softmax, bf16, N = 300001, 204 us with 2 and 215 with 1.
        for registers in ((2, 1) if problem.op.has_labels or not _whole_vectors(problem) else (1,))
    ]
    configs = [config for config in configs if config.staged(problem.max_vectors) > 0]
    return (max(configs, key=lambda config: min(_resident_bytes(problem, config, device), 197 * KIB)),)


def _at_powers_of_two(problem: Problem) -> StagedConfig | None:
    """For rows of 256 KiB and of 1 MiB, what the fit misses."""
    # H200, us, as fitted and as here: rows of 256 KiB, float32 517 and 513, float16 518 and 512, bfloat16 518 and 521.
    # Of 1 MiB, side by side and spread: float32 1062 and 1040 (with 1 vector at a time and 3 chunks kept 1048),
    # float16 532 and 525, bfloat16 532 and 546. Of 512 KiB, spread: float32 520 and 521, float16 518 and 520.
    plain = problem.op in (Op.SOFTMAX, Op.LOG_SOFTMAX) and problem.where == "none" and _whole_vectors(problem)
    if not plain or problem.dtype == "bfloat16":
        return None
    if _row_bytes(problem) == MIB:
        registers, register_chunks = (2, 1) if problem.dtype == "float32" else (1, 3)
        return StagedConfig(16, 2, registers, stages=1, rows=1, register_chunks=register_chunks, interleaved=True)
    if _row_bytes(problem) == 256 * KIB:
        return StagedConfig(8, 2, registers=1, stages=1, rows=1, register_chunks=2)
    return None


def grid(problem: Problem, device: Device) -> tuple[GridConfig, ...]:
    """32 KiB of operands to a CTA, over 64 MiB a row more, and a lag that L2 holds beside what is written."""
    # f32, N = 262144, H200: a lag of 8 MiB takes 3.52 TB/s, 10 to 12 3.71, 16 3.63, 24 3.03. Where L2 holds all:
    # 64 rows of 131072, 24.7 us with 8 MiB and 22.6 with 16.
    lookahead = (16 if _fits_cache(problem) else 12) * MIB
    # Each block reads what all have found: of 2048 that takes 64 registers a value, of 8192 registers spill.
    ctas = min(max(-(-_row_bytes(problem) // (32 * KIB)), 2), 2048)
    return (GridConfig(ctas=ctas, warpgroups=2, registers=2, lookahead=-(-lookahead // _row_bytes(problem))),)


def online(problem: Problem, device: Device) -> tuple[OnlineConfig, ...]:
    """Enough loads in flight: each doubling of the vectors per step helped."""
    # Statistics of bf16, N = 128256, H200: 4.42 TB/s with 2 warpgroups, 4.30 with 4; with 8 vectors a thread 3.99.
    return (OnlineConfig(warpgroups=4 if problem.op.gives_rows else 2, registers=4),)


def _is_even(problem: Problem, config: StagedConfig) -> bool:
    """Whether rows are a whole number of steps, so that no step needs checks."""
    slice_vectors = config.steps(problem.max_vectors) * config.chunk
    return _whole_vectors(problem) and problem.max_vectors == config.ctas * slice_vectors


def _whole_vectors(problem: Problem) -> bool:
    """Whether rows begin and end with a vector."""
    return problem.cols * problem.dtype.itemsize % 16 == 0


def _fits_cache(problem: Problem) -> bool:
    """Whether the L2 holds all operands."""
    return _rows(problem) * _row_bytes(problem) <= 40 * MIB


def _padded(problem: Problem, config: StagedConfig) -> int:
    """Vectors of a row, or a CTA's slice of it, in whole steps."""
    return config.steps(problem.max_vectors) * config.chunk


def _max_register_chunks(problem: Problem, ctas: int) -> int:
    """Granules of a slice in registers that leave room for two CTAs on a SM, as compiled."""
    # H200: f16, N = 1048576, 3.95 TB/s with 7, where two CTAs fit with 5, 3.80 TB/s; f32, N = 151936, 4.15 with 3 and
    # 3.93 with 1.
    if problem.where != "none" or problem.op.has_labels or not _whole_vectors(problem):
        return 0
    if problem.op.is_linear:
        return 4
    return 7 if problem.dtype.itemsize == 2 and problem.op is Op.SOFTMAX and ctas == 16 else 6


def _resident_bytes(problem: Problem, config: StagedConfig, device: Device) -> float:
    """Bytes of rows on a SM, of up to five CTAs; of one or two, few work while the others wait."""
    # Compiled, softmax takes 28, 32, 47, 64, 83, 98, 124, 128 registers with 0 to 7 chunks in them; f16 67 with 3.
    by_registers = (5, 4, 4, 4 if problem.dtype.itemsize == 4 else 3, 2, 2, 2, 2)[config.register_chunks]
    slice_vectors = problem.operands * config.staged(problem.max_vectors) * config.chunk * 16
    resident = min((device.smem_per_cta + KIB) // (slice_vectors + 4 * KIB), by_registers)
    return {1: 0.5, 2: 1.5}.get(resident, resident) * _row_bytes(problem) / config.ctas


def _rows(problem: Problem) -> int:
    """How many rows to choose for: all there are or, where the choice may not depend on them, those of 64 MiB.

    So many rows of up to 60 KiB get the configs of many, which lose few rows little. Longer ones, of which there are
    seldom thousands, never get what leaves most of the device idle where there are few: a CTA to each row.
    """
    return max(64 * MIB // _row_bytes(problem), 1) if problem.batch_invariant else problem.rows


def _row_bytes(problem: Problem) -> int:
    """What a row's operands take."""
    return problem.operands * problem.max_vectors * 16
