"""Result files: their header, how they are written and read, the newest measurement of each case, and comparisons.

This module does not import JAX, because the process of torch's libraries uses it too.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]

FOLDER = pathlib.Path(__file__).parent / "results"
CARD = "h200"  # the folder of the card that every table but attention's is about
RUNG = "rung:"
ROW_LIBRARIES = ("torch", "torch_compile", "quack", "liger")
ATTENTION_LIBRARIES = ("fa4",)
RIVALS = ("cudnn", "mgpu", "tokamax", "fa4")  # XLA is no rival in attention, because its scores are in memory
NOT_MEASURED = f"*Not measured yet: no result file under `benchmarks/results/{CARD}/` has these cases.*"

_FLOAT32_ULPS = {"float16": 2**13, "bfloat16": 2**16, "float32": 1}  # one unit in the last place, in float32's
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "nvidia-cudnn-cu13", "nvidia-nvjitlink"),
    *("tokamax", "quack-kernels", "liger-kernel"),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A result file of attention that has times of "ours"; `repeat` counts the runs before it with the same JAX."""

    header: Mapping[str, Any]
    records: Mapping[str, Record]
    repeat: int = 0

    @property
    def card(self) -> str:
        return self.header["device"]["name"]

    @property
    def jax(self) -> str:
        return self.header["versions"]["jax"]

    @property
    def label(self) -> str:
        return f"JAX {self.jax}" + (", again" * self.repeat)


def attention_runs(folder: pathlib.Path = FOLDER) -> list[Run]:
    """Every run of attention, by card, the newest JAX first, and runs with the same JAX in the order of time."""
    found: dict[tuple[str, str], list[Run]] = {}
    for file in reversed(_newest_first(folder, "*", "attention")):
        run = Run(file["header"], {r["case"]["name"]: r for r in file["records"] if "ours" in r["impls"]})
        same = found.setdefault((run.card, run.jax), [])
        same += [dataclasses.replace(run, repeat=len(same))] if run.records else []
    order = sorted(found, key=lambda setting: (setting[0], tuple(map(int, re.findall(r"\d+", setting[1])))))
    return [run for setting in reversed(order) for run in found[setting]]


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

    def rungs(self, name: str) -> dict[str, Any] | None:
        """The newest run of single rungs on a case."""
        return next(_with(self._files, name, lambda impl: impl.startswith(RUNG)), None)

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
        for record in file["records"]:
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


def against_best(record: Record) -> dict[str, Any]:
    """The fastest rival in attention, and how many times faster ours is."""
    found = {name: ratio(record, name) for name in RIVALS}
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
    """A result file as `{"header": ..., "records": [...]}`."""
    return json.loads(path.read_text())


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
