"""The strictest settings of JAX that a user may have, in which every kernel is lowered."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Ranks are broadcast only where the program says so, and JAX checks what it traces."""
    with jax.numpy_rank_promotion("raise"), jax.enable_checks(True):
        yield
