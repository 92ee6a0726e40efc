"""`top_k_softmax`: the public function, and its primitive.

The primitive returns the k largest logits, their indices, the row's softmax state and, if normalised over the whole
row, the probabilities. It reduces the last axis, so that vmap adds a leading one. Its derivative combines those of
the selection, of the state's sum, and of the probabilities as a function of both.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core import batch_invariance, checks, primitives, sharding
from jaxsoftmax._core.checks import ArrayLike, Implementation
from jaxsoftmax._core.primitives import batch_leading, define, typed, zeros
from jaxsoftmax._core.sharding import mesh_axes, mesh_of, spec_of, unify_varying
from jaxsoftmax._softmax.api import scaled
from jaxsoftmax._softmax.primitives import bind
from jaxsoftmax._top_k.select import probabilities, select, select_across
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import Op
from pallas_kernels.softmax.reference import accumulator_dtype

NAME = "top_k_softmax"
Normalize = Literal["all", "top_k"]

TOP_K = Primitive("softmax_top_k")
_RESULTS: Sequence[sharding.Result] = ("top_k", "top_k", "reduced", "reduced", "top_k")


def top_k_softmax(
    logits: ArrayLike,
    k: int,
    *,
    axis: int = -1,
    is_stable: bool = True,
    normalize: Normalize = "all",
    scale: ArrayLike = 1.0,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k largest of `softmax(scale * logits)` along `axis` and their indices, without the softmax being written.

    As `jax.lax.top_k(jax.nn.softmax(logits), k)`, but ordered as the logits are, before any rounding: the probabilities
    descend, and of equal logits the one of lower index comes first. The logits are read once; where a row is long, what
    is ordered is a maximum for each of its chunks and the k chunks that can matter. 16-bit and 8-bit floats are
    accumulated in float32 and rounded once. Under `batch_invariant()` a row's results are the same bits in any batch.

    An entry of -inf has the probability 0 and comes last. A row of only -inf, and one with +inf or NaN, gives NaN;
    where a NaN comes in the order of the indices is not said. Empty arrays, and k = 0, give empty ones.

    Derivatives of every order exist, in forward and reverse mode: to all logits of a row for `normalize="all"`, to
    the k selected ones for "top_k". The indices have none.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867.

    Args:
        logits: Logits of any real dtype and any shape; integers and booleans are promoted as by `jnp.exp`.
        k: How many to select, at most as many as there are along `axis`.
        axis: The axis to select along. Any but the last is moved there first, which costs a copy.
        is_stable: Taken as `jax.lax.top_k` takes it; of equal logits the one of lower index comes first either way.
        normalize: "all" for probabilities among all logits of a row, as in sampling from a vocabulary; "top_k" for
            probabilities among the k selected, which sum to one, as in a router to experts.
        scale: The logits' factor, an inverse temperature, as for `softmax`.
        implementation: None for the fastest there is, "xla", or "mosaic_gpu", which raises rather than falls back; it
            is that of the rows' statistics, which is where the logits are read.

    Returns:
        The probabilities, in the logits' (floating) dtype, and their indices, int32: both of the logits' shape, but
        with k entries along `axis`.

    Raises:
        TypeError: `logits` is complex or no array of numbers, or `k` or `axis` is not an integer.
        ValueError: `k`, `axis`, `normalize`, `scale` or `implementation` does not fit.
        NotImplementedError: `implementation="mosaic_gpu"` and no kernel takes the call; raised when it is compiled.

    >>> import jax.numpy as jnp
    >>> top_k_softmax(jnp.array([0.0, 1.0, -jnp.inf, 1.0, 0.0]), 3, normalize="top_k")[1]
    Array([1, 3, 0], dtype=int32)
    """
    del is_stable
    x = checks.floating(NAME, "logits", logits)
    if x.ndim == 0:
        raise ValueError(f"{NAME}: logits is a scalar, expected at least one axis to select along.")
    (along,) = checks.axes(NAME, _integer("axis", axis), x.ndim, "logits")
    k = _checked_k(k, x.shape[along], along)
    if normalize not in get_args(Normalize):
        raise ValueError(f"{NAME}: normalize={normalize!r}, expected 'all' or 'top_k'.")
    factor = checks.scale_factor(NAME, scale, x.shape, "the logits'")
    implementation = checks.implementation(NAME, implementation)
    dtype = x.dtype
    x = x.astype(accumulator_dtype(dtype)) if dtype.itemsize == 1 else x  # some 8-bit floats have no -inf for padding
    x, factor = scaled(x, factor)
    how = {"implementation": implementation, **batch_invariance.parameter()}
    values, indices, _, total, *y = TOP_K.bind(
        jnp.moveaxis(x, along, -1), k=k, normalizes=normalize == "all", scale=factor, **how
    )
    if y:
        (y,) = y
    else:
        # The NaN of a row may not be among those selected. It enters as a factor, so that the gradient has it too.
        by_kernel = functools.partial(bind, Op.SOFTMAX, scale=1.0, **how)
        among = by_kernel if k and "batch_invariant" in how else reference.softmax
        y = among(values, axes=(x.ndim - 1,)) * jnp.where(jnp.isnan(total), total, 1)[..., None]
    return jnp.moveaxis(y.astype(dtype), -1, along), jnp.moveaxis(indices, -1, along)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        raise TypeError(
            f"{NAME}: {name} is {value!r}, expected one integer. If it is traced, make it a static argument of jax.jit."
        ) from None


def _checked_k(k: int, n: Any, axis: int) -> int:
    """Returns `k`, which must be at most the number of entries."""
    count = _integer("k", k)
    if count < 0 or (isinstance(n, int) and count > n):
        raise ValueError(f"{NAME}: k={count}, expected 0 <= k <= {n}, the number of logits along axis {axis}.")
    return count


def _avals(x: Any, *, k: int, normalizes: bool, **_: Any) -> list[Any]:
    """The types of the selected logits and their indices, of the row's maximum and sum, and of the probabilities."""
    mesh, lead, rows, wide = x.sharding.mesh, spec_of(x)[:-1], x.shape[:-1], accumulator_dtype(x.dtype)
    selected, number = functools.partial(typed, x, mesh, (*rows, k), (*lead, None)), typed(x, mesh, rows, lead, wide)
    return [selected(wide), selected(jnp.int32), number, number, *([selected(x.dtype)] if normalizes else [])]


def lower(ctx: mlir.LoweringRuleContext, x: Any, *, normalizes: bool, **params: Any) -> Any:
    """Lowers to the selection, sharded like the operand; the statistics are lowered by themselves."""
    avals: Sequence[Any] = ctx.avals_in
    whole, across = (functools.partial(f, normalizes=normalizes, **params) for f in (select, select_across))
    return primitives.lower(ctx, sharding.RowOp((avals[0].ndim - 1,), _RESULTS[: 4 + normalizes], whole, across), x)


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, scale: float, **params: Any) -> tuple[Any, Any]:
    """The tangent of a selected logit is selected too. The maximum is held constant, as in the rows' statistics."""
    (x,), (t,) = primals, tangents
    out = TOP_K.bind(x, scale=scale, **params)
    moved = zeros(out)
    if type(t) is not ad.Zero:
        values, indices, maximum, total, *y = out
        moved[0] = _pick(*unify_varying(t, indices)).astype(values.dtype) * scale
        if y:
            moved[3] = reference.stats_tangent(x, None, t, maximum, axes=(x.ndim - 1,), scale=scale)
            of = lambda values, total: probabilities(values, maximum, total, x.dtype)
            moved[4] = jax.jvp(of, (values, total), (moved[0], moved[3]))[1]
    return out, moved


def _pick(t: jax.Array, indices: jax.Array) -> jax.Array:
    """The entries of rows at `indices`; if the rows are sharded, devices add up what each of them has."""
    spec = spec_of(jax.typeof(t))
    names = mesh_axes(spec[-1])
    if not names:
        return jnp.take_along_axis(t, indices, -1, mode="promise_in_bounds")

    def own(t: jax.Array, indices: jax.Array) -> jax.Array:
        at = indices - jax.lax.axis_index(names) * t.shape[-1]
        is_here = (at >= 0) & (at < t.shape[-1])
        found = jnp.take_along_axis(t, jnp.where(is_here, at, 0), -1, mode="promise_in_bounds")
        return jax.lax.psum(jnp.where(is_here, found, 0), names)

    selected = P(*spec[:-1], None)
    mesh = mesh_of([jax.typeof(t)])
    return jax.shard_map(own, mesh=mesh, in_specs=(P(*spec), selected), out_specs=selected)(t, indices)


define(TOP_K, _avals, functools.partial(batch_leading, TOP_K, lambda **_: [1]))
mlir.register_lowering(TOP_K, lower)
mlir.register_lowering(TOP_K, functools.partial(lower, may_count=True), platform="cuda")
ad.primitive_jvps[TOP_K] = _jvp
