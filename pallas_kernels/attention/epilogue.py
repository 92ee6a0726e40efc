"""The stores of a warpgroup's results by threads: rows' numbers and sums, where rows are queries of packed heads."""

from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.attention.online_softmax import TileCoord
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import ROW, WGMMA
from pallas_kernels.mosaic.wgmma import lane_and_warp


def store_rows(target: jax.Ref, values: jax.Array, coord: TileCoord, *, queries_first: bool = False) -> None:
    """Stores a warpgroup's 64 numbers, one a row, into `[batch, heads, queries]`, as far as that goes.

    `queries_first`: into `[batch, queries, heads]`.
    """
    _, *extents = target.shape
    queries, packed = extents[0 if queries_first else 1], coord.heads

    def store_row_values(ctx, target, values, *coord):
        lane, warp = lane_and_warp(once=True)
        first = ptx.compare("eq", ptx.rem(lane, 4), 0)
        for r, value in enumerate(values.registers.flat):
            batch, head, query, exists = _row_coord(lane, warp, r, coord, packed, queries)
            outer, inner = (query, head) if queries_first else (head, query)
            index = ptx.add(ptx.mul(batch, extents[0]), outer)
            index = ptx.mul(arith.extui(ptx.i64(), index), extents[1])
            index = ptx.mul(ptx.add(index, arith.extui(ptx.i64(), inner)), 4)
            address = ptx.add(ptx.global_address(target), index)
            operands = [address, _number(value), ptx.bit_and(first, exists)]
            ptx.asm("@$2 st.global.f32 [$0], $1;", "l,f,b,~{memory}", operands)

    ptx.inline(
        store_row_values,
        target,
        (values, ROW),
        coord.batch,
        coord.head,
        coord.row,
        static={"packed": packed, "queries": queries, "queries_first": queries_first},
    )


def store_sums(target: jax.Ref, sums: jax.Array, coord: TileCoord, column: int) -> None:
    """Stores a warpgroup's rows of float32 into `[batch, queries, heads, columns]`, as far as the queries go."""
    (_, queries, heads, columns), packed = target.shape, coord.heads

    def store_row_sums(ctx, target, sums, *coord):
        lane, warp = lane_and_warp(once=True)
        within = ptx.add(ptx.mul(ptx.rem(lane, 4), 2), column)
        addresses, stored = [], []
        for r in range(2):
            index, head, query, exists = _row_coord(lane, warp, r, coord, packed, queries)
            for extent, i in ((queries, query), (heads, head)):
                index = ptx.add(ptx.mul(index, extent), i)
            index = ptx.mul(arith.extui(ptx.i64(), index), columns)
            index = ptx.mul(ptx.add(index, arith.extui(ptx.i64(), within)), 4)
            addresses.append(ptx.add(ptx.global_address(target), index))
            stored.append(exists)
        for i, pair in enumerate(sums.registers.flat):
            text = f"@$3 st.global.v2.f32 [$0+{i // 2 * 32}], {{$1, $2}};"
            ptx.asm(text, "l,f,f,b,~{memory}", [addresses[i % 2], *ptx.elements(pair), stored[i % 2]])

    ptx.inline(
        store_row_sums,
        target,
        (sums, WGMMA),
        coord.batch,
        coord.head,
        coord.row,
        static={"column": column, "packed": packed},
    )


def _row_coord(
    lane: ir.Value, warp: ir.Value, r: int, coord: tuple[Any, ...], packed: int, queries: int
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Returns batch, head and query of a thread's row `r`, 0 or 1, in a tile of `packed` heads; whether it exists."""
    batch, head, row = map(ptx.scalar, coord)
    line = ptx.add(ptx.mul(warp, 16), ptx.div(lane, 4))
    line = ptx.add(line, 8 * r)
    query = ptx.add(row, ptx.div(line, packed))
    head = ptx.add(ptx.mul(head, packed), ptx.rem(line, packed))
    return batch, head, query, ptx.compare("ult", query, queries)


def _number(value: ir.Value) -> ir.Value:
    return ptx.elements(value)[0] if isinstance(value.type, ir.VectorType) else value
