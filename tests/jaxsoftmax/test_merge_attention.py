"""`merge_attention`: parts of the keys against the oracle on all of them, in every mode, and over devices."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxsoftmax import flash_attention, merge_attention, paged_attention
from tests import attention_oracle
from tests.jaxsoftmax.sharded import mesh

B, T, S, N, K, H = 2, 5, 12, 4, 2, 8
RNG = np.random.default_rng(0)
Q, KEY, VALUE = (RNG.normal(size=shape).astype(np.float32) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
CT = RNG.normal(size=(B, T, N, H)).astype(np.float32), RNG.normal(size=(B, T, N)).astype(np.float32)
# Some queries see no key of a part, and some of no part.
SEES = RNG.random((B, 1, T, S)) < 0.4
SEES[0, 0, 1], SEES[1, 0, :3, :8] = False, False
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
CUTS = {"one": [0, S], "two": [0, 8, S], "with empty ones": [0, 0, 3, 3, 8, S, S], "each key": [*range(S + 1)]}


def parts_of(q: Any, k: Any, v: Any, cuts: list[int], sees: Any = SEES, **rules: Any) -> Any:
    pairs = [slice(*ends) for ends in itertools.pairwise(cuts)]
    found = [flash_attention(q, k[:, at], v[:, at], mask=sees[..., at], return_residual=True, **rules) for at in pairs]
    return zip(*found, strict=True)


@pytest.mark.parametrize("cuts", CUTS)
def test_values_and_gradients(cuts: str) -> None:
    whole = lambda *qkv: merge_attention(*parts_of(*qkv, CUTS[cuts]))
    (out, lse), pull = jax.vjp(whole, Q, KEY, VALUE)
    want = attention_oracle.forward(Q, KEY, VALUE, mask=SEES)
    close(out, want.out)
    close(lse, np.swapaxes(want.lse, 1, 2))
    assert (np.asarray(lse)[0, 1] == -np.inf).all()
    of_each = attention_oracle.gradients(
        Q, KEY, VALUE, mask=SEES, d_out=CT[0], d_lse=np.where(np.isinf(want.lse), 0, np.swapaxes(CT[1], 1, 2))
    )
    for got, name in zip(pull(CT), ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(got, of_each[name], rtol=2e-4, atol=2e-5, err_msg=name)


def naive(outs: Any, lses: Any) -> Any:
    """The same in one line, for parts with keys."""
    outs, lses = jnp.stack(outs), jnp.stack(lses)
    return (jax.nn.softmax(lses, 0)[..., None] * outs).sum(0), jax.nn.logsumexp(lses, 0)


@pytest.mark.parametrize("empty", [False, True])
def test_derivatives_of_every_order(empty: bool) -> None:
    """With a part that has no keys, and NaN for its output, all derivatives are those without it."""
    with jax.enable_x64(True), jax.debug_nans(not empty):
        outs, lses = (
            [jnp.asarray(RNG.normal(size=(3, 2))) for _ in range(3)],
            list(jnp.asarray(RNG.normal(size=(3, 3)))),
        )
        lses[1] = lses[0]  # of which neither is the maximum alone
        more = ([jnp.full((3, 2), jnp.nan)], [jnp.full(3, -jnp.inf)]) if empty else ([], [])

        def total(f: Any, *given: Any) -> Any:
            out, lse = f(*given)
            return (jnp.sin(out) * jnp.cos(lse)[:, None]).sum()

        ours = lambda outs, lses: total(merge_attention, outs + more[0], lses + more[1])
        along = lambda f: lambda *x: jax.jvp(f, x, jax.tree.map(jnp.cos, x))[1]
        for derivative in (jax.grad, lambda *f: along(jax.grad(*f)), lambda *f: along(along(jax.grad(*f)))):
            both = ours, functools.partial(total, naive)
            got, want = (jax.jit(derivative(f, (0, 1)))(outs, lses) for f in both)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), got, want)
        of_empty = jax.grad(lambda *more: total(merge_attention, outs + [more[0]], lses + [more[1]]), (0, 1))
        for x in of_empty(jnp.full((3, 2), 7.0), jnp.full(3, -jnp.inf)):
            np.testing.assert_array_equal(x, 0.0)


def test_a_query_that_no_part_shows_a_key_has_no_gradient() -> None:
    with jax.debug_nans(True):
        outs, lses = jnp.ones((2, 3, 4)), jnp.full((2, 3), -jnp.inf)
        (out, lse), pull = jax.vjp(merge_attention, outs, lses)
        np.testing.assert_array_equal(out, 0.0)
        np.testing.assert_array_equal(lse, -np.inf)
        for x in pull((out + 1, jnp.ones(3))):
            np.testing.assert_array_equal(x, 0.0)


def test_dtypes() -> None:
    """One rounding of the sum; nothing is rounded before it."""
    lses = np.zeros((3, 2), np.float32)
    for dtype in (jnp.bfloat16, jnp.float16):
        outs = jnp.asarray(RNG.normal(size=(3, 2, 64)), dtype)
        out, lse = merge_attention(outs, lses)
        np.testing.assert_array_equal(out, np.asarray(outs, np.float32).mean(0).astype(dtype))
        assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for of_out, of_lse, wide in (("f4", "f8", "f8"), ("f8", "f4", "f8"), ("f4", "f2", "f4"), ("f2", "f2", "f4")):
            out, lse = merge_attention(list(np.ones((3, 2, 4), of_out)), list(lses.astype(of_lse)))
            assert (out.dtype, lse.dtype) == (np.dtype(of_out), np.dtype(wide))


def test_infinities_and_nan_are_not_hidden() -> None:
    parts = np.ones((2, 3, 4), np.float32), np.float32([[np.inf, np.nan, 1.0], [np.nan, -np.inf, np.inf]])
    over_devices = jax.shard_map(
        functools.partial(merge_attention, axis_name="d"),
        mesh=mesh(shape=(2,), names=("d",)),
        in_specs=P("d"),
        out_specs=P(),
    )
    for out, lse in (merge_attention(*parts), over_devices(*parts)):
        assert np.isnan(out).all()
        np.testing.assert_array_equal(lse, [np.nan, np.nan, np.inf])


def test_a_prefix_that_sequences_share_and_pages_of_their_own() -> None:
    prefix, pages = (RNG.normal(size=(2, *shape)).astype(np.float32) for shape in ((1, 6, K, H), (K, 7, 8, H)))
    tables, lengths = np.array([[5, 2], [0, 0]]), np.array([11, 0])
    shared = flash_attention(Q[None, :, 0], *prefix, return_residual=True)
    own = paged_attention(Q[:, 0], *pages, tables, lengths, return_residual=True)
    out, lse = merge_attention([shared[0][0], own[0]], [shared[1][0], own[1]])
    for b, length in enumerate(lengths):
        keys = [
            np.concatenate([x[0], np.moveaxis(pool[:, tables[b]], 0, 2).reshape(16, K, H)[:length]])[None]
            for x, pool in zip(prefix, pages, strict=True)
        ]
        want = attention_oracle.forward(Q[b : b + 1, :1], *keys)
        close(out[b], want.out[0, 0])
        close(lse[b], want.lse[0, :, 0])


@pytest.mark.parametrize("gathers", [False, True])
def test_parts_of_devices(gathers: bool) -> None:
    """Each device has a part of the keys, and gets the whole; of one device nothing is seen."""
    sees = SEES & (np.arange(S) // 3 != 2)

    def local(q: Any, k: Any, v: Any, sees: Any) -> Any:
        part = flash_attention(q, k, v, mask=sees, return_residual=True)
        if gathers:
            return merge_attention(*(jax.lax.all_gather(x, "d") for x in part))
        return merge_attention(*([x] for x in part), axis_name="d")

    on, keys = mesh(shape=(4,), names=("d",)), P(None, "d")
    specs = P(), keys, keys, P(None, None, None, "d")
    # What is gathered is the same on each device, which `shard_map` cannot know.
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=P("d") if gathers else P())
    take = (lambda x: x[:B]) if gathers else (lambda x: x)

    def results(f: Any, *qkv: Any) -> Any:
        out, lse = (take(x) if f is mapped else x for x in f(*qkv, sees))
        return (out * CT[0]).sum() + jnp.where(lse == -jnp.inf, 0.0, lse * CT[1]).sum(), (out, lse)

    alone = lambda q, k, v, sees: flash_attention(q, k, v, mask=sees, return_residual=True)
    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(results, f), (0, 1, 2), has_aux=True))(Q, KEY, VALUE)
        for f in (mapped, alone)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, want)
