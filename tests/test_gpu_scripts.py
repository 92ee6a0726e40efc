"""The scripts for a GPU, as far as they go without one: how work is dealt out, and what a sanitizer's run comes to."""

import itertools
import os
import runpy
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SANITIZER = '#!/bin/sh\nfor last; do :; done\ntool=$2\n. "$(dirname "$0")/body"\n'
STEPS = "echo steps 3; echo '1/3 case'; echo done; echo '2/3 case'; echo done; echo '3/3 case'; echo done\n"


@pytest.mark.parametrize("n", [1, 4, 7])
def test_parts_are_all_of_the_steps_and_none_twice(n):
    part_of = runpy.run_path(str(ROOT / "tests" / "gpu" / "every_rung.py"))["part_of"]
    parts = [part_of(list(range(30)), f"{i}/{n}") for i in range(1, n + 1)]
    assert sorted(itertools.chain(*parts)) == list(range(30))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError):
        part_of([], f"{n + 1}/{n}")


def _sanitize(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """The script with a sanitizer that does `body`, `$tool` and `$last` being its tool and part."""
    (folder / "body").write_text(body)
    program = folder / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    settings = {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder), "PARTS": "2", "SECONDS_EACH": "2"}
    command = [str(ROOT / "tests" / "gpu" / "sanitize.sh")]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=60)


def test_a_clean_run_passes(tmp_path):
    finished = _sanitize(tmp_path, STEPS)
    assert finished.stdout == "memcheck: 6 of 6 steps, 0 findings\nracecheck: 6 of 6 steps, 0 findings\n"
    assert finished.returncode == 0
    assert (tmp_path / "memcheck.txt").read_text().count("done\n") == 6


FAULTS = {
    "found": (
        "[ \"$tool $last\" = 'racecheck --part=2/2' ] && echo '========= Error: Race reported' && exit 9\n",
        ["racecheck: 6 of 6 steps, 1 findings", "racecheck, part 2/2: found something"],
    ),
    "warned": (
        "[ \"$tool $last\" = 'racecheck --part=2/2' ] && echo '========= Warning: Race reported'\ntrue\n",
        ["racecheck: 6 of 6 steps, 1 findings"],
    ),
    "cut": (
        "[ $last = --part=1/2 ] && sleep 30\ntrue\n",
        ["memcheck: 6 of 6 steps", "memcheck, part 1/2: was cut: out of time"],
    ),
    "crashed": ("[ $tool = memcheck ] && exit 1\ntrue\n", ["memcheck, part 1/2: failed", "memcheck, part 2/2: failed"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_found_or_cut_fails_and_is_named(tmp_path, fault):
    body, said = FAULTS[fault]
    finished = _sanitize(tmp_path, STEPS + body)
    assert finished.returncode == 1
    assert all(words in finished.stdout for words in said), finished.stdout


@pytest.mark.parametrize(
    "left, said", [(STEPS.removesuffix("; echo done\n"), "memcheck: 4 of 6 steps"), ("true", "memcheck: 0 of 0 steps")]
)
def test_steps_that_are_missing_fail(tmp_path, left, said):
    finished = _sanitize(tmp_path, left)
    assert said in finished.stdout
    assert finished.returncode == 1
