"""The knobs of the backward kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A block of 64 keys to each of `warpgroups` warpgroups, past which the queries stream `block_q` at a time."""

    block_q: int
    warpgroups: int
    stages: int

    @property
    def block_kv(self) -> int:
        return 64 * self.warpgroups
