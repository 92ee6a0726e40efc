"""Sharded attention: values, types and, on the compiled program, how little the devices say to each other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from pallas_kernels.attention.problem import Op
from tests.jaxsoftmax.sharded import collectives, count, mesh, put
from tests.pairwise import pairwise

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


Q, K, V = normal(8, 6, 4, 8), normal(8, 5, 2, 8), normal(8, 5, 2, 8)
CT = normal(8, 6, 4, 8)
SINKS, BIAS = normal(4), normal(1, 1, 6, 5)
LENGTHS = jnp.asarray([5, 4, 3, 5, 1, 0, 2, 5])
CUTS = [P("d"), P("d", None, "m"), P(("d", "m")), P(None, None, "m")]

KERNELS = ["reference", "stand-in"]

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def attention(q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
    return jaxsoftmax.flash_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths)


def forward(q: Any, k: Any, v: Any, ct: Any, lengths: Any) -> Any:
    return attention(q, k, v, lengths)


def pulled_back(q: Any, k: Any, v: Any, ct: Any, lengths: Any) -> Any:
    return jax.vjp(lambda *a: attention(*a, lengths), q, k, v)[1](ct)


def pushed_forward(q: Any, k: Any, v: Any, ct: Any, lengths: Any) -> Any:
    return jax.jvp(lambda q, v: attention(q, k, v, lengths), (q, v), (ct, v))[1]


def hvp(q: Any, k: Any, v: Any, ct: Any, lengths: Any) -> Any:
    gradient = jax.grad(lambda q, k: jnp.sin(attention(q, k, v, lengths)).sum(), (0, 1))
    return jax.jvp(lambda q: gradient(q, k), (q,), (ct,))[1]


MODES = {"forward": forward, "vjp": pulled_back, "jvp": pushed_forward, "hvp": hvp}
ARRAYS = (Q, K, V, CT)


@functools.cache
def expected(mode: str) -> Any:
    return jax.tree.map(np.asarray, jax.jit(MODES[mode])(*ARRAYS, LENGTHS))


def agree(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5), got, want)


@pytest.fixture(autouse=True)
def known() -> None:
    """What is expected is computed before anything stands in for kernels."""
    for mode in MODES:
        expected(mode)


@pytest.mark.parametrize("mode, spec, kernels", pairwise([*MODES], CUTS, KERNELS), indirect=["kernels"], ids=str)
def test_batch_and_heads_need_no_exchange(mode: str, spec: P, kernels: Any) -> None:
    record = kernels()
    operands = *(put(x, spec) for x in ARRAYS), put(LENGTHS, P(*spec[:1]))
    compiled = jax.jit(MODES[mode]).lower(*operands).compile()
    assert count(compiled) == {}
    got = compiled(*operands)
    agree(got, expected(mode))
    assert all(x.sharding.is_equivalent_to(NamedSharding(mesh(), spec), 4) for x in jax.tree.leaves(got))
    if record:
        sizes = NamedSharding(mesh(), spec).shard_shape(Q.shape)
        assert (sizes[0], sizes[2]) in {(p.batch, p.query_heads) for p in record.attended(Op.FORWARD)}


def test_each_device_aligns_its_own_sequences(kernels: Any) -> None:
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> Any:
        rules = {"is_causal": True, "causal_alignment": "bottom_right", "key_value_seq_lengths": lengths}
        return jax.grad(lambda *a: jnp.sin(jaxsoftmax.flash_attention(*a, **rules)).sum(), (0, 1, 2))(q, k, v)

    want = jax.jit(gradients)(Q, K, V, LENGTHS)
    kernels()
    operands = *(put(x, P("d")) for x in (Q, K, V)), put(LENGTHS, P("d"))
    assert collectives(gradients, *operands) == {}
    agree(jax.jit(gradients)(*operands), want)


@pytest.mark.parametrize("shared", [1, 2])
def test_more_devices_than_key_heads(shared: int, kernels: Any) -> None:
    k, v = K[:, :, :shared], V[:, :, :shared]
    want = jax.jit(pulled_back)(Q, k, v, CT, LENGTHS)
    record = kernels()
    q, ct = put(Q, P(None, None, "d")), put(CT, P(None, None, "d"))
    if record:
        assert collectives(forward, q, k, v, ct, LENGTHS) == {}
        assert set(collectives(pulled_back, q, k, v, ct, LENGTHS)) == {"all-reduce"}
    agree(jax.jit(pulled_back)(q, k, v, ct, LENGTHS), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_devices_that_share_a_key_head_read_the_right_one(stand_ins: Any, kind: AxisType) -> None:
    """Eight heads on four devices, of which two read each key head: as many as query heads read it, but no more."""
    q, ct = (jnp.concatenate([x, 0.5 * x[..., ::-1, :]], 2) for x in (Q, CT))
    stand_ins.accepts = lambda _: False
    want = jax.jit(pulled_back)(q, K, V, ct, LENGTHS), jax.jit(forward)(q, K, V, ct, LENGTHS)
    stand_ins.accepts = lambda _: True
    jax.clear_caches()
    on = mesh(kind)
    with jax.set_mesh(on):
        cut = P(None, None, "d")
        specs = (q, cut), (K, P()), (V, P()), (ct, cut), (LENGTHS, P())
        operands = [put(x, spec, on) for x, spec in specs]
        agree((jax.jit(pulled_back)(*operands), jax.jit(forward)(*operands)), want)
    assert {(p.query_heads, p.key_heads) for p in stand_ins.problems} >= {(2, 1)}


def test_gradients_of_what_devices_share_are_summed(kernels: Any) -> None:
    def gradients(q: jax.Array, bias: jax.Array, sinks: jax.Array) -> Any:
        call = lambda *a: jnp.sin(jaxsoftmax.flash_attention(a[0], K, V, a[1], sinks=a[2])).sum()
        return jax.grad(call, (0, 1, 2))(q, bias, sinks)

    want = jax.jit(gradients)(Q, BIAS, SINKS)
    kernels()
    q, sinks = put(Q, P("d", None, "m")), put(SINKS, P("m"))
    agree(jax.jit(gradients)(q, put(BIAS, P()), sinks), want)
    assert set(collectives(gradients, q, put(BIAS, P()), sinks)) <= {"all-reduce"}


def test_lengths_that_are_cut_are_gathered(stand_ins: Any) -> None:
    agree(jax.jit(forward)(put(Q, P(None, "m")), put(K, P("d")), V, CT, LENGTHS), expected("forward"))


def test_vmap_of_a_sharded_axis(stand_ins: Any) -> None:
    qs = jnp.stack([Q] * 4)
    mapped = jax.vmap(lambda q: attention(q, K, V, LENGTHS))
    assert collectives(mapped, put(qs, P("d"))) == {}
    agree(jax.jit(mapped)(put(qs, P("d")))[2], expected("forward"))


MAPPED = {
    "queries": ((0, None, None), (P("d", None, None, "m"), P(), P())),
    "keys": ((None, 0, 0), (P("d", None, "m"), P(None, "d", None, "m"), P(None, "d", None, "m"))),
    "values": ((None, None, 0), (P(None, None, "m"), P(None, None, "m"), P("d", None, None, "m"))),
}


@pytest.mark.parametrize(
    "mapped, kind, kernels",
    [
        ("queries", AxisType.Auto, "stand-in"),
        ("queries", AxisType.Explicit, "reference"),
        ("keys", AxisType.Explicit, "stand-in"),
        ("values", AxisType.Auto, "reference"),
    ],
    indirect=["kernels"],
)
def test_cotangents_that_are_not_mapped(mapped: str, kind: AxisType, kernels: Any) -> None:
    axes, specs = MAPPED[mapped]

    def gradients(*operands: jax.Array) -> Any:
        call = lambda *a: jaxsoftmax.flash_attention(*a, is_causal=True, return_residual=True)
        losses = (lambda *a: sum(x.sum() for x in call(*a))), (lambda *a: call(*a)[1].sum())
        return [jax.grad(loss, (0, 1, 2))(*operands) for loss in losses]

    operands = [x if d is None else jnp.stack([x, -x, 2 * x, 0.5 * x]) for x, d in zip((Q, K, V), axes, strict=True)]
    each = [
        jax.jit(gradients)(*(x if d is None else x[i] for x, d in zip(operands, axes, strict=True))) for i in range(4)
    ]
    want = jax.tree.map(lambda *xs: np.stack(xs), *each)
    kernels()
    on = mesh(kind)
    with jax.set_mesh(on):
        placed = [put(x, spec, on) for x, spec in zip(operands, specs, strict=True)]
        agree(jax.jit(jax.vmap(gradients, axes))(*placed), want)


@pytest.mark.parametrize("mode", MODES)
def test_shard_map_with_checks(mode: str, kernels: Any) -> None:
    want = expected(mode)
    kernels()
    spec = P("d", None, "m")
    results = jax.tree.map(lambda _: spec, want)
    inside = jax.shard_map(MODES[mode], mesh=mesh(), in_specs=(*[spec] * 4, P("d")), out_specs=results)
    agree(jax.jit(inside)(*ARRAYS, LENGTHS), want)


@pytest.mark.parametrize("many", [False, True], ids=["one tile", "many tiles"])
def test_shard_map_mixes_varying_and_replicated(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    if many:
        monkeypatch.setattr("pallas_kernels.attention.tiles.CHUNK", 2)
    k, v = K[:1], V[:1]

    def total(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        copies = (jnp.broadcast_to(x, (*q.shape[:1], *x.shape[1:])) for x in (k, v))
        return jnp.sin(jaxsoftmax.flash_attention(q, *copies, sinks=sinks, is_causal=True)).sum()

    mapped = jax.shard_map(
        lambda *a: jax.lax.psum(total(*a), "d"),
        mesh=mesh(shape=(8,), names=("d",)),
        in_specs=(P("d"), P(), P(), P()),
        out_specs=P(),
    )
    operands = Q, k, v, SINKS
    derivatives = lambda f: jax.jit(lambda *a: jax.jvp(jax.grad(f, (0, 1, 2, 3)), a, a))(*operands)
    jax.clear_caches()
    agree(derivatives(mapped), derivatives(total))
    jax.clear_caches()


EXPLICIT = [P("d", None, None, None), P("d", None, "m", None), P(None, None, "m", None)]


@pytest.mark.parametrize("mode, spec, kernels", pairwise([*MODES], EXPLICIT, KERNELS), indirect=["kernels"], ids=str)
def test_explicit_meshes(mode: str, spec: P, kernels: Any) -> None:
    kernels()
    with jax.set_mesh(mesh(AxisType.Explicit)):
        operands = *(jax.device_put(x, spec) for x in ARRAYS), jax.device_put(LENGTHS, P(spec[0]))
        compiled = jax.jit(MODES[mode]).lower(*operands).compile()
        got = compiled(*operands)
        assert all(jax.typeof(x).sharding.spec == spec for x in jax.tree.leaves(got))
        agree(got, expected(mode))
        assert count(compiled) == {}


@pytest.mark.parametrize("spec", [P("d"), P("d", "m")], ids=str)
def test_wide_segment_ids_cut_over_explicit_meshes(spec: P) -> None:
    ids = 2**32 * np.sort(RNG.integers(0, 3, (8, 6)), -1)
    call = jax.jit(lambda q, k, ids: jaxsoftmax.flash_attention(q, k, k, query_segment_ids=ids))
    k = Q[:, :, :2]
    want = call(Q, k, (ids >> 32).astype(np.int32))
    on = mesh(AxisType.Explicit)
    with jax.enable_x64(True), jax.set_mesh(on):
        agree(call(put(Q, P("d"), on), put(k, P(), on), put(jnp.asarray(ids), spec, on)), want)


def test_partly_manual_regions(stand_ins: Any) -> None:
    mapped = jax.shard_map(attention, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    agree(jax.jit(mapped)(*(put(x, P("d", None, "m")) for x in ARRAYS[:3]), LENGTHS), expected("forward"))


def test_two_meshes_and_uneven_batches(stand_ins: Any) -> None:
    other = mesh(shape=(8,), names=("z",))
    both = lambda q, p: forward(q, K, V, CT, LENGTHS) + forward(p, K, V, CT, LENGTHS)
    agree(jax.jit(both)(put(Q, P("d")), put(Q, P("z"), other)), 2 * expected("forward"))


UNLIKE: dict[str, dict[str, P]] = {
    "the keys alone": {"key": P("d"), "value": P("m"), "sinks": P("d")},
    "all but bias and sinks": {"query": P("d", None, "m"), "key": P("d", None, "m"), "value": P("d", None, "m")},
    "more finely than key heads": {"query": P(None, None, "d")},
    "lengths": {"query": P("d", "m"), "bias": P("d", None, "m")},
    "heads of queries and sinks": {"query": P("d", None, "m"), "key": P("d"), "value": P("d"), "sinks": P("m")},
}


DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}


@pytest.mark.parametrize(
    "name, kernels, rules",
    [
        *((name, kernels, {"is_causal": True}) for name in UNLIKE for kernels in KERNELS),
        ("more finely than key heads", "reference", DROPOUT),
    ],
    indirect=["kernels"],
    ids=lambda x: x if isinstance(x, str) else "dropout" if x is DROPOUT else "",
)
def test_explicit_operands_cut_unlike_each_other(name: str, kernels: Any, rules: dict[str, Any]) -> None:
    """A gradient has its operand's type, whatever the call is cut like; so has the gradient's tangent."""
    operands = {"query": Q, "key": K, "value": V, "bias": normal(8, 4, 6, 5), "sinks": SINKS}
    gradient = jax.grad(lambda operands: jnp.sin(jaxsoftmax.flash_attention(**operands, **rules)).sum())
    derivatives = lambda operands: jax.jvp(gradient, (operands,), (operands,))
    want = jax.jit(derivatives)(operands)
    record = kernels()
    if record:  # second derivatives are no kernel's
        derivatives, want = (lambda operands: (gradient(operands),)), want[:1]
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed = {n: jax.device_put(x, UNLIKE[name].get(n, P())) for n, x in operands.items()}
        types = {n: jax.typeof(x).sharding for n, x in placed.items()}
        got = jax.jit(derivatives)(placed)
        assert [{n: jax.typeof(x).sharding for n, x in found.items()} for found in got] == [types] * len(got)
        agree(got, want)
    assert record is None or record.problems
