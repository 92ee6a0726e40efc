"""The faults of `top_k_softmax` that its check must reject: functions that run in the place of its module's."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.monoid import Stats


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault, and a call that shows it; `counts` as a GPU does of few rows.

    `fault(function, *arguments)` runs in the place of the function that the module calls `original`.
    """

    words: str
    original: str
    fault: Callable[..., Any]
    n: int = 4096
    k: int = 8
    normalize: str = "all"
    scale: float = 1.0
    counts: bool = False

    @property
    def case(self) -> tuple[Any, ...]:
        """What the check is of."""
        return self.n, self.k, self.normalize, self.scale, self.counts

    def planted_in(self, module: Any) -> tuple[str, Any]:
        """A name of the module, and what it is with the fault."""
        name, _, member = self.original.partition(".")
        original = getattr(module, name)
        if not member:
            return name, functools.partial(self.fault, original)
        faulty = functools.partial(self.fault, getattr(original, member))
        return name, types.SimpleNamespace(**vars(original) | {member: faulty})


def _last_comes_first(top_k, x, k):
    values, indices = top_k(x[..., ::-1], k)
    return values, x.shape[-1] - 1 - indices


def _with_indices(of):
    """The selection with indices that are `of(indices, columns of a chunk)`."""

    def select(function, chunks, *arguments, **keywords):
        values, indices, *rest = function(chunks, *arguments, **keywords)
        return [values, of(indices, chunks.shape[-1]), *rest]

    return select


def _without_last_chunk(stats):
    return Stats(stats.max.at[..., -1].set(-jnp.inf), stats.sum.at[..., -1].set(0))


def _without_place(first_chunk, stats):
    chosen, *row = first_chunk(stats)
    return [0 * chosen, *row]


def _negated(part):
    """The earlier one of two whose values, part 0, or places, part 1, are negated."""

    def negate(parts):
        return [-x if i == part else x for i, x in enumerate(parts)]

    return lambda earlier, a, b: negate(earlier(negate(a), negate(b)))


_counted = functools.partial(Mutant, counts=True)

MUTANTS = (
    Mutant("the chosen chunks stay in the order of their maxima", "jnp.sort", lambda sort, x, axis, **_: x),
    Mutant("of equal logits the last comes first", "_lax_top_k", _last_comes_first, n=300),
    Mutant("of equal candidates the last comes first", "largest_in",
           _with_indices(lambda i, c: i // c * c + c - 1 - i % c)),
    Mutant("one chunk too few", "jnp.sort", lambda sort, x, axis, **_: sort(x.at[..., -1].set(0), axis)),
    Mutant("the row's state lacks a chunk", "merge_over",
           lambda merge, stats, axis, **k: merge(_without_last_chunk(stats), axis, **k)),
    Mutant("a row is normalised by its first chunk", "merge_over",
           lambda merge, stats, axis, **_: Stats(*(part[..., 0] for part in stats))),
    Mutant("chunks are filled up with zeros", "jnp.pad", lambda pad, x, widths, **_: pad(x, widths), n=5003),
    Mutant("the last chunk is left out", "chunked", lambda chunked, x, c: chunked(x[..., : x.shape[-1] // c * c], c),
           n=5003),
    Mutant("zeros of either sign are ordered", "comparable", lambda comparable, x, scale=1.0: x),
    Mutant("candidates are compared without the scale", "largest_in",
           lambda largest_in, chunks, maxima, k, *_: largest_in(chunks, maxima, k), scale=0.5),
    Mutant("probabilities of all are among the selected", "top_k_softmax",
           lambda function, *a, **k: function(*a, **k | {"normalize": "top_k"})),
    Mutant("probabilities among the selected are of all", "top_k_softmax",
           lambda function, *a, **k: function(*a, **k | {"normalize": "all"}), normalize="top_k"),
    Mutant("a NaN that is not selected is not seen", "jnp.isnan", lambda isnan, x: isnan(x) & False, normalize="top_k"),
    Mutant("the scale is left out", "scaled", lambda scaled, x, factor: (scaled(x, factor)[0], 1.0), scale=0.5),
    Mutant("indices are those within a chunk", "largest_in", _with_indices(lambda i, c: i % c)),
    _counted("counted: of equal ones the last comes first", "_is_of_rank",
             lambda is_of_rank, keys, places, k: is_of_rank(keys, -places, k)),
    _counted("counted: equal ones are of one rank", "_is_of_rank",
             lambda is_of_rank, keys, places, k: is_of_rank(keys, 0 * places, k)),
    _counted("counted: the smallest come first", "_is_of_rank",
             lambda is_of_rank, keys, places, k: is_of_rank(-keys, places, k)),
    _counted("counted: ranks begin at 1", "_is_of_rank",
             lambda is_of_rank, *a: jnp.roll(is_of_rank(*a), 1, -2).at[..., 0, :].set(False)),
    _counted("counted: places are those within a chunk", "select_by_rank", _with_indices(lambda i, c: i % c)),
    _counted("counted: places have 16 bits", "select_by_rank", _with_indices(lambda i, c: i & 0xFFFF), n=70000, k=2),
    _counted("counted: candidates lack the scale", "reference.logits", lambda logits, x, scale: logits(x, 1.0),
             scale=0.5),
    _counted("counted: the row's state lacks a chunk", "_first_chunks",
             lambda first, stats, k: [first(stats, k)[0], *first(_without_last_chunk(stats), k)[1:]]),
    _counted("counted: sums are added as they are", "combine",
             lambda combine, a, b: Stats(jnp.maximum(a.max, b.max), a.sum + b.sum)),
    _counted("counted, k = 1: of equal ones the last is found", "_earlier", _negated(1), k=1),
    _counted("counted, k = 1: the smallest is found", "_earlier", _negated(0), k=1),
    _counted("counted, k = 1: the first chunk is searched", "_first_chunk", _without_place, k=1),
)  # fmt: skip
