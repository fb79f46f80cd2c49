"""vLLM's parsers of tool calls (`roles.environment.tool_parser`): which ones there are, and which can read a turn.

vLLM is not imported here, because that takes seconds: names and classes are read from its source.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from troupe.orchestrator.errors import nearest

_PACKAGE = "vllm.tool_parsers"
_TABLE = "_TOOL_PARSERS_TO_REGISTER"
_METHOD = "extract_tool_calls"
_ABSTRACT = "NotImplementedError"


def parser_problem(name: str) -> str:
    """Why the installed vLLM cannot read a turn with the parser of this name; empty if it can, or is not installed."""
    parsers = _parsers()
    if not parsers:
        return ""
    if name not in parsers:
        return f"vLLM has no tool parser '{name[:60]}' ({nearest(name, parsers) or ', '.join(sorted(parsers))})"
    file, class_name = parsers[name]
    if _reads_text(f"{_PACKAGE}.{file}", class_name) is False:
        return f"vLLM's tool parser {name} does not read the text of a turn; choose another one"
    return ""


@cache
def _parsers() -> dict[str, tuple[str, str]]:
    """(module, class) of every parser; empty without vLLM."""
    for node in _statements(_PACKAGE):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [_TABLE]:
            return ast.literal_eval(node.value)
    return {}


def _reads_text(module: str, name: str) -> bool | None:
    """Whether a class has the method, not only its abstract form, or None if the source does not tell."""
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), None)
            if found is not None:
                return _reads_text(node.module, found)
        if isinstance(node, ast.ClassDef) and node.name == name:
            own = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == _METHOD]
            if own:
                return not any(isinstance(one, ast.Raise) and _ABSTRACT in ast.unparse(one) for one in own[0].body)
            bases = (_reads_text(module, ast.unparse(base)) for base in node.bases)
            return next((reads for reads in bases if reads is not None), None)
    return None


@cache
def _statements(module: str) -> list[ast.stmt]:
    """The statements of a module of vLLM; none without it."""
    top, *rest = module.split(".")
    package = importlib.util.find_spec(top) if top == "vllm" else None
    if package is None or package.origin is None:
        return []
    path = Path(package.origin).parent.joinpath(*rest)
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
