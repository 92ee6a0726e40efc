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
    "no jit": jax.disable_jit,
    "device": lambda: jax.default_device(jax.devices("cpu")[3]),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "random numbers": lambda: jax.default_prng_impl("rbg"),
    "jvp": lambda: coming("jax_custom_jvp3"),
    "vjp": lambda: coming("jax_custom_vjp3"),
    "remat": lambda: coming("jax_remat3"),
}
STRICT = ("ranks", "dtypes", "checks", "leaks", "64 bits")
NAMES = ("softmax_out", "flash_attention_out", "flash_attention_lse")
saved = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*NAMES))


def within(*settings: str) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for setting in settings:
        stack.enter_context(SETTINGS[setting]())
    return stack


def pulled_back(call: Callable[..., Any], *xs: jax.Array) -> Any:
    out, pull = jax.vjp(call, *xs)
    return out, pull(jax.tree.map(lambda y: jnp.cos(jnp.where(jnp.isfinite(y), y, 0)), out))


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


COMPARED = ("softmax", "weighted", "router", "window")


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
        got = {name: jax.jit(functools.partial(pulled_back, call))(*xs) for name, (call, xs) in calls.items()}
    jax.clear_caches()
    for name in COMPARED:
        check(name, pulled_back, got[name])


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


def test_kernels_lower_in_all_of_them_at_once() -> None:
    """For CUDA; which of a kernel's parts is traced where is Pallas' choice."""
    shape = jax.ShapeDtypeStruct
    half, logits = shape((2, 256, 8, 64), jnp.bfloat16), shape((64, 4096), jnp.bfloat16)
    more = {
        "mask": shape((2, 1, 256, 256), jnp.bool_),
        "bias": shape((8, 256, 256), jnp.float32),
        "sinks": shape((8,), jnp.float32),
        "key_value_seq_lengths": shape((2,), jnp.int32),
        "query_segment_ids": shape((2, 256), jnp.int32),
    }

    def of_attention(q: jax.Array, more: dict[str, jax.Array]) -> Any:
        call = lambda q: jaxsoftmax.flash_attention(q, q, q, **more, local_window_size=64)
        return jax.vjp(call, q)[1](q)

    def of_rows(x: jax.Array) -> Any:
        total = lambda x: jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, jnp.zeros(64, jnp.int32)).sum()
        return jax.vjp(jaxsoftmax.softmax, x)[1](x), jax.grad(total)(x), jaxsoftmax.top_k_softmax(x, 4)

    jax.clear_caches()
    with within(*STRICT):
        for function, operands, kernels in ((of_attention, (half, more), 2), (of_rows, (logits,), 5)):
            text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("@mosaic_gpu") >= kernels
    jax.clear_caches()
