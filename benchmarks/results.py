"""What every process that measures agrees on, without JAX: what is right, how fast it is, and result files.

A result file has a header and records; what is asked of them is the newest measurement of each case, and comparisons.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import platform
import re
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

FOLDER = pathlib.Path(__file__).parent / "results"
CARD = "h200"  # the folder of the card that every table but attention's is about
KERNEL = "kernel:"  # before the name of a kernel that is measured without the choice
ROW_LIBRARIES = ("torch", "torch_compile", "quack", "liger")
ATTENTION_LIBRARIES = ("fa4",)
RIVALS = ("cudnn", "mgpu", "tokamax", "fa4")  # XLA is no rival in attention, because its scores are in memory
NOT_MEASURED = "*Not measured yet: no committed result file has these cases.*"

NAMES = {1: ("out",), 3: ("d_query", "d_key", "d_value"), 4: ("out", "d_query", "d_key", "d_value")}
ROW_WEIGHT = 1 / 16  # of the worst row of a head: a row that is missing or another's errs by a third at least
SLACK = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-4}  # half of epsilon in 16 bits

_FLOAT32_ULPS = {"float16": 2**13, "bfloat16": 2**16, "float32": 1}  # one unit in the last place, in float32's
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "nvidia-cudnn-cu13", "nvidia-nvjitlink"),
    *("tokamax", "quack-kernels", "liger-kernel"),
)


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
class Verdict:
    """An error and XLA's, of an output of attention relative to its size, of rows in units of the last place."""

    error: float
    xla_error: float
    slack: float
    output: str = ""  # of attention
    place: str = ""  # its sequence and head
    every_row: float = 0.0  # of rows, the largest deviation on the device as a share of the bound

    @property
    def allowed(self) -> float:
        return 2 * self.xla_error + self.slack

    @property
    def right(self) -> bool:
        return self.error <= self.allowed and self.every_row <= 1.0  # false for NaN

    def describe(self) -> str:
        if self.output:
            return f"{self.output}: relative error {self.error:.2e}, allowed {self.allowed:.2e} in {self.place}"
        return f"error {self.error:.3g} ulp, allowed {self.allowed:.3g}; every row: {self.every_row:.3g} of the bound"

    def entry(self) -> dict[str, Any]:
        """What a result file says of an implementation with this verdict; it is timed if "ok"."""
        status = {"status": "ok"} if self.right else {"status": "WRONG", "reason": self.describe()}
        if not self.output:
            return status | {"max_error_ulp": round(self.error, 4), "allowed_error_ulp": round(self.allowed, 4)}
        error = self.error if math.isfinite(self.error) else None
        errors = {"error": error, "plain_error": self.xla_error, "allowed_error": self.allowed}
        return status | {"output": self.output} | errors


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """One that is wrong, or the one that is nearest to it."""
    verdicts = list(verdicts)
    return next((v for v in verdicts if not v.right), max(verdicts, key=lambda v: v.error / v.allowed))


def worst_head(errors: Mapping[str, Sequence[Sequence[Sequence[float]]]], dtype: str) -> Verdict:
    """The verdict on `[2, batch, heads]` of each output: the errors of what is judged and of the plain program's."""
    return worst(
        Verdict(error, xla_error, SLACK[dtype], name, f"sequence {b}, head {h}")
        for name, both in errors.items()
        for b, of_sequence in enumerate(zip(*both, strict=True))
        for h, (error, xla_error) in enumerate(zip(*of_sequence, strict=True))
    )


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and percentiles of microseconds."""
    import numpy as np

    low, p20, p50, p80, high = np.percentile(samples, (0, 20, 50, 80, 100)).round(3).tolist()
    return {"us": p50, "min_us": low, "max_us": high, "p20_us": p20, "p80_us": p80}


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


@dataclasses.dataclass(frozen=True)
class Run:
    """A result file of attention that has times of "ours"; `repeat` counts the runs before it with the same setting."""

    header: Mapping[str, Any]
    records: Mapping[str, Record]
    repeat: int = 0

    @property
    def card(self) -> str:
        """The card in a word: "H100"."""
        return self.header["device"]["name"].removeprefix("NVIDIA ").split()[0]

    @property
    def jax(self) -> str:
        return self.header["versions"]["jax"]

    @property
    def seed(self) -> int:
        return self.header.get("seed", 0)

    @property
    def day(self) -> str:
        return self.header["timestamp"][:10]

    @property
    def commit(self) -> str:
        return str(self.header["commit"])[:12]

    @property
    def label(self) -> str:
        return f"{self.card}, JAX {self.jax}" + (", again" * self.repeat)


def attention_runs(folder: pathlib.Path = FOLDER, topic: str = "attention") -> list[Run]:
    """Every run of a topic, by card, the newest JAX first, and runs with the same JAX and seed in the order of time."""
    found: dict[tuple[str, tuple[int, ...], int], list[Run]] = {}
    for file in reversed(_newest_first(folder, "*", topic)):
        run = Run(file["header"], {r["case"]["name"]: r for r in file["records"] if "ours" in r["impls"]})
        same = found.setdefault((run.card, tuple(map(int, re.findall(r"\d+", run.jax))), -run.seed), [])
        same += [dataclasses.replace(run, repeat=len(same))] if run.records else []
    return [run for setting in sorted(found, reverse=True) for run in found[setting]]


class Results:
    """What the result files of one topic on `CARD` say, newest first by each file's own timestamp."""

    def __init__(self, folder: pathlib.Path = FOLDER, topic: str | None = None):
        self.folder = folder
        self._files = _newest_first(folder, CARD, topic)

    def __bool__(self) -> bool:
        return bool(self._files)

    def about(self, topic: str) -> "Results":
        """What the same folder says of another topic, on the same card."""
        return Results(self.folder, topic)

    def case(self, name: str) -> dict[str, Any] | None:
        """The newest run of "ours" on a case, with XLA if there is one, and the newest of torch's libraries beside it.

        Those may come from another run, as they are compared by shares of each process's own copy.
        """
        ours = list(_with(self._files, name, lambda impl: impl == "ours"))
        found = next((record for record in ours if "xla" in record["impls"]), ours[0] if ours else None)
        if found is None:
            return None
        beside = next(_with(self._files, name, lambda impl: impl in ROW_LIBRARIES), {"impls": {}})
        libraries = {impl: entry for impl, entry in beside["impls"].items() if impl in ROW_LIBRARIES}
        return found | {"impls": found["impls"] | libraries}

    def kernels(self, name: str) -> dict[str, Any] | None:
        """The newest run of single kernels on a case."""
        return next(_with(self._files, name, lambda impl: impl.startswith(KERNEL)), None)

    def headers(self) -> list[Mapping[str, Any]]:
        return [file["header"] for file in self._files]

    def records(self) -> list[dict[str, Any]]:
        """Every case with "ours", once, in the order of the files."""
        names = dict.fromkeys(r["case"]["name"] for file in self._files for r in file["records"])
        return [record for record in map(self.case, names) if record is not None]


def _newest_first(folder: pathlib.Path, card: str, topic: str | None) -> list[dict[str, Any]]:
    files = (read(path) for path in sorted(folder.glob(f"{card}/*.json")))
    files = (file for file in files if file["header"].get("topic") == topic)
    files = ({**file, "records": [r | {"run": _run(file["header"])} for r in file["records"]]} for file in files)
    return sorted(files, key=lambda file: file["header"]["timestamp"], reverse=True)


def _with(files: list[dict[str, Any]], name: str, wanted: Any) -> Iterator[dict[str, Any]]:
    for file in files:
        for record in file.get("records", ()):
            if record["case"]["name"] == name and any(map(wanted, record["impls"])):
                yield record


def _run(header: Mapping[str, Any]) -> dict[str, Any]:
    """On which day a record was measured, of which commit, and with what."""
    when = f"{header['timestamp'][:10]} {str(header['commit'])[:12]}"
    return {"when": when, "commit": header["commit"], "device": header["device"], "versions": header["versions"]}


def ratio(record: Record, peer: str) -> float | None:
    """How many times faster ours is. Where a process measured its own copy, shares of the copies are compared."""
    ours, other = record["impls"].get("ours", {}), record["impls"].get(peer, {})
    if "us" not in ours or "us" not in other:
        return None
    if other.get("process") == ours.get("process") or "fraction_of_copy" not in other:
        return other["us"] / ours["us"]
    return ours["fraction_of_copy"] / other["fraction_of_copy"] if "fraction_of_copy" in ours else None


def against_best(record: Record, rivals: Iterable[str] = RIVALS) -> dict[str, Any]:
    """The fastest rival in attention, and how many times faster ours is."""
    found = {name: ratio(record, name) for name in rivals}
    ratios = {name: times for name, times in found.items() if times is not None}
    best = min(ratios, key=lambda name: ratios[name], default=None)
    return {"best_peer": best, "ratio": round(ratios[best], 4) if best is not None else None}


def units(record: Record, name: str) -> float | None:
    """Time as a multiple of what one pass over the logits takes at the copy's rate: a copy of them takes 2."""
    fraction = record["impls"].get(name, {}).get("fraction_of_copy")
    return record["least_bytes"] / record["operand_bytes"] / fraction if fraction else None


def loss_error(record: Record, name: str) -> float | None:
    """The largest error in units of the last place of ours, where XLA's loss by itself is in the logits' dtype."""
    case, error = record["case"], record["impls"].get(name, {}).get("max_error_ulp")
    narrow = name == "xla" and case["pass"] == "fwd" and "logits_soft_cap" not in case.get("options", {})
    return error * _FLOAT32_ULPS[case["dtype"]] if narrow and error is not None else error


def extra_memory(record: Record, name: str) -> float | None:
    """Buffers and results beyond the least, the gradient, as a share of the logits' size."""
    entry, size = record["impls"].get(name, {}), record["operand_bytes"]
    if "output_bytes" not in entry:
        return None
    least = 0 if record["case"]["pass"] == "fwd" else size
    return (entry["temp_bytes"] + entry["output_bytes"] - least) / size


def write(path: pathlib.Path, header: Mapping[str, Any], records: Iterable[Record]) -> None:
    """Writes a result file; it is called after every case, so that a run cut short keeps what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(record, sort_keys=True) for record in records)
    partial = path.with_suffix(".partial")
    partial.write_text('{"header": ' + json.dumps(header, indent=1) + ',\n"records": [\n' + lines + "\n]}\n")
    partial.replace(path)


def read(path: pathlib.Path) -> dict[str, Any]:
    """A result file as `{"header": ..., "records": [...]}`; older files have another word for kernels."""
    file = json.loads(path.read_text())
    for record in file.get("records", ()):
        if "impls" in record:
            record["impls"] = {re.sub("^rung:", KERNEL, name): entry for name, entry in record["impls"].items()}
    return file


def header(*, commit: str | None, seed: int, rounds: int) -> dict[str, Any]:
    """Device, driver, versions, commit, seed, clocks and time of a run."""
    return {
        "schema": 1,
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _git_commit(),
        "device": _nvidia_smi("name,driver_version,memory.total") or {"name": f"CPU ({platform.machine()})"},
        "clocks_before": clocks(),
        "versions": {"python": platform.python_version(), **_versions()},
        "inputs": "standard normal",
        "seed": seed,
        "rounds": rounds,
        "argv": sys.argv[1:],
    }


def clocks() -> dict[str, str]:
    """What nvidia-smi says of the clocks now; empty without it."""
    return _nvidia_smi(_CLOCKS)


def loaded(library: str) -> str | None:
    """The file of a shared library that this process has loaded, by the beginning of its name."""
    try:
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return next((path for path in paths if pathlib.Path(path).name.startswith(library)), None)


def _nvidia_smi(query: str) -> dict[str, str]:
    line = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0")
    return {} if line is None else dict(zip(query.split(","), map(str.strip, line.split(",")), strict=False))


def _git_commit() -> str | None:
    root = str(pathlib.Path(__file__).parents[1])
    return _output("git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
