"""The tuned figures of each card: `tuned.json` has the numbers that are not the defaults, by their dotted names.

`python -m benchmarks.tune --write` writes them. A card that the file does not have gets the defaults.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

PATH = Path(__file__).with_suffix(".json")
TOPICS = ("attention", "softmax")


def by_card[T](topic: str, default: T) -> dict[str, T]:
    """The figures of a topic for each card in the file."""
    found = {}
    for card, topics in json.loads(PATH.read_text()).items():
        try:
            if unknown := [name for name in topics if name not in TOPICS]:
                raise ValueError(f"got {unknown}, wanted some of {', '.join(TOPICS)}")
            found[card] = replaced(default, topics.get(topic, {}))
        except ValueError as error:
            raise ValueError(f"{PATH}: {card}: {error}") from None
    return found


def numbers(figures: Any) -> dict[str, float]:
    """The numbers among the figures; the name of one in a mapping or a named tuple is dotted, as "rates.64.step"."""
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
