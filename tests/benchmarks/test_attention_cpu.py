"""The CPU's comparison of attention: a wrong program gives no time, and every shape that was promised is there."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from benchmarks import attention_cpu


@pytest.mark.parametrize("pass_", ["fwd", "value_and_vjp"])
def test_a_case_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch, pass_: str) -> None:
    case = attention_cpu.Case(1, 8, 8, 2, 1, 4, "float32", True, pass_)
    record = attention_cpu.measure(case, 0.0)
    assert set(record["impls"]) == {"ours", "jax.nn"}
    assert record["ratio"] > 0
    assert f"ratio {record['ratio']:.2f}" in attention_cpu.line(record)
    wrong = {"ours": lambda *a, **b: 2 * jaxsoftmax.flash_attention(*a, **b)}
    monkeypatch.setattr(attention_cpu, "PROGRAMS", attention_cpu.PROGRAMS | wrong)
    with pytest.raises(AssertionError):
        attention_cpu.measure(case, 0.0)


def test_nan_is_no_result() -> None:
    with pytest.raises(AssertionError):
        attention_cpu.compare({"ours": jnp.array([np.nan]), "jax.nn": jnp.array([1.0])}, 1.0)


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in attention_cpu.all_cases()]
    assert len(set(names)) == len(names) == 40
