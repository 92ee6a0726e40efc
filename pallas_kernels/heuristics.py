"""Which rung and which config suit a problem, from its sizes alone; each threshold with the measurement behind it."""

from pallas_kernels.configs import NaiveConfig, OnlineConfig, StagedConfig, WarpConfig
from pallas_kernels.hardware import Device
from pallas_kernels.problem import Problem

KIB = 1024


def order(problem: Problem, device: Device) -> tuple[str, ...]:
    """The rungs, fastest first; the first one that accepts the problem runs it."""
    # Two blocks on a multiprocessor still beat a cluster: bf16, N = 50257, 3.99 against 3.51 TB/s, H200.
    if _row_bytes(problem) <= 108 * KIB:
        return ("warp", "block", "cluster", "online", "naive")
    return ("warp", "cluster", "online", "block", "naive")


def naive(problem: Problem, device: Device) -> tuple[NaiveConfig, ...]:
    """Nothing to choose."""
    return (NaiveConfig(),)


def warp(problem: Problem, device: Device) -> tuple[WarpConfig, ...]:
    """As many threads to a row as it has vectors, up to a warp."""
    vectors = problem.max_vectors
    lanes = min(32, 1 << (vectors - 1).bit_length())
    return (WarpConfig(lanes, -(-vectors // lanes)),)


def block(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    """One row to a block, no loop: the next block's copies are the prefetch."""
    # bf16, H200: N = 16384 takes 4.10 TB/s with 2 warpgroups and 3.58 with 4; N = 32768, 4.10 and 4.14.
    two = StagedConfig(blocks=1, warpgroups=2, registers=2, slots=1, rows=1)
    four = StagedConfig(blocks=1, warpgroups=4, registers=2, slots=1, rows=1)
    return (four, two) if 48 * KIB < _row_bytes(problem) <= 64 * KIB else (two, four)


def cluster(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    """The fewest blocks that leave room for three of them on a multiprocessor, 64 KiB of operands in each."""
    # bf16, N = 131072, H200: 4 blocks of 64 KiB 4.00 TB/s, 8 of 32 KiB 3.66.
    blocks = min(max(-(-_row_bytes(problem) // (64 * KIB)), 2), 16)
    return (StagedConfig(blocks=blocks, warpgroups=2, registers=2, slots=1, rows=1),)


def online(problem: Problem, device: Device) -> tuple[OnlineConfig, ...]:
    """Enough loads in flight: each doubling of the vectors per step helped."""
    return (OnlineConfig(warpgroups=4, registers=4),)


def _row_bytes(problem: Problem) -> int:
    """What a row's operands take."""
    return problem.operands * problem.max_vectors * 16
