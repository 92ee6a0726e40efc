"""FlashAttention's algorithms agree with the truth, whatever the blocks."""

import numpy as np
import pytest

from pallas_kernels.attention import seeds
from tests import attention_oracle


@pytest.mark.parametrize("algorithm", [seeds.flash_attention, seeds.flash_attention_2])
@pytest.mark.parametrize("rows, cols", [(1, 1), (4, 3), (3, 16), (100, 100)])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_blocks_of_any_size_give_the_same(algorithm, rows, cols, size):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, d)) for n, d in ((10, 8), (17, 8), (17, 5)))
    q *= size
    out, logsumexp = algorithm(q, k, v, rows=rows, cols=cols)
    truth = attention_oracle.forward(*(x[None, :, None] for x in (q, k, v)), scale=1.0)
    np.testing.assert_allclose(out, truth.out[0, :, 0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(logsumexp, truth.lse[0, 0], rtol=1e-12)
