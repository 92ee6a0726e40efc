"""Runs a kernel in Mosaic's interpreter with race detection, and fails where a GPU would go wrong silently."""

import threading
from collections.abc import Callable
from typing import Any

import interpreter_shim
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import progress

interpreter_shim.install()

_WARN_ON_RACE = {"on_race": "warn"} if "on_race" in plgpu.InterpretGPUParams.__dataclass_fields__ else {}


class RaceDetected(AssertionError):
    """The vector clocks of the interpreter saw two unordered accesses to one place."""


class Deadlock(AssertionError):
    """The kernel's threads waited for each other for too long."""


def interpret(f: Callable[..., Any], *operands: jax.Array, limit_s: float = 20.0) -> Any:
    """`f(*operands)` with every Mosaic kernel in it interpreted; raises `RaceDetected` or `Deadlock`.

    Threads are taken to be in a deadlock that are where they were at each of ten looks, which take `limit_s`: the clock
    alone also goes on while the machine stands still.
    """
    expired, ended = threading.Event(), threading.Event()

    def watch() -> None:
        seen, looks = progress.steps(), 0
        while not ended.wait(limit_s / 10):
            before, seen = seen, progress.steps()
            looks = looks + 1 if seen == before and progress.busy() else 0
            if looks == 10:
                expired.set()
                interpreter_shim.abort(TimeoutError(f"no progress in {limit_s} s"))
                return

    watchdog = threading.Thread(target=watch)
    watchdog.start()
    try:
        parameters = plgpu.InterpretGPUParams(detect_races=True, **_WARN_ON_RACE)
        with plgpu.force_gpu_interpret_mode(parameters):
            result = jax.block_until_ready(jax.jit(lambda *args: f(*args))(*operands))
        if interpreter_shim.races_found():
            raise RaceDetected(f"races in {f}")
        return result
    except Exception as error:
        if expired.is_set():
            raise Deadlock(str(error)) from error
        if "under way" in str(error):
            raise RaceDetected(str(error)) from error  # with a product, see `in_flight`
        if interpreter_shim.races_found():
            raise RaceDetected(str(error)) from error  # a thread goes wrong by what it read too early
        raise
    finally:
        ended.set()
        watchdog.join()
        interpreter_shim.reset()
