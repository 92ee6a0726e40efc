"""What attention's kernels decide from sizes alone, at the sizes of models: who works on what, and in how much memory.

Nothing is run or compiled, so that sizes cost nothing.
"""

import dataclasses
import itertools
import math
import types

import aot
import attention_cases
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import dispatch, forward_tiles, memory
from pallas_kernels.attention.backward_common import Tile
from pallas_kernels.attention.problem import Attention, Op
from pallas_kernels.hardware import H200, Device

H100 = dataclasses.replace(H200, name="NVIDIA H100 PCIe", sm_count=114)
KINDS = {
    "full": {},
    "causal": {"causal_offset": 0},
    "window": {"causal_offset": 0, "window": (1024, None)},
    "bias": {"bias": "1NTS"},
    "segments": {"segments": True, "causal_offset": 0},
    "mask": {"mask": "B1TS"},
}
# Batch, heads of queries and of keys, queries, keys, size of heads: 16384 tokens of 2048 features and more, and decode.
SHAPES = [
    (1, 32, 32, 16384, 16384, 64), (1, 32, 8, 16384, 16384, 128), (2, 20, 4, 8192, 8192, 128),
    (3, 7, 7, 4096, 4100, 64), (8, 16, 16, 2048, 2048, 128), (5, 8, 1, 1000, 3000, 256),
    (32, 32, 8, 1, 8192, 128), (1, 1, 1, 131072, 131072, 128),
]  # fmt: skip


def problem_of(op: Op, kind: dict, shape: tuple[int, ...], dtype: str = "bfloat16", **facts) -> Attention:
    batch, heads, key_heads, queries, keys, head_dim = shape
    lengths, dims = (queries, keys), (head_dim, facts.pop("value_dim", head_dim))
    return attention_cases.problem_of(op, {**kind, **facts}, lengths, dims, dtype, (heads, key_heads), batch)


def decided(p: Attention, device: Device = H200) -> dispatch.Decision:
    decision = dispatch.decide(p, device)
    assert decision.config is not None, decision.declined
    return decision


def check_tiles(p: Attention) -> None:
    """Every tile of queries, or block of keys, of every head is taken once."""
    config = decided(p).config
    if p.op is Op.FORWARD:
        launched, taken = forward_tiles.launched(p, config)
        if config.tiles == "dealt":
            taken = np.concatenate([row[1 : 1 + row[0]] for row in taken])
        elif config.tiles == "drawn":
            taken, none = taken[:-launched], taken[-launched:]
            assert (none == -1).all()
        sizes = p.batch, p.query_heads, -(-p.query_length // config.block_q)
        block = types.SimpleNamespace(problem=p, config=config)
        place = lambda tile: forward_tiles._place(block, tile)[:3]
    else:
        sizes = p.batch, p.key_heads, -(-p.key_length // config.block_kv)
        taken = np.arange(math.prod(sizes), dtype=np.int32)
        refs = types.SimpleNamespace(spans=jnp.zeros((1, 1, sizes[2], 4), jnp.int32))

        def place(tile: jax.Array) -> tuple[jax.Array, ...]:
            block = Tile.of(p, config, refs, tile, jnp.int32(0))
            return block.batch, block.key_head, block.index

    batch, head, last = (np.asarray(x) for x in jax.vmap(place)(taken))
    last = last // config.block_q if p.op is Op.FORWARD else last
    assert all(((x >= 0) & (x < size)).all() for x, size in zip((batch, head, last), sizes, strict=True))
    found = np.ravel_multi_index((batch, head, last), sizes)
    np.testing.assert_array_equal(np.sort(found), np.arange(math.prod(sizes)))


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_is_taken_once(op, kind, shape):
    deterministic = (SHAPES.index(shape) + list(KINDS).index(kind)) % 2 > 0
    check_tiles(problem_of(op, KINDS[kind], shape, deterministic=deterministic))


def forward_bytes(p: Attention, config) -> int:
    """What Mosaic allocates for a block of the forward kernel: arrays, of whole KiB each, and barriers."""
    dims = (-(-size // 16) * 16 for size in (p.head_dim, p.value_dim))  # as `memory.addressable` pads them
    scratch = memory.scratch(p, config, *dims) | forward_tiles.scratch(config)
    barriers = [int(np.prod(x.num_barriers)) for x in scratch.values() if isinstance(x, plgpu.Barrier)]
    arrays = [math.prod(x.shape) * x.dtype.itemsize for x in scratch.values() if not isinstance(x, plgpu.Barrier)]
    return sum(-(-size // 1024) * 1024 for size in arrays) + 8 * sum(barriers)


DIMS = [(n, n) for n in (8, 64, 72, 96, 128, 136, 192, 256)] + [(192, 128), (64, 256), (256, 8), (32, 200), (128, 40)]
TOKENS = (120, 512, 1024, 4096, 16384)
MEMORY_KINDS = KINDS | {
    "lengths": {"key_lengths": True, "query_lengths": True, "align_ends": True, "causal_offset": 0},
    "bias-of-keys": {"bias": "B11S"},
    "masked-bias": {"bias": "BNTS", "mask": "B1TS"},
    "capped": {"soft_cap": 30.0, "sinks": True},
    "capped-bias": {"bias": "1NTS", "soft_cap": 30.0},
    "everything": {"bias": "1NTS", "segments": True, "mask": "11TS", "key_lengths": True, "sinks": True},
}


def check_memory(op: Op, kind: dict) -> None:
    """What is chosen for heads of any size, few keys and many, and each type of the bias, on both Hopper devices."""
    turns = (False, True) if op is Op.BACKWARD else (False,)
    dtypes = [{"bias_dtype": jnp.dtype(name)} for name in ("bfloat16", "float32")] if "bias" in kind else [{}]
    for dims, length, bias, deterministic, device in itertools.product(DIMS, TOKENS, dtypes, turns, (H100, H200)):
        facts = {"value_dim": dims[1], "deterministic": deterministic, "bias_gradient": "bias" in kind} | bias
        p = problem_of(op, kind, (2, 8, 4, length, length, dims[0]), **facts)
        config = decided(p, device).config
        if op is Op.FORWARD:
            assert memory.shared_bytes(p, config) <= device.smem_per_cta, (p, config)
        # A byte is taken: Mosaic's kernels declare one beside what they are given at the launch.
        needed = forward_bytes(p, config) if op is Op.FORWARD else attention_cases.backward_bytes(p, config)
        assert needed < device.smem_per_cta, (p, config)


@pytest.mark.parametrize("kind", MEMORY_KINDS)
@pytest.mark.parametrize("op", Op)
def test_every_config_fits_in_shared_memory(op, kind):
    check_memory(op, MEMORY_KINDS[kind])


@pytest.mark.parametrize(
    "op, kind, dims",
    [
        (Op.FORWARD, "mask", (128, 128)), (Op.FORWARD, "bias", (72, 40)), (Op.FORWARD, "lengths", (192, 128)),
        (Op.BACKWARD, "bias", (64, 64)), (Op.BACKWARD, "lengths", (192, 128)),
    ],
)  # fmt: skip
def test_shared_memory_is_what_the_launch_asks_for(op, kind, dims):
    p = problem_of(op, MEMORY_KINDS[kind], (2, 4, 2, 256, 320, dims[0]), value_dim=dims[1])
    config, operands = decided(p).config, attention_cases.operands_of(p)
    needed = forward_bytes(p, config) if op is Op.FORWARD else attention_cases.backward_bytes(p, config)
    if op is Op.BACKWARD:
        out = np.zeros((p.batch, p.query_length, p.query_heads, p.value_dim), p.dtype)
        lse = np.zeros((p.batch, p.query_heads, p.query_length), np.float32)
        operands |= {"out": out, "lse": lse, "d_out": out, "d_lse": lse}
    lowered = jax.jit(decided(p).run).trace(*operands.values()).lower(lowering_platforms=("cuda",))
    assert list(aot.shared_memory(lowered.compiler_ir()).values()) == [needed]
