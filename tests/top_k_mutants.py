"""The faults of `top_k_softmax` that its check must reject: a piece of the modules' text, and what it becomes."""

import dataclasses
import functools
from typing import Any


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault, the text in which it is planted, and a call that shows it; `counts` as a GPU does of few rows."""

    words: str
    code: str
    becomes: str
    n: int = 4096
    k: int = 8
    normalize: str = "all"
    scale: float = 1.0
    counts: bool = False

    @property
    def case(self) -> tuple[Any, ...]:
        """What the check is of."""
        return self.n, self.k, self.normalize, self.scale, self.counts


_counted = functools.partial(Mutant, counts=True)

MUTANTS = (
    Mutant("the chosen chunks stay in the order of their maxima", "jnp.sort(largest(maxima, k)[1], -1)",
           "largest(maxima, k)[1]"),
    Mutant("of equal logits the last comes first", "values, indices = _lax_top_k(comparable(x, scale), k)",
           "values, indices = _lax_top_k(comparable(x[..., ::-1], scale), k); indices = x.shape[-1] - 1 - indices",
           n=300),
    Mutant("of equal candidates the last comes first", "* c + at % c", "* c + c - 1 - at % c"),
    Mutant("one chunk too few", "jnp.sort(largest(maxima, k)[1], -1)",
           "jnp.sort(largest(maxima, k)[1].at[..., -1].set(0), -1)"),
    Mutant("the row's state lacks a chunk", "merge_over(stats, -1)",
           "merge_over(Stats(*(part[..., :-1] for part in stats)), -1)"),
    Mutant("a row is normalised by its first chunk", "merge_over(stats, -1)",
           "Stats(*(part[..., 0] for part in stats))"),
    Mutant("chunks are filled up with zeros", "constant_values=-jnp.inf", "constant_values=0.0", n=5003),
    Mutant("the last chunk is left out", "n = x.shape\n    chunks = -(-n // c)",
           "n = x.shape\n    chunks = n // c; x = x[..., :chunks * c]", n=5003),
    Mutant("zeros of either sign are ordered", "return jnp.where(x == 0, jnp.zeros_like(x), x)", "return x"),
    Mutant("candidates are compared without the scale", "k * c), scale), k)", "k * c)), k)", scale=0.5),
    Mutant("probabilities of all are among the selected", 'normalizes=normalize == "all"', "normalizes=False"),
    Mutant("probabilities among the selected are of all", 'normalizes=normalize == "all"', "normalizes=True",
           normalize="top_k"),
    Mutant("a NaN that is not selected is not seen", " * jnp.where(jnp.isnan(total), total, 1)[..., None]", "",
           normalize="top_k"),
    Mutant("the scale is left out", "scale=factor", "scale=1.0", scale=0.5),
    Mutant("indices are those within a chunk", "* c + at % c", "* 0 + at % c"),
    _counted("counted: of equal ones the last comes first", "there < here", "there > here"),
    _counted("counted: equal ones are of one rank", " | ((other == mine) & (there < here))", ""),
    _counted("counted: each is before itself", "there < here", "there <= here"),
    _counted("counted: the smallest come first", "other > mine", "other < mine"),
    _counted("counted: ranks begin at 1", "ranks[..., None, :] ==", "ranks[..., None, :] + 1 =="),
    _counted("counted: places are those within a chunk", "(chosen[..., None] * c + jnp.arange",
             "(chosen[..., None] * 0 + jnp.arange"),
    _counted("counted: places have 16 bits", "y = reference.softmax(reference.below(values",
             "places &= 0xffff; y = reference.softmax(reference.below(values", n=70000, k=2),
    _counted("counted: candidates lack the scale", "reference.logits(candidates, scale)",
             "reference.logits(candidates, 1.0)", scale=0.5),
    _counted("counted: the row's state lacks a chunk", "(last, -jnp.inf, 0), (at, *parts))",
             "(last, -jnp.inf, 0), (at, *(part.at[..., -1].set(-jnp.inf) for part in parts)))"),
    _counted("counted: sums are added as they are",
             "return [*_smaller(a[:1], b[:1]), *combine(Stats(*a[1:]), Stats(*b[1:]))]",
             "return [*_smaller(a[:1], b[:1]), jnp.maximum(a[1], b[1]), a[2] + b[2]]"),
    _counted("counted, k = 1: of equal ones the last is found", "& (a[1] < b[1])", "& (a[1] > b[1])", k=1),
    _counted("counted, k = 1: the smallest is found", "(a[0] > b[0])", "(a[0] < b[0])", k=1),
    _counted("counted, k = 1: the first chunk is searched", "return [chosen[..., None], *row]",
             "return [0 * chosen[..., None], *row]", k=1),
)  # fmt: skip
