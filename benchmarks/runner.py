"""Compiles, checks and times cases, of rows and of attention; time is taken as `benchmarks.timing` says.

A backward of attention alone is timed as (value and vjp) less forward, which is all that some peers allow, for every
implementation alike; ours also directly, from its residuals ("direct"). Operands of the table's cases of attention
exceed L2, so that one set is enough; calls that are drawn may run from L2, those of every implementation alike.

Cases may be dealt over processes: each compiles its share, and once all have, they measure one after another. Tracing
holds Python's lock, and Mosaic compiles one kernel of a process at a time, so that threads alone gain little.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import itertools
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

from benchmarks import check, impls, timing, trees
from benchmarks import results as measured
from benchmarks.attention_cases import AttentionCase
from benchmarks.cases import PASSES, RowCase
from benchmarks.impls import Declined, NotInstalled, Options, Program

Case = RowCase | AttentionCase
_TOGETHER = 5  # cases that are compiled at once
_CALLS = 200  # of one small call in a round
_LAUNCHES = 4  # of each program of attention in a round
_COPIED_BYTES = 2**30  # read and written beside attention
_UNKNOWN = dict.fromkeys(("kernel", "config", "bytes_moved", "residual_bytes"))

Key = tuple[Any, str, str]  # what is computed, the implementation and the program
Timings = Mapping[str, timing.Timing]


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A compiled program, the one that makes its operands, and what is launched."""

    program: Program
    compiled: Any
    prepare: Callable[..., Any] | None
    launched: Callable[..., Any]

    def bound(self, operands: Sequence[tuple[Any, ...]]) -> Callable[[int], Any]:
        """The launch on the k-th set of operands."""
        own = [self.prepare(*each) for each in operands] if self.prepare else operands
        return lambda k: self.launched(*own[k])


class Call:
    """A case as this machine measures it."""

    def __init__(self, case: Case, options: Options):
        self.on_gpu = jax.default_backend() == "gpu"
        self.case: Case = case if self.on_gpu else case.shrunk()
        self.small = {} if self.on_gpu else self.case.as_measured()
        self.key, self.options = self.case.key, options
        self.buffers = self.case.buffers if self.on_gpu else 1
        self.is_row = isinstance(case, RowCase)
        self.has_gradients = not self.is_row and case.pass_ != "fwd"
        # XLA's result is a part of the truth of rows.
        self.baselines = ("xla",) if self.is_row else ()

    @property
    def specs(self) -> tuple[Any, ...]:
        return jax.eval_shape(lambda: self.case.operands(1, 0))[0]

    def operands(self) -> list[tuple[Any, ...]]:
        return self.case.operands(self.buffers, self.options.seed)

    def _source(self, name: str) -> Any:
        return trees if trees.is_tree(name, self.options.trees) and not self.is_row else impls

    def names(self, name: str) -> tuple[str, ...]:
        return self._source(name).names(self.case, name)

    def programs(self, name: str) -> dict[str, Program]:
        return self._source(name).programs(self.case, name, self.options)

    def truth_key(self, graded: bool) -> Any:
        return self.key, graded and not self.is_row

    def entry(self, name: str, verdicts: Sequence[Any], found: Mapping[str, _Ready]) -> dict[str, Any]:
        """What is known of an implementation; those of rows that ours is compared with are right by definition."""
        entry = measured.worst(verdicts).entry()
        memory = {program: ready.compiled.memory_analysis() for program, ready in found.items()}
        if self.is_row:
            if name in impls.BASELINES:
                entry = {key: value for key, value in entry.items() if key != "reason"} | {"status": "ok"}
            ready, sizes = found[self.case.pass_], memory[self.case.pass_]
            entry |= {"temp_bytes": sizes.temp_size_in_bytes, "output_bytes": sizes.output_size_in_bytes}
            return entry | {"process": "jax"} | _UNKNOWN | dict(ready.program.facts)
        entry["temp_bytes"] = {program: sizes.temp_size_in_bytes for program, sizes in memory.items()}
        if name == "ours" and self.on_gpu:
            entry["kernels"] = {program: _mosaic_kernels(ready.compiled) for program, ready in found.items()}
            if "standard" in self.case.tags and not all(entry["kernels"].values()):
                entry |= {"status": "failed", "reason": "no kernel took the call, and XLA must not be timed as ours"}
        return entry

    def note(self, name: str) -> dict[str, str]:
        """A remark on an implementation of attention."""
        impl = None if self.is_row else impls.ATTENTION.get(name)
        return {"note": impl.note} if impl and impl.note else {}

    def time(self, schedule: Sequence[timing.Variant]) -> tuple[str, Timings, dict[str, Any]]:
        """Times implementations and a copy together, and for attention a large matrix product.

        Beside rows, torch's copy comes once before and once after them.
        """
        if self.case.pass_ == "call":
            return self._time_calls(schedule)
        n, size = (8192, _COPIED_BYTES) if self.on_gpu else (64, 2**16)
        launches = _LAUNCHES if self.on_gpu or "cpu" in self.case.tags else 1
        probes = functools.partial(_attention_probes, n, size)
        if isinstance(self.case, RowCase):
            size = self.case.copied_bytes
            launches = timing.launches_per_round(size) if self.on_gpu else 1
            probes = lambda: [timing.copy_variant(size, self.buffers)]
        torch_times = self._torch_copy(size)
        facts = {"buffers": self.buffers, "rounds": self.options.rounds, "launches": launches}
        clock, timings = timing.measure([*schedule, *probes()], device_clock=self.on_gpu, **facts)
        torch_times += self._torch_copy(size)
        moved = timing.moved_bytes(size)
        copies = {name: (t.median, moved) for name, t in timings.items() if name.startswith("copy:")}
        if torch_times:
            copies["copy:torch"] = (min(torch_times), 8 * max(1, size // 8))
        ceilings = {"copy": timing.best_copy(copies)}
        if not self.is_row:
            us = timings["matmul"].median
            ceilings["matmul"] = {"size": n, "us": round(us, 3), "tflop_per_s": round(2 * n**3 / us / 1e6, 2)}
        return clock, timings, ceilings

    def _time_calls(self, schedule: Sequence[timing.Variant]) -> tuple[str, Timings, dict[str, Any]]:
        """What one small call costs on the host, and then in a loop, both by wall clock."""
        timings: dict[str, timing.Timing] = {}
        for program, launches in (("call", _CALLS), ("loop", 1)):
            mine = [variant for variant in schedule if variant.name.endswith(f":{program}")]
            facts = {"buffers": 1, "rounds": self.options.rounds, "launches": launches}
            timings |= timing.measure(mine, device_clock=False, **facts)[1]
        return "wall", timings, {"copy": None}

    def _torch_copy(self, size: int) -> list[float]:
        """Torch's copy; nothing beside attention, or where torch or the GPU is missing."""
        if not self.on_gpu or not self.is_row:
            return []
        try:
            return [timing.torch_copy_us(size, self.buffers, self.options.rounds)]
        except (ImportError, RuntimeError) as error:
            print(f"  no torch copy beside JAX: {type(error).__name__}: {error}", flush=True)
            return []

    def sizes(self) -> dict[str, Any]:
        return self.case.sizes() | ({"buffers": self.buffers} if self.is_row else {})

    def speeds(self, timings: Timings, record: Mapping[str, Any]) -> dict[str, Any]:
        """The times and, of rows, the bandwidth of the least traffic and its share of the copy's."""
        if not self.is_row:
            times = {program: taken.as_json() for program, taken in timings.items()}
            return measured.speeds(self.case.pass_, times, record["flops"])
        taken = timings[self.case.pass_]
        if "loop" in timings:
            return taken.as_json() | {"us_per_iteration": round(timings["loop"].median / impls.ITERATIONS, 4)}
        speed = record["least_bytes"] / taken.median / 1e6
        share = {"fraction_of_copy": round(speed / record["copy"]["tb_per_s"], 4)} if record["copy"] else {}
        return taken.as_json() | {"tb_per_s": round(speed, 4)} | share


def _mosaic_kernels(compiled: Any) -> int:
    """How many calls of Mosaic kernels a compiled program has."""
    return compiled.as_text().count('custom_call_target="mosaic_gpu')


@functools.cache
def _attention_probes(n: int, copied: int) -> list[timing.Variant]:
    a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in jax.random.split(jax.random.key(3)))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, b))
    return [timing.Variant("matmul", lambda _: product(a, b)), timing.copy_variant(copied, 1)]


class Bench:
    """The compiled programs of a run."""

    def __init__(self, options: Options):
        self.options = options
        self._compiled: dict[Key, _Ready | dict[str, Any]] = {}  # a program, or an entry that says why not
        self._truths: dict[Any, Any] = {}
        self._held: tuple[Any, Any, Any] = (None, None, None)  # a truth's program, and of its call

    def prepare(self, chosen: Sequence[Case]) -> None:
        """Compiles what the cases need, in threads: never while something is timed, as XLA's tuning runs kernels.

        Tracing stays in this thread, because Mosaic's is not known to be safe in others.
        """
        calls = [Call(case, self.options) for case in chosen]
        graded = {call.key for call in calls if call.has_gradients}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting: dict[Key, tuple[Program, Any, list[Any]]] = {}
            truths: dict[Any, Any] = {}
            for call in calls:
                for name in dict.fromkeys((*call.baselines, *self.options.impls)):
                    self._start(pool, call, name, waiting)
                key = call.truth_key(call.key in graded)
                if not {key, call.truth_key(True)} & (self._truths.keys() | truths.keys()):
                    truths[key] = pool.submit(check.compiler(call.case, call.specs, call.key in graded))
            for key, (program, called, futures) in waiting.items():
                entry: dict[str, Any] = {}
                with caught(entry):
                    *first, compiled = [future.result() for future in futures]
                    ready = _Ready(program, compiled, first[0] if first else None, called or compiled)
                self._compiled[key] = entry or ready  # one program that does not compile must not hide the others
            self._truths |= {key: future.result() for key, future in truths.items()}

    def _start(self, pool: Any, call: Call, name: str, waiting: dict[Key, Any]) -> None:
        """Lowers the programs of an implementation, and has them compiled."""
        keys = [(call.key, name, program) for program in call.names(name)]
        missing = [key for key in keys if key not in self._compiled and key not in waiting]
        if not missing:
            return
        entry: dict[str, Any] = {}
        with caught(entry):
            programs = call.programs(name)
            for key in missing:
                program, stages, specs = programs[key[2]], [], call.specs
                if program.prepare is not None:
                    stages.append(jax.jit(program.prepare).lower(*specs))
                    specs = stages[0].out_info
                function = jax.jit(program.function)
                stages.append(function.lower(*specs))
                # One small call is timed with the way through jit.
                called = function if call.case.pass_ == "call" else None
                waiting[key] = program, called, [pool.submit(stage.compile) for stage in stages]
        if entry:
            self._compiled |= dict.fromkeys([key for key in missing if key not in waiting], entry)

    def run(self, case: Case) -> dict[str, Any]:
        """Checks, then times. Implementations that are wrong or decline are recorded with the reason and no time."""
        started = time.perf_counter()
        call = Call(case, self.options)
        record: dict[str, Any] = {"case": case.describe(), **call.small}
        operands, truths = self._made(call)
        entries, schedule = {}, []
        for name in self.options.impls:
            entries[name], variants = self._checked(call, name, operands, truths)
            schedule += variants
        clock, timings, ceilings = call.time(schedule)
        record |= {**call.sizes(), "clock": clock, **ceilings}
        for name, entry in entries.items():
            if entry["status"] == "ok":
                mine = {program: timings[f"{name}:{program}"] for program in call.names(name)}
                entry |= call.speeds(mine, record)
        record["impls"] = entries
        if not call.is_row:
            record |= {"nvjitlink": measured.loaded("libnvJitLink"), **measured.against_best(record)}
        return record | {"seconds": round(time.perf_counter() - started, 2)}

    def _made(self, call: Call) -> tuple[Any, Any]:
        """The operands and the truth of a call, kept until those of another one, or with gradients, are wanted."""
        truth = self._truths.get(call.truth_key(True)) or self._truths[call.truth_key(False)]
        if self._held[0] is not truth:
            self._held = (None, None, None)  # frees the memory first
            operands = call.operands()
            baselines = [self._baseline(call, name, operands) for name in call.baselines]
            self._held = (truth, operands, (truth, *baselines) if baselines else truth(*operands[0]))
        return self._held[1:]

    def _baseline(self, call: Call, name: str, operands: Any) -> Any:
        """The output of an implementation that decides what is right."""
        ready = self._compiled[call.key, name, call.case.pass_]
        if isinstance(ready, dict):
            raise RuntimeError(f"{name}: {ready['reason']}")
        return jax.block_until_ready(ready.bound(operands[:1])(0))

    def _checked(
        self, call: Call, name: str, operands: Any, truths: Any
    ) -> tuple[dict[str, Any], list[timing.Variant]]:
        """What is known of an implementation before it is timed, and what to time if it is right."""
        found: dict[str, _Ready] = {}
        for program in call.names(name):
            ready = self._compiled[call.key, name, program]
            if isinstance(ready, dict):
                return ready | call.note(name), []
            found[program] = ready
        entry: dict[str, Any] = {}
        variants, verdicts = [], []
        with caught(entry):
            for program, ready in found.items():
                launch = ready.bound(operands)
                if program != "loop":
                    verdicts.append(check.judged(call.case, operands[0], jax.block_until_ready(launch(0)), truths))
                # A difference of two programs, as of attention, needs all rounds of both.
                slow = call.is_row and call.case.pass_ != "call" and _is_slow(launch)
                variants.append(timing.Variant(f"{name}:{program}", launch, slow))
            entry_of_right = call.entry(name, verdicts, found)
        if entry:
            return entry | call.note(name), []
        return entry_of_right | call.note(name), variants if entry_of_right["status"] == "ok" else []


def _is_slow(launch: Callable[[int], Any]) -> bool:
    """Whether a launch, which is not the first, takes long enough to launch it less often."""
    started = time.perf_counter()
    jax.block_until_ready(launch(0))
    return time.perf_counter() - started > timing.SLOW_SECONDS


@contextlib.contextmanager
def caught(entry: dict[str, Any]) -> Iterator[None]:
    """Puts into `entry` what an exception says of an implementation."""
    try:
        yield
    except NotInstalled as reason:
        entry |= {"status": "not installed", "reason": str(reason)}
    except Declined as reason:
        entry |= {"status": "declined", "reason": str(reason)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        entry |= {"status": "failed", "reason": text[:300]}


def run(case: Case, options: Options) -> dict[str, Any]:
    """The record of one case."""
    bench = Bench(options)
    bench.prepare([case])
    return bench.run(case)


def attempt(bench: Bench, case: Case) -> dict[str, Any]:
    """The record of a case, with the reason if it failed: out of memory in the truth, say. The other cases go on."""
    try:
        return bench.run(case)
    except Exception as error:
        return _failed(case, f"{type(error).__name__}: {error}")


def _failed(case: Case, reason: str) -> dict[str, Any]:
    """The record of a case that has no result."""
    return {"case": case.describe(), "impls": {}, "error": reason[:500]}


def _empty(case: Case) -> dict[str, Any]:
    """The record of a case that torch's side alone measures."""
    return {"case": case.describe(), "impls": {}, "clock": "cuda events", **Call(case, Options()).sizes()}


def deal(chosen: Sequence[Case], processes: int) -> list[list[Case]]:
    """Shares of about as many calls each.

    The passes of a call of attention stay together, as they have programs in common, and so do a length and the one
    before it: the same pass of both in turn, as the one before heats the card.
    """
    calls: dict[Any, list[Case]] = {}
    for case in chosen:
        key: Any = case.key
        if isinstance(case, AttentionCase):
            key = dataclasses.replace(case.shape, length=case.shape.length + case.shape.length % 2)
        calls.setdefault(key, []).append(case)
    found = [sorted(group, key=lambda case: PASSES.index(case.pass_)) for group in calls.values()]
    return [list(itertools.chain(*found[first::processes])) for first in range(min(processes, len(found)))]


def is_over(deadline: float | None) -> bool:
    """Whether no case may start any more."""
    return deadline is not None and time.monotonic() >= deadline


def one_by_one(chosen: Sequence[Case], options: Options, deadline: float | None) -> Iterator[dict[str, Any]]:
    """The record of each case, in this process; one without results of JAX where no implementation is JAX's."""
    bench = Bench(options)
    for first in range(0, len(chosen), _TOGETHER):
        group = chosen[first : first + _TOGETHER]
        if options.impls and not is_over(deadline):
            bench.prepare(group)
        for case in group:
            if is_over(deadline):
                return
            yield attempt(bench, case) if options.impls else _empty(case)


def in_processes(
    chosen: Sequence[Case], options: Options, processes: int, deadline: float | None = None
) -> Iterator[dict[str, Any]]:
    """The record of each case, as it is measured; `deadline` is the `time.monotonic()` after which no case starts.

    The cases of a process that ends early are recorded as failed, and the other processes go on.
    """
    spawning, shares = multiprocessing.get_context("spawn"), deal(chosen, processes)
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
                    yield from (_failed(case, reason) for case in left if process.exitcode)
                    continue
                left.pop(0)
                yield record


def _measure(
    pipe: Any,
    chosen: Sequence[Case],
    options: Options,
    compiled: Any,
    device: str,
    deadline: float | None,
) -> None:
    """Sends the records of a share; `device` is a file that a process has locked while it has the device."""
    bench = Bench(options)
    bench.prepare(chosen)
    with contextlib.suppress(threading.BrokenBarrierError):
        compiled.wait()
    # Closed by the end of the process, which frees the device's memory too.
    fcntl.flock(os.open(device, os.O_RDWR), fcntl.LOCK_EX)
    for case in chosen:
        if is_over(deadline):
            break
        pipe.send(attempt(bench, case))
