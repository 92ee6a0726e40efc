"""A TMA pipeline without a producer: the last warp to release a stage refills it.

A stage is a place in shared memory with two mbarriers. `full` completes when the stage's copies have landed, `empty`
when every warp has read the stage. Each warp arrives at `empty`; the one whose arrival completes the phase issues the
stage's next copies. No warp waits for another one's release, and every warpgroup computes.
Source: PTX ISA, "mbarrier": an arrival returns the state before it, of which "mbarrier.pending_count" is a part.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic import mbarrier, ptx, wgmma
from pallas_kernels.mosaic.ptx import Index

LANES = 32  # of a warp
VECTOR_BYTES = 16  # that a thread stores at once
TMA_ROWS = 8  # of a swizzled tile
SWIZZLE_BYTES = 128  # of a panel's row

barriers = mbarrier.barriers
start = mbarrier.start_barriers


def wait(full: jax.Ref, n: Index, stages: int) -> None:
    """Waits until the copies of step `n` have landed; `full`: the barriers of all stages."""
    parity = stage(_round(n, stages), 2)
    mbarrier.wait(full.at[stage(n, stages)], parity, "cta")


def stage(n: Index, stages: int) -> Index:
    """Which stage step `n` has."""
    if isinstance(n, int) or stages == 1:
        return n % stages if isinstance(n, int) else 0
    if _is_power_of_two(stages):
        return lax.bitwise_and(n, stages - 1)
    return lax.rem(n.astype(np.uint32), np.uint32(stages)).astype(np.int32)


def _round(n: Index, stages: int) -> Index:
    """Says how many steps before step `n` had its stage."""
    if isinstance(n, int) or stages == 1:
        return n // stages if isinstance(n, int) else n
    if _is_power_of_two(stages):
        return lax.shift_right_logical(n, stages.bit_length() - 1)
    return lax.div(n.astype(np.uint32), np.uint32(stages)).astype(np.int32)


def _is_power_of_two(x: int) -> bool:
    return x & (x - 1) == 0


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
    """Returns 1 in the first warp of the CTA, and 0 in the others."""

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
    return pl.when(lax.ne(ptx.inline(vote_any, condition, result=ptx.INTEGER), 0))


def expect(full: jax.Ref, count: Index) -> None:
    """The calling warp arrives, and announces `count` bytes of the stage's next copies."""

    def expect_copies(ctx, full, count):
        _announce(full, ptx.scalar(count))

    ptx.inline(expect_copies, full, count)


def _announce(full: ir.Value, count: ir.Value) -> None:
    elected = utils.single_thread_predicate(utils.ThreadSubset.WARP)
    operands = [ptx.shared_address(full), count, elected]
    ptx.asm("@$2 mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", "r,r,b,~{memory}", operands)


def size(ref: Any) -> int:
    """Counts the bytes of a part of shared memory."""
    return math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize


# Array, place, and shared memory. A place is an index, a `pl.ds` of static size or `slice(None)` for each axis. Panels
# take all columns of rows: their place is of the other axes, and slices are the rows, those of the last one in turn.
Copy = tuple[Any, tuple[Any, ...], Any]


def issue(full: jax.Ref, *copies: Copy, announced: bool = False) -> None:
    """The calling warp announces the bytes of TMA copies at `full`, unless it has done so, and issues the copies.

    Places outside of an array become zeros. One operation issues them all: Mosaic takes a millisecond to infer the
    layouts of each operation on shared memory.
    """
    plans, operands = [], []
    for source, at, to in copies:
        starts, sizes = _starts(at)
        in_panels, dtype = len(to.shape) == 3, jnp.dtype(source.dtype)
        assert not in_panels or math.prod(extent for extent in sizes if extent) == to.shape[1]
        columns = wgmma.columns_of_tile(to.shape[-1], dtype) if len(to.shape) == 2 else 0
        operands += [source, (to, plgpu.RefType(wgmma.transforms(columns, dtype))) if columns else to, *starts]
        plans.append((sizes, in_panels, columns, columns * dtype.itemsize))
    count = 0 if announced else sum(size(to) for *_, to in copies)

    def issue_copies(ctx, full, *operands):
        if not announced:
            _announce(full, ptx.c32(count))
        following = iter(operands)
        for sizes, in_panels, columns, swizzle in plans:
            source, to = next(following), next(following)
            places = _places(following, sizes)
            if in_panels:
                _copy_panels(_copier(ctx, source, full, SWIZZLE_BYTES), source, places, sizes, to)
            else:
                transform = (mgpu.TileTransform((TMA_ROWS, columns)),) if columns else ()
                copy = _copier(ctx, source, full, swizzle or None)
                copy(dst_ref=to, gmem_slice=tuple(places), gmem_transform=transform)

    ptx.inline(issue_copies, full, *operands, static={"announced": announced, "count": count, "plans": plans})


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


def _copy_panels(
    copy: Callable[..., None], source: ir.Value, places: list[Any], sizes: tuple[Any, ...], to: ir.Value
) -> None:
    """Issues one copy, or, if the panels' other rows are copied apart, or their columns end within one, one each."""
    (count, _, columns), (strides, _) = to.type.shape, to.type.get_strides_and_offset()
    if source.type.shape[-1] % columns == 0 and strides[0] == math.prod(to.type.shape[1:]):
        axes = sum(map(bool, sizes))
        order = mgpu.TransposeTransform((axes, *range(axes), axes + 1))
        where = (*places, mgpu.ds(0, count * columns))
        copy(dst_ref=_panels(to, sizes), gmem_slice=where, gmem_transform=(mgpu.TileTransform((columns,)), order))
        return
    for panel in range(count):
        copy(dst_ref=_panel(to, panel, sizes), gmem_slice=(*places, mgpu.ds(panel * columns, columns)))


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

    `at` as in a `Copy`; `column` is the panels' first. The threads must have committed what they stored, and
    `plgpu.wait_smem_to_gmem` waits.
    """
    (count, _, columns), (starts, sizes) = source.shape, _starts(at)

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


def _starts(at: tuple[Any, ...]) -> tuple[list[Index], tuple[int | None, ...]]:
    """Where a copy begins along axes, and how far it goes along each; 0: along an index, None: along a whole axis."""
    sizes = tuple(None if isinstance(i, slice) else int(i.size) if isinstance(i, pl.Slice) else 0 for i in at)
    return [i.start if isinstance(i, pl.Slice) else i for i in at if not isinstance(i, slice)], sizes


def _places(starts: Iterable[Any], sizes: tuple[int | None, ...]) -> list[Any]:
    """The place, of which the first starts are there."""
    following, found = iter(starts), []
    for extent in sizes:
        if extent is None:
            found.append(slice(None))
            continue
        first = arith.index_cast(ir.IndexType.get(), ptx.scalar(next(following)))
        found.append(mgpu.ds(first, extent) if extent else first)
    return found


def _panels(panels: ir.Value, sizes: tuple[int | None, ...]) -> ir.Value:
    """Panels whose rows are those of several slices."""
    slices = tuple(size for size in sizes if size)
    return utils.memref_unfold(panels, 1, slices) if len(slices) > 1 else panels


def _panel(panels: ir.Value, index: int, sizes: tuple[int | None, ...]) -> ir.Value:
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
