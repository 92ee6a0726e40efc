"""Figures in the documents come from committed results, by a command."""

import json
import re

import pytest

from benchmarks import cases, docs, plot
from benchmarks import results as measured
from benchmarks.results import Results
from benchmarks.targets import TARGETS
from pallas_kernels.softmax import dispatch


def _record(name, ours=None, **others):
    (case,) = [case for case in cases.all_cases() if case.name == name]
    described = {"name": name, "op": case.op, "pass": case.pass_, "rows": case.rows, "cols": case.cols}
    described |= {"dtype": case.dtype, "tags": sorted(case.tags), "source": case.source, "options": case.options}
    copy = {"method": "copy:torch", "us": 31.0, "tb_per_s": 4.2}
    impls = {name.replace("rung_", "rung:"): entry for name, entry in others.items()}
    impls |= {"ours": ours} if ours else {}
    return {"case": described, "clock": "cupti", "copy": copy, "least_bytes": 2**27, "impls": impls}


def _entry(us, fraction=1.0, process="jax", **facts):
    speed = {"us": us, "tb_per_s": round(2**27 / us / 1e6, 4), "fraction_of_copy": fraction}
    return {"status": "ok", "process": process, "max_error_ulp": 0.5, "temp_bytes": 0, **speed, **facts}


@pytest.fixture
def folder(tmp_path):
    def write(name, timestamp, *records):
        header = {"timestamp": timestamp, "commit": name, "device": {"name": "H"}, "versions": {"jax": "0"}}
        measured.write(tmp_path / "h200" / f"{name}.json", header, records)
        return tmp_path

    return write


SHORT, LONG = "softmax_fwd_f16_32768x1024", "softmax_fwd_f16_4096x131072"
FEW = "softmax_fwd_f32_16x131072"


def test_the_committed_tables_are_the_generated_ones():
    results = Results()
    for path in docs.documents():
        assert path.read_text() == docs.rewrite(path.read_text(), results), f"run python -m benchmarks.docs ({path})"


def test_every_marker_is_a_table_and_is_closed():
    for path in docs.documents():
        text = path.read_text()
        opened = re.findall(r"<!-- table:(\w+) -->", text)
        assert set(opened) <= set(docs.TABLES)
        assert len(opened) == text.count("<!-- /table -->")


def test_every_table_is_shown():
    text = "".join(path.read_text() for path in docs.documents())
    assert set(re.findall(r"<!-- table:(\w+) -->", text)) == set(docs.TABLES)


def test_every_kernel_is_explained():
    text = (docs.ROOT / "docs" / "ladder.md").read_text()
    assert not [name for name in dispatch.KERNELS if name.replace("_", " ") not in text]


def test_the_newest_measurement_counts(folder):
    folder("new", "2026-11-02", _record(SHORT, _entry(30.0), xla=_entry(45.0)))
    results = Results(folder("old", "2026-11-01", _record(SHORT, _entry(90.0), xla=_entry(45.0))))
    assert results.case(SHORT)["impls"]["ours"]["us"] == 30.0
    assert len(results.records()) == 1


def test_each_row_says_when_it_was_measured_and_of_which_commit(folder):
    """Not when the newest of all was."""
    folder("new", "2026-11-09T01:02", _record(SHORT, _entry(30.0, 0.99)))
    results = Results(folder("old", "2026-11-01", _record(LONG, _entry(900.0, 0.96), rung_naive=_entry(70.0))))
    found = {line.split(" | ")[0]: line.split(" | ")[-1] for line in docs.everything(results).splitlines()}
    assert found["| softmax f16 32768 x 1024"] == "2026-11-09 new |"
    assert found["| softmax f16 4096 x 131072"] == "2026-11-01 old |"
    assert "2026-11-09" not in docs.everything(results).splitlines()[-1]
    worst = next(line for line in docs.targets(results).splitlines() if "| 0.960 |" in line)
    assert worst.endswith(f"| `{LONG}` | 2 | 2026-11-01 old |")
    assert "2026-11-01 old: N = 131072." in docs.TABLES["ladder_forward_f16"](results)


def test_a_peer_from_another_process_is_compared_by_its_own_copy(folder):
    folder("jax", "2026-11-02", _record(SHORT, _entry(30.0, 1.0), xla=_entry(45.0, 0.7)))
    peers = _record(SHORT, quack=_entry(20.0, 0.8, "torch"), liger={"status": "declined", "reason": "no"})
    results = Results(folder("torch", "2026-11-01", peers))
    record = results.case(SHORT)
    assert measured.ratio(record, "xla") == 1.5
    assert measured.ratio(record, "quack") == 1.25
    row = docs.everything(results).splitlines()[2]
    assert row == "| softmax f16 32768 x 1024 | 30.0 | 4.47 | 1.00 | 1.50 | refuses | 1.25 | 0.5 | 2026-11-02 jax |"


def test_a_wrong_result_has_no_time_and_keeps_no_promise(folder):
    wrong = {"status": "WRONG", "reason": "off", "max_error_ulp": 900.0}
    results = Results(folder("run", "2026-11-02", _record(SHORT, wrong, xla=_entry(45.0))))
    assert "| WRONG | - | - |" in docs.everything(results)
    assert TARGETS[0].measured(results) == (0.0, SHORT, 1)
    assert "**missed**" in docs.targets(results)


def test_the_worst_case_stands_for_a_promise(folder):
    records = [_record(SHORT, _entry(30.0, 0.99)), _record(LONG, _entry(900.0, 0.96))]
    results = Results(folder("run", "2026-11-02", *records))
    assert TARGETS[0].measured(results) == (0.96, LONG, 2)
    assert "| 0.960 | kept |" in docs.targets(results)


def test_rungs_stand_with_traffic_and_time(folder):
    moved = 4 * 32768 * 1024 * 2
    record = _record(SHORT, rung_naive=_entry(70.0, bytes_moved=moved), xla=_entry(45.0))
    table = docs.TABLES["ladder_forward_f16"](Results(folder("run", "2026-11-02", record)))
    assert "| kernel | traffic | N = 1024 |" in table
    assert "| naive | 4 MN | 70 (1.92) |" in table


LOSS, SELECTION = "cross_entropy_value_and_grad_bf16_8192x32000", "top_k_fwd_bf16_64x32000_k8"


def _loss(fraction, extra=0, size=2**29):
    memory = {"temp_bytes": extra, "output_bytes": size + 4}
    impls = {"xla": _entry(400.0, temp_bytes=2 * size, output_bytes=size), "liger": _entry(90.0, 0.4, "torch")}
    return _record(LOSS, _entry(100.0, fraction, **memory), **impls) | {"operand_bytes": size, "least_bytes": 2 * size}


def test_a_loss_is_counted_in_passes_over_the_logits(folder):
    results = Results(folder("run", "2026-11-02", _loss(0.8), _record(SELECTION, _entry(10.0), xla=_entry(70.0))))
    assert measured.units(results.case(LOSS), "ours") == 2.5
    table = docs.TABLES["cross_entropy"](results)
    assert "| case | us | units | extra memory | XLA's | x XLA | x Liger | error, ulp | of XLA | measured |" in table
    assert "bf16 8192 x 32000 | 100.0 | 2.50 | 0.00% | 200% | 4.00 | 2.00 | 0.5 | 0.5 | 2026-11-02 run |" in table
    assert docs.TABLES["top_k"](results).splitlines()[2].startswith("| top_k bf16 64 x 32000, k 8 | 10.0 | 7.00 |")
    assert "cross_entropy" not in docs.everything(results)
    assert "top_k" not in docs.everything(results)


def test_a_loss_stands_beside_both_formulas(folder):
    alone = LOSS.replace("value_and_grad", "fwd")
    impls = {"xla": _entry(300.0), "xla_f32": _entry(900.0)}
    records = [record := _loss(0.8), _record(alone, _entry(100.0), **impls) | {"operand_bytes": 1}]
    record["impls"]["xla_f32"] = _entry(800.0)
    results = Results(folder("run", "2026-11-02", *records))
    lines = docs.TABLES["cross_entropy"](results).splitlines()
    assert "| x XLA | x XLA, float32 | x Liger | error, ulp | of XLA | of XLA, float32 | measured |" in lines[0]
    # A bfloat16 loss is off by half a unit of its last place, which is 65536 of a float32 loss's.
    assert lines[2].endswith("| 3.00 | 9.00 | - | 0.5 | 32768 | 0.5 | 2026-11-02 run |")
    assert lines[3].endswith("| 4.00 | 8.00 | 2.00 | 0.5 | 0.5 | 0.5 | 2026-11-02 run |")
    promises = [target.measured(results)[0] for target in TARGETS if "against XLA, optax" in target.label]
    assert promises == [4.0, 8.0]


def test_what_must_be_at_most_something_is_missed_above_it(folder):
    (target,) = [target for target in TARGETS if target.label.startswith("cross entropy, value")]
    for fraction, extra, verdict in ((0.95, 0, "goal"), (0.8, 2**21, "kept"), (0.7, 2**23, "**missed**")):
        results = Results(folder("run", "2026-11-02", _loss(fraction, extra)))
        assert docs._target_row(target, results)[4] == verdict
        row = next(line for line in docs.targets(results).splitlines() if "memory beyond the gradient" in line)
        assert ("missed" in row) == (verdict == "**missed**")
    wrong = _loss(0.8)
    wrong["impls"]["ours"] = {"status": "WRONG", "reason": "off"}
    assert target.measured(Results(folder("run", "2026-11-02", wrong)))[0] == float("inf")


def test_every_promise_selects_cases():
    assert all(target.select() for target in TARGETS)


def test_every_line_of_the_summary_selects_cases():
    everything = [{"op": c.op, "pass": c.pass_, "rows": c.rows, "tags": c.tags} for c in cases.all_cases()]
    assert all(any(map(line.takes, everything)) for line in docs.LINES)
    assert not any(line.takes(case) for line in docs.LINES for case in everything if "extended" in case["tags"])


def test_the_summary_says_the_worst_and_the_best(folder):
    peers = {"liger": _entry(45.0, 0.9, "torch"), "quack": _entry(36.0, 0.75, "torch")}
    records = [_record(SHORT, _entry(30.0, 1.0), xla=_entry(45.0), **peers), _record(LONG, _entry(900.0, 0.96))]
    assert docs.summary(Results(folder("some", "2026-11-02", *records))).splitlines()[2] == (
        "| `softmax` | 2 | 0.98 (0.96 ... 1.00) | 1.50 (1.50 ... 1.50) | 1.11 (1.11 ... 1.11) |"
    )
    records[1]["impls"]["ours"] = {"status": "WRONG", "reason": "off"}
    assert "| `softmax` | 2, 1 WRONG | 1.00 (1.00 ... 1.00) |" in docs.summary(
        Results(folder("wrong", "2026-11-03", *records))
    )


def test_what_is_missed_does_not_look_reached(folder):
    (target,) = [target for target in TARGETS if target.label == "no memory beyond the output"]
    results = Results(folder("run", "2026-11-02", _record(SHORT, _entry(30.0, temp_bytes=1024))))
    assert docs._target_row(target, results)[3:5] == ["0.99999", "**missed**"]


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError):
        docs.rewrite("<!-- table:nothing -->\n<!-- /table -->", Results())


def test_result_files_are_plain_json(folder):
    path = folder("run", "2026-11-02", _record(SHORT, _entry(30.0))) / "h200" / "run.json"
    assert json.loads(path.read_text()) == measured.read(path)
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_plots_are_drawn_from_results(folder, tmp_path):
    sweep = [case.name for case in cases.select(ops=["softmax"], passes=["fwd"], dtypes=["f16"], tags=["sweep"])]
    cached = _record(FEW, _entry(30.0)) | {
        "flops": 10**9,
        "copy": {"method": "copy:torch", "us": 31.0, "tb_per_s": 5.7},
    }
    measured = [_record(name, _entry(30.0)) | {"flops": 10**9} for name in sweep]
    results = Results(folder("run", "2026-11-02", cached, *measured))
    drawn = plot.draw(results.records(), results.headers()[0], tmp_path / "pictures")
    assert [path.name for path in drawn] == ["bandwidth_softmax_fwd_float16.svg", "roofline.svg"]
    assert all(path.read_text().startswith("<?xml") for path in drawn)
    assert "copy, 4.20 TB/s" in drawn[1].read_text()
    assert plot.draw([_loss(0.8)], results.headers()[0], tmp_path)[0].name == "cross_entropy.svg"
