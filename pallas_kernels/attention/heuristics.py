"""Which config suits a problem, from its sizes alone; each threshold with the measurement behind it."""

import dataclasses

from pallas_kernels.attention import schedule
from pallas_kernels.attention.backward_operands import capped_bias, padded_dims
from pallas_kernels.attention.configs import BackwardConfig, ByGradientConfig, ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device

MIB = 2**20


def forward(problem: Attention, device: Device) -> tuple[ForwardConfig, ...]:
    """The widest tiles of keys of which two stages fit in shared memory, in blocks of threads that stay."""
    config = _widest(problem)
    if problem.hidden_by_data:
        # How many tiles of keys are skipped is known on the device alone. Dealt by their causal lengths, 8 documents of
        # 2048 tokens would take 1.2 to 1.7 times what tiles taken by whoever is free do (simulated, not measured).
        config = dataclasses.replace(config, persistent=False)
    return (config,)


def _widest(problem: Attention) -> ForwardConfig:
    if problem.bias is not None:
        # A float32 bias takes as many registers as the scores: with tiles of 128 keys, heads of 128 spill 24 bytes.
        return ForwardConfig(block_kv=64, warpgroups=2, stages=2, slack=8)
    # bf16, 16384 keys, H200. Slack 8 against 0: heads of 64, 532 and 514 TFLOP/s; of 128, 689 and 693; of 256 (causal),
    # 763 and 723.
    if max(problem.head_dim, problem.value_dim) <= 64:
        # Two warpgroups: 414.
        return ForwardConfig(block_kv=128, warpgroups=3, stages=2, slack=8)
    if problem.head_dim + problem.value_dim <= 320:
        # Tiles of 64 keys: 572, and 652 against 713 for heads of 192 and 128.
        return ForwardConfig(block_kv=128, warpgroups=2, stages=2)
    return ForwardConfig(block_kv=64, warpgroups=2, stages=2, slack=8)


def backward(problem: Attention, device: Device) -> tuple[BackwardConfig, ...]:
    """As many queries at a time as the registers hold."""
    block_q = 128 if max(problem.head_dim, problem.value_dim) <= 64 else 64
    return (_in_order(problem, device, BackwardConfig(block_q, warpgroups=2, stages=2)),)


def backward_by_gradient(problem: Attention, device: Device) -> tuple[ByGradientConfig, ...]:
    """As many slots as fit in shared memory."""
    config = ByGradientConfig()
    if sum(padded_dims(problem)) <= 384:
        config = ByGradientConfig(d_out_stages=2, dq_slots=3)
    if capped_bias(problem):
        config = dataclasses.replace(config, dq_slots=config.dq_slots - 1)
    return (_in_order(problem, device, config),)


def _in_order[Config: (BackwardConfig, ByGradientConfig)](problem: Attention, device: Device, config: Config) -> Config:
    """`config` with the order of the tiles, by what makes them wait."""
    uneven = problem.key_lengths or problem.query_lengths or problem.hidden_by_data
    if schedule.bounds(problem) != (None, None) or uneven:
        # The longest tiles of as many heads as the cache holds come first: causal, D = 128, S = 2048, bf16,
        # 532 TFLOP/s, and 512 head by head, H200.
        rows = problem.query_length * problem.query_heads // problem.key_heads
        head_bytes = rows * ((problem.head_dim + problem.value_dim) * problem.dtype.itemsize + problem.head_dim * 4)
        return dataclasses.replace(config, together=min(max(32 * MIB // max(head_bytes, 1), 1), 16))
    if not problem.deterministic:
        # Tiles that take equally long: D = 128, S = 2048, bf16, 601 TFLOP/s, and 591 with a block to each, H200.
        return dataclasses.replace(config, persistent=True)
    # A head's tiles wait for each other, a step each, unless they start a step apart. Persistent blocks would need the
    # whole device to themselves, lest a tile wait for one whose block cannot start, and are slower: D = 128, S = 2048,
    # bf16, 558 TFLOP/s with a block to each, 542 persistent, H200.
    steps = -(-problem.query_length // config.block_q)
    return dataclasses.replace(config, together=-(-5 * device.sm_count // (4 * steps)))
