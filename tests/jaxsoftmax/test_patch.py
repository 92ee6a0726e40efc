"""`patch`: what is called under it, what it gives, and that nothing of it is left afterwards."""

import copy
import functools
import importlib.util
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import equinox
import equinox.nn
import flax.core.nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsoftmax
from jaxsoftmax import _patch
from tests.jaxsoftmax import calls as table
from tests.jaxsoftmax.calls import CALLS, MORE_CALLS

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 6)), jnp.float32)
Q = jnp.asarray(RNG.normal(size=(2, 5, 4, 8)), jnp.float32)
LABELS = jnp.asarray([1, 5, -1, 0])
WHERE = jnp.asarray(RNG.random((4, 6)) > 0.3).at[:, 0].set(True).at[3].set(False)
ORIGINALS = {name: pkgutil.resolve_name(name) for name in jaxsoftmax.Calls()}
found = pkgutil.resolve_name  # what a name means now


def bits(x: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf).tobytes() if hasattr(leaf, "dtype") else leaf, x)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    code = {name: f.__code__ for name, f in ORIGINALS.items() if hasattr(f, "__code__")}
    importers = list(sys.meta_path)
    yield
    monkeypatch.undo()
    assert {name: found(name) for name in ORIGINALS} == ORIGINALS
    assert {name: f.__code__ for name, f in ORIGINALS.items() if name in code} == code
    assert (nn.softmax, flax.core.nn.softmax, nnx.log_softmax) == (jax.nn.softmax, jax.nn.softmax, jax.nn.log_softmax)
    assert not hasattr(nn.dot_product_attention, "__wrapped__")
    assert not hasattr(nnx.dot_product_attention, "__wrapped__")
    assert sys.meta_path == importers
    assert _patch._ON.value is None


@pytest.mark.parametrize("name", [*CALLS, *MORE_CALLS])
def test_our_own_functions_are_the_same_inside(name: str) -> None:
    call, operands = (CALLS | MORE_CALLS)[name]
    lowered = lambda: jax.jit(lambda operands: call(**operands)).lower(operands).as_text()
    outside = lowered()
    with jaxsoftmax.patch() as calls:
        inside = lowered()
    assert inside == outside
    assert not any([*calls.values(), *calls.fallbacks.values()])


def test_what_runs_nothing_is_the_same_inside() -> None:
    run = lambda: (
        str(jaxsoftmax.explain(X)),
        str(jaxsoftmax.explain_attention(Q, Q, Q)),
        str(jaxsoftmax.explain_paged_attention(**MORE_CALLS["pages"][1])),
        str(jaxsoftmax.explain_linear_cross_entropy(X, X.T, jnp.arange(len(X)))),
        bits(jaxsoftmax.unzigzag(jaxsoftmax.zigzag(X[:, :4], 1, 2), 1, 2)),
        bits(jaxsoftmax.merge(jaxsoftmax.Stats(X, X), jaxsoftmax.Stats(X, 2 * X))),
        bits(jaxsoftmax.log_normalizer(jaxsoftmax.Stats(X, X * X))),
        bits(jax.grad(lambda q: jnp.sin(jaxsoftmax.flash_attention(q, Q, Q)).sum())(Q)),
    )
    outside = run()
    with jaxsoftmax.patch() as calls:
        assert run() == outside
    assert not any([*calls.values(), *calls.fallbacks.values()])


def test_every_public_function_is_compared_inside() -> None:
    source = inspect.getsource(table) + inspect.getsource(test_what_runs_nothing_is_the_same_inside)
    public = {name for name in jaxsoftmax.__all__ if name[0].islower()}
    public -= {"batch_invariant", "install", "logits_memory", "patch", "uninstall"}
    assert not [name for name in public if not re.search(rf"jaxsoftmax\.{name}\b", source)]


# What is called, how, and whether ours takes it.
STOCK: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], bool]] = {
    "softmax": ("jax.nn.softmax", (X.astype(jnp.bfloat16), 0), {"where": WHERE}, True),
    "of integers": ("jax.nn.logsumexp", (np.arange(6),), {}, True),
    "log_softmax": ("jax.nn.log_softmax", (X,), {"axis": (0, 1)}, True),
    "logsumexp": ("jax.nn.logsumexp", (X, 1), {"keepdims": True, "return_sign": True}, True),
    "weights": ("jax.scipy.special.logsumexp", (X, 0, X), {"where": WHERE, "return_sign": True}, True),
    "attention": (
        "jax.nn.dot_product_attention",
        (Q, Q[:, :, :2], Q[:, :, 2:], Q[0, :, 0, :5], jnp.ones((2, 1, 5, 5), bool).at[0, :, :, 3].set(False)),
        {"scale": 0.3, "local_window_size": (2, 1), "implementation": "xla"},
        True,
    ),
    "one sequence": ("jax.nn.dot_product_attention", (Q[0], Q[1], Q[0]), {"is_causal": True}, True),
    "residual": (
        "jax.nn.dot_product_attention",
        (Q.astype(jnp.bfloat16), *[Q[..., :2, :].astype(jnp.bfloat16)] * 2),
        {"key_value_seq_lengths": jnp.array([3, 5]), "return_residual": True},
        True,
    ),
    "a batch of one": ("jax.nn.dot_product_attention", (Q[0], Q[:1], Q[:1]), {}, False),
    "probabilities": ("optax.softmax_cross_entropy", (X.astype(jnp.bfloat16), X**2), {"where": WHERE.any(1)}, True),
    "probabilities of 16 bits": ("optax.softmax_cross_entropy", (X.astype(jnp.bfloat16), LABELS[:, None]), {}, True),
    "labels": (
        "optax.softmax_cross_entropy_with_integer_labels",
        (jnp.tile(X, (1, 50)).astype(jnp.bfloat16), LABELS.astype(jnp.int8)),
        {"where": jnp.tile(WHERE, (1, 50))},
        True,
    ),
    "labels over two axes": (
        "optax.softmax_cross_entropy_with_integer_labels",
        (Q[0], jnp.array([0, 31, -32, -1])),
        {"axis": (0, 2)},
        True,
    ),
    "linen": (
        "flax.linen.dot_product_attention",
        (*[Q.astype(jnp.bfloat16)] * 3, None, nn.make_causal_mask(Q[..., 0, 0]), True, None, 0.0, True),
        {"force_fp32_for_softmax": True},
        True,
    ),
    "linen, mixed": ("flax.linen.dot_product_attention", (Q, Q.astype(jnp.bfloat16), Q), {}, False),
    "linen, einsum": (
        "flax.linen.dot_product_attention",
        (Q, Q, Q),
        {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum},
        False,
    ),
}


@pytest.mark.parametrize("case", STOCK)
def test_stock_calls_work_unchanged(case: str) -> None:
    name, args, kwargs, taken = STOCK[case]
    operand = jnp.asarray(args[0])
    differentiable = operand.dtype.name in ("float32", "bfloat16")

    def call(x: Any) -> Any:
        return found(name)(x, *args[1:], **kwargs)

    def total(x: jax.Array) -> Any:
        return sum(
            (y.astype(jnp.float32) * jnp.arange(y.size).reshape(y.shape)).sum() for y in jax.tree.leaves(call(x))
        )

    both = jax.jit(lambda x: (call(x), jax.grad(total)(x) if differentiable else None))
    theirs = both(args[0])
    with jaxsoftmax.patch() as calls:
        ours = both(args[0])
    assert (calls if taken else calls.fallbacks)[name] == 1 + differentiable
    assert (calls.fallbacks if taken else calls)[name] == 0
    assert bool(calls.reasons) is not taken
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        tol = 2e-5 if operand.dtype == jnp.float32 else 0.02
        size = max(1.0, float(jnp.abs(want).max()))
        np.testing.assert_allclose(got.astype(jnp.float32) / size, want.astype(jnp.float32) / size, rtol=tol, atol=tol)


@pytest.mark.parametrize("axis", [0, (0, 1), (0, 2), (1, 2), None])
def test_sums_over_several_axes_differ_in_the_last_place(axis: Any) -> None:
    x = X.reshape(4, 2, 3)
    theirs = optax.softmax_cross_entropy(x, abs(x), axis)
    with jaxsoftmax.patch():
        ours = optax.softmax_cross_entropy(x, abs(x), axis)
    np.testing.assert_allclose(ours, theirs, rtol=4 * float(jnp.finfo(x.dtype).eps))


def test_the_implementation_of_attention() -> None:
    with jaxsoftmax.patch() as calls:
        named = [jax.nn.dot_product_attention(Q, Q, Q, implementation=name) for name in (None, "xla", "cudnn")]
        with pytest.raises(ValueError, match="Unsupported implementation"):
            jax.nn.dot_product_attention(Q, Q, Q, implementation="triton")  # type: ignore[arg-type]
    assert bits(named[1:]) == bits(named[:1] * 2)
    assert calls["jax.nn.dot_product_attention"] == 3
    # A call that works nowhere is an error, and counts nowhere.
    assert not any(calls.fallbacks.values())


def attending(f: Any, mask: Any, **more: Any) -> Any:
    return f(Q[..., :1, :], Q[:, :4, :1], Q[:, :4, :1], mask=mask[:, None], **more)


def of_rows(f: Any, mask: Any, *labels: Any, **more: Any) -> Any:
    return f(Q[..., 0], *labels, where=mask, **more)


MASKED = {
    name: attending if "attention" in name else of_rows
    for name, original in ORIGINALS.items()
    if {"mask", "where"} & inspect.signature(original).parameters.keys()
}
LABELLED = {
    "optax.softmax_cross_entropy": (jnp.abs(Q[..., 1]),),
    "optax.softmax_cross_entropy_with_integer_labels": (jnp.ones((2, 5), int),),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_are_taken_and_refused_as_by_the_original(name: str) -> None:
    """Numbers, which ours refuses or reads in its own way, and a keyword that only ours has."""
    seen = np.array([[[True, True, False, True]], [[False, True, True, False]]]).repeat(5, 1)
    taken, labels = [], LABELLED.get(name, ())
    masks = [seen, jnp.where(seen, 0, -1e9)]
    masks += [jnp.asarray(seen).astype(dtype) for dtype in ("int32", "uint8", "float16", "float32", "complex64")]
    for mask, more in [(mask, {}) for mask in masks] + [(seen, {name: None}) for name in ("module", "scale")]:
        try:
            want = MASKED[name](found(name), mask, *labels, **more)
        except (TypeError, ValueError):
            want = None
        taken.append(want is not None)
        with jaxsoftmax.patch() as calls:
            if want is None:
                with pytest.raises((TypeError, ValueError)):
                    MASKED[name](found(name), mask, *labels, **more)
                assert not any(calls.values())
            else:
                got = MASKED[name](found(name), mask, *labels, **more)
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert taken[0]
    assert not all(taken)


@pytest.mark.parametrize("how", ["jax", "linen", "nnx"])
def test_a_query_without_keys(how: str) -> None:
    mask = jnp.ones((1, 1, 5, 5), bool).at[..., 0, :].set(False)
    module = types.SimpleNamespace(sow=lambda *_: None)
    dropout = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    attention, ways = {
        "jax": (lambda *args, **rest: jax.nn.dot_product_attention(*args, **rest), [{}]),
        "linen": (nn.dot_product_attention, [{}, {"module": module}, dropout]),
        "nnx": (nnx.dot_product_attention, [{}, {"module": module}, dropout]),
    }[how]
    call = jax.jit(lambda: [attention(Q, Q, Q, mask=mask, **way) for way in ways])
    means = call()
    with jaxsoftmax.patch() as calls:
        outs = call()
    assert sum(calls.values()) == len(ways)
    np.testing.assert_allclose(means[0][:, 0], Q.mean(1), rtol=1e-5)
    for out, mean in zip(outs, means, strict=True):
        # One layer gives one answer, in training and in evaluation.
        assert not out[:, 0].any()
        np.testing.assert_allclose(out[:, 1:], mean[:, 1:], rtol=1e-4, atol=1e-5)


def test_signatures_and_names_are_the_originals() -> None:
    shown = lambda: [
        (inspect.signature(f).parameters.keys(), f.__name__, f.__doc__) for f in map(found, jaxsoftmax.Calls())
    ]
    before = shown()
    with jaxsoftmax.patch():
        assert shown() == before


# A model of today is read tomorrow, by a program that knows no patch.
READ = """
import pickle, sys, jax, optax, flax.linen
names, pickled = pickle.loads(sys.stdin.buffer.read())
assert "jaxsoftmax" not in sys.modules
functions = pickle.loads(pickled)
assert functions.func is jax.nn.softmax and functions.keywords["others"] == [eval(name) for name in names]
"""


def test_what_holds_a_function_is_pickled_and_copied() -> None:
    with jaxsoftmax.patch() as calls:
        names = [*calls]
        model = functools.partial(jax.nn.softmax, others=[found(name) for name in names])
        pickled = {protocol: pickle.dumps(model, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)}
        for copied in (copy.copy(model), copy.deepcopy(model), *map(pickle.loads, pickled.values())):
            assert copied.func is model.func
            assert copied.keywords == model.keywords
        # As cloudpickle does what cannot be imported: by the values of a function's closure.
        assert cloudpickle.loads(cloudpickle.dumps(lambda x: model.func(x)))(X).shape == X.shape
    assert calls["jax.nn.softmax"] == 1
    outside = [copy.deepcopy(model), *map(pickle.loads, [*pickled.values(), pickle.dumps(model)])]
    for loaded in outside:
        assert loaded.func is ORIGINALS["jax.nn.softmax"]
        assert loaded.keywords["others"] == [ORIGINALS[name] for name in names]
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        read = subprocess.run([sys.executable, "-c", READ], input=pickle.dumps((names, pickled[protocol])), check=False)
        assert read.returncode == 0


def test_a_class_holds_a_function_as_its_method() -> None:
    with jaxsoftmax.patch():
        held = jax.nn.softmax
    model = type("Model", (), {"softmax": held})()
    assert type(model).softmax is held
    assert model.softmax.__func__ is held
    assert model.softmax.__self__ is model


def test_blocks_nest_and_end_with_an_error() -> None:
    def fails() -> None:
        with jaxsoftmax.patch():
            jax.nn.softmax(X)
            raise RuntimeError

    with jaxsoftmax.patch() as outer:
        with jaxsoftmax.patch() as inner:
            jax.nn.softmax(X)
        jax.nn.softmax(X)
        with pytest.raises(RuntimeError):
            fails()
        jax.nn.softmax(X)
    jax.nn.softmax(X)
    assert (outer["jax.nn.softmax"], inner["jax.nn.softmax"]) == (4, 1)
    with pytest.raises(RuntimeError):
        fails()


def test_a_block_decorates_a_function() -> None:
    @jaxsoftmax.patch()
    def names() -> bool:
        return jax.nn.softmax is not ORIGINALS["jax.nn.softmax"] and bool(_patch._ON.value)

    assert names()
    assert names()


def test_what_is_compiled_outside_is_traced_anew_inside() -> None:
    row = lambda carry, x: (carry + jax.nn.logsumexp(x), None)
    model = jax.jit(lambda x: jax.lax.scan(row, 0.0, jax.nn.softmax(x))[0])
    used = lambda: {eqn.primitive.name for eqn in model.trace(X).jaxpr.eqns} & {"softmax"}
    model(X)
    assert not used()
    with jaxsoftmax.patch() as calls:
        model(X)
        assert used()
        count = calls["jax.nn.softmax"], calls["jax.nn.logsumexp"]
        assert min(count) > 0
        model(X)
        assert (calls["jax.nn.softmax"], calls["jax.nn.logsumexp"]) == count
    assert not used()


def test_a_block_holds_in_its_own_thread() -> None:
    seen = {}

    def other(what: str) -> None:
        jax.nn.softmax(X)
        with jaxsoftmax.patch() as calls:
            jax.nn.softmax(X)
        seen[what] = calls["jax.nn.softmax"]

    def in_thread(what: str) -> None:
        thread = threading.Thread(target=other, args=(what,))
        thread.start()
        thread.join()

    with jaxsoftmax.patch() as calls:
        in_thread("under a block")
        assert calls["jax.nn.softmax"] == 0
        jax.nn.softmax(X)
    calls_everywhere = jaxsoftmax.install()
    in_thread("installed")
    jaxsoftmax.uninstall()
    in_thread("after")
    assert seen == {"under a block": 1, "installed": 1, "after": 1}
    assert calls["jax.nn.softmax"] == 1
    assert calls_everywhere["jax.nn.softmax"] == 2


def test_many_threads_in_blocks_of_their_own() -> None:
    counts = []

    def work() -> None:
        for _ in range(20):
            with jaxsoftmax.patch() as calls:
                jax.nn.softmax(X)
            counts.append(calls["jax.nn.softmax"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert counts == [1] * 80


def test_install_and_uninstall() -> None:
    jaxsoftmax.uninstall()
    calls = jaxsoftmax.install()
    assert jaxsoftmax.install() is calls
    with jaxsoftmax.patch() as inner:
        jax.nn.softmax(X)
    jax.nn.softmax(X)
    jaxsoftmax.uninstall()
    jax.nn.softmax(X)
    assert (calls["jax.nn.softmax"], inner["jax.nn.softmax"]) == (2, 1)
    with jaxsoftmax.patch() as block:
        again = jaxsoftmax.install()
        jaxsoftmax.uninstall()
        jax.nn.softmax(X)
    assert block["jax.nn.softmax"] == 1
    assert again is not calls
    assert not any(again.values())


def test_what_someone_else_has_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before, inside = (lambda x: x), (lambda x, y: x * y)
    monkeypatch.setattr(jax.nn, "softmax", before)
    with jaxsoftmax.patch() as calls:
        jax.nn.softmax(X)
        monkeypatch.setattr(jax.nn, "log_softmax", inside)
        monkeypatch.setattr(optax.softmax_cross_entropy, "__code__", inside.__code__)
    assert jax.nn.softmax is before
    assert jax.nn.log_softmax is inside
    assert optax.softmax_cross_entropy.__code__ is inside.__code__
    assert (calls["jax.nn.softmax"], calls["jax.nn.log_softmax"]) == (1, 0)
    # Someone else puts back what was there: ours, which are the originals outside, and as good as these for a block.
    monkeypatch.undo()
    assert jax.nn.log_softmax is not ORIGINALS["jax.nn.log_softmax"]
    both = jax.jit(lambda x: (jax.nn.log_softmax(x), optax.softmax_cross_entropy(x, x)))
    outside = both.trace(X).jaxpr
    assert "log_softmax" not in {eqn.primitive.name for eqn in outside.eqns}
    with jaxsoftmax.patch() as calls:
        both(X)
    assert (calls["jax.nn.log_softmax"], calls["optax.softmax_cross_entropy"]) == (1, 1)
    assert jax.nn.log_softmax is ORIGINALS["jax.nn.log_softmax"]


SOMEONE_ELSES = """
import jax
from jax.nn import dot_product_attention, log_softmax, logmeanexp as mean, softmax as act
from jax.scipy.special import log_softmax as log_act, logsumexp, softmax

def model(x):
    attended = dot_product_attention(*[x[None, :, None]] * 3).sum()
    return act(x), softmax(x), log_softmax(x), log_act(x), logsumexp(x), mean(x), attended
"""


def test_names_imported_before_and_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def new(name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(SOMEONE_ELSES, vars(module))
        return module

    early = new("early")
    names = [name for name, x in vars(early).items() if x in ORIGINALS.values()]
    theirs = early.model(X)
    with jaxsoftmax.patch() as calls:
        late = new("late")
        ours = early.model(X), late.model(X)
        from jax.nn import softmax as local

        local(X), nn.softmax(X), nnx.softmax(X), flax.core.nn.softmax(X)
    counts = dict.fromkeys((name for name in ORIGINALS if name.startswith("jax")), 2)
    # The two names of logsumexp are one function.
    logsumexps = calls["jax.nn.logsumexp"] + calls["jax.scipy.special.logsumexp"]
    assert dict(calls, **{"jax.nn.logsumexp": logsumexps, "jax.scipy.special.logsumexp": 2}) == (
        dict.fromkeys(calls, 0) | counts | {"jax.nn.softmax": 6}
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, (theirs, theirs))
    assert len(names) == 7
    for module in (early, late):
        assert all(vars(module)[name] in ORIGINALS.values() for name in names)
    outside = local(X)
    with jaxsoftmax.patch() as again:
        local(X)
    assert again["jax.nn.softmax"] == 1
    assert bits(outside) == bits(theirs[0])


def test_a_module_that_is_imported_lazily_stays_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text("raise RuntimeError")
    spec = importlib.util.spec_from_file_location("lazy", tmp_path / "lazy.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy", module)
    importlib.util.LazyLoader(spec.loader).exec_module(module)
    with jaxsoftmax.patch():
        pass
    with pytest.raises(RuntimeError):
        _ = module.anything


def as_default(x: jax.Array, act: Callable[..., jax.Array] = jax.nn.softmax) -> jax.Array:
    return act(x)


def attended(x: jax.Array, attention: Callable[..., jax.Array]) -> jax.Array:
    return attention(x[:, None], x[:, None], x[:, None])


# What docs/patch.md says of each: a model that was built before the patch, and what of it is replaced.
BUILT: dict[str, tuple[Callable[[jax.Array], jax.Array], set[str]]] = {
    "functools.partial(jax.nn.softmax)": (functools.partial(jax.nn.softmax), set()),
    "jax.jit(jax.nn.softmax)": (jax.jit(jax.nn.softmax), set()),
    "jax.vmap(jax.nn.softmax)": (jax.vmap(jax.nn.softmax), set()),
    "def f(x, act=jax.nn.softmax)": (as_default, set()),
    "jax.random.categorical": (lambda x: jax.random.categorical(jax.random.key(0), x), set()),
    "linen.softmax": (lambda x: nn.softmax(x), {"jax.nn.softmax"}),
    "linen.Sequential([linen.softmax])": (functools.partial(nn.Sequential([nn.softmax]).apply, {}), set()),
    "linen.dot_product_attention_weights": (
        lambda x: nn.dot_product_attention_weights(x[:, None], x[:, None]),
        {"jax.nn.softmax"},
    ),
    "linen.dot_product_attention": (
        functools.partial(attended, attention=nn.dot_product_attention),
        {"flax.linen.dot_product_attention"},
    ),
    "nnx.softmax": (lambda x: nnx.softmax(x), {"jax.nn.softmax"}),
    "nnx.Sequential(nnx.softmax)": (nnx.Sequential(nnx.softmax), set()),
    "nnx.dot_product_attention": (
        functools.partial(attended, attention=nnx.dot_product_attention),
        {"flax.nnx.dot_product_attention"},
    ),
    "optax.softmax_cross_entropy": (
        functools.partial(optax.softmax_cross_entropy, labels=X),
        {"optax.softmax_cross_entropy"},
    ),
    "optax.safe_softmax_cross_entropy": (
        lambda x: optax.losses.safe_softmax_cross_entropy(x, x),
        {"jax.nn.log_softmax"},
    ),
    "equinox.nn.Lambda(jax.nn.softmax)": (equinox.nn.Lambda(jax.nn.softmax), set()),
    "equinox.nn.MultiheadAttention": (
        functools.partial(lambda x, m: m(x, x, x), m=equinox.nn.MultiheadAttention(2, 6, key=jax.random.key(0))),
        {"jax.nn.softmax"},
    ),
}


@pytest.mark.parametrize("what", BUILT)
def test_what_is_replaced_in_models_built_before(what: str) -> None:
    model, replaced = BUILT[what]
    with jaxsoftmax.patch() as calls:
        jax.eval_shape(model, X)
    assert {name for name, n in calls.items() if n} == replaced
    assert not calls.reasons
    table = (Path(__file__).parents[2] / "docs" / "patch.md").read_text().partition("| library |")[2]
    row = next(row for row in table.splitlines() if f"`{what}`" in row)
    assert f"`{what}`" in row.split("|")[2 if replaced else 3]


def test_the_report_says_where_softmax_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with jaxsoftmax.patch(report=True):
        BUILT["equinox.nn.MultiheadAttention"][0](X)
        jax.nn.dot_product_attention(Q, Q, Q)
        with jaxsoftmax.patch(report=True):
            jax.nn.dot_product_attention(Q, Q, Q, bias=jnp.ones((5, 5), bool))
    inner, equinoxs, here, left = capsys.readouterr().err.splitlines()
    reason = "left to jax.nn.dot_product_attention, 1: TypeError: flash_attention: bias has dtype bool"
    assert inner.startswith(reason)
    assert left.startswith(reason)
    assert re.fullmatch(r"equinox.nn._attention: jax.nn.softmax \d \(softmax only: no attention, no loss\)", equinoxs)
    assert here == f"{__name__}: jax.nn.dot_product_attention 1"
    jaxsoftmax.install(report=True)
    jaxsoftmax.uninstall()
    assert capsys.readouterr().err == "jaxsoftmax.patch: no call\n"
    program = "import jax, jaxsoftmax; jaxsoftmax.install(report=True); jax.nn.softmax(jax.numpy.ones(3))"
    reported = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert reported == "__main__: jax.nn.softmax 1 (softmax only: no attention, no loss)\n"


def test_libraries_imported_inside() -> None:
    program = """
import sys, jax, jaxsoftmax, jax.numpy as jnp
with jaxsoftmax.patch() as calls:
    assert not {"optax", "flax"} & {name.partition(".")[0] for name in sys.modules}
    import optax
    import flax.linen as nn
    from flax import nnx
    optax.softmax_cross_entropy(jnp.ones((2, 3)), jnp.ones((2, 3)))
    nn.dot_product_attention(*[jnp.ones((2, 3, 4))] * 3)
    nnx.dot_product_attention(*[jnp.ones((2, 3, 4))] * 3)
    nn.softmax(jnp.ones(3))
assert not hasattr(nnx.dot_product_attention, "__wrapped__")
assert nn.softmax is jax.nn.softmax and not hasattr(nn.dot_product_attention, "__wrapped__")
optax.softmax_cross_entropy(jnp.ones((2, 3)), jnp.ones((2, 3)))
print({name: n for name, n in calls.items() if n})
"""
    shown = subprocess.check_output([sys.executable, "-c", program], text=True)
    names = {"optax.softmax_cross_entropy", "flax.linen.dot_product_attention", "flax.nnx.dot_product_attention"}
    assert eval(shown) == dict.fromkeys({*names, "jax.nn.softmax"}, 1)


def test_a_library_that_cannot_be_reached_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 1.0
    monkeypatch.setattr(optax.losses, "softmax_cross_entropy", lambda x: held * x)  # a closure: no other code fits it
    with pytest.raises(ValueError, match="free vars"), jaxsoftmax.patch():
        pass
    assert jax.nn.softmax is ORIGINALS["jax.nn.softmax"]
