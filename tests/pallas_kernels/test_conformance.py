"""Every rung of the ladder gives the right numbers: in the interpreter at small sizes, on a GPU at real ones."""

import functools

import cases
import conformance
import poisoned
import pytest
from cases import DTYPES, Op, Problem
from interpreter import interpret

from pallas_kernels.softmax import LADDER

ROWS = len(cases.ROW_KINDS) + 1
SMALL = (1, 125, 128, 1001)
LARGER = (5000, 20001, 40000, 70001, 140000)
REAL = (1, 2, 125, 127, 128, 256, 1000, 1001, 1024, 4096, 8192, 32000, 50257, 65537, 128256, 262144, 1000003)


def _rows_on_gpu(cols: int) -> int:
    """Enough rows to fill the chip more than once where that is cheap; odd, so that the last tile is never full."""
    return max(ROWS, min(70001, 2**20 // cols) | 1)


def _interpreted():
    """Each rung, operation and dtype at one length; one dtype of the three also at the others, and in other forms."""
    for rung in LADDER.values():
        small = SMALL[:-1] if rung.reads > 2 else SMALL
        for i, op in enumerate(Op):
            for dtype in DTYPES:
                cols = cases.supported_cols(rung, op, dtype, ROWS, small)
                cols = cols or cases.supported_cols(rung, op, dtype, ROWS, LARGER)[:1]
                full = dtype == DTYPES[i % 3]
                yield from (cases.default(rung, Problem(op, ROWS, n, dtype)) for n in (cols if full else cols[-1:]))
                if cols and full:
                    yield from cases.every_config(rung, Problem(op, ROWS, cols[-1], dtype))[1:]
                    yield from (cases.default(rung, p) for p in cases.variations(rung, op, dtype, ROWS, cols[-1]))


def _on_gpu():
    for rung in LADDER.values():
        for op in Op:
            for dtype in DTYPES:
                supported = [n for n in REAL if cases.takes(rung, Problem(op, _rows_on_gpu(n), n, dtype))]
                for cols in supported:
                    yield from cases.every_config(rung, Problem(op, _rows_on_gpu(cols), cols, dtype))
                for cols in supported[len(supported) // 2 :: 4]:
                    rows = _rows_on_gpu(cols)
                    yield from (cases.default(rung, p) for p in cases.variations(rung, op, dtype, rows, cols))


def _slack(case: cases.Case) -> float:
    """A thread that adds up a row by itself errs more than a tree does: by about the root of the additions."""
    return 1 + case.problem.cols**0.5 / 4 if case.rung.name == "naive" else 1


@pytest.mark.parametrize("case", list(_interpreted()), ids=str)
def test_interpreted(case):
    execute = lambda run: functools.partial(interpret, run)
    conformance.check(case.run, case.problem, execute=execute, slack=_slack(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(_on_gpu()), ids=str)
def test_on_gpu(case):
    conformance.check(case.run, case.problem, execute=poisoned.execute, slack=_slack(case))
