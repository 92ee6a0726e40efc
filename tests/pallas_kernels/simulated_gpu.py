"""The simulated GPU as the models of inline-assembly operations see it: see `interpreter_shim`, which uses it."""

import dataclasses
import functools
import itertools
import math
import time
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


class Machine:
    """What a model may do to the simulated GPU; each call is one step of the current thread (one warpgroup)."""

    def __init__(self, interpreter: jaxpr_interpret.JaxprInterpreter, token: Token, source_info: Any):
        self.token = token
        self._interpreter = interpreter
        self.where = dict(mesh_location=interpreter.mesh_location, thread=interpreter.thread)
        self.source_info = source_info
        self.warpgroup = interpreter.mesh_location.thread_id

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
        result = gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct(ref.shape, ref.dtype)
        step = functools.partial(_load_as_product, source_info=self.source_info)
        places = dict(key=ref.key, transforms=ref.transforms)
        self.token, value = callback.io_callback(step, result, token=self.token, **places, **self.where)
        return value

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
        step = functools.partial(_store_copied, source_info=self.source_info)
        self._call(step, key=ref.key, transforms=ref.transforms, value=value)

    def gather(self, ref: Ref, index: tuple[jax.Array, ...], inside: jax.Array, fill: Any) -> jax.Array:
        """`ref[index]` where `inside`, and `fill` elsewhere: nothing outside is touched."""
        index = jnp.broadcast_arrays(*index, jnp.asarray(inside))[:-1]
        result = (gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct(index[0].shape, ref.dtype))
        step = functools.partial(_gather, fill=fill, source_info=self.source_info)
        self.token, value = self._touch(step, result, ref, index=jnp.stack(index), inside=inside)
        return value

    def scatter(self, ref: Ref, index: tuple[jax.Array, ...], inside: jax.Array, value: jax.Array) -> None:
        """Writes `value` to `ref[index]` where `inside`."""
        index = jnp.stack(jnp.broadcast_arrays(*index, jnp.asarray(inside))[:-1])
        step = functools.partial(_scatter, source_info=self.source_info)
        self.token = self._touch(step, gpu_callbacks.TOKEN_SHAPE_DTYPE, ref, index=index, inside=inside, value=value)

    def atomic_add(self, ref: Ref, value: Any) -> jax.Array:
        """`ref += value` at once, and what `ref` was: no race with others that do the same."""
        value = jnp.asarray(value, ref.dtype)
        result = (gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct(value.shape, ref.dtype))
        self.token, before = callback.io_callback(
            _atomic_add, result, token=self.token, key=ref.key, transforms=ref.transforms, value=value, **self.where
        )
        return before

    def copy_added(self, source: Ref, target: Ref) -> None:
        """A TMA copy from shared memory that adds to global memory: done at once, in whatever order."""
        places = dict(source=source.key, from_=source.transforms, target=target.key, to=target.transforms)
        self._call(functools.partial(_copy_added, source_info=self.source_info), **places)

    def await_copies_read(self) -> None:
        """Waits until the thread's copies to global memory have read what they copy."""
        wait = functools.partial(gpu_callbacks.wait_smem_to_gmem, source_info=self.source_info)
        self._call(wait, n=jnp.int32(0), wait_read_only=jnp.bool_(True))

    def set_registers(self, ref: Ref, value: Any) -> None:
        """Overwrites an accumulator, which nobody else can touch."""
        self._call(_set_registers, key=ref.key, value=value)

    def count(self, ref: Ref) -> None:
        """`red.add` of 1: what this thread has done comes before what those do who await the count."""
        self._call(_count, key=ref.key, transforms=ref.transforms)

    def demand_at_least(self, ref: Ref, value: Any) -> None:
        """Fails where a count is still too small."""
        self._call(_demand_at_least, key=ref.key, transforms=ref.transforms, value=jnp.int32(value))

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
        self._call(_await_allocation, key=key)
        return dataclasses.replace(ref, key=key)

    def arrive(self, barrier: Ref) -> None:
        """Arrives at an mbarrier, the current CTA's or a peer's."""
        key = jaxpr_interpret._get_barrier_allocation_key_from_inval(
            barrier.key, jax.tree.structure(barrier.transforms), jax.tree.leaves(barrier.transforms)
        )
        arrive = functools.partial(gpu_callbacks._barrier_arrive, source_info=self.source_info)
        self._call(arrive, allocation_key_as_array=key)

    def start_barriers(self, ref: Ref, arrivals: tuple[int, ...]) -> None:
        """`mbarrier.init` by the block's first thread: `ref` holds 8-byte barriers, one in each of its rows."""
        self._on_barriers(ref, "start", arrivals=arrivals)

    def expect_bytes(self, ref: Ref, count: Any) -> None:
        """`mbarrier.arrive.expect_tx`."""
        self._on_barriers(ref, "expect", count)

    def arrive_often(self, ref: Ref, threads: int) -> None:
        """`mbarrier.arrive` by so many of the warpgroup's threads."""
        self._on_barriers(ref, "arrive", threads)

    def arrive_last(self, ref: Ref, warps: int) -> jax.Array:
        """`mbarrier.arrive` by so many of the warpgroup's warps; whether their arrivals completed the phase."""
        result = gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct((), np.int32)
        places = dict(key=ref.key, transforms=ref.transforms, warps=jnp.int32(warps))
        self.token, last = callback.io_callback(_arrive_last, result, token=self.token, **places, **self.where)
        return last

    def copy_tile(self, source: Ref, sizes: Any, starts: Any, to: Ref, barrier: Ref) -> None:
        """A TMA copy that is done at once: see `pipeline.copy`. Only who waits for the barrier knows that it is."""
        step = functools.partial(_copy_tile, sizes=sizes, source_info=self.source_info)
        places = dict(source=source.key, from_=source.transforms, target=to.key, to=to.transforms)
        self._call(
            step,
            starts=jnp.stack([jnp.int32(i) for i in starts]),
            barrier=barrier.key,
            of_barrier=barrier.transforms,
            **places,
        )

    def copy_panels(self, source: Ref, sizes: Any, at: Any, to: Ref, barrier: Ref) -> None:
        """The TMA copies of `pipeline.copy_rows`, done like `copy_tile`."""
        step = functools.partial(_copy_panels, sizes=sizes, source_info=self.source_info)
        places = dict(source=source.key, from_=source.transforms, target=to.key, to=to.transforms)
        start = jnp.stack([jnp.int32(i) for i in at])
        self._call(step, starts=start, barrier=barrier.key, of_barrier=barrier.transforms, **places)

    def store_panels(self, source: Ref, target: Ref, sizes: Any, at: Any) -> None:
        """The TMA copies of `pipeline.store_rows`: done at once, in whatever order."""
        step = functools.partial(_store_panels, sizes=sizes, source_info=self.source_info)
        places = dict(source=source.key, from_=source.transforms, target=target.key, to=target.transforms)
        self._call(step, starts=jnp.stack([jnp.int32(i) for i in at]), **places)

    def complete_bytes(self, ref: Ref, count: Any) -> None:
        """What an asynchronous copy does to its barrier when its bytes have come."""
        self._on_barriers(ref, "complete", count)

    def wait_parity(self, ref: Ref, parity: Any) -> None:
        """Spins on `mbarrier.try_wait.parity`."""
        self._on_barriers(ref, "wait", parity)

    def set_words(self, ref: Ref, at: Any, value: Any, *, active: Any = True) -> None:
        """`st.relaxed.gpu` of words of `ref`, from `at` on."""
        self._on_words(ref, "set", at, value, active)

    def await_words(self, ref: Ref, at: Any, count: int, missing: int) -> jax.Array:
        """Spins on `ld.relaxed.gpu` until none of `count` words of `ref` is `missing`; the words."""
        return self._on_words(ref, "await", at, jnp.full(count, missing), True)

    def commit_smem(self) -> None:
        """`fence.proxy.async`: generic accesses to shared memory become ordered before later TMA copies."""
        self._call(functools.partial(gpu_callbacks.commit_smem, source_info=self.source_info))

    def block_sync(self, barrier_id: int, warpgroups: int) -> None:
        """`bar.sync barrier_id, 128 * warpgroups`."""
        self.token = gpu_callbacks.call_named_barrier(
            self.token, barrier_id=barrier_id, num_threads=128 * warpgroups, sync=True, **self.where
        )

    def cluster_arrive(self) -> None:
        """`barrier.cluster.arrive`."""
        self._call(functools.partial(_cluster_barrier, arrivals=self._interpreter.num_concurrent_threads, wait=False))

    def cluster_wait(self) -> None:
        """`barrier.cluster.wait.acquire`."""
        self._call(functools.partial(_cluster_barrier, arrivals=self._interpreter.num_concurrent_threads, wait=True))

    def cluster_sync(self) -> None:
        self.cluster_arrive()
        self.cluster_wait()

    def _touch(self, step: Any, result: Any, ref: Ref, *, index: Any, inside: Any, **operands: Any) -> Any:
        shape = index.shape[1:]
        operands = {name: jnp.broadcast_to(x, shape).astype(ref.dtype) for name, x in operands.items()}
        return callback.io_callback(
            step,
            result,
            token=self.token,
            key=ref.key,
            transforms=ref.transforms,
            index=index,
            inside=jnp.broadcast_to(inside, shape),
            **self.where,
            **operands,
        )

    def _on_words(self, ref: Ref, action: str, at: Any, operand: Any, active: Any) -> jax.Array:
        operand = jnp.atleast_1d(jnp.asarray(operand, ref.dtype))
        result = (gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct(operand.shape, ref.dtype))
        places = dict(key=ref.key, transforms=ref.transforms, at=jnp.int32(at), active=jnp.asarray(active))
        self.token, words = callback.io_callback(
            functools.partial(_words, action=action), result, token=self.token, operand=operand, **places, **self.where
        )
        return words

    def _on_barriers(self, ref: Ref, action: str, operand: Any = 0, **static: Any) -> None:
        step = functools.partial(_mbarrier, action=action, **static)
        self._call(step, key=ref.key, transforms=ref.transforms, operand=jnp.int32(operand))

    def _call(self, step: Any, **operands: Any) -> None:
        self.token = callback.io_callback(
            step, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=self.token, **self.where, **operands
        )


@gpu_callbacks.fail_on_exception
def _await_allocation(*, token: Any, mesh_location: Any, thread: Any, key: Any) -> Any:
    """Stands for the cluster barrier with which every Mosaic cluster kernel starts: peers have their shared memory."""
    del mesh_location
    shared, keys = gpu_callbacks._get_shared_memory(), np.asarray(key).reshape(-1, key.shape[-1])
    key = memory.HostAllocationKey.from_array(keys[0])
    for _ in range(int(_PEER_TIMEOUT_S / _POLL_S)):
        shared.check_failed()
        with shared.lock:
            if key in shared.mem:
                return token
        time.sleep(_POLL_S)
    raise TimeoutError(f"{thread} waited for shared memory {key} of a peer that never allocated it")


@gpu_callbacks.fail_on_exception
def _words(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    key: Any,
    transforms: Any,
    at: Any,
    operand: Any,
    active: Any,
    action: str,
) -> Any:
    """Atomic accesses to consecutive words of a flat buffer; they pass the race detector's clocks on."""
    del mesh_location
    shared, key, view = _resolve(key, transforms)
    assert len(view) == 1, "words are elements of whole flat buffers"
    operand, at = np.asarray(operand), int(at)
    content = shared.mem[key].content[at : at + operand.size]
    if content.size != operand.size:
        raise IndexError(f"{thread} touches words {at} to {at + operand.size} of {shared.mem[key].content.size}")
    while action == "await" and active and (content == operand).any():
        shared.check_failed()
        time.sleep(_POLL_S / 5)
    with shared.lock:
        old, clocks = content.copy(), shared.__dict__.setdefault("word_clocks", {})
        if action == "await" or not active:
            for i in range(operand.size):
                if (key, at + i) in clocks:
                    shared.clocks[thread].update(clocks[key, at + i])
        else:
            content[...] = operand
            clock = shared.incr_clock(thread, take_lock=False)
            for i in range(operand.size):
                clocks.setdefault((key, at + i), shared.VectorClock(shared.vector_clock_size)).update(clock)
    return token, old


@gpu_callbacks.fail_on_exception
def _cluster_barrier(*, token: Any, mesh_location: Any, thread: Any, arrivals: int, wait: bool) -> Any:
    """The cluster's hardware barrier: every warpgroup of every CTA arrives; it carries the race detector's clocks."""
    del mesh_location
    shared, key = gpu_callbacks._get_shared_memory(), (thread.device_id, "cluster")
    with shared.lock:
        barrier = shared.named_barriers.get(key)
        if barrier is None:
            barrier = memory.Barrier(
                shared,
                num_pallas_threads_per_block=shared.num_pallas_threads_per_block,
                ref_count=0,
                num_arrivals=arrivals,
                orders_tensor_core=False,
            )
            shared.named_barriers[key] = barrier
    if wait:
        barrier.wait(thread)
    else:
        barrier.arrive(thread, shared.incr_clock(thread) if shared.detect_races else None)
    return token


@gpu_callbacks.fail_on_exception
def _atomic_add(*, token: Any, mesh_location: Any, thread: Any, key: Any, transforms: Any, value: Any) -> Any:
    del mesh_location, thread
    shared, key, view = _resolve(key, transforms)
    with shared.lock:
        before = np.array(shared.mem[key].content[view])
        shared.mem[key].content[view] = before + np.asarray(value)
    return token, before


@gpu_callbacks.fail_on_exception
def _load_as_product(
    *, token: Any, mesh_location: Any, thread: Any, key: Any, transforms: Any, source_info: Any
) -> Any:
    del mesh_location
    shared, key, view = _as_a_copy(thread, key, transforms, source_info, is_write=False)
    with shared.lock:
        return token, np.array(shared.mem[key].content[view])


@gpu_callbacks.fail_on_exception
def _store_copied(
    *, token: Any, mesh_location: Any, thread: Any, key: Any, transforms: Any, value: Any, source_info: Any
) -> Any:
    del mesh_location
    shared, key, view = _as_a_copy(thread, key, transforms, source_info, is_write=True)
    with shared.lock:
        shared.mem[key].content[view] = np.asarray(value)
    return token


def _as_a_copy(thread: Any, key: Any, transforms: Any, source_info: Any, *, is_write: bool) -> tuple[Any, Any, Any]:
    """What `_resolve` finds, and the race detector told that it is read or written in order of fences only."""
    shared, key, view = _resolve(key, transforms)
    if shared.detect_races:
        races = gpu_callbacks.get_races()
        check = races.check_write if is_write else races.check_read
        check(thread, async_clock(shared, thread), key, interpret_utils.Access(view), source_info=source_info)
    return shared, key, view


def async_clock(shared: Any, thread: Any) -> Any:
    """Of an access to shared memory by the tensor cores or the copy engine; later than what the thread waited for."""
    with shared.lock:
        clock = shared.clocks[thread]
        clock.inc(shared.thread_to_vc_position(thread))
        return clock.async_smem_clock.copy()


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


@gpu_callbacks.fail_on_exception
def _copy_added(
    *, token: Any, mesh_location: Any, thread: Any, source: Any, from_: Any, target: Any, to: Any, source_info: Any
) -> Any:
    shared = gpu_callbacks._get_shared_memory()
    (_, source, source_range), (_, target, target_range) = _resolve(source, from_), _resolve(target, to)
    task = _AddingCopy(
        mesh_location=mesh_location,
        thread=thread,
        src_allocation_key=source,
        src_access=interpret_utils.Access(source_range),
        dst_allocation_key=target,
        dst_access=interpret_utils.Access(target_range),
        source_info=source_info,
        clock=shared.incr_clock(thread) if shared.detect_races else None,
    )
    shared.execute_async_task(task)
    return token


@gpu_callbacks.fail_on_exception
def _set_registers(*, token: Any, mesh_location: Any, thread: Any, key: Any, value: Any) -> Any:
    del mesh_location, thread
    shared, key, _ = _resolve(key, ())
    shared.mem[key].content[...] = np.asarray(value)
    return token


@gpu_callbacks.fail_on_exception
def _count(*, token: Any, mesh_location: Any, thread: Any, key: Any, transforms: Any) -> Any:
    del mesh_location
    shared, key, view = _resolve(key, transforms)
    with shared.lock:
        shared.mem[key].content[view] += 1
        clock = shared.incr_clock(thread, take_lock=False)
        clocks = shared.__dict__.setdefault("count_clocks", {})
        clocks.setdefault((key, str(view)), shared.VectorClock(shared.vector_clock_size)).update(clock)
    return token


@gpu_callbacks.fail_on_exception
def _demand_at_least(*, token: Any, mesh_location: Any, thread: Any, key: Any, transforms: Any, value: Any) -> Any:
    del mesh_location
    shared, key, view = _resolve(key, transforms)
    if (found := int(shared.mem[key].content[view])) < value:
        raise ValueError(f"{thread} would wait forever: {found} had their turn, {value} come before")
    with shared.lock:
        if (place := (key, str(view))) in (clocks := shared.__dict__.get("count_clocks", {})):
            shared.clocks[thread].update(clocks[place])
    return token


@gpu_callbacks.fail_on_exception
def _gather(
    *, token: Any, mesh_location: Any, thread: Any, inside: Any, fill: Any, source_info: Any, **place: Any
) -> Any:
    del mesh_location
    content, at = _checked(thread, inside, source_info, is_write=False, **place)
    value = np.full(inside.shape, fill, content.dtype)
    value[np.asarray(inside)] = content[at]
    return token, value


@gpu_callbacks.fail_on_exception
def _scatter(
    *, token: Any, mesh_location: Any, thread: Any, inside: Any, value: Any, source_info: Any, **place: Any
) -> Any:
    del mesh_location
    content, at = _checked(thread, inside, source_info, is_write=True, **place)
    content[at] = np.asarray(value)[np.asarray(inside)]
    return token


def _checked(
    thread: Any, inside: Any, source_info: Any, *, key: Any, transforms: Any, index: Any, is_write: bool
) -> Any:
    """The buffer and the elements of it that are touched, once the race detector knows of each run of them."""
    shared, key, view = _resolve(key, transforms)
    content, of_view = shared.mem[key].content, np.asarray(index)[:, np.asarray(inside)]
    if (of_view < 0).any() or (of_view >= np.reshape(interpret_utils.Access(view).shape, (-1, 1))).any():
        raise IndexError(f"{thread} touches elements outside of {view}: {of_view.max(1)}, {of_view.min(1)}")
    rows = iter(of_view)
    at = np.stack([np.full(of_view.shape[1], r) if isinstance(r, int) else r.start + next(rows) for r in view])
    if shared.detect_races:
        clock, races = shared.incr_clock(thread).generic_clock, gpu_callbacks.get_races()
        # Loads are of inputs, which nobody writes: a box around them will do. Stores are told run by run.
        check, runs = (races.check_write, _runs(at)) if is_write else (races.check_read, _box(at))
        for run in runs:
            check(thread, clock, key, interpret_utils.Access(run), source_info=source_info)
    return content, tuple(at)


def _resolve(key: Any, transforms: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """The memory, and the buffer and the part of it that a reference means."""
    shared, key = gpu_callbacks._get_shared_memory(), memory.HostAllocationKey.from_array(key)
    access = shared.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))
    assert access.permutation is None
    return shared, key, access.range


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


@gpu_callbacks.fail_on_exception
def _mbarrier(
    *, token: Any, mesh_location: Any, thread: Any, key: Any, transforms: Any, operand: Any, action: str, **static: Any
) -> Any:
    del mesh_location
    shared, key, view = _resolve(key, transforms)
    at = view[0] if isinstance(view[0], int) else view[0].start
    barriers = shared.__dict__.setdefault("mbarriers", {})
    if action == "start":
        made = shared.incr_clock(thread).generic_clock.copy()
        for i, arrivals in enumerate(static["arrivals"] if thread.warpgroup_id == 0 else ()):
            barriers[key, at + i] = _MBarrier(made, arrivals, shared.VectorClock(shared.vector_clock_size), arrivals)
        return token
    if (key, at) not in barriers:
        raise ValueError(f"{thread} uses barrier {at} of {key} before it is made")
    barrier, operand = barriers[key, at], int(operand)
    while action == "wait" and barrier.phase % 2 == operand:
        shared.check_failed()
        time.sleep(_POLL_S / 5)
    with shared.lock:
        clock = shared.incr_clock(thread, take_lock=False)
        if not barrier.made.lt(clock.generic_clock):
            raise ValueError(f"nothing orders the making of barrier {at} of {key} before {thread}'s use of it")
        if action == "wait":
            shared.clocks[thread].update(barrier.clock)
        else:
            barrier.clock.update(clock)
            arrivals = {"expect": 1, "arrive": operand}.get(action, 0)
            barrier.add(arrivals, {"expect": operand, "complete": -operand}.get(action, 0))
    return token


@gpu_callbacks.fail_on_exception
def _arrive_last(*, token: Any, mesh_location: Any, thread: Any, key: Any, transforms: Any, warps: Any) -> Any:
    """The last to arrive sees what the others have done before their arrivals."""
    del mesh_location
    shared, key, view = _resolve(key, transforms)
    with shared.lock:
        barrier = shared.mbarriers[key, view[0] if isinstance(view[0], int) else view[0].start]
        barrier.clock.update(shared.incr_clock(thread, take_lock=False))
        last = barrier.missing == int(warps)
        barrier.add(int(warps), 0)
        if last:
            shared.clocks[thread].update(barrier.clock)
    return token, np.int32(last)


@gpu_callbacks.fail_on_exception
def _copy_tile(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    source: Any,
    from_: Any,
    target: Any,
    to: Any,
    barrier: Any,
    of_barrier: Any,
    starts: Any,
    sizes: Any,
    source_info: Any,
) -> Any:
    del mesh_location
    shared, source, view = _resolve(source, from_)
    content, following, ranges = shared.mem[source].content[view], iter(np.asarray(starts).tolist()), []
    for extent, size in zip(content.shape, sizes, strict=True):
        start = 0 if size is None else next(following)
        ranges.append((start, extent if size is None else size or 1))
    _land(shared, thread, _boxed(content, ranges), _resolve(target, to), _resolve(barrier, of_barrier), source_info)
    return token


@gpu_callbacks.fail_on_exception
def _copy_panels(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    source: Any,
    from_: Any,
    target: Any,
    to: Any,
    barrier: Any,
    of_barrier: Any,
    starts: Any,
    sizes: Any,
    source_info: Any,
) -> Any:
    del mesh_location
    shared, source, view = _resolve(source, from_)
    goal = _resolve(target, to)
    panels, rows, columns = interpret_utils.Access(goal[2]).shape[-3:]
    places = zip(np.asarray(starts).tolist(), sizes, strict=True)
    ranges = [*((start, size or 1) for start, size in places), (0, panels * columns)]
    value = _boxed(shared.mem[source].content[view], ranges)
    value = value.reshape(rows, panels, columns).swapaxes(0, 1)
    _land(shared, thread, value, goal, _resolve(barrier, of_barrier), source_info)
    return token


def _boxed(content: np.ndarray, ranges: Any) -> np.ndarray:
    """The part of an array that begins at and has the extents of `ranges`, with zeros where the array has ended."""
    edges = zip(ranges, content.shape, strict=True)
    part = tuple(slice(min(start, extent), min(start + size, extent)) for (start, size), extent in edges)
    value = np.zeros([size for _, size in ranges], content.dtype)
    value[tuple(slice(0, piece.stop - piece.start) for piece in part)] = content[part]
    return value


def _land(shared: Any, thread: Any, value: np.ndarray, goal: Any, barrier: Any, source_info: Any) -> None:
    """Stores what a TMA copy brings, and tells its barrier."""
    (_, target, place), (_, barrier, at) = goal, barrier
    barrier = shared.mbarriers[barrier, at[0] if isinstance(at[0], int) else at[0].start]

    def copy(tma_thread_id: int) -> None:
        """What a thread of the copy engine's own does, to the race detector."""
        clock = shared.incr_clock(thread).copy()
        clock.inc(tma_thread_id)
        if shared.detect_races:
            access = interpret_utils.Access(place)
            races = gpu_callbacks.get_races()
            races.check_write(thread, clock.async_smem_clock.copy(), target, access, source_info=source_info)
        with shared.lock:
            found = shared.mem[target].content[place]
            shared.mem[target].content[place] = value.reshape(found.shape)
            barrier.clock.update(clock)
            barrier.add(0, -value.nbytes)

    shared.execute_async_task(copy)


@gpu_callbacks.fail_on_exception
def _store_panels(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    source: Any,
    from_: Any,
    target: Any,
    to: Any,
    starts: Any,
    sizes: Any,
    source_info: Any,
) -> Any:
    """One of JAX's copies for each panel, of the rows and columns that the target has."""
    (shared, source, held), (_, target, _) = _resolve(source, from_), _resolve(target, to)
    (*at, first), (*leading, panels, rows, columns) = np.asarray(starts).tolist(), held
    extents, (inner, *outer) = shared.mem[target].content.shape, [d for d, size in enumerate(sizes) if size][::-1]
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
        task = gpu_callbacks.AsyncCopySmemToGmemTask(
            mesh_location=mesh_location,
            thread=thread,
            src_allocation_key=source,
            src_access=interpret_utils.Access((*leading, panels.start + panel, *from_rows)),
            dst_allocation_key=target,
            dst_access=interpret_utils.Access(tuple(here)),
            source_info=source_info,
            clock=shared.incr_clock(thread) if shared.detect_races else None,
        )
        shared.execute_async_task(task)
    return token


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
