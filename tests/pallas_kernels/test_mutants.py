"""The conformance suite passes what is right and rejects every planted fault: a test of the tests."""

import itertools

import cases
import conformance
import pytest
import wrong
from mutants import DOCUMENT, FUNCTION_MUTANTS, document

from pallas_kernels.softmax.problem import Op, Problem
from tests import mutation

OPS = (Op.SOFTMAX, Op.LOG_SOFTMAX, Op.STATS, Op.SOFTMAX_TANGENT)
ROWS = 2 * len(cases.ROW_KINDS) + 1


def problems(op):
    yield from (Problem(op, ROWS, cols, dtype) for cols, dtype in zip((1, 125, 1024), cases.DTYPES, strict=True))
    yield Problem(op, ROWS, 125, cases.DTYPES[2], scale=0.5)
    if not op.is_linear:
        yield Problem(op, ROWS, 125, cases.DTYPES[0], where="full")
        yield Problem(op, ROWS, 125, cases.DTYPES[1], where="shared", scale=-1.0)


@pytest.mark.parametrize("op", OPS)
def test_the_unharmed_solver_passes(op):
    for problem in problems(op):
        conformance.check(wrong.solver(problem), problem)


@pytest.mark.parametrize(
    "mutant, dtype",
    list(zip(FUNCTION_MUTANTS, itertools.cycle(cases.DTYPES), strict=False)),
    ids=lambda x: getattr(x, "words", str(x)),
)
def test_planted_fault_is_rejected(mutant, dtype):
    problem = Problem(mutant.op, ROWS, mutant.cols, dtype, where=mutant.where, scale=mutant.scale)
    with pytest.raises(AssertionError, match="ulp"):
        conformance.check(wrong.solver(problem, **mutant.knobs), problem)


def test_the_document_lists_every_fault():
    assert DOCUMENT.read_text() == document(), "run tests/pallas_kernels/mutants.py"


def test_every_mutant_that_survived_has_a_reason():
    found = list(mutation.survivors())
    assert not [(module, change) for module, change, verdict, _ in found if not verdict]
    found += [each for each in mutation.survivors(unseen=True) if each[2]]
    verdicts = {(module, x) for module, entry in mutation.CONFIG["module"].items() for x in _named(entry)}
    assert verdicts == {(module, change) for module, change, *_ in found}, "a reason for what is killed"


def _named(entry):
    return [*entry.get("equivalent", {}), *entry.get("accepted", {})]


def test_of_the_sampled_mutants_few_survive():
    for unseen, least in ((False, 0.97), (True, 0.9)):
        found = mutation.scores(unseen=unseen)
        assert set(found) == {*mutation.CONFIG["module"], "all"}
        assert found["all"].share >= least
