"""WGMMA's products under way: what may not be touched before a wait says that they are done.

JAX's interpreter multiplies at once. Here each warpgroup's products stand in a queue until it waits for them, as on the
hardware, which says of the oldest only. It is refused to read or write the accumulator of one that may be under way.
Its operands in shared memory are read when it begins and again when it is waited for, to the race detector and by their
bytes: whoever releases or overwrites them in between is seen. A result in registers is NaN until then.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from simulated_gpu import Machine, Now, Part, Ref

_MARK, _NUMBERS = 0x7FE00000, 0xFFFFF  # a NaN that no operation makes, and the product's number in it


@dataclasses.dataclass(frozen=True)
class _Product:
    """One that has begun: its accumulator, if it has one, and what it reads of shared memory."""

    accumulator: Any
    operands: tuple[tuple[Part, bytes], ...]  # parts of buffers, and what they held
    source_info: Any


def begin(machine: Machine, operands: list[Ref], accumulator: Ref | None = None) -> None:
    """A product of `operands` in shared memory has begun, and adds to `accumulator`."""
    machine.step(functools.partial(_begin, has_accumulator=accumulator is not None), *_whole(accumulator), *operands)


def begin_in_registers(machine: Machine, operands: list[Ref], result: jax.Array) -> jax.Array:
    """The same for a product that overwrites registers: what they hold meanwhile, of which `settled` makes `result`."""
    return machine.step(_begin_in_registers, *operands, result=result, value=result)


def wait(machine: Machine, most: int | None, accumulator: Ref | None = None) -> None:
    """Waits until `most` products are under way; then `accumulator` is touched, to which none of them may add."""
    machine.step(functools.partial(_wait, most=most), *_whole(accumulator))


def settled(machine: Machine, value: jax.Array) -> jax.Array:
    """`value`, or the product that has begun in its registers."""
    return machine.step(_settle, result=value, value=value)


def _whole(accumulator: Ref | None) -> list[Ref]:
    return [] if accumulator is None else [dataclasses.replace(accumulator, transforms=())]


def _queue(now: Now) -> Any:
    return now.shared.__dict__.setdefault("products", {}).setdefault(now.thread, collections.deque())


def _read(now: Now, part: Part) -> bytes:
    """What a part of a buffer holds, read by the tensor cores: in order with copies, without a fence."""
    now.check_copied(part, is_write=False)
    with now.shared.lock:
        return part.content.tobytes()


def _begin(now: Now, *parts: Part, has_accumulator: bool) -> None:
    accumulator, operands = (parts[0].key, parts[1:]) if has_accumulator else (None, parts)
    held = tuple((part, _read(now, part)) for part in operands)
    _queue(now).append(_Product(accumulator, held, now.source_info))


def _begin_in_registers(now: Now, *operands: Part, value: Any) -> np.ndarray:
    _begin(now, *operands, has_accumulator=False)
    results = now.shared.__dict__.setdefault("results", {}).setdefault(now.thread, [])
    results.append((_queue(now)[-1], np.array(value)))
    return np.full(value.shape, _MARK | (len(results) - 1), np.int32).view(np.float32)


def _wait(now: Now, *accumulator: Part, most: int | None) -> None:
    queue = _queue(now)
    while most is not None and len(queue) > most:
        product = queue.popleft()
        for part, held in product.operands:
            if _read(dataclasses.replace(now, source_info=product.source_info), part) != held:
                where = f"{now.thread}: {part.key} {part.access}"
                raise ValueError(f"{where} is overwritten while a product that reads it is under way")
    for part in accumulator:
        if any(product.accumulator == part.key for product in queue):
            raise ValueError(f"{now.thread} touches accumulator {part.key}, to which a product under way may add")


def _settle(now: Now, value: Any) -> np.ndarray:
    mark = int(np.asarray(value).view(np.int32).flat[0])
    if mark & ~_NUMBERS != _MARK:
        return value
    product, result = now.shared.__dict__["results"][now.thread][mark & _NUMBERS]
    if any(product is other for other in _queue(now)):
        raise ValueError(f"{now.thread} reads the registers of a product that may be under way")
    return result
