"""Which config suits a problem, from its sizes alone; each threshold with the measurement behind it."""

from pallas_kernels.attention.configs import ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device


def forward(problem: Attention, device: Device) -> tuple[ForwardConfig, ...]:
    """The widest tiles of keys of which two stages fit in shared memory."""
    if problem.bias is not None or sum((problem.mask is not None, problem.segments)) > 1:
        # A float32 bias takes as many registers as the scores: with tiles of 128 keys, heads of 128 spill 24 bytes.
        return (ForwardConfig(block_kv=64, warpgroups=2, stages=2, slack=8),)
    # bf16, 16384 keys, H200. Slack 8 against 0: heads of 64, 532 and 514 TFLOP/s; of 128, 689 and 693; of 256 (causal),
    # 763 and 723.
    if max(problem.head_dim, problem.value_dim) <= 64:
        # Two warpgroups: 414.
        return (ForwardConfig(block_kv=128, warpgroups=3, stages=2, slack=8),)
    if problem.head_dim + problem.value_dim <= 320:
        # Tiles of 64 keys: 572, and 652 against 713 for heads of 192 and 128.
        return (ForwardConfig(block_kv=128, warpgroups=2, stages=2),)
    return (ForwardConfig(block_kv=64, warpgroups=2, stages=2, slack=8),)
