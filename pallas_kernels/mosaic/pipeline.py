"""A TMA pipeline without a producer: the last warp to release a stage refills it.

A stage is a place in shared memory with two mbarriers. `full` completes when the stage's copies have landed, `empty`
when every warp has read the stage. Each warp arrives at `empty`; the one whose arrival completes the phase issues the
stage's next copies. No warp waits for another one's release, and every warpgroup computes.
Source: PTX ISA, "mbarrier": an arrival returns the state before it, of which "mbarrier.pending_count" is a part.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
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
from pallas_kernels.mosaic.ptx import Index, Place, Ref

LANES = 32  # of a warp
VECTOR_BYTES = 16  # that a thread stores at once
TMA_ROWS = 8  # of a swizzled tile
SWIZZLE_BYTES = 128  # of a panel's row
ALIGNMENT = 1024  # of arrays in shared memory
BARRIER_BYTES = 8

barriers = mbarrier.barriers
start = mbarrier.start_barriers


def _is_power_of_two(x: int) -> bool:
    return x & (x - 1) == 0


def is_first_warp() -> jax.Array:
    """Returns 1 in the first warp of the CTA, and 0 in the others."""

    def first_warp(ctx):
        text = (
            "{ .reg .b32 thread; .reg .pred first; mov.u32 thread, %tid.x; setp.lt.u32 first, thread, 32; "
            "vote.sync.any.pred first, first, 0xffffffff; selp.u32 $0, 1, 0, first; }"
        )
        return ptx.integer(ptx.asm_value(text, "=r", []))

    return ptx.inline(first_warp, result=ptx.INTEGER)


def when(condition: Index) -> Callable[[Callable[[], None]], None]:
    """Works as `pl.when`, for a condition that all lanes of a warp share; a vote tells the compiler that they do.

    Beside a branch that lanes might take alone, the compiler would not keep descriptors in uniform registers.
    """

    def vote_any(ctx, x):
        text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }"
        return ptx.integer(ptx.asm_value(text, "=r,r", [ptx.scalar(x)]))

    vote_any.interpret = lambda x: ({}, [x])
    return pl.when(lax.ne(ptx.inline(vote_any, condition, result=ptx.INTEGER), 0))


Scratch = dict[str, pl.MemoryRef | plgpu.Barrier]  # shared memory and barriers by name

# An array, an index of it, and shared memory. The index has a number, a `pl.ds` of static size or `slice(None)` for
# each axis. Panels take all columns: their index leaves out the last axis, and its slices are the panels' rows, the
# last slice varying fastest.
Copy = tuple[jax.Ref, tuple[Place, ...], Ref]


@dataclasses.dataclass(frozen=True)
class Stages:
    """`count` stages that steps take in turn, and their barriers, which `bind` gives to those of a kernel's table.

    A phase of `full` has `writers` arrivals and the bytes that these announce, one of `empty` a stage's `readers`:
    warps, or 0 where stages are not refilled.
    """

    count: int
    readers: int = 0
    writers: int = 1
    full: Any = None  # its `Ref`, bound
    empty: Any = None

    @property
    def arrivals(self) -> tuple[int, ...]:
        """The arrivals that complete a phase of each barrier."""
        return (self.writers,) * self.count + (self.readers,) * (self.count if self.readers else 0)

    def stage(self, n: Index) -> Index:
        """Says which stage step `n` has."""
        if isinstance(n, int) or self.count == 1:
            return n % self.count if isinstance(n, int) else 0
        if _is_power_of_two(self.count):
            return lax.bitwise_and(n, self.count - 1)
        return lax.rem(n.astype(np.uint32), np.uint32(self.count)).astype(np.int32)

    def _phase(self, n: Index) -> Index:
        """Says how many steps before step `n` had its stage."""
        if isinstance(n, int) or self.count == 1:
            return n // self.count if isinstance(n, int) else n
        if _is_power_of_two(self.count):
            return lax.shift_right_logical(n, self.count.bit_length() - 1)
        return lax.div(n.astype(np.uint32), np.uint32(self.count)).astype(np.int32)

    def alone(self, stage: Index) -> "Stages":
        """Returns one stage, which every step has."""
        return dataclasses.replace(self, count=1, full=self.full.at[pl.ds(stage, 1)])

    def wait(self, n: Index) -> None:
        """Waits until the copies of step `n` have landed."""
        phase = self._phase(n)
        parity = phase % 2 if isinstance(phase, int) else lax.bitwise_and(phase, 1)
        mbarrier.wait(self.full.at[self.stage(n)], parity, "cta")

    def expect(self, stage: Index, count: Index) -> None:
        """The calling warp arrives, and announces `count` bytes of a stage's next copies."""

        def expect_copies(ctx, full, count):
            _announce(full, ptx.scalar(count))

        ptx.inline(expect_copies, self.full.at[stage], count)

    def issue(self, stage: Index, *copies: Copy, announced: bool = False) -> None:
        """The calling warp announces the bytes of a stage's TMA copies, unless it has done so, and issues the copies.

        Elements outside of an array become zeros. One operation issues all copies, because Mosaic takes a millisecond
        to infer the layouts of each operation on shared memory.
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
                indices = _indices(following, sizes)
                if in_panels:
                    _copy_panels(_copier(ctx, source, full, SWIZZLE_BYTES), source, indices, sizes, to)
                else:
                    transform = (mgpu.TileTransform((TMA_ROWS, columns)),) if columns else ()
                    copy = _copier(ctx, source, full, swizzle or None)
                    copy(dst_ref=to, gmem_slice=tuple(indices), gmem_transform=transform)

        ptx.inline(
            issue_copies,
            self.full.at[stage],
            *operands,
            static={"announced": announced, "count": count, "plans": plans},
        )

    def arrive(self, stage: Index) -> jax.Array:
        """Each warp arrives once; 1 in the lane that completes the phase, for a later `when`, and 0 in the others."""

        def arrive_at_stage(ctx, empty):
            text = (
                "{ .reg .b32 lane; .reg .b64 state; .reg .pred first; mov.u32 lane, %laneid; "
                "setp.eq.u32 first, lane, 0; mov.b32 $0, 0; mov.b64 state, 0; bar.warp.sync 0xffffffff; "
                "@first mbarrier.arrive.shared.b64 state, [$1]; @first mbarrier.pending_count.b64 $0, state; }"
            )
            return ptx.integer(ptx.asm_value(text, "=&r,r,~{memory}", [ptx.shared_address(empty)]))

        pending = ptx.inline(arrive_at_stage, self.empty.at[stage], result=ptx.INTEGER)
        return (pending == 1).astype(jnp.int32)

    def release(self, stage: Index, refill: Callable[[], None]) -> None:
        """Each warp arrives once; the one that ends the phase issues the stage's next copies by `refill`."""

        def release_stage(ctx, empty):
            # A vote, rather than a shuffle, tells the compiler that the result is the same in all lanes: it then keeps
            # the descriptors of the products beside the branch in uniform registers.
            text = (
                "{ .reg .b32 lane, pending; .reg .b64 state; .reg .pred first, last; mov.u32 lane, %laneid; "
                "setp.eq.u32 first, lane, 0; mov.b32 pending, 0; mov.b64 state, 0; bar.warp.sync 0xffffffff; "
                "@first mbarrier.arrive.shared.b64 state, [$1]; @first mbarrier.pending_count.b64 pending, state; "
                "setp.eq.u32 last, pending, 1; vote.sync.any.pred last, last, 0xffffffff; selp.u32 $0, 1, 0, last; }"
            )
            return ptx.integer(ptx.asm_value(text, "=r,r,~{memory}", [ptx.shared_address(empty)]))

        last = ptx.inline(release_stage, self.empty.at[stage], result=ptx.INTEGER)
        pl.when(last != 0)(refill)


def arrivals(table: dict[str, Stages]) -> tuple[int, ...]:
    """Lists the arrivals of all barriers of a table."""
    return sum((stages.arrivals for stages in table.values()), ())


def bind(refs: SimpleNamespace, table: dict[str, Stages], array: Ref) -> None:
    """Adds the table's stages to `refs` by their names, with their barriers of `array`."""
    first = 0
    for name, stages in table.items():
        full, last = first + stages.count, first + len(stages.arrivals)
        barriers = [array.at[pl.ds(at, stages.count)] if at < last else None for at in (first, full)]
        setattr(refs, name, dataclasses.replace(stages, full=barriers[0], empty=barriers[1]))
        first = last


def drain(first: Index, start: Index, stop: Index, *passed: tuple[Stages, Callable[[jax.Array], None]]) -> None:
    """Passes a tile's steps `start` ... `stop` without computing; `refill(i)` beside stages refills that of step `i`.

    `first` is the number of the tile's step 0.
    """

    def pass_step(i: jax.Array, _: None) -> None:
        for stages, refill in passed:
            if not stages.count:
                continue
            stages.wait(first + i)
            stages.release(stages.stage(first + i), functools.partial(refill, i))

    lax.fori_loop(start, stop, pass_step, None)


@dataclasses.dataclass(frozen=True)
class LeaderStages:
    """Stages for the steps of a CTA, step `n` in stage `n % count`, which the first warpgroup refills.

    `fill(n)` issues the copies of step `n` of `steps` in all. `full` and `empty` are Pallas' barriers, one a stage.
    """

    count: int
    full: jax.Ref
    empty: jax.Ref
    steps: jax.Array
    fill: Callable[[jax.Array], None]

    def start(self) -> None:
        """Fills all stages."""

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            for n in range(self.count):
                pl.when(n < self.steps)(functools.partial(self.fill, jnp.int32(n)))

    def wait(self, n: jax.Array) -> jax.Array:
        """Waits until the copies of step `n` have landed, and returns its stage."""
        stage = lax.rem(n, self.count)
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release_before(self, n: jax.Array, warpgroup: jax.Array) -> None:
        """Each warpgroup releases the stage of the step before `n`, if there is one; a later step may get it."""
        before, later = lax.rem(n + (self.count - 1), self.count), n + (self.count - 1)

        @pl.when(n > 0)
        def _():
            plgpu.barrier_arrive(self.empty.at[before])

            @pl.when((warpgroup == 0) & (later < self.steps))
            def _():
                plgpu.barrier_wait(self.empty.at[before])
                self.fill(later)


def _announce(full: ir.Value, count: ir.Value) -> None:
    elected = utils.single_thread_predicate(utils.ThreadSubset.WARP)
    operands = [ptx.shared_address(full), count, elected]
    ptx.asm("@$2 mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", "r,r,b,~{memory}", operands)


def size(ref: Ref | pl.MemoryRef) -> int:
    """Counts the bytes of a part of shared memory."""
    return math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize


def scratch_bytes(scratch: Scratch) -> int:
    """Counts the bytes that arrays and barriers take."""
    barriers = sum(int(np.prod(x.num_barriers)) for x in scratch.values() if isinstance(x, plgpu.Barrier))
    arrays = [size(x) for x in scratch.values() if not isinstance(x, plgpu.Barrier)]
    return sum(-(-count // ALIGNMENT) * ALIGNMENT for count in arrays) + barriers * BARRIER_BYTES


def _copier(ctx: mgpu.LaunchContext, source: ir.Value, full: ir.Value, swizzle: int | None) -> Callable[..., None]:
    """Returns a function by which a thread of the warp issues copies of `source`, whose bytes count at `full`."""
    return functools.partial(
        ctx.async_copy,
        src_ref=source,
        swizzle=swizzle,
        barrier=mgpu.BarrierRef(utils.memref_ptr(full), ptx.c32(0), ptx.c32(0), 1),
        arrive=False,
        predicate=utils.single_thread_predicate(utils.ThreadSubset.WARP),
    )


def _copy_panels(
    copy: Callable[..., None], source: ir.Value, indices: list[Any], sizes: tuple[Any, ...], to: ir.Value
) -> None:
    """Issues one copy, or, if the panels' other rows are copied apart, or their columns end within one, one each."""
    (count, _, columns), (strides, _) = to.type.shape, to.type.get_strides_and_offset()
    if source.type.shape[-1] % columns == 0 and strides[0] == math.prod(to.type.shape[1:]):
        axes = sum(map(bool, sizes))
        order = mgpu.TransposeTransform((axes, *range(axes), axes + 1))
        where = (*indices, mgpu.ds(0, count * columns))
        copy(dst_ref=_panels(to, sizes), gmem_slice=where, gmem_transform=(mgpu.TileTransform((columns,)), order))
        return
    for panel in range(count):
        copy(dst_ref=_panel(to, panel, sizes), gmem_slice=(*indices, mgpu.ds(panel * columns, columns)))


def copy_pages(
    source: jax.Ref, tables: jax.Ref, at: tuple[Index, Index, Index], to: Ref, full: Ref, *, pages_first: bool
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


def store_rows(source: Ref, target: jax.Ref, at: tuple[Place, ...], column: Index = 0) -> None:
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
                gmem_slice=(*_indices(starts, sizes), mgpu.ds(here, columns)),
                swizzle=SWIZZLE_BYTES,
                arrive=True,
            )

    ptx.inline(store_panels, source, target, column, *starts, static={"sizes": sizes})


def _starts(at: tuple[Place, ...]) -> tuple[list[Index], tuple[int | None, ...]]:
    """Returns where a copy begins along its axes, and its extent along each: 0 for an index, None for a whole axis."""
    sizes = tuple(None if isinstance(i, slice) else int(i.size) if isinstance(i, pl.Slice) else 0 for i in at)
    return [i.start if isinstance(i, pl.Slice) else i for i in at if not isinstance(i, slice)], sizes


def _indices(starts: Iterable[Any], sizes: tuple[int | None, ...]) -> list[Any]:
    """Returns the index of a copy in MLIR, of which `starts` begins with the starts."""
    following, indices = iter(starts), []
    for extent in sizes:
        if extent is None:
            indices.append(slice(None))
            continue
        first = arith.index_cast(ir.IndexType.get(), ptx.scalar(next(following)))
        indices.append(mgpu.ds(first, extent) if extent else first)
    return indices


def _panels(panels: ir.Value, sizes: tuple[int | None, ...]) -> ir.Value:
    """Panels whose rows are those of several slices."""
    slices = tuple(size for size in sizes if size)
    return utils.memref_unfold(panels, 1, slices) if len(slices) > 1 else panels


def _panel(panels: ir.Value, index: int, sizes: tuple[int | None, ...]) -> ir.Value:
    return utils.memref_slice(_panels(panels, sizes), index)


def zero_rows(ref: Ref, first: Index) -> None:
    """The calling warp zeroes the rows of panels in shared memory from `first` on, before a product reads them."""
    panels, rows, _ = ref.shape

    def zero_from(ctx, ref, first):
        text = "{ .reg .b32 row, at; .reg .pred zero; mov.u32 row, %laneid; "
        offsets = [p * rows * SWIZZLE_BYTES + b for p in range(panels) for b in range(0, SWIZZLE_BYTES, VECTOR_BYTES)]
        for _ in range(0, rows, LANES):
            text += (
                f"setp.ge.s32 zero, row, $1; mad.lo.u32 at, row, {SWIZZLE_BYTES}, $0; "
                + " ".join(f"@zero st.shared.v4.b32 [at+{offset}], {{0, 0, 0, 0}};" for offset in offsets)
                + f" add.u32 row, row, {LANES}; "
            )
        text += "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; }"
        ptx.asm(text, "r,r,~{memory}", [ptx.shared_address(ref), ptx.scalar(first)])

    ptx.inline(zero_from, ref, first)
