"""Calls on one GPU, and sharded over several of one host.

    python -m benchmarks.scaling --json=benchmarks/results/h200/scaling.json
    python -m benchmarks.scaling --case=attention_zigzag_gradient --devices=4

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from benchmarks import results as measured
from benchmarks.report import draw_bars, markdown
from benchmarks.results import Record, Results, Run
from jaxsoftmax._attention import sequence

FLAGS = flags.FLAGS
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

    call: Callable[..., Any]
    operands: Callable[[int], Arrays]
    specs: Mapping[str, P]
    rounds: Callable[[int], int] | None = None  # of the zigzag order, by the number of devices
    ring: bool = False
    copies: int = 1


def _logits(shrunk: int, *, rows: int = _ROWS) -> Arrays:
    shape, keys = (rows // shrunk, _COLS // shrunk), jax.random.split(jax.random.key(0), 3)
    x, t = (4 * jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    return {"x": x, "t": t, "labels": jax.random.randint(keys[2], shape[:1], 0, shape[1])}


def _hidden_states(shrunk: int) -> Arrays:
    rows, columns, embedding = _ROWS // shrunk, _COLS // shrunk, max(_EMBEDDING // shrunk, 64)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (rows, embedding), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (embedding, columns), jnp.bfloat16) / embedding**0.5
    return {"hidden": hidden, "weight": weight, "labels": jax.random.randint(keys[2], (rows,), 0, columns)}


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
    return _of_hidden(norm(jax.lax.scan(block, x, weights)[0]), outer["head"], batch["labels"])


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


def _value_and_vjp(function: Callable[..., Any], operands: Arrays) -> Any:
    out, pull = jax.vjp(function, operands["x"])
    return out, *pull(operands["t"])


_loss = jaxsoftmax.softmax_cross_entropy_with_integer_labels
_mean = lambda x, labels: _loss(x, labels).mean()
_weighted = lambda x, labels: _loss(x, labels, weights=1 / labels.size).sum()
_of_hidden = lambda hidden, weight, labels: jaxsoftmax.linear_cross_entropy(
    hidden, weight, labels, weights=1 / labels.size
).sum()
_OF_HIDDEN: dict[str, Callable[[Arrays], Any]] = {
    "linear_loss": lambda a: _of_hidden(**a),
    "linear_loss_gradient": lambda a: jax.value_and_grad(_of_hidden, (0, 1))(a["hidden"], a["weight"], a["labels"]),
}
_OF_ROWS: dict[str, Callable[[Arrays], Any]] = {
    "loss": lambda a: _mean(a["x"], a["labels"]),
    "loss_gradient": lambda a: jax.value_and_grad(_mean)(a["x"], a["labels"]),
    "loss_weighted_gradient": lambda a: jax.value_and_grad(_weighted)(a["x"], a["labels"]),
    "softmax": lambda a: jaxsoftmax.softmax(a["x"]),
    "softmax_value_and_vjp": functools.partial(_value_and_vjp, jaxsoftmax.softmax),
    "top_k": lambda a: jaxsoftmax.top_k_softmax(a["x"], _TOP),
}


# In how many rounds sequences are dealt, by kind of call.
_ROUNDS: dict[str, Callable[[int], int]] = {
    "zigzag": lambda devices: 1,
    "packed": lambda devices: _LENGTH // (2 * devices * _PIECE),
}


@functools.cache
def cases() -> dict[str, Case]:
    """Every case by its name."""
    found = {}
    kinds = [(kind, _LENGTH, False) for kind in ("full", "causal", "zigzag", "packed")]
    kinds += [("zigzag", _LONG, False), ("zigzag", _LENGTH, True), ("packed", _LENGTH, True), ("zigzag", _LONG, True)]
    for (kind, length, ring), gradient in itertools.product(kinds, (False, True)):
        rules = {} if kind == "full" else {"is_causal": True}
        rows = P(None, "d")
        specs = dict.fromkeys(("query", "key", "value", "d_out", "segments"), rows) | {"positions": P("d")}
        make = functools.partial(_attention, length=length, documents=kind == "packed")
        call = functools.partial(_attend, gradient, rules)
        name = f"attention_{kind}{f'_{length}' * (length != _LENGTH)}{'_ring' * ring}{'_gradient' * gradient}"
        found[name] = Case(call, make, specs, _ROUNDS.get(kind), ring)
    for name, call in _OF_ROWS.items():
        found[f"{name}_columns"] = Case(call, _logits, {"x": P(None, "d"), "t": P(None, "d"), "labels": P()})
        found[f"{name}_rows"] = Case(call, _logits, dict.fromkeys(("x", "t", "labels"), P("d")))
    for name, call in _OF_HIDDEN.items():
        found[f"{name}_columns"] = Case(call, _hidden_states, {"hidden": P(), "weight": P(None, "d"), "labels": P()})
        found[f"{name}_rows"] = Case(call, _hidden_states, {"hidden": P("d"), "weight": P(), "labels": P("d")})
    for name in ("loss", "loss_gradient"):
        specs = {"x": P(None, "d"), "t": P(None, "d"), "labels": P()}
        found[f"{name}_{_MANY_ROWS}_columns"] = Case(_OF_ROWS[name], functools.partial(_logits, rows=_MANY_ROWS), specs)
    rows = P("data", "d")
    specs = {"weights": P(), "positions": P("d")} | dict.fromkeys(("tokens", "labels", "segments"), rows)
    make_gpt = {kind: functools.partial(_gpt_operands, documents=kind == "packed") for kind in ("zigzag", "packed")}
    for kind, ring, copies in (("zigzag", False, 1), ("zigzag", True, 1), ("zigzag", False, 2), ("packed", False, 1)):
        name = f"gpt_{kind}_{_LONG}{'_ring' * ring}{f'_data_{copies}' * (copies > 1)}"
        found[name] = Case(_gpt, make_gpt[kind], specs, _ROUNDS[kind], ring, copies)
    return found


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
    before, sequence.MOST_GATHERED = sequence.MOST_GATHERED, 0 if ring else 2**62
    try:
        yield
    finally:
        sequence.MOST_GATHERED = before


@functools.lru_cache(1)
def _on_one(call: Callable[..., Any], make: Callable[[int], Arrays], shrunk: int) -> tuple[Arrays, Any]:
    """The operands, and the compiled call."""
    whole = jax.jit(lambda: make(shrunk))()
    return whole, jax.jit(call).lower(whole).compile()


def measure(name: str, devices: int, rounds: int, shrunk: int) -> Record:
    """A case on one device and on `devices`."""
    case = cases()[name]
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
        "case": {"name": name, "op": "scaling", "tags": [], "devices": devices, "shrunk": shrunk},
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


def line(record: Record) -> str:
    """A record in one line."""
    return (
        f"{record['case']['name']:<34} {record['one_us']:10.1f} us on one, {record['us']:10.1f} on "
        f"{record['case']['devices']}: {record['efficiency']:.3f}  difference {record['difference']:.1e}  "
        f"{record['collectives']}"
    )


def _newest(runs: Sequence[Run]) -> dict[tuple[str, int, str], Record]:
    """The newest record of each card, number of devices and case, in this order."""
    found: dict[tuple[str, int, str], Record] = {}
    for run in reversed(runs):
        found |= {
            (run.card, record["case"]["devices"], record["case"]["name"]): record for record in run.records.values()
        }
    return dict(sorted(found.items()))


def _share(record: Record, name: str) -> str:
    """A mean of the GPUs, in % of the time in which they are busy; nothing where no profile was taken."""
    return f"{100 * np.mean(record[name]) / np.mean(record['busy_us']):.1f}" if "busy_us" in record else ""


def table(results: Results) -> str:
    """Every case that was measured, with columns for each card and number of devices."""
    newest = _newest(measured.topic_runs("scaling", results.folder))
    places = list(dict.fromkeys((card, devices) for card, devices, _ in newest))
    rows = []
    for name in sorted({name for *_, name in newest}):
        found = [newest.get((*place, name)) for place in places]
        facts = lambda r: [f"{r['one_us'] / 1e3:.4g}", f"{r['efficiency']:.2f}", _share(r, "alone_us")]
        cells = [facts(record) if record else [""] * 3 for record in found]
        last = next(record for record in reversed(found) if record)
        exchanged = ", ".join(f"{n} {kind}" for kind, n in last["collectives"].items()) or "nothing"
        rows.append([name, *itertools.chain(*cells), exchanged])
    heads = [["one, ms", f"efficiency on {devices} {card}", "alone, %"] for card, devices in places]
    return markdown(["call", *itertools.chain(*heads), "exchanges"], rows)


def draw(pyplot: Any, runs: Sequence[Run]) -> Any:
    """The efficiency of each case, with a bar for each number of devices."""
    found = {(name, devices): record["efficiency"] for (_, devices, name), record in _newest(runs).items()}
    names = [name for name in cases() if any(name == of for of, _ in found)]
    counts = sorted({devices for _, devices in found})
    figure, axes = pyplot.subplots(figsize=(8, 0.3 * len(names) + 1.5), layout="constrained")
    series = {f"{devices} GPUs": [found.get((name, devices), 0.0) for name in names] for devices in counts}
    draw_bars(axes, names, series)
    axes.axvline(1, color="k", linestyle="--")
    axes.set(xlabel="time on one GPU / number of GPUs / time on all", title="Efficiency of several GPUs")
    axes.legend(fontsize=8)
    return figure


def main(_: Any) -> None:
    known = list(cases())
    chosen = FLAGS.case or known
    if unknown := [name for name in chosen if name not in known]:
        raise app.UsageError(f"--case: got {', '.join(unknown)}, wanted some of {', '.join(known)}.")
    if len(jax.devices()) < FLAGS.devices:
        raise app.UsageError(f"--devices: got {FLAGS.devices}, wanted at most the {len(jax.devices())} that there are.")
    header = measured.header(commit=FLAGS.commit, seed=0, rounds=FLAGS.rounds) | {"topic": "scaling"}
    shrunk = 1 if jax.default_backend() == "gpu" else _SHRUNK
    records: list[Record] = []
    for name in chosen:
        records.append(measure(name, FLAGS.devices, FLAGS.rounds, shrunk))
        print(line(records[-1]), flush=True)
        if FLAGS.json:
            measured.write(pathlib.Path(FLAGS.json), header, records)


if __name__ == "__main__":
    flags.DEFINE_list("case", [], "Names of cases; default: all.")
    flags.DEFINE_integer("devices", 2, "Over how many devices the calls are sharded.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Rounds, of which the best counts.", lower_bound=1)
    flags.DEFINE_string("json", None, "The result file; written after every case.")
    flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")
    app.run(main)
