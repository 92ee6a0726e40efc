"""What `benchmarks.runner` must know of a case: its programs, operands, truth, ceilings and what a result file says."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention_cases, cases, impls, timing, trees, truth
from benchmarks import results as measured

_CPU_ELEMENTS = 1 << 18
_CALLS = 200
_ITERATIONS = 1000
_LAUNCHES = 4  # of each program of attention in a round
_COPIED_BYTES = 2**30  # read and written beside attention
# The truth is not timed: XLA need not try which of its products are fast, which takes most of the time to compile it.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_UNKNOWN = dict.fromkeys(("kernel", "config", "bytes_moved", "residual_bytes"))

Timings = Mapping[str, timing.Timing]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run is made; `kernel` and `config` replace the choice for "ours"."""

    impls: Sequence[str] = ("ours", "xla")
    rounds: int = 5
    seed: int = 0
    kernel: str | None = None
    config: Mapping[str, Any] | None = None
    trees: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the folders of `benchmarks.trees`


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


class RowCall:
    """A case of rows as this machine measures it; XLA's result is a part of its truth."""

    baselines: tuple[str, ...] = ("xla",)
    has_gradients = False
    may_be_slow = True

    def __init__(self, case: cases.Case, options: Options):
        self.case = case if _on_gpu() else case.shrunk(_CPU_ELEMENTS)
        self.key, self.options = self.case, options
        size = cases.operand_bytes(self.case)
        self.buffers = timing.buffers_needed(size, hot=case.hot) if _on_gpu() else 1

    @property
    def specs(self) -> tuple[Any, ...]:
        return jax.eval_shape(lambda: impls.make_operands(self.case, 1, 0))[0]

    def operands(self) -> impls.Buffers:
        return impls.make_operands(self.case, self.buffers, self.options.seed)

    def names(self, name: str) -> tuple[str, ...]:
        return (self.case.pass_,)

    def programs(self, name: str) -> dict[str, impls.Program]:
        kernel, config = self.options.kernel, self.options.config
        return {self.case.pass_: impls.build(self.case, name, kernel=kernel, config=config)}

    def truth_key(self, graded: bool) -> Any:
        return self.key

    def truth_compiler(self, graded: bool) -> Callable[[], Any]:
        """Compiles the check of every row."""
        program = impls.build(self.case, "xla")
        prepare = program.prepare or (lambda *operands: operands)
        outputs = jax.eval_shape(lambda *operands: truth.widened(program.function(*prepare(*operands))), *self.specs)
        if "axis" in self.case.options:
            outputs = self.specs[0]
        return truth.every_row(self.case).lower(self.specs, outputs).compile

    def truths(self, program: Any, operands: impls.Buffers, baselines: Mapping[str, Any]) -> Any:
        return program, baselines["xla"]

    def judge(self, operands: tuple[jax.Array, ...], got: Any, truths: Any) -> measured.RowVerdict:
        check, xla = truths
        if "axis" in self.case.options:
            got, xla = jax.tree.map(jnp.transpose, (got, xla))
        return truth.judge(self.case, operands, got, xla, check)

    def entry(self, name: str, verdicts: Sequence[Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of an implementation; those that ours is compared with are right by definition."""
        (ready,), (judged,) = found.values(), verdicts
        entry, memory = judged.entry(), ready.compiled.memory_analysis()
        if name in impls.BASELINES:
            entry = {key: value for key, value in entry.items() if key != "reason"} | {"status": "ok"}
        sizes = {"temp_bytes": memory.temp_size_in_bytes, "output_bytes": memory.output_size_in_bytes}
        return entry | {"process": "jax"} | sizes | _UNKNOWN | dict(ready.program.facts)

    def note(self, name: str) -> dict[str, str]:
        return {}

    def time(self, schedule: Sequence[timing.Variant]) -> tuple[str, Timings, dict[str, Any]]:
        """Times implementations and copies together; torch's copy comes once before and once after them."""
        size = cases.copied_bytes(self.case)
        torch_times = self._torch_copy(size)
        clock, timings = timing.measure(
            [*schedule, timing.copy_variant(size, self.buffers)],
            buffers=self.buffers,
            rounds=self.options.rounds,
            launches=timing.launches_per_round(size) if _on_gpu() else 1,
            device_clock=_on_gpu(),
        )
        torch_times += self._torch_copy(size)
        copies = {name: (t.median, timing.moved_bytes(size)) for name, t in timings.items() if name.startswith("copy:")}
        if torch_times:
            copies["copy:torch"] = (min(torch_times), 8 * max(1, size // 8))
        return clock, timings, {"copy": timing.best_copy(copies)}

    def _torch_copy(self, size: int) -> list[float]:
        """Torch's copy; nothing where torch or the GPU is missing."""
        if not _on_gpu():
            return []
        try:
            return [timing.torch_copy_us(size, self.buffers, self.options.rounds)]
        except (ImportError, RuntimeError) as error:
            print(f"  no torch copy beside JAX: {type(error).__name__}: {error}", flush=True)
            return []

    def shrunk(self) -> dict[str, Any]:
        return {} if _on_gpu() else {"rows_measured": self.case.rows}

    def sizes(self) -> dict[str, Any]:
        bytes_ = {"least_bytes": cases.least_bytes(self.case), "operand_bytes": cases.operand_bytes(self.case)}
        return bytes_ | {"flops": cases.flops(self.case), "buffers": self.buffers}

    def speeds(self, timings: Timings, record: Mapping[str, Any]) -> dict[str, Any]:
        """The times, the bandwidth of the least traffic, and its share of the copy's."""
        (taken,) = timings.values()
        speed = record["least_bytes"] / taken.median / 1e6
        share = {"fraction_of_copy": round(speed / record["copy"]["tb_per_s"], 4)} if record["copy"] else {}
        return taken.as_json() | {"tb_per_s": round(speed, 4)} | share

    def summary(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {}


class AttentionCall:
    """A case of attention as this machine measures it."""

    baselines: tuple[str, ...] = ()
    may_be_slow = False  # a difference of two programs needs all rounds of both
    buffers = 1

    def __init__(self, case: attention_cases.Case, options: Options):
        self.case, self.options = case, options
        self.shape = case.shape if _on_gpu() or "cpu" in case.tags else case.shape.shrunk()
        self.key = self.shape
        self.has_gradients = case.pass_ != "fwd"

    @property
    def specs(self) -> tuple[Any, ...]:
        return (jax.eval_shape(lambda: self.shape.operands(0)),)

    def operands(self) -> impls.Buffers:
        return [(self.shape.operands(self.options.seed),)]

    def names(self, name: str) -> tuple[str, ...]:
        if trees.is_tree(name, self.options.trees):
            return trees.names(self.case.pass_)
        return impls.attention_names(self.case.pass_, name)

    def programs(self, name: str) -> dict[str, impls.Program]:
        if trees.is_tree(name, self.options.trees):
            return trees.programs(self.shape, self.case.pass_, name, self.options.trees)
        return impls.attention_programs(self.shape, self.case.pass_, name)

    def truth_key(self, graded: bool) -> Any:
        return self.shape, graded

    def truth_compiler(self, graded: bool) -> Callable[[], Any]:
        program = functools.partial(truth.attention, self.shape, gradients=graded)
        return functools.partial(jax.jit(program).lower(*self.specs).compile, compiler_options=_UNTUNED)

    def truths(self, program: Any, operands: impls.Buffers, baselines: Mapping[str, Any]) -> Any:
        return program(*operands[0])

    def judge(self, operands: tuple[Any, ...], got: Any, truths: Any) -> measured.Verdict:
        return truth.judge_attention(self.shape, got, truths)

    def entry(self, name: str, verdicts: Sequence[Any], found: Mapping[str, Any]) -> dict[str, Any]:
        memory = {program: ready.compiled.memory_analysis().temp_size_in_bytes for program, ready in found.items()}
        entry = measured.worst(verdicts).entry() | {"temp_bytes": memory}
        if name == "ours" and _on_gpu():
            entry["kernels"] = {program: _mosaic_kernels(ready.compiled) for program, ready in found.items()}
            if "standard" in self.case.tags and not all(entry["kernels"].values()):
                entry |= {"status": "failed", "reason": "no kernel took the call, and XLA must not be timed as ours"}
        return entry

    def note(self, name: str) -> dict[str, str]:
        note = impls.ATTENTION[name].note if name in impls.ATTENTION else ""
        return {"note": note} if note else {}

    def time(self, schedule: Sequence[timing.Variant]) -> tuple[str, Timings, dict[str, Any]]:
        """Times implementations, a large matrix product and a copy together."""
        n, copied = (8192, _COPIED_BYTES) if _on_gpu() else (64, 2**16)
        clock, timings = timing.measure(
            [*schedule, *_attention_probes(n, copied)],
            buffers=1,
            rounds=self.options.rounds,
            launches=_LAUNCHES if _on_gpu() or "cpu" in self.case.tags else 1,
            device_clock=_on_gpu(),
        )
        us, moved = timings["matmul"].median, timing.moved_bytes(copied)
        copies = {name: (t.median, moved) for name, t in timings.items() if name.startswith("copy:")}
        product = {"size": n, "us": round(us, 3), "tflop_per_s": round(2 * n**3 / us / 1e6, 2)}
        return clock, timings, {"matmul": product, "copy": timing.best_copy(copies)}

    def shrunk(self) -> dict[str, Any]:
        return {} if self.shape == self.case.shape else {"measured": dataclasses.asdict(self.shape)}

    def sizes(self) -> dict[str, Any]:
        return {"flops": self.shape.flops(self.case.pass_)}

    def speeds(self, timings: Timings, record: Mapping[str, Any]) -> dict[str, Any]:
        times = {program: taken.as_json() for program, taken in timings.items()}
        return measured.speeds(self.case.pass_, times, record["flops"])

    def summary(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {"nvjitlink": measured.loaded("libnvJitLink"), **measured.against_best(record)}


def for_peers(case: cases.Case | attention_cases.Case) -> dict[str, Any]:
    """What torch's process is told of a case."""
    if isinstance(case, attention_cases.Case):
        documents = case.shape.documents().tolist() if case.shape.kind == "documents" else []
        return case.describe() | {"flops": case.flops, "documents": documents}
    sizes = {
        name: size(case) for name, size in (("least_bytes", cases.least_bytes), ("copied_bytes", cases.copied_bytes))
    }
    return case.describe() | sizes | {"buffers": timing.buffers_needed(cases.operand_bytes(case), hot=case.hot)}


def _mosaic_kernels(compiled: Any) -> int:
    """How many calls of Mosaic kernels a compiled program has."""
    return compiled.as_text().count('custom_call_target="mosaic_gpu')


@functools.cache
def _attention_probes(n: int, copied: int) -> list[timing.Variant]:
    a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in jax.random.split(jax.random.key(3)))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, b))
    return [timing.Variant("matmul", lambda _: product(a, b)), timing.copy_variant(copied, 1)]


def latency(call: RowCall, options: Options) -> dict[str, Any]:
    """What one small call costs on the host and in a loop, the implementations interleaved by round."""
    (operands,) = impls.make_operands(call.case, 1, options.seed)
    entries: dict[str, dict[str, Any]] = {}
    calls, loops = {}, {}
    check = truth.every_row(call.case)
    xla = jax.jit(impls.build(call.case, "xla").function)(*operands)
    for name in options.impls:
        try:
            (program,) = call.programs(name).values()
        except impls.Declined as reason:
            entries[name] = {"status": "declined", "reason": str(reason)}
            continue
        function = jax.jit(program.function)
        judged = truth.judge(call.case, operands, function(*operands), xla, check)
        right = judged.right or name == "xla"
        entries[name] = {
            "status": "ok" if right else "WRONG",
            "max_error_ulp": round(judged.error, 4),
            "process": "jax",
        }
        if right:
            calls[name], loops[name] = function, _loop(function)
        else:
            entries[name]["reason"] = judged.describe()
    per_call = _blocked_calls(calls, operands, options.rounds, _CALLS)
    per_iteration = _blocked_calls(loops, operands, options.rounds, 1)
    for name in calls:
        entries[name]["us"] = round(statistics.median(per_call[name]), 3)
        entries[name]["p20_us"], entries[name]["p80_us"] = np.percentile(per_call[name], (20, 80)).round(3).tolist()
        entries[name]["us_per_iteration"] = round(statistics.median(per_iteration[name]) / _ITERATIONS, 4)
    return {"clock": "wall", "copy": None, "impls": entries}


def _loop(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: jax.lax.fori_loop(0, _ITERATIONS, lambda _, y: function(y), x))


def _blocked_calls(
    functions: dict[str, Callable[..., Any]], operands: tuple[Any, ...], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Microseconds of each blocked call."""
    for function in functions.values():
        jax.block_until_ready(function(*operands))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            for _ in range(calls):
                start = time.perf_counter()
                jax.block_until_ready(function(*operands))
                times[name].append(1e6 * (time.perf_counter() - start))
    return times
