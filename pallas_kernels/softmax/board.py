"""Words through which the blocks of a team tell each other the numbers of rows, in memory that results will fill.

They stand in the first members' shares of the team's last row until nobody needs them any more. A word is a row's
numbers and its mark, which no result looks like, as arithmetic makes only one NaN: so nothing has to be filled before,
nor to be ordered. Nobody waits for ever: on a device that runs only some of the blocks at a time, those would never see
the others' numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic.ptx import (
    INTEGER,
    SPLAT,
    WARPGROUP,
    WARPS,
    Index,
    c32,
    c64,
    equals,
    global_address,
    i64,
    scalar,
    thread_in_warpgroup,
    word,
)
from pallas_kernels.mosaic.reduce import Exchange
from pallas_kernels.mosaic.vectors import VECTOR_BYTES, Span, Tile
from pallas_kernels.softmax import posted

# Between looks, of who gathers and of who hears. H200, 64 x 1048576 float16: with 50 ns each 74.1 us, with the first or
# the second as here 73.5 and 73.3; 256 rows of float32 556, 551 and 556.
_GATHER_NAP_NS, _HEAR_NAP_NS = 400, 200


@dataclasses.dataclass(frozen=True)
class Where:
    """Whose words: of the team's row `row`, counted from its first, in the output's row `last`, the team's last."""

    out: jax.Ref
    last: Index
    row: Index

    @property
    def numbers(self) -> tuple[jax.Array, jax.Array]:
        return jnp.int32(self.last), jnp.int32(self.row)


@dataclasses.dataclass(frozen=True)
class Board:
    """For each row `quantities` numbers of each of its `members`, and what one of them makes of these for all.

    Words are vectors of the first members' shares, of which `granule` lie together; `turns` rows have some at once.
    """

    members: int
    quantities: int
    turns: int
    granule: int

    apart = 4  # copies of what is told, in vectors: 64 x 1048576 float32, H200, 142.5 us; side by side 143.3

    @property
    def copies(self) -> int:
        """Of what is told, each for a part of the members."""
        # H200, 64 x 1048576 float32, 128 blocks: 142 us with 8 or 16; where each reads the words of all, 151.
        return max(1, self.members // 16)

    @property
    def found(self) -> Exchange:
        """Shared memory for what all members have found."""
        return Exchange(self.members, self.quantities)

    @property
    def told(self) -> Exchange:
        """Shared memory for what one has told."""
        return Exchange(WARPS, self.quantities)

    @property
    def steps(self) -> int:
        """Granules of those shares that words stand in."""
        return -(-self._end // self.granule)

    def fits(self, steps: int, vectors: int) -> bool:
        """Whether shares of so many granules, of a row of so many vectors, have room for the words."""
        step, within = divmod(self._end - 1, self.granule)
        last = (step * self.members + self.hosts - 1) * self.granule + within
        return self.steps <= steps and last < vectors

    @property
    def _end(self) -> int:
        """Vectors of the share up to the last word's; the first vector may begin before the row."""
        return 1 + self._words + 1

    @property
    def planes(self) -> int:
        """Words of a member, one to two numbers each; each plane of them stands in the share of one member."""
        return posted.words(self.quantities)

    @property
    def hosts(self) -> int:
        """Members in whose shares words stand, the first ones."""
        return min(self.planes, self.members)

    @property
    def _words(self) -> int:
        """Those in a host's share."""
        return -(-self.planes // self.hosts) * self.turns * self.words_of_row

    @property
    def words_of_row(self) -> int:
        """In a plane: those that the members have found, then copies of what is told."""
        return self.members + self.apart * self.copies

    def publish(self, values: Sequence[jax.Array], layout: Any, where: Where, member: Index) -> None:
        """Publishes a member's `values`, one number each, which all threads of the calling warpgroup have."""

        def post_numbers(ctx, out, last, row, member, *values):
            first = equals(thread_in_warpgroup(), 0)
            at = self._at(out, scalar(last), self._found(scalar(row), scalar(member)))
            posted.post(at, [word(value) for value in values], scalar(row), first)

        self._call(post_numbers, where, [jnp.int32(member)], values, layout)

    def tell(self, values: Sequence[jax.Array], layout: Any, where: Where) -> None:
        """Publishes the row's `values`, by the calling warpgroup."""

        def post_copies(ctx, out, last, row, *values):
            for first in range(0, self.copies, WARPGROUP):
                copy = arith.addi(thread_in_warpgroup(), c32(first))
                takes_part = arith.cmpi(arith.CmpIPredicate.ult, copy, c32(self.copies))
                at = self._at(out, scalar(last), self._told(scalar(row), copy))
                posted.post(at, [word(value) for value in values], scalar(row), takes_part)

        self._call(post_copies, where, [], values, layout)

    def gather(self, where: Where, member: Index, slots: jax.Ref, patience: Index, barrier: int) -> jax.Array:
        """Brings what all members have published into `slots`, and says whether they had, by the calling warpgroup.

        Until `member` has, it looks at that one's alone: 256 x 1048576 float32, H200, 553 us. If all who will gather a
        row look at all of its words from the beginning, 573.
        """

        def await_found(ctx, out, last, row, patience, member, slots):
            at = lambda member: self._at(out, scalar(last), self._found(scalar(row), member))
            of_member = at(scalar(member))
            common = (self.found, scalar(row), scalar(patience), slots, barrier, _GATHER_NAP_NS)
            posted.await_posted(lambda _: of_member, 1, *common)
            return posted.await_posted(at, self.members, *common)

        return self._ask(await_found, where, [jnp.int32(patience), jnp.int32(member)], slots)

    def hear(self, where: Where, member: Index, slots: jax.Ref, patience: Index, barrier: int) -> jax.Array:
        """Brings what was told of a row into `slots`, and says whether it was, by the calling warpgroup."""

        def await_told(ctx, out, last, row, patience, member, slots):
            copy = arith.remui(scalar(member), c32(self.copies))
            at = self._at(out, scalar(last), self._told(scalar(row), copy))
            common = (self.told, scalar(row), scalar(patience), slots, barrier, _HEAR_NAP_NS)
            return posted.await_posted(lambda _: at, self.told.members, *common)

        return self._ask(await_told, where, [jnp.int32(patience), jnp.int32(member)], slots)

    def enter(self, where: Where) -> None:
        """Sees to it that those who leave are counted, before the calling warpgroup does; by its first thread."""

        def enter_board(ctx, out, last, row):
            first = equals(thread_in_warpgroup(), 0)
            posted.begin_count(self._counter(out, scalar(last)), first)

        self._call(enter_board, where, [], [], None)

    def leave(self, where: Where, to: jax.Ref) -> None:
        """Counts a member, all of whose threads have met and need no words any more; `to`: how many have left before.

        By the calling warpgroup's first thread; `to` after a `sync`, and whoever is last may write over the words.
        """

        def leave_board(ctx, out, last, row, to):
            first = equals(thread_in_warpgroup(), 0)
            posted.count_one(self._counter(out, scalar(last)), to, first)

        arguments = (plgpu.RefType(), SPLAT, SPLAT, plgpu.RefType())
        plgpu.inline_mgpu(arg_types=arguments)(leave_board)(where.out, *where.numbers, to)

    def _found(self, row: ir.Value, member: ir.Value) -> ir.Value:
        """Which word has what a member has found."""
        return arith.addi(arith.muli(arith.remui(row, c32(self.turns)), c32(self.words_of_row)), member)

    def _told(self, row: ir.Value, copy: ir.Value) -> ir.Value:
        """Which word is a copy of what is told."""
        return self._found(row, arith.addi(arith.muli(copy, c32(self.apart)), c32(self.members)))

    def _counter(self, out: ir.Value, last: ir.Value) -> ir.Value:
        """Where those who have left are counted."""
        return self._at(out, last, c32(self._words))[0]

    def _at(self, out: ir.Value, last: ir.Value, index: ir.Value) -> list[ir.Value]:
        """Where a word of each plane stands."""
        of_row, _, _ = _span(out).row(global_address(out), last)
        return [self._address(of_row, index, *divmod(plane, self.hosts)) for plane in range(self.planes)]

    def _address(self, of_row: ir.Value, index: ir.Value, above: int, host: int) -> ir.Value:
        """Where a word stands, of the plane with so many before it in the host's share."""
        vector = arith.addi(index, c32(1 + above * self.turns * self.words_of_row))
        step, within = arith.divui(vector, c32(self.granule)), arith.remui(vector, c32(self.granule))
        granule = arith.addi(arith.muli(step, c32(self.members)), c32(host))
        vector = arith.addi(arith.muli(granule, c32(self.granule)), within)
        return arith.addi(of_row, arith.muli(arith.extui(i64(), vector), c64(VECTOR_BYTES)))

    def _call(self, operation: Any, where: Where, numbers: list, values: Sequence[jax.Array], layout: Any) -> None:
        arguments = (plgpu.RefType(), *[SPLAT] * (2 + len(numbers)), *[layout] * len(values))
        plgpu.inline_mgpu(arg_types=arguments)(operation)(where.out, *where.numbers, *numbers, *values)

    def _ask(self, operation: Any, where: Where, numbers: list, slots: jax.Ref) -> jax.Array:
        arguments = (plgpu.RefType(), *[SPLAT] * (2 + len(numbers)), plgpu.RefType())
        ask = plgpu.inline_mgpu(arg_types=arguments, return_type=INTEGER)(operation)
        return ask(where.out, *where.numbers, *numbers, slots) != 0


def _span(out: ir.Value) -> Span:
    rows, cols = ir.MemRefType(out.type).shape
    element = ir.MemRefType(out.type).element_type
    dtype = {ir.F16Type: jnp.float16, ir.BF16Type: jnp.bfloat16, ir.F32Type: jnp.float32}[type(element)]
    dtype = jnp.dtype(dtype)
    return Span(Tile(dtype, 1), rows, cols, dtype.itemsize)
