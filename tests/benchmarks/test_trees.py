"""Trees beside each other, with one that stands in for kernels: its config's knob is added to all that comes out."""

import math
import sys

import jax.numpy as jnp
import pytest

import pallas_kernels
from benchmarks import __main__ as program
from benchmarks import attention_cases, impls, runner
from benchmarks.impls import Declined, Options

STAND_IN = {
    "__init__": "",
    "hardware": "current = lambda: None",
    "attention/__init__": "",
    "attention/problem": """
import enum
Op = enum.Enum("Op", "FORWARD BACKWARD")
Attention = lambda op, *sizes, **facts: (op, sizes, facts)
""",
    "attention/dispatch": """
import dataclasses
import jax.numpy as jnp
from pallas_kernels.attention.problem import Op

@dataclasses.dataclass(frozen=True)
class Config:
    shift: float = 0.0

@dataclasses.dataclass(frozen=True)
class Decision:
    problem: object
    config: Config = Config()
    kernel: str = "stand-in"
    declined: tuple = ()

    def run(self, query, key, value, *rest):
        if self.problem[0] is Op.BACKWARD:
            assert len(rest) == 4
            return query + self.config.shift, key, value, "of a bias"
        return query + self.config.shift, jnp.sum(query, 3, dtype=jnp.float32).swapaxes(1, 2)

decide = lambda problem, device: Decision(problem)
""",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in STAND_IN.items():
        path = tmp_path / "pallas_kernels" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


def test_a_tree_is_imported_beside_ours(tree):
    ours = sys.modules["pallas_kernels"]
    with impls.imported(tree) as load:
        assert load("hardware").current() is None
        assert load("hardware").__file__.startswith(tree)
    assert sys.modules["pallas_kernels"] is ours is pallas_kernels
    assert tree not in sys.path


@pytest.mark.parametrize("pass_, program", [("fwd", "fwd"), ("bwd", "direct")])
def test_the_programs_of_a_tree(pass_, program, tree):
    """The knob reaches the kernel, and the backward kernel gets the residuals of its own forward pass."""
    case = attention_cases.parse(f"{pass_}_causal_d64_s64_b1_h2")
    operands = case.shape.operands(0)
    for knobs, shift in (("", 0.0), (":shift=8.0", 8.0)):
        (found,) = impls.programs(case, f"other{knobs}", Options(trees={"other": tree})).items()
        assert found[0] == program
        got = found[1].function(*found[1].prepare(operands))
        assert len(got) == (1 if pass_ == "fwd" else 3)
        assert jnp.array_equal(got[0], operands["query"] + shift)


def test_a_tree_that_is_wrong_or_fails_has_no_time_and_the_run_is_red(tree):
    """The stand-in is no attention, and has no knob of this name."""
    case = attention_cases.parse("fwd_full_d64_s64_b1_h2")
    options = Options(("other", "other:missing=1"), rounds=1, trees={"other": tree})
    (record,) = runner.one_by_one([case], options, math.inf)
    wrong, failed = record["impls"].values()
    assert (wrong["status"], failed["status"]) == ("WRONG", "failed")
    assert "missing" in failed["reason"]
    assert [program.red(name, [record], options.trees) for name in options.impls] == [[case.name]] * 2


@pytest.mark.parametrize(
    "name, words", [("bwd_full_d512_s64_b1_h1", "no kernel takes it"), ("value_and_vjp_full_d64_s64_b1_h1", "not both")]
)
def test_what_no_tree_takes_is_declined(name, words):
    case = attention_cases.parse(name)
    with pytest.raises(Declined, match=words):
        impls.programs(case, "now", Options(trees={"now": "."}))
