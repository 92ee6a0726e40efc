"""`python -m benchmarks.docs`: rewrites every generated table of README.md and docs/*.md from the committed results.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; everything between them belongs to this program.
"""

import argparse
import dataclasses
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import attention_cases, cases, report, training
from benchmarks import results as measured
from benchmarks.results import KERNEL, NOT_MEASURED, Record, Results, Run
from benchmarks.targets import TARGETS, Target
from pallas_kernels.softmax.dispatch import KERNELS

ROOT = pathlib.Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
_RATIOS = (0.5, 1, 2, 5, 10)  # ticks of the picture of random calls
PEERS = {
    "xla": "XLA",
    "xla_f32": "XLA, float32",
    "torch_compile": "torch.compile",
    "torch": "torch",
    "liger": "Liger",
    "quack": "quack",
}
_PASS_WORDS = {
    "fwd": "",
    "bwd": " backward",
    "value_and_vjp": " value and vjp",
    "call": " call",
    "value_and_grad": " value and gradient",
    "value_and_grad_mean": " value and gradient of `.mean()`",
}
_TORCH = " Torch's side runs in a process of its own and is compared by shares of its own copy."
_MARKER = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def documents() -> list[pathlib.Path]:
    """The files that may hold tables."""
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]


def rewrite(text: str, results: Results) -> str:
    """`text` with every table made anew; a name without a table is an error."""
    return _MARKER.sub(lambda found: found[1] + TABLES[found[2]](results) + "\n" + found[3], text)


def of_ops(
    ops: Iterable[str], facts: Mapping[str, Callable[[Record], str]] | None = None, errors_of: tuple[str, ...] = ()
) -> Callable[[Results], str]:
    """Every measured case of some operations; `facts` are the columns between the time and the peers."""

    def make(results: Results) -> str:
        order = {case.name: i for i, case in enumerate(cases.TABLE.cases)}
        records = [record for record in results.records() if record["case"]["op"] in ops]
        records.sort(key=lambda r: order.get(r["case"]["name"], len(order)))
        return _comparison(records, _SPEED if facts is None else facts, errors_of)

    return make


def promises(results: Results) -> str:
    """What was promised, beside the worst case measured."""
    rows, shown = [], []
    for target in TARGETS:
        found = target.measured(results)
        row = [target.label, *(report.number(bound, ".3g") for bound in (target.must, target.goal))]
        if found is None:
            rows.append([*row, *["-"] * 5])
            continue
        worst, record, count = found
        shown.append(record)
        facts = [f"`{record['case']['name']}`", str(count), record["run"]["when"]]
        rows.append([*row, _unrounded(worst, target), target.word(worst), *facts])
    heads = ["promise", "must", "goal", "worst", "", "at", "cases", "measured"]
    return f"{report.markdown(heads, rows)}\n\n{_caption(shown, measured.ROW_LIBRARIES)}" if shown else NOT_MEASURED


def _unrounded(worst: float, target: Target) -> str:
    """With as many digits as it takes not to look better than it is beside what was promised."""
    texts = (format(worst, f".{digits}f") for digits in range(3, 8))
    return next((text for text in texts if target.word(float(text)) == target.word(worst)), str(worst))


def ladder(pass_: str, dtype: str) -> Callable[[Results], str]:
    """Kernels against row length: the traffic each needs, and the time it took."""

    def make(results: Results) -> str:
        widths = sorted(cases.select(passes=[pass_], dtypes=[dtype], tags=["ladder"]), key=lambda case: case.cols)
        found = [(case, record) for case in widths if (record := results.kernels(case.name)) is not None]
        if not found:
            return NOT_MEASURED
        names = dict.fromkeys(name for _, r in found for name in r["impls"] if name.removeprefix(KERNEL) in KERNELS)
        rows = []
        for name in names:
            entries = [record["impls"].get(name, {}) for _, record in found]
            if any("us" in entry for entry in entries):
                rows.append([name.removeprefix(KERNEL), _traffic(found, name), *map(_time_and_speed, entries)])
        if any("xla" in record["impls"] for _, record in found):
            rows.append(["XLA", "", *(_time_and_speed(record["impls"].get("xla", {})) for _, record in found)])
        rows.append(["copy, same bytes", "", *(_time_and_speed(record["copy"] or {}) for _, record in found)])
        heads = ["kernel", "traffic", *(f"N = {case.cols}" for case, _ in found)]
        caption = _caption([record for _, record in found])
        when: dict[str, list[str]] = {}
        for case, record in found:
            when.setdefault(record["run"]["when"], []).append(f"N = {case.cols}")
        days = "; ".join(f"{day}: {', '.join(names)}" for day, names in when.items())
        return f"{report.markdown(heads, rows)}\n\nMicroseconds (TB/s of the least traffic). {caption} {days}."

    return make


@dataclasses.dataclass(frozen=True)
class Line:
    """An operation in words, and which cases are its."""

    label: str
    ops: tuple[str, ...]
    passes: tuple[str, ...]
    rows: Callable[[int], bool] = lambda rows: True

    def takes(self, case: Mapping[str, Any]) -> bool:
        """Whether a case counts here; more dtypes and options than the promises name do not."""
        chosen = case["op"] in self.ops and case["pass"] in self.passes and self.rows(case["rows"])
        return chosen and "extended" not in case["tags"]


LINES = (
    Line("`softmax`", ("softmax",), ("fwd",), lambda rows: rows >= 1024),
    Line("the same, at most 128 rows", ("softmax",), ("fwd",), lambda rows: rows < 1024),
    Line("its gradient", ("softmax",), ("bwd", "value_and_vjp")),
    Line("`log_softmax`, `logsumexp`", ("log_softmax", "logsumexp"), ("fwd",)),
    Line("cross entropy", ("cross_entropy",), ("fwd",)),
    Line("and its gradient", ("cross_entropy",), ("value_and_grad",)),
    Line("the same, by `.mean()`", ("cross_entropy",), ("value_and_grad_mean",)),
    Line("top-k softmax", ("top_k",), ("fwd",)),
)


def summary(results: Results) -> str:
    """One row for each operation, and where the figures come from."""
    shown = [[r for r in results.records() if line.takes(r["case"])] for line in LINES]
    rows = [_summary_row(line.label, records) for line, records in zip(LINES, shown, strict=True)]
    newest = {run.card: run for run in reversed(measured.attention_runs(results.folder))}  # of JAX, on each card
    for run in reversed(newest.values()):
        for label, pass_ in (("`flash_attention`", "fwd"), ("its gradient", "bwd")):
            rows.append(_attention_row(f"{label}, {run.label}", run, pass_))
    rows = [row for row in rows if row]
    if not rows:
        return NOT_MEASURED
    heads = ["operation", "cases", "of the floor", "x XLA", "x best other"]
    records = [record for of_row in shown for record in of_row]
    where = f" on one {report.setting(records)}" if records else ""
    return (
        f"{report.markdown(heads, rows)}\n\nMedian (worst ... best case){where}, for attention on the card and with "
        "the JAX that its rows name; day and commit of each case stand in docs/results.md and "
        "docs/attention_results.md. The floor is the time of a copy of the same bytes, for attention that of as large "
        "a product of square matrices. Others: torch, torch.compile, Liger and quack; of attention cuDNN, which gets "
        "packed documents as a dense mask."
    )


def _summary_row(label: str, records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    share = (record["impls"]["ours"].get("fraction_of_copy") for record in records)
    others = (
        [ratio for peer in measured.ROW_LIBRARIES if (ratio := measured.ratio(r, peer)) is not None] for r in records
    )
    return [
        label,
        _count(records),
        "-" if records[0]["case"]["op"] == "top_k" else _spread(share),
        _spread(measured.ratio(record, "xla") for record in records),
        _spread(min(ratios, default=None) for ratios in others),
    ]


def _attention_row(label: str, run: Run, pass_: str) -> list[str]:
    records = [record for record in run.records.values() if record["case"]["pass"] == pass_]
    if not records:
        return []
    speeds = [(r["impls"]["ours"].get("tflop_per_s"), r["matmul"]["tflop_per_s"]) for r in records]
    shares = (ours / product if ours else None for ours, product in speeds)
    ratios = (measured.against_best(record)["ratio"] for record in records)
    return [label, _count(records), _spread(shares), "-", _spread(ratios)]


def _count(records: Sequence[Record]) -> str:
    wrong = sum(record["impls"]["ours"]["status"] != "ok" for record in records)
    return f"{len(records)}, {wrong} WRONG" if wrong else str(len(records))


def _spread(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{statistics.median(known):.2f} ({known[0]:.2f} ... {known[-1]:.2f})" if known else "-"


_SPEED: dict[str, Callable[[Record], str]] = {
    "TB/s": lambda record: report.number(record["impls"]["ours"].get("tb_per_s"), ".2f"),
    "of copy": lambda record: report.number(record["impls"]["ours"].get("fraction_of_copy"), ".2f"),
}


def _comparison(
    records: Sequence[Record], facts: Mapping[str, Callable[[Record], str]], errors_of: tuple[str, ...]
) -> str:
    """Ours beside its peers, of which some have their own errors shown too."""
    if not records:
        return NOT_MEASURED
    peers = [peer for peer in PEERS if any(peer in record["impls"] for record in records)]
    judged = [peer for peer in peers if peer in errors_of]
    heads = ["case", "us", *facts, *(f"x {PEERS[peer]}" for peer in peers), "error, ulp"]
    heads += [*(f"of {PEERS[peer]}" for peer in judged), "measured"]
    rows = []
    for record in records:
        ours = record["impls"]["ours"]
        rows.append([
            title(record["case"]),
            report.number(ours.get("us"), ".1f") if ours["status"] == "ok" else ours["status"],
            *(fact(record) for fact in facts.values()),
            *(_against(record, peer) for peer in peers),
            report.number(ours.get("max_error_ulp"), ".1f"),
            *(_error(measured.loss_error(record, peer)) for peer in judged),
            record["run"]["when"],
        ])  # fmt: skip
    return report.markdown(heads, rows) + "\n\n" + _caption(records, peers)


def title(case: Mapping[str, Any]) -> str:
    """A case in words: "softmax f16 32768 x 1024"."""
    words = _PASS_WORDS[case["pass"]]
    options = "".join(f", {name} {value:g}" for name, value in case.get("options", {}).items())
    return f"{case['op']}{words} {cases.SHORT_DTYPES[case['dtype']]} {case['rows']} x {case['cols']}{options}"


def _against(record: Mapping[str, Any], peer: str) -> str:
    ratio = measured.ratio(record, peer)
    if ratio is not None:
        return format(ratio, ".2f")
    status = record["impls"].get(peer, {}).get("status", "-")
    return "refuses" if status == "declined" else "-" if status == "ok" else status


def _traffic(found: Iterable[tuple[cases.RowCase, Mapping[str, Any]]], name: str) -> str:
    """Bytes that the kernel says it moves, in units of the operand's size."""
    units = set()
    for case, record in found:
        moved = record["impls"].get(name, {}).get("bytes_moved")
        if moved:
            problem = case.problems[0]
            units.add(round(moved / (problem.elements * problem.dtype.itemsize), 1))
    return " ... ".join(format(unit, "g") for unit in sorted({min(units), max(units)})) + " MN" if units else "-"


def _time_and_speed(entry: Mapping[str, Any]) -> str:
    if "us" not in entry:
        return entry["status"] if entry.get("status") == "WRONG" else "-"
    return f"{entry['us']:.0f} ({entry['tb_per_s']:.2f})"


def _caption(records: Iterable[Mapping[str, Any]], shown: Iterable[str] = ()) -> str:
    """With what the records shown were measured, and how peers that are `shown` were."""
    where = report.setting(records)
    return f"{where}; medians of interleaved runs." + (_TORCH if set(shown) & set(measured.ROW_LIBRARIES) else "")


def _error(value: float | None) -> str:
    return report.number(value, ".0f" if value and value >= 100 else ".1f")


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "everything": of_ops(("softmax", "log_softmax", "logsumexp")),
    "cross_entropy": of_ops(
        ["cross_entropy"],
        {
            "units": lambda record: report.number(measured.units(record, "ours"), ".2f"),
            "extra memory": lambda record: report.number(measured.extra_memory(record, "ours"), ".2%"),
            "XLA's": lambda record: report.number(measured.extra_memory(record, "xla"), ".0%"),
        },
        ("xla", "xla_f32"),
    ),
    "top_k": of_ops(["top_k"], {}),
    "targets": promises,
    "ladder_forward_f16": ladder("fwd", "f16"),
    "ladder_forward_f32": ladder("fwd", "f32"),
    "ladder_backward_f16": ladder("bwd", "f16"),
    "attention_runs": report.attention_runs,
    "attention_promises": report.attention_promises,
    "attention_forward": report.attention_cells("fwd"),
    "attention_backward": report.attention_cells("bwd"),
    "attention_sample": report.attention_sample,
    "attention_short": report.attention_short,
    "attention_odd": report.attention_odd,
    "models": lambda results: training.table(results.about("models")),
}


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


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true", help="draw the pictures too; needs matplotlib")
    pictures = parser.parse_args(arguments).pictures
    results = Results()
    for path in documents():
        text = path.read_text()
        made = rewrite(text, results)
        if made != text:
            path.write_text(made)
            print(f"rewrote {path.relative_to(ROOT)}")
    if pictures:
        print("\n".join(map(str, draw(results, PICTURES))))


if __name__ == "__main__":
    main(sys.argv[1:])
