"""Operands of one call that are sharded unlike each other: every function takes them, and so do its gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from tests.jaxsoftmax.calls import CALLS, LABELS, MASK, MORE_CALLS, ROW, WEIGHT, Operands, X
from tests.jaxsoftmax.sharded import mesh, put
from tests.pairwise import pairwise

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SIZES = {"d": 4, "m": 2}

COLUMN, LINE = ROW[:, :1], ROW[:1]
ALL = (
    CALLS
    | MORE_CALLS
    | {
        "states": (
            lambda a, b, c, d: jaxsoftmax.merge(*(jaxsoftmax.Stats(x, jnp.exp(y)) for x, y in ((a, b), (c, d)))),
            {"a": ROW, "b": ROW + 1, "c": COLUMN, "d": LINE},
        ),
        "few labels": (
            functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, ignore_index=3),
            {"logits": X, "labels": LABELS[:, :1], "weights": LINE, "where": MASK, "scale": X[:, :, :1]},
        ),
        "mean": (
            functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, reduction="mean"),
            {"logits": X, "labels": LABELS, "weights": LINE, "where": MASK},
        ),
        "few tokens": (
            functools.partial(jaxsoftmax.linear_cross_entropy, logits_soft_cap=4.0, chunk_size=16),
            {"hidden": X, "weight": WEIGHT, "labels": LABELS, "weights": COLUMN, "where": MASK[:, :, :1]},
        ),
        "zigzag": (lambda x: jaxsoftmax.unzigzag(jaxsoftmax.zigzag(x, 4), 4), {"x": X}),
    }
)


def fits(shape: tuple[int, ...], axis: int, names: tuple[str, ...], sizes: dict[str, int]) -> bool:
    return shape[axis] > 1 and shape[axis] % int(np.prod([sizes[name] for name in names])) == 0


def options(shape: tuple[int, ...]) -> list[P]:
    """A sharding of the first axis that can be, others of it, and one of the last."""
    along = lambda axis, names: P(*[names if d == axis else None for d in range(len(shape))])
    first = [("m",), ("d",), ("m", "d")]
    found = [next((along(d, n) for d in range(len(shape)) if fits(shape, d, n, SIZES)), P()) for n in first]
    last = len(shape) - 1
    return list(dict.fromkeys([*found, along(last, ("d",)) if shape and fits(shape, last, ("d",), SIZES) else P()]))


def results(name: str, operands: Operands) -> Any:
    """Results, and the gradient for cotangents that are the results."""
    call, fixed = ALL[name]
    moving = {n: x for n, x in operands.items() if x.dtype == jnp.float32}
    out, pull = jax.vjp(lambda moving: call(**{n: (operands | moving)[n] for n in fixed}), moving)
    return out, pull(jax.tree.map(lambda y: jnp.where(jnp.isfinite(y), y, 0), out))[0]


def entries(x: Any) -> tuple[Any, ...]:
    """How each axis of a type is sharded."""
    spec = tuple(x.sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def typed(x: jax.Array, spec: P | None, on: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if spec is None else NamedSharding(on, spec))


def check_gradient(name: str, types: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Results and gradients exist for operands of these types, and a gradient has its operand's sharding."""
    _, gradient = jax.eval_shape(functools.partial(results, name), types)
    on_mesh = [n for n in gradient if types[n].sharding is not None]
    assert {n: entries(gradient[n]) for n in on_mesh} == {n: entries(types[n]) for n in on_mesh}


@pytest.mark.parametrize("name", ALL)
def test_types(name: str) -> None:
    """Each two operands meet in each two shardings; each is on no mesh, in a context and in none."""
    operands, on = ALL[name][1], mesh(EXPLICIT)
    of = [options(x.shape) for x in operands.values()]
    typed_by = lambda specs: {n: typed(x, spec, on) for (n, x), spec in zip(operands.items(), specs, strict=True)}
    for specs in pairwise(*of):
        check_gradient(name, typed_by(specs))
    for at in range(len(of)) if len(of) > 1 else ():
        types = typed_by([None if i == at else x[0] for i, x in enumerate(of)])
        check_gradient(name, types)
        with jax.set_mesh(on):
            check_gradient(name, types)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", [name for name in ALL if name != "zigzag"])
def test_extents_of_1(name: str, shape: tuple[int, int]) -> None:
    """Last axes, some of which have an extent of 1, over a mesh axis of extent 1."""
    operands, on = ALL[name][1], mesh(EXPLICIT, shape)
    one = "d" if shape[0] == 1 else "m"
    ends = {n: P(*[None] * (x.ndim - 1), one) if x.ndim else P() for n, x in operands.items()}
    check_gradient(name, {n: typed(x, ends[n], on) for n, x in operands.items()})


@pytest.mark.parametrize("name", [name for name, (_, operands) in ALL.items() if len(operands) > 1])
def test_two_meshes(name: str) -> None:
    """The error names the operand that is on another mesh than those before it, sharded or not."""
    call, operands = ALL[name]
    known, other = mesh(EXPLICIT), mesh(EXPLICIT, (2, 4), ("x", "y"))
    run = lambda given: call(**{n: given[n] for n in operands})
    for odd in list(operands)[1:]:
        for spec, of_odd in ((P(), P()), (P("m"), P("x"))):
            fits = lambda x, of: of if x.ndim and x.shape[0] % 2 == 0 else P()
            types = {n: typed(x, fits(x, spec), known) for n, x in operands.items()}
            types[odd] = typed(operands[odd], fits(operands[odd], of_odd), other)
            called = r"\S+" if name in ("states", "merged") else odd
            with pytest.raises(ValueError, match=rf"^\w+: {called} is on a mesh of axes 'x': 2, 'y': 4"):
                jax.eval_shape(run, types)


ACROSS, D, M = P(None, "d"), P("d"), P("m")
# Whether it is compiled as one program, the kind of axes, and an operand's sharding.
VALUES: list[tuple[str, bool, AxisType, dict[str, P]]] = [
    ("softmax of rows scaled", True, EXPLICIT, {"x": P("d", "m"), "scale": D}),
    ("logsumexp", False, EXPLICIT, {"a": P("d", None, "m"), "where": M}),
    ("logsumexp with weights", True, EXPLICIT, {"a": P("d"), "b": D}),
    ("cross_entropy", True, EXPLICIT, {"logits": D, "labels": P("m", "d"), "where": M}),
    ("few labels", False, EXPLICIT, {"logits": M, "labels": D, "weights": ACROSS, "where": P(None, None, "d")}),
    ("few labels", True, AUTO, {"logits": M, "labels": D, "weights": ACROSS, "where": P(None, None, "d")}),
    ("probabilities", True, EXPLICIT, {"logits": D, "labels": P(None, None, "d")}),
    ("few tokens", True, EXPLICIT, {"hidden": D, "labels": M, "weights": M, "where": M, "weight": P("m", "d")}),
    ("weighted linear", False, EXPLICIT, {"hidden": D, "labels": P("m", "d"), "scale": M, "weight": M}),
    ("pages", True, AUTO, {"query": D, "block_tables": M, "lengths": P(("d", "m"))}),
    ("pages", False, EXPLICIT, {"query": M, "key_pages": P(None, None, "d"), "block_tables": D, "lengths": M}),
    ("scaled heads", True, EXPLICIT, {"query": D, "key": M, "value": P(None, "m"), "scale": D}),
    ("states", True, EXPLICIT, {"a": D, "b": ACROSS, "c": M, "d": ACROSS}),
]


@pytest.mark.parametrize("name, compiled, kind, specs", VALUES, ids=str)
def test_values(name: str, compiled: bool, kind: AxisType, specs: dict[str, P]) -> None:
    """Every device has what one device computes, within a program, and outside of one and of a context."""
    operands, on = ALL[name][1], mesh(kind)
    run = functools.partial(results, name)
    want = jax.jit(run)(operands)
    got = (jax.jit(run) if compiled else run)({n: put(x, specs.get(n, P()), on) for n, x in operands.items()})
    for x, truth in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        truth = np.asarray(truth)
        size = np.abs(truth[np.isfinite(truth)]).max(initial=1.0)
        for shard in x.addressable_shards:
            np.testing.assert_allclose(np.asarray(shard.data), truth[shard.index], rtol=1e-3, atol=1e-5 * size)


@pytest.mark.parametrize("compiled", [True, False])
def test_one_row_of_top_k(compiled: bool) -> None:
    """A row on a mesh axis of extent 1, which has a gradient as on no mesh."""
    x, on = X[:1, :1], mesh(EXPLICIT, (1, 2))
    f = lambda x: (lambda y, pull: (y, pull(y)[0]))(*jax.vjp(lambda x: jaxsoftmax.top_k_softmax(x, 3)[0], x))
    for spec in (P("d"), P(None, "d", "m")) if compiled else (P("d"),):
        cut = put(x, spec, on)
        got = (jax.jit(f) if compiled else f)(cut)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, f(x))
        assert jax.typeof(got[1]) == jax.typeof(cut)
