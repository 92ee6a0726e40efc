"""Types of operands that are sharded unlike each other: every function takes them; `test_replicas.py` has values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jaxsoftmax.calls import CALLS, MORE_CALLS, SHARED_CALLS
from tests.jaxsoftmax.sharded import mesh
from tests.jaxsoftmax.transformations import pulled_back
from tests.pairwise import pairwise

EXPLICIT = AxisType.Explicit
SIZES = {"d": 4, "m": 2}
ALL = CALLS | MORE_CALLS | SHARED_CALLS


def fits(shape: tuple[int, ...], axis: int, names: tuple[str, ...], sizes: dict[str, int]) -> bool:
    return shape[axis] > 1 and shape[axis] % int(np.prod([sizes[name] for name in names])) == 0


def options(shape: tuple[int, ...]) -> list[P]:
    """A sharding of the first axis that can be, others of it, and one of the last."""
    along = lambda axis, names: P(*[names if d == axis else None for d in range(len(shape))])
    first = [("m",), ("d",), ("m", "d")]
    found = [next((along(d, n) for d in range(len(shape)) if fits(shape, d, n, SIZES)), P()) for n in first]
    last = len(shape) - 1
    return list(dict.fromkeys([*found, along(last, ("d",)) if shape and fits(shape, last, ("d",), SIZES) else P()]))


def entries(x: Any) -> tuple[Any, ...]:
    """How each axis of a type is sharded."""
    spec = tuple(x.sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def typed(x: jax.Array, spec: P | None, on: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if spec is None else NamedSharding(on, spec))


def check_gradient(name: str, types: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Results and gradients exist for operands of these types, and a gradient has its operand's sharding."""
    call, moving = ALL[name][0], {n: x for n, x in types.items() if x.dtype == jnp.float32}
    rest = {n: x for n, x in types.items() if n not in moving}
    both = lambda moving, rest: pulled_back(lambda moving: call(**{n: (rest | moving)[n] for n in types}), moving)
    _, (gradient,) = jax.eval_shape(both, moving, rest)
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
