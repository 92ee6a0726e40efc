"""How time is taken.

Protocol
  1. Every variant is a compiled program; compilation and a first launch are never timed.
  2. The variants of a case run interleaved, round-robin, in one schedule: each round launches every variant a few
     times, and the order of the variants rotates from round to round: a drifting clock touches all of them alike.
  3. Inputs rotate over enough buffers, and outputs are kept alive over as many launches, that at least
     `cases.ROTATED_BYTES` pass between two uses of one address: L2 (50 MB) holds nothing of use. Cases tagged "hot" use
     one buffer.
  4. Time is the device's: CUPTI's duration of each kernel, summed over the kernels of a launch, the whole schedule in
     one CUPTI session after an identical warm-up. Gaps between launches do not count, and neither do those between
     the kernels of one launch.
  5. If the kernels seen are not the kernels launched, each round of each variant gets a session of its own. Without
     CUPTI (a CPU, or a profiler that fails) time is wall clock around a blocked launch. The clock used is part of
     every result.
  6. What takes longer than `SLOW_SECONDS` is launched once in each of the first `_SLOW_ROUNDS` rounds.
  7. The ceiling of a case is a copy of as many bytes in the same schedule. XLA's elementwise code is none (3.4 TB/s
     where a copy reaches 4.2), so the better of two counts: a Mosaic GPU kernel that loads registers and stores them,
     and torch's `copy_`, which is the driver's own, by CUDA events, where torch can be imported beside JAX.
  8. Reported: median, minimum, maximum and the 20th and 80th percentiles over all launches, and each round's median.
"""

import collections
import dataclasses
import importlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.results import summary

_COLS = 8192  # int32 elements of a block of the copy kernel: 64 registers per thread
SLOW_SECONDS = 0.02
_SLOW_ROUNDS = 2
_ROUND_SECONDS = 1e-3  # of device time per variant and round
_ASSUMED_BYTES_PER_SECOND = 3e12


@dataclasses.dataclass(frozen=True)
class Variant:
    """A named program; `launch(k)` runs it on the k-th set of buffers and returns its outputs."""

    name: str
    launch: Callable[[int], Any]
    slow: bool = False


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one variant, in microseconds."""

    rounds: tuple[tuple[float, ...], ...]
    kernels: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(itertools.chain(*self.rounds))

    def as_json(self) -> dict[str, Any]:
        samples = list(itertools.chain(*self.rounds))
        rounds = [round(statistics.median(r), 3) for r in self.rounds if r]
        return summary(samples) | {"rounds_us": rounds, "launches": len(samples), "kernels": list(self.kernels)}


def launches_per_round(least_bytes: int) -> int:
    """Enough launches for a steady round, few enough for a short one."""
    return int(np.clip(_ROUND_SECONDS / (least_bytes / _ASSUMED_BYTES_PER_SECOND), 2, 10))


def measure(
    variants: Sequence[Variant], *, buffers: int, rounds: int, launches: int, device_clock: bool
) -> tuple[str, dict[str, Timing]]:
    """Times all variants, interleaved.

    Args:
      variants: what to time; names are unique.
      buffers: how many sets of operands `launch` accepts.
      rounds: interleaved rounds.
      launches: launches of each variant in a round.
      device_clock: whether to ask CUPTI first.

    Returns:
      The clock ("cupti", "cupti, each round apart" or "wall"), and the timing of each variant by name.
    """
    if not variants:
        return "none", {}
    schedule = _Schedule(variants, buffers, rounds, launches)
    for clock, way in _DEVICE_CLOCKS.items() if device_clock else ():
        try:
            return clock, way(schedule)
        except Exception as error:  # the profiler's failures have no common type; the run goes on, saying so
            warnings.warn(f"no time by {clock}: {type(error).__name__}: {error}", stacklevel=2)
    return "wall", _measure_wall(schedule)


class _Schedule:
    """All launches of a measurement, in order.

    Implements `jax.stages.Wrapped`, which the profiler asks of what it runs, so that one CUPTI session covers launches
    of many programs on many buffers.
    """

    def __init__(self, variants: Sequence[Variant], buffers: int, rounds: int, launches: int):
        self.variants, self.buffers, self.rounds, self.launches = tuple(variants), buffers, rounds, launches

    def slots(self) -> Iterator[tuple[int, Variant]]:
        """(round, variant) of every launch."""
        for r in range(self.rounds):
            first = r % len(self.variants)
            for variant in self.variants[first:] + self.variants[:first]:
                for _ in range(self.count(r, variant)):
                    yield r, variant

    def count(self, r: int, variant: Variant) -> int:
        """How often a round launches a variant."""
        return self.launches if not variant.slow else int(r < _SLOW_ROUNDS)

    def __call__(self) -> list[Any]:
        alive = collections.deque(maxlen=self.buffers)
        for k, (_, variant) in enumerate(self.slots()):
            alive.append(variant.launch(k % self.buffers))
        return list(alive)

    def trace(self, *_, **__):
        raise NotImplementedError("a schedule only runs")

    lower = trace

    def alone(self, variant: Variant, launches: int = 1) -> "_Schedule":
        return _Schedule([variant], self.buffers, 1, launches)


def _device_kernels(schedule: _Schedule) -> list[tuple[str, float]]:
    _, kernels = profiler.measure(schedule, aggregate=False)()
    if not kernels:
        raise RuntimeError("CUPTI saw no kernel")
    return kernels


def _measure_cupti(schedule: _Schedule) -> dict[str, Timing]:
    names = {v.name: [name for name, _ in _device_kernels(schedule.alone(v))] for v in schedule.variants}
    kernels = iter(_device_kernels(schedule))
    rounds = {v.name: [[] for _ in range(schedule.rounds)] for v in schedule.variants}
    for r, variant in schedule.slots():
        launched = list(itertools.islice(kernels, len(names[variant.name])))
        if [name for name, _ in launched] != names[variant.name]:
            raise RuntimeError(f"{variant.name}: expected kernels {names[variant.name]}, CUPTI saw {launched}")
        rounds[variant.name][r].append(1e3 * sum(ms for _, ms in launched))
    if next(kernels, None) is not None:
        raise RuntimeError("CUPTI saw more kernels than were launched")
    return {name: Timing(tuple(map(tuple, r)), tuple(names[name])) for name, r in rounds.items()}


def _measure_cupti_apart(schedule: _Schedule) -> dict[str, Timing]:
    """A CUPTI session for each round of each variant: no doubt whose kernels they are, but only their sum counts."""
    rounds = {variant.name: [] for variant in schedule.variants}
    for r in range(schedule.rounds):
        for variant in schedule.variants:
            if count := schedule.count(r, variant):
                kernels = _device_kernels(schedule.alone(variant, count))
                rounds[variant.name].append((1e3 * sum(ms for _, ms in kernels) / count,))
    return {name: Timing(tuple(times)) for name, times in rounds.items()}


_DEVICE_CLOCKS = {"cupti": _measure_cupti, "cupti, each round apart": _measure_cupti_apart}


def _measure_wall(schedule: _Schedule) -> dict[str, Timing]:
    for variant in schedule.variants:
        jax.block_until_ready(variant.launch(0))
    rounds = {v.name: [[] for _ in range(schedule.rounds)] for v in schedule.variants}
    for k, (r, variant) in enumerate(schedule.slots()):
        start = time.perf_counter()
        jax.block_until_ready(variant.launch(k % schedule.buffers))
        rounds[variant.name][r].append(1e6 * (time.perf_counter() - start))
    return {name: Timing(tuple(map(tuple, r))) for name, r in rounds.items()}


def _copy_block(x_gmem, y_gmem):
    i = lax.axis_index("block")
    y_gmem[i] = plgpu.load(x_gmem.at[i], layout=plgpu.Layout.WG_STRIDED((_COLS,), vec_size=4), optimized=False)


@jax.jit
def mosaic_copy(x: jax.Array) -> jax.Array:
    """Copies int32 `[blocks, _COLS]`, one block per warpgroup."""
    kernel = plgpu.kernel(
        _copy_block,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("block",),
        kernel_name="copy",
    )
    return kernel(x)


xla_copy = jax.jit(jnp.copy)  # a stand-in where there is no GPU


def moved_bytes(least_bytes: int) -> int:
    """The bytes a copy probe of about `least_bytes` moves: whole blocks, read and written."""
    return 2 * 4 * _COLS * _blocks(least_bytes)


def copy_variant(least_bytes: int, buffers: int) -> Variant:
    """The copy in JAX's process that moves as many bytes as the case."""
    keys = jax.random.split(jax.random.key(1), buffers)
    shape = _blocks(least_bytes), _COLS
    sources = [jax.random.randint(key, shape, 0, jnp.iinfo(jnp.int32).max, jnp.int32) for key in keys]
    copy = mosaic_copy if jax.default_backend() == "gpu" else xla_copy
    if not bool((copy(sources[0]) == sources[0]).all()):
        raise RuntimeError("the copy probe does not copy")
    return Variant("copy:mosaic" if copy is mosaic_copy else "copy:xla", lambda k: copy(sources[k]))


def torch_copy_us(least_bytes: int, buffers: int, rounds: int) -> float | None:
    """The median time of torch's device-to-device copy, ten launches per pair of events; None without torch."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    elements = max(1, least_bytes // 8)
    sources = [torch.empty(elements, dtype=torch.int32, device="cuda").random_() for _ in range(buffers)]
    targets = [torch.empty_like(source) for source in sources]
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for k in range(10):
            targets[k % buffers].copy_(sources[k % buffers])
        end.record()
        torch.cuda.synchronize()
        times.append(100.0 * start.elapsed_time(end))
    del sources, targets
    torch.cuda.empty_cache()
    return statistics.median(times[1:])


def best_copy(found: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """The fastest of {method: (microseconds, bytes moved)}, naming all."""
    speeds = {name: moved / us / 1e6 for name, (us, moved) in found.items()}
    best = max(speeds, key=lambda name: speeds[name])
    return {
        "method": best,
        "us": round(found[best][0], 3),
        "tb_per_s": round(speeds[best], 4),
        "all_tb_per_s": {name: round(speed, 4) for name, speed in speeds.items()},
    }


def _blocks(least_bytes: int) -> int:
    return max(1, least_bytes // (2 * 4 * _COLS))
