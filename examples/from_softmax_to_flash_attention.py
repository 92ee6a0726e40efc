"""From softmax to flash attention: each algorithm in plain NumPy, checked against the library.

The loops below are the traffic: what a loop indexes comes from memory, and what is computed inside it stays on chip. On
a GPU, softmax and attention are limited by that traffic, so each step here removes accesses to memory.

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax" (https://arxiv.org/abs/1805.02867),
which counts accesses for each element of a row; Dao et al. 2022, "FlashAttention" (https://arxiv.org/abs/2205.14135);
Dao 2023, "FlashAttention-2" (https://arxiv.org/abs/2307.08691).
"""

import re
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from pallas_kernels import custom_vjp

State = tuple[np.floating, np.floating]  # m, the maximum so far, and l, the sum of exp(x - m)
Array = np.ndarray
LADDER = ("naive", "warp", "block", "online", "cluster")  # kernels of pallas_kernels.softmax; docs/ladder.md


# Step 1: the definition.


def naive_softmax(x: Array) -> Array:
    """Algorithm 1 of 2018: sum, then divide. Two reads and one write.

    `exp` of a float32 above 88 is infinite, and the result is then NaN.
    """
    total = x.dtype.type(0)
    for value in x:  # read 1
        total += np.exp(value)
    y = np.empty_like(x)
    for i, value in enumerate(x):  # read 2, and the write
        y[i] = np.exp(value) / total
    return y


# Step 2: what every framework computes.


def safe_softmax(x: Array) -> Array:
    """Algorithm 2 of 2018: maximum, sum, divide. Three reads and one write, so four accesses.

    Every exponent is at most 0, so nothing overflows. The factor exp(-m) cancels between numerator and denominator.
    """
    m = x.dtype.type(-np.inf)
    for value in x:  # read 1
        m = np.maximum(m, value)
    total = x.dtype.type(0)
    for value in x:  # read 2
        total += np.exp(value - m)
    return _divide(x, (m, total))  # read 3, and the write


def _divide(x: Array, state: State) -> Array:
    m, total = state
    y = np.empty_like(x)
    for i, value in enumerate(x):
        y[i] = np.exp(value - m) / total
    return y


# Step 3: the maximum and the sum in one pass.


def merge(a: State, b: State) -> State:
    """Equation 4 of 2018: the state of a row from the states of its two parts.

    A sum is relative to a maximum; multiplied by exp(old - m), it is relative to m. The merge is associative and
    commutative, which is why a row may be split over threads, CTAs or devices. In the paper a row that begins with -inf
    gives NaN, because -inf - -inf is NaN; the second line prevents that.
    """
    m = np.maximum(a[0], b[0])
    if m == -np.inf:
        return m, a[1] + b[1]
    return m, a[1] * np.exp(a[0] - m) + b[1] * np.exp(b[0] - m)


EMPTY: State = (np.float32(-np.inf), np.float32(0.0))  # the state of no elements, which merges without effect


def online_softmax(x: Array) -> Array:
    """Algorithm 3 of 2018, element by element: one element has the state (x, 1). Two reads and one write."""
    state = EMPTY
    for value in x:  # read 1
        state = merge(state, (value, x.dtype.type(1)))
    return _divide(x, state)  # read 2, and the write


# Step 4: blocks, so that many elements are reduced at once.


def blocked_online_softmax(x: Array, block: int) -> Array:
    """Section 3.1 of 2018: each block has a state of its own, and the states merge. Two reads and one write.

    The blocks do not depend on each other, so different warps or CTAs may reduce them. If the row also stays on chip
    until it is written, the second read is gone: that is what the kernels warp, block and cluster do.
    """
    state = EMPTY
    for start in range(0, len(x), block):
        tile = x[start : start + block]  # read 1; the rest of this iteration is on chip
        m = tile.max()
        weights = np.exp(tile - m) if m > -np.inf else np.zeros_like(tile)
        state = merge(state, (m, weights.sum()))
    return _divide(x, state)  # read 2, and the write


# Step 5: attention. The output is a third component of the state.


def attention(q: Array, k: Array, v: Array) -> Array:
    """softmax(Q K^T) V as it is written: the scores and the weights, `[T, S]`, are in memory."""
    scores = q @ k.T
    return np.stack([safe_softmax(row) for row in scores]) @ v


def flash_attention(q: Array, k: Array, v: Array, *, rows: int, cols: int) -> tuple[Array, Array]:
    """Algorithm 1 of 2022, with the paper's line numbers: the scores are never in memory.

    A block of `rows` queries meets a block of `cols` keys. O, l and m are in memory between two such meetings, because
    the outer loop is over the keys. Returns O, `[T, D]`, and the logsumexp m + log(l), `[T]`.
    """
    queries = len(q)
    o = np.zeros((queries, v.shape[1]), q.dtype)  # line 2: O = 0, l = 0 and m = -inf, in memory
    l = np.zeros(queries, q.dtype)
    m = np.full(queries, -np.inf, q.dtype)
    for j in range(0, len(k), cols):  # lines 3 to 5: a block of keys and values
        k_j, v_j = k[j : j + cols], v[j : j + cols]  # line 6: load K_j and V_j
        for i in range(0, queries, rows):  # line 7: a block of queries
            at = slice(i, i + rows)
            q_i, o_i, l_i, m_i = q[at], o[at], l[at], m[at]  # line 8: load Q_i, O_i, l_i and m_i
            s_ij = q_i @ k_j.T  # line 9: the scores of this block
            m_ij = s_ij.max(1)  # line 10: the block's own maximum, weights and sum
            p_ij = np.exp(s_ij - m_ij[:, None])
            l_ij = p_ij.sum(1)
            m_new = np.maximum(m_i, m_ij)  # line 11: merge, with the two rescaling factors
            old, new = np.exp(m_i - m_new), np.exp(m_ij - m_new)
            l_new = old * l_i + new * l_ij
            # Line 12: O_i was divided by l_i, so it is multiplied by it, added to, and divided by l_new.
            o[at] = ((old * l_i)[:, None] * o_i + new[:, None] * (p_ij @ v_j)) / l_new[:, None]
            l[at], m[at] = l_new, m_new  # line 13: write l_i and m_i
    return o, m + np.log(l)


# Step 6: what the library's kernel does.


def flash_attention_2(q: Array, k: Array, v: Array, *, rows: int, cols: int) -> tuple[Array, Array]:
    """Algorithm 1 of 2023: the outer loop is over the queries, so that O, l and m stay in registers.

    Different CTAs take different blocks of queries. The division by l comes once, at the end. The loop over the keys is
    the mainloop of `pallas_kernels/attention/forward.py`; what follows it is the epilogue.
    """
    out, logsumexp = np.empty((len(q), v.shape[1]), q.dtype), np.empty(len(q), q.dtype)
    for i in range(0, len(q), rows):  # line 3: a block of queries, which one CTA takes
        q_i = q[i : i + rows]  # line 4
        m, l, o = np.full(len(q_i), -np.inf, q.dtype), np.zeros(len(q_i), q.dtype), np.zeros((len(q_i), v.shape[1]))
        for j in range(0, len(k), cols):  # line 6: the mainloop
            s = q_i @ k[j : j + cols].T  # lines 7 and 8
            m_new = np.maximum(m, s.max(1))  # line 9
            p, rescale = np.exp(s - m_new[:, None]), np.exp(m - m_new)
            l = rescale * l + p.sum(1)
            o = rescale[:, None] * o + p @ v[j : j + cols]  # line 10
            m = m_new
        out[i : i + rows] = o / l[:, None]  # line 12: the epilogue
        logsumexp[i : i + rows] = m + np.log(l)  # line 13
    return out, logsumexp


def check_softmax() -> None:
    x = (np.random.default_rng(0).normal(size=1000) * 5).astype(np.float32)
    truth = np.asarray(jaxsoftmax.softmax(jnp.asarray(x)))
    algorithms: dict[str, tuple[int, Callable[[Array], Array]]] = {
        "naive": (3, naive_softmax),
        "safe": (4, safe_softmax),
        "online": (3, online_softmax),
        "online, blocks of 32": (3, lambda x: blocked_online_softmax(x, 32)),
    }
    print(f"{'softmax':<22}{'accesses':>9}{'largest difference from the library':>38}")
    for name, (accesses, f) in algorithms.items():
        y = f(x)
        np.testing.assert_allclose(y, truth, rtol=1e-4)
        print(f"{name:<22}{accesses:>9}{np.abs(y - truth).max():>38.1e}")
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(naive_softmax(x + np.float32(100))).any()
    np.testing.assert_allclose(online_softmax(x + np.float32(100)), truth, rtol=1e-4)
    print("With 100 added to every logit, naive gives NaN and online gives the same probabilities.")


def check_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, d)).astype(np.float32) for n, d in ((48, 16), (80, 16), (80, 8)))
    operands = (jnp.asarray(x)[:, None] for x in (q, k, v))  # [length, heads, head_dim]
    out, lse = jaxsoftmax.flash_attention(*operands, scale=1.0, return_residual=True)
    out, lse = np.asarray(out)[:, 0], np.asarray(lse)[:, 0]
    print(f"\n{'attention':<22}{'scores in memory':>17}{'largest difference from the library':>38}")
    for name, f in {"FlashAttention": flash_attention, "FlashAttention-2": flash_attention_2}.items():
        found, logsumexp = f(q, k, v, rows=16, cols=32)
        np.testing.assert_allclose(found, out, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(logsumexp, lse, rtol=1e-5)
        print(f"{name:<22}{0:>17}{np.abs(found - out).max():>38.1e}")
    found = attention(q, k, v)
    np.testing.assert_allclose(found, out, rtol=1e-4, atol=1e-5)
    print(f"{'as written':<22}{q.shape[0] * k.shape[0]:>17}{np.abs(found - out).max():>38.1e}")


def time_kernels(kernels: dict[str, Callable[[jax.Array], jax.Array]], x: jax.Array) -> None:
    """Prints each kernel's median time by the host's clock, or why it does not take `x`."""
    print(f"\nsoftmax of {x.shape[0]} x {x.shape[1]} {x.dtype} on {jax.devices()[0].device_kind}:")
    for name, f in kernels.items():
        call = jax.jit(f)
        try:
            jax.block_until_ready(call(x))
        except NotImplementedError as error:
            reason = re.search(rf"\b{name}: ([^;]*)", str(error))  # the error lists every kernel's reason
            print(f"  {name:<8} does not take these rows: {reason[1] if reason else error}")
            continue
        seconds = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(10):
                y = call(x)
            jax.block_until_ready(y)
            seconds.append((time.perf_counter() - start) / 10)
        moved = 2 * x.size * x.dtype.itemsize  # one read and one write: the least that softmax can do
        print(f"  {name:<8}{np.median(seconds) * 1e6:>10.1f} us {moved / np.median(seconds) / 1e12:>8.2f} TB/s")


def time_ladder() -> None:
    """The kernels of docs/ladder.md on rows that most take, and on rows that only the last ones take."""
    for rows, cols in ((65536, 1024), (4096, 32768), (1024, 131072)):
        x = jax.random.normal(jax.random.key(0), (rows, cols), jnp.float16)
        time_kernels({name: lambda x, name=name: custom_vjp.softmax(x, 1.0, name) for name in LADDER}, x)


def main() -> None:
    check_softmax()
    check_attention()
    if jax.default_backend() == "gpu":
        time_ladder()
    else:
        print("\nNo GPU here: docs/ladder.md has the times of the kernels on an H200.")


if __name__ == "__main__":
    main()
