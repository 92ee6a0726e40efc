"""The dispatchers of rows and of attention share this: a kernel, and a decision."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels import hardware
from pallas_kernels.hardware import Device

Declined = tuple[tuple[str, str], ...]  # (kernel, why it was not chosen), in the order of the kernels


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One algorithm."""

    name: str
    unsupported: Callable[[Any, Device], str | None]  # of a problem; the reason, in words
    configs: Callable[[Any, Device], tuple[Any, ...]]  # the heuristic's choice first
    run: Callable[..., Any]  # run(problem, config, *operands)
    reads: int = 1  # passes over each operand in global memory
    implementation: str = "mosaic_gpu"  # or "cudnn": a library's kernel
    needs: Callable[[Device], str | None] = hardware.supports_kernels  # why a device cannot run it


@dataclasses.dataclass(frozen=True)
class Decision:
    """The kernel a problem gets, or none, and the reasons in words."""

    problem: Any
    device: Device
    chosen: Kernel | None  # None: no kernel takes the problem
    config: Any
    reason: str
    declined: Declined
    bytes_moved: int | None = None  # None: not counted

    @property
    def kernel(self) -> str | None:
        """The kernel's name."""
        return self.chosen and self.chosen.name

    @property
    def implementation(self) -> str:
        """Says which implementation runs the problem: "mosaic_gpu", "cudnn" or "xla"."""
        return "xla" if self.chosen is None else self.chosen.implementation

    def run(self, *operands: jax.Array) -> Any:
        """Runs the chosen kernel on operands in the order that `problem` gives."""
        assert self.chosen is not None, self.reason
        return self.chosen.run(self.problem, self.config, *operands)


def refusals(kernels: Mapping[str, Kernel], problem: Any, device: Device) -> dict[str, str | None]:
    """Says why each kernel declines a problem; None where it accepts."""
    return {name: kernel.needs(device) or kernel.unsupported(problem, device) for name, kernel in kernels.items()}


def decision(
    problem: Any,
    device: Device,
    chosen: Kernel | None,
    declined: Declined,
    config: Any,
    *,
    reason: str,
    invariant: str | None,
    bytes_moved: int | None = None,
) -> Decision:
    """Makes the decision for a kernel, with the best of its configs unless one is given.

    `invariant` says what a config depends on if it may not depend on the batch.
    """
    if chosen is None:
        return Decision(problem, device, None, None, "no kernel takes the problem", declined)
    source = "asked for"
    if config is None:
        config, source = chosen.configs(problem, device)[0], "by the heuristic"
        if invariant is not None:
            source += f"; batch invariant: {invariant}"
    return Decision(problem, device, chosen, config, f"{reason}; config {source}", declined, bytes_moved)
