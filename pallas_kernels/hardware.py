"""Facts about the devices the kernels are written for. No I/O at import; asks JAX for a device only when called."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """What the configs and heuristics need to know of a GPU."""

    name: str
    compute_capability: str
    sm_count: int
    smem_per_cta: int  # bytes of shared memory that a CTA may claim
    memory: int = 60 * 2**30  # bytes that JAX may use

    @property
    def card(self) -> str:
        """What tables of tuned figures call it: "H100"."""
        return self.name.removeprefix("NVIDIA ").split(" ")[0]


H100 = Device("NVIDIA H100", "9.0", 132, 227 * 1024)
H200 = Device("NVIDIA H200", "9.0", 132, 227 * 1024, 100 * 2**30)
NAMED = {"H100": H100, "H200": H200}


def supports_kernels(device: Device) -> str | None:
    """Why Mosaic's Hopper kernels cannot run on `device`, or None when they can."""
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
    """The first CUDA device of this process, or None."""
    import jax

    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    smem = getattr(gpu, "shared_memory_per_block_optin", H200.smem_per_cta)  # as Mosaic reads it
    memory = (gpu.memory_stats() or {}).get("bytes_limit", Device.memory)
    return Device(gpu.device_kind, _pretended or gpu.compute_capability, gpu.core_count, smem, memory)


def current() -> Device:
    """The device to compile for: the one present, or the H200 when lowering on a machine without."""
    return present() or H200
