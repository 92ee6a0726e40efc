"""Which vectors of a CTA's slice are taken for granted: those that lie in the row, whatever its alignment."""

import types

import jax.numpy as jnp
import pytest

from pallas_kernels.softmax.problem import Op, Problem
from pallas_kernels.softmax.staged import CtaSlice, StagedConfig

SIDE_BY_SIDE = StagedConfig(ctas=3, warpgroups=1, registers=2, stages=1, rows=1)
APART = StagedConfig(ctas=3, warpgroups=1, registers=2, stages=1, rows=1, interleaved=True)
ALONE = StagedConfig(ctas=1, warpgroups=2, registers=1, stages=1, rows=1)


def vectors_of(cta_slice):
    """Which of the row's vectors the slice has, in its order."""
    return [
        int(cta_slice.chunk_start(i // cta_slice.config.chunk)) + i % cta_slice.config.chunk
        for i in range(cta_slice.vectors)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [1, 2, 3, 4, 5, 7, 8, 9, 1000, 1024, 1031, 3071, 3072, 3079, 6143, 6145, 9001])
@pytest.mark.parametrize("config", [SIDE_BY_SIDE, APART, ALONE], ids=["side by side", "apart", "alone"])
def test_what_surely_lies_in_a_row_does(config, cols, dtype):
    problem = Problem(Op.SOFTMAX, 2, cols, jnp.dtype(dtype))
    for block in range(config.ctas):
        cta_slice = CtaSlice(types.SimpleNamespace(problem=problem), config, block, 0)
        v = cta_slice.tile.vector
        assert 0 <= cta_slice.in_bounds <= cta_slice.vectors
        for head in range(v if cols % v else 1):
            for vector in vectors_of(cta_slice)[: cta_slice.in_bounds]:
                assert vector == 0 or lies_in_row(vector, v, head, cols)


@pytest.mark.parametrize("cols", [1, 4, 7, 1000, 1024, 1031, 3071, 3072, 3079, 6143, 6145, 9001])
@pytest.mark.parametrize("config", [SIDE_BY_SIDE, APART, ALONE], ids=["side by side", "apart", "alone"])
def test_every_vector_is_one_warpgroups(config, cols):
    """The tiles of the warpgroups of all CTAs of a row are its vectors, each once."""
    problem = Problem(Op.SOFTMAX, 2, cols, jnp.dtype("float32"))
    by_chunk, by_tile = [], []
    for block in range(config.ctas):
        slices = [CtaSlice(types.SimpleNamespace(problem=problem), config, block, w) for w in range(config.warpgroups)]
        by_chunk += vectors_of(slices[0])
        for own in slices:
            starts = [int(own.at(step)) for step in range(own.steps)]
            by_tile += [start + i for start in starts for i in range(128 * config.registers)]
    assert sorted(by_chunk) == sorted(by_tile) == list(range(len(by_tile)))
    v = slices[0].tile.vector
    assert len(by_tile) * v >= cols + (v - 1 if cols % v else 0)


def lies_in_row(vector, v, head, cols):
    return vector * v >= head and (vector + 1) * v - head <= cols
