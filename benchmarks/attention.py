"""Attention in the benchmark binary: which cases are measured, what a run prints and saves, and random draws."""

import ctypes
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's side shares the device's memory

import jax
from absl import flags

from benchmarks import attention_cases, attention_peers, runner, trees
from benchmarks import results as measured
from benchmarks.calls import Options
from benchmarks.peers import Peers
from benchmarks.runner import Bench, attempt

FLAGS = flags.FLAGS
_TOGETHER = 5  # cases that are compiled at once
_MATMULS = ("matmul", "peers_matmul")


def measure(
    cases: Sequence[attention_cases.Case],
    options: Options,
    *,
    peers: Peers | None = None,
    path: pathlib.Path | None = None,
    commit: str | None = None,
    budget_s: float | None = None,
    processes: int = 1,
    topic: str = "attention",
) -> list[dict[str, Any]]:
    """Runs the cases, printing and saving each; those that the budget leaves out are named in the file's header.

    Without `options.impls` there are only `peers`, and JAX measures nothing. With several `processes` the peers come
    after all the rest.
    """
    started = time.monotonic()
    deadline = None if budget_s is None else started + budget_s
    header = measured.header(commit=commit, seed=options.seed, rounds=options.rounds)
    header |= {"topic": topic, "left_out": [case.name for case in cases]}
    header["versions"] |= cudnn_version()
    records, by_name = [], {case.name: case for case in cases}

    def save() -> None:
        if path is not None:
            measured.write(path, header, records)

    def show(record: Mapping[str, Any]) -> None:
        elapsed = time.monotonic() - started
        print(f"[{len(records)}/{len(cases)} {elapsed:.0f}s] {lines(record)}", flush=True)
        save()

    apart = processes > 1 and bool(options.impls)
    if apart:
        print(f"compiling {len(cases)} cases in {processes} processes", flush=True)
        found = runner.records(cases, options, processes, deadline)
    else:
        found = _one_by_one(cases, options, deadline)
    for record in found:
        if peers is not None and not apart:
            _add_peers(record, by_name[record["case"]["name"]], peers)
        records.append(record)
        header["left_out"].remove(record["case"]["name"])
        show(record)
    if peers is not None and apart:
        for record in records:
            if not _is_over(deadline):
                _add_peers(record, by_name[record["case"]["name"]], peers)
                show(record)
    header["clocks_after"] = measured.clocks()
    save()
    if header["left_out"]:
        print(f"left out after {time.monotonic() - started:.0f} s: {', '.join(header['left_out'])}", flush=True)
    return records


def _one_by_one(
    cases: Sequence[attention_cases.Case], options: Options, deadline: float | None
) -> Iterator[dict[str, Any]]:
    """The record of each case, in this process."""
    bench = Bench(options)
    for first in range(0, len(cases), _TOGETHER):
        group = cases[first : first + _TOGETHER]
        if options.impls and not _is_over(deadline):
            print(f"compiling {first + 1} to {first + len(group)} of {len(cases)} cases", flush=True)
            bench.prepare(group)
        for case in group:
            if _is_over(deadline):
                return
            yield attempt(bench, case) if options.impls else _only_for_peers(case)


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _only_for_peers(case: attention_cases.Case) -> dict[str, Any]:
    empty = {"impls": {}, "best_peer": None, "ratio": None}
    return {"case": case.describe(), "flops": case.flops, "clock": "cuda events", **empty}


def _add_peers(record: dict[str, Any], case: attention_cases.Case, peers: Peers) -> None:
    """Measures torch's side, and puts it into the record."""
    answer = peers.measure(_for_peers(case))
    record["peers_matmul"] = answer.get("matmul")
    beside = "ours" in record["impls"]
    record["impls"] |= {name: _by_time(entry) if beside else entry for name, entry in answer["impls"].items()}
    record |= measured.against_best(record)


def _by_time(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A peer's result without its process' matrix product: on the same device in the same minute, times compare."""
    return {key: value for key, value in entry.items() if key != "matmul_tflop_per_s"}


def _for_peers(case: attention_cases.Case) -> dict[str, Any]:
    documents = case.shape.documents().tolist() if case.shape.kind == "documents" else []
    return case.describe() | {"flops": case.flops, "documents": documents}


def lines(record: Mapping[str, Any]) -> str:
    """One case in one line per implementation."""
    name = record["case"]["name"]
    if "error" in record:
        return f"{name}: failed: {record['error']}"
    shrunk = " (CPU: one short sequence)" if "measured" in record else ""
    best = f", ours {record['ratio']:.3f} x {record['best_peer']}" if record["ratio"] else ""
    ceilings = [f"copy {record['copy']['tb_per_s']:.2f} TB/s"] if "copy" in record else []
    ceilings += [f"{key} {record[key]['tflop_per_s']:.0f} TFLOP/s" for key in _MATMULS if record.get(key)]
    head = f"{name}{shrunk}: {record['clock']} clock, {', '.join(ceilings)}{best}"
    first = next((entry["us"] for entry in record["impls"].values() if "us" in entry), None)
    return "\n".join([head, *(f"  {impl:<8} {_line(entry, first)}" for impl, entry in record["impls"].items())])


def _line(entry: Mapping[str, Any], first: float | None) -> str:
    """An implementation in one line, its time also as a multiple of the first one's."""
    if "us" not in entry:
        return f"{entry['status']}: {entry['reason']}"
    spread = f"{entry['us']:>9.1f} us ({entry['min_us']:.1f} to {entry['max_us']:.1f})"
    direct = f", direct {entry['direct_tflop_per_s']:.1f}" if "direct_us" in entry else ""
    spread += f"  {entry['us'] / first:.3f}x" if first else ""
    return f"{spread}  {entry['tflop_per_s']:>6.1f} TFLOP/s{direct}  error {entry['error']:.1e}"


def draws_won(records: Sequence[Mapping[str, Any]], shown: int = 5) -> str:
    """In which share of the draws ours is no slower than each library and than the fastest, and the worst draws."""
    found: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        name = record["case"]["name"]
        ratios = {peer: measured.faster(record, peer) for peer in record["impls"] if peer != "ours"}
        for peer, ratio in [*ratios.items(), ("the fastest of RIVALS", record["ratio"])]:
            if ratio is not None:
                found.setdefault(peer, []).append((ratio, name))
    if not found:
        return f"none of {len(records)} draws was timed by both ours and another library"
    text = []
    for peer, pairs in found.items():
        won, mean = sum(ratio >= 1 for ratio, _ in pairs), statistics.geometric_mean(ratio for ratio, _ in pairs)
        share = f"{won} of {len(pairs)} draws won ({100 * won / len(pairs):.1f} %)"
        text.append(f"against {peer}: {share}, geometric mean {mean:.3f}; the worst:")
        text += [f"  {ratio:.3f}  {name}" for ratio, name in sorted(pairs)[:shown]]
    return "\n".join(text).replace("the fastest of RIVALS", f"the fastest of {', '.join(measured.RIVALS)}")


def _chosen() -> tuple[attention_cases.Case, ...]:
    """The cases that the flags name."""
    filters = [name for name in ("tag", "case", "pass", "kind") if FLAGS[name].present]
    if FLAGS.draws and filters:
        given = ", ".join(f"--{name}" for name in filters)
        sys.exit(f"--draws: got {FLAGS.draws} beside {given}, wanted it without them; leave out --draws or {given}.")
    if FLAGS.draws:
        return attention_cases.draws(FLAGS.draws, FLAGS.seed)
    passes = FLAGS["pass"].value or ()
    return attention_cases.select(tags=FLAGS.tag or ["core"], passes=passes, kinds=FLAGS.kind, patterns=FLAGS.case)


def cudnn_version() -> dict[str, str]:
    """The version of the cuDNN that is loaded; empty without one."""
    if jax.default_backend() != "gpu":
        return {}
    try:
        version = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion
    except (OSError, AttributeError):
        return {}
    version.restype = ctypes.c_size_t
    return {"cudnn": str(version())}


def main() -> None:
    """Measures what the binary's flags, which are parsed, ask for."""
    cases = _chosen()
    if not cases:
        sys.exit("No case matches these flags.")
    if FLAGS.list:
        for case in cases:
            print(f"{case.name:<50} {case.flops / 1e12:>8.3f} TFLOP  {','.join(sorted(case.tags))}")
        return
    apart = [tag for tag in ("cpu", "invariance") if any(tag in case.tags for case in cases)]
    if jax.default_backend() != "gpu" and "cpu" not in apart:
        print("No GPU: every case runs on one short sequence, by wall clock. Times say nothing about the kernels.")
    path = pathlib.Path(FLAGS.json) if FLAGS.json else None
    names = [name for name in FLAGS.impl if name in measured.ATTENTION_LIBRARIES]
    ours = tuple(name for name in FLAGS.impl if name not in names)
    options = Options(ours, FLAGS.rounds, FLAGS.seed, trees=folders())
    peers = Peers(names, FLAGS.rounds, FLAGS.peers_path, attention_peers.__name__) if names else None
    limits = {"budget_s": FLAGS.budget_s, "processes": FLAGS.processes}
    trees_ = [name for name in ours if trees.is_tree(name, options.trees)]
    topic = "draws" if FLAGS.draws else "trees" if trees_ else " ".join(apart)
    limits |= {"topic": f"attention {topic}"} if topic else {}
    records = measure(cases, options, peers=peers, path=path, commit=FLAGS.commit, **limits)
    if peers is not None:
        peers.close()
    if FLAGS.draws:
        print(draws_won(records), flush=True)
    red = {name: _red(name, records) for name in ("ours", *trees_) if name in ours}
    for name, found in red.items():
        if found:
            print(f"{name} is WRONG or failed in {len(found)} of {len(records)}: {', '.join(found)}", flush=True)
    sys.exit(int(any(red.values())))


def _red(name: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cases in which an implementation is wrong or failed; a tree is to have a time in every case."""
    bad = ("WRONG", "failed") if name == "ours" else ("WRONG", "failed", "declined")
    return [r["case"]["name"] for r in records if r["impls"].get(name, {}).get("status", "failed") in bad]


def folders() -> dict[str, str]:
    """The trees that `--tree` names, and this one."""
    return trees.HERE | dict(tree.split("=", 1) for tree in FLAGS.tree)
