"""Records what lowering rules choose, for `explain`.

While a recorder is open, a lowering rule says what it chose and, where that is a kernel, lowers to zeros in its place:
the program is never run, and to compile a kernel takes seconds.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax
from jax.core import AbstractValue, ShapedArray

from pallas_kernels.decision import Decision, Declined

Aval = ShapedArray | jax.ShapeDtypeStruct


class Plan(Protocol):
    """Has the parts of a plan that are read of a choice."""

    @property
    def declined(self) -> Declined: ...
    @property
    def decision(self) -> Decision | None: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


@dataclasses.dataclass
class Choice:
    """Records the choice of a lowering rule for one application of a primitive.

    Attributes:
        plan: The plan; None if the primitive has no kernel, or the implementation is XLA's by name.
        name: The name of the call in errors, if its implementation is a kernel by name.
        avals: The types of the operands.
        params: The primitive's parameters.
        inside: The choices for the primitives that it is computed by.
        notes: The remarks of its computation.
        considered: The decisions on kernels that its computation calls beside the primitives.
    """

    plan: Plan | None
    name: str | None
    avals: tuple[Aval, ...]
    params: dict[str, Any]
    inside: list["Choice"] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    considered: list[Decision] = dataclasses.field(default_factory=list)


_OPEN: contextvars.ContextVar[Choice | None] = contextvars.ContextVar("recorder", default=None)


@contextlib.contextmanager
def entered(
    plan: Plan | None, name: str | None, avals: Iterable[AbstractValue], params: dict[str, Any]
) -> Iterator[Choice]:
    """Records a choice; what is chosen until the block ends is inside of it."""
    arrays = tuple(aval for aval in avals if isinstance(aval, ShapedArray))
    outer, choice = _OPEN.get(), Choice(plan, name, arrays, params)
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


def consider(decision: Decision) -> None:
    """Adds to the decisions of the choice that is open, if there is one."""
    if (choice := _OPEN.get()) is not None:
        choice.considered.append(decision)
