"""`flash_attention` over the real kernels, on a Hopper GPU: against the oracle, as close as XLA's own program is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from tests import attention_oracle

pytestmark = pytest.mark.gpu

LENGTHS = {"query_seq_lengths": np.int32([200, 77]), "key_value_seq_lengths": np.int32([130, 239])}
IDS = np.sort(np.random.default_rng(9).integers(0, 4, (2, 239)))
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom right window": {"is_causal": True, "local_window_size": (50, 0), "causal_alignment": "bottom_right"},
    "lengths": LENGTHS,
    "bottom right lengths": LENGTHS | {"is_causal": True, "causal_alignment": "bottom_right"},
    "segments": {"is_causal": True, "query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "mask": {"mask": np.random.default_rng(8).random((2, 1, 239, 239)) < 0.5},
    "bias": {"bias": np.random.default_rng(7).normal(size=(1, 8, 239, 239)).astype(np.float32)},
    "sinks and cap": {"sinks": np.linspace(-1, 2, 8).astype(np.float32), "logits_soft_cap": 5.0},
}


def operands(dim: int, value_dim: int, dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(2, 239, heads, width)), dtype)
        for heads, width in ((8, dim), (2, dim), (2, value_dim), (8, value_dim))
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("dim, value_dim", [(64, 64), (128, 128), (100, 60), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name: str, dim: int, value_dim: int, dtype: Any) -> None:
    *qkv, d_out = operands(dim, value_dim, dtype)
    arguments = CALLS[name]
    arrays = {key: jnp.asarray(x) for key, x in arguments.items() if isinstance(x, np.ndarray)}
    floats = {key: x for key, x in arrays.items() if key in ("bias", "sinks")}
    others = {key: x for key, x in arrays.items() if key not in floats}
    static = {key: x for key, x in arguments.items() if key not in arrays}
    truth = attention_oracle.forward(*qkv, **arguments)
    want = {"out": truth.out, "lse": np.swapaxes(truth.lse, 1, 2)}
    want |= attention_oracle.gradients(*qkv, d_out=d_out, d_lse=np.ones_like(truth.lse), **arguments)

    # Operands are arguments: what is constant, XLA would compute while it compiles, and not on the GPU.
    def everything(implementation: str | None, qkv: Any, floats: Any, others: Any, d_out: Any) -> dict[str, jax.Array]:
        call = lambda qkv, floats: jaxsoftmax.flash_attention(
            *qkv, **floats, **others, **static, return_residual=True, implementation=implementation
        )
        (out, lse), pull = jax.vjp(call, qkv, floats)
        gradients, more = pull((d_out, jnp.ones_like(lse)))
        return {"out": out, "lse": lse} | dict(zip(("query", "key", "value"), gradients, strict=True)) | more

    run = jax.jit(everything, static_argnums=0)
    ours, theirs = (run(kind, qkv, floats, others, d_out) for kind in (None, "xla"))
    for part, exact in want.items():
        seen = np.isfinite(exact)
        for whose, found in (("ours", ours), ("xla", theirs)):
            np.testing.assert_array_equal(np.isfinite(np.asarray(found[part], np.float64)), seen, f"{whose} {part}")
        error, allowed = (np.abs(np.asarray(x[part], np.float64)[seen] - exact[seen]).max() for x in (ours, theirs))
        bound = 2 * allowed + float(jnp.finfo(dtype).eps) * np.abs(exact[seen]).max()
        assert error <= bound, f"{part}: error {error}, xla's {allowed}, bound {bound}"


def test_the_kernels_run() -> None:
    *qkv, _ = operands(128, 128, jnp.bfloat16)
    for op in ("forward", "vjp"):
        assert jaxsoftmax.explain_attention(*qkv, is_causal=True, op=op).implementation == "mosaic_gpu"
    text = jax.jit(lambda *a: jaxsoftmax.flash_attention(*a, implementation="mosaic_gpu")).lower(*qkv).as_text()
    assert "mosaic_gpu" in text


def test_transformations() -> None:
    *qkv, d_out = operands(64, 64, jnp.bfloat16)
    q, k, v = qkv
    qs = jnp.stack([q, -q, 2 * q])
    call = lambda q: jaxsoftmax.flash_attention(q, k, v, is_causal=True)
    mapped = jax.jit(jax.vmap(call))(qs)
    for got, x in zip(mapped, qs, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(call(x), np.float32), atol=2e-2)
    loss = lambda q: (call(q).astype(jnp.float32) * d_out.astype(jnp.float32)).sum()
    gradient, product = jax.jit(lambda q: jax.jvp(jax.grad(loss), (q,), (q,)))(q)
    xla = lambda q: (
        jaxsoftmax.flash_attention(q, k, v, is_causal=True, implementation="xla").astype(jnp.float32)
        * d_out.astype(jnp.float32)
    ).sum()
    for got, want in zip((gradient, product), jax.jit(lambda q: jax.jvp(jax.grad(xla), (q,), (q,)))(q), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("d",), (None, None, "d")], ids=str)
def test_two_gpus(spec: tuple[str | None, ...], kind: str) -> None:
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((2,), ("d",), (getattr(jax.sharding.AxisType, kind),))
    arrays = operands(128, 128, jnp.bfloat16)
    mask = jnp.asarray(CALLS["mask"]["mask"])
    run = jax.jit(
        lambda q, k, v, g: jax.vjp(lambda *x: jaxsoftmax.flash_attention(*x, mask=mask, is_causal=True), q, k, v)[1](g)
    )
    cut = jax.device_put(arrays, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    for found, alone in zip(run(*cut), run(*arrays), strict=True):
        np.testing.assert_allclose(np.float32(found), np.float32(alone), rtol=2**-7, atol=2**-7)
    hlo = run.lower(*cut).compile().as_text()
    assert not any(word in hlo for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
