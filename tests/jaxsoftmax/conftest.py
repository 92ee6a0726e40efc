"""A stand-in for the kernels: what `dispatch` decides for becomes the reference, on whole `[rows, cols]` operands.

With it the primitives take the kernels' path on the CPU. The partitioner cannot look through that path, so where a
stand-in ran on a shard, a kernel would have; `problems` records the pieces it was asked for.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.interpreters import mlir

from jaxsoftmax import _top_k
from jaxsoftmax._attention import paged
from jaxsoftmax._attention import primitives as attention_primitives
from jaxsoftmax._core import lowering, numbers
from jaxsoftmax._cross_entropy import soft
from jaxsoftmax._softmax import primitives as row_primitives
from pallas_kernels.attention import problem as attention_problem
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.attention.problem import Attention, Operands, Rules
from pallas_kernels.softmax import dispatch
from pallas_kernels.softmax.problem import Op, Problem


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A decision for a kernel that is the reference in disguise."""

    problem: Problem
    kernel: str | None = "stand-in"
    declined: tuple[tuple[str, str], ...] = ()
    implementation: str = "mosaic_gpu"

    def run(self, *operands: jax.Array) -> Any:
        problem = self.problem
        shape = (problem.rows, problem.cols) + (() if problem.inner == 1 else (problem.inner,))
        number = shape[:1] + shape[2:]
        mask = {"none": [], "shared": [(problem.cols,)], "full": [shape]}[problem.where]
        numbers = [number] * len(problem.op.row_operands)
        assert [x.shape for x in operands] == [*[shape] * problem.operands, *numbers, *mask]
        row: dict[str, Any] = {"axes": (1,), "scale": problem.scale}
        if problem.op.has_labels:
            row |= {name: getattr(problem, name) for name in ("soft_cap", "smoothing", "z_loss")}
            assert operands[1].dtype == jnp.int32
        last = problem.operands + len(numbers)
        kept = [x if i < problem.operands or i >= last else x[:, None] for i, x in enumerate(operands)]
        return row_primitives.REFERENCE[problem.op](*kept, **row)


@dataclasses.dataclass(frozen=True)
class AttentionStandIn:
    """A decision for an attention kernel that is the reference in disguise, on operands as `problem` gives them."""

    problem: Attention
    kernel: str | None = "stand-in"
    declined: tuple[tuple[str, str], ...] = ()
    config: Any = None
    reason: str = "it is the only one"
    implementation: str = "mosaic_gpu"

    def run(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        if self.problem.page_size:
            return self._with_pages_gathered(*arrays)
        p = self.problem
        shapes = {
            "query": (p.batch, p.query_length, p.query_heads, p.head_dim),
            "key": (p.batch, p.key_length, p.key_heads, p.head_dim),
            "value": (p.batch, p.key_length, p.key_heads, p.value_dim),
            "bias": p.bias,
            "mask": p.mask,
            "query_lengths": (p.batch,) if p.query_lengths else None,
            "key_lengths": (p.batch,) if p.key_lengths else None,
            "query_segments": (p.batch, p.query_length) if p.segments else None,
            "key_segments": (p.batch, p.key_length) if p.segments else None,
            "query_positions": (p.batch, p.query_length) if p.positions else None,
            "key_positions": (p.batch, p.key_length) if p.positions else None,
            "window_sizes": (2,) if p.window_sizes else None,
            "cap": () if p.cap else None,
            "sinks": (p.query_heads,) if p.sinks else None,
            "keep": p.keep,
        }
        present = {name: shape for name, shape in shapes.items() if shape is not None}
        operands = dict(zip(present, arrays, strict=False))
        assert {name: x.shape for name, x in operands.items()} == present
        assert all(operands[name].dtype == jnp.int8 for name in ("mask", "keep") if name in operands)
        assert p.head_dim % 8 == p.value_dim % 8 == 0
        of_all = [name for name in ("window_sizes", "cap", "sinks") if name in operands]
        operands |= {name: operands[name][None] for name in of_all}
        rules = Rules(**p.of_kernels)
        if p.op is attention_problem.Op.FORWARD:
            return attention_reference.forward(Operands(**operands), rules)
        optional = {"bias": p.bias_gradient, "cap": p.cap, "sinks": p.sinks}
        wanted = ["query", "key", "value", *(name for name, is_there in optional.items() if is_there)]
        of = {name: operands[name].shape for name in wanted}
        rest = arrays[len(present) :]
        assert [x.shape[:2] for x in rest[1::2]] == [(p.batch, p.query_heads)] * 2
        found = attention_reference.backward(Operands(**operands), rules, *rest, shapes=of)
        return tuple(x[0] if name in of_all else x for name, x in zip(wanted, found, strict=True))

    def _with_pages_gathered(self, query: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        """The same on keys and values that a table names; a page that does not exist is NaN, but past the length."""
        p, (*pools, lengths, tables) = self.problem, (*rest[:3], rest[-1])
        entries = p.key_length // p.page_size
        assert (tables.shape, tables.dtype, lengths.dtype) == ((p.batch, entries), jnp.int32, jnp.int32)
        gathered = []
        for pool, dim in zip(pools, (p.head_dim, p.value_dim), strict=True):
            pages, axis = pool.shape[0 if p.pages_first else 1], 0 if p.pages_first else 1
            with_size = (pages, p.page_size, p.key_heads) if p.pages_first else (p.key_heads, pages, p.page_size)
            assert pool.shape == (*with_size, dim)
            named = jnp.where((tables >= 0) & (tables < pages), tables, pages)
            found = jnp.take(pool, named, axis, mode="fill", fill_value=jnp.nan)
            found = found if p.pages_first else jnp.moveaxis(found, 0, 3)
            gathered.append(found.reshape(p.batch, p.key_length, p.key_heads, dim))
        contiguous = dataclasses.replace(p, page_size=0, pages_first=False)
        return AttentionStandIn(contiguous).run(query, *gathered, *rest[2:-1])


@dataclasses.dataclass
class StandIns:
    """The kernels that a program asked for."""

    problems: list[Any] = dataclasses.field(default_factory=list)
    accepts: Callable[[Any], bool] = lambda _: True
    of_statistics: tuple[Op, ...] = ()  # operations of which a kernel takes the statistics alone

    def ran(self, op: Op) -> set[tuple[int, int, int]]:
        """Of an operation of rows the sizes."""
        return {(p.rows, p.cols, p.inner) for p in self.problems if p.op is op}

    def attended(self, op: attention_problem.Op) -> list[Attention]:
        return [p for p in self.problems if p.op is op]

    def decide(self, kind: Callable[..., Any], names: tuple[str, ...], problem: Any, *_: Any, **how: Any) -> Any:
        """What a dispatcher decides."""
        if getattr(problem, "op", None) in self.of_statistics and not how.get("alone"):
            problem = dataclasses.replace(problem, op=Op.STATS)
        self.problems.append(problem)
        if self.accepts(problem):
            return kind(problem)
        return kind(problem, None, tuple((name, "it is not for this") for name in names))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    """Kernels on the CPU."""
    from pallas_kernels.attention import dispatch as attention_dispatch

    record = StandIns()
    monkeypatch.setattr(dispatch, "decide", functools.partial(record.decide, StandIn, ("first", "second")))
    # No loss of probabilities is so small that XLA has it.
    for name in ("_FUSED_ELEMENTS", "_SHORT_COLS"):
        monkeypatch.setattr(soft, name, 0)
    decide_attention = functools.partial(record.decide, AttentionStandIn, ("attention",))
    monkeypatch.setattr(attention_dispatch, "decide", decide_attention)
    calls: dict[Any, Any] = {
        attention_primitives.BY_PART[part]: attention_primitives.Call(part) for part in attention_primitives.OPS
    }
    calls[paged.PAGED] = paged.Call()

    def register(rule: Callable[..., Any], **may_count: bool) -> None:
        for primitive, computation in {**row_primitives.COMPUTATIONS, **calls}.items():
            mlir.register_lowering(primitive, functools.partial(rule, computation), platform="cpu")
        mlir.register_lowering(_top_k.TOP_K, functools.partial(_top_k.lower, **may_count), platform="cpu")
        jax.clear_caches()

    register(lowering.kernel_rule, may_count=True)
    yield record
    register(lowering.reference_rule)


@pytest.fixture(params=["reference", "stand-in"])
def kernels(request: pytest.FixtureRequest) -> Callable[[], StandIns | None]:
    """The reference, and what stands in for kernels from when this is called; "short" takes `short_chunks` too.

    With "statistics", kernels take log_softmax's statistics alone, as of long rows, and leave the rest to XLA.
    """

    def start() -> StandIns | None:
        if "short" in request.param:
            request.getfixturevalue("short_chunks")
        record = request.getfixturevalue("stand_ins") if "stand-in" in request.param else None
        if record and "statistics" in request.param:
            record.of_statistics = (Op.LOG_SOFTMAX, Op.LOG_SOFTMAX_TANGENT, Op.LOG_SOFTMAX_COTANGENT)
        return record

    return start


def _cache_programs_in(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.fixture(scope="package", autouse=True)
def programs_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A program that was compiled before `jax.clear_caches()`, or by another worker, is read from a file.

    The file is of the session's folder, or of one that `JAX_COMPILATION_CACHE_DIR` names, for many sessions.
    """
    if jax.default_backend() == "gpu":
        yield
        return
    base = tmp_path_factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    before = jax.config.jax_compilation_cache_dir
    _cache_programs_in(before or str(session / "programs"))
    yield
    _cache_programs_in(before)


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test draws the same numbers whichever ran before it."""
    if hasattr(request.module, "RNG"):
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(0))


@pytest.fixture(autouse=True)
def no_number_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is a constant of a test's programs whichever numbers were constants of others."""
    monkeypatch.setattr(numbers, "_CONSTANTS", {})


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short rows take the long ones' way too, over more than one level."""

    def clear() -> None:
        jax.clear_caches()
        _top_k.chunk_size.cache_clear()

    monkeypatch.setattr(_top_k, "_AT_ONCE", 4)
    clear()
    yield
    monkeypatch.undo()
    clear()
