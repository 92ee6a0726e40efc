"""Torch's process, against stand-ins for torch and its libraries that compute with NumPy and the oracle.

A launch takes a microsecond; of attention a forward pass takes 2, and a backward pass 5.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import types

import ml_dtypes
import numpy as np
import pytest

from benchmarks import __main__ as program
from benchmarks import attention_cases, cases, linear, torch_peers
from benchmarks import results as measured
from tests import attention_oracle


class Clock:
    """An event of `torch.cuda`; the clock goes on by what each launch says that it takes, in microseconds."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e3


class Graph:
    def replay(self):
        Clock.now += self.us


@contextlib.contextmanager
def _capturing(graph):
    before = Clock.now
    yield
    graph.us, Clock.now = Clock.now - before, before


class Tensor(np.ndarray):
    """`pull`, the way back to the inputs of what made it, survives a reshape."""

    def __array_finalize__(self, other):
        self.pull = getattr(other, "pull", None)

    def random_(self):
        return self

    def copy_(self, other):
        Clock.now += 1
        self[...] = other
        return self

    def numpy(self):
        return self.view(np.ndarray)

    def float(self):
        return self.to(np.float32)

    def to(self, dtype):
        return self.astype(dtype).view(Tensor)

    def __matmul__(self, other):
        Clock.now += 1
        return np.ndarray.__matmul__(self, other)

    requires_grad_ = lambda self, needed=True: self
    detach = cpu = lambda self: self
    clone, amax = np.ndarray.copy, np.ndarray.max


def _softmax(x, axis=-1):
    Clock.now += 1
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _cross_entropy(x, y, reduction="mean", ignore_index=-100):
    losses = -np.log(np.take_along_axis(_softmax(x), np.maximum(y, 0)[:, None], 1)[:, 0])
    losses = np.where(y == ignore_index, 0, losses).astype(np.float32).view(Tensor)
    return losses if reduction == "none" else losses.mean()


def _quack_cross_entropy(x, y, return_dx=False):
    losses = _cross_entropy(x, y, "none")
    return (losses, np.zeros_like(x)) if return_dx else losses


def _liger_cross_entropy(x, y, reduction):
    losses = _cross_entropy(x, y, reduction)
    x[...] = np.nan  # the gradient, in fact
    return losses


def _liger_softmax(x):
    raise RuntimeError("rows too long")


def _gradients(out, leaves, d_out=None, retain_graph=False):
    if not isinstance(leaves, list):
        return (np.zeros_like(leaves),)
    Clock.now += 5
    return tuple(g.reshape(x.shape) for g, x in zip(out.pull(d_out), leaves, strict=True))


def _product(a, b):
    Clock.now += 1
    return a


_names = types.SimpleNamespace


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setattr(torch_peers, "_MATMUL_SIZE", 8)
    monkeypatch.setattr(torch_peers.gc, "collect", lambda: None)  # which looks through all that JAX has traced
    rng, nothing = np.random.default_rng(0), lambda *_: None
    made = lambda make: lambda *args, device=None, dtype=None: np.asarray(make(*args), dtype).view(Tensor)
    return _names(
        cuda=_names(Event=Clock, CUDAGraph=Graph, graph=_capturing, synchronize=nothing, empty_cache=nothing),
        compiler=_names(reset=nothing),
        ops=_names(aten=_names(_softmax_backward_data=lambda t, y, axis, dtype: _softmax(y))),
        autograd=_names(grad=_gradients),
        nn=_names(functional=_names(cross_entropy=_cross_entropy)),
        compile=lambda f, dynamic: f,
        manual_seed=nothing,
        randn=made(rng.standard_normal),
        randint=made(rng.integers),
        topk=lambda y, k: (np.sort(y)[:, ::-1][:, :k], np.argsort(y)[:, ::-1][:, :k]),
        **{name: made(make) for name, make in {"empty": np.zeros, "arange": np.arange, "tensor": np.array}.items()},
        **{name: made(getattr(np, name)) for name in ("where", "empty_like")},
        **{name: getattr(np, name) for name in ("maximum", "stack", "float32", "int32")},
        softmax=_softmax,
        matmul=_product,
        bfloat16=ml_dtypes.bfloat16,
    )


class FlashAttention:
    """flash_attn.cute.interface; `fault` spoils one output of the first head."""

    fault = ""

    def flash_attn_func(self, query, key, value, causal=False, window_size=(None, None)):
        assert query.dtype == ml_dtypes.bfloat16
        window = None if window_size == (None, None) else window_size
        return self._attention(query, key, value, is_causal=causal, local_window_size=window), None

    def flash_attn_varlen_func(self, query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        assert (cu_seqlens_q == cu_seqlens_k).all()
        lengths = np.diff(cu_seqlens_q)
        assert max_seqlen_q == max_seqlen_k == lengths.max()
        ids = np.repeat(np.arange(len(lengths)), lengths)[None]
        rules = {"query_segment_ids": ids, "key_value_segment_ids": ids, "is_causal": causal}
        return self._attention(*(x[None] for x in (query, key, value)), **rules)[0], None

    def _attention(self, *qkv, **rules):
        Clock.now += 2
        rounded = lambda x: x.astype(ml_dtypes.bfloat16).view(Tensor)
        out = rounded(attention_oracle.forward(*qkv, **rules).out)

        def pull(d_out):
            found = attention_oracle.gradients(*qkv, d_out=d_out.reshape(out.shape), **rules)
            gradients = [rounded(found[name]) for name in ("query", "key", "value")]
            if self.fault.startswith("d_"):
                gradients[("d_query", "d_key", "d_value").index(self.fault)][0, :, 0] *= ml_dtypes.bfloat16(1.1)
            return gradients

        out.pull = pull
        if self.fault == "out":
            out[0, 3, 0] = 0
        return out


@pytest.fixture
def installed(monkeypatch):
    """The libraries; Liger refuses softmax, and nothing else can be imported by name."""
    modules = {
        "quack.softmax": _names(softmax=_softmax, softmax_bwd=lambda t, y: _softmax(y)),
        "quack.cross_entropy": _names(cross_entropy_fwd=_quack_cross_entropy, cross_entropy=_cross_entropy),
        "liger_kernel.transformers.functional": _names(
            liger_softmax=_liger_softmax, liger_cross_entropy=_liger_cross_entropy
        ),
        "flash_attn.cute.interface": FlashAttention(),
    }

    def find(name):
        if name not in modules:
            raise ImportError(f"No module named {name!r}")
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", find)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"flash-attn-4": "4.0"}[name])
    return modules


def _rows(pass_, rows=4, cols=256, op="softmax", variant=""):
    case = cases.Case(op, pass_, "float32", (rows, cols), frozenset(), cases.VARIANTS[variant], source="test")
    return case.told() | {"buffers": 3}


def _attention(pass_="fwd", kind="full", **changes):
    shape = dataclasses.replace(attention_cases.Shape(2, 4, 2, 16, 8, 4, "full", 5), kind=kind, **changes)
    return attention_cases.AttentionCase(shape, pass_, frozenset()).told()


def _measured(torch, case, *names, rounds=1):
    return torch_peers.measure(torch, case, names, rounds)["impls"]


@pytest.mark.parametrize("graphed", [True, False])
def test_every_peer_is_timed_or_says_why_not(torch, installed, monkeypatch, graphed):
    if not graphed:
        monkeypatch.setattr(torch_peers, "_GRAPHED_BYTES", 0)
    answer = torch_peers.measure(torch, _rows("fwd"), measured.ROW_LIBRARIES, rounds=2)
    assert answer["copy"]["us"] == 1.0
    assert answer["impls"].pop("liger") == {"status": "declined", "reason": "RuntimeError: rows too long"}
    assert set(answer["impls"]) == {"torch", "torch_compile", "quack"}
    for entry in answer["impls"].values():
        assert (entry["status"], entry["us"], entry["process"]) == ("ok", 1.0, "torch")
        assert entry["fraction_of_copy"] == pytest.approx(1.0, rel=0.05)
        assert entry["max_error_ulp"] < 8


def test_what_is_missing_or_refused_says_so(torch, installed, monkeypatch):
    for name, module, case, probe in (
        ("quack", "quack.softmax", _rows("fwd"), "copy"),
        ("fa4", "flash_attn.cute.interface", _attention(), "matmul"),
    ):
        kept = installed.pop(module)
        answer = torch_peers.measure(torch, case, [name], rounds=1)
        assert answer["impls"][name] == {"status": "not installed", "reason": f"No module named {module!r}"}
        assert answer[probe]["us"] == 1.0
        installed[module] = kept
    smoothed = _rows("fwd", op="cross_entropy", variant="smoothed_capped")
    reason = "NotImplementedError: quack has no label_smoothing, z_loss, logits_soft_cap together"
    assert _measured(torch, smoothed, "quack")["quack"] == {"status": "declined", "reason": reason}
    found = _measured(torch, _rows("fwd", op="top_k", variant="k8"), *measured.ROW_LIBRARIES)
    assert [found[name]["status"] for name in measured.ROW_LIBRARIES] == ["ok", "ok", "declined", "declined"]
    assert _measured(torch, _attention(kind="bias"), "fa4")["fa4"]["status"] == "declined"
    for error, status in ((AssertionError("(192, 128)"), "declined"), (RuntimeError("CUDA error"), "failed")):

        def refuse(*_, error=error, **__):
            raise error

        monkeypatch.setattr(FlashAttention, "flash_attn_func", refuse)
        assert _measured(torch, _attention(), "fa4")["fa4"]["status"] == status


def test_the_backward_pass_starts_from_the_saved_output(torch, installed):
    found = _measured(torch, _rows("bwd"), "torch", "quack", "liger")
    assert [entry["status"] for entry in found.values()] == ["ok", "ok", "declined"]
    assert found["torch"]["max_error_ulp"] is None


def test_a_graph_that_cannot_be_captured_is_launched_one_by_one(torch, installed, capsys):
    def refuse(_):
        raise RuntimeError("capture failed")

    torch.cuda.graph = refuse
    assert _measured(torch, _rows("fwd"), "torch")["torch"]["us"] == 1.0
    assert "capture failed" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["", "half_ignored"])
def test_every_peer_has_the_loss_right_whoever_writes_over_the_logits(torch, installed, variant):
    case = _rows("fwd", rows=2**12, op="cross_entropy", variant=variant)
    for entry in _measured(torch, case, *measured.ROW_LIBRARIES[::-1]).values():
        assert (entry["status"], entry["us"]) == ("ok", 1.0)
        assert entry["max_error_ulp"] < 4
        # The copy beside it moves twice the logits' bytes, as many as it takes microseconds.
        assert entry["fraction_of_copy"] == pytest.approx(case["least_bytes"] / case["copied_bytes"], rel=0.01)


@pytest.mark.parametrize("pass_", ["value_and_grad", "value_and_grad_mean"])
def test_peers_give_the_mean_loss_and_its_gradient(torch, installed, pass_):
    case = _rows(pass_, op="cross_entropy")
    for name in measured.ROW_LIBRARIES:
        function, prepare = torch_peers._peer(torch, name, case)
        operands = torch_peers._row_operands(torch, case)
        value, gradient = function(*prepare(*operands))
        in_one = (name, pass_) == ("quack", "value_and_grad")
        assert value == pytest.approx(_cross_entropy(*operands) * (case["rows"] if in_one else 1))
        assert gradient.shape == (case["rows"], case["cols"])


@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents"])
def test_flash_attention_is_called_as_each_kind_means_and_is_right(torch, installed, kind):
    entry = _measured(torch, _attention("fwd", kind), "fa4", rounds=2)["fa4"]
    assert (entry["status"], entry["us"], entry["version"], entry["process"]) == ("ok", 2.0, "4.0", "torch")
    assert entry["error"] < entry["allowed_error"] < 0.02
    json.dumps(entry, allow_nan=False)


def test_the_backward_pass_is_what_value_and_vjp_takes_longer(torch, installed):
    case = _attention("bwd", "causal")
    entry = _measured(torch, case, "fa4", rounds=3)["fa4"]
    assert (entry["status"], entry["us"], entry["direct_us"]) == ("ok", 5.0, 5.0)
    assert set(entry["programs"]) == {"fwd", "value_and_vjp", "direct"}
    assert entry["tflop_per_s"] == round(case["flops"] / 5e6, 2)
    assert _measured(torch, _attention("value_and_vjp"), "fa4")["fa4"]["us"] == 7.0


@pytest.mark.parametrize(
    "fault, kind", [("out", "causal"), ("d_query", "documents"), ("d_key", "causal"), ("d_value", "documents")]
)
def test_a_wrong_output_has_no_time(torch, installed, fault, kind):
    installed["flash_attn.cute.interface"].fault = fault
    entry = _measured(torch, _attention("bwd", kind), "fa4")["fa4"]
    assert entry["status"] == "WRONG"
    assert entry["reason"].startswith(f"{fault}: relative error")
    assert entry["reason"].endswith(" in sequence 0, head 0")
    assert "us" not in entry


def test_the_process_survives_being_killed():
    process = program.Peers(["quack"], 1, "")
    case = {"name": "any"}
    assert process.measure(case)["impls"]["quack"]["status"] == "not installed"
    process._child.kill()
    process._child.wait()
    assert process.measure(case)["impls"]["quack"]["status"] == "failed"
    assert process.measure(case)["impls"]["quack"]["status"] == "not installed"
    process.close()


_NOISY = """
import os, sys, types
from benchmarks import torch_peers

def measure(torch, case, names, rounds):
    print("by Python")
    os.write(1, b"below Python")
    return {"impls": {name: {"status": "ok"} for name in names}}

sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
torch_peers.serve(measure, ["quack"], 1)
"""


def test_what_libraries_print_is_no_answer(tmp_path):
    (tmp_path / "noisy.py").write_text(_NOISY)
    process = program.Peers(["quack"], 1, str(tmp_path), "noisy")
    for name in ("one", "two"):
        assert process.measure({"name": name}) == {"name": name, "impls": {"quack": {"status": "ok"}}}
    process.close()


@pytest.mark.parametrize("pass_, products", [("forward", 1), ("hidden", 2), ("gradient", 3)])
def test_losses_of_products_are_timed_beside_as_many_products(torch, installed, pass_, products):
    def loss(hidden, weight, labels):
        return _cross_entropy((hidden @ weight.T).float(), labels)

    def with_gradients(hidden, weight, labels):
        value = loss(hidden, weight, labels).view(Tensor)
        value.pull = lambda _: (hidden, weight)[: products - 1]
        return value

    wrong = types.SimpleNamespace(liger_fused_linear_cross_entropy=lambda *x: loss(*x) * 1.1)
    installed["liger_kernel.transformers.functional"] = wrong
    installed["quack.linear_cross_entropy"] = _names(chunked_linear_cross_entropy=with_gradients)
    case = linear.LinearCase(8, 16, 32, pass_).describe()
    answer = torch_peers.measure(torch, case, ["quack", "liger"], 2)
    assert answer["products"]["us"] == products
    assert answer["impls"]["liger"]["status"] == ("WRONG" if pass_ == "forward" else "failed")
    assert answer["impls"]["quack"]["us"] == 2.0 + 5.0 * (pass_ != "forward")
    assert answer["impls"]["quack"]["x_products"] == round(answer["impls"]["quack"]["us"] / products, 4)
    assert answer["impls"]["quack"]["tflop_per_s"] == round(case["flops"] / answer["impls"]["quack"]["us"] / 1e6, 1)
    assert "min_us" not in answer["impls"]["liger"]
