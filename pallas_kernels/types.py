"""The types of numbers and arrays: in which dtype sums are accumulated, over which axes of a mesh arrays vary."""

from typing import Any

import jax
import jax.numpy as jnp

Dim = Any  # of an array's shape: an int, or a symbolic dimension of `jax.export`, whose type is not public
Index = jax.Array | int  # a number, known before the kernel runs or in it


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Says in which dtype rows are accumulated."""
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize == 8 else jnp.float32)


def varying_like[T](tree: T, like: Any) -> T:
    """Makes the arrays of `tree` vary over the mesh axes of `like` too.

    `shard_map` asks it of a primitive's operands, and of a loop's carry, whose body makes it vary.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(like)))

    def vary(x: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(vary, tree)
