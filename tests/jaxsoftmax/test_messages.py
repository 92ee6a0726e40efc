"""Error texts of every function: what was got, what was wanted, what to do."""

import functools
import inspect
import math
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._attention.checks import _EACH, CHECKS
from pallas_kernels.attention.problem import OPERANDS, RANK, Operands

X = np.zeros((2, 3), np.float32)
COMPLEX = X.astype(np.complex64)
KEY = jax.random.key(0)
Q, K = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 7, 2, 8), np.float32)
IDS = np.zeros((2, 5), int)

OF_ROWS = [
    (NotImplementedError, "implementation='mosaic_gpu' was asked for, but the kernels take real numbers and x is",
     {"x": COMPLEX, "implementation": "mosaic_gpu"}),
    (TypeError, "x has dtype key<fry>, expected numbers. A random key draws numbers", {"x": KEY}),
    (TypeError, "x is of type NoneType and makes no array of numbers, expected an array", {"x": None}),
    (TypeError, "x is of type list and makes no array of numbers", {"x": [[1.0, 2.0], [3.0]]}),
    *((TypeError, "x is or has an integer that JAX's integers cannot hold, expected smaller ones. Pass floats",
       {"x": large}) for large in (10**400, [2**70])),
    (TypeError, "where is of type str and makes no array of numbers", {"where": "mask"}),
    (ValueError, "axis 2 is out of bounds for x of rank 2, expected -2 <= axis < 2", {"axis": 2}),
    (ValueError, "axis -3 is out of bounds", {"axis": (0, -3)}),
    (ValueError, "axis -1 is out of bounds for x of rank 0, expected 0 <= axis < 0. Pass axis=None", {"x": 1.0}),
    (ValueError, "duplicate value in axis=(0, -2), expected each axis once", {"axis": (0, -2)}),
    (TypeError, "where has dtype float32, expected bool. Pass where.astype(bool)", {"where": X}),
    (
        ValueError,
        "where has shape (3, 3), expected a shape that broadcasts with x's, (2, 3)",
        {"where": np.ones((3, 3), bool)},
    ),
    (TypeError, "axis is 1.5, expected an integer, several, or None. If it is traced", {"axis": 1.5}),
    (TypeError, "axis is (0, None), expected an integer", {"axis": (0, None)}),
    (ValueError, "scale has shape (2,), expected a shape that broadcasts to x's, (2, 3)", {"scale": np.ones(2)}),
    (ValueError, "scale is nan, expected a number", {"scale": float("nan")}),
    (TypeError, "scale has dtype complex64, expected a real dtype", {"scale": np.ones((1, 1), np.complex64)}),
    (TypeError, "scale has dtype complex64, expected a real dtype", {"scale": np.complex64(1j)}),
    (TypeError, "scale has dtype complex64, expected a real dtype", {"scale": 1j, "x": COMPLEX}),
    (TypeError, "scale is of type str and makes no array of numbers", {"scale": "2"}),
    (ValueError, "scale is an integer beyond 2e+308, expected a number that a float holds", {"scale": -(10**400)}),
    (ValueError, "implementation='cudnn', expected one of None (the fastest there is), 'xla', 'mosaic_gpu'. "
     "Pass None: it takes a Mosaic GPU kernel where there is one", {"implementation": "cudnn"}),
    (ValueError, "implementation=['xla'], expected one of None", {"implementation": ["xla"]}),
]  # fmt: skip
OF_LABELS = [
    (TypeError, "logits has dtype complex64, expected a real dtype", {"logits": COMPLEX}),
    (ValueError, "axis 2 is out of bounds for logits of rank 2", {"axis": 2}),
    (ValueError, "duplicate value in axis=(1, -1)", {"axis": (1, -1)}),
    (TypeError, "labels has dtype float32, expected integers. Pass labels.astype(int), or", {"labels": X[:, 0]}),
    (TypeError, "labels has dtype bool, expected integers", {"labels": X[:, 0] > 0}),
    (ValueError, "labels has shape (2, 1), expected that of the logits without axis, (2,)", {"labels": [[0], [1]]}),
    (ValueError, "labels has shape (2,), expected that of the logits without axis, (3,)", {"axis": 0}),
    (ValueError, "labels has 3 at (1,), expected 0 <= label < 3", {"labels": [0, 3]}),
    (ValueError, "labels has -1 at (0,), expected 0 <= label < 3", {"labels": [-1, 0]}),
    (TypeError, "where has dtype float32, expected bool", {"where": X}),
    (ValueError, "where has shape (3,), expected a shape that broadcasts with the rows', (2,)",
     {"where": np.ones(3, bool)}),
    (ValueError, "where has shape (2, 4), expected a shape that broadcasts with the logits', (2, 3)",
     {"where": np.ones((2, 4), bool)}),
    (ValueError, "where has shape (), expected the rank of the logits, 2, or of the rows, 1", {"where": True}),
    (ValueError, "label_smoothing is 1.5, expected a finite number from 0.0 to 1.0", {"label_smoothing": 1.5}),
    (ValueError, "label_smoothing is nan", {"label_smoothing": float("nan")}),
    (TypeError, "label_smoothing is 1j, expected a real number, or an array", {"label_smoothing": 1j}),
    (TypeError, "z_loss is np.complex64(1+2j), expected a real number", {"z_loss": np.complex64(1 + 2j)}),
    (TypeError, "logits_soft_cap is np.complex128(1+0j)", {"logits_soft_cap": np.complex128(1)}),
    (ValueError, "z_loss is an integer beyond 2e+308, expected a number that a float", {"z_loss": 10**400}),
    (TypeError, "label_smoothing is an array, float32[1], expected a real", {"label_smoothing": jnp.ones(1)}),
    (TypeError, "z_loss is an array, bool[], expected a real number", {"z_loss": jnp.array(True)}),
    (TypeError, "scale has dtype complex64, expected a real dtype", {"scale": np.complex64(1j)}),
    (ValueError, "z_loss is inf, expected a finite number", {"z_loss": float("inf")}),
    (ValueError, "logits_soft_cap is 0, expected a positive number. Pass None", {"logits_soft_cap": 0}),
    (ValueError, "logits_soft_cap is -1.0, expected a finite number from 0.0", {"logits_soft_cap": -1.0}),
    (TypeError, "logits_soft_cap is '30', expected a real number", {"logits_soft_cap": "30"}),
    (ValueError, "scale has shape (2,), expected a shape that broadcasts to the logits'", {"scale": np.ones(2)}),
    (TypeError, "ignore_index is 1.0, expected a Python integer or None", {"ignore_index": 1.0}),
    (ValueError, "weights has shape (3,), expected a shape that broadcasts to the rows', (2,)", {"weights": X[0]}),
    (TypeError, "weights has dtype complex64", {"weights": np.ones((), np.complex64)}),
    (ValueError, "implementation='cuda', expected one of None", {"implementation": "cuda"}),
]  # fmt: skip
OF_ATTENTION = [
    (NotImplementedError, "but the weights are to be sown, and no kernel has the weights in memory",
     {"module": types.SimpleNamespace(sow=print), "implementation": "mosaic_gpu"}),
    (TypeError, "query has dtype int32, expected one of bfloat16, float16, float32, float64. Pass dtype=",
     {"query": Q.astype(np.int32)}),
    (TypeError, "dtype=int32, expected one of bfloat16, float16, float32, float64.", {"dtype": "int32"}),
    (TypeError, "value has dtype complex64", {"value": K.astype(np.complex64)}),
    (TypeError, "got query float32, key float16, value float32, expected one dtype for all three",
     {"key": K.astype(np.float16)}),
    *((ValueError, f"precision is {precision!r}, expected None, 'default', 'high', 'highest', or another that jax",
       {"precision": precision}) for precision in ("lots", ["high"], 3.5)),
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
    *((TypeError, f"mask has dtype {dtype}, expected bool, True where a key is seen. Pass mask != 0.",
       {"mask": jnp.ones((5, 7), dtype)} | more)
      for dtype in ("int8", "uint8", "int32", "uint32") for more in ({}, {"dropout_rate": 0.0})),
    *((TypeError, f"mask has dtype {dtype}, expected bool, True where a key is seen. Pass numbers to add to the logits "
       "as bias=, and a mask of 0 and 1 as mask != 0.", {"mask": jnp.ones((5, 7), dtype)})
      for dtype in ("float8_e4m3fn", "bfloat16", "float16", "float32", "complex64")),
    *((ValueError, f"mask has the number {wrong}, expected bools, or numbers that are 0 where a key is hidden and 1 "
       "elsewhere. Pass numbers to add to the logits as bias=.", {"mask": np.array([[1, 0, 1, wrong, 1, 3, 1]])} | flax)
      for wrong in (-1e9, -math.inf, math.nan, 0.5, 2, -1) for flax in ({"deterministic": True}, {"dropout_rng": KEY})),
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
    (ValueError, "logits_soft_cap=inf, expected a positive number, or None for no cap", {"logits_soft_cap": math.inf}),
    (ValueError, "logits_soft_cap=nan, expected a positive number", {"logits_soft_cap": math.nan}),
    *((ValueError, f"{name} has shape {shape}, expected (2, {count}), or what broadcasts to it: a number for each",
       {"query_positions": IDS, "key_value_positions": np.zeros((2, 7), int), name: np.zeros(shape, int)})
      for name, count in (("query_positions", 5), ("key_value_positions", 7))
      for shape in ((2, 1), (2, count + 1), (3, count), (1, 2, count), ())),
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
    (TypeError, "value has dtype key<fry>, expected an array of numbers", {"value": KEY}),
    (TypeError, "bias is of type list, expected an array of numbers", {"bias": [[1.0], [1.0, 2.0]]}),
    (TypeError, "sinks is of type str, expected an array of numbers", {"sinks": "none"}),
    (TypeError, "key_value_seq_lengths is of type str, expected an array", {"key_value_seq_lengths": "all"}),
    (TypeError, "key_value_seq_lengths has dtype object, expected integers", {"key_value_seq_lengths": [2**64, 1]}),
    (ValueError, "scale is an integer that no float holds, expected a smaller", {"scale": 10**400}),
    (TypeError, "is_causal is bool[5,7], expected True or False, or an", {"is_causal": np.ones((5, 7), bool)}),
    (TypeError, "is_causal is int32[], expected True or False", {"is_causal": jnp.int32(1)}),
    (ValueError, "local_window_size=int32[3], expected a number of positions", {"local_window_size": jnp.arange(3)}),
    (ValueError, "local_window_size=float32[], expected a number of positions", {"local_window_size": jnp.ones(())}),
    (ValueError, "logits_soft_cap is float32[2], expected one positive number", {"logits_soft_cap": jnp.ones(2)}),
    (TypeError, "is_causal='yes', expected True or False", {"is_causal": "yes"}),
    (TypeError, "module=3, expected a Flax module in which to sow the weights, or None", {"module": 3}),
    (TypeError, "dropout_rate='half', expected a number, 0 <= dropout_rate < 1", {"dropout_rate": "half"}),
    (TypeError, "dropout_rate=Array([0.5], dtype=float32), expected a number", {"dropout_rate": jnp.array([0.5])}),
    (TypeError, "dropout_rng=3, expected a random key, as of jax.random.key(0)",
     {"dropout_rng": 3, "dropout_rate": 0.5}),
    (TypeError, "dtype='float33', expected one of bfloat16, float16, float32, float64", {"dtype": "float33"}),
]  # fmt: skip
OF_TOP_K = [
    *((TypeError, f"{name} is {value!r}, expected one integer. If it is traced", {name: value})
      for name, value in (("k", 1.0), ("k", None), ("k", (1,)), ("axis", (0,)), ("axis", None))),
    (ValueError, "k=4, expected 0 <= k <= 3, the number of logits along axis 1", {"k": 4}),
    (ValueError, "k=-1, expected 0 <= k <= 2, the number of logits along axis 0", {"k": -1, "axis": -2}),
    (ValueError, "normalize='k', expected one of 'all', 'top_k'", {"normalize": "k"}),
    (ValueError, "axis 2 is out of bounds for logits of rank 2, expected -2 <= axis < 2.", {"axis": 2}),
    (ValueError, "logits is a scalar, expected", {"logits": 1.0, "k": 1}),
    (ValueError, "implementation='cuda', expected one of", {"implementation": "cuda"}),
    (ValueError, "scale is nan", {"scale": float("nan")}),
    (ValueError, "scale has shape (2,), expected a shape that broadcasts to the logits'", {"scale": np.ones(2)}),
    (TypeError, "logits has dtype complex64", {"logits": np.zeros(3, np.complex64)}),
]  # fmt: skip
OF_LOGSUMEXP = [
    (TypeError, "a is of type str and makes no array of numbers", {"a": "numbers"}),
    (TypeError, "b is of type str and makes no array of numbers", {"b": "numbers"}),
    (TypeError, "a has dtype key<fry>, expected numbers", {"a": KEY}),
    (TypeError, "b has dtype key<fry>, expected numbers", {"b": KEY}),
    (ValueError, "b has shape (4,), expected a shape that broadcasts with a's, (2, 3)", {"b": np.ones(4)}),
    (NotImplementedError, "the kernels take no weights b", {"b": X, "implementation": "mosaic_gpu"}),
    (NotImplementedError, "a is complex; pass implementation", {"a": COMPLEX, "implementation": "mosaic_gpu"}),
    (ValueError, "axis 5 is out of bounds for a of rank 2", {"axis": 5}),
]
OF_PROBABILITIES = [
    (ValueError, "labels has shape (2,), expected a shape that broadcasts with the log", {"labels": np.ones(2)}),
    (TypeError, "labels has dtype complex64", {"labels": COMPLEX}),
    (ValueError, "where has shape (3,), expected a shape that broadcasts with", {"where": np.ones(3, bool)}),
]
OF_TOKENS = [
    (ValueError, "hidden has shape (2, 3) and weight (3, 4), expected", {"weight_layout": "VE"}),
    (ValueError, "[V, E]", {"weight_layout": "VE"}),
    (ValueError, "weight_layout='HV', expected one of 'EV', 'VE'", {"weight_layout": "HV"}),
    (ValueError, "bias has shape (3,), expected (4,)", {"bias": np.zeros(3)}),
    (ValueError, "chunk_size is 0, expected a positive integer", {"chunk_size": 0}),
    (ValueError, "scale has shape (2, 4), expected", {"scale": np.ones((2, 4))}),
    (ValueError, "labels has shape (3, 2)", {"labels": np.zeros((3, 2), int)}),
    (ValueError, "labels broadcast to", {"hidden": X[:1], "labels": np.zeros(4, int)}),
    (TypeError, "labels has dtype float32", {"labels": X[:, 0]}),
    (ValueError, "label_smoothing is 2.0", {"label_smoothing": 2.0}),
    (TypeError, "weight has dtype complex64", {"weight": np.zeros((3, 4), np.complex64)}),
    (ValueError, "implementation='cuda'", {"implementation": "cuda"}),
]
OF_PAGES = [
    (ValueError, "layout='NHD', expected one of 'heads_first', 'pages_first'", {"layout": "NHD"}),
    (ValueError, "query has shape (2, 8), expected (batch, heads, head_dim)", {"query": Q[:, 0, 0]}),
    (ValueError, "key_pages has shape (2, 6, 3, 8), expected (pages, page size, key heads, head_dim)",
     {"layout": "pages_first", "query": np.ones((2, 4, 9), np.float32)}),
    *((ValueError, f"key_pages has {pages} pages of {size} positions, expected at least one of each",
       dict.fromkeys(("key_pages", "value_pages"), np.ones((2, pages, size, 8)))) for pages, size in ((0, 3), (6, 0))),
    (ValueError, "value_pages has shape (2, 6, 9, 8)", {"value_pages": np.ones((2, 6, 9, 8))}),
    (TypeError, "block_tables has dtype float64, expected integers", {"block_tables": np.ones((2, 5))}),
    (ValueError, "has shape (3, 5), expected (2, entries)", {"block_tables": np.ones((3, 5), int)}),
    (ValueError, "lengths has shape (3,), expected (2,), a length", {"lengths": np.ones(3, int)}),
    (ValueError, "local_window_size=-1, expected one number of positions", {"local_window_size": -1}),
    (ValueError, "query has 3 heads and key_pages 2, expected a multiple of those. Pass layout=",
     {"query": Q[:, 0, :3]}),
    (ValueError, "query has 4 heads and key_pages 0, expected a multiple",
     dict.fromkeys(("key_pages", "value_pages"), np.ones((0, 6, 3, 8)))),
    (TypeError, "expected one dtype for all three", {"query": jnp.ones((2, 4, 8), jnp.bfloat16)}),
    (NotImplementedError, "mosaic_gpu", {"implementation": "mosaic_gpu"}),
]  # fmt: skip
LSE = Q[..., 0]
OF_MERGE_ATTENTION = [
    (ValueError, "got 0 outs and 0 lses, expected as many of each, and at least one", {"outs": [], "lses": []}),
    (ValueError, "got 2 outs and 1 lses", {"outs": [Q, Q]}),
    (TypeError, "outs are of int32, expected one dtype for all", {"outs": [Q.astype(int)]}),
    (TypeError, "outs are of float16, float32, expected one dtype", {"outs": [Q, Q.astype("f2")], "lses": [LSE] * 2}),
    (TypeError, "lses has dtype complex64, expected a real dtype", {"lses": [1j * LSE]}),
    (ValueError, "an output of shape (2, 5, 4, 8) and a logsumexp of shape (2, 4, 5), expected (2, 5, 4, 8), the first"
     " part's", {"lses": [np.swapaxes(LSE, 1, 2)]}),
    (ValueError, "an output of shape (1, 5, 4, 8)", {"outs": [Q, Q[:1]], "lses": [LSE, LSE[:1]]}),
    (ValueError, "expected (..., head_dim)", {"outs": [1.0], "lses": [1.0]}),
    (TypeError, "outs is of type str and makes no array of numbers", {"outs": ["out"], "lses": [1.0]}),
]  # fmt: skip
OF_ZIGZAG = [
    (ValueError, "multiple", {"axis": 0, "devices": 2}),
    (ValueError, "at least one", {"devices": 0}),
    (ValueError, "axis 2 is out", {"axis": 2}),
    (ValueError, "rounds=0", {"rounds": 0}),
]
OF_EXPLAIN = [
    (ValueError, "op='argmax', expected one of softmax, softmax_vjp", {"op": "argmax"}),
    (ValueError, "op=['softmax'], expected one of softmax, softmax_vjp", {"op": ["softmax"]}),
    (TypeError, "scale is 2.0, but logsumexp has no scale. Multiply x by it bef", {"op": "logsumexp", "scale": 2.0}),
    (TypeError, "but logsumexp has no scale. Multiply x by it bef", {"op": "logsumexp", "scale": np.ones(3)}),
    *((TypeError, f"device={device!r}, expected 'H100', 'H200', 'A100', 'B200', a pallas_kernels.hardware.Device, or N",
       {"device": device}) for device in ("V100", "", 3)),
    *((TypeError, f"{name} is given beside a function, expected no more than device and verbose. Pass {name} to what",
       {"x": np.exp, name: value}) for name, value in (("op", "top_k"), ("axis", 0), ("scale", 2.0), ("k", 3))),
    *((TypeError, f"x is a {type(shape).__name__}, expected an array or a jax.ShapeDtypeStruct. Pass jax.ShapeDtypeSt",
       {"x": shape}) for shape in ((8, 128), [8, 128])),
]  # fmt: skip
OF_EXPLAIN_ATTENTION = [
    (TypeError, "device=3, expected 'H100', 'H200', 'A100', 'B200', a pallas_kernels", {"device": 3}),
    (ValueError, "op='backward', expected one of forward, vjp, jvp. Did you mean 'vjp'?", {"op": "backward"}),
]
LABELS, QKV = np.array([0, 1]), {"query": Q, "key": K, "value": K}
TOKENS = {"hidden": X, "weight": np.zeros((3, 4), np.float32), "labels": LABELS}
PAGES = dict.fromkeys(("key_pages", "value_pages"), np.zeros((2, 6, 3, 8), np.float32))
PAGED = {"query": Q[:, 0], "block_tables": np.zeros((2, 5), int), "lengths": LABELS} | PAGES
PIECES = {"x": np.ones((6, 8)), "axis": 1, "devices": 1}
MESSAGES: dict[str, tuple[dict[str, Any], list[tuple[type[Exception], str, dict[str, Any]]]]] = {
    "softmax": ({"x": X}, OF_ROWS),
    "log_softmax": ({"x": X}, OF_ROWS),
    "logsumexp": ({"a": X}, OF_LOGSUMEXP),
    "softmax_cross_entropy": ({"logits": X, "labels": X}, OF_PROBABILITIES),
    "softmax_cross_entropy_with_integer_labels": ({"logits": X, "labels": LABELS}, OF_LABELS),
    "top_k_softmax": ({"logits": X, "k": 2}, OF_TOP_K),
    "flash_attention": (QKV, OF_ATTENTION),
    "paged_attention": (PAGED, OF_PAGES),
    "merge_attention": ({"outs": [Q], "lses": [LSE]}, OF_MERGE_ATTENTION),
    "linear_cross_entropy": (TOKENS, OF_TOKENS),
    "zigzag": (PIECES, OF_ZIGZAG),
    "unzigzag": (PIECES, OF_ZIGZAG),
    "explain": ({"x": X}, OF_EXPLAIN),
    "explain_attention": (QKV, OF_EXPLAIN_ATTENTION),
    "explain_linear_cross_entropy": (TOKENS, OF_EXPLAIN_ATTENTION),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_arguments(name: str) -> None:
    usual, cases = MESSAGES[name]
    for error, text, arguments in cases:
        with pytest.raises(error, match=f"^{name}: .*{re.escape(text)}"):
            getattr(jaxsoftmax, name)(**usual | arguments)


def test_what_is_traced() -> None:
    for call, text in (
        (lambda n: jaxsoftmax.logsumexp(X, n), "logsumexp: axis is JitTracer"),
        (lambda n: jaxsoftmax.top_k_softmax(X, n), "top_k_softmax: k is JitTracer.*, expected one integer"),
    ):
        with pytest.raises(TypeError, match=f"^{text}.* static argument"):
            jax.jit(call)(1)


def test_merge() -> None:
    with pytest.raises(ValueError, match="merge: got no states"):
        jaxsoftmax.merge()
    state = jaxsoftmax.Stats(X, X)
    for wrong in ([state, state], (state, state), (X, X, X), X):
        with pytest.raises(TypeError, match=rf"merge: got a {type(wrong).__name__}, .* Pass .* as merge\(\*states\)"):
            jaxsoftmax.merge(wrong)
    with pytest.raises(TypeError, match="merge: sum has dtype complex64, expected a real dtype"):
        jaxsoftmax.merge(state, (X, 1j * X))
    with pytest.raises(ValueError, match=r"merge: .* the shapes \(2, 3\), \(2, 3\), \(2,\), \(2,\), expected shapes"):
        jaxsoftmax.merge(state, (X[:, 0], X[:, 0]))
    for wrong in (X, (X, X, X), [state]):
        with pytest.raises(TypeError, match=f"^log_normalizer: got a {type(wrong).__name__}, expected a Stats"):
            jaxsoftmax.log_normalizer(wrong)


def test_lists_of_traced_numbers() -> None:
    @jax.jit
    def function(a: jax.Array, b: jax.Array) -> Any:
        where, scale = [a > 0, b > 5], [a, b]
        return jaxsoftmax.softmax([a, b], where=where, scale=scale), jaxsoftmax.logsumexp([[a], [b]], 0, [[b], [a]])

    np.testing.assert_allclose(function(1.0, 2.0)[0], [1, 0])
    np.testing.assert_allclose(function(1.0, 2.0)[1], [np.log(2 * np.e + np.e**2)], rtol=1e-6)


CALLS: dict[str, Any] = {
    "softmax": jaxsoftmax.softmax,
    "log_softmax": jaxsoftmax.log_softmax,
    "logsumexp": jaxsoftmax.logsumexp,
    "top_k_softmax": lambda x, **options: jaxsoftmax.top_k_softmax(x, 2, **options),
    "softmax_cross_entropy": lambda x, **options: jaxsoftmax.softmax_cross_entropy(x, x, **options),
    "softmax_cross_entropy_with_integer_labels": lambda x, **options: (
        jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, LABELS, **options)
    ),
    "flash_attention": lambda x, **options: jaxsoftmax.flash_attention(*[x[:, None, None]] * 3, **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_named_kernel_on_another_platform(name: str) -> None:
    named = functools.partial(CALLS[name], implementation="mosaic_gpu")
    for run in (jax.jit(named), named):
        with pytest.raises(NotImplementedError, match="lowered for a platform other than cuda"):
            run(X)
    jax.make_jaxpr(named)(X)


@pytest.mark.parametrize("name", CALLS)
def test_a_named_kernel_never_falls_back(stand_ins: Any, name: str) -> None:
    """What is missing is an error of the function that was called."""
    named = functools.partial(CALLS[name], implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=f"^{name}: implementation='mosaic_gpu' was asked for, but this comp"):
        jax.jit(named).trace(X).lower(lowering_platforms=("tpu",))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), named(X), CALLS[name](X))
    stand_ins.accepts = lambda _: False
    which = "attention" if name == "flash_attention" else "first"
    with pytest.raises(NotImplementedError, match=rf"^{name}: implementation='mosaic_gpu' was asked for, but no kernel"
                       rf" takes this call:\n  {which}: it is not for this"):  # fmt: skip
        named(X[:, :2])
    if name in ("softmax", "flash_attention"):
        with pytest.raises(NotImplementedError, match="symbolic or zero"):
            named(X[:0])


def test_a_missing_kernel_of_a_derivative(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: not problem.op.is_linear
    for name in ("softmax", "log_softmax"):
        with pytest.raises(NotImplementedError, match=f"^the derivative of {name}: implementation='mosaic_gpu' was"):
            jax.grad(lambda x, name=name: CALLS[name](x, implementation="mosaic_gpu")[0, 0])(X)


def test_every_operand_has_a_row_a_check_and_an_argument() -> None:
    assert set(OPERANDS) == set(RANK) == {*Operands._fields, "out", "lse"}
    drawn = {"keep"}  # by `flash_attention`, for dropout
    instead_of_rules = {"window_sizes", "cap"}
    by_axes = {*Operands._fields} - {"query", "key", "value"} - drawn - instead_of_rules - set(CHECKS)
    assert all(OPERANDS[name].is_differentiable and set(OPERANDS[name].axes) <= set(_EACH) for name in by_axes)
    arguments = {OPERANDS[name].argument or name for name in Operands._fields if name not in drawn}
    assert arguments <= set(inspect.signature(jaxsoftmax.flash_attention).parameters)
