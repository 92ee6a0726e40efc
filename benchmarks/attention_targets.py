"""What the project promises of attention, as data, and whether the results of a card and a version of JAX keep it."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import attention_cases, attention_rules
from benchmarks.results import Results

Record = Mapping[str, Any]
Case = Mapping[str, Any]
PASSES = ("fwd", "bwd")
_CELLS = "standard"  # the benchmark's 32 of each pass
_TRIED = ("cudnn", "fa4")  # the hardest two peers


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was measured of a promise: `at` is the worst case where that decides."""

    value: float
    word: str
    measured: int
    wanted: int
    at: Case | None = None


@dataclasses.dataclass(frozen=True)
class Bound:
    """The worst of some ratios, or their geometric mean, is at least `must`, hopefully `goal`."""

    label: str
    must: float | None = None
    goal: float | None = None
    mean: bool = False

    def describe(self) -> str:
        bounds = [f"{word} {bound:.2f}" for word, bound in (("must", self.must), ("goal", self.goal)) if bound]
        return f"{self.label}, {', '.join(bounds)}"

    def verdict(self, found: Sequence[tuple[float, Case]], wanted: int) -> Verdict | None:
        """On the ratios of cases, of which `wanted` are to be measured."""
        if not found:
            return None
        value, at = min(found, key=lambda pair: pair[0])
        if self.mean:
            value, at = statistics.geometric_mean(ratio for ratio, _ in found) if value else 0.0, None
        return Verdict(value, self._word(value), len(found), wanted, at)

    def _word(self, value: float) -> str:
        if self.must is not None and value < self.must:
            return "**missed**"
        if self.goal is not None and value >= self.goal:
            return "goal"
        return "below goal" if self.must is None else "kept"


@dataclasses.dataclass(frozen=True)
class Promise(Bound):
    """A bound on the `ratio` of the cases with a tag."""

    ratio: Callable[[Record], float | None] = lambda record: None
    tag: str = _CELLS

    def judge(self, results: Results, pass_: str) -> Verdict | None:
        """The verdict on a pass. A case that fails or is wrong counts 0, and one without the peer not at all."""
        chosen = attention_cases.select(tags=[self.tag], passes=[pass_])
        records = [record for case in chosen if (record := results.case(case.name)) is not None]
        ratios = [self.ratio(r) if r["impls"]["ours"]["status"] == "ok" else 0.0 for r in records]
        found = [(ratio, r["case"]) for ratio, r in zip(ratios, records, strict=True) if ratio is not None]
        return self.verdict(found, len(chosen))


def _cudnn(record: Record) -> float | None:
    return attention_rules.faster(record, "cudnn")


def _best(record: Record) -> float | None:
    """None where the hardest peers have not been tried."""
    tried = all(peer in record["impls"] for peer in _TRIED)
    return attention_rules.against_best(record)["ratio"] if tried else None


PROMISES = (
    Promise("x cuDNN, the worst of 32 cells", must=1.0, ratio=_cudnn),
    Promise("their geometric mean", must=1.08, mean=True, ratio=_cudnn),
    Promise("that of the 27 full and causal", must=1.08, mean=True, ratio=_cudnn, tag="grid"),
    Promise("x best peer, the worst", goal=1.0, ratio=_best),
)
VERSIONS = Bound("geometric mean", must=0.99, goal=1.0, mean=True)


def same_source(newer: Results, older: Results) -> list[tuple[Record, Record]]:
    """Of each case the newest two runs of one commit, one with each version of JAX, both of which have a time."""
    pairs = []
    for pass_ in PASSES:
        for case in attention_cases.select(tags=[_CELLS], passes=[pass_]):
            timed = [[r for r in found.runs(case.name) if "us" in r["impls"]["ours"]] for found in (newer, older)]
            both = [(new, old) for new in timed[0] for old in timed[1] if new["run"]["commit"] == old["run"]["commit"]]
            pairs += both[:1]
    return pairs


def speed(pair: tuple[Record, Record], name: str) -> float | None:
    """How many times faster an implementation is in the first run."""
    new, old = (record["impls"].get(name, {}).get("us") for record in pair)
    return old / new if old and new else None


def versions(pairs: Sequence[tuple[Record, Record]], pass_: str) -> tuple[Verdict | None, tuple[float, Case] | None]:
    """The verdict on runs of the same source with two versions of JAX, and the worst case."""
    mine = [pair for pair in pairs if pair[0]["case"]["pass"] == pass_]
    found = [(ratio, pair[0]["case"]) for pair in mine if (ratio := speed(pair, "ours"))]
    verdict = VERSIONS.verdict(found, len(attention_cases.select(tags=[_CELLS], passes=[pass_])))
    return verdict, min(found, key=lambda each: each[0], default=None)
