"""What the documents say is so: their Python runs, their links lead somewhere, their commands exist."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_documents_runs(document):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    namespace = {}
    for block in blocks:
        exec(compile(block, document, "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for path, _, heading in (link.partition("#") for link in links if "://" not in link):
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), path
        assert not heading or heading in _headings(target), f"{path}#{heading}"


def _headings(path):
    """What GitHub calls a document's headings in links."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", ["docs/adding_an_operand.md", "docs/adding_an_operation.md"])
def test_recipes_name_files_that_exist(document):
    named = re.findall(r"`([\w/]+/[\w.]*)`", (ROOT / document).read_text())
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document):
    text = (ROOT / document).read_text()
    targets = set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= targets
    for script in re.findall(r"python (examples/\w+\.py)", text):
        assert (ROOT / script).exists()


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
