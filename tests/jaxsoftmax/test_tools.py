"""JAX's tools that walk programs: each knows every primitive of the package, beside the plain functions of JAX."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, sparse
from jax.experimental.jet import jet, jet_rules
from jax.extend.core import Jaxpr, Primitive, jaxprs_in_params
from jax.interpreters import ad
from jax.sharding import SingleDeviceSharding

import jaxsoftmax
from jaxsoftmax._core.primitives import PRIMITIVES
from tests.jaxsoftmax.calls import CALLS, LABELS, MORE_CALLS, QKV, X, of_floats
from tests.jaxsoftmax.transformations import gradient

NAMED = CALLS | MORE_CALLS
close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-4)
cross_entropy = jaxsoftmax.softmax_cross_entropy_with_integer_labels


def primitives_of(jaxpr: Jaxpr) -> Iterator[Primitive]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive
        for inner in jaxprs_in_params(eqn.params):
            yield from primitives_of(inner)


@functools.cache
def found_in(name: str) -> set[Primitive]:
    """The package's primitives in a call, its gradient and its tangent, and in the tangent and gradient of these."""
    call, xs = of_floats(name)
    moved = lambda f: lambda *xs: jax.jvp(f, xs, xs)
    each = (call, moved(call), gradient(call), moved(gradient(call)), gradient(gradient(call)))
    return {p for f in each for p in primitives_of(jax.make_jaxpr(f)(*xs).jaxpr)} & set(PRIMITIVES)


def test_the_calls_reach_every_primitive() -> None:
    reached = set().union(*map(found_in, NAMED))
    assert {p.name for p in PRIMITIVES} == {p.name for p in reached}


def test_every_primitive_has_rules() -> None:
    for primitive in PRIMITIVES:
        assert primitive in jet_rules, primitive
        # Another primitive carries the derivative of attention, whose operands have no tangents.
        assert (primitive in ad.primitive_jvps) == (primitive.name != "flash_attention"), primitive


@pytest.mark.parametrize("name", NAMED)
def test_sparsify_runs_every_call(name: str) -> None:
    """It needs no rule for operations on dense arrays."""
    call, xs = of_floats(name)
    for function in (call, gradient(call)):
        assert jax.eval_shape(sparse.sparsify(function), *xs) == jax.eval_shape(function, *xs)


@pytest.mark.parametrize("name", NAMED)
def test_every_call_has_taylor_series(name: str) -> None:
    call, xs = of_floats(name)
    for function in (call, gradient(call)):
        expanded = lambda *xs, f=function: jet(f, xs, [[x, x] for x in xs])
        out, terms = jax.eval_shape(expanded, *xs)
        assert out == jax.eval_shape(function, *xs)
        assert jax.tree.leaves(terms) == [y for y in jax.tree.leaves(out) for _ in range(2)]


def stock_loss(x: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, LABELS[..., None], -1)[..., 0]


def stock_capped_loss(x: jax.Array) -> jax.Array:
    return stock_loss(CAP * jnp.tanh(x / CAP))


def stock_attention(q: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, QKV["key"], QKV["value"], is_causal=True)


def stock_top_k(x: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.softmax(x), jax.lax.top_k(X, 3)[1], -1)


Q, CAP = QKV["query"], jnp.float32(5)
paired = functools.partial(jaxsoftmax.flash_attention, key=QKV["key"], value=QKV["value"], is_causal=True)
IN_A_PAGE = {"block_tables": jnp.arange(8)[:, None], "lengths": jnp.full(8, 6)}
POOLS = [jnp.pad(QKV[n], [(0, 0), (0, 2), (0, 0), (0, 0)]) for n in ("key", "value")]
paged = lambda q: jaxsoftmax.paged_attention(q, *POOLS, layout="pages_first", **IN_A_PAGE)
# Ours, JAX's own, and the operand.
STOCK: dict[str, tuple[Callable[..., Any], Callable[..., Any], jax.Array]] = {
    "softmax": (jaxsoftmax.softmax, jax.nn.softmax, X),
    "log_softmax": (jaxsoftmax.log_softmax, jax.nn.log_softmax, X),
    "logsumexp": (lambda x: jaxsoftmax.logsumexp(x, -1), lambda x: jax.nn.logsumexp(x, -1), X),
    "loss": (lambda x: cross_entropy(x, LABELS), stock_loss, X),
    "weighted loss": (lambda x: cross_entropy(x, LABELS, weights=0.5), lambda x: 0.5 * stock_loss(x), X),
    "linear": (lambda x: jaxsoftmax.linear_cross_entropy(x, jnp.eye(16), LABELS), stock_loss, X),
    "top_k": (lambda x: jaxsoftmax.top_k_softmax(x, 3)[0], stock_top_k, X),
    "soft cap": (lambda x: cross_entropy(x, LABELS, logits_soft_cap=CAP), stock_capped_loss, X),
    "rows scaled": (lambda x: jaxsoftmax.softmax(x, scale=X[0]), lambda x: jax.nn.softmax(x * X[0]), X),
    "attention": (paired, stock_attention, Q),
    "pages": (paged, stock_attention, Q),
}


@pytest.mark.parametrize("name", STOCK)
def test_taylor_series(name: str) -> None:
    ours, theirs, x = STOCK[name]
    series = [jnp.cos(x), jnp.sin(x)]

    @functools.partial(jax.jit, static_argnums=0)
    def expanded(f: Callable[..., Any]) -> Any:
        return jet(f, (x,), (series,)), jet(lambda x: gradient(f)(x)[0], (x,), (series,))

    jax.tree.map(close, expanded(ours), expanded(theirs))


def test_taylor_series_of_indices_and_under_patch() -> None:
    (values, _), (terms, of_indices) = jet(lambda x: jaxsoftmax.top_k_softmax(x, 16), (X,), ([X, jnp.cos(X)],))
    want = jet(lambda x: jax.nn.softmax(jnp.take_along_axis(x, jax.lax.top_k(X, 16)[1], -1)), (X,), ([X, jnp.cos(X)],))
    jax.tree.map(close, (values, terms), want)
    assert not np.any(of_indices)
    want = jet(lambda x: jax.nn.softmax(x).sum(), (X,), ([X, X],))
    with jaxsoftmax.patch():
        jax.tree.map(close, jet(lambda x: jax.nn.softmax(x).sum(), (X,), ([X, X],)), want)


@pytest.mark.parametrize("name", STOCK)
def test_checkify_reports_a_nan(name: str) -> None:
    ours, _, x = STOCK[name]
    wrong = x.at[(0,) * x.ndim].set(jnp.nan)

    @jax.jit
    @functools.partial(checkify.checkify, errors=checkify.float_checks)
    def run(x: jax.Array) -> Any:
        return ours(x)

    assert "nan generated by primitive" in run(wrong)[0].get()
    assert run(x)[0].get() is None


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "loss", "weighted loss", "linear", "attention"])
def test_checkify_reports_a_nan_that_a_gradient_makes(name: str) -> None:
    """Of finite operands, by a cotangent that is NaN and that no operation of JAX's own has made."""
    ours, _, x = STOCK[name]
    out = jax.eval_shape(ours, x)
    pulled = checkify.checkify(lambda x, ct: jax.vjp(ours, x)[1](ct)[0], errors=checkify.float_checks)
    run = jax.jit(pulled)
    assert "nan generated by primitive" in run(x, jnp.full(out.shape, jnp.nan))[0].get()
    assert run(x, jnp.ones(out.shape))[0].get() is None


def test_checkify_under_patch() -> None:
    with jaxsoftmax.patch():
        checked = checkify.checkify(jax.nn.softmax, errors=checkify.float_checks)
        assert "nan generated by primitive" in checked(jnp.array([jnp.nan, 1.0]))[0].get()
        assert checked(jnp.ones(2))[0].get() is None


def in_host_memory(x: jax.Array) -> jax.Array:
    return jax.device_put(x, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


@pytest.mark.parametrize("name", NAMED)
def test_operands_in_host_memory(name: str) -> None:
    """By type; results are where the operands are, and so are the gradients."""
    call, operands = NAMED[name]
    host = {n: in_host_memory(x) for n, x in operands.items()}
    moving = [n for n, x in operands.items() if x.dtype == jnp.float32]
    of_floats = lambda *xs: call(**host | dict(zip(moving, xs, strict=True)))
    both = lambda *xs: (y := of_floats(*xs), jax.vjp(of_floats, *xs)[1](y))
    found = jax.make_jaxpr(both)(*map(host.get, moving)).out_avals
    assert all(aval.memory_space == jax.memory.Space.Host for aval in found)


@pytest.mark.parametrize("name", STOCK)
def test_results_of_operands_in_host_memory(name: str) -> None:
    ours, _, x = STOCK[name]
    host = in_host_memory(x)
    for run in (ours, jax.jit(ours)):
        got = run(host)
        assert got.sharding.memory_kind == "pinned_host"
        close(got, ours(x))
    with jaxsoftmax.patch():
        assert jax.jit(jax.nn.softmax)(host).sharding.memory_kind == "pinned_host"
