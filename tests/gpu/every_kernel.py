"""Runs every kernel and config of rows once, at sizes that a sanitizer gets through, and checks the numbers."""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(p) for p in (HERE.parents[1], HERE.parent, HERE.parent / "pallas_kernels", HERE)]

import cases  # noqa: E402
import conformance  # noqa: E402
import steps  # noqa: E402
import test_linear_cross_entropy as linear  # noqa: E402
from cases import DTYPES, Op, Problem  # noqa: E402

from pallas_kernels.linear_cross_entropy import forward  # noqa: E402
from pallas_kernels.softmax.dispatch import KERNELS  # noqa: E402
from pallas_kernels.softmax.staged import StagedConfig  # noqa: E402

ROWS = len(cases.ROW_KINDS) + 1
COLS = (125, 1000, 1001, 5000, 20001, 70001, 140000)
# Slices that are held in registers in part and, of one operand, interleaved as well.
REGISTER_CHUNKS = StagedConfig(ctas=2, warpgroups=2, registers=1, stages=1, rows=1, register_chunks=2)


def selected() -> list[tuple[str, Callable[[], object]]]:
    """Each kernel at the two smallest sizes it takes, with every config, and the variations of the smallest."""
    chosen = []
    for kernel in KERNELS.values():
        for i, op in enumerate(Op):
            dtype = DTYPES[i % len(DTYPES)]
            cols = [n for n in COLS if cases.takes(kernel, Problem(op, ROWS, n, dtype))][:2]
            chosen += [case for n in cols for case in cases.every_config(kernel, Problem(op, ROWS, n, dtype))]
            chosen += [cases.default(kernel, p) for n in cols[:1] for p in cases.variations(kernel, op, dtype, ROWS, n)]
            if kernel.name == "cluster" and op.gives_rows and not op.has_labels:
                register_chunks = dataclasses.replace(REGISTER_CHUNKS, interleaved=not op.is_linear)
                chosen.append(cases.Case(kernel, Problem(op, ROWS, 20001, dtype), register_chunks))
    found = [(str(case), functools.partial(conformance.check, case.run, case.problem)) for case in chosen]
    for name, problem in linear.CASES.items():
        run = functools.partial(forward.run, problem, forward.Config())
        found.append((f"linear: {name}", functools.partial(linear.compare, problem, run)))
    return [*found, ("linear: gradient in place", functools.partial(linear.compare_gradient, True, linear.in_place))]


if __name__ == "__main__":
    steps.main(selected(), __doc__)
