"""What runs attention on each kind of GPU: a kernel, cuDNN, XLA with all logits, or XLA tile by tile."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxsoftmax
from pallas_kernels import hardware
from pallas_kernels.hardware import Device

GIB = 2**30
DEVICES = {
    "T4": Device("NVIDIA T4", "7.5", 40, 64 * 1024, 11 * GIB),
    "A100": Device("NVIDIA A100-SXM4-80GB", "8.0", 108, 163 * 1024, 60 * GIB),
    "L40": Device("NVIDIA L40", "8.9", 142, 99 * 1024, 36 * GIB),
    "H200": hardware.H200,
    "B200": Device("NVIDIA B200", "10.0", 148, 227 * 1024, 135 * GIB),
}
NUMBER, PAIR = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
LENGTHS, IDS = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2,), (2, 1023)))
ENDS = {"causal_alignment": "bottom_right", "query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}


def shapes(dtype: str = "bfloat16", batch: int = 2, length: int = 1024, heads: int = 8, dim: int = 64) -> list[Any]:
    of = lambda n: jax.ShapeDtypeStruct((batch, length, n, dim), dtype)
    return [of(heads), of(max(heads // 4, 1)), of(max(heads // 4, 1))]


def few_of_many() -> list[Any]:
    of = lambda length, heads: jax.ShapeDtypeStruct((1, length, heads, 64), "bfloat16")
    return [of(4, 8), of(4096, 2), of(4096, 2)]


def one_key() -> list[Any]:
    return [jax.ShapeDtypeStruct((2, n, 4, 64), "bfloat16") for n in (3, 1, 1)]


def table(**arrays: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, 1, 1024, 1024), arrays.get("dtype", bool))


# For T4, A100, L40, H200 and B200: K a kernel, C cuDNN, X XLA with all logits, T XLA tile by tile, E an error.
CALLS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "causal": ("XCCKC", shapes(), {"is_causal": True}),
    "causal's gradient": ("XCCKC", shapes(), {"is_causal": True, "op": "vjp"}),
    "float16, window": ("XCCKC", shapes("float16"), {"is_causal": True, "local_window_size": (100, 0)}),
    "symmetric window": ("XCCKC", shapes(), {"local_window_size": 100}),
    "lengths": ("XCCKC", shapes(), {"key_value_seq_lengths": LENGTHS, "op": "vjp"}),
    **{
        f"lengths, at the ends, {name}, {op}": ("XCCKC", shapes(), ENDS | rules | {"op": op})
        for name, rules in (("causal", {"is_causal": True}), ("window", {"local_window_size": (3, 0)}))
        for op in ("forward", "vjp")
    },
    "one key": ("XXXXX", one_key(), {}),
    "one key, a kernel by name": ("EEEKE", one_key(), {"implementation": "mosaic_gpu"}),
    "mask": ("XCCKC", shapes(), {"mask": table(), "op": "vjp"}),
    "segments of odd lengths": ("XXXKX", shapes(length=1023), {"query_segment_ids": IDS, "op": "vjp"}),
    "bias": ("XCCKC", shapes(), {"bias": table(dtype=jnp.bfloat16)}),
    "bias in float32": ("XXXKX", shapes(), {"bias": table(dtype=jnp.float32)}),
    "sinks": ("XCCKC", shapes(), {"sinks": jax.ShapeDtypeStruct((8,), jnp.float32), "op": "vjp"}),
    "few queries, many keys": ("XXXKX", few_of_many(), {}),
    "soft cap": ("XXXKX", shapes(), {"logits_soft_cap": 30.0}),
    "causal as data": ("XCCKC", shapes(), {"is_causal": jax.ShapeDtypeStruct((), bool), "op": "vjp"}),
    "window as data": ("XXXXX", shapes(), {"local_window_size": PAIR, "op": "vjp"}),
    "window as data, long": ("TTTTT", shapes(length=65536, heads=16), {"local_window_size": PAIR}),
    "soft cap as data": ("XXXXX", shapes(), {"logits_soft_cap": NUMBER, "op": "vjp"}),
    "a kernel by name, soft cap as data": (
        *("EEEEE", shapes()), {"logits_soft_cap": NUMBER, "implementation": "mosaic_gpu"},
    ),
    "gradients that repeat": ("XXXKX", shapes(), {"deterministic_gradients": True, "op": "vjp"}),
    "gradient of the logsumexp": ("XXXKX", shapes(), {"return_residual": True, "op": "vjp"}),
    "heads of 128": ("XCCKC", shapes(dim=128), {}),
    "heads of 192": ("XXXKC", shapes(dim=192), {}),
    "heads of 512": ("XXXXX", shapes(dim=512), {}),
    "float32": ("XXXXX", shapes("float32"), {"is_causal": True, "op": "vjp"}),
    "float32, long": ("TTTTT", shapes("float32", length=65536), {"is_causal": True}),
    "float32, of a size": ("TXTXX", shapes("float32", length=8192), {}),
    "forward mode": ("XXXXX", shapes(), {"op": "jvp"}),
    "XLA by name": ("XXXXX", shapes(), {"implementation": "xla"}),
    "a kernel by name": ("EEEKE", shapes(), {"implementation": "mosaic_gpu"}),
}  # fmt: skip


def rung(found: jaxsoftmax.Explanation) -> str:
    if found.implementation != "xla":
        return {"mosaic_gpu": "K", "cudnn": "C", "error": "E"}[found.implementation]
    (held,) = [note for note in found.notes if note.startswith("XLA holds")]
    return "X" if held == "XLA holds all logits at a time" else "T"


@pytest.mark.parametrize("name", CALLS)
def test_explain_names_what_runs(name: str) -> None:
    want, operands, options = CALLS[name]
    found = [jaxsoftmax.explain_attention(*operands, **options, device=device) for device in DEVICES.values()]
    assert "".join(map(rung, found)) == want
    for device, x in zip(DEVICES, found, strict=True):
        assert x.reason
        before = {"K": 0, "C": 1}.get(rung(x), 0 if options.get("implementation") == "xla" else 1)
        assert len(x.declined) >= before or options.get("op") == "jvp", (device, x.declined)


def lowered(function: Any, operands: list[Any]) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("device", ["T4", "A100", "B200"])
def test_what_is_lowered_is_what_is_explained(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "present", lambda: DEVICES[device])
    jax.clear_caches()
    operands = shapes(length=128)
    loss = lambda q, k, v, **rest: jaxsoftmax.flash_attention(q, k, v, is_causal=True, **rest).astype(jnp.float32).sum()
    text = lowered(jax.grad(loss, (0, 1, 2)), operands)
    has = device != "T4"
    assert ("__cudnn$fmhaSoftmax(" in text, "__cudnn$fmhaSoftmaxBackward(" in text) == (has, has)
    assert ("dot_general" in text) != has
    assert "mosaic_gpu" not in text
    with_lse = lambda q, k, v: jaxsoftmax.flash_attention(q, k, v, return_residual=True)[1].sum()
    assert "fmhaSoftmaxBackward" not in lowered(jax.grad(with_lse), operands)
    with pytest.raises(NotImplementedError, match="no kernel takes this call"):
        lowered(lambda *x: loss(*x, implementation="mosaic_gpu"), operands)
    jax.clear_caches()


def test_a_bound_of_memory_makes_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = shapes("float32", length=2048)
    # Two arrays of the logits of two sequences and 8 heads.
    whole = 2 * 2 * 8 * 2048 * 2048 * 4
    for most, loops in ((whole, 0), (whole - 1, 1), (whole // 4, 1), (whole // 64, 2)):
        with jaxsoftmax.logits_memory(most):
            text = lowered(jaxsoftmax.flash_attention, operands)
            assert text.count("stablehlo.while") == loops, most
    with pytest.raises(TypeError, match=r"logits_memory: most is 1\.0, expected a number of bytes"):
        jaxsoftmax.logits_memory(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logits_memory: most is -1, expected"):
        jaxsoftmax.logits_memory(-1)


def test_dropout_on_hopper_is_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0), "broadcast_dropout": False}
    loss = lambda q, k, v: jaxsoftmax.flash_attention(q, k, v, **dropout).astype(jnp.float32).sum()
    text = lowered(loss, shapes(length=1024))
    assert text.count("custom_call @mosaic_gpu_v2") == 2
    assert "mosaic_gpu_v2" not in lowered(loss, shapes(length=64))
    assert "dot_general" not in text
