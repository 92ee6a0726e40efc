"""What every process that measures agrees on, without JAX: what is right, and how fast attention is."""

import dataclasses
import importlib.util
import math
import pathlib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NAMES = {1: ("out",), 3: ("d_query", "d_key", "d_value"), 4: ("out", "d_query", "d_key", "d_value")}
ROW_WEIGHT = 1 / 16  # of the worst row of a head: a row that is missing or another's errs by a third at least
SLACK = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-4}  # half of epsilon in 16 bits


def _load(name: str) -> types.ModuleType:
    path = pathlib.Path(__file__).parents[1] / "tests" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks.tests_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# They are the tests' and need NumPy alone; `tests` is no package, so that they are loaded by path.
oracle, errors = _load("oracle"), _load("errors")


@dataclasses.dataclass(frozen=True)
class RowVerdict:
    """The errors of rows, in units of the last place, relative to the true value."""

    error: float
    xla_error: float
    every_row: float

    @property
    def allowed(self) -> float:
        """Where XLA itself overflows, as much as if it were off by one."""
        return 2 * (self.xla_error if math.isfinite(self.xla_error) else 1.0) + 1

    @property
    def right(self) -> bool:
        return self.error <= self.allowed and self.every_row <= 1.0

    def describe(self) -> str:
        return f"error {self.error:.3g} ulp, allowed {self.allowed:.3g}; every row: {self.every_row:.3g} of the bound"

    def entry(self) -> dict[str, Any]:
        """What a result file says of an implementation with this verdict; it is timed if "ok"."""
        found = {"max_error_ulp": round(self.error, 4), "allowed_error_ulp": round(self.allowed, 4)}
        return _status(self) | found


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The relative error of an output of attention, and that of the plain program's in 16 bits."""

    output: str
    error: float
    plain_error: float
    place: str = ""  # the sequence and the head
    slack: float = SLACK["bfloat16"]

    @property
    def allowed(self) -> float:
        return 2 * self.plain_error + self.slack

    @property
    def right(self) -> bool:
        return self.error <= self.allowed  # false for NaN

    def describe(self) -> str:
        place = f" in {self.place}" if self.place else ""
        return f"{self.output}: relative error {self.error:.2e}, allowed {self.allowed:.2e}{place}"

    def as_json(self) -> dict[str, Any]:
        error = self.error if math.isfinite(self.error) else None
        return {"output": self.output, "error": error, "plain_error": self.plain_error, "allowed_error": self.allowed}

    def entry(self) -> dict[str, Any]:
        """What a result file says of an implementation with this verdict; it is timed if "ok"."""
        return _status(self) | self.as_json()


def _status(verdict: RowVerdict | Verdict) -> dict[str, Any]:
    return {"status": "ok"} if verdict.right else {"status": "WRONG", "reason": verdict.describe()}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """One that is wrong, or the one that is nearest to it."""
    verdicts = list(verdicts)
    return next((v for v in verdicts if not v.right), max(verdicts, key=lambda v: v.error / v.allowed))


def worst_head(errors: Mapping[str, Sequence[Sequence[Sequence[float]]]], dtype: str) -> Verdict:
    """The verdict on `[2, batch, heads]` of each output: the errors of what is judged and of the plain program's."""
    return worst(
        Verdict(name, error, plain_error, f"sequence {b}, head {h}", SLACK[dtype])
        for name, both in errors.items()
        for b, of_sequence in enumerate(zip(*both, strict=True))
        for h, (error, plain_error) in enumerate(zip(*of_sequence, strict=True))
    )


def speeds(pass_: str, programs: Mapping[str, Mapping[str, Any]], flops: float) -> dict[str, Any]:
    """Microseconds and TFLOP/s from each program's times; of a backward pass, each round's difference of medians.

    A tree's backward pass has one program, "direct".
    """
    if pass_ == "bwd" and "fwd" in programs:
        rounds = zip(programs["value_and_vjp"]["rounds_us"], programs["fwd"]["rounds_us"], strict=True)
        differences = [both - forward for both, forward in rounds]
        us = programs["value_and_vjp"]["us"] - programs["fwd"]["us"]
        found = {"us": us, "min_us": min(differences), "max_us": max(differences)}
    else:
        program = programs["direct" if pass_ == "bwd" else pass_]
        found = {name: program[name] for name in ("us", "min_us", "max_us")}
    found = {name: round(us, 3) for name, us in found.items()}
    if found["us"] <= 0:  # a difference within the noise, on a machine too loud to measure
        return {"status": "unresolved", "reason": "value and vjp took no longer than forward", "programs": programs}
    found["tflop_per_s"] = round(flops / found["us"] / 1e6, 2)
    if "direct" in programs:
        direct = programs["direct"]["us"]
        found |= {"direct_us": direct, "direct_tflop_per_s": round(flops / direct / 1e6, 2)}
    return found | {"programs": programs}
