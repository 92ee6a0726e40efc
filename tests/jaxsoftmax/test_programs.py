"""From any call to programs: what is traced, which platform gets kernels, what `explain` says of it, and export."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from tests.jaxsoftmax.calls import of_floats
from tests.jaxsoftmax.sharded import mesh, put
from tests.jaxsoftmax.transformations import gradient

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, 6, 8)), jnp.float32)
Y = jnp.asarray(RNG.integers(0, 8, (8, 6)), jnp.int32)
Q, K, V = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((8, 5, 4, 8), (8, 7, 2, 8), (8, 7, 2, 8)))
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 5.0, "scale": 0.5, "weights": 0.25}

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
loss = jaxsoftmax.softmax_cross_entropy_with_integer_labels
attention = functools.partial(jaxsoftmax.flash_attention, is_causal=True)
CALLS = {name: of_floats(name) for name in ("softmax", "log_softmax", "loss", "weighted", "attention")}


def lower(function: Any, *operands: Any, platforms: tuple[str, ...]) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("name", CALLS)
def test_the_platform_is_chosen_at_lowering_of_what_is_traced_once(stand_ins: Any, name: str) -> None:
    call, operands = CALLS[name]
    traces = []
    traced = jax.jit(lambda *xs: (traces.append(1), call(*xs))[1])
    assert not stand_ins.problems
    for platform, kernels in (("tpu", False), ("rocm", False), ("cuda", True)):
        stand_ins.problems.clear()
        traced.trace(*operands).lower(lowering_platforms=(platform,))
        assert bool(stand_ins.problems) == kernels
    traced(*operands), traced(*operands)
    assert len(traces) == 1
    stand_ins.problems.clear()
    both = export.export(jax.jit(call), platforms=["tpu", "cuda"])(*operands)
    assert "stablehlo.case" in both.mlir_module()
    assert stand_ins.problems
    assert export.export(jax.jit(call), platforms=["cuda"])(*operands).serialize()
    x, *rest = operands
    text = lower(lambda x: [call(x + i, *rest) for i in range(4)], x, platforms=("cpu",))
    assert text.count("func.func private @launch_kernel") == 1, "equal kernels in a program are one function"
    assert text.count("call @launch_kernel") == 4


@pytest.mark.parametrize("name", CALLS)
def test_export(name: str) -> None:
    call, operands = CALLS[name]
    for function in (call, gradient(call)):
        exported = export.export(jax.jit(function), platforms=["cpu", "cuda"])(*operands)
        reloaded = export.deserialize(exported.serialize())
        jax.tree.map(close, reloaded.call(*operands), function(*operands))
    reloaded = export.deserialize(export.export(jax.jit(call))(*operands).serialize(vjp_order=1))
    jax.tree.map(close, gradient(reloaded.call)(*operands), gradient(call)(*operands))


def masked(function: Any, x: jax.Array, where: jax.Array) -> Any:
    return function(x), jax.grad(lambda x: jnp.sin(function(x, where=where)).sum(where=where))(x)


def loss_and_gradient(x: jax.Array, y: jax.Array, axis: Any) -> Any:
    return jax.value_and_grad(lambda x: loss(x, y, axis, ignore_index=-1, **OPTIONS).sum())(x)


def attention_pulled_back(*operands: jax.Array) -> Any:
    call = functools.partial(attention, causal_alignment="bottom_right")
    return jax.vjp(call, *operands)[1](operands[0])


WHERE = jnp.arange(8) < 7
SYMBOLIC: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...], tuple[str, ...]]] = {
    "softmax": (functools.partial(masked, jaxsoftmax.softmax), (X[0], WHERE), ("b, n", "n")),
    "log_softmax": (functools.partial(masked, jaxsoftmax.log_softmax), (X[0], WHERE), ("b, n", "n")),
    "loss": (functools.partial(loss_and_gradient, axis=-1), (X[0], Y[0]), ("b, n", "b")),
    "loss over two axes": (functools.partial(loss_and_gradient, axis=(0, 1)), (X[0], Y[0, 0]), ("b, n", "")),
    "linear": (
        jax.value_and_grad(lambda h, w, y: jaxsoftmax.linear_cross_entropy(h, w, y, weights=0.5).sum(), (0, 1)),
        (X[0], X[0].T, Y[0, :6] % 6),
        ("n, 8", "8, 6", "n"),
    ),
    "top_k": (functools.partial(jaxsoftmax.top_k_softmax, k=4), (jnp.tile(X[0], (1, 375)) * 1.0,), ("b, 3000",)),
    "attention": (attention_pulled_back, (Q, K, V), ("b, t, 4, 8", "b, s, 2, 8", "b, s, 2, 8")),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_export_with_symbolic_shapes(name: str) -> None:
    function, operands, shapes = SYMBOLIC[name]
    exported = export.export(jax.jit(function), platforms=["cpu", "cuda"])(
        *export.symbolic_args_specs(operands, shapes)
    )
    got = export.deserialize(exported.serialize()).call(*operands)
    jax.tree.map(close, tuple(got), tuple(function(*operands)))


@pytest.mark.parametrize(
    "name, spec",
    [("softmax", P(None, None, "d")), ("loss", P("d", None, "m")), ("attention", P("d", None, "m"))],
)
def test_export_of_a_sharded_program(name: str, spec: P) -> None:
    call, operands = CALLS[name]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh(), spec)) for x in operands]
    exported = export.export(jax.jit(gradient(call)))(*shapes)
    assert exported.nr_devices == 8
    reloaded = export.deserialize(exported.serialize())
    got = jax.jit(reloaded.call)(*(put(x, spec) for x in operands))
    jax.tree.map(close, got, gradient(call)(*operands))


POLICIES: dict[str, tuple[Callable[..., Any], int]] = {
    "none": (lambda names: None, 2),
    "nothing": (lambda names: jax.checkpoint_policies.nothing_saveable, 2),
    "products": (lambda names: jax.checkpoint_policies.dots_saveable, 2),
    "everything": (lambda names: jax.checkpoint_policies.everything_saveable, 1),
    "names": (lambda names: jax.checkpoint_policies.save_only_these_names(*names), 1),
    "other names": (lambda names: jax.checkpoint_policies.save_any_names_but_these(*names), 2),
    "all names but the last": (lambda names: jax.checkpoint_policies.save_only_these_names(*names[:-1]), 2),
    "the primitive": (lambda names: lambda primitive, *_, **__: f"{primitive.name}_out" in names, 1),
}


@pytest.mark.parametrize(
    "name, names", [("softmax", ("softmax_out",)), ("attention", ("flash_attention_out", "flash_attention_lse"))]
)
def test_remat_policies(name: str, names: tuple[str, ...]) -> None:
    call, operands = CALLS[name]
    inner = lambda x, *rest: call(jnp.sin(x), *rest)
    want = jax.jit(gradient(inner))(*operands)
    for policy, (make, forwards) in POLICIES.items():
        run = gradient(jax.checkpoint(inner, policy=make(names)))
        jaxpr = str(jax.make_jaxpr(run)(*operands))
        assert jaxpr.count(f"= {names[0].removesuffix('_out')}[") == forwards, policy
        if policy in ("nothing", "names", "all names but the last"):
            jax.tree.map(close, jax.jit(run)(*operands), want)
