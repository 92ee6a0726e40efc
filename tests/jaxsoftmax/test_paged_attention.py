"""`paged_attention`: against the oracle on pages that NumPy gathers, with NaN wherever no key counts."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxsoftmax import explain, paged_attention
from tests import attention_oracle
from tests.jaxsoftmax.sharded import mesh, put
from tests.pairwise import pairwise

BATCH, ENTRIES, PAGES = 4, 5, 24


def operands(queries: int | None, size: int, heads: tuple[int, int] = (4, 2), layout: str = "heads_first",
             dims: tuple[int, int] = (16, 8)) -> dict[str, Any]:  # fmt: skip
    """Sequences with no key, one, some and all that the table has room for, in pages in no order.

    What no sequence has is NaN, and so is one of the entries that no sequence uses.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([0, 1, ENTRIES * size // 2 + 1, ENTRIES * size], np.int32)
    tables = rng.permutation(PAGES)[: BATCH * ENTRIES].reshape(BATCH, ENTRIES).astype(np.int32)
    pages = [rng.normal(size=(heads[1], PAGES, size, dim)).astype(np.float32) for dim in dims]
    used = np.zeros((PAGES, size), bool)
    for table, length in zip(tables, lengths, strict=True):
        used[table] = np.arange(ENTRIES * size).reshape(ENTRIES, size) < length
        table[-(-length // size) :] = rng.choice([-1, PAGES, 2**31 - 1, -(2**31), 0])
    pages = [np.where(used[:, :, None], x, np.nan) for x in pages]
    if layout == "pages_first":
        pages = [np.moveaxis(x, 0, 2) for x in pages]
    query = rng.normal(size=(BATCH, *([] if queries is None else [queries]), heads[0], dims[0])).astype(np.float32)
    return dict(zip(("query", "key_pages", "value_pages", "block_tables", "lengths"),
                    (query, *pages, tables, lengths), strict=True))  # fmt: skip


def expected(given: dict[str, Any], layout: str = "heads_first", **arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and logsumexp of the oracle, on pages that are gathered here, of which NaN is cleared."""
    tables = np.clip(given["block_tables"], 0, PAGES - 1)
    gathered = []
    for pages in (given["key_pages"], given["value_pages"]):
        pages = np.moveaxis(pages, 0, 2) if layout == "heads_first" else pages
        found = pages[tables]
        gathered.append(np.nan_to_num(found.reshape(BATCH, -1, *found.shape[3:])))
    query = given["query"] if given["query"].ndim == 4 else given["query"][:, None]
    window = arguments.pop("local_window_size", None)
    rules = {"is_causal": True, "causal_alignment": "bottom_right", "key_value_seq_lengths": given["lengths"]}
    rules |= {} if window is None else {"local_window_size": (window, None)}
    want = attention_oracle.forward(query, *gathered, **rules, **arguments)
    out, lse = want.out, np.swapaxes(want.lse, 1, 2)
    return (out, lse) if given["query"].ndim == 4 else (out[:, 0], lse[:, 0])


def check(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), tuple(got), tuple(want))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"local_window_size": 9},
    "window as data": {"local_window_size": jnp.int32(9)},
    "sinks and cap": {"sinks": np.linspace(-1, 1, 4, dtype=np.float32), "logits_soft_cap": 2.0},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize(
    "queries, size, heads, layout, options, kernels",
    pairwise(
        (None, 1, 3, 40),
        (8, 16, 24),
        ((4, 4), (4, 2), (4, 1)),
        ("heads_first", "pages_first"),
        tuple(OPTIONS),
        ("reference", "stand-in"),
    ),
    ids=str,
    indirect=["kernels"],
)
def test_values(
    queries: int | None, size: int, heads: tuple[int, int], layout: Any, options: str, kernels: Any
) -> None:
    record = kernels()
    given = operands(queries, size, heads, layout)
    got = jax.jit(functools.partial(paged_attention, layout=layout, return_residual=True, **OPTIONS[options]))(**given)
    check(got, expected(given, layout, **OPTIONS[options]))
    if record:
        seen = {(p.key_heads, p.page_size, p.key_length) for p in record.problems}
        assert seen == {(heads[1], 0 if options == "window as data" else size, ENTRIES * size)}  # 0: gathered


@pytest.mark.parametrize("kernels", ["reference", "stand-in"], indirect=True)
@pytest.mark.parametrize("entry", [-1, PAGES, 2**31 - 1, np.int64(-1), np.int64(2**32 + 3), np.uint64(2**63)])
def test_a_page_that_does_not_exist_makes_its_sequence_nan(entry: Any, kernels: Any) -> None:
    kernels()
    given = {name: np.nan_to_num(x) for name, x in operands(2, 8).items()}  # the first and last page are numbers
    want, _ = expected(given)
    given["block_tables"] = given["block_tables"].astype(getattr(entry, "dtype", np.int32))
    given["block_tables"][3, 1] = entry
    got = np.asarray(paged_attention(**given))
    assert np.isnan(got[3]).all()
    check((got[:3],), (want[:3],))


def test_pages_of_low_precision() -> None:
    given = operands(3, 16)
    half = {name: jnp.asarray(x, jnp.bfloat16 if x.dtype == np.float32 else None) for name, x in given.items()}
    out, lse = paged_attention(**half, return_residual=True)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected(given)[0], atol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "queries, size, heads, layout, options",
    pairwise(
        (None, 1, 3, 40),
        (8, 16, 64),
        ((4, 4), (4, 2), (4, 1)),
        ("heads_first", "pages_first"),
        tuple(name for name in OPTIONS if name != "window as data"),  # which kernels decline: test_ladder
    ),
    ids=str,
)
def test_the_kernel(queries: int | None, size: int, heads: tuple[int, int], layout: Any, options: str) -> None:
    given = operands(queries, size, heads, layout, (64, 128))
    half = {name: jnp.asarray(x, jnp.bfloat16 if x.dtype == np.float32 else None) for name, x in given.items()}
    exact = {name: np.asarray(x, np.float64 if x.dtype == jnp.bfloat16 else None) for name, x in half.items()}
    want, lse = expected(exact, layout, **OPTIONS[options])
    call = functools.partial(paged_attention, layout=layout, return_residual=True, **OPTIONS[options])
    kernel, xla = (functools.partial(call, implementation=name) for name in ("mosaic_gpu", "xla"))
    got, got_lse = jax.jit(kernel)(**half)
    distance = lambda x: np.abs(np.asarray(x, np.float64) - want).max()
    assert distance(got) <= 2 * distance(jax.jit(xla)(**half)[0]) + 2.0**-8
    np.testing.assert_allclose(got_lse, lse, rtol=2e-5, atol=2e-5)
    stacked = {name: x if name.endswith("pages") else jnp.stack([x, x]) for name, x in half.items()}
    axes = {name: None if name.endswith("pages") else 0 for name in half}
    mapped = jax.jit(jax.vmap(lambda given: kernel(**given)[0], (axes,)))(stacked)
    assert distance(mapped[1]) <= 2 * distance(got) + 2.0**-8
    last = (int(given["lengths"][3]) - 1) // size if queries in (None, 1) else slice(None)
    lost = jax.jit(kernel)(**half | {"block_tables": half["block_tables"].at[3, last].set(PAGES)})[0]
    assert np.isnan(np.asarray(lost[3], np.float32)).all()
    np.testing.assert_array_equal(np.asarray(lost[:3], np.float32), np.asarray(got[:3], np.float32))


def test_composes() -> None:
    """Under vmap and export; the pages' gradients are those of the keys and values in them."""
    given = operands(3, 8)
    want = expected(given)
    exported = jax.export.export(jax.jit(paged_attention))(**given)
    check((jax.export.deserialize(exported.serialize()).call(**given),), want[:1])
    stacked = {name: np.stack([x, x]) for name, x in given.items()}
    mapped = jax.vmap(lambda given: paged_attention(**given, return_residual=True))(stacked)
    check(jax.tree.map(lambda x: x[1], mapped), want)
    clean = given | {name: np.nan_to_num(given[name]) for name in ("key_pages", "value_pages")}
    lengths = given["lengths"]
    # A key that is alone has a weight of 1, whatever it is.
    for name, count in (("key_pages", lengths[lengths > 1].sum()), ("value_pages", lengths.sum())):

        def of_pages(pages: Any, name: str = name) -> Any:
            return (paged_attention(**clean | {name: pages}) ** 2).sum()

        gradient = np.asarray(jax.grad(of_pages)(clean[name]))
        assert (abs(gradient) > 1e-6).any(3).sum() == 2 * count
        step = 1e-2 * gradient
        ahead, behind = of_pages(clean[name] + step), of_pages(clean[name] - step)
        np.testing.assert_allclose((ahead - behind) / 2, (step * gradient).sum(), rtol=1e-2)


@pytest.mark.parametrize("implementation, kernel", [(None, "attention"), ("mosaic_gpu", None)])
@pytest.mark.parametrize("dims", [(12, 20), (16, 20), (12, 16)])
def test_heads_that_the_kernel_does_not_take(dims: Any, implementation: Any, kernel: Any) -> None:
    """Attention's kernel takes them where the pages are gathered first, if no kernel of pages was asked for."""
    half = {name: jnp.asarray(x, None if x.dtype == np.int32 else "bfloat16") for name, x in operands(64, 8).items()}
    half |= {"query": jnp.ones((BATCH, 64, 4, dims[0]), "bfloat16")}
    pages = zip(("key", "value"), dims, strict=True)
    half |= {f"{name}_pages": jnp.ones((2, PAGES, 8, dim), "bfloat16") for name, dim in pages}
    call = explain(functools.partial(paged_attention, implementation=implementation), device="H200")(**half).calls[0]
    assert call.kernel == kernel
    assert f"takes heads in multiples of 8; they are {dims[0]} and {dims[1]} wide" in str(call)


@pytest.mark.parametrize("mapped", ["sinks", "pages", "tables", "query", "all"])
@pytest.mark.parametrize("kernels", ["reference", "stand-in"], indirect=True)
def test_vmap_of_each_operand(mapped: str, kernels: Any) -> None:
    kernels()
    given = operands(None, 8) | {"sinks": np.linspace(-1, 1, 4, dtype=np.float32)}
    moves = {
        "query": lambda x: x[::-1] * 0.5,
        "key_pages": lambda x: x * 0.5,
        "block_tables": lambda x: np.where((x >= 0) & (x < PAGES), x, x[:, ::-1]),
        "lengths": lambda x: np.minimum(x, 7),
        "sinks": lambda x: x + 1,
    }
    names = {"pages": ["key_pages"], "tables": ["block_tables", "lengths"], "all": list(moves)}.get(mapped, [mapped])
    second = given | {name: moves[name](given[name]) for name in names}
    call = jax.vmap(
        lambda given: paged_attention(**given, return_residual=True), ({n: 0 if n in names else None for n in given},)
    )
    found = call({n: np.stack([x, second[n]]) if n in names else x for n, x in given.items()})
    for i, each in enumerate((given, second)):
        check([x[i] for x in found], expected({n: x for n, x in each.items() if n != "sinks"}, sinks=each["sinks"]))


LAYOUTS, KINDS = ("heads_first", "pages_first"), (AxisType.Auto, AxisType.Explicit)


@pytest.mark.parametrize(
    "layout, kind, kernels", pairwise(LAYOUTS, KINDS, ("reference", "stand-in")), indirect=["kernels"], ids=str
)
def test_a_key_head_that_devices_share(layout: Any, kind: AxisType, kernels: Any) -> None:
    record = kernels()
    given, on = operands(None, 8, (4, 1), layout), mesh(kind)
    specs = {"query": P("d", "m"), "block_tables": P("d"), "lengths": P("d")}
    placed = {name: put(x, specs.get(name, P()), on) for name, x in given.items()}
    call = functools.partial(paged_attention, layout=layout, return_residual=True)
    check(jax.jit(call)(**placed), expected(given, layout))
    assert record is None or {(p.batch, p.query_heads) for p in record.problems} >= {(1, 4)}


@pytest.mark.parametrize("layout, kind, is_set", pairwise(LAYOUTS, KINDS, (False, True)), ids=str)
def test_shards_of_sequences_and_heads(layout: Any, kind: AxisType, is_set: bool) -> None:
    given = operands(3, 8, layout=layout)
    on = mesh(kind)
    of_pages = P("m") if layout == "heads_first" else P(None, None, "m")
    specs = {"query": P("d", None, "m"), "block_tables": P("d"), "lengths": P("d")}
    placed = {name: put(x, specs.get(name, of_pages), on) for name, x in given.items()}
    call = functools.partial(paged_attention, layout=layout, return_residual=True)
    with jax.set_mesh(on) if is_set else jax.numpy_rank_promotion("raise"):
        check(jax.jit(call)(**placed), expected(given, layout))
        check(call(**placed), expected(given, layout))
        text = jax.jit(call).lower(**placed).compile().as_text()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
