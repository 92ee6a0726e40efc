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
from jax._src import callback
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from simulated_gpu import Machine, Ref, async_clock

_MARK, _NUMBERS = 0x7FE00000, 0xFFFFF  # a NaN that no operation makes, and the product's number in it


@dataclasses.dataclass(frozen=True)
class _Product:
    """One that has begun: its accumulator, if it has one, and what it reads of shared memory."""

    accumulator: Any
    operands: tuple[tuple[Any, Any, bytes], ...]  # the buffer, which part of it, and what that held
    source_info: Any


def begin(machine: Machine, operands: list[Ref], accumulator: Ref | None = None) -> None:
    """A product of `operands` in shared memory has begun, and adds to `accumulator`."""
    key = None if accumulator is None else accumulator.key
    _call(machine, _begin, accumulator=key, operands=[(x.key, x.transforms) for x in operands])


def begin_in_registers(machine: Machine, operands: list[Ref], result: jax.Array) -> jax.Array:
    """The same for a product that overwrites registers: what they hold meanwhile, of which `settled` makes `result`."""
    places = [(x.key, x.transforms) for x in operands]
    return _call(machine, _begin_in_registers, result, operands=places, result=result)


def wait(machine: Machine, most: int | None, accumulator: Ref | None = None) -> None:
    """Waits until `most` products are under way; then `accumulator` is touched, to which none of them may add."""
    _call(machine, functools.partial(_wait, most=most), accumulator=None if accumulator is None else accumulator.key)


def settled(machine: Machine, value: jax.Array) -> jax.Array:
    """`value`, or the product that has begun in its registers."""
    return _call(machine, _settle, value, value=value)


def _call(machine: Machine, step: Any, like: jax.Array | None = None, **operands: Any) -> Any:
    step = functools.partial(gpu_callbacks.fail_on_exception(step), source_info=machine.source_info)
    result = gpu_callbacks.TOKEN_SHAPE_DTYPE
    if like is None:
        machine.token = callback.io_callback(step, result, token=machine.token, **machine.where, **operands)
        return None
    results = result, jax.ShapeDtypeStruct(like.shape, like.dtype)
    machine.token, value = callback.io_callback(step, results, token=machine.token, **machine.where, **operands)
    return value


def _queue(thread: Any) -> Any:
    return (
        gpu_callbacks._get_shared_memory().__dict__.setdefault("products", {}).setdefault(thread, collections.deque())
    )


def _read(thread: Any, key: Any, access: Any, source_info: Any) -> bytes:
    """What a part of a buffer holds, read by the tensor cores: in order with copies, without a fence."""
    shared = gpu_callbacks._get_shared_memory()
    if shared.detect_races:
        clock = async_clock(shared, thread)
        gpu_callbacks.get_races().check_read(thread, clock, key, access, source_info=source_info)
    with shared.lock:
        return shared.mem[key].content[access.range].tobytes()


def _begin(
    *, token: Any, mesh_location: Any, thread: Any, operands: Any, source_info: Any, accumulator: Any = None
) -> Any:
    del mesh_location
    shared, found = gpu_callbacks._get_shared_memory(), []
    for key, transforms in operands:
        key = memory.HostAllocationKey.from_array(key)
        part = shared.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))
        part = interpret_utils.Access(part.range)
        found.append((key, part, _read(thread, key, part, source_info)))
    key = None if accumulator is None else memory.HostAllocationKey.from_array(accumulator)
    _queue(thread).append(_Product(key, tuple(found), source_info))
    return token


def _begin_in_registers(*, token: Any, thread: Any, result: Any, **where: Any) -> Any:
    _begin(token=token, thread=thread, **where)
    results = gpu_callbacks._get_shared_memory().__dict__.setdefault("results", {}).setdefault(thread, [])
    results.append((_queue(thread)[-1], np.array(result)))
    return token, np.full(result.shape, _MARK | (len(results) - 1), np.int32).view(np.float32)


def _wait(*, token: Any, mesh_location: Any, thread: Any, most: int | None, accumulator: Any, source_info: Any) -> Any:
    del mesh_location
    queue = _queue(thread)
    while most is not None and len(queue) > most:
        product = queue.popleft()
        for key, part, held in product.operands:
            if _read(thread, key, part, product.source_info) != held:
                raise ValueError(f"{thread}: {key} {part} is overwritten while a product that reads it is under way")
    if accumulator is not None:
        key = memory.HostAllocationKey.from_array(accumulator)
        if any(product.accumulator == key for product in queue):
            raise ValueError(f"{thread} touches accumulator {key}, to which a product under way may add")
    return token


def _settle(*, token: Any, mesh_location: Any, thread: Any, value: Any, source_info: Any) -> Any:
    del mesh_location, source_info
    mark = int(np.asarray(value).view(np.int32).flat[0])
    if mark & ~_NUMBERS != _MARK:
        return token, np.asarray(value)
    product, result = gpu_callbacks._get_shared_memory().__dict__["results"][thread][mark & _NUMBERS]
    if any(product is other for other in _queue(thread)):
        raise ValueError(f"{thread} reads the registers of a product that may be under way")
    return token, result
