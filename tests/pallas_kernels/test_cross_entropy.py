"""What the kernels say no to, what the reference means, and the loss that is bound by `custom_vjp`."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from interpreter import interpret

from pallas_kernels import custom_vjp
from pallas_kernels.hardware import H200
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.dispatch import KERNELS
from pallas_kernels.softmax.problem import Op, Problem

F32 = jnp.dtype(jnp.float32)


@pytest.mark.parametrize(
    "problem, words",
    [
        (Problem(Op.SOFTMAX, 4, 125, F32, soft_cap=30.0), "only the cross entropy has a soft cap"),
        (Problem(Op.STATS, 4, 125, F32, z_loss=0.1), "only the cross entropy has a z loss"),
        (Problem(Op.CROSS_ENTROPY, 4, 125, F32, soft_cap=0.0), "soft cap of 2^-100 to 2^100"),
        (Problem(Op.CROSS_ENTROPY_GRADIENT, 4, 125, F32, soft_cap=float("inf")), "soft cap of 2^-100 to 2^100"),
        (Problem(Op.CROSS_ENTROPY_GRADIENT, 4, 125, F32, where="full", smoothing=0.1), "over all columns"),
    ],
)
def test_every_kernel_declines(problem, words):
    assert [name for name, kernel in KERNELS.items() if words not in str(kernel.unsupported(problem, H200))] == []


@pytest.mark.parametrize("where", ["none", "full"])
def test_the_reference_is_the_derivative_of_the_loss(where):
    """Over two axes that are not the last, against JAX's derivative of the loss as the issue writes it."""
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((3, 5, 4)), rng.integers(0, 12, (1, 5, 1))
    x, labels = jnp.asarray(x, jnp.float32), jnp.asarray(labels, jnp.int32)
    weights = jnp.asarray(rng.standard_normal((1, 5, 1)), jnp.float32)
    mask = jnp.asarray(rng.random(x.shape) < 0.7) if where != "none" else None
    options = {"scale": -0.7, "soft_cap": 2.0, "smoothing": 0.2, "z_loss": 0.3}

    def loss(x):
        z = jnp.moveaxis(2.0 * jnp.tanh(-0.7 * x / 2.0), 1, 0).reshape(5, 12)
        held = jnp.ones_like(z, bool) if mask is None else jnp.moveaxis(mask, 1, 0).reshape(5, 12)
        lse = jax.nn.logsumexp(z, axis=1, where=held)
        target = jnp.take_along_axis(z, labels.reshape(5, 1), 1)[:, 0]
        mean = jnp.where(held, z, 0).sum(1) / held.sum(1)
        return (weights.reshape(5) * (lse - 0.8 * target - 0.2 * mean + 0.3 * lse**2)).sum()

    gradient, *neutral_if_ignored = reference.cross_entropy_gradient(x, labels, weights, mask, axes=(0, 2), **options)
    np.testing.assert_allclose(gradient, jax.grad(loss)(x), rtol=2e-5, atol=2e-6)
    alone = reference.cross_entropy(x, labels, mask, axes=(0, 2), **options)
    for mine, other in zip(neutral_if_ignored, alone, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.slow
def test_the_loss_by_custom_vjp():
    rng = np.random.default_rng(1)
    x, labels = rng.standard_normal((7, 125)).astype(np.float32), rng.integers(0, 125, 7, np.int32)
    labels[3], x[3], ct = -1, np.nan, rng.standard_normal(7).astype(np.float32)
    run = lambda x, labels, ct: jax.vjp(lambda x: custom_vjp.cross_entropy(x, labels, 0.5, "warp"), x)[1](ct)[0]
    gradient = interpret(run, x, labels, ct)
    truth = oracle.cross_entropy(x, labels, scale=0.5, weights=ct, ignored=-1)
    np.testing.assert_allclose(gradient, truth.gradient, rtol=1e-5, atol=1e-6)
    loss = interpret(functools.partial(custom_vjp.cross_entropy, scale=0.5, kernel="warp"), x, labels)
    np.testing.assert_allclose(loss, truth.loss / ct, rtol=1e-5, atol=1e-6)


def test_the_cases_have_labels_at_both_ends_and_ignored_rows():
    labels = np.asarray(cases.operands(Problem(Op.CROSS_ENTROPY, 19, 125, F32))[1])
    assert {0, 124, -1} <= set(labels.tolist())
