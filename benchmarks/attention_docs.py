"""What the documents say of attention's speed, made from committed results: a page and a picture."""

import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import attention_cases, report, targets
from benchmarks import results as measured
from benchmarks.results import NOT_MEASURED, Results, Setting

Record = Mapping[str, Any]

PEERS = {"cudnn": "cuDNN", "mgpu": "JAX's attention_mgpu", "tokamax": "tokamax", "fa4": "flash-attn-4"}
PASSES = {"fwd": "forward", "bwd": "backward", "value_and_vjp": "value and vjp"}
PAGE = """# Attention, measured

Written by `python -m benchmarks.docs` from the result files under `benchmarks/results/`; what is timed and how
stands at the top of `benchmarks/runner.py`, how correctness is judged at the top of
`benchmarks/truth.py`. bfloat16, random normal; 16384 tokens, 2048 features unless heads are given.
TFLOP/s count 4·B·H·S²·D forward and 10·B·H·S²·D backward, half for causal, and only what is seen in windows and
documents. The backward pass is (value and vjp) less forward, for every implementation; "direct" is ours from its
residuals. "x PEER" says how many times faster ours is; "refuses" that the peer does not take the call. A case whose
result is wrong has no time. Each card and each version of JAX has a table of its own. A peer that the newest run of a
case leaves out stands with an earlier one's time on the same card with the same JAX, and is compared by shares of each
run's matrix product; flash-attn-4, whose process has no JAX, with any run's on the same card. JAX's `attention_mgpu`
runs in float16; cuDNN and tokamax get documents as a mask tensor; the error is the root mean square of the worst
output, relative to float32.

![TFLOP/s of each implementation, with a matrix product as ceiling](pictures/attention.svg)

## What is promised, and what was measured

{verdicts}

{sections}
"""


def page(found: Mapping[Setting, Results]) -> str:
    """The whole of docs/attention_results.md."""
    by_card: dict[str, list[Setting]] = {}
    for setting in found:
        by_card.setdefault(setting.card, []).append(setting)
    pairs = [pair for settings in by_card.values() for pair in itertools.combinations(settings, 2)]
    sections = [_versions(pair, [found[setting] for setting in pair]) for pair in pairs]
    sections += [_section(setting, results) for setting, results in found.items()]
    return PAGE.format(verdicts=_verdicts(found), sections="\n\n".join(filter(None, sections)))


def _section(setting: Setting, results: Results) -> str:
    left_out = dict.fromkeys(name for header in results.headers() for name in header.get("left_out", ()))
    missing = [name for name in left_out if results.case(name) is None]
    note = f"\n\nLeft out, as the time was up: {', '.join(f'`{name}`' for name in missing)}." if missing else ""
    return f"## {setting}\n\n{comparison(ordered(results))}{note}"


def _verdicts(found: Mapping[Setting, Results]) -> str:
    heads = ["", *(promise.describe() for promise in targets.PROMISES)]
    rows = []
    for setting, results in found.items():
        for pass_ in targets.PASSES:
            verdicts = [promise.judge(results, pass_) for promise in targets.PROMISES]
            rows.append([f"{setting}, {PASSES[pass_]}", *map(_verdict, verdicts)])
    return report.markdown(heads, rows)


def _verdict(verdict: targets.Verdict | None) -> str:
    if verdict is None:
        return "-"
    where = f", at {_call(verdict.at)}" if verdict.at else ""
    count = "" if verdict.measured == verdict.wanted else f" ({verdict.measured} of {verdict.wanted} cells)"
    return f"{_floored(verdict.value)} {verdict.word}{count}{where}"


def _versions(settings: Sequence[Setting], results: Sequence[Results]) -> str:
    """The same source with two versions of JAX on one card; nothing where no commit was measured with both."""
    newer, older = settings
    pairs = targets.same_source(*results)
    if not pairs:
        return ""
    means = []
    for pass_ in targets.PASSES:
        verdict, worst = targets.versions(pairs, pass_)
        if worst is not None:
            means.append(f"{PASSES[pass_]} {_verdict(verdict)}, the worst {_floored(worst[0])}, at {_call(worst[1])}")
    heads = ["attention", f"us, {newer.jax}", f"us, {older.jax}", "times faster", "cuDNN", "measured"]
    rows = []
    for pair in pairs:
        times = [f"{record['impls']['ours']['us']:.1f}" for record in pair]
        ratios = [targets.speed(pair, name) for name in ("ours", "cudnn")]
        shown = ["-" if ratio is None else _floored(ratio) for ratio in ratios]
        rows.append([title(pair[0]["case"]), *times, *shown, pair[0]["run"]["when"]])
    return (
        f"## JAX {newer.jax} against {older.jax}, same source, {newer.card}\n\n"
        f"{targets.VERSIONS.describe().capitalize()}: {'; '.join(means)}. The two versions run one after the "
        "other, each beside cuDNN: where cuDNN's time changes as much, the card's clock or cuDNN's version did it.\n\n"
        + report.markdown(heads, rows)
    )


def comparison(records: Sequence[Record]) -> str:
    """One row for each case."""
    if not records:
        return NOT_MEASURED
    peers = [peer for peer in PEERS if any(peer in record["impls"] for record in records)]
    heads = [
        "attention",
        "us",
        "TFLOP/s",
        "direct",
        "of matmul",
        *(f"x {PEERS[peer]}" for peer in peers),
        "error",
        "measured",
    ]
    return report.markdown(heads, [_row(record, peers) for record in records]) + "\n\n" + _caption(records)


def title(case: Mapping[str, Any]) -> str:
    """A case in words: "forward, D 128, S 2048, causal"."""
    return f"{PASSES[case['pass']]}, {_call(case)}"


def _call(case: Mapping[str, Any]) -> str:
    dim, value = case["head_dim"], case["value_dim"]
    heads = f", heads {case['heads']}/{case['key_heads']}" if case["heads"] != case["key_heads"] else ""
    span = f" {case['span']}" if case["span"] else ""
    dims = f"{dim}" if dim == value else f"{dim}/{value}"
    return f"D {dims}{heads}, S {case['length']}, {case['kind']}{span}"


def ordered(results: Results) -> list[Record]:
    """The cases that have a result, in the order of the passes and of the table."""
    order = {case.name: i for i, case in enumerate(attention_cases.all_cases())}
    found = [record for record in results.records() if record["impls"]]
    passes = list(PASSES)
    return sorted(found, key=lambda r: (passes.index(r["case"]["pass"]), order.get(r["case"]["name"], len(order))))


def _row(record: Record, peers: Iterable[str]) -> list[str]:
    ours = record["impls"]["ours"]
    share = ours["tflop_per_s"] / record["matmul"]["tflop_per_s"] if "us" in ours else None
    return [
        title(record["case"]),
        report.number(ours.get("us"), ".1f") if ours["status"] == "ok" else ours["status"],
        report.number(ours.get("tflop_per_s"), ".0f"),
        report.number(ours.get("direct_tflop_per_s"), ".0f"),
        report.number(share, ".2f"),
        *(_against(record, peer) for peer in peers),
        report.number(ours.get("error"), ".1e"),
        record["run"]["when"],
    ]


def _against(record: Record, name: str) -> str:
    ratio, peer = measured.faster(record, name), record["impls"].get(name, {})
    if ratio is not None:
        return f"{ratio:.2f} ({peer['tflop_per_s']:.0f})"
    status = peer.get("status", "-")
    return "-" if status in ("ok", "declined", "not installed") else status


def _caption(records: Sequence[Record]) -> str:
    names = {"cudnn": "cuDNN", "tokamax": "tokamax"}
    runs = [record["run"]["versions"] for record in records]
    versions = {name: dict.fromkeys(str(run[name]) for run in runs if name in run) for name in names}
    used = "".join(f", {names[name]} {' and '.join(found)}" for name, found in versions.items() if found)
    linkers = [pathlib.Path(record["nvjitlink"]).name for record in records if record.get("nvjitlink")]
    if linkers:
        count = "" if len(linkers) == len(records) else f" in {len(linkers)} of {len(records)} cases"
        used += f", {' and '.join(dict.fromkeys(linkers))} loaded{count}"
    products = [record["matmul"]["tflop_per_s"] for record in records]
    clocks = ", ".join(dict.fromkeys(record["clock"] for record in records))
    return (
        f"{report.setting(records)}{used}; medians of interleaved runs, {clocks} clock. In brackets the "
        f"peer's TFLOP/s; matrix products of 8192³ in the same run: {min(products):.0f} to {max(products):.0f}."
        + _torch_side(records)
    )


def _torch_side(records: Sequence[Record]) -> str:
    entries = (entry for record in records for entry in record["impls"].values())
    found = [entry for entry in entries if {"version", "matmul_tflop_per_s"} <= entry.keys()]
    if not found:
        return ""
    versions = ", ".join(dict.fromkeys(entry["version"] for entry in found))
    products = [entry["matmul_tflop_per_s"] for entry in found]
    return (
        f" flash-attn-4 {versions} runs in torch's process, by CUDA events; that of another run is compared by shares "
        f"of each process's matrix product (torch's: {min(products):.0f} to {max(products):.0f})."
    )


def _floored(value: float) -> str:
    """Three digits that do not look better than the value is."""
    return format(math.floor(value * 1000) / 1000, ".3f")
