"""Every process that measures uses this, without JAX: verdicts, speeds, and result files.

A result file has a header and records; what is asked of them is the newest measurement of each case, and comparisons.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import pathlib
import platform
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
CARD = "h200"  # the folder of the card that every table but attention's is about
KERNEL = "kernel:"  # before the name of a kernel that is measured without the choice
ROW_LIBRARIES = ("torch", "torch_compile", "quack", "liger")
ATTENTION_LIBRARIES = ("fa4",)
RIVALS = ("cudnn", "mgpu", "tokamax", "fa4")  # XLA is no rival in attention, because its scores are in memory
NOT_MEASURED = "*Not measured yet: no committed result file has these cases.*"

NAMES = {1: ("out",), 3: ("d_query", "d_key", "d_value"), 4: ("out", "d_query", "d_key", "d_value")}
ROW_WEIGHT = 1 / 16  # of the worst row of a head: a row that is missing or another's errs by a third at least
# Half of epsilon in 16 bits; epsilon of TF32, in which a GPU multiplies float32 unless it is told otherwise.
SLACK = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-4, "tf32": 2.0**-10}

_ORACLE_OPTIONS = {"label_smoothing": "smoothing", "logits_soft_cap": "soft_cap", "ignore_index": "ignored"}
_FLOAT32_ULPS = {"float16": 2**13, "bfloat16": 2**16, "float32": 1}  # one unit in the last place, in float32's
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "nvidia-cudnn-cu13", "nvidia-nvjitlink"),
    *("tokamax", "quack-kernels", "liger-kernel"),
)

# They are the tests' and need NumPy alone; `tests` is no package, so that they are loaded by path.
oracle, errors = (
    types.SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / f"{name}.py"))) for name in ("oracle", "errors")
)


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

    def entry(self) -> dict[str, Any]:
        """Makes the entry of an implementation with this verdict in a result file; it is timed if "ok"."""
        if self.output:
            error = self.error if math.isfinite(self.error) else None
            facts = {"error": error, "plain_error": self.xla_error, "allowed_error": self.allowed}
            facts["output"] = self.output
            reason = f"{self.output}: relative error {self.error:.2e}, allowed {self.allowed:.2e} in {self.place}"
        else:
            facts = {"max_error_ulp": round(self.error, 4), "allowed_error_ulp": round(self.allowed, 4)}
            reason = f"error {self.error:.3g} ulp, allowed {self.allowed:.3g}; rows: {self.every_row:.3g} of the bound"
        return {"status": "ok"} | facts if self.right else {"status": "WRONG", "reason": reason} | facts


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


def row_truths(case: Record, x: np.ndarray, *rest: np.ndarray) -> list[tuple[Any, Any]]:
    """(The true value in float64, the size of the terms it is a difference of) of each output that has rows.

    `x` and `rest` are some rows of a case's operands.
    """
    op, pass_ = case["op"], case["pass"]
    if op == "top_k":
        best = np.argsort(-x.astype(np.float32), axis=-1, kind="stable")[:, : case["options"]["k"]]
        return [(np.take_along_axis(oracle.softmax(x), best, -1), None), (best, None)]
    if op == "cross_entropy":
        options: dict[str, Any] = {_ORACLE_OPTIONS.get(x) or x: value for x, value in case["options"].items()}
        true = oracle.cross_entropy(x, *rest, weights=1.0 if pass_ == "fwd" else 1 / case["rows"], **options)
        if pass_ != "fwd":
            return [(true.gradient, true.gradient_terms)]
        # The label's logit is taken from the logsumexp; a capped one errs by as much as the cap would.
        return [(true.loss, true.loss_terms + np.abs(true.lse) + options.get("soft_cap", 0.0))]
    found = [(getattr(oracle, op)(x, -1), oracle.log_softmax_terms(x, -1) if op == "log_softmax" else None)]
    if rest:
        name, at = ("softmax_tangent", oracle.softmax(x)) if op == "softmax" else ("log_softmax_cotangent", x)
        found.append((getattr(oracle, name)(at, *rest), getattr(oracle, f"{name}_terms")(at, *rest)))
    return found[-1:] if pass_ == "bwd" else found


def summary(samples: Sequence[float]) -> dict[str, Any]:
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


def rate(entry: Record, flops: float) -> dict[str, Any]:
    """Returns TFLOP/s by the best round."""
    return {"tflop_per_s": round(flops / entry["min_us"] / 1e6, 1)}


def beside_products(entry: Record, products: Record) -> dict[str, Any]:
    """Returns the time as a multiple of that of the same process' products, by the best rounds."""
    known = "min_us" in entry and "min_us" in products
    return {"x_products": round(entry["min_us"] / products["min_us"], 4)} if known else {}


class Run:
    """A result file; of a case, "run" says on which day it was measured, of which commit, and with what.

    `repeat` counts the runs of attention before it with the same setting.

    Raises:
      ValueError: a case has two records, or a time is not the median that a table says it is.
    """

    def __init__(self, header: Mapping[str, Any], records: Iterable[Record]):
        self.header, self.repeat = header, 0
        self.card = header["device"]["name"].removeprefix("NVIDIA ").split(" ")[0]  # in a word: "H100"
        self.jax, self.seed = header["versions"].get("jax"), header.get("seed", 0)
        self.day, self.commit = header["timestamp"][:10], str(header["commit"])[:12]
        facts = {name: header[name] for name in ("commit", "device", "versions")}
        facts |= {"when": f"{self.day} {self.commit}", "card": self.card}
        self.records: dict[str, dict[str, Any]] = {}
        for record in records:
            name = record["case"]["name"]
            if name in self.records:
                raise ValueError(f"results of {facts['when']}: {name} has two records, expected one. Measure it again.")
            _check_medians(record, f"results of {facts['when']}: {name}")
            self.records[name] = {**record, "run": facts}

    @property
    def label(self) -> str:
        return f"{self.card}, JAX {self.jax}" + (", again" * self.repeat)


def _check_medians(record: Record, where: str) -> None:
    """Raises an error where a time of several rounds is no median: the least and the greatest round are its bounds."""
    for name, entry in record.get("impls", {}).items():
        us, rounds = entry.get("us"), entry.get("rounds_us", ())
        if us is None:
            continue
        if not us > 0:
            raise ValueError(f"{where}: the time of {name} is {us} us, expected a positive one. Measure it again.")
        # Some files have rounds to a tenth of a microsecond.
        if rounds and not min(rounds) - 0.06 <= us <= max(rounds) + 0.06:
            raise ValueError(
                f"{where}: the time of {name} is {us} us, expected the median of all launches, which lies within the "
                f"rounds' {min(rounds)} to {max(rounds)} us. Measure it again."
            )


def topic_runs(topic: str | None, folder: pathlib.Path = FOLDER, card: str = "*") -> list[Run]:
    """Every run of a topic on a card, or on any, the newest first."""
    files = map(read, sorted(folder.glob(f"{card}/*.json")))
    runs = [Run(**file) for file in files if file["header"].get("topic") == topic]
    return sorted(runs, key=lambda run: run.header["timestamp"], reverse=True)


def attention_runs(folder: pathlib.Path = FOLDER, topic: str = "attention") -> list[Run]:
    """Every run of "ours", by card, the newest JAX first, and runs with the same JAX and seed in the order of time."""
    found: dict[tuple[str, tuple[int, ...], int], list[Run]] = {}
    for run in reversed(topic_runs(topic, folder)):
        run.records = {name: record for name, record in run.records.items() if "ours" in record["impls"]}
        same = found.setdefault((run.card, tuple(map(int, re.findall(r"\d+", run.jax))), -run.seed), [])
        run.repeat = len(same)
        same += [run] if run.records else []
    return [run for setting in sorted(found, reverse=True) for run in found[setting]]


def newest(
    runs: Iterable[Run],
    counts: Callable[[Record], bool] = lambda record: True,
    key: Callable[[Record], Any] = lambda record: (record["run"]["card"], record["case"]["name"]),
) -> dict[Any, Record]:
    """The newest record of each card and case, of those that count."""
    older_first = sorted(runs, key=lambda run: run.header["timestamp"])
    return {key(record): record for run in older_first for record in run.records.values() if counts(record)}


class Results:
    """Reads the result files of rows on `CARD`."""

    def __init__(self, folder: pathlib.Path = FOLDER):
        self.folder, self.runs = folder, topic_runs(None, folder, CARD)

    def case(self, name: str) -> dict[str, Any] | None:
        """The newest run of "ours" on a case, with XLA if there is one, and the newest of torch's libraries beside it.

        Libraries may come from another run, as they are compared by shares of each process's own copy.
        """
        known = [run.records[name] for run in self.runs if name in run.records]
        ours = [record for record in known if "ours" in record["impls"]]
        if not ours:
            return None
        found = next((record for record in ours if "xla" in record["impls"]), ours[0])
        of_torch = lambda record: {name: x for name, x in record["impls"].items() if name in ROW_LIBRARIES}
        return found | {"impls": found["impls"] | next(filter(None, map(of_torch, known)), {})}

    def kernels(self, name: str) -> dict[str, Any] | None:
        known = (run.records[name] for run in self.runs if name in run.records)
        return next((r for r in known if any(impl.startswith(KERNEL) for impl in r["impls"])), None)

    def records(self) -> list[dict[str, Any]]:
        names = dict.fromkeys(name for run in self.runs for name in run.records)
        return [record for record in map(self.case, names) if record is not None]


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
    """A result file as `{"header": ..., "records": [...]}`; older files have another word for kernels.

    Raises:
      ValueError: a number is not finite.
    """

    def refuse(number: str) -> float:
        raise ValueError(f"{path}: a number is {number}, expected finite ones. Measure its case again.")

    return json.loads(path.read_text().replace('"rung:', f'"{KERNEL}'), parse_constant=refuse)


def header(*, commit: str | None, seed: int, rounds: int) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "schema": 1,
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit
        or _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
        "device": _nvidia_smi("name,driver_version,memory.total") or {"name": f"CPU ({platform.machine()})"},
        "clocks_before": clocks(),
        "versions": versions,
        "inputs": "standard normal",
        "seed": seed,
        "rounds": rounds,
        "argv": sys.argv[1:],
    }


def clocks() -> dict[str, str]:
    return _nvidia_smi(_CLOCKS)


def loaded(library: str) -> str | None:
    """The file of a shared library that this process has loaded, by the beginning of its name."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return next((path for path in paths if pathlib.Path(path).name.startswith(library)), None)


def _nvidia_smi(query: str) -> dict[str, str]:
    line = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0")
    return {} if line is None else dict(zip(query.split(","), map(str.strip, line.split(",")), strict=False))


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
