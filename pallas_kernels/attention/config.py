"""The kernels' configs, which `dispatch` chooses: sizes of tiles, depths of pipelines, schedules."""

import dataclasses
from typing import Literal

WARPGROUP_ROWS = 64  # rows of a WGMMA


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """A CTA of `warpgroups` warpgroups of 64 query rows each, which share a pipeline of keys and values.

    Attributes:
      block_kv: keys of a tile.
      warpgroups: warpgroups of a CTA.
      rescale_threshold_log2: the output is rescaled only if a row's maximum grows by more than this power of two.
      early_exp_columns: columns of a tile whose exponentials start before it is known whether the maximum grows.
      scheduler: of query tiles. "static": a table assigns tiles to one CTA an SM. "dynamic": a CTA takes the next tile
        from a counter when it is free.
      bias_stages: stages of bias tiles in shared memory; with 0 each thread loads the bias of its own scores.
      l2_budget_mib: keys and values of the heads that run at one time fit in this much of L2.
      zero_init_free: the first WGMMA of a score tile overwrites its registers, which otherwise are cleared before.
      overlap_pv: exponentials run beside the product P V of the tile before, where ptxas would wait for it first.
      prefetch_query: the next tile's queries are copied during the last step of a tile, not after it.
      ctas_per_sm: CTAs that share an SM.
      packed_heads: query heads of one key head, a power of two, whose queries share a tile's rows.
      splits: parts of the keys. Each is a tile of its own, and the parts' states are merged after the kernel.
    """

    block_kv: int
    warpgroups: int
    rescale_threshold_log2: int = 0
    early_exp_columns: int = 0
    scheduler: Literal["static", "dynamic"] = "static"
    bias_stages: int = 0
    l2_budget_mib: int = 16
    zero_init_free: bool = False
    overlap_pv: bool = False
    prefetch_query: bool = False
    ctas_per_sm: int = 1
    packed_heads: int = 1
    splits: int = 1

    stages = 2  # `tile_scheduler` relies on it

    def __post_init__(self) -> None:
        if self.packed_heads & (self.packed_heads - 1) or not 0 < self.packed_heads <= WARPGROUP_ROWS:
            raise ValueError(f"packed_heads is {self.packed_heads}, expected a power of two up to {WARPGROUP_ROWS}.")

    @property
    def block_q(self) -> int:
        """Query rows of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def queries(self) -> int:
        """Queries of a tile, which has one row for each of them and each packed head."""
        return self.block_q // self.packed_heads


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A CTA with 64 keys for each of `warpgroups` warpgroups, and a pipeline of `stages` stages of `block_q` queries.

    Attributes:
      scheduler: of tiles of keys. "single": a CTA for each tile. "static": one CTA an SM, with every n-th tile.
        "dynamic": one CTA an SM, which takes the next tile from a counter.
      heads_per_l2_group: at most so many heads' tiles are interleaved in the order in which tiles start.
      ordered_dq: a semaphore makes tiles of keys add to a tile of dQ in a fixed order.
      fused_dq_cast: the last tile of keys to add writes dQ itself, in 16 bits.
      bias_stages: as in `ForwardConfig`.
      prefetch_scores: the next step's K Q^T is issued beside this step's dQ and dK.
      staggered: each tile of keys starts one tile of queries later than the one before it.
      dq_from_registers: dQ is added to global memory from registers, and needs no shared memory. Only unordered.
      head_splits: CTAs that share a group's query heads. XLA sums their dK and dV in float32 after the kernel.
    """

    block_q: int
    warpgroups: int
    stages: int
    scheduler: Literal["single", "static", "dynamic"] = "single"
    heads_per_l2_group: int = 1
    ordered_dq: bool = False
    fused_dq_cast: bool = False
    bias_stages: int = 0
    prefetch_scores: bool = False
    staggered: bool = False
    dq_from_registers: bool = False
    head_splits: int = 1

    def __post_init__(self) -> None:
        if self.dq_from_registers and (self.ordered_dq or self.fused_dq_cast):
            raise ValueError("dq_from_registers is True, expected False where dQ is ordered or cast in the kernel.")

    @property
    def block_kv(self) -> int:
        """Keys of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def dq_writers(self) -> int:
        """Warpgroups that add to a tile of dQ, each its own part."""
        return self.warpgroups


@dataclasses.dataclass(frozen=True)
class BackwardWideConfig:
    """A CTA with 64 keys and 64 queries a step for two warpgroups, of which one has dV and the other dK in registers.

    Attributes:
      stages: stages of queries.
      d_out_stages: stages of cotangents.
      squares: buffers of 64 x 64 float32 in shared memory. With 1, for the probabilities, dQ is added from registers.
        With 3, each warpgroup stores its part of dQ in a buffer of its own. With 2, warpgroup 0 reuses the first.
      dq_columns: columns of dQ that one product has.
      heads_per_l2_group, ordered_dq, bias_stages, prefetch_scores, head_splits: as in `BackwardConfig`.
    """

    stages: int = 2
    d_out_stages: int = 2
    squares: int = 1
    heads_per_l2_group: int = 1
    ordered_dq: bool = False
    bias_stages: int = 0
    prefetch_scores: bool = False
    dq_columns: int = 128
    head_splits: int = 1

    scheduler = "single"
    fused_dq_cast = False
    staggered = False
    block_q = WARPGROUP_ROWS
    block_kv = WARPGROUP_ROWS
    warpgroups = 2
    dq_writers = 2

    def __post_init__(self) -> None:
        if self.ordered_dq and self.squares < 2:
            raise ValueError(f"squares is {self.squares}, expected 2 or 3 where dQ is ordered.")


AnyBackwardConfig = BackwardConfig | BackwardWideConfig
