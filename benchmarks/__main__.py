r"""`python -m benchmarks` checks each selected case first, and reports its time if the result is right.

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
  python -m benchmarks --op=linear --budget_s=500 --json=benchmarks/results/h200/linear.json
  python -m benchmarks --op=linear --case=8192x4096x128256 --impl=ours,products,liger,quack --peers_path=/tmp/cute
  python -m benchmarks --op=scaling --json=benchmarks/results/h200/scaling.json
  python -m benchmarks --op=scaling --case=^attention_zigzag_gradient$ --devices=4
"""

import ctypes
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's side shares the device's memory

import jax
from absl import app, flags

from benchmarks import attention_cases, cases, impls, linear, protocol, report, runner, scaling, tables
from benchmarks import results as measured
from benchmarks.runner import Peers

ATTENTION = "attention"
OPS = tuple(dict.fromkeys((*(case.op for case in tables.ROWS.cases), *cases.OPERATIONS)))


class Topic(NamedTuple):
    """Cases that are measured in one run, their implementations and defaults."""

    table: cases.Table
    passes: Sequence[str]
    impls: Sequence[str]
    libraries: tuple[str, ...]  # of torch's process
    default: str
    rounds: int
    flags: str  # that some other topic has not
    count: int = 0  # of random calls


_OTHERS = "ours cudnn mgpu tokamax"
_LIBRARIES, _FA4 = measured.ROW_LIBRARIES, measured.ATTENTION_LIBRARIES
_TABLE = "tag seed processes peers_path capability"
ROWS = Topic(tables.TABLE, cases.PASSES, impls.ROWS, _LIBRARIES, "ours xla torch torch_compile quack liger", 5,
             f"pass impl dtype count {_TABLE}", 200)  # fmt: skip
HEADS = Topic(attention_cases.TABLE, attention_cases.PASSES, (*impls.ATTENTION,), _FA4, _OTHERS, 3,
              f"pass impl kind tree count {_TABLE}", 60)  # fmt: skip
LINEAR = Topic(linear.TABLE, (*linear.PASSES,), linear.IMPLS, linear.LIBRARIES, "ours products optax", 4,
               "pass impl peers_path")  # fmt: skip
SCALING = Topic(scaling.TABLE, (), (), (), "", 5, "devices")
ALONE = {ATTENTION: HEADS, "linear": LINEAR, "scaling": SCALING}  # by the --op that asks for it
# Implementations that tags ask for by themselves.
_OF_TAG = {"invariance": f"ours {impls.INVARIANT}", "cpu": "ours xla", "chains": "ours xla"}
_OF_TAG |= dict.fromkeys(("first", "sample", "short"), "ours cudnn xla")

FLAGS = flags.FLAGS
flags.DEFINE_list("op", [], f"Operations: {', '.join(OPS)}; or one that is measured alone: {', '.join(ALONE)}.")
flags.DEFINE_list("case", [], "Regular expressions searched in case names; or names of calls of attention.")
flags.DEFINE_list("dtype", [], "Of rows: float16 or f16, bfloat16 or bf16, float32 or f32.")
flags.DEFINE_list("pass", [], f"Passes: {', '.join(cases.PASSES)}; of linear, {', '.join(linear.PASSES)}.")
flags.DEFINE_list(
    "tag", [], "Tags; default 'core' of attention; of rows, without a filter, 'standard' on a GPU, 'smoke' elsewhere."
)
_OF = [", ".join((*topic.impls, *topic.libraries)) for topic in (ROWS, HEADS, LINEAR)]
flags.DEFINE_list("impl", [], f"Rows: {_OF[0]}, kernel:NAME:FIELD=VALUE. Attention: {_OF[1]}. Linear: {_OF[2]}.")
flags.DEFINE_integer("rounds", None, "Interleaved rounds; default 5, of attention 3, of linear 4.", lower_bound=1)
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
flags.DEFINE_string(
    "capability", None, "Of rows and attention: what ours runs on a GPU of this compute capability, as 8.0."
)
flags.DEFINE_integer("devices", 2, "Over how many devices --op=scaling shards the calls.", lower_bound=1)
flags.DEFINE_integer("processes", 1, "Processes that compile beside each other.", lower_bound=1)


def check_flags() -> Topic:
    """Completes the flags by what a topic has as default, and ends the process at a name that there is not."""
    asked = next((op for op in ALONE if op in FLAGS.op), "rows")
    topic = ALONE.get(asked, ROWS)
    if topic is not ROWS and len(FLAGS.op) > 1:
        rest = ",".join(op for op in FLAGS.op if op != asked)
        sys.exit(f"--op: got {asked} beside {rest}, wanted it alone; run the binary once for each.")
    if "first" in FLAGS.tag and len(FLAGS.tag) > 1:
        sys.exit(f"--tag: got {','.join(FLAGS.tag)}, wanted first alone; run the binary once for each.")
    topics = {"rows": ROWS, **ALONE}
    for flag in dict.fromkeys(" ".join(each.flags for each in topics.values()).split()):
        if FLAGS[flag].present and flag not in topic.flags.split():
            owners = " or ".join(name for name, each in topics.items() if flag in each.flags.split())
            where = f"for {owners}{' alone' * (' or ' not in owners)}; leave it out or change --op"
            sys.exit(f"--{flag}: got {FLAGS[flag].value}, wanted it {where}.")
    if unclear := [tree for tree in FLAGS.tree if "=" not in tree]:
        sys.exit(f"--tree: got {','.join(unclear)}, wanted NAME=FOLDER, as before=../before.")
    trees = _trees() if topic is HEADS else {}
    known = {"op": (*OPS, *ALONE), "impl": (*topic.impls, *topic.libraries, *trees), "tag": topic.table.tags}
    known |= {"pass": topic.passes, "kind": attention_cases.KINDS}
    known |= {"dtype": (*cases.SHORT_DTYPES, *cases.LONG_DTYPES)}
    is_variant = lambda name: impls.is_tree(name, trees) or (topic is ROWS and name.startswith(measured.KERNEL))
    given = {flag: FLAGS[flag].value or [] for flag in known}
    given["impl"] = [name for name in given["impl"] if not is_variant(name)]
    for flag, names in known.items():
        if wrong := ",".join(name for name in given[flag] if name not in names):
            sys.exit(f"--{flag}: got {wrong}, wanted some of {', '.join(names)}; correct or leave out --{flag}.")
    of_tags = (_OF_TAG[tag] for tag in _OF_TAG if tag in FLAGS.tag)
    FLAGS.impl = FLAGS.impl or next(of_tags, topic.default).split()
    FLAGS.rounds = FLAGS.rounds or (1 if "first" in FLAGS.tag else topic.rounds)
    return topic


def _trees() -> dict[str, str]:
    return {"now": "."} | dict(tree.split("=", 1) for tree in FLAGS.tree)


def selected(topic: Topic) -> Sequence[protocol.AnyCase]:
    filters: dict[str, Any] = {"op": FLAGS.op, "pass_": FLAGS["pass"].value, "patterns": FLAGS.case}
    filters |= {"kind": FLAGS.kind, "dtype": [cases.LONG_DTYPES.get(name, name) for name in FLAGS.dtype]}
    tags = FLAGS.tag or ["core"] * (topic is HEADS)
    if topic is ROWS and not tags and not any(filters.values()):
        tags = ["standard" if jax.default_backend() == "gpu" else "smoke"]
    return topic.table.select(tags=tags, count=FLAGS.count or topic.count, seed=FLAGS.seed, **filters)


def measure(
    chosen: Sequence[protocol.AnyCase],
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

    for record in runner.records(chosen, options, processes, deadline):
        records.append(record)
        header["left_out"].remove(record["case"]["name"])
        show(record)
    for record in records:
        if process is not None and time.monotonic() < deadline:
            answer = process.measure(by_name[record["case"]["name"]].told())
            record |= {f"peers_{probe}": answer[probe] for probe in ("copy", "matmul", "products") if probe in answer}
            record["impls"] |= answer["impls"]
            record |= measured.against_best(record) if "fa4" in answer["impls"] else {}
            show(record)
    if header["left_out"]:
        print(f"left out after {time.monotonic() - started:.0f} s: {', '.join(header['left_out'])}", flush=True)
    save()
    return records


def _topic(chosen: Sequence[protocol.AnyCase], options: impls.Options) -> str | None:
    """Names the topic that keeps results apart in the documents: operations and tags measured apart, and trees.

    A run of linear losses for `.mean()` stands beside the table of the losses, whose rows have the peers.
    """
    tags = {tag for case in chosen for tag in case.tags}
    words = [op for op in ALONE if any(case.op == op for case in chosen)]
    words += ["mean"] * ("linear" in words and "ours_mean" in options.impls)
    words += [tag for tag in {**tables.TABLE.apart, **attention_cases.TABLE.apart} if tag in tags]
    words += ["trees"] * any(impls.is_tree(name, options.trees) for name in options.impls)
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
    if topic is SCALING and FLAGS.devices > len(jax.devices()):
        sys.exit(f"--devices: got {FLAGS.devices}, wanted at most the {len(jax.devices())} that there are.")
    if jax.default_backend() != "gpu" and "cpu" not in FLAGS.tag:
        print("No GPU: every case runs small on the CPU, by wall clock. Times say nothing about the kernels.")
    theirs = [name for name in FLAGS.impl if name in topic.libraries]
    ours = tuple(impls.expand([name for name in FLAGS.impl if name not in theirs]))
    trees = _trees() if topic is HEADS else {}
    options = impls.Options(ours, FLAGS.rounds, FLAGS.seed, trees, devices=FLAGS.devices, capability=FLAGS.capability)
    process = Peers(theirs, FLAGS.rounds, FLAGS.peers_path) if theirs else None
    limits = {"budget_s": FLAGS.budget_s, "processes": FLAGS.processes}
    records = measure(chosen, options, process=process, path=FLAGS.json, commit=FLAGS.commit, **limits)
    if process is not None:
        process.close()
    tags = frozenset[str]().union(*(case.tags for case in chosen))
    summaries = {
        "chains": report.chains,
        "first": report.first,
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
