"""Rows sharded along their columns against float64, and the faults that the check must reject: a test of the tests."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import _top_k
from pallas_kernels.softmax.problem import Op
from tests import errors, oracle, top_k_oracle
from tests.jaxsoftmax.sharded import exchanges, gathers_only_numbers, mesh, put

ROWS, K = 12, 5
INF = np.inf
Results = dict[str, tuple[Any, Any, Any]]  # by name what was found, the truth, and the size of its terms


@functools.cache
def operands(cols: int) -> dict[str, np.ndarray]:
    """Logits of every kind of trouble, that of a device without finite ones among them; labels at a part's ends."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, cols)).astype(np.float32)
    x[1, : cols // 2] = -INF
    x[2, :-1] = -INF
    x[3] = -INF
    x[4, -1] = np.nan
    x[6], x[7] = x[6] + 1e4, x[7] - 200
    x[8] = rng.integers(0, 2, cols)
    labels = np.array([0, cols - 1, cols - 1, 4, 5, 6, 8, 7, 31, 32, -1, 16], np.int32)
    where = rng.random((ROWS, cols)) < 0.7
    where[8] = False
    return {"x": x, "ct": rng.normal(size=(ROWS, cols)).astype(np.float32), "labels": labels, "where": where} | {
        "weights": rng.normal(size=ROWS).astype(np.float32)
    }


def of_rows(x: jax.Array, given: dict[str, np.ndarray]) -> Any:
    """Values and pullbacks of the row operations."""
    ct = given["ct"]
    y, pull = jax.vjp(jaxsoftmax.softmax, x)
    z, pull_log = jax.vjp(functools.partial(jaxsoftmax.log_softmax, scale=0.5), x)
    lse, pull_lse = jax.vjp(lambda x: jaxsoftmax.logsumexp(x, -1, where=given["where"]), x)
    return y, pull(ct)[0], z, pull_log(ct)[0], lse, pull_lse(given["weights"])[0]


def true_rows(given: dict[str, np.ndarray]) -> list[tuple[Any, Any]]:
    x, ct, of_lse = given["x"], given["ct"], given["weights"][:, None]
    y, where = oracle.softmax(x), given["where"]
    lse, of_seen = oracle.logsumexp(x, -1, where=where), of_lse * oracle.softmax(x, where=where)
    with np.errstate(invalid="ignore"):
        return [
            (y, y),
            (oracle.softmax_tangent(y, ct), oracle.softmax_tangent_terms(y, ct)),
            (oracle.log_softmax(x, scale=0.5), oracle.log_softmax_terms(x, scale=0.5) + 1),
            (oracle.log_softmax_cotangent(x, ct, scale=0.5), oracle.log_softmax_cotangent_terms(x, ct, scale=0.5)),
            (lse, np.abs(lse) + 10),
            (of_seen, np.abs(of_seen)),
        ]


# By group the losses' options; each is called with and without weights in turn.
LOSSES: dict[str, list[dict[str, Any]]] = {
    "losses": [{}, {"smoothing": 0.2, "z_loss": 0.01}],
    "options": [{"soft_cap": 5.0, "scale": 0.5}, {"where": True, "smoothing": 0.1}],
}


def _loss(x: jax.Array, given: dict[str, np.ndarray], weighted: bool, **options: Any) -> Any:
    names = {"smoothing": "label_smoothing", "soft_cap": "logits_soft_cap"}
    keywords = {names.get(name, name): value for name, value in options.items()}
    keywords |= {"where": given["where"]} if "where" in options else {}
    keywords |= {"weights": given["weights"]} if weighted else {}
    call = functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, ignore_index=-1, **keywords)
    loss, pull = jax.vjp(lambda x: call(x, given["labels"]), x)
    return loss, pull(jnp.ones_like(loss))[0]


def of_losses(group: str, x: jax.Array, given: dict[str, np.ndarray]) -> Any:
    return [part for options in LOSSES[group] for w in (False, True) for part in _loss(x, given, w, **options)]


def true_losses(group: str, given: dict[str, np.ndarray]) -> list[tuple[Any, Any]]:
    truths, x = [], given["x"]
    for options in LOSSES[group]:
        where = given["where"] if "where" in options else None
        rest = {name: value for name, value in options.items() if name != "where"}
        for weights in (1.0, given["weights"]):
            want = oracle.cross_entropy(
                x, given["labels"], where=where, weights=weights, ignored=-1, skips_empty=True, **rest
            )
            count = np.maximum(x.shape[-1] if where is None else where.sum(-1), 1)
            sums = np.abs(weights) * want.total_terms / count if "smoothing" in options else 0.0
            truths += [(want.loss, want.loss_terms + 10 + sums), (want.gradient, want.gradient_terms)]
    return truths


GROUPS: dict[str, tuple[Callable[..., Any], Callable[..., list[tuple[Any, Any]]]]] = {
    "rows": (of_rows, true_rows),
    "losses": (functools.partial(of_losses, "losses"), functools.partial(true_losses, "losses")),
    "options": (functools.partial(of_losses, "options"), functools.partial(true_losses, "options")),
}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# By layout the kind of mesh, how the logits are sharded, and how many columns there are: some do not divide.
LAYOUTS: dict[str, tuple[AxisType, P, int]] = {
    "columns": (AUTO, P(None, ("d", "m")), 64),
    "rows and columns": (EXPLICIT, P("d", "m"), 64),
    "explicit columns": (EXPLICIT, P(None, "d"), 64),
    "uneven": (AUTO, P(None, ("d", "m")), 61),
    "uneven columns of some rows": (AUTO, P("m", "d"), 62),
}


def sharded(layout: str, function: Callable[..., Any]) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """What the function gives of logits that are sharded, its program, and the operands."""
    kind, spec, cols = LAYOUTS[layout]
    given = operands(cols)
    placed = NamedSharding(mesh(kind), spec)
    if layout.startswith("uneven"):
        x = given["x"]
        run = jax.jit(lambda x: function(jax.lax.with_sharding_constraint(x, placed), given))
    else:
        x, run = jax.device_put(given["x"], placed), jax.jit(lambda x: function(x, given))
    with jax.set_mesh(mesh(kind)):
        compiled = run.lower(x).compile()
        return compiled(x), compiled, given


def check(group: str, layout: str) -> Any:
    """Values and gradients to a few units in the last place of their terms; returns the program."""
    function, truth = GROUPS[group]
    found, compiled, given = sharded(layout, function)
    for got, (want, size) in zip(found, truth(given), strict=True):
        assert errors.max_error(got, want, magnitude=size) < 16
    return compiled


def check_top_k(layout: str, k: int = K) -> Any:
    found, compiled, given = sharded(layout, lambda x, _: jaxsoftmax.top_k_softmax(x, k))
    top_k_oracle.check(lambda *_, **__: found, given["x"], k)
    return compiled


# Of layouts by how many devices share a row, that is 8 or 16 columns each.
MORE_THAN_A_DEVICE_HAS = {"columns": 17, "explicit columns": 33}


@pytest.mark.parametrize(
    "group, layout",
    [
        *itertools.product((*GROUPS, "top_k"), ("rows and columns", "uneven")),
        *(("rows", "columns"), ("losses", "columns"), ("top_k", "columns"), ("top_k", "explicit columns")),
        *(("options", "uneven columns of some rows"), ("top_k", "uneven columns of some rows")),
    ],
)
def test_columns(stand_ins: Any, group: str, layout: str) -> None:
    compiled = check_top_k(layout, MORE_THAN_A_DEVICE_HAS.get(layout, K)) if group == "top_k" else check(group, layout)
    assert {array.kind for arrays in exchanges(compiled) for array in arrays} >= {"all-gather"}
    # A result of columns that do not divide has no sharding but that of whole rows.
    assert layout.startswith("uneven") or gathers_only_numbers(compiled)
    parts = {p.cols for p in stand_ins.problems if p.op in (Op.STATS, Op.CROSS_ENTROPY, Op.CROSS_ENTROPY_COTANGENT)}
    assert min(parts) < LAYOUTS[layout][2], "a device has a part of the columns"


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, kind, normalize",
    [(P(("d", "m")), EXPLICIT, "top_k"), (P("d", "m"), AUTO, "all"), (P(None, ("d", "m")), EXPLICIT, "top_k")],
    ids=str,
)
def test_long_rows_of_top_k(stand_ins: Any, spec: P, kind: AxisType, normalize: str) -> None:
    """A device counts its part, or finds its chunks' statistics; its candidates are all that others are told."""
    x, k = top_k_oracle.rows(3200, np.float32), 6
    rows, cols = NamedSharding(mesh(), spec).shard_shape(x.shape)
    with jax.set_mesh(mesh(kind)):
        cut = jax.device_put(x, spec)
        compiled = jax.jit(lambda x: jaxsoftmax.top_k_softmax(x, k, normalize=normalize)).lower(cut).compile()
        found = compiled(cut)
    top_k_oracle.check(lambda *_, **__: found, x, k, normalize=normalize)
    sizes = [array.size for arrays in exchanges(compiled) for array in arrays]
    assert sum(sizes) == (rows * (3200 // cols) * (2 * k + 2) if cols < 3200 else 0)
    gradient = jax.grad(lambda x: jnp.sin(jaxsoftmax.top_k_softmax(x, k, normalize=normalize)[0]).sum())
    moved = [array.size for arrays in exchanges(jax.jit(gradient).lower(cut).compile()) for array in arrays]
    assert sum(moved) <= (rows * (3200 // cols) * (3 * k + 2) if cols < 3200 else 0)
    assert all(part.sharding.is_equivalent_to(NamedSharding(mesh(), P(*spec[:1])), 2) for part in found)
    chunk = cols if _top_k.chunk_size(cols, k) == cols else _top_k.rank_chunk_size(cols, k, rows)
    assert chunk in {of_chunk for _, of_chunk, _ in stand_ins.ran(Op.STATS)}


def test_float64_compiled_outside_the_context_it_was_lowered_in() -> None:
    with jax.enable_x64(True):
        x = put(operands(64)["x"].astype(np.float64), P(None, "d"))
        select = jax.jit(lambda x: jaxsoftmax.top_k_softmax(x, K))
        lowered, want = select.lower(x), select(x)
    got = lowered.compile()(x)
    assert got[0].dtype == np.float64
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), got, want)
