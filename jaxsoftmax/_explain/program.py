"""Explains a program's calls of this package by the choices of their lowering rules.

A program is traced, and each application of a primitive in it is lowered by itself for CUDA under a `recorder`, by the
rules that lower the program: what these choose is what is explained. Neither the program nor a kernel is compiled.
"""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive, jaxprs_in_params
from jax.interpreters import partial_eval as pe

import pallas_kernels
from jaxsoftmax import _patch
from jaxsoftmax._attention import paged
from jaxsoftmax._attention.primitives import BY_PART, Part, tile_by_xla
from jaxsoftmax._core import recorder
from jaxsoftmax._core.recorder import Choice
from jaxsoftmax._cross_entropy.linear_kernel import TANGENT
from jaxsoftmax._cross_entropy.linear_primitives import LOSS
from jaxsoftmax._explain.words import Explanation, Outside, ProgramExplanation, size_in_words
from jaxsoftmax._softmax.primitives import COMPUTATIONS
from jaxsoftmax._top_k import COUNTS, SELECTS, TOP_K, chunk_size
from pallas_kernels import hardware
from pallas_kernels.attention.problem import Attention
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


def explained_program(function: Callable[..., Any], target: Target, verbose: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Explains a program on these arguments."""
    leaves, form = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))}

    def call(arrays: dict[int, Any]) -> Any:
        args, kwargs = form.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        return jax.tree.leaves(function(*args, **kwargs))

    jaxpr, known, stock = jax.make_jaxpr(call)(arrays), {}, _patch.originals()
    outside: dict[Outside, None] = {}
    for eqn, times, frames in _equations(jaxpr):
        if eqn.primitive.name in DIRECTIONS:
            site, params = _site(frames), tuple(sorted(eqn.params.items()))
            key = eqn.primitive, params, tuple((v.aval.shape, v.aval.dtype) for v in eqn.invars), site
            if key not in known:
                known[key] = dataclasses.replace(explained(eqn, target), site=site, times=0, verbose=verbose)
            before = known[key].times
            known[key] = dataclasses.replace(known[key], times=None if None in (before, times) else before + times)
        else:
            # The outermost: optax's loss calls logsumexp.
            of = [(i, stock[frame[:2]]) for i, frame in enumerate(frames) if frame[:2] in stock]
            outside |= {Outside(name, _site(frames[i + 1 :])): None for i, name in of[-1:]}
    return ProgramExplanation(*target, tuple(known.values()), tuple(outside))


def _equations(jaxpr: Any, times: int | None = 1, outer: Sequence[Frame] = ()) -> Iterator[Any]:
    """The equations that results need, also of loops and calls; how often each runs, None if not known; its frames."""
    if hasattr(jaxpr, "consts"):
        jaxpr = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))[0]
    for eqn in jaxpr.eqns:
        frames = [*_frames(eqn), *outer]
        yield eqn, times, frames
        more = {"while": None, "cond": None, "scan": eqn.params.get("length")}.get(eqn.primitive.name, 1)
        for inside in jaxprs_in_params(eqn.params):
            yield from _equations(inside, None if times is None or more is None else times * more, frames)


def only(jaxpr: Any, *primitives: Primitive) -> Any:
    """Returns the first application of one of the primitives."""
    return next(eqn for eqn, *_ in _equations(jaxpr) if eqn.primitive in primitives)


def _frames(eqn: Any) -> list[Frame]:
    """Where an equation was traced, from the innermost; what `jax.jit` has traced does not say who called it."""
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    return [(f.file_name, f.function_name, f.line_num) for f in traceback.frames] if traceback else []


_LIBRARIES = tuple(
    os.path.dirname(str(inspect.getfile(module))) + os.sep for module in (jax, _patch, pallas_kernels, os)
)


def _site(frames: Iterable[Frame]) -> str:
    """The innermost line outside of JAX, this package and Python, and if possible of any that is installed."""
    installed = lambda file: f"{os.sep}site-packages{os.sep}" in file
    places = [
        (file, line)
        for file, _, line in frames
        if not file.startswith(_LIBRARIES[:3]) and (installed(file) or not file.startswith(_LIBRARIES[3]))
    ]
    found = next((place for place in places if not installed(place[0])), places[0] if places else None)
    return f"{os.path.basename(found[0])}:{found[1]}" if found else ""


def recorded(eqn: Any, device: Device) -> Choice:
    """Asks the lowering rule of an equation's primitive for its choice on a device."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    program = jax.jit(lambda *xs: eqn.primitive.bind(*xs, **eqn.params))
    is_fixed = all(isinstance(n, int) for x in shapes for n in x.shape)
    with hardware.compiling_for(device), recorder.entered(None, None, (), {}) as root:
        if is_fixed:
            program.trace(*shapes).lower(lowering_platforms=("cuda",))
        else:
            jax.export.export(program, platforms=("cuda",))(*shapes)
    return root.inside[0] if root.inside else Choice(None, None, tuple(shapes), eqn.params)


def explained(eqn: Any, target: Target) -> Explanation:
    """Explains an application of a primitive, by itself and by what computes it."""
    choice, (device, here), primitive, params = recorded(eqn, target[0]), target, eqn.primitive, eqn.params
    function, direction = DIRECTIONS[primitive.name]
    avals, function = [v.aval for v in eqn.invars], params.get("function", function)
    has_kernel = choice.plan is not None and choice.plan.decision is not None
    inner = choice if has_kernel or not choice.inside else choice.inside[0]
    fields = _of_choice(inner, primitive)
    if inner is not choice and choice.plan is not None:
        fields["declined"] = (*choice.plan.declined, *fields["declined"])
    title = function if direction == "forward" else f"{direction} of {function}"
    names = params.get("names", PAGED_NAMES if primitive is paged.PAGED else ())
    call = (
        named(title, avals[0], names, [a.shape for a in avals])
        if names
        else rows(title, avals[0], params.get("axes", (avals[0].ndim - 1,)))
    )
    operands = tuple(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in avals)
    found = Explanation(
        call,
        here=here,
        device=device,
        least_bytes=least_bytes(eqn),
        function=function,
        direction=direction,
        operands=operands,
        **fields,
    )
    if primitive in COMPUTATIONS:
        return _with_numbers_of_rows(found, eqn, inner)
    if primitive is TOP_K:
        return _with_selection(found, choice, inner)
    if primitive.name.startswith("linear"):
        return _with_chunks(found, eqn, choice)
    return _with_logits(found, eqn, inner)


_BY_XLA_ALONE = {
    "softmax_cross_entropy": "XLA reads such rows once",
    "softmax_tangent": "implementation='xla', or a mask, whose selects XLA fuses with the derivative",
}


def _of_choice(choice: Choice, primitive: Primitive) -> dict[str, Any]:
    """The fields of an explanation that say what a lowering rule chose."""
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


def _with_numbers_of_rows(found: Explanation, eqn: Any, choice: Choice) -> Explanation:
    """With the bytes of an operation over rows, and with what a named kernel would do."""
    plan, avals = choice.plan, choice.avals
    if plan is None:
        return found
    if plan.decision is None:
        computation = COMPUTATIONS[eqn.primitive]
        named = computation.plan(avals, found.device, found.function, **choice.params)
        if named.decision is None or choice.name:
            return found
        copies = "" if named.layout.order is None else ", between two transposed copies"
        return noting(found, f"implementation='mosaic_gpu' would run a kernel{copies}")
    shape = avals[0].shape
    rows = math.prod(n for d, n in enumerate(shape) if d not in eqn.params["axes"])
    streams = [*avals[1:], *(v.aval for v in eqn.outvars)]
    of_rows = [a for a in streams if a.size == rows < math.prod(shape) and a.dtype != bool]
    moved = plan.decision.bytes_moved + bytes_of(*of_rows)  # the plan leaves out numbers of a row
    return dataclasses.replace(found, bytes_moved=moved)


def _with_selection(found: Explanation, choice: Choice, inner: Choice) -> Explanation:
    """With how the largest are selected, beside the kernel for the statistics of the rows, or of their chunks."""
    n, c, k = choice.avals[0].shape[-1], inner.avals[0].shape[-1], choice.params["k"]
    if choice.params.get("batch_invariant"):
        c = chunk_size(n, k)
        found = noting(found, "XLA reads the logits once more to find the largest")
    chunks = -(-n // c)
    of = f"rows of {n}" if c == n else f"each row's {chunks} chunks of {c}, of which {k} are taken apart"
    how = f"radix_select finds the {k} largest of" if SELECTS in choice.notes else "XLA orders"
    how = "XLA counts the ranks of" if COUNTS in choice.notes else how
    found = noting(found, f"the kernel is for the statistics; {how} {of}")
    filled = f"the logits are filled up to {chunks * c} columns: an extra copy"
    return noting(found, filled) if n < chunks * c else found


def _with_chunks(found: Explanation, eqn: Any, choice: Choice) -> Explanation:
    """With the chunks of tokens in which the loss of a product is computed, and its products."""
    names, avals = eqn.params["names"], [v.aval for v in eqn.invars]
    of = dict(zip(names, avals, strict=True))
    moved = [n for n in eqn.params.get("moving", (n.removeprefix(TANGENT) for n in names if n.startswith(TANGENT)))]
    products = 1 + len({"hidden", "weight"} & {*moved})
    flop = 2 * products * of["labels"].size * of["weight"].size
    chunks = chunks_of(choice)
    if found.kernel == "linear_cross_entropy":
        reason = found.reason if eqn.primitive is LOSS else f"{chunks}, as {found.reason}"
        return dataclasses.replace(found, reason=reason, notes=(), flop=flop)
    why = choice.plan.declined[0][1] if choice.plan is not None else found.reason
    return dataclasses.replace(found, reason=f"{chunks}, as {why}", flop=flop)


def chunks_of(choice: Choice) -> str:
    return next(iter([*choice.notes, *(() if choice.plan is None else choice.plan.notes)]), "one chunk of all tokens")


def _with_logits(found: Explanation, eqn: Any, choice: Choice) -> Explanation:
    """With the products of attention, the pages that are gathered, and the logits that XLA holds."""
    decision, avals, names = choice.plan and choice.plan.decision, choice.avals, choice.params.get("names", ())
    if decision is not None:
        found = dataclasses.replace(found, flop=_flop(decision.problem))
    if eqn.primitive is paged.PAGED and names:
        found = dataclasses.replace(found, notes=(gathered(choice.avals[1:3]), *found.notes))
    part = {primitive: part for part, primitive in BY_PART.items()}.get(eqn.primitive, Part.FORWARD)
    if found.implementation == "xla" and names:
        tile = tile_by_xla(part, names, choice.params["rules"], avals, found.device)
        # None: a length is symbolic.
        of_all = tile is None or tile == (avals[0].shape[-3], avals[1].shape[-3])
        held = "all logits" if tile is None or of_all else f"the logits of {tile[0]} queries and {tile[1]} keys"
        found = noting(found, f"XLA holds {held} at a time")
    varies = found.kernel and part is not Part.FORWARD and _is_invariant(choice.params)
    return noting(found, _GRADIENTS_VARY) if varies else found


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
    seen = int(np.clip(np.minimum.reduce(ends) - np.maximum(first, 0), 0, keys).sum())
    is_forward, pairs = problem.op == "attention", problem.batch * problem.query_heads * seen
    return 2 * pairs * ((1 if is_forward else 3) * problem.head_dim + (1 if is_forward else 2) * problem.value_dim)


def gathered(pages: Iterable[Any]) -> str:
    return f"XLA gathers the pages first, {size_in_words(bytes_of(*pages))} of keys and values"


def noting(explanation: Explanation, note: str) -> Explanation:
    return dataclasses.replace(explanation, notes=(*explanation.notes, note))


def rows(name: str, operand: Any, axes: tuple[int, ...]) -> str:
    """Describes an operation, its operand and its axes."""
    extents = ",".join(map(str, operand.shape))
    return f"{name} of {operand.dtype}[{extents}] along axis {', '.join(map(str, axes)) or 'none'}"


def named(name: str, first: Any, names: Iterable[str], shapes: Iterable[Any]) -> str:
    """Describes an operation and its operands by their names."""
    shown = ", ".join(f"{key} [{','.join(map(str, x))}]" for key, x in zip(names, shapes, strict=False))
    return f"{name} of {first.dtype}: {shown}"


def least_bytes(eqn: Any) -> int:
    return bytes_of(*(v.aval for v in (*eqn.invars, *eqn.outvars)))


def bytes_of(*avals: Any) -> int:
    return sum(aval.size * aval.dtype.itemsize for aval in avals)
