"""`top_k_softmax` of sharded logits: values, and on the compiled program, how little the devices say to each other."""

import functools
import math
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
from tests.jaxsoftmax.sharded import exchanges, mesh, put

SHAPE = (8, 4, 3200)
K = 6
X = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
# Ties within a device's columns and across devices', and fewer numbers than are wanted.
X[0] = np.random.default_rng(1).integers(0, 2, SHAPE[1:])
X[1, 0] = 0.0
X[1, 1:3] = -np.inf
X[1, 2, ::1000] = 1.0
X[2, 0, 17] = np.nan
X[2, 1, 3100] = np.inf

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default::DeprecationWarning")]


def run(function: Callable[..., Any], *operands: jax.Array) -> tuple[Any, list[tuple[str, int]]]:
    """The result, and every collective in the compiled program with how many numbers it gives."""
    compiled = jax.jit(function).lower(*operands).compile()
    return compiled(*operands), [
        (arrays[0].kind, sum(array.size for array in arrays)) for arrays in exchanges(compiled)
    ]


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


AUTO, EXPLICIT, WHOLE = AxisType.Auto, AxisType.Explicit, P("d", "m", None)
COLUMNS, ALL_COLUMNS, SOME_COLUMNS = P(None, None, "d"), P(None, None, ("d", "m")), P("d", None, "m")


@pytest.mark.parametrize(
    "spec, kind, kernels, normalize",
    [
        (P(("d", "m"), None, None), AUTO, "reference", "all"),
        (WHOLE, AUTO, "stand-in", "top_k"),
        (WHOLE, EXPLICIT, "reference", "all"),
        (COLUMNS, AUTO, "reference", "all"),
        (ALL_COLUMNS, AUTO, "stand-in", "top_k"),
        (SOME_COLUMNS, AUTO, "stand-in", "all"),
        (SOME_COLUMNS, EXPLICIT, "stand-in", "top_k"),
        (ALL_COLUMNS, EXPLICIT, "reference", "all"),
    ],
    indirect=["kernels"],
    ids=str,
)
def test_cut_rows_exchange_k_numbers_once_and_whole_ones_none(
    spec: P, kind: AxisType, kernels: Any, normalize: str
) -> None:
    record, shard = kernels(), NamedSharding(mesh(), spec).shard_shape(SHAPE)
    rows, devices = math.prod(shard[:2]), SHAPE[2] // shard[2]
    with jax.set_mesh(mesh(kind)):
        x = jax.device_put(X, spec)
        got, moved = run(functools.partial(selected, normalize=normalize), x)
        assert moved == ([("all-gather", rows * devices * (2 * K + 2))] if spec[2] else [])
        right(got, normalize=normalize)
        assert all(part.sharding.is_equivalent_to(NamedSharding(mesh(), P(*spec[:2])), 3) for part in got)
        found, moved = run(jax.grad(functools.partial(loss, normalize=normalize)), x)
        assert sum(size for _, size in moved) <= (rows * devices * (3 * K + 2) if spec[2] else 0)
        assert {name for name, _ in moved} <= {"all-gather", "all-reduce"}
        assert kind is AUTO or jax.typeof(found).sharding.spec == spec
        agree(found, normalize)
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
        x = put(X.astype(np.float64), COLUMNS)
        lowered, want = jax.jit(selected).lower(x), selected(x)
    got = lowered.compile()(x)
    assert got[0].dtype == np.float64
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), got, want)
