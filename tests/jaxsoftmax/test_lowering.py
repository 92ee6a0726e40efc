"""From primitive to program: which platform gets what, how operands become rows, export, and the plain custom_vjp."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._softmax import primitives as layout
from pallas_kernels import custom_vjp
from pallas_kernels.softmax.problem import Op
from tests import oracle

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
OPS = {"softmax": jaxsoftmax.softmax, "log_softmax": jaxsoftmax.log_softmax}


@pytest.mark.parametrize(
    "shape, axes, expected",
    [
        ((4, 6, 8), (2,), (None, 24, 8, 1)),
        ((4, 6, 8), (1,), (None, 4, 6, 8)),
        ((4, 6, 8), (0,), (None, 1, 4, 48)),
        ((4, 6, 8), (1, 2), (None, 4, 48, 1)),
        ((4, 6, 8), (0, 1, 2), (None, 1, 192, 1)),
        ((4, 6, 8), (0, 2), ((1, 0, 2), 6, 32, 1)),
        ((2, 3, 4, 5), (0, 2), ((1, 3, 0, 2), 15, 8, 1)),
        ((4, 1, 8), (0, 2), (None, 1, 32, 1)),
        ((4, 6, 1), (1,), (None, 4, 6, 1)),
        ((4, 6, 8), (), (None, 192, 1, 1)),
        ((4, 1, 8), (1,), (None, 32, 1, 1)),
        ((), (), (None, 1, 1, 1)),
    ],
)
def test_views(shape: tuple[int, ...], axes: tuple[int, ...], expected: Any) -> None:
    seen = layout.view(shape, axes)
    assert (seen.order, seen.rows, seen.cols, seen.inner) == expected
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    np.testing.assert_array_equal(seen.from_rows(seen.to_rows(x)), x)


MASKS = [None, (4, 6, 8), (4, 1, 8), (8,), (6, 1), (1, 1, 1)]


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 2), (1, 2), None, ()], ids=str)
def test_kernels_see_rows(stand_ins: Any, axis: Any) -> None:
    for mask, name in zip(MASKS, ["softmax", "log_softmax", "logsumexp"] * 2, strict=True):
        where = None if mask is None else np.random.default_rng(1).random(mask) < (2 if mask == (1, 1, 1) else 0.7)
        scale = {} if name == "logsumexp" else {"scale": 2.0}
        got = getattr(jaxsoftmax, name)(X, axis, where=where, **scale)
        np.testing.assert_allclose(got, getattr(oracle, name)(X, axis, where=where, **scale), rtol=1e-4, atol=1e-6)
    assert stand_ins.problems


def test_kernels_see_operands_smaller_than_their_mask(stand_ins: Any) -> None:
    where = np.random.default_rng(1).random(X.shape) < 0.7
    for x in (X[0, 0], X[:, :1], X[..., :1]):
        whole = np.broadcast_to(x, X.shape)
        for name, op in OPS.items():
            got, pull = jax.vjp(functools.partial(op, where=where), x)
            np.testing.assert_allclose(got, getattr(oracle, name)(whole, -1, where), rtol=1e-5, atol=1e-6)
            assert pull(jnp.ones_like(got))[0].shape == x.shape
        want = oracle.logsumexp(whole, -1, where=where)
        np.testing.assert_allclose(jaxsoftmax.logsumexp(x, -1, where=where), want, rtol=1e-5)
    assert {(p.rows, p.cols) for p in stand_ins.problems} == {(24, 8)}


def test_masks_shared_by_all_rows_stay_small(stand_ins: Any) -> None:
    mask = np.arange(8) < 5
    jaxsoftmax.softmax(X, where=mask)
    assert {p.where for p in stand_ins.problems} == {"shared"}
    stand_ins.accepts = lambda problem: problem.where != "shared"
    stand_ins.problems.clear()
    np.testing.assert_allclose(jaxsoftmax.softmax(X[1:], where=mask), oracle.softmax(X[1:], where=mask), rtol=1e-5)
    assert {p.where for p in stand_ins.problems} == {"shared", "full"}


def test_transposed_copies_only_when_a_kernel_is_named(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: problem.inner == 1
    np.testing.assert_allclose(jaxsoftmax.softmax(X, 0), oracle.softmax(X, 0), rtol=1e-5)
    assert stand_ins.ran(Op.SOFTMAX) == {(1, 4, 48)}
    np.testing.assert_allclose(jaxsoftmax.softmax(X, 0, implementation="mosaic_gpu"), oracle.softmax(X, 0), rtol=1e-5)
    assert (48, 4, 1) in stand_ins.ran(Op.SOFTMAX)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_kernels_too(stand_ins: Any, op: str) -> None:
    function = functools.partial(OPS[op], implementation="mosaic_gpu", scale=0.5)
    jax.jit(jax.vjp(function, X)[1])(X)
    cotangent = Op.SOFTMAX_TANGENT if op == "softmax" else Op.LOG_SOFTMAX_COTANGENT
    assert {p.op for p in stand_ins.problems} == {Op(op), cotangent}


@pytest.mark.parametrize("op", OPS)
def test_the_plain_custom_vjp_gives_the_same_gradients(stand_ins: Any, op: str) -> None:
    x, ct = jnp.asarray(X[0]), jnp.cos(X[0])
    kernel, primitive = getattr(custom_vjp, op), OPS[op]
    for run in (lambda f: f, jax.jit):
        y, pull = jax.vjp(run(functools.partial(kernel, scale=0.5)), x)
        want, pull_primitive = jax.vjp(run(functools.partial(primitive, scale=0.5)), x)
        np.testing.assert_allclose(y, want, rtol=1e-6)
        np.testing.assert_allclose(pull(ct)[0], pull_primitive(ct)[0], rtol=1e-5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(kernel, (x,), (ct,))
    stand_ins.accepts = lambda _: False
    with pytest.raises(
        NotImplementedError, match=op + ": no kernel takes 6 rows of 8 float32: first: it is not for this"
    ):
        kernel(x)
