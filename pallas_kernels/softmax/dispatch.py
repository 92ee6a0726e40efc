"""The one place that chooses: which rung of the ladder runs a problem, with which config, and why."""

import dataclasses
from typing import Any

import jax

from pallas_kernels import hardware
from pallas_kernels.hardware import Device
from pallas_kernels.softmax import grid, heuristics, naive, online, staged, warp
from pallas_kernels.softmax.problem import Problem

# In the order in which each improves on the one before.
_RUNGS = (naive.RUNG, warp.RUNG, staged.BLOCK, online.RUNG, staged.CLUSTER, grid.RUNG)
LADDER = {rung.name: rung for rung in _RUNGS}


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

    def run(self, *operands: jax.Array) -> Any:
        """Runs the chosen kernel on `[rows, cols]` operands, followed by `[rows]` ones if it has some."""
        assert self.kernel is not None, self.reason
        return LADDER[self.kernel].run(self.problem, self.config, *operands)


def decide(problem: Problem, device: Device, *, kernel: str | None = None, config: Any = None) -> Decision:
    """Picks the fastest rung that accepts `problem` on `device`; `kernel` and `config` override the choice."""
    no_device = hardware.supports_kernels(device)
    refusals = {name: no_device or rung.unsupported(problem, device) for name, rung in LADDER.items()}
    order = heuristics.order(problem, device)
    chosen = next((name for name in ((kernel,) if kernel else order) if refusals[name] is None), None)
    if chosen is None:
        left_out = "not asked for" if kernel else "slower than XLA for so few, so long rows"
        declined = tuple((name, why or left_out) for name, why in refusals.items())
        return Decision(problem, device, None, None, "no kernel takes the problem", declined, 0)
    rung = LADDER[chosen]
    source = "by the heuristic" if config is None else "asked for"
    config = rung.configs(problem, device)[0] if config is None else config
    declined = tuple(
        (name, why or f"{chosen} is faster for such rows") for name, why in refusals.items() if name != chosen
    )
    reason = "asked for" if kernel else "the fastest rung that takes such rows"
    if problem.batch_invariant and source == "by the heuristic":
        source += "; batch invariant: chosen by the row's length alone"
    # Where nothing is written there is no pass that reads for it.
    passes = max(rung.reads - (not problem.op.gives_rows), 1)
    extra_reads = (passes - 1) * problem.operands * problem.elements * problem.dtype.itemsize
    return Decision(
        problem, device, chosen, config, f"{reason}; config {source}", declined, problem.least_bytes + extra_reads
    )
