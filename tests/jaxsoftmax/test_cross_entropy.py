"""Cross entropy: values and gradients against NumPy float64 and against optax, and what the programs do for them."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsoftmax
from pallas_kernels.softmax.problem import Op
from tests import errors, oracle

INF = np.inf
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]

ours = jaxsoftmax.softmax_cross_entropy_with_integer_labels
theirs = optax.softmax_cross_entropy_with_integer_labels

# Our options' names, and the oracle's.
NAMES = {"label_smoothing": "smoothing", "logits_soft_cap": "soft_cap", "ignore_index": "ignored"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "spread": {"label_smoothing": 1.0},
    "z_loss": {"z_loss": 1e-2},
    "capped": {"logits_soft_cap": 3.0, "scale": 0.5},
    "ignored": {"ignore_index": 2},
    "weighted": {"weights": np.array([0.5, -2.0, 0.0, 1.5, 1 / 3], np.float32)},
    "all": {
        "label_smoothing": 0.2,
        "z_loss": 1e-2,
        "logits_soft_cap": 5.0,
        "scale": 2.0,
        "ignore_index": 2,
        "weights": 0.25,
    },
}
WHERE: dict[str, Any] = {
    "none": None,
    "full": np.array([[True] * 7, [True, False] * 3 + [True], [False] * 7, [False] * 6 + [True], [True] * 7]),
    "shared": (np.arange(7) < 5)[None],
    "rows": np.array([True, False, True, True, False]),
}


def logits(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return (3 * np.random.default_rng(shape).normal(size=shape)).astype(dtype)


def labels(rows: tuple[int, ...], cols: int) -> np.ndarray:
    return np.random.default_rng(cols).integers(0, cols, rows).astype(np.int32)


def truth(x: Any, y: Any, axis: Any = -1, where: Any = None, scale: float = 1.0, **options: Any) -> oracle.CrossEntropy:
    if where is not None and np.ndim(where) == np.ndim(y) and np.ndim(y) != np.ndim(x):
        where = np.expand_dims(where, axis)
    return oracle.cross_entropy(x, y, axis, where, scale, **{NAMES.get(k, k): v for k, v in options.items()})


def value_and_grad(x: Any, y: Any, *arguments: Any, **options: Any) -> Any:
    """The losses beside each gradient and by themselves; and the gradients, from two passes, from one and with lse."""

    def total(x: jax.Array, **way: Any) -> Any:
        loss = jax.tree.leaves(ours(x, y, *arguments, **options | way))[0]
        return loss.sum(), loss

    @jax.jit
    def everything(x: jax.Array) -> Any:
        ways = {}, {"weights": options.get("weights", 1.0)}, {"return_lse": True}
        both = [jax.value_and_grad(functools.partial(total, **way), has_aux=True)(x) for way in ways]
        return [loss for (_, loss), _ in both] + [total(x)[1]], [gradient for _, gradient in both]

    return everything(jnp.asarray(x))


def check(x: Any, y: Any, *arguments: Any, ulps: float = 8, **options: Any) -> None:
    """Losses and gradients within `ulps` of the terms they are the sums of."""
    want = truth(x, y, *arguments, **options)
    losses, gradients = value_and_grad(x, y, *arguments, **options)
    for loss in losses:
        assert loss.dtype == (jnp.float64 if gradients[0].dtype == jnp.float64 else jnp.float32)
        # A sum of exponentials near 1 is right to its own last place, so its logarithm is so far from 0.
        assert errors.max_error(loss, want.loss, magnitude=want.loss_terms + 0.1) <= ulps
    for gradient in gradients:
        assert gradient.dtype == jnp.asarray(x).dtype
        assert errors.max_error(gradient, want.gradient, magnitude=want.gradient_terms) <= ulps


@pytest.mark.parametrize(
    "options, where",
    [(options, where) for options in OPTIONS for where in WHERE if options in ("plain", "all") or where == "full"],
)
def test_options(options: str, where: str) -> None:
    check(logits((5, 7)), np.array([0, 2, 2, 1, 6], np.int32), -1, WHERE[where], ulps=32, **OPTIONS[options])


SHAPES = [((7, 1000), -1), ((5, 33, 9), 1), ((2, 3, 6, 8), (0, 2)), ((50257,), 0)]


@pytest.mark.parametrize(
    "shape, axis, dtype",
    [*((*SHAPES[i], DTYPES[(i + j) % 3]) for i in range(4) for j in range(2)), (*SHAPES[0], jnp.float64)],
    ids=str,
)
def test_accuracy(shape: tuple[int, ...], axis: Any, dtype: Any) -> None:
    with jax.enable_x64(dtype == jnp.float64):
        x = logits(shape, dtype)
        axes = (axis,) if isinstance(axis, int) else axis
        y = labels(tuple(n for d, n in enumerate(shape) if d not in {a % len(shape) for a in axes}), 8)
        options = {"label_smoothing": 0.1, "z_loss": 1e-3, "logits_soft_cap": 4.0} if len(shape) % 2 else {}
        check(x, y, axis, ulps=4 if x.itemsize == 2 else 32 if options else 16, **options)


def test_all_axes_are_flattened_as_listed() -> None:
    """`test_transforms.py` has several axes, and `test_lowering.py` has them with options and masks."""
    x, y = logits((2, 3, 4)), labels((), 24)
    with pytest.raises(ValueError, match="must be of type"):
        theirs(jnp.asarray(x), jnp.asarray(y), None)
    order = np.unravel_index(y, (4, 3, 2))
    loss = ours(x, y, (2, 1, 0))
    np.testing.assert_allclose(loss, theirs(jnp.asarray(x), jnp.asarray(y), (2, 1, 0)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours(x, np.ravel_multi_index(order[::-1], (2, 3, 4)), None), loss)


def test_smoothed_labels_are_shared_by_what_is_not_masked() -> None:
    x, y = logits((5, 7)), labels((5,), 5)
    among_five = truth(x, y, where=WHERE["shared"], label_smoothing=0.3)
    np.testing.assert_allclose(among_five.loss, truth(x[:, :5], y, label_smoothing=0.3).loss)
    smooth = optax.smooth_labels(jax.nn.one_hot(y, 5), 0.3)
    np.testing.assert_allclose(optax.softmax_cross_entropy(jnp.asarray(x[:, :5]), smooth), among_five.loss, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"weights": 0.5}], ids=["plain", "weighted"])
def test_float64_outlives_the_context_it_was_made_in(options: dict[str, Any]) -> None:
    x, y = logits((3, 5), np.float64), labels((3,), 5)
    with jax.enable_x64(True):
        loss, vjp = jax.vjp(lambda x: ours(x, y, **options), jnp.asarray(x))
        ct = jnp.ones_like(loss)
    (gradient,) = vjp(ct)
    assert gradient.dtype == jnp.float64
    np.testing.assert_allclose(gradient, truth(x, y, **options).gradient, rtol=1e-14, atol=1e-15)


def test_float16_losses_do_not_overflow() -> None:
    n = 100_000
    x = jnp.zeros((2, n), jnp.float16).at[0, 5].set(-60000.0).at[1, 5].set(-jnp.inf)
    assert not np.isfinite(theirs(x, jnp.array([3, 3]))).any(), "optax loses it; when it does not any more, say so"
    (loss, *_), gradients = value_and_grad(x, np.array([5, 3], np.int32))
    np.testing.assert_allclose(loss, [60000 + np.log(n - 1), np.log(n - 1)], rtol=1e-6)
    for gradient in gradients:
        assert gradient.dtype == jnp.float16
        assert gradient[0, 5] == -1
        np.testing.assert_array_equal(gradient[0, 6:9], np.full(3, 1 / (n - 1), np.float16))


@pytest.mark.parametrize("offset", [0.0, 1e4, -3e4])
def test_confident_rows_keep_their_digits(offset: float) -> None:
    x = np.float32([[14, 0, 0.5, 1], [3, 9, 2, 1]]) + np.float32(offset)
    want = truth(x, [0, 1])
    assert want.loss.max() < 0.01
    losses, gradients = value_and_grad(x, np.array([0, 1]))
    for loss in losses:
        np.testing.assert_allclose(loss, want.loss, rtol=0, atol=1.2e-7)
    # The label's is a difference from 1; the others are as small as their probabilities.
    for gradient in gradients:
        at_label = np.arange(4) == [[0], [1]]
        np.testing.assert_allclose(gradient[at_label], want.gradient[at_label], rtol=0, atol=1.2e-7)
        np.testing.assert_allclose(gradient[~at_label], want.gradient[~at_label], rtol=1e-6)


def test_ignored_rows_are_not_looked_at() -> None:
    x = logits((6, 5))
    x[1], x[3, 2], x[4] = np.nan, INF, -INF
    y = np.array([0, -100, 4, -100, -100, 2])
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 2.0}):
        check(x, y, ignore_index=-100, ulps=16, **options)
        total = lambda x, o=options: jnp.sin(ours(x, y, ignore_index=-100, **o)).sum()
        hessian = jax.jit(jax.hessian(total))(jnp.asarray(x))
        assert np.isfinite(hessian).all()
        assert not hessian[1].any()
    np.testing.assert_array_equal(ours(x, y, ignore_index=-100, weights=INF)[y == -100], 0)
    _, lse = ours(x, y, ignore_index=-100, return_lse=True)
    np.testing.assert_allclose(lse, oracle.logsumexp(x, -1), rtol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
def test_labels_are_compared_before_they_are_narrowed(x64: bool) -> None:
    x, far = logits((4, 300)), 2**32 + 1
    numbers = [1, far, far, 2**63 - 1]
    with jax.enable_x64(True):
        held = jnp.array(numbers)
    with jax.enable_x64(x64):
        for y in (np.array(numbers), np.array(numbers, np.uint64), numbers, held):
            call = lambda where, ignored=None, y=y: ours(x, y, where=where, ignore_index=ignored)
            # Labels are not checked where it is not known which rows count.
            loss = jax.jit(call)(np.array([True, True, False, True]))
            np.testing.assert_array_equal(np.isnan(loss), [False, True, False, True])
            loss = jax.jit(functools.partial(call, ignored=far))(np.ones(4, bool))
            np.testing.assert_array_equal(np.isnan(loss), [False, False, False, True])
            assert not loss[1:3].any()
            with pytest.raises(ValueError, match=r"labels has 4294967297 at \(1,\)"):
                call(None)
    high = np.array([1, 2**32 - 1, 2**31], np.uint32)
    np.testing.assert_array_equal(np.isnan(jax.jit(ours)(x[:3], high)), [False, True, True])
    np.testing.assert_array_equal(jax.jit(functools.partial(ours, ignore_index=2**31))(x[:3], high)[2], 0)


BROADCAST: list[tuple[tuple[int, ...], tuple[int, ...], Any, tuple[int, ...] | None]] = [
    ((5, 7), (1,), -1, None),
    ((1, 7), (5,), -1, None),
    ((7, 5), (1,), 0, (5,)),
    ((2, 1, 7), (1, 4), -1, (2, 4, 7)),
    ((1, 3, 4), (5,), (2, 1), (5,)),
    ((1, 7), (1,), -1, (5, 7)),
]


@pytest.mark.parametrize("shape, labelled, axis, mask", BROADCAST, ids=str)
def test_labels_broadcast_as_those_of_optax(shape: Any, labelled: Any, axis: Any, mask: Any) -> None:
    x, y = jnp.asarray(logits(shape)), jnp.asarray(labels(labelled, 7))
    where = None if mask is None else jnp.ones(mask, bool).at[0].set(False)
    ways = (functools.partial(theirs), ours, functools.partial(ours, weights=1.0))

    @jax.jit
    def each(x: jax.Array, y: jax.Array) -> Any:
        total = lambda x, f: (jnp.sin(f(x, y, axis, where)).sum(), f(x, y, axis, where))
        return [jax.value_and_grad(functools.partial(total, f=f), has_aux=True)(x) for f in ways]

    want, *found = each(x, y)
    for got in found:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)
    np.testing.assert_allclose(ours(x, np.asarray(y), axis, where), want[0][1], rtol=1e-4, atol=1e-5)


def test_labels_that_are_lists_of_arrays() -> None:
    x = logits((2, 3, 5))
    got = jax.jit(lambda a, b: ours(x, [[a, b, 1], [b, a, a]]))(2, 4)
    np.testing.assert_allclose(got, ours(x, [[2, 4, 1], [4, 2, 2]]), rtol=1e-5)
    np.testing.assert_allclose(ours(x[0], [jnp.int32(2), np.int8(4), 1]), got[0], rtol=1e-5)


def test_labels_out_of_range() -> None:
    x = logits((4, 5))
    bad = np.array([0, 5, -1, 4])
    with pytest.raises(ValueError, match=r"labels has 5 at \(1,\), expected 0 <= label < 5.* Pass ignore_index=5 to"):
        ours(x, bad)
    with pytest.raises(ValueError, match=r"labels has 5 at \(1,\)"):
        jax.jit(lambda x: ours(x, bad))(x)
    with pytest.raises(ValueError, match=r"labels has 5 at \(1,\)"):
        ours(x, bad, ignore_index=-1)
    for call in (lambda f: jax.jit(f)(x, bad), lambda f: jax.vmap(f)(x, bad)):
        loss = call(lambda x, y: ours(x, y, label_smoothing=0.1))
        np.testing.assert_array_equal(np.isnan(loss), [False, True, True, False])
        gradient = call(jax.grad(lambda x, y: ours(x, y).sum()))
        np.testing.assert_array_equal(np.isnan(gradient), np.array([[False], [True], [True], [False]]).repeat(5, 1))
    both = jax.jit(functools.partial(ours, return_lse=True, ignore_index=-1))
    loss, lse = both(x, bad)
    np.testing.assert_array_equal(np.isnan(loss), [False, True, False, False])
    np.testing.assert_allclose(lse, oracle.logsumexp(x, -1), rtol=1e-6)
    where = np.array([True, False, False, True])
    np.testing.assert_array_equal(ours(x, bad, where=where)[1:3], 0)
    np.testing.assert_array_equal(jax.jit(lambda w: ours(x, bad, where=w))(where)[1:3], 0)


# `test_lowering.py` has the gradients of other options.
GAPS: dict[str, dict[str, Any]] = {
    "weighted": {"weights": np.array([0.5, 2.0, 1.0, -1.0], np.float32)},
    "all": {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 3.0, "weights": 0.5},
    "lse": {"label_smoothing": 0.1, "z_loss": 0.1, "return_lse": True},
}
MODES: dict[str, Any] = {
    "reverse": jax.grad,
    "forward": jax.jacfwd,
    "forward over reverse": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
}


def with_gaps(x: jax.Array, y: jax.Array, used: jax.Array, of_lse: jax.Array, **options: Any) -> jax.Array:
    """Some rows' losses and logsumexps, in one number that is not linear in them."""
    loss, *lse = jax.tree.leaves(ours(x, y, **options))
    total = (jnp.where(used, loss, 0.0) * jnp.arange(1.0, 5.0)).sum()
    return jnp.sin(total + sum((of_lse * each).sum() for each in lse))


@pytest.mark.parametrize(
    "options, mode", [("weighted", "reverse"), ("lse", "reverse"), *zip(["all", "lse"] * 2, [*MODES][1:], strict=True)]
)
def test_wrong_labels_whose_losses_are_not_used(options: str, mode: str) -> None:
    x, y, used = jnp.asarray(logits((4, 5))), np.array([0, -100, 7, 4]), np.array([True, False, False, True])
    of_lse = np.array([0.0, 1.0, 0.0, 2.0])
    run = jax.jit(lambda y, *rest: MODES[mode](lambda x: with_gaps(x, y, *rest, **GAPS[options]))(x))
    np.testing.assert_allclose(run(y, used, of_lse), run(np.where(used, y, 0), used, of_lse), rtol=1e-5, atol=1e-6)
    assert not run(y, used, 0 * of_lse)[1:3].any()


def test_a_wrong_label_shows_in_the_gradient_of_its_weight_where_its_loss_is_used() -> None:
    x, y, used = jnp.asarray(logits((4, 5))), np.array([0, -100, 7, 4]), np.array([True, True, False, True])
    of_weights = jax.grad(lambda w, y, u: jnp.where(u, ours(x, y, weights=w), 0.0).sum())
    found = jax.jit(of_weights)(jnp.full(4, 2.0), y, used)
    np.testing.assert_array_equal(np.isnan(found), [False, True, False, False])
    assert found[2] == 0


def test_special_rows() -> None:
    x = np.array(
        [[0, 1, -INF, 2], [-INF] * 4, [INF, 0, 1, 2], [np.nan, 0, 1, 2], [1e4, 1e4, 0, -1e4], [0, 1, -INF, 2]],
        np.float32,
    )
    y = np.array([0, 0, 1, 2, 0, 2])
    (loss, *_), gradients = value_and_grad(x, y)
    e = np.exp([0, 1, 2]).sum()
    np.testing.assert_allclose(loss, [np.log(e), np.nan, INF, np.nan, np.log(2), INF], rtol=1e-6)
    assert np.isnan(ours(x[2], 0))
    finite = [[1 / e - 1, np.e / e, 0, np.e**2 / e], [np.nan] * 4, [np.nan] * 4, [np.nan] * 4, [-0.5, 0.5, 0, 0]]
    for gradient in gradients:
        np.testing.assert_allclose(gradient[:5], finite, rtol=1e-6)
        np.testing.assert_allclose(gradient[5], [1 / e, np.e / e, -1, np.e**2 / e], rtol=1e-6)
    smoothed = ours(x[:1], y[:1], label_smoothing=0.1)
    np.testing.assert_array_equal(smoothed, INF, err_msg="a share of the target is where nothing can be")
    check(x[:1], y[:1], -1, np.isfinite(x[:1]), label_smoothing=0.1)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "logits_soft_cap": 3.0}], ids=["plain", "capped"])
def test_what_is_masked_is_not_looked_at(options: dict[str, Any]) -> None:
    x = np.array([[1.0, np.nan, 2.0, INF], [np.nan, 3.0, INF, 0.0]], np.float32)
    mask = np.array([[True, False, True, False], [False] * 4])
    y = np.array([2, 0])
    check(x, y, -1, mask, ulps=16, **options)
    hessian = jax.jit(jax.hessian(lambda x: jnp.sin(ours(x, y, where=mask, **options)).sum()))(jnp.asarray(x))
    assert np.isfinite(hessian).all()


def test_weights() -> None:
    x, y = logits((3, 5)), labels((3,), 5)
    np.testing.assert_array_equal(ours(x, y, weights=2), 2 * ours(x, y))
    assert ours(x, y, weights=np.float64(2)).dtype == jnp.float32
    for w in (jnp.float32(0.3), jnp.ones(1), jnp.array([0.5, 0.0, -1.0])):
        got, want = (
            jax.jit(jax.grad(lambda x, w, f=f: jnp.sin(f(x, w)).sum(), (0, 1)))(x, w)
            for f in (lambda x, w: ours(x, y, weights=w), lambda x, w: w * theirs(x, y))
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), got, want)


REDUCED: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignored": {"ignore_index": 2},
    "weighted": {"weights": np.float32([0.5, 2.0, 0.0, 1.5, 1 / 3])},
    "all": OPTIONS["all"],
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    "options, where", [("plain", "none"), *((options, "rows") for options in REDUCED), ("weighted", "full")]
)
def test_reduction(reduction: str, options: str, where: str) -> None:
    x, y, given, mask = logits((5, 7)), np.array([0, 2, 2, 1, 6], np.int32), REDUCED[options], WHERE[where]
    want = truth(x, y, where=mask, **given)
    counts = np.ones(5, bool) if mask is None else mask.reshape(5, -1).any(1)
    counts &= y != given.get("ignore_index", -1)
    weights = np.broadcast_to(given.get("weights", 1.0), 5).astype(np.float64)
    total = weights[counts].sum() if reduction == "mean" else 1.0
    for more in ({}, {"return_lse": True}):
        call = lambda x, w, more=more: jax.tree.leaves(
            ours(x, y, where=mask, reduction=reduction, **given | {"weights": w} | more)
        )[0]
        value, (gradient, of_weights) = jax.value_and_grad(call, (0, 1))(x, weights.astype(np.float32))
        assert (value.shape, value.dtype) == ((), jnp.float32)
        mean = want.loss.sum() / total
        np.testing.assert_allclose(value, mean, rtol=1e-5)
        np.testing.assert_allclose(gradient, want.gradient / total, rtol=1e-4, atol=1e-6)
        each = truth(x, y, where=mask, **given | {"weights": 1.0}).loss
        slope = (each - mean) / total if reduction == "mean" else each
        np.testing.assert_allclose(of_weights, np.where(counts, slope, 0), rtol=1e-4, atol=1e-5)


def test_reduction_of_rows_that_do_not_count_or_have_no_label() -> None:
    x, mean = jnp.asarray(logits((3, 5))), functools.partial(ours, reduction="mean")
    for y, rows in ((np.full(3, -1), 3), (np.zeros(0, int), 0)):
        value, gradient = jax.value_and_grad(lambda x, y=y: mean(x, y, ignore_index=-1))(x[:rows])
        assert value == 0
        assert not gradient.any()
    value, gradient = jax.jit(jax.value_and_grad(mean))(x, jnp.array([0, 7, 1]))
    assert np.isnan(value)
    assert np.isnan(gradient[1]).all()
    np.testing.assert_allclose(gradient[::2], jax.grad(lambda x: mean(x, jnp.array([0, 0, 1])))(x)[::2], rtol=1e-6)
    with pytest.raises(ValueError, match="reduction='avg', expected one of 'none', 'mean', 'sum'"):
        ours(x, jnp.zeros(3, int), reduction="avg")  # type: ignore[call-overload]


@pytest.mark.parametrize("shape, axis", [((0, 3), 1), ((3, 0), 0), ((0, 0), 0), ((0,), ())], ids=str)
def test_zero_size(shape: tuple[int, ...], axis: Any) -> None:
    x = jnp.zeros(shape)
    rows = tuple(n for d, n in enumerate(shape) if axis == () or d != axis)
    y = jnp.zeros(rows, jnp.int32)
    loss, gradient = jax.value_and_grad(lambda x: ours(x, y, axis, label_smoothing=0.1).sum())(x)
    assert (loss, gradient.shape) == (0, shape)
    assert ours(x, y, axis).shape == jaxsoftmax.softmax_cross_entropy(x, x, axis).shape == rows


def test_rows_without_columns_and_scalars() -> None:
    x, y = jnp.zeros((3, 0)), jnp.zeros(3, jnp.int32)
    np.testing.assert_array_equal(jax.jit(ours)(x, y), np.full(3, np.nan))
    with pytest.raises(ValueError, match="expected 0 <= label < 0"):
        ours(x, y)
    np.testing.assert_array_equal(jaxsoftmax.softmax_cross_entropy(x, x), np.zeros(3))
    assert ours(3.0, 0, ()) == ours(3.0, 0, None) == 0
    assert jax.grad(ours)(3.0, 0, None) == 0


PROBABILITIES = np.asarray(jax.nn.softmax(logits((5, 7))[::-1]))


@pytest.mark.parametrize("where", WHERE)
def test_probabilities_are_those_of_optax(where: str) -> None:
    mask = WHERE[where]
    x, t = jnp.asarray(logits((5, 7))), jnp.asarray(PROBABILITIES).at[0].set(jax.nn.one_hot(3, 7))
    functions = jaxsoftmax.softmax_cross_entropy, optax.softmax_cross_entropy
    # What broadcasts, too.
    for given, labels, seen in ((x, t, mask), (x[:1], t, None), (x[:1], t[0], mask), (x[:1], t[:1], mask)):
        got, want = (f(given, labels, where=seen) for f in functions)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    live = np.asarray(True if mask is None else mask if mask.ndim == 1 else mask.any(-1))
    got, want = (
        jax.jit(jax.grad(lambda x, t, f=f: jnp.sin(f(x, t, -1, mask)).sum(where=live), (0, 1)))(x, t) for f in functions
    )
    assert all(np.isfinite(g).all() for g in got)
    if where in ("none", "full"):
        np.testing.assert_allclose(got[0][live], want[0][live], rtol=1e-4, atol=1e-5)
    narrow = x.astype((jnp.bfloat16, jnp.float16)[where == "rows"])
    loss, pull = jax.vjp(lambda x: jaxsoftmax.softmax_cross_entropy(x, t), narrow)
    assert (loss.dtype, pull(loss)[0].dtype) == (jnp.float32, narrow.dtype)
    np.testing.assert_allclose(loss, -(t * oracle.log_softmax(narrow)).sum(-1), rtol=1e-5)


def test_nothing_times_infinity_is_nothing() -> None:
    x = jnp.array([[1.0, 2.0, -INF], [1.0, 2.0, -INF], [-INF] * 3, [INF, 0.0, 0.0]])
    t = jnp.array([[0.25, 0.75, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    got, gradient = jax.jit(jax.value_and_grad(lambda x: jaxsoftmax.softmax_cross_entropy(x, t)[0]))(x)
    np.testing.assert_allclose(got, np.log1p(np.e) + 1 - 1.75, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], [1 / (1 + np.e) - 0.25, np.e / (1 + np.e) - 0.75, 0], rtol=1e-5)
    np.testing.assert_array_equal(jaxsoftmax.softmax_cross_entropy(x, t)[1:], [INF, np.nan, np.nan])
    of_each = jax.jit(jax.grad(lambda x: jaxsoftmax.softmax_cross_entropy(x, t).sum()))(x)
    assert np.isnan(of_each[2]).any()
    np.testing.assert_allclose(of_each[0], gradient[0])
    assert jaxsoftmax.softmax_cross_entropy(x[0], jnp.array([0, 1, 0])) == ours(x[0], 1)


def primitives(function: Any, *operands: Any) -> list[str]:
    names = {op.value for op in Op} | {"softmax_stats", "cross_entropy_tangent", "row_dot"}
    return [e.primitive.name for e in jax.make_jaxpr(function)(*operands).eqns if e.primitive.name in names]


def test_the_weights_say_which_primitives_run() -> None:
    x, y = jnp.asarray(logits((3, 4))), jnp.array([0, 1, 2])
    plain, total = lambda x: ours(x, y).mean(), lambda x, w=1.0: ours(x, y, weights=w).sum()
    assert primitives(plain, x) == primitives(total, x) == ["cross_entropy"]
    assert primitives(jax.value_and_grad(plain), x) == ["cross_entropy"]
    forward = primitives(lambda x: jax.jvp(plain, (x,), (x,)), x)
    # The loss is weighted even so, lest a label that is no column should go unnoticed.
    assert forward == ["cross_entropy", "cross_entropy_tangent", "row_dot"]
    assert primitives(jax.value_and_grad(total), x) == ["cross_entropy_gradient"]
    assert primitives(jax.value_and_grad(lambda x: ours(x, y, reduction="mean")), x) == ["cross_entropy_gradient"]
    assert primitives(lambda x: jax.jvp(total, (x,), (x,)), x) == ["cross_entropy_gradient", "row_dot"]
    assert primitives(jax.grad(total, 1), x, 2.0) == ["cross_entropy"]
    assert primitives(jax.grad(total, (0, 1)), x, 2.0) == ["cross_entropy_gradient"]
    for weights in (None, 0.5):
        own = lambda x, w=weights: sum(map(jnp.sum, ours(x, y, return_lse=True, weights=w)))
        assert primitives(jax.grad(own), x) == ["cross_entropy"]
    probable, long = lambda x: jaxsoftmax.softmax_cross_entropy(x, x).sum(), jnp.zeros((1, 16385))
    assert primitives(probable, long) == primitives(jax.grad(probable), long) == ["softmax_stats"]
    assert primitives(lambda x: jaxsoftmax.softmax_cross_entropy(x, x, where=x > 0), x) == ["softmax_stats"]
    assert not primitives(probable, long[:, 1:])  # it has a primitive of its own, without a derivative


KINDS: dict[str, dict[str, Any]] = {"plain": {}, "weighted": {"weights": 0.5}, "lse": {"return_lse": True}}


@pytest.mark.parametrize(
    "kind, dtype", [*((kind, jnp.bfloat16) for kind in KINDS), ("plain", jnp.float32)], ids=lambda x: str(x)
)
def test_what_is_kept_is_of_the_logits_dtype(kind: str, dtype: Any) -> None:
    x, y = jnp.asarray(logits((8, 40)), dtype), labels((8,), 40)
    call = lambda x: ours(x, y, **KINDS[kind])

    def large(leaves: Any) -> list[Any]:
        """Those that are more than a few numbers a row."""
        return [leaf for leaf in leaves if getattr(leaf, "size", 0) > 8 * 4]

    _, vjp = jax.vjp(call, x)
    (kept,) = large(jax.tree.leaves(vjp))
    assert (kept.shape, kept.dtype) == (x.shape, dtype)
    if kind != "weighted":
        np.testing.assert_array_equal(kept, x)

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, r: (c + jnp.sin(jax.tree.leaves(call(r))[0]).sum(), None), 0.0, x)[0]

    stacked = jnp.stack([x] * 3)
    forward, _ = (e for e in jax.make_jaxpr(jax.grad(total))(stacked).eqns if e.primitive.name == "scan")
    # The logits, which are given to the loop, are not kept by it once more.
    kept = [(v.aval.shape, v.aval.dtype) for v in forward.outvars if v.aval.size > 3 * 8]
    assert kept == ([(stacked.shape, dtype)] if kind == "weighted" else [])
    (given,) = large(jax.tree.leaves(jax.linearize(call, x)[1]))
    assert given.dtype == dtype


def test_a_loss_alone_writes_nothing_of_the_logits_size(stand_ins: Any) -> None:
    x, y = jnp.zeros((64, 512)), jnp.zeros(64, jnp.int32)
    jaxpr = jax.make_jaxpr(ours)(x, y)
    assert max(v.aval.size for e in jaxpr.eqns for v in e.outvars) == 64
    ours(x, y)
    assert {p.op for p in stand_ins.problems} == {Op.CROSS_ENTROPY}
    program = jax.jit(functools.partial(ours, implementation="xla")).lower(x, y).compile()
    assert program.memory_analysis().temp_size_in_bytes < x.nbytes / 4
    assert program.memory_analysis().output_size_in_bytes == 64 * 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_a_unit_cotangent_costs_no_pass(stand_ins: Any, dtype: Any) -> None:
    x, y = jnp.asarray(logits((64, 512)), dtype), labels((64,), 512)

    def passes(function: Any) -> int:
        """Multiplications and selections over the logits' size in what is left of the program without the kernel."""
        closed = jax.make_jaxpr(function)(x)
        (kernel,) = (e for e in closed.eqns if e.primitive.name == "cross_entropy_gradient")
        after = closed.jaxpr.replace(
            invars=[*closed.jaxpr.invars, *kernel.outvars],
            eqns=[e for e in closed.eqns if e is not kernel],
            debug_info=closed.jaxpr.debug_info.with_unknown_names(),
        )
        run = jax.jit(lambda *xs: jax.core.eval_jaxpr(after, closed.consts, *xs))
        text = run.lower(x, *(jnp.zeros(v.aval.shape, v.aval.dtype) for v in kernel.outvars)).compile().as_text()
        return len(re.findall(r"\[64,512\]\S* (?:multiply|select)\(", text))

    assert passes(jax.value_and_grad(lambda x: ours(x, y, weights=1 / 64).sum())) == 0
    assert passes(jax.value_and_grad(lambda x: ours(x, y, weights=1.0).mean())) > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_the_reference_needs_no_more_memory_than_optax(dtype: Any) -> None:
    x, y = jnp.zeros((256, 4096), dtype), jnp.zeros(256, jnp.int32)

    def temporary(function: Any) -> int:
        program = jax.jit(jax.value_and_grad(lambda x: function(x, y).sum())).lower(x).compile()
        return program.memory_analysis().temp_size_in_bytes

    # XLA for CPUs keeps 16-bit logits in float32, once; there is nothing else of their size but the gradient.
    assert temporary(ours) <= temporary(theirs) + 64 * 1024
    assert temporary(ours) <= (0 if dtype == jnp.float32 else 2) * x.nbytes + 64 * 1024
