"""Every JAX transformation of `flash_attention`, against the same transformation of plain `jax.numpy`."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxsoftmax

RNG = np.random.default_rng(0)
Function = Callable[..., Any]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


# Batch, lengths, heads (two to each key head) and widths that differ where they may.
Q, K, V = normal(2, 3, 4, 8), normal(2, 5, 2, 8), normal(2, 5, 2, 6)
BIAS, SINKS = normal(1, 1, 3, 5), normal(4)
OPERANDS = (Q, K, V, BIAS, SINKS)
TANGENTS = tuple(normal(*x.shape) for x in OPERANDS)
ALL = tuple(range(len(OPERANDS)))
MASK = jnp.asarray(RNG.random((2, 1, 3, 5)) < 0.8).at[0, 0, 1].set(False)


def ours(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, sinks: jax.Array) -> Any:
    """Output and logsumexp, with a row that sees nothing."""
    mask = MASK[: q.shape[0]] if q.ndim == 4 else MASK[0]
    out, lse = jaxsoftmax.flash_attention(q, k, v, bias, mask, sinks=sinks, logits_soft_cap=3.0, return_residual=True)
    return out, jnp.where(lse == -jnp.inf, 0.0, lse)


def theirs(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, sinks: jax.Array) -> Any:
    """The same with the matrix of weights in memory."""
    group = q.shape[-2] // k.shape[-2]
    z = 3.0 * jnp.tanh(jnp.einsum("...tnh,...snh->...nts", q, jnp.repeat(k, group, -2)) * q.shape[-1] ** -0.5 / 3.0)
    mask = MASK[: q.shape[0]] if q.ndim == 4 else MASK[0]
    z = jnp.where(mask, z + (bias if q.ndim == 4 else bias[0]), -1e30)
    sink = jnp.broadcast_to(sinks[:, None, None], (*z.shape[:-1], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([z, sink], -1), -1)
    weights = jnp.where(mask, jnp.exp(z - lse[..., None]), 0.0)
    out = jnp.einsum("...nts,...snd->...tnd", weights, jnp.repeat(v, group, -2))
    sees = jnp.broadcast_to(mask.any(-1), lse.shape)
    return out, jnp.swapaxes(jnp.where(sees, lse, 0.0), -1, -2)


def loss(f: Function) -> Function:
    """A scalar with cotangents that depend on both results."""
    return lambda *operands: sum(jnp.sin(x).sum() for x in f(*operands))


WEIGHTS = normal(2, 3, 4, 6)

# Losses whose cotangents vmap does not map, though operands are mapped, and which may reach only one of the results.
FLAT: dict[str, Function] = {
    "sums": lambda out, lse: out.sum() + lse.sum(),
    "the mean of the output": lambda out, lse: out.mean(),
    "a linear head": lambda out, lse: (out * WEIGHTS).sum(),
    "the sum of the logsumexp": lambda out, lse: lse.sum(),
    "the logsumexp's sum, and the output": lambda out, lse: jnp.sin(out).sum() + lse.sum(),
    "the output's sum, and the logsumexp": lambda out, lse: out.sum() + jnp.sin(lse).sum(),
    "the logsumexp": lambda out, lse: jnp.sin(lse).sum(),
}


def flat(f: Function, name: str) -> Function:
    return lambda *operands: FLAT[name](*f(*operands))


def dot(xs: Any, ys: Any) -> jax.Array:
    return sum((x * y).sum() for x, y in zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True))


WANTED: dict[Any, Any] = {}


def check(transformed: Callable[[Function], Any], known_as: Any = None) -> None:
    """Compares ours with theirs, whose results serve every test that is `known_as` the same."""
    if known_as is None or known_as not in WANTED:
        WANTED[known_as] = jax.device_get(transformed(theirs))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3)
    jax.tree.map(close, transformed(ours), WANTED[known_as])


SMALL = tuple(x[:1] for x in OPERANDS[:3]) + OPERANDS[3:]
STACKED = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x, -x]), OPERANDS)


def pulled(f: Function, cotangents: Any) -> Any:
    return jax.vjp(f, *OPERANDS)[1](cotangents)


def scanned(f: Function, q: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, x: (c + loss(f)(x, *OPERANDS[1:]), None), 0.0, jnp.stack([q, 2 * q]))[0]


UNARY: dict[str, Callable[[Function], Any]] = {
    "eager": lambda f: f(*OPERANDS),
    "jit": lambda f: jax.jit(f)(*OPERANDS),
    "no batch": lambda f: f(*(x[0] for x in OPERANDS[:3]), *OPERANDS[3:]),
    "grad": lambda f: jax.grad(loss(f), ALL)(*OPERANDS),
    "grad of the bias": lambda f: jax.grad(loss(f), 3)(*OPERANDS),
    "grad of key and sinks": lambda f: jax.grad(loss(f), (1, 4))(*OPERANDS),
    "grad of the output alone": lambda f: jax.grad(lambda *a: jnp.sin(f(*a)[0]).sum(), ALL)(*OPERANDS),
    "grad of the logsumexp alone": lambda f: jax.grad(lambda *a: jnp.sin(f(*a)[1]).sum(), ALL)(*OPERANDS),
    "jvp": lambda f: jax.jvp(f, OPERANDS, TANGENTS),
    "jvp of the value": lambda f: jax.jvp(lambda v: f(Q, K, v, BIAS, SINKS), (V,), (TANGENTS[2],)),
    "double transpose": lambda f: jax.linear_transpose(jax.linearize(f, *OPERANDS)[1], *OPERANDS)(f(*OPERANDS)),
    "jacfwd": lambda f: jax.jacfwd(f, ALL)(*SMALL),
    "jacrev": lambda f: jax.jacrev(f, ALL)(*SMALL),
    "hessian": lambda f: jax.hessian(loss(f), (0, 1, 4))(*SMALL),
    "hvp": lambda f: jax.jvp(jax.grad(loss(f), ALL), OPERANDS, TANGENTS)[1],
    "grad of grad": lambda f: jax.grad(lambda *a: dot(jax.grad(loss(f), ALL)(*a), TANGENTS), ALL)(*OPERANDS),
    "grad of jvp": lambda f: jax.grad(lambda *a: loss(lambda *b: jax.jvp(f, b, TANGENTS)[1])(*a), ALL)(*OPERANDS),
    "third": lambda f: jax.jvp(lambda *a: jax.jvp(jax.grad(loss(f), ALL), a, TANGENTS)[1], OPERANDS, OPERANDS)[1],
    "vmap of hvp of sums": lambda f: jax.vmap(lambda *a: jax.jvp(jax.grad(flat(f, "sums"), ALL), a, OPERANDS)[1])(
        *STACKED
    ),
    "vmap of one cotangent": lambda f: [
        jax.vmap(lambda out: pulled(f, (out, TANGENTS[0][..., 0])))(jnp.stack([WEIGHTS, -WEIGHTS])),
        jax.vmap(lambda lse: pulled(f, (WEIGHTS, lse)))(jnp.stack([TANGENTS[0][..., 0], TANGENTS[0][..., 1]])),
    ],
    "vmap of jvp": lambda f: jax.vmap(lambda *t: jax.jvp(f, OPERANDS, t)[1])(*STACKED),
    "grad of scan": lambda f: jax.grad(lambda q: scanned(f, q))(Q),
    "jvp of map": lambda f: jax.jvp(
        lambda qs: jax.lax.map(lambda q: f(q, *OPERANDS[1:]), qs), STACKED[:1], STACKED[:1]
    ),
    "cond": lambda f: jax.grad(
        lambda q: jax.lax.cond(q[0, 0, 0, 0] < 9, lambda q: loss(f)(q, *OPERANDS[1:]), lambda q: q.sum(), q)
    )(Q),
    "remat": lambda f: jax.grad(jax.checkpoint(loss(f)), ALL)(*OPERANDS),
    "jvp of remat": lambda f: jax.jvp(jax.checkpoint(f), OPERANDS, TANGENTS)[1],
    "grad of remat of grad": lambda f: jax.grad(
        lambda q: jax.checkpoint(lambda q: (jax.grad(loss(f))(q, *OPERANDS[1:]) ** 2).sum())(q)
    )(Q),
}

EAGER = {"eager", "grad", "jvp"}


@pytest.mark.parametrize("name", UNARY)
def test_like_plain_jax(name: str, kernels: Any) -> None:
    kernels()
    transformed = UNARY[name]
    # One program compiles sooner than the dozens of operations it consists of.
    check(transformed if name in EAGER else lambda f: jax.jit(lambda: transformed(f))(), known_as=name)


AXES = [
    (0, 0, 0, 0, 0),
    (0, None, None, None, None),
    (2, None, None, None, None),
    (None, 0, None, None, None),
    (None, None, 1, None, None),
    (None, None, None, 0, None),
    (None, None, None, None, 0),
    (0, None, None, 1, 1),
    (1, 2, 3, 0, 0),
    (None, 0, 0, None, None),
]


@pytest.mark.parametrize("axes, also", list(zip(AXES, itertools.cycle(FLAT), strict=False)), ids=str)
def test_vmap_axes(axes: tuple[int | None, ...], also: str, kernels: Any) -> None:
    kernels()
    mapped = tuple(
        x if d is None else jnp.moveaxis(jnp.stack([x, 0.5 * x, -x]), 0, d) for x, d in zip(OPERANDS, axes, strict=True)
    )

    @functools.partial(jax.jit, static_argnums=0)
    def everything(f: Function) -> Any:
        return (
            jax.vmap(f, axes, (1, 0))(*mapped),
            jax.vmap(jax.grad(loss(f), ALL), axes)(*mapped),
            jax.vmap(jax.grad(flat(f, also), ALL), axes)(*mapped),
            jax.grad(lambda *a: loss(jax.vmap(f, axes))(*a), ALL)(*mapped),
            jax.jvp(jax.vmap(f, axes), mapped, mapped)[1],
        )

    check(everything, known_as=axes)


def test_nested_vmap(kernels: Any) -> None:
    kernels()
    qs, ks = jnp.stack([Q, -Q, 2 * Q]), jnp.stack([K, 0.5 * K])

    @functools.partial(jax.jit, static_argnums=0)
    def everything(f: Function) -> Any:
        both = jax.vmap(jax.vmap(f, (None, 0, None, None, None)), (0, None, None, None, None))
        other = jax.vmap(jax.vmap(f, (0, None, None, None, None)), (None, 0, None, None, None))
        mapped = qs, ks, *OPERANDS[2:]
        outer = jax.vmap(
            jax.vmap(jax.grad(flat(f, "sums"), ALL), (None, 0, None, None, None)), (0, None, None, None, None)
        )
        return [(g(*mapped), jax.grad(loss(g), ALL)(*mapped)) for g in (both, other)], outer(*mapped)

    check(everything, known_as="nested vmap")


def test_what_is_shared_is_not_copied(stand_ins: Any) -> None:
    qs = jnp.stack([Q] * 7)
    call = lambda qs, k, v: jax.vmap(lambda q: jaxsoftmax.flash_attention(q, k, v))(qs)
    for function in (call, lambda *a: jax.grad(lambda *a: jnp.sin(call(*a)).sum(), (0, 1, 2))(*a)):
        stand_ins.problems.clear()
        text = jax.jit(function).lower(qs, K, V).compile().as_text()
        assert {(p.batch, p.query_heads, p.key_heads) for p in stand_ins.problems} == {(2, 28, 2)}
        assert not re.findall(r"f32\[7,2,5,2,\d\]", text)
    text = jax.jit(lambda qs: jax.vmap(lambda q: ours(q, *OPERANDS[1:])[0])(qs)).lower(qs).as_text()
    assert not re.findall(r"tensor<7x2x5x2x\dxf32>", text)


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 1, 1, 5), (1, 4, 3, 1), (1, 1, 3, 5)], ids=str)
def test_masks_stay_as_small_as_given(stand_ins: Any, shape: tuple[int, ...]) -> None:
    bias, mask = normal(*shape), jnp.ones(shape, bool)
    jax.jit(jax.grad(lambda q: jaxsoftmax.flash_attention(q, K, V, bias, mask).sum()))(Q)
    assert {(p.bias, p.mask, p.bias_gradient) for p in stand_ins.problems} == {(shape, shape, False)}


@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_check_grads(mode: str) -> None:
    small = (Q[:1, :2, :2], K[:1, :3, :1], V[:1, :3, :1])
    call = lambda q, k, v: jaxsoftmax.flash_attention(q, k, v, is_causal=True, return_residual=True)
    check_grads(call, small, order=2, modes=[mode], atol=2e-2, rtol=2e-2)


def primitives(function: Function, *operands: Any) -> list[str]:
    jaxpr = str(jax.make_jaxpr(function)(*operands))
    return [name for name in re.findall(r"= (flash_attention\w*)\[", jaxpr) if name != "flash_attention_residuals"]


def test_reverse_mode_is_one_forward_and_one_backward() -> None:
    assert primitives(jax.grad(loss(ours), ALL), *OPERANDS) == ["flash_attention", "flash_attention_gradients"]
    assert primitives(ours, *OPERANDS) == ["flash_attention"]
    pushed = lambda q: jax.jvp(lambda q: ours(q, *OPERANDS[1:]), (q,), (q,))
    assert primitives(pushed, Q) == ["flash_attention", "flash_attention_tangent"]


def test_residuals() -> None:
    _, pull = jax.vjp(lambda q, k, v: jaxsoftmax.flash_attention(q, k, v), Q, K, V)
    shapes = sorted(x.shape for x in jax.tree.leaves(pull) if getattr(x, "size", 0) > 1)
    assert shapes == sorted([Q.shape, K.shape, V.shape, (2, 3, 4, 6), (2, 4, 3)])


NAMES = ("flash_attention_out", "flash_attention_lse")


@pytest.mark.parametrize(
    "policy, forwards",
    [
        (None, 2),
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.dots_saveable, 2),
        (jax.checkpoint_policies.everything_saveable, 1),
        (jax.checkpoint_policies.save_only_these_names(*NAMES), 1),
        (jax.checkpoint_policies.save_only_these_names(NAMES[0]), 2),
        (lambda primitive, *_, **__: primitive.name == "flash_attention", 1),
    ],
)
def test_remat_policies(policy: Any, forwards: int) -> None:
    run = jax.checkpoint(lambda *a: loss(ours)(jnp.sin(a[0]), *a[1:]), policy=policy)
    found = primitives(jax.grad(run, ALL), *OPERANDS)
    assert sorted(found) == ["flash_attention"] * forwards + ["flash_attention_gradients"]
    want = jax.grad(lambda *a: loss(theirs)(jnp.sin(a[0]), *a[1:]), ALL)(*OPERANDS)
    got = jax.jit(jax.grad(run, ALL))(*OPERANDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), got, want)


def test_checks_on() -> None:
    with jax.enable_checks(True):
        check(lambda f: jax.grad(loss(f), ALL)(*OPERANDS))
        check(lambda f: jax.vmap(lambda *a: jax.jvp(f, a, a))(*STACKED))
    with jax.checking_leaks():
        check(lambda f: jax.jit(jax.grad(loss(f), ALL))(*OPERANDS))
    with jax.debug_nans(True):
        check(lambda f: jax.jit(jax.grad(loss(f), ALL))(*OPERANDS))


@pytest.mark.parametrize("axes", [(0, None, 0), (None, 0, 1), (1, 1, None)], ids=str)
def test_vmap_over_lengths_that_align(axes: Any, kernels: Any) -> None:
    kernels()
    pairs = jnp.array([[3, 5], [2, 4], [1, 0]])
    mapped = [jnp.stack([x, 2 * x, -x], d) if d is not None else x for x, d in zip((Q, K), axes, strict=False)]
    lengths = pairs if axes[2] == 0 else pairs.T if axes[2] == 1 else pairs[0]

    @jax.jit
    def gradients(q: jax.Array, k: jax.Array, lengths: jax.Array) -> Any:
        rules = {"is_causal": True, "causal_alignment": "bottom_right", "key_value_seq_lengths": lengths}
        call = lambda *a: jaxsoftmax.flash_attention(*a, V, **rules)
        return [jax.grad(lambda *a, f=f: f(call(*a)).sum(), (0, 1))(q, k) for f in (jnp.sin, jnp.asarray)]

    got = jax.vmap(gradients, axes)(*mapped, lengths)
    for i in range(3):
        of = [x if d is None else jnp.take(x, i, d) for x, d in zip((*mapped, lengths), axes, strict=True)]
        want = gradients(*of)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5), got, want)


def test_alignment_by_lengths_in_every_mode() -> None:
    lengths = {"key_value_seq_lengths": jnp.array([4, 2]), "query_seq_lengths": jnp.array([2, 3])}
    ends = lengths["key_value_seq_lengths"] - lengths["query_seq_lengths"]
    visible = jnp.arange(5) <= jnp.arange(3)[:, None] + ends[:, None, None]

    def call(*operands: jax.Array, **rules: Any) -> jax.Array:
        return jaxsoftmax.flash_attention(*operands, **lengths, **rules)

    for mode in (
        lambda f: jax.jvp(f, (Q, K, V), TANGENTS[:3]),
        lambda f: jax.jvp(jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2)), (Q, K, V), TANGENTS[:3]),
    ):
        got = mode(functools.partial(call, is_causal=True, causal_alignment="bottom_right"))
        want = mode(functools.partial(call, mask=visible[:, None]))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
