"""The algorithm the kernels grew from, one head in plain NumPy: the loops are the traffic, what is inside is on chip.

Source: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, Algorithm 1 (with the mask of Algorithm 2 left out).
"""

import numpy as np


def flash_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, *, rows: int, cols: int
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1: softmax(Q K^T) V without ever writing Q K^T, `rows` queries against `cols` keys at a time.

    The paper's O, l and m live in device memory between visits, as its outer loop is over the keys; swapping the loops,
    as FlashAttention-2 and our kernels do, keeps them on chip. Returns O `[T, D]` and the logsumexp m + log(l), `[T]`.
    """
    length = len(query)
    out = np.zeros((length, value.shape[1]), query.dtype)  # line 2: O = 0, l = 0, m = -inf
    total = np.zeros(length, query.dtype)
    top = np.full(length, -np.inf, query.dtype)
    for j in range(0, len(key), cols):  # line 5: for each block of keys and values
        keys, values = key[j : j + cols], value[j : j + cols]  # line 6: load K_j, V_j
        for i in range(0, length, rows):  # line 7: for each block of queries
            at = slice(i, i + rows)  # line 8: load Q_i, O_i, l_i, m_i
            scores = query[at] @ keys.T  # line 9: S_ij = Q_i K_j^T
            block_top = scores.max(1)  # line 10: the block's m, P and l
            weights = np.exp(scores - block_top[:, None])
            block_total = weights.sum(1)
            new_top = np.maximum(top[at], block_top)  # line 11: m_new and l_new
            old, new = np.exp(top[at] - new_top), np.exp(block_top - new_top)
            new_total = old * total[at] + new * block_total
            # Line 12: O_i = (l_i e^(m_i - m_new) O_i + e^(m_block - m_new) P_ij V_j) / l_new
            fresh = new[:, None] * (weights @ values)
            out[at] = ((old * total[at])[:, None] * out[at] + fresh) / new_total[:, None]
            total[at], top[at] = new_total, new_top  # line 13
    return out, top + np.log(total)


def flash_attention_2(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, *, rows: int, cols: int
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 of FlashAttention-2 (arXiv:2307.08691): the loops swapped, and one division, at the end.

    The state (m, l, O) of a block of queries is `pallas_kernels.monoid.combine`'s, with the output as third component.
    """
    out, logsumexp = np.empty((len(query), value.shape[1]), query.dtype), np.empty(len(query), query.dtype)
    for i in range(0, len(query), rows):  # line 3: each block of queries is by itself
        q = query[i : i + rows]  # line 4
        top, total, o = np.full(len(q), -np.inf, q.dtype), np.zeros(len(q), q.dtype), 0.0  # line 5
        for j in range(0, len(key), cols):  # line 6
            scores = q @ key[j : j + cols].T  # lines 7 and 8
            new_top = np.maximum(top, scores.max(1))  # line 9
            weights, decay = np.exp(scores - new_top[:, None]), np.exp(top - new_top)
            total = decay * total + weights.sum(1)
            o = decay[:, None] * o + weights @ value[j : j + cols]  # line 10
            top = new_top
        out[i : i + rows] = o / total[:, None]  # line 12
        logsumexp[i : i + rows] = top + np.log(total)  # line 13
    return out, logsumexp
