"""Named axes: what follows from a signature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core.axes import Sharded, Signature, over_rows, parse, partition
from tests.jaxsoftmax.sharded import mesh, put

# A product: tokens times embedding, with a bias that broadcasts along the tokens.
LOGITS = ("t0", "t1", "v")
PRODUCT = Signature((("t0", "t1", "e"), ("e", "v"), LOGITS), (LOGITS, ("v",)), LOGITS, ("t0",))
SHAPES = [(4, 6, 5), (5, 8), (1, 6, 8)]
HEADS = Signature((tuple("bn"), tuple("bk")), (tuple("bn"),), tuple("bnk"), ("b",), groups=(("n", "k"),))


@pytest.mark.parametrize(
    "text, several, axes",
    [("te", 3, ("t", "e")), ("*te", 2, ("t0", "t1", "e")), ("*te", 0, ("e",)), ("*t", 1, ("t0",)), ("", 2, ())],
)
def test_a_letter_names_an_axis_and_a_star_several(text, several, axes):
    assert parse(text, several) == axes


def test_an_axis_has_the_extent_of_an_operand_that_does_not_broadcast():
    assert PRODUCT.extents(SHAPES) == {"t0": 4, "t1": 6, "e": 5, "v": 8}
    assert PRODUCT.extents([(1, 6, 5), (5, 8), (1, 1, 1)]) == {"t0": 1, "t1": 6, "e": 5, "v": 8}
    assert PRODUCT.extents([(1, 6, 5), (5, 0), (1, 1, 1)])["v"] == 0


def test_the_first_axis_gets_a_mesh_axis_and_others_stay_whole():
    sizes = {"x": 2, "y": 2}
    entries = PRODUCT.entries(SHAPES, [("x", None, "y"), (None, "y"), (None, None, "x")], sizes)
    assert entries == {"t0": "x", "t1": None, "v": "y"}
    entries = PRODUCT.entries(SHAPES, [(None, None, None), (None, ("x", "y")), (None, "x", None)], sizes)
    assert entries == {"t0": None, "t1": "x", "v": None}
    assert PRODUCT.specs_of(SHAPES, {"t0": "x", "v": "y"}) == [P("x", None, None), P(None, "y"), P(None, None, "y")]
    assert PRODUCT.results_of(SHAPES, {"t0": "x", "v": "y"}) == [P("x", None, "y"), P("y")]
    assert PRODUCT.results_of(SHAPES, {"t0": "x", "v": "y"}, [(1, 6, 8), (8,)]) == [P(None, None, "y"), P("y")]


@pytest.mark.parametrize("key_heads, devices, entry", [(4, 4, "d"), (4, 2, "d"), (2, 4, None), (6, 4, None)])
def test_a_group_stays_sharded_where_devices_have_whole_ones(key_heads, devices, entry):
    for specs in ([(None, "d"), (None, None)], [(None, None), (None, "d")]):
        entries = HEADS.entries([(3, 12), (3, key_heads)], specs, {"d": devices})
        assert entries == {"b": None, "n": entry, "k": entry}


@pytest.mark.parametrize("key_heads", [2, 4])
def test_a_group_has_one_factor_where_extents_are_alike(key_heads):
    rule = HEADS.rule([(3, 4), (1, key_heads)])
    (query, key), (out,) = rule.operand_mappings, rule.result_mappings
    assert tuple(query) == tuple(out)
    assert query[0] != key[0]
    assert (query[1] == key[1]) == (key_heads == 4)


def test_axes_that_devices_do_not_share_have_factors_of_their_own():
    rule = PRODUCT.rule(SHAPES)
    (hidden, weight, bias), (logits, _) = rule.operand_mappings, rule.result_mappings
    assert hidden[2] != weight[0]
    assert bias[0] != hidden[0]
    assert tuple(logits) == (hidden[0], hidden[1], weight[1])
    assert tuple(bias)[1:] == tuple(logits)[1:]


def test_shards_are_whole_problems_where_independent_axes_alone_are_cut_and_alike():
    assert PRODUCT.is_whole_in([(2, 1, 1), (1, 1), (2, 1, 1)])
    assert PRODUCT.is_whole_in([(1, 1, 1), (1, 1), (1, 1, 1)])
    assert not PRODUCT.is_whole_in([(2, 1, 1), (1, 1), (1, 1, 1)])
    assert not PRODUCT.is_whole_in([(1, 2, 1), (1, 1), (1, 2, 1)])
    assert not PRODUCT.is_whole_in([(1, 1, 1), (1, 2), (1, 1, 2)])


def test_types_have_the_shardings_of_their_axes():
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    specs = P("x", None, None), P(None, "y"), P(None, None, None)
    avals = [
        jax.core.ShapedArray(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(SHAPES, specs, strict=True)
    ]
    logits, sums = PRODUCT.types(avals, (jnp.bfloat16, jnp.float32))
    assert (logits.shape, logits.dtype, logits.sharding.spec) == ((4, 6, 8), jnp.bfloat16, P("x", None, "y"))
    assert (sums.shape, sums.dtype, sums.sharding.spec) == ((8,), jnp.float32, P("y"))
    (gradient, _) = PRODUCT.types(avals, (jnp.float32,) * 2, [(1, 6, 8), (8,)])
    assert (gradient.shape, gradient.sharding.spec) == ((1, 6, 8), P(None, None, "y"))


def test_arrays_get_one_sharding_where_their_types_have_shardings():
    explicit, pair = mesh(AxisType.Explicit), Signature((("a", "b"), ("a",)), (("a",),), ("a", "b"))
    sharded, whole = put(np.ones((8, 4)), P("d"), explicit), put(np.ones(8), P(), explicit)
    elsewhere = jnp.ones(8)

    def specs(*arrays, **how):
        seen = []
        jax.jit(lambda *x: seen.extend(jax.typeof(each).sharding.spec for each in pair.unify(x, **how))).trace(*arrays)
        return seen

    assert specs(sharded, whole) == [P("d", None), P("d")]
    assert specs(sharded, elsewhere) == [P("d", None), P(None)]
    assert specs(sharded, elsewhere, everywhere=True) == [P("d", None), P("d")]
    assert pair.unify([elsewhere[:, None], elsewhere])[1] is elsewhere


def test_one_device_computes_with_the_shardings_of_all_axes():
    seen = []

    def compute(shardings, *operands):
        seen.append(shardings)
        return operands

    call = Sharded(PRODUCT, compute)
    operands = [np.zeros(shape) for shape in SHAPES]
    assert [x.shape for x in call.whole(*operands)] == SHAPES
    shard = call.shard_problem(SHAPES, [("x", None, None), (None, "y"), (None,) * 3], {"x": 2, "y": 4})
    shard.run(*operands)
    assert [{axis: (s.names, s.extent) for axis, s in of.items()} for of in seen] == [
        {"t0": ((), 4), "t1": ((), 6), "e": ((), 5), "v": ((), 8)},
        {"t0": (("x",), 4), "t1": ((), 6), "e": ((), 5), "v": (("y",), 8)},
    ]


ROWS = ("axis0", "axis1", "axis2")


@pytest.mark.parametrize("axes, kept", [((1,), ROWS[::2]), ((0, 2), ROWS[1:2]), ((), ROWS)])
def test_results_of_rows(axes, kept):
    signature = over_rows(2, 3, axes, ("full", "reduced", "top_k"))
    assert signature.operands == (ROWS, ROWS)
    assert signature.results == (ROWS, kept, tuple("k" if d in axes else axis for d, axis in enumerate(ROWS)))
    assert (signature.sharded, signature.independent) == (ROWS, kept)


def test_an_axis_without_a_known_extent_is_sharded_as_it_says():
    assert partition(("t", "k"), (3, 1), {"t": "x", "k": "y"}, {"t": 3}) == P("x", "y")
