"""`top_k_softmax` over the real kernels, on a Hopper GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax import top_k_softmax
from tests import top_k_oracle

pytestmark = pytest.mark.gpu

SELECT = jax.jit(top_k_softmax, static_argnums=1, static_argnames=("normalize", "scale", "implementation"))
NAMED = functools.partial(SELECT, implementation="mosaic_gpu")
CASES = [(8192, 32000, 64), (4096, 151936, 8), (1, 262144, 50), (64, 50257, 8), (33, 50261, 3), (8192, 128, 8)]
CASES += [(1, 32000, 64), (1, 32000, 1), (1, 262144, 64), (3, 50261, 8), (64, 128256, 1), (8192, 32000, 1)]


@pytest.mark.together("rows", "n", "k")  # XLA sorts gigabytes: not six times at once
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("normalize", ["all", "top_k"])
@pytest.mark.parametrize("rows, n, k", CASES)
def test_against_xla(rows: int, n: int, k: int, normalize: str, dtype: Any) -> None:
    x = (4 * jax.random.normal(jax.random.key(0), (rows, n))).astype(dtype)
    y, indices = NAMED(x, k, normalize=normalize)
    # A zero of either sign is the same logit, which XLA's orders do not all know.
    want = jax.jit(lambda x: jax.lax.top_k(jnp.where(x == 0, 0, x), k)[1])(x)
    np.testing.assert_array_equal(indices, want)
    some = np.s_[:: max(1, rows // 64)]
    top_k_oracle.check(lambda *_, **__: (y[some], indices[some]), x[some], k, normalize=normalize)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("n, k", [(300, 5), (1000, 16), (3000, 8), (32000, 64), (32000, 1), (50261, 256)])
def test_ties_and_holes(n: int, k: int, dtype: Any) -> None:
    x = top_k_oracle.rows(n, dtype)
    for normalize, scale in (("all", 1.0), ("top_k", 1.0), ("all", 0.3)):
        top_k_oracle.check(NAMED, jnp.asarray(x), k, normalize=normalize, scale=scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("n, k", [(3000, 1), (5003, 8), (32000, 64), (70000, 2)])
def test_ties_and_holes_of_few_rows(n: int, k: int, dtype: Any) -> None:
    """Which are not sorted but counted."""
    x = top_k_oracle.rows(n, dtype)
    for rows in np.split(x, len(x) // 2):
        for normalize, scale in (("all", 1.0), ("top_k", 0.3)):
            top_k_oracle.check(NAMED, jnp.asarray(rows), k, normalize=normalize, scale=scale)
    y, indices = NAMED(jnp.full((2, n), jnp.nan, dtype), k)
    assert np.isnan(y).all()
    assert ((indices >= 0) & (indices < n)).all()


@pytest.mark.parametrize("normalize", ["all", "top_k"])
def test_gradients(normalize: str) -> None:
    x = jax.random.normal(jax.random.key(1), (64, 32000))
    loss = lambda x, name: jnp.sin(50 * top_k_softmax(x, 8, normalize=normalize, implementation=name)[0]).sum()
    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(x, name) for name in ("mosaic_gpu", "xla"))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("d",), (None, "d")], ids=str)
def test_two_gpus(spec: tuple[str | None, ...], kind: str) -> None:
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((2,), ("d",), (getattr(jax.sharding.AxisType, kind),))
    x = jax.random.normal(jax.random.key(2), (64, 32000))
    cut = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    top_k_oracle.check(lambda x, k, **keywords: SELECT(cut, k, **keywords), x, 8)
    assert "all-gather" not in SELECT.lower(cut, 8).compile().as_text()
