"""What only a cluster can get wrong: CTAs that have no part of the row, as when few short rows take many CTAs."""

import functools

import cases
import conformance
import jax
import jax.numpy as jnp
import pytest
from interpreter import interpret

from pallas_kernels.softmax.dispatch import KERNELS
from pallas_kernels.softmax.heuristics import StagedConfig
from pallas_kernels.softmax.problem import Op, Problem


@pytest.mark.slow
@pytest.mark.parametrize("cols", [1500, 130])
def test_ctas_without_a_slice_of_the_row(cols):
    problem = Problem(Op.SOFTMAX, len(cases.ROW_KINDS) + 1, cols, jnp.dtype(jnp.float32))
    config = StagedConfig(ctas=4, warpgroups=1, registers=1, stages=1, rows=1)
    run = functools.partial(KERNELS["cluster"].run, problem, config)
    conformance.check(run, problem, execute=lambda kernel: functools.partial(interpret, kernel))


def test_interleaved_slices_take_no_labels():
    """What stands at a label is written over by who wrote it, who is another where a CTA's chunks are apart."""
    problem = Problem(Op.CROSS_ENTROPY_GRADIENT, 8, 4096, jnp.dtype(jnp.float32))
    config = StagedConfig(ctas=2, warpgroups=1, registers=1, stages=1, rows=1, interleaved=True)
    run = functools.partial(KERNELS["cluster"].run, problem, config)
    with pytest.raises(ValueError, match="side by side"):
        jax.eval_shape(run, *cases.shapes(problem))
