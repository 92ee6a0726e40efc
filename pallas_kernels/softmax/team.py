"""Rung 6, a row over a team of blocks that stay: one read and one write for rows of megabytes.

Previous rung: grid.py (a block reads a share of a row or writes one, so that shares are read twice). Changes: as many
blocks as the device runs at once take row after row, each the same share of every row of its team, which stays in
shared memory from its copy to its result. Copying, reading, writing, and finding a row's statistics are the work of
different warpgroups, each some rows ahead of the next, so that the memory waits for none. One block finds them for all.
Whoever is not told in time, as blocks may not run at once after all, does for all members what they do, and waits no
more: the same sums in the same order.
Traffic: 1 read, 1 write.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import mbarrier, reduce, vectors
from pallas_kernels.mosaic.ptx import WARPGROUP, WARPS
from pallas_kernels.mosaic.reduce import Exchange
from pallas_kernels.softmax import heuristics, row_ops
from pallas_kernels.softmax.config import TeamConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.rung import REDUCTION_SCRATCH, Operands, Results, Rung, declines_any, launch
from pallas_kernels.softmax.share import Share, copies, is_ragged, whole
from pallas_kernels.softmax.staged import allocated, share_bytes
from pallas_kernels.softmax.team_block import TURNS, Block, barriers_of, board_of, exchanges_of, phase, turn

# The hardware's barriers of those who do it.
_READING, _WRITING, _GATHERING, _HEARING, _COPYING, _MEETING = 14, 13, 12, 11, 10, 9


def unsupported(problem: Problem, device: Device) -> str | None:
    """What no kernel takes, rows that are not written, and too much for shared memory or too little for the words."""
    if reason := declines_any(problem):
        return reason
    if is_ragged(problem):
        return "a member's last vector ends in the next member's share"
    if not problem.op.gives_rows:
        return "nothing is written, so that nothing has to stay"
    if problem.op.has_labels:
        return "the elements at the labels are written by a block's first warpgroups, which read here"
    config = heuristics.team(problem, device)[0]
    if config.slots < 3:
        needed = 3 * problem.operands * share_bytes(problem, config)
        return f"three shares of a row over {config.blocks} blocks need {needed} bytes of shared memory in each"
    board = board_of(problem, config)
    if not board.fits(config.steps(problem.max_vectors), whole(problem)):
        return f"words for {config.blocks} members do not fit the first ones' shares of a row of {problem.cols} columns"
    return None


def shared_bytes(problem: Problem, config: TeamConfig) -> int:
    """What Mosaic allocates for a block: operands, slots of the exchanges, barriers, its own scratch."""
    share = share_bytes(problem, config) * config.slots
    slots = [exchange.bytes_in_shared for exchange in exchanges_of(problem, config)]
    return allocated(*[share] * problem.operands, *slots, 4, 8 * barriers_of(config), REDUCTION_SCRATCH)


def _copy(block: Block, share: Share) -> None:
    """Brings the block's share of each row, so many at a time as should be on their way."""
    config = block.config

    def copy(i: jax.Array, _: None) -> None:
        # Threads that copy nothing would fall behind the phases that they wait for.
        reduce.sync_block(1, share.barrier)
        before = i - config.coming
        pl.when(before >= 0)(lambda: mbarrier.wait(block.full(before), phase(before, config.slots)))
        block.await_place(i)
        block.copy(share, i)

    lax.fori_loop(0, block.rows, copy, None)


def _read(block: Block, share: Share) -> None:
    """Publishes the statistics of the block's share of each row."""
    config, near = block.config, exchanges_of(block.problem, block.config)[0]

    def read(i: jax.Array, _: None) -> None:
        row, slot = block.row(i), block.slot(i)
        mbarrier.wait(block.full(i), phase(i, config.slots))
        share.fill_outside(row, slot)
        stats = share.in_block(near, share.partial_stats(slot, row), block.near.at[lax.rem(i, jnp.int32(2))])
        numbers = row_ops.as_numbers(stats)
        publish = lambda: block.board.publish(numbers, share.layout, block.where(i), block.member)
        pl.when(share.warpgroup == 0)(publish)
        mbarrier.arrive(block.walked(i))

    lax.fori_loop(0, block.rows, read, None)
    _meet(block)


def _write(block: Block, share: Share) -> None:
    """Writes the block's share of each row."""
    config = block.config

    def write(i: jax.Array, _: None) -> None:
        row, slot = block.row(i), block.slot(i)
        mbarrier.wait(block.heard(i), phase(i, TURNS))
        stats = block.stats_told(i, share)
        mbarrier.arrive(block.taken(i))
        mbarrier.wait(block.walked(i), phase(i, config.slots))
        first = jnp.where(block.holds_words(i), block.board.steps, 0)
        share.write(slot, row, stats, None, first=first)
        mbarrier.release(block.written(i))

    lax.fori_loop(0, block.rows, write, None)


def _gather(block: Block) -> None:
    """Tells the statistics of the rows that are this member's to gather, as the members take turns."""
    members, config = jnp.int32(block.config.blocks), block.config
    share, board = block.share(2 * config.warpgroups, _GATHERING), block.board

    def gather(k: jax.Array, _: None) -> None:
        where, slots = block.where(block.member + k * members), block.found.at[lax.rem(k, jnp.int32(2))]

        @pl.when(board.gather(where, block.member, slots, config.patience, _GATHERING))
        def _():
            numbers = row_ops.as_numbers(share.merged(board.found, board.found.read(slots)))
            board.tell(numbers, share.layout, where)

    lax.fori_loop(0, lax.div(block.rows - block.member + members - 1, members), gather, None)
    _meet(block)


def _hear(block: Block) -> None:
    """Brings each row's statistics into shared memory."""
    config, board = block.config, block.board
    share, near = block.share(2 * config.warpgroups + 1, _HEARING), exchanges_of(block.problem, config)[0]

    def across(exchange: Exchange, values: Sequence[jax.Array], index: int, slots: jax.Ref) -> list[jax.Array]:
        return reduce.across_block(exchange, values, share.layout, index, slots, 1, share.barrier)

    # Not by the board, where others, who may be rows ahead, write over this row's words.
    def find_for(member: jax.Array, i: jax.Array) -> None:
        slots, everybody = block.near_alone.at[lax.rem(member, jnp.int32(2))], []
        for warpgroup in range(config.warpgroups):
            of_member = dataclasses.replace(share, block=member, warpgroup=warpgroup)
            everybody = across(near, of_member.partial_stats(None, block.row(i)), warpgroup, slots)
        numbers = row_ops.as_numbers(share.merged(near, everybody))
        board.found.put(numbers, share.layout, member, block.found_alone.at[turn(i)])

    def find_alone(i: jax.Array) -> None:
        slots = block.found_alone.at[turn(i)]
        lax.fori_loop(0, config.blocks, lambda member, _: find_for(member, i), None)
        reduce.sync_block(1, share.barrier)
        numbers = row_ops.as_numbers(share.merged(board.found, board.found.read(slots)))
        across(board.told, numbers, 0, block.told.at[turn(i)])

    def hear(i: jax.Array, patience: jax.Array) -> jax.Array:
        pl.when(i >= TURNS)(lambda: mbarrier.wait(block.taken(i), 1 - phase(i, TURNS)))
        told = block.told.at[turn(i)]
        heard = board.hear(block.where(i), block.member, told, patience, _HEARING)
        pl.when(jnp.logical_not(heard))(lambda: find_alone(i))
        # One thread for its warp would do; compute-sanitizer takes what the others have written for a race.
        mbarrier.arrive_each(block.heard(i))
        return jnp.where(heard, patience, 0)

    pl.when(block.rows > 0)(lambda: board.enter(block.where(jnp.int32(0))))
    lax.fori_loop(0, block.rows, hear, jnp.int32(config.patience))
    _meet(block)
    _finish(block)


def _meet(block: Block) -> None:
    """Waits for all who need words: those who read, gather and hear."""
    reduce.sync_block(block.config.warpgroups + 2, _MEETING)


def _finish(block: Block) -> None:
    """Writes what belongs in the place of words once no block needs them, as who has heard."""
    config, board, last = block.config, block.board, block.rows - 1

    @pl.when(block.rows > 0)
    def _():
        row = block.row(last)
        share = block.share(0, _HEARING)
        of_words = itertools.product(range(board.hosts), range(config.warpgroups))
        shares = [dataclasses.replace(share, block=host, warpgroup=i) for host, i in of_words]
        # On their way while others leave; more than one share's would spill.
        begun = [share.begin(row, board.steps) for share in shares[:1]]
        board.leave(block.where(last), block.left)
        reduce.sync_block(1, _HEARING)

        @pl.when(block.left[0] == config.blocks - 1)
        def _():
            stats = block.stats_told(last, share)
            for share_of_words, kept in itertools.zip_longest(shares, begun):
                kept = kept or share_of_words.begin(row, board.steps)
                share_of_words.write_begun(row, stats, kept)


def _on_share(block: Block, work: Callable[[Block, Share], None], share: Share) -> None:
    """`work(block, share)`, without checks in the members whose shares end before a row does."""
    if share.always_full:
        work(block, share)
        return
    inside = share.is_inside
    pl.when(inside)(lambda: work(block, dataclasses.replace(share, inside=True)))
    pl.when(jnp.logical_not(inside))(lambda: work(block, share))


def _body(operands: Operands, *scratch: jax.Ref, config: TeamConfig) -> None:
    problem, computing = operands.problem, config.warpgroups
    *slots, near, found, near_alone, found_alone, told, left, barriers = scratch
    block = Block(operands, config, tuple(slots), near, found, near_alone, found_alone, told, left, barriers)
    warps = WARPS * computing
    arrivals = [copies(problem, config)] * config.slots + [warps] * (2 * config.slots)
    arrivals += [WARPGROUP] * TURNS + [warps] * TURNS
    mbarrier.start_barriers(barriers, tuple(arrivals))
    for exchange, ref in zip(exchanges_of(problem, config), (near, found, near_alone, found_alone), strict=False):
        exchange.clear(ref, config.threads)
    reduce.sync_block(config.threads)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup < computing)(lambda: _on_share(block, _read, block.share(0, _READING)))
    writes = jnp.logical_and(warpgroup >= computing, warpgroup < 2 * computing)
    pl.when(writes)(lambda: _on_share(block, _write, block.share(computing, _WRITING)))
    pl.when(warpgroup == 2 * computing)(lambda: _gather(block))
    pl.when(warpgroup == 2 * computing + 1)(lambda: _hear(block))
    copying = block.share(2 * computing + 2, _COPYING)
    pl.when(warpgroup == 2 * computing + 2)(lambda: _on_share(block, _copy, copying))


def run(problem: Problem, config: TeamConfig, *operands: jax.Array) -> Results:
    """Runs the kernel on `[rows, cols]` operands."""
    tile = vectors.Tile(problem.dtype, config.registers)
    share = (config.slots, config.steps(problem.max_vectors), config.warpgroups, *tile.shape)
    return launch(
        problem,
        functools.partial(_body, config=config),
        operands,
        name="team",
        grid=config.blocks * config.teams,
        warpgroups=config.threads,
        scratch=[
            *[plgpu.SMEM(share, problem.dtype)] * problem.operands,
            *(exchange.scratch for exchange in exchanges_of(problem, config)),
            plgpu.SMEM((1,), jnp.int32),
            mbarrier.barriers(barriers_of(config)),
        ],
    )


RUNG = Rung("team", unsupported, heuristics.team, run, reads=1)
