"""Cross entropy from primitive to program: kernels in any view, labels that are cut, export, and what is said of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from pallas_kernels.softmax.problem import Op
from tests import oracle
from tests.jaxsoftmax.sharded import collectives, mesh
from tests.pairwise import pairwise

SHAPE = (8, 4, 16)
RNG = np.random.default_rng(0)
X = (3 * RNG.normal(size=SHAPE)).astype(np.float32)
Y = RNG.integers(0, 16, SHAPE[:2]).astype(np.int32)
MASK = RNG.random(SHAPE) < 0.7
OPTIONS: dict[str, Any] = {
    "label_smoothing": 0.1,
    "z_loss": 1e-2,
    "logits_soft_cap": 5.0,
    "scale": 0.5,
    "weights": 0.25,
}
TRUTH: dict[str, Any] = {"smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 5.0, "scale": 0.5, "weights": 0.25}

ours = jaxsoftmax.softmax_cross_entropy_with_integer_labels
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)


def value_and_grad(x: Any, y: Any, *arguments: Any, **options: Any) -> Any:
    def total(x: jax.Array) -> Any:
        loss = ours(x, y, *arguments, **options)
        return loss.sum(), loss

    (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(x)
    return loss, gradient


AXES = [0, 1, (2, 1), (2, 0, 1), ()]
MASKS = [None, SHAPE, (8, 1, 16), (1, 1, 16)]


@pytest.mark.parametrize(
    "axis, mask", [(-1, m) for m in MASKS] + [((0, 2), m) for m in MASKS] + [(a, None) for a in AXES], ids=str
)
def test_kernels_see_rows(stand_ins: Any, axis: Any, mask: Any) -> None:
    where = None if mask is None else MASK[tuple(slice(n) for n in mask)]
    axes = (axis,) if isinstance(axis, int) else axis
    rows = tuple(n for d, n in enumerate(SHAPE) if d not in {a % 3 for a in axes})
    y = RNG.integers(-1, X.size // int(np.prod(rows)), rows)
    want = oracle.cross_entropy(X, y, axis, where, **TRUTH, ignored=-1)
    run = jax.jit(functools.partial(value_and_grad, axis=axis, where=where, ignore_index=-1, **OPTIONS))
    loss, gradient = run(X, y)
    close(loss, want.loss)
    close(gradient, want.gradient)
    close(jax.jit(functools.partial(ours, axis=axis, where=where, ignore_index=-1, **OPTIONS))(X, y), want.loss)
    assert {p.op for p in stand_ins.problems} == {Op.CROSS_ENTROPY, Op.CROSS_ENTROPY_GRADIENT}
    facts = {(p.scale, p.soft_cap, p.smoothing, p.z_loss) for p in stand_ins.problems}
    assert facts == {(0.5, 5.0, 0.1, 1e-2)}


def test_a_declined_kernel_is_the_reference(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: problem.op is Op.CROSS_ENTROPY
    want = oracle.cross_entropy(X, Y)
    for options in ({}, {"weights": 1.0}):
        loss, gradient = value_and_grad(X, Y, **options)
        close(loss, want.loss)
        close(gradient, want.gradient)
        with pytest.raises(
            NotImplementedError, match=r"^the derivative of softmax_.*labels: .*no kernel takes this call:\n  first: it"
        ):
            value_and_grad(X, Y, implementation="mosaic_gpu", **options)


@pytest.mark.parametrize("weights", [None, 0.5])
def test_a_named_kernel_takes_no_cotangent_of_the_logsumexp(stand_ins: Any, weights: float | None) -> None:
    named = functools.partial(ours, labels=Y, weights=weights, return_lse=True, implementation="mosaic_gpu")
    with pytest.raises(
        NotImplementedError, match=r"integer_labels: .* no kernel takes a cotangent of the logsumexp .* Pass"
    ):
        jax.grad(lambda x: sum(map(jnp.sum, named(x))))(X)
    gradient, logged = jax.grad(lambda x: (named(x)[0].sum(), named(x)[1]), has_aux=True)(X)
    close(logged, oracle.logsumexp(X, -1))
    close(gradient, oracle.cross_entropy(X, Y, weights=1.0 if weights is None else weights).gradient)
    assert Op.CROSS_ENTROPY_GRADIENT in {p.op for p in stand_ins.problems}


def test_a_named_kernel_sums_no_gradients_of_broadcast_logits(stand_ins: Any) -> None:
    run = lambda x, name: jax.vmap(lambda y: ours(x, y, implementation=name))(Y).sum()
    with pytest.raises(NotImplementedError, match=r"integer_labels: .* broadcast over rows"):
        jax.grad(run)(X[0], "mosaic_gpu")
    want = oracle.cross_entropy(np.broadcast_to(X[:1], X.shape), Y).gradient.sum(0)
    close(jax.grad(run)(X[0], None), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_named_kernel_of_a_sharded_vocabulary(stand_ins: Any, kind: AxisType) -> None:
    # What is raised while XLA compiles comes from there.
    error = jax.errors.JaxRuntimeError if kind is AxisType.Auto else NotImplementedError
    named = functools.partial(ours, labels=Y, implementation="mosaic_gpu")
    with jax.set_mesh(mesh(kind)):
        x, y = jax.device_put(X, P(None, None, "m")), jax.device_put(X, P("d"))
        close(jax.jit(named)(x), oracle.cross_entropy(X, Y).loss)
        for weights in (None, 1.0):
            run = jax.jit(jax.grad(lambda x, w=weights: named(x, weights=w).sum()))
            close(run(y), oracle.cross_entropy(X, Y).gradient)
            with pytest.raises(error, match=r"the rows are sharded along .* Pass"):
                run(x)
        with pytest.raises(error, match=r"softmax: .* the rows are sharded along the axis that is reduced"):
            jax.jit(functools.partial(jaxsoftmax.softmax, implementation="mosaic_gpu"))(x)
        close(
            jax.jit(functools.partial(jaxsoftmax.logsumexp, axis=-1, implementation="mosaic_gpu"))(x),
            oracle.logsumexp(X, -1),
        )
        stand_ins.accepts = lambda problem: problem.cols == SHAPE[-1]
        jax.clear_caches()
        with pytest.raises(error, match="no kernel takes this call"):
            jax.jit(named)(x)
        close(jax.jit(ours)(x, Y), oracle.cross_entropy(X, Y).loss)


@pytest.mark.parametrize("options", [{}, {"where": MASK}, OPTIONS], ids=["plain", "masked", "all"])
def test_any_cotangent_goes_through_the_kernel(stand_ins: Any, options: Any) -> None:
    cts = jnp.asarray(RNG.standard_normal(SHAPE[:2]), jnp.float32)
    truth = (TRUTH if "z_loss" in options else {}) | ({"where": MASK} if "where" in options else {})
    want = oracle.cross_entropy(X, Y, ignored=-1, **truth)
    options = {name: value for name, value in options.items() if name != "weights"}
    loss, pull = jax.vjp(functools.partial(ours, labels=Y, ignore_index=-1, **options), X)
    assert {p.op for p in stand_ins.problems} == {Op.CROSS_ENTROPY}
    (gradient,) = pull(cts)
    assert {p.op for p in stand_ins.problems} == {Op.CROSS_ENTROPY, Op.CROSS_ENTROPY_GRADIENT}
    scale = truth.get("weights", 1.0)
    close(loss * scale, want.loss)
    close(gradient * scale, want.gradient * np.asarray(cts)[..., None])


WAYS = [("reference", OPTIONS), ("stand-in", {}), ("stand-in", OPTIONS)]
SPECS = [P("d", "m"), P(None, None, ("m", "d")), P("d", None, "m")]


@pytest.mark.parametrize(
    "spec, kind, kernels, options",
    [(spec, kind, *way) for spec, kind, way in pairwise(SPECS, [AxisType.Auto, AxisType.Explicit], WAYS)],
    indirect=["kernels"],
    ids=lambda x: "" if isinstance(x, dict) else str(x),
)
def test_labels_are_cut_as_their_rows(spec: P, kind: AxisType, kernels: Any, options: dict[str, Any]) -> None:
    record = kernels()
    want = oracle.cross_entropy(X, Y, ignored=3, **(TRUTH if options else {}))
    with jax.set_mesh(mesh(kind)):
        x, y = jax.device_put(X, spec), jax.device_put(Y, P(*spec[:2]))
        run = functools.partial(value_and_grad, ignore_index=3, **options)
        loss, gradient = jax.jit(run)(x, y)
        close(loss, want.loss)
        close(gradient, want.gradient)
        assert gradient.sharding.is_equivalent_to(x.sharding, 3)
        cut = len(spec) == 3
        if record:
            for function in (run, functools.partial(ours, **options)):
                assert collectives(function, x, y) == ({"all-reduce": 1} if cut else {})
        both = jax.jit(jax.grad(lambda x: sum(map(jnp.sum, ours(x, y, return_lse=True, ignore_index=3, **options)))))(x)
        of_lse = oracle.cross_entropy(X, Y, ignored=3, of_lse=np.ones(SHAPE[:2]), **(TRUTH if options else {}))
        close(both, of_lse.gradient)


@pytest.mark.parametrize("options", [{}, {"weights": 1.0}, {"return_lse": True}], ids=["plain", "weighted", "lse"])
@pytest.mark.parametrize("spec", [P(), P(None, None, "m")], ids=str)
def test_gradients_are_cut_as_the_logits_whatever_the_labels_are(spec: P, options: Any) -> None:
    want = oracle.cross_entropy(X, Y, where=MASK)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, y, mask = jax.device_put(X, spec), jax.device_put(Y, P("d")), jax.device_put(MASK, P("d"))
        total = lambda x: jax.tree.leaves(ours(x, y, where=mask, **options))[0].sum()
        for run in (jax.grad(total), jax.jit(jax.grad(total))):
            gradient = run(x)
            assert jax.typeof(gradient).sharding == jax.typeof(x).sharding
            close(gradient, want.gradient)


@pytest.mark.parametrize("axis, spec", [((0, 2), P("d", None, "m")), ((2, 0), P(("m", "d"))), ((1, 2), P(None, "m"))])
def test_labels_in_several_cut_axes(stand_ins: Any, axis: Any, spec: P) -> None:
    rows = tuple(n for d, n in enumerate(SHAPE) if d not in axis)
    y = RNG.integers(-1, X.size // rows[0], rows)
    run = jax.jit(functools.partial(value_and_grad, axis=axis, where=MASK, ignore_index=-1, **OPTIONS))
    loss, gradient = run(jax.device_put(X, NamedSharding(mesh(), spec)), y)
    want = oracle.cross_entropy(X, y, axis, MASK, ignored=-1, **TRUTH)
    close(loss, want.loss)
    close(gradient, want.gradient)


@pytest.mark.parametrize("weights, masked", [(None, False), (1.0, True)])
def test_smoothing_counts_the_columns_of_every_device(stand_ins: Any, weights: float | None, masked: bool) -> None:
    where = MASK if masked else None
    want = oracle.cross_entropy(X, Y, where=where, smoothing=0.3)
    run = jax.jit(functools.partial(value_and_grad, where=where, label_smoothing=0.3, weights=weights))
    loss, gradient = run(jax.device_put(X, NamedSharding(mesh(), P(None, None, "m"))), Y)
    close(loss, want.loss)
    close(gradient, want.gradient)


LSE: dict[str, Any] = {"return_lse": True, "z_loss": 1e-2}


@pytest.mark.parametrize(
    "spec, kind, options",
    [
        (P(), AxisType.Auto, {}),
        (P(), AxisType.Auto, OPTIONS),
        (P("d", None, "m"), AxisType.Auto, {}),
        (P("d", None, "m"), AxisType.Auto, OPTIONS),
        (P("d", None, "m"), AxisType.Auto, LSE),
        (P("d", None, "m"), AxisType.Explicit, OPTIONS),
    ],
)
def test_wrong_labels_by_kernels_and_on_a_sharded_vocabulary(
    stand_ins: Any, spec: P, kind: AxisType, options: Any
) -> None:
    y = Y.copy()
    y[0], y[1, :2] = (-1, 16, 2**30, 5), (-7, 3)

    def total(x: jax.Array, y: jax.Array, used: jax.Array) -> jax.Array:
        return jnp.where(used, jax.tree.leaves(ours(x, y, **options))[0], 0.0).sum()

    with jax.set_mesh(mesh(kind)):
        run, exists = jax.jit(jax.grad(total)), (y >= 0) & (y < 16)
        x = jax.device_put(X, spec)
        want = run(x, np.where(exists, y, 0), exists)
        np.testing.assert_array_equal(run(x, y, exists), want)
        assert exists.sum() == 28
        assert not np.asarray(want)[~exists].any()
        np.testing.assert_array_equal(np.isnan(run(x, y, np.ones_like(exists))).all(-1), ~exists)


@pytest.mark.parametrize("spec, sums", [(P("d"), 1), (P(None, None, "d"), 2)], ids=str)
def test_probabilities_that_are_cut(stand_ins: Any, spec: P, sums: int) -> None:
    t = np.asarray(jax.nn.softmax(X[::-1]))
    run = jax.value_and_grad(lambda x, t: jaxsoftmax.softmax_cross_entropy(x, t).sum())
    operands = [jax.device_put(a, NamedSharding(mesh(), spec)) for a in (X, t)]
    assert collectives(run, *operands) == {"all-reduce": sums}
    close(jax.jit(run)(*operands)[0], -(t * oracle.log_softmax(X)).sum())


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (2, 1, 0), (1, 0, None), (None, None, 0)], ids=str)
def test_vmap_of_every_operand(axes: tuple[int | None, ...]) -> None:
    x, y, w = X[:5, :, :5], Y[:5] % 5, RNG.normal(size=(5, 4)).astype(np.float32)
    args = [a if d is not None else a[0] for a, d in zip((x, y, w), axes, strict=True)]
    args = [a if d is None else np.moveaxis(a, 0, d) for a, d in zip(args, axes, strict=True)]
    one = lambda x, y, w: jax.value_and_grad(lambda x, w: jnp.sin(ours(x, y, weights=w)).sum(), (0, 1))(x, w)
    got = jax.jit(jax.vmap(one, axes))(*args)
    each = [one(*(a if d is None else np.take(a, i, d) for a, d in zip(args, axes, strict=True))) for i in range(5)]
    jax.tree.map(lambda g, *e: close(g, np.stack(e), atol=1e-5), got, *each)


def test_how_many_kernels_run(stand_ins: Any) -> None:
    x, y = jax.ShapeDtypeStruct((64, 4096), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    for function, kernels in ((ours, 1), (value_and_grad, 2), (functools.partial(value_and_grad, weights=1.0), 1)):
        text = jax.jit(function).lower(x, y).as_text()
        assert text.count("call @_launch") == kernels


def test_donation_and_shapes_alone() -> None:
    shapes = jax.eval_shape(functools.partial(ours, return_lse=True), jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16), Y)
    assert [(s.shape, s.dtype) for s in shapes] == [(SHAPE[:2], jnp.float32)] * 2
    step = jax.jit(lambda x: value_and_grad(x, Y)[1], donate_argnums=0)
    x = jnp.asarray(X)
    close(step(x), oracle.cross_entropy(X, Y).gradient)
    assert x.is_deleted()


@pytest.mark.parametrize("weights", [None, 0.5])
def test_remat_runs_the_loss_and_then_the_gradient(weights: float | None) -> None:
    call = lambda x: ours(jnp.sin(x), Y, weights=weights)

    def counts(call: Any) -> tuple[int, int]:
        jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: call(x).sum()))(X))
        return jaxpr.count("= cross_entropy["), jaxpr.count("= cross_entropy_gradient[")

    assert (counts(call), counts(jax.checkpoint(call))) == (((1, 0), (2, 0)) if weights is None else ((0, 1), (1, 1)))
    close(jax.grad(lambda x: jax.checkpoint(call)(x).sum())(X), jax.grad(lambda x: call(x).sum())(X))


def test_remat_where_only_the_weights_are_mapped() -> None:
    """There is one loss for all weights then, so `cross_entropy` cannot stand in for what gives one for each."""
    w = jnp.asarray(RNG.normal(size=(3, *SHAPE[:2])), jnp.float32)
    call = lambda x, w: ours(x, Y, weights=w)
    run = lambda x: jax.vmap(lambda w: jax.checkpoint(call)(x, w))(w)
    # Without the checks of types, an operation that runs by itself broadcasts what is too small.
    with jax.enable_checks(True):
        got = jax.grad(lambda x: jnp.sin(run(x)).sum())(X)
    close(got, jax.grad(lambda x: jnp.sin(w * ours(x, Y)).sum())(X))
    close(jax.jit(jax.vmap(lambda w: jax.jvp(lambda x: call(x, w), (X,), (X,))[0]))(w), w * ours(X, Y))
