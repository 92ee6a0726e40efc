"""The one place that chooses: whether a kernel runs an attention call, with which config, and why."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from pallas_kernels.attention import backward, backward_wide, forward, heuristics
from pallas_kernels.attention.problem import Attention, Op
from pallas_kernels.decision import Decision, Kernel, decision, refusals
from pallas_kernels.hardware import Device


def _kernel(name: str, module: Any, configs: Callable[[Attention, Device], tuple[Any, ...]]) -> Kernel:
    # `run` is looked up when it is called, for tests that put faulty code in a module.
    return Kernel(name, module.unsupported, configs, lambda *arguments: module.run(*arguments))


# The first that accepts a problem runs it.
_ALL = {
    Op.FORWARD: [_kernel("attention", forward, heuristics.forward_configs)],
    Op.BACKWARD: [
        _kernel("attention_gradients", backward, heuristics.backward_configs),
        _kernel("attention_gradients_wide", backward_wide, heuristics.backward_wide_configs),
    ],
}
KERNELS = {op: {kernel.name: kernel for kernel in kernels} for op, kernels in _ALL.items()}


def decide(problem: Attention, device: Device, *, config: Any = None, named: bool = False) -> Decision:
    """The first kernel for `problem` on `device` that accepts; `config` overrides the choice of the heuristic.

    If kernels are `named`, the user asked for one, even where XLA is faster.
    """
    kernels = KERNELS[problem.op]
    xla = None if named or config is not None else heuristics.xla_is_faster(problem, device)
    refused: list[tuple[str, Any]] = [(name, why or xla) for name, why in refusals(kernels, problem, device).items()]
    invariant = problem.batch_invariant and problem.op is Op.FORWARD
    found = decision(
        problem,
        device,
        next((kernels[name] for name, why in refused if why is None), None),
        tuple(itertools.takewhile(lambda pair: pair[1], refused)),
        config,
        reason="it takes the problem",
        invariant="chosen by the heads' sizes and the kind of call alone" if invariant else None,
    )
    why = None if found.config is None else heuristics.why_split(problem, found.config, device)
    return found if why is None else dataclasses.replace(found, reason=f"{found.reason}; {why}")
