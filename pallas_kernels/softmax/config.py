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
class TeamConfig(SharedConfig):
    """`teams` teams of `blocks` blocks, in each of them `warpgroups` that read and as many that write.

    `slots`: rows of which a block has its share at once; `coming`: those of them on their way from memory.
    `patience`: how often it looks for a number before it goes on without, about a microsecond each.
    """

    slots: int
    teams: int
    coming: int = 2
    patience: int = 2**14

    # H200, 256 x 1048576 float32: 568 us, and 572 with a block's granules side by side.
    spread = True

    @property
    def rolled(self) -> bool:
        """H200, 64 x 1048576 float32: 148 us, and 154 with loops that the compilers unroll."""
        return True

    @property
    def threads(self) -> int:
        """Warpgroups of a block: those, one that gathers, one that hears and one that copies."""
        return 2 * self.warpgroups + 3


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
    """A row to a block of `warpgroups` warpgroups, `registers` vectors in each thread at a time."""

    warpgroups: int
    registers: int
