"""What the documents say is so: their Python runs, their links lead somewhere, their commands exist."""

import importlib
import re
import tomllib
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement

from pallas_kernels import compat

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


@pytest.mark.parametrize("fast, version", [(True, "0.11.2"), (True, "0.11.9"), (False, "0.12.0"), (False, "0.12.0.1")])
def test_the_extra_for_gpus_installs_a_jax_on_which_the_kernels_are_fast(monkeypatch, fast, version):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra, jax_itself = map(Requirement, [*project["optional-dependencies"]["gpu"], project["dependencies"][0]])
    assert (extra.name, extra.extras) == ("jax", {"cuda13"})
    # Both versions are supported; the extra leaves out exactly those that lose registers as `jax[cuda13]` is installed.
    assert version in jax_itself.specifier
    assert (version in extra.specifier) is fast
    monkeypatch.setattr(compat, "nvjitlink", lambda: "libnvJitLink.so")
    monkeypatch.setattr(jax, "__version_info__", tuple(map(int, version.split("."))))
    why = compat.lost_registers.__wrapped__()
    assert (why is None) is fast
    assert fast or re.search(r"Use JAX ([\d.]+\d)", why)[1] in extra.specifier
    # The bound itself, which no list of versions tells from a lower one.
    assert f"<{'.'.join(map(str, compat.REGISTERS_LOST_SINCE))}" in {str(bound) for bound in extra.specifier}
    assert re.findall(r"pip install '\.\[gpu\]'(.*?)#", (ROOT / "README.md").read_text())[0].strip() == ""
