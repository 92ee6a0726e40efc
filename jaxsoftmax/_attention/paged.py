"""Attention of few queries to keys and values in pages."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

from jaxsoftmax._attention import checks, sequence
from jaxsoftmax._attention.primitives import attend
from jaxsoftmax._core import checks as core_checks
from jaxsoftmax._core.axes import Sharded, Signature, parse
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike, Implementation
from jaxsoftmax._core.lowering import Plan, launch_kernel, lower, lower_plain, register
from jaxsoftmax._core.memory import in_device_memory
from jaxsoftmax._core.primitives import Mapped, checked, define, zeros
from jaxsoftmax._core.sharding import (
    is_explicit,
    on_mesh_of,
    settings_for,
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
# Sequences, queries, heads, key heads, head dimensions; pages and positions in them, entries of a table.
_OPERANDS = {
    "heads_first": ("*btnh", "kpzh", "kpzd", "*be", "*b", "1n"),
    "pages_first": ("*btnh", "pzkh", "pzkd", "*be", "*b", "1n"),
}
_RESULTS = ("*btnd", "*bnt")


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
    operands = q, k, v, tables, lengths, *extras.values()
    arrays = unify_varying(*signature(layout, operands).unify(operands))
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
    if q.ndim > 4:
        run = functools.partial(by_gathering, rules=rules, layout=layout, implementation=implementation)
        return jax.vmap(run, (0, None, None, 0, 0, *[None] * len(sinks)))(q, k, v, tables, lengths, *sinks)
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
    return list(by_gathering(*signature(layout, operands).unify(operands, everywhere=True), layout=layout, **params))


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
        *sequences, length, query_heads, head_dim = q.shape
        sizes = math.prod(sequences), query_heads, heads, length, tables.shape[-1] * size, head_dim, v.shape[-1]
        facts = {"page_size": size, "pages_first": pages_first, "sinks": len(avals) > 5, "key_lengths": True}
        problem = Attention(Op.FORWARD, *sizes, jnp.dtype(q.dtype), **facts, **rules.of_kernels)
        decision = dispatch.decide(problem, device, named=named is not None)
        return Plan(decision.declined, decision if decision.kernel else None)

    def reference(self, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        """Lowers to the gathering of pages."""
        if not is_explicit(ctx.avals_in):
            return lower_plain(functools.partial(by_gathering, **params), ctx, *operands)
        return lower(ctx, self._sharded(ctx, functools.partial(by_gathering, **params), **params), *operands)

    def on_one_device(self, named: str | None, plan: Plan | None, **params: Any) -> Callable[..., Any]:
        return functools.partial(self._run, named, plan, **params)

    def _run(self, named: str | None, plan: Plan | None, *operands: jax.Array, **params: Any) -> Any:
        """Runs the kernel on one device's operands, or gathers where it does not take this shard."""
        plan = plan or self.plan(operands, hardware.current(), named, **params).required_by(named)
        if plan.decision is None:
            return by_gathering(*operands, **params)
        q, k, v, tables, lengths, *sinks = operands
        sequences = lengths.shape
        numbers = [x.reshape(-1) for x in (lengths, *sinks)]
        flat = lambda x: x.reshape(-1, *x.shape[len(sequences) :])
        out = launch_kernel(flat(q), k, v, *numbers, flat(tables), decision=plan.decision)
        return [x.reshape(*sequences, *x.shape[1:]) for x in out]

    def sharded(self, ctx: mlir.LoweringRuleContext, named: str | None, **params: Any) -> Sharded:
        return self._sharded(ctx, self.on_one_device(named, None, **params), **params)

    def _sharded(
        self, ctx: mlir.LoweringRuleContext, run: Callable[..., Any], *, layout: PageLayout, **_: Any
    ) -> Sharded:
        return Sharded(signature(layout, ctx.avals_in), lambda _, *operands: run(*operands))


def signature(layout: PageLayout, operands: Sequence[Any]) -> Signature:
    """Returns the axes of operands: devices share sequences, and heads where each has whole groups."""
    lead = len(operands[0].shape) - 3
    of_operands, results = (
        tuple(parse(text, lead) for text in texts) for texts in (_OPERANDS[layout][: len(operands)], _RESULTS)
    )
    sequences = parse("*b", lead)
    return Signature(of_operands, results, (*sequences, "n", "k"), independent=sequences, groups=(("n", "k"),))


def _avals(*avals: Any, layout: PageLayout, **_: Any) -> list[Any]:
    dtype = avals[0].dtype
    return signature(layout, avals).types(avals, (dtype, accumulator_dtype(dtype)))


def _place(operands: Sequence[jax.Array], _: Any, **params: Any) -> Mapped:
    """Places a mapped axis among those of the sequences, first; pages and sinks have none of them."""
    places = [0 if axes.startswith("*b") else None for axes in _OPERANDS[params["layout"]]][: len(operands)]
    return Mapped(places, (0,), params, range(len(operands)))


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


define(PAGED, _avals, _place, by_plain=by_gathering, states=(1,))
register(PAGED, Call())
ad.primitive_jvps[PAGED] = _jvp
