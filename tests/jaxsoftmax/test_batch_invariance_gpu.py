"""Bits on a Hopper GPU: of a row alone and in batches under `batch_invariant()`, of identical rows without it.

Of all functions, dtypes and widths each meets each other in some case, as a case costs a compilation for each shape.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import batch_invariant

pytestmark = pytest.mark.gpu

BF16, F16, F32 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))
cross_entropy = jaxsoftmax.softmax_cross_entropy_with_integer_labels
Call = Callable[[jax.Array, jax.Array, jax.Array], Any]


def pulled_back(f: Callable[..., jax.Array]) -> Call:
    """Value and gradient; the cotangent of a row is its weight, times the row's own values where that has many."""

    def call(x: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x: f(x, labels, weights), x)
        ct = weights if y.ndim == 1 else weights[:, None] * jnp.sin(x.astype(jnp.float32))
        return y, *pull(ct.astype(y.dtype))

    return call


def weighted(x: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
    """What one kernel writes: losses and their gradient."""

    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        each = cross_entropy(x, labels, weights=weights, label_smoothing=0.1)
        return each.sum(), each

    (_, each), gradient = jax.value_and_grad(total, has_aux=True)(x)
    return each, gradient


FUNCTIONS: dict[str, Call] = {
    "softmax": pulled_back(lambda x, *_: jaxsoftmax.softmax(x)),
    "log_softmax": pulled_back(lambda x, *_: jaxsoftmax.log_softmax(x, scale=0.7)),
    "logsumexp": lambda x, *_: jaxsoftmax.logsumexp(x, -1),
    "loss": pulled_back(lambda x, labels, _: cross_entropy(x, labels, z_loss=1e-3)),
    "weighted": weighted,
    "lse": pulled_back(lambda x, labels, _: sum(cross_entropy(x, labels, return_lse=True))),
    "top_k": lambda x, *_: jaxsoftmax.top_k_softmax(x, 5),
    "top_k_of_k": lambda x, *_: jaxsoftmax.top_k_softmax(x, 40, normalize="top_k", scale=0.7),
}

CASES = [
    ("softmax", BF16, 100), ("loss", F32, 100), ("softmax", F32, 1765), ("log_softmax", BF16, 1765),
    ("top_k", F16, 1765), ("logsumexp", F32, 4096), ("top_k_of_k", BF16, 4096), ("weighted", F16, 4096),
    ("log_softmax", F16, 32768), ("loss", BF16, 32768), ("softmax", F16, 50257), ("lse", F32, 50257),
    ("top_k", BF16, 50257), ("logsumexp", BF16, 128256), ("loss", BF16, 128256), ("weighted", F32, 128256),
    ("top_k_of_k", F32, 128256), ("softmax", F32, 300000), ("logsumexp", BF16, 300000), ("log_softmax", BF16, 700000),
]  # fmt: skip
MOST = 2**27  # logits of a batch


def rows_of(rows: int, cols: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, labels and weights."""
    x, y, w = jax.random.split(jax.random.key(cols), 3)
    labels, weights = jax.random.randint(y, (rows,), 0, cols), jax.random.normal(w, (rows,))
    return 4 * jax.random.normal(x, (rows, cols), dtype), labels, weights


@jax.jit
def equal_bits(got: Any, want: Any) -> jax.Array:
    words = lambda x: jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jnp.array([(words(a) == words(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)])


def assert_same_bits(got: Any, want: Any, words: str) -> None:
    assert np.asarray(equal_bits(got, want)).all(), words


@pytest.mark.parametrize("name, dtype, cols", CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_a_row_alone_and_in_batches(name: str, dtype: Any, cols: int) -> None:
    rows = min(4096, MOST // cols)
    operands = rows_of(rows, cols, dtype)
    number = CASES.index((name, dtype, cols))
    with batch_invariant():
        call = jax.jit(FUNCTIONS[name])
        want = call(*operands)
        some = 3 if number % 2 else 128
        for start, count in ((0, 1), (1, 1), (rows - 1, 1), (7, some), (rows - some, some)):
            part = slice(start, start + count)
            got = call(*(x[part] for x in operands))
            assert_same_bits(got, jax.tree.map(lambda x, part=part: x[part], want), f"rows {start} to {start + count}")
        order = jax.random.permutation(jax.random.key(1), rows)
        got = call(*(x[order] for x in operands))
    assert_same_bits(got, jax.tree.map(lambda x: x[order], want), "permuted")


def test_rows_along_another_axis() -> None:
    x = rows_of(64, 3000, BF16)[0]
    with batch_invariant():
        call = jax.jit(jaxsoftmax.softmax, static_argnums=1)
        assert_same_bits(call(x.T, 0).T, call(x, 1), "transposed")
        assert_same_bits(call(x.reshape(4, 16, 3000)[1], 1), call(x, 1)[16:32], "part")


@pytest.mark.parametrize("cols, dtype", [(1765, BF16), (50257, BF16), (1765, F32), (33333, F32)], ids=str)
def test_identical_rows_of_a_call_have_identical_bits(cols: int, dtype: Any) -> None:
    """Also where nothing is asked for; at all alignments."""
    operands = [jnp.repeat(x[:1], 300, axis=0) for x in rows_of(2, cols, dtype)]
    for name in ("softmax", "log_softmax", "logsumexp", "loss", "weighted", "top_k"):
        found = jax.jit(FUNCTIONS[name])(*operands)
        first = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), found)
        assert_same_bits(found, first, name)


LENGTH, HEADS, KEY_HEADS = 512, 4, 2
# Of each kind of call the sizes of chunks that are held against one shot.
ATTENTION: list[tuple[str, int, tuple[int, int]]] = [
    ("causal", 64, (1, 100)), ("causal", 128, (16, 100)), ("causal", 256, (128, 100)),
    ("lengths", 64, (16, 128)), ("lengths", 128, (1, 100)), ("lengths", 256, (1, 16)),
    ("window", 128, (100, 1)), ("sinks", 64, (100, 16)), ("cap", 128, (128, 1)),
    ("bias", 64, (100, 16)),
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"local_window_size": (70, 0)},
    "sinks": {"sinks": jnp.linspace(-1.0, 2.0, HEADS)},
    "cap": {"logits_soft_cap": 10.0},
}


def chunk(kind: str, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, start: int, size: int) -> Any:
    """Queries `start ... start + size` and the keys up to theirs, in the call that a server would make of it."""
    stop = start + size
    q = q[:, start:stop]
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right", **OPTIONS.get(kind, {})}
    if kind in ("lengths", "cap"):  # in a cache of keys of one size, with what is not there yet
        lengths = jnp.full(len(q), stop)
        late = (jnp.arange(LENGTH) >= stop)[:, None, None]
        k, v = (jnp.where(late, jnp.nan, x) for x in (k, v))
        return attend(q, k, v, key_value_seq_lengths=lengths, **options)
    if kind == "bias":
        options["bias"] = bias[:, :, start:stop, :stop]
    return attend(q, k[:, :stop], v[:, :stop], **options)


attend = jax.jit(
    functools.partial(jaxsoftmax.flash_attention, return_residual=True, implementation="mosaic_gpu"),
    static_argnames=("is_causal", "causal_alignment", "local_window_size", "logits_soft_cap"),
)


def inputs(head_dim: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(head_dim), 4)
    shapes = [(3, LENGTH, heads, head_dim) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    qkv = [2 * jax.random.normal(key, shape, BF16) for key, shape in zip(keys, shapes, strict=False)]
    return [*qkv, jax.random.normal(keys[3], (1, HEADS, LENGTH, LENGTH), BF16)]


@pytest.mark.parametrize("kind, head_dim, sizes", ATTENTION, ids=str)
def test_prefill_in_chunks_and_in_one_shot(kind: str, head_dim: int, sizes: tuple[int, int]) -> None:
    q, k, v, bias = inputs(head_dim)
    with batch_invariant():
        want = chunk(kind, q, k, v, bias, 0, LENGTH)
        for size in sizes:
            # Without lengths each chunk has a number of keys, and a kernel, of its own.
            starts = range(0, LENGTH - size + 1, 37 + size) if kind in ("lengths", "cap") else (LENGTH - 84 - size,)
            for start in starts:
                got = chunk(kind, q[1:2], k[1:2], v[1:2], bias, start, size)
                of = jax.tree.map(lambda x, a=start, b=start + size: x[1:2, a:b], want)
                assert_same_bits(got, of, f"queries {start} to {start + size}")


def test_a_batch_of_sequences_and_each_alone() -> None:
    q, k, v, _ = inputs(128)
    with batch_invariant():
        many = [jnp.concatenate([x[::-1], x]) for x in (q, k, v)]
        want = attend(*many)
        for i in (0, 2):
            got = attend(*(x[i : i + 1] for x in (q, k, v)))
            assert_same_bits(got, jax.tree.map(lambda x, i=i: x[3 + i : 4 + i], want), f"sequence {i}")
        assert_same_bits(jax.tree.map(lambda x: x[:3], want), jax.tree.map(lambda x: x[:2:-1], want), "in other places")


@pytest.mark.parametrize("head_dim", [64, 256])
def test_deterministic_gradients_repeat(head_dim: int) -> None:
    q, k, v, _ = inputs(head_dim)

    @jax.jit
    def gradients(*qkv: jax.Array) -> Any:
        call = functools.partial(jaxsoftmax.flash_attention, is_causal=True, deterministic_gradients=True)
        out, pull = jax.vjp(call, *qkv)
        return pull(jnp.cos(out.astype(jnp.float32)).astype(out.dtype))

    with batch_invariant():
        want = gradients(q, k, v)
        for _ in range(5):
            assert_same_bits(gradients(q, k, v), want, "another run")
