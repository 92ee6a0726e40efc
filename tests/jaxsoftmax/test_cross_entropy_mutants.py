"""The check of a gradient for any cotangent rejects every planted fault: a test of the tests.

The faults are in what pulls cotangents back to the logits.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._cross_entropy import primitives
from pallas_kernels.monoid import log_normalizer
from tests import errors, oracle
from tests.top_k_mutants import Mutant


def _sum_in_maximum(stats, maximum, total):
    return stats(log_normalizer(stats(maximum, total)), jnp.ones_like(total))


def _with_label(pull, cts, x, labels, *arguments, **keywords):
    """The loss of ignored rows still has no gradient."""
    of_loss = jnp.where(labels < 0, 0.0, cts[0])
    return pull([of_loss, cts[1]], x, jnp.maximum(labels, 0), *arguments, **keywords)


MUTANTS = (
    Mutant("a row's state is its logsumexp, rounded", "Stats", _sum_in_maximum),
    Mutant("the sum is left out", "Stats", lambda stats, maximum, total: stats(maximum, jnp.ones_like(total))),
    Mutant("the z loss has no gradient", "reference.weight_of_p", lambda weight, of_q, *_: of_q),
    Mutant("the cotangent is left out", "_pull_to_logits",
           lambda pull, cts, *a, **k: pull([jnp.ones_like(cts[0]), cts[1]], *a, **k)),
    Mutant("the logsumexp's is left out", "_pull_to_logits", lambda pull, cts, *a, **k: pull(cts[:1], *a, **k)),
    Mutant("the logsumexp takes the loss's place", "reference.weight_of_p", lambda weight, of_q, *_: 0 * of_q),
    Mutant("an ignored row's logsumexp is constant", "_pull_to_logits",
           lambda pull, *a, **k: pull(*a, **k | {"all_rows": False})),
    Mutant("an ignored row has a label", "_pull_to_logits", _with_label),
    Mutant("the mask is left out", "reference.cross_entropy_slope",
           lambda slope, x, labels, mask, *a, **k: slope(x, labels, None, *a, **k)),
)  # fmt: skip


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mutant: Mutant | None = request.param
    if mutant:
        monkeypatch.setattr(primitives, *mutant.planted_in(primitives))
    jax.clear_caches()
    yield
    jax.clear_caches()


def check(offset: float, cap: float | None) -> None:
    """Cotangents of loss and logsumexp that differ from row to row; masked and ignored rows."""
    rng = np.random.default_rng(0)
    x = np.float32(3 * rng.normal(size=(6, 9)) + offset)
    y, where, ct, of_lse = np.array([0, 3, 8, -1, -1, 5]), rng.random((6, 9)) < 0.7, *rng.normal(size=(2, 6))
    # Of a row that is ignored, what the mask excludes may be anything.
    x[4, 0], where[4, 0] = np.nan, False
    want = oracle.cross_entropy(x, y, -1, where, soft_cap=cap, z_loss=1e-2, weights=ct, of_lse=of_lse, ignored=-1)

    @jax.jit
    @jax.grad
    def gradient(x: jax.Array) -> jax.Array:
        loss, lse = jaxsoftmax.softmax_cross_entropy_with_integer_labels(
            x, y, where=where, logits_soft_cap=cap, z_loss=1e-2, ignore_index=-1, return_lse=True
        )
        return (loss * ct + lse * of_lse).sum()

    assert errors.max_error(gradient(jnp.asarray(x)), want.gradient, magnitude=want.gradient_terms) < 16


def check_both() -> None:
    """Far from 0, where a float32 logsumexp has no digits to spare; and with a soft cap."""
    check(1e4, None)
    check(0.0, 5.0)


@pytest.mark.parametrize("planted", [None], indirect=True)
def test_without_a_fault_the_check_passes(planted: None) -> None:
    check_both()


@pytest.mark.slow
@pytest.mark.parametrize("planted", MUTANTS, indirect=True, ids=lambda m: m.words)
def test_planted_fault_is_rejected(planted: None) -> None:
    with pytest.raises(AssertionError):
        check_both()
