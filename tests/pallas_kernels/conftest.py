"""The helpers beside this file are plain modules: put them on the path, as no test directory is a package."""

import pathlib
import sys

import pytest

for directory in (pathlib.Path(__file__).parent, pathlib.Path(__file__).parents[1]):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


@pytest.fixture(autouse=True)
def optimised():
    """Kernels and XLA are compared to a few units in the last place, which LLVM's optimisations change."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def interpreted():
    """`interpreted(f, *operands)`: the result of `f`, whose kernels ran in Mosaic's interpreter without a race."""
    from interpreter import interpret

    return interpret
