"""An online softmax in tiles, plainly right, and with a knob for each fault that such kernels are written with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.monoid import Stats, decay
from pallas_kernels.softmax.problem import Op, Problem


def never_guarded(frm: jax.Array, to: jax.Array, *, exp: Any = jnp.exp) -> jax.Array:
    """`decay` that forgets that -inf is the identity."""
    return exp(frm - to)


def solver(
    problem: Problem,
    *,
    tile_size: int = 128,
    start: float = -jnp.inf,
    padding: float = -jnp.inf,
    decay: Callable[..., jax.Array] = decay,
    accumulator: Any = jnp.float32,
    rescale: bool = True,
    tiles: slice = slice(None),
    use_mask: bool = True,
    use_scale: bool = True,
    deliver: Callable[[jax.Array], jax.Array] = lambda y: y,
    inner_product: bool = True,
) -> Callable[..., Any]:
    """A function that solves `problem` (`inner == 1`); every argument after `tile_size` is a planted fault."""
    scale = problem.scale if use_scale else 1.0

    def logits(x: jax.Array, mask: jax.Array | None) -> jax.Array:
        z = x.astype(jnp.float32) * scale
        z = z if mask is None or not use_mask else jnp.where(mask, z, -jnp.inf)
        return jnp.pad(z, ((0, 0), (0, -z.shape[1] % tile_size)), constant_values=padding)

    def states(z: jax.Array) -> Stats:
        def fold(state: Stats, tile: jax.Array) -> tuple[Stats, None]:
            m = jnp.maximum(state.max, tile.max(1))
            kept = state.sum * decay(state.max, m).astype(accumulator) if rescale else state.sum
            return Stats(m, kept + decay(tile, m[:, None]).astype(accumulator).sum(1)), None

        empty = Stats(jnp.full(z.shape[0], start, jnp.float32), jnp.zeros(z.shape[0], accumulator))
        folded, _ = jax.lax.scan(fold, empty, z.reshape(z.shape[0], -1, tile_size).swapaxes(0, 1)[tiles])
        return Stats(folded.max, folded.sum.astype(jnp.float32))

    def rows(x: jax.Array, mask: jax.Array | None = None) -> Any:
        z = logits(x, mask)
        s = states(z)
        if problem.op is Op.STATS:
            return s
        if problem.op is Op.SOFTMAX:
            y = (decay(z, s.max[:, None]) / s.sum[:, None])[:, : x.shape[1]]
            y = y if mask is None else jnp.where(mask, y, 0)
        else:
            y = ((z - s.max[:, None]) - jnp.log(s.sum)[:, None])[:, : x.shape[1]]
            y = y if mask is None else jnp.where(mask, y, -jnp.inf)
        return deliver(y.astype(x.dtype))

    def tangent(y: jax.Array, t: jax.Array) -> jax.Array:
        y32, t32 = y.astype(jnp.float32), t.astype(jnp.float32)
        product = (y32 * t32).sum(1, keepdims=True, dtype=accumulator).astype(jnp.float32) if inner_product else 0.0
        return deliver((scale * (y32 * (t32 - product))).astype(t.dtype))

    return tangent if problem.op is Op.SOFTMAX_TANGENT else rows
