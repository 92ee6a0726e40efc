"""The benchmark of several devices, on those that the host pretends to have."""

import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import report, results, scaling
from jaxsoftmax import zigzag
from jaxsoftmax._attention import sequence

CASES = {case.name: case for case in scaling.TABLE.cases}


@pytest.mark.parametrize(
    "name, exchanged",
    [
        ("attention_zigzag", "all-gather"),
        ("attention_packed_gradient", "all-gather"),
        ("loss_gradient_columns", "all-reduce"),
        ("softmax_rows", None),
    ],
)
def test_results_on_two_devices_are_those_of_one(name: str, exchanged: str | None) -> None:
    record = scaling.measure(CASES[name], 2, 1, 128)
    assert record["difference"] < 0.02
    assert (exchanged in record["collectives"]) if exchanged else not record["collectives"]
    assert f"{record['efficiency']:.3f}" in report.line(record)


@pytest.mark.parametrize("devices, one_round", [(2, 0.90), (4, 0.60)])
def test_rounds_share_the_work_of_packed_documents(devices: int, one_round: float) -> None:
    """The mean device's pairs of a query and a key that it sees, by those of the busiest; docs/scaling.md has them."""
    of = scaling.documents_of(scaling._LENGTH)
    seen = np.arange(of.size) - np.searchsorted(of, of) + 1

    def balance(rounds: int) -> float:
        work = np.asarray(zigzag(seen, 0, devices, rounds)).reshape(devices, -1).sum(1)
        return work.mean() / work.max()

    assert balance(1) == pytest.approx(one_round, abs=0.005)
    assert balance(scaling._ROUNDS["packed"](devices)) > 0.98


def test_keys_are_gathered_or_passed_round_as_a_case_says() -> None:
    as_always = sequence.ring_reason(2, 2**26 + 1), sequence.ring_reason(2, 1)
    with scaling._passed_round(True):
        assert "memory" in str(sequence.ring_reason(2, 1))
    with scaling._passed_round(False):
        assert sequence.ring_reason(2, 2**40) is None
    assert (sequence.ring_reason(2, 2**26 + 1), sequence.ring_reason(2, 1)) == as_always
    assert [name for name, case in CASES.items() if case.ring] == [name for name in CASES if "ring" in name]


def test_wrong_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the positions, queries in zigzag order see the wrong keys."""
    attend = scaling._attend
    without = lambda *a: attend(*a[:2], {name: x for name, x in a[2].items() if name != "positions"})
    monkeypatch.setattr(scaling, "_attend", without)
    (case,) = [case for case in scaling._cases() if case.name == "attention_zigzag"]  # made of the function
    assert scaling.measure(case, 2, 1, 128)["difference"] > 0.1


def test_a_gpt_has_the_loss_and_gradients_of_one_device() -> None:
    case = CASES["gpt_zigzag_131072_data_2"]
    record = scaling.measure(case, 4, 1, 512)
    assert record["difference"] < 0.05  # of the largest gradient, in 16 bits
    assert {"all-gather", "all-reduce"} <= set(record["collectives"])
    whole, one = scaling._on_one(case.call, case.operands, 512)
    assert abs(float(one(whole)[0]) - np.log(64)) < 0.2


def test_what_overlaps_counts_once() -> None:
    events = [("kernel", 0, 4), ("ncclDevKernel_AllGather", 2, 4), ("kernel", 8, 1), ("ncclDevKernel_AllGather", 20, 2)]
    streams = [types.SimpleNamespace(name="Stream #1(Compute)", events=[_event(*e) for e in events])]
    spans = types.SimpleNamespace(name="XLA Ops", events=[_event("kernel", 0, 100)])
    planes = [
        types.SimpleNamespace(name="/device:GPU:0", lines=[*streams, spans]),
        types.SimpleNamespace(name="/device:GPU:1", lines=[]),
        types.SimpleNamespace(name="/host:CPU", lines=streams),
    ]
    found = scaling.busy(types.SimpleNamespace(planes=planes), 2)
    assert found == {"busy_us": [4.5], "collectives_us": [3.0], "alone_us": [2.0]}


def _event(name: str, start: float, duration: float) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=name, start_ns=1e3 * start, duration_ns=1e3 * duration)


def test_the_binary_measures_the_calls_that_are_named(binary: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    name = "loss_rows"
    out = binary("--op=scaling", f"--case=^{name}$", "--devices=4", "--rounds=1", f"--json={file}")
    found = results.read(file)
    assert found["header"]["topic"] == "scaling"
    (record,) = found["records"]
    assert (record["case"]["name"], record["case"]["devices"]) == (name, 4)
    assert f"us on one, {record['us']:10.1f} on 4: " in out
    assert len(binary("--op=scaling", "--list").split()) == len(CASES)
    assert "--devices: got 99, wanted at most the" in binary("--op=scaling", "--devices=99", expect=1)
