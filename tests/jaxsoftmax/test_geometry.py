"""Who sees whom in chunks, rings and pieces of a sequence, as sets of pairs: one wrong pair hides in a tolerance.

All logits are 0 and the values are rows of an identity matrix, so that the weights times their sum are 1 for each pair
that is seen, and 0 for the others. Devices are a mapped axis.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax import unzigzag, zigzag
from jaxsoftmax._attention import paged, sequence, sharding
from jaxsoftmax._core.sharding import AxisSharding
from jaxsoftmax._cross_entropy import chunks
from jaxsoftmax._cross_entropy.linear_kernel import Parts
from pallas_kernels.attention import reference, tiles
from pallas_kernels.attention.problem import Operands, Rules
from pallas_kernels.softmax.problem import IGNORED

Arrays = dict[str, Any]
BATCH = 2


def uniform(queries: int, keys: int) -> Arrays:
    """Queries and keys whose logits are 0, and the values that tell keys apart, `[B, length, 1, size]`."""
    zeros = lambda n: np.zeros((BATCH, n, 1, 1), np.float32)
    values = np.broadcast_to(np.eye(keys, dtype=np.float32)[None, :, None], (BATCH, keys, 1, keys))
    return {"query": zeros(queries), "key": zeros(keys), "value": values}


def pairs(out: Any, lse: Any) -> np.ndarray:
    """Which queries see which keys, from `out [B, T, 1, S]` and `lse [B, 1, T]`: each key counts once."""
    weights = np.asarray(out)[:, :, 0] * np.exp(np.asarray(lse)[:, 0, :, None])
    np.testing.assert_allclose(weights, weights.round(), atol=1e-3)
    np.testing.assert_allclose(weights.sum(-1), np.exp(np.asarray(lse)[:, 0]), atol=1e-3)  # no other keys count
    return weights.round().astype(int)


def pairs_of_gradient(d_value: Any, lse: Any) -> np.ndarray:
    """The same from the gradient of the values for cotangents that tell queries apart, `[B, S, 1, T]`."""
    return pairs(np.swapaxes(d_value, 1, 3), lse)


def tell_apart(queries: int) -> np.ndarray:
    return np.broadcast_to(np.eye(queries, dtype=np.float32)[None, :, None], (BATCH, queries, 1, queries))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("queries, keys", [(5, 9), (3, 11), (9, 1), (1, 33)], ids=str)
def test_chunks_have_every_pair_once(queries, keys, bounded, monkeypatch):
    """Of chunks of 4 queries, and of 16 pairs, none of which divides."""
    monkeypatch.setattr(tiles, "CHUNK", 4)
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    rules = Rules(causal_offset=1, window=(3, None)) if bounded else Rules()
    seen = ((j <= i + 1) & (j >= i - 3)) | (not bounded)

    def both(given: Arrays) -> Any:
        operands, ct = Operands(**given), tell_apart(queries)
        out, lse = reference.forward(operands, rules)
        shapes = {"value": (BATCH, keys, 1, queries)}
        known = jnp.zeros((BATCH, queries, 1, queries))  # of cotangents of the values' size
        wide = operands._replace(value=jnp.zeros((BATCH, keys, 1, queries)))
        return out, lse, *reference.backward(wide, rules, known, lse, ct, jnp.zeros_like(lse), shapes=shapes)

    out, lse, d_value = jax.jit(both)(uniform(queries, keys))
    for found in (pairs(out, lse), pairs_of_gradient(d_value, lse)):
        np.testing.assert_array_equal(found, np.broadcast_to(seen, found.shape))


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_chunks_have_every_token_once(tokens):
    rules = SimpleNamespace(has_tokens=lambda name: name == "labels")
    labels = np.arange(tokens)
    for size in range(1, tokens + 1):

        def body(chunk: Any) -> Any:
            counts = (chunk["labels"][:, None] == labels).sum(0)
            return {"counts": counts, "ignored": (chunk["labels"] == IGNORED).sum()}, {"row": chunk["labels"] * 10}

        sums, rows = chunks._over_chunks(body, rules, {"labels": jnp.asarray(labels), "weight": jnp.ones(())}, size)
        np.testing.assert_array_equal(sums["counts"], 1)
        assert sums["ignored"] == -tokens % size
        np.testing.assert_array_equal(rows["row"], labels * 10)


def test_as_few_chunks_as_memory_allows():
    for tokens, vocabulary, asked in itertools.product((1, 127, 128, 129, 1000, 4096, 5000), (1, 1000), (None, 1, 300)):
        for budget in (1, 4 * 127, 4 * 1000 * 128, 4 * 1000 * 129, 4 * 1000 * 700):
            size = chunks.chunk_size(tokens, vocabulary, 4, asked, budget)
            most = asked or max(budget // (4 * vocabulary), 1)
            if asked or tokens <= most:
                assert size == min(tokens, most)
                continue
            assert size % 128 == 0
            assert 128 <= size <= max(most, 128)
            cost = lambda n, tokens=tokens: -(-tokens // n) * (n + 128)
            assert cost(size) == min(map(cost, range(128, max(most, 128) + 1, 128)))
    assert chunks.chunk_size(8192, 128256, 6, None) == 1024
    # A GiB of logits in 16 bits beside float32, and two of the kernel's weights in 16 bits.
    for most, bytes_each, budget in ((1365, 6, chunks.BYTES), (8192, 2, chunks.KERNEL_BYTES)):
        sizes = [chunks.chunk_size(tokens, 2**17, bytes_each, None, budget) for tokens in (most, most + 1)]
        assert sizes[0] == most > sizes[1]


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_each_label_is_one_devices(devices):
    local, labels = 5, np.array([IGNORED, *range(5 * devices)])
    parts = Parts((), AxisSharding(("d",), local * devices))
    of = lambda _: chunks._local_labels(jnp.asarray(labels), local, parts)
    found = np.asarray(jax.vmap(of, axis_name="d")(jnp.arange(devices)))
    want = np.full((devices, len(labels)), local)
    want[:, 0] = IGNORED
    for label in range(5 * devices):
        want[label // 5, label + 1] = label % 5
    np.testing.assert_array_equal(found, want)


def test_notes_say_how_many_queries_a_device_has():
    shapes = [(1, 64, 2, 8), (1, 32, 2, 8), (1, 32, 2, 8)]
    specs = [(None, "d", None, None)] * 3
    (note,) = sharding.sequence_notes(("query", "key", "value"), shapes, specs, {"d": 4}, ("out", "lse"))
    assert "each of 4 devices computes for its 16 queries" in note


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_zigzag_deals_every_piece_once(devices, rounds):
    piece = 2
    length = 2 * devices * rounds * piece
    whole = np.arange(2 * length).reshape(2, length, 1)
    dealt = zigzag(whole, -2, devices, rounds)
    np.testing.assert_array_equal(unzigzag(dealt, 1, devices, rounds), whole)
    np.testing.assert_array_equal(dealt[1], dealt[0] + length)
    at = np.asarray(dealt[0]).reshape(devices, rounds, 2, piece)
    for i, r in np.ndindex(devices, rounds):
        first = r * 2 * devices
        for half, number in enumerate((first + i, first + 2 * devices - 1 - i)):
            np.testing.assert_array_equal(at[i, r, half], np.arange(number * piece, (number + 1) * piece))
    assert len(set((at + 1).sum((1, 2, 3)).tolist())) == 1


T = 24
RNG = np.random.default_rng(0)
SHUFFLED = np.stack([RNG.permutation(T) for _ in range(BATCH)]).astype(np.int32)
DOCUMENTS = np.sort(RNG.integers(0, 3, (BATCH, T))).astype(np.int32)
LENGTHS = {"query_lengths": np.array([21, 5], np.int32), "key_lengths": np.array([24, 13], np.int32)}
# The operands besides queries, keys and values, and the rules.
SHARDED: dict[str, tuple[Arrays, Rules]] = {
    "causal": ({}, Rules(causal_offset=0)),
    "ends": (LENGTHS, Rules(causal_offset=1, align_ends=True)),
    "window": ({"query_segments": DOCUMENTS, "key_segments": DOCUMENTS}, Rules(window=(7, 2), window_offset=-1)),
    "shuffled": (
        {"query_positions": SHUFFLED, "key_positions": SHUFFLED[::-1], "key_lengths": LENGTHS["key_lengths"]},
        Rules(window=(7, 5)),
    ),
    "masked": (
        {"query_positions": SHUFFLED, "key_positions": SHUFFLED[::-1], "mask": RNG.random((BATCH, 1, T, T)) < 0.6},
        Rules(causal_offset=0),
    ),
}


def seen_of(given: Arrays, rules: Rules) -> np.ndarray:
    """Which queries see which keys, `[B, T, T]`."""
    lengths = [given.get(name, np.full(BATCH, T)) for name in ("query_lengths", "key_lengths")]
    i = j = np.broadcast_to(np.arange(T), (BATCH, T))
    inside = (i < lengths[0][:, None])[:, :, None] & (j < lengths[1][:, None])[:, None]
    at, key_at = given.get("query_positions", i), given.get("key_positions", j)
    if rules.align_ends:
        at = at + (lengths[1] - lengths[0])[:, None]
    apart = key_at[:, None, :] - at[:, :, None]
    left, right = rules.window
    inside &= True if rules.causal_offset is None else apart <= rules.causal_offset
    inside &= True if left is None else apart >= rules.window_offset - left
    inside &= True if right is None else apart <= rules.window_offset + right
    if "query_segments" in given:
        inside &= given["query_segments"][:, :, None] == given["key_segments"][:, None]
    return inside & (given["mask"][:, 0] if "mask" in given else True)


def on_devices(kind: str, x: np.ndarray, devices: int, in_ring: bool) -> np.ndarray:
    """An operand's parts in front: of queries, and in a ring of keys."""
    axis = {"query": 1, "value": 1, "key": 1, "mask": 2}.get(kind, 1)
    is_cut = kind.startswith("query") or kind in ("mask", "d_out", "lse", "d_lse")
    axis = 2 if kind in ("lse", "d_lse") else axis
    if kind.endswith("lengths") or not (is_cut or in_ring):
        return np.broadcast_to(x, (devices, *x.shape))
    return np.stack(np.split(x, devices, axis))


@pytest.mark.parametrize(
    "case, devices, in_ring",
    [
        *((case, devices, True) for case in SHARDED if case != "masked" for devices in (3, 4)),
        *((case, 3, False) for case in SHARDED),
    ],
)
def test_devices_have_every_pair_once(case, devices, in_ring, monkeypatch):
    """A ring passes blocks of keys on; otherwise each device has all keys, sorted where that is of use."""
    monkeypatch.setattr(sequence, "SORT_BLOCK", 3)
    more, rules = SHARDED[case]
    given, ct = uniform(T, T) | more, tell_apart(T)
    given = {name: given[name] for name in Operands._fields if name in given}
    seen = seen_of(more, rules)

    def run(*arrays: Any, names: tuple[str, ...], rules: Rules) -> Any:
        return reference.forward(Operands(**dict(zip(names, arrays, strict=True))), rules)

    def gradient(*arrays: Any, names: tuple[str, ...], rules: Rules) -> Any:
        operands, rest = Operands(**dict(zip(names, arrays, strict=False))), arrays[len(names) :]
        return reference.backward(operands, rules, *rest, shapes={"value": operands.value.shape})

    def forward(*operands: Any) -> Any:
        part = sequence.part_of(tuple(given), operands, tuple(given), rules, ("d",), in_blocks=in_ring)
        if in_ring:
            return sequence.ring(run, part, ("out", "lse"), ("d",))
        return run(*part.operands, names=part.names, rules=part.rules)

    def backward(*operands: Any) -> Any:
        kinds = (*given, "out", "lse", "out", "lse")
        part = sequence.part_of(kinds, operands, tuple(given), rules, ("d",), in_blocks=in_ring)
        if in_ring:
            return sequence.ring(gradient, part, ("value",), ("d",))[0]
        found = gradient(*part.operands, names=part.names, rules=part.rules)[0]
        return jax.lax.psum(part.in_order("value", found), "d")

    parts = [on_devices(kind, x, devices, in_ring) for kind, x in given.items()]
    out, lse = jax.jit(jax.vmap(forward, axis_name="d"))(*parts)
    whole = lambda x, axis: np.concatenate(list(np.asarray(x)), axis)
    np.testing.assert_array_equal(pairs(whole(out, 1), whole(lse, 2)), seen)
    zeros = [np.zeros_like(out), np.asarray(lse), on_devices("d_out", ct, devices, in_ring), np.zeros_like(lse)]
    d_value = np.asarray(jax.jit(jax.vmap(backward, axis_name="d"))(*parts, *zeros))
    d_value = whole(d_value, 1) if in_ring else d_value[0]
    np.testing.assert_array_equal(pairs_of_gradient(d_value, whole(lse, 2)), seen)


@pytest.mark.parametrize("keys", [1, 4, 6])
def test_groups_of_heads_divide_the_key_heads(keys, monkeypatch):
    """In a ring blocks go round once for each group, as few as leave enough queries to each."""
    monkeypatch.setattr(sequence, "MAX_OUTPUTS", 0)
    shapes = [(2, 8, 12, 4), (2, 8, keys, 4), (2, 8, keys, 4)]
    for least in range(1, 2 * 8 * 12 + 2):
        monkeypatch.setattr(sequence, "MIN_GROUP_QUERIES", least)
        found = sequence.head_groups(("query", "key", "value"), shapes, ("out", "lse"))
        assert keys % found == 0
        assert found == 1 or math.prod(shapes[0][:-1]) // found >= least
        larger = [n for n in range(found + 1, keys + 1) if keys % n == 0]
        assert all(math.prod(shapes[0][:-1]) // n < least for n in larger)


def test_where_keys_go_in_a_ring_and_heads_in_groups():
    """Among more than 8 devices, or beyond 2^26 numbers; groups beyond 2^25 outputs, each of 2^16 queries or more."""
    found = {case: sequence.ring_reason(*case) for case in ((8, 2**26), (9, 2**26), (8, 2**26 + 1))}
    assert list(found.values()) == [
        None,
        "9 devices are more than fast links join, and the computation hides what slow ones take",
        f"keys and values of {2**26 + 1} numbers would take much memory on each device",
    ]
    groups = lambda length: sequence.head_groups(("query", "key", "value"), [(1, length, 16, 64)] * 3, ("out", "lse"))
    assert [groups(length) for length in (2**15, 2**15 + 1, 2**16 - 1, 2**16)] == [1, 8, 8, 16]


@pytest.mark.parametrize("lead", [(), (3,), (1, 3), (4, 1, 3)], ids=str)
@pytest.mark.parametrize(
    "heads, devices, kept",
    [((8, 4), 4, ("d", "d", False)), ((8, 2), 4, ("d", None, True)), ((6, 4), 3, (None, None, False))],
    ids=str,
)
def test_heads_stay_sharded_whatever_comes_before_them(lead, heads, devices, kept):
    """The key's where they divide, the query's alone where each device has a part of one group."""
    kinds, rest = ("query", "key", "value"), (None,) * (1 + len(lead))
    shapes = [(*lead, 16, n, 8) for n in (heads[0], heads[1], heads[1])]
    entries = sharding.signature(kinds, len(lead)).entries(shapes, [(*rest, "d", None)] * 3, {"d": devices})
    assert (entries["n"], entries["k"], sharding.shares_key_heads(entries)) == kept
    others = [*(f"b{i}" for i in range(len(lead))), "t", "s"]
    assert entries == dict.fromkeys(others) | {"n": kept[0], "k": kept[1]}


QUERY = jax.ShapeDtypeStruct((5, 7, 4, 8), jnp.float32)


def test_a_problem_of_pages_is_whole_where_sequences_alone_are_cut():
    whole = [(4, 1, 1, 1), (1,) * 4, (1,) * 4, (4, 1), (4,), (1, 1)]
    call = paged.signature("heads_first", [QUERY] * 6)
    assert call.is_whole_in(whole)
    assert paged.signature("heads_first", [QUERY] * 5).is_whole_in(whole[:5])
    for i, pieces in enumerate(whole):
        for d, n in enumerate(pieces):
            cut = (*pieces[:d], 2 * n, *pieces[d + 1 :])
            assert not call.is_whole_in([*whole[:i], cut, *whole[i + 1 :]])


@pytest.mark.parametrize("layout_of_pages, at", [("heads_first", 0), ("pages_first", 2)])
def test_heads_of_queries_are_those_of_pages_if_there_are_as_many(layout_of_pages, at):
    for heads, key_heads, dim in itertools.product((2, 4), (1, 2, 4), (1, 2, 4)):
        pages = (key_heads, 6, 3, dim) if at == 0 else (6, 3, key_heads, dim)
        rule = paged.signature(layout_of_pages, [QUERY] * 5).rule([(5, 7, heads, dim), pages, pages, (5, 8), (5,)])
        (query, *of_pages, tables, lengths), (out, lse) = rule.operand_mappings, rule.result_mappings
        assert [mapping[at] == query[2] for mapping in of_pages] == [heads == key_heads] * 2
        assert {tables[0], *lengths, out[0], lse[0]} == {query[0]}
        assert {out[2], lse[1]} == {query[2]}


@pytest.mark.parametrize("keys, runs", [(512, 4), (192, 3), (129, 129), (128, 1)])
def test_keys_are_sorted_by_tiles(keys, runs):
    positions = jnp.arange(keys)[None, ::-1]
    places = sequence._places({"key": np.zeros((1, keys, 1, 8)), "key_positions": positions})
    assert places.tolist() == [list(range(runs))[::-1]]


def test_keys_past_the_length_are_the_last_whatever_their_segment():
    of_runs = lambda *numbers: jnp.repeat(jnp.array(numbers, jnp.int32), 128)[None]
    arrays = {"key": np.zeros((1, 512, 1, 8)), "key_lengths": jnp.array([256])}
    arrays |= {"key_segments": of_runs(1, 0, 0, 0), "key_positions": of_runs(4, 5, 7, 6)}
    assert sequence._places(arrays).tolist() == [[1, 0, 3, 2]]
