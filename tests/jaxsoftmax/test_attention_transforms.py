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
from tests.jaxsoftmax.transformations import TRANSFORMED, Case, Function, loss

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


# Batch, lengths, heads (two to each key head) and widths that differ where they may.
Q, K, V = normal(2, 3, 4, 8), normal(2, 5, 2, 8), normal(2, 5, 2, 6)
BIAS, SINKS = normal(1, 1, 3, 5), normal(4)
OPERANDS = (Q, K, V, BIAS, SINKS)
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


# Tolerances of sums of products.
CASE = Case(ours, theirs, OPERANDS, tuple(x[:1] for x in OPERANDS[:3]) + OPERANDS[3:], (2e-3, 2e-3))
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


def pulled(f: Function, cotangents: Any) -> Any:
    return jax.vjp(f, *OPERANDS)[1](cotangents)


# Of results and operands that are more than one.
PARTS: dict[str, Callable[[Function, Case], Any]] = {
    "no batch": lambda f, c: f(*(x[0] for x in OPERANDS[:3]), *OPERANDS[3:]),
    "grad of the bias": lambda f, c: jax.grad(loss(f), 3)(*OPERANDS),
    "grad of key and sinks": lambda f, c: jax.grad(loss(f), (1, 4))(*OPERANDS),
    "grad of the output alone": lambda f, c: c.grad(lambda *a: jnp.sin(f(*a)[0]).sum())(*OPERANDS),
    "grad of the logsumexp alone": lambda f, c: c.grad(lambda *a: jnp.sin(f(*a)[1]).sum())(*OPERANDS),
    "jvp of the value": lambda f, c: jax.jvp(lambda v: f(Q, K, v, BIAS, SINKS), (V,), (c.ts[2],)),
    "vmap of one cotangent": lambda f, c: [
        jax.vmap(lambda out: pulled(f, (out, c.ts[0][..., 0])))(jnp.stack([WEIGHTS, -WEIGHTS])),
        jax.vmap(lambda lse: pulled(f, (WEIGHTS, lse)))(jnp.stack([c.ts[0][..., 0], c.ts[0][..., 1]])),
    ],
}
# `test_vmap_axes` maps, and differentiates what is mapped.
NAMES = [name for name in TRANSFORMED if name not in ("vmap", "vmap of grad", "vmap of grad of a sum", "grad of vmap")]


# A kernel is told of a transformation by the shapes of its operands and by which gradients are asked for.
BY_KERNELS = ("eager", "grad", "grad of the bias", "double transpose", "jacrev", "vmap of jvp", "vmap of one cotangent",
              "grad of scan", "no batch")  # fmt: skip


@pytest.mark.parametrize(
    "name, kernels",
    [*((name, "reference") for name in (*NAMES, *PARTS)), *((name, "stand-in") for name in BY_KERNELS)],
    indirect=["kernels"],
)
def test_like_plain_jax(name: str, kernels: Any) -> None:
    kernels()
    CASE.check(name, PARTS.get(name))


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


MAPPED = list(zip(AXES, itertools.cycle(FLAT), strict=False))


@pytest.mark.parametrize(
    "axes, also, kernels",
    [*((*case, "stand-in") for case in MAPPED), *((*case, "reference") for case in MAPPED[::3])],
    indirect=["kernels"],
    ids=str,
)
def test_vmap_axes(axes: tuple[int | None, ...], also: str, kernels: Any) -> None:
    kernels()
    mapped = tuple(
        x if d is None else jnp.moveaxis(xs, 0, d) for x, xs, d in zip(OPERANDS, CASE.stacked, axes, strict=True)
    )

    def everything(f: Function, _: Case) -> Any:
        return (
            jax.vmap(f, axes, (1, 0))(*mapped),
            jax.vmap(jax.grad(loss(f), CASE.all), axes)(*mapped),
            jax.vmap(jax.grad(flat(f, also), CASE.all), axes)(*mapped),
            jax.grad(lambda *a: loss(jax.vmap(f, axes))(*a), CASE.all)(*mapped),
            jax.jvp(jax.vmap(f, axes), mapped, mapped)[1],
        )

    CASE.check(str(axes), everything)


def test_nested_vmap(kernels: Any) -> None:
    kernels()
    qs, ks = jnp.stack([Q, -Q, 2 * Q]), jnp.stack([K, 0.5 * K])

    def everything(f: Function, _: Case) -> Any:
        both = jax.vmap(jax.vmap(f, (None, 0, None, None, None)), (0, None, None, None, None))
        other = jax.vmap(jax.vmap(f, (0, None, None, None, None)), (None, 0, None, None, None))
        mapped = qs, ks, *OPERANDS[2:]
        outer = jax.vmap(
            jax.vmap(jax.grad(flat(f, "sums"), CASE.all), (None, 0, None, None, None)), (0, None, None, None, None)
        )
        return [(g(*mapped), jax.grad(loss(g), CASE.all)(*mapped)) for g in (both, other)], outer(*mapped)

    CASE.check("nested vmap", everything)


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
    assert primitives(jax.grad(loss(ours), CASE.all), *OPERANDS) == ["flash_attention", "flash_attention_gradients"]
    assert primitives(ours, *OPERANDS) == ["flash_attention"]
    pushed = lambda q: jax.jvp(lambda q: ours(q, *OPERANDS[1:]), (q,), (q,))
    assert primitives(pushed, Q) == ["flash_attention", "flash_attention_tangent"]


def test_residuals() -> None:
    _, pull = jax.vjp(lambda q, k, v: jaxsoftmax.flash_attention(q, k, v), Q, K, V)
    shapes = sorted(x.shape for x in jax.tree.leaves(pull) if getattr(x, "size", 0) > 1)
    assert shapes == sorted([Q.shape, K.shape, V.shape, (2, 3, 4, 6), (2, 4, 3)])


NAMES = ("flash_attention_out", "flash_attention_lse")


def test_checks_on() -> None:
    CASE.check_under_debugging()


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
        lambda f: jax.jvp(f, (Q, K, V), CASE.ts[:3]),
        lambda f: jax.jvp(jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2)), (Q, K, V), CASE.ts[:3]),
    ):
        got = mode(functools.partial(call, is_causal=True, causal_alignment="bottom_right"))
        want = mode(functools.partial(call, mask=visible[:, None]))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
