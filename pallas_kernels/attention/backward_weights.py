"""From a tile's products K Q^T, transposed, to the probabilities that the forward had: its logits against their sum."""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import elementary, emit
from pallas_kernels.attention import backward_bias, gather
from pallas_kernels.attention.backward_blocks import Block, Compare, Step
from pallas_kernels.attention.configs import WARPGROUP_ROWS
from pallas_kernels.attention.problem import Attention
from pallas_kernels.elementary import LOG2E
from pallas_kernels.emit import Index

WGMMA = plgpu.Layout.WGMMA
COLUMN = WGMMA.reduce(0)


def by_column(ref: Any, shape: tuple[int, ...]) -> jax.Array:
    """One number a column, of float32 in shared memory, for all rows of `shape`."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=COLUMN, optimized=False), shape, [1])


def load_early(block: Block, step: Step, warpgroup: Any, release: Any = None) -> dict[str, jax.Array]:
    """What a tile needs of mask and bias that is asked for before the products are there.

    The mask's bits are two registers; of a bias in shared memory nobody waits for the loads afterwards.
    """
    found = {}
    if block.problem.mask:
        corner = block.batch, step.head, *_corner(block, step, warpgroup)
        found["held"] = gather.load_bits(block.refs.mask, 2, corner, block.config.block_q)
    if block.config.bias_slots:
        found["bias"] = backward_bias.read(block, step, warpgroup, release)
    return found


def load_late(block: Block, step: Step, warpgroup: Any) -> dict[str, jax.Array]:
    """The bias that each thread loads for itself: there are no registers for it before."""
    if not block.problem.bias or block.config.bias_slots:
        return {}
    corner = block.batch, step.head, *_corner(block, step, warpgroup)
    return {"bias": gather.load_tile(block.refs.bias, corner, block.config.block_q)}


def bent(problem: Attention, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The products scaled and capped, times log2(e), and the cap's derivative."""
    if problem.soft_cap is None:
        return x * (problem.scale * LOG2E), None
    # tanh(y) = 1 - 2 / (1 + exp(2 y)): the hardware's tanh errs by 2^-11.
    tanh = 1.0 - 2.0 / (1.0 + elementary.exp_16bit(x * (2 * problem.scale / problem.soft_cap)))
    return tanh * (problem.soft_cap * LOG2E), 1.0 - tanh * tanh


def probabilities(
    block: Block, step: Step, warpgroup: Any, x: jax.Array, extras: dict[str, jax.Array], compare: Compare
) -> jax.Array:
    """The probabilities of `bent` products `x [64 keys, queries]`; `compare`: indices, ids and mask."""
    problem, refs = block.problem, block.refs
    corner = block.batch, step.head, *_corner(block, step, warpgroup)
    if problem.bias:
        x = x + extras["bias"].astype(jnp.float32) * LOG2E
    compared = functools.partial(_compared, block, extras, corner)
    if problem.hidden_by_data:
        x = lax.cond(compare, compared, lambda x: x, x)
    elif compare:
        x = compared(x)
    lse = by_column(refs.lse_smem.at[lax.rem(step.n, block.config.stages)], x.shape)
    return elementary.weight_in_sum(x, lse)


def _corner(block: Block, step: Step, warpgroup: Any) -> tuple[jax.Array, jax.Array]:
    """A tile's first key and query."""
    return block.first_key + warpgroup * WARPGROUP_ROWS, step.i * block.config.block_q


def _compared(block: Block, extras: dict[str, jax.Array], corner: gather.Corner, x: jax.Array) -> jax.Array:
    """`x` with -inf where indices, mask or segments forbid it."""
    x = _in_bounds(block, x, *corner[2:])
    if block.problem.mask:
        x = gather.keep_held(x, extras["held"])
    if block.problem.segments:
        x = gather.keep_equal(x, block.refs.key_segments, block.refs.query_segments, corner)
    return x


def _in_bounds(block: Block, x: jax.Array, key: Index, row: Index) -> jax.Array:
    """`x` with -inf where a query of `row` ... does not see a key of `key` ... by its place, or there is none."""
    keys, _, left, right = block.sequence
    shape, ragged = x.shape, block.ragged
    limits = [keys - key if ragged else WARPGROUP_ROWS]
    limits += [row - key + right if right is not None else 0, row - key + left if left is not None else 0]

    def mask_tile(ctx, x, keys, most, least):
        registers = x.registers.copy()
        lane = arith.remui(utils.thread_idx(), emit.c32(32))
        warp = arith.divui(emit.thread_in_warpgroup(), emit.c32(32))
        first = arith.addi(arith.muli(warp, emit.c32(16)), arith.divui(lane, emit.c32(4)))
        column = arith.muli(arith.remui(lane, emit.c32(4)), emit.c32(2))
        outside = utils.c(-math.inf, ir.F32Type.get())
        keys, most, least = (emit.scalar(v) for v in (keys, most, least))
        for r in range(2):
            at = arith.addi(first, emit.c32(8 * r))
            # The register's column is a constant, so that each comparison is one instruction.
            lowest = arith.subi(arith.subi(at, most), column)
            highest = arith.subi(arith.subi(at, least), column)
            exists = arith.cmpi(arith.CmpIPredicate.slt, at, keys)
            for j in range(shape[1] // 8):
                values = []
                for e, value in enumerate(emit.elements(registers.flat[2 * j + r])):
                    tests = [exists] if ragged else []
                    constant = emit.c32(8 * j + e)
                    if right is not None:
                        tests.append(arith.cmpi(arith.CmpIPredicate.sge, constant, lowest))
                    if left is not None:
                        tests.append(arith.cmpi(arith.CmpIPredicate.sle, constant, highest))
                    for test in tests:
                        value = arith.select(test, value, outside)
                    values.append(value)
                registers.flat[2 * j + r] = vector.from_elements(registers.flat[2 * j + r].type, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=WGMMA)
    operation = plgpu.inline_mgpu(arg_types=(WGMMA, *[emit.SPLAT] * 3), return_type=result)
    return operation(mask_tile)(x, *(jnp.int32(limit) for limit in limits))
