"""Checks the arguments of `flash_attention` and converts them for the primitives; every error says what to do."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core import checks, numbers
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike, DTypeLike, is_real
from jaxsoftmax._core.sharding import broadcast_spec, common_spec, reshard, settings_for, spec_of
from pallas_kernels.attention.problem import OPERANDS, UNBOUNDED, Operands, leading
from pallas_kernels.types import accumulator_dtype

CausalAlignment = Literal["top_left", "bottom_right"]

NAME = "flash_attention"
DTYPES = ("bfloat16", "float16", "float32", "float64")

Shape = tuple[int, ...]


class FlaxModule(Protocol):
    """Takes the weights that are sown."""

    def sow(self, collection: str, name: str, value: jax.Array, /) -> object: ...


def inputs(arrays: Sequence[object], dtype: DTypeLike | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns query, key and value of one floating dtype and of shapes that fit."""
    given = {name: _array(name, x) for name, x in zip(("query", "key", "value"), arrays, strict=True)}
    if dtype is not None:
        wanted = checks.dtype_name(dtype)
        if wanted not in DTYPES:
            raise TypeError(f"{NAME}: dtype={wanted}, expected one of {', '.join(DTYPES)}.")
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


def operands(given: Mapping[str, object], q: jax.Array, k: jax.Array) -> dict[str, jax.Array]:
    """Returns the operands beside query, key and value, each by its check in `CHECKS`, or by `_floats`."""
    given = {name: x for name, x in given.items() if x is not None}
    if "query_segments" in given:
        if "key_segments" not in given and q.shape[-3] != k.shape[-3]:
            raise ValueError(
                f"{NAME}: got query_segment_ids alone, which serves keys too only where there are as many as queries; "
                f"here there are {q.shape[-3]} queries and {k.shape[-3]} keys. Pass key_value_segment_ids too."
            )
        given = {"key_segments": given["query_segments"]} | given
    elif "key_segments" in given:
        raise ValueError(f"{NAME}: got key_value_segment_ids alone; pass query_segment_ids too.")
    checked: dict[str, jax.Array] = {}
    for name in filter(given.__contains__, dict.fromkeys((*CHECKS, *OPERANDS))):
        operand = OPERANDS[name]
        check = CHECKS.get(name) or functools.partial(_floats, operand.axes)
        checked[name] = check(operand.argument or name, given[name], q, k)
    if "query_segments" in checked:
        ids = checked["query_segments"], checked["key_segments"]
        checked["query_segments"], checked["key_segments"] = _narrow(*ids)
    return checked


def _logits_like(name: str, x: object, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns a bias or mask with the rank of the logits, each extent 1 or the logits'."""
    want = (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
    array = _array(name, x)
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


def _bias(name: str, x: object, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns a bias of a floating dtype; integers become the dtype of accumulation."""
    array = _logits_like(name, x, q, k)
    if jnp.issubdtype(array.dtype, jnp.complexfloating) or array.dtype == jnp.bool_:
        raise TypeError(
            f"{NAME}: {name} has dtype {array.dtype}, expected real numbers to add to the logits. Bools go in mask."
        )
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(accumulator_dtype(q.dtype))


def _mask(name: str, x: object, q: jax.Array, k: jax.Array) -> jax.Array:
    """Makes a mask of booleans. A 0 hides a key in a mask of Flax, and shows it in one to add to the logits."""
    array = _logits_like(name, x, q, k)
    if array.dtype != jnp.bool_:
        advice = "Pass mask != 0."
        if not jnp.issubdtype(array.dtype, jnp.integer):
            advice = "Pass numbers to add to the logits as bias=, and a mask of 0 and 1 as mask != 0."
        raise TypeError(f"{NAME}: {name} has dtype {array.dtype}, expected bool, True where a key is seen. {advice}")
    return array


def _lengths(name: str, x: object, q: jax.Array, k: jax.Array) -> jax.Array:
    return lengths(NAME, name, x, q.shape[:-3])


def lengths(function: str, name: str, x: object, batch: Shape) -> jax.Array:
    """Returns sequence lengths, one for each element of the batch, as int32."""
    array = integers(function, name, x)
    if not batch and array.shape == (1,):
        array = array.reshape(())
    if array.shape != batch:
        raise ValueError(f"{function}: {name} has shape {array.shape}, expected {batch}, a length for each sequence.")
    return clipped(array)


def _segments(name: str, x: object, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns segment ids, one for each position of a query or a key."""
    array, shape = integers(NAME, name, x), (q if name == "query_segment_ids" else k).shape[:-2]
    if array.shape != shape:
        raise ValueError(f"{NAME}: {name} has shape {array.shape}, expected {shape}, a number for each position.")
    return _with_all_bits(name, array)


def _positions(name: str, x: object, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns positions of queries or keys, clamped so that sums with a window do not overflow."""
    array, shape = integers(NAME, name, x), (q if name == "query_positions" else k).shape[:-2]
    own = array.shape[max(array.ndim - len(shape), 0) :]
    if (
        own != array.shape
        or own[-1:] != shape[-1:]
        or any(n not in (1, full) for n, full in zip(own[::-1], shape[::-1], strict=False))
    ):
        raise ValueError(
            f"{NAME}: {name} has shape {array.shape}, expected {shape}, or what broadcasts to it: a number for each "
            "position."
        )
    array = clipped(array, -(2**30), 2**30)
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)


def _floats(axes: str, name: str, x: object, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns a float for each element of the axes, which all of the batch share, in the dtype of accumulation."""
    array = _array(name, x)
    extents = dict(zip("tnhsk", (*q.shape[-3:], *k.shape[-3:-1]), strict=True))
    shape = tuple(extents[axis] for axis in axes)
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{NAME}: {name} is {array.dtype} of shape {array.shape}, expected a float for each "
            f"{' and '.join(_EACH[axis] for axis in axes)}, of shape {shape}."
        )
    return array.astype(accumulator_dtype(q.dtype)).reshape((1,) * (q.ndim - 3) + shape)


_EACH = {"t": "query", "s": "key", "n": "query head", "k": "key head", "h": "dimension of a head"}

# In the order in which they are checked, those of the operands that are not `_floats` by their axes.
CHECKS: dict[str, Callable[[str, object, jax.Array, jax.Array], jax.Array]] = {
    "query_lengths": _lengths,
    "key_lengths": _lengths,
    "query_segments": _segments,
    "key_segments": _segments,
    "query_positions": _positions,
    "key_positions": _positions,
    "bias": _bias,
    "mask": _mask,
}


def _with_all_bits(name: str, ids: jax.Array | np.ndarray) -> jax.Array:
    """Converts ids to an array of JAX; raises if that has too few bits for them."""
    array = jnp.asarray(ids)
    if isinstance(ids, np.ndarray) and not np.array_equal(ids.astype(array.dtype), ids):
        raise ValueError(
            f"{NAME}: {name} has ids that {array.dtype} cannot hold, and JAX has no wider integers now. Number the "
            "segments anew, as by np.unique(ids, return_inverse=True)[1], or enable jax_enable_x64."
        )
    return array


def _narrow(query_ids: jax.Array, key_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Converts ids to int32 with the same equalities; 64-bit ids, and signed beside unsigned ones, by their ranks."""
    dtypes = {query_ids.dtype, key_ids.dtype}
    if max(dtype.itemsize for dtype in dtypes) < 8 and (len(dtypes) == 1 or jnp.dtype("uint32") not in dtypes):
        return query_ids.astype(jnp.int32), key_ids.astype(jnp.int32)
    spec = P(*common_spec([spec_of(jax.typeof(x)) for x in (query_ids, key_ids)])[:-1], None)
    query_ids, key_ids = reshard(query_ids, spec), reshard(key_ids, spec)
    with settings_for(query_ids, key_ids):
        widest = jnp.uint64 if any(dtype.itemsize == 8 for dtype in dtypes) else jnp.uint32
        signs = jnp.concatenate([query_ids < 0, key_ids < 0], -1)
        both = signs, jnp.concatenate([query_ids.astype(widest), key_ids.astype(widest)], -1)
        places = jnp.cumsum(jnp.ones_like(signs), -1, dtype=jnp.int32)  # sharded as the ids are
        *ordered, at = jax.lax.sort((*both, places), num_keys=2)
        differs = [x[..., 1:] != x[..., :-1] for x in ordered]
        ranks = jnp.cumsum(differs[0] | differs[1], -1, dtype=jnp.int32)
        ranks = jnp.pad(ranks, [(0, 0)] * (ranks.ndim - 1) + [(1, 0)])
        ranks = jax.lax.sort((at, ranks), num_keys=1)[1]
    queries = query_ids.shape[-1]
    return ranks[..., :queries], ranks[..., queries:]


def scaled(q: jax.Array, x: ArrayLike | None) -> tuple[jax.Array, float]:
    """Returns the query and the logits' factor: a number as it is, anything else multiplied into the query, and 1."""
    if x is None:
        width = q.shape[-1]
        if isinstance(width, int):
            return q, float(width) ** -0.5 if width else 1.0
        x = jnp.asarray(width, accumulator_dtype(q.dtype)) ** -0.5  # a dimension that is symbolic is data
    number = _number("scale", x)
    if number is not None:
        if math.isnan(number):
            raise ValueError(f"{NAME}: scale is nan, expected a number.")
        if numbers.is_constant(NAME, "scale", number):
            return q, number
        x = numbers.as_data(number, accumulator_dtype(q.dtype))
    array = _array("scale", x)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{NAME}: scale has dtype {array.dtype}, expected real numbers.")
    if array.ndim > q.ndim or any(got not in (1, n) for got, n in zip(array.shape[::-1], q.shape[::-1], strict=False)):
        raise ValueError(
            f"{NAME}: scale has shape {array.shape}, expected a number, or a shape that broadcasts to "
            f"query's, {q.shape}."
        )
    wide = accumulator_dtype(q.dtype)
    factor = array.reshape((1,) * (q.ndim - array.ndim) + array.shape).astype(wide)
    factor = reshard(factor, broadcast_spec(spec_of(jax.typeof(q)), factor.shape))
    return numbers.times(q.astype(wide), factor).astype(q.dtype), 1.0


def soft_cap(x: object, q: jax.Array, function: str = NAME) -> tuple[float | None, dict[str, jax.Array]]:
    """Returns the soft cap as a constant, and as an operand if it is data."""
    if x is None:
        return None, {}
    wide = accumulator_dtype(q.dtype)
    if isinstance(x, jax.Array):
        if x.ndim or not is_real(x.dtype):
            raise ValueError(f"{function}: logits_soft_cap is {jax.typeof(x)}, expected one positive number.")
        return None, {"cap": _for_all(x.astype(wide), q)}
    cap = _number("logits_soft_cap", x)
    if cap is None or isinstance(x, bool) or not 0 < cap < math.inf:
        raise ValueError(f"{function}: logits_soft_cap={x!r}, expected a positive number, or None for no cap.")
    if numbers.is_constant(function, "logits_soft_cap", cap):
        return cap, {}
    return None, {"cap": _for_all(numbers.as_data(cap, wide), q)}


def _for_all(x: jax.Array, q: jax.Array) -> jax.Array:
    """Makes an operand that is the same for the whole batch."""
    return jnp.expand_dims(x, range(q.ndim - 3))


Side = int | jax.Array | None


class ByPlace(NamedTuple):
    """Says which keys a query sees by its place: up to its own if the call is causal, and those within a window."""

    is_causal: bool | jax.Array
    window: tuple[Side, Side]

    @property
    def is_data(self) -> bool:
        return any(isinstance(x, jax.Array) for x in (self.is_causal, *self.window))

    @property
    def constant_window(self) -> tuple[int | None, int | None]:
        """Returns the window of a call in which nothing is data."""
        left, right = (side if isinstance(side, int) and not self.is_data else None for side in self.window)
        return left, right

    @property
    def matters(self) -> bool:
        return self.is_data or self.is_causal is True or self.window != (None, None)

    def operands(self, q: jax.Array, query_positions: jax.Array) -> dict[str, jax.Array]:
        """Stands for both rules if any of them is data: a query that is at the last position sees every key."""
        if self.window == (None, None):
            return {"query_positions": jnp.where(self.is_causal, query_positions, 2**30)}
        before, after = (jnp.int32(UNBOUNDED) if side is None else jnp.int32(side) for side in self.window)
        after = jnp.where(self.is_causal, jnp.minimum(after, 0), after)
        return {"window_sizes": _for_all(jnp.stack([before, after]), q)}


def by_place(is_causal: object, window: object, function: str = NAME) -> ByPlace:
    """Returns the causal rule and the window, each a constant or data."""
    rule = ByPlace(_is_causal(function, is_causal), _window(function, window))
    if rule.is_data or rule.window == (None, None) or numbers.is_constant(function, "local_window_size", rule.window):
        return rule
    left, right = (None if side is None else jnp.int32(side) for side in rule.window)
    return rule._replace(window=(left, right))


def _window(function: str, x: object) -> tuple[Side, Side]:
    """Returns the window left and right of a query; drops a bound that overflows int32 when added to an index."""
    if x is None:
        return None, None
    x = x.tolist() if isinstance(x, np.ndarray) else x
    sides = tuple(x) if isinstance(x, Sequence) or (isinstance(x, jax.Array) and x.shape == (2,)) else (x, x)
    widths = [side for side in sides if is_side(side)]
    if not len(sides) == len(widths) == 2:
        shown = jax.typeof(x) if isinstance(x, jax.Array) else repr(x)
        raise ValueError(
            f"{function}: local_window_size={shown}, expected a number of positions (0 or more), or a pair (left, "
            "right) of them, in which None is unbounded."
        )
    left, right = map(_side, widths)
    return left, right


def is_side(x: object) -> TypeGuard[int | jax.Array | None]:
    """Whether it is a width of a window to one side, which may be data."""
    if isinstance(x, jax.Array):
        return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)
    return x is None or (isinstance(x, (int, np.integer)) and not isinstance(x, bool) and bool(x >= 0))


def _side(x: Side) -> Side:
    if isinstance(x, jax.Array):
        width = clipped(x, -1, UNBOUNDED)
        return jnp.where(width < 0, UNBOUNDED, width)
    return None if x is None or x >= UNBOUNDED else int(x)


def _is_causal(function: str, x: object) -> bool | jax.Array:
    """Returns a bool, or an array of one."""
    x = x[()] if isinstance(x, np.ndarray) and x.ndim == 0 else x
    if isinstance(x, (bool, int, np.bool_)):
        return bool(x)
    if isinstance(x, jax.Array) and x.ndim == 0 and x.dtype == jnp.bool_:
        return x
    shown = f" is {x.dtype}[{','.join(map(str, x.shape))}]" if isinstance(x, (jax.Array, np.ndarray)) else f"={x!r}"
    raise TypeError(
        f"{function}: is_causal{shown}, expected True or False, or an array of one bool, which may be traced."
    )


class Dropout(NamedTuple):
    """Says which weights to drop."""

    rng: jax.Array
    rate: ArrayLike
    broadcast: bool


def with_dropout(operands: Operands, dropout: Dropout | None) -> Operands:
    """Adds the weights that stay, drawn as Flax does: `[*batch, N, T, S]`, or 1 for those before T."""
    if dropout is None:
        return operands
    lead = jnp.broadcast_shapes(*(leading(getattr(operands, name), name) for name in operands.present))
    of_pair = operands.query.shape[-3], operands.key.shape[-3]
    each = (*lead, operands.query.shape[-2])
    shape = ((1,) * len(each) if dropout.broadcast else each) + of_pair
    return operands._replace(keep=jax.random.bernoulli(dropout.rng, 1.0 - dropout.rate, shape))


def dropout(rng: jax.Array | None, rate: ArrayLike, broadcast: bool) -> Dropout | None:
    """Says which weights to drop, or None for none."""
    number = _number("dropout_rate", rate)
    if number is None and not (isinstance(rate, jax.Array) and rate.shape == () and is_real(rate.dtype)):
        raise TypeError(f"{NAME}: dropout_rate={rate!r}, expected a number, 0 <= dropout_rate < 1.")
    if number is not None:
        if not 0 <= number < 1:
            raise ValueError(f"{NAME}: dropout_rate={rate}, expected 0 <= dropout_rate < 1.")
        if number == 0:
            return None
    if rng is None:
        raise ValueError(
            f"{NAME}: dropout_rate={rate} needs a dropout_rng. Pass one, or deterministic=True for no dropout."
        )
    try:
        jax.random.key_data(rng)
    except TypeError:
        raise TypeError(f"{NAME}: dropout_rng={rng!r}, expected a random key, as of jax.random.key(0).") from None
    return Dropout(rng, rate, broadcast)


def mask_of_flax(mask: ArrayLike | None) -> ArrayLike | None:
    """Makes a mask of booleans from one of Flax, which may be numbers: 1 where a key is seen, 0 elsewhere."""
    if mask is None or (array := _array("mask", mask)).dtype == jnp.bool_:
        return mask
    if not isinstance(array, Tracer) and array.is_fully_addressable:
        values = np.asarray(array)
        if (others := values[(values != 0) & (values != 1)]).size:
            raise ValueError(
                f"{NAME}: mask has the number {others[0]}, expected bools, or numbers that are 0 where a key is hidden "
                "and 1 elsewhere. Pass numbers to add to the logits as bias=."
            )
    return array != 0


def sown_in(module: FlaxModule | None, implementation: str | None) -> FlaxModule | None:
    """Returns a Flax module, or None; raises for one beside a named kernel, as none has the weights in memory."""
    if module is not None and not callable(getattr(module, "sow", None)):
        raise TypeError(f"{NAME}: module={module!r}, expected a Flax module in which to sow the weights, or None.")
    if module is not None and implementation == "mosaic_gpu":
        raise checks.no_kernel(
            NAME,
            "the weights are to be sown, and no kernel has the weights in memory. Pass implementation=None: XLA then "
            "computes them, in memory that grows with the product of the lengths.",
        )
    return module


def absent(
    input_positions: object,
    qk_attn_weights_einsum: object,
    attn_weights_value_einsum: object,
    einsum_dot_general: object,
) -> None:
    """Raises for arguments of Flax that attention in one kernel cannot honour."""
    if input_positions is not None:
        raise NotImplementedError(
            f"{NAME}: input_positions were given, but positions have no meaning here. Rotate query and key before the "
            "call: attention_fn=lambda q, k, v, *, input_positions, **rest: "
            "flash_attention(rotate(q, input_positions), rotate(k, input_positions), v, **rest)."
        )
    products = {
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
        "einsum_dot_general": None if einsum_dot_general is jax.lax.dot_general else einsum_dot_general,
    }
    for name, product in products.items():
        if product is not None:
            raise NotImplementedError(
                f"{NAME}: {name} was given, but the products are inside the kernel, where no other can take their "
                "place. Leave it out, or use flax.linen.dot_product_attention."
            )


def promoted(
    promote_dtype: Callable[..., Sequence[ArrayLike]] | None, inputs: Sequence[ArrayLike], dtype: DTypeLike | None
) -> Sequence[ArrayLike]:
    """Returns query, key and value as Flax's own function promotes them; raises if it is another."""
    if promote_dtype is None:
        return inputs
    if getattr(promote_dtype, "__module__", None) != "flax.nnx.nn.dtypes":
        raise NotImplementedError(
            f"{NAME}: promote_dtype was given, but no dtypes other than one for query, key and value go into a kernel. "
            "Convert them before the call, pass dtype=, or use flax.nnx.dot_product_attention."
        )
    return promote_dtype(inputs, dtype=dtype)


def _number(name: str, x: object) -> float | None:
    """Converts a Python or NumPy number to a float; None for anything else."""
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if not isinstance(x, (int, float, np.integer, np.floating)):
        return None
    return checks.as_float(NAME, name, x, "that no float holds, expected a smaller number.")


_WORDS = {"no_array": ", expected an array of numbers.", "wanted": "an array of numbers", "on_key": ""}
_array = functools.partial(checks.as_array, NAME, **_WORDS)


def integers(function: str, name: str, x: object) -> jax.Array | np.ndarray:
    """Returns integers with all their bits."""
    array = checks.on_host(function, name, x, **_WORDS)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, expected integers.")
    return array


def clipped(x: jax.Array | np.ndarray, low: int = -(2**31), high: int = 2**31 - 1) -> jax.Array:
    """Returns integers of any width as int32, those beyond a bound as the bound."""
    own = jnp.iinfo(x.dtype)
    with settings_for(x):
        if own.min < low or own.max > high:
            x = x.clip(max(own.min, low), min(own.max, high))
        return jnp.asarray(x.astype(jnp.int32))


def _shape(name: str, x: jax.Array, want: tuple[int | str, ...], why: str) -> None:
    """Raises unless the shape is `want`, in which a name stands for any extent."""
    if x.ndim != len(want) or any(not isinstance(n, str) and n != got for n, got in zip(want, x.shape, strict=True)):
        shown = f"({', '.join(map(str, want))})"
        raise ValueError(f"{NAME}: {name} has shape {x.shape}, expected {shown}: {why}.")


_LOGITS_MEMORY = jax.make_user_context(None)


@public
def logits_memory(most: int | None) -> contextlib.AbstractContextManager[None]:
    """Within this context attention by XLA on a GPU holds at most so many bytes of logits at a time.

    Where neither a kernel nor cuDNN takes a call, XLA computes attention with all logits in memory, which is fastest,
    while two arrays of them in float32, or three for derivatives, take at most a sixth of the memory that JAX may use.
    Beyond that XLA computes tile by tile. This context sets another bound. A tile has at least 512 queries and 512
    keys, or all there are, of every head. On platforms other than GPUs tiles are small in any case.

    The context is part of the key of `jax.jit`'s caches. A call reads it when it is traced; what is derived from the
    call later, such as its gradient, keeps it.

    Args:
        most: Bytes, or None for the default.

    Returns:
        A context manager.

    Raises:
        TypeError: `most` is neither an integer nor None.
        ValueError: `most` is negative.

    >>> import jax
    >>> from jaxsoftmax import explain_attention, logits_memory
    >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), "float32")
    >>> with logits_memory(2**28):
    ...     print(explain_attention(x, x, x))  # doctest: +ELLIPSIS
    flash_attention of float32: query [1,4096,8,64], key [1,4096,8,64], value [1,4096,8,64]
    ...
        besides: XLA holds the logits of 1024 queries and 4096 keys at a time
    ...
    """
    if most is not None and (isinstance(most, bool) or not isinstance(most, (int, np.integer))):
        raise TypeError(f"logits_memory: most is {most!r}, expected a number of bytes, an integer, or None.")
    if most is not None and most < 0:
        raise ValueError(f"logits_memory: most is {most}, expected a number of bytes that is not negative, or None.")
    return _within(None if most is None else int(most))


@contextlib.contextmanager
def _within(most: int | None) -> Iterator[None]:
    with _LOGITS_MEMORY(most):
        yield


def logits_memory_now() -> int | None:
    """Returns the bound for calls that are traced now."""
    return _LOGITS_MEMORY.value
