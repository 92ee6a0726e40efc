"""What tracing a kernel costs: no call in a body opens a `jit`, which takes three times as long to trace as `lax`."""

import collections

import cases
import jax
import jax.numpy as jnp
import pytest
from attention_cases import KINDS, abstract, problem_of

from pallas_kernels import hardware
from pallas_kernels.attention import dispatch
from pallas_kernels.attention.problem import Op
from pallas_kernels.linear_cross_entropy import forward as linear
from pallas_kernels.softmax.dispatch import KERNELS
from pallas_kernels.softmax.problem import Op as RowOp
from pallas_kernels.softmax.problem import Problem

_LAUNCHES = ("mpmd_map", "core_map", "pallas_call")
# The place of a group among tiles, traced for the first steps, the refills and the tile.
_OF_LINEAR = ("divmod", "floor_divide", "remainder", "_where")


def _inner(value):
    bare = lambda x: getattr(x, "jaxpr", x)
    is_jaxpr = lambda x: hasattr(bare(x), "eqns")
    return [bare(x) for x in jax.tree.leaves(value, is_leaf=is_jaxpr) if is_jaxpr(x)]


def _counts(jaxpr, within=False):
    """The `jit`s within kernels by their names, and how many kernels there are."""
    found = collections.Counter()
    for eqn in jaxpr.eqns:
        launches = eqn.primitive.name in _LAUNCHES
        found["kernels"] += launches
        if within and eqn.primitive.name in ("jit", "pjit"):
            found[eqn.params["name"]] += 1
        for value in eqn.params.values():
            for inner in _inner(value):
                found += _counts(inner, within or launches)
    return found


def _traced(run, operands):
    found = _counts(jax.make_jaxpr(run)(*operands).jaxpr)
    assert found.pop("kernels"), "no kernel was traced"
    return dict(found)


@pytest.mark.parametrize("kind", ["everything", "bias", "positions-window", "causal"])
@pytest.mark.parametrize("op, dim", [(Op.FORWARD, 128), (Op.BACKWARD, 64), (Op.BACKWARD, 256)])
def test_attention(op, dim, kind):
    problem = problem_of(op, KINDS[kind], (512, 512), (dim, dim), "bfloat16", (4, 2))
    found = _traced(dispatch.decide(problem, hardware.H200, named=True).run, abstract(problem))
    # The refill of a stage is traced once, for all places of the forward kernel that refill one.
    assert set(found) <= ({"_fill"} if op is Op.FORWARD else set())


@pytest.mark.parametrize("name, cols", [("warp", 1000), ("online", 1000), ("cluster", 20011), ("grid", 2**20)])
def test_rows(name, cols):
    for op in (RowOp.SOFTMAX, RowOp.CROSS_ENTROPY_GRADIENT):
        problem = Problem(op, 64, cols, jnp.dtype("bfloat16"))
        case = cases.default(KERNELS[name], problem)
        assert not _traced(case.run, cases.shapes(problem))


def test_linear_loss():
    problem = linear.Problem(512, 256, 1024, jnp.dtype("bfloat16"), soft_cap=3.0, entropy=True, weights="tiles")
    shapes = ((512, 256), "bfloat16"), ((256, 1024), "bfloat16"), ((512,), "int32")
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    found = _traced(lambda *x: linear.launch(problem, linear.Config(), *x), operands)
    assert set(found) == {*_OF_LINEAR}
    assert found["divmod"] == 6
