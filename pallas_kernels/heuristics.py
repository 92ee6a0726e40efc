"""Which rung and which config suit a problem, from its sizes alone; each threshold with the measurement behind it."""

from pallas_kernels.configs import NaiveConfig, OnlineConfig, StagedConfig, WarpConfig
from pallas_kernels.hardware import Device
from pallas_kernels.problem import Problem

KIB = 1024


def order(problem: Problem, device: Device) -> tuple[str, ...]:
    """The rungs, fastest first; the first one that accepts the problem runs it."""
    if _row_bytes(problem) <= 72 * KIB:
        return ("warp", "block", "cluster", "online", "naive")
    return ("warp", "cluster", "block", "online", "naive")


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
    warpgroups = 2 if _row_bytes(problem) <= 32 * KIB else 4
    return (StagedConfig(blocks=1, warpgroups=warpgroups, registers=2, slots=1, rows=1),)


def cluster(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    """The fewest blocks that leave room for three of them on a multiprocessor."""
    blocks = 2
    while blocks < 16 and _row_bytes(problem) / blocks > 66 * KIB:
        blocks *= 2
    return (StagedConfig(blocks=blocks, warpgroups=4, registers=2, slots=1, rows=1),)


def online(problem: Problem, device: Device) -> tuple[OnlineConfig, ...]:
    """Enough loads in flight: each doubling of the vectors per step helped."""
    return (OnlineConfig(warpgroups=4, registers=4),)


def _row_bytes(problem: Problem) -> int:
    """What a row's operands take."""
    return problem.operands * problem.max_vectors * 16
