"""Flash attention's backward in one pass: keys stay, queries stream past them, 5 matrix products a tile.

Each warpgroup holds the gradients of 64 keys and values in registers; the scores are computed transposed, so that
probabilities and score gradients leave the accumulator as a left operand in registers. Only the score gradients go
through shared memory, where the block's warpgroups share them out for dQ, which is summed in float32 in device memory.
Traffic: Q, dO once per block of keys, dQ added once per block of keys, in the L2 cache; K, V, dK, dV once.
Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import mosaic, scopes
from pallas_kernels.attention.backward_configs import BackwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.hardware import Device

CHUNK = 64  # keys of a warpgroup, and columns of a swizzled 16-bit tile
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA


def _recomputed(x: jax.Array) -> jax.Array:
    """`x`, whose history the compiler does not see: what is derived from it inside a loop stays inside."""

    def copy_scalar(ctx, x):
        word = ir.IntegerType.get_signless(32)
        y = llvm.inline_asm(word, [mosaic.scalar(x)], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(y, (), is_signed=True)

    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=mosaic.SPLAT)
    return plgpu.inline_mgpu(arg_types=(mosaic.SPLAT,), return_type=result)(copy_scalar)(x)


def unsupported(problem: Attention, device: Device) -> str | None:
    """Why the kernel does not take the problem."""
    return None


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(problem: Attention, config: BackwardConfig) -> dict[str, Any]:
    d, dv, w = problem.head_dim, problem.value_dim, config.warpgroups
    dtype, stages = problem.dtype, config.stages
    return dict(
        k=_tiled((w, d // CHUNK, CHUNK, CHUNK), dtype),
        v=_tiled((w, CHUNK, dv), dtype),
        q=_tiled((stages, config.block_q, d), dtype),
        do=_tiled((stages, config.block_q, dv), dtype),
        lse=plgpu.SMEM((stages, config.block_q), jnp.float32),
        delta=plgpu.SMEM((stages, config.block_q), jnp.float32),
        ds=_tiled((2, w, config.block_q // CHUNK, CHUNK, CHUNK), dtype),
        dq=_tiled((w, CHUNK, CHUNK), jnp.float32),
        kv_full=plgpu.Barrier(num_arrivals=w * (d // CHUNK) + w),
        q_full=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        do_full=plgpu.Barrier(num_barriers=stages),
        q_free=plgpu.Barrier(num_arrivals=w, num_barriers=stages),
        do_free=plgpu.Barrier(num_arrivals=w, num_barriers=stages),
    )


def _body(q, k, v, do, lse, delta, dq, dk, dv, s, *, problem: Attention, config: BackwardConfig):
    w, bq, bkv, stages = config.warpgroups, config.block_q, config.block_kv, config.stages
    d, value_dim = problem.head_dim, problem.value_dim
    group = problem.query_heads // problem.key_heads
    chunks = d // CHUNK
    batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "keys"))
    wg = lax.axis_index("warpgroup")
    first_key = block * bkv
    blocks_q = pl.cdiv(problem.query_length, bq)
    lo, hi, masked_end = 0, blocks_q, 0
    if problem.causal_offset is not None:
        lo = jnp.clip(lax.div(first_key - problem.causal_offset, bq), 0, blocks_q)
        masked_end = jnp.clip(lax.div(first_key + (bkv + bq - 2 - problem.causal_offset), bq), lo, blocks_q)
    if problem.key_length % bkv:
        last = (block == problem.key_length // bkv).astype(jnp.int32)
        masked_end = jnp.maximum(masked_end, last * blocks_q)

    @pl.when(wg == w)
    def _producer():
        plgpu.set_max_registers(24 if w == 2 else 32, action="decrease")
        for i in range(w):
            rows = pl.ds(first_key + i * CHUNK, CHUNK)
            for c in range(chunks):
                plgpu.copy_gmem_to_smem(
                    k.at[batch, rows, head, pl.ds(c * CHUNK, CHUNK)], s["k"].at[i, c], s["kv_full"]
                )
            plgpu.copy_gmem_to_smem(v.at[batch, rows, head], s["v"].at[i], s["kv_full"])

        def step(h, i, n):
            slot = lax.rem(n, stages)
            n_head = head * group + h
            rows = pl.ds(i * bq, bq)

            def wait(barrier):
                pl.when(n >= stages)(lambda: plgpu.barrier_wait(barrier.at[slot]))

            wait(s["q_free"])
            plgpu.copy_gmem_to_smem(q.at[batch, rows, n_head], s["q"].at[slot], s["q_full"].at[slot])
            plgpu.copy_gmem_to_smem(lse.at[batch, n_head, rows], s["lse"].at[slot], s["q_full"].at[slot])
            plgpu.copy_gmem_to_smem(delta.at[batch, n_head, rows], s["delta"].at[slot], s["q_full"].at[slot])
            wait(s["do_free"])
            plgpu.copy_gmem_to_smem(do.at[batch, rows, n_head], s["do"].at[slot], s["do_full"].at[slot])

        @pl.loop(0, group)
        def _heads(h):
            @pl.loop(lo, hi)
            def _blocks(i):
                step(h, i, h * (hi - lo) + (i - lo))

    @pl.when(wg < w)
    def _consumer():
        plgpu.set_max_registers({1: 248, 2: 240, 3: 160}[w], action="increase")
        plgpu.barrier_wait(s["kv_full"])
        tiles = (bq // CHUNK) * chunks // w  # of dQ, 64x64, for each warpgroup

        def step(h, i, dk_acc, dv_acc, masked):
            wg = _recomputed(lax.axis_index("warpgroup"))
            n = h * (hi - lo) + (i - lo)
            slot, turn = lax.rem(n, stages), lax.rem(n, 2)
            q_s, do_s = s["q"].at[slot], s["do"].at[slot]
            ds_s = s["ds"].at[turn]

            def scores(st_acc, dpt_acc):
                plgpu.barrier_wait(s["q_full"].at[slot])
                delta_row = plgpu.load(s["delta"].at[slot], layout=WGMMA.reduce(0), optimized=False)
                dpt_acc[...] = lax.broadcast_in_dim(delta_row, (CHUNK, bq), [1])
                for c in range(chunks):
                    plgpu.wgmma(st_acc, s["k"].at[wg, c], q_s.at[:, pl.ds(c * CHUNK, CHUNK)].T)
                plgpu.barrier_wait(s["do_full"].at[slot])
                plgpu.wgmma(dpt_acc, s["v"].at[wg], do_s.T)
                st = plgpu.wgmma_accumulator_load(st_acc, wait_n=1) * (problem.scale * LOG2E)
                lse_row = plgpu.load(s["lse"].at[slot], layout=WGMMA.reduce(0), optimized=False)
                if masked:
                    st = jnp.where(_visible(i), st, -jnp.inf)
                p = jnp.exp2(st - lax.broadcast_in_dim(lse_row, st.shape, [1]))
                plgpu.wgmma(dv_acc, p.astype(problem.dtype), do_s)
                dpt = plgpu.wgmma_accumulator_load(dpt_acc, wait_n=1)
                ds = (p * dpt).astype(problem.dtype)
                for c in range(bq // CHUNK):
                    ds_s[wg, c] = ds[:, c * CHUNK : (c + 1) * CHUNK]
                plgpu.commit_smem()
                scopes.sync_block(w)

                def dq_part(dq_acc):
                    at = wg * tiles
                    qc, dc = lax.div(at, chunks), lax.rem(at, chunks)
                    for j in range(w):
                        plgpu.wgmma(dq_acc, ds_s.at[j, qc].T, s["k"].at[j, dc])
                    plgpu.wgmma(dk_acc, ds, q_s)
                    part = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
                    plgpu.barrier_arrive(s["do_free"].at[slot])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    s["dq"][wg] = part
                    plgpu.commit_smem()
                    rows, columns = pl.ds(i * bq + qc * CHUNK, CHUNK), pl.ds(dc * CHUNK, CHUNK)
                    plgpu.copy_smem_to_gmem(
                        s["dq"].at[wg], dq.at[batch, head * group + h, rows, columns], reduction_op="add"
                    )

                pl.run_scoped(dq_part, plgpu.ACC((CHUNK, CHUNK), jnp.float32))

            pl.run_scoped(scores, plgpu.ACC((CHUNK, bq), jnp.float32), plgpu.ACC((CHUNK, bq), jnp.float32))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s["q_free"].at[slot])

        def _visible(i):
            keys = plgpu.broadcasted_iota(jnp.int32, (CHUNK, bq), 0, layout=WGMMA) + (first_key + wg * CHUNK)
            see = None
            if problem.causal_offset is not None:
                rows = plgpu.broadcasted_iota(jnp.int32, (CHUNK, bq), 1, layout=WGMMA) + i * bq
                see = keys <= rows + problem.causal_offset
            if problem.key_length % bkv:
                inside = keys < problem.key_length
                see = inside if see is None else see & inside
            return see

        def zeros(columns):
            return plgpu.layout_cast(jnp.zeros((CHUNK, columns), jnp.float32), WGMMA)

        def all_steps(accs):
            def loop(h, start, stop, masked):
                pl.loop(start, stop)(lambda i: step(h, i, *accs, masked))

            def of_head(h):
                if problem.causal_offset is not None or problem.key_length % bkv:
                    loop(h, lo, masked_end, True)
                    loop(h, masked_end, hi, False)
                else:
                    loop(h, lo, hi, False)

            of_head(0) if group == 1 else pl.loop(0, group)(of_head)

        dk_sum, dv_sum = pl.run_state(all_steps)((plgpu.ACC.init(zeros(d)), plgpu.ACC.init(zeros(value_dim))))
        scopes.sync_block(w)
        rows = pl.ds(first_key + wg * CHUNK, CHUNK)
        s["v"][wg] = dv_sum.astype(problem.dtype)
        for c in range(chunks):
            part = dk_sum[:, c * CHUNK : (c + 1) * CHUNK] * problem.scale
            s["k"][wg, c] = part.astype(problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["v"].at[wg], dv.at[batch, rows, head])
        for c in range(chunks):
            plgpu.copy_smem_to_gmem(s["k"].at[wg, c], dk.at[batch, rows, head, pl.ds(c * CHUNK, CHUNK)])
        plgpu.wait_smem_to_gmem(0)


def run(problem: Attention, config: BackwardConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the kernel."""
    query, key, value, out, lse, d_out, d_lse = operands
    bq = config.block_q
    padded = pl.cdiv(problem.query_length, bq) * bq
    pad = [(0, 0), (0, 0), (0, padded - problem.query_length)]
    delta = jnp.einsum("btnd,btnd->bnt", d_out.astype(jnp.float32), out.astype(jnp.float32)) - d_lse
    lse = jnp.pad(jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E), pad, constant_values=jnp.inf)
    delta = jnp.pad(-delta, pad)
    dq_sum = jax.new_ref(
        jnp.zeros((problem.batch, problem.query_heads, padded, problem.head_dim), jnp.float32)
    )
    scratch = _scratch(problem, config)

    def body(q, k, v, do, lse, delta, dq, dk, dv, *s):
        _body(
            q, k, v, do, lse, delta, dq, dk, dv, dict(zip(scratch, s, strict=True)), problem=problem, config=config
        )

    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)),
        grid=(problem.batch, problem.key_heads, pl.cdiv(problem.key_length, config.block_kv)),
        grid_names=("batch", "head", "keys"),
        scratch_types=list(scratch.values()),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="attention_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )
    dk, dv = kernel(query, key, value, d_out, lse, delta, dq_sum)
    dq = (dq_sum[...][:, :, : problem.query_length] * problem.scale).astype(query.dtype)
    return jnp.swapaxes(dq, 1, 2), dk, dv
