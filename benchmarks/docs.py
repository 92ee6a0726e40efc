"""`python -m benchmarks.docs`: rewrites every generated table of README.md and docs/*.md from the committed results.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; everything between them belongs to this program.
`--print=NAME` prints a table with a row for each measured case, which no document has.
"""

import argparse
import functools
import itertools
import operator
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import attention_cases, cases, pictures, promises, report, tables
from benchmarks import results as measured
from benchmarks.report import (
    CARD,
    LIBRARIES,
    WHEN,
    Column,
    fact,
    faster,
    floored,
    markdown,
    named,
    number,
    table,
    times,
)
from benchmarks.results import KERNEL, NOT_MEASURED, ROOT, Record, Results, Run
from pallas_kernels.softmax.dispatch import KERNELS

Table = Callable[[Results], str]
PICTURES = ROOT / "docs" / "pictures"
PEERS = {
    **{"xla": "XLA", "xla_f32": "XLA, float32", "torch_compile": "torch.compile", "torch": "torch"},
    **{"liger": "Liger", "quack": "quack"},
}
_PASS_WORDS = {"fwd": "", "bwd": " backward", "value_and_vjp": " value and vjp", "call": " call"}
_PASS_WORDS |= {"value_and_grad": " value and gradient", "value_and_grad_mean": " value and gradient of `.mean()`"}
_MARKER = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def documents() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewrite(text: str, results: Results) -> str:
    """`text` with every table made anew; a name without a table is an error."""
    return _MARKER.sub(lambda found: found[1] + TABLES[found[2]](results) + "\n" + found[3], text)


def ladder(pass_: str, dtype: str) -> Table:
    """Kernels against row length: the traffic each needs, and the time it took."""

    def make(results: Results) -> str:
        widths = sorted(tables.ROWS.select(pass_=[pass_], dtype=[dtype], tags=["ladder"]), key=lambda case: case.cols)
        found = [(case, record) for case in widths if (record := results.kernels(case.name)) is not None]
        if not found:
            return NOT_MEASURED
        records = [record for _, record in found]
        names = dict.fromkeys(name for r in records for name in r["impls"] if name.removeprefix(KERNEL) in KERNELS)
        rows = []
        for name in (*names, "xla"):
            entries = [record["impls"].get(name, {}) for record in records]
            if any("us" in entry for entry in entries):
                label = "XLA" if name == "xla" else name.removeprefix(KERNEL)
                rows.append([label, _traffic(found, name), *map(_time_and_speed, entries)])
        rows.append(["copy, same bytes", "", *(_time_and_speed(record["copy"]) for record in records)])
        lengths = [f"N = {case.cols}" for case, _ in found]
        days = {day: [n for n, r in zip(lengths, records, strict=True) if WHEN(r) == day] for day in map(WHEN, records)}
        when = "; ".join(f"{day}: {', '.join(names)}" for day, names in days.items())
        made = markdown(["kernel", "traffic", *lengths], rows)
        return f"{made}\n\nMicroseconds (TB/s of the least traffic). {report.caption(records)} {when}."

    return make


def _traffic(found: Iterable[tuple[cases.Case, Record]], name: str) -> str:
    """Bytes that the kernel says it moves, in units of the operand's size."""
    pairs = [(case, record["impls"].get(name, {}).get("bytes_moved")) for case, record in found]
    units = [round(moved / case.operand_bytes, 1) for case, moved in pairs if moved]
    ends = sorted({min(units), max(units)}) if units else []
    return " ... ".join(format(unit, "g") for unit in ends) + " MN" if units else "" if name == "xla" else "-"


def _time_and_speed(entry: Mapping[str, Any]) -> str:
    if "us" not in entry:
        return entry["status"] if entry.get("status") == "WRONG" else "-"
    return f"{entry['us']:.0f} ({entry['tb_per_s']:.2f})"


# The lines of the summary: operations, passes and the fewest rows.
LINES = {
    "`softmax`": ("softmax", "fwd", 1024),
    "`softmax` of at most 128 rows": ("softmax", "fwd", 0),
    "gradient of `softmax`": ("softmax", "bwd value_and_vjp", 0),
    "`log_softmax`, `logsumexp`": ("log_softmax logsumexp", "fwd", 0),
    "cross entropy": ("cross_entropy", "fwd", 0),
    "cross entropy with gradient": ("cross_entropy", "value_and_grad", 0),
    "cross entropy with gradient, by `.mean()`": ("cross_entropy", "value_and_grad_mean", 0),
    "`top_k_softmax`": ("top_k", "fwd", 0),
}
HEADLINE = {
    *((label, "H200") for label in ("`softmax`", "cross entropy with gradient", "`top_k_softmax`")),
    *((label, "H200") for label in ("`flash_attention`", "gradient of `flash_attention`")),
    ("`linear_cross_entropy`", "H100"),
}


def line_of(case: Mapping[str, Any]) -> str | None:
    """The first line that a case counts in; more dtypes and options than the promises name do not count."""
    is_in = lambda ops, passes, rows: (
        case["op"] in ops.split() and case["pass"] in passes.split() and case["rows"] >= rows
    )
    return next((label for label, line in LINES.items() if is_in(*line) and "extended" not in case["tags"]), None)


class Line(NamedTuple):
    """Measurements of an operation: of each record our share of the floor, and how many times faster ours is."""

    label: str
    card: str
    records: Sequence[Record]
    shares: Sequence[float | None]
    xla: Sequence[float | None]
    others: Sequence[float | None]  # against the best other library


def measured_lines(results: Results) -> list[Line]:
    """Collects the measurements of each operation, on each card."""
    ratio = lambda peer: functools.partial(measured.ratio, peer=peer)
    libraries = lambda r: _least(measured.ratio(r, peer) for peer in measured.ROW_LIBRARIES)
    nothing = lambda record: None

    def of(label: str, records: Iterable[Record], *columns: Callable[[Record], float | None]) -> list[Line]:
        each = lambda found: (list(map(column, found)) for column in columns)
        return [Line(label, card.upper(), found, *each(found)) for card, found in report.by_card(records).items()]

    def of_product(record: Record) -> float | None:
        rate = record["impls"]["ours"].get("tflop_per_s")
        return rate / record["matmul"]["tflop_per_s"] if rate else None

    lines: list[Line] = []
    for label, (op, *_) in LINES.items():
        records = [record for record in results.records() if line_of(record["case"]) == label]
        share = nothing if op == "top_k" else lambda r: r["impls"]["ours"].get("fraction_of_copy")
        lines += of(label, records, share, ratio("xla"), libraries)
    for run in _newest_jax(results):
        for label, pass_ in (("`flash_attention`", "fwd"), ("gradient of `flash_attention`", "bwd")):
            records = [record for record in run.records.values() if record["case"]["pass"] == pass_]
            lines += of(label, records, of_product, nothing, lambda r: measured.against_best(r)["ratio"])
    one = lambda r: share_of_read(r) if r["case"]["queries"] == 1 else None
    lines += of("1 to 512 queries of many keys", few_queries(results), one, nothing, ratio("cudnn"))
    share = lambda r: 1 / x if (x := r["impls"]["ours"].get("x_products")) else None
    others = lambda r: _least(linear_ratio(r, peer) for peer in LINEAR_PEERS if peer != "optax")
    optax = functools.partial(linear_ratio, peer="optax")
    return lines + of("`linear_cross_entropy`", linear_records(results), share, optax, others)


def _newest_jax(results: Results) -> list[Run]:
    """The run of attention with the newest JAX on each card."""
    newest = {run.card: run for run in reversed(measured.attention_runs(results.folder))}
    return [*reversed(newest.values())]


def _least(ratios: Iterable[float | None]) -> float | None:
    return min(filter(None, ratios), default=None)


def headline(results: Results) -> str:
    """The medians of the operations that most models spend their time in."""
    lines = [line for line in measured_lines(results) if (line.label, line.card) in HEADLINE]
    rows = [[line.label, line.card, *map(_median, line[3:])] for line in lines]
    return markdown(["operation", "on", "of the hardware limit", "x XLA", "x best other library"], rows)


def summary(results: Results) -> str:
    """A row for each operation and card, with the slowest case beside XLA or another library; and the conditions."""
    lines = measured_lines(results)
    rows = []
    for line in lines:
        best = zip(map(_least, zip(line.xla, line.others, strict=True)), line.records, strict=True)
        worst = min(((ratio, r["case"]["name"]) for ratio, r in best if ratio is not None), default=None)
        slowest = f"{worst[0]:.2f} `{worst[1]}`" if worst else "-"
        rows.append([line.label, line.card, _count(line.records), *map(_spread, line[3:]), slowest])
    where = report.setting([record for line in lines if line.label in LINES for record in line.records])
    text = (
        f"\n\nMedian (worst ... best case) on one GPU. Rows: {where}; attention: the card's newest JAX. The floor is "
        "the time of a copy of the same bytes; for attention, of as large a product of square matrices; for one query, "
        "of a read; for `linear_cross_entropy`, of as many products of the same shapes. XLA runs `jax.nn` or optax. "
        "Other libraries: torch, torch.compile, Liger, quack, tokamax; for attention cuDNN, which gets documents as a "
        "dense mask." + linear_memory(results)
    )
    heads = ["operation", "on", "cases", "of the floor", "x XLA", "x best other", "least x XLA or other"]
    return markdown(heads, rows) + (text if rows else "")


def _count(records: Sequence[Record]) -> str:
    wrong = sum(record["impls"]["ours"]["status"] != "ok" for record in records)
    return f"{len(records)}, {wrong} WRONG" if wrong else str(len(records))


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def _spread(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{statistics.median(known):.2f} ({known[0]:.2f} ... {known[-1]:.2f})" if known else "-"


def of_ops(ops: Iterable[str], facts: Mapping[str, Callable[[Record], str]], errors_of: tuple[str, ...] = ()) -> Table:
    """Every measured case of some operations: ours beside its peers, some of which have their errors shown.

    `facts` are the columns between the time and the peers.
    """

    def make(results: Results) -> str:
        records = [record for record in results.records() if record["case"]["op"] in ops]
        records.sort(key=report.in_order(tables.ROWS.cases))
        peers = [peer for peer in PEERS if any(peer in record["impls"] for record in records)]
        columns: dict[str, Callable[[Record], str]] = {
            "case": lambda r: title(r["case"]),
            "us": times("ours")["ours, us"],
            **facts,
        }
        columns |= {f"x {PEERS[peer]}": functools.partial(_against, measured.ratio, peer) for peer in peers}
        columns["error, ulp"] = fact("ours", "max_error_ulp", ".1f")
        columns |= {f"of {PEERS[peer]}": functools.partial(_error, peer) for peer in peers if peer in errors_of}
        columns["measured"] = WHEN
        return table(records, columns, report.caption(records, peers))

    return make


def title(case: Mapping[str, Any]) -> str:
    words = _PASS_WORDS[case["pass"]]
    options = "".join(f", {name} {value:g}" for name, value in case.get("options", {}).items())
    return f"{case['op']}{words} {cases.SHORT_DTYPES[case['dtype']]} {case['rows']} x {case['cols']}{options}"


def _against(ratio: Callable[[Record, str], float | None], peer: str, record: Record) -> str:
    """How many times faster ours is, or why that is not known."""
    entry, value = record["impls"].get(peer, {"status": "ok"}), ratio(record, peer)
    if value is not None:
        return format(value, ".2f")
    why = "out of memory" if "RESOURCE_EXHAUSTED" in entry.get("reason", "") else entry["status"]
    return {"declined": "refuses", "ok": "-"}.get(why, why)


def _error(peer: str, record: Record) -> str:
    value = measured.loss_error(record, peer)
    return number(value, ".0f" if value and value >= 100 else ".1f")


def attention_runs(results: Results) -> str:
    def products(run: Run) -> str:
        rates = [record["matmul"]["tflop_per_s"] for record in run.records.values()]
        return f"{min(rates):.0f} to {max(rates):.0f}"

    linker = lambda record: pathlib.Path(record["nvjitlink"]).name if record.get("nvjitlink") else "none"
    columns: dict[str, Column] = {
        "run": operator.attrgetter("label"),
        "card": lambda run: run.header["device"]["name"],
        "driver": lambda run: run.header["device"].get("driver_version", "-"),
        "cuDNN": lambda run: run.header["versions"].get("cudnn", "-"),
        "nvJitLink": lambda run: " and ".join(dict.fromkeys(map(linker, run.records.values()))),
        "matmul 8192³, TFLOP/s": products,
        "day": operator.attrgetter("day"),
        "commit": operator.attrgetter("commit"),
        "left out": lambda run: ", ".join(run.header.get("left_out", ())) or "none",
    }
    return table(measured.attention_runs(results.folder), columns)


def attention_cells(pass_: str) -> Table:
    """Every cell of a pass: ours, cuDNN and the ratio in each run, and the two versions of JAX beside each other."""
    direct = {"direct, us": lambda r: fact("ours", "direct_us", ".1f")(r) if r else "-"}
    columns = times("ours") | (direct if pass_ == "bwd" else {}) | times("cudnn") | {"x cuDNN": faster("cudnn")}

    def make(results: Results) -> str:
        runs = measured.attention_runs(results.folder)
        order = {case.name: i for i, case in enumerate(attention_cases.TABLE.cases)}
        names = dict.fromkeys(n for run in runs for n, r in run.records.items() if r["case"]["pass"] == pass_)
        shown = [(run, head) for run in runs for head in columns if not run.repeat or head == "x cuDNN"]
        rows = []
        for name in sorted(names, key=lambda name: order.get(name, len(order))):
            case = next(run.records[name]["case"] for run in runs if name in run.records)
            cells = [columns[head](run.records.get(name)) for run, head in shown]
            ratios = [promises.speed(new.records.get(name), old.records.get(name)) for new, old in promises.pairs(runs)]
            rows.append([report.cell_of(case), *cells, *map(floored, ratios)])
        heads = [f"{run.label}: {head}" for run, head in shown]
        return markdown(["cell", *heads, *(f"{new.label} over {old.label}" for new, old in promises.pairs(runs))], rows)

    return make


def attention(results: Results) -> str:
    """Every cell, both passes: the time of ours and the ratio to cuDNN's, with the newest JAX on each card."""
    runs, rows = _newest_jax(results), []
    for case in attention_cases.TABLE.select(tags=[promises.CELLS], pass_=["fwd"]):
        names = [case.name, case.name.replace("_fwd_", "_bwd_")]
        records = [run.records.get(name) for run in runs for name in names]
        if any(records):
            cells = [(report.time_of(r, "ours"), faster("cudnn")(r)) for r in records]
            rows.append([report.cell_of(case.describe()), *itertools.chain(*cells)])
    heads = [f"{run.card} {name}, us | x cuDNN" for run in runs for name in promises.PASSES.values()]
    return markdown(["cell", *itertools.chain(*(head.split(" | ") for head in heads))], rows)


def _sample_row(run: Run, label: str, *bounds: float) -> tuple[list[tuple[float, Record]], list[str]]:
    """The comparisons of a run of random calls, the worst first, and a row about them."""
    found = report.against_libraries(run.records.values())
    below = [sum(ratio < bound for ratio, _ in found) for bound in bounds]
    cells = [f"{below[0]} ({below[0] / len(found):.1%})", *map(str, below[1:])] if found else ["-"] * len(bounds)
    mean = statistics.geometric_mean(ratio for ratio, _ in found) if found else None
    drawn = len(run.records) + len(run.header.get("left_out", ()))
    return found, [label, f"{len(found)} of {drawn}", floored(mean), *cells, run.day, run.commit]


def _sample_heads(*bounds: float) -> list[str]:
    return ["run", "calls compared", "geometric mean", *(f"below {bound}" for bound in bounds), "day", "commit"]


_TO_BEST: Column = lambda r: floored(measured.against_best(r, LIBRARIES)["ratio"])


def attention_sample(results: Results) -> str:
    """Runs of random and of short calls, and the calls that are slower than another library."""
    rows, slower = [], []
    samples = [(run, f"seed {run.seed}") for run in measured.attention_runs(results.folder, "attention sample")]
    samples += [(run, "short") for run in measured.attention_runs(results.folder, "attention short")]
    columns = {"call": named("attention_"), **times("ours", *LIBRARIES), "x best": _TO_BEST}
    for run, name in samples:
        found, row = _sample_row(run, f"{run.label}, {name}", report.SLOW)
        rows.append(row)
        slow = [record for ratio, record in found if ratio < report.SLOW]
        slower += [[f"{run.card}, {name}", *(cell(record) for cell in columns.values())] for record in slow]
    made = markdown(_sample_heads(report.SLOW), rows)
    return "\n\n".join([made, *([markdown(["run", *columns], slower)] if slower else [])])


def sample(results: Results) -> str:
    """Every run of random calls of all functions, and the worst calls of the newest."""
    rows, worst, bounds = [], [], (report.SLOW, report.VERY_SLOW)
    for run in measured.topic_runs("sample", results.folder):
        label = f"{run.card}, JAX {run.jax}, seed {run.seed}"
        found, row = _sample_row(run, label, *bounds)
        if not found:
            continue  # a comparison of ours by kernels and by XLA alone
        rows.append(row)
        shown = [record for _, record in found[: report.WORST_SHOWN]]
        to_best = lambda r: number(measured.against_best(r, LIBRARIES)["ratio"], ".3f")
        columns = {"call": named(), **times("ours", *LIBRARIES), "x best": to_best}
        worst = worst or [f"The {len(shown)} worst of {label}:", table(shown, columns)]
    return "\n\n".join([markdown(_sample_heads(*bounds), rows), *worst])


def few_queries(results: Results) -> list[Record]:
    """The newest record of each call of few queries on each card."""
    found = measured.newest(measured.topic_runs("attention decode", results.folder), lambda r: "cudnn" in r["impls"])
    return [*found.values()]


def attention_decode(results: Results) -> str:
    """Few queries: what of a read's speed the keys and values are read with, and how many times cuDNN's."""
    columns = {"call": named("attention_fwd_"), "card": CARD, **times("ours", "cudnn")}
    columns |= {"TB/s": fact("ours", "tb_per_s", ".2f"), "of a read": lambda r: number(share_of_read(r), ".2f")}
    columns |= {"TFLOP/s": fact("ours", "tflop_per_s", ".0f"), "x cuDNN": faster("cudnn"), "measured": WHEN}
    order = report.in_order(attention_cases.TABLE.select(tags=["decode"], pass_=["fwd"]))
    return table(sorted(few_queries(results), key=lambda r: (CARD(r), order(r))), columns)


def share_of_read(record: Record) -> float:
    return record["impls"]["ours"]["tb_per_s"] / record["read"]["tb_per_s"]


def attention_pages(results: Results) -> str:
    """Keys and values in pages: how many times as fast as from a contiguous cache."""
    names = [f"{layout}_{size}" for layout in ("heads_first", "pages_first") for size in (16, 64, 128)]
    share = lambda name: (
        lambda r: number(r["impls"]["ours"]["us"] / r["impls"][name]["us"] if name in r["impls"] else None, ".2f")
    )
    runs = measured.attention_runs(results.folder, "attention decode")
    records = [r for run in runs for r in run.records.values() if not r["impls"].keys().isdisjoint(names)]
    columns = {"call": named("attention_fwd_"), "card": CARD, "contiguous, us": times("ours")["ours, us"]}
    columns |= {name.replace("_", " "): share(name) for name in names} | {"measured": WHEN}
    return table(records, columns)


_LINEAR_SIZES = ("tokens", "embedding", "vocabulary")
LINEAR_PEERS = {"optax": "optax", "tokamax": "tokamax", "liger": "Liger", "quack": "quack"}


def linear_records(results: Results) -> list[Record]:
    """The newest measurement of each case of the loss of `hidden @ weight`, by card."""
    return sorted(measured.newest(measured.topic_runs("linear", results.folder)).values(), key=CARD)


def linear_ratio(record: Record, peer: str) -> float | None:
    """How many times faster ours is, where each process has its own products."""
    ours, other = (record["impls"].get(name, {}).get("x_products") for name in ("ours", peer))
    return other / ours if ours and other else None


def linear(results: Results) -> str:
    """Every case of the loss of `hidden @ weight`."""
    columns: dict[str, Column] = {
        "call": lambda r: r["case"]["pass_"],
        "tokens x embedding x vocabulary": lambda r: " x ".join(str(r["case"][name]) for name in _LINEAR_SIZES),
        "on": CARD,
        "ms": fact("ours", "min_us", ".2f", 1e3),
        "x products": fact("ours", "x_products", ".3f"),
        "extra, MiB": fact("ours", "temp_bytes", ",.0f", 2**20),
        "optax's": fact("optax", "temp_bytes", ",.0f", 2**20),
        **{f"x {label}": functools.partial(_against, linear_ratio, peer) for peer, label in LINEAR_PEERS.items()},
    }
    records = linear_records(results)
    note = f"{report.setting(records)}; the best of interleaved rounds; {report.days(records)}."
    return table(records, columns, note)


def linear_memory(results: Results) -> str:
    """Says how much memory gradients take without logits, and with whole logits, where these take the most."""
    needed = lambda record, name: record["impls"].get(name, {}).get("temp_bytes") or 0
    records = [record for record in linear_records(results) if record["case"]["pass_"] == "gradient"]
    largest = max(records, key=lambda record: needed(record, "optax"), default=None)
    if largest is None or not (needed(largest, "ours") and needed(largest, "optax")):
        return ""
    case = largest["case"]
    ours, optax = (f"{needed(largest, name) / 2**30:.2f} GiB" for name in ("ours", "optax"))
    return (
        f" For {case['tokens']} tokens and a vocabulary of {case['vocabulary']}, `linear_cross_entropy` with gradients "
        f"takes {ours} beside arguments and results, and optax {optax}."
    )


# The name of a call: its function with pass and dtype, its size, and its axis.
_CHAIN = re.compile(r"^(.+?_(?:fwd|value_and_grad|value_and_vjp)_(?:bf16|f32))_(\w+?)(?:_axis(-?\d))?(?:_k\d+)?$")


def _newest(topic: str, results: Results) -> list[Record]:
    """The records of the newest run of each card."""
    runs = {run.card: run for run in reversed(measured.topic_runs(topic, results.folder))}
    return [record for run in runs.values() for record in run.records.values()]


def _by_call(topic: str, columns: Mapping[str, Column]) -> Table:
    """A table of the newest run of each card, in the order of the cases."""

    def make(results: Results) -> str:
        order, records = report.in_order(tables.TABLE.apart[topic](0, 0)), _newest(topic, results)
        shown = [record for of_card in report.by_card(records).values() for record in sorted(of_card, key=order)]
        known = {"call": named(), "on": CARD, **columns, "measured": WHEN}
        return table(shown, known, f"{report.setting(records)}.")

    return make


def chain_groups(results: Results) -> str:
    """For each function, pass and dtype: how many times faster ours is than XLA, and where it is least."""
    records, rows = _newest("chains", results), []
    for card, of_card in report.by_card(records).items():
        groups: dict[str, list[tuple[float, str]]] = {}
        for ratio, record in report.against_libraries(of_card):
            _, function, size, axis, _ = _CHAIN.split(record["case"]["name"])
            across = " along another axis" if axis not in (None, "-1") else ""
            groups.setdefault(f"`{function}`{across}", []).append((ratio, size))
        for name, ratios in sorted(groups.items()):
            mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
            rows.append([name, card, str(len(ratios)), floored(mean), f"{floored(ratios[0][0])} ({ratios[0][1]})"])
    heads = ["call", "on", "sizes", "mean x XLA", "least, at"]
    return markdown(heads, rows) + (f"\n\n{report.setting(records)}; {report.days(records)}." if rows else "")


def _share(record: Record, name: str) -> str:
    """A mean of the GPUs, in % of the time in which they are busy; nothing where no profile was taken."""
    return f"{100 * np.mean(record[name]) / np.mean(record['busy_us']):.1f}" if "busy_us" in record else ""


def scaling_table(results: Results) -> str:
    """Every case that was measured, with columns for each card and number of devices."""
    newest = report.newest_scaling(measured.topic_runs("scaling", results.folder))
    places = list(dict.fromkeys((card, devices) for card, devices, _ in newest))
    rows = []
    for name in sorted({name for *_, name in newest}):
        found = [newest.get((*place, name)) for place in places]
        facts = lambda r: [f"{r['one_us'] / 1e3:.4g}", f"{r['efficiency']:.2f}", _share(r, "alone_us")]
        cells = [facts(record) if record else [""] * 3 for record in found]
        last = next(record for record in reversed(found) if record)
        exchanged = ", ".join(f"{n} {kind}" for kind, n in last["collectives"].items()) or "nothing"
        rows.append([name, *itertools.chain(*cells), exchanged])
    heads = [["one, ms", f"efficiency on {devices} {card}", "alone, %"] for card, devices in places]
    return markdown(["call", *itertools.chain(*heads), "exchanges"], rows)


# Every measured case, which documents do not show.
DETAILS: dict[str, Table] = {
    "rows": of_ops(
        ("softmax", "log_softmax", "logsumexp"),
        {
            "TB/s": fact("ours", "tb_per_s", ".2f"),
            "of copy": fact("ours", "fraction_of_copy", ".2f"),
        },
    ),
    "attention_forward": attention_cells("fwd"),
    "attention_backward": attention_cells("bwd"),
    "attention_decode": attention_decode,
    "chains": _by_call("chains", {**times("ours", "xla"), "x XLA": _TO_BEST}),
}
TABLES: dict[str, Table] = {
    "headline": headline,
    "summary": summary,
    "cross_entropy": of_ops(
        ["cross_entropy"],
        {"units": lambda record: number(measured.units(record, "ours"), ".2f")},
        ("xla", "xla_f32"),
    ),
    "top_k": of_ops(["top_k"], {}),
    "targets": promises.rows,
    "ladder_forward_f16": ladder("fwd", "float16"),
    "ladder_forward_f32": ladder("fwd", "float32"),
    "ladder_backward_f16": ladder("bwd", "float16"),
    "attention_runs": attention_runs,
    "attention_promises": promises.attention,
    "attention": attention,
    "attention_sample": attention_sample,
    "attention_pages": attention_pages,
    "linear": linear,
    "chain_groups": chain_groups,
    "first": _by_call("first", report.SECONDS),
    "sample": sample,
    "scaling": scaling_table,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true", help="draw the pictures too; needs matplotlib")
    parser.add_argument("--print", choices=list(DETAILS), help="print this table of every measured case, and stop")
    flags = parser.parse_args(arguments)
    results = Results()
    if flags.print:
        return print(DETAILS[flags.print](results))
    for path in documents():
        text = path.read_text()
        made = rewrite(text, results)
        if made != text:
            path.write_text(made)
            print(f"rewrote {path.relative_to(ROOT)}")
    if flags.pictures:
        print("\n".join(map(str, pictures.draw(results, PICTURES))))


if __name__ == "__main__":
    main(sys.argv[1:])
