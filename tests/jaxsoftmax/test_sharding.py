"""Sharded operands: values, types and, on the compiled program, how little the devices say to each other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from pallas_kernels.softmax.problem import Op
from tests.jaxsoftmax import labelled
from tests.jaxsoftmax.sharded import collectives, count, mesh, put
from tests.pairwise import pairwise

SHAPE = (8, 4, 16)
X = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32)
CT = jnp.asarray(np.random.default_rng(1).normal(size=SHAPE), jnp.float32)
MASK = jnp.asarray(np.random.default_rng(2).random(SHAPE) < 0.7).at[..., 3].set(True)

OPS = {
    "softmax": (jaxsoftmax.softmax, jax.nn.softmax),
    "log_softmax": (jaxsoftmax.log_softmax, jax.nn.log_softmax),
    "logsumexp": (functools.partial(jaxsoftmax.logsumexp, axis=-1), functools.partial(jax.nn.logsumexp, axis=-1)),
    "cross_entropy": (
        labelled.constant(jaxsoftmax.softmax_cross_entropy_with_integer_labels),
        labelled.constant(optax.softmax_cross_entropy_with_integer_labels),
    ),
}
ROWS = [P("d"), P("d", "m"), P(None, "m"), P(("d", "m")), P(None, "d")]
COLUMNS = [P(None, None, "d"), P(None, None, ("d", "m")), P("d", None, "m")]

KERNELS = ["reference", "stand-in"]

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def forward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda x, ct, **kw: function(x, **kw)


def pulled_back(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    def gradient(x: jax.Array, ct: jax.Array, **kw: Any) -> jax.Array:
        y, vjp = jax.vjp(functools.partial(function, **kw), x)
        return vjp(ct if y.shape == ct.shape else jnp.full_like(y, 0.5))[0]

    return gradient


def pushed_forward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda x, ct, **kw: jax.jvp(functools.partial(function, **kw), (x,), (ct,))[1]


MODES = {"forward": forward, "vjp": pulled_back, "jvp": pushed_forward}


@functools.cache
def expected(op: str, mode: str) -> np.ndarray:
    """What `jax.nn` gives on one device."""
    return np.asarray(jax.jit(MODES[mode](OPS[op][1]))(X, CT))


def agree(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec, op, mode", pairwise(ROWS, [*OPS], [*MODES]), ids=str)
def test_rows_need_no_exchange(stand_ins: Any, spec: P, op: str, mode: str) -> None:
    operands = put(X, spec), put(CT, spec)
    compiled = jax.jit(MODES[mode](OPS[op][0])).lower(*operands).compile()
    assert count(compiled) == {}
    out = compiled(*operands)
    agree(out, expected(op, mode))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh(), P(*spec[: out.ndim])), out.ndim)
    shard = np.prod(NamedSharding(mesh(), spec).shard_shape(SHAPE)[:-1])
    assert (shard, SHAPE[-1], 1) in {p for o in Op for p in stand_ins.ran(o)}


@pytest.mark.parametrize(
    "op, mode, spec",
    [
        *pairwise(["softmax", "log_softmax", "cross_entropy"], ["forward", "vjp"], COLUMNS),
        ("logsumexp", "forward", COLUMNS[0]),
        ("log_softmax", "jvp", COLUMNS[2]),
    ],
    ids=str,
)
def test_cut_rows_need_one_exchange(stand_ins: Any, op: str, mode: str, spec: P) -> None:
    operands = put(X, spec), put(CT, spec)
    compiled = jax.jit(MODES[mode](OPS[op][0])).lower(*operands).compile()
    # The gradient of softmax is a forward and a backward pass; log_softmax's output is not needed for its own.
    assert count(compiled) == {"all-reduce": 2 if (op, mode) == ("softmax", "vjp") else 1}
    out = compiled(*operands)
    agree(out, expected(op, mode))
    assert out.ndim < 3 or out.sharding.is_equivalent_to(operands[0].sharding, 3)
    assert not [p for p in stand_ins.ran(Op.SOFTMAX) if p[1] < SHAPE[-1]], "a part of a row is not a row"


@pytest.mark.parametrize("op, mode, spec", pairwise([*OPS], ["forward", "vjp"], [ROWS[1], COLUMNS[2]]), ids=str)
def test_masks_and_shifted_holes(stand_ins: Any, op: str, mode: str, spec: P) -> None:
    # Of a cross entropy, optax loses the digits that the offset has.
    offset = 64.0 if op == "cross_entropy" else 1e4
    x = X.at[0, 0].set(-jnp.inf).at[0, 0, 5].set(1.0).at[1].add(offset)
    ours, theirs = (MODES[mode](f) for f in OPS[op])
    for mask in (MASK, MASK[:1, :1]):
        got = jax.jit(ours)(put(x, spec), put(CT, spec), where=put(mask, spec if mask.shape == SHAPE else P()))
        want = jax.jit(theirs)(x, CT, where=mask)
        finite = np.isfinite(np.asarray(want))
        np.testing.assert_array_equal(np.asarray(got)[~finite], np.asarray(want)[~finite])
        agree(np.asarray(got)[finite], np.asarray(want)[finite])


@pytest.mark.parametrize("op", OPS)
def test_xla_partitions_the_reference_as_well(op: str, kernels: Any) -> None:
    kernels()
    ours = functools.partial(OPS[op][0], implementation="xla")
    assert collectives(ours, put(X, P("d", "m"))) == {}
    assert set(collectives(ours, put(X, P(None, None, "d")))) == {"all-reduce"}
    agree(jax.jit(ours)(put(X, P(None, None, "d"))), OPS[op][1](X))


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_cut_rows_far_from_zero(op: str) -> None:
    """What a device knows of the others is the maximum of logits that are scaled, and rounded."""
    ours, theirs = OPS[op]
    x = jnp.full((2, 1, 64), -1e10)
    got = jax.jit(functools.partial(ours, scale=0.3))(put(x, P(None, None, "d")))
    np.testing.assert_allclose(got, theirs(0 * x), rtol=1e-6)


@pytest.mark.parametrize(
    "axis, spec, counts", [(0, P("d"), 1), (0, P(None, None, "m"), 0), ((0, 2), P("d", None, "m"), 1)]
)
def test_other_axes(stand_ins: Any, axis: Any, spec: P, counts: int) -> None:
    ours = functools.partial(jaxsoftmax.softmax, axis=axis)
    assert collectives(ours, put(X, spec)) == ({"all-reduce": 1} if counts else {})
    agree(jax.jit(ours)(put(X, spec)), jax.nn.softmax(X, axis))


def test_vmap_of_a_sharded_axis(stand_ins: Any) -> None:
    ours = jax.vmap(jaxsoftmax.softmax, 1, 1)
    assert collectives(ours, put(X, P(None, "m"))) == {}
    tangents = jnp.stack([CT] * 8)
    pushed = lambda x, ts: jax.vmap(lambda t: jax.jvp(jaxsoftmax.softmax, (x,), (t,))[1])(ts)
    assert collectives(pushed, X, put(tangents, P(("d", "m")))) == {}
    agree(jax.jit(pushed)(X, put(tangents, P(("d", "m"))))[3], jax.jvp(jax.nn.softmax, (X,), (CT,))[1])


def test_two_meshes_and_uneven_rows(stand_ins: Any) -> None:
    other = mesh(shape=(8,), names=("z",))
    both = lambda x, y: jaxsoftmax.softmax(x) + jaxsoftmax.softmax(y)
    agree(jax.jit(both)(put(X, P("d")), put(X, P("z"), other)), 2 * jax.nn.softmax(X))
    constrained = lambda x: jaxsoftmax.softmax(jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P("d"))))
    agree(jax.jit(constrained)(X[:6]), jax.nn.softmax(X[:6]))


@pytest.mark.parametrize("op", [*OPS, "smoothed", "softly capped"])
def test_columns_that_do_not_divide(stand_ins: Any, op: str) -> None:
    # All logits are far below 0: what fills the last device's columns up would be the largest.
    options = {"smoothed": {"label_smoothing": 0.2, "z_loss": 0.01}, "softly capped": {"logits_soft_cap": 30.0}}
    ours, theirs = OPS[op if op in OPS else "cross_entropy"]
    if op in options:
        ours, theirs = (
            functools.partial(OPS["cross_entropy"][0], **options[op], implementation=i) for i in (None, "xla")
        )
    x, ct = X[..., :13] - 20, CT[..., :13]
    cut = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(None, None, ("d", "m"))))
    got = jax.jit(lambda x, ct: [mode(ours)(cut(x), cut(ct)) for mode in MODES.values()])(x, ct)
    want = jax.jit(lambda x, ct: [mode(theirs)(x, ct) for mode in MODES.values()])(x, ct)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_labels_over_axes_that_do_not_divide(stand_ins: Any) -> None:
    x, labels = X[:, :3, :13].reshape(8, 3, 13) - 20, jnp.asarray([0, 12, 13, 25, 26, 38, 5, 30])
    call = functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, axis=(1, 2))
    cut = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(None, "m", "d")))
    got = jax.jit(jax.grad(lambda x: call(cut(x), labels).sum()))(x)
    want = jax.grad(lambda x: call(x, labels, implementation="xla").sum())(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_one_device_calls_the_kernel_directly(stand_ins: Any) -> None:
    text = jax.jit(jaxsoftmax.softmax).lower(X).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert stand_ins.ran(Op.SOFTMAX) == {(32, 16, 1)}


@pytest.mark.parametrize("op, mode, kernels", pairwise([*OPS], [*MODES], KERNELS), indirect=["kernels"], ids=str)
def test_shard_map_with_checks(op: str, mode: str, kernels: Any) -> None:
    kernels()
    ours = OPS[op][0]
    spec = P("d", "m")
    mapped = lambda f: jax.shard_map(f, mesh=mesh(), in_specs=spec, out_specs=spec)
    agree(jax.jit(MODES[mode](mapped(ours)))(X, CT), expected(op, mode))
    inside = jax.shard_map(MODES[mode](ours), mesh=mesh(), in_specs=(spec, spec), out_specs=spec)
    agree(jax.jit(inside)(X, CT), expected(op, mode))


@pytest.mark.parametrize("op", OPS)
def test_shard_map_mixes_varying_and_replicated(op: str) -> None:
    ours, theirs = OPS[op]
    row, masks = X[0], MASK

    def total(f: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = f(jnp.broadcast_to(x, mask.shape), where=mask)
        return jnp.sin(jnp.where(jnp.isfinite(y), y, 0.0)).sum()

    def replicated(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.lax.psum(total(lambda z, where: ours(x, where=where[0]), x, mask), "d")

    mapped = jax.shard_map(replicated, mesh=mesh(shape=(8,), names=("d",)), in_specs=(P(), P("d")), out_specs=P())
    agree(jax.jit(jax.grad(mapped))(row, masks), jax.grad(lambda x: total(theirs, x, masks))(row))
    pieces = jax.shard_map(
        lambda y, t: jax.jvp(ours, (y,), (jax.lax.pcast(t, "d", to="varying"),))[1],
        mesh=mesh(shape=(8,), names=("d",)),
        in_specs=(P("d"), P()),
        out_specs=P("d"),
    )
    agree(jax.jit(pieces)(X, CT[:1]), jax.jvp(theirs, (X,), (jnp.broadcast_to(CT[:1], SHAPE),))[1])


@pytest.mark.parametrize("spec", [P("d", "m", None), P(None, None, None)], ids=str)
def test_partly_manual_regions_keep_rows_local(stand_ins: Any, spec: P) -> None:
    mapped = jax.shard_map(jaxsoftmax.softmax, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    assert collectives(mapped, put(X, P("d", "m"))) == {}
    agree(jax.jit(mapped)(put(X, spec)), jax.nn.softmax(X))
    agree(jax.jit(mapped)(put(X, P("d", None, "m"))), jax.nn.softmax(X))


EXPLICIT = [P("d", None, None), P("d", "m", None), P("d", None, "m")]


@pytest.mark.parametrize(
    "op, spec, kernels, mode", pairwise([*OPS], EXPLICIT, KERNELS, [*MODES]), indirect=["kernels"], ids=str
)
def test_explicit_meshes(op: str, mode: str, spec: P, kernels: Any) -> None:
    ours, want, record = MODES[mode](OPS[op][0]), expected(op, mode), kernels()
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, ct = jax.device_put(X, spec), jax.device_put(CT, spec)
        if op in ("logsumexp", "cross_entropy") and mode == "vjp":
            ct = jax.reshard(CT[..., 0], P(*spec[:2]))[..., None]
        out = jax.jit(ours)(x, ct)
        assert jax.typeof(out).sharding.spec == P(*spec[: out.ndim])
        agree(out, want)
        if record and op != "logsumexp":
            counts = collectives(ours, x, ct)
            # Cross entropy's tangent is a sum over the gradient's part.
            exchanges = 2 if (op == "softmax" and mode != "forward") or (op, mode) == ("cross_entropy", "jvp") else 1
            assert counts == ({} if spec[2] is None else {"all-reduce": exchanges})


def test_explicit_meshes_and_masks(kernels: Any) -> None:
    kernels()
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(X, P("d", None, None))
        for mask in (jax.device_put(MASK, P("d", None, None)), jax.device_put(MASK[0, 0], P(None))):
            out = jax.jit(lambda x, m: jaxsoftmax.softmax(x, where=m))(x, mask)
            agree(out, jax.nn.softmax(X, where=np.asarray(mask)))
        mapped = jax.jit(jax.vmap(jaxsoftmax.softmax))(x)
        assert jax.typeof(mapped).sharding.spec == P("d", None, None)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
def test_explicit_meshes_and_masks_cut_otherwise(op: str, kernels: Any) -> None:
    def both(f: Callable[..., jax.Array], x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda x: jnp.tanh(f(x, where=mask)).max())(x)

    ours, theirs = (functools.partial(both, f) for f in OPS[op])
    want = theirs(X, MASK)
    kernels()
    with jax.set_mesh(mesh(AxisType.Explicit)):
        for x, mask in ((P("d", None, None), P(None, None, None)), (P(None, None, None), P("d", None, None))):
            got = jax.jit(ours)(jax.device_put(X, x), jax.device_put(MASK, mask))
            jax.tree.map(agree, got, want)
            assert jax.typeof(got[1]).sharding.spec == x


def test_ambient_auto_mesh_and_given_shardings(stand_ins: Any) -> None:
    sharding = NamedSharding(mesh(), P("d"))
    with jax.set_mesh(mesh()):
        assert collectives(jaxsoftmax.softmax, put(X, P("d", None, "m"))) == {"all-reduce": 1}
    lowered = jax.jit(jaxsoftmax.softmax, in_shardings=sharding, out_shardings=sharding, donate_argnums=0).lower(X)
    assert "all-gather" not in lowered.compile().as_text()
