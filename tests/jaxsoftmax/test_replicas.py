"""What devices add up, where their operands differ by orders of magnitude: every device has the same, and the truth."""

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
from tests.jaxsoftmax.calls import CALLS, MORE_CALLS, QKV, Operands
from tests.jaxsoftmax.sharded import mesh, put

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FACTORS = np.repeat([1e-4, 30.0, 1e3, 1e-2], 2)  # of the cotangents of four devices
OPERANDS_FACTORS = np.sqrt(FACTORS)  # by the square logits would be so large that float32 rounds probabilities by 7 %
D, COLUMNS = P("d"), P(None, None, "d")
TOKENS = dict.fromkeys(("hidden", "labels", "weights", "scale"), D)
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
CASES: list[tuple[str, Any, AxisType, dict[str, P]]] = [
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
]


def _cast(operands: Operands, dtype: Any) -> Operands:
    return {n: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in operands.items()}


def _results(name: str, operands: Operands, by_ct: jax.Array) -> dict[str, Any]:
    """Results and gradients, for cotangents whose factors are those of the first axis."""
    call, fixed = (CALLS | MORE_CALLS)[name]
    moving = {n: x for n, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    run = lambda moving: jax.tree.leaves(call(**{n: (operands | moving)[n] for n in fixed}))

    def total(moving: Operands) -> tuple[jax.Array, Any]:
        found = run(moving)
        dot = lambda y: (
            jnp.where(jnp.isfinite(y), y, 0).astype(jnp.float32) * jnp.cos(jnp.arange(1.0 * y.size)).reshape(y.shape)
        )
        return sum((dot(y) * by_ct.reshape(-1, *[1] * (y.ndim - 1))).sum() for y in found), found

    gradient, found = jax.grad(total, has_aux=True)(moving)
    return {"results": found, "gradient": gradient}


@functools.cache
def _compiled(name: str) -> Any:
    return jax.jit(functools.partial(_results, name))


def _by_device(spec: P, x: jax.Array) -> jax.Array:
    """`x` times the factors of the devices that have it."""
    at = next(d for d, entry in enumerate(spec) if entry)
    factors = np.repeat(OPERANDS_FACTORS, 8)[:: 64 // x.shape[at]][: x.shape[at]]
    return (x * factors.reshape([-1 if d == at else 1 for d in range(x.ndim)])).astype(x.dtype)


@pytest.mark.parametrize("name, dtype, kind, specs", CASES, ids=str)
def test_replicas(name: str, dtype: Any, kind: AxisType, specs: dict[str, P]) -> None:
    operands = _cast((CALLS | MORE_CALLS)[name][1], dtype)
    specs = {n: spec for n, spec in specs.items() if n in operands}
    # Logits of attention would be too large for any dtype.
    moved = [n for n in specs if jnp.issubdtype(operands[n].dtype, jnp.floating) and n not in ("query", "key")]
    run, on = _compiled(name), mesh(kind)
    for factors, cts in ((specs, np.ones(8)), ({}, FACTORS)):
        given = operands | {n: _by_device(specs[n], operands[n]) for n in moved if n in factors}
        got = run({n: put(x, specs.get(n, P()), on) for n, x in given.items()}, put(np.float32(cts), P(), on))
        want = run(_cast(given, jnp.float32), np.float32(cts))
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
    """Devices' parts of a gradient, which cancel: what 16 bits of a part lack is more than what those of terms do."""
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
        total = lambda *of: (ct * linear_cross_entropy(*of, labels, return_lse=True)[1]).sum()
        return jax.grad(total, (0, 1))(hidden, weight)[at]

    cut = [put(x, spec, on) for x, spec in zip(operands, specs, strict=True)]
    lowered = gradient.lower(*cut)
    # The compiler for CPUs adds up 32 bits in any case.
    sums = re.findall(r'"stablehlo.all_reduce".*?\^bb0\(%\w+: tensor<(\w+)>', lowered.as_text(), re.DOTALL)
    assert set(sums) == {"f32"}
    want = gradient(*(x.astype(jnp.float32) for x in operands[:2]), operands[2])
    error = np.float32(lowered.compile()(*cut)) - want
    assert np.sqrt(np.square(error).mean()) <= (2.0**-7 if over == "tokens" else 2.0**-10) * np.abs(want).max()
