"""The registry: the shapes that the project's claims name, each once, and the traffic of each counted by hand."""

import re

import pytest

from benchmarks import cases

MIB = 2**20


def _named(name):
    (case,) = [case for case in cases.all_cases() if case.name == name]
    return case


def test_names_are_unique_and_say_what_is_measured():
    names = [case.name for case in cases.all_cases()]
    assert len(set(names)) == len(names)
    ops, passes = "softmax|log_softmax|logsumexp|cross_entropy|top_k", "|".join(cases.PASSES)
    pattern = rf"({ops})_({passes})_(f16|bf16|f32)_\d+x\d+(_({'|'.join(filter(None, cases.OPTIONS))}))?"
    assert all(re.fullmatch(pattern, name) for name in names)
    assert all(case.source for case in cases.all_cases())


def test_every_shape_of_the_claims_is_there():
    forward = {(c.dtype, c.rows, c.cols) for c in cases.select(ops=["softmax"], passes=["fwd"], tags=["standard"])}
    for dtype in cases.SHORT_DTYPES:
        assert {n for d, _, n in forward if d == dtype} >= {2**k for k in range(8, 19)}
    assert {("float16", m, n) for m, n in cases.HTILE} <= forward
    assert ("float32", 8765, 4096) in forward
    assert {("bfloat16", n) for n in cases.VOCABULARIES} <= {(d, n) for d, _, n in forward}
    assert {("float16", 64, 2**20), ("float32", 64, 2**20), ("float16", 4096, 2**20)} <= forward
    assert {("float32", m, 131072) for m in (1, 16, 64)} <= forward
    assert {c.cols for c in cases.select(passes=["bwd"], tags=["standard"])} >= {2**k for k in range(10, 19)}
    assert [c.name for c in cases.select(passes=["call"])] == ["softmax_call_f32_8x128"]


def test_every_loss_and_selection_is_there():
    shapes = {(8192, 32000), (8192, 50257), (8192, 128256), (4096, 151936), (4096, 262144)}
    losses = {(c.pass_, c.rows, c.cols) for c in cases.select(tags=["cross_entropy"])}
    assert losses == {(p, *shape) for p in ("fwd", "value_and_grad", "value_and_grad_mean") for shape in shapes}
    selections = {(c.rows, c.cols, c.options["k"]) for c in cases.select(tags=["top_k"])}
    rows = {32000: (1, 64, 8192), 128256: (1, 64, 8192), 262144: (1, 64, 4096)}
    assert selections == {(m, n, k) for n, some in rows.items() for m in some for k in (1, 8, 64)}
    extended = {(c.dtype, c.rows, c.variant) for c in cases.select(ops=["cross_entropy"], tags=["extended"])}
    assert extended >= {("bfloat16", 8192, "smoothed_capped"), ("bfloat16", 8192, "half_ignored"), ("bfloat16", 64, "")}
    assert not {c.op for c in cases.select(tags=["standard"])} & {"cross_entropy", "top_k"}


def test_what_batch_invariance_costs_is_in_no_other_run():
    found = cases.select(tags=["invariance"])
    assert {case.op for case in found} == {"softmax", "logsumexp", "cross_entropy", "top_k"}
    assert len({case.name for case in found}) == 13
    assert not any("invariance" in case.tags for case in cases.all_cases())


def test_the_sweep_is_larger_than_the_cache():
    for case in cases.select(tags=["sweep"]):
        assert cases.operand_bytes(case) >= 64 * MIB


def test_filters_are_conjunctions():
    chosen = cases.select(ops=["softmax"], passes=["bwd"], dtypes=["f16"], tags=["core"], patterns=["x4096$"])
    assert [case.name for case in chosen] == ["softmax_bwd_f16_32768x4096"]
    assert not cases.select(patterns=["no such case"])


def test_a_shape_of_two_sources_is_one_case():
    assert _named("softmax_fwd_f16_32768x4096").source == "powers of two; HTile"
    assert {"sweep", "htile", "core", "standard"} - _named("softmax_fwd_f16_4096x32768").tags == set()


@pytest.mark.parametrize(
    "name, least",
    [
        ("softmax_fwd_f16_32768x1024", 2 * 64 * MIB),
        ("softmax_bwd_f32_32768x4096", 3 * 512 * MIB),
        ("softmax_value_and_vjp_bf16_32768x4096", 5 * 256 * MIB),
        ("logsumexp_fwd_bf16_32768x4096", 256 * MIB),
        ("log_softmax_bwd_bf16_8192x128256", 3 * 8192 * 128256 * 2),
        ("cross_entropy_fwd_bf16_8192x128256", 8192 * 128256 * 2),
        ("cross_entropy_fwd_bf16_8192x128256_half_ignored", 8192 * 128256),
        ("cross_entropy_value_and_grad_mean_bf16_4096x262144", 2 * 4096 * 262144 * 2),
        ("cross_entropy_value_and_grad_bf16_8192x128256_half_ignored", 3 * 8192 * 128256),
        ("top_k_fwd_bf16_64x128256_k8", 64 * 128256 * 2),
    ],
)
def test_least_bytes_match_a_hand_count(name, least):
    assert cases.least_bytes(_named(name)) == least


def test_a_loss_stands_beside_a_copy_of_its_logits():
    for name in ("cross_entropy_fwd_f32_8192x128256", "cross_entropy_value_and_grad_f32_8192x128256"):
        assert cases.copied_bytes(_named(name)) == 2 * 8192 * 128256 * 4
    assert cases.copied_bytes(_named("softmax_bwd_f32_32768x4096")) == 3 * 512 * MIB


def test_flops_match_a_hand_count():
    assert cases.flops(_named("cross_entropy_value_and_grad_bf16_8192x50257")) == 6 * 8192 * 50257
    assert cases.flops(_named("softmax_fwd_f16_32768x1024")) == 5 * 32768 * 1024
    assert cases.flops(_named("softmax_value_and_vjp_bf16_32768x4096")) == 9 * 32768 * 4096


def test_shrinking_keeps_the_row():
    case = _named("softmax_fwd_bf16_8192x50257")
    assert (case.shrunk(2**18).rows, case.shrunk(2**18).cols) == (5, 50257)
    assert case.shrunk(1).rows == 1
