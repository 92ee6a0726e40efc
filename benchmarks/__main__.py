"""`python -m benchmarks`: each selected case is a test that first checks the result, then reports its time.

Examples:
  python -m benchmarks --list --tag=core
  python -m benchmarks --tag=core --json=benchmarks/results/h200/core.json
  python -m benchmarks --op=softmax --pass=bwd --dtype=f16 --impl=ours,xla
  python -m benchmarks --tag=ladder --impl=ladder,xla --json=benchmarks/results/h200/ladder.json
  python -m benchmarks --tag=cross_entropy --impl=ours,xla,xla_f32 --json=losses.json
  python -m benchmarks --impl=torch,torch_compile,quack,liger --peers_path=/tmp/cute --json=peers.json
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

from benchmarks import cases, peers, plot, report, runner, timing, variants
from benchmarks import results as measured

_OP = flags.DEFINE_list("op", [], "Operations: softmax, log_softmax, logsumexp, cross_entropy, top_k.")
_CASE = flags.DEFINE_list("case", [], "Regular expressions searched in case names.")
_DTYPE = flags.DEFINE_list("dtype", [], "float16 or f16, bfloat16 or bf16, float32 or f32.")
_PASS = flags.DEFINE_list("pass", [], f"Passes: {', '.join(cases.PASSES)}.")
_TAG = flags.DEFINE_list("tag", [], "Tags; default 'standard' on a GPU and 'smoke' elsewhere, when no filter is given.")
_IMPL = flags.DEFINE_list(
    "impl",
    ["ours", "xla", *measured.ROW_LIBRARIES],
    f"ours, xla, xla_f32 (losses), ladder (every rung), rung:NAME, and {', '.join(measured.ROW_LIBRARIES)}.",
)
_KERNEL = flags.DEFINE_string("kernel", None, "The rung that 'ours' must use.")
_CONFIG = flags.DEFINE_string("config", None, "JSON object of config fields to replace, with --kernel.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the inputs.")
_COPY = flags.DEFINE_enum("copy", "best", ["best", "mosaic", "torch"], "Which copy is the ceiling.")
_JSON = flags.DEFINE_string("json", None, "Where to write results.")
_PLOT = flags.DEFINE_string("plot", None, "Folder for plots.")
_LIST = flags.DEFINE_bool("list", False, "List the selected cases and stop.")
_COMMIT = flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")
_PEERS_PATH = flags.DEFINE_string("peers_path", "", "PYTHONPATH of torch's side, where peers are installed.")

flags.register_validator(
    "impl",
    lambda names: all(name in variants.NAMES + measured.ROW_LIBRARIES or name.startswith("rung:") for name in names),
    message=f"--impl takes {', '.join(variants.NAMES + measured.ROW_LIBRARIES)} and rung:NAME",
)


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
        self.header = measured.header(commit=_COMMIT.value, seed=_SEED.value, rounds=_ROUNDS.value)
        self.started = time.perf_counter()
        ours = [name for name in _IMPL.value if name not in measured.ROW_LIBRARIES]
        self.peer_names = [name for name in _IMPL.value if name in measured.ROW_LIBRARIES]
        config = json.loads(_CONFIG.value) if _CONFIG.value else None
        self.options = runner.Options(
            tuple(variants.expand(ours)), _ROUNDS.value, _SEED.value, _COPY.value, _KERNEL.value, config
        )
        self.peers = peers.Peers(self.peer_names, _ROUNDS.value, _PEERS_PATH.value)

    def measure(self, case: cases.Case) -> dict:
        """Runs one case in both processes, prints it, and saves everything measured so far."""
        if self.options.impls:
            record = runner.run(case, self.options)
        else:
            sizes = {"least_bytes": cases.least_bytes(case), "operand_bytes": cases.operand_bytes(case)}
            record = {"case": runner.describe(case), "clock": "cuda events", "copy": None, "impls": {}, **sizes}
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
    return runner.describe(case) | traffic | {"buffers": buffers}


def main() -> None:
    app.define_help_flags()  # absltest's own come after the flags are read
    flags.FLAGS(sys.argv)
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
