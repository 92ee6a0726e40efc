"""Asynchronous copies of rows into shared memory, and the mbarriers that signal their arrival.

A barrier is 8 bytes of shared memory. A phase ends when all arrivals and all the bytes that they expect have come; a
wait names the phase's parity. Source: PTX ISA, "mbarrier" and "cp.async.bulk".
"""

import math
from typing import Any, Literal

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.mosaic.ptx import (
    Index,
    asm,
    c32,
    c64,
    equals,
    global_address,
    i32,
    inline,
    scalar,
    shared_address,
    thread_in_warpgroup,
)
from pallas_kernels.mosaic.vectors import VECTOR_BYTES, RegisterTile, RowPredicate, load_vector

Cache = Literal["evict_last", "evict_first"] | None


def barriers(count: int) -> Any:
    """Scratch for `count` barriers."""
    return plgpu.SMEM((count, 2), jnp.int32)


def _leader() -> ir.Value:
    """Whether this is the warpgroup's first thread."""
    return equals(thread_in_warpgroup(), 0)


def start_barriers(ref: jax.Ref, arrivals: tuple[int, ...]) -> None:
    """Initialises the CTA's barriers, one for each number of arrivals; other threads must `sync` before using them."""

    def make_barriers(ctx, ref):
        makes = "".join(f"@$1 mbarrier.init.shared.b64 [$0+{8 * i}], {n}; " for i, n in enumerate(arrivals))
        text = makes + "@$1 fence.mbarrier_init.release.cluster;"
        asm(text, "r,b", [shared_address(ref), equals(utils.thread_idx(), 0)])

    inline(make_barriers, ref)


def expect_bytes(ref: jax.Ref, count: int) -> None:
    """One thread of the calling warpgroup arrives and expects bytes that other CTAs will send."""

    def announce(ctx, ref):
        text = f"@$1 mbarrier.arrive.expect_tx.shared.b64 _, [$0], {count};"
        asm(text, "r,b", [shared_address(ref), _leader()])

    inline(announce, ref)


def arrive_each(ref: jax.Ref) -> None:
    """Every thread of the calling warpgroup arrives."""

    # If one thread arrives for words that its whole warp wrote, compute-sanitizer reports a race.
    def arrive_threads(ctx, ref):
        asm("mbarrier.arrive.shared.b64 _, [$0];", "r,~{memory}", [shared_address(ref)])

    inline(arrive_threads, ref)


def wait(ref: jax.Ref, parity: jax.Array) -> None:
    """Waits for the end of a phase of that parity, and acquires what the cluster's CTAs sent."""

    def wait_barrier(ctx, ref, parity):
        text = (
            "{ .reg .pred done; AGAIN: "
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1; @!done bra AGAIN; }"
        )
        asm(text, "r,r,~{memory}", [shared_address(ref), scalar(parity)])

    inline(wait_barrier, ref, parity)


def copy_row(
    ref: jax.Ref,
    row: Index,
    first: Index,
    vectors: int,
    to: jax.Ref,
    barrier: jax.Ref,
    cache: Cache = None,
    label: Index = 0,
) -> None:
    """Starts copying vectors `first` ... `first + vectors` of a row, as far as it has them, into shared memory.

    L2 keeps them as `cache` says. Nothing of a row with a negative label is copied.
    """
    row_pred = RowPredicate.of(ref, RegisterTile(jnp.dtype(ref.dtype), 1))
    hint, policy = (".L2::cache_hint", ", policy") if cache else ("", "")

    def copy_vectors(ctx, ref, row, first, to, barrier, label):
        address, _, count = row_pred.row(global_address(ref), scalar(row))
        first = scalar(first)
        address = arith.addi(address, arith.muli(arith.extui(address.type, first), c64(VECTOR_BYTES)))
        here = arith.minsi(arith.maxsi(arith.subi(count, first), c32(0)), c32(vectors))
        here = arith.select(arith.cmpi(arith.CmpIPredicate.sge, scalar(label), c32(0)), here, c32(0))
        some = arith.andi(_leader(), arith.cmpi(arith.CmpIPredicate.sgt, here, c32(0)))
        text = (
            "@$4 mbarrier.arrive.expect_tx.shared.b64 _, [$0], $3; "
            f"@$5 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} [$1], [$2], $3, [$0]{policy};"
        )
        if cache:
            create = f".reg .b64 policy; createpolicy.fractional.L2::{cache}.b64 policy, 1.0;"
            text = f"{{ {create} {text} }}"
        size = arith.muli(here, c32(VECTOR_BYTES))
        operands = [shared_address(barrier), shared_address(to), address, size, _leader(), some]
        asm(text, "r,r,l,r,b,b", operands)

    inline(copy_vectors, ref, row, first, to, barrier, label)


def fill_outside(
    gmem: jax.Ref, row: Index, first: Index, start: int, stop: int, to: jax.Ref, fill: float, threads: int
) -> None:
    """Fills the elements outside the row in a copied piece of it; all `threads` of the CTA take part.

    Only vector 0 and vectors `start` ... `stop` of the piece may hold such elements.
    """
    dtype = jnp.dtype(gmem.dtype)
    row_pred = RowPredicate.of(gmem, RegisterTile(dtype, 1))
    bits = 8 * dtype.itemsize

    def fill_elements(ctx, gmem, row, first, to):
        _, head, _ = row_pred.row(global_address(gmem), scalar(row))
        thread, v = utils.thread_idx(), row_pred.tile.vector
        word = ir.IntegerType.get_signless(bits)
        value = arith.bitcast(word, utils.c(fill, ir.MemRefType(gmem.type).element_type))
        pieces = [] if row_pred.aligned else [(c32(0), equals(thread, 0))]
        for at in range(start, stop, threads):
            k = arith.addi(thread, c32(at))
            pieces.append((k, arith.cmpi(arith.CmpIPredicate.ult, k, c32(stop))))
        for k, owned in pieces:
            column = arith.subi(arith.muli(arith.addi(scalar(first), k), c32(v)), head)
            address = arith.addi(shared_address(to), arith.muli(k, c32(VECTOR_BYTES)))
            for e in range(v):
                outside = arith.cmpi(arith.CmpIPredicate.uge, arith.addi(column, c32(e)), c32(row_pred.cols))
                kind, at = "h" if bits == 16 else "r", arith.addi(address, c32(e * dtype.itemsize))
                asm(f"@$2 st.shared.b{bits} [$0], $1;", f"r,{kind},b", [at, value, arith.andi(owned, outside)])

    inline(fill_elements, gmem, row, first, to)


def wrap(
    raw: jax.Array,
    gmem: jax.Ref,
    row: Index,
    staged: jax.Ref,
    tail: jax.Ref | None,
    at: Index,
    tile: RegisterTile,
    fill: float,
) -> jax.Array:
    """Wraps the tile that was loaded from vector `at` of a piece of a row, as `tile` is wrapped.

    The vector behind the piece is `tail`, or consists of `fill`.
    """
    dtype = jnp.dtype(gmem.dtype)
    row_pred = RowPredicate.of(gmem, tile)
    fill_word = int(np.full(VECTOR_BYTES // dtype.itemsize, fill, dtype).view(np.uint32)[0])
    vectors = math.prod(staged.shape) // tile.vector

    def wrap_tile(ctx, raw, gmem, row, staged, at, *tail):
        _, head, _ = row_pred.row(global_address(gmem), scalar(row))
        of_warp = arith.muli(arith.divui(thread_in_warpgroup(), c32(32)), c32(tile.vectors_in_warp))
        k = arith.addi(arith.addi(scalar(at), of_warp), c32(tile.vectors_in_warp))
        address = arith.addi(shared_address(staged), arith.muli(k, c32(VECTOR_BYTES)))
        wanted, exists = row_pred.wrapped(head)[0], arith.cmpi(arith.CmpIPredicate.ult, k, c32(vectors))
        if tail:
            address = arith.select(exists, address, shared_address(tail[0]))
        else:
            wanted = arith.andi(wanted, exists)
        registers = raw.registers.copy()
        own = vector.bitcast(ir.VectorType.get((4,), i32()), registers.flat[0])
        words = row_pred.wrap(own, load_vector(address, wanted, fill_word, "shared"), head)
        registers.flat[0] = vector.bitcast(registers.flat[0].type, words)
        return mgpu.FragmentedArray(_registers=registers, _layout=raw.layout, _is_signed=None)

    tails = () if tail is None else (tail,)
    result = tile.shape, dtype, tile.layout
    return inline(wrap_tile, (raw, tile.layout), gmem, row, staged, at, *tails, result=result)
