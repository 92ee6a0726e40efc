"""The seeds' algorithms agree with the truth, and their merge is the library's."""

import numpy as np
import pytest

from pallas_kernels import monoid, seeds
from tests import errors, oracle

SAFE = {
    "safe": seeds.safe_softmax,
    "online": seeds.online_softmax,
    "blocked_1": lambda x: seeds.blocked_online_softmax(x, 1),
    "blocked_32": lambda x: seeds.blocked_online_softmax(x, 32),
    "blocked_all": lambda x: seeds.blocked_online_softmax(x, len(x)),
}


def _row(n: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(n).normal(size=n) * scale).astype(np.float32)


@pytest.mark.parametrize("algorithm", [pytest.param(f, id=name) for name, f in SAFE.items()])
@pytest.mark.parametrize("n", [1, 31, 1000])
@pytest.mark.parametrize("scale", [0.1, 30.0, 1e4])
def test_softmax_matches_the_oracle(algorithm, n, scale):
    x = _row(n, scale)
    # Rounding x - max is worth up to half of |x - max| < 104 in ulp; adding n terms in order, a fraction of n.
    assert errors.max_error(algorithm(x), oracle.softmax(x)) < 64 + n / 8


@pytest.mark.parametrize("algorithm", [pytest.param(f, id=name) for name, f in SAFE.items() if name != "safe"])
def test_rows_that_begin_with_holes(algorithm):
    x = _row(100, 1.0)
    x[:40] = -np.inf
    assert errors.max_error(algorithm(x), oracle.softmax(x)) < 16


def test_naive_is_right_only_for_small_logits():
    x = _row(100, 1.0)
    assert errors.max_error(seeds.naive_softmax(x), oracle.softmax(x)) < 16
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(seeds.naive_softmax(x + np.float32(100))).any()


@pytest.mark.parametrize(
    "a, b",
    [((1.0, 2.0), (3.0, 4.0)), ((3.0, 4.0), (-90.0, 1e30)), (seeds.EMPTY, (2.0, 5.0)), (seeds.EMPTY, seeds.EMPTY)],
)
def test_merge_is_the_monoids(a, b):
    a, b = ((np.float32(m), np.float32(s)) for m, s in (a, b))
    ours = seeds.merge(a, b)
    library = monoid.combine(monoid.Stats(*map(np.asarray, a)), monoid.Stats(*map(np.asarray, b)))
    for mine, theirs in zip(ours, library, strict=True):
        np.testing.assert_array_max_ulp(np.asarray(mine), np.asarray(theirs), maxulp=2)
