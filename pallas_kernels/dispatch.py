"""The one place that chooses: which rung of the ladder runs a problem, with which config, and why."""

import dataclasses
from typing import Any

import jax

from pallas_kernels import hardware, softmax
from pallas_kernels.hardware import Device
from pallas_kernels.monoid import Stats
from pallas_kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Decision:
    """The kernel a problem gets, or none, and the reasons in words."""

    problem: Problem
    device: Device
    kernel: str | None  # the rung's name; None: no kernel takes the problem
    config: Any
    reason: str
    declined: tuple[tuple[str, str], ...]  # (rung, why it was not chosen), in ladder order
    bytes_moved: int

    def run(self, *operands: jax.Array) -> jax.Array | Stats:
        """Runs the chosen kernel on `[rows, cols]` operands (`[rows, cols, inner]` when `inner > 1`)."""
        assert self.kernel is not None, self.reason
        return softmax.LADDER[self.kernel].run(self.problem, self.config, *operands)


def decide(problem: Problem, device: Device, *, kernel: str | None = None, config: Any = None) -> Decision:
    """Picks the fastest rung that accepts `problem` on `device`; `kernel` and `config` override the choice."""
    declined = []
    why_no_device = hardware.supports_kernels(device)
    for rung in softmax.LADDER.values():
        why = why_no_device or rung.unsupported(problem, device)
        if why is not None:
            declined.append((rung.name, why))
    return Decision(problem, device, None, None, "no kernel yet", tuple(declined), 0)
