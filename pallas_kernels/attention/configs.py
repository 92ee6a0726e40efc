"""The knobs of the kernels: frozen facts that `heuristics` chooses. They know no kernel."""

import dataclasses

WARPGROUP_ROWS = 64  # rows of a WGMMA


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """A block: `warpgroups` warpgroups of 64 query rows each that share `stages` tiles of `block_kv` keys and values.

    `slack`: powers of two by which a row's maximum may grow before what was summed against the old one is rescaled.
    `persistent`: one block to a multiprocessor takes tile after tile, else one block to a tile.
    `section_mib`: keys and values that the blocks at work at one time share, in the cache.
    """

    block_kv: int
    warpgroups: int
    stages: int
    slack: int = 0
    persistent: bool = True
    section_mib: int = 16

    @property
    def block_q(self) -> int:
        """Query rows of a block."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a computing thread and of one that only copies."""
        return {1: (240, 40), 2: (232, 40), 3: (160, 32)}[self.warpgroups]


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
