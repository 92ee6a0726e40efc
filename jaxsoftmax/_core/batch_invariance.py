"""`batch_invariant`: a context, part of `jax.jit`'s cache key, in which a row's result does not depend on its batch."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

VARIABLE = "JAXSOFTMAX_BATCH_INVARIANT"
_VALUES = {"": False, "0": False, "false": False, "1": True, "true": True}


def _by_default() -> bool:
    """The default, from the environment."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() not in _VALUES:
        raise ValueError(f"jaxsoftmax: the environment variable {VARIABLE} is {given!r}, expected 0 or 1.")
    return _VALUES[given.lower()]


class _Context(contextlib.AbstractContextManager[None, bool | None], Protocol):
    """A context manager that is a decorator too."""

    def __call__[F: Callable[..., Any]](self, func: F, /) -> F:
        """`func`, within the context."""
        ...


_CONTEXT = jax.make_user_context(_by_default())


def batch_invariant(enabled: bool = True) -> _Context:
    """Within this context a row's result on a Hopper GPU is the same, bit for bit, whatever else is in the batch.

    It depends on the row alone: not on how many rows there are, on where the row is among them, on the other axes, nor,
    in attention, on how many queries there are beside it or keys beyond those that it sees. Kernels and their configs
    are then chosen by the length and dtype of a row, the operation and the kind of mask, not by what is fastest for so
    many rows. Two calls agree if they run on the same model of GPU, by the same version of this library and of JAX.

    Covered, where a kernel runs (`explain` and `explain_attention` say whether one does): `softmax`, `log_softmax`,
    `logsumexp` without `b`, their gradients, `softmax_cross_entropy_with_integer_labels` with its gradient,
    `top_k_softmax`, and the output and logsumexp of `flash_attention`. Not covered: what XLA computes (as float64,
    attention of float32, or `implementation="xla"`), `softmax_cross_entropy`, forward mode and higher orders, rows that
    are themselves sharded, and gradients of attention, which `deterministic_gradients=True` makes repeat.

    The context is part of the key of `jax.jit`'s caches, and may be entered outside or inside of jitted functions. A
    call reads it when it is traced; what is derived from the call later, such as its gradient, keeps it. It belongs to
    the thread that entered it. As a decorator, `@batch_invariant()` covers all calls of a function. For programs that
    one cannot edit, the environment variable `JAXSOFTMAX_BATCH_INVARIANT=1`, read when jaxsoftmax is imported, makes it
    the default of all threads; `batch_invariant(False)` then takes it back for a while.

    Args:
        enabled: Whether calls are to be batch invariant.

    Returns:
        A context manager, which is a decorator too.

    Raises:
        TypeError: `enabled` is not a bool.

    >>> import jax
    >>> from jaxsoftmax import batch_invariant, explain
    >>> with batch_invariant():
    ...     one, many = (explain(jax.ShapeDtypeStruct((rows, 128256), "bfloat16")) for rows in (1, 4096))
    >>> (one.kernel, one.config) == (many.kernel, many.config)
    True
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"batch_invariant: enabled is {enabled!r}, expected a bool.")
    return _within(enabled)


@contextlib.contextmanager
def _within(enabled: bool) -> Iterator[None]:
    with _CONTEXT(enabled):
        yield


def enabled() -> bool:
    """Whether calls that are traced now are to be batch invariant."""
    return _CONTEXT.value


def parameter() -> dict[str, bool]:
    """The primitive's parameter, which exists only under the context."""
    return {"batch_invariant": True} if enabled() else {}
