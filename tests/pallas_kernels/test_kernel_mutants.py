"""Faults planted in the ladder's own kernels, in the functions that they share, are rejected in the interpreter."""

import functools
import sys

import cases
import conformance
import jax
import mutants
import pytest
from cases import DTYPES, Problem
from interpreter import interpret

from pallas_kernels.softmax import LADDER

ROWS = len(cases.ROW_KINDS) + 1
COLS = (1001, 5000, 20001, 40000, 70001, 140000)
pytestmark = pytest.mark.skipif(not LADDER, reason="no rungs")


def plant(monkeypatch, mutant):
    """Puts the fault in the place of what it replaces, wherever that was imported to; the result counts its calls."""
    calls = []

    @functools.wraps(mutant.original)
    def faulty(*arguments, **keywords):
        calls.append(mutant.name)
        return mutant.fault(mutant.original, *arguments, **keywords)

    for name, module in list(sys.modules.items()):
        if name.startswith("pallas_kernels"):
            for attribute, value in list(vars(module).items()):
                if value is mutant.original:
                    monkeypatch.setattr(module, attribute, faulty)
    return calls


def smallest(rung, op, dtype):
    cols = cases.supported_cols(rung, op, dtype, ROWS, COLS)[:1]
    return cases.default(rung, Problem(op, ROWS, cols[0], dtype)) if cols else None


@pytest.mark.parametrize("rung", LADDER.values(), ids=lambda rung: rung.name)
@pytest.mark.parametrize("mutant", mutants.KERNEL_MUTANTS, ids=lambda m: m.name)
def test_planted_fault_is_rejected(mutant, rung, monkeypatch):
    calls = plant(monkeypatch, mutant)
    case = smallest(rung, mutant.op, DTYPES[2])
    if case is None:
        pytest.skip(f"{rung.name} takes no {mutant.op}")
    jax.clear_caches()
    try:
        conformance.check(case.run, case.problem, execute=lambda run: functools.partial(interpret, run))
    except (AssertionError, IndexError, jax.errors.JaxRuntimeError):
        return
    finally:
        jax.clear_caches()
    assert not calls, f"{rung.name} passes with a fault: {mutant.name}"
    pytest.skip(f"{rung.name} does not use {mutant.original.__name__}")
