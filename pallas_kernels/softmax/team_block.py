"""A block of a team: what its warpgroups share, where its rows stand, and the barriers that say how far each one is."""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import mbarrier
from pallas_kernels.mosaic.ptx import WARPS
from pallas_kernels.mosaic.reduce import Exchange
from pallas_kernels.softmax import row_ops
from pallas_kernels.softmax.board import Board, Where
from pallas_kernels.softmax.config import TeamConfig
from pallas_kernels.softmax.problem import Problem
from pallas_kernels.softmax.rung import Operands
from pallas_kernels.softmax.share import Share

TURNS = 2  # rows of which a block has been told and that it has not begun to write


def barriers_of(config: TeamConfig) -> int:
    """How many a block has."""
    return 3 * config.slots + 2 * TURNS


def board_of(problem: Problem, config: TeamConfig) -> Board:
    """Where a row's members meet."""
    # Who has a place for a row was told of the one so many before: it has been gathered, and heard by whoever reads.
    return Board(config.blocks, row_ops.quantities(problem), config.slots, config.granule)


def exchanges_of(problem: Problem, config: TeamConfig) -> tuple[Exchange, ...]:
    """Among the warps of a block and the members of a team, both once more for who is alone, and what is told."""
    far = board_of(problem, config)
    near = Exchange(WARPS * config.warpgroups, far.quantities)
    return near, far.found, near, far.found, far.told


@dataclasses.dataclass(frozen=True)
class Block:
    """A member of a team, and what its warpgroups share."""

    operands: Operands
    config: TeamConfig
    slots: tuple[jax.Ref, ...]  # of each operand
    near: jax.Ref
    found: jax.Ref
    near_alone: jax.Ref
    found_alone: jax.Ref
    told: jax.Ref
    left: jax.Ref
    barriers: jax.Ref

    @property
    def problem(self) -> Problem:
        return self.operands.problem

    @property
    def board(self) -> Board:
        return board_of(self.problem, self.config)

    @property
    def member(self) -> jax.Array:
        return lax.rem(lax.axis_index("rows"), jnp.int32(self.config.blocks))

    @property
    def team(self) -> jax.Array:
        return lax.div(lax.axis_index("rows"), jnp.int32(self.config.blocks))

    @property
    def rows(self) -> jax.Array:
        """How many the team has."""
        return lax.div(self.problem.rows - self.team + (self.config.teams - 1), jnp.int32(self.config.teams))

    def row(self, i: jax.Array) -> jax.Array:
        """The team's row `i`."""
        return self.team + i * self.config.teams

    def where(self, i: jax.Array) -> Where:
        """Where the words of the team's row `i` stand."""
        return Where(self.operands.outputs[0], self.row(self.rows - 1), i)

    def slot(self, i: jax.Array) -> list[jax.Ref]:
        """Where the team's row `i` stands."""
        return [of_operand.at[lax.rem(i, jnp.int32(self.config.slots))] for of_operand in self.slots]

    def stats_told(self, i: jax.Array, share: Share) -> row_ops.RowStats:
        """The statistics of the team's row `i`, as the block was told of them."""
        told = self.told.at[turn(i)]
        numbers = [plgpu.load(told.at[q], layout=share.layout, optimized=False) for q in range(told.shape[0])]
        return row_ops.from_numbers(self.problem, numbers)

    def holds_words(self, i: jax.Array) -> jax.Array:
        """Whether words stand where the block's share of the team's row `i` will."""
        return jnp.logical_and(self.member < self.board.hosts, i == self.rows - 1)

    def copy(self, share: Share, i: jax.Array) -> None:
        """Starts copying the team's row `i`."""
        share.copy(self.row(i), self.slot(i), self.full(i))

    def await_place(self, i: jax.Array) -> None:
        """Waits until what stands where the team's row `i` will is written."""
        before = i - self.config.slots
        written = lambda: mbarrier.wait(self.written(before), phase(before, self.config.slots))
        pl.when(before >= 0)(written)

    def full(self, i: jax.Array) -> jax.Ref:
        """The barrier of the row's copy."""
        return self._of_slot(0, i)

    def walked(self, i: jax.Array) -> jax.Ref:
        """The barrier of those who have read it."""
        return self._of_slot(1, i)

    def written(self, i: jax.Array) -> jax.Ref:
        """The barrier of those who have written it."""
        return self._of_slot(2, i)

    def heard(self, i: jax.Array) -> jax.Ref:
        """The barrier of its statistics."""
        return self._of_turn(0, i)

    def taken(self, i: jax.Array) -> jax.Ref:
        """The barrier of those who have taken its statistics."""
        return self._of_turn(1, i)

    def _of_slot(self, kind: int, i: jax.Array) -> jax.Ref:
        return self.barriers.at[kind * self.config.slots + lax.rem(i, jnp.int32(self.config.slots))]

    def _of_turn(self, kind: int, i: jax.Array) -> jax.Ref:
        return self.barriers.at[3 * self.config.slots + kind * TURNS + turn(i)]

    def share(self, first_warpgroup: int, barrier: int) -> Share:
        """The block's share, for the warpgroups from that one on, who meet at a barrier."""
        warpgroup = lax.axis_index("warpgroup") - first_warpgroup
        return Share(self.operands, self.config, self.member, warpgroup, barrier)


def turn(i: jax.Array) -> jax.Array:
    """Which of the places that rows take in turn is row `i`'s."""
    return lax.rem(i, jnp.int32(TURNS))


def phase(i: jax.Array, places: int) -> jax.Array:
    """The parity of row `i`'s phase of a barrier, of which there are so many for rows in turn."""
    return lax.rem(lax.div(i, jnp.int32(places)), jnp.int32(2))
