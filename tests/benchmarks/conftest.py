"""How tests run the binary, and what they name cases by."""

import sys

import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as program
from benchmarks import tables


@pytest.fixture
def binary(monkeypatch, capsys):
    """Runs the binary's `main` with these flags, and returns what it prints."""

    def run(*flags, expect=0):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *flags])
        with flagsaver.flagsaver():
            try:
                program.main()
                code = 0
            except SystemExit as end:
                code = end.code
        found = capsys.readouterr()
        text = found.out + found.err + (code if isinstance(code, str) else "")
        assert (code if isinstance(code, int) else 1) == expect, text
        return text

    return run


@pytest.fixture(scope="session")
def rows():
    """The case of rows of a name."""
    known = {case.name: case for case in tables.ROWS.cases}
    return known.__getitem__
