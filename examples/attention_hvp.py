"""Second derivatives through flash attention: Hessian-vector products, and the curvature of a loss by them.

`jax.jvp` of `jax.grad` is a Hessian-vector product; the usual flash attentions, being `jax.custom_vjp` functions whose
backward pass is a kernel, refuse it. Here it runs in memory that grows with the length and not with its square.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax


def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    out = jaxsoftmax.flash_attention(query, key, value, is_causal=True)
    return (out**2).mean() * 1e3


def hvp(operands: tuple[jax.Array, ...], direction: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The Hessian at `operands`, times `direction`: forward mode over reverse mode."""
    return jax.jvp(jax.grad(loss, (0, 1, 2)), operands, direction)[1]


def dot(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> jax.Array:
    return sum((jnp.vdot(x, y) for x, y in zip(a, b, strict=True)), jnp.zeros(()))


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 6)
    operands, direction = (tuple(jax.random.normal(k, (1, 32, 2, 16)) for k in part) for part in (keys[:3], keys[3:]))

    step = 1e-2
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    ahead, behind = (
        gradient(*(x + sign * step * t for x, t in zip(operands, direction, strict=True))) for sign in (1, -1)
    )
    for exact, a, b in zip(jax.jit(hvp)(operands, direction), ahead, behind, strict=True):
        np.testing.assert_allclose(exact, (a - b) / (2 * step), rtol=0.05, atol=0.02)
    print("a Hessian-vector product agrees with the difference of two gradients")

    product = jax.jit(hvp)
    for _ in range(30):
        length = jnp.sqrt(dot(direction, direction))
        direction = product(operands, tuple(x / length for x in direction))
    print(f"largest curvature of the loss, by 30 power iterations: {float(jnp.sqrt(dot(direction, direction))):.3f}")

    print("\ntemporary memory of a Hessian-vector product, one head of 64:")
    sizes = []
    for length in (4096, 8192, 16384):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        memory = jax.jit(hvp).lower((x,) * 3, (x,) * 3).compile().memory_analysis()
        assert memory is not None
        sizes.append(memory.temp_size_in_bytes)
        print(
            f"  T = {length:6d}: {sizes[-1] / 1e6:7.1f} MB; a matrix of weights alone is {length**2 * 4 / 1e6:7.1f} MB"
        )
    assert sizes[-1] < 4.5 * sizes[0], "memory grows faster than the length"


if __name__ == "__main__":
    main()
