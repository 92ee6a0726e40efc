"""The README's table: each operation's median over everything measured, with the worst and the best case."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import peers, report
from benchmarks import results as measured
from benchmarks.results import NOT_MEASURED, Results, Setting

Record = Mapping[str, Any]
_MANY = 1024  # rows


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
    Line("`softmax`", ("softmax",), ("fwd",), lambda rows: rows >= _MANY),
    Line("the same, at most 128 rows", ("softmax",), ("fwd",), lambda rows: rows < _MANY),
    Line("its gradient", ("softmax",), ("bwd", "value_and_vjp")),
    Line("`log_softmax`, `logsumexp`", ("log_softmax", "logsumexp"), ("fwd",)),
    Line("cross entropy", ("cross_entropy",), ("fwd",)),
    Line("and its gradient", ("cross_entropy",), ("value_and_grad",)),
    Line("the same, by `.mean()`", ("cross_entropy",), ("value_and_grad_mean",)),
    Line("top-k softmax", ("top_k",), ("fwd",)),
)
ATTENTION = (("`flash_attention`", "fwd"), ("its gradient", "bwd"))


def table(results: Results) -> str:
    """One row for each operation, and where the figures come from."""
    shown = [[r for r in results.records() if line.takes(r["case"])] for line in LINES]
    rows = [_row(line.label, records) for line, records in zip(LINES, shown, strict=True)]
    for setting, attention in _newest_jax(results).items():
        found = attention.records()
        for label, pass_ in ATTENTION:
            rows.append(_attention_row(f"{label}, {setting}", [r for r in found if r["case"]["pass"] == pass_]))
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
        "a product of square matrices. Others: torch, torch.compile, Liger and quack; of attention cuDNN, JAX's "
        "`attention_mgpu`, tokamax and flash-attn-4, where they take the call."
    )


def _newest_jax(results: Results) -> dict[Setting, Results]:
    """Attention's results on each card, with the newest JAX that was measured there."""
    found: dict[str, tuple[Setting, Results]] = {}
    for setting, attention in results.by_setting("attention").items():
        found.setdefault(setting.card, (setting, attention))
    return dict(found.values())


def _row(label: str, records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    share = (record["impls"]["ours"].get("fraction_of_copy") for record in records)
    others = ([ratio for peer in peers.NAMES if (ratio := measured.ratio(r, peer)) is not None] for r in records)
    return [
        label,
        _count(records),
        "-" if records[0]["case"]["op"] == "top_k" else _spread(share),
        _spread(measured.ratio(record, "xla") for record in records),
        _spread(min(ratios, default=None) for ratios in others),
    ]


def _attention_row(label: str, records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    speeds = [(r["impls"]["ours"].get("tflop_per_s"), r["matmul"]["tflop_per_s"]) for r in records]
    shares = (ours / product if ours else None for ours, product in speeds)
    return [
        label,
        _count(records),
        _spread(shares),
        "-",
        _spread(measured.against_best(record)["ratio"] for record in records),
    ]


def _count(records: Sequence[Record]) -> str:
    wrong = sum(record["impls"]["ours"]["status"] != "ok" for record in records)
    return f"{len(records)}, {wrong} WRONG" if wrong else str(len(records))


def _spread(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{statistics.median(known):.2f} ({known[0]:.2f} ... {known[-1]:.2f})" if known else "-"
