"""Trains a small GPT on packed documents, by `jaxsoftmax`, and by `jax.nn`'s attention and optax's cross entropy.

The documents are the standard library's source files, laid end to end in rows of fixed length: no padding, and no
token sees another document, as segment ids tell. Query heads share key heads in groups. `jax.nn` needs the same rule as
a mask of every query with every key. The loss is `linear_cross_entropy`, without logits of all tokens; optax's is of
whole float32 logits. The losses must fall and agree, or the exit status is 1.

    python examples/packed_gpt.py --steps 300 --plot loss.svg

With `--size small --length 4096 --steps 25 --cudnn` the model has 100 million parameters, and needs a GPU. With
`--loss ours` or `--loss optax` it is trained once, by `flash_attention` and that loss, and the peak memory is printed:

    python examples/packed_gpt.py --size small --vocabulary 128256 --length 4096 --steps 25 --loss ours
"""

import argparse
import functools
import itertools
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxsoftmax


class Size(NamedTuple):
    """A GPT's shape; parameters are float32, what they compute is `dtype`."""

    width: int
    heads: int
    key_heads: int
    layers: int
    vocabulary: int
    dtype: Any


SIZES = {"tiny": Size(64, 4, 2, 2, 256, jnp.float32), "small": Size(768, 12, 4, 12, 32000, jnp.bfloat16)}


class Batch(NamedTuple):
    """Tokens `[batch, length + 1]`, and of each the document and the position in it."""

    tokens: jax.Array
    documents: jax.Array
    positions: jax.Array


def ours(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array) -> jax.Array:
    """Causal attention within documents: the ids are all there is to say."""
    return jaxsoftmax.flash_attention(q, k, v, is_causal=True, query_segment_ids=documents)


def theirs(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array, by: Literal["xla", "cudnn"] | None = None
) -> jax.Array:
    """Attends by `jax.nn` with a mask `[batch, 1, length, length]`."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, implementation=by)


def loss_without_logits(hidden: jax.Array, head: nnx.Linear, labels: jax.Array, counts: jax.Array) -> jax.Array:
    """The mean over tokens that count, by the matrix in the dtype in which it is multiplied."""
    assert head.bias is not None
    losses = jaxsoftmax.linear_cross_entropy(
        hidden,
        head.kernel[...].astype(hidden.dtype),
        jnp.where(counts, labels, -1),
        bias=head.bias[...],
        ignore_index=-1,
        weights=1 / jnp.maximum(counts.sum(), 1),
    )
    return losses.sum()


def loss_by_optax(hidden: jax.Array, head: nnx.Linear, labels: jax.Array, counts: jax.Array) -> jax.Array:
    """Computes the mean loss from all logits."""
    losses = optax.softmax_cross_entropy_with_integer_labels(head(hidden).astype(jnp.float32), labels)
    return losses.sum(where=counts) / jnp.maximum(counts.sum(), 1)


LOSSES = {"ours": loss_without_logits, "optax": loss_by_optax}


class Block(nnx.Module):
    def __init__(self, size: Size, attend: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.attend = attend
        width, head = size.width, size.width // size.heads
        options = {"dtype": size.dtype, "rngs": rngs}
        self.query = nnx.LinearGeneral(width, (size.heads, head), **options)
        self.key, self.value = (nnx.LinearGeneral(width, (size.key_heads, head), **options) for _ in range(2))
        self.out = nnx.LinearGeneral((size.heads, head), width, axis=(-2, -1), **options)
        self.norms = nnx.List([nnx.RMSNorm(width, **options) for _ in range(2)])
        self.up, self.down = nnx.Linear(width, 4 * width, **options), nnx.Linear(4 * width, width, **options)

    def __call__(self, x: jax.Array, context: Any) -> jax.Array:
        h = self.norms[0](x)
        x = x + self.out(self.attend(self.query(h), self.key(h), self.value(h), context))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, size: Size, length: int, attend: Callable[..., jax.Array], rngs: nnx.Rngs):
        options = {"dtype": size.dtype, "rngs": rngs}
        self.tokens, self.positions = (nnx.Embed(n, size.width, **options) for n in (size.vocabulary, length))
        self.blocks = nnx.List([Block(size, attend, rngs) for _ in range(size.layers)])
        self.norm, self.head = nnx.RMSNorm(size.width, **options), nnx.Linear(size.width, size.vocabulary, **options)

    def hidden(self, tokens: jax.Array, context: Any, positions: jax.Array) -> jax.Array:
        """The last hidden states. The context is what attention gets beside query, key and value: the documents."""
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, context)
        return self.norm(x)

    def __call__(self, tokens: jax.Array, context: Any, positions: jax.Array) -> jax.Array:
        """The logits."""
        return self.head(self.hidden(tokens, context, positions))


def loss_of(model: GPT, batch: Batch, mean_loss: Callable[..., jax.Array]) -> jax.Array:
    """The mean over tokens whose successor is in the same document."""
    hidden = model.hidden(batch.tokens[:, :-1], batch.documents[:, :-1], batch.positions[:, :-1])
    counts = batch.documents[:, 1:] == batch.documents[:, :-1]
    return mean_loss(hidden, model.head, batch.tokens[:, 1:], counts)


def batches(length: int, rows: int, vocabulary: int = 256) -> Iterator[Batch]:
    """Pieces of random files, end to end; a token is a byte, or two of them beyond 256 tokens."""
    files = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    token = np.uint8 if vocabulary <= 256 else np.uint16
    files = [np.frombuffer(file[: len(file) // 2 * 2], token).astype(np.int32) % vocabulary for file in files]
    files = [file for file in files if len(file) > 64]
    rng = np.random.default_rng(0)
    while True:
        tokens = np.empty(rows * (length + 1), np.int32)
        documents, positions = np.empty_like(tokens), np.empty_like(tokens)
        start = 0
        for document in itertools.count():
            file = files[rng.integers(len(files))]
            at = rng.integers(len(file) - 64)
            piece = file[at : at + int(rng.integers(16, length))][: len(tokens) - start]
            end = start + len(piece)
            tokens[start:end], documents[start:end], positions[start:end] = piece, document, np.arange(len(piece))
            start = end
            if start == len(tokens):
                break
        yield Batch(*(jnp.asarray(x.reshape(rows, length + 1)) for x in (tokens, documents, positions)))


class Run(NamedTuple):
    """A finished training."""

    model: GPT
    losses: np.ndarray
    tokens_per_second: float
    megabytes: float

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(nnx.state(self.model, nnx.Param)))


def train(
    attend: Callable[..., jax.Array],
    size: Size,
    steps: int,
    length: int,
    rows: int,
    mean_loss: Callable[..., jax.Array] = loss_without_logits,
) -> Run:
    model = GPT(size, length, attend, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3 * 64 / size.width), wrt=nnx.Param)

    @nnx.jit
    def step(model: GPT, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: loss_of(model, batch, mean_loss))(model)
        optimizer.update(model, gradients)
        return loss

    graph, state = nnx.split(model)
    gradient = jax.jit(jax.grad(lambda state, batch: loss_of(nnx.merge(graph, state), batch, mean_loss)))
    losses, start, megabytes = [], time.perf_counter(), 0.0
    for i, batch in enumerate(itertools.islice(batches(length, rows, size.vocabulary), steps)):
        if i == 0:
            memory = gradient.lower(state, batch).compile().memory_analysis()
            megabytes = memory.temp_size_in_bytes / 1e6 if memory else float("nan")
        losses.append(float(step(model, optimizer, batch)))
        if i == 0:
            start = time.perf_counter()  # compiled
    seconds = (time.perf_counter() - start) / max(1, steps - 1)
    return Run(model, np.array(losses), rows * length / seconds, megabytes)


def plot(runs: dict[str, Run], path: str) -> None:
    """The loss curves, one over the other."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=False):
        axes.plot(run.losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--vocabulary", type=int, help="tokens in the vocabulary, instead of the size's")
    parser.add_argument("--loss", choices=LOSSES, help="train only once, with this loss")
    parser.add_argument("--cudnn", action="store_true", help="`jax.nn`'s attention by cuDNN")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--plot", help="a file for the loss curves")
    args = parser.parse_args()

    size, runs = SIZES[args.size], {}
    size = size._replace(vocabulary=args.vocabulary or size.vocabulary)
    other = functools.partial(theirs, by="cudnn" if args.cudnn else None)
    ways = {"jaxsoftmax": (ours, loss_without_logits), "jax.nn": (other, loss_by_optax)}
    if args.loss:
        ways = {f"loss {args.loss}": (ours, LOSSES[args.loss])}
    print(f"{'':<12}{'first loss':>12}{'last loss':>12}{'tokens/s':>12}{'temporary MB':>14}")
    for name, (attend, mean_loss) in ways.items():
        run = runs[name] = train(attend, size, args.steps, args.length, args.rows, mean_loss)
        last = run.losses[-10:].mean()
        print(f"{name:<12}{run.losses[0]:>12.4f}{last:>12.4f}{run.tokens_per_second:>12.0f}{run.megabytes:>14.1f}")
    if args.plot:
        plot(runs, args.plot)
    first, *others = runs.values()
    fell = first.losses[-10:].mean() < 0.9 * first.losses[0]
    if args.loss:
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", float("nan")) / 1e9
        print(f"{first.parameters / 1e6:.1f} million parameters, peak memory of the process: {peak:.2f} GB")
    gap = max((np.abs(first.losses - run.losses).max() for run in others), default=0.0)
    agree = "" if not others else "; the curves agree" if gap < 0.02 else "; the curves DISAGREE"
    print(f"The loss {'fell' if fell else 'DID NOT FALL'}{agree}. The largest difference of two curves is {gap:.1e}.")
    return 0 if fell and gap < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
