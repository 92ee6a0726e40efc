"""`python -m benchmarks.docs`: rewrites every generated table of README.md and docs/*.md from the committed results.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; everything between them belongs to this program.
`--print=NAME` prints a table with a row for each measured case, which no document has.
"""

import argparse
import functools
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import call_report, cases, report, scaling
from benchmarks import results as measured
from benchmarks.report import markdown, number
from benchmarks.results import KERNEL, NOT_MEASURED, ROOT, Record, Results
from pallas_kernels.softmax.dispatch import KERNELS

PICTURES = ROOT / "docs" / "pictures"
PEERS = {
    **{"xla": "XLA", "xla_f32": "XLA, float32", "torch_compile": "torch.compile", "torch": "torch"},
    **{"liger": "Liger", "quack": "quack"},
}
_PASS_WORDS = {"fwd": "", "bwd": " backward", "value_and_vjp": " value and vjp", "call": " call"}
_PASS_WORDS |= {"value_and_grad": " value and gradient", "value_and_grad_mean": " value and gradient of `.mean()`"}
_TORCH = " Torch's side runs in a process of its own and is compared by shares of its own copy."
_MARKER = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


class Target(NamedTuple):
    """Promises for rows that the worst `metric` over the selected cases is at least `must`, hopefully `goal`.

    A wrong case counts 0. With `at_most`, the metric is a cost: the worst is the largest, and a wrong one counts
    infinity. `metric` is a function of the entry of ours, the record and all results.
    """

    label: str
    metric: Callable[[Any, Any, Any], float | None]
    must: float | None
    goal: float | None
    tags: tuple[str, ...] = ()
    passes: tuple[str, ...] = ("fwd",)
    dtypes: tuple[str, ...] = ()
    cols: Callable[[int], bool] = lambda cols: True
    op: str = "softmax"
    at_most: bool = False

    def select(self) -> list[cases.RowCase]:
        chosen = cases.TABLE.select(op=[self.op], pass_=self.passes, dtype=self.dtypes, tags=self.tags)
        return [case for case in chosen if self.cols(case.cols)]

    def measured(self, results: Results) -> tuple[float, Record, int] | None:
        """The worst value, the record that has it, and how many cases were measured."""
        records = [record for case in self.select() if (record := results.case(case.name)) is not None]
        pairs = [(value, r["case"]["name"], r) for r in records if (value := self._value(r, results)) is not None]
        if not pairs:
            return None
        value, _, record = (max if self.at_most else min)(pairs, key=lambda pair: pair[:2])
        return value, record, len(pairs)

    def _value(self, record: Record, results: Results) -> float | None:
        ours = record["impls"]["ours"]
        if ours["status"] != "ok":
            return math.inf if self.at_most else 0.0
        try:
            return self.metric(ours, record, results)
        except (KeyError, TypeError):  # this run or the other one did not measure it
            return None

    def word(self, value: float) -> str:
        return report.word(value, self.must, self.goal, self.at_most)


def _times(peer: str) -> Callable[[Any, Any, Any], float | None]:
    return lambda ours, record, results: measured.ratio(record, peer)


_COPY = lambda ours, *_: ours["fraction_of_copy"]
_SPEED = lambda ours, *_: ours["tb_per_s"]
_LOOP = lambda ours, record, _: record["impls"]["xla"]["us_per_iteration"] / ours["us_per_iteration"]
_NEIGHBOUR = lambda ours, _, results: ours["tb_per_s"] / _SPEED(results.case(_ALIGNED)["impls"]["ours"])
_ALIGNED = "softmax_fwd_bf16_8192x50176"
_FLOOR = lambda ours, record, _: (1.3 * record["least_bytes"] / 4.3e6 + 4) / ours["us"]
_MEMORY = lambda ours, record, _: 1 - ours["temp_bytes"] / record["least_bytes"]
_RESIDUAL = lambda ours, record, _: record["least_bytes"] / 5 / ours["residual_bytes"]
_UNITS = lambda _, record, __: measured.units(record, "ours")
_EXTRA = lambda _, record, __: measured.extra_memory(record, "ours")
_MAIN = ("sweep", "htile", "msra")
_TRAINING = ("training",)
_LOSS = functools.partial(Target, tags=("cross_entropy",), op="cross_entropy")
_GRADIENT = functools.partial(_LOSS, passes=("value_and_grad",))
TARGETS = (
    Target("forward, N = 1024 ... 262144: share of the copy", _COPY, 0.95, 0.98, _MAIN,
           cols=lambda n: n >= 1024),
    Target("the same: against XLA", _times("xla"), None, 1.0, _MAIN, cols=lambda n: n >= 1024),
    Target("the same: against quack", _times("quack"), None, 1.0, _MAIN, cols=lambda n: n >= 1024),
    Target("N = 256, 512: against XLA", _times("xla"), 1.0, None, _MAIN, cols=lambda n: n < 1024),
    Target("N = 256, 512: share of the copy", _COPY, None, 0.95, _MAIN, cols=lambda n: n < 1024),
    Target("rows of a million: share of the copy", _COPY, 0.80, None, ("long",)),
    Target("vocabularies, 16 bits: against XLA", _times("xla"), 2.3, 2.6, ("vocab",), dtypes=("float16", "bfloat16")),
    Target("50257 against 50176", _NEIGHBOUR, None, 0.95, ("vocab",), dtypes=("bfloat16",),
           cols=lambda n: n == 50257),
    Target("1, 16, 64 rows x 131072: against XLA", _times("xla"), 1.3, None, ("few_rows",)),
    Target("1, 16, 64 rows x 131072: (1.3 x floor + 4 us) / time", _FLOOR, None, 1.0, ("few_rows",)),
    Target("backward, N = 1024 ... 262144: against XLA", _times("xla"), 1.45, None, _MAIN, ("bwd",)),
    Target("backward: TB/s", _SPEED, None, 4.2, _MAIN, ("bwd",)),
    Target("value and vjp: against XLA", _times("xla"), 1.3, None, _TRAINING, ("value_and_vjp",)),
    Target("value and vjp: output over all that is kept", _RESIDUAL, 1.0, None, _TRAINING, ("value_and_vjp",)),
    Target("(8, 128) call: wall time against XLA", _times("xla"), 1 / 1.1, 1.0, ("latency",), ("call",)),
    Target("(8, 128) in a loop: against XLA", _LOOP, 1 / 1.1, 1.0, ("latency",), ("call",)),
    Target("no memory beyond the output, but for rows of a million", _MEMORY, 1.0, None, ("standard",), ("fwd", "bwd"),
           cols=lambda n: n < 2**20),
    _LOSS("cross entropy: passes over the logits, at most", _UNITS, 1.15, 0.97, at_most=True),
    _GRADIENT("cross entropy, value and gradient: passes, at most", _UNITS, 2.6, 2.15, at_most=True),
    # Promised from an XLA that took 8.3 to 9.3 passes. By its traffic that was the formula in float32, though it is not
    # recorded: compiled, that one moves 8 times the logits' size, and optax's 4.
    _GRADIENT("the same: against XLA, optax's formula", _times("xla"), 3.0, None),
    _GRADIENT("the same: against XLA, optax's formula of logits cast to float32", _times("xla_f32"), 3.0, None),
    _GRADIENT("the same: memory beyond the gradient, share of the logits, at most", _EXTRA, 0.01, None,
              at_most=True),
    Target("top-k softmax: against XLA", _times("xla"), 3.0, 5.0, ("top_k",), op="top_k"),
)  # fmt: skip


def documents() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewrite(text: str, results: Results) -> str:
    """`text` with every table made anew; a name without a table is an error."""
    return _MARKER.sub(lambda found: found[1] + TABLES[found[2]](results) + "\n" + found[3], text)


def _caption(records: Iterable[Record], shown: Iterable[str] = ()) -> str:
    """With what the records shown were measured, and how peers that are `shown` were."""
    where = report.setting(records)
    return f"{where}; medians of interleaved runs." + (_TORCH if set(shown) & set(measured.ROW_LIBRARIES) else "")


def promises(results: Results) -> str:
    rows, shown = [], []
    for target in TARGETS:
        cells = ["-"] * 5
        if found := target.measured(results):
            worst, record, count = found
            shown.append(record)
            # With as many digits as it takes not to look better than it is beside what was promised.
            texts = (format(worst, f".{digits}f") for digits in range(3, 8))
            word = target.word(worst)
            text = next((text for text in texts if target.word(float(text)) == word), str(worst))
            cells = [text, word, f"`{record['case']['name']}`", str(count), record["run"]["when"]]
        rows.append([target.label, number(target.must, ".3g"), number(target.goal, ".3g"), *cells])
    heads = ["promise", "must", "goal", "worst", "", "at", "cases", "measured"]
    return f"{markdown(heads, rows)}\n\n{_caption(shown, measured.ROW_LIBRARIES)}" if shown else NOT_MEASURED


def ladder(pass_: str, dtype: str) -> Callable[[Results], str]:
    """Kernels against row length: the traffic each needs, and the time it took."""

    def make(results: Results) -> str:
        widths = sorted(cases.TABLE.select(pass_=[pass_], dtype=[dtype], tags=["ladder"]), key=lambda case: case.cols)
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
        when: dict[str, list[str]] = {}
        for case, record in found:
            when.setdefault(record["run"]["when"], []).append(f"N = {case.cols}")
        days = "; ".join(f"{day}: {', '.join(names)}" for day, names in when.items())
        table = markdown(["kernel", "traffic", *(f"N = {case.cols}" for case, _ in found)], rows)
        return f"{table}\n\nMicroseconds (TB/s of the least traffic). {_caption(records)} {days}."

    return make


def _traffic(found: Iterable[tuple[cases.RowCase, Record]], name: str) -> str:
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
    lines: list[Line] = []
    for label, (op, *_) in LINES.items():
        records = [record for record in results.records() if line_of(record["case"]) == label]
        shares = [None if op == "top_k" else r["impls"]["ours"].get("fraction_of_copy") for r in records]
        peers = [[measured.ratio(record, peer) for peer in measured.ROW_LIBRARIES] for record in records]
        others = [min(filter(None, ratios), default=None) for ratios in peers]
        xla = [measured.ratio(record, "xla") for record in records]
        lines.append(Line(label, measured.CARD.upper(), records, shares, xla, others))
    newest = {run.card: run for run in reversed(measured.attention_runs(results.folder))}  # of JAX, on each card
    for run in reversed(newest.values()):
        for label, pass_ in (("`flash_attention`", "fwd"), ("gradient of `flash_attention`", "bwd")):
            records = [record for record in run.records.values() if record["case"]["pass"] == pass_]
            rates = [(r["impls"]["ours"].get("tflop_per_s"), r["matmul"]["tflop_per_s"]) for r in records]
            shares = [ours / product if ours else None for ours, product in rates]
            ratios = [measured.against_best(record)["ratio"] for record in records]
            none = [None] * len(records)
            lines.append(Line(label, run.card.upper(), records, shares, none, ratios))
    few = report.few_queries(results)
    for card in dict.fromkeys(label.split()[0] for label in few):
        records = [record for label, record in few.items() if label.split()[0] == card]
        one = [report.share_of_read(record) if record["case"]["queries"] == 1 else None for record in records]
        ratios = [measured.ratio(record, "cudnn") for record in records]
        none = [None] * len(records)
        lines.append(Line("1 to 512 queries of many keys", card.upper(), records, one, none, ratios))
    for card, records in report.linear_records(results).items():
        of_products = [r["impls"]["ours"].get("x_products") for r in records]
        ratios = {peer: [report.linear_ratio(record, peer) for record in records] for peer in report.LINEAR_PEERS}
        optax = ratios.pop("optax")
        others = [min(filter(None, of_case), default=None) for of_case in zip(*ratios.values(), strict=True)]
        shares = [1 / x if x else None for x in of_products]
        lines.append(Line("`linear_cross_entropy`", card.upper(), records, shares, optax, others))
    return [line for line in lines if line.records]


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
        names = [record["case"]["name"] for record in line.records]
        best = [min(filter(None, ratios), default=None) for ratios in zip(line.xla, line.others, strict=True)]
        worst = min(_known(best, names), default=None)
        slowest = f"{worst[0]:.2f} `{worst[1]}`" if worst else "-"
        rows.append([line.label, line.card, _count(line.records), *map(_spread, line[3:]), slowest])
    where = report.setting([record for line in lines if line.label in LINES for record in line.records])
    text = (
        f"\n\nMedian (worst ... best case) on one GPU. Rows: {where}; attention: the card's newest JAX. The floor is "
        "the time of a copy of the same bytes; for attention, of as large a product of square matrices; for one query, "
        "of a read; for `linear_cross_entropy`, of as many products of the same shapes. XLA runs `jax.nn` or optax. "
        "Other libraries: torch, torch.compile, Liger, quack, tokamax; for attention cuDNN, which gets documents as a "
        "dense mask." + report.linear_memory(results)
    )
    heads = ["operation", "on", "cases", "of the floor", "x XLA", "x best other", "least x XLA or other"]
    return markdown(heads, rows) + (text if rows else "")


def _known(values: Iterable[float | None], names: Iterable[str]) -> list[tuple[float, str]]:
    return [(value, name) for value, name in zip(values, names, strict=True) if value is not None]


def _count(records: Sequence[Record]) -> str:
    wrong = sum(record["impls"]["ours"]["status"] != "ok" for record in records)
    return f"{len(records)}, {wrong} WRONG" if wrong else str(len(records))


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def _spread(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{statistics.median(known):.2f} ({known[0]:.2f} ... {known[-1]:.2f})" if known else "-"


def of_ops(
    ops: Iterable[str], facts: Mapping[str, Callable[[Record], str]], errors_of: tuple[str, ...] = ()
) -> Callable[[Results], str]:
    """Every measured case of some operations: ours beside its peers, some of which have their errors shown.

    `facts` are the columns between the time and the peers.
    """

    def make(results: Results) -> str:
        order = {case.name: i for i, case in enumerate(cases.TABLE.cases)}
        records = [record for record in results.records() if record["case"]["op"] in ops]
        if not records:
            return NOT_MEASURED
        peers = [peer for peer in PEERS if any(peer in record["impls"] for record in records)]
        columns: dict[str, Callable[[Record], str]] = {"case": lambda r: title(r["case"]), "us": _time, **facts}
        columns |= {f"x {PEERS[peer]}": functools.partial(_against, peer) for peer in peers}
        columns["error, ulp"] = lambda r: number(r["impls"]["ours"].get("max_error_ulp"), ".1f")
        columns |= {f"of {PEERS[peer]}": functools.partial(_error, peer) for peer in peers if peer in errors_of}
        columns["measured"] = lambda r: r["run"]["when"]
        records.sort(key=lambda r: order.get(r["case"]["name"], len(order)))
        rows = [[cell(record) for cell in columns.values()] for record in records]
        return f"{markdown(list(columns), rows)}\n\n{_caption(records, peers)}"

    return make


def title(case: Mapping[str, Any]) -> str:
    words = _PASS_WORDS[case["pass"]]
    options = "".join(f", {name} {value:g}" for name, value in case.get("options", {}).items())
    return f"{case['op']}{words} {cases.SHORT_DTYPES[case['dtype']]} {case['rows']} x {case['cols']}{options}"


def _time(record: Record) -> str:
    ours = record["impls"]["ours"]
    return number(ours.get("us"), ".1f") if ours["status"] == "ok" else ours["status"]


def _against(peer: str, record: Record) -> str:
    ratio = measured.ratio(record, peer)
    if ratio is not None:
        return format(ratio, ".2f")
    status = record["impls"].get(peer, {}).get("status", "ok")
    return "refuses" if status == "declined" else "-" if status == "ok" else status


def _error(peer: str, record: Record) -> str:
    value = measured.loss_error(record, peer)
    return number(value, ".0f" if value and value >= 100 else ".1f")


# Every measured case, which documents do not show.
DETAILS: dict[str, Callable[[Results], str]] = {
    "rows": of_ops(
        ("softmax", "log_softmax", "logsumexp"),
        {
            "TB/s": lambda record: number(record["impls"]["ours"].get("tb_per_s"), ".2f"),
            "of copy": lambda record: number(record["impls"]["ours"].get("fraction_of_copy"), ".2f"),
        },
    ),
    "attention_forward": report.attention_cells("fwd"),
    "attention_backward": report.attention_cells("bwd"),
    "attention_decode": report.attention_decode,
    **call_report.DETAILS,
}
TABLES: dict[str, Callable[[Results], str]] = {
    "headline": headline,
    "summary": summary,
    "cross_entropy": of_ops(
        ["cross_entropy"],
        {"units": lambda record: number(measured.units(record, "ours"), ".2f")},
        ("xla", "xla_f32"),
    ),
    "top_k": of_ops(["top_k"], {}),
    "targets": promises,
    "ladder_forward_f16": ladder("fwd", "float16"),
    "ladder_forward_f32": ladder("fwd", "float32"),
    "ladder_backward_f16": ladder("bwd", "float16"),
    "attention_runs": report.attention_runs,
    "attention_promises": report.attention_promises,
    "attention": report.attention,
    "attention_sample": report.attention_sample,
    "attention_pages": report.attention_pages,
    "linear": report.linear,
    "scaling": scaling.table,
    **call_report.TABLES,
}


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
            figure = _bandwidth(pyplot, sorted(series, key=lambda record: record["case"]["cols"]), title)
            drawn[folder / f"bandwidth_softmax_{pass_}_float16.svg"] = figure
    runs = measured.attention_runs(results.folder)
    if runs:
        samples = measured.attention_runs(results.folder, "attention sample")
        drawn[folder / "attention.svg"] = report.draw_cells(pyplot, runs[0], samples)
    for run in measured.attention_runs(results.folder, "attention caches")[:1]:
        drawn[folder / "caches.svg"] = report.draw_caches(pyplot, run)
    if shared := measured.topic_runs("scaling", results.folder):
        drawn[folder / "scaling.svg"] = scaling.draw(pyplot, shared)
    for path, figure in drawn.items():
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    return list(drawn)


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
        print("\n".join(map(str, draw(results, PICTURES))))


if __name__ == "__main__":
    main(sys.argv[1:])
