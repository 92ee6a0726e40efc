"""Facts about the devices the kernels are written for. No I/O at import; asks JAX for a device only when called."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

WARPGROUP_ROWS = 64  # of a WGMMA


class Rates(NamedTuple):
    """The rates that a card reaches in practice."""

    bytes_per_s: float  # of a copy, read and written
    flop_per_s: float  # of a large product of 16-bit floats


@dataclasses.dataclass(frozen=True)
class Device:
    """Facts of a GPU that configs and heuristics need."""

    name: str
    compute_capability: str
    sm_count: int
    smem_per_cta: int  # bytes of shared memory that a CTA may claim
    memory: int = 60 * 2**30  # bytes that JAX may use

    @property
    def card(self) -> str:
        """Its name in the table of rates: "H100"."""
        return self.name.removeprefix("NVIDIA ").split(" ")[0]

    @property
    def rates(self) -> Rates | None:
        """The card's rates; None for a card that is not in the table."""
        return _RATES.get(self.card.split("-")[0])


H100 = Device("NVIDIA H100", "9.0", 132, 227 * 1024)
H200 = Device("NVIDIA H200", "9.0", 132, 227 * 1024, 100 * 2**30)
A100 = Device("NVIDIA A100", "8.0", 108, 163 * 1024)
B200 = Device("NVIDIA B200", "10.0", 148, 227 * 1024, 135 * 2**30)
NAMED = {"H100": H100, "H200": H200, "A100": A100, "B200": B200}

# H100 and H200: measured (docs/results.md). The others reach as much of their data sheets by assumption: 7/8 and 4/5.
_RATES = {
    "H100": Rates(3.0e12, 780e12),
    "H200": Rates(4.2e12, 780e12),
    "A100": Rates(1.8e12, 250e12),
    "B200": Rates(7.0e12, 1800e12),
}


def supports_kernels(device: Device) -> str | None:
    """Says why Mosaic's Hopper kernels cannot run on `device`, or None when they can."""
    if device.compute_capability != "9.0":
        got = device.compute_capability
        return f"{device.name} has compute capability {got}; the kernels are compiled for 9.0 (Hopper)"
    return None


_pretended: str | None = None


def pretend(capability: str | None) -> None:
    """Makes `present` give the device another compute capability, for tests and benchmarks; None for its own."""
    global _pretended
    _pretended = capability


def present() -> Device | None:
    """Returns the first CUDA device of this process, or None."""
    import jax

    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    smem = getattr(gpu, "shared_memory_per_block_optin", H200.smem_per_cta)  # as Mosaic reads it
    memory = (gpu.memory_stats() or {}).get("bytes_limit", Device.memory)
    return Device(gpu.device_kind, _pretended or gpu.compute_capability, gpu.core_count, smem, memory)


_compiled_for: contextvars.ContextVar[Device | None] = contextvars.ContextVar("compiled_for", default=None)


@contextlib.contextmanager
def compiling_for(device: Device) -> Iterator[None]:
    """Makes `current` give another device than the one present, in this thread."""
    token = _compiled_for.set(device)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def current() -> Device:
    """Returns the device to compile for: the one present, or the H200 when lowering on a machine without."""
    return _compiled_for.get() or present() or H200
