"""`flash_attention`'s values: against the oracle over combinations of rules, and against `jax.nn`."""

import functools
import inspect
import pydoc
import re
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from pallas_kernels.attention import tiles
from tests import attention_oracle

Arguments = dict[str, Any]


def inputs(seed: Any = 0, *, batch: int = 2, queries: int = 5, keys: int = 7, dtype: Any = np.float32,
           heads: int = 4, shared: int = 2, dim: int = 8, value_dim: int = 8) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Queries, keys and values; `seed` may be a generator."""
    shapes = (batch, queries, heads, dim), (batch, keys, shared, dim), (batch, keys, shared, value_dim)
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def call_of(seed: int) -> tuple[tuple[np.ndarray, ...], Arguments]:
    """Operands and arguments: any combination of what may be asked for."""
    rng = np.random.default_rng(seed)
    one_of = lambda *choices: choices[rng.integers(len(choices))]
    batch, queries, keys = one_of(1, 2), one_of(1, 3, 8), one_of(1, 4, 8)
    shared, group = one_of((1, 1), (1, 3), (2, 1), (2, 2))
    heads, sizes = shared * group, {"batch": batch, "queries": queries, "keys": keys, "shared": shared}
    broadcast = lambda: tuple(one_of(1, n) for n in (batch, heads, queries, keys))
    choices = {
        "bias": lambda: rng.normal(size=broadcast()).astype(np.float32),
        "mask": lambda: rng.random(broadcast()) < 0.7,
        "is_causal": lambda: True,
        "causal_alignment": lambda: "bottom_right",
        "local_window_size": lambda: (one_of(None, 0, 1, 3), one_of(None, 0, 1, 3)),
        "query_seq_lengths": lambda: rng.integers(0, queries + 2, batch),
        "key_value_seq_lengths": lambda: rng.integers(0, keys + 2, batch),
        "query_segment_ids": lambda: rng.integers(0, 2, (batch, queries)),
        "logits_soft_cap": lambda: 1.5,
        "sinks": lambda: rng.normal(size=heads).astype(np.float32),
        "scale": lambda: one_of(0.5, 1.0, -2.0),
    }
    arguments = {name: choose() for name, choose in choices.items() if one_of(True, False)}
    if "query_segment_ids" in arguments:
        arguments["key_value_segment_ids"] = rng.integers(0, 2, (batch, keys))
    return inputs(rng, **sizes, heads=heads, value_dim=one_of(8, 4)), arguments


@pytest.fixture(params=[512, 3], ids=["one tile", "many tiles"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The reference's chunks; short ones make short lengths take its loops."""
    monkeypatch.setattr(tiles, "CHUNK", request.param)
    jax.clear_caches()
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 28))  # in which each two of the arguments meet
def test_values_and_gradients(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one tile and over many."""
    monkeypatch.setattr(tiles, "CHUNK", 3 if seed % 2 else 512)
    jax.clear_caches()
    check(*call_of(seed))


def check(operands: tuple[np.ndarray, ...], arguments: Arguments) -> None:
    rng = np.random.default_rng(1)
    floats = {name: arguments[name] for name in ("bias", "sinks") if name in arguments}
    rest = {name: x for name, x in arguments.items() if name not in floats}
    truth = attention_oracle.forward(*operands, **arguments)
    d_out, d_lse = (rng.normal(size=x.shape).astype(np.float32) for x in (truth.out, truth.lse))
    want = attention_oracle.gradients(*operands, d_out=d_out, d_lse=d_lse, **arguments)

    @jax.jit
    def both(operands: Any, floats: Any, d_out: jax.Array, d_lse: jax.Array) -> Any:
        call = lambda ops, floats: jaxsoftmax.flash_attention(*ops, **floats, **rest, return_residual=True)
        out, pull = jax.vjp(call, operands, floats)
        return out, pull((d_out, d_lse))

    (out, lse), (d_operands, d_floats) = both(operands, floats, d_out, np.swapaxes(d_lse, 1, 2))
    np.testing.assert_allclose(out, truth.out, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(lse, np.swapaxes(truth.lse, 1, 2), rtol=2e-4, atol=2e-5)
    got = dict(zip(("query", "key", "value"), d_operands, strict=True)) | d_floats
    assert set(got) == set(want)
    for name, gradient in got.items():
        np.testing.assert_allclose(gradient, want[name], rtol=5e-4, atol=5e-5, err_msg=name)


def test_without_a_batch_and_with_several() -> None:
    """Each argument that has the batch's axes follows them."""
    rng, (q, k, v) = np.random.default_rng(1), inputs(batch=6)
    lengths = np.array([7, 2, 3, 1, 5, 6])
    arguments: list[Arguments] = [
        {"mask": rng.random((6, 1, 5, 7)) < 0.8, "key_value_seq_lengths": lengths},
        {"bias": rng.normal(size=(6, 4, 5, 7)).astype(np.float32), "query_seq_lengths": lengths},
        {"query_segment_ids": rng.integers(0, 2, (6, 5)), "key_value_segment_ids": rng.integers(0, 2, (6, 7))},
        {
            "query_segment_ids": rng.integers(0, 2, (6, 5), "uint32"),  # become ranks beside signed ones
            "key_value_segment_ids": rng.integers(0, 2, (6, 7), "int32"),
        },
        {"query_positions": rng.integers(0, 9, (6, 5)), "key_value_positions": rng.integers(0, 9, (6, 7))},
    ]
    for batched in arguments:
        call = functools.partial(jaxsoftmax.flash_attention, is_causal=True, return_residual=True)
        if "query_positions" not in batched:
            call = functools.partial(call, causal_alignment="top_left")
        want, want_lse = call(q, k, v, **batched)
        shaped = {name: x.reshape(2, 3, *x.shape[1:]) for name, x in batched.items()}
        out, lse = call(*(x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v)), **shaped)
        np.testing.assert_allclose(out.reshape(want.shape), want, rtol=1e-6)
        np.testing.assert_allclose(lse.reshape(want_lse.shape), want_lse, rtol=1e-6)
        alone = {name: x[2] for name, x in batched.items()}
        for of_one in (alone, {name: x[None] if x.ndim == 0 else x for name, x in alone.items()}):
            out, lse = call(q[2], k[2], v[2], **of_one)
            assert (out.shape, lse.shape) == ((5, 4, 8), (5, 4))
            np.testing.assert_allclose(out, want[2], rtol=1e-5, atol=1e-6)
    # Of as many keys as queries, and no other extent that is as large.
    ids, call = arguments[2]["query_segment_ids"], functools.partial(jaxsoftmax.flash_attention, q, k[:, :5], v[:, :5])
    np.testing.assert_array_equal(
        call(query_segment_ids=ids), call(query_segment_ids=ids, key_value_segment_ids=ids.copy())
    )


def test_rows_that_see_nothing() -> None:
    q, k, v = inputs()
    mask = np.ones((2, 1, 5, 7), bool)
    mask[1, 0, 2] = False
    for arguments in ({"mask": mask}, {"bias": np.where(mask, 0, -np.inf).astype(np.float32)}):
        for extra in ({}, {"sinks": np.float32([1, 2, 3, 4])}):
            call = lambda *a, arguments=arguments, extra=extra: jaxsoftmax.flash_attention(
                *a, **arguments, **extra, return_residual=True
            )

            @jax.jit
            def everything(*operands: jax.Array, call: Any = call) -> Any:
                (out, lse), pull = jax.vjp(call, *operands)
                only = jnp.zeros_like(out).at[1, 2].set(jnp.nan), jnp.zeros_like(lse).at[1, 2].set(jnp.nan)
                return out[1, 2], lse[1, 2], pull(only), jax.jvp(call, operands, operands)[1]

            out, lse, gradients, tangents = everything(q, k, v)
            assert (np.asarray(out) == 0).all()
            assert (np.asarray(lse) == -np.inf).all()
            for gradient in gradients:
                np.testing.assert_array_equal(gradient, 0)
            assert all(np.isfinite(t).all() for t in tangents)


@pytest.mark.usefixtures("chunk")
def test_nan_in_padding_does_not_leak() -> None:
    q, k, v = inputs()
    lengths = {"query_seq_lengths": np.int32([3, 5]), "key_value_seq_lengths": np.int32([4, 6])}
    ends_of_each = lengths["query_seq_lengths"], *[lengths["key_value_seq_lengths"]] * 2
    spoilt = [x.copy() for x in (q, k, v)]
    for x, ends in zip(spoilt, ends_of_each, strict=True):
        for b, end in enumerate(ends):
            x[b, end:] = np.nan
    call = lambda *a: jaxsoftmax.flash_attention(*a, **lengths, return_residual=True)
    weight = jnp.where(jnp.arange(5)[None, :] < lengths["query_seq_lengths"][:, None], 1.0, jnp.nan)

    @jax.jit
    def everything(*operands: jax.Array) -> Any:
        (out, lse), pull = jax.vjp(call, *operands)
        tangents = jax.jvp(call, operands, operands)[1]
        gradients = pull((jnp.cos(out) * weight[..., None, None], jnp.ones_like(lse)))
        seconds = jax.jvp(lambda *a: jax.vjp(call, *a)[1]((jnp.ones_like(out), jnp.ones_like(lse))), operands, operands)
        return out, jnp.where(lse == -jnp.inf, 0.0, lse), tangents, gradients, seconds

    got = everything(*spoilt)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got[0], everything(q, k, v)[0])
    for gradient, ends in zip(got[3], ends_of_each, strict=True):
        assert all((np.asarray(gradient[b, end:]) == 0).all() for b, end in enumerate(ends))


def dense(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    """The whole matrix of weights at once, rounded to the dtype before it meets the values, as XLA's users write it."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    precision = "highest" if q.dtype == jnp.float32 else None
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    z = product("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tri(*z.shape[-2:], dtype=bool) | (not is_causal)
    p = jax.nn.softmax(jnp.where(seen, z, -jnp.inf)).astype(v.dtype)
    return product("bnts,bsnd->btnd", p, v).astype(q.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, size", [("bfloat16", 1.0), ("bfloat16", 1e4), ("float16", 100.0), ("float32", 1.0), ("float32", 1e4)]
)
def test_accuracy(dtype: str, size: float) -> None:
    """FlashAttention's rule: at most twice the error of the whole matrix computed in the same dtype.

    A gradient is a difference, which the whole matrix may find to be exactly 0 and `out * d_out` does not; and weights
    come from the logsumexp, whose rounding is worth `eps * |lse|` of a weight. What the gradients' terms lose by that
    in the dtype of accumulation is allowed for.
    """
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(x, dtype) for x in inputs(rng, batch=1, queries=130, keys=700, dim=32, value_dim=32)]
    operands[0] = (operands[0].astype(jnp.float32) * size).astype(dtype)
    rules = {"is_causal": True}
    d_out = jnp.asarray(rng.normal(size=(1, 130, 4, 32)), dtype)
    truth = attention_oracle.forward(*operands, **rules)
    want = {"out": truth.out} | attention_oracle.gradients(*operands, d_out=d_out, **rules)
    terms = attention_oracle.gradient_terms(*operands, d_out=d_out, **rules)

    @functools.partial(jax.jit, static_argnums=0)
    def everything(function: Any, *operands: jax.Array) -> list[jax.Array]:
        out, pull = jax.vjp(lambda *a: function(*a, **rules), *operands)
        return [out, *pull(d_out)]

    ours, theirs = (everything(f, *operands) for f in (jaxsoftmax.flash_attention, dense))
    for name, got, reference in zip(want, ours, theirs, strict=True):
        assert got.dtype == dtype
        error, allowed = (np.abs(np.asarray(x, np.float64) - want[name]).max() for x in (got, reference))
        narrow, wide = (float(jnp.finfo(kind).eps) for kind in (dtype, jnp.float32))
        lost = 0.0 if name == "out" else (4 + np.abs(truth.lse).max()) * wide * terms[name].max()
        assert error <= 2 * allowed + narrow * np.abs(want[name]).max() + lost, name


def test_float64() -> None:
    with jax.enable_x64(True):
        operands = inputs(dtype=np.float64)
        truth = attention_oracle.forward(*operands, is_causal=True)
        call = jax.jit(lambda *a: jaxsoftmax.flash_attention(*a, is_causal=True, return_residual=True))
        out, lse = call(*operands)
        assert out.dtype == lse.dtype == jnp.float64
        np.testing.assert_allclose(out, truth.out, rtol=1e-12, atol=1e-14)
    out = jax.jit(lambda: _in_x64(operands))()
    np.testing.assert_allclose(out, truth.out, rtol=1e-12, atol=1e-14)


def _in_x64(operands: Any) -> jax.Array:
    with jax.enable_x64(True):
        return jaxsoftmax.flash_attention(*(jnp.asarray(x) for x in operands), is_causal=True)


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (1, 4, 6, 1), (1, 4, 1, 6)])
def test_the_gradient_of_a_bias_of_as_many_queries_as_keys(shape: tuple[int, ...]) -> None:
    """Where a gradient of keys by queries has the right shape."""
    rng = np.random.default_rng(0)
    q, k, v = inputs(rng, queries=6, keys=6)
    bias, d_out = rng.normal(size=shape).astype(np.float32), rng.normal(size=q.shape).astype(np.float32)
    got = jax.grad(lambda b: (jaxsoftmax.flash_attention(q, k, v, b, is_causal=True) * d_out).sum())(jnp.asarray(bias))
    want = attention_oracle.gradients(q, k, v, bias, d_out=d_out, is_causal=True)["bias"]
    np.testing.assert_allclose(got, want, rtol=5e-4, atol=5e-5)


@pytest.mark.parametrize(
    "dtype, bias, factor", [("float32", -1e4, 1), ("float32", -1e6, 1), ("float32", -1e9, 7), ("float64", -1e9, 1)]
)
def test_gradients_where_each_key_is_far_below_0(dtype: str, bias: float, factor: int) -> None:
    """The documented limit: at -1e9 a logsumexp in float32 does not hold the logarithm of the number of keys, 7."""
    query, key, value = inputs(dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        far = jnp.full((1, 1, 1, 7), bias, dtype)
        out, pull = jax.vjp(lambda v: jaxsoftmax.flash_attention(0 * query, key, v, bias=far), value)
        out, gradient = np.asarray(out), np.asarray(pull(jnp.ones_like(out))[0])
    np.testing.assert_allclose(out, attention_oracle.forward(0 * query, key, value).out, rtol=1e-5, atol=1e-6)
    # Each of 5 queries of 2 heads gives a value a 7th of its cotangent.
    bound = 0.0 if factor > 1 else np.expm1(-bias * float(np.finfo(dtype).eps) / 2)
    np.testing.assert_allclose(gradient, factor * 5 * 2 / 7, rtol=bound + 1e-5)


def test_integers_of_a_bias_are_not_rounded() -> None:
    """Distances, as ALiBi adds them, have more digits than 16-bit floats, and -100000 is no float16."""
    for dtype, bias in (("bfloat16", np.arange(7) * 257), ("float16", np.full(7, -100_000))):
        operands = [jnp.asarray(x, dtype) for x in inputs()]
        got, want = (
            jaxsoftmax.flash_attention(*operands, b, return_residual=True) for b in (bias, bias.astype(np.float32))
        )
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert np.isfinite(got[1]).all()


def test_numbers_of_numpys_are_numbers() -> None:
    operands = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    plain = jaxsoftmax.flash_attention(*operands, scale=0.3, logits_soft_cap=2.0, local_window_size=2)
    numbers: list[Arguments] = [
        {"scale": np.float64(0.3), "logits_soft_cap": np.float32(2.0), "local_window_size": np.int64(2)},
        {"scale": np.array(0.3), "logits_soft_cap": np.array(2.0), "local_window_size": 2},
    ]
    for arguments in numbers:
        for rate in (0, np.float32(0), np.array(0.0)):
            got = jaxsoftmax.flash_attention(*operands, **arguments, dropout_rate=rate)
            np.testing.assert_array_equal(got, plain)


def test_empty_shapes() -> None:
    biases = [(1, 4, 3, 4)], [(1, 4, 1, 4), (2, 1, 1, 1)], [(1, 1, 3, 1)]
    for (batch, queries, keys), shapes in zip(((0, 3, 4), (2, 0, 4), (2, 3, 0)), biases, strict=True):
        q, k, v = inputs(batch=batch, queries=queries, keys=keys)
        (out, lse), pull = jax.vjp(lambda *a: jaxsoftmax.flash_attention(*a, return_residual=True), q, k, v)
        assert (out.shape, lse.shape) == ((batch, queries, 4, 8), (batch, queries, 4))
        assert (np.asarray(out) == 0).all()
        assert (np.asarray(lse) == -np.inf).all()
        assert all((np.asarray(x) == 0).all() for x in pull((out, lse)))
        loss = lambda *a: sum(x.sum() for x in jaxsoftmax.flash_attention(*a, return_residual=True))
        for shape in shapes:  # of a bias that broadcasts along the empty axis
            for gradient in (jax.grad(loss, 3), jax.jit(jax.grad(loss, 3))):
                np.testing.assert_array_equal(gradient(q, k, v, jnp.ones(shape)), np.zeros(shape))


@pytest.mark.parametrize(
    "ids, key_ids",
    [
        (np.array([2**64 - 1, 0, 2**32, 1, 2**63], np.uint64), np.array([-1, 0, 1, -(2**63), 0, 2**32, 7])),
        (np.array([2**31, 3, 0, 2**31, 3], np.uint32), np.array([-1, 3, 0, -(2**31), 0, 3, 9], np.int32)),
    ],
    ids=["uint64 and int64", "uint32 and int32"],
)
def test_segment_ids_of_two_dtypes(ids: np.ndarray, key_ids: np.ndarray) -> None:
    operands = inputs()
    wide = max(ids.itemsize, key_ids.itemsize) == 8
    pairs = [x.reshape(1, -1).repeat(2, 0) for x in (ids, key_ids)]
    same = np.array([[a == b for b in key_ids.tolist()] for a in ids.tolist()])
    want = jaxsoftmax.flash_attention(*operands, mask=same)

    def call(ids: Any, key_ids: Any) -> jax.Array:
        return jaxsoftmax.flash_attention(*operands, query_segment_ids=ids, key_value_segment_ids=key_ids)

    with jax.enable_x64(wide):
        for run in (call, jax.jit(call), lambda *a: jax.vmap(call)(*(x[None] for x in a))[0]):
            np.testing.assert_allclose(run(*pairs), want, rtol=1e-5, atol=1e-6)
    if wide:
        with pytest.raises(ValueError, match=r"query_segment_ids has ids that u?int32 cannot hold.* Number"):
            call(*pairs)


def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    text = lambda *a, **kw: str(jax.jit(lambda *x: jaxsoftmax.flash_attention(*x, **kw)).lower(*a).as_text())
    found = lambda *a, **kw: set(re.findall(r"precision = \[(\w+), \w+\]", text(*a, **kw)))
    stock = jax.jit(jax.nn.dot_product_attention).lower(q, k, v).as_text()
    assert found(q, k, v) == set(re.findall(r"precision = \[(\w+), \w+\]", str(stock))) == {"DEFAULT"}
    assert found(q, k, v, precision="highest") == {"HIGHEST"}
    with jax.default_matmul_precision("highest"):
        assert found(q, k, v) == {"HIGHEST"}
        assert found(q, k, v, precision="default") == {"DEFAULT"}


def test_types_for_people() -> None:
    text = pydoc.plain(pydoc.render_doc(jaxsoftmax.flash_attention))
    assert "(query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None" in text
    assert "Literal['top_left', 'bottom_right'] = 'top_left'" in text
    assert "Literal['xla', 'mosaic_gpu']" in text
    parameters = inspect.signature(jaxsoftmax.flash_attention).parameters
    keywords = {name: p.annotation for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords.pop("return_residual") is bool
    returns = {}
    for overload in typing.get_overloads(jaxsoftmax.flash_attention):
        *positional, flag, rest = inspect.signature(overload).parameters.values()
        assert positional == list(parameters.values())[: len(positional)]
        (typed_dict,) = typing.get_args(rest.annotation)
        assert typing.get_type_hints(typed_dict) == keywords
        returns[flag.annotation] = inspect.signature(overload).return_annotation
    pair = tuple[jax.Array, jax.Array]
    assert returns == {typing.Literal[False]: jax.Array, typing.Literal[True]: pair, bool: jax.Array | pair}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["forward", "grad", "jvp", "hvp", "grad of grad"])
def test_memory_grows_with_the_length(order: str) -> None:
    """Four times the length takes four times the memory, where a matrix of weights would take sixteen times."""
    call = lambda q, k, v: jaxsoftmax.flash_attention(q, k, v, is_causal=True, return_residual=True)
    loss = lambda *a: sum(jnp.sin(x).sum() for x in call(*a))
    gradient = jax.grad(loss, (0, 1, 2))
    functions = {
        "forward": call,
        "grad": gradient,
        "jvp": lambda *a: jax.jvp(call, a, a)[1],
        "hvp": lambda *a: jax.jvp(gradient, a, a)[1],
        "grad of grad": jax.grad(lambda *a: sum((x * x).sum() for x in gradient(*a)), (0, 1, 2)),
    }

    def temporary(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 1, 32), jnp.float32)
        return jax.jit(functions[order]).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(4096), temporary(16384)
    assert long < 4.5 * short
    assert long < 16384**2 * 4 / 16


def test_the_cotangent_of_the_logsumexp_has_its_dtype() -> None:
    x = jnp.ones((1, 3, 2, 8), jnp.bfloat16)
    (out, lse), pull = jax.vjp(lambda x: jaxsoftmax.flash_attention(x, x, x, return_residual=True), x)
    assert lse.dtype == jnp.float32
    # JAX's own rule, which no function is asked about.
    with pytest.raises(ValueError, match="expected float32"):
        pull((out, lse.astype(x.dtype)))
    assert pull((out, lse))[0].dtype == x.dtype
    with jaxsoftmax.patch():
        (out, lse), pull = jax.vjp(lambda x: jax.nn.dot_product_attention(x, x, x, return_residual=True), x)
    assert lse.dtype == x.dtype
    assert pull((out, lse))[0].dtype == x.dtype
