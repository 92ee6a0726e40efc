"""The online softmax of a warpgroup's rows: logits from products, a tile's update of the state, and the result."""

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels import monoid
from pallas_kernels.attention import gather, mask
from pallas_kernels.attention.problem import Attention, ForwardConfig
from pallas_kernels.hardware import WARPGROUP_ROWS
from pallas_kernels.mosaic import fast_math, ptx, votes
from pallas_kernels.mosaic.fast_math import LOG2E
from pallas_kernels.mosaic.ptx import ROW, WGMMA, Index


class TileCoord(NamedTuple):
    """The head and the first of some queries, and how many queries and keys there are.

    With several `heads`, which are packed, `head` counts packs, and a query has a row for each head of its pack.
    """

    batch: Index
    head: Index
    row: Index
    queries: Index
    keys: Index
    heads: int = 1

    def queries_of_rows(self) -> jax.Array:
        """Says which query each of a warpgroup's rows is of, counted from the place's first."""
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW)
        return row if self.heads == 1 else lax.shift_right_logical(row, jnp.full_like(row, self.heads.bit_length() - 1))


class Extras(NamedTuple):
    """Operands that a tile's logits need beyond the products; loaded while the products are computed."""

    bias: jax.Array | None
    mask_bits: jax.Array | None  # the mask's bits


def load_extras(
    problem: Attention, refs: SimpleNamespace, coord: TileCoord, key: jax.Array, keys: int, *, copied: bool
) -> Extras:
    """Returns the tile of `keys` keys from `key` on; `copied`: but for the bias, which comes through shared memory."""
    corner = coord.batch, coord.head, coord.row, key
    bias = gather.load_tile(refs.bias, corner, keys) if problem.bias and not copied else None
    return Extras(bias, gather.load_bits(refs.mask, 3, corner, keys, coord.heads) if problem.mask else None)


def folds_scale(problem: Attention) -> bool:
    """Says whether logits are the products times a positive number, so that the maximum is found before scaling."""
    return problem.scale > 0 and problem.soft_cap is None and problem.bias is None


def logits(
    problem: Attention,
    refs: SimpleNamespace,
    coord: TileCoord,
    extras: Extras,
    x: jax.Array,
    key: jax.Array,
    edge: bool | jax.Array | None,
) -> jax.Array:
    """Returns the logits, still to be scaled if `folds_scale`; -inf where the query does not see the key.

    `edge`: whether indices, positions, segment ids and mask matter; None: never.
    """
    if not folds_scale(problem):
        x = x * problem.scale
    if problem.soft_cap is not None:
        # tanh(y) = 1 - 2 / (1 + exp(2 y)): the hardware's tanh errs by 2^-11 of the cap.
        x = problem.soft_cap - (2 * problem.soft_cap) / (1.0 + fast_math.exp_16bit(x * (2 / problem.soft_cap)))
    if extras.bias is not None:
        x = x + extras.bias.astype(jnp.float32)
    if edge is None:
        return x
    compared = functools.partial(_apply_mask, problem, refs, coord, extras, key)
    return compared(x) if edge is True else lax.cond(edge, compared, lambda x: x, x)


def _apply_mask(
    problem: Attention, refs: SimpleNamespace, coord: TileCoord, extras: Extras, key: jax.Array, x: jax.Array
) -> jax.Array:
    """Returns `x`, and -inf where indices, positions, segments or mask forbid it; `key` is the tile's first."""
    if extras.mask_bits is not None:
        x = gather.apply_bitmask(x, extras.mask_bits)
    # Segment ids are loaded only here: most tiles have one segment, and registers are scarce.
    corner = coord.batch, 0, coord.row, key
    if problem.segments:
        x = gather.apply_segments(x, refs.query_segments, refs.key_segments, corner)
    if problem.positions:
        x = _apply_positions(problem, refs, corner, x)
    return _in_bounds(problem, coord, x, key)


def _apply_positions(problem: Attention, refs: SimpleNamespace, corner: gather.Corner, x: jax.Array) -> jax.Array:
    """Puts -inf where positions forbid it. If the positions of both blocks count up by one, the first are enough."""
    batch, _, row, key = corner
    left, right = mask.position_bounds(problem)
    query_base = refs.query_bases[batch, lax.div(row, WARPGROUP_ROWS)]
    key_base = refs.key_bases[batch, lax.div(key, x.shape[1])]

    def by_bases(x: jax.Array) -> jax.Array:
        at = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW) + (query_base - key_base)
        high = jnp.full_like(at, x.shape[1]) if right is None else at + right
        return gather.apply_bounds(x, None if left is None else at + left, high)

    def by_positions(x: jax.Array) -> jax.Array:
        return gather.apply_positions(x, refs.query_positions, refs.key_positions, corner, (left, right))

    return lax.cond((query_base != mask.NO_BASE) & (key_base != mask.NO_BASE), by_bases, by_positions, x)


def _in_bounds(problem: Attention, coord: TileCoord, x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns `x`, and -inf where the indices of query and key forbid it; `key` is the tile's first."""
    left, right = mask.window_bounds(problem, coord.queries, coord.keys)
    whole = problem.key_length % x.shape[1] == 0 and not problem.key_lengths
    # A split of a masked range can be empty; `place.keys` is then 0.
    if left is None and right is None and whole and not (problem.has_data_mask and isinstance(coord.keys, jax.Array)):
        return x
    row = coord.queries_of_rows()
    right = problem.key_length if right is None else right
    high = jnp.minimum(row + (coord.row - key + right), coord.keys - 1 - key)
    return gather.apply_bounds(x, None if left is None else row + (coord.row - key + left), high)


# Additive masks (-1e9) lie below this. There `exp2(x * log2(e) - m)`, one fused operation, subtracts a rounded maximum
# from an exact product and may overflow: such rows count as fully masked.
_HIDDEN = -(2.0**27)
PARTIAL_COLUMNS = 8  # over which a row's sum stays spread until its end: no shuffles on the way
Rescale = Callable[[jax.Array], jax.Array]


class State(NamedTuple):
    """`sum` and `out` are relative to `max`, in powers of two. `max` may lag the largest logit."""

    max: jax.Array
    sum: jax.Array
    out: jax.Array


def initial(value_dim: int) -> State:
    """Makes the state of no keys seen."""
    rows = WARPGROUP_ROWS
    m = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), ROW)
    zeros = (plgpu.layout_cast(jnp.zeros((rows, n), jnp.float32), WGMMA) for n in (PARTIAL_COLUMNS, value_dim))
    return State(m, *zeros)


def update(
    problem: Attention,
    config: ForwardConfig,
    state: State,
    x: jax.Array,
    *,
    first: bool = False,
    halfway: Callable[[], None] = lambda: None,
) -> tuple[State, jax.Array, Rescale]:
    """Returns the state with a tile's maximum and sum, the tile's weights, and the rescaling that `out` still needs.

    `first`: no keys were seen before. `halfway` is called where half of the weights are still to be computed.

    This is `monoid.combine`, but the weights are taken against the common maximum at once: no second factor.
    """
    factor = LOG2E * (problem.scale if folds_scale(problem) else 1.0)
    # Without early exponentials, a fold to fewer than 32 columns lets heads of 256 spill 8 bytes.
    highest = _fold_columns(mgpu.FragmentedArray.max, x, PARTIAL_COLUMNS if config.early_exp_columns else 32)

    def exp_and_sum(x: jax.Array, maximum: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        if problem.batch_invariant:
            # A row gets equal bits in a first tile, in a later one, and after a rescale: ptxas contracts the product in
            # some of these places only.
            less = functools.partial(fast_math.scaled_less, factor)
            weights = monoid.decay(x, by_row(maximum, x), exp=jnp.exp2, less=less)
        else:
            weights = monoid.decay(x * factor, by_row(maximum, x), exp=jnp.exp2)
        return total + _fold_columns(operator.add, weights, PARTIAL_COLUMNS), weights

    def full_update(x: jax.Array) -> tuple[jax.Array, ...]:
        maximum = highest.max(axis=1) * factor
        if problem.bias is not None:
            maximum = ptx.where(maximum < _HIDDEN, -jnp.inf, maximum)
        if config.rescale_threshold_log2:
            # NaN is not below anything, and stays.
            maximum = ptx.where(maximum <= state.max + float(config.rescale_threshold_log2), state.max, maximum)
        else:
            maximum = lax.max(state.max, maximum)
        decay = monoid.decay(state.max, maximum, exp=jnp.exp2)
        return maximum, decay, *exp_and_sum(x, maximum, state.sum * by_row(decay, state.sum))

    if config.early_exp_columns:
        early, rest = x[:, : config.early_exp_columns], x[:, config.early_exp_columns :]
        if first:
            grows, (maximum, decay, total, weights) = None, full_update(early)
        else:
            grows = votes.warp_any_above(highest, factor, state.max + float(config.rescale_threshold_log2))
            # Exponentials start before the vote is known, and are computed again where a maximum has grown.
            same = (
                state.max,
                jnp.ones_like(state.max),
                *lax.optimization_barrier(exp_and_sum(early, state.max, state.sum)),
            )
            maximum, decay, total, weights = lax.cond(grows, lambda: full_update(early), lambda: same)
        half = rest.shape[1] // 2 // PARTIAL_COLUMNS * PARTIAL_COLUMNS
        total, more = exp_and_sum(rest[:, :half], maximum, total)
        halfway()
        total, others = exp_and_sum(rest[:, half:], maximum, total)
        weights = jnp.concatenate([weights, more, others], axis=1)
    else:
        maximum, decay, total, weights = full_update(x)
        halfway()
        grows = votes.warp_any(decay != 1.0) if config.rescale_threshold_log2 else None

    def rescale(out: jax.Array) -> jax.Array:
        decayed = lambda out: out * by_row(decay, out)
        return decayed(out) if grows is None else lax.cond(grows, decayed, lambda out: out, out)

    return State(maximum, total, state.out), weights.astype(problem.dtype), rescale


def finalize(state: State, sink: jax.Array | None, hidden: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns for each row whether it saw no key (or is `hidden`), the factor of `out`, and the logsumexp.

    `sink`: one logit, or one for each row.
    """
    m, total = state.max, state.sum.sum(axis=1)
    unseen = m == -jnp.inf
    factor = jnp.ones_like(m)
    if sink is not None:
        logit = sink * LOG2E if sink.shape else jnp.full_like(m, sink * LOG2E)
        of_sink = (logit, jnp.ones_like(m), jnp.zeros_like(m))
        m, total, factor = monoid.combine((m, total, factor), of_sink, exp=jnp.exp2)
    if hidden is not None:
        unseen |= hidden
    lse = ptx.where(unseen, jnp.full_like(m, -jnp.inf), m / LOG2E + fast_math.log(total))
    return unseen, factor / total, lse


def by_row(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns one number a row, for all columns of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def _fold_columns(operation: Callable[..., Any], x: jax.Array, columns: int) -> jax.Array:
    """Folds groups of `columns` columns as a tree; Mosaic's own reduction is one long chain."""

    def fold_groups(ctx, x):
        parts = [x[:, start : start + columns] for start in range(0, x.shape[1], columns)]
        while len(parts) > 1:
            parts = [operation(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
        return parts[0]

    return ptx.inline(
        fold_groups,
        (x, WGMMA),
        result=((x.shape[0], columns), x.dtype, WGMMA),
        static={"columns": columns, "operation": operation},
    )
