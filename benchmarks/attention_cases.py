"""Names the measured cases of attention, and says what each computes and with how many operations.

Tags: `core` (the cells that decide, a few minutes on an H100), `grid` (forward and backward of every length, head
dimension, full and causal, and of grouped and unequal heads), `rest` (the grid's lengths that `core` leaves out),
`standard` (everything). Others are measured only where they are asked for: `odd` (lengths that are one less), `sample`
(random calls), `short` (short sequences), `decode` (few queries, many keys), `caches` (few queries, from few keys to
many), `fallbacks` (what no kernel takes, and with `--capability` what other GPUs run), `cpu` (small calls, which the
XLA program is measured on) and `invariance` (what `jaxsoftmax.batch_invariant()`
costs). A call that no table has is named in the same form.
"""

import dataclasses
import functools
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results as measured
from benchmarks.cases import Table

PASSES = ("fwd", "bwd", "value_and_vjp")
KINDS = ("full", "causal", "window", "documents", "mask", "causal_mask", "bias", "lengths")
LENGTHS, DIMS = (512, 2048, 4096, 16384), (64, 128, 256)
TOKENS, WIDTH = 16384, 2048  # of a batch, and of all heads together
SPAN = 1024  # of windows and documents, unless the name has another
_SCORES, _ELEMENTS = 2**28, 2**27  # of a random call: of all its heads, and of one array

# Calls by the name of their shapes.
_SHORT = (
    *("full_d64_s50_b256_h12", "full_d128_s256_b1_h16", "full_d64_s197_b32_h12", "causal_d64_s73_b47_h8"),
    *("causal_d128_s22_b12_h32g8", "full_d256_s49_b5_h8", "full_d64_t38_s2021_b32_h4", "full_d64_t6511_s76_b104_h16g2"),
    *("causal_d64_s336_b10_h4", "causal_d128_s1363_b9_h16g2", "causal_d128_s3405_b19_h2", "causal_d64_s2955_b22_h4"),
    *("causal_d80_s525_b44_h4", "causal_d256_s1964_b5_h32g4"),
)
_OTHERS = (
    *("full_d128_s4096_b4_h64g8", "causal_d128_s4096_b4_h64g8", "causal_d192v128_s4096_b4_h16"),
    *("window_d128_s16384_b1_h16", "documents_d128_s16384_b1_h16"),
    *("mask_d128_s2048_b8_h16", "causal_mask_d128_s2048_b8_h16", "bias_d128_s2048_b8_h16"),
)
_INVARIANT = (
    *(f"causal_d{dim}_s4096_b2_h16" for dim in DIMS),
    *("full_d64_s4096_b2_h16", "full_d128_t1_s4096_b2_h16", "bias_d128_s2048_b2_h16"),
)
_CACHES = ("s131072_b1", "s16384_b8", "s8192_b128")
_DECODE = (
    *("d128_t1_s8192_b1_h32g8", "d128_t1_s8192_b1_h64g8", "d128_t1_s8192_b8_h32g8", "d128_t1_s131072_b1_h32g8"),
    *("d128_t1_s8192_b64_h32g8", "d128_t1_s32768_b16_h64g8", "d64_t1_s8192_b64_h32g8", "d256_t1_s8192_b32_h16g8"),
    *("d128_t1_s32768_b32_h8g1", "d128_t128_s65536_b1_h32g8", "d128_t512_s65536_b1_h16g2", "d128_t512_s65536_b1_h8g1"),
    *(f"d128_t{n}_{x}_h{h}" for x, n, h in itertools.product(_CACHES, (2, 4, 8, 16), ("64g8", "32g8", "8g1"))),
)
_GROWING = [f"full_d128_t{t}_s{s}_b1_h32g8" for t, s in itertools.product((1, 4, 16), [2**n for n in range(10, 19, 2)])]
_FOR_CPU = (
    *("d32_s256_b8_h4", "d64_s512_b2_h8", "d64_s512_b2_h8g2"),
    *("d64_t1_s4096_b8_h8", "d64_t1_s4096_b8_h8g2", "d64_s2048_b1_h4"),
)
_FALLBACKS = (
    *("causal_d64_s5803_b11_h1_f32", "causal_d64_s2048_b4_h16_f32", "full_d80_t200_s3910_b16_h2_f32"),
    *(
        "causal_d64_s8044_b2_h16g2_f32",
        "causal_d512_s2048_b2_h8",
        "causal_d128_s2048_b2_h16",
        "causal_d128_s2048_b2_h16g4",
    ),
    *("full_d64_s512_b8_h16", "causal_d64_s8192_b1_h16", "full_d64_s197_b32_h12", "lengths_d64_s1024_b8_h16"),
    *("mask_d128_s2048_b2_h16", "full_d64_t4_s4096_b1_h8"),
)
_ENDS = {"bfloat16": "", "float16": "_f16", "float32": "_f32"}
_NAME = re.compile(
    rf"({'|'.join(KINDS)})_d(\d+)(?:v(\d+))?(?:_t(\d+))?_s(\d+)_b(\d+)_h(\d+)(?:g(\d+))?(?:_w(\d+))?(_f16|_f32)?"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An attention call: what is computed, apart from the pass.

    `kind` says which keys a query sees: "full"; "causal"; "window", causal, `span` keys in all; "documents", causal
    within packed documents of about `span` tokens; "mask", a random bool tensor [B, 1, T, S]; "causal_mask",
    causal, as such a tensor; "bias", all, with a tensor [1, N, T, S]; "lengths", all of a random number of keys, one
    for each sequence. `length` is the number of keys; there are as many queries where `queries` is 0.
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

    @classmethod
    def parse(cls, name: str) -> "Shape":
        """The shape of a name, as `causal_d64_s8192_b2_h32`."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"no call of attention: {name}")
        kind, dim, value_dim, queries, length, batch, heads, key_heads, span, end = match.groups()
        b, n, k, s, d, v = map(int, (batch, heads, key_heads or heads, length, dim, value_dim or dim))
        spans = int(span or SPAN) if kind in ("window", "documents") else 0
        dtype = next(dtype for dtype, short in _ENDS.items() if short == (end or ""))
        return cls(b, n, k, s, d, v, kind, spans, int(queries or 0), dtype)

    @property
    def query_length(self) -> int:
        return self.queries or self.length

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}g{self.key_heads}"
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}v{self.value_dim}"
        queries = f"_t{self.queries}" if self.queries else ""
        span = f"_w{self.span}" if self.span not in (0, SPAN) else ""
        return f"{self.kind}_d{dims}{queries}_s{self.length}_b{self.batch}_h{heads}{span}{_ENDS[self.dtype]}"

    @property
    def is_causal(self) -> bool:
        return self.kind in ("causal", "window", "documents")

    @property
    def pairs(self) -> float:
        """Pairs of query and key in a head and sequence that count as work; by convention, causal is half of full."""
        t, s = self.query_length, self.length
        if self.kind == "documents":
            return float((self.documents() ** 2).sum() / 2)
        if self.kind == "window" or (self.kind in ("causal", "causal_mask") and t != s):
            return sum(min(i + 1, self.span or s) for i in range(t))
        if self.kind == "lengths":
            return t * float(self.key_lengths().sum()) / self.batch
        return t * s / (2 if self.kind in ("causal", "causal_mask") else 1)

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

    def key_lengths(self) -> np.ndarray:
        """How many keys each sequence has."""
        if self.kind != "lengths":
            return np.full(self.batch, self.length, np.int32)
        return np.random.default_rng(7).integers(1, self.length + 1, self.batch, np.int32)

    @property
    def least_bytes(self) -> int:
        """Bytes of queries, output, and the keys and values that exist, each once."""
        width, size = self.head_dim + self.value_dim, jnp.dtype(self.dtype).itemsize
        keys = int(self.key_lengths().sum(dtype=np.int64)) * self.key_heads
        return (self.batch * self.query_length * self.heads + keys) * width * size

    def shrunk(self) -> "Shape":
        """One short sequence, for machines without the speed."""
        group, heads = self.heads // self.key_heads, min(self.key_heads, 2)
        length = min(self.length, 128)
        span = max(1, self.span * length // self.length) if self.span else 0
        sizes = {"length": length, "span": span, "queries": min(self.queries, 128)}
        return dataclasses.replace(self, batch=1, heads=group * heads, key_heads=heads, **sizes)

    def operands(self, seed: int) -> dict[str, jax.Array]:
        """Random normal query, key, value and `d_out`, and what the kind needs, by the names that functions have."""
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
            documents = self.documents()
            ids = np.repeat(np.arange(len(documents), dtype=np.int32), documents)
            made["query_segment_ids"] = jnp.tile(ids, (b, 1))
        if self.kind == "lengths":
            made["key_value_seq_lengths"] = jnp.asarray(self.key_lengths())
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
    def kind(self) -> str:
        return self.shape.kind

    @property
    def key(self) -> Shape:
        """The computation, of which passes have programs and a truth in common."""
        return self.shape

    @property
    def flops(self) -> float:
        return self.shape.flops(self.pass_)

    def speeds(self, times: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        found = measured.speeds(self.pass_, times, self.flops)
        if self.pass_ == "fwd":
            found["tb_per_s"] = round(self.shape.least_bytes / found["us"] / 1e6, 4)
        return found

    def shrunk(self) -> tuple["AttentionCase", dict[str, Any]]:
        if "cpu" in self.tags:
            return self, {}
        small = dataclasses.replace(self, shape=self.shape.shrunk())
        return small, {"measured": dataclasses.asdict(small.shape)}

    def operands(self, count: int, seed: int) -> list[tuple[Any, ...]]:
        return [(self.shape.operands(seed),)] * count

    def sizes(self) -> dict[str, Any]:
        return {"flops": self.flops, "least_bytes": self.shape.least_bytes}

    def describe(self) -> dict[str, Any]:
        facts = {"name": self.name, "pass": self.pass_, "tags": sorted(self.tags)}
        return facts | dataclasses.asdict(self.shape)

    def told(self) -> dict[str, Any]:
        documents = self.shape.documents().tolist() if self.kind == "documents" else []
        return self.describe() | {"flops": self.flops, "documents": documents}


def square(length: int, dim: int, kind: str) -> Shape:
    """A call of `TOKENS` tokens and `WIDTH` features."""
    heads = WIDTH // dim
    return Shape(TOKENS // length, heads, heads, length, dim, dim, kind)


def problem_of(problems: Any, shape: Shape, backward: bool) -> Any:
    """Makes the kernels' problem of a call, in the classes of a tree's module `problems`."""
    lengths = shape.query_length, shape.length
    mask = {"mask": (shape.batch, 1, *lengths)}
    bias = {"bias": (1, shape.heads, *lengths), "bias_dtype": jnp.dtype(shape.dtype), "bias_gradient": backward}
    own = {"window": {"window": (shape.span - 1, None)}, "documents": {"segments": True}, "bias": bias}
    own["lengths"] = {"key_lengths": True}
    facts = (own | {"mask": mask, "causal_mask": mask}).get(shape.kind, {})
    facts = {"causal_offset": 0, **facts} if shape.is_causal else facts
    sizes = shape.batch, shape.heads, shape.key_heads, *lengths, shape.head_dim, shape.value_dim
    op = problems.Op.BACKWARD if backward else problems.Op.FORWARD
    return problems.Attention(op, *sizes, jnp.dtype(shape.dtype), scale=shape.head_dim**-0.5, **facts)


def parse(name: str) -> AttentionCase | None:
    """The case of a name, in the table or not: `attention_bwd_causal_d64_s8192_b2_h32`; None if it is no such name."""
    match = re.fullmatch(rf"(?:attention_)?({'|'.join(PASSES)})_({_NAME.pattern})", name)
    if match is None:
        return None
    known = {case.name: case for case in (*TABLE.cases, *TABLE.select(tags=["decode"]))}
    case = AttentionCase(Shape.parse(match[2]), match[1], frozenset())
    return known.get(case.name, case)


def _declared() -> list[AttentionCase]:
    """Returns the cases that decide first."""
    found, squares = [], _SQUARES
    for shape, pass_ in itertools.product((*squares, *map(Shape.parse, _OTHERS)), PASSES):
        tags = {"standard"}
        if shape.kind in ("full", "causal") and pass_ != "value_and_vjp":
            tags.add("grid")
            if shape in squares and shape.length in (512, 4096):
                tags.add("rest")
            elif shape in squares and (pass_, shape.head_dim) != ("bwd", 256):
                tags.add("core")
        found.append(AttentionCase(shape, pass_, frozenset(tags)))
    return sorted(found, key=lambda case: "core" not in case.tags)


def _cases(tag: str, *_: int) -> Iterator[AttentionCase]:
    names, passes = _APART[tag]
    for name, pass_ in itertools.product(names, passes.split()):
        yield AttentionCase(Shape.parse(name), pass_, frozenset({tag}))


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
    queries = queries if queries != keys else 0
    shape = Shape(batch, key_heads * group, key_heads, keys, dim, dim, kind, 0, queries, dtype)
    return AttentionCase(shape, pass_, frozenset({"sample"}))


_SQUARES = [square(*cell) for cell in itertools.product(LENGTHS, DIMS, ("full", "causal"))]
_SIZES = itertools.product(_FOR_CPU, ("_f32", ""), ("full", "causal"))
# Calls by name and passes of the tags that are measured apart.
_APART: dict[str, tuple[list[str], str]] = {
    "odd": ([dataclasses.replace(shape, length=shape.length - 1).name for shape in _SQUARES], "fwd bwd"),
    "short": ([*_SHORT], "fwd value_and_vjp"),
    "decode": (["lengths_d128_t1_s8192_b64_h32g8", *(f"full_{name}" for name in _DECODE)], "fwd"),
    "caches": (_GROWING, "fwd"),
    "fallbacks": ([*_FALLBACKS], "fwd value_and_vjp"),
    "cpu": ([f"{k}_{name}{end}" for name, end, k in _SIZES if k == "full" or "_t1_" not in name], "fwd value_and_vjp"),
    "invariance": ([*_INVARIANT], "fwd"),
}
TABLE = Table(_declared, {"sample": sample} | {tag: functools.partial(_cases, tag) for tag in _APART}, parse)
