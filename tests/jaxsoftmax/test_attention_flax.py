"""Flax's multi-head attention, nnx and linen, with `flash_attention` in place of its own function."""

import functools
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxsoftmax

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 6, 16)), jnp.float32)
MASKS = {
    "none": None,
    "causal float": nn.make_causal_mask(X[..., 0]),
    "padding bool": jnp.asarray([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], bool)[:, None, None, :],
    "combined": nn.combine_masks(
        nn.make_causal_mask(X[..., 0]), nn.make_attention_mask(X[..., 0] > -9, X[..., 1] > -0.9)
    ),
}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def close(ours: Any, theirs: Any, tol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=10 * tol, atol=tol), ours, theirs)


def nnx_pair(**arguments: Any) -> list[nnx.MultiHeadAttention]:
    """The same layer twice, with our function and with Flax's."""
    functions = ({"attention_fn": jaxsoftmax.flash_attention}, {})
    return [
        nnx.MultiHeadAttention(
            num_heads=4, in_features=16, qkv_features=32, rngs=nnx.Rngs(0), **{"decode": False} | arguments | f
        )
        for f in functions
    ]


GROUPED, NARROW = {"num_kv_heads": 2}, {"dtype": jnp.bfloat16}


@pytest.mark.parametrize("mask, arguments", [("none", {}), ("padding bool", NARROW), ("combined", GROUPED)], ids=str)
def test_nnx(mask: str, arguments: dict[str, Any]) -> None:
    ours, theirs = nnx_pair(**arguments)

    @nnx.jit
    def both(layer: nnx.MultiHeadAttention, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda layer, x: jnp.sin(layer(x, mask=MASKS[mask])).sum(), argnums=(0, 1))(layer, x)

    close(both(ours, X), both(theirs, X), 0.1 if arguments.get("dtype") else 2e-5)


def test_nnx_causal_and_decoding() -> None:
    ours, theirs = nnx_pair()
    close(ours(X, is_causal=True), theirs(X, is_causal=True))
    ours, theirs = nnx_pair(decode=True)
    for layer in (ours, theirs):
        layer.init_cache(X.shape)
    for i in range(3):
        close(ours(X[:, i : i + 1]), theirs(X[:, i : i + 1]))


def test_a_decoding_step_is_split() -> None:
    """For a GPU, against a cache whose filled part Flax's mask tells: a kernel, and one that merges its splits."""
    facts = {"num_heads": 8, "in_features": 512, "dtype": jnp.bfloat16, "decode": True} | GROUPED
    layer = nnx.MultiHeadAttention(**facts, attention_fn=jaxsoftmax.flash_attention, rngs=nnx.Rngs(0))
    layer.init_cache((1, 8192, 512), jnp.bfloat16)
    graph, state = nnx.split(layer)
    step = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).trace(state, jnp.ones((1, 1, 512), jnp.bfloat16))
    assert step.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 2


def test_a_decoding_step_of_linen_is_split() -> None:
    layer = nn.MultiHeadDotProductAttention(
        num_heads=8, dtype=jnp.bfloat16, decode=True, attention_fn=jaxsoftmax.flash_attention
    )
    whole, one = (jax.ShapeDtypeStruct((1, length, 512), jnp.bfloat16) for length in (8192, 1))
    variables = jax.eval_shape(layer.init, jax.random.key(0), whole)
    step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"])).trace(variables, one)
    assert step.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("broadcast", [False, True])
def test_nnx_dropout_and_sowing(broadcast: bool) -> None:
    ours, theirs = nnx_pair(dropout_rate=0.4, broadcast_dropout=broadcast)
    call = lambda layer: layer(X, deterministic=False, rngs=nnx.Rngs(7), sow_weights=True)
    found = [nnx.jit(call)(layer) for layer in (ours, theirs)]
    close(*found)
    close(*(nnx.state(layer, nnx.Intermediate) for layer in (ours, theirs)))
    certain = [nnx.jit(lambda layer: layer(X, deterministic=True))(layer) for layer in (ours, theirs)]
    close(*certain)
    assert not np.allclose(found[0], certain[0])
    close(*(nnx.jit(nnx.grad(lambda layer: jnp.sin(call(layer)).sum()))(layer) for layer in (ours, theirs)))


@pytest.mark.parametrize("mask, dtype", [("none", None), ("causal float", None), ("combined", jnp.bfloat16)], ids=str)
def test_linen(mask: str, dtype: Any) -> None:
    build = functools.partial(nn.MultiHeadDotProductAttention, num_heads=4, dtype=dtype, force_fp32_for_softmax=True)
    ours, theirs = build(attention_fn=jaxsoftmax.flash_attention), build()
    variables = theirs.init(jax.random.key(0), X)

    def both(layer: nn.Module) -> Any:
        return jax.jit(jax.value_and_grad(lambda v: jnp.sin(layer.apply(v, X, mask=MASKS[mask])).sum()))(variables)

    close(both(ours), both(theirs), 0.1 if dtype else 2e-5)
    assert mask == "none" or not np.allclose(ours.apply(variables, X, mask=MASKS[mask]), ours.apply(variables, X))


def test_linen_dropout_sowing_and_remat() -> None:
    build = functools.partial(nn.MultiHeadDotProductAttention, num_heads=4, dropout_rate=0.4, deterministic=False)
    ours, theirs = build(attention_fn=jaxsoftmax.flash_attention), build()
    variables = theirs.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    rngs = {"dropout": jax.random.key(3)}
    apply = lambda layer: layer.apply(variables, X, sow_weights=True, rngs=rngs, mutable=["intermediates"])
    close(apply(ours), apply(theirs))
    rematted = nn.remat(nn.MultiHeadDotProductAttention)(num_heads=4, attention_fn=jaxsoftmax.flash_attention)
    plain = nn.MultiHeadDotProductAttention(num_heads=4)
    variables = plain.init(jax.random.key(0), X)
    gradients = [jax.grad(lambda v, layer=layer: layer.apply(v, X).sum())(variables) for layer in (rematted, plain)]
    close(*gradients)


@pytest.mark.parametrize("force", [False, True])
def test_linen_sows_float32_if_forced_to(force: bool) -> None:
    build = functools.partial(
        nn.MultiHeadDotProductAttention, num_heads=4, dtype=jnp.bfloat16, force_fp32_for_softmax=force
    )
    variables = build().init(jax.random.key(0), X)
    ours, theirs = (
        layer.apply(variables, X, sow_weights=True, mutable=["intermediates"])[1]
        for layer in (build(attention_fn=jaxsoftmax.flash_attention), build())
    )
    close(ours, theirs, 1e-2)
    of = lambda sown: {x.dtype for x in jax.tree.leaves(sown)}
    assert of(ours) == of(theirs) == {jnp.dtype("float32" if force else "bfloat16")}


FLAX = ({"deterministic": True}, {"dropout_rng": jax.random.key(0)}, {"broadcast_dropout": False},
        {"force_fp32_for_softmax": True}, {"einsum_dot_general": jax.lax.dot_general},
        {"promote_dtype": nnx.nn.dtypes.promote_dtype})  # fmt: skip


def test_masks_of_numbers() -> None:
    """Flax makes masks of 0 and 1; beside what only its layers pass, they are taken, traced ones too."""
    qkv = [x.reshape(2, 6, 4, 4) for x in (X, 2 * X, -X)]
    mask = nn.make_causal_mask(X[..., 0], dtype=bool)
    want = np.asarray(jaxsoftmax.flash_attention(*qkv, mask=mask))
    for passed in FLAX:
        call = lambda mask, passed=passed: jaxsoftmax.flash_attention(*qkv, mask=mask, **passed)
        for dtype in (bool, jnp.int8, jnp.uint32, jnp.bfloat16, jnp.float32):
            np.testing.assert_array_equal(call(mask.astype(dtype)), want)
        np.testing.assert_array_equal(call(np.asarray(mask, np.float64)), want)
    np.testing.assert_allclose(jax.jit(call)(mask.astype(jnp.float32)), want, rtol=1e-4, atol=1e-6)
    for plain in ({}, {"dropout_rate": 0.0}, {"dtype": None}, {"precision": None}):
        with pytest.raises(TypeError, match="mask has dtype float32, expected bool"):
            jaxsoftmax.flash_attention(*qkv, mask=mask.astype(jnp.float32), **plain)


@pytest.mark.parametrize("theirs", [nn.dot_product_attention, nnx.dot_product_attention], ids=["linen", "nnx"])
def test_flaxs_defaults_may_be_passed_on(theirs: Any) -> None:
    """As a wrapper does that names all of their parameters; `promote_dtype` gives the operands one dtype."""
    parameters = inspect.signature(theirs).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    q, k, v = (x.reshape(2, 6, 4, 4) for x in (X, 2 * X, -X))
    close(jaxsoftmax.flash_attention(q, k, v, **defaults), theirs(q, k, v, **defaults))
    if "promote_dtype" in defaults:
        ours = jaxsoftmax.flash_attention(q.astype(jnp.bfloat16), k, v, **defaults)
        assert ours.dtype == jnp.float32
    jaxsoftmax.flash_attention(q, k, v, einsum_dot_general=jax.lax.dot_general)


def test_everything_that_flax_passes_is_named() -> None:
    """Linen passes on only what the signature names: a parameter that is not there would be lost without a word."""
    ours = set(inspect.signature(jaxsoftmax.flash_attention).parameters)
    linen = set(inspect.signature(nn.dot_product_attention).parameters)
    plain = set(inspect.signature(nnx.dot_product_attention).parameters)
    assert linen | plain | {"input_positions"} <= ours
    kinds = {p.kind for p in inspect.signature(jaxsoftmax.flash_attention).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
