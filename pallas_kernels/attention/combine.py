"""The merge of splits: the states of one query over several parts of its keys become one state.

Each split of the forward kernel leaves a normalised output and a logsumexp a row, in float32. They are states of the
online softmax, (logsumexp, 1, output), which merge like any others. A warpgroup takes 64 rows and eight columns: the
numbers of many splits fit in its registers, and few rows still fill the chip.
Traffic: all states read once, out and lse written once.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import monoid
from pallas_kernels.attention import gather
from pallas_kernels.hardware import WARPGROUP_ROWS
from pallas_kernels.mosaic import fast_math, ptx
from pallas_kernels.mosaic.ptx import Index

COLUMNS = 8
MOST_AT_ONCE = 32  # states of a row that a thread has registers for; more merge in two launches


def _body(*refs: jax.Ref, count: int, sinks: bool) -> None:
    """Returns a warpgroup's rows and columns of `count` states. A sink is the logit of one more, whose output is 0."""
    parts_ref, lses_ref, *sinks_ref = refs[: 2 + sinks]
    out, lse = refs[2 + sinks :]
    group, row = lax.axis_index("group"), lax.axis_index("row_tile") * WARPGROUP_ROWS
    column = lax.axis_index("column_tile") * COLUMNS

    def load(ref: jax.Ref, part: Index, column: jax.Array | int) -> jax.Array:
        return gather.load_tile(ref, (part, 0, row, column), COLUMNS)

    # Both are loaded before either is used, so that one latency is waited for.
    lses = [load(lses_ref, group * count + i, 0) for i in range(count)]
    parts = [load(parts_ref, group * count + i, column) for i in range(count)]
    logits = lses + [load(ref, 0, 0) for ref in sinks_ref]
    highest = functools.reduce(jnp.maximum, logits)
    weights = [monoid.decay(x, highest) for x in logits]
    total = functools.reduce(jnp.add, weights)
    unseen = functools.reduce(jnp.maximum, lses) == -jnp.inf
    summed = functools.reduce(jnp.add, [x * weight for x, weight in zip(parts, weights, strict=False)])
    merged = ptx.where(unseen, jnp.zeros_like(summed), summed / total)
    gather.store_tile(out, merged.astype(out.dtype), (group, row, column))

    @pl.when(column == 0)
    def _():
        of_rows = ptx.where(unseen, jnp.full_like(total, -jnp.inf), highest + fast_math.log(total))
        gather.store_tile(lse, of_rows, (group, row, 0))


def run(parts: jax.Array, lses: jax.Array, sinks: jax.Array | None, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Merges outputs `[splits, ..., heads, D]` and their logsumexps `[splits, ..., heads]`, with `sinks [heads]`.

    Returns the output in `dtype`, and the logsumexp in float32.
    """
    splits, *shape, columns = parts.shape
    rows = math.prod(shape)
    arrays = parts.reshape(splits, 1, rows, columns), lses.reshape(splits, 1, rows, 1)
    if splits > MOST_AT_ONCE:
        groups = next(n for n in range(2, splits) if splits % n == 0 and splits // n <= MOST_AT_ONCE)
        merged = _merge(*arrays, groups=groups, dtype=jnp.dtype("float32"))
        arrays = tuple(x[:, None] for x in merged)
    if sinks is not None:
        arrays = (*arrays, jnp.broadcast_to(sinks, shape).reshape(1, 1, rows, 1))
    out, lse = _merge(*arrays, groups=1, dtype=dtype)
    return out.reshape(*shape, columns), lse.reshape(shape)


def _merge(*arrays: jax.Array, groups: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Merges the states of each of `groups` groups of parts, `[parts, 1, rows, columns]`."""
    splits, _, rows, columns = arrays[0].shape
    return plgpu.kernel(
        functools.partial(_body, count=splits // groups, sinks=len(arrays) > 2),
        out_type=(
            jax.ShapeDtypeStruct((groups, rows, columns), dtype),
            jax.ShapeDtypeStruct((groups, rows, 1), jnp.float32),
        ),
        grid=(groups, -(-rows // WARPGROUP_ROWS), columns // COLUMNS),
        grid_names=("group", "row_tile", "column_tile"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        kernel_name="attention_combine",
    )(*arrays)
