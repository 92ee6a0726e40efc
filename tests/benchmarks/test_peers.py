"""Torch's side, against a stand-in for torch that computes with NumPy and a launch takes a microsecond."""

import importlib
import types

import numpy as np
import pytest

from benchmarks import cases, peers
from benchmarks import results as measured
from tests.benchmarks import fake_cuda
from tests.benchmarks.fake_cuda import Clock


class Tensor(np.ndarray):
    def random_(self):
        return self

    def copy_(self, other):
        Clock.now += 1
        self[...] = other
        return self

    def numpy(self):
        return self.view(np.ndarray)

    detach = cpu = requires_grad_ = lambda self: self
    clone = np.ndarray.copy


def _softmax(x, _):
    Clock.now += 1
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _cross_entropy(x, y, reduction="mean", ignore_index=-100):
    Clock.now += 1
    top = x.max(-1, keepdims=True)
    lse = np.log(np.exp(x - top).sum(-1)) + top[:, 0]
    losses = np.where(y == ignore_index, 0, lse - x[np.arange(len(x)), y]).astype(np.float32).view(Tensor)
    return losses if reduction == "none" else losses.mean()


def _quack_cross_entropy(x, y, return_dx=False):
    losses = _cross_entropy(x, y, "none")
    return (losses, np.zeros_like(x)) if return_dx else losses


def _liger_cross_entropy(x, y, reduction):
    losses = _cross_entropy(x, y, reduction)
    x[...] = np.nan  # the gradient, in fact
    return losses


def fake_torch():
    nothing = lambda: None
    rng = np.random.default_rng(0)
    return types.SimpleNamespace(
        cuda=fake_cuda.cuda(),
        compiler=types.SimpleNamespace(reset=nothing),
        ops=types.SimpleNamespace(
            aten=types.SimpleNamespace(
                _softmax_backward_data=lambda t, y, axis, dtype: _softmax(y, axis), _log_softmax_backward_data=None
            )
        ),
        compile=lambda f, dynamic: f,
        manual_seed=lambda seed: None,
        randn=lambda shape, device, dtype: rng.standard_normal(shape).astype(dtype).view(Tensor),
        empty=lambda size, device, dtype: np.zeros(size, dtype).view(Tensor),
        empty_like=lambda x: np.zeros_like(x).view(Tensor),
        softmax=_softmax,
        topk=lambda y, k: (np.sort(y)[:, ::-1][:, :k], np.argsort(y)[:, ::-1][:, :k]),
        randint=lambda low, high, shape, device: rng.integers(low, high, shape).view(Tensor),
        autograd=types.SimpleNamespace(grad=lambda value, x: (np.zeros_like(x),)),
        nn=types.SimpleNamespace(functional=types.SimpleNamespace(cross_entropy=_cross_entropy)),
        float32=np.float32,
        int32=np.int32,
        bfloat16=None,
    )


def _case(pass_, rows=4, cols=256, op="softmax", variant=""):
    case = cases.Case(op, pass_, rows, cols, "float32", "test", frozenset(), variant)
    sizes = {"least_bytes": cases.least_bytes(case), "copied_bytes": cases.copied_bytes(case)}
    return case.describe() | sizes | {"buffers": 3}


@pytest.fixture
def installed(monkeypatch):
    """Quack is installed; Liger is installed and refuses; nothing else can be imported by name."""

    def refuse(x):
        raise RuntimeError("rows too long")

    modules = {
        "quack.softmax": types.SimpleNamespace(
            softmax=lambda x: _softmax(x, -1), softmax_bwd=lambda t, y: _softmax(y, -1)
        ),
        "quack.cross_entropy": types.SimpleNamespace(
            cross_entropy_fwd=_quack_cross_entropy, cross_entropy=_cross_entropy
        ),
        "liger_kernel.transformers.functional": types.SimpleNamespace(
            liger_softmax=refuse, liger_cross_entropy=_liger_cross_entropy
        ),
    }

    def find(name):
        if name not in modules:
            raise ImportError(f"No module named {name!r}")
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", find)
    return modules


@pytest.mark.parametrize("graphed", [True, False])
def test_every_peer_is_timed_or_says_why_not(installed, monkeypatch, graphed):
    if not graphed:
        monkeypatch.setattr(peers, "_GRAPHED_BYTES", 0)
    answer = peers._measure(fake_torch(), _case("fwd"), measured.ROW_LIBRARIES, rounds=2)
    assert set(answer["impls"]) == set(measured.ROW_LIBRARIES)
    for name in ("torch", "torch_compile", "quack"):
        entry = answer["impls"][name]
        assert (entry["status"], entry["us"], entry["process"]) == ("ok", 1.0, "torch")
        assert entry["fraction_of_copy"] == pytest.approx(1.0, rel=0.05)
        assert entry["max_error_ulp"] < 8
    assert answer["impls"]["liger"] == {"status": "declined", "reason": "RuntimeError: rows too long"}
    assert answer["copy"]["us"] == 1.0


def test_what_is_not_installed_says_so(installed):
    del installed["quack.softmax"]
    answer = peers._measure(fake_torch(), _case("fwd"), ["quack"], rounds=1)
    assert answer["impls"]["quack"] == {"status": "not installed", "reason": "No module named 'quack.softmax'"}
    assert answer["copy"]["us"] == 1.0


def test_the_backward_pass_starts_from_the_saved_output(installed):
    answer = peers._measure(fake_torch(), _case("bwd"), ["torch", "quack", "liger"], rounds=1)
    assert [answer["impls"][name]["status"] for name in ("torch", "quack", "liger")] == ["ok", "ok", "declined"]
    assert answer["impls"]["torch"]["max_error_ulp"] is None


def test_a_graph_that_cannot_be_captured_is_launched_one_by_one(installed, capsys):
    torch = fake_torch()

    def refuse(_):
        raise RuntimeError("capture failed")

    torch.cuda.graph = refuse
    answer = peers._measure(torch, _case("fwd"), ["torch"], rounds=1)
    assert answer["impls"]["torch"]["us"] == 1.0
    assert "capture failed" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["", "half_ignored"])
def test_every_peer_has_the_loss_right_whoever_writes_over_the_logits(installed, variant):
    case = _case("fwd", rows=2**12, op="cross_entropy", variant=variant)
    answer = peers._measure(fake_torch(), case, ("liger", "torch", "torch_compile", "quack"), rounds=1)
    for entry in answer["impls"].values():
        assert (entry["status"], entry["us"]) == ("ok", 1.0)
        assert entry["max_error_ulp"] < 4
        # The copy beside it moves twice the logits' bytes, as many as it takes microseconds.
        assert entry["fraction_of_copy"] == pytest.approx(case["least_bytes"] / case["copied_bytes"], rel=0.01)


@pytest.mark.parametrize("pass_", ["value_and_grad", "value_and_grad_mean"])
def test_peers_give_the_mean_loss_and_its_gradient(installed, pass_):
    torch = fake_torch()
    case = _case(pass_, op="cross_entropy")
    for name in measured.ROW_LIBRARIES:
        function, prepare = peers._peer(torch, name, case)
        (operands, *_) = peers._operands(torch, case)
        value, gradient = function(*prepare(*operands))
        in_one = (name, pass_) == ("quack", "value_and_grad")
        assert value == pytest.approx(_cross_entropy(*operands) * (case["rows"] if in_one else 1))
        assert gradient.shape == (case["rows"], case["cols"])


def test_options_that_a_peer_lacks_are_declined(installed):
    answer = peers._measure(fake_torch(), _case("fwd", op="cross_entropy", variant="smoothed_capped"), ["quack"], 1)
    reason = "NotImplementedError: quack has no label_smoothing, z_loss, logits_soft_cap together"
    assert answer["impls"]["quack"] == {"status": "declined", "reason": reason}


def test_top_k_is_torchs_alone(installed):
    answer = peers._measure(fake_torch(), _case("fwd", op="top_k", variant="k8"), measured.ROW_LIBRARIES, 1)
    assert {name: entry["status"] for name, entry in answer["impls"].items()} == {
        "torch": "ok",
        "torch_compile": "ok",
        "quack": "declined",
        "liger": "declined",
    }
