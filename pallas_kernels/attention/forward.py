"""Flash attention, forward: softmax(Q K^T) V in one walk over the keys, scores never leaving the registers.

A block of threads holds rows of queries; one warpgroup copies tiles of keys and values into shared memory, the others
fold them into the running (maximum, sum, output) of the online softmax. A tile's scores are multiplied while the
tensor cores still work on the output of the tile before.
Traffic: Q read once, K and V once per block of queries (mostly from the cache), out and lse written once.
Sources: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import forward_bias, forward_tiles, limits, memory, products, schedule, scores
from pallas_kernels.attention.configs import WARPGROUP_ROWS, ForwardConfig
from pallas_kernels.attention.memory import ACC
from pallas_kernels.attention.problem import Attention
from pallas_kernels.attention.schedule import Span
from pallas_kernels.attention.scores import ROW, WGMMA, Place
from pallas_kernels.attention.state import State, by_row, empty, finish, fold
from pallas_kernels.hardware import Device

Block = SimpleNamespace  # `problem`, `config`, and the references of operands and scratch by their names


def unsupported(problem: Attention, device: Device) -> str | None:
    """Only what no kernel takes."""
    return limits.declines_any(problem, widest=256)


def _copy(block: Block) -> None:
    """The copying warpgroup: queries, then keys and values from the last visible tile to the first."""
    problem, config = block.problem, block.config
    group = problem.query_heads // problem.key_heads

    def visit(slot: jax.Array, place: Place, span: Span, steps: jax.Array) -> None:
        key_head = lax.div(place.head, jnp.int32(group))
        for w in range(config.warpgroups):
            mine = slot * config.warpgroups + w
            plgpu.barrier_wait(block.query_empty.at[mine])
            rows = pl.ds(place.row + w * WARPGROUP_ROWS, WARPGROUP_ROWS)
            at = block.query.at[place.batch, rows, place.head]
            plgpu.copy_gmem_to_smem(at, block.query_smem.at[mine], block.query_full.at[mine])

        def copy(i: jax.Array, _: None) -> None:
            slot = lax.rem(steps + i, jnp.int32(config.stages))
            at = place.batch, pl.ds((span.end - 1 - i) * config.block_kv, config.block_kv), key_head
            plgpu.barrier_wait(block.key_empty.at[slot])
            plgpu.copy_gmem_to_smem(block.key.at[at], block.key_smem.at[slot], block.key_full.at[slot])
            forward_bias.copy(block, place, (span.end - 1 - i) * config.block_kv, steps + i)
            plgpu.barrier_wait(block.value_empty.at[slot])
            _copy_values(block, at, slot, place.keys - (span.end - 1 - i) * config.block_kv)

        lax.fori_loop(0, span.end - span.first, copy, None)

    forward_tiles.each(block, visit, draws=True)


def _copy_values(block: Block, at: Any, slot: jax.Array, length: jax.Array) -> None:
    """A tile of values, of which `length` exist: others are zeroed, as they may be NaN."""
    whole = functools.partial(
        plgpu.copy_gmem_to_smem, block.value.at[at], block.value_smem.at[slot], block.value_full.at[slot]
    )
    if not block.problem.key_lengths:
        return whole()
    pl.when(length >= block.config.block_kv)(whole)

    @pl.when(length < block.config.block_kv)
    def part():
        plgpu.copy_gmem_to_smem(block.value.at[at], block.value_smem.at[slot], block.landed)
        plgpu.barrier_wait(block.landed)
        columns = memory.columns_of_tile(block.value_smem.shape[-1], block.problem.dtype)
        for start in range(0, block.config.block_kv, WARPGROUP_ROWS):
            for column in range(0, block.value_smem.shape[-1], columns):
                piece = block.value_smem.at[slot, pl.ds(start, WARPGROUP_ROWS), pl.ds(column, columns)]
                values = plgpu.load(piece, layout=WGMMA, optimized=False)
                row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=WGMMA)
                piece[...] = jnp.where(row < length - start, values, jnp.zeros_like(values))
        plgpu.commit_smem()
        plgpu.barrier_arrive(block.value_full.at[slot])


def _compute(block: Block) -> None:
    """A computing warpgroup."""
    warpgroup = lax.axis_index("warpgroup")
    for slot in range(block.config.stages):
        plgpu.barrier_arrive(block.key_empty.at[slot])
        plgpu.barrier_arrive(block.value_empty.at[slot])
    forward_bias.begin(block)
    for slot in range(block.config.query_slots):
        plgpu.barrier_arrive(block.query_empty.at[slot * block.config.warpgroups + warpgroup])

    def visit(slot: jax.Array, place: Place, span: Span, steps: jax.Array) -> None:
        mine = slot * block.config.warpgroups + warpgroup
        place = place._replace(row=place.row + warpgroup * WARPGROUP_ROWS)
        own = schedule.span(block.problem, block.config.block_kv, place.row, WARPGROUP_ROWS, place.queries, place.keys)
        own = schedule.narrowed(span, own) if block.problem.hidden_by_data else schedule.within(span, own)
        plgpu.barrier_wait(block.query_full.at[mine])
        begin, stop = steps + (span.end - own.end), steps + (span.end - own.first)
        _pass_over(block, steps, begin)
        state = _fold_keys(block, mine, place, own, begin)
        _pass_over(block, stop, steps + (span.end - span.first))
        _write(block, place, state)

    forward_tiles.each(block, visit, draws=False)


def _pass_over(block: Block, start: jax.Array, stop: jax.Array) -> None:
    """Steps whose keys the block's other warpgroups see, but not this one."""

    def step(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(block.config.stages))
        for kind in ("key", "value"):
            plgpu.barrier_wait(getattr(block, f"{kind}_full").at[slot])
            plgpu.barrier_arrive(getattr(block, f"{kind}_empty").at[slot])
        forward_bias.pass_over(block, i)

    lax.fori_loop(start, stop, step, None)


def _fold_keys(block: Block, mine: jax.Array, place: Place, span: Span, steps: jax.Array) -> State:
    """All tiles of keys that the queries in slot `mine` see folded into their state."""
    config, problem, value_dim = block.config, block.problem, block.value_smem.shape[-1]
    query = block.query_smem.at[mine]
    # Of the products; none where they need not be cleared.
    cleared_type = () if config.overwrites else (ACC((WARPGROUP_ROWS, config.block_kv), jnp.float32),)
    out_type = ACC((WARPGROUP_ROWS, value_dim), jnp.float32)
    count = span.end - span.first

    def slot(i: jax.Array) -> jax.Array:
        return lax.rem(steps + i, jnp.int32(config.stages))

    def key(i: jax.Array) -> jax.Array:
        return (span.end - 1 - i) * config.block_kv

    def logits(i: jax.Array, edge: Any, finished: Callable[[], jax.Array]) -> jax.Array:
        extras = scores.load_extras(problem, block, place, key(i), config.block_kv, copied=config.bias_slots > 0)
        x = finished()
        plgpu.barrier_arrive(block.key_empty.at[slot(i)])
        if config.bias_slots:
            extras = extras._replace(bias=forward_bias.read(block, steps + i))
        return scores.logits(problem, block, place, extras, x, key(i), edge)

    def first(*cleared: Any) -> jax.Array:
        i = jnp.int32(0)
        plgpu.barrier_wait(block.key_full.at[slot(i)])
        begun = products.begin(query, block.key_smem.at[slot(i)], *cleared)
        return logits(i, True, lambda: products.finish(begun, later=0))

    def step(i: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, before = carry[0], slot(i - 1)

        def multiply(*accumulators: Any) -> tuple[State, jax.Array]:
            *cleared, out = accumulators
            # The left operand must not change registers once products are under way: ptxas would serialise them all.
            out[...], weights = lax.optimization_barrier((state.out, carry[1]))
            plgpu.barrier_wait(block.key_full.at[slot(i)])
            plgpu.barrier_wait(block.value_full.at[before])
            begun = products.begin(query, block.key_smem.at[slot(i)], *cleared)
            plgpu.wgmma(out, weights, block.value_smem.at[before])
            edge = schedule.at_edge(problem, span, span.end - 1 - i)
            x = logits(i, edge, lambda: products.finish(begun, later=1))
            new, new_weights, rescale = fold(problem, config, state, x)
            if config.overlaps:
                products.wait_behind(new.sum)
            summed = plgpu.wgmma_accumulator_load(out, wait_n=0)
            plgpu.barrier_arrive(block.value_empty.at[before])
            return new._replace(out=rescale(summed)), new_weights

        return pl.run_scoped(multiply, *cleared_type, out_type)

    def last(out: Any) -> jax.Array:
        out[...] = state.out
        plgpu.barrier_wait(block.value_full.at[slot(count - 1)])
        plgpu.wgmma(out, weights, block.value_smem.at[slot(count - 1)])
        return out[...]

    x = pl.run_scoped(first, *cleared_type) if cleared_type else first()
    state, weights, _ = fold(problem, config, empty(value_dim), x)
    # One loop for tiles at the edge and others: of two loops, ptxas serialises the products.
    state, weights = lax.fori_loop(1, count, step, (state, weights))
    plgpu.barrier_arrive(block.query_empty.at[mine])
    state = state._replace(out=pl.run_scoped(last, out_type))
    plgpu.barrier_arrive(block.value_empty.at[slot(count - 1)])
    return state


def _write(block: Block, place: Place, state: State) -> None:
    """Divides by the sums, and writes a warpgroup's rows, as many columns at a time as there is shared memory for."""
    problem, warpgroup = block.problem, lax.axis_index("warpgroup")
    hidden = None
    if problem.query_lengths:
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW)
        hidden = row >= place.queries - place.row
    unseen, factor, lse = finish(state, block.sinks[place.head] if problem.sinks else None, hidden)
    rows, columns = pl.ds(place.row, WARPGROUP_ROWS), block.out_smem.shape[-1]
    for start in range(0, state.out.shape[1], columns):
        out = state.out[:, start : start + columns]
        out = jnp.where(by_row(unseen, out), jnp.zeros_like(out), out * by_row(factor, out))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        block.out_smem[warpgroup] = out.astype(problem.dtype)
        if start == 0:
            block.lse_smem[warpgroup] = lse
        plgpu.commit_smem()
        at = block.out.at[place.batch, rows, place.head, pl.ds(start, columns)]
        plgpu.copy_smem_to_gmem(block.out_smem.at[warpgroup], at)
        if start == 0:
            plgpu.copy_smem_to_gmem(block.lse_smem.at[warpgroup], block.lse.at[place.batch, place.head, rows])


def _body(
    *operands: jax.Ref, problem: Attention, config: ForwardConfig, names: tuple[str, ...], **scratch: jax.Ref
) -> None:
    block = Block(problem=problem, config=config, **dict(zip(names, operands, strict=True)), **scratch)
    computing, copying = config.registers

    @pl.when(lax.axis_index("warpgroup") < config.warpgroups)
    def compute():
        plgpu.set_max_registers(computing, action="increase")
        _compute(block)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("warpgroup") == config.warpgroups)
    def copy():
        plgpu.set_max_registers(copying, action="decrease")
        _copy(block)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def run(problem: Attention, config: ForwardConfig, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel."""
    arrays = memory.addressable(config, dict(zip(memory.names(problem), operands, strict=True)))
    blocks, deal = forward_tiles.launched(problem, config)
    query_length, head_dim, value_dim = arrays["query"].shape[1], arrays["query"].shape[3], arrays["value"].shape[3]
    batch, heads, rows = problem.batch, problem.query_heads, -(-problem.query_length // config.block_q) * config.block_q
    out_type = (
        jax.ShapeDtypeStruct((batch, query_length, heads, value_dim), problem.dtype),
        jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32),
    )
    kernel = plgpu.kernel(
        functools.partial(
            _body, problem=problem, config=config, names=(*arrays, *forward_tiles.names(config), "out", "lse")
        ),
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=memory.scratch(problem, config, head_dim, value_dim) | forward_tiles.scratch(config),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="attention",
    )
    out, lse = forward_tiles.call(kernel, config, blocks, out_type, *arrays.values(), deal)
    return out[:, : problem.query_length, :, : problem.value_dim], lse[:, :, : problem.query_length]
