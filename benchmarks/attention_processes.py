"""Cases of attention dealt over processes: each compiles its share, and once all have, they measure one after another.

Tracing holds Python's lock, and Mosaic compiles one kernel of a process at a time, so that threads alone gain little.
No process compiles while another measures, and every case is measured in one process.
"""

import contextlib
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.attention_cases import Case
from benchmarks.attention_runner import Bench, Options, attempt, failed


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
