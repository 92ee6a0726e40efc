"""The simulated GPU as the models of inline-assembly operations see it: see `interpreter_shim`, which uses it."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

_BLOCK_FIELD = [f.name for f in dataclasses.fields(memory.HostAllocationKey)].index("block_id")
_PEER_TIMEOUT_S, _POLL_S = 30.0, 0.005

Token = jax.Array


@dataclasses.dataclass(frozen=True)
class Ref:
    """A reference given to an inline operation: `aval` is its type after the slices that the kernel took of it."""

    key: jax.Array
    transforms: tuple[Any, ...]
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a buffer that a reference means."""

    shared: Any
    key: Any
    range: tuple[Any, ...]

    @property
    def buffer(self) -> np.ndarray:
        return self.shared.mem[self.key].content

    @property
    def content(self) -> Any:
        return self.buffer[self.range]

    @property
    def access(self) -> Any:
        return interpret_utils.Access(self.range)

    @property
    def barrier(self) -> tuple[Any, int]:
        """Which of the barriers of `mbarrier.init` it is."""
        first = self.range[0]
        return self.key, first if isinstance(first, int) else first.start


@dataclasses.dataclass(frozen=True)
class Now:
    """A step while it runs: the memory that all threads share, and the thread whose step it is."""

    shared: Any
    thread: Any
    mesh_location: Any
    source_info: Any

    def part(self, key: Any, transforms: Any) -> Part:
        """What a reference means."""
        key = memory.HostAllocationKey.from_array(key)
        access = self.shared.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))
        assert access.permutation is None
        return Part(self.shared, key, access.range)

    def check(self, key: Any, access: Any, clock: Any, *, is_write: bool) -> None:
        """Tells the race detector of an access."""
        if self.shared.detect_races:
            races = gpu_callbacks.get_races()
            check = races.check_write if is_write else races.check_read
            check(self.thread, clock, key, access, source_info=self.source_info)

    def check_copied(self, part: Part, *, is_write: bool) -> None:
        """Tells it of an access by the tensor cores or TMA, later than what the thread waited for."""
        with self.shared.lock:
            clock = self.shared.clocks[self.thread]
            clock.inc(self.shared.thread_to_vc_position(self.thread))
            clock = clock.async_smem_clock.copy()
        self.check(part.key, part.access, clock, is_write=is_write)

    def store_by_tma(self, task: Any, source: Part, target: Part) -> None:
        """Begins a copy from shared memory to global memory."""
        copy = task(
            mesh_location=self.mesh_location,
            thread=self.thread,
            src_allocation_key=source.key,
            src_access=source.access,
            dst_allocation_key=target.key,
            dst_access=target.access,
            source_info=self.source_info,
            clock=self.shared.incr_clock(self.thread) if self.shared.detect_races else None,
        )
        self.shared.execute_async_task(copy)


@gpu_callbacks.fail_on_exception
def _run(
    *, token: Any, mesh_location: Any, thread: Any, places: Any, operands: Any, step: Any, source_info: Any
) -> Any:
    now = Now(gpu_callbacks._get_shared_memory(), thread, mesh_location, source_info)
    result = step(now, *(now.part(*place) for place in places), **operands)
    return token if result is None else (token, result)


class Machine:
    """What a model may do to the simulated GPU; each call is one step of the current thread (one warpgroup)."""

    def __init__(self, interpreter: jaxpr_interpret.JaxprInterpreter, token: Token, source_info: Any):
        self.token = token
        self._interpreter = interpreter
        self.where = dict(mesh_location=interpreter.mesh_location, thread=interpreter.thread)
        self.source_info = source_info
        self.warpgroup = interpreter.mesh_location.thread_id

    def step(self, step: Callable[..., Any], *refs: Ref, result: Any = None, **operands: Any) -> Any:
        """Runs `step(now, *parts, **operands)`, and returns what it does, if `result` says of which type that is."""
        run = functools.partial(_run, step=step, source_info=self.source_info)
        places = [(ref.key, ref.transforms) for ref in refs]
        given = dict(token=self.token, places=places, operands=operands, **self.where)
        if result is None:
            self.token = callback.io_callback(run, gpu_callbacks.TOKEN_SHAPE_DTYPE, **given)
            return None
        types = gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct(result.shape, result.dtype)
        self.token, value = callback.io_callback(run, types, **given)
        return value

    def load(self, ref: Ref) -> jax.Array:
        """Reads all of `ref`."""
        self.token, value = gpu_callbacks.call_get(
            token=self.token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(ref.shape, ref.dtype),
            allocation_key_as_array=ref.key,
            transforms=ref.transforms,
            source_info=self.source_info,
            **self.where,
        )
        return value

    def load_as_product(self, ref: Ref) -> jax.Array:
        """Reads all of `ref` as WGMMA does: in order with copies, without a fence."""
        return self.step(_load_as_product, ref, result=ref)

    def store(self, ref: Ref, value: jax.Array) -> None:
        """Overwrites all of `ref`."""
        self.token, _ = gpu_callbacks.call_swap(
            token=self.token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(value.shape, value.dtype),
            allocation_key_as_array=ref.key,
            transforms=ref.transforms,
            val=value,
            mask=None,
            source_info=self.source_info,
            **self.where,
        )

    def store_copied(self, ref: Ref, value: jax.Array) -> None:
        """Overwrites all of `ref` as an asynchronous copy does: in order with generic accesses only behind a fence."""
        self.step(_store_copied, ref, value=value)

    def gather(self, ref: Ref, index: tuple[jax.Array, ...], inside: jax.Array, fill: Any) -> jax.Array:
        """`ref[index]` where `inside`, and `fill` elsewhere: nothing outside is touched."""
        *index, inside = jnp.broadcast_arrays(*index, jnp.asarray(inside))
        result = jax.ShapeDtypeStruct(inside.shape, ref.dtype)
        return self.step(
            functools.partial(_gather, fill=fill), ref, result=result, index=jnp.stack(index), inside=inside
        )

    def scatter(self, ref: Ref, index: tuple[jax.Array, ...], inside: jax.Array, value: jax.Array) -> None:
        """Writes `value` to `ref[index]` where `inside`."""
        *index, inside = jnp.broadcast_arrays(*index, jnp.asarray(inside))
        value = jnp.broadcast_to(value, inside.shape).astype(ref.dtype)
        self.step(_scatter, ref, index=jnp.stack(index), inside=inside, value=value)

    def atomic_add(self, ref: Ref, value: Any) -> jax.Array:
        """`ref += value` at once, and what `ref` was: no race with others that do the same."""
        value = jnp.asarray(value, ref.dtype)
        return self.step(_atomic_add, ref, result=value, value=value)

    def copy_added(self, source: Ref, target: Ref) -> None:
        """A TMA copy from shared memory that adds to global memory: done at once, in whatever order."""
        self.step(lambda now, *parts: now.store_by_tma(_AddingCopy, *parts), source, target)

    def await_copies_read(self) -> None:
        """Waits until the thread's copies to global memory have read what they copy."""
        self.step(lambda now: now.shared.wait_smem_to_gmem(now.thread, 0, True))

    def set_registers(self, ref: Ref, value: Any) -> None:
        """Overwrites an accumulator, which nobody else can touch."""
        self.step(_set_registers, dataclasses.replace(ref, transforms=()), value=value)

    def count(self, ref: Ref) -> None:
        """`red.add` of 1: what this thread has done comes before what those do who await the count."""
        self.step(_count, ref)

    def demand_at_least(self, ref: Ref, value: Any) -> None:
        """Fails where a count is still too small."""
        self.step(_demand_at_least, ref, value=jnp.int32(value))

    def peer(self, ref: Ref, **coordinates: Any) -> Ref:
        """`ref` (data or barrier) in the shared memory of the cluster's CTA at `coordinates` (axis name to index)."""
        interpreter = self._interpreter
        block = [jnp.int32(c) for c in interpreter.mesh_location.block_coords]
        for axis, index in coordinates.items():
            block[interpreter.mesh.cluster_names.index(axis)] = jnp.asarray(index, jnp.int32)
        flat = jnp.int32(0)
        for index, size in zip(block, interpreter.cluster_dims, strict=True):
            flat = flat * size + index
        key = ref.key.at[..., _BLOCK_FIELD].set(flat)
        self.step(_await_allocation, key=key)
        return dataclasses.replace(ref, key=key)

    def arrive(self, barrier: Ref) -> None:
        """Arrives at an mbarrier, the current CTA's or a peer's."""
        key = jaxpr_interpret._get_barrier_allocation_key_from_inval(
            barrier.key, jax.tree.structure(barrier.transforms), jax.tree.leaves(barrier.transforms)
        )
        self.step(_arrive, key=key)

    def start_barriers(self, ref: Ref, arrivals: tuple[int, ...]) -> None:
        """`mbarrier.init` by the block's first thread: `ref` holds 8-byte barriers, one in each of its rows."""
        self.step(functools.partial(_start_barriers, arrivals=arrivals), ref)

    def expect_bytes(self, ref: Ref, count: Any) -> None:
        """`mbarrier.arrive.expect_tx`."""
        self.step(_arrive_at, ref, arrivals=jnp.int32(1), announced=jnp.int32(count))

    def arrive_often(self, ref: Ref, threads: int) -> None:
        """`mbarrier.arrive` by so many of the warpgroup's threads."""
        self.step(_arrive_at, ref, arrivals=jnp.int32(threads), announced=jnp.int32(0))

    def complete_bytes(self, ref: Ref, count: Any) -> None:
        """What an asynchronous copy does to its barrier when its bytes have come."""
        self.step(_arrive_at, ref, arrivals=jnp.int32(0), announced=-jnp.int32(count))

    def arrive_last(self, ref: Ref, warps: int) -> jax.Array:
        """`mbarrier.arrive` by so many of the warpgroup's warps; whether their arrivals completed the phase."""
        result = jax.ShapeDtypeStruct((), np.int32)
        return self.step(functools.partial(_arrive_last, warps=warps), ref, result=result)

    def wait_parity(self, ref: Ref, parity: Any) -> None:
        """Spins on `mbarrier.try_wait.parity`."""
        self.step(_wait_parity, ref, parity=jnp.int32(parity))

    def copy_tile(self, source: Ref, sizes: Any, starts: Any, to: Ref, barrier: Ref) -> None:
        """A TMA copy that is done at once, which only threads that wait for the barrier know."""
        self.step(functools.partial(_copy, sizes=sizes, in_panels=False), source, to, barrier, starts=_stacked(starts))

    def copy_panels(self, source: Ref, sizes: Any, at: Any, to: Ref, barrier: Ref) -> None:
        """The TMA copies of rows into panels, done like `copy_tile`."""
        self.step(functools.partial(_copy, sizes=sizes, in_panels=True), source, to, barrier, starts=_stacked(at))

    def copy_pages(self, source: Ref, tables: Ref, at: Any, to: Ref, barrier: Ref, *, pages_first: bool) -> None:
        """The TMA copies of `pipeline.copy_pages`, done like `copy_tile`."""
        step = functools.partial(_copy_pages, pages_first=pages_first)
        self.step(step, source, tables, to, barrier, at=_stacked(at))

    def store_panels(self, source: Ref, target: Ref, sizes: Any, at: Any) -> None:
        """The TMA copies of `pipeline.store_rows`: done at once, in whatever order."""
        self.step(functools.partial(_store_panels, sizes=sizes), source, target, starts=_stacked(at))

    def set_words(self, ref: Ref, at: Any, value: Any, *, active: Any = True) -> None:
        """`st.relaxed.gpu` of words of `ref`, from `at` on."""
        self.step(_set_words, ref, start=jnp.int32(at), value=jnp.atleast_1d(value), active=jnp.asarray(active))

    def await_words(self, ref: Ref, at: Any, count: int, missing: int) -> jax.Array:
        """Spins on `ld.relaxed.gpu` until none of `count` words of `ref` is `missing`; the words."""
        step = functools.partial(_await_words, count=count, missing=missing)
        return self.step(step, ref, result=jax.ShapeDtypeStruct((count,), ref.dtype), start=jnp.int32(at))

    def commit_smem(self) -> None:
        """`fence.proxy.async`: generic accesses to shared memory become ordered before later TMA copies."""
        self.step(lambda now: now.shared.commit_smem(now.thread))

    def block_sync(self, barrier_id: int, warpgroups: int) -> None:
        """`bar.sync barrier_id, 128 * warpgroups`."""
        self.token = gpu_callbacks.call_named_barrier(
            self.token, barrier_id=barrier_id, num_threads=128 * warpgroups, sync=True, **self.where
        )

    def cluster_arrive(self) -> None:
        """`barrier.cluster.arrive`."""
        self.step(functools.partial(_arrive_at_cluster, arrivals=self._interpreter.num_concurrent_threads))

    def cluster_wait(self) -> None:
        """`barrier.cluster.wait.acquire`."""
        self.step(functools.partial(_await_cluster, arrivals=self._interpreter.num_concurrent_threads))

    def cluster_sync(self) -> None:
        self.cluster_arrive()
        self.cluster_wait()


def _stacked(numbers: Any) -> jax.Array:
    return jnp.stack([jnp.int32(i) for i in numbers])


def _await_allocation(now: Now, key: Any) -> None:
    """Stands for the cluster barrier with which every Mosaic cluster kernel starts: peers have their shared memory."""
    key = memory.HostAllocationKey.from_array(np.asarray(key).reshape(-1, key.shape[-1])[0])
    for _ in range(int(_PEER_TIMEOUT_S / _POLL_S)):
        now.shared.check_failed()
        with now.shared.lock:
            if key in now.shared.mem:
                return
        time.sleep(_POLL_S)
    raise TimeoutError(f"{now.thread} waited for shared memory {key} of a peer that never allocated it")


def _arrive(now: Now, key: Any) -> None:
    gpu_callbacks._barrier_arrive(None, now.mesh_location, now.thread, key, now.source_info)


def _words(now: Now, part: Part, start: Any, count: int) -> tuple[np.ndarray, list[Any], dict[Any, Any]]:
    """Words of a flat buffer, their places, and the race detector's clocks, which atomic accesses pass on."""
    assert len(part.range) == 1, "words are elements of whole flat buffers"
    content, start = part.buffer[int(start) : int(start) + count], int(start)
    if content.size != count:
        raise IndexError(f"{now.thread} touches words {start} to {start + count} of {part.buffer.size}")
    return content, [(part.key, start + i) for i in range(count)], now.shared.__dict__.setdefault("word_clocks", {})


def _set_words(now: Now, part: Part, start: Any, value: Any, active: Any) -> None:
    content, places, clocks = _words(now, part, start, value.size)
    if active:
        with now.shared.lock:
            content[...] = value
            clock = now.shared.incr_clock(now.thread, take_lock=False)
            for place in places:
                clocks.setdefault(place, now.shared.VectorClock(now.shared.vector_clock_size)).update(clock)


def _await_words(now: Now, part: Part, start: Any, count: int, missing: int) -> np.ndarray:
    content, places, clocks = _words(now, part, start, count)
    while (content == missing).any():
        now.shared.check_failed()
        time.sleep(_POLL_S / 5)
    with now.shared.lock:
        for place in places:
            if place in clocks:
                now.shared.clocks[now.thread].update(clocks[place])
        return content.copy()


def _cluster_barrier(now: Now, arrivals: int) -> Any:
    """The cluster's hardware barrier: every warpgroup of every CTA arrives; it carries the race detector's clocks."""
    shared, key = now.shared, (now.thread.device_id, "cluster")
    with shared.lock:
        if key not in shared.named_barriers:
            shared.named_barriers[key] = memory.Barrier(
                shared,
                num_pallas_threads_per_block=shared.num_pallas_threads_per_block,
                ref_count=0,
                num_arrivals=arrivals,
                orders_tensor_core=False,
            )
    return shared.named_barriers[key]


def _arrive_at_cluster(now: Now, arrivals: int) -> None:
    clock = now.shared.incr_clock(now.thread) if now.shared.detect_races else None
    _cluster_barrier(now, arrivals).arrive(now.thread, clock)


def _await_cluster(now: Now, arrivals: int) -> None:
    _cluster_barrier(now, arrivals).wait(now.thread)


def _atomic_add(now: Now, part: Part, value: Any) -> np.ndarray:
    with now.shared.lock:
        before = np.array(part.content)
        part.buffer[part.range] = before + value
    return before


def _load_as_product(now: Now, part: Part) -> np.ndarray:
    now.check_copied(part, is_write=False)
    with now.shared.lock:
        return np.array(part.content)


def _store_copied(now: Now, part: Part, value: Any) -> None:
    now.check_copied(part, is_write=True)
    with now.shared.lock:
        part.buffer[part.range] = value


class _AddingCopy(gpu_callbacks.AsyncCopySmemToGmemTask):
    """JAX's, but that it adds; to the race detector a read of the target, for additions need no order."""

    def __call__(self, tma_thread_id: int) -> None:
        shared = gpu_callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, shared)
        source, target = shared.mem[self.src_allocation_key].content, shared.mem[self.dst_allocation_key].content
        if shared.detect_races:
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
            place = self.dst_allocation_key, self.dst_access
            clock = self.clock.async_smem_clock.copy()
            gpu_callbacks.get_races().check_read(self.thread, clock, *place, source_info=self.source_info)
        with shared.lock:
            target[self.dst_access.range] += source[self.src_access.range]
        self.post_write(tma_thread_id, shared)


def _set_registers(now: Now, part: Part, value: Any) -> None:
    part.buffer[...] = value


def _count(now: Now, part: Part) -> None:
    with now.shared.lock:
        part.buffer[part.range] += 1
        clock = now.shared.incr_clock(now.thread, take_lock=False)
        clocks = now.shared.__dict__.setdefault("count_clocks", {})
        place = part.key, str(part.range)
        clocks.setdefault(place, now.shared.VectorClock(now.shared.vector_clock_size)).update(clock)


def _demand_at_least(now: Now, part: Part, value: Any) -> None:
    if (found := int(part.content)) < value:
        raise ValueError(f"{now.thread} would wait forever: the semaphore is {found}, expected {value}")
    with now.shared.lock:
        if (place := (part.key, str(part.range))) in (clocks := now.shared.__dict__.get("count_clocks", {})):
            now.shared.clocks[now.thread].update(clocks[place])


def _gather(now: Now, part: Part, index: Any, inside: Any, fill: Any) -> np.ndarray:
    at = _checked(now, part, index[:, inside], is_write=False)
    value = np.full(inside.shape, fill, part.buffer.dtype)
    value[inside] = part.buffer[at]
    return value


def _scatter(now: Now, part: Part, index: Any, inside: Any, value: Any) -> None:
    at = _checked(now, part, index[:, inside], is_write=True)
    part.buffer[at] = value[inside]


def _checked(now: Now, part: Part, of_view: np.ndarray, *, is_write: bool) -> tuple[np.ndarray, ...]:
    """Where in the buffer the elements are that are touched, once the race detector knows of each run of them."""
    if (of_view < 0).any() or (of_view >= np.reshape(part.access.shape, (-1, 1))).any():
        raise IndexError(f"{now.thread} touches elements outside of {part.range}: {of_view.max(1)}, {of_view.min(1)}")
    rows = iter(of_view)
    at = np.stack([np.full(of_view.shape[1], r) if isinstance(r, int) else r.start + next(rows) for r in part.range])
    clock = now.shared.incr_clock(now.thread).generic_clock
    # Loads are of inputs, which nobody writes: a box around them will do. Stores are told run by run.
    for run in _runs(at) if is_write else _box(at):
        now.check(part.key, interpret_utils.Access(run), clock, is_write=is_write)
    return tuple(at)


@dataclasses.dataclass
class _MBarrier:
    """A barrier's phase, and what is missing until it ends; `clock` is what the arrived have seen."""

    made: Any
    arrivals: int
    clock: Any
    missing: int
    bytes: int = 0
    phase: int = 0

    def add(self, arrivals: int, announced: int) -> None:
        self.missing, self.bytes = self.missing - arrivals, self.bytes + announced
        if self.missing < 0:
            raise ValueError(f"an arrival too many at a barrier of {self.arrivals}")
        if (self.missing, self.bytes) == (0, 0):
            self.phase, self.missing = self.phase + 1, self.arrivals


def _start_barriers(now: Now, part: Part, arrivals: tuple[int, ...]) -> None:
    barriers, (key, at) = now.shared.__dict__.setdefault("mbarriers", {}), part.barrier
    made = now.shared.incr_clock(now.thread).generic_clock.copy()
    for i, count in enumerate(arrivals if now.thread.warpgroup_id == 0 else ()):
        clock = now.shared.VectorClock(now.shared.vector_clock_size)
        barriers[key, at + i] = _MBarrier(made, count, clock, count)


def _barrier(now: Now, part: Part) -> _MBarrier:
    key, at = part.barrier
    if (key, at) not in now.shared.__dict__.setdefault("mbarriers", {}):
        raise ValueError(f"{now.thread} uses barrier {at} of {key} before it is made")
    return now.shared.mbarriers[key, at]


def _tick(now: Now, part: Part, barrier: _MBarrier) -> Any:
    """The thread's clock at an access to a barrier; the caller has the lock."""
    clock = now.shared.incr_clock(now.thread, take_lock=False)
    if not barrier.made.lt(clock.generic_clock):
        key, at = part.barrier
        raise ValueError(f"nothing orders the making of barrier {at} of {key} before {now.thread}'s use of it")
    return clock


def _arrive_at(now: Now, part: Part, arrivals: Any, announced: Any) -> None:
    barrier = _barrier(now, part)
    with now.shared.lock:
        barrier.clock.update(_tick(now, part, barrier))
        barrier.add(int(arrivals), int(announced))


def _wait_parity(now: Now, part: Part, parity: Any) -> None:
    barrier = _barrier(now, part)
    while barrier.phase % 2 == parity:
        now.shared.check_failed()
        time.sleep(_POLL_S / 5)
    with now.shared.lock:
        _tick(now, part, barrier)
        now.shared.clocks[now.thread].update(barrier.clock)


def _arrive_last(now: Now, part: Part, warps: int) -> np.ndarray:
    """The last to arrive sees what the others have done before their arrivals."""
    with now.shared.lock:
        barrier = _barrier(now, part)
        barrier.clock.update(now.shared.incr_clock(now.thread, take_lock=False))
        last = barrier.missing == warps
        barrier.add(warps, 0)
        if last:
            now.shared.clocks[now.thread].update(barrier.clock)
    return np.int32(last)


def _copy(now: Now, source: Part, target: Part, barrier: Part, starts: Any, sizes: Any, in_panels: bool) -> None:
    shape, following, ranges = target.access.shape, iter([*starts.tolist(), 0]), []
    if in_panels:
        panels, rows, columns = shape[-3:]
        sizes = (*sizes, panels * columns)
    for extent, size in zip(source.content.shape, sizes, strict=True):
        start = 0 if size is None else next(following)
        ranges.append((start, extent if size is None else size or 1))
    value = _boxed(source.content, ranges)
    _land(now, value.reshape(rows, panels, columns).swapaxes(0, 1) if in_panels else value, target, barrier)


def _copy_pages(now: Now, source: Part, tables: Part, target: Part, barrier: Part, at: Any, pages_first: bool) -> None:
    (batch, row, head), (panels, rows, columns) = at.tolist(), target.access.shape[-3:]
    page_size = source.content.shape[1 if pages_first else 2]
    size, found = min(page_size, rows), []
    for line in range(row, row + rows, size):
        entry = min(line // page_size, tables.content.shape[1] - 1)
        page, where, head_range = (int(tables.content[batch, entry]), 1), (line % page_size, size), (head, 1)
        place = (page, where, head_range) if pages_first else (head_range, page, where)
        found.append(_boxed(source.content, (*place, (0, panels * columns))).reshape(size, panels, columns))
    _land(now, np.concatenate(found).swapaxes(0, 1), target, barrier)


def _boxed(content: np.ndarray, ranges: Any) -> np.ndarray:
    """The part of an array that begins at and has the extents of `ranges`, with zeros outside of the array."""
    value = np.zeros([size for _, size in ranges], content.dtype)
    inside = [
        (np.clip([start, start + size], 0, extent), start)
        for (start, size), extent in zip(ranges, content.shape, strict=True)
    ]
    value[tuple(slice(*np.maximum(ends - start, 0)) for ends, start in inside)] = content[
        tuple(slice(*ends) for ends, _ in inside)
    ]
    return value


def _land(now: Now, value: np.ndarray, target: Part, of_barrier: Part) -> None:
    """Stores what a TMA copy brings, and tells its barrier."""
    shared, barrier = now.shared, _barrier(now, of_barrier)

    def copy(tma_thread_id: int) -> None:
        """What TMA's own thread does, to the race detector."""
        clock = shared.incr_clock(now.thread).copy()
        clock.inc(tma_thread_id)
        now.check(target.key, target.access, clock.async_smem_clock.copy(), is_write=True)
        with shared.lock:
            target.buffer[target.range] = value.reshape(target.content.shape)
            barrier.clock.update(clock)
            barrier.add(0, -value.nbytes)

    shared.execute_async_task(copy)


def _store_panels(now: Now, source: Part, target: Part, starts: Any, sizes: Any) -> None:
    """One of JAX's copies for each panel, of the rows and columns that the target has."""
    (*at, first), (*leading, panels, rows, columns) = starts.tolist(), source.range
    extents, (inner, *outer) = target.buffer.shape, [d for d, size in enumerate(sizes) if size][::-1]
    for panel, i in itertools.product(range(panels.stop - panels.start), range(math.prod(sizes[d] for d in outer))):
        # A copy for each index of the outer slice, if there is one: JAX's copies are of as many axes as they have.
        here, column = [*at, first + panel * 64], first + panel * 64
        for d in outer:
            here[d] += i
        count = min(sizes[inner], extents[inner] - at[inner]), min(64, extents[-1] - column)
        if min(count) <= 0 or any(here[d] >= extents[d] for d in outer):
            continue
        start = rows.start + i * sizes[inner]
        from_rows = slice(start, start + count[0], 1), slice(columns.start, columns.start + count[1], 1)
        here[inner] = slice(here[inner], here[inner] + count[0], 1)
        here[-1] = slice(column, column + count[1], 1)
        held = dataclasses.replace(source, range=(*leading, panels.start + panel, *from_rows))
        now.store_by_tma(gpu_callbacks.AsyncCopySmemToGmemTask, held, dataclasses.replace(target, range=tuple(here)))


def _box(at: np.ndarray) -> list[tuple[slice, ...]]:
    return [tuple(slice(int(i.min()), int(i.max()) + 1, 1) for i in at)] if at.size else []


def _runs(at: np.ndarray) -> list[tuple[Any, ...]]:
    """The elements `at` (one column each) as ranges along the last axis, or as the one box that they fill."""
    if not at.size:
        return []
    (box,) = _box(at)
    touched = np.zeros([piece.stop - piece.start for piece in box], bool)
    touched[tuple(i - piece.start for i, piece in zip(at, box, strict=True))] = True
    if touched.all():
        return [box]
    edges = np.diff(touched.astype(np.int8), axis=-1, prepend=0, append=0)
    first = np.array([piece.start for piece in box])
    starts, ends = (first + np.argwhere(edges == sign) for sign in (1, -1))
    return [
        (*map(int, start[:-1]), slice(int(start[-1]), int(end[-1]), 1)) for start, end in zip(starts, ends, strict=True)
    ]
