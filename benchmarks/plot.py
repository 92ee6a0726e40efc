"""Plots: bandwidth against N with the copy ceiling, and a roofline. Needs matplotlib, which nothing else does."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import results as measured

Record = Mapping[str, Any]


def draw(records: Sequence[Record], header: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes the plots that the records suffice for, and returns their paths; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxsoftmax"  # the same picture from the same results
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


def _family(record: Record) -> tuple[str, str, str]:
    return record["case"]["op"], record["case"]["pass"], record["case"]["dtype"]


def _bandwidth(records: Sequence[Record], title: str, path: pathlib.Path) -> None:
    from matplotlib import pyplot

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
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _units(records: Sequence[Record], device: str, path: pathlib.Path) -> pathlib.Path:
    """The cost of a loss against the vocabulary, in passes over the logits."""
    from matplotlib import pyplot

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
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _points(records: Iterable[Record], value: Any) -> tuple[list[int], list[float]]:
    found = [(record["case"]["cols"], value(record)) for record in records]
    found = [(cols, y) for cols, y in found if y is not None]
    return [cols for cols, _ in found], [y for _, y in found]


def _roofline(records: Sequence[Record], device: str, path: pathlib.Path) -> pathlib.Path:
    """Arithmetic per byte against arithmetic per second; the roof is the fastest copy of the run."""
    from matplotlib import pyplot

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
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
