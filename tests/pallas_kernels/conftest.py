"""The helpers beside this file are plain modules: put them on the path, as no test directory is a package."""

import pathlib
import sys

import pytest

for directory in (pathlib.Path(__file__).parent, pathlib.Path(__file__).parents[1]):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


@pytest.fixture
def interpreted():
    """`interpreted(f, *operands)`: the result of `f`, whose kernels ran in Mosaic's interpreter without a race."""
    from interpreter import interpret

    return interpret
