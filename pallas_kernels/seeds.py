"""The algorithms the ladder grew from, one row at a time in plain NumPy: the loops are the memory accesses.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867; their count is of
accesses to memory per element of the row. `merge` is `pallas_kernels.monoid.combine` on scalars.
"""

import numpy as np

State = tuple[np.floating, np.floating]  # the maximum so far, and the sum of exp(x - maximum)

EMPTY: State = (np.float32(-np.inf), np.float32(0.0))


def naive_softmax(x: np.ndarray) -> np.ndarray:
    """Algorithm 1: sum, then scale. Three accesses (two reads, one write); overflows for logits above 88."""
    total = x.dtype.type(0)
    for value in x:  # 1 read
        total += np.exp(value)
    y = np.empty_like(x)
    for i, value in enumerate(x):  # 1 read, 1 write
        y[i] = np.exp(value) / total
    return y


def safe_softmax(x: np.ndarray) -> np.ndarray:
    """Algorithm 2: maximum, sum, then scale. Four accesses (three reads, one write)."""
    m = x.dtype.type(-np.inf)
    for value in x:  # 1 read
        m = np.maximum(m, value)
    total = x.dtype.type(0)
    for value in x:  # 1 read
        total += np.exp(value - m)
    y = np.empty_like(x)
    for i, value in enumerate(x):  # 1 read, 1 write
        y[i] = np.exp(value - m) / total
    return y


def merge(a: State, b: State) -> State:
    """The state of two pieces of a row from the state of each (the paper's equation 4)."""
    m = np.maximum(a[0], b[0])
    if m == -np.inf:  # absent from the paper, where a row that begins with -inf is NaN
        return m, a[1] + b[1]
    return m, a[1] * np.exp(a[0] - m) + b[1] * np.exp(b[0] - m)


def online_softmax(x: np.ndarray) -> np.ndarray:
    """Algorithm 3: maximum and sum in one pass. Three accesses (two reads, one write), and it never overflows."""
    state = EMPTY
    for value in x:  # 1 read
        state = merge(state, (value, x.dtype.type(1)))
    return _scale(x, state)


def blocked_online_softmax(x: np.ndarray, block: int) -> np.ndarray:
    """Section 3.1: a state for each block, in any order, then merged. The same three accesses, now parallel."""
    state = EMPTY
    for start in range(0, len(x), block):
        tile = x[start : start + block]  # 1 read; what follows is on chip
        m = tile.max()
        weights = np.exp(tile - m) if m > -np.inf else np.zeros_like(tile)
        state = merge(state, (m, weights.sum()))
    return _scale(x, state)


def _scale(x: np.ndarray, state: State) -> np.ndarray:
    m, total = state
    y = np.empty_like(x)
    for i, value in enumerate(x):  # 1 read, 1 write
        y[i] = np.exp(value - m) / total
    return y
