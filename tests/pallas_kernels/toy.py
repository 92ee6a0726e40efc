"""The smallest kernels that can be right or wrong: they prove the test harness itself."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 4


def _kernel(body: Any, x: jax.Array) -> jax.Array:
    parameters = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)
    grid = dict(grid=(x.shape[0] // ROWS,), grid_names=("i",))
    return plgpu.kernel(body, out_type=x, kernel_name="toy", compiler_params=parameters, **grid)(x)


def _layout(x: jax.Array) -> plgpu.Layout:
    v = 16 // x.dtype.itemsize
    tiling = plgpu.Tiling(((ROWS, 32 * v), (v,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def softmax(x: jax.Array, *, rows_written: int = ROWS, shift: int = 0) -> jax.Array:
    """A row to a warp; `rows_written` and `shift` make it leave rows out, or write in the wrong place."""

    def body(x_gmem, y_gmem):
        row = ROWS * lax.axis_index("i")
        z = plgpu.load(x_gmem.at[pl.ds(row, ROWS)], layout=_layout(x), optimized=False).astype(jnp.float32)
        m = z.max(axis=1)
        weights = jnp.exp(z - lax.broadcast_in_dim(jnp.where(m == -jnp.inf, jnp.zeros_like(m), m), z.shape, [0]))
        y = weights * lax.broadcast_in_dim(1.0 / weights.sum(axis=1), z.shape, [0])

        @pl.when(row < rows_written * x.shape[0] // ROWS)
        def _():
            out = y_gmem.at[pl.ds(row + shift, ROWS)]
            y16 = y.astype(x.dtype)
            plgpu.store(out, y16, optimized=False) if hasattr(plgpu, "store") else out.set(y16)

    return _kernel(body, x)


def centre(x: jax.Array) -> jax.Array:
    """Rows less their sums, a warpgroup to a row: sound for one row only, as all reduce through the same scratch."""

    def body(x_gmem, y_gmem):
        row = x_gmem[lax.axis_index("wg")]
        y_gmem[lax.axis_index("wg")] = row - jnp.sum(row)

    parameters = plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=16)
    return plgpu.kernel(body, out_type=x, num_threads=x.shape[0], thread_name="wg", compiler_params=parameters)(x)
