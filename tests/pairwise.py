"""Tables of cases that are smaller than products."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one of each of `values` in which every two of different ones meet; the same ones every time."""
    products = [frozenset(enumerate(case)) for case in itertools.product(*(range(len(x)) for x in values))]
    pairs = {case: set(itertools.combinations(sorted(case), 2)) for case in products}
    missing = set().union(*pairs.values())
    cases = []
    while missing:
        best = max(products, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        cases.append(tuple(values[which][i] for which, i in sorted(best)))
    return cases
