"""The scripts for a GPU, as far as they go without one: how work is dealt out, and what a sanitizer's run comes to."""

import itertools
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SANITIZER = (
    '#!/bin/sh\nfor last; do [ "${last#--after}" = "$last" ] || after=$last; done\ntool=$2\n. "$(dirname "$0")/body"\n'
)
STEPS = "echo steps 3; echo '1/3 case'; echo done; echo '2/3 case'; echo done; echo '3/3 case'; echo done\n"


@pytest.mark.parametrize("n", [1, 4, 7])
def test_parts_are_all_of_the_steps_and_none_twice(n):
    part_of = runpy.run_path(str(ROOT / "tests" / "gpu" / "steps.py"))["part_of"]
    parts = [part_of(list(range(30)), f"{i}/{n}") for i in range(1, n + 1)]
    assert sorted(itertools.chain(*parts)) == list(range(30))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError):
        part_of([], f"{n + 1}/{n}")


# The steps of a part, in the first process of which a step crashes.
CRASHING = """
import os, pathlib, signal, sys
sys.path.insert(0, "{folder}")
import steps
once = pathlib.Path(sys.argv.pop(1))

def step(name):
    if name == "{crashing}" and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGSEGV)

steps.main([(name, lambda name=name: step(name)) for name in "132465"], None)
"""


def _sanitize(folder: Path, body: str, seconds: int = 50) -> subprocess.CompletedProcess[str]:
    """The script with a sanitizer that does `body`, `$tool` and `$last` being its tool and part."""
    (folder / "body").write_text(body)
    program = folder / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    settings = {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder), "PARTS": "2", "JOBS": "4"}
    settings["SECONDS_ALL"] = str(seconds)
    command = [str(ROOT / "tests" / "gpu" / "sanitize.sh")]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=60)


def test_a_clean_run_passes(tmp_path):
    finished = _sanitize(tmp_path, STEPS)
    assert finished.stdout == "memcheck: 6 of 6 steps, 0 findings\nracecheck: 6 of 6 steps, 0 findings\n"
    assert finished.returncode == 0
    assert (tmp_path / "memcheck.txt").read_text().count("done\n") == 6


@pytest.mark.parametrize("crashing", ["2", "1"])
def test_a_part_in_which_the_tool_crashes_goes_on(tmp_path, crashing):
    (tmp_path / "steps").write_text(CRASHING.format(folder=ROOT / "tests" / "gpu", crashing=crashing))
    finished = _sanitize(tmp_path, f'{sys.executable} "$OUT/steps" "$OUT/$tool" $after $last')
    said = [f"{tool}, part 1/2: the tool crashed after {int(crashing) - 1} steps" for tool in ("memcheck", "racecheck")]
    *crashes, memcheck, racecheck = finished.stdout.splitlines()
    assert sorted(crashes) == said
    assert [memcheck, racecheck] == ["memcheck: 6 of 6 steps, 0 findings", "racecheck: 6 of 6 steps, 0 findings"]
    assert finished.returncode == 0


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
    "failed": ("[ $tool = memcheck ] && exit 1\ntrue\n", ["memcheck, part 1/2: failed", "memcheck, part 2/2: failed"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_found_or_cut_fails_and_is_named(tmp_path, fault):
    body, said = FAULTS[fault]
    finished = _sanitize(tmp_path, STEPS + body, *[3] * (fault == "cut"))
    assert finished.returncode == 1
    assert all(words in finished.stdout for words in said), finished.stdout


@pytest.mark.parametrize(
    "left, said", [(STEPS.removesuffix("; echo done\n"), "memcheck: 4 of 6 steps"), ("true", "memcheck: 0 of 0 steps")]
)
def test_steps_that_are_missing_fail(tmp_path, left, said):
    finished = _sanitize(tmp_path, left)
    assert said in finished.stdout
    assert finished.returncode == 1


def test_a_step_that_crashes_the_tool_again_and_again_fails(tmp_path):
    finished = _sanitize(tmp_path, "[ $last = --part=2/2 ] && echo steps 3 && kill -SEGV $$\n" + STEPS)
    assert finished.stdout.count("memcheck, part 2/2: the tool crashed after 0 steps\n") == 3
    assert "memcheck: 3 of 6 steps, 0 findings\nmemcheck, part 2/2: failed" in finished.stdout
    assert finished.returncode == 1


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

@pytest.mark.parametrize("n", range(20))
def test_alone(n):
    time.sleep(0.05)

def test_skipped():
    pytest.skip("for a reason")
"""


def _beside(folder: Path, tests: str, *flags: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """The runner's output, and its report, of tests in two processes, which are called the same wherever this runs."""
    file = folder / "test_toy.py"
    file.write_text(tests)
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "beside.py"), "--processes=2", *flags, "toy", str(file)]
    settings = {"OUT": str(folder)}
    finished = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)
    finished.stdout, report = (
        re.sub(r"[^\s]*/test_toy.py", "test_toy.py", text)
        for text in (finished.stdout, (folder / "toy.txt").read_text())
    )
    return finished, report


def test_processes_share_tests_and_none_runs_twice(tmp_path):
    finished, report = _beside(tmp_path, ALIKE)
    assert finished.returncode == 0, finished.stdout
    assert report.startswith("toy: 33 of 33 tests ran in ")
    assert "s: 32 passed, 0 failed, 1 skipped\n" in finished.stdout
    logs = report.partition("--- process 0")[2].partition("--- seconds")[0]
    assert sum(int(n) for n in re.findall(r"(\d+) passed", logs)) == 32
    assert len(re.findall(r"(?m)^ +[\d.]+ (passed|skipped) +\S+::", report.partition("--- seconds")[2])) == 33
    runs = {path.name: path.read_text().split() for path in tmp_path.glob("?-*")}
    assert [len(pids) for pids in runs.values()] == [3, 3, 3, 3]
    assert all(len(set(pids)) == 1 for pids in runs.values())


UNSOUND = {
    "failed": ("assert n != 7", ["19 passed, 1 failed, 0 skipped", "failed: test_toy.py::test[7]", "assert 7 != 7"]),
    "crashed": (
        "n == 7 and os._exit(9)",
        ["19 of 20 tests ran", "did not end: test_toy.py::test[7]", "1 processes ended with status 9"],
    ),
    "cut": (
        "assert n != 1, 'too early to be lost'\n    n == 7 and time.sleep(60)",
        ["19 of 20 tests ran", "did not end: test_toy.py::test[7]", "1 processes were cut: out of time", "to be lost"],
    ),
    "broken": ("pass\nassert False", ["0 of 0 tests ran", "2 processes ended with status 2", "assert False"]),
}


def test_a_process_that_lost_its_gpu_makes_way_for_another(tmp_path):
    body = "global lost\n    lost = lost or n == 7\n    time.sleep(0.0 if lost else 0.05)\n    assert not lost"
    head = "import time, pytest\nlost = False\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(60))\n"
    finished, _ = _beside(tmp_path, f"{head}def test(n):\n    {body}\n")
    assert "60 of 60 tests ran" in finished.stdout
    assert "57 passed, 3 failed, 0 skipped" in finished.stdout
    assert "1 processes ended with status 70" in finished.stdout
    assert finished.returncode == 1


@pytest.mark.parametrize("fault", UNSOUND)
def test_what_failed_crashed_or_was_cut_fails_and_is_named(tmp_path, fault):
    body, said = UNSOUND[fault]
    head = "import os, time, pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(20))\n"
    finished, report = _beside(tmp_path, f"{head}def test(n):\n    {body}\n", "--seconds=10")
    assert finished.returncode == 1
    assert all(words in finished.stdout and words in report for words in said), finished.stdout


def test_xla_knows_the_flags():
    """It ends the process at one that it does not know."""
    settings = runpy.run_path(str(ROOT / "tests" / "gpu" / "beside.py"))["environment"]() | {"JAX_PLATFORMS": "cpu"}
    assert "--xla_gpu" in settings["XLA_FLAGS"]
    finished = subprocess.run([sys.executable, "-c", "import jax; jax.jit(abs)(1.0)"], env=settings, timeout=60)
    assert finished.returncode == 0


def _all(folder: Path, *parts: str) -> list[list[str]]:
    """The arguments of each python3 that all.sh starts for its parts."""
    program = folder / "python3"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    settings = {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": "/out", "COMMIT": "abc", "PEERS": "/peers"}
    command = [str(ROOT / "tests" / "gpu" / "all.sh"), *parts]
    finished = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return [line.split() for line in finished.stdout.splitlines()]


TESTS = ("softmax", "cross-entropy", "attention", "library")
BENCHMARKS = {
    "benchmark": ["standard", "ladder"],
    "loss-benchmark": ["cross_entropy", "top_k"],
    "loss-peers": ["loss_peers"],
    "attention-benchmark": ["attention"],
    "attention-peers": ["attention_fa4"],
    "invariance": ["invariance", "invariance_attention"],
}


def test_parts_of_the_tests_share_one_run(tmp_path):
    ((script, *flags, name), last) = _all(tmp_path, "models", "attention", "library")[::-1]
    assert last[:2] == ["-m", "benchmarks.training"]
    assert script == "tests/gpu/beside.py"
    assert name.endswith(".py")
    assert "attention_library" in flags


@pytest.mark.slow
def test_every_gpu_test_belongs_to_a_part(tmp_path):
    (command,) = _all(tmp_path, *TESTS)
    paths = [word for word in command[command.index("softmax_cross-entropy_attention_library") + 1 :]]
    collect = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run(collect, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    tests = [line for line in found.stdout.splitlines() if "::" in line]
    assert len(tests) > 3000
    assert [test for test in tests if not test.startswith(tuple(paths))] == []
    assert all(any(test.startswith(path) for test in tests) for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize("part", BENCHMARKS)
def test_benchmarks_of_a_part_select_cases(tmp_path, part):
    commands = _all(tmp_path, part)
    files = [f"--json=/out/{name}.json" for name in BENCHMARKS[part]]
    assert [word for command in commands for word in command if "--json" in word] == files
    for command in commands:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        listed = [sys.executable, *command, "--list"]
        found = subprocess.run(listed, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stderr
        assert len(found.stdout.splitlines()) >= 6


PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def _bring(folder: Path, versions: dict[str, str], imported: str) -> None:
    """Wheels of these versions, whose `jax` says that it is `imported`, in two parts as they travel."""
    (folder / "wheels").mkdir()
    for name, version in versions.items():
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / "wheels" / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name.replace('-', '_')}/__init__.py", f'__version__ = "{imported}"\n')
            wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{stem}.dist-info/WHEEL", tags)
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
    with tarfile.open(folder / "all.tar", "w") as tar:
        for wheel in (folder / "wheels").iterdir():
            tar.add(wheel, wheel.name)
    packed = (folder / "all.tar").read_bytes()
    for name, part in (("aa", packed[:700]), ("ab", packed[700:])):
        (folder / f".jax_{name}").mkdir()
        (folder / f".jax_{name}" / f"part.{name}").write_bytes(part)


def _with_jax(folder: Path, version: str, *command: str) -> subprocess.CompletedProcess[str]:
    program = folder / "python3"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    settings = {"PATH": f"{folder}:{os.environ['PATH']}", "PARTS": str(folder), "JAX": str(folder / "installed")}
    script = [str(ROOT / "tests" / "gpu" / "with_jax.sh"), version, *command]
    return subprocess.run(script, env=os.environ | settings, capture_output=True, text=True, timeout=60)


SAYS = ("python3", "-c", "import jax; print(jax.__version__)")


def test_a_command_runs_with_the_jax_that_was_brought(tmp_path):
    _bring(tmp_path, dict.fromkeys(PACKAGES, "9.9.1"), "9.9.1")
    for _ in range(2):  # the second time it is there already
        finished = _with_jax(tmp_path, "9.9.1", *SAYS)
        assert (finished.returncode, finished.stdout) == (0, "9.9.1\n"), finished.stderr
        shutil.rmtree(tmp_path / ".jax_ab", ignore_errors=True)


@pytest.mark.parametrize(
    "asked, versions, imported",
    [
        ("9.9.2", dict.fromkeys(PACKAGES, "9.9.1"), "9.9.1"),
        ("9.9.1", dict.fromkeys(PACKAGES, "9.9.1"), "9.9.0"),
        ("9.9.1", dict.fromkeys(PACKAGES, "9.9.1") | {"jax-cuda13-plugin": "9.9.0"}, "9.9.1"),
    ],
    ids=["another was brought", "another is imported", "another plugin"],
)
def test_no_command_runs_with_another_jax(tmp_path, asked, versions, imported):
    _bring(tmp_path, versions, imported)
    finished = _with_jax(tmp_path, asked, *SAYS)
    assert finished.returncode == 1
    assert f"wanted JAX {asked}, got " in finished.stderr
    assert finished.stdout == ""


def test_without_parts_no_command_runs(tmp_path):
    finished = _with_jax(tmp_path, "9.9.1", *SAYS)
    assert finished.returncode != 0
    assert finished.stdout == ""
