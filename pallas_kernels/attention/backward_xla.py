"""Launches the backward kernels: makes their operands and results, with XLA's work before and after them."""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from pallas_kernels import monoid
from pallas_kernels.attention import backward_common, mask
from pallas_kernels.attention.backward_common import capped_bias
from pallas_kernels.attention.problem import AnyBackwardConfig, Attention, operand_names
from pallas_kernels.hardware import WARPGROUP_ROWS
from pallas_kernels.mosaic import reduce, wgmma
from pallas_kernels.mosaic.fast_math import LOG2E
from pallas_kernels.mosaic.pipeline import Scratch

CHUNK = WARPGROUP_ROWS  # keys of a warpgroup, and columns of a swizzled 16-bit tile
TILE = (CHUNK, CHUNK)  # keys and queries of a step, where a warpgroup has all keys


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def padded_dims(problem: Attention) -> tuple[int, int]:
    """Rounds `head_dim` and `value_dim` up for the matrix products; the config is for the larger one, the former."""
    value_dim = _up(problem.value_dim, CHUNK)
    return max(_up(problem.head_dim, CHUNK), value_dim), value_dim


def by_name(problem: Attention, operands: tuple[jax.Array, ...]) -> SimpleNamespace:
    """Returns the operands by name."""
    names = (*operand_names(problem), "out", "lse", "d_out", "d_lse")
    return SimpleNamespace(**dict(zip(names, operands, strict=True)))


def with_split_heads(problem: Attention, config: AnyBackwardConfig) -> Attention:
    """Returns `problem` as if each split of a group of query heads had keys and values of its own."""
    return dataclasses.replace(problem, key_heads=problem.key_heads * config.head_splits)


def without_keys(problem: Attention, ops: SimpleNamespace) -> jax.Array:
    """Says which rows, `[B, N, T]`, get no gradient: those that see no key, and those past the length."""
    nothing = ops.lse == -jnp.inf
    if problem.query_lengths:
        nothing |= (jnp.arange(problem.query_length)[None, :] >= ops.query_lengths[:, None])[:, None, :]
    return nothing


def tiles_without_keys(nothing: jax.Array, config: AnyBackwardConfig) -> jax.Array:
    """Says which tiles of queries, `[B, N, tiles]`, have one of the rows without a key, `[B, N, T]`."""
    missing = -nothing.shape[2] % config.block_q
    nothing = jnp.pad(nothing, ((0, 0), (0, 0), (0, missing)))
    return nothing.reshape(*nothing.shape[:2], -1, config.block_q).any(3).astype(jnp.int32)


def row_delta(ops: SimpleNamespace, nothing: jax.Array) -> jax.Array:
    """Computes `delta = d_lse - rowsum(dO * O)`, `[B, N, T]`, so that `dLogits = P * (dO V^T + delta)`."""
    # Written as a product and a sum, not as a dot: XLA may give those to cuBLAS, and round.
    d_p = (ops.d_out.astype(jnp.float32) * ops.out.astype(jnp.float32)).sum(-1)
    return jnp.where(nothing, 0.0, ops.d_lse - jnp.swapaxes(d_p, 1, 2))


def inputs(
    problem: Attention, config: AnyBackwardConfig, ops: SimpleNamespace, nothing: jax.Array, delta: jax.Array
) -> dict[str, jax.Array]:
    """Makes the kernel's operands, by name; queries come last, as a tile's columns, but for a bias that TMA copies."""
    b, n, rows = problem.batch, problem.query_heads, _up(problem.query_length, config.block_q)
    arrays = dict(
        query=ops.query,
        key=ops.key,
        value=ops.value,
        d_out=ops.d_out,
        lse=_pad(jnp.where(nothing, jnp.inf, ops.lse * LOG2E), (b, n, rows), jnp.inf),
        delta=_pad(delta, (b, n, rows)),
    )
    if mask.may_see_nothing(problem):
        arrays["without_keys"] = tiles_without_keys(nothing, config)
    if problem.bias:
        arrays["bias"] = ops.bias if config.bias_stages else jnp.swapaxes(ops.bias, 2, 3)
    for name in ("query_lengths", "key_lengths"):
        if hasattr(ops, name):
            arrays[name] = getattr(ops, name)
    return arrays | what_is_seen(problem, config, ops)


def what_is_seen(problem: Attention, config: AnyBackwardConfig, ops: SimpleNamespace) -> dict[str, jax.Array]:
    """Makes the mask's bits, ids, positions, the tiles of queries for each tile of keys, and the order of dQ."""
    arrays: dict[str, jax.Array] = {}
    blocks, seen = (config.block_kv, config.block_q), []
    if problem.mask:
        arrays["mask"] = mask.pack_bits(ops.mask, 2)
        blocks_of = mask.every_block if config.visits_hidden else mask.bitmask_blocks
        seen.append(blocks_of(arrays["mask"], 2, problem.mask[2], *blocks))
    if problem.segments:
        seen.append(mask.segment_blocks(ops.key_segments, ops.query_segments, *blocks))
    if problem.positions:
        bounds = backward_common.query_bounds(problem)
        seen.append(mask.position_blocks(ops.key_positions, ops.query_positions, *blocks, bounds))
    for name in ("segments", "positions"):
        if getattr(problem, name):
            arrays[f"query_{name}"] = getattr(ops, f"query_{name}")[:, None, None, :]
            arrays[f"key_{name}"] = getattr(ops, f"key_{name}")[:, None, :, None]
    if seen:
        arrays["spans"] = spans = backward_common.spans(problem, config, ops, functools.reduce(mask.both, seen))
        if config.ordered_dq:
            arrays["dq_position"] = backward_common.dq_positions(problem, config, spans)
    return arrays


def outputs(
    problem: Attention, config: AnyBackwardConfig, inputs: dict[str, jax.Array]
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.Array]]:
    """Gives the results' types, by name: of arrays that are written whole, and of zeros that are written in part."""
    b, n, rows = inputs["lse"].shape
    head_dim, _ = padded_dims(problem)
    kv_dtype = problem.dtype if config.head_splits == 1 else jnp.float32
    kv_shape = problem.batch, problem.key_length, problem.key_heads
    whole = {
        "d_key": jax.ShapeDtypeStruct((*kv_shape, problem.head_dim), kv_dtype),
        "d_value": jax.ShapeDtypeStruct((*kv_shape, problem.value_dim), kv_dtype),
    }
    workspaces = {}
    dq_sum = jax.ShapeDtypeStruct((b, n, rows // CHUNK, head_dim // CHUNK, *wgmma.SQUARE), jnp.float32)
    if config.fused_dq_cast:
        whole["d_query"] = jax.ShapeDtypeStruct(inputs["query"].shape, problem.dtype)
    if backward_common.first_stores(problem, config):
        whole["dq_sum"] = dq_sum
    elif not config.fused_dq_cast:
        workspaces["dq_sum"] = jnp.zeros(dq_sum.shape, dq_sum.dtype)
    if config.ordered_dq:
        workspaces["dq_semaphore"] = jnp.zeros((config.dq_writers, b, n, rows // config.block_q), jnp.int32)
    if problem.bias_gradient:
        # With a soft cap they are written from registers, by whole tiles.
        logits = _up(problem.key_length, config.block_kv if capped_bias(problem) else 1), rows
        workspaces["d_logits"] = jnp.zeros((b, n, *logits), problem.dtype)
    return whole, workspaces


def gradients(problem: Attention, config: AnyBackwardConfig, written: dict[str, jax.Array]) -> list[jax.Array]:
    """Makes the gradients of query, key and value from the kernel's results."""

    def over_splits(sums: jax.Array) -> jax.Array:
        if config.head_splits == 1:
            return sums
        batch, rows, heads, columns = sums.shape
        splits = sums.reshape(batch, rows, heads // config.head_splits, config.head_splits, columns)
        return splits.sum(3).astype(problem.dtype)

    if "d_query" in written:
        d_query = written["d_query"]
    else:
        dq_sum = wgmma.rows_of_squares(written["dq_sum"])[:, :, : problem.query_length, : problem.head_dim]
        d_query = jnp.swapaxes((dq_sum * problem.scale).astype(problem.dtype), 1, 2)
    return [d_query, over_splits(written["d_key"]), over_splits(written["d_value"])]


def bias_gradient(problem: Attention, ops: SimpleNamespace, d_logits: jax.Array) -> jax.Array:
    """Computes `dBias`: the gradient of the logits, `[B, N, S, T]` with padding, summed to the bias' shape."""
    assert problem.bias is not None
    d_logits = jnp.swapaxes(d_logits[:, :, : problem.key_length, : problem.query_length], 2, 3)
    axes = tuple(d for d in range(4) if problem.bias[d] == 1)
    return d_logits.astype(jnp.float32).sum(axes, keepdims=True).astype(ops.bias.dtype)


def sinks_gradient(ops: SimpleNamespace, nothing: jax.Array, delta: jax.Array) -> jax.Array:
    """Computes `dSink = sum(exp(sink - lse) * delta)` over the rows of each head."""
    weight = jnp.where(nothing, 0.0, monoid.decay(ops.sinks[None, :, None], ops.lse))
    return (weight * delta).sum((0, 2)).astype(ops.sinks.dtype)


def _pad(x: jax.Array, shape: tuple[int, ...], fill: float = 0) -> jax.Array:
    widths = [(0, to - at) for at, to in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, widths, constant_values=fill) if any(w for _, w in widths) else x


def launch(
    problem: Attention,
    config: AnyBackwardConfig,
    scratch: Scratch,
    body: Callable[[Attention, Any, SimpleNamespace, int], None],
    operands: tuple[jax.Array, ...],
    *,
    ctas: int,
    tile_counter: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Runs `body(problem, config, refs, ctas)` with XLA's share before and after it.

    `tile_counter`: of a dynamic scheduler.
    """
    ops = by_name(problem, operands)
    nothing = without_keys(problem, ops)
    delta = row_delta(ops, nothing)
    arrays = inputs(problem, config, ops, nothing, delta)
    whole, workspaces = outputs(problem, config, arrays)
    if tile_counter is not None:
        workspaces["tile_counter"] = tile_counter
    names = [*arrays, *workspaces, *whole, *scratch]

    def kernel(*refs: jax.Ref) -> None:
        body(problem, config, SimpleNamespace(**dict(zip(names, refs, strict=True))), ctas)

    call = plgpu.kernel(
        kernel,
        out_type=list(whole.values()),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=list(scratch.values()),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        kernel_name="attention_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )

    def run(workspaces: list[jax.Array], *arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        return reduce.with_workspace(call, arrays, workspaces, list(whole.values()))

    # Each call needs a tile counter of its own, which `vmap` would share.
    run = run if tile_counter is None else sequential_vmap(run)
    results, left = run(list(workspaces.values()), *arrays.values())
    written = dict(zip(whole, results, strict=True)) | dict(zip(workspaces, left, strict=True))
    grads = gradients(problem, config, written)
    if problem.bias_gradient:
        grads.append(bias_gradient(problem, ops, written["d_logits"]))
    if problem.sinks:
        grads.append(sinks_gradient(ops, nothing, delta))
    return tuple(grads)
