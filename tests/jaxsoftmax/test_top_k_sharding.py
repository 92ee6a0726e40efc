"""`top_k_softmax` of sharded logits: values, and on the compiled program, how little the devices say to each other."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax import _selection, top_k_softmax
from pallas_kernels.problem import Op
from tests import top_k_oracle

SHAPE = (8, 4, 3200)
K = 6
X = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
T = np.cos(X)
# Ties within a device's columns and across devices', and fewer numbers than are wanted.
X[0] = np.random.default_rng(1).integers(0, 2, SHAPE[1:])
X[1, 0] = 0.0
X[1, 1:3] = -np.inf
X[1, 2, ::1000] = 1.0
X[2, 0, 17] = np.nan
X[2, 1, 3100] = np.inf

ROWS = [P("d"), P("d", "m"), P(("d", "m"))]
COLUMNS = [P(None, None, "d"), P(None, None, ("d", "m")), P("d", None, "m")]
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def mesh(kind: AxisType = AxisType.Auto, shape: tuple[int, ...] = (4, 2), names: tuple[str, ...] = ("d", "m")) -> Mesh:
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=jax.devices("cpu")[: int(np.prod(shape))])


def put(x: Any, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh(), spec))


def exchanged(function: Callable[..., Any], *operands: jax.Array) -> list[tuple[str, int]]:
    """Every collective in the compiled program, and how many numbers its result has."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    found = re.findall(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    sizes = lambda types: [
        math.prod(map(int, filter(None, t.split(",")))) for t in re.findall(r"\w\[([\d,]*)\]", types)
    ]
    return [(name, sum(sizes(types))) for types, name in found]


def selected(x: jax.Array, k: int = K, **keywords: Any) -> tuple[jax.Array, jax.Array]:
    return top_k_softmax(x, k, **keywords)


def loss(x: jax.Array, normalize: str) -> jax.Array:
    return (jnp.sin(top_k_softmax(x, K, normalize=normalize)[0]) * jnp.arange(1.0, K + 1)).sum()


@functools.cache
def gradient(normalize: str) -> np.ndarray:
    """What one device gives."""
    return np.asarray(jax.grad(loss)(jnp.asarray(X), normalize))


def agree(got: jax.Array, normalize: str) -> None:
    """Gradients; where a NaN is among the selected is not said, only that it makes them NaN."""
    got, want = np.asarray(got), gradient(normalize)
    has_nan = np.isnan(X).any(-1)
    np.testing.assert_allclose(got[~has_nan], want[~has_nan], atol=1e-6)
    assert np.isnan(got[has_nan]).any(-1).all()


def right(function: Callable[..., Any], x: jax.Array, normalize: str = "all") -> None:
    top_k_oracle.check(lambda _, k, **keywords: jax.jit(functools.partial(function, **keywords))(x), X, K,
                       normalize=normalize)  # fmt: skip


@pytest.fixture(params=[False, True], ids=["reference", "stand-in"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("stand_ins") if request.param else None


@pytest.mark.parametrize("spec", ROWS, ids=str)
@pytest.mark.parametrize("normalize", ["all", "top_k"])
def test_rows_need_no_exchange(kernels: Any, spec: P, normalize: str) -> None:
    x = put(X, spec)
    assert exchanged(functools.partial(selected, normalize=normalize), x) == []
    assert exchanged(jax.grad(functools.partial(loss, normalize=normalize)), x) == []
    right(selected, x, normalize)
    agree(jax.jit(jax.grad(loss), static_argnums=1)(x, normalize), normalize)
    for part in jax.jit(selected)(x):
        assert part.sharding.is_equivalent_to(NamedSharding(mesh(), spec), 3)
    if kernels:
        c = _selection.chunk_size(SHAPE[-1], K)
        parts = 4 if spec == P("d") else 8
        assert (32 // parts * SHAPE[-1] // c, c, 1) in kernels.ran(Op.STATS)


@pytest.mark.parametrize("spec", COLUMNS, ids=str)
@pytest.mark.parametrize("normalize", ["all", "top_k"])
def test_cut_rows_exchange_k_numbers_once(kernels: Any, spec: P, normalize: str) -> None:
    x = put(X, spec)
    devices = math.prod(mesh().shape[name] for name in np.ravel(spec[2]))
    rows = 32 // (1 if spec[0] is None else mesh().shape[spec[0]])
    assert exchanged(functools.partial(selected, normalize=normalize), x) == [
        ("all-reduce", rows * devices * (2 * K + 2))
    ]
    right(selected, x, normalize)
    moved = exchanged(jax.grad(functools.partial(loss, normalize=normalize)), x)
    assert sum(size for _, size in moved) <= rows * devices * (3 * K + 2)
    assert {name for name, _ in moved} == {"all-reduce"}
    agree(jax.jit(jax.grad(loss), static_argnums=1)(x, normalize), normalize)
    if kernels:
        assert {cols for _, cols, _ in kernels.ran(Op.STATS)} == {_selection.chunk_size(SHAPE[-1] // devices, K)}


def test_more_wanted_than_a_device_has() -> None:
    x = X[..., :40]
    for k in (6, 17, 40):
        cut = put(x, P(None, None, ("d", "m")))
        top_k_oracle.check(lambda _, k, cut=cut, **__: jax.jit(functools.partial(selected, k=k))(cut), x, k)
    with jax.enable_x64(True):
        wide = x.astype(np.float64) / 3
        cut = put(wide, P("d", None, "m"))
        top_k_oracle.check(lambda _, k, **__: jax.jit(functools.partial(selected, k=k))(cut), wide, 33)


def test_columns_that_do_not_divide() -> None:
    x = X[..., :3195]
    halves = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(None, None, "m")))
    top_k_oracle.check(lambda x, k, **__: jax.jit(lambda x: selected(halves(x)))(x), x, K)


def test_tangents_of_cut_rows(kernels: Any) -> None:
    x, t = X[3:4], T[3:4]
    pushed = lambda x, t: jax.jvp(lambda x: selected(x)[0], (x,), (t,))[1]
    want = jax.jit(pushed)(x, t)
    for spec in (P(None, None, "d"), P(None, None, ("d", "m"))):
        np.testing.assert_allclose(jax.jit(pushed)(put(x, spec), put(t, spec)), want, rtol=1e-4, atol=1e-8)
        assert {name for name, _ in exchanged(pushed, put(x, spec), put(t, spec))} == {"all-reduce"}


def test_vmap_of_a_sharded_axis(kernels: Any) -> None:
    mapped = lambda x, **keywords: tuple(jnp.moveaxis(p, 0, 1) for p in jax.vmap(
        functools.partial(selected, **keywords), 1)(x))  # fmt: skip
    assert exchanged(mapped, put(X, P(None, "d"))) == []
    right(mapped, put(X, P(None, "d")))


def test_shard_map(kernels: Any) -> None:
    spec = P("d", "m")
    for normalize in ("all", "top_k"):
        inside = jax.shard_map(
            functools.partial(selected, normalize=normalize), mesh=mesh(), in_specs=spec, out_specs=spec
        )
        right(lambda x, inside=inside, **_: inside(x), jnp.asarray(X), normalize)
        mapped = jax.shard_map(
            jax.grad(functools.partial(loss, normalize=normalize)), mesh=mesh(), in_specs=spec, out_specs=spec
        )
        agree(jax.jit(mapped)(X), normalize)


def test_partly_manual_regions_keep_rows_local(kernels: Any) -> None:
    mapped = jax.shard_map(selected, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    assert exchanged(mapped, put(X, P("d", "m"))) == []
    for spec in (P("d", "m"), P("d", None, "m")):
        right(lambda x, **_: mapped(x), put(X, spec))


@pytest.mark.parametrize("spec", [P("d", "m", None), P("d", None, "m"), P(None, None, ("d", "m"))], ids=str)
@pytest.mark.parametrize("normalize", ["all", "top_k"])
def test_explicit_meshes(kernels: Any, spec: P, normalize: str) -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, t = jax.device_put(X, spec), jax.device_put(T, spec)
        got = jax.jit(selected)(x)
        assert all(jax.typeof(part).sharding.spec == P(*spec[:2], None) for part in got)
        right(selected, x, normalize)
        moved = exchanged(functools.partial(selected, normalize=normalize), x)
        assert [name for name, _ in moved] == ([] if spec[2] is None else ["all-reduce"])
        found = jax.jit(jax.grad(loss), static_argnums=1)(x, normalize)
        assert jax.typeof(found).sharding.spec == spec
        agree(found, normalize)
        pushed = lambda x, t: jax.jvp(lambda x: selected(x, normalize=normalize)[0], (x,), (t,))[1]
        tangent = jax.jit(pushed)(x, t)
        assert {name for name, _ in exchanged(pushed, x, t)} <= {"all-reduce"}
    want = jax.jit(pushed)(X, T)
    finite = np.isfinite(np.asarray(want))
    np.testing.assert_allclose(np.asarray(tangent)[finite], np.asarray(want)[finite], rtol=1e-4, atol=1e-7)
