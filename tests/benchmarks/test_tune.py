"""Tuning with a clock that is made up: what is measured, what is found, and what is written."""

import collections
import dataclasses
import importlib
import json
import re
import shutil
import sys
import types

import pytest
from absl.testing import flagsaver

from benchmarks import impls, results, runner, tune
from pallas_kernels import decision, hardware
from pallas_kernels.decision import Decision
from pallas_kernels.hardware import H200

SUBJECTS = {subject.name: subject for subject in tune.SUBJECTS}
PLANTED = {
    "attention": {"cached_mib": 22, "two_warpgroups": 0.663},
    "softmax": {"block_bytes_of_many": 73728, "online_registers": 6},
}
CASES = "--case=_causal_d64,_causal_d128,logsumexp_fwd,softmax_fwd_bf16_8192"
CARD = dataclasses.replace(H200, name="NVIDIA H200 141GB")


class Clock:
    """In the place of the benchmark's: 100 us for the configs of the planted figures, `other_us` for others."""

    def __init__(self, other_us=110.0):
        self.other_us, self.launched = other_us, []

    def attempt(self, bench, case, *, compiled):
        name = "attention" if case.op == "attention" else "softmax"
        search, configs = tune.Search(SUBJECTS[name], [case], CARD), bench.options.of_case[case.name]
        self.launched += [(case.name, config) for config in configs]
        planted = search.chosen(search.start | PLANTED[name])[case.name]
        times = {config: {"us": 100.0 if config == planted else self.other_us} for config in configs}
        return {"case": case.describe(), "clock": "made up", "impls": times}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package, whose file of figures is read and written in the place of ours."""
    shutil.copytree(results.ROOT / "pallas_kernels", tmp_path / "pallas_kernels")
    monkeypatch.setattr(decision, "TUNED", tmp_path / "pallas_kernels" / "tuned.json")
    return tmp_path


@pytest.fixture
def run(monkeypatch, package, capsys):
    """Runs the command on a card that is not there, and returns what it prints."""

    def run(clock, *flags, device=CARD):
        monkeypatch.setattr(hardware, "present", lambda: device)
        monkeypatch.setattr(runner, "attempt", clock.attempt)
        monkeypatch.setattr(sys, "argv", ["tune", *flags])
        with flagsaver.flagsaver():
            tune.main()
        return capsys.readouterr().out

    return run


def test_the_planted_optimum_is_found_with_each_config_measured_once_and_written_for_this_card(run, package):
    clock, before = Clock(), json.loads(decision.TUNED.read_text())
    table = run(clock, CASES, "--write")
    assert all(f"| `{figure}` |" in table for figures in PLANTED.values() for figure in figures)
    assert len(clock.launched) == len(set(clock.launched))
    configs = collections.Counter(case for case, _ in clock.launched)
    assert min(configs.values()) > 1
    assert "attention_bwd_causal_d128_s1363_b9_h16g2" in configs
    assert not [case for case in configs if "value_and_vjp" in case]
    assert json.loads(decision.TUNED.read_text()) == before | {"H200": PLANTED}
    with impls.imported(str(package)) as load:
        for name, module in (("attention", "attention.dispatch"), ("softmax", "softmax.dispatch")):
            for device in (CARD, dataclasses.replace(CARD, name="NVIDIA H100 80GB HBM3")):
                wanted = decision.numbers(SUBJECTS[name].module.DEFAULT) | (PLANTED[name] if device is CARD else {})
                assert decision.numbers(load(module).thresholds(device)) == wanted


@pytest.mark.parametrize(
    "clock, flags, words",
    [
        pytest.param(Clock(), [], "| `online_registers` |", id="not asked to write"),
        pytest.param(Clock(100.9), ["--write"], "| together |  |  | 0.0 % | 0 |", id="within the noise"),
        pytest.param(Clock(), ["--write", "--budget_s=0"], "left out after 0 s", id="nothing measured"),
    ],
)
def test_the_file_stays(clock, flags, words, run):
    before = decision.TUNED.read_bytes()
    assert words in run(clock, "--case=logsumexp_fwd", *flags)
    assert decision.TUNED.read_bytes() == before


@dataclasses.dataclass(frozen=True)
class Figures:
    a: int = 10
    b: int = 10


def _best(choose, *times):
    """The search of made-up figures, of which `choose` makes a config, and what is best by the times of each case."""
    module = types.SimpleNamespace(DEFAULT=Figures(), BY_CARD={})
    module.thresholds = lambda device: module.BY_CARD.get(device.card, module.DEFAULT)
    config = lambda device: types.SimpleNamespace(n=int(choose(module.thresholds(device))))
    module.decide = lambda problem, device: types.SimpleNamespace(
        kernel="made up", config=config(device), problem=problem
    )
    subject = SUBJECTS["attention"]._replace(module=module, problem=lambda case: case)
    named = {f"case {i}": {f"now:n={n}": us for n, us in each.items()} for i, each in enumerate(times)}
    search = tune.Search(subject, map(collections.namedtuple("Case", "name"), named), CARD)
    return search, search.best(named)


@pytest.mark.parametrize(
    "choose, us, moved",
    [
        pytest.param(lambda f: f.a, {10: 110, 12: 100, 14: 80}, {"a": 14}, id="the best of several"),
        pytest.param(lambda f: f.a, {12: 100}, {}, id="the present one failed"),
        pytest.param(lambda f: (f.a > 10) + 2 * (f.b > 10), {0: 110, 2: 100, 3: 80}, {"a": 12, "b": 12}, id="twice"),
        pytest.param(lambda f: 2 if f.b > 10 else f.a > 10, {0: 110, 1: 100, 2: 80}, {"b": 12}, id="the first is moot"),
        pytest.param(lambda f: (f.a > 10) + 2 * (f.b > 10), {0: 110, 1: 109.5, 2: 100}, {"b": 12}, id="noise first"),
    ],
)
def test_descent_by_the_times_of_one_case(choose, us, moved):
    """Configs without a time have failed, or were chosen by no figure alone."""
    search, found = _best(choose, us)
    assert found == search.start | moved


def test_the_report_has_the_gain_and_names_slower_cases():
    search, found = _best(lambda figures: figures.a, {10: 110, 12: 80}, {10: 100, 12: 103}, {10: 100, 12: 101})
    table, *slower = search.report(found).partition("slower")
    assert "| `a` | 10 | 12 | 9.7 % | 3 |" in table
    assert "".join(slower) == "slower: case 1, 1.030 times"


@pytest.mark.parametrize("subject", tune.SUBJECTS, ids=lambda subject: subject.name)
def test_what_is_timed_is_the_config_that_was_chosen(subject, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")  # nothing is launched
    monkeypatch.setattr(Decision, "run", property(lambda decision: decision.config))
    load = lambda name: importlib.import_module(f"pallas_kernels.{name}")

    def timed(case, config):
        if subject.name == "softmax":
            return impls.build(case, config).facts["config"]
        fields = dict(map(impls._field, config.split(":")[1:]))
        return repr(impls._decided(load, case.shape, case.pass_ == "bwd", fields))

    search = tune.Search(subject, subject.topic.cases.TABLE.select(tags=tune.TAGS), CARD)
    every = {(case.op, case.pass_, config): case for case, configs in search.configs().items() for config in configs}
    for (*_, config), case in list(every.items())[::3]:
        fields = re.findall(r"(\w+)='?(\w+)", timed(case, config))
        assert fields == re.findall(r"(\w+)=(\w+)", config), case.name


@pytest.mark.parametrize("device", [None, dataclasses.replace(H200, name="NVIDIA B200", compute_capability="10.0")])
def test_without_a_hopper_gpu_nothing_is_tuned(device, run):
    with pytest.raises(
        SystemExit, match=r"Figures are tuned on a Hopper GPU: .*(has none|B200 has compute capability)"
    ):
        run(Clock(), device=device)


@pytest.mark.parametrize(
    "figures, words",
    [
        ({"softmax": {"block_byte": 1}}, "H100: no figure has the name block_byte"),
        ({"softmax": {"block_bytes": 1.5}}, "H100: block_bytes is 1.5, wanted int"),
        ({"rows": {}}, r"H100: got \['rows'\], wanted some of attention, softmax"),
    ],
)
def test_a_wrong_entry_of_the_file_is_named(figures, words, package):
    decision.TUNED.write_text(json.dumps({"H100": figures}))
    with pytest.raises(ValueError, match=f"tuned.json: {words}"):
        decision.by_card("softmax", SUBJECTS["softmax"].module.DEFAULT)
