"""What segment ids let the attention kernels pass over, against comparing every id with every other."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attention_cases
import jax.numpy as jnp
import numpy as np
import numpy_eval
import pytest
from attention_cases import counts_of, operands_of, seen_of
from documents import PATTERNS

from pallas_kernels import hardware
from pallas_kernels.attention import backward_common, backward_xla, forward, mask
from pallas_kernels.attention.mask import BlockMask, tile_ranges
from pallas_kernels.attention.problem import Attention, BackwardConfig, ForwardConfig, Op
from tests.pairwise import pairwise

LENGTHS = ((1, 1), (700, 700), (513, 1030), (1030, 513))
BLOCKS = ((128, 64), (192, 128))


def ids_of(pattern: str, lengths: tuple[int, int], batch: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return PATTERNS[pattern](np.random.default_rng(5), batch, *lengths)


def in_blocks(seen: np.ndarray, rows: int, columns: int, whole: bool = False) -> np.ndarray:
    """Whether a block of `seen [B, T, S]` has something, or is full of it, `[B, T blocks, S blocks]`."""
    pads = (0, 0), (0, -seen.shape[1] % rows), (0, -seen.shape[2] % columns)
    padded = np.pad(seen, pads, constant_values=whole)
    b, t, s = padded.shape
    blocks = padded.reshape(b, t // rows, rows, s // columns, columns)
    return blocks.all((2, 4)) if whole else blocks.any((2, 4))


def spread(spans: np.ndarray, count: int, start: int = 0, stop: int = 3) -> np.ndarray:
    """Which of `count` blocks are from a span's entry `start` on, but not from its entry `stop` on."""
    column = np.arange(count)
    return (spans[..., start, None] <= column) & (column < spans[..., stop, None])


@pytest.mark.parametrize("pattern, lengths, blocks", pairwise(tuple(PATTERNS), LENGTHS, BLOCKS))
def test_blocks_that_do_not_meet_have_no_id_in_common(pattern, lengths, blocks):
    queries, keys = ids_of(pattern, lengths)
    equal = queries[:, :, None] == keys[:, None, :]
    pairs = numpy_eval.results(lambda *ids: mask.segment_blocks(*ids, *blocks), queries, keys)
    meet, alike = (x[:, 0] for x in pairs)
    assert not (in_blocks(equal, *blocks) & ~meet).any()
    np.testing.assert_array_equal(alike, in_blocks(equal, *blocks, whole=True))
    if pattern in ("packed", "many", "one"):  # in order, or up to 32 of them: nothing is visited in vain
        np.testing.assert_array_equal(meet, in_blocks(equal, *blocks))


def test_blocks_of_one_id_meet_those_of_the_same_alone():
    """Whatever an id's remainder modulo 32."""
    ids = np.concatenate([np.arange(-33, 66), [-(2**31), 2**31 - 1]])
    rows = jnp.asarray(np.repeat(ids, 2)[None].astype(np.int32))
    for found in mask.segment_blocks(rows, rows, 2, 2):
        np.testing.assert_array_equal(found[0, 0], np.eye(len(ids), dtype=bool))


@pytest.mark.parametrize("seed", range(20))
def test_spans_reach_from_the_first_that_meets_to_the_last(seed):
    rng = np.random.default_rng(seed)
    meet = rng.random((2, 5, 9)) < (0.2, 0.7)[seed % 2]
    alike = meet & (rng.random(meet.shape) < 0.6)
    found = np.asarray(tile_ranges(BlockMask(jnp.asarray(meet)[:, None], jnp.asarray(alike)[:, None]), 9))[:, 0]
    visited, inner = spread(found, 9), spread(found, 9, 1, 2)
    assert not (meet & ~visited).any()
    for span, row, same in zip(found.reshape(-1, 4), meet.reshape(-1, 9), alike.reshape(-1, 9), strict=True):
        if not row.any():
            np.testing.assert_array_equal(span, 0)
            continue
        first, inner_first, inner_end, end = span
        assert (first, end) == (np.flatnonzero(row)[0], np.flatnonzero(row)[-1] + 1)
        assert (inner_end > inner_first) == same.any()
        assert not same.any() or (inner_first == np.flatnonzero(same)[0] and not same[inner_end : inner_end + 1].any())
    assert not (inner & ~alike).any()


RULES = {
    "full": {},
    "causal": {"causal_offset": 0},
    "window": {"window": (100, 37), "window_offset": 20},
    "window-left": {"window": (31, None), "causal_offset": 5},
    "window-nothing": {"window": (2, 2), "window_offset": -5000},
    "lengths": {"key_lengths": True, "query_lengths": True, "causal_offset": 0},
    "ends": {"key_lengths": True, "window": (100, 37), "align_ends": True},
    "positions": {"positions": True, "window": (100, 37), "window_offset": 20},
}


def on_few_sms(f: Callable[..., Any], arrays: dict[str, Any]) -> list[np.ndarray]:
    """What `f` returns for a device on which no call has so few tiles that all of them are visited."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "current", lambda: dataclasses.replace(hardware.H200, sm_count=2))
        return numpy_eval.results(f, arrays)


def check_forward_visits(p: Attention, config: ForwardConfig, *, exactly: bool = False, **patterns: str) -> None:
    """What is passed over is not seen, what is not compared is seen whole; `exactly`: nothing is visited in vain."""
    arrays, (rows, columns) = operands_of(p, **patterns), (config.block_q, config.block_kv)
    seen, tiles = seen_of(p, arrays), -(-p.key_length // columns)
    (table,) = on_few_sms(lambda arrays: forward.addressable(p, config, arrays)["spans"], arrays)
    table = np.broadcast_to(table, (p.batch, p.query_heads, -(-p.query_length // rows), 4))
    for b, n, i in np.ndindex(table.shape[:3]):
        counts = counts_of(p, arrays)[b].tolist()
        of_block = mask.kv_range(p, columns, i * rows, rows, *counts)
        of_block = mask.intersect(of_block, mask.TileRange(*table[b, n, i]))
        for row in range(i * rows, min((i + 1) * rows, p.query_length), 64):
            own = mask.intersect(of_block, mask.kv_range(p, columns, row, 64, *counts))
            first, inner_first, inner_end, end = map(int, own)
            assert 0 <= int(of_block.first) <= first < end <= int(of_block.end) <= tiles
            mine = seen[b, n, row : min(row + 64, counts[0])]
            assert not mine[:, : first * columns].any()
            assert not mine[:, end * columns :].any()
            # The last tile is always compared.
            assert mine[:, max(first, inner_first) * columns : min(end - 1, inner_end) * columns].all()
        held = np.flatnonzero(seen[b, n, i * rows : (i + 1) * rows].any(0)) // columns
        if exactly and held.size:
            assert (of_block.first, of_block.end) == (held[0], held[-1] + 1)


def check_backward_visits(p: Attention, *, exactly: bool = False, **patterns: str) -> None:
    """The same of the queries that come past a block of keys, and of the order of dQ."""
    config, arrays = BackwardConfig(block_q=64, warpgroups=2, stages=2, ordered_dq=True), operands_of(p, **patterns)
    found = what_is_seen(p, config, arrays)
    blocks, sizes = -(-p.query_length // config.block_q), (config.block_kv, config.block_q)
    shape = p.batch, p.key_heads, -(-p.key_length // config.block_kv)
    table = np.broadcast_to(found["spans"], (*shape, 4)).reshape(-1, shape[2], 4)
    group = p.query_heads // p.key_heads
    by_group = seen_of(p, arrays).reshape(p.batch, p.key_heads, group, p.query_length, p.key_length).swapaxes(3, 4)
    some, every = (x.reshape(-1, p.key_length, p.query_length) for x in (by_group.any(2), by_group.all(2)))
    held, visited, inner = in_blocks(some, *sizes), spread(table, blocks), spread(table, blocks, 1, 2)
    assert not (held & ~visited).any()
    if not p.query_lengths:  # of queries past their length the weights are 0
        assert not (inner & ~in_blocks(every, *sizes, whole=True)).any()
    if exactly:
        assert (visited.sum(2) <= np.where(held.any(2), blocks - held.argmax(2) - held[..., ::-1].argmax(2), 0)).all()
    order = slice(None, None, -1 if backward_common.last_tile_first(p, config) else 1)
    before = (np.cumsum(visited[:, order], axis=1) - visited[:, order])[:, order]
    positions = np.broadcast_to(found["dq_position"], (*shape, blocks)).reshape(before.shape)
    np.testing.assert_array_equal(positions, before)
    assert visited.any(1).all() or not backward_common.first_stores(p, config)
    assert backward_common.dq_writer_counts(p, config) is None


def what_is_seen(p: Attention, config: BackwardConfig, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    names = "spans", "dq_position"
    read = lambda arrays: [backward_xla.what_is_seen(p, config, SimpleNamespace(**arrays))[name] for name in names]
    return dict(zip(names, on_few_sms(read, arrays), strict=True))


VISITED = pairwise(tuple(PATTERNS), tuple(RULES), LENGTHS[1:])


def problem_of(op: Op, lengths: tuple[int, int], rules: str, **more: Any) -> Attention:
    facts = {"segments": True, **RULES[rules], **more}
    return attention_cases.problem_of(op, facts, lengths, (64, 64), "bfloat16", (1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("pattern, rules, lengths", VISITED)
def test_forward_visits_what_is_seen(pattern, rules, lengths):
    check_forward_visits(problem_of(Op.FORWARD, lengths, rules), ForwardConfig(64, warpgroups=2), ids=pattern)


@pytest.mark.slow
@pytest.mark.parametrize("pattern, rules, lengths", VISITED)
def test_ordered_backward_visits_what_is_seen(pattern, rules, lengths):
    check_backward_visits(problem_of(Op.BACKWARD, lengths, rules, deterministic=True), ids=pattern)


@pytest.mark.parametrize("rules", sorted(RULES.keys() - {"positions"}))
def test_positions_of_one_segment_are_those_without_segments(rules):
    config = BackwardConfig(block_q=64, warpgroups=2, stages=2, ordered_dq=True)
    p = problem_of(Op.BACKWARD, (513, 700), rules, deterministic=True)
    arrays = operands_of(p, ids="one")
    ops = SimpleNamespace(**{name: jnp.asarray(x) for name, x in arrays.items()})
    found = what_is_seen(p, config, arrays)
    table, positions = (np.asarray(found[name])[:, 0] for name in ("spans", "dq_position"))
    plain = dataclasses.replace(p, segments=False)
    for b, j in np.ndindex(table.shape[:2]):
        sequence = backward_common.sequence_at(p, config, ops, b)
        block = SimpleNamespace(problem=plain, config=config, index=j, sequence=sequence)
        for i in range(table[b, j, 0], table[b, j, 3]):
            assert positions[b, j, i] == backward_common.dq_position(block, jnp.int32(i))


def test_bases_are_of_blocks_that_count_up():
    positions = np.arange(100, 150, dtype=np.int32)[None].repeat(4, 0)
    positions[1, 20] += 1
    positions[2] -= 2**31 - 200
    positions[3, 48:] = 7, 8
    none = mask.NO_BASE
    expected = [[100, 116, 132, 148, 148], [100, none, 132, 148, 148], [none] * 5, [100, 116, 132, 7, 7]]
    assert mask.block_bases(jnp.asarray(positions), 16, 5).tolist() == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", [0, 100])
def test_work_falls_with_what_documents_hide(causal, padding):
    length, documents, rows, columns = 16384, 8, 128, 128
    ids = np.repeat(np.arange(documents) + 1, length // documents)[None].astype(np.int32)
    ids[:, length - padding :] = 0
    p = Attention(Op.FORWARD, 1, 1, 1, length, length, 64, 64, jnp.dtype("bfloat16"), segments=True)
    p = dataclasses.replace(p, causal_offset=0 if causal else None)
    pairs = mask.segment_blocks(jnp.asarray(ids), jnp.asarray(ids), rows, columns)
    table = np.asarray(tile_ranges(pairs, length // columns))[0, 0]
    full = [mask.kv_range(p, columns, i * rows, rows, length, length) for i in range(len(table))]
    steps = [mask.intersect(span, mask.TileRange(*row)) for span, row in zip(full, table, strict=True)]
    of_document = length // documents // columns
    expected = documents * (of_document * (of_document + 1) // 2 if causal else of_document**2)
    assert sum(int(s.end - s.first) for s in steps) == expected
    assert expected <= 1.12 * sum(s.end - s.first for s in full) / documents
