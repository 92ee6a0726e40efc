"""Tables of cases that are smaller than products."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

_MOST, _DRAWN = 10_000, 1000  # of more cases than that, so many are drawn, and chosen among


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one of each of `values` in which every two of different ones meet; the same ones every time."""
    sizes, draw = [len(x) for x in values], random.Random(0)
    every = itertools.product(*map(range, sizes))
    drawn = ([draw.randrange(n) for n in sizes] for _ in range(_DRAWN))
    products = [frozenset(enumerate(case)) for case in (every if math.prod(sizes) <= _MOST else drawn)]
    pairs = {case: set(itertools.combinations(sorted(case), 2)) for case in products}
    missing = set().union(*pairs.values())
    cases = []
    while missing:
        best = max(products, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        cases.append(tuple(values[which][i] for which, i in sorted(best)))
    return cases
