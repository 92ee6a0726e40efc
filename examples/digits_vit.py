"""A vision transformer on handwritten digits: Flax's own layers, with `flash_attention` as their attention function.

scikit-learn ships 1797 digits of 8x8 pixels. Each is 16 patches and a token for the class: 17 tokens, which is no
multiple of anything, seen in both directions. A second one is trained with Flax's attention function; the losses must
agree and 85 % of held-out digits be recognised, or the exit status is 1.

    python examples/digits_vit.py --steps 300
"""

import argparse
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxsoftmax

WIDTH, HEADS, LAYERS, BATCH = 32, 4, 2, 64


class Block(nnx.Module):
    def __init__(self, attention: dict[str, Any], rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, **attention)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class ViT(nnx.Module):
    def __init__(self, attention: dict[str, Any], rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, WIDTH, (2, 2), strides=(2, 2), rngs=rngs)
        self.token = nnx.Param(jax.random.normal(rngs.params(), (1, 1, WIDTH)))
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 17, WIDTH)))
        self.blocks = nnx.List([Block(attention, rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images[..., None]).reshape(len(images), 16, WIDTH)
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (len(images), 1, WIDTH)), x], 1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Run(NamedTuple):
    """A finished training."""

    losses: np.ndarray
    accuracy: float


def train(attention: dict[str, Any], steps: int) -> Run:
    pixels, target = load_digits(return_X_y=True)
    images, labels = jnp.asarray(pixels.reshape(-1, 8, 8) / 16, jnp.float32), jnp.asarray(target)
    order = np.random.default_rng(0).permutation(len(images))
    held_out, known = order[:297], order[297:]
    model = ViT(attention, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: ViT, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
        def loss_of(model: ViT) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    rng = np.random.default_rng(1)
    losses = []
    for _ in range(steps):
        at = rng.choice(known, BATCH)
        losses.append(float(step(model, optimizer, images[at], labels[at])))
    right = nnx.jit(lambda model, x: model(x).argmax(-1))(model, images[held_out]) == labels[held_out]
    return Run(np.array(losses), float(right.mean()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    runs = []
    print(f"{'':<12}{'first loss':>12}{'last loss':>12}{'held out':>12}")
    for name, attention in (("jaxsoftmax", {"attention_fn": jaxsoftmax.flash_attention}), ("flax", {})):
        runs.append(run := train(attention, args.steps))
        print(f"{name:<12}{run.losses[0]:>12.4f}{run.losses[-10:].mean():>12.4f}{run.accuracy:>12.1%}")
    gap = np.abs(runs[0].losses - runs[1].losses).max()
    learnt, agree = runs[0].accuracy > 0.85, gap < 0.05
    print(f"largest difference between the loss curves: {gap:.1e}")
    print(f"Digits are {'recognised' if learnt else 'NOT RECOGNISED'}; the curves {'agree' if agree else 'DISAGREE'}.")
    return 0 if learnt and agree else 1


if __name__ == "__main__":
    sys.exit(main())
