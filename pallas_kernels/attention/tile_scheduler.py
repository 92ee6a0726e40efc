"""The tile scheduler: which tiles a CTA works on, through a ring of tile records in shared memory.

A static scheduler assigns tiles by a table, longest first. A dynamic one takes them from an atomic counter, because the
work of a tile depends on data. A record says what the warpgroups need to know of a tile.

Warpgroup 0 publishes record `t + LOOKAHEAD` in its first step of tile `t`. The pipeline, of two stages, orders a record
before its readers: a warpgroup that has waited for the stage behind tile `t`, or for any of its steps but the first,
knows that all warps have released the last step before tile `t`, or a later one, and so that record `t + 1` is written;
the warp that refills a stage after the last step of tile `t` knows that `t + 2` is, too.
"""

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.attention.mask import tile_kv_range
from pallas_kernels.attention.problem import Attention, ForwardConfig
from pallas_kernels.mosaic import ptx, reduce

LOOKAHEAD = 2  # tiles
RECORDS = 8  # a power of two; a warpgroup may still read the record of two tiles before


def rows(fields: int) -> int:
    """Rows of two integers, each as large as a barrier, that the ring of records of `fields` integers takes."""
    return RECORDS * 2 * -(-fields // 4)


def publish(tile_smem: jax.Ref, t: Any, record: Sequence[Any]) -> None:
    """The calling warpgroup writes the record of the CTA's tile `t`."""
    record = [jnp.int32(x) for x in record]
    record += [record[0]] * (-len(record) % 4)

    def store_record(ctx, words, *numbers):
        first = ptx.compare("eq", ptx.thread_in_warpgroup(), 0)
        for i in range(0, len(numbers), 4):
            address = ptx.add(ptx.shared_address(words), 4 * i)
            operands = [address, *map(ptx.scalar, numbers[i : i + 4]), first]
            ptx.asm("@$5 st.shared.v4.s32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,b,~{memory}", operands)
        ptx.asm("bar.warp.sync 0xffffffff;", "~{memory}", [])  # the other lanes of the warp may read it at once

    rows = tile_smem.shape[0] // RECORDS
    ptx.inline(store_record, tile_smem.at[pl.ds(_slot(t) * rows, rows)], *record)


def read(tile_smem: jax.Ref, t: Any, *, uniform: bool = True) -> tuple[jax.Array, ...]:
    """The record of the CTA's tile `t`, in uniform registers unless one warp alone reads it."""
    rows, columns = tile_smem.shape[0] // RECORDS, tile_smem.shape[1]

    def load_record(ctx, words, t):
        first = ptx.mul(arith.remsi(ptx.scalar(t), ptx.c32(RECORDS)), rows)
        numbers = []
        for row in range(rows):
            for column in range(columns):
                at = [arith.index_cast(ir.IndexType.get(), x) for x in (ptx.add(first, row), ptx.c32(column))]
                number = memref.load(words, at)
                numbers.append(ptx.integer(ptx.uniform(number) if uniform else number))
        return numbers

    return ptx.inline(load_record, tile_smem, t, result=[ptx.INTEGER] * rows * columns)


def fetch_tile(tile_counter: jax.Ref) -> jax.Array:
    """Takes the next number from the launch's tile counter, in the warpgroup's first thread; 0 in the others."""

    def fetch_next_tile(ctx, words):
        first = ptx.compare("eq", ptx.thread_in_warpgroup(), 0)
        text = "mov.b32 $0, 0; @$2 atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"
        operands = [ptx.global_address(words), first]
        return ptx.integer(ptx.asm_value(text, "=&r,l,b", operands))

    return ptx.inline(fetch_next_tile, tile_counter, result=ptx.INTEGER)


def call(kernel: Callable[..., Any], ctas: int, out_type: Any, *operands: Any) -> Any:
    """Calls a kernel with a tile counter, which `vmap` does not share between the calls that it makes of one."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return reduce.with_workspace(kernel, arrays, [jnp.full(1, LOOKAHEAD * ctas, jnp.int32)], out_type)[0]

    return sequential_vmap(run)(*operands)


def _slot(t: Any) -> jax.Array:
    return lax.rem(jnp.int32(t), jnp.int32(RECORDS))


@functools.lru_cache(maxsize=64)
def order(problem: Attention, config: ForwardConfig) -> tuple[np.ndarray, np.ndarray]:
    """The tiles of queries in the order in which to start them, and how many tiles of keys each sees.

    A tile is `(batch * query_heads + head) * tiles of a head + tile of the head`, with packs of heads for heads, and a
    tile of the head `tile of queries * splits + split`. The longest of a section of heads come first; a section is the
    heads whose keys and values fit in L2 together.
    """
    per_head = -(-problem.query_length // config.queries) * config.splits
    group = problem.group // config.packed_heads
    head_bytes = problem.key_length * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    heads = problem.batch * problem.query_heads // config.packed_heads
    section = min(heads, group * max(config.l2_budget_mib * 2**20 // head_bytes, 1))
    spans = [tile_kv_range(problem, config, i, problem.query_length, problem.key_length)[0] for i in range(per_head)]
    length = np.array([s.end - s.first for s in spans])
    # Of equal tiles the last comes first where there is a mask: most masks leave more keys to later queries, as
    # positions do.
    backwards = slice(None, None, -1 if problem.mask or problem.positions else 1)
    longest_first = np.arange(per_head)[backwards][np.argsort(-length[backwards], kind="stable")]
    in_turn = np.arange(heads)
    if problem.bias is not None and problem.bias[0] == 1:
        # The sequences of a head share its bias in L2.
        in_turn = in_turn.reshape(problem.batch, -1).T.ravel()
    sections = [
        np.add.outer(longest_first, in_turn[start : start + section] * per_head).ravel()
        for start in range(0, heads, section)
    ]
    tiles = np.concatenate(sections).astype(np.int32)
    return tiles, length[tiles % per_head]


@functools.lru_cache(maxsize=64)
def assign(problem: Attention, config: ForwardConfig, ctas: int) -> np.ndarray:
    """`[ctas, 1 + n]`: for each CTA how many tiles of queries it takes, and which.

    Each tile is assigned to the CTA that would be free first.
    """
    assigned: list[list[int]] = [[] for _ in range(ctas)]
    free = [(0.0, i) for i in range(ctas)]
    for tile, length in zip(*(x.tolist() for x in order(problem, config)), strict=True):
        time, i = free[0]
        assigned[i].append(tile)
        heapq.heapreplace(free, (time + length + 0.7, i))
    table = np.zeros((ctas, 1 + max(map(len, assigned))), np.int32)
    for row, mine in zip(table, assigned, strict=True):
        row[: 1 + len(mine)] = [len(mine), *mine]
    return table
