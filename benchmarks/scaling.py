"""Measures calls on one GPU, and sharded over several of one host.

Efficiency is the time on one device, divided by the number of devices and by the time on all of them. Time is the wall
clock of calls that are enqueued one after another, the least of several rounds, in which one device and all of them
alternate. Results on all are compared with those on one, shard by shard. The profiler says for how long a device was
busy, and for how long with collectives, beside other kernels or alone.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from benchmarks import cases, impls
from benchmarks.impls import Options
from jaxsoftmax._attention import sequence

_SECONDS, _MOST_CALLS, _PROFILED_CALLS = 0.2, 20, 5  # of calls that are enqueued one after another
_ROWS, _MANY_ROWS, _COLS, _TOP, _EMBEDDING = 8192, 32768, 128256, 64, 4096
_LENGTH, _LONG, _HEADS, _KEY_HEADS, _DIM = 32768, 131072, 16, 4, 128
_GPT_LAYERS, _GPT_WIDTH, _GPT_VOCABULARY, _GPT_POSITIONS = 12, 768, 32000, 4096  # 128 million parameters
_DOCUMENT = 2048  # tokens, on average
_PIECE = 128  # tokens, where documents are packed
_SHRUNK = 64  # by which sizes are divided without a GPU
_COLLECTIVES = re.compile(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, its operands on one device, and how each is sharded.

    Sequences may be in zigzag order there, and keys and values may be passed round, whatever their size is. If there
    are `copies`, the mesh has an axis "data" of as many devices, and the batch as many times the rows, all alike.
    """

    name: str
    call: Callable[..., Any]
    operands: Callable[[int], Arrays]
    specs: Mapping[str, P]
    rounds: Callable[[int], int] | None = None  # of the zigzag order, by the number of devices
    ring: bool = False
    copies: int = 1
    tags: frozenset[str] = frozenset()
    op = "scaling"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "op": self.op, "tags": sorted(self.tags)}

    def record(self, options: Options) -> dict[str, Any]:
        shrunk = 1 if jax.default_backend() == "gpu" else _SHRUNK
        return measure(self, options.devices, options.rounds, shrunk)


_LOSS, _MEAN = "softmax_cross_entropy_with_integer_labels", {"reduction": "mean"}
# Calls of the registry by name: an operation, its pass and options, and the names of the operands.
_CALLS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "loss": (_LOSS, "fwd", _MEAN, "x labels"),
    "loss_gradient": (_LOSS, "value_and_grad", {}, "x labels"),
    "loss_weighted_gradient": (_LOSS, "value_and_grad", _MEAN, "x labels"),
    "softmax": ("softmax", "fwd", {}, "x"),
    "softmax_value_and_vjp": ("softmax", "value_and_vjp", {}, "x t"),
    "top_k": ("top_k_softmax", "fwd", {"k": _TOP}, "x"),
    "linear_loss": ("linear_cross_entropy", "fwd", _MEAN, "hidden weight labels"),
    "linear_loss_gradient": ("linear_cross_entropy", "value_and_grad", _MEAN, "hidden weight labels"),
}


def _of_registry(name: str, rows: int = _ROWS) -> tuple[Callable[[Arrays], Any], Callable[[int], Arrays]]:
    """The call of a name, and what makes its operands."""
    op, pass_, options, words = _CALLS[name]
    names = words.split()
    shape = (rows, _EMBEDDING, _COLS) if "hidden" in names else (rows, _COLS)
    case = cases.Case(op, pass_, "bfloat16", shape, frozenset(), (*options.items(),))
    function = impls.build(case, "ours").function

    def make(shrunk: int) -> Arrays:
        small = dataclasses.replace(case, shape=tuple(max(size // shrunk, 64) for size in shape))
        return dict(zip(names, small.make(jax.random.key(0)), strict=True))

    return lambda operands: function(*(operands[n] for n in names)), make


def _attention(shrunk: int, *, length: int, documents: bool) -> Arrays:
    length = length // shrunk
    heads = {"query": _HEADS, "key": _KEY_HEADS, "value": _KEY_HEADS, "d_out": _HEADS}
    keys = jax.random.split(jax.random.key(0), 4)
    made: Arrays = {
        name: jax.random.normal(key, (1, length, n, _DIM), jnp.bfloat16)
        for (name, n), key in zip(heads.items(), keys, strict=True)
    }
    if documents:
        made["segments"] = jnp.asarray(documents_of(length, shrunk)[None], jnp.int32)
    return made


def documents_of(length: int, shrunk: int = 1) -> np.ndarray:
    """The document of each token."""
    lengths = np.random.default_rng(0).exponential(_DOCUMENT / shrunk, 4 * length * shrunk // _DOCUMENT)
    return np.searchsorted(np.cumsum(lengths.astype(np.int64) + 1), np.arange(length), side="right")


def _gpt_operands(shrunk: int, *, documents: bool) -> Arrays:
    length, width, vocabulary = _LONG // shrunk, max(_GPT_WIDTH // shrunk, 128), max(_GPT_VOCABULARY // shrunk, 64)
    heads, layers = width // 64, _GPT_LAYERS if shrunk == 1 else 2
    key_heads = max(1, heads // 3)
    shapes = {
        "norms": (2, width),
        "query": (width, heads, 64),
        "key": (width, key_heads, 64),
        "value": (width, key_heads, 64),
        "out": (heads, 64, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    made = {name: (layers, *shape) for name, shape in shapes.items()}
    made |= {"tokens": (vocabulary, width), "positions": (_GPT_POSITIONS, width), "head": (width, vocabulary)}
    keys = iter(jax.random.split(jax.random.key(0), len(made) + 1))
    weights = {name: 0.02 * jax.random.normal(next(keys), shape) for name, shape in made.items()}
    text = jax.random.randint(next(keys), (1, length + 1), 0, vocabulary)
    batch: Arrays = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    if documents:
        batch["segments"] = jnp.asarray(documents_of(length, shrunk)[None], jnp.int32)
    return {"weights": weights | {"norms": 1 + weights["norms"]}, **batch}


def _gpt_loss(weights: Arrays, batch: Arrays) -> jax.Array:
    """The mean loss of the next token, by a GPT whose attention is causal, and within documents if there are any."""
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    outer = {name: weights.pop(name) for name in ("tokens", "positions", "head")}
    places = batch.get("positions", jnp.arange(batch["tokens"].shape[1]))
    rules = {"is_causal": True}

    def norm(x: jax.Array) -> jax.Array:
        square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
        return (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)

    @jax.checkpoint
    def feed_forward(x: jax.Array, scale: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.nn.gelu((norm(x) * scale) @ up) @ down

    def block(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
        h = norm(x) * w["norms"][None, :1]
        qkv = {name: jnp.einsum("btm,mhd->bthd", h, w[name]) for name in ("query", "key", "value")}
        x += jnp.einsum("bthd,hdm->btm", _attend(False, rules, batch | qkv), w["out"])
        return x + feed_forward(x, w["norms"][None, 1:], w["up"], w["down"]), None

    x = outer["tokens"][batch["tokens"]] + outer["positions"][places % _GPT_POSITIONS][None]
    hidden = norm(jax.lax.scan(block, x, weights)[0])
    return jaxsoftmax.linear_cross_entropy(hidden, outer["head"], batch["labels"], reduction="mean")


def _gpt(operands: Arrays) -> tuple[jax.Array, Arrays]:
    batch = {name: x for name, x in operands.items() if name != "weights"}
    return jax.value_and_grad(_gpt_loss)(operands["weights"], batch)


def _attend(gradient: bool, rules: Mapping[str, Any], operands: Arrays) -> Any:
    rest = {"query_segment_ids": operands.get("segments"), **rules}
    if "positions" in operands:
        rest |= {"query_positions": operands["positions"], "key_value_positions": operands["positions"]}
    call = functools.partial(jaxsoftmax.flash_attention, **rest)
    qkv = [operands[name] for name in ("query", "key", "value")]
    if not gradient:
        return call(*qkv)
    out, pull = jax.vjp(call, *qkv)
    return out, *pull(operands["d_out"])


# In how many rounds sequences are dealt, by kind of call.
_ROUNDS: dict[str, Callable[[int], int]] = {
    "zigzag": lambda devices: 1,
    "packed": lambda devices: _LENGTH // (2 * devices * _PIECE),
}


def _cases() -> Iterator[Case]:
    kinds = [(kind, _LENGTH, False) for kind in ("full", "causal", "zigzag", "packed")]
    kinds += [("zigzag", _LONG, False), ("zigzag", _LENGTH, True), ("packed", _LENGTH, True), ("zigzag", _LONG, True)]
    for (kind, length, ring), gradient in itertools.product(kinds, (False, True)):
        rules = {} if kind == "full" else {"is_causal": True}
        rows = P(None, "d")
        specs = dict.fromkeys(("query", "key", "value", "d_out", "segments"), rows) | {"positions": P("d")}
        make = functools.partial(_attention, length=length, documents=kind == "packed")
        call = functools.partial(_attend, gradient, rules)
        name = f"attention_{kind}{f'_{length}' * (length != _LENGTH)}{'_ring' * ring}{'_gradient' * gradient}"
        yield Case(name, call, make, specs, _ROUNDS.get(kind), ring)
    by_columns = dict[str, P].fromkeys(("x", "t", "weight"), P(None, "d")) | {"hidden": P(), "labels": P()}
    by_rows = dict[str, P].fromkeys(("x", "t", "hidden", "labels"), P("d")) | {"weight": P()}
    for name in _CALLS:
        call = _of_registry(name)
        yield Case(f"{name}_columns", *call, by_columns)
        yield Case(f"{name}_rows", *call, by_rows)
    for name in ("loss", "loss_gradient"):
        yield Case(f"{name}_{_MANY_ROWS}_columns", *_of_registry(name, _MANY_ROWS), by_columns)
    rows = P("data", "d")
    specs = {"weights": P(), "positions": P("d")} | dict.fromkeys(("tokens", "labels", "segments"), rows)
    make_gpt = {kind: functools.partial(_gpt_operands, documents=kind == "packed") for kind in ("zigzag", "packed")}
    for kind, ring, copies in (("zigzag", False, 1), ("zigzag", True, 1), ("zigzag", False, 2), ("packed", False, 1)):
        name = f"gpt_{kind}_{_LONG}{'_ring' * ring}{f'_data_{copies}' * (copies > 1)}"
        yield Case(name, _gpt, make_gpt[kind], specs, _ROUNDS[kind], ring, copies)


TABLE = cases.Table(_cases, {})


def _dealt(case: Case, x: jax.Array, devices: int, length: int | None) -> jax.Array:
    """An array in zigzag order along a sequence, if it has one."""
    rounds = case.rounds and case.rounds(devices)
    return jaxsoftmax.zigzag(x, 1, devices, rounds) if rounds and x.shape[1:2] == (length,) else x


def _length(operands: Arrays) -> int | None:
    return next((operands[name].shape[1] for name in ("query", "tokens") if name in operands), None)


def _sharded(case: Case, operands: Arrays, mesh: Mesh) -> Arrays:
    """The operands on all devices."""
    devices, length = mesh.shape["d"], _length(operands)
    reordered = jax.tree.map(lambda x: _dealt(case, x, devices, length), operands)
    if case.rounds:
        reordered["positions"] = jaxsoftmax.zigzag(jnp.arange(length), 0, devices, case.rounds(devices))
    if case.copies > 1:
        reordered |= {
            name: jnp.repeat(x, case.copies, 0) for name, x in reordered.items() if case.specs[name][:1] == ("data",)
        }
    return {name: jax.device_put(x, NamedSharding(mesh, case.specs[name])) for name, x in reordered.items()}


def _difference(case: Case, devices: int, length: int | None, got: Any, want: Any) -> float:
    """The largest difference from one device's results, relative to the largest number of each."""
    largest = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = _dealt(case, b, devices, length)
        size = max(float(jnp.abs(b).max()), float(jnp.finfo(jnp.float32).tiny))
        for shard in a.addressable_shards:
            mine = jax.device_put(shard.data, next(iter(b.devices()))).astype(jnp.float32)
            largest.append(float(jnp.abs(mine - b[shard.index].astype(jnp.float32)).max()) / size)
    return max(largest)


def _union(spans: list[tuple[float, float]]) -> float:
    """How much of an axis some intervals cover."""
    covered, end = 0.0, -float("inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def busy(profile: Any, calls: int) -> dict[str, list[float]]:
    """For how many microseconds of a call each GPU runs something, collectives, and nothing but collectives.

    The profile is a `jax.profiler.ProfileData`; without a GPU there is nothing. A collective runs from its start on a
    GPU, so that it includes waiting for the others.
    """
    found: dict[str, list[float]] = {}
    for plane in profile.planes:
        events = [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]
        if not plane.name.startswith("/device:GPU") or not events:
            continue
        spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for event in events:
            spans["nccl" in event.name].append((event.start_ns, event.start_ns + event.duration_ns))
        whole = _union(spans[False] + spans[True])
        times = {"busy_us": whole, "collectives_us": _union(spans[True]), "alone_us": whole - _union(spans[False])}
        for name, nanoseconds in times.items():
            found.setdefault(name, []).append(round(nanoseconds / 1e3 / calls, 1))
    return found


def _profile(program: Any, operands: Arrays, calls: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _seconds(program, operands, calls)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return busy(jax.profiler.ProfileData.from_file(str(path)), calls)


def _seconds(program: Any, operands: Arrays, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        last = program(operands)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / calls


@contextlib.contextmanager
def _passed_round(ring: bool) -> Iterator[None]:
    """Attention that is traced within gets its keys in a ring if `ring`, and else gathers them."""
    before, sequence.MAX_GATHERED_ELEMENTS = sequence.MAX_GATHERED_ELEMENTS, 0 if ring else 2**62
    try:
        yield
    finally:
        sequence.MAX_GATHERED_ELEMENTS = before


@functools.lru_cache(1)
def _on_one(call: Callable[..., Any], make: Callable[[int], Arrays], shrunk: int) -> tuple[Arrays, Any]:
    """The operands, and the compiled call."""
    whole = jax.jit(lambda: make(shrunk))()
    return whole, jax.jit(call).lower(whole).compile()


def measure(case: Case, devices: int, rounds: int, shrunk: int) -> dict[str, Any]:
    """A case on one device and on `devices`."""
    sizes = (case.copies, devices // case.copies)
    mesh = jax.make_mesh(sizes, ("data", "d"), (AxisType.Auto,) * 2, devices=jax.devices()[:devices])
    whole, one = _on_one(case.call, case.operands, shrunk)
    parts = _sharded(case, whole, mesh)
    with _passed_round(case.ring):
        every = jax.jit(lambda operands: case.call(operands)).lower(parts).compile()  # traced anew
    difference = _difference(case, sizes[1], _length(whole), every(parts), one(whole))
    calls = max(1, min(_MOST_CALLS, int(_SECONDS / _seconds(one, whole, 1))))
    times = [(_seconds(one, whole, calls), _seconds(every, parts, calls)) for _ in range(rounds)]
    alone, together = (1e6 * min(column) for column in zip(*times, strict=True))
    text, memory, memory_of_one = every.as_text() or "", every.memory_analysis(), one.memory_analysis()
    return {
        "case": case.describe() | {"devices": devices, "shrunk": shrunk},
        "one_us": round(alone, 1),
        "us": round(together, 1),
        "efficiency": round(case.copies * alone / devices / together, 3),
        "difference": difference,
        "collectives": dict(collections.Counter(_COLLECTIVES.findall(text))),
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
        "temporary_bytes_of_one": None if memory_of_one is None else memory_of_one.temp_size_in_bytes,
        "operand_bytes": None if memory is None else memory.argument_size_in_bytes,
        **_profile(every, parts, min(calls, _PROFILED_CALLS)),
    }
