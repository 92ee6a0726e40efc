"""Shared memory as the tensor cores read it; the forward kernel's, and what its copies ask of the operands' sizes."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import hardware
from pallas_kernels.attention import bits, pairs, segments
from pallas_kernels.attention.configs import WARPGROUP_ROWS, ForwardConfig
from pallas_kernels.attention.problem import Attention

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
RESERVED_BYTES = 3072  # barriers, lse and alignment


def columns_of_tile(size: int, dtype: jnp.dtype) -> int:
    """Columns of the widest swizzled tile, of 128 bytes at most, that divides `size` columns."""
    return next(c for c in (n // dtype.itemsize for n in (128, 64, 32)) if size % c == 0)


def transforms(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """Of shared memory in swizzled tiles of eight rows and `columns` columns."""
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(columns * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as the tensor cores read it."""
    dtype = jnp.dtype(dtype)
    return plgpu.SMEM(shape, dtype, transforms=transforms(columns_of_tile(shape[-1], dtype), dtype))


def store(target: Any, value: jax.Array) -> None:
    """Writes to global memory as the registers are, where JAX 0.12 would insist on whole sectors."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def _operand_bytes(problem: Attention, config: ForwardConfig, head_dim: int, value_dim: int) -> int:
    """Of queries, keys, values and the bias."""
    numbers = config.query_slots * config.block_q * head_dim + config.stages * config.block_kv * (head_dim + value_dim)
    bias = 0 if problem.bias_dtype is None else config.bias_slots * problem.bias_dtype.itemsize
    return numbers * problem.dtype.itemsize + bias * config.block_q * config.block_kv


def shared_bytes(problem: Attention, config: ForwardConfig) -> int:
    """What a block takes at least: the output may leave by a few columns at a time."""
    head_dim, value_dim = (-(-size // 16) * 16 for size in (problem.head_dim, problem.value_dim))
    columns = columns_of_tile(value_dim, problem.dtype)
    out = config.block_q * columns * problem.dtype.itemsize
    return RESERVED_BYTES + _operand_bytes(problem, config, head_dim, value_dim) + out


def scratch(problem: Attention, config: ForwardConfig, head_dim: int, value_dim: int) -> dict[str, Any]:
    """Shared memory and barriers of a block; the output leaves through what the rest leaves free."""
    w, stages, queries = config.warpgroups, config.stages, config.query_slots * config.warpgroups
    dtype, slots = problem.dtype, config.bias_slots
    taken = _operand_bytes(problem, config, head_dim, value_dim)
    biases = {}
    if slots:
        assert problem.bias_dtype is not None
        biases = {
            "bias_smem": tiled((slots, config.block_q, config.block_kv), problem.bias_dtype),
            "bias_full": plgpu.Barrier(num_barriers=slots),
            "bias_empty": plgpu.Barrier(num_arrivals=w, num_barriers=slots),
        }
    free = (hardware.H200.smem_per_cta - RESERVED_BYTES - taken) // (w * WARPGROUP_ROWS * dtype.itemsize)
    tile = columns_of_tile(value_dim, dtype)
    columns = next((c for c in range(value_dim, 0, -tile) if c <= free and value_dim % c == 0), tile)
    return biases | {
        "query_smem": tiled((queries, WARPGROUP_ROWS, head_dim), dtype),
        "key_smem": tiled((stages, config.block_kv, head_dim), dtype),
        "value_smem": tiled((stages, config.block_kv, value_dim), dtype),
        "out_smem": tiled((w, WARPGROUP_ROWS, columns), dtype),
        "lse_smem": plgpu.SMEM((w, WARPGROUP_ROWS), jnp.float32),
        "query_full": plgpu.Barrier(num_barriers=queries),
        "query_empty": plgpu.Barrier(num_barriers=queries),
        "key_full": plgpu.Barrier(num_barriers=stages),
        "key_empty": plgpu.Barrier(num_arrivals=w, num_barriers=stages),
        "value_full": plgpu.Barrier(num_barriers=stages),
        "landed": plgpu.Barrier(),
        "value_empty": plgpu.Barrier(num_arrivals=w, num_barriers=stages),
    }


def names(problem: Attention) -> tuple[str, ...]:
    """The operands that the problem has, in their order."""
    lengths = [name for name in ("query_lengths", "key_lengths") if getattr(problem, name)]
    ids = ["query_segments", "key_segments"] * problem.segments
    optional = [name for name in ("bias", "mask") if getattr(problem, name) is not None]
    return ("query", "key", "value", *optional, *lengths, *ids, *["sinks"] * problem.sinks)


def addressable(config: ForwardConfig, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The operands as the kernel reads them, and what keys segments and mask let each block of queries see.

    Copies of tiles count rows in eights and columns in sixteens: other sizes cost a padded copy of the operand.
    """
    arrays = dict(arrays)
    for name in ("query", "key", "value"):
        missing = [(0, -arrays[name].shape[axis] % multiple) for axis, multiple in enumerate((1, 8, 1, 16))]
        if any(after for _, after in missing):
            arrays[name] = jnp.pad(arrays[name], missing)
    found, keys = [], arrays["key"].shape[1]
    if "mask" in arrays:
        columns = arrays["mask"].shape[3]
        arrays["mask"] = bits.pack(arrays["mask"], 3)
        found.append(bits.pairs(arrays["mask"], 3, columns, config.block_q, config.block_kv))
    if "query_segments" in arrays:
        ids = arrays["query_segments"], arrays["key_segments"]
        found.append(segments.pairs(*ids, config.block_q, config.block_kv))
        arrays["query_segments"] = arrays["query_segments"][:, None, :, None]
        arrays["key_segments"] = arrays["key_segments"][:, None, None, :]
    if found:
        arrays["spans"] = pairs.spans(functools.reduce(pairs.both, found), -(-keys // config.block_kv))
    return arrays
