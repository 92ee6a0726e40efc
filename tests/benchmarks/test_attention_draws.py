"""Random calls of attention: the seed decides them, each kind is among them, and the report says which are won."""

import dataclasses
import itertools

import pytest

from benchmarks import attention, attention_cases
from benchmarks.attention_cases import KINDS, Case, Shape
from benchmarks.calls import Options
from benchmarks.runner import Bench

MANY = attention_cases.draws(400, seed=5)


def test_a_seed_decides_the_draw():
    assert attention_cases.draws(50, seed=1) == attention_cases.draws(50, seed=1)
    assert attention_cases.draws(20, seed=1) == attention_cases.draws(50, seed=1)[:20]
    assert attention_cases.draws(50, seed=1) != attention_cases.draws(50, seed=2)
    assert len({case.name for case in MANY}) == len(MANY) == 400


@pytest.mark.parametrize("seed", range(5))
def test_few_draws_have_every_kind_forward_and_with_its_gradient(seed):
    found = {(case.shape.kind, case.pass_) for case in attention_cases.draws(14, seed)}
    assert found == set(itertools.product(KINDS, ("fwd", "value_and_vjp")))


def test_many_draws_have_every_size():
    shapes = [case.shape for case in MANY]
    has = lambda condition: any(map(condition, shapes))
    assert has(lambda s: s.length < 64 and s.length % 2)
    assert has(lambda s: s.length > 2048 and s.length % 2)
    assert has(lambda s: s.length > 2048 and s.length % 128 == 0)
    assert has(lambda s: s.queries == 1)
    assert has(lambda s: s.queries > s.length)
    assert has(lambda s: 1 < s.queries < s.length)
    assert {s.heads // s.key_heads for s in shapes} == {1, 2, 4, 8}
    assert {s.dtype for s in shapes} == {"bfloat16", "float16"}
    assert len({(s.head_dim, s.value_dim) for s in shapes}) == 7
    assert {s.batch == 1 for s in shapes} == {True, False}
    assert all(s.batch * max(s.length, s.queries) <= attention_cases.TOKENS for s in shapes)
    assert all(s.documents().sum() == s.length for s in shapes if s.kind == "documents")


def test_a_name_is_enough_to_measure_a_draw_again():
    for case in MANY:
        (again,) = attention_cases.select(patterns=[case.name])
        assert (again.shape, again.pass_, again.name) == (case.shape, case.pass_, case.name)
    (known,) = attention_cases.select(tags=["core"], patterns=["attention_fwd_full_d64_s2048_b8_h32$"])
    assert attention_cases.parse(known.name) == known
    assert attention_cases.parse("attention_fwd_full_d64") is None


def test_pairs_of_unequal_lengths_by_hand():
    causal = Shape(1, 1, 1, 4, 8, 8, "causal", queries=6)
    assert causal.pairs == 1 + 2 + 3 + 4 + 4 + 4
    assert dataclasses.replace(causal, queries=2).pairs == 1 + 2
    assert dataclasses.replace(causal, kind="mask").pairs == 24


CAN_BE_UNEQUAL = [kind for kind in KINDS if kind not in ("window", "documents")]
UNEQUAL = [Shape(2, 4, 2, 12, 8, 8, kind, queries=queries) for kind in CAN_BE_UNEQUAL for queries in (9, 17)]
UNEQUAL += [Shape(2, 4, 2, 12, 8, 8, kind, queries=1) for kind in ("full", "mask", "bias")]
UNEQUAL += [Shape(1, 2, 2, 13, 8, 4, kind, 9, dtype="float16") for kind in KINDS]


@pytest.mark.parametrize("shape", UNEQUAL, ids=lambda shape: shape.name)
def test_draws_of_every_kind_pass_the_gate_and_wrong_ones_do_not(shape, monkeypatch):
    monkeypatch.setattr(Shape, "shrunk", lambda shape: shape)
    bench, case = (
        Bench(Options(("ours",), rounds=1)),
        Case(shape, "fwd" if shape.queries == 1 else "value_and_vjp", frozenset()),
    )
    bench.prepare([case])
    entry = bench.run(case)["impls"]["ours"]
    assert entry["status"] == "ok", entry
    bench._held[2]["out"] = (bench._held[2]["out"][0] * 1.1, bench._held[2]["out"][1] * 1.1)
    assert bench.run(case)["impls"]["ours"]["status"] == "WRONG"


def _record(name, best, **us):
    return {"case": {"name": name}, "impls": {k: {"us": v} for k, v in us.items()}, "ratio": best}


def test_the_report_names_the_share_and_the_worst():
    records = [
        _record("slow", 0.5, ours=2.0, cudnn=1.0, tokamax=8.0),
        _record("fast", 2.0, ours=1.0, cudnn=2.0),
        _record("alone", None, ours=1.0),
    ]
    lines = attention.draws_won(records).splitlines()
    assert lines[0] == "against cudnn: 1 of 2 draws won (50.0 %), geometric mean 1.000; the worst:"
    assert lines[1:3] == ["  0.500  slow", "  2.000  fast"]
    assert "against tokamax: 1 of 1 draws won (100.0 %), geometric mean 4.000; the worst:" in lines
    assert any(line.startswith("against the fastest of cudnn, ") and "1 of 2 draws won" in line for line in lines)
    assert "none of 1 draws" in attention.draws_won(records[2:])


def test_the_binary_draws_measures_and_reports(binary):
    out = binary("--op=attention", "--draws=3", "--seed=4", "--impl=ours,xla", "--rounds=1")
    assert "against xla: " in out
    assert all(case.name in out for case in attention_cases.draws(3, seed=4))
