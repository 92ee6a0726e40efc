"""Every bound that is documented as a number: at it, and on both sides of it."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from pallas_kernels.attention import mask

X = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
Q, K = (np.zeros((2, length, heads, 8), np.float32) for length, heads in ((5, 4), (7, 2)))
PAGES, TABLES = np.zeros((2, 6, 8, 8), np.float32), np.array([[3, 5], [0, 2]])
LABELS, KEY = np.array([0, 2]), jax.random.key(0)
TINY32 = float(np.finfo(np.float32).tiny)
MOST = 2**31 - 1
TINY, ABOVE_1, BELOW_1 = 5e-324, math.nextafter(1, 2), math.nextafter(1, 0)

softmax = functools.partial(jaxsoftmax.softmax, X)
cross_entropy = functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, X)
linear = functools.partial(jaxsoftmax.linear_cross_entropy, X, X.T @ X)
attention = functools.partial(jaxsoftmax.flash_attention, Q, K, K)
paged = functools.partial(jaxsoftmax.paged_attention, Q[:, 0], PAGES, PAGES)
zigzag = functools.partial(jaxsoftmax.zigzag, X[0, :2], 0)


def of_shapes(loss: Any, *shapes: tuple[int, ...]) -> Any:
    labels = jax.ShapeDtypeStruct((1,), np.int32)
    return jax.eval_shape(loss, *(jax.ShapeDtypeStruct(shape, X.dtype) for shape in shapes), labels)


# A bound's name; the call; what it takes; what it refuses, the nearest of which is next to it.
BOUNDS: dict[str, tuple[Callable[[Any], Any], list[Any], list[Any]]] = {
    "axis of softmax": (softmax, [-2, 1], [-3, 2]),
    "axis of logsumexp": (lambda a: jaxsoftmax.logsumexp(X, a), [-2, 1], [-3, 2]),
    "axis of labels": (lambda a: jaxsoftmax.softmax_cross_entropy(X, X, a), [-2, 1], [-3, 2]),
    "axis of top_k": (lambda a: jaxsoftmax.top_k_softmax(X, 1, axis=a), [-2, 1], [-3, 2]),
    "k": (lambda k: jaxsoftmax.top_k_softmax(X, k), [0, 3], [-1, 4]),
    "states": (lambda n: jaxsoftmax.merge(*[jaxsoftmax.Stats(X, X)] * n), [1, 2], [0]),
    "labels": (lambda y: cross_entropy(np.array([0, y])), [0, 2], [-1, 3]),
    "labels of tokens": (lambda y: linear(np.array([0, y])), [0, 2], [-1, 3]),
    "smoothing": (lambda s: cross_entropy(LABELS, label_smoothing=s), [0, TINY, BELOW_1, 1], [-TINY, ABOVE_1]),
    "smoothing of tokens": (lambda s: linear(LABELS, label_smoothing=s), [0, TINY, BELOW_1, 1], [-TINY, ABOVE_1]),
    "cap": (lambda c: cross_entropy(LABELS, logits_soft_cap=c), [1e-30, 1e30], [0, -TINY, math.inf]),
    "cap of tokens": (lambda c: linear(LABELS, logits_soft_cap=c), [1e-30, 1e30], [0, -TINY, math.inf]),
    "cap of attention": (lambda c: attention(logits_soft_cap=c), [1e-30, 1e30], [0, -TINY, math.inf]),
    "cap of pages": (lambda c: paged(TABLES, LABELS, logits_soft_cap=c), [1e-30, 1e30], [0, -TINY, math.inf]),
    "z-loss": (lambda z: cross_entropy(LABELS, z_loss=z), [-1e30, 1e30], [math.inf, -math.inf]),
    "z-loss of tokens": (lambda z: linear(LABELS, z_loss=z), [-1e30, 1e30], [math.inf, -math.inf]),
    "columns": (lambda n: of_shapes(jaxsoftmax.softmax_cross_entropy_with_integer_labels, (1, n)), [MOST], [MOST + 1]),
    "columns of tokens": (lambda n: of_shapes(jaxsoftmax.linear_cross_entropy, (1, 1), (1, n)), [MOST], [MOST + 1]),
    "chunk size": (lambda n: linear(LABELS, chunk_size=n), [1, 2, 3, 2**40], [0, -1]),
    "dropout": (lambda p: attention(dropout_rate=p, dropout_rng=KEY), [0, TINY, BELOW_1], [-TINY, 1]),
    "window": (lambda w: attention(local_window_size=w), [0, (0, None), (None, 0)], [-1, (-1, 0), (0, -1)]),
    "window of pages": (lambda w: paged(TABLES, LABELS, local_window_size=w),
                        [0, 2**40, np.int64(2), np.int32(0)], [-1, np.int64(-1), (1, None)]),
    "axes before a bias": (lambda n: attention(bias=np.zeros((n, 1, 2, 4, 5, 7), X.dtype)), [1], [2, 0]),
    "bytes of logits": (lambda n: jaxsoftmax.logits_memory(n) and None, [0, 2**40, None], [-1]),
    "heads": (lambda n: jaxsoftmax.flash_attention(np.zeros((2, 5, n, 8), X.dtype), K, K), [2, 4], [0, 1, 3]),
    "a mask of Flax": (lambda m: attention(mask=np.full((5, 7), m), deterministic=True),
                       [0.0, 1.0], [-1.0, TINY32, 1 - 2**-24, 1 + 2**-23]),
    "devices": (zigzag, [1], [0, 2]),
    "rounds": (lambda n: zigzag(1, rounds=n), [1], [0, 2]),
    "axis of zigzag": (lambda a: jaxsoftmax.zigzag(X[:, :2], a, 1), [-2, 1], [-3, 2]),
    "axis of unzigzag": (lambda a: jaxsoftmax.unzigzag(X[:, :2], a, 1), [-2, 1], [-3, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_what_is_taken_and_refused(name: str) -> None:
    call, taken, refused = BOUNDS[name]
    for value in taken:
        jax.make_jaxpr(lambda value=value: call(value))()
    for value in refused:
        with pytest.raises(ValueError, match=r"^\w+: .*expected"):
            call(value)


def keys_seen(lse: Any) -> np.ndarray:
    """How many keys each query of equal logits has seen."""
    return np.rint(np.exp(lse)).astype(int)


@pytest.mark.parametrize("window", [None, 0, 1, (2**30 - 1, None), (None, 2**30 - 1), 2**30, 2**40])
def test_positions(window: Any) -> None:
    """As far as 2^30 each position is another; those beyond are as 2^30."""
    near = [sign * (2**30 + more) for sign in (-1, 1) for more in (-2, -1, 0, 1, 2)]
    places = np.array([*near, -(2**31), 2**31 - 1, 0, -1, 2**29, -(2**29)], np.int64)
    at = np.clip(places, -(2**30), 2**30)
    left, right = window if isinstance(window, tuple) else (window, window)
    # As documented, a window of 2^30 has no end.
    left, right = (math.inf if side is None or side >= 2**30 else side for side in (left, right))
    apart = at[None, :] - at[:, None]
    x = np.zeros((1, len(at), 1, 8), np.float32)
    for is_causal in (True, False):
        seen = (-left <= apart) & (apart <= (min(right, 0) if is_causal else right))
        call = functools.partial(
            jaxsoftmax.flash_attention, x, x, x, is_causal=is_causal, local_window_size=window, return_residual=True
        )
        for taken in (places, places.astype(np.int32), jnp.asarray(places, jnp.int32)):
            lse = call(query_positions=taken, key_value_positions=taken)[1][0, :, 0]
            np.testing.assert_array_equal(keys_seen(lse), seen.sum(1))


def test_bases_of_tiles_leave_room_for_a_window() -> None:
    """The kernels add a row of a tile and a window to the difference of two tiles' first positions, in int32."""
    firsts = np.arange(2**29 - 200, 2**29)
    ends = jnp.asarray(np.stack([firsts, -firsts]).reshape(-1, 1), jnp.int32)
    bases = np.asarray(mask.block_bases(ends, 1, 1)).reshape(2, -1).astype(np.int64)
    given = bases != mask.NO_BASE
    assert given.any()
    assert not given.all()
    assert 2 * np.abs(bases[given]).max() + 127 + (2**30 - 1) < 2**31


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths", "lengths"])
def test_lengths(name: str) -> None:
    """More than there are count as all, fewer than none as none; each number between is another."""
    room = {"query_seq_lengths": 5, "key_value_seq_lengths": 7, "lengths": 16}[name]

    def seen(length: Any) -> list[int]:
        given = np.array([length, 1])
        if name == "lengths":
            return keys_seen(paged(TABLES, given, return_residual=True)[1])[0, 0]
        lse = attention(**{name: given}, return_residual=True)[1]
        return keys_seen(lse)[0, 0, 0] if name == "key_value_seq_lengths" else (keys_seen(lse)[0, :, 0] > 0).sum()

    for length in (-(2**63), -(2**31) - 1, -(2**31), -1, 0, 1, room - 1, room, room + 1, 2**31 - 1, 2**31, 2**63 - 1):
        assert seen(length) == min(max(length, 0), room), length


@pytest.mark.parametrize("function", [jaxsoftmax.softmax, jaxsoftmax.log_softmax, jaxsoftmax.top_k_softmax])
def test_scale(function: Any) -> None:
    """A number that float32 holds is the logits' factor, zero and those below it too; a greater one is infinite."""
    call = functools.partial(function, k=2) if function is jaxsoftmax.top_k_softmax else function
    largest, x = float(np.finfo(np.float32).max), np.array([[2.0, 1.0]], np.float32)
    for scale, want in ((largest, [1, 0]), (0.0, [0.5, 0.5]), (-largest, [0, 1]), (1e-38, [0.5, 0.5])):
        found = jax.tree.leaves(call(x / 4, scale=scale))[0][0]
        found = np.exp(found) if function is jaxsoftmax.log_softmax else found
        want = sorted(want, reverse=True) if function is jaxsoftmax.top_k_softmax else want
        np.testing.assert_allclose(found, want, rtol=1e-6)
    for scale in (2 * largest, -2 * largest):
        assert np.isnan(jax.tree.leaves(call(np.zeros((1, 2), np.float32), scale=scale))[0]).all()
