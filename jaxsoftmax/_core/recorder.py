"""Records what lowering rules choose, for `explain`.

While a recorder is open, a lowering rule says what it chose and, where that is a kernel, lowers to zeros in its place:
the program is never run, and to compile a kernel takes seconds.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Choice:
    """Records the choice of a lowering rule for one application of a primitive.

    Attributes:
        plan: The `Plan`; None if the primitive has no kernel, or the implementation is XLA's by name.
        name: The name of the call in errors, if its implementation is a kernel by name.
        avals: The types of the operands.
        params: The primitive's parameters.
        inside: The choices for the primitives that it is computed by.
        notes: The remarks of its computation.
    """

    plan: Any
    name: str | None
    avals: tuple[Any, ...]
    params: dict[str, Any]
    inside: list["Choice"] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


_OPEN: contextvars.ContextVar[Choice | None] = contextvars.ContextVar("recorder", default=None)


@contextlib.contextmanager
def entered(plan: Any, name: str | None, avals: Any, params: dict[str, Any]) -> Iterator[Choice]:
    """Records a choice; what is chosen until the block ends is inside of it."""
    outer, choice = _OPEN.get(), Choice(plan, name, tuple(avals), params)
    if outer is not None:
        outer.inside.append(choice)
    token = _OPEN.set(choice)
    try:
        yield choice
    finally:
        _OPEN.reset(token)


def is_open() -> bool:
    """Whether choices are recorded."""
    return _OPEN.get() is not None


def note(text: str) -> None:
    """Adds to the notes of the choice that is open, if there is one."""
    if (choice := _OPEN.get()) is not None:
        choice.notes.append(text)
