"""Every JAX transformation of every function, against the same transformation of `jax.nn`, optax or `jax.numpy`."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxsoftmax
from jaxsoftmax import flash_attention, softmax_cross_entropy, softmax_cross_entropy_with_integer_labels, top_k_softmax
from pallas_kernels.softmax.problem import Op
from tests.jaxsoftmax.transformations import TRANSFORMED, Case, Function, linear, loss

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


SHAPE = (3, 4, 5)
X, T, WEIGHTS, LONG = normal(*SHAPE), normal(*SHAPE), normal(4), normal(3, 4, 40)
MASK = jnp.asarray(RNG.random(SHAPE) < 0.7)


def labelled(function: Function) -> Function:
    """A function of logits, with a label for each row that depends on where the row is."""

    def of_logits(x: jax.Array, axis: Any = -1, **options: Any) -> Any:
        axes = tuple(range(x.ndim)) if axis is None else axis
        shape = x.max(axes).shape
        places = jnp.arange(np.prod(shape, dtype=int), dtype=jnp.int32).reshape(shape)
        return function(x, (7 * places + 3) % (x.size // places.size), axes, **options)

    return of_logits


def masked(function: Function, x: jax.Array, mask: jax.Array = MASK, **options: Any) -> jax.Array:
    """Of an array of which the last axes are the mask's; what is excluded gives 0."""
    where = mask[(0,) * (mask.ndim - x.ndim)] if x.ndim < mask.ndim else mask
    y = function(x, where=where, **options)
    return jnp.where(where, y, 0.0) if y.ndim == x.ndim else y


def weighted(function: Function, **options: Any) -> Function:
    """Losses of logits and weights."""
    return lambda x, w: labelled(functools.partial(function, weights=w, **options))(x)


OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "logits_soft_cap": 3.0, "return_lse": True}


def plain_with_options(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    z = 3.0 * jnp.tanh(x / 3.0)
    lse = jax.nn.logsumexp(z, -1)
    return w * (0.9 * theirs(z) + 0.1 * (lse - z.mean(-1)) + 0.01 * lse**2), lse


def plain_top_k(x: jax.Array, normalize: str) -> jax.Array:
    if normalize == "all":
        return jax.lax.top_k(jax.nn.softmax(x), 3)[0]
    return jax.nn.softmax(jax.lax.top_k(x, 3)[0])


def top_k(x: jax.Array, normalize: str) -> jax.Array:
    return top_k_softmax(x, 3, normalize=normalize)[0]


# Batch, lengths, heads (two to each key head) and widths that differ where they may.
Q, K, V = normal(2, 3, 4, 8), normal(2, 5, 2, 8), normal(2, 5, 2, 6)
OPERANDS = (Q, K, V, normal(1, 1, 3, 5), normal(4))
SEES = jnp.asarray(RNG.random((2, 1, 3, 5)) < 0.8).at[0, 0, 1].set(False)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, sinks: jax.Array) -> Any:
    """Output and logsumexp, with a row that sees nothing."""
    mask = SEES[: q.shape[0]] if q.ndim == 4 else SEES[0]
    out, lse = flash_attention(q, k, v, bias, mask, sinks=sinks, logits_soft_cap=3.0, return_residual=True)
    return out, jnp.where(lse == -jnp.inf, 0.0, lse)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, sinks: jax.Array) -> Any:
    """The same with the matrix of weights in memory."""
    group = q.shape[-2] // k.shape[-2]
    z = 3.0 * jnp.tanh(jnp.einsum("...tnh,...snh->...nts", q, jnp.repeat(k, group, -2)) * q.shape[-1] ** -0.5 / 3.0)
    mask = SEES[: q.shape[0]] if q.ndim == 4 else SEES[0]
    z = jnp.where(mask, z + (bias if q.ndim == 4 else bias[0]), -1e30)
    sink = jnp.broadcast_to(sinks[:, None, None], (*z.shape[:-1], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([z, sink], -1), -1)
    weights = jnp.where(mask, jnp.exp(z - lse[..., None]), 0.0)
    out = jnp.einsum("...nts,...snd->...tnd", weights, jnp.repeat(v, group, -2))
    sees = jnp.broadcast_to(mask.any(-1), lse.shape)
    return out, jnp.swapaxes(jnp.where(sees, lse, 0.0), -1, -2)


# Five tokens, an embedding and a vocabulary, a bias and a number for each token.
H, W, B, S = normal(5, 4), normal(4, 7), normal(7), jnp.exp(normal(5))
Y = jnp.array([0, 6, 3, 3, 1])
linear_loss = functools.partial(jaxsoftmax.linear_cross_entropy, chunk_size=2)


def linear_with_options(h: jax.Array, w: jax.Array, b: jax.Array, s: jax.Array) -> Any:
    n = len(h)
    return linear_loss(h, w, Y[:n], bias=b, scale=s[:n, None], return_entropy=True, **OPTIONS)


def plain_linear_with_options(h: jax.Array, w: jax.Array, b: jax.Array, s: jax.Array) -> Any:
    n = len(h)
    z = 3.0 * jnp.tanh((h @ w + b) * s[:n, None] / 3.0)
    lse = jax.nn.logsumexp(z, -1)
    loss = 0.9 * optax.softmax_cross_entropy_with_integer_labels(z, Y[:n]) + 0.1 * (lse - z.mean(-1)) + 0.01 * lse**2
    return loss, lse, lse - (jax.nn.softmax(z) * z).sum(-1)


ROWS: dict[str, tuple[Function, Function]] = {
    "softmax": (jaxsoftmax.softmax, jax.nn.softmax),
    "log_softmax": (jaxsoftmax.log_softmax, jax.nn.log_softmax),
    "logsumexp": (functools.partial(jaxsoftmax.logsumexp, axis=-1), functools.partial(jax.nn.logsumexp, axis=-1)),
    "cross_entropy": (
        labelled(softmax_cross_entropy_with_integer_labels),
        labelled(optax.softmax_cross_entropy_with_integer_labels),
    ),
}
MASKED = ("softmax masked", "log_softmax masked", "logsumexp masked")
theirs = ROWS["cross_entropy"][1]
ours = softmax_cross_entropy_with_integer_labels
plain_lse = functools.partial(jax.nn.logsumexp, axis=-1)
CASES = {name: Case(*pair, (X,), (X[0],)) for name, pair in ROWS.items()}
CASES |= {name: Case(*(functools.partial(masked, f) for f in ROWS[name.split()[0]]), (X,), (X[0],)) for name in MASKED}
CASES |= {
    "weighted": Case(weighted(ours), lambda x, w: w * theirs(x), (X, WEIGHTS), (X[0], WEIGHTS)),
    "loss of options": Case(
        labelled(functools.partial(ours, **OPTIONS | {"return_lse": False})),
        lambda x: plain_with_options(x, jnp.ones(()))[0],
        (X,),
        (X[0],),
    ),
    "loss and lse": Case(weighted(ours, **OPTIONS), plain_with_options, (X, WEIGHTS), (X[0], WEIGHTS)),
    "lse alone": Case(lambda x: labelled(ours)(x, return_lse=True)[1], plain_lse, (X,), (X[0],)),
    "probabilities": Case(softmax_cross_entropy, optax.softmax_cross_entropy, (X, T), (X[0], T[0])),
    **{
        name: Case(
            *(functools.partial(f, normalize=over) for f in (top_k, plain_top_k)), (LONG,), (LONG[0, :2],), (1e-4, 1e-6)
        )
        for name, over in (("top_k", "all"), ("top_k of k", "top_k"))
    },
    "linear": Case(linear_with_options, plain_linear_with_options, (H, W, B, S), (H[:2], W, B, S)),
    "weighted linear": Case(
        lambda h, w, s: linear_loss(h, w, Y[: len(h)], weights=s[: len(h)]),
        lambda h, w, s: s[: len(h)] * optax.softmax_cross_entropy_with_integer_labels(h @ w, Y[: len(h)]),
        (H, W, S),
        (H[:2], W, S),
    ),
    # Tolerances of sums of products.
    "attention": Case(
        attention, plain_attention, OPERANDS, tuple(x[:1] for x in OPERANDS[:3]) + OPERANDS[3:], (2e-3, 2e-3)
    ),
}
OF_ATTENTION = CASES["attention"]
HEAD = normal(2, 3, 4, 6)


def pulled(f: Function, cotangents: Any) -> Any:
    return jax.vjp(f, *OPERANDS)[1](cotangents)


# Of results and operands that are more than one.
PARTS: dict[str, Callable[[Function, Case], Any]] = {
    "no batch": lambda f, c: f(*(x[0] for x in OPERANDS[:3]), *OPERANDS[3:]),
    "grad of the bias": lambda f, c: jax.grad(loss(f), 3)(*OPERANDS),
    "grad of key and sinks": lambda f, c: jax.grad(loss(f), (1, 4))(*OPERANDS),
    "grad of the output alone": lambda f, c: c.grad(lambda *a: jnp.sin(f(*a)[0]).sum())(*OPERANDS),
    "grad of the logsumexp alone": lambda f, c: c.grad(lambda *a: jnp.sin(f(*a)[1]).sum())(*OPERANDS),
    "jvp of the value": lambda f, c: jax.jvp(lambda v: f(Q, K, v, *OPERANDS[3:]), (V,), (c.ts[2],)),
    "vmap of one cotangent": lambda f, c: [
        jax.vmap(lambda out: pulled(f, (out, c.ts[0][..., 0])))(jnp.stack([HEAD, -HEAD])),
        jax.vmap(lambda lse: pulled(f, (HEAD, lse)))(jnp.stack([c.ts[0][..., 0], c.ts[0][..., 1]])),
    ],
}
# Of each function the derivatives of every order, and what maps some operands or cotangents; the rest are JAX's own.
# `test_checks_on` has the gradient of each.
RULES = ("double transpose", "hessian", "grad of jvp", "vmap of jvp", "vmap of hvp of a sum")
REST = [name for name in TRANSFORMED if name not in (*RULES, "grad")]
# The same primitives with other options have the derivatives of every order alone.
VARIANTS = (*MASKED, "loss of options", "lse alone", "top_k of k")
# A kernel is told of a transformation by the shapes of its operands and by which gradients are asked for.
BY_KERNELS = ("eager", "grad", "grad of the bias", "double transpose", "jacrev", "vmap of jvp", "vmap of one cotangent",
              "grad of scan", "no batch")  # fmt: skip
SORTED_AND_COUNTED = ("hessian", "vmap of grad", "vmap of grad of a sum")

OTHERS = itertools.cycle([op for op in CASES if op != "softmax"])
LIKE_OTHERS: list[tuple[str, str, str]] = [
    *((name, op, "reference") for op in CASES for name in (("hessian",) if op in VARIANTS else RULES)),
    *((name, next(OTHERS), "reference") for name in REST),
    *((name, "attention", "reference") for name in (*PARTS, "hvp", "third", "vmap of grad of a sum")),
    # The body of the loop over chunks is told which operands are mapped.
    *((name, "linear", "reference") for name in ("third", "vmap of grad of a sum", "grad of remat of grad")),
    *((name, "weighted linear", "reference") for name in ("vmap of grad of a sum", "remat", "grad of scan")),
    *((name, "attention", "stand-in") for name in BY_KERNELS),
    *(("vmap of grad of a sum", op, "stand-in") for op in ("weighted", "loss and lse", "probabilities")),
    *((name, "log_softmax masked", "stand-in statistics") for name in ("jvp", "vmap", "hessian", "grad of jvp")),
    *((name, "top_k", "short") for name in SORTED_AND_COUNTED),
    *((name, "top_k", "stand-in") for name in SORTED_AND_COUNTED),
    *((name, op, "short stand-in") for name in ("jvp", *SORTED_AND_COUNTED) for op in ("top_k", "top_k of k")),
]


@pytest.mark.parametrize("name, op, kernels", [*dict.fromkeys(LIKE_OTHERS)], indirect=["kernels"])
def test_like_others(name: str, op: str, kernels: Any) -> None:
    record = kernels()
    CASES[op].check(name, PARTS.get(name))
    assert record is None or record.problems
    assert not (record and record.of_statistics) or {p.op for p in record.problems} == {Op.STATS}


AXES = [0, 1, -2, (0, 2), (1, 2), (2, 0), None, ()]


@pytest.mark.parametrize(
    "op, axis", [(op, axis) for i, op in enumerate([*ROWS, *MASKED]) for axis in AXES[i % 2 :: 2]], ids=str
)
def test_axes(op: str, axis: Any) -> None:
    def along(f: Function) -> Function:
        f = functools.partial(f, axis=axis)
        return functools.partial(masked, f) if op in MASKED else f

    Case(*map(along, ROWS[op.split()[0]]), (X,), (X,)).check(
        "along an axis", lambda f, c: jax.value_and_grad(loss(f))(X)
    )


OVER = ((0, 1), (1, 0), (2, -1), (-1, 1))


@pytest.mark.parametrize(
    "op, in_axis, out_axis", [(op, *axes) for i, op in enumerate([*ROWS, "top_k"]) for axes in OVER[i % 2 :: 2]]
)
def test_vmap_axes(op: str, in_axis: int, out_axis: int) -> None:
    x = CASES[op].xs[0]

    def everything(f: Function, _: Case) -> Any:
        return (
            jax.vmap(f, in_axis, out_axis)(x),
            jax.vmap(jax.grad(linear(f)), in_axis, out_axis)(x),
            jax.grad(lambda x: jnp.sin(jax.vmap(f, in_axis)(x)).sum())(x),
            jax.vmap(jax.vmap(f, out_axis % 2), in_axis)(x),
        )

    CASES[op].check(f"vmap {in_axis} {out_axis}", everything)


@pytest.mark.parametrize(
    "op, axes", [*zip(itertools.cycle(ROWS), [(0, None), (None, 0), (1, 0), (0, 2), (2, 2)] * 2, strict=False)], ids=str
)
def test_vmap_with_a_mask(op: str, axes: tuple[int | None, int | None]) -> None:
    x, mask = (
        a if d is None else jnp.moveaxis(jnp.stack([a, jnp.flip(a)]), 0, d)
        for a, d in zip((X[0], MASK[0]), axes, strict=True)
    )

    def everything(f: Function, _: Case) -> Any:
        of_both = lambda x, m: masked(f, x, m)
        return (
            jax.vmap(of_both, axes)(x, mask),
            jax.vmap(jax.grad(linear(of_both)), axes)(x, mask),
            jax.grad(loss(jax.vmap(of_both, axes)))(x, mask),
        )

    CASES[op].check(f"vmap {axes} with a mask", everything)


@pytest.mark.parametrize("op", ROWS)
def test_a_cotangent_sums_over_what_its_tangent_was_broadcast_to(op: str) -> None:
    def transposed(f: Function, _: Case) -> Any:
        return jax.grad(loss(lambda t: jax.vmap(lambda x: jax.jvp(f, (x,), (t,))[1])(X)))(T[0])

    CASES[op].check("transposed", transposed)


# Losses whose cotangents vmap does not map, though operands are mapped, and which may reach only one of the results.
FLAT: dict[str, Function] = {
    "sums": lambda out, lse: out.sum() + lse.sum(),
    "the mean of the output": lambda out, lse: out.mean(),
    "a linear head": lambda out, lse: (out * HEAD).sum(),
    "the sum of the logsumexp": lambda out, lse: lse.sum(),
    "the logsumexp's sum, and the output": lambda out, lse: jnp.sin(out).sum() + lse.sum(),
    "the output's sum, and the logsumexp": lambda out, lse: out.sum() + jnp.sin(lse).sum(),
    "the logsumexp": lambda out, lse: jnp.sin(lse).sum(),
}
OPERANDS_MAPPED = [
    (1, 2, 3, 0, 0),
    (2, None, None, None, None),
    (None, 0, None, None, None),
    (None, None, 1, None, None),
    (None, None, None, 0, None),
    (None, None, None, None, 0),
    (0, None, None, 1, 1),
]
MAPPED = list(zip(OPERANDS_MAPPED, FLAT, strict=True))


@pytest.mark.parametrize(
    "axes, also, kernels",
    [*((*case, "stand-in") for case in MAPPED), *((*case, "reference") for case in MAPPED[4:5])],
    indirect=["kernels"],
    ids=str,
)
def test_vmap_axes_of_attention(axes: tuple[int | None, ...], also: str, kernels: Any) -> None:
    kernels()
    stacked = zip(OPERANDS, OF_ATTENTION.stacked, axes, strict=True)
    mapped = tuple(x if d is None else jnp.moveaxis(xs, 0, d) for x, xs, d in stacked)

    def everything(f: Function, c: Case) -> Any:
        flat = lambda *operands: FLAT[also](*f(*operands))
        return (
            jax.vmap(jax.grad(flat, c.all), axes)(*mapped),
            jax.grad(lambda *a: loss(jax.vmap(f, axes))(*a), c.all)(*mapped),
            jax.jvp(jax.vmap(f, axes, (1, 0)), mapped, mapped),
        )

    OF_ATTENTION.check(str(axes), everything)


def test_nested_vmap_of_attention(stand_ins: Any) -> None:
    mapped = jnp.stack([Q, -Q, 2 * Q]), jnp.stack([K, 0.5 * K]), *OPERANDS[2:]
    label_factor, of_k = (0, None, None, None, None), (None, 0, None, None, None)

    def everything(f: Function, c: Case) -> Any:
        both, other = jax.vmap(jax.vmap(f, of_k), label_factor), jax.vmap(jax.vmap(f, label_factor), of_k)
        sums = jax.vmap(jax.vmap(jax.grad(linear(f), c.all), of_k), label_factor)
        return [(g(*mapped), jax.grad(loss(g), c.all)(*mapped)) for g in (both, other)], sums(*mapped)

    OF_ATTENTION.check("nested vmap", everything)


@pytest.mark.parametrize(
    "axes, kernels",
    [((0, None, 0), "stand-in"), ((None, 0, 1), "reference"), ((1, 1, None), "stand-in")],
    indirect=["kernels"],
    ids=str,
)
def test_vmap_over_lengths_that_align(axes: Any, kernels: Any) -> None:
    kernels()
    pairs = jnp.array([[3, 5], [2, 4], [1, 0]])
    mapped = [jnp.stack([x, 2 * x, -x], d) if d is not None else x for x, d in zip((Q, K), axes, strict=False)]
    lengths = pairs if axes[2] == 0 else pairs.T if axes[2] == 1 else pairs[0]

    @jax.jit
    def gradients(q: jax.Array, k: jax.Array, lengths: jax.Array) -> Any:
        rules = {"is_causal": True, "causal_alignment": "bottom_right", "key_value_seq_lengths": lengths}
        call = lambda *a: flash_attention(*a, V, **rules)
        return [jax.grad(lambda *a, f=f: f(call(*a)).sum(), (0, 1))(q, k) for f in (jnp.sin, jnp.asarray)]

    got = jax.vmap(gradients, axes)(*mapped, lengths)
    for i in range(3):
        of = [x if d is None else jnp.take(x, i, d) for x, d in zip((*mapped, lengths), axes, strict=True)]
        want = gradients(*of)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5), got, want)


def test_a_scale_of_each_head() -> None:
    by_scale = lambda q, s: flash_attention(q, K, V, scale=s[:, None])
    by_query = lambda q, s: flash_attention(q * s[:, None], K, V, scale=1.0)
    case = Case(by_scale, by_query, (Q, WEIGHTS), (Q, WEIGHTS), (1e-4, 1e-5))
    for name in ("eager", "grad", "hvp"):
        case.check(name)


def test_alignment_by_lengths_in_every_mode() -> None:
    lengths = {"key_value_seq_lengths": jnp.array([4, 2]), "query_seq_lengths": jnp.array([2, 3])}
    ends = lengths["key_value_seq_lengths"] - lengths["query_seq_lengths"]
    visible = jnp.arange(5) <= jnp.arange(3)[:, None] + ends[:, None, None]
    by_rules, by_mask = (
        functools.partial(flash_attention, **lengths, **rules)
        for rules in ({"is_causal": True, "causal_alignment": "bottom_right"}, {"mask": visible[:, None]})
    )
    case = Case(by_rules, by_mask, (Q, K, V), (Q, K, V), (1e-4, 1e-5))
    case.check("jvp")
    case.check("hvp")


def test_what_is_shared_is_not_copied(stand_ins: Any) -> None:
    qs = jnp.stack([Q] * 7)
    call = lambda qs, k, v: jax.vmap(lambda q: flash_attention(q, k, v))(qs)
    for function in (call, lambda *a: jax.grad(lambda *a: jnp.sin(call(*a)).sum(), (0, 1, 2))(*a)):
        stand_ins.problems.clear()
        text = jax.jit(function).lower(qs, K, V).compile().as_text()
        assert {(p.batch, p.query_heads, p.key_heads) for p in stand_ins.problems} == {(2, 28, 2)}
        assert not re.findall(r"f32\[7,2,5,2,\d\]", text)
    text = jax.jit(lambda qs: jax.vmap(lambda q: attention(q, *OPERANDS[1:])[0])(qs)).lower(qs).as_text()
    assert not re.findall(r"tensor<7x2x5x2x\dxf32>", text)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda t: jax.jvp(jaxsoftmax.softmax, (X,), (t,))[1]))(jnp.stack([T] * 7))
    assert not [e for e in jaxpr.eqns if e.primitive.name == "broadcast_in_dim" and e.outvars[0].aval.shape[0] == 7]


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 1, 1, 5), (1, 4, 3, 1), (1, 1, 3, 5)], ids=str)
def test_masks_stay_as_small_as_given(stand_ins: Any, shape: tuple[int, ...]) -> None:
    bias, mask = normal(*shape), jnp.ones(shape, bool)
    jax.jit(jax.grad(lambda q: flash_attention(q, K, V, bias, mask).sum()))(Q)
    assert {(p.bias, p.mask, p.bias_gradient) for p in stand_ins.problems} == {(shape, shape, False)}


def test_vmap_moves_no_data() -> None:
    for axis in (0, 1, 2):
        text = jax.jit(jax.vmap(jaxsoftmax.softmax, axis, axis)).lower(jnp.zeros((6, 7, 8, 9))).compile().as_text()
        assert "transpose(" not in text


def test_jaxprs_read_well() -> None:
    forward = str(jax.make_jaxpr(jaxsoftmax.softmax)(X))
    assert "b:f32[3,4,5] = softmax[axes=(2,) implementation=None scale=1.0] a" in forward
    assert len(forward.splitlines()) == 4
    # `checkify` finds a NaN where 0 is subtracted from a result.
    for op, want in (
        (jaxsoftmax.softmax, ["softmax", "name", "sub", "mul", "softmax_tangent", "sub"]),
        (jaxsoftmax.log_softmax, ["log_softmax", "sub", "mul", "log_softmax_cotangent", "sub"]),
    ):
        eqns = jax.make_jaxpr(lambda x, ct, op=op: jax.vjp(op, x)[1](2 * ct))(X, T).eqns
        assert [e.primitive.name for e in eqns if e.primitive.name != "pjit"] == want
    text = str(jax.make_jaxpr(attention)(*OPERANDS))
    assert "names=('query', 'key', 'value'" in text
    assert "0x" not in text


def primitives(function: Function, *operands: Any) -> list[str]:
    jaxpr = str(jax.make_jaxpr(function)(*operands))
    return [name for name in re.findall(r"= (flash_attention\w*)\[", jaxpr) if name != "flash_attention_residuals"]


def test_reverse_mode_is_one_forward_and_one_backward() -> None:
    assert primitives(OF_ATTENTION.grad(loss(attention)), *OPERANDS) == ["flash_attention", "flash_attention_gradients"]
    assert primitives(attention, *OPERANDS) == ["flash_attention"]
    pushed = lambda q: jax.jvp(lambda q: attention(q, *OPERANDS[1:]), (q,), (q,))
    assert primitives(pushed, Q) == ["flash_attention", "flash_attention_tangent"]


def test_what_reverse_mode_keeps() -> None:
    kept = lambda op, *xs: sorted(x.shape for x in jax.tree.leaves(jax.vjp(op, *xs)[1]) if getattr(x, "size", 0) > 1)
    assert kept(jaxsoftmax.softmax, X) == kept(jaxsoftmax.log_softmax, X)[-1:] == [SHAPE]
    assert [shape for shape in kept(jaxsoftmax.log_softmax, X) if shape == SHAPE] == [SHAPE]
    assert kept(flash_attention, Q, K, V) == sorted([Q.shape, K.shape, V.shape, (2, 3, 4, 6), (2, 4, 3)])


@pytest.mark.parametrize("op", CASES)
def test_checks_on(op: str) -> None:
    CASES[op].check_under_debugging()


@pytest.mark.parametrize("op", ROWS)
def test_nan_debugging_finds_ours(op: str) -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        ROWS[op][0](jnp.array([1.0, jnp.nan]))


def test_offloading_by_name() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["softmax_out"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    run = jax.checkpoint(jaxsoftmax.softmax, policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: (run(x) * T).sum()))(X))
    assert jaxpr.count("= softmax[") == 1
    assert "<host>" in jaxpr


def test_spmd_axis_name() -> None:
    mesh = jax.make_mesh((3,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:3])
    with jax.set_mesh(mesh):
        got = jax.jit(jax.vmap(jax.grad(lambda x: (jaxsoftmax.softmax(x) ** 2).sum()), spmd_axis_name="d"))(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(X), rtol=1e-4, atol=1e-6)
