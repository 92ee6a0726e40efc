"""The check of `top_k_softmax` passes what is right and rejects every planted fault: a test of the tests."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.interpreters import mlir

from jaxsoftmax import _top_k
from tests import top_k_oracle
from tests.top_k_mutants import MUTANTS, Mutant


def planted(mutant: Mutant | None, counts: bool) -> Callable[..., Any]:
    """`top_k_softmax`, of a module with the fault."""
    copy: Any = types.ModuleType(_top_k.__name__)
    exec(compile(inspect.getsource(_top_k), str(_top_k.__file__), "exec"), copy.__dict__)
    if mutant:
        setattr(copy, *mutant.planted_in(copy))
    mlir.register_lowering(copy.TOP_K, functools.partial(copy.lower, may_count=counts), platform="cpu")
    return copy.top_k_softmax


def check(function: Callable[..., Any], mutant: Mutant) -> None:
    """Of 16 bits where it counts: a CPU merges the state chunk after chunk."""
    run = jax.jit(function, static_argnums=1, static_argnames=("normalize", "scale"))
    x = top_k_oracle.rows(mutant.n, ml_dtypes.bfloat16 if mutant.counts else np.float32)
    for rows in np.split(x, len(x) // 4) if mutant.counts else [x]:
        top_k_oracle.check(run, rows, mutant.k, normalize=mutant.normalize, scale=mutant.scale)


def test_without_a_fault_the_check_passes() -> None:
    functions = {counts: planted(None, counts) for counts in (False, True)}
    for mutant in {m.case: m for m in MUTANTS}.values():
        check(functions[mutant.counts], mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.words)
def test_planted_fault_is_rejected(mutant: Mutant) -> None:
    with pytest.raises(AssertionError, match=r"indices|ulp"):
        check(planted(mutant, mutant.counts), mutant)
