"""The gate before every time, of rows and of attention: what is right passes, and what is wrong is never timed."""

import dataclasses
import functools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from benchmarks import impls, promises, protocol, report, stock, tables
from benchmarks import results as measured
from benchmarks.attention_cases import AttentionCase, Shape
from benchmarks.impls import ATTENTION, Options
from benchmarks.runner import Bench
from pallas_kernels.softmax import reference

SOFTMAX = "softmax_fwd_f32_32768x1024"
ROWS = [
    "softmax_bwd_f32_32768x4096",
    "log_softmax_fwd_bf16_32768x4096",
    "log_softmax_bwd_bf16_8192x128256",
    "log_softmax_value_and_vjp_bf16_32768x4096",
    "logsumexp_fwd_bf16_32768x4096",
    "cross_entropy_value_and_grad_mean_bf16_8192x32000",
    "cross_entropy_fwd_bf16_8192x128256_smoothed_capped",
    "cross_entropy_value_and_grad_bf16_8192x128256_smoothed_capped",
    "cross_entropy_value_and_grad_bf16_8192x128256_half_ignored",
    "top_k_fwd_bf16_64x32000_k1",
]
TINY = Shape(2, 4, 2, 16, 8, 8, "full")
CALLS = [
    *((kind, {}, "value_and_vjp") for kind in ("window", "lengths")),  # as XLA's attention has them too
    ("causal_mask", {}, "fwd"),
    ("causal", {"value_dim": 4}, "bwd"),
    ("mask", {"queries": 9, "length": 12}, "fwd"),
    ("bias", {"queries": 17, "length": 12}, "value_and_vjp"),
    ("full", {"queries": 1}, "fwd"),
    ("documents", {"value_dim": 4, "length": 13, "span": 9, "dtype": "float16"}, "fwd"),
]


def _record(case, options):
    bench = Bench(options, [case])
    bench.prepare(case)
    return bench.run(case)


def _run(case, *impls):
    return _record(case, Options(impls, rounds=1))


def _case(pass_, **changes):
    return AttentionCase(dataclasses.replace(TINY, **changes), pass_, frozenset())


@pytest.fixture
def whole(monkeypatch):
    """Cases of attention are measured as they are."""
    monkeypatch.setattr(Shape, "shrunk", lambda shape: shape)


@pytest.fixture
def ours(monkeypatch):
    """Replaces the function of "ours" on rows."""

    def replace(function):
        build = impls.build
        other = lambda case, impl: function() if impl == "ours" else build(case, impl)
        monkeypatch.setattr(impls, "build", other)

    return replace


# A call of each function, the last of its passes by name: with its gradient, if that is measured.
_CALLS = [*tables.TABLE.select(tags=["chains"]), *tables.sample(200, seed=2)]
_EACH = {case.op: case for case in sorted(_CALLS, key=lambda case: case.pass_)}


@pytest.mark.parametrize("op", sorted(_EACH))
def test_calls_that_are_right_pass(op):
    record = _run(_EACH[op], "ours", "xla")
    for name in ("ours", "xla"):
        entry = record["impls"][name]
        assert entry["status"] == "ok", entry
        assert entry["us"] > 0
        assert entry["error"] <= entry["allowed_error"]
    assert record["measured"] == _EACH[op].shrunk()[0].shape


@jax.custom_vjp
def _wrong_gradient(x):
    return jax.nn.log_softmax(x)


_wrong_gradient.defvjp(lambda x: (jax.nn.log_softmax(x), x), lambda x, t: (t.at[-1].multiply(0.0),))
_UNLIKE = {
    "a NaN": lambda x: jax.nn.log_softmax(x).at[1, 1].set(jnp.nan),
    "a gradient": _wrong_gradient,
}


@pytest.mark.parametrize("wrong", _UNLIKE)
def test_a_chain_that_is_wrong_is_not_timed(monkeypatch, wrong):
    other = types.SimpleNamespace(log_softmax=lambda x, axis: _UNLIKE[wrong](x))
    monkeypatch.setitem(stock.LIBRARIES, "ours", other)
    (case,) = tables.TABLE.select(tags=["chains"], patterns=["log_softmax_value_and_vjp_bf16_124x511"])
    entry = _run(case, "ours")["impls"]["ours"]
    assert entry["status"] == "WRONG"
    assert "us" not in entry


def test_an_index_that_xla_has_wrong_too_is_wrong(monkeypatch):
    (case,) = tables.TABLE.select(tags=["chains"], patterns=["top_k_softmax_fwd_bf16_256x128"])
    first = types.SimpleNamespace(top_k_softmax=lambda x, k: tuple(jax.lax.top_k(jax.nn.softmax(jnp.round(x)), k)))
    for name in ("ours", "xla"):
        monkeypatch.setitem(stock.LIBRARIES, name, first)
    found = _run(case, "ours", "xla")["impls"]
    assert (found["ours"]["status"], found["xla"]["status"]) == ("WRONG", "ok")
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_right_pass(rows, name):
    entry = _record(rows(name), Options(rounds=1))["impls"]["ours"]
    assert entry["status"] == "ok"
    assert entry["max_error_ulp"] <= entry["allowed_error_ulp"]


def test_a_loss_in_float32_is_another_formula(rows):
    record = _run(rows("cross_entropy_fwd_bf16_8192x32000"), "ours", "xla", "xla_f32")
    error = {name: measured.loss_error(record, name) for name in record["impls"]}
    assert (error["ours"] < 1, error["xla_f32"] < 2, error["xla"] > 1000) == (True, True, True)
    for name in ("xla_f32", "cudnn"):
        entry = _run(rows(SOFTMAX), name)["impls"][name]
        assert entry == {"status": "declined", "reason": "it has no softmax"}


@pytest.mark.parametrize("fault", [
    pytest.param(lambda x: jnp.full_like(x, 1 / x.shape[1]), id="a constant"),
    pytest.param(lambda x: jax.nn.softmax(x)[:, ::-1], id="columns permuted"),
    pytest.param(lambda x: jax.nn.softmax(x).at[:, -1].set(0), id="no last column"),
    pytest.param(lambda x: jax.nn.softmax(x).at[x.shape[0] // 2].set(np.nan), id="a row unwritten"),
    pytest.param(lambda x: jax.nn.softmax(x) * 1.0001, id="a sum off by a ten-thousandth"),
])  # fmt: skip
def test_wrong_rows_have_no_time(rows, ours, fault):
    ours(lambda: impls.Program(fault))
    record = _record(rows(SOFTMAX), Options(rounds=1))
    assert record["impls"]["ours"]["status"] == "WRONG"
    assert "us" not in record["impls"]["ours"]
    assert "WRONG" in report.line(record)


@pytest.mark.parametrize(
    "error, status",
    [
        (ValueError("no such layout\nlong trace"), {"status": "failed", "reason": "ValueError: no such layout"}),
        (impls.Declined("too wide"), {"status": "declined", "reason": "too wide"}),
    ],
)
def test_a_program_that_does_not_compile_hides_no_other_result(rows, ours, error, status):
    def broken():
        raise error

    ours(broken)
    record = _record(rows(SOFTMAX), Options(rounds=1))
    assert record["impls"]["ours"] == status
    assert record["impls"]["xla"]["us"] > 0


@pytest.mark.parametrize("ours, status", [(jax.nn.log_softmax, "ok"), (_UNLIKE["a NaN"], "WRONG")])
def test_a_call_that_xla_does_not_compile_is_judged_and_timed(monkeypatch, ours, status):
    def broken(x, axis):
        raise ValueError("Unsupported dot precision algorithm")

    (case,) = tables.TABLE.select(tags=["chains"], patterns=["log_softmax_value_and_vjp_bf16_124x511"])
    programs = impls.programs
    monkeypatch.setitem(stock.LIBRARIES, "ours", types.SimpleNamespace(log_softmax=lambda x, axis: ours(x)))
    uncompiled = {case.pass_: impls.Program(broken)}
    monkeypatch.setattr(impls, "programs", lambda _, impl, o: uncompiled if impl == "xla" else programs(case, impl, o))
    found = _run(case, "ours", "xla")["impls"]
    assert (found["ours"]["status"], found["xla"]["status"]) == (status, "failed")
    assert ("us" in found["ours"]) == (status == "ok")


def _swapped(p, at):
    return p, at.at[-1, 1:3].set(at[-1, 2:0:-1])


LOSS_FAULTS = {
    "cross_entropy_fwd_bf16_8192x32000": {
        "another label": lambda x, y, right: right(x, y.at[-1].add(-1)),
        "a loss in 16 bits": lambda x, y, right: right(x, y).astype(x.dtype).astype(jnp.float32),
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
def test_a_wrong_loss_is_seen_in_whatever_row(rows, name):
    case, _ = rows(name).shrunk()
    (operands,) = case.operands(1, seed=0)
    ours, xla = (jax.jit(impls.build(case, impl).function) for impl in ("ours", "xla"))
    every_row = protocol.every_row(case)
    right, truths = ours(*operands), (every_row, xla(*operands))
    assert protocol.judge(case, operands, right, truths).right
    for fault, wrong in LOSS_FAULTS[name].items():
        assert not protocol.judge(case, operands, wrong(*operands, ours), truths).right, fault
    for row in range(case.rows):  # by the loose check, without the sampled rows
        spoiled = [y.at[row].add(1) if y.ndim else y for y in jax.tree.leaves(right)]
        assert not every_row(operands, spoiled) <= 1


@pytest.mark.parametrize("sampled", [1, 2, 5, 8, 9])
def test_the_first_and_the_last_row_are_sampled_and_all_of_few(rows, monkeypatch, sampled):
    case, _ = rows(SOFTMAX).shrunk()
    monkeypatch.setattr(protocol, "_SAMPLED_ELEMENTS", sampled * case.cols)
    found = protocol._sampled_rows(case)
    assert (found[0], found[-1], len(found)) == (0, case.rows - 1, min(max(sampled, 2), case.rows))


def test_the_verdict_is_the_wrong_one_or_the_nearest_to_it():
    far, near, wrong = (measured.Verdict(error, xla, 0.0) for error, xla in ((3.0, 8.0), (2.0, 2.0), (0.1, 0.01)))
    assert measured.worst([far, near]) is measured.worst([near, far]) is near
    assert measured.worst([far, near, wrong]) is wrong


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_errors_of_xlas_losses_are_in_units_of_float32(dtype):
    def error(name, pass_="fwd", **options):
        case = {"pass": pass_, "dtype": dtype, "options": options}
        return measured.loss_error(
            {"case": case, "impls": {"ours": {"max_error_ulp": 0.5}, "xla": {"max_error_ulp": 0.5}}}, name
        )

    narrow = 0.5 * float(jnp.finfo(dtype).eps / jnp.finfo("float32").eps)
    assert (error("xla"), error("ours"), error("liger")) == (narrow, 0.5, None)
    assert error("xla", "bwd") == error("xla", logits_soft_cap=30.0) == 0.5


def test_a_loss_errs_by_its_terms_and_a_capped_one_by_the_cap(rows):
    case, _ = rows("cross_entropy_fwd_bf16_8192x128256_smoothed_capped").shrunk()
    ((x, y),) = case.operands(1, seed=0)
    _, [(_, size)] = protocol._row_in_float32(case, x[0], y[0])
    terms = float(jnp.abs(x[0]).max()) + math.log(case.cols) + case.options["logits_soft_cap"]
    assert float(size) == pytest.approx(terms, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_what_a_loss_gradient_errs_relative_to(smoothing, cap):
    """Its own size, and of a smoothed one that of the two terms of 1 / columns, as it is their difference."""
    options = {"label_smoothing": smoothing} if smoothing else {}
    options |= {"logits_soft_cap": cap} if cap else {}
    case = types.SimpleNamespace(op="cross_entropy", pass_="value_and_grad", rows=8, cols=5, options=options)
    logits = jnp.array([1.0, -2.0, 0.5, 3.0, -1.0])

    def loss(x):
        x = cap * jnp.tanh(x / cap) if cap else x
        return -(1 - smoothing) * jax.nn.log_softmax(x)[1] - smoothing * jax.nn.log_softmax(x).mean()

    found, [(gradient, size)] = protocol._row_in_float32(case, logits, jnp.array(1))
    want = jax.grad(loss)(logits) / 8
    np.testing.assert_allclose(found, loss(logits), rtol=1e-6)
    np.testing.assert_allclose(gradient, want, rtol=1e-5)
    np.testing.assert_allclose(size, jnp.abs(want) + 2 * smoothing / 5 / 8, rtol=1e-5)


def test_what_is_checked_at_once_fits_in_memory(monkeypatch, rows):
    """A GiB of float32: the scores of one head of 16384 tokens, or as many rows as that."""
    seen = []

    def each(function, xs, *, batch_size):
        seen.append(batch_size)
        return jax.vmap(function)(xs)

    monkeypatch.setattr(protocol.lax, "map", each)
    for length, group, at_once in ((16384, 1, 1), (16384, 4, 1), (8192, 1, 4), (8192, 3, 1), (1024, 2, 128)):
        shape = Shape(2, 2 * group, 2, length, 8, 8, "full")
        operands = jax.eval_shape(lambda shape=shape: shape.operands(0))
        jax.eval_shape(functools.partial(protocol.attention, shape, gradients=False), operands)
        assert seen.pop() == at_once
    for cols, at_once in ((1024, 2**18), (2**28, 1), (2**28 - 1, 1), (2**27, 2), (2**29, 1)):
        case = dataclasses.replace(rows(SOFTMAX), shape=(32768, cols))
        x = jax.ShapeDtypeStruct((3, cols), jnp.float32)
        jax.eval_shape(protocol.every_row(case), (x,), [x])
        assert seen.pop() == at_once


@pytest.mark.parametrize("op", ["softmax", "flash_attention"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_calls_with_products_of_float32_are_allowed_tf32_on_a_gpu(op, dtype, backend, monkeypatch):
    case = dataclasses.replace(_EACH[op], dtype=dtype)
    check = lambda *_: {"output 0": jnp.array([[[0.5]], [[0.0]]])}
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    slack = protocol.judge(case, (), (), (check, ())).slack
    is_tf32 = (op, dtype, backend) == ("flash_attention", "float32", "gpu")
    assert slack == {"float32": 2.0**-10 if is_tf32 else 1e-4, "bfloat16": 2.0**-8}[dtype]


def test_what_a_format_allows(monkeypatch):
    """Half of epsilon in 16 bits, epsilon in TF32, which has the digits of float16, and which only a GPU takes."""
    eps = {name: float(jnp.finfo(name).eps) for name in ("bfloat16", "float16")}
    assert {name: measured.SLACK[name] for name in eps} == {name: x / 2 for name, x in eps.items()}
    # Every row: 8 units in the last place of 16 bits, and 64 in float32.
    every_row = {name: 8 * x for name, x in eps.items()} | {"float32": 64 * float(jnp.finfo("float32").eps)}
    assert every_row == protocol._LOOSE
    case = _case("fwd", dtype="float32")
    operands = case.shape.operands(0)
    truths = protocol.attention(case.shape, operands, gradients=False)
    judged = lambda: protocol.judge(case, operands, (jnp.zeros_like(operands["query"]),), truths)
    assert (judged().slack, judged().right) == (1e-4, False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (judged().slack, judged().right) == (eps["float16"], False)


def test_a_line_says_that_a_case_was_small():
    record = {"case": {"name": "a"}, "clock": "wall", "impls": {}}
    assert report.line(record) == "a: wall clock"
    for name in ("measured", "rows_measured"):
        assert report.line(record | {name: 3}) == "a (small, on the CPU): wall clock"


def test_times_stand_beside_the_first_and_beside_those_of_another_run():
    record = {"case": {"name": "a"}, "clock": "wall", "impls": {"x": {"us": 2.0}, "y": {"us": 3.0}}}
    assert [line.split() for line in report.line(record).splitlines()[1:]] == [
        ["x", "2.00", "us", "1.000x"],
        ["y", "3.00", "us", "1.500x"],
    ]
    runs = [{"run": {"commit": "c"}, "impls": {"ours": entry}} for entry in ({"us": 2.0}, {"us": 3.0}, {})]
    assert [promises.speed(runs[i], runs[j]) for i, j in ((0, 1), (0, 2), (2, 0))] == [1.5, None, None]


def test_every_row_is_looked_at(rows, monkeypatch):
    """Of many rows only some are sampled; the loose check on the device sees the others."""
    case, _ = rows(SOFTMAX).shrunk()
    monkeypatch.setattr(protocol, "_SAMPLED_ELEMENTS", 4 * case.cols)
    ((x,),) = case.operands(1, seed=0)
    xla = jax.nn.softmax(x)
    unsampled = next(iter(set(range(case.rows)) - set(protocol._sampled_rows(case).tolist())))
    found = protocol.judge(case, (x,), xla.at[unsampled, 7].multiply(2.0), (protocol.every_row(case), xla))
    assert found.error <= found.allowed
    assert not found.right


@pytest.mark.parametrize("pass_", ["fwd", "value_and_grad"])
def test_a_kernel_has_the_loss_around_it(rows, pass_):
    case, _ = rows(f"cross_entropy_{pass_}_bf16_8192x32000").shrunk()
    (operands,) = case.operands(1, seed=0)
    kernel = getattr(reference, case.problems[0].op.value)
    run = lambda x, *rows: kernel(x, *(row[:, None] for row in rows), axes=(1,))
    function, take = impls.kernel_of_loss(case, types.SimpleNamespace(run=run))
    got = function(*(take(*operands) if take else operands))
    for mine, ours in zip(*map(jax.tree.leaves, (got, impls.build(case, "ours").function(*operands))), strict=True):
        np.testing.assert_allclose(mine.astype(np.float32), ours.astype(np.float32), rtol=1e-2, atol=1e-5)
    with pytest.raises(impls.Declined, match="GPU"):
        impls.build(case, "kernel:naive")


def test_ours_keeps_only_its_output_for_the_backward_pass(rows):
    case = rows("softmax_value_and_vjp_bf16_32768x4096")
    assert impls.build(case, "ours").facts["residual_bytes"] == case.operand_bytes
    assert impls.build(case, "xla").facts["residual_bytes"] > case.operand_bytes


def test_an_invariant_function_is_traced_as_one():
    scaled = lambda x: x * (1.0 + jaxsoftmax._core.checks.is_batch_invariant())
    assert (jax.jit(scaled)(1.0), jax.jit(impls.invariant(scaled))(1.0)) == (1.0, 2.0)


@pytest.mark.parametrize("kind, changes, pass_", CALLS, ids=str)
def test_attention_passes_and_a_wrong_one_does_not(whole, kind, changes, pass_):
    case = _case(pass_, **{"kind": kind, "span": 5} | changes)
    others = ["xla"] if not changes and kind != "documents" else []  # as jax.nn takes it
    bench = Bench(Options(("ours", *others), rounds=1), [case])
    bench.prepare(case)
    for entry in bench.run(case)["impls"].values():
        assert entry["status"] in ("ok", "unresolved"), entry
    bench._held[2]["out"] = tuple(x * 1.1 for x in bench._held[2]["out"])
    assert bench.run(case)["impls"]["ours"]["status"] == "WRONG"


@pytest.mark.parametrize("fault", ["edge", "window", "documents", "scale", "head"])
def test_an_attention_that_sees_other_keys_does_not_pass(fault):
    kind = {"edge": "causal", "window": "window", "documents": "documents"}.get(fault, "full")
    case = _case("fwd", kind=kind, span=5)
    ((operands,),) = case.operands(1, seed=0)
    truths = jax.jit(functools.partial(protocol.attention, case.shape, gradients=False))(operands)
    changed = {"edge": {"kind": "full"}, "window": {"span": 6}, "documents": {"kind": "causal"}}.get(fault, {})
    wrong = {name: x for name, x in operands.items() if name != "query_segment_ids"}
    if fault == "scale":
        wrong["query"] = operands["query"] * 1.1
    if fault == "head":
        wrong["key"] = operands["key"][:, :, ::-1]
    other = dataclasses.replace(case, shape=dataclasses.replace(case.shape, **changed))
    got = jax.jit(impls.programs(other, "ours", Options())["fwd"].function)(wrong)
    assert not protocol.judge(case, (operands,), got, truths).right


def _stopped(operands, name):
    """The operands, of which the first head of one has no gradient."""
    first = (jnp.arange(operands[name].shape[2]) == 0)[:, None]
    return {**operands, name: jnp.where(first, jax.lax.stop_gradient(operands[name]), operands[name])}


FAULTS = {
    "no first head of the first sequence": ("fwd", lambda call, x: call(x).at[0, :, 0].set(0)),
    "sequences exchanged": ("fwd", lambda call, x: call(x)[::-1]),
    "one NaN": ("fwd", lambda call, x: call(x).at[0, 3, 1, 2].set(jnp.nan)),
    "no first head's d_query": ("value_and_vjp", lambda call, x: call(_stopped(x, "query"))),
    "no first head's d_key": ("value_and_vjp", lambda call, x: call(_stopped(x, "key"))),
    "no first head's d_value": ("bwd", lambda call, x: call(_stopped(x, "value"))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_attention_has_no_time(fault, monkeypatch, whole):
    pass_, spoil = FAULTS[fault]
    right = ATTENTION["xla"]
    wrong = right._replace(call=lambda shape, x: spoil(lambda x: right.call(shape, x), x))
    monkeypatch.setitem(ATTENTION, "ours", wrong)
    record = _run(_case(pass_), "ours", *["xla"] * (pass_ == "fwd"))
    assert record["impls"]["ours"]["status"] == "WRONG"
    assert "us" not in record["impls"]["ours"]
    json.dumps(record, allow_nan=False)
    output = fault.split()[-1] if "d_" in fault else "out"
    assert f"WRONG: {output}: relative error" in report.line(record)
    assert "sequence 0, head" in report.line(record)
    assert pass_ != "fwd" or record["impls"]["xla"]["status"] == "ok"


def test_a_row_is_not_lost_in_the_mean():
    want = jax.random.normal(jax.random.key(0), (1, 16384, 8))
    near = want * (1 + 2.0**-8 * jax.random.normal(jax.random.key(1), want.shape))
    faults = near, near.at[0, 9].set(0), near.at[0, 9].set(want[0, 8])
    plain, missing, another = (float(protocol._head_error(x, want)[0]) for x in faults)
    assert plain < 2.0**-7
    for error in (missing, another):
        assert not measured.Verdict(error, plain, measured.SLACK["bfloat16"]).right


@pytest.mark.parametrize("off", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("length", [16, 4096])
def test_the_worst_row_counts_by_a_sixteenth(off, length):
    want = jnp.ones((1, length, 8))
    found = protocol._head_error(want.at[0, 3].add(off), want)
    np.testing.assert_allclose(found, max(off / math.sqrt(length), off / 16), rtol=1e-4)


def test_a_kernel_that_takes_no_such_call_declines(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("no kernel takes this call:\n  heads of 256")

    monkeypatch.setitem(ATTENTION, "ours", impls.Impl(refuse))
    entry = _run(_case("fwd"), "ours")["impls"]["ours"]
    assert entry == {"status": "declined", "reason": "no kernel takes this call: heads of 256"}


def test_passes_of_a_call_are_judged_by_one_truth_and_have_programs_in_common(whole):
    chosen = [_case(pass_) for pass_ in ("fwd", "bwd")]
    bench = Bench(Options(("ours",), rounds=1), chosen)
    for case in chosen:
        bench.prepare(case)
        assert bench.run(case)["impls"]["ours"]["error"] < 1e-2
    assert (len(bench._truths), len(bench._compiled)) == (1, 3)


def test_the_scale_of_jax_own_kernel_is_in_its_query():
    small = Shape(1, 1, 1, 8, 64, 64, "full")
    made = ATTENTION["mgpu"].prepare(small, small.operands(0))
    assert made["query"].dtype == jnp.float16
    np.testing.assert_array_equal(made["query"], (small.operands(0)["query"] / math.sqrt(64)).astype(jnp.float16))
