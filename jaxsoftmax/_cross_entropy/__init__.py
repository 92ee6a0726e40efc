"""Cross entropy of labels, probabilities, or the logits of a product: the functions canonicalise, validate and bind."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core import checks, numbers
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike, Axis, DTypeLike, Implementation, PrecisionLike
from jaxsoftmax._core.memory import in_device_memory
from jaxsoftmax._core.sharding import broadcast_to, settings_for, unify_shardings
from jaxsoftmax._cross_entropy import linear_primitives, mixture, soft
from jaxsoftmax._cross_entropy.linear_kernel import Rules
from jaxsoftmax._cross_entropy.linear_primitives import LOSS
from jaxsoftmax._cross_entropy.linear_primitives import NAME as LINEAR
from jaxsoftmax._cross_entropy.primitives import NAME, losses, weigh
from jaxsoftmax._softmax import scaled
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED
from pallas_kernels.types import accumulator_dtype

WeightLayout = Literal["EV", "VE"]
Reduction = Literal["none", "mean", "sum"]


class _Options(TypedDict, total=False):
    """The keywords that every overload has."""

    label_smoothing: ArrayLike
    z_loss: ArrayLike
    logits_soft_cap: ArrayLike | None
    scale: ArrayLike
    ignore_index: int | None
    weights: ArrayLike | None
    reduction: Reduction
    implementation: Implementation | None


class _LinearOptions(_Options, total=False):
    """Arguments that a call takes beside hidden states and a weight."""

    bias: ArrayLike | None
    where: ArrayLike | None
    weight_layout: WeightLayout
    precision: PrecisionLike
    chunk_size: int | None
    reduce_dtype: str | type | np.dtype | None


@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@public
@in_device_memory
def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    logits_soft_cap: ArrayLike | None = None,
    scale: ArrayLike = 1.0,
    ignore_index: int | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "none",
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns each row's `logsumexp(logits) - logits[label]`, as optax's function of this name, with more options.

    With `z` the logits, scaled and capped, and `n` how many of them `where` includes, a row's loss is `weights` times
    `lse - (1 - label_smoothing) * z[label] - label_smoothing / n * sum(z) + z_loss * lse**2`, `lse = logsumexp(z)`.

    It is float32, or float64 for float64 logits, as is all that is accumulated; the gradient has the logits' dtype and
    is rounded once. Differentiated, one kernel reads the logits, and another reads them again and writes the gradient
    times whatever follows, as 1 / n in `.mean()`: three passes. With `weights` or a `reduction`, the kernel writes the
    gradient in the pass in which it reads the logits. If all that follows is a sum, that is all, so that

        softmax_cross_entropy_with_integer_labels(logits, labels, reduction="mean")

    takes two passes; any other operation behind it multiplies that gradient, in two more. The backward pass keeps the
    logits, or with `weights` or a `reduction` the gradient, in the logits' dtype. Derivatives of every order in the
    logits and in `weights` exist, in forward and reverse mode; in forward mode, tangents of logits that do not count
    must be finite.

    Under `batch_invariant()` a kernel's loss and gradient of a row are the same bits in any batch.

    A logit of -inf has no share; if it is the label's, the loss is +inf. A row of only -inf, or with NaN, gives NaN;
    with +inf it gives +inf, or NaN if that is the label's. Their gradients are NaN. A row that `where` excludes
    entirely gives 0. Where the label is no column, the loss of its row is NaN, and so is its gradient; but that is 0
    where the loss is not used, as in `jnp.where(labels >= 0, loss, 0)`. If the labels' values are known (outside
    `jit`), such a label is an error, for which the labels are copied to the host. Empty arrays are fine.

    Source: as `softmax`; z-loss: Chowdhery et al. 2022, "PaLM", https://arxiv.org/abs/2204.02311.

    Args:
        logits: Logits of any real dtype and any shape; integers and booleans are promoted as by `jnp.exp`.
        labels: Integers of any dtype and of the logits' shape without `axis`, or of one of that rank that broadcasts
            with it: each row's right column. With several axes, a label is an index into those axes flattened, in the
            order in which they are given. 64 bits are compared before they are narrowed, of NumPy's integers too.
        axis: The axis or axes of a row; None for all.
        where: A boolean mask that broadcasts with the logits, of their rank, or of the rows' rank, for whole rows.
            Entries where it is False are absent from the sums; the label's logit is taken even so.
        label_smoothing: A number from 0 to 1: the share of the target that is spread evenly over the row. This and
            the next three arguments may be arrays of one number, which may be traced, are differentiable, and are not
            checked. An array costs passes: the logits are first converted to the dtype of accumulation
            (docs/numbers.md).
        z_loss: A number, or an array of one: the factor of `lse**2`.
        logits_soft_cap: A positive number `c`, or an array of one: logits are `c * tanh(scale * logits / c)`.
        scale: The logits' factor, as for `softmax`.
        ignore_index: A label whose rows have a loss of 0 and a gradient of 0, whatever their logits are.
        weights: A factor of each row's loss: a number, or an array that broadcasts to the rows; may be traced. Given
            any, even 1, the gradient is written when the loss is computed.
        reduction: "none" for the rows' losses; "sum" for their sum; or "mean", for that over the sum of the `weights`
            of the rows that count, or over how many count; it is 0 if none does. In `shard_map`, of a device's own
            rows.
        return_lse: Returns the rows' `lse` too, also of those that are ignored. It is differentiable; its cotangent not
            being known in the forward pass, the gradient is then written afterwards, by XLA, even if there are weights.
        implementation: None, "xla" or "mosaic_gpu", as for `softmax`. No kernel computes the gradient of a logsumexp,
            or of logits that broadcast over labels: named, it is an error there.

    Returns:
        The rows' losses, in the shape to which the logits without `axis`, `labels` and `where` broadcast, or one number
        by a `reduction`; or a pair of that and of the rows' `lse`, if `return_lse`.

    Raises:
        TypeError: `logits` is complex, `labels` are not integers, `where` is not boolean, or an option is not a number.
        ValueError: an argument does not fit, or labels that are known are out of range.
        NotImplementedError: `implementation="mosaic_gpu"` and no kernel takes the call; raised when it is compiled, or
            for what a gradient alone lacks, when that is traced. In a mesh of `Auto` axes, where XLA shards the
            vocabulary, a `jax.errors.JaxRuntimeError` contains the message.

    >>> import jax.numpy as jnp
    >>> softmax_cross_entropy_with_integer_labels(jnp.zeros((2, 4)), jnp.array([2, -1]), ignore_index=-1)
    Array([1.3862944, 0.       ], dtype=float32)
    """
    x = checks.floating(NAME, "logits", logits)
    listed = checks.listed_axes(NAME, axis, x.ndim, "logits")
    axes = tuple(sorted(listed))
    cols = math.prod(x.shape[d] for d in axes)
    wide = accumulator_dtype(x.dtype)
    factor = numbers.scale_factor(NAME, scale, x.shape, wide, "the logits'")
    ignored = checks.ignore_index(NAME, ignore_index)
    given, shape = checks.labels_of(NAME, labels, x.shape, axes)
    mask = () if where is None else (checks.mask(NAME, where, shape, axes),)
    shape = jnp.broadcast_shapes(shape, *(m.shape for m in mask))
    rows = tuple(n for d, n in enumerate(shape) if d not in axes)
    counts = jnp.broadcast_to(mask[0].any(axes), rows) if mask else None
    factors = jnp.ones((1,) * len(rows), wide) if weights is None else checks.weights_of(NAME, weights, rows, wide)
    checks.check_range(NAME, given, cols, ignored, counts)
    checks.choice(NAME, "reduction", reduction, get_args(Reduction))
    target, factors = _to_read(reduction, given, broadcast_to(factors, rows), cols, ignored, counts)
    x, factor = scaled(x, factor)
    of_logits, of_rows = range(x.ndim), [d for d in range(x.ndim) if d not in axes]
    has = [of_logits, of_rows, of_rows, *(of_logits for _ in mask)]
    x, target, factors, *mask = unify_shardings(x, target, factors, *mask, axes=has)
    cap = numbers.soft_cap(NAME, logits_soft_cap, wide)
    if isinstance(cap, jax.Array):
        x, factor, cap = numbers.capped(reference.logits(x, factor), cap), 1.0, None
    shares = _smoothing_and_z_loss(NAME, label_smoothing, z_loss, wide)
    is_mixture = mixture.is_mixture(*shares)
    # The gradients of its parts are added before they are rounded.
    x = x.astype(wide) if is_mixture else x
    # With weights in the primitive, the gradient is written with the loss, before its cotangent is known.
    weighted = (weights is not None or reduction != "none") and not return_lse and not is_mixture
    columns = jnp.expand_dims(_in_order(target, listed, x.shape), axes)
    operands = [x, columns, *([jnp.expand_dims(factors, axes)] if weighted else []), *mask]
    how = {"implementation": checks.implementation(NAME, implementation), **checks.batch_invariance()}
    row = {"axes": axes, "scale": factor, "soft_cap": cap, "weighted": weighted, "all_rows": return_lse, **how}

    def compute(smoothing: float, z_loss: float, with_lse: bool) -> Sequence[jax.Array]:
        loss, *stats = losses(*operands, smoothing=smoothing, z_loss=z_loss, stats=with_lse, **row)
        return [loss, log_normalizer(Stats(*stats))] if with_lse else [loss]

    loss, *lse = mixture.mixed(compute, target == IGNORED, *shares, return_lse)
    loss = _reduced(reduction, loss if weighted else weigh(factors, loss))
    return (loss, lse[0]) if return_lse else loss


def _to_read(
    reduction: Reduction,
    given: jax.Array | np.ndarray,
    weights: jax.Array,
    cols: int,
    ignored: int | None,
    counts: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns `rows_to_read`, where for a mean the weights are shares of their total."""
    target, factors = checks.rows_to_read(given, weights, cols, ignored, counts)
    if reduction == "mean":
        with settings_for(target, factors):
            # Not of the factors, which are NaN where a label is no column: other rows keep their gradient.
            labels, weights = unify_shardings(target, weights)
            total = jnp.where(labels == IGNORED, 0.0, weights).sum()
            factors = factors / jnp.where(total == 0, 1.0, total)
    return target, factors


def _reduced(reduction: Reduction, loss: jax.Array) -> jax.Array:
    return loss if reduction == "none" else loss.sum()


def _smoothing_and_z_loss(
    function: str, smoothing: ArrayLike, z_loss: ArrayLike, dtype: DTypeLike
) -> tuple[float | jax.Array, float | jax.Array]:
    """Returns both as constants or data."""
    return (
        numbers.number(function, "label_smoothing", smoothing, 0.0, 1.0, dtype),
        numbers.number(function, "z_loss", z_loss, -math.inf, math.inf, dtype),
    )


@public
@in_device_memory
def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns `-sum(labels * log_softmax(logits))` of each row: `optax.softmax_cross_entropy`.

    A kernel takes the rows' statistics and XLA does the rest, in a second pass over the logits; where no gradient is
    asked for, XLA computes few and short rows in one pass. All is accumulated in float32, or float64 for float64
    logits, which is the dtype of the loss. As XLA adds up the products, in an order
    that may depend on how many rows there are, `batch_invariant()` does not cover it.

    A label of 0 has no share in the loss even where the logit is -inf, unlike in `optax`; any other label there gives
    an infinite loss. A row of only -inf, or with +inf or NaN, gives NaN, as its gradient does. A row that is empty, or
    that `where` excludes entirely, gives 0.

    Derivatives of every order in the logits and in the labels exist, in forward and reverse mode.

    Source: as `softmax`.

    Args:
        logits: Logits of any real dtype and any shape, as above.
        labels: Probabilities, or numbers of any real dtype, which broadcast with `logits`.
        axis: The axis or axes of a row; None for all.
        where: A boolean mask that broadcasts with the logits, of their rank, or of the rows' rank, for whole rows.
        implementation: None, "xla" or "mosaic_gpu", as for `softmax`; the statistics' kernel.

    Returns:
        The rows' losses, in the shape to which all three broadcast, without `axis`.

    Raises:
        TypeError: `logits` or `labels` are complex, or `where` is not boolean.
        ValueError: `axis`, `labels`, `where` or `implementation` does not fit.
        NotImplementedError: `implementation="mosaic_gpu"` and no kernel takes the call; raised when it is compiled.

    >>> import jax.numpy as jnp
    >>> softmax_cross_entropy(jnp.array([1.0, 2.0, -jnp.inf]), jnp.array([0.25, 0.75, 0.0])).round(3)
    Array(0.563, dtype=float32)
    """
    name = "softmax_cross_entropy"
    x = checks.floating(name, "logits", logits)
    axes = checks.axes(name, axis, x.ndim, "logits")
    target, shape = checks.probabilities(name, labels, x.shape, axes)
    mask = () if where is None else (checks.mask(name, where, shape, axes),)
    implementation = checks.implementation(name, implementation)
    x, target, *mask = unify_shardings(x, jnp.expand_dims(target, range(x.ndim - target.ndim)), *mask)
    return soft.losses(name, implementation, axes, x, target, *mask)


def _in_order(labels: jax.Array, listed: Sequence[int], shape: Sequence[int]) -> jax.Array:
    """Converts indices into the axes flattened as listed to indices into them flattened in rising order."""
    if list(listed) == sorted(listed):
        return labels
    flat, at = jnp.maximum(labels, 0), {}
    for axis in reversed(listed):
        flat, at[axis] = jnp.divmod(flat, shape[axis])
    column = jnp.zeros_like(labels)
    for axis in sorted(listed):
        column = column * shape[axis] + at[axis]
    return jnp.where(labels == IGNORED, IGNORED, column)


@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[_LinearOptions],
) -> jax.Array: ...
@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[True],
    **options: Unpack[_LinearOptions],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[False] = False,
    **options: Unpack[_LinearOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: Unpack[_LinearOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[_LinearOptions],
) -> jax.Array | tuple[jax.Array, ...]: ...
@public
@in_device_memory
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "none",
    ignore_index: int | None = None,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    logits_soft_cap: ArrayLike | None = None,
    scale: ArrayLike = 1.0,
    weight_layout: WeightLayout = "EV",
    return_lse: bool = False,
    return_entropy: bool = False,
    precision: PrecisionLike = None,
    chunk_size: int | None = None,
    reduce_dtype: str | type | np.dtype | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Computes the loss of `hidden @ weight + bias` by chunks of tokens: no array has the logits of all tokens.

    It is `softmax_cross_entropy_with_integer_labels` of these logits, in every option and every edge. The logits are
    float32, or float64 for float64 operands, and are not rounded; so are the losses. A chunk's gradient logits are
    rounded to the operands' dtype for the two products that follow, which accumulate in float32, as does the sum over
    chunks. The log-probability of a label is minus its loss.

    Differentiated, it computes the gradients with the loss: three products. That holds if what follows treats all
    tokens alike that count, as `.mean()` does; if it does not, the gradients of `weight` and `bias` are computed again,
    with two more products. Factors of tokens that are known beforehand are `weights`, which cost no product. With
    `return_lse`, `return_entropy`, and in float16 without `weights` and `reduction`, as a sum over tokens may be too
    large there, a chunk's logits are computed again when the cotangents are known: four products. An operand that is
    not differentiated costs no product.

    On Hopper the losses alone are one kernel where it takes the call, and no logits are written. For the gradients that
    kernel writes the weights of a chunk's logits, each rounded to the operands' dtype relative to its own size.

    A chunk's logits and their gradient take at most 1 GiB, and the kernel's weights 2 GiB, or 128 tokens' worth, unless
    `chunk_size` is given. The gradient of `weight` is accumulated in one float32 array. Derivatives of every order
    exist, in forward and reverse mode, in chunks too; in forward mode, tangents of logits that do not count must be
    finite.

    Under `jit` and explicit meshes it follows its operands' sharding. Sharded tokens exchange nothing but the gradients
    of `weight` and `bias`. A sharded vocabulary exchanges a few numbers a token, and the gradient of `hidden`. The
    embedding axis is gathered if it is sharded. `batch_invariant()` does not cover it, for the products are XLA's.

    Source: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models",
    https://arxiv.org/abs/2411.09009, and Hsu et al. 2024, "Liger kernel", https://arxiv.org/abs/2410.10989.

    Args:
        hidden: `[..., E]`, of any real dtype.
        weight: `[E, V]`, or `[V, E]` if `weight_layout` says so. Both have the dtype that their product would have.
        labels: Integers of any dtype and of a shape that broadcasts to `hidden`'s without its last axis.
        bias: `[V]`, added to the logits before the scale.
        where: A boolean mask of logits, `[..., V]`, or of tokens, of the labels' rank; either broadcasts.
        weights: A factor of each token's loss: a number, or an array that broadcasts to the tokens; may be traced.
        reduction: "none" for the tokens' losses; "sum" for their sum; or "mean", for that over the sum of the `weights`
            of the tokens that count, or over how many count; it is 0 if none does. In `shard_map`, of a device's own
            tokens.
        ignore_index: A label whose tokens have a loss of 0 and no gradient, whatever their hidden states are.
        label_smoothing: A number from 0 to 1: the share of the target that is spread evenly over the vocabulary. An
            array of one number may be traced, here and in the next two; the products are computed twice for one here.
        z_loss: A number, or an array of one: the factor of `lse**2`.
        logits_soft_cap: A positive number `c`, or an array of one: logits are `c * tanh(scale * logits / c)`.
        scale: The logits' factor, an inverse temperature: a number, or an array that broadcasts to the tokens with a
            last axis of 1. An array is differentiable.
        weight_layout: "EV", or "VE" for the table of an embedding, which is not transposed for it.
        return_lse: Returns the logsumexps of the logits too, also of tokens that are ignored.
        return_entropy: Returns the entropies of the softmax of the logits too, also of tokens that are ignored; never
            negative.
        precision: The products' precision, as for `jax.lax.dot_general`.
        chunk_size: How many tokens have logits at a time; None for as many as fit, or for a kernel that writes none.
        reduce_dtype: In which dtype devices, among which tokens are sharded, sum their parts of the gradient of
            `weight`, each accumulated in float32: None for the weight's, or float32, which exchanges twice the bytes.
        implementation: None, "xla" or "mosaic_gpu", as for `softmax`; of the kernel that reads a chunk's logits.

    Returns:
        The tokens' losses, in the shape of `hidden` without its last axis, or one number by a `reduction`; or a tuple
        of that and of what is asked for of the tokens, in the order `(loss, lse, entropy)`.

    Raises:
        TypeError: `hidden`, `weight` or `bias` is complex, `labels` are not integers, `where` is not boolean, or an
            option is not a number.
        ValueError: an argument does not fit, or labels that are known are out of range.
        NotImplementedError: `implementation="mosaic_gpu"` and no kernel takes a chunk; raised when it is compiled.

    >>> import jax.numpy as jnp
    >>> linear_cross_entropy(jnp.ones((2, 3)), jnp.zeros((3, 4)), jnp.array([2, -1]), ignore_index=-1)
    Array([1.3862944, 0.       ], dtype=float32)
    """
    h, w, b = _checked_matrices(hidden, weight, bias, weight_layout)
    tokens, cols = h.shape[:-1], w.shape[weight_layout.index("V")]
    shape, axes, wide = (*tokens, cols), (len(tokens),), accumulator_dtype(h.dtype)
    factor = numbers.scale_factor(LINEAR, scale, (*tokens, 1), wide, "one number for each token")
    cap = numbers.soft_cap(LINEAR, logits_soft_cap, wide)
    if isinstance(factor, float) and (isinstance(cap, jax.Array) or not 0 < factor < math.inf):
        factor = jnp.full((1,) * len(shape), factor)
    ignored = checks.ignore_index(LINEAR, ignore_index)
    given, full = checks.labels_of(LINEAR, labels, shape, axes)
    if tuple(full) != shape:
        raise ValueError(f"{LINEAR}: labels broadcast to {tuple(full[:-1])}, expected the tokens of hidden, {tokens}.")
    mask = None if where is None else checks.mask(LINEAR, where, shape, axes)
    counts = None if mask is None else jnp.broadcast_to(mask.any(-1), tokens)
    ones = jnp.ones((1,) * len(tokens), wide)
    factors = ones if weights is None else checks.weights_of(LINEAR, weights, tokens, wide)
    checks.check_range(LINEAR, given, cols, ignored, counts)
    checks.choice(LINEAR, "reduction", reduction, get_args(Reduction))
    target, factors = _to_read(reduction, given, broadcast_to(factors, tokens), cols, ignored, counts)
    shares = _smoothing_and_z_loss(LINEAR, label_smoothing, z_loss, wide)
    is_known = weights is not None or reduction != "none" or h.dtype != jnp.float16
    weighted = is_known and not (return_lse or return_entropy or mixture.is_mixture(*shares))
    of_tokens = lambda x: broadcast_to(x.astype(wide), (*tokens, *x.shape[len(tokens) :]))
    optional = {
        "bias": b,
        "scale": of_tokens(factor).squeeze(-1) if isinstance(factor, jax.Array) else None,
        "cap": of_tokens(cap) if isinstance(cap, jax.Array) else None,
        "where": mask,
        "weights": factors,
    }
    rules = Rules(
        transposed=weight_layout == "VE",
        precision=checks.precision(LINEAR, precision),
        scale=1.0 if isinstance(factor, jax.Array) else factor,
        soft_cap=None if isinstance(cap, jax.Array) else cap,
        all_rows=return_lse or return_entropy,
        chunk_size=_checked_chunk_size(chunk_size),
        reduce_dtype=_checked_reduce_dtype(reduce_dtype, w.dtype),
        implementation=checks.implementation(LINEAR, implementation),
    )
    operands = {"hidden": h, "weight": w, "labels": target} | {n: x for n, x in optional.items() if x is not None}
    operands = linear_primitives.unify_tokens(rules, operands)
    target, factors = operands["labels"], operands["weights"]
    if not weighted:
        del operands["weights"]

    def compute(smoothing: float, z_loss: float, with_lse: bool) -> Sequence[jax.Array]:
        results = ("loss", *(["lse"] if with_lse else []), *(["entropy"] if return_entropy else []))
        constants = dataclasses.replace(rules, smoothing=smoothing, z_loss=z_loss, results=results)
        out = linear_primitives.bind(LOSS, operands, rules=constants)
        lse = [log_normalizer(Stats(out["max"], out["sum"]))] if with_lse else []
        return [out["loss"], *lse, *([out["entropy"]] if return_entropy else [])]

    with settings_for(*operands.values()):
        loss, *rest = mixture.mixed(compute, target == IGNORED, *shares, return_lse)
        loss = _reduced(reduction, loss if weighted else weigh(factors, loss))
        return (loss, *rest) if rest else loss


def _checked_matrices(
    hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike | None, layout: WeightLayout
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the hidden states and the weight in one dtype, and the bias."""
    checks.choice(LINEAR, "weight_layout", layout, get_args(WeightLayout))
    h, w = checks.floating(LINEAR, "hidden", hidden), checks.floating(LINEAR, "weight", weight)
    if h.ndim == 0 or w.ndim != 2 or h.shape[-1] != w.shape[layout.index("E")]:
        want = "[E, V]" if layout == "EV" else "[V, E]"
        raise ValueError(
            f"{LINEAR}: hidden has shape {h.shape} and weight {w.shape}, expected [..., E] and {want}, by "
            "weight_layout."
        )
    dtype = checks.common_dtype(LINEAR, hidden=h, weight=w)
    h, w = h.astype(dtype), w.astype(dtype)
    if bias is None:
        return h, w, None
    b, cols = checks.floating(LINEAR, "bias", bias), w.shape[layout.index("V")]
    if b.shape != (cols,):
        raise ValueError(f"{LINEAR}: bias has shape {b.shape}, expected {(cols,)}, one number for each column.")
    return h, w, b


def _checked_chunk_size(size: object) -> int | None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1):
        raise ValueError(f"{LINEAR}: chunk_size is {size!r}, expected a positive integer or None.")
    return None if size is None else int(size)


def _checked_reduce_dtype(dtype: DTypeLike | None, own: np.dtype) -> np.dtype:
    dtypes = {x.name: x for x in (own, accumulator_dtype(own))}
    name = own.name if dtype is None else checks.dtype_name(dtype)
    if name not in dtypes:
        raise ValueError(f"{LINEAR}: reduce_dtype is {name}, expected None or {' or '.join(dtypes)}.")
    return dtypes[name]
