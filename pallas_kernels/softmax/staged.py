"""Kernels 2 and 4, block and cluster: a row is staged in shared memory, by one CTA or by a cluster of up to sixteen.

Block, after warp.py: a CTA of several warpgroups stages a row in its shared memory, and its warps merge their
(max, sum) through it. Cluster, after online.py: the CTAs of a cluster stage a part of the row each, and every warp
stores its (max, sum) into the shared memory of all of them (distributed shared memory).

Each CTA copies its part of the row asynchronously, reads it twice for the statistics (the maximum, then the sums; no
shuffle until the end), merges them with those of the row's other warps, and reads it once more to write the result.
Data are kept in registers only where that lets one more CTA fit on an SM: many CTAs keep the memory busy.
Traffic: 1 read, 1 write; in a cluster 8 bytes from each warp to each CTA too.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import mbarrier, ptx, reduce, row_scalars, vectors
from pallas_kernels.mosaic.ptx import WARPGROUP, Index
from pallas_kernels.mosaic.reduce import ReductionBuffer
from pallas_kernels.mosaic.vectors import VECTOR_BYTES, RegisterTile
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.kernel import Config, Operands, Results, Scratch, allocated, launch, unsupported_reason
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.row_ops import LabelOperands, RowStats, Tiles

MAX_CLUSTER = 16  # the most CTAs that a cluster can have


@dataclasses.dataclass(frozen=True)
class SharedConfig(Config):
    """Rows are staged in shared memory: `ctas` CTAs share a row, and each has `warpgroups` warpgroups.

    A thread handles `registers` vectors at a time.
    """

    ctas: int
    warpgroups: int
    registers: int

    register_chunks = 0
    interleaved = False

    @property
    def no_unroll(self) -> bool:
        """Says whether loops over chunks stay loops, which saves registers."""
        return self.register_chunks > 0

    @property
    def chunk(self) -> int:
        """Vectors that a row's threads in a CTA handle at a time."""
        return self.warpgroups * WARPGROUP * self.registers

    def steps(self, vectors: int) -> int:
        """Counts the chunks in a CTA's slice of a row of that many vectors."""
        return -(-vectors // (self.ctas * self.chunk))

    def staged(self, vectors: int) -> int:
        """Counts the steps that are staged in shared memory."""
        return self.steps(vectors) - self.register_chunks


@dataclasses.dataclass(frozen=True)
class StagedConfig(SharedConfig):
    """A CTA handles `rows` rows, one after another, and stages `stages` of them in shared memory at once.

    The last `register_chunks` chunks of a slice are held in registers instead. With `interleaved`, the chunks of a CTA
    lie `ctas` apart, so that the CTAs of a row read adjacent chunks at a time; operations with labels cannot have it.
    """

    stages: int
    rows: int
    register_chunks: int = 0
    interleaved: bool = False

    allowed: ClassVar = {"ctas": range(1, MAX_CLUSTER + 1), "register_chunks": range(256), "interleaved": (False, True)}


Partial = tuple[jax.Array, ...]
Stage = list[jax.Ref]  # the operands' slices in shared memory, then their tails
Choose = Callable[[Problem, Device], tuple[StagedConfig, ...]]  # the heuristic
RegisterChunks = Sequence[Tiles]  # the operands' unconverted tiles, of each step that is held in registers


def copies(problem: Problem, config: SharedConfig) -> int:
    """Says how many asynchronous copies bring a CTA's slice of a row."""
    of_slice = config.staged(problem.max_vectors) if config.interleaved else 1
    return problem.operands * (of_slice + has_tails(problem, config))


def is_ragged(problem: Problem) -> bool:
    """Says whether rows begin anywhere between aligned vectors."""
    return problem.cols * problem.dtype.itemsize % VECTOR_BYTES != 0


def has_tails(problem: Problem, config: SharedConfig) -> bool:
    """Says whether a CTA needs the first aligned vector of the next CTA's slice, in which its own last vector ends."""
    return is_ragged(problem) and config.ctas > 1


@dataclasses.dataclass(frozen=True)
class CtaSlice:
    """A CTA's slice of the rows that it handles."""

    operands: Operands
    config: SharedConfig
    cta: Index  # the CTA's rank among those that share a row
    warpgroup: Index  # the warpgroup's index in the CTA

    @property
    def problem(self) -> Problem:
        return self.operands.problem

    @property
    def steps(self) -> int:
        return self.config.steps(self.problem.max_vectors)

    @property
    def staged(self) -> int:
        """Says how many steps are staged in shared memory; the later ones are held in registers."""
        return self.config.staged(self.problem.max_vectors)

    @property
    def vectors(self) -> int:
        return self.steps * self.config.chunk

    @property
    def staged_vectors(self) -> int:
        return self.staged * self.config.chunk

    @property
    def first(self) -> Index:
        return self.cta * self.vectors

    def chunk_start(self, step: Index) -> Index:
        """Returns the index in the row of the first vector of the CTA's chunk of a step."""
        size, ctas = self.config.chunk, self.config.ctas
        return (step * ctas + self.cta) * size if self.config.interleaved else self.first + step * size

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.problem.dtype, self.config.registers)

    @property
    def stats_tile(self) -> RegisterTile:
        """The tile from which the statistics are computed; they must not depend on the row's alignment."""
        return dataclasses.replace(self.tile, wraps=is_ragged(self.problem))

    def at(self, step: jax.Array) -> Index:
        """Returns the index in the row of the first vector of this warpgroup's tile of a step."""
        if self.config.interleaved:
            return self.chunk_start(step) + self.warpgroup * (WARPGROUP * self.config.registers)
        return self.first + (step * self.config.warpgroups + self.warpgroup) * (WARPGROUP * self.config.registers)

    def copy(self, row: jax.Array, stage: Stage, barrier: jax.Ref, cache: mbarrier.Cache = None) -> None:
        """Starts copying a row's operands into a stage."""
        pairs, label = list(zip(self.operands.inputs, stage, strict=False)), self.operands.label(row)
        if not self.config.interleaved:
            for ref, to in pairs:
                mbarrier.copy_row(ref, row, self.first, self.staged_vectors, to, barrier, cache, label)
            for ref, to in zip(self.operands.inputs, self._tails(stage), strict=False):
                mbarrier.copy_row(ref, row, self.first + self.vectors, 1, to, barrier, cache, label)
            return

        def copy_chunks(step: jax.Array, _: None) -> None:
            for ref, to in pairs:
                piece = self.chunk_start(step), self.config.chunk, to.at[step]
                mbarrier.copy_row(ref, row, *piece, barrier, cache, label)

        self._loop(0, self.staged, copy_chunks, None)

    def _tails(self, stage: Stage) -> list[jax.Ref]:
        return stage[self.problem.operands :]

    def load(self, row: jax.Array, label_operands: LabelOperands | None) -> RegisterChunks:
        """Starts loading the chunks that are held in registers, unconverted."""
        steps = range(self.staged, self.steps)
        return [self.operands.load_raw(row, self.at(jnp.int32(step)), self.tile, label_operands) for step in steps]

    @property
    def whole(self) -> int:
        """Says how many of a row's vectors lie in it for every alignment, without the first."""
        cols, v = self.problem.cols, self.tile.vector
        return max(cols - v + 1, 0) // v if cols % v else cols // v

    @property
    def in_bounds(self) -> int:
        """Says how many of a CTA's vectors lie in the row for every CTA and every alignment, without the first."""
        size, ctas = self.config.chunk, self.config.ctas
        if not self.config.interleaved:
            return max(self.whole - (ctas - 1) * self.vectors, 0)
        steps = self.whole // (ctas * size)
        return steps * size + max(self.whole - (steps * ctas + ctas - 1) * size, 0)

    @property
    def always_full(self) -> bool:
        """Says whether the vectors of every CTA lie in the row completely."""
        return self.in_bounds == self.vectors and self.problem.cols % self.tile.vector == 0

    def fill_outside(self, row: jax.Array, stage: Stage) -> None:
        """Overwrites the elements outside the row, which the copy left undefined or took from neighbouring rows."""
        if self.always_full:
            return
        stop, size = self.staged_vectors, self.config.chunk
        start = min(self.in_bounds, stop)
        threads = WARPGROUP * self.config.warpgroups
        oob_fill = row_ops.oob_fill(self.problem)
        for ref, to, fill in zip(self.operands.inputs, self._tails(stage), oob_fill, strict=False):
            mbarrier.fill_outside(ref, row, self.first + self.vectors, 1, 1, to, fill, threads)
        for ref, to, fill in zip(self.operands.inputs, stage, oob_fill, strict=False):
            if not self.config.interleaved:
                mbarrier.fill_outside(ref, row, self.first, start, stop, to, fill, threads)
                continue
            for step in sorted({0, *range(start // size, self.staged)}):
                begin = min(max(start - step * size, 0), size)
                mbarrier.fill_outside(ref, row, self.chunk_start(step), begin, size, to.at[step], fill, threads)
        self.sync()

    def sync(self) -> None:
        """Waits for all threads of the CTA."""
        reduce.sync_block(self.config.warpgroups)

    def read(self, stage: Stage, row: jax.Array, step: jax.Array, interior: bool) -> Tiles:
        """Reads the operands' tiles of a step and converts them with `Operands.in_float32`."""
        return self._in_float32(self._staged(stage, step), row, step, self.tile, interior)

    def _staged(self, stage: Stage, step: jax.Array) -> Tiles:
        load = lambda ref: plgpu.load(ref.at[step, self.warpgroup], layout=self.tile.layout, optimized=False)
        return tuple(map(load, stage[: self.problem.operands]))

    def _raw_for_stats(self, stage: Stage, row: jax.Array, step: jax.Array) -> Tiles:
        """Reads the operands' unconverted tiles of a step, from which the statistics are computed."""
        tile = self.stats_tile
        raw = self._staged(stage, step)
        if not tile.wraps:
            return raw
        at, tails = self.at(step) - self.first, self._tails(stage) or [None] * len(raw)
        parts = zip(raw, self.operands.inputs, stage, tails, row_ops.oob_fill(self.problem), strict=False)
        wrap = lambda x, ref, staged, tail, fill: mbarrier.wrap(x, ref, row, staged, tail, at, tile, fill)
        return tuple(wrap(*part) for part in parts)

    def _in_float32(
        self,
        raw: Tiles,
        row: jax.Array,
        step: jax.Array,
        tile: RegisterTile,
        interior: bool = False,
        soft_capped: bool = True,
    ) -> Tiles:
        interior = interior or self.always_full
        return self.operands.in_float32(raw, row, self.at(step), tile, interior=interior, soft_capped=soft_capped)

    def _loop[Carry](self, start: Index, stop: int, body: Callable[[jax.Array, Carry], Carry], init: Carry) -> Carry:
        return (ptx.no_unroll if self.config.no_unroll else lax.fori_loop)(start, stop, body, init)

    def _over_steps[Carry](
        self,
        stage: Stage,
        row: jax.Array,
        register_chunks: RegisterChunks,
        add: Callable[[Carry, Tiles], Carry],
        init: Carry,
        soft_capped: bool,
    ) -> Carry:
        """Folds the tiles of all steps into `init`, one after the other."""
        tiles_of = lambda raw, i: self._in_float32(raw, row, i, self.stats_tile, soft_capped=soft_capped)
        read = lambda i, x: add(x, tiles_of(self._raw_for_stats(stage, row, i), i))
        total = self._loop(0, self.staged, read, init)
        for step, raw in enumerate(register_chunks, self.staged):
            tiles = tiles_of(raw, jnp.int32(step))
            total = add(*lax.optimization_barrier((total, tiles)))
        return total

    def partial_stats(self, stage: Stage, row: jax.Array, register_chunks: RegisterChunks = ()) -> Partial:
        """Returns each warp's statistics of its part of the row, one `[4]` array per value."""
        op, exp, tile = self.problem.op, row_ops.exp_for(self.problem), self.tile
        maximum, max_tile = [], None
        if row_ops.has_max(op):
            lowest = tile.full(-jnp.inf)
            higher = lambda high, tiles: jnp.maximum(high, tiles[0])
            highest = self._over_steps(stage, row, register_chunks, higher, lowest, soft_capped=False)
            maximum = [self.operands.soft_capped(highest.max(axis=1))]
            max_tile = tile.broadcast(maximum[0])

        def add(sums: Tiles, tiles: Tiles) -> Tiles:
            return tuple(
                x + summand for x, summand in zip(sums, row_ops.summands(op, tiles, max_tile, exp), strict=True)
            )

        zeros = tuple(tile.full(0.0) for _ in row_ops.rescaled(self.problem))
        sums = self._over_steps(stage, row, register_chunks, add, zeros, soft_capped=True)
        add_row = lambda x: row_scalars.sums_of_rows(self.operands.inputs[0], row, x, self.stats_tile)
        return *maximum, *map(add_row, sums)

    @property
    def layout(self) -> ptx.Layout:
        """The layout of values of which each warp has one."""
        return self.tile.layout.reduce(1)

    def merged(self, buffer: ReductionBuffer, partials: list[jax.Array]) -> RowStats:
        """Merges the statistics of all ranks of the buffer."""
        exp = row_ops.exp_for(self.problem)
        return row_ops.merge(self.problem, partials, buffer.layout, exp, self.tile)

    def reduce_block(self, buffer: ReductionBuffer, partial: Partial, slots: jax.Ref) -> RowStats:
        """Merges the statistics of the CTA's warps."""
        warpgroups = self.config.warpgroups
        partials = reduce.block_gather(buffer, partial, self.layout, self.warpgroup, slots, warpgroups)
        return self.merged(buffer, partials)

    def reduce_cluster(
        self, buffer: ReductionBuffer, partial: Partial, slots: jax.Ref, barrier: jax.Ref, parity: jax.Array
    ) -> RowStats:
        """Merges the statistics of the cluster's warps."""
        ctas, index = self.config.ctas, self.cta * self.config.warpgroups + self.warpgroup
        partials = reduce.cluster_gather(buffer, partial, self.layout, index, slots, barrier, parity, ctas)
        pl.when(self.warpgroup == 0)(lambda: mbarrier.expect_bytes(barrier, buffer.bytes_expected))
        return self.merged(buffer, partials)

    def write(
        self,
        stage: Stage,
        row: jax.Array,
        stats: RowStats,
        label_operands: LabelOperands | None,
        register_chunks: RegisterChunks = (),
        evict_first: bool = False,
    ) -> None:
        """Writes the row's result, its statistics, or both."""
        if self.problem.op.gives_stats:
            leads = jnp.logical_and(self.cta == 0, self.warpgroup == 0)
            pl.when(leads)(lambda: self.operands.store_stats(stats, label_operands, row, self.tile))
        if not self.problem.op.gives_rows:
            return
        if label_operands is None:
            self._write_rows(stage, row, stats, register_chunks, evict_first)
            return
        counts = self.operands.label(row) >= 0
        pl.when(jnp.logical_not(counts))(lambda: self._write_zeros(row, evict_first))

        @pl.when(counts)
        def _():
            self._write_rows(stage, row, stats, register_chunks, evict_first)
            cta_slice = {"warpgroups": self.config.warpgroups, "first": self.first, "vectors": self.vectors}
            self.operands.store_at_labels(label_operands, stats, row, self.tile, **cta_slice)

    def _write_zeros(self, row: jax.Array, evict_first: bool) -> None:
        zeros, to = self.tile.full(0.0).astype(self.problem.dtype), self.operands.outputs[0]

        def write_step(step: jax.Array, _: None) -> None:
            vectors.store(to, row, self.at(step), zeros, self.tile, interior=self.always_full, evict_first=evict_first)

        lax.fori_loop(0, self.steps, write_step, None)

    def _write_rows(
        self, stage: Stage, row: jax.Array, stats: RowStats, register_chunks: RegisterChunks, evict_first: bool
    ) -> None:
        def store(tiles: Tiles, step: jax.Array, interior: bool) -> None:
            self.operands.store(tiles, stats, row, self.at(step), self.tile, interior=interior, evict_first=evict_first)

        def write(start: int, stop: int, interior: bool) -> None:
            if start < stop:
                step = lambda i, _: store(self.read(stage, row, i, interior), i, interior)
                self._loop(start, stop, step, None)

        # Vectors that may cross an end of the row cost five instructions an element, so they have loops of their own.
        begin = 0 if self.problem.cols % self.tile.vector == 0 else 1
        end = min(max(self.in_bounds // self.config.chunk, begin), self.staged)
        write(0, begin, interior=False)
        write(begin, end, interior=True)
        write(end, self.staged, interior=False)
        for step, raw in enumerate(register_chunks, self.staged):
            tiles = self._in_float32(raw, row, jnp.int32(step), self.tile)
            store(lax.optimization_barrier(tiles), jnp.int32(step), self.always_full)


def warps_buffer(problem: Problem, config: SharedConfig) -> ReductionBuffer:
    """Returns the buffer in which all warps of a cluster exchange their statistics."""
    return ReductionBuffer(4 * config.warpgroups * config.ctas, row_ops.num_values(problem))


def slice_scratch(problem: Problem, config: SharedConfig, *stages: int) -> Scratch:
    """Makes shared memory for the staged part of a CTA's slices and for their tails, of all operands."""
    staged = (*stages, config.staged(problem.max_vectors), config.warpgroups)
    tails = (*(stages or (1,)), problem.operands, VECTOR_BYTES // problem.dtype.itemsize)
    shape = (*staged, *RegisterTile(problem.dtype, config.registers).shape)
    return {
        "slices": [plgpu.SMEM(shape, problem.dtype)] * problem.operands,
        "tails": [plgpu.SMEM(tails, problem.dtype)] * has_tails(problem, config),
    }


def scratch(problem: Problem, config: StagedConfig) -> Scratch:
    """Returns the shared memory of a CTA; two barriers are the cluster's."""
    return {
        **slice_scratch(problem, config, config.stages),
        "slots": warps_buffer(problem, config).scratch,
        "barriers": mbarrier.barriers(config.stages + 2),
    }


def shared_bytes(problem: Problem, config: StagedConfig) -> int:
    """Returns the bytes of shared memory that Mosaic allocates for a CTA."""
    return allocated(scratch(problem, config))


def configs(choose: Choose, problem: Problem, device: Device) -> tuple[StagedConfig, ...]:
    """Leaves the configs of `choose` with which the rows can be staged."""
    # Mosaic's kernels declare one byte of shared memory beside what the launch gives them.
    fits = lambda config: shared_bytes(problem, config) < device.smem_per_cta
    return tuple(filter(fits, choose(problem, device)))


def unsupported(choose: Choose, problem: Problem, device: Device) -> str | None:
    """Declines rows that cannot be staged with any config of `choose`."""
    if (reason := unsupported_reason(problem)) or configs(choose, problem, device):
        return reason
    config = choose(problem, device)[0]
    over = f"{config.ctas} blocks" if config.ctas > 1 else "a block"
    needed, there = shared_bytes(problem, config), device.smem_per_cta - 1
    return f"a row over {over} needs {needed} bytes of shared memory in each, and {there} are there"


def _body(
    operands: Operands,
    *,
    slices: list[jax.Ref],
    tails: list[jax.Ref],
    slots: jax.Ref,
    barriers: jax.Ref,
    config: StagedConfig,
) -> None:
    problem, clustered = operands.problem, config.ctas > 1
    buffer = warps_buffer(problem, config)
    group = lax.axis_index("rows")
    cta_slice = CtaSlice(
        operands,
        config,
        lax.axis_index("cta") if clustered else 0,
        lax.axis_index("warpgroup") if config.warpgroups > 1 else 0,
    )
    stage_of = lambda i: [s.at[i] for s in slices] + [t.at[i, o] for t in tails for o in range(problem.operands)]
    full, cluster_mbar = barriers.at[pl.ds(0, config.stages)], barriers.at[pl.ds(config.stages, 2)]
    first_row = group * config.rows
    rows = jnp.minimum(config.rows, problem.rows - first_row)
    mbarrier.start_barriers(barriers, (copies(problem, config),) * config.stages + (1, 1))
    buffer.clear(slots, config.warpgroups)
    if clustered:
        reduce.arrive_in_cluster()

    @pl.when(cta_slice.warpgroup == 0)
    def _():
        for half in range(2 if clustered else 0):
            mbarrier.expect_bytes(cluster_mbar.at[half], buffer.bytes_expected)
        for i in range(config.stages):
            pl.when(i < rows)(lambda i=i: cta_slice.copy(first_row + i, stage_of(i), full.at[i]))

    cta_slice.sync()

    def row_step(i: jax.Array, _: None) -> None:
        row, stage_i, half = first_row + i, lax.rem(i, config.stages), lax.rem(i, 2)
        stage = stage_of(stage_i)
        label_operands = operands.label_operands(row, cta_slice.tile)
        register_chunks = cta_slice.load(row, label_operands)
        mbarrier.wait(full.at[stage_i], lax.rem(lax.div(i, config.stages), 2))
        cta_slice.fill_outside(row, stage)
        partial = cta_slice.partial_stats(stage, row, register_chunks)
        if clustered:
            pl.when(i == 0)(reduce.await_cluster)
            stats = cta_slice.reduce_cluster(
                buffer, partial, slots.at[half], cluster_mbar.at[half], lax.rem(lax.div(i, 2), 2)
            )
        else:
            stats = cta_slice.reduce_block(buffer, partial, slots.at[half])
        cta_slice.write(
            stage, row, row_ops.with_factors(problem, stats, label_operands), label_operands, register_chunks
        )
        if config.rows > 1:
            plgpu.commit_smem()
            cta_slice.sync()
            refill = jnp.logical_and(cta_slice.warpgroup == 0, i + config.stages < rows)
            pl.when(refill)(lambda: cta_slice.copy(row + config.stages, stage, full.at[stage_i]))

    if config.rows == 1:
        row_step(jnp.int32(0), None)
    else:
        lax.fori_loop(0, rows, row_step, None)


def run(problem: Problem, config: StagedConfig, *operands: jax.Array, name: str) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    if config.interleaved and problem.op.has_labels:
        raise ValueError(f"{config}: operations with labels need the chunks of a CTA side by side")
    if is_ragged(problem) and (config.register_chunks or config.interleaved):
        raise ValueError(f"{config}: rows that are not whole vectors need all chunks staged, side by side")
    return launch(
        problem,
        functools.partial(_body, config=config),
        operands,
        name=name,
        grid=-(-problem.rows // config.rows),
        ctas=config.ctas,
        warpgroups=config.warpgroups,
        scratch=scratch(problem, config),
    )
