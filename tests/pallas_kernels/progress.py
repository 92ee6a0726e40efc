"""Whether the threads of a simulated kernel go on: waits in a deadlock do not end."""

import contextlib
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_busy, _steps = 0, 0


@contextlib.contextmanager
def operation() -> Iterator[None]:
    """A thread is at one that may wait for others."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def busy() -> bool:
    """Whether threads are at operations."""
    return _busy > 0


def steps() -> int:
    """How many operations have begun or ended."""
    return _steps


def _count(threads: int) -> None:
    global _busy, _steps
    with _lock:
        _busy, _steps = _busy + threads, _steps + 1
