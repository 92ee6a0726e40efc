"""What is measured of attention: named cases, what each computes, and its arithmetic.

Tags: `core` (the cells that decide, a few minutes on an H200), `grid` (forward and backward of every length, head
dimension, full and causal, and of grouped and unequal heads), `rest` (the grid's lengths that `core` leaves out),
`standard` (everything).
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TAGS = ("core", "grid", "rest", "standard")
PASSES = ("fwd", "bwd", "value_and_vjp")
KINDS = ("full", "causal", "window", "documents", "mask", "causal_mask", "bias")
TOKENS, WIDTH = 16384, 2048  # of a batch, and of all heads together
LENGTHS, DIMS = (512, 2048, 4096, 16384), (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An attention call: what is computed, apart from the pass.

    `kind` says which keys a query sees: "full"; "causal"; "window", causal, `span` keys in all; "documents", causal
    within packed documents of about `span` tokens; "mask", a random bool tensor [B, 1, T, S]; "causal_mask",
    causal, as such a tensor; "bias", all, with a tensor [1, N, T, S].
    """

    batch: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    value_dim: int
    kind: str
    span: int = 0

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}g{self.key_heads}"
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}v{self.value_dim}"
        return f"{self.kind}_d{dims}_s{self.length}_b{self.batch}_h{heads}"

    @property
    def is_causal(self) -> bool:
        return self.kind in ("causal", "window", "documents")

    @property
    def pairs(self) -> float:
        """Pairs of query and key in a head and sequence that count as work; by convention, causal is half of full."""
        s = self.length
        if self.kind == "window":
            return sum(min(i + 1, self.span) for i in range(s))
        if self.kind == "documents":
            return float((self.documents() ** 2).sum() / 2)
        return s * s / 2 if self.kind in ("causal", "causal_mask") else s * s

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
        return dataclasses.replace(
            self, batch=1, heads=group * heads, key_heads=heads, length=length, span=span
        )  # fmt: skip

    def operands(self, seed: int) -> dict[str, jax.Array]:
        """Random normal bfloat16 query, key, value and `d_out`, and what the kind needs."""
        keys = iter(jax.random.split(jax.random.key(seed), 6))
        b, s, heads = self.batch, self.length, self.heads
        shapes = {
            "query": (heads, self.head_dim),
            "key": (self.key_heads, self.head_dim),
            "value": (self.key_heads, self.value_dim),
            "d_out": (heads, self.value_dim),
        }
        made = {name: jax.random.normal(next(keys), (b, s, *rest), jnp.bfloat16) for name, rest in shapes.items()}
        if self.kind == "mask":  # every query sees itself, for peers differ on queries that see nothing
            random = jax.random.bernoulli(next(keys), 0.8, (b, 1, s, s))
            made["mask"] = random | jnp.eye(s, dtype=bool)
        if self.kind == "causal_mask":
            made["mask"] = jnp.tile(jnp.tri(s, dtype=bool), (b, 1, 1, 1))
        if self.kind == "bias":
            made["bias"] = jax.random.normal(next(keys), (1, heads, s, s), jnp.bfloat16)
        if self.kind == "documents":
            made["segments"] = jnp.asarray(self.segments())
        return made


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: a call, and "fwd", "bwd" (residuals and cotangent given) or "value_and_vjp" (both)."""

    shape: Shape
    pass_: str
    tags: frozenset[str]

    @property
    def name(self) -> str:
        return f"attention_{self.pass_}_{self.shape.name}"

    @property
    def flops(self) -> float:
        return self.shape.flops(self.pass_)

    def describe(self) -> dict[str, Any]:
        """The case as JSON."""
        facts = {"name": self.name, "pass": self.pass_, "dtype": "bfloat16", "tags": sorted(self.tags)}
        return facts | dataclasses.asdict(self.shape)


def all_cases() -> tuple[Case, ...]:
    """Every case once, those that decide first."""
    found = [Case(shape, pass_, _tags(shape, pass_)) for shape, pass_ in itertools.product(_shapes(), PASSES)]
    return tuple(sorted(found, key=lambda case: "core" not in case.tags))


def select(
    *, tags: Iterable[str] = (), passes: Iterable[str] = (), kinds: Iterable[str] = (), patterns: Iterable[str] = ()
) -> tuple[Case, ...]:
    """Cases that match every filter given; `patterns` are searched in names."""
    tags, passes, kinds, patterns = frozenset(tags), frozenset(passes), frozenset(kinds), tuple(patterns)
    return tuple(
        case
        for case in all_cases()
        if (not tags or case.tags & tags)
        and (not passes or case.pass_ in passes)
        and (not kinds or case.shape.kind in kinds)
        and (not patterns or any(re.search(p, case.name) for p in patterns))
    )


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
