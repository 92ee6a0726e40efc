"""`python -m benchmarks.docs`: rewrites every generated table of README.md and docs/*.md from the committed results.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; everything between them belongs to this program.
"""

import argparse
import dataclasses
import itertools
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import attention_cases, cases, plot, report, targets, training
from benchmarks import results as measured
from benchmarks.results import NOT_MEASURED, RUNG, Record, Results, Run
from benchmarks.targets import TARGETS, Target
from pallas_kernels.softmax.dispatch import KERNELS

ROOT = pathlib.Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
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
        order = {case.name: i for i, case in enumerate(cases.all_cases())}
        records = [record for record in results.records() if record["case"]["op"] in ops]
        records.sort(key=lambda r: order.get(r["case"]["name"], len(order)))
        return _comparison(records, _SPEED if facts is None else facts, errors_of)

    return make


def promises(results: Results) -> str:
    """What was promised, beside the worst case measured."""
    rows = [_target_row(target, results) for target in TARGETS]
    if not any(row[-1] != "-" for row in rows):
        return NOT_MEASURED
    heads = ["promise", "must", "goal", "worst", "", "at", "cases", "measured"]
    shown = [record for target in TARGETS if (record := _worst(target, results)) is not None]
    return report.markdown(heads, rows) + "\n\n" + _caption(shown, measured.ROW_LIBRARIES)


def ladder(pass_: str, dtype: str) -> Callable[[Results], str]:
    """Rungs against row length: the traffic each needs, and the time it took."""

    def make(results: Results) -> str:
        widths = sorted(cases.select(passes=[pass_], dtypes=[dtype], tags=["ladder"]), key=lambda case: case.cols)
        found = [(case, record) for case in widths if (record := results.rungs(case.name)) is not None]
        if not found:
            return NOT_MEASURED
        names = dict.fromkeys(name for _, r in found for name in r["impls"] if name.removeprefix(RUNG) in KERNELS)
        rows = []
        for name in names:
            entries = [record["impls"].get(name, {}) for _, record in found]
            if any("us" in entry for entry in entries):
                rows.append([name.removeprefix(RUNG), _traffic(found, name), *map(_time_and_speed, entries)])
        if any("xla" in record["impls"] for _, record in found):
            rows.append(["XLA", "", *(_time_and_speed(record["impls"].get("xla", {})) for _, record in found)])
        rows.append(["copy, same bytes", "", *(_time_and_speed(record["copy"] or {}) for _, record in found)])
        heads = ["kernel", "traffic", *(f"N = {case.cols}" for case, _ in found)]
        when = report.when((record for _, record in found), lambda record: f"N = {record['case']['cols']}")
        caption = _caption([record for _, record in found])
        return f"{report.markdown(heads, rows)}\n\nMicroseconds (TB/s of the least traffic). {caption} {when}."

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
    for run in _newest_jax(measured.attention_runs(results.folder)):
        for label, pass_ in (("`flash_attention`", "fwd"), ("its gradient", "bwd")):
            rows.append(_attention_row(f"{label}, {run.card}, {run.label}", run, pass_))
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


def _newest_jax(runs: Iterable[Run]) -> list[Run]:
    """On each card, the first run with the newest JAX that was measured there."""
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(run.card, run)
    return list(found.values())


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


def _target_row(target: Target, results: Results) -> list[str]:
    must, goal = report.number(target.must, ".3g"), report.number(target.goal, ".3g")
    measured, record = target.measured(results), _worst(target, results)
    if measured is None or record is None:
        return [target.label, must, goal, "-", "-", "-", "-", "-"]
    worst, name, count = measured
    if target.must is not None and not target.reached(worst, target.must):
        verdict = "**missed**"
    else:
        verdict = "goal" if target.reached(worst, target.goal) else "kept" if target.must else "below goal"
    found = [_unrounded(worst, target), verdict, f"`{name}`", str(count), record["run"]["when"]]
    return [target.label, must, goal, *found]


def _worst(target: Target, results: Results) -> Mapping[str, Any] | None:
    """The record of a promise's worst case."""
    measured = target.measured(results)
    return None if measured is None else results.case(measured[1])


def _unrounded(worst: float, target: Target) -> str:
    """With as many digits as it takes not to look better than it is beside what was promised."""
    bounds = (target.must, target.goal)
    kept = [target.reached(worst, bound) for bound in bounds]
    texts = (format(worst, f".{digits}f") for digits in range(3, 8))
    return next((text for text in texts if [target.reached(float(text), b) for b in bounds] == kept), str(worst))


def _traffic(found: Iterable[tuple[cases.Case, Mapping[str, Any]]], name: str) -> str:
    """Bytes that the rung says it moves, in units of the operand's size."""
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


PASSES = {"fwd": "forward", "bwd": "backward"}


def attention_runs(results: Results) -> str:
    """What each run of attention was made of."""
    rows = []
    for run in measured.attention_runs(results.folder):
        header, records = run.header, run.records.values()
        products = [record["matmul"]["tflop_per_s"] for record in records]
        linkers = dict.fromkeys(pathlib.Path(r["nvjitlink"]).name if r.get("nvjitlink") else "none" for r in records)
        facts = [
            run.card,
            header["device"].get("driver_version"),
            header["versions"].get("cudnn"),
            " and ".join(linkers),
        ]
        day, commit = header["timestamp"][:10], str(header["commit"])[:12]
        span = f"{min(products):.0f} to {max(products):.0f}"
        missing = ", ".join(header.get("left_out", ())) or "none"
        rows.append([run.label, *(str(fact or "-") for fact in facts), span, day, commit, missing])
    heads = ["run", "card", "driver", "cuDNN", "nvJitLink", "matmul 8192³, TFLOP/s", "day", "commit", "left out"]
    return report.markdown(heads, rows) if rows else NOT_MEASURED


def attention_promises(results: Results) -> str:
    """What was promised of attention, beside what each run measured."""
    rows = []
    runs = measured.attention_runs(results.folder)
    for run, pass_ in itertools.product(runs, targets.PASSES):
        found = [promise.judge(run, pass_) for promise in targets.PROMISES]
        slower = [f"{_floored(ratio)} at {call(case)}" for ratio, case in targets.below(run, pass_)]
        rows.append([f"{run.label}, {PASSES[pass_]}", *map(_judged, found), "; ".join(slower) or "none"])
    heads = ["", *(promise.describe() for promise in targets.PROMISES), "cells below 1.00"]
    return f"{report.markdown(heads, rows)}\n\n{_versions(runs)}".strip() if rows else NOT_MEASURED


def _pairs(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """The runs to compare: on one card with two versions of JAX, the newer first, both the first or both repeated."""
    pairs = itertools.combinations(runs, 2)
    return [(a, b) for a, b in pairs if (a.card, a.repeat) == (b.card, b.repeat) and a.jax != b.jax]


def _versions(runs: Sequence[Run]) -> str:
    """How many times faster the same source is with the newer JAX, in the geometric mean."""
    found = []
    for (newer, older), pass_ in itertools.product(_pairs(runs), targets.PASSES):
        names = [case.name for case in attention_cases.select(tags=[targets.CELLS], passes=[pass_])]
        ratios = [ratio for name in names if (ratio := targets.speed(newer, older, name)) is not None]
        if ratios:
            verdict = _judged((*targets.VERSIONS.word(ratios), len(ratios), len(names)))
            found.append([f"{newer.label} over {older.label}, {PASSES[pass_]}", verdict, _floored(min(ratios))])
    return report.markdown(["times faster", targets.VERSIONS.describe(), "worst"], found) if found else ""


def _judged(verdict: tuple[float, str, int, int] | None) -> str:
    if verdict is None:
        return "-"
    value, word, count, wanted = verdict
    return f"{_floored(value)} {word}" + ("" if count == wanted else f" ({count} of {wanted} cells)")


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
            case = next(record["case"] for record in records if record)
            row = [f"{call(case)}"]
            for run, record in zip(runs, records, strict=True):
                row += _cell(record, pass_) if not run.repeat else _cell(record, pass_)[-1:]
            rows.append(row + [_floored(targets.speed(new, old, name)) for new, old in _pairs(runs)])
        heads = ["cell"]
        for run in runs:
            own = ["ours, us", *(["direct, us"] if pass_ == "bwd" else []), "cuDNN, us", "x cuDNN"]
            heads += [f"{run.label}: {head}" for head in (own if not run.repeat else own[-1:])]
        heads += [f"{new.label} over {old.label}" for new, old in _pairs(runs)]
        return report.markdown(heads, rows) if rows else NOT_MEASURED

    return make


def _cell(record: Record | None, pass_: str) -> list[str]:
    """Ours, its backward pass alone, cuDNN and the ratio."""
    ours, cudnn = (record["impls"].get(name, {}) if record else {} for name in ("ours", "cudnn"))
    us = [report.number(x.get("us"), ".1f") if x.get("status", "ok") == "ok" else x["status"] for x in (ours, cudnn)]
    direct = [report.number(ours.get("direct_us"), ".1f")] if pass_ == "bwd" else []
    return [us[0], *direct, us[1], _floored(measured.ratio(record, "cudnn") if record else None)]


def call(case: Mapping[str, Any]) -> str:
    """A call of attention in words: "D 128, S 2048, causal"."""
    dim, value = case["head_dim"], case["value_dim"]
    heads = f", heads {case['heads']}/{case['key_heads']}" if case["heads"] != case["key_heads"] else ""
    span = f" {case['span']}" if case["span"] else ""
    dims = f"{dim}" if dim == value else f"{dim}/{value}"
    return f"D {dims}{heads}, S {case['length']}, {case['kind']}{span}"


def _floored(value: float | None) -> str:
    """Three digits that do not look better than the value is."""
    return "-" if value is None else format(math.floor(value * 1000) / 1000, ".3f")


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
    "attention_runs": attention_runs,
    "attention_promises": attention_promises,
    "attention_forward": attention_cells("fwd"),
    "attention_backward": attention_cells("bwd"),
    "models": lambda results: training.table(results.about("models")),
}


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
        print("\n".join(map(str, plot.draw(results, measured.attention_runs()[:1], PICTURES))))


if __name__ == "__main__":
    main(sys.argv[1:])
