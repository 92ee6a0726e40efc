"""Sizes at the edge of what the kernels can hold or count: declined in words, never refused by the compiler."""

import dataclasses
import itertools

import attention_cases
import cases
import choices
import jax
import pytest
from cases import DTYPES, Op, Problem

from pallas_kernels.attention import dispatch as attention_dispatch
from pallas_kernels.attention.problem import Op as AttentionOp
from pallas_kernels.hardware import H200
from pallas_kernels.softmax import dispatch, grid, staged
from pallas_kernels.softmax.dispatch import KERNELS
from pallas_kernels.softmax.grid import GridConfig
from pallas_kernels.softmax.online import OnlineConfig
from pallas_kernels.softmax.staged import StagedConfig
from pallas_kernels.softmax.warp import WarpConfig

LENGTHS = (1, 128, 1000, 4096, 8191, 16384, 32000, 50257, 65537, 98304, 128256, 262144, 1000003, 2**20, 2**22, 2**24)


def test_calls_get_what_is_recorded_for_them():
    assert choices.record() == choices.RECORD.read_text(), (
        "PYTHONPATH=.:tests python tests/pallas_kernels/choices.py, if it is meant"
    )


def declined(problem):
    decision = dispatch.decide(problem, H200)
    assert decision.kernel is None
    return dict(decision.declined)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("rows, cols", [(0, 8), (8, 0)])
def test_nothing_to_do(op, rows, cols):
    assert set(declined(Problem(op, rows, cols, DTYPES[0])).values()) == {"there is nothing to do"}


def test_columns_past_32_bits_are_declined():
    reasons = declined(Problem(Op.STATS, 1, 2**31, DTYPES[1]))
    assert all("32 bits" in reasons[name] for name in ("grid", "online"))


@pytest.mark.parametrize("op", [Op.STATS, Op.LOG_SOFTMAX_TANGENT])
def test_a_row_over_the_grid_has_its_statistics_in_one_block(op):
    """At most 2048 of three values, 32 KiB in each of two buffers, beside the CTA's slice of the row."""
    taken = []
    for cols in (2**20, 2**22, 9_830_400, 2**24, 20_000_000, 2**26, 2**28):
        problem = Problem(op, 1, cols, DTYPES[1])
        (config,) = dispatch.grid_configs(problem, H200)
        assert config.ctas <= 2048
        fits = grid.shared_bytes(problem, config) < 227 * 1024
        assert (KERNELS["grid"].unsupported(problem, H200) is None) == fits
        taken.append(fits)
    assert True in taken
    assert False in taken


@pytest.mark.parametrize(
    "kind, fields, name",
    [
        (WarpConfig, (24, 1), "lanes"),
        (WarpConfig, (64, 1), "lanes"),
        (StagedConfig, (17, 1, 1, 1, 1), "ctas"),
        (StagedConfig, (1, 1, 1, 0, 1), "stages"),
        (StagedConfig, (1, 1, 1, 1, 1, -1), "register_chunks"),
        (GridConfig, (2, 0, 1, 1), "warpgroups"),
        (GridConfig, (2, 1, 1, 0), "lookahead"),
        (OnlineConfig, (1, 0), "registers"),
    ],
)
def test_a_config_that_cannot_be_is_refused(kind, fields, name):
    with pytest.raises(ValueError, match=f"{name} cannot be "):
        kind(*fields)


def test_interleaved_slices_take_no_labels():
    """What stands at a label is overwritten by the thread that wrote it, another where a CTA's chunks are apart."""
    problem = Problem(Op.CROSS_ENTROPY_GRADIENT, 8, 4096, DTYPES[2])
    config = StagedConfig(ctas=2, warpgroups=1, registers=1, stages=1, rows=1, interleaved=True)
    with pytest.raises(ValueError, match="side by side"):
        jax.eval_shape(cases.Case(KERNELS["cluster"], problem, config).run, *cases.shapes(problem))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_a_kernel_is_a_function_without_effects(kernel):
    problem = Problem(Op.SOFTMAX, 64, 1001, DTYPES[2])
    assert not jax.make_jaxpr(cases.default(kernel, problem).run)(*cases.shapes(problem)).effects


SHARED_BYTES = {"block": staged, "cluster": staged, "grid": grid}


@pytest.mark.parametrize("name", SHARED_BYTES)
@pytest.mark.parametrize("op", [op for op in Op if not op.takes_stats])
def test_every_config_of_rows_fits_in_shared_memory(op, name):
    """Of all that a kernel takes; what Mosaic allocates for it is compared in test_aot.py."""
    taken = 0
    for dtype, rows, cols, where in itertools.product(DTYPES, (1, 64, 4096), LENGTHS, ("none", "full")):
        problem = Problem(op, rows, cols, dtype, where=where)
        if (op.is_linear and where != "none") or KERNELS[name].unsupported(problem, H200) is not None:
            continue
        for config in KERNELS[name].configs(problem, H200):
            assert SHARED_BYTES[name].shared_bytes(problem, config) < H200.smem_per_cta, (problem, config)
            taken += 1
    assert taken


def test_few_long_rows_are_not_walked_by_a_block_each():
    reasons = declined(Problem(Op.SOFTMAX, 1, 2**28, DTYPES[1]))
    assert "2048 blocks needs 299008 bytes of shared memory" in reasons["grid"]
    assert "slower than XLA" in reasons["online"]
    assert dispatch.decide(Problem(Op.SOFTMAX, 200, 2**28, DTYPES[1]), H200).kernel == "online"


@pytest.mark.parametrize(
    "op, again, kernel",
    [(Op.STATS, 0, "online"), (Op.SOFTMAX, 1, "online"), (Op.SOFTMAX_TANGENT, 2, "online"), (Op.SOFTMAX, 2, "naive")],
)
def test_what_a_kernel_of_several_passes_moves(op, again, kernel):
    """It reads its operands in each, but where nothing is written."""
    problem = Problem(op, 200, 1000 if kernel == "naive" else 2**28, DTYPES[1])
    decision = dispatch.decide(problem, H200, kernel="naive" if kernel == "naive" else None)
    assert decision.kernel == kernel
    assert decision.bytes_moved == problem.least_bytes + again * problem.elements * problem.dtype.itemsize


def test_rows_up_to_256_mib_go_over_the_grid():
    for op in (op for op in Op if not op.takes_stats):
        for rows in (1, 200):
            problem = Problem(op, rows, 2**27 // (2 if op.is_linear else 1), DTYPES[1])
            assert dispatch.decide(problem, H200, alone=True).kernel == "grid"


CONSUMED = (Op.LOG_SOFTMAX, Op.LOG_SOFTMAX_TANGENT, Op.LOG_SOFTMAX_COTANGENT)


@pytest.mark.parametrize("op", CONSUMED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_who_computes_log_softmax(op, dtype):
    for rows, cols in itertools.product((1, 64, 8192), (1, 1000, 16384)):
        found = dispatch.decide(Problem(op, rows, cols, dtype), H200)
        if dtype.itemsize == 2:
            assert found == dispatch.decide(Problem(op, rows, cols, dtype), H200, alone=True)
            continue
        assert (found.kernel, found.problem.op, found.config) == (None, op, None)
        assert found.reason == "XLA reads such rows once, and fuses them with what consumes the result"
        own = {name: kernel.unsupported(found.problem, H200) for name, kernel in KERNELS.items()}
        assert dict(found.declined) == {name: why or found.reason for name, why in own.items()}
    for rows, cols, where in itertools.product((1, 64, 8192), (16385, 50257, 2**20), ("none", "shared", "full")):
        if where != "none" and op.is_linear:
            continue
        problem = Problem(op, rows, cols, dtype, where=where)
        found, stats = (dispatch.decide(p, H200) for p in (problem, dataclasses.replace(problem, op=Op.STATS)))
        assert (found.problem, found.chosen, found.config) == (stats.problem, stats.chosen, stats.config)
        assert found.bytes_moved == stats.bytes_moved
        assert found.reason == f"it finds the rows' statistics, and XLA computes the rest, {FUSED}; {stats.reason}"


FUSED = "which it fuses with what consumes the result"


@pytest.mark.parametrize("op", CONSUMED)
def test_who_computes_log_softmax_alone(op):
    for cols in (1000, 50257):
        problem = Problem(op, 64, cols, DTYPES[1])
        invariant = dataclasses.replace(problem, batch_invariant=True)
        name = dispatch.decide(problem, H200, alone=True).kernel
        for found in (dispatch.decide(invariant, H200), dispatch.decide(problem, H200, kernel=name)):
            assert found.kernel in KERNELS
            assert found.problem.op is op
        inner = dispatch.decide(dataclasses.replace(problem, inner=7), H200)
        assert (inner.kernel, inner.reason) == (None, "no kernel takes the problem")


@pytest.mark.parametrize("op", AttentionOp)
@pytest.mark.parametrize("name", ["batch", "query_length", "key_length", "head_dim", "value_dim"])
def test_no_attention_of_nothing(op, name):
    problem = attention_cases.problem_of(op, {}, (64, 64), (64, 64), "bfloat16", (2, 1))
    nothing = attention_dispatch.decide(dataclasses.replace(problem, **{name: 0}), H200)
    assert nothing.kernel is None
    assert all("nothing to do" in why or "it is 0" in why for _, why in nothing.declined)
