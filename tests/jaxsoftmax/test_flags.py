"""JAX's switches, its next implementations of differentiation, and the rarer transformations."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 5)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 5)), jnp.float32)
OPS = {"softmax": (jaxsoftmax.softmax, jax.nn.softmax), "log_softmax": (jaxsoftmax.log_softmax, jax.nn.log_softmax)}


@pytest.fixture(
    params=["jax_custom_jvp3", "jax_custom_vjp3", "jax_remat3", "jax_numpy_rank_promotion", "jax_numpy_dtype_promotion"]
)
def flag(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.param
    before = getattr(jax.config, name)
    jax.config.update(
        name, {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}.get(name, True)
    )
    yield name
    jax.config.update(name, before)


@pytest.mark.parametrize("op", OPS)
def test_under_a_flag(flag: str, op: str) -> None:
    def both(f: object) -> tuple[jax.Array, ...]:
        loss = lambda x: (jnp.sin(f(x)) * W).sum()
        remat = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names("softmax_out"))
        return (
            jax.grad(loss)(X),
            jax.grad(remat)(X),
            jax.jvp(jax.checkpoint(f), (X,), (W,))[1],
            jax.jvp(jax.grad(loss), (X,), (W,))[1],
            jax.grad(lambda x: jax.lax.scan(lambda c, r: (c + jnp.sin(f(r)).sum(), None), 0.0, x)[0])(X),
        )

    ours, theirs = (jax.jit(both, static_argnums=0)(f) for f in OPS[op])
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_strict_promotion_of_16_bit(flag: str, op: str) -> None:
    x = X.astype(jnp.bfloat16)
    mask = X > -1
    y, vjp = jax.vjp(functools.partial(OPS[op][0], where=mask, scale=0.5), x)
    assert y.dtype == vjp(y)[0].dtype == jnp.bfloat16
    assert jaxsoftmax.logsumexp(x, -1, where=mask[0]).dtype == jnp.bfloat16
    assert jax.grad(lambda x: jaxsoftmax.logsumexp(x, where=mask[0, 0]))(x).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_cross_entropy_under_a_flag(flag: str, dtype: object) -> None:
    x, labels, w = X.astype(dtype), jnp.arange(12, dtype=jnp.int32).reshape(3, 4) % 6 - 1, jnp.abs(W[..., 0])
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 3.0, "ignore_index": -1, "scale": 0.5}

    def both(f: object) -> tuple[jax.Array, ...]:
        loss = lambda x: jnp.sin(f(x)).sum()
        return (
            f(x),
            jax.grad(loss)(x),
            jax.jvp(jax.checkpoint(f), (x,), (W.astype(dtype),))[1],
            jax.jvp(jax.grad(loss), (x,), (W.astype(dtype),))[1],
            jax.grad(lambda x: jax.lax.scan(lambda c, r: (c, jnp.sin(f(x)) + r), 0.0, w)[1].sum())(x),
        )

    def theirs(x: jax.Array) -> jax.Array:
        z = jnp.float32(3.0) * jnp.tanh(jnp.float32(0.5 / 3.0) * x.astype(jnp.float32))
        lse = jax.nn.logsumexp(z, -1)
        target = jnp.float32(0.9) * jax.nn.one_hot(labels, 5, dtype=jnp.float32) + jnp.float32(0.1 / 5)
        raw = lse - (target * z).sum(-1) + jnp.float32(0.1) * lse * lse
        return jnp.where(labels < 0, jnp.float32(0.0), w * raw)

    ours = functools.partial(
        jaxsoftmax.softmax_cross_entropy_with_integer_labels, labels=labels, weights=w, where=None, **options
    )
    for mine in (ours, lambda x: ours(x, return_lse=True)[0]):
        got, want = (jax.jit(both, static_argnums=0)(f) for f in (mine, theirs))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            error = 1e-3 if dtype == jnp.float32 else 3e-2
            np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=error, atol=error / 10)


def test_offloading_by_name() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["softmax_out"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    run = jax.checkpoint(jaxsoftmax.softmax, policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: (run(x) * W).sum()))(X))
    assert jaxpr.count("= softmax[") == 1
    assert "<host>" in jaxpr


def test_spmd_axis_name() -> None:
    mesh = jax.make_mesh((3,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:3])
    with jax.set_mesh(mesh):
        got = jax.jit(jax.vmap(jax.grad(lambda x: (jaxsoftmax.softmax(x) ** 2).sum()), spmd_axis_name="d"))(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(X), rtol=1e-4, atol=1e-6)
