"""The check of a gradient for any cotangent rejects every planted fault: a test of the tests.

A fault is a piece of the text of what pulls cotangents back to the logits, and what it becomes.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._cross_entropy import primitives
from tests import errors, oracle
from tests.top_k_mutants import Mutant

MUTANTS = (
    Mutant("a row's state is its logsumexp, rounded", "known, read = Stats(maximum, total)",
           "known, read = Stats(log_normalizer(Stats(maximum, total)), jnp.ones_like(total))"),
    Mutant("the sum is left out", "known, read = Stats(maximum, total)",
           "known, read = Stats(maximum, jnp.ones_like(total))"),
    Mutant("the z loss has no gradient", "reference.weight_of_p(of_q, log_normalizer(known), z_loss)", "of_q"),
    Mutant("the cotangent is left out", "jnp.where(read, of_loss, 0.0)", "jnp.where(read, 1.0, 0.0)"),
    Mutant("the logsumexp's is left out", "of_p = of_p + of_lse", "pass"),
    Mutant("the logsumexp takes the loss's place", "of_p = of_p + of_lse", "of_p = of_lse + 0.0 * of_p"),
    Mutant("an ignored row's logsumexp is constant", "jnp.where(read, labels, IGNORED - 1) if all_rows else labels",
           "labels"),
    Mutant("an ignored row has a label", "jnp.where(read, labels, IGNORED - 1) if all_rows else labels",
           "jnp.maximum(labels, 0)"),
    Mutant("the mask is left out", "mask = where[0] if where else None", "mask = None"),
)  # fmt: skip


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mutant: Mutant | None = request.param
    text = inspect.getsource(primitives._pull_to_logits)
    if mutant:
        assert text.count(mutant.code) == 1, f"plant `{mutant.code}` anew"
        text = text.replace(mutant.code, mutant.becomes)
    names: dict[str, Any] = dict(vars(primitives))
    exec(compile(text, str(primitives.__file__), "exec"), names)
    monkeypatch.setattr(primitives, "_pull_to_logits", names["_pull_to_logits"])
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
