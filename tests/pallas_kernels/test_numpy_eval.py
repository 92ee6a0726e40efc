"""Programs evaluated with NumPy return what XLA's do."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_eval
import pytest
from jax import lax

INTEGERS = (
    np.array([[-7, -1, 0, 3], [2**31 - 1, 5, -(2**31) + 1, 8]], np.int32),
    np.array([[2, -3, 5, -7], [1, 64, 3, 2]], np.int32),
)
FLOATS = (
    np.array([[-1.5, -0.0, 0.5, 2.5], [np.inf, -np.inf, np.nan, 1e-3]], np.float32),
    np.array([[1.0, 0.0, np.nan, -3.0], [2.0, 1.0, 4.0, 1e30]], np.float32),
)
BOTH = (INTEGERS, FLOATS)
PROGRAMS = {
    "arithmetic": (BOTH, lambda x, y: [x + y, x - y, x * y, -x, abs(x), lax.sign(x)]),
    "division": (BOTH, lambda x, y: [lax.div(x, y), lax.rem(x, y), x // y, x % y]),
    "bounds": (BOTH, lambda x, y: [jnp.maximum(x, y), jnp.minimum(x, y), lax.clamp(x[0, 0], y, x[0, 3])]),
    "rounding": ([FLOATS], lambda x, y: [jnp.floor(x), jnp.round(x), lax.round(x, lax.RoundingMethod(0))]),
    "comparison": (BOTH, lambda x, y: [x < y, x <= y, x > y, x >= y, x == y, x != y]),
    "selection": (BOTH, lambda x, y: [jnp.where(x < y, x, y), lax.select(True, x, y)]),
    "selection of three": ([INTEGERS], lambda x, y: [lax.select_n(jnp.clip(y, 0, 2), x, y, x * y)]),
    "bits": ([INTEGERS], lambda x, y: [x & y, x | y, x ^ y, ~x, ~(x < y)]),
    "shifts": ([INTEGERS], lambda x, y: [x << 3, x >> 3, lax.shift_right_logical(x, 3)]),
    "bit casts": (BOTH, lambda x, y: [x.view(jnp.int32), y.view(jnp.float32), x.view(jnp.bfloat16)]),
    "conversion": (BOTH, lambda x, y: [x.astype(jnp.bfloat16), x.astype(bool), (x < y).astype(jnp.int32)]),
    "shapes": (BOTH, lambda x, y: [x.T, x.reshape(4, 2), x[:1].squeeze(0), jnp.stack([x, y], 1)]),
    "broadcasting": (BOTH, lambda x, y: [lax.broadcast_in_dim(x[0], (3, 4), (1,)), x[0, 0] + y]),
    "parts": (BOTH, lambda x, y: [x[:, 1:4:2], lax.dynamic_slice(x, (9, 1), (1, 3)), jnp.concatenate([x, y], 1)]),
    "reduction": (BOTH, lambda x, y: [x.max(1), x.sum(), (x < y).any(0), (x < y).all((0, 1)), y.min(1)]),
    "reduction of bits": ([INTEGERS], lambda x, y: [lax.reduce_or(x, (0,)), lax.reduce_and(y, (0, 1))]),
    "sums so far": (BOTH, lambda x, y: [jnp.cumsum(y, 1), jnp.cumsum(x < y, 0), lax.cumsum(y, reverse=True)]),
    "indices": ([INTEGERS], lambda x, y: [x + lax.broadcasted_iota(jnp.int32, (2, 4), d) for d in (0, 1)]),
    "padding": (BOTH, lambda x, y: [lax.pad(x, y[0, 0], ((1, 0, 0), (low, 2, 0))) for low in (0, 1, -1)]),
    "products": (BOTH, lambda x, y: [x @ y.T, x.T @ y, lax.dot_general(x, y, (((0,), (0,)), ((), ())))]),
    "a gather": (BOTH, lambda x, y: [jnp.take_along_axis(x, jnp.array([[3, 1, 1], [i, 0, 2]]), 1) for i in (1, -5, 4)]),
    "a scatter": (BOTH, lambda x, y: [x[0].at[i].set(y[0, 1]) for i in (0, 3, 4, -5)]),
    "left to JAX": (BOTH, lambda x, y: [x.at[0, 1].set(9), jnp.take(x, jnp.array([1, 0, 1]), 0), jnp.sort(x)]),
    "branches": (BOTH, lambda x, y: [lax.switch(i, [lambda: x, lambda: y, lambda: x * y]) for i in (-1, 1, 5)]),
    "loop while": (BOTH, lambda x, y: lax.while_loop(lambda s: s[1] < y[0, 0], lambda s: (s[0] * y, s[1] + 1), (x, 0))),
    "loop of so many": (BOTH, lambda x, y: [lax.fori_loop(0, 3, lambda i, s: s * y + x, x)]),
    "loop over rows": (BOTH, lambda x, y: lax.scan(lambda s, v: (s + v, s - v), x[0], y)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_evaluates_as_xla_does(name):
    kinds, f = PROGRAMS[name]
    for operands in kinds:
        jaxpr = jax.make_jaxpr(f)(*operands)
        results = numpy_eval.evaluate(jaxpr.jaxpr, jaxpr.consts, *operands)
        for result, expected in zip(results, jax.jit(f)(*operands), strict=True):
            assert result.dtype == expected.dtype
            np.testing.assert_array_equal(result.astype(float), np.asarray(expected, float))
