"""Numbers that change: how many programs they compile, and what they give where they are traced."""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core import numbers
from pallas_kernels.softmax import reference
from tests import attention_oracle, oracle
from tests.errors import assert_accurate
from tests.jaxsoftmax.sharded import mesh, put
from tests.jaxsoftmax.transformations import pulled_back

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 6)), jnp.float32)
WEIGHT = jnp.asarray(RNG.normal(size=(6, 8)), jnp.float32)
LABELS = jnp.array([0, 3, 5, 1])
QKV = [jnp.asarray(RNG.normal(size=(1, 5, 2, 8)), jnp.float32) for _ in range(3)]
PAGES = jnp.asarray(RNG.normal(size=(2, 3, 4, 8)), jnp.float32)

loss: Any = jaxsoftmax.softmax_cross_entropy_with_integer_labels
linear: Any = jaxsoftmax.linear_cross_entropy


def attend(q: jax.Array, **number: Any) -> jax.Array:
    return jaxsoftmax.flash_attention(q, *(x.astype(q.dtype) for x in QKV[1:]), **number)


def attend_to_pages(q: jax.Array, **number: Any) -> jax.Array:
    pages = PAGES.astype(q.dtype)
    return jaxsoftmax.paged_attention(q, pages, pages, jnp.array([[2, 0]]), jnp.array([7]), **number)


OF_ATTENTION = ("scale", "logits_soft_cap", "local_window_size")
OF_LOSSES = ("scale", "label_smoothing", "z_loss", "logits_soft_cap")
# Each function that takes numbers, of its first operand, and which.
FUNCTIONS: dict[str, tuple[Callable[..., Any], jax.Array, tuple[str, ...]]] = {
    "softmax": (jaxsoftmax.softmax, X, ("scale",)),
    "log_softmax": (jaxsoftmax.log_softmax, X, ("scale",)),
    "top_k_softmax": (lambda x, **number: jaxsoftmax.top_k_softmax(x, 2, **number)[0], X, ("scale",)),
    "loss": (lambda x, **number: loss(x, LABELS, **number), X, OF_LOSSES),
    "weighted loss": (lambda x, **number: loss(x, LABELS, weights=0.5, **number), X, OF_LOSSES),
    "linear": (lambda x, **number: linear(x, WEIGHT, LABELS, **number), X, OF_LOSSES),
    "weighted linear": (
        lambda x, **number: linear(x, WEIGHT, LABELS, weights=0.5, chunk_size=3, **number),
        X,
        OF_LOSSES,
    ),
    "flash_attention": (attend, QKV[0], OF_ATTENTION),
    "paged_attention": (attend_to_pages, QKV[0], OF_ATTENTION),
}
CASES = [(name, argument) for name, (_, _, arguments) in FUNCTIONS.items() for argument in arguments]
cases = pytest.mark.parametrize("name, argument", CASES, ids=map(" ".join, CASES))


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The programs that are compiled."""
    events: list[str] = []
    listener = lambda event, *_, **__: events.append(event) if event.endswith("backend_compile_duration") else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)


def gradient(name: str, x: jax.Array, **number: Any) -> tuple[jax.Array, jax.Array]:
    """A function's results, and the gradient of a sum of their sines."""
    y, (of_x,) = pulled_back(lambda x: FUNCTIONS[name][0](x, **number), x)
    return y, of_x


@cases
def test_a_number_that_changes_compiles_few_programs(
    name: str, argument: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "MOST_CONSTANTS", 1)
    x = FUNCTIONS[name][1]
    values = range(20) if argument == "local_window_size" else [0.04 * (1 + i) for i in range(20)]
    found = [gradient(name, x, **{argument: value}) for value in values[:2]]
    compiled.clear()
    found += [gradient(name, x, **{argument: value}) for value in values[2:]]
    assert not compiled
    traced = jax.jit(lambda t: gradient(name, x, **{argument: t}))
    for value, results in zip(values, found, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=1e-6), results, traced(value))


def test_mapped_and_differentiated_calls_are_evaluated(compiled: list[str]) -> None:
    function = lambda t: jax.vmap(
        jax.grad(lambda x: jax.jvp(lambda x: jaxsoftmax.softmax(x, scale=t), (x,), (x,))[1][0])
    )
    for i in range(8):
        compiled.clear()
        function(0.1 + i)(X)
    assert not compiled, "of the last"
    assert numbers.is_evaluated()
    assert jax.vmap(jax.grad(lambda x: x if numbers.is_evaluated() else 0 * x))(jnp.ones(2)).tolist() == [1, 1]
    assert jax.jit(lambda x: x if numbers.is_evaluated() else 0 * x)(1.0) == 0


def test_a_number_of_a_program_is_a_constant() -> None:
    for i in range(9):
        text = str(jax.make_jaxpr(lambda x, i=i: jaxsoftmax.softmax(x, scale=0.1 + i))(X))
        assert f"scale={0.1 + i}" in text
        assert "is_evaluated" not in text
    text = str(
        jax.make_jaxpr(lambda q: jaxsoftmax.flash_attention(q, q, q, local_window_size=3, logits_soft_cap=2.5))(QKV[0])
    )
    assert "window=(3, 3)" in text
    assert "soft_cap=2.5" in text
    assert "window_sizes" not in text


def test_under_batch_invariant_each_number_is_a_constant() -> None:
    with jaxsoftmax.batch_invariant():
        for i in range(9):
            assert numbers.is_constant("softmax", "scale", 0.1 + i)
    assert all(numbers.is_constant("softmax", "scale", 0.5 + i) for i in range(numbers.MOST_CONSTANTS))
    assert not numbers.is_constant("softmax", "scale", 9.5)


@pytest.mark.parametrize("name, argument", [case for case in CASES if case[1] != "local_window_size"])
def test_the_derivative_in_a_number_that_is_traced(name: str, argument: str) -> None:
    """In float64 the gradient is that of a constant, and the number's derivative a quotient of differences."""
    with jax.enable_x64():
        x = FUNCTIONS[name][1].astype(jnp.float64)
        function, at, step = FUNCTIONS[name][0], 0.6, 1e-5
        constant = jax.jit(lambda x, t: gradient(name, x, **{argument: t}), static_argnums=1)
        traced = jax.jit(lambda x, t: gradient(name, x, **{argument: t}))
        near = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14)
        jax.tree.map(near, traced(x, at), constant(x, at))
        of_number = jax.jit(jax.jacrev(lambda t: function(x, **{argument: t})))(at)
        more, less = (traced(x, at + sign * step)[0] for sign in (1, -1))
        np.testing.assert_allclose(of_number, (more - less) / (2 * step), rtol=1e-7, atol=1e-9)


MASK = jnp.ones((4, 6), bool).at[1, 2:5].set(False).at[1, 3].set(True).at[2].set(False)
# What a loss has beside its numbers.
EDGES: dict[str, dict[str, Any]] = {
    "a label at -inf": {"x": X.at[1, 3].set(-jnp.inf)},
    "another at -inf": {"x": X.at[1, 2].set(-jnp.inf)},
    "+inf": {"x": X.at[1, 2].set(jnp.inf)},
    "+inf at the label": {"x": X.at[1, 3].set(jnp.inf)},
    "NaN": {"x": X.at[1, 3].set(jnp.nan)},
    "only -inf": {"x": X.at[1].set(-jnp.inf)},
    "ignored": {"x": X.at[1, 2].set(jnp.nan), "ignored": 3},
    "masked": {"x": jnp.where(MASK, X, jnp.nan), "where": MASK},
    "weighted": {"x": X, "weights": jnp.array([0.5, -2.0, 0.0, 3.0])},
    "out of range": {"x": X, "labels": jnp.array([0, 9, 5, -1])},
}


@pytest.mark.parametrize("with_lse", [False, True])
def test_the_edges_of_losses_are_those_of_constants(with_lse: bool) -> None:
    def gradients(x: jax.Array, kept: dict[str, Any], wrt: Any, labels: Any, given: Any, ignored: Any) -> Any:
        def total(x: jax.Array, kept: dict[str, Any]) -> Any:
            found = loss(x, labels, ignore_index=ignored, return_lse=with_lse, **kept, **given)
            return jnp.sin(found[0] if with_lse else found).sum(), found

        return jax.grad(total, wrt, has_aux=True)(x, kept)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def run(x: jax.Array, kept: tuple[tuple[str, float], ...], ignored: Any, labels: Any, given: Any) -> Any:
        """The loss and its gradient, for numbers that are constants and for traced ones; and the numbers' gradients."""
        constants, (x, of) = dict(kept), jax.lax.optimization_barrier((x, dict(kept)))
        of = jax.tree.map(jnp.float32, of)
        (of_x, of_numbers), found = gradients(x, of, (0, 1), labels, given, ignored)
        return (of_x, found), gradients(x, constants, 0, labels, given, ignored), of_numbers

    for name, edge in EDGES.items():
        given = {k: v for k, v in edge.items() if k in ("where", "weights")}
        for smoothing, z_loss, cap in ((0.0, 0.0, None), (0.25, 0.5, 2.0), (1.0, -0.5, None)):
            kept = {"label_smoothing": smoothing, "z_loss": z_loss} | ({"logits_soft_cap": cap} if cap else {})
            got, want, of_numbers = run(
                edge["x"], tuple(kept.items()), edge.get("ignored"), edge.get("labels", LABELS), given
            )
            close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=f"{name} {kept}")
            jax.tree.map(close, got, want)
            if name in ("ignored", "masked", "weighted"):
                assert jax.tree.all(jax.tree.map(jnp.isfinite, of_numbers)), (name, kept, of_numbers)


def test_the_scale_of_a_row_with_minus_infinity_has_a_derivative() -> None:
    x = jnp.array([0.5, -jnp.inf, 2.0])
    for function in (jaxsoftmax.softmax, jaxsoftmax.log_softmax):
        for keep, where in ((x, None), (x.at[1].set(jnp.nan), jnp.isfinite(x))):
            of = lambda t, keep=keep, where=where, function=function: function(keep, where=where, scale=t)[0]
            want = jax.grad(lambda t, function=function: function(x[::2], scale=t)[0])(0.7)
            np.testing.assert_allclose([jax.grad(of)(0.7), jax.jvp(of, (0.7,), (1.0,))[1]], want, rtol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "top_k_softmax", "loss", "linear"])
def test_the_derivative_in_a_scale_that_is_on_no_mesh(name: str) -> None:
    """Beside operands on a mesh of explicit axes, outside of a program and of a context."""
    call, x, _ = FUNCTIONS[name]

    def derivative(x: jax.Array) -> jax.Array:
        out, pull = jax.vjp(lambda scale: call(x, scale=scale), jnp.float32(0.7))
        return pull(out)[0]

    np.testing.assert_allclose(derivative(put(x, P("d"), mesh(AxisType.Explicit))), derivative(x), rtol=1e-5)


def test_traced_numbers_have_the_accuracy_of_constants() -> None:
    x = jnp.asarray(RNG.normal(size=(64, 300)), jnp.bfloat16)
    labels = jnp.arange(64)
    given: dict[str, float] = {"label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 5.0, "scale": 0.7}
    run = lambda traced: jax.jit(
        lambda x, of: jax.grad(lambda x: loss(x, labels, **(of if traced else given)).sum())(x)
    )(x, given)
    truth = oracle.cross_entropy(x, labels, scale=0.7, soft_cap=5.0, smoothing=0.1, z_loss=1e-2)
    assert_accurate(run(True), run(False), truth.gradient, magnitude=truth.gradient_terms)


# What layers of a stack differ in: a causal rule, a window and a soft cap.
LAYERS = [(True, (2, 0), 1.5), (False, (1, 3), 0.7), (True, (-1, -1), 9.0), (False, (-1, 2), 3.0)]


@pytest.mark.parametrize("ends", [{}, {"causal_alignment": "bottom_right", "key_value_seq_lengths": np.array([5])}])
def test_a_scan_over_layers(ends: dict[str, Any]) -> None:
    """Each layer against float64, and the gradients of the whole stack against those of calls with constants."""
    q, k, v = QKV
    causal, windows, caps = (jnp.asarray(x) for x in zip(*LAYERS, strict=True))

    def layer(q: jax.Array, rules: Any, k: jax.Array = k) -> tuple[jax.Array, jax.Array]:
        given = dict(zip(("is_causal", "local_window_size", "logits_soft_cap"), rules, strict=True))
        out = jaxsoftmax.flash_attention(q, k, v, **given, **ends)
        return out + q, out

    def of_constants(q: jax.Array, k: jax.Array, caps: jax.Array) -> tuple[jax.Array, Any]:
        outs = []
        for (is_causal, window, _), cap in zip(LAYERS, caps, strict=True):
            left, right = (None if width < 0 else width for width in window)
            q, out = layer(q, (is_causal, (left, right), cap), k)
            outs.append(out)
        return jnp.sin(q).sum(), jnp.stack(outs)

    def scanned(q: jax.Array, k: jax.Array, caps: jax.Array) -> tuple[jax.Array, Any]:
        q, outs = jax.lax.scan(lambda q, rules: layer(q, rules, k), q, (causal, windows, caps))
        return jnp.sin(q).sum(), outs

    found, want = (jax.jit(jax.grad(f, (0, 1, 2), has_aux=True))(q, k, caps) for f in (scanned, of_constants))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, want)
    at = np.asarray(q)
    for (is_causal, window, cap), out in zip(LAYERS, found[1], strict=True):
        sides = [None if width < 0 else width for width in window]
        truth = attention_oracle.forward(
            at, k, v, is_causal=is_causal, local_window_size=sides, logits_soft_cap=cap, **ends
        )
        np.testing.assert_allclose(out, truth.out, rtol=1e-4, atol=1e-5)
        at = at + np.asarray(out)


def test_windows_that_are_data_at_their_bounds() -> None:
    """A width of 2^30 or more, and one below 0, has no bound, wherever query and key are."""
    q, k, v = QKV
    far = jnp.array([-(2**30), -1, 0, 5, 2**30])
    run = jax.jit(
        lambda window, causal: jaxsoftmax.flash_attention(
            q, k, v, is_causal=causal, local_window_size=window, query_positions=far, key_value_positions=far[::-1]
        )
    )
    i, j = np.asarray(far, np.int64)[:, None], np.asarray(far[::-1], np.int64)
    for left, right in ((2**30 - 1, 0), (0, 2**30 - 1), (2**30, 2**31 - 1), (-1, 3), (-(2**31), -5)):
        for causal in (False, True):
            seen = (left < 0) | (left >= 2**30) | (j >= i - left)
            seen &= (right < 0) | (right >= 2**30) | (j <= i + right)
            want = jaxsoftmax.flash_attention(q, k, v, mask=seen & (j <= i) if causal else seen)
            np.testing.assert_allclose(run(jnp.array([left, right]), causal), want, rtol=1e-5, atol=1e-6)
    alone = jax.jit(
        lambda causal: jaxsoftmax.flash_attention(
            q, k, v, is_causal=causal, query_positions=far, key_value_positions=far[::-1]
        )
    )
    for causal in (False, True):
        want = jaxsoftmax.flash_attention(q, k, v, mask=(j <= i) | (not causal))
        np.testing.assert_allclose(alone(causal), want, rtol=1e-5, atol=1e-6)


def test_a_window_for_each_call_that_is_mapped(stand_ins: Any) -> None:
    qs = jnp.stack([QKV[0], 2 * QKV[0], QKV[0] - 1])
    widths, causal = jnp.array([0, 2, -1]), jnp.array([True, False, False])
    call = lambda q, width, causal, cap: jaxsoftmax.flash_attention(
        q, *QKV[1:], local_window_size=width, is_causal=causal, logits_soft_cap=cap
    )
    caps = jnp.array([1.0, 2.0, 3.0])
    mapped = jax.jit(jax.vmap(call))(qs, widths, causal, caps)
    for i, (width, is_causal) in enumerate([(0, True), (2, False), (None, False)]):
        want = call(qs[i], width, is_causal, float(caps[i]))
        np.testing.assert_allclose(mapped[i], want, rtol=1e-5, atol=1e-6)


# What multiplies, bends and clamps elements, and its value.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "times": (numbers.times, operator.mul),
    "capped": (numbers.capped, lambda x, cap: cap * jnp.tanh(x / cap)),
    "below": (reference.below, lambda x, maximum: x + 0 * maximum),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_which_one_operand_is_mapped(name: str) -> None:
    """By vmap along unlike axes, and over devices that share the other, whose gradient is the sum of theirs."""
    x, of_rows = jnp.sin(jnp.arange(32.0)).reshape(2, 4, 4), jnp.linspace(5, 6, 8)[:, None]

    def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *xs: (f(*xs), *jax.grad(lambda *xs: jnp.sin(f(*xs)).sum(), (0, 1))(*xs))

    @functools.partial(jax.jit, static_argnums=0)
    def results(f: Callable[..., Any]) -> Any:
        both, on = with_gradients(f), mesh()
        over_devices = jax.shard_map(both, mesh=on, in_specs=(P(), P("d")), out_specs=(P("d"), P(), P("d")))
        return (
            jax.vmap(both, (None, 0))(x[0], of_rows.reshape(2, 4, 1)),
            jax.vmap(both, (1, None), 1)(x, of_rows[:2]),
            jax.vmap(both, (2, 0))(x, of_rows.reshape(4, 2, 1)),
            over_devices(x[0, :2], of_rows),
        )

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *map(results, OPERATIONS[name]))


def test_explain_says_what_is_data() -> None:
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    explain = functools.partial(jaxsoftmax.explain_attention, x, x, x)
    assert explain(is_causal=jnp.array(True)).kernel
    assert str(explain(is_causal=np.array(True))) == str(explain(is_causal=True))
    assert "a soft cap that is a constant" in str(explain(logits_soft_cap=jnp.array(2.0)))
    assert "a window that is a constant" in str(explain(local_window_size=jnp.array(2)))
    pages, query = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 64, 16, 64), (4, 8, 64)))
    tables, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((4, 8), (4,)))
    of_pages = functools.partial(jaxsoftmax.explain_paged_attention, query, pages, pages, tables, lengths)
    assert of_pages(local_window_size=3).kernel
    for what, number in (
        ("window", {"local_window_size": jnp.array(2)}),
        ("soft cap", {"logits_soft_cap": jnp.array(2.0)}),
    ):
        found = of_pages(**number)
        assert not found.kernel
        assert "XLA gathers the pages first" in str(found)
        assert f"a {what} that is a constant" in str(found)
