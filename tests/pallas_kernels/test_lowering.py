"""Every rung and config lowers for CUDA without a GPU: layouts, transfers and shared memory are checked by Mosaic."""

import cases
import jax
import pytest
import strict
from cases import DTYPES, Op, Problem

from pallas_kernels.softmax import LADDER

SHAPES = ((65536, 256), (8191, 1000), (513, 1001), (8192, 4096), (777, 50257), (512, 131072), (16, 262144))


def _cases():
    """Each operation and each config of each rung, with shapes and dtypes in turns."""
    seen = set()
    for rung in LADDER.values():
        for i, (op, (rows, cols)) in enumerate((op, shape) for op in Op for shape in SHAPES):
            problem = Problem(op, rows, cols, DTYPES[i % 3])
            for case in cases.every_config(rung, problem) if cases.takes(rung, problem) else ():
                new = {(rung.name, op), (rung.name, case.config)} - seen
                seen |= new
                if new:
                    yield case


@pytest.mark.slow  # on the oldest JAX each rung and config is compiled to the end (test_aot.py)
@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_lowers_for_cuda(case):
    with strict.settings():
        traced = jax.jit(lambda *arrays: case.run(*arrays)).trace(*cases.shapes(case.problem))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rung", LADDER.values(), ids=lambda rung: rung.name)
def test_a_kernel_is_a_function_without_effects(rung):
    problem = Problem(Op.SOFTMAX, 64, 1001, DTYPES[2])
    assert not jax.make_jaxpr(cases.default(rung, problem).run)(*cases.shapes(problem)).effects
