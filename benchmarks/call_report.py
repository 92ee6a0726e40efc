"""Results of `benchmarks.call_cases` as text: what a run prints at its end, and tables in Markdown."""

import itertools
import re
import statistics
from collections.abc import Callable, Sequence

from benchmarks import call_cases, report
from benchmarks import results as measured
from benchmarks.report import LIBRARIES, SLOW, VERY_SLOW, WORST_SHOWN, floored, markdown, number, time_of
from benchmarks.results import Record, Results, Run

# The name of a call: its function with pass and dtype, its size, and its axis.
_CHAIN = re.compile(r"^(.+?_(?:fwd|value_and_grad|value_and_vjp)_(?:bf16|f32))_(\w+?)(?:_axis(-?\d))?(?:_k\d+)?$")


def chains(records: Sequence[Record]) -> str:
    """How many times faster ours is than XLA and both times, a line for each call, the worst first; then the mean."""
    lines = []
    for ratio, record in report.against_libraries(records):
        ours, xla = (record["impls"][name]["us"] for name in ("ours", "xla"))
        lines.append(f"{ratio:6.3f} {ours:8.1f} {xla:8.1f}  {record['case']['name']}")
    return "\n".join(["x XLA  ours, us  XLA, us  call", *lines, report.sample(records).partition("; the worst:")[0]])


def first(records: Sequence[Record]) -> str:
    """Seconds before the first result, of Python and of the compiler, a line for each call."""
    heads = [*(f"{head:>14}" for head in ("ours", *LIBRARIES.values())), "call; trace and lower + compile, s"]
    rows = [[*(f"{_seconds(record, name):>14}" for name in ("ours", *LIBRARIES)), _name(record)] for record in records]
    return "\n".join(map("  ".join, (heads, *rows)))


def _name(record: Record) -> str:
    return record["case"]["name"]


def _seconds(record: Record, name: str) -> str:
    entry = record["impls"].get(name, {})
    return f"{entry['trace_s'] + entry['lower_s']:.3f} + {entry['compile_s']:.3f}" if "compile_s" in entry else "-"


def _newest(topic: str, results: Results) -> list[Run]:
    """The newest run of each card."""
    return list({run.card: run for run in reversed(measured.topic_runs(topic, results.folder))}.values())


def _by_call(topic: str, heads: Sequence[str], cells: Callable[[Record], Sequence[str]]) -> Callable[[Results], str]:
    """A table of the newest run of each card, in the order of the cases."""

    def make(results: Results) -> str:
        order = {case.name: i for i, case in enumerate(call_cases.TABLE.apart[topic](0, 0))}
        rows = []
        for run in _newest(topic, results):
            records = sorted(run.records.values(), key=lambda record: order.get(_name(record), len(order)))
            rows += [[f"`{_name(r)}`", run.card, *cells(r), r["run"]["when"]] for r in records]
        runs = itertools.chain(*(run.records.values() for run in _newest(topic, results)))
        return markdown(["call", "on", *heads, "measured"], rows) + (f"\n\n{report.setting(runs)}." if rows else "")

    return make


def _beside(record: Record) -> list[str]:
    ratio = measured.against_best(record, LIBRARIES)["ratio"]
    return [*(time_of(record, name) for name in ("ours", "xla")), floored(ratio)]


def sample(results: Results) -> str:
    """Every run of random calls of all functions, and the worst calls of the newest."""
    rows, worst = [], []
    for run in measured.topic_runs("sample", results.folder):
        if not (found := report.against_libraries(run.records.values())):
            continue  # a comparison of ours by kernels and by XLA alone
        mean, slow = report.mean_and_slow(found)
        share = f"{slow} ({slow / len(found):.1%})"
        very_slow = str(sum(ratio < VERY_SLOW for ratio, _ in found))
        drawn = len(run.records) + len(run.header.get("left_out", ()))
        label = f"{run.card}, JAX {run.jax}, seed {run.seed}"
        rows.append([label, f"{len(found)} of {drawn}", floored(mean), share, very_slow, run.day, run.commit])
        cells = [
            [f"`{_name(r)}`", *(time_of(r, name) for name in ("ours", *LIBRARIES)), number(ratio, ".3f")]
            for ratio, r in found[:WORST_SHOWN]
        ]
        heads = ["call", "ours, us", *(f"{name}, us" for name in LIBRARIES.values()), "x best"]
        worst = worst or [f"The {len(cells)} worst of {label}:", markdown(heads, cells)]
    heads = ["run", "calls compared", "geometric mean", f"below {SLOW}", f"below {VERY_SLOW}", "day", "commit"]
    return "\n\n".join([markdown(heads, rows), *worst])


def chain_groups(results: Results) -> str:
    """For each function, pass and dtype: how many times faster ours is than XLA, and where it is least."""
    rows = []
    for run in _newest("chains", results):
        groups: dict[str, list[tuple[float, str]]] = {}
        for ratio, record in report.against_libraries(run.records.values()):
            _, function, size, axis, _ = _CHAIN.split(_name(record))
            across = " along another axis" if axis not in (None, "-1") else ""
            groups.setdefault(f"`{function}`{across}", []).append((ratio, size))
        for name, ratios in sorted(groups.items()):
            mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
            rows.append([name, run.card, str(len(ratios)), floored(mean), f"{floored(ratios[0][0])} ({ratios[0][1]})"])
    records = [record for run in _newest("chains", results) for record in run.records.values()]
    days = ", ".join(dict.fromkeys(record["run"]["when"] for record in records))
    heads = ["call", "on", "sizes", "mean x XLA", "least, at"]
    return markdown(heads, rows) + (f"\n\n{report.setting(records)}; {days}." if rows else "")


DETAILS: dict[str, Callable[[Results], str]] = {
    "chains": _by_call("chains", ("ours, us", "XLA, us", "x XLA"), _beside),
}
TABLES: dict[str, Callable[[Results], str]] = {
    "chain_groups": chain_groups,
    "first": _by_call(
        "first", ("ours", *LIBRARIES.values()), lambda r: [_seconds(r, name) for name in ("ours", *LIBRARIES)]
    ),
    "sample": sample,
}
