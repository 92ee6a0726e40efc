"""`top_k_softmax`, of rows that are sorted and of few ones, which a GPU counts: values, indices and gradients.

The truth is NumPy's, in float64. The stand-ins have the CPU count too.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsoftmax import _top_k, top_k_softmax
from pallas_kernels.softmax.problem import Op
from tests import top_k_oracle
from tests.jaxsoftmax.transformations import loss

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
# Rows that one selection orders, rows cut evenly, primes, and as many wanted as there are.
SIZES = [(1, 1), (7, 7), (300, 5), (1200, 7), (1500, 700), (4096, 1), (5003, 3), (8192, 64), (50257, 8)]
COUNTED = [(1200, 1), (1200, 7), (4097, 2), (5003, 1), (5003, 3), (8192, 64), (50257, 8)]

RUN = jax.jit(top_k_softmax, static_argnums=1, static_argnames=("normalize", "scale"))

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 40)), jnp.float32)


@pytest.mark.parametrize("number, size", [*enumerate(SIZES)], ids=str)
def test_values(number: int, size: tuple[int, int]) -> None:
    for narrow in (False, True):
        dtype = DTYPES[1 + number % 2] if narrow else np.float32
        normalize = ("all", "top_k")[(number // 2 + narrow) % 2]
        top_k_oracle.check(RUN, top_k_oracle.rows(size[0], dtype), size[1], normalize=normalize)


@pytest.mark.parametrize("scale", [0.3, -1.0, 0.0, 1e-3])
def test_scale(scale: float) -> None:
    for n in (50, 2500):
        x = top_k_oracle.rows(n, ml_dtypes.bfloat16 if (n > 50) == (scale > 0) else np.float32)
        x = x[np.isfinite(x).all(-1)] if scale == 0 else x
        top_k_oracle.check(RUN, x, 9, scale=scale)


def test_float64() -> None:
    with jax.enable_x64(True):
        for normalize in ("all", "top_k"):
            top_k_oracle.check(RUN, top_k_oracle.rows(2501, np.float64), 9, normalize=normalize)


@pytest.mark.parametrize("n, k", [(40, 2), (41, 1), (96, 5), (197, 3), (256, 12), (1000, 1), (1024, 9)])
def test_many_levels(short_chunks: None, n: int, k: int) -> None:
    assert _top_k.chunk_size(n, k) < n
    normalize = ("all", "top_k")[n % 2]
    top_k_oracle.check(RUN, top_k_oracle.rows(n, np.float32), k, normalize=normalize)


@pytest.mark.parametrize("k", [1, 8, 50, 64, 256])
def test_chunks_leave_little_to_order_or_compare(k: int) -> None:
    for n in (32000, 50176, 50257, 50261, 128256, 151936, 262144):
        c = _top_k.chunk_size(n, k)
        assert n % c == 0 or n == 50261, "a padded copy"
        assert -(-n // c) >= k
        assert n / c + k * c <= 4 * 2 * (n * k) ** 0.5
        assert _top_k.chunked(jnp.zeros((2, n), jnp.bfloat16), c).shape == (2, -(-n // c), c)
        counted = _top_k.rank_chunk_size(n, k, 1) if k in (8, 64) and n != 50261 else None
        if counted is not None:
            chunks = n // counted
            assert n % counted == 0
            assert chunks >= k
            assert chunks**2 + (k * counted) ** 2 <= 2**25
    assert _top_k.rank_chunk_size(262144, 256, 1) is None


def test_the_kernel_sees_chunks(stand_ins: Any) -> None:
    c = _top_k.chunk_size(32000, 64)
    top_k_oracle.check(top_k_softmax, top_k_oracle.rows(32000, ml_dtypes.bfloat16), 64)
    assert stand_ins.ran(Op.STATS) == {(16 * 32000 // c, c, 1)}
    stand_ins.problems.clear()
    top_k_oracle.check(top_k_softmax, top_k_oracle.rows(64, np.float32), 4, scale=0.5)
    assert stand_ins.ran(Op.STATS) == {(16, 64, 1)}
    stand_ins.problems.clear()
    top_k_softmax(np.zeros((4, 64), np.float32), 4, implementation="xla")
    assert not stand_ins.problems


def sorts(x: Any, k: int, **keywords: Any) -> bool:
    text = jax.jit(lambda x: top_k_softmax(x, k, **keywords)).lower(x).as_text()
    return "chlo.top_k" in text or "stablehlo.sort" in text


def few(x: np.ndarray, k: int) -> Iterator[np.ndarray]:
    """As many rows at a time as are counted."""
    most = next(rows for rows in (16, 8, 4, 2, 1) if k == 1 or _top_k.rank_chunk_size(x.shape[-1], k, rows))
    assert not sorts(x[:most], k)
    yield from np.split(x, len(x) // most)


@pytest.mark.slow
@pytest.mark.parametrize("number, size", [*enumerate(COUNTED)], ids=str)
def test_values_of_few_rows(stand_ins: Any, number: int, size: tuple[int, int]) -> None:
    """A CPU merges chunk after chunk, which costs a wide dtype some ulp: as many as an ever changing maximum."""
    n, k = size
    normalize, scale = (("all", 1.0), ("top_k", 1.0), ("all", 0.3))[number % 3]
    for rows in few(top_k_oracle.rows(n, DTYPES[1 + number % 2]), k):
        top_k_oracle.check(RUN, rows, k, normalize=normalize, scale=scale)
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-14))[: 2 if k < 4 else 1]:
        with jax.enable_x64(dtype is np.float64):
            for x in few(top_k_oracle.rows(n, dtype), k):
                y, indices = RUN(x, k)
                truth, expected = top_k_oracle.top_k_softmax(x, k)
                np.testing.assert_allclose(y, truth, rtol=tolerance, atol=1e-37)
                assert y.dtype == dtype
                has_order = ~np.isnan(x).any(-1)
                np.testing.assert_array_equal(indices[has_order], expected[has_order])
                assert ((indices >= 0) & (indices < n)).all()


@pytest.mark.parametrize("k", [1, 8])
def test_nothing_but_nan(stand_ins: Any, k: int) -> None:
    for x in (np.full((2, 5003), np.nan, np.float32), np.full((2, 5003), -np.inf, np.float32)):
        for holes in (slice(0), slice(0, 5003, 2), slice(5000, None)):
            x[:, holes] = np.nan
            y, indices = RUN(x, k)
            assert np.isnan(y).all()
            assert ((indices >= 0) & (indices < 5003)).all()


def test_few_rows_are_counted(stand_ins: Any) -> None:
    row = jax.ShapeDtypeStruct((1, 32000), jnp.bfloat16)
    assert not any(sorts(row, k) for k in (1, 2, 8, 64))
    assert {cols for _, cols, _ in stand_ins.ran(Op.STATS)} >= {_top_k.rank_chunk_size(32000, k, 1) for k in (2, 8, 64)}
    many = jax.ShapeDtypeStruct((64, 32000), jnp.bfloat16)
    assert [sorts(many, k) for k in (1, 8, 64)] == [False, True, True]
    assert sorts(jax.ShapeDtypeStruct((1, 1000), jnp.bfloat16), 8), "too short to be cut"


def test_shapes_axes_and_dtypes() -> None:
    x = np.random.default_rng(1).normal(size=(5, 33, 9)).astype(np.float32)
    for axis in (1, -2, 0, 2):
        y, indices = top_k_softmax(x, 3, axis=axis)
        truth, expected = top_k_oracle.top_k_softmax(np.moveaxis(x, axis, -1), 3)
        np.testing.assert_array_equal(indices, np.moveaxis(expected, -1, axis))
        np.testing.assert_allclose(y, np.moveaxis(truth, -1, axis), rtol=1e-5)
    for shape, k in (((3, 4), 0), ((0, 4), 2), ((3, 0), 0), ((0, 3000), 2), ((2, 3000), 0)):
        y, indices = top_k_softmax(jnp.ones(shape), k)
        assert y.shape == indices.shape == (*shape[:-1], k)
    assert top_k_softmax(np.arange(4), 2)[0].dtype == jnp.float32
    y, indices = top_k_softmax(jnp.asarray(x, jnp.float8_e4m3fn)[0], 2)
    assert (y.dtype, indices.dtype) == (jnp.float8_e4m3fn, jnp.int32)
    padded = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5003)), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(top_k_softmax(padded, 3)[1], jax.lax.top_k(padded.astype(jnp.float32), 3)[1])


def test_scales_that_are_arrays() -> None:
    x = jnp.asarray(X, jnp.bfloat16)
    scale = jnp.asarray([[1.0], [-2.0], [0.5], [0.0]])
    y, indices = jax.jit(lambda x, s: top_k_softmax(x, 4, scale=s))(x, scale)
    _, expected = top_k_oracle.top_k_softmax(x.astype(jnp.float32) * scale, 4)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_allclose(y, jax.lax.top_k(jax.nn.softmax(x.astype(jnp.float32) * scale), 4)[0], rtol=1e-2)
    assert y.dtype == jnp.bfloat16


def plain(x: jax.Array, k: int, normalize: str) -> jax.Array:
    """In `jax.nn`, ordered by the logits: rounded probabilities may have ties that those do not."""
    at = jax.lax.top_k(jnp.where(x == 0, 0, x), k)[1]
    if normalize == "top_k":
        return jax.nn.softmax(jnp.take_along_axis(x, at, -1))
    return jnp.take_along_axis(jax.nn.softmax(x), at, -1)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["all", "top_k"])
def test_gradients_of_long_rows(normalize: str) -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(3).normal(size=(2, 3000))
        t = jnp.asarray(np.random.default_rng(4).normal(size=(2, 3000)))
        for scale in (1.0, 0.5):
            ours = lambda x, s=scale: top_k_softmax(x, 5, normalize=normalize, scale=s)[0]
            theirs = lambda x, s=scale: plain(x * s, 5, normalize)
            got, want = (jax.jit(lambda x, f=f: jax.jvp(jax.grad(loss(f)), (x,), (t,)))(x) for f in (ours, theirs))
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-14), got, want)
            if normalize == "top_k":
                assert (np.count_nonzero(got[0], -1) == 5).all()


def test_gradients_at_holes() -> None:
    x = jnp.asarray(top_k_oracle.rows(2000, np.float32))
    has_finite_sum = np.isfinite(np.asarray(x).max(-1))
    for normalize in ("all", "top_k"):
        ours = jax.jit(jax.grad(loss(lambda x, m=normalize: top_k_softmax(x, 5, normalize=m)[0])))(x)
        theirs = jax.jit(jax.grad(loss(lambda x, m=normalize: plain(x, 5, m))))(x)
        np.testing.assert_allclose(ours[has_finite_sum], theirs[has_finite_sum], rtol=1e-4, atol=1e-8)
        assert np.isnan(ours[~has_finite_sum]).any(-1).all()


def test_the_first_derivative_of_what_is_selected_touches_no_row() -> None:
    jaxpr = jax.make_jaxpr(lambda x, t: jax.jvp(lambda x: top_k_softmax(x, 5, normalize="top_k")[0], (x,), (t,)))(X, X)
    assert not [eqn.primitive.name for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape == X.shape]


def test_stability_may_be_asked_for_as_of_jax_lax_top_k() -> None:
    x = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    for is_stable in (True, False):
        np.testing.assert_array_equal(top_k_softmax(x, 3, axis=-1, is_stable=is_stable)[1], [[1, 2, 0]])
