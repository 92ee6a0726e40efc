"""The checks of top-k, of losses and of sharded columns pass what is right and reject every planted fault."""

from typing import Any

import pytest

from tests.faults import Fault, Table
from tests.jaxsoftmax import mutants

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
CHECKS = {fault.case for table in mutants.TABLES[1:3] for fault in table.faults if fault.case.__name__[:5] == "check"}


@pytest.mark.parametrize("check", sorted(CHECKS, key=lambda check: check.__name__))
def test_without_a_fault_the_check_passes(check: Any) -> None:
    if check is not mutants.check_16_bits:  # a test of its own
        check()


def test_without_a_fault_the_check_of_top_k_passes() -> None:
    for case in {fault.case for fault in mutants.TOP_K_FAULTS}:
        mutants.check_case(case)


@pytest.mark.usefixtures("stand_ins")
def test_without_a_fault_the_check_of_sequences_passes() -> None:
    for case in {fault.case for fault in mutants.SEQUENCE_FAULTS}:
        mutants.check_sequence_case(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "table, fault",
    [
        pytest.param(table, fault, id=f"{table.title.partition(',')[0]}: {fault.words}")
        for table in mutants.TABLES
        for fault in table.faults
    ],
)
def test_planted_fault_is_rejected(request: pytest.FixtureRequest, table: Table, fault: Fault) -> None:
    if table in mutants.ON_STAND_INS:
        request.getfixturevalue("stand_ins")
    table.rejects(fault)
