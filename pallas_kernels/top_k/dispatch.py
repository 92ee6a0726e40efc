"""Decides whether the kernel selects the k largest of rows, and whether it sorts them too.

`docs/tuning/softmax.md` has the measurements.
"""

from pallas_kernels.decision import Decision, Kernel, decision, refusals
from pallas_kernels.hardware import Device
from pallas_kernels.top_k import radix_select
from pallas_kernels.top_k.radix_select import Config, Problem

MOST_SORTED = 128  # by the kernel, which takes k^2 comparisons of a row


def _configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    return (Config(sorts=problem.ordered and problem.k <= MOST_SORTED),)


_KERNEL = Kernel("radix_select", radix_select.unsupported, _configs, radix_select.run)
KERNELS = {_KERNEL.name: _KERNEL}


def _left_to_xla(problem: Problem) -> str | None:
    if problem.ordered and 2 * problem.k > problem.cols:
        return f"XLA sorts rows of {problem.cols} of which {problem.k} are selected"
    return None


def decide(problem: Problem, device: Device) -> Decision:
    """Decides whether the kernel selects; XLA sorts rows where it does not."""
    kernel = KERNELS["radix_select"]
    why_not = refusals(KERNELS, problem, device)[kernel.name] or _left_to_xla(problem)
    return decision(
        problem,
        device,
        kernel if why_not is None else None,
        () if why_not is None else ((kernel.name, why_not),),
        None,
        reason="it selects without sorting",
        invariant=None,
    )
