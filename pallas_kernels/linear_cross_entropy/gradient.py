"""The gradient of the logits of `hidden @ weight` from their weights, in the place of these.

It is needed where the forward kernel's weights cannot be factors of the gradient's products themselves: where they are
relative to the maxima of tiles, or a row's gradient is no multiple of them. A CTA takes 64 tokens and the columns of a
tile: each row has a factor there, and one of all its columns is the label's. XLA would write the gradient beside the
weights, into as much memory again.
Traffic: the weights, read and written once.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import ptx, reduce
from pallas_kernels.mosaic.ptx import ROW, WGMMA
from pallas_kernels.mosaic.wgmma import tiled

ROWS = 64
_PART = 64  # columns that are in registers together


def _body(needed: jax.Ref, *refs: jax.Ref, columns: int) -> None:
    pl.when(needed[0] != 0)(functools.partial(_write, *refs, columns=columns))


def _write(
    factors: jax.Ref, of_labels: jax.Ref, labels: jax.Ref, weights: jax.Ref, *scratch: Any, columns: int
) -> None:
    smem, barrier = scratch
    tile, rows = lax.axis_index("tile"), pl.ds(lax.axis_index("row") * ROWS, ROWS)
    here = weights.at[rows, pl.ds(tile * columns, columns)]
    plgpu.copy_gmem_to_smem(here, smem, barrier)
    load = lambda ref: plgpu.load(ref, layout=ROW, optimized=False)
    factor, of_label, label = load(factors.at[tile, rows]), load(of_labels.at[rows]), load(labels.at[rows])
    plgpu.barrier_wait(barrier)
    for start in range(0, columns, _PART):
        part = smem.at[:, pl.ds(start, _PART)]
        x = plgpu.load(part, layout=WGMMA, optimized=False).astype(jnp.float32)
        by_row = lambda value, x=x: lax.broadcast_in_dim(value, x.shape, [0])
        # A row with a factor of 0 may have weights that are NaN.
        probability = ptx.where(by_row(factor) == 0, jnp.zeros_like(x), x * by_row(factor))
        at = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=WGMMA) + (tile * columns + start)
        of_column = ptx.where(at == by_row(label), by_row(of_label), jnp.zeros_like(x))
        part[...] = (probability - of_column).astype(part.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, here)
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames="columns")
def run(
    needed: jax.Array, weights: jax.Array, factors: jax.Array, of_labels: jax.Array, labels: jax.Array, *, columns: int
) -> jax.Array:
    """Writes `weights * factor - of_label * [column == label]` over `weights [tokens, vocabulary]`, where `needed`.

    Tiles of `columns` columns have `factors [tiles, tokens]`, and `of_labels` and `labels` are of rows. Where a factor
    is 0, so is its product. The tokens are a multiple of 64.
    """
    tokens, vocabulary = weights.shape
    kernel = plgpu.kernel(
        functools.partial(_body, columns=columns),
        out_type=(),
        grid=(pl.cdiv(vocabulary, columns), tokens // ROWS),
        grid_names=("tile", "row"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[tiled((ROWS, columns), weights.dtype), plgpu.Barrier()],
        kernel_name="linear_cross_entropy_gradient",
    )
    flag = needed.astype(jnp.int32).reshape(1)
    return reduce.with_workspace(kernel, (flag, factors, of_labels, labels), [weights], ())[1][0]
