"""Models of Flax, Keras, Equinox and rlax under `patch`: their own code, unchanged; loss and gradient as without."""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxsoftmax

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 5, 8)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, 8, size=(2, 5)))
SEEN = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
# Every query sees a key, as one that sees none is what differs.
MASK = jnp.tril(jnp.ones((5, 5), bool))[None, None] & SEEN[:, None, None, :]

Model = tuple[Callable[..., Any], Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=MASK)


class Subclass(nn.MultiHeadDotProductAttention):
    """Someone's own layer, whose default is Flax's function since before any patch."""


def linen() -> Model:
    model = Linen()
    loss = lambda v: optax.softmax_cross_entropy_with_integer_labels(model.apply(v, X), LABELS).mean()
    return loss, jax.jit(model.init)(jax.random.key(0), X)


def linen_subclass() -> Model:
    model = Subclass(num_heads=2, dropout_rate=0.5, deterministic=True)
    loss = lambda v: optax.softmax_cross_entropy(model.apply(v, X, mask=MASK), nn.softmax(X)).mean()
    return loss, jax.jit(model.init)(jax.random.key(0), X)


def nnx_attention() -> Model:
    layer = nnx.MultiHeadAttention(2, 8, decode=False, keep_rngs=False, rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(layer)
    loss = lambda p: optax.losses.softmax_cross_entropy(nnx.merge(graph, p)(X, mask=MASK), nnx.softmax(X)).mean()
    return loss, parameters


def equinox() -> Model:
    import equinox as eqx

    layer = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    parameters, static = eqx.partition(layer, eqx.is_array)
    loss = lambda p: jnp.square(jax.vmap(lambda x, m: eqx.combine(p, static)(x, x, x, m))(X, MASK[:, 0])).mean()
    return loss, parameters


def rlax() -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what tensorflow_probability imports
        import rlax

    actions, rewards = LABELS[0] % 8, X[0, :, 0]

    def loss(logits: jax.Array) -> jax.Array:
        gradient = rlax.policy_gradient_loss(logits, actions, rewards, jnp.ones(5))
        entropy = rlax.entropy_loss(logits, jnp.ones(5))
        return gradient + entropy + rlax.qpg_loss(logits, X[1])

    return loss, X[0]


def keras() -> Model:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 8))
    hidden = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, keras.layers.Dense(8)(hidden))
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(variables: list[jax.Array]) -> jax.Array:
        logits, _ = model.stateless_call(variables, [v.value for v in model.non_trainable_variables], X)
        regulariser = keras.ops.logsumexp(logits) + keras.ops.softmax(logits)[0, 0, 0]
        return cross_entropy(LABELS, logits) + regulariser

    return loss, [v.value for v in model.trainable_variables]


MODELS: dict[str, tuple[Callable[[], Model], set[str]]] = {
    "linen": (linen, {"flax.linen.dot_product_attention", "optax.softmax_cross_entropy_with_integer_labels"}),
    "linen, a subclass": (
        linen_subclass,
        {"flax.linen.dot_product_attention", "optax.softmax_cross_entropy", "jax.nn.softmax"},
    ),
    "nnx": (nnx_attention, {"flax.nnx.dot_product_attention", "optax.softmax_cross_entropy", "jax.nn.softmax"}),
    "equinox": (equinox, {"jax.nn.softmax"}),
    "rlax": (rlax, {"jax.nn.softmax", "jax.nn.log_softmax"}),
    "keras": (
        keras,
        {"jax.nn.dot_product_attention", "jax.nn.log_softmax", "jax.scipy.special.logsumexp", "jax.nn.softmax"},
    ),
}


@pytest.mark.parametrize("library", MODELS)
def test_a_model_that_someone_else_wrote(library: str) -> None:
    build, expected = MODELS[library]
    before, parameters = build()
    step = jax.jit(jax.value_and_grad(before))
    theirs = step(parameters)
    with jaxsoftmax.patch() as calls:
        ours = step(parameters)
        count = dict(calls)
        jax.eval_shape(jax.value_and_grad(build()[0]), parameters)
    assert {name for name, n in count.items() if n} == expected
    assert all(calls[name] >= 2 * count[name] for name in expected)
    assert not calls.reasons
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, theirs)
    jax.tree.map(np.testing.assert_array_equal, step(parameters), theirs)
