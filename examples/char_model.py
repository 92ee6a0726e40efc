"""Trains a small character-level transformer on the Python standard library, through jaxsoftmax and through jax.nn.

Its attention is Flax's own layer, with another attention function put in: `jaxsoftmax.flash_attention`, which never
has the weights in memory; then weights by `jaxsoftmax.softmax` (mask and 1/sqrt(d) fused in); then Flax's function. The
training loss (`linear_cross_entropy`, which takes the last layer's weights), the held-out loss (`logsumexp`) and the
sampling temperature (`scale`) are the library's too, but in the last run optax's and `jax.nn`'s. The losses must fall
and agree, or the exit status is 1. On a GPU the two libraries are also timed.

    python examples/char_model.py --steps 600
"""

import argparse
import functools
import itertools
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    """The operations the model is written in; `attention` is what Flax calls in place of its own."""

    attention: Callable[..., jax.Array]
    softmax: Callable[..., jax.Array]
    mean_loss: Callable[..., jax.Array]
    logsumexp: Callable[..., jax.Array]


def attention_by_weights(q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> jax.Array:
    """Causal attention that computes all its weights; of Flax's keywords this model needs none."""
    logits = jnp.einsum("bthd,bshd->bhts", q, k)
    causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))[None, None]
    weights = jaxsoftmax.softmax(logits, where=causal, scale=q.shape[-1] ** -0.5)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def mean_without_logits(hidden: jax.Array, head: nnx.Linear, labels: jax.Array) -> jax.Array:
    """The mean loss, with 1/n in the weights: the gradients are computed while a chunk of tokens has its logits."""
    assert head.bias is not None
    losses = jaxsoftmax.linear_cross_entropy(
        hidden, head.kernel[...], labels, bias=head.bias[...], weights=1 / max(labels.size, 1)
    )
    return losses.sum()


def optax_mean(hidden: jax.Array, head: nnx.Linear, labels: jax.Array) -> jax.Array:
    """The mean loss, as it is usually written."""
    return optax.softmax_cross_entropy_with_integer_labels(head(hidden), labels).mean()


FLASH = Ops(jaxsoftmax.flash_attention, jaxsoftmax.softmax, mean_without_logits, jaxsoftmax.logsumexp)
WEIGHTS = FLASH._replace(attention=attention_by_weights)
JAX_NN = Ops(nnx.dot_product_attention, jax.nn.softmax, optax_mean, jax.nn.logsumexp)
ALL = {"flash": FLASH, "softmax": WEIGHTS, "jax.nn": JAX_NN}


class Block(nnx.Module):
    def __init__(self, ops: Ops, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, use_bias=False, decode=False, attention_fn=ops.attention, rngs=rngs
        )
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x), is_causal=True)
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


class CharModel(nnx.Module):
    def __init__(self, vocabulary: int, ops: Ops, rngs: nnx.Rngs):
        self.characters = nnx.Embed(vocabulary, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(ops, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocabulary, rngs=rngs)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        x = self.characters(tokens) + self.positions(jnp.arange(tokens.shape[-1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.hidden(tokens))


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
    return ops.mean_loss(model.hidden(tokens[:, :-1]), model.head, tokens[:, 1:])


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


def compare_speed(title: str, functions: dict[str, Callable[..., Any]], *operands: jax.Array) -> None:
    """Forward and backward, in turns; a peer that does not run here is left out."""
    print(f"\n{title}, forward and backward, bfloat16{list(operands[0].shape)} on {jax.devices()[0].device_kind}:")
    steps, times = {}, {}
    for name, f in functions.items():
        step = jax.jit(lambda *operands, f=f: jax.vjp(f, *operands)[1](operands[0]))
        try:
            jax.block_until_ready(step(*operands))
        except RuntimeError as error:
            if name == "jaxsoftmax":
                raise
            print(f"  {name:<12} does not run here: {str(error).strip().splitlines()[0]}")
        else:
            steps[name], times[name] = step, []
    for _ in range(10):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(10):
                found = step(*operands)
            jax.block_until_ready(found)
            times[name].append((time.perf_counter() - start) / 10)
    for name, seconds in times.items():
        print(f"  {name:<12} {np.median(seconds) * 1e6:10.1f} us")


def compare_speeds(softmax_shape: tuple[int, ...] = (8192, 50257), shape: tuple[int, ...] = (4, 4096, 16, 128)) -> None:
    """Softmax and causal attention at a language model's sizes."""
    x, q, k, v = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(jax.random.split(jax.random.key(0), 4), (softmax_shape, *(shape,) * 3), strict=True)
    )
    compare_speed("softmax", {"jaxsoftmax": FLASH.softmax, "jax.nn": JAX_NN.softmax}, x)
    theirs = {
        "jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=True),
        "jax.nn cuDNN": functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"),
    }
    ours = functools.partial(jaxsoftmax.flash_attention, is_causal=True)
    compare_speed("attention", {"jaxsoftmax": ours} | theirs, q, k, v)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sample", type=int, default=400, help="characters to write")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()

    text = read_text()
    print(f"{len(text.train):,} characters of the standard library, {len(text.alphabet)} distinct; ", end="")
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    runs = {name: train(text, ops, args.steps, name) for name, ops in ALL.items()}
    *ours, theirs = runs.values()

    print(f"\n{'':<12}{'first loss':>12}{'last loss':>12}{'held out':>12}{'ms/step':>12}{'off jax.nn':>12}")
    for name, run in runs.items():
        last, gap = run.losses[-20:].mean(), np.abs(run.losses - theirs.losses).max()
        print(f"{name:<12}{run.losses[0]:>12.4f}{last:>12.4f}{run.held_out:>12.4f}", end="")
        print(f"{run.seconds_per_step * 1e3:>12.1f}{gap:>12.1e}")
    print(f"\nWritten by the model at temperature {args.temperature}:\n")
    print(write(ours[0].model, text, args.sample, args.temperature).strip())
    if jax.default_backend() == "gpu":
        compare_speeds()

    least = 0.9 if args.steps >= 20 else 1.0
    fell = all(run.losses[-10:].mean() < least * run.losses[0] for run in ours)
    agree = all(
        np.abs(run.losses - theirs.losses).max() < 0.02 and abs(run.held_out - theirs.held_out) < 0.02 for run in ours
    )
    print(f"\nThe loss {'fell' if fell else 'DID NOT FALL'}; the curves {'agree' if agree else 'DISAGREE'}.")
    return 0 if fell and agree else 1


if __name__ == "__main__":
    sys.exit(main())
