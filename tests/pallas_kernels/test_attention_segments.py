"""What segment ids let the attention kernels pass over, against comparing every id with every other."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import test_attention_backward
import test_attention_forward
from attention_cases import counts_of, seen_of
from documents import PATTERNS

from pallas_kernels.attention import backward_common, backward_operands, schedule, segments
from pallas_kernels.attention.configs import BackwardConfig
from pallas_kernels.attention.pairs import Pairs, spans
from pallas_kernels.attention.problem import Attention, Op

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


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_blocks_that_do_not_meet_have_no_id_in_common(pattern, lengths, blocks):
    queries, keys = ids_of(pattern, lengths)
    equal = queries[:, :, None] == keys[:, None, :]
    meet, alike = (np.asarray(x)[:, 0] for x in segments.pairs(jnp.asarray(queries), jnp.asarray(keys), *blocks))
    assert not (in_blocks(equal, *blocks) & ~meet).any()
    np.testing.assert_array_equal(alike, in_blocks(equal, *blocks, whole=True))
    if pattern in ("packed", "many", "one"):  # in order, or up to 32 of them: nothing is visited in vain
        np.testing.assert_array_equal(meet, in_blocks(equal, *blocks))


@pytest.mark.parametrize("seed", range(20))
def test_spans_reach_from_the_first_that_meets_to_the_last(seed):
    rng = np.random.default_rng(seed)
    meet = rng.random((2, 5, 9)) < (0.2, 0.7)[seed % 2]
    alike = meet & (rng.random(meet.shape) < 0.6)
    found = np.asarray(spans(Pairs(jnp.asarray(meet)[:, None], jnp.asarray(alike)[:, None]), 9))[:, 0]
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
}


# The lengths take turns.
VISITED = [(*x, n) for x, n in zip(itertools.product(PATTERNS, RULES), itertools.cycle(LENGTHS[1:]))]


@pytest.mark.slow
@pytest.mark.parametrize("pattern, rules, lengths", VISITED)
def test_forward_visits_what_is_seen(pattern, rules, lengths):
    p = test_attention_forward.problem_of("segments", lengths, (64, 64), "bfloat16")
    p = dataclasses.replace(p, **RULES[rules])
    arrays, (rows, columns) = test_attention_forward.operands_of(p, pattern), BLOCKS[0]
    ids = (jnp.asarray(arrays[name]) for name in ("query_segments", "key_segments"))
    seen, tiles = seen_of(p, arrays)[:, 0], -(-p.key_length // columns)
    table = np.asarray(spans(segments.pairs(*ids, rows, columns), tiles))[:, 0]
    for b in range(p.batch):
        counts = counts_of(p, arrays)[b].tolist()
        for i in range(table.shape[1]):
            of_block = schedule.span(p, columns, i * rows, rows, *counts)
            of_block = schedule.narrowed(of_block, schedule.Span(*table[b, i]))
            for row in range(i * rows, min((i + 1) * rows, p.query_length), 64):
                own = schedule.narrowed(of_block, schedule.span(p, columns, row, 64, *counts))
                first, inner_first, inner_end, end = map(int, own)
                assert 0 <= int(of_block.first) <= first < end <= int(of_block.end) <= tiles
                mine = seen[b, row : min(row + 64, counts[0])]
                assert not mine[:, : first * columns].any()
                assert not mine[:, end * columns :].any()
                # The last tile is always compared.
                assert mine[:, max(first, inner_first) * columns : min(end - 1, inner_end) * columns].all()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("lengths", LENGTHS[1:])
def test_backward_visits_what_is_seen_in_turns(pattern, rules, lengths):
    config = BackwardConfig(block_q=64, warpgroups=2, stages=2, turns=True)
    facts = RULES[rules] | {"deterministic": True}
    p = test_attention_backward.problem_of("segments", lengths, (64, 64), "bfloat16", **facts)
    arrays = test_attention_backward.operands_of(p, pattern)
    ops = SimpleNamespace(**{name: jnp.asarray(x) for name, x in arrays.items()})
    found = backward_operands.what_is_seen(p, config, ops)
    blocks, table = -(-p.query_length // config.block_q), np.asarray(found["spans"])[:, 0]
    seen, visited = seen_of(p, arrays)[:, 0].swapaxes(1, 2), spread(table, blocks)
    assert not (in_blocks(seen, config.block_kv, config.block_q) & ~visited).any()
    whole, inner = in_blocks(seen, config.block_kv, config.block_q, whole=True), spread(table, blocks, 1, 2)
    if not p.query_lengths:  # of queries past their length the weights are 0
        assert not (inner & ~whole).any()
    order = slice(None, None, -1 if backward_common.latest_first(p, config) else 1)
    before = (np.cumsum(visited[:, order], axis=1) - visited[:, order])[:, order]
    np.testing.assert_array_equal(found["turns_before"][:, 0], before)
    assert visited.any(1).all() or not backward_common.first_stores(p, config)


@pytest.mark.parametrize("rules", RULES)
def test_turns_of_one_segment_are_those_without_segments(rules):
    config = BackwardConfig(block_q=64, warpgroups=2, stages=2, turns=True)
    facts = RULES[rules] | {"deterministic": True}
    p = test_attention_backward.problem_of("segments", (513, 700), (64, 64), "bfloat16", **facts)
    arrays = test_attention_backward.operands_of(p, "one")
    ops = SimpleNamespace(**{name: jnp.asarray(x) for name, x in arrays.items()})
    found = backward_operands.what_is_seen(p, config, ops)
    table, turns = (np.asarray(found[name])[:, 0] for name in ("spans", "turns_before"))
    plain = dataclasses.replace(p, segments=False)
    for b, j in np.ndindex(table.shape[:2]):
        sequence = backward_common.sequence_at(p, config, ops, b)
        block = SimpleNamespace(problem=plain, config=config, index=j, sequence=sequence)
        for i in range(table[b, j, 0], table[b, j, 3]):
            assert turns[b, j, i] == backward_common.turns_before(block, jnp.int32(i))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", [0, 100])
def test_work_falls_with_what_documents_hide(causal, padding):
    length, documents, rows, columns = 16384, 8, 128, 128
    ids = np.repeat(np.arange(documents) + 1, length // documents)[None].astype(np.int32)
    ids[:, length - padding :] = 0
    p = Attention(Op.FORWARD, 1, 1, 1, length, length, 64, 64, jnp.dtype("bfloat16"), segments=True)
    p = dataclasses.replace(p, causal_offset=0 if causal else None)
    pairs = segments.pairs(jnp.asarray(ids), jnp.asarray(ids), rows, columns)
    table = np.asarray(spans(pairs, length // columns))[0, 0]
    full = [schedule.span(p, columns, i * rows, rows, length, length) for i in range(len(table))]
    steps = [schedule.narrowed(span, schedule.Span(*row)) for span, row in zip(full, table, strict=True)]
    of_document = length // documents // columns
    expected = documents * (of_document * (of_document + 1) // 2 if causal else of_document**2)
    assert sum(int(s.end - s.first) for s in steps) == expected
    assert expected <= 1.12 * sum(s.end - s.first for s in full) / documents
