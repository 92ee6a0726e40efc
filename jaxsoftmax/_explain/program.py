"""Explains a program's calls of this package by the choices of their lowering rules.

A program is traced, and each application of a primitive in it is lowered by itself for CUDA under a `recorder`, by the
rules that lower the program: what these choose is what is explained. Neither the program nor a kernel is compiled.
"""

import dataclasses
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypedDict

import jax
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxprs_in_params
from jax.interpreters import partial_eval as pe

import pallas_kernels
from jaxsoftmax import _patch
from jaxsoftmax._attention import paged
from jaxsoftmax._attention.primitives import BY_PART, Pass, tile_by_xla
from jaxsoftmax._core import recorder
from jaxsoftmax._core.recorder import Aval, Choice
from jaxsoftmax._cross_entropy.linear_kernel import TANGENT
from jaxsoftmax._cross_entropy.linear_primitives import LOSS
from jaxsoftmax._explain.words import Explanation, Outside, ProgramExplanation, size_in_words
from jaxsoftmax._softmax.primitives import COMPUTATIONS
from jaxsoftmax._top_k import COUNTS, TOP_K, chunk_size
from pallas_kernels import hardware
from pallas_kernels.attention.problem import Attention
from pallas_kernels.decision import Declined
from pallas_kernels.hardware import Device

Frame = tuple[str, str, int]  # a file, a function and a line
Target = tuple[Device, bool]  # the device to explain for, and whether it is one of this process

PAGED_NAMES = ("query", "key_pages", "value_pages", "block_tables", "lengths")
_LABELS = "softmax_cross_entropy_with_integer_labels"

# The public function, and the direction of its derivative, that the primitives stand for.
DIRECTIONS = {
    "softmax": ("softmax", "forward"),
    "softmax_tangent": ("softmax", "vjp"),
    "log_softmax": ("log_softmax", "forward"),
    "log_softmax_tangent": ("log_softmax", "jvp"),
    "log_softmax_cotangent": ("log_softmax", "vjp"),
    "softmax_stats": ("logsumexp", "forward"),
    "cross_entropy": (_LABELS, "forward"),
    "cross_entropy_gradient": (_LABELS, "forward and vjp"),
    "cross_entropy_cotangent": (_LABELS, "vjp"),
    "cross_entropy_tangent": (_LABELS, "jvp"),
    "softmax_cross_entropy": ("softmax_cross_entropy", "forward"),
    "softmax_top_k": ("top_k_softmax", "forward"),
    "flash_attention": ("flash_attention", "forward"),
    "flash_attention_gradients": ("flash_attention", "vjp"),
    "flash_attention_tangent": ("flash_attention", "jvp"),
    "paged_attention": ("paged_attention", "forward"),
    "linear_cross_entropy": ("linear_cross_entropy", "forward"),
    "linear_cross_entropy_gradient": ("linear_cross_entropy", "forward and vjp"),
    "linear_cross_entropy_cotangent": ("linear_cross_entropy", "vjp"),
    "linear_cross_entropy_tangent": ("linear_cross_entropy", "jvp"),
}

NOT_INVARIANT = "batch invariance is not promised, for no kernel runs: XLA's sums depend on how many rows there are"
_GRADIENTS_VARY = (
    "batch invariance is promised of the output and the logsumexp alone; deterministic_gradients=True makes gradients "
    "repeat"
)


class _Choice(TypedDict, total=False):
    """Says what a lowering rule chose, as fields of an `Explanation`."""

    implementation: str
    reason: str
    notes: tuple[str, ...]
    declined: Declined
    kernel: str | None
    config: object


def explained_program(
    function: Callable[..., object], target: Target, verbose: bool, /, *args: object, **kwargs: object
) -> ProgramExplanation:
    """Explains a program on these arguments."""
    leaves, form = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))}

    def call(arrays: dict[int, jax.Array]) -> list[jax.Array]:
        args, kwargs = form.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        return jax.tree.leaves(function(*args, **kwargs))

    jaxpr, stock = jax.make_jaxpr(call)(arrays), _patch.originals()
    calls: dict[tuple[object, ...], Explanation] = {}
    outside: dict[Outside, None] = {}
    for eqn, times, frames in _equations(jaxpr):
        if eqn.primitive.name in DIRECTIONS:
            site, params = _site(frames), tuple(sorted(eqn.params.items()))
            key = eqn.primitive, params, tuple((a.shape, a.dtype) for a in avals_of(eqn.invars)), site
            if key not in calls:
                calls[key] = dataclasses.replace(explained(eqn, target), site=site, times=0, verbose=verbose)
            before = calls[key].times
            total = None if before is None or times is None else before + times
            calls[key] = dataclasses.replace(calls[key], times=total)
        else:
            # The outermost: optax's loss calls logsumexp.
            of = [(i, stock[frame[:2]]) for i, frame in enumerate(frames) if frame[:2] in stock]
            outside |= {Outside(name, _site(frames[i + 1 :])): None for i, name in of[-1:]}
    return ProgramExplanation(*target, tuple(calls.values()), tuple(outside))


def _equations(
    jaxpr: Jaxpr, times: int | None = 1, outer: Sequence[Frame] = ()
) -> Iterator[tuple[JaxprEqn, int | None, Sequence[Frame]]]:
    """Lists the equations that results need, also of loops and calls; how often each runs, if known; its frames."""
    if hasattr(jaxpr, "consts"):
        jaxpr = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))[0]
    for eqn in jaxpr.eqns:
        frames = [*_frames(eqn), *outer]
        yield eqn, times, frames
        more = {"while": None, "cond": None, "scan": eqn.params.get("length")}.get(eqn.primitive.name, 1)
        for inside in jaxprs_in_params(eqn.params):
            yield from _equations(inside, None if times is None or more is None else times * more, frames)


def only(jaxpr: Jaxpr, *primitives: Primitive) -> JaxprEqn:
    """Returns the first application of one of the primitives."""
    return next(eqn for eqn, *_ in _equations(jaxpr) if eqn.primitive in primitives)


def avals_of(atoms: Iterable[Var | Literal]) -> list[ShapedArray]:
    """Returns the types of arrays."""
    return arrays_of(atom.aval for atom in atoms)


def arrays_of(avals: Iterable[AbstractValue]) -> list[ShapedArray]:
    """Returns those of the types that are of arrays."""
    return [aval for aval in avals if isinstance(aval, ShapedArray)]


def _frames(eqn: JaxprEqn) -> list[Frame]:
    """Lists where an equation was traced, from the innermost; what `jax.jit` has traced does not say who called it."""
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    return [(f.file_name, f.function_name, f.line_num) for f in traceback.frames] if traceback else []


_LIBRARIES = tuple(
    os.path.dirname(str(inspect.getfile(module))) + os.sep for module in (jax, _patch, pallas_kernels, os)
)


def _site(frames: Iterable[Frame]) -> str:
    """Returns the innermost line outside of JAX, this package and Python, and if possible of any that is installed."""
    installed = lambda file: f"{os.sep}site-packages{os.sep}" in file
    places = [
        (file, line)
        for file, _, line in frames
        if not file.startswith(_LIBRARIES[:3]) and (installed(file) or not file.startswith(_LIBRARIES[3]))
    ]
    place = next((place for place in places if not installed(place[0])), places[0] if places else None)
    return f"{os.path.basename(place[0])}:{place[1]}" if place else ""


def recorded(eqn: JaxprEqn, device: Device) -> Choice:
    """Asks the lowering rule of an equation's primitive for its choice on a device."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals_of(eqn.invars)]
    program = jax.jit(lambda *xs: eqn.primitive.bind(*xs, **eqn.params))
    is_fixed = all(isinstance(n, int) for x in shapes for n in x.shape)
    with hardware.compiling_for(device), recorder.entered(None, None, (), {}) as root:
        if is_fixed:
            program.trace(*shapes).lower(lowering_platforms=("cuda",))
        else:
            jax.export.export(program, platforms=("cuda",))(*shapes)
    return root.inside[0] if root.inside else Choice(None, None, tuple(shapes), eqn.params)


def explained(eqn: JaxprEqn, target: Target) -> Explanation:
    """Explains an application of a primitive, by itself and by what computes it."""
    choice, (device, here), primitive, params = recorded(eqn, target[0]), target, eqn.primitive, eqn.params
    function, direction = DIRECTIONS[primitive.name]
    avals, function = avals_of(eqn.invars), params.get("function", function)
    has_kernel = choice.plan is not None and choice.plan.decision is not None
    inner = choice if has_kernel or not choice.inside else choice.inside[0]
    title = function if direction == "forward" else f"{direction} of {function}"
    names = params.get("names", PAGED_NAMES if primitive is paged.PAGED else ())
    call = (
        described(title, avals[0], names, [a.shape for a in avals])
        if names
        else rows(title, avals[0], params.get("axes", (avals[0].ndim - 1,)))
    )
    operands = tuple(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in avals)
    explanation = Explanation(
        call,
        here=here,
        device=device,
        least_bytes=least_bytes(eqn),
        function=function,
        direction=direction,
        operands=operands,
        **_of_choice(inner, primitive),
    )
    if inner is not choice and choice.plan is not None:
        explanation = dataclasses.replace(explanation, declined=(*choice.plan.declined, *explanation.declined))
    if primitive in COMPUTATIONS:
        return _with_row_bytes(explanation, eqn, inner)
    if primitive is TOP_K:
        return _with_selection(explanation, choice, inner)
    if primitive.name.startswith("linear"):
        return _with_chunks(explanation, eqn, choice)
    return _with_logits(explanation, eqn, inner)


_BY_XLA_ALONE = {
    "softmax_cross_entropy": "XLA reads such rows once",
    "softmax_tangent": "implementation='xla', or a mask, whose selects XLA fuses with the derivative",
}


def _of_choice(choice: Choice, primitive: Primitive) -> _Choice:
    """Says what a lowering rule chose."""
    plan, notes = choice.plan, (NOT_INVARIANT,) * _is_invariant(choice.params)
    if plan is None:
        reason = "forward mode has no kernel" if DIRECTIONS[primitive.name][1] == "jvp" else "implementation='xla'"
        reason = _BY_XLA_ALONE.get(primitive.name, reason)
        return {"implementation": "xla", "reason": reason, "notes": notes, "declined": ()}
    if (decision := plan.decision) is None:
        runs = "error" if choice.name else "xla"
        return {"implementation": runs, "reason": "no kernel takes the call", "notes": notes, "declined": plan.declined}
    return {
        "implementation": decision.implementation,
        "reason": decision.reason,
        "notes": plan.notes,
        "declined": plan.declined,
        "kernel": decision.kernel,
        "config": decision.config,
    }


def _is_invariant(params: dict[str, Any]) -> bool:
    return params.get("batch_invariant", getattr(params.get("rules"), "batch_invariant", False))


def _with_row_bytes(explanation: Explanation, eqn: JaxprEqn, choice: Choice) -> Explanation:
    """Adds the bytes of an operation over rows, and what a kernel that is required would do."""
    plan, avals = choice.plan, choice.avals
    if plan is None:
        return explanation
    if plan.decision is None:
        computation = COMPUTATIONS[eqn.primitive]
        required = computation.plan(avals, explanation.device, explanation.function, **choice.params)
        if required.decision is None or choice.name:
            return explanation
        copies = "" if required.layout.order is None else ", between two transposed copies"
        return noting(explanation, f"implementation='mosaic_gpu' would run a kernel{copies}")
    shape = avals[0].shape
    rows = math.prod(n for d, n in enumerate(shape) if d not in eqn.params["axes"])
    streams = [*avals[1:], *avals_of(eqn.outvars)]
    of_rows = [a for a in streams if a.size == rows < math.prod(shape) and a.dtype != bool]
    moved = (plan.decision.bytes_moved or 0) + bytes_of(*of_rows)  # the plan leaves out numbers of a row
    return dataclasses.replace(explanation, bytes_moved=moved)


def _with_selection(explanation: Explanation, choice: Choice, inner: Choice) -> Explanation:
    """Adds how the largest are selected, beside the kernel for the statistics of the rows, or of their chunks."""
    n, c, k = choice.avals[0].shape[-1], inner.avals[0].shape[-1], choice.params["k"]
    if choice.params.get("batch_invariant"):
        c = chunk_size(n, k)
        explanation = noting(explanation, "XLA reads the logits once more to find the largest")
    chunks = -(-n // c)
    of = f"rows of {n}" if c == n else f"each row's {chunks} chunks of {c}, of which {k} are taken apart"
    kernel = next((decision.kernel for decision in choice.considered if decision.chosen), None)
    if kernel is None:
        refused = dict.fromkeys(itertools.chain.from_iterable(decision.declined for decision in choice.considered))
        explanation = dataclasses.replace(explanation, declined=(*explanation.declined, *refused))
    how = "XLA orders" if kernel is None else f"{kernel} finds the {k} largest of"
    how = "XLA counts the ranks of" if COUNTS in choice.notes else how
    explanation = noting(explanation, f"the kernel is for the statistics; {how} {of}")
    filled = f"the logits are filled up to {chunks * c} columns: an extra copy"
    return noting(explanation, filled) if n < chunks * c else explanation


def _with_chunks(explanation: Explanation, eqn: JaxprEqn, choice: Choice) -> Explanation:
    """Adds the chunks of tokens in which the loss of a product is computed, and its products."""
    names, avals = eqn.params["names"], avals_of(eqn.invars)
    of = dict(zip(names, avals, strict=True))
    moved = [n for n in eqn.params.get("moving", (n.removeprefix(TANGENT) for n in names if n.startswith(TANGENT)))]
    products = 1 + len({"hidden", "weight"} & {*moved})
    flop = 2 * products * of["labels"].size * of["weight"].size
    chunks = chunks_of(choice)
    if explanation.kernel == "linear_cross_entropy":
        reason = explanation.reason if eqn.primitive is LOSS else f"{chunks}, as {explanation.reason}"
        return dataclasses.replace(explanation, reason=reason, notes=(), flop=flop)
    why = choice.plan.declined[0][1] if choice.plan is not None else explanation.reason
    return dataclasses.replace(explanation, reason=f"{chunks}, as {why}", flop=flop)


def chunks_of(choice: Choice) -> str:
    return next(iter([*choice.notes, *(() if choice.plan is None else choice.plan.notes)]), "one chunk of all tokens")


def _with_logits(explanation: Explanation, eqn: JaxprEqn, choice: Choice) -> Explanation:
    """Adds the products of attention, the pages that are gathered, and the logits that XLA holds."""
    avals, names = choice.avals, choice.params.get("names", ())
    decision = None if choice.plan is None else choice.plan.decision
    if decision is not None:
        explanation = dataclasses.replace(explanation, flop=_flop(decision.problem))
    if eqn.primitive is paged.PAGED and names:
        explanation = dataclasses.replace(explanation, notes=(gathered(choice.avals[1:3]), *explanation.notes))
    part = {primitive: part for part, primitive in BY_PART.items()}.get(eqn.primitive, Pass.FORWARD)
    if explanation.implementation == "xla" and names:
        tile = tile_by_xla(part, names, choice.params["rules"], avals, explanation.device)
        # None: a length is symbolic.
        of_all = tile is None or tile == (avals[0].shape[-3], avals[1].shape[-3])
        held = "all logits" if tile is None or of_all else f"the logits of {tile[0]} queries and {tile[1]} keys"
        explanation = noting(explanation, f"XLA holds {held} at a time")
    varies = explanation.kernel and part is not Pass.FORWARD and _is_invariant(choice.params)
    return noting(explanation, _GRADIENTS_VARY) if varies else explanation


def _flop(problem: Attention) -> int | None:
    """Counts the operations of an attention kernel's products, of pairs that count; None if data say which."""
    if problem.has_data_mask or problem.query_lengths or problem.key_lengths or problem.window_sizes:
        return None
    at, keys = np.arange(problem.query_length), problem.key_length
    before, after = problem.window
    ends = [at * 0 + keys]
    ends += [] if problem.causal_offset is None else [at + problem.causal_offset + 1]
    ends += [] if after is None else [at + problem.window_offset + after + 1]
    first = at * 0 if before is None else at + problem.window_offset - before
    pairs_of_head = int(np.clip(np.minimum.reduce(ends) - np.maximum(first, 0), 0, keys).sum())
    is_forward, pairs = problem.op == "attention", problem.batch * problem.query_heads * pairs_of_head
    return 2 * pairs * ((1 if is_forward else 3) * problem.head_dim + (1 if is_forward else 2) * problem.value_dim)


def gathered(pages: Iterable[Aval]) -> str:
    return f"XLA gathers the pages first, {size_in_words(bytes_of(*pages))} of keys and values"


def noting(explanation: Explanation, note: str) -> Explanation:
    return dataclasses.replace(explanation, notes=(*explanation.notes, note))


def rows(name: str, operand: Aval | jax.Array, axes: tuple[int, ...]) -> str:
    """Describes an operation, its operand and its axes."""
    extents = ",".join(map(str, operand.shape))
    return f"{name} of {operand.dtype}[{extents}] along axis {', '.join(map(str, axes)) or 'none'}"


def described(name: str, first: Aval | jax.Array, names: Iterable[str], shapes: Iterable[Sequence[int]]) -> str:
    """Describes an operation and its operands by their names."""
    shown = ", ".join(f"{key} [{','.join(map(str, x))}]" for key, x in zip(names, shapes, strict=False))
    return f"{name} of {first.dtype}: {shown}"


def least_bytes(eqn: JaxprEqn) -> int:
    return bytes_of(*avals_of((*eqn.invars, *eqn.outvars)))


def bytes_of(*avals: Aval) -> int:
    return sum(aval.size * aval.dtype.itemsize for aval in avals)
