"""Every rung and config lowers for CUDA without a GPU: layouts, transfers and shared memory are checked by Mosaic."""

import dataclasses
import itertools

import attention_cases
import cases
import jax
import jax.numpy as jnp
import pytest
import strict
from cases import DTYPES, Op, Problem

from pallas_kernels.attention import dispatch
from pallas_kernels.attention.problem import Attention
from pallas_kernels.attention.problem import Op as Part
from pallas_kernels.hardware import H200
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


def lowers(kernel, operands, to_the_end=True):
    """In settings that a user may have: what is wrong with a kernel's ranks is said when it is traced."""
    with strict.settings():
        traced = jax.jit(lambda *arrays: kernel(*arrays)).trace(*operands)
        if to_the_end:
            assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def _attention():
    """Each part of each kind, by the kernels of narrow and of wide heads in turns; every few are lowered to the end."""
    dims = itertools.cycle(((64, 64), (256, 256), (72, 40)))
    for i, (part, kind) in enumerate((part, kind) for part in Part for kind in attention_cases.KINDS):
        facts = attention_cases.KINDS[kind]
        problem = attention_cases.problem_of(part, facts, (300, 520), next(dims), "bfloat16", (4, 2))
        problem = dataclasses.replace(problem, bias_gradient=part is Part.BACKWARD and "bias" in facts)
        yield pytest.param(problem, i % 9 == 0, id=f"{part}-{kind}")


def _operands(p: Attention):
    of_rows = (p.batch, p.query_length, p.query_heads, p.value_dim), (p.batch, p.query_heads, p.query_length)
    rest = [jax.ShapeDtypeStruct(*like) for like in zip(of_rows, (p.dtype, jnp.float32), strict=True)]
    arrays = attention_cases.operands_of(p).values()
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays] + (rest + rest) * (p.op is Part.BACKWARD)


@pytest.mark.parametrize("problem, to_the_end", list(_attention()))
def test_attention_lowers_for_cuda(problem, to_the_end):
    lowers(dispatch.decide(problem, H200).run, _operands(problem), to_the_end)


@pytest.mark.slow  # on the oldest JAX each rung and config is compiled to the end (test_aot.py)
@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_lowers_for_cuda(case):
    lowers(case.run, cases.shapes(case.problem))


@pytest.mark.parametrize("rung", LADDER.values(), ids=lambda rung: rung.name)
def test_a_kernel_is_a_function_without_effects(rung):
    problem = Problem(Op.SOFTMAX, 64, 1001, DTYPES[2])
    assert not jax.make_jaxpr(cases.default(rung, problem).run)(*cases.shapes(problem)).effects
