"""What the memory can do, measured in the same run: the fastest copy to be had, and a read-only stream.

XLA's elementwise code is no ceiling (3.4 TB/s where a copy reaches 4.2), so two real copies are tried and the better
one counts: torch's `copy_` (the driver's own copy, by CUDA events) when torch can be imported beside JAX, and a Mosaic
GPU kernel that loads registers and stores them (by CUPTI, like everything else).
"""

import functools
import importlib
import statistics
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from benchmarks import timing

_COLS = 8192  # int32 elements of a block of the copy kernel: 64 registers per thread


def _copy_block(x_gmem, y_gmem):
    i = lax.axis_index("block")
    y_gmem[i] = plgpu.load(x_gmem.at[i], layout=plgpu.Layout.WG_STRIDED((_COLS,), vec_size=4), optimized=False)


@jax.jit
def mosaic_copy(x: jax.Array) -> jax.Array:
    """Copies int32 `[blocks, _COLS]`, one block per warpgroup."""
    kernel = plgpu.kernel(
        _copy_block,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("block",),
        kernel_name="copy",
    )
    return kernel(x)


@jax.jit
def xla_copy(x: jax.Array) -> jax.Array:
    """XLA's copy: a stand-in where there is no GPU."""
    return jnp.copy(x)


@jax.jit
def row_max(x: jax.Array) -> jax.Array:
    """The read-only probe."""
    return x.max(axis=1)


@functools.partial(jax.jit, static_argnums=1)
def _random_bits(key: jax.Array, blocks: int) -> jax.Array:
    return jax.random.randint(key, (blocks, _COLS), 0, jnp.iinfo(jnp.int32).max, jnp.int32)


def moved_bytes(least_bytes: int) -> int:
    """The bytes a copy probe of about `least_bytes` moves: whole blocks, read and written."""
    return 2 * 4 * _COLS * _blocks(least_bytes)


def copy_variant(least_bytes: int, buffers: int) -> timing.Variant:
    """The copy in JAX's process that moves as many bytes as the case."""
    keys = jax.random.split(jax.random.key(1), buffers)
    sources = [_random_bits(key, _blocks(least_bytes)) for key in keys]
    copy = mosaic_copy if jax.default_backend() == "gpu" else xla_copy
    if not bool((copy(sources[0]) == sources[0]).all()):
        raise RuntimeError("the copy probe does not copy")
    return timing.Variant("copy:mosaic" if copy is mosaic_copy else "copy:xla", lambda k: copy(sources[k]))


def read_variant(least_bytes: int, buffers: int) -> timing.Variant:
    """The read-only probe: as many bytes as the case, read once."""
    keys = jax.random.split(jax.random.key(2), buffers)
    sources = [_random_bits(key, max(1, least_bytes // (4 * _COLS))) for key in keys]
    return timing.Variant("read", lambda k: row_max(sources[k]))


def torch_copy_us(least_bytes: int, buffers: int, rounds: int) -> float:
    """The median time of torch's device-to-device copy, ten launches per pair of events."""
    torch = importlib.import_module("torch")
    elements = max(1, least_bytes // 8)
    sources = [torch.empty(elements, dtype=torch.int32, device="cuda").random_() for _ in range(buffers)]
    targets = [torch.empty_like(source) for source in sources]
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for k in range(10):
            targets[k % buffers].copy_(sources[k % buffers])
        end.record()
        torch.cuda.synchronize()
        times.append(100.0 * start.elapsed_time(end))
    del sources, targets
    torch.cuda.empty_cache()
    return statistics.median(times[1:])


def best_copy(found: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """The fastest of {method: (microseconds, bytes moved)}, naming all."""
    speeds = {name: moved / us / 1e6 for name, (us, moved) in found.items()}
    best = max(speeds, key=lambda name: speeds[name])
    return {
        "method": best,
        "us": round(found[best][0], 3),
        "tb_per_s": round(speeds[best], 4),
        "all_tb_per_s": {name: round(speed, 4) for name, speed in speeds.items()},
    }


def _blocks(least_bytes: int) -> int:
    return max(1, least_bytes // (2 * 4 * _COLS))
