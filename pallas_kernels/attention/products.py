"""A tile's scores, Q K^T, as a product under way; and when a product is waited for.

Mosaic's products add to registers, which are cleared before: for heads of 64, 32 of the 466 instructions for a tile of
keys do that. WGMMA can overwrite them as well.
"""

import itertools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import emit
from pallas_kernels.attention import memory
from pallas_kernels.attention.scores import WGMMA

_DEPTH = 16  # columns of 16-bit numbers that an instruction multiplies
_SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes, and how a descriptor names them


def begin(query: jax.Ref, key: Any, cleared: Any = None) -> Any:
    """Begins `query @ key.T`, both in shared memory; without a `cleared` accumulator, in registers that it overwrites.

    What comes back is for `finish` alone.
    """
    if cleared is not None:
        plgpu.wgmma(cleared, query, key.T)
        return cleared
    (rows, head_dim), keys, dtype = query.shape, key.shape[0], jnp.dtype(query.dtype)
    columns = memory.columns_of_tile(head_dim, dtype)

    def begin_product(ctx, query, key):
        bases = [_descriptor(x, head_dim, columns, dtype) for x in (query, key)]
        numbers = keys // 2
        into = "{" + ",".join(f"${i}" for i in range(numbers)) + "}"
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype.name]
        text, operands, numbered = "{ .reg .pred p; wgmma.fence.sync.aligned;", [], itertools.count(numbers)
        for column in range(0, head_dim, _DEPTH):
            # A group of columns lies eight rows behind the one before it.
            offset = (column // columns * 8 * columns + column % columns) * dtype.itemsize
            operands += [arith.addi(base, emit.c64(offset >> 4)) for base in bases]
            text += (
                f" setp.ne.b32 p, {int(column > 0)}, 0; wgmma.mma_async.sync.aligned.m{rows}n{keys}k{_DEPTH}"
                f".f32.{kind}.{kind} {into}, ${next(numbered)}, ${next(numbered)}, p, 1, 1, 0, 0;"
            )
        text += " wgmma.commit_group.sync.aligned; }"
        constraints = ",".join(["=f"] * numbers + ["l"] * len(operands))
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * numbers)})>")
        results = llvm.inline_asm(struct, operands, text, constraints, has_side_effects=True)
        values = [llvm.extractvalue(ir.F32Type.get(), results, [i]) for i in range(numbers)]
        registers = np.empty(WGMMA.to_mgpu().registers_shape((rows, keys)), dtype=object)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        registers.flat[:] = [vector.from_elements(pair, values[i : i + 2]) for i in range(0, numbers, 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None)

    tiled = plgpu.RefType(memory.transforms(columns, dtype))
    result = plgpu.ShapeDtypeStruct((rows, keys), jnp.dtype(jnp.float32), layout=WGMMA)
    return plgpu.inline_mgpu(arg_types=(tiled, tiled), return_type=result)(begin_product)(query, key)


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
        number = emit.elements(x.registers.flat[-1])[-1]
        emit.ptx("{ .reg .pred p; setp.gt.f32 p, $0, 0f7F000000; @p nanosleep.u32 0; }", "f", [number])

    plgpu.inline_mgpu(arg_types=(WGMMA,))(wait_for_numbers)(x)


def _descriptor(ref: ir.Value, head_dim: int, columns: int, dtype: jnp.dtype) -> ir.Value:
    """How WGMMA is told of rows of `head_dim` numbers in swizzled tiles of eight rows and `columns` columns."""
    address = arith.extui(emit.i64(), emit.shared_address(ref))
    place = arith.andi(arith.shrui(address, emit.c64(4)), emit.c64(0x3FFF))
    between_eights = 8 * head_dim * dtype.itemsize
    layout = between_eights >> 4 << 32 | _SWIZZLES[columns * dtype.itemsize] << 62
    return arith.ori(place, emit.c64(layout - (1 << 64) if layout >= 1 << 63 else layout))
