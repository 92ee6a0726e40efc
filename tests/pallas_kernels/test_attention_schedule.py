"""What attention's kernels decide from sizes alone, at the sizes of models: the tiles of each CTA, and its memory.

Nothing is run or compiled, so that sizes cost nothing.
"""

import dataclasses
import itertools
import math
import types

import attention_cases
import jax
import jax.numpy as jnp
import numpy as np
import numpy_eval
import pytest

from pallas_kernels.attention import dispatch, forward, mask, tile_scheduler
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
    "key-lengths": {"key_lengths": True},
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
        ctas, taken = forward.tile_table(p, config)
        taken = np.asarray(taken)
        if config.scheduler == "static":
            taken = np.concatenate([row[1 : 1 + row[0]] for row in taken])
        else:
            # A CTA that has no tile left finds one that says so, whatever its number.
            taken, beyond = np.split(taken, [-tile_scheduler.LOOKAHEAD * ctas])
            assert (beyond == tile_scheduler.NO_TILE).all()
        assert ctas == H200.sm_count * config.ctas_per_sm
        packs = p.batch * p.query_heads // config.packed_heads
        tiles = packs * -(-p.query_length // config.queries) * config.splits
        np.testing.assert_array_equal(np.sort(taken), np.arange(tiles))
        return
    sizes = p.batch, p.key_heads, -(-p.key_length // config.block_kv)
    taken = np.arange(math.prod(sizes), dtype=np.int32)
    refs = types.SimpleNamespace(
        spans=jnp.zeros((1, 1, sizes[2], 4), jnp.int32), key_lengths=jnp.full(p.batch, p.key_length)
    )

    def place(tile: jax.Array) -> tuple[jax.Array, ...]:
        block = Tile.of(p, config, refs, tile, jnp.int32(0))
        return block.batch, block.key_head, block.index

    batch, head, last = numpy_eval.results(jax.vmap(place), taken)
    assert all(((x >= 0) & (x < size)).all() for x, size in zip((batch, head, last), sizes, strict=True))
    found = np.ravel_multi_index((batch, head, last), sizes)
    np.testing.assert_array_equal(np.sort(found), np.arange(math.prod(sizes)))


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_is_taken_once(op, kind, shape):
    deterministic = (SHAPES.index(shape) + list(KINDS).index(kind)) % 2 > 0
    check_tiles(problem_of(op, KINDS[kind], shape, deterministic=deterministic))


def in_order(p: Attention, config, kind: dict) -> np.ndarray:
    """The order of `tile_scheduler.order`, by loops over sections of heads and their longest tiles."""
    per_head = -(-p.query_length // config.queries)
    spans = [mask.tile_kv_range(p, config, i, p.query_length, p.key_length)[0] for i in range(per_head)]
    turn = -1 if "mask" in kind or "positions" in kind else 1  # of equal tiles
    longest_first = sorted(range(per_head), key=lambda i: (spans[i].first - spans[i].end, turn * i))
    heads = list(itertools.product(range(p.batch), range(p.query_heads)))
    if kind.get("bias", "B").startswith("1"):  # all sequences' heads of one number read the same
        heads.sort(key=lambda head: head[::-1])
    of_keys = p.key_length * (p.head_dim + p.value_dim) * p.dtype.itemsize
    section = max(config.l2_budget_mib * 2**20 // of_keys, 1) * (p.query_heads // p.key_heads)
    found = [
        (batch * p.query_heads + head) * per_head + i
        for start in range(0, len(heads), section)
        for i in longest_first
        for batch, head in heads[start : start + section]
    ]
    return np.array(found)


ORDERED = KINDS | {
    "bias-of-all": {"bias": "11TS"},
    "bias-of-sequences": {"bias": "B1TS"},
    "positions": {"positions": True},
}
# Heads whose tiles are of one length or of several, in one section or in several, the last of which may be shorter.
ORDERS = [
    (kind, shape, scheduler, l2)
    for kind, shape, l2 in (
        ("full", (7, 6, 3, 16, 16, 64), 16), ("full", (5, 3, 3, 300, 300, 64), 0),
        ("bias", (6, 4, 2, 600, 600, 64), 1), ("causal", (3, 7, 7, 1000, 1000, 128), 1),
        ("bias-of-all", (3, 4, 2, 300, 300, 64), 0), ("bias-of-sequences", (3, 4, 2, 300, 300, 64), 0),
        ("positions", (2, 3, 3, 700, 900, 64), 0), ("full", (3, 4, 2, 300, 1024, 64), 1),
        ("mask", (4, 5, 5, 700, 900, 64), 0), ("full", (2**14, 1, 1, 16, 16, 64), 16),
        ("full", (2**14 + 1, 1, 1, 16, 16, 64), 16), ("causal", (2731, 3, 1, 256, 256, 64), 1),
    )
    for scheduler in ("static", "dynamic")
]  # fmt: skip


@pytest.mark.parametrize("kind, shape, scheduler, l2", ORDERS, ids=str)
def test_tables_of_the_device_are_those_of_numpy(kind, shape, scheduler, l2, monkeypatch):
    p = problem_of(Op.FORWARD, ORDERED[kind], shape)
    config = forward.ForwardConfig(128, warpgroups=2, scheduler=scheduler, l2_budget_mib=l2)
    order, length = tile_scheduler.order(p, config)
    np.testing.assert_array_equal(order, in_order(p, config, ORDERED[kind]))
    found = tile_scheduler.table(p, config, 132)
    tables = [found]
    for most in (len(order) - 1, len(order)):
        monkeypatch.setattr(tile_scheduler, "MOST_CONSTANT", most)
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
            tables.append(tile_scheduler.table(p, config, 132))
    by_device = scheduler == "dynamic" or length.min() == length.max()
    assert [isinstance(x, jax.Array) for x in tables] == [by_device and len(order) > 2**14, by_device, False]
    for table in tables:
        assert table.dtype == np.int32
        np.testing.assert_array_equal(table, tables[-1])


@pytest.mark.parametrize("kind", ["causal", "window", "full"])
@pytest.mark.parametrize("ctas", [1, 7, 132])
def test_a_tile_goes_to_the_cta_that_is_free_first(kind, ctas):
    """A tile takes a CTA as long as its tiles of keys and 0.7 of another."""
    p = problem_of(Op.FORWARD, KINDS[kind], (3, 6, 3, 1500, 1500, 128))
    config = forward.ForwardConfig(128, warpgroups=2)
    free, taken = [0.0] * ctas, [[] for _ in range(ctas)]
    for tile, length in zip(*tile_scheduler.order(p, config), strict=True):
        first = free.index(min(free))
        taken[first].append(tile)
        free[first] = free[first] + length + 0.7
    assert [row[1 : 1 + row[0]].tolist() for row in tile_scheduler.assign(p, config, ctas)] == taken


DIMS = [(n, n) for n in (8, 64, 72, 96, 128, 136, 192, 256)] + [(192, 128), (64, 256), (256, 64), (32, 200), (128, 40)]
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
    ordered = (False, True) if op is Op.BACKWARD else (False,)
    dtypes = [{"bias_dtype": jnp.dtype(name)} for name in ("bfloat16", "float32")] if "bias" in kind else [{}]
    for dims, length, bias, deterministic, device in itertools.product(DIMS, TOKENS, dtypes, ordered, (H100, H200)):
        facts = {"value_dim": dims[1], "deterministic": deterministic, "bias_gradient": "bias" in kind} | bias
        p = problem_of(op, kind, (2, 8, 4, length, length, dims[0]), **facts)
        config = decided(p, device).config
        # A byte is taken: Mosaic's kernels declare one beside what they are given at the launch.
        assert attention_cases.shared_bytes(p, config) < device.smem_per_cta, (p, config)


@pytest.mark.parametrize("kind", MEMORY_KINDS)
@pytest.mark.parametrize("op", Op)
def test_every_config_fits_in_shared_memory(op, kind):
    check_memory(op, MEMORY_KINDS[kind])


_TOKENS, _DQ = (2, 4, 2, 4096, 4096), (2, 4, 2, 512)
_BIAS, _WIDE_BIAS = ({"bias": "1NTS", "bias_dtype": jnp.dtype(name)} for name in ("bfloat16", "float32"))
# By fields of the config: calls, and what these fields are. Few queries have narrow tiles; ragged sequences have
# several tiles for each CTA; few tiles of keys split a group's heads; masks take registers from three warpgroups.
DECISIONS: dict[tuple[str, ...], list[tuple]] = {
    ("warpgroups", "ctas_per_sm", "packed_heads", "splits"): [
        (Op.FORWARD, {}, (256, 12, 12, 50, 50, 64), 1, 4, 1, 1),
        (Op.FORWARD, {}, (32, 4, 4, 38, 2021, 64), 3, 1, 1, 1),
        (Op.FORWARD, {}, (12, 32, 8, 22, 22, 128), 1, 2, 4, 1),
        (Op.FORWARD, {}, (1, 32, 8, 1, 8192, 128), 1, 1, 4, 16),
        (Op.FORWARD, {}, (1, 8, 1, 16, 131072, 128), 2, 1, 8, 128),
        (Op.FORWARD, {}, (1, 16, 2, 512, 65536, 128), 2, 1, 1, 2),
        (Op.FORWARD, {}, (5, 8, 8, 49, 49, 256), 1, 1, 1, 1),
        (Op.FORWARD, {}, (1, 1, 1, 15924, 15924, 88), 2, 1, 1, 1),
        (Op.FORWARD, {}, (1, 4, 4, 16384, 16384, 88), 3, 1, 1, 1),
    ],
    ("scheduler", "splits"): [
        (Op.FORWARD, {"key_lengths": True}, (64, 32, 8, 1, 8192, 128), "dynamic", 4),
        (Op.FORWARD, {"key_lengths": True}, (8, 32, 8, 1, 8192, 128), "dynamic", 16),
        (Op.FORWARD, {"key_lengths": True}, (64, 32, 8, 1, 256, 128), "dynamic", 1),
        (Op.FORWARD, {"key_lengths": True}, (4, 32, 8, 1, 256, 128), "static", 1),
        (Op.FORWARD, {"key_lengths": True}, (1, 32, 8, 1, 8192, 128), "static", 16),
    ],
    ("warpgroups",): [
        (Op.FORWARD, {"segments": True}, (8, 16, 16, 2048, 2048, 64), 3),
        (Op.FORWARD, {"segments": True, "soft_cap": 2.0}, (8, 16, 16, 2048, 2048, 64), 2),
        (Op.FORWARD, {"segments": True, "batch_invariant": True}, (8, 16, 16, 2048, 2048, 64), 2),
        (Op.FORWARD, {"segments": True, "mask": "B1TS"}, (8, 16, 16, 2048, 2048, 64), 2),
        (Op.FORWARD, {"soft_cap": 2.0}, (8, 16, 16, 2048, 2048, 64), 3),
    ],
    ("head_splits",): [
        (Op.BACKWARD, {"causal_offset": 0}, (1, 16, 2, 1020, 1020, 208), 8),
        (Op.BACKWARD, {"causal_offset": 0}, (8, 16, 16, 2048, 2048, 128), 1),
    ],
    ("bias_stages",): [
        (Op.BACKWARD, _BIAS, (2, 4, 2, 2048, 2048, 64), 1),
        (Op.BACKWARD, _WIDE_BIAS, (2, 4, 2, 2048, 2048, 64), 0),  # no room
        (Op.BACKWARD, _BIAS, (2, 4, 2, 2048, 2048, 128), 2),
        (Op.BACKWARD, _BIAS | {"deterministic": True}, (2, 4, 2, 2048, 2048, 128), 1),
        (Op.BACKWARD, _BIAS | {"soft_cap": 2.0}, (2, 4, 2, 2048, 2048, 128), 2),
        (Op.BACKWARD, _WIDE_BIAS, (2, 4, 2, 2048, 2048, 128), 1),
        (Op.BACKWARD, _BIAS, (2, 4, 2, 2048, 2048, 256), 2),
        (Op.BACKWARD, _BIAS | {"soft_cap": 2.0}, (2, 4, 2, 2048, 2048, 256), 2),
        (Op.BACKWARD, _BIAS | {"bias": "BN1S"}, (2, 4, 2, 2048, 2048, 128), 0),
        (Op.BACKWARD, _BIAS | {"bias": "1NT1"}, (2, 4, 2, 2048, 2048, 128), 0),
        (Op.BACKWARD, _BIAS, (2, 4, 2, 2044, 2048, 128), 0),
        (Op.BACKWARD, _BIAS, (2, 4, 2, 2048, 2080, 128), 0),
        (Op.BACKWARD, _WIDE_BIAS, (2, 4, 2, 2048, 2080, 128), 1),
    ],
    ("scheduler",): [
        (Op.FORWARD, {"mask": "B1TS", "batch_invariant": True}, (2, 4, 2, 512, 512, 128), "dynamic"),
        (Op.BACKWARD, {"mask": "B1TS"}, (*_TOKENS, 64), "dynamic"),
        (Op.BACKWARD, {"mask": "B1TS", "segments": True}, (*_TOKENS, 128), "dynamic"),
        (Op.BACKWARD, {"segments": True, "causal_offset": 0}, (*_TOKENS, 128), "dynamic"),
        (Op.BACKWARD, {"mask": "B1TS", "deterministic": True}, (*_TOKENS, 128), "single"),
        (Op.BACKWARD, {"mask": "B1TS"} | _BIAS | {"bias": "111S"}, (*_TOKENS, 64), "single"),
        (Op.BACKWARD, {"mask": "B1TS"}, (*_TOKENS, 256), "single"),
        (Op.BACKWARD, {"causal_offset": 0}, (*_TOKENS, 128), "dynamic"),
        (Op.BACKWARD, {"causal_offset": 0}, (2, 4, 2, 16384, 4096, 128), "single"),
        (Op.BACKWARD, {"causal_offset": 0}, (2, 32, 4, 4096, 4096, 128), "single"),
        (Op.BACKWARD, {"causal_offset": 0, "deterministic": True}, (*_TOKENS, 128), "single"),
        (Op.BACKWARD, {"deterministic": True}, (2, 4, 2, 4096, 512, 64), "dynamic"),
        (Op.BACKWARD, {}, (2, 4, 2, 4096, 128, 64), "static"),
        (Op.BACKWARD, {}, (*_TOKENS, 128), "static"),
    ],
    ("ordered_dq", "fused_dq_cast"): [
        (Op.BACKWARD, {}, (*_DQ, 512, 64), False, False),
        (Op.BACKWARD, {"deterministic": True}, (*_DQ, 512, 64), True, True),
        (Op.BACKWARD, {"causal_offset": 0, "deterministic": True}, (*_DQ, 512, 64), True, True),
        (Op.BACKWARD, {"deterministic": True}, (*_DQ, 8192, 64), True, True),
        (Op.BACKWARD, {}, (*_DQ, 8192, 64), False, False),
        (Op.BACKWARD, {}, (*_DQ, 128, 64), False, True),
        (Op.BACKWARD, {"deterministic": True}, (*_DQ, 128, 64), False, True),
        (Op.BACKWARD, {"window": (100, 37), "window_offset": 20}, (*_DQ, 512, 64), False, False),
        (Op.BACKWARD, {"window": (100, 37), "window_offset": 20, "deterministic": True}, (*_DQ, 512, 64), True, False),
        (Op.BACKWARD, {"key_lengths": True}, (*_DQ, 512, 64), False, False),
        (Op.BACKWARD, {"causal_offset": -70}, (*_DQ, 512, 128), False, False),  # nobody adds to the first queries
        (Op.BACKWARD, {"bias": "BNTS", "bias_gradient": True}, (*_DQ, 512, 64), False, False),
        (Op.BACKWARD, {"bias": "BNTS", "bias_gradient": True, "deterministic": True}, (*_DQ, 512, 128), True, True),
        (Op.BACKWARD, {"bias": "BNTS", "bias_gradient": True, "soft_cap": 2.0, "deterministic": True},
         (*_DQ, 512, 128), True, False),
    ],
}  # fmt: skip


@pytest.mark.parametrize("fields", DECISIONS, ids=",".join)
def test_what_is_decided(fields):
    for op, facts, shape, *expected in DECISIONS[fields]:
        config = dispatch.decide(problem_of(op, facts, shape), H200, named=True).config
        assert [getattr(config, name) for name in fields] == expected, (op, facts, shape)


SHORT = (26, 44, 11, 12, 12, 160)


@pytest.mark.parametrize(
    "op, facts, shape, by_xla",
    [
        (Op.BACKWARD, {"causal_offset": 0}, SHORT, True),
        (Op.BACKWARD, {}, (12, 44, 11, 13, 13, 160), False),
        (Op.BACKWARD, {}, (2, 44, 11, 12, 12, 160), False),
        (Op.BACKWARD, {}, (12, 44, 11, 12, 12, 128), False),
        (Op.BACKWARD, {}, (13, 44, 11, 20, 20, 128), True),
        (Op.BACKWARD, {}, (13, 44, 11, 21, 20, 128), False),
        (Op.BACKWARD, {"key_lengths": True}, (2, 4, 2, 12, 12, 64), True),
        (Op.BACKWARD, {"key_lengths": True}, (2, 4, 2, 12, 21, 64), False),
        (Op.BACKWARD, {"mask": "B1TS"}, (8, 1, 1, 64, 64, 248), True),
        (Op.BACKWARD, {"mask": "B1TS"}, (8, 1, 1, 64, 65, 248), False),
        (Op.BACKWARD, {"mask": "B1TS"}, (8, 2, 1, 32, 64, 248), False),
        (Op.FORWARD, {}, SHORT, False),
        (Op.FORWARD, {"mask": "B1TS"}, (2, 1, 1, 64, 64, 64), True),
        (Op.FORWARD, {"mask": "B1TS"}, (2, 1, 1, 64, 65, 64), False),
        (Op.FORWARD, {"mask": "B1TS"}, (2, 2, 1, 8, 8, 64), False),
        (Op.FORWARD, {"key_lengths": True}, (1, 1, 1, 16, 32, 64), True),
        (Op.FORWARD, {"key_lengths": True}, (1, 1, 1, 16, 33, 64), False),
        (Op.FORWARD, {"bias": "B1TS"}, (12, 88, 11, 16, 4, 64), True),
        (Op.FORWARD, {"bias": "B1TS"}, (12, 88, 11, 17, 4, 64), False),
        (Op.FORWARD, {"bias": "B1TS"}, (6, 88, 11, 16, 4, 64), False),
        (Op.FORWARD, {}, (2, 4, 4, 3, 1, 64), True),
        (Op.FORWARD, {"mask": "B1TS", "key_lengths": True}, (2, 4, 2, 3, 1, 64), True),
        (Op.FORWARD, {"sinks": True}, (2, 4, 4, 3, 1, 64), False),
        (Op.FORWARD, {"batch_invariant": True}, (2, 4, 4, 3, 1, 64), False),
    ],
    ids=str,
)
def test_calls_that_xla_computes_faster_have_a_kernel_only_by_name(op, facts, shape, by_xla):
    p = problem_of(op, facts, shape)
    assert (dispatch.decide(p, H200).kernel is None) == by_xla
    assert dispatch.decide(p, H200, named=True).kernel is not None
    # With dropout two of them run it, by name only where that holds for one of them.
    p = dataclasses.replace(p, keep=(1, 1, p.query_length, p.key_length))
    assert dispatch.decide(p, H200, named=True).kernel in dispatch.WITH_DROPOUT[op]


@pytest.mark.parametrize("head_dim, block_q", [(32, 128), (64, 128), (72, 64), (128, 64)])
def test_each_warpgroup_has_a_square_of_dq(head_dim, block_q):
    p = problem_of(Op.BACKWARD, {"soft_cap": 2.0, "segments": True}, (2, 4, 4, 512, 512, head_dim))
    decision = decided(p)
    assert decision.config.block_q == block_q
    other = dataclasses.replace(decision, config=dataclasses.replace(decision.config, block_q=192 - block_q))
    with pytest.raises(ValueError, match=f"block_q is {192 - block_q}, expected {block_q}"):
        other.run()
