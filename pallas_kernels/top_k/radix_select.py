"""Radix select: the columns of the k largest numbers of each row, in the row's order or in that of the numbers.

A warp holds a row in registers, 32 columns in each. It finds the k-th largest key bit by bit, by counting the keys that
are at least as large. Then the lanes vote, 32 columns at a time, which number the selected columns: those with larger
keys, and the first of those with this key, as many as are left. To sort few, each is compared with all of them.
Traffic: 1 read; k words a row written.
Source: Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units", for the search by digits.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import WARPS

MAX_COLS = 1024
# The bits that numbers of a dtype take as float32, from the sign on.
KEY_BITS = {"bfloat16": 16, "float16": 19, "float32": 32}
_LANES = 32
_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, _LANES), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The places of the `k` largest of each row of keys `[rows, cols]`; `ordered`: that of the largest comes first."""

    rows: int
    cols: int
    k: int
    dtype: jnp.dtype
    ordered: bool = False


@dataclasses.dataclass(frozen=True)
class Config:
    """`sorts`: the kernel puts the places in the order of their keys, each of which it compares with all k."""

    sorts: bool = False


def unsupported(problem: Problem, device: Device) -> str | None:
    """Says why the kernel does not take the keys, or None where it does."""
    rows, cols, k = problem.rows, problem.cols, problem.k
    if not (isinstance(rows, int) and isinstance(cols, int)):
        return f"the kernel takes known sizes; the keys have {rows} rows of {cols}"
    if problem.dtype.name not in KEY_BITS:
        return f"the kernel takes {', '.join(KEY_BITS)}; the keys are {problem.dtype}"
    if cols > MAX_COLS:
        return f"a warp holds {MAX_COLS} columns; there are {cols}"
    if not 0 < k <= cols:
        return f"the kernel selects 1 to {cols} of {cols} columns, not {k}"
    if not 0 < rows < 2**31:
        return f"the kernel takes 1 to 2^31 rows; there are {rows}"
    return None


def _load(ref: jax.Ref, first: jax.Array, width: int) -> jax.Array:
    """Loads four rows as float32. Outside are NaN with all bits set, the least of all keys."""
    rows, cols = ref.shape
    size, layout = jnp.dtype(ref.dtype).itemsize, _LAYOUT.to_mgpu()

    def load_keys(ctx, ref, first):
        f32, element = ir.F32Type.get(), ir.MemRefType(ref.type).element_type
        warp, lane = _warp_and_lane()
        row = ptx.add(ptx.scalar(first), warp)
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

    return ptx.inline(
        load_keys,
        ref,
        first,
        result=((WARPS, width), jnp.float32, _LAYOUT),
        static={"cols": cols, "rows": rows, "width": width},
    )


def _stage(columns: jax.Ref, staged_keys: jax.Ref | None, keys: jax.Array, order: jax.Array, left: jax.Array) -> None:
    """Stages the selected columns of each row in SMEM, in the row's order, and their keys if these have a place there.

    Selected are those whose `order` is above 0, and the first `left` of those where it is 0.
    """
    k = columns.shape[1]

    def stage_selected(ctx, columns, keys, order, left, *staged_keys):
        warp, lane = _warp_and_lane()
        earlier_lanes = ptx.asm_value("mov.u32 $0, %lanemask_lt;", "=r", [])
        of_columns, *of_keys = _row_addresses((columns, *staged_keys), warp, k)
        limit = ptx.row_value(left)
        equals = selected = ptx.c32(0)  # in the columns before

        def number(holds: ir.Value, before: ir.Value) -> tuple[ir.Value, ir.Value]:
            """Returns how many earlier lanes and columns hold it, and how many do after these 32 columns."""
            votes = ptx.asm_value("vote.sync.ballot.b32 $0, $1, -1;", "=r,b", [holds])
            here = ptx.add(before, llvm.intr_ctpop(ptx.bit_and(votes, earlier_lanes)))
            return here, ptx.add(before, llvm.intr_ctpop(votes))

        for j, (register, key_register) in enumerate(zip(order.registers.flat, keys.registers.flat, strict=True)):
            (x,), (key,) = ptx.elements(register), ptx.elements(key_register)
            is_equal = ptx.compare("eq", x, 0)
            at, equals = number(is_equal, equals)
            is_selected = arith.ori(ptx.compare("sgt", x, 0), arith.andi(is_equal, ptx.compare("ult", at, limit)))
            at, selected = number(is_selected, selected)
            for start, value in ((of_columns, ptx.add(lane, _LANES * j)), *((start, key) for start in of_keys)):
                address = ptx.add(start, ptx.mul(at, 4))
                ptx.asm("@$2 st.shared.b32 [$0], $1;", "r,r,b", [address, value, is_selected])
        ptx.asm("bar.warp.sync -1;", "", [])

    refs = () if staged_keys is None else (staged_keys,)
    ptx.inline(stage_selected, columns, (keys, _LAYOUT), (order, _LAYOUT), (left, _LAYOUT.reduce(1)), *refs)


# How many of the keys from the address $1 on come before the key $2 in slot $3: larger ones, and equal ones in front.
_RANK = """{{
.reg .pred before, same, more; .reg .b32 other, slot, at;
mov.b32 $0, 0; mov.b32 slot, 0; mov.b32 at, $1;
AGAIN: ld.shared.b32 other, [at];
setp.gt.s32 before, other, $2; setp.eq.s32 same, other, $2; setp.lt.and.u32 same, slot, $3, same;
@before add.u32 $0, $0, 1; @same add.u32 $0, $0, 1;
add.u32 slot, slot, 1; add.u32 at, at, 4; setp.lt.u32 more, slot, {k};
@more bra AGAIN; }}"""


def _store(ref: jax.Ref, columns: jax.Ref, staged_keys: jax.Ref | None, first: jax.Array) -> None:
    """Writes the staged columns, in the order of their keys if these are staged too."""
    rows, k = ref.shape

    def load(start: ir.Value, slot: ir.Value, inside: ir.Value) -> ir.Value:
        address = ptx.add(start, ptx.mul(slot, 4))
        return ptx.asm_value("mov.b32 $0, 0; @$2 ld.shared.b32 $0, [$1];", "=&r,r,b", [address, inside])

    def store_selected(ctx, ref, columns, first, *staged_keys):
        warp, lane = _warp_and_lane()
        row = ptx.add(ptx.scalar(first), warp)
        in_row = ptx.add(ptx.global_address(ref), ptx.mul(arith.extui(ptx.i64(), row), 4 * k))
        of_columns, *of_keys = _row_addresses((columns, *staged_keys), warp, k)
        exists = ptx.compare("ult", row, rows)
        for i in range(0, k, _LANES):
            slot = ptx.add(lane, i)
            inside = arith.andi(exists, ptx.compare("ult", lane, min(k - i, _LANES)))
            place = slot
            if of_keys:
                (start,) = of_keys
                place = ptx.asm_value(_RANK.format(k=k), "=&r,r,r,r", [start, load(start, slot, inside), slot])
            address = ptx.add(in_row, ptx.mul(arith.extui(ptx.i64(), place), 4))
            ptx.asm("@$2 st.global.b32 [$0], $1;", "l,r,b", [address, load(of_columns, slot, inside), inside])

    ptx.inline(
        store_selected,
        ref,
        columns,
        first,
        *(() if staged_keys is None else (staged_keys,)),
        static={"k": k, "rows": rows},
    )


def _row_addresses(refs: Sequence[ir.Value], warp: ir.Value, k: int) -> list[ir.Value]:
    """Returns the address of the warp's row of k words in each array in SMEM."""
    return [ptx.add(ptx.shared_address(ref), ptx.mul(warp, 4 * k)) for ref in refs]


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    thread = ptx.thread_in_warpgroup()
    return ptx.div(thread, _LANES), ptx.rem(thread, _LANES)


def _count(held: jax.Array) -> jax.Array:
    """Counts in each row where `held` is true."""
    return ptx.where(held, 1.0, 0.0).sum(axis=1)


def _body(keys_ref: jax.Ref, out_ref: jax.Ref, columns: jax.Ref, staged_keys: jax.Ref | None = None, *, k: int) -> None:
    shape = WARPS, pl.cdiv(keys_ref.shape[1], _LANES) * _LANES
    bits = KEY_BITS[jnp.dtype(keys_ref.dtype).name]
    first = lax.axis_index("rows") * WARPS
    words = lax.bitcast_convert_type(_load(keys_ref, first, shape[1]), jnp.int32)
    # Integers in the order of the numbers, without the bits in which none differ.
    keys = (words ^ ((words >> 31) & 0x7FFFFFFF)) >> (32 - bits)
    over_row = lambda x: plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), _LAYOUT)

    def add_bit(i: jax.Array, prefix: jax.Array) -> jax.Array:
        larger = prefix + lax.shift_left(jnp.int32(1), bits - 1 - i)
        return ptx.where(_count(keys >= over_row(larger)) >= k, larger, prefix)

    smallest = plgpu.layout_cast(jnp.full((WARPS,), -(1 << (bits - 1)), jnp.int32), _LAYOUT.reduce(1))
    kth = over_row(ptx.no_unroll(0, bits, add_bit, smallest))
    left = (k - _count(keys > kth)).astype(jnp.int32)
    order = ptx.where(keys > kth, 1, ptx.where(keys == kth, 0, -1))
    _stage(columns, staged_keys, keys, order, left)
    _store(out_ref, columns, staged_keys, first)


def run(problem: Problem, config: Config, keys: jax.Array) -> jax.Array:
    """Finds the places of the largest of `keys [..., cols]`, of equal ones the first: int32 `[..., k]`.

    They ascend, unless the config `sorts`. NaN is larger than all numbers, or smaller if its sign is set, and 0 is
    larger than -0.
    """
    rows, cols, k = problem.rows, problem.cols, problem.k
    kernel = plgpu.kernel(
        functools.partial(_body, k=k),
        out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        scratch_types=[plgpu.SMEM((WARPS, k), jnp.int32)] * (1 + config.sorts),
        grid=(pl.cdiv(rows, WARPS),),
        grid_names=("rows",),
        kernel_name="radix_select",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )
    return kernel(keys.reshape(rows, cols)).reshape(*keys.shape[:-1], k)
