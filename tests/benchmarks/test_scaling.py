"""The benchmark of several devices, on those that the host pretends to have."""

import pytest

from benchmarks import scaling
from jaxsoftmax._attention import sequence


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
    record = scaling.measure(name, 2, 1, 128)
    assert record["difference"] < 0.02
    assert (exchanged in record["collectives"]) if exchanged else not record["collectives"]
    assert f"{record['efficiency']:.3f}" in scaling.line(record)


def test_keys_are_gathered_or_passed_round_as_a_case_says() -> None:
    as_always = sequence.ring_reason(2, 2**26 + 1), sequence.ring_reason(2, 1)
    with scaling._passed_round(True):
        assert "memory" in str(sequence.ring_reason(2, 1))
    with scaling._passed_round(False):
        assert sequence.ring_reason(2, 2**40) is None
    assert (sequence.ring_reason(2, 2**26 + 1), sequence.ring_reason(2, 1)) == as_always
    assert [name for name, case in scaling.cases().items() if case.ring] == [n for n in scaling.cases() if "ring" in n]


def test_wrong_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the positions, queries in zigzag order see the wrong keys."""
    attend = scaling._attend
    without = lambda *a: attend(*a[:2], {name: x for name, x in a[2].items() if name != "positions"})
    monkeypatch.setattr(scaling, "_attend", without)
    assert scaling.measure("attention_zigzag", 2, 1, 128)["difference"] > 0.1
