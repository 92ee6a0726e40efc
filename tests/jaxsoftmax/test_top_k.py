"""`top_k_softmax`: values and indices against NumPy float64, derivatives against plain JAX's, and its messages."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsoftmax import _top_k, top_k_softmax
from pallas_kernels.softmax.problem import Op
from tests import top_k_oracle
from tests.jaxsoftmax.transformations import TRANSFORMED, Case, loss

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
# Rows that one selection orders, rows cut evenly, primes, and as many wanted as there are.
SIZES = [(1, 1), (7, 7), (300, 5), (1200, 7), (1500, 700), (4096, 1), (5003, 3), (8192, 64), (50257, 8)]

RUN = jax.jit(top_k_softmax, static_argnums=1, static_argnames=("normalize", "scale"))

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(3, 4, 40)))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("n, k", SIZES)
def test_values(n: int, k: int, narrow: bool) -> None:
    number = SIZES.index((n, k))
    dtype = DTYPES[1 + number % 2] if narrow else np.float32
    normalize = ("all", "top_k")[(number // 2 + narrow) % 2]
    top_k_oracle.check(RUN, top_k_oracle.rows(n, dtype), k, normalize=normalize)


@pytest.mark.parametrize("scale", [0.3, -1.0, 0.0, 1e-3])
@pytest.mark.parametrize("n, k", [(50, 9), (2500, 9)])
def test_scale(n: int, k: int, scale: float) -> None:
    x = top_k_oracle.rows(n, ml_dtypes.bfloat16 if (n > 50) == (scale > 0) else np.float32)
    x = x[np.isfinite(x).all(-1)] if scale == 0 else x
    top_k_oracle.check(RUN, x, k, scale=scale)


def test_float64() -> None:
    with jax.enable_x64(True):
        for normalize in ("all", "top_k"):
            top_k_oracle.check(top_k_softmax, top_k_oracle.rows(2501, np.float64), 9, normalize=normalize)


@pytest.mark.parametrize("n, k", [(40, 2), (41, 1), (96, 5), (97, 3), (256, 12), (1000, 1), (1024, 9)])
def test_many_levels(short_chunks: None, n: int, k: int) -> None:
    assert _top_k.chunk_size(n, k) < n
    normalize = ("all", "top_k")[n % 2]
    top_k_oracle.check(RUN, top_k_oracle.rows(n, np.float32), k, normalize=normalize)


@pytest.mark.parametrize("k", [1, 8, 50, 64, 256])
def test_chunks_leave_little_to_order(k: int) -> None:
    for n in (32000, 50176, 50257, 50261, 128256, 151936, 262144):
        c = _top_k.chunk_size(n, k)
        assert n % c == 0 or n == 50261, "a padded copy"
        assert -(-n // c) >= k
        assert n / c + k * c <= 4 * 2 * (n * k) ** 0.5
        assert _top_k.chunked(jnp.zeros((2, n), jnp.bfloat16), c).shape == (2, -(-n // c), c)


def test_the_kernel_sees_chunks(stand_ins: Any) -> None:
    c = _top_k.chunk_size(32000, 64)
    top_k_oracle.check(top_k_softmax, top_k_oracle.rows(32000, ml_dtypes.bfloat16), 64)
    assert stand_ins.ran(Op.STATS) == {(16 * 32000 // c, c, 1)}
    stand_ins.problems.clear()
    top_k_oracle.check(top_k_softmax, top_k_oracle.rows(64, np.float32), 4, scale=0.5)
    assert stand_ins.ran(Op.STATS) == {(16, 64, 1)}
    stand_ins.problems.clear()
    top_k_softmax(np.zeros((4, 64), np.float32), 4, implementation="xla")
    assert not stand_ins.problems


def test_shapes_axes_and_dtypes() -> None:
    x = np.random.default_rng(1).normal(size=(5, 33, 9)).astype(np.float32)
    for axis in (1, -2, 0, 2):
        y, indices = top_k_softmax(x, 3, axis=axis)
        truth, expected = top_k_oracle.top_k_softmax(np.moveaxis(x, axis, -1), 3)
        np.testing.assert_array_equal(indices, np.moveaxis(expected, -1, axis))
        np.testing.assert_allclose(y, np.moveaxis(truth, -1, axis), rtol=1e-5)
    for shape, k in (((3, 4), 0), ((0, 4), 2), ((3, 0), 0), ((0, 3000), 2), ((2, 3000), 0)):
        y, indices = top_k_softmax(jnp.ones(shape), k)
        assert y.shape == indices.shape == (*shape[:-1], k)
    assert top_k_softmax(np.arange(4), 2)[0].dtype == jnp.float32
    y, indices = top_k_softmax(jnp.asarray(x, jnp.float8_e4m3fn)[0], 2)
    assert (y.dtype, indices.dtype) == (jnp.float8_e4m3fn, jnp.int32)
    padded = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5003)), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(top_k_softmax(padded, 3)[1], jax.lax.top_k(padded.astype(jnp.float32), 3)[1])


def test_scales_that_are_arrays() -> None:
    x = jnp.asarray(X, jnp.bfloat16)
    scale = jnp.asarray([[1.0], [-2.0], [0.5], [0.0]])
    y, indices = jax.jit(lambda x, s: top_k_softmax(x, 4, scale=s))(x, scale)
    _, expected = top_k_oracle.top_k_softmax(x.astype(jnp.float32) * scale, 4)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_allclose(y, jax.lax.top_k(jax.nn.softmax(x.astype(jnp.float32) * scale), 4)[0], rtol=1e-2)
    assert y.dtype == jnp.bfloat16
    ours, theirs = (
        jax.grad(lambda s, f=f: jnp.sin(f(X, s)).sum())(scale)
        for f in (lambda x, s: top_k_softmax(x, 4, scale=s)[0], lambda x, s: plain(x * s, 4, "all"))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)


def plain(x: jax.Array, k: int, normalize: str) -> jax.Array:
    """What it is in `jax.nn`."""
    if normalize == "all":
        return jax.lax.top_k(jax.nn.softmax(x), k)[0]
    return jax.nn.softmax(jax.lax.top_k(x, k)[0])


CASES = {
    normalize: Case(
        lambda x, m=normalize: top_k_softmax(x, 3, normalize=m)[0],
        functools.partial(plain, k=3, normalize=normalize),
        (X,),
        (X[0, :2],),
        (1e-4, 1e-6),
    )
    for normalize in ("all", "top_k")
}
# Axes other than the first.
AXES: dict[str, Callable[..., Any]] = {
    "vmap of the second": lambda f, c: jax.vmap(f, 1, 0)(X),
    "vmap of the last": lambda f, c: jax.vmap(f, -1, 1)(X.transpose(0, 2, 1)),
    "vmap of grad of the second": lambda f, c: jax.vmap(jax.grad(loss(f)), 1)(X),
    "grad of vmap of the second": lambda f, c: jax.grad(loss(jax.vmap(f, 1)))(X),
}
SOME = ("hessian", "vmap of the last", "vmap of grad", "vmap of grad of a sum")


def check_transformation(name: str, normalize: str) -> None:
    CASES[normalize].check(name, AXES.get(name))


@pytest.mark.parametrize(
    "name, normalize",
    [(name, "all") for name in (*TRANSFORMED, *AXES)] + [(name, "top_k") for name in (*SOME, "jvp", "third")],
)
def test_transformations(name: str, normalize: str) -> None:
    check_transformation(name, normalize)


@pytest.mark.parametrize("name", SOME)
def test_transformations_of_many_levels(short_chunks: None, name: str) -> None:
    check_transformation(name, "all")


@pytest.mark.parametrize("name", SOME)
def test_transformations_over_kernels(stand_ins: Any, name: str) -> None:
    check_transformation(name, "all")
    assert stand_ins.ran(Op.STATS)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["all", "top_k"])
def test_gradients_of_long_rows(normalize: str) -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(3).normal(size=(2, 3000))
        t = jnp.asarray(np.random.default_rng(4).normal(size=(2, 3000)))
        for scale in (1.0, 0.5):
            ours = lambda x, s=scale: top_k_softmax(x, 5, normalize=normalize, scale=s)[0]
            theirs = lambda x, s=scale: plain(x * s, 5, normalize)
            got, want = (jax.jit(lambda x, f=f: jax.jvp(jax.grad(loss(f)), (x,), (t,)))(x) for f in (ours, theirs))
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-14), got, want)
            if normalize == "top_k":
                assert (np.count_nonzero(got[0], -1) == 5).all()


def test_gradients_at_holes() -> None:
    x = jnp.asarray(top_k_oracle.rows(2000, np.float32))
    has_finite_sum = np.isfinite(np.asarray(x).max(-1))
    for normalize in ("all", "top_k"):
        ours = jax.jit(jax.grad(loss(lambda x, m=normalize: top_k_softmax(x, 5, normalize=m)[0])))(x)
        theirs = jax.jit(jax.grad(loss(lambda x, m=normalize: plain_at(x, 5, m))))(x)
        np.testing.assert_allclose(ours[has_finite_sum], theirs[has_finite_sum], rtol=1e-4, atol=1e-8)
        assert np.isnan(ours[~has_finite_sum]).any(-1).all()


def plain_at(x: jax.Array, k: int, normalize: str) -> jax.Array:
    """`plain`, ordered by the logits: rounded probabilities may have ties that those do not."""
    at = jax.lax.top_k(jnp.where(x == 0, 0, x), k)[1]
    if normalize == "top_k":
        return jax.nn.softmax(jnp.take_along_axis(x, at, -1))
    return jnp.take_along_axis(jax.nn.softmax(x), at, -1)


def test_the_first_derivative_of_what_is_selected_touches_no_row() -> None:
    jaxpr = jax.make_jaxpr(lambda x, t: jax.jvp(lambda x: top_k_softmax(x, 5, normalize="top_k")[0], (x,), (t,)))(X, X)
    primitives = [eqn.primitive.name for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape == X.shape]
    assert not primitives


@pytest.mark.parametrize(
    "error, text, arguments",
    [
        (ValueError, "k=4, expected 0 <= k <= 3, the number of logits along axis 1", {"k": 4}),
        (ValueError, "k=-1, expected 0 <= k <= 2, the number of logits along axis 0", {"k": -1, "axis": -2}),
        (ValueError, "normalize='k', expected 'all' or 'top_k'", {"normalize": "k"}),
        (ValueError, "axis 2 is out of bounds for logits of rank 2, expected -2 <= axis < 2.", {"axis": 2}),
        (ValueError, "logits is a scalar, expected", {"logits": 1.0, "k": 1}),
        (ValueError, "implementation='cuda', expected one of", {"implementation": "cuda"}),
        (ValueError, "scale is nan", {"scale": float("nan")}),
        (ValueError, "scale has shape (2,), expected a shape that broadcasts to the logits'", {"scale": np.ones(2)}),
        (TypeError, "logits has dtype complex64", {"logits": np.zeros(3, np.complex64)}),
    ],
)
def test_messages(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error) as raised:
        top_k_softmax(**{"logits": np.zeros((2, 3), np.float32), "k": 2, **arguments})
    assert str(raised.value).startswith("top_k_softmax: " + text)


@pytest.mark.parametrize("name, value", [("k", 1.0), ("k", None), ("k", (1,)), ("axis", (0,)), ("axis", None)])
def test_integers_are_integers(name: str, value: Any) -> None:
    with pytest.raises(TypeError) as raised:
        top_k_softmax(np.zeros((2, 3), np.float32), **{"k": 1, name: value})
    assert str(raised.value).startswith(f"top_k_softmax: {name} is {value!r}, expected one integer. If it is traced")
    with pytest.raises(TypeError, match=r"top_k_softmax: k is JitTracer.*, expected one integer\..* static argument"):
        jax.jit(top_k_softmax)(np.zeros((2, 3), np.float32), 1)


def test_it_is_called_as_jax_lax_top_k() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (top_k_softmax, jax.lax.top_k))
    for (mine, parameter), name in zip(list(ours.items())[: len(theirs)], theirs, strict=True):
        assert (parameter.kind, parameter.default) == (theirs[name].kind, theirs[name].default)
        assert mine == ("logits" if name == "operand" else name)
    x = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    for is_stable in (True, False):
        np.testing.assert_array_equal(top_k_softmax(x, 3, axis=-1, is_stable=is_stable)[1], [[1, 2, 0]])
