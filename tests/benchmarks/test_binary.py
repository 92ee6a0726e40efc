"""The binary on a machine without a GPU: gate, report, result file, and that a wrong result never gets a time."""

import contextlib
import itertools
import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxsoftmax
from benchmarks import attention_cases, calls, cases, impls, peers, report, runner, timing, truth
from benchmarks import results as measured
from pallas_kernels.softmax import reference

ROOT = Path(__file__).parents[2]


def _case(name):
    (case,) = [case for case in cases.all_cases() if case.name == name]
    return case


def test_a_run_reports_every_implementation_asked_for(binary, tmp_path):
    names = r"fwd_f32_32768x1024|value_and_vjp_bf16_32768x4096|call"
    file = tmp_path / "run.json"
    out = binary(f"--case={names}", "--tag=smoke", "--impl=ours,xla,quack,torch", "--rounds=1", f"--json={file}")
    assert "on the CPU" in out
    found = measured.read(file)
    assert {"device", "versions", "commit", "seed", "timestamp", "inputs"} <= set(found["header"])
    assert [r["case"]["name"] for r in found["records"]] == [
        "softmax_fwd_f32_32768x1024",
        "softmax_call_f32_8x128",
        "softmax_value_and_vjp_bf16_32768x4096",
    ]
    for record in found["records"]:
        assert set(record["impls"]) == {"ours", "xla", "quack", "torch"}
        assert record["impls"]["ours"]["us"] > 0
        assert record["impls"]["quack"]["status"] == "not installed"
        assert record["clock"] == "wall"
        assert record["case"]["name"] in out
    forward = found["records"][0]
    assert forward["rows_measured"] < forward["case"]["rows"]
    assert forward["copy"]["method"] == "copy:xla"
    assert forward["impls"]["ours"]["temp_bytes"] >= 0


@pytest.mark.parametrize("module", ["benchmarks", "benchmarks.training"])
def test_without_absl_the_extra_is_named(module):
    hidden = "import runpy, sys; sys.modules['absl'] = None; runpy.run_module(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hidden, module], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "absl is not installed" in done.stderr.splitlines()[-1]
    assert "pip install 'jaxsoftmax[bench]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--impl=quak --list", "--impl: got quak, wanted some of ours, "),
        ("--tag=stndard", "tag: got stndard, wanted some of"),
        ("--op=atention", "op: got atention, wanted some of"),
        ("--pass=backward", "pass: got backward, wanted some of"),
        ("--dtype=f8", "dtype: got f8, wanted some of"),
        ("--op=attention,softmax", "--op: got attention beside softmax, wanted it alone"),
        ("--op=softmax --draws=3", "--draws: got 3, wanted it for attention alone"),
        ("--tree=a=.", "wanted it for attention alone"),
        ("--tag=core --case=nothing", "No case matches"),
        ("--op=attention --impl=our", "--impl: got our, wanted some of ours, batch_invariant, cudnn"),
        ("--op=attention --pass=backward", "--pass: got backward, wanted some of fwd, bwd"),
        ("--op=attention --tag=core --kind=bias", "No case matches"),
        ("--op=attention --dtype=f16", "--dtype: got"),
        ("--op=attention --draws=5 --kind=full", "--draws: got 5 beside --kind, wanted it without them"),
        ("--op=attention --tree=../before", "--tree: got ../before, wanted NAME=FOLDER"),
        ("--op=attention --tree=before=../before --impl=now:a=1,older", "--impl: got older"),
    ],
)
def test_what_is_not_understood_or_selects_nothing_is_refused(binary, flags, words):
    assert words in binary(*flags.split(), expect=1)


def test_help_lists_the_flags(binary):
    out = binary("--help", expect=1)  # absl's status
    assert "python -m benchmarks --list --tag=core" in out
    assert "--peers_path" in out


def test_listing_measures_nothing(binary):
    for flags, topic in (((), cases), (("--op=attention",), attention_cases)):
        out = binary(*flags, "--list", "--tag=core")
        assert len(out.strip().splitlines()) == len(topic.select(tags=["core"]))


OPS = [
    "softmax_fwd_f16_32768x1024",
    "softmax_bwd_f32_32768x4096",
    "log_softmax_fwd_bf16_32768x4096",
    "log_softmax_bwd_bf16_8192x128256",
    "log_softmax_value_and_vjp_bf16_32768x4096",
    "logsumexp_fwd_bf16_32768x4096",
    "cross_entropy_fwd_f32_8192x128256",
    "cross_entropy_value_and_grad_mean_bf16_8192x32000",
    "cross_entropy_fwd_bf16_8192x128256_smoothed_capped",
    "cross_entropy_value_and_grad_bf16_8192x128256_smoothed_capped",
    "cross_entropy_value_and_grad_bf16_8192x128256_half_ignored",
    "top_k_fwd_bf16_64x32000_k1",
    "top_k_fwd_bf16_64x32000_k64",
]


@pytest.mark.parametrize("name", OPS)
def test_the_gate_accepts_what_is_right(name):
    record = runner.run(_case(name), calls.Options(rounds=1))
    assert record["impls"]["ours"]["status"] == "ok"
    assert record["impls"]["ours"]["max_error_ulp"] <= record["impls"]["ours"]["allowed_error_ulp"]


@pytest.mark.parametrize("pass_", ["fwd", "value_and_grad", "value_and_grad_mean"])
def test_a_loss_in_float32_is_another_formula(pass_):
    record = runner.run(
        _case(f"cross_entropy_{pass_}_bf16_8192x32000"), calls.Options(("ours", "xla", "xla_f32"), rounds=1)
    )
    error = {name: measured.loss_error(record, name) for name in record["impls"]}
    assert error["ours"] < 1
    assert error["xla_f32"] < 2
    assert error["xla"] > (1000 if pass_ == "fwd" else 2)
    assert record["impls"]["xla_f32"]["us"] > 0
    with pytest.raises(impls.Declined, match="only a loss"):
        impls.build(_case("softmax_fwd_f32_32768x1024"), "xla_f32")


FAULTS = {
    "a constant 1/N": lambda x: jax.numpy.full_like(x, 1 / x.shape[1]),
    "columns permuted": lambda x: jax.nn.softmax(x)[:, ::-1],
    "a last column dropped": lambda x: jax.nn.softmax(x).at[:, -1].set(0),
    "one row in the middle unwritten": lambda x: jax.nn.softmax(x).at[x.shape[0] // 2].set(np.nan),
    "a sum off by a ten-thousandth": lambda x: jax.nn.softmax(x) * 1.0001,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_gets_no_time(monkeypatch, fault):
    wrong = impls.Program(FAULTS[fault])
    build = impls.build
    monkeypatch.setattr(impls, "build", lambda case, impl, **kw: wrong if impl == "ours" else build(case, impl, **kw))
    record = runner.run(_case("softmax_fwd_f32_32768x1024"), calls.Options(rounds=1))
    assert record["impls"]["ours"]["status"] == "WRONG"
    assert "us" not in record["impls"]["ours"]
    assert "WRONG" in report.line(record)
    assert "WRONG" in report.table([record])


def _swapped(p, at):
    return p, at.at[-1, 1:3].set(at[-1, 2:0:-1])


LOSS_FAULTS = {
    "cross_entropy_fwd_bf16_8192x32000": {
        "another label": lambda x, y, right: right(x, y.at[-1].add(-1)),
        "a loss in 16 bits": lambda x, y, right: right(x, y).astype(x.dtype).astype(jax.numpy.float32),
        "a row unwritten": lambda x, y, right: right(x, y).at[3].set(0),
    },
    "cross_entropy_value_and_grad_bf16_8192x32000": {
        "the sum for the mean": lambda x, y, right: (right(x, y)[0] * 8, right(x, y)[1]),
        "no label in the gradient": lambda x, y, right: (right(x, y)[0], right(x, y.at[-1].add(-1))[1]),
        "probabilities of nothing": lambda x, y, right: (right(x, y)[0], right(x, y)[1].at[3, 7:].set(0)),
        "a gradient of the sum": lambda x, y, right: (right(x, y)[0], right(x, y)[1] * 8),
    },
    "top_k_fwd_bf16_64x32000_k8": {
        "two swapped": lambda x, right: _swapped(*right(x)),
        "one left out": lambda x, right: tuple(y[:, 1:9] for y in jax.lax.top_k(jax.nn.softmax(x), 9)),
        "probabilities among the selected": lambda x, right: (jax.nn.softmax(jax.lax.top_k(x, 8)[0]), right(x)[1]),
    },
}


@pytest.mark.parametrize("name", LOSS_FAULTS)
def test_a_wrong_loss_is_seen_in_whatever_row(name):
    case = _case(name).shrunk(2**18)
    (operands,) = impls.make_operands(case, 1, seed=0)
    ours, xla = (jax.jit(impls.build(case, impl).function) for impl in ("ours", "xla"))
    right, reference, check = ours(*operands), xla(*operands), truth.every_row(case)
    assert truth.judge(case, operands, right, reference, check).right
    for fault, wrong in LOSS_FAULTS[name].items():
        verdict = truth.judge(case, operands, wrong(*operands, ours), reference, check)
        assert not verdict.right, (fault, verdict.describe())
    for row in range(case.rows):  # by the loose check, without the sampled rows
        assert not check(operands, jax.tree.map(lambda y, row=row: y.at[row].add(1) if y.ndim else y, right)) <= 1


@pytest.mark.parametrize("pass_", ["fwd", "value_and_grad"])
def test_a_rung_has_the_loss_around_it(pass_):
    case = _case(f"cross_entropy_{pass_}_bf16_8192x32000").shrunk(2**17)
    (operands,) = impls.make_operands(case, 1, seed=0)
    kernel = getattr(reference, case.problems[0].op.value)

    def run(x, *rows):
        return kernel(x, *(row[:, None] for row in rows), axes=(1,))

    function, take = impls.rung_of_loss(case, types.SimpleNamespace(run=run))
    outputs = (
        jax.tree.leaves(out)
        for out in (function(*(take(*operands) if take else operands)), impls.ours_of_loss(case)(*operands))
    )
    for got, want in zip(*outputs, strict=True):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=1e-2, atol=1e-5)


def test_labels_are_of_every_kind():
    case = _case("cross_entropy_fwd_bf16_8192x32000")
    y = impls.labels(case, jax.random.key(0))
    assert (y[0], y[-1]) == (0, case.cols - 1)
    assert len(set(y.tolist())) > 7000
    case = _case("cross_entropy_fwd_bf16_8192x128256_half_ignored")
    assert (impls.labels(case, jax.random.key(0)) == -100).sum() == 4096


def test_a_kernel_that_does_not_compile_hides_no_other_result(monkeypatch):
    build = impls.build

    def broken(case, impl, **override):
        if impl == "ours":
            raise ValueError("no such layout\nlong trace")
        return build(case, impl, **override)

    monkeypatch.setattr(impls, "build", broken)
    record = runner.run(_case("softmax_fwd_f32_32768x1024"), calls.Options(rounds=1))
    assert record["impls"]["ours"] == {"status": "failed", "reason": "ValueError: no such layout"}
    assert record["impls"]["xla"]["us"] > 0


def test_every_row_is_looked_at(monkeypatch):
    """Of many rows only some are sampled; the loose check on the device sees the others."""
    case = _case("softmax_fwd_f32_32768x1024").shrunk(2**20)
    monkeypatch.setattr(truth, "_SAMPLED_ELEMENTS", 4 * case.cols)
    ((x,),) = impls.make_operands(case, 1, seed=0)
    xla = jax.nn.softmax(x)
    unsampled = next(iter(set(range(case.rows)) - set(truth._sampled_rows(case).tolist())))
    verdict = truth.judge(case, (x,), xla.at[unsampled, 7].multiply(2.0), xla, truth.every_row(case))
    assert verdict.error <= verdict.allowed
    assert not verdict.right


def test_ours_keeps_only_its_output_for_the_backward_pass():
    case = _case("softmax_value_and_vjp_bf16_32768x4096")
    assert impls.build(case, "ours").facts["residual_bytes"] == cases.operand_bytes(case)
    assert impls.build(case, "xla").facts["residual_bytes"] > cases.operand_bytes(case)


def test_what_batch_invariance_costs_is_measured_beside_ours(binary, tmp_path):
    file = tmp_path / "invariance.json"
    binary("--tag=invariance", "--case=axis0|top_k.*256x", "--rounds=1", f"--json={file}")
    found = measured.read(file)
    assert found["header"]["topic"] == "invariance"
    assert len(found["records"]) == 2
    for record in found["records"]:
        assert all(record["impls"][name]["us"] > 0 for name in ("ours", impls.INVARIANT))


def test_an_invariant_function_is_traced_as_one():
    scaled = lambda x: x * (1.0 + jaxsoftmax._core.batch_invariance.enabled())
    assert (jax.jit(scaled)(1.0), jax.jit(impls.invariant(scaled))(1.0)) == (1.0, 2.0)


def test_rungs_decline_without_a_gpu():
    with pytest.raises(impls.Declined, match="GPU"):
        impls.build(_case(OPS[0]), "rung:naive")


def test_the_peers_process_survives_being_killed():
    process = peers.Peers(["quack"], 1, "")
    case = {"name": "any"}
    assert process.measure(case)["impls"]["quack"]["status"] == "not installed"
    process._child.kill()
    process._child.wait()
    assert process.measure(case)["impls"]["quack"]["status"] == "failed"
    assert process.measure(case)["impls"]["quack"]["status"] == "not installed"
    process.close()


_NOISY = """
import os, sys, types
from benchmarks import peers

def measure(torch, case, names, rounds):
    print("by Python")
    os.write(1, b"below Python")
    return {"impls": {name: {"status": "ok"} for name in names}}

sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
peers.serve(measure, ["quack"], 1)
"""


def test_what_libraries_print_is_no_answer(tmp_path):
    (tmp_path / "noisy.py").write_text(_NOISY)
    process = peers.Peers(["quack"], 1, str(tmp_path), "noisy")
    for name in ("one", "two"):
        assert process.measure({"name": name}) == {"name": name, "impls": {"quack": {"status": "ok"}}}
    process.close()


def test_the_header_says_where_a_run_was_made(tmp_path):

    header = measured.header(commit="abc", seed=3, rounds=5)
    assert (header["commit"], header["seed"]) == ("abc", 3)
    assert header["versions"]["jax"] == jax.__version__
    assert json.dumps(header)


def test_a_run_on_a_gpu_takes_device_time_beside_both_copies(monkeypatch):
    """The path of a GPU run, with the device's parts replaced: profiler, Mosaic's copy, torch's copy."""
    profiled = []

    def kernels(schedule):
        schedule()
        names = [variant.name for _, variant in schedule.slots()]
        profiled.append(names)
        return [(name, 0.5 if name == "copy:mosaic" else 1.0) for name in names]

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "ROTATED_BYTES", 3 * 2**20)
    monkeypatch.setattr(timing, "_device_kernels", kernels)
    monkeypatch.setattr(timing, "torch_copy_us", lambda size, buffers, rounds: 400.0)
    monkeypatch.setattr(timing, "mosaic_copy", jax.jit(jax.numpy.copy))
    case = _case("logsumexp_fwd_bf16_32768x4096").shrunk(2**19)
    record = runner.run(case, calls.Options(rounds=2))
    assert (record["clock"], record["buffers"]) == ("cupti", 3)
    assert set(profiled[-1]) == {"ours:fwd", "xla:fwd", "copy:mosaic"}
    assert record["copy"]["method"] == "copy:torch"
    assert set(record["copy"]["all_tb_per_s"]) == {"copy:mosaic", "copy:torch"}
    assert record["impls"]["ours"]["us"] == 1000.0
    assert record["impls"]["ours"]["fraction_of_copy"] == pytest.approx(0.4, rel=0.02)


def test_what_is_slow_is_launched_less_often(monkeypatch):
    """The path of a GPU run in which XLA takes long, with and without sessions apart."""
    rounds = {name: [] for name in ("ours:fwd", "xla:fwd", "copy:mosaic")}

    def kernels(schedule):
        launched = [variant.name for _, variant in schedule.slots()]
        schedule()
        if together and len(set(launched)) > 1:
            raise RuntimeError("kernels of no one")
        for name in rounds:
            rounds[name].append(launched.count(name))
        return [(name, 30.0 if name == "xla:fwd" else 1.0) for name in launched]

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "_device_kernels", kernels)
    monkeypatch.setattr(timing, "buffers_needed", lambda size, hot: 1)
    monkeypatch.setattr(timing, "torch_copy_us", lambda size, buffers, rounds: 400.0)
    monkeypatch.setattr(timing, "mosaic_copy", jax.jit(jax.numpy.copy))
    slow = itertools.cycle((False, True))  # of ours, of XLA
    monkeypatch.setattr(runner, "_is_slow", lambda launch: next(slow))
    case = _case("cross_entropy_fwd_bf16_8192x32000").shrunk(2**17)
    for together in (False, True):
        with pytest.warns(UserWarning, match="kernels of no one") if together else contextlib.nullcontext():
            record = runner.run(case, calls.Options(rounds=4))
        assert record["clock"] == ("cupti, each round apart" if together else "cupti")
        assert (record["impls"]["xla"]["us"], record["impls"]["ours"]["us"]) == (30000.0, 1000.0)
        assert [len(record["impls"][name]["rounds_us"]) for name in ("xla", "ours")] == [2, 4]
        assert record["impls"]["xla"]["launches"] == 2
