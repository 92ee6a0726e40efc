"""The one place that chooses: whether a kernel runs an attention call, with which config, and why."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels import hardware
from pallas_kernels.attention import backward, backward_wide, forward, heuristics
from pallas_kernels.attention.problem import Attention, Op
from pallas_kernels.hardware import Device


class Kernel(NamedTuple):
    """A kernel: a module with `unsupported(problem, device)` and `run(problem, config, *operands)`, and its configs."""

    module: Any
    configs: Callable[[Attention, Device], tuple[Any, ...]]  # the best first


KERNELS = {
    Op.FORWARD: {"attention": Kernel(forward, heuristics.forward)},
    Op.BACKWARD: {
        "attention_gradients": Kernel(backward, heuristics.backward),
        "attention_gradients_wide": Kernel(backward_wide, heuristics.backward_wide),
    },
}


@dataclasses.dataclass(frozen=True)
class Decision:
    """The kernel a problem gets, or none, and the reasons in words."""

    problem: Attention
    device: Device
    kernel: str | None  # None: no kernel takes the problem
    config: Any
    reason: str
    declined: tuple[tuple[str, str], ...]  # (kernel, why not)

    def run(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the chosen kernel on operands in the order that `problem` gives."""
        assert self.kernel is not None, self.reason
        return tuple(KERNELS[self.problem.op][self.kernel].module.run(self.problem, self.config, *operands))


def decide(problem: Attention, device: Device, *, config: Any = None, named: bool = False) -> Decision:
    """The first kernel for `problem` on `device` that accepts; `config` overrides the choice of the heuristic.

    If kernels are `named`, the user asked for one, even where XLA is faster.
    """
    declined = []
    xla = None if named or config is not None else heuristics.xla_is_faster(problem, device)
    for name, kernel in KERNELS[problem.op].items():
        why = hardware.supports_kernels(device) or kernel.module.unsupported(problem, device) or xla
        if why is not None:
            declined.append((name, why))
            continue
        source = "asked for"
        if config is None:
            config, source = kernel.configs(problem, device)[0], "by the heuristic"
        if problem.batch_invariant and problem.op is Op.FORWARD and source == "by the heuristic":
            source += "; batch invariant: chosen by the heads' sizes and the kind of call alone"
        reason = f"it takes the problem; config {source}"
        return Decision(problem, device, name, config, reason, tuple(declined))
    return Decision(problem, device, None, None, "no kernel takes the problem", tuple(declined))
