"""The forms of the reference that XLA for a GPU reads fastest, run on a CPU: right, and the same in special cases."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels.monoid import Stats, combine, combine_once, log_normalizer
from pallas_kernels.softmax import reference

INF, NAN = np.inf, np.nan
SHAPES = [
    ((5, 40, 33), (1,)),
    ((40, 64), (0,)),
    ((2, 4, 5, 32), (1, 2)),
    ((9, 7), (1,)),
    ((9, 33), (1,)),
    ((3, 2, 40), (0,)),
]
SPECIAL = ([-INF, 0.0, 1.0], [INF, 0.0, 1.0], [INF, INF, -INF], [NAN, INF, 0.0], [-INF] * 3, [NAN, -INF, -INF])


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call counts as one of many elements."""
    monkeypatch.setattr(reference, "_MANY_ELEMENTS", 1)
    monkeypatch.setattr(reference, "_WIDENED_COLS", 1)


def rows(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Logits with the special cases at the start of the first rows."""
    rng = np.random.default_rng(0)
    return jnp.asarray(4 * rng.standard_normal(shape), dtype)


def with_special(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    axis = axes[-1]
    moved = np.array(jnp.moveaxis(x, axis, -1).astype(jnp.float32))
    flat = moved.reshape(-1, moved.shape[-1])
    for row, values in zip(flat, SPECIAL, strict=False):
        row[:] = np.resize(values, row.shape)
    return jnp.moveaxis(jnp.asarray(flat.reshape(moved.shape)), -1, axis).astype(x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape, axes", SHAPES)
def test_forms_agree(shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> None:
    plain = rows(shape, dtype)
    where = jnp.asarray(np.random.default_rng(1).random(shape) < 0.6)
    t = rows(shape, dtype)[::-1]
    for x in (plain, with_special(plain, axes)):
        for scale, mask in itertools.product((1.0, 0.3), (None, where, jnp.zeros_like(where))):
            lse = lambda *operands, **options: log_normalizer(reference.stats(*operands, **options))
            for function in (reference.softmax, reference.log_softmax, lse):
                got, want = (function(x, mask, axes=axes, scale=scale, gpu=gpu) for gpu in (True, False))
                compare(got, want, dtype)
        for function in (reference.log_softmax_tangent, reference.log_softmax_cotangent):
            compare(*(function(x, t, axes=axes, scale=0.3, gpu=gpu) for gpu in (True, False)), dtype)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BEYOND_CACHE", 0)


def compare(got: object, want: object, dtype: str) -> None:
    tolerance = 4e-6 if dtype == "float32" else 2e-2
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        mine, theirs = (np.asarray(y.astype(jnp.float32)) for y in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape, axes", SHAPES[:3])
def test_one_pass_is_right(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    assert reference.by_state(shape, axes, 4)
    x = rows(shape, "float32") * 10
    got = reference.softmax(x, axes=axes, gpu=True)
    wanted = oracle.softmax(np.asarray(x), axes)
    plain = np.abs(np.asarray(reference.softmax(x, axes=axes)) - wanted).max()
    assert np.abs(np.asarray(got) - wanted).max() <= max(2 * plain, 2e-7)


@pytest.mark.parametrize("gpu", [True, False])
def test_one_reduction_finds_the_state(gpu: bool) -> None:
    program = str(jax.make_jaxpr(lambda x: reference.stats(x, axes=(0,), gpu=gpu))(jnp.ones((40, 64))))
    assert (program.count("reduce_max"), program.count(" reduce[")) == ((0, 1) if gpu else (1, 0))


def test_one_exponential_merges_as_two_do() -> None:
    sides = [Stats(*map(jnp.float32, pair)) for pair in itertools.product((-INF, -3.0, 0.5, 80.0), (0.0, 1.0, 7.5))]
    for a, b in itertools.product(sides, repeat=2):
        if not any(side.max == -INF and side.sum for side in (a, b)):  # no state
            np.testing.assert_allclose(combine_once(a, b), combine(a, b), rtol=1e-6)
