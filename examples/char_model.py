"""Trains a small character-level transformer on the Python standard library, through jaxsoftmax and through jax.nn.

Every softmax of the model is the library's: the attention weights (mask and 1/sqrt(d) fused in), the training loss
(`log_softmax`), the held-out loss (`logsumexp`) and the sampling temperature (`scale`). The same model is then trained
with `jax.nn`; the losses must fall and agree, or the exit status is 1. On a GPU the two are also timed.

    python examples/char_model.py --steps 600
"""

import argparse
import itertools
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxsoftmax

CONTEXT = 64
WIDTH = 64
HEADS = 4
LAYERS = 2
BATCH = 16


class Ops(NamedTuple):
    """The three operations the model is written in."""

    softmax: Callable[..., jax.Array]
    log_softmax: Callable[..., jax.Array]
    logsumexp: Callable[..., jax.Array]


def _scaled(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, scale=1.0, **kwargs: f(x * scale, **kwargs)


OURS = Ops(jaxsoftmax.softmax, jaxsoftmax.log_softmax, jaxsoftmax.logsumexp)
JAX_NN = Ops(_scaled(jax.nn.softmax), _scaled(jax.nn.log_softmax), jax.nn.logsumexp)


class Attention(nnx.Module):
    def __init__(self, ops: Ops, rngs: nnx.Rngs):
        self.ops = ops
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(batch, length, 3, HEADS, WIDTH // HEADS), 2, 0)
        logits = jnp.einsum("bthd,bshd->bhts", q, k)
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
        weights = self.ops.softmax(logits, where=causal, scale=(WIDTH // HEADS) ** -0.5)
        return self.out(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, ops: Ops, rngs: nnx.Rngs):
        self.attention = Attention(ops, rngs)
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


class CharModel(nnx.Module):
    def __init__(self, vocabulary: int, ops: Ops, rngs: nnx.Rngs):
        self.characters = nnx.Embed(vocabulary, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(ops, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.characters(tokens) + self.positions(jnp.arange(tokens.shape[-1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text(NamedTuple):
    """The standard library's own sources as character codes, four spaces as a tab; the last tenth held out."""

    alphabet: str
    train: np.ndarray
    held_out: np.ndarray


def read_text(characters: int = 1_000_000) -> Text:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)[:characters]
    sources = sources.encode("ascii", "replace").decode().replace(" " * 4, "\t")
    alphabet = "".join(sorted(set(sources)))
    codes = np.searchsorted(list(alphabet), list(sources)).astype(np.int32)
    cut = len(codes) * 9 // 10
    return Text(alphabet, codes[:cut], codes[cut:])


def batches(codes: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(codes) - CONTEXT - 1, BATCH)
        yield codes[starts[:, None] + np.arange(CONTEXT + 1)]


def training_loss(model: CharModel, tokens: jax.Array, ops: Ops) -> jax.Array:
    log_p = ops.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()


def held_out_loss(model: CharModel, tokens: jax.Array, ops: Ops) -> jax.Array:
    logits = model(tokens[:, :-1])
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (ops.logsumexp(logits, axis=-1) - chosen).mean()


class Run(NamedTuple):
    """A finished training."""

    model: CharModel
    losses: np.ndarray
    held_out: float
    seconds_per_step: float


def train(text: Text, ops: Ops, steps: int, name: str) -> Run:
    model = CharModel(len(text.alphabet), ops, nnx.Rngs(0))
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=50, decay_steps=50 + steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate), wrt=nnx.Param)

    @nnx.jit
    def step(model: CharModel, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: training_loss(m, tokens, ops))(model)
        optimizer.update(model, gradients)
        return loss

    losses, start = [], time.perf_counter()
    for i, tokens in enumerate(itertools.islice(batches(text.train, seed=0), steps)):
        losses.append(float(step(model, optimizer, jnp.asarray(tokens))))
        if i == 0:
            start = time.perf_counter()  # compiled
        if (i + 1) % max(1, steps // 6) == 0:
            print(f"  {name:<10} step {i + 1:4d}/{steps}  loss {np.mean(losses[-20:]):.4f}", flush=True)
    seconds = (time.perf_counter() - start) / max(1, steps - 1)

    evaluate = nnx.jit(lambda m, tokens: held_out_loss(m, tokens, ops))
    held_out = [evaluate(model, jnp.asarray(tokens)) for tokens in itertools.islice(batches(text.held_out, seed=1), 8)]
    return Run(model, np.array(losses), float(np.mean(held_out)), seconds)


def write(model: CharModel, text: Text, length: int, temperature: float) -> str:
    """Text sampled from the model, at a temperature that the softmax applies as its `scale`."""

    @nnx.jit
    def next_code(model: CharModel, window: jax.Array, key: jax.Array) -> jax.Array:
        p = jaxsoftmax.softmax(model(window[None])[0, -1], scale=1 / temperature)
        return jax.random.choice(key, len(text.alphabet), p=p)

    codes = list(text.held_out[:CONTEXT])
    for key in jax.random.split(jax.random.key(0), length):
        codes.append(int(next_code(model, jnp.array(codes[-CONTEXT:]), key)))
    return "".join(text.alphabet[code] for code in codes[CONTEXT:]).expandtabs(4)


def compare_speed(rows: int = 8192, vocabulary: int = 50257) -> None:
    """The loss's softmax at a language model's size, forward and backward, in turns."""
    x = jax.random.normal(jax.random.key(0), (rows, vocabulary), jnp.bfloat16)
    functions = {
        name: jax.jit(lambda x, ops=ops: jax.vjp(ops.softmax, x)[1](x)[0])
        for name, ops in (("jaxsoftmax", OURS), ("jax.nn", JAX_NN))
    }
    times = {name: [] for name in functions}
    for _ in range(10):
        for name, f in functions.items():
            start = time.perf_counter()
            for _ in range(10):
                y = f(x)
            y.block_until_ready()
            times[name].append((time.perf_counter() - start) / 10)
    print(f"\nsoftmax, forward and backward, bfloat16[{rows}, {vocabulary}] on {jax.devices()[0].device_kind}:")
    for name, seconds in times.items():
        print(f"  {name:<10} {np.median(seconds) * 1e6:8.1f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sample", type=int, default=400, help="characters to write")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()

    text = read_text()
    print(f"{len(text.train):,} characters of the standard library, {len(text.alphabet)} distinct; ", end="")
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    ours, theirs = (train(text, ops, args.steps, name) for name, ops in (("jaxsoftmax", OURS), ("jax.nn", JAX_NN)))

    gap = float(np.abs(ours.losses - theirs.losses).max())
    print(f"\n{'':<12}{'first loss':>12}{'last loss':>12}{'held out':>12}{'ms/step':>12}")
    for name, run in (("jaxsoftmax", ours), ("jax.nn", theirs)):
        last = run.losses[-20:].mean()
        print(f"{name:<12}{run.losses[0]:>12.4f}{last:>12.4f}{run.held_out:>12.4f}{run.seconds_per_step * 1e3:>12.1f}")
    print(f"largest difference between the two loss curves: {gap:.1e}")
    print(f"\nWritten by the model at temperature {args.temperature}:\n")
    print(write(ours.model, text, args.sample, args.temperature).strip())
    if jax.default_backend() == "gpu":
        compare_speed()

    fell = ours.losses[-10:].mean() < 0.9 * ours.losses[0]
    agree = gap < 0.02 and abs(ours.held_out - theirs.held_out) < 0.02
    print(f"\nThe loss {'fell' if fell else 'DID NOT FALL'}; the curves {'agree' if agree else 'DISAGREE'}.")
    return 0 if fell and agree else 1


if __name__ == "__main__":
    sys.exit(main())
