"""`explain`, of any program and of single calls: which kernel runs, how many bytes it moves, and why no other."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxsoftmax import _softmax
from jaxsoftmax._attention import flash_attention, paged
from jaxsoftmax._attention.paged import paged_attention
from jaxsoftmax._attention.primitives import BY_PART, Pass
from jaxsoftmax._attention.sharding import sequence_notes
from jaxsoftmax._core import checks
from jaxsoftmax._core.calls import meant_operation, public
from jaxsoftmax._core.checks import ArrayLike, Axis, Implementation
from jaxsoftmax._core.sharding import spec_of
from jaxsoftmax._cross_entropy import linear_cross_entropy, softmax_cross_entropy_with_integer_labels
from jaxsoftmax._cross_entropy.linear_kernel import MOVING
from jaxsoftmax._cross_entropy.linear_primitives import GRADIENT, LOSS, OF_COTANGENT, OF_TANGENT
from jaxsoftmax._explain.program import (
    NOT_INVARIANT,
    PAGED_NAMES,
    Target,
    arrays_of,
    avals_of,
    bytes_of,
    chunks_of,
    described,
    explained,
    explained_program,
    gathered,
    least_bytes,
    only,
    recorded,
    rows,
)
from jaxsoftmax._explain.words import Explanation, ProgramExplanation
from jaxsoftmax._softmax.primitives import BY_OP
from jaxsoftmax._top_k import TOP_K, top_k_softmax
from pallas_kernels import hardware
from pallas_kernels.attention.problem import DIFFERENTIABLE
from pallas_kernels.hardware import Device
from pallas_kernels.softmax.problem import RULES, Op

Abstract = ArrayLike | jax.ShapeDtypeStruct
Described = jax.Array | jax.ShapeDtypeStruct  # an operand that is checked


@overload
def explain(
    x: Callable[..., Any], *, device: Device | str | None = None, verbose: bool = False
) -> Callable[..., ProgramExplanation]: ...
@overload
def explain(
    x: Abstract,
    axis: Axis = -1,
    where: Abstract | None = None,
    *,
    scale: Abstract = 1.0,
    op: str = "softmax",
    implementation: Implementation | None = None,
    device: Device | str | None = None,
    verbose: bool = False,
    **options: Any,
) -> Explanation: ...
@public
def explain(
    x: Abstract | Callable[..., Any],
    axis: Axis = -1,
    where: Abstract | None = None,
    *,
    scale: Abstract = 1.0,
    op: str = "softmax",
    implementation: Implementation | None = None,
    device: Device | str | None = None,
    verbose: bool = False,
    **options: Any,
) -> Explanation | Callable[..., ProgramExplanation]:
    """Says what the calls of this package in a program run on which GPU, what they move, and why nothing faster runs.

    `explain(f)(*args, **kwargs)` explains any program: a loss, its gradient, a training step, under `jax.jit`, `vmap`,
    `scan`, `checkpoint` or `shard_map`. `explain(x, op=...)` explains one call of a function of rows.

    The program is traced, not run; no GPU is needed, and nothing is computed. A call is explained for one device and
    whole operands, but inside of `shard_map` for a device's part. `Explanation.seconds` is an estimate: of the bytes at
    the rate of a copy and the products at that of a large one, what takes longer. Calls of `jax.nn`,
    `jax.scipy.special`, optax and Flax that this package has functions for are named as outside. Not seen are softmax
    written by hand, other libraries' kernels, and which of equal calls XLA computes once. `python -m jaxsoftmax.explain
    MODULE:FUNCTION` prints it for a function without arguments that returns `(f, args)`.

    Args:
        x: A function, or the operand of a call of a function of rows, an array or a `jax.ShapeDtypeStruct`. The
            function's arguments are pytrees of those; what else is among them, as a number or a string, is passed as it
            is. The next arguments, up to `implementation`, go with an operand.
        axis: The call's axis or axes; None for all.
        where: The call's mask, an array or a `jax.ShapeDtypeStruct`.
        scale: The call's scale.
        op: "softmax", "log_softmax", "logsumexp", or the backward or forward-mode pass of one of the first two:
            "softmax_vjp", "softmax_jvp", "log_softmax_vjp", "log_softmax_jvp". "cross_entropy" and "cross_entropy_vjp"
            (also "cross_entropy_gradient") are `softmax_cross_entropy_with_integer_labels` and its differentiated
            form, of logits `x` and some labels; which form that is depends on whether `weights` are among the options.
            "top_k" is `top_k_softmax`.
        implementation: The call's implementation.
        device: "H100", "H200", "A100", "B200", or a `pallas_kernels.hardware.Device`; the first CUDA device by default,
            or an H200 where there is none.
        verbose: Whether `str()` shows the kernels' configurations.
        **options: The call's other arguments by name, such as `label_smoothing` or `k`.

    Returns:
        For a function another one, which takes its arguments and returns a `ProgramExplanation`; for an operand an
        `Explanation`. `str()` of both is meant to be read.

    Raises:
        TypeError: as the call or the program itself would, `device` is none, or an option goes with a function.
        ValueError: as the call or the program itself would, or `op` is not one of the above.

    >>> import jax, jax.numpy as jnp
    >>> from jaxsoftmax import softmax
    >>> loss = lambda x: softmax(x).astype(jnp.float32).max(-1).sum()
    >>> x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    >>> explanation = explain(jax.grad(loss), device="H200")(x)
    >>> [(call.function, call.direction, call.kernel) for call in explanation.calls]
    [('softmax', 'forward', 'warp'), ('softmax', 'vjp', 'block')]
    >>> print(explanation.calls[0])  # doctest: +ELLIPSIS
    softmax of bfloat16[8192,4096] along axis 1
    ...
      on NVIDIA H200: kernel warp
    ...
        takes: about 32 us at 4.2 TB/s
    ...
    """
    if callable(x):
        given = {"axis": axis == -1, "where": where is None, "scale": checks.is_number(scale) and scale == 1}
        given |= {"op": op == "softmax", "implementation": implementation is None} | dict.fromkeys(options, False)
        if wrong := [name for name, is_usual in given.items() if not is_usual]:
            raise TypeError(
                f"explain: {wrong[0]} is given beside a function, expected no more than device and verbose. Pass "
                f"{wrong[0]} to what the function calls."
            )
        program = functools.partial(explained_program, x, target_of("explain", op, _CALLS, device), verbose)
        return functools.wraps(x)(program)
    target = target_of("explain", op, _CALLS, device)
    explained_op, call = _CALLS[op]
    x = abstract("explain", "x", x)
    arrays: dict[str, Described] = {} if where is None else {"where": abstract("explain", "where", where)}
    if op == "logsumexp" and options.get("b") is not None:
        arrays["b"] = abstract("explain", "b", options.pop("b"))
    static: dict[str, Any] = {"axis": axis, "implementation": implementation, **options}
    notes: tuple[str, ...] = ()
    if op == "logsumexp":
        if not (checks.is_number(scale) and scale == 1):
            raise TypeError(f"explain: scale is {scale}, but logsumexp has no scale. Multiply x by it beforehand.")
    else:
        is_number = checks.is_number(scale)
        if is_number:
            static["scale"] = scale
        else:
            arrays["scale"] = abstract("explain", "scale", scale)
        if not (is_number and 0 < scale < math.inf):
            notes += ("scale is not a positive number: XLA multiplies it in beforehand, in the dtype of accumulation",)
    jaxpr = jax.make_jaxpr(lambda x, arrays: call(x, **static, **arrays))(x, arrays)
    ins, outs = arrays_of(jaxpr.in_avals), arrays_of(jaxpr.out_avals)
    first = ins[0]
    if "b" in arrays or jnp.iscomplexobj(first):
        theirs = "jax.scipy.special.logsumexp" if op == "logsumexp" else "jax.nn"
        return Explanation(
            f"{op} of {first.str_short()}" + (" with weights b" if "b" in arrays else ""),
            "xla",
            target[1],
            target[0],
            f"{'weights' if 'b' in arrays else 'complex numbers'} are computed by {theirs}, not by a kernel",
            bytes_of(*ins, *outs),
            (NOT_INVARIANT,) if checks.is_batch_invariant() else (),
        )
    if op == "top_k":
        if (along := checks.integer("explain", "axis", axis) % first.ndim) < first.ndim - 1:
            notes += (f"axis {along} is moved to the end: an extra copy",)
        eqn, title = only(jaxpr, TOP_K), rows("top_k", first, (along,))
        least = bytes_of(*ins, *outs)
    else:
        eqn = only(jaxpr, BY_OP[explained_op], BY_OP[Op.CROSS_ENTROPY])
        title, apart = rows(op, avals_of(eqn.invars)[0], eqn.params["axes"]), eqn.primitive is not BY_OP[explained_op]
        least = least_bytes(eqn) + (bytes_of(*outs) if apart else 0)
        notes += (_GRADIENT_APART,) * apart
    explanation = explained(eqn, target)
    if "where" in arrays and explained_op.is_linear and explanation.implementation == "mosaic_gpu":
        notes = ("where is applied by XLA before and after the kernel", *notes)
    notes += explanation.notes
    return dataclasses.replace(explanation, call=title, least_bytes=least, notes=notes, verbose=verbose)


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
    verbose: bool = False,
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
        device: "H100", "H200", "A100", "B200", or a `pallas_kernels.hardware.Device`; the first CUDA device by default,
            or an H200 where there is none.
        verbose: Whether `str()` shows the kernel's configuration.
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
        takes: at least 4.01 us at 4.2 TB/s
        besides: XLA holds all logits at a time
    """
    target, part = target_of("explain_attention", op, TRACED, device), _PARTS[op]
    arrays = {"query": query, "key": key, "value": value}
    arrays |= {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    arrays = {name: abstract("explain_attention", name, x) for name, x in arrays.items()}
    floats, rest, static = split(arrays | arguments, DIFFERENTIABLE)
    call = lambda floats, rest: flash_attention(**floats, **rest, **static)
    eqn = only(jax.make_jaxpr(TRACED[op](call))(floats, rest), BY_PART[part])
    explanation = explained(eqn, target)
    notes = (*_of_sequence(floats | rest, eqn.params["names"], part), *explanation.notes)
    return dataclasses.replace(explanation, notes=notes, verbose=verbose)


@public
def explain_paged_attention(
    query: Abstract,
    key_pages: Abstract,
    value_pages: Abstract,
    block_tables: Abstract,
    lengths: Abstract,
    *,
    device: Device | str | None = None,
    verbose: bool = False,
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
        device: "H100", "H200", "A100", "B200", or a `pallas_kernels.hardware.Device`; the first CUDA device by default,
            or an H200 where there is none.
        verbose: Whether `str()` shows the kernel's configuration.
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
        (query, key_pages, value_pages, block_tables, lengths),
    )
    pages = {key: abstract(name, key, x) for key, x in zip(PAGED_NAMES, given, strict=True)}
    _, arrays, static = split(pages | arguments, ())
    jaxpr = jax.make_jaxpr(lambda arrays: paged_attention(**arrays, **static))(arrays)
    # Where the window or the soft cap is data, the pages are gathered outside of any primitive.
    eqn = only(jaxpr, paged.PAGED, BY_PART[Pass.FORWARD])
    explanation = explained(eqn, target)
    if eqn.primitive is not paged.PAGED:
        first, keys, values, *_ = avals_of(eqn.invars)
        shapes = [first.shape, *(arrays[key].shape for key in PAGED_NAMES[1:])]
        least = bytes_of(*arrays_of(jaxpr.in_avals), *avals_of(eqn.outvars))
        call = described("paged_attention", first, PAGED_NAMES, shapes)
        notes = (gathered([keys, values]), *explanation.notes)
        explanation = dataclasses.replace(explanation, call=call, least_bytes=least, notes=notes)
    return dataclasses.replace(explanation, verbose=verbose)


@public
def explain_linear_cross_entropy(
    hidden: Abstract,
    weight: Abstract,
    labels: Abstract,
    *,
    op: str = "forward",
    device: Device | str | None = None,
    verbose: bool = False,
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
        device: "H100", "H200", "A100", "B200", or a `pallas_kernels.hardware.Device`; the first CUDA device by default,
            or an H200 where there is none.
        verbose: Whether `str()` shows the kernel's configuration.
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
        takes: at least 11 ms at 780 TFLOP/s, for products of 8607 GFLOP
        not linear_cross_entropy: implementation='xla'
    """
    target = target_of("explain_linear_cross_entropy", op, TRACED, device)
    given = {"hidden": hidden, "weight": weight, "labels": labels}
    given = {name: abstract("explain_linear_cross_entropy", name, x) for name, x in given.items()} | arguments
    floats, rest, static = split(given, MOVING)
    traced = lambda floats, rest: jax.tree.leaves(linear_cross_entropy(**floats, **rest, **static))
    jaxpr = jax.make_jaxpr(TRACED[op](traced))(floats, rest)
    explanation = explained(only(jaxpr, LOSS, GRADIENT), target)
    name = "linear_cross_entropy" if op == "forward" else f"{op} of linear_cross_entropy"
    call = described(name, floats["hidden"], floats, [x.shape for x in floats.values()])
    least, notes = bytes_of(*arrays_of(jaxpr.in_avals), *arrays_of(jaxpr.out_avals)), explanation.notes
    for eqn in jaxpr.eqns:
        if results := {OF_COTANGENT: "gradients", OF_TANGENT: "tangents"}.get(eqn.primitive):
            chunks = chunks_of(recorded(eqn, target[0]))
            notes += (f"the {results} are computed in {chunks}, from logits computed again",)
    return dataclasses.replace(explanation, call=call, least_bytes=least, notes=notes, verbose=verbose)


def target_of(function: str, op: object, among: Collection[str], device: object) -> Target:
    """Checks an operation and a device; returns the device to explain for, and whether this process has it."""
    if not isinstance(op, str) or op not in among:
        hint = meant_operation(op, among) if isinstance(op, str) else ""
        raise ValueError(f"{function}: op={op!r}, expected one of {', '.join(among)}.{hint}")
    given = hardware.NAMED.get(device.upper().removeprefix("NVIDIA ")) if isinstance(device, str) else device
    if not isinstance(given, Device | None) or (given is None and device is not None):
        raise TypeError(
            f"{function}: device={device!r}, expected {', '.join(map(repr, hardware.NAMED))}, a "
            "pallas_kernels.hardware.Device, or None for the first CUDA device."
        )
    present = hardware.present()
    target = given or present or hardware.H200
    return target, target == present


def abstract(function: str, name: str, x: object) -> Described:
    """Returns an operand to explain, which has a shape and a dtype."""
    if isinstance(x, (tuple, list)):
        raise TypeError(
            f"{function}: {name} is a {type(x).__name__}, expected an array or a jax.ShapeDtypeStruct. Pass "
            f"jax.ShapeDtypeStruct(shape, dtype) for a shape."
        )
    return x if isinstance(x, jax.ShapeDtypeStruct) else checks.as_array(function, name, x)


def _of_sequence(given: dict[str, Described], names: Sequence[str], part: Pass) -> tuple[str, ...]:
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
    results = {Pass.FORWARD: (), Pass.GRADIENTS: moving, Pass.TANGENT: None}[part]
    return sequence_notes(list(arrays), shapes, specs, on.mesh.shape, results)


def pulled_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the reverse pass of a function, for the arguments that are differentiated."""

    def call(moving: Any, *rest: object, **arguments: object) -> Any:
        y, vjp = jax.vjp(lambda moving: function(moving, *rest, **arguments), moving)
        return vjp(y)[0]

    return call


def pushed_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward-mode pass of a function, for the arguments that are differentiated."""

    def call(moving: Any, *rest: object, **arguments: object) -> Any:
        return jax.jvp(lambda moving: function(moving, *rest, **arguments), (moving,), (moving,))[1]

    return call


def _labelled(x: jax.Array, **arguments: Any) -> jax.Array:
    rows = jax.eval_shape(functools.partial(jnp.max, axis=arguments["axis"]), x).shape
    return softmax_cross_entropy_with_integer_labels(x, jax.lax.full(rows, 0), **arguments)


def _labelled_gradient(x: jax.Array, **arguments: Any) -> jax.Array:
    return jax.grad(lambda x: jax.tree.leaves(_labelled(x, **arguments))[0].sum())(x)


_PARTS = {"forward": Pass.FORWARD, "vjp": Pass.GRADIENTS, "jvp": Pass.TANGENT}

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
    "cross_entropy_vjp": (Op.CROSS_ENTROPY_GRADIENT, _labelled_gradient),
    "top_k": (Op.STATS, top_k_softmax),
}


TRACED: dict[str, Callable[..., Any]] = {"forward": lambda call: call, "vjp": pulled_back, "jvp": pushed_forward}


def split(
    arguments: dict[str, Any], differentiable: Iterable[str]
) -> tuple[dict[str, Described], dict[str, Described], dict[str, Any]]:
    """Returns the arguments that are differentiated, the other arrays, and what is static."""
    # NumPy's numbers and dtypes have shapes too, but stay numbers and dtypes.
    is_array = lambda x: isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or (isinstance(x, np.ndarray) and x.ndim)
    arrays = {name: x for name, x in arguments.items() if is_array(x)}
    is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    floats = {name: x for name, x in arrays.items() if name in differentiable and is_float(x)}
    rest = {name: x for name, x in arrays.items() if name not in floats}
    return floats, rest, {name: x for name, x in arguments.items() if name not in arrays}
