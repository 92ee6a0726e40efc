"""Votes of a warp's lanes, by which the compiler knows that a condition is the same in all of them."""

import functools

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import INTEGER, ROW, WGMMA


def warp_uniform(x: jax.Array) -> jax.Array:
    """Puts an integer of all lanes in a uniform register, where the compiler cannot prove that it is the same."""

    def first_lane(ctx, x):
        return ptx.integer(ptx.uniform(ptx.scalar(x)))

    return ptx.inline(first_lane, x, result=INTEGER)


def warp_any(x: jax.Array) -> jax.Array:
    """Says whether `x`, one truth value a row, holds in any row of the warp."""

    def vote_any(ctx, x):
        return vote(numbers(x))

    return ptx.inline(vote_any, (x, ROW), result=INTEGER) != 0


def warp_any_above(x: jax.Array, factor: float, limits: jax.Array) -> jax.Array:
    """Says whether `x`, eight numbers a row, times `factor` is NaN or above the row's limit in any row of the warp."""

    def vote_above(ctx, x, limits):
        above = []
        for pair, limit in zip(x.registers.flat, numbers(limits), strict=True):
            product = arith.mulf(arith.maximumf(*ptx.elements(pair)), utils.c(factor, limit.type))
            above.append(arith.cmpf(arith.CmpFPredicate.UGT, product, limit))
        return vote(above)

    return ptx.inline(vote_above, (x, WGMMA), (limits, ROW), result=INTEGER, static={"factor": factor}) != 0


def vote(mask_bits: list[ir.Value]) -> mgpu.FragmentedArray:
    """Says whether any of the bits holds in any lane, within an inline operation."""
    text = "{ .reg .pred p; vote.sync.any.pred p, $1, -1; selp.b32 $0, 1, 0, p; }"
    any_held = functools.reduce(arith.ori, mask_bits)
    return ptx.integer(ptx.asm_value(text, "=r,b", [any_held]))


def numbers(rows: mgpu.FragmentedArray) -> list[ir.Value]:
    """Returns a thread's numbers of an array with one number a row: of its upper and of its lower row."""
    return [x for r in rows.registers.flat for x in (ptx.elements(r) if isinstance(r.type, ir.VectorType) else [r])]
