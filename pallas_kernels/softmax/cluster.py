"""Rung 4, a row over a cluster: one read and one write again, for rows up to sixteen blocks' shared memory.

Previous rung: online.py (any length, but two reads). Changes: several blocks of one cluster share a row, each staging
its part; every warp sends its (max, sum) into the shared memory of all of them (distributed shared memory).
Traffic: 1 read, 1 write, and 8 bytes from each warp to each block.
"""

import functools

from pallas_kernels.hardware import Device
from pallas_kernels.softmax import heuristics, staged
from pallas_kernels.softmax.config import StagedConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.rung import Rung, declines_any


def unsupported(problem: Problem, device: Device) -> str | None:
    """Rows that do not fit the shared memory of the largest cluster."""
    return declines_any(problem) or staged.does_not_fit(problem, heuristics.cluster(problem, device), device)


def _configs(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    return staged.fitting(problem, heuristics.cluster(problem, device), device)


RUNG = Rung("cluster", unsupported, _configs, functools.partial(staged.run, name="cluster"), reads=1)
