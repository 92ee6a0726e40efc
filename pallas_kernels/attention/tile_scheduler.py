"""The tile scheduler: which tiles a CTA works on, through a ring of tile records in shared memory.

A static scheduler assigns tiles by a table, longest first. A dynamic one takes them from an atomic counter, because the
work of a tile depends on data. A record says what the warpgroups need to know of a tile.

Warpgroup 0 publishes record `t + LOOKAHEAD` in its first step of tile `t`. The pipeline, of two stages, orders a record
before its readers:
- A warpgroup that has waited for any step of tile `t` but the first sees record `t + 1`.
- A warpgroup that has waited for the stage behind tile `t` sees record `t + 1`. In both cases all warps have released
  the last step before tile `t`, or a later one.
- The warp that refills a stage after the last step of tile `t` sees record `t + 2`.
"""

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from pallas_kernels.mosaic.ptx import Index

LOOKAHEAD = 2  # tiles
NO_TILE = -1
MOST_CONSTANT = 2**14  # tiles, of which a launch takes so long that computing their table beside it costs nothing
RECORDS = 8  # a power of two; a warpgroup may still read the record of two tiles before


def rows(fields: int) -> int:
    """Counts the rows, of two integers as a barrier has, that the ring of records of `fields` integers takes."""
    return RECORDS * 2 * -(-fields // 4)


def publish(tile_smem: jax.Ref, t: Index, record: Sequence[Index]) -> None:
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


def read(tile_smem: jax.Ref, t: Index, *, uniform: bool = True, fields: int | None = None) -> tuple[jax.Array, ...]:
    """Reads the record of the CTA's tile `t`, or its first fields; `uniform` unless one warp alone reads it."""
    size, columns = tile_smem.shape[0] // RECORDS, tile_smem.shape[1]
    rows = size if fields is None else fields // columns

    def load_record(ctx, words, t):
        index = ir.IndexType.get()
        first = ptx.mul(arith.remsi(ptx.scalar(t), ptx.c32(RECORDS)), size)
        places = [arith.constant(index, column) for column in range(columns)]
        numbers = []
        for row in range(rows):
            at = arith.index_cast(index, ptx.add(first, row))
            for place in places:
                number = memref.load(words, [at, place])
                numbers.append(ptx.integer(ptx.uniform(number) if uniform else number))
        return numbers

    return ptx.inline(
        load_record,
        tile_smem,
        t,
        result=[ptx.INTEGER] * rows * columns,
        static={"columns": columns, "rows": rows, "size": size},
    )


def fetch_tile(tile_counter: jax.Ref) -> jax.Array:
    """Takes the next number from the launch's tile counter, in the warpgroup's first thread; 0 in the others."""

    def fetch_next_tile(ctx, words):
        first = ptx.compare("eq", ptx.thread_in_warpgroup(), 0)
        text = "mov.b32 $0, 0; @$2 atom.relaxed.gpu.global.add.u32 $0, [$1], 1;"
        operands = [ptx.global_address(words), first]
        return ptx.integer(ptx.asm_value(text, "=&r,l,b", operands))

    return ptx.inline(fetch_next_tile, tile_counter, result=ptx.INTEGER)


def call(
    kernel: Callable[..., Sequence[jax.Array]],
    ctas: int,
    out_type: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
) -> list[jax.Array]:
    """Calls a kernel with a tile counter, which `vmap` does not share between the calls that it makes of one."""

    def run(*arrays: jax.Array) -> list[jax.Array]:
        return reduce.with_workspace(kernel, arrays, [jnp.full(1, LOOKAHEAD * ctas, jnp.int32)], out_type)[0]

    return sequential_vmap(run)(*operands)


def _slot(t: Index) -> jax.Array:
    return lax.rem(jnp.int32(t), RECORDS)


class _Order(NamedTuple):
    """The sections of heads of which the order of tiles is made.

    The longest of a section of heads come first; a section is the heads whose keys and values fit in L2 together.
    """

    longest_first: np.ndarray  # a head's tiles
    length: np.ndarray  # how many tiles of keys each of them sees
    heads: int
    section: int
    sequences: int  # whose heads of one number come together: they share its bias in L2. Else 1.

    @property
    def tiles(self) -> int:
        return self.heads * len(self.length)

    def tile(self, n: Any, longest_first: Any) -> Any:
        """Returns the tiles at the places `n`, by the same operations in NumPy and on the device."""
        section = n // (self.section * len(self.length))
        rest = n - section * (self.section * len(self.length))
        last = (self.heads - 1) // self.section
        width = self.section - (section == last).astype(n.dtype) * (self.section * (last + 1) - self.heads)
        head = section * self.section + rest % width
        head = head % self.sequences * (self.heads // self.sequences) + head // self.sequences
        return longest_first[rest // width] + head * len(self.length)


@functools.lru_cache(maxsize=64)
def _order(problem: Attention, config: ForwardConfig) -> _Order:
    per_head = -(-problem.query_length // config.queries) * config.splits
    group = problem.group // config.packed_heads
    head_bytes = problem.key_length * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    heads = problem.batch * problem.query_heads // config.packed_heads
    section = min(heads, group * max(config.l2_budget_mib * 2**20 // head_bytes, 1))
    spans = [tile_kv_range(problem, config, i, problem.query_length, problem.key_length)[0] for i in range(per_head)]
    length = np.array([s.end - s.first for s in spans])
    # With a mask the last of equal tiles comes first: most masks leave more keys to later queries, as positions do.
    backwards = slice(None, None, -1 if problem.mask or problem.positions else 1)
    longest_first = np.arange(per_head)[backwards][np.argsort(-length[backwards], kind="stable")]
    shares_bias = problem.bias is not None and problem.bias[0] == 1
    return _Order(longest_first, length, heads, section, problem.batch if shares_bias else 1)


@functools.lru_cache(maxsize=64)
def order(problem: Attention, config: ForwardConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tiles of queries in the order in which they start, and the number of tiles of keys that each sees.

    A tile is `(batch * query_heads + head) * tiles of a head + tile of the head`, with packs of heads for heads, and a
    tile of the head `tile of queries * splits + split`.
    """
    of = _order(problem, config)
    tiles = of.tile(np.arange(of.tiles), of.longest_first).astype(np.int32)
    return tiles, of.length[tiles % len(of.length)]


@functools.lru_cache(maxsize=64)
def assign(problem: Attention, config: ForwardConfig, ctas: int) -> np.ndarray:
    """Returns `[ctas, 1 + n]`: for each CTA how many tiles of queries it takes, and which.

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


def table(problem: Attention, config: ForwardConfig, ctas: int) -> np.ndarray | jax.Array:
    """Makes the table that the kernel reads: `assign`, or `order` and `NO_TILE` for each tile looked ahead.

    The device computes a table of more than `MOST_CONSTANT` tiles, because a constant is 8 letters of the program for
    each tile. Where tiles differ in length only the loop of `assign` can tell who is free, and the table stays a
    constant: such tiles have many keys, and memory ends before there are millions.
    """
    of = _order(problem, config)
    static, equal = config.scheduler == "static", np.ptp(of.length) == 0
    if of.tiles <= MOST_CONSTANT or (static and not equal):
        if static:
            return assign(problem, config, ctas)
        return np.pad(order(problem, config)[0], (0, LOOKAHEAD * ctas), constant_values=NO_TILE)
    rounds = -(-of.tiles // ctas)
    n = jnp.arange(rounds * ctas if static else of.tiles + LOOKAHEAD * ctas, dtype=jnp.int32)
    tiles = of.tile(jnp.minimum(n, of.tiles - 1), jnp.asarray(of.longest_first, jnp.int32))
    tiles = jnp.where(n < of.tiles, tiles, 0 if static else NO_TILE)
    if not static:
        return tiles
    # A CTA takes every `ctas`th of equal tiles.
    counts = (of.tiles + ctas - 1 - jnp.arange(ctas, dtype=jnp.int32)) // ctas
    return jnp.concatenate([counts[:, None], tiles.reshape(rounds, ctas).T], 1)
