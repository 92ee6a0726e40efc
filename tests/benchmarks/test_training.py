"""The benchmark of the example's GPT: processes, losses that must agree, and the table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import docs, training
from benchmarks import results as measured
from benchmarks.results import NOT_MEASURED, Results

ROOT = Path(__file__).parents[2]


def _entry(tokens, losses=(10.0, 9.0, 8.0, 7.0), **facts):
    memory = {"peak_bytes": 20 * 10**9, "temp_bytes": 16 * 10**9}
    return {"status": "ok", "tokens_per_s": tokens, "step_ms": 100.0, "losses": list(losses), **memory, **facts}


FAILED = {"status": "failed", "reason": "XlaRuntimeError: RESOURCE_EXHAUSTED"}


@pytest.mark.slow
def test_variants_train_in_processes_of_their_own(tmp_path):
    path = tmp_path / "models.json"
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", "--size=tiny", f"--json={path}"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (record,) = measured.read(path)["records"]
    ours, theirs, cudnn = (record["impls"][name] for name in training.VARIANTS)
    assert len(ours["losses"]) == len(theirs["losses"]) == 8
    assert ours["tokens_per_s"] > 0
    assert ours["parameters"] == record["case"]["parameters"] > 10**5
    assert record["loss_gap"] < 1e-3
    assert cudnn["status"] == "failed"
    assert cudnn["reason"]
    assert "ours" in finished.stdout


@pytest.mark.parametrize(
    "impls, right",
    [
        ({"ours": _entry(2)}, True),
        ({"ours": _entry(2), "jax.nn": FAILED}, True),
        ({"ours": _entry(2), "jax.nn": _entry(1, (10.0, 9.0, 8.0, 7.04))}, True),
        ({"ours": _entry(2), "jax.nn": _entry(1, (10.0, 9.0, 8.0, 7.06))}, False),
        ({"ours": _entry(2, (10.0, 10.0, 10.1, 10.1))}, False),
        ({"ours": _entry(2, (10.0, float("nan"), 8.0, 7.0))}, False),
        ({"ours": _entry(2), "jax.nn": _entry(1, (10.0, float("nan"), 8.0, 7.0))}, False),
        ({"ours": FAILED}, False),
    ],
)
def test_losses_must_fall_and_agree(impls, right):
    assert training.judged(impls)["right"] is right


def test_the_table_comes_from_results(tmp_path):
    assert NOT_MEASURED in docs.rewrite("<!-- table:models -->\n<!-- /table -->", Results(tmp_path))
    case = {"name": "gpt_small_8x4096", "rows": 8, "length": 4096, "parameters": 127917056, "layers": 12, "heads": 12}
    case |= {"key_heads": 4, "head_dim": 64, "vocabulary": 32000, "dtype": "bfloat16", "steps": 20}
    impls = {"ours": _entry(300), "jax.nn": FAILED, "jax.nn cudnn": _entry(200, peak_bytes=None)}
    header = {"topic": "models", "timestamp": "2026-11-21", "commit": "abc", "device": {"name": "H"}, "versions": {}}
    measured.write(
        tmp_path / "h200" / "models.json", header, [{"case": case, "impls": impls, **training.judged(impls)}]
    )
    text = docs.rewrite("<!-- table:models -->\n<!-- /table -->", Results(tmp_path))
    assert "| GPT | tokens/s | x | ms a step | peak, GB | temporary, GB | last loss |" in text
    assert "| jaxsoftmax, 8 x 4096 | 300 | 1.00 | 100.0 | 20.0 | 16.0 | 7.000 |" in text
    assert "| `jax.nn`, XLA, 8 x 4096 | failed | - | - | - | - | - |" in text
    assert "| `jax.nn`, cuDNN, 8 x 4096 | 200 | 1.50 | 100.0 | - | 16.0 | 7.000 |" in text
    assert "128 million parameters, 12 layers, heads 12/4 of 64" in text
