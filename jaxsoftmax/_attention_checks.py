"""The arguments of `flash_attention`, checked and brought to the primitives' form; every error says what to do."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.reference import accumulator_dtype

NAME = "flash_attention"
DTYPES = ("bfloat16", "float16", "float32", "float64")
IMPLEMENTATIONS = (None, "xla", "mosaic_gpu")
ALIGNMENTS = ("top_left", "bottom_right")

Shape = tuple[Any, ...]


def inputs(query: Any, key: Any, value: Any, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of one floating dtype and of shapes that fit."""
    given = {"query": jnp.asarray(query), "key": jnp.asarray(key), "value": jnp.asarray(value)}
    if dtype is not None:
        if jnp.dtype(dtype).name not in DTYPES:
            raise TypeError(f"{NAME}: dtype={jnp.dtype(dtype).name}, expected one of {', '.join(DTYPES)}.")
        given = {name: x.astype(dtype) for name, x in given.items()}
    for name, x in given.items():
        if x.dtype.name not in DTYPES:
            raise TypeError(
                f"{NAME}: {name} has dtype {x.dtype}, expected one of {', '.join(DTYPES)}. Pass dtype= to convert "
                "query, key and value."
            )
    if len({x.dtype for x in given.values()}) > 1:
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in given.items())
        raise TypeError(f"{NAME}: got {dtypes}, expected one dtype for all three. Pass dtype= to convert them.")
    q, k, v = given.values()
    if q.ndim < 3:
        raise ValueError(f"{NAME}: query has shape {q.shape}, expected (*batch, length, heads, head_dim).")
    _shape("key", k, (*q.shape[:-3], "length", "heads", q.shape[-1]), "*batch and head_dim are query's")
    _shape("value", v, (*k.shape[:-1], "head_dim"), "all but its last axis are key's")
    heads, shared = q.shape[-2], k.shape[-2]
    if heads == 0 or shared == 0 or heads % shared:
        raise ValueError(
            f"{NAME}: query has {heads} heads and key {shared}, expected a multiple of the key's, as each key head is "
            "shared by as many query heads, and at least one head."
        )
    return q, k, v


def logits_like(name: str, x: Any, q: jax.Array, k: jax.Array) -> jax.Array:
    """A bias or mask with the rank of the logits, each extent 1 or the logits'."""
    want = (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
    array = jnp.asarray(x)
    shape = array.shape
    while len(shape) > len(want) and shape[0] == 1:
        shape = shape[1:]
    shape = (1,) * (len(want) - len(shape)) + shape
    if len(shape) > len(want) or any(got not in (1, n) for got, n in zip(shape, want, strict=True)):
        raise ValueError(
            f"{NAME}: {name} has shape {array.shape}, expected a shape that broadcasts to (*batch, query heads, "
            f"query length, key length) = {want}."
        )
    return array.reshape(shape)


def bias(x: Any, q: jax.Array, k: jax.Array) -> jax.Array:
    """A bias of a floating dtype; integers take that of accumulation, in which they are added."""
    array = logits_like("bias", x, q, k)
    if jnp.issubdtype(array.dtype, jnp.complexfloating) or array.dtype == jnp.bool_:
        raise TypeError(
            f"{NAME}: bias has dtype {array.dtype}, expected real numbers to add to the logits. Bools go in mask."
        )
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(accumulator_dtype(q.dtype))


def mask(x: Any, q: jax.Array, k: jax.Array) -> jax.Array:
    """A mask as bool: anything but 0 takes part."""
    array = logits_like("mask", x, q, k)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{NAME}: mask has dtype {array.dtype}, expected bool, or numbers of which 0 means masked.")
    return array.astype(bool)


def lengths(name: str, x: Any, batch: Shape) -> jax.Array:
    """Sequence lengths, one for each element of the batch."""
    array = _integers(name, x)
    if not batch and array.shape == (1,):
        array = array.reshape(())
    if array.shape != batch:
        raise ValueError(f"{NAME}: {name} has shape {array.shape}, expected {batch}, a length for each sequence.")
    return array


def segments(query_ids: Any, key_ids: Any, q: jax.Array, k: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """Segment ids of queries and keys; the keys' are the queries' if not given."""
    if query_ids is None:
        if key_ids is not None:
            raise ValueError(f"{NAME}: got key_value_segment_ids alone; pass query_segment_ids too.")
        return None, None
    want = {"query_segment_ids": q.shape[:-2], "key_value_segment_ids": k.shape[:-2]}
    if key_ids is None:
        if q.shape[-3] != k.shape[-3]:
            raise ValueError(
                f"{NAME}: got query_segment_ids alone, which serves keys too only where there are as many as queries; "
                f"here there are {q.shape[-3]} queries and {k.shape[-3]} keys. Pass key_value_segment_ids too."
            )
        key_ids = query_ids
    found: list[jax.Array] = []
    for (name, shape), x in zip(want.items(), (query_ids, key_ids), strict=True):
        array = _integers(name, x)
        if array.shape != shape:
            raise ValueError(f"{NAME}: {name} has shape {array.shape}, expected {shape}, a number for each position.")
        found.append(array)
    return found[0], found[1]


def sinks(x: Any, q: jax.Array) -> jax.Array:
    """A logit for each query head."""
    array = jnp.asarray(x)
    if array.shape != (q.shape[-2],) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{NAME}: sinks is {array.dtype} of shape {array.shape}, expected a float for each query head, of shape "
            f"{(q.shape[-2],)}."
        )
    return array


def scale(x: Any, q: jax.Array) -> float | jax.Array:
    """A number as a float; anything else as an array of the query's rank that broadcasts to it."""
    if x is None:
        return float(q.shape[-1]) ** -0.5 if q.shape[-1] else 1.0
    number = _number(x)
    if number is not None:
        if math.isnan(number):
            raise ValueError(f"{NAME}: scale is nan, expected a number.")
        return number
    array = jnp.asarray(x)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{NAME}: scale has dtype {array.dtype}, expected real numbers.")
    if array.ndim > q.ndim or any(got not in (1, n) for got, n in zip(array.shape[::-1], q.shape[::-1], strict=False)):
        raise ValueError(
            f"{NAME}: scale has shape {array.shape}, expected a number, or a shape that broadcasts to "
            f"query's, {q.shape}."
        )
    return array.reshape((1,) * (q.ndim - array.ndim) + array.shape)


def soft_cap(x: Any) -> float | None:
    """A positive number."""
    if x is None:
        return None
    cap = _number(x)
    if cap is None or isinstance(x, bool) or not 0 < cap < math.inf:
        raise ValueError(f"{NAME}: logits_soft_cap={x!r}, expected a positive number, or None for no cap.")
    return cap


def window(x: Any) -> tuple[int | None, int | None]:
    """How far a query sees to its left and right; so far that an index plus it is no int32 any more is unbounded."""
    if x is None:
        return None, None
    sides = tuple(x) if isinstance(x, Sequence) else (x, x)
    if len(sides) != 2 or any(
        side is not None and (not isinstance(side, (int, np.integer)) or isinstance(side, bool) or side < 0)
        for side in sides
    ):
        raise ValueError(
            f"{NAME}: local_window_size={x!r}, expected a number of positions (0 or more), or a pair (left, right) of "
            "them, in which None is unbounded."
        )
    left, right = (None if side is None or side >= 2**30 else int(side) for side in sides)
    return left, right


def choice(name: str, x: Any, among: tuple[Any, ...]) -> Any:
    """One of a few values."""
    if x not in among:
        raise ValueError(f"{NAME}: {name}={x!r}, expected one of {', '.join(map(repr, among))}.")
    return x


class Dropout(NamedTuple):
    """Which weights to drop."""

    rng: jax.Array
    rate: Any
    broadcast: bool


def dropout(rng: jax.Array | None, rate: Any, broadcast: bool) -> Dropout | None:
    """What to drop, or None for nothing."""
    number = _number(rate)
    if number is not None:
        if not 0 <= number < 1:
            raise ValueError(f"{NAME}: dropout_rate={rate}, expected 0 <= dropout_rate < 1.")
        if number == 0:
            return None
    if rng is None:
        raise ValueError(
            f"{NAME}: dropout_rate={rate} needs a dropout_rng. Pass one, or deterministic=True for no dropout."
        )
    return Dropout(rng, rate, broadcast)


def absent(input_positions: Any, qk_attn_weights_einsum: Any, attn_weights_value_einsum: Any) -> None:
    """Raises for what Flax may pass and attention in one kernel cannot honour."""
    if input_positions is not None:
        raise NotImplementedError(
            f"{NAME}: input_positions were given, but positions have no meaning here. Rotate query and key before the "
            "call: attention_fn=lambda q, k, v, *, input_positions, **rest: "
            "flash_attention(rotate(q, input_positions), rotate(k, input_positions), v, **rest)."
        )
    einsums = {
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, einsum in einsums.items():
        if einsum is not None:
            raise NotImplementedError(
                f"{NAME}: {name} was given, but the products are inside the kernel, where no other einsum can take "
                "their place. Leave it out, or use flax.linen.dot_product_attention."
            )


def no_kernel_shows_weights(why: str) -> NotImplementedError:
    """A kernel named for a call that needs the matrix of weights."""
    return NotImplementedError(
        f"{NAME}: implementation='mosaic_gpu' was asked for, but {why}, and no kernel has the weights in memory. Pass "
        "implementation=None: XLA then computes them, in memory that grows with the product of the lengths."
    )


def _number(x: Any) -> float | None:
    """A number of Python's or NumPy's, as a float; None for anything else."""
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    return float(x) if isinstance(x, (int, float, np.integer, np.floating)) else None


def _integers(name: str, x: Any) -> jax.Array:
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{NAME}: {name} has dtype {array.dtype}, expected integers.")
    return array.astype(jnp.int32)


def _shape(name: str, x: jax.Array, want: tuple[Any, ...], why: str) -> None:
    """Raises unless the shape is as wanted; names in it stand for any extent."""
    if x.ndim != len(want) or any(not isinstance(n, str) and n != got for n, got in zip(want, x.shape, strict=True)):
        shown = f"({', '.join(map(str, want))})"
        raise ValueError(f"{NAME}: {name} has shape {x.shape}, expected {shown}: {why}.")
