"""Every function over the real kernels, on a Hopper GPU: against the oracles, as close as XLA's own programs are."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxsoftmax
from jaxsoftmax import flash_attention, softmax_cross_entropy_with_integer_labels, top_k_softmax
from jaxsoftmax._attention import sequence
from pallas_kernels import custom_vjp, hardware
from tests import attention_oracle, errors, oracle, top_k_oracle
from tests.jaxsoftmax.sharded import count, gathers_only_numbers
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

OPS = {"softmax": jaxsoftmax.softmax, "log_softmax": jaxsoftmax.log_softmax}
SHAPES = [(64, 4096), (33, 1000), (7, 50257), (4, 8, 512), (2, 262144)]


def inputs(shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(4 * rng.normal(size=shape), dtype), jnp.asarray(rng.normal(size=shape), dtype)


def test_the_device_is_known() -> None:
    device = hardware.present()
    assert device is not None
    assert device.compute_capability == "9.0"
    assert device.sm_count == hardware.H200.sm_count
    assert "here:" not in str(jaxsoftmax.explain(jnp.zeros((64, 4096))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(op: str, shape: tuple[int, ...], dtype: Any) -> None:
    x, ct = inputs(shape, dtype)
    kernel = jax.jit(functools.partial(OPS[op], implementation="mosaic_gpu"))
    xla = jax.jit(functools.partial(OPS[op], implementation="xla"))
    # The sum errs relatively, its logarithm therefore absolutely: hence the 1.
    magnitude = oracle.log_softmax_terms(x) + 1 if op == "log_softmax" else None
    errors.assert_accurate(kernel(x), xla(x), getattr(oracle, op)(x), magnitude=magnitude)
    got, want = (jax.jit(lambda x, ct, f=f: jax.vjp(f, x)[1](ct)[0])(x, ct) for f in (kernel, xla))
    scale = np.abs(np.asarray(want, np.float64)).max(-1, keepdims=True)
    # Both round x - max once, which float32 shows: |x - max| / 2 ulp of each weight.
    ulps = 64 if dtype == jnp.float32 else 8
    np.testing.assert_allclose(
        np.asarray(got, np.float64) / scale,
        np.asarray(want, np.float64) / scale,
        atol=ulps * float(jnp.finfo(dtype).eps),
    )


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_rows_far_from_zero(implementation: str) -> None:
    """The interpreter contracts other products than the compilers for a GPU do."""
    x, labels = jnp.full((64, 4096), -1e10), jnp.arange(64)
    for op in OPS.values():
        y = jax.jit(functools.partial(op, scale=0.3, implementation=implementation))(x)
        np.testing.assert_allclose(y, op(0 * x, implementation="xla"), rtol=1e-5)
    loss = functools.partial(softmax_cross_entropy_with_integer_labels, implementation=implementation)
    losses, pull = jax.vjp(jax.jit(lambda x: loss(x, labels, scale=0.3)), x)
    np.testing.assert_allclose(losses, np.log(4096), rtol=1e-5)
    np.testing.assert_allclose(*pull(jnp.ones(64)), 0.3 * (1 / 4096 - jax.nn.one_hot(labels, 4096)), rtol=1e-5)


CROSS_ENTROPIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignored": {"ignore_index": 3, "weights": 1 / 64},
    "all": {"smoothing": 0.1, "z_loss": 1e-3, "soft_cap": 20.0, "scale": 0.5, "ignore_index": 3},
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("shape", [*SHAPES, (64, 32000), (5, 128256)], ids=str)
@pytest.mark.parametrize("options", CROSS_ENTROPIES)
def test_cross_entropy(options: str, shape: tuple[int, ...], dtype: Any) -> None:
    x, _ = inputs(shape, dtype)
    y = np.random.default_rng(2).integers(0, 8, shape[:-1])
    given = CROSS_ENTROPIES[options]
    ours = {"smoothing": "label_smoothing", "soft_cap": "logits_soft_cap"}
    theirs = {"ignore_index": "ignored"}
    want = oracle.cross_entropy(x, y, **{theirs.get(k, k): v for k, v in given.items()})

    def run(implementation: str) -> Any:
        loss = functools.partial(
            softmax_cross_entropy_with_integer_labels,
            labels=y,
            implementation=implementation,
            **{ours.get(k, k): v for k, v in given.items()},
        )
        total = lambda x: (lambda each: (each.sum(), each))(loss(x))
        compiled = jax.jit(jax.value_and_grad(total, has_aux=True)).lower(x).compile()
        assert ("mosaic_gpu" in compiled.as_text()) == (implementation == "mosaic_gpu")
        (_, each), gradient = compiled(x)
        return each, gradient, jax.jit(loss)(x), jax.jit(functools.partial(loss, return_lse=True))(x)

    kernel, xla = run("mosaic_gpu"), run("xla")
    # A sum of exponentials errs relatively, its logarithm therefore absolutely: hence the 1.
    for got, reference in ((kernel[0], xla[0]), (kernel[2], xla[2]), (kernel[3][0], xla[3][0])):
        errors.assert_accurate(got, reference, want.loss, magnitude=want.loss_terms + 1)
    errors.assert_accurate(kernel[1], xla[1], want.gradient, magnitude=want.gradient_terms)
    errors.assert_accurate(kernel[3][1], xla[3][1], want.lse, magnitude=np.abs(want.lse) + 1)


def test_cross_entropy_masks_axes_and_transformations() -> None:
    x, _ = inputs((16, 64, 512), jnp.float32)
    loss = softmax_cross_entropy_with_integer_labels
    mask = np.random.default_rng(1).random((16, 64, 512)) < 0.7
    y = np.random.default_rng(2).integers(0, 512, (16, 64))

    def both(x: jax.Array, y: Any, *arguments: Any) -> Any:
        total = lambda x: (lambda each: (each.sum(), each))(loss(x, y, *arguments))
        (_, each), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
        return each, gradient

    for where in (mask, mask[:1, :1], mask[..., 0]):
        each, gradient = both(x, y, -1, where)
        full = where if where.ndim == 3 else where[..., None]
        want = oracle.cross_entropy(x, y, -1, full)
        np.testing.assert_allclose(each, want.loss, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient, want.gradient, rtol=1e-4, atol=1e-6)
    for axis, rows in ((0, (64, 512)), ((0, 2), (64,)), ((2, 1), (16,))):
        labels = np.random.default_rng(3).integers(0, x.size // np.prod(rows), rows)
        each, gradient = both(x, labels, axis)
        want = oracle.cross_entropy(x, labels, axis)
        np.testing.assert_allclose(each, want.loss, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient, want.gradient, rtol=1e-4, atol=1e-6)
    mapped = jax.jit(jax.vmap(jax.grad(lambda x, y: loss(x, y).sum()), 1, 1))(x, y)
    np.testing.assert_allclose(mapped, oracle.cross_entropy(x, y).gradient, rtol=1e-4, atol=1e-6)
    tangent = jax.jit(lambda x: jax.jvp(lambda x: loss(x, y), (x,), (x,))[1])(x)
    np.testing.assert_allclose(tangent, (oracle.cross_entropy(x, y).gradient * x).sum(-1), rtol=1e-3, atol=1e-3)
    t = np.asarray(jax.nn.softmax(x[::-1]))
    np.testing.assert_allclose(
        jaxsoftmax.softmax_cross_entropy(x, t), -(t * oracle.log_softmax(x)).sum(-1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("options", [{}, {"weights": 0.5, "z_loss": 1e-3}], ids=["plain", "weighted"])
def test_wrong_labels(options: dict[str, Any]) -> None:
    """They show in loss and gradient, unless the loss is not used; and a unit cotangent costs no pass even so."""
    x, _ = inputs((64, 4096), jnp.bfloat16)
    y = np.arange(64) * 61
    y[::3], y[1::9] = -1, 4096
    exists = (y >= 0) & (y < 4096)
    loss = softmax_cross_entropy_with_integer_labels
    total = lambda x, y, used: jnp.where(used, loss(x, y, implementation="mosaic_gpu", **options), 0).sum()
    run = jax.jit(jax.grad(total))
    want = run(x, np.where(exists, y, 0), exists)
    np.testing.assert_array_equal(run(x, y, exists), want)
    np.testing.assert_array_equal(np.isnan(run(x, y, np.ones(64, bool))).all(-1), ~exists)
    if options:
        text = jax.jit(jax.grad(lambda x, y: loss(x, y, **options).sum())).lower(x, y).compile().as_text()
        assert not re.findall(r"\[64,4096\]\S* (?:multiply|select)\(", text)


@pytest.mark.parametrize("op", OPS)
def test_the_plain_custom_vjp_is_the_same_to_the_bit(op: str) -> None:
    x, ct = inputs((64, 4096), jnp.bfloat16)
    named = functools.partial(OPS[op], implementation="mosaic_gpu")
    plain, primitive = (
        jax.jit(lambda x, ct, f=f: (f(x), jax.vjp(f, x)[1](ct)[0])) for f in (getattr(custom_vjp, op), named)
    )
    for a, b in zip(plain(x, ct), primitive(x, ct), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_masks_scale_axes_and_transformations() -> None:
    x, ct = inputs((16, 64, 512), jnp.float32)
    mask = np.random.default_rng(1).random((16, 64, 512)) < 0.7
    for where in (mask, mask[0, 0], mask[:, :1]):
        got = jax.jit(jaxsoftmax.softmax)(x, where=where, scale=0.5)
        np.testing.assert_allclose(got, oracle.softmax(x, -1, where, 0.5), rtol=1e-5, atol=1e-30)
    for axis in (0, 1, (0, 2), None):
        np.testing.assert_allclose(jaxsoftmax.softmax(x, axis), oracle.softmax(x, axis), rtol=1e-4)
    np.testing.assert_allclose(jax.vmap(jaxsoftmax.softmax, 1, 1)(x), oracle.softmax(x), rtol=1e-5)
    np.testing.assert_allclose(jaxsoftmax.logsumexp(x, -1), oracle.logsumexp(x, -1), rtol=1e-6)
    for ours, theirs in ((jaxsoftmax.softmax, jax.nn.softmax), (jaxsoftmax.log_softmax, jax.nn.log_softmax)):
        got, want = (jax.jit(lambda x, t, f=f: jax.jvp(f, (x,), (t,))[1])(x, ct) for f in (ours, theirs))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


LENGTHS = {"query_seq_lengths": np.int32([200, 77]), "key_value_seq_lengths": np.int32([130, 239])}
IDS = np.sort(np.random.default_rng(9).integers(0, 4, (2, 239)))
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom right window": {"is_causal": True, "local_window_size": (50, 0), "causal_alignment": "bottom_right"},
    "lengths": LENGTHS,
    "bottom right lengths": LENGTHS | {"is_causal": True, "causal_alignment": "bottom_right"},
    "segments": {"is_causal": True, "query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "mask": {"mask": np.random.default_rng(8).random((2, 1, 239, 239)) < 0.5},
    "bias": {"bias": np.random.default_rng(7).normal(size=(1, 8, 239, 239)).astype(np.float32)},
    "sinks and cap": {"sinks": np.linspace(-1, 2, 8).astype(np.float32), "logits_soft_cap": 5.0},
}


def operands(dim: int, value_dim: int, dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(2, 239, heads, width)), dtype)
        for heads, width in ((8, dim), (2, dim), (2, value_dim), (8, value_dim))
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("dim, value_dim", [(64, 64), (128, 128), (100, 60), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_of_attention(name: str, dim: int, value_dim: int, dtype: Any) -> None:
    *qkv, d_out = operands(dim, value_dim, dtype)
    arguments = CALLS[name]
    arrays = {key: jnp.asarray(x) for key, x in arguments.items() if isinstance(x, np.ndarray)}
    floats = {key: x for key, x in arrays.items() if key in ("bias", "sinks")}
    others = {key: x for key, x in arrays.items() if key not in floats}
    static = {key: x for key, x in arguments.items() if key not in arrays}
    truth = attention_oracle.forward(*qkv, **arguments)
    want = {"out": truth.out, "lse": np.swapaxes(truth.lse, 1, 2)}
    want |= attention_oracle.gradients(*qkv, d_out=d_out, d_lse=np.ones_like(truth.lse), **arguments)

    # Operands are arguments: what is constant, XLA would compute while it compiles, and not on the GPU.
    def everything(implementation: str | None, qkv: Any, floats: Any, others: Any, d_out: Any) -> dict[str, jax.Array]:
        call = lambda qkv, floats: flash_attention(
            *qkv, **floats, **others, **static, return_residual=True, implementation=implementation
        )
        (out, lse), pull = jax.vjp(call, qkv, floats)
        gradients, more = pull((d_out, jnp.ones_like(lse)))
        return {"out": out, "lse": lse} | dict(zip(("query", "key", "value"), gradients, strict=True)) | more

    run = jax.jit(everything, static_argnums=0)
    ours, theirs = (run(kind, qkv, floats, others, d_out) for kind in (None, "xla"))
    for part, exact in want.items():
        seen = np.isfinite(exact)
        for whose, found in (("ours", ours), ("xla", theirs)):
            np.testing.assert_array_equal(np.isfinite(np.asarray(found[part], np.float64)), seen, f"{whose} {part}")
        error, allowed = (np.abs(np.asarray(x[part], np.float64)[seen] - exact[seen]).max() for x in (ours, theirs))
        bound = 2 * allowed + float(jnp.finfo(dtype).eps) * np.abs(exact[seen]).max()
        assert error <= bound, f"{part}: error {error}, xla's {allowed}, bound {bound}"


def test_the_kernels_of_attention_run() -> None:
    *qkv, _ = operands(128, 128, jnp.bfloat16)
    for op in ("forward", "vjp"):
        assert jaxsoftmax.explain_attention(*qkv, is_causal=True, op=op).implementation == "mosaic_gpu"
    text = jax.jit(lambda *a: flash_attention(*a, implementation="mosaic_gpu")).lower(*qkv).as_text()
    assert "mosaic_gpu" in text


def test_transformations_of_attention() -> None:
    *qkv, d_out = operands(64, 64, jnp.bfloat16)
    q, k, v = qkv
    qs = jnp.stack([q, -q, 2 * q])
    call = lambda q: flash_attention(q, k, v, is_causal=True)
    mapped = jax.jit(jax.vmap(call))(qs)
    for got, x in zip(mapped, qs, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(call(x), np.float32), atol=2e-2)
    loss = lambda q: (call(q).astype(jnp.float32) * d_out.astype(jnp.float32)).sum()
    gradient, product = jax.jit(lambda q: jax.jvp(jax.grad(loss), (q,), (q,)))(q)
    xla = lambda q: (
        flash_attention(q, k, v, is_causal=True, implementation="xla").astype(jnp.float32) * d_out.astype(jnp.float32)
    ).sum()
    for got, want in zip((gradient, product), jax.jit(lambda q: jax.jvp(jax.grad(xla), (q,), (q,)))(q), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())


SELECT = jax.jit(top_k_softmax, static_argnums=1, static_argnames=("normalize", "scale", "implementation"))
NAMED = functools.partial(SELECT, implementation="mosaic_gpu")
CASES = [(8192, 32000, 64), (4096, 151936, 8), (1, 262144, 50), (64, 50257, 8), (33, 50261, 3), (8192, 128, 8)]
CASES += [(1, 32000, 64), (1, 32000, 1), (1, 262144, 64), (3, 50261, 8), (64, 128256, 1), (8192, 32000, 1)]


@pytest.mark.together("rows", "n", "k")  # XLA sorts gigabytes: not six times at once
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("normalize", ["all", "top_k"])
@pytest.mark.parametrize("rows, n, k", CASES)
def test_top_k_against_xla(rows: int, n: int, k: int, normalize: str, dtype: Any) -> None:
    x = (4 * jax.random.normal(jax.random.key(0), (rows, n))).astype(dtype)
    y, indices = NAMED(x, k, normalize=normalize)
    # A zero of either sign is the same logit, which XLA's orders do not all know.
    want = jax.jit(lambda x: jax.lax.top_k(jnp.where(x == 0, 0, x), k)[1])(x)
    np.testing.assert_array_equal(indices, want)
    some = np.s_[:: max(1, rows // 64)]
    top_k_oracle.check(lambda *_, **__: (y[some], indices[some]), x[some], k, normalize=normalize)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("n, k", [(300, 5), (1000, 16), (3000, 8), (32000, 64), (32000, 1), (50261, 256)])
def test_ties_and_holes(n: int, k: int, dtype: Any) -> None:
    x = top_k_oracle.rows(n, dtype)
    for normalize, scale in (("all", 1.0), ("top_k", 1.0), ("all", 0.3)):
        top_k_oracle.check(NAMED, jnp.asarray(x), k, normalize=normalize, scale=scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("n, k", [(3000, 1), (5003, 8), (32000, 64), (70000, 2)])
def test_ties_and_holes_of_few_rows(n: int, k: int, dtype: Any) -> None:
    """Which are not sorted but counted."""
    x = top_k_oracle.rows(n, dtype)
    for rows in np.split(x, len(x) // 2):
        for normalize, scale in (("all", 1.0), ("top_k", 0.3)):
            top_k_oracle.check(NAMED, jnp.asarray(rows), k, normalize=normalize, scale=scale)
    y, indices = NAMED(jnp.full((2, n), jnp.nan, dtype), k)
    assert np.isnan(y).all()
    assert ((indices >= 0) & (indices < n)).all()


@pytest.mark.parametrize("normalize", ["all", "top_k"])
def test_gradients_of_top_k(normalize: str) -> None:
    x = jax.random.normal(jax.random.key(1), (64, 32000))
    loss = lambda x, name: jnp.sin(50 * top_k_softmax(x, 8, normalize=normalize, implementation=name)[0]).sum()
    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(x, name) for name in ("mosaic_gpu", "xla"))
    # Arguments of the sine are rounded by up to 2e-6, and its slope is near 0 in some elements.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)


def over_two_gpus(kind: str, *spec: str | None) -> NamedSharding:
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    return NamedSharding(jax.make_mesh((2,), ("d",), (getattr(AxisType, kind),)), PartitionSpec(*spec))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("d",), (None, "d")], ids=str)
def test_rows_over_two_gpus(spec: tuple[str | None, ...], kind: str) -> None:
    sharding, (x, ct) = over_two_gpus(kind, *spec), inputs((64, 8192), jnp.float32)
    run = jax.jit(lambda x, ct: (jaxsoftmax.softmax(x), jax.vjp(jaxsoftmax.log_softmax, x)[1](ct)[0]))
    operands = jax.device_put((x, ct), sharding)
    y, dx = run(*operands)
    np.testing.assert_allclose(y, oracle.softmax(x), rtol=1e-5)
    np.testing.assert_allclose(dx, oracle.log_softmax_cotangent(x, ct), rtol=1e-4, atol=1e-5)
    x = jax.random.normal(jax.random.key(2), (64, 32000))
    cut = jax.device_put(x, sharding)
    top_k_oracle.check(lambda x, k, **keywords: SELECT(cut, k, **keywords), x, 8)
    for lowered in (run.lower(*operands), SELECT.lower(cut, 8)):
        assert gathers_only_numbers(lowered.compile())


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weights": np.linspace(-1, 1, 64, dtype=np.float32)},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 5},
    "capped": {"logits_soft_cap": 5.0, "scale": 0.5, "implementation": "mosaic_gpu"},
}


@pytest.mark.parametrize(
    "name, spec, kind, dtype",
    pairwise(list(LOSSES), [("d",), (None, "d")], ["Auto", "Explicit"], ["bfloat16", "float32"]),
    ids=str,
)
def test_losses_over_two_gpus(name: str, spec: tuple[str | None, ...], kind: str, dtype: str) -> None:
    """As one GPU gives it, and the same bits again. Columns take two kernels with one exchange of numbers between."""
    sharding, (x, _) = over_two_gpus(kind, *spec), inputs((64, 8192), dtype)
    labels = np.random.default_rng(2).integers(0, 8192, 64)
    labels[:4] = 5, 4095, 4096, 8191
    total = lambda x: softmax_cross_entropy_with_integer_labels(x, labels, **LOSSES[name]).sum()
    run, cut = jax.jit(jax.value_and_grad(total)), jax.device_put(x, sharding)
    found, again, alone = run(cut), run(cut), run(x)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-5, atol=1e-4)
    gradient, want = np.float32(found[1]), np.float32(alone[1])
    np.testing.assert_allclose(gradient, want, rtol=2 * float(jnp.finfo(dtype).eps) + 1e-5, atol=1e-6)
    compiled = run.lower(cut).compile()
    assert ("cross_entropy_cotangent" in compiled.as_text()) == (len(spec) == 2)
    assert gathers_only_numbers(compiled)
    assert count(compiled) == ({"all-gather": 1} if len(spec) == 2 else {"all-reduce": 1})


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("d",), (None, None, "d")], ids=str)
def test_attention_over_two_gpus(spec: tuple[str | None, ...], kind: str) -> None:
    sharding, arrays = over_two_gpus(kind, *spec), operands(128, 128, jnp.bfloat16)
    call = functools.partial(flash_attention, mask=jnp.asarray(CALLS["mask"]["mask"]), is_causal=True)
    run = jax.jit(lambda q, k, v, g: jax.vjp(call, q, k, v)[1](g))
    cut = jax.device_put(arrays, sharding)
    for found, alone in zip(run(*cut), run(*arrays), strict=True):
        np.testing.assert_allclose(np.float32(found), np.float32(alone), rtol=2**-7, atol=2**-7)
    hlo = run.lower(*cut).compile().as_text()
    assert not any(word in hlo for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


ZIGZAG = np.arange(1024).reshape(4, 256)[[0, 3, 1, 2]].ravel()
TWO_ROUNDS = np.arange(1024).reshape(8, 128)[[0, 3, 4, 7, 1, 2, 5, 6]].ravel()
SEQUENCES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (300, 20)},
    "packed": {"is_causal": True, "query_segment_ids": np.arange(1024)[None].repeat(2, 0) // 300},
    "zigzag": {"is_causal": True} | dict.fromkeys(("query_positions", "key_value_positions"), ZIGZAG),
    "two rounds, packed": {"is_causal": True, "query_segment_ids": TWO_ROUNDS[None].repeat(2, 0) // 300}
    | dict.fromkeys(("query_positions", "key_value_positions"), TWO_ROUNDS),
}


@pytest.mark.parametrize(
    "name, head_dim, kind, most",
    pairwise(tuple(SEQUENCES), (64, 128, 256), ("Auto", "Explicit"), (sequence.MAX_GATHERED_ELEMENTS, 0)),
)
def test_sequences_over_two_gpus(
    name: str, head_dim: int, kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "MAX_GATHERED_ELEMENTS", most)
    jax.clear_caches()
    sharding, rng = over_two_gpus(kind, None, "d"), np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 1024, n, head_dim)), jnp.bfloat16) for n in (8, 2, 2, 8)]
    call = functools.partial(flash_attention, **SEQUENCES[name], deterministic_gradients=True, return_residual=True)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, pull((g, jnp.sin(lse)))

    compiled = jax.jit(run).lower(*(cut := jax.device_put(arrays, sharding))).compile()
    found = jax.tree.leaves(compiled(*cut))
    # In a ring the output of each block is rounded too.
    rounded = 2.0**-7 if most else 2.0**-6
    for x, alone in zip(found, jax.tree.leaves(jax.jit(run)(*arrays)), strict=True):
        np.testing.assert_allclose(np.float32(x), want := np.float32(alone), rtol=0, atol=rounded * np.abs(want).max())
    for x, again in zip(found, jax.tree.leaves(compiled(*cut)), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(again).view(np.uint8))
    hlo = compiled.as_text()
    assert "mosaic_gpu" in hlo
    exchanges = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
    gathered = {"all-gather", "reduce-scatter"} if most else {"collective-permute"}
    assert {word for word in exchanges if word in hlo} == gathered
