"""`batch_invariant()`: what is chosen for a row knows the row alone, and every transformation keeps what was asked."""

import dataclasses
import functools
import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import _top_k, batch_invariant
from jaxsoftmax._core import checks
from jaxsoftmax._cross_entropy import loss, primitives
from pallas_kernels.attention import dispatch as attention_dispatch
from pallas_kernels.attention.problem import Attention
from pallas_kernels.attention.problem import Op as AttentionOp
from pallas_kernels.hardware import H200
from pallas_kernels.softmax import dispatch
from pallas_kernels.softmax.problem import Op, Problem
from tests.jaxsoftmax.calls import of_floats
from tests.jaxsoftmax.conftest import StandIns
from tests.jaxsoftmax.sharded import mesh, put
from tests.jaxsoftmax.transformations import TRANSFORMED, Case, gradient, pulled_back

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 40)), jnp.float32)
LABELS = jnp.array([0, 3, 39, 7])
cross_entropy = functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, labels=LABELS)

COLS = (
    1, 100, 256, 1765, 4096, 5001, 9001, 12001, 28000, 32768, 40000, 50257, 65536, 128256, 131072, 262144, 300000,
    2**19, 2**20, 1000003, 2**22, 2**25, 2**27 + 1,
)  # fmt: skip
ROWS = (1, 2, 16, 17, 131, 132, 528, 1056, 2112, 4096, 10**6)
MEMORY = 141e9  # of an H200, which holds the rows


def chosen(op: Op, cols: int, dtype: str, where: str, **flag: bool) -> set[Any]:
    """The kernels and configs of a row of one length, whatever the number of rows."""
    problems = [Problem(op, rows, cols, jnp.dtype(dtype), where=where, **flag) for rows in ROWS]
    fit = [p for p in problems if p.rows == 1 or p.elements * p.dtype.itemsize < MEMORY]
    return {(d.kernel, d.config) for d in (dispatch.decide(p, H200) for p in fit)}


@pytest.mark.parametrize("op", Op)
def test_a_rows_length_alone_chooses(op: Op) -> None:
    for dtype, where in itertools.product(
        ("bfloat16", "float32"), ("none",) if op.is_linear else ("none", "full", "shared")
    ):
        found = {cols: chosen(op, cols, dtype, where, batch_invariant=True) for cols in COLS}
        assert {cols: each for cols, each in found.items() if len(each) > 1} == {}, (dtype, where)
        assert None not in {kernel for cols, each in found.items() if cols < 2**25 for kernel, _ in each}


def choosing_by_rows() -> list[str]:
    """The heuristics that look at the number of rows."""
    functions = {name: f for name, f in vars(dispatch).items() if inspect.isfunction(f) and name != "_rows"}
    return [name for name, f in functions.items() if "_rows(" in inspect.getsource(f)]


@pytest.mark.parametrize("name", choosing_by_rows())
def test_a_heuristic_that_looks_at_the_number_of_rows_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = getattr(dispatch, name)

    def looks(problem: Problem, *rest: Any) -> Any:
        return honest(dataclasses.replace(problem, batch_invariant=False), *rest)

    monkeypatch.setattr(dispatch, name, looks)
    choose = getattr(dispatch, {"_fits_l2": "grid_configs"}.get(name, name))
    found = [
        {choose(Problem(op, rows, cols, jnp.dtype(dtype), batch_invariant=True), H200) for rows in ROWS}
        for op, cols, dtype in itertools.product((Op.SOFTMAX, Op.STATS), COLS, ("bfloat16", "float32"))
    ]
    assert any(len(each) > 1 for each in found)


ATTENTION_KINDS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "full": lambda t, s: {},
    "causal": lambda t, s: {"causal_offset": s - t},
    "window": lambda t, s: {"window": (100, None), "window_offset": s - t},
    "lengths": lambda t, s: {"causal_offset": 0, "align_ends": True, "key_lengths": True},
    "segments": lambda t, s: {"segments": True},
    "mask": lambda t, s: {"mask": (1, 1, t, s)},
    "bias": lambda t, s: {"bias": (1, 8, t, s), "bias_dtype": jnp.dtype("bfloat16")},
    "bias-mask": lambda t, s: {"bias": (1, 1, t, s), "bias_dtype": jnp.dtype("float32"), "mask": (1, 1, t, s)},
    "cap": lambda t, s: {"soft_cap": 30.0, "sinks": True},
}
SIZES = ((1, 1, 2), (1, 1, 4096), (3, 100, 100), (2, 512, 512), (64, 64, 777), (1, 16384, 16384), (256, 1, 1024))


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_heads_and_the_kind_of_call_alone_choose(kind: str) -> None:
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        found = set()
        for batch, t, s in SIZES:
            sizes, facts = (batch, 8, 4, t, s, *dims), ATTENTION_KINDS[kind](t, s)
            p = Attention(AttentionOp.FORWARD, *sizes, jnp.dtype("bfloat16"), **facts, batch_invariant=True)
            decision = attention_dispatch.decide(p, H200)
            found.add((decision.kernel, decision.config))
        assert len(found) == 1, dims


OF_TABLE = ("softmax", "log_softmax", "logsumexp", "loss", "weighted", "top_k", "attention")
FUNCTIONS: dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]] = {
    **{name: of_floats(name) for name in OF_TABLE},
    "lse": (lambda x: sum(cross_entropy(x, return_lse=True)), (X,)),
    "top_k_of_k": (lambda x: jaxsoftmax.top_k_softmax(x, 3, normalize="top_k")[0], (X,)),
}
HOW = ("jit", "vmap", "grad", "jvp", "remat", "grad of scan", "shard_map")


def mapped(f: Callable[..., jax.Array], case: Case) -> jax.Array:
    return jax.shard_map(f, mesh=mesh(shape=(2,), names=("d",)), in_specs=P(None), out_specs=P(None))(*case.xs)


# All functions differentiated, all that is done to functions to the one with the most parts, and some to another.
PAIRS = [(name, how) for name in FUNCTIONS for how in HOW if how == "grad" or name == "weighted"]
PAIRS += [("top_k_of_k", how) for how in ("vmap", "shard_map")]
PAIRS += [("attention", how) for how in HOW if how not in ("grad", "jvp")]


@pytest.mark.parametrize("name, how", PAIRS)
def test_transformations_keep_it(name: str, how: str, stand_ins: StandIns) -> None:
    f, xs = FUNCTIONS[name]
    case, transformation = Case(f, f, xs, xs), (TRANSFORMED | {"shard_map": mapped})[how]
    with batch_invariant():
        traced = jax.jit(lambda: transformation(f, case)).trace()
    traced.lower()
    assert stand_ins.problems
    assert all(problem.batch_invariant for problem in stand_ins.problems)


@pytest.mark.parametrize("name", ["log_softmax", "loss", "weighted", "lse", "top_k_of_k", "attention"])
def test_what_is_derived_or_exported_keeps_it(name: str, stand_ins: StandIns) -> None:
    f, xs = FUNCTIONS[name]
    with batch_invariant():
        y, pull = jax.vjp(f, *xs)
        exported = jax.export.export(jax.jit(f))(*xs)
    jax.jit(pull)(jnp.ones_like(y))
    np.testing.assert_array_equal(exported.call(*xs), y)
    assert all(problem.batch_invariant for problem in stand_ins.problems)


def test_parts_of_cut_operands_keep_it(stand_ins: StandIns) -> None:
    x = put(X, P("r", "c"), mesh(shape=(2, 2), names=("r", "c")))
    with batch_invariant():
        jax.block_until_ready([jax.jit(f)(x) for f in (jaxsoftmax.softmax, cross_entropy, FUNCTIONS["top_k"][0])])
    assert {p.cols for p in stand_ins.problems} >= {20}
    assert all(problem.batch_invariant for problem in stand_ins.problems)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_it_nothing_changes(name: str, stand_ins: StandIns) -> None:
    f, xs = FUNCTIONS[name]
    shown = lambda: str(jax.make_jaxpr(gradient(f))(*xs))
    before = shown()
    with batch_invariant():
        inside = shown()
        with batch_invariant(False):
            assert shown() == before
    assert "batch_invariant=True" in inside
    assert "batch_invariant=True" not in before
    assert name == "attention" or "batch_invariant" not in before
    jax.jit(f).lower(*xs)
    assert stand_ins.problems
    assert not any(problem.batch_invariant for problem in stand_ins.problems)


def test_jit_compiles_once_with_and_once_without() -> None:
    traces = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        traces.append(checks.is_batch_invariant())
        return jaxsoftmax.softmax(x)

    for _ in range(2):
        f(X)
        with batch_invariant():
            f(X)
    assert traces == [False, True]


def test_inside_of_a_jitted_function_and_as_a_decorator() -> None:
    @jax.jit
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with batch_invariant():
            y = jaxsoftmax.softmax(x)
        return y, jaxsoftmax.softmax(x)

    assert str(f.trace(X).jaxpr).count("batch_invariant=True") == 1
    decorated = batch_invariant()(jax.jit(jaxsoftmax.softmax))
    np.testing.assert_array_equal(decorated(X), f(X)[0])
    assert "batch_invariant=True" in str(jax.make_jaxpr(batch_invariant()(jaxsoftmax.softmax))(X))
    assert not checks.is_batch_invariant()


def test_a_value_that_is_no_bool() -> None:
    with pytest.raises(TypeError, match=r"batch_invariant: enabled is .*, expected True or False"):
        batch_invariant(jaxsoftmax.softmax)  # pyright: ignore[reportArgumentType]


def test_the_environment_says_what_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checks.VARIABLE, "1")
    code = "import jaxsoftmax._core.checks as i; print(i.is_batch_invariant())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"
    monkeypatch.setenv(checks.VARIABLE, "0")
    assert not checks._default()
    monkeypatch.setenv(checks.VARIABLE, "on")
    with pytest.raises(ValueError, match="expected 0 or 1"):
        checks._default()


@pytest.mark.parametrize("name", ["weighted", "lse", "top_k_of_k"])
@pytest.mark.usefixtures("short_chunks")
def test_values_are_those_without_it(name: str, stand_ins: StandIns) -> None:
    f, xs = FUNCTIONS[name]
    want = jax.jit(functools.partial(pulled_back, f))(*xs)
    with batch_invariant():
        got = jax.jit(functools.partial(pulled_back, f))(*xs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("k, scale", [(1, 0.5), (3, 1.0)])
@pytest.mark.usefixtures("short_chunks")
def test_the_largest_are_those_without_it(k: int, scale: float, stand_ins: StandIns) -> None:
    x = jnp.asarray([*X, X[0].at[7].set(jnp.nan), X[1].at[:].set(1.0), X[2].at[:38].set(-jnp.inf)])
    call = jax.jit(functools.partial(jaxsoftmax.top_k_softmax, k=k, scale=scale))
    want = call(x)
    with batch_invariant():
        got = call(x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_array_equal(np.delete(got[1], 4, 0), np.delete(want[1], 4, 0))


def test_none_of_the_largest() -> None:
    with batch_invariant():
        assert [x.shape for x in jaxsoftmax.top_k_softmax(X, 0, normalize="top_k")] == [(4, 0), (4, 0)]


def test_rows_along_an_axis_that_is_not_the_last_get_a_kernel(stand_ins: StandIns) -> None:
    stand_ins.accepts = lambda problem: problem.inner == 1
    for f in (jaxsoftmax.softmax, functools.partial(jaxsoftmax.logsumexp, where=X > -1)):
        along = jax.jit(functools.partial(f, axis=0))
        want = along(X)
        assert {p.inner for p in stand_ins.problems} == {40}
        with batch_invariant():
            np.testing.assert_allclose(along(X), want, rtol=1e-6)
        assert stand_ins.problems[-1].inner == 1
        stand_ins.problems.clear()


SUMS = ("reduce_sum", "reduce[", "dot_general", "cumsum")


def sums_of(f: Callable[..., Any], *operands: Any) -> list[str]:
    text = str(jax.make_jaxpr(f)(*operands))
    return [name for name in SUMS if name in text]


def test_xla_adds_up_nothing_for_the_largest() -> None:
    x = jax.ShapeDtypeStruct((4, 50000), jnp.bfloat16)
    call = functools.partial(_top_k.select, k=5, normalizes=True, scale=1.0, implementation=None, may_count=True)
    assert sums_of(functools.partial(call, batch_invariant=True), x) == []
    assert "reduce[" in sums_of(call, x)
    of_k = functools.partial(jaxsoftmax.top_k_softmax, k=5, normalize="top_k")
    assert "reduce_sum" in sums_of(of_k, x)
    with batch_invariant():
        assert sums_of(of_k, x) == []


def test_xla_adds_up_nothing_for_the_cross_entropy() -> None:
    """Of what comes before and after the kernel."""
    number = jax.ShapeDtypeStruct((4,), jnp.float32)
    labels, weights = (jax.ShapeDtypeStruct((4, 1), dtype) for dtype in (jnp.int32, jnp.float32))
    row = {"axes": (1,), "scale": 0.5, "soft_cap": 3.0, "smoothing": 0.1, "z_loss": 0.1}

    def kernel(numbers: list[jax.Array], op: Op, x: jax.Array, *_: jax.Array, **__: Any) -> list[jax.Array]:
        return [x, *numbers] if op is Op.CROSS_ENTROPY_GRADIENT else numbers

    def forward(x: jax.Array, labels: jax.Array, weights: jax.Array, *numbers: jax.Array) -> Any:
        rows = functools.partial(kernel, list(numbers))
        form = {"weighted": True, "stats": True, "all_rows": True}
        return (
            loss.cross_entropy(loss.label_logit_gathered, rows, x, labels, weights, **form, **row),
            loss.cross_entropy_gradient(loss.label_logit_gathered, rows, x, labels, weights, **row),
        )

    def pull(x: jax.Array, labels: jax.Array, ct: jax.Array, maximum: jax.Array, total: jax.Array) -> jax.Array:
        return primitives._vjp_logits([ct, ct], x, labels, maximum, total, all_rows=True, **row)

    assert sums_of(forward, X, labels, weights, *[number] * 3) == []
    assert sums_of(pull, X, labels, *[weights] * 3) == []


def test_explanations() -> None:
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    said = "batch invariant: chosen by"
    assert said not in str(jaxsoftmax.explain(bf16(8, 4096)))
    with batch_invariant():
        for op in ("softmax", "log_softmax_vjp", "logsumexp", "cross_entropy", "cross_entropy_gradient", "top_k"):
            options = {"k": 5} if op == "top_k" else {"weights": 1.0} if op == "cross_entropy_gradient" else {}
            one, many = (jaxsoftmax.explain(bf16(rows, 50257), op=op, **options) for rows in (1, 10**5))
            assert f"{said} the row's length alone" in one.reason
            assert (one.kernel, one.config) == (many.kernel, many.config)
            if op == "top_k":
                assert "chunks of" in str(one)
                assert "once more" in str(one)
        assert "transposed" in str(jaxsoftmax.explain(bf16(4096, 8), axis=0))
        for call in ({"implementation": "xla"}, {"scale": 0.0, "where": jnp.ones((8, 0), bool)}):
            assert "not promised" in str(jaxsoftmax.explain(bf16(8, 0 if "where" in call else 8), **call))
        assert "not promised" in str(jaxsoftmax.explain(bf16(8, 8), op="logsumexp", b=bf16(8, 8)))
        q = bf16(2, 100, 4, 64)
        assert f"{said} the heads' sizes and the kind of call alone" in str(jaxsoftmax.explain_attention(q, q, q))
        assert "output and the logsumexp alone" in str(jaxsoftmax.explain_attention(q, q, q, op="vjp"))
        wide = bf16(2, 100, 4, 264)
        assert "not promised" in str(jaxsoftmax.explain_attention(wide, wide, wide))
