"""Decides which kernel runs a problem, with which config, and says why."""

import functools
from typing import Any

from pallas_kernels.decision import Decision, Kernel, decision, refusals
from pallas_kernels.hardware import Device
from pallas_kernels.softmax import grid, heuristics, naive, online, staged, warp
from pallas_kernels.softmax.problem import Problem


def _staged(name: str, choose: staged.Choose) -> Kernel:
    unsupported, configs = functools.partial(staged.unsupported, choose), functools.partial(staged.configs, choose)
    return Kernel(name, unsupported, configs, functools.partial(staged.run, name=name))


# In the order in which each improves on the one before.
_ALL = (
    Kernel("naive", naive.unsupported, heuristics.naive, naive.run, reads=3),
    Kernel("warp", warp.unsupported, heuristics.warp, warp.run),
    _staged("block", heuristics.block),
    Kernel("online", online.unsupported, heuristics.online, online.run, reads=2),
    _staged("cluster", heuristics.cluster),
    Kernel("grid", grid.unsupported, heuristics.grid, grid.run),
)
KERNELS = {each.name: each for each in _ALL}


def decide(problem: Problem, device: Device, *, kernel: str | None = None, config: Any = None) -> Decision:
    """Picks the fastest kernel that accepts `problem` on `device`; `kernel` and `config` override the choice."""
    refused = refusals(KERNELS, problem, device)
    names = (kernel,) if kernel else heuristics.priority(problem, device)
    chosen = next((KERNELS[name] for name in names if refused[name] is None), None)
    if chosen is not None:
        instead = f"{chosen.name} is faster for such rows"
    else:
        instead = "not asked for" if kernel else "slower than XLA for so few, so long rows"
    return decision(
        problem,
        device,
        chosen,
        tuple((name, why or instead) for name, why in refused.items() if chosen is None or name != chosen.name),
        config,
        reason="asked for" if kernel else "the fastest kernel that takes such rows",
        invariant="chosen by the row's length alone" if problem.batch_invariant else None,
        bytes_moved=chosen and _bytes_moved(problem, chosen),
    )


def _bytes_moved(problem: Problem, kernel: Kernel) -> int:
    """What a kernel reads and writes. Where nothing is written there is no pass that reads for it."""
    passes = max(kernel.reads - (not problem.op.gives_rows), 1)
    return problem.least_bytes + (passes - 1) * problem.operands * problem.elements * problem.dtype.itemsize
