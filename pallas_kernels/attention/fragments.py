"""Squares of 64 rows and columns between shared memory and the registers where WGMMA puts or reads them.

float32 sums lie there as the registers do, a warp's after another's and 16 bytes of a thread after the other: no thread
meets another's bank, no address is computed, and a copy takes a warp's or all as one piece. 16-bit factors lie in
swizzled tiles, and are stored by the four registers of which an instruction multiplies, so that none has to be moved.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.config import WARPGROUP_ROWS
from pallas_kernels.attention.online_softmax import ROW, WGMMA, TileCoord
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import SPLAT

SHAPE = 16, 256  # of a square's sums
_SIDE = WARPGROUP_ROWS
_VECTORS = 8  # of a thread, of four numbers
_WARP_BYTES = _VECTORS * 32 * 16  # of a square's sums
_ROW_BYTES = 128  # of a swizzled tile


def store(target: jax.Ref, sums: jax.Array) -> None:
    """Stores a square of float32."""

    def store_fragments(ctx, target, sums):
        at = _thread_place(target)
        for i, pairs in enumerate(_vectors(sums.registers)):
            numbers = [number for pair in pairs for number in ptx.elements(pair)]
            ptx.asm(f"st.shared.v4.f32 [$0+{_offset(i)}], {{$1,$2,$3,$4}};", "r,f,f,f,f,~{memory}", [at, *numbers])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))(store_fragments)(target, sums)


def load(source: jax.Ref) -> jax.Array:
    """What `store` stored, by the same thread or as a copy of it."""

    def load_fragments(ctx, source):
        at, f32 = _thread_place(source), ir.F32Type.get()
        registers = np.empty(WGMMA.to_mgpu().registers_shape((_SIDE, _SIDE)), dtype=object)
        struct, pair = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"), ir.VectorType.get((2,), f32)
        for i, pairs in enumerate(_vectors(registers)):
            text = f"ld.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{_offset(i)}];"
            found = llvm.inline_asm(struct, [at], text, "=f,=f,=f,=f,r,~{memory}", has_side_effects=True)
            numbers = [llvm.extractvalue(f32, found, [e]) for e in range(4)]
            pairs[:] = [vector.from_elements(pair, numbers[e : e + 2]) for e in (0, 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None)

    result = plgpu.ShapeDtypeStruct((_SIDE, _SIDE), jnp.dtype(jnp.float32), layout=WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(load_fragments)(source)


def add(source: jax.Ref, target: jax.Ref) -> None:
    """Adds what `store` stored to global memory, each warp its own part."""

    def add_warps(ctx, source, target):
        # The warp's index is read here; computed outside, the compiler would keep it in a register all along the loop.
        text = (
            "{ .reg .b32 lane, warp, from; .reg .b64 to; .reg .pred first; "
            "mov.u32 lane, %laneid; mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; "
            f"and.b32 warp, warp, {ptx.WARPS - 1}; "
            f"mad.wide.u32 to, warp, {_WARP_BYTES}, $0; mad.lo.u32 from, warp, {_WARP_BYTES}, $1; "
            "setp.eq.u32 first, lane, 0; fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; "
            f"@first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [to], [from], {_WARP_BYTES}; "
            "@first cp.async.bulk.commit_group; }"
        )
        ptx.asm(text, "l,r,~{memory}", [ptx.global_address(target), ptx.shared_address(source)])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(add_warps)(source, target)


def reduce(target: jax.Ref, sums: jax.Array) -> None:
    """Adds a square of float32 to one in global memory, from registers, in the layout of `store`."""

    def reduce_fragments(ctx, target, sums):
        lane, warp = _lane_and_warp()
        offset = arith.addi(arith.muli(warp, ptx.c32(_WARP_BYTES)), arith.muli(lane, ptx.c32(16)))
        at = arith.addi(ptx.global_address(target), arith.extui(ptx.i64(), offset))
        for i, pairs in enumerate(_vectors(sums.registers)):
            numbers = [number for pair in pairs for number in ptx.elements(pair)]
            text = f"red.relaxed.gpu.global.add.v4.f32 [$0+{_offset(i)}], {{$1,$2,$3,$4}};"
            ptx.asm(text, "l,f,f,f,f,~{memory}", [at, *numbers])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))(reduce_fragments)(target, sums)


def await_read() -> None:
    """Waits until the copy of a warp's part has left shared memory."""

    def await_warps(ctx):
        ptx.asm("cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff;", "~{memory}", [])

    plgpu.inline_mgpu()(await_warps)()


def as_rows(sums: jax.Array) -> jax.Array:
    """`[..., rows / 64, columns / 64, 16, 256]` of squares as they are stored, as `[..., rows, columns]`."""
    *batch, down, across, _, _ = sums.shape
    # Of a square: warp, half of its rows, its 16 columns, row, pair of columns, their half, and one of the pair.
    parts = sums.reshape(-1, down, across, 4, 2, 4, 8, 4, 2, 2)
    rows = parts.transpose(0, 1, 3, 4, 6, 2, 5, 8, 7, 9)
    return rows.reshape(*batch, down * _SIDE, across * _SIDE)


def stmatrix(target: jax.Ref, factor: jax.Array, *, once: bool = False) -> None:
    """Stores a left factor `[64, n]` of 16 bits into `[n / 64, 64, 64]`; `once`: outside of the loop over steps."""
    dtype = jnp.dtype(target.dtype)

    def store_squares(ctx, target, factor):
        lane, warp = _lane_and_warp(once)
        # Eight lanes name the rows of each of an instruction's four 8 x 8 matrices: rows, the eight below, both again
        # eight columns on.
        matrix, row = arith.divui(lane, ptx.c32(8)), arith.remui(lane, ptx.c32(8))
        below, right = arith.remui(matrix, ptx.c32(2)), arith.divui(matrix, ptx.c32(2))
        line = arith.addi(arith.muli(warp, ptx.c32(16)), arith.addi(arith.muli(below, ptx.c32(8)), row))
        base = arith.addi(ptx.shared_address(target), arith.muli(line, ptx.c32(_ROW_BYTES)))
        # Opaque, lest the compiler keep each sum with a constant in a register all along the loop.
        swizzled = ptx.opaque_word(arith.muli(arith.xori(right, row), ptx.c32(16)))
        words = [ptx.pair_word(pair) for pair in factor.registers.flat]
        for i in range(0, len(words), 4):
            square, columns = divmod(i // 4, _SIDE // 16)
            at, here = arith.addi(base, arith.xori(swizzled, ptx.c32(32 * columns))), words[i : i + 4]
            registers = ",".join(f"${1 + j}" for j in range(len(here)))
            text = f"stmatrix.sync.aligned.m8n8.x{len(here)}.shared.b16 [$0+{square * _SIDE * _ROW_BYTES}]"
            ptx.asm(f"{text}, {{{registers}}};", ",".join(["r"] * (1 + len(here))) + ",~{memory}", [at, *here])

    assert target.shape[1:] == (_SIDE, _SIDE)
    assert dtype.itemsize * _SIDE == _ROW_BYTES
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))(store_squares)(target, factor)


def store_rows(target: jax.Ref, values: jax.Array, place: TileCoord) -> None:
    """Stores a warpgroup's 64 numbers, one a row, into `[batch, heads, queries]`, as far as that goes."""
    (_, heads, queries), packed = target.shape, place.heads

    def store_row_values(ctx, target, values, *coord):
        lane, warp = _lane_and_warp(once=True)
        first = ptx.equals(arith.remui(lane, ptx.c32(4)), 0)
        for r, value in enumerate(values.registers.flat):
            batch, head, query, exists = _row_coord(lane, warp, r, coord, packed, queries)
            of_head = arith.addi(arith.muli(batch, ptx.c32(heads)), head)
            index = arith.muli(arith.extui(ptx.i64(), of_head), ptx.c64(queries))
            index = arith.muli(arith.addi(index, arith.extui(ptx.i64(), query)), ptx.c64(4))
            address = arith.addi(ptx.global_address(target), index)
            operands = [address, _number(value), arith.andi(first, exists)]
            ptx.asm("@$2 st.global.f32 [$0], $1;", "l,f,b,~{memory}", operands)

    at = jnp.int32(place.batch), jnp.int32(place.head), jnp.int32(place.row)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW, *[SPLAT] * 3))(store_row_values)(target, values, *at)


def store_sums(target: jax.Ref, sums: jax.Array, place: TileCoord, column: int) -> None:
    """Stores a warpgroup's rows of float32 into `[batch, queries, heads, columns]`, as far as the queries go."""
    (_, queries, heads, columns), packed = target.shape, place.heads

    def store_row_sums(ctx, target, sums, *coord):
        lane, warp = _lane_and_warp(once=True)
        within = arith.addi(arith.muli(arith.remui(lane, ptx.c32(4)), ptx.c32(2)), ptx.c32(column))
        addresses, stored = [], []
        for r in range(2):
            index, head, query, exists = _row_coord(lane, warp, r, coord, packed, queries)
            for extent, i in ((queries, query), (heads, head)):
                index = arith.addi(arith.muli(index, ptx.c32(extent)), i)
            index = arith.muli(arith.extui(ptx.i64(), index), ptx.c64(columns))
            index = arith.muli(arith.addi(index, arith.extui(ptx.i64(), within)), ptx.c64(4))
            addresses.append(arith.addi(ptx.global_address(target), index))
            stored.append(exists)
        for i, pair in enumerate(sums.registers.flat):
            text = f"@$3 st.global.v2.f32 [$0+{i // 2 * 32}], {{$1, $2}};"
            ptx.asm(text, "l,f,f,b,~{memory}", [addresses[i % 2], *ptx.elements(pair), stored[i % 2]])

    at = jnp.int32(place.batch), jnp.int32(place.head), jnp.int32(place.row)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, *[SPLAT] * 3))(store_row_sums)(target, sums, *at)


def _row_coord(
    lane: ir.Value, warp: ir.Value, r: int, coord: tuple[Any, ...], packed: int, queries: int
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Batch, head and query of a thread's row `r`, of two, in a tile of `packed` heads, and whether there is one."""
    batch, head, row = map(ptx.scalar, coord)
    line = arith.addi(arith.muli(warp, ptx.c32(16)), arith.divui(lane, ptx.c32(4)))
    line = arith.addi(line, ptx.c32(8 * r))
    query = arith.addi(row, arith.divui(line, ptx.c32(packed)))
    head = arith.addi(arith.muli(head, ptx.c32(packed)), arith.remui(line, ptx.c32(packed)))
    return batch, head, query, arith.cmpi(arith.CmpIPredicate.ult, query, ptx.c32(queries))


def _number(value: ir.Value) -> ir.Value:
    return ptx.elements(value)[0] if isinstance(value.type, ir.VectorType) else value


def commit() -> None:
    """Orders what this thread has stored to shared memory before products and copies that a barrier lets begin later.

    `commit_smem` also waits for the warpgroup's other threads, which is not needed where each arrives at that barrier.
    """

    def fence_shared(ctx):
        ptx.asm("fence.proxy.async.shared::cta;", "~{memory}", [])

    plgpu.inline_mgpu()(fence_shared)()


def _vectors(registers: np.ndarray) -> list[np.ndarray]:
    """Each vector's two registers: of the same row, eight columns apart."""
    pairs = registers.reshape(-1)  # by eight columns, and by eight rows in each
    return [pairs[4 * j + r : 4 * j + r + 3 : 2] for r in range(2) for j in range(_VECTORS // 2)]


def _offset(i: int) -> int:
    return i * 32 * 16


def _thread_place(ref: ir.Value) -> ir.Value:
    lane, warp = _lane_and_warp()
    offset = arith.addi(arith.muli(warp, ptx.c32(_WARP_BYTES)), arith.muli(lane, ptx.c32(16)))
    return arith.addi(ptx.shared_address(ref), offset)


def _lane_and_warp(once: bool = False) -> tuple[ir.Value, ir.Value]:
    thread = ptx.thread_found_here() if once else ptx.thread_in_warpgroup()
    return arith.remui(thread, ptx.c32(32)), arith.divui(thread, ptx.c32(32))
