"""Measures the loss of `hidden @ weight` beside bare products of the same shapes and peers, in bfloat16.

The losses need one product, and each gradient one more; `products` are as many bare ones with 16-bit results, for a
gradient of the logits that is given. `ours` has the mean's weights before its gradients, and `ours_mean` calls
`.mean()`. Time is the wall clock of calls that are enqueued one after another, in rounds in which the programs take
turns: the best round and the median. Torch's peers follow in a process of their own, beside that process' own products.
JAX holds its memory, of which `XLA_PYTHON_CLIENT_MEM_FRACTION=0.7` leaves them some, if
`XLA_PYTHON_CLIENT_PREALLOCATE=true`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxsoftmax
from benchmarks import results as measured
from benchmarks.cases import Table
from benchmarks.stock import load

PASSES = {"forward": (), "gradient": ("hidden", "weight"), "hidden": ("hidden",)}  # what has a gradient
SHAPES = ((8192, 4096, 128256), (32768, 2560, 128256), (8192, 4096, 262144), (2048, 4096, 262144))
FEW_COLUMNS = ((16384, 1024, 50304), (16384, 2048, 50304))  # measured with gradients
IMPLS, LIBRARIES = ("ours", "ours_mean", "products", "optax", "tokamax"), ("liger", "quack")
CALLS = 3  # enqueued at once
_SHRUNK = 64  # by which sizes are divided without a GPU
_SOME = 256  # tokens and columns whose gradients are checked
ALLOWED = 0.02  # relative error of the results; those of 16-bit logits err by 0.004

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LinearCase:
    """A shape and what is differentiated."""

    tokens: int
    embedding: int
    vocabulary: int
    pass_: str
    tags: frozenset[str] = frozenset()
    op = "linear"
    buffers = 1

    @property
    def key(self) -> "LinearCase":
        """The computation: it has a truth of its own."""
        return self

    @property
    def name(self) -> str:
        return f"{self.pass_}_{self.tokens}x{self.embedding}x{self.vocabulary}"

    @property
    def moving(self) -> tuple[str, ...]:
        return PASSES[self.pass_]

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.embedding * self.vocabulary * (1 + len(self.moving))

    def shrunk(self) -> tuple["LinearCase", dict[str, Any]]:
        sizes = {name: getattr(self, name) // _SHRUNK for name in ("tokens", "embedding", "vocabulary")}
        small = dataclasses.replace(self, **sizes)
        return small, {"measured": small.name}

    def sizes(self) -> dict[str, Any]:
        return {}

    def describe(self) -> dict[str, Any]:
        facts = {"name": self.name, "op": self.op, **dataclasses.asdict(self), "tags": sorted(self.tags)}
        return facts | {"moving": self.moving, "flops": self.flops}

    told = describe

    def speeds(self, times: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        return times[self.pass_] | measured.rate(times[self.pass_], self.flops)

    def make(self, key: jax.Array) -> tuple[Arrays]:
        """Logits have a standard deviation of 3; the gradient of the logits is for `products` alone."""
        m, e, v = self.tokens, self.embedding, self.vocabulary
        keys = jax.random.split(key, 4)
        draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        hidden, weight, d_logits = draw(keys[0], (m, e)), draw(keys[1], (e, v)), draw(keys[2], (m, v))
        weight = weight * jnp.bfloat16(3 / e**0.5)
        labels = jax.random.randint(keys[3], (m,), 0, v)
        return ({"hidden": hidden, "weight": weight, "labels": labels, "d_logits": d_logits},)

    def operands(self, count: int, seed: int, make: Callable[[jax.Array], Any] | None = None) -> list[tuple[Arrays]]:
        return [(make or jax.jit(self.make))(jax.random.key(seed))] * count


_ALL = [*itertools.product(PASSES, SHAPES), *itertools.product(["gradient"], FEW_COLUMNS)]
TABLE = Table(lambda: [LinearCase(*shape, pass_) for pass_, shape in _ALL], {})


def _ours(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mean: bool) -> jax.Array:
    return jaxsoftmax.linear_cross_entropy(hidden, weight, labels, reduction="mean" if mean else "none")


def _ours_mean(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mean: bool) -> jax.Array:
    losses = jaxsoftmax.linear_cross_entropy(hidden, weight, labels)
    return losses.mean() if mean else losses


def _optax(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mean: bool) -> jax.Array:
    logits = jnp.dot(hidden, weight, preferred_element_type=jnp.float32)
    losses = load("optax").softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean() if mean else losses


def _tokamax(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mean: bool) -> jax.Array:
    loss = load("tokamax").linear_softmax_cross_entropy_loss
    return loss(hidden, labels, weight, reduction="mean" if mean else "none", implementation="chunked_xla")


_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "ours": _ours,
    "ours_mean": _ours_mean,
    "optax": _optax,
    "tokamax": _tokamax,
}


def call(name: str, moving: Sequence[str], arrays: Arrays) -> tuple[jax.Array, Arrays]:
    """The losses, or their mean and its gradients, by an implementation."""
    known = {n: arrays[n] for n in ("hidden", "weight", "labels")}
    if name == "products":
        h, w, g = arrays["hidden"], arrays["weight"], arrays["d_logits"]
        gradients = {"hidden": lambda: g @ w.T, "weight": lambda: h.T @ g}
        return h @ w, {n: gradients[n]() for n in moving}
    if not moving:
        return _LOSSES[name](**known, mean=False), {}
    of_moving = lambda moved: _LOSSES[name](**known | moved, mean=True)
    return jax.value_and_grad(of_moving)({n: known[n] for n in moving})


def truth(arrays: Arrays) -> Arrays:
    """The losses, and the gradients of their mean for some tokens and some columns, from float32 logits in blocks."""
    h, w, y = arrays["hidden"], arrays["weight"], arrays["labels"]
    logits = lambda h, w: jnp.dot(h, w, preferred_element_type=jnp.float32)
    lse = jax.lax.map(lambda row: jax.nn.logsumexp(logits(row, w)), h, batch_size=_SOME)
    picked = (h.astype(jnp.float32) * w[:, y].T).sum(1)
    slope = lambda h, w, lse, y: jnp.exp(logits(h, w) - lse[:, None]) - jax.nn.one_hot(y, w.shape[1])
    of_rows = slope(h[:_SOME], w, lse[:_SOME], y[:_SOME]) @ w.T.astype(jnp.float32)
    of_columns = h.T.astype(jnp.float32) @ slope(h, w[:, :_SOME], lse, y)
    return {"losses": lse - picked, "hidden": of_rows / len(y), "weight": of_columns / len(y)}


def errors(found: tuple[jax.Array, Arrays], true: Arrays) -> dict[str, float]:
    """The error of each result, relative to its size."""
    value, gradients = found
    pairs = {"losses": (value, true["losses"] if value.ndim else true["losses"].mean())}
    pairs |= {n: (x[:_SOME] if n == "hidden" else x[:, :_SOME], true[n]) for n, x in gradients.items()}
    size = lambda x: jnp.sqrt(jnp.square(x).mean())
    return {n: float(size(got.astype(jnp.float32) - want) / size(want)) for n, (got, want) in pairs.items()}
