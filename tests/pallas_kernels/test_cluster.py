"""What only a cluster can get wrong: blocks that have no part of the row, as when few short rows take many blocks."""

import functools

import cases
import conformance
import jax.numpy as jnp
import pytest
from interpreter import interpret

from pallas_kernels.configs import StagedConfig
from pallas_kernels.problem import Op, Problem
from pallas_kernels.softmax import LADDER


@pytest.mark.slow
@pytest.mark.parametrize("cols", [1500, 130])
def test_blocks_without_a_share_of_the_row(cols):
    problem = Problem(Op.SOFTMAX, len(cases.ROW_KINDS) + 1, cols, jnp.dtype(jnp.float32))
    config = StagedConfig(blocks=4, warpgroups=1, registers=1, slots=1, rows=1)
    run = functools.partial(LADDER["cluster"].run, problem, config)
    conformance.check(run, problem, execute=lambda kernel: functools.partial(interpret, kernel))
