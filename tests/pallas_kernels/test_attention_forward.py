"""The forward attention kernel against NumPy in float64, beside XLA's attention in the operands' own 16 bits."""

import dataclasses
import itertools
import re
from typing import Any

import aot
import attention_cases
import attention_oracle
import documents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QKV, SEQUENCES, compiled, name_of, operands_of, rules_of
from selected import cases_for

from pallas_kernels import hardware
from pallas_kernels.attention import combine, dispatch, forward, mask, tile_scheduler
from pallas_kernels.attention.problem import Attention, ForwardConfig, Op
from pallas_kernels.hardware import WARPGROUP_ROWS
from tests import errors
from tests.pairwise import pairwise

LENGTHS = ((1, 1), (3, 1), (1, 799), (63, 64), (64, 63), (113, 239), (128, 128), (239, 113), (799, 1024), (1024, 799))
DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (80, 80), (72, 40), (96, 96), (8, 8), (16, 32), (32, 200))
KINDS: dict[str, dict[str, Any]] = (
    {"full": {}, "large": {"scale": 3.0}, "negative": {"scale": -0.3}}
    | attention_cases.KINDS
    | {
        # The warpgroups of a CTA see other first and other last tiles.
        "window-left": {"window": (31, None), "window_offset": 40, "causal_offset": 40},
        "everything": attention_cases.KINDS["everything"] | {"bias": "1NTS", "causal_offset": 50},
        "huge": {"scale": 40.0},
    }
)


def problem_of(
    kind: str, lengths: tuple[int, int], dims: tuple[int, int], dtype: str, heads=(4, 2), batch=2
) -> Attention:
    return attention_cases.problem_of(Op.FORWARD, KINDS[kind], lengths, dims, dtype, heads, batch)


def rounded(p: Attention, arrays: dict[str, Any], truth: attention_oracle.Forward) -> np.ndarray:
    """The output with weights and itself rounded to the operands' dtype, as XLA's attention rounds them."""
    value = np.nan_to_num(np.repeat(arrays["value"], p.query_heads // p.key_heads, axis=2).astype(np.float64))
    weights = truth.weights.astype(p.dtype).astype(np.float64)
    return attention_oracle.product("bnts,bsnd->btnd", weights, value).astype(p.dtype)


def check(p: Attention, config: ForwardConfig, run: Any = lambda f, *operands: f(*operands), **patterns: str) -> None:
    """Checks the kernel on operands of these patterns."""
    arrays = operands_of(p, **patterns)
    qkv = (arrays[name] for name in QKV)
    truth = attention_oracle.forward(*qkv, arrays.get("bias"), **rules_of(p, arrays))
    out, lse = (np.asarray(x) for x in run(lambda *a: forward.run(p, config, *a), *arrays.values()))
    errors.assert_rows_accurate(out, rounded(p, arrays, truth), truth.out)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(truth.lse))
    seen = ~np.isneginf(truth.lse)
    # float32 sums of products of 16-bit numbers.
    np.testing.assert_allclose(lse[seen], truth.lse[seen], rtol=2e-5, atol=2e-5)


def test_the_bound_of_a_long_row_is_relative_to_its_output():
    """Whose size is that of 4096 random values' mean, though another row's is 1."""
    truth = np.random.default_rng(0).standard_normal((1, 4, 1, 64)) * np.array([1, 2**-6, 2**-6, 2**-6])[:, None, None]
    own = truth.astype(jnp.bfloat16)
    errors.assert_rows_accurate(own, own, truth)
    for wrong in (
        truth * np.array([1, 1.05, 1, 1])[:, None, None],
        truth[:, [0, 2, 1, 3]],
        np.where(np.abs(truth) < 0.1, 0.0, truth),
    ):
        with pytest.raises(AssertionError, match="rows are off"):
            errors.assert_rows_accurate(wrong.astype(jnp.bfloat16), own, truth)


def cases() -> list[Attention]:
    """Every kind at some lengths and sizes of heads, and the plain kinds at all of them."""
    rotations = zip(
        KINDS, itertools.cycle(LENGTHS[5:]), itertools.cycle(DIMS[:5]), itertools.cycle(("bfloat16", "float16"))
    )
    found = [problem_of(*facts) for facts in rotations]
    found += [problem_of(kind, (113, 239), (128, 128), "bfloat16") for kind in KINDS]
    for kind in ("full", "causal"):
        found += [problem_of(kind, lengths, (64, 64), "float16", heads=(6, 2)) for lengths in LENGTHS]
        found += [problem_of(kind, (239, 799), dims, "bfloat16", heads=(3, 3)) for dims in DIMS]
    return list(dict.fromkeys(found))


def whole(p: Attention) -> ForwardConfig:
    """The config for sequences of many tiles, however short these are."""
    return dispatch.forward_configs(dataclasses.replace(p, batch_invariant=p.bias is None), hardware.H200)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("p", cases(), ids=name_of)
def test_matches_the_oracle(p):
    for config in dict.fromkeys((dispatch.forward_configs(p, hardware.H200)[0], whole(p))):
        check(p, config)


FEW_KINDS = (
    *("full", "causal-later", "window-left", "lengths", "key-lengths", "segments", "soft-cap", "sinks", "mask"),
    *("mask-of-keys", "ends", "ends-window", "ends-segments", "bias", "positions-window"),
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "queries, kind, keys, sizes",
    cases_for(
        "gpu",
        lambda: pairwise(
            (1, 2, 3, 7, 16, 33, 128),
            FEW_KINDS,
            (1, 17, 128, 1000, 4097, 40000),
            (((8, 1), 64), ((6, 2), 128), ((3, 3), 256), ((16, 2), 72)),
        ),
    ),
    ids=str,
)
def test_few_queries(queries, kind, keys, sizes):
    """By the config that is chosen, and by that with the most splits, each twice, for the same bits."""
    heads, head_dim = sizes
    p = problem_of(kind, (queries, keys), (head_dim, head_dim), "bfloat16", heads, batch=1 + (keys < 40000))
    configs = dispatch.forward_configs(p, hardware.H200)
    arrays = [jnp.asarray(x) for x in operands_of(p).values()]
    for config in dict.fromkeys((configs[0], max(configs, key=lambda config: config.splits))):
        check(p, config)
        first, second = (forward.run(p, config, *arrays) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.gpu
@pytest.mark.together("kind", "head_dim")
@pytest.mark.parametrize("ids", documents.PATTERNS)
@pytest.mark.parametrize("kind", ["segments", "segments-causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_segments_that_skip(kind, ids, head_dim):
    p = problem_of(kind, (1500, 1501), (head_dim, head_dim), "bfloat16", heads=(3, 1))
    check(p, whole(p), ids=ids)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal_offset", [None, 0])
def test_results_repeat_bit_by_bit(head_dim, causal_offset):
    p = dataclasses.replace(
        problem_of("full", (2048, 2048), (head_dim, head_dim), "bfloat16"), causal_offset=causal_offset
    )
    arrays = [jnp.asarray(x) for x in operands_of(p).values()]
    config = whole(p)
    first = [np.asarray(x) for x in forward.run(p, config, *arrays)]
    for _ in range(5):
        for a, b in zip(first, forward.run(p, config, *arrays), strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), np.asarray(b).view(np.uint8))


EVERY_LENGTH = {"batch": len(SEQUENCES["extreme"](1, 1)), "query_lengths": True, "key_lengths": True}
SPLIT = {"warpgroups": 1, "zero_init_free": True, "splits": 5}
EARLY = {"early_exp_columns": 24, "zero_init_free": True, "overlap_pv": True}
DYNAMIC = {"scheduler": "dynamic"}
RAGGED = SPLIT | DYNAMIC | {"packed_heads": 2}
NO_THRESHOLD = {"rescale_threshold_log2": 0}
F32, BF16, F16 = ({"bias_dtype": jnp.dtype(name), "causal_offset": 20} for name in ("float32", "bfloat16", "float16"))

SINGLE, WIDE = {"warpgroups": 1}, {"warpgroups": 3, "block_kv": 128}
EARLY_OF_2 = {"rescale_threshold_log2": 2, "early_exp_columns": 8}
# The kind, lengths, sizes and numbers of heads; then what else the config, the problem and its operands have.
INTERPRETED: list[tuple[Any, ...]] = [
    ("causal-later", (37, 150), (72, 40), (8, 1), SINGLE | {"zero_init_free": True, "packed_heads": 4}, {}, {}),
    ("window", (37, 150), (72, 40), (16, 2), {"zero_init_free": True, "packed_heads": 8}, {}, {}),
    ("lengths", (5, 330), (72, 40), (4, 2), SPLIT | {"packed_heads": 2}, {}, {}),
    ("sinks", (5, 330), (72, 40), (4, 2), SPLIT | {"packed_heads": 2}, {}, {}),
    ("mask", (70, 320), (32, 16), (4, 1), SPLIT | {"packed_heads": 4}, {}, {}),
    ("ends-segments", (70, 320), (32, 16), (2, 1), SPLIT, {}, {}),
    ("bias", (5, 330), (32, 16), (2, 2), SPLIT | {"zero_init_free": False}, {}, {}),
    ("full", (3, 2300), (8, 8), (2, 2), SPLIT | {"splits": 36}, {"batch": 1}, {}),
    ("key-lengths", (3, 330), (32, 16), (4, 2), RAGGED, {"batch": 8}, {"sequences": "extreme"}),
    ("causal-later", (113, 150), (64, 32), (2, 1), EARLY, {"batch_invariant": True}, {}),
    ("ends-segments", (113, 150), (64, 32), (2, 1), EARLY, {"batch_invariant": True}, {}),
    ("window-left", (200, 300), (64, 64), (1, 1), WIDE | {"rescale_threshold_log2": 0}, {}, {}),
    ("window-left", (200, 300), (64, 64), (1, 1), DYNAMIC | {"warpgroups": 1, "rescale_threshold_log2": 2}, {}, {}),
    ("window-left", (200, 300), (64, 64), (1, 1), SINGLE | {"block_kv": 128} | EARLY_OF_2, {}, {}),
    ("window-left", (200, 300), (64, 64), (1, 1), {"overlap_pv": True}, {}, {}),
    ("full", (270, 50), (32, 16), (2, 1), DYNAMIC | NO_THRESHOLD, {}, {}),
    ("segments-causal", (140, 140), (32, 16), (2, 1), DYNAMIC | NO_THRESHOLD, {}, {}),
    ("lengths", (140, 130), (32, 16), (1, 1), {}, EVERY_LENGTH, {"sequences": "extreme"}),
    ("ends-segments", (140, 130), (32, 16), (1, 1), {}, EVERY_LENGTH, {"sequences": "extreme"}),
    ("full", (152, 192), (32, 16), (2, 1), {}, {"bias": "B1TS"} | F16, {}),
    ("full", (152, 192), (32, 16), (2, 1), {"bias_stages": 1}, {"bias": "BNTS"} | BF16, {}),
    ("full", (152, 192), (32, 16), (2, 1), {"bias_stages": 2}, {"bias": "1NTS"} | F32, {}),
    ("segments", (140, 140), (32, 16), (2, 1), DYNAMIC, {}, {"ids": "packed"}),
    ("lengths", (140, 140), (32, 16), (2, 1), {}, {"segments": True}, {"ids": "packed"}),
    ("segments", (200, 330), (32, 16), (2, 1), DYNAMIC, {"window": (150, 60), "sinks": True}, {"ids": "unsorted"}),
    ("segments", (260, 330), (32, 16), (2, 1), {}, {"causal_offset": 130}, {"ids": "few"}),
    ("positions", (140, 330), (32, 16), (2, 1), EARLY | DYNAMIC, {}, {}),
    ("positions-window", (140, 330), (32, 16), (2, 1), WIDE, {}, {"ids": "few"}),
    ("positions", (5, 330), (32, 16), (2, 2), SPLIT, {"window": (90, 40)}, {}),
    ("causal-later", (200, 330), (32, 16), (2, 1), DYNAMIC, {"mask": "1NTS", "causal_offset": 130}, {"mask": "causal"}),
    ("full", (200, 330), (32, 16), (2, 1), {}, {"mask": "B11S", "window": (150, 60)}, {"mask": "padding"}),
    ("full", (200, 330), (32, 16), (2, 1), DYNAMIC, {"mask": "1NT1", "soft_cap": 3.0}, {"mask": "scattered"}),
    ("full", (200, 330), (32, 16), (2, 1), {"block_kv": 128}, {"mask": "11TS", "bias": "1N11"}, {"mask": "everything"}),
    ("full", (200, 330), (32, 16), (2, 1), DYNAMIC, {"mask": "B111"}, {"mask": "nothing"}),
    ("lengths", (200, 330), (32, 16), (2, 1), {}, {"segments": True, "causal_offset": 100, "mask": "BNTS",
     "bias": "1NTS"}, {"mask": "documents"}),
]  # fmt: skip


# `test_mutants` has every kind.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, lengths, dims, heads, knobs, facts, patterns", INTERPRETED, ids=str)
def test_matches_the_oracle_in_the_interpreter(
    kind, lengths, dims, heads, knobs, facts, patterns, interpreted, monkeypatch
):
    config = ForwardConfig(**{"block_kv": 64, "warpgroups": 2, "rescale_threshold_log2": 8} | knobs)
    if config.scheduler == "dynamic":
        monkeypatch.setattr(hardware, "current", lambda: dataclasses.replace(hardware.H200, sm_count=3))
    facts = KINDS[kind] | {"batch": 2} | facts
    dtype = "float16" if kind == "window-left" else "bfloat16"
    p = attention_cases.problem_of(Op.FORWARD, facts, lengths, dims, dtype, heads, facts.pop("batch"))
    check(p, config, interpreted, **patterns)


def test_a_merge_of_splits_is_rounded_once(interpreted):
    """To the nearest number of 16 bits, of as many splits as take two launches."""
    splits = combine.MOST_AT_ONCE + 4
    rng = np.random.default_rng(0)
    parts, lses, sinks = (rng.standard_normal(shape, np.float32) for shape in ((splits, 3, 2, 8), (splits, 3, 2), (2,)))
    out, lse = interpreted(
        lambda *arrays: combine.run(*arrays, jnp.dtype("bfloat16")), *map(jnp.asarray, (parts, lses, sinks))
    )
    weights = np.exp(lses.astype(np.float64))
    total = weights.sum(0) + np.exp(sinks)
    truth = (weights[..., None] * parts).sum(0) / total[..., None]
    unit = float(jnp.finfo(jnp.bfloat16).eps) * 2 ** np.floor(np.log2(np.abs(truth)))
    assert (np.abs(np.asarray(out).astype(np.float64) - truth) <= 0.5001 * unit).all()
    np.testing.assert_allclose(lse, np.log(total), rtol=1e-5, atol=1e-6)


def check_pages(p: Attention, config: ForwardConfig, run: Any = lambda f, *operands: f(*operands)) -> None:
    """Checks the kernel on keys and values in pages, in no order; entries that no sequence uses name no page."""
    contiguous = dataclasses.replace(p, page_size=0)
    arrays = operands_of(contiguous)
    qkv = (arrays[name] for name in QKV)
    truth = attention_oracle.forward(*qkv, **rules_of(contiguous, arrays))
    rng, entries = np.random.default_rng(1), p.key_length // p.page_size
    tables = rng.permutation(p.batch * entries + 3)[: p.batch * entries].reshape(p.batch, entries).astype(np.int32)
    paged = dict(arrays)
    for name in QKV[1:]:
        x = arrays[name].reshape(p.batch * entries, p.page_size, *arrays[name].shape[2:])
        pool = np.full((p.batch * entries + 3, *x.shape[1:]), np.nan, x.dtype)
        pool[tables.ravel()] = x
        paged[name] = pool if p.pages_first else np.moveaxis(pool, 2, 0)
    unused = np.arange(entries) * p.page_size >= np.minimum(arrays["key_lengths"], p.key_length)[:, None]
    paged["block_tables"] = np.where(unused, rng.choice([-1, 2**31 - 1, -(2**31), 0]), tables)
    # One more sequence lacks its last page, which it has a half of; where queries may not see that one, every page.
    for name in paged.keys() - {*QKV[1:], "sinks"}:
        paged[name] = np.concatenate([paged[name], paged[name][:1]])
    paged["key_lengths"][-1] = p.key_length - p.page_size // 2
    of_lost = rng.choice([-1, 2**31 - 1, -(2**31), p.batch * entries + 3], entries)
    is_lost = np.arange(entries) >= (entries - 1 if p.query_length <= WARPGROUP_ROWS else 0)
    paged["block_tables"][-1] = np.where(is_lost, of_lost, tables[0])
    of_all = dataclasses.replace(p, batch=p.batch + 1)
    found = run(lambda *a: forward.run(of_all, config, *a), *(jnp.asarray(x) for x in paged.values()))
    (out, lost), (lse, lost_lse) = (np.split(np.asarray(x), [p.batch]) for x in found)
    assert np.isnan(lost.astype(np.float32)).all()
    assert np.isnan(lost_lse).all()
    errors.assert_rows_accurate(out, rounded(contiguous, arrays, truth), truth.out)
    np.testing.assert_allclose(lse, truth.lse, rtol=2e-5, atol=2e-5)


PAGED = (
    ("key-lengths", (3, 320), (64, 64), (4, 2), 16, True, SPLIT | {"packed_heads": 2}),
    ("ends-window", (5, 320), (72, 40), (4, 1), 64, False, SPLIT | DYNAMIC | {"packed_heads": 4}),
    ("ends", (37, 256), (16, 32), (2, 2), 128, True, {"warpgroups": 1}),
    ("ends-window", (3, 384), (128, 128), (2, 1), 8, False, {"warpgroups": 1, "block_kv": 128}),
    ("key-lengths", (130, 160), (32, 16), (2, 1), 32, True, {}),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind, lengths, dims, heads, size, pages_first, knobs", PAGED, ids=str)
def test_pages_in_the_interpreter(kind, lengths, dims, heads, size, pages_first, knobs, interpreted, monkeypatch):
    config = ForwardConfig(**{"block_kv": 64, "warpgroups": 2, "rescale_threshold_log2": 8} | knobs)
    monkeypatch.setattr(hardware, "current", lambda: dataclasses.replace(hardware.H200, sm_count=3))
    p = problem_of(kind, lengths, dims, "bfloat16", heads)
    check_pages(dataclasses.replace(p, page_size=size, pages_first=pages_first), config, interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "queries, kind, keys, size, pages_first, sizes",
    cases_for(
        "gpu",
        lambda: pairwise(
            (1, 2, 7, 33, 128),
            ("key-lengths", "ends", "ends-window"),
            (128, 1024, 4096, 40960),
            (8, 16, 64, 128),
            (False, True),
            (((8, 1), 64), ((6, 2), 128), ((3, 3), 256), ((16, 2), 72)),
        ),
    ),
    ids=str,
)
def test_pages(queries, kind, keys, size, pages_first, sizes):
    heads, head_dim = sizes
    p = problem_of(kind, (queries, keys), (head_dim, head_dim), "bfloat16", heads)
    p = dataclasses.replace(p, page_size=size, pages_first=pages_first)
    configs = dispatch.forward_configs(p, hardware.H200)
    for config in dict.fromkeys((configs[0], max(configs, key=lambda config: config.splits))):
        check_pages(p, config)


@pytest.mark.slow
@pytest.mark.parametrize("threshold, early, splits", [(0, 0, 1), (8, 0, 1), (8, 24, 1), (8, 0, 2)])
def test_nan_is_not_hidden_in_the_interpreter(threshold, early, splits, interpreted):
    """Those of a query are in every split, and those of a key in one."""
    p = problem_of("full", (70, 60 * splits), (64, 64), "bfloat16", heads=(1, 1))
    arrays = {key: np.array(x) for key, x in operands_of(p).items()}
    arrays["query"][0, 5] = arrays["key"][1, 5] = np.nan
    config = ForwardConfig(64, 2, rescale_threshold_log2=threshold, early_exp_columns=early, splits=splits)
    out, lse = interpreted(lambda *a: forward.run(p, config, *a), *(jnp.asarray(arrays[key]) for key in QKV))
    lost = np.isnan(np.asarray(out, np.float32)).all(axis=(2, 3))
    np.testing.assert_array_equal(lost, np.isnan(np.asarray(lse)).all(axis=1))
    np.testing.assert_array_equal(lost, [np.arange(70) == 5, np.full(70, True)])


def check_hidden_by_bias(dtype: str, run: Any) -> None:
    """Keys hidden by the numbers that masks are made of elsewhere: all of a row's, its first or its last tiles'."""
    floats = np.finfo(np.float32)
    numbers = (-1e4, -1e9, -1e10, -1e15, -1e30, -2e38, -0.7 * floats.max, floats.min)
    p = attention_cases.problem_of(Op.FORWARD, {"bias": "11TS"}, (64, 256), (64, 64), dtype, (1, 1))
    arrays = operands_of(p)
    for i, number in enumerate(numbers):
        for row, keys in enumerate((slice(0), slice(128), slice(128, None), slice(None))):
            arrays["bias"][..., 4 * i + row, keys] = number
    operands = [jnp.asarray(arrays[name]) for name in QKV]
    config = ForwardConfig(block_kv=64, warpgroups=1, rescale_threshold_log2=8)
    out, lse = run(lambda *a: forward.run(p, config, *a), *operands, jnp.asarray(arrays["bias"]))
    hidden = np.where(arrays["bias"] < -(2.0**27), -np.inf, arrays["bias"])
    truth = attention_oracle.forward(*operands, hidden, scale=p.scale)
    np.testing.assert_allclose(np.asarray(out, np.float64), truth.out, atol=0.01)
    np.testing.assert_allclose(lse, truth.lse, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_hidden_by_a_bias(dtype):
    check_hidden_by_bias(dtype, lambda f, *operands: f(*operands))


@pytest.mark.slow
def test_keys_hidden_by_a_bias_in_the_interpreter(interpreted):
    check_hidden_by_bias("bfloat16", interpreted)


@pytest.mark.slow
def test_tile_after_tile_in_the_interpreter(interpreted):
    p = problem_of("causal", (270, 200), (32, 16), "float16", heads=(2, 1))
    config = ForwardConfig(block_kv=64, warpgroups=2)
    assert tile_scheduler.assign(p, config, hardware.current().sm_count)[:, 0].tolist() == [6, 6]
    check(p, config, interpreted)


@pytest.mark.slow
def test_each_call_of_a_vmap_has_a_tile_counter_in_the_interpreter(interpreted):
    p = dataclasses.replace(problem_of("mask-of-rows", (270, 60), (32, 16), "bfloat16", heads=(1, 1)), batch=1)
    config = ForwardConfig(block_kv=64, warpgroups=1, scheduler="dynamic")
    arrays = operands_of(dataclasses.replace(p, batch=2))
    both = [jnp.asarray(x if name == "mask" else x[:, None]) for name, x in arrays.items()]
    axes = [None if name == "mask" else 0 for name in arrays]
    out, _ = interpreted(jax.vmap(lambda *a: forward.run(p, config, *a), in_axes=axes), *both)
    truth = attention_oracle.forward(*(arrays[name] for name in QKV), **rules_of(p, arrays))
    np.testing.assert_allclose(np.asarray(out, np.float64)[:, 0], truth.out, atol=0.02)


ENDS = [kind for kind in KINDS if kind.startswith("ends")]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_extreme_lengths(kind, head_dim):
    p = problem_of(kind, (600, 701), (head_dim, head_dim), "bfloat16", heads=(2, 1))
    p = dataclasses.replace(p, **EVERY_LENGTH)
    check(p, whole(p), sequences="extreme")


def copied_biases() -> list[Attention]:
    """Biases in tiles that TMA copies, and some that it does not."""
    shapes, dims = (
        itertools.cycle(("1NTS", "B1TS", "BNTS", "11TS")),
        ((64, 64), (128, 128), (256, 256), (192, 128), (40, 72)),
    )
    found = []
    for lengths in ((200, 320), (1000, 512), (69, 320), (72, 1003), (1, 64)):
        for of_heads, dtype in itertools.product(dims, ("float32", "bfloat16", "float16")):
            kind = {"bias": next(shapes), "bias_dtype": jnp.dtype(dtype)}
            if len(found) % 3 == 0:
                kind |= {"causal_offset": 3, "sinks": True}
            found.append(attention_cases.problem_of(Op.FORWARD, kind, lengths, of_heads, "bfloat16", (4, 2)))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("p", copied_biases(), ids=lambda p: f"{name_of(p)}-{p.bias_dtype}-{p.bias}")
def test_biases(p):
    check(p, whole(p))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_biases_are_copied_where_they_fit(dims, dtype):
    kind = {"bias": "1NTS", "bias_dtype": jnp.dtype(dtype)}
    p = attention_cases.problem_of(Op.FORWARD, kind, (2048, 2048), dims, "bfloat16", (4, 2))
    config = whole(p)
    assert config.bias_stages or (dims, dtype) == ((256, 256), "float32")


@pytest.mark.aot
@pytest.mark.parametrize("dims", [(128, 64), (96, 96), (80, 80)])
def test_products_that_overwrite_read_what_mosaics_read(dims):
    """The descriptors of the same tiles but for their addresses: strides, and swizzles of 128, 64 and 32 bytes."""
    p = problem_of("full", (512, 512), dims, "float16")
    config = ForwardConfig(block_kv=128, warpgroups=2)
    mosaics, ours = (compiled(p, dataclasses.replace(config, zero_init_free=x)).ptx for x in (False, True))

    def layouts(ptx):
        return {int(number) >> 14 for number in re.findall(r"(?:or|add)[.][bs]64 .*, (-?\d{15,});", ptx)}

    assert layouts(ours) == layouts(mosaics) != set()
    assert "setp.ne.b32 p, 0, 0" in ours
    assert "setp.ne.b32 p, 0, 0" not in mosaics


@pytest.mark.aot
@pytest.mark.parametrize(
    "dims, overlaps",
    [((64, 64), True), ((128, 128), True), ((256, 256), True), ((64, 64), False)],
)
def test_exponentials_overlap_products(dims, overlaps):
    p = problem_of("causal", (2048, 2048), dims, "bfloat16")
    config = whole(p)
    config = dataclasses.replace(
        config, overlap_pv=overlaps, early_exp_columns=config.early_exp_columns if overlaps else 0
    )
    code = aot.machine_code(compiled(p, config))
    begun = code.index("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    beside = code[begun : code.index("WARPGROUP.DEPBAR.LE gsb0, 0x0", begun)].count("MUFU.EX2")
    assert beside > 3 / 4 * config.block_kv / 2 if overlaps else beside < config.block_kv / 4


def unlike_weights(ptx: str) -> int:
    """How many weights are not one product less a number, rounded once: exponentials of what else a register holds."""
    made = dict(re.findall(r"^\s+(?:@\S+ )?[a-z0-9_.]+\s+(%r\d+), (.*);", ptx, re.MULTILINE))
    by = {name: word for word, name in re.findall(r"^\s+([a-z0-9_.]+)\s+(%r\d+), ", ptx, re.MULTILINE)}
    powers = re.findall(r"ex2[a-z0-9.]* %r\d+, (%r\d+);", ptx)
    assert made
    # Decays of a maximum by another are no products, two for each place of a tile; a product less 0 is one rounding.
    return sum(not by[power].startswith(("fma.rn", "mul.rn")) for power in powers)


@pytest.mark.aot
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_weights_are_contracted_alike_wherever_a_tile_is_visited(head_dim):
    """In a walk's first tile, in a later one, and where another row's maximum has grown."""
    p = problem_of("causal-later", (512, 640), (head_dim, head_dim), "bfloat16")
    p = dataclasses.replace(p, batch_invariant=True)
    report = compiled(p, whole(p))
    assert unlike_weights(report.ptx) <= 4
    if head_dim == 64:
        left_to_compilers = dataclasses.replace(p, batch_invariant=False)
        config = whole(p)
        assert unlike_weights(compiled(left_to_compilers, config).ptx) > 4


def test_spans_of_long_sequences():
    length = 2**20
    p = problem_of("full", (length, length), (64, 64), "bfloat16")
    span = jax.jit(lambda row: mask.kv_range(p, 128, row, 64, length, length))(jnp.int32(0))
    assert (int(span.first), int(span.end)) == (0, length // 128)
