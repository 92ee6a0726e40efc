"""Calls as programs write them: one function, in which softmax and losses are this project's or `jax.nn`'s.

`chains` has softmax and log_softmax alone, on few rows and along other axes, and within what XLA would fuse with them.
"""

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxsoftmax
from benchmarks import cases
from benchmarks.cases import LONG_DTYPES, ROTATED_BYTES, SHORT_DTYPES

PASSES = cases.PASSES
_BUFFERS = 8  # at most, so that the operands of small calls take no time to make
_SHRUNK = 64  # a size where there is no GPU

Arrays = tuple[jax.Array, ...]


def xla_loss(
    x: jax.Array,
    y: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
) -> jax.Array:
    """In the logits' dtype, as `optax` has it; with what it has no option for written around it, in float32."""
    if logits_soft_cap is not None:
        x = logits_soft_cap * jnp.tanh(x.astype(jnp.float32) / logits_soft_cap)
    ignored = None if ignore_index is None else y == ignore_index
    column = y if ignored is None else jnp.where(ignored, 0, y)
    lse = jax.nn.logsumexp(x, axis=-1)
    loss = lse - jnp.take_along_axis(x, column[:, None], -1)[:, 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - x.mean(-1))
    if z_loss:
        loss += z_loss * lse**2
    return loss if ignored is None else jnp.where(ignored, 0, loss)


STOCK = types.SimpleNamespace(
    softmax=jax.nn.softmax,
    log_softmax=jax.nn.log_softmax,
    logsumexp=jax.nn.logsumexp,
    top_k_softmax=lambda x, k: tuple(jax.lax.top_k(jax.nn.softmax(x), k)),
)


def _arrays(count: int) -> Callable[["CallCase", Iterator[jax.Array]], Arrays]:
    return lambda case, keys: tuple(jax.random.normal(next(keys), case.shape, case.dtype) for _ in range(count))


def _with_labels(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    labels = jax.random.randint(next(keys), case.shape[:-1], 0, case.shape[-1], jnp.int32)
    return (*_arrays(1)(case, keys), labels)


def _with_targets(case: "CallCase", keys: Iterator[jax.Array]) -> Arrays:
    x, logits = _arrays(2)(case, keys)
    return x, jax.nn.softmax(logits)


class Function(NamedTuple):
    """`call` is given a library, the operands and the case's options; the first `moving` operands have gradients."""

    call: Callable[..., Any]
    operands: Callable[["CallCase", Iterator[jax.Array]], Arrays] = _arrays(1)
    moving: int = 1
    has_products: bool = False


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


def _of(name: str) -> Function:
    return Function(lambda library, *operands, **options: getattr(library, name)(*operands, **options))


FUNCTIONS = {
    **{name: _of(name) for name in ("softmax", "log_softmax", "logsumexp", "top_k_softmax")},
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

    @property
    def name(self) -> str:
        end = "".join(f"_{name}{value}" for name, value in self.given)
        return f"{self.op}_{self.pass_}_{SHORT_DTYPES[self.dtype]}_{'x'.join(map(str, self.shape))}{end}"

    @property
    def function(self) -> Function:
        return FUNCTIONS[self.op]

    def call(self, library: Any) -> Callable[..., Any]:
        return functools.partial(self.function.call, library, **dict(self.given))

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
        small = dataclasses.replace(self, shape=tuple(min(size, _SHRUNK) for size in self.shape))
        return small, {"measured": small.shape}

    def sizes(self) -> dict[str, Any]:
        return {"least_bytes": self.least_bytes, "operand_bytes": self.operand_bytes}

    def describe(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("name", "op", "dtype", "shape")}
        return facts | {"pass": self.pass_, "tags": sorted(self.tags), "options": dict(self.given)}

    def told(self) -> dict[str, Any]:
        return self.describe() | self.sizes()


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


_LOGITS = ((8192, 50257), (4096, 128256))
_SCALARS = "one_hot_loss entropy distillation divergence taken_loss"
_AXES = (((64, 4096, 512), 1), ((4096, 32768), 0), ((32, 19, 512, 512), 1))
_SWEEP = (256, 1000, 1024, 4096, 8192, 16384, 24576, 32768, 50257, 65536, 131072, 262144)
_SWEPT_BYTES = 2**26
_FEW = ((55, 195705), (124, 511), (1187, 3024))
# Operations, passes, dtypes, shapes, and options.
_CHAINS: tuple[tuple[Any, ...], ...] = (
    (_SCALARS, "fwd value_and_grad", "bf16", (*_LOGITS, (16384, 1000)), {}),
    ("softmax log_softmax", "fwd value_and_vjp", "bf16", _LOGITS, {}),
    ("log_softmax", "value_and_grad", "bf16", _LOGITS, {}),
    ("attention_by_hand", "fwd value_and_vjp", "bf16", [(8, 16, 1024, 64), (2, 8, 4096, 128)], {}),
    ("sinkhorn", "fwd value_and_vjp", "f32", [(4096, 4096)], {}),
    *(("softmax log_softmax", "fwd value_and_vjp", "bf16", [shape], {"axis": axis}) for shape, axis in _AXES),
    *(
        ("log_softmax", "fwd value_and_vjp", dtype, [(_SWEPT_BYTES // size // cols, cols) for cols in _SWEEP], {})
        for dtype, size in (("bf16", 2), ("f32", 4))
    ),
    ("softmax", "value_and_vjp", "bf16 f32", [(686, 228), (25, 372), (18, 134), (23667, 14)], {}),
    ("log_softmax", "value_and_vjp value_and_grad", "bf16 f32", _FEW, {}),
    ("log_softmax", "fwd value_and_vjp", "bf16", [(1024, 1000), (128, 8192), (8, 131072)], {}),
    ("top_k_softmax", "fwd", "bf16", [(256, 128), (16384, 64), (65536, 256)], {"k": 8}),
)


def chains(*_: int) -> Iterator[CallCase]:
    return _cases(_CHAINS, "chains")


def _cases(table: Iterable[tuple[Any, ...]], tag: str) -> Iterator[CallCase]:
    for ops, passes, dtypes, shapes, options in table:
        for op, pass_, dtype, shape in itertools.product(ops.split(), passes.split(), dtypes.split(), shapes):
            yield CallCase(op, pass_, LONG_DTYPES[dtype], shape, frozenset({tag}), (*options.items(),))


TABLE = cases.Table(lambda: cases.TABLE.cases, {**cases.TABLE.apart, "chains": chains})
LIBRARIES = {"ours": jaxsoftmax, "xla": STOCK}
