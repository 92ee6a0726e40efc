"""Compiles, checks and times cases, of rows and of attention; time is taken as `benchmarks.timing` says.

A backward of attention alone is timed as (value and vjp) less forward, which is all that some peers allow, for every
implementation alike; ours also directly, from its residuals ("direct"). Operands of the table's cases of attention
exceed L2, so that one set is enough; calls that are drawn may run from L2, those of every implementation alike.

Cases may be dealt over processes: each compiles its share, and once all have, they measure one after another. Nothing
is compiled while something is timed, as XLA's tuning runs kernels. Tracing holds Python's lock, and Mosaic compiles one
kernel of a process at a time, so that threads would gain little.

Calls are compared with probes: how fast the card copies, reads and multiplies, in the same run.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from benchmarks import impls, protocol, torch_peers
from benchmarks import results as measured
from benchmarks.attention_cases import AttentionCase
from benchmarks.calls import CallCase
from benchmarks.cases import PASSES, RowCase
from benchmarks.impls import Declined, NotInstalled, Options, Program

Case = RowCase | CallCase | AttentionCase
_CALLS = 200  # of one small call in a round
_LAUNCHES = 4  # of each program of attention in a round, and of a call with matrix products
READ_BLOCKS = 32  # rows of the read probe for each that it writes
_COLS = 8192  # int32 elements of a block of the copy kernel: 64 registers per thread
_COPIED_BYTES = 2**30  # that a copy moves and a read reads beside attention

Entry = dict[str, Any]  # what a result file says of an implementation


class _Ready(NamedTuple):
    """A compiled program, the one that makes its operands, and what is launched."""

    program: Program
    compiled: Any
    prepare: Callable[..., Any]
    launched: Callable[..., Any]

    def bound(self, operands: Sequence[tuple[Any, ...]]) -> Callable[[int], Any]:
        own = [self.prepare(*each) for each in operands]
        return lambda k: self.launched(*own[k])


class Bench:
    """Measures the `chosen` cases as this machine can; holds the compiled programs."""

    def __init__(self, options: Options, chosen: Sequence[Case]):
        self.options, self.on_gpu = options, jax.default_backend() == "gpu"
        self._graded = {_key(self._here(case)[0]) for case in chosen if case.pass_ != "fwd"}
        self._programs: dict[tuple[Case, str], dict[str, _Ready] | Entry] = {}  # of an implementation, or why not
        self._compiled: dict[tuple[Any, str, str], _Ready] = {}  # passes of attention have programs in common
        self._truths: dict[Any, Any] = {}
        self._makers: dict[CallCase, Any] = {}  # compiled, of the operands
        self._held: tuple[Any, Any, Any] = (None, None, None)  # a key, its operands and the truth of them

    def _here(self, case: Case) -> tuple[Case, dict[str, Any]]:
        """The case as this machine measures it, and what a result file says of that."""
        return (case, {}) if self.on_gpu else case.shrunk()

    def _impls(self, case: Case) -> Sequence[str]:
        return self.options.of_case.get(case.name, self.options.impls)

    def prepare(self, case: Case) -> None:
        names = self._impls(case)
        case, _ = self._here(case)
        specs = jax.eval_shape(lambda: case.operands(1, 0))[0]
        key = _key(case)
        if key not in self._truths:
            self._truths[key] = protocol.compiled_truth(case, specs, key in self._graded)
        if isinstance(case, CallCase):
            self._makers[case] = jax.jit(case.make).lower(jax.random.key(0)).compile()
        # XLA's result is a part of the truth of rows.
        for name in dict.fromkeys((*["xla"] * (not isinstance(case, AttentionCase)), *names)):
            entry: Entry = {}
            with caught(entry):
                programs = impls.programs(case, name, self.options)
                self._programs[case, name] = {x: self._ready(case, name, x, programs[x], specs) for x in programs}
            if entry:  # what does not compile must not hide the others
                self._programs[case, name] = entry

    def _ready(self, case: Case, impl: str, name: str, program: Program, specs: Any) -> _Ready:
        key = _key(case), impl, name
        if key not in self._compiled:
            prepare = lambda *operands: operands
            if program.prepare is not None:
                lowered = jax.jit(program.prepare).lower(*specs)
                prepare, specs = lowered.compile(), lowered.out_info
            function = jax.jit(program.function)
            compiled = function.lower(*specs).compile()
            launched = function if case.pass_ == "call" else compiled  # a small call is timed with the way through jit
            self._compiled[key] = _Ready(program, compiled, prepare, launched)
        return self._compiled[key]

    def run(self, case: Case) -> dict[str, Any]:
        here, small = self._here(case)
        buffers = case.buffers if self.on_gpu else 1
        operands, truths = self._made(here, buffers)
        checked = {name: self._checked(here, name, operands, truths) for name in self._impls(case)}
        schedule = [variant for _, variants in checked.values() for variant in variants]
        time_them = self._time_calls if case.pass_ == "call" else self._time
        clock, timings, ceilings = time_them(here, schedule, buffers)
        record = {"case": case.describe(), **small, **here.sizes(), "clock": clock, **ceilings}
        for entry, variants in checked.values():
            if variants:
                mine = {variant.name.rpartition(":")[2]: timings[variant.name] for variant in variants}
                if not isinstance(here, AttentionCase):
                    entry |= _row_speeds(mine, record)
                else:
                    entry |= measured.speeds(case.pass_, {x: t.as_json() for x, t in mine.items()}, here.flops)
                    if case.pass_ == "fwd":
                        entry["tb_per_s"] = round(here.shape.least_bytes / entry["us"] / 1e6, 4)
        record["impls"] = {name: entry for name, (entry, _) in checked.items()}
        if not isinstance(here, AttentionCase):
            record["buffers"] = buffers
        else:
            record |= {"nvjitlink": measured.loaded("libnvJitLink"), **measured.against_best(record)}
        return record

    def _made(self, case: Case, buffers: int) -> tuple[Any, Any]:
        """The operands and the truth of a case, kept until those of another one are wanted."""
        if self._held[0] != _key(case):
            self._held = (None, None, None)  # frees the memory first
            maker = (self._makers[case],) if isinstance(case, CallCase) else ()
            operands, truth = case.operands(buffers, self.options.seed, *maker), self._truths[_key(case)]
            if not isinstance(case, AttentionCase):
                xla = self._programs[case, "xla"]
                if "status" in xla:
                    raise RuntimeError(f"xla: {xla['reason']}")
                found = truth, jax.block_until_ready(xla[case.pass_].bound(operands[:1])(0))
            else:
                found = truth(*operands[0])
            self._held = _key(case), operands, found
        return self._held[1:]

    def _checked(self, case: Case, name: str, operands: Any, truths: Any) -> tuple[Entry, list[protocol.Variant]]:
        """Checks an implementation before it is timed, and returns the programs to time if it is right."""
        found: Any = self._programs[case, name]
        if "status" in found:
            return dict(found), []
        entry: Entry = {}
        variants, verdicts = [], []
        with caught(entry):
            for program, ready in found.items():
                launch = ready.bound(operands)
                if program != "loop":
                    verdicts.append(protocol.judge(case, operands[0], jax.block_until_ready(launch(0)), truths))
                variants.append(protocol.Variant(f"{name}:{program}", launch))
            right = self._entry(case, name, measured.worst(verdicts).entry(), found)
            return right, variants if right["status"] == "ok" else []
        return entry, []

    def _entry(self, case: Case, name: str, entry: Entry, found: dict[str, _Ready]) -> Entry:
        """With what is known of the programs; those of rows that ours is compared with are right by definition."""
        if name == "ours" and self.on_gpu and not isinstance(case, RowCase):
            texts = {program: ready.compiled.as_text() for program, ready in found.items()}
            entry["kernels"] = {name: text.count('custom_call_target="mosaic_gpu') for name, text in texts.items()}
        if not isinstance(case, AttentionCase):
            if name in impls.BASELINES:
                entry = {key: value for key, value in entry.items() if key != "reason"} | {"status": "ok"}
            sizes = found[case.pass_].compiled.memory_analysis()
            entry |= {"temp_bytes": sizes.temp_size_in_bytes, "output_bytes": sizes.output_size_in_bytes}
            return entry | {"process": "jax"} | dict(found[case.pass_].program.facts)
        if name == "ours" and self.on_gpu and "standard" in case.tags and not all(entry["kernels"].values()):
            entry |= {"status": "failed", "reason": "no kernel took the call, and XLA must not be timed as ours"}
        return entry

    def _time(self, case: Case, schedule: Sequence[protocol.Variant], buffers: int) -> tuple[str, Any, dict[str, Any]]:
        """Times implementations, and together with them a copy and for attention a large matrix product.

        Beside rows, torch's copy comes once before and once after them; calls have nothing beside them.
        """
        facts = {"buffers": buffers, "rounds": self.options.rounds}
        if isinstance(case, CallCase):
            launches = _LAUNCHES if case.function.has_products else protocol.launches_per_round(case.least_bytes)
            launches = launches if self.on_gpu else 1
            return *protocol.measure(schedule, device_clock=self.on_gpu, launches=launches, **facts), {"copy": None}
        if isinstance(case, RowCase):
            n, size = 0, case.copied_bytes
            launches = protocol.launches_per_round(size) if self.on_gpu else 1
            beside = [copy_variant(size, buffers)]
        else:
            n, size = (8192, _COPIED_BYTES) if self.on_gpu else (64, 2**16)
            launches = _LAUNCHES if self.on_gpu or "cpu" in case.tags else 1
            beside, read_bytes = beside_attention(n, size)
        has_torch = self.on_gpu and isinstance(case, RowCase)
        torch_copy = lambda: torch_copy_us(size, **facts) if has_torch else None
        before = torch_copy()
        clock, timings = protocol.measure([*schedule, *beside], device_clock=self.on_gpu, launches=launches, **facts)
        copies = {name: (t.median, moved_bytes(size)) for name, t in timings.items() if name.startswith("copy:")}
        if known := [us for us in (before, torch_copy()) if us is not None]:
            copies["copy:torch"] = min(known), 8 * max(1, size // 8)
        ceilings = {"copy": best_copy(copies)}
        if n:
            us = timings["matmul"].median
            ceilings["matmul"] = {"size": n, "us": round(us, 3), "tflop_per_s": round(2 * n**3 / us / 1e6, 2)}
            us = timings["read"].median
            ceilings["read"] = {"us": round(us, 3), "tb_per_s": round(read_bytes / us / 1e6, 4)}
        return clock, timings, ceilings

    def _time_calls(self, case: Case, schedule: Sequence[protocol.Variant], buffers: int) -> tuple[str, Any, Any]:
        """Times one small call on the host, and then in a loop, both by wall clock."""
        timings = {}
        for program, launches in (("call", _CALLS), ("loop", 1)):
            mine = [variant for variant in schedule if variant.name.endswith(f":{program}")]
            facts = {"buffers": buffers, "rounds": self.options.rounds, "launches": launches}
            timings |= protocol.measure(mine, device_clock=False, **facts)[1]
        return "wall", timings, {"copy": None}


def _key(case: Case) -> Any:
    """Names the computation: passes of attention have programs in common."""
    return case.shape if isinstance(case, AttentionCase) else case


def _row_speeds(timings: dict[str, protocol.Timing], record: dict[str, Any]) -> Entry:
    taken, *rest = timings.values()
    if rest:
        return taken.as_json() | {"us_per_iteration": round(rest[0].median / impls.ITERATIONS, 4)}
    speed = record["least_bytes"] / taken.median / 1e6
    share = {"fraction_of_copy": round(speed / copy["tb_per_s"], 4)} if (copy := record["copy"]) else {}
    return taken.as_json() | {"tb_per_s": round(speed, 4)} | share


@contextlib.contextmanager
def caught(entry: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except NotInstalled as reason:
        entry |= {"status": "not installed", "reason": str(reason)}
    except Declined as reason:
        entry |= {"status": "declined", "reason": str(reason)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        entry |= {"status": "failed", "reason": text[:300]}


def attempt(bench: Bench, case: Case, *, compiled: bool) -> dict[str, Any]:
    """The record of a case, with the reason if it failed: out of memory in the truth, say. The other cases go on."""
    try:
        if not compiled:
            bench.prepare(case)
        return bench.run(case)
    except Exception as error:
        return _failed(case, f"{type(error).__name__}: {error}")


def _failed(case: Case, reason: str) -> dict[str, Any]:
    return {"case": case.describe(), "impls": {}, "error": reason[:500]}


def deal(chosen: Sequence[Case], processes: int) -> list[list[Case]]:
    """Shares of about as many calls each.

    The passes of a call of attention stay together, as they have programs in common, and so do a length and the one
    before it: the same pass of both in turn, as the one before heats the card.
    """
    calls: dict[Any, list[Case]] = {}
    for case in chosen:
        key = _key(case)
        if isinstance(case, AttentionCase):
            key = dataclasses.replace(case.shape, length=case.shape.length + case.shape.length % 2)
        calls.setdefault(key, []).append(case)
    found = [sorted(group, key=lambda case: PASSES.index(case.pass_)) for group in calls.values()]
    return [list(itertools.chain(*found[first::processes])) for first in range(min(processes, len(found)))]


def one_by_one(chosen: Sequence[Case], options: Options, deadline: float) -> Iterator[dict[str, Any]]:
    """The record of each case, in this process; without times where torch's side alone measures."""
    bench = Bench(options, chosen)
    for case in itertools.takewhile(lambda _: time.monotonic() < deadline, chosen):
        empty = {"case": case.describe(), "impls": {}, "clock": "cuda events", **case.sizes()}
        yield attempt(bench, case, compiled=False) if options.impls else empty


def in_processes(chosen: Sequence[Case], options: Options, processes: int, deadline: float) -> Iterator[dict[str, Any]]:
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


def _measure(pipe: Any, chosen: Sequence[Case], options: Options, compiled: Any, device: str, deadline: float) -> None:
    """Sends the records of a share; `device` is a file that a process has locked while it has the device."""
    bench = Bench(options, chosen)
    for case in chosen:
        bench.prepare(case)
    with contextlib.suppress(threading.BrokenBarrierError):
        compiled.wait()
    # Closed by the end of the process, which frees the device's memory too.
    fcntl.flock(os.open(device, os.O_RDWR), fcntl.LOCK_EX)
    for case in itertools.takewhile(lambda _: time.monotonic() < deadline, chosen):
        pipe.send(attempt(bench, case, compiled=True))


class Peers:
    """The process that measures `names`; `path` goes before PYTHONPATH there, where peers are installed."""

    def __init__(self, names: Sequence[str], rounds: int, path: str, module: str = "benchmarks.torch_peers"):
        self._names = tuple(names)
        self._command = [sys.executable, "-m", module, ",".join(names), str(rounds)]
        self._env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
        self._child: subprocess.Popen | None = None

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a case, as `torch_peers.measure` has it: `told` of a case is what the process is told."""
        if self._child is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._child = subprocess.Popen(self._command, env=self._env, cwd=measured.ROOT, **pipes)
        assert self._child.stdin
        assert self._child.stdout
        try:
            self._child.stdin.write(json.dumps(case) + "\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        self.close()
        failed = {"status": "failed", "reason": "the peers' process died; its last words are above"}
        return {"name": case["name"], "impls": {name: failed for name in self._names}}

    def close(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.communicate()


def _copy_block(x_gmem, y_gmem):
    i = lax.axis_index("block")
    y_gmem[i] = plgpu.load(x_gmem.at[i], layout=plgpu.Layout.WG_STRIDED((_COLS,), vec_size=4), optimized=False)


@jax.jit
def mosaic_copy(x: jax.Array) -> jax.Array:
    """Copies int32 `[blocks, _COLS]`, one block per warpgroup."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(_copy_block, out_type=out, grid=(len(x),), grid_names=("block",), kernel_name="copy")(x)


def _read_blocks(x_gmem, y_gmem):
    i, layout = lax.axis_index("block"), plgpu.Layout.WG_STRIDED((_COLS,), vec_size=4)
    load = lambda j: plgpu.load(x_gmem.at[i * READ_BLOCKS + j], layout=layout, optimized=False)
    y_gmem[i] = functools.reduce(jnp.add, map(load, range(READ_BLOCKS)))


@jax.jit
def mosaic_read(x: jax.Array) -> jax.Array:
    """Sums every `READ_BLOCKS` rows of int32 `[blocks, _COLS]`."""
    blocks = x.shape[0] // READ_BLOCKS
    out = jax.ShapeDtypeStruct((blocks, x.shape[1]), x.dtype)
    return plgpu.kernel(_read_blocks, out_type=out, grid=(blocks,), grid_names=("block",), kernel_name="read")(x)


def read_variant(size: int) -> tuple[protocol.Variant, int]:
    """Makes a program that reads `size` bytes and writes a few, and counts both; XLA's sum without a GPU."""
    shape = READ_BLOCKS * max(1, size // (4 * _COLS * READ_BLOCKS)), _COLS
    x = jax.random.randint(jax.random.key(2), shape, 0, 1000, jnp.int32)
    by_xla = jax.jit(lambda x: x.reshape(-1, READ_BLOCKS, _COLS).sum(1))
    read = mosaic_read if jax.default_backend() == "gpu" else by_xla
    if not bool((read(x) == by_xla(x)).all()):
        raise RuntimeError("the read probe does not read")
    return protocol.Variant("read", lambda _: read(x)), x.nbytes + x.nbytes // READ_BLOCKS


def moved_bytes(least_bytes: int) -> int:
    return 2 * 4 * _COLS * max(1, least_bytes // (2 * 4 * _COLS))


def copy_variant(least_bytes: int, buffers: int) -> protocol.Variant:
    """The copy in JAX's process that moves as many bytes as the case; XLA's stands in where there is no GPU."""
    shape = moved_bytes(least_bytes) // (2 * 4 * _COLS), _COLS
    keys = jax.random.split(jax.random.key(1), buffers)
    sources = [jax.random.randint(key, shape, 0, jnp.iinfo(jnp.int32).max, jnp.int32) for key in keys]
    name, copy = ("mosaic", mosaic_copy) if jax.default_backend() == "gpu" else ("xla", jax.jit(jnp.copy))
    if not bool((copy(sources[0]) == sources[0]).all()):
        raise RuntimeError("the copy probe does not copy")
    return protocol.Variant(f"copy:{name}", lambda k: copy(sources[k]))


def torch_copy_us(least_bytes: int, buffers: int, rounds: int) -> float | None:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    burst = torch_peers.burst(torch, torch_peers.copying(torch, least_bytes, buffers), buffers)
    times = torch_peers.interleaved(torch, {"copy": burst}, rounds)["copy"]
    del burst
    torch.cuda.empty_cache()
    return statistics.median(times)


def best_copy(found: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """The fastest of {method: (microseconds, bytes moved)}, naming all."""
    speeds = {name: round(moved / us / 1e6, 4) for name, (us, moved) in found.items()}
    best = max(speeds, key=lambda name: speeds[name])
    return {"method": best, "us": round(found[best][0], 3), "tb_per_s": speeds[best], "all_tb_per_s": speeds}


@functools.cache
def beside_attention(n: int, copied: int) -> tuple[list[protocol.Variant], int]:
    """A matrix product, a copy and a read, and how many bytes the read moves."""
    a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in jax.random.split(jax.random.key(3)))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, b))
    read, read_bytes = read_variant(copied)
    return [protocol.Variant("matmul", lambda _: product(a, b)), copy_variant(copied, 1), read], read_bytes
