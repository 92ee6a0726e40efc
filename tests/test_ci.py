"""What CI runs: a stage that fails, or that runs nothing, is red.

`.ci/run` and the Makefile run as they are, in a folder where every tool is a script that records how it was called.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parent.parent
# A stage, and how the call begins that it is about.
STAGES = {
    "lint": ".venv-new/bin/ruff check .",
    "format": ".venv-new/bin/ruff format --check .",
    "type": ".venv-new/bin/pyright",
    "test-new": ".venv-new/bin/python -m pytest",
    "test-old": ".venv-old/bin/python -m pytest",
    "aot-new": ".venv-new/bin/python -m pytest",
    "aot-old": ".venv-old/bin/python -m pytest",
}
TOOL = """#!/bin/sh
printf '%s\\037' "$0" "$@" | tr '\\n' ' ' >> calls
printf 'PYTHONPATH=%s\\n' "$PYTHONPATH" >> calls
last=$(tail -n 1 calls)
case "$last" in *"$FAILS"*) exit 3;; esac
for word; do [ "$before" != --target ] || mkdir -p "$word"; before=$word; done
"""
VENV = """#!/bin/sh
[ "$FAILS" != venv ] || exit 3
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The repository as far as `.ci/run` reads it, with tools that only record their calls."""
    for name in (".ci/run", "Makefile", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    tools = [f".venv-{age}/bin/{tool}" for age in ("new", "old") for tool in ("python", "ruff", "pyright")]
    for name, text in ((".ci/venv", VENV), *((tool, TOOL) for tool in tools)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def ready(checkout: Path) -> None:
    """Every environment is there and up to date."""
    for name in (".venv-new", ".venv-old", ".aot-new", ".aot-old"):
        (checkout / name).mkdir(exist_ok=True)
        (checkout / name / "ready").touch()


def ci(checkout: Path, fails: str = "nothing") -> tuple[int, list[list[str]]]:
    """The status of `.ci/run`, and the calls that it made, if those with `fails` in them fail."""
    (checkout / "calls").unlink(missing_ok=True)
    env = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    done = subprocess.run([checkout / ".ci" / "run"], env=env | {"FAILS": fails}, capture_output=True, timeout=60)
    lines = (checkout / "calls").read_text().splitlines() if (checkout / "calls").exists() else []
    return done.returncode, [line.split("\037") for line in lines]


def stages(calls: list[list[str]]) -> dict[str, list[str]]:
    """The call of each stage."""
    found: dict[str, list[str]] = {}
    for call in calls:
        is_aot = "tests/pallas_kernels" in call
        for stage, words in STAGES.items():
            if " ".join(call).startswith(words) and ("pytest" not in words or stage.startswith("aot") == is_aot):
                assert stage not in found, f"{stage} runs twice"
                found[stage] = call
    return found


def test_every_stage_runs(checkout):
    ready(checkout)
    status, calls = ci(checkout)
    assert status == 0
    assert len(calls) == len(STAGES)
    found = stages(calls)
    assert found.keys() == STAGES.keys()
    for age in ("new", "old"):
        assert found[f"aot-{age}"][-1] == f"PYTHONPATH=.aot-{age}"
    # Nothing is left out on the newest JAX.
    assert not {"-k", "--one-in", "--ignore", "--deselect", "--lf"} & {word.split("=")[0] for word in found["test-new"]}
    assert not {"-k", "--one-in", "--ignore", "--deselect", "--lf"} & {word.split("=")[0] for word in found["aot-new"]}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_is_red(checkout, stage):
    ready(checkout)
    _, calls = ci(checkout)
    words = "\037".join(stages(calls)[stage])
    status, after = ci(checkout, words)
    assert status != 0
    # It is that stage that failed: none came after it.
    assert "\037".join(after[-1]) == words


@pytest.mark.parametrize("missing", [".venv-new", ".venv-old"])
def test_an_environment_that_cannot_be_made_is_red(checkout, missing):
    ready(checkout)
    (checkout / missing / "ready").unlink()
    status, _ = ci(checkout, "venv")
    assert status != 0
    assert not (checkout / missing / "ready").exists()
    status, _ = ci(checkout)
    assert status == 0
    assert (checkout / missing / "ready").exists()


@pytest.mark.parametrize("package", ["jax-cuda13-plugin==", "nvidia-cuda-nvcc=="])
def test_a_compiler_that_cannot_be_installed_is_red(checkout, package):
    ready(checkout)
    (checkout / ".aot-old" / "ready").unlink()
    assert ci(checkout, package)[0] != 0
    assert not (checkout / ".aot-old" / "ready").exists()


def test_every_marker_is_run_by_a_stage(checkout):
    """Each test that needs no GPU runs on the newest JAX, whatever its markers, and none that needs one."""
    ready(checkout)
    found = stages(ci(checkout)[1])
    expressions = {name: call[call.index("-m", 3) + 1] for name, call in found.items() if "pytest" in call}
    runs = lambda name, markers: Expression.compile(expressions[name]).evaluate(lambda word, **_: word in markers)
    for markers in itertools.chain(*(itertools.combinations(("slow", "aot", "gpu"), n) for n in range(4))):
        newest = [name for name in ("test-new", "aot-new") if runs(name, markers)]
        if "gpu" not in markers:
            assert newest == ["aot-new" if "aot" in markers else "test-new"], markers
        assert not ("gpu" in markers and "aot" not in markers and newest)
    assert runs("test-old", ())
    assert runs("aot-old", ("aot",))
    # A stage demands that some of them passed: were all skipped, it would have run nothing.
    demanded = {name: re.findall(r"--must-pass=(\S+)", " ".join(call)) for name, call in found.items()}
    assert demanded == {
        **{"lint": [], "format": [], "type": []},
        **{"test-new": ["slow"], "test-old": [], "aot-new": ["aot,slow"], "aot-old": ["aot"]},
    }


TESTS = """
import pytest

def test_plain():
    pass

@pytest.mark.aot
def test_compiled():
    {aot}

@pytest.mark.slow
def test_long():
    {slow}
"""


@pytest.mark.parametrize(
    "aot, slow, flags, status",
    [
        ("pass", "pass", (), 0),
        ("pytest.skip('no compiler')", "pass", ("-n", "1"), 1),
        ("pass", "pytest.skip('no time')", (), 1),
    ],
)
def test_a_stage_whose_tests_were_all_skipped_is_red(tmp_path, aot, slow, flags, status):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_toy.py").write_text(TESTS.format(aot=aot, slow=slow))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    aot: compiled\n    slow: long\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--must-pass=aot,slow", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("--must-pass: no test marked" in done.stdout) == (status != 0)


def test_a_stage_without_a_test_is_red(tmp_path):
    """The status of pytest that has collected nothing is 5; make ends at any but 0."""
    (tmp_path / "test_toy.py").write_text("def test_plain():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "nothing", "-n", "1"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120).returncode == 5
