"""Masks `[B|1, N|1, T|1, S|1]`: dense, of few blocks, and such that rows, or a head, see nothing."""

from collections.abc import Callable

import numpy as np

Shape = tuple[int, ...]


def scattered(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Four of five, anywhere."""
    return rng.random(shape) < 0.8


def causal(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Keys up to the query's own, and some more in later sequences and heads."""
    b, n, i, j = np.indices(shape, sparse=True)
    return j <= i + 70 * b + 40 * n


def documents(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Documents of 50 tokens, some without any key, with holes; in the last of several heads nothing."""
    _, n, i, j = np.indices(shape, sparse=True)
    held = (i // 50 == j // 50) & (i // 50 % 3 != 1) & (rng.random(shape) < 0.9)
    return held & ((n < shape[1] - 1) | (shape[1] == 1))


def padding(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Some first keys of each sequence."""
    return np.indices(shape)[3] < rng.integers(shape[3] // 4, shape[3] + 1, (shape[0], 1, 1, 1))


def everything(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """All keys."""
    return np.ones(shape, bool)


def nothing(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """No keys."""
    return np.zeros(shape, bool)


PATTERNS: dict[str, Callable[[np.random.Generator, Shape], np.ndarray]] = {
    f.__name__: f for f in (scattered, causal, documents, padding, everything, nothing)
}
