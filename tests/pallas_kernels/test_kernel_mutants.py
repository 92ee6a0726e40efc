"""Faults planted in the ladder's own kernels, in the functions that they share, are rejected in the interpreter."""

import functools
import sys

import cases
import conformance
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import mutants
import pytest
from cases import DTYPES, Problem
from interpreter import Deadlock, interpret
from jax import lax

from pallas_kernels.hardware import H200
from pallas_kernels.softmax.dispatch import KERNELS
from pallas_kernels.softmax.grid import GridConfig
from pallas_kernels.softmax.online import OnlineConfig
from pallas_kernels.softmax.staged import StagedConfig

ROWS = len(cases.ROW_KINDS) + 1
pytestmark = pytest.mark.slow

# Each kernel at work with more than one of whatever it can have more than one of.
AT_WORK = {
    "naive": (None, 125),
    "warp": (None, 1001),
    "block": (StagedConfig(1, 2, 1, 2, 3), 1001),
    "online": (OnlineConfig(2, 1), 1001),
    "cluster": (StagedConfig(3, 2, 1, 1, 1), 2501),
    "grid": (GridConfig(3, 2, 1, 2), 2501),
}


def plant(monkeypatch, mutant, applies=lambda caller, *arguments: True):
    """Puts the fault in the place of what it replaces, wherever that was imported to, in the calls to which it applies.

    The result counts them.
    """
    calls, is_property = [], isinstance(mutant.original, property)
    original = mutant.original.fget if is_property else mutant.original

    @functools.wraps(original)
    def faulty(*arguments, **keywords):
        if not applies(sys._getframe(1), *arguments):
            return original(*arguments, **keywords)
        calls.append(mutant.words)
        return mutant.fault(original, *arguments, **keywords)

    for name, module in list(sys.modules.items()):
        if name.startswith("pallas_kernels") or module in (lax, plgpu):
            for attribute, value in list(vars(module).items()):
                if value is mutant.original:
                    monkeypatch.setattr(module, attribute, faulty)
                for member in (
                    [k for k, x in vars(value).items() if x is mutant.original] if isinstance(value, type) else []
                ):
                    monkeypatch.setattr(value, member, property(faulty) if is_property else faulty)
    return calls


def problem_of(mutant, name):
    return Problem(mutant.op, dtype=DTYPES[2], **{"rows": ROWS, "cols": AT_WORK[name][1], **mutant.form})


@pytest.mark.parametrize(
    "mutant, name",
    # One problem's after the other: `conformance.known` keeps one.
    sorted(
        ((mutant, name) for mutant in mutants.KERNEL_MUTANTS for name in mutant.kernels),
        key=lambda planted: str(problem_of(*planted)),
    ),
    ids=lambda x: getattr(x, "words", x),
)
def test_planted_fault_is_rejected(mutant, name, monkeypatch):
    kernel, problem = KERNELS[name], problem_of(mutant, name)
    conformance.known(problem)  # before the fault is planted, which XLA's result may have, too
    calls = plant(monkeypatch, mutant)
    config = mutant.config or AT_WORK[name][0] or kernel.configs(problem, H200)[0]
    run = lambda *operands: kernel.run(problem, config, *operands)
    jax.clear_caches()
    execute = functools.partial(functools.partial, interpret)
    try:
        with pytest.raises((AssertionError, IndexError, jax.errors.JaxRuntimeError)) as caught:
            conformance.check(run, problem, execute=execute)
    finally:
        jax.clear_caches()
    assert calls
    # A stall is a rejection only where the fault can cause one.
    assert mutant.may_deadlock or caught.type is not Deadlock
