"""The planted faults that the conformance suite must reject. `docs/mutants.md` is written from this table.

Function faults are planted in `wrong.solver`; faults that only a kernel can have, in toy kernels; those of attention
and of top-k in the functions of their modules, or in what these call.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attention_mutants
import jax
import jax.numpy as jnp
import wrong

from pallas_kernels import monoid
from pallas_kernels.mosaic import fast_math, mbarrier, ptx, reduce, row_scalars, vectors
from pallas_kernels.softmax import radix_select, row_ops, staged
from pallas_kernels.softmax.grid import GridConfig
from pallas_kernels.softmax.problem import Op
from pallas_kernels.softmax.staged import StagedConfig
from tests import mutation, top_k_mutants

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "mutants.md"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: what it is in words, where it is planted, and an operation that shows it."""

    words: str
    knobs: dict[str, Any]
    op: Op = Op.SOFTMAX
    where: str = "none"
    scale: float = 1.0
    cols: int = 1000


_HALF = {"accumulator": jnp.float16, "tile_size": 4096}

FUNCTION_MUTANTS = (
    Mutant("every output is 1/N", {"deliver": lambda y: jnp.full_like(y, 1 / y.shape[1])}),
    Mutant("the running maximum starts at 0", {"start": 0.0}),
    Mutant("exp(-inf - -inf) is not guarded in decay", {"decay": wrong.never_guarded}, Op.STATS),
    Mutant("the last tile of the row is not folded in", {"tiles": slice(None, -1)}),
    Mutant("the first tile of the row is not folded in", {"tiles": slice(1, None)}),
    Mutant("columns come out in another order", {"deliver": lambda y: jnp.flip(y, 1)}),
    Mutant("the old sum is kept when the maximum grows", {"rescale": False}),
    Mutant("columns past the end are read as 0, not -inf", {"padding": 0.0}),
    Mutant("the sum is accumulated in float16", _HALF, cols=70000),
    Mutant("the sum of the tangent is accumulated in float16", _HALF, Op.SOFTMAX_TANGENT),
    Mutant("`where` has no effect on the sum", {"use_mask": False}, where="full"),
    Mutant("`where` of one row for all has no effect on the sum", {"use_mask": False}, where="shared"),
    Mutant("`scale` has no effect", {"use_scale": False}, scale=0.5),
    Mutant("`scale` has no effect in the tangent", {"use_scale": False}, Op.SOFTMAX_TANGENT, scale=0.5),
    Mutant("each row gets its neighbour's result", {"deliver": lambda y: jnp.roll(y, 1, 0)}),
    Mutant("the last row is never written", {"deliver": lambda y: y.at[-1].set(jnp.nan)}),
    Mutant("the last column is never written", {"deliver": lambda y: y.at[:, -1].set(jnp.nan)}),
    Mutant("the tangent lacks its sum(y * t)", {"inner_product": False}, Op.SOFTMAX_TANGENT),
    Mutant("log_softmax with a maximum from 0", {"start": 0.0}, Op.LOG_SOFTMAX),
)


_CLUSTER, _GRID = ("cluster",), ("grid",)


@dataclasses.dataclass(frozen=True)
class KernelMutant:
    """A fault in a function that the kernels share: `fault(original, *arguments)` runs in its place."""

    words: str
    original: Callable[..., Any] | property
    fault: Callable[..., Any]
    kernels: tuple[str, ...]
    op: Op = Op.SOFTMAX
    form: dict[str, Any] = dataclasses.field(default_factory=dict)  # what else the problem has
    config: Any = None  # in which it shows, if not in any
    may_deadlock: bool = False  # threads may wait for ever: for a phase that others, who run ahead, have left behind


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


def _gradient(words: str, original: Any, fault: Any, kernels: tuple[str, ...], **form: Any) -> KernelMutant:
    return KernelMutant(words, original, fault, kernels, Op.CROSS_ENTROPY_GRADIENT, form)


def _given(words: str, original: Any, fault: Any, **form: Any) -> KernelMutant:
    return KernelMutant(words, original, fault, ("online",), Op.CROSS_ENTROPY_COTANGENT, form)


KERNEL_MUTANTS = (
    KernelMutant("exp(-inf - -inf) is not guarded", monoid.decay,
                 lambda decay, *a, exp=jnp.exp: wrong.never_guarded(*a, exp=exp), ("online",), Op.STATS),
    KernelMutant("the maximum is rounded once more than what it is subtracted from", monoid.decay,
                 lambda decay, frm, to, **k: decay(frm, to * (1.0 + 2.0**-23), **k), ("naive",),
                 form={"scale": 0.3}),
    KernelMutant("columns past the end are read as 0", vectors.load,
                 lambda load, *a, **k: load(*a, **k | {"fill": 0.0}), ("warp",)),
    KernelMutant("nothing is written", vectors.store, _left_out, ("block",)),
    KernelMutant("rows are written one further", vectors.store,
                 lambda store, ref, row, *a, **k: store(ref, row + 1, *a, **k), ("warp",)),
    KernelMutant("the exponential is of base 2", fast_math.exp_for, lambda exp_for, dtype, unit: jnp.exp2,
                 ("online",)),
    KernelMutant("the next row is staged", mbarrier.copy_row, lambda copy, ref, row, *a: copy(ref, row + 1, *a),
                 ("block",)),
    KernelMutant("a copy's ends are left as they are", mbarrier.fill_outside, _left_out, _CLUSTER),
    KernelMutant("what a slice holds in registers is left out", staged.CtaSlice.load, lambda load, *a: (), _CLUSTER,
                 form={"cols": 2504}, config=StagedConfig(2, 2, 1, 1, 1, register_chunks=1)),
    KernelMutant("the elements in which a slice's last row vector ends, in the next slice, are left out",
                 mbarrier.wrap, lambda wrap, raw, gmem, row, staged, tail, *a: wrap(raw, gmem, row, staged, None, *a),
                 _GRID),
    KernelMutant("the cluster's numbers are not waited for", mbarrier.wait, _left_out, _CLUSTER),
    KernelMutant("the block's threads do not meet", reduce.sync_block, _left_out, ("online", "cluster"),
                 may_deadlock=True),
    KernelMutant("a cluster's blocks do not meet", reduce.await_cluster, _left_out, _CLUSTER),
    KernelMutant("quantities take each other's slots", reduce.ReductionBuffer.read, lambda read, *a: read(*a)[::-1],
                 ("online",)),
    KernelMutant("slots without a warp are not cleared", reduce.ReductionBuffer.clear, _left_out, _CLUSTER),
    KernelMutant("of slots without a CTA, only as many as threads are cleared", reduce.ReductionBuffer.clear,
                 lambda clear, buffer, slots, warpgroups: clear(buffer, slots, buffer.slots), _GRID, form={"rows": 1},
                 config=GridConfig(257, 1, 1, 1)),
    KernelMutant("a warp knows its own part only", reduce.block_gather, _own_numbers_only, ("block",)),
    KernelMutant("a row is its first block's", reduce.grid_load, _first_member, _GRID),
    KernelMutant("a warp of a cluster knows its own part only", reduce.cluster_gather, _own_numbers_only, _CLUSTER),
    KernelMutant("the merge takes one partial sum", monoid.merge_over, _first_partial_only, ("block",)),
    _gradient("the label is the next column", row_scalars.store_element,
              lambda store, ref, row, column, *a, **k: store(ref, row, column + 1, *a, **k), ("warp",)),
    _gradient("labels are not smoothed", row_ops.with_factors, _nothing_smoothed, ("warp",), smoothing=0.1),
    _gradient("the z loss is subtracted", row_ops.with_factors,
              lambda of, problem, *a: of(dataclasses.replace(problem, z_loss=-problem.z_loss), *a), ("block",),
              z_loss=0.1),
    _gradient("the gradient goes past the soft cap", row_ops._soft_cap_grad, lambda slope, problem, out, z: out,
              ("warp",), soft_cap=5.0),
    _gradient("ignored rows give their own numbers", row_ops.neutral_if_ignored,
              lambda neutral, stats, label_operands: neutral(stats, None), ("block",)),
    _gradient("ignored rows are read", vectors.load, lambda load, *a, **k: load(*a, **k | {"labels": None}),
              ("online",)),
    _gradient("ignored rows get no zeros", staged.CtaSlice._write_zeros, _left_out, ("block",)),
    _gradient("columns past the end count as the soft cap", vectors.select_inside,
              lambda inside, shape, row, first, tile, z, other: z, ("block",), soft_cap=5.0),
    _gradient("the label counts where the mask excludes it", row_scalars.load_element, _held_at_label,
              ("warp",), where="full"),
    _given("a label of another part of the row counts in this one", row_scalars.store_element,
           lambda store, ref, row, column, *a, **k: store(ref, row, jnp.abs(column), *a, **k)),
    _given("the maximum and the sum that are given are left out", row_ops.given,
           lambda given, problem, labels, rest: given(problem, labels, [*rest[:1], *map(jnp.ones_like, rest[1:])])),
    _given("the given count of columns is left out", row_ops.given,
           lambda given, problem, labels, rest: given(problem, labels, [*rest[:3], jnp.ones_like(rest[3])]),
           smoothing=0.1),
)  # fmt: skip

_UNROLLED = ptx.no_unroll
# Of the kernel that selects: a module, a name there, and what it is with the fault.
RADIX_SELECT_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the last bit is not searched": (ptx, "no_unroll", lambda start, stop, *a: _UNROLLED(start, stop - 1, *a)),
    "the first bit is not searched": (ptx, "no_unroll", lambda start, stop, *a: _UNROLLED(start + 1, stop, *a)),
    "a key counts twice": (radix_select, "_count", lambda held: 2 * jnp.where(held, 1.0, 0.0).sum(axis=1)),
    "one bit of the keys is lost": (radix_select, "KEY_BITS", {"bfloat16": 15, "float16": 18, "float32": 31}),
    "all rows are the first CTA's": (jax.lax, "axis_index", lambda name: jnp.int32(0)),
}

# Faults that only a kernel can have: (what it is, how it is planted, the test in which it is rejected).
HARNESS_FAULTS = (
    ("no barrier before the cluster's exchange", "toy kernel without its first cluster barrier",
     "test_interpreter.py: race detected"),
    ("no barrier before the block's exchange", "toy kernel without its named barrier",
     "test_interpreter.py: race detected"),
    ("a barrier that not all reach", "toy kernel in which one CTA of two arrives",
     "test_interpreter.py: deadlock reported"),
    ("two blocks write one row", "toy kernel whose blocks overlap", "test_interpreter.py: race detected"),
    ("reads past the last row or column", "toy kernel without its row guard, or shifted",
     "test_interpreter.py: IndexError"),
    ("two warpgroups reduce through one scratch", "toy kernel with a sum across warps and two warpgroups",
     "test_aot.py: seen in the PTX; the interpreter cannot"),
    ("lanes keep sums of their own, which may differ in the last bit",
     "`row_scalars.of_first_lane` of block, cluster, online, grid left out",
     "test_aot.py: seen in the PTX; the interpreter has no lanes"),
    ("registers spill", "toy kernel with too long a row", "test_aot.py: ptxas reports it"),
    ("code for a linker loses registers, spills, or runs its products one by one",
     "an attention kernel's PTX with `setmaxnreg`, or with 512 threads",
     "test_aot_attention.py: `ptxas -c` reports it"),
    ("rows left unwritten", "toy kernel that stops early, on a GPU", "test_gpu_harness.py: poison comes through"),
    ("writes past the output", "toy kernel shifted by a row, on a GPU", "test_gpu_harness.py: a neighbour changed"),
    ("another implementation ran", "`jax.nn.softmax` in the kernel's place",
     "test_gpu_harness.py: no Mosaic call in the HLO"),
)  # fmt: skip


def document() -> str:
    """The text of `docs/mutants.md`."""
    kernels = [_fault(m.words, _places(m.original, m.kernels), _form(m)) for m in KERNEL_MUTANTS]
    harness = [f"- {words}: {planted} ({killer})" for words, planted, killer in HARNESS_FAULTS]
    top_k = [_fault(m.words, f"`{m.original}`", _top_k_form(m)) for m in top_k_mutants.MUTANTS]
    selected = [
        _fault(words, f"`{_short(module.__name__)}.{name}`") for words, (module, name, _) in RADIX_SELECT_FAULTS.items()
    ]
    sections = {
        "Softmax in `jax.numpy`, by `conformance.check`": [
            _fault(m.words, "", _solver_form(m)) for m in FUNCTION_MUTANTS
        ],
        "Kernels of rows in the interpreter, by `test_kernel_mutants.py`": kernels,
        "Toy kernels, by the test in brackets": harness,
        **{f"Attention {op}, by `test_attention_mutants.py`": list(_attention(op)) for op in ("forward", "backward")},
        "Top-k, by `test_top_k_mutants.py`": top_k,
        "Radix select, by `test_radix_select.py`": selected,
    }
    texts = [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items()]
    return "\n\n".join([_HEAD, *texts, _mutation()])


_HEAD = """# Planted faults

Each fault below is planted, and a test must reject it. A line names the fault, the function that it is planted in, and
the call that shows it. `tests/pallas_kernels/mutants.py` writes this page."""


def _fault(words: str, where: str = "", form: str = "") -> str:
    return f"- {words}" + (f": {where}" if where else "") + (f" ({form})" if form else "")


def _solver_form(mutant: Mutant) -> str:
    facts = [mutant.op.value.replace("_", " ")] * (mutant.op != Op.SOFTMAX) + [f"{mutant.cols} columns"] * (
        mutant.cols != 1000
    )
    facts += [f"scale {mutant.scale}"] * (mutant.scale != 1) + [f"`where` {mutant.where}"] * (mutant.where != "none")
    return ", ".join(facts)


def _form(mutant: KernelMutant) -> str:
    facts = [mutant.op.value.replace("_", " ")] * (mutant.op != Op.SOFTMAX)
    facts += [f"{name} {value}" for name, value in mutant.form.items()]
    return ", ".join(facts + ([f"{mutant.config.ctas} CTAs"] if mutant.config else []))


def _top_k_form(mutant: top_k_mutants.Mutant) -> str:
    facts = [f"k {mutant.k}"] * (mutant.k != 8) + [f"scale {mutant.scale}"] * (mutant.scale != 1)
    return ", ".join(facts + [f"{mutant.n} columns"] * (mutant.n != 4096))


def _attention(op: str) -> Iterator[str]:
    """The faults of a pass, by what rejects them."""
    found = [m for m in attention_mutants.MUTANTS if m.case.op.name.lower() == op]
    for reason in dict.fromkeys(m.rejected_by for m in found):
        yield f"\nRejected by {reason}:\n"
        for m in (m for m in found if m.rejected_by == reason):
            inside = f" in `{_qualified(m.inside).rpartition('.')[2]}`" if m.inside else ""
            barrier = f" on `{m.barrier}`" if m.barrier else ""
            yield _fault(m.words, f"`{_qualified(m.original)}`{inside}{barrier}", m.case.kind * (m.case.kind != "full"))


def _places(function: Any, kernels: Sequence[str]) -> str:
    return f"`{_qualified(function)}` of {', '.join(kernels)}"


def _qualified(function: Any) -> str:
    function = function.fget if isinstance(function, property) else function
    module = "jax" if function.__module__.startswith("jax") else _short(function.__module__)
    return f"{module}.{function.__qualname__}"


def _short(module: str) -> str:
    return module.rpartition(".")[2]


def _mutation() -> str:
    """The section on faults that a tool makes."""
    unseen = mutation.scores(unseen=True)
    last = unseen["all"]
    scores = "\n".join(
        f"| {name} | {x.sample} | {x.equivalent} | {x.killed} | {x.share:.1%} | {new.killed} of "
        f"{new.sample - new.equivalent} |"
        for name, x in mutation.scores().items()
        for new in [unseen[name]]
    )
    return f"""## Faults that a tool makes

`make mutants` applies operators of [cosmic-ray](https://cosmic-ray.readthedocs.io) to the modules of index arithmetic,
choices and checks, one place at a time, and runs the tests that `tests/mutation.toml` names for the module. It draws a
sample of each module's mutants, every time with the same seed; mutants that do not import do not count. The score is
the share that is killed of the mutants that are not equivalent to the module. After each part of the sample, tests were
written for the faults that had survived. A part's score on its first trial therefore says more of other mutants: 61 %
of the first 120 mutants, 83 % of the next 123, and {last.share:.1%} of the last part.
`tests/mutation.toml` names the survivors, each with the reason why it may survive.

| module | mutants | equivalent | killed | score | last part, first trial |
|---|---|---|---|---|---|
{scores}
"""


if __name__ == "__main__":
    DOCUMENT.write_text(document())
