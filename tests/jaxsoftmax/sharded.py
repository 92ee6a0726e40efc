"""What tests of sharding share: meshes of the eight CPUs, and how often the devices of a compiled program exchange."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def mesh(kind: AxisType = AxisType.Auto, shape: tuple[int, ...] = (4, 2), names: tuple[str, ...] = ("d", "m")) -> Mesh:
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=jax.devices("cpu")[: int(np.prod(shape))])


def put(x: Any, spec: P, on: Mesh | None = None) -> jax.Array:
    return jax.device_put(x, NamedSharding(on or mesh(), spec))


def collectives(function: Callable[..., Any], *operands: Any) -> dict[str, int]:
    """How often each collective is in the compiled program."""
    return count(jax.jit(function).lower(*operands).compile())


def count(compiled: Any) -> dict[str, int]:
    """How often each collective is in a program."""
    counts = {name: len(re.findall(rf"= [^=]*? {name}(?:-start)?\(", compiled.as_text())) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}
