"""One number of each row, from registers to global memory."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic import SPLAT, WARPGROUP, Index, Tile, c32, c64, elements, global_address, ptx, scalar


def store(ref: jax.Ref, row: Index, value: jax.Array, tile: Tile) -> None:
    """Writes a float32 number of each of the tile's rows to `[rows]` in device memory; with 128 lanes, of its one."""

    def store_each(ctx, ref, value, row):
        thread = arith.remui(utils.thread_idx(), c32(WARPGROUP))
        at = arith.addi(scalar(row), arith.divui(thread, c32(tile.lanes)))
        number = value.registers.flat[0]
        if isinstance(number.type, ir.VectorType):
            (number,) = elements(number)
        first_lane = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, c32(tile.lanes)), c32(0))
        exists = arith.cmpi(arith.CmpIPredicate.ult, at, c32(ref_rows))
        offset = arith.muli(arith.extui(ir.IntegerType.get_signless(64), at), c64(4))
        operands = [arith.addi(global_address(ref), offset), number, arith.andi(first_lane, exists)]
        ptx("@$2 st.global.f32 [$0], $1;", "l,f,b", operands)

    ref_rows = ref.shape[0]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tile.layout.reduce(1), SPLAT))(store_each)(ref, value, jnp.int32(row))
