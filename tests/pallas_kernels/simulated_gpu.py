"""The simulated GPU as the models of inline-assembly operations see it: see `interpreter_shim`, which uses it."""

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
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
        self._where = dict(mesh_location=interpreter.mesh_location, thread=interpreter.thread)
        self._source_info = source_info

    def load(self, ref: Ref) -> jax.Array:
        """Reads all of `ref`."""
        self.token, value = gpu_callbacks.call_get(
            token=self.token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(ref.shape, ref.dtype),
            allocation_key_as_array=ref.key,
            transforms=ref.transforms,
            source_info=self._source_info,
            **self._where,
        )
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
            source_info=self._source_info,
            **self._where,
        )

    def gather(self, ref: Ref, index: tuple[jax.Array, ...], inside: jax.Array, fill: Any) -> jax.Array:
        """`ref[index]` where `inside`, and `fill` elsewhere: nothing outside is touched. `ref` is a whole buffer."""
        index = jnp.broadcast_arrays(*index, inside)[:-1]
        result = (gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct(index[0].shape, ref.dtype))
        step = functools.partial(_gather, fill=fill, source_info=self._source_info)
        self.token, value = self._touch(step, result, ref, index=jnp.stack(index), inside=inside)
        return value

    def scatter(self, ref: Ref, index: tuple[jax.Array, ...], inside: jax.Array, value: jax.Array) -> None:
        """Writes `value` to `ref[index]` where `inside`. `ref` is a whole buffer."""
        index = jnp.stack(jnp.broadcast_arrays(*index, inside)[:-1])
        step = functools.partial(_scatter, source_info=self._source_info)
        self.token = self._touch(
            step, gpu_callbacks.TOKEN_SHAPE_DTYPE, ref, index=index, inside=inside, value=value.astype(ref.dtype)
        )

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
        arrive = functools.partial(gpu_callbacks._barrier_arrive, source_info=self._source_info)
        self._call(arrive, allocation_key_as_array=key)

    def atomic_add(self, ref: Ref, index: tuple[Any, ...], amount: Any) -> jax.Array:
        """`atom.add.acq_rel.gpu` on `ref[index]`: the old value; orders memory between blocks, as flags do."""
        step = functools.partial(_flag, wait=False)
        return self._on_flag(step, ref, index, jnp.asarray(amount, ref.dtype))

    def wait_until(self, ref: Ref, index: tuple[Any, ...], at_least: Any) -> jax.Array:
        """Spins on `ld.acquire.gpu` of `ref[index]`; other blocks of the grid run meanwhile under `concurrent_grid`."""
        step = functools.partial(_flag, wait=True)
        return self._on_flag(step, ref, index, jnp.asarray(at_least, ref.dtype))

    def commit_smem(self) -> None:
        """`fence.proxy.async`: generic accesses to shared memory become ordered before later TMA copies."""
        self._call(functools.partial(gpu_callbacks.commit_smem, source_info=self._source_info))

    def block_sync(self, barrier_id: int, warpgroups: int) -> None:
        """`bar.sync barrier_id, 128 * warpgroups`."""
        self.token = gpu_callbacks.call_named_barrier(
            self.token, barrier_id=barrier_id, num_threads=128 * warpgroups, sync=True, **self._where
        )

    def cluster_arrive(self) -> None:
        """`barrier.cluster.arrive.release`."""
        self._call(functools.partial(_cluster_barrier, mesh=self._interpreter.mesh, wait=False))

    def cluster_wait(self) -> None:
        """`barrier.cluster.wait.acquire`."""
        self._call(functools.partial(_cluster_barrier, mesh=self._interpreter.mesh, wait=True))

    def cluster_sync(self) -> None:
        self.cluster_arrive()
        self.cluster_wait()

    def _touch(self, step: Any, result: Any, ref: Ref, **operands: jax.Array) -> Any:
        assert not ref.transforms, "gather and scatter take whole buffers"
        inside = jnp.broadcast_to(operands.pop("inside"), operands["index"].shape[1:])
        return callback.io_callback(
            step, result, token=self.token, key=ref.key, inside=inside, **self._where, **operands
        )

    def _on_flag(self, step: Any, ref: Ref, index: tuple[Any, ...], operand: jax.Array) -> jax.Array:
        assert not ref.transforms, "flags are elements of whole buffers"
        result = (gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct((), ref.dtype))
        at = jnp.stack([jnp.asarray(i, jnp.int32) for i in index])
        self.token, value = callback.io_callback(
            step, result, token=self.token, key=ref.key, at=at, operand=operand, **self._where
        )
        return value

    def _call(self, step: Any, **operands: jax.Array) -> None:
        self.token = callback.io_callback(
            step, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=self.token, **self._where, **operands
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
def _flag(*, token: Any, mesh_location: Any, thread: Any, key: Any, at: Any, operand: Any, wait: bool) -> Any:
    """An atomic addition to a flag, or a wait until it is at least `operand`; passes the race detector's clocks on."""
    del mesh_location
    shared, key = gpu_callbacks._get_shared_memory(), memory.HostAllocationKey.from_array(key)
    content, at = shared.mem[key].content, tuple(int(i) for i in at)
    while True:
        shared.check_failed()
        with shared.lock:
            old = content[at].copy()
            if not wait or old >= operand:
                content[at] += 0 if wait else operand
                if shared.detect_races:
                    _pass_on_clock(shared, thread, (key, at), release=not wait)
                return token, old
        time.sleep(_POLL_S)


def _pass_on_clock(shared: Any, thread: Any, flag: Any, *, release: bool) -> None:
    clock = shared.incr_clock(thread, take_lock=False)
    flag_clocks = shared.__dict__.setdefault("flag_clocks", {})
    released = flag_clocks.setdefault(flag, shared.VectorClock(shared.vector_clock_size))
    if release:
        released.update(clock)
    shared.clocks[thread].update(released)


@dataclasses.dataclass(frozen=True)
class ConcurrentGrid(gpu_core.Mesh):
    """A mesh whose blocks all run at once: the interpreter takes the grid for axes of one large cluster."""

    grid_axes: int = 0  # how many of `cluster` are the grid's

    @classmethod
    def of(cls, mesh: gpu_core.Mesh) -> "ConcurrentGrid":
        fields = {f.name: getattr(mesh, f.name) for f in dataclasses.fields(gpu_core.Mesh)}
        blocks = dict(cluster=(*mesh.grid, *mesh.cluster), cluster_names=(*mesh.grid_names, *mesh.cluster_names))
        return cls(**{**fields, **blocks, "grid": (), "grid_names": ()}, grid_axes=len(mesh.grid))


@gpu_callbacks.fail_on_exception
def _cluster_barrier(*, token: Any, mesh_location: Any, thread: Any, mesh: gpu_core.Mesh, wait: bool) -> Any:
    """The cluster's hardware barrier: every warpgroup of every CTA arrives; it carries the race detector's clocks."""
    grid_axes = mesh.grid_axes if isinstance(mesh, ConcurrentGrid) else 0
    arrivals = math.prod(mesh.cluster[grid_axes:]) * (mesh.num_threads or 1)
    key = (thread.device_id, "cluster", *(int(c) for c in mesh_location.block_coords[:grid_axes]))
    shared = gpu_callbacks._get_shared_memory()
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
def _gather(
    *, token: Any, mesh_location: Any, thread: Any, key: Any, index: Any, inside: Any, fill: Any, source_info: Any
) -> Any:
    del mesh_location
    content, at = _checked(thread, key, index, inside, source_info, is_write=False)
    value = np.full(inside.shape, fill, content.dtype)
    value[np.asarray(inside)] = content[at]
    return token, value


@gpu_callbacks.fail_on_exception
def _scatter(
    *, token: Any, mesh_location: Any, thread: Any, key: Any, index: Any, inside: Any, value: Any, source_info: Any
) -> Any:
    del mesh_location
    content, at = _checked(thread, key, index, inside, source_info, is_write=True)
    content[at] = np.asarray(value)[np.asarray(inside)]
    return token


def _checked(thread: Any, key: Any, index: Any, inside: Any, source_info: Any, *, is_write: bool) -> Any:
    """The buffer and the elements of it that are touched, once the race detector knows of each run of them."""
    shared, key = gpu_callbacks._get_shared_memory(), memory.HostAllocationKey.from_array(key)
    content, at = shared.mem[key].content, np.asarray(index)[:, np.asarray(inside)]
    if (at < 0).any() or (at >= np.reshape(content.shape, (-1, 1))).any():
        raise IndexError(f"{thread} touches elements outside of {content.shape}: {at.max(1)}, {at.min(1)}")
    if shared.detect_races:
        clock, races = shared.incr_clock(thread).generic_clock, gpu_callbacks.get_races()
        check = races.check_write if is_write else races.check_read
        for run in _runs(at):
            check(thread, clock, key, interpret_utils.Access(run), source_info=source_info)
    return content, tuple(at)


def _runs(at: np.ndarray) -> list[tuple[Any, ...]]:
    """The elements `at` (one column each) as ranges along the last axis."""
    at = np.unique(at, axis=1)
    breaks = (np.diff(at[:-1]) != 0).any(0) | (np.diff(at[-1]) != 1)
    return [
        (*(int(i) for i in run[:-1, 0]), slice(int(run[-1, 0]), int(run[-1, -1]) + 1, 1))
        for run in np.split(at, np.flatnonzero(breaks) + 1, axis=1)
        if run.size
    ]
