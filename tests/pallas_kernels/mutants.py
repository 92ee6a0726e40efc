"""The planted faults that the conformance suite must reject. `docs/mutants.md` is written from this table.

Function faults are planted in `wrong.solver`; kernel faults are planted in the rungs themselves, through a small seam,
and run in the interpreter.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import wrong

from pallas_kernels.problem import Op


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: what it is in words, where it is planted, and an operation that shows it."""

    name: str
    fault: str
    knobs: dict[str, Any]
    op: Op = Op.SOFTMAX
    where: str = "none"
    scale: float = 1.0
    cols: int = 1000


def _constant(y: jax.Array) -> jax.Array:
    return jnp.full_like(y, 1 / y.shape[1])


def _permuted(y: jax.Array) -> jax.Array:
    return jnp.flip(y, 1)


def _row_off_by_one(y: jax.Array) -> jax.Array:
    return jnp.roll(y, 1, 0)


def _last_row_unwritten(y: jax.Array) -> jax.Array:
    return y.at[-1].set(jnp.nan)


def _last_column_unwritten(y: jax.Array) -> jax.Array:
    return y.at[:, -1].set(jnp.nan)


_HALF = {"accumulator": jnp.float16, "tile_size": 4096}

FUNCTION_MUTANTS = (
    Mutant("constant", "every output is 1/N", {"deliver": _constant}),
    Mutant("max_from_zero", "the running maximum starts at 0", {"start": 0.0}),
    Mutant("no_identity_guard", "exp(-inf - -inf) is not guarded in decay", {"decay": wrong.never_guarded}, Op.STATS),
    Mutant("last_tile_dropped", "the last tile of the row is not folded in", {"tiles": slice(None, -1)}),
    Mutant("first_tile_dropped", "the first tile of the row is not folded in", {"tiles": slice(1, None)}),
    Mutant("columns_permuted", "columns come out in another order", {"deliver": _permuted}),
    Mutant("sum_not_rescaled", "the old sum is kept when the maximum grows", {"rescale": False}),
    Mutant("padding_is_zero", "columns past the end are read as 0, not -inf", {"padding": 0.0}),
    Mutant("half_accumulator", "the sum is accumulated in float16", _HALF, cols=70000),
    Mutant("half_accumulator_tangent", "the same in the tangent", _HALF, Op.SOFTMAX_TANGENT),
    Mutant("mask_ignored", "`where` has no effect on the sum", {"use_mask": False}, where="full"),
    Mutant("shared_mask_ignored", "the same for a mask shared by all rows", {"use_mask": False}, where="shared"),
    Mutant("scale_ignored", "`scale` has no effect", {"use_scale": False}, scale=0.5),
    Mutant("scale_ignored_tangent", "the same in the tangent", {"use_scale": False}, Op.SOFTMAX_TANGENT, scale=0.5),
    Mutant("row_off_by_one", "each row gets its neighbour's result", {"deliver": _row_off_by_one}),
    Mutant("last_row_unwritten", "the last row is never written", {"deliver": _last_row_unwritten}),
    Mutant("last_column_unwritten", "the last column is never written", {"deliver": _last_column_unwritten}),
    Mutant("no_inner_product", "the tangent lacks its sum(y * t)", {"inner_product": False}, Op.SOFTMAX_TANGENT),
    Mutant("log_max_from_zero", "log_softmax with a maximum from 0", {"start": 0.0}, Op.LOG_SOFTMAX),
)


@dataclasses.dataclass(frozen=True)
class KernelMutant:
    """A fault planted in the kernels: `plant(monkeypatch)` replaces a seam; `kill` names the check that must see it."""

    name: str
    fault: str
    plant: Callable[[Any], None]
    kill: str
