"""What attention's XLA program adds up chunk by chunk is rounded to 16 bits once, at the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax import flash_attention
from pallas_kernels.attention import tiles

LENGTH = 2 * tiles.CHUNK


def numbers(dtype: jnp.dtype) -> jax.Array:
    """A chunk of ones, but for one 1.25, and a chunk of -1. Their sum is 0.25, which neither dtype can add to 512."""
    return jnp.ones(LENGTH, dtype).at[3].set(1.25).at[tiles.CHUNK :].set(-1.0)[None, :, None, None]


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return flash_attention(query, key, value, scale=1.0, implementation="xla")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_sums_over_chunks(dtype: jnp.dtype) -> None:
    ones, two_keys = numbers(dtype), jnp.zeros((1, 2, 1, 1), dtype)
    long_key, signs = jnp.zeros((1, LENGTH, 1, 1), dtype), jnp.sign(ones)
    # As many queries as a tile has, beside which keys come in chunks of as many.
    query = jnp.zeros((1, tiles.CHUNK, 1, 1), dtype)
    for out in jax.jvp(lambda value: attention(query, long_key, value), (ones,), (ones,)):
        np.testing.assert_array_equal(np.float64(out), 0.25 / LENGTH)
    # Over chunks of queries. Of two keys whose values are 1 and -1, a query's cotangent is 1/2 and -1/2.
    value = jnp.asarray([1.0, -1.0], dtype)[None, :, None, None]
    _, pull = jax.vjp(lambda key, value: attention(jnp.abs(ones), key, value), two_keys, value)
    d_key, d_value = pull(signs)
    np.testing.assert_array_equal(np.float64(d_key).ravel(), [0.125, -0.125])
    np.testing.assert_array_equal(np.float64(d_value), 0.0)
    np.testing.assert_array_equal(np.float64(pull(ones)[1]), 0.125)
    # Over chunks of keys. The mean of the values is 0, so that a key's cotangent is its value over the length.
    _, pull = jax.vjp(lambda query: attention(query, jnp.abs(ones), signs), query)
    np.testing.assert_array_equal(np.float64(pull(jnp.ones_like(query))[0]), 0.25 / LENGTH)
