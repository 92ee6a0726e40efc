"""The configuration of each kernel, which `heuristics` chooses."""

import dataclasses
from typing import Any

MAX_CLUSTER = 16  # the most CTAs that a cluster can have


def _check(config: Any, **expected: bool) -> None:
    """Raises an error that names the first of these fields whose value is not what was expected."""
    for name, holds in expected.items():
        if not holds:
            raise ValueError(f"{name} cannot be {getattr(config, name)!r} in {config}")


def _check_positive(config: Any, *names: str) -> None:
    _check(config, **{name: getattr(config, name) > 0 for name in names})


@dataclasses.dataclass(frozen=True)
class NaiveConfig:
    """A thread handles a row: there is nothing to choose."""


@dataclasses.dataclass(frozen=True)
class WarpConfig:
    """Rows are held in registers: `lanes` threads of a warp share a row, `registers` vectors in each.

    A thread loads `tiles` of its rows before it reduces the first.
    """

    lanes: int
    registers: int
    tiles: int = 1

    def __post_init__(self) -> None:
        _check(self, lanes=self.lanes in (1, 2, 4, 8, 16, 32))
        _check_positive(self, "registers", "tiles")


@dataclasses.dataclass(frozen=True)
class SharedConfig:
    """Rows are staged in shared memory: `ctas` CTAs share a row, and each has `warpgroups` warpgroups.

    A thread handles `registers` vectors at a time.
    """

    ctas: int
    warpgroups: int
    registers: int

    register_chunks = 0
    interleaved = False

    def __post_init__(self) -> None:
        _check_positive(self, "ctas", "warpgroups", "registers")

    @property
    def no_unroll(self) -> bool:
        """Whether loops over chunks stay loops, which saves registers."""
        return self.register_chunks > 0

    @property
    def chunk(self) -> int:
        """Vectors that a row's threads in a CTA handle at a time."""
        return self.warpgroups * 128 * self.registers

    def steps(self, vectors: int) -> int:
        """Chunks in a CTA's slice of a row of that many vectors."""
        return -(-vectors // (self.ctas * self.chunk))

    def staged(self, vectors: int) -> int:
        """Those of them that are staged in shared memory."""
        return self.steps(vectors) - self.register_chunks


@dataclasses.dataclass(frozen=True)
class StagedConfig(SharedConfig):
    """A CTA handles `rows` rows, one after another, and stages `stages` of them in shared memory at once.

    The last `register_chunks` chunks of a slice are held in registers instead. With `interleaved`, the chunks of a CTA
    lie `ctas` apart, so that the CTAs of a row read adjacent chunks at a time; operations with labels cannot have it.
    """

    stages: int
    rows: int
    register_chunks: int = 0
    interleaved: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "stages", "rows")
        _check(self, ctas=self.ctas <= MAX_CLUSTER, register_chunks=self.register_chunks >= 0)


@dataclasses.dataclass(frozen=True)
class GridConfig(SharedConfig):
    """A CTA reads a slice of a row for its statistics or, `lookahead` rows later, writes it."""

    lookahead: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "lookahead")


@dataclasses.dataclass(frozen=True)
class OnlineConfig:
    """A CTA of `warpgroups` warpgroups handles a row, `registers` vectors in each thread at a time."""

    warpgroups: int
    registers: int

    def __post_init__(self) -> None:
        _check_positive(self, "warpgroups", "registers")
