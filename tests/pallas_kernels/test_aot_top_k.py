"""`top_k_softmax` of few rows, compiled for an H200 without one: in how few kernels, of which none sorts.

Each kernel of so little work costs a microsecond or two: their number is the time.
"""

import re

import aot
import jax
import jax.numpy as jnp
import pytest

from jaxsoftmax import top_k_softmax
from pallas_kernels.top_k import dispatch

pytestmark = pytest.mark.aot

# An instruction of the main computation that launches a kernel.
_LAUNCHES = r" (fusion|custom-call|sort|copy|scatter|gather|while|call|conditional|reduce|broadcast)\("


def kernels(function, rows, cols, dtype=jnp.bfloat16):
    (x,) = aot.on_h200([jax.ShapeDtypeStruct((rows, cols), dtype)])
    text = jax.jit(function).lower(x).compile().as_text()
    main = text[text.index("\nENTRY ") :]
    found = [found[1] for line in main.splitlines() if (found := re.search(_LAUNCHES, line))]
    sorts = text.count(" sort(") + sum(name in text for name in ("TopK", "cub::", "DeviceRadixSort"))
    return found, sorts


@pytest.mark.parametrize(
    "rows, k, cols, most",
    [
        (1, 1, 262144, 3),
        (64, 1, 32000, 4),
        (64, 1, 262144, 4),
        (1, 8, 128256, 6),
        (1, 64, 32000, 6),
        (1, 64, 262144, 6),
    ],
)
def test_few_kernels(rows, k, cols, most):
    found, sorts = kernels(lambda x: top_k_softmax(x, k), rows, cols)
    assert len(found) <= most, found
    assert found.count("custom-call") == 1, "the statistics"
    assert not sorts


def test_few_kernels_of_another_dtype_and_scale():
    found, sorts = kernels(lambda x: top_k_softmax(x, 8, scale=0.7), 1, 50257, jnp.float32)
    assert len(found) <= 7, "one more for the copy"
    assert not sorts


@pytest.mark.parametrize("implementation, k, selections", [(None, 8, 2), (None, 129, 2), ("xla", 8, 0)])
def test_of_many_rows_xla_sorts_what_no_kernel_does(implementation, k, selections):
    """The kernels are that of the statistics, and selections of chunks and of their elements."""
    found, sorts = kernels(lambda x: top_k_softmax(x, k, implementation=implementation), 64, 32000)
    assert found.count("custom-call") == selections + (selections > 0)
    assert (sorts > 0) == (k > dispatch.MOST_SORTED or not selections)
