"""Each substitute of `patch` beside its original: what one refuses the other refuses, for every argument."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxsoftmax

RNG = np.random.default_rng(0)
FLOAT8 = jnp.float8_e4m3fn

DTYPES = ("bool", "int8", "uint8", "int64", "float16", jnp.bfloat16, "float32", "float64", FLOAT8, "complex64")
NO_ARRAYS = [None, "a", 2, 1.5, True, 1j, np.float64(1.5), np.bool_(True), object(), {"a": 1}, slice(None)]
AXES = [-1, 0, (0, 1), [0, 1], (1, 0), None, 5, 1.0, True, np.int64(1), jnp.int32(1), "0", (0, 0), (), (0.0,), (5,)]
FLAGS = [None, 0, 1, True, np.bool_(False), jnp.bool_(True), 1.5, "a", "", []]
PROMOTE = inspect.signature(nnx.dot_product_attention).parameters["promote_dtype"].default
ROWS = (4, 6)
SCORES = (2, 4, 5, 5)
X = RNG.normal(size=ROWS).astype("float32")
Q = RNG.normal(size=(2, 5, 4, 8)).astype("float32")


def arrays(shape: tuple[int, ...]) -> list[Any]:
    """Numbers of every dtype and rank, in NumPy and JAX, of strong and weak types, and what is no array."""
    x = 2 * RNG.normal(size=shape).astype("float32")
    shapes = [x.reshape(-1), x[None], x[..., :1], x[:1], x[..., 0], x[0], x[:0], x[..., :0], x.ravel()[0]]
    others = [x.tolist(), jnp.full(shape, 1.5), jnp.arange(x.size).reshape(shape), jax.random.key(0), *NO_ARRAYS]
    return [*(abs(x).astype(dtype) for dtype in DTYPES), *map(jnp.asarray, shapes), *others]


def masks(shape: tuple[int, ...]) -> list[Any]:
    x = RNG.random(shape) > 0.4
    shapes = [x, x[:1], x[..., :1], x[0], x[..., 0], x[None], x[..., :0], x.any()]
    return [*shapes, *map(jnp.asarray, shapes), x.tolist(), x.astype(int), x.astype("float32"), 1, 0.5, True, "a"]


LENGTHS = [3, [3, 5], np.array([3, 5]), np.array([3, 5], "uint32"), jnp.array([3, 5]), jnp.array([3.0, 5.0])]
LENGTHS += [jnp.array([[3, 5]]), jnp.array([3, 5, 1]), True, "a"]
LABELS = [np.array([1, 5, 0, 3]).astype(dtype) for dtype in DTYPES] + [[1, 5, 0, 3], jnp.array([1, 5, 0, 3])]
LABELS += [jnp.array([[1, 5, 0, 3]]), jnp.array([[1], [5]]), jnp.array([1]), jnp.array([-1, 6, -7, 100]), *NO_ARRAYS]
WINDOWS = [0, (1, 2), [1, 2], (None, 1), (1,), (1, 2, 3), -1, (-1, 3), True, 1.5, "a", np.int64(2), jnp.int32(1)]
SCALES = [1, True, np.float32(0.3), jnp.float32(0.3), jnp.ones(1), jnp.ones((1,) * 5), jnp.ones(5), jnp.ones(8), -1.0]
SCALES += [0, float("nan"), "a", jnp.ones((), int), 1j, jnp.ones((4, 1))]
ATTENTION = dict.fromkeys(("query", "key", "value"), arrays(Q.shape)) | {"bias": arrays(SCORES), "mask": masks(SCORES)}
FLAX = ATTENTION | {
    "broadcast_dropout": FLAGS,
    "deterministic": FLAGS,
    "dropout_rate": [0.0, 0.5, 0, 1.0, -1.0, None, "a", True, jnp.float32(0.5), jnp.float32(0)],
    "dropout_rng": [None, jax.random.key(1), jax.random.PRNGKey(1), 0, "a", jnp.ones(3)],
    "dtype": [None, jnp.float32, "bfloat16", jnp.int32, int, float, "a", jnp.complex64, FLOAT8],
    "precision": [None, "highest", "a", jax.lax.Precision.HIGH, 1, ("high", "high")],
    "module": [None, 0, 1, "a"],
    "scale": [2.0],
}
# By function: arguments that it takes, and what else each argument may be. The last are no arguments of the original's.
TABLE: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "jax.nn.softmax": (
        {"x": X},
        {"x": arrays(ROWS), "axis": AXES, "where": masks(ROWS), "scale": [2.0], "implementation": ["xla"]},
    ),
    "jax.nn.log_softmax": ({"x": X}, {"x": arrays(ROWS), "axis": AXES, "where": masks(ROWS), "scale": [2.0]}),
    "jax.nn.logsumexp": (
        {"a": X},
        {"a": arrays(ROWS), "axis": AXES, "b": arrays(ROWS), "keepdims": FLAGS, "return_sign": FLAGS}
        | {"where": masks(ROWS), "implementation": ["xla"]},
    ),
    "jax.nn.dot_product_attention": (
        {"query": Q, "key": Q, "value": Q},
        ATTENTION
        | {"scale": SCALES, "is_causal": FLAGS, "query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}
        | {"local_window_size": WINDOWS, "implementation": [None, "xla", "triton", "mosaic_gpu", 1]}
        | {"return_residual": FLAGS, "logits_soft_cap": [1.0], "dropout_rate": [0.5]},
    ),
    "optax.softmax_cross_entropy": (
        {"logits": X, "labels": jnp.asarray(X)},
        {"logits": arrays(ROWS), "labels": arrays(ROWS), "axis": AXES, "where": masks(ROWS), "implementation": ["xla"]},
    ),
    "optax.softmax_cross_entropy_with_integer_labels": (
        {"logits": X, "labels": LABELS[3]},
        {"logits": arrays(ROWS), "labels": LABELS, "axis": AXES, "where": masks(ROWS), "ignore_index": [-1]},
    ),
    "flax.linen.dot_product_attention": (
        {"query": Q, "key": Q, "value": Q},
        FLAX
        | {"force_fp32_for_softmax": FLAGS, "einsum_dot_general": [None, jax.lax.dot_general, 1], "is_causal": [True]}
        | {"qk_attn_weights_einsum": [jnp.einsum], "attn_weights_value_einsum": [jnp.einsum]},
    ),
}
TABLE |= {
    "flax.nnx.dot_product_attention": (
        TABLE["flax.linen.dot_product_attention"][0],
        FLAX | {"is_causal": FLAGS, "promote_dtype": [None, 1, PROMOTE], "force_fp32_for_softmax": [True]},
    ),
    "jax.nn.logmeanexp": ({"x": X}, {"x": arrays(ROWS), "axis": AXES, "keepdims": FLAGS, "where": masks(ROWS)}),
    "jax.scipy.special.softmax": ({"x": X}, {"x": arrays(ROWS), "axis": AXES, "where": [None]}),
    "jax.scipy.special.log_softmax": ({"x": X}, {"x": arrays(ROWS), "axis": AXES, "scale": [2.0]}),
    "jax.scipy.special.logsumexp": TABLE["jax.nn.logsumexp"],
}


def outcome(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The type of the error, or shapes and types of the results."""
    named = dict(given)
    first = [named.pop("x")] if "x" in named else []
    try:
        shapes = jax.eval_shape(lambda: function(*first, **named))
    except Exception as error:
        return type(error)
    return jax.tree.map(lambda like: (like.shape, like.dtype, like.weak_type), shapes)


@pytest.fixture(scope="module", autouse=True)
def errors_keep_their_tracebacks() -> Iterator[None]:
    """It takes JAX longer to shorten an error's traceback than to trace the call."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("name, argument", [(name, argument) for name in TABLE for argument in TABLE[name][1]])
def test_a_substitute_takes_what_its_original_takes(name: str, argument: str) -> None:
    base, values = TABLE[name][0], TABLE[name][1][argument]
    if argument in ("broadcast_dropout", "deterministic", "dropout_rng", "dropout_rate"):
        base = base | {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    taken = 0
    for value in values:
        given = base | {argument: value}
        theirs = outcome(pkgutil.resolve_name(name), given)
        with jaxsoftmax.patch() as calls:
            ours = outcome(pkgutil.resolve_name(name), given)
        assert ours == theirs, value
        # A call that works nowhere counts nowhere.
        assert calls[name] + calls.fallbacks[name] == (not isinstance(theirs, type))
        taken += calls[name]
    known = argument in inspect.signature(pkgutil.resolve_name(name)).parameters
    assert known or not taken
    # Products that someone else computes are the original's.
    assert taken or not known or argument.endswith("_einsum")


def test_the_table_has_every_substitute_and_argument() -> None:
    assert {*TABLE} == {*jaxsoftmax.Calls()}
    for name, (_, arguments) in TABLE.items():
        assert {*inspect.signature(pkgutil.resolve_name(name)).parameters} <= {*arguments}, name
