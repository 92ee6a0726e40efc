r"""`python -m benchmarks.tune`: finds values of the tuned figures with which the card of this machine is faster.

Each figure takes a few values around the present one. Every config that they choose for a case is timed once, beside
the other configs of the case, as the benchmark times implementations. Then one figure at a time moves to the value that
is best by these times, until no figure moves. A figure moves only where it saves more than 1 % of its cases' time.
`--write` puts the values into `pallas_kernels/tuned.json`. The other flags are those of `python -m benchmarks`.

Examples:
  python -m benchmarks.tune --op=attention --processes=16 --budget_s=500 --json=FILE
  python -m benchmarks.tune --write
"""

import dataclasses
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from unittest import mock

from absl import app, flags

from benchmarks import __main__ as program
from benchmarks import attention_cases, impls, report
from benchmarks.results import KERNEL, ROOT
from benchmarks.runner import Case
from pallas_kernels import decision, hardware
from pallas_kernels.attention import dispatch as attention_dispatch
from pallas_kernels.attention import problem as attention_problem
from pallas_kernels.hardware import Device
from pallas_kernels.softmax import dispatch

FACTORS = (0.85, 1.2, 0.7, 1.4, 0.5, 2.0)  # the nearest first: of equally good values, it is taken
MARGIN = math.log(1.01)  # what a figure has to gain
SLOWER = 1.02  # cases that take longer by this factor are named
TAGS = ("standard", "cross_entropy", "short")

Figures = dict[str, float]
Times = Mapping[str, Mapping[str, float]]  # by case and config, in microseconds; a config has an implementation's name

FLAGS = flags.FLAGS
flags.DEFINE_bool("write", False, "Write what was found to pallas_kernels/tuned.json.")


class Subject(NamedTuple):
    """The figures of rows or of attention; those that are fixed say what compiles, not what is fast."""

    topic: program.Topic
    name: str
    module: types.ModuleType  # that chooses, and has the figures
    problem: Callable[[Any], Any]  # of a case; None where one kernel does not compute it
    prefix: Callable[[str], str]  # of an implementation's name, for a kernel
    fixed: tuple[str, ...] = ()


def _rows(case: Any) -> Any:
    return case.problems[0] if impls.is_plain(case) and case.pass_ != "call" else None


def _attention(case: Any) -> Any:
    return attention_cases.problem_of(attention_problem, case.shape, case.pass_ == "bwd")


_COMPILED = ("register_chunks", "register_chunks_16bit", "register_chunks_linear", "grid_ctas")
_POWERS_OF_TWO = ("warp_vectors", "warp_vectors_ragged")
SUBJECTS = (
    Subject(program.ROWS, "softmax", dispatch, _rows, KERNEL.__add__, _COMPILED + _POWERS_OF_TWO),
    Subject(program.HEADS, "attention", attention_dispatch, _attention, lambda _: "now"),
)


class Search:
    """Configs that figures choose for cases on a device, and the figures that are best by their times."""

    def __init__(self, subject: Subject, cases: Iterable[Case], device: Device):
        self.subject, self.device = subject, device
        self.start = decision.numbers(subject.module.thresholds(device))
        self.names = [name for name in self.start if name not in subject.fixed]
        self.times: Times = {}
        found = {case: subject.problem(case) for case in cases}
        self._problems = {case: problem for case, problem in found.items() if problem is not None}
        self._chosen: dict[tuple[float, ...], dict[str, str | None]] = {}

    def values(self, name: str) -> list[float]:
        """The present value of a figure, and others."""
        present = self.start[name]
        scaled = (present * factor for factor in FACTORS)
        others = (max(round(x), 1) if isinstance(present, int) else float(f"{x:.3g}") for x in scaled)
        return [*dict.fromkeys((present, *others))]

    def chosen(self, figures: Figures) -> dict[str, str | None]:
        """The config that the figures choose for each case; None where they choose XLA, or a kernel for a part."""
        key, module = tuple(figures.values()), self.subject.module
        if key not in self._chosen:
            with mock.patch.dict(module.BY_CARD, {self.device.card: decision.replaced(module.DEFAULT, figures)}):
                self._chosen[key] = {case.name: self._config(problem) for case, problem in self._problems.items()}
        return self._chosen[key]

    def _config(self, problem: Any) -> str | None:
        found = self.subject.module.decide(problem, self.device)
        if found.kernel is None or found.problem != problem:
            return None
        fields = (f"{name}={value}" for name, value in vars(found.config).items())
        return ":".join([self.subject.prefix(found.kernel), *fields])

    def configs(self) -> dict[Case, list[str]]:
        """The cases that have several configs, and those, the present one first."""
        points = [self.chosen(self.start | {name: value}) for name in self.names for value in self.values(name)]
        found = {case: [*dict.fromkeys(chosen[case.name] for chosen in points)] for case in self._problems}
        return {case: [x for x in each if x] for case, each in found.items() if each[0] and len(each) > 1}

    def gains(self, before: Figures, after: Figures) -> list[float]:
        """By how much each case with another config gets faster, as a logarithm; without a time it takes forever."""
        us = lambda figures, case: self.times[case].get(str(self.chosen(figures)[case]), math.inf)
        changed = [case for case in self.times if self.chosen(before)[case] != self.chosen(after)[case]]
        return [math.log(us(before, case)) - math.log(us(after, case)) for case in changed]

    def best(self, times: Times) -> Figures:
        """Where descent ends, without the moves that no longer gain. Cases whose present config failed do not count."""
        present = self.chosen(self.start)
        self.times = {case: times[case] for case in present if present[case] in times.get(case, {})}
        found, before = self.start, None
        while found != before:
            before = found
            for name in self.names:
                tried = [found | {name: value} for value in self.values(name)]
                better = [figures for figures in tried if _mean(self.gains(found, figures)) > MARGIN]
                found = max(better, key=lambda figures: sum(self.gains(found, figures)), default=found)
        for name in self.names:
            without = found | {name: self.start[name]}
            found = without if _mean(self.gains(found, without)) >= -MARGIN else found
        return found

    def report(self, found: Figures) -> str:
        """The figures that move, with what each gains by itself, and the cases that get slower."""
        moved = [name for name in self.names if found[name] != self.start[name]]
        points = {f"`{x}`": (str(self.start[x]), str(found[x]), self.start | {x: found[x]}) for x in moved}
        points["together"] = "", "", found
        gains = {name: self.gains(self.start, figures) for name, (*_, figures) in points.items()}
        facts = {name: (f"{100 * math.expm1(_mean(x)):.1f} %", f"{len(x)}") for name, x in gains.items()}
        rows = [[name, old, new, *facts[name]] for name, (old, new, _) in points.items()]
        before, after = self.chosen(self.start), self.chosen(found)
        ratios = {case: us[str(after[case])] / us[str(before[case])] for case, us in self.times.items()}
        slower = [f"slower: {case}, {ratio:.3f} times" for case, ratio in ratios.items() if ratio > SLOWER]
        return "\n".join([report.markdown(["figure", "old", "new", "gain", "cases"], rows), *slower])

    def write(self, found: Figures) -> None:
        """Puts the figures that are not the defaults into the card's entry."""
        defaults, cards = decision.numbers(self.subject.module.DEFAULT), json.loads(decision.TUNED.read_text())
        own = {name: value for name, value in found.items() if value != defaults[name]}
        cards[self.device.card] = cards.get(self.device.card, {}) | {self.subject.name: own}
        decision.TUNED.write_text(json.dumps(cards, indent=2) + "\n")


def _mean(gains: list[float]) -> float:
    return sum(gains) / max(len(gains), 1)


def measure(configs: Mapping[Case, list[str]]) -> Times:
    of_case = {case.name: names for case, names in configs.items()}
    options = impls.Options(rounds=FLAGS.rounds or 3, seed=FLAGS.seed, trees={"now": str(ROOT)}, of_case=of_case)
    limits = {"budget_s": FLAGS.budget_s, "processes": FLAGS.processes}
    records = program.measure([*configs], options, path=FLAGS.json, commit=FLAGS.commit, **limits)
    times = lambda entries: {name: entry["us"] for name, entry in entries.items() if "us" in entry}
    return {record["case"]["name"]: times(record["impls"]) for record in records}


def _cases(topic: program.Topic) -> Iterable[Any]:
    """Selects cases by the flags, each once; a case of both passes of attention stands for the backward pass."""
    cases = program.selected(topic)
    if topic is program.HEADS:
        cases = [dataclasses.replace(case, pass_="fwd" if case.pass_ == "fwd" else "bwd") for case in cases]
    return {case.name: case for case in cases}.values()


def main() -> None:
    app.define_help_flags()
    FLAGS(sys.argv)
    device = hardware.present()
    refused = "this process has none" if device is None else hardware.supports_kernels(device)
    if device is None or refused:
        sys.exit(f"Figures are tuned on a Hopper GPU: {refused}.")
    FLAGS.tag = FLAGS.tag or TAGS
    searches = [Search(subject, _cases(subject.topic), device) for subject in SUBJECTS]
    configs = {case: names for search in searches for case, names in search.configs().items()}
    if not configs:
        sys.exit("No figure changes the config of a case that these flags select.")
    times = measure(configs)
    for search in searches:
        found = search.best(times)
        print(f"{search.subject.name}, {device.card}:\n{search.report(found)}", flush=True)
        if FLAGS.write:
            search.write(found)


if __name__ == "__main__":
    main()
