"""Loads and stores of 16-byte vectors of a row, between global memory and registers.

A row of any length and any alignment is covered by 16-byte vectors that are aligned in memory, so that every length
runs at full vector width. The first and the last vector may cross the row's ends: elements outside the row are read as
`fill` and never written. (The last vector of an array may end up to 14 bytes past it; XLA allocates multiples of 256.)

Sums do not depend on where such vectors begin: rows with the same elements have the same sums, bit for bit. The kernels
add up row vectors, which begin at the row's start. A row vector ends in the next lane's aligned vector, and the last
one of a warp in the first one of the next warp: a tile that `wraps` holds all elements of the warp's row vectors, the
last ones in the place of those before the first one. `row_scalars.sums_of_rows` adds them up in order.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import WARPGROUP, Index

VECTOR_BYTES = 16


@dataclasses.dataclass(frozen=True)
class RegisterTile:
    """A warpgroup's vectors in registers: `registers` vectors of `vector` elements in each thread.

    With `lanes` = 128 all are of one row, and each warp's quarter stands as a row of the array; with fewer, `lanes`
    threads share a row and each warp holds `32 // lanes` rows. Arrays have the shape `shape`; a reduction over axis 1
    needs shuffles only, no shared memory. A warpgroup takes `tiles` tiles, of rows that follow one another.
    If the tile `wraps`, a warp's quarter begins and ends with row vectors; such a tile is only read.
    """

    dtype: jnp.dtype
    registers: int
    lanes: int = WARPGROUP
    tiles: int = 1
    wraps: bool = False

    @property
    def vector(self) -> int:
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def lanes_in_warp(self) -> int:
        return min(self.lanes, 32)

    @property
    def rows(self) -> int:
        return 4 * (32 // self.lanes_in_warp)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.vectors_in_warp * self.vector

    @property
    def vectors_in_warp(self) -> int:
        return self.registers * self.lanes_in_warp

    @property
    def layout(self) -> ptx.Layout:
        v, lanes = self.vector, self.lanes_in_warp
        if lanes == 32:
            tiling, warp_dim, lane_dims = plgpu.Tiling(((4, 32 * v), (v,))), -3, (-2,)
        elif lanes == 1:
            tiling, warp_dim, lane_dims = plgpu.Tiling(((self.rows, v), (32, v))), -4, (-2,)
        else:
            tiling, warp_dim, lane_dims = plgpu.Tiling(((self.rows, lanes * v), (32 // lanes, v))), -4, (-2, -3)
        return plgpu.Layout.TILED(tiling, warp_dims=(warp_dim,), lane_dims=lane_dims, vector_dim=-1)

    def full(self, value: float) -> jax.Array:
        """Returns a float32 array of `shape`. Its layout is given, because inferring it takes seconds."""
        return plgpu.layout_cast(jnp.full(self.shape, value, jnp.float32), self.layout)

    def broadcast(self, per_row: jax.Array) -> jax.Array:
        """Broadcasts `[rows]` to `shape`."""
        per_row = plgpu.layout_cast(per_row, self.layout.reduce(1))
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(per_row, self.shape, [0]), self.layout)


@dataclasses.dataclass(frozen=True)
class RowPredicate:
    """Says which of a row's vectors a thread owns, and which of them may cross an end of the row.

    A tile that starts at vector 0 of the row covers vectors below `static_limit`, which is None where the tile's start
    is known only at run time.
    """

    tile: RegisterTile
    rows: int
    cols: int
    static_limit: int | None = None
    interior: bool = False  # whether no vector can touch an end of the row

    @property
    def rows_may_end(self) -> bool:
        """Says whether a thread's row may lie past the last one."""
        return self.tile.lanes <= 32 and self.rows % (self.tile.rows * self.tile.tiles) != 0

    @property
    def aligned(self) -> bool:
        return self.cols % self.tile.vector == 0

    def needs_element_mask(self, register: int) -> bool:
        """Says whether a vector of this register may lie partly in the row."""
        if self.interior:
            return False
        if self.aligned or self.static_limit is None:
            return not self.aligned
        lanes, v = self.tile.lanes_in_warp, self.tile.vector
        last = {(self.cols - 1) // v, (self.cols + v - 2) // v}
        return register == 0 or any(k // lanes == register for k in last)

    def in_bounds(self, register: int) -> bool:
        """Says whether all vectors of this register lie in the row."""
        if self.interior:
            return True
        if self.static_limit is None or self.rows_may_end:
            return False
        return (register + 1) * self.tile.lanes_in_warp <= self.cols // self.tile.vector

    @classmethod
    def of(cls, ref: jax.Ref, tile: RegisterTile, at_start: bool = False, interior: bool = False) -> "RowPredicate":
        static_limit = tile.registers * tile.lanes if at_start and tile.lanes <= 32 else None
        rows, cols = ref.shape
        return cls(tile, rows, cols, static_limit, interior)

    def vectors(
        self, base: ir.Value, row: ir.Value, first: ir.Value, wanted: ir.Value | None = None
    ) -> "Iterator[Vector]":
        """Emits code that finds the thread's vectors of its row, `first` vectors from the row's start.

        A thread whose row is not `wanted` sees a row without columns.
        """
        tile = self.tile
        thread = ptx.thread_in_warpgroup()
        if tile.lanes <= 32:
            row = ptx.add(row, ptx.div(thread, tile.lanes))
            start = ptx.add(first, ptx.rem(thread, tile.lanes))
        else:
            of_warp = ptx.mul(ptx.div(thread, 32), tile.registers * 32)
            start = ptx.add(first, ptx.add(of_warp, ptx.rem(thread, 32)))
        address, head, count = self.row(base, row)
        address = ptx.add(address, ptx.mul(arith.extui(ptx.i64(), start), VECTOR_BYTES))
        limit = ptx.c32(self.cols)
        conditions = [] if wanted is None else [wanted]
        if self.rows_may_end:
            conditions.append(ptx.compare("ult", row, self.rows))
        for exists in conditions:
            count, limit = arith.select(exists, count, ptx.c32(0)), arith.select(exists, limit, ptx.c32(0))
        for j in range(tile.registers):
            step = j * tile.lanes_in_warp
            k = ptx.add(start, step)
            inside = wanted if self.in_bounds(j) else ptx.compare("ult", k, count)
            masks = None
            moved = None
            if self.needs_element_mask(j):
                column = ptx.sub(ptx.mul(k, tile.vector), head)
                columns = [ptx.add(column, e) for e in range(tile.vector)]
                if self.wraps and j == 0:
                    behind, zero = ptx.c32(tile.vectors_in_warp * tile.vector), ptx.c32(0)
                    moved = [arith.select(w, behind, zero) for w in self.wrapped(head)]
                    columns = list(map(ptx.add, columns, moved))
                masks = [ptx.compare("ult", at, limit) for at in columns]
            yield Vector(j, ptx.add(address, step * VECTOR_BYTES), inside, masks, moved)

    @property
    def wraps(self) -> bool:
        return self.tile.wraps and not self.aligned

    def wrapped(self, head: ir.Value) -> list[ir.Value]:
        """Says which elements of its first vector the warp's first lane takes from behind the warp's quarter."""
        is_first = ptx.compare("eq", ptx.rem(ptx.thread_in_warpgroup(), 32), 0)
        before = [ptx.compare("ult", ptx.c32(e), head) for e in range(self.tile.vector)]
        return [ptx.bit_and(is_first, b) for b in before]

    def wrap(self, vector_of_tile: ir.Value, behind: ir.Value, head: ir.Value) -> ir.Value:
        """Replaces elements of the thread's first vector by those behind the quarter; returns the words."""
        per_word, all_bits = self.tile.vector // 4, (1 << 32) - 1
        bits = all_bits >> (32 - 32 // per_word)
        words, takes = [], self.wrapped(head)
        for i, (own, other) in enumerate(zip(ptx.elements(vector_of_tile), ptx.elements(behind), strict=True)):
            taken = ptx.c32(0)
            for e in range(per_word):
                taken = arith.ori(
                    taken, arith.select(takes[i * per_word + e], ptx.c32(bits << (e * 32 // per_word)), ptx.c32(0))
                )
            kept = ptx.bit_and(own, arith.xori(taken, ptx.c32(all_bits)))
            words.append(arith.ori(kept, ptx.bit_and(other, taken)))
        return vector.from_elements(ir.VectorType.get((4,), ptx.i32()), words)

    def row(self, base: ir.Value, row: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Returns the address of a row's first vector, the elements in it before the row, and the number of vectors."""
        address = ptx.add(base, ptx.mul(arith.extsi(ptx.i64(), row), self.cols * self.tile.dtype.itemsize))
        if self.aligned:
            return address, ptx.c32(0), ptx.c32(self.cols // self.tile.vector)
        overhang = ptx.bit_and(address, VECTOR_BYTES - 1)
        head = ptx.div(arith.trunci(ptx.i32(), overhang), self.tile.dtype.itemsize)
        count = ptx.div(ptx.add(head, self.cols + self.tile.vector - 1), self.tile.vector)
        return ptx.sub(address, overhang), head, count


@dataclasses.dataclass(frozen=True)
class Vector:
    """One vector of a thread: its address, whether it lies in the row (None: always), which elements do (None: all).

    The elements come from `moved` columns further on in the row (None: 0).
    """

    register: int
    address: ir.Value
    inside: ir.Value | None
    masks: list[ir.Value] | None
    moved: list[ir.Value] | None


def load_vector(address: ir.Value, predicate: ir.Value | None, fill: int, space: str = "global") -> ir.Value:
    """Loads the four words of a vector; each is `fill` where the predicate does not hold."""
    kind = "l" if space == "global" else "r"
    text, operands, constraints = f"ld.{space}.v4.b32 {{$0,$1,$2,$3}}, [$4];", [address], f"=&r,=&r,=&r,=&r,{kind}"
    if predicate is not None:
        text = "".join(f"mov.b32 ${i}, {fill};" for i in range(4)) + "@$5 " + text
        operands, constraints = [address, predicate], constraints + ",b"
    words = ptx.asm_value(text, constraints, operands, llvm.StructType.get_literal([ptx.i32()] * 4))
    parts = [llvm.extractvalue(ptx.i32(), words, ir.DenseI64ArrayAttr.get([i])) for i in range(4)]
    return vector.from_elements(ir.VectorType.get((4,), ptx.i32()), parts)


def _load_behind(
    row_pred: RowPredicate, v: Vector, base: ir.Value, row: ir.Value, fill: int
) -> tuple[ir.Value, ir.Value]:
    """Loads the vector behind a warp's quarter, if any of it is wanted, and returns the row's head with it."""
    _, head, _ = row_pred.row(base, row)
    assert v.masks is not None
    wanted = ptx.bit_and(row_pred.wrapped(head)[0], v.masks[0])
    address = ptx.add(v.address, row_pred.tile.vectors_in_warp * VECTOR_BYTES)
    return load_vector(address, wanted, fill), head


def load(
    ref: jax.Ref, row: Index, first: Index, tile: RegisterTile, *, fill: float, labels: jax.Array | None = None
) -> jax.Array:
    """Loads the tile of `ref`, `[rows, cols]` in global memory, that starts at vector `first` of row `row`.

    Columns outside the row are `fill`, as are all columns of rows with a negative label, which are not read. A static
    `first` of 0 lets tiles of whole warps skip needless checks.
    """
    row_pred, dtype = RowPredicate.of(ref, tile, at_start=isinstance(first, int) and first == 0), jnp.dtype(ref.dtype)
    layout = tile.layout.to_mgpu()
    fill_word = int(np.full(VECTOR_BYTES // dtype.itemsize, fill, dtype).view(np.uint32)[0])

    def load_vectors(ctx, ref, row, first, *labels):
        element = ir.MemRefType(ref.type).element_type
        vector_type = ir.VectorType.get((tile.vector,), element)
        registers = np.empty(layout.registers_shape(tile.shape), dtype=object)
        wanted = ptx.compare("sge", ptx.row_value(labels[0]), 0) if labels else None
        for v in row_pred.vectors(ptx.global_address(ref), ptx.scalar(row), ptx.scalar(first), wanted):
            words = load_vector(v.address, v.inside, fill_word)
            if v.moved is not None:
                words = row_pred.wrap(
                    words, *_load_behind(row_pred, v, ptx.global_address(ref), ptx.scalar(row), fill_word)
                )
            value = vector.bitcast(vector_type, words)
            if v.masks is not None:
                masked = zip(v.masks, ptx.elements(value), strict=True)
                outside = utils.c(fill, element)
                value = vector.from_elements(vector_type, [arith.select(m, x, outside) for m, x in masked])
            registers.flat[v.register] = value
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    of_rows = () if labels is None else ((labels, tile.layout.reduce(1)),)
    return ptx.inline(
        load_vectors,
        ref,
        row,
        first,
        *of_rows,
        result=(tile.shape, dtype, tile.layout),
        static={"fill": fill, "row_pred": row_pred},
    )


def store(
    ref: jax.Ref,
    row: Index,
    first: Index,
    value: jax.Array,
    tile: RegisterTile,
    *,
    interior: bool,
    evict_first: bool = False,
) -> None:
    """Stores `value` where `load` reads; columns outside the row stay as they are. An `interior` tile has none.

    With `evict_first`, L2 evicts the values before others.
    """
    row_pred = RowPredicate.of(ref, tile, isinstance(first, int) and first == 0, interior)
    bits = 8 * jnp.dtype(ref.dtype).itemsize

    def store_vectors(ctx, ref, value, row, first):
        words, word = ir.VectorType.get((4,), ptx.i32()), ir.IntegerType.get_signless(bits)
        for v in row_pred.vectors(ptx.global_address(ref), ptx.scalar(row), ptx.scalar(first)):
            register, whole = value.registers.flat[v.register], v.inside
            if v.masks is not None:
                whole = ptx.bit_and(v.masks[0], v.masks[-1])
                partly = arith.xori(whole, utils.c(1, ir.IntegerType.get_signless(1)))
                parts = ptx.elements(vector.bitcast(ir.VectorType.get((tile.vector,), word), register))
                for e, (part, mask) in enumerate(zip(parts, v.masks, strict=True)):
                    at = ptx.add(v.address, e * bits // 8)
                    operands = [at, part, ptx.bit_and(partly, mask)]
                    ptx.asm(f"@$2 st.global.b{bits} [$0], $1;", f"l,{ptx.KINDS[bits]},b", operands)
            guard, operands = ("", []) if whole is None else ("@$5 ", [whole])
            text = f"{guard}st.global.v4.b32 [$0], {{$1,$2,$3,$4}};"
            if evict_first:
                create = ".reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
                text = f"{{ {create} {guard}st.global.L2::cache_hint.v4.b32 [$0], {{$1,$2,$3,$4}}, policy; }}"
            ptx.asm(
                text,
                "l,r,r,r,r" + ",b" * len(operands),
                [v.address, *ptx.elements(vector.bitcast(words, register)), *operands],
            )

    ptx.inline(store_vectors, ref, (value, tile.layout), row, first, static={"row_pred": row_pred})


def row_of(tile: RegisterTile, row: ir.Value) -> ir.Value:
    """Returns the row that the thread works on."""
    if tile.lanes > 32:
        return row
    return ptx.add(row, ptx.div(ptx.thread_in_warpgroup(), tile.lanes))


def select_by_mask(
    ref: jax.Ref, rows: int, row: Index, first: Index, tile: RegisterTile, z: jax.Array, other: float
) -> jax.Array:
    """Selects `z` where the mask holds and `other` elsewhere; `ref` is `[rows, cols]` or, for all rows, `[1, cols]`."""
    held = _load_mask(ref, rows, row, first, tile)
    return ptx.where(held != 0.0, z, jnp.full_like(z, other))


def select_inside(
    shape: tuple[int, int], row: Index, first: Index, tile: RegisterTile, z: jax.Array, other: float
) -> jax.Array:
    """Selects `z` in the row of a `[rows, cols]` array, and `other` where the tile crosses the row's ends."""
    row_pred = RowPredicate(tile, shape[0], shape[1])

    def keep_inside(ctx, z, row, first):
        registers, f32 = z.registers.copy(), ir.F32Type.get()
        for v in row_pred.vectors(ptx.c64(0), ptx.scalar(row), ptx.scalar(first)):
            kept = [v.inside] * tile.vector if v.masks is None else v.masks
            pairs = zip(kept, ptx.elements(registers.flat[v.register]), strict=True)
            chosen = [arith.select(keep, x, mgpu.utils.c(other, f32)) for keep, x in pairs]
            registers.flat[v.register] = vector.from_elements(ir.VectorType.get((tile.vector,), f32), chosen)
        return mgpu.FragmentedArray(_registers=registers, _layout=z.layout, _is_signed=None)

    return ptx.inline(
        keep_inside,
        (z, tile.layout),
        row,
        first,
        result=(tile.shape, jnp.float32, tile.layout),
        static={"other": other, "row_pred": row_pred},
    )


def _load_mask(ref: jax.Ref, rows: int, row: Index, first: Index, tile: RegisterTile) -> jax.Array:
    """Loads the mask's bytes as float32, 0 outside the row."""
    mask_rows, cols = ref.shape
    row_pred, layout = RowPredicate(tile, rows, cols), tile.layout.to_mgpu()

    def load_mask(ctx, ref, row, first):
        f32, i8 = ir.F32Type.get(), ir.IntegerType.get_signless(8)
        registers = np.empty(layout.registers_shape(tile.shape), dtype=object)
        base = ptx.global_address(ref)
        # Zero as a base gives vectors whose "address" is where the logits lie in their array, in bytes.
        for v in row_pred.vectors(ptx.c64(0), ptx.scalar(row), ptx.scalar(first)):
            at = ptx.div(v.address, tile.dtype.itemsize)
            if mask_rows == 1:
                at = ptx.sub(at, ptx.mul(arith.extsi(at.type, row_of(tile, ptx.scalar(row))), cols))
            held = []
            for e in range(tile.vector):
                inside = v.inside if v.masks is None else v.masks[e]
                assert inside is not None
                place = ptx.add(at, e)
                if v.moved is not None:
                    place = ptx.add(place, arith.extui(place.type, v.moved[e]))
                byte = ptx.load_if(ptx.add(base, place), inside, 8)
                held.append(arith.uitofp(f32, arith.trunci(i8, byte)))
            registers.flat[v.register] = vector.from_elements(ir.VectorType.get((tile.vector,), f32), held)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return ptx.inline(
        load_mask,
        ref,
        row,
        first,
        result=(tile.shape, jnp.float32, tile.layout),
        static={"mask_rows": mask_rows, "row_pred": row_pred},
    )
