"""Cases of attention in several processes: all compile before one measures, and one measures at a time."""

import dataclasses
import fcntl
import json
import pathlib
import threading
import types

import pytest

from benchmarks import attention, attention_cases, runner
from benchmarks import results as measured
from benchmarks.attention_cases import Case, Shape
from benchmarks.calls import Options
from benchmarks.runner import Bench

TINY = Shape(2, 4, 2, 16, 8, 8, "full")
CAUSAL, BROKEN = dataclasses.replace(TINY, kind="causal"), dataclasses.replace(TINY, key_heads=0)


def _case(shape, pass_="fwd"):
    return Case(shape, pass_, frozenset({"core"}))


@pytest.mark.parametrize("processes", [1, 8, 100])
def test_every_case_is_in_one_share_beside_the_other_passes_of_its_shape(processes):
    cases = attention_cases.select(tags=["standard"], passes=["fwd", "bwd"])
    shares = runner.deal(cases, processes)
    assert sorted(case.name for share in shares for case in share) == sorted(case.name for case in cases)
    assert len(shares) == min(processes, 32)
    shapes = [list(dict.fromkeys(case.shape for case in share)) for share in shares]
    assert sum(map(len, shapes)) == 32
    assert max(map(len, shapes)) - min(map(len, shapes)) <= 1
    assert all([case.shape for case in share][::2] == mine for share, mine in zip(shares, shapes, strict=True))


def test_processes_measure_what_one_would_and_the_end_of_one_does_not_end_the_run(tmp_path):
    cases = [_case(TINY), _case(BROKEN), _case(TINY, "bwd"), _case(CAUSAL)]
    path = tmp_path / "attention.json"
    torchs = {"fa4": {"status": "not installed", "reason": "no"}}
    peers = types.SimpleNamespace(measure=lambda case: {"impls": dict(torchs)})
    options = Options(("ours",), rounds=1)
    records = attention.measure(cases, options, peers=peers, path=path, commit="abc", processes=2)
    found = {record["case"]["name"]: record for record in records}
    assert found.keys() == {case.name for case in cases}
    assert found[_case(BROKEN).name]["error"] == "its process ended with status 1"
    for case in (_case(TINY), _case(CAUSAL)):
        assert found[case.name]["impls"]["ours"]["us"] > 0
        assert found[case.name]["nvjitlink"] is None
    assert set(found[_case(TINY, "bwd").name]["impls"]["ours"]["programs"]) == {"fwd", "value_and_vjp", "direct"}
    assert all(record["impls"]["fa4"] == torchs["fa4"] for record in records)
    written = measured.read(path)
    assert written["records"] == json.loads(json.dumps(records))
    assert written["header"]["left_out"] == []
    assert written["header"]["commit"] == "abc"


@pytest.mark.parametrize("deadline, broken", [(None, False), (None, True), (0.0, False)])
def test_a_process_measures_when_all_have_compiled_and_it_has_the_device(monkeypatch, tmp_path, deadline, broken):
    done, sent = [], []
    device = tmp_path / "device"
    device.touch()

    def run(case):
        with device.open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done.append(case)
        return {"case": case}

    def wait():
        done.append("all compiled")
        if broken:
            raise threading.BrokenBarrierError

    bench = types.SimpleNamespace(prepare=lambda cases: done.append("compiled"), run=run)
    monkeypatch.setattr(runner, "Bench", lambda options: bench)
    pipe, barrier = types.SimpleNamespace(send=sent.append), types.SimpleNamespace(wait=wait)
    runner._measure(pipe, ["a", "b"], Options(), barrier, str(device), deadline)
    measured = ["a", "b"] if deadline is None else []
    assert done == ["compiled", "all compiled", *measured]
    assert sent == [{"case": case} for case in measured]


@pytest.mark.parametrize("groups", [[("fwd", "bwd")], [("fwd",), ("bwd",)]], ids=["together", "apart"])
def test_a_forward_pass_is_judged_by_the_truth_with_gradients_where_there_is_one(monkeypatch, groups):
    monkeypatch.setattr(Shape, "shrunk", lambda shape: shape)
    bench = Bench(Options(("ours",), rounds=1))
    for passes in groups:
        cases = [_case(TINY, pass_) for pass_ in passes]
        bench.prepare(cases)
        for case in cases:
            assert bench.run(case)["impls"]["ours"]["error"] < 1e-2
    assert len(bench._truths) == len(groups)


def test_a_library_is_found_where_it_was_loaded_from():
    assert pathlib.Path(measured.loaded("libc.so")).is_file()
    assert measured.loaded("libnvJitLink") is None
