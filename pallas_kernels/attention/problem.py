"""What an attention kernel is asked to do: static facts only, so that deciding needs no array and no device.

Operands, in this order, those that a problem lacks left out:

    query [B, T, N, H], key [B, S, K, H], value [B, S, K, D]
    bias [B|1, N|1, T|1, S|1]                     added to the scaled, capped logits
    mask [B|1, N|1, T|1, S|1] int8                nonzero: takes part
    query_lengths [B] int32, key_lengths [B] int32
    query_segments [B, T] int32, key_segments [B, S] int32
    sinks [N] float32                             a logit per query head that joins the denominator only

FORWARD returns `out [B, T, N, D]` in the operands' dtype and `lse [B, N, T]` in float32 (natural logarithm, sinks
included; -inf for rows without a key, whatever their sink). BACKWARD takes, after those, `out`, `lse`, `d_out` and
`d_lse`, and returns `d_query, d_key, d_value` in the operands' dtype, then `d_bias` in the bias's, of its shape, if the
problem asks for it, and `d_sinks` where the problem has sinks. Queries, keys, values and `d_out` beyond their lengths
may be NaN, and so may `d_out` and `d_lse` in rows without a key: none of it counts.
"""

import dataclasses
import enum

import jax.numpy as jnp


class Op(enum.StrEnum):
    """The operations that have kernels."""

    FORWARD = "attention"
    BACKWARD = "attention_gradients"


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call. Head n of the query reads head `n // (query_heads // key_heads)` of key and value.

    Query i (counted from 0) sees key j if `j <= i + causal_offset` (None: all), and if
    `i + window_offset - window[0] <= j <= i + window_offset + window[1]` (None for a side: unbounded). With
    `align_ends` both offsets grow by each sequence's count of keys less its count of queries.
    """

    op: Op
    batch: int
    query_heads: int
    key_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    dtype: jnp.dtype
    scale: float = 1.0
    soft_cap: float | None = None
    causal_offset: int | None = None
    window: tuple[int | None, int | None] = (None, None)
    window_offset: int = 0
    align_ends: bool = False
    bias: tuple[int, int, int, int] | None = None  # its shape
    bias_dtype: jnp.dtype | None = None
    bias_gradient: bool = False  # whether BACKWARD returns `d_bias`
    mask: tuple[int, int, int, int] | None = None  # its shape
    query_lengths: bool = False
    key_lengths: bool = False
    segments: bool = False
    sinks: bool = False
    deterministic: bool = False  # whether the gradients come out the same, bit by bit, every time
    batch_invariant: bool = False  # whether what is chosen for FORWARD may depend on neither batch nor lengths

    @property
    def has_data_mask(self) -> bool:
        """Whether which tiles are passed over is known on the device alone."""
        return self.segments or self.mask is not None

    @property
    def bias_is_tiled(self) -> bool:
        """Whether the bias is whole tiles of 8 rows and 128 bytes, none of them repeated, which TMA can copy."""
        if self.bias is None or self.bias_dtype is None:
            return False
        return self.bias[2] % 8 == 0 and self.bias[3] * self.bias_dtype.itemsize % 128 == 0


def operand_names(problem: Attention) -> tuple[str, ...]:
    """The operands that the problem has, in their order."""
    lengths = [name for name in ("query_lengths", "key_lengths") if getattr(problem, name)]
    ids = ["query_segments", "key_segments"] * problem.segments
    optional = [name for name in ("bias", "mask") if getattr(problem, name) is not None]
    return ("query", "key", "value", *optional, *lengths, *ids, *["sinks"] * problem.sinks)


DTYPES = ("float16", "bfloat16")


def unsupported_reason(problem: Attention, *, widest: int) -> str | None:
    """Why a kernel for heads up to `widest` does not take the problem, whichever it is."""
    if problem.dtype.name not in DTYPES:
        return f"kernels take {' and '.join(DTYPES)}; the operands are {problem.dtype.name}"
    for name in ("head_dim", "value_dim"):
        size = getattr(problem, name)
        if not 0 < size <= widest or size % 8:
            return f"the kernel takes {name} up to {widest} in multiples of 8; it is {size}"
    if 0 in (problem.batch, problem.query_heads, problem.query_length, problem.key_length):
        return "there is nothing to do"
    return None
