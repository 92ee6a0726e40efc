"""The loss of `hidden @ weight`: values and gradients against NumPy float64 and optax, memory, products, exchanges."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxsoftmax import linear_cross_entropy as ours
from tests import errors, oracle
from tests.jaxsoftmax.sharded import collectives, exchanges, mesh, put
from tests.pairwise import pairwise

RNG = np.random.default_rng(0)
NAMES = {"label_smoothing": "smoothing", "logits_soft_cap": "soft_cap", "ignore_index": "ignored"}
MOVING = ("hidden", "weight", "bias", "scale", "weights")
TOKENS, EMBEDDING, VOCABULARY = 13, 6, 11


class Truth(NamedTuple):
    """Results and gradients, each with the size of the terms that it is a sum of."""

    results: tuple[tuple[Any, Any], ...]
    gradients: dict[str, tuple[Any, Any]]


def truth(cts: tuple[Any, ...], hidden: Any, weight: Any, labels: Any, **options: Any) -> Truth:
    """In float64, for cotangents of the loss, the logsumexp and the entropy."""
    wide = lambda x: np.asarray(x).astype(np.float64)
    h, w, where = wide(hidden), wide(weight), options.pop("where", None)
    turned = options.pop("weight_layout", "EV") == "VE"
    w = w.T if turned else w
    scale, given = wide(options.pop("scale", 1.0)), wide(options.pop("weights", 1.0))
    raw, size = h @ w, np.abs(h) @ np.abs(w)
    if (bias := options.pop("bias", None)) is not None:
        raw, size = raw + wide(bias), size + np.abs(wide(bias))
    if where is not None and np.ndim(where) == np.ndim(labels):
        where = where[..., None]
    row = {NAMES.get(k, k): v for k, v in options.items()}
    of = functools.partial(oracle.cross_entropy, raw, labels, -1, where, scale, **row)
    plain, want = of(weights=1.0), of(weights=given * cts[0], of_lse=cts[1])
    cap, z = row.get("soft_cap"), scale * raw
    slope = scale * (np.ones_like(z) if cap is None else 1 - np.tanh(z / cap) ** 2)
    z = z if cap is None else cap * np.tanh(z / cap)
    mask = np.broadcast_to(True if where is None else where, z.shape)
    log_p = np.where(mask, z - plain.lse[..., None], 0.0)
    p = np.where(mask, np.exp(log_p), 0.0)
    entropy = -(p * log_p).sum(-1)
    of_entropy = -cts[2][..., None] * p * (log_p + entropy[..., None]) * slope
    g, terms = want.gradient + of_entropy, want.gradient_terms + np.abs(of_entropy)
    # The logits' own rounding moves the gradient by as much as their size.
    terms = terms * (1 + np.abs(scale) * size)
    back = lambda a, b: np.einsum("...v,ev->...e", a, b)
    flat = lambda a: a.reshape(np.asarray(labels).size, a.shape[-1])
    over = lambda a, b: flat(a).T @ flat(b)
    # With a scale, g is the gradient of the logits before it.
    found = {
        "hidden": (back(g, w), back(terms, np.abs(w))),
        "weight": tuple(x.T if turned else x for x in (over(h, g), over(np.abs(h), terms))),
        "bias": (flat(g).sum(0), flat(terms).sum(0)),
        "scale": ((g * raw / scale).sum(-1, keepdims=True), (terms * size / np.abs(scale)).sum(-1, keepdims=True)),
        "weights": (plain.loss * cts[0], np.abs(plain.loss_terms * cts[0]) + size.max(-1)),
    }
    loss = given * plain.loss, np.abs(given) * (plain.loss_terms + size.max(-1))
    spread = np.abs(p * log_p).sum(-1) + size.max(-1)
    return Truth((loss, (plain.lse, np.abs(plain.lse) + size.max(-1)), (entropy, spread)), found)


def case(tokens: tuple[int, ...] = (TOKENS,), embedding: int = EMBEDDING, cols: int = VOCABULARY) -> dict[str, Any]:
    draw = lambda *shape: np.float32(RNG.normal(size=shape))
    return {
        "hidden": draw(*tokens, embedding),
        "weight": draw(embedding, cols),
        "labels": RNG.integers(0, max(cols, 1), tokens).astype(np.int32),
    }


def check(arguments: dict[str, Any], ulps: float = 16, uniform: bool = False, **static: Any) -> None:
    """Results and each gradient, for cotangents that differ from token to token or not."""
    tokens = arguments["labels"].shape
    asked = [True, static.get("return_lse", False), static.get("return_entropy", False)]
    draw = lambda: np.full(tokens, 0.75) if uniform else np.random.default_rng(1).normal(size=tokens)
    cts = tuple(draw() if ask else np.zeros(tokens) for ask in asked)
    want = truth(
        cts, **arguments, **{k: v for k, v in static.items() if k not in ("return_lse", "return_entropy", "chunk_size")}
    )
    moving = {n: jnp.asarray(arguments[n]) for n in MOVING if n in arguments}
    rest = {n: x for n, x in arguments.items() if n not in moving}

    @jax.jit
    def run(moving: Any) -> Any:
        def total(moving: Any) -> Any:
            found = ours(**moving, **rest, **static)
            found = found if isinstance(found, tuple) else (found,)
            given = [ct for ct, ask in zip(cts, asked, strict=True) if ask]
            return sum((jnp.float32(ct) * x).sum() for ct, x in zip(given, found, strict=True)), found

        (_, found), gradients = jax.value_and_grad(total, has_aux=True)(moving)
        return found, gradients

    found, gradients = run(moving)
    results = [each for each, ask in zip(want.results, asked, strict=True) if ask]
    for got, (value, size) in zip(found, results, strict=True):
        assert got.dtype == jnp.promote_types(moving["hidden"].dtype, jnp.float32)
        assert errors.max_error(got, value, magnitude=size + 0.1) <= ulps
    for name, got in gradients.items():
        value, size = want.gradients[name]
        if got.size == 1:
            value, size = (x.sum().reshape(got.shape) for x in (value, size))
        assert got.dtype == moving[name].dtype
        assert errors.max_error(got, value, magnitude=size + 1e-30) <= ulps, name


OPTIONS: dict[str, list[Any]] = {
    "weights": [None, 0.5, RNG.normal(size=TOKENS).astype(np.float32)],
    "where": [None, RNG.random((TOKENS, VOCABULARY)) < 0.7, np.arange(VOCABULARY)[None] < 9, np.arange(TOKENS) % 3 > 0],
    "label_smoothing": [0.0, 0.2],
    "z_loss": [0.0, 0.1],
    "logits_soft_cap": [None, 2.0],
    "scale": [1.0, 0.5, np.float32([[-0.7]]), RNG.uniform(0.5, 2.0, (TOKENS, 1)).astype(np.float32)],
    "ignore_index": [None, 2],
    "bias": [None, RNG.normal(size=VOCABULARY).astype(np.float32)],
    "weight_layout": ["EV", "VE"],
    "returns": [(False, False), (True, False), (False, True), (True, True)],
    "chunk_size": [None, 5],
    "uniform": [True, False],
}


PAIRS = pairwise(*OPTIONS.values())


@pytest.mark.parametrize("which", range(len(PAIRS)))
def test_options_two_by_two(which: int) -> None:
    chosen = {name: value for name, value in zip(OPTIONS, PAIRS[which], strict=True) if value is not None}
    lse, entropy = chosen.pop("returns")
    arguments = case()
    if chosen["weight_layout"] == "VE":
        arguments["weight"] = arguments["weight"].T
    for name in ("bias", "where"):
        if name in chosen:
            arguments[name] = chosen.pop(name)
    for name in ("scale", "weights"):
        if isinstance(chosen.get(name), np.ndarray):
            arguments[name] = chosen.pop(name)
    if "where" in arguments and np.ndim(arguments["where"]) == 2 and "label_smoothing" not in chosen:
        arguments["labels"] %= 9
    check(arguments, ulps=64, return_lse=lse, return_entropy=entropy, **chosen)


@pytest.mark.parametrize(
    "tokens, embedding, cols, chunk",
    [((1,), 3, 7, None), ((5,), 4, 1, 2), ((), 3, 5, None), ((2, 3), 5, 4, 4), ((4,), 0, 5, 3), ((300,), 7, 19, 128),
     ((129,), 3, 5, 64)],
    ids=str,
)  # fmt: skip
def test_shapes(tokens: tuple[int, ...], embedding: int, cols: int, chunk: int | None) -> None:
    arguments = case(tokens, embedding, cols)
    for options in ({"weights": 0.5}, {"return_lse": True, "return_entropy": True, "z_loss": 0.1}):
        check(arguments, ulps=64, chunk_size=chunk, uniform=True, **options)


def test_empty() -> None:
    loss, lse = ours(np.zeros((3, 2)), np.zeros((2, 0)), np.full(3, -1), ignore_index=-1, return_lse=True)
    np.testing.assert_array_equal(loss, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    for tokens in ((0,), (3, 0), (0, 2)):
        arguments = case(tokens)
        for options in ({}, {"weights": 0.5}, {"return_lse": True, "return_entropy": True}):
            call = lambda h, w, o=options, y=arguments["labels"]: jax.tree.leaves(ours(h, w, y, **o))
            assert {x.shape for x in call(arguments["hidden"], arguments["weight"])} == {tokens}
            total = lambda h, w, call=call: sum(x.sum() for x in call(h, w))
            of_hidden, of_weight = jax.grad(total, (0, 1))(arguments["hidden"], arguments["weight"])
            assert of_hidden.shape == (*tokens, EMBEDDING)
            np.testing.assert_array_equal(of_weight, np.zeros((EMBEDDING, VOCABULARY)))


def test_a_gradient_is_what_is_asked_for() -> None:
    arguments = case()
    call = lambda h, w: ours(h, w, arguments["labels"], weights=0.5, chunk_size=5).sum()
    both = jax.grad(call, (0, 1))(arguments["hidden"], arguments["weight"])
    for i in (0, 1):
        alone = jax.jit(jax.grad(call, i))(arguments["hidden"], arguments["weight"])
        np.testing.assert_allclose(alone, both[i], rtol=1e-5, atol=1e-6)


def of_products(hidden: jax.Array, weight: jax.Array, labels: jax.Array, **how: Any) -> Any:
    """Losses, logsumexps and entropies by optax and `jax.nn`, from float32 logits."""
    logits = jnp.dot(hidden, weight, preferred_element_type=jnp.float32, **how)
    log_p = jax.nn.log_softmax(logits)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return loss, jax.nn.logsumexp(logits, -1), -(jnp.exp(log_p) * log_p).sum(-1)


@pytest.mark.parametrize("dtype, tokens, chunk", [(jnp.bfloat16, 1024, 8), (jnp.float16, 96, 32)])
def test_of_16_bits_as_exact_as_optax_on_float32_logits(dtype: Any, tokens: int, chunk: int) -> None:
    arguments = case((tokens,), 48, 257)
    h, w = (jnp.asarray(arguments[n], dtype) * (1.0 if n == "hidden" else 0.4) for n in ("hidden", "weight"))
    labels = jnp.asarray(arguments["labels"])
    wide = {"hidden": h, "weight": w, "labels": labels}
    for ways in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        cts = tuple(np.full(tokens, float(way)) for way in ways)
        want = truth(cts, **wide)

        def total(call: Any, h: jax.Array, w: jax.Array, ways: Any = ways) -> Any:
            found = call(h, w, labels)
            found = found if isinstance(found, tuple) else (found,)
            return sum(way * x.sum() for way, x in zip(ways, found, strict=False)), found

        kinds = [functools.partial(ours, chunk_size=chunk, return_lse=True, return_entropy=True)]
        if ways[0]:
            kinds += [functools.partial(ours, chunk_size=chunk), functools.partial(ours, chunk_size=chunk, weights=1.0)]
        run = lambda call: jax.jit(jax.value_and_grad(functools.partial(total, call), (0, 1), has_aux=True))(h, w)
        (_, theirs), of_theirs = run(of_products)
        for kind in kinds:
            (_, found), gradients = run(kind)
            for got, ref, (value, _) in zip(found, theirs, want.results, strict=False):
                limit = 2 * np.abs(np.asarray(ref, np.float64) - value).max() + 1e-6
                assert np.abs(np.asarray(got, np.float64) - value).max() <= limit
            for got, ref, name in zip(gradients, of_theirs, ("hidden", "weight"), strict=True):
                value = want.gradients[name][0]
                error = lambda x, value=value: np.asarray(x, np.float64) - value
                assert got.dtype == dtype
                assert np.sqrt((error(got) ** 2).mean()) <= 2 * np.sqrt((error(ref) ** 2).mean()), (name, ways)


def test_float16_holds_small_gradients() -> None:
    """Gradients of logits that are below what float16 holds, and of the weight that are not."""
    arguments = case((96,), 48, 257)
    h, w = (jnp.asarray(arguments[n], jnp.float16) for n in ("hidden", "weight"))
    small = 2.0**-22
    for options in ({"weights": small}, {}):
        call = lambda h, w, o=options: small ** (not o) * ours(h, w, arguments["labels"], chunk_size=32, **o).sum()
        got = jax.jit(jax.grad(call, 1))(h, w * 0.1)
        want = jax.grad(lambda h, w: ours(h, w, arguments["labels"]).sum(), 1)(h, w * 0.1) * np.float16(small)
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-24)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_a_mean_of_losses_with_a_mask(dtype: Any) -> None:
    """Tokens that do not count have another cotangent than those that do; or those that do have several."""
    arguments = case()
    h, w = (jnp.asarray(arguments[n], dtype) for n in ("hidden", "weight"))
    labels = jnp.where(jnp.arange(TOKENS) % 3 == 0, -1, arguments["labels"])
    some = labels >= 0
    for cts in (some / some.sum(), jnp.where(some, 0.5, 3.0), jnp.where(some, jnp.arange(TOKENS) % 2, 1.0)):
        run = lambda of, cts=cts: jax.jit(jax.grad(lambda h, w: (cts * of(h, w, labels)).sum(), (0, 1)))(h, w)
        got = run(functools.partial(ours, ignore_index=-1, chunk_size=5))
        want = run(lambda *a: jnp.where(some, of_products(*a)[0], 0))
        tolerance = 1e-5 if dtype == jnp.float32 else 4e-3
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, want)


def test_rows_that_do_not_count() -> None:
    arguments = case()
    hidden, labels = arguments["hidden"], arguments["labels"].copy()
    hidden[3], hidden[7], labels[3], labels[7] = np.nan, np.inf, -1, -1
    for options in ({}, {"weights": 0.5}, {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 2.0}):
        call = functools.partial(ours, labels=labels, ignore_index=-1, chunk_size=5, **options)
        total = lambda h, w, call=call: call(h, w).sum()
        loss, (of_hidden, of_weight) = jax.value_and_grad(total, (0, 1))(hidden, arguments["weight"])
        assert np.isfinite(loss)
        assert np.isfinite(of_weight).all()
        assert not np.any(of_hidden[np.array([3, 7])])
        kept = np.delete(np.arange(TOKENS), [3, 7])
        want = lambda h, w, o=options, y=labels[kept]: ours(h, w, y, **o).sum()
        np.testing.assert_allclose(
            of_weight, jax.grad(want, 1)(hidden[kept], arguments["weight"]), rtol=1e-4, atol=1e-5
        )


EVERYTHING: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 0.1, "logits_soft_cap": 2.0, "ignore_index": -1}
EVERYTHING |= {"return_lse": True, "return_entropy": True}
UNUSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weights": 0.5},
    "chunks": {"chunk_size": 5, "bias": RNG.normal(size=VOCABULARY)},
    "numbers": {n: jnp.float32(EVERYTHING[n]) for n in ("label_smoothing", "z_loss", "logits_soft_cap")},
    "everything": EVERYTHING | {"bias": RNG.normal(size=VOCABULARY), "scale": RNG.uniform(0.5, 2.0, (TOKENS, 1))},
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_token_that_is_not_used(name: str) -> None:
    """One of NaN, inf or overflow moves no gradient where its results are thrown away, or those of all tokens."""
    arguments, options = case(), dict(UNUSED[name])
    arguments["labels"][9] = -1 if "ignore_index" in options else 0
    moving = {n: arguments.pop(n) for n in ("hidden", "weight")}
    moving |= {n: np.float32(options.pop(n)) for n in MOVING if n in options}
    used, given = np.arange(TOKENS) != 4, np.cos(np.arange(TOKENS))

    @jax.jit
    def gradients(moving: Any) -> Any:
        call = lambda moving: jax.tree.leaves(ours(**moving, **arguments, **options))
        of_used = lambda moving: sum(jnp.where(used, x * given, 0.0).sum() for x in call(moving))
        of_finite = lambda moving: sum(jnp.where(jnp.isfinite(x), x, 0.0) for x in (y.sum() for y in call(moving)))
        # The losses alone, of which an ignored token has none.
        of_losses = lambda moving: jnp.where(used, call(moving)[0], 0.0).sum()
        return jax.grad(of_used)(moving), jax.grad(of_losses)(moving), jax.grad(of_finite)(moving)

    want, of_losses, _ = gradients(moving)
    assert not np.any(want["hidden"][4])
    for bad in (np.nan, np.inf, 3e38):
        hidden = moving["hidden"].copy()
        hidden[4] = bad
        got, _, of_finite = gradients(moving | {"hidden": hidden})
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
        # A soft cap makes finite logits of infinite ones.
        assert "logits_soft_cap" in options or not any(np.any(x) for x in of_finite.values())
        hidden[9] = bad
        ignored = gradients(moving | {"hidden": hidden})[1]
        if "ignore_index" in options:
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ignored, of_losses)


def test_entropies_are_never_negative() -> None:
    """Of logits far apart the terms of the entropy cancel; its gradient is right all the same.

    The last token's logits are NaN.
    """
    hidden = RNG.normal(size=(257, 16)).astype(np.float32)
    hidden[-1] = np.nan
    weight, labels = RNG.normal(size=(16, 64)).astype(np.float32), np.zeros(257, np.int32)
    where = RNG.random(64) < 0.7

    @functools.partial(jax.jit, static_argnames=("scale", "cut", "chunk"))
    def both(h: jax.Array, scale: float, cut: bool, chunk: int | None) -> Any:
        more = {"where": where[None]} if cut else {}
        of = lambda h: ours(h, weight, labels, scale=scale, return_entropy=True, chunk_size=chunk, **more)[1]
        found, pull = jax.vjp(of, h)
        return found, jax.jvp(of, [h], [jnp.ones_like(h)])[1], pull(jnp.ones_like(found))[0]

    for cut, chunk in ((False, None), (True, 100)):
        for scale in (-1e2, 1e4):
            found, tangent, gradient = map(np.asarray, both(hidden, scale, cut, chunk))
            assert np.isnan([found[-1], tangent[-1]]).all()
            assert (found[:-1] >= 0).all()
            np.testing.assert_allclose(tangent[:-1], gradient[:-1].sum(1), rtol=1e-2, atol=1e-3 * abs(scale))
            z = np.float64(scale) * (np.float64(hidden) @ weight)[:-1]
            z = np.where(where | (not cut), z, -np.inf)
            p = np.exp(z - z.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            log_p = np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)
            entropy = -(p * log_p).sum(1)
            np.testing.assert_allclose(found[:-1], entropy, atol=1e-6 * np.abs(z[np.isfinite(z)]).max())
            want = np.float64(scale) * (-p * (log_p + entropy[:, None])) @ weight.T
            np.testing.assert_allclose(gradient[:-1], want, atol=1e-5 * scale**2)


def test_labels_that_are_no_columns() -> None:
    arguments = case()
    bad = arguments["labels"].copy()
    bad[2], bad[5] = VOCABULARY, -7
    with pytest.raises(ValueError, match=r"linear_cross_entropy: labels has 11 at \(2,\)"):
        ours(arguments["hidden"], arguments["weight"], bad)
    wrong = (bad < 0) | (bad >= VOCABULARY)
    for options in ({}, {"weights": 0.5}, {"return_entropy": True}):
        call = lambda h, w, y, o=options: jax.tree.leaves(ours(h, w, y, chunk_size=5, **o))[0]
        loss = jax.jit(call)(arguments["hidden"], arguments["weight"], bad)
        np.testing.assert_array_equal(np.isnan(loss), wrong)
        used = lambda h, w, y, call=call: jnp.where(wrong, 0.0, call(h, w, y)).sum()
        pulled = jax.jit(jax.grad(used, (0, 1)))(arguments["hidden"], arguments["weight"], bad)
        kept = jax.grad(lambda h, w, y, call=call: call(h, w, y).sum(), (0, 1))(
            arguments["hidden"][~wrong], arguments["weight"], bad[~wrong]
        )
        assert not np.any(pulled[0][wrong])
        np.testing.assert_allclose(pulled[0][~wrong], kept[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pulled[1], kept[1], rtol=1e-5, atol=1e-6)


def test_float64() -> None:
    with jax.enable_x64(True):
        arguments = {n: x.astype(np.float64) if n != "labels" else x for n, x in case().items()}
        check(arguments, ulps=64, uniform=True, chunk_size=5, z_loss=0.1)


H, W = (jnp.asarray(np.random.default_rng(3).normal(size=shape), jnp.float32) for shape in ((5, 4), (4, 7)))
Y = np.array([0, 6, 3, 3, 1])


@pytest.mark.parametrize("factors", [0.0, 1.0])
def test_second_derivatives_by_the_factors_of_tokens(factors: float) -> None:
    """Where all factors are 0 or the same, their tangents are not."""
    k, of_k = jnp.full(5, factors), jnp.arange(5.0)

    def found(total: Any) -> Any:
        of_all = lambda *of: sum(
            jnp.vdot(x, t) for x, t in zip(jax.grad(total, (0, 1, 2))(*of), (H, W, of_k), strict=True)
        )
        forward = jax.jvp(jax.grad(total, (0, 1, 2)), (H, W, k), (H, W, of_k))[1]
        return forward, jax.grad(of_all, (0, 1, 2))(H, W, k)

    want = found(lambda h, w, k: (k * optax.softmax_cross_entropy_with_integer_labels(h @ w, jnp.asarray(Y))).sum())
    for total in (
        lambda h, w, k: ours(h, w, Y, weights=k).sum(),
        lambda h, w, k: (k * ours(h, w, Y, weights=1.0)).sum(),
        lambda h, w, k: (k * ours(h, w, Y, chunk_size=2)).sum(),
    ):
        got = jax.jit(functools.partial(found, total))()
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


BIG = {"hidden": (4096, 64), "weight": (64, 4096)}
ONE_CHUNK = 256 * 4096 * 4  # bytes of float32 logits
WEIGHTED = functools.partial(ours, weights=1 / 4096, chunk_size=256)
MEAN = functools.partial(ours, chunk_size=256)


def program(function: Any) -> Any:
    x = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in BIG.values()]
    return jax.jit(function).lower(*x, jax.ShapeDtypeStruct((4096,), jnp.int32)).compile()


gradient = jax.grad(lambda h, w, y: WEIGHTED(h, w, y).sum(), (0, 1))
# Of a program the products, and how many chunks' logits fit its temporaries.
PROGRAMS: dict[str, tuple[Any, int, float]] = {
    "forward": (MEAN, 1, 1.5),
    "with weights": (jax.value_and_grad(lambda *a: WEIGHTED(*a).sum(), (0, 1)), 3, 2.5),
    "with weights, by a mean": (jax.value_and_grad(lambda *a: WEIGHTED(*a).mean(), (0, 1)), 3, 2.5),
    "by a mean": (jax.value_and_grad(lambda *a: MEAN(*a).mean(), (0, 1)), 3, 2.5),
    "a reduction": (jax.value_and_grad(lambda *a: MEAN(*a, reduction="mean"), (0, 1)), 3, 2.5),
    "with logsumexps": (jax.value_and_grad(lambda *a: MEAN(*a, return_lse=True)[0].mean(), (0, 1)), 4, 2.5),
    "a frozen weight": (jax.value_and_grad(lambda *a: WEIGHTED(*a).sum(), 0), 2, 2.5),
    "a frozen hidden": (jax.value_and_grad(lambda *a: WEIGHTED(*a).sum(), 1), 2, 2.5),
    "of the entropy": (jax.grad(lambda *a: MEAN(*a, return_entropy=True)[1].sum(), (0, 1)), 4, 3.5),
    "forward mode": (lambda h, w, y: jax.jvp(lambda h, w: MEAN(h, w, y), (h, w), (h, w)), 4, 4),
    "forward over reverse": (lambda h, w, y: jax.jvp(lambda h, w: gradient(h, w, y), (h, w), (h, w)), 14, 8),
    "reverse over reverse": (jax.grad(lambda *a: sum(jnp.vdot(x, x) for x in gradient(*a)), (0, 1)), 16, 8),
    "remat": (jax.grad(jax.checkpoint(lambda *a: WEIGHTED(*a).sum()), (0, 1)), 5, 2.5),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_and_products(name: str) -> None:
    function, products, logits = PROGRAMS[name]
    compiled = program(function)
    text = compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes <= logits * ONE_CHUNK
    assert len(re.findall(r" dot\(", text)) <= products
    # That the cotangents are all the same is known when it is compiled, but behind the barriers of `remat`.
    assert (" conditional(" in text) == (name == "remat")
    # The weight's gradient is carried from chunk to chunk where it lies.
    assert "over reverse" in name or not re.findall(r"= f32\[64,4096\]\S* copy\(", text)


SHARDED = {"hidden": (64, 16), "weight": (16, 48)}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_what_devices_exchange(kind: AxisType) -> None:
    on = mesh(kind)
    h, w = (np.float32(RNG.normal(size=shape)) for shape in SHARDED.values())
    labels = RNG.integers(0, 48, 64).astype(np.int32)
    forward = functools.partial(ours, weights=1 / 64, chunk_size=4)
    value = lambda h, w, y: forward(h, w, y).sum()
    tokens = put(h, P(("d", "m")), on), put(w, P(), on), put(labels, P(("d", "m")), on)
    cols = put(h, P(), on), put(w, P(None, ("d", "m")), on), put(labels, P(), on)
    assert collectives(forward, *tokens) == {}
    sizes = lambda function, *operands: sorted(
        (array.kind, array.size)
        for arrays in exchanges(jax.jit(function).lower(*operands).compile())
        for array in arrays
    )
    # The gradient of the weight, a second time in a branch that is not taken; and whether all tokens are alike, and of
    # those that count, in that branch, where JAX brings what says so to one sharding.
    explicit = kind is AxisType.Explicit
    whether = [*explicit * [("all-gather", 64)], *(2 + 3 * explicit) * [("all-reduce", 1)]]
    unweighted = lambda *a: ours(*a, chunk_size=4).sum()
    for function in (value, unweighted):
        assert sizes(jax.grad(function, 1), *tokens) == [*whether, *2 * [("all-reduce", 16 * 48)]]
        assert sizes(jax.grad(function, 0), *tokens) == []
    # Of each token the maximum, the sum and the label's logit of eight devices.
    assert sizes(forward, *cols) == [("all-gather", 8 * 3 * 64)]
    # With their gradients, those of a chunk.
    assert sizes(jax.grad(unweighted, 0), *cols) == [("all-gather", 8 * 3 * 4), ("all-reduce", 64 * 16)]
    assert sizes(jax.grad(unweighted, 1), *cols) == [("all-gather", 8 * 3 * 4)]


@pytest.mark.parametrize(
    "asked, summed, chunk",
    [(None, "bf16", None), (jnp.bfloat16, "bf16", 4), ("float32", "f32", None), ("float32", "f32", 4)],
    ids=str,
)
def test_the_dtype_in_which_devices_sum(asked: Any, summed: str, chunk: int | None) -> None:
    """The gradient of a weight of 16 bits; that of float32 is right in `test_what_devices_exchange`."""
    on, by_token = mesh(AxisType.Explicit), P(("d", "m"))
    h, w = (jnp.asarray(RNG.normal(size=shape), jnp.bfloat16) for shape in SHARDED.values())
    labels = RNG.integers(0, 48, 64).astype(np.int32)
    total = lambda h, w, y, **rules: ours(h, w, y, weights=1 / 64, **rules).sum()
    of_weight = jax.grad(functools.partial(total, chunk_size=chunk, reduce_dtype=asked), 1)
    program = jax.jit(of_weight).lower(put(h, by_token, on), put(w, P(), on), put(labels, by_token, on))
    sums = re.findall(r"\(tensor<16x48x(\w+)>\) -> tensor<16x48x\1>", program.as_text())
    assert set(sums) == {summed}, sums
    want = np.asarray(jax.grad(total, 1)(*(np.asarray(x, np.float32) for x in (h, w)), labels))
    error = lambda got: np.sqrt(((np.asarray(got, np.float32) - want) ** 2).mean())
    got = program.compile()(put(h, by_token, on), put(w, P(), on), put(labels, by_token, on))
    assert error(got) <= 2 * error(jax.grad(total, 1)(h, w, labels))


@pytest.mark.parametrize("tokens, cols, hidden", [(13, 11, 0), (8, 12, 8)])
def test_vocabularies_and_tokens_that_divide_or_not(tokens: int, cols: int, hidden: int) -> None:
    """With the first columns hidden, some devices have none that counts."""
    on, where = mesh(), {"where": np.arange(cols)[None] >= hidden} if hidden else {}
    h, w = (np.float32(RNG.normal(size=shape)) for shape in ((tokens, 6), (6, cols)))
    labels = RNG.integers(hidden, cols, tokens).astype(np.int32)
    cut = lambda x, spec: jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(on, spec))

    def total(h: jax.Array, w: jax.Array, sharded: bool, **options: Any) -> jax.Array:
        h, w, y = (cut(h, P("d")), cut(w, P(None, "m")), cut(labels, P("d"))) if sharded else (h, w, labels)
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(ours(h, w, y, chunk_size=2, **where, **options)))

    for options in ({"weights": 0.5}, {"return_lse": True, "return_entropy": True, "label_smoothing": 0.1}):

        @functools.partial(jax.jit, static_argnums=2)
        def run(h: jax.Array, w: jax.Array, sharded: bool, options: Any = options) -> Any:
            of = functools.partial(total, sharded=sharded, **options)
            return jax.value_and_grad(of, (0, 1))(h, w), jax.jvp(of, (h, w), (jnp.cos(h), jnp.cos(w)))[1]

        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), run(h, w, True), run(h, w, False)
        )
