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

from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import Index
from pallas_kernels.mosaic.vectors import RegisterTile, RowPredicate, row_of


def load(ref: jax.Ref, row: Index, tile: RegisterTile, *, fill: int) -> jax.Array:
    """Loads the 32-bit value of each of the tile's rows from `[rows]`; rows past the last get `fill`."""
    dtype = jnp.dtype(ref.dtype)
    word = int(np.asarray(fill, dtype).view(np.uint32))

    def load_number(ctx, ref, row):
        word_type, element = ptx.i32(), ir.MemRefType(ref.type).element_type
        at = row_of(tile, ptx.scalar(row))
        exists = ptx.compare("ult", at, rows)
        address = ptx.add(ptx.global_address(ref), ptx.mul(_wide(at), 4))
        value = ptx.load_if(address, exists, 32, word)
        value = value if element == word_type else arith.bitcast(element, value)
        return _fragment(value, tile, True if element == word_type else None)

    rows = ref.shape[0]
    return ptx.inline(
        load_number,
        ref,
        row,
        result=((tile.rows,), dtype, tile.layout.reduce(1)),
        static={"rows": rows, "tile": tile, "word": word},
    )


def load_element(ref: jax.Ref, row: Index, column: jax.Array, tile: RegisterTile) -> jax.Array:
    """Loads the element in `column` of each of the tile's rows of `[rows, cols]`, in float32; a negative one gives 0.

    `[1, cols]` is one row for all.
    """
    rows, cols = ref.shape
    itemsize = jnp.dtype(ref.dtype).itemsize

    def load_from(ctx, ref, row, column):
        f32, element = ir.F32Type.get(), ir.MemRefType(ref.type).element_type
        at, wanted = _wide(ptx.row_value(column)), ptx.compare("sge", ptx.row_value(column), 0)
        if rows > 1:
            at = ptx.add(ptx.mul(_wide(row_of(tile, ptx.scalar(row))), cols), at)
        address = ptx.add(ptx.global_address(ref), ptx.mul(at, itemsize))
        value = ptx.load_if(address, wanted, 8 * itemsize)
        if itemsize == 1:
            value = arith.uitofp(f32, value)
        elif itemsize == 2:
            value = arith.extf(f32, arith.bitcast(element, value))
        else:
            value = arith.bitcast(f32, value)
        return _fragment(value, tile, None)

    layout = tile.layout.reduce(1)
    return ptx.inline(
        load_from,
        ref,
        row,
        (column, layout),
        result=((tile.rows,), jnp.float32, layout),
        static={"rows": rows, "tile": tile},
    )


def store(ref: jax.Ref, row: Index, value: jax.Array, tile: RegisterTile) -> None:
    """Stores a float32 value of each of the tile's rows to `[rows]`; a tile of 128 lanes has one row."""

    def store_each(ctx, ref, value, row):
        thread = ptx.thread_in_warpgroup()
        at = ptx.add(ptx.scalar(row), ptx.div(thread, tile.lanes))
        first_lane = ptx.compare("eq", ptx.rem(thread, tile.lanes), 0)
        exists = ptx.compare("ult", at, ref_rows)
        address = ptx.add(ptx.global_address(ref), ptx.mul(_wide(at), 4))
        ptx.asm(
            "@$2 st.global.f32 [$0], $1;", "l,f,b", [address, ptx.row_value(value), ptx.bit_and(first_lane, exists)]
        )

    ref_rows = ref.shape[0]
    ptx.inline(store_each, ref, (value, tile.layout.reduce(1)), row, static={"ref_rows": ref_rows, "tile": tile})


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
        at, thread, place = row_of(tile, ptx.scalar(row)), utils.thread_idx(), ptx.row_value(column)
        _, head, _ = row_pred.row(ptx.global_address(ref), at)
        k = ptx.sub(ptx.div(ptx.add(head, place), tile.vector), ptx.scalar(first))
        lane, here = ptx.rem(k, tile.lanes_in_warp), ptx.rem(thread, tile.lanes_in_warp)
        conditions = [ptx.compare("sge", place, 0), ptx.compare("eq", lane, here)]
        if tile.lanes > 32:
            warp = ptx.rem(ptx.div(k, 32 * tile.registers), 4 * warpgroups)
            conditions.append(ptx.compare("eq", warp, ptx.div(thread, 32)))
        if vectors is not None:
            conditions.append(ptx.compare("ult", k, vectors))
        mine = functools.reduce(ptx.bit_and, conditions)
        index = ptx.add(ptx.mul(_wide(at), cols), _wide(place))
        address = ptx.add(ptx.global_address(ref), ptx.mul(index, itemsize))
        word = arith.bitcast(ir.IntegerType.get_signless(bits), ptx.row_value(value))
        ptx.asm(f"@$2 st.global.b{bits} [$0], $1;", f"l,{ptx.KINDS[bits]},b", [address, word, mine])

    layout = tile.layout.reduce(1)
    ptx.inline(
        store_over,
        ref,
        (column, layout),
        (value, layout),
        row,
        first,
        static={"cols": cols, "tile": tile, "vectors": vectors, "warpgroups": warpgroups},
    )


def of_first_lane(value: jax.Array, tile: RegisterTile) -> jax.Array:
    """Gives each thread the value of the first lane of its warp that shares its row.

    A sum over lanes may differ among them: the compiler contracts a product into the first addition, so that each lane
    rounds only the other lane's product.
    """
    if tile.lanes_in_warp == 1:
        return value
    layout, shares = tile.layout.reduce(1), 32 - tile.lanes_in_warp  # the bits of a lane's index that name its row

    def shuffle_first(ctx, value):
        first = ptx.bit_and(ptx.rem(utils.thread_idx(), 32), shares)
        text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        taken = ptx.asm_value(text, "=r,r,r", [ptx.word(value), first])
        return _fragment(arith.bitcast(ir.F32Type.get(), taken), tile, None)

    return ptx.inline(shuffle_first, (value, layout), result=((tile.rows,), jnp.float32, layout))


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
            moved = ptx.asm_value(text, "=r,r,r", [arith.bitcast(ptx.i32(), value), lane])
            return arith.bitcast(f32, moved)

        _, head, _ = row_pred.row(ptx.global_address(ref), row_of(tile, ptx.scalar(row)))
        lane = ptx.rem(utils.thread_idx(), 32)
        among = ptx.bit_and(lane, lanes - 1)
        parts = [ptx.elements(register) for register in z.registers.flat]
        begin = end = _over_registers(parts, add)
        if tile.wraps and len(parts) & (len(parts) - 1):
            # The first lane's vectors end row vectors of the last lane, each one of the register before.
            is_first, after = ptx.compare("eq", among, 0), [*parts[1:], parts[0]]
            turn = lambda part, other: [arith.select(is_first, b, a) for a, b in zip(part, other, strict=True)]
            end = _over_registers(list(map(turn, parts, after)), add)
        total = utils.c(0.0, f32)
        begins = [ptx.compare("uge", ptx.c32(e), head) for e in range(v)]
        for begins_here, x in zip(begins, begin, strict=True):
            total = add_if(begins_here, "", total, x)
        if lanes > 1:
            before = ptx.bit_and(ptx.add(among, lanes - 1), lanes - 1)
            total = from_lane(total, ptx.add(ptx.sub(lane, among), before))
        for begins_here, x in zip(begins[:-1], end, strict=False):
            total = add_if(begins_here, "!", total, x)
        for apart in (2**i for i in reversed(range(lanes.bit_length() - 1))):
            total = add(total, from_lane(total, arith.xori(lane, ptx.c32(apart))))
        return _fragment(total, tile, None)

    return ptx.inline(
        add_rows,
        ref,
        (z, tile.layout),
        row,
        result=((tile.rows,), jnp.float32, layout),
        static={"row_pred": row_pred, "tile": tile},
    )


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
    return arith.extsi(ptx.i64(), x)


def _fragment(value: ir.Value, tile: RegisterTile, is_signed: bool | None) -> mgpu.FragmentedArray:
    """Returns a register array of the thread's one value."""
    layout = tile.layout.reduce(1).to_mgpu()
    registers = np.empty(layout.registers_shape((tile.rows,)), dtype=object)
    assert registers.size == layout.vector_length == 1
    registers.flat[0] = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)
