"""What is said of attention on a card with a version of JAX comes from no other card, and from no other JAX."""

import itertools
import re

import pytest

from benchmarks import attention_cases, attention_docs, docs, plot, targets
from benchmarks import results as measured
from benchmarks.results import FOLDER, NOT_MEASURED, Results, Setting

NAMES = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}
FULL, CAUSAL = attention_cases.select(tags=["core"], passes=["fwd"], patterns=["d128_s2048"])
(BACKWARD,) = attention_cases.select(tags=["core"], passes=["bwd"], patterns=["full_d128_s2048"])


def _entry(case, us, **facts):
    speed = {"us": us, "min_us": us, "max_us": us, "tflop_per_s": round(case.flops / us / 1e6, 2)}
    return {"status": "ok", "error": 2e-3, **speed, **facts}


@pytest.fixture
def run(tmp_path):
    """Writes a result file: `run(card, jax, {case: {implementation: microseconds}})`; each is newer than the last."""
    days = itertools.count(10)

    def write(card, jax, found, commit="abc", linker=None, cudnn=None, left_out=()):
        shared = {
            "nvjitlink": linker,
            "clock": "cupti",
            "matmul": {"tflop_per_s": 800.0},
            "peers_matmul": {"tflop_per_s": 720.0},
        }
        records = []
        for case, times in found.items():
            of_torch = lambda name: {"process": "torch", "version": "4"} if name == "fa4" else {}
            impls = {
                name: _entry(case, us, **of_torch(name)) if isinstance(us, float) else {"status": us, "reason": "no"}
                for name, us in times.items()
            }
            records.append({"case": case.describe(), "impls": impls, **shared})
        header = {"timestamp": f"2026-11-{next(days)}", "topic": "attention", "commit": commit}
        versions = {"jax": jax} | ({"cudnn": cudnn} if cudnn else {})
        header |= {"device": {"name": NAMES[card]}, "versions": versions, "left_out": left_out}
        measured.write(tmp_path / card / f"attention_{header['timestamp']}.json", header, records)
        return Results(tmp_path)

    return write


def _sections(page):
    """The text under each heading."""
    heads = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    return dict(zip(heads[1::2], heads[2::2], strict=True))


@pytest.fixture
def results(run):
    """Two cells, one of them wrong, and one left out."""
    good, bad, missing = attention_cases.select(tags=["core"])[:3]
    peers = {"cudnn": 600.0, "tokamax": "failed"}
    cells = {good: {"ours": 500.0, **peers}, bad: {"ours": "WRONG", **peers}}
    return run("h200", "0", cells, cudnn="91900", left_out=[missing.name])


def test_documents_come_from_results(results):
    (text,) = docs.pages(results).values()
    assert "| attention | us | TFLOP/s | direct | of matmul | x cuDNN | x tokamax | error | measured |" in text
    assert (
        "| forward, D 64, S 2048, full | 500.0 | 550 | - | 0.69 | 1.20 (458) | failed | 2.0e-03 | 2026-11-10 abc |"
        in text
    )
    assert "| backward, D 64, S 2048, full | WRONG | - |" in text
    assert "cuDNN 91900" in text
    assert "attention_fwd_causal_d64_s2048_b8_h32" in text


def test_results_of_attention_are_not_results_of_softmax(results):
    assert not results
    assert docs.everything(results) == NOT_MEASURED


def test_without_results_nothing_is_claimed(tmp_path):
    assert docs.pages(Results(tmp_path)) == {}
    assert attention_docs.comparison([]) == NOT_MEASURED


def test_the_committed_page_is_the_generated_one():
    for path, text in docs.pages(Results()).items():
        assert path.read_text() == text, "run python -m benchmarks.docs"


def test_a_picture_is_drawn_from_results(results, tmp_path):
    ((setting, attention),) = results.by_setting("attention").items()
    (path,) = plot.draw_attention(setting, attention, tmp_path / "pictures")
    assert path.read_text().startswith("<?xml")


def test_each_card_and_version_of_jax_has_a_table_of_its_own(run):
    run("h200", "0.11.2", {FULL: {"ours": 100.0, "cudnn": 111.0}})
    run("h200", "0.12.0.1", {FULL: {"ours": 200.0, "mgpu": 300.0}})
    results = run("h100", "0.11.2", {FULL: {"ours": 400.0, "cudnn": 380.0}})
    (page,) = docs.pages(results).values()
    sections = _sections(page)
    assert list(sections)[-3:] == [
        "NVIDIA H200, JAX 0.12.0.1",
        "NVIDIA H200, JAX 0.11.2",
        "NVIDIA H100 80GB HBM3, JAX 0.11.2",
    ]
    newest, old, other = list(sections.values())[-3:]
    wanted = [("| 200.0 |", "1.50 ("), ("| 100.0 |", "| 1.11 ("), ("| 400.0 |", "| 0.95 (")]
    assert all(text in section for texts, section in zip(wanted, (newest, old, other), strict=True) for text in texts)
    assert "x cuDNN" not in newest
    assert "x JAX's attention_mgpu" not in old + other
    row = lambda name: next(line for line in page.splitlines() if line.startswith(f"| {name}, forward |"))
    assert row("NVIDIA H200, JAX 0.11.2").startswith("| NVIDIA H200, JAX 0.11.2, forward | 1.110 kept (1 of 32 cells)")
    assert row("NVIDIA H200, JAX 0.12.0.1").endswith("| - | - | - | - |")
    assert "| 0.950 **missed** (1 of 32 cells), at D 128, S 2048, full |" in row(list(sections)[-1])


def test_a_newer_run_replaces_that_of_its_own_card_and_version_alone(run):
    run("h200", "0.11.2", {FULL: {"ours": 100.0}})
    run("h200", "0.12.0.1", {FULL: {"ours": 200.0}})
    found = run("h200", "0.12.0.1", {FULL: {"ours": 150.0}}).by_setting("attention")
    us = {setting.jax: results.case(FULL.name)["impls"]["ours"]["us"] for setting, results in found.items()}
    assert us == {"0.12.0.1": 150.0, "0.11.2": 100.0}


def test_the_newest_jax_is_the_one_with_the_highest_number(run):
    for version in ("0.9.2", "0.12.0.1", "0.11.2"):
        results = run("h100", version, {FULL: {"ours": 100.0}})
    assert [setting.jax for setting in results.by_setting("attention")] == ["0.12.0.1", "0.11.2", "0.9.2"]


def test_a_peer_without_jax_is_shared_by_the_versions_of_a_card_and_by_no_other_card(run):
    run("h200", "0.11.2", {FULL: {"ours": 100.0, "fa4": 120.0}})
    run("h100", "0.12.0.1", {FULL: {"ours": 500.0}})
    found = run("h200", "0.12.0.1", {FULL: {"ours": 100.0}}).by_setting("attention")
    fa4 = {setting: results.case(FULL.name)["impls"].get("fa4", {}) for setting, results in found.items()}
    new, old, h100 = (
        Setting(NAMES[card], jax) for card, jax in (("h200", "0.12.0.1"), ("h200", "0.11.2"), ("h100", "0.12.0.1"))
    )
    assert "matmul_tflop_per_s" not in fa4[old]  # of the same run
    assert fa4[new] == fa4[old] | {"matmul_tflop_per_s": 720.0}
    assert fa4[h100] == {}


def test_a_peer_of_the_same_version_comes_before_a_newer_one_of_another(run):
    run("h200", "0.12.0.1", {FULL: {"ours": 100.0, "fa4": 120.0}})
    found = run("h200", "0.11.2", {FULL: {"ours": 100.0, "fa4": 240.0}}).by_setting("attention")
    assert [results.case(FULL.name)["impls"]["fa4"]["us"] for results in found.values()] == [120.0, 240.0]


@pytest.mark.parametrize(
    "ratios, words",
    [
        ((1.1, 1.2), ["1.100 kept", "1.148 kept", "1.148 kept", "1.100 goal"]),
        ((0.9999, 1.2), ["0.999 **missed**", "1.095 kept", "1.095 kept", "0.999 below goal"]),
        ((1.0, 1.1), ["1.000 kept", "1.048 **missed**", "1.048 **missed**", "1.000 goal"]),
        (("WRONG", 2.0), ["0.000 **missed**", "0.000 **missed**", "0.000 **missed**", "0.000 below goal"]),
    ],
)
def test_musts_and_goals(run, ratios, words):
    cells = {
        case: {"ours": 100.0, "cudnn": 100.0 * ratio, "fa4": 900.0}
        if isinstance(ratio, float)
        else {"ours": ratio, "cudnn": 100.0, "fa4": 100.0}
        for case, ratio in zip((FULL, CAUSAL), ratios, strict=True)
    }
    (results,) = run("h100", "0.12.0.1", cells).by_setting("attention").values()
    found = [attention_docs._verdict(promise.judge(results, "fwd")) for promise in targets.PROMISES]
    assert [text.split(" (2 of ")[0] for text in found] == words
    assert [text.split(" (2 of ")[1][:2] for text in found] == ["32", "32", "27", "32"]


def test_cells_are_what_the_issue_counts():
    for pass_ in targets.PASSES:
        wanted = [len(attention_cases.select(tags=[p.tag], passes=[pass_])) for p in targets.PROMISES]
        assert wanted == [32, 32, 27, 32]


def test_versions_are_compared_by_runs_of_the_same_source(run):
    run("h100", "0.11.2", {FULL: {"ours": 100.0, "cudnn": 110.0}, CAUSAL: {"ours": 50.0}}, commit="same")
    run("h100", "0.11.2", {FULL: {"ours": 10.0}, CAUSAL: {"ours": 5.0}}, commit="later")
    cells = {FULL: {"ours": 102.0, "cudnn": 100.0}, CAUSAL: {"ours": 49.0}, BACKWARD: {"ours": 300.0}}
    results = run("h100", "0.12.0.1", cells, commit="same")
    (page,) = docs.pages(results).values()
    text = _sections(page)["JAX 0.12.0.1 against 0.11.2, same source, NVIDIA H100 80GB HBM3"]
    assert "| attention | us, 0.12.0.1 | us, 0.11.2 | times faster | cuDNN | measured |" in text
    assert "| forward, D 128, S 2048, full | 102.0 | 100.0 | 0.980 | 1.100 | 2026-11-12 same |" in text
    assert "| forward, D 128, S 2048, causal | 49.0 | 50.0 | 1.020 | - | 2026-11-12 same |" in text
    assert "must 0.99, goal 1.00: forward 1.000 goal (2 of 32 cells), the worst 0.980, at D 128" in text
    assert "backward" not in text


def test_versions_of_different_sources_or_cards_are_not_compared(run):
    run("h200", "0.11.2", {FULL: {"ours": 100.0}})
    run("h100", "0.11.2", {FULL: {"ours": 100.0}}, commit="other")
    (page,) = docs.pages(run("h100", "0.12.0.1", {FULL: {"ours": 100.0}})).values()
    assert "same source" not in page


def test_a_table_says_whether_nvjitlink_was_loaded(run):
    """From JAX 0.12 on it compiles the kernels where it is found: times without it are not what users get."""
    run("h100", "0.12.0.1", {FULL: {"ours": 100.0}}, linker="/packages/nvidia/cu13/lib/libnvJitLink.so.13")
    results = run("h200", "0.12.0.1", {FULL: {"ours": 100.0}})
    caption = lambda name: _sections(next(iter(docs.pages(results).values())))[f"{NAMES[name]}, JAX 0.12.0.1"]
    assert "JAX 0.12.0.1, libnvJitLink.so.13 loaded; medians" in caption("h100")
    assert "libnvJitLink" not in caption("h200")
    results = run("h100", "0.12.0.1", {CAUSAL: {"ours": 100.0}})
    assert "libnvJitLink.so.13 loaded in 1 of 2 cases; medians" in caption("h100")


def test_the_summary_has_the_newest_jax_of_each_card(run):
    run("h200", "0.12.0.1", {FULL: {"ours": 100.0, "cudnn": 150.0}})
    run("h200", "0.11.2", {FULL: {"ours": 100.0, "cudnn": 200.0}})
    text = docs.summary(run("h100", "0.11.2", {FULL: {"ours": 100.0, "cudnn": 120.0}}))
    rows = [line.split(" | ")[0] for line in text.splitlines() if "flash_attention`," in line]
    assert rows == [
        "| `flash_attention`, NVIDIA H200, JAX 0.12.0.1",
        "| `flash_attention`, NVIDIA H100 80GB HBM3, JAX 0.11.2",
    ]
    assert "1.50 (1.50 ... 1.50)" in text
    assert "2.00" not in text


def test_committed_results_lie_in_the_folder_of_their_card():
    for path in FOLDER.glob("*/attention*.json"):
        name = measured.read(path)["header"]["device"]["name"]
        assert path.parent.name.upper() in name.upper(), f"{path} was measured on {name}"


def test_the_committed_page_has_every_setting_and_mixes_none():
    sections = _sections((docs.ROOT / "docs" / "attention_results.md").read_text())
    found = Results().by_setting("attention")
    assert found
    for setting in found:
        caption = [line for line in sections[str(setting)].splitlines() if "medians of interleaved runs" in line]
        assert [line.startswith(f"{setting.card}, driver ") for line in caption] == [True]
        assert re.findall(r", JAX ([\d., ]+)[,;]", caption[0]) == [setting.jax]
