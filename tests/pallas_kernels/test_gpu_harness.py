"""The harness that runs kernels on a GPU rejects kernels that leave out rows or write beside them."""

import aot
import cases
import conformance
import jax
import jax.numpy as jnp
import poisoned
import pytest
import toy

from pallas_kernels.softmax.problem import Op, Problem

PROBLEM = Problem(Op.SOFTMAX, 64, 1024, jnp.dtype(jnp.bfloat16))


@pytest.mark.gpu
def test_a_sound_kernel_passes():
    conformance.check(toy.softmax, PROBLEM, execute=poisoned.execute)


@pytest.mark.gpu
@pytest.mark.parametrize("rows_written", [0, 2])
def test_unwritten_rows_are_seen(rows_written):
    with pytest.raises(AssertionError, match="got nan"):
        conformance.check(lambda x: toy.softmax(x, rows_written=rows_written), PROBLEM, execute=poisoned.execute)


@pytest.mark.gpu
def test_writes_beside_the_output_are_seen():
    operands = cases.operands(PROBLEM)
    with pytest.raises(AssertionError, match="beside"):
        poisoned.execute(lambda x: toy.softmax(x, shift=1))(*operands)


@pytest.mark.gpu
def test_a_silent_fallback_is_seen():
    with pytest.raises(AssertionError, match="no Mosaic kernel"):
        conformance.check(jax.nn.softmax, PROBLEM, execute=poisoned.execute)


@pytest.mark.aot
def test_the_kernel_writes_into_the_poisoned_buffer():
    text = poisoned.program(toy.softmax, *aot.on_h200(cases.shapes(PROBLEM))).compile().as_text()
    assert poisoned.KERNEL_CALL in text
    assert "input_output_alias={ {}: (0, {}, may-alias) }" in text
    assert " copy(" not in text
