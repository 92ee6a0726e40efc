r"""`python -m benchmarks`: each selected case is checked first, and reported with its time if the result is right.

Examples:
  python -m benchmarks --list --tag=core
  python -m benchmarks --tag=core --json=benchmarks/results/h200/core.json
  python -m benchmarks --op=softmax --pass=bwd --dtype=f16 --impl=ours,xla
  python -m benchmarks --tag=ladder --impl=ladder,xla --json=benchmarks/results/h200/ladder.json
  python -m benchmarks --case=softmax_fwd_f16_4096x131072 --impl=ours,kernel:cluster:ctas=8:register_chunks=0
  python -m benchmarks --tag=cross_entropy --impl=ours,xla,xla_f32 --json=losses.json
  python -m benchmarks --tag=chains --processes=16 --json=benchmarks/results/h100/chains.json
  python -m benchmarks --tag=sample --seed=1 --processes=16 --json=benchmarks/results/h100/sample_1.json
  python -m benchmarks --tag=first --json=benchmarks/results/h100/first.json
  python -m benchmarks --impl=torch,torch_compile,quack,liger --peers_path=/tmp/cute --json=peers.json
  python -m benchmarks --op=attention --tag=core --impl=ours,cudnn,mgpu,tokamax --rounds=3 \
      --json=benchmarks/results/h200/attention.json --commit=SHA --budget_s=400
  python -m benchmarks --op=attention --tag=standard --pass=fwd,bwd --impl=ours,cudnn --processes=8 --json=FILE
  python -m benchmarks --op=attention --tag=sample --seed=1 --count=60 --processes=16 --json=FILE
  python -m benchmarks --op=attention --tree=before=../before --impl=before,now,now:stages=1:scheduler=dynamic \
      --case=bwd_causal_d64_s8192_b2_h32 --processes=12
  python -m benchmarks --op=attention --tag=invariance
  JAX_PLATFORMS=cpu python -m benchmarks --op=attention --tag=cpu
  python -m benchmarks --op=attention --tag=grid --impl=ours,cudnn,fa4 --peers_path=/tmp/cute --json=FILE
"""

import ctypes
import os
import pathlib
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's side shares the device's memory

import jax
from absl import app, flags

from benchmarks import attention_cases, call_cases, call_report, calls, cases, first, impls, report, runner
from benchmarks import results as measured
from benchmarks.runner import Peers

ATTENTION = "attention"
OPS = tuple(dict.fromkeys((*(case.op for case in cases.TABLE.cases), *calls.FUNCTIONS)))


class Topic(NamedTuple):
    """Cases, implementations and defaults of rows or of attention."""

    cases: types.ModuleType
    impls: tuple[str, ...]
    libraries: tuple[str, ...]  # of torch's process
    default: str
    rounds: int
    flags: tuple[str, ...]  # those that the other has not
    count: int  # of random calls


_ROW_FLAGS, _ATTENTION_FLAGS = ("dtype",), ("kind", "tree")
ROWS = Topic(
    call_cases, impls.ROWS, measured.ROW_LIBRARIES, "ours xla torch torch_compile quack liger", 5, _ROW_FLAGS, 200
)
_OTHERS = "ours cudnn mgpu tokamax"
HEADS = Topic(attention_cases, (*impls.ATTENTION,), measured.ATTENTION_LIBRARIES, _OTHERS, 3, _ATTENTION_FLAGS, 60)
# Implementations that tags ask for by themselves.
_OF_TAG = {"invariance": f"ours {impls.INVARIANT}", "cpu": "ours xla", "chains": "ours xla"}
_OF_TAG |= dict.fromkeys(("first", "sample", "short"), "ours cudnn xla")

FLAGS = flags.FLAGS
flags.DEFINE_list("op", [], f"Operations: {', '.join(OPS)}; or {ATTENTION}, which is measured alone.")
flags.DEFINE_list("case", [], "Regular expressions searched in case names; or names of calls of attention.")
flags.DEFINE_list("dtype", [], "Of rows: float16 or f16, bfloat16 or bf16, float32 or f32.")
flags.DEFINE_list("pass", [], f"Passes: {', '.join(cases.PASSES)}.")
flags.DEFINE_list(
    "tag", [], "Tags; default 'core' of attention; of rows, without a filter, 'standard' on a GPU, 'smoke' elsewhere."
)
_OF = [", ".join((*topic.impls, *topic.libraries)) for topic in (ROWS, HEADS)]
flags.DEFINE_list("impl", [], f"Rows: {_OF[0]}, kernel:NAME:FIELD=VALUE. Attention: {_OF[1]}.")
flags.DEFINE_integer("rounds", None, "Interleaved rounds; default 5 of rows, 3 of attention.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of the inputs and of --tag=sample.")
flags.DEFINE_string("json", None, "Where to write results, after each case.")
flags.DEFINE_bool("list", False, "List the selected cases and stop.")
flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")
flags.DEFINE_string("peers_path", "", "PYTHONPATH of torch's side, where peers are installed.")
flags.DEFINE_multi_string("tree", [], "NAME=FOLDER: a source tree whose kernels are an --impl of attention.")
flags.DEFINE_list("kind", [], f"Kinds of attention: {', '.join(attention_cases.KINDS)}.")
flags.DEFINE_integer(
    "count", None, "How many random calls --tag=sample has; default 200, of attention alone 60.", lower_bound=1
)
flags.DEFINE_float("budget_s", None, "Start no case after so many seconds.")
flags.DEFINE_string("capability", None, "Of attention: what ours runs on a GPU of this compute capability, as 8.0.")
flags.DEFINE_integer("processes", 1, "Processes that compile beside each other.", lower_bound=1)


def check_flags() -> Topic:
    """Completes the flags by what a topic has as default, and ends the process at a name that there is not."""
    topic, other = (HEADS, ROWS) if ATTENTION in FLAGS.op else (ROWS, HEADS)
    if topic is HEADS and len(FLAGS.op) > 1:
        rest = ",".join(op for op in FLAGS.op if op != ATTENTION)
        sys.exit(f"--op: got {ATTENTION} beside {rest}, wanted it alone; run the binary once for each.")
    if "first" in FLAGS.tag and len(FLAGS.tag) > 1:
        sys.exit(f"--tag: got {','.join(FLAGS.tag)}, wanted first alone; run the binary once for each.")
    if unclear := [tree for tree in FLAGS.tree if "=" not in tree]:
        sys.exit(f"--tree: got {','.join(unclear)}, wanted NAME=FOLDER, as before=../before.")
    trees = _trees() if topic is HEADS else {}
    known = {"op": (*OPS, ATTENTION), "impl": (*topic.impls, *topic.libraries, *trees), "tag": topic.cases.TABLE.tags}
    known |= {
        "pass": topic.cases.PASSES,
        "kind": attention_cases.KINDS,
        "dtype": (*cases.SHORT_DTYPES, *cases.LONG_DTYPES),
    }
    is_variant = lambda name: impls.is_tree(name, trees) or (topic is ROWS and name.startswith(measured.KERNEL))
    given = {flag: FLAGS[flag].value or [] for flag in known}
    given["impl"] = [name for name in given["impl"] if not is_variant(name)]
    for flag, names in known.items():
        if wrong := ",".join(name for name in given[flag] if name not in names):
            sys.exit(f"--{flag}: got {wrong}, wanted some of {', '.join(names)}; correct or leave out --{flag}.")
    for flag in other.flags:
        if FLAGS[flag].present:
            place = "rows" if topic is HEADS else ATTENTION
            sys.exit(f"--{flag}: got {FLAGS[flag].value}, wanted it for {place} alone; leave it out or change --op.")
    of_tags = (_OF_TAG[tag] for tag in _OF_TAG if tag in FLAGS.tag)
    FLAGS.impl = FLAGS.impl or next(of_tags, topic.default).split()
    FLAGS.rounds = FLAGS.rounds or (1 if "first" in FLAGS.tag else topic.rounds)
    FLAGS.count = FLAGS.count or topic.count
    return topic


def _trees() -> dict[str, str]:
    return {"now": "."} | dict(tree.split("=", 1) for tree in FLAGS.tree)


def selected(topic: Topic) -> Sequence[runner.Case]:
    filters: dict[str, Any] = {"op": FLAGS.op, "pass_": FLAGS["pass"].value, "patterns": FLAGS.case}
    if topic is HEADS:
        filters["kind"] = FLAGS.kind
    else:
        filters["dtype"] = [cases.LONG_DTYPES.get(name, name) for name in FLAGS.dtype]
    tags = FLAGS.tag or ["core"] * (topic is HEADS)
    if not tags and not any(filters.values()):
        tags = ["standard" if jax.default_backend() == "gpu" else "smoke"]
    return topic.cases.TABLE.select(tags=tags, count=FLAGS.count, seed=FLAGS.seed, **filters)


def measure(
    chosen: Sequence[runner.Case],
    options: impls.Options,
    *,
    process: Peers | None = None,
    path: str | None = None,
    commit: str | None = None,
    budget_s: float | None = None,
    processes: int = 1,
) -> list[dict[str, Any]]:
    """Measures the cases, printing and saving each; those that the budget leaves out are named in the header.

    The peers of `process` come after all the rest; without implementations of JAX's process there are only they.
    """
    started, records, by_name = time.monotonic(), [], {case.name: case for case in chosen}
    deadline = float("inf") if budget_s is None else started + budget_s
    header = measured.header(commit=commit, seed=options.seed, rounds=options.rounds)
    header |= {"topic": _topic(chosen, options), "left_out": list(by_name)}
    header["versions"] |= _cudnn_version()

    def save() -> None:
        if path is not None:
            measured.write(pathlib.Path(path), header | {"clocks_after": measured.clocks()}, records)

    def show(record: dict[str, Any]) -> None:
        print(f"[{len(records)}/{len(chosen)} {time.monotonic() - started:.0f} s] {report.line(record)}", flush=True)
        save()

    for record in _measured(chosen, options, processes, deadline):
        records.append(record)
        header["left_out"].remove(record["case"]["name"])
        show(record)
    for record in records:
        if process is not None and time.monotonic() < deadline:
            answer = process.measure(by_name[record["case"]["name"]].told())
            record |= {f"peers_{probe}": answer[probe] for probe in ("copy", "matmul") if probe in answer}
            record["impls"] |= answer["impls"]
            record |= measured.against_best(record) if "fa4" in answer["impls"] else {}
            show(record)
    if header["left_out"]:
        print(f"left out after {time.monotonic() - started:.0f} s: {', '.join(header['left_out'])}", flush=True)
    save()
    return records


def _measured(
    chosen: Sequence[runner.Case], options: impls.Options, processes: int, deadline: float
) -> Iterator[dict[str, Any]]:
    if firsts := [case for case in chosen if isinstance(case, calls.CallCase) and "first" in case.tags]:
        return first.records(firsts, options, processes, deadline)
    if processes > 1 and options.impls:
        return runner.in_processes(chosen, options, processes, deadline)
    return runner.one_by_one(chosen, options, deadline)


def _topic(chosen: Sequence[runner.Case], options: impls.Options) -> str | None:
    """Names the topic that keeps results apart in the documents: attention, tags measured apart, and trees."""
    tags = {tag for case in chosen for tag in case.tags}
    words = [ATTENTION] * any(case.op == ATTENTION for case in chosen)
    words += [tag for tag in {**call_cases.TABLE.apart, **attention_cases.TABLE.apart} if tag in tags]
    words += ["trees"] * any(impls.is_tree(name, options.trees) for name in options.impls)
    words += ["configs"] * bool(options.of_case)
    words += [f"capability {options.capability}"] * bool(options.capability)
    return " ".join(words) or None


def red(name: str, records: Sequence[dict[str, Any]], trees: Mapping[str, str]) -> list[str]:
    """The cases in which an implementation of ours is wrong or failed; a tree is to have a time in every case."""
    is_tree = impls.is_tree(name, trees)
    if not is_tree and name not in ("ours", impls.INVARIANT) and not name.startswith(measured.KERNEL):
        return []
    bad = ("WRONG", "failed", "declined") if is_tree else ("WRONG", "failed")
    return [r["case"]["name"] for r in records if r["impls"].get(name, {}).get("status", "failed") in bad]


def _cudnn_version() -> dict[str, str]:
    try:
        version = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion
    except OSError:
        return {}
    version.restype = ctypes.c_size_t
    return {"cudnn": str(version())}


def main() -> None:
    app.define_help_flags()
    FLAGS(sys.argv)
    topic = check_flags()
    chosen = selected(topic)
    if not chosen:
        sys.exit("No case matches these flags.")
    if FLAGS.list:
        print("\n".join(f"{case.name:<60} {','.join(sorted(case.tags))}" for case in chosen))
        return
    if jax.default_backend() != "gpu" and "cpu" not in FLAGS.tag:
        print("No GPU: every case runs small on the CPU, by wall clock. Times say nothing about the kernels.")
    theirs = [name for name in FLAGS.impl if name in topic.libraries]
    ours = tuple(impls.expand([name for name in FLAGS.impl if name not in theirs]))
    trees = _trees() if topic is HEADS else {}
    options = impls.Options(ours, FLAGS.rounds, FLAGS.seed, trees, capability=FLAGS.capability)
    process = Peers(theirs, FLAGS.rounds, FLAGS.peers_path) if theirs else None
    limits = {"budget_s": FLAGS.budget_s, "processes": FLAGS.processes}
    records = measure(chosen, options, process=process, path=FLAGS.json, commit=FLAGS.commit, **limits)
    if process is not None:
        process.close()
    tags = frozenset[str]().union(*(case.tags for case in chosen))
    summaries = {
        "chains": call_report.chains,
        "first": call_report.first,
        "sample": report.sample,
        "short": report.sample,
    }
    for summary in dict.fromkeys(summaries[tag] for tag in summaries if tag in tags):
        print(summary(records), flush=True)
    bad = {name: found for name in ours if (found := red(name, records, options.trees))}
    for name, found in bad.items():
        print(f"{name} is WRONG or failed in {len(found)} of {len(records)}: {', '.join(found)}", flush=True)
    sys.exit(int(bool(bad)))


if __name__ == "__main__":
    main()
