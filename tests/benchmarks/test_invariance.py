"""The benchmark of what `batch_invariant()` costs: it runs, writes both times of a case, and times no wrong results."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp

import jaxsoftmax
from benchmarks import invariance
from benchmarks import results as measured

ROOT = Path(__file__).parents[2]


def test_the_binary_writes_both_times(tmp_path):
    path = tmp_path / "invariance.json"
    flags = ["--shrink=256", "--rounds=1", "--only=top 8", f"--json={path}", "--commit=abc"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.invariance", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = measured.read(path)
    assert found["header"]["topic"] == "invariance"
    assert len(found["records"]) == 2
    for record in found["records"]:
        assert all(record["impls"][name]["us"] > 0 for name in invariance.NAMES)
    assert done.stdout.count("batch invariant") == 2


def test_wrong_results_are_not_timed():
    def wrong(x):
        return x * (1.0 + jaxsoftmax._core.batch_invariance.enabled())

    found = invariance.record(case := invariance.Case("wrong", wrong, ((4, 8),)), invariance.measure(case, 1))
    assert found["status"] == "WRONG"
    assert found["impls"] == {}


def test_there_are_cases_of_every_kind():
    names = [case.name for case in invariance.cases()]
    assert len(set(names)) == len(names)
    assert all(any(kind in name for name in names) for kind in (*invariance.ROWS, *invariance.ATTENTION))
    assert jnp.bfloat16.dtype.itemsize * 4096 * 128256 == max(case.operand_bytes for case in invariance.cases())
