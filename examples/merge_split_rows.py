"""A row that is never in one place: softmax statistics of its pieces, merged.

A million logits arrive in uneven pieces, as from a stream, a cache of keys or several machines. The state of a piece
is two numbers; `jaxsoftmax.merge` gives the row's, in whatever order the pieces come.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax import Stats, log_normalizer, log_softmax, logsumexp, merge

ROWS, COLS, PIECES = 4, 1_000_000, 7


def state(piece: jax.Array) -> Stats:
    """The (max, sum) of a piece: `exp(max) * sum` is its sum of exponentials, and any such pair will do."""
    normalizer = logsumexp(piece, axis=-1)
    return Stats(normalizer, jnp.ones_like(normalizer))


def main() -> None:
    rng = np.random.default_rng(0)
    row = (rng.normal(size=(ROWS, COLS)) * 10).astype(np.float32)
    pieces = np.split(row, np.sort(rng.choice(COLS, PIECES - 1, replace=False)), axis=1)
    random.Random(0).shuffle(pieces)

    whole = merge(*(state(jnp.asarray(piece)) for piece in pieces))
    normalizer = log_normalizer(whole)
    truth = logsumexp(jnp.asarray(row), axis=-1)
    print("piece lengths        ", [piece.shape[1] for piece in pieces])
    print("logsumexp, merged    ", normalizer)
    print("logsumexp, whole row ", truth)
    np.testing.assert_allclose(normalizer, truth, rtol=1e-6)

    # With the row's normalizer, a piece's probabilities need no other piece.
    here = jnp.asarray(row[:, :1000])
    np.testing.assert_allclose(here - normalizer[:, None], log_softmax(jnp.asarray(row))[:, :1000], rtol=1e-5)
    print("the first thousand log-probabilities agree with log_softmax of the whole row")


if __name__ == "__main__":
    main()
