"""Says in words whether a call of `linear_cross_entropy` runs a kernel, or in chunks of how many tokens, and why."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jaxsoftmax._core.calls import public
from jaxsoftmax._cross_entropy import chunks as of_chunks
from jaxsoftmax._cross_entropy import linear_cross_entropy
from jaxsoftmax._cross_entropy.linear_kernel import MOVING, kernel_reason
from jaxsoftmax._cross_entropy.linear_primitives import GRADIENT, LOSS, NAME, OF_COTANGENT, OF_TANGENT, call_of
from jaxsoftmax._explain import (
    TRACED,
    Abstract,
    Explanation,
    Target,
    abstract,
    bytes_of,
    eqn_of,
    noting,
    of_rows,
    split,
    target_of,
)
from jaxsoftmax._softmax.primitives import COMPUTATIONS
from pallas_kernels.hardware import Device


@public
def explain_linear_cross_entropy(
    hidden: Abstract,
    weight: Abstract,
    labels: Abstract,
    *,
    op: str = "forward",
    device: Device | str | None = None,
    **arguments: Any,
) -> Explanation:
    """Says whether the losses of a call of `linear_cross_entropy` are a kernel's, or in chunks of how many tokens.

    The call is traced, not run; nothing is computed. It is explained for one device and whole operands: a device that
    has a part of the tokens or of the vocabulary chooses for its part. In chunks, the kernel that is named is the one
    that reads a chunk's logits; the reason says how many chunks there are, and why it is not one kernel for all.

    Args:
        hidden: The call's hidden states, an array or a `jax.ShapeDtypeStruct`, as the next ones.
        weight: The call's weight.
        labels: The call's labels.
        op: "forward", or with its derivative: "vjp" (with respect to every float operand but `weights`) or "jvp".
        device: "H100", "H200", or a `pallas_kernels.hardware.Device`; the first CUDA device by default, or an H200
            where there is none.
        **arguments: The call's other arguments.

    Returns:
        An `Explanation`, whose `str()` is meant to be read.

    Raises:
        TypeError: as the call itself would, or `device` is none.
        ValueError: as the call itself would, or `op` is not one of the above.

    >>> import jax, jax.numpy as jnp
    >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 4096), (4096, 128256))]
    >>> labels = jax.ShapeDtypeStruct((8192,), jnp.int32)
    >>> print(explain_linear_cross_entropy(*shapes, labels, implementation="xla"))  # doctest: +ELLIPSIS
    linear_cross_entropy of bfloat16: hidden [8192,4096], weight [4096,128256]
    ...
        why: 4 chunks of 2048 tokens, as implementation='xla'
        moves: nothing can move less than 1.1 GB
        not linear_cross_entropy: implementation='xla'
    """
    target = target_of("explain_linear_cross_entropy", op, TRACED, device)
    given = {"hidden": hidden, "weight": weight, "labels": labels}
    given = {name: abstract("explain_linear_cross_entropy", name, x) for name, x in given.items()} | arguments
    floats, rest, static = split(given, MOVING)
    call = lambda floats, rest: jax.tree.leaves(linear_cross_entropy(**floats, **rest, **static))
    jaxpr = jax.make_jaxpr(TRACED[op](call))(floats, rest)
    found = _of_losses(eqn_of(jaxpr, LOSS, GRADIENT), target)
    shown = ", ".join(f"{name} [{','.join(map(str, x.shape))}]" for name, x in floats.items())
    name = NAME if op == "forward" else f"{op} of {NAME}"
    least = bytes_of(*jaxpr.in_avals, *jaxpr.out_avals)
    found = dataclasses.replace(found, call=f"{name} of {floats['hidden'].dtype}: {shown}", least_bytes=least)
    for primitive, what in ((OF_COTANGENT, "gradients"), (OF_TANGENT, "tangents")):
        if eqns := [eqn for eqn in jaxpr.eqns if eqn.primitive is primitive]:
            chunks = _kernel_chunks(eqns[0], target[0])[1] if primitive is OF_COTANGENT else None
            chunks = chunks or _chunks(eqns[0])[0]
            found = noting(found, f"the {what} are computed in {chunks}, from logits computed again")
    return found


def _of_losses(eqn: Any, target: Target) -> Explanation:
    """Explains the losses, with which a call with weights computes the gradients."""
    device, here = target
    declined, size = _kernel_chunks(eqn, device)
    if declined is None:
        why = "product and online softmax are one kernel, and no logits are written"
        if eqn.primitive is GRADIENT:
            why = f"{size}, as product and online softmax are one kernel, which writes the logits' weights in 16 bits"
        return Explanation("", "mosaic_gpu", here, device, why, 0, kernel=NAME)
    chunks, inside = _chunks(eqn)
    found = of_rows("", next(e for e in _eqns(inside) if e.primitive in COMPUTATIONS), [], target, ())
    others = ((NAME, declined), *found.declined)
    return dataclasses.replace(found, reason=f"{chunks}, as {declined}", bytes_moved=None, declined=others)


def _kernel_chunks(eqn: Any, device: Device) -> tuple[str | None, str | None]:
    """Why no kernel multiplies in a call, or None; and how many chunks of how many tokens it has where one does."""
    rules, operands = eqn.params["rules"], dict(zip(eqn.params["names"], (v.aval for v in eqn.invars), strict=True))
    declined = kernel_reason(rules, operands, device, for_gradient=eqn.primitive is not LOSS)
    if declined is not None:
        return declined, None
    weight, tokens = operands["weight"], operands["labels"].size
    of_weights = weight.dtype.itemsize, rules.chunk_size, of_chunks.KERNEL_BYTES
    return None, _in_words(tokens, of_chunks.chunk_size(tokens, rules.vocabulary(weight.shape), *of_weights))


def _in_words(tokens: int, size: int) -> str:
    return "one chunk of all tokens" if size >= tokens else f"{math.ceil(tokens / size)} chunks of {size} tokens"


def _chunks(eqn: Any) -> tuple[str, Any]:
    """How many chunks of how many tokens one application of a primitive has, and what it computes."""
    inside = jax.make_jaxpr(call_of(eqn.primitive, **eqn.params).whole)(*(v.aval for v in eqn.invars)).jaxpr
    # The labels are the only integers that a chunk has one of for each token.
    is_labels = lambda aval: aval.dtype == jnp.int32 and aval.ndim == 1
    scans = [e for e in _eqns(inside) if e.primitive.name == "scan"]
    bodies: list[Any] = [body for scan in scans[:1] for body in jaxprs_in_params(scan.params)]
    size = next((v.aval.shape[0] for body in bodies for v in body.invars if is_labels(v.aval)), None)
    if size is None:
        return "one chunk of all tokens", inside
    tokens = eqn.invars[eqn.params["names"].index("labels")].aval.size
    return _in_words(tokens, size), inside


def _eqns(jaxpr: Any) -> Iterator[Any]:
    """Every equation, also of loops and calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inside in jaxprs_in_params(eqn.params):
            yield from _eqns(inside)
