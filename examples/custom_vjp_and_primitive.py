"""Why `jaxsoftmax.softmax` is a primitive and not a `jax.custom_vjp` function: the same derivative, bound twice.

`pallas_kernels.custom_vjp` binds the pair (forward, backward) by `jax.custom_vjp`; `jaxsoftmax` registers it
as the rules of a primitive. Gradients are the same; forward mode, and what is built on it, exists only for the
primitive. Here the `custom_vjp` function is written out over the plain XLA reference, so that it runs on any machine.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from pallas_kernels.softmax import reference


@jax.custom_vjp
def softmax(x: jax.Array) -> jax.Array:
    """Softmax of each row, as a `custom_vjp` function."""
    return reference.softmax(x, axes=(1,))


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = softmax(x)
    return y, y


def _backward(y: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    return (reference.softmax_tangent(y, ct, axes=(1,)),)


softmax.defvjp(_forward, _backward)


def main() -> None:
    x, t = (jax.random.normal(key, (4, 1000)) for key in jax.random.split(jax.random.key(0)))
    gradients = [jax.grad(lambda x, f=f: (f(x) * t).sum())(x) for f in (softmax, jaxsoftmax.softmax)]
    np.testing.assert_array_equal(*gradients)
    print("reverse mode: the same gradients, bit for bit")

    try:
        jax.jvp(softmax, (x,), (t,))
    except TypeError as error:
        print(f"forward mode of the custom_vjp function: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("custom_vjp functions refuse forward mode")

    _, tangent = jax.jvp(jaxsoftmax.softmax, (x,), (t,))
    np.testing.assert_allclose(tangent, jax.vjp(softmax, x)[1](t)[0], rtol=1e-5, atol=1e-9)
    print("forward mode of the primitive: J t, which is J^T t too, as the Jacobian is symmetric")

    hessian = jax.hessian(lambda row: jaxsoftmax.logsumexp(row))(x[0, :5])
    p = jaxsoftmax.softmax(x[0, :5])
    np.testing.assert_allclose(hessian, jnp.diag(p) - jnp.outer(p, p), atol=1e-6)
    print("hessian of logsumexp: diag(p) - p p^T")

    print("\nthe primitive's gradient, as JAX sees it:")
    print(jax.make_jaxpr(jax.grad(lambda x: jaxsoftmax.softmax(x)[0, 0]))(x[:, :8]))


if __name__ == "__main__":
    main()
