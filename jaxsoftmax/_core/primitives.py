"""All primitives share this: rules for types and vmap, derivatives of higher order, and eager evaluation."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.extend.core.primitives import cond_p, name_p, scan_p
from jax.interpreters import ad, batching, xla
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core.axes import Result, over_rows
from jaxsoftmax._core.sharding import (
    on_mesh_of,
    reshard,
    settings_for,
    spec_of,
    unify_varying,
)
from pallas_kernels.softmax import reference
from pallas_kernels.types import accumulator_dtype

Results = Callable[..., Sequence[Result]]

PRIMITIVES: list[Primitive] = [reference.BELOW]  # all of them

# Parameters that say how a primitive is lowered; plain functions do not take them.
_LOWERING = ("implementation", "batch_invariant")


def define(
    primitive: Primitive,
    avals: Callable[..., Any],
    place: Callable[..., "Mapped"],
    *,
    by_plain: Callable[..., Any] | None = None,
    many: bool = True,
    states: Collection[int] = (),
) -> None:
    """Registers a primitive's rules for types, vmap, Taylor series and eager evaluation, which compiles it.

    `place` and `by_plain` are those of `_batch`. `states` are the numbers of results, if it gives them, that are states
    of rows, which no caller sees as they are.
    """
    primitive.multiple_results = many
    primitive.def_abstract_eval(avals)
    primitive.def_impl(functools.partial(_evaluate, primitive, states))
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive, place, by_plain)
    jet.jet_rules[primitive] = functools.partial(_taylor, primitive)
    PRIMITIVES.append(primitive)


def _evaluate(primitive: Primitive, states: Collection[int], *operands: jax.Array, **params: Any) -> Any:
    """Compiles and runs a primitive; `jax_debug_infs` does not see the states of rows: -inf in an empty one."""
    if not jax.config.jax_debug_infs:
        return xla.apply_primitive(primitive, *operands, **params)
    with jax.debug_infs(False):
        out = xla.apply_primitive(primitive, *operands, **params)
        results = [x for i, x in enumerate(out if primitive.multiple_results else [out]) if i not in states]
        if any(jnp.isinf(x).any() for x in results):
            raise FloatingPointError(f"invalid value (inf) encountered in {primitive.name}")
    return out


def _taylor(
    primitive: Primitive, primals: Sequence[jax.Array], series: Sequence[Sequence[jax.Array]], **params: Any
) -> tuple[Any, Any]:
    """Returns the rule for `jax.experimental.jet`: the derivatives along a curve, by JVPs of JVPs, over factorials."""
    moving = [jnp.issubdtype(x.dtype, jnp.floating) for x in primals]
    order = max(map(len, series))

    def on_curve(t: jax.Array) -> list[Any]:
        def at(x: jax.Array, terms: Sequence[jax.Array]) -> jax.Array:
            return x + functools.reduce(lambda after, term: (term + after) * t.astype(x.dtype), terms[::-1], 0)

        out = primitive.bind(
            *(at(x, s) if moves else x for x, s, moves in zip(primals, series, moving, strict=True)), **params
        )
        return [out if primitive.multiple_results else [out]]

    def one_more(derivatives: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def with_next(t: jax.Array) -> list[Any]:
            known, slopes = jax.jvp(derivatives, (t,), (jnp.ones_like(t),))
            return [known[0], *slopes]

        return with_next

    start = jnp.zeros((), jnp.result_type(jnp.float32, *itertools.compress([x.dtype for x in primals], moving)))
    derivatives = functools.reduce(lambda f, _: one_more(f), range(order), on_curve)
    with settings_for(*primals):
        out, *slopes = derivatives(start)
    terms = [
        [jnp.zeros_like(y) if s.dtype == jax.dtypes.float0 else s / math.factorial(k) for k, s in enumerate(of, 1)]
        for y, *of in zip(out, *slopes, strict=True)
    ]
    return (out, terms) if primitive.multiple_results else (out[0], terms[0])


# JAX has none for `lax.cond`, `lax.scan` and the names that `jax.checkpoint` saves by, all of which derivatives have.
for _missing in (reference.BELOW, cond_p, scan_p):
    jet.jet_rules.setdefault(_missing, functools.partial(_taylor, _missing))
jet.jet_rules.setdefault(name_p, lambda primals, series, **params: (name_p.bind(*primals, **params), *series))


def checked(x: jax.Array) -> jax.Array:
    """Returns a result in whose place `jax.experimental.checkify` finds a NaN.

    It looks at results of JAX's own operations alone, and has no table in which others could be entered. While a
    function is traced, 0 is subtracted from the result: XLA removes that, it keeps -0, and its derivative has no
    residual.
    """
    return x - 0 if isinstance(x, Tracer) else x


def saved(x: jax.Array, is_empty: jax.Array, number: float) -> jax.Array:
    """Gives empty rows a finite number, among the numbers that a derivative saves, under `jax_debug_infs`.

    The results of a program that is differentiated include all that it saves, and JAX looks for an infinity in them.
    """
    return jnp.where(is_empty, jnp.asarray(number, x.dtype), x) if jax.config.jax_debug_infs else x


class Mapped(NamedTuple):
    """Where a call takes a mapped axis as one more axis: in each operand and result, or None where it cannot.

    One place stands for all results. An operand that is not mapped gets an extent of 1, or is `broadcast`. `params` are
    those of the new call.
    """

    operands: Sequence[int | None]
    results: tuple[int | None, ...]
    params: Mapping[str, Any]
    broadcast: Collection[int] = ()


def _batch(
    primitive: Primitive,
    place: Callable[..., Mapped],
    by_plain: Callable[..., Any] | None,
    _: Any,
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Any, Any]:
    """Maps a call: it becomes one call with one more axis, where `place(operands, dims, **params)` puts it.

    Where an operand or a result has no place for the axis, the function `by_plain` is mapped. Without one the calls run
    one after another.
    """
    count = next((x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None), None)
    if count is None:
        out = primitive.bind(*unify_varying(*operands), **params)
        return out, [None] * len(out) if primitive.multiple_results else None
    to = place(operands, dims, **params)
    if None in to.results or any(d is not None and at is None for d, at in zip(dims, to.operands, strict=True)):
        run = functools.partial(by_plain or primitive.bind, **params)
        out = jax.vmap(run, tuple(dims))(*operands) if by_plain else _one_after_another(run, operands, dims)
        return out, [0] * len(out)

    def with_axis(i: int, x: jax.Array) -> jax.Array:
        d, at = dims[i], to.operands[i]
        if at is None:
            return x
        if d is not None:
            return jnp.moveaxis(x, d, at)
        extent = count if i in to.broadcast else 1
        return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], extent, *x.shape[at:]))

    out = primitive.bind(*unify_varying(*map(with_axis, range(len(operands)), operands)), **to.params)
    return out, (to.results * len(out))[: len(out)] if primitive.multiple_results else to.results[0]


def _one_after_another(run: Callable[..., Any], operands: Sequence[jax.Array], dims: Sequence[int | None]) -> Any:
    mapped = {i: jnp.moveaxis(x, d, 0) for i, (x, d) in enumerate(zip(operands, dims, strict=True)) if d is not None}
    return jax.lax.map(lambda pieces: run(*unify_varying(*(dict(enumerate(operands)) | pieces).values())), mapped)


def map_leading(
    ranks: Callable[..., Sequence[int]], operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> Mapped:
    """Places a mapped axis among the leading axes, of which operands have any number before those that `ranks` counts.

    The axis stays where it is in the first mapped operand that has it there.
    """
    mapped = zip(operands, dims, ranks(**params), strict=True)
    at = next((d for x, d, rank in mapped if d is not None and d < x.ndim - rank), 0)
    if "kept" in params:
        params["kept"] = tuple((*(d + (d >= at) for d in axes), at) for axes in params["kept"])
    return Mapped([at] * len(operands), (at,), params)


def zeros(out: Any) -> Any:
    """Makes zero tangents for outputs."""
    return jax.tree.map(lambda y: ad.Zero(jax.typeof(y).to_tangent_aval()), out)


def higher_jvp(
    primitive: Primitive,
    plain: Callable[..., Any],
    linear: int,
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    """Returns the JVP of a primitive, as that of its plain function.

    It is linear in the last `linear` operands: if only those have tangents, the primitive is its own derivative.
    """
    out = primitive.bind(*primals, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not moving:
        return out, zeros(out)
    first = len(primals) - linear
    if moving[0] >= first:
        moved = map(ad.instantiate_zeros, tangents[first:])
        return out, primitive.bind(*unify_varying(*primals[:first], *moved), **params)
    static = tuple((name, value) for name, value in params.items() if name not in _LOWERING)
    specs = tuple(P(*spec_of(jax.typeof(x))) for x in jax.tree.leaves(out))

    def compute(*moved: jax.Array) -> Any:
        operands = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return _by_plain(*operands.values(), plain=plain, params=static, specs=specs)

    return out, jax.jvp(compute, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


@functools.partial(jax.jit, static_argnames=("plain", "params", "specs"))
def _by_plain(*operands: jax.Array, plain: Callable[..., Any], params: Any, specs: Sequence[P]) -> Any:
    """Runs a plain function as one program, whose results are sharded by `specs`.

    Eagerly, only operations on an array's own mesh know its devices.
    """
    with settings_for(*operands), on_mesh_of([jax.typeof(x) for x in operands]):
        results, form = jax.tree.flatten(plain(*operands, **dict(params)))
        return form.unflatten(reshard(x, spec) for x, spec in zip(results, specs, strict=True))


def define_over_rows(primitive: Primitive, results: Results, **how: Any) -> None:
    """Registers the rules of a primitive over rows; `results` says which of the operands' axes each result has."""
    avals, place = functools.partial(_row_avals, primitive, results), functools.partial(_map_rows, results)
    define(primitive, avals, place, **how)


def _row_avals(primitive: Primitive, results: Results, *operands: Any, axes: tuple[int, ...], **params: Any) -> Any:
    """Returns the types of the outputs: the operands' common shape, or one number a row in the dtype of accumulation.

    Results of the operands' shape have the weak type of the first operand.
    """
    first, given = operands[0], results(**params)
    wide = accumulator_dtype(first.dtype)
    signature = over_rows(len(operands), len(first.shape), axes, given)
    avals = signature.types(operands, [first.dtype if result == "full" else wide for result in given])
    avals = [
        x.update(weak_type=first.weak_type) if result == "full" else x for x, result in zip(avals, given, strict=True)
    ]
    return avals if primitive.multiple_results else avals[0]


def _map_rows(
    results: Results,
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    axes: tuple[int, ...],
    **params: Any,
) -> Mapped:
    """Places the axis where the first mapped operand has it; data move only if another has it elsewhere."""
    at = next(d for d in dims if d is not None)
    axes = tuple(a + (a >= at) for a in axes)
    below = at - sum(a < at for a in axes)
    of_results = tuple(at if result == "full" else below for result in results(**params))
    return Mapped([at] * len(operands), of_results, params | {"axes": axes})
