"""Makes text of results: the lines that a run prints, and tables in Markdown."""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import results as measured
from benchmarks.results import NOT_MEASURED, Record, Run

Column = Callable[[Any], str]  # from what a row is about to a cell

# A line's facts of an implementation, in this order, where its entry has them.
_FACTS = {
    "min_us": "from {:.1f}",
    "max_us": "to {:.1f}",
    "tb_per_s": "{:.3f} TB/s",
    "fraction_of_copy": "{:.1%} of copy",
    "tflop_per_s": "{:.1f} TFLOP/s",
    "x_products": "{:.3f} x products",
    "direct_tflop_per_s": "direct {:.1f}",
    "us_per_iteration": "{:.2f} us per loop iteration",
    "max_error_ulp": "error {:.2f} ulp",
    "error": "error {:.1e}",
    "kernel": "{}",
}
LIBRARIES = {"cudnn": "cuDNN", "xla": "XLA"}  # that random and short calls are measured beside
SLOW, VERY_SLOW = 0.95, 0.85  # calls below these ratios are counted
WORST_SHOWN = 10  # random calls that are shown
_TORCH = " Torch's side runs in a process of its own and is compared by shares of its own copy."


def line(record: Record) -> str:
    """A case in one line for each implementation; times stand as multiples of the first one's, too."""
    name, impls = record["case"]["name"], record.get("impls", {})
    if "error" in record:
        return f"{name}: failed: {record['error']}"
    if "efficiency" in record:
        return (
            f"{name:<34} {record['one_us']:10.1f} us on one, {record['us']:10.1f} on {record['case']['devices']}: "
            f"{record['efficiency']:.3f}  difference {record['difference']:.1e}  {record['collectives']}"
        )
    small = " (small, on the CPU)" if {"measured", "rows_measured"} & record.keys() else ""
    heads = [f"{record['clock']} clock"]
    if copy := record.get("copy"):
        heads.append(f"copy {copy['tb_per_s']:.2f} TB/s ({copy['method']})")
    if read := record.get("read"):
        heads.append(f"read {read['tb_per_s']:.2f} TB/s")
    products = [key for key in ("matmul", "peers_matmul") if record.get(key)]
    heads += [f"{key} {record[key]['tflop_per_s']:.0f} TFLOP/s" for key in products]
    heads += [f"ours {record['ratio']:.3f} x {record['best_peer']}"] if record.get("ratio") else []
    first = next((entry["us"] for entry in impls.values() if "us" in entry), None)
    lines = [_entry(impl, entry, first) for impl, entry in impls.items()]
    return "\n  ".join([f"{name}{small}: {', '.join(heads)}", *lines])


def _entry(name: str, entry: Mapping[str, Any], first: float | None) -> str:
    if "compile_s" in entry:
        return f"{name:<14} " + "trace {trace_s:.3f} s, lower {lower_s:.3f} s, compile {compile_s:.3f} s".format(
            **entry
        )
    if "us" not in entry:
        return f"{name:<14} {entry['status']}: {entry.get('reason', '')}"
    times = [f"{name:<14} {entry['us']:>10.2f} us"] + ([f"{entry['us'] / first:.3f}x"] if first else [])
    return "  ".join(times + [text.format(entry[key]) for key, text in _FACTS.items() if entry.get(key) is not None])


def sample(records: Sequence[Record]) -> str:
    """How much faster ours is than the better of cuDNN and XLA over random calls, and where it is worst."""
    found = against_libraries(records)
    if not found:
        return f"none of {len(records)} calls was timed by both ours and another library"
    mean, slow = mean_and_slow(found)
    head = f"{len(found)} of {len(records)} calls, against the better of cuDNN and XLA: geometric mean {mean:.3f}, "
    head += f"{slow} below {SLOW} ({100 * slow / len(found):.1f} %), "
    head += f"{sum(ratio < VERY_SLOW for ratio, _ in found)} below {VERY_SLOW}; the worst:"
    return "\n".join([head, *(f"  {ratio:.3f}  {record['case']['name']}" for ratio, record in found[:WORST_SHOWN])])


def chains(records: Sequence[Record]) -> str:
    """How many times faster ours is than XLA and both times, a line for each call, the worst first; then the mean."""
    lines = []
    for ratio, record in against_libraries(records):
        ours, xla = (record["impls"][name]["us"] for name in ("ours", "xla"))
        lines.append(f"{ratio:6.3f} {ours:8.1f} {xla:8.1f}  {record['case']['name']}")
    return "\n".join(["x XLA  ours, us  XLA, us  call", *lines, sample(records).partition("; the worst:")[0]])


def first(records: Sequence[Record]) -> str:
    """Seconds before the first result, of Python and of the compiler, a line for each call."""
    heads = [*(f"{head:>14}" for head in SECONDS), "call; trace and lower + compile, s"]
    rows = [[*(f"{cell(record):>14}" for cell in SECONDS.values()), record["case"]["name"]] for record in records]
    return "\n".join(map("  ".join, (heads, *rows)))


def _seconds(record: Record, name: str) -> str:
    entry = record["impls"].get(name, {})
    return f"{entry['trace_s'] + entry['lower_s']:.3f} + {entry['compile_s']:.3f}" if "compile_s" in entry else "-"


SECONDS = {head: functools.partial(_seconds, name=name) for name, head in {"ours": "ours", **LIBRARIES}.items()}


def against_libraries(records: Iterable[Record]) -> list[tuple[float, Record]]:
    """How many times faster ours is than the better of cuDNN and XLA, for each call that has both; the worst first."""
    pairs = [(measured.against_best(record, LIBRARIES)["ratio"], record) for record in records]
    return sorted(((ratio, record) for ratio, record in pairs if ratio is not None), key=lambda pair: pair[0])


def mean_and_slow(found: Sequence[tuple[float, Record]]) -> tuple[float, int]:
    """The geometric mean of ratios, and how many are below `SLOW`."""
    return statistics.geometric_mean(ratio for ratio, _ in found), sum(ratio < SLOW for ratio, _ in found)


def setting(records: Iterable[Record]) -> str:
    """The devices, drivers and versions of JAX with which the records shown were measured."""
    runs = [record["run"] for record in records]
    each = lambda part, name: ", ".join(dict.fromkeys(str(run[part].get(name)) for run in runs))
    return f"{each('device', 'name')}, driver {each('device', 'driver_version')}, JAX {each('versions', 'jax')}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, the first column left-aligned; without rows, that nothing is measured yet."""
    rule = ["---" if i == 0 else "---:" for i in range(len(heads))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows)) if rows else NOT_MEASURED


def table(items: Iterable[Any], columns: Mapping[str, Column], note: str = "") -> str:
    """Makes a row of each item, with cells by the functions of the columns; a note follows where there are rows."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return markdown(list(columns), rows) + (f"\n\n{note}" if rows and note else "")


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def floored(value: float | None) -> str:
    """Three digits that do not look better than the value is."""
    return number(None if value is None else math.floor(value * 1000) / 1000, ".3f")


def time_of(record: Record | None, name: str) -> str:
    """The microseconds of an implementation, or why there are none."""
    entry = record["impls"].get(name, {}) if record else {}
    status = entry.get("status", "ok")
    return number(entry.get("us"), ".1f") if status == "ok" else "refuses" if status == "declined" else status


def fact(name: str, field: str, spec: str, unit: float = 1) -> Column:
    """A number that the entry of an implementation has, in a unit."""

    def cell(record: Record) -> str:
        value = record["impls"].get(name, {}).get(field)
        return number(None if value is None else value / unit, spec)

    return cell


def times(*names: str) -> dict[str, Column]:
    """A column for the time of each implementation."""
    return {f"{LIBRARIES.get(name, name)}, us": functools.partial(time_of, name=name) for name in names}


def faster(peer: str) -> Column:
    """How many times faster ours is, if the case was measured."""
    return lambda record: floored(measured.ratio(record, peer) if record else None)


def named(prefix: str = "") -> Column:
    return lambda record: f"`{record['case']['name'].removeprefix(prefix)}`"


CARD: Column = lambda record: record["run"]["card"]
WHEN: Column = lambda record: record["run"]["when"]


def by_card(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(CARD(record), []).append(record)
    return found


def days(records: Iterable[Record]) -> str:
    return ", ".join(dict.fromkeys(map(WHEN, records)))


def word(value: float, must: float | None, goal: float | None, at_most: bool = False) -> str:
    """Whether a value is as good as promised."""
    reached = lambda bound: bound is not None and (value <= bound if at_most else value >= bound)
    if must is not None and not reached(must):
        return "**missed**"
    return "goal" if reached(goal) else "kept" if must is not None else "below goal"


def newest_scaling(runs: Sequence[Run]) -> dict[tuple[str, int, str], Record]:
    """The newest record of each card, number of devices and case, in this order."""
    key = lambda r: (CARD(r), r["case"]["devices"], r["case"]["name"])
    return {key(r): r for r in sorted(measured.newest(runs, key=key).values(), key=key)}


def in_order(cases: Iterable[Any]) -> Callable[[Record], int]:
    """Returns the key that sorts records as the table has their cases, others behind."""
    order = {case.name: i for i, case in enumerate(cases)}
    return lambda record: order.get(record["case"]["name"], len(order))


def caption(records: Iterable[Record], shown: Iterable[str] = ()) -> str:
    """With what the records shown were measured, and how peers that are `shown` were."""
    where = setting(records)
    return f"{where}; medians of interleaved runs." + (_TORCH if set(shown) & set(measured.ROW_LIBRARIES) else "")


def cell_of(case: Mapping[str, Any]) -> str:
    dim, value = case["head_dim"], case["value_dim"]
    heads = f", heads {case['heads']}/{case['key_heads']}" if case["heads"] != case["key_heads"] else ""
    span = f" {case['span']}" if case["span"] else ""
    return f"D {dim if dim == value else f'{dim}/{value}'}{heads}, S {case['length']}, {case['kind']}{span}"
