"""The public function `linear_cross_entropy`: canonicalise, validate, bind."""

import math
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp

from jaxsoftmax._core import checks
from jaxsoftmax._core.checks import ArrayLike, Implementation
from jaxsoftmax._core.sharding import settings_for
from jaxsoftmax._cross_entropy.linear_kernel import Rules
from jaxsoftmax._cross_entropy.linear_primitives import LOSS, NAME, bind
from jaxsoftmax._cross_entropy.primitives import weigh
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax.reference import accumulator_dtype

WeightLayout = Literal["EV", "VE"]


class _Options(TypedDict, total=False):
    """The keywords that every overload has."""

    bias: ArrayLike | None
    where: ArrayLike | None
    weights: ArrayLike | None
    ignore_index: int | None
    label_smoothing: float
    z_loss: float
    logits_soft_cap: float | None
    scale: ArrayLike
    weight_layout: WeightLayout
    precision: Any
    chunk_size: int | None
    implementation: Implementation | None


@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[_Options],
) -> Any: ...
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    scale: ArrayLike = 1.0,
    weight_layout: WeightLayout = "EV",
    return_lse: bool = False,
    return_entropy: bool = False,
    precision: Any = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """The loss of `hidden @ weight + bias`, by chunks of tokens: no array is as large as the logits of all tokens.

    It is `softmax_cross_entropy_with_integer_labels` of these logits, in every option and every edge. The logits are
    float32, or float64 for float64 operands, and are not rounded; so are the losses. A chunk's gradient logits are
    rounded to the operands' dtype for the two products that follow, which accumulate in float32, as does the sum over
    chunks. The log-probability of a label is minus its loss.

    Differentiated, it computes a chunk's logits again when the cotangents are known: four products. With `weights`,
    which are known beforehand, the gradients are computed with the loss: three products. That holds if what follows
    treats all tokens alike, as in `linear_cross_entropy(..., weights=1 / n).sum()`; if it does not, the gradients of
    `weight` and `bias` are computed again, with two more products. An operand that is not differentiated costs no
    product.

    On Hopper the losses alone are one kernel where it takes the call, and no logits are written. For the gradients that
    kernel writes the weights of a chunk's logits, each rounded to the operands' dtype relative to its own size.

    A chunk's logits and their gradient take at most 1 GiB, and the kernel's weights 2 GiB, or 128 tokens' worth, unless
    `chunk_size` is given. The
    gradient of `weight` is accumulated in one float32 array. Derivatives of every order exist, in forward and reverse
    mode, in chunks too; in forward mode, tangents of logits that do not count must be finite.

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
        ignore_index: A label whose tokens have a loss of 0 and no gradient, whatever their hidden states are.
        label_smoothing: A number from 0 to 1: the share of the target that is spread evenly over the vocabulary.
        z_loss: A number: the factor of `lse**2`.
        logits_soft_cap: A positive number `c`: logits are `c * tanh(scale * logits / c)`.
        scale: The logits' factor, an inverse temperature: a number, or an array that broadcasts to the tokens with a
            last axis of 1. An array is differentiable.
        weight_layout: "EV", or "VE" for the table of an embedding, which is not transposed for it.
        return_lse: Returns the logsumexps of the logits too, also of tokens that are ignored.
        return_entropy: Returns the entropies of the softmax of the logits too, also of tokens that are ignored.
        precision: The products' precision, as for `jax.lax.dot_general`.
        chunk_size: How many tokens have logits at a time; None for as many as fit, or for a kernel that writes none.
        implementation: None, "xla" or "mosaic_gpu", as for `softmax`; of the kernel that reads a chunk's logits.

    Returns:
        The tokens' losses, in the shape of `hidden` without its last axis; or a tuple of these and of what is asked
        for, in the order `(loss, lse, entropy)`. With `return_lse` or `return_entropy`, `weights` save no product.

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
    factor = _checked_scale(scale, shape)
    ignored = checks.ignore_index(NAME, ignore_index)
    given, full = checks.labels_of(NAME, labels, shape, axes)
    if tuple(full) != shape:
        raise ValueError(f"{NAME}: labels broadcast to {tuple(full[:-1])}, expected the tokens of hidden, {tokens}.")
    mask = None if where is None else checks.mask(NAME, where, shape, axes)
    counts = None if mask is None else jnp.broadcast_to(mask.any(-1), tokens)
    factors = jnp.ones((1,) * len(tokens), wide)
    factors = factors if weights is None else checks.weights_of(NAME, weights, tokens, wide)
    checks.check_range(NAME, given, cols, ignored, counts)
    target, factors = checks.rows_to_read(given, jnp.broadcast_to(factors, tokens), cols, ignored, counts)
    results = ("loss", *(["lse"] if return_lse else []), *(["entropy"] if return_entropy else []))
    weighted = weights is not None and len(results) == 1
    optional = {
        "bias": b,
        "scale": jnp.broadcast_to(factor[..., 0].astype(wide), tokens) if isinstance(factor, jax.Array) else None,
        "where": mask,
        "weights": factors if weighted else None,
    }
    rules = Rules(
        transposed=weight_layout == "VE",
        precision=precision,
        scale=1.0 if isinstance(factor, jax.Array) else factor,
        soft_cap=checks.soft_cap(NAME, logits_soft_cap),
        smoothing=checks.number(NAME, "label_smoothing", label_smoothing, 0.0, 1.0),
        z_loss=checks.number(NAME, "z_loss", z_loss, -math.inf, math.inf),
        results=results,
        all_rows=len(results) > 1,
        chunk_size=_checked_chunk_size(chunk_size),
        implementation=checks.implementation(NAME, implementation),
    )
    with settings_for(h, w, *(x for x in optional.values() if x is not None)):
        operands = {"hidden": h, "weight": w, "labels": target}
        found = bind(LOSS, operands | {n: x for n, x in optional.items() if x is not None}, rules=rules)
        loss = found["loss"] if weighted else weigh(factors, found["loss"])
        if len(results) == 1:
            return loss
        lse = [log_normalizer(Stats(found["max"], found["sum"]))] if return_lse else []
        return (loss, *lse, *([found["entropy"]] if return_entropy else []))


def _checked_matrices(
    hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike | None, layout: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The hidden states and the weight in one dtype, and the bias."""
    if layout not in get_args(WeightLayout):
        raise ValueError(f"{NAME}: weight_layout={layout!r}, expected 'EV' or 'VE'.")
    h, w = checks.floating(NAME, "hidden", hidden), checks.floating(NAME, "weight", weight)
    if h.ndim == 0 or w.ndim != 2 or h.shape[-1] != w.shape[layout.index("E")]:
        want = "[E, V]" if layout == "EV" else "[V, E]"
        raise ValueError(
            f"{NAME}: hidden has shape {h.shape} and weight {w.shape}, expected [..., E] and {want}, by weight_layout."
        )
    dtype = jnp.result_type(h, w)
    h, w = h.astype(dtype), w.astype(dtype)
    if bias is None:
        return h, w, None
    b, cols = checks.floating(NAME, "bias", bias), w.shape[layout.index("V")]
    if b.shape != (cols,):
        raise ValueError(f"{NAME}: bias has shape {b.shape}, expected {(cols,)}, one number for each column.")
    return h, w, b


def _checked_scale(scale: ArrayLike, shape: tuple[int, ...]) -> float | jax.Array:
    """A positive number, or an array with one factor for each token or for all."""
    factor = checks.scale_factor(NAME, scale, (*shape[:-1], 1), "one number for each token")
    if isinstance(factor, float):
        return factor if 0 < factor < math.inf else jnp.full((1,) * len(shape), factor)
    return factor


def _checked_chunk_size(size: Any) -> int | None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"{NAME}: chunk_size is {size!r}, expected a positive integer or None.")
    return size
