"""WGMMA on panels of shared memory: issue, wait, and the panels themselves.

Mosaic's own WGMMA always accumulates, so that registers must be cleared before: 32 of the 466 instructions that a tile
of keys takes with heads of 64. These can also overwrite. Mosaic's own does not read panels either.
Source: PTX ISA, "wgmma", matrix descriptors and strides.

Squares are 64 rows and columns that go between shared memory and the registers where WGMMA puts or reads them. float32
sums lie there as the registers do, a warp's after another's and 16 bytes of a thread after the other: no thread meets
another's bank, no address is computed, and a copy takes a warp's or all as one piece. 16-bit factors lie in swizzled
tiles, and are stored by the four registers of which an instruction multiplies, so that none has to be moved.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hardware import WARPGROUP_ROWS
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import WGMMA, Ref

_DEPTH = 16  # columns of 16-bit numbers that an instruction multiplies
_LINE = 128  # bytes of a panel's row
_EIGHT_LINES = 8 * _LINE  # over which the swizzle repeats
_SWIZZLE = 1  # how a descriptor names the swizzle of a line
SQUARE = 16, 256  # the shape of a square's sums
_SIDE = WARPGROUP_ROWS
_VECTORS = 8  # of a thread, of four numbers
_WARP_BYTES = _VECTORS * 32 * 16  # of a square's sums


def multiply(left: Ref, right: Ref, *, depth: int, sums: jax.Array | None = None) -> jax.Array:
    """Issues `left @ right.T` of `depth` columns in panels of shared memory; with `sums`, adds to those.

    Without `sums`, WGMMA overwrites the registers. The result is for `wait` alone.
    """
    dtype, (_, rows, _), (_, columns, _) = jnp.dtype(right.dtype), left.shape, right.shape

    def multiply_shared(ctx, left, right, *sums):
        pairs = []
        for column in range(0, depth, _DEPTH):
            panel, within = divmod(column, PANEL)
            offset = within * dtype.itemsize
            factors = [(x, panel * n * _LINE + offset) for x, n in ((left, rows), (right, columns))]
            pairs.append(tuple([_panel_descriptor(*factor)] for factor in factors))
        return _issue(pairs, columns, dtype, *sums)

    return _call(multiply_shared, (left, right), columns, sums, depth=depth)


def multiply_rows(sums: jax.Array, left: jax.Array, right: Ref) -> jax.Array:
    """Issues `sums + left @ right`, the right factor in panels of shared memory. The result is for `wait`."""
    dtype, columns, rows = jnp.dtype(right.dtype), sums.shape[1], right.shape[1]

    def multiply_registers(ctx, left, right, *sums):
        words = [ptx.pair_word(pair) for pair in left.registers.flat]
        pairs = []
        for i in range(rows // _DEPTH):
            descriptor = _panel_descriptor(right, i * _DEPTH * _LINE, rows * _LINE)
            pairs.append((words[4 * i : 4 * i + 4], [descriptor]))
        return _issue(pairs, columns, dtype, *sums, transposed=(False, True))

    return _call(multiply_registers, (left, right), columns, sums, width=columns)


def multiply_columns(left: Sequence[Ref], right: Sequence[Ref]) -> jax.Array:
    """Issues the sum of `x.T @ y`: each `x` a panel, each `y` panels of as many rows. The result is for `wait`."""
    dtype, (panels, rows, columns) = jnp.dtype(right[0].dtype), right[0].shape

    def multiply_transposed(ctx, *refs):
        pairs = []
        for x, y in zip(refs[: len(left)], refs[len(left) :], strict=True):
            for offset in range(0, rows * _LINE, _DEPTH * _LINE):
                pairs.append(([_panel_descriptor(x, offset)], [_panel_descriptor(y, offset, rows * _LINE)]))
        return _issue(pairs, panels * columns, dtype, transposed=(True, True))

    return _call(multiply_transposed, (*left, *right), panels * columns, None)


def _call(
    operation: Callable[..., mgpu.FragmentedArray],
    factors: tuple[Ref | jax.Array, ...],
    columns: int,
    sums: jax.Array | None,
    **static: int,
) -> jax.Array:
    operands = [*factors] if sums is None else [*factors, sums]
    operands = [(x, WGMMA) if isinstance(x, jax.Array) else x for x in operands]
    result = (WARPGROUP_ROWS, columns), jnp.float32, WGMMA
    return ptx.inline(operation, *operands, result=result, static=static)


def _issue(
    pairs: Sequence[tuple[list[ir.Value], list[ir.Value]]],
    columns: int,
    dtype: jnp.dtype,
    sums: mgpu.FragmentedArray | None = None,
    *,
    transposed: tuple[bool, bool] = (False, False),
) -> mgpu.FragmentedArray:
    """Returns a group of WGMMA of pairs of factors: a descriptor, or four registers on the left, and a descriptor.

    `transposed`: whether the left factor has its rows, and the right one its columns, along the lines of panels.
    """
    count, kind = columns // 2, {"bfloat16": "bf16", "float16": "f16"}[dtype.name]
    given = [] if sums is None else [x for pair in sums.registers.flat for x in ptx.elements(pair)]
    in_registers = len(pairs[0][0]) > 1
    immediates = ", ".join(["1", "1", *(str(int(x)) for x in transposed[in_registers:])])
    numbered = itertools.count(count + len(given))
    into = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    text = "{ .reg .pred p; wgmma.fence.sync.aligned;"
    for i, (left, _) in enumerate(pairs):
        factor = ",".join(f"${next(numbered)}" for _ in left)
        text += (
            f" setp.ne.b32 p, {int(i > 0 or sums is not None)}, 0; wgmma.mma_async.sync.aligned.m{WARPGROUP_ROWS}"
            f"n{columns}k{_DEPTH}.f32.{kind}.{kind} {into}, {'{' + factor + '}' if in_registers else factor}, "
            f"${next(numbered)}, p, {immediates};"
        )
    text += " wgmma.commit_group.sync.aligned; }"
    operands = [x for pair in pairs for factor in pair for x in factor]
    constraints = ["=f"] * count + [str(i) for i in range(len(given))]
    constraints += [kind for left, _ in pairs for kind in (*["r" if in_registers else "l"] * len(left), "l")]
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    results = ptx.asm_value(text, ",".join(constraints), [*given, *operands], struct)
    return _array([llvm.extractvalue(ir.F32Type.get(), results, [i]) for i in range(count)], columns)


def _array(values: list[ir.Value], columns: int) -> mgpu.FragmentedArray:
    registers = np.empty(WGMMA.to_mgpu().registers_shape((WARPGROUP_ROWS, columns)), dtype=object)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    registers.flat[:] = [vector.from_elements(pair, values[i : i + 2]) for i in range(0, len(values), 2)]
    return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None)


def _panel_descriptor(ref: ir.Value, offset: int, between_panels: int = 0) -> ir.Value:
    """Makes the matrix descriptor of panels from byte `offset` on; `between_panels` is their stride, if several."""
    address = ptx.bit_and(arith.shrui(ptx.shared_address(ref), ptx.c32(4)), 0x3FFF)
    layout = between_panels >> 4 << 16 | _EIGHT_LINES >> 4 << 32 | _SWIZZLE << 62
    layout = ptx.c64(layout - (1 << 64) if layout >= 1 << 63 else layout)
    # Added elsewhere, the offset has the same value, but ptxas keeps the descriptor in registers of each thread.
    if between_panels:
        return ptx.add(arith.ori(arith.extui(ptx.i64(), address), layout), offset >> 4)
    return arith.ori(arith.extui(ptx.i64(), ptx.add(address, offset >> 4)), layout)


def wait(issued: jax.Array, *, pending: int) -> jax.Array:
    """Waits for a product; `pending` products that were issued after it may still be under way."""
    plgpu.wgmma_wait(pending)
    return completed(issued)


def completed(issued: jax.Array) -> jax.Array:
    """Returns a product that an earlier wait has completed."""
    return lax.optimization_barrier(issued)


def pin_wait_after(x: jax.Array) -> None:
    """Keeps ptxas from moving the next wait above the computation of `x`, whose numbers are below 2^127.

    ptxas hoists `wait_group` above the exponentials that should overlap with the product, but never over `nanosleep`.
    A `nanosleep` that is predicated off depends on the last number of `x`.
    """

    def wait_for_numbers(ctx, x):
        number = ptx.elements(x.registers.flat[-1])[-1]
        ptx.asm("{ .reg .pred p; setp.gt.f32 p, $0, 0f7F000000; @p nanosleep.u32 0; }", "f", [number])

    ptx.inline(wait_for_numbers, (x, WGMMA))


def columns_of_tile(size: int, dtype: jnp.dtype) -> int:
    """Counts the columns of the widest swizzled tile, of 128 bytes at most, that divides `size` columns."""
    return next(c for c in (n // dtype.itemsize for n in (128, 64, 32)) if size % c == 0)


def transforms(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """Makes the transforms of shared memory in swizzled tiles of eight rows and `columns` columns."""
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(columns * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]


def tiled(shape: tuple[int, ...], dtype: DTypeLike | None) -> pl.MemoryRef:
    """Makes shared memory in the tiles that Mosaic's WGMMA reads."""
    dtype = jnp.dtype(dtype)
    return plgpu.SMEM(shape, dtype, transforms=transforms(columns_of_tile(shape[-1], dtype), dtype))


PANEL = 64  # columns of a panel, whose rows of 16-bit numbers take a swizzled line of 128 bytes


def panels(shape: tuple[int, ...], dtype: DTypeLike) -> pl.MemoryRef:
    """Makes shared memory for `[..., rows, columns]`, as `[..., panels, rows, 64]`: TMA fills a panel from any rows.

    Lines are swizzled by TMA and by WGMMA's descriptors, of which Pallas knows nothing. Where an array in global memory
    ends, TMA fills the rest of a panel with zeros.
    """
    *leading, rows, columns = shape
    assert jnp.dtype(dtype).itemsize == 2
    return plgpu.SMEM((*leading, -(-columns // PANEL), rows, PANEL), dtype)


def store(target: Any, value: jax.Array) -> None:
    """Stores registers to global memory in their layout; JAX 0.12 would refuse rows shorter than a sector."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def store_square(target: jax.Ref, sums: jax.Array) -> None:
    """Stores a square of float32."""

    def store_fragments(ctx, target, sums):
        at = _thread_address(target)
        for i, pairs in enumerate(_vectors(sums.registers)):
            numbers = [number for pair in pairs for number in ptx.elements(pair)]
            ptx.asm(f"st.shared.v4.f32 [$0+{_offset(i)}], {{$1,$2,$3,$4}};", "r,f,f,f,f,~{memory}", [at, *numbers])

    ptx.inline(store_fragments, target, (sums, WGMMA))


def load_square(source: jax.Ref) -> jax.Array:
    """Loads a square that `store_square` stored, by the same thread or as a copy of it."""

    def load_fragments(ctx, source):
        at, f32 = _thread_address(source), ir.F32Type.get()
        registers = np.empty(WGMMA.to_mgpu().registers_shape((_SIDE, _SIDE)), dtype=object)
        struct, pair = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"), ir.VectorType.get((2,), f32)
        for i, pairs in enumerate(_vectors(registers)):
            text = f"ld.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{_offset(i)}];"
            loaded = ptx.asm_value(text, "=f,=f,=f,=f,r,~{memory}", [at], struct)
            numbers = [llvm.extractvalue(f32, loaded, [e]) for e in range(4)]
            pairs[:] = [vector.from_elements(pair, numbers[e : e + 2]) for e in (0, 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None)

    return ptx.inline(load_fragments, source, result=((_SIDE, _SIDE), jnp.float32, WGMMA))


def add_square(source: jax.Ref, target: jax.Ref) -> None:
    """Adds what `store_square` stored to global memory, each warp its own part."""

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

    ptx.inline(add_warps, source, target)


def add_sums(target: jax.Ref, sums: jax.Array) -> None:
    """Adds a square of float32 to one in global memory, from registers, in the layout of `store_square`."""

    def reduce_fragments(ctx, target, sums):
        lane, warp = lane_and_warp()
        offset = ptx.add(ptx.mul(warp, _WARP_BYTES), ptx.mul(lane, 16))
        at = ptx.add(ptx.global_address(target), arith.extui(ptx.i64(), offset))
        for i, pairs in enumerate(_vectors(sums.registers)):
            numbers = [number for pair in pairs for number in ptx.elements(pair)]
            text = f"red.relaxed.gpu.global.add.v4.f32 [$0+{_offset(i)}], {{$1,$2,$3,$4}};"
            ptx.asm(text, "l,f,f,f,f,~{memory}", [at, *numbers])

    ptx.inline(reduce_fragments, target, (sums, WGMMA))


def await_square_read() -> None:
    """Waits until the copy of a warp's part has left shared memory."""

    def await_warps(ctx):
        ptx.asm("cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff;", "~{memory}", [])

    ptx.inline(await_warps)


def rows_of_squares(sums: jax.Array) -> jax.Array:
    """Turns stored squares, `[..., rows / 64, columns / 64, 16, 256]`, into `[..., rows, columns]`."""
    *batch, down, across, _, _ = sums.shape
    # A square's axes: warp, half of its rows, its 16 columns, row, pair of columns, their half, and one of the pair.
    parts = sums.reshape(-1, down, across, 4, 2, 4, 8, 4, 2, 2)
    rows = parts.transpose(0, 1, 3, 4, 6, 2, 5, 8, 7, 9)
    return rows.reshape(*batch, down * _SIDE, across * _SIDE)


def stmatrix(target: Ref, factor: jax.Array, *, once: bool = False) -> None:
    """Stores a left factor `[64, n]` of 16 bits into `[n / 64, 64, 64]`; `once`: outside of the loop over steps."""
    dtype = jnp.dtype(target.dtype)

    def store_squares(ctx, target, factor):
        lane, warp = lane_and_warp(once)
        # Eight lanes name the rows of each of an instruction's four 8 x 8 matrices: rows, the eight below, both again
        # eight columns on.
        matrix, row = ptx.div(lane, 8), ptx.rem(lane, 8)
        below, right = ptx.rem(matrix, 2), ptx.div(matrix, 2)
        line = ptx.add(ptx.mul(warp, 16), ptx.add(ptx.mul(below, 8), row))
        base = ptx.add(ptx.shared_address(target), ptx.mul(line, _LINE))
        # Opaque, lest the compiler keep each sum with a constant in a register all along the loop.
        swizzled = ptx.opaque_word(ptx.mul(arith.xori(right, row), 16))
        words = [ptx.pair_word(pair) for pair in factor.registers.flat]
        for i in range(0, len(words), 4):
            square, columns = divmod(i // 4, _SIDE // 16)
            at, here = ptx.add(base, arith.xori(swizzled, ptx.c32(32 * columns))), words[i : i + 4]
            registers = ",".join(f"${1 + j}" for j in range(len(here)))
            text = f"stmatrix.sync.aligned.m8n8.x{len(here)}.shared.b16 [$0+{square * _SIDE * _LINE}]"
            ptx.asm(f"{text}, {{{registers}}};", ",".join(["r"] * (1 + len(here))) + ",~{memory}", [at, *here])

    assert target.shape[1:] == (_SIDE, _SIDE)
    assert dtype.itemsize * _SIDE == _LINE
    ptx.inline(store_squares, target, (factor, WGMMA))


def commit_square() -> None:
    """Orders what this thread has stored to shared memory before products and copies that a barrier lets begin later.

    `commit_smem` also waits for the warpgroup's other threads, which is not needed where each arrives at that barrier.
    """

    def fence_shared(ctx):
        ptx.asm("fence.proxy.async.shared::cta;", "~{memory}", [])

    ptx.inline(fence_shared)


def _vectors(registers: np.ndarray) -> list[np.ndarray]:
    """Returns each vector's two registers: of the same row, eight columns apart."""
    pairs = registers.reshape(-1)  # by eight columns, and by eight rows in each
    return [pairs[4 * j + r : 4 * j + r + 3 : 2] for r in range(2) for j in range(_VECTORS // 2)]


def _offset(i: int) -> int:
    return i * 32 * 16


def _thread_address(ref: ir.Value) -> ir.Value:
    lane, warp = lane_and_warp()
    offset = ptx.add(ptx.mul(warp, _WARP_BYTES), ptx.mul(lane, 16))
    return ptx.add(ptx.shared_address(ref), offset)


def hide_unless(kept: Callable[[int, int], Iterable[ir.Value]], x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """Returns `x`, within an inline operation, and -inf where it is not `kept`.

    `kept(j, r)` is of the two columns from `8 j` on and the row `8 r`, counted from a thread's first ones.
    """
    registers, outside = np.empty_like(x.registers), utils.c(-math.inf, ir.F32Type.get())
    for i, pair in enumerate(x.registers.flat):
        pairs = zip(kept(i // 2, i % 2), ptx.elements(pair), strict=True)
        registers.flat[i] = vector.from_elements(pair.type, [arith.select(keep, v, outside) for keep, v in pairs])
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def lane_and_warp(once: bool = False) -> tuple[ir.Value, ir.Value]:
    """Returns a thread's lane in its warp and the warp in its warpgroup; `once`: outside of the loop over steps."""
    thread = ptx.reread_thread_index() if once else ptx.thread_in_warpgroup()
    return ptx.rem(thread, 32), ptx.div(thread, 32)
