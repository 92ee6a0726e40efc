"""The knobs of the backward kernel, and which suit a problem; each threshold with the measurement behind it."""

import dataclasses

from pallas_kernels.attention import schedule
from pallas_kernels.attention.configs import WARPGROUP_ROWS
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A block: 64 keys to each of `warpgroups` warpgroups, and `stages` slots for `block_q` queries each.

    `persistent`: one block to a multiprocessor takes tile after tile, else one block to a tile. `together`: of how
    many heads, at most, the tiles are started in turns.
    """

    block_q: int
    warpgroups: int
    stages: int
    persistent: bool = False
    together: int = 1

    @property
    def block_kv(self) -> int:
        """Keys of a block."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a computing thread and of one that only copies."""
        return {2: (240, 24), 3: (160, 32)}[self.warpgroups]


def backward(problem: Attention, device: Device) -> tuple[BackwardConfig, ...]:
    """As many queries at a time as the registers hold; the order of the tiles by what makes them wait."""
    block_q = 128 if max(problem.head_dim, problem.value_dim) <= 64 else 64
    config = BackwardConfig(block_q, warpgroups=2, stages=2)
    if schedule.bounds(problem) != (None, None) or problem.key_lengths or problem.query_lengths:
        # The longest tiles of as many heads as the cache holds come first: causal, D = 128, S = 2048, bf16,
        # 532 TFLOP/s, and 512 head by head, H200.
        rows = problem.query_length * problem.query_heads // problem.key_heads
        head_bytes = rows * ((problem.head_dim + problem.value_dim) * problem.dtype.itemsize + problem.head_dim * 4)
        return (dataclasses.replace(config, together=min(max(32 * MIB // max(head_bytes, 1), 1), 16)),)
    if not problem.deterministic:
        # Tiles that take equally long: D = 128, S = 2048, bf16, 601 TFLOP/s, and 591 with a block to each, H200.
        return (dataclasses.replace(config, persistent=True),)
    # A head's tiles wait for each other, a step each, unless they start a step apart. Persistent blocks would need the
    # whole device to themselves, lest a tile wait for one whose block cannot start, and are slower: D = 128, S = 2048,
    # bf16, 558 TFLOP/s with a block to each, 542 persistent, H200.
    steps = -(-problem.query_length // block_q)
    return (dataclasses.replace(config, together=-(-5 * device.sm_count // (4 * steps))),)
