"""What the layout promises, read from the sources: who imports whom, where the merge lives, how long a file may be."""

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxsoftmax", "pallas_kernels")
SHIMS = tuple(f"tests/pallas_kernels/{name}.py" for name in ("interpreter_shim", "simulated_gpu", "in_flight"))

# benchmarks -> jaxsoftmax -> pallas_kernels -> jax
OURS_BELOW = {
    "pallas_kernels": {"pallas_kernels"},
    "jaxsoftmax": {"pallas_kernels", "jaxsoftmax"},
    "benchmarks": {"pallas_kernels", "jaxsoftmax", "benchmarks"},
    "examples": {"pallas_kernels", "jaxsoftmax"},
}
OURS = {*OURS_BELOW, "tests"}

# Within jaxsoftmax: explain and patch -> topics -> _core. Cross entropy and top k are made of rows' statistics.
TOPICS_BELOW: dict[str, set[str]] = {
    "_core": set(),
    "_softmax": {"_core"},
    "_cross_entropy": {"_core", "_softmax"},
    "_top_k": {"_core", "_softmax"},
    "_attention": {"_core"},
    "_explain": {"_core", "_softmax", "_cross_entropy", "_top_k", "_attention", "_patch"},
    "explain": {"_explain"},
    "_patch": {"_core", "_softmax", "_cross_entropy", "_attention"},
}

# The exponential of a difference of maxima is `monoid.decay`; `fast_math` defines exponentials to hand to it.
MAY_EXPONENTIATE = {"pallas_kernels/monoid.py", "pallas_kernels/mosaic/fast_math.py"}

# The derivatives by `custom_vjp`, which no kernel imports.
MAY_CHOOSE = {"pallas_kernels/custom_vjp.py"}

MAX_MODULE_LINES = 600
MAX_KERNEL_LINES = 700  # of a kernel's module, or of what two share, which is read from top to bottom
MAX_FUNCTION_LINES = 90


def _sources(*folders: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text())


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _functions(source: str) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(_tree(source)) if isinstance(node, ast.FunctionDef))


def _is_kernel(source: str) -> bool:
    return any(function.name == "unsupported" for function in _functions(source))


def _roots(source: str) -> set[str]:
    return {name.split(".")[0] for name in _imports(source)}


def test_imports_go_one_way():
    imported = {source: _roots(source) & OURS for source in _sources(*OURS_BELOW)}
    assert not {source: roots for source, roots in imported.items() if roots - OURS_BELOW[source.split("/")[0]]}


def _topic(name: str) -> str:
    """The package or module of jaxsoftmax that a path or a dotted name is of."""
    return name.removesuffix(".py").replace("/", ".").split(".")[1]


def test_topics_import_one_way():
    for source in {*_sources("jaxsoftmax")} - {"jaxsoftmax/__init__.py"}:
        imported = {_topic(name) for name in _imports(source) if name.startswith("jaxsoftmax")}
        assert imported <= {_topic(source)} | TOPICS_BELOW[_topic(source)], source


def test_the_packages_need_only_jax_and_numpy():
    needed = {root for source in _sources(*PACKAGES) for root in _roots(source)}
    assert needed <= {*PACKAGES, "jax", "jaxlib", "numpy", *sys.stdlib_module_names}


def test_the_foundations_know_nothing_of_what_stands_on_them():
    for source in (f"pallas_kernels/{name}.py" for name in ("monoid", "hardware", "types")):
        assert not [name for name in _imports(source) if name.startswith("pallas_kernels")], source


def test_topics_of_kernels_import_mosaic_and_no_other_topic():
    topics = {"attention", "linear_cross_entropy", "mosaic", "softmax", "top_k"}
    for source in _sources("pallas_kernels"):
        own = source.split("/")[1]
        if own in topics:
            used = {name.split(".")[1] for name in _imports(source) if name.startswith("pallas_kernels.")} & topics
            assert used <= {own, "mosaic"}, source


def test_kernels_do_not_choose():
    choosing = [s for s in _sources("pallas_kernels") if any("dispatch" in name.split(".") for name in _imports(s))]
    assert set(choosing) <= MAY_CHOOSE


def test_no_private_jax():
    for source in [s for s in _sources(*OURS_BELOW, "tests") if s not in SHIMS]:
        assert not [name for name in _imports(source) if name.startswith("jax._src")], source
        attributes = [
            node for node in ast.walk(_tree(source)) if isinstance(node, ast.Attribute) and node.attr == "_src"
        ]
        assert "jax._src" not in map(ast.unparse, attributes), source


def test_the_merge_is_written_once():
    exponentiating = {
        source
        for source in _sources(*PACKAGES)
        for node in ast.walk(_tree(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("exp", "exp2")
    }
    assert exponentiating <= MAY_EXPONENTIATE


def test_files_and_functions_stay_readable():
    for source in _sources(*OURS_BELOW):
        most = MAX_KERNEL_LINES if _is_kernel(source) or source.endswith("_common.py") else MAX_MODULE_LINES
        assert len((ROOT / source).read_text().splitlines()) <= most, source
        for function in _functions(source):
            docstring = len((ast.get_docstring(function, clean=False) or "").splitlines())
            lines = function.end_lineno - function.lineno + 1 - docstring
            assert lines <= MAX_FUNCTION_LINES, f"{source}: {function.name} has {lines} lines"


def test_every_module_says_what_it_is():
    modules = [source for source in _sources(*PACKAGES) if not source.endswith("__init__.py")]
    assert not [source for source in modules if not ast.get_docstring(_tree(source))]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_public_surface_is_listed_and_documented(package):
    module = importlib.import_module(package)
    assert hasattr(module, "__all__") or not list(_imports(f"{package}/__init__.py"))
    names = getattr(module, "__all__", [])
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in names:
        exported = getattr(module, name)
        if callable(exported):
            assert inspect.getdoc(exported), f"{package}.{name} has no docstring"
    assert (ROOT / package / "py.typed").exists()


def test_nothing_is_left_to_do():
    unfinished = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    texts = [ROOT / s for s in _sources(*OURS_BELOW, "tests")] + [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
    assert not [str(path.relative_to(ROOT)) for path in texts if unfinished.search(path.read_text())]
