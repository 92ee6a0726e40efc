"""A stand-in for the kernels: what `dispatch` decides for becomes the reference, on whole `[rows, cols]` operands.

With it the primitives take the kernels' path on the CPU. The partitioner cannot look through that path, so where a
stand-in ran on a shard, a kernel would have; `problems` records the pieces it was asked for.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax.interpreters import mlir

from jaxsoftmax import _lowering, _primitives
from pallas_kernels import dispatch
from pallas_kernels.hardware import Device
from pallas_kernels.problem import Op, Problem


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A decision for a kernel that is the reference in disguise."""

    problem: Problem
    kernel: str | None = "stand-in"
    declined: tuple[tuple[str, str], ...] = ()

    def run(self, *operands: jax.Array) -> Any:
        problem = self.problem
        shape = (problem.rows, problem.cols) + (() if problem.inner == 1 else (problem.inner,))
        mask = (problem.cols,) if problem.where == "shared" else shape
        second = () if problem.where == "none" and not problem.op.is_linear else (mask,)
        assert tuple(x.shape for x in operands) == (shape, *second)
        return _lowering.REFERENCE[problem.op](*operands, axes=(1,), scale=problem.scale)


@dataclasses.dataclass
class StandIns:
    problems: list[Problem]
    accepts: Callable[[Problem], bool] = lambda _: True

    def ran(self, op: Op) -> set[tuple[int, int, int]]:
        return {(p.rows, p.cols, p.inner) for p in self.problems if p.op is op}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    """Kernels on the CPU."""
    record = StandIns([])

    def decide(problem: Problem, device: Device, **_: Any) -> StandIn:
        record.problems.append(problem)
        if record.accepts(problem):
            return StandIn(problem)
        return StandIn(problem, None, (("first", "it is not for this"), ("second", "nor this")))

    monkeypatch.setattr(dispatch, "decide", decide)
    for op, primitive in _primitives.BY_OP.items():
        mlir.register_lowering(primitive, functools.partial(_lowering.kernel_rule, op), platform="cpu")
    jax.clear_caches()
    yield record
    for op, primitive in _primitives.BY_OP.items():
        mlir.register_lowering(primitive, functools.partial(_lowering.reference_rule, op), platform="cpu")
    jax.clear_caches()


@pytest.fixture
def cpus() -> list[jax.Device]:
    """Eight devices."""
    return jax.devices("cpu")[:8]
