"""Rung 2, block-reduced softmax: one read and one write, for rows that fit the shared memory of a block.

Previous rung: warp.py (a row in the registers of a warp). Changes: a row is staged in shared memory by a block of
several warpgroups, whose warps merge their (max, sum) through it.
Traffic: 1 read, 1 write.
"""

import functools

from pallas_kernels.hardware import Device
from pallas_kernels.softmax import heuristics, staged
from pallas_kernels.softmax.config import StagedConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.rung import Rung, declines_any


def unsupported(problem: Problem, device: Device) -> str | None:
    """Rows that do not fit a block's shared memory."""
    return declines_any(problem) or staged.does_not_fit(problem, heuristics.block(problem, device), device)


def _configs(problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    return staged.fitting(problem, heuristics.block(problem, device), device)


RUNG = Rung("block", unsupported, _configs, functools.partial(staged.run, name="block"), reads=1)
