"""What an attention call will do, in words."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._attention.api import flash_attention
from jaxsoftmax._attention.lowering import Call, Part
from jaxsoftmax._attention.primitives import BY_PART
from jaxsoftmax._core.lowering import Plan
from jaxsoftmax._explain import NOT_INVARIANT, Abstract, Explanation
from pallas_kernels import hardware
from pallas_kernels.attention.operands import DIFFERENTIABLE
from pallas_kernels.hardware import Device

_PARTS = {"forward": Part.FORWARD, "vjp": Part.GRADIENTS, "jvp": Part.TANGENT}


def explain_attention(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    bias: Abstract | None = None,
    mask: Abstract | None = None,
    *,
    op: str = "forward",
    device: Device | None = None,
    **arguments: Any,
) -> Explanation:
    """Says which kernel and config a call of `flash_attention` gets on which device, or why none.

    The call is traced, not run; nothing is computed. It is explained for one device and whole operands: of sharded
    ones each device gets the same explanation for its part.

    Args:
        query: The call's query, an array or a `jax.ShapeDtypeStruct`, as the next ones.
        key: The call's key.
        value: The call's value.
        bias: The call's bias.
        mask: The call's mask.
        op: "forward", or what its derivative runs: "vjp" (with respect to every float operand) or "jvp".
        device: A `pallas_kernels.hardware.Device`; the first CUDA device by default, or an H200 where there is none.
        **arguments: The call's other arguments.

    Returns:
        An `Explanation`, whose `str()` is meant to be read.

    Raises:
        TypeError: as the call itself would, or `device` is no `Device`.
        ValueError: as the call itself would, or `op` is not one of the above.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.float32)
    >>> print(explain_attention(x, x, x, implementation="xla"))  # doctest: +ELLIPSIS
    flash_attention of float32: query [2,1024,8,64], key [2,1024,8,64], value [2,1024,8,64]
    ...
        why: implementation='xla'
        moves: nothing can move less than 16.8 MB
    """
    if not isinstance(op, str) or op not in _PARTS:
        raise ValueError(f"explain_attention: op={op!r}, expected one of {', '.join(_PARTS)}.")
    if not isinstance(device, Device | None):
        raise TypeError(
            f"explain_attention: device={device!r}, expected a pallas_kernels.hardware.Device, or None for the first "
            "CUDA device."
        )
    part = _PARTS[op]
    # NumPy's numbers and dtypes have shapes too, but the call takes them for numbers and dtypes.
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask} | {
        name: x
        for name, x in arguments.items()
        if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or (isinstance(x, np.ndarray) and x.ndim)
    }
    static = {name: x for name, x in arguments.items() if name not in arrays}
    given = {name: x for name, x in arrays.items() if x is not None}
    floats = {
        name: x
        for name, x in given.items()
        if name in DIFFERENTIABLE and jnp.issubdtype(jnp.result_type(x), jnp.floating)
    }
    rest = {name: x for name, x in given.items() if name not in floats}
    call = lambda floats, rest: flash_attention(**floats, **rest, **static)
    jaxpr = jax.make_jaxpr(_TRACED[part](call))(floats, rest)
    eqn = next((eqn for eqn in jaxpr.eqns if eqn.primitive is BY_PART[part]), None)
    present = hardware.present()
    return _explanation(op, part, eqn, device or present or hardware.H200, present, static)


def _explanation(
    op: str, part: Part, eqn: Any, device: Device, present: Device | None, static: dict[str, Any]
) -> Explanation:
    call, avals = Call(part), [var.aval for var in eqn.invars]
    names = eqn.params["names"]
    params = {key: value for key, value in eqn.params.items() if key != "implementation"}
    implementation = eqn.params["implementation"]
    shown = ", ".join(f"{name} [{','.join(map(str, x.shape))}]" for name, x in zip(names, avals, strict=False))
    chosen = Plan(())
    if not call.has_kernel:
        runs, reason = "xla", "forward mode has no kernel"
    elif implementation == "xla":
        asked = static.get("implementation") == "xla"
        runs, reason = "xla", "implementation='xla'" if asked else "dropout and sown weights need all weights in memory"
    else:
        chosen = call.plan(avals, device, None, **params)
        named = implementation == "mosaic_gpu"
        runs, reason = "error" if named else "xla", "no kernel takes the call"
    decision = chosen.decision
    notes = list(chosen.notes)
    if params["rules"].batch_invariant and (decision is None or part is not Part.FORWARD):
        notes.append(NOT_INVARIANT if decision is None else _GRADIENTS_VARY)
    return Explanation(
        call=f"{'flash_attention' if op == 'forward' else f'{op} of flash_attention'} of {avals[0].dtype}: {shown}",
        implementation=runs if decision is None else "mosaic_gpu",
        here=device == present,
        device=device,
        reason=reason if decision is None else decision.reason,
        least_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in (*avals, *(v.aval for v in eqn.outvars))),
        notes=tuple(notes),
        declined=chosen.declined,
        kernel=None if decision is None else decision.kernel,
        config=None if decision is None else decision.config,
    )


_GRADIENTS_VARY = (
    "batch invariance is promised of the output and the logsumexp alone; deterministic_gradients=True makes gradients "
    "repeat"
)


def _pulled_back(call: Callable[..., Any]) -> Callable[..., Any]:
    def traced(floats: Any, rest: Any) -> Any:
        out, pull = jax.vjp(lambda floats: call(floats, rest), floats)
        return pull(out)

    return traced


def _pushed_forward(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda floats, rest: jax.jvp(lambda floats: call(floats, rest), (floats,), (floats,))


_TRACED: dict[Part, Callable[..., Any]] = {
    Part.FORWARD: lambda call: call,
    Part.GRADIENTS: _pulled_back,
    Part.TANGENT: _pushed_forward,
}
