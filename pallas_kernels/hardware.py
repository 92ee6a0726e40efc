"""Facts about the devices the kernels are written for. No I/O at import; asks JAX for a device only when called."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """What the configs and heuristics need to know of a GPU."""

    name: str
    compute_capability: str
    sm_count: int
    smem_per_cta: int  # bytes a block may claim
    l2_bytes: int


H200 = Device("NVIDIA H200", "9.0", 132, 227 * 1024, 50 * 2**20)


def supports_kernels(device: Device) -> str | None:
    """Why Mosaic's Hopper kernels cannot run on `device`, or None when they can."""
    if device.compute_capability != "9.0":
        return f"{device.name} has compute capability {device.compute_capability}; the kernels are compiled for 9.0 (Hopper)"
    return None


def current() -> Device:
    """The first CUDA device of this process; the H200 where there is none, as when lowering on another machine."""
    import jax

    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        return H200
    return dataclasses.replace(
        H200, name=gpu.device_kind, compute_capability=gpu.compute_capability, sm_count=gpu.core_count
    )
