"""What calls are compared with: how fast the card copies, reads and multiplies, in the same run."""

import functools
import importlib
import statistics
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from benchmarks import torch_peers
from benchmarks.protocol import Variant

READ_BLOCKS = 32  # rows of the read probe for each that it writes
_COLS = 8192  # int32 elements of a block of the copy kernel: 64 registers per thread


def _copy_block(x_gmem, y_gmem):
    i = lax.axis_index("block")
    y_gmem[i] = plgpu.load(x_gmem.at[i], layout=plgpu.Layout.WG_STRIDED((_COLS,), vec_size=4), optimized=False)


@jax.jit
def mosaic_copy(x: jax.Array) -> jax.Array:
    """Copies int32 `[blocks, _COLS]`, one block per warpgroup."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = {"grid": (x.shape[0],), "grid_names": ("block",)}
    return plgpu.kernel(_copy_block, out_type=out, **grid, kernel_name="copy")(x)


def _read_blocks(x_gmem, y_gmem):
    i, layout = lax.axis_index("block"), plgpu.Layout.WG_STRIDED((_COLS,), vec_size=4)
    load = lambda j: plgpu.load(x_gmem.at[i * READ_BLOCKS + j], layout=layout, optimized=False)
    y_gmem[i] = functools.reduce(jnp.add, map(load, range(READ_BLOCKS)))


@jax.jit
def mosaic_read(x: jax.Array) -> jax.Array:
    """Sums every `READ_BLOCKS` rows of int32 `[blocks, _COLS]`."""
    blocks = x.shape[0] // READ_BLOCKS
    out = jax.ShapeDtypeStruct((blocks, x.shape[1]), x.dtype)
    return plgpu.kernel(_read_blocks, out_type=out, grid=(blocks,), grid_names=("block",), kernel_name="read")(x)


def read_variant(size: int) -> tuple[Variant, int]:
    """What reads `size` bytes and writes a few, and how many both are; XLA's sum where there is no GPU."""
    shape = READ_BLOCKS * max(1, size // (4 * _COLS * READ_BLOCKS)), _COLS
    x = jax.random.randint(jax.random.key(2), shape, 0, 1000, jnp.int32)
    by_xla = jax.jit(lambda x: x.reshape(-1, READ_BLOCKS, _COLS).sum(1))
    read = mosaic_read if jax.default_backend() == "gpu" else by_xla
    if not bool((read(x) == by_xla(x)).all()):
        raise RuntimeError("the read probe does not read")
    return Variant("read", lambda _: read(x)), x.nbytes + x.nbytes // READ_BLOCKS


def moved_bytes(least_bytes: int) -> int:
    return 2 * 4 * _COLS * max(1, least_bytes // (2 * 4 * _COLS))


def copy_variant(least_bytes: int, buffers: int) -> Variant:
    """The copy in JAX's process that moves as many bytes as the case; XLA's stands in where there is no GPU."""
    shape = moved_bytes(least_bytes) // (2 * 4 * _COLS), _COLS
    keys = jax.random.split(jax.random.key(1), buffers)
    sources = [jax.random.randint(key, shape, 0, jnp.iinfo(jnp.int32).max, jnp.int32) for key in keys]
    name, copy = ("mosaic", mosaic_copy) if jax.default_backend() == "gpu" else ("xla", jax.jit(jnp.copy))
    if not bool((copy(sources[0]) == sources[0]).all()):
        raise RuntimeError("the copy probe does not copy")
    return Variant(f"copy:{name}", lambda k: copy(sources[k]))


def torch_copy_us(least_bytes: int, buffers: int, rounds: int) -> float | None:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    burst = torch_peers.burst(torch, torch_peers.copying(torch, least_bytes, buffers), buffers)
    times = torch_peers.interleaved(torch, {"copy": burst}, rounds)["copy"]
    del burst
    torch.cuda.empty_cache()
    return statistics.median(times)


def best_copy(found: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """The fastest of {method: (microseconds, bytes moved)}, naming all."""
    speeds = {name: round(moved / us / 1e6, 4) for name, (us, moved) in found.items()}
    best = max(speeds, key=lambda name: speeds[name])
    return {"method": best, "us": round(found[best][0], 3), "tb_per_s": speeds[best], "all_tb_per_s": speeds}


@functools.cache
def beside_attention(n: int, copied: int) -> tuple[list[Variant], int]:
    """A matrix product, a copy and a read, and how many bytes the read moves."""
    a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in jax.random.split(jax.random.key(3)))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, b))
    read, read_bytes = read_variant(copied)
    return [Variant("matmul", lambda _: product(a, b)), copy_variant(copied, 1), read], read_bytes
