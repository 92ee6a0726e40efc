"""The truth about top_k_softmax, in NumPy float64, and the check that its tests, and the tests of those, go by."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import errors, oracle

INF = np.inf


def top_k_softmax(x: Any, k: int, normalize: str = "all", scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and indices along the last axis, ordered by `scale * x` in the dtype of accumulation."""
    wide = np.float64 if np.asarray(x).dtype.itemsize == 8 else np.float32
    with np.errstate(invalid="ignore"):
        keys = np.asarray(x).astype(wide) * wide(scale)
    indices = np.argsort(-keys, axis=-1, kind="stable")[..., :k].astype(np.int32)
    if normalize == "all":
        return np.take_along_axis(oracle.softmax(x, scale=scale), indices, -1), indices
    y = oracle.softmax(np.take_along_axis(np.asarray(x), indices, -1), scale=scale)
    return np.where(np.isnan(keys).any(-1, keepdims=True), np.nan, y), indices


@functools.partial(jax.jit, static_argnums=(2, 3))
def in_xla(x: jax.Array, indices: jax.Array, normalize: str, scale: float) -> jax.Array:
    """The probabilities at `indices` by plain `jax.nn`, rounded once: what an error is measured against."""
    # Rounded before it is subtracted from.
    z = jax.lax.optimization_barrier(x.astype(jnp.promote_types(x.dtype, jnp.float32)) * scale)
    selected = jnp.take_along_axis(z, indices, -1)
    y = jax.nn.softmax(selected)
    if normalize == "all":
        y = jnp.take_along_axis(jax.nn.softmax(z), indices, -1)
    return jnp.where(jnp.isnan(z).any(-1, keepdims=True), jnp.nan, y).astype(x.dtype)


def check(function: Callable[..., Any], x: Any, k: int, *, normalize: str = "all", scale: float = 1.0) -> None:
    """The indices are the truth's, and the probabilities as near to it as twice XLA's."""
    got, indices = (np.asarray(part) for part in function(x, k, normalize=normalize, scale=scale))
    truth, expected = top_k_softmax(x, k, normalize, scale)
    assert indices.dtype == np.int32
    assert indices.shape == expected.shape, (indices.shape, expected.shape)
    has_order = ~np.isnan(np.asarray(x).astype(np.float64)).any(-1)
    np.testing.assert_array_equal(indices[has_order], expected[has_order], "indices")
    assert ((indices >= 0) & (indices < x.shape[-1])).all()
    errors.assert_accurate(got, in_xla(x, expected, normalize, scale), truth)


def rows(n: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """Rows of `n` logits: random ones, ties, one order and the other, and holes of every kind."""
    rng = np.random.default_rng((seed, n))
    normal = 4 * rng.normal(size=(8, n))
    few, infinite, unknown, clustered = normal[:4]
    few[rng.permutation(n)[3:]] = -INF
    infinite[rng.integers(n)] = INF
    unknown[rng.integers(n)] = np.nan
    clustered[n // 2 : n // 2 + 40] += 30
    ties = rng.integers(-1, 3, (3, n)).astype(np.float64)
    ties[2, rng.random(n) < 0.5] = -INF
    ordered = np.linspace(-9, 9, n)
    constant = np.stack([rng.choice([-0.0, 0.0], n), np.full(n, -INF), np.full(n, 7.0)])
    return np.concatenate([normal, ties, constant, ordered[None], ordered[None, ::-1]]).astype(dtype)
