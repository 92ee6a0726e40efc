"""Results as people read them (a table) and as machines keep them (JSON)."""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Record = Mapping[str, Any]
_FLOAT32_ULPS = {"float16": 2**13, "bfloat16": 2**16, "float32": 1}  # one unit in the last place, in float32's


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
        if record["case"]["op"] == "cross_entropy" and (cost := units(record, name)):
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
            _number(ours.get("us"), ".1f") if ours.get("status") != "WRONG" else "WRONG",
            _number(ours.get("tb_per_s"), ".3f"),
            _number(ours.get("fraction_of_copy"), ".3f"),
            *(_number(ratio(record, peer), ".2f") for peer in peers),
            _number(ours.get("max_error_ulp"), ".2f"),
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def ratio(record: Record, peer: str) -> float | None:
    """How many times faster ours is. Across processes the shares of each one's own copy are compared, not times."""
    ours, other = record["impls"].get("ours", {}), record["impls"].get(peer, {})
    if "us" not in ours or "us" not in other:
        return None
    if other.get("process") == ours.get("process") or "fraction_of_copy" not in other:
        return other["us"] / ours["us"]
    return ours["fraction_of_copy"] / other["fraction_of_copy"] if "fraction_of_copy" in ours else None


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
    """Writes the result file; called after every case, so that a run cut short keeps what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(record, sort_keys=True) for record in records)
    partial = path.with_suffix(".partial")
    partial.write_text('{"header": ' + json.dumps(header, indent=1) + ',\n"records": [\n' + lines + "\n]}\n")
    partial.replace(path)


def read(path: pathlib.Path) -> dict[str, Any]:
    """The result file as `{"header": ..., "records": [...]}`."""
    return json.loads(path.read_text())


def setting(records: Iterable[Record]) -> str:
    """The devices, drivers and versions of JAX with which the records shown were measured."""
    runs = [record["run"] for record in records]
    each = lambda part, name: ", ".join(dict.fromkeys(str(run[part].get(name)) for run in runs))
    return f"{each('device', 'name')}, driver {each('device', 'driver_version')}, JAX {each('versions', 'jax')}"


def measured(records: Iterable[Record], name: Callable[[Record], str]) -> str:
    """The days and commits of the records shown, each with the names of its own."""
    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(record["run"]["when"], []).append(name(record))
    return "; ".join(f"{when}: {', '.join(names)}" for when, names in found.items())


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, the first column left-aligned."""
    rule = ["---" if i == 0 else "---:" for i in range(len(heads))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
