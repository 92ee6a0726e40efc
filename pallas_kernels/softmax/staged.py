"""A row staged in shared memory, by one block or by several: what block.py, cluster.py and grid.py share.

Each block copies its share of the row asynchronously, walks it twice for the row's statistics (maximum, then sums; no
shuffle until the end), merges them with the row's other warps, and walks it once more to write the result. The data
never stands in registers, so that many blocks fit on a multiprocessor and their copies keep the memory busy.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import asynchronous, mosaic, scopes
from pallas_kernels.configs import SharedConfig, StagedConfig
from pallas_kernels.emit import WARPGROUP, Index
from pallas_kernels.hardware import Device
from pallas_kernels.problem import Problem
from pallas_kernels.scopes import Exchange
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.row_ops import Labelled, RowStats, Tiles
from pallas_kernels.softmax.rung import REDUCTION_SCRATCH, Operands, Results, launch


def warps_exchange(problem: Problem, config: SharedConfig) -> Exchange:
    """Between all warps of the blocks of a cluster."""
    return Exchange(4 * config.warpgroups * config.blocks, row_ops.quantities(problem))


def shared_bytes(problem: Problem, config: StagedConfig) -> int:
    """What Mosaic allocates for a block: operands, the exchange's slots, barriers, its own scratch."""
    share = share_bytes(problem, config) * config.slots
    exchange = warps_exchange(problem, config)
    return allocated(*[share] * problem.operands, exchange.bytes_in_shared, 8 * (config.slots + 2), REDUCTION_SCRATCH)


def share_bytes(problem: Problem, config: SharedConfig) -> int:
    """A block's share of a row, of one operand."""
    return config.steps(problem.max_vectors) * config.granule * mosaic.VECTOR_BYTES


def allocated(*sizes: int) -> int:
    """What Mosaic allocates for arrays of these sizes, each by whole KiB."""
    return sum(-(-size // 1024) * 1024 for size in sizes)


def fitting(problem: Problem, configs: tuple[StagedConfig, ...], device: Device) -> tuple[StagedConfig, ...]:
    """The configs with which the rows can be staged."""
    # A byte is taken: Mosaic's kernels declare one beside what they are given at the launch.
    return tuple(config for config in configs if shared_bytes(problem, config) < device.smem_per_cta)


def does_not_fit(problem: Problem, configs: tuple[StagedConfig, ...], device: Device) -> str | None:
    """Why the rows cannot be staged with any of these configs."""
    if fitting(problem, configs, device):
        return None
    needed, blocks = shared_bytes(problem, configs[0]), configs[0].blocks
    over = f"{blocks} blocks" if blocks > 1 else "a block"
    return f"a row over {over} needs {needed} bytes of shared memory in each, and {device.smem_per_cta - 1} are there"


Partial = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Share:
    """A block's part of its rows."""

    operands: Operands
    config: SharedConfig
    block: Index  # of those that share a row
    warpgroup: Index  # of the block

    @property
    def problem(self) -> Problem:
        return self.operands.problem

    @property
    def steps(self) -> int:
        return self.config.steps(self.problem.max_vectors)

    @property
    def vectors(self) -> int:
        return self.steps * self.config.granule

    @property
    def first(self) -> Index:
        return self.block * self.vectors

    @property
    def tile(self) -> mosaic.Tile:
        return mosaic.Tile(self.problem.dtype, self.config.registers)

    def at(self, step: jax.Array) -> jax.Array:
        """The row's vector with which this warpgroup's tile of a step begins."""
        return self.first + (step * self.config.warpgroups + self.warpgroup) * (WARPGROUP * self.config.registers)

    def copy(self, row: jax.Array, slot: list[jax.Ref], barrier: jax.Ref, cache: asynchronous.Cache = None) -> None:
        """Starts copying a row's operands into a slot."""
        label = self.operands.label(row)
        for ref, to in zip(self.operands.inputs, slot, strict=True):
            asynchronous.copy_row(ref, row, self.first, self.vectors, to, barrier, cache, label)

    @property
    def surely_inside(self) -> int:
        """How many of a block's vectors lie in the row, whichever block and whatever alignment; less the first."""
        v = self.tile.vector
        whole = (self.problem.cols - v + 1) // v if self.problem.cols % v else self.problem.cols // v
        return max(whole - (self.config.blocks - 1) * self.vectors, 0)

    @property
    def always_full(self) -> bool:
        """Whether no block's vectors hang over an end of a row."""
        return self.surely_inside == self.vectors and self.problem.cols % self.tile.vector == 0

    def fill_outside(self, row: jax.Array, slot: list[jax.Ref]) -> None:
        """Makes what the copy left undefined, or brought of the neighbouring rows, harmless."""
        if self.always_full:
            return
        start = self.surely_inside
        threads = WARPGROUP * self.config.warpgroups
        for ref, to, fill in zip(self.operands.inputs, slot, row_ops.fills(self.problem), strict=True):
            asynchronous.fill_outside(ref, row, self.first, start, self.vectors, to, fill, threads)
        self.sync()

    def sync(self) -> None:
        """Waits for all threads of the block."""
        scopes.sync_block(self.config.warpgroups)

    def read(
        self, slot: list[jax.Ref], row: jax.Array, step: jax.Array, interior: bool = False, capped: bool = True
    ) -> Tiles:
        """The operands' tiles of a step, as `Operands.in_float32` has them."""
        raw = tuple(plgpu.load(ref.at[step, self.warpgroup], layout=self.tile.layout, optimized=False) for ref in slot)
        interior = interior or self.always_full
        return self.operands.in_float32(raw, row, self.at(step), self.tile, interior=interior, capped=capped)

    def partial_stats(self, slot: list[jax.Ref], row: jax.Array) -> Partial:
        """Each warp's statistics of its part of the row, one `[4]` array per quantity."""
        op, exp, tile = self.problem.op, row_ops.exp_for(self.problem), self.tile
        maximum, spread = [], None
        if row_ops.has_max(op):
            lowest = tile.full(-jnp.inf)
            higher = lambda i, high: jnp.maximum(high, self.read(slot, row, i, capped=False)[0])
            highest = lax.fori_loop(0, self.steps, higher, lowest)
            maximum = [self.operands.capped(highest.max(axis=1))]
            spread = tile.broadcast(maximum[0])

        def add(step: jax.Array, sums: Tiles) -> Tiles:
            terms = row_ops.terms(op, self.read(slot, row, step), spread, exp)
            return tuple(total + term for total, term in zip(sums, terms, strict=True))

        zeros = tuple(tile.full(0.0) for _ in row_ops.decaying(self.problem))
        return *maximum, *(total.sum(axis=1) for total in lax.fori_loop(0, self.steps, add, zeros))

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
        everybody = scopes.across_block(exchange, partial, self.layout, self.warpgroup, slots, warpgroups)
        return self.merged(exchange, everybody)

    def in_cluster(
        self, exchange: Exchange, partial: Partial, slots: jax.Ref, barrier: jax.Ref, parity: jax.Array
    ) -> RowStats:
        """The cluster's statistics, from those of its warps."""
        blocks, index = self.config.blocks, self.block * self.config.warpgroups + self.warpgroup
        everybody = scopes.across_cluster(exchange, partial, self.layout, index, slots, barrier, parity, blocks)
        pl.when(self.warpgroup == 0)(lambda: asynchronous.expect_bytes(barrier, exchange.bytes_expected))
        return self.merged(exchange, everybody)

    def write(
        self, slot: list[jax.Ref], row: jax.Array, stats: RowStats, labelled: Labelled | None, streams: bool = False
    ) -> None:
        """Writes the row's result, its statistics, or both."""
        if self.problem.op.gives_stats:
            leads = jnp.logical_and(self.block == 0, self.warpgroup == 0)
            pl.when(leads)(lambda: self.operands.store_stats(stats, labelled, row, self.tile))
        if not self.problem.op.gives_rows:
            return
        if labelled is None:
            self._write_rows(slot, row, stats, streams)
            return
        counts = self.operands.label(row) >= 0
        pl.when(jnp.logical_not(counts))(lambda: self._write_zeros(row, streams))

        @pl.when(counts)
        def _():
            self._write_rows(slot, row, stats, streams)
            share = {"warpgroups": self.config.warpgroups, "first": self.first, "vectors": self.vectors}
            self.operands.store_at_labels(labelled, stats, row, self.tile, **share)

    def _write_zeros(self, row: jax.Array, streams: bool) -> None:
        zeros, to = self.tile.full(0.0).astype(self.problem.dtype), self.operands.outputs[0]

        def write_step(step: jax.Array, _: None) -> None:
            mosaic.store(to, row, self.at(step), zeros, self.tile, interior=self.always_full, streams=streams)

        lax.fori_loop(0, self.steps, write_step, None)

    def _write_rows(self, slot: list[jax.Ref], row: jax.Array, stats: RowStats, streams: bool) -> None:
        def write(start: int, stop: int, interior: bool) -> None:
            def write_step(step: jax.Array, _: None) -> None:
                tiles = self.read(slot, row, step, interior)
                self.operands.store(tiles, stats, row, self.at(step), self.tile, interior=interior, streams=streams)

            if start < stop:
                lax.fori_loop(start, stop, write_step, None)

        # Vectors that may hang over an end of the row cost five instructions an element: they have loops of their own.
        begin = 0 if self.problem.cols % self.tile.vector == 0 else 1
        end = max(self.surely_inside // self.config.granule, begin)
        write(0, begin, interior=False)
        write(begin, end, interior=True)
        write(end, self.steps, interior=False)


def _body(operands: Operands, *scratch: jax.Ref, config: StagedConfig, exchange: Exchange) -> None:
    *staged, slots, barriers = scratch
    problem, clustered = operands.problem, config.blocks > 1
    group = lax.axis_index("rows")
    share = Share(
        operands,
        config,
        lax.axis_index("block") if clustered else 0,
        lax.axis_index("warpgroup") if config.warpgroups > 1 else 0,
    )
    full, met = barriers.at[pl.ds(0, config.slots)], barriers.at[pl.ds(config.slots, 2)]
    first_row = group * config.rows
    rows = jnp.minimum(config.rows, problem.rows - first_row)
    asynchronous.start_barriers(barriers, (len(operands.inputs),) * config.slots + (1, 1))
    exchange.clear(slots, config.warpgroups)
    if clustered:
        scopes.arrive_in_cluster()

    @pl.when(share.warpgroup == 0)
    def _():
        for turn in range(2 if clustered else 0):
            asynchronous.expect_bytes(met.at[turn], exchange.bytes_expected)
        for i in range(config.slots):
            pl.when(i < rows)(lambda i=i: share.copy(first_row + i, [s.at[i] for s in staged], full.at[i]))

    share.sync()

    def row_step(i: jax.Array, _: None) -> None:
        row, in_slot, turn = first_row + i, lax.rem(i, config.slots), lax.rem(i, 2)
        slot = [s.at[in_slot] for s in staged]
        labelled = operands.labelled(row, share.tile)
        asynchronous.wait(full.at[in_slot], lax.rem(lax.div(i, config.slots), 2))
        share.fill_outside(row, slot)
        partial = share.partial_stats(slot, row)
        if clustered:
            pl.when(i == 0)(scopes.await_cluster)
            stats = share.in_cluster(exchange, partial, slots.at[turn], met.at[turn], lax.rem(lax.div(i, 2), 2))
        else:
            stats = share.in_block(exchange, partial, slots.at[turn])
        share.write(slot, row, row_ops.with_factors(problem, stats, labelled), labelled)
        if config.rows > 1:
            plgpu.commit_smem()
            share.sync()
            refill = jnp.logical_and(share.warpgroup == 0, i + config.slots < rows)
            pl.when(refill)(lambda: share.copy(row + config.slots, slot, full.at[in_slot]))

    if config.rows == 1:
        row_step(jnp.int32(0), None)
    else:
        lax.fori_loop(0, rows, row_step, None)


def run(problem: Problem, config: StagedConfig, *operands: jax.Array, name: str) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    exchange = warps_exchange(problem, config)
    tile = mosaic.Tile(problem.dtype, config.registers)
    staged = (config.slots, config.steps(problem.max_vectors), config.warpgroups, *tile.shape)
    return launch(
        problem,
        lambda refs, *scratch: _body(refs, *scratch, config=config, exchange=exchange),
        operands,
        name=name,
        grid=-(-problem.rows // config.rows),
        blocks=config.blocks,
        warpgroups=config.warpgroups,
        scratch=[
            *[plgpu.SMEM(staged, problem.dtype)] * problem.operands,
            exchange.scratch,
            asynchronous.barriers(config.slots + 2),
        ],
    )
