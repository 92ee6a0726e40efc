"""Planted faults: a function runs in another's place, everywhere or in the calls of one caller, and a check rejects it.

`row_mutants`, `attention_mutants` and `jaxsoftmax/mutants` have the tables, `test_mutants` beside each plants them, and
`pallas_kernels/mutants.py` prints them all.
"""

import dataclasses
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels.mosaic import ptx

NUMBERS = "wrong numbers"


@dataclasses.dataclass(frozen=True)
class Fault:
    """`fault(original, *arguments)` runs in the place of `original`, and a check of `case` must reject it.

    With `inside`, it does so only in calls that are written in that function or module, with `barrier`, only in those
    for the CTA's stages of this name, and with `nth`, only in that call of each run of the function.
    """

    words: str
    original: Callable[..., Any] | property
    fault: Callable[..., Any]
    case: Any = None
    rejected_by: str = NUMBERS
    inside: Callable[..., Any] | types.ModuleType | None = None
    barrier: str = ""
    nth: int | None = None

    def line(self, hidden: Collection[str] = ()) -> str:
        """What the fault is, where, and in which case, but for the hidden fields of the case."""
        elsewhere = self.inside and name_of(self.inside) != getattr(self.original, "__module__", "")
        inside = f" in `{name_of(self.inside).rpartition('.')[2]}`" if elsewhere else ""
        barrier = f" on `{self.barrier}`" if self.barrier else ""
        shown = ", ".join(described(self.case, hidden))
        return f"- {self.words}: `{name_of(self.original)}`{inside}{barrier}" + (f" ({shown})" if shown else "")


def name_of(found: Any) -> str:
    """The name of a function, class or module, with its module's."""
    if isinstance(found, types.ModuleType):
        return found.__name__
    found = found.fget if isinstance(found, property) else found
    module = "jax" if found.__module__.startswith("jax.") else found.__module__.rpartition(".")[2]
    return f"{module}.{found.__qualname__}"


def described(case: Any, hidden: Collection[str] = ()) -> Iterator[str]:
    """What a case says, of one of many fields those that are not the default: some by their values alone."""
    if isinstance(case, str) or callable(case):
        yield getattr(case, "__name__", case).removeprefix("check_").removeprefix("test_").replace("_", " ")
        return
    for name, value in case._asdict().items() if case else ():
        if name not in hidden and value != case._field_defaults.get(name):
            alone = name in ("op", "kind") or name not in case._field_defaults
            text = str(getattr(value, "value", value)).replace("_", " ")
            yield text if alone else name.replace("_", " ") + f" {text}" * (value is not True)


class Table(NamedTuple):
    """Faults, and the check that must reject each: by one of the errors that `errors` has for its `rejected_by`."""

    title: str
    faults: tuple[Fault, ...]
    check: Callable[[Fault], None]
    errors: Mapping[str, tuple[type[Exception], ...]] = MappingProxyType({NUMBERS: (AssertionError,)})
    match: str | None = None
    prepare: Callable[[Fault], object] = lambda _: None  # runs before the fault is planted
    fresh: Callable[[], None] = jax.clear_caches  # runs before the check and after it
    hidden: Collection[str] = ()  # fields of cases that the title has

    def lines(self) -> Iterator[str]:
        """The faults as text, by what rejects them if that differs."""
        reasons = list(dict.fromkeys(fault.rejected_by for fault in self.faults))
        for reason in reasons:
            if len(reasons) > 1:
                yield f"\nRejected by {reason}:\n"
            yield from (fault.line(self.hidden) for fault in self.faults if fault.rejected_by == reason)

    def rejects(self, fault: Fault) -> None:
        """Fails unless the check raises what it should by the fault, and nothing else."""
        self.prepare(fault)
        self.fresh()
        errors = self.errors[fault.rejected_by]
        with pytest.MonkeyPatch.context() as patch:
            calls = plant(patch, fault)
            with pytest.raises(errors, match=self.match) as caught:
                self.check(fault)
        self.fresh()
        assert calls
        assert caught.type in errors, f"rejected for another reason than {fault.rejected_by}: {caught.value!r}"


@dataclasses.dataclass
class _Run:
    """A run of the function that a fault is inside of."""

    first: Any  # its first argument
    calls: int = 0  # of the original in it


def plant(patch: pytest.MonkeyPatch, fault: Fault) -> list[Any]:
    """Puts the fault in the original's place, wherever that was imported to; the result collects its calls' runs."""
    runs: list[_Run] = []  # of `inside`, those that have not ended
    calls: list[Any] = []
    of_function = not isinstance(fault.inside, types.ModuleType | None)
    named_inside = isinstance(fault.inside, types.ModuleType) and bool(_names(fault.inside, fault.original))
    if of_function:
        _replace(patch, fault.inside, functools.partial(_followed, runs, fault.inside))
    original = fault.original.fget if isinstance(fault.original, property) else fault.original

    def faulty(*arguments: Any, **keywords: Any) -> Any:
        if not named_inside and not _is_written_in(sys._getframe(1), fault.inside, runs):
            return original(*arguments, **keywords)
        run = runs[-1] if of_function else _Run(None)
        if fault.barrier and not _is_part(arguments[0].full, getattr(_references(run.first), fault.barrier).full):
            return original(*arguments, **keywords)
        run.calls += 1
        if fault.nth not in (None, run.calls - 1):
            return original(*arguments, **keywords)
        calls.append(run)
        return fault.fault(original, *arguments, **keywords)

    _replace(patch, fault.original, faulty, [fault.inside] if named_inside else None)
    return calls


def _followed(runs: list[_Run], original: Callable[..., Any], first: Any, /, *arguments: Any, **keywords: Any) -> Any:
    runs.append(_Run(first))
    try:
        return original(first, *arguments, **keywords)
    finally:
        runs.pop()


def _is_written_in(caller: types.FrameType, inside: Any, runs: list[_Run]) -> bool:
    if not isinstance(inside, types.ModuleType | None):
        name = inspect.unwrap(inside).__code__.co_qualname
        return bool(runs) and caller.f_code.co_qualname.split(".<locals>")[0] == name
    return inside is None or caller.f_globals is vars(inside)


def _replace(patch: pytest.MonkeyPatch, original: Any, new: Callable[..., Any], modules: Any = None) -> None:
    """Sets each name of the original in the modules, or in all of them, and in their classes to `new`."""
    is_property = isinstance(original, property)
    new = functools.wraps(original.fget if is_property else original)(new)
    for module in modules or _modules(original):
        for name in _names(module, original):
            patch.setattr(module, name, new)
        for holder in [x for x in vars(module).values() if isinstance(x, type)]:
            for name in _names(holder, original):
                patch.setattr(holder, name, property(new) if is_property else new)


def _names(holder: Any, original: Any) -> list[str]:
    return [name for name, value in vars(holder).items() if value is original]


def _modules(original: Any) -> list[types.ModuleType]:
    """Those of this library, those of JAX that it calls by their names, and the original's own."""
    own = getattr(original, "__module__", "")
    ours = [x for n, x in list(sys.modules.items()) if n.startswith(("pallas_kernels", "jaxsoftmax")) or n == own]
    return [*ours, jax, jnp, lax, plgpu]


def _references(of: Any) -> types.SimpleNamespace:
    """The references of a CTA, tile, or part of a tile."""
    tile = getattr(of, "tile", of)
    return getattr(tile, "refs", tile)


def _is_part(ref: Any, of: Any) -> bool:
    """Whether a reference is another, or a part of it."""
    cuts, cuts_of = (x.places if isinstance(x, ptx.Part) else x.transforms for x in (ref, of))
    return ref.ref is of.ref and all(map(operator.is_, cuts, cuts_of)) and len(cuts) >= len(cuts_of)
