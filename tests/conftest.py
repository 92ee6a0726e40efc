"""Session set-up: eight CPU devices, so that every test of sharding runs on any machine."""

import collections
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Each worker of pytest has a core at the most: NumPy's threads would spin for others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Simulated GPU threads that wait for each other hold a thread each of XLA's pool, which is as large as this says.
os.environ.setdefault("NPROC", "32")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--must-pass", default="", help="fails unless a test with each of these markers passed")
    parser.addoption("--one-in", type=int, default=1, help="of each test's cases the first, and every so many'th after")


@pytest.hookimpl(trylast=True)  # of those that `-k` and `-m` leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--one-in` says; none of a test that has one case."""
    seen = collections.Counter()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left_out if seen[test] % config.option.one_in else kept).append(item)
        seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` looks for a GPU: everything else is the same test on every machine."""
    if "gpu" in config.option.markexpr.replace("not gpu", ""):
        return

    # Compiling takes most of a test's time, and is a third faster without LLVM's optimisations. JAX may be imported
    # already, by a plugin of pytest's: it has read its own variables, but not XLA's.
    if "aot" not in config.option.markexpr.replace("not aot", ""):
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_cpu_prefer_vector_width=128"

    import jax

    jax.config.update("jax_platforms", "cpu")
    # No test reads where an operation was written, which takes a twentieth of lowering.
    jax.config.update("jax_traceback_in_locations_limit", 0)


_PASSED: set[str] = set()  # the keywords of tests that passed, markers among them


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _PASSED.update(report.keywords)


@pytest.hookimpl(tryfirst=True)  # before the terminal's summary, which says why
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A stage whose tests were all skipped has run nothing, and fails."""
    if not hasattr(session.config, "workerinput") and _not_passed(session.config) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if missing := _not_passed(config):
        terminalreporter.write_line(f"--must-pass: no test marked {' or '.join(missing)} passed", red=True)


def _not_passed(config: pytest.Config) -> list[str]:
    return [name for name in filter(None, config.option.must_pass.split(",")) if name not in _PASSED]


@pytest.fixture(autouse=True)
def uncollected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Traces are many small objects: the garbage collector takes a fifth of a kernel's test, less of a program's."""
    if request.node.get_closest_marker("gpu") is None:
        gc.disable()
    yield
    gc.enable()
