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
  python -m benchmarks --op=attention --draws=200 --seed=1 --impl=ours,cudnn,tokamax --processes=8 --json=FILE
  python -m benchmarks --op=attention --tree=before=../before --impl=before,now,now:together=8:tiles=drawn \
      --case=bwd_causal_d64_s8192_b2_h32 --processes=12
  python -m benchmarks --op=attention --tag=invariance
  JAX_PLATFORMS=cpu python -m benchmarks --op=attention --tag=cpu
  python -m benchmarks --op=attention --tag=grid --impl=fa4 --peers_path=/tmp/cute --json=attention_fa4.json
"""

import json
import os
import pathlib
import sys
import time
import unittest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's copy probe shares the device's memory

import jax
from absl import app, flags
from absl.testing import absltest, parameterized

from benchmarks import attention, attention_cases, calls, cases, impls, peers, plot, report, runner, timing, trees
from benchmarks import results as measured

ATTENTION = "attention"
OPS = tuple(dict.fromkeys(case.op for case in cases.all_cases()))
TAGS = tuple(sorted({tag for case in cases.all_cases() for tag in case.tags} | {"invariance"}))
ROW_IMPLS = (*impls.ROWS, *measured.ROW_LIBRARIES)
ATTENTION_IMPLS = (*impls.ATTENTION, *measured.ATTENTION_LIBRARIES)

FLAGS = flags.FLAGS
_OP = flags.DEFINE_list("op", [], f"Operations: {', '.join(OPS)}; or {ATTENTION}, which is measured alone.")
_CASE = flags.DEFINE_list("case", [], "Regular expressions searched in case names; or names of calls of attention.")
_DTYPE = flags.DEFINE_list("dtype", [], "Of rows: float16 or f16, bfloat16 or bf16, float32 or f32.")
_PASS = flags.DEFINE_list("pass", [], f"Passes: {', '.join(cases.PASSES)}.")
_TAG = flags.DEFINE_list(
    "tag", [], "Tags; default 'core' of attention; of rows, without a filter, 'standard' on a GPU, 'smoke' elsewhere."
)
_IMPL = flags.DEFINE_list(
    "impl", [], f"Of rows: {', '.join(ROW_IMPLS)}, rung:NAME. Of attention: {', '.join(ATTENTION_IMPLS)}."
)
_KERNEL = flags.DEFINE_string("kernel", None, "The rung that 'ours' must use on rows.")
_CONFIG = flags.DEFINE_string("config", None, "JSON object of config fields to replace, with --kernel.")
_ROUNDS = flags.DEFINE_integer("rounds", None, "Interleaved rounds; default 5 of rows, 3 of attention.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs and of --draws.")
_COPY = flags.DEFINE_enum("copy", "best", ["best", "mosaic", "torch"], "Which copy is the ceiling of rows.")
_JSON = flags.DEFINE_string("json", None, "Where to write results, after each case.")
_PLOT = flags.DEFINE_string("plot", None, "Folder for plots of rows.")
_LIST = flags.DEFINE_bool("list", False, "List the selected cases and stop.")
_COMMIT = flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")
_PEERS_PATH = flags.DEFINE_string("peers_path", "", "PYTHONPATH of torch's side, where peers are installed.")
flags.DEFINE_multi_string(
    "tree", [], "NAME=FOLDER: a source tree whose kernels are an --impl of attention, beside now."
)
_KIND = flags.DEFINE_list("kind", [], f"Kinds of attention: {', '.join(attention_cases.KINDS)}.")
flags.DEFINE_integer("draws", 0, "Measure so many random calls of attention, which --seed decides.", lower_bound=0)
flags.DEFINE_float("budget_s", None, "Start no case of attention after so many seconds.")
flags.DEFINE_integer("processes", 1, "Processes that compile attention beside each other.", lower_bound=1)


def check_flags() -> None:
    """Completes the flags by what a topic has as default, and ends the process at a name that there is not."""
    attends = ATTENTION in _OP.value
    if attends and len(_OP.value) > 1:
        rest = ",".join(op for op in _OP.value if op != ATTENTION)
        sys.exit(f"--op: got {ATTENTION} beside {rest}, wanted it alone; run the binary once for each.")
    if unclear := [tree for tree in FLAGS.tree if "=" not in tree]:
        sys.exit(f"--tree: got {','.join(unclear)}, wanted NAME=FOLDER, as before=../before.")
    folders = attention.folders()
    allowed = (*ATTENTION_IMPLS, *folders) if attends else ROW_IMPLS
    given = [
        name for name in _IMPL.value if not (trees.is_tree(name, folders) if attends else name.startswith("rung:"))
    ]
    known = {"op": (*OPS, ATTENTION), "impl": allowed, "tag": attention_cases.TAGS if attends else TAGS}
    known |= {"pass": attention_cases.PASSES if attends else cases.PASSES, "kind": attention_cases.KINDS}
    known["dtype"] = (*cases.SHORT_DTYPES, *cases.SHORT_DTYPES.values())
    for flag, names in known.items():
        wrong = [name for name in (given if flag == "impl" else FLAGS[flag].value or ()) if name not in names]
        if wrong:
            sys.exit(
                f"--{flag}: got {','.join(wrong)}, wanted some of {', '.join(names)}; correct or leave out --{flag}."
            )
    for flag in (
        ("kind", "draws", "budget_s", "processes", "tree") if not attends else ("dtype", "kernel", "config", "plot")
    ):
        if FLAGS[flag].present:
            topic = "rows" if attends else ATTENTION
            sys.exit(f"--{flag}: got {FLAGS[flag].value}, wanted it for {topic} alone; leave it out or change --op.")
    if not _IMPL.value:
        FLAGS.impl = ["ours", "cudnn", "mgpu", "tokamax"] if attends else ["ours", "xla", *measured.ROW_LIBRARIES]
        if "invariance" in _TAG.value:
            FLAGS.impl = ["ours", impls.INVARIANT]
        elif "cpu" in _TAG.value:
            FLAGS.impl = ["ours", "xla"]
    FLAGS.rounds = _ROUNDS.value or (3 if attends else 5)


def selected() -> tuple[cases.Case, ...]:
    """The cases that the flags name."""
    filters = {"ops": _OP.value, "passes": _PASS.value, "dtypes": _DTYPE.value, "patterns": _CASE.value}
    tags = _TAG.value
    if not tags and not any(filters.values()):
        tags = ["standard" if jax.default_backend() == "gpu" else "smoke"]
    return cases.select(tags=tags, **filters)


class Session:
    """What one run of the binary has measured, and where it writes it."""

    def __init__(self, chosen: tuple[cases.Case, ...]):
        self.chosen = chosen
        self.records: list[dict] = []
        self.header = measured.header(commit=_COMMIT.value, seed=_SEED.value, rounds=FLAGS.rounds)
        if any("invariance" in case.tags for case in chosen):
            self.header["topic"] = "invariance"
        self.started = time.perf_counter()
        ours = [name for name in _IMPL.value if name not in measured.ROW_LIBRARIES]
        self.peer_names = [name for name in _IMPL.value if name in measured.ROW_LIBRARIES]
        config = json.loads(_CONFIG.value) if _CONFIG.value else None
        self.options = calls.Options(
            tuple(impls.expand(ours)), FLAGS.rounds, _SEED.value, _COPY.value, _KERNEL.value, config
        )
        self.peers = peers.Peers(self.peer_names, FLAGS.rounds, _PEERS_PATH.value)

    def measure(self, case: cases.Case) -> dict:
        """Runs one case in both processes, prints it, and saves everything measured so far."""
        if self.options.impls:
            record = runner.run(case, self.options)
        else:
            sizes = {"least_bytes": cases.least_bytes(case), "operand_bytes": cases.operand_bytes(case)}
            record = {"case": case.describe(), "clock": "cuda events", "copy": None, "impls": {}, **sizes}
        if self.peer_names:
            answer = self.peers.measure(_for_peers(case))
            record["peers_copy"] = answer["copy"]
            record["impls"] |= answer["impls"]
        self.records.append(record)
        elapsed = time.perf_counter() - self.started
        print(f"[{len(self.records)}/{len(self.chosen)} {elapsed:.0f}s] {report.line(record)}", flush=True)
        if _JSON.value:
            self.header["clocks_after"] = measured.clocks()
            measured.write(pathlib.Path(_JSON.value), self.header, self.records)
        return record

    def close(self) -> None:
        """Prints the table and draws the plots."""
        self.peers.close()
        print("\n" + report.table(self.records), flush=True)
        if _PLOT.value:
            print("\n".join(map(str, plot.draw(self.records, self.header, pathlib.Path(_PLOT.value)))))


def load_tests(*_) -> unittest.TestSuite:
    """Builds one test per selected case, once flags are parsed."""
    chosen = selected()
    session = Session(chosen)
    if jax.default_backend() != "gpu":
        print("No GPU: every case runs on the CPU with few rows, by wall clock. Times say nothing about the kernels.")

    class CaseTest(parameterized.TestCase):
        @parameterized.named_parameters(*((f"_{case.name}", case) for case in chosen))
        def test(self, case: cases.Case):
            impls = session.measure(case)["impls"]
            ours = {name: entry for name, entry in impls.items() if name not in measured.ROW_LIBRARIES}
            red = {name: entry["reason"] for name, entry in ours.items() if entry["status"] in ("WRONG", "failed")}
            self.assertEmpty(red, f"WRONG or failed: {red}")

        @classmethod
        def tearDownClass(cls):
            session.close()

    CaseTest.__qualname__ = "CaseTest"
    return unittest.TestSuite(CaseTest(f"test_{case.name}") for case in chosen)


def _for_peers(case: cases.Case) -> dict:
    operand = cases.operand_bytes(case)
    buffers = timing.buffers_needed(operand, hot=case.hot)
    traffic = {"least_bytes": cases.least_bytes(case), "copied_bytes": cases.copied_bytes(case)}
    return case.describe() | traffic | {"buffers": buffers}


def main() -> None:
    app.define_help_flags()  # absltest's own come after the flags are read
    FLAGS(sys.argv)
    check_flags()
    if ATTENTION in _OP.value:
        attention.main()
        return
    chosen = selected()
    if not chosen:
        sys.exit("No case matches these flags.")
    if _LIST.value:
        for case in chosen:
            print(f"{case.name:<45} {case.source:<40} {','.join(sorted(case.tags))}")
        return
    absltest.main()


if __name__ == "__main__":
    main()
