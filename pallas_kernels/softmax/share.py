"""A block's share of a row: staged in shared memory or kept in registers, walked for its statistics, and written."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import loops, mbarrier, reduce, row_scalars, vectors
from pallas_kernels.mosaic.ptx import WARPGROUP, Index
from pallas_kernels.mosaic.reduce import Exchange
from pallas_kernels.mosaic.vectors import VECTOR_BYTES, Tile
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.config import SharedConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.row_ops import Labelled, RowStats, Tiles
from pallas_kernels.softmax.rung import Operands

Partial = tuple[jax.Array, ...]
# Where the operands' shares stand in shared memory, and after them their tails; None: they are read where they are.
Slot = list[jax.Ref] | None
Kept = Sequence[Tiles]  # of each step that stands in registers, the operands' tiles as they were loaded


def copies(problem: Problem, config: SharedConfig) -> int:
    """How many copies bring a block's share of a row."""
    of_share = config.staged(problem.max_vectors) if config.spread else 1
    return problem.operands * (of_share + has_tails(problem, config))


def is_ragged(problem: Problem) -> bool:
    """Whether rows begin anywhere between aligned vectors."""
    return problem.cols * problem.dtype.itemsize % VECTOR_BYTES != 0


def has_tails(problem: Problem, config: SharedConfig) -> bool:
    """Whether a block needs the first aligned vector of the next block's share, in which its own last vector ends."""
    return is_ragged(problem) and config.blocks > 1


def tails(problem: Problem, slots: int) -> Any:
    """Shared memory for those, of each of the operands in each of the slots."""
    return plgpu.SMEM((slots, problem.operands, VECTOR_BYTES // problem.dtype.itemsize), problem.dtype)


def whole(problem: Problem) -> int:
    """How many of a row's vectors lie in it, whatever its alignment; less the first."""
    v = VECTOR_BYTES // problem.dtype.itemsize
    return max(problem.cols - v + 1, 0) // v if problem.cols % v else problem.cols // v


@dataclasses.dataclass(frozen=True)
class Share:
    """A block's part of its rows."""

    operands: Operands
    config: SharedConfig
    block: Index  # of those that share a row
    warpgroup: Index  # of those that walk it

    @property
    def problem(self) -> Problem:
        return self.operands.problem

    @property
    def steps(self) -> int:
        return self.config.steps(self.problem.max_vectors)

    @property
    def staged(self) -> int:
        """Steps in shared memory; those after them stand in registers."""
        return self.config.staged(self.problem.max_vectors)

    @property
    def vectors(self) -> int:
        return self.steps * self.config.granule

    @property
    def staged_vectors(self) -> int:
        return self.staged * self.config.granule

    @property
    def first(self) -> Index:
        return self.block * self.vectors

    def granule(self, step: Index) -> Index:
        """The row's vector with which the block's granule of a step begins."""
        size, blocks = self.config.granule, self.config.blocks
        return (step * blocks + self.block) * size if self.config.spread else self.first + step * size

    @property
    def tile(self) -> Tile:
        return Tile(self.problem.dtype, self.config.registers)

    @property
    def stats_tile(self) -> Tile:
        """Of which the statistics are taken, which must not depend on the row's alignment."""
        return dataclasses.replace(self.tile, wraps=is_ragged(self.problem))

    def at(self, step: jax.Array) -> Index:
        """The row's vector with which this warpgroup's tile of a step begins."""
        if self.config.spread:
            return self.granule(step) + self.warpgroup * (WARPGROUP * self.config.registers)
        return self.first + (step * self.config.warpgroups + self.warpgroup) * (WARPGROUP * self.config.registers)

    def copy(self, row: jax.Array, slot: list[jax.Ref], barrier: jax.Ref, cache: mbarrier.Cache = None) -> None:
        """Starts copying a row's operands into a slot."""
        pairs, label = list(zip(self.operands.inputs, slot, strict=False)), self.operands.label(row)
        if not self.config.spread:
            for ref, to in pairs:
                mbarrier.copy_row(ref, row, self.first, self.staged_vectors, to, barrier, cache, label)
            for ref, to in zip(self.operands.inputs, self._tails(slot), strict=False):
                mbarrier.copy_row(ref, row, self.first + self.vectors, 1, to, barrier, cache, label)
            return

        def copy_granules(step: jax.Array, _: None) -> None:
            for ref, to in pairs:
                piece = self.granule(step), self.config.granule, to.at[step]
                mbarrier.copy_row(ref, row, *piece, barrier, cache, label)

        self._loop(0, self.staged, copy_granules, None)

    def _tails(self, slot: list[jax.Ref]) -> list[jax.Ref]:
        return slot[self.problem.operands :]

    def load(self, row: jax.Array, labelled: Labelled | None) -> Kept:
        """Starts loading what is not staged, as it is."""
        steps = range(self.staged, self.steps)
        return [self.operands.load_raw(row, self.at(jnp.int32(step)), self.tile, labelled) for step in steps]

    @property
    def whole(self) -> int:
        """How many of a row's vectors lie in it, whatever its alignment; less the first."""
        return whole(self.problem)

    @property
    def surely_inside(self) -> int:
        """How many of a block's vectors lie in the row, whichever block and whatever alignment; less the first."""
        size, blocks = self.config.granule, self.config.blocks
        if not self.config.spread:
            return max(self.whole - (blocks - 1) * self.vectors, 0)
        steps = self.whole // (blocks * size)
        return steps * size + max(self.whole - (steps * blocks + blocks - 1) * size, 0)

    @property
    def always_full(self) -> bool:
        """Whether no block's vectors hang over an end of a row."""
        return self.surely_inside == self.vectors and self.problem.cols % self.tile.vector == 0

    def fill_outside(self, row: jax.Array, slot: list[jax.Ref]) -> None:
        """Makes what the copy left undefined, or brought of the neighbouring rows, harmless."""
        if self.always_full:
            return
        stop, size = self.staged_vectors, self.config.granule
        start = min(self.surely_inside, stop)
        threads = WARPGROUP * self.config.warpgroups
        fills = row_ops.fills(self.problem)
        for ref, to, fill in zip(self.operands.inputs, self._tails(slot), fills, strict=False):
            mbarrier.fill_outside(ref, row, self.first + self.vectors, 1, 1, to, fill, threads)
        for ref, to, fill in zip(self.operands.inputs, slot, fills, strict=False):
            if not self.config.spread:
                mbarrier.fill_outside(ref, row, self.first, start, stop, to, fill, threads)
                continue
            for step in sorted({0, *range(start // size, self.staged)}):
                begin = min(max(start - step * size, 0), size)
                mbarrier.fill_outside(ref, row, self.granule(step), begin, size, to.at[step], fill, threads)
        self.sync()

    def sync(self) -> None:
        """Waits for all threads that walk the share."""
        reduce.sync_block(self.config.warpgroups)

    def read(self, slot: list[jax.Ref], row: jax.Array, step: jax.Array, interior: bool) -> Tiles:
        """The operands' tiles of a step, as `Operands.in_float32` has them."""
        return self._in_float32(self._staged(slot, step), row, step, self.tile, interior)

    def _staged(self, slot: list[jax.Ref], step: jax.Array) -> Tiles:
        load = lambda ref: plgpu.load(ref.at[step, self.warpgroup], layout=self.tile.layout, optimized=False)
        return tuple(map(load, slot[: self.problem.operands]))

    def _raw_for_stats(self, slot: Slot, row: jax.Array, step: jax.Array) -> Tiles:
        """The operands' tiles of a step, as they are, of which the statistics are taken."""
        tile = self.stats_tile
        if slot is None:
            return self.operands.load_raw(row, self.at(step), tile, None)
        raw = self._staged(slot, step)
        if not tile.wraps:
            return raw
        at, tails = self.at(step) - self.first, self._tails(slot) or [None] * len(raw)
        parts = zip(raw, self.operands.inputs, slot, tails, row_ops.fills(self.problem), strict=False)
        wrap = lambda x, ref, staged, tail, fill: mbarrier.wrap(x, ref, row, staged, tail, at, tile, fill)
        return tuple(wrap(*part) for part in parts)

    def _in_float32(
        self,
        raw: Tiles,
        row: jax.Array,
        step: jax.Array,
        tile: Tile,
        interior: bool = False,
        capped: bool = True,
    ) -> Tiles:
        interior = interior or self.always_full
        return self.operands.in_float32(raw, row, self.at(step), tile, interior=interior, capped=capped)

    def _loop(self, start: Index, stop: int, body: Callable[[jax.Array, Any], Any], init: Any) -> Any:
        return (loops.rolled if self.config.rolled else lax.fori_loop)(start, stop, body, init)

    def _over_steps(
        self, slot: Slot, row: jax.Array, kept: Kept, add: Callable[[Any, Tiles], Any], init: Any, capped: bool
    ) -> Any:
        """`init`, and the tiles of all steps added to it one after the other."""
        tiles_of = lambda raw, i: self._in_float32(raw, row, i, self.stats_tile, capped=capped)
        read = lambda i, x: add(x, tiles_of(self._raw_for_stats(slot, row, i), i))
        total = self._loop(0, self.staged, read, init)
        for step, raw in enumerate(kept, self.staged):
            tiles = tiles_of(raw, jnp.int32(step))
            total = add(*lax.optimization_barrier((total, tiles)))
        return total

    def partial_stats(self, slot: Slot, row: jax.Array, kept: Kept = ()) -> Partial:
        """Each warp's statistics of its part of the row, one `[4]` array per quantity."""
        op, exp, tile = self.problem.op, row_ops.exp_for(self.problem), self.tile
        maximum, spread = [], None
        if row_ops.has_max(op):
            lowest = tile.full(-jnp.inf)
            higher = lambda high, tiles: jnp.maximum(high, tiles[0])
            highest = self._over_steps(slot, row, kept, higher, lowest, capped=False)
            maximum = [self.operands.capped(highest.max(axis=1))]
            spread = tile.broadcast(maximum[0])

        def add(sums: Tiles, tiles: Tiles) -> Tiles:
            return tuple(x + term for x, term in zip(sums, row_ops.terms(op, tiles, spread, exp), strict=True))

        zeros = tuple(tile.full(0.0) for _ in row_ops.decaying(self.problem))
        sums = self._over_steps(slot, row, kept, add, zeros, capped=True)
        add_row = lambda x: row_scalars.sums_of_rows(self.operands.inputs[0], row, x, self.stats_tile)
        return *maximum, *map(add_row, sums)

    @property
    def layout(self) -> Any:
        """Of what each warp has one number of."""
        return self.tile.layout.reduce(1)

    def merged(self, exchange: Exchange, everybody: list[jax.Array]) -> RowStats:
        """The statistics of the exchange's members together."""
        exp = row_ops.exp_for(self.problem)
        return row_ops.merge(self.problem, everybody, exchange.layout, exp, self.tile)

    def in_block(self, exchange: Exchange, partial: Partial, slots: jax.Ref) -> RowStats:
        """The block's statistics, from those of its warps."""
        warpgroups = self.config.warpgroups
        everybody = reduce.across_block(exchange, partial, self.layout, self.warpgroup, slots, warpgroups)
        return self.merged(exchange, everybody)

    def in_cluster(
        self, exchange: Exchange, partial: Partial, slots: jax.Ref, barrier: jax.Ref, parity: jax.Array
    ) -> RowStats:
        """The cluster's statistics, from those of its warps."""
        blocks, index = self.config.blocks, self.block * self.config.warpgroups + self.warpgroup
        everybody = reduce.across_cluster(exchange, partial, self.layout, index, slots, barrier, parity, blocks)
        pl.when(self.warpgroup == 0)(lambda: mbarrier.expect_bytes(barrier, exchange.bytes_expected))
        return self.merged(exchange, everybody)

    def write(
        self,
        slot: list[jax.Ref],
        row: jax.Array,
        stats: RowStats,
        labelled: Labelled | None,
        kept: Kept = (),
        streams: bool = False,
    ) -> None:
        """Writes the row's result, its statistics, or both."""
        if self.problem.op.gives_stats:
            leads = jnp.logical_and(self.block == 0, self.warpgroup == 0)
            pl.when(leads)(lambda: self.operands.store_stats(stats, labelled, row, self.tile))
        if not self.problem.op.gives_rows:
            return
        if labelled is None:
            self._write_rows(slot, row, stats, kept, streams)
            return
        counts = self.operands.label(row) >= 0
        pl.when(jnp.logical_not(counts))(lambda: self._write_zeros(row, streams))

        @pl.when(counts)
        def _():
            self._write_rows(slot, row, stats, kept, streams)
            share = {"warpgroups": self.config.warpgroups, "first": self.first, "vectors": self.vectors}
            self.operands.store_at_labels(labelled, stats, row, self.tile, **share)

    def _write_zeros(self, row: jax.Array, streams: bool) -> None:
        zeros, to = self.tile.full(0.0).astype(self.problem.dtype), self.operands.outputs[0]

        def write_step(step: jax.Array, _: None) -> None:
            vectors.store(to, row, self.at(step), zeros, self.tile, interior=self.always_full, streams=streams)

        lax.fori_loop(0, self.steps, write_step, None)

    def _write_rows(self, slot: list[jax.Ref], row: jax.Array, stats: RowStats, kept: Kept, streams: bool) -> None:
        def store(tiles: Tiles, step: jax.Array, interior: bool) -> None:
            self.operands.store(tiles, stats, row, self.at(step), self.tile, interior=interior, streams=streams)

        def write(start: int, stop: int, interior: bool) -> None:
            if start < stop:
                step = lambda i, _: store(self.read(slot, row, i, interior), i, interior)
                self._loop(start, stop, step, None)

        # Vectors that may hang over an end of the row cost five instructions an element: they have loops of their own.
        begin = 0 if self.problem.cols % self.tile.vector == 0 else 1
        end = min(max(self.surely_inside // self.config.granule, begin), self.staged)
        write(0, begin, interior=False)
        write(begin, end, interior=True)
        write(end, self.staged, interior=False)
        for step, raw in enumerate(kept, self.staged):
            tiles = self._in_float32(raw, row, jnp.int32(step), self.tile)
            store(lax.optimization_barrier(tiles), jnp.int32(step), self.always_full)
