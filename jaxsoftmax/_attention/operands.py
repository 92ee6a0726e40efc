"""The operand table of attention, from which layout, sharding and the kernels' problem are derived.

Names, order and ranks are those of `pallas_kernels.attention.operands`. An operand that is added there has a row here
and a check in `checks.CHECKS`; what else it needs in this package is an argument of `flash_attention`.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from pallas_kernels.attention.operands import DIFFERENTIABLE


class Operand(NamedTuple):
    """An operand, or a result, by the axes that follow its leading ones."""

    heads: Literal["query", "key"] | None = None  # whose heads it has
    head_axis: int = 0
    padded: Literal["head_dim", "value_dim"] | None = None  # what its last axis is, which kernels want in multiples
    broadcasts: bool = False  # whether a kernel takes extents of 1 for any
    has_batch: bool = True  # whether a kernel takes one for each element of the batch
    dtype: Any = None  # a kernel's; None for the operand's own
    problem_field: str | None = None  # what the kernels' problem calls it
    field_is_shape: bool = False  # whether that field is its shape; otherwise whether it is there
    gradient_on_request: bool = False  # whether a kernel gives its gradient only where that is asked for
    argument: str | None = None  # what `flash_attention` calls it; None for the operand's own name


OPERANDS = {
    "query": Operand("query", 1, padded="head_dim"),
    "key": Operand("key", 1, padded="head_dim"),
    "value": Operand("key", 1, padded="value_dim"),
    "bias": Operand("query", broadcasts=True, problem_field="bias", field_is_shape=True, gradient_on_request=True),
    "mask": Operand("query", broadcasts=True, dtype=jnp.int8, problem_field="mask", field_is_shape=True),
    "query_lengths": Operand(problem_field="query_lengths", argument="query_seq_lengths"),
    "key_lengths": Operand(problem_field="key_lengths", argument="key_value_seq_lengths"),
    "query_segments": Operand(problem_field="segments", argument="query_segment_ids"),
    "key_segments": Operand(problem_field="segments", argument="key_value_segment_ids"),
    "sinks": Operand("query", broadcasts=True, has_batch=False, problem_field="sinks"),
    "out": Operand("query", 1, padded="value_dim"),
    "lse": Operand("query"),
}

QUERY_HEADS = {name: operand.head_axis for name, operand in OPERANDS.items() if operand.heads == "query"}
KEY_HEADS = {name: operand.head_axis for name, operand in OPERANDS.items() if operand.heads == "key"}


def problem_fields(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the kernels' problem for the operands of a call, from their shapes in the kernel."""
    fields: dict[str, Any] = {}
    for name, shape in shapes.items():
        field, is_shape = OPERANDS[name].problem_field, OPERANDS[name].field_is_shape
        if field is not None:
            fields[field] = shape if is_shape else True
    return fields


def kernel_gradients(names: Collection[str], wanted: Collection[str]) -> list[str]:
    """The operands whose gradients the backward kernel returns, in its order."""
    return [n for n in DIFFERENTIABLE if n in wanted or (n in names and not OPERANDS[n].gradient_on_request)]
