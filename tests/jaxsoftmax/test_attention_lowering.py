"""From attention primitive to program: which platform gets what, how calls fold, export, explain, custom_vjp."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._attention import layout
from pallas_kernels import custom_vjp
from pallas_kernels.attention.problem import Op, Operands, Rules
from pallas_kernels.hardware import H200

RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)))
SINKS, BIAS = jnp.arange(4.0), jnp.asarray(RNG.normal(size=(1, 4, 5, 7)), jnp.float32)
A100 = dataclasses.replace(H200, name="NVIDIA A100", compute_capability="8.0")
HALF = [jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]


def call(*operands: Any) -> jax.Array:
    return jaxsoftmax.flash_attention(*operands, is_causal=True)


def gradient(*operands: Any) -> Any:
    return jax.grad(lambda *a: jnp.sin(call(*a).astype(jnp.float32)).sum(), (0, 1, 2))(*operands)


def lower(function: Any, *operands: Any, platforms: tuple[str, ...]) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=platforms).as_text()


def test_what_a_kernel_is_told(stand_ins: Any) -> None:
    jaxsoftmax.flash_attention(
        Q, K, V, BIAS, is_causal=True, causal_alignment="bottom_right", local_window_size=(3, None), scale=0.5,
        logits_soft_cap=2.0, sinks=SINKS, query_segment_ids=np.zeros((2, 5), int),
        key_value_segment_ids=np.zeros((2, 7), int),
    )  # fmt: skip
    (problem,) = {*stand_ins.problems}
    assert (problem.op, problem.batch, problem.query_heads, problem.key_heads) == (Op.FORWARD, 2, 4, 2)
    assert (problem.scale, problem.soft_cap, problem.causal_offset) == (0.5, 2.0, 2)
    assert (problem.window, problem.window_offset) == ((3, None), 2)
    assert (problem.bias, problem.bias_dtype, problem.mask) == ((1, 4, 5, 7), jnp.float32, None)
    assert (problem.segments, problem.sinks, problem.query_lengths, problem.key_lengths) == (True, True, False, False)


def test_alignment_by_lengths_is_said_where_it_counts(stand_ins: Any) -> None:
    lengths = {"causal_alignment": "bottom_right", "query_seq_lengths": np.int32([5, 3])}
    for rules, offsets in (
        ({}, (None, 0, False)),
        ({"is_causal": True}, (0, 0, True)),
        ({"local_window_size": 3}, (None, 0, True)),
    ):
        stand_ins.problems.clear()
        jaxsoftmax.flash_attention(Q, K, V, **lengths, **rules)
        (problem,) = {*stand_ins.problems}
        assert (problem.causal_offset, problem.window_offset, problem.align_ends) == offsets


@pytest.mark.parametrize("op, kernel", [("forward", "attention"), ("vjp", "attention_gradients")])
def test_kernels_align_by_lengths(op: str, kernel: str) -> None:
    lengths = {f"{name}_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32) for name in ("query", "key_value")}
    for rules in ({"is_causal": True}, {"local_window_size": (3, 0)}):
        found = jaxsoftmax.explain_attention(*HALF, op=op, causal_alignment="bottom_right", **lengths, **rules)
        assert (found.kernel, found.implementation, found.declined) == (kernel, "mosaic_gpu", ())


def test_only_the_gradients_asked_for(stand_ins: Any) -> None:
    loss = lambda q, bias: jaxsoftmax.flash_attention(q, K, V, bias).sum()
    for wrt, wanted in ((0, False), (1, True)):
        stand_ins.problems.clear()
        jax.jit(jax.grad(loss, wrt))(Q, BIAS)
        assert {p.bias_gradient for p in stand_ins.attended(Op.BACKWARD)} == {wanted}


def test_the_backward_may_decline_alone(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: problem.op is Op.FORWARD
    got = jax.jit(gradient)(Q, K, V)
    assert stand_ins.attended(Op.FORWARD)
    stand_ins.accepts = lambda _: False
    jax.clear_caches()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, jax.jit(gradient)(Q, K, V))


@pytest.mark.parametrize("dim, value_dim", [(8, 8), (5, 8), (3, 13), (20, 4)])
def test_heads_of_any_width(stand_ins: Any, dim: int, value_dim: int) -> None:
    q, k, v = (
        jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((2, 5, 4, dim), (2, 7, 2, dim), (2, 7, 2, value_dim))
    )
    got = call(q, k, v), gradient(q, k, v)
    assert {(p.head_dim % 8, p.value_dim % 8) for p in stand_ins.problems} == {(0, 0)}
    stand_ins.accepts = lambda _: False
    jax.clear_caches()
    want = call(q, k, v), gradient(q, k, v)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "leads, batch, heads",
    [
        (dict(query=(), key=(), value=()), 1, 4),
        (dict(query=(2,), key=(2,), value=(2,)), 2, 4),
        (dict(query=(3, 2), key=(1, 2), value=(1, 2)), 2, 12),
        (dict(query=(2, 3), key=(2, 1), value=(2, 1)), 2, 12),
        (dict(query=(3, 2), key=(3, 2), value=(1, 2)), 6, 4),
        (dict(query=(1, 2), key=(3, 2), value=(3, 2)), 6, 4),
        (dict(query=(3, 2), key=(1, 2), value=(1, 2), key_lengths=(3, 1)), 6, 4),
        (dict(query=(3, 2), key=(1, 1), value=(1, 1)), 1, 24),
    ],
)
def test_folds(leads: dict[str, tuple[int, ...]], batch: int, heads: int) -> None:
    core = dict(query=(5, 4, 8), key=(7, 2, 8), value=(7, 2, 6), key_lengths=(), out=(5, 4, 6), lse=(4, 5))
    fold = layout.fold({name: (*lead, *core[name]) for name, lead in leads.items()})
    assert fold.kernel_shape("query", (*leads["query"], 5, 4, 8)) == (batch, 5, heads, 8)
    assert fold.kernel_shape("key", (*leads["key"], 7, 2, 8)) == (batch, 7, 2, 8)
    for kind in ("query", "out", "lse"):
        shape = (*fold.full, *core[kind])
        x = jnp.arange(float(np.prod(shape))).reshape(shape)
        np.testing.assert_array_equal(fold.from_kernel(kind, fold.to_kernel(kind, x)), x)


def test_copies_are_said() -> None:
    shapes = dict(query=(3, 2, 16, 4, 64), key=(3, 2, 16, 2, 64), value=(1, 2, 16, 2, 60), mask=(1, 2, 1, 16, 16))
    shapes |= dict(query_segments=(3, 2, 16), key_segments=(3, 2, 16))
    dtypes = dict.fromkeys(shapes, jnp.bfloat16)
    found = layout.plan(Op.FORWARD, shapes, dtypes, Rules(), H200, bias_gradient=False, named=False)
    if found.decision is not None:
        assert found.notes == (
            "value, of shape (1, 2, 16, 2, 60), is copied to (6, 16, 2, 60)",
            "mask, of shape (1, 2, 1, 16, 16), is copied to (6, 1, 16, 16)",
            "the heads of value are padded to a multiple of 8",
            "the mask is packed in bits first, and the kernel skips tiles outside of those that it leaves",
            "which tiles have segments in common is found first, and the kernel skips the others",
        )


@pytest.mark.parametrize("wanted", [False, True])
def test_gradients_repeat_where_that_is_asked_for(wanted: bool) -> None:
    """The one place where the kernel's order of summation is the caller's choice."""
    x = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    loss = lambda x: jaxsoftmax.flash_attention(x, x, x, deterministic_gradients=wanted).sum()
    rules = [
        eqn.params["rules"].deterministic
        for eqn in jax.make_jaxpr(jax.grad(loss))(x).eqns
        if eqn.primitive.name == "flash_attention_gradients"
    ]
    assert rules == [wanted]
    shapes = dict(query=x.shape, key=x.shape, value=x.shape)
    plan = layout.plan(
        Op.BACKWARD,
        shapes,
        dict.fromkeys(shapes, x.dtype),
        Rules(deterministic=wanted),
        H200,
        bias_gradient=False,
        named=False,
    )
    assert plan.decision is not None
    assert plan.decision.problem.deterministic is wanted


def test_the_plain_custom_vjp_gives_the_same_gradients(kernels: Any) -> None:
    kernels()
    mask = jnp.asarray(RNG.random((2, 1, 5, 7)) < 0.8)
    rules = Rules(scale=0.3, causal_offset=0, soft_cap=4.0)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, sinks: jax.Array) -> Any:
        return custom_vjp.attention(Operands(q, k, v, bias, mask, sinks=sinks), rules)

    def primitive(*operands: jax.Array) -> Any:
        out, lse = jaxsoftmax.flash_attention(
            *operands[:4], mask, sinks=operands[4], scale=0.3, is_causal=True, logits_soft_cap=4.0, return_residual=True
        )
        return out, jnp.swapaxes(lse, 1, 2)

    operands = Q, K, V, BIAS, SINKS
    for run in (lambda f: f, jax.jit):
        (out, lse), pull = jax.vjp(run(plain), *operands)
        want, pull_primitive = jax.vjp(run(primitive), *operands)
        cts = jnp.cos(out), jnp.ones_like(lse)
        got = (out, lse), pull(cts)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, (want, pull_primitive(cts))
        )
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(plain, operands, operands)


def test_the_plain_custom_vjp_of_a_mask_in_a_loop() -> None:
    query, key, value = HALF
    mask = jnp.tri(1024, dtype=bool)[None, None]

    def thrice(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def once(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            return custom_vjp.attention(Operands(q, k, v, mask=mask), Rules())[0], None

        return jax.lax.scan(jax.checkpoint(once), q, length=3)[0].astype(jnp.float32).sum()

    text = lower(jax.grad(thrice, (0, 1, 2)), query, key, value, platforms=("cuda",))
    assert "mosaic_gpu" in text


def test_jaxprs_read_well() -> None:
    text = str(jax.make_jaxpr(call)(Q, K, V))
    assert "names=('query', 'key', 'value')" in text
    assert "0x" not in text


def test_explain_a_kernel(stand_ins: Any) -> None:
    x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)
    found = jaxsoftmax.explain_attention(x, x, x, is_causal=True)
    assert str(found).splitlines() == [
        "flash_attention of bfloat16: query [2,1024,8,64], key [2,1024,8,64], value [2,1024,8,64]",
        "  here: no CUDA device, so XLA runs the reference",
        "  on NVIDIA H200: kernel stand-in",
        "    why: it is the only one",
        "    moves: nothing can move less than 8.5 MB",
    ]
    assert jaxsoftmax.explain_attention(x, x, x, op="vjp").implementation == "mosaic_gpu"
    assert stand_ins.problems[-1].op is Op.BACKWARD
    pushed = jaxsoftmax.explain_attention(x, x, x, op="jvp")
    assert (pushed.implementation, pushed.reason) == ("xla", "forward mode has no kernel")


def test_explain_no_kernel(stand_ins: Any) -> None:
    stand_ins.accepts = lambda _: False
    mask = jax.ShapeDtypeStruct((5, 7), jnp.bool_)
    found = jaxsoftmax.explain_attention(Q, K, V, mask=mask, key_value_seq_lengths=np.array([3, 4]), device=A100)
    assert (found.kernel, found.implementation) == (None, "xla")
    assert str(found).splitlines()[-1] == "    not attention: it is not for this"
    named = jaxsoftmax.explain_attention(Q, K, V, implementation="mosaic_gpu")
    assert named.implementation == "error"
    assert jaxsoftmax.explain_attention(Q, K, V, implementation="xla").declined == ()
    with pytest.raises(ValueError, match="explain_attention: op='backward', expected one of forward, vjp, jvp"):
        jaxsoftmax.explain_attention(Q, K, V, op="backward")


def test_explain_takes_what_the_call_takes(stand_ins: Any) -> None:
    """NumPy's numbers and dtypes have shapes, and are no arrays."""
    numbers = {"scale": np.float32(0.5), "logits_soft_cap": np.array(2.0), "local_window_size": np.int64(3)}
    jaxsoftmax.explain_attention(*HALF, **numbers, is_causal=np.bool_(True), dtype=jnp.dtype("float16"))
    (problem,) = stand_ins.problems
    assert (problem.scale, problem.soft_cap, problem.window, problem.dtype) == (0.5, 2.0, (3, 3), jnp.float16)
    for op in ("vjp", "jvp"):
        assert "bias [1,1,5,7]" in jaxsoftmax.explain_attention(Q, K, V, np.ones((5, 7), int), op=op).call
    assert not stand_ins.problems[-1].bias_gradient


def test_explain_why_dropout_is_xlas(stand_ins: Any) -> None:
    found = jaxsoftmax.explain_attention(Q, K, V, dropout_rate=0.1, dropout_rng=jax.random.key(0))
    assert (found.implementation, found.reason) == ("xla", "dropout and sown weights need all weights in memory")


def test_explain_the_real_kernels() -> None:
    assert "compute capability 8.0" in str(jaxsoftmax.explain_attention(*HALF, device=A100))
    assert "float32" in jaxsoftmax.explain_attention(Q, K, V).declined[0][1]
