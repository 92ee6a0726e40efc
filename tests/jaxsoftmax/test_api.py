"""Values: the semantics of `jax.nn` in every dtype, checked against NumPy float64 or against `jax.nn` itself."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxsoftmax
from jaxsoftmax import Stats
from tests import errors, oracle

RNG = np.random.default_rng(0)
INF = np.inf
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]

OURS = {"softmax": jaxsoftmax.softmax, "log_softmax": jaxsoftmax.log_softmax}
TRUTH = {"softmax": oracle.softmax, "log_softmax": oracle.log_softmax}
THEIRS = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}

COMPLEX = np.array([[1 + 2j, 0.5 - 1j, -0.3], [0, 1j, 2]], np.complex64)
SPECIAL_ROWS = np.array(
    [[0.0, 1.0, -INF, 2.0], [-INF] * 4, [INF, 0.0, 1.0, 2.0], [np.nan, 0.0, 1.0, 2.0], [1e4, 1e4, 0.0, -1e4]],
    np.float32,
)


SHAPES = [((7, 1000), -1), ((5, 33, 9), 1), ((4, 6, 8), (0, 2)), ((50257,), 0)]


@pytest.mark.parametrize(
    "op, shape, axis, dtype",
    # Each two of operation, shape and dtype meet once.
    [([*OURS][(i + j) % 2], *SHAPES[i], DTYPES[j]) for i in range(4) for j in range(3)],
    ids=str,
)
def test_accuracy(op: str, shape: tuple[int, ...], axis: Any, dtype: Any) -> None:
    x = (4 * RNG.normal(size=shape)).astype(dtype)
    truth = TRUTH[op](x, axis)
    reference = THEIRS[op](x.astype(np.float32), axis).astype(dtype)
    magnitude = oracle.log_softmax_terms(x, axis) if op == "log_softmax" else None
    errors.assert_accurate(OURS[op](x, axis), reference, truth, magnitude=magnitude)


@pytest.mark.parametrize("op", OURS)
def test_special_rows(op: str) -> None:
    np.testing.assert_allclose(OURS[op](SPECIAL_ROWS), TRUTH[op](SPECIAL_ROWS), rtol=1e-6)
    mask = np.array([[True, True, False, True]] + [[False] * 4] + [[True, True, False, False]] * 3)
    finite = np.where(mask, np.nan_to_num(SPECIAL_ROWS, nan=1.0, posinf=2.0, neginf=-2.0), np.nan)
    want = TRUTH[op](finite, where=mask)
    np.testing.assert_allclose(OURS[op](finite, where=mask), want, rtol=1e-6, err_msg="what is masked is not looked at")
    np.testing.assert_array_equal(OURS[op](finite, where=mask)[1], 0.0 if op == "softmax" else -INF)


@pytest.mark.parametrize(
    "op, scale, x",
    [
        ("softmax", 0.3, -1e10),
        ("softmax", -0.3, 3e12),
        ("softmax", 3.7, -1e30),
        ("log_softmax", 0.3, 3e12),
        ("log_softmax", -0.3, -1e30),
        ("log_softmax", 3.7, -1e10),
    ],
)
def test_rows_far_from_zero(op: str, scale: float, x: float) -> None:
    """The product with the scale rounds by more than weights can differ, in the maximum as anywhere."""
    rows, ones = np.full((2, 1000), x, np.float32), jnp.ones((2, 1000))
    y, pull = jax.vjp(jax.jit(functools.partial(OURS[op], scale=scale)), rows)
    np.testing.assert_allclose(y, TRUTH[op](rows, scale=scale), rtol=1e-6)
    np.testing.assert_allclose(*pull(ones), 0 * ones, atol=1e-6)


def test_logsumexp_of_special_rows() -> None:
    want = [np.log(1 + np.e + np.e**2), -INF, INF, np.nan, 1e4 + np.log(2)]
    np.testing.assert_allclose(jaxsoftmax.logsumexp(SPECIAL_ROWS, 1), want, rtol=1e-6)
    assert jaxsoftmax.logsumexp(SPECIAL_ROWS[0], where=np.zeros(4, bool)) == -INF
    for row in ([INF, 0.0, 1.0], [INF, -INF, INF]):
        ours, theirs = (jax.grad(f)(jnp.asarray(row)) for f in (jaxsoftmax.logsumexp, jax.nn.logsumexp))
        np.testing.assert_array_equal(ours, theirs)


HALF = np.array([[True, False, True], [False] * 3])  # of a mask, and none of its second row


@pytest.mark.parametrize("op", OURS)
def test_gradient_where_masked(op: str) -> None:
    x = jnp.asarray([[1.0, np.nan, 2.0], [np.nan, 3.0, INF]])

    def loss(function: Any, x: jax.Array) -> jax.Array:
        y = function(x, where=HALF)
        return (jnp.log(y) if op == "softmax" else y).sum(where=HALF)

    got = jax.grad(functools.partial(loss, OURS[op]))(x)
    want = jax.grad(functools.partial(loss, THEIRS[op]))(jnp.where(HALF, x, 0.0))
    np.testing.assert_allclose(got, np.where(HALF, want, 0.0), rtol=1e-5, atol=1e-6)
    got = jax.grad(lambda x: jaxsoftmax.logsumexp(x, 1, where=HALF)[0])(x)
    np.testing.assert_allclose(got, oracle.softmax(x, where=HALF) * [[1], [0]], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: jaxsoftmax.logsumexp(x, 1, where=HALF)[1])(x), 0)
    ones = np.where(HALF, 1.0, INF), np.where(HALF, 1.0, 0.0)
    along = lambda t: jax.jvp(lambda x: jaxsoftmax.logsumexp(x, 1, where=HALF), (x,), (jnp.float32(t),))[1]
    np.testing.assert_array_equal(*map(along, ones), err_msg="a tangent that is masked is not looked at")


BROADCAST = [((5,), (4, 5)), ((3, 1, 5), (3, 4, 5)), ((4, 1), (2, 1, 5)), ((), (5,))]


@pytest.mark.parametrize(
    "op, x, where, kernels",
    [([*OURS, "logsumexp"][i % 3], *BROADCAST[i % 4], ("reference", "stand-in")[i > 5]) for i in range(12)],
    indirect=["kernels"],
    ids=str,
)
def test_operands_broadcast_with_their_masks(op: str, x: tuple[int, ...], where: tuple[int, ...], kernels: Any) -> None:
    record = kernels()
    operand, mask = RNG.normal(size=x).astype(np.float32), RNG.random(where) < 0.6
    full = jnp.broadcast_shapes(x, where)
    scale = {} if op == "logsumexp" else {"scale": RNG.random((*full[:-1], 1)).astype(np.float32)}

    def loss(x: jax.Array) -> jax.Array:
        y = getattr(jaxsoftmax, op)(x, -1, where=mask, **scale)
        return jnp.sin(jnp.where(jnp.isfinite(y), y, 0.0)).sum()

    got = jax.jit(jax.value_and_grad(loss))(operand)
    want = jax.jit(jax.value_and_grad(lambda x: loss(jnp.broadcast_to(x, full))))(operand)
    for ours, whole in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-4, atol=1e-6)
    assert record is None or {p.rows * p.cols for p in record.problems} == {math.prod(full)}


def test_axes_of_any_iterable() -> None:
    x = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    for axis in (np.array([0, 2]), {0, 2}, iter((0, 2)), [np.int8(-3), -1], range(0, 3, 2)):
        np.testing.assert_array_equal(jaxsoftmax.softmax(x, axis), jaxsoftmax.softmax(x, (0, 2)), str(axis))
    np.testing.assert_array_equal(jaxsoftmax.logsumexp(x, np.array(1)), jaxsoftmax.logsumexp(x, 1))


def test_long_rows_of_float16() -> None:
    n = 200_000
    x = jnp.zeros(n, jnp.float16)
    assert not jax.nn.softmax(x).any(), "jax.nn loses it; when it does not any more, say so in the docs"
    np.testing.assert_array_equal(jaxsoftmax.softmax(x), np.full(n, 1 / n, np.float16))
    np.testing.assert_array_equal(jaxsoftmax.log_softmax(x), np.full(n, -np.log(n), np.float16))
    np.testing.assert_array_equal(jaxsoftmax.logsumexp(x), np.log(n).astype(np.float16))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda d: d.__name__)
def test_gradients_of_long_16_bit_rows(dtype: Any) -> None:
    n = 100_000
    x = (2 * np.random.default_rng(1).normal(size=n)).astype(dtype)
    x[3] = 6  # whose probability is no subnormal number, as what softmax keeps of it is in 16 bits
    target = np.zeros(n)
    target[3] = 1.0
    wide = x.astype(np.float64)
    for mode in (jax.jit, lambda f: f):
        grad = mode(jax.grad(lambda x: -jaxsoftmax.log_softmax(x)[3]))(jnp.asarray(x))
        want = oracle.softmax(wide) - target
        assert errors.max_error(grad, want) <= 2
        summed = mode(jax.grad(lambda x: jaxsoftmax.log_softmax(x).sum().astype(jnp.float32) / n))(jnp.asarray(x))
        summed = np.asarray(summed)
        assert np.isfinite(summed.astype(np.float32)).all()
        np.testing.assert_allclose(summed.astype(float), 1 / n - oracle.softmax(wide), atol=2e-2 / n, rtol=2e-2)
    y = oracle.softmax(wide)
    got = np.asarray(jax.grad(lambda x: 1000 * jaxsoftmax.softmax(x)[3].astype(jnp.float32))(jnp.asarray(x)))
    np.testing.assert_allclose(got.astype(float), 1000 * y * (target - y[3]), rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_promotion(x64: bool) -> None:
    for dtype in (np.int8, np.uint32, np.int64, np.bool_, np.float64, ml_dtypes.float8_e4m3fn):
        x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
        with jax.enable_x64(x64):
            want = jax.nn.logsumexp(x).dtype
            tolerance = 4 * float(jnp.finfo(want).eps)
            for op in OURS:
                got = OURS[op](x)
                assert got.dtype == want
                np.testing.assert_allclose(got, TRUTH[op](x), rtol=tolerance)
                assert OURS[op](x, where=x == 0).dtype == want
            assert jaxsoftmax.logsumexp(x).dtype == jaxsoftmax.logsumexp(x, where=x == 0).dtype == want
            np.testing.assert_allclose(jaxsoftmax.logsumexp(x), oracle.logsumexp(x), rtol=tolerance)
            of_labels = jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, [1, 2])
            truth = oracle.cross_entropy(x, np.array([1, 2])).loss
            for loss in (of_labels, jaxsoftmax.softmax_cross_entropy(x, np.eye(3)[[1, 2]])):
                assert loss.dtype == (want if want == jnp.float64 else jnp.float32)
                np.testing.assert_allclose(loss, truth, rtol=4 * float(jnp.finfo(loss.dtype).eps))


def test_integers_are_neither_cut_nor_overflow() -> None:
    x = np.array([[0, 3, 255], [254, 255, 1]], np.uint8)
    np.testing.assert_allclose(jaxsoftmax.softmax(x), oracle.softmax(x.astype(np.float64)), rtol=1e-6, atol=1e-37)
    for dtype in (np.int64, np.uint64):
        x = np.array([2**40, 0]).astype(dtype)
        np.testing.assert_array_equal(jaxsoftmax.softmax(x), [1, 0])
        np.testing.assert_array_equal(jaxsoftmax.log_softmax(x), [0, -(2.0**40)])
        assert jaxsoftmax.logsumexp(x) == jaxsoftmax.logsumexp(x[0]) == jaxsoftmax.logsumexp(2**40) == 2.0**40
    assert jaxsoftmax.logsumexp(2**40, b=2**40) == jax.nn.logsumexp(2**40, b=2.0**40)


@pytest.mark.parametrize("op", OURS)
def test_float8_without_a_sign(op: str) -> None:
    x = np.array([[1.0, 2.0, 4.0], [8.0, 0.5, 1.0]], ml_dtypes.float8_e8m0fnu)
    for scale in (-1.0, -0.25):
        got = OURS[op](x, scale=scale)
        assert got.dtype == x.dtype
        if op == "softmax":  # a logarithm has the sign that the dtype lacks
            np.testing.assert_array_equal(got, jnp.asarray(oracle.softmax(x, scale=scale), jnp.float32).astype(x.dtype))
    probabilities, indices = jaxsoftmax.top_k_softmax(x, 2, scale=-1.0)
    np.testing.assert_array_equal(indices, [[0, 1], [1, 2]])
    assert np.isfinite(probabilities.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2], ids=lambda d: d.__name__)
def test_float8(dtype: Any) -> None:
    """One of the two has an infinity, of nothing at all; the other has NaN for it, as in `jax.nn`."""
    x, nothing = RNG.normal(size=(2, 4)).astype(dtype), np.zeros(4, bool)
    for got in (jaxsoftmax.logsumexp(x[:, :0], 1), jaxsoftmax.logsumexp(x, 1, where=nothing)):
        with np.errstate(invalid="ignore"):
            theirs = jax.nn.logsumexp(x[:, :0], 1)
        for result in (got, theirs):
            np.testing.assert_array_equal(result.astype(np.float32), -INF if dtype is ml_dtypes.float8_e5m2 else np.nan)
    mask = np.array([[True, False, True, True], [False] * 4])
    for op in OURS:
        y, vjp = jax.vjp(OURS[op], jnp.asarray(x))
        assert y.dtype == vjp(y)[0].dtype == dtype
        assert errors.max_error(y, TRUTH[op](x)) <= 1
        grad = jax.grad(lambda x, op=op: OURS[op](x, where=mask)[0, 0].astype(jnp.float32))(jnp.asarray(x))
        want = jax.grad(lambda x, op=op: OURS[op](x, where=mask)[0, 0])(x.astype(np.float32))
        np.testing.assert_allclose(grad.astype(np.float32), want, atol=0.1)
        assert grad.dtype == dtype


@pytest.mark.parametrize("shape, axis", [((0,), 0), ((3, 0), 1), ((0, 3), 1), ((0, 0), None), ((3, 0), ())], ids=str)
def test_zero_size(shape: tuple[int, ...], axis: Any) -> None:
    x = jnp.zeros(shape)
    for function in OURS.values():
        y, vjp = jax.vjp(lambda x, f=function: f(x, axis), x)
        assert y.shape == vjp(y)[0].shape == shape
        assert jax.jit(jax.vmap(lambda x, f=function: f(x, axis)))(x[None]).shape == (1, *shape)
    out = jaxsoftmax.logsumexp(x, axis)
    np.testing.assert_array_equal(out, np.full(out.shape, -INF))
    assert jax.grad(lambda x: jaxsoftmax.logsumexp(x, axis).sum())(x).shape == shape


def test_scalars_and_rows_of_one() -> None:
    assert jaxsoftmax.softmax(3.0, axis=None) == 1
    assert jaxsoftmax.log_softmax(3.0, axis=()) == 0
    assert jaxsoftmax.logsumexp(3.0) == 3
    np.testing.assert_array_equal(jaxsoftmax.softmax(np.array([[2.0], [np.nan], [-INF]])), [[1], [np.nan], [np.nan]])


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("fill", [2.0, 2, True], ids=["float", "int", "bool"])
def test_weak_types(fill: Any, x64: bool) -> None:
    with jax.enable_x64(x64):
        x, narrow = jnp.full(3, fill), jnp.ones(3, jnp.bfloat16)
        assert x.weak_type == (fill is not True)  # whose type is not weak
        want = type_of(jax.nn.logsumexp(x))
        assert not want[1]
        assert not jaxsoftmax.softmax_cross_entropy_with_integer_labels(jnp.full((2, 3), fill), [0, 1]).weak_type
        if isinstance(fill, float):
            assert want == type_of(jax.nn.softmax(x)) == type_of(jax.nn.log_softmax(x, where=x > 1))
        for ours in (*OURS.values(), jaxsoftmax.logsumexp):
            assert type_of(ours(x)) == type_of(jax.jit(ours)(x)) == type_of(ours(x, where=x > 1)) == want
            assert (ours(x) * narrow).dtype == want[0]
        for op in OURS if isinstance(fill, float) and not x64 else ():
            for derivative in (lambda f: jax.grad(lambda x: f(x)[0])(x), lambda f: jax.jvp(f, (x,), (x,))[1]):
                assert type_of(derivative(OURS[op])) == type_of(derivative(THEIRS[op]))


def type_of(x: jax.Array) -> tuple[Any, bool]:
    return x.dtype, x.weak_type


@pytest.mark.parametrize(
    "axis, where", [(-1, None), ((0, 1), [True, False, True]), (None, None), (0, np.ones((4, 2, 3), bool))], ids=str
)
@pytest.mark.parametrize("op", OURS)
def test_complex_is_as_in_jax_nn(op: str, axis: Any, where: Any) -> None:
    whole = jnp.broadcast_to(COMPLEX, np.broadcast_shapes((2, 3), np.shape(where)))
    arguments: dict[str, Any] = {} if where is None else {"where": jnp.asarray(where)}
    for scale in (0.5, np.array([[0.5], [-2.0]], np.float32)):
        got = OURS[op](COMPLEX, axis, scale=scale, **arguments)
        np.testing.assert_allclose(got, THEIRS[op](whole * scale, axis, **arguments), rtol=1e-6)
        assert got.dtype == jnp.complex64
    with jax.enable_x64(True):
        assert OURS[op](COMPLEX.astype(np.complex128)).dtype == np.complex128


@pytest.mark.parametrize(
    "a, b, sign, where",
    [
        ("complex", None, False, None),
        ("complex", None, True, [[True, False, True]]),
        ("complex", "real", True, None),
        ("real", "complex", True, [[True, False, True]]),
        ("complex", "complex", False, [[True, False, True]]),
    ],
)
def test_logsumexp_of_complex_is_as_in_jax_scipy(a: str, b: str | None, sign: bool, where: Any) -> None:
    x = COMPLEX if a == "complex" else COMPLEX.real.astype(jnp.bfloat16)
    weights = {None: None, "complex": COMPLEX[:1], "real": np.array([1.0, -2.0, 0.5], np.float32)}[b]
    mask = None if where is None else jnp.asarray(where)
    got, want = (f(x, -1, weights, True, sign, mask) for f in (jaxsoftmax.logsumexp, jax.nn.logsumexp))
    jax.tree.map(lambda ours, theirs: np.testing.assert_equal(ours.dtype, theirs.dtype), got, want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)
    grad, theirs = (
        jax.grad(lambda x, f=f: jax.tree.leaves(f(x, -1, weights, where=mask))[0].sum().real)(COMPLEX)
        for f in (jaxsoftmax.logsumexp, jax.nn.logsumexp)
    )
    np.testing.assert_allclose(grad, theirs, rtol=1e-5, atol=1e-6)


SCALED_MASK, SCALED_LABELS = np.arange(21).reshape(3, 7) % 4 > 0, jnp.array([0, 3, 6])
SCALED: dict[str, tuple[Any, Any]] = {
    **{op: (OURS[op], THEIRS[op]) for op in OURS},
    **{
        f"{op} masked": tuple(
            lambda x, f=f, **how: jnp.where(SCALED_MASK, f(x, where=SCALED_MASK, **how), 0)
            for f in (OURS[op], THEIRS[op])
        )
        for op in OURS
    },
    "loss": (
        lambda x, **how: jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, SCALED_LABELS, **how),
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, SCALED_LABELS),
    ),
    "top_k": (
        lambda x, **how: jaxsoftmax.top_k_softmax(x, 7, **how)[0],
        lambda x: jax.lax.top_k(jax.nn.softmax(x), 7)[0],
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_is_a_factor_of_the_logits(name: str) -> None:
    """Values and gradients, for numbers of every kind, which are constants, and for arrays, which have gradients."""
    ours, theirs = SCALED[name]
    numbers = 2, 0.125, np.float32(3), np.int64(2), 0, -2.0
    arrays = jnp.float32(1.7), jnp.array([[0.5], [1.0], [-2.0]])
    for i, scale in enumerate((*numbers, *arrays)):
        dtype = DTYPES[i % 3]
        x, eps = jnp.asarray(RNG.normal(size=(3, 7)), dtype), float(jnp.finfo(dtype).eps)
        is_array = isinstance(scale, jax.Array)
        operands = (x, scale) if is_array else (x,)
        mine = lambda x, s=scale: ours(x, scale=s)
        other = lambda x, s=scale: theirs(x.astype(jnp.float32) * s)
        found, want = (
            jax.jit(lambda *xs, f=f: (lambda y, pull: (y, *pull(jnp.sin(y))))(*jax.vjp(f, *xs)))(*operands)
            for f in (mine, other)
        )
        assert found[0].dtype == (jnp.float32 if name == "loss" else dtype)
        for got, right in zip(found, want, strict=True):
            np.testing.assert_allclose(*map(np.float32, (got, right)), rtol=8 * eps + 1e-4, atol=8 * eps)
        if name in OURS and not is_array and scale > 0:
            assert [eqn.primitive.name for eqn in jax.make_jaxpr(mine)(x).eqns] == [name, "sub"]


def test_a_scale_beyond_the_dtype_is_infinite() -> None:
    """Any warning is an error here, NumPy's of a cast that overflows too."""
    x = np.array([0.0, 1.0], np.float32)
    for scale in (1e300, -1e300, INF):
        for got in (OURS["softmax"](x, scale=scale), OURS["log_softmax"](x, scale=scale)):
            np.testing.assert_array_equal(got, [np.nan, np.nan])
        assert np.isnan(jaxsoftmax.top_k_softmax(x, 1, scale=scale)[0])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(OURS["softmax"](x.astype(np.float64), scale=1e300), [0, 1])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_logsumexp_arguments(weighted: bool, masked: bool) -> None:
    x = np.concatenate([RNG.normal(size=(4, 3)), [[-INF] * 3, [INF, 0, 1], [np.nan, 0, 1]]]).astype(np.float32)
    b = np.float32([1.0, -2.0, 0.5]) if weighted else None
    where = np.array([True, False, True]) if masked else None
    for keepdims, return_sign in ((False, False), (True, weighted), (masked, True)):
        arguments = {"axis": 1, "b": b, "keepdims": keepdims, "return_sign": return_sign, "where": where}
        got, want = (f(x, **arguments) for f in (jaxsoftmax.logsumexp, jax.nn.logsumexp))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)


@pytest.mark.parametrize(
    "a, b, axis", [((5,), (4, 5), -1), ((5,), (4, 5), 0), ((4, 1), (2, 1, 5), None), ((4, 5), (1,), -1)], ids=str
)
def test_logsumexp_of_weights_of_another_shape(a: tuple[int, ...], b: tuple[int, ...], axis: Any) -> None:
    x, weights = RNG.normal(size=a).astype(np.float32), RNG.normal(size=b).astype(np.float32)
    got, sign = jaxsoftmax.logsumexp(x, axis, weights, return_sign=True)
    total = (np.exp(x, dtype=np.float64) * weights).sum(axis)
    np.testing.assert_allclose(got, np.log(abs(total)), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(sign, np.sign(total))


@pytest.mark.parametrize("x64", [False, True])
def test_logsumexp_promotes_weights(x64: bool) -> None:
    for a, b in (
        (jnp.zeros(3, jnp.bfloat16), 2.0),
        (jnp.zeros(3, jnp.bfloat16), np.arange(3)),
        (jnp.zeros(3, jnp.float16), np.arange(3) > 0),
        (jnp.zeros(3, jnp.bfloat16), jnp.ones(3, jnp.float16)),
        (np.arange(3), jnp.ones(3, jnp.bfloat16)),
        (np.arange(3), np.arange(3)),
        (1.0, jnp.ones(3, jnp.bfloat16)),
        (np.float32(1), np.ones(3)),
    ):
        with jax.enable_x64(x64):
            assert jaxsoftmax.logsumexp(a, b=b).dtype == jax.nn.logsumexp(a, b=b).dtype, (a, b)


def test_logsumexp_weights_in_16_bit() -> None:
    x, b = jnp.zeros(100_000, jnp.float16), jnp.ones(100_000, jnp.float16)
    assert jaxsoftmax.logsumexp(x, b=b) == np.float16(np.log(100_000))


def test_merge() -> None:
    x = RNG.normal(size=(4, 60)).astype(np.float32) * 30
    x[1] = -INF
    x[2, :20] = -INF
    parts = [Stats(*map(jnp.float32, oracle.stats(part, 1))) for part in np.split(x, 3, 1)]
    for merged in (
        jaxsoftmax.merge(*parts),
        jaxsoftmax.merge(parts[2], jaxsoftmax.merge(parts[1], parts[0])),
        jaxsoftmax.merge(*parts, Stats(jnp.full(4, -INF), jnp.zeros(4))),
    ):
        np.testing.assert_allclose(jaxsoftmax.log_normalizer(merged), oracle.logsumexp(x, 1), rtol=1e-6)
    np.testing.assert_array_equal(jaxsoftmax.merge(parts[0]).sum, parts[0].sum)


def test_merge_of_special_states() -> None:
    """Every pair of numbers, each a row of its own: the state of both, and its logsumexp, are those of the pair."""
    pairs = np.array(list(itertools.product([INF, -INF, np.nan, 2.0, -1e30], repeat=2)), np.float32)
    states = [Stats(jnp.max(x, 1), jnp.exp(x - jnp.max(x, 1)[:, None]).sum(1)) for x in (pairs[:, :1], pairs[:, 1:])]
    states = [Stats(m, jnp.where(m == -INF, 0, total)) for m, total in states]
    # Maximum instructions that drop NaN leave it in the sum.
    dropped = [Stats(jnp.where(jnp.isnan(m), 1.0, m), total) for m, total in states]
    want = oracle.logsumexp(pairs, 1)
    for a, b in (states, states[::-1], dropped):
        for merged in (jaxsoftmax.merge(a, b), jaxsoftmax.merge(jaxsoftmax.merge(a), jaxsoftmax.merge(b))):
            np.testing.assert_allclose(jaxsoftmax.log_normalizer(merged), want, rtol=1e-6)
    state = Stats(jnp.array([3.0, INF]), jnp.array([4.0, np.nan]))
    gradient = jax.grad(lambda state: jaxsoftmax.log_normalizer(state).sum())(state)
    np.testing.assert_array_equal(gradient.max, [1, 1])
    np.testing.assert_array_equal(gradient.sum, [0.25, 0])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn], ids=lambda d: d.__name__)
def test_merge_accumulates_in_float32(dtype: Any) -> None:
    part = Stats(jnp.array([1.0, 448.0], dtype), jnp.full(2, 448.0 if dtype is jnp.float8_e4m3fn else 60000.0, dtype))
    merged = jaxsoftmax.merge(part, part, part)
    assert merged.max.dtype == merged.sum.dtype == jaxsoftmax.merge(part).sum.dtype == jnp.float32
    np.testing.assert_array_equal(merged.max, part.max.astype(jnp.float32))
    np.testing.assert_array_equal(merged.sum, 3 * part.sum.astype(jnp.float32))
    assert jax.grad(lambda m: jaxsoftmax.merge(part, Stats(m, part.sum)).sum.sum())(part.max).dtype == dtype


def test_merge_of_other_types_and_shapes() -> None:
    with jax.enable_x64(True):
        assert jaxsoftmax.merge(Stats(0.0, np.float32(1)), Stats(np.float64(0), 1)).sum.dtype == jnp.float64
    column, row = Stats(np.zeros((2, 1)), np.ones((2, 1))), Stats(np.arange(3), 1)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        merged = jaxsoftmax.merge(column, row, Stats(np.float16(1), 2))
    want = np.log(1 + np.exp(np.arange(3)) + 2 * np.e)
    np.testing.assert_allclose(jaxsoftmax.log_normalizer(merged), np.broadcast_to(want, (2, 3)), rtol=1e-6)
    assert merged.max.dtype == jnp.float32
    assert jaxsoftmax.merge(row).sum.shape == (3,)
