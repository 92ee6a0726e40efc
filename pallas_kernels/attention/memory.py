"""Shared memory as the tensor cores read it: swizzled tiles and panels that TMA copies."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention.problem import Attention

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


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


PANEL = 64  # columns of a panel, whose rows of 16-bit numbers take a swizzled line of 128 bytes


def panels(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for `[..., rows, columns]`, as `[..., panels, rows, 64]`: TMA fills a panel from any rows.

    Lines are swizzled by TMA and by WGMMA's descriptors, of which Pallas knows nothing. Where an array in global memory
    ends, TMA fills the rest of a panel with zeros.
    """
    *leading, rows, columns = shape
    assert jnp.dtype(dtype).itemsize == 2
    return plgpu.SMEM((*leading, -(-columns // PANEL), rows, PANEL), dtype)


def store(target: Any, value: jax.Array) -> None:
    """Writes to global memory as the registers are, where JAX 0.12 would insist on whole sectors."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def bias_is_tiled(problem: Attention) -> bool:
    """Whether the bias consists of whole tiles of 8 rows and 128 bytes, none of them repeated: TMA can copy those."""
    if problem.bias is None or problem.bias_dtype is None:
        return False
    return problem.bias[2] % 8 == 0 and problem.bias[3] * problem.bias_dtype.itemsize % 128 == 0
