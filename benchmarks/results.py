"""Result files: their header, how they are written and read, the newest measurement of each case, and comparisons.

This module does not import JAX, because the process of torch's libraries uses it too.
"""

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Record = Mapping[str, Any]

FOLDER = pathlib.Path(__file__).parent / "results"
CARD = "h200"  # the folder of the card that every table but attention's is about
RUNG = "rung:"
ROW_LIBRARIES = ("torch", "torch_compile", "quack", "liger")
ATTENTION_LIBRARIES = ("fa4",)
TORCH = ROW_LIBRARIES + ATTENTION_LIBRARIES  # libraries that are measured in torch's process
RIVALS = ("cudnn", "mgpu", "tokamax", "fa4")  # XLA is no rival in attention, because its scores are in memory
NOT_MEASURED = f"*Not measured yet: no result file under `benchmarks/results/{CARD}/` has these cases.*"

_FLOAT32_ULPS = {"float16": 2**13, "bfloat16": 2**16, "float32": 1}  # one unit in the last place, in float32's
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "nvidia-cudnn-cu13", "nvidia-nvjitlink"),
    *("tokamax", "quack-kernels", "liger-kernel"),
)


class Setting(NamedTuple):
    """A card and a version of JAX, as result files name them; results of two settings are never mixed."""

    card: str
    jax: str

    def __str__(self) -> str:
        return f"{self.card}, JAX {self.jax}"

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.jax)))


class Results:
    """What result files of one topic say, newest first by each file's own timestamp.

    `folder` has a folder for each card. Without a `setting` the files of `CARD` count, and with one those that were
    measured in it, wherever they lie.
    """

    def __init__(self, folder: pathlib.Path = FOLDER, topic: str | None = None, setting: Setting | None = None):
        self._folder, self._topic = folder, topic
        files = _newest_first(folder, "*" if setting else CARD, topic)
        self._files = [file for file in files if setting is None or _setting(file) == setting]
        # Torch's process has no JAX, so its times belong to the card alone.
        self._same_card = [file for file in files if setting is None or _setting(file).card == setting.card]

    def __bool__(self) -> bool:
        return bool(self._files)

    def about(self, topic: str) -> "Results":
        """What the same folder says of another topic, on the same card."""
        return Results(self._folder, topic)

    def by_setting(self, topic: str) -> dict[Setting, "Results"]:
        """What the same folder says of a topic in each setting that has measured "ours", the newest JAX first."""
        found = {_setting(file) for file in _newest_first(self._folder, "*", topic)}
        order = sorted(found, key=lambda setting: (setting.version, setting.card), reverse=True)
        each = {setting: Results(self._folder, topic, setting) for setting in order}
        return {setting: results for setting, results in each.items() if results.records()}

    def case(self, name: str) -> dict[str, Any] | None:
        """The newest run of "ours" on a case, with XLA if there is one, and the newest of torch's libraries beside it.

        A library of attention that only another run measured comes with the matrix product of that run.
        """
        ours = self.runs(name)
        found = next((record for record in ours if "xla" in record["impls"]), ours[0] if ours else None)
        if found is None:
            return None
        is_torch = lambda impl: impl in TORCH
        torch_records = itertools.chain(*(_with(files, name, is_torch) for files in (self._files, self._same_card)))
        beside = next(torch_records, {"impls": {}})
        product = {} if beside is found or not beside.get("peers_matmul") else _product(beside["peers_matmul"])
        libraries = {impl: entry | product for impl, entry in beside["impls"].items() if impl in TORCH}
        return found | {"impls": _of_earlier_runs(ours) | found["impls"] | libraries}

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Every run of "ours" on a case, the newest first."""
        return list(_with(self._files, name, lambda impl: impl == "ours"))

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


def _setting(file: Mapping[str, Any]) -> Setting:
    return Setting(file["header"]["device"]["name"], file["header"]["versions"]["jax"])


def _run(header: Mapping[str, Any]) -> dict[str, Any]:
    """On which day a record was measured, of which commit, and with what."""
    when = f"{header['timestamp'][:10]} {str(header['commit'])[:12]}"
    return {"when": when, "commit": header["commit"], "device": header["device"], "versions": header["versions"]}


def _product(matmul: Mapping[str, Any]) -> dict[str, Any]:
    return {"matmul_tflop_per_s": matmul["tflop_per_s"]}


def _of_earlier_runs(newest_first: list[dict[str, Any]]) -> dict[str, Any]:
    products = [(r["impls"], _product(r["matmul"])) for r in reversed(newest_first) if "matmul" in r]
    timed = ((name, entry, product) for impls, product in products for name, entry in impls.items() if "us" in entry)
    return {name: entry | product for name, entry, product in timed}


def ratio(record: Record, peer: str) -> float | None:
    """How many times faster ours is on rows. Between processes, the shares of each one's own copy are compared."""
    ours, other = record["impls"].get("ours", {}), record["impls"].get(peer, {})
    if "us" not in ours or "us" not in other:
        return None
    if other.get("process") == ours.get("process") or "fraction_of_copy" not in other:
        return other["us"] / ours["us"]
    return ours["fraction_of_copy"] / other["fraction_of_copy"] if "fraction_of_copy" in ours else None


def faster(record: Record, peer: str) -> float | None:
    """How many times faster ours is in attention; between runs, the shares of each one's matrix product count."""
    ours, other = record["impls"].get("ours", {}), record["impls"].get(peer, {})
    if "us" not in ours or "us" not in other:
        return None
    product = other.get("matmul_tflop_per_s")
    return other["us"] / ours["us"] * (product / record["matmul"]["tflop_per_s"] if product else 1)


def against_best(record: Record) -> dict[str, Any]:
    """The fastest rival in attention, and how many times faster ours is."""
    found = {name: faster(record, name) for name in RIVALS}
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
