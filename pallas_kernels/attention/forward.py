"""Flash attention, forward: softmax(Q K^T) V in one walk over the keys, scores never leaving the registers.

A block of threads holds rows of queries; one warpgroup copies tiles of keys and values into shared memory, the others
fold them into the running (maximum, sum, output) of the online softmax. A tile's scores are multiplied while the
tensor cores still work on the output of the tile before.
Traffic: Q read once, K and V once per block of queries (mostly from the cache), out and lse written once.
Sources: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.
"""

import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import elementary, hardware, monoid
from pallas_kernels.attention import gather, schedule, scores
from pallas_kernels.attention.configs import WARPGROUP_ROWS, ForwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.attention.schedule import Span
from pallas_kernels.attention.scores import ROW, WGMMA, Extras, Place
from pallas_kernels.hardware import Device

LOG2E = math.log2(math.e)
PARTIAL_SUMS = 8  # columns over which a row's sum stays spread until its end: no shuffles on the way

Block = SimpleNamespace  # `problem`, `config`, and the references of operands and scratch by their names


class State(NamedTuple):
    """The online softmax of a warpgroup's rows: `sum` and `out` are relative to `max`, in powers of two."""

    max: jax.Array
    sum: jax.Array
    out: jax.Array


def unsupported(problem: Attention, device: Device) -> str | None:
    """Why the kernel does not take the problem."""
    if problem.dtype.name not in ("bfloat16", "float16"):
        return f"the kernel takes bfloat16 and float16; the operands are {problem.dtype.name}"
    for name in ("head_dim", "value_dim"):
        size = getattr(problem, name)
        if size > 256 or size % 8:
            return f"the kernel takes {name} up to 256 in multiples of 8; it is {size}"
    return None


def _each_tile(block: Block, visit: Callable[[Place, Span, jax.Array], None]) -> None:
    """`visit(place, span, steps)` for each tile of queries of this block, after `steps` tiles of keys."""
    problem, config = block.problem, block.config
    per_head = -(-problem.query_length // config.block_q)
    me = lax.axis_index("block")

    def take(i: jax.Array, steps: jax.Array) -> jax.Array:
        tile = gather.uniform(block.deal[me, i + 1] if config.persistent else block.deal[me])
        head = lax.div(tile, jnp.int32(per_head))
        row = lax.rem(tile, jnp.int32(per_head)) * config.block_q
        batch = lax.div(head, jnp.int32(problem.query_heads))
        length = problem.key_length
        if problem.key_lengths:
            length = jnp.clip(gather.uniform(block.key_lengths[batch]), 0, problem.key_length)
        span = schedule.span(problem, config.block_kv, row, config.block_q, length)
        if problem.query_lengths:
            # Rows past the length are not worth more than the one tile that everybody visits.
            worth = jnp.maximum(gather.uniform(block.query_lengths[batch]) - row, 0) * problem.key_length
            span = span._replace(end=jnp.minimum(span.end, span.first + 1 + worth))
        visit(Place(batch, lax.rem(head, jnp.int32(problem.query_heads)), row, length), span, steps)
        return steps + (span.end - span.first)

    if config.persistent:
        lax.fori_loop(0, block.deal[me, 0], take, jnp.int32(0))
    else:
        take(jnp.int32(0), jnp.int32(0))


def _copy(block: Block) -> None:
    """The copying warpgroup: queries, then keys and values from the last visible tile to the first."""
    problem, config = block.problem, block.config
    group = problem.query_heads // problem.key_heads

    def visit(place: Place, span: Span, steps: jax.Array) -> None:
        key_head = lax.div(place.head, jnp.int32(group))
        for w in range(config.warpgroups):
            plgpu.barrier_wait(block.query_empty.at[w])
            rows = pl.ds(place.row + w * WARPGROUP_ROWS, WARPGROUP_ROWS)
            at = block.query.at[place.batch, rows, place.head]
            plgpu.copy_gmem_to_smem(at, block.query_smem.at[w], block.query_full.at[w])

        def copy(i: jax.Array, _: None) -> None:
            slot = lax.rem(steps + i, jnp.int32(config.stages))
            at = place.batch, pl.ds((span.end - 1 - i) * config.block_kv, config.block_kv), key_head
            plgpu.barrier_wait(block.key_empty.at[slot])
            plgpu.copy_gmem_to_smem(block.key.at[at], block.key_smem.at[slot], block.key_full.at[slot])
            plgpu.barrier_wait(block.value_empty.at[slot])
            plgpu.copy_gmem_to_smem(block.value.at[at], block.value_smem.at[slot], block.value_full.at[slot])

        lax.fori_loop(0, span.end - span.first, copy, None)

    _each_tile(block, visit)


def _compute(block: Block) -> None:
    """A computing warpgroup."""
    warpgroup = lax.axis_index("warpgroup")
    for slot in range(block.config.stages):
        plgpu.barrier_arrive(block.key_empty.at[slot])
        plgpu.barrier_arrive(block.value_empty.at[slot])
    plgpu.barrier_arrive(block.query_empty.at[warpgroup])
    if block.config.turns:
        pl.when(warpgroup == block.config.warpgroups - 1)(lambda: plgpu.barrier_arrive(block.turn.at[0]))

    def visit(place: Place, span: Span, steps: jax.Array) -> None:
        place = place._replace(row=place.row + warpgroup * WARPGROUP_ROWS)
        plgpu.barrier_wait(block.query_full.at[warpgroup])
        _finish(block, place, _fold_keys(block, place, span, steps))

    _each_tile(block, visit)


def _fold_keys(block: Block, place: Place, span: Span, steps: jax.Array) -> State:
    """All visible tiles of keys folded into the state of a warpgroup's rows."""
    config, value_dim = block.config, block.value_smem.shape[-1]
    query = block.query_smem.at[lax.axis_index("warpgroup")]
    scores_type = plgpu.ACC((WARPGROUP_ROWS, config.block_kv), jnp.float32)
    out_type = plgpu.ACC((WARPGROUP_ROWS, value_dim), jnp.float32)

    def slot(i: jax.Array) -> jax.Array:
        return lax.rem(steps + i, jnp.int32(config.stages))

    def key(i: jax.Array) -> jax.Array:
        return (span.end - 1 - i) * config.block_kv

    def extras(i: jax.Array) -> Extras:
        return scores.load_extras(block.problem, block, place, key(i), config.block_kv)

    def await_values(i: jax.Array) -> None:
        wait = functools.partial(plgpu.barrier_wait, block.value_full.at[slot(i)])
        pl.when(i > 0)(wait) if block.problem.key_lengths else wait()  # `_clear_values` has waited for the first tile

    def first(products: Any) -> tuple[jax.Array, Extras]:
        at = slot(jnp.int32(0))
        plgpu.barrier_wait(block.key_full.at[at])
        _take_turn(block)
        plgpu.wgmma(products, query, block.key_smem.at[at].T)
        _end_turn(block)
        more = extras(jnp.int32(0))
        x = products[...]
        plgpu.barrier_arrive(block.key_empty.at[at])
        return x, more

    def step(i: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, at, before = carry[0], slot(i), slot(i - 1)

        def multiply(products: Any, out: Any) -> tuple[State, jax.Array]:
            # Loops one after another leave their results in different registers; to move them once the products are
            # under way would make ptxas wait for each product.
            out[...], weights = lax.optimization_barrier((state.out, carry[1]))
            plgpu.barrier_wait(block.key_full.at[at])
            await_values(i - 1)
            _take_turn(block)
            plgpu.wgmma(products, query, block.key_smem.at[at].T)
            plgpu.wgmma(out, weights, block.value_smem.at[before])
            _end_turn(block)
            more = extras(i)
            x = plgpu.wgmma_accumulator_load(products, wait_n=1)
            plgpu.barrier_arrive(block.key_empty.at[at])
            new, new_weights, decay = _softmax(block, place, state, x, more, key(i), _at_edge(block.problem, span, i))
            summed = plgpu.wgmma_accumulator_load(out, wait_n=0)
            plgpu.barrier_arrive(block.value_empty.at[before])
            scaled = lambda x: x * lax.broadcast_in_dim(decay, x.shape, [0])
            if config.slack:
                summed = lax.cond(gather.any_lane(decay != 1.0), scaled, lambda x: x, summed)
            else:
                summed = scaled(summed)
            return new._replace(out=summed), new_weights

        return pl.run_scoped(multiply, scores_type, out_type)

    if block.problem.key_lengths:
        _clear_values(block, slot(jnp.int32(0)), place.key_length - key(jnp.int32(0)))
    x, more = pl.run_scoped(first, scores_type)
    state, weights, _ = _softmax(block, place, _empty(value_dim), x, more, key(jnp.int32(0)), True)
    carry, count = (state, weights), span.end - span.first
    carry = lax.fori_loop(1, count, step, carry)
    plgpu.barrier_arrive(block.query_empty.at[lax.axis_index("warpgroup")])
    state, weights = carry
    at = slot(count - 1)

    def last(out: Any) -> jax.Array:
        out[...] = state.out
        await_values(count - 1)
        plgpu.wgmma(out, weights, block.value_smem.at[at])
        return out[...]

    state = state._replace(out=pl.run_scoped(last, out_type))
    plgpu.barrier_arrive(block.value_empty.at[at])
    return state


def _at_edge(problem: Attention, span: Span, i: jax.Array) -> jax.Array | None:
    """Whether some of the block's queries do not see all keys of step `i`'s tile; None: that cannot be."""
    left, right = schedule.bounds(problem)
    tile = span.end - 1 - i
    after = None if right is None else tile >= span.inner_end
    before = None if left is None else tile < span.inner_first
    return before if after is None else after if before is None else before | after


def _empty(value_dim: int) -> State:
    rows = WARPGROUP_ROWS
    m = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), ROW)
    zeros = (plgpu.layout_cast(jnp.zeros((rows, n), jnp.float32), WGMMA) for n in (PARTIAL_SUMS, value_dim))
    return State(m, *zeros)


def _softmax(
    block: Block, place: Place, state: State, x: jax.Array, extras: Extras, key: jax.Array, edge: Any
) -> tuple[State, jax.Array, jax.Array]:
    """The state with a tile's maximum and sum, the tile's weights, and the decay that the state's output still needs.

    This is `monoid.combine`, but the tile's weights are taken against the common maximum at once: no second factor.
    """
    problem = block.problem
    x = scores.logits(problem, place, extras, x, key, edge)
    factor = LOG2E * (problem.scale if scores.folds_scale(problem) else 1.0)
    maximum = _fold_columns(jnp.maximum, x, 32).max(axis=1) * factor
    if block.config.slack:
        maximum = jnp.where(maximum > state.max + float(block.config.slack), maximum, state.max)
    else:
        maximum = jnp.maximum(state.max, maximum)
    decay = monoid.decay(state.max, maximum, exp=jnp.exp2)
    weights = monoid.decay(x * factor, lax.broadcast_in_dim(maximum, x.shape, [0]), exp=jnp.exp2)
    total = state.sum * lax.broadcast_in_dim(decay, state.sum.shape, [0]) + _fold_columns(jnp.add, weights, PARTIAL_SUMS)
    return State(maximum, total, state.out), weights.astype(problem.dtype), decay


def _fold_columns(operation: Callable[..., jax.Array], x: jax.Array, columns: int) -> jax.Array:
    """A tree over groups of `columns` columns, where a reduction of Mosaic's is one long chain."""
    parts = [x[:, start : start + columns] for start in range(0, x.shape[1], columns)]
    while len(parts) > 1:
        parts = [operation(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def _clear_values(block: Block, slot: jax.Array, length: jax.Array) -> None:
    """Zeroes values past the sequence's length, which may be NaN. All warpgroups write the same zeros."""
    block_kv, rows = block.config.block_kv, WARPGROUP_ROWS
    plgpu.barrier_wait(block.value_full.at[slot])

    @pl.when(length < block_kv)
    def clear():
        for start in range(0, block_kv, rows):
            at = block.value_smem.at[slot, pl.ds(start, rows)]
            values = plgpu.load(at, layout=WGMMA, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=WGMMA)
            at[...] = jnp.where(row < length - start, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def _finish(block: Block, place: Place, state: State) -> None:
    """Divides by the sum, and writes a warpgroup's rows, some columns at a time."""
    problem, warpgroup = block.problem, lax.axis_index("warpgroup")
    m, total = state.max, state.sum.sum(axis=1)
    unseen = m == -jnp.inf
    factor = jnp.ones_like(m)
    if problem.sinks:
        sink = jnp.full_like(m, block.sinks[place.head] * LOG2E)
        m, total, factor = monoid.combine((m, total, factor), (sink, jnp.ones_like(m), jnp.zeros_like(m)), exp=jnp.exp2)
    if problem.query_lengths:
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + place.row
        unseen |= row >= block.query_lengths[place.batch]
    factor = jnp.where(unseen, jnp.zeros_like(m), factor / total)
    lse = jnp.where(unseen, jnp.full_like(m, -jnp.inf), m / LOG2E + elementary.log(total))
    rows, columns = pl.ds(place.row, WARPGROUP_ROWS), block.out_smem.shape[-1]
    for start in range(0, state.out.shape[1], columns):
        out = state.out[:, start : start + columns]
        out = jnp.where(
            lax.broadcast_in_dim(unseen, out.shape, [0]),
            jnp.zeros_like(out),
            out * lax.broadcast_in_dim(factor, out.shape, [0]),
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        block.out_smem[warpgroup] = out.astype(problem.dtype)
        if start == 0:
            block.lse_smem[warpgroup] = lse
        plgpu.commit_smem()
        at = block.out.at[place.batch, rows, place.head, pl.ds(start, columns)]
        plgpu.copy_smem_to_gmem(block.out_smem.at[warpgroup], at)
        if start == 0:
            plgpu.copy_smem_to_gmem(block.lse_smem.at[warpgroup], block.lse.at[place.batch, place.head, rows])


def _take_turn(block: Block) -> None:
    if block.config.turns:
        plgpu.barrier_wait(block.turn.at[lax.axis_index("warpgroup")])


def _end_turn(block: Block) -> None:
    if block.config.turns:
        following = lax.rem(lax.axis_index("warpgroup") + 1, jnp.int32(block.config.warpgroups))
        plgpu.barrier_arrive(block.turn.at[following])


def _body(*operands: jax.Ref, problem: Attention, config: ForwardConfig, names: tuple[str, ...], **scratch: jax.Ref) -> None:
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


def _tiled(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    columns = next(c for c in (64, 32, 16) if shape[-1] % c == 0)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * 2))
    )


def _scratch(config: ForwardConfig, head_dim: int, value_dim: int, dtype: jnp.dtype) -> dict[str, Any]:
    """Shared memory and barriers of a block; the output leaves through what the rest leaves free."""
    w, stages = config.warpgroups, config.stages
    taken = dtype.itemsize * (w * WARPGROUP_ROWS * head_dim + stages * config.block_kv * (head_dim + value_dim))
    free = (hardware.H200.smem_per_cta - 4096 - taken) // (w * WARPGROUP_ROWS * dtype.itemsize)
    tile = next(c for c in (64, 32, 16) if value_dim % c == 0)
    columns = next((c for c in range(value_dim, 0, -tile) if c <= free and value_dim % c == 0), tile)
    return {
        "query_smem": _tiled((w, WARPGROUP_ROWS, head_dim), dtype),
        "key_smem": _tiled((stages, config.block_kv, head_dim), dtype),
        "value_smem": _tiled((stages, config.block_kv, value_dim), dtype),
        "out_smem": _tiled((w, WARPGROUP_ROWS, columns), dtype),
        "lse_smem": plgpu.SMEM((w, WARPGROUP_ROWS), jnp.float32),
        "query_full": plgpu.Barrier(num_barriers=w),
        "query_empty": plgpu.Barrier(num_barriers=w),
        "key_full": plgpu.Barrier(num_barriers=stages),
        "key_empty": plgpu.Barrier(num_arrivals=w, num_barriers=stages),
        "value_full": plgpu.Barrier(num_barriers=stages),
        "value_empty": plgpu.Barrier(num_arrivals=w, num_barriers=stages),
        "turn": plgpu.Barrier(num_barriers=w),
    }


def _names(problem: Attention) -> tuple[str, ...]:
    """The operands that the problem has, in their order."""
    lengths = [name for name in ("query_lengths", "key_lengths") if getattr(problem, name)]
    segments = ["query_segments", "key_segments"] * problem.segments
    optional = [name for name in ("bias", "mask") if getattr(problem, name) is not None]
    return ("query", "key", "value", *optional, *lengths, *segments, *["sinks"] * problem.sinks)


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    return x if missing == 0 else jnp.pad(x, [(0, missing * (i == axis)) for i in range(x.ndim)])


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def run(problem: Attention, config: ForwardConfig, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel; sizes that a tiled copy cannot address (see `_padded`) cost a copy of the operand."""
    names = _names(problem)
    arrays = dict(zip(names, operands, strict=True))
    for name in ("query", "key", "value"):
        arrays[name] = _padded(_padded(arrays[name], 1, 8), 3, 16)
    if problem.segments:
        arrays["query_segments"] = arrays["query_segments"][:, None, :, None]
        arrays["key_segments"] = arrays["key_segments"][:, None, None, :]
    if config.persistent:
        blocks = hardware.current().sm_count
        deal = schedule.deal(problem, config, blocks)
    else:
        deal, _ = schedule.order(problem, config)
        blocks = len(deal)
    query_length, head_dim, value_dim = arrays["query"].shape[1], arrays["query"].shape[3], arrays["value"].shape[3]
    batch, heads, rows = problem.batch, problem.query_heads, -(-problem.query_length // config.block_q) * config.block_q
    out, lse = plgpu.kernel(
        functools.partial(_body, problem=problem, config=config, names=(*names, "deal", "out", "lse")),
        out_type=(
            jax.ShapeDtypeStruct((batch, query_length, heads, value_dim), problem.dtype),
            jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(config, head_dim, value_dim, problem.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="attention",
    )(*(arrays[name] for name in names), deal)
    return out[:, : problem.query_length, :, : problem.value_dim], lse[:, :, : problem.query_length]
