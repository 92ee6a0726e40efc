"""Says in words which kernel a call of attention gets, with keys in one piece or in pages, and why no other."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxsoftmax._attention import flash_attention, paged
from jaxsoftmax._attention.layout import sequence_notes
from jaxsoftmax._attention.paged import paged_attention
from jaxsoftmax._attention.primitives import BY_PART, Call, Part, tile_by_xla
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.sharding import spec_of
from jaxsoftmax._explain import (
    TRACED,
    Abstract,
    Explanation,
    abstract,
    bytes_of,
    eqn_of,
    explanation,
    noting,
    size_in_words,
    split,
    target_of,
)
from pallas_kernels.attention.problem import DIFFERENTIABLE
from pallas_kernels.hardware import Device

_PARTS = {"forward": Part.FORWARD, "vjp": Part.GRADIENTS, "jvp": Part.TANGENT}


@public
def explain_attention(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    bias: Abstract | None = None,
    mask: Abstract | None = None,
    *,
    op: str = "forward",
    device: Device | str | None = None,
    **arguments: Any,
) -> Explanation:
    """Says which kernel and config a call of `flash_attention` gets on which device, or why none.

    The call is traced, not run; nothing is computed. It is explained for one device and whole operands: of sharded
    ones each device gets the same explanation for its part. A note says whether devices that share the query's
    sequence gather the keys or pass them round.

    Args:
        query: The call's query, an array or a `jax.ShapeDtypeStruct`, as the next ones.
        key: The call's key.
        value: The call's value.
        bias: The call's bias.
        mask: The call's mask.
        op: "forward", or what its derivative runs: "vjp" (with respect to every float operand) or "jvp".
        device: "H100", "H200", or a `pallas_kernels.hardware.Device`; the first CUDA device by default, or an H200
            where there is none.
        **arguments: The call's other arguments.

    Returns:
        An `Explanation`, whose `str()` is meant to be read.

    Raises:
        TypeError: as the call itself would, or `device` is none.
        ValueError: as the call itself would, or `op` is not one of the above.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.float32)
    >>> print(explain_attention(x, x, x, implementation="xla"))  # doctest: +ELLIPSIS
    flash_attention of float32: query [2,1024,8,64], key [2,1024,8,64], value [2,1024,8,64]
    ...
        why: implementation='xla'
        moves: nothing can move less than 16.8 MB
        besides: XLA holds all logits at a time
    """
    target, part = target_of("explain_attention", op, TRACED, device), _PARTS[op]
    arrays = {"query": query, "key": key, "value": value}
    arrays |= {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    arrays = {name: abstract("explain_attention", name, x) for name, x in arrays.items()}
    floats, rest, static = split(arrays | arguments, DIFFERENTIABLE)
    given = floats | rest
    call = lambda floats, rest: flash_attention(**floats, **rest, **static)
    eqn = eqn_of(jax.make_jaxpr(TRACED[op](call))(floats, rest), BY_PART[part])
    avals = [var.aval for var in eqn.invars]
    operands = zip(eqn.params["names"], avals, strict=False)
    shown = ", ".join(f"{name} [{','.join(map(str, x.shape))}]" for name, x in operands)
    name = "flash_attention" if op == "forward" else f"{op} of flash_attention"
    results, invariant = [var.aval for var in eqn.outvars], eqn.params["rules"].batch_invariant
    notes = _of_sequence(given, eqn.params["names"], part)
    found, _ = explanation(f"{name} of {avals[0].dtype}: {shown}", eqn, Call(part), results, target, notes, invariant)
    if found.implementation == "xla":
        tile = tile_by_xla(part, eqn.params["names"], eqn.params["rules"], avals, target[0])
        # None: a length is symbolic.
        of_all = tile is None or tile == (avals[0].shape[-3], avals[1].shape[-3])
        held = "all logits" if tile is None or of_all else f"the logits of {tile[0]} queries and {tile[1]} keys"
        found = noting(found, f"XLA holds {held} at a time")
    return noting(found, _GRADIENTS_VARY) if invariant and found.kernel and part is not Part.FORWARD else found


@public
def explain_paged_attention(
    query: Abstract,
    key_pages: Abstract,
    value_pages: Abstract,
    block_tables: Abstract,
    lengths: Abstract,
    *,
    device: Device | str | None = None,
    **arguments: Any,
) -> Explanation:
    """Says which kernel a call of `paged_attention` gets on which device, or why XLA gathers the pages.

    The call is traced, not run; nothing is computed. It is explained for one device and whole operands. Where XLA
    gathers the pages, what is explained is the attention to them.

    Args:
        query: The call's query, an array or a `jax.ShapeDtypeStruct`, as the next ones.
        key_pages: The call's pages of keys.
        value_pages: The call's pages of values.
        block_tables: The call's tables.
        lengths: The call's lengths.
        device: "H100", "H200", or a `pallas_kernels.hardware.Device`; the first CUDA device by default, or an H200
            where there is none.
        **arguments: The call's other arguments.

    Returns:
        An `Explanation`, whose `str()` is meant to be read.

    Raises:
        TypeError: as the call itself would, or `device` is none.
        ValueError: as the call itself would.

    >>> import jax, jax.numpy as jnp
    >>> pages = jax.ShapeDtypeStruct((8, 1024, 16, 128), jnp.bfloat16)
    >>> query = jax.ShapeDtypeStruct((32, 64, 128), jnp.bfloat16)
    >>> tables, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((32, 64), (32,)))
    >>> print(explain_paged_attention(query, pages, pages, tables, lengths, device="H100"))  # doctest: +ELLIPSIS
    paged_attention of bfloat16: query [32,1,64,128], key_pages [8,1024,16,128], value_pages [8,1024,16,128], ...
      on NVIDIA H100: kernel attention...
    """
    name = "explain_paged_attention"
    target, given = (
        target_of(name, "forward", ("forward",), device),
        {
            "query": query,
            "key_pages": key_pages,
            "value_pages": value_pages,
            "block_tables": block_tables,
            "lengths": lengths,
        },
    )
    arrays, rest, static = split({key: abstract(name, key, x) for key, x in given.items()} | arguments, ())
    call = lambda arrays: paged_attention(**arrays, **static)
    traced, attended_to = jax.make_jaxpr(call)(arrays | rest), BY_PART[Part.FORWARD]
    eqn = eqn_of(traced, paged.PAGED, attended_to)
    first, results = eqn.invars[0].aval, [var.aval for var in eqn.outvars]
    shapes = [first.shape, *((arrays | rest)[key].shape for key in list(given)[1:])]
    shown = ", ".join(f"{key} [{','.join(map(str, x))}]" for key, x in zip(given, shapes, strict=True))
    shown, invariant = f"paged_attention of {first.dtype}: {shown}", eqn.params["rules"].batch_invariant
    # Where the window or the soft cap is data, the pages are gathered outside of any primitive.
    declined, inside, avals = (), eqn, traced.in_avals
    if eqn.primitive is paged.PAGED:
        found, _ = explanation(shown, eqn, paged.Call(), results, target, (), False)
        if found.kernel or found.implementation == "error":
            return found
        declined, avals = found.declined, [var.aval for var in eqn.invars]
        inside = eqn_of(jax.make_jaxpr(functools.partial(paged.by_gathering, **eqn.params))(*avals), attended_to)
    keys = [var.aval for var in inside.invars[1:3]]
    gathered = f"XLA gathers the pages first, {size_in_words(bytes_of(*keys))} of keys and values"
    attended, _ = explanation(shown, inside, Call(Part.FORWARD), results, target, (gathered,), invariant)
    least = bytes_of(*avals, *results)
    return dataclasses.replace(attended, least_bytes=least, declined=(*declined, *attended.declined))


def _of_sequence(given: dict[str, Any], names: Sequence[str], part: Part) -> tuple[str, ...]:
    """Describes what devices do that share the sequence of these operands."""
    arrays = {name: x for name, x in given.items() if name in names and x.ndim >= 3}
    placed = {name: getattr(x, "sharding", None) for name, x in arrays.items()}
    on = placed["query"]
    if not isinstance(on, NamedSharding):
        return ()
    spec = lambda x, to: spec_of(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to))
    specs = [
        spec(x, to) if isinstance(to, NamedSharding) else (None,) * x.ndim
        for x, to in zip(arrays.values(), placed.values(), strict=True)
    ]
    shapes = [tuple(x.shape) for x in arrays.values()]
    moving = [name for name in arrays if name in DIFFERENTIABLE]
    results = {Part.FORWARD: (), Part.GRADIENTS: moving, Part.TANGENT: None}[part]
    return sequence_notes(list(arrays), shapes, specs, on.mesh.shape, results)


_GRADIENTS_VARY = (
    "batch invariance is promised of the output and the logsumexp alone; deterministic_gradients=True makes gradients "
    "repeat"
)
