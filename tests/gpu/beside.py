"""Runs GPU tests in many processes beside each other, within a time limit, and says how far they came.

    OUT=FOLDER python3 tests/gpu/beside.py [--processes=16] [--seconds=540] NAME TESTS...

`$OUT/NAME.txt` has the summary, why tests failed and which did not end, the output of the processes and the seconds of
every test. TESTS are pytest's arguments. The exit status is 0 if all tests ran and none failed.
"""

import argparse
import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTEST = ("-m", "pytest", "-m", "gpu", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", "-p", "claims")
PYTEST += ("--timeout-method=thread",)  # ends a process that waits for a kernel
_LOG_BYTES = 500_000  # of a process's output, from its end
_SHOWN, _SHOWN_CHARACTERS = 20, 800  # lines of each kind, and of a failure


def environment() -> dict[str, str]:
    """Of a process among as many as there are cores.

    One thread for NumPy; no tuning of XLA's matrix products, which takes long, and here would time them beside others.
    """
    found = dict(os.environ)
    found |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    found |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    found["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {found.get('XLA_FLAGS', '')}"
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parent), found.get("PYTHONPATH")]))
    return found


def run(folder: pathlib.Path, tests: Sequence[str], processes: int, seconds: float) -> list[int | None]:
    """The exit status of each process, `None` if it was killed at the time limit; its output is in `folder`, by number.

    In the place of one that crashed, or gave up its GPU as `claims` does, another is started, up to as many again.
    """
    ends = time.monotonic() + seconds
    started = [_start(folder, i, tests) for i in range(processes)]
    running = list(started)
    while running and time.monotonic() < ends:
        time.sleep(0.1)
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            if process.returncode not in pytest.ExitCode and len(started) < 2 * processes:
                started.append(_start(folder, len(started), tests))
                running.append(started[-1])
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return [None if process in running else process.returncode for process in started]


def _start(folder: pathlib.Path, number: int, tests: Sequence[str]) -> subprocess.Popen[Any]:
    command = [sys.executable, *PYTEST, f"--claims={folder}", *tests]
    with (folder / f"{number}.txt").open("w") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **streams)


class Summary:
    """What the processes' records come to."""

    def __init__(self, folder: pathlib.Path, statuses: Sequence[int | None], seconds: float):
        self.statuses, self.seconds = statuses, seconds
        self.collected, self.done, self.unfinished = 0, {}, []
        for path in sorted(folder.glob("*.jsonl")):
            running = None
            for record in map(json.loads, path.read_text().split("\n")[:-1]):  # whole lines only
                self.collected = max(self.collected, record.get("collected", 0))
                if "test" in record:
                    self.done[record["test"]] = record
                running = record.get("started")
            self.unfinished += [running] if running else []

    @property
    def passed(self) -> bool:
        """Whether all ran, some passed, none failed, and each process ended by itself and well."""
        all_ran = self.collected == len(self.done) and any(x["outcome"] == "passed" for x in self.done.values())
        return all_ran and not self.failures() and not any(status != 0 for status in self.statuses)

    def lines(self, name: str) -> list[str]:
        """The number of tests that ran, those that failed or did not end, and processes that did not end well."""
        of = collections.Counter(record["outcome"] for record in self.done.values())
        spent = sum(record["seconds"] for record in self.done.values())
        counts = ", ".join(f"{of[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        lines = [f"{name}: {len(self.done)} of {self.collected} tests ran in {self.seconds:.0f} s: {counts}"]
        lines += [f"  {spent:.0f} s of tests in {len(self.statuses)} processes"]
        lines += [f"  failed: {test}" for test in self.failures()]
        lines += [f"  did not end: {test}" for test in self.unfinished]
        cut = self.statuses.count(None)
        lines += [f"  {cut} processes were cut: out of time"] * (cut > 0)
        bad = collections.Counter(status for status in self.statuses if status not in (None, 0, 1))
        lines += [f"  {n} processes ended with status {status}" for status, n in bad.items()]
        return lines

    def failures(self) -> dict[str, str]:
        """Tests that failed, and why."""
        return {test: record["why"] for test, record in self.done.items() if record["outcome"] == "failed"}

    def slowest(self) -> list[str]:
        """Every test's seconds, the longest first."""
        ordered = sorted(self.done.values(), key=lambda record: -record["seconds"])
        return [f"{record['seconds']:8.2f} {record['outcome']:7} {record['test']}" for record in ordered]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("name")
    parser.add_argument("tests", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        statuses = run(folder, arguments.tests, arguments.processes, arguments.seconds)
        summary = Summary(folder, statuses, time.monotonic() - started)
        logs = [(folder / f"{i}.txt").read_bytes()[-_LOG_BYTES:].decode(errors="replace") for i in range(len(statuses))]
    lines, slowest, whys = summary.lines(arguments.name), summary.slowest(), list(summary.failures().items())
    parts = [*lines, *(f"--- {test}\n{why}" for test, why in whys)]
    parts += [*(f"--- process {i}\n{log}" for i, log in enumerate(logs)), "--- seconds", *slowest]
    (pathlib.Path(os.environ["OUT"]) / f"{arguments.name}.txt").write_text("\n".join(parts) + "\n")
    # What comes last is what is seen of a long output.
    ended_badly = [log for log, status in zip(logs, statuses, strict=True) if status not in (None, 0)]
    shown = [line for log in ended_badly[:1] for line in log.splitlines()[-_SHOWN:]]
    shown += [f"--- {test}\n{why[-_SHOWN_CHARACTERS:]}" for test, why in whys[:5]]
    print("\n".join([*shown, "--- seconds", *slowest[:_SHOWN], *lines[:_SHOWN]]), flush=True)
    return 0 if summary.passed else 1


if __name__ == "__main__":
    sys.exit(main())
