"""A tile's scores, Q K^T, as a product under way; and when a product is waited for.

Mosaic's products add to registers, which are cleared before: for heads of 64, 32 of the 466 instructions for a tile of
keys do that. WGMMA can overwrite them as well.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention import memory
from pallas_kernels.attention.scores import WGMMA
from pallas_kernels.mosaic import ptx

_DEPTH = 16  # columns of 16-bit numbers that an instruction multiplies
_SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes, and how a descriptor names them


def begin(left: Any, right: Any, cleared: Any = None) -> Any:
    """Begins `left @ right.T`, both in shared memory; without a `cleared` accumulator, in registers that it overwrites.

    What comes back is for `finish` alone.
    """
    if cleared is not None:
        plgpu.wgmma(cleared, left, right.T)
        return cleared
    return begin_pieces([left], right)


def begin_pieces(left: Sequence[Any], right: Any) -> jax.Array:
    """The same in registers that it overwrites, where the columns of `left` are in several arrays."""
    rows, numbers, dtype = left[0].shape[0], right.shape[0] // 2, jnp.dtype(right.dtype)
    widths = [x.shape[1] for x in (*left, right)]
    columns = memory.columns_of_tile(left[0].shape[1], dtype)

    def begin_product(ctx, *refs):
        places = [arith.andi(arith.shrui(ptx.shared_address(ref), ptx.c32(4)), ptx.c32(0x3FFF)) for ref in refs]
        into = "{" + ",".join(f"${i}" for i in range(numbers)) + "}"
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype.name]
        text, operands, numbered = "{ .reg .pred p; wgmma.fence.sync.aligned;", [], itertools.count(numbers)
        for column in range(0, widths[-1], _DEPTH):
            here, within = divmod(column, widths[0])
            for i, at in ((here, within), (-1, column)):
                # A group of columns lies eight rows behind the one before it.
                offset = (at // columns * 8 * columns + at % columns) * dtype.itemsize
                place = arith.addi(places[i], ptx.c32(offset >> 4))
                operands.append(_descriptor(place, widths[i], columns * dtype.itemsize, dtype))
            text += (
                f" setp.ne.b32 p, {int(column > 0)}, 0; wgmma.mma_async.sync.aligned.m{rows}n{2 * numbers}k{_DEPTH}"
                f".f32.{kind}.{kind} {into}, ${next(numbered)}, ${next(numbered)}, p, 1, 1, 0, 0;"
            )
        text += " wgmma.commit_group.sync.aligned; }"
        constraints = ",".join(["=f"] * numbers + ["l"] * len(operands))
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * numbers)})>")
        results = llvm.inline_asm(struct, operands, text, constraints, has_side_effects=True)
        values = [llvm.extractvalue(ir.F32Type.get(), results, [i]) for i in range(numbers)]
        registers = np.empty(WGMMA.to_mgpu().registers_shape((rows, 2 * numbers)), dtype=object)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        registers.flat[:] = [vector.from_elements(pair, values[i : i + 2]) for i in range(0, numbers, 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None)

    tiled = plgpu.RefType(memory.transforms(columns, dtype))
    result = plgpu.ShapeDtypeStruct((rows, 2 * numbers), jnp.dtype(jnp.float32), layout=WGMMA)
    operation = plgpu.inline_mgpu(arg_types=(tiled,) * len(widths), return_type=result)
    return operation(begin_product)(*left, right)


def finish(begun: Any, *, later: int) -> jax.Array:
    """The product, once it is there; the `later` products begun after it may still be under way."""
    if not isinstance(begun, jax.Array):
        return plgpu.wgmma_accumulator_load(begun, wait_n=later)
    plgpu.wgmma_wait(later)
    return lax.optimization_barrier(begun)


def wait_behind(x: jax.Array) -> None:
    """The next wait for a product comes behind what makes `x`, numbers below 2^127.

    ptxas moves a wait up, before exponentials that should hide the product, but not past an instruction by which a
    thread may sleep, nor that past the number that it depends on. No thread sleeps. What makes the last number is most.
    """

    def wait_for_numbers(ctx, x):
        number = ptx.elements(x.registers.flat[-1])[-1]
        ptx.asm("{ .reg .pred p; setp.gt.f32 p, $0, 0f7F000000; @p nanosleep.u32 0; }", "f", [number])

    plgpu.inline_mgpu(arg_types=(WGMMA,))(wait_for_numbers)(x)


def _descriptor(place: ir.Value, width: int, swizzle: int, dtype: jnp.dtype) -> ir.Value:
    """How WGMMA is told of rows of `width` numbers from `place` on, in tiles of eight rows and `swizzle` bytes."""
    between_eights = 8 * width * dtype.itemsize
    layout = between_eights >> 4 << 32 | _SWIZZLES[swizzle] << 62
    return arith.ori(arith.extui(ptx.i64(), place), ptx.c64(layout - (1 << 64) if layout >= 1 << 63 else layout))
