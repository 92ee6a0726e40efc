"""The backward attention kernel against NumPy in float64, beside XLA's gradients in the operands' own 16 bits."""

import dataclasses
import functools
import itertools
from typing import Any

import attention_cases
import attention_oracle
import documents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QKV, SEQUENCES, abstract, name_of, operands_of, rules_of

from pallas_kernels import hardware
from pallas_kernels.attention import backward_xla, dispatch
from pallas_kernels.attention.problem import Attention, BackwardConfig, Op

LENGTHS = ((1, 1), (3, 1), (1, 399), (63, 64), (113, 239), (128, 128), (239, 113), (399, 512), (512, 399))
DIMS = ((64, 64), (128, 128), (72, 40), (8, 8), (32, 128), (96, 96))
WIDE = ((256, 256), (192, 128), (160, 256), (256, 64), (136, 8))
KINDS: dict[str, dict[str, Any]] = attention_cases.KINDS | {
    "shared-bias": {"bias": "1NTS"},
    "capped-bias": {"bias": "BNTS", "soft_cap": 2.0},
    "capped-bias-of-heads": {"bias": "1N11", "soft_cap": 2.0, "causal_offset": 0},
    "capped-bias-without-gradient": {"bias": "11TS", "soft_cap": 2.0, "bias_gradient": False},
}


def problem_of(
    kind: str,
    lengths: tuple[int, int],
    dims: tuple[int, int],
    dtype: str,
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    **more: Any,
) -> Attention:
    facts = {"bias_gradient": "bias" in KINDS[kind]} | KINDS[kind] | more
    return attention_cases.problem_of(Op.BACKWARD, facts, lengths, dims, dtype, heads, batch)


def all_operands_of(p: Attention) -> list[Any]:
    """Operands of the right shapes, with statistics that belong to no forward."""
    rng, arrays = np.random.default_rng(1), operands_of(p)
    shape = p.batch, p.query_length, p.query_heads, p.value_dim
    out, d_out = (rng.standard_normal(shape).astype(p.dtype) for _ in range(2))
    lse = np.full((p.batch, p.query_heads, p.query_length), 8.0, np.float32)
    return [*arrays.values(), out, lse, d_out, 0 * lse]


def rounded_gradients(p: Attention, arrays: dict[str, Any], truth: Any, d_out: Any, d_lse: Any) -> dict[str, Any]:
    """The gradients with what XLA rounds to the operands' dtype rounded, without a soft cap."""
    group = p.query_heads // p.key_heads
    q, k, v, d_out = (np.nan_to_num(x.astype(np.float64)) for x in (*(arrays[n] for n in QKV), d_out))
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    alive = ~np.isneginf(truth.lse)
    pull = np.where(
        alive, np.einsum("btnd,btnd->bnt", d_out, truth.out.astype(p.dtype).astype(np.float64)) - d_lse, 0.0
    )
    d_scores = truth.weights * (attention_oracle.product("btnd,bsnd->bnts", d_out, v) - pull[..., None])
    weights, d_scores = (x.astype(p.dtype).astype(np.float64) for x in (truth.weights, d_scores))
    of_group = lambda x: x.reshape(*x.shape[:2], p.key_heads, group, -1).sum(3)
    found = {
        "query": (attention_oracle.product("bnts,bsnh->btnh", d_scores, k) * p.scale).astype(p.dtype),
        "key": of_group(attention_oracle.product("bnts,btnh->bsnh", d_scores, q) * p.scale).astype(p.dtype),
        "value": of_group(attention_oracle.product("bnts,btnd->bsnd", weights, d_out)).astype(p.dtype),
    }
    if p.bias:
        found["bias"] = d_scores.sum(tuple(d for d in range(4) if p.bias[d] == 1), keepdims=True).astype(p.dtype)
    return found


def decided(p: Attention, head_splits: int = 1) -> dispatch.Decision:
    """The kernel, however small the call, and its config, without the split of a group's heads for few tiles."""
    found = dispatch.decide(p, hardware.H200, named=True)
    if found.kernel is None:
        return found
    return dataclasses.replace(found, config=dataclasses.replace(found.config, head_splits=head_splits))


@functools.lru_cache(maxsize=1)
def compiled(p: Attention) -> Any:
    return jax.jit(decided(p).run)


@functools.lru_cache(maxsize=2)
def known(p: Attention, **patterns: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
    """Operands, gradients and by how much these may be missed: kept, as many faults are planted in one problem."""
    arrays, rng = operands_of(p, **patterns), np.random.default_rng(1)
    rules = rules_of(p, arrays)
    qkvb = [arrays[name] for name in QKV] + [arrays.get("bias")]
    truth = attention_oracle.forward(*qkvb, **rules)
    d_out = rng.standard_normal(truth.out.shape).astype(p.dtype)
    d_lse = rng.standard_normal(truth.lse.shape).astype(np.float32) * p.lse_gradient
    expected = attention_oracle.gradients(*qkvb, d_out=d_out, d_lse=d_lse, **rules)
    if not p.bias_gradient:
        expected.pop("bias", None)
    rounded = {} if p.soft_cap else rounded_gradients(p, arrays, truth, d_out, d_lse)
    residuals = {"out": truth.out.astype(p.dtype), "lse": truth.lse.astype(np.float32), "d_out": d_out, "d_lse": d_lse}
    operands = arrays | residuals
    if p.query_lengths:
        past = np.arange(p.query_length) >= arrays["query_lengths"][:, None]
        for name in ("query", "out", "d_out"):
            operands[name] = np.where(past[:, :, None, None], np.asarray(np.nan, p.dtype), operands[name])
    unseen = np.isneginf(truth.lse)
    operands["d_out"] = np.where(np.swapaxes(unseen, 1, 2)[..., None], np.asarray(np.nan, p.dtype), operands["d_out"])
    operands["d_lse"] = np.where(unseen, np.float32(np.nan), d_lse)
    bounds, eps = {}, float(jnp.finfo(p.dtype).eps)
    for name, x in expected.items():
        scale = np.abs(x).max(initial=0.0)
        if name in rounded:
            bounds[name] = 2 * np.abs(rounded[name].astype(np.float64) - x).max(initial=0.0) + eps * scale
        else:
            bounds[name] = 4 * eps * scale
    return operands, expected, bounds


def check(p: Attention, kernel: Any, run: Any = lambda f, *operands: f(*operands), **patterns: str) -> list[Any]:
    """Checks the gradients of `kernel`, a function of operands, on operands of these patterns."""
    operands, expected, bounds = known(p, **patterns)
    got = run(kernel, *operands.values())
    for name, x in zip(expected, got, strict=True):
        error = np.abs(np.asarray(x, np.float64) - expected[name]).max(initial=0.0)
        assert error <= bounds[name] + 1e-6, (name, error, bounds[name])
    return list(got)


@functools.lru_cache(maxsize=1)
def cases() -> list[Attention]:
    """Every kind at some lengths and sizes of heads, the plain kinds at all of them; ordered and not."""
    ordered = itertools.cycle((True, False))
    found = []
    for dims in (DIMS, WIDE):
        rotations = zip(KINDS, itertools.cycle(LENGTHS[4:]), itertools.cycle(dims), ordered, strict=False)
        found += [problem_of(kind, at, dims, "bfloat16", deterministic=flag) for kind, at, dims, flag in rotations]
    for kind in ("full", "causal"):
        found += [
            problem_of(kind, at, (256, 256), "float16", heads=(3, 1), deterministic=next(ordered)) for at in LENGTHS
        ]
        found += [
            problem_of(kind, at, (64, 64), "float16", heads=(6, 2), deterministic=next(ordered)) for at in LENGTHS
        ]
        found += [problem_of(kind, (239, 399), dims, "bfloat16", deterministic=next(ordered)) for dims in DIMS + WIDE]
    return list(dict.fromkeys(found))


@pytest.mark.gpu
@pytest.mark.parametrize("p", cases(), ids=name_of)
def test_matches_the_oracle(p):
    check(p, compiled(p))
    chosen = dispatch.decide(p, hardware.H200)
    if chosen.config.head_splits > 1:
        check(p, jax.jit(chosen.run))


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.together("kind", "deterministic", "head_dim")
@pytest.mark.parametrize("ids", documents.PATTERNS)
@pytest.mark.parametrize("kind", ["segments", "segments-causal"])
@pytest.mark.parametrize("deterministic, head_dim", [(True, 64), (False, 128), (True, 128), (True, 256)])
def test_segments_that_skip(kind, ids, deterministic, head_dim):
    dims, lengths = (head_dim, head_dim), (1500, 1501)
    p = problem_of(kind, lengths, dims, "bfloat16", heads=(3, 1), deterministic=deterministic)
    check(p, compiled(p), ids=ids)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_ordered_gradients_repeat_bit_by_bit(kind, head_dim):
    p = problem_of(kind, (1024, 2048), (head_dim, head_dim), "bfloat16", heads=(16, 8), deterministic=True)
    run, operands = compiled(p), [jnp.asarray(x) for x in all_operands_of(p)]
    first = [np.asarray(x).view(np.uint16) for x in run(*operands)]
    for _ in range(5):
        for a, b in zip(first, run(*operands), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b).view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_a_fused_cast_writes_what_is_summed_in_any_order(kind, head_dim):
    heads = (2048 // head_dim,) * 2
    p = problem_of(kind, (512, 512), (head_dim,) * 2, "bfloat16", heads, 32, deterministic=True)
    config = dataclasses.replace(decided(p).config, ordered_dq=False, fused_dq_cast=False)
    run, operands = compiled(p), [jnp.asarray(x) for x in all_operands_of(p)]
    expected = np.asarray(jax.jit(dispatch.decide(p, hardware.H200, config=config).run)(*operands)[0], np.float32)
    first = np.asarray(run(*operands)[0])
    np.testing.assert_allclose(first.astype(np.float32), expected, rtol=0, atol=2**-7 * np.abs(expected).max())
    # Without its fences, one call in fifty lacked what an earlier tile of keys had added to some rows.
    differs = jax.jit(lambda dq: (dq.view(jnp.uint16) != first.view(np.uint16)).any())
    assert not any([differs(run(*operands)[0]) for _ in range(400)])


EVERY_LENGTH = {"batch": len(SEQUENCES["extreme"](1, 1)), "query_lengths": True, "key_lengths": True, "heads": (1, 1)}
ORDERED, MASKED = {"deterministic": True}, {"heads": (2, 1)}
INTERPRETED: dict[str, tuple[Any, ...]] = {
    "ordered_dq": ("full", (40, 200), (64, 64), {"deterministic": True, "heads": (2, 2)}),
    "window": ("window", (130, 200), (64, 64), {"deterministic": True}),
    "bias": ("bias-of-heads", (140, 90), (64, 64), {"deterministic": True}),
    "one-tile-of-all": ("causal", (70, 120), (128, 128), {"deterministic": True, "heads": (1, 1)}),
    "later-ordered": ("causal-later", (130, 300), (128, 72), {"heads": (2, 1)}),
    "biased-ordered": ("bias", (70, 200), (96, 128), {"heads": (2, 2), "sinks": True}),
    "causal-ordered": ("causal", (140, 200), (128, 128), {"deterministic": True, "heads": (1, 1)}),
    "capped-bias": ("capped-bias", (90, 140), (128, 40), {"deterministic": True, "heads": (2, 2)}),
    "capped-bias-without-gradient": ("capped-bias-without-gradient", (70, 90), (96, 64), {"heads": (2, 1)}),
    "narrow-capped-bias": ("capped-bias-of-heads", (70, 90), (64, 64), {"deterministic": True}),
    "wide": ("full", (130, 70), (256, 256), {"deterministic": False, "heads": (1, 1)}),
    "wide-causal": ("causal", (70, 130), (192, 128), {"deterministic": True, "heads": (2, 1)}),
    "wide-bias": ("bias", (200, 70), (136, 64), {"deterministic": False, "heads": (1, 1)}),
    "extreme": ("lengths", (140, 200), (64, 64), EVERY_LENGTH, {"sequences": "extreme"}),
    "ends-ordered": ("ends", (140, 200), (128, 64), ORDERED | EVERY_LENGTH, {"sequences": "extreme"}),
    "window-ordered": ("ends-window", (140, 200), (64, 64), ORDERED | EVERY_LENGTH, {"sequences": "extreme"}),
    "ends-segments": ("ends-segments", (140, 200), (64, 64), ORDERED | EVERY_LENGTH, {"sequences": "extreme"}),
    "wide-ends": ("ends-window", (140, 200), (136, 64), EVERY_LENGTH, {"sequences": "extreme"}),
    "packed-ordered": ("segments-causal", (300, 300), (128, 64), ORDERED | {"heads": (2, 1)}, {"ids": "packed"}),
    "unsorted-ordered": (
        "segments", (330, 300), (64, 128), ORDERED | {"heads": (2, 1), "window": (150, 60)}, {"ids": "unsorted"}
    ),
    "few-lengths": (
        "segments", (300, 260), (64, 64), ORDERED | {"heads": (2, 1), "key_lengths": True, "query_lengths": True},
        {"ids": "few"},
    ),
    "unsorted-wide": ("segments-causal", (200, 200), (136, 64), {"heads": (2, 1)}, {"ids": "unsorted"}),
    "dynamic-mask-of-heads": ("mask-of-heads", (150, 390), (128, 64), {}, {"mask": "documents"}),
    "dynamic-keys-without-queries": (
        "mask", (150, 390), (64, 128), {"heads": (1, 1), "causal_offset": 30}, {"mask": "causal"}
    ),
    "dynamic-segments": ("segments-causal", (150, 390), (64, 64), {"heads": (2, 1)}, {"ids": "packed"}),
    "dynamic-lengths": (
        "segments", (150, 390), (128, 128), {"heads": (2, 1), "key_lengths": True, "query_lengths": True},
        {"ids": "unsorted"},
    ),
    "positions": ("positions", (140, 260), (128, 64), {"heads": (2, 1)}),
    "positions-ordered": ("positions-window", (140, 300), (64, 64), ORDERED | {"heads": (2, 1)}),
    "wide-positions": ("positions-window", (140, 200), (136, 64), {"heads": (1, 1)}),
    "mask-causal-ordered": ("full", (200, 150), (128, 64), ORDERED | MASKED | {"mask": "1NTS"}, {"mask": "causal"}),
    "mask-padding-ordered": (
        "full", (200, 150), (128, 64), ORDERED | MASKED | {"mask": "B11S", "window": (150, 60)}, {"mask": "padding"}
    ),
    "mask-of-rows": ("full", (200, 150), (64, 64), MASKED | {"mask": "1NT1", "soft_cap": 3.0}, {"mask": "scattered"}),
    "wide-mask-everything": (
        "full", (200, 150), (136, 64), MASKED | {"mask": "11TS", "causal_offset": 0}, {"mask": "everything"}
    ),
    "wide-mask-documents": ("full", (200, 150), (136, 64), ORDERED | MASKED | {"mask": "BNTS"}, {"mask": "documents"}),
    "dynamic-mask-nothing": ("full", (200, 150), (64, 64), MASKED | {"mask": "B111"}, {"mask": "nothing"}),
    "documents-with-all": (
        "lengths", (200, 150), (64, 64),
        ORDERED | MASKED | {"segments": True, "causal_offset": 100, "mask": "BNTS", "bias": "1NTS",
                            "bias_gradient": True},
        {"mask": "documents"},
    ),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_without_a_race(interpreted, name, monkeypatch):
    kind, lengths, dims, facts, *patterns = INTERPRETED[name]
    p = problem_of(kind, lengths, dims, "bfloat16", **facts)
    decision = decided(p)
    if decision.config.scheduler == "dynamic":
        monkeypatch.setattr(hardware, "current", lambda: dataclasses.replace(hardware.H200, sm_count=3))
    assert decision.config.scheduler == "dynamic" or not name.startswith("dynamic")
    check(p, decision.run, interpreted, **(patterns[0] if patterns else {}))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind, dims, heads, splits",
    [("causal", (128, 72), (6, 2), 3), ("lengths", (64, 64), (4, 1), 2), ("sinks", (136, 144), (4, 1), 4)],
)
def test_a_groups_heads_split_in_the_interpreter(kind, dims, heads, splits, interpreted):
    p = problem_of(kind, (70, 90), dims, "bfloat16", heads=heads)
    check(p, decided(p, splits).run, interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ends", "ends-window", "ends-segments"])
@pytest.mark.parametrize("deterministic, head_dim", [(True, 64), (False, 128), (True, 128), (True, 256)])
def test_extreme_lengths(kind, deterministic, head_dim):
    facts = EVERY_LENGTH | {"heads": (2, 1), "deterministic": deterministic}
    p = problem_of(kind, (400, 501), (head_dim, head_dim), "bfloat16", **facts)
    check(p, compiled(p), sequences="extreme")


@pytest.mark.slow
def test_keys_hidden_by_a_bias_in_the_interpreter(interpreted):
    """What masks are made of elsewhere is as good as -inf, for a row that has nothing else too."""
    p = problem_of("bias", (70, 64), (32, 32), "bfloat16", heads=(1, 1), batch=3)
    arrays = {name: np.array(x) for name, x in operands_of(p).items()}
    for array in arrays.values():
        array[:] = array[:1]
    for bias, number in zip(arrays["bias"], (-np.inf, -1e10, -1e30), strict=True):
        bias[:, 7, :], bias[:, 9, :40] = number, number
    bias = arrays["bias"].astype(np.float64)
    hidden = np.where(bias < -(2.0**27), -np.inf, bias)
    truth = attention_oracle.forward(*(arrays[name] for name in QKV), hidden, **rules_of(p, arrays))
    assert np.isneginf(truth.lse[..., 7]).all()
    out, lse = truth.out.astype(p.dtype), truth.lse.astype(np.float32)
    for got in interpreted(
        decided(p).run, *map(jnp.asarray, (*arrays.values(), out, lse, np.ones_like(out), np.ones_like(lse)))
    ):
        first, *others = np.asarray(got, np.float32)
        assert np.isfinite(first).all()
        for other in others:
            np.testing.assert_array_equal(other, first)


# Keys of one head that fill a device of so few SMs: what is decided then, and for heads of which sizes.
FILLED = dataclasses.replace(hardware.H200, sm_count=2)
FILLING = {
    "staggered": ((64, 64), {"staggered": True, "heads_per_l2_group": 1}),
    "heads_per_l2_group": ((128, 64), {"staggered": False, "heads_per_l2_group": 2}),
}


def filling(name: str, lengths: tuple[int, int], monkeypatch: Any, **facts: Any) -> tuple[Attention, dispatch.Decision]:
    dims, wanted = FILLING[name]
    of_more_keys = dataclasses.replace(dispatch.THRESHOLDS, dynamic_ordered_tiles=0)
    monkeypatch.setattr(dispatch, "THRESHOLDS", of_more_keys)
    p = problem_of("full", lengths, dims, "bfloat16", **facts)
    decision = dispatch.decide(p, FILLED)
    assert {knob: getattr(decision.config, knob) for knob in wanted} == wanted
    return p, decision


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(700, 700), (1003, 1500)])
@pytest.mark.parametrize("name", FILLING)
def test_keys_of_one_head_that_fill_the_device(name, lengths, monkeypatch):
    p, decision = filling(name, lengths, monkeypatch)
    check(p, jax.jit(decision.run))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILLING)
def test_keys_of_one_head_that_fill_the_device_in_the_interpreter(name, interpreted, monkeypatch):
    p, decision = filling(name, (300, 200), monkeypatch, heads=(2, 2), batch=1)
    check(p, decision.run, interpreted)


def with_bias(
    shape: str, dtype: str, lengths: tuple[int, int], dims: tuple[int, int], heads: tuple[int, int], **facts: Any
) -> Attention:
    kind = {"bias": shape, "bias_dtype": jnp.dtype(dtype), "bias_gradient": True} | facts
    return attention_cases.problem_of(Op.BACKWARD, kind, lengths, dims, "bfloat16", heads)


def copied_biases() -> list[Attention]:
    """Biases in tiles that TMA copies, and some that it does not."""
    shapes, found = itertools.cycle(("1NTS", "B1TS", "BNTS", "11TS")), []
    for lengths in ((200, 320), (1000, 512), (69, 320), (72, 1003), (8, 64), (7, 60)):
        for dims, dtype in itertools.product((*DIMS[:3], *WIDE[:2]), ("float32", "bfloat16", "float16")):
            facts = {"causal_offset": 3, "sinks": True} if len(found) % 3 == 0 else {}
            facts |= {"deterministic": len(found) % 2 == 0, "bias_gradient": len(found) % 5 > 0}
            found.append(with_bias(next(shapes), dtype, lengths, dims, (4, 2), **facts))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("p", copied_biases(), ids=lambda p: f"{name_of(p)}-{p.bias_dtype}-{p.bias}")
def test_biases(p):
    check(p, compiled(p))


# How many stages there is room for, and a problem that has more than one of whatever there can be more than one of.
COPIED: dict[str, tuple[int, Attention]] = {
    "two-stages": (2, with_bias("1NTS", "bfloat16", (264, 192), (128, 128), (2, 1))),
    "one-stage": (1, with_bias("BNTS", "float16", (264, 192), (64, 64), (2, 2))),
    "float32": (1, with_bias("1NTS", "float32", (136, 160), (128, 128), (2, 2), causal_offset=20)),
    "ordered": (1, with_bias("B1TS", "bfloat16", (136, 192), (128, 128), (2, 1), deterministic=True)),
    "lengths": (1, with_bias("BNTS", "bfloat16", (136, 192), (64, 64), (2, 1), key_lengths=True, query_lengths=True)),
    "segments": (2, with_bias("11TS", "bfloat16", (136, 192), (96, 128), (2, 1), segments=True)),
    "few-queries": (2, with_bias("1NTS", "bfloat16", (8, 64), (128, 128), (2, 1))),
    "wide": (2, with_bias("1NTS", "bfloat16", (136, 128), (256, 256), (2, 1))),
    "wide-float32": (1, with_bias("BNTS", "float32", (136, 96), (256, 256), (2, 1), deterministic=True)),
    "wide-capped": (2, with_bias("B1TS", "bfloat16", (136, 128), (136, 64), (2, 2), soft_cap=2.0)),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COPIED)
def test_biases_in_the_interpreter(name, interpreted, monkeypatch):
    stages, p = COPIED[name]
    of_more_keys = dataclasses.replace(dispatch.THRESHOLDS, dynamic_ordered_tiles=0)
    monkeypatch.setattr(dispatch, "THRESHOLDS", of_more_keys)
    assert decided(p).config.bias_stages == stages
    check(p, decided(p).run, interpreted)


@pytest.mark.parametrize("keys", [192, 200])
def test_only_what_tma_does_not_copy_is_transposed(keys):
    p = with_bias("1NTS", "bfloat16", (136, keys), (128, 128), (4, 2), bias_gradient=False)
    lowered = jax.jit(decided(p).run).trace(*abstract(p)).lower(lowering_platforms=("cuda",)).as_text()
    assert (f"tensor<1x4x{keys}x136xbf16>" in lowered) == (decided(p).config.bias_stages == 0) == (keys == 200)


# The wide kernel beside a bias that TMA copies, and the other one beside one that it does not.
@pytest.mark.parametrize("dims, keys", [((64, 64), 128), ((128, 128), 200)])
def test_a_bias_beside_a_soft_cap_lowers(dims, keys):
    """Its gradient leaves from registers, in pieces of 16 bytes."""
    p = with_bias("BNTS", "bfloat16", (136, keys), dims, (2, 2), soft_cap=2.0)
    assert jax.jit(decided(p).run).trace(*abstract(p)).lower(lowering_platforms=("cuda",))


@pytest.mark.slow
def test_each_call_of_a_vmap_has_a_tile_counter_in_the_interpreter(interpreted):
    p = problem_of("mask-of-rows", (70, 390), (64, 64), "bfloat16", heads=(1, 1), batch=1)
    names = list(operands_of(p))
    both = [jnp.stack([jnp.asarray(x), 2 * jnp.asarray(x)]) for x in all_operands_of(p)]
    axes = [None if i == names.index("mask") else 0 for i in range(len(both))]
    operands = [x[0] if axis is None else x for x, axis in zip(both, axes, strict=True)]
    got = interpreted(jax.vmap(decided(p).run, in_axes=axes), *operands)
    second = (x if axis is None else x[1] for x, axis in zip(operands, axes, strict=True))
    for a, b in zip(got, interpreted(decided(p).run, *second), strict=True):
        np.testing.assert_array_equal(np.asarray(a[1], np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    "kind, dims, more",
    [("bias", (128, 128), {"mask": (2, 1, 256, 512)}), ("segments-causal", (256, 256), {"key_lengths": True})],
)
def test_xla_makes_no_copy_of_the_cotangents(kind, dims, more):
    p = dataclasses.replace(problem_of(kind, (256, 512), dims, "bfloat16", heads=(4, 4)), **more)
    lowered = jax.jit(decided(p).run).trace(*abstract(p)).lower(lowering_platforms=("cuda",)).as_text()
    assert not [x for x in lowered.splitlines() if "stablehlo.select" in x and f"tensor<2x256x4x{dims[0]}xbf16>" in x]


@pytest.mark.parametrize("block_q", [64, 128])
def test_tiles_with_rows_without_keys(block_q):
    nothing = np.zeros((1, 2, 200), bool)
    nothing[0, 0, 63] = nothing[0, 1, 199] = True
    config = BackwardConfig(block_q, warpgroups=2, stages=2)
    found = backward_xla.tiles_without_keys(jnp.asarray(nothing), config)
    expected = {64: [[1, 0, 0, 0], [0, 0, 0, 1]], 128: [[1, 0], [0, 1]]}[block_q]
    np.testing.assert_array_equal(found, [expected])


@pytest.mark.parametrize("keys, passes", [(128, False), (512, True)])
def test_xla_passes_over_dq_only_where_the_kernel_does_not_write_it(keys, passes):
    p = problem_of("full", (256, keys), (64, 64), "bfloat16", heads=(4, 4))
    lowered = jax.jit(decided(p).run).trace(*all_operands_of(p)).lower(lowering_platforms=("cuda",))
    lines = [line for line in lowered.as_text().splitlines() if "= stablehlo." in line and "custom_call" not in line]
    assert any("tensor<2x4x256x64xf32>" in line for line in lines) == passes


@pytest.mark.parametrize("bias_gradient", [False, True])
def test_returns_the_gradient_of_a_bias_on_request(bias_gradient):
    p = problem_of("bias-of-heads", (64, 72), (64, 64), "bfloat16", sinks=True, bias_gradient=bias_gradient)
    found = jax.eval_shape(decided(p).run, *all_operands_of(p))
    wanted = [(2, 64, 4, 64), (2, 72, 2, 64), (2, 72, 2, 64), *[p.bias] * bias_gradient, (4,)]
    assert [x.shape for x in found] == wanted
    # The gradient of every logit is written for it alone.
    jaxpr = jax.make_jaxpr(decided(p).run)(*all_operands_of(p))
    assert ("bf16[2,4,72,64]" in str(jaxpr)) == bias_gradient


def test_declines_in_words():
    plain = problem_of("full", (64, 64), (64, 64), "bfloat16")
    at = lambda **facts: decided(dataclasses.replace(plain, **facts))
    assert (at().kernel, at().declined) == ("attention_gradients", ())
    wide = at(head_dim=256)
    assert (wide.kernel, [name for name, _ in wide.declined]) == ("attention_gradients_wide", ["attention_gradients"])
    assert "up to 128" in wide.declined[0][1]
    capped = at(bias=(1, 1, 64, 64), soft_cap=1.0)
    assert (capped.kernel, [name for name, _ in capped.declined]) == (wide.kernel, ["attention_gradients"])
    assert "a bias beside a soft cap with heads up to 64" in capped.declined[0][1]
    assert at(bias=(1, 1, 64, 64), soft_cap=1.0, head_dim=72).kernel == "attention_gradients"
    for facts, word in (({"dtype": jnp.dtype("float32")}, "float32"), ({"value_dim": 264}, "264")):
        none = at(**facts)
        assert none.kernel is None
        assert all(word in why for _, why in none.declined)
