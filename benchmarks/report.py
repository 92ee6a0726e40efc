"""Results as text: the lines that a run prints, tables in Markdown, and tables and pictures of attention."""

import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import attention_cases
from benchmarks import results as measured
from benchmarks.results import NOT_MEASURED, Record, Results, Run

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
PASSES = {"fwd": "forward", "bwd": "backward"}
LIBRARIES = {"cudnn": "cuDNN", "xla": "XLA"}  # that random and short calls are measured beside
SLOW, VERY_SLOW = 0.95, 0.85  # calls below these ratios are counted
CELLS = "standard"  # the benchmark's 32 of each pass of attention
WORST_SHOWN = 10  # random calls that are shown


def line(record: Record) -> str:
    """A case in one line for each implementation; times stand as multiples of the first one's, too."""
    name, impls = record["case"]["name"], record["impls"]
    if "error" in record:
        return f"{name}: failed: {record['error']}"
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


def call(case: Mapping[str, Any]) -> str:
    dim, value = case["head_dim"], case["value_dim"]
    heads = f", heads {case['heads']}/{case['key_heads']}" if case["heads"] != case["key_heads"] else ""
    span = f" {case['span']}" if case["span"] else ""
    return f"D {dim if dim == value else f'{dim}/{value}'}{heads}, S {case['length']}, {case['kind']}{span}"


def word(value: float, must: float | None, goal: float | None, at_most: bool = False) -> str:
    """Whether a value is as good as promised."""
    reached = lambda bound: bound is not None and (value <= bound if at_most else value >= bound)
    if must is not None and not reached(must):
        return "**missed**"
    return "goal" if reached(goal) else "kept" if must is not None else "below goal"


class Promise(NamedTuple):
    """Over the cells of attention with a tag, the worst ratio to the rivals, or the geometric mean, is at least `must`.

    A cell that is wrong or failed counts 0, and one in which a rival was not tried does not count.
    """

    label: str
    tag: str = CELLS
    rivals: tuple[str, ...] = ("cudnn",)
    must: float | None = None
    goal: float | None = None
    mean: bool = False

    def describe(self) -> str:
        bounds = [f"{word} {bound:.2f}" for word, bound in (("must", self.must), ("goal", self.goal)) if bound]
        return f"{self.label}, {', '.join(bounds)}"

    def judge(self, run: Run, pass_: str) -> str:
        records = _cells(run, pass_, self.tag)
        ratios = [self._ratio(r) if r["impls"]["ours"]["status"] == "ok" else 0.0 for r in records if r]
        return self.verdict([ratio for ratio in ratios if ratio is not None], len(records))

    def verdict(self, ratios: Sequence[float], wanted: int) -> str:
        """The value, whether it is kept, and how many cells were measured if not all."""
        if not ratios:
            return "-"
        value = statistics.geometric_mean(ratios) if self.mean and min(ratios) else min(ratios)
        count = "" if len(ratios) == wanted else f" ({len(ratios)} of {wanted} cells)"
        return f"{floored(value)} {word(value, self.must, self.goal)}{count}"

    def _ratio(self, record: Record) -> float | None:
        ratios = [ratio for rival in self.rivals if (ratio := measured.ratio(record, rival)) is not None]
        return min(ratios, default=None) if all(rival in record["impls"] for rival in self.rivals) else None


PROMISES = (
    Promise("x cuDNN, the worst of 32 cells", must=1.0),
    Promise("their geometric mean", must=1.08, mean=True),
    Promise("that of the 27 full and causal", "grid", must=1.08, mean=True),
    Promise("x the better of cuDNN and flash-attn-4, the worst", CELLS, ("cudnn", "fa4"), goal=1.0),
)
VERSIONS = Promise("geometric mean", must=0.99, goal=1.0, mean=True)


def _cells(run: Run, pass_: str, tag: str = CELLS) -> list[Record | None]:
    return [run.records.get(case.name) for case in attention_cases.TABLE.select(tags=[tag], pass_=[pass_])]


def _pairs(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """The runs to compare: on one card with two versions of JAX, the newer first, both the first or both repeated."""
    pairs = itertools.combinations(runs, 2)
    return [(a, b) for a, b in pairs if (a.card, a.repeat) == (b.card, b.repeat) and a.jax != b.jax]


def _speed(newer: Record | None, older: Record | None) -> float | None:
    """How many times faster a case of ours is in the newer run; None for runs of different sources."""
    if not newer or not older or newer["run"]["commit"] != older["run"]["commit"]:
        return None
    new, old = (record["impls"]["ours"].get("us") for record in (newer, older))
    return old / new if old and new else None


def attention_runs(results: Results) -> str:
    rows = []
    for run in measured.attention_runs(results.folder):
        header, records = run.header, run.records.values()
        products = [record["matmul"]["tflop_per_s"] for record in records]
        linkers = dict.fromkeys(pathlib.Path(r["nvjitlink"]).name if r.get("nvjitlink") else "none" for r in records)
        device = header["device"]
        facts = device["name"], device.get("driver_version"), header["versions"].get("cudnn"), " and ".join(linkers)
        span = f"{min(products):.0f} to {max(products):.0f}"
        missing = ", ".join(header.get("left_out", ())) or "none"
        rows.append([run.label, *(str(fact or "-") for fact in facts), span, run.day, run.commit, missing])
    heads = ["run", "card", "driver", "cuDNN", "nvJitLink", "matmul 8192³, TFLOP/s", "day", "commit", "left out"]
    return markdown(heads, rows)


def attention_promises(results: Results) -> str:
    """Puts the promises for attention beside the measurements of each run, and the newer JAX beside the older."""
    runs = measured.attention_runs(results.folder)
    rows, versions = [], []
    for run, pass_ in itertools.product(runs, PASSES):
        ratios = [(measured.ratio(r, "cudnn") or 1.0, call(r["case"])) for r in _cells(run, pass_) if r]
        slower = [f"{floored(ratio)} at {cell}" for ratio, cell in sorted(ratios, key=lambda x: x[0]) if ratio < 1]
        found = [promise.judge(run, pass_) for promise in PROMISES]
        rows.append([f"{run.label}, {PASSES[pass_]}", *found, "; ".join(slower) or "none"])
    for (newer, older), pass_ in itertools.product(_pairs(runs), PASSES):
        cells = list(zip(_cells(newer, pass_), _cells(older, pass_), strict=True))
        ratios = [ratio for pair in cells if (ratio := _speed(*pair)) is not None]
        if ratios:
            label = f"{newer.label} over {older.label}, {PASSES[pass_]}"
            versions.append([label, VERSIONS.verdict(ratios, len(cells)), floored(min(ratios))])
    text = markdown(["", *(promise.describe() for promise in PROMISES), "cells below 1.00"], rows)
    return "\n\n".join([text, *([markdown(["times faster", VERSIONS.describe(), "worst"], versions)] * bool(versions))])


def attention_cells(pass_: str) -> Callable[[Results], str]:
    """Every cell of a pass: ours, cuDNN and the ratio in each run, and the two versions of JAX beside each other."""
    columns = {"ours, us": lambda r: time_of(r, "ours")}
    if pass_ == "bwd":
        columns["direct, us"] = lambda r: number(r["impls"]["ours"].get("direct_us") if r else None, ".1f")
    columns |= {"cuDNN, us": lambda r: time_of(r, "cudnn")}
    columns |= {"x cuDNN": lambda r: floored(measured.ratio(r, "cudnn") if r else None)}

    def make(results: Results) -> str:
        runs = measured.attention_runs(results.folder)
        order = {case.name: i for i, case in enumerate(attention_cases.TABLE.cases)}
        names = dict.fromkeys(n for run in runs for n, r in run.records.items() if r["case"]["pass"] == pass_)
        shown = [(run, head) for run in runs for head in columns if not run.repeat or head == "x cuDNN"]
        rows = []
        for name in sorted(names, key=lambda name: order.get(name, len(order))):
            case = next(run.records[name]["case"] for run in runs if name in run.records)
            cells = [columns[head](run.records.get(name)) for run, head in shown]
            ratios = [_speed(new.records.get(name), old.records.get(name)) for new, old in _pairs(runs)]
            rows.append([call(case), *cells, *map(floored, ratios)])
        heads = [f"{run.label}: {head}" for run, head in shown]
        return markdown(["cell", *heads, *(f"{new.label} over {old.label}" for new, old in _pairs(runs))], rows)

    return make


def attention(results: Results) -> str:
    """Every cell, both passes: the time of ours and the ratio to cuDNN's, with the newest JAX on each card."""
    newest = {run.card: run for run in reversed(measured.attention_runs(results.folder))}
    runs = dict(reversed(newest.items()))
    rows = []
    for case in attention_cases.TABLE.select(tags=[CELLS], pass_=["fwd"]):
        names = [case.name, case.name.replace("_fwd_", "_bwd_")]
        records = [run.records.get(name) for run in runs.values() for name in names]
        if any(records):
            cells = [(time_of(r, "ours"), floored(measured.ratio(r, "cudnn") if r else None)) for r in records]
            rows.append([call(case.describe()), *itertools.chain(*cells)])
    heads = [f"{card} {name}, us | x cuDNN" for card in runs for name in PASSES.values()]
    return markdown(["cell", *itertools.chain(*(head.split(" | ") for head in heads))], rows)


def attention_sample(results: Results) -> str:
    """Runs of random and of short calls, and the calls that are slower than another library."""
    rows, slower = [], []
    samples = [(run, f"seed {run.seed}") for run in measured.attention_runs(results.folder, "attention sample")]
    samples += [(run, "short") for run in measured.attention_runs(results.folder, "attention short")]
    for run, name in samples:
        found = against_libraries(run.records.values())
        mean, slow = mean_and_slow(found) if found else (None, 0)
        share = f"{slow} ({slow / len(found):.1%})" if found else "-"
        drawn = len(run.records) + len(run.header.get("left_out", ()))
        rows.append([f"{run.label}, {name}", f"{len(found)} of {drawn}", floored(mean), share, run.day, run.commit])
        for ratio, record in found[:slow]:
            times = [time_of(record, impl) for impl in ("ours", *LIBRARIES)]
            label = f"`{record['case']['name'].removeprefix('attention_')}`"
            slower.append([f"{run.card}, {name}", label, *times, floored(ratio)])
    heads = ["run", "calls compared", "geometric mean", f"below {SLOW}", "day", "commit"]
    names = [f"{name}, us" for name in ("ours", *LIBRARIES.values())]
    tables = [markdown(heads, rows), *([markdown(["run", "call", *names, "x best"], slower)] if slower else [])]
    return "\n\n".join(tables)


def few_queries(results: Results) -> dict[str, Record]:
    """The newest record of each call of few queries, by card and name."""
    found: dict[str, Record] = {}
    runs = measured.attention_runs(results.folder, "attention decode")
    for run in sorted(runs, key=lambda run: run.header["timestamp"]):
        found |= {f"{run.card} {name}": r for name, r in run.records.items() if "cudnn" in r["impls"]}
    return found


def attention_decode(results: Results) -> str:
    """Few queries: what of a read's speed the keys and values are read with, and how many times cuDNN's."""
    found = few_queries(results)
    order = {case.name: i for i, case in enumerate(attention_cases.TABLE.select(tags=["decode"], pass_=["fwd"]))}
    rows = []
    for label, record in sorted(found.items(), key=lambda item: (item[0].split()[0], order[item[1]["case"]["name"]])):
        ours = record["impls"]["ours"]
        facts = [number(ours.get("tb_per_s"), ".2f"), number(share_of_read(record), ".2f")]
        facts += [number(ours.get("tflop_per_s"), ".0f"), floored(measured.ratio(record, "cudnn"))]
        name = label.split()[1].removeprefix("attention_fwd_")
        times = [time_of(record, impl) for impl in ("ours", "cudnn")]
        rows.append([f"`{name}`", label.split()[0], *times, *facts, record["run"]["when"]])
    return markdown(
        ["call", "card", "ours, us", "cuDNN, us", "TB/s", "of a read", "TFLOP/s", "x cuDNN", "measured"], rows
    )


def share_of_read(record: Record) -> float:
    return record["impls"]["ours"]["tb_per_s"] / record["read"]["tb_per_s"]


def attention_pages(results: Results) -> str:
    """Keys and values in pages: how many times as fast as from a contiguous cache."""
    names = [f"{layout}_{size}" for layout in ("heads_first", "pages_first") for size in (16, 64, 128)]
    rows = []
    for run in measured.attention_runs(results.folder, "attention decode"):
        for record in run.records.values():
            times = {name: record["impls"][name]["us"] for name in names if name in record["impls"]}
            if times:
                ours = record["impls"]["ours"]["us"]
                shares = [number(ours / times[name] if name in times else None, ".2f") for name in names]
                name = record["case"]["name"].removeprefix("attention_fwd_")
                rows.append([f"`{name}`", run.card, time_of(record, "ours"), *shares, record["run"]["when"]])
    return markdown(["call", "card", "contiguous, us", *(name.replace("_", " ") for name in names), "measured"], rows)


LINEAR_PEERS = {"optax": "optax", "tokamax": "tokamax", "liger": "Liger", "quack": "quack"}


def linear_records(results: Results) -> dict[str, list[Record]]:
    """The newest measurement of each case of the loss of `hidden @ weight`, by card."""
    found: dict[str, dict[str, Record]] = {}
    for run in measured.topic_runs("linear", results.folder):
        found[run.card] = run.records | found.get(run.card, {})
    return {card: list(found[card].values()) for card in sorted(found)}


def linear_ratio(record: Record, peer: str) -> float | None:
    """How many times faster ours is, where each process has its own products."""
    ours, other = (record["impls"].get(name, {}).get("x_products") for name in ("ours", peer))
    return other / ours if ours and other else None


def linear(results: Results) -> str:
    """Every case of the loss of `hidden @ weight`."""
    rows, by_card = [], linear_records(results)
    for card, record in [(card, record) for card, records in by_card.items() for record in records]:
        case, impls = record["case"], record["impls"]
        ours, optax = (impls.get(name, {}) for name in ("ours", "optax"))
        us, sizes = ours.get("min_us"), [entry.get("temp_bytes") for entry in (ours, optax)]
        cells = [number(us and us / 1e3, ".2f"), number(ours.get("x_products"), ".3f")]
        cells += [number(None if size is None else size / 2**20, ",.0f") for size in sizes]
        for peer in LINEAR_PEERS:
            entry, ratio = impls.get(peer, {}), linear_ratio(record, peer)
            why = "out of memory" if "RESOURCE_EXHAUSTED" in entry.get("reason", "") else entry.get("status", "-")
            cells.append(why if ratio is None else format(ratio, ".2f"))
        shape = " x ".join(str(case[name]) for name in ("tokens", "embedding", "vocabulary"))
        rows.append([case["pass_"], shape, card, *cells])
    heads = ["call", "tokens x embedding x vocabulary", "on", "ms", "x products", "extra, MiB", "optax's"]
    heads += [f"x {peer}" for peer in LINEAR_PEERS.values()]
    found = list(itertools.chain(*by_card.values()))
    days = ", ".join(dict.fromkeys(record["run"]["when"] for record in found))
    where = f"\n\n{setting(found)}; the best of interleaved rounds; {days}." if rows else ""
    return markdown(heads, rows) + where


def linear_memory(results: Results) -> str:
    """Says how much memory gradients take without logits, and with whole logits, where these take the most."""
    needed = lambda record, name: record["impls"].get(name, {}).get("temp_bytes") or 0
    records = itertools.chain(*linear_records(results).values())
    records = [record for record in records if record["case"]["pass_"] == "gradient"]
    largest = max(records, key=lambda record: needed(record, "optax"), default=None)
    if largest is None or not (needed(largest, "ours") and needed(largest, "optax")):
        return ""
    case = largest["case"]
    ours, optax = (f"{needed(largest, name) / 2**30:.2f} GiB" for name in ("ours", "optax"))
    return (
        f" For {case['tokens']} tokens and a vocabulary of {case['vocabulary']}, `linear_cross_entropy` with gradients "
        f"takes {ours} beside arguments and results, and optax {optax}."
    )


_RATIOS = (0.5, 1, 2, 5, 10)  # ticks of the picture of random calls
_LINES = {"ours": "C0-", "cudnn": "C1--", "xla": "C2:"}  # of the picture of caches


def draw_bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Horizontal bars: at each name one of each series."""
    thickness = 0.8 / max(1, len(series))
    for i, (label, values) in enumerate(series.items()):
        where = [row + (i - (len(series) - 1) / 2) * thickness for row in range(len(names))]
        axes.barh(where, values, thickness, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()


def draw_cells(pyplot: Any, run: Run, samples: Sequence[Run]) -> Any:
    """TFLOP/s of each implementation in the core cases, and the ratios of random calls in order."""
    names = [case.name for case in attention_cases.TABLE.select(tags=["core"]) if case.name in run.records]
    records = [run.records[name] for name in names]
    size = 13, 0.42 * len(records) + 1.5
    figure, (axes, drawn) = pyplot.subplots(1, 2, figsize=size, width_ratios=(3, 2), layout="constrained")
    impls = dict.fromkeys(name for record in records for name, entry in record["impls"].items() if "us" in entry)
    speeds = {name: [r["impls"].get(name, {}).get("tflop_per_s", 0.0) for r in records] for name in impls}
    draw_bars(axes, [name.removeprefix("attention_") for name in names], speeds)
    axes.axvline(max(r["matmul"]["tflop_per_s"] for r in records), color="k", linestyle="--", label="matmul 8192³")
    axes.set(xlabel="TFLOP/s", title=f"Attention, bfloat16, {run.label}")
    axes.legend(fontsize=8)
    for one in samples:
        ratios = [ratio for ratio, _ in against_libraries(one.records.values())]
        shares = [100 * (i + 0.5) / len(ratios) for i in range(len(ratios))]
        drawn.plot(shares, ratios, ".-", label=f"{one.label}, seed {one.seed}, {len(ratios)} calls")
    drawn.axhline(1, color="k", linestyle="--")
    drawn.set(xlabel="% of random calls", ylabel="times faster", title="Random calls x the better of cuDNN and XLA")
    drawn.set_yscale("log")
    drawn.set_yticks(_RATIOS, map(str, _RATIOS))
    drawn.grid(alpha=0.3)
    if samples:
        drawn.legend(fontsize=8)
    return figure


def draw_caches(pyplot: Any, run: Run) -> Any:
    """Times of few queries against the number of keys, with that of a read of them."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    records = sorted(run.records.values(), key=lambda record: record["case"]["length"])
    for (name, line), (queries, marker) in itertools.product(_LINES.items(), {1: "o", 4: "s", 16: "^"}.items()):
        mine = [r for r in records if r["case"]["queries"] == queries and "us" in r["impls"].get(name, {})]
        points = [(r["case"]["length"], r["impls"][name]["us"]) for r in mine]
        axes.plot(*zip(*points, strict=True), f"{line}{marker}", markersize=4, label=f"{name}, {queries}")
    reads = [(r["case"]["length"], r["least_bytes"] / r["read"]["tb_per_s"] / 1e6) for r in records]
    axes.plot(*zip(*reads, strict=True), "k--", label="a read")
    axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="us", title=f"1, 4 and 16 queries, {run.label}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
