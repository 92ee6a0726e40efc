"""Results as text: the lines that a run prints, and tables in Markdown."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks import results as measured
from benchmarks.results import Record

_MATMULS = ("matmul", "peers_matmul")


def line(record: Record) -> str:
    """One case in one line per implementation."""
    if "error" in record:
        return f"{record['case']['name']}: failed: {record['error']}"
    return _of_rows(record) if "rows" in record["case"] else _of_attention(record)


def _of_attention(record: Record) -> str:
    shrunk = " (CPU: one short sequence)" if "measured" in record else ""
    best = f", ours {record['ratio']:.3f} x {record['best_peer']}" if record.get("ratio") else ""
    ceilings = [f"copy {record['copy']['tb_per_s']:.2f} TB/s"] if record.get("copy") else []
    ceilings += [f"{key} {record[key]['tflop_per_s']:.0f} TFLOP/s" for key in _MATMULS if record.get(key)]
    head = f"{record['case']['name']}{shrunk}: {record['clock']} clock, {', '.join(ceilings)}{best}"
    first = next((entry["us"] for entry in record["impls"].values() if "us" in entry), None)
    return "\n".join([head, *(f"  {impl:<8} {_speed(entry, first)}" for impl, entry in record["impls"].items())])


def _speed(entry: Mapping[str, Any], first: float | None) -> str:
    """An implementation in one line, its time also as a multiple of the first one's."""
    if "us" not in entry:
        return f"{entry['status']}: {entry['reason']}"
    spread = f"{entry['us']:>9.1f} us ({entry['min_us']:.1f} to {entry['max_us']:.1f})"
    direct = f", direct {entry['direct_tflop_per_s']:.1f}" if "direct_us" in entry else ""
    spread += f"  {entry['us'] / first:.3f}x" if first else ""
    return f"{spread}  {entry['tflop_per_s']:>6.1f} TFLOP/s{direct}  error {entry['error']:.1e}"


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


def _of_rows(record: Record) -> str:
    rows = record["case"]["rows"]
    measured = record.get("rows_measured", rows)
    shrunk = f" (CPU: {measured} of {rows} rows)" if measured != rows else ""
    copy = record.get("copy")
    ceiling = f", copy {copy['tb_per_s']:.2f} TB/s ({copy['method'].removeprefix('copy:')})" if copy else ""
    head = f"{record['case']['name']}{shrunk}: {record['clock']} clock{ceiling}"
    return "\n".join([head, *(f"  {text}" for text in _impl_lines(record))])


def _impl_lines(record: Record) -> Iterable[str]:
    ours = record["impls"].get("ours", {}).get("us")
    missing = [name for name, entry in record["impls"].items() if entry["status"] == "not installed"]
    if missing:
        yield f"not installed: {', '.join(missing)}"
    for name, entry in record["impls"].items():
        if name in missing:
            continue
        if "us" not in entry:
            reason = f": {entry['reason']}" if "reason" in entry else ""
            yield f"{name:<14} {entry['status']}{reason}"
            continue
        parts = [f"{name:<14} {entry['us']:>10.2f} us"]
        if "tb_per_s" in entry:
            parts.append(f"{entry['tb_per_s']:>6.3f} TB/s")
        if "fraction_of_copy" in entry:
            parts.append(f"{100 * entry['fraction_of_copy']:>5.1f}% of copy")
        if record["case"]["op"] == "cross_entropy" and (cost := measured.units(record, name)):
            parts.append(f"{cost:.2f} units")
        if "us_per_iteration" in entry:
            parts.append(f"{entry['us_per_iteration']:.2f} us per loop iteration")
        if ours and name != "ours":
            parts.append(f"ours is {entry['us'] / ours:.2f}x")
        if entry.get("max_error_ulp") is not None:
            parts.append(f"error {entry['max_error_ulp']:.2f} ulp")
        if entry.get("kernel"):
            parts.append(entry["kernel"])
        yield "  ".join(parts)


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
