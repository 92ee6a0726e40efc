"""The laws of the merge, by hypothesis, and its agreement with the truth however a row is cut."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import monoid
from pallas_kernels.monoid import Stats
from pallas_kernels.softmax import reference
from tests import errors, oracle

COLS = 64  # one length, so that each operation compiles once; shorter rows are rows with holes
PIECES = 5

# Three merges against three others: each costs an exponential, a rounding of its argument (worth |argument| / 2, for
# sums up to 2^16 at most 11) and of the product.
ASSOCIATIVITY_ULPS = 24
# The same for a fold of `PIECES` states, and the sum of 64 weights.
SPLIT_ULPS = 40

laws = settings(deadline=None, derandomize=True, max_examples=100)


def _floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.float32(low), np.float32(high), width=32, allow_subnormal=False)


finite_states = st.builds(lambda m, s: _stats(m, s), _floats(-1e4, 1e4), _floats(1.0, 2.0**16))
near_states = st.builds(lambda m, s: _stats(m, s), _floats(-8, 8), _floats(1.0, 2.0**16))
empty_states = st.builds(lambda: _stats(-np.inf, 0.0))
states = st.one_of(finite_states, near_states, empty_states)
rows = hnp.arrays(
    np.float32, COLS, elements=st.one_of(_floats(-1e4, 1e4), _floats(-4, 4), st.just(np.float32(-np.inf)))
)
cuts = hnp.arrays(np.int32, COLS, elements=st.integers(0, PIECES - 1))


def _stats(m: float, s: float) -> Stats:
    return Stats(jnp.float32(m), jnp.float32(s))


def _lift(x: np.ndarray, where: np.ndarray | None = None) -> Stats:
    return reference.stats(jnp.asarray(x), where, axes=(x.ndim - 1,))


def _assert_identical(a: Stats, b: Stats) -> None:
    np.testing.assert_array_equal(np.asarray(a.max), np.asarray(b.max))
    np.testing.assert_array_equal(np.asarray(a.sum), np.asarray(b.sum))


def _assert_same_element(a: Stats, b: Stats | oracle.Stats, ulps: float) -> None:
    np.testing.assert_array_equal(np.asarray(a.max, np.float64), np.asarray(b.max, np.float64))
    assert errors.max_error(np.asarray(a.sum), np.asarray(b.sum)) <= ulps


@laws
@given(states)
def test_the_empty_row_is_the_identity_exactly(a):
    empty = monoid.empty_like(a.max)
    _assert_identical(monoid.combine(empty, a), a)
    _assert_identical(monoid.combine(a, empty), a)


def test_two_empty_rows_are_an_empty_row():
    empty = monoid.empty_like(jnp.zeros(3))
    _assert_identical(monoid.combine(empty, empty), empty)
    _assert_identical(monoid.merge_over(empty, 0), monoid.empty_like(jnp.zeros(())))


@laws
@given(states, states)
def test_merging_commutes_exactly(a, b):
    _assert_identical(monoid.combine(a, b), monoid.combine(b, a))


@laws
@given(states, states, states)
def test_merging_associates(a, b, c):
    left = monoid.combine(monoid.combine(a, b), c)
    right = monoid.combine(a, monoid.combine(b, c))
    _assert_same_element(left, right, ASSOCIATIVITY_ULPS)


@laws
@given(rows, cuts)
def test_any_cut_of_a_row_gives_the_rows_state(x, piece_of):
    pieces = _lift(np.broadcast_to(x, (PIECES, COLS)), piece_of == np.arange(PIECES)[:, None])
    truth = oracle.stats(x)
    _assert_same_element(monoid.merge_over(pieces, 0), truth, SPLIT_ULPS)
    folded = functools.reduce(monoid.combine, [Stats(m, s) for m, s in zip(*pieces, strict=True)])
    _assert_same_element(folded, truth, SPLIT_ULPS)


@laws
@given(hnp.arrays(np.int16, COLS, elements=st.integers(-(2**10), 2**10)), st.integers(-(2**15), 2**15))
def test_an_exact_shift_of_the_logits_shifts_only_the_maximum(eighths, shift):
    x = eighths.astype(np.float32) / 8
    before, after = _lift(x), _lift(x + np.float32(shift))
    _assert_identical(after, Stats(before.max + jnp.float32(shift), before.sum))


@laws
@given(rows)
def test_log_normalizer_is_logsumexp(x):
    stats = _lift(x)
    truth = oracle.logsumexp(x)
    magnitude = np.abs(oracle.stats(x).max) + np.log(COLS)
    assert errors.max_error(np.asarray(monoid.log_normalizer(stats)), truth, magnitude=magnitude) <= 4


@laws
@given(states, st.floats(-20, 20, width=32))
def test_only_the_logarithm_has_meaning(a, shift):
    other = Stats(a.max - jnp.float32(shift), a.sum * jnp.exp(jnp.float32(shift)))
    np.testing.assert_allclose(monoid.log_normalizer(a), monoid.log_normalizer(other), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("unit", [0.3, 3.7, 1 / 3])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["contracted", "not"])
def test_a_rounded_maximum_is_made_up_for_in_the_sum(wrap, unit):
    rng = np.random.default_rng(0)
    m, total = (1e4 * rng.standard_normal(1000)).astype(np.float32), rng.uniform(1, 9, 1000).astype(np.float32)
    got = wrap(functools.partial(monoid.scaled, unit=unit))(Stats(jnp.asarray(m), jnp.asarray(total)))
    product = m.astype(np.float64) * np.float32(unit)
    np.testing.assert_array_equal(got.max, product.astype(np.float32))
    truth = total * np.exp(product - np.asarray(got.max, np.float64))
    assert errors.max_error(np.asarray(got.sum), truth) <= 2
    assert errors.max_error(total, truth) > 100


@pytest.mark.parametrize("m", [-np.inf, np.inf, np.nan, -1e30, 3e12])
def test_a_maximum_far_from_zero_leaves_the_sum(m):
    got = jax.jit(functools.partial(monoid.scaled, unit=0.3))(_stats(m, 5.0))
    np.testing.assert_array_equal(got, _stats(float(np.float32(m) * np.float32(0.3)), 5.0))


@laws
@given(near_states, near_states)
def test_base_two_is_the_same_monoid(a, b):
    log2e = jnp.float32(np.log2(np.e))
    in_bits = monoid.combine(Stats(a.max * log2e, a.sum), Stats(b.max * log2e, b.sum), exp=jnp.exp2)
    natural = monoid.combine(a, b)
    np.testing.assert_allclose(in_bits.max, natural.max * log2e, rtol=1e-6)
    np.testing.assert_allclose(in_bits.sum, natural.sum, rtol=1e-5)


@pytest.mark.parametrize("other", [(-np.inf, 0.0), (-3.0, 2.0), (np.inf, np.nan)])
def test_an_infinite_logit_makes_the_normalizer_infinite(other):
    infinite = _lift(np.array([1.0, np.inf], np.float32))
    for merged in (monoid.combine(infinite, _stats(*other)), monoid.combine(_stats(*other), infinite)):
        assert monoid.log_normalizer(merged) == np.inf


@pytest.mark.parametrize("other", [(-np.inf, 0.0), (-3.0, 2.0), (np.inf, np.nan), (np.nan, np.nan)])
def test_a_nan_logit_makes_the_normalizer_nan(other):
    poisoned = _lift(np.array([1.0, np.nan], np.float32))
    for merged in (monoid.combine(poisoned, _stats(*other)), monoid.combine(_stats(*other), poisoned)):
        assert np.isnan(monoid.log_normalizer(merged))


def test_a_row_of_minus_infinity_is_the_empty_row():
    stats = _lift(np.full(COLS, -np.inf, np.float32))
    _assert_identical(stats, monoid.empty_like(stats.max))
    assert monoid.log_normalizer(stats) == -np.inf


def test_decay_of_the_identity_is_zero_not_nan():
    minus_infinity = jnp.float32(-jnp.inf)
    assert monoid.decay(minus_infinity, minus_infinity) == 0
    assert monoid.decay(minus_infinity, jnp.float32(3)) == 0
    assert monoid.decay(jnp.float32(3), jnp.float32(3)) == 1
