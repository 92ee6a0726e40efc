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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax import _top_k, top_k_softmax
from pallas_kernels.softmax.problem import Op
from tests import top_k_oracle
from tests.jaxsoftmax.sharded import COLLECTIVES, mesh, put

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

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default::DeprecationWarning")]


def run(function: Callable[..., Any], *operands: jax.Array) -> tuple[Any, list[tuple[str, int]]]:
    """The result, and every collective in the compiled program with how many numbers it gives."""
    compiled = jax.jit(function).lower(*operands).compile()
    found = re.findall(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    sizes = lambda types: [
        math.prod(map(int, filter(None, t.split(",")))) for t in re.findall(r"\w\[([\d,]*)\]", types)
    ]
    return compiled(*operands), [(name, sum(sizes(types))) for types, name in found]


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


def right(got: Any, x: Any = X, k: int = K, normalize: str = "all") -> None:
    """Whether probabilities and indices are those of `x`."""
    top_k_oracle.check(lambda *_, **__: got, x, k, normalize=normalize)


def chunk_size(rows: int, n: int) -> int:
    """Of rows this few, which are counted; of short ones all."""
    c = n if _top_k.chunk_size(n, K) == n else _top_k.rank_chunk_size(n, K, rows)
    assert c is not None
    return c


def cases(specs: list[P]) -> pytest.MarkDecorator:
    ways = [("reference", "all"), ("stand-in", "top_k"), ("stand-in", "all")]
    both = [(spec, *way) for spec, way in zip(specs, ways, strict=True)]
    return pytest.mark.parametrize("spec, kernels, normalize", both, indirect=["kernels"], ids=str)


@cases(ROWS)
def test_rows_need_no_exchange(kernels: Any, spec: P, normalize: str) -> None:
    record, x = kernels(), put(X, spec)
    got, moved = run(functools.partial(selected, normalize=normalize), x)
    assert moved == []
    right(got, normalize=normalize)
    assert all(part.sharding.is_equivalent_to(NamedSharding(mesh(), spec), 3) for part in got)
    got, moved = run(jax.grad(functools.partial(loss, normalize=normalize)), x)
    assert moved == []
    agree(got, normalize)
    if record:
        c = chunk_size(32 // 8, SHAPE[-1])
        assert (32 // 8 * SHAPE[-1] // c, c, 1) in record.ran(Op.STATS)


@cases(COLUMNS)
def test_cut_rows_exchange_k_numbers_once(kernels: Any, spec: P, normalize: str) -> None:
    record, x = kernels(), put(X, spec)
    devices = math.prod(mesh().shape[name] for name in np.ravel(spec[2]))
    rows = 32 // (1 if spec[0] is None else mesh().shape[spec[0]])
    got, moved = run(functools.partial(selected, normalize=normalize), x)
    assert moved == [("all-reduce", rows * devices * (2 * K + 2))]
    right(got, normalize=normalize)
    got, moved = run(jax.grad(functools.partial(loss, normalize=normalize)), x)
    assert sum(size for _, size in moved) <= rows * devices * (3 * K + 2)
    assert {name for name, _ in moved} == {"all-reduce"}
    agree(got, normalize)
    if record:
        assert chunk_size(rows, SHAPE[-1] // devices) in {cols for _, cols, _ in record.ran(Op.STATS)}


def test_more_wanted_than_a_device_has() -> None:
    x = X[..., :40]
    for k in (6, 17):
        right(jax.jit(selected, static_argnums=1)(put(x, P(None, None, ("d", "m"))), k), x, k)
    with jax.enable_x64(True):
        wide = x.astype(np.float64) / 3
        right(jax.jit(selected, static_argnums=1)(put(wide, P("d", None, "m")), 33), wide, 33)


def test_columns_that_do_not_divide() -> None:
    x = X[..., :3195]
    cut = NamedSharding(mesh(), P(None, None, ("d", "m")))
    right(jax.jit(lambda x: selected(jax.lax.with_sharding_constraint(x, cut)))(x), x)


def test_float64_compiled_outside_the_context_it_was_lowered_in() -> None:
    with jax.enable_x64(True):
        x = put(X.astype(np.float64), COLUMNS[0])
        lowered, want = jax.jit(selected).lower(x), selected(x)
    got = lowered.compile()(x)
    assert got[0].dtype == np.float64
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), got, want)


def test_tangents_of_cut_rows(stand_ins: Any) -> None:
    x, t = X[3:4], T[3:4]
    pushed = lambda x, t: jax.jvp(lambda x: selected(x)[0], (x,), (t,))[1]
    spec = P(None, None, ("d", "m"))
    got, moved = run(pushed, put(x, spec), put(t, spec))
    np.testing.assert_allclose(got, jax.jit(pushed)(x, t), rtol=1e-4, atol=1e-8)
    assert {name for name, _ in moved} == {"all-reduce"}


def test_vmap_of_a_sharded_axis(stand_ins: Any) -> None:
    got, moved = run(jax.vmap(selected, 1, 1), put(X, P(None, "d")))
    assert moved == []
    right(got)


@pytest.mark.parametrize("normalize", ["all", "top_k"])
def test_shard_map(stand_ins: Any, normalize: str) -> None:
    over = functools.partial(jax.shard_map, mesh=mesh(), in_specs=P("d", "m"), out_specs=P("d", "m"))
    right(jax.jit(over(functools.partial(selected, normalize=normalize)))(X), normalize=normalize)
    agree(jax.jit(over(jax.grad(functools.partial(loss, normalize=normalize))))(X), normalize)


def test_partly_manual_regions_keep_rows_local(stand_ins: Any) -> None:
    mapped = jax.shard_map(selected, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    got, moved = run(mapped, put(X, P("d", "m")))
    assert moved == []
    right(got)
    right(jax.jit(mapped)(put(X, P("d", None, "m"))))


@cases([P("d", "m", None), P("d", None, "m"), P(None, None, ("d", "m"))])
def test_explicit_meshes(kernels: Any, spec: P, normalize: str) -> None:
    kernels()
    pushed = lambda x, t: jax.jvp(lambda x: selected(x, normalize=normalize)[0], (x,), (t,))[1]
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, t = jax.device_put(X, spec), jax.device_put(T, spec)
        got, moved = run(functools.partial(selected, normalize=normalize), x)
        assert all(jax.typeof(part).sharding.spec == P(*spec[:2], None) for part in got)
        assert [name for name, _ in moved] == ([] if spec[2] is None else ["all-reduce"])
        right(got, normalize=normalize)
        found, moved = run(jax.grad(functools.partial(loss, normalize=normalize)), x)
        assert {name for name, _ in moved} <= {"all-reduce"}
        assert jax.typeof(found).sharding.spec == spec
        agree(found, normalize)
        tangent, moved = run(pushed, x, t)
        assert {name for name, _ in moved} <= {"all-reduce"}
    want = np.asarray(jax.jit(pushed)(X, T))
    finite = np.isfinite(want)
    np.testing.assert_allclose(np.asarray(tangent)[finite], want[finite], rtol=1e-4, atol=1e-7)
