"""flash-attn-4's process, against stand-ins for torch and for the package that compute with NumPy and the oracle.

A forward pass takes 2 microseconds, a backward pass 5 and a product 1.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import types

import ml_dtypes
import numpy as np
import pytest

from benchmarks import attention, attention_cases, attention_docs, attention_peers, peers, targets
from benchmarks import results as measured
from benchmarks.calls import Options
from benchmarks.results import Results
from tests import attention_oracle
from tests.benchmarks import fake_cuda
from tests.benchmarks.fake_cuda import Clock

SHAPE = attention_cases.Shape(2, 4, 2, 16, 8, 4, "full", 5)


class Tensor(np.ndarray):
    """`pull`, the way back to the inputs of what made it, survives a reshape."""

    def __array_finalize__(self, other):
        self.pull = getattr(other, "pull", None)

    def float(self):
        return self.astype(np.float32).view(Tensor)

    def to(self, dtype):
        return self.astype(dtype).view(Tensor)

    detach = requires_grad_ = lambda self: self
    clone, amax = np.ndarray.copy, np.ndarray.max


def _gradients(out, leaves, d_out, retain_graph=False):
    Clock.now += 5
    return tuple(g.reshape(x.shape) for g, x in zip(out.pull(d_out), leaves, strict=True))


def _product(a, b):
    Clock.now += 1
    return a


def _softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setattr(attention_peers, "_MATMUL_SIZE", 8)
    rng = np.random.default_rng(0)
    made = lambda x: np.asarray(x).view(Tensor)
    return types.SimpleNamespace(
        cuda=fake_cuda.cuda(),
        autograd=types.SimpleNamespace(grad=_gradients),
        arange=lambda n, device: made(np.arange(n)),
        bfloat16=ml_dtypes.bfloat16,
        int32=np.int32,
        manual_seed=lambda seed: None,
        matmul=_product,
        maximum=np.maximum,
        randn=lambda shape, device, dtype: made(rng.standard_normal(shape).astype(dtype)),
        softmax=_softmax,
        stack=np.stack,
        tensor=lambda x, device, dtype=None: made(np.array(x, dtype)),
        where=lambda seen, x, y: made(np.where(seen, x, y)),
    )


class Package:
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
        out = self._attention(*(x[None] for x in (query, key, value)), **rules)
        return out[0], None

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
def package(monkeypatch):
    found = Package()
    monkeypatch.setattr(importlib, "import_module", lambda name: {"flash_attn.cute.interface": found}[name])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"flash-attn-4": "4.0"}[name])
    return found


def _case(pass_="fwd", kind="full", **changes):
    shape = dataclasses.replace(SHAPE, kind=kind, **changes)
    case = attention_cases.Case(shape, pass_, frozenset())
    return attention._for_peers(case)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents"])
def test_the_package_is_called_as_each_kind_means_and_is_right(torch, package, kind):
    answer = attention_peers.measure(torch, _case("fwd", kind), ["fa4"], rounds=2)
    entry = answer["impls"]["fa4"]
    assert (entry["status"], entry["us"], entry["version"], entry["process"]) == ("ok", 2.0, "4.0", "torch")
    assert entry["error"] < entry["allowed_error"] < 0.02
    assert answer["matmul"]["us"] == 1.0
    assert entry["matmul_tflop_per_s"] == answer["matmul"]["tflop_per_s"]
    json.dumps(answer, allow_nan=False)


def test_the_backward_pass_is_what_value_and_vjp_takes_longer(torch, package):
    case = _case("bwd", "causal")
    answer = attention_peers.measure(torch, case, ["fa4"], rounds=3)
    entry = answer["impls"]["fa4"]
    assert (entry["status"], entry["us"], entry["direct_us"]) == ("ok", 5.0, 5.0)
    assert set(entry["programs"]) == {"fwd", "value_and_vjp", "direct"}
    assert entry["tflop_per_s"] == round(case["flops"] / 5e6, 2)
    both = attention_peers.measure(torch, _case("value_and_vjp"), ["fa4"], rounds=1)["impls"]["fa4"]
    assert both["us"] == 7.0


@pytest.mark.parametrize("fault", ["out", "d_query", "d_key", "d_value"])
@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_a_wrong_output_has_no_time(torch, package, fault, kind):
    package.fault = fault
    entry = attention_peers.measure(torch, _case("bwd", kind), ["fa4"], rounds=1)["impls"]["fa4"]
    assert entry["status"] == "WRONG"
    assert entry["reason"].startswith(f"{fault}: relative error")
    assert entry["reason"].endswith(" in sequence 0, head 0")
    assert "us" not in entry


def test_what_the_package_refuses_stands_in_its_words(torch, package, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("(192, 128) is not supported")

    def crash(*_, **__):
        raise RuntimeError("CUDA error")

    for call, status in ((refuse, "refuses"), (crash, "failed")):
        monkeypatch.setattr(package, "flash_attn_func", call)
        answer = attention_peers.measure(torch, _case(), ["fa4"], rounds=1)
        assert answer["impls"]["fa4"]["status"] == status
        assert answer["matmul"]["us"] == 1.0
    assert attention_peers.measure(torch, _case(kind="bias"), ["fa4"], 1)["impls"]["fa4"]["status"] == "declined"


def test_a_package_that_is_missing_says_so(torch, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    entry = attention_peers.measure(torch, _case(), ["fa4"], rounds=1)["impls"]["fa4"]
    assert entry == {"status": "not installed", "reason": "No module named 'flash_attn.cute.interface'"}


def test_the_process_answers_without_torch():
    child = peers.Peers(["fa4"], 1, "", attention_peers.__name__)
    records = attention.measure([attention_cases.all_cases()[0]], Options(()), peers=child)
    child.close()
    assert records[0]["impls"]["fa4"]["status"] == "not installed"
    assert "not installed: torch" in attention.lines(records[0])


def _entry(tflops, flops, **facts):
    us = flops / tflops / 1e6
    return {"status": "ok", "error": 2e-3, "us": us, "min_us": us, "max_us": us, "tflop_per_s": tflops, **facts}


@pytest.fixture
def results(tmp_path):
    """A cell from JAX's process, twice, the same from torch's, and one of its own file, which flash-attn-4 refuses."""
    shared = {"clock": "cupti", "copy": {"tb_per_s": 4.2}, "matmul": {"tflop_per_s": 800.0}}
    header = {"topic": "attention", "commit": "abc", "device": {"name": "H"}, "versions": {"jax": "0"}}
    (near,) = attention_cases.select(tags=["core"], patterns=["fwd_full_d128_s2048"])
    (rest,) = attention_cases.select(tags=["rest"], patterns=["bwd_causal_d256_s512"])

    def write(name, case, impls, **of_the_run):
        record = {"case": case.describe(), "impls": impls, **shared, **of_the_run}
        record |= measured.against_best(record)
        measured.write(tmp_path / "h200" / f"{name}.json", header | {"timestamp": name}, [record])

    fa4 = {"process": "torch", "version": "4.0", "matmul_tflop_per_s": 720.0}
    earlier = {
        "ours": _entry(300.0, near.flops),
        "cudnn": _entry(100.0, near.flops),
        "tokamax": _entry(400.0, near.flops),
    }
    write("0", near, earlier, matmul={"tflop_per_s": 640.0})
    write("1", near, {"ours": _entry(600.0, near.flops), "cudnn": _entry(500.0, near.flops)})
    write("2", near, {"fa4": _entry(600.0, near.flops, **fa4)})
    refused = {"status": "refuses", "reason": "AssertionError: no"}
    write("3", rest, {"ours": _entry(300.0, rest.flops), "cudnn": _entry(200.0, rest.flops), "fa4": refused})
    return Results(tmp_path)


def test_speeds_compare_across_processes_by_the_matrix_product(results):
    page = attention_docs.page(results.by_setting("attention"))
    assert "| attention | us | TFLOP/s | direct | of matmul | x cuDNN | x tokamax | x flash-attn-4 | error |" in page
    assert (
        "| forward, D 128, S 2048, full | 458.1 | 600 | - | 0.75 | 1.20 (500) | 1.20 (400) | 0.90 (600) | 2.0e-03 |"
        in page
    )
    assert "| backward, D 256, S 512, causal |" in page
    assert "| 1.50 (200) | - | refuses |" in page
    assert "flash-attn-4 4.0 runs in torch's process" in page
    assert "(torch's: 720 to 720)" in page


def test_in_the_same_run_times_compare(tmp_path):
    """And the shares of each run's product once ours, or the peer, has been measured again without the other."""
    (case,) = attention_cases.select(tags=["core"], patterns=["fwd_full_d128_s2048"])
    matmul, torchs = {"tflop_per_s": 800.0}, {"tflop_per_s": 720.0}
    fa4 = _entry(600.0, case.flops, process="torch", version="4.0", matmul_tflop_per_s=720.0)
    run = lambda case: {"case": case.describe(), "impls": {"ours": _entry(500.0, case.flops)}, "matmul": matmul}
    child = types.SimpleNamespace(measure=lambda _: {"matmul": torchs, "impls": {"fa4": dict(fa4)}})
    record = run(case)
    attention._add_peers(record, case, child)
    assert (record["best_peer"], record["ratio"]) == ("fa4", round(500 / 600, 4))
    assert record["peers_matmul"] == torchs
    header = {"topic": "attention", "commit": "abc", "device": {"name": "H"}, "versions": {"jax": "0"}}
    measured.write(tmp_path / "h200" / "0.json", header | {"timestamp": "0"}, [record])
    found = lambda: measured.faster(Results(tmp_path).about("attention").case(case.name), "fa4")
    assert found() == pytest.approx(500 / 600)
    measured.write(tmp_path / "h200" / "1.json", header | {"timestamp": "1"}, [run(case)])
    assert found() == pytest.approx(500 / 600 * 720 / 800)
    again = record | {"impls": {"fa4": fa4 | {"us": 2 * fa4["us"]}}}
    measured.write(tmp_path / "h200" / "2.json", header | {"timestamp": "2"}, [again])
    assert found() == pytest.approx(2 * 500 / 600 * 720 / 800)


def _against_the_best(results, pass_):
    (attention,) = results.by_setting("attention").values()
    return targets.PROMISES[-1].judge(attention, pass_)


def test_promises_of_attention_are_kept_against_the_best_peer(results):
    forward, backward = (_against_the_best(results, pass_) for pass_ in ("fwd", "bwd"))
    assert (forward.value, forward.word, forward.measured) == (pytest.approx(0.9), "below goal", 1)
    assert forward.at["name"] == "attention_fwd_full_d128_s2048_b8_h16"
    assert (backward.value, backward.word, backward.measured) == (pytest.approx(1.5), "goal", 1)


def test_a_peer_that_was_not_tried_is_not_beaten(results, tmp_path):
    (tmp_path / "h200" / "2.json").unlink()
    assert _against_the_best(Results(tmp_path), "fwd") is None
