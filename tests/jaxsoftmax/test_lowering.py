"""From primitive to program: how operands become what kernels see, which kernels run, and the plain custom_vjp."""

import functools
import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import flash_attention
from jaxsoftmax._attention import layout as attention_layout
from jaxsoftmax._softmax import primitives as layout
from pallas_kernels import custom_vjp, hardware
from pallas_kernels.attention import dispatch as attention_dispatch
from pallas_kernels.attention import forward
from pallas_kernels.attention.problem import Op as AttentionOp
from pallas_kernels.attention.problem import Operands, Rules
from pallas_kernels.hardware import H200
from pallas_kernels.softmax import dispatch as row_dispatch
from pallas_kernels.softmax import staged
from pallas_kernels.softmax.problem import Op
from tests import oracle
from tests.jaxsoftmax.calls import CALLS, MORE_CALLS
from tests.jaxsoftmax.sharded import mesh
from tests.jaxsoftmax.transformations import gradient, pulled_back

RNG = np.random.default_rng(0)
SHAPE = (8, 4, 16)
X = (3 * RNG.normal(size=SHAPE)).astype(np.float32)
Y = RNG.integers(0, 16, SHAPE[:2]).astype(np.int32)
MASK = RNG.random(SHAPE) < 0.7
OPS = {"softmax": jaxsoftmax.softmax, "log_softmax": jaxsoftmax.log_softmax}
OPTIONS: dict[str, Any] = {
    "label_smoothing": 0.1,
    "z_loss": 1e-2,
    "logits_soft_cap": 5.0,
    "scale": 0.5,
    "weights": 0.25,
}
TRUTH: dict[str, Any] = {"smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 5.0, "scale": 0.5, "weights": 0.25}
Q, K, V = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)))
SINKS, BIAS = jnp.arange(4.0), jnp.asarray(RNG.normal(size=(1, 4, 5, 7)), jnp.float32)
HALF = [jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
ours = jaxsoftmax.softmax_cross_entropy_with_integer_labels
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)


def value_and_grad(x: Any, y: Any, *arguments: Any, **options: Any) -> Any:
    def total(x: jax.Array) -> Any:
        loss = ours(x, y, *arguments, **options)
        return loss.sum(), loss

    (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(x)
    return loss, gradient


CHAINS = [
    (jaxsoftmax.softmax, (512, 8192), (staged, row_dispatch)),
    (jaxsoftmax.log_softmax, (512, 8192), (staged, row_dispatch)),
    (flash_attention, (2, 1024, 8, 128), (forward, attention_dispatch)),
]
VIEWS = [
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
]


def test_views() -> None:
    for shape, axes, expected in VIEWS:
        seen = layout.view(shape, axes)
        assert (seen.order, seen.rows, seen.cols, seen.inner) == expected, (shape, axes)
        x = jnp.arange(float(np.prod(shape))).reshape(shape)
        np.testing.assert_array_equal(seen.from_rows(seen.to_rows(x)), x)


MASKS = [None, SHAPE, (8, 1, 16), (16,), (4, 1), (1, 1, 1)]


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 2), (1, 2), None, ()], ids=str)
def test_kernels_see_rows(stand_ins: Any, axis: Any) -> None:
    for mask, name in zip(MASKS, ["softmax", "log_softmax", "logsumexp"] * 2, strict=True):
        where = None if mask is None else np.random.default_rng(1).random(mask) < (2 if mask == (1, 1, 1) else 0.7)
        scale = {} if name == "logsumexp" else {"scale": 2.0}
        close(
            getattr(jaxsoftmax, name)(X, axis, where=where, **scale),
            getattr(oracle, name)(X, axis, where=where, **scale),
        )
    assert stand_ins.problems


@pytest.mark.parametrize(
    "axis, mask",
    [(-1, None), (-1, SHAPE), (-1, (8, 1, 16)), ((0, 2), SHAPE), ((0, 2), (1, 1, 16)), (0, None), (1, (1, 1, 16)),
     ((2, 1), None), ((2, 0, 1), (8, 1, 16)), ((), None)],
    ids=str,
)  # fmt: skip
def test_kernels_of_losses_see_rows(stand_ins: Any, axis: Any, mask: Any) -> None:
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


def test_masks_shared_by_all_rows_stay_small(stand_ins: Any) -> None:
    mask = np.arange(16) < 9
    jaxsoftmax.softmax(X, where=mask)
    assert {p.where for p in stand_ins.problems} == {"shared"}
    stand_ins.accepts = lambda problem: problem.where != "shared"
    stand_ins.problems.clear()
    np.testing.assert_allclose(jaxsoftmax.softmax(X[1:], where=mask), oracle.softmax(X[1:], where=mask), rtol=1e-5)
    assert {p.where for p in stand_ins.problems} == {"shared", "full"}


def test_transposed_copies_only_when_a_kernel_is_named(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: problem.inner == 1
    np.testing.assert_allclose(jaxsoftmax.softmax(X, 0), oracle.softmax(X, 0), rtol=1e-5)
    assert stand_ins.ran(Op.SOFTMAX) == {(1, 8, 64)}
    np.testing.assert_allclose(jaxsoftmax.softmax(X, 0, implementation="mosaic_gpu"), oracle.softmax(X, 0), rtol=1e-5)
    assert (64, 8, 1) in stand_ins.ran(Op.SOFTMAX)


@pytest.mark.parametrize("kernels", ["stand-in statistics"], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_log_softmax_of_16_bits_from_statistics(kernels: Any, dtype: str) -> None:
    record, x = kernels(), jnp.asarray(X, dtype)
    got, pull = jax.vjp(functools.partial(jaxsoftmax.log_softmax, scale=0.5), x)
    np.testing.assert_allclose(np.float64(got), oracle.log_softmax(x, scale=0.5), rtol=2e-2, atol=2e-2)
    want = oracle.log_softmax_cotangent(x, got, scale=0.5)
    np.testing.assert_allclose(np.float64(pull(got)[0]), want, rtol=2e-2, atol=2e-2)
    assert {(p.op, p.scale) for p in record.problems} == {(Op.STATS, 0.5)}


@pytest.mark.parametrize("kernels", ["stand-in statistics"], indirect=True)
def test_special_rows_from_statistics(kernels: Any) -> None:
    kernels()
    inf, nan = np.inf, np.nan
    x = np.float32(
        [[-inf] * 4, [inf, 0, 1, 2], [nan, 0, 1, 2], [-inf, 0, -inf, 3], [inf, inf, 0, 0], [3e38, -3e38, 0, 0]]
    )
    for where in (None, np.arange(24).reshape(6, 4) % 5 > 1, np.zeros((1, 4), bool)):
        f = lambda x, where=where, **kw: jaxsoftmax.log_softmax(x, where=where, **kw)
        run = jax.jit(lambda x, f=f: (f(x), jax.vjp(f, x)[1](jnp.ones_like(x))[0]))
        xla = jax.jit(lambda x, f=f: jax.vjp(functools.partial(f, implementation="xla"), x)[1](jnp.ones_like(x))[0])
        y, dx = run(x)
        np.testing.assert_allclose(y, jax.nn.log_softmax(x, where=where), rtol=1e-6)
        np.testing.assert_allclose(dx, xla(x), rtol=1e-5, atol=1e-6)
    assert jaxsoftmax.log_softmax(jnp.zeros((0, 4))).shape == (0, 4)
    wide = np.float64(X[0])
    with jax.enable_x64():
        assert jaxsoftmax.log_softmax(wide).dtype == np.float64
        np.testing.assert_allclose(jaxsoftmax.log_softmax(wide), oracle.log_softmax(wide), rtol=1e-12)


def test_a_named_kernel_is_for_all_of_log_softmax(stand_ins: Any) -> None:
    stand_ins.of_statistics = (Op.LOG_SOFTMAX, Op.LOG_SOFTMAX_COTANGENT)
    jax.jit(jax.grad(lambda x: jaxsoftmax.log_softmax(x, implementation="mosaic_gpu")[..., 0].sum()))(X)
    assert {p.op for p in stand_ins.problems} == {Op.LOG_SOFTMAX_COTANGENT}


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
        NotImplementedError, match=op + ": no kernel takes 4 rows of 16 float32: first: it is not for this"
    ):
        kernel(x)


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
            for sharded in (x, y):
                close(run(sharded), oracle.cross_entropy(X, Y).gradient)
        assert Op.CROSS_ENTROPY_COTANGENT in {p.op for p in stand_ins.problems}
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


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (2, 1, 0), (1, 0, None), (None, None, 0)], ids=str)
def test_vmap_of_every_operand(axes: tuple[int | None, ...]) -> None:
    x, y, w = X[:5, :, :5], Y[:5] % 5, RNG.normal(size=(5, 4)).astype(np.float32)
    args = [a if d is not None else a[0] for a, d in zip((x, y, w), axes, strict=True)]
    args = [a if d is None else np.moveaxis(a, 0, d) for a, d in zip(args, axes, strict=True)]
    one = lambda x, y, w: jax.value_and_grad(lambda x, w: jnp.sin(ours(x, y, weights=w)).sum(), (0, 1))(x, w)
    got = jax.jit(jax.vmap(one, axes))(*args)
    single = jax.jit(one)
    each = [single(*(a if d is None else np.take(a, i, d) for a, d in zip(args, axes, strict=True))) for i in range(5)]
    jax.tree.map(lambda g, *e: close(g, np.stack(e), atol=1e-5), got, *each)


@pytest.mark.parametrize("function, shape, body", CHAINS)
def test_few_calls_lead_from_the_lowering_rule_to_a_kernel(
    monkeypatch: pytest.MonkeyPatch, function: Any, shape: tuple[int, ...], body: Any
) -> None:
    """One decision, and eight calls at most between `kernel_rule` and the kernel's body: what a reader walks."""
    frames: list[str] = []
    decisions: list[Any] = []

    def walk(*_: Any, **__: Any) -> None:
        files = ("/jaxsoftmax/", "/pallas_kernels/")
        found = [x for x in traceback.extract_stack()[:-1] if any(name in x.filename for name in files)]
        names = [x.name for x in found]
        frames.extend(names[len(names) - 1 - names[::-1].index("kernel_rule") :])
        raise NotImplementedError

    module, decider = body
    decide = decider.decide
    monkeypatch.setattr(module, "_body", walk)
    monkeypatch.setattr(decider, "decide", lambda *x, **how: decisions.append(x) or decide(*x, **how))
    monkeypatch.setattr(hardware, "present", lambda: H200)
    jax.clear_caches()
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * (3 if len(shape) == 4 else 1)
    with pytest.raises(NotImplementedError):
        jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    assert len(decisions) == 1
    assert len(frames) <= 8, frames


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


def call(*operands: Any) -> jax.Array:
    return flash_attention(*operands, is_causal=True)


def test_what_a_kernel_is_told(stand_ins: Any) -> None:
    flash_attention(
        Q, K, V, BIAS, is_causal=True, causal_alignment="bottom_right", local_window_size=(3, None), scale=0.5,
        logits_soft_cap=2.0, sinks=SINKS, query_segment_ids=np.zeros((2, 5), int),
        key_value_segment_ids=np.zeros((2, 7), int),
    )  # fmt: skip
    (problem,) = {*stand_ins.problems}
    assert (problem.op, problem.batch, problem.query_heads, problem.key_heads) == (AttentionOp.FORWARD, 2, 4, 2)
    assert (problem.scale, problem.soft_cap, problem.causal_offset) == (0.5, 2.0, 2)
    assert (problem.window, problem.window_offset) == ((3, None), 2)
    assert (problem.bias, problem.bias_dtype, problem.mask) == ((1, 4, 5, 7), jnp.float32, None)
    assert (problem.segments, problem.sinks, problem.query_lengths, problem.key_lengths) == (True, True, False, False)


def test_alignment_by_lengths_is_said_where_it_counts(stand_ins: Any) -> None:
    lengths = {"causal_alignment": "bottom_right", "query_seq_lengths": np.int32([5, 3])}
    for rules, offsets in (
        ({}, (None, 0, False)),
        ({"is_causal": True}, (0, 0, True)),
        ({"local_window_size": 3}, (None, 0, True)),
    ):
        stand_ins.problems.clear()
        flash_attention(Q, K, V, **lengths, **rules)
        (problem,) = {*stand_ins.problems}
        assert (problem.causal_offset, problem.window_offset, problem.align_ends) == offsets


def test_the_backward_may_decline_alone(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: problem.op is AttentionOp.FORWARD
    got = jax.jit(gradient(call))(Q, K, V)
    assert stand_ins.attended(AttentionOp.FORWARD)
    stand_ins.accepts = lambda _: False
    jax.clear_caches()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, jax.jit(gradient(call))(Q, K, V)
    )


@pytest.mark.parametrize("dim, value_dim", [(8, 8), (5, 8), (3, 13), (20, 4)])
def test_heads_of_any_width(stand_ins: Any, dim: int, value_dim: int) -> None:
    q, k, v = (
        jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((2, 5, 4, dim), (2, 7, 2, dim), (2, 7, 2, value_dim))
    )
    got = pulled_back(call, q, k, v)
    assert {(p.head_dim % 8, p.value_dim % 8) for p in stand_ins.problems} == {(0, 0)}
    stand_ins.accepts = lambda _: False
    jax.clear_caches()
    want = pulled_back(call, q, k, v)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "leads, batch, heads",
    [
        (dict(query=(), key=(), value=()), 1, 4),
        (dict(query=(2,), key=(2,), value=(2,)), 2, 4),
        (dict(query=(3, 2), key=(1, 2), value=(1, 2)), 2, 12),
        (dict(query=(2, 3), key=(2, 1), value=(2, 1)), 2, 12),
        (dict(query=(3, 2), key=(3, 2), value=(1, 2)), 6, 4),
        (dict(query=(1, 2), key=(3, 2), value=(3, 2)), 6, 4),
        (dict(query=(3, 2), key=(1, 2), value=(1, 2), key_lengths=(3, 1)), 6, 4),
        (dict(query=(3, 2), key=(1, 1), value=(1, 1)), 1, 24),
    ],
)
def test_folds(leads: dict[str, tuple[int, ...]], batch: int, heads: int) -> None:
    core = dict(query=(5, 4, 8), key=(7, 2, 8), value=(7, 2, 6), key_lengths=(), out=(5, 4, 6), lse=(4, 5))
    fold = attention_layout.fold({name: (*lead, *core[name]) for name, lead in leads.items()})
    assert fold.kernel_shape("query", (*leads["query"], 5, 4, 8)) == (batch, 5, heads, 8)
    assert fold.kernel_shape("key", (*leads["key"], 7, 2, 8)) == (batch, 7, 2, 8)
    for kind in ("query", "out", "lse"):
        shape = (*fold.full, *core[kind])
        x = jnp.arange(float(np.prod(shape))).reshape(shape)
        np.testing.assert_array_equal(fold.from_kernel(kind, fold.to_kernel(kind, x)), x)


def plan(op: AttentionOp, shapes: dict[str, tuple[int, ...]], rules: Rules) -> Any:
    dtypes = dict.fromkeys(shapes, jnp.bfloat16)
    return attention_layout.plan(op, shapes, dtypes, rules, H200, bias_gradient=False, named=False)


def test_copies_are_said() -> None:
    shapes = dict(query=(3, 2, 16, 4, 64), key=(3, 2, 16, 2, 64), value=(1, 2, 16, 2, 60), mask=(1, 2, 1, 16, 16))
    shapes |= dict(query_segments=(3, 2, 16), key_segments=(3, 2, 16))
    found = plan(AttentionOp.FORWARD, shapes, Rules())
    assert found.decision is not None
    assert found.notes == (
        "value, of shape (1, 2, 16, 2, 60), is copied to (6, 16, 2, 60)",
        "mask, of shape (1, 2, 1, 16, 16), is copied to (6, 1, 16, 16)",
        "the heads of value are padded to a multiple of 8",
        "the mask is packed in bits first, and the kernel skips tiles outside of those that it leaves",
        "which tiles have segments in common is found first, and the kernel skips the others",
    )


@pytest.mark.parametrize("wanted", [False, True])
def test_gradients_repeat_where_that_is_asked_for(wanted: bool) -> None:
    """The one place where the kernel's order of summation is the caller's choice."""
    x = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    loss = lambda x: flash_attention(x, x, x, deterministic_gradients=wanted).sum()
    found = [e for e in jax.make_jaxpr(jax.grad(loss))(x).eqns if e.primitive.name == "flash_attention_gradients"]
    assert [eqn.params["rules"].deterministic for eqn in found] == [wanted]
    planned = plan(AttentionOp.BACKWARD, dict.fromkeys(("query", "key", "value"), x.shape), Rules(deterministic=wanted))
    assert planned.decision is not None
    assert planned.decision.problem.deterministic is wanted


def test_the_plain_custom_vjp_of_attention_gives_the_same_gradients(kernels: Any) -> None:
    kernels()
    mask = jnp.asarray(RNG.random((2, 1, 5, 7)) < 0.8)
    rules = Rules(scale=0.3, causal_offset=0, soft_cap=4.0)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, sinks: jax.Array) -> Any:
        return custom_vjp.attention(Operands(q, k, v, bias, mask, sinks=sinks), rules)

    def primitive(*operands: jax.Array) -> Any:
        out, lse = flash_attention(
            *operands[:4], mask, sinks=operands[4], scale=0.3, is_causal=True, logits_soft_cap=4.0, return_residual=True
        )
        return out, jnp.swapaxes(lse, 1, 2)

    operands = Q, K, V, BIAS, SINKS

    @functools.partial(jax.jit, static_argnums=0)
    def everything(function: Any) -> Any:
        (out, lse), pull = jax.vjp(function, *operands)
        return out, lse, pull((jnp.cos(out), jnp.ones_like(lse)))

    jax.tree.map(close, everything(plain), everything(primitive))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(plain, operands, operands)


def test_the_plain_custom_vjp_of_a_mask_in_a_loop() -> None:
    query, key, value = HALF
    mask = jnp.tri(1024, dtype=bool)[None, None]

    def thrice(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def once(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            return custom_vjp.attention(Operands(q, k, v, mask=mask), Rules())[0], None

        return jax.lax.scan(jax.checkpoint(once), q, length=3)[0].astype(jnp.float32).sum()

    text = jax.jit(jax.grad(thrice, (0, 1, 2))).trace(query, key, value).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


# With int32, the others' equal; each alone compiles little, as the primitives take int32.
INTEGERS = ("int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64")
POOL = jnp.asarray(RNG.normal(size=(2, 2, 5, 8, 8)), jnp.float32)  # keys and values, 2 heads, 5 pages of 8


def _lengths(low: int, high: int) -> Any:
    """Of queries and keys, beyond what there are on both sides."""
    lengths = [high, low], [high, 5]
    names = "key_value_seq_lengths", "query_seq_lengths"
    call = lambda *x, **how: flash_attention(Q, K, V, **dict(zip(names, x, strict=True)), **how)
    return call, lengths, ([7, max(low, 0)], [5, 5])


def _segments(low: int, high: int) -> Any:
    ids = [low, high, high - 1, low + 1, 0], [low, 0, high, low, high, 1, low + 1]
    rank = {x: i for i, x in enumerate(sorted({*ids[0], *ids[1]}))}
    call = lambda a, b, **how: flash_attention(Q, K, V, query_segment_ids=a, key_value_segment_ids=b, **how)
    return call, [[x, x[::-1]] for x in ids], [[[rank[n] for n in y] for y in (x, x[::-1])] for x in ids]


def _positions(low: int, high: int) -> Any:
    call = lambda a, b, **how: flash_attention(Q, K, V, is_causal=True, query_positions=a, key_value_positions=b, **how)
    places = [low, high, 3, 5, 4], [5, 4, 3, low, high, 6, 7]
    return call, places, [[min(max(x, -(2**29)), 2**29) for x in at] for at in places]


def _pages(low: int, high: int) -> Any:
    """Of the second sequence one position counts, and one entry; of the third one, none."""
    query = jnp.concatenate([Q[:, 0], Q[:1, 1]])
    call = lambda tables, lengths, **how: jaxsoftmax.paged_attention(query, *POOL, tables, lengths, **how)
    given = [[4, 0, 2], [3, high, low], [high, low, high]], [high, 1, low]
    return call, given, ([[4, 0, 2], [3, 0, 0], [0, 0, 0]], [24, 1, max(low, 0)])


def _labels(low: int, high: int) -> Any:
    """Of which the lowest and highest of their dtype are no columns, nor the number that is ignored."""
    loss = lambda labels, **how: ours(jnp.asarray(X[0]), labels, ignore_index=-1, **how)
    return jax.jit(loss, static_argnames="implementation"), ([0, 15, high, low or high],), ([0, 15, -2, -2],)


def _ignored(low: int, high: int) -> Any:
    call = lambda labels, **how: ours(jnp.asarray(X[0]), labels, ignore_index=int(labels[2]), **how)
    return call, ([0, 15, high, 3],), ([0, 15, 2**31 - 1, 3],)


OF_INTEGERS: dict[str, Any] = {
    "lengths": _lengths,
    "segment ids": _segments,
    "positions": _positions,
    "pages": _pages,
    "labels": _labels,
    "ignored labels": _ignored,
}


@pytest.mark.parametrize("argument", OF_INTEGERS)
def test_integers_of_any_width(argument: str, stand_ins: Any) -> None:
    """They mean what they are worth, at the ends of their dtype too, by kernels and by XLA."""
    for dtype in INTEGERS:
        limits = np.iinfo(dtype)
        call, given, means = OF_INTEGERS[argument](int(limits.min), int(limits.max))
        want = call(*(np.array(x, np.int32) for x in means), implementation="xla")
        wide = [np.array(x, dtype) for x in given]
        for name in ("xla", None):
            with jax.enable_x64(limits.bits == 64):
                found = [call(*map(jnp.asarray, wide), implementation=name)]
            if limits.bits < 64 or argument not in ("segment ids", "labels"):
                found.append(call(*wide, implementation=name))  # NumPy's, which JAX has no 64 bits for
            if argument == "lengths" and limits.max < 2**63:
                found.append(call(*given, implementation=name))
            for got in found:
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=f"{dtype}, {name}")
    assert stand_ins.problems


@pytest.mark.parametrize("name", CALLS | MORE_CALLS)
def test_float64_passes_through_nothing_smaller(name: str) -> None:
    """Neither in values nor in gradients or their tangents."""
    call, given = (CALLS | MORE_CALLS)[name]
    with jax.enable_x64(True):
        operands = {n: x.astype(jnp.float64) if x.dtype == jnp.float32 else x for n, x in given.items()}
        moving = {n: x for n, x in operands.items() if x.dtype == jnp.float64}
        total = lambda moving: sum(y.sum() for y in jax.tree.leaves(call(**operands | moving)))
        program = jax.jit(lambda moving: jax.jvp(jax.value_and_grad(total), (moving,), (moving,))).lower(moving)
    assert set(re.findall(r"\bb?f\d+", program.as_text())) == {"f64"}
