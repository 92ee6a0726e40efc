"""Elementary functions for the kernels, as accurate as XLA's and cheap enough to hide behind the memory traffic."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic.ptx import WGMMA

LOG2E = math.log2(math.e)


def exp_16bit(d: jax.Array, unit: float = 1.0) -> jax.Array:
    """Computes `exp(unit * d)` for 16-bit results, by a multiplication and a MUFU; relative error |unit d| * 2^-24."""
    return jnp.exp2(d * (unit * LOG2E))


def exp_32bit(d: jax.Array, unit: float = 1.0) -> jax.Array:
    """Returns `exp(unit * d)` to about 2 ulp of float32 for d <= 0: `2^n * exp(r)`, `unit d = n log(2) + r`.

    The split is exact if the compiler contracts the products. Results below 2^-149 are 0; -inf gives 0, NaN stays.
    """
    round_to_integer = 1.5 * 2.0**23
    ln2_high, ln2_low = 0.693359375, -2.12194440e-4
    d = jnp.maximum(d, -104.0 / unit)
    n = (d * (unit * LOG2E) + round_to_integer) - round_to_integer
    r = ((d if unit == 1.0 else d * unit) - n * ln2_high) - n * ln2_low
    return jnp.exp2(n) * jnp.exp2(r * LOG2E)


def weight_in_sum(x: jax.Array, log_sum: jax.Array) -> jax.Array:
    """Returns `2^(x - log_sum)`, a logit's weight in a sum that has ended; a `log_sum` of +inf gives 0.

    It is not `monoid.decay`: nothing merges any more, so that `log_sum` is never -inf and needs no guard.
    """
    return jnp.exp2(x - log_sum)


def tanh_16bit(x: jax.Array) -> jax.Array:
    """Returns `tanh` to about 2^-23, as an absolute error: the hardware's own errs by 2^-11."""
    # 1 / y is one instruction, 2 / y several.
    return 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(x * (2.0 * LOG2E))))


def tanh_32bit(x: jax.Array) -> jax.Array:
    """Returns `tanh` to about 2 ulp of float32: a polynomial near 0, where the exponentials cancel."""
    size = jnp.abs(x)
    e = exp_32bit(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    series = -0.33333314 + s * (0.13332474 + s * (-0.05384005 + s * (0.02101913 + s * -0.00619716)))
    near = x + x * (s * series)
    return lax.select(size < 0.55, near, lax.select(x < 0.0, -far, far))


def tanh_for(dtype: jnp.dtype) -> Callable[[jax.Array], jax.Array]:
    """Returns the `tanh` that goes with `exp_for`."""
    return tanh_32bit if dtype.itemsize == 4 else tanh_16bit


def exp_for(dtype: jnp.dtype, unit: float = 1.0) -> Callable[[jax.Array], jax.Array]:
    """Returns the `exp` of multiples of `unit`, with an error that disappears in the rounding of `dtype`."""
    return functools.partial(exp_32bit if dtype.itemsize == 4 else exp_16bit, unit=unit)


def log(x: jax.Array) -> jax.Array:
    """Computes `log` of normal float32 numbers to about 1 ulp; MUFU's errs by 2^-22 near 0. The logarithm of 0 is -inf.

    `x = 2^k f` with `f` near 1, and `log(f) = 2 atanh((f - 1) / (f + 1))` as a polynomial.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    k = (bits - 0x3F3504F3) >> 23
    f = lax.bitcast_convert_type(bits - (k << 23), jnp.float32)
    s = (f - 1.0) / (f + 1.0)
    z = s * s
    series = z * (2.0 / 3 + z * (2.0 / 5 + z * (2.0 / 7 + z * (2.0 / 9))))
    result = k.astype(jnp.float32) * 0.693147180559945 + (s * 2.0 + s * series)
    result = lax.select(x == 0.0, jnp.full_like(x, -jnp.inf), result)
    return lax.select(x < jnp.inf, result, x)


def scaled_less(factor: float, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes `x * factor - y`, rounded once everywhere; compilers contract a product in some branches only."""

    def multiply_subtract(ctx, x, y):
        registers = np.empty_like(x.registers)
        for i, (a, b) in enumerate(zip(x.registers.flat, y.registers.flat, strict=True)):
            registers.flat[i] = llvm.intr_fma(a, utils.c(factor, a.type), arith.negf(b))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return ptx.inline(
        multiply_subtract, (x, WGMMA), (y, WGMMA), result=(x.shape, x.dtype, WGMMA), static={"factor": factor}
    )
