"""Torch's side, against a stand-in for torch that computes with NumPy and whose clock counts launches."""

import contextlib
import importlib
import types

import numpy as np
import pytest

from benchmarks import cases, models, peers, runner


class Tensor(np.ndarray):
    def random_(self):
        return self

    def copy_(self, other):
        CLOCK.launched += 1
        self[...] = other
        return self

    def numpy(self):
        return self.view(np.ndarray)

    detach = cpu = requires_grad_ = lambda self: self


class Clock:
    """Each launch takes a microsecond."""

    launched = 0

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = CLOCK.launched

        def elapsed_time(self, end):
            return (end.at - self.at) / 1e3


CLOCK = Clock()


def _softmax(x, _):
    CLOCK.launched += 1
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Graph:
    def replay(self):
        CLOCK.launched += 10


def fake_torch():
    @contextlib.contextmanager
    def capturing(_):
        before = CLOCK.launched
        yield
        CLOCK.launched = before

    nothing = lambda: None
    cuda = {
        "Event": Clock.Event,
        "CUDAGraph": Graph,
        "graph": capturing,
        "synchronize": nothing,
        "empty_cache": nothing,
    }
    rng = np.random.default_rng(0)
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(**cuda),
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
        float32=np.float32,
        int32=np.int32,
        bfloat16=None,
    )


def _case(pass_, rows=4, cols=256):
    case = cases.Case("softmax", pass_, rows, cols, "float32", "test", frozenset())
    return runner.describe(case) | {"least_bytes": models.least_bytes(case), "buffers": 3}


@pytest.fixture
def installed(monkeypatch):
    """Quack is installed; Liger is installed and refuses; nothing else can be imported by name."""

    def refuse(x):
        raise RuntimeError("rows too long")

    modules = {
        "quack.softmax": types.SimpleNamespace(
            softmax=lambda x: _softmax(x, -1), softmax_bwd=lambda t, y: _softmax(y, -1)
        ),
        "liger_kernel.transformers.functional": types.SimpleNamespace(liger_softmax=refuse),
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
    answer = peers._measure(fake_torch(), _case("fwd"), peers.NAMES, rounds=2)
    assert set(answer["impls"]) == set(peers.NAMES)
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
