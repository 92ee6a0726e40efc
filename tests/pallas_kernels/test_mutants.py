"""The checks of kernels pass what is right and reject every planted fault: a test of the tests."""

import attention_mutants
import cases
import conformance
import mutants
import pytest
import wrong

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


@pytest.mark.slow
@pytest.mark.parametrize("case", attention_mutants.cases(), ids=lambda c: "-".join(map(str, c)))
def test_without_a_fault_the_check_of_attention_passes(case):
    attention_mutants.check_kernel(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, rejected_by",
    dict.fromkeys(
        (f.case, f.rejected_by) for f in attention_mutants.FAULTS if f.rejected_by in attention_mutants.BY_TABLES
    ),
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_without_a_fault_the_tables_pass(case, rejected_by):
    attention_mutants.check_tables(case, rejected_by)


# One case's after the other: the checks keep the last results of XLA and NumPy.
@pytest.mark.slow
@pytest.mark.parametrize(
    "table, fault",
    [
        pytest.param(table, fault, id=f"{table.title.partition(',')[0]}: {fault.words}")
        for table in mutants.KERNELS
        for fault in sorted(table.faults, key=lambda fault: str(fault.case))
    ],
)
def test_planted_fault_is_rejected(table, fault):
    table.rejects(fault)


def test_the_document_lists_every_fault():
    assert mutants.DOCUMENT.read_text() == mutants.document(), "run tests/pallas_kernels/mutants.py"


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
