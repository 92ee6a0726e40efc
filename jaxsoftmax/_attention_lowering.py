"""From primitive to program: the chunked reference on every platform, and on CUDA the kernel that `dispatch` picks."""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.attention import reference
from pallas_kernels.attention.operands import RANK, Operands, Rules


class Part(enum.StrEnum):
    """The parts of an attention call, and the primitives that stand for them."""

    FORWARD = "flash_attention"
    TANGENT = "flash_attention_tangent"
    GRADIENTS = "flash_attention_gradients"


def named(names: Sequence[str], arrays: Sequence[jax.Array]) -> Operands:
    """The operands of a primitive by name."""
    return Operands(**dict(zip(names, arrays, strict=True)))


def _forward(*arrays: jax.Array, names: tuple[str, ...], rules: Rules) -> Any:
    return reference.forward(named(names, arrays), rules)


def _tangent(*arrays: jax.Array, names: tuple[str, ...], rules: Rules, moving: tuple[str, ...]) -> Any:
    count = len(names)
    tangents = dict(zip(moving, arrays[count + 2 :], strict=True))
    return reference.tangent(named(names, arrays[:count]), rules, *arrays[count : count + 2], tangents)


def _gradients(
    *arrays: jax.Array,
    names: tuple[str, ...],
    rules: Rules,
    wrt: tuple[str, ...],
    kept: tuple[tuple[int, ...], ...],
) -> Any:
    count = len(names)
    operands = named(names, arrays[:count])
    shapes = gradient_shapes(operands, arrays[-2].shape[:-3], wrt, kept)
    return reference.backward(operands, rules, *arrays[count:], shapes=shapes)


def gradient_shapes(
    operands: Operands, full: Sequence[int], wrt: Sequence[str], kept: Sequence[tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of gradients that are summed along the leading axes that are not kept."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, axes in zip(wrt, kept, strict=True):
        x = getattr(operands, name)
        lead = tuple(n if d in axes else 1 for d, n in enumerate(full))
        shapes[name] = (*lead, *x.shape[x.ndim - RANK[name] :])
    return shapes


REFERENCE: dict[Part, Callable[..., Any]] = {
    Part.FORWARD: _forward,
    Part.TANGENT: _tangent,
    Part.GRADIENTS: _gradients,
}


def register(primitive: Primitive, part: Part) -> None:
    """Registers the lowerings of a primitive."""
    mlir.register_lowering(primitive, functools.partial(reference_rule, part))


def reference_rule(
    part: Part, ctx: mlir.LoweringRuleContext, *operands: Any, implementation: str | None, **params: Any
) -> Any:
    """Lowers to plain XLA operations."""
    avals: Sequence[Any] = ctx.avals_in
    run = functools.partial(REFERENCE[part], **params)
    # Lowering runs outside the caller's enable_x64 context, which float64 operands need.
    with jax.enable_x64(jax.config.jax_enable_x64 or any(aval.dtype.itemsize == 8 for aval in avals)):
        return mlir.lower_fun(lambda *xs: list(run(*xs)))(ctx, *operands)
