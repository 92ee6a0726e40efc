"""The checks of `linear_cross_entropy` reject every planted fault: a test of the tests."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxsoftmax import linear_cross_entropy
from jaxsoftmax._cross_entropy import chunks, linear_primitives
from tests.jaxsoftmax import test_linear_cross_entropy as tested
from tests.jaxsoftmax.sharded import mesh, put
from tests.jaxsoftmax.test_linear_cross_entropy import TOKENS, VOCABULARY, case, check

SIZE = 5  # tokens of a chunk; 13 tokens are two chunks and a tail of 3
ALL = {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 2.0, "return_lse": True, "return_entropy": True}


def check_all() -> None:
    rng = np.random.default_rng(5)
    more = {"bias": np.float32(rng.normal(size=VOCABULARY)), "where": rng.random((TOKENS, VOCABULARY)) < 0.8}
    more["scale"] = np.float32(rng.uniform(0.5, 2.0, (TOKENS, 1)))
    check(case() | more, ulps=64, chunk_size=SIZE, **ALL)


def check_weighted() -> None:
    weights = np.float32(np.random.default_rng(6).normal(size=TOKENS))
    for uniform in (True, False):
        check(case() | {"weights": weights}, ulps=64, chunk_size=SIZE, uniform=uniform)


def check_plain() -> None:
    check(case(), ulps=64, chunk_size=SIZE)


def check_16_bits() -> None:
    tested.test_of_16_bits_as_exact_as_optax_on_float32_logits(jnp.bfloat16, 1024, 8)


def check_sharded() -> None:
    """A vocabulary over devices, against one device."""
    arguments = case((8,), 6, 16)
    hidden, weight, labels = arguments.values()

    def total(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        found = linear_cross_entropy(hidden, weight, labels, chunk_size=4, **ALL)
        return sum((x * jnp.cos(jnp.arange(8.0))).sum() for x in found)

    both = jax.jit(jax.value_and_grad(total, (0, 1)))
    want = both(hidden, weight, labels)
    got = both(put(hidden, P("d"), mesh()), put(weight, P(None, "m"), mesh()), put(labels, P("d"), mesh()))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


class Mutant(NamedTuple):
    """A fault of a function of a module, and the check that it fails."""

    words: str
    check: Callable[[], None]
    name: str
    fault: Callable[..., Any]
    module: Any = chunks


def _last_chunk_alone(over, body, rules, operands, each):
    """The gradient of the weight is that of the last chunk."""
    rows = over(body, rules, operands, each)[1]
    size = len(operands["labels"]) % SIZE
    piece = {n: x[-size:] if len(x) == len(operands["labels"]) else x for n, x in operands.items()}
    return body(piece)[0], rows


def _tail_counted(over, body, rules, operands, each):
    """What fills the last chunk up is counted, as copies of the last token."""
    sums, rows = over(body, rules, operands, each)
    last = {n: x[-1:] if len(x) == len(operands["labels"]) else x for n, x in operands.items()}
    return {n: x + 2 * body(last)[0][n] for n, x in sums.items()}, rows


def _label_off(over, body, rules, operands, each):
    """The labels of the last chunk are one off."""
    labels = operands["labels"]
    moved = jnp.where((jnp.arange(len(labels)) >= 10) & (labels > 0), labels - 1, labels)
    return over(body, rules, operands | {"labels": moved}, each)


def _flat_cap(slope, x, labels, *rest, soft_cap, scale, **row):
    """The derivative of the soft cap is left out."""
    z = chunks.reference.logits(x, scale, soft_cap)
    return slope(z, labels, *rest, scale=1.0, **row) * scale


def _half_precision(over, body, rules, operands, each):
    """What is summed over chunks is rounded after each."""
    total, rows = over(body, rules, operands, each)
    if "weight" not in total:
        return total, rows
    count = len(operands["labels"])
    pieces = {n: x.reshape(128, count // 128, *x.shape[1:]) for n, x in operands.items() if len(x) == count}

    def add(sums, piece):
        more = body(operands | piece)[0]
        return {n: x + more[n].astype(x.dtype) for n, x in sums.items()}, None

    sums, _ = jax.lax.scan(add, {n: jnp.zeros(x.shape, jnp.bfloat16) for n, x in total.items()}, pieces)
    return {n: x.astype(jnp.float32) for n, x in sums.items()}, rows


MUTANTS = (
    Mutant("the weight's gradient is not accumulated", check_plain, "_over_chunks", _last_chunk_alone),
    Mutant("a chunk's tail is counted", check_plain, "_over_chunks", _tail_counted),
    Mutant("labels of the last chunk are off", check_plain, "_over_chunks", _label_off),
    Mutant("the soft cap's slope is lost", check_all, "reference.cross_entropy_slope", _flat_cap),
    Mutant("the z loss has no gradient", check_all, "reference.weight_of_p", lambda f, of_q, *_: of_q),
    Mutant(
        "the entropy lacks its logsumexp",
        check_all,
        "losses_of",
        lambda f, rules, numbers, labels: f(rules, numbers, labels) | {"entropy": -numbers["spread"] / numbers["sum"]},
    ),
    Mutant(
        "the entropy's gradient lacks the entropy",
        check_all,
        "_slopes",
        lambda f, rules, x, operands, *a: f(rules, x, operands | {"entropy": 0 * operands["entropy"]}, *a),
    ),
    Mutant(
        "the logsumexp's cotangent is left out",
        check_all,
        "_slopes",
        lambda f, rules, x, operands, local, cts, count: f(
            rules, x, operands, local, {k: v for k, v in cts.items() if k != "lse"}, count
        ),
    ),
    Mutant(
        "the bias is left out",
        check_all,
        "_raw",
        lambda f, rules, operands: f(rules, {n: x for n, x in operands.items() if n != "bias"}),
    ),
    Mutant("the mask is left out", check_all, "_where", lambda f, operands: []),
    Mutant(
        "the scale is not in the gradient",
        check_all,
        "_pulled",
        lambda f, pull, operands, *a: f(pull, {n: x for n, x in operands.items() if n != "scale"}, *a),
    ),
    Mutant(
        "the weights are not in the gradient",
        check_weighted,
        "_cotangents",
        lambda f, operands: f({n: x for n, x in operands.items() if n != "weights"}),
    ),
    Mutant(
        "cotangents that differ are taken for the same",
        check_weighted,
        "jax.lax.cond",
        lambda cond, same, scaled, again: scaled(),
        linear_primitives,
    ),
    Mutant(
        "ignored hidden states count",
        tested.test_rows_that_do_not_count,
        "_pulled",
        lambda f, pull, *given: f(pull, *given[:-1], jnp.ones_like(given[-1])),
    ),
    Mutant(
        "logits are rounded to 16 bits",
        check_16_bits,
        "_raw",
        lambda f, rules, operands: f(rules, operands).astype(jnp.bfloat16).astype(jnp.float32),
    ),
    Mutant("the weight's gradient is accumulated in 16 bits", check_16_bits, "_over_chunks", _half_precision),
    Mutant(
        "a device's columns begin elsewhere",
        check_sharded,
        "_local_labels",
        lambda f, labels, vocabulary, parts: f(labels - (1 if parts.vocabulary.names else 0), vocabulary, parts),
    ),
    Mutant(
        "devices' sums are added as they are",
        check_sharded,
        "decay",
        lambda decay, frm, to: jnp.ones_like(frm) if to.shape[:1] == (1,) else decay(frm, to),
    ),
    Mutant(
        "devices' entropies are added as they are",
        check_sharded,
        "merged",
        lambda f, numbers, parts: (
            f(numbers, parts)
            | ({"spread": jax.lax.psum(numbers["spread"], parts.vocabulary.names)} if parts.vocabulary.names else {})
        ),
    ),
)


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mutant]:
    mutant: Mutant = request.param
    *path, name = mutant.name.split(".")
    holder = functools.reduce(getattr, path, mutant.module)
    monkeypatch.setattr(holder, name, functools.partial(mutant.fault, getattr(holder, name)))
    jax.clear_caches()
    yield mutant
    jax.clear_caches()


def test_without_a_fault_the_checks_pass() -> None:
    """Those that are no tests of their own."""
    for checked in (check_all, check_weighted, check_plain, check_sharded):
        checked()


@pytest.mark.slow
@pytest.mark.parametrize("planted", MUTANTS, indirect=True, ids=lambda m: m.words)
def test_planted_fault_is_rejected(planted: Mutant) -> None:
    with pytest.raises(AssertionError):
        planted.check()
