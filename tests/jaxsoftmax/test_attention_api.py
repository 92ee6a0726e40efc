"""`flash_attention`'s values: against the oracle over combinations of rules, and against `jax.nn`."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsoftmax
from pallas_kernels.attention import tiles
from tests import attention_oracle

Arguments = dict[str, Any]


def inputs(
    rng: np.random.Generator,
    *,
    batch: int = 2,
    queries: int = 5,
    keys: int = 7,
    heads: int = 4,
    shared: int = 2,
    dim: int = 8,
    value_dim: int = 8,
    dtype: Any = np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = (batch, queries, heads, dim), (batch, keys, shared, dim), (batch, keys, shared, value_dim)
    q, k, v = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return q, k, v


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[np.ndarray, ...], Arguments]:
    """Operands and arguments: any combination of what may be asked for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    batch, queries, keys = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 3, 8), (1, 4, 8)))
    shared, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    q, k, v = inputs(
        rng,
        batch=batch,
        queries=queries,
        keys=keys,
        heads=shared * group,
        shared=shared,
        value_dim=draw(st.sampled_from([8, 4])),
    )
    full = (batch, shared * group, queries, keys)

    def broadcast() -> tuple[int, ...]:
        return tuple(n if draw(st.booleans()) else 1 for n in full)

    arguments: Arguments = {}
    if draw(st.booleans()):
        arguments["bias"] = rng.normal(size=broadcast()).astype(np.float32)
    if draw(st.booleans()):
        kind = draw(st.sampled_from([np.bool_, np.int32, np.float32]))
        arguments["mask"] = (rng.random(broadcast()) < 0.7).astype(kind)
    if draw(st.booleans()):
        arguments["is_causal"] = True
    if draw(st.booleans()):
        side = st.sampled_from([None, 0, 1, 3])
        arguments["local_window_size"] = (draw(side), draw(side))
    if draw(st.booleans()):
        arguments["query_seq_lengths"] = rng.integers(0, queries + 1, batch)
    if draw(st.booleans()):
        arguments["key_value_seq_lengths"] = rng.integers(0, keys + 1, batch)
    if not {"query_seq_lengths", "key_value_seq_lengths"} & set(arguments):
        arguments["causal_alignment"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    if draw(st.booleans()):
        arguments["query_segment_ids"] = rng.integers(0, 2, (batch, queries))
        arguments["key_value_segment_ids"] = rng.integers(0, 2, (batch, keys))
    if draw(st.booleans()):
        arguments["logits_soft_cap"] = 1.5
    if draw(st.booleans()):
        arguments["sinks"] = rng.normal(size=shared * group).astype(np.float32)
    if draw(st.booleans()):
        arguments["scale"] = draw(st.sampled_from([0.5, 1.0, -2.0]))
    return (q, k, v), arguments


@pytest.fixture(params=[512, 3], ids=["one tile", "many tiles"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The reference's chunks; short ones make short lengths take its loops."""
    monkeypatch.setattr(tiles, "CHUNK", request.param)
    jax.clear_caches()
    return request.param


@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(__import__("hypothesis").HealthCheck)
)
@given(calls())
def test_values_and_gradients(chunk: int, call: tuple[tuple[np.ndarray, ...], Arguments]) -> None:
    operands, arguments = call
    rng = np.random.default_rng(1)
    floats = {name: arguments[name] for name in ("bias", "sinks") if name in arguments}
    rest = {name: x for name, x in arguments.items() if name not in floats}
    truth = attention_oracle.forward(*operands, **arguments)
    d_out, d_lse = (rng.normal(size=x.shape).astype(np.float32) for x in (truth.out, truth.lse))
    want = attention_oracle.gradients(*operands, d_out=d_out, d_lse=d_lse, **arguments)

    @jax.jit
    def both(operands: Any, floats: Any, d_out: jax.Array, d_lse: jax.Array) -> Any:
        call = lambda ops, floats: jaxsoftmax.flash_attention(*ops, **floats, **rest, return_residual=True)
        out, pull = jax.vjp(call, operands, floats)
        return out, pull((d_out, d_lse))

    (out, lse), (d_operands, d_floats) = both(operands, floats, d_out, np.swapaxes(d_lse, 1, 2))
    np.testing.assert_allclose(out, truth.out, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(lse, np.swapaxes(truth.lse, 1, 2), rtol=2e-4, atol=2e-5)
    got = dict(zip(("query", "key", "value"), d_operands, strict=True)) | d_floats
    assert set(got) == set(want)
    for name, gradient in got.items():
        np.testing.assert_allclose(gradient, want[name], rtol=5e-4, atol=5e-5, err_msg=name)
