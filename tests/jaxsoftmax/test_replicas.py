"""Values over devices, of operands that differ by orders of magnitude, are sharded unlike each other or are shared.

Every device has the same, and the truth.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxsoftmax import linear_cross_entropy
from tests.jaxsoftmax.calls import CALLS, MORE_CALLS, QKV, SHARED_CALLS, Operands
from tests.jaxsoftmax.sharded import mesh, put

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
EAGER = "eager"  # and explicit
FACTORS = np.repeat([1e-4, 30.0, 1e3, 1e-2], 2)  # of the cotangents of four devices
OPERANDS_FACTORS = np.sqrt(FACTORS)  # by the square logits would be so large that float32 rounds probabilities by 7 %
ALL = CALLS | MORE_CALLS | SHARED_CALLS
D, M, COLUMNS, ACROSS, HEADS = P("d"), P("m"), P(None, None, "d"), P(None, "d"), P("d", None, "m")
TOKENS = dict.fromkeys(("hidden", "labels", "weights", "scale"), D)
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
CASES: list[tuple[str, Any, Any, dict[str, P]]] = [
    ("softmax", F16, EXPLICIT, {"x": COLUMNS}),
    ("softmax of rows scaled", F16, EXPLICIT, {"x": D}),
    ("log_softmax", BF16, AUTO, {"x": COLUMNS}),
    ("logsumexp with weights", F16, EXPLICIT, {"a": D}),
    ("cross_entropy", F16, EXPLICIT, {"logits": COLUMNS}),
    ("weighted", F32, EXPLICIT, {"logits": COLUMNS}),
    ("probabilities", F16, AUTO, {"logits": COLUMNS}),
    ("linear", F16, AUTO, TOKENS),
    ("linear", F32, EXPLICIT, {"weight": P(None, "d"), "bias": D}),
    ("weighted linear", F16, EXPLICIT, TOKENS),
    ("weighted linear", BF16, AUTO, TOKENS),
    ("weighted linear", F16, AUTO, {"weight": D}),
    ("top_k", BF16, EXPLICIT, {"logits": COLUMNS}),
    ("more attention", F16, EXPLICIT, {"query": D}),
    ("more attention", F32, AUTO, dict.fromkeys(QKV, D)),
    ("more attention", BF16, EXPLICIT, dict.fromkeys(QKV, P(None, "m"))),
    # Operands that are sharded unlike each other.
    ("softmax of rows scaled", F32, EXPLICIT, {"x": P("d", "m"), "scale": D}),
    ("logsumexp", F32, EAGER, {"a": HEADS, "where": M}),
    ("logsumexp with weights", F32, EXPLICIT, {"a": D, "b": D}),
    ("cross_entropy", F32, EXPLICIT, {"logits": D, "labels": P("m", "d"), "where": M}),
    ("few labels", F32, EAGER, {"logits": M, "labels": D, "weights": ACROSS, "where": COLUMNS}),
    ("few labels", F32, AUTO, {"logits": M, "labels": D, "weights": ACROSS, "where": COLUMNS}),
    ("probabilities", F32, EXPLICIT, {"logits": D, "labels": COLUMNS}),
    ("few tokens", F32, EXPLICIT, {"hidden": D, "labels": M, "weights": M, "where": M, "weight": P("m", "d")}),
    ("weighted linear", F32, EAGER, {"hidden": D, "labels": P("m", "d"), "scale": M, "weight": M}),
    ("pages", F32, AUTO, {"query": D, "block_tables": M, "lengths": P(("d", "m"))}),
    ("pages", F32, EAGER, {"query": M, "key_pages": COLUMNS, "block_tables": D, "lengths": M}),
    ("scaled heads", F32, EXPLICIT, {"query": D, "key": M, "value": P(None, "m"), "scale": D}),
    ("merged", F32, EXPLICIT, {"out": P(None, None, "m"), "other": M, "part": M}),
    ("states", F32, EXPLICIT, {"a": D, "b": ACROSS, "c": M, "d": ACROSS}),
    # What all devices have, and its gradient is the sum of theirs.
    *(("numbers", F32, kind, {"logits": D, "labels": D}) for kind in (AUTO, EXPLICIT)),
    *(("numbers of tokens", F32, kind, {"hidden": D, "labels": D, "weight": ACROSS}) for kind in (AUTO, EXPLICIT)),
    *(("capped attention", F32, kind, dict.fromkeys(QKV, P("d", "m"))) for kind in (AUTO, EXPLICIT)),
    ("capped attention", F32, EXPLICIT, dict.fromkeys(QKV, M)),
    ("shared bias", F32, AUTO, {"query": HEADS, "sinks": M}),
]
NOT_MOVED = "query", "key", "b", "d"  # whose exponentials would be too large for any dtype


def _cast(operands: Operands, dtype: Any) -> Operands:
    return {n: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in operands.items()}


def _results(name: str, operands: Operands, by_ct: jax.Array | None) -> dict[str, Any]:
    """Results and gradients, for cotangents whose factors are those of the first axis; without, for the results."""
    call, fixed = ALL[name]
    moving = {n: x for n, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    found, pull = jax.vjp(lambda moving: call(**{n: (operands | moving)[n] for n in fixed}), moving)

    def cotangent(y: jax.Array) -> jax.Array:
        if by_ct is None:
            return jnp.where(jnp.isfinite(y), y, 0)
        terms = jnp.cos(jnp.arange(1.0 * y.size)).reshape(y.shape) * by_ct.reshape(-1, *[1] * (y.ndim - 1))
        return jnp.where(jnp.isfinite(y), terms, 0).astype(y.dtype)

    return {"results": found, "gradient": pull(jax.tree.map(cotangent, found))[0]}


@functools.cache
def _compiled(name: str) -> Any:
    return jax.jit(functools.partial(_results, name))


def _by_device(spec: P, x: jax.Array) -> jax.Array:
    """`x` times the factors of the devices that have it."""
    at = next(d for d, entry in enumerate(spec) if entry)
    factors = np.repeat(OPERANDS_FACTORS, 8)[:: 64 // x.shape[at]][: x.shape[at]]
    return (x * factors.reshape([-1 if d == at else 1 for d in range(x.ndim)])).astype(x.dtype)


@pytest.mark.parametrize("name, dtype, kind, specs", CASES, ids=str)
def test_replicas(name: str, dtype: Any, kind: Any, specs: dict[str, P], request: pytest.FixtureRequest) -> None:
    if name == "shared bias":  # which kernels alone leave to a rule of this library
        request.getfixturevalue("stand_ins")
    operands = _cast(ALL[name][1], dtype)
    specs = {n: spec for n, spec in specs.items() if n in operands}
    moved = [n for n in specs if jnp.issubdtype(operands[n].dtype, jnp.floating) and n not in NOT_MOVED]
    run, on = _compiled(name), mesh(EXPLICIT if kind is EAGER else kind)
    sharded = functools.partial(_results, name) if kind is EAGER else run
    for factors, cts in (({}, None),) if kind is EAGER else ((specs, np.ones(8)), ({}, FACTORS)):
        given = operands | {n: _by_device(specs[n], operands[n]) for n in moved if n in factors}
        by_ct = None if cts is None else np.float32(cts)
        got = sharded({n: put(x, specs.get(n, P()), on) for n, x in given.items()}, by_ct)
        want = run(_cast(given, jnp.float32), by_ct)
        for (path, x), truth in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            of: dict[str, np.ndarray] = {}
            for shard in x.addressable_shards:
                here, name = np.asarray(shard.data), jax.tree_util.keystr(path)
                np.testing.assert_array_equal(here, of.setdefault(str(shard.index), here), f"replicas of {name}")
                part, most = np.float32(truth[shard.index]), float(jnp.finfo(x.dtype).max) / 2
                size = np.abs(part[np.abs(part) < most]).max(initial=1e-3)
                limit = 64 * float(jnp.finfo(dtype).eps) * size
                held = [np.clip(np.float32(x), -most, most) for x in (here, part)]
                np.testing.assert_allclose(*held, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize("over", ["tokens", "columns"])
def test_parts_of_a_sum_are_not_rounded(over: str) -> None:
    """Devices' parts of a gradient, which cancel: what 16 bits of a part lack is more than what those of terms do.

    The parts of a weight's gradient only where float32 is asked for.
    """
    rng, each, on = np.random.default_rng(0), 512, mesh(EXPLICIT, (4,), ("d",))
    signs = np.repeat([1.0, -1.0, 1.0, -1.0], each)
    if over == "tokens":
        hidden, weight, ct = rng.normal(size=(4 * each, 6)) / 8 + 1, rng.normal(size=(6, 8)), signs
        specs, at = (D, P(), D), 1
    else:
        hidden, weight, ct = rng.normal(size=(64, 6)) / 8, (rng.normal(size=(6, 4 * each)) / 8 + 1) * signs, np.ones(64)
        specs, at = (P(), P(None, "d"), P()), 0
    operands = jnp.asarray(hidden, BF16), jnp.asarray(weight, BF16), np.zeros(len(hidden), np.int32)

    @jax.jit
    def gradient(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        lse = lambda *of: linear_cross_entropy(*of, labels, return_lse=True, reduce_dtype=F32)[1]
        return jax.grad(lambda *of: (ct * lse(*of)).sum(), (0, 1))(hidden, weight)[at]

    cut = [put(x, spec, on) for x, spec in zip(operands, specs, strict=True)]
    lowered = gradient.lower(*cut)
    # The compiler for CPUs adds up 32 bits in any case.
    sums = re.findall(r'"stablehlo.all_reduce".*?\^bb0\(%\w+: tensor<(\w+)>', lowered.as_text(), re.DOTALL)
    assert set(sums) == {"f32"}
    want = gradient(*(x.astype(jnp.float32) for x in operands[:2]), operands[2])
    error = np.float32(lowered.compile()(*cut)) - want
    assert np.sqrt(np.square(error).mean()) <= (2.0**-7 if over == "tokens" else 2.0**-10) * np.abs(want).max()
