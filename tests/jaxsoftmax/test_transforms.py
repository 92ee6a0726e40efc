"""Every JAX transformation, against the same transformation of `jax.nn`, or of optax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import jaxsoftmax
from tests.jaxsoftmax import labelled
from tests.pairwise import pairwise

SHAPE = (3, 4, 5)
X = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32)
T = jnp.asarray(np.random.default_rng(1).normal(size=SHAPE), jnp.float32)
WEIGHTS = jnp.asarray(np.random.default_rng(2).normal(size=SHAPE), jnp.float32)
MASK = jnp.asarray(np.random.default_rng(3).random(SHAPE) < 0.7)

OPS = {
    "softmax": (jaxsoftmax.softmax, jax.nn.softmax),
    "log_softmax": (jaxsoftmax.log_softmax, jax.nn.log_softmax),
    "logsumexp": (functools.partial(jaxsoftmax.logsumexp, axis=-1), functools.partial(jax.nn.logsumexp, axis=-1)),
    "cross_entropy": (
        labelled.varied(jaxsoftmax.softmax_cross_entropy_with_integer_labels),
        labelled.varied(optax.softmax_cross_entropy_with_integer_labels),
    ),
}
MASKED = ["softmax masked", "log_softmax masked", "logsumexp masked"]

Function = Callable[..., jax.Array]


def pair_of(name: str) -> tuple[Function, Function]:
    """Ours and theirs, as functions of one array of which the last axes are the mask's, if there is one."""
    ours, theirs = OPS[name.removesuffix(" masked")]
    if name in OPS:
        return ours, theirs

    def with_mask(function: Function, x: jax.Array) -> jax.Array:
        where = MASK if x.shape == SHAPE else MASK[(0,) * (3 - x.ndim)]
        y = function(x, where=where)
        return jnp.where(where, y, 0.0) if y.ndim == x.ndim else y

    return functools.partial(with_mask, ours), functools.partial(with_mask, theirs)


def check(pair: tuple[Function, Function], transformed: Callable[[Function], Any], rtol: float = 1e-4) -> None:
    ours, theirs = (transformed(function) for function in pair)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10), ours, theirs)
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.dtype, a.weak_type), (b.dtype, b.weak_type)), ours, theirs)


def loss(function: Function) -> Function:
    """A scalar with a cotangent that depends on the output."""
    return lambda x: (jnp.sin(y := function(x)) * WEIGHTS.ravel()[: y.size].reshape(y.shape)).sum()


def linear(function: Function) -> Function:
    """A scalar with a cotangent that is known, so that vmap does not map it."""
    return lambda x: ((y := function(x)) * WEIGHTS.ravel()[: y.size].reshape(y.shape)).sum()


UNARY = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "disable_jit": lambda f: _disabled(f),
    "grad": lambda f: jax.grad(loss(f))(X),
    "value_and_grad": lambda f: jax.value_and_grad(loss(f))(X),
    "jvp": lambda f: jax.jvp(f, (X,), (T,)),
    "jit_jvp": lambda f: jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(X, T),
    "linearize": lambda f: jax.linearize(f, X)[1](T),
    "vjp_of_vjp": lambda f: jax.linear_transpose(jax.linearize(f, X)[1], X)(f(X)),
    "jacfwd": lambda f: jax.jacfwd(f)(X[0]),
    "jacrev": lambda f: jax.jacrev(f)(X[0]),
    "hessian": lambda f: jax.hessian(loss(f))(X[0]),
    "hvp": lambda f: jax.jvp(jax.grad(loss(f)), (X,), (T,))[1],
    "grad_of_grad": lambda f: jax.grad(lambda x: (jax.grad(loss(f))(x) * T).sum())(X),
    "grad_of_jvp": lambda f: jax.grad(lambda x: jnp.sin(jax.jvp(f, (x,), (T,))[1]).sum())(X),
    "third": lambda f: jax.jvp(lambda x: jax.jvp(jax.grad(loss(f)), (x,), (T,))[1], (X,), (X,))[1],
    "vmap_of_hvp_of_linear": lambda f: jax.vmap(lambda x: jax.jvp(jax.grad(linear(f)), (x,), (T[0],))[1])(X),
    "vmap_of_jvp": lambda f: jax.vmap(lambda t: jax.jvp(f, (X,), (t,))[1])(jnp.stack([T, 2 * T])),
    "jvp_of_vmap": lambda f: jax.jvp(jax.vmap(f), (X,), (T,)),
    "vmap_of_hessian": lambda f: jax.vmap(jax.hessian(loss(f)))(X[:2]),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + 1, f(x)), 0, X)[1],
    "grad_of_scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, r: (c + loss(f)(r), None), 0.0, x)[0])(X),
    "jvp_of_scan": lambda f: jax.jvp(lambda x: jax.lax.map(f, x), (X,), (T,)),
    "map_batched": lambda f: jax.lax.map(f, X, batch_size=2),
    "while": lambda f: jax.lax.fori_loop(0, 3, lambda _, x: x + f(x).sum(), X),
    "jvp_of_while": lambda f: jax.jvp(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x + f(x).sum(), x), (X,), (T,)),
    "grad_of_cond": lambda f: jax.grad(lambda x: jax.lax.cond(x[0, 0, 0] > 0, loss(f), lambda x: x.sum(), x))(X),
    "remat": lambda f: jax.grad(jax.checkpoint(loss(f)))(X),
    "remat_jvp": lambda f: jax.jvp(jax.checkpoint(f), (X,), (T,)),
}


def _disabled(function: Function) -> jax.Array:
    with jax.disable_jit():
        return function(X)


EAGER = {"eager", "disable_jit", "grad", "jvp", "linearize"}


# Each transformation of all operations, and of one with a mask.
CASES = [(name, op) for i, name in enumerate(UNARY) for op in (*OPS, MASKED[i % 3])]


@pytest.mark.parametrize("name, op", CASES)
def test_like_jax_nn(name: str, op: str) -> None:
    transformed = UNARY[name]
    # One program compiles sooner than the dozens of operations it consists of.
    check(pair_of(op), transformed if name in EAGER else lambda f: jax.jit(lambda: transformed(f))(), rtol=1e-3)


AXES = [0, 1, -2, (0, 2), (1, 2), (2, 0), None, ()]


@pytest.mark.parametrize(
    "op, axis", [(op, axis) for i, axis in enumerate(AXES) for op in (*OPS, MASKED[i % 3])], ids=str
)
def test_axes(op: str, axis: Any) -> None:
    check(pair_of(op), lambda f: jax.jit(jax.value_and_grad(loss(_with_axis(f, axis))))(X), rtol=1e-3)


def _with_axis(function: Any, axis: Any) -> Function:
    masked = bool(function.args) if isinstance(function, functools.partial) else False
    inner = function.args[0] if masked else function
    bare = inner.func if isinstance(inner, functools.partial) else inner
    if not masked:
        return lambda x: bare(x, axis=axis)
    return lambda x: jnp.where(MASK, y, 0.0) if (y := bare(x, axis=axis, where=MASK)).shape == x.shape else y


@pytest.mark.parametrize("op, in_axis, out_axis", pairwise([*OPS], [0, 1, 2, -1], [0, 1, -1]))
def test_vmap_axes(op: str, in_axis: int, out_axis: int) -> None:
    @functools.partial(jax.jit, static_argnums=0)
    def everything(f: Function) -> Any:
        return (
            jax.vmap(f, in_axis, out_axis)(X),
            jax.vmap(jax.grad(lambda x: jnp.sin(f(x)).sum()), in_axis, out_axis)(X),
            jax.vmap(jax.grad(linear(f)), in_axis, out_axis)(X),
            jax.grad(lambda x: jnp.sin(jax.vmap(f, in_axis)(x)).sum())(X),
        )

    check(OPS[op], everything)


@pytest.mark.parametrize("op, first, second", pairwise([*OPS], [0, 1, 2], [0, 1]))
def test_nested_vmap(op: str, first: int, second: int) -> None:
    check(OPS[op], lambda f: jax.vmap(jax.vmap(f, second), first)(X))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0), (0, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_vmap_with_a_mask(op: str, axes: tuple[int | None, int | None]) -> None:
    x, mask = (
        a if d is None else jnp.moveaxis(jnp.stack([a, jnp.flip(a)]), 0, d)
        for a, d in zip((X[0], MASK[0]), axes, strict=True)
    )

    def masked(f: Function) -> Function:
        return lambda x, m: jnp.where(m, y, 0.0) if (y := f(x, where=m)).shape == x.shape else y

    @functools.partial(jax.jit, static_argnums=0)
    def everything(f: Function) -> Any:
        return (
            jax.vmap(masked(f), axes)(x, mask),
            jax.vmap(jax.grad(lambda x, m: jnp.sin(masked(f)(x, m)).sum()), axes)(x, mask),
            jax.vmap(jax.grad(lambda x, m: linear(functools.partial(masked(f), m=m))(x)), axes)(x, mask),
            jax.grad(lambda x: jnp.sin(jax.vmap(masked(f), axes)(x, mask)).sum())(x),
        )

    check(OPS[op], everything)


@pytest.mark.parametrize("op", OPS)
def test_a_cotangent_sums_over_what_its_tangent_was_broadcast_to(op: str) -> None:
    def transposed(f: Function) -> Any:
        mapped = lambda t: jax.vmap(lambda x: jax.jvp(f, (x,), (t,))[1])(X)
        return jax.jit(jax.grad(lambda t: jnp.sin(mapped(t)).sum()))(T[0])

    check(OPS[op], transposed)


def test_vmap_of_an_unmapped_operand_does_not_materialise_it() -> None:
    jaxpr = jax.make_jaxpr(jax.vmap(lambda t: jax.jvp(jaxsoftmax.softmax, (X,), (t,))[1]))(jnp.stack([T] * 7))
    assert "broadcast_in_dim" in str(jaxpr) or "reshape" in str(jaxpr)
    assert not [e for e in jaxpr.eqns if e.primitive.name == "broadcast_in_dim" and e.outvars[0].aval.shape[0] == 7]


def test_vmap_moves_no_data() -> None:
    x = jnp.zeros((6, 7, 8, 9))
    for axis in (0, 1, 2):
        text = jax.jit(jax.vmap(jaxsoftmax.softmax, axis, axis)).lower(x).compile().as_text()
        assert "transpose(" not in text


@pytest.mark.parametrize("op, mode", [(op, m) for op in OPS for m in ("fwd", "rev")] + [(op, "rev") for op in MASKED])
def test_check_grads(op: str, mode: str) -> None:
    check_grads(pair_of(op)[0], (X[0],), order=2, modes=[mode], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("op", OPS)
def test_eval_shape(op: str) -> None:
    ours, theirs = (jax.eval_shape(f, jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)) for f in OPS[op])
    assert (ours.shape, ours.dtype) == (theirs.shape, jnp.float32 if op == "cross_entropy" else theirs.dtype)


def test_jaxprs_read_well() -> None:
    forward = str(jax.make_jaxpr(jaxsoftmax.softmax)(X))
    assert "b:f32[3,4,5] = softmax[axes=(2,) implementation=None scale=1.0] a" in forward
    assert len(forward.splitlines()) == 3
    for op, want in (
        (jaxsoftmax.softmax, ["softmax", "name", "mul", "softmax_tangent"]),
        (jaxsoftmax.log_softmax, ["log_softmax", "mul", "log_softmax_cotangent"]),
    ):
        eqns = jax.make_jaxpr(lambda x, ct, op=op: jax.vjp(op, x)[1](2 * ct))(X, T).eqns
        assert [e.primitive.name for e in eqns if e.primitive.name != "pjit"] == want


def test_reverse_mode_keeps_one_array() -> None:
    for op in (jaxsoftmax.softmax, jaxsoftmax.log_softmax):
        _, vjp = jax.vjp(op, X)
        kept = [leaf for leaf in jax.tree.leaves(vjp) if getattr(leaf, "size", 0) >= X.size]
        assert len(kept) == 1


@pytest.mark.parametrize(
    "policy, forwards",
    [
        (None, 2),
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.dots_saveable, 2),
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names("softmax_out"), 1),
        (jax.checkpoint_policies.save_any_names_but_these("softmax_out"), 2),
        (lambda primitive, *_, **__: primitive.name == "softmax", 1),
    ],
)
def test_remat_policies(policy: Any, forwards: int) -> None:
    run = jax.checkpoint(lambda x: jaxsoftmax.softmax(jnp.sin(x)), policy=policy)
    function = jax.grad(lambda x: (run(x) * WEIGHTS).sum())
    assert str(jax.make_jaxpr(function)(X)).count("= softmax[") == forwards
    want = jax.grad(lambda x: (jax.nn.softmax(jnp.sin(x)) * WEIGHTS).sum())(X)
    np.testing.assert_allclose(function(X), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("op", [*OPS, *MASKED])
def test_checks_on(op: str) -> None:
    pair = pair_of(op)
    with jax.enable_checks(True):
        check(pair, lambda f: jax.grad(loss(f))(X))
        check(pair, lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(X))
    with jax.checking_leaks():
        check(pair, lambda f: jax.jit(jax.grad(loss(f)))(X))
    with jax.debug_nans(True):
        check(pair, lambda f: jax.jit(jax.grad(loss(f)))(X))


@pytest.mark.parametrize("op", OPS)
def test_nan_debugging_finds_ours(op: str) -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        OPS[op][0](jnp.array([1.0, jnp.nan]))


def test_no_retrace() -> None:
    traces = []

    @jax.jit
    def function(x: jax.Array) -> jax.Array:
        traces.append(1)
        return jaxsoftmax.softmax(x, scale=2)

    function(X)
    function(X + 1)
    assert len(traces) == 1


def test_offloading_by_name() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["softmax_out"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    run = jax.checkpoint(jaxsoftmax.softmax, policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: (run(x) * WEIGHTS).sum()))(X))
    assert jaxpr.count("= softmax[") == 1
    assert "<host>" in jaxpr


def test_spmd_axis_name() -> None:
    mesh = jax.make_mesh((3,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:3])
    with jax.set_mesh(mesh):
        got = jax.jit(jax.vmap(jax.grad(lambda x: (jaxsoftmax.softmax(x) ** 2).sum()), spmd_axis_name="d"))(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(X), rtol=1e-4, atol=1e-6)
