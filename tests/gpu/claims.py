"""A pytest plugin by which processes share tests: `-p claims --claims=FOLDER`, the same folder for each.

Whichever process comes to a test first runs it, and with it those that are marked to go `together` with it, so none
waits for another, and what a process leaves that crashed the others do. What became of each test stands in the folder
at once, a line of JSON in the process's own file, so that a run that is cut says how far it came.

After a kernel's bad access everything fails in its process, at once: one with failures in a row ends, before it has
claimed all that is left.
"""

import hashlib
import json
import operator
import os
import pathlib
import types
from typing import Any

import pytest

LOST = 70  # exit status of a process that leaves the rest to others
_MOST_IN_A_ROW = 3
_MOST_WORDS = 4000  # characters of a failure, from its end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", required=True, help="folder that the processes share")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Claims(pathlib.Path(config.option.claims)))


def group_of(item: pytest.Item) -> str:
    """The test's name, or of tests that go together the name of their function and what they are alike in."""
    marker = item.get_closest_marker("together")
    if marker is None or not isinstance(item, pytest.Function):
        return item.nodeid
    parameters = types.SimpleNamespace(**item.callspec.params)
    alike = [str(operator.attrgetter(name)(parameters)) for name in marker.args]
    return f"{item.nodeid.split('[')[0]} {alike}"


def groups_of(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The tests in their order, but those that go together where the first of them stands."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item)
    return groups


class Claims:
    """What this process claims, and its record."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._seconds = 0.0
        self._outcome = self._why = ""
        self._failed_in_a_row = 0

    def claim(self, group: str) -> bool:
        """Whether this process is the first to ask for the group."""
        try:
            os.close(os.open(self._folder / hashlib.sha256(group.encode()).hexdigest(), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._record(collected=len(session.items))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        for group, items in groups_of(session.items).items():
            if self._failed_in_a_row >= _MOST_IN_A_ROW:
                pytest.exit(f"{self._failed_in_a_row} tests failed in a row", LOST)
            if self.claim(group):
                for item in items:
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds, self._outcome, self._why = 0.0, "passed", ""
        self._record(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome, self._why = report.outcome, report.longreprtext[-_MOST_WORDS:]
        if report.when == "teardown":
            self._failed_in_a_row = self._failed_in_a_row + 1 if self._outcome == "failed" else 0
            outcome = {"outcome": self._outcome, "seconds": round(self._seconds, 2), "why": self._why}
            self._record(test=report.nodeid, **outcome)

    def _record(self, **what: Any) -> None:
        with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")
