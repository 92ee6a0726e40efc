"""`linear_cross_entropy` on a Hopper GPU, as close to float32 products as optax on float32 logits is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax import linear_cross_entropy as ours
from tests.jaxsoftmax.test_linear_cross_entropy import of_products as theirs

pytestmark = pytest.mark.gpu

# Tokens, embedding, vocabulary and chunk; the kernel of the losses alone takes the first, third and fourth.
SHAPES = [(1024, 512, 4096, None), (300, 128, 50257, 128), (4096, 256, 32000, None), (1000, 1024, 8320, None)]


def everything(call: Any, ways: tuple[float, ...], *operands: jax.Array) -> Any:
    """Results, and gradients of the sum of some of them."""

    def total(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        found = jax.tree.leaves(call(hidden, weight, labels))
        return sum(way * x.sum() for way, x in zip(ways, found, strict=False)), found

    _, alone = jax.jit(total)(*operands)
    (_, found), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(*operands)
    return alone, found, gradients


def off(got: jax.Array, want: jax.Array) -> float:
    """The root of the mean squared error."""
    return float(np.sqrt(np.square(np.asarray(got, np.float64) - np.asarray(want, np.float64)).mean()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("layout", ["EV", "VE"])
@pytest.mark.parametrize("tokens, embedding, vocabulary, chunk", SHAPES)
def test_values_and_gradients(
    tokens: int, embedding: int, vocabulary: int, chunk: int | None, layout: Any, dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(tokens, embedding)), dtype)
    weight = jnp.asarray(3 / embedding**0.5 * rng.normal(size=(embedding, vocabulary)), dtype)
    labels = jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32)
    exact = functools.partial(theirs, precision="highest")
    options: dict[str, Any] = {"weight_layout": layout, "chunk_size": chunk}
    turned = lambda h, w, y, **more: ours(h, w.T if layout == "VE" else w, y, **options, **more)
    kinds = [((1.0,), turned), ((1.0,), functools.partial(turned, weights=1.0))]
    both = functools.partial(turned, return_lse=True, return_entropy=True)
    for ways, kind in (*kinds, ((0.5, 1.0, 2.0), both)):
        truth = everything(exact, ways, hidden.astype(jnp.float32), weight.astype(jnp.float32), labels)
        reference, got = (everything(call, ways, hidden, weight, labels) for call in (theirs, kind))
        for results, others, wanted in zip(got[:2], reference[:2], truth[:2], strict=True):
            for x, other, want in zip(results, others, wanted, strict=False):
                assert off(x, want) <= 2 * off(other, want) + 1e-6
        for x, other, want in zip(got[2], reference[2], truth[2], strict=True):
            assert x.dtype == dtype
            assert off(x, want) <= 2 * off(other, want)
