"""Meshes of explicit axes that no context names: what `jax.make_mesh` and `jax.device_put` give, and nothing else."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from tests.jaxsoftmax.sharded import COLLECTIVES, count

RNG = np.random.default_rng(0)

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

Operands = dict[str, jax.Array]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def mesh(*kinds: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("d", "m"), kinds or None, devices=jax.devices("cpu")[:8])


X, ROW, MASK = normal(8, 4, 16), normal(8, 4), normal(8, 1, 16) > -1
LABELS = jnp.asarray(RNG.integers(0, 16, (8, 4)), jnp.int32)
QKV = {"query": normal(8, 6, 4, 8), "key": normal(8, 6, 2, 8), "value": normal(8, 6, 2, 8)}
MORE = {"bias": normal(1, 4, 6, 6), "sinks": normal(4), "key_value_seq_lengths": jnp.arange(8, dtype=jnp.int32) % 6}


def cross_entropy(x: jax.Array, labels: jax.Array, **options: Any) -> Any:
    return jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, labels, **options)


CALLS: dict[str, tuple[Callable[..., Any], Operands]] = {
    "softmax": (jaxsoftmax.softmax, {"x": X, "where": MASK}),
    "log_softmax": (functools.partial(jaxsoftmax.log_softmax, scale=0.5), {"x": X}),
    "logsumexp": (functools.partial(jaxsoftmax.logsumexp, axis=-1), {"a": X, "where": MASK}),
    "cross_entropy": (
        functools.partial(cross_entropy, return_lse=True, ignore_index=3, label_smoothing=0.1),
        {"x": X, "labels": LABELS, "where": MASK},
    ),
    "weighted": (functools.partial(cross_entropy, z_loss=0.1), {"x": X, "labels": LABELS, "weights": ROW}),
    "probabilities": (jaxsoftmax.softmax_cross_entropy, {"logits": X, "labels": normal(8, 4, 16)}),
    "top_k": (lambda logits: jaxsoftmax.top_k_softmax(logits, 3)[0], {"logits": X}),
    "attention": (functools.partial(jaxsoftmax.flash_attention, is_causal=True), QKV),
    "more attention": (functools.partial(jaxsoftmax.flash_attention, return_residual=True), QKV | MORE),
}


def parted(operands: Operands) -> tuple[Operands, Operands]:
    """What is differentiated, and what is not."""
    moving = {n: x for n, x in operands.items() if x.dtype == jnp.float32}
    return moving, {n: x for n, x in operands.items() if n not in moving}


def derivatives(name: str, operands: Operands) -> dict[str, Any]:
    """Results, tangents, gradients and the gradients' tangents."""
    moving, still = parted(operands)
    call = lambda moving: CALLS[name][0](**{n: (moving | still)[n] for n in CALLS[name][1]})
    gradient = jax.grad(lambda moving: sum(jnp.sin(y).sum() for y in jax.tree.leaves(call(moving))))
    out, tangent = jax.jvp(call, (moving,), (moving,))
    first, second = jax.jvp(gradient, (moving,), (moving,))
    return {"out": out, "tangent": tangent, "gradient": first, "hvp": second}


@functools.cache
def expected(name: str) -> Any:
    """What one device gives."""
    return jax.tree.map(np.asarray, jax.jit(functools.partial(derivatives, name))(CALLS[name][1]))


def agree(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5), got, want)


def put(operands: Operands, specs: dict[str, P], on: Mesh) -> Operands:
    """Those operands that have a spec, placed so."""
    return {n: jax.device_put(x, NamedSharding(on, specs[n])) if n in specs else x for n, x in operands.items()}


D, DM, HEADS, COLUMNS = P("d"), P("d", "m"), P("d", None, "m"), P("d", None, "m")
NOTHING, SUMS, ANY = set(), {"all-reduce"}, set(COLLECTIVES)
REFERENCE, STAND_IN = "reference", "stand-in"
CASES: list[tuple[str, str, set[str], dict[str, P]]] = [
    ("softmax", STAND_IN, NOTHING, {"x": D, "where": D}),
    ("softmax", REFERENCE, NOTHING, {"where": D}),
    ("softmax", STAND_IN, NOTHING, {"where": D}),
    ("softmax", STAND_IN, ANY, {"x": P(), "where": D}),
    ("log_softmax", STAND_IN, NOTHING, {"x": DM}),
    ("log_softmax", STAND_IN, SUMS, {"x": P(None, None, "d")}),
    ("logsumexp", STAND_IN, SUMS, {"a": P("m", None, "d"), "where": P("m")}),
    ("cross_entropy", STAND_IN, NOTHING, {"x": DM, "labels": DM, "where": D}),
    ("cross_entropy", REFERENCE, NOTHING, {"x": DM, "labels": DM, "where": D}),
    ("cross_entropy", STAND_IN, ANY, {"x": DM}),
    ("cross_entropy", STAND_IN, SUMS, {"x": COLUMNS, "labels": D, "where": D}),
    ("weighted", STAND_IN, NOTHING, {"x": D, "labels": D, "weights": D}),
    ("weighted", STAND_IN, ANY, {"labels": D}),  # the compiler may cut logits that lie on no mesh, and gather them
    ("weighted", STAND_IN, SUMS, {"x": COLUMNS, "labels": D, "weights": D}),
    ("probabilities", STAND_IN, NOTHING, {"logits": DM, "labels": DM}),
    ("top_k", STAND_IN, NOTHING, {"logits": DM}),
    ("top_k", STAND_IN, SUMS, {"logits": COLUMNS}),
    ("attention", STAND_IN, NOTHING, {"query": HEADS, "key": HEADS, "value": HEADS}),
    ("attention", REFERENCE, NOTHING, {"query": D, "key": D, "value": D}),
    ("attention", STAND_IN, NOTHING, {"query": D}),
    ("attention", REFERENCE, NOTHING, {"key": D}),
    ("attention", STAND_IN, ANY, {"query": P(None, None, "d"), "key": P(), "value": P()}),
    ("attention", STAND_IN, ANY, {"query": P(None, "m"), "key": P(None, "m"), "value": P()}),
    ("more attention", STAND_IN, SUMS, {"query": HEADS, "key": HEADS, "value": HEADS, "key_value_seq_lengths": D}),
    ("more attention", REFERENCE, ANY, {"query": HEADS, "sinks": P("m")}),
]


def name_of(part: Any) -> str:
    if isinstance(part, dict):
        return ",".join(f"{n}={tuple(s)}" for n, s in part.items())
    return part if isinstance(part, str) else ""


@pytest.mark.parametrize("name, kernels, may, specs", CASES, indirect=["kernels"], ids=name_of)
def test_as_in_a_context(name: str, kernels: Any, may: set[str], specs: dict[str, P]) -> None:
    want, operands, on = expected(name), CALLS[name][1], mesh()
    kernels()
    cut = put(operands, specs, on)
    compiled = jax.jit(functools.partial(derivatives, name)).lower(cut).compile()
    agree(compiled(cut), want)
    assert set(count(compiled)) <= may
    agree(CALLS[name][0](**cut), want["out"])
    types = functools.partial(jax.eval_shape, functools.partial(derivatives, name))
    got = types(cut)
    with jax.set_mesh(on):
        ambient = types(put(operands, dict.fromkeys(operands, P()) | specs, on))
    for part in ("gradient", "hvp"):
        # The gradient of what no mesh has is cut as it comes, and not gathered.
        got[part], ambient[part] = ({n: x for n, x in y[part].items() if n in specs} for y in (got, ambient))
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, ambient)


@pytest.mark.parametrize("function", ["softmax", "attention"])
def test_other_ways_to_call(stand_ins: Any, function: str) -> None:
    """Mapped, step by step, within a region that is manual over one axis, and on meshes with Auto axes."""
    call = jaxsoftmax.softmax if function == "softmax" else lambda x: jaxsoftmax.flash_attention(x, x, x)
    x, explicit, auto = X if function == "softmax" else QKV["query"], AxisType.Explicit, AxisType.Auto
    pulled = lambda x: jax.vjp(call, x)[1](jnp.cos(x))[0]
    want, gradient = call(x), pulled(x)
    cut = jax.device_put(x, NamedSharding(mesh(), HEADS))
    agree(jax.jit(jax.vmap(call))(cut), want)
    agree(pulled(cut), gradient)
    agree(jax.vmap(pulled)(cut), gradient)
    manual = jax.shard_map(call, mesh=mesh(), in_specs=D, out_specs=D, axis_names={"d"})
    agree(jax.jit(manual)(cut), want)
    for kinds in ((explicit, auto), (auto, explicit)):
        agree(jax.jit(pulled)(jax.device_put(x, NamedSharding(mesh(*kinds), HEADS))), gradient)
