"""Compiles, checks and times the cases of every topic; time is taken as `benchmarks.protocol` says.

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

from benchmarks import impls, linear, protocol, torch_peers
from benchmarks import results as measured
from benchmarks.attention_cases import AttentionCase
from benchmarks.cases import PASSES, Case
from benchmarks.impls import Options, Program, caught
from benchmarks.linear import LinearCase
from benchmarks.protocol import AnyCase

_CALLS = 200  # of one small call in a round
_LAUNCHES = 4  # of each program of attention in a round, and of a call with matrix products
READ_BLOCKS = 32  # rows of the read probe for each that it writes
_COLS = 8192  # int32 elements of a block of the copy kernel: 64 registers per thread
FIRST_PARTS = ("trace_s", "lower_s", "compile_s")
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

    def __init__(self, options: Options, chosen: Sequence[AnyCase]):
        self.options, self.on_gpu = options, jax.default_backend() == "gpu"
        self._graded = {self._here(case)[0].key for case in chosen if case.pass_ != "fwd"}
        self._programs: dict[tuple[AnyCase, str], dict[str, _Ready] | Entry] = {}  # of an implementation, or why not
        self._compiled: dict[tuple[Any, str, str], _Ready] = {}  # passes of attention have programs in common
        self._truths: dict[Any, Any] = {}
        self._makers: dict[Any, Any] = {}  # compiled, of the operands
        self._held: tuple[Any, Any, Any] = (None, None, None)  # a key, its operands and the truth of them

    def _here(self, case: AnyCase) -> tuple[AnyCase, dict[str, Any]]:
        """The case as this machine measures it, and what a result file says of that."""
        return (case, {}) if self.on_gpu else case.shrunk()

    def prepare(self, case: AnyCase) -> None:
        case, _ = self._here(case)
        specs = jax.eval_shape(lambda: case.operands(1, 0))[0]
        if case.key not in self._truths:
            self._truths[case.key] = protocol.compiled_truth(case, specs, case.key in self._graded)
        if not isinstance(case, AttentionCase):
            self._makers[case.key] = jax.jit(case.make).lower(jax.random.key(0)).compile()
        # XLA's result is a part of the truth of rows.
        for name in dict.fromkeys((*["xla"] * isinstance(case, Case), *self.options.impls)):
            entry: Entry = {}
            with caught(entry):
                programs = impls.programs(case, name, self.options)
                self._programs[case, name] = {x: self._ready(case, name, x, programs[x], specs) for x in programs}
            if entry:  # what does not compile must not hide the others
                self._programs[case, name] = entry

    def _ready(self, case: AnyCase, impl: str, name: str, program: Program, specs: Any) -> _Ready:
        key = case.key, impl, name
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

    def run(self, case: AnyCase) -> dict[str, Any]:
        here, small = self._here(case)
        buffers = case.buffers if self.on_gpu else 1
        operands, truths = self._made(here, buffers)
        checked = {name: self._checked(here, name, operands, truths) for name in self.options.impls}
        schedule = [variant for _, variants in checked.values() for variant in variants]
        clock, timings, ceilings = self._time(here, schedule, buffers)
        record = {"case": case.describe(), **small, **here.sizes(), "clock": clock, **ceilings, "buffers": buffers}
        for entry, variants in checked.values():
            if variants:
                times = {variant.name.rpartition(":")[2]: timings[variant.name].as_json() for variant in variants}
                entry |= here.speeds(times, record)
        record["impls"] = {name: entry for name, (entry, _) in checked.items()}
        if isinstance(here, AttentionCase):
            record |= {"nvjitlink": measured.loaded("libnvJitLink"), **measured.against_best(record)}
        for entry in record["impls"].values():
            entry |= measured.beside_products(entry, record["impls"].get("products", {}))
        return record

    def _made(self, case: AnyCase, buffers: int) -> tuple[Any, Any]:
        """The operands and the truth of a case, kept until those of another one are wanted."""
        if self._held[0] != case.key:
            self._held = (None, None, None)  # frees the memory first
            maker = [self._makers[case.key]] if case.key in self._makers else []
            operands, truth = case.operands(buffers, self.options.seed, *maker), self._truths[case.key]
            found = (truth, self._by_xla(case, operands)) if isinstance(case, Case) else truth(*operands[0])
            self._held = case.key, operands, found
        return self._held[1:]

    def _by_xla(self, case: Case, operands: Any) -> Any:
        """XLA's outputs; NaN where it cannot compile a call that ours may be right in."""
        xla = self._programs[case, "xla"]
        if "status" not in xla:
            return jax.block_until_ready(xla[case.pass_].bound(operands[:1])(0))
        if case.source:
            raise RuntimeError(f"xla: {xla['reason']}")
        outputs = jax.eval_shape(impls.build(case, "truth").function, *operands[0])
        return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan).astype(x.dtype), outputs)

    def _checked(self, case: AnyCase, name: str, operands: Any, truths: Any) -> tuple[Entry, list[protocol.Variant]]:
        """Checks an implementation before it is timed, and returns the programs to time if it is right."""
        found: Any = self._programs[case, name]
        if "status" in found:
            return dict(found), []
        entry: Entry = {}
        variants, verdicts = [], []
        with caught(entry):
            for program, ready in found.items():
                launch = ready.bound(operands)
                out = jax.block_until_ready(launch(0))
                if program != "loop" and name != "products":
                    verdicts.append(protocol.judge(case, operands[0], out, truths))
                calls = linear.CALLS if isinstance(case, LinearCase) else 1
                launches = 1 if program == "loop" else None
                variants.append(protocol.Variant(f"{name}:{program}", launch, calls, launches))
            verdict = measured.worst(verdicts).entry() if verdicts else {}
            right = self._entry(case, name, verdict, found)
            return right, variants if right["status"] == "ok" else []
        return entry, []

    def _entry(self, case: AnyCase, name: str, entry: Entry, found: dict[str, _Ready]) -> Entry:
        """With what is known of the programs; those that ours is compared with are right by definition."""
        entry |= {"process": "jax"}
        if name == "ours" and self.on_gpu and not (isinstance(case, Case) and case.source):
            texts = {program: ready.compiled.as_text() for program, ready in found.items()}
            entry["kernels"] = {name: text.count('custom_call_target="mosaic_gpu') for name, text in texts.items()}
        if not isinstance(case, AttentionCase):
            if name in impls.BASELINES:
                entry = {key: value for key, value in entry.items() if key != "reason"} | {"status": "ok"}
            sizes = found[case.pass_].compiled.memory_analysis()
            entry |= {"temp_bytes": sizes.temp_size_in_bytes, "output_bytes": sizes.output_size_in_bytes}
            return entry | dict(found[case.pass_].program.facts)
        if name == "ours" and self.on_gpu and "standard" in case.tags and not all(entry["kernels"].values()):
            entry |= {"status": "failed", "reason": "no kernel took the call, and XLA must not be timed as ours"}
        return entry

    def _time(self, case: AnyCase, schedule: Sequence[protocol.Variant], buffers: int) -> tuple[str, Any, Entry]:
        """Times implementations, and together with them a copy and for attention a large matrix product.

        Beside rows, torch's copy comes once before and once after them; other calls have nothing beside them. Small
        calls, and losses of products, are timed by wall clock.
        """
        by_device = self.on_gpu and case.pass_ != "call" and not isinstance(case, LinearCase)
        facts = {"buffers": buffers, "rounds": self.options.rounds}
        measure = functools.partial(protocol.measure, device_clock=by_device, launches=self._launches(case), **facts)
        if isinstance(case, AttentionCase):
            n, size = (8192, _COPIED_BYTES) if self.on_gpu else (64, 2**16)
            beside, read_bytes = beside_attention(n, size)
        elif isinstance(case, Case) and case.source and case.pass_ != "call":
            n, size, read_bytes = 0, case.copied_bytes, 0
            beside = [copy_variant(size, buffers)]
        else:
            return *measure(schedule), {"copy": None}
        torch_copy = lambda: torch_copy_us(size, **facts) if self.on_gpu and not n else None
        before = torch_copy()
        clock, timings = measure([*schedule, *beside])
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

    def _launches(self, case: AnyCase) -> int:
        """How many launches of each program a round has."""
        if case.pass_ == "call":
            return _CALLS
        if isinstance(case, LinearCase):
            return 1
        if not (self.on_gpu or "cpu" in case.tags):
            return 1
        if isinstance(case, AttentionCase) or case.operation.has_products:
            return _LAUNCHES
        return protocol.launches_per_round(case.copied_bytes if case.source else case.least_bytes)


class Alone(NamedTuple):
    """In the place of a `Bench`, for what is compiled as a part of its measurement."""

    run: Callable[[Any], dict[str, Any]]

    def prepare(self, case: Any) -> None:
        pass


def bench_of(options: Options, chosen: Sequence[Any]) -> Bench | Alone:
    """Makes what measures the cases: first calls and several devices have measurements of their own."""
    if any("first" in case.tags for case in chosen):
        return Alone(functools.partial(_first_call, options=options))
    if any(hasattr(case, "record") for case in chosen):
        return Alone(lambda case: case.record(options))
    return Bench(options, chosen)


def attempt(bench: Bench | Alone, case: Any, *, compiled: bool) -> dict[str, Any]:
    """The record of a case, with the reason if it failed: out of memory in the truth, say. The other cases go on."""
    try:
        if not compiled:
            bench.prepare(case)
        return bench.run(case)
    except Exception as error:
        return _failed(case, f"{type(error).__name__}: {error}")


def _failed(case: Any, reason: str) -> dict[str, Any]:
    return {"case": case.describe(), "impls": {}, "error": reason[:500]}


def deal(chosen: Sequence[AnyCase], processes: int) -> list[list[AnyCase]]:
    """Shares of about as many calls each.

    The passes of a call of attention stay together, as they have programs in common, and so do a length and the one
    before it: the same pass of both in turn, as the one before heats the card.
    """
    calls: dict[Any, list[AnyCase]] = {}
    for case in chosen:
        key = case.key
        if isinstance(case, AttentionCase):
            key = dataclasses.replace(case.shape, length=case.shape.length + case.shape.length % 2)
        calls.setdefault(key, []).append(case)
    found = [sorted(group, key=lambda case: PASSES.index(case.pass_)) for group in calls.values()]
    return [list(itertools.chain(*found[first::processes])) for first in range(min(processes, len(found)))]


def records(chosen: Sequence[Any], options: Options, processes: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Measures cases; `deadline` is the `time.monotonic()` after which no case starts."""
    several = processes > 1 and options.impls
    return in_processes(chosen, options, processes, deadline) if several else one_by_one(chosen, options, deadline)


def one_by_one(chosen: Sequence[Any], options: Options, deadline: float) -> Iterator[dict[str, Any]]:
    """The record of each case, in this process; without times where torch's side alone measures."""
    bench = bench_of(options, chosen)
    for case in itertools.takewhile(lambda _: time.monotonic() < deadline, chosen):
        if isinstance(bench, Bench) and not options.impls:
            yield {"case": case.describe(), "impls": {}, "clock": "cuda events", **case.sizes()}
        else:
            yield attempt(bench, case, compiled=False)


def in_processes(
    chosen: Sequence[AnyCase], options: Options, processes: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """The record of each case, as it is measured.

    The cases of a process that ends early are recorded as failed, and the other processes go on.
    """
    spawning, shares = multiprocessing.get_context("spawn"), deal(chosen, processes)
    compiled = spawning.Barrier(len(shares))
    running: dict[Any, tuple[Any, list[AnyCase]]] = {}
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
    pipe: Any, chosen: Sequence[AnyCase], options: Options, compiled: Any, device: str, deadline: float
) -> None:
    """Sends the records of a share; `device` is a file that a process has locked while it has the device."""
    bench = bench_of(options, chosen)
    for case in chosen:
        bench.prepare(case)
    with contextlib.suppress(threading.BrokenBarrierError):
        compiled.wait()
    # Closed by the end of the process, which frees the device's memory too.
    fcntl.flock(os.open(device, os.O_RDWR), fcntl.LOCK_EX)
    for case in itertools.takewhile(lambda _: time.monotonic() < deadline, chosen):
        pipe.send(attempt(bench, case, compiled=True))


def _first_call(case: Case, options: Options) -> dict[str, Any]:
    """Measures a call before its first result: seconds to trace, lower and compile it, by each implementation.

    A call of another shape is traced and lowered first, so that modules are imported and MLIR's dialects loaded, and
    then JAX's caches are cleared: what is left is what each new shape costs that a program meets. Nothing runs.
    """
    here, small = (case, {}) if jax.default_backend() == "gpu" else case.shrunk()
    found = {name: _seconds(here, name, options) for name in options.impls}
    return {"case": case.describe(), **small, "clock": "wall", "impls": found}


def _seconds(case: Case, name: str, options: Options) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    with caught(entry):
        rounds = [_parts(case, name, options) for _ in range(options.rounds)]
        medians = (round(statistics.median(times), 4) for times in zip(*rounds, strict=True))
        return {"status": "ok", **dict(zip(FIRST_PARTS, medians, strict=True))}
    return entry


def _parts(case: Case, name: str, options: Options) -> tuple[float, ...]:
    program, specs = _jitted(case, name, options)
    larger = dataclasses.replace(case, shape=(2 * case.shape[0], *case.shape[1:]))
    before, before_specs = _jitted(larger, name, options)
    before.trace(*before_specs).lower()
    jax.clear_caches()
    moments = [time.perf_counter()]
    traced = program.trace(*specs)
    moments.append(time.perf_counter())
    lowered = traced.lower()
    moments.append(time.perf_counter())
    lowered.compile()
    moments.append(time.perf_counter())
    return tuple(end - start for start, end in itertools.pairwise(moments))


def _jitted(case: Case, name: str, options: Options) -> tuple[Any, Any]:
    """A jitted function, and the shapes of its operands."""
    specs = jax.eval_shape(lambda: case.operands(1, 0))[0]
    return jax.jit(impls.programs(case, name, options)[case.pass_].function), specs


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
