"""Decides which kernel runs a problem, with which config, and says why."""

import dataclasses
from typing import Any

import jax

from pallas_kernels import hardware
from pallas_kernels.hardware import Device
from pallas_kernels.softmax import grid, heuristics, naive, online, staged, warp
from pallas_kernels.softmax.problem import Problem

# In the order in which each improves on the one before.
_ALL = (naive.KERNEL, warp.KERNEL, staged.BLOCK, online.KERNEL, staged.CLUSTER, grid.KERNEL)
KERNELS = {each.name: each for each in _ALL}


@dataclasses.dataclass(frozen=True)
class Decision:
    """The kernel a problem gets, or none, and the reasons in words."""

    problem: Problem
    device: Device
    kernel: str | None  # the kernel's name; None: no kernel takes the problem
    config: Any
    reason: str
    declined: tuple[tuple[str, str], ...]  # (kernel, why it was not chosen), in ladder order
    bytes_moved: int

    def run(self, *operands: jax.Array) -> Any:
        """Runs the chosen kernel on `[rows, cols]` operands, followed by `[rows]` ones if it has some."""
        assert self.kernel is not None, self.reason
        return KERNELS[self.kernel].run(self.problem, self.config, *operands)


def decide(problem: Problem, device: Device, *, kernel: str | None = None, config: Any = None) -> Decision:
    """Picks the fastest kernel that accepts `problem` on `device`; `kernel` and `config` override the choice."""
    no_device = hardware.supports_kernels(device)
    refusals = {name: no_device or each.unsupported(problem, device) for name, each in KERNELS.items()}
    names = heuristics.priority(problem, device)
    chosen = next((name for name in ((kernel,) if kernel else names) if refusals[name] is None), None)
    if chosen is None:
        left_out = "not asked for" if kernel else "slower than XLA for so few, so long rows"
        declined = tuple((name, why or left_out) for name, why in refusals.items())
        return Decision(problem, device, None, None, "no kernel takes the problem", declined, 0)
    best = KERNELS[chosen]
    source = "by the heuristic" if config is None else "asked for"
    config = best.configs(problem, device)[0] if config is None else config
    declined = tuple(
        (name, why or f"{chosen} is faster for such rows") for name, why in refusals.items() if name != chosen
    )
    reason = "asked for" if kernel else "the fastest kernel that takes such rows"
    if problem.batch_invariant and source == "by the heuristic":
        source += "; batch invariant: chosen by the row's length alone"
    # Where nothing is written there is no pass that reads for it.
    passes = max(best.reads - (not problem.op.gives_rows), 1)
    extra_reads = (passes - 1) * problem.operands * problem.elements * problem.dtype.itemsize
    return Decision(
        problem, device, chosen, config, f"{reason}; config {source}", declined, problem.least_bytes + extra_reads
    )
