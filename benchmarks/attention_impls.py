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
from benchmarks.variants import INVARIANT, Declined, NotInstalled, Program, invariant

Operands = Mapping[str, jax.Array]

PROGRAMS = {"fwd": ("fwd",), "bwd": ("fwd", "value_and_vjp"), "value_and_vjp": ("value_and_vjp",)}

# The widest tiles of keys of which two stages fit in shared memory, as in the module's own sweep.
_MGPU_BLOCK_KV = {64: 256, 128: 128, 256: 64}


@dataclasses.dataclass(frozen=True)
class Impl:
    """`call(shape, operands)` is attention's output; `prepare` brings operands to its form, outside of what is timed.

    `check` says why a shape or pass is not for it.
    """

    call: Callable[[Shape, Operands], jax.Array]
    prepare: Callable[[Shape, Operands], Operands] | None = None
    check: Callable[[Shape, str], None] = lambda shape, pass_: None
    note: str = ""


def programs(shape: Shape, pass_: str, name: str) -> dict[str, Program]:
    """The programs in which a pass of an implementation is timed; each takes the operands by name.

    "direct" is a backward pass from the residuals of a forward pass.

    Raises:
      Declined: the implementation does not take the call.
    """
    impl = IMPLS[name]
    impl.check(shape, pass_)
    prepared = lambda operands: impl.prepare(shape, operands) if impl.prepare else operands

    def call(operands: Operands) -> jax.Array:
        try:
            return impl.call(shape, operands)
        except NotImplementedError as reason:
            raise Declined(" ".join(str(reason).split())[:300]) from reason

    def vjp(operands: Operands) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
        attend = lambda query, key, value: call({**operands, "query": query, "key": key, "value": value})
        return jax.vjp(attend, operands["query"], operands["key"], operands["value"])

    def value_and_vjp(operands: Operands) -> Any:
        out, pull = vjp(operands)
        return (out, *pull(operands["d_out"].astype(out.dtype)))

    prepare = (lambda operands: (prepared(operands),)) if impl.prepare else None
    found = {
        "fwd": Program(lambda operands: (call(operands),), prepare),
        "value_and_vjp": Program(value_and_vjp, prepare),
        "direct": Program(
            lambda pull, d_out: pull(d_out), lambda operands: (vjp(prepared(operands))[1], operands["d_out"])
        ),
    }
    return {program: found[program] for program in names(pass_, name)}


def names(pass_: str, name: str) -> tuple[str, ...]:
    """The names of the programs of a pass."""
    return PROGRAMS[pass_] + (("direct",) if pass_ == "bwd" and name == "ours" else ())


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
    INVARIANT: Impl(lambda shape, operands: invariant(_ours)(shape, operands)),
    "cudnn": Impl(
        _cudnn, _segments_as_mask, note="documents as a mask tensor; values padded to the keys' head dimension"
    ),
    "mgpu": Impl(_mgpu, _mgpu_operands, _mgpu_takes, "float16; the scale multiplied into the query beforehand"),
    "tokamax": Impl(_tokamax, _segments_as_mask, note="heuristic configs; documents as a mask tensor"),
    "xla": Impl(_xla, _segments_as_mask, note="scores in memory"),
}
