"""Makes cases only where the tests that have them are run: those of GPUs and of compilers take most of collection."""

import re
from collections.abc import Callable, Iterable
from typing import Any

mark_expression = ""  # what `-m` says; conftest.py sets it


def cases_for(mark: str, make: Callable[[], Iterable[Any]]) -> list[Any]:
    """The cases that `make` makes, or none where `-m` leaves tests of this mark out."""
    wanted = re.findall(r"(?<!not )\b(gpu|aot)\b", mark_expression)
    left_out = mark not in wanted if wanted else f"not {mark}" in mark_expression
    return [] if left_out else list(make())
