"""Runs GPU tests in many processes beside each other, within a time limit, and says how far they came.

    OUT=FOLDER python3 tests/gpu/beside.py [--processes=16] [--seconds=540] NAME TESTS...

`$OUT/NAME.txt` has pytest's output: why tests failed, the seconds of every test, and which did not end. TESTS are
pytest's arguments. The exit status is 0 if all tests ran, some passed and none failed.

pytest-xdist shares the tests among its processes, and starts another in the place of one that crashed. This file is
also a plugin of pytest. It puts tests that go `together` beside each other, so that one process has most of them. After
a kernel's bad access everything fails in its process, at once: one with failures in a row ends before it takes more.
"""

import argparse
import operator
import os
import pathlib
import signal
import subprocess
import sys
import types
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYTEST = ("-m", "pytest", "-p", "beside", "-m", "gpu", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider")
PYTEST += ("--dist=worksteal", "--durations=0", "--durations-min=0.005")
PYTEST += ("-p", "no:benchmark")  # which warns where processes are shared
PYTEST += ("--timeout-method=thread",)  # ends a process that waits for a kernel
LOST = 70  # exit status of a process that leaves the rest to others
_MOST_IN_A_ROW = 3
_ENDS_S = 20  # in which pytest ends its processes
_SHOWN = 40  # lines


def environment() -> dict[str, str]:
    """Of a process among as many as there are cores.

    One thread for NumPy; no tuning of XLA's matrix products, which takes long, and here would time them beside others.
    """
    found = dict(os.environ)
    found |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    found |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    found["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {found.get('XLA_FLAGS', '')}"
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parent), found.get("PYTHONPATH")]))
    return found


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Worker() if hasattr(config, "workerinput") else _Controller())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves tests that go together to where the first of them stands."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(_group_of(item), []).append(item)
    items[:] = [item for group in groups.values() for item in group]


def _group_of(item: pytest.Item) -> str:
    """The test's name, or of tests that go together the name of their function and what they are alike in."""
    marker = item.get_closest_marker("together")
    if marker is None or not isinstance(item, pytest.Function):
        return item.nodeid
    parameters = types.SimpleNamespace(**item.callspec.params)
    alike = [str(operator.attrgetter(name)(parameters)) for name in marker.args]
    return f"{item.nodeid.split('[')[0]} {alike}"


class _Worker:
    """Ends its process after failures in a row."""

    def __init__(self) -> None:
        self._in_a_row, self._failed = 0, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        if report.when == "teardown":
            self._in_a_row, self._failed = self._in_a_row + 1 if self._failed else 0, False

    @pytest.hookimpl(trylast=True)  # when the controller knows of the failure
    def pytest_runtest_logfinish(self) -> None:
        if self._in_a_row >= _MOST_IN_A_ROW:
            os._exit(LOST)


class _Controller:
    """Says which tests ran, and which had begun when their process or the time ended."""

    def __init__(self) -> None:
        self._running: dict[str, None] = {}
        self._ran: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._ran.add(nodeid)

    @pytest.hookimpl(tryfirst=True)  # before the terminal's summary
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails where all tests were skipped: there is no GPU."""
        passed = session.config.pluginmanager.get_plugin("terminalreporter").stats.get("passed")
        if session.exitstatus == 0 and not (passed and len(self._ran) == session.testscollected):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        collected = terminalreporter._session.testscollected
        terminalreporter.write_line(f"{len(self._ran)} of {collected} tests ran")
        for nodeid in self._running:
            terminalreporter.write_line(f"did not end: {nodeid}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("name")
    parser.add_argument("tests", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    report = pathlib.Path(os.environ["OUT"]) / f"{arguments.name}.txt"
    command = [sys.executable, *PYTEST, f"-n{arguments.processes}", f"--max-worker-restart={arguments.processes}"]
    with report.open("w") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [*command, *arguments.tests], cwd=ROOT, env=environment(), start_new_session=True, **streams
        )
        for seconds, sent in ((arguments.seconds, signal.SIGINT), (_ENDS_S, signal.SIGKILL)):
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                (os.kill if sent == signal.SIGINT else os.killpg)(process.pid, sent)
        status = process.wait()
    print("\n".join(report.read_text(errors="replace").splitlines()[-_SHOWN:]), flush=True)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
