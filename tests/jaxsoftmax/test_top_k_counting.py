"""`top_k_softmax` of few rows, which a GPU counts: the same truth. The stand-ins have the CPU do so too."""

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
from tests.jaxsoftmax.test_top_k import SOME, X, check_transformation

SIZES = [(1200, 1), (1200, 7), (4097, 2), (5003, 1), (5003, 3), (8192, 64), (50257, 8)]
SELECT = jax.jit(top_k_softmax, static_argnums=1, static_argnames=("normalize", "scale"))


@pytest.fixture(autouse=True)
def counted(stand_ins: Any) -> Any:
    return stand_ins


def sorts(x: Any, k: int, **keywords: Any) -> bool:
    text = jax.jit(lambda x: top_k_softmax(x, k, **keywords)).lower(x).as_text()
    return "chlo.top_k" in text or "stablehlo.sort" in text


def few(x: np.ndarray, k: int) -> Iterator[np.ndarray]:
    """As many rows at a time as are counted."""
    most = next(rows for rows in (16, 8, 4, 2, 1) if k == 1 or _top_k.rank_chunk_size(x.shape[-1], k, rows))
    assert not sorts(x[:most], k)
    yield from np.split(x, len(x) // most)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("n, k", SIZES)
def test_values(n: int, k: int, dtype: Any) -> None:
    # Each size meets two of three ways.
    number = SIZES.index((n, k)) + (dtype is np.float16)
    normalize, scale = (("all", 1.0), ("top_k", 1.0), ("all", 0.3))[number % 3]
    for rows in few(top_k_oracle.rows(n, dtype), k):
        top_k_oracle.check(SELECT, rows, k, normalize=normalize, scale=scale)


@pytest.mark.parametrize("n, k", SIZES)
def test_wider_dtypes(n: int, k: int) -> None:
    """A CPU merges chunk after chunk, which costs it some ulp: as many as an order that always changes the maximum."""
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-14))[: 2 if k < 4 else 1]:
        with jax.enable_x64(dtype is np.float64):
            for x in few(top_k_oracle.rows(n, dtype), k):
                y, indices = SELECT(x, k)
                truth, expected = top_k_oracle.top_k_softmax(x, k)
                np.testing.assert_allclose(y, truth, rtol=tolerance, atol=1e-37)
                assert y.dtype == dtype
                has_order = ~np.isnan(x).any(-1)
                np.testing.assert_array_equal(indices[has_order], expected[has_order])
                assert ((indices >= 0) & (indices < n)).all()


@pytest.mark.parametrize("k", [1, 8])
def test_nothing_but_nan(k: int) -> None:
    for x in (np.full((2, 5003), np.nan, np.float32), np.full((2, 5003), -np.inf, np.float32)):
        for holes in (slice(0), slice(0, 5003, 2), slice(5000, None)):
            x[:, holes] = np.nan
            y, indices = SELECT(x, k)
            assert np.isnan(y).all()
            assert ((indices >= 0) & (indices < 5003)).all()


@pytest.mark.parametrize("name", ["jvp", *SOME])
def test_transformations(short_chunks: None, name: str) -> None:
    assert not sorts(X[0], 3)
    check_transformation(name, "all")
    check_transformation(name, "top_k")


def test_few_rows_are_counted(counted: Any) -> None:
    row = jax.ShapeDtypeStruct((1, 32000), jnp.bfloat16)
    assert not any(sorts(row, k) for k in (1, 2, 8, 64))
    assert {cols for _, cols, _ in counted.ran(Op.STATS)} >= {_top_k.rank_chunk_size(32000, k, 1) for k in (2, 8, 64)}
    many = jax.ShapeDtypeStruct((64, 32000), jnp.bfloat16)
    assert [sorts(many, k) for k in (1, 8, 64)] == [False, True, True]
    assert sorts(jax.ShapeDtypeStruct((1, 1000), jnp.bfloat16), 8), "too short to be cut"


@pytest.mark.parametrize("k", [2, 8, 64])
def test_chunks_leave_little_to_compare(k: int) -> None:
    for n in (32000, 50257, 128256, 151936, 262144):
        c = _top_k.rank_chunk_size(n, k, 1)
        assert c is not None
        chunks = -(-n // c)
        assert chunks >= k
        assert chunks**2 + (k * c) ** 2 <= 2**25
        assert n % c == 0
        assert chunks * k * c >= n
    assert _top_k.rank_chunk_size(262144, 256, 1) is None
    assert _top_k.chunk_size(262144, 256) < 262144
