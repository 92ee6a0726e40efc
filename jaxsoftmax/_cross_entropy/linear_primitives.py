"""The primitives of the loss of `hidden @ weight`, and their rules for JAX's transformations.

`linear_cross_entropy` gives the losses and the rows' states. Its derivative is `linear_cross_entropy_tangent`, linear
in the tangents, whose transposition `linear_cross_entropy_cotangent` computes a chunk's logits again: four products in
all. With weights the JVP rule binds `linear_cross_entropy_gradient` instead, which computes the loss and, for
cotangents of 1, the gradients while it has a chunk's logits: three products. The gradient of a token is then
multiplied by its cotangent. Sums over tokens are right for cotangents that are all the same, as after `.sum()`
or `.mean()`, and computed again for others, which is decided when the program runs.

Operands have names, in the parameter `names`, and `linear_kernel.AXES` their axes, where the tokens may be several.
Tokens that are sharded need no communication but for sums over tokens; a sharded vocabulary is in `chunks`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core import recorder
from jaxsoftmax._core.axes import Sharded, Signature, parse
from jaxsoftmax._core.lowering import Plan, lower, recorded, run_shards
from jaxsoftmax._core.primitives import Mapped, checked, define, higher_jvp, saved, zeros
from jaxsoftmax._core.sharding import (
    AxisSharding,
    inside_of,
    is_explicit,
    on_mesh_of,
    reshard,
    settings_for,
    spec_of,
    unify_shardings,
    unify_varying,
)
from jaxsoftmax._cross_entropy import chunks
from jaxsoftmax._cross_entropy.chunks import Operands
from jaxsoftmax._cross_entropy.linear_kernel import COTANGENT, MOVING, SAVED, TANGENT, Parts, Rules, decide
from jaxsoftmax._cross_entropy.primitives import of_gradient, of_weight, weigh
from pallas_kernels import hardware
from pallas_kernels.softmax.problem import IGNORED
from pallas_kernels.types import accumulator_dtype

NAME = "linear_cross_entropy"
Names = tuple[str, ...]

LOSS, OF_TANGENT, OF_COTANGENT, GRADIENT = (
    Primitive(NAME + suffix) for suffix in ("", "_tangent", "_cotangent", "_gradient")
)


def bind(primitive: Primitive, operands: Mapping[str, jax.Array], **params: Any) -> Operands:
    """Applies a primitive to operands by name; the results by name."""
    found = primitive.bind(*unify_varying(*operands.values()), names=tuple(operands), **params)
    results = zip(_results(primitive, **params), found, strict=True)
    return {name: x if name in ("max", "sum") else checked(x) for name, x in results}


def _results(primitive: Primitive, rules: Rules, moving: Names = ()) -> Names:
    if primitive is OF_TANGENT:
        return rules.results
    if primitive is OF_COTANGENT:
        return moving
    if primitive is GRADIENT:
        return ("loss", "max", "sum", *moving)
    return ("loss", *(("max", "sum") if "lse" in rules.results else ()), *rules.states[2:])


def _signature(rules: Rules, names: Names, results: Names, tokens: int) -> Signature:
    """Returns the axes of operands and results; devices share tokens and vocabulary, and each has all embeddings."""
    operands, of_results = (tuple(parse(rules.axes(name), tokens) for name in x) for x in (names, results))
    return Signature(operands, of_results, parse("*tv", tokens))


def unify_tokens(rules: Rules, operands: Operands) -> Operands:
    """Reshards the operands that tokens have so that the tokens of all are sharded alike."""
    tokens = operands["labels"].ndim
    of_tokens = {name: x for name, x in operands.items() if rules.has_tokens(name)}
    order = parse("*tve", tokens)
    axes = [[order.index(axis) for axis in parse(rules.axes(name), tokens)] for name in of_tokens]
    return operands | dict(zip(of_tokens, unify_shardings(*of_tokens.values(), axes=axes), strict=True))


def _avals(primitive: Primitive, *avals: Any, names: Names, rules: Rules, **params: Any) -> list[Any]:
    of, results = dict(zip(names, avals, strict=True)), _results(primitive, rules, **params)
    loss = of["labels"].update(dtype=accumulator_dtype(of["hidden"].dtype))
    likes = [of[name] if name in params.get("moving", ()) else loss for name in results]
    signature = _signature(rules, names, results, len(loss.shape))
    return signature.types(avals, [x.dtype for x in likes], [x.shape for x in likes])


def _compute_part(
    compute: Callable[..., Operands],
    rules: Rules,
    names: Names,
    results: Names,
    shardings: Mapping[str, AxisSharding],
    *operands: jax.Array,
) -> list[jax.Array]:
    """Computes one device's part, with the tokens as one axis."""
    of = dict(zip(names, operands, strict=True))
    tokens = of["labels"].shape
    parts = Parts(tuple(shardings[f"t{i}"] for i in range(len(tokens))), shardings["v"])
    count = math.prod(tokens)

    def flat(name: str, x: jax.Array) -> jax.Array:
        if not rules.has_tokens(name):
            return x
        lead, rest = x.shape[: len(tokens)], x.shape[len(tokens) :]
        if all(n == 1 for n in lead):
            return x.reshape(1, *rest) if count != 0 else jnp.broadcast_to(x, (*tokens, *rest)).reshape(0, *rest)
        return jnp.broadcast_to(x, (*tokens, *rest)).reshape(count, *rest)

    of = {name: flat(name, x) for name, x in _without_padding(rules, parts, of).items()}
    outputs = compute(rules, parts, of)
    unflat = lambda x: x.reshape(*tokens, *x.shape[1:])
    return [unflat(outputs[name]) if rules.has_tokens(name) else outputs[name] for name in results]


def _without_padding(rules: Rules, parts: Parts, of: Operands) -> Operands:
    """Where XLA pads axes that do not divide, tokens are ignored, and have no cotangent, and columns are masked."""
    tokens = of["labels"].shape
    columns = rules.vocabulary(of["weight"].shape)
    exists = inside_of(parts.tokens, range(len(parts.tokens)), tokens)
    if exists is not None:
        of = of | {"labels": jnp.where(exists, of["labels"], IGNORED)}
        numbers = [n for n in of if n.startswith(COTANGENT) or n == "weights"]
        of |= {n: jnp.where(exists, of[n], 0.0) for n in numbers}
    inside = inside_of([parts.vocabulary], [len(tokens)], (*tokens, columns))
    if inside is not None:
        of = of | {"where": of["where"] & inside if "where" in of else inside}
    return of


_COMPUTE: dict[Primitive, Callable[..., Operands]] = {
    LOSS: chunks.forward,
    OF_TANGENT: chunks.tangent,
    OF_COTANGENT: chunks.gradient,
    GRADIENT: functools.partial(chunks.gradient, gives_loss=True),
}


def call_of(
    primitive: Primitive, tokens: int, *, names: Names, rules: Rules, may_run_kernel: bool = False, **params: Any
) -> Sharded:
    """Returns the call of a primitive on operands with so many axes of tokens."""
    results = _results(primitive, rules, **params)
    how = params | ({"may_run_kernel": True} if may_run_kernel else {})
    compute = functools.partial(_COMPUTE[primitive], **how)
    part = functools.partial(_compute_part, compute, rules, names, results)
    return Sharded(_signature(rules, names, results, tokens), part)


def _lower(
    primitive: Primitive, ctx: mlir.LoweringRuleContext, *operands: Any, may_run_kernel: bool = False, **params: Any
) -> Any:
    avals: Sequence[Any] = ctx.avals_in
    tokens = len(avals[params["names"].index("labels")].shape)
    call = call_of(primitive, tokens, may_run_kernel=may_run_kernel, **params)
    by_xla = functools.partial(lower, ctx, call, *operands)
    if not recorder.is_open():
        return by_xla()
    plan = _plan(primitive, avals, **params) if may_run_kernel else None
    return recorded(ctx, plan, None, by_xla, *operands, **params)


def _plan(primitive: Primitive, avals: Sequence[Any], names: Names, rules: Rules, **_: Any) -> Plan:
    """The kernel that multiplies in a call, in chunks if it computes gradients, or why none does."""
    of = dict(zip(names, avals, strict=True))
    decision = decide(rules, of, hardware.current(), for_gradient=primitive is not LOSS)
    if decision.kernel is None:
        return Plan(decision.declined)
    if primitive is LOSS:
        return Plan((), decision)
    weight, tokens = of["weight"], of["labels"].size
    of_weights = weight.dtype.itemsize, rules.chunk_size, chunks.KERNEL_BYTES
    size = chunks.chunk_size(tokens, rules.vocabulary(weight.shape), *of_weights)
    return Plan((), decision, notes=(chunks.in_words(tokens, size),))


def _plain(primitive: Primitive, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Computes a primitive by operations that have derivatives."""
    call = call_of(primitive, operands[params["names"].index("labels")].ndim, **params)
    return run_shards(call, *operands) if is_explicit([jax.typeof(x) for x in operands]) else call.whole(*operands)


def _place(primitive: Primitive, operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> Mapped:
    """Places a mapped axis among the axes of tokens, first."""
    names, rules = params["names"], params["rules"]
    results = _results(primitive, **{n: x for n, x in params.items() if n != "names"})
    places, of_results = (tuple(0 if rules.has_tokens(name) else None for name in of) for of in (names, results))
    return Mapped(places, of_results, params, [i for i, name in enumerate(names) if name != "where"])


def _loss_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, names: Names, rules: Rules
) -> tuple[list[jax.Array], list[Any]]:
    operands, moved = dict(zip(names, primals, strict=True)), dict(zip(names, tangents, strict=True))
    moving = {TANGENT + n: moved[n] for n in MOVING if n in moved and type(moved[n]) is not ad.Zero}
    if "weights" in operands:
        return _weighted_jvp(operands, moving, moved["weights"], rules)
    known = dataclasses.replace(rules, results=tuple(dict.fromkeys(("loss", "lse", *rules.results))))
    out = bind(LOSS, operands, rules=known)
    results = {name: out[name] for name in _results(LOSS, rules)}
    slopes = {name: zeros(x) for name, x in results.items()}
    if moving:
        pushed = bind(OF_TANGENT, operands | _saved_states(rules, out) | moving, rules=rules)
        # The logarithm of exp(max) * sum is the logsumexp, with whose tangent the maximum stands for it.
        slopes |= {"max" if name == "lse" else name: t for name, t in pushed.items()}
    return list(results.values()), [slopes[name] for name in results]


def _saved_states(rules: Rules, found: Operands) -> Operands:
    """Returns rows' states, which derivatives save; beside a finite one no logit of an empty row has a weight."""
    is_empty = found["max"] == -jnp.inf
    return {name: saved(found[name], is_empty, 1.0) for name in rules.states}


def _weighted_jvp(
    operands: Operands, moving: Operands, of_weights: Any, rules: Rules
) -> tuple[list[jax.Array], list[Any]]:
    weights, slopes = operands["weights"], []
    if moving:
        wrt = tuple(name.removeprefix(TANGENT) for name in moving)
        found = bind(GRADIENT, operands, rules=rules, moving=wrt)
        known = _saved_states(rules, found) | {SAVED + name: found[name] for name in wrt}
        slopes += bind(OF_TANGENT, operands | known | moving, rules=rules).values()
        loss = found["loss"]
    else:
        loss = bind(LOSS, {n: x for n, x in operands.items() if n != "weights"}, rules=rules)["loss"]
    if type(of_weights) is not ad.Zero:
        slopes.append(of_weight(weights, loss, of_weights))
    value = weigh(weights, loss)
    return [value], [sum(slopes[1:], slopes[0]) if slopes else zeros(value)]


def _linear_jvp(
    primitive: Primitive, primals: Sequence[jax.Array], tangents: Sequence[Any], *, names: Names, **params: Any
) -> tuple[Any, Any]:
    """The JVP of a primitive that is linear in the (co)tangents, its last operands.

    It is its own derivative in them, in that of a cotangent of 0 too, whose token the plain function leaves out.
    """
    linear = sum(name.startswith((TANGENT, COTANGENT)) for name in names)
    first = len(names) - linear
    # Saved arrays are operands of the transposition, not of the function.
    kept = [i for i, name in enumerate(names) if not name.startswith(SAVED)]
    zero = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())
    of_rest = [
        t if i < first and i in kept else zero(x) for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
    ]
    moves = any(type(t) is not ad.Zero for t in of_rest)
    only = lambda of: [of[i] for i in kept] if moves else of
    plain = functools.partial(_plain, primitive)
    params["names"] = tuple(only(names))
    out, slopes = higher_jvp(primitive, plain, linear, only(primals), only(of_rest), **params)
    if any(type(t) is not ad.Zero for t in tangents[first:]):
        moved = map(ad.instantiate_zeros, tangents[first:])
        more = primitive.bind(*unify_varying(*primals[:first], *moved), **(params | {"names": names}))
        slopes = list(map(ad.add_tangents, slopes, more))
    return out, slopes


def _gradient_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, names: Names, rules: Rules, moving: Names
) -> tuple[Any, Any]:
    """Returns the JVP of losses with gradients, as that of the losses and then the gradients."""
    out = GRADIENT.bind(*primals, names=names, rules=rules, moving=moving)
    at = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not at:
        return out, zeros(out)
    known = dataclasses.replace(rules, results=("loss", "lse"))

    def apart(*moved: jax.Array) -> list[jax.Array]:
        operands = dict(zip(names, primals, strict=True)) | {names[i]: x for i, x in zip(at, moved, strict=True)}
        plain = {n: x for n, x in operands.items() if n != "weights"}
        found = bind(LOSS, plain, rules=known)
        states = {name: found[name] for name in rules.states}
        pulled = bind(
            OF_COTANGENT, plain | states | {COTANGENT + "loss": operands["weights"]}, rules=rules, moving=moving
        )
        return [*(found[name] for name in ("loss", "max", "sum")), *pulled.values()]

    return out, jax.jvp(apart, [primals[i] for i in at], [tangents[i] for i in at])[1]


def _tangent_transpose(cts: Sequence[Any], *operands: Any, names: Names, rules: Rules) -> list[Any]:
    """Returns the gradients for cotangents of the losses, logsumexps and entropies."""
    of = dict(zip(names, operands, strict=True))
    linear = {n.removeprefix(TANGENT): x.aval for n, x in of.items() if n.startswith(TANGENT)}
    known = {n: x for n, x in of.items() if not n.startswith((TANGENT, SAVED))}
    saved = {n.removeprefix(SAVED): x for n, x in of.items() if n.startswith(SAVED)}
    still = [None] * (len(names) - len(linear))
    given = {COTANGENT + n: ct for n, ct in zip(rules.results, cts, strict=True) if type(ct) is not ad.Zero}
    if not given:
        return [*still, *map(ad.Zero, linear.values())]
    if saved:
        found = _pulled_by_saved(known, saved, *given.values(), rules=rules, moving=tuple(linear))
    else:
        found = bind(OF_COTANGENT, known | given, rules=rules, moving=tuple(linear))
    return [*still, *(reshard(found[name], P(*spec_of(aval))) for name, aval in linear.items())]


@functools.partial(jax.jit, static_argnames=("rules", "moving"))
def _pulled_by_saved(
    known: Operands, saved: Operands, ct: jax.Array, *, rules: Rules, moving: Names
) -> dict[str, jax.Array]:
    """Scales gradients for cotangents of 1: a token's by its cotangent, and sums if all cotangents are the same."""
    with settings_for(ct, *known.values()), on_mesh_of([jax.typeof(x) for x in known.values()]):
        found: dict[str, jax.Array] = {}
        for name in moving:
            if rules.has_tokens(name):
                times = jnp.expand_dims(ct, range(ct.ndim, saved[name].ndim))
                found[name] = of_gradient(saved[name], times, ()).astype(saved[name].dtype)
        summed = tuple(name for name in moving if name not in found)
        again = lambda: bind(OF_COTANGENT, known | {COTANGENT + "loss": ct}, rules=rules, moving=summed)
        if summed and ct.size == 0:
            found |= again()
        elif summed:
            scaled = lambda same: _sums_times_same(rules, known, {n: saved[n] for n in summed}, ct, same)

            def unless_those_that_count_are() -> Operands:
                counts = known["weights"] != 0  # the saved gradient of other tokens is 0
                same = jnp.where(counts, ct, ct.min()).max()
                return jax.lax.cond(((ct == same) | ~counts).all(), lambda: scaled(same), again)

            # By itself, as XLA removes the other branch where the cotangent is a constant.
            most = ct.max()
            found |= jax.lax.cond((ct == most).all(), lambda: scaled(most), unless_those_that_count_are)
        return found


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums_times_same(rules: Rules, known: Operands, saved: Operands, ct: jax.Array, same: jax.Array) -> Operands:
    """Gradients that are summed over tokens, from those for cotangents of 1, for cotangents that are all the same."""
    return {n: of_gradient(x, same.reshape((1,) * x.ndim), ()).astype(x.dtype) for n, x in saved.items()}


def _sums_times_same_jvp(rules: Rules, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Operands, Operands]:
    """The derivative, for tangents of the cotangents that need not be the same."""
    known, saved, _, same = primals
    _, of_saved, of_ct, _ = tangents
    out = _sums_times_same(rules, *primals)
    slopes = {n: jnp.zeros_like(x) for n, x in out.items()}
    for n, t in of_saved.items():
        if type(t) is not SymbolicZero:
            slopes[n] = of_gradient(same.reshape((1,) * t.ndim), t, ()).astype(t.dtype)
    if type(of_ct) is not SymbolicZero:
        more = bind(OF_COTANGENT, known | {COTANGENT + "loss": of_ct}, rules=rules, moving=tuple(saved))
        slopes = {n: x + more[n] for n, x in slopes.items()}
    return out, slopes


_sums_times_same.defjvp(_sums_times_same_jvp, symbolic_zeros=True)


def _cotangent_transpose(cts: Sequence[Any], *operands: Any, names: Names, rules: Rules, moving: Names) -> list[Any]:
    """Returns the tangents of losses, logsumexps and entropies for cotangents of the gradients."""
    of = dict(zip(names, operands, strict=True))
    linear = {n.removeprefix(COTANGENT): x.aval for n, x in of.items() if n.startswith(COTANGENT)}
    known = {n: x for n, x in of.items() if not n.startswith(COTANGENT)}
    given = {TANGENT + n: ct for n, ct in zip(moving, cts, strict=True) if type(ct) is not ad.Zero}
    still = [None] * len(known)
    if not given:
        return [*still, *map(ad.Zero, linear.values())]
    found = bind(OF_TANGENT, known | given, rules=dataclasses.replace(rules, results=tuple(linear)))
    return [*still, *(reshard(found[name], P(*spec_of(aval))) for name, aval in linear.items())]


def _without_gradient(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Computes only the losses where only they are used, as in the forward pass of `jax.checkpoint`."""
    eqn = rest[-1]  # JAX 0.12 passes a list of live operands first
    if any(used[3:]) or not any(used):
        return [any(used)] * len(eqn.invars), eqn if any(used) else None
    results = ("loss", "lse") if any(used[1:]) else ("loss",)
    of = {name: v for name, v in zip(eqn.params["names"], eqn.invars, strict=True) if name != "weights"}
    params = {"names": tuple(of), "rules": dataclasses.replace(eqn.params["rules"], results=results)}
    outs = eqn.outvars[: 3 if len(results) > 1 else 1]
    needed = [name != "weights" for name in eqn.params["names"]]
    return needed, eqn.replace(primitive=LOSS, params=params, invars=list(of.values()), outvars=outs)


for _primitive in (LOSS, OF_TANGENT, OF_COTANGENT, GRADIENT):
    # The second and the third result are states of rows, if losses are among the results.
    _states = (1, 2) if _primitive in (LOSS, GRADIENT) else ()
    define(_primitive, functools.partial(_avals, _primitive), functools.partial(_place, _primitive), states=_states)
    mlir.register_lowering(_primitive, functools.partial(_lower, _primitive))
for _primitive in (LOSS, OF_COTANGENT, GRADIENT):
    mlir.register_lowering(_primitive, functools.partial(_lower, _primitive, may_run_kernel=True), platform="cuda")
ad.primitive_jvps[LOSS] = _loss_jvp
ad.primitive_jvps[GRADIENT] = _gradient_jvp
ad.primitive_transposes[OF_TANGENT] = _tangent_transpose
ad.primitive_transposes[OF_COTANGENT] = _cotangent_transpose
for _primitive in (OF_TANGENT, OF_COTANGENT):
    ad.primitive_jvps[_primitive] = functools.partial(_linear_jvp, _primitive)
pe.dce_rules[GRADIENT] = _without_gradient
