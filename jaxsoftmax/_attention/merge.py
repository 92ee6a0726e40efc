"""Attention to keys in parts, of which the caller computes each by itself."""

import functools
import operator
from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._attention.checks import DTYPES
from jaxsoftmax._core import checks
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike
from jaxsoftmax._core.memory import in_device_memory
from jaxsoftmax._core.sharding import unify_shardings
from pallas_kernels.monoid import Stats, decay, finite, log_normalizer, nan_or_infinite
from pallas_kernels.types import accumulator_dtype

_NAME = "merge_attention"


@public
@in_device_memory
def merge_attention(
    outs: Sequence[ArrayLike] | jax.Array | np.ndarray,
    lses: Sequence[ArrayLike] | jax.Array | np.ndarray,
    *,
    axis_name: Hashable | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merges outputs and logsumexps of attention to parts of the keys, in any order, into attention to all keys.

    The parts are what `flash_attention` or `paged_attention` return with `return_residual=True` for the same queries
    and disjoint sets of keys: a prefix that sequences share and the rest, pages and new keys, the blocks of a ring, the
    keys of each device. Sinks count once in the whole, so only one part has them.

    A part whose logsumexp is -inf has no keys and does not count, whatever its output is. A query that no part shows a
    key has output 0 and logsumexp -inf. NaN or +inf in a logsumexp makes NaN of the query's output.

    Outputs are weighed and added in float32, or float64 if any operand is float64, and rounded once. Derivatives of
    every order exist, in forward and reverse mode, with respect to outputs and logsumexps. The derivatives with respect
    to a part that does not count are 0.

    With `axis_name` the parts of all devices along axes of a mesh are merged too, in `jax.shard_map` (or `jax.vmap`
    with that name): each gets the whole. Devices exchange the maximum and the sums. Parts that are gathered before, as
    `jax.lax.all_gather(out, axis_name)`, are merged without it.

    Source: Milakov & Gimelshein 2018, arXiv:1805.02867; Dao 2023, "FlashAttention-2", arXiv:2307.08691.

    Args:
        outs: At least one output, or an array of outputs that are stacked along the first axis: `[*batch, T, N, D]` or
            any other shape with an axis of values at the end; bfloat16, float16, float32 or float64, the same for all.
        lses: As many logsumexps, each of its output's shape without the last axis; real numbers.
        axis_name: The name of one axis of a mesh, or a tuple of names.

    Returns:
        The output, of the parts' dtype, and the logsumexp, float32, or float64 if any operand is float64.

    Raises:
        TypeError: outputs are not of one of the dtypes above, or logsumexps are not real.
        ValueError: there is no part, there are not as many logsumexps as outputs, or shapes do not fit.

    >>> import jax.numpy as jnp
    >>> from jaxsoftmax import flash_attention
    >>> x = jnp.ones((2, 6, 4, 8))
    >>> parts = [flash_attention(x, keys, keys, return_residual=True) for keys in (x[:, :4], x[:, 4:])]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> bool(jnp.allclose(lse, flash_attention(x, x, x, return_residual=True)[1]))
    True
    """
    outs, lses = _checked(_parts("outs", outs), _parts("lses", lses))
    _check_axes(axis_name)
    wide = max((accumulator_dtype(x.dtype) for x in (*outs, *lses)), key=lambda dtype: dtype.itemsize)
    narrow = outs[0].dtype
    arrays = unify_shardings(*(x.astype(wide) for x in outs), *(x.astype(wide)[..., None] for x in lses))
    outs, lses = arrays[: len(outs)], arrays[len(outs) :]
    maximum = functools.reduce(jnp.maximum, map(jax.lax.stop_gradient, lses))
    maximum = maximum if axis_name is None else jax.lax.pmax(maximum, axis_name)
    weights = [decay(lse, finite(maximum)) for lse in lses]
    # The output of a part without keys may be NaN.
    counted = [jnp.where(lse == -jnp.inf, 0.0, out) for lse, out in zip(lses, outs, strict=True)]
    weighted = map(operator.mul, counted, weights)
    total, out = (functools.reduce(operator.add, parts) for parts in (weights, weighted))
    total, out = (total, out) if axis_name is None else jax.lax.psum((total, out), axis_name)
    is_empty = (maximum == -jnp.inf) & ~jnp.isnan(total)  # devices' maximum may drop a NaN
    total = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, log_normalizer(Stats(*nan_or_infinite(maximum, total))))
    return (out / total).astype(narrow), lse[..., 0]


def _checked(outs: list[ArrayLike], lses: list[ArrayLike]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns arrays of dtypes and shapes that fit."""
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"{_NAME}: got {len(outs)} outs and {len(lses)} lses, expected as many of each, and at least one. Pass one "
            "part as [out], [lse]."
        )
    arrays = [checks.as_array(_NAME, "outs", x) for x in outs]
    logsumexps = [checks.floating(_NAME, "lses", x) for x in lses]
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) > 1 or arrays[0].dtype.name not in DTYPES:
        raise TypeError(
            f"{_NAME}: outs are of {', '.join(sorted(x.name for x in dtypes))}, expected one dtype for all, of "
            f"{', '.join(DTYPES)}."
        )
    shape = arrays[0].shape
    for x, lse in zip(arrays, logsumexps, strict=True):
        if not shape or x.shape != shape or lse.shape != shape[:-1]:
            raise ValueError(
                f"{_NAME}: a part has an output of shape {x.shape} and a logsumexp of shape {lse.shape}, expected "
                f"{shape or '(..., head_dim)'}, the first part's, and that without its last axis. Parts that lie along "
                "another axis than the first are moved there by jnp.moveaxis."
            )
    return arrays, logsumexps


def _parts(name: str, given: Iterable[ArrayLike] | jax.Array) -> list[ArrayLike]:
    try:
        return list(given)
    except TypeError:
        raise TypeError(
            f"{_NAME}: {name} is {given!r}, expected a sequence of arrays, one for each part. Pass one part as [out], "
            "[lse]."
        ) from None


def _check_axes(names: Hashable | None) -> None:
    """Raises unless these are names of axes that the call is mapped over."""
    for name in names if isinstance(names, tuple) else [] if names is None else [names]:
        try:
            if isinstance(name, (int, list)):
                raise TypeError
            jax.lax.axis_size(name)
        except (TypeError, NameError):
            raise ValueError(
                f"{_NAME}: axis_name is {names!r}, expected the name of an axis of the mesh, or several, in "
                "jax.shard_map or jax.vmap."
            ) from None
