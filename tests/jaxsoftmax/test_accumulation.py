"""What attention's XLA program adds up chunk by chunk is rounded to 16 bits once, at the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax import flash_attention
from pallas_kernels.attention import tiles

DTYPES = [jnp.bfloat16, jnp.float16]
LENGTH = 2 * tiles.CHUNK


def numbers(dtype: jnp.dtype) -> jax.Array:
    """A chunk of ones, but for one 1.25, and a chunk of -1. Their sum is 0.25, which neither dtype can add to 512."""
    return jnp.ones(LENGTH, dtype).at[3].set(1.25).at[tiles.CHUNK :].set(-1.0)[None, :, None, None]


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return flash_attention(query, key, value, scale=1.0, implementation="xla")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_the_output_and_its_tangent(dtype: jnp.dtype) -> None:
    query, key, value = jnp.zeros((1, 2, 1, 1), dtype), jnp.zeros((1, LENGTH, 1, 1), dtype), numbers(dtype)
    for out in jax.jvp(lambda value: attention(query, key, value), (value,), (value,)):
        np.testing.assert_array_equal(np.float64(out), 0.25 / LENGTH)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_the_gradient_of_keys_and_values(dtype: jnp.dtype) -> None:
    """Over chunks of queries. Of two keys whose values are 1 and -1, a query's cotangent is 1/2 and -1/2."""
    query, key = jnp.abs(numbers(dtype)), jnp.zeros((1, 2, 1, 1), dtype)
    value = jnp.asarray([1.0, -1.0], dtype)[None, :, None, None]
    _, pull = jax.vjp(lambda key, value: attention(query, key, value), key, value)
    d_key, d_value = pull(jnp.sign(numbers(dtype)))
    np.testing.assert_array_equal(np.float64(d_key).ravel(), [0.125, -0.125])
    np.testing.assert_array_equal(np.float64(d_value), 0.0)
    np.testing.assert_array_equal(np.float64(pull(numbers(dtype))[1]), 0.125)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_the_gradient_of_a_query(dtype: jnp.dtype) -> None:
    """Over chunks of keys. The mean of the values is 0, so that a key's cotangent is its value over the length."""
    key, value = jnp.abs(numbers(dtype)), jnp.sign(numbers(dtype))
    query = jnp.zeros((1, 1, 1, 1), dtype)
    _, pull = jax.vjp(lambda query: attention(query, key, value), query)
    np.testing.assert_array_equal(np.float64(pull(jnp.ones_like(query))[0]), 0.25 / LENGTH)
