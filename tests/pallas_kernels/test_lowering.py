"""What a kernel is to JAX. That each lowers, and compiles to the end, is what test_aot.py and its like check."""

import cases
import jax
import pytest
from cases import DTYPES, Op, Problem

from pallas_kernels.softmax.dispatch import LADDER


@pytest.mark.parametrize("rung", LADDER.values(), ids=lambda rung: rung.name)
def test_a_kernel_is_a_function_without_effects(rung):
    problem = Problem(Op.SOFTMAX, 64, 1001, DTYPES[2])
    assert not jax.make_jaxpr(cases.default(rung, problem).run)(*cases.shapes(problem)).effects
