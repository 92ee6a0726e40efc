"""Transformations of a function of arrays, each applied to an operation of ours and to what it is in plain JAX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[..., Any]


def weighted(y: jax.Array) -> jax.Array:
    return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()


def linear(f: Function) -> Function:
    """A scalar with cotangents that are known, so that vmap does not map them."""
    return lambda *xs: sum(weighted(y) for y in jax.tree.leaves(f(*xs)))


def loss(f: Function) -> Function:
    """A scalar with cotangents that depend on the results."""
    return linear(lambda *xs: jax.tree.map(jnp.sin, f(*xs)))


def pulled_back(f: Function, *xs: jax.Array) -> Any:
    """Results, and gradients for cotangents that depend on them: those of the sum of their sines."""
    out, pull = jax.vjp(f, *xs)
    return out, pull(jax.tree.map(lambda y: jnp.cos(jnp.where(jnp.isfinite(y), y, 0)), out))


def gradient(f: Function) -> Function:
    """The gradients alone."""
    return lambda *xs: pulled_back(f, *xs)[1]


@dataclasses.dataclass
class Case:
    """An operation of ours, the same in plain JAX, and its operands; `small` ones are for Jacobians."""

    ours: Function
    theirs: Function
    xs: tuple[jax.Array, ...]
    small: tuple[jax.Array, ...]
    tolerance: tuple[float, float] = (1e-3, 1e-4)  # relative and absolute
    wanted: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Tangents, and three of each operand; here, where nothing is traced."""
        rng = np.random.default_rng(1)
        self.ts = tuple(jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in self.xs)
        self.stacked = tuple(jnp.asarray(np.stack([x, 0.5 * x, -x])) for x in map(np.asarray, self.xs))

    @property
    def all(self) -> tuple[int, ...]:
        """The numbers of the operands."""
        return tuple(range(len(self.xs)))

    def grad(self, scalar: Function) -> Function:
        return jax.grad(scalar, self.all)

    def dot(self, gradients: Any) -> jax.Array:
        return sum((x * t).sum() for x, t in zip(gradients, self.ts, strict=True))

    def check(self, name: str, transformation: Callable[[Function, "Case"], Any] | None = None) -> None:
        """Compares what a transformation gives, of `TRANSFORMED` or another; what plain JAX gives is known by name."""
        apply = transformation or TRANSFORMED[name]

        def compiled(f: Function) -> Any:
            # One program compiles sooner than the dozens of operations it consists of.
            return jax.jit(lambda: apply(f, self))()

        if name not in self.wanted:
            self.wanted[name] = jax.device_get(compiled(self.theirs))
        got, want = (apply(self.ours, self) if name in EAGER else compiled(self.ours)), self.wanted[name]
        relative, absolute = self.tolerance
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=relative, atol=absolute), got, want)
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), got, want)

    def check_under_debugging(self) -> None:
        """Results and gradients with JAX's checks of its own types, of leaks and of NaN."""
        mapped = lambda f, c: jax.vmap(lambda *xs: jax.jvp(f, xs, xs))(*c.stacked)
        with jax.enable_checks(True):
            self.check("eager grad")
            self.check("vmap of jvp of its operands", mapped)
        with jax.checking_leaks(), jax.debug_nans(True):
            self.check("grad")


def _over_rows(f: Function, x: jax.Array, rest: tuple[jax.Array, ...]) -> jax.Array:
    return jax.lax.scan(lambda c, x: (c + loss(f)(x, *rest), None), 0.0, jnp.stack([x, 2 * x]))[0]


EAGER = {"eager", "eager grad"}
TRANSFORMED: dict[str, Callable[[Function, Case], Any]] = {
    "eager": lambda f, c: f(*c.xs),
    "eager grad": lambda f, c: c.grad(loss(f))(*c.xs),
    "jit": lambda f, c: f(*c.xs),
    "grad": lambda f, c: c.grad(loss(f))(*c.xs),
    "grad of the last operand": lambda f, c: jax.grad(loss(f), c.all[-1])(*c.xs),
    "jvp": lambda f, c: jax.jvp(f, c.xs, c.ts),
    "double transpose": lambda f, c: jax.linear_transpose(jax.linearize(f, *c.xs)[1], *c.xs)(f(*c.xs)),
    "jacfwd": lambda f, c: jax.jacfwd(f, c.all)(*c.small),
    "jacrev": lambda f, c: jax.jacrev(f, c.all)(*c.small),
    "hessian": lambda f, c: jax.hessian(loss(f), c.all[:2] + c.all[4:])(*c.small),
    "hvp": lambda f, c: jax.jvp(c.grad(loss(f)), c.xs, c.ts)[1],
    "grad of grad": lambda f, c: c.grad(lambda *xs: c.dot(c.grad(loss(f))(*xs)))(*c.xs),
    "grad of jvp": lambda f, c: c.grad(loss(lambda *xs: jax.jvp(f, xs, c.ts)[1]))(*c.xs),
    "third": lambda f, c: jax.jvp(lambda *xs: jax.jvp(c.grad(loss(f)), xs, c.ts)[1], c.xs, c.xs)[1],
    "vmap": lambda f, c: jax.vmap(f)(*c.stacked),
    "vmap of nothing": lambda f, c: jax.vmap(lambda s: jax.tree.map(lambda y: y + s, f(*c.xs)))(jnp.arange(2.0)),
    "vmap of grad": lambda f, c: jax.vmap(c.grad(loss(f)))(*c.stacked),
    "vmap of grad of a sum": lambda f, c: jax.vmap(c.grad(linear(f)))(*c.stacked),
    "vmap of hvp of a sum": lambda f, c: jax.vmap(lambda *xs: jax.jvp(c.grad(linear(f)), xs, c.ts)[1])(*c.stacked),
    "vmap of jvp": lambda f, c: jax.vmap(lambda *ts: jax.jvp(f, c.xs, ts)[1])(*c.stacked),
    "grad of vmap": lambda f, c: c.grad(loss(jax.vmap(f)))(*c.stacked),
    "grad of scan": lambda f, c: c.grad(lambda x, *rest: _over_rows(f, x, rest))(*c.xs),
    "jvp of map": lambda f, c: jax.jvp(
        lambda x: jax.lax.map(lambda x: f(x, *c.xs[1:]), x), c.stacked[:1], c.stacked[:1]
    ),
    "while": lambda f, c: jax.lax.fori_loop(0, 3, lambda _, x: x + loss(f)(x, *c.xs[1:]), c.xs[0]),
    "cond": lambda f, c: c.grad(lambda *xs: jax.lax.cond(xs[0].max() > 0, loss(f), lambda *xs: xs[0].sum(), *xs))(
        *c.xs
    ),
    "remat": lambda f, c: c.grad(jax.checkpoint(loss(f)))(*c.xs),
    "jvp of remat": lambda f, c: jax.jvp(jax.checkpoint(f), c.xs, c.ts),
    "grad of remat of grad": lambda f, c: c.grad(
        lambda *xs: jax.checkpoint(lambda *xs: sum((g**2).sum() for g in c.grad(loss(f))(*xs)))(*xs)
    )(*c.xs),
}
