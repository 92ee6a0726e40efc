"""Results as text: the lines that a run prints, and the tables of attention."""

import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import attention_cases, targets
from benchmarks import results as measured
from benchmarks.results import NOT_MEASURED, Record, Results, Run

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
PASSES = {"fwd": "forward", "bwd": "backward"}
LIBRARIES = {"cudnn": "cuDNN", "xla": "XLA"}  # that random and short calls are measured beside
SLOW = 0.95  # calls below this ratio are counted
_NO_WORST = 10  # random calls that are shown


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


def sample(records: Iterable[Record]) -> str:
    """How much faster ours is than the better of cuDNN and XLA over random calls, and where it is worst."""
    records = list(records)
    found = against_libraries(records)
    if not found:
        return f"none of {len(records)} calls was timed by both ours and another library"
    mean, slow = mean_and_slow([ratio for ratio, _ in found])
    head = f"{len(found)} of {len(records)} calls, against the better of cuDNN and XLA: geometric mean {mean:.3f}, "
    head += f"{slow} below {SLOW} ({100 * slow / len(found):.1f} %); the worst:"
    return "\n".join([head, *(f"  {ratio:.3f}  {record['case']['name']}" for ratio, record in found[:_NO_WORST])])


def against_libraries(records: Iterable[Record]) -> list[tuple[float, Record]]:
    """How many times faster ours is than the better of cuDNN and XLA, for each call that has both; the worst first."""
    pairs = [(measured.against_best(record, LIBRARIES)["ratio"], record) for record in records]
    return sorted(((ratio, record) for ratio, record in pairs if ratio is not None), key=lambda pair: pair[0])


def mean_and_slow(ratios: Sequence[float]) -> tuple[float, int]:
    """The geometric mean, and how many are below `SLOW`."""
    return statistics.geometric_mean(ratios), sum(ratio < SLOW for ratio in ratios)


def setting(records: Iterable[Record]) -> str:
    """The devices, drivers and versions of JAX with which the records shown were measured."""
    runs = [record["run"] for record in records]
    each = lambda part, name: ", ".join(dict.fromkeys(str(run[part].get(name)) for run in runs))
    return f"{each('device', 'name')}, driver {each('device', 'driver_version')}, JAX {each('versions', 'jax')}"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, the first column left-aligned."""
    rule = ["---" if i == 0 else "---:" for i in range(len(heads))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def number(value: float | None, spec: str) -> str:
    """A number as text, and a dash where there is none."""
    return "-" if value is None else format(value, spec)


def floored(value: float | None) -> str:
    """Three digits that do not look better than the value is."""
    return "-" if value is None else format(math.floor(value * 1000) / 1000, ".3f")


def time_of(record: Record | None, name: str) -> str:
    """The microseconds of an implementation, or why there are none."""
    entry = record["impls"].get(name, {}) if record else {}
    if entry.get("status", "ok") != "ok":
        return "refuses" if entry["status"] == "declined" else entry["status"]
    return number(entry.get("us"), ".1f")


def call(case: Mapping[str, Any]) -> str:
    """A call of attention in words: "D 128, S 2048, causal"."""
    dim, value = case["head_dim"], case["value_dim"]
    heads = f", heads {case['heads']}/{case['key_heads']}" if case["heads"] != case["key_heads"] else ""
    span = f" {case['span']}" if case["span"] else ""
    dims = f"{dim}" if dim == value else f"{dim}/{value}"
    return f"D {dims}{heads}, S {case['length']}, {case['kind']}{span}"


def _name(record: Record) -> str:
    """The name with which `--case` measures a call again."""
    return f"`{record['case']['name'].removeprefix('attention_')}`"


def attention_runs(results: Results) -> str:
    """What each run of attention was made of."""
    rows = []
    for run in measured.attention_runs(results.folder):
        header, records = run.header, run.records.values()
        products = [record["matmul"]["tflop_per_s"] for record in records]
        linkers = dict.fromkeys(pathlib.Path(r["nvjitlink"]).name if r.get("nvjitlink") else "none" for r in records)
        facts = [
            header["device"]["name"],
            header["device"].get("driver_version"),
            header["versions"].get("cudnn"),
            " and ".join(linkers),
        ]
        span = f"{min(products):.0f} to {max(products):.0f}"
        missing = ", ".join(header.get("left_out", ())) or "none"
        rows.append([run.label, *(str(fact or "-") for fact in facts), span, run.day, run.commit, missing])
    heads = ["run", "card", "driver", "cuDNN", "nvJitLink", "matmul 8192³, TFLOP/s", "day", "commit", "left out"]
    return markdown(heads, rows) if rows else NOT_MEASURED


def attention_promises(results: Results) -> str:
    """What was promised of attention, beside what each run measured."""
    rows = []
    runs = measured.attention_runs(results.folder)
    for run, pass_ in itertools.product(runs, PASSES):
        found = [promise.judge(run, pass_) for promise in targets.PROMISES]
        slower = [f"{floored(ratio)} at {call(case)}" for ratio, case in targets.below(run, pass_)]
        rows.append([f"{run.label}, {PASSES[pass_]}", *map(judged, found), "; ".join(slower) or "none"])
    heads = ["", *(promise.describe() for promise in targets.PROMISES), "cells below 1.00"]
    return f"{markdown(heads, rows)}\n\n{_versions(runs)}".strip() if rows else NOT_MEASURED


def _pairs(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """The runs to compare: on one card with two versions of JAX, the newer first, both the first or both repeated."""
    pairs = itertools.combinations(runs, 2)
    return [(a, b) for a, b in pairs if (a.card, a.repeat) == (b.card, b.repeat) and a.jax != b.jax]


def _versions(runs: Sequence[Run]) -> str:
    """How many times faster the same source is with the newer JAX, in the geometric mean."""
    found = []
    for (newer, older), pass_ in itertools.product(_pairs(runs), PASSES):
        names = [case.name for case in attention_cases.select(tags=[targets.CELLS], passes=[pass_])]
        ratios = [ratio for name in names if (ratio := targets.speed(newer, older, name)) is not None]
        if ratios:
            verdict = judged((*targets.VERSIONS.word(ratios), len(ratios), len(names)))
            found.append([f"{newer.label} over {older.label}, {PASSES[pass_]}", verdict, floored(min(ratios))])
    return markdown(["times faster", targets.VERSIONS.describe(), "worst"], found) if found else ""


def judged(verdict: tuple[float, str, int, int] | None) -> str:
    """A promise's value, whether it is kept, and how many cells were measured if not all."""
    if verdict is None:
        return "-"
    value, word, count, wanted = verdict
    return f"{floored(value)} {word}" + ("" if count == wanted else f" ({count} of {wanted} cells)")


def attention_cells(pass_: str) -> Callable[[Results], str]:
    """Every cell of a pass: ours, cuDNN and the ratio in each run, and the two versions of JAX beside each other."""

    def make(results: Results) -> str:
        runs = measured.attention_runs(results.folder)
        order = {case.name: i for i, case in enumerate(attention_cases.all_cases())}
        names = dict.fromkeys(n for run in runs for n, r in run.records.items() if r["case"]["pass"] == pass_)
        names = sorted(names, key=lambda name: order.get(name, len(order)))
        rows = []
        for name in names:
            records = [run.records.get(name) for run in runs]
            row = [call(next(record["case"] for record in records if record))]
            for run, record in zip(runs, records, strict=True):
                row += _cell(record, pass_) if not run.repeat else _cell(record, pass_)[-1:]
            rows.append(row + [floored(targets.speed(new, old, name)) for new, old in _pairs(runs)])
        heads = ["cell"]
        for run in runs:
            own = ["ours, us", *(["direct, us"] if pass_ == "bwd" else []), "cuDNN, us", "x cuDNN"]
            heads += [f"{run.label}: {head}" for head in (own if not run.repeat else own[-1:])]
        heads += [f"{new.label} over {old.label}" for new, old in _pairs(runs)]
        return markdown(heads, rows) if rows else NOT_MEASURED

    return make


def _cell(record: Record | None, pass_: str) -> list[str]:
    """Ours, its backward pass alone, cuDNN and the ratio."""
    direct = record["impls"].get("ours", {}).get("direct_us") if record else None
    middle = [number(direct, ".1f")] if pass_ == "bwd" else []
    ratio = measured.ratio(record, "cudnn") if record else None
    return [time_of(record, "ours"), *middle, time_of(record, "cudnn"), floored(ratio)]


def attention_sample(results: Results) -> str:
    """Each run of random calls, and its ten worst."""
    rows, worst = [], []
    for run in measured.attention_runs(results.folder, "attention sample"):
        found = against_libraries(run.records.values())
        mean, slow = mean_and_slow([ratio for ratio, _ in found]) if found else (None, 0)
        share = f"{slow} ({slow / len(found):.1%})" if found else "-"
        label = f"{run.label}, seed {run.seed}"
        drawn = len(run.records) + len(run.header.get("left_out", ()))
        rows.append([label, f"{len(found)} of {drawn}", floored(mean), share, run.day, run.commit])
        worst += [f"The {_NO_WORST} worst of {label}:", _beside_libraries([r for _, r in found[:_NO_WORST]])]
    heads = ["run", "calls compared", "geometric mean", f"below {SLOW}", "day", "commit"]
    return "\n\n".join([markdown(heads, rows), *worst]) if rows else NOT_MEASURED


def attention_short(results: Results) -> str:
    """Every short sequence, in each run."""
    runs = measured.attention_runs(results.folder, "attention short")
    found = []
    for run in runs:
        left = ", ".join(f"`{name.removeprefix('attention_')}`" for name in run.header.get("left_out", ()))
        about = f"{run.label}, {run.day} {run.commit}" + (f", without {left}" if left else "") + ":"
        records = sorted(run.records.values(), key=lambda r: (r["case"]["pass"], r["case"]["length"]))
        found += [about, _beside_libraries(records)]
    return "\n\n".join(found) if runs else NOT_MEASURED


def _beside_libraries(records: Iterable[Record]) -> str:
    rows = [
        [
            _name(record),
            *(time_of(record, name) for name in ("ours", *LIBRARIES)),
            floored(measured.against_best(record, LIBRARIES)["ratio"]),
        ]
        for record in records
    ]
    return markdown(["call", "ours, us", *(f"{name}, us" for name in LIBRARIES.values()), "x best"], rows)


def attention_odd(results: Results) -> str:
    """The rate at a length that is one less, over the rate at the length, of one source on one card."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    runs: dict[str, dict[tuple[Any, ...], Record]] = {}
    for run in measured.attention_runs(results.folder, "attention odd"):
        where = runs.setdefault(f"{run.card}, JAX {run.jax}, {run.commit}", {})
        where |= {_cell_of(record["case"]): record for record in run.records.values()}
    for where, found in runs.items():
        for record in sorted(found.values(), key=lambda r: (r["case"]["head_dim"], r["case"]["length"])):
            longer = record["case"] | {"length": record["case"]["length"] + 1}
            pair = [r["impls"]["ours"].get("tflop_per_s") for r in (record, found.get(_cell_of(longer))) if r]
            if len(pair) == 2 and all(pair):
                words = f"{pair[0] / pair[1]:.3f} ({pair[0]:.0f} / {pair[1]:.0f})"
                rows.setdefault((where, call(longer)), {})[longer["pass"]] = words
    heads = ["run", "cell of S", *(f"{words}, S - 1 over S (TFLOP/s)" for words in PASSES.values())]
    cells = [[*where, *(found.get(pass_, "-") for pass_ in PASSES)] for where, found in rows.items()]
    return markdown(heads, cells) if cells else NOT_MEASURED


def _cell_of(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two lengths of a cell have in common, and the length."""
    return tuple(value for key, value in sorted(case.items()) if key not in ("name", "tags"))
