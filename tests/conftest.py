"""Session set-up: eight CPU devices, so that every test of sharding runs on any machine."""

import collections
import os

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Simulated GPU threads that wait for each other hold a thread each of XLA's pool, which is as large as this says.
os.environ.setdefault("NPROC", "32")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, help="run the first of every so many cases of each test function")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--every` says, of what the other options leave."""
    seen: collections.Counter[str] = collections.Counter()
    left_out = []
    for item in list(items):
        function = item.nodeid.split("[")[0]
        if seen[function] % config.option.every:
            left_out.append(item)
            items.remove(item)
        seen[function] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` looks for a GPU: everything else is the same test on every machine."""
    if "gpu" in config.option.markexpr.replace("not gpu", ""):
        return

    import jax

    jax.config.update("jax_platforms", "cpu")
