"""Generates text with a small GPT, from a contiguous cache of keys and values and from a cache in pages.

The GPT is the one of packed_gpt.py, trained on the bytes of the standard library's source files. Requests with prompts
of different lengths are then answered in three ways:

- without a cache: each request is alone, and its whole text goes through the model again for every token;
- with a contiguous cache: all requests start together, and each has room for the longest text there may be;
- with pages: the requests share a pool. A request joins when a slot and enough pages are free, and leaves when it has
  its tokens, while the others go on (continuous batching). Its pages then go back to the pool.

A token is drawn from the k most probable, with a seed of the request, so a text does not depend on the other requests.
The three ways must give the same texts, or the exit status is 1. They are computed in float32, so that they can.

    python examples/generate.py --compare
"""

import argparse
import collections
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import packed_gpt
from flax import nnx
from packed_gpt import GPT, Size

import jaxsoftmax

SIZES = {name: size._replace(vocabulary=256, dtype=jnp.float32) for name, size in packed_gpt.SIZES.items()}
LENGTH = 256  # of the longest text, prompt included
PAGE = 16  # positions in a page
CHUNK = 16  # tokens of a prompt that one step takes
TOP_K, TEMPERATURE = 20, 0.7
PROMPTS = (
    b"import ",
    b"def __init__(self, ",
    b"    for i in range(",
    b'"""Utilities that other modules share.\n\nThis module provides classes and functions for ',
    b"class Error(Exception):\n    ",
    b"    if not isinstance(",
)

Texts = list[list[int]]  # the tokens of each request, with its prompt


class Request(NamedTuple):
    """A prompt, how many tokens to draw after it, and the seed to draw them with."""

    prompt: np.ndarray
    count: int
    seed: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.count

    @property
    def pages(self) -> int:
        """How many pages it needs; its last token is not read again and has no place in them."""
        return -(-(self.length - 1) // PAGE)


class Context(NamedTuple):
    """Places of the T tokens of each of B sequences, for attention with a cache."""

    positions: jax.Array  # [B, T], negative where a token is padding
    lengths: jax.Array  # [B], these tokens included
    tables: jax.Array  # [B, entries], the pages of each sequence


class Cache(nnx.Module):
    """Keys and values `[sequences, length, key heads, head_dim]`, or `[pages, page size, key heads, head_dim]`."""

    def __init__(self, size: Size, rows: int, columns: int, attend: Callable[..., jax.Array]):
        shape = (rows, columns, size.key_heads, size.width // size.heads)
        self.keys, self.values = nnx.Cache(jnp.zeros(shape)), nnx.Cache(jnp.zeros(shape))
        self.attend = attend

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
        """Adds the new keys and values, but those of padding, and attends to all."""
        row, column = jnp.arange(len(q))[:, None], context.positions
        if self.attend is paged:
            entry, column = jnp.divmod(column, PAGE)
            row = jnp.where(entry < 0, -1, jnp.take_along_axis(context.tables, jnp.maximum(entry, 0), axis=1))
        for cached, new in ((self.keys, k), (self.values, v)):
            cached[...] = cached[...].at[row, column].set(new, mode="drop", wrap_negative_indices=False)
        return self.attend(q, self.keys[...], self.values[...], context)


def paged(q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
    """The queries are a sequence's last, and each sees the keys up to its own position."""
    return jaxsoftmax.paged_attention(q, k, v, context.tables, context.lengths, layout="pages_first")


def ours(q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
    """Attends to a contiguous cache."""
    options = {"is_causal": True, "causal_alignment": "bottom_right"}
    return jaxsoftmax.flash_attention(q, k, v, key_value_seq_lengths=context.lengths, **options)


def theirs(q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
    """Attends by `jax.nn` with a mask `[B, 1, T, length]`."""
    sees = jnp.arange(k.shape[1]) <= context.positions[:, None, :, None]
    return jax.nn.dot_product_attention(q, k, v, mask=sees)


def draw(logits: jax.Array, seeds: jax.Array, lengths: jax.Array) -> jax.Array:
    """The next token of each sequence. The noise of a token depends on seed and position, and not on its rank."""
    p, tokens = jaxsoftmax.top_k_softmax(logits, TOP_K, normalize="top_k", scale=1 / TEMPERATURE)
    keys = jax.vmap(lambda seed, length: jax.random.fold_in(jax.random.key(seed), length))(seeds, lengths)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    best = jnp.argmax(jnp.log(p) + jnp.take_along_axis(noise, tokens, axis=-1), axis=-1, keepdims=True)
    return jnp.take_along_axis(tokens, best, axis=-1)[:, 0]


class Decoder:
    """The trained model with a cache in each block. It is compiled once for prompts and once for single tokens."""

    def __init__(self, model: GPT, size: Size, rows: int, columns: int, attend: Callable[..., jax.Array]):
        model = nnx.clone(model)
        for block in model.blocks:
            block.attend = nnx.data(Cache(size, rows, columns, attend))
        graph, self.weights, self.cache = nnx.split(model, nnx.Param, nnx.Cache)
        self.kilobytes = sum(x.nbytes for x in jax.tree.leaves(self.cache)) / 1e3

        @functools.partial(jax.jit, donate_argnums=1)
        def step(weights: Any, cache: Any, tokens: Any, lengths: Any, seeds: Any, tables: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graph, weights, cache)
            positions = lengths[:, None] + jnp.arange(-tokens.shape[1], 0)
            logits = model(tokens, Context(positions, lengths, tables), jnp.maximum(positions, 0))
            return draw(logits[:, -1], seeds, lengths), nnx.state(model, nnx.Cache)

        self.step = step

    def __call__(self, tokens: Any, lengths: Any, seeds: Any, tables: Any = None) -> jax.Array:
        """The tokens `[B]` that follow the sequences' last tokens `[B, T]`; padding comes before short sequences."""
        drawn, self.cache = self.step(self.weights, self.cache, tokens, lengths, seeds, tables)
        return drawn


@nnx.jit
def next_token(model: GPT, text: Any, lengths: Any, seeds: Any) -> jax.Array:
    logits = model(text, jnp.zeros_like(text), jnp.arange(LENGTH)[None])
    return draw(logits[jnp.arange(len(text)), lengths - 1], seeds, lengths)


def without_cache(model: GPT, requests: list[Request]) -> Texts:
    """Each request alone, the whole text for every token."""
    texts = []
    for request in requests:
        text = np.pad(request.prompt, (0, LENGTH - len(request.prompt)))
        for length in range(len(request.prompt), request.length):
            text[length] = next_token(model, text[None], np.array([length]), np.array([request.seed]))[0]
        texts.append(text[: request.length].tolist())
    return texts


def together(decoder: Decoder, requests: list[Request]) -> Texts:
    """All requests in one batch, until the last of them has its tokens."""
    lengths = np.array([len(request.prompt) for request in requests])
    seeds = np.array([request.seed for request in requests])
    prompts = np.stack([np.pad(request.prompt, (lengths.max() - len(request.prompt), 0)) for request in requests])
    drawn = [decoder(prompts, lengths, seeds)]
    for i in range(1, max(request.count for request in requests)):
        drawn.append(decoder(drawn[-1][:, None], lengths + i, seeds))
    rows = zip(requests, np.stack(drawn, axis=1), strict=True)
    return [[*request.prompt.tolist(), *row[: request.count].tolist()] for request, row in rows]


class Server:
    """Answers requests in a number of slots, with pages from a free list."""

    def __init__(self, decoder: Decoder, slots: int, pages: int):
        self.decoder = decoder
        self.free = list(range(pages))
        self.tables = np.zeros((slots, LENGTH // PAGE), np.int32)

    def __call__(self, requests: list[Request]) -> Texts:
        texts: Texts = [request.prompt.tolist() for request in requests]
        waiting = collections.deque(zip(requests, texts, strict=True))
        running: dict[int, tuple[Request, list[int]]] = {}  # by slot
        while waiting or running:
            for slot in range(len(self.tables)):
                if slot not in running and waiting and waiting[0][0].pages <= len(self.free):
                    running[slot] = waiting.popleft()
                    self._join(slot, running[slot][0])
            if not running:
                raise SystemExit(f"A request needs {waiting[0][0].pages} pages, and {len(self.free)} are free.")
            self._step(running)
            for slot, (request, text) in list(running.items()):
                if len(text) == request.length:
                    self.free += self.tables[slot, : request.pages].tolist()
                    del running[slot]
        return texts

    def _join(self, slot: int, request: Request) -> None:
        """Takes pages, and fills them from the prompt, a chunk at a time; the prompt's last token is left to a step."""
        table, prompt = self.tables[slot], request.prompt[:-1]
        table[: request.pages] = [self.free.pop() for _ in range(request.pages)]
        for end in range(len(prompt), 0, -CHUNK)[::-1]:
            chunk = np.pad(prompt[max(0, end - CHUNK) : end], (max(0, CHUNK - end), 0))
            self.decoder(chunk[None], np.array([end]), np.array([request.seed]), table[None])

    def _step(self, running: dict[int, tuple[Request, list[int]]]) -> None:
        """Draws a token for every sequence. A slot without one has length 0."""
        tokens, lengths, seeds = np.zeros((3, len(self.tables)), np.int32)
        for slot, (request, text) in running.items():
            tokens[slot], lengths[slot], seeds[slot] = text[-1], len(text), request.seed
        drawn = np.asarray(self.decoder(tokens[:, None], lengths, seeds, self.tables))
        for slot, (_, text) in running.items():
            text.append(int(drawn[slot]))


def timed(name: str, generate: Callable[[list[Request]], Texts], requests: list[Request], kilobytes: float) -> Texts:
    """The texts of a second run; the first one compiles."""
    generate(requests)
    start = time.perf_counter()
    texts = generate(requests)
    speed = sum(request.count for request in requests) / (time.perf_counter() - start)
    print(f"{name:<26}{speed:>12.0f}{kilobytes:>12.0f}", flush=True)
    return texts


def check(texts: dict[str, Texts], free: list[int], pages: int) -> None:
    """Ends the program, with status 1, if texts differ or pages were lost."""
    for name, found in texts.items():
        if found != texts["no cache"]:
            raise SystemExit(f"The texts differ: no cache, {name}.")
    if sorted(free) != list(range(pages)):
        raise SystemExit(f"Of {pages} pages these are free at the end: {sorted(free)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=800, help="of training")
    parser.add_argument("--tokens", type=int, default=96, help="that the longest request draws")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--pages", type=int, default=24, help="in the pool")
    parser.add_argument("--compare", action="store_true", help="a contiguous cache with `jax.nn`'s attention too")
    args = parser.parse_args()

    jax.config.update("jax_default_matmul_precision", "highest")
    size = SIZES[args.size]
    requests = [
        Request(np.frombuffer(prompt, np.uint8).astype(np.int32), args.tokens - seed % 3 * args.tokens // 4, seed)
        for seed, prompt in enumerate(PROMPTS * 2)
    ]
    if max(request.length for request in requests) > LENGTH:
        parser.error(f"a prompt and its tokens have more than {LENGTH} positions")

    run = packed_gpt.train(packed_gpt.ours, size, args.steps, LENGTH, rows=4)
    print(f"Trained on {jax.devices()[0].device_kind}: loss {run.losses[0]:.2f}, then {run.losses[-10:].mean():.2f}.\n")

    print(f"Requests at once: 1, {len(requests)} with a contiguous cache, up to {args.slots} with pages.")
    print(f"{'':<26}{'tokens/s':>12}{'cache, kB':>12}")
    texts = {"no cache": timed("no cache", functools.partial(without_cache, run.model), requests, 0)}
    for name, attend in {"contiguous cache": ours, "contiguous cache, jax.nn": theirs}.items():
        if attend is ours or args.compare:
            decoder = Decoder(run.model, size, len(requests), LENGTH, attend)
            texts[name] = timed(name, functools.partial(together, decoder), requests, decoder.kilobytes)
    decoder = Decoder(run.model, size, args.pages, PAGE, paged)
    server = Server(decoder, args.slots, args.pages)
    texts["pages"] = timed("pages", server, requests, decoder.kilobytes)

    for text in texts["pages"][:3]:
        print("\n---\n" + bytes(text).decode("utf-8", "replace"))
    check(texts, server.free, args.pages)
    print(f"\nThe {len(requests)} texts are the same in {len(texts)} ways, and all {args.pages} pages are free again.")


if __name__ == "__main__":
    main()
