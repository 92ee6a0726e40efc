"""Operands in the host's memory: the device computes in its own, and puts results where the operands are."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


def in_device_memory[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function of arrays for operands in any memory: its results are in that of the first array of floats.

    Arrays that a function makes by itself, such as indices and constants, are in the device's memory. JAX's operations
    take operands in one memory, and kernels read only the device's.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arrays = _arrays((*args, *kwargs.values()))
        if not any(map(_is_in_host, arrays)):
            return function(*args, **kwargs)
        compute: Callable[..., R] = function
        out = compute(*map(_moved, args), **{name: _moved(x) for name, x in kwargs.items()})
        first = next((x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)), arrays[0])
        return jax.device_put(out, HOST, src=DEVICE) if _is_in_host(first) else out

    return call


def _arrays(given: Sequence[object]) -> list[jax.Array]:
    leaves = [leaf for x in given for leaf in (x if isinstance(x, (tuple, list)) else (x,))]
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


def _is_in_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == HOST


def _moved(x: Any) -> Any:
    """Returns an array, or several, in the device's memory; anything else as it is."""
    if isinstance(x, (tuple, list)):
        return jax.tree.map(_moved, x)
    return jax.device_put(x, DEVICE, src=HOST) if isinstance(x, jax.Array) and _is_in_host(x) else x
