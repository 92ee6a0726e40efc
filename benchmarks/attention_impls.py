"""The implementations of attention that are measured, and the programs in which each is timed."""

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxsoftmax
from benchmarks.attention_cases import Shape
from benchmarks.variants import Declined

Operands = Mapping[str, jax.Array]

# The widest tiles of keys of which two stages fit in shared memory, as in the module's own sweep.
_MGPU_BLOCK_KV = {64: 256, 128: 128, 256: 64}


class NotInstalled(Exception):
    """An implementation is missing on this machine."""


@dataclasses.dataclass(frozen=True)
class Impl:
    """`call(shape, operands)` is attention's output; `prepare` brings operands to its form, outside of what is timed.

    `check` says why a shape or pass is not for it.
    """

    call: Callable[[Shape, Operands], jax.Array]
    prepare: Callable[[Shape, Operands], Operands] = lambda shape, operands: operands
    check: Callable[[Shape, str], None] = lambda shape, pass_: None
    note: str = ""


def forward(impl: Impl, shape: Shape) -> Callable[[Operands], Any]:
    """Operands to `(out,)`."""
    return lambda operands: (impl.call(shape, operands),)


def value_and_vjp(impl: Impl, shape: Shape) -> Callable[[Operands], Any]:
    """Operands to `(out, d_query, d_key, d_value)`."""

    def program(operands: Operands) -> Any:
        out, pull = _vjp(impl, shape, operands)
        return (out, *pull(operands["d_out"].astype(out.dtype)))

    return program


def backward(impl: Impl, shape: Shape) -> tuple[Callable[[Operands], Any], Callable[[Any, jax.Array], Any]]:
    """Operands to residuals, and (residuals, `d_out`) to `(d_query, d_key, d_value)`; trace them in this order."""
    trees = []

    def residuals(operands: Operands) -> list[jax.Array]:
        _, pull = _vjp(impl, shape, operands)
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return leaves

    def gradients(leaves: list[jax.Array], d_out: jax.Array) -> Any:
        return tuple(jax.tree.unflatten(trees[-1], leaves)(d_out))

    return residuals, gradients


def _vjp(impl: Impl, shape: Shape, operands: Operands) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return impl.call(shape, {**operands, "query": query, "key": key, "value": value})

    return jax.vjp(call, operands["query"], operands["key"], operands["value"])


def _common(shape: Shape, operands: Operands) -> dict[str, Any]:
    window = (shape.span - 1, 0) if shape.kind == "window" else None
    given = {name: operands[name] for name in ("query", "key", "value", "bias", "mask") if name in operands}
    return given | {"is_causal": shape.is_causal, "local_window_size": window}


def _ours(shape: Shape, operands: Operands) -> jax.Array:
    # The kernels or an error: a fallback must not be timed as ours.
    implementation = "mosaic_gpu" if jax.default_backend() == "gpu" else None
    return jaxsoftmax.flash_attention(
        **_common(shape, operands), query_segment_ids=operands.get("segments"), implementation=implementation
    )


def _cudnn(shape: Shape, operands: Operands) -> jax.Array:
    arguments = _common(shape, operands)
    padding = shape.head_dim - shape.value_dim
    arguments["value"] = jnp.pad(arguments["value"], ((0, 0), (0, 0), (0, 0), (0, padding)))
    return jax.nn.dot_product_attention(**arguments, implementation="cudnn")[..., : shape.value_dim]


def _xla(shape: Shape, operands: Operands) -> jax.Array:
    if shape.value_dim != shape.head_dim:
        raise Declined("jax.nn: key and value differ in their head dimensions")
    return jax.nn.dot_product_attention(**_common(shape, operands), implementation="xla")


def _segments_as_mask(shape: Shape, operands: Operands) -> Operands:
    """Documents for those who know no segments: as a mask tensor."""
    if "segments" not in operands:
        return operands
    ids = operands["segments"]
    rest = {name: x for name, x in operands.items() if name != "segments"}
    return rest | {"mask": (ids[:, :, None] == ids[:, None, :])[:, None]}


def _tokamax(shape: Shape, operands: Operands) -> jax.Array:
    return _import("tokamax").dot_product_attention(**_common(shape, operands), implementation="mosaic")


def _mgpu(shape: Shape, operands: Operands) -> jax.Array:
    module = _import("jax.experimental.pallas.ops.gpu.attention_mgpu")
    config = module.TuningConfig(
        block_q=64, block_kv=_MGPU_BLOCK_KV[shape.head_dim], max_concurrent_steps=2, causal=shape.is_causal
    )
    return module.attention(operands["query"], operands["key"], operands["value"], config)


def _mgpu_operands(shape: Shape, operands: Operands) -> Operands:
    """float16, the logits' scale in the query."""
    made = {name: x.astype(jnp.float16) for name, x in operands.items()}
    scaled = operands["query"].astype(jnp.float32) / math.sqrt(shape.head_dim)
    return made | {"query": scaled.astype(jnp.float16)}


def _mgpu_takes(shape: Shape, pass_: str) -> None:
    if pass_ != "fwd":
        raise Declined("no causal backward; only its forward is measured")
    if (
        shape.kind not in ("full", "causal")
        or shape.value_dim != shape.head_dim
        or shape.head_dim not in _MGPU_BLOCK_KV
    ):
        raise Declined("only full and causal attention with equal head dimensions")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalled(str(error)) from error


IMPLS = {
    "ours": Impl(_ours),
    "cudnn": Impl(
        _cudnn, _segments_as_mask, note="documents as a mask tensor; values padded to the keys' head dimension"
    ),
    "mgpu": Impl(_mgpu, _mgpu_operands, _mgpu_takes, "float16; the scale multiplied into the query beforehand"),
    "tokamax": Impl(_tokamax, _segments_as_mask, note="heuristic configs; documents as a mask tensor"),
    "xla": Impl(_xla, _segments_as_mask, note="scores in memory"),
}
