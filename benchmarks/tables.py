"""Which cases of rows and of calls are measured.

Tags of rows: `core` (under two minutes on an H100), `standard` (all that the README's claims need), `extended` (more
dtypes), `smoke` (what a CPU runs by default), `ladder` (the widths of docs/ladder.md), `sweep` (bandwidth against N),
`hot` (the working set fits in L2 and buffers are not rotated), `cross_entropy` and `top_k` (a run each, beside
`standard`), and one per source. These are measured only where they are asked for: `invariance` (what
`jaxsoftmax.batch_invariant()` costs), `chains` (softmax and log_softmax alone, on few rows and along other axes, and
within what XLA would fuse with them), `first` (ten calls whose cost before the first result is measured) and `sample`
(random calls of all public functions that compute something: dtypes, shapes, axes, options and passes).
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks.cases import LONG_DTYPES, VARIANTS, Case, Table

_OWN_RUNS = {"cross_entropy", "top_k", "extended", "invariance"}  # tags of cases that are not "standard"

# Rows that give every width at least 64 MB in 16 bits (128 MB moved), by the width.
SWEEP = {256: 262144, 512: 262144, 1024: 32768, 2048: 32768, 4096: 32768, 8192: 16384, 16384: 8192, 32768: 4096}
SWEEP |= {65536: 4096, 131072: 4096, 262144: 2048}
HTILE = (
    *((32768, n) for n in (1024, 2048, 4096, 6144)),
    *((m, n) for n in (8192, 16384) for m in (4096, 8192, 16384)),
    *((4096, n) for n in (32768, 65536, 131072)),
)
VOCABULARIES = {32000: ("Llama-2", 8192), 50257: ("GPT-2", 8192), 128256: ("Llama-3", 8192), 151936: ("Qwen", 4096)}
TOP_K = ("k1", "k8", "k64")
_SWEPT = [(rows, cols) for cols, rows in SWEEP.items()]
_LOSSES = [(8192, 32000), (8192, 50257), (8192, 128256), (4096, 151936), (4096, 262144)]
# An operation, its passes, dtypes, shapes as rows and columns, the source, tags and variants.
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("softmax", "fwd", "f16 bf16 f32", _SWEPT, "powers of two", "sweep"),
    ("softmax", "fwd", "f16", HTILE, "HTile", "htile"),
    ("softmax", "fwd", "f32", [(8765, 4096)], "MSRA", "msra"),
    ("softmax", "fwd", "f32", [(128, 1024), (128, 16384)], "FastSoftmax", "fastsoftmax hot"),
    ("softmax", "fwd", "f32", [(128, 131072)], "FastSoftmax", "fastsoftmax"),
    *(
        ("softmax", "fwd", dtypes, [(rows, cols)], f"{model} vocabulary", tags)
        for cols, (model, rows) in VOCABULARIES.items()
        for dtypes, tags in (("bf16", "vocab"), ("f16 f32", "vocab extended"))
    ),
    ("softmax", "fwd", "bf16", [(8192, 50176)], "aligned neighbour of 50257", "vocab ragged"),
    ("softmax", "fwd", "f16 f32", [(65536, 1000), (65536, 1001)], "odd widths", "ragged"),
    ("softmax", "fwd", "f16 f32", [(64, 1048576)], "one-million rows", "long"),
    ("softmax", "fwd", "f16", [(4096, 1048576)], "one-million rows", "long"),
    ("softmax", "fwd", "f32", [(1, 131072), (16, 131072), (64, 131072)], "few rows", "few_rows hot"),
    ("softmax", "call", "f32", [(8, 128)], "call overhead", "latency hot"),
    ("softmax", "bwd", "f16", _SWEPT[2:], "powers of two", "sweep"),
    ("softmax", "bwd", "bf16", _SWEPT[2:], "powers of two", "sweep extended"),
    ("softmax", "bwd", "f32", _SWEPT[2:], "powers of two", "sweep"),
    *(
        ("softmax", "value_and_vjp", "bf16", [(rows, cols)], "training step", "training")
        for rows, cols in ((32768, 4096), (4096, 32768), (4096, 131072), (8192, 128256))
    ),
    *(
        (op, "fwd", dtype, shapes, "losses", "losses")
        for op in ("log_softmax", "logsumexp")
        for dtype, shapes in (("bf16", [(32768, 4096), (8192, 128256)]), ("f32", [(4096, 131072)]))
    ),
    ("log_softmax", "bwd", "bf16", [(8192, 128256)], "losses", "losses"),
    ("log_softmax", "value_and_vjp", "bf16", [(32768, 4096)], "losses", "losses"),
    ("cross_entropy", "fwd value_and_grad value_and_grad_mean", "bf16", _LOSSES, "losses over vocabularies",
     "cross_entropy"),
    *(
        ("cross_entropy", pass_, *rest)
        for pass_ in ("fwd", "value_and_grad")
        for rest in (
            ("f16 f32", [(8192, 128256)], "losses over vocabularies", "extended"),
            ("bf16", [(8192, 128256)], "losses over vocabularies", "extended", "smoothed_capped", "half_ignored"),
            ("bf16", [(64, 128256)], "few rows", "extended hot"),
        )
    ),
    *(
        ("top_k", "fwd", "bf16", shapes, "sampling", tags, *TOP_K)
        for cols, most in ((32000, 8192), (128256, 8192), (262144, 4096))
        for shapes, tags in (([(1, cols), (64, cols)], "top_k hot"), ([(most, cols)], "top_k"))
    ),
)  # fmt: skip
# Few rows and many of the same length, where the choice without it differs.
_INVARIANT_ROWS: tuple[tuple[Any, ...], ...] = (
    ("softmax", "fwd", "bf16", [(1, 128256), (16, 128256), (256, 128256), (4096, 128256), (64, 4096), (65536, 4096)],
     "batch invariance", "invariance"),
    *(
        (op, pass_, "bf16", [(rows, 128256)], "batch invariance", "invariance")
        for rows in (16, 4096)
        for op, pass_ in (("logsumexp", "fwd"), ("cross_entropy", "value_and_grad"))
    ),
    ("top_k", "fwd", "bf16", [(1, 128256), (256, 128256)], "batch invariance", "invariance", "k8"),
    ("softmax", "fwd", "bf16", [(4096, 4096)], "batch invariance", "invariance", "axis0"),
)  # fmt: skip
# More tags, and the cases of the table above that have them.
_TAGGED = {
    "core": {
        "softmax_fwd_f16": "32768x1024 32768x4096 8192x16384 4096x32768 4096x131072 2048x262144 64x1048576",
        "softmax_fwd_bf16": "262144x256 16384x8192 4096x65536 8192x50257 8192x128256 8192x50176",
        "softmax_fwd_f32": "32768x1024 16384x8192 4096x32768 4096x131072 8765x4096 1x131072 16x131072 64x131072",
        "softmax_call_f32": "8x128",
        "softmax_bwd_f16": "32768x4096 4096x32768 2048x262144",
        "softmax_value_and_vjp_bf16": "32768x4096 8192x128256",
        "log_softmax_fwd_bf16": "32768x4096",
        "logsumexp_fwd_bf16": "32768x4096",
    },
    "smoke": {
        **{f"softmax_fwd_{dtype}": "32768x1024" for dtype in ("f16", "f32")},
        "softmax_fwd_bf16": "32768x1024 8192x32000 8192x50257 8192x128256 4096x151936",
        "softmax_call_f32": "8x128",
        "softmax_bwd_f32": "32768x4096",
        "softmax_value_and_vjp_bf16": "32768x4096",
        **{f"{op}_fwd_bf16": "32768x4096" for op in ("log_softmax", "logsumexp")},
        **{f"cross_entropy_{pass_}_bf16": "8192x32000" for pass_ in ("fwd", "value_and_grad", "value_and_grad_mean")},
        "top_k_fwd_bf16": "64x32000_k8",
    },
    "ladder": dict.fromkeys(
        ("softmax_fwd_f16", "softmax_fwd_f32", "softmax_bwd_f16"),
        "32768x1024 32768x4096 8192x16384 4096x32768 4096x131072 2048x262144",
    ),
}


def _of_rows(table: Iterable[tuple[Any, ...]]) -> Iterator[Case]:
    for op, passes, dtypes, shapes, source, words, *variants in table:
        tags = {*words.split()}
        tags |= set() if tags & _OWN_RUNS else {"standard"}
        chosen = itertools.product(passes.split(), dtypes.split(), shapes, variants or [""])
        for pass_, dtype, shape, variant in chosen:
            facts = LONG_DTYPES[dtype], shape, frozenset(tags), VARIANTS[variant]
            yield Case(op, pass_, *facts, source=source)


def _declared() -> Iterator[Case]:
    for case in _of_rows(_ROWS):
        start, _, shape = case.name.partition(f"_{case.rows}x")
        tags = {tag for tag, of_tag in _TAGGED.items() if f"{case.rows}x{shape}" in of_tag.get(start, "").split()}
        yield dataclasses.replace(case, tags=case.tags | tags)


_LOGITS = ((8192, 50257), (4096, 128256))
_SCALARS = "one_hot_loss entropy distillation divergence taken_loss"
_AXES = (((64, 4096, 512), 1), ((4096, 32768), 0), ((32, 19, 512, 512), 1))
_SWEEP = (256, 1000, 1024, 4096, 8192, 16384, 24576, 32768, 50257, 65536, 131072, 262144)
_SWEPT_BYTES = 2**26
_FEW = ((55, 195705), (124, 511), (1187, 3024))
_LAST = {"axis": -1}  # a name of its own beside the table of rows
# Operations, passes, dtypes, shapes, options, and operands by name.
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


_LONG = (2, 2048, 2048, 16, 16, 128)
_CAUSAL = {"is_causal": True}
_FIRST: tuple[tuple[Any, ...], ...] = (
    ("flash_attention", "fwd value_and_vjp", "bf16", [_LONG], _CAUSAL),
    ("flash_attention", "value_and_vjp", "bf16", [_LONG], _CAUSAL, "query_segment_ids"),
    ("flash_attention", "fwd", "bf16", [(8, 1, 8192, 32, 8, 128)], {}),
    ("paged_attention", "fwd", "bf16", [(32, 32, 8, 64, 64, 128)], {}),
    ("linear_cross_entropy", "value_and_grad", "bf16", [(8192, 2048, 50257)], {}),
    ("softmax_cross_entropy_with_integer_labels", "value_and_grad", "bf16", _LOGITS[:1], {}),
    ("softmax log_softmax", "fwd", "bf16", _LOGITS[:1], _LAST),
    ("top_k_softmax", "fwd", "bf16", _LOGITS[:1], {"k": 8}),
)


def _cases(rows: Iterable[tuple[Any, ...]], tag: str) -> Iterator[Case]:
    for ops, passes, dtypes, shapes, options, *extras in rows:
        for op, pass_, dtype, shape in itertools.product(ops.split(), passes.split(), dtypes.split(), shapes):
            facts = frozenset({tag}), (*options.items(),), tuple(extras)
            yield Case(op, pass_, LONG_DTYPES[dtype], shape, *facts)


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


def _drawn_rows(takes_scale: bool, takes_where: str) -> Callable[[random.Random, int], Drawn]:
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
    "softmax": (_drawn_rows(True, "fwd value_and_vjp"), 18),
    "log_softmax": (_drawn_rows(True, ""), 14),
    "logsumexp": (_drawn_rows(False, "fwd value_and_vjp"), 10),
    "softmax_cross_entropy_with_integer_labels": (_integer_loss, 14),
    "softmax_cross_entropy": (_soft_loss, 5),
    "linear_cross_entropy": (_linear_loss, 8),
    "top_k_softmax": (_top_k, 7),
    "flash_attention": (_attention, 19),
    "paged_attention": (_pages, 5),
}


def sample(count: int, seed: int) -> tuple[Case, ...]:
    """Random calls, the same for the same seed; more of them begin with the fewer."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        op = rng.choices([*_DRAWS], [share for _, share in _DRAWS.values()])[0]
        dtype = rng.choice(("float32", "bfloat16", "bfloat16", "float16"))
        shape, pass_, options, extras = _DRAWS[op][0](rng, jnp.dtype(dtype).itemsize)
        case = Case(op, pass_, dtype, shape, frozenset({"sample"}), tuple(options.items()), extras)
        found[case.name] = case
    return tuple(found.values())


ROWS = Table(_declared, {"invariance": lambda *_: _of_rows(_INVARIANT_ROWS)})
_APART = {"chains": lambda *_: _cases(_CHAINS, "chains"), "first": lambda *_: _cases(_FIRST, "first"), "sample": sample}
TABLE = Table(lambda: ROWS.cases, {**ROWS.apart, **_APART})
