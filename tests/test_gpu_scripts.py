"""The scripts for a GPU, as far as they go without one: how `beside.py` runs tests, and that shell reads the others."""

import fnmatch
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GPU = ROOT / "tests" / "gpu"
HEAD = "import os, time, pytest\nlost = False\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(20))\n"


def _beside(folder: Path, tests: str, *flags: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """The runner's output and its report, of tests in two processes."""
    file = folder / "test_toy.py"
    file.write_text(tests)
    command = [sys.executable, str(GPU / "beside.py"), "--processes=2", *flags, "toy", str(file)]
    environment = os.environ | {"OUT": str(folder)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    finished.stdout = re.sub(r"\S*/test_toy.py", "test_toy.py", finished.stdout)
    return finished, re.sub(r"\S*/test_toy.py", "test_toy.py", (folder / "toy.txt").read_text())


ALIKE = """
import os, time, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.together("n", "x.real")
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("x", [1, 1j])
def test_alike(n, i, x):
    with open(os.path.join(os.environ["OUT"], f"{n}-{x}"), "a") as file:
        file.write(f"{os.getpid()} ")
    time.sleep(0.05)

def test_skipped():
    pytest.skip("for a reason")
"""


def test_processes_share_tests_and_none_runs_twice(tmp_path):
    finished, report = _beside(tmp_path, ALIKE)
    assert finished.returncode == 0, finished.stdout
    assert "13 of 13 tests ran\n" in report
    assert "12 passed, 1 skipped" in finished.stdout
    assert len(re.findall(r"(?m)^0\.0\ds call +\S+::test_alike", report)) == 12
    runs = [path.read_text().split() for path in tmp_path.glob("?-*")]
    assert [len(pids) for pids in runs] == [3, 3, 3, 3]
    assert sum(len(set(pids)) for pids in runs) <= 6, "a process has most of those that are alike"


UNSOUND = {
    "failed, crashed and cut": (
        "assert n != 2, 'a failure'\n    n == 5 and os._exit(9)\n    n == 19 and time.sleep(60)",
        [
            " of 20 tests ran",
            "2 failed, ",
            "FAILED test_toy.py::test[2] - AssertionError: a failure",
            "crashed while running 'test_toy.py::test[5]'",
            "did not end: test_toy.py::test[5]",
            "did not end: test_toy.py::test[19]",
        ],
    ),
    "not collected": ("pass\nassert False", ["0 of 0 tests ran", "ERROR test_toy.py", "assert False"]),
    "skipped": ("pytest.skip('no GPU')", ["20 of 20 tests ran", "20 skipped"]),
    "without its GPU": (
        "global lost\n    lost = lost or n == 7\n    time.sleep(0.0 if lost else 0.1)\n    assert not lost",
        ["20 of 20 tests ran", "17 passed", "crashed while running"],
    ),
}


@pytest.mark.parametrize("fault", UNSOUND)
def test_what_failed_crashed_or_was_cut_is_named(tmp_path, fault):
    body, said = UNSOUND[fault]
    seconds = 15 if "cut" in fault else 100
    finished, report = _beside(tmp_path, f"{HEAD}def test(n):\n    {body}\n", f"--seconds={seconds}")
    assert finished.returncode == 1
    assert all(words in finished.stdout and words in report for words in said), finished.stdout


def test_xla_knows_the_flags():
    """XLA ends the process at a flag that it does not know."""
    settings = runpy.run_path(str(GPU / "beside.py"))["environment"]() | {"JAX_PLATFORMS": "cpu"}
    assert "--xla_gpu" in settings["XLA_FLAGS"]
    subprocess.run([sys.executable, "-c", "import jax; jax.jit(abs)(1.0)"], env=settings, timeout=60, check=True)


@pytest.mark.parametrize("script", sorted(GPU.glob("*.sh")), ids=lambda path: path.name)
def test_shell_reads_the_script(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", str(script)], timeout=60, check=True)


def test_every_file_of_gpu_tests_belongs_to_a_part():
    patterns = re.findall(r"(?:tests/\w+|\$here)/test_[\w*]+\.py", (GPU / "all.sh").read_text())
    patterns = [pattern.replace("$here", "tests/pallas_kernels") for pattern in patterns]
    files = [
        path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name in ("jaxsoftmax", "pallas_kernels")
    ]
    on_gpu = [str(path.relative_to(ROOT)) for path in files if "pytest.mark.gpu" in path.read_text()]
    assert len(on_gpu) > 5
    assert [path for path in on_gpu if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)] == []


def test_parts_are_all_of_the_steps_and_none_twice():
    found = runpy.run_path(str(GPU / "steps.py"))
    for every in ("every_kernel", "every_attention"):
        names = [name for name, _ in found[every]()]
        parts = [found["part_of"](names, f"{i}/4") for i in range(1, 5)]
        assert sorted(itertools.chain(*parts)) == sorted(names)
        assert len(names) > 50
    with pytest.raises(ValueError):
        found["part_of"]([], "5/4")
