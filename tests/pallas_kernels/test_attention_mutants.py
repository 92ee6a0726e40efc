"""The attention kernels' own checks, in the interpreter, pass their kernels and reject every planted fault."""

import dataclasses
import functools

import jax
import pytest
import test_attention_backward
import test_attention_forward
import test_attention_schedule
from attention_mutants import (
    BY_SIZES,
    DEADLOCK,
    MUTANTS,
    NOT_FINITE,
    NOT_ONCE,
    NOT_WAITED_FOR,
    NUMBERS,
    OUT_OF_STEP,
    RACE,
    TOO_LARGE,
    UNDER_WAY,
    UNORDERED,
)
from interpreter import Deadlock, RaceDetected, interpret
from test_kernel_mutants import plant

from pallas_kernels import hardware
from pallas_kernels.attention import schedule
from pallas_kernels.attention.configs import ForwardConfig
from pallas_kernels.attention.problem import Op

pytestmark = pytest.mark.slow

# A deadlocked simulation notices it after this long, or in the model of what it waits for.
DEADLOCK_S = 2.0
FEW = dataclasses.replace(hardware.H200, sm_count=2)
# A warpgroup that does not wait may get two phases ahead: the other one's barrier then shows the phase before for ever.
REJECTIONS = {
    NUMBERS: (AssertionError,),
    RACE: (RaceDetected,),
    UNORDERED: (AssertionError, RaceDetected, Deadlock),
    NOT_FINITE: (jax.errors.JaxRuntimeError, AssertionError),
    NOT_WAITED_FOR: (RaceDetected, Deadlock, jax.errors.JaxRuntimeError),
    OUT_OF_STEP: (RaceDetected, Deadlock, jax.errors.JaxRuntimeError),
    DEADLOCK: (Deadlock, jax.errors.JaxRuntimeError),
    UNDER_WAY: (RaceDetected, jax.errors.JaxRuntimeError),
    NOT_ONCE: (AssertionError,),
    TOO_LARGE: (AssertionError,),
}


def check(
    op, kind, batch, heads, slack, early, scheduler, bias_stages, deterministic, dims, mask, keys, *, limit_s=20.0
):
    """The check of the kernel's tests, of a problem that is as small as the fault allows."""
    run = functools.partial(interpret, limit_s=limit_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "current", lambda: FEW)
        if op is Op.FORWARD:
            problem = test_attention_forward.problem_of(kind, (100, 200), (32, 16), "bfloat16", heads, batch)
            config = ForwardConfig(64, 2, slack, early, scheduler, bias_stages)
            config = dataclasses.replace(config, overwrites=True, overlaps=True, query_ahead=True)
            test_attention_forward.check(problem, config, run, mask=mask)
        else:
            facts = {"heads": heads, "batch": batch, "deterministic": deterministic}
            problem = test_attention_backward.problem_of(kind, (200, keys), dims, "bfloat16", **facts)
            test_attention_backward.check(problem, test_attention_backward.decided(problem).run, run, mask=mask)


def check_sizes(mutant):
    """Of the problem's kind, what is decided from the sizes of models."""
    if mutant.rejected_by == TOO_LARGE:
        return test_attention_schedule.check_memory(mutant.op, test_attention_schedule.MEMORY_KINDS[mutant.kind])
    for shape in test_attention_schedule.SHAPES:
        test_attention_schedule.check_tiles(
            test_attention_schedule.problem_of(mutant.op, test_attention_schedule.KINDS[mutant.kind], shape)
        )


@pytest.fixture
def fresh():
    """Nothing traced or scheduled is kept from before or for later."""

    def clear():
        jax.clear_caches()
        schedule.order.cache_clear()
        schedule.deal.cache_clear()

    clear()
    yield
    clear()


def cases():
    """The mutants' cases, but for those that are a part of another, of more sequences or heads."""
    largest = {}
    for op, kind, batch, heads, *facts in (m.case for m in MUTANTS if m.rejected_by not in BY_SIZES):
        case = (batch * heads[0], (op, kind, batch, heads, *facts))
        key = (op, kind, *facts)
        largest[key] = max(largest.get(key, case), case)
    return [case for _, case in largest.values()]


@pytest.mark.parametrize("case", cases(), ids=lambda c: "-".join(map(str, c)))
def test_without_a_fault_the_check_passes(case):
    check(*case)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.op.name.lower()}-{m.name}")
@pytest.mark.usefixtures("fresh")
def test_planted_fault_is_rejected(mutant, monkeypatch):
    calls = plant(monkeypatch, mutant)
    expected = REJECTIONS[mutant.rejected_by]
    limit_s = DEADLOCK_S if mutant.rejected_by in (DEADLOCK, OUT_OF_STEP) else 20.0
    rejects = functools.partial(check, *mutant.case, limit_s=limit_s)
    if mutant.rejected_by in BY_SIZES:
        rejects = functools.partial(check_sizes, mutant)
    with pytest.raises(expected) as caught:
        rejects()
    assert calls
    assert caught.type in expected, f"rejected for another reason than {mutant.rejected_by}: {caught.value}"


def test_every_fault_has_a_place():
    for mutant in MUTANTS:
        assert mutant.faulty is not mutant.original
