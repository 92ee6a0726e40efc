"""Keeps the compilers from unrolling loops and from hoisting out of them, where that takes too many registers."""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import llvm

from pallas_kernels.mosaic.ptx import INTEGER, SPLAT, Index, asm, i32, integer, scalar


def no_unroll[Carry](start: Index, stop: int, body: Callable[[jax.Array, Carry], Carry], init: Carry) -> Carry:
    """`lax.fori_loop` that stays a loop.

    Unrolled, a slice of float32 logits and tangents takes 137 registers instead of 56, and an SM holds one CTA instead
    of two.
    """

    def keep_loop(ctx):
        asm('.pragma "nounroll";', "", [])

    def step(i: jax.Array, carry: Carry) -> Carry:
        plgpu.inline_mgpu()(keep_loop)()
        return body(i, carry)

    return lax.fori_loop(start, opaque(jnp.int32(stop)), step, init)


def opaque(x: jax.Array) -> jax.Array:
    """Returns `x` in a form that the compiler cannot hoist: what a loop derives from it stays in the loop.

    Otherwise the attention kernels keep 24 matrix descriptors in registers all along the loop, which spills.
    """

    def copy_scalar(ctx, x):
        return integer(llvm.inline_asm(i32(), [scalar(x)], "mov.b32 $0, $1;", "=r,r", has_side_effects=True))

    return plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=INTEGER)(copy_scalar)(x)
