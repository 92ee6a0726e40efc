"""What runs where no kernel of attention does: cuDNN with our semantics, XLA in tiles, and dropout in two passes."""

import dataclasses
import functools
from typing import Any, NamedTuple

import attention_cases
import attention_oracle
import cudnn_model
import errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention_backward
import test_attention_forward
from attention_cases import KINDS, QKV, operands_of, rules_of

from pallas_kernels import hardware
from pallas_kernels.attention import cudnn, dispatch, dropout, reference
from pallas_kernels.attention.problem import Attention, Op, Operands, Rules, operand_names

H100 = dataclasses.replace(hardware.H200, name="NVIDIA H100 80GB HBM3")
A100 = hardware.Device("NVIDIA A100-SXM4-40GB", "8.0", 108, 163 * 2**10)
LENGTHS = {"causal-later": (130, 200), "window-nothing": (40, 70)}
BY_ARGUMENT = {"bias_dtype": jnp.dtype("bfloat16"), "lse_gradient": False}


def problem_of(op: Op, kind: str, **more: Any) -> Attention:
    facts = BY_ARGUMENT | KINDS[kind] | more
    lengths = more.pop("lengths", LENGTHS.get(kind, (64, 96)))
    facts.pop("lengths", None)
    return attention_cases.problem_of(op, facts, lengths, (16, 16), "bfloat16", (4, 2))


def check_forward(p: Attention, run: Any) -> None:
    arrays = operands_of(p)
    truth = attention_oracle.forward(*(arrays[name] for name in QKV), arrays.get("bias"), **rules_of(p, arrays))
    out, lse = map(np.asarray, run(*map(jnp.asarray, arrays.values())))
    if p.dtype == jnp.float32:
        np.testing.assert_allclose(out, truth.out, atol=1e-5, rtol=1e-5)
    else:
        errors.assert_rows_accurate(out, test_attention_forward.rounded(p, arrays, truth), truth.out)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(truth.lse))
    seen = ~np.isneginf(truth.lse)
    np.testing.assert_allclose(lse[seen], truth.lse[seen], rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].get("soft_cap")])
@pytest.mark.parametrize("op", Op)
def test_cudnn_on_gpu(op: Op, kind: str) -> None:
    p = problem_of(op, kind, lengths=(192, 192) if kind == "window-left" else (128, 192))
    if op is Op.FORWARD:
        check_forward(p, jax.jit(functools.partial(cudnn.forward, p, None)))
    else:
        test_attention_backward.check(p, jax.jit(functools.partial(cudnn.backward, p, None)))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 128, 192, 200])
def test_logits_far_below_zero_on_gpu(keys: int) -> None:
    check_far_below_zero(keys)


@pytest.mark.parametrize("keys", [64, 192])
def test_logits_far_below_zero(keys: int, cudnn_by_numpy: None) -> None:
    check_far_below_zero(keys, run=lambda f: f)


def check_far_below_zero(keys: int, run: Any = jax.jit) -> None:
    """Of such rows exp(-lse) overflows."""
    p = problem_of(Op.BACKWARD, "full", lengths=(128, keys), scale=1.0)
    rng = np.random.default_rng(0)
    q, k = (np.full((2, n, heads, 16), sign, np.float32) for n, heads, sign in ((128, 4, 4.0), (keys, 2, -4.0)))
    v, d_out = rng.standard_normal((2, keys, 2, 16)), rng.standard_normal((2, 128, 4, 16))
    q, k, v, d_out = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, d_out))
    out, lse = run(functools.partial(cudnn.forward, dataclasses.replace(p, op=Op.FORWARD), None))(q, k, v)
    np.testing.assert_allclose(lse, -256 + np.log(keys), atol=1e-3)
    found = run(functools.partial(cudnn.backward, p, None))(q, k, v, out, lse, d_out, jnp.zeros_like(lse))
    want = attention_oracle.gradients(*(np.asarray(x, np.float64) for x in (q, k, v)), d_out=d_out, scale=1.0)
    for name, x in zip(QKV, found, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), want[name], atol=0.15, err_msg=name)


@pytest.fixture
def cudnn_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.ffi, "ffi_call", cudnn_model.ffi_call)


REFUSED = {"soft-cap": "no soft cap", "everything": "no soft cap"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", Op)
def test_cudnn_has_our_semantics(op: Op, kind: str, cudnn_by_numpy: None) -> None:
    for more in ({}, {"scale": -0.4}):
        p = problem_of(op, kind, **more)
        reason = cudnn.unsupported(p, H100)
        assert (reason is None) == (kind not in REFUSED), reason
        if reason is not None:
            assert REFUSED[kind] in reason
        elif op is Op.FORWARD:
            check_forward(p, functools.partial(cudnn.forward, p, None))
        else:
            test_attention_backward.check(p, functools.partial(cudnn.backward, p, None))


@pytest.mark.parametrize("bias", ["BNTS", "1NTS", "B1TS", "11TS"])
def test_cudnn_gives_the_gradient_of_a_bias(bias: str, cudnn_by_numpy: None) -> None:
    for kind in ("full", "mask", "window", "lengths"):
        p = problem_of(Op.BACKWARD, kind, bias=bias, bias_gradient=True)
        test_attention_backward.check(p, functools.partial(cudnn.backward, p, None))


def test_biases_that_hide(cudnn_by_numpy: None) -> None:
    """A row of only -inf sees nothing; one of only -1e9 has a logsumexp of which cuDNN takes no exponential."""
    p = problem_of(Op.BACKWARD, "full", bias="11TS")
    bias = np.zeros((1, 1, 64, 96), np.float32)
    bias[..., 3, :], bias[..., 5, :], bias[..., 7, 1:] = -np.inf, -100.0, -np.inf
    arrays = operands_of(dataclasses.replace(p, bias=None)) | {"bias": bias.astype(p.dtype)}
    given = [jnp.asarray(arrays[name]) for name in operand_names(p)]
    out, lse = cudnn.forward(dataclasses.replace(p, op=Op.FORWARD), None, *given)
    truth = attention_oracle.forward(*(arrays[x] for x in QKV), bias, **rules_of(p, arrays))
    np.testing.assert_allclose(out.astype(np.float32), truth.out, atol=2e-2)
    np.testing.assert_allclose(lse, truth.lse, rtol=1e-5, atol=1e-5)
    rng = np.random.default_rng(1)
    d_out = rng.standard_normal(out.shape).astype(p.dtype)
    d_out[:, 3] = np.nan
    found = cudnn.backward(p, None, *given, out, lse, jnp.asarray(d_out), jnp.zeros_like(lse))
    want = attention_oracle.gradients(*(arrays[x] for x in QKV), bias, d_out=d_out, **rules_of(p, arrays))
    for name, x in zip(QKV, found, strict=True):
        np.testing.assert_allclose(x.astype(np.float32), want[name], atol=8e-2, err_msg=name)


def test_what_cudnn_does_not_take() -> None:
    plain = problem_of(Op.FORWARD, "full")
    back = dataclasses.replace(plain, op=Op.BACKWARD)
    wrong: list[tuple[Attention, hardware.Device, str]] = [
        (dataclasses.replace(plain, dtype=jnp.dtype("float32")), A100, "takes float16 and bfloat16"),
        (dataclasses.replace(plain, head_dim=20), A100, "multiples of 8"),
        (dataclasses.replace(plain, head_dim=136, value_dim=136), A100, "up to 128"),
        (dataclasses.replace(plain, head_dim=264, value_dim=264), H100, "up to 256"),
        (dataclasses.replace(plain, value_dim=8), A100, "another width"),
        (dataclasses.replace(plain, batch=0), A100, "nothing to do"),
        (dataclasses.replace(plain, scale=0.0), A100, "scale of 0"),
        (dataclasses.replace(plain, batch_invariant=True), A100, "batch invariant"),
        (dataclasses.replace(plain, keep=(1, 1, 64, 96)), A100, "not given keep"),
        (dataclasses.replace(plain, cap=True), A100, "no soft cap"),
        (dataclasses.replace(plain, window_sizes=True), A100, "cuDNN takes a window that is a constant"),
        (dataclasses.replace(plain, page_size=16), A100, "not given block_tables"),
        (dataclasses.replace(plain, bias=(1, 1, 64, 96), bias_dtype=jnp.dtype("float32")), A100, "operands' dtype"),
        (dataclasses.replace(back, deterministic=True), A100, "repeat bit by bit"),
        (dataclasses.replace(back, lse_gradient=True), A100, "no gradient of the logsumexp"),
        (dataclasses.replace(back, query_length=1, key_length=1), A100, "one query and one key"),
        (dataclasses.replace(back, mask=(1, 1, 64, 97), key_length=97), A100, "even lengths"),
        (problem_of(Op.BACKWARD, "bias-of-rows", bias_gradient=True), A100, "for all queries and keys"),
    ]
    old = dataclasses.replace(A100, compute_capability="7.5")
    assert "needs compute capability 8.0" in (cudnn.unsupported_device(old) or "")
    assert cudnn.unsupported_device(A100) is None
    for p, device, reason in wrong:
        assert reason in (cudnn.unsupported(p, device) or ""), (reason, cudnn.unsupported(p, device))
    assert cudnn.unsupported(plain, A100) is None
    assert cudnn.unsupported(back, A100) is None


def test_an_operand_that_cudnn_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_TAKEN", cudnn._TAKEN - {"sinks"})
    assert cudnn.unsupported(problem_of(Op.FORWARD, "sinks"), H100) == "cuDNN is not given sinks"


def tiled(p: Attention, tile: tuple[int, int] | None) -> Rules:
    return Rules(**p.of_kernels, tile=tile)


class Reference(NamedTuple):
    """A decision whose kernel is the reference."""

    problem: Attention
    tile: tuple[int, int] | None = None

    def run(self, *operands: jax.Array) -> Any:
        p, names = self.problem, operand_names(self.problem)
        given = Operands(**dict(zip(names, operands, strict=False)))
        given = given if given.sinks is None else given._replace(sinks=given.sinks[None])
        if p.op is Op.FORWARD:
            return reference.forward(given, tiled(p, self.tile))
        wanted = ["query", "key", "value", *["bias"] * p.bias_gradient, *["sinks"] * p.sinks]
        shapes = {name: getattr(given, name).shape for name in wanted}
        found = reference.backward(given, tiled(p, self.tile), *operands[len(names) :], shapes=shapes)
        return [x[0] if name == "sinks" else x for name, x in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("tile", [(10**9, 10**9), (17, 10**9), (10**9, 31), (17, 31)])
@pytest.mark.parametrize(
    "kind", ["full", "causal-earlier", "everything", "lengths", "bias", "sinks", "positions-window"]
)
def test_tiles_of_xla(kind: str, tile: tuple[int, int]) -> None:
    """XLA's tiles on a GPU, whole rows among them, whose gradients do not read the logsumexp."""
    p = dataclasses.replace(problem_of(Op.FORWARD, kind, bias_dtype=jnp.dtype("float32")), dtype=jnp.dtype("float32"))
    check_forward(p, Reference(p, tile).run)
    back = dataclasses.replace(p, op=Op.BACKWARD, bias_gradient=p.bias is not None)
    given, expected, _ = test_attention_backward.known(back)
    for (name, want), x in zip(
        expected.items(), Reference(back, tile).run(*map(jnp.asarray, given.values())), strict=True
    ):
        np.testing.assert_allclose(x, want, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("tile", [(10**9, 10**9), (17, 10**9), (17, 31)])
def test_tiles_whose_window_and_soft_cap_are_data(tile: tuple[int, int]) -> None:
    """They give what constants give; the cap's gradient is that of the whole formula."""
    p = problem_of(Op.FORWARD, "positions-window", soft_cap=0.9, window_offset=0)
    p = dataclasses.replace(p, dtype=jnp.dtype("float32"))
    constants = Operands(**{name: jnp.asarray(x) for name, x in operands_of(p).items()})
    data = constants._replace(window_sizes=jnp.array([p.window], jnp.int32), cap=jnp.array([p.soft_cap]))
    rules = Rules(**p.of_kernels | {"soft_cap": None, "window": (None, None)}, tile=tile)
    out, lse = want = reference.forward(constants, tiled(p, tile))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, reference.forward(data, rules), want)

    d_out, d_lse = jnp.cos(out), jnp.where(jnp.isfinite(lse), 0.5, 0.0)
    shapes = {name: getattr(data, name).shape for name in ("query", "key", "value")}
    expected = reference.backward(constants, tiled(p, tile), *want, d_out, d_lse, shapes=shapes)
    *found, of_cap = reference.backward(data, rules, *want, d_out, d_lse, shapes=shapes | {"cap": (1,)})
    jax.tree.map(close, tuple(found), expected)
    whole = lambda cap: reference.forward(data._replace(cap=cap), dataclasses.replace(rules, tile=None))
    (pulled,) = jax.vjp(whole, data.cap)[1]((d_out, d_lse))
    assert np.abs(pulled) > 0.1
    np.testing.assert_allclose(of_cap, pulled, rtol=1e-4)


def test_tiles_that_fit() -> None:
    device = dataclasses.replace(A100, memory=6 * 4 * 2**30)
    assert dispatch.xla_tile(16, 8192, 8192, device) == (8192, 8192)
    assert dispatch.xla_tile(17, 8192, 8192, device) == (2**30 // 17 // 8192, 8192)
    assert dispatch.xla_tile(2**20, 8192, 8192, device) == (512, 512)
    assert dispatch.xla_tile(2**20, 1, 2**20, device) == (1, 1024)
    assert dispatch.xla_tile(0, 5, 7, device) == (5, 7)


DROPPED = ["full", "causal", "mask", "lengths", "sinks", "bias", "window-nothing", "segments"]


@pytest.mark.parametrize("kind", DROPPED)
@pytest.mark.parametrize("shape", ["11TS", "BNTS"])
def test_dropout_in_two_passes(kind: str, shape: str) -> None:
    check_dropout(kind, shape, lambda p: dropout.passes(lambda p, _: Reference(p), p, H100), jnp.float32, 2e-5)  # type: ignore


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DROPPED)
@pytest.mark.parametrize("shape", ["11TS", "BNTS"])
def test_dropout_on_gpu(kind: str, shape: str) -> None:
    check_dropout(kind, shape, lambda p: dispatch.decide(p, hardware.current(), named=True).config, jnp.bfloat16, 5e-2)


def check_dropout(kind: str, shape: str, passes_of: Any, dtype: Any, most: float) -> None:
    """Output and gradients against the formulas in float64, with a row of which all is dropped."""
    sizes = dict(zip("BNTS1", (2, 4, *LENGTHS.get(kind, (64, 96)), 1), strict=True))
    of_bias = {"bias_dtype": jnp.dtype(dtype), "bias_gradient": kind == "bias"}
    p = problem_of(Op.BACKWARD, kind, keep=tuple(sizes[x] for x in shape), **of_bias)
    p = dataclasses.replace(p, dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(3)
    keep = rng.random(p.keep) < 0.7
    keep[..., 2, :] = False
    arrays = operands_of(dataclasses.replace(p, keep=None)) | {"keep": keep.astype(np.int8)}
    arrays = {name: arrays[name] for name in operand_names(p)}
    ahead = dataclasses.replace(p, op=Op.FORWARD)
    given = [jnp.asarray(x) for x in arrays.values()]
    out, lse = jax.jit(functools.partial(dropout.forward, ahead, passes_of(ahead)))(*given)

    rules, qkv = rules_of(p, arrays), [np.nan_to_num(arrays[x].astype(np.float64)) for x in QKV]
    truth = attention_oracle.forward(*qkv, arrays.get("bias"), **rules)
    values, keys = (np.repeat(x, p.group, 2) for x in (qkv[2], qkv[1]))
    stays = truth.weights * keep
    want = np.einsum("bnts,bsnd->btnd", stays, values)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=most)
    np.testing.assert_allclose(lse, truth.lse, rtol=2e-5, atol=2e-5)

    d_out, d_lse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    alive = np.isfinite(truth.lse)
    d_out, d_lse = np.where(np.swapaxes(alive, 1, 2)[..., None], d_out, 0), np.where(alive, d_lse, 0)
    pull = np.einsum("btnd,btnd->bnt", d_out, want) - d_lse
    d_z = truth.weights * (keep * np.einsum("btnd,bsnd->bnts", d_out, values) - pull[..., None])
    fewer = lambda x: x.reshape(*x.shape[:2], -1, p.group, x.shape[-1]).sum(3)
    expected = {
        "query": p.scale * np.einsum("bnts,bsnh->btnh", d_z, keys),
        "key": fewer(p.scale * np.einsum("bnts,btnh->bsnh", d_z, qkv[0])),
        "value": fewer(np.einsum("bnts,btnd->bsnd", stays, d_out)),
    }
    if kind == "bias":
        expected["bias"] = d_z
    if kind == "sinks":
        expected["sinks"] = -(np.exp(arrays["sinks"][None, :, None] - np.where(alive, truth.lse, np.inf)) * pull).sum(
            (0, 2)
        )
    cotangents = jnp.asarray(d_out, dtype), jnp.asarray(d_lse, jnp.float32)
    found = jax.jit(functools.partial(dropout.backward, p, passes_of(p)))(*given, out, lse, *cotangents)
    for (name, x), y in zip(expected.items(), found, strict=True):
        np.testing.assert_allclose(np.asarray(y, np.float64), x, atol=most * max(1, np.abs(x).max()), err_msg=name)


def test_dropout_needs_both_kernels() -> None:
    p = problem_of(Op.FORWARD, "full", keep=(1, 1, 64, 96))
    decide = functools.partial(dispatch.decide, named=True)
    assert decide(p, hardware.H200).kernel == "attention_twice"
    assert dispatch.decide(p, hardware.H200).kernel is None
    wide = dataclasses.replace(p, head_dim=264)
    (name, why), *rest = decide(wide, hardware.H200).declined
    assert name == "attention_twice"
    assert "up to 256" in why
    assert not rest
    (_, why), *_ = decide(p, A100).declined
    assert "compiled for 9.0" in why


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("mask, heads, visits_hidden", [("B1TS", 33, True), ("B1TS", 34, False), (None, 33, False)])
def test_hidden_tiles_are_visited_where_a_mask_has_few(
    op: Op, mask: str | None, heads: int, visits_hidden: bool
) -> None:
    """Eight blocks of 64 queries and keys for each of 132 SMs."""
    facts = {} if mask is None else {"mask": mask}
    problem = attention_cases.problem_of(op, facts, (512, 256), (64, 64), "bfloat16", (heads, 1), 1)
    for kernel in dispatch.KERNELS[op].values():
        if kernel.implementation == "mosaic_gpu":
            assert {config.visits_hidden for config in kernel.configs(problem, hardware.H200)} == {visits_hidden}, (
                kernel.name
            )
