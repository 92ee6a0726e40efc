"""A table has the measured cases by name, selects among them, and has the cases of rows.

`benchmarks.attention_cases` has those of attention, in a table of the same kind. Tags of rows: `core` (under two
minutes on an H200), `standard` (all that the README's claims need), `extended` (more dtypes), `smoke` (what a CPU runs
by default), `ladder` (the widths of docs/ladder.md), `sweep` (bandwidth against N), `hot` (the working set fits in L2
and buffers are not rotated), `cross_entropy` and `top_k` (a run each, beside `standard`), and one per source.
`invariance` (what `jaxsoftmax.batch_invariant()` costs) is measured only where it is asked for.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.softmax.problem import Op, Problem

SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
LONG_DTYPES = {short: long for long, short in SHORT_DTYPES.items()}
PASSES = ("fwd", "bwd", "value_and_vjp", "call", "value_and_grad", "value_and_grad_mean")
ROTATED_BYTES = 150 * 10**6  # between two uses of one address, so that L2 (50 MB) holds nothing of use
_CPU_ELEMENTS = 1 << 18  # of a case where there is no GPU
_OWN_RUNS = {"cross_entropy", "top_k", "extended", "invariance"}  # tags of cases that are not "standard"

# Rows that give every width at least 64 MB in 16 bits (128 MB moved), by the width.
SWEEP = {256: 262144, 512: 262144, 1024: 32768, 2048: 32768, 4096: 32768, 8192: 16384, 16384: 8192, 32768: 4096}
SWEEP |= {65536: 4096, 131072: 4096, 262144: 2048}
HTILE = (
    *((32768, n) for n in (1024, 2048, 4096, 6144)),
    *((m, n) for n in (8192, 16384) for m in (4096, 8192, 16384)),
    *((4096, n) for n in (32768, 65536, 131072)),
)
VOCABULARIES = {32000: ("Llama-2", 8192), 50257: ("GPT-2", 8192), 128256: ("Llama-3", 8192), 151936: ("Qwen", 4096)}
TOP_K = ("k1", "k8", "k64")
# A call's arguments by name, by the end of the case's name.
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "smoothed_capped": {"label_smoothing": 0.1, "z_loss": 1e-4, "logits_soft_cap": 30.0},
    "half_ignored": {"ignore_index": -100},
    **{k: {"k": int(k[1:])} for k in TOP_K},
    "axis0": {"axis": 0},  # of the transposed operand
}

_SWEPT = [(rows, cols) for cols, rows in SWEEP.items()]
_LOSSES = [(8192, 32000), (8192, 50257), (8192, 128256), (4096, 151936), (4096, 262144)]
# An operation, its passes, dtypes, shapes as rows and columns, the source, tags and variants.
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("softmax", "fwd", "f16 bf16 f32", _SWEPT, "powers of two", "sweep"),
    ("softmax", "fwd", "f16", HTILE, "HTile", "htile"),
    ("softmax", "fwd", "f32", [(8765, 4096)], "MSRA", "msra"),
    ("softmax", "fwd", "f32", [(128, 1024), (128, 16384)], "FastSoftmax", "fastsoftmax hot"),
    ("softmax", "fwd", "f32", [(128, 131072)], "FastSoftmax", "fastsoftmax"),
    *(
        ("softmax", "fwd", dtypes, [(rows, cols)], f"{model} vocabulary", tags)
        for cols, (model, rows) in VOCABULARIES.items()
        for dtypes, tags in (("bf16", "vocab"), ("f16 f32", "vocab extended"))
    ),
    ("softmax", "fwd", "bf16", [(8192, 50176)], "aligned neighbour of 50257", "vocab ragged"),
    ("softmax", "fwd", "f16 f32", [(65536, 1000), (65536, 1001)], "odd widths", "ragged"),
    ("softmax", "fwd", "f16 f32", [(64, 1048576)], "one-million rows", "long"),
    ("softmax", "fwd", "f16", [(4096, 1048576)], "one-million rows", "long"),
    ("softmax", "fwd", "f32", [(1, 131072), (16, 131072), (64, 131072)], "few rows", "few_rows hot"),
    ("softmax", "call", "f32", [(8, 128)], "call overhead", "latency hot"),
    ("softmax", "bwd", "f16", _SWEPT[2:], "powers of two", "sweep"),
    ("softmax", "bwd", "bf16", _SWEPT[2:], "powers of two", "sweep extended"),
    ("softmax", "bwd", "f32", _SWEPT[2:], "powers of two", "sweep"),
    *(
        ("softmax", "value_and_vjp", "bf16", [(rows, cols)], "training step", "training")
        for rows, cols in ((32768, 4096), (4096, 32768), (4096, 131072), (8192, 128256))
    ),
    *(
        (op, "fwd", dtype, shapes, "losses", "losses")
        for op in ("log_softmax", "logsumexp")
        for dtype, shapes in (("bf16", [(32768, 4096), (8192, 128256)]), ("f32", [(4096, 131072)]))
    ),
    ("log_softmax", "bwd", "bf16", [(8192, 128256)], "losses", "losses"),
    ("log_softmax", "value_and_vjp", "bf16", [(32768, 4096)], "losses", "losses"),
    ("cross_entropy", "fwd value_and_grad value_and_grad_mean", "bf16", _LOSSES, "losses over vocabularies",
     "cross_entropy"),
    *(
        ("cross_entropy", pass_, *rest)
        for pass_ in ("fwd", "value_and_grad")
        for rest in (
            ("f16 f32", [(8192, 128256)], "losses over vocabularies", "extended"),
            ("bf16", [(8192, 128256)], "losses over vocabularies", "extended", "smoothed_capped", "half_ignored"),
            ("bf16", [(64, 128256)], "few rows", "extended hot"),
        )
    ),
    *(
        ("top_k", "fwd", "bf16", shapes, "sampling", tags, *TOP_K)
        for cols, most in ((32000, 8192), (128256, 8192), (262144, 4096))
        for shapes, tags in (([(1, cols), (64, cols)], "top_k hot"), ([(most, cols)], "top_k"))
    ),
)  # fmt: skip
# Few rows and many of the same length, where the choice without it differs.
_INVARIANT_ROWS: tuple[tuple[Any, ...], ...] = (
    ("softmax", "fwd", "bf16", [(1, 128256), (16, 128256), (256, 128256), (4096, 128256), (64, 4096), (65536, 4096)],
     "batch invariance", "invariance"),
    *(
        (op, pass_, "bf16", [(rows, 128256)], "batch invariance", "invariance")
        for rows in (16, 4096)
        for op, pass_ in (("logsumexp", "fwd"), ("cross_entropy", "value_and_grad"))
    ),
    ("top_k", "fwd", "bf16", [(1, 128256), (256, 128256)], "batch invariance", "invariance", "k8"),
    ("softmax", "fwd", "bf16", [(4096, 4096)], "batch invariance", "invariance", "axis0"),
)  # fmt: skip
# More tags, and the cases of the table above that have them.
_TAGGED = {
    "core": {
        "softmax_fwd_f16": "32768x1024 32768x4096 8192x16384 4096x32768 4096x131072 2048x262144 64x1048576",
        "softmax_fwd_bf16": "262144x256 16384x8192 4096x65536 8192x50257 8192x128256 8192x50176",
        "softmax_fwd_f32": "32768x1024 16384x8192 4096x32768 4096x131072 8765x4096 1x131072 16x131072 64x131072",
        "softmax_call_f32": "8x128",
        "softmax_bwd_f16": "32768x4096 4096x32768 2048x262144",
        "softmax_value_and_vjp_bf16": "32768x4096 8192x128256",
        "log_softmax_fwd_bf16": "32768x4096",
        "logsumexp_fwd_bf16": "32768x4096",
    },
    "smoke": {
        **{f"softmax_fwd_{dtype}": "32768x1024" for dtype in ("f16", "f32")},
        "softmax_fwd_bf16": "32768x1024 8192x32000 8192x50257 8192x128256 4096x151936",
        "softmax_call_f32": "8x128",
        "softmax_bwd_f32": "32768x4096",
        "softmax_value_and_vjp_bf16": "32768x4096",
        **{f"{op}_fwd_bf16": "32768x4096" for op in ("log_softmax", "logsumexp")},
        **{f"cross_entropy_{pass_}_bf16": "8192x32000" for pass_ in ("fwd", "value_and_grad", "value_and_grad_mean")},
        "top_k_fwd_bf16": "64x32000_k8",
    },
    "ladder": dict.fromkeys(
        ("softmax_fwd_f16", "softmax_fwd_f32", "softmax_bwd_f16"),
        "32768x1024 32768x4096 8192x16384 4096x32768 4096x131072 2048x262144",
    ),
}


@dataclasses.dataclass(frozen=True)
class RowCase:
    """An operation on `[rows, cols]`, along the columns.

    `pass_` is "fwd", "bwd" (residual and cotangent to gradient), "value_and_vjp" (both, in one jitted function), "call"
    (what one small call costs), or for a loss "value_and_grad" (of the sum of losses weighted by 1 / rows) or
    "value_and_grad_mean" (of their mean). `variant` is a key of `OPTIONS`.
    """

    op: str
    pass_: str
    rows: int
    cols: int
    dtype: str
    source: str
    tags: frozenset[str]
    variant: str = ""

    @property
    def name(self) -> str:
        end = f"_{self.variant}" if self.variant else ""
        return f"{self.op}_{self.pass_}_{SHORT_DTYPES[self.dtype]}_{self.rows}x{self.cols}{end}"

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS[self.variant]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Returns the operations to compute, as one would ask kernels for them, in order."""
        forward = Op.STATS if self.op in ("logsumexp", "top_k") else Op(self.op)
        backward = {"softmax": Op.SOFTMAX_TANGENT, "log_softmax": Op.LOG_SOFTMAX_COTANGENT}.get(self.op)
        ops = {"fwd": (forward,), "call": (forward,), "bwd": (backward,), "value_and_vjp": (forward, backward)}
        chosen = ops.get(self.pass_, (Op.CROSS_ENTROPY_GRADIENT,))
        return tuple(Problem(op, self.rows, self.cols, jnp.dtype(self.dtype)) for op in chosen)

    @property
    def operand_bytes(self) -> int:
        return self.rows * self.cols * jnp.dtype(self.dtype).itemsize

    @property
    def least_bytes(self) -> int:
        """The traffic no implementation can go below: every operand read once, every result written once."""
        unread = self.operand_bytes // 2 if self.variant == "half_ignored" else 0
        return sum(problem.least_bytes for problem in self.problems) - unread

    @property
    def copied_bytes(self) -> int:
        """The traffic of the copy beside it: as much, and for a loss the logits read and written once."""
        return 2 * self.operand_bytes if self.op == "cross_entropy" else self.least_bytes

    @property
    def flops(self) -> int:
        """Arithmetic of the algorithm, with an exponential counted as one operation."""
        forward = {"softmax": 5, "log_softmax": 5}.get(self.op, 4) if self.pass_ != "bwd" else 0
        backward = {"softmax": 4, "log_softmax": 6, "cross_entropy": 2}
        return self.rows * self.cols * (forward + (0 if self.pass_ in ("fwd", "call") else backward[self.op]))

    @property
    def buffers(self) -> int:
        """How many sets of operands rotate: as many as L2 cannot hold, unless the case is meant to run out of L2."""
        return 1 if "hot" in self.tags else max(1, -(-ROTATED_BYTES // self.operand_bytes))

    def shrunk(self) -> tuple["RowCase", dict[str, Any]]:
        """The case with as many rows as a CPU has time for, and what a result file says of that."""
        small = dataclasses.replace(self, rows=max(1, min(self.rows, _CPU_ELEMENTS // self.cols)))
        return small, {"rows_measured": small.rows}

    def sizes(self) -> dict[str, Any]:
        return {"least_bytes": self.least_bytes, "operand_bytes": self.operand_bytes, "flops": self.flops}

    def describe(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("name", "op", "rows", "cols", "dtype", "source", "options")}
        return facts | {"pass": self.pass_, "tags": sorted(self.tags)}

    def told(self) -> dict[str, Any]:
        sizes = {"least_bytes": self.least_bytes, "copied_bytes": self.copied_bytes}
        return self.describe() | sizes | {"buffers": self.buffers}

    def operands(self, count: int, seed: int) -> list[tuple[Any, ...]]:
        """`count` sets of standard-normal logits, and labels, or for a gradient its cotangent."""
        has_labels = self.op == "cross_entropy"
        arrays = 1 if self.pass_ in ("fwd", "call") and not has_labels else 2
        keys = jax.random.split(jax.random.key(seed), (count, arrays))
        normal = lambda key: jax.random.normal(key, (self.rows, self.cols), self.dtype)
        return [(normal(first), *map(self.labels if has_labels else normal, rest)) for first, *rest in keys]

    def labels(self, key: jax.Array) -> jax.Array:
        """Random ones, the first and the last column among them; with an `ignore_index`, half of the rows have that."""
        y = jax.random.randint(key, (self.rows,), 0, self.cols, jnp.int32).at[0].set(0).at[-1].set(self.cols - 1)
        if "ignore_index" not in self.options:
            return y
        is_ignored = jax.random.permutation(key, self.rows) < self.rows // 2
        return jnp.where(is_ignored, self.options["ignore_index"], y)


def _cases(table: Iterable[tuple[Any, ...]]) -> Iterator[RowCase]:
    for op, passes, dtypes, shapes, source, words, *variants in table:
        tags = {*words.split()}
        tags |= set() if tags & _OWN_RUNS else {"standard"}
        chosen = itertools.product(passes.split(), dtypes.split(), shapes, variants or [""])
        for pass_, dtype, (rows, cols), variant in chosen:
            yield RowCase(op, pass_, rows, cols, LONG_DTYPES[dtype], source, frozenset(tags), variant)


def _declared() -> Iterator[RowCase]:
    for case in _cases(_ROWS):
        start, _, shape = case.name.partition(f"_{case.rows}x")
        tags = {tag for tag, of_tag in _TAGGED.items() if f"{case.rows}x{shape}" in of_tag.get(start, "").split()}
        yield dataclasses.replace(case, tags=case.tags | tags)


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


TABLE = Table(_declared, {"invariance": lambda *_: _cases(_INVARIANT_ROWS)})
