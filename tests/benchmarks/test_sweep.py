"""The sweep of configs: what it times, and that a config that cannot run is a line like others."""

import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import sweep
from pallas_kernels.softmax.config import StagedConfig


@pytest.fixture
def asked():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["sweep", "--cols=1000"])

    def ask(**values):
        with flagsaver.flagsaver(**values):
            return list(sweep.jobs())

    return ask


def test_every_combination_is_a_job(asked):
    found = asked(cols=["1000", "2000"], dtype=["float16", "float32"], blocks=["2", "4"], slots=["1", "2"], in_turn=3)
    assert len(set(found)) == 16
    assert {job.config.rows for job in found} == {3, 6}
    assert {job.problem.rows for job in found if job.problem.cols == 1000} == {268435, 134217}


def test_each_knob_is_a_flag(asked):
    (job,) = asked(
        cols=["65536"], blocks=["4"], warpgroups=["1"], registers=["3"], slots=["2"], in_registers=["1"], spread=["1"]
    )
    assert job.config == StagedConfig(4, 1, 3, slots=2, rows=2, in_registers=1, spread=True)


def test_what_cannot_run_is_said(asked, tmp_path, capsys):
    sweep.work(asked(cols=["1000"], rows=3, rung="block"), str(tmp_path / "lock"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("softmax bfloat16 3 x 1000, block: ")
    assert "Error: " in line
