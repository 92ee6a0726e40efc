"""Teaches Mosaic's GPU interpreter what our Hopper kernels use beyond it.

Only this module and `simulated_gpu` import `jax._src`. An inline-assembly operation says what it means by
an attribute of the function given to `plgpu.inline_mgpu` (`models` says it for those that have none):

* `f.interpret = lambda *values: (writes, results)`: a function of values. Every argument comes as an array (references
  are read in full); `writes` maps an argument's position to that reference's new value; `results` lists the results.
* `f.interpret = lambda machine, *arguments: results`: an operation that synchronises, or that touches memory here and
  there. It gets a `simulated_gpu.Machine`, references as handles, arrays as arrays. None means no results.
Models run when the kernel is lowered: they may close over static values only, never over traced arrays.

Also added: products that are under way until they are waited for (`in_flight`), reads of a cluster peer's shared
memory, `async_store_smem`, TMA copies that add, predicated ones (which pipelines with outputs need), `run_state`, `jit`
of what uses references, and WGMMA with its left operand in registers. Grid points run one after another in the
interpreter, the threads and CTAs of one cluster concurrently.
"""

import contextlib
import functools
import inspect
from typing import Any

import in_flight
import jax
import jax.numpy as jnp
import models
import numpy as np
import numpy_eval
import progress
from jax import lax
from jax._src import callback as jax_callback
from jax._src import core as jax_core
from jax._src import pjit
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import discharge, indexing
from jax._src.state import types as state_types
from simulated_gpu import Machine, Ref, Token

from pallas_kernels.mosaic import ptx

TESTED_VERSIONS = ("0.11.2", "0.12.0.1")
_FALSE_PREDICATE_ARRIVES = jax.__version__ == "0.11.2"


class HopperInterpreter(jaxpr_interpret.JaxprInterpreter):
    """JAX's interpreter with the operations that the module's docstring names."""

    def interpret(self, jaxpr: Any, token: Token, *arguments: Any) -> tuple[Token, list[Any]]:
        ours = {
            gpu_primitives.async_store_smem_p: self._async_store_smem,
            gpu_primitives.wgmma_accumulator_store_p: self._store_accumulator,
            gpu_primitives.wgmma_ref_p: self._multiply_registers,
            gpu_primitives.wgmma_wait_p: self._wait_for_products,
            lax.optimization_barrier_p: self._settle,
            pjit.jit_p: self._call,
            discharge.run_state_p: self._run_state,
        }
        if not any(_is_ours(eqn, ours) for eqn in jaxpr.eqns):
            return super().interpret(jaxpr, token, *arguments)
        sentinel = jaxpr_interpret._SENTINEL if self.interpret_params.skip_floating_point_ops else None
        env = interpret_utils.JaxprEnv(
            vars=(*jaxpr.constvars, *jaxpr.invars), values=arguments, sentinel_for_floating_point_values=sentinel
        )
        for eqn in jaxpr.eqns:
            if _is_ours(eqn, ours):
                token, results = ours[eqn.primitive](eqn, token, env.read_many(eqn.invars))
                env.write_many(eqn.outvars, results)
                continue
            used = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, jax_core.Var)))
            kept = [v for v in eqn.outvars if not isinstance(v, jax_core.DropVar)]
            alone = jax_core.Jaxpr((), used, kept, [eqn], eqn.effects, jaxpr.debug_info)
            token, results = super().interpret(alone, token, *env.read_many(used))
            env.write_many(kept, results)
        return token, env.read_many(jaxpr.outvars)

    def _here(self, eqn: Any) -> dict[str, Any]:
        return dict(mesh_location=self.mesh_location, thread=self.thread, source_info=eqn.source_info)

    def _in_registers(self, eqn: Any, token: Token, value: Any) -> tuple[Token, Any]:
        """A buffer of the thread's own that holds `value`."""
        space = memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
        token, request = gpu_callbacks.call_make_allocation_request_array(
            token=token, compute_unit=self.thread, memory_space_id=space, initial_ref_count=1
        )
        return gpu_callbacks.call_allocate_buffer(
            token=token, allocation_request_as_array=request, value=value, **self._here(eqn)
        )

    def _forget(self, eqn: Any, token: Token, key: Any) -> Token:
        return gpu_callbacks.call_deallocate_buffer(token=token, allocation_key_as_array=key, **self._here(eqn))

    def _call(self, eqn: Any, token: Token, values: list[Any]) -> tuple[Token, list[Any]]:
        return self.interpret(eqn.params["jaxpr"], token, *values)

    def _run_state(self, eqn: Any, token: Token, values: list[Any]) -> tuple[Token, list[Any]]:
        refs, results = [], []
        for variable, value in zip(eqn.invars, values, strict=True):
            if not isinstance(variable.aval, state_types.AbstractRef):
                token, value = self._in_registers(eqn, token, value)
            refs.append(value)
        token, _ = self.interpret(eqn.params["jaxpr"], token, *refs)
        machine = Machine(self, token, eqn.source_info)
        in_flight.wait(machine, 0)  # as Mosaic does, whose accumulators these are
        token = machine.token
        for variable, ref in zip(eqn.invars, refs, strict=True):
            if not isinstance(variable.aval, state_types.AbstractRef):
                machine = Machine(self, token, eqn.source_info)
                value, token = machine.load(Ref(ref, (), variable.aval)), machine.token
                token, ref = self._forget(eqn, token, ref), value
            results.append(ref)
        return token, results

    def _multiply_registers(self, eqn: Any, token: Token, values: list[Any]) -> tuple[Token, list[Any]]:
        total, left, *rest = values
        token, left = self._in_registers(eqn, token, left)
        token, results = self._interpret_wgmma_ref_p(eqn, token, lambda: [total, left, *rest])
        return self._forget(eqn, token, left), results

    def _interpret_wgmma_ref_p(self, eqn: Any, token: Token, get_invals: Any) -> tuple[Token, list[Any]]:
        accumulator, left, right, *leaves = values = get_invals()
        token, results = super()._interpret_wgmma_ref_p(eqn, token, lambda: values)
        trees = [eqn.params[f"{name}_transforms_tree"] or jax.tree.structure([]) for name in ("acc", "a", "b")]
        _, *transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
        placed = zip(eqn.invars[1:3], (left, right), transforms, strict=True)
        shared = [_place(v.aval, x, t) for v, x, t in placed if isinstance(v.aval, state_types.AbstractRef)]
        machine = Machine(self, token, eqn.source_info)
        in_flight.begin(machine, shared, Ref(accumulator, (), eqn.invars[0].aval))
        return machine.token, results

    def _interpret_wgmma_accumulator_deref_p(self, eqn: Any, token: Token, get_invals: Any) -> tuple[Token, Any]:
        machine, values = Machine(self, token, eqn.source_info), get_invals()
        in_flight.wait(machine, eqn.params["wait_n"], Ref(values[0], (), eqn.invars[0].aval))
        return super()._interpret_wgmma_accumulator_deref_p(eqn, machine.token, lambda: values)

    def _wait_for_products(self, eqn: Any, token: Token, values: list[Any]) -> tuple[Token, list[Any]]:
        machine = Machine(self, token, eqn.source_info)
        in_flight.wait(machine, eqn.params["n"])
        return machine.token, []

    def _settle(self, eqn: Any, token: Token, values: list[Any]) -> tuple[Token, list[Any]]:
        machine = Machine(self, token, eqn.source_info)
        result = in_flight.settled(machine, values[0])
        return machine.token, [result]

    def _store_accumulator(self, eqn: Any, token: Token, values: list[Any]) -> tuple[Token, list[Any]]:
        machine, accumulator = Machine(self, token, eqn.source_info), Ref(values[0], (), eqn.invars[1].aval)
        in_flight.wait(machine, None, accumulator)
        machine.set_registers(accumulator, values[1])
        return machine.token, [values[1]]

    def _async_store_smem(self, eqn: Any, token: Token, values: list[Any]) -> tuple[Token, list[Any]]:
        source, ref, barrier, peer_index, *leaves = values
        ref_tree, barrier_tree = eqn.params["ref_transforms_treedef"], eqn.params["barrier_transforms_treedef"]
        if eqn.params["atomic"] is not None:
            raise NotImplementedError("async_store_smem with an atomic operation is not modelled")
        machine, peer = Machine(self, token, eqn.source_info), {eqn.params["cluster_dim"]: peer_index}
        ref_transforms = jax.tree.unflatten(ref_tree, leaves[: ref_tree.num_leaves])
        barrier_transforms = jax.tree.unflatten(barrier_tree, leaves[ref_tree.num_leaves :])
        machine.store(machine.peer(_ref(eqn.invars[1].aval, ref, ref_transforms), **peer), source)
        machine.arrive(machine.peer(Ref(barrier, barrier_transforms, eqn.invars[2].aval), **peer))
        return machine.token, []

    def _interpret_get_p(self, eqn: Any, token: Token, get_invals: Any) -> tuple[Token, Any]:
        values = get_invals()
        transforms = jax.tree.unflatten(eqn.params["tree"], values[1:])
        remote = [t for t in transforms if isinstance(t, gpu_core.ClusterRefTransform)]
        if not remote:
            return super()._interpret_get_p(eqn, token, lambda: values)
        local = tuple(t for t in transforms if not isinstance(t, gpu_core.ClusterRefTransform))
        machine, ref = Machine(self, token, eqn.source_info), _ref(eqn.invars[0].aval, values[0], local)
        for t in remote:
            ref = machine.peer(ref, **dict(zip(t.dims, t.idxs, strict=True)))
        value = machine.load(ref)
        return machine.token, value

    def _interpret_arithmetic_primitive(self, eqn: Any, get_invals: Any) -> Any:
        if eqn.primitive is lax.exp2_p and eqn.outvars[0].aval.dtype == jnp.float32:
            return _hardware_exp2(*get_invals())
        return super()._interpret_arithmetic_primitive(eqn, get_invals)

    def _interpret_inline_mgpu_p(self, eqn: Any, token: Token, get_invals: Any) -> tuple[Token, list[Any]]:
        model = models.of(eqn.params["mgpu_fn"])
        if model is None:
            raise NotImplementedError(f"{eqn.params['mgpu_fn']} carries no `.interpret` model")
        count, values = len(eqn.params["flat_arg_types"]), get_invals()
        transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], values[count:])
        arguments = [
            _ref(variable.aval, value, transform) if isinstance(variable.aval, state_types.AbstractRef) else value
            for variable, value, transform in zip(eqn.invars[:count], values[:count], transforms, strict=True)
        ]
        arguments = [_cut(x) for x in jax.tree.unflatten(eqn.params["pytree_args"], arguments)]
        machine = Machine(self, token, eqn.source_info)
        if next(iter(inspect.signature(model).parameters), None) == "machine":
            results = model(machine, *arguments)
        else:
            writes, results = model(*(machine.load(a) if isinstance(a, Ref) else a for a in arguments))
            for position, value in writes.items():
                machine.store(arguments[position], value)
        return machine.token, list(results or ())

    def _interpret_copy_smem_to_gmem_p(
        self, eqn: Any, token: Token, *operands: Any, has_user_predicate: bool, **params: Any
    ) -> tuple[Token, list[Any]]:
        if params.get("reduction_op") is not None:
            return self._add_smem_to_gmem(eqn, token, *operands, **params), []
        copy = functools.partial(super()._interpret_copy_smem_to_gmem_p, eqn, has_user_predicate=False, **params)
        if not has_user_predicate:
            return copy(token, *operands)
        *operands, predicate = operands
        return lax.cond(predicate, lambda t: copy(t, *operands)[0], lambda t: t, token), []

    def _add_smem_to_gmem(self, eqn: Any, token: Token, source: Any, target: Any, *leaves: Any, **params: Any) -> Token:
        assert params["reduction_op"] == "add"
        trees = [params[f"{name}_transforms_treedef"] for name in ("src", "dst")]
        machine, count = Machine(self, token, eqn.source_info), trees[0].num_leaves
        parts = zip(trees, (leaves[:count], leaves[count:]), (source, target), eqn.invars[:2], strict=True)
        source, target = (_ref(v.aval, value, jax.tree.unflatten(tree, part)) for tree, part, value, v in parts)
        machine.copy_added(source, target)
        return machine.token

    def _interpret_copy_gmem_to_smem_p(self, eqn: Any, token: Token, get_invals: Any) -> tuple[Token, list[Any]]:
        copy, values = super()._interpret_copy_gmem_to_smem_p, get_invals()
        if not eqn.params["has_user_predicate"]:
            return copy(eqn, token, lambda: values)
        *values, predicate = values

        def skip(token: Token) -> Token:
            if not _FALSE_PREDICATE_ARRIVES:
                return token
            trees = [eqn.params[f"{name}_transforms_treedef"] for name in ("src", "dst", "barrier")]
            leaves = values[3 + trees[0].num_leaves + trees[1].num_leaves :]
            machine = Machine(self, token, eqn.source_info)
            machine.arrive(Ref(values[2], jax.tree.unflatten(trees[2], leaves), eqn.invars[2].aval))
            return machine.token

        return lax.cond(predicate, lambda t: copy(eqn, t, lambda: values)[0], skip, token), []


def _is_ours(eqn: Any, ours: Any) -> bool:
    if eqn.primitive is gpu_primitives.wgmma_ref_p:  # only with a left operand in registers
        return not isinstance(eqn.invars[1].aval, state_types.AbstractRef)
    if eqn.primitive is lax.optimization_barrier_p:  # only where a product may have begun in registers
        return len(eqn.invars) == 1 and eqn.invars[0].aval.ndim == 2 and eqn.invars[0].aval.dtype == jnp.float32
    if eqn.primitive is pjit.jit_p:  # only one that uses references
        return bool(eqn.effects)
    return eqn.primitive in ours


def _hardware_exp2(x: jax.Array) -> jax.Array:
    """`ex2.approx.ftz.f32`: good to 2 ulp everywhere, where the CPU's `exp2(x)` errs by |x| ulps; subnormals are 0."""
    n = jnp.round(jnp.clip(x, -150, 150))
    low = jnp.floor(n / 2)
    y = jnp.exp((x - n) * np.float32(np.log(2)))
    for part in (low, n - low):
        y *= lax.bitcast_convert_type((part.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(y < jnp.finfo(jnp.float32).tiny, 0.0, y)


def _place(aval: Any, value: Any, transforms: Any) -> Ref:
    """A reference of which the type after its transforms does not matter, nor the order of its axes."""
    transforms = [t for t in transforms if not isinstance(t, state_types.TransposeTransform)]
    return Ref(*jaxpr_interpret.resolve_ref(aval, value, tuple(transforms)), aval)


def _ref(aval: Any, value: Any, transforms: Any) -> Ref:
    key, transforms = jaxpr_interpret.resolve_ref(aval, value, tuple(transforms))
    inner = aval.inner_aval
    for transform in transforms:
        inner = transform.transform_type(inner)
    return Ref(key, transforms, inner)


def _cut(argument: Any) -> Any:
    """What an operation gets: the reference that a `ptx.Part` means."""
    if not isinstance(argument, ptx.Part):
        return argument
    ref = argument.ref
    for place in argument.places:
        indexer = indexing.NDIndexer.from_indices_shape(place, ref.shape)
        ref = Ref(ref.key, (*ref.transforms, indexer), indexer.transform_type(ref.aval))
    return ref


def install() -> None:
    """Makes every interpreted kernel of this process use `HopperInterpreter`."""
    if jax.__version__ not in TESTED_VERSIONS:
        raise ImportError(f"the interpreter shim is tested on JAX {TESTED_VERSIONS}, not on {jax.__version__}")
    assert interpret_pallas_call.jaxpr_interpret is jaxpr_interpret
    jaxpr_interpret.JaxprInterpreter = HopperInterpreter
    abort_allocated = memory.GPUSharedMemory._abort_waiters

    def abort_waiters(self: Any) -> None:
        abort_allocated(self)
        for barrier in self.named_barriers.values():
            barrier.abort()

    memory.GPUSharedMemory._abort_waiters = abort_waiters
    jax_callback.io_callback_impl, memory._to_int = _call_back, _to_int
    thread_map.thread_map, thread_map._run_jaxpr = _thread_map, numpy_eval.evaluate
    numpy_eval.RULES["io_callback"] = lambda eqn: functools.partial(_call_back, **eqn.params)
    if _FALSE_PREDICATE_ARRIVES:
        memory.Barrier.deallocate = _deallocate_like_newer


def _thread_map(f: Any, num_threads: Any, token: Any, *arguments: Any, **options: Any) -> Any:
    """JAX's, which has XLA compile the program of a single thread within the caller's."""
    inner = jnp.int32(thread_map.NESTED_TOKEN_VALUE)
    jaxpr = jax.make_jaxpr(lambda i, *values: f(i, inner, *values))(jnp.int32(0), *arguments)
    options = {"device_id": None, "use_ordered_callback": False, "on_exception": lambda *_, **__: None} | options
    return thread_map._call_threadmap_callback(
        token, jaxpr=jaxpr, num_threads=num_threads, consts=jaxpr.consts, invals=arguments, **options
    )


def _call_back(*arguments: np.ndarray, callback: Any, **_: Any) -> list[np.ndarray]:
    """`io_callback`'s: JAX's own moves every argument to a device and back, which takes three quarters of a test.

    Arguments are copied, for they are views of memory that XLA takes back, and buffers keep them.
    """
    run = getattr(callback.callback_func, "func", None)
    with contextlib.nullcontext() if run is thread_map._thread_map_callback else progress.operation():
        return [np.asarray(result) for result in callback(*map(np.array, arguments))]


def _to_int(x: Any) -> Any:
    return x.item() if isinstance(x, np.ndarray) else x


def races_found() -> bool:
    """Whether the last interpreted kernel had a race."""
    return gpu_callbacks._races is not None and gpu_callbacks._races.races_found


def abort(error: Exception) -> None:
    """Makes every thread of the running kernel raise."""
    gpu_callbacks._get_shared_memory().set_failed(error, top_level=False)


def reset() -> None:
    """Forgets the last kernel, however it ended."""
    gpu_callbacks.reset_gpu_interpret_mode_state()


def _deallocate_like_newer(self: Any) -> None:
    """JAX 0.12 no longer demands that each waiter saw a barrier's last phase; the last phase of a loop often is not."""
    with self.cv:
        self.ref_count -= 1
        if self.ref_count == 0 and self.arrivals_count:
            raise ValueError(f"barrier deallocated with {self.arrivals_count} arrivals pending")
