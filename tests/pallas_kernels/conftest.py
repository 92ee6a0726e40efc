"""The helpers beside this file are plain modules: put them on the path, as no test directory is a package."""

import dataclasses
import pathlib
import sys

import pytest

for directory in (pathlib.Path(__file__).parent, pathlib.Path(__file__).parents[1]):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("aot"):
        import aot

        if aot.MISSING is not None:
            pytest.skip(aot.MISSING)


@pytest.fixture(autouse=True)
def optimised():
    """What XLA makes of the reference is what users get."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def interpreted(monkeypatch):
    """`interpreted(f, *operands)`: the result of `f`, whose kernels ran in Mosaic's interpreter without a race.

    On a chip of two SMs: a grid of 132 CTAs, most without work, takes most of a forward test's time.
    """
    from interpreter import interpret

    from pallas_kernels import hardware

    monkeypatch.setattr(hardware, "current", lambda: dataclasses.replace(hardware.H200, sm_count=2))
    return interpret
