"""Tuning with a clock that is made up: what is measured, what is found, and what is written."""

import dataclasses
import importlib
import json
import re
import shutil
import sys

import pytest
from absl.testing import flagsaver

from benchmarks import impls, results, runner, tune
from pallas_kernels import hardware, tuned
from pallas_kernels.decision import Decision
from pallas_kernels.hardware import H200

SUBJECTS = {subject.name: subject for subject in tune.SUBJECTS}
PLANTED = {
    "attention": {"cached_mib": 22, "two_warpgroups": 0.663},
    "softmax": {"block_bytes_of_many": 73728, "online_registers": 6},
}
CASES = "--case=fwd_causal_d64,bwd_causal_d128,logsumexp_fwd,softmax_fwd_bf16_8192"
HOPPER = dataclasses.replace(H200, name="NVIDIA H200 141GB")


class Clock:
    """In the place of the benchmark's: 100 us for what the planted figures choose, `other_us` for other configs.

    `exceptions` are the times of single configs, None where one fails.
    """

    def __init__(self, other_us=110.0, exceptions=()):
        self.other_us, self.exceptions, self.launched, self.planted = other_us, dict(exceptions), [], {}

    def attempt(self, bench, case, *, compiled):
        name = "attention" if case.op == "attention" else "softmax"
        search = tune.Search(SUBJECTS[name], [case], HOPPER)
        self.planted |= search.chosen(search.start | PLANTED[name])
        configs = bench.options.of_case[case.name]
        self.launched += [(case.name, config) for config in configs]
        us = {config: 100.0 if config == self.planted[case.name] else self.other_us for config in configs}
        us |= {config: self.exceptions[case.name, config] for config in us if (case.name, config) in self.exceptions}
        entries = {config: {"status": "failed"} if us[config] is None else {"us": us[config]} for config in configs}
        return {"case": case.describe(), "clock": "made up", "impls": entries}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package, whose file of figures is read and written in the place of ours."""
    shutil.copytree(results.ROOT / "pallas_kernels", tmp_path / "pallas_kernels")
    monkeypatch.setattr(tuned, "PATH", tmp_path / "pallas_kernels" / "tuned.json")
    return tmp_path


@pytest.fixture
def run(monkeypatch, package, capsys):
    """Runs the command on an H200 that is not there, and returns what it prints."""

    def run(clock, *flags, device=HOPPER):
        monkeypatch.setattr(hardware, "present", lambda: device)
        monkeypatch.setattr(runner, "attempt", clock.attempt)
        monkeypatch.setattr(sys, "argv", ["tune", *flags])
        with flagsaver.flagsaver():
            tune.main()
        return capsys.readouterr().out

    return run


def test_the_planted_optimum_is_found_with_each_config_measured_once_and_written_for_this_card(run, package):
    clock, before = Clock(), json.loads(tuned.PATH.read_text())
    table = run(clock, CASES, "--write")
    assert all(f"| `{figure}` |" in table for figures in PLANTED.values() for figure in figures)
    assert len(clock.launched) == len(set(clock.launched)) > len(clock.planted) > 10
    after = json.loads(tuned.PATH.read_text())
    assert after == before | {"H200": PLANTED}
    with impls.imported(str(package)) as load:
        for name, module in (("attention", "attention.dispatch"), ("softmax", "softmax.heuristics")):
            for device in (HOPPER, dataclasses.replace(HOPPER, name="NVIDIA H100 80GB HBM3")):
                wanted = tuned.numbers(SUBJECTS[name].module.DEFAULT) | (PLANTED[name] if device is HOPPER else {})
                assert tuned.numbers(load(module).thresholds(device)) == wanted


@pytest.mark.parametrize(
    "clock, flags, words",
    [
        pytest.param(Clock(), [], "`online_registers`", id="not asked to write"),
        pytest.param(Clock(100.9), ["--write"], "| together |  |  | 0.0 % | 0 |", id="within the noise"),
        pytest.param(Clock(), ["--write", "--budget_s=0"], "left out after 0 s", id="nothing measured"),
    ],
)
def test_the_file_stays(clock, flags, words, run):
    before = tuned.PATH.read_bytes()
    assert words in run(clock, CASES, *flags)
    assert tuned.PATH.read_bytes() == before


LOSSES = [f"cross_entropy_fwd_bf16_{shape}" for shape in ("8192x128256", "4096x151936", "4096x262144")]
ONLINE = "kernel:online:warpgroups=2:registers={}"


@pytest.mark.parametrize(
    "registers, us, new, words",
    [
        pytest.param(6, 105.0, 6, f"slower: {LOSSES[0]}, 1.050 times", id="slower"),
        pytest.param(6, None, 4, "| together |  |  | 0.0 % | 0 |", id="fails"),
        pytest.param(4, None, 6, "| together |  |  | 10.0 % | 2 |", id="the present one fails"),
    ],
)
def test_a_case_that_gains_nothing(registers, us, new, words, run):
    """Of three that choose the same figure: it counts with the others, and what fails is never chosen."""
    exceptions = {(LOSSES[0], ONLINE.format(registers)): us}
    exceptions |= {(LOSSES[0], ONLINE.format(4)): 100.0} if us else {}
    out = run(Clock(exceptions=exceptions), f"--case={','.join(LOSSES)}", "--write")
    assert words in out
    found = json.loads(tuned.PATH.read_text())["H200"]["softmax"]
    assert found == ({"online_registers": new} if new != 4 else {})


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

    search = tune.Search(subject, subject.topic.cases.TABLE.select(tags=tune.TAGS), HOPPER)
    for case, configs in search.configs().items():
        for config in configs:
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
        ({"softmax": {"cluster_sizes": 8}}, "H100: no figure has the name cluster_sizes"),
        ({"rows": {}}, r"H100: got \['rows'\], wanted some of attention, softmax"),
    ],
)
def test_a_wrong_entry_of_the_file_is_named(figures, words, package):
    tuned.PATH.write_text(json.dumps({"H100": figures}))
    with pytest.raises(ValueError, match=f"tuned.json: {words}"):
        tuned.by_card("softmax", SUBJECTS["softmax"].module.DEFAULT)
