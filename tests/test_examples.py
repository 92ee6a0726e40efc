"""The examples run, each in a process of its own as a reader would run it."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

ROOT = Path(__file__).parent.parent
TINY = {
    "char_model.py": ["--steps", "40", "--sample", "20"],
    "digits_vit.py": ["--steps", "200"],
    "packed_gpt.py": ["--steps", "30", "--length", "64"],
}


def _run(example: str, *arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    return subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(example):
    finished = _run(example, *TINY.get(example, []))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout


def test_demo_compares_three_attentions_and_fails_when_nothing_was_learnt():
    finished = _run("char_model.py", "--steps", "1", "--sample", "1")
    assert finished.returncode == 1
    assert "DID NOT FALL" in finished.stdout
    rows = re.findall(r"^(flash|softmax|jax\.nn)(?: +[\d.]+){4} +([\d.e+-]+)$", finished.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == ["flash", "softmax", "jax.nn"], finished.stdout
    assert all(float(gap) < 1e-3 for _, gap in rows)


def test_demo_compares_speeds(capsys):
    """What the demo does last on a GPU, small; only cuDNN may be missing."""
    runpy.run_path(str(ROOT / "examples" / "char_model.py"))["compare_speeds"]((4, 16), (1, 8, 2, 64))
    printed = capsys.readouterr().out
    for name in ("jaxsoftmax", r"jax\.nn"):
        assert len(re.findall(rf"^  {name} +[\d.]+ us$", printed, re.MULTILINE)) == 2, printed
    assert len(re.findall(r"^  jax\.nn cuDNN", printed, re.MULTILINE)) == 1, printed


def test_no_program_of_the_vocabulary_example_gathers_logits():
    finished = _run("vocabulary_sharded_loss.py")
    rows = re.findall(r"^(uncut|by hand|by jit) +loss ([\d.]+)(?:.* collectives (.*))?$", finished.stdout, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["uncut", "by hand", "by jit"], finished.stdout + finished.stderr
    assert len({loss for _, loss, _ in rows}) == 1
    assert rows[1][2] == "{'all-reduce': 1}"
    assert re.fullmatch(r"{'all-reduce': \d}", rows[2][2])


def test_the_vocabulary_example_sees_a_gather_where_there_is_one():
    collectives = runpy.run_path(str(ROOT / "examples" / "vocabulary_sharded_loss.py"))["collectives"]
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    gathers = jax.shard_map(lambda x: jax.lax.all_gather(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    assert collectives(gathers, jnp.ones(64)) == {"all-gather": 1}
