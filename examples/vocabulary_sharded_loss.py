"""The loss of logits whose vocabulary is sharded over eight devices, first by hand and then by `jit`.

By hand, under `shard_map`: a device takes the logsumexp of its columns, and the label's logit if that is among them;
one all-reduce brings a few numbers a row from every device to all, and `jaxsoftmax.merge` makes the row's logsumexp of
them. By `jit`: the logits are placed so, and `softmax_cross_entropy_with_integer_labels` is called as on one device.
On GPUs each device then runs the kernel on its columns, and one all-gather exchanges three numbers a row. Both give the
loss and the gradient of the uncut call, and no program gathers the logits. Runs on eight devices that the host pretends
to have, where XLA partitions the plain operations and adds up what the devices have.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

DEVICES, ROWS, VOCABULARY = 8, 64, 8 * 1000
CUT = P(None, "vocabulary")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over rows, in one pass."""
    weight = 1 / max(len(labels), 1)
    losses = jaxsoftmax.softmax_cross_entropy_with_integer_labels(logits, labels, weights=weight)
    return losses.sum()


def loss_by_hand(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the loss on each device from its columns and all labels."""
    device, width = jax.lax.axis_index("vocabulary"), logits.shape[-1]
    column = labels - device * width
    is_here = (column >= 0) & (column < width)
    picked = jnp.take_along_axis(logits, jnp.where(is_here, column, 0)[:, None], axis=-1)[:, 0]
    # A device may have hidden columns alone, of which the gradient is 0, and that of -inf less -inf would be NaN.
    normalizer = jaxsoftmax.logsumexp(logits, axis=-1, where=logits > -jnp.inf)
    # Each device fills in its own line of what is summed, so that the sum has every device's.
    own = jnp.where(jnp.arange(DEVICES)[:, None] == device, normalizer, 0.0)
    normalizers, label_logit = jax.lax.psum((own, jnp.where(is_here, picked, 0.0)), "vocabulary")
    row = jaxsoftmax.merge(*(jaxsoftmax.Stats(each, jnp.ones_like(each)) for each in normalizers))
    return (jaxsoftmax.log_normalizer(row) - label_logit).sum() / max(len(labels), 1)


def collectives(function: Callable[..., Any], *operands: jax.Array) -> list[tuple[str, int]]:
    """The collectives of the compiled program, and how many numbers each gives a device."""
    program = jax.jit(function).lower(*operands).compile().as_text() or ""
    found = re.findall(rf"= (\(.*?\)|\S+) ({'|'.join(COLLECTIVES)})(?:-start)?\(", program)
    shapes = [(name, re.findall(r"\w\[([\d,]*)\]", types)) for types, name in found]
    size = lambda shape: math.prod(map(int, filter(None, shape.split(","))))
    return [(name, sum(map(size, arrays))) for name, arrays in shapes]


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("vocabulary",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(ROWS, VOCABULARY)) * 5, jnp.float32)
    labels = jnp.asarray(rng.integers(VOCABULARY, size=ROWS))
    value, gradient = jax.value_and_grad(loss)(logits, labels)
    print(f"{'uncut':<8}loss {value:.6f}")

    cut = jax.device_put(logits, NamedSharding(mesh, CUT))
    labels = jax.device_put(labels, NamedSharding(mesh, P()))
    by_hand = jax.shard_map(loss_by_hand, mesh=mesh, in_specs=(CUT, P()), out_specs=P())
    for name, function in (("by hand", by_hand), ("by jit", loss)):
        step = jax.jit(jax.value_and_grad(function))
        found, slope = step(cut, labels)
        part, exchanged = slope.sharding.shard_shape(slope.shape), collectives(step, cut, labels)
        print(f"{name:<8}loss {found:.6f}, each device's gradient {part}, collectives {exchanged}")
        np.testing.assert_allclose(found, value, rtol=1e-6)
        np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=0)
        assert slope.sharding.is_equivalent_to(cut.sharding, slope.ndim)
        assert exchanged
        assert all(numbers <= 4 * DEVICES * ROWS for _, numbers in exchanged)


if __name__ == "__main__":
    main()
