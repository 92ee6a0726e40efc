"""Words in device memory through which blocks that run at the same time tell each other the numbers of rows.

A word that has changed is the number itself, so that nothing has to be ordered. Nobody waits for ever:
on a device that runs only some of the blocks at a time, those would never see the others' numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.emit import (
    INTEGER,
    SPLAT,
    WARPGROUP,
    WARPS,
    Index,
    c32,
    equals,
    i32,
    integer,
    ptx,
    scalar,
    shared_address,
    thread_in_warpgroup,
    word,
    word_address,
)
from pallas_kernels.scopes import Exchange

# Copies of what is told, each for a part of the blocks. H200, 64 x 1048576 float32, 128 blocks: 146 us with 16, 148
# with 4; where each block reads the words of all, 151.
_COPIES = 16
_NAP_NS = 50  # float16, as above, where each block reads the words of all: 80 us, and 93 without naps


@dataclasses.dataclass(frozen=True)
class Board:
    """For each row `quantities` numbers of each of its `members`, and what one of them makes of these for all."""

    members: int
    quantities: int

    copies = _COPIES

    @property
    def found(self) -> Exchange:
        """Shared memory for what all members have found."""
        return Exchange(self.members, self.quantities)

    @property
    def told(self) -> Exchange:
        """Shared memory for what one has told."""
        return Exchange(WARPS, self.quantities)

    @property
    def words_of_row(self) -> int:
        """Words of device memory for each row."""
        return self.quantities * (self.members + self.copies * WARPS)

    def words(self, rows: int) -> jax.Array:
        """Words for that many rows. All are -1, which is no number's: arithmetic makes only one NaN, 0x7fffffff."""
        return jnp.full(rows * self.words_of_row, -1, jnp.int32)

    def publish(self, values: Sequence[jax.Array], layout: Any, words: jax.Ref, row: Index, member: Index) -> None:
        """Publishes a member's `values`, one number each, which all threads of the calling warpgroup have."""

        def post_numbers(ctx, words, row, member, *values):
            first = equals(thread_in_warpgroup(), 0)
            base = arith.addi(arith.muli(scalar(row), c32(self.words_of_row)), scalar(member))
            for q, value in enumerate(values):
                at = word_address(words, arith.addi(base, c32(q * self.members)))
                ptx("@$2 st.relaxed.gpu.global.b32 [$0], $1;", "l,r,b", [at, word(value), first])

        arguments = (plgpu.RefType(), SPLAT, SPLAT, *[layout] * len(values))
        plgpu.inline_mgpu(arg_types=arguments)(post_numbers)(words, jnp.int32(row), jnp.int32(member), *values)

    def tell(self, values: Sequence[jax.Array], layout: Any, words: jax.Ref, row: Index) -> None:
        """Publishes the row's `values`, by the calling warpgroup."""

        def post_copies(ctx, words, row, *values):
            thread = thread_in_warpgroup()
            takes_part = arith.cmpi(arith.CmpIPredicate.ult, thread, c32(self.copies * WARPS))
            copy, warp = arith.divui(thread, c32(WARPS)), arith.remui(thread, c32(WARPS))
            base = arith.addi(self._copy(scalar(row), copy), warp)
            for q, value in enumerate(values):
                at = word_address(words, arith.addi(base, c32(q * WARPS)))
                ptx("@$2 st.relaxed.gpu.global.b32 [$0], $1;", "l,r,b", [at, word(value), takes_part])

        arguments = (plgpu.RefType(), SPLAT, *[layout] * len(values))
        plgpu.inline_mgpu(arg_types=arguments)(post_copies)(words, jnp.int32(row), *values)

    def gather(self, words: jax.Ref, row: Index, slots: jax.Ref, patience: Index, barrier: int) -> jax.Array:
        """Brings what all members have published into `slots`, and says whether they had, by the calling warpgroup."""
        return self._await(words, row, None, self.found, slots, patience, barrier)

    def hear(
        self, words: jax.Ref, row: Index, member: Index, slots: jax.Ref, patience: Index, barrier: int
    ) -> jax.Array:
        """Brings what was told of a row into `slots`, and says whether it was, by the calling warpgroup."""
        each = Exchange(self.quantities * WARPS, 1)
        return self._await(words, row, member, each, slots, patience, barrier)

    def _copy(self, row: ir.Value, copy: ir.Value) -> ir.Value:
        """The first word of a row's copy."""
        base = arith.addi(arith.muli(row, c32(self.words_of_row)), c32(self.quantities * self.members))
        return arith.addi(base, arith.muli(copy, c32(self.quantities * WARPS)))

    def _await(
        self,
        words: jax.Ref,
        row: Index,
        hears: Index | None,
        exchange: Exchange,
        slots: jax.Ref,
        patience: Index,
        barrier: int,
    ) -> jax.Array:
        """What was published for all members, or the copy that one of them hears."""

        def await_numbers(ctx, words, slots, row, patience, *member):
            base = arith.muli(scalar(row), c32(self.words_of_row))
            if member:
                base = self._copy(scalar(row), arith.remui(scalar(member[0]), c32(self.copies)))
            lost, text = c32(0), _awaiting(exchange)
            for at in range(0, exchange.members, WARPGROUP):
                of = arith.addi(thread_in_warpgroup(), c32(at))
                waits = arith.cmpi(arith.CmpIPredicate.ult, of, c32(exchange.members))
                slot = arith.addi(shared_address(slots), arith.muli(of, c32(4)))
                operands = [word_address(words, arith.addi(base, of)), slot, waits, scalar(patience)]
                missing = llvm.inline_asm(i32(), operands, text, "=r,l,r,b,r,~{memory}", has_side_effects=True)
                lost = arith.ori(lost, missing)
            vote = (
                "{ .reg .pred mine, some; setp.ne.s32 mine, $1, 0; "
                f"barrier.red.or.pred some, {barrier}, {WARPGROUP}, mine; selp.b32 $0, 0, 1, some; }}"
            )
            return integer(llvm.inline_asm(i32(), [lost], vote, "=r,r,~{memory}", has_side_effects=True))

        member = [] if hears is None else [jnp.int32(hears)]
        arguments = (plgpu.RefType(), plgpu.RefType(), SPLAT, SPLAT, *[SPLAT] * len(member))
        operation = plgpu.inline_mgpu(arg_types=arguments, return_type=INTEGER)(await_numbers)
        return operation(words, slots, jnp.int32(row), jnp.int32(patience), *member) != 0


def _awaiting(exchange: Exchange) -> str:
    """Each thread's loop, $4 times again: words from $1 on, put into the slots at $2 if $3; $0 is what is missing."""
    quantities = range(exchange.quantities)
    loads = "".join(f"@$3 ld.relaxed.gpu.global.b32 w{q}, [$1 + {4 * q * exchange.members}]; " for q in quantities)
    checks = "setp.eq.and.s32 missing, w0, -1, $3; "
    checks += "".join(f"@!missing setp.eq.and.s32 missing, w{q}, -1, $3; " for q in quantities[1:])
    stores = "".join(f"@$3 st.shared.b32 [$2 + {4 * q * exchange.slots}], w{q}; " for q in quantities)
    return (
        f"{{ .reg .b32 w<{len(quantities)}>, tries; .reg .pred missing, last; mov.b32 tries, 0; "
        f"AGAIN: {loads}{checks}@!missing bra DONE; "
        f"add.u32 tries, tries, 1; setp.gt.u32 last, tries, $4; @last bra DONE; "
        f"nanosleep.u32 {_NAP_NS}; bra AGAIN; "
        f"DONE: {stores}selp.b32 $0, 1, 0, missing; }}"
    )
