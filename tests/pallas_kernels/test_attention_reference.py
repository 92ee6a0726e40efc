"""Attention's XLA program: how its products are written, what it holds in memory, and that its forms agree."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import reference, tiles
from pallas_kernels.attention.problem import Operands, Rules

RNG = np.random.default_rng(0)
NAMES = ("query", "key", "value")


def operands(t: int, s: int, *, lead: tuple[int, ...] = (2,), heads: int = 4, key_heads: int = 2) -> Operands:
    shapes = ((*lead, t, heads, 8), (*lead, s, key_heads, 8), (*lead, s, key_heads, 6))
    return Operands(*(jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes))


def everything(ops: Operands) -> Any:
    """Output, logsumexp, the gradients and the tangents."""
    rules = Rules(causal_offset=3, is_local=True)
    names = (*NAMES, *(name for name in ("bias", "sinks") if name in ops.present))

    @jax.jit
    def run(ops: Operands) -> Any:
        out, lse = reference.forward(ops, rules)
        shapes = {name: getattr(ops, name).shape for name in names}
        gradients = reference.backward(ops, rules, out, lse, jnp.cos(out), jnp.sin(out[..., 0].mT), shapes=shapes)
        moving = {name: jnp.cos(getattr(ops, name)) for name in names}
        return out, lse, gradients, reference.tangent(ops, rules, out, lse, moving)

    return run(ops)


close = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5))


@pytest.mark.parametrize("t, extra", [(1, "plain"), (3, "bias, mask and sinks")])
def test_few_rows_are_multiplied_otherwise_to_the_same_end(monkeypatch: pytest.MonkeyPatch, t: int, extra: str) -> None:
    ops = operands(t, 9)
    if extra != "plain":
        bias = jnp.asarray(RNG.normal(size=(1, 4, 1, 9)), jnp.float32)
        ops = ops._replace(bias=bias, mask=RNG.random((2, 1, t, 9)) < 0.7, sinks=jnp.arange(4.0)[None])
    few = everything(ops)
    monkeypatch.setattr(tiles, "FEW_ROWS", 0)
    close(few, everything(ops))


@pytest.mark.parametrize("tile, times", [(None, 4), ((512, 512), 1)], ids=["others", "GPU"])
def test_on_a_gpu_few_rows_meet_the_keys_of_their_own_head(tile: Any, times: int) -> None:
    ops = operands(2, 9, lead=(), heads=4, key_heads=4)
    forward = functools.partial(reference.forward, rules=Rules(is_local=True, tile=tile))
    text = jax.jit(forward).lower(ops).as_text()
    products = re.findall(r"stablehlo\.dot_general .*-> tensor<([0-9x]+)x", text)
    assert np.prod([int(n) for n in products[0].split("x")]) == times * 4 * 2 * 9


def test_few_rows_keep_heads_apart() -> None:
    """What is NaN or infinite in one key head stays there."""
    ops = operands(1, 9)
    spoilt = ops._replace(key=ops.key.at[0, 2, 1].set(jnp.nan), value=ops.value.at[1, 3, 1].set(jnp.inf))
    (out, lse, gradients, _), (want, want_lse, wanted, _) = everything(spoilt), everything(ops)
    assert not np.isfinite(out[:, :, 2:]).all()
    close((out[:, :, :2], lse[:, :2]), (want[:, :, :2], want_lse[:, :2]))
    close([g[:, :, : g.shape[2] // 2] for g in gradients], [g[:, :, : g.shape[2] // 2] for g in wanted])


@pytest.mark.parametrize("t, s, chunk", [(7, 11, 4), (1, 11, 5), (11, 2, 2)])
def test_chunks_of_any_size_agree(monkeypatch: pytest.MonkeyPatch, t: int, s: int, chunk: int) -> None:
    ops = operands(t, s)._replace(key_lengths=jnp.array([s, 0]), sinks=jnp.arange(4.0)[None])
    whole = everything(ops)
    monkeypatch.setattr(tiles, "CHUNK", chunk)
    close(whole, everything(ops))


def test_one_cotangent_for_all() -> None:
    """A cotangent, and a query, that are the same along a leading axis of the others."""
    ops = operands(5, 7, lead=(3,))
    ops = ops._replace(query=ops.query[:1])
    shared = ops._replace(key=ops.key[:1])
    d_out, d_lse = jnp.ones((1, 5, 4, 6)), jnp.full((1, 4, 5), 0.5)
    for each in (ops, shared):
        out, lse = reference.forward(each, Rules())
        shapes = {name: getattr(each, name).shape for name in NAMES}
        full = [jnp.broadcast_to(x, (3, *x.shape[1:])) for x in (d_out, d_lse)]
        got = reference.backward(each, Rules(), out, lse, d_out, d_lse, shapes=shapes)
        assert [g.shape for g in got] == list(shapes.values())
        close(got, reference.backward(each, Rules(), out, lse, *full, shapes=shapes))


def value_and_gradients(ops: Operands) -> Any:
    rules = Rules(is_local=True)
    out, lse = reference.forward(ops, rules)
    shapes = {name: getattr(ops, name).shape for name in NAMES}
    return out, reference.backward(ops, rules, out, lse, jnp.cos(out), jnp.zeros_like(lse), shapes=shapes)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_logits_are_never_transposed(key_heads: int) -> None:
    """XLA's CPU compiler would copy them: at 256 tokens that made the program slower than `jax.nn`'s."""
    text = jax.jit(value_and_gradients).lower(operands(24, 40, key_heads=key_heads)).as_text()
    moved = re.findall(r"stablehlo\.transpose .*-> tensor<([0-9x]+)x", text)
    assert moved
    sizes = [np.prod([int(n) for n in shape.split("x")]) for shape in moved]
    assert max(sizes) < 2 * 4 * 24 * 40


def test_one_query_is_one_tile() -> None:
    assert "stablehlo.while" not in jax.jit(value_and_gradients).lower(operands(1, 4096)).as_text()
