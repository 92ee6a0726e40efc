"""Describes an attention call: its operands, its static rules, the problem for a kernel, and the kernels' configs.

A problem has static facts only, so that deciding needs no array and no device. A kernel has these operands, in this
order, without those that the problem lacks:

    query [B, T, N, H], key [B, S, K, H], value [B, S, K, D]
    bias [B|1, N|1, T|1, S|1]                     added to the scaled, capped logits
    mask [B|1, N|1, T|1, S|1] int8                nonzero: takes part
    query_lengths [B] int32, key_lengths [B] int32
    query_segments [B, T] int32, key_segments [B, S] int32
    query_positions [B, T] int32, key_positions [B, S] int32
    window_sizes [2] int32                        a window's widths, before and after a query's position
    sinks [N] float32                             a logit per query head that joins the denominator only
    block_tables [B, entries] int32               the pages of each sequence's keys and values, in order

Keys and values in pages are [K, pages, page size, H] or [pages, page size, K, H]. The problem's `key_length` is what a
table has room for, and a page that does not exist is read as zeros.

FORWARD returns `out [B, T, N, D]` in the operands' dtype and `lse [B, N, T]` in float32 (natural logarithm, sinks
included; -inf for rows without a key, whatever their sink). BACKWARD takes, after those, `out`, `lse`, `d_out` and
`d_lse`, and returns `d_query, d_key, d_value` in the operands' dtype, then `d_bias` in the bias's, of its shape, if the
problem asks for it, and `d_sinks` where the problem has sinks. Queries, keys, values and `d_out` beyond their lengths
may be NaN, and so may `d_out` and `d_lse` in rows without a key: none of it counts.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.hardware import WARPGROUP_ROWS

UNBOUNDED = 2**30  # the widths of a window from which on it has no bound


class Operand(NamedTuple):
    """An operand, or a result, by the axes that follow its leading ones.

    They are queries `t`, keys `s`, heads of the query `n` and of the key `k`, and the dimensions of a head of query and
    key `h`, and of value and output `d`.
    """

    axes: str
    is_differentiable: bool = False
    broadcasts: bool = False  # whether a kernel takes extents of 1 for any
    has_batch: bool = True  # whether a kernel takes one for each element of the batch
    dtype: DTypeLike | None = None  # a kernel's; None for the operand's own
    problem_field: str | None = None  # of `Attention`
    field_is_shape: bool = False  # whether that field is its shape; otherwise whether it is there
    gradient_on_request: bool = False  # whether a kernel gives its gradient only where that is asked for
    in_kernels: bool = False  # whether this package's kernels read it; they refuse what they do not
    argument: str | None = None  # what `jaxsoftmax.flash_attention` calls it; None for the operand's own name

    @property
    def query_axis(self) -> int | None:
        """The axis of queries, from the end."""
        return self._from_end("t")

    @property
    def key_axis(self) -> int | None:
        """The axis of keys, from the end."""
        return self._from_end("s")

    @property
    def head_axis(self) -> int | None:
        """The axis of heads, from the end."""
        return self._from_end("k" if "k" in self.axes else "n")

    @property
    def is_padded(self) -> bool:
        """Says whether the last axis is the dimension of a head, of which kernels want multiples."""
        return self.axes.endswith(("h", "d"))

    def _from_end(self, axis: str) -> int | None:
        return self.axes.index(axis) - len(self.axes) if axis in self.axes else None


_QUERY = Operand("tnh", is_differentiable=True, in_kernels=True)
_KEY = Operand("skh", is_differentiable=True, in_kernels=True)
_PAIRS = Operand("nts", broadcasts=True, field_is_shape=True)
_BIAS = _PAIRS._replace(is_differentiable=True, problem_field="bias", gradient_on_request=True, in_kernels=True)
_MASK = _PAIRS._replace(dtype=jnp.int8, problem_field="mask", in_kernels=True)
_KEEP = _PAIRS._replace(dtype=jnp.int8, problem_field="keep")
_QUERY_LENGTHS = Operand("", problem_field="query_lengths", argument="query_seq_lengths", in_kernels=True)
_KEY_LENGTHS = Operand("", problem_field="key_lengths", argument="key_value_seq_lengths", in_kernels=True)
_QUERY_SEGMENTS = Operand("t", problem_field="segments", argument="query_segment_ids", in_kernels=True)
_KEY_SEGMENTS = Operand("s", problem_field="segments", argument="key_value_segment_ids", in_kernels=True)
_QUERY_POSITIONS = Operand("t", problem_field="positions", in_kernels=True)
_KEY_POSITIONS = Operand("s", problem_field="positions", argument="key_value_positions", in_kernels=True)
_WINDOW_SIZES = Operand(
    "2", broadcasts=True, has_batch=False, problem_field="window_sizes", argument="local_window_size"
)
_CAP = Operand(
    "", is_differentiable=True, broadcasts=True, has_batch=False, problem_field="cap", argument="logits_soft_cap"
)
_SINKS = Operand("n", is_differentiable=True, broadcasts=True, has_batch=False, problem_field="sinks", in_kernels=True)


class Operands(NamedTuple):
    """The operands in the kernels' order, those that a call lacks None; the annotations say what each is.

    Here every operand may have any number of leading dimensions in place of the batch, the same number for all. They
    broadcast against each other: an extent of 1 is read again and again, never copied.
    """

    query: Annotated[Any, _QUERY]
    key: Annotated[Any, _KEY]
    value: Annotated[Any, _KEY._replace(axes="skd")]
    bias: Annotated[Any, _BIAS] = None
    mask: Annotated[Any, _MASK] = None
    query_lengths: Annotated[Any, _QUERY_LENGTHS] = None
    key_lengths: Annotated[Any, _KEY_LENGTHS] = None
    query_segments: Annotated[Any, _QUERY_SEGMENTS] = None
    key_segments: Annotated[Any, _KEY_SEGMENTS] = None
    query_positions: Annotated[Any, _QUERY_POSITIONS] = None
    key_positions: Annotated[Any, _KEY_POSITIONS] = None
    window_sizes: Annotated[Any, _WINDOW_SIZES] = None
    cap: Annotated[Any, _CAP] = None
    sinks: Annotated[Any, _SINKS] = None
    keep: Annotated[Any, _KEEP] = None  # the weights that dropout keeps; their sum stays that of all

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name, x in zip(self._fields, self, strict=True) if x is not None)


OPERANDS: dict[str, Operand] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Operands, include_extras=True).items()
} | {
    "out": Operand("tnd"),
    "lse": Operand("nt"),
}
IN_KERNELS = {name for name, operand in OPERANDS.items() if operand.in_kernels} | {"block_tables"}
PAIRS = {name for name, operand in OPERANDS.items() if {"t", "s"} <= set(operand.axes)}
RANK = {name: len(operand.axes) for name, operand in OPERANDS.items()}
DIFFERENTIABLE = tuple(name for name, operand in OPERANDS.items() if operand.is_differentiable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRules:
    """Static rules of a call, for kernels and references.

    Query i (counted from 0) sees key j if `j <= i + causal_offset` (None: all), and if
    `i + window_offset - window[0] <= j <= i + window_offset + window[1]` (None for a side: unbounded). With
    `align_ends` both offsets grow by each sequence's count of keys less its count of queries. Where there are
    positions, they take the place of i and j, and `align_ends` is False. Beside them a window may be data, which is
    `window_sizes`. So may be the soft cap.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    causal_offset: int | None = None
    window: tuple[int | None, int | None] = (None, None)
    window_offset: int = 0
    align_ends: bool = False
    deterministic: bool = False  # whether the gradients come out the same, bit by bit, every time
    batch_invariant: bool = False  # whether what is chosen for FORWARD may depend on neither batch nor lengths

    @property
    def of_kernels(self) -> dict[str, Any]:
        """These fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(KernelRules)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules(KernelRules):
    """Static rules of a call, with those that concern the references alone.

    `precision` is of their matrix products, in JAX's terms; None: JAX's default. `is_local` says that one device holds
    the operands, so that they may mix heads that a partitioner keeps apart. `tile` has the most queries and keys that
    are multiplied at a time; None: as many as suit a CPU. `logits_memory` is the most bytes of logits that XLA may hold
    on a GPU, from which a tile follows; None: a share of the device's. `is_block` says that the keys are a block of
    those that the queries see: their logsumexp is then that over all blocks.
    """

    precision: jax.lax.PrecisionLike = None
    is_local: bool = False
    tile: tuple[int, int] | None = None
    logits_memory: int | None = None
    is_block: bool = False


def leading(x: jax.Array | jax.ShapeDtypeStruct, name: str) -> tuple[int, ...]:
    """Returns the leading extents of an operand."""
    return tuple(x.shape[: len(x.shape) - RANK[name]])


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums `x` along the axes in which `shape` has an extent of 1."""
    axes = tuple(d for d, (got, want) in enumerate(zip(x.shape, shape, strict=True)) if got != want)
    return x.sum(axes, keepdims=True) if axes else x


class Op(enum.StrEnum):
    """The operations that have kernels."""

    FORWARD = "attention"
    BACKWARD = "attention_gradients"


@dataclasses.dataclass(frozen=True)
class Attention(KernelRules):
    """One call. Head n of the query reads head `n // (query_heads // key_heads)` of key and value."""

    op: Op
    batch: int
    query_heads: int
    key_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    dtype: jnp.dtype
    _: dataclasses.KW_ONLY
    bias: tuple[int, int, int, int] | None = None  # its shape
    bias_dtype: jnp.dtype | None = None
    bias_gradient: bool = False  # whether BACKWARD returns `d_bias`
    lse_gradient: bool = True  # whether the logsumexp may have a cotangent
    mask: tuple[int, int, int, int] | None = None  # its shape
    query_lengths: bool = False
    key_lengths: bool = False
    segments: bool = False
    positions: bool = False
    window_sizes: bool = False
    cap: bool = False  # whether the soft cap is data
    sinks: bool = False
    keep: tuple[int, int, int, int] | None = None  # its shape
    page_size: int = 0  # positions of a page; 0: keys and values are contiguous
    pages_first: bool = False  # whether pages come before heads

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.query_heads // self.key_heads

    @property
    def widest(self) -> int:
        """The larger of the heads' sizes."""
        return max(self.head_dim, self.value_dim)

    @property
    def data_masks(self) -> int:
        """Says how many kinds of operands say which tiles are passed over."""
        return self.segments + self.positions + (self.mask is not None)

    @property
    def has_data_mask(self) -> bool:
        """Says whether which tiles are passed over is known on the device alone."""
        return self.data_masks > 0

    @property
    def bias_is_tiled(self) -> bool:
        """Says whether the bias is whole tiles of 8 rows and 128 bytes, none of them repeated, which TMA can copy."""
        if self.bias is None or self.bias_dtype is None:
            return False
        return self.bias[2] % 8 == 0 and self.bias[3] * self.bias_dtype.itemsize % 128 == 0


def operand_names(problem: Attention) -> tuple[str, ...]:
    """Lists the operands that the problem has, in their order."""
    fields = {name: OPERANDS[name].problem_field for name in Operands._fields}
    names = [name for name, field in fields.items() if field is None or getattr(problem, field)]
    return (*names, *["block_tables"] * bool(problem.page_size))


def problem_of(
    op: Op, shapes: Mapping[str, Any], dtypes: Mapping[str, Any], rules: Rules, **gradients: bool
) -> Attention:
    """Returns the problem of operands with these shapes in the kernel, and these dtypes."""
    batch, length, heads, dim = shapes["query"]
    _, keys, key_heads, value_dim = shapes["value"]
    fields: dict[str, Any] = {}
    for name in Operands._fields:
        if name in shapes and (field := OPERANDS[name].problem_field):
            fields[field] = shapes[name] if OPERANDS[name].field_is_shape else True
    return Attention(
        op,
        batch,
        heads,
        key_heads,
        length,
        keys,
        dim,
        value_dim,
        jnp.dtype(dtypes["query"]),
        bias_dtype=jnp.dtype(dtypes["bias"]) if "bias" in dtypes else None,
        **fields,
        **gradients,
        **rules.of_kernels,
    )


DTYPES = ("float16", "bfloat16")


def rule_that_is_data(problem: Attention, who: str) -> str | None:
    """Says why `who`, which takes constants alone, does not take a window or a soft cap that is data."""
    for name, what in (("window_sizes", "a window"), ("cap", "a soft cap")):
        if getattr(problem, name):
            return f"{who} {what} that is a constant of the program, and not data"
    return None


def unsupported_reason(problem: Attention, *, widest: int) -> str | None:
    """Says why a kernel for heads up to `widest` does not take the problem, whichever it is."""
    if problem.dtype.name not in DTYPES:
        return f"kernels take {' and '.join(DTYPES)}; the operands are {problem.dtype.name}"
    if reason := rule_that_is_data(problem, "kernels take"):
        return reason
    for name in ("head_dim", "value_dim"):
        size = getattr(problem, name)
        if not 0 < size <= widest or size % 8:
            return f"the kernel takes {name} up to {widest} in multiples of 8; it is {size}"
    if problem.keep is not None:
        return "the kernels have no dropout"
    if unread := [name for name in operand_names(problem) if name not in IN_KERNELS]:
        return f"the kernels do not read {', '.join(unread)}"
    if 0 in (problem.batch, problem.query_heads, problem.query_length, problem.key_length):
        return "there is nothing to do"
    return None


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """A CTA of `warpgroups` warpgroups of 64 query rows each, which share a pipeline of keys and values.

    Attributes:
      block_kv: keys of a tile.
      warpgroups: warpgroups of a CTA.
      rescale_threshold_log2: the output is rescaled only if a row's maximum grows by more than this power of two.
      early_exp_columns: columns of a tile whose exponentials start before it is known whether the maximum grows.
      scheduler: of query tiles. "static": a table assigns tiles to one CTA an SM. "dynamic": a CTA takes the next tile
        from a counter when it is free.
      bias_stages: stages of bias tiles in shared memory; with 0 each thread loads the bias of its own scores.
      l2_budget_mib: keys and values of the heads that run at one time fit in this much of L2.
      zero_init_free: the first WGMMA of a score tile overwrites its registers, which otherwise are cleared before.
      overlap_pv: exponentials run beside the product P V of the tile before, where ptxas would wait for it first.
      prefetch_query: the next tile's queries are copied during the last step of a tile, not after it.
      ctas_per_sm: CTAs that share an SM.
      packed_heads: query heads of one key head, a power of two, whose queries share a tile's rows.
      splits: parts of the keys. Each is a tile of its own, and the parts' states are merged after the kernel.
      visits_hidden: tiles that the mask hides are visited too, because to find these takes longer.
    """

    block_kv: int
    warpgroups: int
    rescale_threshold_log2: int = 0
    early_exp_columns: int = 0
    scheduler: Literal["static", "dynamic"] = "static"
    bias_stages: int = 0
    l2_budget_mib: int = 16
    zero_init_free: bool = False
    overlap_pv: bool = False
    prefetch_query: bool = False
    ctas_per_sm: int = 1
    packed_heads: int = 1
    splits: int = 1
    visits_hidden: bool = False

    stages = 2  # `tile_scheduler` relies on it

    def __post_init__(self) -> None:
        if self.packed_heads & (self.packed_heads - 1) or not 0 < self.packed_heads <= WARPGROUP_ROWS:
            raise ValueError(f"packed_heads is {self.packed_heads}, expected a power of two up to {WARPGROUP_ROWS}.")

    @property
    def block_q(self) -> int:
        """Query rows of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def queries(self) -> int:
        """Queries of a tile, which has one row for each of them and each packed head."""
        return self.block_q // self.packed_heads


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """A CTA with 64 keys for each of `warpgroups` warpgroups, and a pipeline of `stages` stages of `block_q` queries.

    Attributes:
      scheduler: of tiles of keys. "single": a CTA for each tile. "static": one CTA an SM, with every n-th tile.
        "dynamic": one CTA an SM, which takes the next tile from a counter.
      heads_per_l2_group: at most so many heads' tiles are interleaved in the order in which tiles start.
      ordered_dq: a semaphore makes tiles of keys add to a tile of dQ in a fixed order.
      fused_dq_cast: the last tile of keys to add writes dQ itself, in 16 bits.
      bias_stages: as in `ForwardConfig`.
      prefetch_scores: the next step's K Q^T is issued beside this step's dQ and dK.
      staggered: each tile of keys starts one tile of queries later than the one before it.
      dq_from_registers: dQ is added to global memory from registers, and needs no shared memory. Only unordered.
      head_splits: CTAs that share a group's query heads. XLA sums their dK and dV in float32 after the kernel.
      visits_hidden: as in `ForwardConfig`.
    """

    block_q: int
    warpgroups: int
    stages: int
    scheduler: Literal["single", "static", "dynamic"] = "single"
    heads_per_l2_group: int = 1
    ordered_dq: bool = False
    fused_dq_cast: bool = False
    bias_stages: int = 0
    prefetch_scores: bool = False
    staggered: bool = False
    dq_from_registers: bool = False
    head_splits: int = 1
    visits_hidden: bool = False

    def __post_init__(self) -> None:
        if self.dq_from_registers and (self.ordered_dq or self.fused_dq_cast):
            raise ValueError("dq_from_registers is True, expected False where dQ is ordered or cast in the kernel.")

    @property
    def block_kv(self) -> int:
        """Keys of a CTA."""
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def dq_writers(self) -> int:
        """Warpgroups that add to a tile of dQ, each its own part."""
        return self.warpgroups


@dataclasses.dataclass(frozen=True)
class BackwardWideConfig:
    """A CTA with 64 keys and 64 queries a step for two warpgroups, of which one has dV and the other dK in registers.

    Attributes:
      stages: stages of queries.
      d_out_stages: stages of cotangents.
      squares: buffers of 64 x 64 float32 in shared memory. With 1, for the probabilities, dQ is added from registers.
        With 3, each warpgroup stores its part of dQ in a buffer of its own. With 2, warpgroup 0 reuses the first.
      dq_columns: columns of dQ that one product has.
      heads_per_l2_group, ordered_dq, bias_stages, prefetch_scores, head_splits, visits_hidden: as in `BackwardConfig`.
    """

    stages: int = 2
    d_out_stages: int = 2
    squares: int = 1
    heads_per_l2_group: int = 1
    ordered_dq: bool = False
    bias_stages: int = 0
    prefetch_scores: bool = False
    dq_columns: int = 128
    head_splits: int = 1
    visits_hidden: bool = False

    scheduler = "single"
    fused_dq_cast = False
    staggered = False
    block_q = WARPGROUP_ROWS
    block_kv = WARPGROUP_ROWS
    warpgroups = 2
    dq_writers = 2

    def __post_init__(self) -> None:
        if self.ordered_dq and self.squares < 2:
            raise ValueError(f"squares is {self.squares}, expected 2 or 3 where dQ is ordered.")


AnyBackwardConfig = BackwardConfig | BackwardWideConfig
