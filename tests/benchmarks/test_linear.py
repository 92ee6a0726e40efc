"""The benchmark of the loss of `hidden @ weight`, small and on the CPU."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import docs, linear, report, runner
from benchmarks import results as measured
from benchmarks.impls import Options
from benchmarks.linear import LinearCase
from benchmarks.results import Results


@pytest.fixture
def measure(monkeypatch):
    """Measures a case as it is."""
    monkeypatch.setattr(LinearCase, "shrunk", lambda case: (case, {}))
    return lambda case, names, rounds: next(runner.one_by_one([case], Options(names, rounds), float("inf")))


@pytest.mark.parametrize("pass_", linear.PASSES)
def test_every_program_is_right_and_compared_with_products(measure, pass_):
    case = LinearCase(96, 32, 500, pass_)
    record = measure(case, ("ours", "ours_mean", "products", "optax"), 2)
    assert case.flops == 2 * 96 * 32 * 500 * {"forward": 1, "hidden": 2, "gradient": 3}[pass_]
    for name, entry in record["impls"].items():
        assert entry["status"] == "ok"
        assert len(entry["rounds_us"]) == 2
        assert entry["x_products"] == pytest.approx(entry["min_us"] / record["impls"]["products"]["min_us"], rel=0.01)
        assert entry["tflop_per_s"] == round(case.flops / entry["min_us"] / 1e6, 1)
        assert name == "products" or entry["error"] < 0.005
        assert f"{entry['x_products']:.3f} x products" in report.line(record)


_FAULTS = {
    "losses": ("forward", lambda loss, h, w, y: loss(h, w.at[:, :100].set(0), y)),
    "mean": ("gradient", lambda loss, h, w, y: loss(h, w, y) * 1.1),
    "hidden": ("hidden", lambda loss, h, w, y: loss(h + 0.1 * (h - jax.lax.stop_gradient(h)), w, y)),
    "weight": ("gradient", lambda loss, h, w, y: loss(h, w + 0.1 * (w - jax.lax.stop_gradient(w)), y)),
    "losses of NaN": ("forward", lambda loss, h, w, y: loss(h, w, y) * jnp.nan),
    "mean of NaN": ("hidden", lambda loss, h, w, y: loss(h, w, y) + jnp.nan),
    "gradient of NaN": ("hidden", lambda loss, h, w, y: loss(_nan_gradient(h), w, y)),
}


@jax.custom_jvp
def _nan_gradient(x):
    return x


@_nan_gradient.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] * jnp.nan


@pytest.mark.parametrize("fault", _FAULTS)
def test_wrong_results_have_no_time(measure, monkeypatch, fault):
    pass_, spoilt = _FAULTS[fault]
    wrong = lambda hidden, weight, labels, mean: spoilt(
        lambda *xs: linear._optax(*xs, mean=mean), hidden, weight, labels
    )
    monkeypatch.setitem(linear._LOSSES, "ours", wrong)
    record = measure(LinearCase(64, 32, 300, pass_), ("ours", "optax"), 1)
    assert record["impls"]["ours"]["status"] == "WRONG"
    assert "us" not in record["impls"]["ours"]
    json.dumps(record, allow_nan=False)
    assert record["impls"]["optax"]["us"] > 0


def test_what_does_not_fit_is_recorded_and_the_others_are_measured(measure, monkeypatch, tmp_path):
    def exhausted(**_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 33621540864 bytes.")

    monkeypatch.setitem(linear._LOSSES, "optax", exhausted)
    record = measure(LinearCase(64, 32, 300, "gradient"), ("ours", "products", "optax", "tokamax"), 1)
    assert record["impls"]["optax"]["status"] == "failed"
    record["impls"]["optax"]["temp_bytes"] = 2**30
    ours = record["impls"]["ours"] = record["impls"]["ours"] | {"temp_bytes": 2**28, "x_products": 1.25}
    record["impls"]["quack"] = {"status": "ok", "min_us": 1.0, "x_products": 3 * ours["x_products"]}
    header = {"topic": "linear", "timestamp": "2026-11-27T05:00", "commit": "abc", "device": {"name": "NVIDIA H100"}}
    for commit, folder, faster in (("abc", "h100", 1.0), ("old", "h100", 2.0), ("abc", "h200", 4.0)):
        ours = record["impls"]["ours"] | {"min_us": 8000.0 / faster}
        card = {"name": f"NVIDIA {folder.upper()}"}
        day = {"timestamp": "2026-11-20T05:00"} if commit == "old" else {}
        facts = header | {"commit": commit, "device": card, "versions": {"jax": "0"}} | day
        again = record | {"impls": record["impls"] | {"ours": ours}}
        measured.write(tmp_path / folder / f"{commit}.json", facts, [again])
    _, _, *rows, _, where = docs.linear(Results(tmp_path)).splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [(row[1], row[2], row[3]) for row in cells] == [
        ("64 x 32 x 300", "H100", "8.00"),
        ("64 x 32 x 300", "H200", "2.00"),
    ]
    assert [cells[0][i] for i in (7, 8, 10)] == ["out of memory", "not installed", "3.00"]
    assert where.startswith("NVIDIA H100, NVIDIA H200")
    summary = docs.summary(Results(tmp_path))
    assert "| `linear_cross_entropy` | H100 | 1 | 0.80 (0.80 ... 0.80) | - | 3.00 (3.00 ... 3.00) | 3.00 " in summary
    assert "For 64 tokens and a vocabulary of 300, `linear_cross_entropy` with gradients takes 0.25 GiB" in summary
    assert summary.endswith("and optax 1.00 GiB.")
    for name in ("ours", "optax"):  # beside one whose memory is not known nothing is said
        unknown = {"temp_bytes": None} if name == "ours" else {"temp_bytes": 0}
        impls = record["impls"] | {name: record["impls"][name] | unknown}
        measured.write(tmp_path / name / "h200" / "abc.json", facts, [record | {"impls": impls}])
        assert docs.linear_memory(Results(tmp_path / name)) == ""


def test_the_binary_writes_every_case_and_says_what_is_not_installed(binary, tmp_path):
    path = tmp_path / "linear.json"
    flags = ["--op=linear", "--case=forward_2048|hidden_2048", "--rounds=1", f"--json={path}"]
    binary(*flags, "--impl=ours,products,liger")
    found = measured.read(path)
    assert found["header"]["topic"] == "linear"
    names = ["forward_2048x4096x262144", "hidden_2048x4096x262144"]
    assert [record["case"]["name"] for record in found["records"]] == names
    assert [record["measured"] for record in found["records"]] == ["forward_32x64x4096", "hidden_32x64x4096"]
    for record in found["records"]:
        assert {name: entry["status"] for name, entry in record["impls"].items()} == {
            "ours": "ok",
            "products": "ok",
            "liger": "not installed",
        }
    assert "wanted some of ours" in binary(*flags, "--impl=theirs", expect=1)
    binary(*flags, "--impl=ours_mean", "--budget_s=0")
    header = measured.read(path)["header"]
    assert (header["topic"], header["left_out"]) == ("linear mean", names)


def test_a_wrong_loss_makes_the_run_red(binary, monkeypatch):
    monkeypatch.setitem(linear._LOSSES, "ours", lambda **x: 1.1 * linear._optax(**x))
    out = binary("--op=linear", "--case=forward_2048", "--impl=ours", "--rounds=1", expect=1)
    assert "ours is WRONG or failed in 1 of 1: forward_2048x4096x262144" in out
