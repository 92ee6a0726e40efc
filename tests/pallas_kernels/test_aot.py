"""Every kernel and config, compiled for an H200 without one: only what is said spills, and nothing is ignored.

And what XLA makes of the derivative that follows a kernel.
"""

import functools
import itertools
import re

import aot
import cases
import jax
import jax.numpy as jnp
import pytest
import toy
from cases import DTYPES, Op, Problem
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from selected import cases_for

import jaxsoftmax
from pallas_kernels.hardware import H200
from pallas_kernels.softmax import dispatch, grid, row_ops, staged
from pallas_kernels.softmax.dispatch import KERNELS
from pallas_kernels.softmax.staged import StagedConfig

pytestmark = pytest.mark.aot

SHAPES = (
    (262144, 256), (32767, 1000), (8765, 4096), (4096, 6001), (4096, 8192), (4096, 12001), (2048, 32768),
    (4096, 50257), (1024, 65536), (512, 131072), (1024, 151936), (256, 262144), (64, 1048576), (1, 131072),
)  # fmt: skip


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

# Bytes a thread, which stay in L1: the warp's longest float32 row, which runs at 0.99 of a copy all the same.
_MAY_SPILL = {("warp", "none"): 8}

# Bytes of the rows that come to a kernel.
_SHORTEST = {"grid": 2**17}


def _chosen():
    """What `decide` gives each operation and shape, with every config of the chosen kernel; the dtypes alternate."""
    seen = set()
    for i, op in enumerate(Op):
        # The cross entropy without its gradient has the loops of the statistics, and its gradient without them one.
        for j, (rows, cols) in enumerate(SHAPES[::4] if op is Op.CROSS_ENTROPY or op.takes_stats else SHAPES):
            problem = Problem(op, rows, cols, DTYPES[(i + j) % 3])
            name = dispatch.decide(problem, H200, alone=True).kernel
            for case in cases.every_config(KERNELS[name], problem) if name else ():
                seen.add((name, case.problem.dtype.itemsize, case.config))
                yield case
    for i, (rows, cols) in enumerate(SHAPES[1::2]):
        problem = Problem(Op.CROSS_ENTROPY_GRADIENT, rows, cols, DTYPES[i % 3])
        kernel = KERNELS[dispatch.decide(problem, H200, alone=True).kernel or ""]
        yield from (
            cases.default(kernel, form) for form in cases.losses(kernel, problem.op, problem.dtype, rows, cols)[:2]
        )
    for rows, cols in SHAPES:
        for dtype in DTYPES:
            for kernel in KERNELS.values():
                # Shorter rows never get there, and nearly each length would be another config.
                if cols * dtype.itemsize < _SHORTEST.get(kernel.name, 0):
                    continue
                problem = Problem(Op.SOFTMAX, rows, cols, dtype, where="full", scale=-0.5)
                for case in cases.every_config(kernel, problem) if cases.takes(kernel, problem) else ():
                    if (key := (kernel.name, dtype.itemsize, case.config)) not in seen:
                        seen.add(key)
                        yield case


@pytest.mark.parametrize("case", cases_for("aot", _chosen), ids=str)
def test_compiles_within_the_registers(case):
    with jax.enable_checks(True):
        reports = aot.compile_for_h200(case.run, *cases.shapes(case.problem))
    assert reports, "no Mosaic kernel was compiled"
    most = _MAY_SPILL.get((case.kernel.name, case.problem.where), 0)
    for report in reports:
        assert max(report.spill_bytes, report.stack_bytes) <= most, report.ptxas_log
        assert not report.complaints, report.complaints
        assert not report.shares_scratch, "warpgroups reduce through the same shared memory"
        assert report.registers * report.threads <= 65536
        assert report.smem < H200.smem_per_cta


@pytest.mark.parametrize(
    "ctas, op, dtype, cols, interleaved",
    [
        (2, Op.SOFTMAX, 0, 2**20, None), (2, Op.SOFTMAX, 1, 900000, None),
        (2, Op.LOG_SOFTMAX, 2, 2**19, None), (2, Op.SOFTMAX_TANGENT, 2, 2**18, None),
        (3, Op.SOFTMAX, 0, 2**19, True), (3, Op.LOG_SOFTMAX, 2, 2**18, True),
        (3, Op.LOG_SOFTMAX, 0, 2**17, False), (3, Op.SOFTMAX, 2, 2**16, False),
    ],
)  # fmt: skip
def test_chunks_in_registers_leave_room_for_several_ctas(ctas, op, dtype, cols, interleaved):
    """Slices at powers of two for three, others for two."""
    problem = Problem(op, 1024, cols, DTYPES[dtype])
    (config,) = dispatch.cluster_configs(problem, H200)
    assert config.register_chunks
    assert interleaved in (None, config.interleaved)
    (report,) = aot.compile_for_h200(cases.Case(KERNELS["cluster"], problem, config).run, *cases.shapes(problem))
    assert report.spill_bytes == 0
    assert ctas * report.registers * report.threads <= 65536
    assert ctas * (report.smem + 1024) <= H200.smem_per_cta + 1024


_LONGEST = Problem(Op.LOG_SOFTMAX_TANGENT, 1, 2**23 - 5, DTYPES[1])


@pytest.mark.parametrize(
    "kernel, problem, config",
    [
        ("block", Problem(Op.SOFTMAX_TANGENT, 21, 20011, DTYPES[1]), StagedConfig(1, 4, 2, 1, 1)),
        ("block", Problem(Op.CROSS_ENTROPY_GRADIENT, 21, 20011, DTYPES[1]), StagedConfig(1, 2, 2, 1, 1)),
        ("cluster", Problem(Op.SOFTMAX_TANGENT, 21, 20011, DTYPES[1]), StagedConfig(3, 1, 3, 2, 4)),
        ("cluster", Problem(Op.CROSS_ENTROPY_GRADIENT, 21, 20011, DTYPES[1]), StagedConfig(3, 1, 3, 2, 4)),
        ("grid", _LONGEST, dispatch.grid_configs(_LONGEST, H200)[0]),
    ],
    ids=str,
)
def test_shared_memory_is_what_mosaic_allocates(kernel, problem, config):
    (report,) = aot.compile_for_h200(cases.Case(KERNELS[kernel], problem, config).run, *cases.shapes(problem))
    assert report.smem == (grid if kernel == "grid" else staged).shared_bytes(problem, config)


def test_configs_that_do_not_fit_are_not_offered():
    problem = Problem(Op.SOFTMAX_TANGENT, 21, 50257, DTYPES[1])
    two, four = dispatch.block_configs(problem, H200)
    assert staged.shared_bytes(problem, four) == H200.smem_per_cta, "with Mosaic's own byte, one too many"
    assert KERNELS["block"].configs(problem, H200) == (two,)


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_reductions_through_the_same_scratch_are_seen(warpgroups):
    (report,) = aot.compile_for_h200(toy.centre, jax.ShapeDtypeStruct((warpgroups, 1024), jnp.float32))
    assert report.shares_scratch == (warpgroups > 1)


@pytest.mark.parametrize("op, rows", [(Op.SOFTMAX, 262144), (Op.LOG_SOFTMAX, 262141)])
def test_short_rows_are_loaded_two_at_a_time(op, rows):
    case = cases.default(KERNELS["warp"], Problem(op, rows, 256, DTYPES[1]))
    assert case.config.tiles == 2
    (report,) = aot.compile_for_h200(case.run, *cases.shapes(case.problem))
    assert report.spill_bytes == 0
    loads, shuffles = (
        [m.start() for m in re.finditer(text, report.ptx)] for text in ("ld.global.v4", "shfl.sync.bfly")
    )
    assert len(loads) == 2
    assert max(loads) < min(shuffles)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("name, cols", [("block", 6000), ("cluster", 65536), ("online", 1000), ("grid", 2**20)])
def test_a_sum_over_warps_is_one_lanes(name, cols, planted, monkeypatch):
    """Others may differ in the last bit. The kernels that merge all do so in one place."""
    if planted:
        monkeypatch.setattr(row_ops, "of_first_lane", lambda value, tile: value)
    case = cases.default(KERNELS[name], Problem(Op.SOFTMAX, 64, cols, DTYPES[2]))
    (report,) = aot.compile_for_h200(case.run, *cases.shapes(case.problem))
    assert (re.search(r"shfl\.sync\.idx\.b32 .*, 0x1f", report.ptx) is None) == planted


@pytest.mark.parametrize(
    "rows, cols, dtype",
    [
        *zip((262144, 8765, 4096, 2048, 4096), (256, 4096, 50257, 262144, 2**20), itertools.cycle(DTYPES)),
        (64, 2**20, DTYPES[0]),
        (64, 2**20, DTYPES[2]),
        (1, 131072, DTYPES[2]),
    ],
)
def test_softmax_and_its_gradient_take_little_memory_beside_results(rows, cols, dtype):
    """None; over the grid, a workspace of a byte for each 4 KiB of an operand."""

    def value_and_vjp(x, cotangent):
        value, pull = jax.vjp(jaxsoftmax.softmax, x)
        return value, pull(cotangent)

    operands = [jax.ShapeDtypeStruct((rows, cols), dtype)] * 2
    program = jax.jit(value_and_vjp).lower(*aot.on_h200(operands)).compile()
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 2
    workspace = rows * cols * dtype.itemsize // 4096 if cols == 2**20 else 0
    assert program.memory_analysis().temp_size_in_bytes <= workspace + 1024 * (workspace > 0)


@pytest.mark.slow
@pytest.mark.parametrize("dim, causal", [(64, True), (256, False)])
def test_attention_takes_memory_for_the_sums_of_its_queries_gradient(dim, causal):
    """And for a few numbers of each row; the CTAs' tiles are another few KiB."""
    batch, length, heads = 2, 8192, 4
    rows = batch * length * heads

    def forward(q, k, v, d_out):
        return jaxsoftmax.flash_attention(q, k, v, is_causal=causal, return_residual=True)

    def gradients(q, k, v, d_out):
        return jax.vjp(lambda *qkv: jaxsoftmax.flash_attention(*qkv, is_causal=causal), q, k, v)[1](d_out)

    def taken(f):
        operands = [jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.bfloat16)] * 4
        program = jax.jit(f).lower(*aot.on_h200(operands)).compile()
        assert "mosaic_gpu" in program.as_text()
        return program.memory_analysis().temp_size_in_bytes

    assert taken(forward) <= 4 * rows + 4096
    assert taken(gradients) <= 4 * rows * (dim + 2) + 4096


@pytest.mark.parametrize(
    "cotangent, dtype",
    [("mean", "bfloat16"), ("mean, without its value", "float16"), ("masked mean", "float32"), ("lse", "bfloat16")],
)
def test_the_gradient_for_any_cotangent_reads_twice_and_writes_once(cotangent, dtype):
    """Three passes over the logits: a kernel reads them; another, or of the logsumexp a loop, writes the gradient."""
    rows, cols, dtype = 4096, 50257, jnp.dtype(dtype)

    def total(x, y):
        if cotangent.startswith("mean"):
            return jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, y).mean()
        counts = y >= 0
        losses, lse = jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, y, ignore_index=-1, return_lse=True)
        return ((losses + 1e-4 * lse**2 if cotangent == "lse" else losses) * counts).sum() / counts.sum()

    operands = jax.ShapeDtypeStruct((rows, cols), dtype), jax.ShapeDtypeStruct((rows,), jnp.int32)
    without_value = cotangent.endswith("value")
    function = (jax.grad if without_value else jax.value_and_grad)(total)
    program = jax.jit(function).lower(*aot.on_h200(operands)).compile()
    text = program.as_text()
    lines = text[text.index("\nENTRY") :].splitlines()
    (logits,) = (re.match(r"\s*(%\S+) = \S+ parameter\(0\)", line)[1] for line in lines if "parameter(0)" in line)
    kernels = [line for line in lines if "mosaic_gpu" in line and "custom-call(" in line]
    made = [line for line in lines if re.search(rf"= \S*\[{rows},{cols}\]", line)]
    writing = [line for line in made if not re.search(r" (parameter|get-tuple-element)\(", line)]
    reducing = [line for line in lines if "kind=kInput" in line and f"{logits}," in line.replace(")", ",")]
    assert len(writing) == 1, "more than the gradient is written"
    by_xla = cotangent == "lse"
    assert len(kernels) == (1 if by_xla or without_value else 2)
    if not without_value:
        assert f"[{rows},{cols}]" not in kernels[0].split("custom-call(")[0], "the first kernel writes a gradient"
    assert ("kind=kLoop" if by_xla else "mosaic_gpu") in writing[0]
    assert not reducing, "XLA reduces over the logits, too"
    assert program.memory_analysis().temp_size_in_bytes < 0.01 * rows * cols * dtype.itemsize


def test_spills_are_seen():
    (report,) = aot.compile_for_h200(toy.softmax, jax.ShapeDtypeStruct((64, 12288), jnp.bfloat16))
    assert report.spill_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, kind, batch, heads",
    [(PartitionSpec("d"), AxisType.Auto, 4, 4), (PartitionSpec(None, None, "d"), AxisType.Explicit, 2, 8)],
    ids=["batch", "heads"],
)
def test_attention_over_two_gpus_needs_no_collective(spec, kind, batch, heads):
    """The partitioner lowers what a device does anew, and takes no kernel that has an effect.

    A mesh of explicit axes is in the operands' types, and in no context.
    """
    mesh = aot.two_gpus(kind)
    x = jax.ShapeDtypeStruct((batch, 256, heads, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    by_batch = PartitionSpec(*spec[:1])
    mask = jax.ShapeDtypeStruct((batch, 1, 256, 256), jnp.bool_, sharding=NamedSharding(mesh, by_batch))

    def gradients(q, k, v, g, mask):
        return jax.vjp(lambda *x: jaxsoftmax.flash_attention(*x, mask=mask, is_causal=True), q, k, v)[1](g)

    hlo = jax.jit(gradients).lower(x, x, x, x, mask).compile().as_text()
    assert "mosaic_gpu" in hlo
    assert not [word for word in COLLECTIVES if word in hlo]


@pytest.mark.slow
def test_a_sequence_over_two_gpus_gathers_keys_alone():
    mesh = aot.two_gpus(AxisType.Explicit)
    sharding = NamedSharding(mesh, PartitionSpec(None, "d"))
    query, key = (jax.ShapeDtypeStruct((1, 4096, n, 128), jnp.bfloat16, sharding=sharding) for n in (8, 2))
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32, sharding=sharding)

    def gradients(q, k, v, g, ids):
        places = {"query_positions": ids, "key_value_positions": ids}
        call = lambda *x: jaxsoftmax.flash_attention(*x, **places, query_segment_ids=ids, is_causal=True)
        return jax.vjp(call, q, k, v)[1](g)

    hlo = jax.jit(gradients).lower(query, key, key, query, ids).compile().as_text()
    assert "mosaic_gpu" in hlo
    assert {word for word in COLLECTIVES if word in hlo} == {"all-gather", "reduce-scatter"}
    assert not re.findall(r"= [^=]*\b8,128\][^=]* all-gather", hlo)
    assert " sort(" not in hlo  # of few runs of keys, for which XLA starts many kernels


@functools.cache
def in_a_ring(devices, **options):
    """A program for 65536 queries and keys on each device, as where gathering would take too much memory."""
    sharding = NamedSharding(aot.two_gpus(count=devices), PartitionSpec(None, "d"))
    of = lambda n: jax.ShapeDtypeStruct((1, 65536 * devices, n, 128), jnp.bfloat16, sharding=sharding)
    run = lambda q, k, v: jaxsoftmax.flash_attention(q, k, v, is_causal=True)
    compiled = jax.jit(run).lower(of(8), of(4), of(4)).compile(compiler_options=options)
    assert {word for word in COLLECTIVES if word in compiled.as_text()} == {"collective-permute"}
    return compiled


@pytest.mark.slow
def test_memory_of_a_ring_does_not_depend_on_the_devices():
    """One key head of four takes its operands, two blocks and a float32 state; on two devices, one and an output."""
    of_two, of_four, of_eight = (in_a_ring(n).memory_analysis().temp_size_in_bytes for n in (2, 4, 8))
    block, outputs = 2 * 2 * 65536 * 128, 65536 * 2 * 128
    operands = 2 * outputs + block
    assert of_eight == of_four <= 1.05 * (operands + 2 * block + 4 * outputs)
    assert of_two <= 1.05 * (operands + block + 2 * outputs)


@pytest.mark.slow
def test_blocks_come_beside_kernels_where_xla_may_overlap_collectives():
    awaited = lambda compiled: re.findall(r" collective-permute\(", compiled.as_text())
    assert len(awaited(in_a_ring(2))) == 1
    assert not awaited(in_a_ring(2, xla_gpu_experimental_parallel_collective_overlap_limit=4))


def test_rows_over_two_gpus_need_no_collective():
    """Of a kernel whose CTAs meet in global memory."""
    mesh = aot.two_gpus(AxisType.Explicit)
    x = jax.ShapeDtypeStruct((64, 2**20), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d")))
    hlo = jax.jit(jaxsoftmax.softmax).lower(x).compile().as_text()
    assert "softmax_grid" in hlo
    assert not [word for word in COLLECTIVES if word in hlo]


def test_devices_sum_the_gradient_of_a_weight_beside_a_product():
    """In the weight's dtype, between the product that gives the gradient and that of the hidden states' gradient."""
    on = lambda *spec: NamedSharding(aot.two_gpus(), PartitionSpec(*spec))
    hidden = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16, sharding=on("d"))
    weight = jax.ShapeDtypeStruct((512, 32000), jnp.bfloat16, sharding=on())
    labels = jax.ShapeDtypeStruct((2048,), jnp.int32, sharding=on("d"))
    loss = lambda *operands: jaxsoftmax.linear_cross_entropy(*operands, weights=1 / 2048).sum()
    hlo = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, weight, labels).compile().as_text()
    steps = [line for line in hlo[hlo.index("ENTRY") :].splitlines() if "[512,32000]" in line or "dot" in line]
    (start,) = (i for i, line in enumerate(steps) if re.search(r"bf16\[512,32000\].* all-reduce-start\(", line))
    (done,) = (i for i, line in enumerate(steps) if "all-reduce-done(" in line)
    assert sum(bool(re.search(r"dot\S* = ", line)) for line in steps[start + 1 : done]) == 1


@pytest.mark.parametrize(
    "spec, kind, gathers",
    [(("d",), AxisType.Auto, 0), ((None, "d"), AxisType.Explicit, 1)],
    ids=["rows", "columns"],
)
def test_losses_and_selections_over_two_gpus(spec, kind, gathers):
    """In a program of 64 bits, too, whose kernels count in 32. Columns exchange numbers in one all-gather."""
    mesh = aot.two_gpus(kind)
    x = jax.ShapeDtypeStruct((128, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    labels = jax.ShapeDtypeStruct((128,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(*spec[:1])))

    def both(x, labels):
        total = lambda x: jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, labels).sum(keepdims=True)
        return jax.vjp(total, x)[1](jnp.ones(1, jnp.float32)), jaxsoftmax.top_k_softmax(x, 4)

    with jax.enable_x64(True):
        hlo = jax.jit(lambda x, labels: both(x, labels)[1]).lower(x, labels).compile().as_text()
        gradient = jax.jit(lambda x, labels: both(x, labels)[0]).lower(x, labels).compile().as_text()
    for text in (hlo, gradient):
        assert "mosaic_gpu" in text
        found = re.findall(rf"= (\(.*?\)|\S+) ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
        assert [kind for _, kind in found] == ["all-gather"] * gathers
        assert all(set(re.findall(r"[a-z]+\d+(?=\[)", arrays)) == {"s32"} for arrays, _ in found)


def one_hot_loss(x, labels):
    return -(jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype) * jaxsoftmax.log_softmax(x)).sum(dtype=jnp.float32)


@pytest.mark.parametrize("dtype, cols, kernels", [("float32", 16384, 0), ("bfloat16", 50257, 1)])
def test_log_softmax_in_a_loss_has_at_most_its_statistics_from_a_kernel(dtype, cols, kernels):
    """Once for the value and the gradient, which XLA computes without another array of the logits' size."""
    operands = aot.on_h200([jax.ShapeDtypeStruct((512, cols), dtype), jax.ShapeDtypeStruct((512,), jnp.int32)])
    compiled = jax.jit(jax.value_and_grad(one_hot_loss)).lower(*operands).compile()
    assert len(re.findall(r'custom_call_target="mosaic_gpu', compiled.as_text())) == kernels
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * 512 * cols


def passes(function, *operands):
    """How many programs XLA makes of a function, and the bytes that these hold beside operands and results."""
    compiled = jax.jit(function).lower(*aot.on_h200(operands)).compile()
    text = compiled.as_text()
    return len(re.findall(r" fusion\(", text[text.index("ENTRY") :])), compiled.memory_analysis().temp_size_in_bytes


FORMS = {
    "forward": lambda f, x, t: f(x),
    "vjp": lambda f, x, t: (lambda y, pull: (y, pull(t)))(*jax.vjp(f, x)),
    "jvp": lambda f, x, t: jax.jvp(f, (x,), (t,)),
    "sum": lambda f, x, t: jax.value_and_grad(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("form", FORMS)
def test_xla_reads_log_softmax_as_often_as_that_of_jax(form):
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    ours, theirs = (
        passes(functools.partial(FORMS[form], f), x, x) for f in (jaxsoftmax.log_softmax, jax.nn.log_softmax)
    )
    assert ours[0] <= theirs[0]
    assert ours[1] <= theirs[1]


def reads(function, x):
    """How many of XLA's programs for a function read its operand."""
    text = jax.jit(function).lower(*aot.on_h200([x])).compile().as_text()
    entry = text[text.index("ENTRY") :]
    name = re.search(r"%(\S+) = \S+ parameter\(0\)", entry)[1]
    return len(re.findall(rf" fusion\([^)]*%{re.escape(name)}\b", entry))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name, times", [("softmax", 2), ("log_softmax", 2), ("logsumexp", 1)])
def test_xla_reads_strided_rows_once_for_their_state(name, times, axis):
    """And once more for a result of their size; by `jax.nn` once more often."""
    x = jax.ShapeDtypeStruct((64, 4096, 512), jnp.float32)
    ours, theirs = (reads(functools.partial(getattr(f, name), axis=axis), x) for f in (jaxsoftmax, jax.nn))
    assert (ours, theirs) == (times, times + 1)


def test_xla_reads_a_loss_of_probabilities_once():
    x = jax.ShapeDtypeStruct((1024, 768), jnp.bfloat16)
    assert passes(jaxsoftmax.softmax_cross_entropy, x, x)[0] == 1


@pytest.mark.parametrize("form", ["forward", "vjp"])
def test_xla_reads_channels_as_often_as_softmax_of_jax(form):
    x = jax.ShapeDtypeStruct((4, 19, 256, 256), jnp.bfloat16)
    ours, theirs = (
        passes(functools.partial(FORMS[form], functools.partial(f, axis=1)), x, x)
        for f in (jaxsoftmax.softmax, jax.nn.softmax)
    )
    assert ours[0] <= theirs[0]
