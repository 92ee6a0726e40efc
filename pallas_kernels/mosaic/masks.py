"""A `where` mask's bytes, in the tile of the logits that they belong to."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic.ptx import SPLAT, Index, c64, elements, global_address, scalar
from pallas_kernels.mosaic.row_scalars import row_of
from pallas_kernels.mosaic.vectors import Span, Tile


def select(ref: jax.Ref, rows: int, row: Index, first: Index, tile: Tile, z: jax.Array, other: float) -> jax.Array:
    """`z` where the mask holds and `other` elsewhere; `ref` is `[rows, cols]` bytes, or `[1, cols]` for all rows."""
    held = _load(ref, rows, row, first, tile)
    return jnp.where(held != 0.0, z, jnp.full_like(z, other))


def inside(shape: tuple[int, int], row: Index, first: Index, tile: Tile, z: jax.Array, other: float) -> jax.Array:
    """`z` in the columns of a `[rows, cols]` array's row, and `other` where the tile hangs over the row's ends."""
    rows, cols = shape
    span = Span(tile, rows, cols, tile.dtype.itemsize)

    def keep_inside(ctx, z, row, first):
        registers, f32 = z.registers.copy(), ir.F32Type.get()
        for v in span.vectors(c64(0), scalar(row), scalar(first)):
            kept = [v.inside] * tile.vector if v.masks is None else v.masks
            numbers = zip(kept, elements(registers.flat[v.register]), strict=True)
            chosen = [arith.select(keep, x, mgpu.utils.c(other, f32)) for keep, x in numbers]
            registers.flat[v.register] = vector.from_elements(ir.VectorType.get((tile.vector,), f32), chosen)
        return mgpu.FragmentedArray(_registers=registers, _layout=z.layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(tile.shape, jnp.dtype(jnp.float32), layout=tile.layout)
    operation = plgpu.inline_mgpu(arg_types=(tile.layout, SPLAT, SPLAT), return_type=result)
    return operation(keep_inside)(z, jnp.int32(row), jnp.int32(first))


def _load(ref: jax.Ref, rows: int, row: Index, first: Index, tile: Tile) -> jax.Array:
    """The mask's bytes as float32, 0 outside the row."""
    mask_rows, cols = ref.shape
    span, layout = Span(tile, rows, cols, tile.dtype.itemsize), tile.layout.to_mgpu()

    def load_mask(ctx, ref, row, first):
        f32, i8 = ir.F32Type.get(), ir.IntegerType.get_signless(8)
        registers = np.empty(layout.registers_shape(tile.shape), dtype=object)
        base = global_address(ref)
        # Zero as a base gives vectors whose "address" is where the logits lie in their array, in bytes.
        for v in span.vectors(c64(0), scalar(row), scalar(first)):
            at = arith.divui(v.address, c64(tile.dtype.itemsize))
            if mask_rows == 1:
                at = arith.subi(at, arith.muli(arith.extsi(at.type, row_of(tile, scalar(row))), c64(cols)))
            held = []
            for e in range(tile.vector):
                inside = v.inside if v.masks is None else v.masks[e]
                place = arith.addi(at, c64(e))
                if v.moved is not None:
                    place = arith.addi(place, arith.extui(place.type, v.moved[e]))
                byte = llvm.inline_asm(
                    ir.IntegerType.get_signless(16),
                    [arith.addi(base, place), inside],
                    "mov.b16 $0, 0; @$2 ld.global.u8 $0, [$1];",
                    "=&h,l,b",
                    has_side_effects=True,
                )
                held.append(arith.uitofp(f32, arith.trunci(i8, byte)))
            registers.flat[v.register] = vector.from_elements(ir.VectorType.get((tile.vector,), f32), held)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(tile.shape, jnp.dtype(jnp.float32), layout=tile.layout)
    operation = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT), return_type=result)
    return operation(load_mask)(ref, jnp.int32(row), jnp.int32(first))
