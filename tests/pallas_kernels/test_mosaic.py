"""The vectors that a thread masks are those that hang over an end of the row, whatever its length and alignment."""

import errors
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from pallas_kernels.mosaic import fast_math, vectors

LANES = (1, 4, 8, 16, 32, 128)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["16bit", "32bit"])
@pytest.mark.parametrize("lanes", LANES)
def test_every_overhanging_vector_is_masked(lanes, dtype):
    wrong = []
    for registers in (1, 2, 3, 5):
        tile = vectors.RegisterTile(jnp.dtype(dtype), registers, lanes)
        capacity = registers * lanes * tile.vector
        for cols in range(max(1, capacity - 5 * lanes), capacity - tile.vector + 2):
            array = jax.ShapeDtypeStruct((tile.rows, cols), tile.dtype)
            row_pred = vectors.RowPredicate.of(array, tile, at_start=True)
            for row in range(tile.vector if cols % tile.vector else 1):
                _, inside = models.elements(tile, cols, np.int32(row), np.int32(0))
                held = np.asarray(inside).reshape(tile.rows, registers, -1, tile.vector)
                partly = (held.any(-1) & ~held.all(-1)).any((0, 2))
                outside = (~held.any(-1)).any((0, 2))
                wrong += [
                    (registers, cols, row, j)
                    for j in range(registers)
                    if (partly[j] and not row_pred.needs_element_mask(j)) or (outside[j] and row_pred.in_bounds(j))
                ]
    assert not wrong, f"{len(wrong)} times, first (registers, cols, row, register): {wrong[:5]}"


@pytest.mark.parametrize("unit", [1.0, 0.3, 3.7, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_exp_in_a_unit(dtype, unit):
    d = np.concatenate([-np.linspace(0, 100, 40001) / unit, [0]]).astype(np.float32)
    exponent = d.astype(np.float64) * np.float32(unit)
    d, exponent = d[exponent > -80], exponent[exponent > -80]
    got = np.asarray(jax.jit(fast_math.exp_for(jnp.dtype(dtype), unit))(d), np.float64)
    # Without optimisation the CPU rounds the product, and may take (x + c) - c for x.
    ulps = 2 + 2 * np.abs(exponent)
    assert (np.abs(got / np.exp(exponent) - 1) <= ulps * 2.0**-23).all()
    special = jnp.array([-jnp.inf, jnp.nan], jnp.float32)
    np.testing.assert_array_equal(fast_math.exp_for(jnp.dtype(dtype), unit)(special) < 1e-37, [True, False])


@pytest.mark.parametrize("tanh, slack", [(fast_math.tanh_16bit, None), (fast_math.tanh_32bit, 2.5)])
def test_tanh(tanh, slack):
    x = np.concatenate([np.linspace(-20, 20, 40001), np.logspace(-30, 0, 3001), [0, 0.55, 1e30]]).astype(np.float32)
    truth = np.tanh(x.astype(np.float64))
    got = np.asarray(tanh(jnp.asarray(x)))
    if slack is None:
        np.testing.assert_allclose(got, truth, atol=3e-7, rtol=0)
    else:
        errors.assert_accurate(got, np.tanh(x), truth, slack=slack)
    special = jnp.array([-jnp.inf, jnp.inf, jnp.nan], jnp.float32)
    np.testing.assert_array_equal(tanh(special), [-1, 1, np.nan])


def test_log_is_accurate_also_where_it_is_near_zero():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [np.exp(rng.uniform(-87, 88, 20000)), 1 + rng.uniform(-0.3, 0.4, 20000), 1 + 1e-6 * np.arange(9)]
    )
    x = x.astype(np.float32)
    errors.assert_accurate(fast_math.log(x), np.log(x), np.log(x.astype(np.float64)), slack=1.5)
    special = jnp.array([0, jnp.inf, jnp.nan], jnp.float32)
    np.testing.assert_array_equal(fast_math.log(special), [-np.inf, np.inf, np.nan])
