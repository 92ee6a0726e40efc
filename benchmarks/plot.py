"""Plots: bandwidth against N with the copy ceiling, a roofline, and attention. Nothing else needs matplotlib."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import attention_cases, attention_docs
from benchmarks import results as measured
from benchmarks.results import Results, Setting

Record = Mapping[str, Any]


def draw(records: Sequence[Record], header: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the plots that the records suffice for, and returns their paths; none without matplotlib."""
    if _pyplot() is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    device = header["device"].get("name", "")
    drawn = []
    for op, pass_, dtype in sorted({_family(record) for record in records}):
        series = [r for r in records if _family(r) == (op, pass_, dtype) and "sweep" in r["case"]["tags"]]
        if len(series) > 2:
            path = folder / f"bandwidth_{op}_{pass_}_{dtype}.svg"
            _bandwidth(series, f"{op} {pass_}, {dtype}, {device}", path)
            drawn.append(path)
    losses = [r for r in records if r["case"]["op"] == "cross_entropy" and "cross_entropy" in r["case"]["tags"]]
    if losses:
        drawn.append(_units(losses, device, folder / "cross_entropy.svg"))
    timed = [record for record in records if record.get("flops") and "us" in record["impls"].get("ours", {})]
    timed = [record for record in timed if "hot" not in record["case"]["tags"]]  # the cache's roof is another
    if timed:
        drawn.append(_roofline(timed, device, folder / "roofline.svg"))
    return drawn


def draw_attention(setting: Setting, results: Results, folder: pathlib.Path) -> list[pathlib.Path]:
    """TFLOP/s of each implementation in the core cases; nothing without matplotlib or results."""
    wanted = {case.name for case in attention_cases.select(tags=["core"])}
    records = [r for r in attention_docs.ordered(results) if r["case"]["name"] in wanted]
    pyplot = _pyplot()
    if pyplot is None or not records:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(records) + 1.5), layout="constrained")
    names = [name for name in ("ours", *attention_docs.PEERS) if any("us" in r["impls"].get(name, {}) for r in records)]
    thickness = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        speeds = [record["impls"].get(name, {}).get("tflop_per_s", 0.0) for record in records]
        where = [row + (i - (len(names) - 1) / 2) * thickness for row in range(len(records))]
        axes.barh(where, speeds, thickness, label=attention_docs.PEERS.get(name, name))
    axes.axvline(max(r["matmul"]["tflop_per_s"] for r in records), color="k", linestyle="--", label="matmul 8192³")
    axes.set_yticks(range(len(records)), [attention_docs.title(record["case"]) for record in records], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="TFLOP/s", title=f"Attention, bfloat16, {setting}")
    axes.legend(fontsize=8)
    return [_saved(figure, folder / "attention.svg")]


def _pyplot() -> Any:
    """Matplotlib's pyplot, set to draw the same picture from the same results; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed")
        return None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxsoftmax"
    from matplotlib import pyplot

    return pyplot


def _saved(figure: Any, path: pathlib.Path) -> pathlib.Path:
    figure.savefig(path, metadata={"Date": None})
    _pyplot().close(figure)
    return path


def _family(record: Record) -> tuple[str, str, str]:
    return record["case"]["op"], record["case"]["pass"], record["case"]["dtype"]


def _bandwidth(records: Sequence[Record], title: str, path: pathlib.Path) -> None:
    pyplot = _pyplot()
    records = sorted(records, key=lambda record: record["case"]["cols"])
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    names = list(dict.fromkeys(name for record in records for name in record["impls"]))
    for name in names:
        axes.plot(*_points(records, lambda r, n=name: r["impls"].get(n, {}).get("tb_per_s")), "o-", label=name)
    axes.plot(*_points(records, lambda r: (r["copy"] or {}).get("tb_per_s")), "k--", label="copy, same run")
    axes.set(xlabel="N (row length)", ylabel="TB/s of the least traffic", title=title, ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    _saved(figure, path)


def _units(records: Sequence[Record], device: str, path: pathlib.Path) -> pathlib.Path:
    """The cost of a loss against the vocabulary, in passes over the logits."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, pass_ in zip(panels, ("fwd", "value_and_grad"), strict=True):
        mine = sorted((r for r in records if r["case"]["pass"] == pass_), key=lambda r: r["case"]["cols"])
        for name in dict.fromkeys(name for record in mine for name in record["impls"]):
            axes.plot(*_points(mine, lambda r, n=name: measured.units(r, n)), "o-", label=name)
        axes.set(xlabel="vocabulary", ylabel="passes over the logits", title=f"cross entropy {pass_}, {device}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
        if mine:
            axes.legend()
    return _saved(figure, path)


def _points(records: Iterable[Record], value: Any) -> tuple[list[int], list[float]]:
    found = [(record["case"]["cols"], value(record)) for record in records]
    found = [(cols, y) for cols, y in found if y is not None]
    return [cols for cols, _ in found], [y for _, y in found]


def _roofline(records: Sequence[Record], device: str, path: pathlib.Path) -> pathlib.Path:
    """Arithmetic per byte against arithmetic per second; the roof is the fastest copy of the run."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    copies = [record["copy"]["tb_per_s"] for record in records if record["copy"]]
    for dtype in sorted({record["case"]["dtype"] for record in records}):
        mine = [record for record in records if record["case"]["dtype"] == dtype]
        intensity = [record["flops"] / record["least_bytes"] for record in mine]
        speed = [record["flops"] / record["impls"]["ours"]["us"] / 1e6 for record in mine]
        axes.plot(intensity, speed, "o", label=f"ours, {dtype}")
    if copies:
        ends = [0.25, 4.0]
        axes.plot(ends, [max(copies) * end for end in ends], "k--", label=f"copy, {max(copies):.2f} TB/s")
    axes.set(xlabel="FLOP per byte of the least traffic", ylabel="TFLOP/s", title=f"Roofline, {device}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return _saved(figure, path)
