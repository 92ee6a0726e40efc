"""Attention of few queries to keys and values in pages."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

from jaxsoftmax._attention import checks, sequence
from jaxsoftmax._attention.primitives import attend
from jaxsoftmax._core import checks as core_checks
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike, Implementation
from jaxsoftmax._core.memory import in_device_memory
from jaxsoftmax._core.primitives import Plan, checked, define, lower, lower_plain, register, typed, zeros
from jaxsoftmax._core.sharding import (
    Entry,
    Shape,
    Shard,
    Spec,
    common_spec,
    is_explicit,
    mesh_axes,
    mesh_of,
    on_mesh_of,
    reshard,
    settings_for,
    sharding_rule,
    spec_of,
    unify_varying,
)
from pallas_kernels import hardware
from pallas_kernels.attention.problem import Attention, Op, Operands, Rules
from pallas_kernels.hardware import Device
from pallas_kernels.types import accumulator_dtype

PageLayout = Literal["heads_first", "pages_first"]

_NAME = "paged_attention"
PAGED = Primitive(_NAME)
_AXES = {
    "heads_first": "(key heads, pages, page size, head_dim)",
    "pages_first": "(pages, page size, key heads, head_dim)",
}


class _Keywords(TypedDict, total=False):
    """The keywords that every overload has."""

    scale: ArrayLike | None
    logits_soft_cap: ArrayLike | None
    sinks: ArrayLike | None
    local_window_size: ArrayLike | None
    layout: PageLayout
    implementation: Implementation | None


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[False] = False,
    **rest: Unpack[_Keywords],
) -> jax.Array: ...
@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_residual: Literal[True],
    **rest: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...
@public
@in_device_memory
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    logits_soft_cap: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    local_window_size: ArrayLike | None = None,
    return_residual: bool = False,
    layout: PageLayout = "heads_first",
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of each sequence's last queries to its keys and values, which lie in pages of a common pool.

    Below, B is the number of sequences, T that of queries of each, N and K the heads of query and key, H and D the head
    dimensions of query and value. Page `block_tables[b, i]` holds the positions `i * page_size` and up of sequence b.

    The queries are the last T positions of a sequence, and each sees the keys up to its own position. A query that sees
    no key, as all do of a sequence of length 0, has output 0 and logsumexp -inf. dtypes, accumulation, NaN and heads
    that share keys are as in `flash_attention`.

    The kernel copies pages of 8, 16, 32 ... positions where they lie, for 16-bit inputs with heads of up to 256 in
    multiples of 8, and up to 1024 queries a sequence. Elsewhere, under `batch_invariant()` and for derivatives, XLA
    gathers the pages that the tables name first: that takes memory for B times as many positions as a table has.

    Entries of a table beyond its sequence's length may have any value. Another one that names no page makes NaN of the
    outputs of queries that see it, and may make NaN of those of the sequence's other queries.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    https://arxiv.org/abs/2309.06180.

    Args:
        query: `[B, N, H]`, or `[B, T, N, H]`; bfloat16, float16, float32 or float64.
        key_pages: `[K, pages, page_size, H]`, or as `layout` says, of the same dtype; N is a multiple of K.
        value_pages: `[K, pages, page_size, D]`, or as `layout` says, of the same dtype.
        block_tables: Integers `[B, entries]` of any width: the pages of each sequence, in order.
        lengths: Integers `[B]` of any width: how many positions each sequence has, with its queries. More than its
            table has room for count as many as that.
        scale: As in `flash_attention`.
        logits_soft_cap: As in `flash_attention`.
        sinks: As in `flash_attention`.
        local_window_size: How many keys before its own position a query sees. An array of one integer may be traced, as
            may one number for the soft cap: the pages are then gathered first.
        return_residual: Whether to return the logsumexp too.
        layout: "heads_first", as in JAX's own `paged_attention`, or "pages_first" for pages `[pages, page_size, K, H]`
            and `[pages, page_size, K, D]`, as in vLLM and FlashInfer.
        implementation: As in `flash_attention`.

    Returns:
        `[B, N, D]`, or `[B, T, N, D]`, of the inputs' dtype; with `return_residual` a pair of it and the logsumexp of
        each row's logits (natural logarithm, sinks included), `[B, N]` or `[B, T, N]`, float32, or float64 for float64.

    Raises:
        TypeError: a dtype is not one of the above, or the arrays differ in theirs.
        ValueError: an argument's shape or value does not fit.
        NotImplementedError: as in `flash_attention`.

    >>> import jax.numpy as jnp
    >>> pages = jnp.ones((2, 10, 8, 16))
    >>> tables = jnp.array([[3, 9, 4], [7, 0, 0]])
    >>> paged_attention(jnp.ones((2, 4, 16)), pages, pages, tables, jnp.array([20, 5])).shape
    (2, 4, 16)
    """
    q, k, v, tables, lengths = _checked(query, key_pages, value_pages, block_tables, lengths, layout)
    if not checks.is_side(local_window_size):
        shown = jax.typeof(local_window_size) if isinstance(local_window_size, jax.Array) else repr(local_window_size)
        raise ValueError(f"{_NAME}: local_window_size={shown}, expected one number of positions (0 or more), or None.")
    q, factor = checks.scaled(q, scale)
    is_one = q.ndim == 3
    q = q[:, None] if is_one else q
    place = checks.by_place(not is_one, (local_window_size, None), _NAME)
    soft_cap, data = checks.soft_cap(logits_soft_cap, q, _NAME)
    rules = Rules(
        scale=factor,
        soft_cap=soft_cap,
        causal_offset=None if is_one or place.is_data else 0,
        window=place.constant_window,
        align_ends=True,
        batch_invariant=core_checks.is_batch_invariant(),
        precision=jax.config.jax_default_matmul_precision,
    )
    extras = checks.operands({"sinks": sinks}, q, k)
    named = core_checks.implementation(_NAME, implementation)
    arrays = unify_varying(*_unified(layout, q, k, v, tables, lengths, *extras.values()))
    if data or place.is_data:
        out, lse = by_gathering(*arrays, rules=rules, layout=layout, implementation=named, place=place, **data)
    else:
        out, lse = PAGED.bind(*arrays, rules=rules, layout=layout, implementation=named)
    out = checked(out[:, 0] if is_one else out)
    # No operation on what was not asked for: debug_infs would see that it is -inf where a query sees no key.
    return (out, lse[..., 0] if is_one else jnp.swapaxes(lse, 1, 2)) if return_residual else out


def _checked(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    layout: PageLayout,
) -> tuple[jax.Array, ...]:
    """Returns the arrays, of shapes that fit; what `flash_attention` checks of them is left to it."""
    given = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    q, k, v = (core_checks.as_array(_NAME, name, x) for name, x in given.items())
    core_checks.choice(_NAME, "layout", layout, _AXES)
    if q.ndim not in (3, 4):
        raise ValueError(
            f"{_NAME}: query has shape {q.shape}, expected (batch, heads, head_dim), or (batch, length, heads, "
            "head_dim)."
        )
    if k.ndim != 4 or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{_NAME}: key_pages has shape {k.shape}, expected {_AXES[layout]}, with the query's head_dim of "
            f"{q.shape[-1]}. Pass layout= for pages in another order."
        )
    pages, size = k.shape[1:3] if layout == "heads_first" else k.shape[:2]
    if pages == 0 or size == 0:
        raise ValueError(f"{_NAME}: key_pages has {pages} pages of {size} positions, expected at least one of each.")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{_NAME}: value_pages has shape {v.shape}, expected key_pages', {k.shape}, but for the last axis."
        )
    if q.dtype.name not in checks.DTYPES or len({q.dtype, k.dtype, v.dtype}) > 1:
        raise TypeError(
            f"{_NAME}: query, key_pages and value_pages are {q.dtype}, {k.dtype} and {v.dtype}, expected one dtype for "
            f"all three, of {', '.join(checks.DTYPES)}."
        )
    key_heads = k.shape[0 if layout == "heads_first" else 2]
    if key_heads == 0 or q.shape[-2] % key_heads:
        raise ValueError(
            f"{_NAME}: query has {q.shape[-2]} heads and key_pages {key_heads}, expected a multiple of those. Pass "
            "layout= for pages in another order."
        )
    tables = checks.integers(_NAME, "block_tables", block_tables)
    if tables.ndim != 2 or tables.shape[0] != q.shape[0]:
        raise ValueError(
            f"{_NAME}: block_tables has shape {tables.shape}, expected ({q.shape[0]}, entries), the pages of each of "
            "the query's sequences."
        )
    return q, k, v, checks.clipped(tables), checks.lengths(_NAME, "lengths", lengths, q.shape[:1])


def _gathered(pages: jax.Array, tables: jax.Array, lengths: jax.Array, layout: PageLayout) -> jax.Array:
    """Returns the pages that the tables name, `[B, positions, K, H]`; NaN in the place of those that do not exist.

    Page 0, which stays in the cache, takes the place of pages beyond the lengths.
    """
    avals = jax.typeof(pages), jax.typeof(tables)
    of_pages, (of_batch, _) = map(spec_of, avals)
    axis = 1 if layout == "heads_first" else 0
    count, size = pages.shape[axis : axis + 2]
    spec = P(*of_pages[:axis], of_batch, None, *of_pages[axis + 1 :])
    with on_mesh_of(avals), settings_for(*avals):
        exists = (tables >= 0) & (tables < count)
        counts = size * jnp.arange(tables.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
        tables = jnp.where(counts, jnp.where(exists, tables, count), 0)
        at = pages.at[(slice(None),) * axis + (tables,)]
        found = at.get(mode="fill", fill_value=jnp.nan, out_sharding=spec if is_explicit(avals) else None)
        found = jnp.moveaxis(found, 0, 3) if layout == "heads_first" else found
        return jax.lax.collapse(found, 1, 3)


def by_gathering(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    *sinks: jax.Array,
    rules: Rules,
    layout: PageLayout,
    implementation: str | None = None,
    place: checks.ByPlace | None = None,
    **data: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp, by attention to the pages that are gathered first; `rules` lack what is data."""
    keys, values = (_gathered(pages, tables, lengths, layout) for pages in (k, v))
    data |= {"key_lengths": lengths} | ({"sinks": sinks[0]} if sinks else {})
    if place is not None and place.is_data:
        arrays, counts = {"query": q, "key": keys} | data, (q.shape[1], keys.shape[1])
        data |= sequence.of_indices(arrays, rules, (0, 0), counts)
        data |= place.operands(q, data["query_positions"])
        rules = dataclasses.replace(rules, align_ends=False)
    return attend(Operands(q, keys, values, **data), rules, implementation)


@functools.partial(jax.jit, static_argnames=("rules", "layout", "implementation"), inline=True)
def _by_gathering(*operands: jax.Array, layout: PageLayout, **params: Any) -> list[jax.Array]:
    """Gathers in one program: eagerly, indices of pages would not know the devices of a mesh."""
    return list(by_gathering(*_unified(layout, *operands, everywhere=True), layout=layout, **params))


@dataclasses.dataclass(frozen=True)
class Call:
    """The call, as `lowering` needs it."""

    has_kernel = True

    def name(self, **_: Any) -> str:
        return _NAME

    def plan(
        self, avals: Sequence[Any], device: Device, named: str | None, *, rules: Rules, layout: PageLayout, **_: Any
    ) -> Plan:
        """Returns the kernel for operands of these types on a device."""
        from pallas_kernels.attention import dispatch

        q, k, v, tables = avals[:4]
        if not all(isinstance(n, int) and n > 0 for x in avals for n in x.shape):
            return Plan(((_NAME, "is compiled for fixed, non-empty shapes, and a dimension is symbolic or zero"),))
        if q.shape[-1] % 8 or v.shape[-1] % 8:
            return Plan(((_NAME, f"takes heads in multiples of 8; they are {q.shape[-1]} and {v.shape[-1]} wide"),))
        pages_first = layout == "pages_first"
        size, heads = (k.shape[1], k.shape[2]) if pages_first else (k.shape[2], k.shape[0])
        batch, length, query_heads, head_dim = q.shape
        sizes = batch, query_heads, heads, length, tables.shape[1] * size, head_dim, v.shape[-1]
        facts = {"page_size": size, "pages_first": pages_first, "sinks": len(avals) > 5, "key_lengths": True}
        problem = Attention(Op.FORWARD, *sizes, jnp.dtype(q.dtype), **facts, **rules.of_kernels)
        decision = dispatch.decide(problem, device, named=named is not None)
        return Plan(decision.declined, decision if decision.kernel else None)

    def reference(self, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        """Lowers to the gathering of pages."""
        if not is_explicit(ctx.avals_in):
            return lower_plain(functools.partial(by_gathering, **params), ctx, *operands)
        return lower(ctx, self._sharded(ctx, functools.partial(by_gathering, **params), **params), *operands)

    def by_kernel(self, ctx: mlir.LoweringRuleContext, named: str | None, **params: Any) -> "_Paged":
        return self._sharded(ctx, functools.partial(_run, self, named, **params), **params)

    def _sharded(self, ctx: mlir.LoweringRuleContext, run: Callable[..., Any], *, layout: PageLayout, **_: Any) -> Any:
        return _Paged(layout, run)


def _run(call: Call, named: str | None, *operands: jax.Array, **params: Any) -> Any:
    """Runs the kernel on one device's operands, or gathers where it does not take this shard."""
    chosen = call.plan(operands, hardware.current(), named, **params).required_by(named)
    if chosen.decision is None:
        return by_gathering(*operands, **params)
    q, k, v, tables, lengths, *sinks = operands
    return chosen.launch(q, k, v, lengths, *(x.reshape(-1) for x in sinks), tables)


@dataclasses.dataclass(frozen=True)
class _Paged:
    """The call to be sharded by sequences and heads."""

    layout: PageLayout
    run: Callable[..., Any]

    def whole(self, *operands: jax.Array) -> list[jax.Array]:
        """Runs everything on one device."""
        return list(self.run(*operands))

    def shard_problem(self, shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int]) -> Shard:
        """Returns one device's part: heads stay sharded where each device has whole groups."""
        batch, heads = _sharded_axes(shapes, specs, sizes, self.layout)
        return Shard(*_specs(self.layout, batch, heads, heads, len(shapes)), self.whole)

    def shardy_rule(self, shapes: Sequence[Shape]) -> SdyShardingRule:
        """Returns a factor for the sequences and one for the heads."""
        same = shapes[0][2] == shapes[1][2 if self.layout == "pages_first" else 0]
        ins, outs = _specs(self.layout, "batch", "heads", "heads" if same else "key_heads", len(shapes))
        return sharding_rule(ins, outs)

    def is_whole_in(self, pieces: Sequence[Shape]) -> bool:
        """Whether only the sequences are sharded."""
        batch = pieces[0][0]
        ins = [(batch, 1, 1, 1), (1,) * 4, (1,) * 4, (batch, 1), (batch,), (1, 1)]
        return list(map(tuple, pieces)) == ins[: len(pieces)]


def _specs(layout: PageLayout, batch: Entry, heads: Entry, key_heads: Entry, count: int) -> tuple[list[P], list[P]]:
    """Returns the partitions of `count` operands and of the results, for those of sequences and heads."""
    pages = P(None, None, key_heads, None) if layout == "pages_first" else P(key_heads, None, None, None)
    ins = [P(batch, None, heads, None), pages, pages, P(batch, None), P(batch), P(None, heads)]
    return ins[:count], [P(batch, None, heads, None), P(batch, heads, None)]


def _sharded_axes(
    shapes: Sequence[Shape], specs: Sequence[Spec], sizes: Mapping[str, int], layout: PageLayout
) -> tuple[Entry, Entry]:
    """How sequences and heads are sharded: by the first operand that is, heads where each device has whole groups."""
    query, *pages, tables, lengths = specs[:5]
    at = 2 if layout == "pages_first" else 0
    of_batch = [(query[0], query[2]), (tables[0], None), (lengths[0], None)]
    of_heads = [(None, spec[at]) for spec in pages] + [(None, spec[-1]) for spec in specs[5:]]
    batch, heads = common_spec(of_batch + of_heads)
    parts = math.prod(sizes[name] for name in mesh_axes(heads))
    return batch, heads if shapes[1][at] % parts == 0 else None


def _unified(layout: PageLayout, *arrays: jax.Array, everywhere: bool = False) -> list[jax.Array]:
    """The arrays, resharded alike where their types have shardings; `everywhere` those too whose types have no mesh."""
    avals = [jax.typeof(x) for x in arrays]
    if not is_explicit(avals):
        return list(arrays)
    mesh = mesh_of(avals)
    batch, heads = _sharded_axes([a.shape for a in avals], [spec_of(a) for a in avals], mesh.shape, layout)
    specs, _ = _specs(layout, batch, heads, heads, len(arrays))
    return [reshard(x, spec, mesh if everywhere else None) for x, spec in zip(arrays, specs, strict=True)]


def _avals(*avals: Any, layout: PageLayout, **_: Any) -> list[Any]:
    query, _, value = avals[:3]
    mesh, (batch, length, heads, _) = mesh_of(avals), query.shape
    axes = _sharded_axes([a.shape for a in avals], [spec_of(a) for a in avals], mesh.shape, layout)
    out, lse = P(axes[0], None, axes[1], None), P(*axes, None)
    return [
        typed(query, mesh, (batch, length, heads, value.shape[-1]), out, query.dtype),
        typed(query, mesh, (batch, heads, length), lse, accumulator_dtype(query.dtype)),
    ]


def _batch(_: Any, operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[Any, Any]:
    """Maps a call: a mapped axis joins the sequences, unless pages or sinks are mapped, which are gathered."""
    mapped = [d is not None for d in dims]
    if not any(mapped):
        return PAGED.bind(*operands, **params), [None, None]
    if any(mapped[1:3]) or any(mapped[5:]) or is_explicit([jax.typeof(x) for x in operands]):
        return jax.vmap(functools.partial(by_gathering, **params), tuple(dims))(*operands), [0, 0]
    count = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

    def joined(x: jax.Array, d: int | None) -> jax.Array:
        x = jnp.broadcast_to(x, (count, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        return jax.lax.collapse(x, 0, 2)

    arrays = [x if i in (1, 2) or i > 4 else joined(x, d) for i, (x, d) in enumerate(zip(operands, dims, strict=True))]
    found = PAGED.bind(*unify_varying(*arrays), **params)
    return [x.reshape(count, -1, *x.shape[1:]) for x in found], [0, 0]


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Derivatives are those of attention to gathered pages."""
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero and i not in (3, 4)]
    if not moving:
        out = PAGED.bind(*primals, **params)
        return out, zeros(out)

    def compute(*moved: jax.Array) -> Any:
        operands = list((dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))).values())
        # One program only where it has to be: debug_infs would see its logsumexps.
        gather = _by_gathering if is_explicit([jax.typeof(x) for x in operands]) else by_gathering
        return list(gather(*operands, **params))

    return jax.jvp(compute, [primals[i] for i in moving], [tangents[i] for i in moving])


define(PAGED, _avals, _batch, states=(1,))
register(PAGED, Call())
ad.primitive_jvps[PAGED] = _jvp
