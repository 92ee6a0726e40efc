"""What a kernel is to JAX. That each lowers, and compiles to the end, is what test_aot.py and its like check."""

import cases
import jax
import pytest
from cases import DTYPES, Op, Problem

from pallas_kernels.softmax.dispatch import KERNELS


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_a_kernel_is_a_function_without_effects(kernel):
    problem = Problem(Op.SOFTMAX, 64, 1001, DTYPES[2])
    assert not jax.make_jaxpr(cases.default(kernel, problem).run)(*cases.shapes(problem)).effects
