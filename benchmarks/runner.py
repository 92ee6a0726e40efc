"""Runs one case: build, gate, time, and the record that goes into the result file."""

import concurrent.futures
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import cases, timing, truth, variants
from benchmarks.cases import Case
from benchmarks.verdict import RowVerdict

_CPU_ELEMENTS = 1 << 18
_CALLS = 200
_ITERATIONS = 1000


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run is made: `copy` is "best", "mosaic" or "torch"; `kernel` and `config` replace the choice for "ours"."""

    impls: Sequence[str] = ("ours", "xla")
    rounds: int = 5
    seed: int = 0
    copy: str = "best"
    kernel: str | None = None
    config: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A compiled program and its buffers."""

    program: variants.Program
    compiled: Callable[..., Any]
    buffers: variants.Buffers

    def launch(self, k: int) -> Any:
        return self.compiled(*self.buffers[k])

    def is_slow(self) -> bool:
        """Whether a launch, which is not the first, takes long enough to launch it less often."""
        started = time.perf_counter()
        jax.block_until_ready(self.launch(0))
        return time.perf_counter() - started > timing.SLOW_SECONDS


def run(case: Case, options: Options) -> dict[str, Any]:
    """Measures `case`. Implementations that are wrong or decline are recorded with the reason and no time."""
    started = time.perf_counter()
    on_gpu = jax.default_backend() == "gpu"
    record: dict[str, Any] = {"case": describe(case)}
    if not on_gpu:
        case = case.shrunk(_CPU_ELEMENTS)
        record["rows_measured"] = case.rows
    if case.pass_ == "call":
        return record | _latency(case, options)
    buffers = timing.buffers_needed(cases.operand_bytes(case), hot=case.hot) if on_gpu else 1
    operands = variants.make_operands(case, buffers, options.seed)
    ready, impls, schedule = _prepare(case, operands, buffers, options)
    right = [name for name in ready if impls[name]["status"] == "ok" and name in options.impls]
    schedule = [*(timing.Variant(name, ready[name].launch, ready[name].is_slow()) for name in right), *schedule]
    clock, timings, copies = _time(case, schedule, buffers, options)
    record |= {
        "least_bytes": cases.least_bytes(case),
        "operand_bytes": cases.operand_bytes(case),
        "flops": cases.flops(case),
        "buffers": buffers,
        "clock": clock,
        "copy": timing.best_copy(copies) if copies else None,
    }
    for name in right:
        impls[name] |= timings[name].as_json() | speeds(record, timings[name].median)
    record["impls"] = {name: impls[name] for name in options.impls}
    record["seconds"] = round(time.perf_counter() - started, 2)
    return record


def describe(case: Case) -> dict[str, Any]:
    """The case as JSON."""
    fields = dataclasses.asdict(case) | {"name": case.name, "tags": sorted(case.tags), "pass": case.pass_}
    del fields["pass_"], fields["variant"]
    return fields | {"options": case.options}


def speeds(record: Mapping[str, Any], us: float) -> dict[str, float]:
    """Bandwidth of the least traffic, and its share of the copy's."""
    speed = record["least_bytes"] / us / 1e6
    found: dict[str, float] = {"tb_per_s": round(speed, 4)}
    if record["copy"]:
        found["fraction_of_copy"] = round(speed / record["copy"]["tb_per_s"], 4)
    return found


def _probes(case: Case, buffers: int, options: Options) -> list[timing.Variant]:
    """What is timed beside the implementations in JAX's process."""
    if options.copy == "torch" and jax.default_backend() == "gpu":
        return []
    return [timing.copy_variant(cases.copied_bytes(case), buffers)]


def _prepare(
    case: Case, operands: variants.Buffers, buffers: int, options: Options
) -> tuple[dict[str, _Ready], dict[str, dict[str, Any]], list[timing.Variant]]:
    """Programs that are compiled and right, what is known of every implementation, and the timing.

    Compilation is most of a case's time, so it runs in threads; tracing does not, as Mosaic's is not known to be safe.
    """
    built, impls = {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name in dict.fromkeys(("xla", *options.impls)):  # XLA always: the gate needs it
            with _recorded(impls, name):
                program = variants.build(case, name, kernel=options.kernel, config=options.config)
                own = program.buffers(operands)
                built[name] = (program, own, pool.submit(program.function.lower(*own[0]).compile))
        xla, own, _ = built["xla"]
        outputs = jax.eval_shape(lambda *operands: truth.widened(xla.function(*operands)), *own[0])
        check = pool.submit(truth.every_row(case).lower(operands[0], outputs).compile)
        schedule = _probes(case, buffers, options)
    ready = {}
    for name, (program, own, compiled) in built.items():
        with _recorded(impls, name):
            ready[name] = _Ready(program, compiled.result(), own)
    return ready, impls | _gate(case, operands, ready, check.result()), schedule


@contextlib.contextmanager
def _recorded(impls: dict[str, dict[str, Any]], name: str) -> Iterator[None]:
    """Turns an exception into an entry: one kernel that does not compile or run must not hide the others' results."""
    try:
        yield
    except variants.Declined as reason:
        impls[name] = {"status": "declined", "reason": str(reason)}
    except Exception as error:
        if name == "xla":
            raise
        impls[name] = {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def _gate(
    case: Case, operands: variants.Buffers, ready: Mapping[str, _Ready], check: Callable[..., jax.Array]
) -> dict[str, dict[str, Any]]:
    """Checks each implementation on the first buffer."""
    xla = ready["xla"].launch(0)
    impls = {}
    for name, built in ready.items():
        with _recorded(impls, name):
            got = xla if name == "xla" else jax.block_until_ready(built.launch(0))
            impls[name] = _judged(
                built, truth.judge(case, operands[0], got, xla, check), is_reference=name in variants.BASELINES
            )
    return impls


def _judged(built: _Ready, verdict: RowVerdict, *, is_reference: bool) -> dict[str, Any]:
    right = verdict.right or is_reference
    program, memory = built.program, built.compiled.memory_analysis()
    return {
        **verdict.entry(),
        **({"status": "ok"} if right else {}),
        "process": "jax",
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "kernel": program.kernel,
        "config": program.config,
        "bytes_moved": program.bytes_moved,
        "residual_bytes": program.residual_bytes,
    }


def _time(
    case: Case, schedule: Sequence[timing.Variant], buffers: int, options: Options
) -> tuple[str, dict[str, timing.Timing], dict[str, tuple[float, int]]]:
    """Times implementations and probes together; copies as {method: (microseconds, bytes moved)}."""
    on_gpu = jax.default_backend() == "gpu"
    size = cases.copied_bytes(case)
    torch_times = _torch_copy(size, buffers, options)
    clock, timings = timing.measure(
        schedule,
        buffers=buffers,
        rounds=options.rounds,
        launches=timing.launches_per_round(size) if on_gpu else 1,
        device_clock=on_gpu,
    )
    torch_times += _torch_copy(size, buffers, options)
    copies = {name: (t.median, timing.moved_bytes(size)) for name, t in timings.items() if name.startswith("copy:")}
    if torch_times:
        copies["copy:torch"] = (min(torch_times), 8 * max(1, size // 8))
    return clock, timings, copies


def _torch_copy(size: int, buffers: int, options: Options) -> list[float]:
    """Torch's copy, once before and once after the schedule; nothing where torch or the GPU is missing."""
    if jax.default_backend() != "gpu" or options.copy == "mosaic":
        return []
    try:
        return [timing.torch_copy_us(size, buffers, options.rounds)]
    except (ImportError, RuntimeError) as error:
        if options.copy == "torch":
            raise
        print(f"  no torch copy beside JAX: {type(error).__name__}: {error}", flush=True)
        return []


def _latency(case: Case, options: Options) -> dict[str, Any]:
    """Measures the case's implementations, interleaved by round."""
    (operands,) = variants.make_operands(case, 1, options.seed)
    impls: dict[str, dict[str, Any]] = {}
    calls, loops = {}, {}
    check = truth.every_row(case)
    xla = variants.build(case, "xla").function(*operands)
    for name in options.impls:
        try:
            program = variants.build(case, name, kernel=options.kernel, config=options.config)
        except variants.Declined as reason:
            impls[name] = {"status": "declined", "reason": str(reason)}
            continue
        verdict = truth.judge(case, operands, program.function(*operands), xla, check)
        right = verdict.right or name == "xla"
        impls[name] = {"status": "ok" if right else "WRONG", "max_error_ulp": round(verdict.error, 4), "process": "jax"}
        if right:
            calls[name], loops[name] = program.function, _loop(program.function)
        else:
            impls[name]["reason"] = verdict.describe()
    per_call = _blocked_calls(calls, operands, options.rounds, _CALLS)
    per_iteration = _blocked_calls(loops, operands, options.rounds, 1)
    for name in calls:
        impls[name]["us"] = round(statistics.median(per_call[name]), 3)
        impls[name]["p20_us"], impls[name]["p80_us"] = np.percentile(per_call[name], (20, 80)).round(3).tolist()
        impls[name]["us_per_iteration"] = round(statistics.median(per_iteration[name]) / _ITERATIONS, 4)
    return {"clock": "wall", "copy": None, "impls": impls}


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
