"""Segment ids of queries and keys: packed, in no order, and such that some see nothing."""

from collections.abc import Callable

import numpy as np

Ids = tuple[np.ndarray, np.ndarray]
EXTREMES = -(2**31), 2**31 - 1, -5, 0, 7, 39, 71  # of the last three the remainders modulo 32 are the same


def few(rng: np.random.Generator, batch: int, queries: int, keys: int) -> Ids:
    """Three sorted ids. After the batch's first element no query has the least, and half have one of their own."""
    of_queries, of_keys = (np.sort(rng.integers(0, 3, (batch, n))).astype(np.int32) for n in (queries, keys))
    of_queries[1:] = np.maximum(of_queries[1:], 1)
    of_queries[1:, (queries + 1) // 2 :] = 7
    return of_queries, of_keys


def packed(rng: np.random.Generator, batch: int, queries: int, keys: int) -> Ids:
    """Documents of 1 to 127 tokens, numbered from 1 on; at the end padding, whose id is 0."""
    length = max(queries, keys)
    ids = np.stack([np.repeat(np.arange(length) + 1, rng.integers(1, 128, length))[:length] for _ in range(batch)])
    ids[:, length * 9 // 10 :] = 0
    return ids[:, :queries].astype(np.int32), ids[:, :keys].astype(np.int32)


def many(rng: np.random.Generator, batch: int, queries: int, keys: int) -> Ids:
    """Documents of 1 to 19 tokens, without padding."""
    length = max(queries, keys)
    ids = np.stack([np.repeat(np.arange(length), rng.integers(1, 20, length))[:length] for _ in range(batch)])
    return ids[:, :queries].astype(np.int32), ids[:, :keys].astype(np.int32)


def unsorted(rng: np.random.Generator, batch: int, queries: int, keys: int) -> Ids:
    """Runs of ids in no order, from one end of the integers to the other."""
    made = []
    for n in (queries, keys):
        runs = rng.choice(EXTREMES, (batch, -(-n // 50)))
        made.append(np.repeat(runs, 50, axis=1)[:, :n].astype(np.int32))
    return made[0], made[1]


def one(rng: np.random.Generator, batch: int, queries: int, keys: int) -> Ids:
    """All alike."""
    return np.full((batch, queries), 3, np.int32), np.full((batch, keys), 3, np.int32)


PATTERNS: dict[str, Callable[[np.random.Generator, int, int, int], Ids]] = {
    f.__name__: f for f in (few, packed, many, unsorted, one)
}
