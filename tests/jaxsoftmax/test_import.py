"""What the package shows of itself."""

import doctest
import inspect
import pickle
import pydoc
import subprocess
import sys
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax


def test_import_leaves_pallas_for_the_lowering_and_libraries_for_their_users() -> None:
    program = "import sys, jaxsoftmax; print(sorted({'jax.experimental.pallas', 'optax', 'flax'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["[]"]


def test_what_is_public_pickles_and_has_docs() -> None:
    assert set(jaxsoftmax.__all__) == {name for name in vars(jaxsoftmax) if not name.startswith("_")}
    assert jaxsoftmax.__version__
    for public in [getattr(jaxsoftmax, name) for name in jaxsoftmax.__all__]:
        assert pickle.loads(pickle.dumps(public)) is public
        assert public.__doc__
    for value in (jaxsoftmax.explain(np.zeros((2, 3), np.float32)), jaxsoftmax.Stats(np.float32(1), np.float32(2))):
        assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("name", [name for name in jaxsoftmax.__all__ if name[0].islower()])
def test_examples_in_docstrings(name: str) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(jaxsoftmax, name), name)
    assert example.examples
    assert not doctest.DocTestRunner().run(example).failed


@pytest.mark.parametrize(
    "name, theirs, renamed",
    [
        ("softmax", jax.nn.softmax, {}),
        ("log_softmax", jax.nn.log_softmax, {}),
        ("logsumexp", jax.scipy.special.logsumexp, {}),
        ("top_k_softmax", jax.lax.top_k, {"operand": "logits"}),
        ("flash_attention", jax.nn.dot_product_attention, {}),
    ],
)
def test_signatures_are_those_of_jax(name: str, theirs: Callable[..., Any], renamed: dict[str, str]) -> None:
    ours, wanted = (inspect.signature(f).parameters for f in (getattr(jaxsoftmax, name), theirs))
    for parameter, want in wanted.items():
        mine = ours[renamed.get(parameter, parameter)]
        assert (mine.default, mine.kind) == (want.default, want.kind)
    positional = [renamed.get(n, n) for n, p in wanted.items() if p.kind is not p.KEYWORD_ONLY]
    assert [n for n, p in ours.items() if p.kind is not p.KEYWORD_ONLY][: len(positional)] == positional


ROWS = [
    name
    for name in jaxsoftmax.__all__
    if not name.startswith("explain_") and name.endswith(("explain", "softmax", "sumexp", "labels", "entropy"))
]


@pytest.mark.parametrize("name", ROWS)
def test_help_is_readable(name: str) -> None:
    function = getattr(jaxsoftmax, name)
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext).splitlines()[2]
    assert shown.startswith(tuple(f"{name}({first}: ArrayLike" for first in ("x", "a", "logits", "hidden")))
    assert "implementation: Optional[Literal['xla', 'mosaic_gpu']] = None" in shown
    assert len(shown) < 720, "a union of types is written out"
    assert typing.get_type_hints(function)["implementation"] == typing.Literal["xla", "mosaic_gpu"] | None


def test_functions_may_stand_in_for_those_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `jaxsoftmax` takes from JAX it takes when it is imported."""
    x = np.array([[1.0, 2.0, 0.5], [0.0, 1.0, 1.0]], np.float32)
    calls = lambda: (
        jaxsoftmax.softmax(x + 1j),
        jaxsoftmax.log_softmax(x + 1j),
        jaxsoftmax.logsumexp(x, 1, b=x),
        jaxsoftmax.logsumexp(x + 1j, 1),
        *jaxsoftmax.top_k_softmax(x, 2),
        *jaxsoftmax.top_k_softmax(jnp.asarray(np.tile(x, (1, 500))), 2),
    )
    want = calls()
    monkeypatch.setattr(jax.nn, "softmax", jaxsoftmax.softmax)
    monkeypatch.setattr(jax.nn, "log_softmax", jaxsoftmax.log_softmax)
    monkeypatch.setattr(jax.nn, "logsumexp", jaxsoftmax.logsumexp)
    monkeypatch.setattr(jax.scipy.special, "logsumexp", jaxsoftmax.logsumexp)
    monkeypatch.setattr(jax.lax, "top_k", jaxsoftmax.top_k_softmax)
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, calls(), want)
