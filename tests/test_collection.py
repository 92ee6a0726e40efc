"""`--one-in` runs each test, and of its cases as many as it says."""

import types
from pathlib import Path

import pytest


@pytest.mark.parametrize("one_in, kept", [(1, 7), (2, 4), (3, 3), (10, 1)])
def test_one_in_so_many_of_each_tests_cases(pytestconfig, one_in, kept):
    (plugin,) = (
        p for p in pytestconfig.pluginmanager.get_plugins() if _file(p) == Path(__file__).with_name("conftest.py")
    )
    names = ["a.py::alone", *(f"a.py::many[{i}]" for i in range(7)), "b.py::many[0]"]
    items = [types.SimpleNamespace(nodeid=name) for name in names]
    left_out = []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = types.SimpleNamespace(option=types.SimpleNamespace(one_in=one_in), hook=hook)
    plugin.pytest_collection_modifyitems(config, items)
    run = [item.nodeid for item in items]
    assert run == ["a.py::alone", *(f"a.py::many[{i}]" for i in range(0, 7, one_in)), "b.py::many[0]"]
    assert len(run) == 2 + kept
    assert sorted(run + [item.nodeid for item in left_out]) == sorted(names)


def _file(plugin):
    return Path(getattr(plugin, "__file__", None) or "")
