"""What all primitives share: rules for types and vmap, and derivatives of higher order."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, xla
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core.sharding import on_mesh_of, reshard, settings_for, spec_of, unify_varying

# Parameters that say how a primitive is lowered; references do not take them.
_LOWERING = ("implementation", "batch_invariant")


def define(primitive: Primitive, avals: Callable[..., Any], batch: Callable[..., Any], *, many: bool = True) -> None:
    """Registers a primitive's rules for types, vmap and eager evaluation, which compiles it."""
    primitive.multiple_results = many
    primitive.def_abstract_eval(avals)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    batching.fancy_primitive_batchers[primitive] = batch


def typed(like: Any, mesh: Any, shape: Sequence[Any], spec: Iterable[Any], dtype: Any) -> Any:
    """The type of a result, which varies over the same mesh axes as the operand `like`."""
    sharding = NamedSharding(mesh, P(*spec))
    return like.update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def aligned(operands: Sequence[jax.Array], dims: Sequence[int | None], at: int) -> list[jax.Array]:
    """Moves the mapped axis of all operands to `at`; operands that are not mapped get an extent of 1 there."""
    return unify_varying(
        *(jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at) for x, d in zip(operands, dims, strict=True))
    )


def zeros(out: Any) -> Any:
    """Zero tangents for outputs."""
    return jax.tree.map(lambda y: ad.Zero(jax.typeof(y).to_tangent_aval()), out)


def higher_jvp(
    primitive: Primitive,
    plain: Callable[..., Any],
    linear: int,
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    """The JVP of a primitive, as that of its plain function.

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
