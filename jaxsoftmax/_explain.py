"""Says in words which kernel a call gets, how many bytes that moves, and why the others were declined."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxsoftmax import _softmax
from jaxsoftmax._core import checks
from jaxsoftmax._core.calls import meant_operation, public
from jaxsoftmax._core.checks import ArrayLike, Axis, Implementation
from jaxsoftmax._core.primitives import Lowerable, Plan
from jaxsoftmax._cross_entropy import softmax_cross_entropy_with_integer_labels
from jaxsoftmax._softmax.primitives import BY_OP, COMPUTATIONS
from jaxsoftmax._top_k import TOP_K, chunk_size, select, top_k_softmax
from pallas_kernels import hardware
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
        least = size_in_words(self.least_bytes)
        if self.bytes_moved is None:
            lines.append(f"    moves: nothing can move less than {least}")
        else:
            lines.append(
                f"    moves: {size_in_words(self.bytes_moved)} by the kernel; the whole call no less than {least}"
            )
        lines += [f"    besides: {note}" for note in self.notes]
        lines += [f"    not {name}: {why}" for name, why in self.declined]
        return "\n".join(lines)


@public
def explain(
    x: Abstract,
    axis: Axis = -1,
    where: Abstract | None = None,
    *,
    scale: Abstract = 1.0,
    op: str = "softmax",
    implementation: Implementation | None = None,
    device: Device | str | None = None,
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
        device: "H100", "H200", or a `pallas_kernels.hardware.Device`; the first CUDA device by default, or an H200
            where there is none.
        **options: What else the call is given by name, such as `label_smoothing` or `k`.

    Returns:
        An `Explanation`, whose `str()` is meant to be read.

    Raises:
        TypeError: as the call itself would, or `device` is none.
        ValueError: as the call itself would, or `op` is not one of the above.

    >>> import jax, jax.numpy as jnp
    >>> print(explain(jax.ShapeDtypeStruct((8, 1000), jnp.bfloat16), implementation="xla"))  # doctest: +ELLIPSIS
    softmax of bfloat16[8,1000] along axis 1
    ...
        why: implementation='xla'
        moves: nothing can move less than 32.0 kB
    """
    target = target_of("explain", op, _CALLS, device)
    found, call = _CALLS[op]
    x = abstract("explain", "x", x)
    arrays: dict[str, Any] = {} if where is None else {"where": abstract("explain", "where", where)}
    if op == "logsumexp" and options.get("b") is not None:
        arrays["b"] = abstract("explain", "b", options.pop("b"))
    static: dict[str, Any] = {"axis": axis, "implementation": implementation, **options}
    notes = ("where is applied by XLA before and after the kernel",) if arrays and found.is_linear else ()
    if op == "logsumexp":
        if not (checks.is_number(scale) and scale == 1):
            raise TypeError(f"explain: scale is {scale}, but logsumexp has no scale. Multiply x by it beforehand.")
    else:
        is_number = checks.is_number(scale)
        (static if is_number else arrays)["scale"] = scale if is_number else abstract("explain", "scale", scale)
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


def target_of(function: str, op: Any, known: Collection[str], device: Any) -> Target:
    """Checks an operation and a device; the device to explain for, and whether this process has it."""
    if not isinstance(op, str) or op not in known:
        hint = meant_operation(op, known) if isinstance(op, str) else ""
        raise ValueError(f"{function}: op={op!r}, expected one of {', '.join(known)}.{hint}")
    given = hardware.NAMED.get(device.upper().removeprefix("NVIDIA ")) if isinstance(device, str) else device
    if not isinstance(given, Device | None) or (given is None and device is not None):
        raise TypeError(
            f"{function}: device={device!r}, expected {', '.join(map(repr, hardware.NAMED))}, a "
            "pallas_kernels.hardware.Device, or None for the first CUDA device."
        )
    present = hardware.present()
    target = given or present or hardware.H200
    return target, target == present


def abstract(function: str, name: str, x: Any) -> Any:
    """An operand to explain, which has a shape and a dtype."""
    if isinstance(x, (tuple, list)):
        raise TypeError(
            f"{function}: {name} is a {type(x).__name__}, expected an array or a jax.ShapeDtypeStruct. Pass "
            f"jax.ShapeDtypeStruct(shape, dtype) for a shape."
        )
    return x if isinstance(x, jax.ShapeDtypeStruct) else checks.as_array(function, name, x)


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
    found, plan = explanation(call, eqn, computation, results, target, notes, invariant)
    if plan is None:
        return found
    if plan.decision is None:
        params = {key: value for key, value in eqn.params.items() if key != "implementation"}
        named = computation.plan(avals, target[0], name, **params)
        if named.decision is not None:
            copies = "" if named.layout.order is None else ", between two transposed copies"
            found = noting(found, f"implementation='mosaic_gpu' would run a kernel{copies}")
        return found
    shape = avals[0].shape
    rows = math.prod(n for d, n in enumerate(shape) if d not in eqn.params["axes"])
    streams = [*avals[1:], *(var.aval for var in eqn.outvars)]
    of_rows = [a for a in streams if a.size == rows < math.prod(shape) and a.dtype != bool]
    moved = plan.decision.bytes_moved + bytes_of(*of_rows)  # the plan leaves out numbers of a row
    return dataclasses.replace(found, bytes_moved=moved)


def explanation(
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


def size_in_words(count: Any) -> str:
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
