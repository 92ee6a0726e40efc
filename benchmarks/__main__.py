r"""`python -m benchmarks`: each selected case is checked first, and reported with its time if the result is right.

Examples:
  python -m benchmarks --list --tag=core
  python -m benchmarks --tag=core --json=benchmarks/results/h200/core.json
  python -m benchmarks --op=softmax --pass=bwd --dtype=f16 --impl=ours,xla
  python -m benchmarks --tag=ladder --impl=ladder,xla --json=benchmarks/results/h200/ladder.json
  python -m benchmarks --tag=cross_entropy --impl=ours,xla,xla_f32 --json=losses.json
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
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's side shares the device's memory

import jax
from absl import app, flags

from benchmarks import attention_cases, cases, impls, report, runner
from benchmarks import results as measured

ATTENTION = "attention"
_ROOT = pathlib.Path(__file__).parents[1]
_HERE = {"now": "."}  # the tree that this one is
OPS = tuple(dict.fromkeys(case.op for case in cases.TABLE.cases))


class Topic(NamedTuple):
    """What can be asked of rows or of attention."""

    name: str
    table: cases.Table
    passes: tuple[str, ...]
    impls: tuple[str, ...]
    libraries: tuple[str, ...]  # of `impls`, those of torch's process
    default: tuple[str, ...]
    rounds: int
    flags: tuple[str, ...]  # those that the other has not


ROWS = Topic(
    "rows",
    cases.TABLE,
    cases.PASSES,
    (*impls.ROWS, *measured.ROW_LIBRARIES),
    measured.ROW_LIBRARIES,
    ("ours", "xla", *measured.ROW_LIBRARIES),
    5,
    ("dtype", "kernel", "config"),
)
HEADS = Topic(
    ATTENTION,
    attention_cases.TABLE,
    attention_cases.PASSES,
    (*impls.ATTENTION, *measured.ATTENTION_LIBRARIES),
    measured.ATTENTION_LIBRARIES,
    ("ours", "cudnn", "mgpu", "tokamax"),
    3,
    ("kind", "count", "tree"),
)
# Implementations that tags ask for by themselves.
_OF_TAG = {"invariance": ("ours", impls.INVARIANT), "cpu": ("ours", "xla")}
_OF_TAG |= dict.fromkeys(("sample", "short"), ("ours", "cudnn", "xla"))

FLAGS = flags.FLAGS
flags.DEFINE_list("op", [], f"Operations: {', '.join(OPS)}; or {ATTENTION}, which is measured alone.")
flags.DEFINE_list("case", [], "Regular expressions searched in case names; or names of calls of attention.")
flags.DEFINE_list("dtype", [], "Of rows: float16 or f16, bfloat16 or bf16, float32 or f32.")
flags.DEFINE_list("pass", [], f"Passes: {', '.join(cases.PASSES)}.")
flags.DEFINE_list(
    "tag", [], "Tags; default 'core' of attention; of rows, without a filter, 'standard' on a GPU, 'smoke' elsewhere."
)
flags.DEFINE_list("impl", [], f"Of rows: {', '.join(ROWS.impls)}, kernel:NAME. Of attention: {', '.join(HEADS.impls)}.")
flags.DEFINE_string("kernel", None, "The kernel that 'ours' must use on rows.")
flags.DEFINE_string("config", None, "JSON object of config fields to replace, with --kernel.")
flags.DEFINE_integer("rounds", None, "Interleaved rounds; default 5 of rows, 3 of attention.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of the inputs and of --tag=sample.")
flags.DEFINE_string("json", None, "Where to write results, after each case.")
flags.DEFINE_bool("list", False, "List the selected cases and stop.")
flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")
flags.DEFINE_string("peers_path", "", "PYTHONPATH of torch's side, where peers are installed.")
flags.DEFINE_multi_string(
    "tree", [], "NAME=FOLDER: a source tree whose kernels are an --impl of attention, beside now."
)
flags.DEFINE_list("kind", [], f"Kinds of attention: {', '.join(attention_cases.KINDS)}.")
flags.DEFINE_integer("count", 60, "How many random calls --tag=sample has.", lower_bound=1)
flags.DEFINE_float("budget_s", None, "Start no case after so many seconds.")
flags.DEFINE_integer("processes", 1, "Processes that compile beside each other.", lower_bound=1)


def check_flags() -> Topic:
    """Completes the flags by what a topic has as default, and ends the process at a name that there is not."""
    topic, other = (HEADS, ROWS) if ATTENTION in FLAGS.op else (ROWS, HEADS)
    if topic is HEADS and len(FLAGS.op) > 1:
        rest = ",".join(op for op in FLAGS.op if op != ATTENTION)
        sys.exit(f"--op: got {ATTENTION} beside {rest}, wanted it alone; run the binary once for each.")
    if unclear := [tree for tree in FLAGS.tree if "=" not in tree]:
        sys.exit(f"--tree: got {','.join(unclear)}, wanted NAME=FOLDER, as before=../before.")
    trees = _trees() if topic is HEADS else {}
    known = {"op": (*OPS, ATTENTION), "impl": (*topic.impls, *trees), "tag": topic.table.tags, "pass": topic.passes}
    known |= {"kind": attention_cases.KINDS, "dtype": (*cases.SHORT_DTYPES, *cases.LONG_DTYPES)}
    is_other = lambda name: impls.is_tree(name, trees) or (topic is ROWS and name.startswith(measured.KERNEL))
    for flag, names in known.items():
        wrong = [
            name for name in FLAGS[flag].value or () if name not in names and not (flag == "impl" and is_other(name))
        ]
        if wrong:
            sys.exit(
                f"--{flag}: got {','.join(wrong)}, wanted some of {', '.join(names)}; correct or leave out --{flag}."
            )
    for flag in other.flags:
        if FLAGS[flag].present:
            sys.exit(
                f"--{flag}: got {FLAGS[flag].value}, wanted it for {other.name} alone; leave it out or change --op."
            )
    of_tags = (_OF_TAG[tag] for tag in _OF_TAG if tag in FLAGS.tag)
    FLAGS.impl = FLAGS.impl or list(next(of_tags, topic.default))
    FLAGS.rounds = FLAGS.rounds or topic.rounds
    return topic


def _trees() -> dict[str, str]:
    """The trees that `--tree` names, and this one."""
    return _HERE | dict(tree.split("=", 1) for tree in FLAGS.tree)


def selected(topic: Topic) -> Sequence[runner.Case]:
    """The cases that the flags name."""
    filters: dict[str, Any] = {"op": FLAGS.op, "pass_": FLAGS["pass"].value, "patterns": FLAGS.case}
    filters["kind" if topic is HEADS else "dtype"] = (
        FLAGS.kind if topic is HEADS else [cases.LONG_DTYPES.get(name, name) for name in FLAGS.dtype]
    )
    tags = FLAGS.tag or ["core"] * (topic is HEADS)
    if not tags and not any(filters.values()):
        tags = ["standard" if jax.default_backend() == "gpu" else "smoke"]
    return topic.table.select(tags=tags, count=FLAGS.count, seed=FLAGS.seed, **filters)


class Peers:
    """The process that measures `names`; `path` goes before PYTHONPATH there, where peers are installed."""

    def __init__(self, names: Sequence[str], rounds: int, path: str, module: str = "benchmarks.torch_peers"):
        self._names = tuple(names)
        self._command = [sys.executable, "-m", module, ",".join(names), str(rounds)]
        self._env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
        self._child: subprocess.Popen | None = None

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a case, as `torch_peers.measure` has it: `told` of a case is what the process is told."""
        if self._child is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._child = subprocess.Popen(self._command, env=self._env, cwd=_ROOT, **pipes)
        assert self._child.stdin
        assert self._child.stdout
        try:
            self._child.stdin.write(json.dumps(case) + "\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        self.close()
        failed = {"status": "failed", "reason": "the peers' process died; its last words are above"}
        return {"name": case["name"], "impls": {name: failed for name in self._names}}

    def close(self) -> None:
        """Ends the process; the next case starts another."""
        if self._child is not None:
            child, self._child = self._child, None
            child.communicate()


class Session:
    """One run of the binary: what it has measured, and where it writes it.

    Without implementations of JAX's process there are only `peers`. With several `processes` the peers come after all
    the rest.
    """

    def __init__(
        self,
        chosen: Sequence[runner.Case],
        options: impls.Options,
        *,
        process: Peers | None = None,
        path: str | None = None,
        commit: str | None = None,
        budget_s: float | None = None,
        processes: int = 1,
    ):
        self.chosen, self.options, self.process, self.path = chosen, options, process, path
        self.records: list[dict[str, Any]] = []
        self._by_name = {case.name: case for case in chosen}
        self._started = time.monotonic()
        self._deadline = float("inf") if budget_s is None else self._started + budget_s
        self._processes = processes if options.impls else 1
        self.header = measured.header(commit=commit, seed=options.seed, rounds=options.rounds)
        self.header |= {"topic": _topic(chosen, options), "left_out": list(self._by_name)}
        self.header["versions"] |= _cudnn_version()

    def measure(self) -> list[dict[str, Any]]:
        """Measures the cases, printing and saving each; those that the budget leaves out are named in the header."""
        apart = self._processes > 1
        for record in self._found():
            if self.process is not None and not apart:
                self._add_peers(record)
            self.records.append(record)
            self.header["left_out"].remove(record["case"]["name"])
            self._show(record)
        if self.process is not None and apart:
            for record in self.records:
                if time.monotonic() < self._deadline:
                    self._add_peers(record)
                    self._show(record)
        if self.header["left_out"]:
            print(f"left out after {self._elapsed()}: {', '.join(self.header['left_out'])}", flush=True)
        self._save()
        return self.records

    def _found(self) -> Iterator[dict[str, Any]]:
        if self._processes > 1:
            print(f"compiling {len(self.chosen)} cases in {self._processes} processes", flush=True)
            return runner.in_processes(self.chosen, self.options, self._processes, self._deadline)
        return runner.one_by_one(self.chosen, self.options, self._deadline)

    def _add_peers(self, record: dict[str, Any]) -> None:
        """Measures torch's side, and puts it into the record."""
        assert self.process is not None
        answer = self.process.measure(self._by_name[record["case"]["name"]].told())
        record |= {f"peers_{probe}": answer[probe] for probe in ("copy", "matmul") if probe in answer}
        record["impls"] |= answer["impls"]
        if self._by_name[record["case"]["name"]].op == ATTENTION:
            record |= measured.against_best(record)

    def _show(self, record: dict[str, Any]) -> None:
        print(f"[{len(self.records)}/{len(self.chosen)} {self._elapsed()}] {report.line(record)}", flush=True)
        self._save()

    def _save(self) -> None:
        self.header["clocks_after"] = measured.clocks()
        if self.path is not None:
            measured.write(pathlib.Path(self.path), self.header, self.records)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:.0f} s"


def _topic(chosen: Sequence[runner.Case], options: impls.Options) -> str | None:
    """What keeps results apart in the documents: attention, tags that are measured apart, and trees."""
    tags = {tag for case in chosen for tag in case.tags}
    words = [ATTENTION] * any(case.op == ATTENTION for case in chosen)
    words += [tag for tag in HEADS.table.apart if tag in tags]
    words += ["trees"] * any(impls.is_tree(name, options.trees) for name in options.impls)
    return " ".join(words) or None


def red(name: str, records: Sequence[dict[str, Any]], trees: Mapping[str, str]) -> list[str]:
    """The cases in which an implementation of ours is wrong or failed; a tree is to have a time in every case."""
    is_tree = impls.is_tree(name, trees)
    if not is_tree and name not in ("ours", impls.INVARIANT) and not name.startswith(measured.KERNEL):
        return []
    bad = ("WRONG", "failed", "declined") if is_tree else ("WRONG", "failed")
    return [r["case"]["name"] for r in records if r["impls"].get(name, {}).get("status", "failed") in bad]


def _cudnn_version() -> dict[str, str]:
    """The version of the cuDNN that is loaded; empty without one."""
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
        print("\n".join(f"{case.name:<50} {case.about:<40} {','.join(sorted(case.tags))}" for case in chosen))
        return
    if jax.default_backend() != "gpu" and "cpu" not in FLAGS.tag:
        print("No GPU: every case runs small on the CPU, by wall clock. Times say nothing about the kernels.")
    theirs = [name for name in FLAGS.impl if name in topic.libraries]
    ours = tuple(impls.expand([name for name in FLAGS.impl if name not in theirs]))
    config = json.loads(FLAGS.config) if FLAGS.config else None
    options = impls.Options(ours, FLAGS.rounds, FLAGS.seed, FLAGS.kernel, config, _trees() if topic is HEADS else {})
    process = Peers(theirs, FLAGS.rounds, FLAGS.peers_path) if theirs else None
    limits = {"budget_s": FLAGS.budget_s, "processes": FLAGS.processes}
    records = Session(chosen, options, process=process, path=FLAGS.json, commit=FLAGS.commit, **limits).measure()
    if process is not None:
        process.close()
    if any({"sample", "short"} & case.tags for case in chosen):
        print(report.sample(records), flush=True)
    bad = {name: found for name in ours if (found := red(name, records, options.trees))}
    for name, found in bad.items():
        print(f"{name} is WRONG or failed in {len(found)} of {len(records)}: {', '.join(found)}", flush=True)
    sys.exit(int(bool(bad)))


if __name__ == "__main__":
    main()
