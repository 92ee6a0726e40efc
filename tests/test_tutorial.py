"""The tutorial's algorithms agree with the oracle, and its merge is the library's."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from examples import from_softmax_to_flash_attention as tutorial
from pallas_kernels import monoid
from tests import attention_oracle, errors, oracle
from tests.pairwise import pairwise

SAFE = {
    "safe": tutorial.safe_softmax,
    "online": tutorial.online_softmax,
    "blocked_1": lambda x: tutorial.blocked_online_softmax(x, 1),
    "blocked_32": lambda x: tutorial.blocked_online_softmax(x, 32),
    "blocked_all": lambda x: tutorial.blocked_online_softmax(x, len(x)),
}


def _row(n: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(n).normal(size=n) * scale).astype(np.float32)


@pytest.mark.parametrize("name", SAFE)
def test_softmax_matches_the_oracle(name):
    for n, scale in itertools.product([1, 31, 1000], [0.1, 30.0, 1e4]):
        x = _row(n, scale)
        # Rounding x - max is worth up to half of |x - max| < 104 in ulp; adding n terms in order, a fraction of n.
        assert errors.max_error(SAFE[name](x), oracle.softmax(x)) < 64 + n / 8, (n, scale)


@pytest.mark.parametrize("algorithm", [pytest.param(f, id=name) for name, f in SAFE.items() if name != "safe"])
def test_rows_that_begin_with_holes(algorithm):
    x = _row(100, 1.0)
    x[:40] = -np.inf
    assert errors.max_error(algorithm(x), oracle.softmax(x)) < 16


def test_naive_is_right_only_for_small_logits():
    x = _row(100, 1.0)
    assert errors.max_error(tutorial.naive_softmax(x), oracle.softmax(x)) < 16
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(tutorial.naive_softmax(x + np.float32(100))).any()


@pytest.mark.parametrize(
    "a, b",
    [
        ((1.0, 2.0), (3.0, 4.0)),
        ((3.0, 4.0), (-90.0, 1e30)),
        (tutorial.EMPTY, (2.0, 5.0)),
        (tutorial.EMPTY, tutorial.EMPTY),
    ],
)
def test_merge_is_the_monoids(a, b):
    a, b = ((np.float32(m), np.float32(s)) for m, s in (a, b))
    ours = tutorial.merge(a, b)
    library = monoid.combine(monoid.Stats(*map(np.asarray, a)), monoid.Stats(*map(np.asarray, b)))
    for mine, theirs in zip(ours, library, strict=True):
        np.testing.assert_array_max_ulp(np.asarray(mine), np.asarray(theirs), maxulp=2)


@pytest.mark.parametrize(
    "algorithm, blocks, size",
    pairwise(
        [tutorial.flash_attention, tutorial.flash_attention_2], [(1, 1), (4, 3), (3, 16), (100, 100)], [0.1, 1.0, 30.0]
    ),
)
def test_blocks_of_any_size_give_the_same(algorithm, blocks, size):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, d)) for n, d in ((10, 8), (17, 8), (17, 5)))
    q *= size
    out, logsumexp = algorithm(q, k, v, rows=blocks[0], cols=blocks[1])
    truth = attention_oracle.forward(*(x[None, :, None] for x in (q, k, v)), scale=1.0)
    np.testing.assert_allclose(out, truth.out[0, :, 0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(logsumexp, truth.lse[0, 0], rtol=1e-12)


def test_kernels_are_timed_or_say_why_not(capsys):
    """What the tutorial does on a GPU, with a function in the place of a kernel."""
    refuse = lambda x: tutorial.custom_vjp.softmax(x, 1.0, "warp")
    tutorial.time_kernels({"block": jnp.exp, "warp": refuse}, jnp.ones((4, 2**20), jnp.float16))
    printed = capsys.readouterr().out
    assert " us " in printed.splitlines()[2]
    assert "warp     does not take these rows: " in printed
    assert "not asked for" not in printed
