"""What keeps the compilers from unrolling loops and from hoisting out of them, where that takes too many registers."""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import llvm

from pallas_kernels.mosaic.ptx import INTEGER, SPLAT, Index, asm, i32, integer, scalar


def rolled[Carry](start: Index, stop: int, body: Callable[[jax.Array, Carry], Carry], init: Carry) -> Carry:
    """`lax.fori_loop` that stays a loop.

    Unrolled, a share of float32 and its tangents takes 137 registers instead of 56, and a multiprocessor one block
    instead of two: N = 262144, 869 us and 752, H200.
    """

    def keep_rolled(ctx):
        asm('.pragma "nounroll";', "", [])

    def step(i: jax.Array, carry: Carry) -> Carry:
        plgpu.inline_mgpu()(keep_rolled)()
        return body(i, carry)

    return lax.fori_loop(start, recomputed(jnp.int32(stop)), step, init)


def recomputed(x: jax.Array) -> jax.Array:
    """`x`, whose history the compiler does not see: what is derived from it inside a loop stays inside.

    Otherwise 24 matrix descriptors are kept in registers all along the loop, which spills: D = 128, S = 2048, bf16,
    449 TFLOP/s, and 598 like this, H200.
    """

    def copy_scalar(ctx, x):
        return integer(llvm.inline_asm(i32(), [scalar(x)], "mov.b32 $0, $1;", "=r,r", has_side_effects=True))

    return plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=INTEGER)(copy_scalar)(x)
