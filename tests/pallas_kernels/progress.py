"""How long the threads of a simulated kernel have been where they are: waits in a deadlock do not end."""

import contextlib
import threading
import time
from collections.abc import Iterator

_lock = threading.Lock()
_busy, _last = 0, 0.0


@contextlib.contextmanager
def operation() -> Iterator[None]:
    """A thread is at one that may wait for others."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def stalled_s() -> float:
    """Since when none began or ended, if threads are at some."""
    with _lock:
        return time.monotonic() - _last if _busy else 0.0


def _count(threads: int) -> None:
    global _busy, _last
    with _lock:
        _busy, _last = _busy + threads, time.monotonic()
