"""The loss of `hidden @ weight` on one GPU, beside bare products of the same shapes and peers, in bfloat16.

    python -m benchmarks.linear --budget_s=500 --json=benchmarks/results/h200/linear.json
    python -m benchmarks.linear --case=8192x4096x128256 --impl=ours,products,liger,quack --peers_path=/tmp/cute

The losses need one product, and each gradient one more; `products` are as many bare ones with 16-bit results, for a
gradient of the logits that is given. `ours` has the mean's weights before its gradients, and `ours_mean` calls
`.mean()`. Time is the wall clock of calls that are enqueued one after another, in rounds in which the programs take
turns: the best round and the median. Torch's peers follow in a process of their own, beside that process' own products;
`XLA_PYTHON_CLIENT_MEM_FRACTION=0.7` leaves them memory.
"""

import dataclasses
import functools
import importlib
import itertools
import math
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jaxsoftmax
from benchmarks import protocol, report
from benchmarks import results as measured
from benchmarks.runner import Peers, caught

FLAGS = flags.FLAGS
PASSES = {"forward": (), "gradient": ("hidden", "weight"), "hidden": ("hidden",)}  # what has a gradient
SHAPES = ((8192, 4096, 128256), (32768, 2560, 128256), (8192, 4096, 262144), (2048, 4096, 262144))
FEW_COLUMNS = ((16384, 1024, 50304), (16384, 2048, 50304))  # measured with gradients
IMPLS, LIBRARIES = ("ours", "ours_mean", "products", "optax", "tokamax"), ("liger", "quack")
_CALLS = 3  # enqueued at once
_SHRUNK = 64  # by which sizes are divided without a GPU
_SOME = 256  # tokens and columns whose gradients are checked
_ALLOWED = 0.02  # relative error of the results; those of 16-bit logits err by 0.004

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape and what is differentiated."""

    tokens: int
    embedding: int
    vocabulary: int
    pass_: str

    @property
    def name(self) -> str:
        return f"{self.pass_}_{self.tokens}x{self.embedding}x{self.vocabulary}"

    @property
    def moving(self) -> tuple[str, ...]:
        return PASSES[self.pass_]

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.embedding * self.vocabulary * (1 + len(self.moving))

    def shrunk(self, by: int) -> "Case":
        return Case(self.tokens // by, self.embedding // by, self.vocabulary // by, self.pass_)

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "op": "linear",
            "tags": [],
            **dataclasses.asdict(self),
            "moving": self.moving,
            "flops": self.flops,
        }

    def operands(self) -> Arrays:
        """Logits have a standard deviation of 3; the gradient of the logits is for `products` alone."""
        m, e, v = self.tokens, self.embedding, self.vocabulary
        keys = jax.random.split(jax.random.key(0), 4)
        draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        hidden, weight, d_logits = draw(keys[0], (m, e)), draw(keys[1], (e, v)), draw(keys[2], (m, v))
        weight = weight * jnp.bfloat16(3 / e**0.5)
        labels = jax.random.randint(keys[3], (m,), 0, v)
        return {"hidden": hidden, "weight": weight, "labels": labels, "d_logits": d_logits}


_ALL = [*itertools.product(PASSES, SHAPES), *itertools.product(["gradient"], FEW_COLUMNS)]
CASES = {case.name: case for pass_, shape in _ALL for case in [Case(*shape, pass_)]}


def _ours(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mean: bool) -> jax.Array:
    call = functools.partial(jaxsoftmax.linear_cross_entropy, hidden, weight, labels)
    return call(weights=1 / labels.size).sum() if mean else call()


def _ours_mean(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mean: bool) -> jax.Array:
    losses = jaxsoftmax.linear_cross_entropy(hidden, weight, labels)
    return losses.mean() if mean else losses


def _optax(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mean: bool) -> jax.Array:
    logits = jnp.dot(hidden, weight, preferred_element_type=jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean() if mean else losses


def _tokamax(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mean: bool) -> jax.Array:
    loss = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
    return loss(hidden, labels, weight, reduction="mean" if mean else "none", implementation="chunked_xla")


_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "ours": _ours,
    "ours_mean": _ours_mean,
    "optax": _optax,
    "tokamax": _tokamax,
}


def _call(name: str, moving: Sequence[str], arrays: Arrays) -> tuple[jax.Array, Arrays]:
    """The losses, or their mean and its gradients."""
    known = {n: arrays[n] for n in ("hidden", "weight", "labels")}
    if name == "products":
        h, w, g = arrays["hidden"], arrays["weight"], arrays["d_logits"]
        gradients = {"hidden": lambda: g @ w.T, "weight": lambda: h.T @ g}
        return h @ w, {n: gradients[n]() for n in moving}
    if not moving:
        return _LOSSES[name](**known, mean=False), {}
    of_moving = lambda moved: _LOSSES[name](**known | moved, mean=True)
    return jax.value_and_grad(of_moving)({n: known[n] for n in moving})


@jax.jit
def _truth(arrays: Arrays) -> Arrays:
    """The losses, and the gradients of their mean for some tokens and some columns, from float32 logits in blocks."""
    h, w, y = arrays["hidden"], arrays["weight"], arrays["labels"]
    logits = lambda h, w: jnp.dot(h, w, preferred_element_type=jnp.float32)
    lse = jax.lax.map(lambda row: jax.nn.logsumexp(logits(row, w)), h, batch_size=_SOME)
    picked = (h.astype(jnp.float32) * w[:, y].T).sum(1)
    slope = lambda h, w, lse, y: jnp.exp(logits(h, w) - lse[:, None]) - jax.nn.one_hot(y, w.shape[1])
    of_rows = slope(h[:_SOME], w, lse[:_SOME], y[:_SOME]) @ w.T.astype(jnp.float32)
    of_columns = h.T.astype(jnp.float32) @ slope(h, w[:, :_SOME], lse, y)
    return {"losses": lse - picked, "hidden": of_rows / len(y), "weight": of_columns / len(y)}


def _checked(name: str, found: tuple[jax.Array, Arrays], truth: Arrays) -> dict[str, Any]:
    """The largest error of a result, relative to its size, and whether that is too large; of products nothing."""
    if name == "products":
        return {}
    value, gradients = found
    pairs = [(value, truth["losses"] if value.ndim else truth["losses"].mean())]
    pairs += [(x[:_SOME] if n == "hidden" else x[:, :_SOME], truth[n]) for n, x in gradients.items()]
    size = lambda x: jnp.sqrt(jnp.square(x).mean())
    # NumPy's maximum of numbers with NaN is NaN, which is not right.
    error = float(np.max([size(got.astype(jnp.float32) - want) / size(want) for got, want in pairs]))
    reason = f"relative error {error:.2e}, allowed {_ALLOWED}"
    known = {"error": error if math.isfinite(error) else None}
    return known | ({} if error <= _ALLOWED else {"status": "WRONG", "reason": reason})


def measure(case: Case, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """A case, by every implementation of this process; those that are wrong or fail have no time."""
    arrays = jax.jit(case.operands)()
    truth, variants = _truth(arrays), []
    impls: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, entry in impls.items():
        with caught(entry):
            program: Any = jax.jit(functools.partial(_call, name, case.moving)).lower(arrays).compile()
            entry["temp_bytes"] = program.memory_analysis().temp_size_in_bytes
            entry |= {"status": "ok"} | _checked(name, jax.block_until_ready(program(arrays)), truth)
            if entry["status"] == "ok":
                variants.append(protocol.Variant(name, functools.partial(_calls, program, arrays)))
    clock, timings = protocol.measure(variants, buffers=1, rounds=rounds, launches=1, device_clock=False)
    for name, timing in timings.items():
        samples = [us / _CALLS for us in itertools.chain(*timing.rounds)]
        impls[name] |= measured.summary(samples) | {"rounds_us": [round(us, 1) for us in samples]}
    _compare(case.flops, impls, impls.get("products", {}))
    return {"case": case.described(), "clock": clock, "impls": impls}


def _calls(program: Any, arrays: Arrays, _: int) -> Any:
    found = None
    for _ in range(_CALLS):
        found = None  # frees the results of the call before
        found = program(arrays)
    return found


def _compare(flops: int, impls: Mapping[str, dict[str, Any]], products: Mapping[str, Any]) -> None:
    """Adds the rates, and the times as multiples of those of the products of the same process, by the best rounds."""
    for entry in impls.values():
        if "min_us" in entry:
            entry["tflop_per_s"] = round(flops / entry["min_us"] / 1e6, 1)
            if "min_us" in products:
                entry["x_products"] = round(entry["min_us"] / products["min_us"], 4)


def add_peers(record: dict[str, Any], answer: Mapping[str, Any]) -> None:
    """Adds what torch's process has measured of a case, beside its own products."""
    record["peers_products"] = answer.get("products")
    _compare(record["case"]["flops"], answer["impls"], answer.get("products", {}))
    record["impls"] |= answer["impls"]


def main(_: Any) -> None:
    started, known = time.monotonic(), (*IMPLS, *LIBRARIES)
    if unknown := [name for name in FLAGS.impl if name not in known]:
        raise app.UsageError(f"--impl: got {', '.join(unknown)}, wanted some of {', '.join(known)}.")
    chosen = [case for name, case in CASES.items() if re.search(FLAGS.case, name)]
    names, theirs = ([name for name in FLAGS.impl if name in of] for of in (IMPLS, LIBRARIES))
    # A run for `.mean()` stands beside the table of the losses, whose rows have the peers.
    topic = "linear mean" if "ours_mean" in names else "linear"
    header = measured.header(commit=FLAGS.commit, seed=0, rounds=FLAGS.rounds) | {"topic": topic}
    in_time = lambda _: time.monotonic() < started + FLAGS.budget_s
    records: list[dict[str, Any]] = []

    def show(record: dict[str, Any]) -> None:
        print(report.line(record), flush=True)
        if FLAGS.json:
            measured.write(pathlib.Path(FLAGS.json), header | {"clocks_after": measured.clocks()}, records)

    for case in itertools.takewhile(in_time, chosen):
        here = case if jax.default_backend() == "gpu" else case.shrunk(_SHRUNK)
        records.append(measure(here, names, FLAGS.rounds))
        show(records[-1])
    if theirs:
        process = Peers(theirs, FLAGS.rounds, FLAGS.peers_path, "benchmarks.linear_peers")
        for record in itertools.takewhile(in_time, records):
            add_peers(record, process.measure(record["case"]))
            show(record)
        process.close()


if __name__ == "__main__":
    flags.DEFINE_string("case", "", "A regular expression searched in the cases' names; default: all.")
    flags.DEFINE_list("impl", ["ours", "products", "optax"], f"Some of {', '.join((*IMPLS, *LIBRARIES))}.")
    flags.DEFINE_integer("rounds", 4, "Rounds, of which the best counts.", lower_bound=1)
    flags.DEFINE_float("budget_s", math.inf, "Start no case after so many seconds.")
    flags.DEFINE_string("json", None, "The result file; written after every case.")
    flags.DEFINE_string("commit", None, "The commit that is measured; default: ask git.")
    flags.DEFINE_string("peers_path", "", "PYTHONPATH of torch's side, where peers are installed.")
    app.run(main)
