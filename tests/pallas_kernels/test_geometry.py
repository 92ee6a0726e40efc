"""Which tiles attention's kernels visit, and which they do not compare, at every offset, window and length near a tile.

A comparison of results does not see one wrong pair of query and key, which is within its tolerance: here pairs are
sets. Nothing is compiled: what takes arrays is called once for all problems alike.
"""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attention_cases
import jax.numpy as jnp
import numpy as np
import numpy_eval
import pytest

from pallas_kernels.attention import backward_common, mask, tile_scheduler
from pallas_kernels.attention.backward_common import Sequence, Tile
from pallas_kernels.attention.mask import TileRange
from pallas_kernels.attention.problem import Attention, BackwardConfig, BackwardWideConfig, ForwardConfig, Op

LENGTHS = (200, 320), (256, 255), (64, 64), (129, 63), (3, 1), (1, 399)
OFFSETS = range(-130, 131)
RULES: dict[str, list[dict[str, Any]]] = {
    "bound to the right": [{"causal_offset": n} for n in OFFSETS] + [{"window": (None, n)} for n in range(131)],
    "bound to the left": [{"window": (n, None)} for n in range(131)],
    "bounds": [
        *({"window": (n, n // 2)} for n in range(131)),
        *({"window": (70, 3), "window_offset": n} for n in OFFSETS),
        *({"causal_offset": n, "window": (64, 127), "window_offset": -n} for n in OFFSETS),
    ],
    "no bound": [{}],
}


def problems(op: Op, rules: str, lengths: tuple[int, int], **facts: Any) -> Iterator[tuple[Attention, np.ndarray]]:
    """The problems of these rules, and which of their queries see which keys, `[T, S]`."""
    for given in RULES[rules]:
        p = attention_cases.problem_of(op, given | facts, lengths, (64, 64), "bfloat16", (1, 1))
        yield p, np.broadcast_to(attention_cases.rules_of(p, {})["mask"], lengths)


def check_range(seen: np.ndarray, span: Any, block: int, *, tight: bool) -> None:
    """`seen`: which of the rows of a tile see which columns. `tight`: no block is visited or compared in vain."""
    first, inner_first, inner_end, end = map(int, span)
    columns = seen.shape[1]
    blocks = -(-columns // block)
    held = seen.any(0)
    assert not held[: first * block].any()
    assert not held[end * block :].any()
    start, stop = max(first, inner_first), min(end, inner_end)
    assert stop * block <= columns or start >= stop
    assert seen[:, start * block : stop * block].all()
    assert 0 <= first < end <= blocks
    where = np.flatnonzero(held) // block
    if tight and where.size:
        assert (first, end) == (where[0], where[-1] + 1)
        whole = [seen[:, i * block : (i + 1) * block].all() for i in range(columns // block)]
        assert list(np.flatnonzero(whole)) == list(range(start, stop))


def check_comparisons(p: Attention, seen: np.ndarray, span: TileRange, block: int) -> None:
    """Tiles are compared where they hold a pair that is not seen, and are not where the call has no such rule."""
    has_rule = mask.window_bounds(p) != (None, None)
    for tile in range(span.first, span.end):
        pairs, compares = seen[:, tile * block : (tile + 1) * block], mask.needs_mask(p, span, tile)
        assert (compares is not None) == has_rule
        assert compares or pairs.all()
        assert not compares or len(pairs) < block or pairs.shape[1] < block or not pairs.all()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("rules", RULES)
def test_forward_visits_the_pairs_that_are_seen(rules, lengths):
    length, keys = lengths
    for p, seen in problems(Op.FORWARD, rules, lengths):
        for rows, block_kv in ((64, 64), (64, 128), (192, 128), (16, 64)):
            for row in range(0, length, rows):
                span = mask.kv_range(p, block_kv, row, rows, length, keys)
                check_range(seen[row : row + rows], span, block_kv, tight=row + rows <= length)
                if (rows, block_kv) == (64, 64):
                    check_comparisons(p, seen[row : row + rows], span, block_kv)
        assert mask.may_see_nothing(p) == (not seen.any(1).all()), p


COUNTS = (1, 2, 63, 64, 65, 126, 127, 128, 129, 200)


@pytest.mark.parametrize("align_ends", [False, True])
@pytest.mark.parametrize("rules", [{}, {"causal_offset": 0}, {"causal_offset": 5, "window": (64, None)}], ids=str)
def test_forward_visits_what_lengths_leave(rules, align_ends):
    facts = {"query_lengths": True, "key_lengths": True, "align_ends": align_ends}
    p = attention_cases.problem_of(Op.FORWARD, rules | facts, (200, 200), (64, 64), "bfloat16", (1, 1), batch=1)
    i, j = np.arange(200)[:, None], np.arange(200)[None, :]
    for queries, keys in itertools.product((0, *COUNTS), repeat=2):
        apart = keys - queries if align_ends else 0
        seen = (i < queries) & (j < keys)
        seen &= (j <= i + apart + rules["causal_offset"]) if "causal_offset" in rules else True
        seen &= (j >= i + apart - 64) if "window" in rules else True
        for row in range(0, 200, 64):
            first, inner_first, inner_end, end = mask.kv_range(p, 64, row, 64, queries, keys)
            mine = seen[row : min(row + 64, max(queries, row))]
            assert 0 <= first < end <= (4 if row < queries else first + 1)
            assert not mine[:, : first * 64].any()
            assert not mine[:, end * 64 :].any()
            assert mine[:, max(first, inner_first) * 64 : min(end, inner_end) * 64].all()


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
def test_splits_divide_the_range(splits):
    """Tiles of a whole range are in one split each; what a split without a tile visits is not counted."""
    config = ForwardConfig(64, warpgroups=1, splits=splits)
    loaded = [None, *(TileRange(*r) for r in ((0, 0, 9, 9), (1, 2, 3, 4), (4, 5, 5, 5)))]
    for offset, load in itertools.product((-130, -1, 0, 62, 63, 64, 500), loaded):
        facts = {"causal_offset": offset, "window": (200, None)}
        p = attention_cases.problem_of(Op.FORWARD, facts, (130, 330), (64, 64), "bfloat16", (1, 1))
        for tile in range(3):
            whole = mask.kv_range(p, 64, tile * 64, 64, 130, 330)
            if load is not None:
                whole = TileRange(*map(int, mask.intersect(whole, load)))
            read = None if load is None else lambda load=load: load
            taken, inner = [], []
            for split in range(splits):
                index = tile * splits + split
                span, sees_any = mask.tile_kv_range(p, config, index, 130, 330, read)
                first, inner_first, inner_end, end = map(int, span)
                assert 0 <= first < end <= 6
                if sees_any:
                    taken += range(first, end)
                    inner += range(max(first, inner_first), min(end, inner_end))
            assert taken == list(range(whole.first, whole.end))
            assert inner == [i for i in taken if whole.inner_first <= i < whole.inner_end]


CONFIGS = {
    "64 queries of 128 keys": BackwardConfig(block_q=64, warpgroups=2, stages=2, ordered_dq=True),
    "128 queries of 128 keys": BackwardConfig(block_q=128, warpgroups=2, stages=2, ordered_dq=True),
    "64 queries of 64 keys": BackwardWideConfig(squares=2, ordered_dq=True),
    "64 queries of 192 keys, in any order": BackwardConfig(block_q=64, warpgroups=3, stages=2),
}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("rules", RULES)
def test_backward_visits_the_pairs_that_are_seen(rules, lengths):
    found = list(problems(Op.BACKWARD, rules, lengths))
    for config in CONFIGS.values():
        check_backward(config, lengths, found)


def check_backward(config: Any, lengths: tuple[int, int], found: list[tuple[Attention, np.ndarray]]) -> None:
    """The spans of tiles of keys, and the order in which they add to dQ, of problems with the same bounds."""
    block_q, block_kv = config.block_q, config.block_kv
    length, keys = lengths
    tiles, blocks = -(-keys // block_kv), -(-length // block_q)
    p = found[0][0]
    left, right = (
        None if bounds[0] is None else np.array(bounds, np.int32)[:, None]
        for bounds in zip(*(mask.window_bounds(p) for p, _ in found), strict=True)
    )

    def read(index: Any, i: Any, left: Any, right: Any) -> list[Any]:
        span = backward_common._span(p, config, index * block_kv, Sequence(keys, blocks, left, right))
        of_bounds = lambda x: None if x is None else x[..., None]
        sequence = Sequence(keys, blocks, of_bounds(left), of_bounds(right))
        tile = SimpleNamespace(problem=p, config=config, index=index[..., None], sequence=sequence)
        return [*span, backward_common.dq_position(tile, i), backward_common.is_last(tile, i)]

    places = np.arange(tiles, dtype=np.int32)[None], np.arange(blocks, dtype=np.int32)[None, None]
    *span, position, is_last = numpy_eval.results(read, *places, left, right)
    spans = np.stack([np.broadcast_to(x, (len(found), tiles)) for x in span], -1)
    position, is_last = (np.broadcast_to(x, (len(found), tiles, blocks)) for x in (position, is_last))
    visits = (spans[..., :1] <= np.arange(blocks)) & (np.arange(blocks) < spans[..., 3:])
    order = slice(None, None, -1 if right is not None else 1)
    before = (visits[:, order].cumsum(1) - visits[:, order])[:, order]
    adders = visits.sum(1)
    np.testing.assert_array_equal(position[visits], before[visits])
    np.testing.assert_array_equal(is_last[visits], (before == adders[:, None] - 1)[visits])
    for (p, seen), own, count in zip(found, spans, adders, strict=True):
        for j, (first, inner_first, inner_end, end) in enumerate(own.tolist()):
            by_query = seen[:, j * block_kv : (j + 1) * block_kv]
            whole_keys = by_query.shape[1] == block_kv
            held = np.flatnonzero(by_query.any(1)) // block_q
            assert 0 <= first <= inner_first <= inner_end <= end <= blocks
            assert not by_query[: first * block_q].any()
            assert not by_query[end * block_q :].any()
            assert whole_keys or inner_first == inner_end
            assert by_query[inner_first * block_q : inner_end * block_q].all()
            if whole_keys and held.size:
                assert (first, end) == (held[0], held[-1] + 1)
        assert backward_common.dq_writer_counts(p, config) == (count.min(), count.max()), p
        assert backward_common.first_stores(p, config) == (config.ordered_dq and count.min() > 0), p


def test_a_tile_of_keys_beyond_the_length_visits_nothing():
    facts = {"key_lengths": True, "query_lengths": True, "causal_offset": 0}
    p = attention_cases.problem_of(Op.BACKWARD, facts, (200, 200), (64, 64), "bfloat16", (1, 1))
    config = CONFIGS["64 queries of 128 keys"]
    counts = np.array(list(itertools.product((0, *COUNTS), repeat=2)), np.int32)
    ops = SimpleNamespace(query_lengths=jnp.asarray(counts[:, 0]), key_lengths=jnp.asarray(counts[:, 1]))
    sequence = backward_common.sequence_at(p, config, ops, (slice(None), None))
    span = backward_common._span(p, config, jnp.arange(2, dtype=jnp.int32)[None] * 128, sequence)
    spans = np.stack([np.broadcast_to(x, (len(counts), 2)) for x in span], -1).tolist()
    i, j = np.arange(200)[:, None], np.arange(200)[None, :]
    for (queries, keys), own in zip(counts.tolist(), spans, strict=True):
        seen = (i < queries) & (j < keys) & (j <= i)
        for tile, (first, inner_first, inner_end, end) in enumerate(own):
            mine = seen[:queries, tile * 128 : tile * 128 + 128]
            assert 0 <= first <= inner_first <= inner_end <= end <= 4
            assert (first == end) == (not mine.any()) or tile * 128 < keys
            assert not mine[: first * 64].any()
            assert not mine[end * 64 :].any()
            # A padded key counts as one that is not seen, a padded query's weights are 0.
            padded = np.pad(mine, ((0, 0), (0, 128 - mine.shape[1])))
            assert padded[inner_first * 64 : inner_end * 64].all()


def test_staggered_tiles_visit_each_step_once():
    config = BackwardConfig(block_q=64, warpgroups=2, stages=2, staggered=True)
    spans = np.array([s for s in itertools.product(range(7), repeat=4) if list(s) == sorted(s)], np.int32)
    of_each = lambda x: jnp.broadcast_to(jnp.asarray(x), (5, len(spans), 7))
    p = attention_cases.problem_of(Op.BACKWARD, {}, (448, 640), (64, 64), "bfloat16", (1, 1))
    whole = TileRange(*(of_each(spans[:, x, None]) for x in range(4)))
    index = of_each(np.arange(5)[:, None, None])
    tile = Tile(p, config, SimpleNamespace(), 0, 0, index, Sequence(640, 7, None, None), whole, 0)
    visited = np.asarray(tile.step(0, of_each(np.arange(7))).i)
    for n, s in np.ndindex(5, len(spans)):
        first, inner_first, inner_end, end = spans[s]
        own = visited[n, s].tolist()
        assert sorted(own[first:end]) == list(range(first, end))
        assert own[first:inner_first] == list(range(first, inner_first))
        assert own[inner_end:end] == list(range(inner_end, end))
        if inner_end > inner_first:
            assert own[inner_first] == inner_first + n % (inner_end - inner_first)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("together", [1, 2, 3, 4, 7])
def test_sections_of_heads_have_every_tile_of_keys(together, ordered):
    """Tiles of a section's heads are interleaved; the last ones of a causal problem start first."""
    config = BackwardConfig(64, 1, 2, heads_per_l2_group=together, ordered_dq=ordered)
    for batch, heads, tiles, causal, bias in (
        (1, 1, 1, True, None), (1, 4, 3, True, None), (3, 2, 2, False, None), (2, 3, 5, True, "1NTS"),
        (1, 6, 2, False, "11TS"), (2, 3, 4, False, "BNTS"), (2, 3, 4, True, "1N11"),
    ):  # fmt: skip
        facts = ({"causal_offset": 0} if causal else {}) | ({"bias": bias} if bias else {})
        p = attention_cases.problem_of(
            Op.BACKWARD, facts, (64, tiles * 64), (64, 64), "bfloat16", (heads, heads), batch
        )
        count = batch * heads * tiles
        assert backward_common.tile_count(p, config) == count
        tile = Tile.of(p, config, SimpleNamespace(), jnp.arange(count, dtype=jnp.int32))
        own = np.stack([np.broadcast_to(x, count) for x in (tile.batch, tile.key_head, tile.index)], 1)
        assert sorted(map(tuple, own)) == list(itertools.product(range(batch), range(heads), range(tiles)))
        pairs = list(dict.fromkeys((b, n) for b, n, _ in own.tolist()))
        # Sequences that share a head's bias come one after the other.
        assert pairs == sorted(pairs, key=lambda pair: pair[:: -1 if bias == "1NTS" else 1])
        size = max(n for n in range(1, together + 1) if batch * heads % n == 0)
        for start in range(0, count, size * tiles):
            section = own[start : start + size * tiles]
            assert len({(b, n) for b, n, _ in section.tolist()}) == size
            order = np.repeat(np.arange(tiles), size)
            np.testing.assert_array_equal(section[:, 2], order[::-1] if ordered and causal else order)


@pytest.mark.parametrize("budget", [0, 1, 2, 100])
@pytest.mark.parametrize("splits, packed", [(1, 1), (3, 1), (1, 2), (2, 4)])
def test_sections_of_heads_have_every_tile_of_queries(budget, splits, packed):
    """A section's keys and values fit in the budget, if those of one key head do; its longest tiles start first."""
    config = ForwardConfig(64, warpgroups=1, splits=splits, packed_heads=packed, l2_budget_mib=budget)
    for batch, bias in ((1, None), (3, None), (2, "1NTS")):
        facts = {"causal_offset": 0} | ({"bias": bias} if bias else {})
        p = attention_cases.problem_of(Op.FORWARD, facts, (300, 1024), (256, 256), "bfloat16", (8, 2), batch)
        tiles, length = tile_scheduler.order(p, config)
        packs, per_head = batch * 8 // packed, -(-300 // (64 // packed)) * splits
        np.testing.assert_array_equal(np.sort(tiles), np.arange(packs * per_head))
        section = min(packs, 4 // packed * max(budget, 1))  # a key head takes a MiB
        for start in range(0, packs, section):
            mine = slice(start * per_head, (start + section) * per_head)
            heads = np.unique(tiles[mine] // per_head)
            assert len(heads) == min(section, packs - start)
            assert (np.diff(length[mine]) <= 0).all()
        for tile, count in zip(tiles[:per_head].tolist(), length, strict=False):
            span, _ = mask.tile_kv_range(p, config, tile % per_head, 300, 1024)
            assert count == span.end - span.first


def test_heads_of_a_group_are_sums_of_its_blocks():
    """A tile of a group's heads is visited if one of its heads sees it, and not compared if all see it whole."""
    rng = np.random.default_rng(0)
    visible = rng.random((2, 6, 3, 4)) < 0.5
    full = visible & (rng.random(visible.shape) < 0.5)
    found = mask.of_group(mask.BlockMask(jnp.asarray(visible), jnp.asarray(full)), 3)
    np.testing.assert_array_equal(found.visible, visible.reshape(2, 2, 3, 3, 4).any(2))
    np.testing.assert_array_equal(found.full, full.reshape(2, 2, 3, 3, 4).all(2))


@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (None, -65), (-3, None), (-70, 5), (2, 1)], ids=str)
def test_blocks_of_positions_are_their_pairs(bounds):
    """At every distance of two blocks, in order and out of it."""
    rng = np.random.default_rng(0)
    offsets = np.arange(-130, 131, dtype=np.int32)
    within = np.stack([np.arange(64), np.arange(64)[::-1], rng.permutation(64)]).astype(np.int32)
    rows = np.tile(within[0] + 200, (3 * len(offsets), 1))
    columns = (offsets[:, None, None] + 200 + within[None]).reshape(-1, 64)
    found = mask.position_blocks(jnp.asarray(rows), jnp.asarray(columns), 64, 64, bounds)
    left, right = bounds
    apart = columns[:, None, :] - rows[:, :, None]
    seen = np.ones_like(apart, bool)
    seen &= (left is None) | (apart >= (left or 0))
    seen &= (right is None) | (apart <= (right or 0))
    visible, full = (np.broadcast_to(x[:, 0, 0, 0], len(rows)) for x in found)
    assert not (seen.any((1, 2)) & ~visible).any()
    np.testing.assert_array_equal(full, seen.all((1, 2)))
    if left is None or right is None or left <= right:
        np.testing.assert_array_equal(visible, seen.any((1, 2)))
