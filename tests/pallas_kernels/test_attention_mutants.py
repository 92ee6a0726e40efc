"""The attention kernels' own checks, in the interpreter, pass their kernels and reject every planted fault."""

import dataclasses
import functools

import attention_mutants as faults
import jax
import pytest
import test_attention_backward
import test_attention_forward
import test_attention_schedule
from attention_mutants import BY_TABLES, MUTANTS, Case, Run
from interpreter import Deadlock, RaceDetected, interpret
from test_attention_segments import check_backward_visits, check_forward_visits
from test_kernel_mutants import plant

from pallas_kernels import hardware
from pallas_kernels.attention import tile_scheduler
from pallas_kernels.attention.problem import ForwardConfig, Op

pytestmark = pytest.mark.slow

# A deadlocked simulation notices it after this long, or in the model of what it waits for.
DEADLOCK_S = 2.0
FEW = dataclasses.replace(hardware.H200, sm_count=2)
# A warpgroup that does not wait may get two phases ahead: the other one's barrier then shows the phase before for ever.
REJECTIONS = {
    faults.NUMBERS: (AssertionError,),
    faults.RACE: (RaceDetected,),
    faults.UNORDERED: (AssertionError, RaceDetected, Deadlock),
    faults.NOT_FINITE: (jax.errors.JaxRuntimeError, AssertionError),
    faults.NOT_WAITED_FOR: (RaceDetected, Deadlock, jax.errors.JaxRuntimeError),
    faults.OUT_OF_STEP: (RaceDetected, Deadlock, jax.errors.JaxRuntimeError),
    faults.DEADLOCK: (Deadlock, jax.errors.JaxRuntimeError),
    faults.UNDER_WAY: (RaceDetected, jax.errors.JaxRuntimeError),
    faults.NOT_ONCE: (AssertionError,),
    faults.TOO_LARGE: (AssertionError,),
    faults.NOT_VISITED: (AssertionError,),
}


def check(case, *, limit_s=20.0):
    """The check of the kernel's tests, of a problem that is as small as the fault allows."""
    run = functools.partial(interpret, limit_s=limit_s)
    heads, batch = case.heads, case.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "current", lambda: FEW)
        if case.op is Op.FORWARD:
            problem = test_attention_forward.problem_of(case.kind, (100, 200), (32, 16), "bfloat16", heads, batch)
            knobs = {
                "zero_init_free": True,
                "overlap_pv": True,
                "prefetch_query": True,
                "bias_stages": case.bias_stages,
                "splits": case.splits,
                "packed_heads": case.packed_heads,
            }
            config = ForwardConfig(
                64, 2, 8 if case.early_exp_columns else 0, case.early_exp_columns, case.scheduler, **knobs
            )
            if case.page_size:
                paged = dataclasses.replace(problem, key_length=192, page_size=case.page_size)
                return test_attention_forward.check_pages(paged, config, run)
            test_attention_forward.check(problem, config, run, mask=case.mask)
        else:
            facts = {"heads": heads, "batch": batch, "deterministic": case.deterministic}
            problem = test_attention_backward.problem_of(case.kind, (200, case.keys), case.dims, "bfloat16", **facts)
            kernel = test_attention_backward.decided(problem, case.head_splits).run
            test_attention_backward.check(problem, kernel, run, mask=case.mask)


def check_tables(case, rejected_by):
    """Of the problem's kind, what is decided before a kernel runs."""
    op, kind = case[:2]
    if rejected_by == faults.TOO_LARGE:
        return test_attention_schedule.check_memory(op, test_attention_schedule.MEMORY_KINDS[kind])
    if rejected_by == faults.NOT_VISITED and op is Op.FORWARD:
        problem = test_attention_forward.problem_of(kind, (513, 700), (8, 8), "bfloat16", case.heads)
        return check_forward_visits(problem, ForwardConfig(64, warpgroups=2), mask=case.mask)
    if rejected_by == faults.NOT_VISITED:
        facts = {"heads": case.heads, "deterministic": True}
        problem = test_attention_backward.problem_of(kind, (513, 700), (8, 8), "bfloat16", **facts)
        return check_backward_visits(problem, mask=case.mask)
    for shape in test_attention_schedule.SHAPES:
        problem = test_attention_schedule.problem_of(op, test_attention_schedule.KINDS[kind], shape)
        test_attention_schedule.check_tiles(problem)


@pytest.fixture
def fresh():
    """Nothing traced or scheduled is kept from before or for later."""

    def clear():
        jax.clear_caches()
        tile_scheduler.order.cache_clear()
        tile_scheduler.assign.cache_clear()

    clear()
    yield
    clear()


def cases():
    """Some of the mutants' cases: every fact is in one, and every kind that the kernels' own tests do not interpret.

    Some kinds are those of no mutant, here with early weights.
    """
    kinds = "bias", "bias-of-heads", "bias-of-rows", "everything", "window-left", "window-nothing"
    found = [Case(Op.FORWARD, kind, 2, (2, 1), early_exp_columns=24) for kind in kinds]
    features = lambda case: {(case.op, *fact) for fact in case._asdict().items() if fact[0] not in ("batch", "heads")}
    elsewhere = {(Op.FORWARD, "kind", kind) for kind, *_ in test_attention_forward.INTERPRETED}
    elsewhere |= {(Op.BACKWARD, "kind", kind) for kind, *_ in test_attention_backward.INTERPRETED.values()}
    seen = elsewhere.union(*map(features, found))
    planted = {m.case for m in MUTANTS if m.rejected_by not in BY_TABLES}
    new = lambda case: len(features(case) - seen)
    while new(case := max(planted, key=lambda c: (new(c), c.batch * c.heads[0], str(c)))):
        found.append(case)
        seen |= features(case)
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda c: "-".join(map(str, c)))
def test_without_a_fault_the_check_passes(case):
    check(case)


@pytest.mark.parametrize(
    "case, rejected_by",
    dict.fromkeys((m.case, m.rejected_by) for m in MUTANTS if m.rejected_by in BY_TABLES),
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_without_a_fault_the_tables_pass(case, rejected_by):
    check_tables(case, rejected_by)


# One problem's after the other: `test_attention_backward.known` keeps two.
@pytest.mark.parametrize(
    "mutant", sorted(MUTANTS, key=lambda m: str(m.case)), ids=lambda m: f"{m.case.op.name.lower()}-{m.words}"
)
@pytest.mark.usefixtures("fresh")
def test_planted_fault_is_rejected(mutant, monkeypatch):
    open_runs: list[Run] = []
    if mutant.inside is not None:
        plant(monkeypatch, mutant.within(open_runs))
    calls = plant(monkeypatch, mutant, functools.partial(mutant.applies, open_runs, []))
    expected = REJECTIONS[mutant.rejected_by]
    limit_s = DEADLOCK_S if Deadlock in expected else 20.0
    rejects = functools.partial(check, mutant.case, limit_s=limit_s)
    if mutant.rejected_by in BY_TABLES:
        rejects = functools.partial(check_tables, mutant.case, mutant.rejected_by)
    with pytest.raises(expected) as caught:
        rejects()
    assert calls
    assert caught.type in expected, f"rejected for another reason than {mutant.rejected_by}: {caught.value}"
