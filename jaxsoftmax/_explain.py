"""Says in words which kernel a call gets, how many bytes that moves, and why the others were declined."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.sharding import NamedSharding

from jaxsoftmax import _softmax
from jaxsoftmax._attention import flash_attention
from jaxsoftmax._attention.layout import sequence_notes
from jaxsoftmax._attention.primitives import BY_PART, Call, Part, tile_by_xla
from jaxsoftmax._core import checks
from jaxsoftmax._core.checks import ArrayLike, Axis, Implementation
from jaxsoftmax._core.primitives import Lowerable, Plan
from jaxsoftmax._core.sharding import spec_of
from jaxsoftmax._cross_entropy import softmax_cross_entropy_with_integer_labels
from jaxsoftmax._softmax.primitives import BY_OP, COMPUTATIONS
from jaxsoftmax._top_k import TOP_K, chunk_size, select, top_k_softmax
from pallas_kernels import hardware
from pallas_kernels.attention.problem import DIFFERENTIABLE
from pallas_kernels.hardware import Device
from pallas_kernels.softmax.problem import RULES, Op

Abstract = ArrayLike | jax.ShapeDtypeStruct
Target = tuple[Device, bool]  # the device to explain for, and whether it is one of this process


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a call runs; `str()` says it in words.

    Attributes:
        call: The operation, its operand and its axes.
        implementation: What runs on `device`: "mosaic_gpu", "cudnn", "xla", or "error" where a named kernel declines.
        here: Whether `device` is a device of this process; if not, XLA's reference runs here.
        device: The GPU explained for.
        reason: Why this kernel, or why none.
        least_bytes: What any implementation must read and write: each operand and result once.
        notes: Copies and other work outside the kernel.
        declined: (kernel, why not), in the ladder's order.
        kernel: The name of the kernel, or None.
        config: The kernel's configuration, or None.
        bytes_moved: What the kernel reads and writes in global memory, or None.
    """

    call: str
    implementation: str
    here: bool
    device: Device
    reason: str
    least_bytes: int
    notes: tuple[str, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()
    kernel: str | None = None
    config: Any = None
    bytes_moved: int | None = None

    def __str__(self) -> str:
        lines = [self.call]
        if not self.here:
            lines.append("  here: no CUDA device, so XLA runs the reference")
        runs = {
            "mosaic_gpu": f"kernel {self.kernel}" + ("" if self.config is None else f", {self.config}"),
            "cudnn": "cuDNN",
            "xla": "XLA runs the reference",
            "error": "an error, for the implementation was named",
        }
        lines.append(f"  on {self.device.name}: {runs[self.implementation]}")
        lines.append(f"    why: {self.reason}")
        least = _size(self.least_bytes)
        if self.bytes_moved is None:
            lines.append(f"    moves: nothing can move less than {least}")
        else:
            lines.append(f"    moves: {_size(self.bytes_moved)} by the kernel; the whole call no less than {least}")
        lines += [f"    besides: {note}" for note in self.notes]
        lines += [f"    not {name}: {why}" for name, why in self.declined]
        return "\n".join(lines)


def explain(
    x: Abstract,
    axis: Axis = -1,
    where: Abstract | None = None,
    *,
    scale: Abstract = 1.0,
    op: str = "softmax",
    implementation: Implementation | None = None,
    device: Device | None = None,
    **options: Any,
) -> Explanation:
    """Says which kernel and config a call gets on which device, what it will move, and why others were declined.

    The call is traced, not run; nothing is computed. It is explained for one device and whole operands: of sharded
    ones each device gets the same explanation for its part.

    Args:
        x: The call's operand, an array or a `jax.ShapeDtypeStruct`.
        axis: The call's axis or axes; None for all.
        where: The call's mask, an array or a `jax.ShapeDtypeStruct`.
        scale: The call's scale.
        op: "softmax", "log_softmax", "logsumexp", or the backward or forward-mode pass of one of the first two:
            "softmax_vjp", "softmax_jvp", "log_softmax_vjp", "log_softmax_jvp". "cross_entropy" and
            "cross_entropy_gradient" are `softmax_cross_entropy_with_integer_labels` and its differentiated form, of
            logits `x` and some labels; which form that is depends on whether `weights` are among the options. "top_k"
            is `top_k_softmax`.
        implementation: The call's implementation.
        device: A `pallas_kernels.hardware.Device`; the first CUDA device by default, or an H200 where there is none.
        **options: What else the call is given by name, such as `label_smoothing` or `k`.

    Returns:
        An `Explanation`, whose `str()` is meant to be read.

    Raises:
        TypeError: as the call itself would, or `device` is no `Device`.
        ValueError: as the call itself would, or `op` is not one of the above.

    >>> import jax, jax.numpy as jnp
    >>> print(explain(jax.ShapeDtypeStruct((8, 1000), jnp.bfloat16), implementation="xla"))  # doctest: +ELLIPSIS
    softmax of bfloat16[8,1000] along axis 1
    ...
        why: implementation='xla'
        moves: nothing can move less than 32.0 kB
    """
    target = target_of("explain", op, _CALLS, device, " is {!r}, expected a pallas_kernels.hardware.Device or None.")
    found, call = _CALLS[op]
    arrays: dict[str, Any] = {} if where is None else {"where": where}
    if op == "logsumexp" and options.get("b") is not None:
        arrays["b"] = options.pop("b")
    static: dict[str, Any] = {"axis": axis, "implementation": implementation, **options}
    notes = ("where is applied by XLA before and after the kernel",) if arrays and found.is_linear else ()
    if op == "logsumexp":
        if not (checks.is_number(scale) and scale == 1):
            raise TypeError(f"explain: scale is {scale}, but logsumexp has no scale. Multiply x by it beforehand.")
    else:
        is_number = checks.is_number(scale)
        (static if is_number else arrays)["scale"] = scale
        if not (is_number and 0 < scale < math.inf):
            notes += ("scale is not a positive number: XLA multiplies it in beforehand, in the dtype of accumulation",)
    jaxpr = jax.make_jaxpr(lambda x, arrays: call(x, **static, **arrays))(x, arrays)
    if op == "top_k":
        return _selection(jaxpr, axis, target, notes)
    if "b" in arrays or jnp.iscomplexobj(jaxpr.in_avals[0]):
        theirs = "jax.scipy.special.logsumexp" if op == "logsumexp" else "jax.nn"
        return Explanation(
            f"{op} of {jaxpr.in_avals[0].str_short()}" + (" with weights b" if "b" in arrays else ""),
            "xla",
            target[1],
            target[0],
            f"{'weights' if 'b' in arrays else 'complex numbers'} are computed by {theirs}, not by a kernel",
            bytes_of(*jaxpr.in_avals, *jaxpr.out_avals),
            (NOT_INVARIANT,) if checks.is_batch_invariant() else (),
        )
    eqn = eqn_of(jaxpr, BY_OP[found], BY_OP[Op.CROSS_ENTROPY])
    results = [var.aval for var in eqn.outvars]
    if eqn.primitive is not BY_OP[found]:
        results = [*results, *jaxpr.out_avals]
        notes += (_GRADIENT_APART,)
    return of_rows(op, eqn, results, target, notes)


_NO_DEVICE = "={!r}, expected a pallas_kernels.hardware.Device, or None for the first CUDA device."


def target_of(function: str, op: Any, known: Iterable[str], device: Any, expected: str = _NO_DEVICE) -> Target:
    """Checks an operation and a device; the device to explain for, and whether this process has it."""
    if not isinstance(op, str) or op not in known:
        raise ValueError(f"{function}: op={op!r}, expected one of {', '.join(known)}.")
    if not isinstance(device, Device | None):
        raise TypeError(f"{function}: device{expected.format(device)}")
    present = hardware.present()
    target = device or present or hardware.H200
    return target, target == present


def eqn_of(jaxpr: Any, *primitives: Primitive) -> Any:
    return next(eqn for eqn in jaxpr.eqns if eqn.primitive in primitives)


def _selection(jaxpr: Any, axis: Any, target: Target, notes: tuple[str, ...]) -> Explanation:
    """Explains the k largest of rows: the kernel is for the statistics of the rows, or of their chunks."""
    (logits, *_), eqn = jaxpr.in_avals, eqn_of(jaxpr, TOP_K)
    along, k = operator.index(axis) % logits.ndim, eqn.params["k"]
    if along < logits.ndim - 1:
        notes += (f"axis {along} is moved to the end: an extra copy",)
    x = jax.ShapeDtypeStruct(eqn.invars[0].aval.shape, eqn.invars[0].aval.dtype)
    inside = eqn_of(jax.make_jaxpr(functools.partial(select, **eqn.params))(x), BY_OP[Op.STATS])
    n, c = x.shape[-1], inside.invars[0].aval.shape[-1]
    if "batch_invariant" in eqn.params:
        c = chunk_size(n, k)
        notes += ("XLA reads the logits once more to find the largest",)
    chunks = -(-n // c)
    from pallas_kernels.softmax import radix_select  # imports Pallas, which the package does without

    sorts = eqn.params["implementation"] == "xla" or n < 2 * k
    sorts = sorts or radix_select.unsupported(jax.ShapeDtypeStruct((1, 1), x.dtype), target[0]) is not None
    of = f"rows of {n}" if c == n else f"each row's {chunks} chunks of {c}, of which {k} are taken apart"
    how = "XLA orders" if sorts else f"radix_select finds the {k} largest of"
    notes += (f"the kernel is for the statistics; {how} {of}",)
    if n < chunks * c:
        notes += (f"the logits are filled up to {chunks * c} columns: an extra copy",)
    results = [var.aval for var in inside.outvars]
    found = of_rows("top_k", inside, results, target, notes)
    return dataclasses.replace(
        found, call=_call("top_k", logits, (along,)), least_bytes=bytes_of(*jaxpr.in_avals, *jaxpr.out_avals)
    )


def of_rows(name: str, eqn: Any, results: Sequence[Any], target: Target, notes: tuple[str, ...]) -> Explanation:
    """Explains one application of a primitive over rows, from which come the call's `results`."""
    computation, avals = COMPUTATIONS[eqn.primitive], [var.aval for var in eqn.invars]
    call, invariant = _call(name, avals[0], eqn.params["axes"]), eqn.params.get("batch_invariant", False)
    found, plan = _explanation(call, eqn, computation, results, target, notes, invariant)
    if plan is None:
        return found
    if plan.decision is None:
        params = {key: value for key, value in eqn.params.items() if key != "implementation"}
        if computation.plan(avals, target[0], name, **params).decision is not None:
            found = noting(found, "implementation='mosaic_gpu' would run a kernel, between two transposed copies")
        return found
    shape = avals[0].shape
    rows = math.prod(n for d, n in enumerate(shape) if d not in eqn.params["axes"])
    streams = [*avals[1:], *(var.aval for var in eqn.outvars)]
    of_rows = [a for a in streams if a.size == rows < math.prod(shape) and a.dtype != bool]
    moved = plan.decision.bytes_moved + bytes_of(*of_rows)  # the plan leaves out numbers of a row
    return dataclasses.replace(found, bytes_moved=moved)


def _explanation(
    call: str,
    eqn: Any,
    computation: Lowerable,
    results: Sequence[Any],
    target: Target,
    notes: tuple[str, ...],
    invariant: bool,
) -> tuple[Explanation, Plan | None]:
    """Explains one application of a primitive, and returns its plan if a kernel could take it."""
    avals, params = [var.aval for var in eqn.invars], dict(eqn.params)
    implementation, (device, here) = params.pop("implementation"), target
    by_xla = Explanation(
        call,
        "xla",
        here,
        device,
        "implementation='xla'",
        bytes_of(*avals, *results),
        notes + (NOT_INVARIANT,) * invariant,
    )
    if not computation.has_kernel:
        return dataclasses.replace(by_xla, reason="forward mode has no kernel"), None
    if implementation == "xla":
        return by_xla, None
    named = computation.name(**params) if implementation == "mosaic_gpu" else None
    plan = computation.plan(avals, device, named, **params)
    if (decision := plan.decision) is None:
        runs, reason = "error" if named else "xla", "no kernel takes the call"
        return dataclasses.replace(by_xla, implementation=runs, reason=reason, declined=plan.declined), plan
    found = dataclasses.replace(
        by_xla,
        implementation=decision.implementation,
        reason=decision.reason,
        notes=plan.notes + notes,
        declined=plan.declined,
        kernel=decision.kernel,
        config=decision.config,
    )
    return found, plan


def noting(explanation: Explanation, note: str) -> Explanation:
    return dataclasses.replace(explanation, notes=(*explanation.notes, note))


def _call(name: str, operand: Any, axes: tuple[int, ...]) -> str:
    """Describes an operation, its operand and its axes."""
    extents = ",".join(map(str, operand.shape))
    return f"{name} of {operand.dtype}[{extents}] along axis {', '.join(map(str, axes)) or 'none'}"


def bytes_of(*avals: Any) -> int:
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def pulled_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reverse pass of a function, for the arguments that are differentiated."""

    def call(moving: Any, *rest: Any, **arguments: Any) -> Any:
        y, vjp = jax.vjp(lambda moving: function(moving, *rest, **arguments), moving)
        return vjp(y)[0]

    return call


def pushed_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The forward-mode pass of a function, for the arguments that are differentiated."""

    def call(moving: Any, *rest: Any, **arguments: Any) -> Any:
        return jax.jvp(lambda moving: function(moving, *rest, **arguments), (moving,), (moving,))[1]

    return call


def _labelled(x: jax.Array, **arguments: Any) -> jax.Array:
    rows = jax.eval_shape(functools.partial(jnp.max, axis=arguments["axis"]), x).shape
    return softmax_cross_entropy_with_integer_labels(x, jax.lax.full(rows, 0), **arguments)


def _labelled_gradient(x: jax.Array, **arguments: Any) -> jax.Array:
    return jax.grad(lambda x: jax.tree.leaves(_labelled(x, **arguments))[0].sum())(x)


def _size(count: Any) -> str:
    """Bytes in words; of symbolic shapes their number is symbolic too."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if isinstance(count, int) and count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


NOT_INVARIANT = "batch invariance is not promised, for no kernel runs: XLA's sums depend on how many rows there are"

_GRADIENT_APART = (
    "the gradient, times whatever follows the loss, is written in another read of the logits, by a kernel, or by XLA "
    "where the logsumexp has a cotangent too; given weights, even of 1, it is written in the first"
)


def _differentiable(op: Op) -> dict[str, tuple[Op, Callable[..., Any]]]:
    function, rule = getattr(_softmax, op.value), RULES[op]
    return {
        op.value: (op, function),
        f"{op}_vjp": (rule.cotangent, pulled_back(function)),
        f"{op}_jvp": (rule.tangent, pushed_forward(function)),
    }


# Which operation is explained for a name, and how the call is traced.
_CALLS: dict[str, tuple[Op, Callable[..., Any]]] = {
    **{name: call for op in RULES for name, call in _differentiable(op).items()},
    "logsumexp": (Op.STATS, _softmax.logsumexp),
    "cross_entropy": (Op.CROSS_ENTROPY, _labelled),
    "cross_entropy_gradient": (Op.CROSS_ENTROPY_GRADIENT, _labelled_gradient),
    "top_k": (Op.STATS, top_k_softmax),
}


TRACED: dict[str, Callable[..., Any]] = {"forward": lambda call: call, "vjp": pulled_back, "jvp": pushed_forward}
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
    ones each device gets the same explanation for its part. A note says whether devices that share the query's
    sequence gather the keys or pass them round.

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
        besides: XLA holds all logits at a time
    """
    target, part = target_of("explain_attention", op, TRACED, device), _PARTS[op]
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    floats, rest, static = split({name: x for name, x in arrays.items() if x is not None} | arguments, DIFFERENTIABLE)
    given = floats | rest
    call = lambda floats, rest: flash_attention(**floats, **rest, **static)
    eqn = eqn_of(jax.make_jaxpr(TRACED[op](call))(floats, rest), BY_PART[part])
    avals = [var.aval for var in eqn.invars]
    operands = zip(eqn.params["names"], avals, strict=False)
    shown = ", ".join(f"{name} [{','.join(map(str, x.shape))}]" for name, x in operands)
    name = "flash_attention" if op == "forward" else f"{op} of flash_attention"
    results, invariant = [var.aval for var in eqn.outvars], eqn.params["rules"].batch_invariant
    notes = _of_sequence(given, eqn.params["names"], part)
    found, _ = _explanation(f"{name} of {avals[0].dtype}: {shown}", eqn, Call(part), results, target, notes, invariant)
    if found.implementation == "xla":
        tile = tile_by_xla(part, eqn.params["names"], eqn.params["rules"], avals, target[0])
        # None: a length is symbolic.
        of_all = tile is None or tile == (avals[0].shape[-3], avals[1].shape[-3])
        held = "all logits" if tile is None or of_all else f"the logits of {tile[0]} queries and {tile[1]} keys"
        found = noting(found, f"XLA holds {held} at a time")
    return noting(found, _GRADIENTS_VARY) if invariant and found.kernel and part is not Part.FORWARD else found


def split(
    arguments: dict[str, Any], differentiable: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The arguments that are differentiated, the other arrays, and what is static."""
    # NumPy's numbers and dtypes have shapes too, but stay numbers and dtypes.
    is_array = lambda x: isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or (isinstance(x, np.ndarray) and x.ndim)
    arrays = {name: x for name, x in arguments.items() if is_array(x)}
    is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    floats = {name: x for name, x in arrays.items() if name in differentiable and is_float(x)}
    rest = {name: x for name, x in arrays.items() if name not in floats}
    return floats, rest, {name: x for name, x in arguments.items() if name not in arrays}


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
