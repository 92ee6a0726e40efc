"""The cases: the shapes that the project's claims name, each once, and the arithmetic of each counted by hand."""

import dataclasses
import itertools
import re

import jax
import numpy as np

import jaxsoftmax
from benchmarks import attention_cases, cases, tables
from benchmarks.attention_cases import Shape, square

MIB = 2**20
MANY = attention_cases.sample(400, seed=5)
ROWS, ATTENTION = tables.ROWS.select, attention_cases.TABLE.select


def test_names_are_unique_and_say_what_is_measured():
    names = [case.name for case in tables.ROWS.cases]
    assert len(set(names)) == len(names)
    ops, passes = "softmax|log_softmax|logsumexp|cross_entropy|top_k", "|".join(cases.PASSES)
    pattern = rf"({ops})_({passes})_(f16|bf16|f32)_\d+x\d+(_({'|'.join(filter(None, cases.VARIANTS))}))?"
    assert all(re.fullmatch(pattern, name) for name in names)
    names = [case.name for case in attention_cases.TABLE.cases]
    assert len(set(names)) == len(names) == 3 * (4 * 3 * 2 + 8)


def test_every_shape_of_the_claims_is_there():
    forward = {(c.dtype, c.rows, c.cols) for c in ROWS(op=["softmax"], pass_=["fwd"], tags=["standard"])}
    for dtype in cases.SHORT_DTYPES:
        assert {n for d, _, n in forward if d == dtype} >= {2**k for k in range(8, 19)}
    assert {("float16", m, n) for m, n in tables.HTILE} | {("float32", 8765, 4096), ("float16", 64, 2**20)} <= forward
    assert {("bfloat16", n) for n in tables.VOCABULARIES} <= {(d, n) for d, _, n in forward}
    assert {c.cols for c in ROWS(pass_=["bwd"], tags=["standard"])} >= {2**k for k in range(10, 19)}
    assert all(case.operand_bytes >= 64 * MIB for case in ROWS(tags=["sweep"]))  # more than the cache
    counts = [len(ROWS(tags=[tag])) for tag in ("cross_entropy", "top_k", "few_rows", "latency", "ladder")]
    assert counts == [15, 27, 3, 1, 18]
    assert not {c.op for c in ROWS(tags=["standard"])} & {"cross_entropy", "top_k"}  # which have runs of their own


def test_the_tags_name_cases_that_there_are():
    known = {case.name for case in tables.ROWS.cases}
    named = [f"{start}_{x}" for of in tables._TAGGED.values() for start, shapes in of.items() for x in shapes.split()]
    assert set(named) <= known


def test_the_cells_of_attention_are_of_equal_work_and_core_and_rest_are_most_of_them():
    grid, rest, core = (ATTENTION(tags=[tag]) for tag in ("grid", "rest", "core"))
    shapes = [case.shape for case in grid if case.shape.heads < 64 and case.shape.head_dim == case.shape.value_dim]
    assert {(shape.batch * shape.length, shape.heads * shape.head_dim) for shape in shapes} == {(16384, 2048)}
    cells = {(case.pass_, case.shape.length, case.shape.head_dim, case.shape.kind) for case in rest}
    assert cells == set(itertools.product(("fwd", "bwd"), (512, 4096), (64, 128, 256), ("full", "causal")))
    assert (len(grid), len(core)) == (2 * (4 * 3 * 2 + 3), 20)
    left = {(c.shape.length, c.shape.head_dim) for c in {*grid} - {*rest} - {*core}}
    assert left == {(2048, 256), (16384, 256), (4096, 128), (4096, 192)}


def test_what_is_measured_apart_is_in_no_other_run():
    of_attention = {"odd": 48, "sample": 60, "short": 28, "decode": 49, "caches": 15, "cpu": 40, "invariance": 6}
    of_attention["fallbacks"] = 26
    for table, wanted in (
        (tables.TABLE, {"invariance": 13, "chains": 135, "first": 10, "sample": 60}),
        (attention_cases.TABLE, of_attention),
    ):
        apart = {tag: table.select(tags=[tag]) for tag in table.apart}
        assert {tag: len({case.name for case in found}) for tag, found in apart.items()} == wanted
        assert not {case for found in apart.values() for case in found} & {*table.cases}
    assert {case.op for case in ROWS(tags=["invariance"])} == {"softmax", "logsumexp", "cross_entropy", "top_k"}
    assert {case.shape.length for case in apart["odd"]} == {511, 2047, 4095, 16383}
    assert {case.kind for case in apart["invariance"]} == {"full", "causal", "bias"}


def test_no_call_has_the_name_of_a_case_of_rows():
    found = [case for tag in ("chains", "first", "sample") for case in tables.TABLE.select(tags=[tag], count=200)]
    assert {case.source for case in found} == {""}


def test_filters_are_conjunctions_and_a_shape_of_two_sources_is_one_case(rows):
    chosen = ROWS(op=["softmax"], pass_=["bwd"], dtype=["float16"], tags=["core"], patterns=["x4096$"])
    assert [case.name for case in chosen] == ["softmax_bwd_f16_32768x4096"]
    assert not ROWS(patterns=["no such case"])
    chosen = ATTENTION(tags=["sample"], pass_=["fwd"], kind=["causal"], count=400, seed=5)
    assert chosen == tuple(case for case in MANY if (case.pass_, case.kind) == ("fwd", "causal"))
    assert {"sweep", "htile", "core", "standard"} <= rows("softmax_fwd_f16_4096x32768").tags


def test_bytes_flops_and_small_cases_match_a_hand_count(rows):
    least = {
        "softmax_fwd_f16_32768x1024": 2 * 64 * MIB,
        "softmax_bwd_f32_32768x4096": 3 * 512 * MIB,
        "softmax_value_and_vjp_bf16_32768x4096": 5 * 256 * MIB,
        "logsumexp_fwd_bf16_32768x4096": 256 * MIB,
        "log_softmax_bwd_bf16_8192x128256": 3 * 8192 * 128256 * 2,
        "cross_entropy_fwd_bf16_8192x128256": 8192 * 128256 * 2,
        "cross_entropy_fwd_bf16_8192x128256_half_ignored": 8192 * 128256,
        "cross_entropy_value_and_grad_mean_bf16_4096x262144": 2 * 4096 * 262144 * 2,
        "cross_entropy_value_and_grad_bf16_8192x128256_half_ignored": 3 * 8192 * 128256,
        "top_k_fwd_bf16_64x128256_k8": 64 * 128256 * 2,
    }
    assert {name: rows(name).least_bytes for name in least} == least
    for name in ("cross_entropy_fwd_f32_8192x128256", "cross_entropy_value_and_grad_f32_8192x128256"):
        assert rows(name).copied_bytes == 2 * 8192 * 128256 * 4  # of the logits
    assert rows("softmax_bwd_f32_32768x4096").copied_bytes == 3 * 512 * MIB
    small = [rows(f"softmax_fwd_{name}").shrunk()[0] for name in ("bf16_8192x50257", "f16_4096x1048576")]
    assert [(case.rows, case.cols) for case in small] == [(5, 50257), (1, 1048576)]
    # Buffers defeat the cache unless a case is hot.
    names = ("softmax_fwd_f16_32768x1024", "softmax_bwd_f32_32768x4096", "softmax_fwd_f32_16x131072")
    assert [rows(name).buffers for name in names] == [3, 1, 1]


def test_the_arithmetic_of_attention_by_hand():
    full = square(2048, 128, "full")
    assert full.flops("fwd") == 4 * 8 * 16 * 2048**2 * 128 == 274877906944
    assert [full.flops(pass_) / full.flops("fwd") for pass_ in ("bwd", "value_and_vjp")] == [2.5, 3.5]
    assert square(2048, 128, "causal").flops("fwd") == full.flops("fwd") / 2
    mla = Shape(4, 16, 16, 4096, 192, 128, "causal")
    assert mla.flops("fwd") == 2 * 4 * 16 * 4096**2 * (192 + 128) / 2
    assert mla.flops("bwd") == 2 * 4 * 16 * 4096**2 * (3 * 192 + 2 * 128) / 2
    assert Shape(2, 4, 2, 16, 8, 8, "window", span=5).pairs == 1 + 2 + 3 + 4 + 12 * 5
    causal = Shape(1, 1, 1, 4, 8, 8, "causal", queries=6)
    assert causal.pairs == 1 + 2 + 3 + 4 + 4 + 4
    assert dataclasses.replace(causal, queries=2).pairs == 1 + 2
    assert dataclasses.replace(causal, kind="mask").pairs == 24


def test_documents_fill_the_sequence_and_labels_are_of_every_kind(rows):
    (case,) = ATTENTION(tags=["standard"], pass_=["fwd"], kind=["documents"])
    shape, told = case.shape, case.told()
    assert (sum(told["documents"]), told["flops"]) == (16384, case.flops)
    assert 512 <= shape.documents()[:-1].min() <= shape.documents().max() <= 1536
    ids = dataclasses.replace(shape, batch=1, heads=1, key_heads=1).operands(0)["query_segment_ids"]
    np.testing.assert_array_equal(np.bincount(ids[0]), shape.documents())
    case = rows("cross_entropy_fwd_bf16_8192x32000")
    ((_, y),) = case.operands(1, seed=0)
    assert (y[0], y[-1]) == (0, case.cols - 1)
    assert len(set(y.tolist())) > 7000
    half_ignored = rows("cross_entropy_fwd_bf16_8192x128256_half_ignored")
    ((_, y),) = dataclasses.replace(half_ignored, shape=(8192, 256)).operands(1, seed=0)
    assert (y == -100).sum() == 4096


def test_a_sample_has_every_size_and_is_bounded_and_a_seed_decides_it():
    assert attention_cases.sample(20, seed=5) == MANY[:20]
    assert attention_cases.sample(20, seed=6) != MANY[:20]
    assert len({case.name for case in MANY}) == 400
    shapes = [case.shape for case in MANY]
    for many in (
        lambda s: s.query_length > s.length,
        lambda s: s.query_length < s.length,
        lambda s: s.length < 64,
        lambda s: s.length > 4096,
        lambda s: s.length % 2,
        lambda s: s.heads > s.key_heads,
        lambda s: s.batch > 8,
    ):
        assert sum(map(bool, map(many, shapes))) >= 20
    assert sum(s.query_length == s.length for s in shapes) > 200
    assert {s.head_dim for s in shapes} == {s.value_dim for s in shapes} == set(range(32, 257, 8))
    kinds = {(case.kind, case.pass_) for case in MANY}
    assert kinds == set(itertools.product(("full", "causal"), ("fwd", "value_and_vjp")))
    assert max(s.batch * s.heads * s.query_length * s.length for s in shapes) <= 2**28
    assert max(s.batch * s.heads * max(s.query_length, s.length) * s.head_dim for s in shapes) <= 2**27
    assert max(case.flops for case in MANY) < 1e12  # 2 ms of 500 TFLOP/s


def test_a_sample_has_every_function_option_and_dtype_and_a_seed_decides_it():
    many = tables.sample(1000, seed=5)
    assert tables.sample(20, seed=5) == many[:20]
    assert tables.sample(20, seed=6) != many[:20]
    assert len({case.name for case in many}) == 1000
    computing = {name for name in jaxsoftmax.__all__ if re.search("softmax|logsumexp|entropy|attention", name)}
    computing -= {"explain_attention", "explain_paged_attention", "explain_linear_cross_entropy"}
    assert {case.op for case in many} == computing - {"merge_attention"}
    assert 200 < sum(case.dtype == "float32" for case in many) < 300
    assert {case.pass_ for case in many} == {"fwd", "value_and_vjp", "value_and_grad"}
    shapes = {case.op: [c.shape for c in many if c.op == case.op] for case in many}
    rows = [*shapes["softmax"], *shapes["log_softmax"], *shapes["logsumexp"]]
    assert {len(shape) for shape in rows} == {2, 3}
    assert min(sum(shape[1] % 2 == odd for shape in rows) for odd in (0, 1)) > 80
    assert min(sum(shape[1] >= 4096 for shape in rows), sum(shape[1] < 64 for shape in rows)) > 80
    given = {name for case in many for name in (*case.options, *case.extras)}
    options = "axis where scale label_smoothing z_loss logits_soft_cap ignore_index reduction k normalize is_causal"
    options += " local_window_size key_value_seq_lengths mask bias dropout_rate dropout_rng"
    assert given == {*options.split()}
    assert any(heads > key_heads for *_, heads, key_heads, _ in shapes["flash_attention"])
    for case in many[:60]:
        largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(lambda c=case: c.operands(1, 0))[0])
        assert largest <= 1.05 * 2**27, case.name


def test_a_name_is_enough_to_measure_a_call_again():
    for case in MANY:
        (again,) = ATTENTION(patterns=[case.name])
        assert (again.shape, again.pass_, again.name) == (case.shape, case.pass_, case.name)
    (known,) = ATTENTION(tags=["core"], patterns=["attention_fwd_full_d64_s2048_b8_h32$"])
    assert attention_cases.parse(known.name) == known
    assert attention_cases.parse("attention_fwd_full_d64") is None
