"""From a tile's products Q K^T to logits: scale, cap, bias, and which keys a query sees."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import gather, schedule
from pallas_kernels.attention.configs import WARPGROUP_ROWS
from pallas_kernels.attention.problem import Attention
from pallas_kernels.mosaic import fast_math

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)


class Place(NamedTuple):
    """The head and the first of some queries, and how many queries and keys there are.

    With several `heads`, which are packed, `head` counts packs, and a query has a row for each head of its pack.
    """

    batch: jax.Array
    head: jax.Array
    row: jax.Array
    queries: Any
    keys: Any
    heads: int = 1

    def queries_of_rows(self) -> jax.Array:
        """Of a warpgroup's rows, which query each is of, counted from the place's first."""
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROW)
        return row if self.heads == 1 else lax.shift_right_logical(row, jnp.full_like(row, self.heads.bit_length() - 1))


class Extras(NamedTuple):
    """What a tile's logits need beyond the products; loaded while the products are computed."""

    bias: jax.Array | None
    held: jax.Array | None  # the mask's bits


def load_extras(problem: Attention, refs: Any, place: Place, key: jax.Array, keys: int, *, copied: bool) -> Extras:
    """The tile of `keys` keys from `key` on; `copied`: but for the bias, which comes through shared memory."""
    corner = place.batch, place.head, place.row, key
    bias = gather.load_tile(refs.bias, corner, keys) if problem.bias and not copied else None
    return Extras(bias, gather.load_bits(refs.mask, 3, corner, keys) if problem.mask else None)


def folds_scale(problem: Attention) -> bool:
    """Whether logits are the products times a positive number, so that the maximum is found before scaling."""
    return problem.scale > 0 and problem.soft_cap is None and problem.bias is None


def logits(
    problem: Attention, refs: Any, place: Place, extras: Extras, x: jax.Array, key: jax.Array, edge: Any
) -> jax.Array:
    """The logits, still to be scaled if `folds_scale`; -inf where the query does not see the key.

    `edge`: whether indices, segment ids and mask matter; None: never.
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
    compared = functools.partial(_compared, problem, refs, place, extras, key)
    return compared(x) if edge is True else lax.cond(edge, compared, lambda x: x, x)


def _compared(problem: Attention, refs: Any, place: Place, extras: Extras, key: jax.Array, x: jax.Array) -> jax.Array:
    """`x`, and -inf where indices, segments or mask forbid it; `key` is the tile's first."""
    if extras.held is not None:
        x = gather.keep_held(x, extras.held)
    if problem.segments:
        # Not loaded while the products are computed, as most tiles are of one segment, and for want of registers.
        corner = place.batch, 0, place.row, key
        x = gather.keep_equal(x, refs.query_segments, refs.key_segments, corner)
    return _in_bounds(problem, place, x, key)


def _in_bounds(problem: Attention, place: Place, x: jax.Array, key: jax.Array) -> jax.Array:
    """`x`, and -inf where the indices of query and key forbid it; `key` is the tile's first."""
    left, right = schedule.bounds(problem, place.queries, place.keys)
    if left is None and right is None and not problem.key_lengths and problem.key_length % x.shape[1] == 0:
        return x
    row = place.queries_of_rows()
    right = problem.key_length if right is None else right
    high = jnp.minimum(row + (place.row - key + right), place.keys - 1 - key)
    return gather.keep_columns(x, None if left is None else row + (place.row - key + left), high)
