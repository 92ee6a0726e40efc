"""Pictures of the documents: bandwidth against row length, and attention. Nothing else needs matplotlib."""

import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import attention_cases, report
from benchmarks import results as measured
from benchmarks.results import Record, Results, Run

_RATIOS = (0.5, 1, 2, 5, 10)


def draw(results: Results, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws what there are results of, and returns the paths; nothing without matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    records = [r for r in results.records() if "sweep" in r["case"]["tags"] and r["case"]["op"] == "softmax"]
    for pass_ in ("fwd", "bwd"):
        series = [r for r in records if (r["case"]["pass"], r["case"]["dtype"]) == (pass_, "float16")]
        if len(series) > 2:
            title = f"softmax {pass_}, float16, {results.headers()[0]['device']['name']}"
            figure = _bandwidth(pyplot, sorted(series, key=lambda record: record["case"]["cols"]), title)
            drawn.append(_saved(pyplot, figure, folder / f"bandwidth_softmax_{pass_}_float16.svg"))
    runs = measured.attention_runs(results.folder)
    if runs:
        samples = measured.attention_runs(results.folder, "attention sample")
        drawn.append(_saved(pyplot, _attention(pyplot, runs[0], samples), folder / "attention.svg"))
    return drawn


def _attention(pyplot: Any, run: Run, samples: Sequence[Run]) -> Any:
    """TFLOP/s of each implementation in the core cases, and the ratios of random calls in order."""
    names = [case.name for case in attention_cases.select(tags=["core"]) if case.name in run.records]
    records = [run.records[name] for name in names]
    size = 13, 0.42 * len(records) + 1.5
    figure, (axes, drawn) = pyplot.subplots(1, 2, figsize=size, width_ratios=(3, 2), layout="constrained")
    impls = dict.fromkeys(name for record in records for name, entry in record["impls"].items() if "us" in entry)
    thickness = 0.8 / max(1, len(impls))
    for i, name in enumerate(impls):
        speeds = [record["impls"].get(name, {}).get("tflop_per_s", 0.0) for record in records]
        where = [row + (i - (len(impls) - 1) / 2) * thickness for row in range(len(records))]
        axes.barh(where, speeds, thickness, label=name)
    axes.axvline(max(r["matmul"]["tflop_per_s"] for r in records), color="k", linestyle="--", label="matmul 8192³")
    axes.set_yticks(range(len(records)), [name.removeprefix("attention_") for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="TFLOP/s", title=f"Attention, bfloat16, {run.label}")
    axes.legend(fontsize=8)
    for one in samples:
        ratios = [ratio for ratio, _ in report.against_libraries(one.records.values())]
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


def _bandwidth(pyplot: Any, records: Sequence[Record], title: str) -> Any:
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


def _pyplot() -> Any:
    """Matplotlib's pyplot, set to draw the same picture from the same results; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed")
        return None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxsoftmax"
    from matplotlib import pyplot

    return pyplot


def _saved(pyplot: Any, figure: Any, path: pathlib.Path) -> pathlib.Path:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
