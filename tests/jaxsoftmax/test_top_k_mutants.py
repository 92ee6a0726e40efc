"""The check of `top_k_softmax` passes what is right and rejects every planted fault: a test of the tests.

A fault is a piece of the modules' text and what it becomes.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxsoftmax import _selection, _top_k
from tests import top_k_oracle


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault, the text in which it is planted, and a call that shows it."""

    words: str
    code: str
    becomes: str
    n: int = 4096
    k: int = 8
    normalize: str = "all"
    scale: float = 1.0


MUTANTS = (
    Mutant("the chosen chunks stay in the order of their maxima", "jnp.sort(largest(maxima, k)[1], -1)",
           "largest(maxima, k)[1]"),
    Mutant("of equal logits the last comes first", "values, indices = jax.lax.top_k(comparable(x, scale), k)",
           "values, indices = jax.lax.top_k(comparable(x[..., ::-1], scale), k); indices = x.shape[-1] - 1 - indices",
           n=300),
    Mutant("of equal candidates the last comes first", "* c + at % c", "* c + c - 1 - at % c"),
    Mutant("one chunk too few", "jnp.sort(largest(maxima, k)[1], -1)",
           "jnp.sort(largest(maxima, k)[1].at[..., -1].set(0), -1)"),
    Mutant("the row's state lacks a chunk", "*merge_over(stats, -1)",
           "*merge_over(Stats(*(part[..., :-1] for part in stats)), -1)"),
    Mutant("a row is normalised by its first chunk", "*merge_over(stats, -1)", "*(part[..., 0] for part in stats)"),
    Mutant("chunks are filled up with zeros", "constant_values=-jnp.inf", "constant_values=0.0", n=5003),
    Mutant("the last chunk is left out", "n = x.shape\n    chunks = -(-n // c)",
           "n = x.shape\n    chunks = n // c; x = x[..., :chunks * c]", n=5003),
    Mutant("zeros of either sign are ordered", "return jnp.where(x == 0, jnp.zeros_like(x), x)", "return x"),
    Mutant("candidates are compared without the scale", "k * c), scale), k)", "k * c)), k)", scale=0.5),
    Mutant("probabilities of all are among the selected", "known=row if whole else None", "known=None"),
    Mutant("probabilities among the selected are of all", "known=row if whole else None", "known=row",
           normalize="top_k"),
    Mutant("a NaN that is not selected is not seen", "y *= jnp.where(jnp.isnan(row.sum), row.sum, 1)[..., None]",
           "pass", normalize="top_k"),
    Mutant("the scale is left out", "whole=whole, scale=factor", "whole=whole, scale=1.0", scale=0.5),
    Mutant("indices are those within a chunk", "* c + at % c", "* 0 + at % c"),
)  # fmt: skip


def planted(mutant: Mutant | None) -> Callable[..., Any]:
    """`top_k_softmax`, of modules with the fault."""
    texts = {module: inspect.getsource(module) for module in (_selection, _top_k)}
    if mutant:
        assert sum(text.count(mutant.code) for text in texts.values()) == 1, f"plant `{mutant.code}` anew"
        texts = {module: text.replace(mutant.code, mutant.becomes) for module, text in texts.items()}
    copies = {}
    for module, text in texts.items():
        copies[module] = types.ModuleType(module.__name__)
        # A dataclass and a cache look their module up by name: the original serves.
        exec(compile(text, str(module.__file__), "exec"), copies[module].__dict__)
    copies[_top_k].__dict__["Selection"] = copies[_selection].__dict__["Selection"]
    return copies[_top_k].__dict__["top_k_softmax"]


def check(function: Callable[..., Any], mutant: Mutant) -> None:
    run = jax.jit(function, static_argnums=1, static_argnames=("normalize", "scale"))
    x = top_k_oracle.rows(mutant.n, np.float32)
    top_k_oracle.check(run, x, mutant.k, normalize=mutant.normalize, scale=mutant.scale)


def test_without_a_fault_the_check_passes() -> None:
    function = planted(None)
    for mutant in {(m.n, m.k, m.normalize, m.scale): m for m in MUTANTS}.values():
        check(function, mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.words)
def test_planted_fault_is_rejected(mutant: Mutant) -> None:
    with pytest.raises(AssertionError, match=r"indices|ulp"):
        check(planted(mutant), mutant)
