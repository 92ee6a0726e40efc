"""Log-probabilities and entropies of sampled text, and policy gradients, without the logits of the text.

The log-probability of a token is minus its loss by `linear_cross_entropy`, at the temperature at which it was sampled;
`return_entropy` gives the entropy of all the tokens that could have been sampled, and both have gradients. A small
policy writes texts and learns by REINFORCE, with a bonus for entropy, to write tokens that are rewarded. Everything is
compared with whole logits, and the reward must rise, or the example fails.

    python examples/rl_logprobs.py --steps 40
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxsoftmax

VOCABULARY, WIDTH, TEXTS, LENGTH = 1024, 64, 64, 16
TEMPERATURE = 0.8
BONUS = 0.01  # for a nat of entropy


class Policy(NamedTuple):
    """A token's successor depends on this token alone."""

    embedding: jax.Array
    mixing: jax.Array
    head: jax.Array


def new_policy(key: jax.Array) -> Policy:
    draw = lambda key, *shape: jax.random.normal(key, shape) * WIDTH**-0.5
    keys = jax.random.split(key, 3)
    return Policy(draw(keys[0], VOCABULARY, WIDTH), draw(keys[1], WIDTH, WIDTH), draw(keys[2], WIDTH, VOCABULARY))


def hidden_states(policy: Policy, before: jax.Array) -> jax.Array:
    return jnp.tanh(4 * policy.embedding[before] @ policy.mixing)


@jax.jit
def sample(policy: Policy, key: jax.Array) -> jax.Array:
    """Texts `[texts, length]`, which begin after token 0."""

    def step(before: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jax.random.categorical(key, hidden_states(policy, before) @ policy.head / TEMPERATURE)
        return token, token

    _, texts = jax.lax.scan(step, jnp.zeros(TEXTS, jnp.int32), jax.random.split(key, LENGTH))
    return texts.T


def log_probs(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The log-probabilities of the tokens, and the entropies, `[texts, length]` both."""
    loss, entropy = jaxsoftmax.linear_cross_entropy(hidden, head, tokens, scale=1 / TEMPERATURE, return_entropy=True)
    return -loss, entropy


def log_probs_by_logits(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes both from logits `[texts, length, vocabulary]`."""
    log_p = jax.nn.log_softmax(hidden @ head / TEMPERATURE)
    return jnp.take_along_axis(log_p, tokens[..., None], -1)[..., 0], -(jnp.exp(log_p) * log_p).sum(-1)


def objective(
    policy: Policy, texts: jax.Array, advantages: jax.Array, of_tokens: Callable[..., tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """The objective that a step makes smaller."""
    before = jnp.pad(texts[:, :-1], ((0, 0), (1, 0)))
    log_p, entropy = of_tokens(hidden_states(policy, before), policy.head, texts)
    return -(advantages[:, None] * log_p + BONUS * entropy).mean()


def rewards_of(texts: jax.Array) -> jax.Array:
    """The share of a text's tokens that are in the first quarter of the vocabulary."""
    return (texts < VOCABULARY // 4).mean(1)


def check(policy: Policy, texts: jax.Array) -> None:
    """Compares log-probabilities, entropies and the gradients of both with those of whole logits."""
    hidden = hidden_states(policy, texts)
    for of_tokens in (log_probs, log_probs_by_logits):
        log_p, entropy = of_tokens(hidden, policy.head, texts)
        print(f"{of_tokens.__name__:<20} log-probability {log_p.mean():.5f}, entropy {entropy.mean():.5f}")
    ways = [lambda *x, i=i, of=of: of(*x, texts)[i].sum() for i in (0, 1) for of in (log_probs, log_probs_by_logits)]
    found = [jax.value_and_grad(way, (0, 1))(hidden, policy.head) for way in ways]
    for mine, wanted in (found[:2], found[2:]):
        for x, want in zip(jax.tree.leaves(mine), jax.tree.leaves(wanted), strict=True):
            assert jnp.allclose(x, want, rtol=1e-4, atol=1e-5 * jnp.abs(want).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps

    policy = new_policy(jax.random.key(0))
    check(policy, sample(policy, jax.random.key(1)))
    optimizer = optax.adam(2e-2)

    @jax.jit
    def improved(policy: Policy, state: Any, texts: jax.Array) -> tuple[Any, Any]:
        rewards = rewards_of(texts)
        gradients = jax.grad(objective)(policy, texts, rewards - rewards.mean(), log_probs)
        updates, state = optimizer.update(gradients, state, policy)
        return optax.apply_updates(policy, updates), state

    state, rewards = optimizer.init(policy), []
    for step, key in enumerate(jax.random.split(jax.random.key(2), steps)):
        texts = sample(policy, key)
        rewards.append(float(rewards_of(texts).mean()))
        policy, state = improved(policy, state, texts)
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}: reward {rewards[-1]:.3f}")
    assert rewards[-1] > rewards[0] + 0.2, f"the reward went from {rewards[0]:.3f} to {rewards[-1]:.3f}"

    print("\nAt the size of a language model:\n")
    hidden, head = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4096, 4096), (4096, 128256)))
    tokens = jax.ShapeDtypeStruct((8, 4096), jnp.int32)
    options = {"scale": 1 / TEMPERATURE, "return_entropy": True}
    print(jaxsoftmax.explain_linear_cross_entropy(hidden, head, tokens, **options, op="vjp"))


if __name__ == "__main__":
    main()
