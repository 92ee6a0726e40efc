"""The kernel that selects the k largest of a row: in the interpreter against NumPy, and compiled for an H200."""

import dataclasses
import functools
import math
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret
from jax import export

from jaxsoftmax import _top_k
from pallas_kernels import hardware
from pallas_kernels.hardware import A100, H200
from pallas_kernels.top_k import dispatch, radix_select
from pallas_kernels.top_k.radix_select import Config, Problem
from tests import top_k_oracle

# More than one CTA, rows that end within one, columns that do and do not fill a warp, and the most there may be.
CASES = [
    ("bfloat16", (9, 334), 64),
    ("float16", (5, 33), 7),
    ("float32", (4, 64), 1),
    ("float32", (2, 3, 100), 100),
    ("bfloat16", (1, 1), 1),
    ("float16", (3, 1024), 512),
]


def keys_of(dtype: str, shape: tuple[int, ...]) -> jax.Array:
    """Numbers of which many are equal, infinities, rows of equal ones, and one of neighbours in 16 bits."""
    rng = np.random.default_rng(0)
    x = np.round(4 * rng.normal(size=(math.prod(shape[:-1]), shape[-1]))) / 2
    x[rng.random(x.shape) < 0.1] = -np.inf
    x[rng.random(x.shape) < 0.02] = np.inf
    x[-1] = -np.inf
    if len(x) > 2:
        x[1], x[2] = -3.5, 1 + rng.random(shape[-1])
    return jnp.asarray(x.reshape(shape) + 0.0, dtype)


def selected(keys: jax.Array, k: int, sorts: bool = False) -> jax.Array:
    problem = Problem(math.prod(keys.shape[:-1]), keys.shape[-1], k, keys.dtype, ordered=sorts)
    return interpret(functools.partial(radix_select.run, problem, Config(sorts)), keys)


def check(dtype: str, shape: tuple[int, ...], k: int, sorts: bool) -> None:
    keys = keys_of(dtype, shape)
    order = np.argsort(-np.asarray(keys, np.float64), axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(np.asarray(selected(keys, k, sorts)), order if sorts else np.sort(order, -1))


@pytest.mark.parametrize("dtype, shape, k", CASES)
def test_the_first_of_the_largest_are_selected(dtype: str, shape: tuple[int, ...], k: int) -> None:
    check(dtype, shape, k, sorts=k <= dispatch.MOST_SORTED)


@pytest.mark.parametrize("dtype, shape, k", CASES[1:3] + CASES[-1:])
def test_in_the_order_of_the_row(dtype: str, shape: tuple[int, ...], k: int) -> None:
    check(dtype, shape, k, sorts=False)


@pytest.mark.parametrize("dtype", radix_select.KEY_BITS)
def test_digits_tell_all_numbers_apart(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search by digits for each k, of every number of 16 bits; what is stored is another test's concern."""
    size = jnp.dtype(dtype).itemsize
    patterns = np.arange(2**16, dtype=np.uint32).astype(f"uint{8 * size}")
    if size == 4:  # every exponent and sign with the first and last digits of a fraction
        patterns = np.concatenate([patterns << 16, (patterns << 23) | (patterns & 0x1FF), patterns]).astype(np.uint32)
    x = patterns.view(jnp.dtype(dtype)).astype(np.float32)
    bits = x.view(np.int32).astype(np.int64)
    keys = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).reshape(-1, 64)  # in the order of the numbers
    order = np.argsort(-keys, -1, kind="stable")
    found: list[Any] = []
    monkeypatch.setattr(radix_select, "WARPS", len(keys))
    monkeypatch.setattr(radix_select, "_load", lambda *_: jnp.asarray(x.reshape(-1, 64)))
    monkeypatch.setattr(radix_select, "_stage", lambda columns, staged, keys, order, left: found.extend((order, left)))
    monkeypatch.setattr(radix_select, "_store", lambda *_: None)
    monkeypatch.setattr(radix_select.ptx, "no_unroll", jax.lax.fori_loop)
    monkeypatch.setattr(radix_select.plgpu, "layout_cast", lambda x, _: x)

    def ordered(k: int) -> tuple[np.ndarray, np.ndarray]:
        def body(_: jax.Array) -> Any:
            found.clear()
            radix_select._body(jnp.zeros((4, 64), dtype), None, None, k=k)
            return tuple(found)

        return tuple(np.asarray(x)[0] for x in jax.jit(jax.vmap(body, axis_name="rows"))(jnp.zeros(1)))

    for k in (1, 2, 31, 63, 64):
        sides, left = ordered(k)
        equal = sides == 0
        selected = (sides > 0) | (equal & (equal.cumsum(1) <= left[:, None]))
        np.testing.assert_array_equal(np.nonzero(selected)[1].reshape(-1, k), np.sort(order[:, :k], 1))


def test_nan_and_signs_of_zero_are_in_the_order_of_bits() -> None:
    row = jnp.array([[-0.0, 1.0, jnp.nan, 0.0, -jnp.inf, -jnp.nan, jnp.inf]])
    for k, want in ((1, [2]), (2, [2, 6]), (4, [1, 2, 3, 6]), (6, [0, 1, 2, 3, 4, 6])):
        assert selected(row, k).tolist() == [want]


@pytest.mark.parametrize("scale, k", [(1.0, 64), (0.5, 8)])
def test_top_k_by_the_kernel(scale: float, k: int) -> None:
    """Chunks, candidates and the last selection, of which none is sorted whole."""

    def select(x: jax.Array, k: int, *, normalize: str, scale: float) -> Any:
        rest: dict[str, Any] = {"normalizes": True, "implementation": None, "by_kernel": True}
        _, indices, *_, y = interpret(lambda x: _top_k.select(x, k=k, scale=scale, **rest), x)
        return y, indices

    top_k_oracle.check(select, top_k_oracle.rows(4096, np.float32), k, normalize="all", scale=scale)


def test_more_than_the_kernel_sorts_are_sorted_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, asked = keys_of("bfloat16", (4, 1024)), []
    order = np.argsort(-np.asarray(keys, np.float64), axis=-1, kind="stable")

    def select(problem: Problem, config: Config, _: jax.Array) -> jax.Array:
        asked.append(config.sorts)
        return jnp.asarray(order[:, : problem.k] if config.sorts else np.sort(order[:, : problem.k], -1))

    kernel = dataclasses.replace(dispatch.KERNELS["radix_select"], run=select)
    monkeypatch.setitem(dispatch.KERNELS, "radix_select", kernel)
    monkeypatch.setattr(hardware, "current", lambda: H200)
    for k in (dispatch.MOST_SORTED, dispatch.MOST_SORTED + 1, 256):
        values, places = _top_k.largest(keys, k, by_kernel=True)
        np.testing.assert_array_equal(places, order[:, :k])
        np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(keys), order[:, :k], -1))
    assert asked == [True, False, False]


def test_what_the_kernel_declines() -> None:
    def why(rows: Any, cols: Any, k: int = 1, dtype: str = "bfloat16", device: Any = H200, ordered: bool = True) -> Any:
        found = dispatch.decide(Problem(rows, cols, k, jnp.dtype(dtype), ordered), device)
        assert found.kernel == (None if found.declined else "radix_select")
        return dict(found.declined).get("radix_select")

    assert why(8, 1024) is None
    assert "1025" in why(8, 1025)
    assert "1 to 2^31 rows" in why(0, 8)
    for dtype in ("float64", "int32", "float8_e5m2"):
        assert dtype in why(8, 8, dtype=dtype)
    (rows,) = export.symbolic_shape("rows")
    assert "known sizes" in why(rows, 8)
    assert "known sizes" in why(8, rows)
    assert "1 to 8 of 8 columns, not 0" in why(8, 8, 0)
    assert "1 to 8 of 8 columns, not 9" in why(8, 8, 9)
    assert "compute capability 8.0" in why(8, 8, device=A100)
    assert why(8, 8, 4) is None
    assert "XLA sorts rows of 8 of which 5" in why(8, 8, 5)
    assert why(8, 8, 8, ordered=False) is None


@pytest.mark.aot
@pytest.mark.parametrize(
    "dtype, cols, k", [("bfloat16", 334, 64), ("bfloat16", 1024, 512), ("float16", 70, 8), ("float32", 1024, 128)]
)
def test_nothing_spills(dtype: str, cols: int, k: int) -> None:
    x = jax.ShapeDtypeStruct((4096, cols), dtype)
    problem = Problem(*x.shape, k, x.dtype, ordered=True)
    (config,) = dispatch.KERNELS["radix_select"].configs(problem, H200)
    (report,) = aot.compile_for_h200(functools.partial(radix_select.run, problem, config), x)
    assert report.spill_bytes == 0, report
    assert report.relocatable.spill_bytes == 0, report
