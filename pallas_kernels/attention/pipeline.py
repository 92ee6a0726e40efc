"""A TMA pipeline without a producer: the last warp to release a stage refills it.

A stage is a place in shared memory with two mbarriers. `full` completes when the stage's copies have landed, `empty`
when every warp has read the stage. Each warp arrives at `empty`; the one whose arrival completes the phase issues the
stage's next copies. No warp waits for another one's release, and every warpgroup computes.
Source: PTX ISA, "mbarrier": an arrival returns the state before it, of which "mbarrier.pending_count" is a part.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.attention import wgmma
from pallas_kernels.mosaic import mbarrier, ptx
from pallas_kernels.mosaic.ptx import Index

LANES = 32  # of a warp
VECTOR_BYTES = 16  # that a thread stores at once
TMA_ROWS = 8  # of a swizzled tile
SWIZZLE_BYTES = 128  # of a panel's row

barriers = mbarrier.barriers
start = mbarrier.start_barriers


def wait(full: jax.Ref, n: Index, stages: int) -> None:
    """Waits until the copies of step `n` have landed; `full`: the barriers of all stages."""
    parity = stage(lax.div(jnp.asarray(n).astype(jnp.uint32), jnp.uint32(stages)), 2)
    mbarrier.wait(full.at[stage(n, stages)], parity, "cta")


def stage(n: Index, stages: int) -> jax.Array:
    """Which stage step `n` has."""
    return lax.rem(jnp.asarray(n).astype(jnp.uint32), jnp.uint32(stages)).astype(jnp.int32)


def arrive(empty: jax.Ref) -> jax.Array:
    """Each warp arrives once; 1 in the lane that completes the phase, for a later `when`, and 0 in the others."""

    def arrive_at_stage(ctx, empty):
        text = (
            "{ .reg .b32 lane; .reg .b64 state; .reg .pred first; mov.u32 lane, %laneid; "
            "setp.eq.u32 first, lane, 0; mov.b32 $0, 0; mov.b64 state, 0; bar.warp.sync 0xffffffff; "
            "@first mbarrier.arrive.shared.b64 state, [$1]; @first mbarrier.pending_count.b64 $0, state; }"
        )
        return ptx.integer(ptx.asm_value(text, "=&r,r,~{memory}", [ptx.shared_address(empty)]))

    pending = ptx.inline(arrive_at_stage, empty, result=ptx.INTEGER)
    return (pending == 1).astype(jnp.int32)


def release(empty: jax.Ref) -> jax.Array:
    """Each warp arrives once; 1 in the warp whose arrival is the phase's last, and 0 in the others."""

    def release_stage(ctx, empty):
        # A vote, rather than a shuffle, tells the compiler that the result is the same in all lanes: it then keeps the
        # descriptors of the products beside the branch in uniform registers.
        text = (
            "{ .reg .b32 lane, pending; .reg .b64 state; .reg .pred first, last; mov.u32 lane, %laneid; "
            "setp.eq.u32 first, lane, 0; mov.b32 pending, 0; mov.b64 state, 0; bar.warp.sync 0xffffffff; "
            "@first mbarrier.arrive.shared.b64 state, [$1]; @first mbarrier.pending_count.b64 pending, state; "
            "setp.eq.u32 last, pending, 1; vote.sync.any.pred last, last, 0xffffffff; selp.u32 $0, 1, 0, last; }"
        )
        return ptx.integer(ptx.asm_value(text, "=r,r,~{memory}", [ptx.shared_address(empty)]))

    return ptx.inline(release_stage, empty, result=ptx.INTEGER)


def is_first_warp() -> jax.Array:
    """1 in the first warp of the CTA, and 0 in the others."""

    def first_warp(ctx):
        text = (
            "{ .reg .b32 thread; .reg .pred first; mov.u32 thread, %tid.x; setp.lt.u32 first, thread, 32; "
            "vote.sync.any.pred first, first, 0xffffffff; selp.u32 $0, 1, 0, first; }"
        )
        return ptx.integer(ptx.asm_value(text, "=r", []))

    return ptx.inline(first_warp, result=ptx.INTEGER)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when` of a condition that is the same in all lanes of a warp; a vote makes that known to the compiler.

    Beside a branch that lanes might take alone, the compiler would not keep descriptors in uniform registers.
    """

    def vote_any(ctx, x):
        text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }"
        return ptx.integer(ptx.asm_value(text, "=r,r", [ptx.scalar(x)]))

    vote_any.interpret = lambda x: ({}, [x])
    return pl.when(ptx.inline(vote_any, condition, result=ptx.INTEGER) != 0)


def expect(full: jax.Ref, count: Index) -> None:
    """The calling warp arrives, and announces `count` bytes of the stage's next copies."""

    def expect_copies(ctx, full, count):
        elected = utils.single_thread_predicate(utils.ThreadSubset.WARP)
        operands = [ptx.shared_address(full), ptx.scalar(count), elected]
        ptx.asm("@$2 mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", "r,r,b,~{memory}", operands)

    ptx.inline(expect_copies, full, count)


def size(ref: Any) -> int:
    """Bytes of a part of shared memory."""
    return math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize


Copy = tuple[Any, tuple[Any, ...], Any]  # array, place, shared memory


def issue(full: jax.Ref, *copies: Copy) -> None:
    """The calling warp announces the bytes of copies at `full`, and issues them: of rows into panels, or of tiles."""
    expect(full, sum(size(to) for *_, to in copies))
    for source, at, to in copies:
        (copy_rows if len(to.shape) == 3 else copy)(source, at, to, full)


def copy(source: jax.Ref, at: tuple[Any, ...], to: Any, full: jax.Ref) -> None:
    """The calling warp issues a TMA copy of `source[at]` into shared memory; the copy counts its bytes at `full`.

    `at`: for each axis an index, a `pl.ds` of static size, or `slice(None)`. Places outside of `source` become zeros.
    """
    starts = [i.start if isinstance(i, pl.Slice) else i for i in at if not isinstance(i, slice)]
    sizes = [None if isinstance(i, slice) else i.size if isinstance(i, pl.Slice) else 0 for i in at]
    dtype, tiled = jnp.dtype(source.dtype), len(to.shape) > 1
    columns = wgmma.columns_of_tile(to.shape[-1], dtype) if tiled else 0

    def copy_tile(ctx, source, to, full, *starts):
        index, following = [], iter(starts)
        for extent in sizes:
            if extent is None:
                index.append(slice(None))
                continue
            first = arith.index_cast(ir.IndexType.get(), ptx.scalar(next(following)))
            index.append(mgpu.ds(first, int(extent)) if extent else first)
        _copier(ctx, source, full, columns * dtype.itemsize if tiled else None)(
            dst_ref=to,
            gmem_slice=tuple(index),
            gmem_transform=(mgpu.TileTransform((TMA_ROWS, columns)),) if tiled else (),
        )

    target = plgpu.RefType(wgmma.transforms(columns, dtype) if tiled else ())
    ptx.inline(copy_tile, source, (to, target), full, *starts, static={"sizes": sizes})


def _copier(ctx: Any, source: ir.Value, full: ir.Value, swizzle: int | None) -> Callable[..., None]:
    """A function by which one thread of the calling warp issues copies of `source` that count their bytes at `full`."""
    return functools.partial(
        ctx.async_copy,
        src_ref=source,
        swizzle=swizzle,
        barrier=mgpu.BarrierRef(utils.memref_ptr(full), ptx.c32(0), ptx.c32(0), 1),
        arrive=False,
        predicate=utils.single_thread_predicate(utils.ThreadSubset.WARP),
    )


def copy_rows(source: jax.Ref, at: tuple[Any, ...], to: Any, full: jax.Ref) -> None:
    """The calling warp issues TMA copies of rows of `source` into panels of shared memory, counted at `full`.

    `at`: for each axis but the last, an index, or a `pl.ds`; those of the slices are the rows, the last one's in turn.
    Rows outside become zeros. Panels whose other rows are copied apart are a copy each.
    """
    (count, _, columns), starts, sizes = to.shape, *_starts(at, to)

    def copy_panels(ctx, source, to, full, *starts):
        copy = _copier(ctx, source, full, SWIZZLE_BYTES)
        places, (strides, _) = _places(starts, sizes), to.type.get_strides_and_offset()
        if source.type.shape[-1] % columns == 0 and strides[0] == math.prod(to.type.shape[1:]):
            axes = sum(map(bool, sizes))
            order = mgpu.TransposeTransform((axes, *range(axes), axes + 1))
            where = (*places, mgpu.ds(0, count * columns))
            to = _panels(to, sizes)
            return copy(dst_ref=to, gmem_slice=where, gmem_transform=(mgpu.TileTransform((columns,)), order))
        for panel in range(count):
            copy(dst_ref=_panel(to, panel, sizes), gmem_slice=(*places, mgpu.ds(panel * columns, columns)))
        return None

    ptx.inline(copy_panels, source, to, full, *starts, static={"sizes": sizes})


def copy_pages(
    source: jax.Ref, tables: jax.Ref, at: tuple[Index, Index, Index], to: Any, full: jax.Ref, *, pages_first: bool
) -> None:
    """The calling warp issues TMA copies of rows that lie in pages into panels of shared memory, counted at `full`.

    `at`: the sequence, its first row and the head. Each lane reads its own entry of `tables [B, entries]`, and issues
    the copies of one panel of one page. Rows in no page become zeros.
    """
    panels, rows, columns = to.shape
    page_size, entries = source.shape[1 if pages_first else 2], tables.shape[1]
    size = min(page_size, rows)

    def copy_own_page(ctx, source, tables, to, full, batch, row, head):
        batch, row, head = map(ptx.scalar, (batch, row, head))
        lane = ptx.asm_value("mov.u32 $0, %laneid;", "=r", [])
        copy = _copier(ctx, source, full, SWIZZLE_BYTES)
        for first in range(0, panels * (rows // size), LANES):
            number = ptx.add(lane, first)
            is_mine = ptx.compare("ult", number, panels * (rows // size))
            panel, part = ptx.rem(number, panels), ptx.mul(ptx.div(number, panels), size)
            line = ptx.add(row, part)
            # The last tile may go on behind the table.
            entry = arith.minui(ptx.div(line, page_size), ptx.c32(entries - 1))
            word = ptx.word_address(tables, ptx.add(ptx.mul(batch, entries), entry))
            page, place, head, column, panel, part = (
                arith.index_cast(ir.IndexType.get(), x)
                for x in (
                    ptx.load_if(word, is_mine, 32),
                    ptx.rem(line, page_size),
                    head,
                    ptx.mul(panel, columns),
                    panel,
                    part,
                )
            )
            where = mgpu.ds(place, size)
            copy(
                dst_ref=utils.memref_slice(to, (panel, mgpu.ds(part, size))),
                gmem_slice=(*((page, where, head) if pages_first else (head, page, where)), mgpu.ds(column, columns)),
                predicate=is_mine,
            )

    ptx.inline(copy_own_page, source, tables, to, full, *at, static={"pages_first": pages_first})


def store_rows(source: Any, target: jax.Ref, at: tuple[Any, ...], column: Index = 0) -> None:
    """A thread of the warpgroup issues TMA copies of panels of shared memory into `target`, as far as that goes.

    `at` as in `copy_rows`; `column` is the panels' first. The threads must have committed what they stored, and
    `plgpu.wait_smem_to_gmem` waits.
    """
    (count, _, columns), starts, sizes = source.shape, *_starts(at, source)

    def store_panels(ctx, source, target, column, *starts):
        first = arith.index_cast(ir.IndexType.get(), ptx.scalar(column))
        for panel in range(count):
            here = ptx.add(first, arith.constant(ir.IndexType.get(), panel * columns))
            ctx.async_copy(
                src_ref=_panel(source, panel, sizes),
                dst_ref=target,
                gmem_slice=(*_places(starts, sizes), mgpu.ds(here, columns)),
                swizzle=SWIZZLE_BYTES,
                arrive=True,
            )

    ptx.inline(store_panels, source, target, column, *starts, static={"sizes": sizes})


def _starts(at: tuple[Any, ...], panels: Any) -> tuple[list[Index], tuple[int, ...]]:
    """Where a copy begins along each axis but the last, and how far it goes; 0: along an index."""
    sizes = tuple(int(i.size) if isinstance(i, pl.Slice) else 0 for i in at)
    assert math.prod(size for size in sizes if size) == panels.shape[1]
    return [i.start if isinstance(i, pl.Slice) else i for i in at], sizes


def _places(starts: tuple[Any, ...], sizes: tuple[int, ...]) -> list[Any]:
    found = [arith.index_cast(ir.IndexType.get(), ptx.scalar(start)) for start in starts]
    return [mgpu.ds(i, size) if size else i for i, size in zip(found, sizes, strict=True)]


def _panels(panels: ir.Value, sizes: tuple[int, ...]) -> ir.Value:
    """Panels whose rows are those of several slices."""
    slices = tuple(size for size in sizes if size)
    return utils.memref_unfold(panels, 1, slices) if len(slices) > 1 else panels


def _panel(panels: ir.Value, index: int, sizes: tuple[int, ...]) -> ir.Value:
    return utils.memref_slice(_panels(panels, sizes), index)


def zero_rows(ref: Any, first: Index) -> None:
    """The calling warp zeroes the rows of panels in shared memory from `first` on, before a product reads them."""
    panels, rows, _ = ref.shape

    def zero_from(ctx, ref, first):
        text = "{ .reg .b32 row, at; .reg .pred zero; mov.u32 row, %laneid; "
        places = [p * rows * SWIZZLE_BYTES + b for p in range(panels) for b in range(0, SWIZZLE_BYTES, VECTOR_BYTES)]
        for _ in range(0, rows, LANES):
            text += (
                f"setp.ge.s32 zero, row, $1; mad.lo.u32 at, row, {SWIZZLE_BYTES}, $0; "
                + " ".join(f"@zero st.shared.v4.b32 [at+{place}], {{0, 0, 0, 0}};" for place in places)
                + f" add.u32 row, row, {LANES}; "
            )
        text += "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; }"
        ptx.asm(text, "r,r,~{memory}", [ptx.shared_address(ref), ptx.scalar(first)])

    ptx.inline(zero_from, ref, first)
