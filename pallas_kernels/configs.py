"""The knobs of each rung: frozen facts that `heuristics` chooses and `tuned` may override. They know no kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class NaiveConfig:
    """A thread to a row: nothing to choose."""


@dataclasses.dataclass(frozen=True)
class WarpConfig:
    """Rows in registers: `lanes` threads to a row (a power of two up to 32), `registers` vectors in each."""

    lanes: int
    registers: int


@dataclasses.dataclass(frozen=True)
class StagedConfig:
    """Rows in shared memory: a row over `blocks` blocks of `warpgroups` warpgroups.

    `registers`: vectors that a thread handles at a time. `slots`: rows that a block has in shared memory at once.
    `rows`: rows that a block (or cluster) takes, one after another.
    """

    blocks: int
    warpgroups: int
    registers: int
    slots: int
    rows: int

    @property
    def granule(self) -> int:
        """Vectors that the threads of a block handle at a time."""
        return self.warpgroups * 128 * self.registers

    def steps(self, vectors: int) -> int:
        """Granules in a block's share of a row of that many vectors."""
        return -(-vectors // (self.blocks * self.granule))


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
    """A row to a block of `warpgroups` warpgroups, `registers` vectors in each thread at a time."""

    warpgroups: int
    registers: int
