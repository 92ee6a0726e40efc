"""What tests of sharding share: meshes of the eight CPUs, and what the devices of a compiled program exchange."""

import collections
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def mesh(kind: AxisType = AxisType.Auto, shape: tuple[int, ...] = (4, 2), names: tuple[str, ...] = ("d", "m")) -> Mesh:
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=jax.devices("cpu")[: int(np.prod(shape))])


def put(x: Any, spec: P, on: Mesh | None = None) -> jax.Array:
    return jax.device_put(x, NamedSharding(on or mesh(), spec))


class Exchange(NamedTuple):
    """One array that a collective gives each device."""

    kind: str
    dtype: str
    size: int


def exchanges(compiled: Any) -> list[list[Exchange]]:
    """The collectives of a program, each with its arrays."""
    found = re.findall(rf"= (\(.*?\)|\S+) ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    arrays = [(kind, re.findall(r"(\w+)\[([\d,]*)\]", types)) for types, kind in found]
    size = lambda shape: math.prod(map(int, filter(None, shape.split(","))))
    return [[Exchange(kind, dtype, size(shape)) for dtype, shape in of_one] for kind, of_one in arrays]


def exchanged(function: Callable[..., Any], *operands: Any) -> list[tuple[str, int]]:
    """Each collective of the compiled program, and how many numbers it gives to a device."""
    found = exchanges(jax.jit(function).lower(*operands).compile())
    return sorted((arrays[0].kind, sum(array.size for array in arrays)) for arrays in found)


def collectives(function: Callable[..., Any], *operands: Any) -> dict[str, int]:
    """How often each collective is in the compiled program."""
    return count(jax.jit(function).lower(*operands).compile())


def count(compiled: Any) -> dict[str, int]:
    """How often each collective is in a program."""
    return dict(collections.Counter(arrays[0].kind for arrays in exchanges(compiled)))


def gathers_only_numbers(compiled: Any) -> bool:
    """Whether every array that is gathered is the bits of rows' numbers, as logits never are."""
    arrays = [array for arrays in exchanges(compiled) for array in arrays]
    return all(array.dtype == "s32" for array in arrays if array.kind == "all-gather")
