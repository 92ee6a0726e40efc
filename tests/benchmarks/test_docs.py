"""Figures in the documents come from committed results, by a command."""

import datetime
import itertools
import json
import re

import jax
import pytest
from matplotlib import pyplot

from benchmarks import attention_cases, docs, pictures, promises, report, tables
from benchmarks import results as measured
from benchmarks.promises import TARGETS
from benchmarks.results import FOLDER, Results
from pallas_kernels.softmax import dispatch

SHORT, LONG = "softmax_fwd_f16_32768x1024", "softmax_fwd_f16_4096x131072"
LOSS = "cross_entropy_value_and_grad_bf16_8192x32000"
FULL, CAUSAL = attention_cases.TABLE.select(tags=["core"], pass_=["fwd"], patterns=["d128_s2048"])
(BACKWARD,) = attention_cases.TABLE.select(tags=["core"], pass_=["bwd"], patterns=["full_d128_s2048"])


def _record(name, ours=None, **others):
    (case,) = [case for case in tables.ROWS.cases if case.name == name]
    copy = {"method": "copy:torch", "us": 31.0, "tb_per_s": 4.2}
    impls = {name.replace("kernel_", "rung:"): entry for name, entry in others.items()}
    impls |= {"ours": ours} if ours else {}
    return {"case": case.describe(), "clock": "cupti", "copy": copy, "least_bytes": 2**27, "impls": impls}


def _entry(us, fraction=1.0, process="jax", **facts):
    speed = {"us": us, "tb_per_s": round(2**27 / us / 1e6, 4), "fraction_of_copy": fraction}
    return {"status": "ok", "process": process, "max_error_ulp": 0.5, "temp_bytes": 0, **speed, **facts}


def _loss(fraction, extra=0, size=2**29):
    ours = _entry(100.0, fraction, temp_bytes=extra, output_bytes=size + 4)
    return _record(LOSS, ours) | {"operand_bytes": size, "least_bytes": 2 * size}


@pytest.fixture
def folder(tmp_path):
    """Writes a result file of rows."""

    def write(name, timestamp, *records):
        header = {"timestamp": timestamp, "commit": name, "device": {"name": "NVIDIA H200"}, "versions": {"jax": "0"}}
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
    tables = [*docs.TABLES.values(), *docs.DETAILS.values()]
    assert {make(Results(tmp_path)) for make in tables} == {measured.NOT_MEASURED}


def test_calls_have_tables_of_the_newest_run_of_each_card_and_of_each_sample(tmp_path):
    day = itertools.count(10)

    def write(topic, found, seed=0, card="H100"):
        records = [{"case": {"name": name}, "impls": impls} for name, impls in found]
        header = {"timestamp": f"2026-11-{next(day)}", "topic": topic, "commit": "abc", "seed": seed}
        header |= {"device": {"name": f"NVIDIA {card}"}, "versions": {"jax": "1"}, "left_out": ["another"]}
        measured.write(tmp_path / card / f"{topic}{header['timestamp']}.json", header, records)

    times = lambda **us: {name: {"status": "ok", "us": value} for name, value in us.items()}
    seconds = {"status": "ok", "trace_s": 0.25, "lower_s": 0.5, "compile_s": 1.0}
    chains = [case.name for case in tables.TABLE.select(tags=["chains"])][:2]
    write("chains", [(chains[0], times(ours=9.0, xla=1.0))])
    write("chains", [(chains[1], times(ours=2.0, xla=1.0)), (chains[0], times(ours=1.0, xla=3.0))])
    write("chains", [(chains[0], times(ours=1.0, xla=4.0))], card="H200")
    write("sample", [("slow", times(ours=4.0, xla=8.0, cudnn=2.0)), ("fast", times(ours=1.0, xla=8.1))], seed=7)
    write("first", [("softmax", {"ours": seconds, "cudnn": {"status": "declined"}})])
    found = docs.TABLES | docs.DETAILS
    shown = {name: found[name](Results(tmp_path)) for name in ("chains", "sample", "first", "chain_groups")}
    lines = [line for line in shown["chains"].splitlines() if line.startswith("| `")]
    assert [line.split(" | ")[:5] for line in lines] == [
        [f"| `{chains[0]}`", "H100", "1.0", "3.0", "3.000"],
        [f"| `{chains[1]}`", "H100", "2.0", "1.0", "0.500"],
        [f"| `{chains[0]}`", "H200", "1.0", "4.0", "4.000"],
    ]
    assert "| H100, JAX 1, seed 7 | 2 of 3 | 2.012 | 1 (50.0%) | 1 |" in shown["sample"]
    assert "| `slow` | 4.0 | 2.0 | 8.0 | 0.500 |" in shown["sample"]
    assert "| `softmax` | H100 | 0.750 + 1.000 | - | - |" in shown["first"]
    function, size = re.fullmatch(r"(.+?_bf16)_(.+)", chains[0]).groups()
    assert (
        f"| `{function}` | H100 | 2 | 1.224 | 0.500 ({chains[1].removeprefix(f'{function}_')}) |"
        in shown["chain_groups"]
    )
    assert f"| `{function}` | H200 | 1 | 4.000 | 4.000 ({size}) |" in shown["chain_groups"]


def test_slower_random_calls_of_attention_are_named(attend):
    results = attend("1", {FULL: {"ours": 100.0, "xla": 94.0}, CAUSAL: {"ours": 50.0, "cudnn": 60.0, "xla": 70.0}},
                     topic="attention sample", seed=5, left_out=["another"])  # fmt: skip
    text = docs.attention_sample(results)
    assert "| H100, JAX 1, seed 5 | 2 of 3 | 1.062 | 1 (50.0%) | 2026-11-10 | abc |" in text
    name = FULL.name.removeprefix("attention_")
    assert [line for line in text.splitlines() if "`" in line] == [
        f"| H100, seed 5 | `{name}` | 100.0 | - | 94.0 | 0.940 |"
    ]


def test_a_table_of_all_cases_is_printed_and_no_document_written(capsys, monkeypatch):
    monkeypatch.setattr(docs, "documents", lambda: pytest.fail("a document"))
    docs.main(["--print=chains"])
    assert capsys.readouterr().out == docs.DETAILS["chains"](Results()) + "\n"


def test_the_headline_has_the_medians_of_six_operations():
    lines = docs.headline(Results()).splitlines()[2:]
    assert len(lines) == len(docs.HEADLINE) <= 6
    assert lines[0].startswith("| `softmax` | H200 | 0.99 |")


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
    found = {line.split(" | ")[0]: line.split(" | ")[-1] for line in docs.DETAILS["rows"](results).splitlines()}
    assert found["| softmax f16 32768 x 1024"] == "2026-11-09 new |"
    assert found["| softmax f16 4096 x 131072"] == "2026-11-01 old |"
    worst = next(line for line in promises.rows(results).splitlines() if "| 0.960 |" in line)
    assert "| 0.960 | kept |" in worst
    assert worst.endswith(f"| `{LONG}` | 2 | 2026-11-01 old |")
    assert "2026-11-01 old: N = 131072." in docs.TABLES["ladder_forward_f16"](results)


def test_without_xla_the_newest_measurement_counts_too(folder):
    folder("old", "2026-11-01", _record(SHORT, _entry(90.0)))
    results = Results(folder("new", "2026-11-09", _record(SHORT, _entry(30.0))))
    assert results.case(SHORT)["impls"]["ours"]["us"] == 30.0
    results = Results(folder("beside XLA", "2026-11-05", _record(SHORT, _entry(60.0), xla=_entry(45.0))))
    assert results.case(SHORT)["impls"]["ours"]["us"] == 60.0


def test_of_few_queries_the_newest_measurement_counts(attend):
    case, other = attention_cases.TABLE.select(tags=["decode"], pass_=["fwd"])[:2]
    facts = {"topic": "attention decode"}
    # Whichever of them had the newer JAX; without cuDNN there is nothing to compare.
    attend("1", {case: {"ours": 60.0, "cudnn": 90.0}}, **facts)
    attend("2", {case: {"ours": 30.0, "cudnn": 90.0}, other: {"ours": 90.0, "cudnn": 80.0}}, **facts)
    attend("1", {other: {"ours": 80.0, "cudnn": 80.0}}, **facts)
    attend("1", {case: {"ours": 10.0}, other: {"ours": 20.0}}, **facts)
    results = attend("1", {other: {"ours": 10.0}}, card="H200", **facts)
    found = {r["case"]["name"]: (report.CARD(r), r["impls"]["ours"]["us"]) for r in docs.few_queries(results)}
    assert found == {case.name: ("H100", 30.0), other.name: ("H100", 80.0)}


REFUSED = {
    "NaN": (lambda entry: entry | {"us": float("nan")}, "NaN"),
    "infinity": (lambda entry: entry | {"tb_per_s": float("inf")}, "Infinity"),
    "the least time": (lambda entry: entry | {"us": 20.0, "min_us": 20.0}, "lies within the rounds' 29.0 to 31.0 us"),
    "the greatest time": (lambda entry: entry | {"us": 40.0, "max_us": 40.0}, "lies within"),
    "no time": (lambda entry: entry | {"us": 0.0, "rounds_us": []}, "expected a positive one"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_median_has_no_place_in_a_table(folder, fault):
    spoil, words = REFUSED[fault]
    entry = _entry(30.0) | {"min_us": 20.0, "max_us": 40.0, "rounds_us": [29.0, 31.0]}
    assert docs.DETAILS["rows"](Results(folder("run", "2026-11-02", _record(SHORT, entry))))
    path = folder("run", "2026-11-02", _record(SHORT, spoil(entry)))
    with pytest.raises(ValueError, match=words):
        docs.DETAILS["rows"](Results(path))
    with pytest.raises(ValueError, match=words):
        pictures.draw(Results(path), path / "pictures")


def test_a_case_that_a_file_has_twice_is_refused(folder):
    path = folder("run", "2026-11-02", _record(SHORT, _entry(30.0)), _record(LONG, _entry(9.0)))
    assert len(Results(path).records()) == 2
    path = folder("run", "2026-11-02", _record(SHORT, _entry(30.0)), _record(SHORT, _entry(31.0)))
    with pytest.raises(ValueError, match=f"{SHORT} has two records"):
        Results(path)


def test_a_backward_pass_is_the_difference_of_medians():
    programs = {
        "fwd": {"us": 10.0, "min_us": 4.0, "max_us": 11.0, "rounds_us": [10.0, 9.0, 10.5]},
        "value_and_vjp": {"us": 30.0, "min_us": 29.0, "max_us": 50.0, "rounds_us": [30.0, 30.0, 31.0]},
    }
    found = measured.speeds("bwd", programs, 4e8)
    assert (found["us"], found["min_us"], found["max_us"], found["tflop_per_s"]) == (20.0, 20.0, 21.0, 20.0)
    assert measured.speeds("fwd", programs, 4e8)["tflop_per_s"] == 40.0
    programs["direct"] = {"us": 25.0, "min_us": 1.0, "max_us": 90.0}
    found = measured.speeds("bwd", programs, 4e8)
    assert (found["us"], found["direct_us"], found["direct_tflop_per_s"]) == (20.0, 25.0, 16.0)
    tree = measured.speeds("bwd", {"direct": programs["direct"]}, 4e8)
    assert (tree["us"], tree["min_us"], tree["max_us"]) == (25.0, 1.0, 90.0)
    programs["value_and_vjp"]["us"] = 10.0
    assert measured.speeds("bwd", programs, 4e8)["status"] == "unresolved"


def test_a_peer_from_another_process_is_compared_by_its_own_copy(folder):
    folder("jax", "2026-11-02", _record(SHORT, _entry(30.0, 1.0), xla=_entry(45.0, 0.7)))
    peers = _record(SHORT, quack=_entry(20.0, 0.8, "torch"), liger={"status": "declined", "reason": "no"})
    results = Results(folder("torch", "2026-11-01", peers))
    assert [measured.ratio(results.case(SHORT), peer) for peer in ("xla", "quack")] == [1.5, 1.25]
    row = docs.DETAILS["rows"](results).splitlines()[2]
    assert row == "| softmax f16 32768 x 1024 | 30.0 | 4.47 | 1.00 | 1.50 | refuses | 1.25 | 0.5 | 2026-11-02 jax |"
    entries = {"ours": {"us": 2.0}, "cudnn": {"us": 3.0}, "mgpu": {"us": 2.5}, "xla": {"us": 1.0}, "tokamax": {}}
    assert measured.against_best({"impls": entries}) == {"best_peer": "mgpu", "ratio": 1.25}
    assert measured.against_best({"impls": {"ours": {"us": 2.0}}}) == {"best_peer": None, "ratio": None}


def test_a_wrong_result_has_no_time_and_keeps_no_promise(folder):
    wrong = {"status": "WRONG", "reason": "off", "max_error_ulp": 900.0}
    results = Results(folder("run", "2026-11-02", _record(SHORT, wrong, xla=_entry(45.0))))
    assert "| WRONG | - | - |" in docs.DETAILS["rows"](results)
    assert "| `softmax` | H200 | 1, 1 WRONG |" in docs.summary(results)
    worst, record, count = TARGETS[0].measured(results)
    assert (worst, record["case"]["name"], count) == (0.0, SHORT, 1)
    assert "**missed**" in promises.rows(results)


def test_what_must_be_at_most_something_is_missed_above_it(folder):
    (target,) = [target for target in TARGETS if target.label.startswith("cross entropy, value")]
    for fraction, extra, verdict in ((0.95, 0, "goal"), (0.8, 2**21, "kept"), (0.7, 2**23, "**missed**")):
        results = Results(folder("run", "2026-11-02", _loss(fraction, extra)))
        assert target.word(target.measured(results)[0]) == verdict
        row = next(line for line in promises.rows(results).splitlines() if "memory beyond the gradient" in line)
        assert ("missed" in row) == (verdict == "**missed**")
    wrong = _loss(0.8)
    wrong["impls"]["ours"] = {"status": "WRONG", "reason": "off"}
    assert target.measured(Results(folder("run", "2026-11-02", wrong)))[0] == float("inf")


def test_what_is_missed_does_not_look_reached(folder):
    (target,) = [target for target in TARGETS if target.label.startswith("no memory beyond the output")]
    results = Results(folder("run", "2026-11-02", _record(SHORT, _entry(30.0, temp_bytes=1024))))
    assert f"| {target.label} | 1 | - | 0.99999 | **missed** |" in promises.rows(results)


def test_every_promise_and_every_line_of_the_summary_selects_cases():
    assert all(target.select() for target in TARGETS)
    everything = [case.describe() for case in tables.ROWS.cases]
    assert {docs.line_of(case) for case in everything} == {*docs.LINES, None}
    assert {docs.line_of(case) for case in everything if "extended" in case["tags"]} == {None}
    wanted = [len(attention_cases.TABLE.select(tags=[promise.tag], pass_=["bwd"])) for promise in promises.PROMISES]
    assert wanted == [32, 32, 27, 32]


def test_a_header_says_what_was_measured_on_what(monkeypatch):
    assert (measured._output("echo", " a "), measured._output("false"), measured._output("no such")) == (
        "a",
        None,
        None,
    )
    asked = []

    def output(command, query, *rest):
        asked.append((command, *rest))
        if command == "git":
            return "abc-dirty"
        return ", ".join(f"its {name}" for name in query.removeprefix("--query-gpu=").split(","))

    monkeypatch.setattr(measured, "_output", output)
    found = measured.header(commit=None, seed=3, rounds=2)
    assert (found["schema"], found["commit"], found["seed"], found["rounds"]) == (1, "abc-dirty", 3, 2)
    assert found["device"] == {x: f"its {x}" for x in ("name", "driver_version", "memory.total")}
    assert found["clocks_before"] == measured.clocks() == {x: f"its {x}" for x in measured._CLOCKS.split(",")}
    assert found["versions"]["jax"] == jax.__version__
    assert "no package" not in found["versions"]
    assert asked[0] == ("git", str(docs.ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    assert set(asked[1:]) == {("nvidia-smi", "--format=csv,noheader", "--id=0")}
    when = datetime.datetime.fromisoformat(found["timestamp"])
    assert (when.utcoffset(), when.microsecond) == (datetime.timedelta(0), 0)
    monkeypatch.setattr(measured, "_output", lambda *_: None)
    found = measured.header(commit="given", seed=0, rounds=1)
    assert (found["commit"], found["clocks_before"]) == ("given", {})
    assert found["device"]["name"].startswith("CPU (")


def test_result_files_are_plain_json(folder):
    path = folder("run", "2026-11-02", _record(SHORT, _entry(30.0))) / "h200" / "run.json"
    assert json.loads(path.read_text()) == measured.read(path)
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_runs_of_attention_stand_by_card_and_version_and_two_sources_are_not_compared(attend):
    attend("0.11.2", {FULL: {"ours": 100.0, "cudnn": 110.0}, BACKWARD: {"ours": 300.0, "cudnn": 330.0}})
    attend("0.12.0.1", {FULL: {"ours": 102.0, "cudnn": 100.0}, CAUSAL: {"ours": "WRONG", "cudnn": 60.0}})
    attend("0.11.2", {FULL: {"ours": 50.0, "cudnn": 60.0}})
    results = attend("0.12.0.1", {FULL: {"ours": 100.0, "cudnn": 90.0}}, commit="another")
    assert [run.label for run in measured.attention_runs(results.folder)] == [
        f"H100, JAX {jax}{again}" for jax in ("0.12.0.1", "0.11.2") for again in ("", ", again")
    ]
    _, _, full, causal = docs.attention_cells("fwd")(results).splitlines()
    # The repeated runs are of two sources, so that their times are not compared.
    assert full == "| D 128, S 2048, full | 102.0 | 100.0 | 0.980 | 0.900 | 100.0 | 110.0 | 1.100 | 1.200 | 0.980 | - |"
    assert causal.startswith("| D 128, S 2048, causal | WRONG | 60.0 | - |")
    backward = docs.attention_cells("bwd")(results)
    assert "| D 128, S 2048, full | - | - | - | - | - | 300.0 | 301.0 | 330.0 | 1.100 |" in backward
    assert docs.attention(results).splitlines()[2:] == [
        "| D 128, S 2048, full | 102.0 | 0.980 | - | - |",
        "| D 128, S 2048, causal | WRONG | - | - | - |",
    ]
    text = promises.attention(results)
    row = next(line for line in text.splitlines() if line.startswith("| H100, JAX 0.12.0.1, forward |"))
    assert row.startswith("| H100, JAX 0.12.0.1, forward | 0.000 **missed** (2 of 32 cells) |")
    assert row.endswith(" | 0.980 at D 128, S 2048, full |")
    assert "| H100, JAX 0.12.0.1 over H100, JAX 0.11.2, forward | 0.980 **missed** (1 of 32 cells) | 0.980 |" in text
    assert "H100, JAX 0.11.2" not in docs.summary(results)  # only the newest JAX of a card
    results = attend("0.12.0.1", {FULL: {"ours": 1.0}}, card="H200")
    assert "over H200" not in promises.attention(results)


@pytest.mark.parametrize(
    "times, words",
    [
        ((90.0, 110.0), "1.005 goal (2 of 32 cells) | 0.909 |"),
        ((100.0, 101.0), "0.995 kept (2 of 32 cells) | 0.990 |"),
        ((101.0, 102.0), "0.985 **missed** (2 of 32 cells) | 0.980 |"),
    ],
)
def test_versions_are_compared_by_the_geometric_mean(attend, times, words):
    attend("1", {case: {"ours": 100.0, "cudnn": 100.0} for case in (FULL, CAUSAL)})
    results = attend("2", {case: {"ours": us, "cudnn": 100.0} for case, us in zip((FULL, CAUSAL), times, strict=True)})
    assert f"| H100, JAX 2 over H100, JAX 1, forward | {words}" in promises.attention(results)


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
    found = [promise.judge(run, "fwd") for promise in promises.PROMISES]
    assert [text.split(" (2 of ")[0] for text in found] == words


def test_committed_results_lie_in_the_folder_of_their_card():
    for path in FOLDER.glob("*/attention*.json"):
        name = measured.read(path)["header"]["device"]["name"]
        assert path.parent.name.upper() in name.upper(), f"{path} was measured on {name}"


def test_pictures_are_drawn_from_results(folder, attend, tmp_path):
    attend("1", {FULL: {"ours": 100.0, "cudnn": 110.0}})
    sweep = [case.name for case in tables.ROWS.select(op=["softmax"], pass_=["fwd"], dtype=["float16"], tags=["sweep"])]
    results = Results(folder("run", "2026-11-02", *(_record(name, _entry(30.0)) for name in sweep)))
    attend("1", {FULL: {"ours": 100.0, "cudnn": 110.0}}, topic="attention sample")
    header = {"topic": "scaling", "commit": "abc", "device": {"name": "NVIDIA H200"}, "versions": {"jax": "1"}}
    for efficiency in (0.4, 0.9):
        records = [{"case": {"name": "loss_rows", "devices": 2}, "efficiency": efficiency}]
        path = tmp_path / "h200" / f"scaling_{efficiency}.json"
        measured.write(path, header | {"timestamp": f"2026-11-{path.stem[-1]}"}, records)
    drawn = pictures.draw(results, tmp_path / "pictures")
    assert [path.name for path in drawn] == ["bandwidth_softmax_fwd_float16.svg", "attention.svg", "scaling.svg"]
    (axes,) = pictures.efficiency(pyplot, measured.topic_runs("scaling", tmp_path)).axes
    assert [bar.get_width() for bar in axes.patches] == [0.9]
    assert all(path.read_text().startswith("<?xml") for path in drawn)


def test_bars_and_calls_stand_where_their_numbers_are(attend):
    attend("1", {FULL: {"ours": 100.0, "cudnn": 80.0}, CAUSAL: {"ours": 50.0, "cudnn": 25.0}})
    results = attend("1", {FULL: {"ours": 100.0, "xla": 120.0}, CAUSAL: {"ours": 50.0, "cudnn": 40.0}},
                     topic="attention sample")  # fmt: skip
    runs = [measured.attention_runs(results.folder, topic) for topic in ("attention", "attention sample")]
    figure = pictures.cells(pyplot, *runs[0], runs[1])
    bars, calls = figure.axes
    drawn = {one.get_label(): [(bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in one]
             for one in bars.containers}  # fmt: skip
    flat = {name: [x for pair in pairs for x in pair] for name, pairs in drawn.items()}
    assert flat == {"cudnn": pytest.approx([-0.2, 500, 0.8, 1600]), "ours": pytest.approx([0.2, 400, 1.2, 800])}
    assert [bar.get_height() for one in bars.containers for bar in one] == pytest.approx([0.4] * 4)
    assert [label.get_text() for label in bars.get_yticklabels()] == [
        case.name.removeprefix("attention_") for case in (FULL, CAUSAL)
    ]
    assert list(bars.lines[0].get_xdata()) == [800.0, 800.0]
    found, even = ([list(data) for data in line.get_data()] for line in calls.lines)
    assert found == [[25.0, 75.0], [0.8, 1.2]]
    assert even[1] == [1, 1]
    assert [
        (tick, label.get_text()) for tick, label in zip(calls.get_yticks(), calls.get_yticklabels(), strict=True)
    ] == [(x, str(x)) for x in (0.5, 1, 2, 5, 10)]
    pyplot.close(figure)


def test_lines_of_caches_have_each_implementations_times():
    us = {"ours": 1.0, "cudnn": 2.0, "xla": 4.0}
    records = [
        {"case": {"name": f"{queries} {keys}", "length": keys, "queries": queries}, "least_bytes": 10**6 * keys,
         "read": {"tb_per_s": 2.0}, "impls": {name: {"us": x * keys + queries} for name, x in us.items()}}
        for keys in (4096, 1024) for queries in (1, 4, 16)
    ]  # fmt: skip
    header = {"timestamp": "2026-11-10", "commit": "abc", "device": {"name": "H"}, "versions": {"jax": "1"}}
    figure = pictures.caches(pyplot, measured.Run(header, records))
    (axes,) = figure.axes
    drawn = {line.get_label(): [list(data) for data in line.get_data()] for line in axes.lines}
    assert drawn.pop("a read") == [[1024] * 3 + [4096] * 3, [512.0] * 3 + [2048.0] * 3]
    keys = [1024, 4096]
    assert drawn == {
        f"{name}, {queries}": [keys, [x * n + queries for n in keys]]
        for name, x in us.items()
        for queries in (1, 4, 16)
    }
    pyplot.close(figure)
