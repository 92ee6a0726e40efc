"""Runs every rung and config once, at sizes that a sanitizer gets through, and checks the numbers.

`--part=I/N` is every N-th step from the I-th on, I from 1, for N processes beside each other.
"""

import argparse
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


def part_of(chosen: list, part: str) -> list:
    """Every N-th case, dealt out so that the parts take about as long."""
    i, n = map(int, part.split("/"))
    if not 1 <= i <= n:
        raise ValueError(f"no part {part}")
    return chosen[i - 1 :: n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1")
    chosen = part_of(selected(), parser.parse_args().part)
    print(f"steps {len(chosen)}", flush=True)
    for i, case in enumerate(chosen):
        print(f"{i + 1}/{len(chosen)} {case}", flush=True)
        conformance.check(case.run, case.problem)
        print("done", flush=True)


if __name__ == "__main__":
    main()
