"""The interpreter shim itself: what it adds works, and what is wrong in a kernel is seen."""

import functools
import itertools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import Deadlock, RaceDetected, interpret
from jax import lax
from simulated_gpu import _runs

F32 = jnp.float32
pytestmark = pytest.mark.timeout(120)


def asm(model, **types):
    """An inline operation of which only the model matters here."""

    def op(ctx, *arguments):
        raise NotImplementedError

    op.interpret = model
    return plgpu.inline_mgpu(**types)(op)


cluster_sync = asm(lambda machine: machine.cluster_sync())


def arange(*shape):
    return jnp.arange(np.prod(shape), dtype=F32).reshape(shape)


def test_value_model_reads_and_writes():
    layout = plgpu.Layout.WG_STRIDED((256,), vec_size=2)
    load = asm(
        lambda r: ({}, [jnp.pad(r, (0, 56), constant_values=-jnp.inf)]),
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((256,), F32, layout=layout),
    )
    store = asm(lambda r, v: ({0: v[:200]}, []), arg_types=(plgpu.RefType(), layout))

    def body(x_gmem, y_gmem):
        i = lax.axis_index("row")
        store(y_gmem.at[i], load(x_gmem.at[i]) + 1)

    x = arange(3, 200)
    kernel = plgpu.kernel(body, out_type=x, grid=(3,), grid_names=("row",))
    np.testing.assert_array_equal(interpret(kernel, x), x + 1)


def copy_in_fours(x, *, offset=0, step=4, guard=True):
    """Copies a matrix by CTAs of four rows of 128 columns, of which only some lie in it."""
    tile = plgpu.Layout.WG_STRIDED((4, 128), vec_size=2)
    scalar = plgpu.Layout.WG_SPLAT

    def elements(ref, row):
        rows, cols = row + jnp.arange(4)[:, None], jnp.arange(128)[None, :]
        return (rows, cols + offset), (cols < ref.shape[1]) & ((rows < ref.shape[0]) | (not guard))

    def load_model(machine, ref, row):
        return [machine.gather(ref, *elements(ref, row), -1.0)]

    def store_model(machine, ref, value, row):
        machine.scatter(ref, *elements(ref, row), value)

    block = plgpu.ShapeDtypeStruct((4, 128), F32, layout=tile)
    load = asm(load_model, arg_types=(plgpu.RefType(), scalar), return_type=block)
    store = asm(store_model, arg_types=(plgpu.RefType(), tile, scalar))

    def body(x_gmem, y_gmem):
        row = step * lax.axis_index("block")
        store(y_gmem, load(x_gmem, row) + 1, row)

    return plgpu.kernel(body, out_type=x, grid=(-(-x.shape[0] // step),), grid_names=("block",))(x)


def test_gather_and_scatter_touch_only_what_is_inside():
    x = arange(6, 100)
    np.testing.assert_array_equal(interpret(copy_in_fours, x), x + 1)


def test_gather_outside_of_the_buffer_is_an_error():
    for fault in ({"guard": False}, {"offset": 1}, {"offset": -1}):
        with pytest.raises(jax.errors.JaxRuntimeError, match="outside"):
            interpret(functools.partial(copy_in_fours, **fault), arange(6, 100))


def test_two_blocks_writing_one_row_is_a_race():
    with pytest.raises(RaceDetected):
        interpret(functools.partial(copy_in_fours, step=3), arange(6, 100))


def exchange_by_reads(x, *, first_sync=True):
    """Every CTA of a cluster adds up what all of them put into shared memory; `k` warpgroups each."""
    rows, ctas, warpgroups, n = x.shape

    def body(x_gmem, y_gmem, part_smem):
        i, c, w = (lax.axis_index(name) for name in ("row", "cta", "wg"))
        part_smem[w] = x_gmem[i, c, w]
        if first_sync:
            cluster_sync()
        total = jnp.zeros((n,), F32)
        for peer in range(ctas):
            both = plgpu.load(plgpu.cluster_ref(part_smem, {"cta": peer}))
            for k in range(warpgroups):
                total += both[k]
        y_gmem[i, c, w] = total
        cluster_sync()

    return plgpu.kernel(
        body,
        out_type=x,
        grid=(rows,),
        grid_names=("row",),
        cluster=(ctas,),
        cluster_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((warpgroups, n), F32)],
    )(x)


def test_cluster_reads_of_peers():
    x = arange(2, 2, 2, 128)
    expected = np.broadcast_to(np.asarray(x).sum((1, 2), keepdims=True), x.shape)
    np.testing.assert_array_equal(interpret(exchange_by_reads, x), expected)


def test_cluster_read_without_barrier_is_a_race():
    with pytest.raises(RaceDetected):
        interpret(functools.partial(exchange_by_reads, first_sync=False), arange(1, 2, 2, 128))


def exchange_by_stores(x, *, own_op):
    """Each CTA of a pair sends its row to the other, and waits for the other's."""
    pairs, ctas, n = x.shape
    layout = plgpu.Layout.WG_STRIDED((n,), vec_size=1)

    def send_model(machine, value, ref, barrier, peer):
        machine.store(machine.peer(ref, cta=peer), value)
        machine.arrive(machine.peer(barrier, cta=peer))

    scalar = plgpu.Layout.WG_SPLAT
    send = asm(send_model, arg_types=(layout, plgpu.RefType(), plgpu.RefType(), scalar))

    def body(x_gmem, y_gmem, inbox_smem, arrived):
        i, c = lax.axis_index("pair"), lax.axis_index("cta")
        if own_op:
            send(x_gmem[i, c], inbox_smem, arrived, 1 - c)
        else:
            plgpu.async_store_smem(x_gmem[i, c], inbox_smem, arrived, cluster_idx=1 - c, cluster_dim="cta")
        plgpu.barrier_wait(arrived)
        y_gmem[i, c] = inbox_smem[...]

    return plgpu.kernel(
        body,
        out_type=x,
        grid=(pairs,),
        grid_names=("pair",),
        cluster=(ctas,),
        cluster_names=("cta",),
        scratch_types=[plgpu.SMEM((n,), F32), plgpu.Barrier(num_arrivals=1)],
    )(x)


@pytest.mark.parametrize("own_op", [False, True], ids=["async_store_smem", "inline"])
def test_stores_into_a_peers_shared_memory(own_op):
    x = arange(2, 2, 128)
    np.testing.assert_array_equal(interpret(functools.partial(exchange_by_stores, own_op=own_op), x), x[:, ::-1])


def test_exp2_is_as_good_as_the_hardwares():
    x = jnp.concatenate([jnp.linspace(-130, 127.9, 4089), jnp.array([0, -126, 127, jnp.nan, -jnp.inf, jnp.inf, -1e30])])

    def body(x_gmem, y_gmem):
        y_gmem[...] = jnp.exp2(x_gmem[...])

    y, truth = interpret(plgpu.kernel(body, out_type=x), x), np.exp2(np.asarray(x, np.float64))
    truth = np.where(truth < np.finfo(np.float32).tiny, 0, truth)
    np.testing.assert_allclose(np.asarray(y), truth.astype(np.float32), rtol=2.5e-7, atol=1.2e-38)


def test_pipeline_with_outputs():
    def body(x_gmem, y_gmem):
        def step(indices, x_smem, y_smem):
            y_smem[...] = x_smem[...] + 1
            plgpu.commit_smem()

        spec = plgpu.BlockSpec((1, 128), lambda i: (i, 0))
        pipeline = plgpu.emit_pipeline(step, grid=(4,), in_specs=[spec], out_specs=[spec], max_concurrent_steps=2)
        pipeline(x_gmem, y_gmem)

    x = arange(4, 128)
    np.testing.assert_array_equal(interpret(plgpu.kernel(body, out_type=x), x), x + 1)


@pytest.mark.parametrize("take", [True, False])
def test_predicated_copies(take):
    def body(x_gmem, y_gmem, smem, arrived):
        plgpu.copy_gmem_to_smem(x_gmem, smem, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(smem, y_gmem.at[0])
        plgpu.copy_smem_to_gmem(smem, y_gmem.at[1], predicate=lax.axis_index("c") == (0 if take else 1))
        plgpu.wait_smem_to_gmem(0)

    x = arange(128)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 128), F32),
        grid=(1,),
        grid_names=("c",),
        scratch_types=[plgpu.SMEM((128,), F32), plgpu.Barrier()],
    )
    y = interpret(kernel, x)
    np.testing.assert_array_equal(y[0], x)
    np.testing.assert_array_equal(y[1], x if take else jnp.full_like(x, jnp.nan))


@pytest.mark.parametrize("synced", [True, False])
def test_block_barrier(synced):
    sync = asm(lambda machine: machine.block_sync(1, warpgroups=2))

    def body(x_gmem, y_gmem, smem):
        w = lax.axis_index("wg")
        smem[w] = x_gmem[w]
        if synced:
            sync()
        y_gmem[w] = smem[1 - w]

    x = arange(2, 128)
    kernel = plgpu.kernel(body, out_type=x, num_threads=2, thread_name="wg", scratch_types=[plgpu.SMEM((2, 128), F32)])
    if synced:
        np.testing.assert_array_equal(interpret(kernel, x), x[::-1])
    else:
        with pytest.raises(RaceDetected):
            interpret(kernel, x)


def test_deadlock_is_reported():
    def body(x_gmem, y_gmem):
        @pl.when(lax.axis_index("cta") == 0)
        def _():
            cluster_sync()

        y_gmem[lax.axis_index("cta")] = x_gmem[...]

    x = arange(128)
    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((2, 128), F32), cluster=(2,), cluster_names=("cta",))
    with pytest.raises(Deadlock):
        interpret(kernel, x, limit_s=1.0)
    np.testing.assert_array_equal(interpret(exchange_by_reads, arange(1, 2, 2, 128)).shape, (1, 2, 2, 128))


def test_unmodelled_inline_operation_is_an_error():
    op = plgpu.inline_mgpu()(lambda ctx: None)

    def body(x_gmem, y_gmem):
        op()
        y_gmem[...] = x_gmem[...]

    with pytest.raises(NotImplementedError, match="carries no"):
        interpret(plgpu.kernel(body, out_type=arange(128)), arange(128))


def test_stores_are_told_to_the_detector_element_by_element():
    """As ranges, or as the box that they fill: neither one too many nor one too few."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        at = rng.integers(3, 9, (rng.integers(1, 4), rng.integers(0, 60)))
        told = [[range(x.start, x.stop) if isinstance(x, slice) else (x,) for x in run] for run in _runs(at)]
        elements = sorted(place for run in told for place in itertools.product(*run))
        assert elements == sorted(set(zip(*at.tolist(), strict=True)))
    box = np.indices((2, 3)).reshape(2, -1) + 5
    assert _runs(box) == [(slice(5, 7, 1), slice(5, 8, 1))]
