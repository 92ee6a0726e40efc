"""Every JAX transformation, against the same transformation of `jax.nn`, or of optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import jaxsoftmax
from tests.jaxsoftmax import labelled
from tests.jaxsoftmax.transformations import TRANSFORMED, Case, Function, linear, loss
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


def masked(function: Function, x: jax.Array, mask: jax.Array = MASK) -> jax.Array:
    """Of an array of which the last axes are the mask's; what is excluded gives 0."""
    where = mask[(0,) * (mask.ndim - x.ndim)] if x.ndim < mask.ndim else mask
    y = function(x, where=where)
    return jnp.where(where, y, 0.0) if y.ndim == x.ndim else y


CASES = {name: Case(*pair, (X,), (X[0],)) for name, pair in OPS.items()}
CASES |= {name: Case(*(functools.partial(masked, f) for f in OPS[name.split()[0]]), (X,), (X[0],)) for name in MASKED}
# What `test_vmap_axes` maps, and what is the same of one operand.
NAMES = [
    name for name in TRANSFORMED if name not in ("vmap", "vmap of grad", "grad of vmap", "grad of the last operand")
]


# Each transformation of all operations, and of one with a mask.
@pytest.mark.parametrize("name, op", [(name, op) for i, name in enumerate(NAMES) for op in (*OPS, MASKED[i % 3])])
def test_like_jax_nn(name: str, op: str) -> None:
    CASES[op].check(name)


AXES = [0, 1, -2, (0, 2), (1, 2), (2, 0), None, ()]


@pytest.mark.parametrize(
    "op, axis", [(op, axis) for i, axis in enumerate(AXES) for op in (*OPS, MASKED[i % 3])], ids=str
)
def test_axes(op: str, axis: Any) -> None:
    def along(f: Function) -> Function:
        f = functools.partial(f, axis=axis)
        return functools.partial(masked, f) if op in MASKED else f

    Case(*map(along, OPS[op.split()[0]]), (X,), (X,)).check(
        "along an axis", lambda f, c: jax.value_and_grad(loss(f))(X)
    )


@pytest.mark.parametrize("op, in_axis, out_axis", pairwise([*OPS], [0, 1, 2, -1], [0, 1, -1]))
def test_vmap_axes(op: str, in_axis: int, out_axis: int) -> None:
    def everything(f: Function, _: Case) -> Any:
        return (
            jax.vmap(f, in_axis, out_axis)(X),
            jax.vmap(jax.grad(lambda x: jnp.sin(f(x)).sum()), in_axis, out_axis)(X),
            jax.vmap(jax.grad(linear(f)), in_axis, out_axis)(X),
            jax.grad(lambda x: jnp.sin(jax.vmap(f, in_axis)(x)).sum())(X),
        )

    CASES[op].check(f"vmap {in_axis} {out_axis}", everything)


@pytest.mark.parametrize("op, first, second", pairwise([*OPS], [0, 1, 2], [0, 1]))
def test_nested_vmap(op: str, first: int, second: int) -> None:
    CASES[op].check(f"vmap {first} of vmap {second}", lambda f, c: jax.vmap(jax.vmap(f, second), first)(X))


@pytest.mark.parametrize("op, axes", pairwise([*OPS], [(0, None), (None, 0), (1, 0), (0, 2), (2, 2)]), ids=str)
def test_vmap_with_a_mask(op: str, axes: tuple[int | None, int | None]) -> None:
    x, mask = (
        a if d is None else jnp.moveaxis(jnp.stack([a, jnp.flip(a)]), 0, d)
        for a, d in zip((X[0], MASK[0]), axes, strict=True)
    )

    def everything(f: Function, _: Case) -> Any:
        of_both = lambda x, m: masked(f, x, m)
        return (
            jax.vmap(of_both, axes)(x, mask),
            jax.vmap(jax.grad(loss(of_both)), axes)(x, mask),
            jax.vmap(jax.grad(linear(of_both)), axes)(x, mask),
            jax.grad(loss(jax.vmap(of_both, axes)))(x, mask),
        )

    CASES[op].check(f"vmap {axes} with a mask", everything)


@pytest.mark.parametrize("op", OPS)
def test_a_cotangent_sums_over_what_its_tangent_was_broadcast_to(op: str) -> None:
    def transposed(f: Function, _: Case) -> Any:
        return jax.grad(loss(lambda t: jax.vmap(lambda x: jax.jvp(f, (x,), (t,))[1])(X)))(T[0])

    CASES[op].check("transposed", transposed)


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
    check_grads(CASES[op].ours, (X[0],), order=2, modes=[mode], atol=2e-2, rtol=2e-2)


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


@pytest.mark.parametrize("op", [*OPS, *MASKED])
def test_checks_on(op: str) -> None:
    CASES[op].check_under_debugging()


@pytest.mark.parametrize("op", OPS)
def test_nan_debugging_finds_ours(op: str) -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        OPS[op][0](jnp.array([1.0, jnp.nan]))


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
