"""Flash attention: the public function, which canonicalises, validates and binds."""

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp

from jaxsoftmax._attention import checks, sequence
from jaxsoftmax._attention.checks import CausalAlignment, FlaxModule
from jaxsoftmax._attention.primitives import attend
from jaxsoftmax._attention.sharding import unify_shardings
from jaxsoftmax._core import checks as core_checks
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike, DTypeLike, Implementation, PrecisionLike
from jaxsoftmax._core.memory import in_device_memory
from pallas_kernels.attention import reference
from pallas_kernels.attention.problem import Operands, Rules

type WindowSize = ArrayLike | tuple[ArrayLike | None, ArrayLike | None]


class _Keywords(TypedDict, total=False):
    """The keywords that every overload has."""

    scale: ArrayLike | None
    is_causal: ArrayLike
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: WindowSize | None
    implementation: Implementation | None
    causal_alignment: CausalAlignment
    logits_soft_cap: ArrayLike | None
    sinks: ArrayLike | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    query_positions: ArrayLike | None
    key_value_positions: ArrayLike | None
    deterministic_gradients: bool
    precision: PrecisionLike
    dtype: DTypeLike | None
    dropout_rate: float
    dropout_rng: jax.Array | None
    broadcast_dropout: bool
    deterministic: bool
    module: FlaxModule | None
    force_fp32_for_softmax: bool
    qk_attn_weights_einsum: object
    attn_weights_value_einsum: object
    einsum_dot_general: Callable[..., jax.Array] | None
    promote_dtype: Callable[..., Sequence[ArrayLike]] | None
    input_positions: object


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **rest: Unpack[_Keywords],
) -> jax.Array: ...
@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **rest: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **rest: Unpack[_Keywords],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@public
@in_device_memory
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: ArrayLike = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize | None = None,
    return_residual: bool = False,
    implementation: Implementation | None = None,
    causal_alignment: CausalAlignment = "top_left",
    logits_soft_cap: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_positions: ArrayLike | None = None,
    key_value_positions: ArrayLike | None = None,
    deterministic_gradients: bool = False,
    precision: PrecisionLike = None,
    dtype: DTypeLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    module: FlaxModule | None = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: object = None,
    attn_weights_value_einsum: object = None,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    promote_dtype: Callable[..., Sequence[ArrayLike]] | None = None,
    input_positions: object = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention, `softmax(scale * query key^T + bias) value`, as `jax.nn.dot_product_attention` does.

    Below, T is the number of queries, S that of keys, N and K the heads of query and key, H and D the head dimensions
    of query and value. Head n of the query reads head `n // (N // K)` of key and value: multi-head attention for
    K = N, multi-query for K = 1, grouped in between.

    16-bit inputs are multiplied as they are and accumulated in float32; weights are rounded to the inputs' dtype before
    they meet the values. float32 is multiplied as `jax.nn` multiplies it: by `precision`, or by JAX's default, which is
    TF32 on GPUs; "highest" is full float32.

    On a GPU the first of these that takes a call runs it, and `explain_attention` says which: a kernel (Hopper), cuDNN
    (16 bits, from Ampere on), XLA with all logits in memory, and XLA tile by tile. `logits_memory` bounds the memory of
    the last two. Other platforms run XLA, in small tiles.

    Masking: a key takes part if `mask`, `is_causal`, the window, both lengths and the segment ids all allow it. A query
    that sees no key (beyond its length, fully masked, or with logits of only -inf) has output 0, logsumexp -inf and no
    gradient; `jax.nn` gives it the mean of all values, unless it is beyond its length. Queries, keys and values beyond
    their lengths may be NaN; any other NaN or +inf in a logit makes its row NaN, and NaN in a value spreads to every
    query of its sequence, as a weight of 0 does not cancel it. Empty arrays are fine, and S = 0 leaves no key to see.

    Under `batch_invariant()` a kernel's output and logsumexp of a query are the same bits in any batch, beside any
    other queries, and whatever keys there are beyond those that it sees.

    Derivatives of every order exist, in forward and reverse mode, with respect to query, key, value, bias, sinks and
    arrays for scale and soft cap; the logsumexp has its derivative too. The first reverse pass is one fused kernel, and
    forward mode and higher orders are XLA programs. Under `jax.checkpoint` the results have the names
    `"flash_attention_out"` and `"flash_attention_lse"`: a policy that saves both runs the forward kernel once.

    Memory beyond inputs and outputs is the logsumexp, O(T), for every order of derivative: nothing is of size T * S,
    keys and values are not repeated for groups of heads or under `jax.vmap`, nor is a bias or mask broadcast along
    heads, queries or keys. The exceptions are XLA on a GPU, `module`, dropout, the gradient of a bias by the kernel,
    and masks beside cuDNN, which become biases.

    Flax: `nnx.MultiHeadAttention(..., attention_fn=flash_attention)`, and so for `linen`, work unchanged. Dropout drops
    what Flax's own function would for the same `dropout_rng`: a boolean for each weight is in memory, or one for each
    pair with `broadcast_dropout`, and the kernels run twice, with and without it as a mask. Where the weights are to be
    sown in `module`, XLA computes them in memory of size T * S.

    Source: Dao et al. 2022, "FlashAttention", https://arxiv.org/abs/2205.14135; Dao 2023, "FlashAttention-2",
    https://arxiv.org/abs/2307.08691; Shah et al. 2024, "FlashAttention-3", https://arxiv.org/abs/2407.08608.

    Args:
        query: `[*batch, T, N, H]`, bfloat16, float16, float32 or float64.
        key: `[*batch, S, K, H]` of the same dtype; N is a multiple of K.
        value: `[*batch, S, K, D]` of the same dtype.
        bias: Real numbers that broadcast to `[*batch, N, T, S]`, added to the scaled (and capped) logits in the dtype
            of accumulation. Its gradient has its shape.
        mask: Booleans that broadcast to `[*batch, N, T, S]`: True where a query sees a key. Only beside arguments that
            Flax's layers pass, from `dropout_rng` down, may they be numbers: 1, or 0 for hidden, as Flax makes them.
        scale: The logits' factor, `1 / sqrt(H)` by default. A number is fused in. An array that broadcasts to query
            (traced, or one factor per head) is multiplied into it beforehand, rounded to its dtype, and differentiable;
            as is, outside `jit`, a number after the first four (docs/numbers.md).
        is_causal: Whether a query sees only keys up to its own position, as `causal_alignment` counts it. An array of
            one bool may be traced, as in a loop over layers; the call then has positions (docs/numbers.md).
        query_seq_lengths: Integers `[*batch]` of any width: how many queries count. More than T count as T, fewer than
            none as none.
        key_value_seq_lengths: Integers `[*batch]`: how many keys and values count.
        local_window_size: How many keys to each side of its position a query sees: one number, or `(left, right)`, in
            which None is unbounded, as are 2^30 and more. Either may be an array of one integer, which may be traced,
            or both one array of two; one below 0 is unbounded.
        return_residual: Whether to return the logsumexp too.
        implementation: None for the fastest there is, "xla", or "mosaic_gpu", which raises rather than falls back
            (forward mode and higher orders excepted, which have no kernel).
        causal_alignment: Which key is at the position of query i, for `is_causal` and the window: "top_left" for key i,
            as in `jax.nn`, or "bottom_right" for key `i + S - T`, as in FlashAttention, which suits a cache of keys.
            There a sequence's lengths take the place of S and T.
        logits_soft_cap: Bends logits before bias and mask, to `cap * tanh(logits / cap)`. An array of one number may be
            traced, is differentiable and not checked, and has no kernel.
        sinks: A logit for each query head, `[N]`, which joins the denominator only.
        query_segment_ids: Integers `[*batch, T]`; a query sees keys of its own segment. For packed sequences: the
            kernels skip the tiles of other documents than theirs, all of them if each document is in one piece. Ids of
            64 bits are compared as such; they are sorted first, which int32 saves.
        key_value_segment_ids: Integers `[*batch, S]`; those of the queries by default, if T = S.
        query_positions: Integers that broadcast to `[*batch, T]`: where each query is, for `is_causal` and the window,
            in place of its index. In any order, and of any width: those beyond 2^30 count as 2^30, those below -2^30 as
            that. Where the kernels' tiles hold positions that are close together, they skip more of them.
        key_value_positions: Integers that broadcast to `[*batch, S]`, likewise. Without it, keys are at their indices,
            as are queries without `query_positions`, moved by `causal_alignment`.
        deterministic_gradients: Whether the kernel's gradients come out the same, bit by bit, every time. Without it
            the query's gradient is summed in whatever order blocks finish: it varies by roundings of float32, and comes
            sooner. Outputs, and all that XLA computes, repeat in any case.
        precision: The precision of XLA's matrix products, as in `jax.lax.dot`.
        dtype: Converts query, key and value.
        dropout_rate: The share of the weights that is dropped unless `deterministic`. The logsumexp is that without
            dropout.
        dropout_rng: A random key for dropout.
        broadcast_dropout: Whether batch and heads drop the same weights.
        deterministic: Whether nothing is dropped (Flax's name; see also `deterministic_gradients`).
        module: A Flax module in which to sow the weights, as "attention_weights".
        force_fp32_for_softmax: Whether the weights are sown in float32, in place of the inputs' dtype. The softmax is
            float32 or wider in any case.
        qk_attn_weights_einsum: Accepted for Flax; must be None.
        attn_weights_value_einsum: Accepted for Flax; must be None.
        einsum_dot_general: Accepted for Flax; must be None or `jax.lax.dot_general`.
        promote_dtype: Accepted for Flax; must be None or Flax's own function, which gives query, key and value one
            dtype.
        input_positions: Accepted for Flax; must be None. Rotate query and key before the call.

    Returns:
        `[*batch, T, N, D]` of the inputs' dtype; with `return_residual` a pair of it and the logsumexp of each row's
        logits (natural logarithm, sinks included), `[*batch, T, N]`, float32, or float64 for float64.

    Raises:
        TypeError: a dtype is not one of the above, query, key and value differ in theirs, or an argument is of no type
            that fits.
        ValueError: an argument's shape or value does not fit, or NumPy's segment ids do not fit into JAX's integers.
        NotImplementedError: `implementation="mosaic_gpu"` and no kernel takes the call, raised when it is compiled; or
            a Flax argument that attention in one kernel cannot honour.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 5, 4, 8))
    >>> out, lse = flash_attention(x, x[:, :, :2], x[:, :, :2], is_causal=True, return_residual=True)
    >>> out.shape, lse.shape
    ((2, 5, 4, 8), (2, 5, 4))
    """
    checks.absent(input_positions, qk_attn_weights_einsum, attn_weights_value_einsum, einsum_dot_general)
    q, k, v = checks.inputs(checks.promoted(promote_dtype, (query, key, value), dtype), dtype)
    core_checks.choice(checks.NAME, "causal_alignment", causal_alignment, get_args(CausalAlignment))
    implementation = core_checks.implementation(checks.NAME, implementation)
    place, module = checks.by_place(is_causal, local_window_size), checks.sown_in(module, implementation)
    of_flax = (dropout_rng, module, einsum_dot_general, promote_dtype)
    flags_of_flax = deterministic or force_fp32_for_softmax or not broadcast_dropout
    dropout = None if deterministic else checks.dropout(dropout_rng, dropout_rate, broadcast_dropout)
    given = {
        "bias": bias,
        "mask": checks.mask_of_flax(mask) if flags_of_flax or any(x is not None for x in of_flax) else mask,
        "query_lengths": query_seq_lengths,
        "key_lengths": key_value_seq_lengths,
        "query_segments": query_segment_ids,
        "key_segments": key_value_segment_ids,
        "query_positions": query_positions,
        "key_positions": key_value_positions,
        "sinks": sinks,
    }
    others = checks.operands(given, q, k)
    by_length = "query_lengths" in others or "key_lengths" in others
    align_ends = place.matters and by_length and causal_alignment == "bottom_right"
    end = k.shape[-3] - q.shape[-3] if causal_alignment == "bottom_right" and not align_ends else 0
    given_positions = {name: others.pop(name) for name in ("query_positions", "key_positions") if name in others}
    if place.is_data or (given_positions and place.matters):
        arrays = {"query": q, "key": k} | others
        counts = q.shape[-3], k.shape[-3]
        others |= sequence.of_indices(arrays, Rules(align_ends=align_ends), (end, 0), counts) | given_positions
        others |= place.operands(q, others["query_positions"]) if place.is_data else {}
        align_ends, end = False, 0
    q, factor = checks.scaled(q, scale)
    soft_cap, cap = checks.soft_cap(logits_soft_cap, q)
    is_causal = place.is_causal is not False and "window_sizes" not in others
    rules = Rules(
        scale=factor,
        soft_cap=soft_cap,
        causal_offset=end if is_causal else None,
        window=place.constant_window,
        window_offset=end if place.constant_window != (None, None) else 0,
        align_ends=align_ends,
        deterministic=deterministic_gradients,
        batch_invariant=core_checks.is_batch_invariant(),
        logits_memory=checks.logits_memory_now(),
        # Lowering runs outside the caller's default_matmul_precision context.
        precision=core_checks.precision(checks.NAME, precision) or jax.config.jax_default_matmul_precision,
    )
    operands = Operands(q, k, v, **others, **cap)
    out, lse = attend(checks.with_dropout(operands, dropout), rules, implementation)
    out = out if dropout is None else (out / (1.0 - dropout.rate)).astype(out.dtype)
    if module is not None:
        sown = _weights_in_memory(operands, rules, lse).astype(jnp.float32 if force_fp32_for_softmax else q.dtype)
        # linen and nnx both have this collection; nnx's type for it has the same name.
        module.sow("intermediates", "attention_weights", sown)
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out


def _weights_in_memory(operands: Operands, rules: Rules, lse: jax.Array) -> jax.Array:
    """Computes the weights, before any are dropped, `[*batch, N, T, S]`."""
    names = operands.present
    arrays = unify_shardings(names, [getattr(operands, name) for name in names], in_parts=False)
    return _weights(Operands(**dict(zip(names, arrays, strict=True))), rules, lse)


# As one program, of which debug_infs does not see the logits that a mask excludes.
_weights = jax.jit(reference.weights, static_argnames="rules", inline=True)
