"""Trees beside each other, with one that stands in for kernels: its config's knob is added to all that comes out."""

import json
import sys

import numpy as np
import pytest

import pallas_kernels
from benchmarks import attention_trees
from benchmarks.attention_cases import Shape
from benchmarks.attention_trees import Comparison

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
            return query + self.config.shift, key, value
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


def test_what_an_argument_says():
    found = Comparison.parse("bwd_causal_d192v128_s512_b2_h16g4=before+now:together=8,tiles=drawn,ahead=True")
    assert found.backward
    assert found.shape == Shape(2, 16, 4, 512, 192, 128, "causal")
    assert list(found.variants.values()) == [("before", {}), ("now", {"together": 8, "tiles": "drawn", "ahead": True})]
    assert Comparison.parse("attention_fwd_window_d64_s2048_b1_h2=now").shape == Shape(
        1, 2, 2, 2048, 64, 64, "window", 1024
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["bwd_causal=now"], "wanted CASE=VARIANT+VARIANT"),
        (["bwd_causal_d64_s64_b1_h1"], "wanted CASE=VARIANT+VARIANT"),
        (["bwd_causal_d64_s64_b1_h1=now+older"], "name others by --tree"),
    ],
)
def test_what_is_not_understood_is_said(arguments, words, capsys):
    with pytest.raises(SystemExit):
        attention_trees.main(arguments)
    assert words in capsys.readouterr().err


def test_a_tree_is_imported_beside_ours(tree):
    ours = sys.modules["pallas_kernels"]
    with attention_trees.imported(tree) as load:
        assert load("hardware").current() is None
        assert load("hardware").__file__.startswith(tree)
    assert sys.modules["pallas_kernels"] is ours is pallas_kernels
    assert tree not in sys.path


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_variants_are_timed_and_compared(pass_, tree, tmp_path):
    comparison = Comparison.parse(f"{pass_}_full_d64_s64_b1_h2=other+other:shift=8.0+other:missing=1")
    rows = attention_trees.compare(comparison, {"other": tree}, 1, str(tmp_path / "lock"))
    failed, plain, shifted = rows
    assert "missing" in failed["failed"]
    assert min(plain["us"], shifted["us"]) > 0
    assert plain["apart"] == 0
    query = np.asarray(comparison.shape.operands(0)["query"], np.float32)
    assert shifted["apart"] == pytest.approx(8 / np.abs(query).max(), rel=0.02)
    assert "1.000" in attention_trees.table("case", rows).splitlines()[1]


def test_without_a_gpu_it_is_said_and_the_status_is_not_0(tmp_path, capfd):
    path = tmp_path / "rows.json"
    assert attention_trees.main(["fwd_full_d64_s64_b1_h2=now", "--processes=1", f"--json={path}"]) == 1
    (row,) = json.loads(path.read_text())["fwd_full_d64_s64_b1_h2"]
    assert "CPU backend" in row["failed"]
    assert row["failed"] in capfd.readouterr().out


def test_what_no_kernel_takes_is_said(tmp_path):
    (row,) = attention_trees.compare(
        Comparison.parse("bwd_full_d512_s64_b1_h1=now"), {"now": "."}, 1, str(tmp_path / "lock")
    )
    assert "no kernel takes it" in row["failed"]
