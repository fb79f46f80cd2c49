"""The interface of agents to the rest of `workers/`: it has what it lists, and imports nothing before it is used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.workers.agents import interface


def listed() -> dict[str, str]:
    """The names that type checkers see, and the module of each in `workers/agents/`."""
    tree = ast.parse(Path(interface.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    prefix = "troupe.workers.agents."
    return {alias.name: (node.module or "").removeprefix(prefix) for node in imports for alias in node.names}


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    assert listed() == vars(interface)["_HOMES"]
    for name, module in listed().items():
        assert getattr(interface, name) is vars(importlib.import_module(f"troupe.workers.agents.{module}"))[name]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = vars(interface)["__getattr__"]("nothing")


def test_it_imports_nothing_before_a_name_is_used() -> None:
    module = "troupe.workers.agents"
    code = (
        f"import sys, {module}.interface; print(*sorted(name for name in sys.modules if name.startswith({module!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [module, f"{module}.interface"], done.stderr
