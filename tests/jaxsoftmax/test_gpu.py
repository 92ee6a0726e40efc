"""The primitives over the real kernels, on a Hopper GPU."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from pallas_kernels import custom_vjp, hardware
from tests import errors, oracle

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
    loss = functools.partial(jaxsoftmax.softmax_cross_entropy_with_integer_labels, implementation=implementation)
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
            jaxsoftmax.softmax_cross_entropy_with_integer_labels,
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
    loss = jaxsoftmax.softmax_cross_entropy_with_integer_labels
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
    loss = jaxsoftmax.softmax_cross_entropy_with_integer_labels
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
    plain, primitive = (
        jax.jit(lambda x, ct, f=f: (f(x), jax.vjp(f, x)[1](ct)[0])) for f in (getattr(custom_vjp, op), OPS[op])
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


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("d",), (None, "d")], ids=str)
def test_two_gpus(spec: tuple[str | None, ...], kind: str) -> None:
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((2,), ("d",), (getattr(jax.sharding.AxisType, kind),))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    x, ct = inputs((64, 8192), jnp.float32)
    run = jax.jit(lambda x, ct: (jaxsoftmax.softmax(x), jax.vjp(jaxsoftmax.log_softmax, x)[1](ct)[0]))
    operands = jax.device_put((x, ct), sharding)
    y, dx = run(*operands)
    np.testing.assert_allclose(y, oracle.softmax(x), rtol=1e-5)
    np.testing.assert_allclose(dx, oracle.log_softmax_cotangent(x, ct), rtol=1e-4, atol=1e-5)
    assert "all-gather" not in run.lower(*operands).compile().as_text()
    labels = np.random.default_rng(2).integers(0, 8192, 64)
    loss = jax.jit(jax.value_and_grad(lambda x: jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, labels).sum()))
    value, gradient = loss(operands[0])
    want = oracle.cross_entropy(x, labels)
    np.testing.assert_allclose(value, want.loss.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, want.gradient, rtol=1e-4, atol=1e-6)
    assert "all-gather" not in loss.lower(operands[0]).compile().as_text()
