"""Trains the GPT of `packed_gpt.py` on rows that are shared by devices: a mesh of data and sequence, in one `jit`.

Each device has pieces of a row from all over it, as `jaxsoftmax.zigzag` deals them in rounds, so that all have about
equal work under the causal rule, whatever the documents' lengths. Tokens, labels, documents and positions are dealt
alike; attention is told where each token was. The model and the loss are those of one device, and the losses must
agree, or the exit status is 1. On Hopper GPUs each device runs the kernels on its queries. Here the host pretends to
have eight devices.

    python examples/long_context.py --length 4096
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packed_gpt
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

DATA, SEQUENCE = 2, 4
ROUNDS = 4  # with 4096 tokens in a row, pieces have 128, as a tile of the kernels does


class Batch(NamedTuple):
    """Tokens `[rows, length]`, their successors (-1: none), documents, positions in these, and places in the row."""

    tokens: Any
    labels: Any
    documents: Any
    positions: Any
    places: Any


def attend(q: jax.Array, k: jax.Array, v: jax.Array, context: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Causal attention within documents, by the tokens' places."""
    documents, places = context
    return jaxsoftmax.flash_attention(
        q, k, v, is_causal=True, query_segment_ids=documents, query_positions=places, key_value_positions=places
    )


def loss_of(model: packed_gpt.GPT, batch: Batch) -> jax.Array:
    """The mean over tokens whose successor is in the same document."""
    hidden = model.hidden(batch.tokens, (batch.documents, batch.places), batch.positions)
    return packed_gpt.loss_without_logits(hidden, model.head, batch.labels, batch.labels >= 0)


def batches(length: int, rows: int) -> Iterator[Batch]:
    for batch in packed_gpt.batches(length, rows):
        tokens, documents, positions = (np.asarray(x) for x in batch)
        labels = np.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], -1)
        places = np.broadcast_to(np.arange(length, dtype=np.int32), labels.shape)
        yield Batch(tokens[:, :-1], labels, documents[:, :-1], positions[:, :-1], places)


def train(place: Callable[[Batch], Batch], steps: int, length: int, rows: int) -> tuple[np.ndarray, float]:
    """The losses, and how many megabytes of temporaries a device has in a step."""
    model = packed_gpt.GPT(packed_gpt.SIZES["tiny"], length, attend, nnx.Rngs(0))
    graph, weights = nnx.split(model)
    optimizer = optax.adamw(3e-3)

    def step(weights: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda weights: loss_of(nnx.merge(graph, weights), batch))(weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    state, losses, compiled = optimizer.init(weights), [], None
    for batch in map(place, itertools.islice(batches(length, rows), steps)):
        compiled = compiled or jax.jit(step).lower(weights, state, batch).compile()
        weights, state, loss = compiled(weights, state, batch)
        losses.append(float(loss))
    memory = compiled.memory_analysis() if compiled else None
    return np.array(losses), memory.temp_size_in_bytes / 1e6 if memory else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row, a multiple of 32")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DATA * SEQUENCE)

    mesh = jax.make_mesh((DATA, SEQUENCE), ("data", "sequence"), (AxisType.Auto,) * 2)
    shared = NamedSharding(mesh, P("data", "sequence"))

    def deal(batch: Batch) -> Batch:
        return Batch(*(jax.device_put(jaxsoftmax.zigzag(x, 1, SEQUENCE, ROUNDS), shared) for x in batch))

    run = functools.partial(train, steps=args.steps, length=args.length, rows=DATA)
    (alone, whole), (together, part) = run(lambda batch: jax.tree.map(jnp.asarray, batch)), run(deal)
    print(f"{args.length} tokens in a row; the loss from {alone[0]:.4f} to {alone[-1]:.4f}")
    print(f"temporaries: {whole:.0f} MB on one device, {part:.0f} MB on each of {mesh.size}")
    gap = np.abs(alone - together).max()
    fell, agree = alone[-1] < 0.95 * alone[0], gap < 1e-3
    print(f"largest difference between the losses of one device and of {mesh.size}: {gap:.1e}")
    print(f"The loss {'fell' if fell else 'DID NOT FALL'}; the losses {'agree' if agree else 'DISAGREE'}.")
    return 0 if fell and agree else 1


if __name__ == "__main__":
    sys.exit(main())
