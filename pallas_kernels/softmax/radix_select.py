"""Radix select: the columns of the k largest numbers of each row, in the row's order.

A warp holds a row in registers, 32 columns in each. It finds the k-th largest key bit by bit, by counting the keys that
are at least as large. Then the lanes vote, 32 columns at a time, which number the selected columns: those with larger
keys, and the first of those with this key, as many as are left. Nothing is sorted.
Traffic: 1 read; k words a row written.
Source: Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units", for the search by digits.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hardware import Device, supports_kernels
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import WARPS

MAX_COLS = 1024
# The bits that numbers of a dtype take as float32, from the sign on.
KEY_BITS = {"bfloat16": 16, "float16": 19, "float32": 32}
_LANES = 32
_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, _LANES), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def unsupported(keys: jax.Array | jax.ShapeDtypeStruct, device: Device) -> str | None:
    """Why the kernel does not take the `keys`, or None where it does."""
    if not all(isinstance(n, int) for n in keys.shape):
        return f"the kernel takes known sizes; the keys have {keys.shape}"
    rows, cols = math.prod(keys.shape[:-1]), keys.shape[-1]
    if keys.dtype.name not in KEY_BITS:
        return f"the kernel takes {', '.join(KEY_BITS)}; the keys are {keys.dtype.name}"
    if cols > MAX_COLS:
        return f"a warp holds {MAX_COLS} columns; there are {cols}"
    if not 0 < rows < 2**31:
        return f"the kernel takes 1 to 2^31 rows; there are {rows}"
    return supports_kernels(device)


def _load(ref: jax.Ref, first: jax.Array, width: int) -> jax.Array:
    """Four rows as float32. Outside are NaN with all bits set, the least of all keys."""
    rows, cols = ref.shape
    size, layout = jnp.dtype(ref.dtype).itemsize, _LAYOUT.to_mgpu()

    def load_keys(ctx, ref, first):
        f32, element = ir.F32Type.get(), ir.MemRefType(ref.type).element_type
        lane, row = _lane_and_row(ptx.scalar(first))
        index = ptx.add(ptx.mul(arith.extui(ptx.i64(), row), cols), arith.extui(ptx.i64(), lane))
        address, exists = ptx.add(ptx.global_address(ref), ptx.mul(index, size)), ptx.compare("ult", row, rows)
        least = arith.bitcast(f32, ptx.c32(-1))
        registers = np.empty(layout.registers_shape((WARPS, width)), dtype=object)
        for j, column in enumerate(range(0, width, _LANES)):
            inside = arith.andi(exists, ptx.compare("ult", lane, min(cols - column, _LANES)))
            x = arith.bitcast(element, ptx.load_if(ptx.add(address, size * column), inside, 8 * size))
            # After the conversion, in which a float16 NaN may lose its bits.
            x = arith.select(inside, x if element == f32 else arith.extf(f32, x), least)
            registers.flat[j] = vector.from_elements(ir.VectorType.get((1,), f32), [x])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return ptx.inline(load_keys, ref, first, result=((WARPS, width), jnp.float32, _LAYOUT))


def _store(ref: jax.Ref, order: jax.Array, left: jax.Array, first: jax.Array) -> None:
    """Writes the columns where `order` is above 0, and the first `left` of a row where it is 0."""
    rows, k = ref.shape

    def store_selected(ctx, ref, order, left, first):
        lane, row = _lane_and_row(ptx.scalar(first))
        earlier_lanes = ptx.asm_value("mov.u32 $0, %lanemask_lt;", "=r", [])
        in_row = ptx.add(ptx.global_address(ref), ptx.mul(arith.extui(ptx.i64(), row), 4 * k))
        exists, limit = ptx.compare("ult", row, rows), ptx.row_value(left)
        equals = selected = ptx.c32(0)  # in the columns before

        def number(holds: ir.Value, before: ir.Value) -> tuple[ir.Value, ir.Value]:
            """How many lanes and columns before have it, and how many have it after these 32 columns."""
            votes = ptx.asm_value("vote.sync.ballot.b32 $0, $1, -1;", "=r,b", [holds])
            here = ptx.add(before, llvm.intr_ctpop(ptx.bit_and(votes, earlier_lanes)))
            return here, ptx.add(before, llvm.intr_ctpop(votes))

        for j, register in enumerate(order.registers.flat):
            (x,) = ptx.elements(register)
            is_equal = ptx.compare("eq", x, 0)
            at, equals = number(is_equal, equals)
            is_selected = arith.ori(ptx.compare("sgt", x, 0), arith.andi(is_equal, ptx.compare("ult", at, limit)))
            at, selected = number(is_selected, selected)
            address = ptx.add(in_row, ptx.mul(arith.extui(ptx.i64(), at), 4))
            column, writes = ptx.add(lane, _LANES * j), arith.andi(is_selected, exists)
            ptx.asm("@$2 st.global.b32 [$0], $1;", "l,r,b", [address, column, writes])

    ptx.inline(store_selected, ref, (order, _LAYOUT), (left, _LAYOUT.reduce(1)), first)


def _lane_and_row(first: ir.Value) -> tuple[ir.Value, ir.Value]:
    thread = ptx.thread_in_warpgroup()
    return ptx.rem(thread, _LANES), ptx.add(first, ptx.div(thread, _LANES))


def _count(held: jax.Array) -> jax.Array:
    """How many hold in each row."""
    return jnp.where(held, 1.0, 0.0).sum(axis=1)


def _body(keys_ref: jax.Ref, out_ref: jax.Ref, *, k: int) -> None:
    shape = WARPS, pl.cdiv(keys_ref.shape[1], _LANES) * _LANES
    bits = KEY_BITS[jnp.dtype(keys_ref.dtype).name]
    first = lax.axis_index("rows") * WARPS
    words = lax.bitcast_convert_type(_load(keys_ref, first, shape[1]), jnp.int32)
    # Integers in the order of the numbers, without the bits in which none differ.
    keys = (words ^ ((words >> 31) & 0x7FFFFFFF)) >> (32 - bits)
    over_row = lambda x: plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), _LAYOUT)

    def add_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        larger = found + lax.shift_left(jnp.int32(1), bits - 1 - i)
        return jnp.where(_count(keys >= over_row(larger)) >= k, larger, found)

    smallest = plgpu.layout_cast(jnp.full((WARPS,), -(1 << (bits - 1)), jnp.int32), _LAYOUT.reduce(1))
    kth = over_row(ptx.no_unroll(0, bits, add_bit, smallest))
    left = (k - _count(keys > kth)).astype(jnp.int32)
    order = jnp.where(keys > kth, 1, jnp.where(keys == kth, 0, -1))
    _store(out_ref, order, left, first)


def run(keys: jax.Array, k: int) -> jax.Array:
    """The places of the `k` largest of `keys [..., cols]`, of equal ones the first: int32 `[..., k]`, ascending.

    NaN is larger than all numbers, or smaller if its sign is set, and 0 is larger than -0.
    """
    *lead, cols = keys.shape
    rows = math.prod(lead)
    kernel = plgpu.kernel(
        functools.partial(_body, k=k),
        out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        grid=(pl.cdiv(rows, WARPS),),
        grid_names=("rows",),
        kernel_name="radix_select",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )
    return kernel(keys.reshape(rows, cols)).reshape(*lead, k)
