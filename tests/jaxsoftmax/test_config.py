"""JAX's settings, however strict, and its next implementations of differentiation: they break no call of ours."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from tests.jaxsoftmax.calls import CALLS, MORE_CALLS, of_floats
from tests.jaxsoftmax.transformations import pulled_back

NAMED = {**CALLS, **MORE_CALLS}


@contextlib.contextmanager
def coming(switch: str) -> Iterator[None]:
    before = getattr(jax.config, switch)
    jax.config.update(switch, True)
    try:
        yield
    finally:
        jax.config.update(switch, before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "checks": lambda: jax.enable_checks(True),
    "leaks": jax.checking_leaks,
    "64 bits": lambda: jax.enable_x64(True),
    "no NaN": lambda: jax.debug_nans(True),
    "no inf": lambda: jax.debug_infs(True),
    "no jit": jax.disable_jit,
    "device": lambda: jax.default_device(jax.devices("cpu")[3]),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "random numbers": lambda: jax.default_prng_impl("rbg"),
    "jvp": lambda: coming("jax_custom_jvp3"),
    "vjp": lambda: coming("jax_custom_vjp3"),
    "remat": lambda: coming("jax_remat3"),
}
STRICT = ("ranks", "dtypes", "checks", "leaks", "64 bits")
ON_ALL_CALLS = (*STRICT, "no NaN", "no inf")
NAMES = ("softmax_out", "flash_attention_out", "flash_attention_lse")
saved = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*NAMES))


def within(*settings: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for setting in settings:
        stack.enter_context(SETTINGS[setting]())
    return stack


def derivatives(call: Callable[..., Any], *xs: jax.Array) -> Any:
    """What a call gives, its gradient and its tangent, and the tangents of both."""
    return jax.jvp(functools.partial(pulled_back, call), xs, xs), jax.jvp(call, xs, xs)


IN_16_BITS = ("softmax", "log_softmax", "logsumexp", "cross_entropy", "more attention")


@pytest.mark.parametrize(
    "settings, kernels",
    [(STRICT[:2], "reference"), (STRICT, "stand-in")],
    indirect=["kernels"],
    ids=["promotion", "all"],
)
def test_every_call_lowers(settings: tuple[str, ...], kernels: Any) -> None:
    kernels()
    jax.clear_caches()
    with within(*settings):
        for name in NAMED:
            call, operands = of_floats(name)
            dtype = jnp.dtype("bfloat16" if name in IN_16_BITS and settings == STRICT else "float32")
            xs = [x.astype(dtype) for x in operands]
            both = lambda *xs, call=call: (derivatives(call, *xs), jax.vmap(call)(*(jnp.stack([x, x]) for x in xs)))
            ((_, gradients), _), _ = jax.jit(both).lower(*xs).out_info[0]
            assert {x.dtype for x in gradients} == {dtype}, name
    jax.clear_caches()


def results(call: Callable[..., Any], *xs: jax.Array) -> Any:
    return call(*xs)


COMPARED = dict.fromkeys(("softmax", "weighted", "router", "window"), pulled_back) | {"pages": results}


@functools.cache
def expected(name: str, function: Callable[..., Any]) -> Any:
    """What it is where nothing is set."""
    call, operands = of_floats(name)
    return jax.tree.map(np.asarray, jax.jit(functools.partial(function, call))(*operands))


def check(name: str, function: Callable[..., Any], got: Any) -> None:
    want = expected(name, function)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)


@pytest.mark.parametrize("setting", ["no NaN", "no jit", "device", "precision", "random numbers", "64 bits"])
def test_results_are_the_same(stand_ins: Any, setting: str) -> None:
    jax.clear_caches()
    with within(setting):
        calls = {name: of_floats(name) for name in COMPARED}
        got = {name: jax.jit(functools.partial(COMPARED[name], call))(*xs) for name, (call, xs) in calls.items()}
    jax.clear_caches()
    for name, function in COMPARED.items():
        check(name, function, got[name])


def rematerialised(call: Callable[..., Any], *xs: jax.Array) -> Any:
    """With what is saved by name, by no name, and in a loop."""
    each = jax.lax.map(lambda xs: pulled_back(call, *xs), [jnp.stack([x, 2 * x]) for x in xs])
    return derivatives(call, *xs), pulled_back(saved(call), *xs), jax.jvp(jax.checkpoint(call), xs, xs), each


@pytest.mark.parametrize(
    "name, switch",
    [
        ("softmax", "jvp"),
        ("weighted", "vjp"),
        *(("more attention", switch) for switch in ("jvp", "vjp", "remat")),
    ],
)
def test_coming_implementations_give_the_same(name: str, switch: str) -> None:
    call, operands = of_floats(name)
    with within(switch):
        got = jax.jit(functools.partial(rematerialised, call))(*operands)
    check(name, rematerialised, got)


def test_names_are_saved_by_the_coming_remat() -> None:
    call, operands = of_floats("more attention")
    with within("remat"):
        gradient = str(jax.make_jaxpr(lambda *xs: pulled_back(saved(call), *xs))(*operands))
    assert (gradient.count("= flash_attention["), gradient.count("= flash_attention_gradients[")) == (1, 1)


ATTENTION = MORE_CALLS["positions"][1] | MORE_CALLS["segments"][1] | CALLS["more attention"][1]
# All rows; attention to which a mask of each kind is given at once, as a kernel takes seconds to lower; and of what
# kernels compute in another way the forward pass.
ON_CUDA = {name: call for name, call in NAMED.items() if "query" not in call[1]} | {
    "attention": (functools.partial(jaxsoftmax.flash_attention, is_causal=True, local_window_size=(3, 1)), ATTENTION)
}
FORWARD_ON_CUDA = {name: NAMED[name] for name in ("from the end", "pages")}
BY_XLA = {"cross_entropy", "masked loss", "logsumexp with weights", "merged", "probabilities", "router", "softmax"}
BY_XLA |= {"weighted linear"}


def lowered_for_cuda(name: str, *settings: str) -> str:
    """A call's program with integers as wide as there are, in 16 bits where it has floats."""
    call, operands = (ON_CUDA | FORWARD_ON_CUDA)[name]
    wide = {"float32": "bfloat16", "int32": "int64" if "64 bits" in settings else "int32"}
    shapes = {n: jax.ShapeDtypeStruct(x.shape, wide.get(x.dtype.name, x.dtype)) for n, x in operands.items()}

    def program(given: dict[str, jax.Array]) -> Any:
        moving = [n for n, x in given.items() if x.dtype == jnp.bfloat16]
        of_floats = lambda *xs: call(**given | dict(zip(moving, xs, strict=True)))
        xs = [given[n] for n in moving]
        return of_floats(*xs) if name in FORWARD_ON_CUDA else pulled_back(of_floats, *xs)

    with within(*settings):
        return jax.jit(program).trace(shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_a_program_does_not_grow_with_its_tiles() -> None:
    """Half a million short sequences, of which each head has a tile."""
    shape = jax.ShapeDtypeStruct((2**19, 16, 8, 64), jnp.bfloat16)
    lowered = jax.jit(jaxsoftmax.flash_attention).trace(shape, shape, shape).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "@mosaic_gpu" in text
    assert len(text) < 2**20


@pytest.mark.parametrize("name", [*ON_CUDA, *FORWARD_ON_CUDA])
def test_every_call_lowers_for_cuda(name: str) -> None:
    """Under all settings at once; if that fails, the message says under which of them it does by itself."""
    try:
        text = lowered_for_cuda(name, *ON_ALL_CALLS)
    except Exception as error:
        found = []
        for setting in ON_ALL_CALLS:
            try:
                lowered_for_cuda(name, setting)
            except Exception as alone:
                found.append(f"{setting}: {alone}")
        pytest.fail("\n".join(found) or f"only under all settings: {error}")
    assert ("@mosaic_gpu" in text) == (name not in BY_XLA)


X, Q = CALLS["softmax"][1]["x"][0], CALLS["attention"][1]["query"]
SOME, NONE = jnp.arange(16) < 9, jnp.arange(4)[:, None] != 1
EMPTY = jnp.zeros(8, jnp.int32)
Y, PAGES = jnp.arange(4), jnp.ones((4, 9, 8, 8))
cross_entropy, attention = jaxsoftmax.softmax_cross_entropy_with_integer_labels, jaxsoftmax.flash_attention
linear = functools.partial(jaxsoftmax.linear_cross_entropy, weight=jnp.eye(16), labels=Y, where=SOME & NONE)
DATA = {"scale": jnp.float32(0.5), "logits_soft_cap": jnp.float32(5)}
# Finite functions of a finite array, in whose computation something is infinite: a query or a row is empty.
FINITE: dict[str, tuple[Callable[..., Any], jax.Array]] = {
    "attention": (lambda q: attention(q, q, q, mask=jnp.arange(6) > 5), Q),
    "attention to no keys": (lambda q: attention(q, q[:, :0], q[:, :0]), Q),
    "attention of lengths": (lambda q: attention(q, q, q, key_value_seq_lengths=EMPTY), Q),
    "dropout": (lambda q: attention(q, q, q, mask=jnp.tri(6, k=-1, dtype=bool), **CALLS["dropout"][0].keywords), Q),
    "pages": (lambda q: jaxsoftmax.paged_attention(q, PAGES, PAGES, EMPTY[:, None], EMPTY), Q),
    "softmax": (functools.partial(jaxsoftmax.softmax, where=SOME & NONE), X),
    "log_softmax": (lambda x: jnp.where(SOME & NONE, jaxsoftmax.log_softmax(x, where=SOME & NONE), 0), X),
    "logsumexp": (functools.partial(jaxsoftmax.logsumexp, axis=-1, where=SOME), X),
    "logsumexp of nothing": (lambda x: jnp.where(NONE[:, 0], jaxsoftmax.logsumexp(x, -1, where=SOME & NONE), 0), X),
    "loss": (lambda x: cross_entropy(x, Y, where=SOME & NONE, label_smoothing=0.1, z_loss=0.1), X),
    "weighted loss": (lambda x: cross_entropy(x, Y, where=SOME & NONE, weights=0.5), X),
    "probabilities": (lambda x: jaxsoftmax.softmax_cross_entropy(x, jnp.cos(x), where=SOME & NONE), X),
    "linear": (functools.partial(linear, return_entropy=True), X),
    "weighted linear": (functools.partial(linear, weights=0.5, chunk_size=2), X),
    "top_k": (lambda x: jaxsoftmax.top_k_softmax(x, 3)[0], X),
    "top_k of no rows": (lambda x: jaxsoftmax.top_k_softmax(x[:0], 3)[0], X),
    "ignored loss": (lambda x: cross_entropy(x, Y - 1, ignore_index=-1), X),
    "ignored and weighted loss": (lambda x: cross_entropy(x, Y - 1, ignore_index=-1, weights=0.5), X),
    "loss of no labels": (lambda x: cross_entropy(x, 0 * Y, where=SOME & NONE, ignore_index=0), X),
    "linear of no labels": (lambda x: linear(x, labels=0 * Y, ignore_index=0), X),
    "linear weight": (lambda w: jaxsoftmax.linear_cross_entropy(X, w, Y, where=SOME & NONE, **DATA), jnp.eye(16)),
    "capped queries": (lambda q: attention(q, q, q, mask=jnp.arange(6) > 5, **DATA), Q),
}


@pytest.mark.parametrize("name", FINITE)
def test_no_infinity_appears_that_was_not_asked_for(name: str) -> None:
    """Nor a NaN, in results and gradients, outside of programs, in them, and in what a program saves for a gradient."""
    call, x = FINITE[name]
    last = lambda x: jax.tree.leaves(call(x))[-1].sum()
    pushed = [lambda x, f=f: jax.jvp(f, (x,), (x,)) for f in (call, jax.grad(last)) if x is X]
    with jax.debug_infs(name not in ("log_softmax", "logsumexp of nothing")), jax.debug_nans(True):
        for function in (call, jax.grad(last), jax.grad(jax.jit(last)), jax.jit(jax.grad(last)), *pushed):
            assert all(np.isfinite(y).all() for y in jax.tree.leaves(function(x)))


def test_infinities_that_were_asked_for_appear() -> None:
    far = jnp.full_like(X, -jnp.inf).at[:, 1].set(0)
    with jax.debug_infs(True):
        for call, x in (
            (lambda q: attention(q, q, q, mask=jnp.arange(6) > 5, return_residual=True), Q),
            (lambda q: jaxsoftmax.paged_attention(q, PAGES, PAGES, EMPTY[:, None], EMPTY, return_residual=True), Q),
            (functools.partial(jaxsoftmax.logsumexp, axis=-1, where=NONE), X),
            (functools.partial(jaxsoftmax.log_softmax, where=SOME), X),
            (functools.partial(linear, return_lse=True), X),
            (lambda x: cross_entropy(x, Y), far),
        ):
            with pytest.raises(FloatingPointError):
                call(x)
