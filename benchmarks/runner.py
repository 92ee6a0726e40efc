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
import itertools
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import cases, timing
from benchmarks.attention_cases import Case as AttentionCase
from benchmarks.calls import AttentionCall, Options, RowCall, latency
from benchmarks.impls import Declined, NotInstalled, Program

Case = cases.Case | AttentionCase
Call = RowCall | AttentionCall
_TOGETHER = 5  # cases that are compiled at once

Key = tuple[Any, str, str]  # what is computed, the implementation and the program


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A compiled program, and the one that makes its operands."""

    program: Program
    compiled: Any
    prepare: Callable[..., Any] | None

    def bound(self, operands: Sequence[tuple[Any, ...]]) -> Callable[[int], Any]:
        """The launch on the k-th set of operands."""
        own = [self.prepare(*each) for each in operands] if self.prepare else operands
        return lambda k: self.compiled(*own[k])


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
        calls = [_call(case, self.options) for case in chosen if case.pass_ != "call"]
        graded = {call.key for call in calls if call.has_gradients}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting: dict[Key, tuple[Program, list[Any]]] = {}
            truths: dict[Any, Any] = {}
            for call in calls:
                for name in dict.fromkeys((*call.baselines, *self.options.impls)):
                    self._start(pool, call, name, waiting)
                key = call.truth_key(call.key in graded)
                if not {key, call.truth_key(True)} & (self._truths.keys() | truths.keys()):
                    truths[key] = pool.submit(call.truth_compiler(call.key in graded))
            for key, (program, futures) in waiting.items():
                with self._recorded(key):
                    *first, compiled = [future.result() for future in futures]
                    self._compiled[key] = _Ready(program, compiled, first[0] if first else None)
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
                stages.append(jax.jit(program.function).lower(*specs))
                waiting[key] = program, [pool.submit(stage.compile) for stage in stages]
        if entry:
            self._compiled |= dict.fromkeys([key for key in missing if key not in waiting], entry)

    def run(self, case: Case) -> dict[str, Any]:
        """Checks, then times. Implementations that are wrong or decline are recorded with the reason and no time."""
        started = time.perf_counter()
        call = _call(case, self.options)
        record = {"case": case.describe(), **call.shrunk()}
        if isinstance(call, RowCall) and case.pass_ == "call":
            return record | latency(call, self.options)
        operands, truths = self._made(call)
        impls, schedule = {}, []
        for name in self.options.impls:
            impls[name], variants = self._checked(call, name, operands, truths)
            schedule += variants
        clock, timings, ceilings = call.time(schedule)
        record |= {**call.sizes(), "clock": clock, **ceilings}
        for name, entry in impls.items():
            if entry["status"] == "ok":
                mine = {program: timings[f"{name}:{program}"] for program in call.names(name)}
                entry |= call.speeds(mine, record)
        record["impls"] = impls
        return record | call.summary(record) | {"seconds": round(time.perf_counter() - started, 2)}

    def _made(self, call: Call) -> tuple[Any, Any]:
        """The operands and the truth of a call, kept until those of another one, or with gradients, are wanted."""
        truth = self._truths.get(call.truth_key(True)) or self._truths[call.truth_key(False)]
        if self._held[0] is not truth:
            self._held = (None, None, None)  # frees the memory first
            operands = call.operands()
            self._held = (truth, operands, call.truths(truth, operands, self._baselines(call, operands)))
        return self._held[1:]

    def _baselines(self, call: Call, operands: Any) -> dict[str, Any]:
        """The outputs of the implementations that decide what is right."""
        found = {}
        for name in call.baselines:
            for program in call.names(name):
                ready = self._compiled[call.key, name, program]
                if isinstance(ready, dict):
                    raise RuntimeError(f"{name}: {ready['reason']}")
                found[name] = jax.block_until_ready(ready.bound(operands[:1])(0))
        return found

    @contextlib.contextmanager
    def _recorded(self, key: Key) -> Iterator[None]:
        """Turns an exception into an entry: one program that does not compile must not hide the others' results."""
        entry: dict[str, Any] = {}
        with caught(entry):
            yield
        if entry:
            self._compiled[key] = entry

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
                verdicts.append(call.judge(operands[0], jax.block_until_ready(launch(0)), truths))
                slow = call.may_be_slow and _is_slow(launch)
                variants.append(timing.Variant(f"{name}:{program}", launch, slow))
            entry_of_right = call.entry(name, verdicts, found)
        if entry:
            return entry | call.note(name), []
        return entry_of_right | call.note(name), variants if entry_of_right["status"] == "ok" else []


def _call(case: Case, options: Options) -> Call:
    return RowCall(case, options) if isinstance(case, cases.Case) else AttentionCall(case, options)


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
    return {"case": case.describe(), "impls": {}, "clock": "cuda events", **_call(case, Options()).sizes()}


def deal(chosen: Sequence[Case], processes: int) -> list[list[Case]]:
    """Shares of about as many calls each.

    The passes of a call of attention stay together, as they have programs in common, and so do a length and the one
    before it, as they are compared.
    """
    calls: dict[Any, list[Case]] = {}
    for case in chosen:
        key: Any = case
        if isinstance(case, AttentionCase):
            key = dataclasses.replace(case.shape, length=case.shape.length + case.shape.length % 2)
        calls.setdefault(key, []).append(case)
    found = list(calls.values())
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
