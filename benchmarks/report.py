"""Results as text: the lines that a run prints, and tables in Markdown."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks import results as measured
from benchmarks.results import Record

# What a line says of an implementation, in this order, where its entry has it.
_FACTS = {
    "min_us": "from {:.1f}",
    "max_us": "to {:.1f}",
    "tb_per_s": "{:.3f} TB/s",
    "fraction_of_copy": "{:.1%} of copy",
    "tflop_per_s": "{:.1f} TFLOP/s",
    "direct_tflop_per_s": "direct {:.1f}",
    "us_per_iteration": "{:.2f} us per loop iteration",
    "max_error_ulp": "error {:.2f} ulp",
    "error": "error {:.1e}",
    "kernel": "{}",
}


def line(record: Record) -> str:
    """A case in one line for each implementation; times stand as multiples of the first one's, too."""
    name, impls = record["case"]["name"], record["impls"]
    if "error" in record:
        return f"{name}: failed: {record['error']}"
    small = " (small, on the CPU)" if {"measured", "rows_measured"} & record.keys() else ""
    copy = record.get("copy")
    heads = [f"{record['clock']} clock"] + ([f"copy {copy['tb_per_s']:.2f} TB/s ({copy['method']})"] if copy else [])
    heads += [
        f"{key} {record[key]['tflop_per_s']:.0f} TFLOP/s" for key in ("matmul", "peers_matmul") if record.get(key)
    ]
    heads += [f"ours {record['ratio']:.3f} x {record['best_peer']}"] if record.get("ratio") else []
    first = next((entry["us"] for entry in impls.values() if "us" in entry), None)
    lines = [_entry(impl, entry, first) for impl, entry in impls.items()]
    return "\n  ".join([f"{name}{small}: {', '.join(heads)}", *lines])


def _entry(name: str, entry: Mapping[str, Any], first: float | None) -> str:
    if "us" not in entry:
        return f"{name:<14} {entry['status']}: {entry.get('reason', '')}"
    times = [f"{name:<14} {entry['us']:>10.2f} us"] + ([f"{entry['us'] / first:.3f}x"] if first else [])
    return "  ".join(times + [text.format(entry[key]) for key, text in _FACTS.items() if entry.get(key) is not None])


def sample(records: Iterable[Record], shown: int = 10) -> str:
    """How much faster ours is than the better of cuDNN and XLA over random calls, and where it is worst."""
    records, found = list(records), []
    for record in records:
        ratios = [measured.ratio(record, rival) for rival in ("cudnn", "xla")]
        found += [(min(known), record["case"]["name"]) for known in [[r for r in ratios if r is not None]] if known]
    if not found:
        return f"none of {len(records)} calls was timed by both ours and another library"
    mean, slow = statistics.geometric_mean(ratio for ratio, _ in found), sum(ratio < 0.95 for ratio, _ in found)
    head = f"{len(found)} of {len(records)} calls, against the better of cuDNN and XLA: geometric mean {mean:.3f}, "
    head += f"{slow} below 0.95 ({100 * slow / len(found):.1f} %); the worst:"
    return "\n".join([head, *(f"  {ratio:.3f}  {name}" for ratio, name in sorted(found)[:shown])])


def setting(records: Iterable[Record]) -> str:
    """The devices, drivers and versions of JAX with which the records shown were measured."""
    runs = [record["run"] for record in records]
    each = lambda part, name: ", ".join(dict.fromkeys(str(run[part].get(name)) for run in runs))
    return f"{each('device', 'name')}, driver {each('device', 'driver_version')}, JAX {each('versions', 'jax')}"


def when(records: Iterable[Record], name: Callable[[Record], str]) -> str:
    """The days and commits of the records shown, each with the names of its own."""
    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(record["run"]["when"], []).append(name(record))
    return "; ".join(f"{when}: {', '.join(names)}" for when, names in found.items())


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, the first column left-aligned."""
    rule = ["---" if i == 0 else "---:" for i in range(len(heads))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def number(value: float | None, spec: str) -> str:
    """A number as text, and a dash where there is none."""
    return "-" if value is None else format(value, spec)
