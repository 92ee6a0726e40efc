"""The knobs of the backward kernel."""

import dataclasses

CHUNK = 64  # keys of a warpgroup, and columns of a swizzled tile


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A block: 64 keys for each of `warpgroups` warpgroups, and `stages` slots for `block_q` queries each."""

    block_q: int
    warpgroups: int
    stages: int

    @property
    def block_kv(self) -> int:
        """Keys of a block."""
        return self.warpgroups * CHUNK

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a computing thread and of one that only copies."""
        return {2: (240, 24), 3: (160, 32)}[self.warpgroups]
