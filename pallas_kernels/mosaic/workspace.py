"""Workspace: initialised global memory that all CTAs of a launch share."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
from jax import lax


def with_workspace(
    kernel: Callable[..., Any],
    operands: Sequence[jax.Array],
    workspace: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """What `kernel(*operands, *workspace)` returns, and what the workspace holds then.

    The kernel gets the workspace as references. They are references here only: with `jax.new_ref` the caller would have
    an effect, and XLA's partitioner lowers nothing that has one.
    """

    def run(state: tuple[list[jax.Ref], list[jax.Ref]]) -> None:
        refs, outs = state
        for out, value in zip(outs, kernel(*operands, *refs), strict=True):
            out[...] = value

    empty = [lax.empty(x.shape, x.dtype) for x in out_type]
    written, results = pl.run_state(run)((list(workspace), empty))
    return results, written
