"""Figures in the documents come from committed results, by a command."""

import dataclasses
import itertools
import json
import re

import pytest

from benchmarks import attention_cases, cases, docs, report
from benchmarks import results as measured
from benchmarks.docs import TARGETS
from benchmarks.results import FOLDER, Results
from pallas_kernels.softmax import dispatch

SHORT, LONG = "softmax_fwd_f16_32768x1024", "softmax_fwd_f16_4096x131072"
LOSS, SELECTION = "cross_entropy_value_and_grad_bf16_8192x32000", "top_k_fwd_bf16_64x32000_k8"
FULL, CAUSAL = attention_cases.TABLE.select(tags=["core"], pass_=["fwd"], patterns=["d128_s2048"])
(BACKWARD,) = attention_cases.TABLE.select(tags=["core"], pass_=["bwd"], patterns=["full_d128_s2048"])


def _record(name, ours=None, **others):
    (case,) = [case for case in cases.TABLE.cases if case.name == name]
    copy = {"method": "copy:torch", "us": 31.0, "tb_per_s": 4.2}
    impls = {name.replace("kernel_", "rung:"): entry for name, entry in others.items()}
    impls |= {"ours": ours} if ours else {}
    return {"case": case.describe(), "clock": "cupti", "copy": copy, "least_bytes": 2**27, "impls": impls}


def _entry(us, fraction=1.0, process="jax", **facts):
    speed = {"us": us, "tb_per_s": round(2**27 / us / 1e6, 4), "fraction_of_copy": fraction}
    return {"status": "ok", "process": process, "max_error_ulp": 0.5, "temp_bytes": 0, **speed, **facts}


def _loss(fraction, extra=0, size=2**29):
    memory = {"temp_bytes": extra, "output_bytes": size + 4}
    impls = {"xla": _entry(400.0, temp_bytes=2 * size, output_bytes=size), "liger": _entry(90.0, 0.4, "torch")}
    return _record(LOSS, _entry(100.0, fraction, **memory), **impls) | {"operand_bytes": size, "least_bytes": 2 * size}


@pytest.fixture
def folder(tmp_path):
    """Writes a result file of rows."""

    def write(name, timestamp, *records):
        header = {"timestamp": timestamp, "commit": name, "device": {"name": "H"}, "versions": {"jax": "0"}}
        measured.write(tmp_path / "h200" / f"{name}.json", header, records)
        return tmp_path

    return write


@pytest.fixture
def attend(tmp_path):
    """Writes a run of attention, `attend(jax, {case: {implementation: microseconds}})`, each newer than the last."""
    days = itertools.count(10)

    def write(jax, found, commit="abc", card="H100", topic="attention", **facts):
        def entry(us):
            if isinstance(us, str):
                return {"status": us}
            return {"status": "ok", "us": us, "direct_us": us + 1, "tflop_per_s": 40000 / us}

        records = []
        for case, times in found.items():
            impls = {name: entry(us) for name, us in times.items()}
            records.append({"case": case.describe(), "impls": impls, "matmul": {"tflop_per_s": 800.0}})
        header = {"timestamp": f"2026-11-{next(days)}", "topic": topic, "commit": commit}
        header |= {"device": {"name": f"NVIDIA {card} 80GB"}, "versions": {"jax": jax}, "left_out": []} | facts
        measured.write(tmp_path / card / f"attention_{header['timestamp']}.json", header, records)
        return Results(tmp_path)

    return write


def test_the_committed_tables_are_the_generated_ones_and_every_table_is_shown():
    shown = set()
    for path in docs.documents():
        text = path.read_text()
        assert text == docs.rewrite(text, Results()), f"run python -m benchmarks.docs ({path})"
        opened = re.findall(r"<!-- table:(\w+) -->", text)
        assert len(opened) == text.count("<!-- /table -->")
        shown |= set(opened)
    assert shown == set(docs.TABLES)
    with pytest.raises(KeyError):
        docs.rewrite("<!-- table:nothing -->\n<!-- /table -->", Results())


def test_without_results_nothing_is_claimed(tmp_path):
    assert {make(Results(tmp_path)) for make in docs.TABLES.values()} == {measured.NOT_MEASURED}


def test_every_kernel_is_explained():
    text = (docs.ROOT / "docs" / "ladder.md").read_text()
    assert not [name for name in dispatch.KERNELS if name.replace("_", " ") not in text]


def test_the_newest_measurement_counts_and_says_when_it_was_made(folder):
    """Each row has the day and commit of its own run, not those of the newest of all."""
    folder("new", "2026-11-09T01:02", _record(SHORT, _entry(30.0, 0.99), xla=_entry(45.0)))
    older = [
        _record(SHORT, _entry(90.0), xla=_entry(45.0)),
        _record(LONG, _entry(900.0, 0.96), kernel_naive=_entry(70.0)),
    ]
    results = Results(folder("old", "2026-11-01", *older))
    assert results.case(SHORT)["impls"]["ours"]["us"] == 30.0
    found = {line.split(" | ")[0]: line.split(" | ")[-1] for line in docs.TABLES["everything"](results).splitlines()}
    assert found["| softmax f16 32768 x 1024"] == "2026-11-09 new |"
    assert found["| softmax f16 4096 x 131072"] == "2026-11-01 old |"
    worst = next(line for line in docs.promises(results).splitlines() if "| 0.960 |" in line)
    assert "| 0.960 | kept |" in worst
    assert worst.endswith(f"| `{LONG}` | 2 | 2026-11-01 old |")
    assert "2026-11-01 old: N = 131072." in docs.TABLES["ladder_forward_f16"](results)


def test_a_peer_from_another_process_is_compared_by_its_own_copy(folder):
    folder("jax", "2026-11-02", _record(SHORT, _entry(30.0, 1.0), xla=_entry(45.0, 0.7)))
    peers = _record(SHORT, quack=_entry(20.0, 0.8, "torch"), liger={"status": "declined", "reason": "no"})
    results = Results(folder("torch", "2026-11-01", peers))
    assert [measured.ratio(results.case(SHORT), peer) for peer in ("xla", "quack")] == [1.5, 1.25]
    row = docs.TABLES["everything"](results).splitlines()[2]
    assert row == "| softmax f16 32768 x 1024 | 30.0 | 4.47 | 1.00 | 1.50 | refuses | 1.25 | 0.5 | 2026-11-02 jax |"


def test_a_wrong_result_has_no_time_and_keeps_no_promise(folder):
    wrong = {"status": "WRONG", "reason": "off", "max_error_ulp": 900.0}
    results = Results(folder("run", "2026-11-02", _record(SHORT, wrong, xla=_entry(45.0))))
    assert "| WRONG | - | - |" in docs.TABLES["everything"](results)
    worst, record, count = TARGETS[0].measured(results)
    assert (worst, record["case"]["name"], count) == (0.0, SHORT, 1)
    assert "**missed**" in docs.promises(results)


def test_kernels_stand_with_traffic_and_time(folder):
    record = _record(SHORT, kernel_naive=_entry(70.0, bytes_moved=4 * 32768 * 1024 * 2), xla=_entry(45.0))
    table = docs.TABLES["ladder_forward_f16"](Results(folder("run", "2026-11-02", record)))
    assert "| kernel | traffic | N = 1024 |" in table
    assert "| naive | 4 MN | 70 (1.92) |" in table


def test_a_loss_is_counted_in_passes_over_the_logits_beside_both_formulas(folder):
    alone = _record(LOSS.replace("value_and_grad", "fwd"), _entry(100.0), xla=_entry(300.0), xla_f32=_entry(900.0))
    records = [_loss(0.8), alone | {"operand_bytes": 1}, _record(SELECTION, _entry(10.0), xla=_entry(70.0))]
    records[0]["impls"]["xla_f32"] = _entry(800.0)
    results = Results(folder("run", "2026-11-02", *records))
    heads, _, forward, both = docs.TABLES["cross_entropy"](results).splitlines()[:4]
    assert heads.startswith("| case | us | units | extra memory | XLA's | x XLA | x XLA, float32 | x Liger |")
    # A bfloat16 loss is off by half a unit of its last place, which is 65536 of a float32 loss's.
    assert forward.endswith("| 3.00 | 9.00 | - | 0.5 | 32768 | 0.5 | 2026-11-02 run |")
    assert both.endswith("| 100.0 | 2.50 | 0.00% | 200% | 4.00 | 8.00 | 2.00 | 0.5 | 0.5 | 0.5 | 2026-11-02 run |")
    promises = [target.measured(results)[0] for target in TARGETS if "against XLA, optax" in target.label]
    assert promises == [4.0, 8.0]
    assert docs.TABLES["top_k"](results).splitlines()[2].startswith("| top_k bf16 64 x 32000, k 8 | 10.0 | 7.00 |")
    assert "cross_entropy" not in docs.TABLES["everything"](results)


def test_what_must_be_at_most_something_is_missed_above_it(folder):
    (target,) = [target for target in TARGETS if target.label.startswith("cross entropy, value")]
    for fraction, extra, verdict in ((0.95, 0, "goal"), (0.8, 2**21, "kept"), (0.7, 2**23, "**missed**")):
        results = Results(folder("run", "2026-11-02", _loss(fraction, extra)))
        assert target.word(target.measured(results)[0]) == verdict
        row = next(line for line in docs.promises(results).splitlines() if "memory beyond the gradient" in line)
        assert ("missed" in row) == (verdict == "**missed**")
    wrong = _loss(0.8)
    wrong["impls"]["ours"] = {"status": "WRONG", "reason": "off"}
    assert target.measured(Results(folder("run", "2026-11-02", wrong)))[0] == float("inf")


def test_what_is_missed_does_not_look_reached(folder):
    (target,) = [target for target in TARGETS if target.label == "no memory beyond the output"]
    results = Results(folder("run", "2026-11-02", _record(SHORT, _entry(30.0, temp_bytes=1024))))
    assert f"| {target.label} | 1 | - | 0.99999 | **missed** |" in docs.promises(results)


def test_every_promise_and_every_line_of_the_summary_selects_cases():
    assert all(target.select() for target in TARGETS)
    everything = [case.describe() for case in cases.TABLE.cases]
    assert all(any(map(line.takes, everything)) for line in docs.LINES)
    assert not any(line.takes(case) for line in docs.LINES for case in everything if "extended" in case["tags"])
    wanted = [len(attention_cases.TABLE.select(tags=[promise.tag], pass_=["bwd"])) for promise in report.PROMISES]
    assert wanted == [32, 32, 27, 32]


def test_the_summary_says_the_worst_and_the_best_and_has_the_newest_jax(folder, attend):
    attend("0.9.2", {FULL: {"ours": 100.0, "cudnn": 200.0}}, card="H200")
    results = attend("0.12.0.1", {FULL: {"ours": 100.0, "cudnn": 150.0}})
    assert " over " not in report.attention_promises(results)  # of two cards
    attend("0.9.2", {FULL: {"ours": 100.0, "cudnn": 200.0}})
    peers = {"liger": _entry(45.0, 0.9, "torch"), "quack": _entry(36.0, 0.75, "torch")}
    records = [_record(SHORT, _entry(30.0, 1.0), xla=_entry(45.0), **peers), _record(LONG, _entry(900.0, 0.96))]
    text = docs.summary(Results(folder("some", "2026-11-02", *records)))
    row = "| `softmax` | 2 | 0.98 (0.96 ... 1.00) | 1.50 (1.50 ... 1.50) | 1.11 (1.11 ... 1.11) |"
    assert text.splitlines()[2] == row
    assert "| `flash_attention`, H100, JAX 0.12.0.1 | 1 |" in text
    assert "H100, JAX 0.9.2" not in text
    records[1]["impls"]["ours"] = {"status": "WRONG", "reason": "off"}
    text = docs.summary(Results(folder("wrong", "2026-11-03", *records)))
    assert "| `softmax` | 2, 1 WRONG | 1.00 (1.00 ... 1.00) |" in text


def test_result_files_are_plain_json(folder):
    path = folder("run", "2026-11-02", _record(SHORT, _entry(30.0))) / "h200" / "run.json"
    assert json.loads(path.read_text()) == measured.read(path)
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_cells_of_attention_stand_by_run_and_repeats_have_their_ratio(attend):
    attend("0.11.2", {FULL: {"ours": 100.0, "cudnn": 110.0}, BACKWARD: {"ours": 300.0, "cudnn": 330.0}})
    attend("0.12.0.1", {FULL: {"ours": 102.0, "cudnn": 100.0}, CAUSAL: {"ours": "WRONG", "cudnn": 60.0}})
    attend("0.11.2", {FULL: {"ours": 50.0, "cudnn": 60.0}})
    results = attend("0.12.0.1", {FULL: {"ours": 100.0, "cudnn": 90.0}}, commit="another")
    assert [run.label for run in measured.attention_runs(results.folder)] == [
        f"H100, JAX {jax}{again}" for jax in ("0.12.0.1", "0.11.2") for again in ("", ", again")
    ]
    heads, _, full, causal = report.attention_cells("fwd")(results).splitlines()
    assert heads.startswith(
        "| cell | H100, JAX 0.12.0.1: ours, us | H100, JAX 0.12.0.1: cuDNN, us | H100, JAX 0.12.0.1: x"
    )
    assert heads.endswith(
        "JAX 0.11.2, again: x cuDNN | H100, JAX 0.12.0.1 over H100, JAX 0.11.2 | " + heads.split(" | ")[-1]
    )
    # The repeated runs are of two sources, so that their times are not compared.
    assert full == "| D 128, S 2048, full | 102.0 | 100.0 | 0.980 | 0.900 | 100.0 | 110.0 | 1.100 | 1.200 | 0.980 | - |"
    assert causal.startswith("| D 128, S 2048, causal | WRONG | 60.0 | - |")
    backward = report.attention_cells("bwd")(results)
    assert "| D 128, S 2048, full | - | - | - | - | - | 300.0 | 301.0 | 330.0 | 1.100 |" in backward
    text = report.attention_promises(results)
    row = next(line for line in text.splitlines() if line.startswith("| H100, JAX 0.12.0.1, forward |"))
    assert row.startswith("| H100, JAX 0.12.0.1, forward | 0.000 **missed** (2 of 32 cells) |")
    assert row.endswith(" | 0.980 at D 128, S 2048, full |")
    assert "| H100, JAX 0.12.0.1 over H100, JAX 0.11.2, forward | 0.980 **missed** (1 of 32 cells) | 0.980 |" in text
    assert "another" in report.attention_runs(results)


@pytest.mark.parametrize(
    "ratios, words",
    [
        ((1.1, 1.2), ["1.100 kept", "1.148 kept", "1.148 kept", "1.100 goal"]),
        ((0.9999, 1.2), ["0.999 **missed**", "1.095 kept", "1.095 kept", "0.999 below goal"]),
        ((1.0, 1.1), ["1.000 kept", "1.048 **missed**", "1.048 **missed**", "1.000 goal"]),
    ],
)
def test_musts_and_goals(attend, ratios, words):
    pairs = zip((FULL, CAUSAL), ratios, strict=True)
    results = attend("1", {case: {"ours": 100.0, "cudnn": 100.0 * ratio, "fa4": 900.0} for case, ratio in pairs})
    (run,) = measured.attention_runs(results.folder)
    found = [promise.judge(run, "fwd") for promise in report.PROMISES]
    assert [text.split(" (2 of ")[0] for text in found] == words


def test_random_calls_stand_by_run_with_the_worst_and_short_ones_all(attend):
    times = {
        FULL: {"ours": 100.0, "cudnn": 80.0, "xla": 300.0},
        CAUSAL: {"ours": 100.0, "cudnn": "declined", "xla": 180.0},
    }
    times[BACKWARD] = {"ours": 100.0}
    facts = {"commit": "abc", "seed": 3, "left_out": ["attention_fwd_full_d8_s1_b1_h1"]}
    attend("1", {FULL: {"ours": 100.0, "cudnn": 110.0}}, topic="attention sample", seed=4)
    for topic in ("attention sample", "attention short"):
        results = attend("1", times, topic=topic, **facts)
    heads, _, first, second, *rest = report.attention_sample(results).splitlines()
    assert heads == "| run | calls compared | geometric mean | below 0.95 | day | commit |"
    assert first == "| H100, JAX 1, seed 3 | 2 of 4 | 1.200 | 1 (50.0%) | 2026-11-11 | abc |"
    assert second.startswith("| H100, JAX 1, seed 4 | 1 of 1 | 1.100 | 0 (0.0%) |")
    row = f"| `{FULL.name.removeprefix('attention_')}` | 100.0 | 80.0 | 300.0 | 0.800 |"
    assert rest[1] == "The 10 worst of H100, JAX 1, seed 3:"
    assert rest[5:7] == [row, f"| `{CAUSAL.name.removeprefix('attention_')}` | 100.0 | refuses | 180.0 | 1.800 |"]
    short = report.attention_short(results).splitlines()
    assert short[0] == "H100, JAX 1, 2026-11-12 abc, without `fwd_full_d8_s1_b1_h1`:"
    assert row in short
    assert short[4] == f"| `{BACKWARD.name.removeprefix('attention_')}` | 100.0 | - | - | - |"


def test_an_odd_length_is_compared_with_the_length_of_the_same_source(attend):
    less = {
        case: dataclasses.replace(case, shape=dataclasses.replace(case.shape, length=2047)) for case in (FULL, BACKWARD)
    }
    topic = {"topic": "attention odd"}
    attend("1", {case: {"ours": us} for case, us in ((FULL, 100.0), (CAUSAL, 10.0), (BACKWARD, 80.0))}, **topic)
    attend("1", {less[FULL]: {"ours": 200.0}, less[BACKWARD]: {"ours": 100.0}}, **topic)
    results = attend("1", {less[FULL]: {"ours": 10.0}}, commit="other", **topic)
    _, _, *rows = report.attention_odd(results).splitlines()
    assert rows == ["| H100, JAX 1, abc | D 128, S 2048, full | 0.500 (200 / 400) | 0.800 (400 / 500) |"]


def test_committed_results_lie_in_the_folder_of_their_card():
    for path in FOLDER.glob("*/attention*.json"):
        name = measured.read(path)["header"]["device"]["name"]
        assert path.parent.name.upper() in name.upper(), f"{path} was measured on {name}"


def test_pictures_are_drawn_from_results(folder, attend, tmp_path):
    attend("1", {FULL: {"ours": 100.0, "cudnn": 110.0}})
    sweep = [case.name for case in cases.TABLE.select(op=["softmax"], pass_=["fwd"], dtype=["float16"], tags=["sweep"])]
    results = Results(folder("run", "2026-11-02", *(_record(name, _entry(30.0)) for name in sweep)))
    attend("1", {FULL: {"ours": 100.0, "cudnn": 110.0}}, topic="attention sample")
    drawn = docs.draw(results, tmp_path / "pictures")
    assert [path.name for path in drawn] == ["bandwidth_softmax_fwd_float16.svg", "attention.svg"]
    assert all(path.read_text().startswith("<?xml") for path in drawn)
