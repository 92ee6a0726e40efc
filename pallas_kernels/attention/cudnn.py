"""Attention by cuDNN, where no kernel of this package runs: XLA's custom calls, with our semantics around them.

`jax.nn.dot_product_attention(implementation="cudnn")` makes the same calls, but returns the logsumexp in 16 bits and
keeps no residuals for a gradient that is asked for later. Called by `jax.ffi`, cuDNN returns the logsumexp in float32
and takes it, and the output, for the gradient.

This is added around cuDNN, which lacks it:

    a query that sees no key    out = 0, lse = -inf; in the gradient its `d_out` is 0 and its lse 0
    sinks                       lse' = log(exp(lse) + exp(sink)), out' = out * exp(lse - lse')
    other masks                 a bias, of a large negative number for pairs that are hidden

With lse' and out', cuDNN's gradient has P = exp(logits - lse') and delta = rowsum(d_out * out'): that of the call with
sinks.
"""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention import mask, tiles
from pallas_kernels.attention.problem import (
    DTYPES,
    Attention,
    Op,
    Operands,
    Rules,
    operand_names,
    rule_that_is_data,
    sum_to,
)
from pallas_kernels.attention.tiles import Chunk
from pallas_kernels.hardware import Device
from pallas_kernels.monoid import Stats, combine, decay, log_normalizer

# The operands that this file names; any other declines the call.
_TAKEN = {
    "query", "key", "value", "bias", "mask", "query_lengths", "key_lengths", "query_segments", "key_segments",
    "query_positions", "key_positions", "sinks",
}  # fmt: skip

_BY_LENGTH = (0, 2, 1, 3)  # [batch, heads, length, dim], in memory as [batch, length, heads, dim]

# The logit of a hidden pair. cuDNN subtracts two of them, and the difference may not overflow.
_HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}

# Without lengths, cuDNN's gradient takes exp(-lse) in a half tile past the last key, and drops it by a product with 0:
# NaN where a row's logits are all below -88.
_TILE_KEYS, _HALF_TILE_KEYS = 128, 64


def unsupported_device(device: Device) -> str | None:
    """Says why a device does not run cuDNN's attention."""
    if _capability(device) < (8, 0):
        return f"cuDNN's attention needs compute capability 8.0; {device.name} has {device.compute_capability}"
    return None


def unsupported(problem: Attention, device: Device) -> str | None:
    """Says why cuDNN does not take the problem, or cannot give it our semantics."""
    hopper = _capability(device) >= (9, 0)
    widest = 256 if hopper else 128
    if problem.cap or problem.soft_cap is not None:
        return "cuDNN has no soft cap"
    if reason := rule_that_is_data(problem, "cuDNN takes"):
        return reason
    if others := [name for name in operand_names(problem) if name not in _TAKEN]:
        return f"cuDNN is not given {', '.join(others)}"
    if problem.dtype.name not in DTYPES:
        return f"cuDNN takes {' and '.join(DTYPES)}; the operands are {problem.dtype.name}"
    for name in ("head_dim", "value_dim"):
        if not 0 < (size := getattr(problem, name)) <= widest or size % 8:
            return f"cuDNN takes {name} up to {widest} in multiples of 8; it is {size}"
    if problem.head_dim != problem.value_dim and not hopper:
        return "cuDNN takes values of another width than keys from compute capability 9.0 on"
    if 0 in (problem.batch, problem.query_heads, problem.query_length, problem.key_length):
        return "there is nothing to do"
    if problem.scale == 0:
        return "with a scale of 0 there is no product"
    if problem.bias is not None and problem.bias_dtype != problem.dtype:
        return f"cuDNN takes a bias of the operands' dtype; it is {problem.bias_dtype}"
    if problem.batch_invariant:
        return "nothing promises that cuDNN's results are batch invariant"
    return _no_gradient(problem) if problem.op is Op.BACKWARD else None


def _no_gradient(problem: Attention) -> str | None:
    """Says why cuDNN does not take a backward problem whose forward problem it takes."""
    if problem.query_length == problem.key_length == 1:
        return "cuDNN gives no gradients of one query and one key"
    if problem.deterministic:
        return "nothing promises that cuDNN's gradients repeat bit by bit"
    if problem.lse_gradient:
        return "cuDNN has no gradient of the logsumexp"
    if problem.bias_gradient and problem.bias and problem.bias[2:] != (problem.query_length, problem.key_length):
        return "cuDNN gives the gradient of a bias that differs for all queries and keys alone"
    if _has_bias(problem) and (problem.query_length % 2 or problem.key_length % 2):
        return "beside a bias or a mask, cuDNN gives gradients for even lengths alone"
    return None


def _capability(device: Device) -> tuple[int, ...]:
    return tuple(map(int, device.compute_capability.split(".")))


def _is_native(problem: Attention) -> bool:
    """Says whether cuDNN hides by itself what indices and lengths hide."""
    left, right = mask.window_bounds(problem)
    if problem.align_ends or problem.positions:
        return False
    window = left is None or (left <= 0 and problem.query_length <= problem.key_length)
    return (left, right) == (None, None) or (right == 0 and window)


def _has_bias(problem: Attention) -> bool:
    """Says whether the call has a bias, of the user's or for pairs that cuDNN does not hide by itself."""
    return bool(problem.bias or problem.mask or problem.segments) or not _is_native(problem)


def _has_lengths(problem: Attention) -> bool:
    """Says whether cuDNN is given lengths: the caller's, or whole ones, lest it reads a half tile past the last key."""
    of_caller = _is_native(problem) and (problem.query_lengths or problem.key_lengths)
    return of_caller or (problem.op is Op.BACKWARD and problem.key_length % _TILE_KEYS == _HALF_TILE_KEYS)


def forward(problem: Attention, config: None, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Runs the forward pass: the output `[B, T, N, D]` and the logsumexp `[B, N, T]`."""
    ops = _by_name(problem, operands)
    # cuDNN reads the logits of keys and queries past their lengths, and hides them, but a weight of 0 hides no NaN.
    ready = _prepare(problem, ops, cleared=("value",))
    rows = problem.batch, problem.query_heads, problem.query_length
    results = [((*rows, problem.value_dim), problem.dtype), (rows, jnp.float32)]
    given = [ready.query, ready.key, ready.value, *ready.bias, *ready.lengths]
    out, lse = _call(problem, given, results, by_length=1)
    out = out.transpose(_BY_LENGTH)
    if problem.sinks:
        sink = ops.sinks.astype(jnp.float32)[None, :, None]
        whole = log_normalizer(Stats(*combine((lse, jnp.ones_like(lse)), (sink, jnp.ones_like(sink)))))
        out, lse = (out * jnp.swapaxes(decay(lse, whole), 1, 2)[..., None]).astype(out.dtype), whole
    if ready.alive is None:
        return out, lse
    alive = jnp.broadcast_to(ready.alive, rows)
    by_query = jnp.swapaxes(alive, 1, 2)[..., None]
    return jnp.where(by_query, out, jnp.zeros((), out.dtype)), jnp.where(alive, lse, -jnp.inf)


def backward(problem: Attention, config: None, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the backward pass: the gradients of query, key, value, of a bias where it is asked for, and of sinks."""
    ops, (out, lse, d_out, _) = _by_name(problem, operands[:-4]), operands[-4:]
    ready = _prepare(problem, ops, cleared=("query", "key", "value"))
    nothing = lse == -jnp.inf
    if mask.may_see_nothing(problem):
        by_query = jnp.swapaxes(nothing, 1, 2)[..., None]
        d_out, out = (jnp.where(by_query, jnp.zeros((), x.dtype), x) for x in (d_out, out))
    stats, bias = jnp.where(nothing, 0.0, lse), ready.bias
    batch, queries, keys = problem.batch, problem.query_length, problem.key_length
    results: list[tuple[tuple[int, ...], Any]] = [
        ((batch, problem.query_heads, queries, problem.head_dim), problem.dtype),
        ((batch, problem.key_heads, keys, problem.head_dim), problem.dtype),
        ((batch, problem.key_heads, keys, problem.value_dim), problem.dtype),
    ]
    if problem.bias_gradient:
        results.append((bias[0].shape, problem.dtype))
    given = [ready.query, ready.key, ready.value, stats, d_out, *bias, out, *ready.lengths]
    d_query, d_key, d_value, *d_bias = _call(problem, given, results, by_length=3)
    gradients = [x.transpose(_BY_LENGTH) for x in (d_query, d_key, d_value)]
    gradients[0] = -gradients[0] if problem.scale < 0 else gradients[0]
    if problem.bias_gradient and problem.bias:
        assert ready.hidden is not None  # as the call has a bias
        gradients.append(sum_to(jnp.where(ready.hidden, 0, d_bias[0]), problem.bias))
    if problem.sinks:
        delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
        weight = jnp.where(nothing, 0.0, decay(ops.sinks.astype(jnp.float32)[None, :, None], lse))
        gradients.append(-(weight * jnp.swapaxes(delta, 1, 2)).sum((0, 2)).astype(ops.sinks.dtype))
    return tuple(gradients)


def _by_name(problem: Attention, operands: tuple[jax.Array, ...]) -> Operands:
    return Operands(**dict(zip(operand_names(problem), operands, strict=True)))


class _Ready(NamedTuple):
    """The operands as cuDNN takes them, the pairs that a bias hides, and the queries that see a key (None: all)."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: list[jax.Array]
    lengths: list[jax.Array]
    hidden: jax.Array | None
    alive: jax.Array | None  # [B|1, N|1, T]


def _prepare(problem: Attention, ops: Operands, *, cleared: tuple[str, ...]) -> _Ready:
    """Makes cuDNN's operands. The `cleared` ones are 0 past their lengths, where the caller may have NaN."""
    queries, keys = (Chunk(0, n, n) for n in (problem.query_length, problem.key_length))
    cleared = cleared if _is_native(problem) else ("query", "key", "value")  # a bias hides no NaN of the logits
    sides = {"query": (ops.query_lengths, queries), "key": (ops.key_lengths, keys), "value": (ops.key_lengths, keys)}
    query, key, value = (
        tiles.without_padding(getattr(ops, name), *side) if name in cleared else getattr(ops, name)
        for name, side in sides.items()
    )
    bias, hidden, lengths = [], None, []
    alive = _alive_by_index(problem, ops) if mask.may_see_nothing(problem) else None
    if _has_bias(problem):
        seen = tiles.visible(ops, Rules(**problem.of_kernels), queries, keys)
        seen = jnp.ones((1, 1, 1, 1), bool) if seen is None else seen
        added = jnp.zeros((), problem.dtype)
        if ops.bias is not None:
            seen, added = seen & (ops.bias != -jnp.inf), ops.bias
        shape = jnp.broadcast_shapes(seen.shape, (1, 1, queries.size, keys.size))
        hidden = jnp.broadcast_to(~seen, shape)
        bias = [jnp.where(hidden, jnp.asarray(_HIDDEN[problem.dtype.name], problem.dtype), added)]
        alive = ~hidden.all(-1)
    if _has_lengths(problem):
        batch = (problem.batch,)
        given = (ops.query_lengths, queries), (ops.key_lengths, keys)
        # cuDNN divides by the sum of no weights where a length is 0; `alive` is False there.
        lengths = [
            jnp.full(batch, chunk.size, jnp.int32) if x is None else x.clip(1, chunk.size).astype(jnp.int32)
            for x, chunk in given
        ]
    return _Ready(-query if problem.scale < 0 else query, key, value, bias, lengths, hidden, alive)


def _alive_by_index(problem: Attention, ops: Operands) -> jax.Array:
    """Says which queries see a key by their index and lengths, `[B|1, 1, T]`."""
    at = jnp.arange(problem.query_length, dtype=jnp.int32)[None, None]
    left, right = mask.window_bounds(problem)
    counts = [None if x is None else x[:, None, None] for x in (ops.query_lengths, ops.key_lengths)]
    last = problem.key_length - 1 if counts[1] is None else jnp.minimum(counts[1], problem.key_length) - 1
    last = last if right is None else jnp.minimum(last, at + right)
    alive = jnp.asarray(last >= (0 if left is None else jnp.maximum(at + left, 0)))
    return alive if counts[0] is None else alive & (at < counts[0])


def _call(
    problem: Attention, operands: list[jax.Array], results: list[tuple[Any, Any]], *, by_length: int
) -> list[jax.Array]:
    """Calls cuDNN. The first `by_length` results are `[batch, heads, length, dim]`, and lie by length in memory."""
    backward = problem.op is Op.BACKWARD
    target = "__cudnn$fmhaScaleBiasSoftmax" if _has_bias(problem) else "__cudnn$fmhaSoftmax"
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    layouts = [_BY_LENGTH if i < by_length else tuple(range(len(x.shape))) for i, x in enumerate(types)]
    call = jax.ffi.ffi_call(
        target + "Backward" * backward,
        [*types, jax.ShapeDtypeStruct((0,), jnp.uint8)],  # the last is the workspace; XLA sets its size
        output_layouts=[*layouts, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": _config(problem)}),
    )
    *arrays, _ = call(*operands)
    return arrays


# (contracting axes, batch axes) of both sides of a product: Q K^T and P V; dS^T Q, dS K, P^T dO and dO V^T.
_BY_HEAD = (0, 1), (0, 2)
_PRODUCTS = {
    Op.FORWARD: {
        "bmm1": ((3, 3), ((0, 2), (0, 2))),
        "bmm2": ((3, 1), _BY_HEAD),
    },
    Op.BACKWARD: {
        "bmm1_grad_gemm1": ((2, 1), _BY_HEAD),
        "bmm1_grad_gemm2": ((3, 1), _BY_HEAD),
        "bmm2_grad_gemm1": ((2, 1), _BY_HEAD),
        "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
    },
}


def _config(problem: Attention) -> dict[str, Any]:
    """Describes the call as XLA's protocol buffer `CudnnfMHABackendConfig`."""
    left, right = mask.window_bounds(problem) if _is_native(problem) else (None, None)
    words = ["PADDING"] * _has_lengths(problem) + ["CAUSAL"] * (right is not None)
    shape = problem.batch, problem.query_heads, problem.query_length, problem.key_length
    products = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(axes[0])],
            "rhs_contracting_dimensions": [str(axes[1])],
            "lhs_batch_dimensions": [str(d) for d in batch[0]],
            "rhs_batch_dimensions": [str(d) for d in batch[1]],
        }
        for name, (axes, batch) in _PRODUCTS[problem.op].items()
    }
    return products | {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": abs(problem.scale),
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[problem.dtype.name],
            "dimensions": [str(n) for n in shape],
            "tuple_shapes": [],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "_".join(words) or "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0 if left is None else 1 - left,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
