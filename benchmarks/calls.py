"""Calls as programs write them: one function, in which softmax, losses and attention are this project's or `jax.nn`'s.

`benchmarks.stock` has those of `jax.nn`, and `benchmarks.call_cases` the calls that are measured.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.cases import ROTATED_BYTES, SHORT_DTYPES
from benchmarks.stock import STOCK

_BUFFERS = 8  # at most, so that the operands of small calls take no time to make
_SHRUNK = 64  # a size where there is no GPU

Arrays = tuple[jax.Array, ...]


def _arrays(count: int) -> Callable[["CallCase", Iterator[jax.Array]], Arrays]:
    return lambda case, keys: tuple(jax.random.normal(next(keys), case.shape, case.dtype) for _ in range(count))


def _with_labels(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    labels = jax.random.randint(next(keys), case.shape[:-1], 0, case.shape[-1], jnp.int32)
    return (*_arrays(1)(case, keys), labels)


def _with_targets(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    x, logits = _arrays(2)(case, keys)
    return x, jax.nn.softmax(logits)


def _with_where(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    (x,) = _arrays(1)(case, keys)
    if not case.extras:
        return (x,)
    first = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1 if case.options["axis"] < 0 else 1) == 0
    return x, jax.random.bernoulli(next(keys), 0.7, x.shape) | first


def _with_ignored(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    x, y = _with_labels(case, keys)
    return x, _some_ignored(case, y)


def _some_ignored(case: "CallCase", y: jax.Array) -> jax.Array:
    return (
        jnp.where(jnp.arange(y.size) % 2 == 1, case.options["ignore_index"], y) if "ignore_index" in case.options else y
    )


def _of_head(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    """Makes operands by tokens, features and vocabulary."""
    m, e, v = case.shape
    hidden, weight = (jax.random.normal(next(keys), shape, case.dtype) for shape in ((m, e), (e, v)))
    labels = jax.random.randint(next(keys), (m,), 0, v, jnp.int32)
    return hidden, weight * jnp.asarray(3 / e**0.5, case.dtype), _some_ignored(case, labels)


def _of_attention(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    """Makes operands by sequences, queries, keys, heads of both, head dimension; every query sees a key."""
    b, t, s, n, k, h = case.shape
    arrays = [jax.random.normal(next(keys), shape, case.dtype) for shape in ((b, t, n, h), (b, s, k, h), (b, s, k, h))]
    made = {
        "mask": lambda key: jax.random.bernoulli(key, 0.8, (b, 1, t, s)) | (jnp.arange(s) == 0),
        "bias": lambda key: jax.random.normal(key, (1, n, t, s), case.dtype),
        "key_value_seq_lengths": lambda key: jax.random.randint(key, (b,), 1, s + 1, jnp.int32),
        "dropout_rng": lambda key: key,
        "query_segment_ids": lambda key: jnp.cumsum(jax.random.bernoulli(key, 8 / t, (b, t)), 1, jnp.int32),
    }
    return *arrays, *(made[name](next(keys)) for name in case.extras)


def _of_pages(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    """Makes operands by sequences, heads of queries and keys, pages, positions of a page, head dimension."""
    b, n, k, entries, size, h = case.shape
    query = jax.random.normal(next(keys), (b, n, h), case.dtype)
    pages = [jax.random.normal(next(keys), (k, b * entries, size, h), case.dtype) for _ in range(2)]
    tables = jax.random.permutation(next(keys), b * entries).reshape(b, entries).astype(jnp.int32)
    return query, *pages, tables, jax.random.randint(next(keys), (b,), 1, entries * size + 1, jnp.int32)


def _smaller(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(size, _SHRUNK) for size in shape)


def _smaller_heads(at: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """With at most two heads of keys, whose number is at `at` after that of the queries' heads, and two sequences."""

    def smaller(shape: Sequence[int]) -> tuple[int, ...]:
        heads, key_heads = shape[at - 1], min(shape[at], 2)
        sizes = [min(shape[0], 2), *_smaller(shape[1:])]
        sizes[at - 1 : at + 1] = heads // shape[at] * key_heads, key_heads
        return tuple(sizes)

    return smaller


class Function(NamedTuple):
    """`call` is given a library, the operands and the case's options; the first `moving` operands have gradients."""

    call: Callable[..., Any]
    operands: Callable[["CallCase", Iterator[jax.Array]], Arrays] = _arrays(1)
    moving: int = 1
    has_products: bool = False
    smaller: Callable[[Sequence[int]], tuple[int, ...]] = _smaller


def _one_hot_loss(library: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return -(jax.nn.one_hot(y, x.shape[-1], dtype=x.dtype) * library.log_softmax(x)).sum()


def _distillation(library: Any, x: jax.Array, teacher: jax.Array) -> jax.Array:
    wanted = library.log_softmax(teacher)
    return (jnp.exp(wanted) * (wanted - library.log_softmax(x))).sum()


def _divergence(library: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
    return (wanted * (jnp.log(wanted) - library.log_softmax(x))).sum()


def _attention_by_hand(library: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    logits = jnp.einsum("bntd,bnsd->bnts", query, key) / math.sqrt(query.shape[-1])
    return jnp.einsum("bnts,bnsd->bntd", library.softmax(logits), value)


def _sinkhorn(library: Any, x: jax.Array) -> jax.Array:
    for axis in (1, 0) * 5:
        x = x - library.logsumexp(x, axis=axis, keepdims=True)
    return x


def _named(name: str) -> Callable[..., Any]:
    """The function of a library; the last operands are passed by the names in `extras`."""

    def call(library: Any, *operands: jax.Array, extras: Sequence[str] = (), **options: Any) -> Any:
        count = len(operands) - len(extras)
        named = dict(zip(extras, operands[count:], strict=True))
        return getattr(library, name)(*operands[:count], **named, **options)

    return call


def _loss(name: str) -> Callable[..., jax.Array]:
    """In float32, as a mean over rows is."""
    call = _named(name)
    return lambda *operands, **options: call(*operands, **options).astype(jnp.float32)


_INTEGER = "softmax_cross_entropy_with_integer_labels"
FUNCTIONS = {
    **{name: Function(_named(name), _with_where) for name in ("softmax", "log_softmax", "logsumexp")},
    "top_k_softmax": Function(_named("top_k_softmax")),
    "softmax_cross_entropy": Function(_loss("softmax_cross_entropy"), _with_targets),
    _INTEGER: Function(_loss(_INTEGER), _with_ignored),
    "linear_cross_entropy": Function(_loss("linear_cross_entropy"), _of_head, 2, has_products=True),
    "flash_attention": Function(
        _named("flash_attention"), _of_attention, 3, has_products=True, smaller=_smaller_heads(4)
    ),
    "paged_attention": Function(_named("paged_attention"), _of_pages, 0, has_products=True, smaller=_smaller_heads(2)),
    "one_hot_loss": Function(_one_hot_loss, _with_labels),
    "entropy": Function(lambda library, x: -(library.softmax(x) * library.log_softmax(x)).sum()),
    "distillation": Function(_distillation, _arrays(2)),
    "divergence": Function(_divergence, _with_targets),
    "taken_loss": Function(
        lambda library, x, y: -jnp.take_along_axis(library.log_softmax(x), y[:, None], -1).sum(), _with_labels
    ),
    "attention_by_hand": Function(_attention_by_hand, _arrays(3), 3, has_products=True),
    "sinkhorn": Function(_sinkhorn),
}


@dataclasses.dataclass(frozen=True)
class CallCase:
    """A function of `FUNCTIONS`.

    `pass_` is "fwd", "value_and_vjp" (of a random cotangent) or "value_and_grad" (of the mean of the results).
    """

    op: str
    pass_: str
    dtype: str
    shape: tuple[int, ...]
    tags: frozenset[str]
    given: tuple[tuple[str, Any], ...] = ()  # options by name
    extras: tuple[str, ...] = ()  # operands that are passed by name

    @property
    def name(self) -> str:
        end = "".join((*(f"_{name}{value}" for name, value in self.given), *(f"_{name}" for name in self.extras)))
        return f"{self.op}_{self.pass_}_{SHORT_DTYPES[self.dtype]}_{'x'.join(map(str, self.shape))}{end}"

    @property
    def function(self) -> Function:
        return FUNCTIONS[self.op]

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.given)

    def call(self, library: Any) -> Callable[..., Any]:
        extras = {"extras": self.extras} if self.extras else {}
        return functools.partial(self.function.call, library, **extras, **self.options)

    def split(self, library: Any, *operands: jax.Array) -> tuple[Callable[..., Any], Arrays, jax.Array]:
        """A function of the operands that have gradients, those operands, and its cotangent."""
        call, count = self.call(library), self.function.moving
        moved, rest = operands[:count], operands[count:]
        if self.pass_ == "value_and_vjp":
            return lambda *moved: call(*moved, *rest[:-1]), moved, rest[-1]
        return lambda *moved: call(*moved, *rest).mean(), moved, jnp.ones(())

    def make(self, key: jax.Array) -> Arrays:
        """Random operands, with a cotangent for "value_and_vjp"."""
        keys = iter(jax.random.split(key, 8))
        arrays = self.function.operands(self, keys)
        if self.pass_ != "value_and_vjp":
            return arrays
        out = jax.eval_shape(self.call(STOCK), *arrays)
        return (*arrays, jax.random.normal(next(keys), out.shape, out.dtype))

    def operands(self, count: int, seed: int, make: Callable[[jax.Array], Arrays] | None = None) -> list[Arrays]:
        """`count` sets of operands, by `self.make` or that compiled."""
        keys = (jax.random.fold_in(jax.random.key(seed), i) for i in range(count))
        return [*map(make or jax.jit(self.make), keys)]

    @functools.cached_property
    def operand_bytes(self) -> int:
        return _bytes(jax.eval_shape(lambda: self.operands(1, 0)))

    @functools.cached_property
    def least_bytes(self) -> int:
        """Every operand and every result once; a mean counts nothing."""
        specs = jax.eval_shape(lambda: self.operands(1, 0))[0]
        arrays = specs[: len(specs) - (self.pass_ == "value_and_vjp")]
        results = () if self.pass_ == "value_and_grad" else jax.eval_shape(self.call(STOCK), *arrays)
        gradients = () if self.pass_ == "fwd" else specs[: self.function.moving]
        return self.operand_bytes + _bytes((results, gradients))

    @property
    def buffers(self) -> int:
        return min(_BUFFERS, -(-ROTATED_BYTES // self.operand_bytes))

    def shrunk(self) -> tuple["CallCase", dict[str, Any]]:
        # `jax.nn`'s attention has no float16 on a CPU.
        dtype = "bfloat16" if self.function.has_products and self.dtype == "float16" else self.dtype
        small = dataclasses.replace(self, shape=self.function.smaller(self.shape), dtype=dtype)
        return small, {"measured": small.shape}

    def sizes(self) -> dict[str, Any]:
        return {"least_bytes": self.least_bytes, "operand_bytes": self.operand_bytes}

    def describe(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("name", "op", "dtype", "shape")}
        return facts | {"pass": self.pass_, "tags": sorted(self.tags), "options": self.options}

    def told(self) -> dict[str, Any]:
        return self.describe() | self.sizes()


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
