"""Configs that measurements preferred to the heuristics: looked up here, never written by the library."""

from typing import Any

from pallas_kernels.hardware import Device
from pallas_kernels.problem import Problem

_TABLE: dict[tuple[Any, ...], Any] = {}


def config(problem: Problem, device: Device, kernel: str) -> Any | None:
    """The tuned config of a kernel for a problem, if there is one."""
    key = (device.name, kernel, problem.op, problem.rows, problem.cols, problem.dtype.name)
    return _TABLE.get(key)
