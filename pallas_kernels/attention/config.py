"""The knobs of the kernels: frozen facts that `heuristics` chooses. They know no kernel."""

import dataclasses
from typing import Literal

WARPGROUP_ROWS = 64  # rows of a WGMMA


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """A block: `warpgroups` warpgroups of 64 query rows each that share two stages of `block_kv` keys and values.

    `slack`: powers of two by which a row's maximum may grow before what was summed against the old one is rescaled.
    `scheduler`: of tiles of queries; one CTA to an SM works on those that a table gives it (`static`), or takes the
    next one from a counter when it becomes free (`dynamic`).
    `bias_stages`: tiles of the bias in shared memory; with 0 each thread loads what its scores need.
    `section_mib`: keys and values that the blocks at work at one time share, in the cache.
    `early`: columns of a tile whose weights begin before it is known whether a maximum grows past the slack; if not 0.
    `overwrites`: scores are written over what their registers hold, which else are cleared before each tile.
    `overlaps`: weights are computed beside the product of those before with their values, which ptxas else waits for
    first.
    `query_ahead`: the next tile's queries are asked for beside a tile's last weights, and else behind them.
    `ctas_per_sm`: CTAs that an SM has room for, each with tiles of its own.
    `splits`: of the keys, each a tile of its own for the same queries, whose states are merged behind the kernel.
    `packed_heads`: query heads, a power of two of those that share a key head, of which a tile has the same queries.
    """

    block_kv: int
    warpgroups: int
    slack: int = 0
    early: int = 0
    scheduler: Literal["static", "dynamic"] = "static"
    bias_stages: int = 0
    section_mib: int = 16
    overwrites: bool = False
    overlaps: bool = False
    query_ahead: bool = False
    ctas_per_sm: int = 1
    packed_heads: int = 1
    splits: int = 1

    stages = 2  # with which `tile_scheduler` says when records are written

    @property
    def block_q(self) -> int:
        """Query rows of a block."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def queries(self) -> int:
        """Queries of a tile: it has as many rows of each as there are packed heads."""
        return self.block_q // self.packed_heads


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A CTA: 64 keys to each of `warpgroups` warpgroups, and a pipeline of `stages` stages of `block_q` queries each.

    `scheduler`: of tiles of keys; a CTA to each tile (`single`), or a CTA to each SM, to which tiles are dealt in turn
    (`static`), or which takes the next one as it becomes free (`dynamic`). `together`: of how many heads, at most, the
    tiles are started in turn. `turns`: tiles of keys add to a tile of dQ in their order. `last_writes`: the last one
    writes it, in 16 bits. `bias_stages`: tiles of the bias in shared memory; with 0 each thread loads what its scores
    need. `ahead`: the next step's scores are multiplied beside this step's dQ and dK, not after them. `apart`: each
    tile of keys begins a tile of queries later than the one before it. `adds_registers`: dQ is added to device memory
    from registers, and takes no shared memory; without turns alone. `head_splits`: CTAs that share a group's query
    heads; the gradients of keys and values of each are summed behind the kernel, in float32.
    """

    block_q: int
    warpgroups: int
    stages: int
    scheduler: Literal["single", "static", "dynamic"] = "single"
    together: int = 1
    turns: bool = False
    last_writes: bool = False
    bias_stages: int = 0
    ahead: bool = False
    apart: bool = False
    adds_registers: bool = False
    head_splits: int = 1

    @property
    def block_kv(self) -> int:
        """Keys of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def adders(self) -> int:
        """Warpgroups that add to a tile of dQ, each its own part."""
        return self.warpgroups


@dataclasses.dataclass(frozen=True)
class BackwardWideConfig:
    """A CTA: 64 keys, for two warpgroups, one with dV and one with dK in registers; 64 queries at a time.

    There are `stages` stages for queries and `d_out_stages` for their cotangents. `squares`: of 64 x 64 float32 in
    shared memory. With one, for the probabilities, dQ is added to device memory from registers; with three, each
    warpgroup's part of dQ leaves through one of its own, as turns want it; with two, warpgroup 0 has the one of the
    probabilities. `dq_columns`: of dQ, that a product has. `ahead`: the next step's scores are multiplied beside this
    step's dQ. `together`, `turns`, `bias_stages` and `head_splits` are as in `BackwardConfig`.
    """

    stages: int = 2
    d_out_stages: int = 2
    squares: int = 1
    together: int = 1
    turns: bool = False
    bias_stages: int = 0
    ahead: bool = False
    dq_columns: int = 128
    head_splits: int = 1

    scheduler = "single"
    last_writes = False
    apart = False
    block_q = WARPGROUP_ROWS
    block_kv = WARPGROUP_ROWS
    warpgroups = 2
    adders = 2


AnyBackwardConfig = BackwardConfig | BackwardWideConfig
