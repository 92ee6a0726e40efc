"""The helpers beside this file are plain modules: put them on the path, as no test directory is a package."""

import dataclasses
import pathlib
import sys

import pytest

for directory in (pathlib.Path(__file__).parent, pathlib.Path(__file__).parents[1]):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


# Where kernels are interpreted, or tables read, and XLA compiles only what NumPy might have computed.
NOT_BY_XLA = {
    *("test_attention_masks", "test_attention_segments", "test_attention_schedule", "test_geometry"),
    *("test_attention_forward", "test_attention_backward", "test_conformance", "test_mutants"),
}


def pytest_configure(config: pytest.Config) -> None:
    import selected

    selected.mark_expression = config.option.markexpr


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("aot"):
        import aot

        if aot.MISSING is not None:
            pytest.skip(aot.MISSING)


@pytest.fixture(autouse=True)
def optimised(request):
    """What XLA makes of a reference, or of what is around a kernel, is what users get."""
    if request.node.path.stem in NOT_BY_XLA and not request.node.get_closest_marker("aot"):
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def blocks_are_looked_at(request):
    """The problems of these tests are so small that a kernel would visit all that a mask hides."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.path.stem in NOT_BY_XLA:
            patch.setattr("pallas_kernels.attention.dispatch._visits_hidden", lambda *_: False)
        yield


@pytest.fixture
def interpreted(monkeypatch):
    """`interpreted(f, *operands)`: the result of `f`, whose kernels ran in Mosaic's interpreter without a race.

    On a chip of two SMs: a grid of 132 CTAs, most without work, takes most of a forward test's time.
    """
    from interpreter import interpret

    from pallas_kernels import hardware

    monkeypatch.setattr(hardware, "current", lambda: dataclasses.replace(hardware.H200, sm_count=2))
    return interpret
