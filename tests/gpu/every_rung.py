"""Runs every rung and config once, at sizes that a sanitizer gets through, and checks the numbers."""

import pathlib
import sys

TESTS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(p) for p in (TESTS.parent, TESTS, TESTS / "pallas_kernels")]

import cases  # noqa: E402
import conformance  # noqa: E402
from cases import DTYPES, Op, Problem  # noqa: E402

from pallas_kernels.softmax import LADDER  # noqa: E402

ROWS = len(cases.ROW_KINDS) + 1
COLS = (125, 1000, 1001, 5000, 20001, 70001, 140000)


def selected() -> list[cases.Case]:
    """Each rung at the two smallest sizes it takes, with every config, and the variations of the smallest."""
    chosen = []
    for rung in LADDER.values():
        for i, op in enumerate(Op):
            dtype = DTYPES[i % len(DTYPES)]
            cols = cases.supported_cols(rung, op, dtype, ROWS, COLS)[:2]
            chosen += [case for n in cols for case in cases.every_config(rung, Problem(op, ROWS, n, dtype))]
            chosen += [cases.default(rung, p) for n in cols[:1] for p in cases.variations(rung, op, dtype, ROWS, n)]
    return chosen


def main() -> None:
    chosen = selected()
    for i, case in enumerate(chosen):
        print(f"{i + 1}/{len(chosen)} {case}", flush=True)
        conformance.check(case.run, case.problem)


if __name__ == "__main__":
    main()
