"""Attention over a sequence that is sharded over devices, against float64, and what the devices exchange for it."""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import flash_attention, zigzag
from jaxsoftmax._attention import sequence, sharding
from pallas_kernels.attention.problem import Op
from tests import attention_oracle
from tests.jaxsoftmax.sharded import exchanged, mesh, put
from tests.pairwise import pairwise

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

B, T, S, N, K, H = 2, 32, 32, 4, 2, 8
RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray]


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


QKV: Arrays = {"query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, H)}
CT = normal(B, T, N, H), normal(B, T, N)
SEGMENTS = np.sort(RNG.integers(0, 3, (B, T))).astype(np.int32)
SEES = RNG.random((B, 1, T, S)) < 0.7
SEES[0, 0, 3] = False
ZIGZAG = np.asarray(zigzag(jnp.arange(T), 0, 4))
SHUFFLED = np.stack([RNG.permutation(T) for _ in range(B)]).astype(np.int32)

CAUSAL: dict[str, Any] = {"is_causal": True}
# The operands, besides queries, keys and values, and the rules.
CASES: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "full": ({"sinks": normal(N)}, {}),
    "causal": ({}, CAUSAL),
    "window": ({"query_segment_ids": SEGMENTS, "sinks": normal(N)}, {"local_window_size": (9, 2)}),
    "ends": (
        {"query_seq_lengths": np.array([30, 11], np.int32), "key_value_seq_lengths": np.array([32, 20], np.int32)},
        CAUSAL | {"causal_alignment": "bottom_right"},
    ),
    "bias": ({"bias": normal(1, N, T, S), "sinks": normal(N)}, CAUSAL),
    "bias of keys": ({"bias": normal(B, 1, 1, S)}, {"local_window_size": 6}),
    "bias of queries": ({"bias": normal(B, 1, T, 1), "sinks": normal(N)}, CAUSAL),
    "mask": ({"mask": SEES, "query_seq_lengths": np.array([32, 9], np.int32)}, CAUSAL),
    "zigzag": ({"query_positions": ZIGZAG, "key_value_positions": ZIGZAG, "query_segment_ids": SEGMENTS}, CAUSAL),
    "shuffled": (
        {
            "query_positions": SHUFFLED,
            "key_value_positions": SHUFFLED[::-1],
            "key_value_seq_lengths": np.array([25, 32], np.int32),
        },
        {"local_window_size": (7, 5)},
    ),
    "window as data": (
        {"query_positions": SHUFFLED, "key_value_positions": SHUFFLED[::-1]},
        {"local_window_size": jnp.array([7, 5])},
    ),
    "causal as data": ({"query_segment_ids": SEGMENTS}, {"is_causal": jnp.array(True)}),
    "shuffled and masked": ({"query_positions": SHUFFLED, "mask": SEES}, CAUSAL),
}
FLOATS = ("query", "key", "value", "bias", "sinks")


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a piece of the zigzag."""
    monkeypatch.setattr(sequence, "SORT_BLOCK", T // 8)


def operands_of(case: str) -> Arrays:
    return QKV | CASES[case][0]


def pass_round(monkeypatch: pytest.MonkeyPatch, most: int, case: str) -> None:
    """A ring where there are more than `most` numbers of keys and values."""
    monkeypatch.setattr(sequence, "MAX_GATHERED_ELEMENTS", most)
    if case in BY_GROUPS:
        monkeypatch.setattr(sequence, "MAX_OUTPUTS", 0)
        monkeypatch.setattr(sequence, "MIN_GROUP_QUERIES", 1)


@functools.cache
def truth(case: str) -> dict[str, np.ndarray]:
    """Output, logsumexp and gradients in float64, with positions as a mask."""
    given, rules = dict(CASES[case][0]), dict(CASES[case][1])
    if "query_positions" in given:
        i = np.broadcast_to(given.pop("query_positions"), (B, T))[:, None, :, None]
        j = np.broadcast_to(given.pop("key_value_positions", np.arange(S)), (B, S))[:, None, None, :]
        left, right = rules.pop("local_window_size", (None, None))
        seen = j <= i if rules.pop("is_causal", False) else (j >= i - left) & (j <= i + right)
        given["mask"] = seen & given.get("mask", True)
    if "query_segment_ids" in given:
        given["key_value_segment_ids"] = given["query_segment_ids"]
    if isinstance(window := rules.get("local_window_size"), int):
        rules["local_window_size"] = window, window
    found = attention_oracle.forward(*QKV.values(), **given, **rules)
    gradients = attention_oracle.gradients(*QKV.values(), d_out=CT[0], d_lse=np.swapaxes(CT[1], 1, 2), **given, **rules)
    return {"out": found.out, "lse": np.swapaxes(found.lse, 1, 2)} | gradients


def derivatives(case: str, operands: Any) -> dict[str, jax.Array]:
    """Output, logsumexp and gradients."""
    moving = {name: operands[name] for name in FLOATS if name in operands}
    rest = {name: x for name, x in operands.items() if name not in moving}
    call = lambda moving: flash_attention(**moving, **rest, **CASES[case][1], return_residual=True)
    (out, lse), pull = jax.vjp(call, moving)
    return {"out": out, "lse": lse} | pull(tuple(map(jnp.asarray, CT)))[0]


def agree(got: dict[str, jax.Array], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], rtol=2e-4, atol=2e-5, err_msg=name)


SEQUENCE, BATCH, HEADS, BOTH = P(None, "d"), P("m", "d"), P(None, "d", "m"), P(None, ("d", "m"))
SPECS: dict[str, tuple[P, P]] = {
    "sequence": (SEQUENCE, SEQUENCE),
    "batch": (BATCH, BATCH),
    "heads": (HEADS, HEADS),
    "two axes": (BOTH, BOTH),
    "queries": (SEQUENCE, P()),
    "other axes": (SEQUENCE, P(None, "m")),
    "shared key heads": (P(None, "m", "d"), P(None, "m")),
}
ROWS = "query_segment_ids", "query_positions", "key_value_segment_ids", "key_value_positions"


def placed(operands: Arrays, specs: tuple[P, P], kind: AxisType, everything: bool = True) -> dict[str, Any]:
    """The operands on a mesh; without `everything`, those beside queries, keys and values on none."""
    on = mesh(kind)
    found: dict[str, Any] = {}
    for name, x in operands.items():
        spec = specs[0] if name == "query" else specs[1] if name in QKV else P()
        if name in ROWS and everything and x.ndim == 2:
            spec = P(*specs[0][:2])
        found[name] = put(x, spec, on) if everything or name in QKV else jnp.asarray(x)
    return found


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
STAND_IN, REFERENCE = "stand-in", "reference"
GATHERED, IN_A_RING = 2**26, 0
# Cases in which a ring computes with one key head after another; the gradient of a bias of all heads is of all at once.
BY_GROUPS = "window", "zigzag", "ends", "bias of queries"
RINGS = ("sequence", "batch", "heads", "two axes", "shared key heads")  # whose keys are sharded as their queries are


# Every case where only the sequence is sharded; where other axes are too, those with operands of these axes.
ALIKE = "sequence", "queries"
OF_OTHER_AXES = "window", "bias", "shuffled"
HOW = (STAND_IN, REFERENCE), (GATHERED, IN_A_RING)


@pytest.mark.parametrize(
    "case, specs, way, kernels, most",
    pairwise(tuple(CASES), ALIKE, ("auto", "explicit"), *HOW)
    + pairwise(OF_OTHER_AXES, tuple(x for x in SPECS if x not in ALIKE), ("auto", "explicit", "set_mesh"), *HOW),
    indirect=["kernels"],
)
def test_each_sharding_gives_what_one_device_does(
    case: str, specs: str, way: str, kernels: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_round(monkeypatch, most, case)
    record = kernels()
    kind = AUTO if way == "auto" else EXPLICIT
    context = jax.set_mesh(mesh(kind)) if way == "set_mesh" else contextlib.nullcontext()
    with context:
        cut = placed(operands_of(case), SPECS[specs], kind, everything=way != "explicit")
        got = jax.jit(functools.partial(derivatives, case))(cut)
    agree(got, truth(case))
    parts = math.prod(mesh().shape[name] for name in sharding.mesh_axes(SPECS[specs][0][1]))
    if record:
        lengths = {(p.query_length, p.key_length) for op in Op for p in record.attended(op)}
        ring = (
            most == IN_A_RING and specs in RINGS and case not in ("bias", "mask", "bias of keys", "shuffled and masked")
        )
        assert (T // parts, S // parts if ring else S) in lengths, "the queries were gathered"
        if ring and case in BY_GROUPS:
            of_blocks = [p for p in record.attended(Op.FORWARD) if p.key_length == S // parts]
            assert {p.key_heads for p in of_blocks} == {1}
    for name in (
        ("out", "query", "key") if specs not in ("queries", "other axes") and (record or kind is EXPLICIT) else ()
    ):
        of = cut["query" if name == "out" else name].sharding
        assert got[name].sharding.is_equivalent_to(of, 4), name


@pytest.mark.parametrize("most, case", [(GATHERED, "zigzag"), (IN_A_RING, "window"), (IN_A_RING, "ends")])
def test_batch_sequence_and_heads_together(
    stand_ins: Any, most: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_round(monkeypatch, most, case)
    on = mesh(shape=(2, 2, 2), names=("b", "d", "m"))
    spec = {name: P("b", "d", "m") for name in QKV} | {name: P("b", "d") for name in ROWS}
    cut = {n: put(x, spec.get(n, P()) if x.ndim > 1 else P(), on) for n, x in operands_of(case).items()}
    agree(jax.jit(functools.partial(derivatives, case))(cut), truth(case))
    lengths = {(p.batch, p.query_length, p.key_length, p.query_heads) for op in Op for p in stand_ins.attended(op)}
    assert (B // 2, T // 2, S if most == GATHERED else S // 2, N // 2) in lengths


@pytest.mark.parametrize("name, most", [("value", GATHERED), ("value", IN_A_RING), ("bias", GATHERED)])
def test_parts_of_16_bits_are_added_in_32(
    stand_ins: Any, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four devices, which have parts of the queries, or of the sequences. In 16 bits the parts would add up to 0."""
    monkeypatch.setattr(sequence, "MAX_GATHERED_ELEMENTS", most)
    parts = np.repeat([2.0**15, 1.0, -(2.0**15), 0.0], 2)
    zeros = functools.partial(np.zeros, dtype=np.float16)
    if name == "value":  # each query has an eighth of each key's value
        operands, spec, want = {n: zeros((1, 8, 1, 1)) for n in QKV}, SEQUENCE, parts.sum() / 8 * np.ones(8)
    else:  # and here a half of each of two values, 2 and 0
        value = zeros((8, 2, 1, 1)) + np.array([2, 0], np.float16)[:, None, None]
        operands = {"query": zeros((8, 1, 1, 1)), "key": zeros((8, 2, 1, 1)), "value": value}
        spec, want = P("d"), parts.sum() / 2 * np.array([1, -1])
    cut = {n: put(x, spec) for n, x in operands.items()}
    if name == "bias":
        cut["bias"] = jnp.zeros((1, 1, 1, 2), jnp.float16)
    d_out = put(np.float16(parts.reshape(operands["query"].shape)), spec)
    pull = lambda operands, d_out: jax.vjp(lambda operands: flash_attention(**operands), operands)[1](d_out)[0][name]
    np.testing.assert_array_equal(np.asarray(jax.jit(pull)(cut, d_out)).ravel(), want)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_devices_exchange_keys_and_their_gradients_alone(stand_ins: Any, kind: AxisType) -> None:
    keys, part = B * S * K * H, B * S * K * H // 4
    forward = lambda operands: flash_attention(**operands, is_causal=True)
    gather, scatter = ("all-gather", keys), ("reduce-scatter", part)
    cut = placed(QKV, SPECS["sequence"], kind)
    assert exchanged(forward, cut) == [gather, gather]
    assert exchanged(functools.partial(derivatives, "causal"), cut) == [gather, gather, scatter, scatter]
    # Of keys that every device has, none has its own part of the gradient.
    cut = placed(QKV, SPECS["queries"], kind)
    assert exchanged(forward, cut) == []
    summed = exchanged(functools.partial(derivatives, "causal"), cut)
    assert {name for name, _ in summed} == {"all-reduce"}
    assert sum(count for _, count in summed) == 2 * keys
    cut = placed(operands_of("zigzag"), SPECS["batch"], kind)
    assert exchanged(functools.partial(derivatives, "zigzag"), cut) == [
        ("all-gather", S), ("all-gather", B * S // 2), ("all-gather", keys // 2), ("all-gather", keys // 2),
        ("reduce-scatter", part // 2), ("reduce-scatter", part // 2),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_a_ring_passes_blocks_on(stand_ins: Any, kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block comes in the first step and in the loop's; gradients travel in the loop, the last step and behind it."""
    monkeypatch.setattr(sequence, "MAX_GATHERED_ELEMENTS", IN_A_RING)
    cut = placed(QKV, SPECS["sequence"], kind)
    positions, block = ("collective-permute", S // 4), ("collective-permute", B * S * K * H // 4)
    assert exchanged(lambda operands: flash_attention(**operands, is_causal=True), cut) == [positions] * 2 + [block] * 4
    both = exchanged(functools.partial(derivatives, "causal"), cut)
    assert set(both) == {positions, block}
    # XLA may share the first step of both passes.
    assert both.count(block) in (4 + 2 + 6, 4 + 4 + 6)


def test_it_is_said_how_a_sequence_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(specs: str, op: str = "forward", **more: Any) -> str:
        given = placed(QKV, SPECS[specs], AUTO) | more
        return " ".join(jaxsoftmax.explain_attention(**given, is_causal=True, op=op).notes)

    assert "each of 4 devices computes for its 8 queries, and gathers all keys" in notes("sequence")
    assert "each of 8 devices computes for its 4 queries, and gathers" in notes("two axes", "vjp")
    assert "devices" not in " ".join(jaxsoftmax.explain_attention(**QKV).notes)
    monkeypatch.setattr(sequence, "MAX_GATHERED_ELEMENTS", IN_A_RING)
    assert "passes its keys and values round a ring: keys and values of 2048 numbers" in notes("sequence", "vjp")
    assert "groups" not in notes("sequence", "vjp")
    pass_round(monkeypatch, IN_A_RING, BY_GROUPS[0])
    assert "round a ring, 2 groups of heads one after another: keys" in notes("sequence", "vjp")
    assert "groups" not in notes("heads")
    of_queries = {"bias": normal(B, 1, T, 1)}
    assert "2 groups" in notes("sequence", **of_queries)
    assert "groups" not in notes("sequence", "vjp", **of_queries)
    assert "gathers all keys" in notes("sequence", "jvp")
    assert "gathers all keys" in notes("queries")
    assert "gathers all keys" in notes("sequence", mask=SEES)


@pytest.mark.parametrize("kernels", [STAND_IN, REFERENCE], indirect=True)
def test_queries_that_do_not_divide_are_gathered(kernels: Any) -> None:
    kernels()
    cut = NamedSharding(mesh(), SEQUENCE)
    few = {name: x[:, :30] for name, x in QKV.items()}

    def gradients(operands: dict[str, jax.Array], constrained: bool) -> Any:
        whole = lambda q, k, v: jnp.sin(flash_attention(q, k, v, is_causal=True)).sum()
        values = [jax.lax.with_sharding_constraint(operands[n], cut) if constrained else operands[n] for n in QKV]
        return jax.value_and_grad(whole, (0, 1, 2))(*values)

    got, want = (jax.jit(functools.partial(gradients, constrained=x))(few) for x in (True, False))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("case", ["zigzag", "causal", "window"])
def test_shard_map_with_gathered_keys(case: str) -> None:
    """The caller gathers, says where his queries are, and gets gradients that are reduced."""
    operands = {name: x for name, x in operands_of(case).items() if name != "sinks"}
    index = np.arange(T, dtype=np.int32)
    places = {"query_positions": index, "key_value_positions": index}
    operands = places | {"query_segment_ids": np.zeros((B, T), np.int32)} | operands
    ids = operands["query_segment_ids"]
    gather = functools.partial(jax.lax.all_gather, axis_name="d", tiled=True)

    def local(q: Any, k: Any, v: Any, ids: Any, places: Any) -> Any:
        places_of = {"query_positions": places, "key_value_positions": gather(places)}
        segments = {"query_segment_ids": ids, "key_value_segment_ids": gather(ids, axis=1)}
        return flash_attention(q, gather(k, axis=1), gather(v, axis=1), **places_of, **segments, **CASES[case][1])

    mapped = jax.shard_map(
        local, mesh=mesh(shape=(4,), names=("d",)), in_specs=(SEQUENCE,) * 4 + (P("d"),), out_specs=SEQUENCE
    )
    alone = lambda q, k, v: flash_attention(
        q, k, v, query_segment_ids=ids, **{name: operands[name] for name in places}, **CASES[case][1]
    )
    both = (lambda *qkv: mapped(*qkv, ids, operands["query_positions"])), alone
    qkv = [jnp.asarray(x) for x in QKV.values()]
    got, want = (jax.jit(jax.value_and_grad(lambda *qkv, f=f: jnp.sin(f(*qkv)).sum(), (0, 1, 2)))(*qkv) for f in both)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def check_sharded(case: str) -> None:
    cut = placed(operands_of(case), SPECS["sequence"], AUTO)
    agree(jax.jit(functools.partial(derivatives, case))(cut), truth(case))


@pytest.mark.parametrize("most", [GATHERED, IN_A_RING])
@pytest.mark.parametrize("length", [-(2**31), 2**31 - 1])
def test_lengths_at_the_ends_of_int32(most: int, length: int, stand_ins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first query and key of the last device are far enough from 0 to wrap them."""
    pass_round(monkeypatch, most, "ends")
    lengths = np.array([length, 20], np.int32)
    both = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths[::-1]}
    want = attention_oracle.forward(*QKV.values(), **{name: np.clip(x, 0, T) for name, x in both.items()})
    call = jax.jit(lambda operands: flash_attention(**operands))
    np.testing.assert_allclose(call(placed(QKV | both, SPECS["sequence"], EXPLICIT)), want.out, rtol=2e-4, atol=2e-5)


def test_positions_that_are_mapped() -> None:
    at = jnp.asarray(np.stack([SHUFFLED, SHUFFLED[::-1]]))

    def gradients(q: jax.Array, at: jax.Array) -> Any:
        call = lambda q: flash_attention(q, QKV["key"], QKV["value"], is_causal=True, query_positions=at)
        return jax.jvp(jax.grad(lambda q: jnp.sin(call(q)).sum()), (q,), (q,))

    q = jnp.asarray(QKV["query"])
    want = jax.tree.map(lambda *xs: np.stack(xs), *(gradients(q, x) for x in at))
    got = jax.vmap(gradients, (None, 0))(q, at)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def test_positions_have_defaults() -> None:
    """Those of keys are indices; those of queries are too, moved by the alignment."""
    q = QKV["query"][:, :20]
    call = functools.partial(flash_attention, q, QKV["key"], QKV["value"], is_causal=True)
    lengths = {"query_seq_lengths": jnp.array([20, 7]), "key_value_seq_lengths": jnp.array([32, 15])}
    for more in ({}, lengths):
        rules = more | {"causal_alignment": "bottom_right"}
        want = call(**rules)
        at = jnp.array([12, 8])[:, None] if more else 12
        np.testing.assert_allclose(call(key_value_positions=jnp.arange(S), **rules), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(call(query_positions=jnp.arange(20) + at, **more), want, rtol=1e-5, atol=1e-6)
    far = call(query_positions=np.full(20, 2**40, np.int64), key_value_positions=np.full(S, -(2**31), np.int32))
    np.testing.assert_allclose(far, flash_attention(q, QKV["key"], QKV["value"]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(call(query_positions=np.full(20, -1)), 0.0)
    with pytest.raises(ValueError, match=r"query_positions has shape \(7,\), expected \(2, 20\)"):
        call(query_positions=np.arange(7))
    with pytest.raises(TypeError, match="key_value_positions has dtype float32, expected integers"):
        call(key_value_positions=jnp.ones(S))
