"""The dispatchers of rows and of attention share this: a kernel, a decision, and how a card's tuned figures are read.

`tuned.json` has the figures of each card that are not the defaults, by their dotted names; a card that it does not have
gets the defaults.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from pallas_kernels import hardware
from pallas_kernels.hardware import Device

TUNED = Path(__file__).with_name("tuned.json")  # written by `python -m benchmarks.tune --write`
TOPICS = ("attention", "softmax")
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
    """The decision for a kernel, with the best of its configs unless one is given.

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


def by_card[T](topic: str, default: T) -> dict[str, T]:
    """Reads a topic's figures by card; `tuned.json` stores only overrides of the defaults."""
    found = {}
    for card, topics in json.loads(TUNED.read_text()).items():
        try:
            if unknown := [name for name in topics if name not in TOPICS]:
                raise ValueError(f"got {unknown}, wanted some of {', '.join(TOPICS)}")
            found[card] = replaced(default, topics.get(topic, {}))
        except ValueError as error:
            raise ValueError(f"{TUNED}: {card}: {error}") from None
    return found


def numbers(figures: Any) -> dict[str, float]:
    """Lists the numbers among the figures; one in a mapping or a named tuple has a dotted name, "rates.64.step"."""
    found = {}
    for name, part in _parts(figures).items():
        found |= {f"{name}.{rest}": number for rest, number in numbers(part).items()}
        if isinstance(part, int | float):
            found[name] = part
    return found


def replaced[T](figures: T, changes: Mapping[str, float]) -> T:
    """The figures with other numbers, which have the types of those that they replace."""
    known = numbers(figures)
    for name, number in changes.items():
        if name not in known:
            raise ValueError(f"no figure has the name {name}")
        if type(number) is not type(known[name]):
            raise ValueError(f"{name} is {number!r}, wanted {type(known[name]).__name__}")
        figures = _with(figures, name.split("."), number)
    return figures


def _parts(figures: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(figures):
        return vars(figures)
    if isinstance(figures, Mapping):
        return {str(name): part for name, part in figures.items()}
    return figures._asdict() if hasattr(figures, "_asdict") else {}


def _with(figures: Any, path: list[str], number: float) -> Any:
    if not path:
        return number
    name, *rest = path
    part = _with(_parts(figures)[name], rest, number)
    if isinstance(figures, Mapping):
        return MappingProxyType({**figures, int(name): part})
    if hasattr(figures, "_replace"):
        return figures._replace(**{name: part})
    return dataclasses.replace(figures, **{name: part})
