"""What is measured of attention: named cases, what each computes, and its arithmetic.

Tags: `core` (the cells that decide, a few minutes on an H200), `grid` (forward and backward of every length, head
dimension, full and causal, and of grouped and unequal heads), `rest` (the grid's lengths that `core` leaves out),
`standard` (everything). Others are measured only where they are asked for: `odd` (lengths that are one less), `sample`
(random calls), `short` (sequences shorter than a tile, and lengths that once were copied), `cpu` (small calls, which
the XLA program is measured on) and `invariance` (what `jaxsoftmax.batch_invariant()` costs). A call that no table has
is named in the same form.
"""

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Buffers, Table

PASSES = ("fwd", "bwd", "value_and_vjp")
KINDS = ("full", "causal", "window", "documents", "mask", "causal_mask", "bias")
TOKENS, WIDTH = 16384, 2048  # of a batch, and of all heads together
DTYPES = {"bfloat16": "", "float16": "_f16", "float32": "_f32"}  # and the end of the name
SPAN = 1024  # of windows and documents, unless the name has another
LENGTHS, DIMS = (512, 2048, 4096, 16384), (64, 128, 256)
_SCORES, _ELEMENTS = 2**28, 2**27  # of a random call: of all its heads, and of one array


_NAME = re.compile(
    rf"(?:attention_)?({'|'.join(PASSES)})_({'|'.join(KINDS)})_d(\d+)(?:v(\d+))?(?:_t(\d+))?_s(\d+)_b(\d+)_h(\d+)"
    r"(?:g(\d+))?(?:_w(\d+))?(_f16|_f32)?"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An attention call: what is computed, apart from the pass.

    `kind` says which keys a query sees: "full"; "causal"; "window", causal, `span` keys in all; "documents", causal
    within packed documents of about `span` tokens; "mask", a random bool tensor [B, 1, T, S]; "causal_mask",
    causal, as such a tensor; "bias", all, with a tensor [1, N, T, S]. `length` is the number of keys; there are as many
    queries where `queries` is 0.
    """

    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    value_dim: int
    kind: str
    span: int = 0
    queries: int = 0
    dtype: str = "bfloat16"

    @property
    def query_length(self) -> int:
        return self.queries or self.length

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}g{self.key_heads}"
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}v{self.value_dim}"
        queries = f"_t{self.queries}" if self.queries else ""
        span = f"_w{self.span}" if self.span not in (0, SPAN) else ""
        return f"{self.kind}_d{dims}{queries}_s{self.length}_b{self.batch}_h{heads}{span}{DTYPES[self.dtype]}"

    @property
    def is_causal(self) -> bool:
        return self.kind in ("causal", "window", "documents")

    @property
    def pairs(self) -> float:
        """Pairs of query and key in a head and sequence that count as work; by convention, causal is half of full."""
        t, s = self.query_length, self.length
        if self.kind == "window":
            return sum(min(i + 1, self.span) for i in range(s))
        if self.kind == "documents":
            return float((self.documents() ** 2).sum() / 2)
        if self.kind not in ("causal", "causal_mask"):
            return t * s
        return s * s / 2 if t == s else sum(min(i + 1, s) for i in range(t))

    def flops(self, pass_: str) -> float:
        """4·B·H·S²·D forward, 10·B·H·S²·D backward, for equal head dimensions."""
        h, d = self.head_dim, self.value_dim
        forward, backward = 2 * (h + d), 2 * (3 * h + 2 * d)
        per_pair = {"fwd": forward, "bwd": backward, "value_and_vjp": forward + backward}[pass_]
        return per_pair * self.batch * self.heads * self.pairs

    def documents(self) -> np.ndarray:
        """The lengths of the packed documents: within half of `span`, the same in every sequence."""
        ends = np.random.default_rng(7).integers(self.span // 2, self.span + self.span // 2 + 1, self.length).cumsum()
        return np.diff(ends[ends < self.length], prepend=0, append=self.length)

    def segments(self) -> np.ndarray:
        """Segment ids, `[batch, length]`."""
        documents = self.documents()
        return np.tile(np.repeat(np.arange(len(documents), dtype=np.int32), documents), (self.batch, 1))

    def shrunk(self) -> "Shape":
        """One short sequence, for machines without the speed."""
        group, heads = self.heads // self.key_heads, min(self.key_heads, 2)
        length = min(self.length, 128)
        span = max(1, self.span * length // self.length) if self.span else 0
        sizes = {"length": length, "span": span, "queries": min(self.queries, 128)}
        return dataclasses.replace(self, batch=1, heads=group * heads, key_heads=heads, **sizes)

    def operands(self, seed: int) -> dict[str, jax.Array]:
        """Random normal query, key, value and `d_out`, and what the kind needs."""
        keys = iter(jax.random.split(jax.random.key(seed), 6))
        b, t, s, heads = self.batch, self.query_length, self.length, self.heads
        shapes = {
            "query": (t, heads, self.head_dim),
            "key": (s, self.key_heads, self.head_dim),
            "value": (s, self.key_heads, self.value_dim),
            "d_out": (t, heads, self.value_dim),
        }
        made = {name: jax.random.normal(next(keys), (b, *rest), self.dtype) for name, rest in shapes.items()}
        if self.kind == "mask":  # every query sees a key, for peers differ on queries that see nothing
            bits = jax.random.bernoulli(next(keys), 0.8, (b, 1, t, s))
            made["mask"] = bits | (jnp.arange(t)[:, None] % s == jnp.arange(s))
        if self.kind == "causal_mask":
            made["mask"] = jnp.tile(jnp.tri(t, s, dtype=bool), (b, 1, 1, 1))
        if self.kind == "bias":
            made["bias"] = jax.random.normal(next(keys), (1, heads, t, s), self.dtype)
        if self.kind == "documents":
            made["segments"] = jnp.asarray(self.segments())
        return made


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A call, and "fwd", "bwd" (residuals and cotangent given) or "value_and_vjp" (both)."""

    shape: Shape
    pass_: str
    tags: frozenset[str]
    op = "attention"
    buffers = 1

    @property
    def name(self) -> str:
        return f"attention_{self.pass_}_{self.shape.name}"

    @property
    def about(self) -> str:
        return f"{self.flops / 1e12:.3f} TFLOP"

    @property
    def key(self) -> Shape:
        """The call without the pass, because passes have programs in common."""
        return self.shape

    @property
    def kind(self) -> str:
        return self.shape.kind

    @property
    def flops(self) -> float:
        return self.shape.flops(self.pass_)

    def shrunk(self) -> "AttentionCase":
        return self if "cpu" in self.tags else dataclasses.replace(self, shape=self.shape.shrunk())

    def as_measured(self) -> dict[str, Any]:
        return {} if "cpu" in self.tags else {"measured": dataclasses.asdict(self.shape)}

    def operands(self, count: int, seed: int) -> Buffers:
        return [(self.shape.operands(seed),)] * count

    def sizes(self) -> dict[str, Any]:
        return {"flops": self.flops}

    def describe(self) -> dict[str, Any]:
        facts = {"name": self.name, "pass": self.pass_, "tags": sorted(self.tags)}
        return facts | dataclasses.asdict(self.shape)

    def told(self) -> dict[str, Any]:
        documents = self.shape.documents().tolist() if self.kind == "documents" else []
        return self.describe() | {"flops": self.flops, "documents": documents}


def parse(name: str) -> AttentionCase | None:
    """The case of a name, in the table or not: `attention_bwd_causal_d64_s8192_b2_h32`; None if it is no such name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    pass_, kind, dim, value_dim, queries, length, batch, heads, key_heads, span, end = match.groups()
    b, n, k, s, d, v = map(int, (batch, heads, key_heads or heads, length, dim, value_dim or dim))
    spans = int(span or SPAN) if kind in ("window", "documents") else 0
    dtype = next(dtype for dtype, short in DTYPES.items() if short == (end or ""))
    shape = Shape(b, n, k, s, d, v, kind, spans, int(queries or 0), dtype)
    return AttentionCase(shape, pass_, _tags(shape, pass_) if shape in set(_shapes()) else frozenset())


def sample(count: int, seed: int) -> tuple[AttentionCase, ...]:
    """Random calls, the same for the same seed; more of them begin with the fewer."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        case = _drawn(rng)
        found[case.name] = case
    return tuple(found.values())


def _drawn(rng: random.Random) -> AttentionCase:
    """A call whose sizes are log-uniform, scores and arrays being bounded.

    Gradients are not drawn of fewer than 8 queries or keys: they may be too small a sum for the gate, or zero.
    """
    uniform = lambda most: round(2 ** rng.uniform(0, math.log2(most)))
    keys = uniform(16384)
    queries = keys if rng.random() < 0.7 else uniform(16384)
    batch, key_heads, group = uniform(64), uniform(16), rng.choice((1, 1, 2, 4, 8))
    dim = rng.randrange(32, 257, 8)
    kind, pass_ = rng.choice(("full", "causal")), rng.choice(("fwd", "value_and_vjp"))
    dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
    heads = min(batch * key_heads * group, max(1, _SCORES // (queries * keys)), _ELEMENTS // (max(queries, keys) * dim))
    group = min(group, heads)
    key_heads = min(key_heads, heads // group)
    batch = min(batch, heads // (group * key_heads))
    if min(queries, keys) < 8:
        kind, pass_ = ("full" if queries < keys else kind), "fwd"
    shape = Shape(
        batch, key_heads * group, key_heads, keys, dim, dim, kind, 0, queries if queries != keys else 0, dtype
    )
    return AttentionCase(shape, pass_, frozenset({"sample"}))


def square(length: int, dim: int, kind: str, span: int = 0) -> Shape:
    """A call of `TOKENS` tokens and `WIDTH` features."""
    heads = WIDTH // dim
    return Shape(TOKENS // length, heads, heads, length, dim, dim, kind, span)


def _shapes() -> Iterator[Shape]:
    for length, dim, kind in itertools.product(LENGTHS, DIMS, ("full", "causal")):
        yield square(length, dim, kind)
    for kind in ("full", "causal"):
        yield Shape(TOKENS // 4096, 64, 8, 4096, 128, 128, kind)
    yield Shape(TOKENS // 4096, 16, 16, 4096, 192, 128, "causal")
    yield square(16384, 128, "window", 1024)
    yield square(16384, 128, "documents", 1024)
    yield square(2048, 128, "mask")
    yield square(2048, 128, "causal_mask")
    yield square(2048, 128, "bias")


def _cpu(*_: int) -> Iterator[AttentionCase]:
    sizes = ((8, 256, 256, 4, 4, 32), (2, 512, 512, 8, 8, 64), (2, 512, 512, 8, 2, 64))
    sizes += ((8, 1, 4096, 8, 8, 64), (8, 1, 4096, 8, 2, 64), (1, 2048, 2048, 4, 4, 64))
    for (b, t, s, n, k, d), dtype, kind, pass_ in itertools.product(
        sizes, ("float32", "bfloat16"), ("full", "causal"), ("fwd", "value_and_vjp")
    ):
        if kind == "full" or t > 1:
            shape = Shape(b, n, k, s, d, d, kind, 0, t if t != s else 0, dtype)
            yield AttentionCase(shape, pass_, frozenset({"cpu"}))


def _odd(*_: int) -> Iterator[AttentionCase]:
    for length, dim, kind, pass_ in itertools.product(LENGTHS, DIMS, ("full", "causal"), ("fwd", "bwd")):
        shape = dataclasses.replace(square(length, dim, kind), length=length - 1)
        yield AttentionCase(shape, pass_, frozenset({"odd"}))


def _short(*_: int) -> Iterator[AttentionCase]:
    for shape, pass_ in itertools.product(_SHORT, ("fwd", "value_and_vjp")):
        yield AttentionCase(shape, pass_, frozenset({"short"}))


def _invariance(*_: int) -> Iterator[AttentionCase]:
    calls = [("causal", 4096, dim, 0) for dim in DIMS]
    calls += [("full", 4096, 64, 0), ("full", 4096, 128, 1), ("bias", 2048, 128, 0)]
    for kind, length, dim, queries in calls:
        shape = Shape(2, 16, 16, length, dim, dim, kind, 0, queries)
        yield AttentionCase(shape, "fwd", frozenset({"invariance"}))


_SHORT = tuple(
    Shape(b, n, k, s, d, d, kind, 0, t if t != s else 0)
    for b, t, s, n, k, d, kind in (
        *((256, 50, 50, 12, 12, 64, "full"), (1, 256, 256, 16, 16, 128, "full"), (32, 197, 197, 12, 12, 64, "full")),
        *((47, 73, 73, 8, 8, 64, "causal"), (12, 22, 22, 32, 8, 128, "causal"), (5, 49, 49, 8, 8, 256, "full")),
        *((32, 38, 2021, 4, 4, 64, "full"), (104, 6511, 76, 16, 2, 64, "full"), (10, 336, 336, 4, 4, 64, "causal")),
        *((9, 1363, 1363, 16, 2, 128, "causal"), (19, 3405, 3405, 2, 2, 128, "causal")),
        *(
            (22, 2955, 2955, 4, 4, 64, "causal"),
            (44, 525, 525, 4, 4, 80, "causal"),
            (5, 1964, 1964, 32, 4, 256, "causal"),
        ),
    )
)


def _tags(shape: Shape, pass_: str) -> frozenset[str]:
    tags = {"standard"}
    if shape.kind in ("full", "causal"):
        is_square = shape == square(shape.length, shape.head_dim, shape.kind)
        dims = {"fwd": DIMS, "bwd": (64, 128)}.get(pass_, ())
        if is_square and shape.length in (2048, 16384) and shape.head_dim in dims:
            tags.add("core")
        if pass_ in ("fwd", "bwd"):
            tags.add("grid")
            if is_square and shape.length in (512, 4096):
                tags.add("rest")
    return frozenset(tags)


def _declared() -> list[AttentionCase]:
    """Those that decide first."""
    found = [AttentionCase(shape, pass_, _tags(shape, pass_)) for shape, pass_ in itertools.product(_shapes(), PASSES)]
    return sorted(found, key=lambda case: "core" not in case.tags)


TABLE = Table(
    _declared, {"odd": _odd, "sample": sample, "short": _short, "cpu": _cpu, "invariance": _invariance}, parse
)
select = TABLE.select


def all_cases() -> tuple[AttentionCase, ...]:
    """Every case once, those that decide first."""
    return TABLE.cases
