"""The tests' float64 oracle and error measure, which need NumPy alone. `tests` is no package: loaded by path."""

import importlib.util
import pathlib
import types


def _load(name: str) -> types.ModuleType:
    path = pathlib.Path(__file__).parents[1] / "tests" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks.tests_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle, errors = _load("oracle"), _load("errors")
