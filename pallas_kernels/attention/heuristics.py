"""Which config suits a problem, from its sizes alone; each threshold with the measurement behind it."""

from pallas_kernels.attention.configs import ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device


def forward(problem: Attention, device: Device) -> tuple[ForwardConfig, ...]:
    """The widest tiles of keys of which two stages fit in shared memory."""
    widest = max(problem.head_dim, problem.value_dim)
    if widest <= 64:
        return (ForwardConfig(block_kv=128, warpgroups=3, stages=2),)
    if problem.head_dim + problem.value_dim <= 320:
        return (ForwardConfig(block_kv=128, warpgroups=2, stages=2),)
    return (ForwardConfig(block_kv=64, warpgroups=2, stages=2),)
