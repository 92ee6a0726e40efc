"""Cross entropy from the statistics of each row, which a kernel or the reference computes.

The operands are those of the primitives, at one rank: logits, labels, weights if it is `weighted`, and a mask if there
is one. Labels and weights have an extent of 1 on the rows' axes. `run_row_op(op, *operands, **row)` computes a row
operation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack

import jax
import jax.numpy as jnp

from jaxsoftmax._core.sharding import AxisSharding, Columns, all_gather, mesh_axes, spec_of
from pallas_kernels.monoid import Stats, log_normalizer, merge_over
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED, Op

RunRowOp = Callable[..., Any]
Pick = Callable[..., jax.Array]
Count = int | jax.Array
Masks = Sequence[jax.Array]  # one or none


class LogitsRow(TypedDict):
    """The parameters of a row operation on logits."""

    axes: tuple[int, ...]
    scale: float
    soft_cap: float | None
    smoothing: float
    gpu: NotRequired[bool]


class Row(LogitsRow):
    """The parameters of a row's loss."""

    z_loss: float


class LossRow(Row):
    """The parameters of `cross_entropy`."""

    weighted: bool
    stats: bool
    all_rows: bool


class RowTerms(NamedTuple):
    """Holds the terms of a row's loss, without the rows' axes."""

    stats: Stats
    label: jax.Array  # the label's logit
    total: jax.Array | None  # with smoothing, the sum of the logits
    count: Count  # with smoothing, the number of logits


def kernel_args[X](
    operands: Sequence[X], *, weighted: bool, stats: bool, all_rows: bool, **row: object
) -> tuple[Sequence[X], dict[str, object]]:
    """Returns the operands and parameters that `cross_entropy` passes to its row operation: all but the weights."""
    return [*operands[:2], *operands[2 + weighted :]], row


def cross_entropy(pick: Pick, run_row_op: RunRowOp, *operands: jax.Array, **row: Unpack[LossRow]) -> list[jax.Array]:
    """Returns rows' losses, times weights if `weighted`; with `stats` their states, of ignored rows if `all_rows`."""

    def terms_of(x: jax.Array, labels: jax.Array, where: Masks, all_rows: bool, **row: Unpack[Row]) -> RowTerms:
        state = run_row_op(Op.CROSS_ENTROPY, x, _reading(labels, all_rows), *where, **row)
        return _terms(state, _label(pick, x, labels, state[0], where, **row), _count(x, where, **row))

    return _losses(terms_of, *operands, **row)


def cross_entropy_across(
    columns: Columns, run_row_op: RunRowOp, *operands: jax.Array, **row: Unpack[LossRow]
) -> list[jax.Array]:
    """Returns the losses of sharded rows, of which this device has some columns."""

    def terms_of(x: jax.Array, labels: jax.Array, where: Masks, all_rows: bool, **row: Unpack[Row]) -> RowTerms:
        return _exchange(columns, run_row_op, x, labels, columns.within(where), all_rows, **row)[0]

    return _losses(terms_of, *operands, **row)


def _losses(
    terms_of: Callable[..., RowTerms],
    x: jax.Array,
    labels: jax.Array,
    *rest: jax.Array,
    weighted: bool,
    stats: bool,
    all_rows: bool,
    **row: Unpack[Row],
) -> list[jax.Array]:
    weights, where = rest[:weighted], rest[weighted:]
    terms = terms_of(x, labels, where, all_rows, **row)
    loss = loss_of_terms(terms, labels, **row)
    for weight in weights:
        loss = weight.squeeze(row["axes"]) * loss
    return [loss, *terms.stats] if stats else [loss]


def cross_entropy_gradient(
    pick: Pick,
    run_row_op: RunRowOp,
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *where: jax.Array,
    **row: Unpack[Row],
) -> list[jax.Array]:
    """Returns each row's loss without its weight, and the gradient with it."""
    gradient, *state = run_row_op(Op.CROSS_ENTROPY_GRADIENT, x, labels, weights, *where, **row)
    terms = _terms(state, _label(pick, x, labels, state[0], where, **row), _count(x, where, **row))
    return [_of_all(loss_of_terms(terms, labels, **row), weights, row["axes"]), gradient]


def cross_entropy_gradient_across(
    columns: Columns,
    run_row_op: RunRowOp,
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *where: jax.Array,
    **row: Unpack[Row],
) -> list[jax.Array]:
    """Returns the losses of sharded rows, and the gradient of this device's columns."""
    masks = columns.within(where)
    terms, local = _exchange(columns, run_row_op, x, labels, masks, False, **row)
    state = Stats(*(jnp.expand_dims(number, row["axes"]) for number in terms.stats))
    count = terms.count if isinstance(terms.count, int) else jnp.expand_dims(terms.count, row["axes"])
    gradient = gradient_of_part(run_row_op, x, local, weights, state, count, masks, **row)
    return [_of_all(loss_of_terms(terms, labels, **row), weights, row["axes"]), gradient]


def gradient_of_part(
    run_row_op: RunRowOp,
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    state: Stats,
    count: Count,
    where: Masks,
    *,
    z_loss: float,
    **row: Unpack[LogitsRow],
) -> jax.Array:
    """Returns the weighted gradient of this device's columns, from whole rows' states and their count of columns."""
    prob_factor = reference.prob_factor_of(weights, log_normalizer(state), z_loss)
    count = jnp.full_like(state.sum, count) if isinstance(count, int) else jnp.maximum(count, 1)
    return run_row_op(Op.CROSS_ENTROPY_COTANGENT, x, labels, weights, prob_factor, *state, count, *where, **row)


def of_this_device(
    columns: Columns, x: jax.Array, labels: jax.Array, where: Masks, **row: Unpack[Row]
) -> tuple[jax.Array, Masks, Count]:
    """Returns labels and mask for this device's columns, and the whole row's count of columns.

    It exchanges nothing, or the count where a mask decides which columns share smoothed labels.
    """
    axes, where = row["axes"], columns.within(where)
    count = _count(x, where, **row)
    if isinstance(count, int):
        count *= jax.lax.axis_size(columns.names)
    else:
        (counts,) = all_gather(columns.names, count)
        count = jnp.expand_dims(counts.sum(0), axes)
    return local_labels(labels, columns.shardings, [x.shape[d] for d in axes]), where, count


def label_logit_gathered(
    x: jax.Array, labels: jax.Array, *, axes: tuple[int, ...], scale: float, soft_cap: float | None, **_: object
) -> jax.Array:
    """Returns the labels' logits, by a gather, for an `x` whose rows are not sharded; ignored rows give any logit."""
    rest = jnp.maximum(labels, 0)
    if len(axes) == 1:
        picked = jnp.take_along_axis(x, rest, axes[0], mode="promise_in_bounds")
        return reference.logits(picked, scale, soft_cap).squeeze(axes)
    at = list(jnp.indices(x.shape, jnp.int32, sparse=True))
    for axis in reversed(axes):
        rest, at[axis] = jnp.divmod(rest, x.shape[axis])
    picked = x.at[tuple(at)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return reference.logits(picked, scale, soft_cap).squeeze(axes)


def label_logit_summed(
    x: jax.Array, labels: jax.Array, *, axes: tuple[int, ...], scale: float, soft_cap: float | None, **_: object
) -> jax.Array:
    """Returns the labels' logits, by a sum over the row, for any sharding; ignored rows give 0."""
    at_label = reference.columns(x, axes) == labels
    return reference.logits(jnp.where(at_label, x, jnp.zeros_like(x)), scale, soft_cap).sum(axes)


def label_logit(x: jax.Array, labels: jax.Array, **row: Unpack[Row]) -> jax.Array:
    """Returns the labels' logits, by the way that does not move `x` between devices."""
    axes = row["axes"]
    movable = len(axes) == 1 and x.shape[axes[0]] != 0 and not mesh_axes(spec_of(jax.typeof(x))[axes[0]])
    return (label_logit_gathered if movable else label_logit_summed)(x, labels, **row)


def _reading(labels: jax.Array, all_rows: bool) -> jax.Array:
    """Returns the labels for an operation that uses them only to skip ignored rows."""
    return jnp.maximum(labels, 0) if all_rows else labels


def _label(
    pick: Pick, x: jax.Array, labels: jax.Array, maximum: jax.Array, where: Masks, **row: Unpack[Row]
) -> jax.Array:
    """Returns the labels' logits; only those that a mask excludes can exceed the row's maximum."""
    label = pick(x, labels, **row)
    return label if where else reference.below(label, maximum)


def _terms(state: Sequence[jax.Array], label: jax.Array, count: Count) -> RowTerms:
    maximum, total, *rest = state
    return RowTerms(Stats(maximum, total), label, rest[0] if rest else None, count)


def _count(x: jax.Array, where: Masks, *, axes: tuple[int, ...], smoothing: float, **_: object) -> Count:
    count = reference.column_count(x, where[0] if where and smoothing else None, axes)
    return count.squeeze(axes) if isinstance(count, jax.Array) else count


def loss_of_terms(
    terms: RowTerms, labels: jax.Array, *, axes: tuple[int, ...], smoothing: float, z_loss: float, **_: object
) -> jax.Array:
    """Returns the loss from distances to the maximum, so that a common shift of the logits cancels before rounding."""
    maximum = terms.stats.max
    far = maximum == jnp.inf
    distance = maximum - terms.label
    if terms.total is not None:
        even = maximum - terms.total / jnp.maximum(terms.count, 1)
        # The label's distance may be infinite, and has no share then.
        distance = even if smoothing == 1 else (1.0 - smoothing) * distance + smoothing * even
    loss = distance + jnp.where(far, 0.0, jnp.log(jnp.where(far, 1.0, terms.stats.sum)))
    if z_loss:
        loss = loss + z_loss * jnp.square(log_normalizer(terms.stats))
    return jnp.where(labels.squeeze(axes) == IGNORED, 0.0, loss)


def _of_all(number: jax.Array, weights: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Broadcasts a row's number to the weights' shape, which is larger where only the weights are mapped."""
    return jnp.broadcast_arrays(number, weights.squeeze(axes))[0]


def _exchange(
    columns: Columns,
    run_row_op: RunRowOp,
    x: jax.Array,
    labels: jax.Array,
    where: Masks,
    all_rows: bool,
    **row: Unpack[Row],
) -> tuple[RowTerms, jax.Array]:
    """Returns the whole rows' terms, by one exchange, and the labels as this device's columns."""
    axes, names = row["axes"], columns.names
    extents = [x.shape[d] for d in axes]
    local, cols = local_labels(labels, columns.shardings, extents), math.prod(extents)
    here = (local >= 0) & (local < cols)
    state = run_row_op(Op.CROSS_ENTROPY, x, _reading(labels, all_rows), *where, **row)
    label = jnp.where(here.squeeze(axes), label_logit_gathered(x, jnp.where(here, local, 0), **row), 0.0)
    count = _count(x, where, **row)
    counts = () if isinstance(count, int) else (count,)
    maximum, total, label, *rest = all_gather(names, *state[:2], label, *state[2:], *counts)
    sums = [each.sum(0) for each in rest]
    count = sums.pop() if counts else count * jax.lax.axis_size(names)
    return _terms((*merge_over(Stats(maximum, total), 0), *sums), label.sum(0), count), local


def local_labels(labels: jax.Array, shardings: Sequence[AxisSharding], extents: Sequence[int]) -> jax.Array:
    """Returns labels as columns of this device's part, or past its last column if another device has them."""
    flat, inside, stride, local = labels, labels != IGNORED, 1, jnp.zeros_like(labels)
    for sharding, n in reversed(list(zip(shardings, extents, strict=True))):
        flat, at = jnp.divmod(flat, sharding.extent)
        at = at - n * jax.lax.axis_index(sharding.names) if sharding.names else at
        inside, local, stride = inside & (at >= 0) & (at < n), local + stride * at, stride * n
    return jnp.where(labels == IGNORED, IGNORED, jnp.where(inside, local, stride))
