"""Results as text: the lines that a run prints, and tables in Markdown."""

from collections.abc import Callable, Iterable

from benchmarks import results as measured
from benchmarks.results import Record


def line(record: Record) -> str:
    """One case in one line per implementation."""
    rows = record["case"]["rows"]
    measured = record.get("rows_measured", rows)
    shrunk = f" (CPU: {measured} of {rows} rows)" if measured != rows else ""
    copy = record["copy"]
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


def table(records: Iterable[Record]) -> str:
    """All cases: time, bandwidth, share of the copy, ratio to each peer, error."""
    records = list(records)
    peers = list(dict.fromkeys(name for r in records for name in r["impls"] if name != "ours"))
    rows = [["case", "us", "TB/s", "of copy", *(f"x {peer}" for peer in peers), "ulp"]]
    for record in records:
        ours = record["impls"].get("ours", {})
        rows.append([
            record["case"]["name"],
            number(ours.get("us"), ".1f") if ours.get("status") != "WRONG" else "WRONG",
            number(ours.get("tb_per_s"), ".3f"),
            number(ours.get("fraction_of_copy"), ".3f"),
            *(number(measured.ratio(record, peer), ".2f") for peer in peers),
            number(ours.get("max_error_ulp"), ".2f"),
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


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
