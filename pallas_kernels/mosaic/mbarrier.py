"""Asynchronous copies of rows into shared memory, and the mbarriers that signal their arrival.

A barrier is 8 bytes of shared memory. A phase ends when all arrivals and all the bytes that they expect have come; a
wait names the phase's parity. Source: PTX ISA, "mbarrier" and "cp.async.bulk".
"""

import math
from typing import Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import Index
from pallas_kernels.mosaic.vectors import VECTOR_BYTES, RegisterTile, RowPredicate, load_vector

Cache = Literal["evict_last", "evict_first"] | None


def barriers(count: int) -> pl.MemoryRef:
    """Makes scratch for `count` barriers."""
    return plgpu.SMEM((count, 2), jnp.int32)


def _leader() -> ir.Value:
    """Says whether this is the warpgroup's first thread."""
    return ptx.compare("eq", ptx.thread_in_warpgroup(), 0)


def start_barriers(ref: jax.Ref, arrivals: tuple[int, ...]) -> None:
    """Initialises the CTA's barriers, one for each number of arrivals; other threads must `sync` before using them."""

    def make_barriers(ctx, ref):
        makes = "".join(f"@$1 mbarrier.init.shared.b64 [$0+{8 * i}], {n}; " for i, n in enumerate(arrivals))
        text = makes + "@$1 fence.mbarrier_init.release.cluster;"
        ptx.asm(text, "r,b", [ptx.shared_address(ref), ptx.compare("eq", utils.thread_idx(), 0)])

    ptx.inline(make_barriers, ref, static={"arrivals": arrivals})


def expect_bytes(ref: jax.Ref, count: int) -> None:
    """One thread of the calling warpgroup arrives and expects bytes that other CTAs will send."""

    def announce(ctx, ref):
        text = f"@$1 mbarrier.arrive.expect_tx.shared.b64 _, [$0], {count};"
        ptx.asm(text, "r,b", [ptx.shared_address(ref), _leader()])

    ptx.inline(announce, ref, static={"count": count})


def arrive_each(ref: jax.Ref) -> None:
    """Every thread of the calling warpgroup arrives."""

    # If one thread arrives for words that its whole warp wrote, compute-sanitizer reports a race.
    def arrive_threads(ctx, ref):
        ptx.asm("mbarrier.arrive.shared.b64 _, [$0];", "r,~{memory}", [ptx.shared_address(ref)])

    ptx.inline(arrive_threads, ref)


def wait(ref: jax.Ref, parity: Index, scope: Literal["cluster", "cta"] = "cluster") -> None:
    """Waits for the end of a phase of that parity, and acquires what the cluster's CTAs, or this one's copies, sent.

    In the scope of a cluster each wait invalidates the L1 cache.
    """

    def wait_barrier(ctx, ref, parity):
        text = (
            "{ .reg .pred done; AGAIN: "
            f"mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 done, [$0], $1; @!done bra AGAIN; }}"
        )
        ptx.asm(text, "r,r,~{memory}", [ptx.shared_address(ref), ptx.scalar(parity)])

    ptx.inline(wait_barrier, ref, parity)


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
        address, _, count = row_pred.row(ptx.global_address(ref), ptx.scalar(row))
        first = ptx.scalar(first)
        address = ptx.add(address, ptx.mul(arith.extui(address.type, first), VECTOR_BYTES))
        here = arith.minsi(arith.maxsi(ptx.sub(count, first), ptx.c32(0)), ptx.c32(vectors))
        here = arith.select(ptx.compare("sge", ptx.scalar(label), 0), here, ptx.c32(0))
        some = ptx.bit_and(_leader(), ptx.compare("sgt", here, 0))
        text = (
            "@$4 mbarrier.arrive.expect_tx.shared.b64 _, [$0], $3; "
            f"@$5 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} [$1], [$2], $3, [$0]{policy};"
        )
        if cache:
            create = f".reg .b64 policy; createpolicy.fractional.L2::{cache}.b64 policy, 1.0;"
            text = f"{{ {create} {text} }}"
        size = ptx.mul(here, VECTOR_BYTES)
        operands = [ptx.shared_address(barrier), ptx.shared_address(to), address, size, _leader(), some]
        ptx.asm(text, "r,r,l,r,b,b", operands)

    ptx.inline(copy_vectors, ref, row, first, to, barrier, label, static={"row_pred": row_pred, "vectors": vectors})


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
        _, head, _ = row_pred.row(ptx.global_address(gmem), ptx.scalar(row))
        thread, v = utils.thread_idx(), row_pred.tile.vector
        word = ir.IntegerType.get_signless(bits)
        value = arith.bitcast(word, utils.c(fill, ir.MemRefType(gmem.type).element_type))
        pieces = [] if row_pred.aligned else [(ptx.c32(0), ptx.compare("eq", thread, 0))]
        for at in range(start, stop, threads):
            k = ptx.add(thread, at)
            pieces.append((k, ptx.compare("ult", k, stop)))
        for k, owned in pieces:
            column = ptx.sub(ptx.mul(ptx.add(ptx.scalar(first), k), v), head)
            address = ptx.add(ptx.shared_address(to), ptx.mul(k, VECTOR_BYTES))
            for e in range(v):
                outside = ptx.compare("uge", ptx.add(column, e), row_pred.cols)
                operands = [ptx.add(address, e * dtype.itemsize), value, ptx.bit_and(owned, outside)]
                ptx.asm(f"@$2 st.shared.b{bits} [$0], $1;", f"r,{ptx.KINDS[bits]},b", operands)

    ptx.inline(
        fill_elements,
        gmem,
        row,
        first,
        to,
        static={"fill": fill, "row_pred": row_pred, "start": start, "stop": stop, "threads": threads},
    )


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
        _, head, _ = row_pred.row(ptx.global_address(gmem), ptx.scalar(row))
        of_warp = ptx.mul(ptx.div(ptx.thread_in_warpgroup(), 32), tile.vectors_in_warp)
        k = ptx.add(ptx.add(ptx.scalar(at), of_warp), tile.vectors_in_warp)
        address = ptx.add(ptx.shared_address(staged), ptx.mul(k, VECTOR_BYTES))
        wanted, exists = row_pred.wrapped(head)[0], ptx.compare("ult", k, vectors)
        if tail:
            address = arith.select(exists, address, ptx.shared_address(tail[0]))
        else:
            wanted = ptx.bit_and(wanted, exists)
        registers = raw.registers.copy()
        own = vector.bitcast(ir.VectorType.get((4,), ptx.i32()), registers.flat[0])
        words = row_pred.wrap(own, load_vector(address, wanted, fill_word, "shared"), head)
        registers.flat[0] = vector.bitcast(registers.flat[0].type, words)
        return mgpu.FragmentedArray(_registers=registers, _layout=raw.layout, _is_signed=None)

    tails = () if tail is None else (tail,)
    result = tile.shape, dtype, tile.layout
    return ptx.inline(
        wrap_tile,
        (raw, tile.layout),
        gmem,
        row,
        staged,
        at,
        *tails,
        result=result,
        static={"fill_word": fill_word, "tile": tile, "vectors": vectors},
    )
