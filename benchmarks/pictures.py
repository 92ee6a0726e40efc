"""Draws the pictures of the documents from results."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import attention_cases, scaling
from benchmarks import results as measured
from benchmarks.report import against_libraries, newest_scaling
from benchmarks.results import Record, Results, Run

_RATIOS = (0.5, 1, 2, 5, 10)  # ticks of the picture of random calls
_LINES = {"ours": "C0-", "cudnn": "C1--", "xla": "C2:"}  # of the picture of caches


def draw(results: Results, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws what there are results of, and returns the paths; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxsoftmax"  # the same picture from the same results
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    records = [r for r in results.records() if "sweep" in r["case"]["tags"] and r["case"]["op"] == "softmax"]
    for pass_ in ("fwd", "bwd"):
        series = [r for r in records if (r["case"]["pass"], r["case"]["dtype"]) == (pass_, "float16")]
        if len(series) > 2:
            title = f"softmax {pass_}, float16, {results.runs[0].header['device']['name']}"
            figure = bandwidth(pyplot, sorted(series, key=lambda record: record["case"]["cols"]), title)
            drawn[f"bandwidth_softmax_{pass_}_float16"] = figure
    for run in measured.attention_runs(results.folder)[:1]:
        drawn["attention"] = cells(pyplot, run, measured.attention_runs(results.folder, "attention sample"))
    for run in measured.attention_runs(results.folder, "attention caches")[:1]:
        drawn["caches"] = caches(pyplot, run)
    if shared := measured.topic_runs("scaling", results.folder):
        drawn["scaling"] = efficiency(pyplot, shared)
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
    return [folder / f"{name}.svg" for name in drawn]


def bandwidth(pyplot: Any, records: Sequence[Record], title: str) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in dict.fromkeys(name for record in records for name in record["impls"]):
        speeds = [record["impls"].get(name, {}).get("tb_per_s") for record in records]
        points = [(r["case"]["cols"], speed) for r, speed in zip(records, speeds, strict=True) if speed is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=name)
    copies = [(record["case"]["cols"], record["copy"]["tb_per_s"]) for record in records if record["copy"]]
    axes.plot(*zip(*copies, strict=True), "k--", label="copy, same run")
    axes.set(xlabel="N (row length)", ylabel="TB/s of the least traffic", title=title, ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Horizontal bars: at each name one of each series."""
    thickness = 0.8 / max(1, len(series))
    for i, (label, values) in enumerate(series.items()):
        where = [row + (i - (len(series) - 1) / 2) * thickness for row in range(len(names))]
        axes.barh(where, values, thickness, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()


def cells(pyplot: Any, run: Run, samples: Sequence[Run]) -> Any:
    """TFLOP/s of each implementation in the core cases, and the ratios of random calls in order."""
    names = [case.name for case in attention_cases.TABLE.select(tags=["core"]) if case.name in run.records]
    records = [run.records[name] for name in names]
    size = 13, 0.42 * len(records) + 1.5
    figure, (axes, drawn) = pyplot.subplots(1, 2, figsize=size, width_ratios=(3, 2), layout="constrained")
    impls = dict.fromkeys(name for record in records for name, entry in record["impls"].items() if "us" in entry)
    speeds = {name: [r["impls"].get(name, {}).get("tflop_per_s", 0.0) for r in records] for name in impls}
    bars(axes, [name.removeprefix("attention_") for name in names], speeds)
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


def caches(pyplot: Any, run: Run) -> Any:
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


def efficiency(pyplot: Any, runs: Sequence[Run]) -> Any:
    """The efficiency of each case, with a bar for each number of devices."""
    found = {(name, devices): record["efficiency"] for (_, devices, name), record in newest_scaling(runs).items()}
    names = [case.name for case in scaling.TABLE.cases if any(case.name == of for of, _ in found)]
    counts = sorted({devices for _, devices in found})
    figure, axes = pyplot.subplots(figsize=(8, 0.3 * len(names) + 1.5), layout="constrained")
    series = {f"{devices} GPUs": [found.get((name, devices), 0.0) for name in names] for devices in counts}
    bars(axes, names, series)
    axes.axvline(1, color="k", linestyle="--")
    axes.set(xlabel="time on one GPU / number of GPUs / time on all", title="Efficiency of several GPUs")
    axes.legend(fontsize=8)
    return figure
