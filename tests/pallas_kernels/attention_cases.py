"""Problems for the attention kernels, forward and backward: kinds of them, their operands, and the oracle's rules."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import aot
import attention_oracle
import documents
import jax
import jax.numpy as jnp
import mask_patterns
import numpy as np

from pallas_kernels import hardware
from pallas_kernels.attention import backward, backward_wide, dispatch, forward
from pallas_kernels.attention.problem import Attention, BackwardWideConfig, Op

QKV = ("query", "key", "value")
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal_offset": 0},
    "causal-later": {"causal_offset": 70},
    "causal-earlier": {"causal_offset": -70},
    "window": {"window": (100, 37), "window_offset": 20},
    "window-left": {"window": (31, None)},
    "window-nothing": {"window": (2, 2), "window_offset": -5000},
    "lengths": {"key_lengths": True, "query_lengths": True, "causal_offset": 0},
    "key-lengths": {"key_lengths": True},
    "segments": {"segments": True},
    "segments-causal": {"segments": True, "causal_offset": 0},
    "soft-cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True, "causal_offset": -3},
    "bias": {"bias": "BNTS"},
    "bias-of-heads": {"bias": "1N11"},
    "bias-of-rows": {"bias": "11T1", "scale": -0.3},
    "mask": {"mask": "B1TS"},
    "mask-of-keys": {"mask": "B11S", "causal_offset": 0},
    "mask-of-rows": {"mask": "11T1"},
    "everything": {
        "causal_offset": 100, "window": (300, None), "key_lengths": True, "query_lengths": True, "segments": True,
        "soft_cap": 5.0, "sinks": True, "mask": "B11S",
    },
    "mask-of-heads": {"mask": "BNTS"},
    "ends-segments": {"query_lengths": True, "causal_offset": 60, "align_ends": True, "segments": True, "mask": "111S"},
    "ends": {"key_lengths": True, "query_lengths": True, "causal_offset": 0, "align_ends": True},
    "ends-window": {"key_lengths": True, "window": (100, 37), "align_ends": True, "sinks": True},
    "positions": {"positions": True, "causal_offset": 0},
    "positions-window": {
        "positions": True, "window": (90, 40), "window_offset": 5, "segments": True, "key_lengths": True,
    },
}  # fmt: skip

Pairs = list[tuple[int, int]]
SEQUENCES: dict[str, Callable[[int, int], Pairs]] = {
    "some": lambda t, s: [(t, s * 3 // 4), (t * 2 // 3, 0 if t == 113 else s // 2)],
    "staggered": lambda t, s: [(t, s * 3 // 4), (t // 3, s // 2)],
    "extreme": lambda t, s: [(2**31 - 1, s), (t, 2**31 - 1), (0, s), (t, 0), (t, 1), (1, s), (t, s // 3), (t // 3, s)],
}


def problem_of(
    op: Op,
    kind: dict[str, Any],
    lengths: tuple[int, int],
    dims: tuple[int, int],
    dtype: str,
    heads: tuple[int, int],
    batch: int = 2,
) -> Attention:
    sizes = {"B": batch, "N": heads[0], "T": lengths[0], "S": lengths[1], "1": 1}
    shapes = {name: tuple(sizes[letter] for letter in kind[name]) for name in ("bias", "mask") if name in kind}
    given: dict[str, Any] = {"scale": dims[0] ** -0.5} | kind | shapes
    if "bias" in kind:
        given.setdefault("bias_dtype", jnp.dtype("float32" if op is Op.FORWARD else dtype))
    return Attention(op, batch, *heads, *lengths, *dims, jnp.dtype(dtype), **given)


def shared_bytes(p: Attention, config: Any) -> int:
    """What the kernel of that config takes of a CTA's shared memory."""
    if p.op is Op.FORWARD:
        return forward.shared_bytes(p, config)
    kernel = backward_wide if isinstance(config, BackwardWideConfig) else backward
    return kernel.shared_bytes(p, config)


def name_of(p: Attention) -> str:
    default = Attention(p.op, 0, 0, 0, 0, 0, 0, 0, jnp.dtype("bfloat16"))
    rest = [f.name for f in dataclasses.fields(p)[9:] if getattr(p, f.name) != getattr(default, f.name)]
    return f"{p.query_length}-{p.key_length}-{p.head_dim}-{p.value_dim}-{p.dtype.name}-" + "-".join(rest)


def operands_of(
    p: Attention, ids: str = "few", mask: str = "scattered", sequences: str | None = None
) -> dict[str, Any]:
    """Random operands; what lies past the keys' lengths is NaN.

    `ids` of the segments is one of `documents.PATTERNS`, `mask` one of `mask_patterns.PATTERNS`, `sequences` one of
    `SEQUENCES`.
    """
    rng = np.random.default_rng(0)
    b, t, s, n = p.batch, p.query_length, p.key_length, p.query_heads
    shapes = (b, t, n, p.head_dim), (b, s, p.key_heads, p.head_dim), (b, s, p.key_heads, p.value_dim)
    arrays: dict[str, Any] = {
        x: rng.standard_normal(shape).astype(p.dtype) for x, shape in zip(QKV, shapes, strict=True)
    }
    if p.bias:
        arrays["bias"] = rng.standard_normal(p.bias).astype(p.bias_dtype)
    if p.mask:
        arrays["mask"] = mask_patterns.PATTERNS[mask](rng, p.mask).astype(np.int8)
    pairs = SEQUENCES[sequences or ("staggered" if p.align_ends else "some")](t, s)[:b]
    queries, keys = np.array(pairs, np.int32).T
    if p.query_lengths:
        arrays["query_lengths"] = queries
    if p.key_lengths:
        arrays["key_lengths"] = keys
        past = np.arange(s) >= arrays["key_lengths"][:, None]
        arrays["key"][past], arrays["value"][past] = np.nan, np.nan
    if p.segments:
        arrays["query_segments"], arrays["key_segments"] = documents.PATTERNS[ids](rng, b, t, s)
    if p.positions:
        # The queries are a piece of the sequence, and the keys pieces that two devices have.
        pieces = np.concatenate([np.arange(s)[: s // 4], np.arange(s)[s // 2 :], np.arange(s)[s // 4 : s // 2]])
        arrays["query_positions"] = np.tile(np.arange(t, dtype=np.int32) + s // 3, (b, 1))
        arrays["key_positions"] = np.stack([np.roll(pieces, 10 * i) for i in range(b)]).astype(np.int32)
    if p.sinks:
        arrays["sinks"] = rng.standard_normal(n).astype(np.float32)
    return arrays


def abstract(p: Attention) -> list[jax.ShapeDtypeStruct]:
    """The shapes of all operands."""
    b, t, s, n, k = p.batch, p.query_length, p.key_length, p.query_heads, p.key_heads
    shapes = [((b, t, n, p.head_dim), p.dtype), ((b, s, k, p.head_dim), p.dtype), ((b, s, k, p.value_dim), p.dtype)]
    shapes += [(p.bias, p.bias_dtype)] * bool(p.bias) + [(p.mask, "int8")] * bool(p.mask)
    shapes += [((b,), "int32")] * (p.query_lengths + p.key_lengths)
    shapes += [((b, t), "int32"), ((b, s), "int32")] * (p.segments + p.positions) + [((n,), "float32")] * p.sinks
    if p.op is Op.BACKWARD:
        shapes += [((b, t, n, p.value_dim), p.dtype), ((b, n, t), "float32")] * 2
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@functools.cache
def _reports(p: Attention, config: Any) -> tuple[aot.Report, ...]:
    return aot.compile_for_h200(dispatch.decide(p, hardware.H200, config=config).run, *abstract(p))


def compiled(p: Attention, config: Any = None) -> aot.Report:
    """The kernel of `p` with this config, or the heuristic's, compiled for an H200; not what merges its splits."""
    return _reports(p, config)[0]


def check_compiled(p: Attention, config: Any = None, may_spill: int = 0) -> aot.Report:
    """Compiles the kernel and checks what ptxas says of it, also when it assembles it for a linker, as JAX 0.12 does.

    A thread spills at most `may_spill` bytes. C7519 only says that a fence was added before a product. The launch asks
    for as much shared memory as the kernel's config was chosen for.
    """
    report = compiled(p, config)
    assert report.smem == shared_bytes(p, config or dispatch.decide(p, hardware.H200).config)
    check_report(report, may_spill)
    for merge in _reports(p, config)[1:]:
        check_report(merge)
    return report


def check_report(report: aot.Report, may_spill: int = 0) -> None:
    """Checks what ptxas says of a kernel."""
    for assembled in (report, report.relocatable):
        assert assembled.spill_bytes <= may_spill, assembled
        assert assembled.spill_bytes or not assembled.stack_bytes, assembled
        assert not [line for line in assembled.complaints if "C7519" not in line], assembled
        assert assembled.registers * assembled.threads <= 65536, assembled
    assert not report.shares_scratch, "warpgroups reduce through the same shared memory"
    assert report.smem <= hardware.H200.smem_per_cta


def counts_of(p: Attention, arrays: dict[str, Any]) -> np.ndarray:
    """How many queries and keys there are, `[B, 2]`."""
    sizes = {"query_lengths": p.query_length, "key_lengths": p.key_length}
    return np.stack([np.broadcast_to(np.minimum(arrays.get(x, n), n), p.batch) for x, n in sizes.items()], 1)


def rules_of(p: Attention, arrays: dict[str, Any]) -> dict[str, Any]:
    """What the oracle is told."""
    i, j = np.arange(p.query_length)[:, None], np.arange(p.key_length)[None, :]
    if p.align_ends:
        i = i + np.diff(counts_of(p, arrays))[..., None, None]
    if p.positions:
        i, j = arrays["query_positions"][:, None, :, None], arrays["key_positions"][:, None, None, :]
    mask = arrays["mask"] != 0 if p.mask else np.ones((p.query_length, p.key_length), bool)
    before, after = p.window
    for offset, side in ((p.causal_offset, 0), (p.window_offset, after)):
        if offset is not None and side is not None:
            mask = mask & (j <= i + offset + side)
    if before is not None:
        mask = mask & (j >= i + p.window_offset - before)
    return {
        "mask": mask,
        "query_seq_lengths": arrays.get("query_lengths"),
        "key_value_seq_lengths": arrays.get("key_lengths"),
        "query_segment_ids": arrays.get("query_segments"),
        "key_value_segment_ids": arrays.get("key_segments"),
        "scale": p.scale,
        "logits_soft_cap": p.soft_cap,
        "sinks": arrays.get("sinks"),
    }


def seen_of(p: Attention, arrays: dict[str, Any]) -> np.ndarray:
    """Which queries see which keys, `[B, N, T, S]`."""
    rules = rules_of(p, arrays)
    others = {name: x for name, x in rules.items() if name not in ("scale", "logits_soft_cap", "sinks")}
    return attention_oracle.visible((p.batch, p.query_heads, p.query_length, p.key_length), **others)
