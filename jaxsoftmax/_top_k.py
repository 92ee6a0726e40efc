"""`top_k_softmax`: the public function, its primitive, and the selection, chunk by chunk.

The primitive returns the k largest logits, their indices, the row's softmax state and, if normalised over the whole
row, the probabilities. It reduces the last axis, so that vmap adds a leading one. Its derivative combines those of
the selection, of the state's sum, and of the probabilities as a function of both.

The k largest elements lie in the k chunks with the largest maxima, of equal ones the first: an element outside of
those has k chunks before it, each with an element that is larger, or equal and of lower index. A chunk's maximum is
part of its softmax state, so one read of the row gives the maxima that select chunks and, merged, the row's state. A
maximum per chunk and k chunks are left to order, which is least where a chunk has about sqrt(n / k) elements. On a GPU
a kernel selects the k largest of them, so that few are sorted; elsewhere all are sorted.

Few rows on a GPU are ranked by counting, because to sort a thousand elements of one row takes longer than to read it.
An element's rank is the number of those before it: all compared with all, in one fused reduction a step:

    ranks of the chunks -> the k chunks, and the row's merged state -> ranks of their elements -> the k elements

For k = 1 the ranks are not needed. Chunks need not come in the row's order: places decide between equal elements.

Source of the fusion: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core import axes, checks, lowering, numbers, recorder
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike, Implementation
from jaxsoftmax._core.memory import in_device_memory
from jaxsoftmax._core.primitives import checked, define, map_leading, zeros
from jaxsoftmax._core.sharding import Columns, all_gather, mesh_axes, mesh_of, spec_of, unify_shardings, unify_varying
from jaxsoftmax._softmax import scaled
from jaxsoftmax._softmax.primitives import bind
from pallas_kernels import hardware
from pallas_kernels.monoid import Stats, combine, merge_over
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import Op
from pallas_kernels.types import Dim, accumulator_dtype

NAME = "top_k_softmax"
Normalize = Literal["all", "top_k"]
Found = tuple[jax.Array, jax.Array]  # values and their places

TOP_K = Primitive("softmax_top_k")
COUNTS = "XLA counts ranks"  # noted by a recorder
_RESULTS: Sequence[axes.Result] = ("top_k", "top_k", "reduced", "reduced", "top_k")


@public
@in_device_memory
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
    """Returns the k largest of `softmax(scale * logits)` along `axis` and their indices; writes no softmax.

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
    (along,) = checks.axes(NAME, checks.integer(NAME, "axis", axis), x.ndim, "logits")
    k = _checked_k(k, x.shape[along], along)
    checks.choice(NAME, "normalize", normalize, get_args(Normalize))
    factor = numbers.scale_factor(NAME, scale, x.shape, accumulator_dtype(x.dtype), "the logits'")
    implementation = checks.implementation(NAME, implementation)
    dtype = x.dtype
    x = x.astype(accumulator_dtype(dtype)) if dtype.itemsize == 1 else x  # some 8-bit floats have no -inf for padding
    (x,) = unify_shardings(x)  # an extent of 1 is sharded no more
    x, factor = scaled(x, factor)
    how = {"implementation": implementation, **checks.batch_invariance()}
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
    return checked(jnp.moveaxis(y.astype(dtype), -1, along)), jnp.moveaxis(indices, -1, along)


def _checked_k(k: int, n: Dim, axis: int) -> int:
    """Returns `k`, which must be at most the number of entries."""
    count = checks.integer(NAME, "k", k)
    if count < 0 or (isinstance(n, int) and count > n):
        raise ValueError(f"{NAME}: k={count}, expected 0 <= k <= {n}, the number of logits along axis {axis}.")
    return count


def _avals(x: ShapedArray, *, k: int, normalizes: bool, **_: Any) -> list[Any]:
    """Returns the types of selected logits, their indices, the row's maximum and sum, and the probabilities."""
    rows, wide = x.shape[:-1], accumulator_dtype(x.dtype)
    dtypes = (wide, jnp.int32, wide, wide, x.dtype)[: 4 + normalizes]
    shapes = [(*rows, k) if result == "top_k" else rows for result in _RESULTS]
    return _signature(x, normalizes).types([x], dtypes, shapes[: 4 + normalizes])


def _signature(x: ShapedArray, normalizes: bool) -> axes.Signature:
    rank = len(x.shape)
    return axes.over_rows(1, rank, (rank - 1,), _RESULTS[: 4 + normalizes])


def lower(ctx: mlir.LoweringRuleContext, x: Any, *, normalizes: bool, by_kernel: bool = False, **params: Any) -> Any:
    """Lowers to the selection, sharded like the operand; the statistics are lowered by themselves."""
    avals: Sequence[Any] = ctx.avals_in
    params["by_kernel"] = by_kernel and params["implementation"] != "xla"
    whole, across = (functools.partial(f, normalizes=normalizes, **params) for f in (select, select_across))
    op = axes.sharded_rows(_signature(avals[0], normalizes), (avals[0].ndim - 1,), whole, across)
    by_xla = functools.partial(lowering.lower, ctx, op, x)
    return lowering.recorded(ctx, None, None, by_xla, x, **params) if recorder.is_open() else by_xla()


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
            of = lambda values, total: _probabilities_program(values, maximum, total, x.dtype)
            moved[4] = jax.jvp(of, (values, total), (moved[0], moved[3]))[1]
    return out, moved


def _pick(t: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the entries of rows at `indices`; if the rows are sharded, devices add up what each of them has."""
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


_AT_ONCE = 1024  # elements of a row that one kernel orders
_VECTOR = 8
# Costs, in reads of an element.
_ORDER = 4.0  # to order an element
_STATE = 4.0  # to write a chunk's state
_UNALIGNED = 0.5  # more for each element of chunks that begin anywhere
_UNEVEN = 0.2  # more for each element of chunks that do not fill a warp evenly
_COPY = 2.0  # more for each element of padded chunks

# Comparisons up to which counting one row is faster than sorting it, and how much slower each is for several rows; in
# comparisons, what one among the gathered candidates costs, a padded copy, and chunks that begin anywhere.
_MOST_COMPARISONS, _SLOWER = 2**25, 2
_RANK_CANDIDATE, _RANK_COPY, _RANK_UNALIGNED = 3, 2**23, 2**18
_lax_top_k = jax.lax.top_k  # bound once, as a program may put another function in its place


@functools.cache
def chunk_size(n: Dim, k: int) -> Dim:
    """Returns the chunk size with which to find the `k` largest of a row of `n`; `n` itself means no chunks."""
    if not isinstance(n, int) or n <= _AT_ONCE or k == 0:
        return n

    def cost(c: int) -> float:
        chunks = -(-n // c)
        copy = _COPY * n if n % c else _UNALIGNED * n if c % _VECTOR else _UNEVEN * n if c & (c - 1) else 0.0
        return (_ORDER + _STATE) * chunks + _ORDER * k * c + copy

    most = max(2, min(n // k, 8 * math.isqrt(n // k)))
    best = min(range(2, most + 1), key=cost)
    return best if cost(best) < _ORDER * n else n


def chunked(x: jax.Array, c: int) -> jax.Array:
    """Reshapes `[..., n]` to `[..., chunks, c]`; the last chunk is padded with -inf."""
    *lead, n = x.shape
    chunks = -(-n // c)
    if n < chunks * c:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, chunks * c - n)], constant_values=-jnp.inf)
    return x.reshape(*lead, chunks, c)


def largest(keys: jax.Array, k: int, by_kernel: bool = False) -> Found:
    """Returns `jax.lax.top_k` of comparable keys, for long rows chunk by chunk."""
    n = keys.shape[-1]
    if (c := chunk_size(n, k)) < n:
        chunks = chunked(keys, c)
        return largest_in(chunks, chunks.max(-1), k, by_kernel)
    if (places := _by_kernel(keys, k, ordered=True) if by_kernel else None) is None:
        return _lax_top_k(keys, k)
    return jnp.take_along_axis(keys, places, -1), places


def _by_kernel(keys: jax.Array, k: int, *, ordered: bool) -> jax.Array | None:
    """Returns the places of the `k` largest keys, in the row's order or theirs, or None where no kernel selects."""
    # Pallas takes longer to import than JAX itself, and only a lowering for CUDA needs it.
    from pallas_kernels.top_k import dispatch
    from pallas_kernels.top_k.radix_select import Problem

    *rows, cols = keys.shape
    decision = dispatch.decide(Problem(math.prod(rows), cols, k, keys.dtype, ordered), hardware.current())
    recorder.consider(decision)
    if decision.chosen is None:
        return None
    if recorder.is_open():
        return jnp.zeros((*rows, k), jnp.int32)
    places = decision.run(keys)
    if decision.config.sorts or not ordered:
        return places
    _, at = _lax_top_k(jnp.take_along_axis(keys, places, -1), k)
    return jnp.take_along_axis(places, at, -1)


def largest_in(chunks: jax.Array, maxima: jax.Array, k: int, by_kernel: bool = False, scale: float = 1.0) -> Found:
    """Finds the `k` largest of `scale * chunks`, `[..., chunks, c]`, by the chunks' maxima, and their indices."""
    # In the row's order, so that equal candidates keep their order. For a stable sort XLA moves places, too.
    if (chosen := _by_kernel(maxima, k, ordered=False) if by_kernel else None) is None:
        chosen = jnp.sort(largest(maxima, k, by_kernel)[1], -1, stable=False)
    candidates, c = jnp.take_along_axis(chunks, chosen[..., None], -2), chunks.shape[-1]
    keys = comparable(candidates.reshape(*candidates.shape[:-2], k * c), scale)
    values, at = largest(keys, k, by_kernel)
    return values, jnp.take_along_axis(chosen, at // c, -1) * c + at % c


def comparable(x: jax.Array, scale: float = 1.0) -> jax.Array:
    """Makes keys to compare: `scale * x`, rounded as in the row's statistics, and 0 for -0, which XLA may order."""
    x = x if scale == 1.0 else x.astype(accumulator_dtype(x.dtype)) * scale
    return jnp.where(x == 0, jnp.zeros_like(x), x)


def select(
    x: jax.Array,
    *,
    k: int,
    normalizes: bool,
    scale: float,
    implementation: str | None,
    may_count: bool = False,
    by_kernel: bool = False,
    batch_invariant: bool = False,
) -> list[jax.Array]:
    """Returns the `k` largest of `scale * x` along the last axis, their indices, and the rows' maximum and sum.

    With `normalizes` it also returns their probabilities, which may save a kernel. With `may_count`, it ranks few rows
    by counting; `by_kernel`, others are selected. With `batch_invariant`, one kernel finds the rows' state in another
    read, because the order in which XLA adds up the chunks' sums depends on the batch.
    """
    how = {"implementation": implementation} | ({"batch_invariant": True} if batch_invariant else {})
    state = functools.partial(bind, Op.STATS, scale=scale, function=NAME, **how)
    n, wide = x.shape[-1], accumulator_dtype(x.dtype)
    c, counts = n if batch_invariant else chunk_size(n, k), may_count and k == 1
    if may_count and k > 1 and c < n and (few := rank_chunk_size(n, k, math.prod(x.shape[:-1]))):
        c, counts = few, True
    if c == n:
        values, indices = largest(comparable(x, scale), k, by_kernel)
        row = state(x, axes=(x.ndim - 1,))
    else:
        chunks = chunked(x, c)
        stats = Stats(*state(chunks, axes=(x.ndim,)))
        if counts:
            recorder.note(COUNTS)
            return select_by_rank(chunks, stats, n, k=k, scale=scale)[: 4 + normalizes]
        maxima = comparable(stats.max.astype(x.dtype) if scale == 1.0 else stats.max)
        values, indices = largest_in(chunks, maxima, k, by_kernel, scale)
        row = merge_over(stats, -1, maximum=values[..., 0].astype(wide))
    return _completed([values.astype(wide), indices.astype(jnp.int32), *row], normalizes, x.dtype)


def probabilities(values: jax.Array, maximum: jax.Array, total: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the probabilities of selected `values` among all of a row, rounded."""
    values = reference.below(values, maximum[..., None])
    return reference.softmax(values, axes=(values.ndim - 1,), known=Stats(maximum, total)).astype(dtype)


# Eagerly, a custom derivative does not know the devices of a mesh that the user has not set.
_probabilities_program = jax.jit(probabilities, static_argnums=3)


def _completed(selected: list[jax.Array], normalizes: bool, dtype: jnp.dtype) -> list[jax.Array]:
    """Adds the probabilities, if they are wanted."""
    values, _, maximum, total = selected
    return [*selected, probabilities(values, maximum, total, dtype)] if normalizes else selected


def select_across(columns: Columns, x: jax.Array, *, k: int, normalizes: bool, **params: Any) -> list[jax.Array]:
    """Selects in sharded rows: each device selects among its columns, then they exchange k numbers each."""
    local, names = x.shape[-1], columns.names
    x = x if columns.inside is None else jnp.where(columns.inside, x, -jnp.inf)
    mine = select(x, k=min(k, local), normalizes=False, **params)
    mine[1] += jax.lax.axis_index(names) * local
    # XLA would add up the chunks' sums in one slow loop with the copy for the exchange.
    mine = jax.lax.optimization_barrier(mine)
    values, indices, *stats = all_gather(names, *mine)
    values, indices = (jnp.moveaxis(part, 0, -2).reshape(*x.shape[:-1], -1) for part in (values, indices))
    # In the order of the columns, as ties need. XLA sorts 16-bit keys and their places as one word.
    keys = comparable(values.astype(x.dtype) if params["scale"] == 1.0 else values)
    keys, at = largest(keys, k, params.get("by_kernel", False))
    found = [keys.astype(values.dtype), jnp.take_along_axis(indices, at, -1), *merge_over(Stats(*stats), 0)]
    return _completed(found, normalizes, x.dtype)


@functools.cache
def rank_chunk_size(n: int, k: int, rows: Any) -> int | None:
    """Returns the chunk size to rank the `k` > 1 largest of `rows` rows of `n` by counting; None means to sort."""

    def comparisons(c: int, weight: int = 1) -> int:
        return (-(-n // c)) ** 2 + weight * (k * c) ** 2

    def cost(c: int) -> int:
        return comparisons(c, _RANK_CANDIDATE) + _RANK_COPY * (n % c > 0) + _RANK_UNALIGNED * (c % _VECTOR > 0)

    if not isinstance(rows, int):
        return None
    most = _MOST_COMPARISONS if rows <= 1 else _MOST_COMPARISONS // (_SLOWER * rows)
    few = (c for c in range(2, min(n // k, 8 * math.isqrt(n // k)) + 1) if comparisons(c) <= most)
    return min(few, key=cost, default=None)


def select_by_rank(chunks: jax.Array, stats: Stats, n: int, *, k: int, scale: float) -> list[jax.Array]:
    """Finds the `k` largest of `scale * chunks`, `[..., chunks, c]`, by the chunks' `stats`, and the row's state.

    Returns values, indices in the row of `n`, maximum, sum, and the rounded probabilities. The probabilities of all
    candidates are computed, because an operation after a reduction is one more kernel. In rows with NaN the indices may
    be those of any elements.
    """
    chosen, *row = _first_chunk(stats) if k == 1 else _first_chunks(stats, k)
    c = chunks.shape[-1]
    flat = (*chosen.shape[:-1], k * c)
    candidates = jnp.take_along_axis(chunks, chosen[..., None], -2, mode="promise_in_bounds")
    values = reference.logits(candidates, scale).reshape(flat)
    places = (chosen[..., None] * c + jnp.arange(c, dtype=jnp.int32)).reshape(flat)
    if n < chunks.shape[-2] * c:
        # Padding of the last chunk gets the index of the row's last element.
        places = jnp.minimum(places, n - 1)
    y = reference.softmax(reference.below(values, row[0][..., None]), axes=(len(flat) - 1,), known=Stats(*row)).astype(
        chunks.dtype
    )
    among, nan = (values, places, _bits(y)), _bits(jnp.asarray(jnp.nan, y.dtype))
    if k == 1:
        found = [part[..., None] for part in _reduce(_earlier, (-jnp.inf, n - 1, nan), among)]
    else:
        # Or each of the next two kernels would gather them, the first of them as often as it compares them.
        values, places, y = jax.lax.optimization_barrier(among)
        is_of, others = _is_of_rank(values, places, k), (jnp.inf, n - 1, nan)
        parts = [
            jnp.where(is_of, part[..., None, :], other) for part, other in zip((values, places, y), others, strict=True)
        ]
        found = _reduce(lambda a, b: [*map(jnp.minimum, a, b)], others, parts)
    values, places, y = found
    return [values, places, *row, jax.lax.bitcast_convert_type(y, chunks.dtype)]


def _first_chunk(stats: Stats) -> list[jax.Array]:
    """Returns the first chunk with the row's maximum, `[..., 1]`, and the row's state."""

    def merged(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [_earlier((a[1], a[0]), (b[1], b[0]))[1], *combine(Stats(*a[1:]), Stats(*b[1:]))]

    start = (stats.max.shape[-1] - 1, -jnp.inf, 0)
    chosen, *row = _reduce(merged, start, (_places(stats.max), *stats))
    return [chosen[..., None], *row]


def _first_chunks(stats: Stats, k: int) -> list[jax.Array]:
    """Returns the chunks with the k largest maxima, in their order, and the row's state.

    The state is merged once for each of the k, as part of the same reduction, because a second one costs more.
    """

    def merged(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.minimum(a[0], b[0]), *combine(Stats(*a[1:]), Stats(*b[1:]))]

    last, places = stats.max.shape[-1] - 1, _places(stats.max)
    at = jnp.where(_is_of_rank(stats.max, places, k), places[..., None, :], last)
    parts = (jnp.broadcast_to(part[..., None, :], at.shape) for part in stats)
    chosen, *row = _reduce(merged, (last, -jnp.inf, 0), (at, *parts))
    return [chosen, *(part[..., 0] for part in row)]


def _bits(y: jax.Array) -> jax.Array:
    """Bitcasts to an integer: XLA reduces several arrays together, but not floats of several dtypes."""
    return jax.lax.bitcast_convert_type(y, f"uint{8 * y.dtype.itemsize}")


def _is_of_rank(keys: jax.Array, places: jax.Array, k: int) -> jax.Array:
    """Whether of `keys`, `[..., n]`, each is the r-th largest: `[..., k, n]`; of equal ones the lower place is first.

    Comparisons with NaN are false: each has rank 0, and the last ranks have no element.
    """
    (mine, other), (here, there) = ((part[..., :, None], part[..., None, :]) for part in (keys, places))
    ranks = ((other > mine) | ((other == mine) & (there < here))).sum(-1, dtype=jnp.int32)
    return ranks[..., None, :] == jnp.arange(k, dtype=jnp.int32).reshape((1,) * (ranks.ndim - 1) + (k, 1))


def _places(keys: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(keys.shape[-1], dtype=jnp.int32), keys.shape)


def _earlier(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the one of two (value, index, ...) with the larger value, or of equal values the lower index."""
    is_a = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return [jnp.where(is_a, x, y) for x, y in zip(a, b, strict=True)]


def _reduce(
    step: Callable[..., Sequence[jax.Array]], start: Sequence[Any], operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Returns several arrays reduced together over their last axis."""
    neutral = [jnp.asarray(value, x.dtype) for value, x in zip(start, operands, strict=True)]
    return jax.lax.reduce(tuple(operands), tuple(neutral), step, (operands[0].ndim - 1,))


define(TOP_K, _avals, functools.partial(map_leading, lambda **_: [1]), states=(2, 3))
mlir.register_lowering(TOP_K, lower)
mlir.register_lowering(TOP_K, functools.partial(lower, may_count=True, by_kernel=True), platform="cuda")
ad.primitive_jvps[TOP_K] = _jvp
