"""Attention's kernels as several source trees have them, and with other configs: implementations that `--tree` adds.

`--tree=before=../before --impl=before,now,now:stages=1:scheduler=dynamic` measures three: a tree as it is, this one,
and this one with other knobs. What is timed is the kernel with XLA's share before and after it, and of a backward pass
that from the residuals of a forward pass of the same tree.
"""

import ast
import contextlib
import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention_cases import AttentionCase, Shape
from benchmarks.impls import Declined, Options, Program

HERE = {"now": "."}


def is_tree(impl: str, trees: Mapping[str, str]) -> bool:
    """Whether an implementation is a tree, as it is or with other knobs."""
    return impl.partition(":")[0] in trees


def names(case: AttentionCase, impl: str) -> tuple[str, ...]:
    """The name of the program of a pass."""
    return ("direct",) if case.pass_ == "bwd" else (case.pass_,)


def programs(case: AttentionCase, impl: str, options: Options) -> dict[str, Program]:
    """The program of a tree's kernel, by the pass's name for it."""
    shape, pass_ = case.shape, case.pass_
    if pass_ == "value_and_vjp":
        raise Declined("a tree is measured forward or backward, not both at once")
    tree, *knobs = impl.split(":")
    changed = {name: _value(value) for name, _, value in (knob.partition("=") for knob in knobs)}
    (name,) = names(case, impl)
    with imported(options.trees[tree]) as load:
        kernel = _decided(load, shape, pass_ == "bwd", changed)
        forward = _decided(load, shape, False, {}) if pass_ == "bwd" else kernel
    if pass_ == "fwd":
        return {name: Program(lambda *arrays: kernel(*arrays)[:1], lambda operands: _arrays(shape, operands))}

    def residuals(operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        arrays = _arrays(shape, operands)
        out, lse = forward(*arrays)
        return (*arrays, out, lse, operands["d_out"], jnp.zeros_like(lse))

    return {name: Program(lambda *arrays: kernel(*arrays)[:3], residuals)}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


@contextlib.contextmanager
def imported(tree: str) -> Iterator[Callable[[str], Any]]:
    """A function that imports modules of the tree's `pallas_kernels`, and of no other tree's."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "pallas_kernels"}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(pathlib.Path(tree).resolve()))
    try:
        yield lambda name: importlib.import_module(f"pallas_kernels.{name}")
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.split(".")[0] == "pallas_kernels"]:
            del sys.modules[name]
        sys.modules.update(before)


def _decided(load: Callable[[str], Any], shape: Shape, backward: bool, knobs: Mapping[str, Any]) -> Callable[..., Any]:
    """The kernel that a tree decides for, with other knobs."""
    problems, dispatch, hardware = map(load, ("attention.problem", "attention.dispatch", "hardware"))
    facts: dict[str, Any] = {"causal_offset": 0} if shape.is_causal else {}
    if shape.kind == "window":
        facts["window"] = (shape.span - 1, None)
    if shape.kind == "documents":
        facts["segments"] = True
    if "mask" in shape.kind:
        facts["mask"] = (shape.batch, 1, shape.query_length, shape.length)
    if shape.kind == "bias":
        bias = {"bias": (1, shape.heads, shape.query_length, shape.length), "bias_dtype": jnp.dtype(shape.dtype)}
        facts |= bias | {"bias_gradient": backward}
    sizes = shape.batch, shape.heads, shape.key_heads, shape.query_length, shape.length, shape.head_dim, shape.value_dim
    op = problems.Op.BACKWARD if backward else problems.Op.FORWARD
    problem = problems.Attention(op, *sizes, jnp.dtype(shape.dtype), scale=shape.head_dim**-0.5, **facts)
    decision = dispatch.decide(problem, hardware.current())
    if decision.kernel is None:
        raise Declined(f"no kernel takes it: {dict(decision.declined)}")
    return dataclasses.replace(decision, config=dataclasses.replace(decision.config, **knobs)).run


def _arrays(shape: Shape, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """The operands in the kernels' order."""
    extras = [operands["bias"]] if "bias" in operands else []
    extras += [operands["mask"].astype(jnp.int8)] if "mask" in operands else []
    segments = [operands["segments"]] * 2 if "segments" in operands else []
    return (operands["query"], operands["key"], operands["value"], *extras, *segments)
