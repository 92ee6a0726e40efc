"""Loads, stores and sums of per-row values: one value for each row of a tile.

A register array of such values has the shape `[tile.rows]` and the layout of a tile reduced over its columns.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic.ptx import (
    Index,
    asm,
    c32,
    c64,
    elements,
    equals,
    global_address,
    i32,
    i64,
    inline,
    load_if,
    row_value,
    scalar,
    thread_in_warpgroup,
    word,
)
from pallas_kernels.mosaic.vectors import RegisterTile, RowPredicate, row_of


def load(ref: jax.Ref, row: Index, tile: RegisterTile, *, fill: int) -> jax.Array:
    """Loads the 32-bit value of each of the tile's rows from `[rows]`; rows past the last get `fill`."""
    dtype = jnp.dtype(ref.dtype)
    word = int(np.asarray(fill, dtype).view(np.uint32))

    def load_number(ctx, ref, row):
        word_type, element = i32(), ir.MemRefType(ref.type).element_type
        at = row_of(tile, scalar(row))
        exists = arith.cmpi(arith.CmpIPredicate.ult, at, c32(rows))
        address = arith.addi(global_address(ref), arith.muli(_wide(at), c64(4)))
        value = load_if(address, exists, 32, word)
        value = value if element == word_type else arith.bitcast(element, value)
        return _fragment(value, tile, True if element == word_type else None)

    rows = ref.shape[0]
    return inline(load_number, ref, row, result=((tile.rows,), dtype, tile.layout.reduce(1)))


def load_element(ref: jax.Ref, row: Index, column: jax.Array, tile: RegisterTile) -> jax.Array:
    """Loads the element in `column` of each of the tile's rows of `[rows, cols]`, in float32; a negative one gives 0.

    `[1, cols]` is one row for all.
    """
    rows, cols = ref.shape
    itemsize = jnp.dtype(ref.dtype).itemsize

    def load_from(ctx, ref, row, column):
        f32, element = ir.F32Type.get(), ir.MemRefType(ref.type).element_type
        at, wanted = _wide(row_value(column)), arith.cmpi(arith.CmpIPredicate.sge, row_value(column), c32(0))
        if rows > 1:
            at = arith.addi(arith.muli(_wide(row_of(tile, scalar(row))), c64(cols)), at)
        address = arith.addi(global_address(ref), arith.muli(at, c64(itemsize)))
        value = load_if(address, wanted, 8 * itemsize)
        if itemsize == 1:
            value = arith.uitofp(f32, value)
        elif itemsize == 2:
            value = arith.extf(f32, arith.bitcast(element, value))
        else:
            value = arith.bitcast(f32, value)
        return _fragment(value, tile, None)

    layout = tile.layout.reduce(1)
    return inline(load_from, ref, row, (column, layout), result=((tile.rows,), jnp.float32, layout))


def store(ref: jax.Ref, row: Index, value: jax.Array, tile: RegisterTile) -> None:
    """Stores a float32 value of each of the tile's rows to `[rows]`; a tile of 128 lanes has one row."""

    def store_each(ctx, ref, value, row):
        thread = thread_in_warpgroup()
        at = arith.addi(scalar(row), arith.divui(thread, c32(tile.lanes)))
        first_lane = equals(arith.remui(thread, c32(tile.lanes)), 0)
        exists = arith.cmpi(arith.CmpIPredicate.ult, at, c32(ref_rows))
        address = arith.addi(global_address(ref), arith.muli(_wide(at), c64(4)))
        asm("@$2 st.global.f32 [$0], $1;", "l,f,b", [address, row_value(value), arith.andi(first_lane, exists)])

    ref_rows = ref.shape[0]
    inline(store_each, ref, (value, tile.layout.reduce(1)), row)


def store_element(
    ref: jax.Ref,
    row: Index,
    column: jax.Array,
    value: jax.Array,
    tile: RegisterTile,
    *,
    warpgroups: int = 1,
    first: Index = 0,
    vectors: int | None = None,
) -> None:
    """Overwrites the element in `column` of each of the tile's rows, where that is not negative.

    The thread that wrote the element as part of a vector writes it again, so that the two stores need no order. The
    CTA's `warpgroups` alternate along a row, tile by tile, and write `vectors` vectors (None: all) from `first` on.
    """
    row_pred, cols, itemsize = RowPredicate.of(ref, tile), ref.shape[1], jnp.dtype(ref.dtype).itemsize
    bits = 8 * itemsize

    def store_over(ctx, ref, column, value, row, first):
        at, thread, place = row_of(tile, scalar(row)), utils.thread_idx(), row_value(column)
        _, head, _ = row_pred.row(global_address(ref), at)
        k = arith.subi(arith.divui(arith.addi(head, place), c32(tile.vector)), scalar(first))
        lane, here = arith.remui(k, c32(tile.lanes_in_warp)), arith.remui(thread, c32(tile.lanes_in_warp))
        conditions = [
            arith.cmpi(arith.CmpIPredicate.sge, place, c32(0)),
            arith.cmpi(arith.CmpIPredicate.eq, lane, here),
        ]
        if tile.lanes > 32:
            warp = arith.remui(arith.divui(k, c32(32 * tile.registers)), c32(4 * warpgroups))
            conditions.append(arith.cmpi(arith.CmpIPredicate.eq, warp, arith.divui(thread, c32(32))))
        if vectors is not None:
            conditions.append(arith.cmpi(arith.CmpIPredicate.ult, k, c32(vectors)))
        mine = conditions[0]
        for condition in conditions[1:]:
            mine = arith.andi(mine, condition)
        index = arith.addi(arith.muli(_wide(at), c64(cols)), _wide(place))
        address = arith.addi(global_address(ref), arith.muli(index, c64(itemsize)))
        word = arith.bitcast(ir.IntegerType.get_signless(bits), row_value(value))
        asm(f"@$2 st.global.b{bits} [$0], $1;", f"l,{'h' if bits == 16 else 'r'},b", [address, word, mine])

    layout = tile.layout.reduce(1)
    inline(store_over, ref, (column, layout), (value, layout), row, first)


def of_first_lane(value: jax.Array, tile: RegisterTile) -> jax.Array:
    """Gives each thread the value of the first lane of its warp that shares its row.

    A sum over lanes may differ among them: the compiler contracts a product into the first addition, so that each lane
    rounds only the other lane's product.
    """
    if tile.lanes_in_warp == 1:
        return value
    layout, shares = tile.layout.reduce(1), 32 - tile.lanes_in_warp  # the bits of a lane's index that name its row

    def shuffle_first(ctx, value):
        first = arith.andi(arith.remui(utils.thread_idx(), c32(32)), c32(shares))
        text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        taken = llvm.inline_asm(i32(), [word(value), first], text, "=r,r,r", has_side_effects=True)
        return _fragment(arith.bitcast(ir.F32Type.get(), taken), tile, None)

    return inline(shuffle_first, (value, layout), result=((tile.rows,), jnp.float32, layout))


def sums_of_rows(ref: jax.Ref, row: Index, z: jax.Array, tile: RegisterTile) -> jax.Array:
    """Sums a tile's rows, from row `row` of `ref` on, in an order that does not depend on their alignment.

    The order is that of row vectors. A row vector begins in one lane's aligned vector and ends in the next lane's: each
    lane adds up the elements that begin one, shuffles the sum to the next lane, and that lane adds the elements that
    end it.
    """
    layout, lanes, v = tile.layout.reduce(1), tile.lanes_in_warp, tile.vector
    row_pred = RowPredicate.of(ref, tile)
    if row_pred.aligned:
        return z.sum(axis=1)

    def add_rows(ctx, ref, z, row):
        f32 = ir.F32Type.get()

        # The compilers do not contract this addition with a product.
        def add(a, b):
            return llvm.inline_asm(f32, [a, b], "add.rn.f32 $0, $1, $2;", "=f,f,f")

        def add_if(predicate, negation, a, b):
            return llvm.inline_asm(f32, [a, b, predicate], f"@{negation}$3 add.rn.f32 $0, $0, $2;", "=f,0,f,b")

        def from_lane(value, lane):
            text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
            moved = llvm.inline_asm(i32(), [arith.bitcast(i32(), value), lane], text, "=r,r,r", has_side_effects=True)
            return arith.bitcast(f32, moved)

        _, head, _ = row_pred.row(global_address(ref), row_of(tile, scalar(row)))
        lane = arith.remui(utils.thread_idx(), c32(32))
        among = arith.andi(lane, c32(lanes - 1))
        parts = [elements(register) for register in z.registers.flat]
        begin = end = _over_registers(parts, add)
        if tile.wraps and len(parts) & (len(parts) - 1):
            # The first lane's vectors end row vectors of the last lane, each one of the register before.
            is_first, after = equals(among, 0), [*parts[1:], parts[0]]
            turn = lambda part, other: [arith.select(is_first, b, a) for a, b in zip(part, other, strict=True)]
            end = _over_registers(list(map(turn, parts, after)), add)
        total = utils.c(0.0, f32)
        begins = [arith.cmpi(arith.CmpIPredicate.uge, c32(e), head) for e in range(v)]
        for begins_here, x in zip(begins, begin, strict=True):
            total = add_if(begins_here, "", total, x)
        if lanes > 1:
            before = arith.andi(arith.addi(among, c32(lanes - 1)), c32(lanes - 1))
            total = from_lane(total, arith.addi(arith.subi(lane, among), before))
        for begins_here, x in zip(begins[:-1], end, strict=False):
            total = add_if(begins_here, "!", total, x)
        for apart in (2**i for i in reversed(range(lanes.bit_length() - 1))):
            total = add(total, from_lane(total, arith.xori(lane, c32(apart))))
        return _fragment(total, tile, None)

    return inline(add_rows, ref, (z, tile.layout), row, result=((tile.rows,), jnp.float32, layout))


def _over_registers(parts: list[list[ir.Value]], add: Callable[..., ir.Value]) -> list[ir.Value]:
    """Adds up registers, element by element. For a power of two of them, rotating the registers changes nothing."""
    halves = len(parts) // 2
    if len(parts) & (len(parts) - 1):
        return functools.reduce(lambda a, b: list(map(add, a, b)), parts)
    while halves:
        parts = [list(map(add, parts[i], parts[i + halves])) for i in range(halves)]
        halves //= 2
    return parts[0]


def _wide(x: ir.Value) -> ir.Value:
    return arith.extsi(i64(), x)


def _fragment(value: ir.Value, tile: RegisterTile, is_signed: bool | None) -> mgpu.FragmentedArray:
    """A register array of the thread's one value."""
    layout = tile.layout.reduce(1).to_mgpu()
    registers = np.empty(layout.registers_shape((tile.rows,)), dtype=object)
    assert registers.size == layout.vector_length == 1
    registers.flat[0] = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)
