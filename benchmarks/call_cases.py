"""Which calls of `benchmarks.calls` are measured, apart from the table of rows.

`chains` has softmax and log_softmax alone, on few rows and along other axes, and within what XLA would fuse with them.
`first` has ten calls whose cost before the first result is measured. `sample` has random calls of all public functions
that compute something: dtypes, shapes, axes, options and passes.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks import cases
from benchmarks.calls import CallCase
from benchmarks.cases import LONG_DTYPES

PASSES = cases.PASSES
_LOGITS = ((8192, 50257), (4096, 128256))
_SCALARS = "one_hot_loss entropy distillation divergence taken_loss"
_AXES = (((64, 4096, 512), 1), ((4096, 32768), 0), ((32, 19, 512, 512), 1))
_SWEEP = (256, 1000, 1024, 4096, 8192, 16384, 24576, 32768, 50257, 65536, 131072, 262144)
_SWEPT_BYTES = 2**26
_FEW = ((55, 195705), (124, 511), (1187, 3024))
_LAST = {"axis": -1}  # a name of its own beside the table of rows
# Operations, passes, dtypes, shapes, and options.
_CHAINS: tuple[tuple[Any, ...], ...] = (
    (_SCALARS, "fwd value_and_grad", "bf16", (*_LOGITS, (16384, 1000)), {}),
    ("softmax log_softmax", "fwd value_and_vjp", "bf16", _LOGITS, _LAST),
    ("log_softmax", "value_and_grad", "bf16", _LOGITS, {}),
    ("attention_by_hand", "fwd value_and_vjp", "bf16", [(8, 16, 1024, 64), (2, 8, 4096, 128)], {}),
    ("sinkhorn", "fwd value_and_vjp", "f32", [(4096, 4096)], {}),
    *(("softmax log_softmax", "fwd value_and_vjp", "bf16", [shape], {"axis": axis}) for shape, axis in _AXES),
    *(
        ("log_softmax", "fwd value_and_vjp", dtype, [(_SWEPT_BYTES // size // cols, cols) for cols in _SWEEP], {})
        for dtype, size in (("bf16", 2), ("f32", 4))
    ),
    ("softmax", "value_and_vjp", "bf16 f32", [(686, 228), (25, 372), (18, 134), (23667, 14)], {}),
    ("log_softmax", "value_and_vjp value_and_grad", "bf16 f32", _FEW, {}),
    ("log_softmax", "fwd value_and_vjp", "bf16", [(1024, 1000), (128, 8192), (8, 131072)], {}),
    ("top_k_softmax", "fwd", "bf16", [(256, 128), (16384, 64), (65536, 256)], {"k": 8}),
)


def chains(*_: int) -> Iterator[CallCase]:
    for ops, passes, dtypes, shapes, options in _CHAINS:
        for op, pass_, dtype, shape in itertools.product(ops.split(), passes.split(), dtypes.split(), shapes):
            yield CallCase(op, pass_, LONG_DTYPES[dtype], shape, frozenset({"chains"}), (*options.items(),))


_LONG = (2, 2048, 2048, 16, 16, 128)
_CAUSAL = {"is_causal": True}
# Operations, passes, shapes, options and operands by name.
_FIRST: tuple[tuple[Any, ...], ...] = (
    ("flash_attention", "fwd", _LONG, _CAUSAL, ()),
    ("flash_attention", "value_and_vjp", _LONG, _CAUSAL, ()),
    ("flash_attention", "value_and_vjp", _LONG, _CAUSAL, ("query_segment_ids",)),
    ("flash_attention", "fwd", (8, 1, 8192, 32, 8, 128), {}, ()),
    ("paged_attention", "fwd", (32, 32, 8, 64, 64, 128), {}, ()),
    ("linear_cross_entropy", "value_and_grad", (8192, 2048, 50257), {}, ()),
    ("softmax_cross_entropy_with_integer_labels", "value_and_grad", _LOGITS[0], {}, ()),
    ("softmax", "fwd", _LOGITS[0], _LAST, ()),
    ("log_softmax", "fwd", _LOGITS[0], _LAST, ()),
    ("top_k_softmax", "fwd", _LOGITS[0], {"k": 8}, ()),
)


def first(*_: int) -> Iterator[CallCase]:
    for op, pass_, shape, options, extras in _FIRST:
        yield CallCase(op, pass_, "bfloat16", shape, frozenset({"first"}), (*options.items(),), extras)


_SAMPLED_BYTES = 2**27  # of the largest operand
_SCORES = 2**28  # of attention, of all heads
_FLOPS = 2e12  # of one product of a loss
_SOME = 0.15  # of the calls have an option

Drawn = tuple[tuple[int, ...], str, dict[str, Any], tuple[str, ...]]  # shape, pass, options, operands by name


def _uniform(rng: random.Random, least: float, most: float) -> int:
    """Log-uniform; one in three is rounded to two binary digits, as sizes that programs choose are."""
    size = 2 ** rng.uniform(math.log2(least), math.log2(max(least, most)))
    if rng.random() < 1 / 3:
        unit = 2 ** max(0, math.floor(math.log2(size)) - 1)
        size = max(least, size // unit * unit)
    return round(size)


def _shape_of_rows(rng: random.Random, itemsize: int, least: int) -> tuple[int, int]:
    elements = _uniform(rng, 2**10, _SAMPLED_BYTES // itemsize)
    cols = min(elements, _uniform(rng, least, 2**18))
    return max(1, elements // cols), cols


def _some(rng: random.Random, **options: Any) -> dict[str, Any]:
    """Each option in some of the calls."""
    return {name: value for name, value in options.items() if rng.random() < _SOME}


def _of_rows(takes_scale: bool, takes_where: str) -> Callable[[random.Random, int], Drawn]:
    def draw(rng: random.Random, itemsize: int) -> Drawn:
        rows, cols = _shape_of_rows(rng, itemsize, 2)
        pass_ = rng.choice(("fwd", "value_and_vjp"))
        after = min(rows, _uniform(rng, 1, 4096)) if rng.random() < 0.3 else 0
        shape, axis = ((rows // after, cols, after), 1) if after else ((rows, cols), -1)
        options = _some(rng, scale=0.5) if takes_scale else {}
        extras = _some(rng, where=None) if pass_ in takes_where else {}
        return shape, pass_, {"axis": axis, **options}, tuple(extras)

    return draw


def _top_k(rng: random.Random, itemsize: int) -> Drawn:
    normalize = {"normalize": "top_k"} if rng.random() < 0.3 else {}
    return _shape_of_rows(rng, itemsize, 64), "fwd", {"k": rng.choice((1, 2, 8, 50)), **normalize}, ()


def _soft_loss(rng: random.Random, itemsize: int) -> Drawn:
    return _shape_of_rows(rng, itemsize, 2), rng.choice(("fwd", "value_and_grad")), {}, ()


def _loss_options(rng: random.Random) -> dict[str, Any]:
    options = _some(rng, label_smoothing=0.1, z_loss=1e-4, logits_soft_cap=30.0, ignore_index=-100)
    return options | ({"reduction": "mean"} if rng.random() < 0.3 else {})


def _integer_loss(rng: random.Random, itemsize: int) -> Drawn:
    shape = _shape_of_rows(rng, itemsize, 2)
    return shape, rng.choice(("fwd", "value_and_grad")), _loss_options(rng), ()


def _linear_loss(rng: random.Random, itemsize: int) -> Drawn:
    tokens, features, columns = _uniform(rng, 64, 16384), 8 * _uniform(rng, 8, 512), _uniform(rng, 1000, 2**17)
    columns = min(columns, _SAMPLED_BYTES // (features * itemsize), int(_FLOPS / (2 * tokens * features)))
    columns = min(columns, 2**31 // (4 * tokens))  # of the logits, in float32
    return (tokens, features, columns), rng.choice(("fwd", "value_and_grad")), _loss_options(rng), ()


def _heads(rng: random.Random) -> tuple[int, int, int]:
    key_heads, group = _uniform(rng, 1, 16), rng.choice((1, 1, 2, 4, 8))
    return key_heads * group, key_heads, rng.choice((64, 128, rng.randrange(32, 257, 8)))


def _attention(rng: random.Random, itemsize: int) -> Drawn:
    """Gradients are not drawn of fewer than 8 queries or keys: they may be too small a sum for the gate, or zero."""
    keys = _uniform(rng, 1, 16384)
    queries = keys if rng.random() < 0.7 else _uniform(rng, 1, 16384)
    batch, (heads, key_heads, dim) = _uniform(rng, 1, 64), _heads(rng)
    most = min(_SCORES // (queries * keys), _SAMPLED_BYTES // (max(queries, keys) * dim * itemsize))
    while batch * heads > max(1, most):
        group = heads // key_heads
        batch, key_heads, group = (batch // 2, key_heads, group) if batch > 1 else (1, key_heads // 2, group)
        key_heads, group = (1, 1) if key_heads == 0 else (key_heads, group)
        heads = key_heads * group
    shape = batch, queries, keys, heads, key_heads, dim
    kinds: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "full": ({}, ()),
        "causal": ({"is_causal": True}, ()),
        "lengths": ({}, ("key_value_seq_lengths",)),
        "mask": ({}, ("mask",)),
        "bias": ({}, ("bias",)),
        "window": ({"is_causal": True, "local_window_size": (_uniform(rng, 1, keys), 0)}, ()),
        "dropout": ({"dropout_rate": 0.1, "is_causal": rng.random() < 0.5}, ("dropout_rng",)),
    }
    kind = rng.choices([*kinds], (25, 30, 10, 8, 8, 12, 7))[0]
    sees_none = kind == "window" and queries > keys  # the last queries would see no key
    pairs = queries * keys * {"mask": batch, "bias": heads * itemsize}.get(kind, 0)
    kind = "causal" if sees_none else "full" if pairs > _SAMPLED_BYTES else kind
    options, extras = kinds[kind]
    if kind != "dropout":
        options = options | _some(rng, scale=0.1)
    pass_ = rng.choice(("fwd", "value_and_vjp")) if min(queries, keys) >= 8 else "fwd"
    return shape, pass_, options, extras


def _pages(rng: random.Random, itemsize: int) -> Drawn:
    heads, key_heads, dim = _heads(rng)
    batch, size = _uniform(rng, 1, 128), rng.choice((16, 64, 128))
    entries = _uniform(
        rng, 1, max(1, min(2**17 // size, _SAMPLED_BYTES // (batch * key_heads * size * dim * itemsize)))
    )
    return (batch, heads, key_heads, entries, size, dim), "fwd", {}, ()


# How each function is drawn, and how often of a hundred.
_DRAWS: dict[str, tuple[Callable[[random.Random, int], Drawn], int]] = {
    "softmax": (_of_rows(True, "fwd value_and_vjp"), 18),
    "log_softmax": (_of_rows(True, ""), 14),
    "logsumexp": (_of_rows(False, "fwd value_and_vjp"), 10),
    "softmax_cross_entropy_with_integer_labels": (_integer_loss, 14),
    "softmax_cross_entropy": (_soft_loss, 5),
    "linear_cross_entropy": (_linear_loss, 8),
    "top_k_softmax": (_top_k, 7),
    "flash_attention": (_attention, 19),
    "paged_attention": (_pages, 5),
}


def sample(count: int, seed: int) -> tuple[CallCase, ...]:
    """Random calls, the same for the same seed; more of them begin with the fewer."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        op = rng.choices([*_DRAWS], [share for _, share in _DRAWS.values()])[0]
        dtype = rng.choice(("float32", "bfloat16", "bfloat16", "float16"))
        shape, pass_, options, extras = _DRAWS[op][0](rng, jnp.dtype(dtype).itemsize)
        case = CallCase(op, pass_, dtype, shape, frozenset({"sample"}), tuple(options.items()), extras)
        found[case.name] = case
    return tuple(found.values())


TABLE = cases.Table(
    lambda: cases.TABLE.cases, {**cases.TABLE.apart, "chains": chains, "first": first, "sample": sample}
)
