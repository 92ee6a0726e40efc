"""Sharded operands: values, types and, on the compiled program, how little the devices say to each other."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from pallas_kernels.attention.problem import Op as AttentionOp
from pallas_kernels.softmax.problem import Op
from tests.jaxsoftmax.calls import CALLS, CT, MASK, MORE, MORE_CALLS, QKV, Operands, X, attention, cross_entropy
from tests.jaxsoftmax.sharded import COLLECTIVES, collectives, count, exchanges, gathers_only_numbers, mesh, put

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

ALL = CALLS | MORE_CALLS


def derivatives(name: str, operands: Operands, second: bool = True) -> dict[str, Any]:
    """Results and gradients, and the tangents of both."""
    moving = {n: x for n, x in operands.items() if x.dtype == jnp.float32}
    call = lambda moving: ALL[name][0](**{n: (operands | moving)[n] for n in ALL[name][1]})
    finite = lambda y: jnp.sin(jnp.where(jnp.isfinite(y), y, 0.0)).sum()
    gradient = jax.grad(lambda moving: sum(finite(y) for y in jax.tree.leaves(call(moving))))
    if not second:
        return {"out": call(moving), "gradient": gradient(moving)}
    out, tangent = jax.jvp(call, (moving,), (moving,))
    first, second = jax.jvp(gradient, (moving,), (moving,))
    return {"out": out, "tangent": tangent, "gradient": first, "hvp": second}


@functools.cache
def expected(name: str) -> Any:
    """What one device gives."""
    return jax.tree.map(np.asarray, jax.jit(functools.partial(derivatives, name))(ALL[name][1]))


def agree(got: Any, want: Any) -> None:
    def alike(a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        size = np.abs(b[np.isfinite(b)]).max(initial=1.0)
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * size)

    jax.tree.map(alike, got, want)


def placed(operands: Operands, specs: dict[str, P], on: Mesh) -> Operands:
    """Those operands that have a spec, placed so."""
    return {n: put(x, specs[n], on) if n in specs else x for n, x in operands.items()}


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
D, DM, BOTH, HEADS, COLUMNS = P("d"), P("d", "m"), P(("d", "m")), P("d", None, "m"), P("d", None, "m")
ALL_COLUMNS = P(None, None, ("d", "m"))
NOTHING, SUMS, NUMBERS, ANY = set(), {"all-reduce"}, {"all-gather", "all-reduce"}, set(COLLECTIVES)
REFERENCE, STAND_IN, STATISTICS = "reference", "stand-in", "stand-in statistics"
CASES: list[tuple[str, AxisType, str, set[str], dict[str, P]]] = [
    ("softmax", AUTO, STAND_IN, NOTHING, {"x": P(None, "m")}),
    ("softmax", AUTO, REFERENCE, SUMS, {"x": ALL_COLUMNS}),
    ("softmax", EXPLICIT, STAND_IN, NUMBERS, {"x": COLUMNS, "where": D}),
    ("softmax", EXPLICIT, STAND_IN, NOTHING, {"x": D, "where": D}),
    ("softmax", EXPLICIT, REFERENCE, NOTHING, {"where": D}),
    ("softmax", EXPLICIT, STAND_IN, ANY, {"x": P(), "where": D}),
    ("log_softmax", EXPLICIT, STAND_IN, NUMBERS, {"x": P(None, None, "d")}),
    ("log_softmax", AUTO, STATISTICS, NOTHING, {"x": DM}),
    ("log_softmax", AUTO, STATISTICS, NUMBERS, {"x": COLUMNS}),
    ("log_softmax", EXPLICIT, STATISTICS, NUMBERS, {"x": COLUMNS}),
    ("logsumexp", EXPLICIT, STAND_IN, NUMBERS, {"a": P("m", None, "d"), "where": P("m")}),
    ("cross_entropy", AUTO, STAND_IN, NOTHING, {"logits": BOTH, "labels": BOTH, "where": BOTH}),
    ("cross_entropy", AUTO, REFERENCE, SUMS, {"logits": ALL_COLUMNS}),
    ("cross_entropy", EXPLICIT, STAND_IN, NOTHING, {"logits": DM, "labels": DM, "where": D}),
    ("cross_entropy", EXPLICIT, REFERENCE, ANY, {"logits": P(None, None, "m"), "labels": D, "where": D}),
    ("cross_entropy", EXPLICIT, STAND_IN, ANY, {"logits": DM}),
    ("loss", AUTO, STAND_IN, NUMBERS, {"logits": ALL_COLUMNS}),
    # Outside of a context XLA gathers what the labels of rows without a mask pick; inside, nothing.
    ("loss", EXPLICIT, STAND_IN, ANY, {"logits": DM, "labels": DM}),
    ("masked loss", EXPLICIT, STAND_IN, NUMBERS, {"logits": COLUMNS, "labels": D, "where": D}),
    ("weighted", AUTO, STAND_IN, NUMBERS, {"logits": ALL_COLUMNS}),
    ("weighted", EXPLICIT, REFERENCE, NOTHING, {"logits": D, "labels": D, "weights": D}),
    ("weighted", EXPLICIT, STAND_IN, ANY, {"labels": D}),  # the compiler may cut and gather logits that lie on no mesh
    ("weighted", EXPLICIT, STAND_IN, NUMBERS, {"logits": COLUMNS, "labels": D, "weights": D}),
    ("probabilities", AUTO, STAND_IN, NUMBERS, {"logits": P(None, None, "d"), "labels": P(None, None, "d")}),
    ("probabilities", EXPLICIT, STAND_IN, NOTHING, {"logits": DM, "labels": DM}),
    # Second derivatives gather a chunk's tokens where the axes are automatic.
    ("linear", AUTO, STAND_IN, ANY, {"hidden": D, "labels": D, "weight": P(None, "m"), "bias": P("m")}),
    ("linear", EXPLICIT, REFERENCE, ANY, {"hidden": DM, "labels": DM, "where": D}),
    ("linear", EXPLICIT, STAND_IN, ANY, {"hidden": D, "labels": D, "where": D, "weight": P("d", "m"), "bias": P("m")}),
    ("weighted linear", AUTO, STAND_IN, ANY, dict.fromkeys(("hidden", "labels", "weights", "scale"), D)),
    ("weighted linear", EXPLICIT, STAND_IN, ANY, {"hidden": D, "labels": D, "weights": D, "weight": P("m", "d")}),
    ("top_k", EXPLICIT, STAND_IN, NOTHING, {"logits": DM}),
    ("top_k", EXPLICIT, STAND_IN, NUMBERS, {"logits": COLUMNS}),
    ("attention", AUTO, STAND_IN, NOTHING, {"query": HEADS, "key": HEADS, "value": HEADS}),
    ("attention", EXPLICIT, STAND_IN, NOTHING, dict.fromkeys(QKV, P(None, None, "m"))),
    ("attention", EXPLICIT, STAND_IN, NOTHING, {"query": D}),
    ("attention", EXPLICIT, REFERENCE, NOTHING, {"key": D}),
    ("attention", EXPLICIT, STAND_IN, ANY, {"query": P(None, None, "d"), "key": P(), "value": P()}),
    ("attention", EXPLICIT, STAND_IN, ANY, {"query": P(None, "m"), "key": P(None, "m"), "value": P()}),
    # Each device aligns its own sequences.
    ("from the end", AUTO, STAND_IN, NOTHING, dict.fromkeys(MORE_CALLS["from the end"][1], D)),
    ("more attention", AUTO, STAND_IN, SUMS, {"query": D, "key": D, "value": D, "key_value_seq_lengths": D}),
    ("more attention", EXPLICIT, STAND_IN, SUMS, dict.fromkeys(QKV, HEADS) | {"key_value_seq_lengths": D}),
    ("more attention", EXPLICIT, STAND_IN, ANY, {"query": P(), "key": D, "value": P("m"), "sinks": D}),
    ("more attention", EXPLICIT, REFERENCE, ANY, {"query": DM, "key": P(), "value": P(), "bias": P("d", None, "m")}),
    ("more attention", EXPLICIT, REFERENCE, ANY, {"query": HEADS, "key": D, "value": D, "sinks": P("m")}),
    ("more attention", EXPLICIT, STAND_IN, ANY, dict.fromkeys(QKV, P("d", "m")) | {"bias": P(None, None, "m")}),
    ("dropout", EXPLICIT, REFERENCE, ANY, {"query": P(None, None, "d"), "key": P(), "value": P()}),
]


# In a context the types are compared for each case; the values, there and without `jit`, for one of each call. Tangents
# are of such a one, too, and of every case that says what may be exchanged: they are of the gradient's own primitives.
_FIRST_EXPLICIT, _FIRST_AUTO = (
    {name: specs for name, kind, _, _, specs in reversed(CASES) if kind is of} for of in (EXPLICIT, AUTO)
)


def name_of(part: Any) -> str:
    if isinstance(part, dict):
        return ",".join(f"{n}={tuple(s)}" for n, s in part.items())
    return "" if isinstance(part, set) else str(part)


@pytest.mark.parametrize("name, kind, kernels, may, specs", CASES, indirect=["kernels"], ids=name_of)
def test_derivatives(name: str, kind: AxisType, kernels: Any, may: set[str], specs: dict[str, P]) -> None:
    """Of explicit axes no context has to know; a gradient has its operand's type, whatever the call is cut like."""
    want, operands, on = expected(name), ALL[name][1], mesh(kind)
    record = kernels()
    second = may is not ANY or specs in (_FIRST_EXPLICIT.get(name), _FIRST_AUTO.get(name))
    cut, function = placed(operands, specs, on), functools.partial(derivatives, name, second=second)
    want = {part: x for part, x in want.items() if second or part in ("out", "gradient")}
    compiled = jax.jit(function).lower(cut).compile()
    got = compiled(cut)
    agree(got, want)
    assert set(count(compiled)) <= may
    assert may is ANY or gathers_only_numbers(compiled)
    assert not (record and record.of_statistics) or {p.op for p in record.problems} == {Op.STATS}
    if kind is AUTO:
        alike = [(got["gradient"][n], cut[n]) for n in specs if n in got["gradient"] and may == NOTHING]
        assert all(x.sharding.is_equivalent_to(y.sharding, y.ndim) for x, y in alike)
        return
    first = specs is _FIRST_EXPLICIT[name]
    if first:
        agree(ALL[name][0](**cut), want["out"])
    types = jax.eval_shape(function, cut)
    with jax.set_mesh(on):
        within = placed(operands, dict.fromkeys(operands, P()) | specs, on)
        if first:
            agree(jax.jit(lambda operands: function(operands)["gradient"])(within), want["gradient"])
        ambient = jax.eval_shape(function, within)
    for part in ("gradient", "hvp")[: 1 + second]:
        # The gradient of what no mesh has is cut as it comes, and not gathered.
        types[part], ambient[part] = ({n: x for n, x in y[part].items() if n in specs} for y in (types, ambient))
        assert {n: x.sharding for n, x in types[part].items()} == {n: jax.typeof(cut[n]).sharding for n in types[part]}
    assert jax.tree.map(lambda x: x.sharding, types) == jax.tree.map(lambda x: x.sharding, ambient)


def pulled_back(call: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    y, pull = jax.vjp(call, x)
    return pull(jnp.cos(x) if y.shape == x.shape else jnp.full_like(y, 0.5))[0]


MODES: dict[str, Callable[..., Any]] = {
    "forward": lambda call, x: call(x),
    "vjp": pulled_back,
    "jvp": lambda call, x: jax.jvp(call, (x,), (jnp.cos(x),))[1],
}
ROWS: dict[str, Callable[..., jax.Array]] = {
    "softmax": jaxsoftmax.softmax,
    "log_softmax": jaxsoftmax.log_softmax,
    "logsumexp": functools.partial(jaxsoftmax.logsumexp, axis=-1),
    "cross_entropy": lambda x, **kw: cross_entropy(x, jnp.full_like(x.max(-1), 5, dtype=jnp.int32), **kw),
}
top_k = lambda x: jaxsoftmax.top_k_softmax(x, 3)[0]
OPTIONS: dict[str, Callable[..., jax.Array]] = {
    "smoothed": functools.partial(ROWS["cross_entropy"], label_smoothing=0.2, z_loss=0.01),
    "weighted": functools.partial(ROWS["cross_entropy"], weights=0.5),
}


@pytest.mark.parametrize(
    "name, mode, numbers",
    [
        ("softmax", "forward", [2]),
        ("softmax", "vjp", [2, 1]),
        ("log_softmax", "vjp", [3]),
        ("log_softmax", "jvp", [3]),
        ("logsumexp", "forward", [2]),
        ("cross_entropy", "vjp", [3]),
        ("cross_entropy", "jvp", [3]),
        ("smoothed", "forward", [4]),
        ("weighted", "vjp", [3]),
    ],
)
def test_sharded_rows_exchange_numbers_and_whole_ones_nothing(
    stand_ins: Any, name: str, mode: str, numbers: list[int]
) -> None:
    """Each exchange is one all-gather of so many numbers a row."""
    function = functools.partial(MODES[mode], (ROWS | OPTIONS)[name])
    assert collectives(function, put(X, DM)) == {}
    assert {(p.rows, p.cols) for p in stand_ins.problems} >= {(4, 16)}
    stand_ins.problems.clear()
    # XLA itself adds up the product of a tangent and a gradient.
    sums = [[("all-reduce", "f32")]] if (name, mode) == ("cross_entropy", "jvp") else []

    def check(x: jax.Array, rows: int, devices: int) -> None:
        found = exchanges(jax.jit(function).lower(x).compile())
        assert [arrays for arrays in found if arrays[0].kind == "all-gather"] == [
            [("all-gather", "s32", devices * rows * count)] for count in numbers
        ]
        others = [[array[:2] for array in arrays] for arrays in found if arrays[0].kind != "all-gather"]
        assert others == sums

    check(put(X, COLUMNS), 8, 2)
    check(put(X, ALL_COLUMNS), 32, 8)
    assert not [p for p in stand_ins.ran(Op.SOFTMAX) if p[1] < 16], "a part of a row is not a row"
    with jax.set_mesh(mesh(EXPLICIT)):
        if name != "logsumexp":
            check(jax.device_put(X, COLUMNS), 8, 2)
        assert collectives(function, jax.device_put(X, P("d", "m", None))) == {}
    if mode == "forward":
        xla = functools.partial((ROWS | OPTIONS)[name], implementation="xla")
        assert collectives(xla, put(X, DM)) == {}
        assert set(collectives(xla, put(X, COLUMNS))) == {"all-reduce"}


def test_a_gather_of_logits_is_seen() -> None:
    gathers = jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, NamedSharding(mesh(), P("d"))))
    compiled = gathers.lower(put(X, COLUMNS)).compile()
    assert exchanges(compiled) == [[("all-gather", "f32", X.size // 4)]]
    assert not gathers_only_numbers(compiled)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_cut_rows_far_from_zero(op: str) -> None:
    """What a device knows of the others is the maximum of logits that are scaled, and rounded."""
    x = jnp.full((2, 1, 64), -1e10)
    got = jax.jit(functools.partial(ROWS[op], scale=0.3))(put(x, P(None, None, "d")))
    np.testing.assert_allclose(got, getattr(jax.nn, op)(0 * x), rtol=1e-6)


@jax.jit
def _of_special_rows(x: jax.Array) -> Any:
    labels, cotangents = jnp.ones(len(x), jnp.int32), jnp.arange(1.0, 1 + len(x))
    logsumexp = functools.partial(jaxsoftmax.logsumexp, axis=1)
    losses = functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, labels=labels)
    gradient = lambda of: jax.grad(lambda x: (of(x) * cotangents).sum())(x)
    linear = lambda row: jaxsoftmax.linear_cross_entropy(
        jnp.ones((1, 1)), row[None], labels[:1], return_lse=True, return_entropy=True
    )
    query, key = jnp.ones((len(x), 1, 1, 1)), jnp.zeros((len(x), x.shape[1], 1, 1))
    return {
        "logsumexp": (logsumexp(x), gradient(logsumexp), jax.jvp(logsumexp, [x], [jnp.ones_like(x)])[1]),
        "loss": (losses(x, return_lse=True), gradient(losses)),
        "more losses": (losses(x, label_smoothing=0.1, z_loss=0.1), jaxsoftmax.softmax_cross_entropy(x, 0 * x + 0.25)),
        "softmax": (jaxsoftmax.softmax(x), jaxsoftmax.log_softmax(x), jaxsoftmax.top_k_softmax(x, 2)[0]),
        "linear": jax.lax.map(linear, x),
        "attention": jaxsoftmax.flash_attention(query, key, key, bias=x[:, None, None], return_residual=True),
    }


@pytest.mark.parametrize("kernels", ["reference", "stand-in"], indirect=True)
def test_special_numbers_over_devices(kernels: Any) -> None:
    """+inf, -inf and NaN on one device, or on two."""
    x = np.full((16, 4), 0.5, np.float32)
    x[:, ::3] = list(itertools.product([np.inf, np.nan, -np.inf, 1.0], repeat=2))
    kernels()
    want = _of_special_rows(x)
    for kind in (AUTO, EXPLICIT):
        got = _of_special_rows(put(x, P(None, "m"), mesh(kind)))
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    "axis, spec, counts", [(0, P("d"), 1), (0, P(None, None, "m"), 0), ((0, 2), P("d", None, "m"), 1)]
)
def test_other_axes(stand_ins: Any, axis: Any, spec: P, counts: int) -> None:
    ours = functools.partial(jaxsoftmax.softmax, axis=axis)
    assert collectives(ours, put(X, spec)) == ({"all-gather": 1} if counts else {})
    agree(jax.jit(ours)(put(X, spec)), jax.nn.softmax(X, axis))


# `test_columns.py` has the values and gradients of the others.
COLUMNS_LEFT: dict[str, Callable[..., jax.Array]] = {
    "log_softmax": ROWS["log_softmax"],
    "over two axes": lambda x, **kw: cross_entropy(x[:, :3], 4 * jnp.arange(8), (1, 2), **kw),
}


@pytest.mark.parametrize("name", COLUMNS_LEFT)
def test_columns_that_do_not_divide(stand_ins: Any, name: str) -> None:
    # All logits are far below 0: what fills the last device's columns up would be the largest.
    x, cut = X[..., :13] - 20, NamedSharding(mesh(), P(None, "m", "d") if "axes" in name else ALL_COLUMNS)
    ours, xla = (functools.partial(COLUMNS_LEFT[name], implementation=i) for i in (None, "xla"))
    constrained = lambda x: ours(jax.lax.with_sharding_constraint(x, cut))
    got = jax.jit(lambda x: [mode(constrained, x) for mode in MODES.values()])(x)
    want = jax.jit(lambda x: [mode(xla, x) for mode in MODES.values()])(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_one_device_calls_the_kernel_directly(stand_ins: Any) -> None:
    assert "CustomSPMDPartitioning" not in jax.jit(jaxsoftmax.softmax).lower(X).as_text()
    assert stand_ins.ran(Op.SOFTMAX) == {(32, 16, 1)}


# Without dropout, of which each device draws its own random numbers.
MANUAL = [name for name in CALLS if name not in ("loss", "masked loss", "dropout")]


@pytest.mark.parametrize(
    "name, kernels", [(name, (STAND_IN, REFERENCE)[i % 2]) for i, name in enumerate(MANUAL)], indirect=["kernels"]
)
def test_shard_map_with_checks(name: str, kernels: Any) -> None:
    want, operands = expected(name), CALLS[name][1]
    kernels()
    call = functools.partial(derivatives, name)
    specs = {n: D if x.shape[0] == 8 else P() for n, x in operands.items()}
    of = {n: specs[n] for n in want["gradient"]}
    results = jax.tree.map(lambda _: D, want) | {"gradient": of, "hvp": of}
    agree(jax.jit(jax.shard_map(call, mesh=mesh(), in_specs=(specs,), out_specs=results))(operands), want)


def over_devices(function: Callable[..., Any], specs: Any, out: P) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=mesh(shape=(8,), names=("d",)), in_specs=specs, out_specs=out)


@pytest.mark.parametrize("name", ROWS)
def test_shard_map_mixes_varying_and_replicated(name: str) -> None:
    ours, row, masks = ROWS[name], X[0], jnp.broadcast_to(MASK, X.shape).at[..., 0].set(True)
    total = lambda x, mask: jnp.tanh(ours(jnp.broadcast_to(x, mask.shape), where=mask)).max(initial=0.0)
    replicated = lambda x, mask: jax.lax.psum(total(x, mask[0]), "d")
    mapped = over_devices(replicated, (P(), D), P())
    agree(jax.jit(jax.grad(mapped))(row, masks), jax.grad(lambda x: sum(total(x, m) for m in masks))(row))
    pushed = lambda y, t: jax.jvp(ours, (y,), (jax.lax.pcast(t, "d", to="varying"),))[1]
    want = jax.jvp(ours, (X,), (jnp.broadcast_to(CT[:1], X.shape),))[1]
    agree(jax.jit(over_devices(pushed, (D, P()), D))(X, CT[:1]), want)


@pytest.mark.parametrize("many", [False, True], ids=["one tile", "many tiles"])
def test_shard_map_mixes_varying_and_replicated_of_attention(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    if many:
        monkeypatch.setattr("pallas_kernels.attention.tiles.CHUNK", 2)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        copies = (jnp.broadcast_to(x, (*q.shape[:1], *x.shape[1:])) for x in (k, v))
        return jnp.sin(attention(q, *copies, sinks=sinks)).sum()

    mapped = over_devices(lambda *a: jax.lax.psum(total(*a), "d"), (D, P(), P(), P()), P())
    operands = QKV["query"], QKV["key"][:1], QKV["value"][:1], MORE["sinks"]
    derivatives = lambda f: jax.jit(lambda *a: jax.jvp(jax.grad(f, (0, 1, 2, 3)), a, a))(*operands)
    jax.clear_caches()
    agree(derivatives(mapped), derivatives(total))
    jax.clear_caches()


OTHERWISE: dict[str, tuple[Callable[..., Any], jax.Array]] = {
    "softmax": (jaxsoftmax.softmax, X),
    "top_k": (top_k, X),
    "attention": (lambda x: jaxsoftmax.flash_attention(x, x, x), QKV["query"]),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_ways_to_call(stand_ins: Any, name: str) -> None:
    """Mapped, in manual regions, with donated and constrained operands, and on several meshes."""
    call, x = OTHERWISE[name]
    pulled = lambda x: jax.vjp(call, x)[1](jnp.cos(call(x)))[0]
    want, gradient = jax.jit(lambda x: (call(x), pulled(x)))(x)
    cut = put(x, HEADS, mesh(EXPLICIT))
    agree(jax.jit(lambda x: (jax.vmap(call)(x), jax.vmap(pulled)(x), pulled(x)))(cut), (want, gradient, gradient))
    for kinds in ((EXPLICIT, AUTO), (AUTO, EXPLICIT)):
        of_two_kinds = jax.make_mesh((4, 2), ("d", "m"), kinds, devices=jax.devices("cpu")[:8])
        agree(jax.jit(pulled)(put(x, HEADS, of_two_kinds)), gradient)
    for kind in (AUTO, EXPLICIT):
        manual = jax.shard_map(call, mesh=mesh(kind), in_specs=D, out_specs=D, axis_names={"d"})
        agree(jax.jit(manual)(put(x, HEADS, mesh(kind))), want)
    assert collectives(jax.shard_map(call, mesh=mesh(), in_specs=D, out_specs=D, axis_names={"d"}), put(x, D)) == {}
    stacked = put(jnp.stack([x] * 4), D)
    mapped = jax.jit(jax.vmap(call)).lower(stacked).compile()
    assert count(mapped) == {}
    agree(mapped(stacked)[2], want)
    other = mesh(shape=(8,), names=("z",))
    agree(jax.jit(lambda x, y: call(x) + call(y))(put(x, D), put(x, P("z"), other)), 2 * want)
    constrained = lambda x: call(jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), D)))
    agree(jax.jit(constrained)(x[:6]), want[:6])
    given = NamedSharding(mesh(), D)
    donated = jax.jit(call, in_shardings=given, out_shardings=given, donate_argnums=(0,) if name == "softmax" else ())
    assert name == "top_k" or "all-gather" not in donated.lower(x).compile().as_text()


def test_vmap_of_sharded_tangents(stand_ins: Any) -> None:
    tangents = put(jnp.stack([CT] * 8), BOTH)
    pushed = lambda x, ts: jax.vmap(lambda t: jax.jvp(jaxsoftmax.softmax, (x,), (t,))[1])(ts)
    assert collectives(pushed, X, tangents) == {}
    agree(jax.jit(pushed)(X, tangents)[3], jax.jvp(jax.nn.softmax, (X,), (CT,))[1])


Q, K, V = QKV.values()


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_devices_that_share_a_key_head_read_the_right_one(stand_ins: Any, kind: AxisType) -> None:
    """Eight heads on four devices, of which two read each key head: as many as query heads read it, but no more."""
    q = jnp.concatenate([Q, 0.5 * Q[..., ::-1, :]], 2)
    both = jax.jit(lambda *qkv: jax.vjp(attention, *qkv)[1](jnp.sin(attention(*qkv))))
    stand_ins.accepts = lambda _: False
    want = both(q, K, V)
    stand_ins.accepts = lambda _: True
    jax.clear_caches()
    with jax.set_mesh(on := mesh(kind)):
        cut = put(q, P(None, None, "d"), on), put(K, P(), on), put(V, P(), on)
        agree(both(*cut), want)
    assert collectives(attention, *cut) == {}
    assert set(collectives(both, *cut)) == {"all-reduce"}
    assert {(p.query_heads, p.key_heads) for p in stand_ins.attended(AttentionOp.FORWARD)} >= {(2, 1)}


MAPPED = {
    "queries": ((0, None, None), (P("d", None, None, "m"), P(), P())),
    "keys": ((None, 0, 0), (P("d", None, "m"), P(None, "d", None, "m"), P(None, "d", None, "m"))),
    "values": ((None, None, 0), (P(None, None, "m"), P(None, None, "m"), P("d", None, None, "m"))),
}


@pytest.mark.parametrize(
    "mapped, kind, kernels",
    [
        ("queries", AUTO, STAND_IN),
        ("queries", EXPLICIT, REFERENCE),
        ("keys", EXPLICIT, STAND_IN),
        ("values", AUTO, REFERENCE),
    ],
    indirect=["kernels"],
)
def test_cotangents_that_are_not_mapped(mapped: str, kind: AxisType, kernels: Any) -> None:
    axes, specs = MAPPED[mapped]

    def gradients(*operands: jax.Array) -> Any:
        call = functools.partial(attention, return_residual=True)
        losses = (lambda *a: sum(x.sum() for x in call(*a))), (lambda *a: call(*a)[1].sum())
        return [jax.grad(loss, (0, 1, 2))(*operands) for loss in losses]

    operands = [x if d is None else jnp.stack([x, -x, 2 * x, 0.5 * x]) for x, d in zip((Q, K, V), axes, strict=True)]
    single, kept = jax.jit(gradients), list(zip(operands, axes, strict=True))
    each = [single(*(x if d is None else x[i] for x, d in kept)) for i in range(4)]
    want = jax.tree.map(lambda *xs: np.stack(xs), *each)
    kernels()
    with jax.set_mesh(on := mesh(kind)):
        cut = [put(x, spec, on) for x, spec in zip(operands, specs, strict=True)]
        agree(jax.jit(jax.vmap(gradients, axes))(*cut), want)


@pytest.mark.parametrize("spec", [D, DM], ids=str)
def test_wide_segment_ids_cut_over_explicit_meshes(spec: P) -> None:
    ids = 2**32 * np.sort(np.random.default_rng(0).integers(0, 3, (8, 6)), -1)
    call = jax.jit(lambda q, k, ids: jaxsoftmax.flash_attention(q, k, k, query_segment_ids=ids))
    want = call(Q, K, (ids >> 32).astype(np.int32))
    on = mesh(EXPLICIT)
    for context in (jax.set_mesh(on), contextlib.nullcontext()):
        with jax.enable_x64(True), context:
            agree(call(put(Q, D, on), put(K, P(), on), put(jnp.asarray(ids), spec, on)), want)


BY_BATCH, BY_LENGTH = P("d", None, "m"), P(None, "d", "m")
# Extents of batch, queries, keys, query heads and key heads, of which some are 1 over a mesh axis of extent 1.
OF_ONE = (
    ((1, 4, 4, 4, 2), BY_BATCH, (1, 2)),
    ((2, 1, 4, 4, 2), BY_LENGTH, (1, 2)),
    ((2, 4, 1, 4, 2), BY_LENGTH, (1, 2)),
    ((2, 4, 4, 1, 1), BY_BATCH, (2, 1)),
    ((2, 4, 4, 4, 1), BY_LENGTH, (2, 1)),
    ((1, 1, 4, 1, 1), BY_LENGTH, (1, 1)),
    ((2, 4, 4, 4, 2), BY_BATCH, (1, 1)),
)


def on_explicit(f: Any, operands: Any, specs: Any, shape: tuple[int, ...], names: tuple[str, ...] = ("d", "m")) -> None:
    """Values and gradients on a mesh of explicit axes are those without; gradients have their operands' types."""

    def total(moving: Any, rest: Any) -> Any:
        found = f(**moving, **rest)
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(found) if x.dtype == jnp.float32), found

    def compute(operands: Any) -> Any:
        moving = {n: x for n, x in operands.items() if x.dtype == jnp.float32}
        rest = {n: x for n, x in operands.items() if n not in moving}
        return jax.jit(jax.value_and_grad(total, has_aux=True))(moving, rest)

    want, on = compute(operands), mesh(EXPLICIT, shape, names)
    placed = {name: put(x, specs[name], on) for name, x in operands.items()}
    got = compute(placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)
    for name, x in got[1].items():
        assert jax.typeof(x) == jax.typeof(placed[name])


@pytest.mark.parametrize("extents, spec, shape", OF_ONE, ids=str)
@pytest.mark.parametrize("kernels", ["reference", "stand-in"], indirect=True)
def test_extents_of_1_of_attention(extents: Any, spec: P, shape: tuple[int, int], kernels: Any) -> None:
    kernels()
    (b, t, s, n, k), rng = extents, np.random.default_rng(0)
    shapes = {"query": (b, t, n, 8), "key": (b, s, k, 8), "value": (b, s, k, 8), "bias": (b, n, t, s), "sinks": (n,)}
    operands = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    fits = lambda name, spec: P(
        *(x if x and shapes[name][i] % shape["dm".index(x)] == 0 else None for i, x in enumerate(spec))
    )
    given = dict.fromkeys(("query", "key", "value"), spec) | {"bias": P(spec[0], "m", spec[1]), "sinks": P("m")}
    specs = {name: fits(name, x) for name, x in given.items()}
    on_explicit(functools.partial(jaxsoftmax.flash_attention, return_residual=True), operands, specs, shape)


@pytest.mark.parametrize("shape", [(1, 2), (1, 1)], ids=str)
def test_extents_of_1_of_rows(shape: tuple[int, int], stand_ins: Any) -> None:
    rng, rows, of_row = np.random.default_rng(0), P("d", "m"), P("d")
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 8), (8, 6)))
    labels = jnp.array([3])
    calls: list[tuple[Any, dict[str, Any]]] = [
        *((op, {"x": (x, rows)}) for op in (jaxsoftmax.softmax, jaxsoftmax.log_softmax)),
        (functools.partial(jaxsoftmax.logsumexp, axis=-1), {"a": (x, rows)}),
        *((top_k, {"x": (x[None], spec)}) for spec in (of_row, P(None, "d", "m"))),
        (cross_entropy, {"logits": (x, rows), "labels": (labels, of_row)}),
        (
            jaxsoftmax.linear_cross_entropy,
            {"hidden": (x, of_row), "weight": (w, P(None, "m")), "labels": (labels, of_row)},
        ),
    ]
    for call, given in calls:
        on_explicit(call, *({n: pair[i] for n, pair in given.items()} for i in (0, 1)), shape)
