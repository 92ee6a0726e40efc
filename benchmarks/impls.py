"""Builds the programs of JAX's own process, of rows and of attention, and times nothing.

`--tree=before=../before --impl=before,now,now:stages=1:scheduler=dynamic` adds attention's kernels as source trees have
them: a tree as it is, this one, and this one with another config. A tree's time is that of the kernel with XLA's
share before and after it, and for a backward pass that from the residuals of a forward pass of the same tree.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxsoftmax
from benchmarks import attention_cases, linear, stock
from benchmarks.attention_cases import AttentionCase, Shape
from benchmarks.cases import ITERATIONS, Case
from benchmarks.linear import LinearCase
from benchmarks.results import KERNEL
from benchmarks.stock import Declined, NotInstalled, load
from pallas_kernels import hardware
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax import dispatch

INVARIANT = "batch_invariant"
ROWS = ("ours", "ours_xla", "ours_kernel", INVARIANT, "xla", "xla_f32", "cudnn", "ladder")
BASELINES = ("xla", "xla_f32", "products")  # of rows, right by definition: what ours is compared with

# The widest tiles of keys of which two stages fit in shared memory, as in the module's own sweep.
_MGPU_BLOCK_KV = {64: 256, 128: 128, 256: 64}

Operands = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run is made; `trees` are folders by name."""

    impls: Sequence[str] = ("ours", "xla")
    rounds: int = 5
    seed: int = 0
    trees: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: int = 2  # of calls that are sharded
    capability: str | None = None  # that the GPU is said to have, of which ours takes what runs there


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile and time, and what is known of it; `prepare` makes its operands from a call's, untimed."""

    function: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def caught(entry: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except NotInstalled as reason:
        entry |= {"status": "not installed", "reason": str(reason)}
    except Declined as reason:
        entry |= {"status": "declined", "reason": str(reason)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        entry |= {"status": "failed", "reason": text[:300]}


def is_tree(impl: str, trees: Mapping[str, str]) -> bool:
    return impl.partition(":")[0] in trees


def programs(case: Any, name: str, options: Options) -> dict[str, Program]:
    """The programs in which a pass of an implementation is timed; those of attention take the operands by name.

    A backward pass of attention is the difference of two, or "direct", from the residuals of a forward pass; "loop" has
    one small call many times. An implementation that does not take the case raises `Declined`.
    """
    hardware.pretend(options.capability)
    if isinstance(case, Case):
        program = build(case, name)
        loop = lambda x: jax.lax.fori_loop(0, ITERATIONS, lambda _, y: program.function(y), x)
        return {case.pass_: program} | ({"loop": Program(loop)} if case.pass_ == "call" else {})
    if isinstance(case, LinearCase):
        return {case.pass_: Program(functools.partial(linear.call, name, case.moving))}
    if is_tree(name, options.trees):
        return _of_tree(case, name, options)
    found = _of_attention(case, ATTENTION[name])
    both = ("fwd", "value_and_vjp", *(["direct"] if name == "ours" else []))
    return {program: found[program] for program in (both if case.pass_ == "bwd" else (case.pass_,))}


def expand(impls: Sequence[str]) -> Iterator[str]:
    for impl in impls:
        yield from (f"{KERNEL}{name}" for name in dispatch.KERNELS) if impl == "ladder" else (impl,)


def invariant(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, traced so that a row's bits do not depend on the rows beside it."""

    def traced(*operands: Any) -> Any:
        with jaxsoftmax.batch_invariant():
            return function(*operands)

    return traced


def _passes(
    forward: Callable[..., Any], split: Callable[..., Any], prepare: Callable[..., Any] | None = None
) -> dict[str, Program]:
    """The passes of a function; `split` makes of its operands a function of some of them, those, and the cotangent."""

    def value_and_vjp(*operands: Any) -> Any:
        function, inputs, cotangent = split(*operands)
        out, pull = jax.vjp(function, *inputs)
        return out, *pull(cotangent.astype(out.dtype))

    def residuals(*operands: Any) -> Any:
        function, inputs, cotangent = split(*(prepare(*operands) if prepare else operands))
        return jax.vjp(function, *inputs)[1], cotangent

    direct = Program(lambda pull, cotangent: pull(cotangent), residuals)
    return {"fwd": Program(forward, prepare), "value_and_vjp": Program(value_and_vjp, prepare), "direct": direct}


def build(case: Case, name: str) -> Program:
    """The program of rows or of a call: by one of `ROWS`, but for "ladder", or by "kernel:NAME:FIELD=VALUE".

    XLA has the backward pass of rows in its leanest form, from the saved output.
    """
    if name == INVARIANT:
        program = build(case, "ours")
        return Program(invariant(program.function), program.prepare and invariant(program.prepare))
    if name.startswith(KERNEL):
        kernel, *replaced = name.removeprefix(KERNEL).split(":")
        return _kernel(case, kernel, dict(map(_field, replaced)))
    op, kept = case.call(stock.LIBRARIES[name]), {}
    passes = {"bwd": "direct", "fwd": "fwd", "call": "fwd"}
    program = _passes(op, functools.partial(case.split, name))[passes.get(case.pass_, "value_and_vjp")]
    if name == "xla" and case.pass_ == "bwd":
        program = Program(functools.partial(_xla_backward, case.op), lambda x, t: (op(x), t))
    if not case.source:
        return program
    if case.has_cotangent:
        pull = jax.eval_shape(lambda x: jax.vjp(op, x)[1], jax.ShapeDtypeStruct(case.shape, case.dtype))
        kept["residual_bytes"] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    prepare = (lambda x: (x.T,)) if "axis" in case.options else program.prepare
    return Program(program.function, prepare, kept | (_explained(case) if name == "ours" else {}))


def _xla_backward(op: str, y: jax.Array, t: jax.Array) -> jax.Array:
    y32, t32 = y.astype(jnp.float32), t.astype(jnp.float32)
    if op == "softmax":
        return (y32 * (t32 - (y32 * t32).sum(-1, keepdims=True))).astype(t.dtype)
    return (t32 - jnp.exp(y32) * t32.sum(-1, keepdims=True)).astype(t.dtype)


def _kernel(case: Case, kernel: str, fields: Mapping[str, Any]) -> Program:
    """One kernel, with other fields of its config, straight through the dispatcher, without the primitive around it."""
    if jax.default_backend() != "gpu":
        raise Declined("kernels need a GPU")
    special = case.given or case.op == "top_k" or case.pass_ == "value_and_grad_mean"
    if not case.source or special or len(case.problems) != 1:
        raise Declined("a kernel runs one plain operation")
    decide = functools.partial(dispatch.decide, *case.problems, hardware.current(), kernel=kernel)
    decision = decide()
    if decision.kernel is None:
        raise Declined(dict(decision.declined).get(kernel, decision.reason))
    decision = decide(config=dataclasses.replace(decision.config, **fields))
    facts = {"kernel": decision.kernel, "config": repr(decision.config), "bytes_moved": decision.bytes_moved}
    if case.op == "cross_entropy":
        return Program(*kernel_of_loss(case, decision), facts)

    def run(*operands: jax.Array) -> jax.Array:
        out = decision.run(*operands)
        return log_normalizer(out).astype(case.dtype) if isinstance(out, Stats) else out

    if case.pass_ == "bwd" and case.op == "softmax":
        return Program(run, lambda x, t: (jax.nn.softmax(x), t), facts)
    return Program(run, facts=facts)


def _explained(case: Case) -> dict[str, Any]:
    if case.op == "top_k":
        return {}
    operand = jax.ShapeDtypeStruct(case.shape, case.dtype)
    calls = {"bwd": (f"{case.op}_vjp",), "value_and_vjp": (case.op, f"{case.op}_vjp")}
    calls |= dict.fromkeys(("value_and_grad", "value_and_grad_mean"), ("cross_entropy_gradient",))
    weights: dict[str, Any] = {"weights": 1 / case.rows} if case.pass_ == "value_and_grad" else {}
    chosen = [jaxsoftmax.explain(operand, op=op, **case.options, **weights) for op in calls.get(case.pass_, (case.op,))]
    if not all(call.here and call.kernel for call in chosen):
        return {"kernel": "reference (XLA)"}
    names = {field: " + ".join(str(getattr(call, field)) for call in chosen) for field in ("kernel", "config")}
    return names | {"bytes_moved": sum(call.bytes_moved or 0 for call in chosen)}


def kernel_of_loss(case: Case, decision: dispatch.Decision) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """One kernel's program and its operands, with XLA's small part of the loss after it."""
    weights = () if case.pass_ == "fwd" else (jnp.full(case.rows, 1 / case.rows),)

    def run(x: jax.Array, y: jax.Array, *weights: jax.Array) -> Any:
        *gradient, maximum, total = decision.run(x, y, *weights)
        loss = log_normalizer(Stats(maximum, total)) - jnp.take_along_axis(x, y[:, None], -1)[:, 0]
        return (loss.mean(), *gradient) if gradient else loss

    return run, (lambda x, y: (x, y, *weights)) if weights else None


class Impl(NamedTuple):
    """`call` makes attention's output, `prepare`, untimed, its operands; `takes` says whether a call is for it."""

    call: Callable[[Shape, Operands], jax.Array]
    prepare: Callable[[Shape, Operands], Operands] | None = None
    takes: Callable[[Shape, str], bool] = lambda shape, pass_: True


def _of_attention(case: AttentionCase, impl: Impl) -> dict[str, Program]:
    shape, prepare = case.shape, impl.prepare
    if not impl.takes(shape, case.pass_):
        raise Declined("it takes no such shape or pass")

    def call(operands: Operands) -> jax.Array:
        try:
            return impl.call(shape, operands)
        except NotImplementedError as reason:
            raise Declined(" ".join(str(reason).split())[:300]) from reason

    def split(operands: Operands) -> Any:
        attend = lambda query, key, value: call({**operands, "query": query, "key": key, "value": value})
        return attend, [operands[name] for name in ("query", "key", "value")], operands["d_out"]

    return _passes(
        lambda operands: (call(operands),), split, prepare and (lambda operands: (prepare(shape, operands),))
    )


def _arguments(shape: Shape, operands: Operands) -> dict[str, Any]:
    window = (shape.span - 1, 0) if shape.kind == "window" else None
    given = {name: x for name, x in operands.items() if name != "d_out"}
    return given | {"is_causal": shape.is_causal, "local_window_size": window}


def _attend(library: Any, shape: Shape, operands: Operands) -> jax.Array:
    return library.flash_attention(**_arguments(shape, operands))


def _in_pages(layout: Any, size: int, shape: Shape, operands: Operands) -> Operands:
    """Keys and values in pages of `size`, which lie in a random order, with their tables."""
    count = shape.batch * (shape.length // size)
    order = jax.random.permutation(jax.random.key(0), count)

    def pages(x: jax.Array) -> jax.Array:
        found = x.reshape(count, size, *x.shape[2:])[jnp.argsort(order)]
        return found if layout == "pages_first" else found.transpose(2, 0, 1, 3)

    tables = order.reshape(shape.batch, -1).astype(jnp.int32)
    lengths = operands.get("key_value_seq_lengths", jnp.full(shape.batch, shape.length, jnp.int32))
    in_pages = {name: pages(operands[name]) for name in ("key", "value")}
    return {"query": operands["query"], **in_pages, "tables": tables, "lengths": lengths}


def _attend_pages(layout: Any, _: Shape, operands: Operands) -> jax.Array:
    q, k, v, tables, lengths = (operands[name] for name in ("query", "key", "value", "tables", "lengths"))
    return jaxsoftmax.paged_attention(q, k, v, tables, lengths, layout=layout)


def _pages_take(shape: Shape, pass_: str) -> bool:
    """Queries of `paged_attention` are the last of their sequence, so that one sees all keys."""
    return pass_ == "fwd" and shape.query_length == 1 and shape.kind in ("full", "lengths")


def _attend_jax(implementation: str, shape: Shape, operands: Operands) -> jax.Array:
    """`jax.nn`'s attention, the values padded to the keys' head dimension."""
    padding = ((0, 0), (0, 0), (0, 0), (0, shape.head_dim - shape.value_dim))
    padded = {**operands, "value": jnp.pad(operands["value"], padding)}
    return _attend(stock.LIBRARIES[implementation], shape, padded)[..., : shape.value_dim]


def _segments_as_mask(shape: Shape, operands: Operands) -> Operands:
    """Documents for those who know no segments: as a mask tensor."""
    if "query_segment_ids" not in operands:
        return operands
    rest = dict(operands)
    ids = rest.pop("query_segment_ids")
    return rest | {"mask": (ids[:, :, None] == ids[:, None, :])[:, None]}


def _attend_tokamax(shape: Shape, operands: Operands) -> jax.Array:
    return load("tokamax").dot_product_attention(**_arguments(shape, operands), implementation="mosaic")


def _attend_mgpu(shape: Shape, operands: Operands) -> jax.Array:
    module = load("jax.experimental.pallas.ops.gpu.attention_mgpu")
    config = module.TuningConfig(
        block_q=64, block_kv=_MGPU_BLOCK_KV[shape.head_dim], max_concurrent_steps=2, causal=shape.is_causal
    )
    return module.attention(operands["query"], operands["key"], operands["value"], config)


def _mgpu_operands(shape: Shape, operands: Operands) -> Operands:
    """float16, the logits' scale in the query."""
    made = {name: x.astype(jnp.float16) for name, x in operands.items()}
    scaled = operands["query"].astype(jnp.float32) / math.sqrt(shape.head_dim)
    return made | {"query": scaled.astype(jnp.float16)}


def _mgpu_takes(shape: Shape, pass_: str) -> bool:
    dims = shape.value_dim == shape.head_dim and shape.head_dim in _MGPU_BLOCK_KV
    return pass_ == "fwd" and shape.kind in ("full", "causal") and dims


ATTENTION = {
    "ours": Impl(functools.partial(_attend, jaxsoftmax)),
    INVARIANT: Impl(invariant(functools.partial(_attend, jaxsoftmax))),
    "cudnn": Impl(functools.partial(_attend_jax, "cudnn"), _segments_as_mask),
    "mgpu": Impl(_attend_mgpu, _mgpu_operands, _mgpu_takes),
    "tokamax": Impl(_attend_tokamax, _segments_as_mask),
    "xla": Impl(functools.partial(_attend_jax, "xla"), _segments_as_mask, lambda x, _: x.value_dim == x.head_dim),
    **{
        f"{layout}_{size}": Impl(
            functools.partial(_attend_pages, layout), functools.partial(_in_pages, layout, size), _pages_take
        )
        for layout, size in itertools.product(("heads_first", "pages_first"), (16, 64, 128))
    },
}


def _of_tree(case: AttentionCase, impl: str, options: Options) -> dict[str, Program]:
    """The program of a tree's kernel, by the pass's name for it."""
    shape, is_backward = case.shape, case.pass_ == "bwd"
    if case.pass_ == "value_and_vjp":
        raise Declined("a tree is measured forward or backward, not both at once")
    tree, *replaced = impl.split(":")
    with imported(options.trees[tree]) as load:
        kernel = _decided(load, shape, is_backward, dict(map(_field, replaced)))
        forward = _decided(load, shape, False, {}) if is_backward else kernel
    if not is_backward:
        return {"fwd": Program(lambda *arrays: kernel(*arrays)[:1], lambda operands: _arrays(operands))}

    def residuals(operands: Operands) -> tuple[jax.Array, ...]:
        arrays = _arrays(operands)
        out, lse = forward(*arrays)
        return (*arrays, out, lse, operands["d_out"], jnp.zeros_like(lse))

    return {"direct": Program(lambda *arrays: kernel(*arrays)[:3], residuals)}


def _field(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        return name, ast.literal_eval(value)
    return name, value


@contextlib.contextmanager
def imported(tree: str) -> Iterator[Callable[[str], Any]]:
    """A function that imports modules of the tree's `pallas_kernels`, and of no other tree's."""
    loaded = lambda: [name for name in sys.modules if name.split(".")[0] == "pallas_kernels"]
    before = {name: sys.modules.pop(name) for name in loaded()}
    sys.path.insert(0, str(pathlib.Path(tree).resolve()))
    try:
        yield lambda name: importlib.import_module(f"pallas_kernels.{name}")
    finally:
        sys.path.pop(0)
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)


def _decided(load: Callable[[str], Any], shape: Shape, backward: bool, fields: Mapping[str, Any]) -> Callable[..., Any]:
    """The kernel that a tree decides for, with other fields of its config."""
    problems, dispatch, hardware = map(load, ("attention.problem", "attention.dispatch", "hardware"))
    decision = dispatch.decide(attention_cases.problem_of(problems, shape, backward), hardware.current())
    if decision.kernel is None:
        raise Declined(f"no kernel takes it: {dict(decision.declined)}")
    return dataclasses.replace(decision, config=dataclasses.replace(decision.config, **fields)).run


def _arrays(operands: Operands) -> tuple[jax.Array, ...]:
    extras = [operands["bias"]] if "bias" in operands else []
    extras += [operands["mask"].astype(jnp.int8)] if "mask" in operands else []
    extras += [operands["key_value_seq_lengths"]] if "key_value_seq_lengths" in operands else []
    segments = [operands["query_segment_ids"]] * 2 if "query_segment_ids" in operands else []
    return (operands["query"], operands["key"], operands["value"], *extras, *segments)
