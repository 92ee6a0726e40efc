"""Faults of the kernels of rows, of the selection and of the loss without logits, and the checks that reject them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import conformance
import jax
import jax.numpy as jnp
import pytest
import test_linear_cross_entropy as linear
import test_radix_select
import wrong
from cases import DTYPES
from interpreter import Deadlock, RaceDetected, interpret
from jax import lax

from jaxsoftmax._cross_entropy import linear_kernel
from pallas_kernels import monoid
from pallas_kernels.hardware import H200
from pallas_kernels.linear_cross_entropy import forward
from pallas_kernels.mosaic import fast_math, mbarrier, ptx, reduce, row_scalars, vectors
from pallas_kernels.softmax import row_ops, staged
from pallas_kernels.softmax.dispatch import KERNELS
from pallas_kernels.softmax.grid import GridConfig
from pallas_kernels.softmax.online import OnlineConfig
from pallas_kernels.softmax.problem import Op, Problem
from pallas_kernels.softmax.staged import StagedConfig
from pallas_kernels.top_k import radix_select
from tests.faults import NUMBERS, Fault, Table

DEADLOCK = "wrong numbers, or a deadlock"  # threads may wait for a phase that others, who run ahead, have left behind
# Each kernel at work with more than one of whatever it can have more than one of.
AT_WORK = {
    "naive": (None, 125),
    "warp": (None, 1001),
    "block": (StagedConfig(1, 2, 1, 2, 3), 1001),
    "online": (OnlineConfig(2, 1), 1001),
    "cluster": (StagedConfig(3, 2, 1, 1, 1), 2501),
    "grid": (GridConfig(3, 2, 1, 2), 2501),
}


class SolverCase(NamedTuple):
    """A problem that `wrong.solver` solves right without a fault."""

    dtype: Any
    op: Op = Op.SOFTMAX
    cols: int = 1000
    where: str = "none"
    scale: float = 1.0

    def problem(self) -> Problem:
        return Problem(rows=2 * len(cases.ROW_KINDS) + 1, **self._asdict())


_DTYPES = itertools.cycle(DTYPES)


def _solver(words, op=Op.SOFTMAX, cols=1000, where="none", scale=1.0, **knobs):
    """A knob of the solver is the fault; the faults have the dtypes in turn."""
    case = SolverCase(next(_DTYPES), op, cols, where, scale)
    return Fault(words, wrong.solver, lambda solver, problem: solver(problem, **knobs), case)


def check_solver(fault: Fault) -> None:
    problem = fault.case.problem()
    conformance.check(wrong.solver(problem), problem)


class KernelCase(NamedTuple):
    """A problem of a kernel, of as many columns as `AT_WORK` says if it says nothing else."""

    kernel: str
    op: Op = Op.SOFTMAX
    config: Any = None
    rows: int = len(cases.ROW_KINDS) + 1
    cols: int = 0
    scale: float = 1.0
    where: str = "none"
    smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None

    def problem(self) -> Problem:
        facts = self._asdict() | {"cols": self.cols or AT_WORK[self.kernel][1], "dtype": DTYPES[2]}
        return Problem(**{name: value for name, value in facts.items() if name not in ("kernel", "config")})


def check_kernel(fault: Fault) -> None:
    case = fault.case
    kernel, problem = KERNELS[case.kernel], case.problem()
    config = case.config or AT_WORK[case.kernel][0] or kernel.configs(problem, H200)[0]
    run = functools.partial(kernel.run, problem, config)
    conformance.check(run, problem, execute=functools.partial(functools.partial, interpret))


def _kernel(words, original, fault, kernel, op=Op.SOFTMAX, rejected_by=NUMBERS, **form):
    return Fault(words, original, fault, KernelCase(kernel, op, **form), rejected_by)


def _first_partial_only(merge_over, stats, axis, **keywords):
    merged = merge_over(stats, axis, **keywords)
    return (merged[0], *(part.max(axis) for part in stats[1:]))


def _left_out(operation, *arguments, **keywords):
    return None


def _own_numbers_only(across, buffer, values, *arguments):
    across(buffer, values, *arguments)
    return list(values)


def _first_member(grid_load, buffer, words, row, slots, warpgroups):
    partials = grid_load(buffer, words, row, slots, warpgroups)
    return [jnp.where(jnp.arange(buffer.slots) == 0, x, x * 0) for x in partials]


def _nothing_smoothed(with_factors, problem, stats, label_operands):
    stats = with_factors(problem, stats, label_operands)
    return stats._replace(factors=stats.factors[:1])


def _held_at_label(load_element, ref, *arguments):
    held = load_element(ref, *arguments)
    return held if ref.dtype != jnp.bool_ else jnp.ones_like(held)


_gradient = functools.partial(_kernel, op=Op.CROSS_ENTROPY_GRADIENT)
_given = functools.partial(_kernel, kernel="online", op=Op.CROSS_ENTROPY_COTANGENT)

SOLVER_FAULTS = (
    _solver("every output is 1/N", deliver=lambda y: jnp.full_like(y, 1 / y.shape[1])),
    _solver("the running maximum starts at 0", start=0.0),
    _solver("exp(-inf - -inf) is not guarded in decay", Op.STATS, decay=wrong.never_guarded),
    _solver("the last tile of the row is not folded in", tiles=slice(None, -1)),
    _solver("the first tile of the row is not folded in", tiles=slice(1, None)),
    _solver("columns come out in another order", deliver=lambda y: jnp.flip(y, 1)),
    _solver("the old sum is kept when the maximum grows", rescale=False),
    _solver("columns past the end are read as 0, not -inf", padding=0.0),
    _solver("the sum is accumulated in float16", cols=70000, accumulator=jnp.float16, tile_size=4096),
    _solver("the sum of the tangent is accumulated in float16", Op.SOFTMAX_TANGENT, accumulator=jnp.float16,
            tile_size=4096),
    _solver("`where` has no effect on the sum", where="full", use_mask=False),
    _solver("`where` of one row for all has no effect on the sum", where="shared", use_mask=False),
    _solver("`scale` has no effect", scale=0.5, use_scale=False),
    _solver("`scale` has no effect in the tangent", Op.SOFTMAX_TANGENT, scale=0.5, use_scale=False),
    _solver("each row gets its neighbour's result", deliver=lambda y: jnp.roll(y, 1, 0)),
    _solver("the last row is never written", deliver=lambda y: y.at[-1].set(jnp.nan)),
    _solver("the last column is never written", deliver=lambda y: y.at[:, -1].set(jnp.nan)),
    _solver("the tangent lacks its sum(y * t)", Op.SOFTMAX_TANGENT, inner_product=False),
    _solver("log_softmax with a maximum from 0", Op.LOG_SOFTMAX, start=0.0),
)  # fmt: skip

KERNEL_FAULTS = (
    _kernel("exp(-inf - -inf) is not guarded", monoid.decay,
            lambda decay, *a, exp=jnp.exp: wrong.never_guarded(*a, exp=exp), "online", Op.STATS),
    _kernel("the maximum is rounded once more than what it is subtracted from", monoid.decay,
            lambda decay, frm, to, **k: decay(frm, to * (1.0 + 2.0**-23), **k), "naive", scale=0.3),
    _kernel("columns past the end are read as 0", vectors.load,
            lambda load, *a, **k: load(*a, **k | {"fill": 0.0}), "warp"),
    _kernel("nothing is written", vectors.store, _left_out, "block"),
    _kernel("rows are written one further", vectors.store,
            lambda store, ref, row, *a, **k: store(ref, row + 1, *a, **k), "warp"),
    _kernel("the exponential is of base 2", fast_math.exp_for, lambda exp_for, dtype, unit: jnp.exp2, "online"),
    _kernel("the next row is staged", mbarrier.copy_row, lambda copy, ref, row, *a: copy(ref, row + 1, *a), "block"),
    _kernel("a copy's ends are left as they are", mbarrier.fill_outside, _left_out, "cluster"),
    _kernel("what a slice holds in registers is left out", staged.CtaSlice.load, lambda load, *a: (), "cluster",
            cols=2504, config=StagedConfig(2, 2, 1, 1, 1, register_chunks=1)),
    _kernel("the elements in which a slice's last row vector ends, in the next slice, are left out",
            mbarrier.wrap, lambda wrap, raw, gmem, row, staged, tail, *a: wrap(raw, gmem, row, staged, None, *a),
            "grid"),
    _kernel("the cluster's numbers are not waited for", mbarrier.wait, _left_out, "cluster"),
    _kernel("the block's threads do not meet", reduce.sync_block, _left_out, "online", rejected_by=DEADLOCK),
    _kernel("the threads of a cluster's blocks do not meet", reduce.sync_block, _left_out, "cluster",
            rejected_by=DEADLOCK),
    _kernel("a cluster's blocks do not meet", reduce.await_cluster, _left_out, "cluster"),
    _kernel("quantities take each other's slots", reduce.ReductionBuffer.read, lambda read, *a: read(*a)[::-1],
            "online"),
    _kernel("slots without a warp are not cleared", reduce.ReductionBuffer.clear, _left_out, "cluster"),
    _kernel("of slots without a CTA, only as many as threads are cleared", reduce.ReductionBuffer.clear,
            lambda clear, buffer, slots, warpgroups: clear(buffer, slots, buffer.slots), "grid", rows=1,
            config=GridConfig(257, 1, 1, 1)),
    _kernel("a warp knows its own part only", reduce.block_gather, _own_numbers_only, "block"),
    _kernel("a row is its first block's", reduce.grid_load, _first_member, "grid"),
    _kernel("a warp of a cluster knows its own part only", reduce.cluster_gather, _own_numbers_only, "cluster"),
    _kernel("the merge takes one partial sum", monoid.merge_over, _first_partial_only, "block"),
    _gradient("the label is the next column", row_scalars.store_element,
              lambda store, ref, row, column, *a, **k: store(ref, row, column + 1, *a, **k), "warp"),
    _gradient("labels are not smoothed", row_ops.with_factors, _nothing_smoothed, "warp", smoothing=0.1),
    _gradient("the z loss is subtracted", row_ops.with_factors,
              lambda of, problem, *a: of(dataclasses.replace(problem, z_loss=-problem.z_loss), *a), "block",
              z_loss=0.1),
    _gradient("the gradient goes past the soft cap", row_ops._soft_cap_grad, lambda slope, problem, out, z: out,
              "warp", soft_cap=5.0),
    _gradient("ignored rows give their own numbers", row_ops.neutral_if_ignored,
              lambda neutral, stats, label_operands: neutral(stats, None), "block"),
    _gradient("ignored rows are read", vectors.load, lambda load, *a, **k: load(*a, **k | {"labels": None}), "online"),
    _gradient("ignored rows get no zeros", staged.CtaSlice._write_zeros, _left_out, "block"),
    _gradient("columns past the end count as the soft cap", vectors.select_inside,
              lambda inside, shape, row, first, tile, z, other: z, "block", soft_cap=5.0),
    _gradient("the label counts where the mask excludes it", row_scalars.load_element, _held_at_label,
              "warp", where="full"),
    _given("a label of another part of the row counts in this one", row_scalars.store_element,
           lambda store, ref, row, column, *a, **k: store(ref, row, jnp.abs(column), *a, **k)),
    _given("the maximum and the sum that are given are left out", row_ops.given,
           lambda given, problem, labels, rest: given(problem, labels, [*rest[:1], *map(jnp.ones_like, rest[1:])])),
    _given("the given count of columns is left out", row_ops.given,
           lambda given, problem, labels, rest: given(problem, labels, [*rest[:3], jnp.ones_like(rest[3])]),
           smoothing=0.1),
)  # fmt: skip


def check_linear(fault: Fault) -> None:
    with pytest.MonkeyPatch.context() as patch:
        linear.check(linear.CASES[fault.case], linear.Config(), 2, patch)


def _linear(words: str, original: Any, fault: Callable[..., Any], case: str = "several groups") -> Fault:
    return Fault(words, original, fault, case)


LINEAR_FAULTS = (
    _linear("all tiles have the first tokens", forward._Cta.tokens, lambda f, cta, row: f(cta, row * 0),
            "several tiles of tokens"),
    _linear("all groups have the first tokens", forward._Cta.group_coord,
            lambda f, cta, i: (f(cta, i)[0] * 0, f(cta, i)[1]), "several tiles of tokens"),
    _linear("a tile's state takes the place of those before", forward._merge, lambda f, state, other: other),
    _linear("columns past the vocabulary count", forward._own_columns, lambda f, z, last: z),
    _linear("the label is the next column", forward._label_logit, lambda f, parts, label: f(parts, label + 1)),
    _linear("a row's state is that of its first group", monoid.merge_over,
            lambda f, state, axis: tuple(x[0] for x in state)),
    _linear("the maximum is not subtracted", monoid.decay, lambda f, frm, to, exp: exp(frm)),
)  # fmt: skip


def _slopes(words: str, fault: Callable[..., Any], case: str = "rows") -> Fault:
    return Fault(words, linear_kernel.slopes, fault, case)


def check_slopes(fault: Fault) -> None:
    linear.test_gradients_are_those_of_chunks(True, linear.BF16, fault.case)


SLOPES_FAULTS = (
    _slopes("weights are relative to the row's maximum",
            lambda f, rules, w, *a: f(rules, w._replace(relative_to=jnp.broadcast_to(
                w.relative_to.max(0), w.relative_to.shape)), *a), "tiles"),
    _slopes("the label has no slope of the soft cap",
            lambda f, rules, w, *a: f(rules, w._replace(label=0 * w.label), *a)),
    _slopes("ignored tokens count",
            lambda f, rules, w, known, prob_factor, label_factor, local, exists: f(
                rules, w, known, prob_factor + 1 - exists, label_factor, local, jnp.ones_like(exists))),
    _slopes("the label is one off", lambda f, *a: f(*a[:-2], a[-2] - 1, a[-1])),
)  # fmt: skip


def _without_a_bit(body: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(radix_select.KEY_BITS, "bfloat16", radix_select.KEY_BITS["bfloat16"] - 1)
        body(*arguments, **keywords)


RADIX_SELECT_FAULTS = (
    Fault("the last bit is not searched", ptx.no_unroll, lambda loop, start, stop, *a: loop(start, stop - 1, *a)),
    Fault("the first bit is not searched", ptx.no_unroll, lambda loop, start, stop, *a: loop(start + 1, stop, *a)),
    Fault("a key counts twice", radix_select._count, lambda count, held: 2 * count(held)),
    Fault("one bit of the keys is lost", radix_select._body, _without_a_bit),
    Fault("all rows are the first CTA's", lax.axis_index, lambda index, name: jnp.int32(0), inside=radix_select),
)


def check_radix_select(fault: Fault) -> None:
    test_radix_select.check("bfloat16", (9, 334), 64, sorts=True)


_ERRORS = (AssertionError, IndexError, RaceDetected, jax.errors.JaxRuntimeError)
TABLES = (
    Table("Softmax in `jax.numpy`, by `conformance.check`", SOLVER_FAULTS, check_solver, match="ulp"),
    Table("Kernels of rows in the interpreter, by `conformance.check`", KERNEL_FAULTS, check_kernel,
          {NUMBERS: _ERRORS, DEADLOCK: (*_ERRORS, Deadlock)}, prepare=lambda f: conformance.known(f.case.problem())),
    Table("The loss without logits, by `test_linear_cross_entropy.check`", LINEAR_FAULTS, check_linear,
          {NUMBERS: (AssertionError, RaceDetected)}),
    Table("Gradients of the loss without logits, by `test_gradients_are_those_of_chunks`", SLOPES_FAULTS, check_slopes),
    Table("Radix select, by `test_radix_select.check`", RADIX_SELECT_FAULTS, check_radix_select, {NUMBERS: _ERRORS},
          "not equal|outside of|races"),
)  # fmt: skip
