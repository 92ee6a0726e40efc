"""The registry of operations, the cases that are measured of them, and tables that select among cases.

`OPERATIONS` has a row for each operation of rows, and for each call as programs write it: one function, in which
softmax, losses and attention are this project's or `jax.nn`'s (`benchmarks.stock`). `benchmarks.tables` has the cases.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.stock import LIBRARIES, STOCK
from pallas_kernels.softmax.problem import Op, Problem

SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
LONG_DTYPES = {short: long for long, short in SHORT_DTYPES.items()}
PASSES = ("fwd", "bwd", "value_and_vjp", "call", "value_and_grad", "value_and_grad_mean")
ROTATED_BYTES = 150 * 10**6  # between two uses of one address, so that L2 (50 MB) holds nothing of use
_BUFFERS = 8  # at most of a call, so that the operands of small ones take no time to make
ITERATIONS = 1000  # of a loop over one small call
_CPU_ELEMENTS = 1 << 18  # of rows where there is no GPU
_SHRUNK = 64  # a size of a call there
# A call's arguments by name, by the end of the name of a case of rows.
VARIANTS: dict[str, tuple[tuple[str, Any], ...]] = {
    "": (),
    "smoothed_capped": (("label_smoothing", 0.1), ("z_loss", 1e-4), ("logits_soft_cap", 30.0)),
    "half_ignored": (("ignore_index", -100),),
    **{f"k{k}": (("k", k),) for k in (1, 8, 64)},
    "axis0": (("axis", 0),),  # of the transposed operand
}

Arrays = tuple[jax.Array, ...]


def _arrays(count: int) -> Callable[["Case", Iterator[jax.Array]], Arrays]:
    return lambda case, keys: tuple(jax.random.normal(next(keys), case.shape, case.dtype) for _ in range(count))


def _with_labels(case: "Case", keys: Iterator[jax.Array]) -> Arrays:
    labels = jax.random.randint(next(keys), case.shape[:-1], 0, case.shape[-1], jnp.int32)
    return (*_arrays(1)(case, keys), labels)


def _with_targets(case: "Case", keys: Iterator[jax.Array]) -> Arrays:
    x, logits = _arrays(2)(case, keys)
    return x, jax.nn.softmax(logits)


def _with_where(case: "Case", keys: Iterator[jax.Array]) -> Arrays:
    (x,) = _arrays(1)(case, keys)
    if not case.extras:
        return (x,)
    first = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1 if case.options["axis"] < 0 else 1) == 0
    return x, jax.random.bernoulli(next(keys), 0.7, x.shape) | first


def _with_ignored(case: "Case", keys: Iterator[jax.Array]) -> Arrays:
    x, y = _with_labels(case, keys)
    return x, _some_ignored(case, y)


def _with_each_label(case: "Case", keys: Iterator[jax.Array]) -> Arrays:
    """Labels with the first and the last column among them; with an `ignore_index`, half of the rows have that."""
    x, y = _with_labels(case, keys)
    y = y.at[0].set(0).at[-1].set(case.cols - 1)
    if "ignore_index" not in case.options:
        return x, y
    return x, jnp.where(jax.random.permutation(next(keys), case.rows) < case.rows // 2, case.options["ignore_index"], y)


def _some_ignored(case: "Case", y: jax.Array) -> jax.Array:
    return (
        jnp.where(jnp.arange(y.size) % 2 == 1, case.options["ignore_index"], y) if "ignore_index" in case.options else y
    )


def _of_head(case: "Case", keys: Iterator[jax.Array]) -> Arrays:
    """Makes operands by tokens, features and vocabulary."""
    m, e, v = case.shape
    hidden, weight = (jax.random.normal(next(keys), shape, case.dtype) for shape in ((m, e), (e, v)))
    labels = jax.random.randint(next(keys), (m,), 0, v, jnp.int32)
    return hidden, weight * jnp.asarray(3 / e**0.5, case.dtype), _some_ignored(case, labels)


def _of_attention(case: "Case", keys: Iterator[jax.Array]) -> Arrays:
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


def _of_pages(case: "Case", keys: Iterator[jax.Array]) -> Arrays:
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


class Operation(NamedTuple):
    """`call` is given a library, the operands and the case's options; the first `moving` operands have gradients."""

    call: Callable[..., Any]
    operands: Callable[["Case", Iterator[jax.Array]], Arrays] = _arrays(1)
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


def _named(name: str, **usual: Any) -> Callable[..., Any]:
    """The function of a library; the last operands are passed by the names in `extras`."""

    def call(library: Any, *operands: jax.Array, extras: Sequence[str] = (), **options: Any) -> Any:
        count = len(operands) - len(extras)
        named = dict(zip(extras, operands[count:], strict=True))
        return getattr(library, name)(*operands[:count], **named, **usual | options)

    return call


def _loss(name: str) -> Callable[..., jax.Array]:
    """In float32, as a mean over rows is."""
    call = _named(name)
    return lambda *operands, **options: call(*operands, **options).astype(jnp.float32)


_INTEGER = "softmax_cross_entropy_with_integer_labels"
OPERATIONS = {
    **{name: Operation(_named(name, axis=-1), _with_where) for name in ("softmax", "log_softmax", "logsumexp")},
    "cross_entropy": Operation(_named(_INTEGER), _with_each_label),
    "top_k": Operation(_named("top_k_softmax")),
    "top_k_softmax": Operation(_named("top_k_softmax")),
    "softmax_cross_entropy": Operation(_loss("softmax_cross_entropy"), _with_targets),
    _INTEGER: Operation(_loss(_INTEGER), _with_ignored),
    "linear_cross_entropy": Operation(_loss("linear_cross_entropy"), _of_head, 2, has_products=True),
    "flash_attention": Operation(
        _named("flash_attention"), _of_attention, 3, has_products=True, smaller=_smaller_heads(4)
    ),
    "paged_attention": Operation(_named("paged_attention"), _of_pages, 0, has_products=True, smaller=_smaller_heads(2)),
    "one_hot_loss": Operation(_one_hot_loss, _with_labels),
    "entropy": Operation(lambda library, x: -(library.softmax(x) * library.log_softmax(x)).sum()),
    "distillation": Operation(_distillation, _arrays(2)),
    "divergence": Operation(_divergence, _with_targets),
    "taken_loss": Operation(
        lambda library, x, y: -jnp.take_along_axis(library.log_softmax(x), y[:, None], -1).sum(), _with_labels
    ),
    "attention_by_hand": Operation(_attention_by_hand, _arrays(3), 3, has_products=True),
    "sinkhorn": Operation(_sinkhorn),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of `OPERATIONS` with a shape and options.

    `pass_` is "fwd", "bwd" (residual and cotangent to gradient), "value_and_vjp" (of a random cotangent), "call" (what
    one small call costs), or of the mean of the results "value_and_grad" and "value_and_grad_mean"; they differ for
    rows, of which the first has the losses weighted by 1 / rows. Cases of rows have a `source`, and are judged row by
    row in float64; their shape is rows and columns, and they go along the columns.
    """

    op: str
    pass_: str
    dtype: str
    shape: tuple[int, ...]
    tags: frozenset[str]
    given: tuple[tuple[str, Any], ...] = ()  # options by name
    extras: tuple[str, ...] = ()  # operands that are passed by name
    source: str = ""

    @property
    def key(self) -> "Case":
        """The computation: it has a truth of its own."""
        return self

    @property
    def name(self) -> str:
        ends = [f"{name}{value}" for name, value in self.given]
        if self.source:
            ends = [variant for variant, given in VARIANTS.items() if given == self.given and variant]
        shape = "x".join(map(str, self.shape))
        return "_".join((self.op, self.pass_, SHORT_DTYPES[self.dtype], shape, *ends, *self.extras))

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.op]

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.given)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return self.shape[1]

    def call(self, library: Any, **more: Any) -> Callable[..., Any]:
        extras = {"extras": self.extras} if self.extras else {}
        return functools.partial(self.operation.call, library, **extras, **self.options, **more)

    def split(self, name: str, *operands: jax.Array) -> tuple[Callable[..., Any], Arrays, jax.Array]:
        """A function of the operands that have gradients, by a library, those operands, and its cotangent."""
        call, count = self.call(LIBRARIES[name]), self.operation.moving
        moved, rest = operands[:count], operands[count:]
        if self.has_cotangent:
            return lambda *moved: call(*moved, *rest[:-1]), moved, rest[-1]
        if self.source and self.pass_ == "value_and_grad" and name.startswith("ours"):
            weighted = self.call(LIBRARIES[name], weights=1 / self.rows)
            return lambda *moved: weighted(*moved, *rest).sum(), moved, jnp.ones(())
        return lambda *moved: call(*moved, *rest).mean(), moved, jnp.ones(())

    @property
    def has_cotangent(self) -> bool:
        return self.pass_ in ("bwd", "value_and_vjp")

    def make(self, key: jax.Array) -> Arrays:
        """Random operands, with a cotangent for the passes that take one."""
        keys = iter(jax.random.split(key, 8))
        arrays = self.operation.operands(self, keys)
        if not self.has_cotangent:
            return arrays
        out = jax.eval_shape(self.call(STOCK), *arrays)
        return (*arrays, jax.random.normal(next(keys), out.shape, out.dtype))

    def operands(self, count: int, seed: int, make: Callable[[jax.Array], Arrays] | None = None) -> list[Arrays]:
        """`count` sets of operands, by `self.make` or that compiled."""
        keys = (jax.random.fold_in(jax.random.key(seed), i) for i in range(count))
        return [*map(make or jax.jit(self.make), keys)]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Returns the operations on rows to compute, as one would ask kernels for them, in order."""
        forward = Op.STATS if self.op in ("logsumexp", "top_k") else Op(self.op)
        backward = {"softmax": Op.SOFTMAX_TANGENT, "log_softmax": Op.LOG_SOFTMAX_COTANGENT}.get(self.op)
        ops = {"fwd": (forward,), "call": (forward,), "bwd": (backward,), "value_and_vjp": (forward, backward)}
        chosen = ops.get(self.pass_, (Op.CROSS_ENTROPY_GRADIENT,))
        return tuple(Problem(op, self.rows, self.cols, jnp.dtype(self.dtype)) for op in chosen)

    @functools.cached_property
    def operand_bytes(self) -> int:
        """The bytes of a set of operands; for rows, of the logits alone."""
        if self.source:
            return self.rows * self.cols * jnp.dtype(self.dtype).itemsize
        return _bytes(jax.eval_shape(lambda: self.operands(1, 0)))

    @functools.cached_property
    def least_bytes(self) -> int:
        """The floor: every operand read once, and every result written once; a mean counts nothing.

        The floor of rows is the sum over the kernels' problems.
        """
        if self.source:
            unread = self.operand_bytes // 2 if "ignore_index" in self.options else 0
            return sum(problem.least_bytes for problem in self.problems) - unread
        specs = jax.eval_shape(lambda: self.operands(1, 0))[0]
        arrays = specs[: len(specs) - self.has_cotangent]
        results = () if self.pass_ == "value_and_grad" else jax.eval_shape(self.call(STOCK), *arrays)
        gradients = () if self.pass_ == "fwd" else specs[: self.operation.moving]
        return self.operand_bytes + _bytes((results, gradients))

    @property
    def copied_bytes(self) -> int:
        """The traffic of the copy beside it: as much, and for a loss the logits read and written once."""
        return 2 * self.operand_bytes if self.op == "cross_entropy" else self.least_bytes

    @property
    def buffers(self) -> int:
        """How many sets of operands rotate: as many as L2 cannot hold, unless the case is meant to run out of L2."""
        count = 1 if "hot" in self.tags else max(1, -(-ROTATED_BYTES // self.operand_bytes))
        return count if self.source else min(_BUFFERS, count)

    def shrunk(self) -> tuple["Case", dict[str, Any]]:
        """The case as a CPU has time for it, and what a result file says of that."""
        if self.source:
            small = dataclasses.replace(self, shape=(max(1, min(self.rows, _CPU_ELEMENTS // self.cols)), self.cols))
            return small, {"rows_measured": small.rows}
        # `jax.nn`'s attention has no float16 on a CPU.
        dtype = "bfloat16" if self.operation.has_products and self.dtype == "float16" else self.dtype
        small = dataclasses.replace(self, shape=self.operation.smaller(self.shape), dtype=dtype)
        return small, {"measured": small.shape}

    def sizes(self) -> dict[str, Any]:
        return {"least_bytes": self.least_bytes, "operand_bytes": self.operand_bytes}

    def describe(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("name", "op", "dtype", "shape", "options")}
        facts |= {"pass": self.pass_, "tags": sorted(self.tags)}
        return facts | ({name: getattr(self, name) for name in ("rows", "cols", "source")} if self.source else {})

    def told(self) -> dict[str, Any]:
        return self.describe() | self.sizes() | {"copied_bytes": self.copied_bytes, "buffers": self.buffers}

    def speeds(self, times: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        """The facts of an implementation from the times of its programs, beside the copy of the record."""
        taken = times[self.pass_]
        if self.pass_ == "call":
            return taken | {"us_per_iteration": round(times["loop"]["us"] / ITERATIONS, 4)}
        speed = record["least_bytes"] / taken["us"] / 1e6
        share = {"fraction_of_copy": round(speed / copy["tb_per_s"], 4)} if (copy := record["copy"]) else {}
        return taken | {"tb_per_s": round(speed, 4)} | share


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _merged(cases: Iterable[Any]) -> dict[str, Any]:
    """Every case once, by name; one that is named several times has all its tags."""
    found: dict[str, Any] = {}
    for case in cases:
        known = found.setdefault(case.name, case)
        found[case.name] = dataclasses.replace(known, tags=known.tags | case.tags)
    return found


@dataclasses.dataclass(frozen=True)
class Table:
    """The cases of a topic; those of the tags in `apart` are made only where they are asked for, by count and seed."""

    declared: Callable[[], Iterable[Any]]
    apart: Mapping[str, Callable[[int, int], Iterable[Any]]]
    parse: Callable[[str], Any] = lambda name: None  # names of cases that are not in the table

    @functools.cached_property
    def cases(self) -> tuple[Any, ...]:
        return tuple(_merged(self.declared()).values())

    @functools.cached_property
    def tags(self) -> tuple[str, ...]:
        return (*sorted({tag for case in self.cases for tag in case.tags}), *self.apart)

    def select(
        self, *, tags: Iterable[str] = (), patterns: Iterable[str] = (), count: int = 60, seed: int = 0, **fields: Any
    ) -> tuple[Any, ...]:
        """Cases that match every filter given; a filter without entries passes all.

        `patterns` are searched in names, or name cases that are not in the table. `count` and `seed` decide what is
        drawn. `fields` are the values to select of a field of cases: `op`, `pass_`, `dtype` or `kind`.
        """
        tags, patterns = frozenset(tags), tuple(patterns)
        drawn = [case for tag in self.apart if tag in tags for case in self.apart[tag](count, seed)]
        table = _merged((*self.cases, *drawn))
        parsed = {case.name: case for pattern in patterns if (case := self.parse(pattern)) is not None}
        named = [case for name, case in parsed.items() if name not in table]
        chosen = [
            case
            for case in table.values()
            if (not tags or case.tags & tags)
            and all(not values or getattr(case, field) in values for field, values in fields.items())
            and (not patterns or any(re.search(pattern, case.name) for pattern in patterns))
        ]
        return (*named, *chosen)
