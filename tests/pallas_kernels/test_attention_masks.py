"""What a mask lets the attention kernels pass over, and how its bits are packed, against the mask itself."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import attention_cases
import jax.numpy as jnp
import mask_patterns
import numpy as np
import pytest
import test_attention_backward
import test_attention_forward
from attention_cases import counts_of, operands_of, seen_of
from test_attention_segments import in_blocks, spread

from pallas_kernels import hardware
from pallas_kernels.attention import backward_common, backward_operands, bits, forward, schedule
from pallas_kernels.attention.configs import BackwardConfig, ForwardConfig
from pallas_kernels.attention.problem import Attention, Op

BROADCASTS = ["".join(x) for x in itertools.product("B1", "N1", "T1", "S1")]
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal_offset": 0},
    "window": {"window": (100, 37), "window_offset": 20},
    "segments-causal": {"segments": True, "causal_offset": 0},
    "lengths": {"key_lengths": True, "query_lengths": True, "segments": True},
    "ends": {"key_lengths": True, "query_lengths": True, "causal_offset": 0, "align_ends": True},
}


# The rules take turns.
VISITED = [
    (*x, rules) for x, rules in zip(itertools.product(BROADCASTS, mask_patterns.PATTERNS), itertools.cycle(RULES))
]


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize(
    "shape", [(2, 3, 130, 257), (1, 1, 1, 300), (2, 1, 300, 1), (1, 1, 1, 1), (1, 2, 5, 128), (1, 1, 3, 65)]
)
def test_every_bit_is_where_its_thread_wants_it(shape, axis):
    mask = np.random.default_rng(0).random(shape) < 0.5
    words = np.asarray(bits.pack(jnp.asarray(mask, jnp.int8), axis))
    by_row = np.swapaxes(mask, 2, 3) if axis == 2 else mask
    words = np.moveaxis(words, bits.AXES[axis], (3, 4))
    columns = by_row.shape[3]
    assert words.shape == (*shape[:2], -(-columns // 128), by_row.shape[2], 4)
    found = np.zeros((*by_row.shape[:3], words.shape[2] * 128), bool)
    for column in range(found.shape[3]):
        block, j, q, e = column // 128, column % 128 // 8, column % 8 // 2, column % 2
        found[..., column] = words[:, :, block, :, q] >> (2 * j + e) & 1
    np.testing.assert_array_equal(found[..., :columns], by_row)
    assert (found[..., columns:] == (by_row if columns == 1 else False)).all()


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("blocks", [(128, 64), (192, 128), (128, 128), (64, 64)])
@pytest.mark.parametrize("pattern", mask_patterns.PATTERNS)
def test_blocks_that_hold_something_and_everything(pattern, blocks, axis):
    mask = mask_patterns.PATTERNS[pattern](np.random.default_rng(1), (2, 3, 513, 700))
    by_row = np.swapaxes(mask, 2, 3) if axis == 2 else mask
    pairs = bits.pairs(bits.pack(jnp.asarray(mask), axis), axis, by_row.shape[3], *blocks)
    for found, whole in zip(pairs, (False, True), strict=True):
        of_heads = in_blocks(by_row.reshape(-1, *by_row.shape[2:]), *blocks, whole=whole)
        np.testing.assert_array_equal(found, of_heads.reshape(2, 3, *of_heads.shape[1:]))


def problem_of(op: Op, mask: str, rules: str, lengths: tuple[int, int], **more: Any) -> Attention:
    return attention_cases.problem_of(op, {"mask": mask, **RULES[rules], **more}, lengths, (8, 8), "bfloat16", (4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mask, pattern, rules", VISITED)
def test_forward_visits_what_is_seen(mask, rules, pattern):
    p, config = problem_of(Op.FORWARD, mask, rules, (513, 700)), ForwardConfig(128, warpgroups=2)
    arrays, rows, columns = operands_of(p, mask=pattern), config.block_q, config.block_kv
    seen = seen_of(p, arrays)
    table = np.asarray(forward.addressable(config, {name: jnp.asarray(x) for name, x in arrays.items()})["spans"])
    table = np.broadcast_to(table, (p.batch, p.query_heads, -(-p.query_length // rows), 4))
    for b, n, i in np.ndindex(table.shape[:3]):
        counts = counts_of(p, arrays)[b].tolist()
        span = schedule.span(p, columns, i * rows, rows, *counts)
        first, inner_first, inner_end, end = map(int, schedule.narrowed(span, schedule.Span(*table[b, n, i])))
        mine = seen[b, n, i * rows : min((i + 1) * rows, counts[0])]
        assert 0 <= first < end
        assert not mine[:, : first * columns].any()
        assert not mine[:, end * columns :].any()
        # The last tile is always compared.
        assert mine[:, max(first, inner_first) * columns : min(end - 1, inner_end) * columns].all()
        if rules == "full" and mine.any():
            tiles = np.flatnonzero(mine.any(0)) // columns
            assert (first, end) == (tiles[0], tiles[-1] + 1)


@pytest.mark.slow
@pytest.mark.parametrize("mask, pattern, rules", VISITED)
def test_backward_visits_what_is_seen_in_turns(mask, rules, pattern):
    config = BackwardConfig(block_q=64, warpgroups=2, stages=2, turns=True)
    p = problem_of(Op.BACKWARD, mask, rules, (513, 700), deterministic=True)
    arrays = operands_of(p, mask=pattern)
    found = backward_operands.what_is_seen(
        p, config, SimpleNamespace(**{name: jnp.asarray(x) for name, x in arrays.items()})
    )
    blocks, (keys, queries) = -(-p.query_length // config.block_q), (config.block_kv, config.block_q)
    shape = p.batch, p.key_heads, -(-p.key_length // keys)
    table = np.broadcast_to(found["spans"], (*shape, 4)).reshape(-1, shape[2], 4)
    by_group = seen_of(p, arrays).reshape(p.batch, p.key_heads, 2, p.query_length, p.key_length).swapaxes(3, 4)
    some, every = (x.reshape(-1, p.key_length, p.query_length) for x in (by_group.any(2), by_group.all(2)))
    visited, inner = spread(table, blocks), spread(table, blocks, 1, 2)
    assert not (in_blocks(some, keys, queries) & ~visited).any()
    if not p.query_lengths:  # of queries past their length the weights are 0
        assert not (inner & ~in_blocks(every, keys, queries, whole=True)).any()
    if rules == "full":
        held = in_blocks(some, keys, queries)
        assert (visited.sum(2) <= np.where(held.any(2), blocks - held.argmax(2) - held[..., ::-1].argmax(2), 0)).all()
    before = np.cumsum(visited, axis=1) - visited
    if schedule.bounds(p)[1] is not None:
        before = np.cumsum(visited[:, ::-1], axis=1)[:, ::-1] - visited
    turns = np.broadcast_to(found["turns_before"], (*shape, blocks)).reshape(before.shape)
    np.testing.assert_array_equal(turns, before)
    assert backward_common.turn_counts(p, config) is None


def test_later_queries_start_first():
    p = dataclasses.replace(problem_of(Op.FORWARD, "B1TS", "full", (512, 512)), head_dim=128, value_dim=128)
    config = test_attention_forward.whole(p)
    order, _ = schedule.order(p, config)
    per_head = -(-512 // config.block_q)
    assert config.scheduler == "dynamic"
    np.testing.assert_array_equal(
        order[: 2 * per_head] % per_head, np.repeat(np.arange(per_head)[::-1], 8)[: 2 * per_head]
    )


FORWARD = {
    "causal": ("B1TS", "causal", {}, 128),
    "causal-of-heads": ("1NTS", "causal", {"causal_offset": 130}, 64),
    "documents": ("BNTS", "documents", {"sinks": True}, 128),
    "padding": ("B11S", "padding", {"window": (150, 60)}, 64),
    "rows": ("1NT1", "scattered", {"soft_cap": 3.0}, 64),
    "everything": ("11TS", "everything", {"bias": "1N11"}, 64),
    "nothing": ("B111", "nothing", {}, 64),
    "documents-with-all": ("BNTS", "documents", {**RULES["lengths"], "causal_offset": 100, "bias": "1NTS"}, 64),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORWARD)
def test_forward_in_the_interpreter(name, interpreted, monkeypatch):
    monkeypatch.setattr(hardware, "current", lambda: dataclasses.replace(hardware.H200, sm_count=3))
    mask, pattern, facts, block_kv = FORWARD[name]
    p = attention_cases.problem_of(Op.FORWARD, {"mask": mask, **facts}, (200, 330), (32, 16), "bfloat16", (2, 1))
    scheduler = "static" if name == "padding" or "bias" in facts else "dynamic"
    config = ForwardConfig(block_kv, warpgroups=2, slack=8, scheduler=scheduler)
    test_attention_forward.check(p, config, interpreted, mask=pattern)


BACKWARD = {
    "causal": ("B1TS", "causal", (64, 64), {}),
    "causal-turns": ("1NTS", "causal", (128, 64), {"deterministic": True}),
    "documents-turns": ("BNTS", "documents", (64, 64), {"deterministic": True, "sinks": True}),
    "padding-turns": ("B11S", "padding", (128, 64), {"deterministic": True, "window": (150, 60)}),
    "rows": ("1NT1", "scattered", (64, 64), {"soft_cap": 3.0}),
    "everything-wide": ("11TS", "everything", (136, 64), {"causal_offset": 0}),
    "documents-wide": ("BNTS", "documents", (136, 64), {"deterministic": True}),
    "documents": ("B1TS", "documents", (128, 64), {}),
    "nothing": ("B111", "nothing", (64, 64), {"deterministic": True}),
    "nothing-drawn": ("B111", "nothing", (64, 64), {}),
    "documents-with-all": (
        "BNTS", "documents", (64, 64), {**RULES["lengths"], "causal_offset": 100, "bias": "1NTS", "deterministic": True}
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_in_the_interpreter(name, interpreted, monkeypatch):
    monkeypatch.setattr(hardware, "current", lambda: dataclasses.replace(hardware.H200, sm_count=3))
    mask, pattern, dims, facts = BACKWARD[name]
    facts = {"mask": mask, "bias_gradient": "bias" in facts, **facts}
    p = attention_cases.problem_of(Op.BACKWARD, facts, (200, 150), dims, "bfloat16", (2, 1))
    test_attention_backward.check(p, test_attention_backward.decided(p).run, interpreted, mask=pattern)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.together("mask", "head_dim")
@pytest.mark.parametrize("pattern", mask_patterns.PATTERNS)
@pytest.mark.parametrize("mask", ["BNTS", "B11S"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward_on_a_gpu(head_dim, mask, pattern):
    p = test_attention_forward.problem_of("full", (1500, 1501), (head_dim, head_dim), "bfloat16", heads=(3, 1))
    p = dataclasses.replace(p, mask=tuple({"B": 2, "N": 3, "T": 1500, "S": 1501, "1": 1}[x] for x in mask))
    test_attention_forward.check(p, test_attention_forward.whole(p), mask=pattern)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.together("mask", "head_dim", "deterministic")
@pytest.mark.parametrize("pattern", mask_patterns.PATTERNS)
@pytest.mark.parametrize("mask", ["BNTS", "1NT1"])
@pytest.mark.parametrize("head_dim, deterministic", [(64, False), (128, True), (128, False), (256, True)])
def test_backward_on_a_gpu(head_dim, deterministic, mask, pattern):
    dims, lengths = (head_dim, head_dim), (1500, 1501)
    p = test_attention_backward.problem_of("full", lengths, dims, "bfloat16", (3, 1), deterministic=deterministic)
    p = dataclasses.replace(p, mask=tuple({"B": 2, "N": 3, "T": 1500, "S": 1501, "1": 1}[x] for x in mask))
    test_attention_backward.check(p, test_attention_backward.compiled(p), mask=pattern)
