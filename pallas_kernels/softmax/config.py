"""The knobs of each rung: frozen facts that `heuristics` chooses. They know no kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class NaiveConfig:
    """A thread to a row: nothing to choose."""


@dataclasses.dataclass(frozen=True)
class WarpConfig:
    """Rows in registers: `lanes` threads to a row (a power of two up to 32), `registers` vectors in each.

    `tiles`: how many of its rows a thread loads before it reduces any.
    """

    lanes: int
    registers: int
    tiles: int = 1


@dataclasses.dataclass(frozen=True)
class SharedConfig:
    """Rows in shared memory: a row over `blocks` blocks, in each of them `warpgroups` warpgroups.

    `registers`: vectors that a thread handles at a time.
    """

    blocks: int
    warpgroups: int
    registers: int

    in_registers = 0

    spread = False  # whether a block's granules lie `blocks` apart

    @property
    def rolled(self) -> bool:
        """Whether loops over granules stay loops, for the sake of registers."""
        return self.in_registers > 0

    @property
    def granule(self) -> int:
        """Vectors that a row's threads in a block handle at a time."""
        return self.warpgroups * 128 * self.registers

    def steps(self, vectors: int) -> int:
        """Granules in a block's share of a row of that many vectors."""
        return -(-vectors // (self.blocks * self.granule))

    def staged(self, vectors: int) -> int:
        """Those of them that stand in shared memory."""
        return self.steps(vectors) - self.in_registers


@dataclasses.dataclass(frozen=True)
class StagedConfig(SharedConfig):
    """Blocks that take `rows` rows, one after another, and have `slots` of them in shared memory at once.

    `in_registers`: of the granules of a share, the last ones that stand in registers instead.
    `spread`: what a row's blocks read at a time lies together; not with labels.
    """

    slots: int
    rows: int
    in_registers: int = 0
    spread: bool = False


@dataclasses.dataclass(frozen=True)
class GridConfig(SharedConfig):
    """Blocks that each read a share of a row for its statistics or, `lag` rows later, write it."""

    lag: int


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
    """A row to a block of `warpgroups` warpgroups, `registers` vectors in each thread at a time."""

    warpgroups: int
    registers: int
