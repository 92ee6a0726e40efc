"""Mutation testing: a sample of one-operator faults in each module that `mutation.toml` lists, each against its tests.

cosmic-ray has the operators that make the faults. Its own runner is not used: it writes the mutant over the source, and
starts Python anew for each. Here a process that has imported JAX, but nothing of this repository, forks for each
mutant; the fork imports the mutant in the module's place, and no file changes. `make mutants` runs this file. Results
are kept in `.mutants`, so that a run goes on where the last one ended.
"""

import argparse
import collections
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import random
import re
import resource
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SCORES = Path(__file__).with_suffix(".json")
KEPT = ROOT / ".mutants"
MEMORY = 12 << 30  # bytes that one mutant may allocate: a wrong size must not take the machine's
NO_IMPORT = 97  # the exit status of a fork whose module does not even import
UNMUTATED = "unmutated"
NEVER_RUNS = re.compile(r"(strict|frozen)=\w+")  # what only a wrong program would notice
Result = dict[str, Any]


class Mutant(NamedTuple):
    """A module's source with one operator applied, or as it is."""

    module: str
    source: str
    line: int = 0
    change: str = UNMUTATED  # the line before => the line after

    @property
    def key(self) -> str:
        """What a result is kept under: it changes with the module's source."""
        return hashlib.sha256(f"{self.module}\n{self.source}".encode()).hexdigest()[:16]


def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def mutants(module: str) -> Iterator[Mutant]:
    """All that compile, in an order drawn by the module's name: the first N are the sample of size N."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    source = path_of(module).read_text()
    nodes, places = list(ast_nodes(get_ast(source))), []
    for operator in (OperatorProvider()[name]() for name in CONFIG["operators"]):
        positions = [node for node in nodes for _ in operator.mutation_positions(node)]
        places += [(operator, i) for i, node in enumerate(positions) if not _in_annotation(node)]
    random.Random(f"0 {module}").shuffle(places)
    for operator, occurrence in places:
        mutated = mutate_code(source, operator, occurrence)
        try:
            compile(mutated, module, "exec")
        except SyntaxError:
            continue
        lines = enumerate(zip(source.splitlines(), mutated.splitlines(), strict=True), 1)
        line, pair = next((line, pair) for line, pair in lines if pair[0] != pair[1])
        old, new = (" ".join(x.split()) for x in pair)
        if NEVER_RUNS.sub("", old) != NEVER_RUNS.sub("", new):
            yield Mutant(module, mutated, line, f"{old} => {new}")


def _in_annotation(node: Any) -> bool:
    """Whether a node of the syntax is part of a type, which no test can tell from another."""
    while node.parent is not None:
        parent = node.parent
        if parent.type in ("param", "funcdef") and node is parent.annotation:
            return True
        if parent.type in ("tfpdef", "annassign") and node is parent.children[2 if parent.type == "tfpdef" else 1]:
            return True
        node = parent
    return False


class _Import(importlib.machinery.SourceFileLoader, importlib.abc.MetaPathFinder):
    """Finds the mutant's module, and loads it from the mutant's source; never from, or into, a file of byte code."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(path_of(mutant.module)))
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self.mutant.source, self.path, "exec", dont_inherit=True)


def _run_tests(mutant: Mutant, folder: str) -> int:
    """In the fork: the exit status of pytest on the mutant's tests."""
    import pytest

    sys.meta_path.insert(0, _Import(mutant))
    try:
        importlib.import_module(mutant.module)
    except BaseException:  # whatever it is, there is no program to test
        traceback.print_exc()
        return NO_IMPORT
    quiet = ["-x", "-q", "--tb=line", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words = [*CONFIG["pytest"], *CONFIG["module"][mutant.module]["tests"]]
    return int(pytest.main([*quiet, f"--rootdir={ROOT}", f"--basetemp={folder}/tmp", *words]))


def _fork(mutant: Mutant, seconds: float, folder: str) -> int:
    """The number of a new process that tests the mutant, in so many seconds of its processors at the most."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        for one in (1, 2):
            os.dup2(os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), one)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        status = _run_tests(mutant, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(wanted: Iterable[tuple[Mutant, float]], jobs: int, until: float) -> Iterator[Result]:
    """The results of mutants, each with the seconds that it may take, as they come; none starts after `until`."""
    running: dict[int, tuple[Mutant, Any]] = {}

    def ended() -> Result:
        pid, status, used = os.wait4(-1, 0)
        mutant, folder = running.pop(pid)
        outcome = {0: "survived", NO_IMPORT: "no import"}.get(os.waitstatus_to_exitcode(status), "killed")
        output = Path(folder.name, "output").read_text(errors="replace")
        failed = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        folder.cleanup()
        result = {"key": mutant.key, "module": mutant.module, "line": mutant.line, "change": mutant.change}
        result |= {"seconds": round(used.ru_utime + used.ru_stime, 1), "outcome": outcome}
        result |= {"by": failed[0] if failed else output[-600:]}
        with (KEPT / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        return result

    for mutant, seconds in itertools.takewhile(lambda _: time.monotonic() < until, wanted):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        running[_fork(mutant, seconds, folder.name)] = mutant, folder
        if len(running) == jobs:
            yield ended()
    while running:
        yield ended()


def _entry(results: Mapping[str, Result], keys: Iterable[str]) -> dict[str, Any]:
    """What is committed of a sample."""
    counted = [results[key] for key in keys if results[key]["outcome"] != "no import"]
    left = sorted({result["change"] for result in counted if result["outcome"] == "survived"})
    return {"sample": len(counted), "survivors": left}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", default="", help="only modules whose name contains this")
    parser.add_argument("--sample", type=int, default=48, help="mutants of each module")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out so many of each module: tests were written for them"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60, help="no mutant starts after these")
    parser.add_argument("--again", action="store_true", help="test those anew that survived")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    KEPT.mkdir(exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(KEPT / "programs")
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in CONFIG["preload"]:
        importlib.import_module(name)

    file = KEPT / "results.jsonl"
    known = [*map(json.loads, file.read_text().splitlines() if file.exists() else [])]
    done = {x["key"]: x for x in known}  # of two results of one mutant the last
    first = {x["key"]: x for x in reversed(known)}
    if options.again:
        done = {key: x for key, x in done.items() if x["outcome"] != "survived"}
    modules = [module for module in CONFIG["module"] if options.module in module]
    samples = {
        module: list(itertools.islice(mutants(module), options.skip, options.skip + options.sample))
        for module in modules
    }
    wanted = [m for m in itertools.chain(*itertools.zip_longest(*samples.values())) if m and m.key not in done]
    unmutated = [Mutant(module, path_of(module).read_text()) for module in {m.module: None for m in wanted}]
    limits = {}
    for result in run(((m, 900.0) for m in unmutated), options.jobs, until):
        if result["outcome"] != "survived":
            sys.exit(f"{result['module']}: its tests fail without a mutant: {result['by']}")
        limits[result["module"]] = 3 * result["seconds"] + 10
        print(f"{result['module']}: its tests take {result['seconds']} s", flush=True)
    for result in run(((m, limits[m.module]) for m in wanted if m.module in limits), options.jobs, until):
        done[result["key"]] = result
        first.setdefault(result["key"], result)
        print(f"{result['outcome']}: {path_of(result['module'])}:{result['line']}: {result['change']}", flush=True)

    found = committed() if SCORES.exists() else {}
    for module, sample in samples.items():
        # A sample ends before the first that has no result: those that are quickly killed would be most of it.
        keys = [m.key for m in itertools.takewhile(lambda m: m.key in done, sample)]
        entry = found.setdefault(module, {})
        entry |= {"unseen": _entry(first, keys)} if options.skip else _entry(done, keys)
    listed = {module: found[module] for module in CONFIG["module"] if module in found}
    SCORES.write_text(json.dumps(listed, indent=1) + "\n")


class Score(NamedTuple):
    """Of a module's sample how many are equivalent to the module, and of the others how many were killed."""

    sample: int
    equivalent: int
    killed: int

    @property
    def share(self) -> float:
        return self.killed / max(1, self.sample - self.equivalent)


def committed(*, unseen: bool = False) -> dict[str, Any]:
    """What the last runs found, of each module; or of those mutants that no test was written for, at first."""
    found = json.loads(SCORES.read_text())
    return {module: entry["unseen"] for module, entry in found.items() if "unseen" in entry} if unseen else found


def survivors(*, unseen: bool = False) -> Iterator[tuple[str, str, str, str]]:
    """Each survivor: its module, the change, whether it is equivalent or accepted, and why."""
    for module, entry in committed(unseen=unseen).items():
        for change in entry["survivors"]:
            named = {verdict: CONFIG["module"][module].get(verdict, {}) for verdict in ("equivalent", "accepted")}
            verdict = next((verdict for verdict, reasons in named.items() if change in reasons), "")
            yield module, change, verdict, named[verdict][change] if verdict else ""


def scores(*, unseen: bool = False) -> dict[str, Score]:
    """The score of each module, and that of "all"."""
    verdicts = collections.Counter((module, verdict) for module, _, verdict, _ in survivors(unseen=unseen))
    found = {
        module: Score(entry["sample"], verdicts[module, "equivalent"], entry["sample"] - len(entry["survivors"]))
        for module, entry in committed(unseen=unseen).items()
    }
    return found | {"all": Score(*map(sum, zip(*found.values(), strict=True)))}


if __name__ == "__main__":
    main()
