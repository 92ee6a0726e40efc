"""What the documents say is so: their Python runs, their links lead somewhere, their commands exist."""

import ast
import importlib
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FOLDERS = ("", "docs/", "docs/tuning/", "examples/")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md"))

# Words of our own for what has a name in the field, and what to say. docs/glossary.md has the words that stay.
RETIRED_WORDS = {
    "what binds": "bottleneck",
    "multiprocessor": "SM",
    "copying warpgroup": "producer warpgroup",
    "computing warpgroup": "consumer warpgroup",
    "copy engine": "TMA",
    "second-level cache": "L2",
    "device memory": "global memory",
    "block of threads": "CTA",
    "blocks of threads": "CTAs",
    "team": "the CTAs of a row, or a cluster",
    "board": "workspace",
    "posted": "a tagged message",
    "patience": "timeout",
    "who is told": "the CTA or warpgroup that is meant",
    "whoever": "the CTA or warpgroup that is meant",
    "nobody": "no CTA, no warpgroup",
    "granule": "chunk",
    "rung": "kernel",
    "cut over": "sharded over",
    "cuttable": "Sharded",
    "declines_any": "unsupported_reason",
    "take_ticket": "next_tile",
    "across_block": "block_gather",
    "across_cluster": "cluster_gather",
    "to_grid": "grid_store",
    "from_grid": "grid_load",
    "keep_held": "apply_bitmask",
    "hidden_by_data": "has_data_mask",
    "logit_shift": "row_delta",
    "wait_behind": "pin_wait_after",
    "section_mib": "l2_budget_mib",
    "await_turn": "acquire_dq",
}
RETIRED_WORDS_LEFT = {
    "docs/mutants.md": {"nobody"},  # written from the tests' faults
}
PACKAGES = ("jaxsoftmax", "pallas_kernels")
CODE = sorted(str(path.relative_to(ROOT)) for x in (*PACKAGES, "examples") for path in (ROOT / x).rglob("*.py"))
TEXTS = [*DOCUMENTS, *CODE]
BENCHMARKS = [str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").rglob("*.py")]


# Functions that readers copy, at their edges: no row, no row that counts, one column. All results have the same number.
NO_LABELS, IGNORED = np.zeros(0, np.int32), np.full(2, -100)
EDGES = {
    "docs/attention.md": [("deal", (np.ones((2, 0, 3)),), 1.0), ("deal", (np.ones((2, 20)),), 1.0)],
    "docs/cross_entropy.md": [
        ("mean_loss", (np.ones((0, 3), np.float32), NO_LABELS), 0.0),
        ("mean_loss", (np.ones((2, 1), np.float32), np.zeros(2, np.int32)), 0.0),
        ("mean_of_some", (np.ones((0, 3), np.float32), NO_LABELS), 0.0),
        ("mean_of_some", (np.full((2, 3), np.nan, np.float32), IGNORED), 0.0),
        ("head_loss", (np.ones((0, 4), np.float32), np.ones((4, 3), np.float32), NO_LABELS), 0.0),
        ("head_loss", (np.ones((2, 4), np.float32), np.ones((4, 1), np.float32), np.zeros(2, np.int32)), 0.0),
        ("tokamax_like", (np.ones((0, 4), np.float32), NO_LABELS, np.ones((4, 3), np.float32)), 0.0),
    ],
    "docs/numerics.md": [
        ("log_probabilities", (np.ones((0, 3), np.float32),), 0.0),
        ("log_probabilities", (np.ones((2, 1), np.float32),), 0.0),
        ("log_probabilities", (np.ones((2, 0), np.float32),), 0.0),
    ],
    "docs/patch.md": [("model", (np.ones((2, 1, 1, 1), np.float32), np.zeros((2, 1), np.int32)), 0.0)],
}


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if "```python" in (ROOT / d).read_text()])
def test_python_in_documents_runs(document):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    namespace = {}
    for block in blocks:
        exec(compile(block, document, "exec"), namespace)
    for name, arguments, want in EDGES.get(document, ()):
        for got in jax.tree.leaves(namespace[name](*arguments)):
            np.testing.assert_array_equal(got, np.full(got.shape, want), err_msg=f"{name} of {arguments}")


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
        for path, _, heading in (link.partition("#") for link in links if "://" not in link):
            target = (ROOT / document).parent / path if path else ROOT / document
            assert target.exists(), (document, path)
            assert not heading or heading in _headings(target), f"{document}: {path}#{heading}"


def _headings(path):
    """What GitHub calls a document's headings in links."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", ["docs/adding_an_operand.md", "docs/adding_an_operation.md"])
def test_recipes_name_files_that_exist(document):
    named = re.findall(r"`([\w/]+/[\w.]*)`", (ROOT / document).read_text())
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def test_commands_exist():
    texts = "\n".join((ROOT / document).read_text() for document in DOCUMENTS)
    targets = set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
    assert set(re.findall(r"`make ([\w-]+)`", texts)) <= targets
    assert all((ROOT / script).exists() for script in re.findall(r"python (examples/\w+\.py)", texts))


def test_the_glossary_has_only_words_that_the_code_uses():
    cells = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    words = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
    code = "\n".join(path.read_text() for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
    assert words
    assert not words - set(re.findall(r"\w+", code))


def test_no_retired_words():
    # A letter before or after makes another word of it, as of "dashboard"; an underscore does not.
    retired = re.compile(rf"(?<![a-z])({'|'.join(map(re.escape, RETIRED_WORDS))})s?(?![a-z])")
    for path in TEXTS:
        left = {word for start, words in RETIRED_WORDS_LEFT.items() if path.startswith(start) for word in words}
        found = set(retired.findall(" ".join((ROOT / path).read_text().split()).lower())) - left
        assert not found, (path, {word: RETIRED_WORDS[word] for word in found})


# At the start of a sentence these words stand for a noun that the reader has to look for.
RIDDLE = re.compile(r"(?:^|[.!?:;] |\| |^- |^\d+\. |\*\* )(?:What|Those|Of|The same)\b")
# A docstring begins with a verb in -s that is none of these nouns, or has one of these verbs in its first sentence.
VERB = re.compile(
    r"\b(is|are|was|has|have|do|does|can|may|must"
    r"|(give|take|run|read|write|make|know|need|say|add|get|keep|hold|compute|come|go|stand|lie|count|see|call|mean"
    r"|become|use|follow|begin|end|stay|handle|arrive|work|leave|announce|issue|release|fetch|compare)(e?s)?)\b"
)
NOUN = re.compile(
    r"(rows|tiles|bytes|states|sums|columns|labels|integers|vectors|slots|losses|arrays|probabilities|weights|keys"
    r"|operations|chunks|tokens|this|its|cross|as|operands|facts|types)\b"
)


def riddles(text: str) -> list[str]:
    """Finds the beginnings of sentences that leave out their noun; in Markdown without its blocks of code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [" ".join(part.split()).lstrip("# ") for part in re.split(r"\n\s*\n|\n(?=[-|#\d])", prose)]
    return [part[found.start() :][:60] for part in paragraphs for found in RIDDLE.finditer(part)]


def has_verb(docstring: str) -> bool:
    sentence = re.split(r"[.;:](?: |$)", re.sub(r"`[^`]*`", "it", " ".join(docstring.split("\n\n")[0].split())))[0]
    begins = re.match(r"[a-z]+s\b", sentence, re.IGNORECASE) and not NOUN.match(sentence.lower())
    return bool(begins or VERB.search(sentence.lower()) or sentence.strip(".") == "it")  # a formula


def docstrings(source: str) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node, text


def comments(source: str) -> str:
    """Joins comments on lines that follow each other to paragraphs."""
    found = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    ]
    texts, last = [], 0
    for token in found:
        texts.append(("" if token.start[0] == last + 1 else "\n\n") + token.string.lstrip("# "))
        last = token.start[0]
    return "\n".join(texts)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_sentences_begin_with_their_noun(document):
    assert not riddles((ROOT / document).read_text())


@pytest.mark.parametrize("module", sorted({*CODE, *BENCHMARKS}))
def test_sentences_of_code_begin_with_their_noun_and_docstrings_of_functions_with_a_verb(module):
    source = (ROOT / module).read_text()
    assert not [text for _, docstring in docstrings(source) for text in riddles(docstring)] + riddles(comments(source))
    if module.startswith(PACKAGES):
        functions = [(node, text) for node, text in docstrings(source) if isinstance(node, ast.FunctionDef)]
        assert not [text for node, text in functions if not (has_verb(text) or _is_property(node))]


def _is_property(node):
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize(
    "text",
    [
        "What is kept.",
        "It runs.\n\nOf these, two.",
        "- Those that are",
        "| a | The same |",
        "It runs. The\nsame again.",
    ],
)
def test_a_riddle_is_found(text):
    assert len(riddles(text)) == 1


def test_comments_on_lines_that_follow_each_other_are_a_paragraph():
    found = riddles(comments("x = 1  # What is kept.\n# It runs. The\n# same again.\n\n# The end."))
    assert [text.lstrip(". ") for text in found] == ["What is kept. It runs. The same again.", "The same again."]


def test_a_docstring_without_a_verb_is_found():
    assert not [text for text in ("The sums: it is.", "Rows of `is`.", "Of what it\n\nis.") if has_verb(text)]
    assert all(map(has_verb, ("Merges two states.", "The kernel\nreads it.", "`x` is cast.", "`x / y`.")))


def test_the_version_has_an_entry_in_the_changelog():
    version = importlib.import_module("jaxsoftmax").__version__
    assert re.search(rf"^## \[?{re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("which", ["NEWEST", "OLDEST"])
def test_the_extra_for_gpus_takes_every_jax_that_is_tested(which):
    version = re.search(rf"^{which}_JAX := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra, jax_itself = map(Requirement, [*project["optional-dependencies"]["gpu"], project["dependencies"][0]])
    assert (extra.name, extra.extras) == ("jax", {"cuda13"})
    assert version in extra.specifier
    assert version in jax_itself.specifier
    assert "pip install '.[gpu]'" in (ROOT / "README.md").read_text()
