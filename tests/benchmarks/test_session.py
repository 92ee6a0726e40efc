"""A run of the binary without a GPU: flags, report, result file, processes, budget, and what makes it red."""

import dataclasses
import fcntl
import json
import math
import pathlib
import subprocess
import sys
import threading
import types

import jax
import pytest

from benchmarks import __main__ as program
from benchmarks import attention_cases, cases, impls, protocol, report, runner, tables
from benchmarks import results as measured
from benchmarks.attention_cases import AttentionCase, Shape
from benchmarks.impls import Options
from benchmarks.runner import Bench

ROOT = pathlib.Path(__file__).parents[2]
TINY = Shape(2, 4, 2, 16, 8, 8, "full")
BROKEN = dataclasses.replace(TINY, key_heads=0)
SOFTMAX = "softmax_fwd_f32_32768x1024"


def _case(shape=TINY, pass_="fwd"):
    return AttentionCase(shape, pass_, frozenset({"core"}))


def _measure(chosen, *impls, rounds=1, **limits):
    return program.measure(chosen, Options(impls, rounds=rounds), commit="abc", **limits)


def test_a_run_reports_every_implementation_asked_for(binary, tmp_path):
    names = r"fwd_f32_32768x1024|call"
    file = tmp_path / "run.json"
    out = binary(f"--case={names}", "--tag=smoke", "--impl=ours,xla,quack", "--rounds=1", f"--json={file}")
    assert "on the CPU" in out
    found = measured.read(file)
    assert {"device", "versions", "commit", "seed", "timestamp", "inputs", "clocks_after"} <= set(found["header"])
    assert found["header"]["versions"]["jax"] == jax.__version__
    assert found["header"]["topic"] is None
    forward, call = found["records"]
    assert [record["case"]["name"] for record in (forward, call)] == [SOFTMAX, "softmax_call_f32_8x128"]
    for record in found["records"]:
        assert set(record["impls"]) == {"ours", "xla", "quack"}
        assert record["impls"]["ours"]["us"] > 0
        assert record["impls"]["quack"]["status"] == "not installed"
        assert record["clock"] == "wall"
        assert record["case"]["name"] in out
    assert forward["rows_measured"] < forward["case"]["rows"]
    assert forward["copy"]["method"] == "copy:xla"
    assert forward["impls"]["ours"]["temp_bytes"] >= 0
    assert call["copy"] is None
    assert 0 < call["impls"]["ours"]["us_per_iteration"] < call["impls"]["ours"]["us"] * 10


def test_the_module_is_the_binary_and_names_the_extra_without_absl():
    hidden = "import runpy, sys; sys.modules['absl'] = None; runpy.run_module('benchmarks', run_name='__main__')"
    for command, words in (
        (["-m", "benchmarks", "--help"], "python -m benchmarks --list --tag=core"),
        (["-c", hidden], "absl is not installed, and it reads the flags. Run pip install 'jaxsoftmax[bench]'"),
    ):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert words in done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--impl=quak --list", "--impl: got quak, wanted some of ours, "),
        ("--tag=stndard", "tag: got stndard, wanted some of"),
        ("--dtype=f8", "dtype: got f8, wanted some of"),
        ("--op=attention,softmax", "--op: got attention beside softmax, wanted it alone"),
        ("--op=softmax --kind=causal", "--kind: got ['causal'], wanted it for attention alone"),
        ("--tag=core --case=nothing", "No case matches"),
        ("--op=attention --impl=our", "--impl: got our, wanted some of ours, batch_invariant, cudnn"),
        ("--op=attention --dtype=f16", "--dtype: got"),
        ("--tag=first,sample", "--tag: got first,sample, wanted first alone"),
        ("--op=attention --tree=../before", "--tree: got ../before, wanted NAME=FOLDER"),
        ("--op=attention --tree=before=../before --impl=now:a=1,older", "--impl: got older"),
    ],
)
def test_what_is_not_understood_or_selects_nothing_is_refused(binary, flags, words):
    assert words in binary(*flags.split(), expect=1)


def test_listing_measures_nothing(binary):
    for flags, topic in (((), tables.ROWS), (("--op=attention",), attention_cases.TABLE)):
        out = binary(*flags, "--list", "--tag=core")
        assert len(out.strip().splitlines()) == len(topic.select(tags=["core"]))


def test_tags_that_are_measured_apart_have_implementations_and_a_topic_of_their_own(binary, tmp_path):
    file = tmp_path / "run.json"
    binary("--tag=invariance", "--case=axis0", "--rounds=1", f"--json={file}")
    found = measured.read(file)
    assert found["header"]["topic"] == "invariance"
    (record,) = found["records"]
    assert all(record["impls"][name]["us"] > 0 for name in ("ours", impls.INVARIANT))
    out = binary("--tag=sample", "--count=2", "--seed=212", "--rounds=1", f"--json={file}")
    assert "2 of 2 calls, against the better of cuDNN and XLA: geometric mean" in out
    found = measured.read(file)
    assert (found["header"]["topic"], len(found["records"])) == ("sample", 2)
    assert {record["case"]["op"] for record in found["records"]} == {"flash_attention", "logsumexp"}
    assert all(set(record["impls"]) == {"ours", "cudnn", "xla"} for record in found["records"])
    out = binary("--op=attention", "--tag=sample", "--count=1", "--seed=4", "--rounds=1", f"--json={file}")
    (case,) = attention_cases.sample(1, seed=4)
    assert case.name in out
    assert "against the better of cuDNN and XLA: geometric mean" in out
    found = measured.read(file)
    assert found["header"]["topic"] == "attention sample"
    assert set(found["records"][0]["impls"]) == {"ours", "cudnn", "xla"}


def test_chains_are_measured_beside_stock_and_end_in_a_line_for_each(binary, tmp_path):
    file = tmp_path / "run.json"
    out = binary("--tag=chains", "--case=entropy_fwd.*8192,top_k.*256x128", "--rounds=1", f"--json={file}")
    found = measured.read(file)
    assert found["header"]["topic"] == "chains"
    records = {record["case"]["name"]: record["impls"] for record in found["records"]}
    assert set(records) == {"entropy_fwd_bf16_8192x50257", "top_k_softmax_fwd_bf16_256x128_k8"}
    *_, head, first, second, summary = out.splitlines()
    assert head.split() == ["x", "XLA", "ours,", "us", "XLA,", "us", "call"]
    for line in (first, second):
        ratio, *us, name = line.split()
        times = [records[name][library]["us"] for library in ("ours", "xla")]
        assert [*map(float, us)] == pytest.approx(times, abs=0.06)
        assert float(ratio) == pytest.approx(times[1] / times[0], abs=1e-3)
    assert first.split()[0] <= second.split()[0]
    assert summary.startswith("2 of 2 calls, against the better of cuDNN and XLA: geometric mean")


def test_what_a_first_call_costs_is_measured_with_cleared_caches_and_of_a_shape_that_was_not_traced(
    binary, monkeypatch, tmp_path
):
    seen = []
    make = runner._jitted
    monkeypatch.setattr(jax, "clear_caches", lambda: seen.append("cleared"))  # other tests need what is compiled
    monkeypatch.setattr(runner, "_jitted", lambda case, *rest: (seen.append(case.shape), make(case, *rest))[1])
    file = tmp_path / "run.json"
    out = binary("--tag=first", "--case=log_softmax", f"--json={file}")
    each = [(64, 64), (128, 64), "cleared"]
    assert seen == [*each, *each[:2], *each]  # cuDNN declines when it is traced
    found = measured.read(file)
    assert (found["header"]["topic"], found["header"]["left_out"]) == ("first", [])
    impls = found["records"][0]["impls"]
    assert {name: entry["status"] for name, entry in impls.items()} == {"ours": "ok", "cudnn": "declined", "xla": "ok"}
    assert all(impls[name][part] > 0 for name in ("ours", "xla") for part in runner.FIRST_PARTS)
    ours = impls["ours"]
    python = f"{ours['trace_s'] + ours['lower_s']:.3f} + {ours['compile_s']:.3f}"
    assert out.splitlines()[-1].split("  ")[0].strip() == python


def test_no_first_call_starts_after_the_deadline():
    assert not [*runner.one_by_one(tables.TABLE.select(tags=["first"]), Options(("cudnn",), rounds=1), 0.0)]


def test_the_report_of_a_sample_has_the_mean_the_share_and_the_worst():
    times = {"slow": (2.0, 1.0, 8.0), "fast": (1.0, 4.0, 2.0), "alone": (1.0,), "nearly": (1.0, 9.0, 0.96)}
    each = lambda us: {name: {"us": us} for name, us in zip(("ours", "cudnn", "xla"), us, strict=False)}
    records = [{"case": {"name": name}, "impls": each(us)} for name, us in times.items()]
    head, *worst = report.sample(records).splitlines()
    wanted = (
        "3 of 4 calls, against the better of cuDNN and XLA: geometric mean 0.986, 1 below 0.95 (33.3 %), 1 below 0.85"
    )
    assert head.startswith(f"{wanted};")
    assert worst == ["  0.500  slow", "  0.960  nearly", "  2.000  fast"]
    assert "none of 1 calls" in report.sample(records[2:3])


def test_a_case_for_the_cpu_is_measured_as_it_is():
    chosen = attention_cases.TABLE.select(tags=["cpu"], patterns=["fwd_full_d32_s256_b8_h4_f32"])
    (record,) = _measure(chosen, "ours", "xla")
    assert "measured" not in record
    assert all(record["impls"][name]["us"] > 0 for name in ("ours", "xla"))


def test_a_budget_that_is_spent_leaves_cases_out_and_says_which(rows, tmp_path, capsys):
    path = tmp_path / "attention.json"
    chosen = [_case(), rows(SOFTMAX)]
    assert _measure(chosen, "ours", path=path, budget_s=0) == []
    assert measured.read(path)["header"]["left_out"] == [case.name for case in chosen]
    assert chosen[0].name in capsys.readouterr().out


def test_a_case_that_fails_does_not_end_the_run_and_makes_it_red(rows, monkeypatch):
    def fail(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(Bench, "run", fail)
    (record,) = _measure([rows(SOFTMAX)], "ours")
    assert "out of memory" in report.line(record)
    assert program.red("ours", [record], {}) == [SOFTMAX]


@pytest.mark.parametrize(
    "name, status, is_red",
    [
        ("ours", "WRONG", True),
        ("kernel:warp", "failed", True),
        ("kernel:warp", "declined", False),
        ("now:a=1", "declined", True),
        ("cudnn", "failed", False),
        ("quack", "WRONG", False),
    ],
)
def test_what_makes_a_run_red(name, status, is_red):
    records = [{"case": {"name": "case"}, "impls": {name: {"status": status}}}]
    assert program.red(name, records, {"now": "."}) == ["case"] * is_red


def test_peers_stand_beside_ours_or_alone():
    peer = {"status": "ok", "us": 1.0, "min_us": 1.0, "max_us": 1.0, "tflop_per_s": 9.0, "error": 0.0}
    answer = lambda told: {"impls": {"fa4": dict(peer)}, "matmul": {"tflop_per_s": 700.0}}
    process = types.SimpleNamespace(measure=answer)
    (record,) = _measure([_case()], "ours", process=process)
    assert record["best_peer"] == "fa4"
    assert record["ratio"] == pytest.approx(1 / record["impls"]["ours"]["us"], abs=1e-4)
    assert "1.000x" in report.line(record).splitlines()[1]  # of the first implementation's time
    (alone,) = _measure([_case()], process=process)
    assert (list(alone["impls"]), alone["peers_matmul"], alone["ratio"]) == (["fa4"], {"tflop_per_s": 700.0}, None)
    assert "peers_matmul 700 TFLOP/s" in report.line(alone)


@pytest.mark.parametrize("processes", [1, 8, 100])
def test_a_share_has_all_passes_of_a_call_and_the_lengths_that_are_compared(processes):
    chosen = attention_cases.TABLE.select(tags=["standard", "odd"], pass_=["fwd", "bwd"])
    even = lambda shape: dataclasses.replace(shape, length=shape.length + shape.length % 2)
    shares = runner.deal(chosen, processes)
    assert sorted(case.name for share in shares for case in share) == sorted(case.name for case in chosen)
    shapes = [{even(case.shape) for case in share} for share in shares]
    assert len(set.union(*shapes)) == sum(map(len, shapes)) == 32
    assert len(shares) == min(processes, 32)
    assert max(map(len, shapes)) - min(map(len, shapes)) <= 1


def test_processes_measure_every_pass_and_the_end_of_one_does_not_end_the_run(tmp_path):
    # The second process has the broken one alone.
    chosen = [_case(), _case(BROKEN), _case(TINY, "bwd"), _case(TINY, "value_and_vjp")]
    path = tmp_path / "attention.json"
    names = ("ours", "cudnn", "mgpu", "tokamax")
    found = {record["case"]["name"]: record for record in _measure(chosen, *names, path=path, processes=2)}
    assert found.keys() == {case.name for case in chosen}
    assert found.pop(chosen[1].name)["error"] == "its process ended with status 1"
    for record in found.values():
        ours, cudnn, mgpu, tokamax = (record["impls"][name] for name in names)
        assert ours["status"] in ("ok", "unresolved")
        assert cudnn["status"] == "failed"
        assert cudnn["reason"]
        assert (mgpu["status"], tokamax["status"]) == ("declined", "not installed")
        assert record["matmul"]["tflop_per_s"] >= 0
        assert record["ratio"] is None
        assert "measured" in record
    assert set(found[chosen[2].name]["impls"]["ours"]["programs"]) == {"fwd", "value_and_vjp", "direct"}
    written = measured.read(path)
    assert {r["case"]["name"] for r in written["records"]} == {case.name for case in chosen}
    header = written["header"]
    assert (header["left_out"], header["commit"], header["topic"]) == ([], "abc", "attention")
    json.dumps(written, allow_nan=False)


@pytest.mark.parametrize("deadline, broken", [(1e99, False), (1e99, True), (0.0, False)])
def test_a_process_measures_when_all_have_compiled_and_it_has_the_device(monkeypatch, tmp_path, deadline, broken):
    done, sent = [], []
    device = tmp_path / "device"
    device.touch()

    def run(case):
        with device.open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done.append(case)
        return {"case": case}

    def wait():
        done.append("all compiled")
        if broken:
            raise threading.BrokenBarrierError

    bench = types.SimpleNamespace(prepare=lambda case: done.append("compiled"), run=run)
    monkeypatch.setattr(runner, "bench_of", lambda options, chosen: bench)
    pipe, barrier = types.SimpleNamespace(send=sent.append), types.SimpleNamespace(wait=wait)
    runner._measure(pipe, ["a", "b"], Options(), barrier, str(device), deadline)
    wanted = ["a", "b"] if deadline else []
    assert done == ["compiled", "compiled", "all compiled", *wanted]
    assert sent == [{"case": case} for case in wanted]


def test_a_library_is_found_where_it_was_loaded_from():
    assert pathlib.Path(measured.loaded("libc.so")).is_file()
    assert measured.loaded("libnvJitLink") is None


@pytest.fixture
def gpu(monkeypatch):
    """The device's parts are replaced: torch's copy and Mosaic's; `gpu(kernels)` is what the profiler sees."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(runner, "torch_copy_us", lambda size, buffers, rounds: 400.0)
    monkeypatch.setattr(runner, "mosaic_copy", jax.jit(jax.numpy.copy))
    return lambda kernels: monkeypatch.setattr(protocol, "_device_kernels", kernels)


def test_a_run_on_a_gpu_takes_device_time_beside_both_copies(rows, monkeypatch, gpu):
    profiled = []

    def kernels(schedule):
        schedule()
        names = [variant.name for _, variant in schedule.slots()]
        profiled.append(names)
        return [(name, 0.5 if name == "copy:mosaic" else 1.0) for name in names]

    gpu(kernels)
    monkeypatch.setattr(cases, "ROTATED_BYTES", 3 * 2**19)
    chosen = [rows("logsumexp_fwd_bf16_32768x4096").shrunk()[0]]
    (record,) = runner.one_by_one(chosen, Options(rounds=2), math.inf)
    assert (record["clock"], record["buffers"]) == ("cupti", 3)
    assert set(profiled[-1]) == {"ours:fwd", "xla:fwd", "copy:mosaic"}
    assert record["copy"]["method"] == "copy:torch"
    assert set(record["copy"]["all_tb_per_s"]) == {"copy:mosaic", "copy:torch"}
    assert record["impls"]["ours"]["us"] == 1000.0
    assert record["impls"]["ours"]["fraction_of_copy"] == pytest.approx(0.4, rel=0.02)
