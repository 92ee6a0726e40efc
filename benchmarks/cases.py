"""What is measured: a table of named cases, how to select among them, and the cases of rows.

`benchmarks.attention_cases` has those of attention, in a table of the same kind. Tags of rows: `core` (under two
minutes on an H200), `standard` (all that the README's claims need), `extended` (more dtypes), `smoke` (what a CPU runs
by default), `ladder` (the widths of docs/ladder.md), `sweep` (bandwidth against N), `hot` (the working set fits in L2
and buffers are not rotated: launch and latency show, not bandwidth), `cross_entropy` and `top_k` (a run each, beside
`standard`), and one per source. `invariance` (what `jaxsoftmax.batch_invariant()` costs) is measured only where it is
asked for.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from benchmarks import timing
from pallas_kernels.softmax.problem import Op, Problem

SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
PASSES = ("fwd", "bwd", "value_and_vjp", "call", "value_and_grad", "value_and_grad_mean")
Buffers = list[tuple[Any, ...]]  # operands of a call, as often as they rotate
_OWN_RUNS = frozenset({"cross_entropy", "top_k", "extended", "invariance"})
_CPU_ELEMENTS = 1 << 18  # of a case where there is no GPU

# Rows that give every width at least 64 MB in 16 bits (128 MB moved).
SWEEP = {
    256: 262144,
    512: 262144,
    1024: 32768,
    2048: 32768,
    4096: 32768,
    8192: 16384,
    16384: 8192,
    32768: 4096,
    65536: 4096,
    131072: 4096,
    262144: 2048,
}
# The published table has 14 lines; 4096 x 65536 stands in it twice.
HTILE = (
    *((32768, n) for n in (1024, 2048, 4096, 6144)),
    *((m, n) for n in (8192, 16384) for m in (4096, 8192, 16384)),
    *((4096, n) for n in (32768, 65536, 131072)),
)
VOCABULARIES = {32000: ("Llama-2", 8192), 50257: ("GPT-2", 8192), 128256: ("Llama-3", 8192), 151936: ("Qwen", 4096)}
LADDER_COLS = (1024, 4096, 16384, 32768, 131072, 262144)
CORE = {
    "float16": (1024, 4096, 16384, 32768, 131072, 262144),
    "bfloat16": (256, 8192, 65536),
    "float32": (1024, 8192, 32768, 131072),
}
LOSS_SHAPES = {32000: 8192, 50257: 8192, 128256: 8192, 151936: 4096, 262144: 4096}
TOP_K = (1, 8, 64)
# What a call is given by name, by the end of the case's name.
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "smoothed_capped": {"label_smoothing": 0.1, "z_loss": 1e-4, "logits_soft_cap": 30.0},
    "half_ignored": {"ignore_index": -100},
    **{f"k{k}": {"k": k} for k in TOP_K},
    "axis0": {"axis": 0},  # of the transposed operand
}

# Per element, exp counted as one: (scale, subtract, exp, add, multiply) forward; products and sums backward.
_FLOPS = {"softmax": 5, "log_softmax": 5, "logsumexp": 4, "cross_entropy": 4, "top_k": 4}
_BACKWARD_FLOPS = {"softmax": 4, "log_softmax": 6, "cross_entropy": 2}


@dataclasses.dataclass(frozen=True)
class Table[C]:
    """The cases of a topic; those of the tags in `apart` are made and measured only where they are asked for.

    A case has an `op`, a `pass_`, `tags` and a `name`; `about`, a word for `--list`; `key`, what is computed;
    `buffers`, how many sets of operands rotate; `operands(count, seed)`; `sizes()`, the bytes and arithmetic that a
    result file has; `shrunk()`, the case for a machine without a GPU, and `as_measured()`, what a file says of that;
    `describe()`, the case as JSON; and `told()`, what torch's process is told of it.
    """

    declared: Callable[[], Iterable[C]]
    apart: Mapping[str, Callable[[int, int], Iterable[C]]]  # of a count and a seed, which decide what is drawn
    parse: Callable[[str], C | None] = lambda name: None  # names of cases that are not in the table

    @functools.cached_property
    def cases(self) -> tuple[C, ...]:
        """What is declared, each once."""
        return _merged(self.declared())

    @functools.cached_property
    def tags(self) -> tuple[str, ...]:
        cases: tuple[Any, ...] = self.cases
        return (*sorted({tag for case in cases for tag in case.tags} - self.apart.keys()), *self.apart)

    def select(
        self,
        *,
        ops: Iterable[str] = (),
        passes: Iterable[str] = (),
        dtypes: Iterable[str] = (),
        kinds: Iterable[str] = (),
        tags: Iterable[str] = (),
        patterns: Iterable[str] = (),
        count: int = 60,
        seed: int = 0,
    ) -> tuple[C, ...]:
        """Cases that match every filter given; a filter without entries passes all.

        `patterns` are searched in names, or name cases that are not in the table. `count` and `seed` decide what is
        drawn.
        """
        tags, patterns = frozenset(tags), tuple(patterns)
        apart: list[Any] = [case for tag in self.apart if tag in tags for case in self.apart[tag](count, seed)]
        table: tuple[Any, ...] = _merged((*self.cases, *apart)) if apart else self.cases
        long_names = {short: long for long, short in SHORT_DTYPES.items()}
        fields = {"op": ops, "pass_": passes, "kind": kinds, "dtype": [long_names.get(name, name) for name in dtypes]}
        wanted = {field: frozenset(values) for field, values in fields.items()}
        known = {case.name for case in table}
        parsed: list[Any] = [self.parse(pattern) for pattern in patterns]
        named = [case for case in parsed if case is not None and case.name not in known]
        chosen = [
            case
            for case in table
            if (not tags or case.tags & tags)
            and all(not values or getattr(case, field) in values for field, values in wanted.items())
            and (not patterns or any(re.search(pattern, case.name) for pattern in patterns))
        ]
        return (*named, *chosen)


def _merged[C](cases: Iterable[C]) -> tuple[C, ...]:
    """Every case once; one that several sources name carries all their names and tags."""
    found: dict[str, Any] = {}
    for case in cast(Iterable[Any], cases):
        known = found.setdefault(case.name, case)
        if known is not case:
            changes = {"tags": known.tags | case.tags}
            if isinstance(case, RowCase):
                changes["source"] = "; ".join(dict.fromkeys((*known.source.split("; "), case.source)))
            found[case.name] = dataclasses.replace(known, **changes)
    return tuple(found.values())


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
    def about(self) -> str:
        return self.source

    @property
    def key(self) -> "RowCase":
        return self

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS[self.variant]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is to be computed, as one would ask kernels for it, in order."""
        forward = Op.STATS if self.op in ("logsumexp", "top_k") else Op(self.op)
        backward = {"softmax": Op.SOFTMAX_TANGENT, "log_softmax": Op.LOG_SOFTMAX_COTANGENT}.get(self.op)
        ops = {"fwd": (forward,), "call": (forward,), "bwd": (backward,), "value_and_vjp": (forward, backward)}
        chosen = ops.get(self.pass_, (Op.CROSS_ENTROPY_GRADIENT,))
        return tuple(Problem(op, self.rows, self.cols, jnp.dtype(self.dtype)) for op in chosen)

    @property
    def operand_bytes(self) -> int:
        """The size of one operand."""
        problem = self.problems[0]
        return problem.elements * problem.dtype.itemsize

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
        """Arithmetic of the algorithm, not of any implementation of it."""
        forward = _FLOPS[self.op] if self.pass_ != "bwd" else 0
        backward = 0 if self.pass_ in ("fwd", "call") else _BACKWARD_FLOPS[self.op]
        return self.rows * self.cols * (forward + backward)

    @property
    def buffers(self) -> int:
        """As many as L2 cannot hold, unless the case is meant to run out of L2."""
        return timing.buffers_needed(self.operand_bytes, hot="hot" in self.tags)

    def shrunk(self) -> "RowCase":
        """The case with as many rows as a CPU has time for, one at least."""
        return dataclasses.replace(self, rows=max(1, min(self.rows, _CPU_ELEMENTS // self.cols)))

    def as_measured(self) -> dict[str, Any]:
        return {"rows_measured": self.rows}

    def sizes(self) -> dict[str, Any]:
        return {"least_bytes": self.least_bytes, "operand_bytes": self.operand_bytes, "flops": self.flops}

    def describe(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self) | {"name": self.name, "tags": sorted(self.tags), "pass": self.pass_}
        del fields["pass_"], fields["variant"]
        return fields | {"options": self.options}

    def told(self) -> dict[str, Any]:
        sizes = {"least_bytes": self.least_bytes, "copied_bytes": self.copied_bytes}
        return self.describe() | sizes | {"buffers": self.buffers}

    def operands(self, count: int, seed: int) -> Buffers:
        """Standard-normal logits, and labels, or for a gradient its cotangent."""
        arrays = 1 if self.pass_ in ("fwd", "call") and self.op != "cross_entropy" else 2
        keys = jax.random.split(jax.random.key(seed), (count, arrays))
        normal = lambda key: _normal(key, (self.rows, self.cols), self.dtype)
        if self.op == "cross_entropy":
            return [(normal(of_logits), self.labels(of_labels)) for of_logits, of_labels in keys]
        return [tuple(map(normal, of_set)) for of_set in keys]

    def labels(self, key: jax.Array) -> jax.Array:
        """Random ones, the first and the last column among them; with an `ignore_index`, half of the rows have that."""
        y = jax.random.randint(key, (self.rows,), 0, self.cols, jnp.int32).at[0].set(0).at[-1].set(self.cols - 1)
        if "ignore_index" not in self.options:
            return y
        is_ignored = jax.random.permutation(key, self.rows) < self.rows // 2
        return jnp.where(is_ignored, self.options["ignore_index"], y)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def _case(op: str, pass_: str, rows: int, cols: int, dtype: str, source: str, *tags: str, variant: str = "") -> RowCase:
    standard = () if _OWN_RUNS & {*tags} else ("standard",)
    return RowCase(op, pass_, rows, cols, dtype, source, frozenset((*tags, *standard)), variant)


def _declared() -> Iterator[RowCase]:
    yield from _softmax()
    yield from _losses()


def _softmax() -> Iterator[RowCase]:
    for dtype in SHORT_DTYPES:
        for cols, rows in SWEEP.items():
            tags = ["sweep"]
            tags += ["core"] if cols in CORE[dtype] else []
            tags += ["ladder"] if cols in LADDER_COLS and dtype != "bfloat16" else []
            tags += ["smoke"] if cols == 1024 else []
            yield _case("softmax", "fwd", rows, cols, dtype, "powers of two", *tags)
    for rows, cols in HTILE:
        yield _case("softmax", "fwd", rows, cols, "float16", "HTile", "htile")
    yield _case("softmax", "fwd", 8765, 4096, "float32", "MSRA", "msra", "core")
    for cols in (1024, 16384):
        yield _case("softmax", "fwd", 128, cols, "float32", "FastSoftmax", "fastsoftmax", "hot")
    yield _case("softmax", "fwd", 128, 131072, "float32", "FastSoftmax", "fastsoftmax")
    for cols, (model, rows) in VOCABULARIES.items():
        core = ("core",) if cols in (50257, 128256) else ()
        yield _case("softmax", "fwd", rows, cols, "bfloat16", f"{model} vocabulary", "vocab", "smoke", *core)
        yield _case("softmax", "fwd", rows, cols, "float16", f"{model} vocabulary", "vocab", "extended")
        yield _case("softmax", "fwd", rows, cols, "float32", f"{model} vocabulary", "vocab", "extended")
    yield _case("softmax", "fwd", 8192, 50176, "bfloat16", "aligned neighbour of 50257", "vocab", "ragged", "core")
    for dtype in ("float16", "float32"):
        for cols in (1000, 1001):
            yield _case("softmax", "fwd", 65536, cols, dtype, "odd widths", "ragged")
    yield _case("softmax", "fwd", 64, 1048576, "float16", "one-million rows", "long", "core")
    yield _case("softmax", "fwd", 64, 1048576, "float32", "one-million rows", "long")
    yield _case("softmax", "fwd", 4096, 1048576, "float16", "one-million rows", "long")
    for rows in (1, 16, 64):
        yield _case("softmax", "fwd", rows, 131072, "float32", "few rows", "few_rows", "hot", "core")
    yield _case("softmax", "call", 8, 128, "float32", "call overhead", "latency", "hot", "core", "smoke")
    for dtype in SHORT_DTYPES:
        for cols, rows in SWEEP.items():
            if cols < 1024:
                continue
            tags = ["sweep"] if dtype != "bfloat16" else ["sweep", "extended"]
            tags += ["core"] if dtype == "float16" and cols in (4096, 32768, 262144) else []
            tags += ["ladder"] if cols in LADDER_COLS and dtype == "float16" else []
            tags += ["smoke"] if dtype == "float32" and cols == 4096 else []
            yield _case("softmax", "bwd", rows, cols, dtype, "powers of two", *tags)
    for cols, tags in ((4096, ("core", "smoke")), (32768, ()), (131072, ()), (128256, ("core",))):
        rows = SWEEP.get(cols, 8192)
        yield _case("softmax", "value_and_vjp", rows, cols, "bfloat16", "training step", "training", *tags)


def _losses() -> Iterator[RowCase]:
    for op in ("log_softmax", "logsumexp"):
        for cols in (4096, 128256):
            tags = ("smoke", "core") if cols == 4096 else ()
            yield _case(op, "fwd", SWEEP.get(cols, 8192), cols, "bfloat16", "losses", "losses", *tags)
        yield _case(op, "fwd", 4096, 131072, "float32", "losses", "losses")
    yield _case("log_softmax", "bwd", 8192, 128256, "bfloat16", "losses", "losses")
    yield _case("log_softmax", "value_and_vjp", 32768, 4096, "bfloat16", "losses", "losses")
    case = functools.partial(_case, "cross_entropy")
    source = "losses over vocabularies"
    for pass_ in ("fwd", "value_and_grad", "value_and_grad_mean"):
        for cols, rows in LOSS_SHAPES.items():
            smoke = ("smoke",) if cols == 32000 else ()
            yield case(pass_, rows, cols, "bfloat16", source, "cross_entropy", *smoke)
    for pass_ in ("fwd", "value_and_grad"):
        for dtype in ("float16", "float32"):
            yield case(pass_, 8192, 128256, dtype, source, "extended")
        for variant in ("smoothed_capped", "half_ignored"):
            yield case(pass_, 8192, 128256, "bfloat16", source, "extended", variant=variant)
        yield case(pass_, 64, 128256, "bfloat16", "few rows", "extended", "hot")
    for cols, most in ((32000, 8192), (128256, 8192), (262144, 4096)):
        for rows in (1, 64, most):
            tags = ("top_k", "hot") if rows <= 64 else ("top_k",)
            for k in TOP_K:
                smoke = ("smoke",) if (rows, cols, k) == (64, 32000, 8) else ()
                yield _case("top_k", "fwd", rows, cols, "bfloat16", "sampling", *tags, *smoke, variant=f"k{k}")


def _invariance(*_: int) -> Iterator[RowCase]:
    """Few rows and many of the same length, where the choice without it differs."""
    case = lambda op, rows, cols, pass_="fwd", variant="": _case(
        op, pass_, rows, cols, "bfloat16", "batch invariance", "invariance", variant=variant
    )
    for rows, cols in (*((rows, 128256) for rows in (1, 16, 256, 4096)), (64, 4096), (65536, 4096)):
        yield case("softmax", rows, cols)
    for rows in (16, 4096):
        yield case("logsumexp", rows, 128256)
        yield case("cross_entropy", rows, 128256, "value_and_grad")
    for rows in (1, 256):
        yield case("top_k", rows, 128256, variant="k8")
    yield case("softmax", 4096, 4096, variant="axis0")


TABLE = Table(_declared, {"invariance": _invariance})
select = TABLE.select
