"""The benchmark of attention on a machine without a GPU: cases, arithmetic, gate, budget, documents."""

import dataclasses
import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, attention_cases, impls, runner, truth, verdict
from benchmarks import results as measured
from benchmarks.attention_cases import Case, Shape, square
from benchmarks.calls import Options
from benchmarks.impls import ATTENTION
from benchmarks.runner import Bench

TINY = Shape(2, 4, 2, 16, 8, 8, "full")
KINDS = [dataclasses.replace(TINY, kind=kind, span=5) for kind in attention_cases.KINDS]
KINDS.append(dataclasses.replace(TINY, value_dim=4, kind="causal"))


def _case(shape, pass_="fwd"):
    return Case(shape, pass_, frozenset({"core"}))


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in attention_cases.all_cases()]
    assert len(set(names)) == len(names) == 3 * (4 * 3 * 2 + 8)
    assert len(attention_cases.select(tags=["core"])) == 20
    assert all("core" in case.tags for case in attention_cases.all_cases()[:20])


def test_the_grid_is_measured_by_core_and_rest_and_wide_heads():
    """Forward and backward of 4 lengths, 3 head dimensions, full and causal; grouped heads twice, and MLA's."""
    grid, rest = (attention_cases.select(tags=[tag]) for tag in ("grid", "rest"))
    cells = {(case.pass_, case.shape.length, case.shape.head_dim, case.shape.kind) for case in rest}
    assert cells == set(itertools.product(("fwd", "bwd"), (512, 4096), (64, 128, 256), ("full", "causal")))
    assert len(grid) == 2 * (4 * 3 * 2 + 3)
    left = set(grid) - set(rest) - set(attention_cases.select(tags=["core"]))
    wide = {(2048, 256), (16384, 256)}
    assert {(c.shape.length, c.shape.head_dim) for c in left} == wide | {(4096, 128), (4096, 192)}


def test_the_grid_is_of_equal_work():
    grid = [case.shape for case in attention_cases.all_cases() if case.shape.kind == "full" and case.shape.heads < 64]
    assert {shape.batch * shape.length for shape in grid} == {16384}
    assert {shape.heads * shape.head_dim for shape in grid} == {2048}


def test_what_is_measured_apart_is_in_no_other_run():
    apart = {tag: attention_cases.select(tags=[tag]) for tag in ("cpu", "invariance")}
    assert [len({case.name for case in cases}) for cases in apart.values()] == [40, 6]
    assert not {case for cases in apart.values() for case in cases} & set(attention_cases.all_cases())
    assert {(case.shape.dtype, case.pass_) for case in apart["cpu"]} == set(
        itertools.product(("float32", "bfloat16"), ("fwd", "value_and_vjp"))
    )
    assert {case.shape.kind for case in apart["invariance"]} == {"full", "causal", "bias"}


def test_a_case_for_the_cpu_is_measured_as_it_is():
    (case,) = attention_cases.select(tags=["cpu"], patterns=["fwd_full_d64_t1_s4096_b8_h8_f32"])
    record = runner.run(case, Options(("ours", "xla"), rounds=1))
    assert "measured" not in record
    assert all(record["impls"][name]["us"] > 0 for name in ("ours", "xla"))


def test_arithmetic_by_hand():
    full = square(2048, 128, "full")
    assert (full.batch, full.heads) == (8, 16)
    assert full.flops("fwd") == 4 * 8 * 16 * 2048**2 * 128 == 274877906944
    assert full.flops("bwd") == 2.5 * full.flops("fwd")
    assert full.flops("value_and_vjp") == 3.5 * full.flops("fwd")
    assert square(2048, 128, "causal").flops("fwd") == full.flops("fwd") / 2
    assert Shape(4, 64, 8, 4096, 128, 128, "full").flops("fwd") == 4 * 4 * 64 * 4096**2 * 128
    mla = Shape(4, 16, 16, 4096, 192, 128, "causal")
    assert mla.flops("fwd") == 2 * 4 * 16 * 4096**2 * (192 + 128) / 2
    assert mla.flops("bwd") == 2 * 4 * 16 * 4096**2 * (3 * 192 + 2 * 128) / 2
    assert dataclasses.replace(TINY, kind="window", span=5).pairs == 1 + 2 + 3 + 4 + 12 * 5


def test_documents_fill_the_sequence():
    shape = square(16384, 128, "documents", 1024)
    assert shape.documents().sum() == 16384
    assert 512 <= shape.documents()[:-1].min() <= shape.documents().max() <= 1536
    ids = shape.segments()
    assert ids.shape == (1, 16384)
    np.testing.assert_array_equal(np.bincount(ids[0]), shape.documents())


@pytest.mark.parametrize(
    "name, shape",
    [("ours", shape) for shape in KINDS]
    # jax.nn takes values of the keys' size only.
    + [("xla", shape) for shape in KINDS if shape.value_dim == shape.head_dim],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_ours_and_xla_pass_the_gate(name, shape):
    operands = shape.operands(0)
    truths = jax.jit(functools.partial(truth.attention, shape, gradients=True))(operands)
    programs = impls.attention_programs(shape, "bwd", name)
    got = [
        jax.jit(p.function)(*(jax.jit(p.prepare)(operands) if p.prepare else (operands,))) for p in programs.values()
    ]
    assert [len(each) for each in got] == [1, 4, 3][: len(programs)]
    for each in got:
        verdict = truth.judge_attention(shape, each, truths)
        assert verdict.right, verdict.describe()


@pytest.mark.parametrize("fault", ["edge", "window", "documents", "nan", "scale", "head"])
def test_wrong_results_do_not_pass(fault):
    kind = {"edge": "causal", "window": "window", "documents": "documents"}.get(fault, "full")
    shape = dataclasses.replace(TINY, kind=kind, span=5)
    operands = shape.operands(0)
    truths = jax.jit(functools.partial(truth.attention, shape, gradients=False))(operands)
    wrong = dict(operands)
    used = {
        "edge": dataclasses.replace(shape, kind="full"),
        "window": dataclasses.replace(shape, span=6),
        "documents": dataclasses.replace(shape, kind="causal"),
    }.get(fault, shape)
    if fault == "scale":
        wrong["query"] = operands["query"] * 1.1
    if fault == "head":
        wrong["key"] = operands["key"][:, :, ::-1]
    if fault == "documents":
        wrong.pop("segments")
    (out,) = jax.jit(impls.attention_programs(used, "fwd", "ours")["fwd"].function)(wrong)
    if fault == "nan":
        out = out.at[-1, 3, -1, 2].set(jnp.nan)
    verdict = truth.judge_attention(shape, (out,), truths)
    assert not verdict.right
    assert json.loads(json.dumps(verdict.as_json(), allow_nan=False))["output"] == "out"


def _stopped(operands, name):
    """The operands, of which the first head of one has no gradient."""
    first = (jnp.arange(operands[name].shape[2]) == 0)[:, None]
    stopped = jax.lax.stop_gradient(operands[name])
    return {**operands, name: jnp.where(first, stopped, operands[name])}


FAULTS = {
    "another function": ("fwd", lambda call, x: x["value"][:, :, :1] + x["query"]),
    "no first head": ("fwd", lambda call, x: call(x).at[:, :, 0].set(0)),
    "no first head of the first sequence": ("fwd", lambda call, x: call(x).at[0, :, 0].set(0)),
    "sequences exchanged": ("fwd", lambda call, x: call(x)[::-1]),
    "one NaN": ("fwd", lambda call, x: call(x).at[0, 3, 1, 2].set(jnp.nan)),
    "no first head's d_query": ("value_and_vjp", lambda call, x: call(_stopped(x, "query"))),
    "no first head's d_key": ("value_and_vjp", lambda call, x: call(_stopped(x, "key"))),
    "no first head's d_value": ("bwd", lambda call, x: call(_stopped(x, "value"))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_implementation_has_no_time(fault, monkeypatch):
    pass_, spoil = FAULTS[fault]
    right = ATTENTION["xla"]
    wrong = dataclasses.replace(right, call=lambda shape, x: spoil(lambda x: right.call(shape, x), x))
    monkeypatch.setitem(ATTENTION, "ours", wrong)
    monkeypatch.setattr(Shape, "shrunk", lambda shape: shape)
    bench, case = Bench(Options(("ours", "xla"), rounds=1)), _case(TINY, pass_)
    bench.prepare([case])
    record = bench.run(case)
    assert record["impls"]["ours"]["status"] == "WRONG"
    assert "us" not in record["impls"]["ours"]
    output = fault.split()[-1] if "d_" in fault else "out"
    assert f"WRONG: {output}: relative error" in attention.lines(record)
    assert "sequence 0, head" in attention.lines(record)
    assert record["impls"]["xla"]["status"] in ("ok", "unresolved")


def test_a_row_is_not_lost_in_the_mean():
    want = jax.random.normal(jax.random.key(0), (1, 16384, 8))
    near = want * (1 + 2.0**-8 * jax.random.normal(jax.random.key(1), want.shape))
    plain, missing, others = (
        float(truth._head_error(x, want)[0]) for x in (near, near.at[0, 9].set(0), near.at[0, 9].set(want[0, 8]))
    )
    assert plain < 2.0**-7
    assert not verdict.Verdict("out", missing, plain).right
    assert not verdict.Verdict("out", others, plain).right


def test_a_kernel_that_takes_no_such_call_declines(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("no kernel takes this call:\n  heads of 256")

    monkeypatch.setitem(ATTENTION, "ours", impls.Impl(refuse))
    bench, case = Bench(Options(("ours",), rounds=1)), _case(TINY)
    bench.prepare([case])
    assert bench.run(case)["impls"]["ours"] == {
        "status": "declined",
        "reason": "no kernel takes this call: heads of 256",
    }


def test_a_run_measures_every_pass_and_names_every_failure(tmp_path):
    path = tmp_path / "attention.json"
    cases = [_case(TINY, pass_) for pass_ in attention_cases.PASSES]
    records = attention.measure(
        cases, Options(("ours", "cudnn", "mgpu", "tokamax"), rounds=2), path=path, commit="abc", budget_s=1000
    )
    found = measured.read(path)
    assert found["records"] == json.loads(json.dumps(records))
    assert {"topic", "device", "versions", "commit", "seed", "left_out", "clocks_after"} <= set(found["header"])
    for record, pass_ in zip(found["records"], attention_cases.PASSES, strict=True):
        ours = record["impls"]["ours"]
        assert ours["status"] in ("ok", "unresolved") if pass_ == "bwd" else ours["us"] > 0
        assert record["impls"]["cudnn"]["status"] == "failed"
        assert record["impls"]["cudnn"]["reason"]
        assert record["impls"]["mgpu"]["status"] == "declined"
        assert record["impls"]["tokamax"]["status"] == "not installed"
        assert record["matmul"]["tflop_per_s"] >= 0
        assert record["ratio"] is None
    assert set(found["records"][1]["impls"]["ours"]["programs"]) == {"fwd", "value_and_vjp", "direct"}


def test_a_budget_that_is_spent_leaves_cases_out_and_says_which(tmp_path, capsys):
    path = tmp_path / "attention.json"
    assert attention.measure([_case(TINY)], Options(("ours",)), path=path, budget_s=0) == []
    assert measured.read(path)["header"]["left_out"] == [_case(TINY).name]
    assert _case(TINY).name in capsys.readouterr().out


def test_a_case_that_fails_does_not_end_the_run(monkeypatch):
    def fail(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(Bench, "run", fail)
    (record,) = attention.measure([_case(TINY)], Options(("ours",)))
    assert "out of memory" in attention.lines(record)


def test_the_best_peer_is_the_fastest():
    impls = {"ours": {"us": 2.0}, "cudnn": {"us": 3.0}, "mgpu": {"us": 2.5}, "xla": {"us": 1.0}, "tokamax": {}}
    assert measured.against_best({"impls": impls}) == {"best_peer": "mgpu", "ratio": 1.25}
    assert measured.against_best({"impls": {"ours": {"us": 2.0}}}) == {"best_peer": None, "ratio": None}


def test_the_scale_of_jax_own_kernel_is_in_its_query():
    shape = square(2048, 64, "full")
    small = dataclasses.replace(shape, batch=1, heads=1, key_heads=1, length=8)
    made = ATTENTION["mgpu"].prepare(small, small.operands(0))
    assert made["query"].dtype == jnp.float16
    np.testing.assert_array_equal(made["query"], (small.operands(0)["query"] / math.sqrt(64)).astype(jnp.float16))
