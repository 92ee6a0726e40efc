"""Compiles, checks and times cases of attention; time is taken as `benchmarks.timing` says.

A backward alone is timed as (value and vjp) less forward, which is all that some peers allow, for every implementation
alike; ours also directly, from its residuals ("direct"). Operands of the table's cases exceed L2, so one set is enough;
calls that are drawn may run from L2, those of every implementation alike.

Cases may be dealt over processes: each compiles its share, and once all have, they measure one after another. Tracing
holds Python's lock, and Mosaic compiles one kernel of a process at a time, so that threads alone gain little.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import attention_impls, timing, truth, verdict
from benchmarks import results as measured
from benchmarks.attention_cases import Case, Shape
from benchmarks.attention_impls import IMPLS
from benchmarks.variants import Declined

PROGRAMS = {"fwd": ("fwd",), "bwd": ("fwd", "value_and_vjp"), "value_and_vjp": ("value_and_vjp",)}
_LAUNCHES = 4  # of each program in a round
_COPIED_BYTES = 2**30  # read and written
# The truth is not timed: XLA need not try which of its products are fast, which takes most of the time to compile it.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run is made."""

    impls: Sequence[str] = ("ours", "cudnn", "mgpu", "tokamax")
    rounds: int = 3
    seed: int = 0


Key = tuple[Shape, str, str]  # implementation and program


class Bench:
    """Compiled programs and probes of a run."""

    def __init__(self, options: Options):
        self.options = options
        self.on_gpu = jax.default_backend() == "gpu"
        self._compiled: dict[Key, Any] = {}  # a program, or a dict that says why not
        self._truths: dict[tuple[Shape, bool], Callable[..., Any]] = {}  # by whether they have gradients
        self._held: tuple[Any, dict[str, jax.Array], Any] = (None, {}, None)  # a truth's program, and of its shape

    def prepare(self, cases: Sequence[Case]) -> None:
        """Compiles what the cases need, in threads: never while something is timed, as XLA's tuning runs kernels."""
        graded = {self._measured(case) for case in cases if case.pass_ != "fwd"}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = {}
            for case in cases:
                shape = self._measured(case)
                kind = (shape, shape in graded)
                if not {kind, (shape, True)} & (self._truths.keys() | waiting.keys()):
                    program = functools.partial(truth.attention, shape, gradients=kind[1])
                    lowered = jax.jit(program).lower(_specs(shape))
                    waiting[kind] = pool.submit(lowered.compile, compiler_options=_UNTUNED)
                for name in self.options.impls:
                    for program in _programs(case, name):
                        key = (shape, name, program)
                        if key not in self._compiled:
                            with self._recorded(key):
                                waiting[key] = [pool.submit(x.compile) for x in _lower(case, *key)]
                                self._compiled[key] = {}
            for key, futures in waiting.items():
                if isinstance(futures, concurrent.futures.Future):
                    self._truths[key] = futures.result()
                    continue
                with self._recorded(key):
                    first, *rest = [future.result() for future in futures]
                    self._compiled[key] = _Direct(first, rest[0]) if rest else first

    def run(self, case: Case) -> dict[str, Any]:
        """Checks, then times. Implementations that are wrong or decline are recorded with the reason and no time."""
        started = time.perf_counter()
        shape = self._measured(case)
        operands, truths = self._made(shape)
        impls: dict[str, dict[str, Any]] = {}
        schedule = []
        for name in self.options.impls:
            impls[name], variants = self._checked(case, name, operands, truths)
            schedule += variants
        schedule += self._probes
        clock, timings = timing.measure(
            schedule,
            buffers=1,
            rounds=self.options.rounds,
            launches=_LAUNCHES if self.on_gpu else 1,
            device_clock=self.on_gpu,
        )
        flops = shape.flops(case.pass_)
        for name, entry in impls.items():
            if entry["status"] == "ok":
                mine = {program: timings[f"{name}:{program}"] for program in _programs(case, name)}
                entry |= verdict.speeds(case.pass_, {name: t.as_json() for name, t in mine.items()}, flops)
        record = {
            "case": case.describe(),
            **({} if shape == case.shape else {"measured": dataclasses.asdict(shape)}),
            "flops": flops,
            "clock": clock,
            **self._ceilings(timings),
            "impls": impls,
            "nvjitlink": measured.loaded("libnvJitLink"),
            "seconds": round(time.perf_counter() - started, 2),
        }
        return record | measured.against_best(record)

    def _measured(self, case: Case) -> Shape:
        return case.shape if self.on_gpu else case.shape.shrunk()

    def _made(self, shape: Shape) -> tuple[dict[str, jax.Array], Any]:
        """The operands and the truth of a shape, kept until those of another one, or with gradients, are wanted."""
        program = self._truths.get((shape, True)) or self._truths[shape, False]
        if self._held[0] is not program:
            self._held = (None, {}, None)  # frees the memory first
            operands = shape.operands(self.options.seed)
            self._held = (program, operands, program(operands))
        return self._held[1:]

    @contextlib.contextmanager
    def _recorded(self, key: Key) -> Iterator[None]:
        """Turns an exception into an entry: one program that does not compile must not hide the others' results."""
        entry: dict[str, Any] = {}
        with _caught(entry):
            yield
        if entry:
            self._compiled[key] = entry

    def _checked(
        self, case: Case, name: str, operands: Mapping[str, jax.Array], truths: Any
    ) -> tuple[dict[str, Any], list[timing.Variant]]:
        """What is known of an implementation before it is timed, and what to time if it is right."""
        shape = self._measured(case)
        programs = {program: self._compiled[shape, name, program] for program in _programs(case, name)}
        for compiled in programs.values():
            if isinstance(compiled, dict):
                return compiled | _note(name), []
        entry: dict[str, Any] = {}
        variants, verdicts, temporary = [], [], {}
        with _caught(entry):
            own = jax.jit(functools.partial(IMPLS[name].prepare, shape))(dict(operands))
            for program, compiled in programs.items():
                launch = compiled.bound(own) if isinstance(compiled, _Direct) else functools.partial(compiled, own)
                verdicts.append(truth.judge_attention(shape, jax.block_until_ready(launch()), truths))
                temporary[program] = compiled.memory_analysis().temp_size_in_bytes
                variants.append(timing.Variant(f"{name}:{program}", lambda _, launch=launch: launch()))
        if entry:
            return entry | _note(name), []
        worst = verdict.worst(verdicts)
        entry = {**worst.entry(), "temp_bytes": temporary, **_note(name)}
        return entry, variants if worst.right else []

    @functools.cached_property
    def _probes(self) -> list[timing.Variant]:
        """A large matrix product and a copy."""
        n = self._matmul_size
        a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in jax.random.split(jax.random.key(3)))
        product = jax.jit(jnp.matmul)
        jax.block_until_ready(product(a, b))
        return [
            timing.Variant("matmul", lambda _: product(a, b)),
            timing.copy_variant(_COPIED_BYTES if self.on_gpu else 2**16, 1),
        ]

    @property
    def _matmul_size(self) -> int:
        return 8192 if self.on_gpu else 64

    def _ceilings(self, timings: Mapping[str, timing.Timing]) -> dict[str, Any]:
        n, matmul = self._matmul_size, timings["matmul"].median
        moved = timing.moved_bytes(_COPIED_BYTES if self.on_gpu else 2**16)
        copies = {name: (t.median, moved) for name, t in timings.items() if name.startswith("copy:")}
        tflops = {"size": n, "us": round(matmul, 3), "tflop_per_s": round(2 * n**3 / matmul / 1e6, 2)}
        return {"matmul": tflops, "copy": timing.best_copy(copies)}


def attempt(bench: Bench, case: Case) -> dict[str, Any]:
    """The record of a case, with the reason if it failed: out of memory in the truth, say. The other cases go on."""
    try:
        return bench.run(case)
    except Exception as error:
        return failed(case, f"{type(error).__name__}: {error}")


def failed(case: Case, reason: str) -> dict[str, Any]:
    """The record of a case that has no result."""
    return {"case": case.describe(), "impls": {}, "best_peer": None, "ratio": None, "error": reason[:500]}


@dataclasses.dataclass(frozen=True)
class _Direct:
    """A compiled backward pass, and the program that makes its residuals."""

    residuals: Callable[..., Any]
    gradients: Any

    def bound(self, operands: Mapping[str, jax.Array]) -> Callable[[], Any]:
        leaves = self.residuals(operands)
        return lambda: self.gradients(leaves, operands["d_out"])

    def memory_analysis(self) -> Any:
        return self.gradients.memory_analysis()


def _programs(case: Case, name: str) -> tuple[str, ...]:
    return PROGRAMS[case.pass_] + (("direct",) if case.pass_ == "bwd" and name == "ours" else ())


def _specs(shape: Shape) -> Any:
    return jax.eval_shape(lambda: shape.operands(0))


def _lower(case: Case, shape: Shape, name: str, program: str) -> list[Any]:
    """What is to be compiled of a program."""
    impl = IMPLS[name]
    impl.check(shape, case.pass_)
    specs = jax.eval_shape(functools.partial(impl.prepare, shape), _specs(shape))
    if program != "direct":
        make = attention_impls.forward if program == "fwd" else attention_impls.value_and_vjp
        return [jax.jit(make(impl, shape)).lower(specs)]
    residuals, gradients = map(jax.jit, attention_impls.backward(impl, shape))
    first = residuals.lower(specs)
    return [first, gradients.lower(first.out_info, specs["d_out"])]


@contextlib.contextmanager
def _caught(entry: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except attention_impls.NotInstalled as reason:
        entry |= {"status": "not installed", "reason": str(reason)}
    except Declined as reason:
        entry |= {"status": "declined", "reason": str(reason)}
    except NotImplementedError as reason:
        entry |= {"status": "declined", "reason": " ".join(str(reason).split())[:300]}
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        entry |= {"status": "failed", "reason": text[:300]}


def _note(name: str) -> dict[str, str]:
    return {"note": IMPLS[name].note} if IMPLS[name].note else {}


def deal(cases: Sequence[Case], processes: int) -> list[list[Case]]:
    """Shares of about as many shapes each. The passes of a shape stay together, as they have programs in common."""
    shapes = list(dict.fromkeys(case.shape for case in cases))
    shares = [shapes[first::processes] for first in range(min(processes, len(shapes)))]
    return [[case for shape in share for case in cases if case.shape == shape] for share in shares]


def records(
    cases: Sequence[Case], options: Options, processes: int, deadline: float | None = None
) -> Iterator[dict[str, Any]]:
    """The record of each case, as it is measured; `deadline` is the `time.monotonic()` after which no case starts.

    The cases of a process that ends early are recorded as failed, and the other processes go on.
    """
    spawning, shares = multiprocessing.get_context("spawn"), deal(cases, processes)
    compiled = spawning.Barrier(len(shares))
    running: dict[Any, tuple[Any, list[Case]]] = {}
    with tempfile.NamedTemporaryFile() as device:
        for share in shares:
            mine, theirs = spawning.Pipe(duplex=False)
            arguments = theirs, share, options, compiled, device.name, deadline
            process = spawning.Process(target=_measure, args=arguments)
            process.start()
            theirs.close()
            running[mine] = process, list(share)
        while running:
            ready: list[Any] = multiprocessing.connection.wait(list(running))
            for pipe in ready:
                process, left = running[pipe]
                try:
                    record = pipe.recv()
                except EOFError:
                    del running[pipe]
                    compiled.abort()  # lest the others wait for a process that has ended
                    process.join()
                    reason = f"its process ended with status {process.exitcode}"
                    yield from (failed(case, reason) for case in left if process.exitcode)
                    continue
                left.pop(0)
                yield record


def _measure(
    pipe: Any, cases: Sequence[Case], options: Options, compiled: Any, device: str, deadline: float | None
) -> None:
    """Sends the records of a share; `device` is a file that a process has locked while it has the device."""
    bench = Bench(options)
    bench.prepare(cases)
    with contextlib.suppress(threading.BrokenBarrierError):
        compiled.wait()
    # Closed by the end of the process, which frees the device's memory too.
    fcntl.flock(os.open(device, os.O_RDWR), fcntl.LOCK_EX)
    for case in cases:
        if deadline is not None and time.monotonic() >= deadline:
            break
        pipe.send(attempt(bench, case))
