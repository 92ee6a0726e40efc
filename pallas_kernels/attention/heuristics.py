"""Which config suits a problem, from its sizes alone; each threshold with the measurement behind it."""

import dataclasses

from pallas_kernels.attention import schedule
from pallas_kernels.attention.configs import BackwardConfig, ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device

MIB = 2**20


def forward(problem: Attention, device: Device) -> tuple[ForwardConfig, ...]:
    """The widest tiles of keys of which two stages fit in shared memory."""
    widest = max(problem.head_dim, problem.value_dim)
    if widest <= 64:
        return (ForwardConfig(block_kv=128, warpgroups=3, stages=2),)
    if problem.head_dim + problem.value_dim <= 320:
        return (ForwardConfig(block_kv=128, warpgroups=2, stages=2),)
    return (ForwardConfig(block_kv=64, warpgroups=2, stages=2),)


def backward(problem: Attention, device: Device) -> tuple[BackwardConfig, ...]:
    """As many queries at a time as the registers hold; the order of the tiles by what makes them wait."""
    block_q = 128 if max(problem.head_dim, problem.value_dim) <= 64 else 64
    config = BackwardConfig(block_q, warpgroups=2, stages=2)
    if schedule.bounds(problem) != (None, None) or problem.key_lengths or problem.query_lengths:
        # The longest tiles of as many heads as the cache holds come first: causal, D = 128, S = 2048, bf16,
        # 532 TFLOP/s, and 512 head by head, H200.
        rows = problem.query_length * problem.query_heads // problem.key_heads
        head_bytes = rows * ((problem.head_dim + problem.value_dim) * problem.dtype.itemsize + problem.head_dim * 4)
        return (dataclasses.replace(config, together=min(max(32 * MIB // max(head_bytes, 1), 1), 16)),)
    # Tiles that take equally long: D = 128, S = 2048, bf16, 601 TFLOP/s, and 591 with a block to each, H200.
    config = dataclasses.replace(config, persistent=True)
    if problem.deterministic:
        # A head's tiles wait for each other, a step each, unless they start a step apart: D = 128, S = 2048, bf16,
        # 474 TFLOP/s with 4 heads in turns, 408 head by head, H200.
        steps = -(-problem.query_length // block_q)
        config = dataclasses.replace(config, together=-(-5 * device.sm_count // (4 * steps)))
    return (config,)
