"""What `flash_attention` says of arguments that do not fit: which, what was got, what was wanted, what to do."""

import inspect
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._attention.checks import CHECKS
from pallas_kernels.attention.problem import OPERANDS, RANK, Operands

Q, K = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 7, 2, 8), np.float32)
IDS = np.zeros((2, 5), int)


@pytest.mark.parametrize(
    "error, text, arguments",
    [
        (TypeError, "query has dtype int32, expected one of bfloat16, float16, float32, float64. Pass dtype=",
         {"query": Q.astype(np.int32)}),
        (TypeError, "dtype=int32, expected one of bfloat16, float16, float32, float64.", {"dtype": "int32"}),
        (TypeError, "value has dtype complex64", {"value": K.astype(np.complex64)}),
        (TypeError, "got query float32, key float16, value float32, expected one dtype for all three",
         {"key": K.astype(np.float16)}),
        (ValueError, "query has shape (4, 8), expected (*batch, length, heads, head_dim)", {"query": Q[0, 0]}),
        (ValueError, "key has shape (7, 2, 8), expected (2, length, heads, 8): *batch and head_dim are query's",
         {"key": K[0]}),
        (ValueError, "key has shape (2, 7, 2, 4), expected (2, length, heads, 8)", {"key": K[..., :4]}),
        (ValueError, "value has shape (2, 6, 2, 8), expected (2, 7, 2, head_dim): all but its last",
         {"value": K[:, :6]}),
        (ValueError, "query has 3 heads and key 2, expected a multiple of the key's", {"query": Q[:, :, :3]}),
        (ValueError, "query has 0 heads and key 2, expected a multiple of", {"query": Q[:, :, :0]}),
        (ValueError,
         "expected a shape that broadcasts to (*batch, query heads, query length, key length) = (2, 4, 5, 7)",
         {"bias": np.zeros((2, 3, 5, 7))}),
        (TypeError, "bias has dtype bool, expected real numbers to add to the logits. Bools go in mask.",
         {"bias": np.ones((5, 7), bool)}),
        (ValueError, "mask has shape (2, 5, 7), expected a shape that broadcasts", {"mask": np.ones((2, 5, 7), bool)}),
        (TypeError, "mask has dtype complex64, expected bool, or numbers of which 0 means masked",
         {"mask": np.ones((5, 7), np.complex64)}),
        (ValueError, "scale is nan, expected a number", {"scale": float("nan")}),
        (TypeError, "scale has dtype complex64, expected real numbers", {"scale": np.complex64(1j)}),
        (ValueError, "scale has shape (3,), expected a number, or a shape that broadcasts to query's",
         {"scale": np.ones(3)}),
        (ValueError, "query_seq_lengths has shape (3,), expected (2,), a length for each sequence",
         {"query_seq_lengths": np.ones(3, int)}),
        (TypeError, "key_value_seq_lengths has dtype float32, expected integers",
         {"key_value_seq_lengths": np.ones(2, np.float32)}),
        (ValueError, "local_window_size=-1, expected a number of positions (0 or more), or a pair (left, right)",
         {"local_window_size": -1}),
        (ValueError, "local_window_size=(1, 2, 3), expected", {"local_window_size": (1, 2, 3)}),
        (ValueError, "causal_alignment='top', expected one of 'top_left', 'bottom_right'", {"causal_alignment": "top"}),
        (ValueError, "logits_soft_cap=0, expected a positive number, or None for no cap", {"logits_soft_cap": 0}),
        (ValueError, "sinks is float32 of shape (2,), expected a float for each query head, of shape (4,)",
         {"sinks": np.ones(2, np.float32)}),
        (ValueError, "got key_value_segment_ids alone; pass query_segment_ids too",
         {"key_value_segment_ids": np.zeros((2, 7), int)}),
        (ValueError, "here there are 5 queries and 7 keys. Pass key_value_segment_ids too", {"query_segment_ids": IDS}),
        (ValueError, "key_value_segment_ids has shape (2, 5), expected (2, 7), a number for each position",
         {"query_segment_ids": IDS, "key_value_segment_ids": IDS}),
        (ValueError, "implementation='cudnn', expected one of None (the fastest there is), 'xla', 'mosaic_gpu'",
         {"implementation": "cudnn"}),
        (ValueError, "dropout_rate=1.5, expected 0 <= dropout_rate < 1", {"dropout_rate": 1.5}),
        (ValueError, "dropout_rate=1.5, expected 0 <= dropout_rate < 1", {"dropout_rate": np.float32(1.5)}),
        (ValueError, "dropout_rate=0.5 needs a dropout_rng. Pass one, or deterministic=True", {"dropout_rate": 0.5}),
        (NotImplementedError, "input_positions were given, but positions have no meaning here. Rotate query and key",
         {"input_positions": IDS}),
        (NotImplementedError, "qk_attn_weights_einsum was given, but the products are inside the kernel",
         {"qk_attn_weights_einsum": jnp.einsum}),
        (NotImplementedError, "attn_weights_value_einsum was given", {"attn_weights_value_einsum": jnp.einsum}),
        (NotImplementedError, "but the weights are to be sown, and no kernel has",
         {"module": types.SimpleNamespace(sow=print), "implementation": "mosaic_gpu"}),
        (NotImplementedError, "einsum_dot_general was given, but the products", {"einsum_dot_general": jnp.dot}),
        (NotImplementedError,
         "promote_dtype was given, but no dtypes other than one for query, key and value go into a kernel. Convert",
         {"promote_dtype": lambda arrays, dtype: arrays}),
        (TypeError, "query is of type str, expected an array of numbers", {"query": "q"}),
        (TypeError, "value has dtype key<fry>, expected an array of numbers", {"value": jax.random.key(0)}),
        (TypeError, "bias is of type list, expected an array of numbers", {"bias": [[1.0], [1.0, 2.0]]}),
        (TypeError, "sinks is of type str, expected an array of numbers", {"sinks": "none"}),
        (TypeError, "key_value_seq_lengths is of type str, expected an array", {"key_value_seq_lengths": "all"}),
        (TypeError, "key_value_seq_lengths has dtype object, expected integers", {"key_value_seq_lengths": [2**64, 1]}),
        (ValueError, "scale is an integer that no float holds, expected a smaller", {"scale": 10**400}),
        (TypeError, "is_causal is an array of bool, expected True or False, known when",
         {"is_causal": jnp.array(True)}),
        (TypeError, "is_causal is an array of bool, expected True or False", {"is_causal": np.ones((5, 7), bool)}),
        (TypeError, "is_causal='yes', expected True or False", {"is_causal": "yes"}),
        (TypeError, "module=3, expected a Flax module in which to sow the weights, or None", {"module": 3}),
        (TypeError, "dropout_rate='half', expected a number, 0 <= dropout_rate < 1", {"dropout_rate": "half"}),
        (TypeError, "dropout_rate=Array([0.5], dtype=float32), expected a number", {"dropout_rate": jnp.array([0.5])}),
        (TypeError, "dropout_rng=3, expected a random key, as of jax.random.key(0)",
         {"dropout_rng": 3, "dropout_rate": 0.5}),
        (TypeError, "dtype='float33', expected one of bfloat16, float16, float32, float64", {"dtype": "float33"}),
    ],
)  # fmt: skip
def test_arguments(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match="^flash_attention: .*" + re.escape(text)):
        jaxsoftmax.flash_attention(**{"query": Q, "key": K, "value": K, **arguments})


def test_a_traced_is_causal() -> None:
    with pytest.raises(
        TypeError, match=r"^flash_attention: is_causal is an array of bool, .* static argument of jax.jit, or"
    ):
        jax.jit(lambda causal: jaxsoftmax.flash_attention(Q, K, K, is_causal=causal))(True)


def test_explain_takes_a_device_of_ours() -> None:
    with pytest.raises(TypeError, match=r"^explain_attention: device=3, expected a pallas_kernels.hardware.Device, or"):
        jaxsoftmax.explain_attention(Q, K, K, device=3)


def test_dropout_is_no_kernels() -> None:
    with pytest.raises(NotImplementedError, match="but there is dropout, and no kernel has the weights in memory"):
        jaxsoftmax.flash_attention(
            Q, K, K, dropout_rate=0.5, dropout_rng=jax.random.key(0), implementation="mosaic_gpu"
        )


def test_a_named_kernel_never_falls_back(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: problem.query_length < 5
    with pytest.raises(NotImplementedError, match=r"no kernel takes this call:\n  attention: it is not for this"):
        jaxsoftmax.flash_attention(Q, K, K, implementation="mosaic_gpu")
    jaxsoftmax.flash_attention(Q[:, :4], K, K, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="symbolic or zero"):
        jaxsoftmax.flash_attention(Q[:, :0], K, K, implementation="mosaic_gpu")


def test_every_operand_has_a_row_a_check_and_an_argument() -> None:
    assert set(OPERANDS) == set(RANK) == {*Operands._fields, "out", "lse"}
    assert set(CHECKS) == {*Operands._fields} - {"query", "key", "value"}
    arguments = {OPERANDS[name].argument or name for name in Operands._fields}
    assert arguments <= set(inspect.signature(jaxsoftmax.flash_attention).parameters)
