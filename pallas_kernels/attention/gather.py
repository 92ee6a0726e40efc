"""Tiles of operands that broadcast, from global memory into the registers where WGMMA puts scores.

An array `[B|1, N|1, T|1, S|1]` of any alignment is read as it is, never materialised larger: a thread loads the numbers
of its scores, by pairs of columns where the rows are even, and nothing outside of the array.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.attention import mask
from pallas_kernels.hardware import WARPGROUP_ROWS
from pallas_kernels.mosaic import ptx, votes, wgmma
from pallas_kernels.mosaic.ptx import INTEGER, ROW, WGMMA, Index

Corner = tuple[Index, Index, Index, Index]
_ENTRIES = 4  # of a table that a lane loads at a time


def load_tile(ref: jax.Ref, corner: Corner, columns: int) -> jax.Array:
    """Returns `[64, columns]` of `ref` from `corner` (batch, head, row, column) on; 0 where the array has ended."""
    dtype = jnp.dtype(ref.dtype)
    shape, strides, bits = ref.shape, [math.prod(ref.shape[i + 1 :]) for i in range(4)], 8 * dtype.itemsize
    pairs = shape[3] % 2 == 0

    def load_broadcast(ctx, ref, *corner):
        thread = ptx.thread_in_warpgroup()
        warp, lane = ptx.div(thread, 32), ptx.rem(thread, 32)
        batch, head, row, column = (ptx.scalar(x) for x in corner)
        row = ptx.add(row, ptx.add(ptx.mul(warp, 16), ptx.div(lane, 4)))
        column = ptx.add(column, ptx.mul(ptx.rem(lane, 4), 2))
        element = ir.MemRefType(ref.type).element_type
        pair = ir.VectorType.get((2,), element)
        base = ptx.global_address(ref)

        def offset(at: ir.Value, axis: int) -> ir.Value:
            at = arith.extui(base.type, at)
            stride = strides[axis] * dtype.itemsize if shape[axis] > 1 else 0
            return ptx.mul(at, arith.constant(base.type, stride))

        base = ptx.add(base, ptx.add(offset(batch, 0), offset(head, 1)))
        registers = np.empty(WGMMA.to_mgpu().registers_shape((WARPGROUP_ROWS, columns)), dtype=object)
        for r in range(2):
            at_row = ptx.add(row, 8 * r)
            in_row = ptx.compare("ult", at_row, shape[2])
            of_row = ptx.add(base, offset(at_row, 2))
            for j in range(columns // 8):
                same = 2 * (j if shape[3] > 1 else 0) + (r if shape[2] > 1 else 0)
                if same != 2 * j + r:
                    registers.flat[2 * j + r] = registers.flat[same]
                    continue
                at = [ptx.add(column, 8 * j + e) for e in range(2)]
                inside = [ptx.compare("ult", x, shape[3]) for x in at]
                if shape[2] > 1:
                    inside = [in_row if shape[3] == 1 else ptx.bit_and(x, in_row) for x in inside]
                address = [ptx.add(of_row, offset(x, 3)) for x in at]
                if pairs:
                    word = ptx.load_if(address[0], inside[0], 2 * bits)
                    registers.flat[2 * j + r] = vector.bitcast(
                        pair, vector.broadcast(ir.VectorType.get((1,), word.type), word)
                    )
                else:
                    predicates = inside if shape[2:] != (1, 1) else [None, None]
                    count = 1 if shape[3] == 1 else 2
                    words = [ptx.load_if(address[e], predicates[e], bits) for e in range(count)] * (3 - count)
                    registers.flat[2 * j + r] = vector.from_elements(pair, [arith.bitcast(element, w) for w in words])
        signed = True if isinstance(element, ir.IntegerType) else None
        return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=signed)

    return ptx.inline(
        load_broadcast,
        ref,
        *corner,
        result=((WARPGROUP_ROWS, columns), dtype, WGMMA),
        static={"columns": columns, "shape": shape},
    )


def store_tile(target: jax.Ref, values: jax.Array, corner: tuple[Index, Index, Index]) -> None:
    """Stores `values [64, n]` into `target` from `corner` (batch, row, column) on, as far as that goes."""
    dtype, (_, rows, columns) = jnp.dtype(target.dtype), target.shape
    pairs = columns % 2 == 0

    def store_elements(ctx, target, values, batch, row, column):
        thread = ptx.thread_in_warpgroup()
        warp, lane = ptx.div(thread, 32), ptx.rem(thread, 32)
        row = ptx.add(ptx.scalar(row), ptx.add(ptx.mul(warp, 16), ptx.div(lane, 4)))
        column = ptx.add(ptx.scalar(column), ptx.mul(ptx.rem(lane, 4), 2))
        base = ptx.global_address(target)
        of_batch = ptx.mul(arith.extui(base.type, ptx.scalar(batch)), rows)
        for i, pair in enumerate(values.registers.flat):
            at_row, at_column = ptx.add(row, 8 * (i % 2)), ptx.add(column, 8 * (i // 2))
            index = ptx.mul(ptx.add(of_batch, arith.extui(base.type, at_row)), columns)
            index = ptx.add(index, arith.extui(base.type, at_column))
            address = ptx.add(base, ptx.mul(index, dtype.itemsize))
            in_row = ptx.compare("ult", at_row, rows)
            bits = 8 * dtype.itemsize * (1 + pairs)
            as_integer = functools.partial(arith.bitcast, ir.IntegerType.get_signless(bits))
            words = [ptx.pair_word(pair, bits)] if pairs else [as_integer(x) for x in ptx.elements(pair)]
            for e, word in enumerate(words):
                inside = ptx.bit_and(in_row, ptx.compare("ult", ptx.add(at_column, e), columns))
                text = f"@$2 st.global.b{bits} [$0+{e * dtype.itemsize}], $1;"
                ptx.asm(text, f"l,{ptx.KINDS[bits]},b,~{{memory}}", [address, word, inside])

    ptx.inline(store_elements, target, (values, WGMMA), *corner)


def load_bits(ref: jax.Ref, axis: int, corner: Corner, columns: int, repeats: int = 1) -> jax.Array:
    """Loads as `[64, 8]` each thread's words of `mask.pack_bits`, twice, for 64 or 128 columns from `corner` on.

    For 64 columns they are the lower halves; where the rows have ended they are 0. `axis` as in `mask.pack_bits`. Each
    row of `ref` is `repeats` rows of the tile.
    """
    shape, strides = ref.shape, [math.prod(ref.shape[i + 1 :]) for i in range(5)]
    row_axis, place_axis = mask.AXES[axis]
    rows = shape[row_axis]

    def load_words(ctx, ref, batch, head, row, column):
        thread = ptx.thread_in_warpgroup()
        warp, lane = ptx.div(thread, 32), ptx.rem(thread, 32)
        line = ptx.add(ptx.mul(warp, 16), ptx.div(lane, 4))
        of_lines = [ptx.div(ptx.add(line, 8 * r), repeats) for r in range(2)] if repeats > 1 else []
        row = ptx.add(ptx.scalar(row), of_lines[0] if of_lines else line)
        block = ptx.div(ptx.scalar(column), mask.BIT_COLUMNS)
        index = ptx.mul(ptx.rem(lane, 4), strides[place_axis])
        for i, at in {0: ptx.scalar(batch), 1: ptx.scalar(head), 2: block, row_axis: row}.items():
            if shape[i] > 1:
                index = ptx.add(index, ptx.mul(at, strides[i]))
        base = ptx.global_address(ref)
        address = ptx.add(base, ptx.mul(arith.extui(base.type, index), 4))
        lower_bits = ptx.div(ptx.rem(ptx.scalar(column), mask.BIT_COLUMNS), 4)
        pairs = []
        for r in range(2 if rows > 1 else 1):
            inside = ptx.compare("ult", row, max(rows - 8 * r, 0)) if rows > 1 else None
            at = ptx.add(address, 4 * 8 * r * strides[row_axis])
            if of_lines and r:
                further = ptx.sub(of_lines[1], of_lines[0])
                inside = ptx.compare("ult", ptx.add(row, further), rows)
                at = ptx.add(address, ptx.mul(arith.extui(base.type, further), 4 * strides[row_axis]))
            word = ptx.load_if(at, inside, 32)
            pairs.append(vector.broadcast(ir.VectorType.get((2,), word.type), arith.shrui(word, lower_bits)))
        registers = np.empty(WGMMA.to_mgpu().registers_shape((WARPGROUP_ROWS, 8)), dtype=object)
        registers.flat[:] = pairs * (2 // len(pairs))
        return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=False)

    return ptx.inline(
        load_words,
        ref,
        *corner,
        result=((WARPGROUP_ROWS, 8), jnp.uint32, WGMMA),
        static={"repeats": repeats, "row_axis": row_axis, "rows": rows, "shape": shape},
    )


def load_of_heads(ref: jax.Ref, pack: Index, heads: int) -> jax.Array:
    """Returns `[64]`: for each row of a tile of `heads` packed heads its head's number of `ref [N]`, float32."""

    def load_numbers(ctx, ref, pack):
        lane, warp = wgmma.lane_and_warp(once=True)
        line = ptx.add(ptx.mul(warp, 16), ptx.div(lane, 4))
        layout, f32 = ROW.to_mgpu(), ir.F32Type.get()
        assert isinstance(layout, mgpu.TiledLayout)
        registers = np.empty(layout.registers_shape((WARPGROUP_ROWS,)), dtype=object)
        for r in range(2):
            head = ptx.add(ptx.mul(ptx.scalar(pack), heads), ptx.rem(ptx.add(line, 8 * r), heads))
            number = arith.bitcast(f32, ptx.load_if(ptx.word_address(ref, head), None, 32))
            registers.flat[r] = vector.from_elements(ir.VectorType.get((layout.vector_length,), f32), [number])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return ptx.inline(load_numbers, ref, pack, result=((WARPGROUP_ROWS,), jnp.float32, ROW), static={"heads": heads})


def lacks_page(tables: jax.Ref, batch: Index, first: Index, end: Index, pages: int) -> jax.Array:
    """Says whether an entry of `tables [B, entries]` from `first` to before `end` names none of so many pages."""

    def vote_missing(ctx, tables, batch, first, end):
        lane, entries = ptx.rem(utils.thread_idx(), 32), ir.MemRefType(tables.type).shape[1]
        of_batch, missing = ptx.mul(ptx.scalar(batch), entries), []
        for i in range(_ENTRIES):
            at = ptx.add(ptx.scalar(first), ptx.add(lane, 32 * i))
            word = ptx.word_address(tables, ptx.add(of_batch, at))
            page = ptx.load_if(word, ptx.compare("slt", at, ptx.scalar(end)), 32)
            missing.append(ptx.compare("uge", page, pages))
        return votes.vote(missing)

    def search(i: jax.Array, lacks: jax.Array) -> jax.Array:
        at = first + i * (32 * _ENTRIES)
        return lacks | ptx.inline(vote_missing, tables, batch, at, end, result=INTEGER, static={"pages": pages})

    return lax.fori_loop(0, pl.cdiv(end - first, jnp.int32(32 * _ENTRIES)), search, jnp.int32(0)) != 0


def apply_bitmask(x: jax.Array, words: jax.Array) -> jax.Array:
    """Returns `x [64, n]` where its bit of `load_bits` is 1, and -inf elsewhere."""

    def apply_bits(ctx, x, words):
        of_row = votes.numbers(words)[::2]

        def is_set(j: int, r: int) -> Iterator[ir.Value]:
            for bit in (2 * j, 2 * j + 1):
                yield ptx.compare("ne", ptx.bit_and(of_row[r], np.uint32(1 << bit).view(np.int32).item()), 0)

        return wgmma.hide_unless(is_set, x)

    return ptx.inline(apply_bits, (x, WGMMA), (words, WGMMA), result=(x.shape, x.dtype, WGMMA))


def broadcast_index(at: tuple[Index, ...], shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Returns `at`, with 0 along the axes of `shape` that broadcast."""
    return tuple(i if extent > 1 else 0 for i, extent in zip(at, shape, strict=False))


def apply_bounds(x: jax.Array, low: jax.Array | None, high: jax.Array) -> jax.Array:
    """Returns `x [64, n]` where `low <= column <= high`, one pair of bounds a row, and -inf elsewhere.

    A thread compares its bounds with constants: no registers for the indices of columns.
    """

    def apply_between(ctx, x, high, *low):
        column = ptx.mul(ptx.rem(utils.thread_idx(), 4), 2)
        tops, *bottoms = ([ptx.sub(r, column) for r in votes.numbers(rows)] for rows in (high, *low))

        def is_between(j: int, r: int) -> Iterator[ir.Value]:
            for at in map(ptx.c32, (8 * j, 8 * j + 1)):
                below, *above = ptx.compare("sge", tops[r], at), *(ptx.compare("sle", b[r], at) for b in bottoms)
                yield functools.reduce(ptx.bit_and, above, below)

        return wgmma.hide_unless(is_between, x)

    bounds = (high,) if low is None else (high, low)
    return ptx.inline(apply_between, (x, WGMMA), *((bound, ROW) for bound in bounds), result=(x.shape, x.dtype, WGMMA))


def apply_segments(x: jax.Array, of_rows: jax.Ref, of_columns: jax.Ref, corner: Corner) -> jax.Array:
    """Returns `x [64, n]` where the row's and the column's numbers are equal, and -inf elsewhere, as `_apply_pairs`."""
    return _apply_pairs(x, of_rows, of_columns, corner, (("eq", 0),))


def apply_positions(
    x: jax.Array, of_rows: jax.Ref, of_columns: jax.Ref, corner: Corner, bounds: tuple[int | None, int | None]
) -> jax.Array:
    """Returns `x [64, n]` where the column's number less the row's is within `bounds`, and -inf elsewhere."""
    tests = ((test, bound) for test, bound in zip(("sle", "sge"), bounds, strict=True) if bound is not None)
    return _apply_pairs(x, of_rows, of_columns, corner, tuple(tests))


def _apply_pairs(
    x: jax.Array, of_rows: jax.Ref, of_columns: jax.Ref, corner: Corner, tests: tuple[tuple[str, int], ...]
) -> jax.Array:
    """Returns `x [64, n]` where each test holds between the row's number plus the test's, and the column's; else -inf.

    `of_rows [B, 1, T, 1]`, `of_columns [B, 1, 1, S]`, int32. A warp loads the numbers of 64 columns at once, a pair
    by each lane, and shuffles them: a lane has no registers to wait for all of its own pairs' loads at once.
    """
    size = of_columns.shape[3]

    def apply_tests(ctx, ref, x, rows, batch, column):
        lane = ptx.rem(utils.thread_idx(), 32)
        column = ptx.add(ptx.scalar(column), ptx.mul(lane, 2))
        base = ptx.global_address(ref)
        base = ptx.add(base, ptx.mul(arith.extui(base.type, ptx.scalar(batch)), 4 * size))
        base = ptx.add(base, ptx.mul(arith.extui(base.type, column), 4))
        of_lane = []
        for start in range(0, x.shape[1], 64):
            inside = [ptx.compare("slt", column, size - (start + e)) for e in range(2)]
            address = [ptx.add(base, 4 * (start + e)) for e in range(2)]
            if size % 2 == 0:
                word = ptx.load_if(address[0], inside[0], 64)
                pair = [arith.trunci(ptx.i32(), word), arith.trunci(ptx.i32(), arith.shrui(word, ptx.c64(32)))]
            else:
                pair = [ptx.load_if(a, i, 32) for a, i in zip(address, inside, strict=True)]
            of_lane.append(pair)
        of_row = [ptx.elements(pair)[0] for pair in rows.registers.flat]
        limits = [[(test, ptx.add(row, more) if more else row) for test, more in tests] for row in of_row]

        @functools.cache
        def of_column(j: int) -> list[ir.Value]:
            # From quad j's lane of the same place: 0x31f keeps a lane's own last two bits.
            shuffle = f"shfl.sync.idx.b32 $0, $1, {4 * (j % 8)}, 0x31f, -1;"
            return [ptx.asm_value(shuffle, "=r,r", [number]) for number in of_lane[j // 8]]

        def is_seen(j: int, r: int) -> list[ir.Value]:
            each = ([ptx.compare(test, limit, c) for test, limit in limits[r]] for c in of_column(j))
            return [functools.reduce(ptx.bit_and, tests) for tests in each]

        return wgmma.hide_unless(is_seen, x)

    batch, head, row, column = (jnp.int32(i) for i in corner)
    rows = load_tile(of_rows, (batch, head, row, column), 8)
    result = x.shape, x.dtype, WGMMA
    return ptx.inline(
        apply_tests,
        of_columns,
        (x, WGMMA),
        (rows, WGMMA),
        batch,
        column,
        result=result,
        static={"size": size, "tests": tests},
    )
